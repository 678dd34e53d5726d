//! Mixtures of experts.

use mlx_rs::Dtype;

use super::project::shape;
use super::{Output, by_kind, compute, elements, enabled, kind, one};
use crate::backend::experts::Experts;
use crate::backend::handle::{Handle, OpResult};
use crate::kernels::{self, experts::Experts as Kernel};

pub(in crate::backend) fn route(
    scores: &Handle,
    k: i32,
    scale: Option<&Handle>,
) -> Option<OpResult<Vec<Handle>>> {
    let kind = kind(scores)?;
    if !enabled() || scale.is_some_and(|scale| scale.dtype() != scores.dtype()) {
        return None;
    }
    let (count, chosen) = (*scores.shape().last()? as usize, k as usize);
    let rows = elements(scores) / count;
    let mut made = scores.shape().to_vec();
    *made.last_mut()? = k;
    let output = |dtype| Output {
        shape: &made,
        dtype,
        from: None,
    };
    let inputs: Vec<&Handle> = [scores].into_iter().chain(scale).collect();
    let outputs = [output(scores.dtype()), output(Dtype::Int32)];
    Some(compute(&inputs, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller.
            unsafe {
                let scale = scale.map(|_| buffers.input::<T>(1, count));
                let scores = buffers.input::<T>(0, rows * count);
                let weights = buffers.output::<T>(0, rows * chosen);
                let choice = buffers.output::<i32>(1, rows * chosen);
                kernels::experts::route(scores, count, scale, chosen, weights, choice);
            }
        });
    }))
}

pub(in crate::backend) fn experts(args: &Experts) -> Option<OpResult<Handle>> {
    let projection = &args.projection;
    let x = &projection.x;
    let kind_x = kind(x)?;
    let (width, inner) = (args.width as usize, args.inner as usize);
    if !enabled() || !width.is_multiple_of(32) || !inner.is_multiple_of(32) {
        return None;
    }
    let [gate, up, down] = &projection.matrices[..] else {
        return None;
    };
    let shapes = [
        shape(gate, kind_x, width)?,
        shape(up, kind_x, width)?,
        shape(down, kind_x, inner)?,
    ];
    let norms = [&projection.norm, &projection.post_norm].map(Option::as_ref);
    let around = norms.iter().flatten().map(|(weight, _)| &**weight);
    let around: Vec<&Handle> = around.chain(projection.residual.as_deref()).collect();
    if around.iter().any(|array| array.dtype() != x.dtype()) {
        return None;
    }
    let mut arrays: Vec<&Handle> = vec![x, &args.choice, &args.weights];
    arrays.extend([gate, up, down].into_iter().flat_map(|m| m.arrays()));
    arrays.extend(around);
    let rows = elements(x) / width;
    let chosen = args.chosen as usize;
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
        from: None,
    };
    let mixed = compute(&arrays, 0, &[output], |buffers| {
        let mut next = 0;
        let mut take = || {
            next += 1;
            next - 1
        };
        by_kind!(kind_x, T => {
            // SAFETY: dtypes and shapes were checked above and by the caller, and the inputs are in the
            // order of `arrays`: x, choice and weights, the matrices' weights, scales and biases, the norms
            // and the residual, those that are there.
            unsafe {
                let x: &[T] = buffers.input(take(), rows * width);
                let choice = buffers.input::<i32>(take(), rows * chosen);
                let weights = buffers.input::<T>(take(), rows * chosen);
                let matrices = shapes.each_ref().map(|shape| shape.matrix(buffers, &mut take));
                let [norm, post_norm] = norms.map(|norm| {
                    norm.map(|(_, eps)| (buffers.input::<T>(take(), width), *eps))
                });
                let residual = projection
                    .residual
                    .as_ref()
                    .map(|_| buffers.input::<T>(take(), rows * width));
                Kernel {
                    x,
                    width,
                    norm,
                    count: args.count as usize,
                    chosen,
                    choice,
                    weights,
                    matrices: &matrices,
                    gate: args.gate,
                    post_norm,
                    residual,
                    scale: projection.scale,
                    exact: kernels::exact(),
                }
                .run(buffers.output(0, rows * width));
            }
        });
    });
    Some(mixed.and_then(one))
}
