//! Row-wise caches: what a layer remembers of each row.

use std::ops::Range;

use crate::abi::{Attend, DType, RawTensor};
use crate::error::{Error, Result};
use crate::host::{api, op_error};
use crate::layers::delta::DeltaPass;
use crate::layers::{AttentionConfig, RmsNorm, Step};
use crate::rows::copied_row;
use crate::state::RowState;
use crate::tensor::Tensor;

/// Buffers grow by this many tokens at a time, so that a long answer reallocates rarely.
const GROWTH: i32 = 256;

/// Columns of one pass that a windowed cache always has room for beside its window.
const WIDEST: i32 = 256;

/// Keys and values, `[B, heads, capacity, D]`; position `p` lies in column `p % capacity`.
///
/// The cache does not know how many tokens are valid: the [`Step`]'s offsets say so. Going back is
/// therefore free: the next pass writes over what was rejected, and nobody looks there until then.
/// With a window the buffers stop growing at the window and a pass: what a pass writes over is never
/// to be seen again, however much of it is rejected.
#[derive(Default)]
pub struct KvCache {
    buffers: Option<(Tensor, Tensor)>,
    window: i32,
}

impl KvCache {
    /// An empty cache. `window`: keys that a query sees, its own included; 0: all.
    pub fn new(window: i32) -> Self {
        Self {
            buffers: None,
            window,
        }
    }

    /// Keys and values of another model, `[B, heads, capacity, D]`, for layers that have none of their own
    /// ([`crate::layers::KvSource::Shared`]): they see as much of them as `window` says; 0: all.
    pub fn lent(keys: Tensor, values: Tensor, window: i32) -> Self {
        Self {
            buffers: Some((keys, values)),
            window,
        }
    }

    /// Columns that it has after so many tokens, in passes of usual width.
    pub fn columns(&self, tokens: usize) -> usize {
        let tokens = i32::try_from(tokens).unwrap_or(i32::MAX - GROWTH);
        match self.window {
            0 => capacity(tokens) as usize,
            window => capacity(tokens).min(capacity(window + WIDEST)) as usize,
        }
    }

    /// Its keys and values, `[B, heads, capacity, D]`, once there are any.
    pub fn buffers(&self) -> Option<(&Tensor, &Tensor)> {
        self.buffers.as_ref().map(|(keys, values)| (keys, values))
    }

    /// Attention of a pass's queries over what is cached and the pass's own keys, which go into
    /// the cache: `q`, `k`, `v` as projected, as far as there are any, to `[B, T, heads * D]`.
    pub(super) fn attend(
        &mut self,
        step: &Step,
        qkv: &[Tensor],
        config: &AttentionConfig,
        (q_norm, k_norm): (Option<&RmsNorm>, Option<&RmsNorm>),
    ) -> Result<Tensor> {
        let [q, kv @ ..] = qkv else {
            return Err(Error::failed("attention without queries"));
        };
        let mixed = self.call(step, Some(q), kv, config, (q_norm, k_norm))?;
        mixed.ok_or_else(|| op_error("attend"))
    }

    /// The keys and values of a pass without queries go into the cache: `k`, `v` as projected.
    pub(super) fn remember(
        &mut self,
        step: &Step,
        kv: &[Tensor],
        config: &AttentionConfig,
        k_norm: Option<&RmsNorm>,
    ) -> Result<()> {
        self.call(step, None, kv, config, (None, k_norm)).map(drop)
    }

    fn call(
        &mut self,
        step: &Step,
        q: Option<&Tensor>,
        kv: &[Tensor],
        config: &AttentionConfig,
        (q_norm, k_norm): (Option<&RmsNorm>, Option<&RmsNorm>),
    ) -> Result<Option<Tensor>> {
        let (keys, values) = match (self.buffers.take(), kv) {
            (Some(buffers), []) => buffers,
            (None, []) => return Err(Error::failed("the cache to look at is empty")),
            (buffers, [k, ..]) => self.with_room(buffers, step, config, k.dtype())?,
        };
        let (rope_dims, rope_base, rope_freqs, rope_scale) = config.rope.raw();
        let weight = |norm: Option<&RmsNorm>| norm.map_or(RawTensor::NULL, |n| n.parts().0.raw());
        let ends = match config.block && q.is_some() {
            true => step.ends(),
            false => Vec::new(),
        };
        let part = |index: usize| kv.get(index).map_or(RawTensor::NULL, Tensor::raw);
        let out = api().attend()(&Attend {
            q: q.map_or(RawTensor::NULL, Tensor::raw),
            k: part(0),
            v: part(1),
            keys: keys.raw(),
            values: values.raw(),
            q_norm: weight(q_norm),
            k_norm: weight(k_norm),
            v_norm: config.v_norm.is_some(),
            eps: config.v_norm.or(config.qk_norm).unwrap_or(0.0),
            heads: config.heads,
            kv_heads: config.kv_heads,
            gated: config.gated,
            rope_dims,
            rope_base,
            rope_freqs,
            rope_scale,
            positions: step.positions().into(),
            offsets: step.offsets().into(),
            ends: ends.as_slice().into(),
            window: self.window,
            scale: config.scale,
        });
        let out = out.into_iter().map(|raw| Tensor::own("attend", raw));
        let mut out = out.collect::<Result<Vec<_>>>()?.into_iter();
        let mixed = match q {
            Some(_) => Some(out.next().ok_or_else(|| op_error("attend"))?),
            None => None,
        };
        self.buffers = match (out.next(), out.next()) {
            (Some(keys), Some(values)) => Some((keys, values)),
            _ if kv.is_empty() => Some((keys, values)),
            _ => return Err(op_error("attend")),
        };
        Ok(mixed)
    }

    /// The buffers, with room for a pass.
    fn with_room(
        &self,
        buffers: Option<(Tensor, Tensor)>,
        step: &Step,
        config: &AttentionConfig,
        dtype: DType,
    ) -> Result<(Tensor, Tensor)> {
        let furthest = step.offsets().iter().max().copied().unwrap_or(0);
        let span = furthest + step.width();
        let most = match self.window {
            0 => i32::MAX,
            window => capacity(window + step.width().max(WIDEST)),
        };
        let wanted = capacity(span).min(most);
        let Some((keys, values)) = buffers else {
            let shape = [step.rows(), config.kv_heads, wanted, config.head_dim];
            let empty = Tensor::full(&shape, 0.0, dtype)?;
            return Ok((empty.clone(), empty));
        };
        let columns = keys.dim(2);
        if columns < wanted && furthest > columns {
            // It went on at its beginning, where a longer one would not look.
            let room = columns - self.window;
            let width = step.width();
            return Err(Error::failed(format!(
                "a pass of {width} columns over a sliding window with room for {room}"
            )));
        }
        Ok((grow(keys, wanted)?, grow(values, wanted)?))
    }

    /// The given rows alone; `self` does not change.
    pub fn filtered(&self, keep: &Tensor) -> Result<Self> {
        let buffers = match &self.buffers {
            Some((keys, values)) => Some((keys.take(keep, 0)?, values.take(keep, 0)?)),
            None => None,
        };
        Ok(Self {
            buffers,
            window: self.window,
        })
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
        Ok(Self {
            buffers,
            window: self.window,
        })
    }

    /// Puts one row into a state: its keys and values in the order of their positions, as far as any
    /// later query sees them, `[1, heads, n, D]`.
    fn capture(&self, row: usize, name: &str, state: &mut RowState) -> Result<()> {
        let (keys, values) = self.buffers.as_ref().ok_or_else(no_rows)?;
        let seen = self.seen(state.processed())?;
        for (part, buffer) in [("keys", keys), ("values", values)] {
            let row = buffer.slice(0, row as i32, row as i32 + 1)?;
            // Copied after it is cut.
            let row = copied_row(&unrolled(&row, seen.clone())?, 0)?;
            state.put(format!("{name}.{part}"), row);
        }
        Ok(())
    }

    /// A cache with the one row of a state.
    fn restored(&self, name: &str, state: &RowState) -> Result<Self> {
        let seen = self.seen(state.processed())?;
        let columns = self.columns(state.processed() as usize) as i32;
        let buffer = |part: &str| {
            let rows = state.get(&format!("{name}.{part}"))?;
            match rows.dims()? {
                [1, _, n, _] if n == seen.len() as i32 => rolled(rows, seen.start, columns),
                shape => Err(Error::invalid(format!("the state has {name} of {shape:?}"))),
            }
        };
        Ok(Self {
            buffers: Some((buffer("keys")?, buffer("values")?)),
            window: self.window,
        })
    }

    /// The positions before `processed` that a later query can see, and the one that falls out of the window
    /// with the next: a drafter may look at as many.
    fn seen(&self, processed: u32) -> Result<Range<i32>> {
        let end = i32::try_from(processed).map_err(|_| Error::failed("too many tokens"))?;
        Ok(match self.window {
            0 => 0..end,
            window => (end - window).max(0)..end,
        })
    }

    /// What must be computed for the cache to be up to date.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.buffers.iter().flat_map(|(k, v)| [k, v])
    }
}

/// The positions of a buffer `[B, heads, capacity, D]`, in which `p` lies in column `p % capacity`, in
/// their order.
fn unrolled(buffer: &Tensor, positions: Range<i32>) -> Result<Tensor> {
    let columns = buffer.dim(2).max(1);
    let (start, len) = (positions.start % columns, positions.len() as i32);
    if start + len <= columns {
        return buffer.slice(2, start, start + len);
    }
    let ends = [
        buffer.slice(2, start, columns)?,
        buffer.slice(2, 0, start + len - columns)?,
    ];
    Tensor::concat(&[&ends[0], &ends[1]], 2)
}

/// The reverse of [`unrolled`]: positions from `start` on as a buffer of so many columns, 0 elsewhere.
fn rolled(rows: &Tensor, start: i32, columns: i32) -> Result<Tensor> {
    let [_, heads, len, width] = rows.dims()?;
    let zeros = |n: i32| Tensor::full(&[1, heads, n, width], 0.0, rows.dtype());
    let start = start % columns;
    let parts = match columns - start - len {
        room @ 0.. => [zeros(start)?, rows.clone(), zeros(room)?],
        _ => {
            let first = columns - start;
            let (begin, end) = (rows.slice(2, 0, first)?, rows.slice(2, first, len)?);
            [end, zeros(columns - len)?, begin]
        }
    };
    Tensor::concat(&parts.iter().collect::<Vec<_>>(), 2)
}

fn no_rows() -> Error {
    Error::failed("there is nothing to capture before the prompt")
}

/// Columns of a buffer that must hold `span`.
fn capacity(span: i32) -> i32 {
    (span + GROWTH - 1) / GROWTH * GROWTH
}

/// The buffer, with at least so many columns.
fn grow(buffer: Tensor, wanted: i32) -> Result<Tensor> {
    let [rows, heads, columns, width] = buffer.dims()?;
    if columns >= wanted {
        return Ok(buffer);
    }
    let more = [rows, heads, wanted - columns, width];
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

    /// The given rows alone; `self` does not change. Only between passes.
    pub fn filtered(&self, keep: &Tensor) -> Result<Self> {
        let state = match &self.state {
            Some(state) => Some(DeltaState {
                conv: state.conv.take(keep, 0)?,
                recurrent: state.recurrent.take(keep, 0)?,
            }),
            None => None,
        };
        Ok(Self {
            state,
            pending: None,
        })
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

    /// Puts one row into a state. Only between passes.
    fn capture(&self, row: usize, name: &str, state: &mut RowState) -> Result<()> {
        let DeltaState { conv, recurrent } = self.state.as_ref().ok_or_else(no_rows)?;
        state.put(format!("{name}.conv"), copied_row(conv, row)?);
        state.put(format!("{name}.recurrent"), copied_row(recurrent, row)?);
        Ok(())
    }

    /// A cache with the one row of a state.
    fn restored(name: &str, state: &RowState) -> Result<Self> {
        let part = |part: &str| state.get(&format!("{name}.{part}")).cloned();
        let (conv, recurrent) = (part("conv")?, part("recurrent")?);
        if conv.rank() != 3 || recurrent.rank() != 4 || conv.dim(0) != 1 || recurrent.dim(0) != 1 {
            return Err(Error::invalid(format!("the state has no row of {name}")));
        }
        Ok(Self {
            state: Some(DeltaState { conv, recurrent }),
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
    /// Attention, full or in a window.
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

    /// The given rows alone, `[n]` i32; `self` does not change, so that a change of many caches can be
    /// prepared in full before any is put in place.
    pub fn filtered(&self, keep: &Tensor) -> Result<Self> {
        debug_assert_eq!(keep.dtype(), DType::I32);
        match self {
            Self::Kv(cache) => cache.filtered(keep).map(Self::Kv),
            Self::Delta(cache) => cache.filtered(keep).map(Self::Delta),
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

    /// Puts copies of one row's part into a state that says how many tokens it has processed, under names
    /// that begin with `name`. Only between passes, when at least one was processed.
    pub fn capture(&self, row: usize, name: &str, state: &mut RowState) -> Result<()> {
        match self {
            Self::Kv(cache) => cache.capture(row, name, state),
            Self::Delta(cache) => cache.capture(row, name, state),
        }
    }

    /// A cache like `self`, which is empty, with the one row of a state.
    pub fn restored(&self, name: &str, state: &RowState) -> Result<Self> {
        match self {
            Self::Kv(cache) => cache.restored(name, state).map(Self::Kv),
            Self::Delta(_) => DeltaCache::restored(name, state).map(Self::Delta),
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
