//! Causal self-attention between its projections.

use mlx_rs::{Array, Dtype};

use super::{Output, by_kind, compute, divisors, enabled, kind, lengths};
use crate::backend::attend::SelfAttention;
use crate::backend::handle::OpResult;
use crate::kernels::attend::Attend;
use crate::kernels::rows::Rotation;

pub(in crate::backend) fn attend(args: &SelfAttention) -> Option<OpResult<Vec<Array>>> {
    let dtype = args.q.dtype();
    let [batch, kv_heads, capacity, dim] = lengths::<4>(&args.keys)?;
    let [_, width, _] = lengths::<3>(&args.q)?;
    let given = |f: &Array| f.dtype() == Dtype::Float32 && f.shape() == [args.rope_dims / 2];
    let norm = |w: &Array| w.dtype() == dtype && w.shape() == [dim as i32];
    let alike = [&args.k, &args.v, &args.keys, &args.values];
    let fits = enabled()
        && alike.iter().all(|array| array.dtype() == dtype)
        && args.rope_freqs.as_deref().is_none_or(given)
        && args
            .norms
            .as_ref()
            .is_none_or(|(q, k, _)| norm(q) && norm(k));
    if !fits {
        return None;
    }
    let kind = kind(&args.q)?;
    let (heads, rope_dims) = (args.heads as usize, args.rope_dims as usize);
    let mut arrays: Vec<&Array> = vec![&args.q, &args.k, &args.v, &args.keys, &args.values];
    if let Some((q, k, _)) = &args.norms {
        arrays.extend([&**q, &**k]);
    }
    arrays.extend(args.rope_freqs.as_deref());
    let mixed = [batch, width, heads * dim].map(|n| n as i32);
    let kept = |index: usize, array| Output {
        shape: Array::shape(array),
        dtype,
        from: Some(index),
    };
    let outputs = [
        Output {
            shape: &mixed,
            dtype,
            from: None,
        },
        kept(3, &args.keys),
        kept(4, &args.values),
    ];
    let columns = batch * width;
    let (own, shared) = (columns * heads * dim, columns * kv_heads * dim);
    let cache = batch * kv_heads * capacity * dim;
    Some(compute(&arrays, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller. The caches' inputs may be
            // the second and third output, and are only used as such.
            unsafe {
                let norms = args
                    .norms
                    .as_ref()
                    .map(|(_, _, eps)| (buffers.input::<T>(5, dim), buffers.input(6, dim), *eps));
                let computed;
                let divisors = if args.rope_freqs.is_some() {
                    buffers.input::<f32>(arrays.len() - 1, rope_dims / 2)
                } else {
                    computed = divisors(args.rope_base, rope_dims);
                    &computed
                };
                let attend = Attend::<T> {
                    batch,
                    width,
                    heads,
                    kv_heads,
                    dim,
                    capacity,
                    q: buffers.input(0, if args.gated { 2 * own } else { own }),
                    gated: args.gated,
                    k: buffers.input(1, shared),
                    v: buffers.input(2, shared),
                    norms,
                    rotation: Rotation {
                        divisors,
                        scale: args.rope_scale,
                    },
                    offsets: &args.offsets,
                    window: args.window as usize,
                    scale: args.scale,
                };
                attend.run(
                    buffers.output(1, cache),
                    buffers.output(2, cache),
                    buffers.output(0, own),
                );
            }
        });
    }))
}
