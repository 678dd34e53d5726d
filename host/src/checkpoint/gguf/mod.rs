//! GGUF files (versions 2 and 3, architecture `llama`), presented as a Hugging Face checkpoint.
//!
//! Tensor types F32, F16, Q4_0, Q4_1 and Q8_0 are read. A quantized matrix `X.weight` appears as the MLX
//! affine triple of group size 32: `X.weight` (u32 `[out, in * bits / 32]`), `X.scales` and `X.biases`
//! (`[out, in / 32]`, f16 for Q4_1, else f32), which holds the same values exactly, and the config's
//! `quantization` says so.
//! Query and key rows are put back into the order of Hugging Face, so half-split rope applies to them.
//! The factors of llama 3 rope scaling, if the file has them, are the tensor `rope_freqs.weight`
//! (f32 `[head_dim / 2]`): each rotation frequency is to be divided by its factor.

mod convert;
#[cfg(test)]
mod fixture;
mod llama;
mod metadata;
mod parse;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{Bytes, Contents, Entry, Quoted, TensorData};
use crate::error::LoadError;
use convert::{BLOCK, Kind, Part};
use llama::{Llama, Target};
use parse::TensorInfo;

pub(super) use convert::Converted;
pub use metadata::Metadata;
pub(super) use parse::MAGIC;

/// A GGUF model in the terms of the rest of the house.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) config: Value,
    pub(super) tensors: BTreeMap<String, Entry>,
    pub(super) metadata: Metadata,
}

/// Reads the GGUF file at `path` whose contents are `file`; headers only.
pub(super) fn load(path: &Path, file: &Bytes) -> Result<Model, LoadError> {
    let container = parse::parse(path, file)?;
    let llama = Llama::read(path, &container.metadata)?;
    if llama.layers > container.tensors.len() as u64 {
        let (layers, tensors) = (llama.layers, container.tensors.len());
        let what = format!("llama.block_count is {layers}, but there are {tensors} tensors");
        return Err(LoadError::mismatch(path, what));
    }
    let mut loader = Loader {
        path,
        file,
        data_start: container.data_start,
        llama: &llama,
        tensors: BTreeMap::new(),
        bits: BTreeMap::new(),
        ranges: Vec::new(),
    };
    for info in &container.tensors {
        loader.add(info)?;
    }
    loader.no_overlap()?;
    let Loader { tensors, bits, .. } = loader;
    let vocab = container
        .tensors
        .iter()
        .find(|t| t.name == "token_embd.weight");
    let Some(vocab) = vocab.and_then(|t| t.shape.first()).copied() else {
        return Err(LoadError::missing(
            path,
            "tensor \"token_embd.weight\" is missing",
        ));
    };
    let tied = !tensors.contains_key("lm_head.weight");
    Ok(Model {
        config: llama.into_config(vocab, tied, quantization(&bits)),
        tensors,
        metadata: container.metadata,
    })
}

struct Loader<'a> {
    path: &'a Path,
    file: &'a Bytes,
    data_start: usize,
    llama: &'a Llama,
    tensors: BTreeMap<String, Entry>,
    /// Bits of each quantized module.
    bits: BTreeMap<String, usize>,
    /// Start, end and name of each tensor in the file.
    ranges: Vec<(usize, usize, &'a str)>,
}

impl<'a> Loader<'a> {
    fn add(&mut self, info: &'a TensorInfo) -> Result<(), LoadError> {
        let (path, name) = (self.path, Quoted(&info.name));
        let kind = Kind::from_id(info.kind).map_err(|kind| {
            let what =
                format!("tensor {name} is {kind}; F32, F16, Q4_0, Q4_1 and Q8_0 are supported");
            LoadError::unsupported(path, what).remedy(
                "use a Q4_0, Q4_1, Q8_0 or F16 file of the model, or its safetensors checkpoint",
            )
        })?;
        let Some(target) = self.llama.target(&info.name) else {
            let what = format!("tensor {name} has no place in a dense llama model");
            return Err(LoadError::unsupported(path, what));
        };
        // A quantized vector has no place: the scales of a bias would be taken for those of the weight.
        let (rows, cols) = match (info.shape.as_slice(), target.matrix, kind.bits()) {
            (&[rows, cols], true, _) => (rows, cols),
            (&[rows], false, None) => (rows, 1),
            (shape, ..) => {
                let what = format!("tensor {name} has the shape {shape:?}, which it can't have");
                return Err(LoadError::malformed(path, what));
            }
        };
        let Some(row) = kind.row_bytes(cols) else {
            let what = format!("tensor {name}: rows of {cols} do not make blocks of {BLOCK}");
            return Err(LoadError::malformed(path, what));
        };
        let start = self.data_start.checked_add(info.offset);
        let range = start.and_then(|start| Some(start..start.checked_add(rows.checked_mul(row)?)?));
        let source = range.and_then(|range| {
            self.ranges.push((range.start, range.end, &info.name));
            self.file.slice(range)
        });
        let Some(source) = source else {
            let what = format!("it ends before the data of tensor {name}");
            return Err(LoadError::malformed(path, what)
                .remedy("the download is incomplete: download the file again"));
        };
        let head_dim = self.head_dim(&target, &name, rows)?;
        let template = Converted {
            part: Part::Rows,
            kind,
            rows,
            cols,
            matrix: target.matrix,
            head_dim,
            source,
            fits: Arc::default(),
        };
        self.insert(target, template, &info.shape);
        Ok(())
    }

    /// Rows per head if the tensor's rows were reordered, checked against the number of rows.
    fn head_dim(
        &self,
        target: &Target,
        name: &Quoted<'_>,
        rows: usize,
    ) -> Result<Option<usize>, LoadError> {
        let Some(heads) = target.heads else {
            return Ok(None);
        };
        let dim = self.llama.head_dim();
        if heads.checked_mul(dim) != Some(rows as u64) {
            let what = format!("tensor {name} has {rows} rows for {heads} heads of size {dim}");
            return Err(LoadError::mismatch(self.path, what));
        }
        // Fits: it is at most `rows`.
        Ok(Some(dim as usize))
    }

    fn insert(&mut self, target: Target, template: Converted, shape: &[usize]) {
        let Target { module, leaf, .. } = target;
        let Some(bits) = template.kind.bits() else {
            let entry = match template.head_dim {
                Some(_) => Entry::Converted(template),
                None => Entry::Stored(TensorData {
                    dtype: template.kind.float(),
                    shape: shape.to_vec(),
                    contents: Contents::Stored(template.source),
                }),
            };
            self.tensors.insert(format!("{module}.{leaf}"), entry);
            return;
        };
        let parts = [
            (leaf, Part::Values),
            ("scales", Part::Scales),
            ("biases", Part::Biases),
        ];
        for (leaf, part) in parts {
            let part = Converted {
                part,
                ..template.clone()
            };
            self.tensors
                .insert(format!("{module}.{leaf}"), Entry::Converted(part));
        }
        self.bits.insert(module, bits);
    }

    /// Tensors that share bytes would let a small file claim any amount of weights.
    fn no_overlap(&mut self) -> Result<(), LoadError> {
        self.ranges.sort_unstable();
        for pair in self.ranges.windows(2) {
            if let [(_, end, first), (start, _, second)] = pair
                && start < end
            {
                let what = format!("tensors {} and {} overlap", Quoted(first), Quoted(second));
                return Err(LoadError::malformed(self.path, what));
            }
        }
        Ok(())
    }
}

/// The `quantization` of the config: the most frequent width, and the modules that have another.
fn quantization(bits: &BTreeMap<String, usize>) -> Option<Value> {
    let count = |wanted: usize| bits.values().filter(|bits| **bits == wanted).count();
    if bits.is_empty() {
        return None;
    }
    let usual = if count(8) > count(4) { 8 } else { 4 };
    let entry = |bits: usize| json!({"group_size": BLOCK, "bits": bits, "mode": "affine"});
    let mut all = Map::new();
    if let Value::Object(global) = entry(usual) {
        all.extend(global);
    }
    let others = bits.iter().filter(|(_, bits)| **bits != usual);
    all.extend(others.map(|(module, bits)| (module.clone(), entry(*bits))));
    Some(Value::Object(all))
}
