//! Slots that are whole blocks of a model: products, norms, attention, the gated delta rule.

use abi_stable::std_types::RVec;
use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::{Array, Dtype, ops as mlx};
use plugin_api::abi::{AttentionMask, GatedDelta, RawTensor};

use super::handle::{Explain, OpResult, lent, lent_opt, op, ops};
use super::native::{self, MaskKind};
use super::ops::slice_array;
use crate::kernels::delta;

pub(super) extern "C" fn matmul(a: RawTensor, b: RawTensor) -> RawTensor {
    op(|| lent(a)?.matmul(&*lent(b)?).explain())
}

pub(super) extern "C" fn dequantize(
    w: RawTensor,
    scales: RawTensor,
    biases: RawTensor,
    group: i32,
    bits: i32,
) -> RawTensor {
    op(|| {
        let (w, scales, biases) = (lent(w)?, lent(scales)?, lent(biases)?);
        mlx::dequantize(&*w, &*scales, &*biases, group, bits).explain()
    })
}

pub(super) extern "C" fn rms_norm(x: RawTensor, weight: RawTensor, eps: f32) -> RawTensor {
    op(|| {
        let weight = lent_opt(weight)?;
        let x = lent(x)?;
        match native::rms_norm(&x, weight.as_deref(), eps) {
            Some(normed) => normed,
            None => fast::rms_norm(&*x, weight.as_deref(), eps).explain(),
        }
    })
}

pub(super) extern "C" fn rope(
    x: RawTensor,
    dims: i32,
    base: f32,
    freqs: RawTensor,
    scale: f32,
    offsets: RawTensor,
) -> RawTensor {
    op(|| {
        let (x, offsets, freqs) = (lent(x)?, lent(offsets)?, lent_opt(freqs)?);
        let rows = x.shape().first().copied();
        if x.ndim() != 4 || Some(offsets.shape()) != rows.as_ref().map(std::slice::from_ref) {
            return Err(format!(
                "rope of {:?} at offsets {:?}: expected [B, heads, T, D] and [B]",
                x.shape(),
                offsets.shape()
            ));
        }
        if let Some(turned) = native::rope(&x, dims, base, freqs.as_deref(), scale, &offsets) {
            return turned;
        }
        let base = freqs.is_none().then_some(base);
        fast::rope_dynamic(&*x, dims, false, base, scale, &*offsets, freqs.as_deref()).explain()
    })
}

pub(super) extern "C" fn attention(
    q: RawTensor,
    k: RawTensor,
    v: RawTensor,
    scale: f32,
    kind: AttentionMask,
    mask: RawTensor,
) -> RawTensor {
    op(|| {
        let (q, k, v, mask) = (lent(q)?, lent(k)?, lent(v)?, lent_opt(mask)?);
        let native = |kind, mask| native::attention(&q, &k, &v, scale, kind, mask);
        let (own, mask) = match (kind, mask.as_deref()) {
            (AttentionMask::NONE, _) => (native(MaskKind::All, None), None),
            (AttentionMask::CAUSAL, _) => (
                native(MaskKind::Causal, None),
                Some(ScaledDotProductAttentionMask::Causal),
            ),
            (AttentionMask::TENSOR, Some(mask)) => (
                native(MaskKind::Given, Some(mask)),
                Some(ScaledDotProductAttentionMask::Array(mask)),
            ),
            (AttentionMask::TENSOR, None) => return Err("the mask is absent".to_owned()),
            (other, _) => return Err(format!("mask kind {other:?} is not known to this host")),
        };
        if let Some(mixed) = own {
            return mixed;
        }
        fast::scaled_dot_product_attention(&*q, &*k, &*v, scale, mask, None).explain()
    })
}

pub(super) extern "C" fn gated_delta(inputs: &GatedDelta) -> RVec<RawTensor> {
    ops(|| gated_delta_steps(inputs))
}

/// One step at a time, as the rule is written: `T = 1` and `T = K` round alike.
fn gated_delta_steps(inputs: &GatedDelta) -> OpResult<Vec<Array>> {
    let (q, k, v) = (lent(inputs.q)?, lent(inputs.k)?, lent(inputs.v)?);
    let (decay, beta) = (lent(inputs.decay)?, lent(inputs.beta)?);
    let mut state = Array::clone(&*lent(inputs.state)?);
    let shapes = || {
        format!(
            "gated_delta of q {:?}, k {:?}, v {:?}, state {:?}",
            q.shape(),
            k.shape(),
            v.shape(),
            state.shape()
        )
    };
    let (&[b, t, hk, dk], &[_, _, hv, dv]) = (q.shape(), v.shape()) else {
        return Err(shapes());
    };
    let consistent = k.shape() == q.shape()
        && v.shape() == [b, t, hv, dv]
        && decay.shape() == [b, t, hv]
        && beta.shape() == [b, t, hv]
        && state.shape() == [b, hv, dv, dk]
        && hk > 0
        && hv % hk == 0;
    if !consistent {
        return Err(shapes());
    }
    let rule = delta::GatedDelta {
        batch: b as usize,
        width: t as usize,
        key_heads: hk as usize,
        value_heads: hv as usize,
        key_dim: dk as usize,
        value_dim: dv as usize,
        every_state: inputs.every_state,
    };
    if let Some(done) = native::gated_delta(rule, [&q, &k, &v, &decay, &beta, &state]) {
        return done;
    }
    let dtype = v.dtype();
    let f32 = |x: &Array| x.as_dtype(Dtype::Float32).explain();
    // [B, T, heads, D] to [B, Hv, T, D], key heads repeated for their value heads.
    let by_head = |x: &Array, heads: i32, dim: i32| -> OpResult<Array> {
        let mut x = f32(x)?;
        if heads < hv {
            let wide = [b, t, heads, hv / heads, dim];
            x = x.reshape(&[b, t, heads, 1, dim]).explain()?;
            x = mlx::broadcast_to(&x, &wide).explain()?;
            x = x.reshape(&[b, t, hv, dim]).explain()?;
        }
        x.transpose_axes(&[0, 2, 1, 3]).explain()
    };
    let (q, k, v) = (
        by_head(&q, hk, dk)?,
        by_head(&k, hk, dk)?,
        by_head(&v, hv, dv)?,
    );
    // [B, T, Hv] to [B, Hv, T, 1].
    let per_step = |x: &Array| -> OpResult<Array> {
        let x = f32(x)?.transpose_axes(&[0, 2, 1]).explain()?;
        x.reshape(&[b, hv, t, 1]).explain()
    };
    let (decay, beta) = (per_step(&decay)?, per_step(&beta)?);
    let at =
        |x: &Array, step: i32, dim: i32| slice_array(x, &[0, 0, step, 0], &[b, hv, step + 1, dim]);

    let mut outputs = Vec::with_capacity(t as usize);
    let mut states = Vec::new();
    for step in 0..t {
        let row = at(&k, step, dk)?;
        let column = |x: &Array, dim: i32| x.reshape(&[b, hv, dim, 1]).explain();
        let decayed = state.multiply(&at(&decay, step, 1)?).explain()?;
        let known = decayed.matmul(&column(&row, dk)?).explain()?;
        let error = column(&at(&v, step, dv)?, dv)?.subtract(&known).explain()?;
        let change = error.multiply(&at(&beta, step, 1)?).explain()?;
        let change = change.multiply(&row).explain()?;
        state = decayed.add(&change).explain()?;
        let y = state.matmul(&column(&at(&q, step, dk)?, dk)?).explain()?;
        outputs.push(y);
        if inputs.every_state {
            states.push(state.clone());
        }
    }
    if !inputs.every_state {
        states.push(state);
    }
    // T times [B, Hv, Dv, 1] to [B, T, Hv, Dv].
    let y = mlx::concatenate(&outputs, 3).explain()?;
    let y = y.transpose_axes(&[0, 3, 1, 2]).explain()?;
    let mut all = vec![y.as_dtype(dtype).explain()?];
    all.append(&mut states);
    Ok(all)
}
