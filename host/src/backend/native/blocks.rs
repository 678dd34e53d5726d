//! Norms, rotary embedding and attention one by one.

use mlx_rs::{Array, Dtype};

use super::{
    Buffers, Kernel, Kind, Output, by_kind, divisors, elements, enabled, kind, lengths, node, one,
};
use crate::backend::handle::OpResult;
use crate::kernels::attention::{Attention, Visible};
use crate::kernels::rows::{self, HeadShape, Rotation};

// ---- norm

struct RmsNorm {
    kind: Kind,
    len: usize,
    width: usize,
    weighted: bool,
    eps: f32,
}

impl Kernel for RmsNorm {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        by_kind!(self.kind, T => {
            // SAFETY: `rms_norm` checked dtypes and shapes.
            let (x, out): (&[T], &mut [T]) =
                unsafe { (buffers.input(0, self.len), buffers.output(0, self.len)) };
            // SAFETY: as above.
            let weight = self.weighted.then(|| unsafe { buffers.input::<T>(1, self.width) });
            rows::rms_norm(x, weight, self.eps, self.width, out);
        });
    }
}

pub(in crate::backend) fn rms_norm(
    x: &Array,
    weight: Option<&Array>,
    eps: f32,
) -> Option<OpResult<Array>> {
    let width = *x.shape().last()?;
    let same = |w: &Array| w.dtype() == x.dtype() && w.shape() == [width];
    if !enabled() || width == 0 || !weight.is_none_or(same) {
        return None;
    }
    let kernel = RmsNorm {
        kind: kind(x)?,
        len: elements(x),
        width: width as usize,
        weighted: weight.is_some(),
        eps,
    };
    let inputs: Vec<&Array> = [x].into_iter().chain(weight).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
        from: None,
    };
    Some(node(kernel, &inputs, 0, &[output]).and_then(one))
}

// ---- rotary embedding

struct Rope {
    kind: Kind,
    shape: [usize; 4],
    dims: usize,
    base: f32,
    given: bool,
    scale: f32,
}

/// `[B, heads, T, D]` that a kernel reads by strides.
struct Heads<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
}

/// # Safety
/// The input is `[B, heads, T, D]` of `T`, flagged as strided.
unsafe fn heads<'a, T>(buffers: &'a Buffers<'_>, index: usize, shape: [usize; 4]) -> Heads<'a, T> {
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

impl Kernel for Rope {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let [batch, heads_count, width, dim] = self.shape;
        let pairs = self.dims / 2;
        by_kind!(self.kind, T => {
            // SAFETY: `rope` checked dtypes and shapes: x, offsets [B], divisors [dims / 2] if given.
            unsafe {
                let x = heads::<T>(buffers, 0, self.shape);
                let offsets = buffers.input::<i32>(1, batch);
                let computed: Vec<f32>;
                let divisors = if self.given {
                    buffers.input::<f32>(2, pairs)
                } else {
                    computed = divisors(self.base, self.dims);
                    &computed
                };
                let shape = HeadShape {
                    batch,
                    heads: heads_count,
                    width,
                    dim,
                    strides: x.strides,
                };
                let rotation = Rotation {
                    divisors,
                    scale: self.scale,
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                rows::rope(x.data, shape, rotation, offsets, out);
            }
        });
    }
}

pub(in crate::backend) fn rope(
    x: &Array,
    dims: i32,
    base: f32,
    freqs: Option<&Array>,
    scale: f32,
    offsets: &Array,
) -> Option<OpResult<Array>> {
    let shape = lengths::<4>(x)?;
    let dims = usize::try_from(dims).ok()?;
    let given = |f: &Array| f.dtype() == Dtype::Float32 && f.shape() == [dims as i32 / 2];
    let fits = enabled()
        && dims.is_multiple_of(2)
        && dims <= shape[3]
        && offsets.dtype() == Dtype::Int32
        && freqs.is_none_or(given);
    if !fits {
        return None;
    }
    let kernel = Rope {
        kind: kind(x)?,
        shape,
        dims,
        base,
        given: freqs.is_some(),
        scale,
    };
    let inputs: Vec<&Array> = [x, offsets].into_iter().chain(freqs).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
        from: None,
    };
    Some(node(kernel, &inputs, 1, &[output]).and_then(one))
}

// ---- attention

/// The mask of a call.
#[derive(Clone, Copy)]
pub(in crate::backend) enum MaskKind {
    All,
    Causal,
    Given,
}

struct Attend {
    kind: Kind,
    q: [usize; 4],
    kv: [usize; 4],
    scale: f32,
    mask: MaskKind,
}

impl Kernel for Attend {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let ([batch, heads_count, width, dim], [_, kv_heads, span, _]) = (self.q, self.kv);
        by_kind!(self.kind, T => {
            // SAFETY: `attention` checked dtypes and shapes; the mask is [B, 1, T, S] bool.
            unsafe {
                let q = heads::<T>(buffers, 0, self.q);
                let (k, v) = (heads::<T>(buffers, 1, self.kv), heads::<T>(buffers, 2, self.kv));
                let visible = match self.mask {
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
                    scale: self.scale,
                    strides: [q.strides, k.strides, v.strides],
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                attention.run(q.data, k.data, v.data, visible, out);
            }
        });
    }
}

pub(in crate::backend) fn attention(
    q: &Array,
    k: &Array,
    v: &Array,
    scale: f32,
    kind_of_mask: MaskKind,
    mask: Option<&Array>,
) -> Option<OpResult<Array>> {
    let (sq, sk) = (lengths::<4>(q)?, lengths::<4>(k)?);
    let dtype = q.dtype();
    let given = |m: &Array| {
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
    let kernel = Attend {
        kind: kind(q)?,
        q: sq,
        kv: sk,
        scale,
        mask: kind_of_mask,
    };
    let inputs: Vec<&Array> = [q, k, v].into_iter().chain(mask).collect();
    let shape = [sq[0], sq[2], sq[1], sq[3]].map(|n| n as i32);
    let output = Output {
        shape: &shape,
        dtype,
        from: None,
    };
    let mixed = node(kernel, &inputs, 0b111, &[output]).and_then(one);
    // The kernel writes columns first, as the projection after it reads them.
    Some(mixed.and_then(|mixed| {
        mixed
            .transpose_axes(&[0, 2, 1, 3])
            .map_err(|e| e.what().to_owned())
    }))
}
