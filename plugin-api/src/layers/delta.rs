//! Gated DeltaNet: linear attention with a decaying, error-correcting state (Qwen3.5).
//!
//! Formulas: `formats` of the Qwen3-Next/Qwen3.5 releases; Yang et al., "Gated Delta Networks".

use crate::abi::{DType, GatedDelta, RawTensor};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::host::{api, op_error};
use crate::layers::cache::DeltaState;
use crate::layers::{DeltaCache, Linear, Project, RmsNorm, Step};
use crate::tensor::Tensor;

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
    /// `[K, C]`, oldest first.
    taps: Tensor,
    /// `-exp(A_log)`, `[Hv]` f32.
    rate: Tensor,
    dt_bias: Tensor,
    /// f32.
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
        // Row by row, as kernels read them: a transposed view would be copied in every call.
        let conv = conv.reshape(&[channels, kernel])?.transpose(&[1, 0])?;
        let taps = (0..kernel).map(|tap| conv.slice(0, tap, tap + 1));
        let taps = taps.collect::<Result<Vec<_>>>()?;
        let taps = Tensor::concat(&taps.iter().collect::<Vec<_>>(), 0)?;
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
            norm: w
                .child("norm")
                .shaped("weight", &[config.value_dim])?
                .astype(DType::F32)?,
            config,
        })
    }

    /// Bytes of a row's cache.
    pub fn cache_bytes(&self, dtype: DType) -> u64 {
        let config = &self.config;
        let conv = (config.kernel - 1) as u64 * config.channels() as u64;
        let state = config.values() as u64 * config.key_dim as u64;
        conv * dtype.size().unwrap_or(4) as u64 + 4 * state
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [&self.qkv, &self.z, &self.b, &self.a, &self.out]
            .into_iter()
            .flat_map(Linear::tensors)
            .chain([&self.taps, &self.rate, &self.dt_bias, &self.norm])
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
        let rows = step.rows();
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
        let pass = DeltaPass {
            qkv,
            b,
            a,
            before,
            taps: self.taps.clone(),
            rate: self.rate.clone(),
            dt_bias: self.dt_bias.clone(),
            norm: self.norm.clone(),
            eps: c.eps,
            key_heads: c.key_heads,
        };
        let (y, after) = pass.run(Some(&z), step.lens(), !step.speculative())?;
        match after {
            Some(state) => cache.state = Some(state),
            None => cache.pending = Some(pass),
        }
        let y = y.ok_or_else(|| op_error("gated_delta"))?;
        Project::of(&y).plus(h).with(&self.out)
    }
}

/// The arguments of a pass, which is run to look ahead and run again to advance by what was kept.
pub(super) struct DeltaPass {
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    before: DeltaState,
    taps: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: f32,
    key_heads: i32,
}

impl DeltaPass {
    /// The outcome, with `z`, and the state after the first `lens[b]` columns of each row, to advance.
    fn run(
        &self,
        z: Option<&Tensor>,
        lens: &[i32],
        advance: bool,
    ) -> Result<(Option<Tensor>, Option<DeltaState>)> {
        let out = api().gated_delta()(&GatedDelta {
            qkv: self.qkv.raw(),
            z: z.map_or(RawTensor::NULL, Tensor::raw),
            b: self.b.raw(),
            a: self.a.raw(),
            conv_state: self.before.conv.raw(),
            recurrent_state: self.before.recurrent.raw(),
            conv_weight: self.taps.raw(),
            rate: self.rate.raw(),
            dt_bias: self.dt_bias.raw(),
            norm: self.norm.raw(),
            eps: self.eps,
            key_heads: self.key_heads,
            lens: lens.into(),
            advance,
        });
        let out = out.into_iter().map(|raw| Tensor::own("gated_delta", raw));
        let mut out = out.collect::<Result<Vec<_>>>()?.into_iter();
        let y = if z.is_some() { out.next() } else { None };
        let after = match (out.next(), out.next()) {
            (Some(conv), Some(recurrent)) => Some(DeltaState { conv, recurrent }),
            _ => None,
        };
        if y.is_some() == z.is_some() && after.is_some() == advance {
            Ok((y, after))
        } else {
            Err(op_error("gated_delta"))
        }
    }

    /// The state after the first `kept[b]` columns of each row.
    pub fn advanced(&self, kept: &[i32]) -> Result<DeltaState> {
        let (_, after) = self.run(None, kept, true)?;
        after.ok_or_else(|| op_error("gated_delta"))
    }
}
