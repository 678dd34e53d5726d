//! The gated delta rule.

use mlx_rs::{Array, Dtype};

use super::{Output, by_kind, compute, enabled, kind};
use crate::backend::handle::OpResult;
use crate::kernels::delta::GatedDelta;
use crate::kernels::lanes::Float;

/// `q`, `k`, `v`, `decay`, `beta`, `state`, whose shapes the caller has checked against `rule`.
pub(in crate::backend) fn gated_delta(
    rule: GatedDelta,
    inputs: [&Array; 6],
) -> Option<OpResult<Vec<Array>>> {
    let [q, k, v, decay, beta, state] = inputs;
    let dtype = v.dtype();
    let fits = enabled()
        && [q, k, beta].iter().all(|x| x.dtype() == dtype)
        && [decay, state].iter().all(|x| x.dtype() == Dtype::Float32);
    if !fits {
        return None;
    }
    let kind = kind(v)?;
    let states = if rule.every_state { rule.width } else { 1 };
    let mut outputs = vec![Output {
        shape: v.shape(),
        dtype,
        from: None,
    }];
    outputs.extend((0..states).map(|_| Output {
        shape: state.shape(),
        dtype: Dtype::Float32,
        from: None,
    }));
    Some(compute(&inputs, 0, &outputs, |buffers| {
        let columns = rule.batch * rule.width;
        by_kind!(kind, T => {
            // SAFETY: the caller checked shapes, and this function dtypes.
            unsafe {
                let wide = |index: usize, len: usize| -> Vec<f32> {
                    let x: &[T] = buffers.input(index, len);
                    x.iter().map(|x| x.wide()).collect()
                };
                let keys = columns * rule.key_heads * rule.key_dim;
                let values = columns * rule.value_heads * rule.value_dim;
                let gates = columns * rule.value_heads;
                let state = rule.batch * rule.value_heads * rule.value_dim * rule.key_dim;
                let mut y = vec![0.0; values];
                let mut after: Vec<&mut [f32]> =
                    (0..states).map(|i| buffers.output(1 + i, state)).collect();
                rule.run(
                    [&wide(0, keys), &wide(1, keys), &wide(2, values)],
                    buffers.input(3, gates),
                    &wide(4, gates),
                    buffers.input(5, state),
                    &mut y,
                    &mut after,
                );
                let out: &mut [T] = buffers.output(0, values);
                for (out, y) in out.iter_mut().zip(y) {
                    *out = Float::narrow(y);
                }
            }
        });
    }))
}
