//! Target models: from a checkpoint to logits, for `B` ragged rows.
//!
//! [`Model::load`] picks the architecture by `model_type`; each has a file of its own that turns a
//! config and weights into a [`Decoder`].

mod decoder;
mod gemma4;
mod kv;
mod layout;
mod llama;
mod qwen3;
mod qwen3_5;
mod view;

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use plugin_api::abi::{Donor, FaultCode};
use plugin_api::layers::{LayerCache, Step};
use plugin_api::{DonorKind, Result, RowState, Tap, TargetFacts, Tensor, Weights};

use crate::backend;
use crate::checkpoint::Checkpoint;
use crate::error::LoadError;

use decoder::Decoder;
pub use decoder::Pass;
pub use kv::{KvBits, KvConfig};
pub use view::TargetHandle;

/// The `model_type`s that can be targets.
pub const FAMILIES: &[&str] = &["gemma4", "llama", "qwen3", "qwen3_5", "qwen3_5_moe"];

/// The form of a captured row.
const SCHEMA: &str = "caches/2";

/// What a layer's part of a row is called.
fn layer(index: usize) -> String {
    format!("layer.{index}")
}

/// A target model with its weights. Lives on the engine thread.
pub struct Model {
    decoder: Decoder,
    facts: TargetFacts,
    weight_bytes: u64,
}

impl Model {
    /// Reads a model. `vocabulary` is the digest of its token table, where it has a tokenizer.
    ///
    /// # Errors
    /// The architecture is not supported, the config lacks a key or a tensor is missing or has
    /// another shape than the config says.
    pub fn load(
        checkpoint: Arc<Checkpoint>,
        vocabulary: Option<String>,
    ) -> std::result::Result<Self, LoadError> {
        Self::load_with(checkpoint, vocabulary, &KvConfig::default())
    }

    /// As [`Model::load`]; caches store keys and values as `kv` says.
    ///
    /// # Errors
    /// As for [`Model::load`], or `kv` does not fit the model.
    pub fn load_with(
        checkpoint: Arc<Checkpoint>,
        vocabulary: Option<String>,
        kv: &KvConfig,
    ) -> std::result::Result<Self, LoadError> {
        let path = checkpoint.path().to_owned();
        Self::build(checkpoint, vocabulary, kv).map_err(|e| model_error(&path, &e))
    }

    fn build(
        checkpoint: Arc<Checkpoint>,
        vocabulary: Option<String>,
        kv: &KvConfig,
    ) -> Result<Self> {
        let name = checkpoint.path().to_string_lossy().into_owned();
        let is_gguf = checkpoint.gguf().is_some();
        let files = checkpoint.clone();
        let checkpoint = Rc::new(backend::share_checkpoint(checkpoint));
        let config = checkpoint.config()?;
        let model_type = config.str("model_type")?.to_owned();
        // A GGUF file mixes element types; what llama.cpp computes with is f32.
        let weights = Weights::new(checkpoint);
        let weights = if is_gguf {
            weights.with_dtype(plugin_api::DType::F32)
        } else {
            weights
        };
        let (family, decoder) = match model_type.as_str() {
            "llama" => ("llama", llama::build(&config, &weights)?),
            "qwen3" => ("qwen3", qwen3::build(&config, &weights)?),
            "gemma4" | "gemma4_text" => ("gemma4", gemma4::build(&config, &weights)?),
            "qwen3_5" | "qwen3_5_text" => ("qwen3_5", qwen3_5::build(&config, &weights, false)?),
            "qwen3_5_moe" | "qwen3_5_moe_text" => {
                ("qwen3_5_moe", qwen3_5::build(&config, &weights, true)?)
            }
            other => {
                let problem = format!("is {other:?}; supported: {}", FAMILIES.join(", "));
                return Err(config.error("model_type", problem));
            }
        };
        let decoder = decoder.storing(kv)?;
        let tensors = decoder.tensors();
        Tensor::eval_all(&tensors)?;
        files.release();
        backend::settle(&tensors)?;
        let weight_bytes = tensors.iter().map(|t| t.bytes()).sum();
        let facts = TargetFacts {
            name,
            model_type: family.to_owned(),
            hidden_size: decoder.hidden(),
            layers: decoder.layers(),
            vocab_size: decoder.vocab(),
            dtype: decoder.dtype(),
            vocabulary,
            donors: decoder.donors().iter().map(|(_, facts)| *facts).collect(),
        };
        Ok(Self {
            decoder,
            facts,
            weight_bytes,
        })
    }

    /// What the pairing gate compares.
    pub fn facts(&self) -> &TargetFacts {
        &self.facts
    }

    /// Bytes of weights in memory.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Empty caches, one per layer that has one of its own.
    pub fn new_caches(&self) -> Vec<LayerCache> {
        self.decoder.new_caches()
    }

    /// One row of a group's caches after so many processed tokens, copied.
    ///
    /// # Errors
    /// An op failed; the caches are as they were.
    pub fn capture(&self, caches: &[LayerCache], row: usize, processed: usize) -> Result<RowState> {
        let mut state = RowState::new(SCHEMA, processed as u32);
        for (index, cache) in caches.iter().enumerate() {
            cache.capture(row, &layer(index), &mut state)?;
        }
        Ok(state)
    }

    /// Caches with the one row of a state.
    ///
    /// # Errors
    /// The state is not of this model's form.
    pub fn restored(&self, state: &RowState) -> Result<Vec<LayerCache>> {
        state.require(SCHEMA)?;
        let caches = self.new_caches().into_iter().enumerate();
        let restored = caches.map(|(index, cache)| cache.restored(&layer(index), state));
        restored.collect()
    }

    /// Bytes of a row's caches after so many tokens.
    pub fn cache_bytes(&self, tokens: usize) -> u64 {
        self.decoder.cache_bytes(tokens)
    }

    /// Runs `ids` `[B, T]` i32 through all layers.
    ///
    /// # Errors
    /// A tap is outside the model, or an op failed; the caches must not be used any more then.
    pub fn forward(
        &self,
        ids: &Tensor,
        step: &Step,
        caches: &mut [LayerCache],
        taps: &[Tap],
    ) -> Result<Pass> {
        self.decoder.forward(ids, step, caches, taps)
    }

    /// The head: `[.., hidden]` after the final norm to `[.., vocabulary]`.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.decoder.logits(hidden)
    }

    /// The keys and values of that kind in a group's caches, borrowed, once there are any.
    pub fn donor(&self, kind: DonorKind, caches: &[LayerCache]) -> Option<Donor> {
        let mut donors = self.decoder.donors().iter();
        let (layer, _) = donors.find(|(_, facts)| facts.kind == kind)?;
        match caches.get(*layer)? {
            LayerCache::Kv(cache) => cache.donor(),
            LayerCache::Delta(_) => None,
        }
    }

    /// Whether [`Model::forward`] knows the tap.
    pub fn has_tap(&self, tap: Tap) -> bool {
        (Tap::FINAL.point..=self.facts.layers).contains(&tap.point)
    }
}

/// An error of the layers, which names the path already, as the library's own.
fn model_error(path: &Path, error: &plugin_api::Error) -> LoadError {
    let shown = path.display().to_string();
    let message = error.message();
    let message = message
        .strip_prefix(&shown)
        .map_or(message, |rest| rest.trim_start_matches([':', ' ', '/']));
    if error.code() == FaultCode::FAILED {
        LoadError::failed(path, message)
    } else {
        LoadError::malformed(path, message)
    }
}
