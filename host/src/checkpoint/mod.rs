//! Models and drafters on disk: a config and named tensors, whatever the file format.
//!
//! Two kinds are read: a directory in the Hugging Face layout (`config.json` + safetensors, single or
//! sharded), and a `.gguf` file. A GGUF model is presented in the terms of the former (config keys, tensor
//! names, MLX affine quantization), so nothing outside this module knows that format, except that a
//! tokenizer may be built from [`Checkpoint::gguf`].
//!
//! Weights are memory-mapped and never read before they are asked for. Everything that is read is bounded by
//! the size of the file it comes from; a damaged or hostile file ends in a [`LoadError`].

pub mod gguf;
mod safetensors;
mod tensor;
mod write;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::LoadError;
pub(crate) use safetensors::{Notes, Stored, parse};
use tensor::Contents;
pub use tensor::{Bytes, DType, TensorData};
pub use write::{TensorSpec, Writer};

/// `config.json` is a few kilobytes; more than this is not one.
const MAX_CONFIG: u64 = 16 << 20;
/// What a config may be called, by preference.
const CONFIGS: [&str; 2] = ["config.json", "dspark.json"];
/// There is one, mostly.
const MAX_ARCHITECTURES: usize = 8;
/// Characters of a name that a message shows.
const MAX_QUOTED: usize = 120;

const EXPECTED: &str = "expected a directory with config.json and *.safetensors, or a .gguf file";

/// A model or drafter on disk: its config and its tensors by name.
///
/// Immutable, `Send + Sync`; wrap it in an `Arc` to share it. It maps its files for as long as it, or any
/// [`TensorData`] taken from it, lives: see [`Bytes`] for what that means when files change.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: Value,
    tensors: BTreeMap<String, Entry>,
    gguf: Option<gguf::Metadata>,
}

/// Where one tensor comes from.
#[derive(Debug)]
enum Entry {
    /// The bytes in the file are the tensor.
    Stored(TensorData),
    /// The file has it in an element type that nothing here computes with.
    Refused { dtype: String, bytes: u64 },
    /// Made from the file's bytes when asked for.
    Converted(gguf::Converted),
}

impl Checkpoint {
    /// Opens a directory (`config.json` + safetensors) or a `.gguf` file.
    ///
    /// Reads headers only. With `model.safetensors.index.json`, the tensors are those of its `weight_map`;
    /// without, those of `model.safetensors`, else of every `model*.safetensors`, else of every
    /// `*.safetensors` but `consolidated*`.
    ///
    /// # Errors
    ///
    /// The path or a file of it is missing, unreadable, damaged or of an unsupported kind. The error names
    /// the file, and the remedy where there is one.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let kind = std::fs::metadata(path).map_err(|e| LoadError::new(path, e).remedy(EXPECTED))?;
        if kind.is_dir() {
            let config = read_config(path)?;
            let tensors = safetensors::open_dir(path)?;
            return Ok(Self {
                path: path.to_owned(),
                config,
                tensors,
                gguf: None,
            });
        }
        let bytes = Bytes::map(path).map_err(|e| e.remedy(EXPECTED))?;
        // By content first: files in download caches have no extension.
        if bytes.starts_with(gguf::MAGIC) || has_extension(path, "gguf") {
            return Self::from_gguf(path, bytes);
        }
        let error = LoadError::unsupported(path, "not a directory and not a GGUF file");
        Err(if has_extension(path, "safetensors") {
            error.remedy("pass the directory that holds it and config.json")
        } else {
            error.remedy(EXPECTED)
        })
    }

    fn from_gguf(path: &Path, bytes: Bytes) -> Result<Self, LoadError> {
        let model = gguf::load(path, &bytes)?;
        Ok(Self {
            path: path.to_owned(),
            config: model.config,
            tensors: model.tensors,
            gguf: Some(model.metadata),
        })
    }

    /// The path it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json` as read, always an object; for GGUF a synthesized one in Hugging Face terms.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// What the config says this is, the most telling first: the projector of a repackaged drafter, what
    /// speculators call themselves, architectures, `model_type`, and the `kind` of a DSpark snapshot.
    pub fn families(&self) -> Vec<&str> {
        let text = |key: &str| self.config.get(key).and_then(Value::as_str);
        let architectures = self.config.get("architectures").and_then(Value::as_array);
        let architectures = architectures.into_iter().flatten();
        let projector = self.config.pointer("/dflash_config/projector_type");
        let projector = projector.and_then(Value::as_str);
        let named = architectures.filter_map(Value::as_str);
        let speculator = text("speculators_model_type");
        (projector.into_iter())
            .chain(speculator)
            .chain(named)
            .take(MAX_ARCHITECTURES)
            .chain(text("model_type"))
            .chain(text("kind"))
            .filter(|family| !family.is_empty())
            .collect()
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name; `None` when there is none.
    ///
    /// Nothing is read yet, but for scales of a quantized GGUF tensor, which decide their type.
    ///
    /// # Errors
    ///
    /// Its element type is one that is not supported (`F8_E4M3`, ...); the error names tensor and type.
    pub fn tensor(&self, name: &str) -> Option<Result<TensorData, LoadError>> {
        Some(match self.tensors.get(name)? {
            Entry::Stored(tensor) => Ok(tensor.clone()),
            Entry::Converted(tensor) => Ok(tensor.describe()),
            Entry::Refused { dtype, .. } => Err(LoadError::unsupported(
                &self.path,
                format!(
                    "tensor {} has elements of type {dtype}, which is not supported",
                    Quoted(name)
                ),
            )),
        })
    }

    /// The file's own metadata (tokenizer included) when it is a GGUF file.
    pub fn gguf(&self) -> Option<&gguf::Metadata> {
        self.gguf.as_ref()
    }

    /// Says that no tensor is needed soon: pages of files do not count as memory of this process then. They can be
    /// read again.
    pub fn release(&self) {
        for entry in self.tensors.values() {
            match entry {
                Entry::Stored(tensor) => tensor.release(),
                Entry::Converted(tensor) => tensor.source.release(),
                Entry::Refused { .. } => {}
            }
        }
    }

    /// Bytes of all tensors together, as [`Checkpoint::tensor`] gives them; where only reading them tells,
    /// what is usual.
    pub fn bytes(&self) -> u64 {
        let sizes = self.tensors.values().map(Entry::bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// Bytes of the tensor of that name, without reading or converting it; `None` when there is none.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(Entry::bytes)
    }
}

impl Entry {
    fn bytes(&self) -> u64 {
        match self {
            Entry::Stored(tensor) => tensor.len() as u64,
            Entry::Refused { bytes, .. } => *bytes,
            Entry::Converted(tensor) => tensor.len() as u64,
        }
    }
}

/// Text from a file, for a message: quoted, with control characters escaped, and cut where it is longer
/// than any real name (a hostile file could have megabytes of it).
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(MAX_QUOTED) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}...", self.0.get(..end).unwrap_or_default()),
        }
    }
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension()
        .is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

/// Reads `config.json` of `dir`, or the file that DSpark snapshots have instead.
fn read_config(dir: &Path) -> Result<Value, LoadError> {
    for file in CONFIGS {
        if let Some(config) = read_json_object(&dir.join(file), MAX_CONFIG)? {
            return Ok(config);
        }
    }
    Err(no_config(dir))
}

/// A directory without config.json: say what would have been right, most of all when it is near at hand.
fn no_config(dir: &Path) -> LoadError {
    let error = LoadError::missing(dir, "there is no config.json in it");
    let ggufs: Vec<OsString> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name()))
        .filter(|name| has_extension(Path::new(name), "gguf"))
        .take(2)
        .collect();
    match ggufs.as_slice() {
        [one] => error.remedy(format!("pass the file {}", dir.join(one).display())),
        _ => error.remedy(EXPECTED),
    }
}

/// Reads a JSON object from a file of at most `limit` bytes; `None` when there is no such file.
fn read_json_object(path: &Path, limit: u64) -> Result<Option<Value>, LoadError> {
    let io = |error| LoadError::new(path, error);
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
        Ok(kind) if !kind.is_file() => {
            return Err(LoadError::unsupported(path, "not a regular file"));
        }
        Ok(kind) if kind.len() > limit => {
            let what = format!("larger than {} MiB, which no such file is", limit >> 20);
            return Err(LoadError::malformed(path, what));
        }
        Ok(_) => {}
    }
    let mut text = Vec::new();
    let file = File::open(path).map_err(io)?;
    // Bounded again, for a file that grows or whose length is not told.
    file.take(limit).read_to_end(&mut text).map_err(io)?;
    // serde_json's message ends in the line and the column.
    let value: Value = serde_json::from_slice(&text)
        .map_err(|e| LoadError::malformed(path, format!("not valid JSON: {e}")))?;
    if !value.is_object() {
        return Err(LoadError::malformed(path, "valid JSON, but not an object"));
    }
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(path: &Path) -> String {
        Checkpoint::open(path).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_a_checkpoint_is_told_what_would_be_one() {
        fn shared<T: Send + Sync>() {}
        shared::<Checkpoint>();

        let dir = tempfile::tempdir().unwrap();
        let empty = fails(dir.path());
        assert!(
            empty.contains("no config.json") && empty.contains(EXPECTED),
            "{empty}"
        );
        assert!(fails(&dir.path().join("nowhere")).contains(EXPECTED));
        let file = dir.path().join("notes.txt");
        std::fs::write(&file, "hello").unwrap();
        assert!(fails(&file).contains(EXPECTED));
        let gguf = dir.path().join("m.gguf");
        std::fs::write(&gguf, "hello").unwrap();
        assert!(fails(&gguf).contains("GGUF"));
        assert!(fails(dir.path()).contains("pass the file"));
    }

    #[test]
    fn a_broken_config_is_located() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.json");
        std::fs::write(&config, "{\n  \"a\": 1,\n  oops\n}").unwrap();
        let message = fails(dir.path());
        assert!(
            message.contains("config.json") && message.contains("line 3 column 3"),
            "{message}"
        );
        std::fs::write(&config, "[1]").unwrap();
        assert!(fails(dir.path()).contains("not an object"));
        std::fs::write(&config, "[".repeat(100_000)).unwrap();
        assert!(fails(dir.path()).contains("recursion limit"));
        let file = File::create(&config).unwrap();
        file.set_len(MAX_CONFIG + 1).unwrap();
        assert!(fails(dir.path()).contains("larger than 16 MiB"));
        std::fs::write(&config, "{}").unwrap();
        assert!(fails(dir.path()).contains("safetensors"));
    }

    #[test]
    fn quotes_are_short_and_on_one_line() {
        assert_eq!(Quoted("a.weight").to_string(), "\"a.weight\"");
        assert_eq!(Quoted("a\n\u{1b}").to_string(), r#""a\n\u{1b}""#);
        let long = Quoted(&"ü".repeat(1 << 20)).to_string();
        assert_eq!(long.chars().count(), MAX_QUOTED + 5);
    }
}
