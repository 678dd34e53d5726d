//! RMSNorm.

use crate::checkpoint::Weights;
use crate::error::Result;
use crate::tensor::Tensor;

/// `weight * x / sqrt(mean(x^2) + eps)` over the last axis.
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// Takes `weight` `[width]`, adding what the checkpoint's convention leaves out.
    pub fn load(w: &Weights, width: i32, eps: f32) -> Result<Self> {
        let mut weight = w.shaped("weight", &[width])?;
        if w.norm_offset() != 0.0 {
            weight = weight.shift(w.norm_offset())?;
        }
        Ok(Self { weight, eps })
    }

    /// A norm with a weight that was computed.
    pub(super) fn new(weight: Tensor, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }

    /// The weight and the epsilon.
    pub(super) fn parts(&self) -> (&Tensor, f32) {
        (&self.weight, self.eps)
    }

    /// `[.., width]` to the same shape. Before a projection: [`crate::layers::Project::norm`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rms_norm(Some(&self.weight), self.eps)
    }
}
