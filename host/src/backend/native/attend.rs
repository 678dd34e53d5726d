//! Causal self-attention between its projections.

use mlx_rs::{Array, Dtype};

use super::{Output, by_kind, compute, divisors, enabled, kind, lengths};
use crate::backend::attend::SelfAttention;
use crate::backend::handle::{Lent, OpResult};
use crate::kernels::attend::{Attend, Caches};
use crate::kernels::rows::Rotation;

/// Adds an argument that may be absent, and says which it is.
fn place<'a>(arrays: &mut Vec<&'a Array>, array: Option<&'a Lent>) -> Option<usize> {
    let array = array?;
    arrays.push(array);
    Some(arrays.len() - 1)
}

pub(in crate::backend) fn attend(args: &SelfAttention) -> Option<OpResult<Vec<Array>>> {
    let dtype = args.q.dtype();
    let [batch, kv_heads, capacity, dim] = lengths::<4>(&args.keys)?;
    let [_, width, _] = lengths::<3>(&args.q)?;
    let given = |f: &Array| f.dtype() == Dtype::Float32 && f.shape() == [args.rope_dims / 2];
    let norm = |w: &Array| w.dtype() == dtype && w.shape() == [dim as i32];
    let same = |x: &Array| x.dtype() == dtype;
    let fits = enabled()
        && same(&args.keys)
        && same(&args.values)
        && args.k.as_deref().is_none_or(same)
        && args.v.as_deref().is_none_or(same)
        && args.q_norm.as_deref().is_none_or(norm)
        && args.k_norm.as_deref().is_none_or(norm)
        && args.rope_freqs.as_deref().is_none_or(given);
    if !fits {
        return None;
    }
    let kind = kind(&args.q)?;
    let (heads, rope_dims) = (args.heads as usize, args.rope_dims as usize);
    let mut arrays: Vec<&Array> = vec![&args.q, &args.keys, &args.values];
    let k = place(&mut arrays, args.k.as_ref());
    let v = place(&mut arrays, args.v.as_ref());
    let q_norm = place(&mut arrays, args.q_norm.as_ref());
    let k_norm = place(&mut arrays, args.k_norm.as_ref());
    let freqs = place(&mut arrays, args.rope_freqs.as_ref());
    let mixed = [batch, width, heads * dim].map(|n| n as i32);
    let kept = |index: usize, array| Output {
        shape: Array::shape(array),
        dtype,
        from: Some(index),
    };
    let mut outputs = vec![Output {
        shape: &mixed,
        dtype,
        from: None,
    }];
    if k.is_some() {
        outputs.extend([kept(1, &args.keys), kept(2, &args.values)]);
    }
    let columns = batch * width;
    let (own, shared) = (columns * heads * dim, columns * kv_heads * dim);
    let cache = batch * kv_heads * capacity * dim;
    Some(compute(&arrays, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller. The caches may be the
            // second and third output, and are only used as such then.
            unsafe {
                let weight = |at: Option<usize>| at.map(|at| buffers.input::<T>(at, dim));
                let computed;
                let divisors = if let Some(at) = freqs {
                    buffers.input::<f32>(at, rope_dims / 2)
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
                    kv: k.map(|k| {
                        let v = v.map(|v| buffers.input(v, shared));
                        (buffers.input(k, shared), v)
                    }),
                    q_norm: weight(q_norm),
                    k_norm: weight(k_norm),
                    v_norm: args.v_norm,
                    eps: args.eps,
                    rotation: Rotation {
                        divisors,
                        scale: args.rope_scale,
                    },
                    positions: &args.positions,
                    offsets: &args.offsets,
                    window: args.window as usize,
                    scale: args.scale,
                };
                let caches = if k.is_some() {
                    Caches::Write(buffers.output(1, cache), buffers.output(2, cache))
                } else {
                    Caches::Read(buffers.input(1, cache), buffers.input(2, cache))
                };
                attend.run(caches, buffers.output(0, own));
            }
        });
    }))
}
