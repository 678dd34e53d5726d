//! Attention over a row-wise cache, full or in a sliding window; causal, or over blocks.

use crate::abi::DType;
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::{KvCache, Linear, Project, QuantizedKv, RmsNorm, Rope, Step};
use crate::tensor::Tensor;

/// The shape and the options of an attention layer.
#[derive(Clone)]
pub struct AttentionConfig {
    /// Width of the residual stream.
    pub hidden: i32,
    /// Query heads.
    pub heads: i32,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: i32,
    /// Dimensions of a head.
    pub head_dim: i32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Epsilon of the per-head norms on queries and keys (Qwen3); none: no such norms.
    pub qk_norm: Option<f32>,
    /// Whether each head's output is gated by a sigmoid that `q_proj` computes beside the query
    /// (Qwen3.5): `q_proj` gives `[query, gate]` per head.
    pub gated: bool,
    /// The factor on products of queries and keys, mostly `head_dim^-1/2`.
    pub scale: f32,
    /// Keys that a query sees, its own included; 0: all.
    pub window: i32,
    /// Where keys and values come from.
    pub kv: KvSource,
    /// Epsilon of the norm without a weight that values go through (Gemma 4); none: no such norm.
    pub v_norm: Option<f32>,
    /// Whether all columns that a row fills in a pass see each other (block drafters), not only those
    /// before them.
    pub block: bool,
}

/// Where the keys and values of an attention layer come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Projections of its own.
    Own,
    /// One projection for both (`attention_k_eq_v` of Gemma 4).
    Tied,
    /// The cache of another layer, which has run before in the same pass.
    Shared,
}

/// Grouped-query attention with optional q/k norms and output gate.
pub struct Attention {
    config: AttentionConfig,
    q: Linear,
    k: Option<Linear>,
    v: Option<Linear>,
    o: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
}

impl Attention {
    /// Takes `{q,k,v,o}_proj`, and `{q,k}_norm` when the config wants them, as far as it has keys and
    /// values of its own.
    pub fn load(w: &Weights, config: AttentionConfig) -> Result<Self> {
        let AttentionConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            gated,
            kv,
            ..
        } = config;
        let queries = heads * head_dim;
        let norm = |name: &str, wanted: bool| match config.qk_norm.filter(|_| wanted) {
            Some(eps) => RmsNorm::load(&w.child(name), head_dim, eps).map(Some),
            None => Ok(None),
        };
        let keys = |name: &str, wanted: bool| match wanted {
            true => Linear::load(&w.child(name), hidden, kv_heads * head_dim).map(Some),
            false => Ok(None),
        };
        let projected = if gated { 2 * queries } else { queries };
        Ok(Self {
            q: Linear::load(&w.child("q_proj"), hidden, projected)?,
            k: keys("k_proj", kv != KvSource::Shared)?,
            v: keys("v_proj", kv == KvSource::Own)?,
            o: Linear::load(&w.child("o_proj"), queries, hidden)?,
            q_norm: norm("q_norm", true)?,
            k_norm: norm("k_norm", kv != KvSource::Shared)?,
            config,
        })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let linears = [&self.q, &self.o].into_iter().chain(&self.k).chain(&self.v);
        let norms = self.q_norm.iter().chain(&self.k_norm);
        linears
            .flat_map(Linear::tensors)
            .chain(norms.flat_map(RmsNorm::tensors))
            .collect()
    }

    /// An empty cache of the kind that it needs, with keys and values stored as `kv` says; none: as they are.
    pub fn new_cache(&self, kv: Option<QuantizedKv>) -> KvCache {
        KvCache::stored(self.config.window, kv)
    }

    /// Bytes of a row's cache after so many tokens.
    pub fn cache_bytes(&self, tokens: usize, dtype: DType, kv: Option<QuantizedKv>) -> u64 {
        let (heads, dim) = (self.config.kv_heads, self.config.head_dim);
        self.new_cache(kv).bytes(tokens, heads, dim, dtype)
    }

    /// Dimensions of a head.
    pub fn head_dim(&self) -> i32 {
        self.config.head_dim
    }

    /// The projection of what [`Attention::mixed`] gives back to the residual stream.
    pub fn out(&self) -> &Linear {
        &self.o
    }

    /// `h + attention(norm(h))`, `[B, T, hidden]`; the pass's keys and values go into the cache.
    pub fn forward(
        &self,
        h: &Tensor,
        norm: &RmsNorm,
        step: &Step,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let mixed = self.mixed(h, norm, step, cache)?;
        Project::of(&mixed).plus(h).with(&self.o)
    }

    /// The keys and values of `x`, `[B, T, hidden]`, go into the cache at the pass's columns; nothing looks
    /// at them yet. `norm`: what `x` goes through first.
    pub fn remember(
        &self,
        x: &Tensor,
        norm: Option<&RmsNorm>,
        step: &Step,
        cache: &mut KvCache,
    ) -> Result<()> {
        let linears: Vec<&Linear> = self.k.iter().chain(&self.v).collect();
        let x = Project::of(x);
        let x = match norm {
            Some(norm) => x.norm(norm),
            None => x,
        };
        let kv = x.through_all(&linears)?;
        cache.remember(step, &kv, &self.config, self.k_norm.as_ref())
    }

    /// The mixed values of `norm(h)`, `[B, T, heads * D]`, before their projection.
    pub fn mixed(
        &self,
        h: &Tensor,
        norm: &RmsNorm,
        step: &Step,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let linears: Vec<&Linear> = [&self.q]
            .into_iter()
            .chain(&self.k)
            .chain(&self.v)
            .collect();
        let qkv = Project::of(h).norm(norm).through_all(&linears)?;
        let norms = (self.q_norm.as_ref(), self.k_norm.as_ref());
        cache.attend(step, &qkv, &self.config, norms)
    }
}
