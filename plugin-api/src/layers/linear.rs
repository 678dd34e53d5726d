//! A weight matrix, dense or quantized: projection, embedding and tied head alike.

use crate::abi::DType;
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::tensor::Tensor;

/// `y = x W^T + b` with `W` `[out, in]`, dense or affine-quantized.
pub struct Linear {
    matrix: Matrix,
    bias: Option<Tensor>,
}

enum Matrix {
    /// `[out, in]` as stored, and its transposed view, made once.
    Dense { weight: Tensor, transposed: Tensor },
    /// Packed words `[out, in * bits / 32]`, scales and biases `[out, in / group]`.
    Quantized {
        weight: Tensor,
        scales: Tensor,
        biases: Tensor,
        group: i32,
        bits: i32,
    },
}

impl Matrix {
    fn dense(weight: Tensor) -> Result<Self> {
        let transposed = weight.transpose(&[1, 0])?;
        Ok(Self::Dense { weight, transposed })
    }
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
            Matrix::dense(w.shaped("weight", &[outputs, inputs])?)?
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
        let biases = w.shaped("biases", &[outputs, groups])?;
        let scales = w.shaped("scales", &[outputs, groups])?;
        Ok(Matrix::Quantized {
            weight,
            scales,
            biases,
            group,
            bits: bits as i32,
        })
    }

    /// A dense matrix `[out, in]` without bias.
    pub fn from_dense(weight: Tensor) -> Result<Self> {
        Ok(Self {
            matrix: Matrix::dense(weight)?,
            bias: None,
        })
    }

    /// `[.., in]` to `[.., out]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.matrix {
            Matrix::Dense { transposed, .. } => x.matmul(transposed)?,
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
            } => x.quantized_matmul(weight, scales, biases, *group, *bits)?,
        };
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }

    /// The rows of the matrix that ids name: `[..]` i32 to `[.., in]`.
    pub fn lookup(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.matrix {
            Matrix::Dense { weight, .. } => weight.take(ids, 0),
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
            } => weight.take(ids, 0)?.dequantize(
                &scales.take(ids, 0)?,
                &biases.take(ids, 0)?,
                *group,
                *bits,
            ),
        }
    }

    /// The same projection with only some of its outputs: `rows` `[n]` i32.
    pub fn select_outputs(&self, rows: &Tensor) -> Result<Self> {
        let matrix = match &self.matrix {
            Matrix::Dense { weight, .. } => Matrix::dense(weight.take(rows, 0)?)?,
            Matrix::Quantized {
                weight,
                scales,
                biases,
                group,
                bits,
            } => Matrix::Quantized {
                weight: weight.take(rows, 0)?,
                scales: scales.take(rows, 0)?,
                biases: biases.take(rows, 0)?,
                group: *group,
                bits: *bits,
            },
        };
        let bias = self.bias.as_ref().map(|b| b.take(rows, 0)).transpose()?;
        Ok(Self { matrix, bias })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = match &self.matrix {
            Matrix::Dense { weight, .. } => vec![weight],
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
