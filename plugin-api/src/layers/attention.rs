//! Full causal attention over a row-wise cache.

use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::{KvCache, Linear, Project, RmsNorm, Rope, Step};
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
}

/// Grouped-query attention with optional q/k norms and output gate.
pub struct Attention {
    config: AttentionConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    norms: Option<(RmsNorm, RmsNorm)>,
}

impl Attention {
    /// Takes `{q,k,v,o}_proj`, and `{q,k}_norm` when the config wants them.
    pub fn load(w: &Weights, config: AttentionConfig) -> Result<Self> {
        let AttentionConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            gated,
            ..
        } = config;
        let queries = heads * head_dim;
        let norms = match config.qk_norm {
            Some(eps) => Some((
                RmsNorm::load(&w.child("q_norm"), head_dim, eps)?,
                RmsNorm::load(&w.child("k_norm"), head_dim, eps)?,
            )),
            None => None,
        };
        let projected = if gated { 2 * queries } else { queries };
        Ok(Self {
            q: Linear::load(&w.child("q_proj"), hidden, projected)?,
            k: Linear::load(&w.child("k_proj"), hidden, kv_heads * head_dim)?,
            v: Linear::load(&w.child("v_proj"), hidden, kv_heads * head_dim)?,
            o: Linear::load(&w.child("o_proj"), queries, hidden)?,
            norms,
            config,
        })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let projections = [&self.q, &self.k, &self.v, &self.o];
        let norms = self.norms.iter().flat_map(|(q, k)| [q, k]);
        projections
            .into_iter()
            .flat_map(Linear::tensors)
            .chain(norms.flat_map(RmsNorm::tensors))
            .collect()
    }

    /// `h + attention(norm(h))`, `[B, T, hidden]`; the pass's keys and values go into the cache.
    pub fn forward(
        &self,
        h: &Tensor,
        norm: &RmsNorm,
        step: &Step,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let qkv = Project::of(h)
            .norm(norm)
            .through([&self.q, &self.k, &self.v])?;
        let norms = self.norms.as_ref().map(|(q, k)| (q, k));
        let mixed = cache.attend(step, &qkv, &self.config, norms)?;
        Project::of(&mixed).plus(h).with(&self.o)
    }
}
