//! The slot for projections: checks, and MLX's own kernels where the host has none that fits.

use abi_stable::std_types::RVec;
use mlx_rs::{Array, fast, ops as mlx};
use plugin_api::abi::{self, RawMatrix, RawTensor, UnaryOp};

use super::handle::{Explain, Handle, Lent, OpResult, handles, lent, lent_opt, ops};
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

    /// What it consists of: weights, then scales and biases, then the offset.
    pub fn arrays(&self) -> impl Iterator<Item = &Handle> {
        let quantized = self.quantized.iter();
        std::iter::once(&*self.weight)
            .chain(quantized.flat_map(|q| [&*q.scales, &*q.biases]))
            .chain(self.offset.as_deref())
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
    pub fn new(raw: &abi::Projection<'_>) -> OpResult<Self> {
        let gate = match raw.gate {
            UnaryOp::NONE => None,
            UnaryOp::SILU => Some(Gate::Silu),
            UnaryOp::GELU_TANH => Some(Gate::GeluTanh),
            other => return Err(format!("{other:?} is no gate that this host knows")),
        };
        let matrices = raw.matrices.iter().map(Matrix::new);
        let matrices = matrices.collect::<OpResult<Vec<_>>>()?;
        Ok(Self {
            x: lent(raw.x)?,
            norm: lent_opt(raw.norm)?.map(|weight| (weight, raw.eps)),
            matrices,
            gate,
            post_norm: lent_opt(raw.post_norm)?.map(|weight| (weight, raw.post_eps)),
            residual: lent_opt(raw.residual)?,
            scale: raw.scale,
        })
    }

    /// Whether there are as many matrices as what is asked for takes.
    fn check(&self) -> OpResult<()> {
        let only = self.residual.is_some() || self.post_norm.is_some() || self.scale != 1.0;
        let fits = match (self.gate, only) {
            (Some(_), _) => self.matrices.len() == 2,
            (None, true) => self.matrices.len() == 1,
            (None, false) => !self.matrices.is_empty(),
        };
        if fits {
            return Ok(());
        }
        Err(format!(
            "{} matrices are not what is asked for",
            self.matrices.len()
        ))
    }

    /// What goes into the matrices.
    pub fn normed(&self) -> OpResult<Array> {
        match &self.norm {
            Some((weight, eps)) => fast::rms_norm(&*self.x, Some(&**weight), *eps).explain(),
            None => Ok(Array::clone(&self.x)),
        }
    }

    /// What becomes of an only outcome.
    pub fn finished(&self, mut only: Array) -> OpResult<Array> {
        if let Some((weight, eps)) = &self.post_norm {
            only = fast::rms_norm(&only, Some(&**weight), *eps).explain()?;
        }
        if let Some(residual) = &self.residual {
            only = residual.add(&only).explain()?;
        }
        if self.scale != 1.0 {
            only = only.multiply(scalar(self.scale, only.dtype())?).explain()?;
        }
        Ok(only)
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let x = self.normed()?;
        let products = self.matrices.iter().map(|matrix| matrix.product(&x));
        let mut products = products.collect::<OpResult<Vec<_>>>()?;
        if let (Some(gate), [first, second]) = (self.gate, &products[..]) {
            products = vec![gated(gate, first, second)?];
        }
        if products.len() == 1 {
            let only = products.remove(0);
            products = vec![self.finished(only)?];
        }
        Ok(products)
    }
}

/// `gate(first) * second`
pub(super) fn gated(gate: Gate, first: &Array, second: &Array) -> OpResult<Array> {
    let open = match gate {
        Gate::Silu => mlx::sigmoid(first)
            .and_then(|s| s.multiply(first))
            .explain()?,
        Gate::GeluTanh => gelu_tanh(first)?,
    };
    open.multiply(second).explain()
}

pub(super) extern "C" fn project(args: &abi::Projection<'_>) -> RVec<RawTensor> {
    ops(|| {
        let projection = Projection::new(args)?;
        projection.check()?;
        match native::project(&projection) {
            Some(products) => products,
            None => projection.by_mlx().map(handles),
        }
    })
}
