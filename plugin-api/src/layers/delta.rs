//! Gated DeltaNet: linear attention with a decaying, error-correcting state (Qwen3.5).
//!
//! Formulas: `formats` of the Qwen3-Next/Qwen3.5 releases; Yang et al., "Gated Delta Networks".

use crate::abi::{DType, UnaryOp};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::cache::{DeltaState, PendingDelta};
use crate::layers::{DeltaCache, Linear, Project, RmsNorm, Step};
use crate::tensor::{Tensor, gated_delta};

/// Epsilon inside the L2 norm of queries and keys.
const L2_EPS: f32 = 1e-6;

/// The shape of a Gated DeltaNet layer.
#[derive(Clone, Copy, Debug)]
pub struct GatedDeltaConfig {
    /// Width of the residual stream.
    pub hidden: i32,
    /// Key (and query) heads, a divisor of `value_heads`.
    pub key_heads: i32,
    /// Value heads.
    pub value_heads: i32,
    /// Dimensions of a key head.
    pub key_dim: i32,
    /// Dimensions of a value head.
    pub value_dim: i32,
    /// Taps of the causal convolution.
    pub kernel: i32,
    /// Epsilon of the output norm.
    pub eps: f32,
}

impl GatedDeltaConfig {
    fn keys(&self) -> i32 {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> i32 {
        self.value_heads * self.value_dim
    }

    fn channels(&self) -> i32 {
        2 * self.keys() + self.values()
    }
}

/// One Gated DeltaNet layer.
pub struct GatedDeltaNet {
    config: GatedDeltaConfig,
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    out: Linear,
    /// `[C]` per tap, oldest first.
    taps: Vec<Tensor>,
    /// `-exp(A_log)`, `[Hv]` f32.
    rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
}

impl GatedDeltaNet {
    /// Takes `in_proj_{qkv,z,b,a}`, `conv1d`, `A_log`, `dt_bias`, `norm` and `out_proj`.
    pub fn load(w: &Weights, config: GatedDeltaConfig) -> Result<Self> {
        let GatedDeltaConfig {
            hidden,
            value_heads,
            kernel,
            ..
        } = config;
        let channels = config.channels();
        let conv = w.child("conv1d").tensor("weight")?;
        // Converted files store [C, K, 1], raw ones [C, 1, K]: the same numbers in the same order.
        if conv.shape() != [channels, kernel, 1] && conv.shape() != [channels, 1, kernel] {
            let expected = format!("[{channels}, {kernel}, 1]");
            let problem = format!("has shape {:?}, the config says {expected}", conv.shape());
            return Err(w.error("conv1d.weight", problem));
        }
        let conv = conv.reshape(&[channels, kernel])?.transpose(&[1, 0])?;
        let taps = (0..kernel)
            .map(|j| conv.slice(0, j, j + 1)?.reshape(&[channels]))
            .collect::<Result<_>>()?;
        let rate = w
            .shaped("A_log", &[value_heads])?
            .astype(DType::F32)?
            .exp()?
            .neg()?;
        Ok(Self {
            qkv: Linear::load(&w.child("in_proj_qkv"), hidden, channels)?,
            z: Linear::load(&w.child("in_proj_z"), hidden, config.values())?,
            b: Linear::load(&w.child("in_proj_b"), hidden, value_heads)?,
            a: Linear::load(&w.child("in_proj_a"), hidden, value_heads)?,
            out: Linear::load(&w.child("out_proj"), config.values(), hidden)?,
            taps,
            rate,
            dt_bias: w.shaped("dt_bias", &[value_heads])?,
            // Never stored minus one, unlike the other norms of a raw checkpoint.
            norm: w.child("norm").shaped("weight", &[config.value_dim])?,
            config,
        })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [&self.qkv, &self.z, &self.b, &self.a, &self.out]
            .into_iter()
            .flat_map(Linear::tensors)
            .chain(&self.taps)
            .chain([&self.rate, &self.dt_bias, &self.norm])
            .collect()
    }

    /// `h + mix(norm(h))`, `[B, T, hidden]`.
    pub fn forward(
        &self,
        h: &Tensor,
        norm: &RmsNorm,
        step: &Step,
        cache: &mut DeltaCache,
    ) -> Result<Tensor> {
        let c = &self.config;
        let (rows, width) = (step.rows(), step.width());
        let inputs = [&self.qkv, &self.z, &self.b, &self.a];
        let [qkv, z, b, a] = Project::of(h).norm(norm).through(inputs)?;
        let before = match cache.state.take() {
            Some(state) => state,
            None => DeltaState {
                conv: Tensor::full(&[rows, c.kernel - 1, c.channels()], 0.0, qkv.dtype())?,
                recurrent: Tensor::full(
                    &[rows, c.value_heads, c.value_dim, c.key_dim],
                    0.0,
                    DType::F32,
                )?,
            },
        };
        let window = Tensor::concat(&[&before.conv, &qkv], 1)?;
        let mixed = self.convolve(&window, width)?;
        let part = |from: i32, heads: i32, dim: i32| -> Result<Tensor> {
            mixed
                .slice(2, from, from + heads * dim)?
                .reshape(&[rows, width, heads, dim])
        };
        let q = part(0, c.key_heads, c.key_dim)?;
        let k = part(c.keys(), c.key_heads, c.key_dim)?;
        let v = part(2 * c.keys(), c.value_heads, c.value_dim)?;
        // x / sqrt(sum x^2 + eps), written as an RMS norm; queries are also scaled by Dk^-1/2.
        let dim = c.key_dim as f32;
        let q = q.rms_norm(None, L2_EPS / dim)?.scale(1.0 / dim)?;
        let k = k.rms_norm(None, L2_EPS / dim)?.scale(dim.powf(-0.5))?;

        let beta = b.sigmoid()?;
        let decay = a
            .add(&self.dt_bias)?
            .astype(DType::F32)?
            .unary(UnaryOp::SOFTPLUS)?
            .mul(&self.rate)?
            .exp()?;
        // Padding leaves the state as it is: no decay, no update.
        let beta = step.padded_with(&beta, 0.0)?;
        let decay = step.padded_with(&decay, 1.0)?;

        let speculative = step.speculative();
        let (y, mut states) =
            gated_delta(&q, &k, &v, &decay, &beta, &before.recurrent, speculative)?;
        if speculative {
            cache.pending = Some(PendingDelta { window, states });
        } else if let Some(recurrent) = states.pop() {
            let conv = window.columns(step.lens(), c.kernel - 1)?;
            cache.state = Some(DeltaState { conv, recurrent });
        }

        let z = z.reshape(&y.shape())?.astype(DType::F32)?;
        let y = y
            .astype(DType::F32)?
            .rms_norm(Some(&self.norm.astype(DType::F32)?), c.eps)?
            .mul(&z.silu()?)?
            .astype(h.dtype())?
            .reshape(&[rows, width, c.values()])?;
        Project::of(&y).plus(h).with(&self.out)
    }

    /// The causal depthwise convolution and its activation: `[B, K-1+T, C]` to `[B, T, C]`.
    fn convolve(&self, window: &Tensor, width: i32) -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        for (j, tap) in (0..).zip(&self.taps) {
            let term = window.slice(1, j, j + width)?.mul(tap)?;
            sum = Some(match sum {
                Some(sum) => sum.add(&term)?,
                None => term,
            });
        }
        match sum {
            Some(sum) => sum.silu(),
            None => window.slice(1, 0, width)?.silu(),
        }
    }
}
