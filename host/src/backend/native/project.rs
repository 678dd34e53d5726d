//! Projections with the steps around them.

use half::{bf16, f16};
use mlx_rs::Dtype;

use super::{Buffers, Kind, Output, by_kind, compute, elements, enabled, kind};
use crate::backend::handle::{Handle, OpResult};
use crate::backend::project::{Matrix as MatrixArrays, Projection};
use crate::kernels::matrix::{DenseWeights, Matrix};
use crate::kernels::quantized::{QuantizedMatrix, Scales};
use crate::kernels::{self, project::Project};

/// What the kernel has to know of a matrix.
pub(super) struct Shape {
    /// Of all of them, where matrices are stacked.
    pub outputs: usize,
    inputs: usize,
    /// Of scales, or of dense weights.
    kind: Kind,
    /// Group and bits.
    quantized: Option<(usize, usize)>,
    offset: bool,
}

impl Shape {
    /// # Safety
    /// The next inputs are those of this matrix.
    pub unsafe fn matrix<'a>(
        &self,
        buffers: &'a Buffers,
        take: &mut impl FnMut() -> usize,
    ) -> Matrix<'a> {
        let weights = self.outputs * self.inputs;
        // SAFETY: the caller's promise.
        unsafe {
            let Some((group, bits)) = self.quantized else {
                let index = take();
                return Matrix::Dense {
                    weights: match self.kind {
                        Kind::F32 => DenseWeights::F32(buffers.input::<f32>(index, weights)),
                        Kind::Bf16 => DenseWeights::Bf16(buffers.input::<bf16>(index, weights)),
                        Kind::F16 => DenseWeights::F16(buffers.input::<f16>(index, weights)),
                    },
                    outputs: self.outputs,
                };
            };
            let words = buffers.input(take(), weights * bits / 32);
            let mut scales = || {
                let (index, len) = (take(), weights / group);
                match self.kind {
                    Kind::F32 => Scales::F32(buffers.input(index, len)),
                    Kind::Bf16 => Scales::Bf16(buffers.input(index, len)),
                    Kind::F16 => Scales::F16(buffers.input(index, len)),
                }
            };
            Matrix::Quantized(QuantizedMatrix {
                words,
                scales: scales(),
                biases: scales(),
                outputs: self.outputs,
                inputs: self.inputs,
                group,
                bits,
            })
        }
    }
}

/// The matrix's shape, if the kernel takes it. Matrices that are stacked, `[.., out, in]`, count as one with
/// the outputs of all.
pub(super) fn shape(matrix: &MatrixArrays, x: Kind, inputs: usize) -> Option<Shape> {
    let (&columns, leading) = matrix.weight.shape().split_last()?;
    let outputs: usize = leading.iter().map(|&n| n as usize).product();
    let columns = columns as usize;
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
            inputs,
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
        && quantized.scales.shape() == [leading, &[(inputs / group) as i32]].concat()
        && quantized.biases.shape() == quantized.scales.shape()
        && quantized.biases.dtype() == quantized.scales.dtype();
    fits.then_some(Shape {
        outputs,
        inputs,
        kind,
        quantized: Some((group, bits)),
        offset,
    })
}

pub(in crate::backend) fn project(args: &Projection) -> Option<OpResult<Vec<Handle>>> {
    let x = &args.x;
    let kind_x = kind(x)?;
    let inputs = *x.shape().last()? as usize;
    if !enabled() || inputs == 0 || !inputs.is_multiple_of(32) {
        return None;
    }
    let mut arrays: Vec<&Handle> = vec![x];
    if let Some((weight, _)) = &args.norm {
        if weight.dtype() != x.dtype() || weight.shape() != [inputs as i32] {
            return None;
        }
        arrays.push(weight);
    }
    let mut matrices = Vec::with_capacity(args.matrices.len());
    for matrix in &args.matrices {
        if matrix.weight.ndim() != 2 {
            return None;
        }
        matrices.push(shape(matrix, kind_x, inputs)?);
        arrays.extend(matrix.arrays());
    }
    let rows = elements(x) / inputs;
    if args.gate.is_some() && matrices[0].outputs != matrices[1].outputs {
        return None;
    }
    // A gate makes one of two.
    let made = if args.gate.is_some() {
        1
    } else {
        matrices.len()
    };
    let widths: Vec<usize> = matrices[..made].iter().map(|m| m.outputs).collect();
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
    if let Some((weight, _)) = &args.post_norm {
        if weight.dtype() != x.dtype() || weight.shape() != [widths[0] as i32] {
            return None;
        }
        arrays.push(weight);
    }
    let outputs: Vec<Output<'_>> = shapes
        .iter()
        .map(|shape| Output {
            shape,
            dtype: x.dtype(),
            from: None,
        })
        .collect();
    Some(compute(&arrays, 0, &outputs, |buffers| {
        let mut next = 0;
        let mut take = || {
            next += 1;
            next - 1
        };
        by_kind!(kind_x, T => {
            // SAFETY: dtypes and shapes were checked above, and the inputs are in the order of
            // `arrays`: x, the norm's weight, for each matrix its weights, scales and biases and its
            // offset, the residual and the norm after, those that are there.
            unsafe {
                let x: &[T] = buffers.input(take(), rows * inputs);
                let norm = args
                    .norm
                    .as_ref()
                    .map(|(_, eps)| (buffers.input::<T>(take(), inputs), *eps));
                let mut weights = Vec::with_capacity(matrices.len());
                let mut offsets = Vec::with_capacity(matrices.len());
                for matrix in &matrices {
                    weights.push(matrix.matrix(buffers, &mut take));
                    let offset = matrix.offset.then(|| buffers.input::<T>(take(), matrix.outputs));
                    offsets.push(offset);
                }
                let mut outputs: Vec<&mut [T]> = (0..)
                    .zip(&widths)
                    .map(|(index, width)| buffers.output(index, rows * width))
                    .collect();
                let residual = args
                    .residual
                    .as_ref()
                    .map(|_| buffers.input::<T>(take(), rows * widths[0]));
                let post_norm = args
                    .post_norm
                    .as_ref()
                    .map(|(_, eps)| (buffers.input::<T>(take(), widths[0]), *eps));
                Project {
                    x,
                    inputs,
                    norm,
                    matrices: &weights,
                    offsets: &offsets,
                    gate: args.gate,
                    post_norm,
                    residual,
                    scale: args.scale,
                    exact: kernels::exact(),
                }
                .run(&mut outputs);
            }
        });
    }))
}
