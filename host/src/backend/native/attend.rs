//! Causal self-attention between its projections.

use mlx_rs::{Array, Dtype};

use super::{Buffers, Kernel, Kind, Output, by_kind, divisors, enabled, kind, lengths, node};
use crate::backend::attend::SelfAttention;
use crate::backend::handle::OpResult;
use crate::kernels::attend::Attend;
use crate::kernels::rows::Rotation;

struct Node {
    kind: Kind,
    batch: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    capacity: usize,
    gated: bool,
    /// Epsilon.
    norms: Option<f32>,
    rope_dims: usize,
    rope_base: f32,
    rope_scale: f32,
    given_divisors: bool,
    offsets: Vec<i32>,
    window: usize,
    scale: f32,
}

impl Kernel for Node {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let columns = self.batch * self.width;
        let (own, shared) = (
            columns * self.heads * self.dim,
            columns * self.kv_heads * self.dim,
        );
        let cache = self.batch * self.kv_heads * self.capacity * self.dim;
        by_kind!(self.kind, T => {
            // SAFETY: `attend` checked dtypes and shapes and gave the inputs in this order: q, k, v,
            // the caches, the norms' weights and the divisors, those that are there. The caches
            // are also the second and third output, and only used as such.
            unsafe {
                let norms = self
                    .norms
                    .map(|eps| (buffers.input::<T>(5, self.dim), buffers.input(6, self.dim), eps));
                let computed;
                let divisors = if self.given_divisors {
                    let index = if self.norms.is_some() { 7 } else { 5 };
                    buffers.input::<f32>(index, self.rope_dims / 2)
                } else {
                    computed = divisors(self.rope_base, self.rope_dims);
                    &computed
                };
                let attend = Attend::<T> {
                    batch: self.batch,
                    width: self.width,
                    heads: self.heads,
                    kv_heads: self.kv_heads,
                    dim: self.dim,
                    capacity: self.capacity,
                    q: buffers.input(0, if self.gated { 2 * own } else { own }),
                    gated: self.gated,
                    k: buffers.input(1, shared),
                    v: buffers.input(2, shared),
                    norms,
                    rotation: Rotation {
                        divisors,
                        scale: self.rope_scale,
                    },
                    offsets: &self.offsets,
                    window: self.window,
                    scale: self.scale,
                };
                attend.run(
                    buffers.output(1, cache),
                    buffers.output(2, cache),
                    buffers.output(0, own),
                );
            }
        });
    }
}

pub(in crate::backend) fn attend(args: &SelfAttention) -> Option<OpResult<Vec<Array>>> {
    let dtype = args.q.dtype();
    let [batch, kv_heads, capacity, dim] = lengths::<4>(&args.keys)?;
    let [_, width, _] = lengths::<3>(&args.q)?;
    let divisors = |f: &Array| f.dtype() == Dtype::Float32 && f.shape() == [args.rope_dims / 2];
    let norm = |w: &Array| w.dtype() == dtype && w.shape() == [dim as i32];
    let alike = [&args.k, &args.v, &args.keys, &args.values];
    let fits = enabled()
        && alike.iter().all(|array| array.dtype() == dtype)
        && args.rope_freqs.as_deref().is_none_or(divisors)
        && args
            .norms
            .as_ref()
            .is_none_or(|(q, k, _)| norm(q) && norm(k));
    if !fits {
        return None;
    }
    let node_args = Node {
        kind: kind(&args.q)?,
        batch,
        width,
        heads: args.heads as usize,
        kv_heads,
        dim,
        capacity,
        gated: args.gated,
        norms: args.norms.as_ref().map(|(_, _, eps)| *eps),
        rope_dims: args.rope_dims as usize,
        rope_base: args.rope_base,
        rope_scale: args.rope_scale,
        given_divisors: args.rope_freqs.is_some(),
        offsets: args.offsets.clone(),
        window: args.window as usize,
        scale: args.scale,
    };
    let mut arrays: Vec<&Array> = vec![&args.q, &args.k, &args.v, &args.keys, &args.values];
    if let Some((q, k, _)) = &args.norms {
        arrays.extend([&**q, &**k]);
    }
    arrays.extend(args.rope_freqs.as_deref());
    let mixed = [batch, width, node_args.heads * dim].map(|n| n as i32);
    let cache = |index: usize, array| Output {
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
        cache(3, &args.keys),
        cache(4, &args.values),
    ];
    Some(node(node_args, &arrays, 0, &outputs))
}
