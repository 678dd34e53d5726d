//! What a checkpoint's `generation_config.json` says about sampling and where to stop.

use std::path::Path;

use serde_json::Value;

use crate::error::LoadError;

use super::files;

/// Sampling defaults of a checkpoint. What the file does not say is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// `false` asks for greedy decoding, whatever the temperature.
    pub do_sample: Option<bool>,
    /// At least 0.
    pub temperature: Option<f32>,
    /// Nucleus mass, 0 to 1.
    pub top_p: Option<f32>,
    /// How many of the likeliest tokens to keep; 0 means all.
    pub top_k: Option<u32>,
    /// Least probability relative to the likeliest token, 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: Option<f32>,
    /// How many tokens to generate at most.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads `dir/generation_config.json`. Without that file, every field is `None`.
    ///
    /// # Errors
    /// The file can't be read, is not a JSON object, or one of the values above is out of range.
    pub fn from_dir(dir: &Path) -> Result<Self, LoadError> {
        let Some(config) = files::json_optional(dir, "generation_config.json")? else {
            return Ok(Self::default());
        };
        let number = |key: &str, least: f64, most: f64| -> Result<Option<f32>, LoadError> {
            let value = match config.get(key) {
                None | Some(Value::Null) => return Ok(None),
                Some(value) => value.as_f64().filter(|v| (least..=most).contains(v)),
            };
            match value {
                // A positive value that f32 would round to zero or infinity is out of range too.
                Some(v) if (v as f32).is_finite() => Ok(Some(v as f32)),
                _ => Err(invalid(dir, key)),
            }
        };
        let count = |key: &str| -> Result<Option<u32>, LoadError> {
            let value = match config.get(key) {
                None | Some(Value::Null) => return Ok(None),
                Some(value) => value.as_u64().and_then(|v| u32::try_from(v).ok()),
            };
            value.map(Some).ok_or_else(|| invalid(dir, key))
        };
        let do_sample = match config.get("do_sample") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(b)) => Some(*b),
            Some(_) => return Err(invalid(dir, "do_sample")),
        };
        Ok(Self {
            do_sample,
            temperature: number("temperature", 0.0, f64::MAX)?,
            top_p: number("top_p", 0.0, 1.0)?,
            top_k: count("top_k")?,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number(
                "repetition_penalty",
                f64::from(f32::MIN_POSITIVE),
                f64::MAX,
            )?,
            max_new_tokens: count("max_new_tokens")?,
        })
    }
}

fn invalid(dir: &Path, key: &str) -> LoadError {
    let what = format!("{key} has no valid value");
    LoadError::malformed(dir.join("generation_config.json"), what)
        .remedy("correct or delete that line")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GenerationDefaults, LoadError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        GenerationDefaults::from_dir(dir.path())
    }

    #[test]
    fn reads_what_is_there() {
        let got = read(r#"{"do_sample":true,"temperature":0.6,"top_p":0.95,"top_k":20,"x":{}}"#);
        let want = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            ..Default::default()
        };
        assert_eq!(got.unwrap(), want);
        assert_eq!(
            read(r#"{"top_k":null}"#).unwrap(),
            GenerationDefaults::default()
        );
    }

    #[test]
    fn a_missing_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let got = GenerationDefaults::from_dir(dir.path()).unwrap();
        assert_eq!(got, GenerationDefaults::default());
    }

    #[test]
    fn senseless_values_are_refused_by_name() {
        for (key, value) in [
            ("temperature", "-1"),
            ("temperature", "1e300"),
            ("temperature", "\"hot\""),
            ("top_p", "1.5"),
            ("top_k", "-1"),
            ("top_k", "99999999999"),
            ("min_p", "[]"),
            ("repetition_penalty", "0"),
            ("do_sample", "1"),
        ] {
            let error = read(&format!("{{\"{key}\": {value}}}")).unwrap_err();
            assert!(error.to_string().contains(key), "{key}: {error}");
        }
    }
}
