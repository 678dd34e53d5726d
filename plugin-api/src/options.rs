//! The user's `--drafter-option key=value` pairs.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Options by key. What a drafter does not take is refused after its `load`.
#[derive(Debug, Default)]
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// Collects pairs; a key that is given twice keeps its last value.
    pub fn new(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(pairs.into_iter().collect())
    }

    /// Takes an option as a number, text or flag.
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

    /// Takes an option that must be one of some names.
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
