//! Row-wise caches: what a layer remembers of each row.

use std::ops::Range;

use crate::abi::{self, Attend, DType, RawTensor};
use crate::drafter::Donor;
use crate::error::{Error, Result};
use crate::host::{api, op_error};
use crate::layers::delta::DeltaPass;
use crate::layers::kv::row_bytes;
use crate::layers::{AttentionConfig, QuantizedKv, RmsNorm, Step};
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
///
/// Quantized, the buffers are u32 `[B, heads, capacity, words]`, see [`Attend::keys`], and hold what lies
/// from position `start` on; what lies before is in two more buffers, as it is.
#[derive(Default)]
pub struct KvCache {
    buffers: Option<(Tensor, Tensor)>,
    /// With a quantized cache whose `start` is not 0: positions before it, `[B, heads, columns, D]`;
    /// `p` lies in column `p % columns`.
    first: Option<(Tensor, Tensor)>,
    window: i32,
    quantized: Option<QuantizedKv>,
    /// The first position of `buffers`.
    start: i32,
    /// Positions that there is room for from the first pass on.
    expected: i32,
}

impl KvCache {
    /// An empty cache. `window`: keys that a query sees, its own included; 0: all.
    pub fn new(window: i32) -> Self {
        Self::stored(window, None)
    }

    /// An empty cache that stores keys and values as `kv` says; none: as they are.
    pub fn stored(window: i32, kv: Option<QuantizedKv>) -> Self {
        Self {
            buffers: None,
            first: None,
            window,
            quantized: kv,
            start: kv.map_or(0, |kv| kv.start.max(0)),
            expected: 0,
        }
    }

    /// Takes room for so many tokens of a row at once, as far as a window lets it ever need that. Growing pass by
    /// pass copies all again and again, and leaves gaps behind that nothing else fits into.
    pub fn expect(&mut self, tokens: usize) {
        self.expected = i32::try_from(tokens).unwrap_or(i32::MAX - GROWTH);
    }

    /// Keys and values of another model, for layers that have none of their own
    /// ([`crate::layers::KvSource::Shared`]): they see as much of them as `window` says; 0: all.
    pub fn lent(donor: &Donor, window: i32) -> Self {
        Self {
            buffers: Some((donor.keys.clone(), donor.values.clone())),
            first: donor.first.clone(),
            window,
            quantized: None,
            start: donor.start,
            expected: 0,
        }
    }

    /// Bytes of a row after so many tokens, in passes of usual width, with `heads` heads of `dim` elements.
    pub fn bytes(&self, tokens: usize, heads: i32, dim: i32, dtype: DType) -> u64 {
        let tokens = i32::try_from(tokens).unwrap_or(i32::MAX - GROWTH);
        let (columns, first) = self.room(tokens, WIDEST);
        let (row, exact) = row_bytes(self.quantized, dim, dtype);
        2 * heads as u64 * (columns as u64 * row + first as u64 * exact)
    }

    /// What it lends, borrowed, once there is anything.
    pub fn donor(&self) -> Option<abi::Donor> {
        let (keys, values) = self.buffers.as_ref()?;
        let (first_keys, first_values) = self.raw_first();
        Some(abi::Donor {
            keys: keys.raw(),
            values: values.raw(),
            first_keys,
            first_values,
            start: self.start,
        })
    }

    fn raw_first(&self) -> (RawTensor, RawTensor) {
        let first = self.first.as_ref();
        first.map_or((RawTensor::NULL, RawTensor::NULL), |(keys, values)| {
            (keys.raw(), values.raw())
        })
    }

    /// The columns of the buffers, and of those for first positions, that the positions before `end` need.
    /// `width`: columns of the pass that ends there.
    fn room(&self, end: i32, width: i32) -> (i32, i32) {
        let end = end.max(self.expected);
        let most = match self.window {
            0 => i32::MAX,
            window => capacity(window.saturating_add(width.max(WIDEST))),
        };
        // Never none: an empty buffer has no columns to tell positions apart.
        let columns = capacity((end - self.start).max(1)).min(most);
        (columns, capacity(end).min(self.start).min(most))
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
        let (first_keys, first_values) = self.raw_first();
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
            first_keys,
            first_values,
            start: self.start,
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
        if let (Some(keys), Some(values)) = (out.next(), out.next()) {
            self.first = Some((keys, values));
        }
        Ok(mixed)
    }

    /// The buffers, with room for a pass; so have those for first positions.
    fn with_room(
        &mut self,
        buffers: Option<(Tensor, Tensor)>,
        step: &Step,
        config: &AttentionConfig,
        dtype: DType,
    ) -> Result<(Tensor, Tensor)> {
        let furthest = step.offsets().iter().max().copied().unwrap_or(0);
        let span = furthest + step.width();
        let (wanted, wanted_first) = self.room(span, step.width());
        let (rows, heads, dim) = (step.rows(), config.kv_heads, config.head_dim);
        if self.start > 0 {
            self.first = Some(match self.first.take() {
                Some((keys, values)) => {
                    let furthest = furthest.min(self.start);
                    self.check_turn(keys.dim(2), wanted_first, furthest, step.width())?;
                    (grow(keys, wanted_first)?, grow(values, wanted_first)?)
                }
                None => empty(&[rows, heads, wanted_first, dim], dtype)?,
            });
        }
        let Some((keys, values)) = buffers else {
            return match self.quantized {
                Some(kv) => empty(&[rows, heads, wanted, kv.words(dim)], DType::U32),
                None => empty(&[rows, heads, wanted, dim], dtype),
            };
        };
        self.check_turn(keys.dim(2), wanted, furthest - self.start, step.width())?;
        Ok((grow(keys, wanted)?, grow(values, wanted)?))
    }

    /// A buffer that went on at its beginning can't grow: a longer one would not look there.
    fn check_turn(&self, columns: i32, wanted: i32, furthest: i32, width: i32) -> Result<()> {
        if columns >= wanted || furthest <= columns {
            return Ok(());
        }
        let room = columns - self.window;
        Err(Error::failed(format!(
            "a pass of {width} columns over a sliding window with room for {room}"
        )))
    }

    /// The given rows alone; `self` does not change.
    pub fn filtered(&self, keep: &Tensor) -> Result<Self> {
        let picked = |buffers: &Option<(Tensor, Tensor)>| -> Result<_> {
            Ok(match buffers {
                Some((keys, values)) => Some((keys.take(keep, 0)?, values.take(keep, 0)?)),
                None => None,
            })
        };
        Ok(Self {
            buffers: picked(&self.buffers)?,
            first: picked(&self.first)?,
            ..*self
        })
    }

    /// The rows of `self`, then those of `other`; neither changes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        Ok(Self {
            buffers: joined(self.buffers.as_ref(), other.buffers.as_ref())?,
            first: joined(self.first.as_ref(), other.first.as_ref())?,
            ..*self
        })
    }

    /// Puts one row into a state: its keys and values in the order of their positions, as far as any
    /// later query sees them, `[1, heads, n, D]`.
    fn capture(&self, row: usize, name: &str, state: &mut RowState) -> Result<()> {
        let buffers = self.buffers.as_ref().ok_or_else(no_rows)?;
        let (first, rest) = self.parts(state.processed())?;
        let parts = [
            ("first_", self.first.as_ref(), first),
            ("", Some(buffers), rest),
        ];
        for (part, buffers, positions) in parts {
            let Some((keys, values)) = buffers else {
                continue;
            };
            for (kind, buffer) in [("keys", keys), ("values", values)] {
                let row = buffer.slice(0, row as i32, row as i32 + 1)?;
                // Copied after it is cut.
                let row = copied_row(&unrolled(&row, positions.clone())?, 0)?;
                state.put(format!("{name}.{part}{kind}"), row);
            }
        }
        Ok(())
    }

    /// A cache with the one row of a state.
    fn restored(&self, name: &str, state: &RowState) -> Result<Self> {
        let (first, rest) = self.parts(state.processed())?;
        let end = i32::try_from(state.processed()).unwrap_or(i32::MAX - GROWTH);
        let (columns, first_columns) = self.room(end, WIDEST);
        let buffer = |part: &str, positions: &Range<i32>, columns: i32| {
            let rows = state.get(&format!("{name}.{part}"))?;
            match rows.dims()? {
                [1, _, n, _] if n == positions.len() as i32 => {
                    rolled(rows, positions.start, columns)
                }
                shape => Err(Error::invalid(format!("the state has {name} of {shape:?}"))),
            }
        };
        let pair = |part: &str, positions: &Range<i32>, columns: i32| -> Result<(Tensor, Tensor)> {
            let of = |kind: &str| buffer(&format!("{part}{kind}"), positions, columns);
            Ok((of("keys")?, of("values")?))
        };
        Ok(Self {
            buffers: Some(pair("", &rest, columns)?),
            first: match first_columns {
                0 => None,
                columns => Some(pair("first_", &first, columns)?),
            },
            window: self.window,
            quantized: self.quantized,
            start: self.start,
            expected: self.expected,
        })
    }

    /// What of the buffers for first positions and of the others a state has. Never nothing, so that it tells
    /// what they are like: a column that was not written to is not looked at either.
    fn parts(&self, processed: u32) -> Result<(Range<i32>, Range<i32>)> {
        let seen = self.seen(processed)?;
        let first = seen.start.min(self.start - 1).max(0);
        let rest = (seen.start - self.start).max(0);
        Ok((
            first..seen.end.min(self.start).max(first + 1),
            rest..(seen.end - self.start).max(rest + 1),
        ))
    }

    /// The positions before `processed` that a later query can see, and two more: a drafter may look from the
    /// last processed token, and at one more than the window.
    fn seen(&self, processed: u32) -> Result<Range<i32>> {
        let end = i32::try_from(processed).map_err(|_| Error::failed("too many tokens"))?;
        Ok(match self.window {
            0 => 0..end,
            window => (end - window - 1).max(0)..end,
        })
    }

    /// What must be computed for the cache to be up to date.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let all = self.buffers.iter().chain(&self.first);
        all.flat_map(|(k, v)| [k, v])
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

/// Buffers with the rows of both, as long as the longer ones.
fn joined(
    a: Option<&(Tensor, Tensor)>,
    b: Option<&(Tensor, Tensor)>,
) -> Result<Option<(Tensor, Tensor)>> {
    match (a, b) {
        (Some((k0, v0)), Some((k1, v1))) => {
            let span = k0.dim(2).max(k1.dim(2));
            let join = |a: &Tensor, b: &Tensor| -> Result<Tensor> {
                Tensor::concat(&[&grow(a.clone(), span)?, &grow(b.clone(), span)?], 0)
            };
            Ok(Some((join(k0, k1)?, join(v0, v1)?)))
        }
        (None, None) => Ok(None),
        _ => Err(Error::failed("only prefilled rows can join prefilled rows")),
    }
}

/// Two buffers of zeros, which share memory until one is written to.
fn empty(shape: &[i32], dtype: DType) -> Result<(Tensor, Tensor)> {
    let empty = Tensor::full(shape, 0.0, dtype)?;
    Ok((empty.clone(), empty))
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
    /// As [`KvCache::expect`]; a recurrent state is as large as it is.
    pub fn expect(&mut self, tokens: usize) {
        if let Self::Kv(cache) = self {
            cache.expect(tokens);
        }
    }

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
