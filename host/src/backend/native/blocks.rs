//! Norms, rotary embedding and attention one by one.

use mlx_rs::Dtype;

use super::{Buffers, Output, by_kind, compute, divisors, elements, enabled, kind, lengths, one};
use crate::backend::handle::{Explain, Handle, OpResult};
use crate::kernels::attention::{Attention, Visible};
use crate::kernels::rows::{self, HeadShape, Rotation};

// ---- norm

pub(in crate::backend) fn rms_norm(
    x: &Handle,
    weight: Option<&Handle>,
    eps: f32,
) -> Option<OpResult<Handle>> {
    let width = *x.shape().last()?;
    let same = |w: &Handle| w.dtype() == x.dtype() && w.shape() == [width];
    if !enabled() || width == 0 || !weight.is_none_or(same) {
        return None;
    }
    let (kind, len, width) = (kind(x)?, elements(x), width as usize);
    let inputs: Vec<&Handle> = [x].into_iter().chain(weight).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
        from: None,
    };
    let normed = compute(&inputs, 0, &[output], |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above.
            let (x, out): (&[T], &mut [T]) =
                unsafe { (buffers.input(0, len), buffers.output(0, len)) };
            // SAFETY: as above.
            let weight = weight.map(|_| unsafe { buffers.input::<T>(1, width) });
            rows::rms_norm(x, weight, eps, width, out);
        });
    });
    Some(normed.and_then(one))
}

// ---- argmax

/// Along the last axis.
pub(in crate::backend) fn argmax(x: &Handle, axis: i32, keep: bool) -> Option<OpResult<Handle>> {
    let (&width, rows) = x.shape().split_last()?;
    let last = axis == -1 || axis == rows.len() as i32;
    if !enabled() || !last || width == 0 {
        return None;
    }
    let (kind, len, width) = (kind(x)?, elements(x), width as usize);
    let mut shape = rows.to_vec();
    shape.extend(keep.then_some(1));
    let output = Output {
        shape: &shape,
        dtype: Dtype::Int32,
        from: None,
    };
    let found = compute(&[x], 0, &[output], |buffers| {
        by_kind!(kind, T => {
            // SAFETY: the dtype was checked above; one index per row.
            let (x, out): (&[T], &mut [i32]) =
                unsafe { (buffers.input(0, len), buffers.output(0, len / width)) };
            rows::argmax(x, width, out);
        });
    });
    Some(found.and_then(one))
}

// ---- rotary embedding

/// `[B, heads, T, D]` that a kernel reads by strides.
struct Heads<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
}

/// # Safety
/// The input is `[B, heads, T, D]` of `T`, flagged as strided.
unsafe fn heads<'a, T>(buffers: &'a Buffers, index: usize, shape: [usize; 4]) -> Heads<'a, T> {
    let [b, h, t, d] = shape;
    // SAFETY: four axes.
    let strides = match unsafe { buffers.strides::<4>(index) } {
        Some([rows, heads, columns, _]) => [rows as usize, heads as usize, columns as usize],
        None => [h * t * d, t * d, d],
    };
    let last = |n: usize, stride: usize| n.saturating_sub(1) * stride;
    let len = match b * h * t * d {
        0 => 0,
        _ => last(b, strides[0]) + last(h, strides[1]) + last(t, strides[2]) + d,
    };
    Heads {
        // SAFETY: from the first element to the last one of the array; MLX's strides are not
        // negative here, as none of the table's ops makes such views.
        data: unsafe { buffers.input(index, len) },
        strides,
    }
}

pub(in crate::backend) fn rope(
    x: &Handle,
    dims: i32,
    base: f32,
    freqs: Option<&Handle>,
    scale: f32,
    offsets: &Handle,
) -> Option<OpResult<Handle>> {
    let shape = lengths::<4>(x)?;
    let dims = usize::try_from(dims).ok()?;
    let given = |f: &Handle| f.dtype() == Dtype::Float32 && f.shape() == [dims as i32 / 2];
    let fits = enabled()
        && dims.is_multiple_of(2)
        && dims <= shape[3]
        && offsets.dtype() == Dtype::Int32
        && freqs.is_none_or(given);
    if !fits {
        return None;
    }
    let kind = kind(x)?;
    let [batch, heads_count, width, dim] = shape;
    let inputs: Vec<&Handle> = [x, offsets].into_iter().chain(freqs).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
        from: None,
    };
    let turned = compute(&inputs, 1, &[output], |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above: x, offsets [B], divisors [dims / 2] if given.
            unsafe {
                let x = heads::<T>(buffers, 0, shape);
                let offsets = buffers.input::<i32>(1, batch);
                let computed: Vec<f32>;
                let divisors = if freqs.is_some() {
                    buffers.input::<f32>(2, dims / 2)
                } else {
                    computed = divisors(base, dims);
                    &computed
                };
                let shape = HeadShape {
                    batch,
                    heads: heads_count,
                    width,
                    dim,
                    strides: x.strides,
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                rows::rope(x.data, shape, Rotation { divisors, scale }, offsets, out);
            }
        });
    });
    Some(turned.and_then(one))
}

// ---- attention

/// The mask of a call.
#[derive(Clone, Copy)]
pub(in crate::backend) enum MaskKind {
    All,
    Causal,
    Given,
}

pub(in crate::backend) fn attention(
    q: &Handle,
    k: &Handle,
    v: &Handle,
    scale: f32,
    kind_of_mask: MaskKind,
    mask: Option<&Handle>,
) -> Option<OpResult<Handle>> {
    let (sq, sk) = (lengths::<4>(q)?, lengths::<4>(k)?);
    let dtype = q.dtype();
    let given = |m: &Handle| {
        m.dtype() == Dtype::Bool && m.shape() == [sq[0] as i32, 1, sq[2] as i32, sk[2] as i32]
    };
    let fits = enabled()
        && k.shape() == v.shape()
        && k.dtype() == dtype
        && v.dtype() == dtype
        && sk[0] == sq[0]
        && sk[3] == sq[3]
        && sk[1] > 0
        && sq[1].is_multiple_of(sk[1])
        && mask.is_none_or(given);
    if !fits {
        return None;
    }
    let kind = kind(q)?;
    let ([batch, heads_count, width, dim], [_, kv_heads, span, _]) = (sq, sk);
    let inputs: Vec<&Handle> = [q, k, v].into_iter().chain(mask).collect();
    let shape = [batch, width, heads_count, dim].map(|n| n as i32);
    let output = Output {
        shape: &shape,
        dtype,
        from: None,
    };
    let mixed = compute(&inputs, 0b111, &[output], |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above; the mask is [B, 1, T, S] bool.
            unsafe {
                let q = heads::<T>(buffers, 0, sq);
                let (k, v) = (heads::<T>(buffers, 1, sk), heads::<T>(buffers, 2, sk));
                let visible = match kind_of_mask {
                    MaskKind::All => Visible::All,
                    MaskKind::Causal => Visible::Causal,
                    MaskKind::Given => Visible::Mask(buffers.input(3, batch * width * span)),
                };
                let attention = Attention {
                    batch,
                    heads: heads_count,
                    kv_heads,
                    width,
                    span,
                    dim,
                    scale,
                    strides: [q.strides, k.strides, v.strides],
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                attention.run(q.data, k.data, v.data, visible, out);
            }
        });
    });
    let mixed = mixed.and_then(one);
    // The kernel writes columns first, as the projection after it reads them.
    Some(mixed.and_then(|mixed| {
        mixed
            .transpose_axes(&[0, 2, 1, 3])
            .explain()
            .map(Handle::from)
    }))
}
