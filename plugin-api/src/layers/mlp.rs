//! The gated feed-forward block.

use crate::abi::UnaryOp;
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::{Linear, Project, RmsNorm};
use crate::tensor::Tensor;

/// `down(activation(gate x) * up x)`; SwiGLU unless told otherwise.
pub struct Mlp {
    activation: UnaryOp,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Takes `gate_proj`, `up_proj` and `down_proj`.
    pub fn load(w: &Weights, hidden: i32, intermediate: i32) -> Result<Self> {
        Ok(Self {
            activation: UnaryOp::SILU,
            gate: Linear::load(&w.child("gate_proj"), hidden, intermediate)?,
            up: Linear::load(&w.child("up_proj"), hidden, intermediate)?,
            down: Linear::load(&w.child("down_proj"), intermediate, hidden)?,
        })
    }

    /// With another activation.
    #[must_use]
    pub fn with_activation(self, activation: UnaryOp) -> Self {
        Self { activation, ..self }
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [&self.gate, &self.up, &self.down]
            .into_iter()
            .flat_map(Linear::tensors)
            .collect()
    }

    /// `h + mlp(norm(h))`, `[.., hidden]`.
    pub fn forward(&self, h: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let x = self.opened(h, norm)?;
        Project::of(&x).plus(h).with(&self.down)
    }

    /// `mlp(norm(h))`, `[.., hidden]`.
    pub(super) fn unadded(&self, h: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        self.down.forward(&self.opened(h, norm)?)
    }

    fn opened(&self, h: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        Project::of(h)
            .norm(norm)
            .gated(self.activation, &self.gate, &self.up)
    }
}
