//! The pre-norm residual layer of Llama, Qwen3 and Qwen3.5, dense or with experts.

use crate::abi::{DType, UnaryOp};
use crate::checkpoint::Weights;
use crate::error::{Error, Result};
use crate::layers::{
    Attention, AttentionConfig, DeltaCache, FeedForward, FeedForwardConfig, GatedDeltaConfig,
    GatedDeltaNet, LayerCache, QuantizedKv, RmsNorm, Step,
};
use crate::tensor::Tensor;

/// The tensors of a layer with attention and norms on queries and keys, beside its feed-forward block's
/// ([`FeedForwardConfig::tensors`]), for [`crate::Checkpoint::require_tensors`].
pub const ATTENTION_LAYER: [&str; 8] = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
];

/// How a layer mixes columns.
pub enum Mixer {
    /// Full attention.
    Attention(Attention),
    /// Gated DeltaNet.
    Delta(GatedDeltaNet),
}

/// `h += mix(norm(h)); h += mlp(norm(h))`
pub struct DecoderLayer {
    input_norm: RmsNorm,
    mixer: Mixer,
    post_norm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderLayer {
    /// A layer with full attention: `self_attn`, `mlp` and the two norms.
    pub fn attention(
        w: &Weights,
        config: AttentionConfig,
        mlp: FeedForwardConfig,
        eps: f32,
    ) -> Result<Self> {
        let hidden = config.hidden;
        let mixer = Mixer::Attention(Attention::load(&w.child("self_attn"), config)?);
        Self::around(w, mixer, hidden, mlp, eps)
    }

    /// A layer with Gated DeltaNet: `linear_attn`, `mlp` and the two norms.
    pub fn delta(
        w: &Weights,
        config: GatedDeltaConfig,
        mlp: FeedForwardConfig,
        eps: f32,
    ) -> Result<Self> {
        let mixer = Mixer::Delta(GatedDeltaNet::load(&w.child("linear_attn"), config)?);
        Self::around(w, mixer, config.hidden, mlp, eps)
    }

    fn around(
        w: &Weights,
        mixer: Mixer,
        hidden: i32,
        mlp: FeedForwardConfig,
        eps: f32,
    ) -> Result<Self> {
        Ok(Self {
            input_norm: RmsNorm::load(&w.child("input_layernorm"), hidden, eps)?,
            mixer,
            post_norm: RmsNorm::load(&w.child("post_attention_layernorm"), hidden, eps)?,
            mlp: FeedForward::load(&w.child("mlp"), hidden, mlp)?,
        })
    }

    /// With another activation of the feed-forward block.
    #[must_use]
    pub fn with_activation(mut self, activation: UnaryOp) -> Self {
        self.mlp = self.mlp.with_activation(activation);
        self
    }

    /// An empty cache for this layer.
    pub fn new_cache(&self) -> LayerCache {
        self.cache_stored(None)
    }

    /// An empty cache for this layer, with keys and values, if it has any, stored as `kv` says; none: as they
    /// are.
    pub fn cache_stored(&self, kv: Option<QuantizedKv>) -> LayerCache {
        match &self.mixer {
            Mixer::Attention(layer) => LayerCache::Kv(layer.new_cache(kv)),
            Mixer::Delta(_) => LayerCache::Delta(DeltaCache::default()),
        }
    }

    /// Bytes of a row's cache after so many tokens.
    pub fn cache_bytes(&self, tokens: usize, dtype: DType, kv: Option<QuantizedKv>) -> u64 {
        match &self.mixer {
            Mixer::Attention(layer) => layer.cache_bytes(tokens, dtype, kv),
            Mixer::Delta(layer) => layer.cache_bytes(dtype),
        }
    }

    /// Dimensions of a head of its keys; none: it has no keys.
    pub fn head_dim(&self) -> Option<i32> {
        match &self.mixer {
            Mixer::Attention(layer) => Some(layer.head_dim()),
            Mixer::Delta(_) => None,
        }
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mixer = match &self.mixer {
            Mixer::Attention(layer) => layer.tensors(),
            Mixer::Delta(layer) => layer.tensors(),
        };
        [
            self.input_norm.tensors(),
            mixer,
            self.post_norm.tensors(),
            self.mlp.tensors(),
        ]
        .concat()
    }

    /// Puts the keys and values of `context`, `[B, T, hidden]`, into the cache, as those of columns that
    /// are no part of the stream; for a layer with attention. `normed`: through the layer's own first norm.
    pub fn remember(
        &self,
        context: &Tensor,
        normed: bool,
        step: &Step,
        cache: &mut LayerCache,
    ) -> Result<()> {
        match (&self.mixer, cache) {
            (Mixer::Attention(layer), LayerCache::Kv(cache)) => {
                let norm = normed.then_some(&self.input_norm);
                layer.remember(context, norm, step, cache)
            }
            _ => Err(Error::failed("this layer has no keys to remember")),
        }
    }

    /// `[B, T, hidden]` to the same shape.
    pub fn forward(&self, h: &Tensor, step: &Step, cache: &mut LayerCache) -> Result<Tensor> {
        let norm = &self.input_norm;
        let h = match (&self.mixer, cache) {
            (Mixer::Attention(layer), LayerCache::Kv(cache)) => {
                layer.forward(h, norm, step, cache)?
            }
            (Mixer::Delta(layer), LayerCache::Delta(cache)) => {
                layer.forward(h, norm, step, cache)?
            }
            _ => return Err(Error::failed("this cache belongs to another kind of layer")),
        };
        self.mlp.forward(&h, &self.post_norm)
    }
}
