//! Weight matrices of all kinds, and what they are multiplied with.

use std::ops::Range;

use half::{bf16, f16};

use super::lanes::Float;
use super::quantized::activations::Activations;
use super::quantized::{QuantizedMatrix, TILE, float, integer};

/// A dense matrix `[outputs, inputs]` in one of the types that weights are stored in.
#[derive(Clone, Copy)]
pub enum DenseWeights<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

/// A weight matrix.
#[derive(Clone, Copy)]
pub enum Matrix<'a> {
    /// Packed weights.
    Quantized(QuantizedMatrix<'a>),
    /// Weights as they are; inputs are a multiple of 32.
    Dense {
        /// `[outputs, inputs]`.
        weights: DenseWeights<'a>,
        /// Outputs.
        outputs: usize,
    },
}

/// Rows to multiply with: as they are, and rounded for the kinds of matrices that want it.
pub struct Input<'a> {
    inputs: usize,
    exact: &'a [f32],
    /// For weights of 4 and 8 bits.
    rounded: [Option<Activations>; 2],
}

impl<'a> Input<'a> {
    /// Prepares `x` `[rows, inputs]` for some matrices; with `exact` nothing is rounded.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn new(x: &'a [f32], inputs: usize, matrices: &[Matrix<'_>], exact: bool) -> Self {
        assert!(x.len().is_multiple_of(inputs));
        let rounded = [4, 8].map(|bits| {
            let wants = |matrix: &Matrix<'_>| match matrix {
                Matrix::Quantized(matrix) => matrix.bits == bits,
                Matrix::Dense { .. } => false,
            };
            let needed = !exact && matrices.iter().any(wants);
            needed.then(|| Activations::quantize(x, inputs, bits, integer::best_lanes()))
        });
        Self {
            inputs,
            exact: x,
            rounded,
        }
    }
}

/// What a thread works in.
#[derive(Default)]
pub struct Scratch {
    float: float::Scratch,
    integer: integer::Scratch,
    weights: Vec<f32>,
}

impl DenseWeights<'_> {
    fn part(self, part: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[part]),
            Self::Bf16(all) => Self::Bf16(&all[part]),
            Self::F16(all) => Self::F16(&all[part]),
        }
    }
}

impl Matrix<'_> {
    /// The matrix of only some consecutive outputs.
    ///
    /// # Panics
    /// There are not as many.
    pub fn part(&self, first: usize, count: usize, inputs: usize) -> Self {
        let of = |width: usize| first * width..(first + count) * width;
        match *self {
            Self::Quantized(all) => Self::Quantized(QuantizedMatrix {
                words: &all.words[of(inputs * all.bits / 32)],
                scales: all.scales.part(of(inputs / all.group)),
                biases: all.biases.part(of(inputs / all.group)),
                outputs: count,
                ..all
            }),
            Self::Dense { weights, .. } => Self::Dense {
                weights: weights.part(of(inputs)),
                outputs: count,
            },
        }
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        match self {
            Self::Quantized(matrix) => matrix.outputs,
            Self::Dense { outputs, .. } => *outputs,
        }
    }

    /// The outputs from `first` on, at most [`TILE`], of all rows, to `out` `[rows, TILE]`.
    ///
    /// # Panics
    /// The input was prepared for other matrices.
    pub fn multiply(&self, first: usize, x: &Input<'_>, out: &mut [f32], scratch: &mut Scratch) {
        let count = TILE.min(self.outputs() - first);
        match self {
            Self::Quantized(matrix) => match &x.rounded[matrix.bits / 8] {
                Some(rounded) => {
                    integer::multiply(matrix, first, count, rounded, out, &mut scratch.integer);
                }
                None => float::multiply(matrix, first, count, x.exact, out, &mut scratch.float),
            },
            Self::Dense { weights, .. } => {
                let part = first * x.inputs..(first + count) * x.inputs;
                let wide = match weights {
                    DenseWeights::F32(all) => &all[part],
                    DenseWeights::Bf16(all) => widen(&all[part], &mut scratch.weights),
                    DenseWeights::F16(all) => widen(&all[part], &mut scratch.weights),
                };
                float::dense(wide, x.inputs, x.exact, out);
            }
        }
    }
}

fn widen<'a, T: Float>(from: &[T], to: &'a mut Vec<f32>) -> &'a [f32] {
    to.clear();
    to.extend(from.iter().map(|x| x.wide()));
    to
}
