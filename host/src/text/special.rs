//! What the configuration files beside a `tokenizer.json` say: special tokens, where to stop, the
//! chat template.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::files;
use crate::error::LoadError;

/// The special tokens that chat templates may name.
pub(super) const NAMES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// More ids than this do not end a text.
const MAX_EOS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Special {
    /// The text of each token that is named.
    pub(super) tokens: BTreeMap<&'static str, String>,
    /// Whether encoding has to begin with `bos_token`, whatever `tokenizer.json` says.
    pub(super) add_bos: bool,
    /// The ids at which the model is said to stop; `tokens["eos_token"]` is another.
    pub(super) eos_ids: Vec<i32>,
    pub(super) chat_template: Option<String>,
}

impl Special {
    /// Reads the files of `dir`. Each of them may be missing.
    ///
    /// # Errors
    /// A file can't be read, or what it says about tokens is not what can be said about tokens.
    pub(super) fn from_dir(dir: &Path) -> Result<Self, LoadError> {
        let read = |name: &str| files::json_optional(dir, name);
        let config = read("tokenizer_config.json")?.unwrap_or_default();
        let map = read("special_tokens_map.json")?.unwrap_or_default();
        let mut special = Self::default();
        for name in NAMES {
            let token = [&config, &map]
                .into_iter()
                .find_map(|f| token(f.get(name)?));
            if let Some(token) = token {
                special.tokens.insert(name, token.to_owned());
            }
        }
        special.add_bos = config.get("add_bos_token") == Some(&Value::Bool(true));

        for name in ["generation_config.json", "config.json"] {
            let file = read(name)?.unwrap_or_default();
            let text = file.get("text_config").unwrap_or(&Value::Null);
            let ids = [&file, text].into_iter().find_map(|f| {
                let ids = f.get("eos_token_id")?;
                (!ids.is_null()).then_some(ids)
            });
            if let Some(ids) = ids {
                special.eos_ids = eos_ids(ids).ok_or_else(|| {
                    let what = "eos_token_id is not a token id or a list of them";
                    LoadError::malformed(dir.join(name), what)
                })?;
                break;
            }
        }

        special.chat_template = match files::text_optional(dir, "chat_template.jinja")? {
            Some(template) => Some(template),
            None => config.get("chat_template").and_then(template),
        };
        Ok(special)
    }
}

/// A token is given as its text, or as an object with its text.
fn token(value: &Value) -> Option<&str> {
    value.get("content").unwrap_or(value).as_str()
}

fn eos_ids(value: &Value) -> Option<Vec<i32>> {
    let id = |v: &Value| i32::try_from(v.as_u64()?).ok();
    match value {
        Value::Array(ids) if ids.len() > MAX_EOS => None,
        Value::Array(ids) => ids.iter().map(id).collect(),
        one => Some(vec![id(one)?]),
    }
}

/// The template, or the one that is called "default" if there are several.
fn template(value: &Value) -> Option<String> {
    let several = match value {
        Value::String(one) => return Some(one.clone()),
        several => several.as_array()?,
    };
    let named = |t: &&Value| t.get("name").and_then(Value::as_str) == Some("default");
    let default = several.iter().find(named)?;
    Some(default.get("template")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Result<Special, LoadError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        Special::from_dir(dir.path())
    }

    #[test]
    fn no_files_say_nothing() {
        let special = read(&[]).unwrap();
        assert!(special.tokens.is_empty() && special.eos_ids.is_empty() && !special.add_bos);
        assert!(special.chat_template.is_none());
    }

    #[test]
    fn both_forms_of_everything() {
        let special = read(&[
            (
                "tokenizer_config.json",
                r#"{"bos_token": {"content": "<s>"}, "eos_token": null, "add_bos_token": true,
                    "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
            ),
            ("special_tokens_map.json", r#"{"bos_token": "other", "eos_token": "</s>"}"#),
            ("generation_config.json", r#"{"eos_token_id": [7, 8]}"#),
            ("config.json", r#"{"eos_token_id": 1}"#),
        ])
        .unwrap();
        assert_eq!(special.tokens["bos_token"], "<s>");
        assert_eq!(special.tokens["eos_token"], "</s>");
        assert!(special.add_bos);
        assert_eq!(special.eos_ids, [7, 8]);
        assert_eq!(special.chat_template.as_deref(), Some("d"));
    }

    #[test]
    fn a_template_of_its_own_wins_and_nested_configs_count() {
        let special = read(&[
            ("tokenizer_config.json", r#"{"chat_template": "a"}"#),
            ("chat_template.jinja", "b"),
            ("generation_config.json", "{}"),
            (
                "config.json",
                r#"{"eos_token_id": null, "text_config": {"eos_token_id": 3}}"#,
            ),
        ])
        .unwrap();
        assert_eq!(special.chat_template.as_deref(), Some("b"));
        assert_eq!(special.eos_ids, [3]);
    }

    #[test]
    fn ids_that_are_none_are_refused() {
        for ids in ["-1", "\"</s>\"", "[1, null]", "99999999999", "{}"] {
            let text = format!("{{\"eos_token_id\": {ids}}}");
            let error = read(&[("config.json", &text)]).unwrap_err();
            assert!(error.to_string().contains("eos_token_id"), "{error}");
        }
    }
}
