//! A Gated DeltaNet layer between its projections.

use mlx_rs::Dtype;

use super::{Output, by_kind, compute, enabled, kind};
use crate::backend::delta::DeltaNet;
use crate::backend::handle::{Handle, OpResult};
use crate::kernels::delta::{GatedDelta, State};
use crate::kernels::lanes::Float;

/// The argument that the recurrent state is.
const RECURRENT: usize = 4;

pub(in crate::backend) fn gated_delta(args: &DeltaNet) -> Option<OpResult<Vec<Handle>>> {
    let dtype = args.qkv.dtype();
    let alike = [&args.b, &args.a, &args.conv, &args.taps];
    let single = [&args.recurrent, &args.rate, &args.norm];
    let sum_rounds = args.dt_bias.dtype() == dtype;
    let fits = enabled()
        && alike.iter().all(|x| x.dtype() == dtype)
        && args.z.as_ref().is_none_or(|z| z.dtype() == dtype)
        && single.iter().all(|x| x.dtype() == Dtype::Float32)
        && (sum_rounds || args.dt_bias.dtype() == Dtype::Float32);
    if !fits {
        return None;
    }
    let kind = kind(&args.qkv)?;
    let shape = args.shape;
    let (batch, width) = (shape.batch as usize, shape.width as usize);
    let (key_heads, value_heads) = (shape.key_heads as usize, shape.value_heads as usize);
    let (key_dim, value_dim) = (shape.key_dim as usize, shape.value_dim as usize);
    let kernel = shape.kernel as usize;
    let mut outputs = Vec::with_capacity(3);
    if let Some(z) = &args.z {
        outputs.push(Output {
            shape: z.shape(),
            dtype,
            from: None,
        });
    }
    if args.advance {
        outputs.push(Output {
            shape: args.conv.shape(),
            dtype,
            from: None,
        });
        outputs.push(Output {
            shape: args.recurrent.shape(),
            dtype: Dtype::Float32,
            from: Some(RECURRENT),
        });
    }
    let mut inputs: Vec<&Handle> = vec![
        &args.qkv,
        &args.b,
        &args.a,
        &args.conv,
        &args.recurrent,
        &args.taps,
        &args.rate,
        &args.dt_bias,
        &args.norm,
    ];
    inputs.extend(args.z.as_deref());
    let made = usize::from(args.z.is_some());
    let (columns, channels) = (batch * width, shape.channels() as usize);
    let values = value_heads * value_dim;
    let state = batch * values * key_dim;
    let seen = batch * (kernel - 1) * channels;
    Some(compute(&inputs, 0, &outputs, |buffers| {
        by_kind!(kind, T => {
            // SAFETY: dtypes were checked above, and shapes by the caller. The recurrent state may be
            // an output, and is only used as such then.
            unsafe {
                let state = if args.advance {
                    State::Advance(buffers.output(made + 1, state), buffers.output(made, seen))
                } else {
                    State::Before(buffers.input(RECURRENT, state))
                };
                let dt_bias: Vec<f32> = if sum_rounds {
                    let narrow: &[T] = buffers.input(7, value_heads);
                    narrow.iter().map(|x| x.wide()).collect()
                } else {
                    buffers.input::<f32>(7, value_heads).to_vec()
                };
                let delta = GatedDelta::<T> {
                    batch,
                    width,
                    key_heads,
                    value_heads,
                    key_dim,
                    value_dim,
                    kernel,
                    qkv: buffers.input(0, columns * channels),
                    z: args.z.as_ref().map(|_| buffers.input(9, columns * values)),
                    b: buffers.input(1, columns * value_heads),
                    a: buffers.input(2, columns * value_heads),
                    conv: buffers.input(3, seen),
                    taps: buffers.input(5, kernel * channels),
                    rate: buffers.input(6, value_heads),
                    dt_bias: &dt_bias,
                    sum_rounds,
                    norm: buffers.input(8, value_dim),
                    eps: args.eps,
                    lens: &args.lens,
                };
                let out: &mut [T] = match made {
                    0 => &mut [],
                    _ => buffers.output(0, columns * values),
                };
                delta.run(out, state);
            }
        });
    }))
}
