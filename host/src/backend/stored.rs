//! Keys and values in caches by MLX's own ops: where what is new goes, and what there is to see.

use mlx_rs::{Array, Dtype, ops as mlx};

use super::attend::SelfAttention;
use super::handle::{Explain, OpResult};
use super::ops::{slice_array, slice_update_array};
use crate::kernels::kv::{MARGIN, MOST, Packing};

/// Caches: keys, then values.
pub(super) struct Stored {
    /// Everything from position `start` on, exact or quantized.
    all: [Array; 2],
    /// The positions before, if those lie elsewhere.
    first: Option<[Array; 2]>,
}

/// What there is to see.
pub(super) struct Seen {
    /// `[B, kv_heads, columns, D]`; quantized ones in single precision.
    pub keys: Array,
    /// As `keys`.
    pub values: Array,
    /// In each row, of every column the position that lies there; negative: none.
    pub positions: Vec<Vec<i32>>,
}

impl Stored {
    /// As they come.
    pub fn of(args: &SelfAttention) -> Self {
        Self {
            all: [Array::clone(&args.keys), Array::clone(&args.values)],
            first: args
                .first
                .as_ref()
                .map(|first| first.each_ref().map(|x| Array::clone(x))),
        }
    }

    /// With what is new, `[B, kv_heads, T, D]`.
    pub fn with(self, args: &SelfAttention, new: Option<&[Array; 2]>) -> OpResult<Self> {
        let Some(new) = new else {
            return Ok(self);
        };
        let put = |caches: [Array; 2], new: &[Array; 2], from, to| -> OpResult<[Array; 2]> {
            let [keys, values] = caches;
            let [k, v] = new;
            Ok([
                written(&keys, k, &args.offsets, from, to)?,
                written(&values, v, &args.offsets, from, to)?,
            ])
        };
        let Some(packing) = args.packing else {
            let all = put(self.all, new, 0, i32::MAX)?;
            return Ok(Self { all, ..self });
        };
        let packed = [quantized(&new[0], packing)?, quantized(&new[1], packing)?];
        let first = match self.first {
            Some(first) => Some(put(first, new, 0, args.start)?),
            None => None,
        };
        let all = put(self.all, &packed, args.start, i32::MAX)?;
        Ok(Self { all, first })
    }

    /// All of them, those for first positions last.
    pub fn into_arrays(self) -> impl Iterator<Item = Array> {
        self.all.into_iter().chain(self.first.into_iter().flatten())
    }

    /// What there is to see in a pass of `t` columns.
    pub fn seen(&self, args: &SelfAttention, t: i32) -> OpResult<Seen> {
        let longest = args.offsets.iter().max().copied().unwrap_or(0) + t;
        let mut positions = vec![Vec::new(); args.offsets.len()];
        let mut parts = [Vec::new(), Vec::new()];
        let mut see = |caches: &[Array; 2], from: i32, to: i32, packing| -> OpResult<()> {
            let &[b, heads, capacity, width] = caches[0].shape() else {
                return Err("caches of another rank".to_owned());
            };
            let span = (longest.min(to) - from).min(capacity);
            if span <= 0 {
                return Ok(());
            }
            for (positions, &offset) in positions.iter_mut().zip(&args.offsets) {
                // The last position that was put in each column.
                let last = (offset + t).min(to) - 1 - from;
                positions.extend((0..span).map(|column| {
                    let after = last - (last - column).rem_euclid(capacity);
                    if after < 0 { -1 } else { from + after }
                }));
            }
            for (parts, cache) in parts.iter_mut().zip(caches) {
                let part = slice_array(cache, &[0; 4], &[b, heads, span, width])?;
                parts.push(match packing {
                    Some(packing) => widened(&part, args.dim, packing)?,
                    None if args.packing.is_some() => part.as_dtype(Dtype::Float32).explain()?,
                    None => part,
                });
            }
            Ok(())
        };
        if let Some(first) = &self.first {
            see(first, 0, args.start, None)?;
        }
        see(&self.all, args.start, i32::MAX, args.packing)?;
        let whole = |parts: Vec<Array>| match <[Array; 1]>::try_from(parts) {
            Ok([one]) => Ok(one),
            Err(parts) => mlx::concatenate(&parts, 2).explain(),
        };
        let [keys, values] = parts;
        Ok(Seen {
            keys: whole(keys)?,
            values: whole(values)?,
            positions,
        })
    }
}

/// The cache of the positions `from..to` with those of a pass's columns that are among them.
fn written(cache: &Array, columns: &Array, offsets: &[i32], from: i32, to: i32) -> OpResult<Array> {
    let (&[rows, heads, width, size], capacity) = (columns.shape(), cache.shape()[2]) else {
        return Err("columns of another rank".to_owned());
    };
    let first = offsets[0] - from;
    if first >= 0
        && first + width <= capacity
        && offsets[0] + width <= to
        && offsets.iter().all(|&offset| offset == offsets[0])
    {
        debug_assert_eq!(rows as usize, offsets.len());
        return slice_update_array(cache, columns, &[0, 0, first, 0]);
    }
    let mut cache = cache.clone();
    for (row, &offset) in (0..).zip(offsets) {
        let mut next = offset.max(from);
        let end = (offset + width).min(to);
        while next < end {
            // Up to the last column of the cache, then on from its first one.
            let at = (next - from) % capacity;
            let stop = end.min(next + capacity - at);
            let (start, end) = (
                [row, 0, next - offset, 0],
                [row + 1, heads, stop - offset, size],
            );
            let part = slice_array(columns, &start, &end)?;
            cache = slice_update_array(&cache, &part, &[row, 0, at, 0])?;
            next = stop;
        }
    }
    Ok(cache)
}

fn number(x: f32) -> Array {
    Array::from_f32(x)
}

/// `[.., D]` as words, exactly as [`Packing::encode`] makes them.
fn quantized(x: &Array, packing: Packing) -> OpResult<Array> {
    let shape = x.shape();
    let (dim, lead) = shape.split_last().ok_or("a number has no rows")?;
    let of = |last: &[i32]| [lead, last].concat();
    let (group, bits) = (packing.group as i32, packing.bits as i32);
    let groups = dim / group;
    let x = x.as_dtype(Dtype::Float32).explain()?;
    let x = x.reshape(&of(&[groups, group])).explain()?;
    let half = |x: Array| -> OpResult<Array> {
        let within = mlx::minimum(mlx::maximum(x, number(-MOST)).explain()?, number(MOST));
        within.explain()?.as_dtype(Dtype::Float16).explain()
    };
    let [relative, absolute] = MARGIN.map(number);
    let margin =
        |x: &Array| -> OpResult<Array> { x.abs().explain()?.multiply(&relative).explain() };
    let least = x.min_axis(-1, true).explain()?;
    let largest = x.max_axis(-1, true).explain()?;
    let bias = least.subtract(&margin(&least)?).explain()?;
    let bias = half(bias.subtract(&absolute).explain()?)?;
    let wide_bias = bias.as_dtype(Dtype::Float32).explain()?;
    let step = largest.subtract(&wide_bias).explain()?;
    let step = step.divide(number(packing.most())).explain()?;
    let scale = step.add(&margin(&step)?).explain()?;
    let scale = mlx::maximum(scale.add(&absolute).explain()?, number(0.0)).explain()?;
    let scale = half(scale)?;
    let wide_scale = scale.as_dtype(Dtype::Float32).explain()?;
    let codes = x.subtract(&wide_bias).explain()?;
    let codes = codes.divide(&wide_scale).explain()?;
    let codes = mlx::maximum(codes.round(0).explain()?, number(0.0)).explain()?;
    let codes = mlx::minimum(codes, number(packing.most())).explain()?;
    // Of a word each code has its own bits, so that sums put them together.
    let per_word = 32 / bits;
    let places: Vec<u32> = (0..per_word).map(|place| 1 << (place * bits)).collect();
    let codes = codes.as_dtype(Dtype::Uint32).explain()?;
    let codes = codes.reshape(&of(&[dim / per_word, per_word])).explain()?;
    let codes = codes.multiply(Array::from_slice(&places, &[per_word]));
    let codes = codes.explain()?.sum_axis(-1, false).explain()?;
    let both = mlx::concatenate(&[scale, bias], -1).explain()?;
    let both = both.view_dtype(Dtype::Uint32).explain()?;
    let both = both.reshape(&of(&[groups])).explain()?;
    mlx::concatenate(&[codes, both], -1).explain()
}

/// `[B, heads, columns, words]` as `[B, heads, columns, dim]` in single precision.
fn widened(words: &Array, dim: i32, packing: Packing) -> OpResult<Array> {
    let &[b, heads, columns, width] = words.shape() else {
        return Err("rows of words of another rank".to_owned());
    };
    let groups = dim / packing.group as i32;
    let split = width - groups;
    let codes = slice_array(words, &[0; 4], &[b, heads, columns, split])?;
    let both = slice_array(words, &[0, 0, 0, split], &[b, heads, columns, width])?;
    let both = both.view_dtype(Dtype::Float16).explain()?;
    let both = both.as_dtype(Dtype::Float32).explain()?;
    let both = both.reshape(&[b, heads, columns, groups, 2]).explain()?;
    let part = |side: i32| -> OpResult<Array> {
        let (from, to) = ([0, 0, 0, 0, side], [b, heads, columns, groups, side + 1]);
        let part = slice_array(&both, &from, &to)?;
        part.reshape(&[b, heads, columns, groups]).explain()
    };
    let (group, bits) = (packing.group as i32, packing.bits as i32);
    mlx::dequantize(&codes, part(0)?, Some(&part(1)?), group, bits).explain()
}
