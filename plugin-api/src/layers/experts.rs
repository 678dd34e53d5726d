//! Experts: feed-forward blocks of which every column takes a few.

use crate::abi::{RawMatrix, RawTensor, UnaryOp};
use crate::checkpoint::Weights;
use crate::config::Config;
use crate::error::Result;
use crate::layers::matrix::Matrix;
use crate::tensor::Tensor;

/// The shape of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsConfig {
    /// Width of the residual stream.
    pub hidden: i32,
    /// Width of an expert.
    pub intermediate: i32,
    /// How many there are.
    pub count: i32,
    /// How many of them a column takes.
    pub chosen: i32,
    /// What opens the gate.
    pub activation: UnaryOp,
}

impl ExpertsConfig {
    /// Reads `num_experts`, `moe_intermediate_size` and, under the key `chosen`, how many a column takes.
    pub fn read(text: &Config, chosen: &str, activation: UnaryOp) -> Result<Self> {
        let config = Self {
            hidden: text.size("hidden_size")?,
            intermediate: text.size("moe_intermediate_size")?,
            count: text.size("num_experts")?,
            chosen: text.size(chosen)?,
            activation,
        };
        if config.chosen > config.count {
            let problem = format!("is {}, of {} experts", config.chosen, config.count);
            return Err(text.error(chosen, problem));
        }
        Ok(config)
    }
}

/// `down(act(gate x) * up x)` of many experts, each `[E, out, in]`.
pub struct Experts {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    activation: UnaryOp,
}

/// Which experts every column takes, and by what their outcomes are multiplied.
pub struct Routes {
    /// `[.., k]` i32.
    pub choice: Tensor,
    /// `[.., k]`.
    pub weights: Tensor,
}

impl Routes {
    /// The `k` experts with the largest scores `[.., E]`, weighted by the softmax of these, times a factor
    /// of each expert `[E]`.
    pub fn of(scores: &Tensor, k: i32, scale: Option<&Tensor>) -> Result<Self> {
        let [weights, choice] = scores.route(k, scale)?;
        Ok(Self { choice, weights })
    }
}

impl Experts {
    /// Takes the stacked `gate_proj`, `up_proj` and `down_proj` of `converted`, the layout of MLX's
    /// converters. Else, of `published`: `gate_up_proj` `[E, 2 I, H]` and `down_proj`, or a block per expert,
    /// `0.gate_proj` and so on.
    pub fn load(converted: &Weights, published: &Weights, config: ExpertsConfig) -> Result<Self> {
        let ExpertsConfig {
            hidden,
            intermediate,
            count,
            activation,
            ..
        } = config;
        let [gate, up, down] = if published.contains("gate_up_proj") {
            fused(published, config)?
        } else if published.child(0).child("gate_proj").contains("weight") {
            [
                gathered(published, "gate_proj", [count, intermediate, hidden])?,
                gathered(published, "up_proj", [count, intermediate, hidden])?,
                gathered(published, "down_proj", [count, hidden, intermediate])?,
            ]
        } else {
            let part = |name, outputs, inputs| {
                Matrix::load(&converted.child(name), &[count, outputs], inputs)
            };
            [
                part("gate_proj", intermediate, hidden)?,
                part("up_proj", intermediate, hidden)?,
                part("down_proj", hidden, intermediate)?,
            ]
        };
        Ok(Self {
            gate,
            up,
            down,
            activation,
        })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [&self.gate, &self.up, &self.down]
            .into_iter()
            .flat_map(Matrix::tensors)
            .collect()
    }

    /// The matrices as they cross the table, lent, and the activation.
    pub(super) fn raw(&self) -> ([RawMatrix; 3], UnaryOp) {
        let matrices = [&self.gate, &self.up, &self.down];
        let matrices = matrices.map(|matrix| matrix.raw(RawTensor::NULL));
        (matrices, self.activation)
    }
}

/// Gate and up in one tensor, one after the other.
fn fused(w: &Weights, config: ExpertsConfig) -> Result<[Matrix; 3]> {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let both = w.shaped("gate_up_proj", &[config.count, 2 * inner, hidden])?;
    let half = |start| both.take(&Tensor::arange(start, start + inner)?, 1);
    let halves = [half(0)?, half(inner)?];
    // Now, so that the whole is given back before the next layer is read.
    Tensor::eval_all(&halves.each_ref())?;
    let down = w.shaped("down_proj", &[config.count, hidden, inner])?;
    let [gate, up] = halves.map(Matrix::Dense);
    Ok([gate, up, Matrix::Dense(down)])
}

/// One tensor out of those of all experts.
fn gathered(w: &Weights, name: &str, shape: [i32; 3]) -> Result<Matrix> {
    let [count, outputs, inputs] = shape;
    let parts = (0..count).map(|expert| {
        let part = w.child(expert).child(name);
        part.shaped("weight", &[outputs, inputs])?
            .reshape(&[1, outputs, inputs])
    });
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let whole = Tensor::concat(&parts.iter().collect::<Vec<_>>(), 0)?;
    whole.eval()?;
    Ok(Matrix::Dense(whole))
}
