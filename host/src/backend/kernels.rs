//! Slots that are parts of a model: products, norms, attention.

use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::ops as mlx;
use plugin_api::abi::{AttentionMask, RawTensor};

use super::handle::{Explain, Handle, lent, lent_opt, op};
use super::native::{self, MaskKind};

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
        native::dequantize(&w, [&scales, &biases], group, bits).unwrap_or_else(|| {
            let made = mlx::dequantize(&*w, &*scales, biases.array(), group, bits);
            made.explain().map(Handle::from)
        })
    })
}

pub(super) extern "C" fn rms_norm(x: RawTensor, weight: RawTensor, eps: f32) -> RawTensor {
    op(|| {
        let weight = lent_opt(weight)?;
        let x = lent(x)?;
        match native::rms_norm(&x, weight.as_deref(), eps) {
            Some(normed) => normed,
            None => {
                let weight = weight.as_deref().map(Handle::array);
                fast::rms_norm(&*x, weight, eps).explain().map(Handle::from)
            }
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
        let freqs = freqs.as_deref().map(Handle::array);
        fast::rope_dynamic(&*x, dims, false, base, scale, &*offsets, freqs)
            .explain()
            .map(Handle::from)
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
        fast::scaled_dot_product_attention(&*q, &*k, &*v, scale, mask, None)
            .explain()
            .map(Handle::from)
    })
}
