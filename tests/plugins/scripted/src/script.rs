//! The script's file.

use std::path::Path;
use std::rc::Rc;

use plugin_api::{Error, Result};
use serde_json::Value;

/// What the file says.
#[derive(Clone)]
pub struct Script {
    pub entries: Rc<[Entry]>,
    pub depth: u32,
}

/// What it says about one request.
#[derive(Clone)]
pub struct Entry {
    pub prompt: Rc<[i32]>,
    pub seed: Option<u64>,
    pub answer: Rc<[i32]>,
    /// How many tokens of the drafts are right, by round, from the beginning again after the last.
    pub accept: Rc<[usize]>,
}

impl Script {
    pub fn read(path: &Path) -> Result<Self> {
        let wrong = |what: &str| Error::invalid(format!("{}: {what}", path.display()));
        let text = std::fs::read(path).map_err(|e| wrong(&e.to_string()))?;
        let value: Value = serde_json::from_slice(&text).map_err(|e| wrong(&e.to_string()))?;
        let accept = value.get("accept");
        let rows = value.get("rows").and_then(Value::as_array);
        let entries: Option<Rc<[Entry]>> = rows
            .ok_or_else(|| wrong("no rows"))?
            .iter()
            .map(|row| {
                let entry = Entry {
                    prompt: numbers(row.get("prompt")?)?,
                    seed: row.get("seed").and_then(Value::as_u64),
                    answer: numbers(row.get("answer")?)?,
                    accept: numbers(row.get("accept").or(accept)?)?,
                };
                (!entry.accept.is_empty()).then_some(entry)
            })
            .collect();
        let depth = value.get("depth").and_then(Value::as_u64);
        Ok(Self {
            entries: entries.ok_or_else(|| wrong("a row is not complete"))?,
            depth: depth.ok_or_else(|| wrong("no depth"))? as u32,
        })
    }

    /// The entry of a request.
    pub fn find(&self, prompt: &[i32], seed: u64) -> Result<Entry> {
        let fits = |entry: &&Entry| {
            *entry.prompt == *prompt && entry.seed.is_none_or(|wanted| wanted == seed)
        };
        let entry = self.entries.iter().find(fits).cloned();
        entry.ok_or_else(|| Error::failed("the script does not have this prompt"))
    }
}

fn numbers<T: TryFrom<i64>>(list: &Value) -> Option<Rc<[T]>> {
    let list = list.as_array()?.iter();
    list.map(|n| T::try_from(n.as_i64()?).ok()).collect()
}
