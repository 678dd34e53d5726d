//! An entry as a safetensors file: `tokens`, `target.*` and `draft.*`, and in the header what they belong
//! to and a digest of everything.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use plugin_api::{DType, Result, RowState, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sha2::{Digest, Sha256};

use super::Entry;
use crate::backend;
use crate::checkpoint::{Notes, Stored, parse};
use crate::error::LoadError;
use crate::text::hex;

/// The version of this format.
const FORMAT: &str = "mlxhost.prefix/1";

/// An entry with its numbers on the CPU: it can be written by any thread.
pub(super) struct Written {
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    notes: HashMap<String, String>,
}

impl Written {
    /// Copies an entry out.
    pub fn new(namespace: &str, entry: &Entry) -> Result<Self> {
        let tokens = Tensor::from_slice(&entry.tokens, &[entry.tokens.len() as i32])?;
        let mut tensors = vec![copied("tokens", &tokens)?];
        let mut notes = HashMap::from([
            ("format".to_owned(), FORMAT.to_owned()),
            ("namespace".to_owned(), namespace.to_owned()),
        ]);
        for (part, state) in [
            ("target", Some(&entry.target)),
            ("draft", entry.draft.as_ref()),
        ] {
            let Some(state) = state else { continue };
            notes.insert(format!("{part}.schema"), state.schema().to_owned());
            for (name, tensor) in state.tensors() {
                tensors.push(copied(&format!("{part}.{name}"), tensor)?);
            }
        }
        Ok(Self { tensors, notes })
    }

    /// Writes the file.
    pub fn write(mut self, path: &Path) -> std::result::Result<(), safetensors::SafeTensorError> {
        self.tensors.sort_by(|a, b| a.0.cmp(&b.0));
        let parts = self.tensors.iter().map(|(name, dtype, shape, bytes)| {
            (
                name.as_str(),
                dtype.to_string(),
                shape.as_slice(),
                Cow::from(bytes),
            )
        });
        self.notes
            .insert("sha256".to_owned(), digest(&self.notes, parts));
        let views = self.tensors.iter().map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
        });
        let views = views.collect::<std::result::Result<Vec<_>, _>>()?;
        safetensors::serialize_to_file(views, Some(self.notes), path)
    }
}

fn copied(name: &str, tensor: &Tensor) -> Result<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let dtype = match tensor.dtype() {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        DType::I32 => Dtype::I32,
        DType::BOOL => Dtype::BOOL,
        DType::I64 => Dtype::I64,
        other => {
            let problem = format!("elements of type {other:?} are not written");
            return Err(plugin_api::Error::failed(problem));
        }
    };
    let shape = tensor.shape().iter().map(|&n| n as usize).collect();
    Ok((name.to_owned(), dtype, shape, tensor.to_bytes()?))
}

/// Of everything that a file says: notes and tensors by name.
fn digest<'a>(
    notes: &Notes,
    tensors: impl Iterator<Item = (&'a str, String, &'a [usize], Cow<'a, [u8]>)>,
) -> String {
    let mut digest = Sha256::new();
    let mut add = |bytes: &[u8]| {
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(bytes);
    };
    let mut notes: Vec<_> = notes.iter().filter(|(key, _)| *key != "sha256").collect();
    notes.sort();
    for (key, value) in notes {
        add(key.as_bytes());
        add(value.as_bytes());
    }
    for (name, dtype, shape, bytes) in tensors {
        add(name.as_bytes());
        add(dtype.as_bytes());
        add(format!("{shape:?}").as_bytes());
        add(&bytes);
    }
    hex(&digest.finalize())
}

/// The entry of these tokens in the bytes of a file.
///
/// # Errors
/// It is damaged, or has something else.
pub(super) fn read(
    path: &Path,
    bytes: Vec<u8>,
    namespace: &str,
    tokens: &[i32],
) -> std::result::Result<Entry, LoadError> {
    let foreign = |what: &str| LoadError::mismatch(path, what);
    let (tensors, notes) = parse(path, bytes)?;
    let note = |key: &str| notes.get(key).map(String::as_str);
    if note("format") != Some(FORMAT) {
        return Err(foreign("it is not a state in this version's format"));
    }
    let parts = tensors.iter().map(|(name, tensor)| {
        let dtype = format!("{:?}", tensor.dtype).to_uppercase();
        let bytes = Cow::Owned(tensor.to_vec());
        (name.as_str(), dtype, tensor.shape.as_slice(), bytes)
    });
    if note("sha256") != Some(digest(&notes, parts).as_str()) {
        return Err(LoadError::malformed(path, "it is damaged"));
    }
    if note("namespace") != Some(namespace) {
        return Err(foreign("it is of another model or drafter"));
    }
    let states = states(&tensors, &notes, tokens);
    let states = states.map_err(|e| LoadError::malformed(path, e.message()))?;
    states.ok_or_else(|| foreign("it is of another text"))
}

fn states(tensors: &Stored, notes: &Notes, tokens: &[i32]) -> Result<Option<Entry>> {
    let processed = tokens.len() as u32 - 1;
    let state = |part: &str| {
        let schema = notes.get(&format!("{part}.schema"));
        schema.map(|schema| RowState::new(schema, processed))
    };
    let (mut target, mut draft) = (state("target"), state("draft"));
    for (name, stored) in tensors {
        let tensor = backend::tensor(stored)?;
        match name.split_once('.') {
            None if name == "tokens" && tensor.to_vec::<i32>()? != tokens => return Ok(None),
            Some(("target", name)) => target.iter_mut().for_each(|s| s.put(name, tensor.clone())),
            Some(("draft", name)) => draft.iter_mut().for_each(|s| s.put(name, tensor.clone())),
            _ => {}
        }
    }
    let target = target.filter(|_| tensors.contains_key("tokens"));
    let target = target.ok_or_else(|| plugin_api::Error::invalid("it has no state"))?;
    Entry::new(tokens.to_vec(), target, draft).map(Some)
}
