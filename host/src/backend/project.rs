//! The slot for projections: checks, and MLX's own kernels where the host has none that fits.

use abi_stable::std_types::RVec;
use mlx_rs::{Array, fast, ops as mlx};
use plugin_api::abi::{self, RawMatrix, RawTensor, UnaryOp};

use super::handle::{Explain, Lent, OpResult, lent, lent_opt, ops};
use super::native;
use super::ops::{gelu_tanh, scalar};
use crate::kernels::rows::Gate;

/// Packed weights' scales.
pub(super) struct Quantized {
    pub scales: Lent,
    pub biases: Lent,
    pub group: i32,
    pub bits: i32,
}

pub(super) struct Matrix {
    pub weight: Lent,
    pub quantized: Option<Quantized>,
    pub offset: Option<Lent>,
}

/// The arguments of a call, as arrays.
pub(super) struct Projection {
    pub x: Lent,
    /// Weight and epsilon.
    pub norm: Option<(Lent, f32)>,
    pub matrices: Vec<Matrix>,
    pub gate: Option<Gate>,
    /// Weight and epsilon.
    pub post_norm: Option<(Lent, f32)>,
    pub residual: Option<Lent>,
    pub scale: f32,
}

impl Matrix {
    fn new(raw: &RawMatrix) -> OpResult<Self> {
        let quantized = match lent_opt(raw.scales)? {
            Some(scales) => Some(Quantized {
                scales,
                biases: lent(raw.biases)?,
                group: raw.group,
                bits: raw.bits,
            }),
            None => None,
        };
        Ok(Self {
            weight: lent(raw.weight)?,
            quantized,
            offset: lent_opt(raw.offset)?,
        })
    }

    /// `x W^T + offset`
    fn product(&self, x: &Array) -> OpResult<Array> {
        let y = match &self.quantized {
            None => x.matmul(self.weight.transpose().explain()?).explain()?,
            Some(quantized) => {
                let narrowed = |scales: &Array| scales.as_dtype(x.dtype()).explain();
                // MLX wants scales of the activations' type.
                let (scales, biases) = (narrowed(&quantized.scales)?, narrowed(&quantized.biases)?);
                let (group, bits) = (quantized.group, quantized.bits);
                mlx::quantized_matmul(x, &*self.weight, &scales, &biases, true, group, bits)
                    .explain()?
            }
        };
        match &self.offset {
            Some(offset) => y.add(&**offset).explain(),
            None => Ok(y),
        }
    }
}

impl Projection {
    fn new(raw: &abi::Projection<'_>) -> OpResult<Self> {
        let gate = match raw.gate {
            UnaryOp::NONE => None,
            UnaryOp::SILU => Some(Gate::Silu),
            UnaryOp::GELU_TANH => Some(Gate::GeluTanh),
            other => return Err(format!("{other:?} is no gate that this host knows")),
        };
        let matrices = raw.matrices.iter().map(Matrix::new);
        let matrices = matrices.collect::<OpResult<Vec<_>>>()?;
        let residual = lent_opt(raw.residual)?;
        let post_norm = lent_opt(raw.post_norm)?.map(|weight| (weight, raw.post_eps));
        let only = residual.is_some() || post_norm.is_some() || raw.scale != 1.0;
        let fits = match (gate, only) {
            (Some(_), _) => matrices.len() == 2,
            (None, true) => matrices.len() == 1,
            (None, false) => !matrices.is_empty(),
        };
        if !fits {
            return Err(format!(
                "{} matrices are not what is asked for",
                matrices.len()
            ));
        }
        Ok(Self {
            x: lent(raw.x)?,
            norm: lent_opt(raw.norm)?.map(|weight| (weight, raw.eps)),
            matrices,
            gate,
            post_norm,
            residual,
            scale: raw.scale,
        })
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let normed;
        let x = match &self.norm {
            Some((weight, eps)) => {
                normed = fast::rms_norm(&*self.x, Some(&**weight), *eps).explain()?;
                &normed
            }
            None => &*self.x,
        };
        let products = self.matrices.iter().map(|matrix| matrix.product(x));
        let mut products = products.collect::<OpResult<Vec<_>>>()?;
        if let (Some(gate), [first, second]) = (self.gate, &products[..]) {
            let open = match gate {
                Gate::Silu => mlx::sigmoid(first)
                    .and_then(|s| s.multiply(first))
                    .explain()?,
                Gate::GeluTanh => gelu_tanh(first)?,
            };
            products = vec![open.multiply(second).explain()?];
        }
        if let [only] = &mut products[..] {
            if let Some((weight, eps)) = &self.post_norm {
                *only = fast::rms_norm(&*only, Some(&**weight), *eps).explain()?;
            }
            if let Some(residual) = &self.residual {
                *only = residual.add(&*only).explain()?;
            }
            if self.scale != 1.0 {
                *only = only.multiply(scalar(self.scale, only.dtype())?).explain()?;
            }
        }
        Ok(products)
    }
}

pub(super) extern "C" fn project(args: &abi::Projection<'_>) -> RVec<RawTensor> {
    ops(|| {
        let projection = Projection::new(args)?;
        match native::project(&projection) {
            Some(products) => products,
            None => projection.by_mlx(),
        }
    })
}
