//! A weight matrix, dense or quantized: projection, embedding and tied head alike.

use crate::abi::{RawMatrix, RawTensor};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::Project;
use crate::layers::matrix::Matrix;
use crate::tensor::Tensor;

/// `y = x W^T + b` with `W` `[out, in]`, dense or affine-quantized.
pub struct Linear {
    matrix: Matrix,
    bias: Option<Tensor>,
}

impl Linear {
    /// Takes `weight` (and `scales`, `biases` when it is quantized, `bias` when there is one).
    pub fn load(w: &Weights, inputs: i32, outputs: i32) -> Result<Self> {
        let matrix = Matrix::load(w, &[outputs], inputs)?;
        let bias = if w.contains("bias") {
            Some(w.shaped("bias", &[outputs])?)
        } else {
            None
        };
        Ok(Self { matrix, bias })
    }

    /// `[.., in]` to `[.., out]`. Several projections of the same input: [`Project`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Project::of(x).with(self)
    }

    /// The matrix as it crosses the table, lent.
    pub(super) fn raw(&self) -> RawMatrix {
        let offset = self.bias.as_ref().map_or(RawTensor::NULL, Tensor::raw);
        self.matrix.raw(offset)
    }

    /// The rows of the matrix that ids name: `[..]` i32 to `[.., in]`.
    pub fn lookup(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.matrix {
            Matrix::Dense(weight) => weight.take(ids, 0),
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
                dtype,
            } => weight.take(ids, 0)?.dequantize(
                &scales.take(ids, 0)?.astype(*dtype)?,
                &biases.take(ids, 0)?.astype(*dtype)?,
                *group,
                *bits,
            ),
        }
    }

    /// The same projection with only some of its outputs: `rows` `[n]` i32.
    pub fn select_outputs(&self, rows: &Tensor) -> Result<Self> {
        let matrix = match &self.matrix {
            Matrix::Dense(weight) => Matrix::Dense(weight.take(rows, 0)?),
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
                dtype,
            } => Matrix::Quantized {
                weight: weight.take(rows, 0)?,
                scales: scales.take(rows, 0)?,
                biases: biases.take(rows, 0)?,
                group: *group,
                bits: *bits,
                dtype: *dtype,
            },
        };
        let bias = self.bias.as_ref().map(|b| b.take(rows, 0)).transpose()?;
        Ok(Self { matrix, bias })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = self.matrix.tensors();
        tensors.extend(&self.bias);
        tensors
    }
}
