//! The user's `--drafter-option key=value` pairs.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Options by key. What a drafter does not take is refused after its `load`.
///
/// ```
/// use plugin_api::Options;
///
/// let pairs = [("window", "64"), ("order", "newest")];
/// let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
/// let mut options = Options::new(pairs);
/// assert_eq!(options.take::<usize>("window")?, Some(64));
/// // What is not there has a default; what is there can be taken once.
/// assert_eq!(options.take("window")?.unwrap_or(16), 16);
/// let newest = options.take_choice("order", &[("newest", true), ("oldest", false)])?;
/// assert_eq!(newest, Some(true));
///
/// let mut wrong = Options::new([("window".to_owned(), "wide".to_owned())]);
/// let error = wrong.take::<usize>("window").unwrap_err();
/// assert_eq!(error.message(), "drafter option window=wide is not a valid value");
/// # Ok::<(), plugin_api::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// Collects pairs; a key that is given twice keeps its last value.
    pub fn new(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(pairs.into_iter().collect())
    }

    /// Takes an option as a number, text or flag; none when it was not given.
    ///
    /// # Errors
    /// It is no value of that type.
    pub fn take<T: FromStr>(&mut self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.0.remove(key) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(parsed) => Ok(Some(parsed)),
            Err(_) => Err(Error::invalid(format!(
                "drafter option {key}={value} is not a valid value"
            ))),
        }
    }

    /// Takes an option that must be one of some names; none when it was not given.
    ///
    /// # Errors
    /// It is none of them; the message lists them.
    pub fn take_choice<T: Clone>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>> {
        let Some(value) = self.0.remove(key) else {
            return Ok(None);
        };
        match choices.iter().find(|(name, _)| *name == value) {
            Some((_, choice)) => Ok(Some(choice.clone())),
            None => {
                let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
                Err(Error::invalid(format!(
                    "drafter option {key}={value}: expected {}",
                    names.join(" or ")
                )))
            }
        }
    }

    /// Refuses what was not taken.
    pub(crate) fn finish(self) -> Result<()> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(key) => Err(Error::invalid(format!(
                "drafter option {key} is not known; `mlxhost plugins inspect` lists the options"
            ))),
        }
    }
}
