//! Steps that move a few elements: rows of a table, parts of tensors, other dtypes.
//!
//! As nodes of MLX's graph they cost a hand-over to another thread, which has no core left to run on while the
//! kernels' threads watch for work: a draft of one token makes a dozen of them.

use mlx_rs::Dtype;

use super::{Output, by_kind, compute, enabled, kind, one};
use crate::backend::handle::{Handle, Lent, OpResult};
use crate::kernels::lanes::Float;

/// Elements of an outcome that are worth no thread of their own.
const FEW: usize = 1 << 16;

/// Whether an outcome of this shape is made here.
fn few(shape: &[i32]) -> bool {
    enabled() && shape.iter().map(|&n| n as usize).product::<usize>() <= FEW
}

/// Whether it lies in memory row by row, or is little enough to be packed.
fn near(x: &Handle) -> bool {
    !x.data().is_null() || x.size() <= FEW
}

/// Bytes of an element.
fn width(x: &Handle) -> usize {
    x.item_size()
}

fn length(shape: &[i32]) -> usize {
    shape.iter().map(|&n| n as usize).product()
}

fn new(shape: &[i32], dtype: Dtype) -> Output<'_> {
    Output {
        shape,
        dtype,
        from: None,
    }
}

/// The entries along the first axis that indices name; those outside are forced into it.
pub(in crate::backend) fn take(x: &Handle, indices: &Handle) -> Option<OpResult<Handle>> {
    let (&count, inner) = x.shape().split_first()?;
    let shape = [indices.shape(), inner].concat();
    if !few(&shape) || !near(x) || count == 0 || indices.dtype() != Dtype::Int32 {
        return None;
    }
    let (wanted, size) = (indices.size(), length(inner) * width(x));
    let taken = compute(&[x, indices], 0, &[new(&shape, x.dtype())], |buffers| {
        // SAFETY: elements are numbers, which are their bytes; the dtype of the indices was checked.
        unsafe {
            let from = buffers.input::<u8>(0, count as usize * size);
            let to = buffers.output::<u8>(0, wanted * size);
            for (at, &index) in buffers.input::<i32>(1, wanted).iter().enumerate() {
                let index = index.clamp(0, count - 1) as usize;
                to[at * size..][..size].copy_from_slice(&from[index * size..][..size]);
            }
        }
    });
    Some(taken.and_then(one))
}

/// Tensors one after the other along an axis.
pub(in crate::backend) fn concat(parts: &[Lent], axis: i32) -> Option<OpResult<Handle>> {
    let first = parts.first()?;
    let rank = first.shape().len();
    let axis = usize::try_from(axis).ok().or_else(|| {
        let back = usize::try_from(-i64::from(axis)).ok()?;
        rank.checked_sub(back)
    })?;
    let (before, rest) = first.shape().split_at_checked(axis)?;
    let (_, after) = rest.split_first()?;
    let fits = |part: &Lent| {
        let shape = part.shape();
        shape.len() == rank
            && shape[..axis] == *before
            && shape[axis + 1..] == *after
            && part.dtype() == first.dtype()
            && near(part)
    };
    let mut shape = first.shape().to_vec();
    shape[axis] = parts
        .iter()
        .filter(|part| fits(part))
        .map(|part| part.shape()[axis])
        .sum();
    if !few(&shape) || parts.len() > 64 || !parts.iter().all(fits) {
        return None;
    }
    let inputs: Vec<&Handle> = parts.iter().map(|part| &**part).collect();
    let (outer, size) = (length(before), length(after) * width(first));
    let runs: Vec<usize> = parts
        .iter()
        .map(|part| part.shape()[axis] as usize * size)
        .collect();
    let all: usize = runs.iter().sum();
    let joined = compute(&inputs, 0, &[new(&shape, first.dtype())], |buffers| {
        // SAFETY: elements are numbers, which are their bytes.
        let to = unsafe { buffers.output::<u8>(0, outer * all) };
        let mut start = 0;
        for (index, &run) in runs.iter().enumerate() {
            // SAFETY: as above.
            let from = unsafe { buffers.input::<u8>(index, outer * run) };
            for row in 0..outer {
                to[row * all + start..][..run].copy_from_slice(&from[row * run..][..run]);
            }
            start += run;
        }
    });
    Some(joined.and_then(one))
}

/// The box `starts..stops`, which is inside.
pub(in crate::backend) fn slice(
    x: &Handle,
    starts: &[i32],
    stops: &[i32],
) -> Option<OpResult<Handle>> {
    let lengths = x.shape();
    let shape: Vec<i32> = stops
        .iter()
        .zip(starts)
        .map(|(stop, start)| stop - start)
        .collect();
    if !few(&shape) || !near(x) || shape.is_empty() || shape == lengths {
        return None;
    }
    // Axes at the end that are whole, and the one before them, are copied in one piece.
    let whole = shape
        .iter()
        .zip(lengths)
        .rev()
        .take_while(|(a, b)| a == b)
        .count();
    let axis = shape.len() - 1 - whole;
    let size = length(&lengths[axis + 1..]) * width(x);
    let (run, first) = (shape[axis] as usize * size, starts[axis] as usize * size);
    let outer = length(&shape[..axis]);
    let all = x.size() * width(x);
    let cut = compute(&[x], 0, &[new(&shape, x.dtype())], |buffers| {
        // SAFETY: elements are numbers, which are their bytes.
        let (from, to) = unsafe {
            (
                buffers.input::<u8>(0, all),
                buffers.output::<u8>(0, outer * run),
            )
        };
        for row in 0..outer {
            // Where this row of the outer axes lies in `x`, counted in entries of the axis.
            let (mut left, mut place, mut stride) = (row, 0, lengths[axis] as usize);
            for at in (0..axis).rev() {
                let n = shape[at] as usize;
                place += (starts[at] as usize + left % n) * stride;
                left /= n;
                stride *= lengths[at] as usize;
            }
            let from = &from[place * size + first..][..run];
            to[row * run..][..run].copy_from_slice(from);
        }
    });
    Some(cut.and_then(one))
}

/// Floats in another precision.
pub(in crate::backend) fn astype(x: &Handle, dtype: Dtype) -> Option<OpResult<Handle>> {
    let from = kind(x)?;
    let to = super::float_kind(dtype)?;
    if dtype == x.dtype() || !few(x.shape()) {
        return None;
    }
    let count = x.size();
    let made = compute(&[x], 0, &[new(x.shape(), dtype)], |buffers| {
        by_kind!(from, T => by_kind!(to, U => {
            // SAFETY: these are the dtypes.
            let (from, to) = unsafe {
                (buffers.input::<T>(0, count), buffers.output::<U>(0, count))
            };
            for (to, from) in to.iter_mut().zip(from) {
                *to = U::narrow(from.wide());
            }
        }));
    });
    Some(made.and_then(one))
}

/// Packed weights as numbers of the scales' dtype.
pub(in crate::backend) fn dequantize(
    words: &Handle,
    [scales, biases]: [&Handle; 2],
    group: i32,
    bits: i32,
) -> Option<OpResult<Handle>> {
    let kind = kind(scales)?;
    let (&columns, rows) = words.shape().split_last()?;
    let (group, bits) = (usize::try_from(group).ok()?, u32::try_from(bits).ok()?);
    if !matches!(bits, 4 | 8) || group == 0 || words.dtype() != Dtype::Uint32 {
        return None;
    }
    let per_word = 32 / bits as usize;
    let inputs = columns as usize * per_word;
    let shape = [rows, &[inputs as i32]].concat();
    let groups = [rows, &[(inputs / group) as i32]].concat();
    let fits = inputs.is_multiple_of(group)
        && group.is_multiple_of(per_word)
        && scales.shape() == groups
        && biases.shape() == groups
        && biases.dtype() == scales.dtype();
    if !fits || !few(&shape) {
        return None;
    }
    let count = length(&shape);
    let output = new(&shape, scales.dtype());
    let made = compute(&[words, scales, biases], 0, &[output], |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above.
            let (words, scales, biases, out) = unsafe {
                (
                    buffers.input::<u32>(0, count / per_word),
                    buffers.input::<T>(1, count / group),
                    buffers.input::<T>(2, count / group),
                    buffers.output::<T>(0, count),
                )
            };
            for (at, out) in out.chunks_exact_mut(group).enumerate() {
                let (scale, bias) = (scales[at].wide(), biases[at].wide());
                let words = &words[at * group / per_word..];
                for (word, out) in words.iter().zip(out.chunks_exact_mut(per_word)) {
                    for (place, out) in (0..).zip(out) {
                        let code = word >> (bits * place) & ((1 << bits) - 1);
                        // Rounded where the steps one by one would be.
                        let scaled = T::narrow(scale * code as f32).wide();
                        *out = T::narrow(scaled + bias);
                    }
                }
            }
        });
    });
    Some(made.and_then(one))
}
