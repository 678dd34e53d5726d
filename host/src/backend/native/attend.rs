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
    let columns = args.columns()?;
    let dtype = columns.dtype();
    let [batch, kv_heads, capacity, dim] = lengths::<4>(&args.keys)?;
    let [_, width, _] = lengths::<3>(columns)?;
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
    let kind = kind(columns)?;
    let (heads, rope_dims) = (args.heads as usize, args.rope_dims as usize);
    let mut arrays: Vec<&Array> = vec![&args.keys, &args.values];
    let q = place(&mut arrays, args.q.as_ref());
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
    let mut outputs = Vec::with_capacity(3);
    if k.is_some() {
        outputs.extend([kept(0, &args.keys), kept(1, &args.values)]);
    }
    if q.is_some() {
        outputs.push(Output {
            shape: &mixed,
            dtype,
            from: None,
        });
    }
    let columns = batch * width;
    let (own, shared) = (columns * heads * dim, columns * kv_heads * dim);
    let cache = batch * kv_heads * capacity * dim;
    let made = compute(&arrays, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller. The caches may be the
            // first two outputs, and are only used as such then.
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
                    q: q.map_or(&[], |q| buffers.input(q, if args.gated { 2 * own } else { own })),
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
                    ends: args.ends.as_deref(),
                    window: args.window as usize,
                    scale: args.scale,
                };
                let (caches, next) = if k.is_some() {
                    (Caches::Write(buffers.output(0, cache), buffers.output(1, cache)), 2)
                } else {
                    (Caches::Read(buffers.input(0, cache), buffers.input(1, cache)), 0)
                };
                let mixed = match q {
                    Some(_) => buffers.output(next, own),
                    None => &mut [],
                };
                attend.run(caches, mixed);
            }
        });
    });
    Some(made.map(|mut made| {
        // The mix comes first.
        if q.is_some() {
            made.rotate_right(1);
        }
        made
    }))
}
