//! The GGUF container: header, key/value pairs, tensor table. Nothing here knows what a model is.
//!
//! Counts and lengths come from the file, so none of them sizes an allocation: everything is walked with a
//! cursor that ends at the end of the file, and arrays stay where they are in the map.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use super::Quoted;
use super::metadata::{Array, ElementType, Metadata, Value};
use crate::checkpoint::Bytes;
use crate::error::LoadError;

pub(crate) const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// Far above what models have (thousands of tensors, dozens of keys).
const MAX_COUNT: u64 = 1 << 18;
/// The format's own limits: keys have up to 65535 bytes, tensors up to four dimensions.
const MAX_KEY: usize = 65_535;
const MAX_DIMS: u32 = 4;
/// Arrays of arrays are allowed, but nobody writes them; the walk over them is recursive.
const MAX_NESTING: u32 = 4;
const TRUNCATED: &str = "the file is damaged or incomplete: download it again";

/// A parsed file, up to the tensor data.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    /// Where the tensor data starts; at most the file's length.
    pub(super) data_start: usize,
}

/// A line of the tensor table.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// Outermost first (the file has them the other way round); 1 to 4 dimensions, none of them 0.
    pub(super) shape: Vec<usize>,
    /// The ggml type.
    pub(super) kind: u32,
    /// From the start of the tensor data; a multiple of the alignment. Not checked against the file's length.
    pub(super) offset: usize,
}

/// Reads everything before the tensor data of the file `bytes`.
pub(super) fn parse(path: &Path, bytes: &Bytes) -> Result<Container, LoadError> {
    let mut reader = Reader { path, bytes, at: 0 };
    if reader.take(4).is_ok_and(|magic| magic != MAGIC) || bytes.len() < 4 {
        return Err(LoadError::malformed(
            path,
            "not a GGUF file (it does not start with GGUF)",
        ));
    }
    match reader.u32()? {
        2 | 3 => {}
        version if (1..=3).contains(&version.swap_bytes()) => {
            return Err(LoadError::unsupported(path, "a big-endian GGUF file"));
        }
        version => {
            let what = format!("GGUF version {version}; versions 2 and 3 are supported");
            return Err(LoadError::unsupported(path, what));
        }
    }
    let tensor_count = reader.count("tensors")?;
    let pair_count = reader.count("metadata pairs")?;
    let metadata = Metadata::new(pairs(&mut reader, pair_count)?);
    let alignment = match metadata.value("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(_) => metadata.get_u64("general.alignment").unwrap_or(0),
    };
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        let what = "general.alignment is not a power of two up to 1 MiB";
        return Err(LoadError::malformed(path, what));
    }
    let tensors = table(&mut reader, tensor_count, alignment)?;
    let data_start = reader.at.next_multiple_of(alignment as usize);
    if data_start > bytes.len() && !tensors.is_empty() {
        return Err(reader.truncated());
    }
    Ok(Container {
        metadata,
        tensors,
        data_start: data_start.min(bytes.len()),
    })
}

fn pairs(reader: &mut Reader<'_>, count: u64) -> Result<BTreeMap<String, Value>, LoadError> {
    let mut pairs = BTreeMap::new();
    for _ in 0..count {
        let key = reader.string()?.to_owned();
        if key.len() > MAX_KEY {
            return Err(reader.malformed("a key of more than 65535 bytes"));
        }
        let kind = reader.element_type()?;
        let value = match kind {
            ElementType::Array => array(reader)?,
            kind => scalar(reader, kind)?,
        };
        if pairs.contains_key(&key) {
            return Err(reader.malformed(format!("key {} is there twice", Quoted(&key))));
        }
        pairs.insert(key, value);
    }
    Ok(pairs)
}

fn scalar(reader: &mut Reader<'_>, kind: ElementType) -> Result<Value, LoadError> {
    if kind == ElementType::String {
        return Ok(Value::Str(reader.string()?.to_owned()));
    }
    let bytes = reader.take(kind.size().unwrap_or(0))?;
    kind.decode(bytes)
        .ok_or_else(|| reader.malformed(format!("an invalid {kind}")))
}

fn array(reader: &mut Reader<'_>) -> Result<Value, LoadError> {
    let kind = reader.element_type()?;
    let len = reader.u64()?;
    let start = reader.at;
    skip_elements(reader, kind, len, 1)?;
    let bytes = reader.bytes.slice(start..reader.at);
    let (Some(bytes), Ok(len)) = (bytes, usize::try_from(len)) else {
        return Err(reader.truncated());
    };
    Ok(Value::Array(Array { kind, len, bytes }))
}

/// Walks over the elements of an array, so that what is kept of it is known to be well formed.
fn skip_elements(
    reader: &mut Reader<'_>,
    kind: ElementType,
    len: u64,
    depth: u32,
) -> Result<(), LoadError> {
    if let Some(size) = kind.size() {
        let total = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_mul(size));
        return match total {
            Some(total) => reader.take(total).map(|_| ()),
            None => Err(reader.truncated()),
        };
    }
    if depth > MAX_NESTING {
        return Err(reader.malformed("arrays nested too deeply"));
    }
    // However large `len` is, each turn consumes bytes, so the end of the file ends the loop.
    for _ in 0..len {
        if kind == ElementType::String {
            reader.string()?;
        } else {
            let kind = reader.element_type()?;
            let len = reader.u64()?;
            skip_elements(reader, kind, len, depth + 1)?;
        }
    }
    Ok(())
}

fn table(
    reader: &mut Reader<'_>,
    count: u64,
    alignment: u64,
) -> Result<Vec<TensorInfo>, LoadError> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..count {
        let name = reader.string()?;
        let quoted = Quoted(name);
        let dims = reader.u32()?;
        if dims == 0 || dims > MAX_DIMS {
            return Err(reader.malformed(format!("tensor {quoted} has {dims} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            match usize::try_from(reader.u64()?) {
                Ok(dim) if dim > 0 => shape.push(dim),
                _ => return Err(reader.malformed(format!("tensor {quoted} has an invalid shape"))),
            }
        }
        shape.reverse();
        let kind = reader.u32()?;
        let offset = reader.u64()?;
        let Ok(start) = usize::try_from(offset) else {
            return Err(reader.truncated());
        };
        if offset % alignment != 0 {
            let what = format!("tensor {quoted} is not aligned to {alignment} bytes");
            return Err(reader.malformed(what));
        }
        if !names.insert(name) {
            return Err(reader.malformed(format!("tensor {quoted} is there twice")));
        }
        tensors.push(TensorInfo {
            name: name.to_owned(),
            shape,
            kind,
            offset: start,
        });
    }
    Ok(tensors)
}

/// A cursor over the file that can't leave it.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> Reader<'a> {
    fn malformed(&self, what: impl AsRef<str>) -> LoadError {
        let what = format!("{} (before byte {})", what.as_ref(), self.at);
        LoadError::malformed(self.path, what).remedy(TRUNCATED)
    }

    fn truncated(&self) -> LoadError {
        let what = format!("it ends too early, at byte {}", self.bytes.len());
        LoadError::malformed(self.path, what).remedy(TRUNCATED)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], LoadError> {
        let end = self.at.checked_add(len);
        match end.and_then(|end| self.bytes.get(self.at..end)) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => Err(self.truncated()),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LoadError> {
        let bytes = self.take(N)?;
        <[u8; N]>::try_from(bytes).map_err(|_| self.truncated())
    }

    fn u32(&mut self) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, what: &str) -> Result<u64, LoadError> {
        let count = self.u64()?;
        if count > MAX_COUNT {
            return Err(self.malformed(format!("it claims {count} {what}")));
        }
        Ok(count)
    }

    fn string(&mut self) -> Result<&'a str, LoadError> {
        let Ok(len) = usize::try_from(self.u64()?) else {
            return Err(self.truncated());
        };
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| self.malformed("a string that is not UTF-8"))
    }

    fn element_type(&mut self) -> Result<ElementType, LoadError> {
        let id = self.u32()?;
        ElementType::from_id(id)
            .ok_or_else(|| self.malformed(format!("unknown metadata type {id}")))
    }
}
