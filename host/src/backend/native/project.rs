//! Projections with the steps around them.

use half::{bf16, f16};
use mlx_rs::{Array, Dtype};

use super::{Buffers, Kernel, Kind, Output, by_kind, elements, enabled, kind, node};
use crate::backend::handle::OpResult;
use crate::backend::project::{Matrix as MatrixArrays, Projection};
use crate::kernels::matrix::{DenseWeights, Matrix};
use crate::kernels::quantized::{QuantizedMatrix, Scales};
use crate::kernels::rows::Gate;
use crate::kernels::{self, project::Project};

/// What is known of a matrix when the graph is built.
struct Shape {
    outputs: usize,
    /// Of scales, or of dense weights.
    kind: Kind,
    /// Group and bits.
    quantized: Option<(usize, usize)>,
    offset: bool,
}

struct Node {
    kind: Kind,
    rows: usize,
    inputs: usize,
    /// Epsilon.
    norm: Option<f32>,
    matrices: Vec<Shape>,
    gate: Option<Gate>,
    residual: bool,
    exact: bool,
}

impl Node {
    /// The lengths of the outputs' rows.
    fn widths(&self) -> impl Iterator<Item = usize> {
        let count = if self.gate.is_some() {
            1
        } else {
            self.matrices.len()
        };
        self.matrices
            .iter()
            .take(count)
            .map(|matrix| matrix.outputs)
    }
}

impl Kernel for Node {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let (rows, inputs) = (self.rows, self.inputs);
        let mut next = 0;
        let mut take = || {
            next += 1;
            next - 1
        };
        by_kind!(self.kind, T => {
            // SAFETY: `project` checked dtypes and shapes and gave the inputs in this order: x, the
            // norm's weight, for each matrix its weights, scales and biases and its offset, and the
            // residual, those that are there.
            unsafe {
                let x: &[T] = buffers.input(take(), rows * inputs);
                let norm = self.norm.map(|eps| (buffers.input::<T>(take(), inputs), eps));
                let mut matrices = Vec::with_capacity(self.matrices.len());
                let mut offsets = Vec::with_capacity(self.matrices.len());
                for matrix in &self.matrices {
                    matrices.push(self.matrix(matrix, buffers, &mut take));
                    let offset = matrix.offset.then(|| buffers.input::<T>(take(), matrix.outputs));
                    offsets.push(offset);
                }
                let mut outputs: Vec<&mut [T]> = self
                    .widths()
                    .enumerate()
                    .map(|(index, width)| buffers.output(index, rows * width))
                    .collect();
                let residual = self
                    .residual
                    .then(|| buffers.input::<T>(take(), rows * self.matrices[0].outputs));
                Project {
                    x,
                    inputs,
                    norm,
                    matrices: &matrices,
                    offsets: &offsets,
                    gate: self.gate,
                    residual,
                    exact: self.exact,
                }
                .run(&mut outputs);
            }
        });
    }
}

impl Node {
    /// # Safety
    /// The next inputs are those of this matrix.
    unsafe fn matrix<'a>(
        &self,
        shape: &Shape,
        buffers: &'a Buffers<'_>,
        take: &mut impl FnMut() -> usize,
    ) -> Matrix<'a> {
        let weights = shape.outputs * self.inputs;
        // SAFETY: the caller's promise.
        unsafe {
            let Some((group, bits)) = shape.quantized else {
                let index = take();
                return Matrix::Dense {
                    weights: match shape.kind {
                        Kind::F32 => DenseWeights::F32(buffers.input::<f32>(index, weights)),
                        Kind::Bf16 => DenseWeights::Bf16(buffers.input::<bf16>(index, weights)),
                        Kind::F16 => DenseWeights::F16(buffers.input::<f16>(index, weights)),
                    },
                    outputs: shape.outputs,
                };
            };
            let words = buffers.input(take(), weights * bits / 32);
            let mut scales = || {
                let (index, len) = (take(), weights / group);
                match shape.kind {
                    Kind::F32 => Scales::F32(buffers.input(index, len)),
                    Kind::Bf16 => Scales::Bf16(buffers.input(index, len)),
                    Kind::F16 => Scales::F16(buffers.input(index, len)),
                }
            };
            Matrix::Quantized(QuantizedMatrix {
                words,
                scales: scales(),
                biases: scales(),
                outputs: shape.outputs,
                inputs: self.inputs,
                group,
                bits,
            })
        }
    }
}

/// What the kernel has to know of a matrix, if it takes it.
fn shape(matrix: &MatrixArrays, x: Kind, inputs: usize) -> Option<Shape> {
    let &[outputs, columns] = matrix.weight.shape() else {
        return None;
    };
    let (outputs, columns) = (outputs as usize, columns as usize);
    let offset = match &matrix.offset {
        Some(offset) if kind(offset)? == x && offset.shape() == [outputs as i32] => true,
        Some(_) => return None,
        None => false,
    };
    let Some(quantized) = &matrix.quantized else {
        let kind = kind(&matrix.weight)?;
        // The product has the dtype that both have in common, which must be that of x.
        let fits = columns == inputs && (kind == x || x == Kind::F32);
        return fits.then_some(Shape {
            outputs,
            kind,
            quantized: None,
            offset,
        });
    };
    let group = usize::try_from(quantized.group).ok()?;
    let bits = usize::try_from(quantized.bits).ok()?;
    let kind = kind(&quantized.scales)?;
    let fits = QuantizedMatrix::supports(inputs, group, bits)
        && (kind == x || x == Kind::F32)
        && matrix.weight.dtype() == Dtype::Uint32
        && columns == inputs * bits / 32
        && quantized.scales.shape() == [outputs as i32, (inputs / group) as i32]
        && quantized.biases.shape() == quantized.scales.shape()
        && quantized.biases.dtype() == quantized.scales.dtype();
    fits.then_some(Shape {
        outputs,
        kind,
        quantized: Some((group, bits)),
        offset,
    })
}

pub(in crate::backend) fn project(args: &Projection) -> Option<OpResult<Vec<Array>>> {
    let x = &args.x;
    let kind_x = kind(x)?;
    let inputs = *x.shape().last()? as usize;
    if !enabled() || inputs == 0 || !inputs.is_multiple_of(32) {
        return None;
    }
    let mut arrays: Vec<&Array> = vec![x];
    if let Some((weight, _)) = &args.norm {
        if weight.dtype() != x.dtype() || weight.shape() != [inputs as i32] {
            return None;
        }
        arrays.push(weight);
    }
    let mut matrices = Vec::with_capacity(args.matrices.len());
    for matrix in &args.matrices {
        matrices.push(shape(matrix, kind_x, inputs)?);
        arrays.push(&matrix.weight);
        if let Some(quantized) = &matrix.quantized {
            arrays.extend([&*quantized.scales, &*quantized.biases]);
        }
        arrays.extend(matrix.offset.as_deref());
    }
    let node_args = Node {
        kind: kind_x,
        rows: elements(x) / inputs,
        inputs,
        norm: args.norm.as_ref().map(|(_, eps)| *eps),
        matrices,
        gate: args.gate,
        residual: args.residual.is_some(),
        exact: kernels::exact(),
    };
    let widths: Vec<usize> = node_args.widths().collect();
    if args.gate.is_some() && node_args.matrices[0].outputs != node_args.matrices[1].outputs {
        return None;
    }
    let shapes: Vec<Vec<i32>> = widths
        .iter()
        .map(|&width| {
            let mut shape = x.shape().to_vec();
            if let Some(last) = shape.last_mut() {
                *last = width as i32;
            }
            shape
        })
        .collect();
    if let Some(residual) = &args.residual {
        if residual.dtype() != x.dtype() || residual.shape() != shapes[0] {
            return None;
        }
        arrays.push(residual);
    }
    let outputs: Vec<Output<'_>> = shapes
        .iter()
        .map(|shape| Output {
            shape,
            dtype: x.dtype(),
            from: None,
        })
        .collect();
    Some(node(node_args, &arrays, 0, &outputs))
}
