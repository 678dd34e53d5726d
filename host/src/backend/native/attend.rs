//! Causal self-attention between its projections.

use mlx_rs::Dtype;

use super::{Buffers, Output, by_kind, compute, divisors, enabled, kind, lengths};
use crate::backend::attend::SelfAttention;
use crate::backend::handle::{Handle, Lent, OpResult};
use crate::kernels::attend::Attend;
use crate::kernels::caches::{Buffer, Caches, Places};
use crate::kernels::rows::Rotation;

/// Adds an argument that may be absent, and says which it is.
fn place<'a>(arrays: &mut Vec<&'a Handle>, array: Option<&'a Lent>) -> Option<usize> {
    let array = array?;
    arrays.push(array);
    Some(arrays.len() - 1)
}

/// Caches of keys and values, two inputs or, if they are `written` to, outputs from `at` on.
///
/// # Safety
/// They have elements of type `E`, `len` of them, and no other slice of an output is alive.
unsafe fn pair<E>(buffers: &Buffers, at: usize, len: usize, written: bool) -> [Buffer<'_, E>; 2] {
    [at, at + 1].map(|at| {
        // SAFETY: the caller's promise.
        unsafe {
            if written {
                buffers.output::<E>(at, len).into()
            } else {
                buffers.input::<E>(at, len).into()
            }
        }
    })
}

/// Two buffers without elements.
fn none<'a, E>(written: bool) -> [Buffer<'a, E>; 2] {
    [(); 2].map(|()| match written {
        true => <&mut [E]>::default().into(),
        false => <&[E]>::default().into(),
    })
}

pub(in crate::backend) fn attend(args: &SelfAttention) -> Option<OpResult<Vec<Handle>>> {
    let columns = args.columns()?;
    let dtype = columns.dtype();
    let [batch, kv_heads, capacity, _] = lengths::<4>(&args.keys)?;
    let dim = args.dim as usize;
    let [_, width, _] = lengths::<3>(columns)?;
    let given = |f: &Handle| f.dtype() == Dtype::Float32 && f.shape() == [args.rope_dims / 2];
    let norm = |w: &Handle| w.dtype() == dtype && w.shape() == [dim as i32];
    let same = |x: &Handle| x.dtype() == dtype;
    let stored = |x: &Handle| args.packing.is_some() || same(x);
    let fits = enabled()
        && stored(&args.keys)
        && stored(&args.values)
        && args.first.iter().flatten().all(|x| same(x))
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
    // Caches come first, as inputs and as outputs.
    let mut arrays: Vec<&Handle> = vec![&args.keys, &args.values];
    arrays.extend(args.first.iter().flatten().map(|x| &**x));
    let caches = arrays.len();
    let q = place(&mut arrays, args.q.as_ref());
    let k = place(&mut arrays, args.k.as_ref());
    let v = place(&mut arrays, args.v.as_ref());
    let q_norm = place(&mut arrays, args.q_norm.as_ref());
    let k_norm = place(&mut arrays, args.k_norm.as_ref());
    let freqs = place(&mut arrays, args.rope_freqs.as_ref());
    let mixed = [batch, width, heads * dim].map(|n| n as i32);
    let mut outputs = Vec::with_capacity(5);
    if k.is_some() {
        outputs.extend(
            arrays[..caches]
                .iter()
                .enumerate()
                .map(|(index, array)| Output {
                    shape: array.shape(),
                    dtype: array.dtype(),
                    from: Some(index),
                }),
        );
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
    let places = args.packing.map(|packing| Places {
        packing,
        start: args.start as usize,
        first: args.first_columns().unwrap_or(0),
    });
    let rows = batch * kv_heads;
    let made = compute(&arrays, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller. The caches may be the
            // first outputs, and are only used as such then.
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
                let written = k.is_some();
                let caches = match places {
                    None => Caches {
                        capacity,
                        exact: pair(buffers, 0, rows * capacity * dim, written),
                        quantized: None,
                    },
                    Some(places) => {
                        let words = places.packing.words(dim).unwrap_or(0);
                        Caches {
                            capacity,
                            exact: match places.first {
                                0 => none(written),
                                first => pair(buffers, 2, rows * first * dim, written),
                            },
                            quantized: Some((
                                places,
                                pair(buffers, 0, rows * capacity * words, written),
                            )),
                        }
                    }
                };
                let next = if written { outputs.len() - 1 } else { 0 };
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
