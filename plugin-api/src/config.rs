//! Typed, bounded access to a JSON config, with errors that name the file and the key.

use serde_json::Value;

use crate::error::{Error, Result};

/// The largest size (a width, a count) that a config may state.
const MAX_SIZE: i64 = 1 << 26;

/// A JSON object and where it came from.
///
/// ```
/// use plugin_api::Config;
///
/// let text = r#"{"hidden_size": 576, "rope_theta": 1e4, "layers": 0}"#;
/// let config = Config::parse(text, "head/config.json")?;
/// assert_eq!(config.size("hidden_size")?, 576);
/// assert_eq!(config.opt_float("rope_theta")?, Some(1e4));
/// assert_eq!(config.opt_bool("tied")?, None);
/// // Errors name the file and the key.
/// let error = config.size("layers").unwrap_err();
/// assert!(error.message().starts_with("head/config.json: `layers` is 0"));
/// # Ok::<(), plugin_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    value: Value,
    origin: String,
}

impl Config {
    /// Parses JSON text; `origin` is the path that errors name.
    pub fn parse(text: &str, origin: impl Into<String>) -> Result<Self> {
        let origin = origin.into();
        let value: Value =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("{origin}: {e}")))?;
        Self::new(value, origin)
    }

    /// Wraps a JSON object.
    pub fn new(value: Value, origin: impl Into<String>) -> Result<Self> {
        let origin = origin.into();
        if value.is_object() {
            Ok(Self { value, origin })
        } else {
            Err(Error::invalid(format!("{origin}: must be a JSON object")))
        }
    }

    /// The file (and section) that errors name.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The raw value of a key; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// An error about a key of this config.
    pub fn error(&self, key: &str, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}: `{key}` {problem}", self.origin))
    }

    fn required<T>(&self, key: &str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// An object under a key.
    pub fn section(&self, key: &str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => Self::new(value.clone(), format!("{}: {key}", self.origin)).map(Some),
        }
    }

    /// A size: an integer in `1..=2^26`.
    pub fn size(&self, key: &str) -> Result<i32> {
        self.required(key, self.opt_size(key))
    }

    /// A size that may be absent.
    pub fn opt_size(&self, key: &str) -> Result<Option<i32>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_i64() {
                Some(n) if (1..=MAX_SIZE).contains(&n) => Ok(Some(n as i32)),
                _ => Err(self.error(key, format!("is {value}, expected 1 to {MAX_SIZE}"))),
            },
        }
    }

    /// Refuses heads (stated under `key`) that are together wider than any size may be, so that
    /// layers can multiply the two numbers.
    pub fn check_heads(&self, key: &str, heads: i32, dim: i32) -> Result<()> {
        if i64::from(heads) * i64::from(dim) > MAX_SIZE {
            let problem = format!("is {heads}, which is too many with {dim} dimensions each");
            return Err(self.error(key, problem));
        }
        Ok(())
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<f32> {
        self.required(key, self.opt_float(key))
    }

    /// A finite number that may be absent.
    pub fn opt_float(&self, key: &str) -> Result<Option<f32>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().map(|x| x as f32) {
                Some(x) if x.is_finite() => Ok(Some(x)),
                _ => Err(self.error(key, format!("is {value}, expected a number"))),
            },
        }
    }

    /// A flag that may be absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_bool() {
                Some(flag) => Ok(Some(flag)),
                None => Err(self.error(key, format!("is {value}, expected true or false"))),
            },
        }
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.required(key, self.opt_str(key))
    }

    /// A text that may be absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some(text) => Ok(Some(text)),
                None => Err(self.error(key, format!("is {value}, expected a text"))),
            },
        }
    }

    /// Refuses keys that are not among these: one of a newer format may change what is computed.
    pub fn only(&self, what: &str, known: &[&str]) -> Result<()> {
        let keys = self.value.as_object().into_iter().flatten();
        let mut unknown =
            keys.filter(|(key, value)| !known.contains(&key.as_str()) && !value.is_null());
        match unknown.next() {
            Some((key, _)) => {
                let key = key.chars().take(60).collect::<String>();
                let problem = format!("is no key of `{what}` that this build knows");
                Err(self.error(key.escape_default().to_string().as_str(), problem))
            }
            None => Ok(()),
        }
    }

    /// What `layer_types` says of each of the `num_hidden_layers`, by name; may be absent.
    pub fn layer_types<T: Copy>(&self, names: &[(&str, T)]) -> Result<Option<Vec<T>>> {
        let count = self.size("num_hidden_layers")?;
        let Some(listed) = self.get("layer_types") else {
            return Ok(None);
        };
        let kind = |item: &Value| {
            let name = item.as_str()?;
            let (_, kind) = names.iter().find(|(known, _)| *known == name)?;
            Some(*kind)
        };
        let items = listed.as_array();
        match items.and_then(|items| items.iter().map(kind).collect::<Option<Vec<_>>>()) {
            Some(kinds) if kinds.len() == count as usize => Ok(Some(kinds)),
            _ => {
                let names: Vec<_> = names.iter().map(|(name, _)| *name).collect();
                let names = names.join(" or ");
                let expected =
                    format!("must list {count} times {names}, as num_hidden_layers says");
                Err(self.error("layer_types", expected))
            }
        }
    }

    /// A list of integers that fit `i32`; may be absent.
    pub fn opt_ints(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let ints = value.as_array().and_then(|items| {
            items
                .iter()
                .map(|v| v.as_i64().and_then(|n| i32::try_from(n).ok()))
                .collect::<Option<Vec<_>>>()
        });
        match ints {
            Some(ints) => Ok(Some(ints)),
            None => Err(self.error(key, "must be a list of integers")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_file_section_and_key() {
        let config = Config::parse(r#"{"text_config": {"hidden_size": -3}}"#, "d/config.json")
            .expect("valid JSON");
        let text = config.section("text_config").unwrap().unwrap();
        let message = text.size("hidden_size").unwrap_err().to_string();
        assert!(
            message.contains("d/config.json: text_config: `hidden_size` is -3"),
            "{message}"
        );
        assert!(
            text.size("layers")
                .unwrap_err()
                .to_string()
                .contains("is missing")
        );
        assert!(Config::parse("[1]", "x").is_err());
        assert!(Config::parse("{", "x").is_err());
    }
}
