//! A weight matrix, dense or quantized: projection, embedding and tied head alike.

use crate::abi::{DType, RawMatrix, RawTensor};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::layers::Project;
use crate::tensor::Tensor;

/// `y = x W^T + b` with `W` `[out, in]`, dense or affine-quantized.
pub struct Linear {
    matrix: Matrix,
    bias: Option<Tensor>,
}

enum Matrix {
    /// `[out, in]`.
    Dense(Tensor),
    /// Packed words `[out, in * bits / 32]`, scales and biases `[out, in / group]`.
    Quantized {
        weight: Tensor,
        scales: Tensor,
        biases: Tensor,
        group: i32,
        bits: i32,
        /// What looked-up rows are converted to.
        dtype: DType,
    },
}

impl Linear {
    /// Takes `weight` (and `scales`, `biases` when it is quantized, `bias` when there is one).
    ///
    /// Whether a module is quantized is decided by the presence of its scales, its bits and group
    /// by the shapes: converters disagree on what they write into the config.
    pub fn load(w: &Weights, inputs: i32, outputs: i32) -> Result<Self> {
        let matrix = if w.contains("scales") {
            Self::load_quantized(w, inputs, outputs)?
        } else {
            Matrix::Dense(w.shaped("weight", &[outputs, inputs])?)
        };
        let bias = if w.contains("bias") {
            Some(w.shaped("bias", &[outputs])?)
        } else {
            None
        };
        Ok(Self { matrix, bias })
    }

    fn load_quantized(w: &Weights, inputs: i32, outputs: i32) -> Result<Matrix> {
        let weight = w.tensor("weight")?;
        let scales = w.tensor("scales")?;
        if weight.dtype() != DType::U32 {
            let problem = format!("has {:?} elements; packed weights are U32", weight.dtype());
            return Err(w.error("weight", problem));
        }
        let (&[rows, words], &[_, groups]) = (&*weight.shape(), &*scales.shape()) else {
            return Err(w.error(
                "weight",
                format!(
                    "has shape {:?} with scales {:?}: both must have two axes",
                    weight.shape(),
                    scales.shape()
                ),
            ));
        };
        let bits = 32 * i64::from(words) / i64::from(inputs);
        let exact = bits * i64::from(inputs) == 32 * i64::from(words);
        let group = if groups > 0 { inputs / groups } else { 0 };
        if rows != outputs
            || !exact
            || ![2, 3, 4, 5, 6, 8].contains(&bits)
            || ![32, 64, 128].contains(&group)
            || group * groups != inputs
        {
            return Err(w.error(
                "weight",
                format!(
                    "has shape {:?} with scales {:?}, which is no 2 to 8 bit form of \
                     [{outputs}, {inputs}] with groups of 32, 64 or 128",
                    weight.shape(),
                    scales.shape()
                ),
            ));
        }
        if !w.contains("biases") {
            return Err(w.error(
                "biases",
                "is missing: only affine quantization is supported",
            ));
        }
        // Products in f32 read scales of any type as they are stored.
        let stored = match w.dtype() {
            Some(DType::F32) => w.as_stored(),
            _ => w.clone(),
        };
        let biases = stored.shaped("biases", &[outputs, groups])?;
        let scales = stored.shaped("scales", &[outputs, groups])?;
        Ok(Matrix::Quantized {
            dtype: w.dtype().unwrap_or(scales.dtype()),
            weight,
            scales,
            biases,
            group,
            bits: bits as i32,
        })
    }

    /// `[.., in]` to `[.., out]`. Several projections of the same input: [`Project`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Project::of(x).with(self)
    }

    /// The matrix as it crosses the table, lent.
    pub(super) fn raw(&self) -> RawMatrix {
        let offset = self.bias.as_ref().map_or(RawTensor::NULL, Tensor::raw);
        match &self.matrix {
            Matrix::Dense(weight) => RawMatrix {
                weight: weight.raw(),
                scales: RawTensor::NULL,
                biases: RawTensor::NULL,
                offset,
                group: 0,
                bits: 0,
            },
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
                ..
            } => RawMatrix {
                weight: weight.raw(),
                scales: scales.raw(),
                biases: biases.raw(),
                offset,
                group: *group,
                bits: *bits,
            },
        }
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
        let mut tensors = match &self.matrix {
            Matrix::Dense(weight) => vec![weight],
            Matrix::Quantized {
                weight,
                scales,
                biases,
                ..
            } => vec![weight, scales, biases],
        };
        tensors.extend(&self.bias);
        tensors
    }
}
