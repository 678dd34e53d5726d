//! A weight matrix as it is stored, dense or quantized; or many of them, stacked.

use crate::abi::{DType, RawMatrix, RawTensor};
use crate::checkpoint::Weights;
use crate::error::Result;
use crate::tensor::Tensor;

/// `[.., out, in]`.
pub(super) enum Matrix {
    /// The weights.
    Dense(Tensor),
    /// Packed words `[.., out, in * bits / 32]`, scales and biases `[.., out, in / group]`.
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

impl Matrix {
    /// Takes `weight` (and `scales`, `biases` when it is quantized) of `leading` and then `inputs` elements.
    ///
    /// Whether a module is quantized is decided by the presence of its scales, its bits and group
    /// by the shapes: converters disagree on what they write into the config.
    pub fn load(w: &Weights, leading: &[i32], inputs: i32) -> Result<Self> {
        if w.contains("scales") {
            return Self::load_quantized(w, leading, inputs);
        }
        let shape = [leading, &[inputs]].concat();
        Ok(Self::Dense(w.shaped("weight", &shape)?))
    }

    fn load_quantized(w: &Weights, leading: &[i32], inputs: i32) -> Result<Self> {
        let weight = w.tensor("weight")?;
        let scales = w.tensor("scales")?;
        if weight.dtype() != DType::U32 {
            let problem = format!("has {:?} elements; packed weights are U32", weight.dtype());
            return Err(w.error("weight", problem));
        }
        let (words, groups) = (weight.dim(-1), scales.dim(-1));
        let bits = 32 * i64::from(words) / i64::from(inputs);
        let exact = bits * i64::from(inputs) == 32 * i64::from(words);
        let group = if groups > 0 { inputs / groups } else { 0 };
        if weight.shape() != [leading, &[words]].concat()
            || !exact
            || ![2, 3, 4, 5, 6, 8].contains(&bits)
            || ![32, 64, 128].contains(&group)
            || group * groups != inputs
        {
            return Err(w.error(
                "weight",
                format!(
                    "has shape {:?} with scales {:?}, which is no 2 to 8 bit form of {:?} with groups of \
                     32, 64 or 128",
                    weight.shape(),
                    scales.shape(),
                    [leading, &[inputs]].concat()
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
        let shape = [leading, &[groups]].concat();
        let biases = stored.shaped("biases", &shape)?;
        let scales = stored.shaped("scales", &shape)?;
        Ok(Self::Quantized {
            dtype: w.dtype().unwrap_or(scales.dtype()),
            weight,
            scales,
            biases,
            group,
            bits: bits as i32,
        })
    }

    /// The matrix as it crosses the table, lent.
    pub fn raw(&self, offset: RawTensor) -> RawMatrix {
        match self {
            Self::Dense(weight) => RawMatrix {
                weight: weight.raw(),
                scales: RawTensor::NULL,
                biases: RawTensor::NULL,
                offset,
                group: 0,
                bits: 0,
            },
            Self::Quantized {
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

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Dense(weight) => vec![weight],
            Self::Quantized {
                weight,
                scales,
                biases,
                ..
            } => vec![weight, scales, biases],
        }
    }
}
