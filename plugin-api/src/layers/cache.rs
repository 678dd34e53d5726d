//! Row-wise caches: what a layer remembers of each row.

use crate::abi::{Attend, DType, RawTensor};
use crate::error::{Error, Result};
use crate::host::{api, op_error};
use crate::layers::delta::DeltaPass;
use crate::layers::{AttentionConfig, RmsNorm, Step};
use crate::tensor::Tensor;

/// Buffers grow by this many tokens at a time, so that a long answer reallocates rarely.
const GROWTH: i32 = 256;

/// Keys and values of full attention, `[B, heads, capacity, D]`.
///
/// The cache does not know how many tokens are valid: the [`Step`]'s offsets say so. Going back is
/// therefore free: the next pass writes over what was rejected, and nobody looks there until then.
#[derive(Default)]
pub struct KvCache {
    buffers: Option<(Tensor, Tensor)>,
}

impl KvCache {
    /// Attention of a pass's queries over what is cached and the pass's own keys, which go into
    /// the cache: `q`, `k`, `v` as projected, to `[B, T, heads * D]`.
    pub(super) fn attend(
        &mut self,
        step: &Step,
        [q, k, v]: &[Tensor; 3],
        config: &AttentionConfig,
        norms: Option<(&RmsNorm, &RmsNorm)>,
    ) -> Result<Tensor> {
        let span = step.offsets().iter().max().copied().unwrap_or(0) + step.width();
        let (keys, values) = match self.buffers.take() {
            Some((keys, values)) => (grow(keys, span)?, grow(values, span)?),
            None => {
                let shape = [
                    step.rows(),
                    config.kv_heads,
                    capacity(span),
                    config.head_dim,
                ];
                let empty = Tensor::full(&shape, 0.0, k.dtype())?;
                (empty.clone(), empty)
            }
        };
        let (rope_dims, rope_base, rope_freqs, rope_scale) = config.rope.raw();
        let weight = |norm: &RmsNorm| norm.parts().0.raw();
        let (q_norm, k_norm, eps) = match norms {
            Some((q, k)) => (weight(q), weight(k), q.parts().1),
            None => (RawTensor::NULL, RawTensor::NULL, 0.0),
        };
        let out = api().attend()(&Attend {
            q: q.raw(),
            k: k.raw(),
            v: v.raw(),
            keys: keys.raw(),
            values: values.raw(),
            q_norm,
            k_norm,
            eps,
            heads: config.heads,
            kv_heads: config.kv_heads,
            gated: config.gated,
            rope_dims,
            rope_base,
            rope_freqs,
            rope_scale,
            offsets: step.offsets().into(),
            window: 0,
            scale: (config.head_dim as f32).powf(-0.5),
        });
        let out = out.into_iter().map(|raw| Tensor::own("attend", raw));
        let out = out.collect::<Result<Vec<_>>>()?;
        match <[Tensor; 3]>::try_from(out) {
            Ok([mixed, keys, values]) => {
                self.buffers = Some((keys, values));
                Ok(mixed)
            }
            Err(_) => Err(op_error("attend")),
        }
    }

    /// Keeps the given rows.
    pub fn filter(&mut self, keep: &Tensor) -> Result<()> {
        if let Some((keys, values)) = &self.buffers {
            self.buffers = Some((keys.take(keep, 0)?, values.take(keep, 0)?));
        }
        Ok(())
    }

    /// The rows of `self`, then those of `other`; neither changes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        let buffers = match (&self.buffers, &other.buffers) {
            (Some((k0, v0)), Some((k1, v1))) => {
                let span = k0.dim(2).max(k1.dim(2));
                let join = |a: &Tensor, b: &Tensor| -> Result<Tensor> {
                    Tensor::concat(&[&grow(a.clone(), span)?, &grow(b.clone(), span)?], 0)
                };
                Some((join(k0, k1)?, join(v0, v1)?))
            }
            (None, None) => None,
            _ => return Err(Error::failed("only prefilled rows can join prefilled rows")),
        };
        Ok(Self { buffers })
    }

    /// What must be computed for the cache to be up to date.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.buffers.iter().flat_map(|(k, v)| [k, v])
    }
}

/// Columns of a buffer that must hold `span`.
fn capacity(span: i32) -> i32 {
    (span + GROWTH - 1) / GROWTH * GROWTH
}

/// The buffer, with room for at least `span` tokens.
fn grow(buffer: Tensor, span: i32) -> Result<Tensor> {
    let [rows, heads, columns, width] = buffer.dims()?;
    if columns >= span {
        return Ok(buffer);
    }
    let more = [rows, heads, capacity(span) - columns, width];
    let more = Tensor::full(&more, 0.0, buffer.dtype())?;
    Tensor::concat(&[&buffer, &more], 2)
}

/// What a Gated DeltaNet layer remembers: the last `K - 1` inputs of its convolution
/// `[B, K-1, C]` and the recurrent state `[B, Hv, Dv, Dk]` (f32). The two move together.
#[derive(Default)]
pub struct DeltaCache {
    pub(super) state: Option<DeltaState>,
    /// After a speculative pass, until it is resolved.
    pub(super) pending: Option<DeltaPass>,
}

#[derive(Clone)]
pub(super) struct DeltaState {
    pub conv: Tensor,
    pub recurrent: Tensor,
}

impl DeltaCache {
    /// Ends a pass: row `b` keeps its first `kept[b]` columns.
    ///
    /// After a plain pass there is nothing to do: padding has not touched the state.
    pub fn resolve(&mut self, kept: &[i32]) -> Result<()> {
        if let Some(pass) = self.pending.take() {
            self.state = Some(pass.advanced(kept)?);
        }
        Ok(())
    }

    /// Keeps the given rows.
    pub fn filter(&mut self, keep: &Tensor) -> Result<()> {
        if let Some(state) = &self.state {
            self.state = Some(DeltaState {
                conv: state.conv.take(keep, 0)?,
                recurrent: state.recurrent.take(keep, 0)?,
            });
        }
        Ok(())
    }

    /// The rows of `self`, then those of `other`; neither changes. Only between passes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        let state = match (&self.state, &other.state) {
            (Some(a), Some(b)) => Some(DeltaState {
                conv: Tensor::concat(&[&a.conv, &b.conv], 0)?,
                recurrent: Tensor::concat(&[&a.recurrent, &b.recurrent], 0)?,
            }),
            (None, None) => None,
            _ => return Err(Error::failed("only prefilled rows can join prefilled rows")),
        };
        Ok(Self {
            state,
            pending: None,
        })
    }

    /// What must be computed for the cache to be up to date.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().flat_map(|s| [&s.conv, &s.recurrent])
    }
}

/// The cache of one decoder layer.
pub enum LayerCache {
    /// Full attention.
    Kv(KvCache),
    /// Gated DeltaNet.
    Delta(DeltaCache),
}

impl LayerCache {
    /// Ends a pass: row `b` keeps its first `kept[b]` columns (all of its filled ones after a plain
    /// pass).
    pub fn resolve(&mut self, kept: &[i32]) -> Result<()> {
        match self {
            Self::Kv(_) => Ok(()),
            Self::Delta(cache) => cache.resolve(kept),
        }
    }

    /// Keeps the given rows: `[n]` i32.
    pub fn filter(&mut self, keep: &Tensor) -> Result<()> {
        debug_assert_eq!(keep.dtype(), DType::I32);
        match self {
            Self::Kv(cache) => cache.filter(keep),
            Self::Delta(cache) => cache.filter(keep),
        }
    }

    /// The rows of `self`, then those of `other`; neither changes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        match (self, other) {
            (Self::Kv(a), Self::Kv(b)) => a.joined(b).map(Self::Kv),
            (Self::Delta(a), Self::Delta(b)) => a.joined(b).map(Self::Delta),
            _ => Err(Error::failed("caches of different layers cannot join")),
        }
    }

    /// What must be computed for the cache to be up to date.
    pub fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Kv(cache) => cache.tensors().collect(),
            Self::Delta(cache) => cache.tensors().collect(),
        }
    }
}
