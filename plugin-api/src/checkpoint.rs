//! Reading a checkpoint through the host: config and mapped tensors.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use crate::abi::{DType, RawCheckpoint};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::host::api;
use crate::tensor::Tensor;

/// The largest JSON file that is read beside a checkpoint.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// An open checkpoint: a directory with config.json and safetensors, or a GGUF file.
///
/// Tensors are mapped from the file; a checkpoint may be dropped before them.
pub struct Checkpoint {
    raw: RawCheckpoint,
    path: String,
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        api().checkpoint_drop()(self.raw);
    }
}

impl Checkpoint {
    /// Opens a directory or file; reads headers, not weights.
    pub fn open(path: &str) -> Result<Self> {
        let raw = api().checkpoint_open()(path.into())
            .into_result()
            .map_err(Error::from)?;
        Ok(Self {
            raw,
            path: path.to_owned(),
        })
    }

    /// What a drafter with weights was given, or the refusal of nothing.
    pub fn needed(given: Option<Self>, plugin: &str) -> Result<Self> {
        let refusal = || {
            Error::invalid(format!(
                "a {plugin} drafter needs its checkpoint (--drafter)"
            ))
        };
        given.ok_or_else(refusal)
    }

    /// Takes over a handle that the host made.
    ///
    /// # Safety
    /// `raw` must be a live handle of the installed table, which nobody else gives back.
    pub unsafe fn from_raw(raw: RawCheckpoint, path: String) -> Self {
        Self { raw, path }
    }

    /// The path it was opened from.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its config.json.
    pub fn config(&self) -> Result<Config> {
        let text = api().checkpoint_config()(self.raw);
        let path = Path::new(&self.path);
        // DSpark snapshots have another one.
        let file = ["config.json", "dspark.json"]
            .into_iter()
            .find(|file| path.join(file).exists());
        let origin = match file {
            Some(file) => format!("{}/{file}", self.path),
            None => self.path.clone(),
        };
        Config::parse(&text, origin)
    }

    /// A JSON object beside the tensors (`draft_vocab.json`, …); none when there is no such file.
    ///
    /// # Errors
    /// The file is unreadable, larger than 64 MiB or no JSON object.
    pub fn json(&self, file: &str) -> Result<Option<Config>> {
        let path = Path::new(&self.path).join(file);
        let shown = path.display();
        let size = match std::fs::metadata(&path) {
            Ok(facts) => facts.len(),
            Err(_) => return Ok(None),
        };
        if size > MAX_JSON_BYTES {
            return Err(Error::invalid(format!(
                "{shown}: {} MiB of JSON",
                size >> 20
            )));
        }
        let text =
            std::fs::read_to_string(&path).map_err(|e| Error::invalid(format!("{shown}: {e}")))?;
        Config::parse(&text, shown.to_string()).map(Some)
    }

    /// Bytes of the tensors whose names start with `prefix`.
    pub fn bytes(&self, prefix: &str) -> u64 {
        api().checkpoint_bytes()(self.raw, prefix.into())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let names = api().checkpoint_names()(self.raw);
        names.into_iter().map(String::from).collect()
    }

    /// Refuses a checkpoint that lacks tensors, naming the first of them. For [`crate::Drafter::load`]:
    /// before anything is read. A quantized `weight` brings `scales` and `biases`: where there is one of these, the
    /// other is needed, too.
    pub fn require_tensors(&self, names: impl IntoIterator<Item = String>) -> Result<()> {
        let present = self.names();
        let has = |name: &String| present.binary_search(name).is_ok();
        let mut missing = Vec::new();
        for name in names {
            let module = name.strip_suffix("weight");
            let pair =
                module.map(|module| ["scales", "biases"].map(|part| format!("{module}{part}")));
            if let Some([scales, biases]) = pair.filter(|[a, b]| has(a) != has(b)) {
                missing.push(if has(&scales) { biases } else { scales });
            }
            if !has(&name) {
                missing.push(name);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let path = self.path();
        let shown = missing[..missing.len().min(3)].join(", ");
        let more = match missing.len().saturating_sub(3) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Err(Error::invalid(format!(
            "{path}: missing tensors: {shown}{more}"
        )))
    }

    /// Refuses a checkpoint with layers beyond the `count` that its config speaks of: one of the two is another
    /// drafter's. Names of layer `n` begin with `prefix` and `n.`.
    pub fn require_layers(&self, prefix: &str, count: usize) -> Result<()> {
        if self.bytes(&format!("{prefix}{count}.")) == 0 {
            return Ok(());
        }
        let path = self.path();
        Err(Error::invalid(format!(
            "{path}: there are tensors {prefix}{count}.*, and its config speaks of {count} layers"
        )))
    }

    /// One tensor.
    ///
    /// # Errors
    /// When it is absent or cannot be read, with the path and the name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let raw = api().checkpoint_tensor()(self.raw, name.into());
        Tensor::own("checkpoint", raw)
            .map_err(|e| Error::invalid(e.message().trim_start_matches("checkpoint: ")))
    }

    /// The digest of the token table beside it, if it carries a tokenizer.
    pub fn vocabulary(&self) -> Result<Option<String>> {
        let digest = api().checkpoint_vocabulary()(self.raw)
            .into_result()
            .map_err(Error::from)?;
        Ok(digest.into_option().map(String::from))
    }
}

/// A prefix into a checkpoint, from which layers take their tensors.
///
/// ```no_run
/// use std::rc::Rc;
///
/// use plugin_api::layers::RmsNorm;
/// use plugin_api::{Checkpoint, DType, Result, Weights};
///
/// /// The norm `layers.0.norm`, in bf16.
/// fn norm(checkpoint: Checkpoint, hidden: i32) -> Result<RmsNorm> {
///     let weights = Weights::new(Rc::new(checkpoint)).with_dtype(DType::BF16);
///     RmsNorm::load(&weights.child("layers").child(0).child("norm"), hidden, 1e-6)
/// }
/// ```
#[derive(Clone)]
pub struct Weights {
    checkpoint: Rc<Checkpoint>,
    names: Rc<Vec<String>>,
    prefix: String,
    norm_offset: f32,
    dtype: Option<DType>,
    /// By name, what stands in for the checkpoint's own tensors.
    made: Option<Rc<BTreeMap<String, Tensor>>>,
}

impl Weights {
    /// All of a checkpoint.
    pub fn new(checkpoint: Rc<Checkpoint>) -> Self {
        Self {
            names: Rc::new(checkpoint.names()),
            checkpoint,
            prefix: String::new(),
            norm_offset: 0.0,
            dtype: None,
            made: None,
        }
    }

    /// A checkpoint in a layout of its own, as layers expect it: these tensors, by name, and no others.
    pub fn translated(checkpoint: Rc<Checkpoint>, tensors: BTreeMap<String, Tensor>) -> Self {
        Self {
            names: Rc::new(tensors.keys().cloned().collect()),
            made: Some(Rc::new(tensors)),
            ..Self::new(checkpoint)
        }
    }

    /// The weights below `name`.
    #[must_use]
    pub fn child(&self, name: impl std::fmt::Display) -> Self {
        Self {
            prefix: format!("{}{name}.", self.prefix),
            ..self.clone()
        }
    }

    /// Norm weights are stored minus `offset` (raw Qwen3.5 checkpoints store `w - 1`).
    #[must_use]
    pub fn with_norm_offset(mut self, offset: f32) -> Self {
        self.norm_offset = offset;
        self
    }

    /// Floating-point tensors are converted to `dtype` when they are taken.
    #[must_use]
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// The same weights, none converted.
    #[must_use]
    pub(crate) fn as_stored(&self) -> Self {
        Self {
            dtype: None,
            ..self.clone()
        }
    }

    /// What floating-point tensors are converted to.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// What to add to norm weights.
    pub fn norm_offset(&self) -> f32 {
        self.norm_offset
    }

    /// The full name of a tensor of this prefix.
    pub fn name(&self, leaf: &str) -> String {
        format!("{}{leaf}", self.prefix)
    }

    /// The checkpoint's path, for messages.
    pub fn path(&self) -> &str {
        self.checkpoint.path()
    }

    /// Whether there is such a tensor.
    pub fn contains(&self, leaf: &str) -> bool {
        let name = self.name(leaf);
        self.names.binary_search(&name).is_ok()
    }

    /// A tensor of any shape.
    pub fn tensor(&self, leaf: &str) -> Result<Tensor> {
        let name = self.name(leaf);
        let tensor = match &self.made {
            None => self.checkpoint.tensor(&name)?,
            Some(made) => made
                .get(&name)
                .cloned()
                .ok_or_else(|| self.error(leaf, "is missing"))?,
        };
        match self.dtype {
            Some(dtype) if tensor.dtype().is_float() => tensor.astype(dtype),
            _ => Ok(tensor),
        }
    }

    /// A floating-point tensor that must have this shape.
    pub fn shaped(&self, leaf: &str, shape: &[i32]) -> Result<Tensor> {
        let tensor = self.tensor(leaf)?;
        if !tensor.dtype().is_float() {
            let problem = format!("has {:?} elements, expected floating point", tensor.dtype());
            return Err(self.error(leaf, problem));
        }
        if tensor.shape() == shape {
            Ok(tensor)
        } else {
            Err(self.error(
                leaf,
                format!("has shape {:?}, the config says {shape:?}", tensor.shape()),
            ))
        }
    }

    /// An error about a tensor of this prefix.
    pub fn error(&self, leaf: &str, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!(
            "{}: tensor {} {problem}",
            self.path(),
            self.name(leaf)
        ))
    }
}
