//! Projections of one input, with the steps around them in the same call.

use crate::abi::{self, RawMatrix, RawTensor, UnaryOp};
use crate::error::{Error, Result};
use crate::host::{api, op_error};
use crate::layers::{Experts, Linear, RmsNorm, Routes};
use crate::tensor::Tensor;

/// What happens to an input on its way through one or more [`Linear`]s. One call of the host
/// instead of several: on a CPU that saves most of what small models spend between products.
#[derive(Clone, Copy)]
#[must_use]
pub struct Project<'a> {
    x: &'a Tensor,
    norm: Option<&'a RmsNorm>,
    residual: Option<&'a Tensor>,
    post_norm: Option<&'a RmsNorm>,
    scale: f32,
}

impl<'a> Project<'a> {
    /// The input, `[.., in]`.
    pub fn of(x: &'a Tensor) -> Self {
        Self {
            x,
            norm: None,
            residual: None,
            post_norm: None,
            scale: 1.0,
        }
    }

    /// The input goes through a norm first.
    pub fn norm(mut self, norm: &'a RmsNorm) -> Self {
        self.norm = Some(norm);
        self
    }

    /// The outcome goes through a norm of its own, before anything is added.
    pub fn post_norm(mut self, norm: &'a RmsNorm) -> Self {
        self.post_norm = Some(norm);
        self
    }

    /// What leaves is multiplied by a factor, after everything else.
    pub fn scaled(mut self, factor: f32) -> Self {
        self.scale = factor;
        self
    }

    /// `[.., out]` is added to the outcome.
    pub fn plus(mut self, residual: &'a Tensor) -> Self {
        self.residual = Some(residual);
        self
    }

    /// Through one projection, to `[.., out]`.
    pub fn with(self, linear: &Linear) -> Result<Tensor> {
        one(self.run(&[linear], UnaryOp::NONE)?)
    }

    /// `op(gate(x)) * up(x)`, `[.., out]`.
    pub fn gated(self, op: UnaryOp, gate: &Linear, up: &Linear) -> Result<Tensor> {
        one(self.run(&[gate, up], op)?)
    }

    /// Through several projections, to one `[.., out]` each.
    pub fn through<const N: usize>(self, linears: [&Linear; N]) -> Result<[Tensor; N]> {
        let tensors = self.run(&linears, UnaryOp::NONE)?;
        tensors
            .try_into()
            .map_err(|_| Error::failed("the host returned another number of projections"))
    }

    /// As [`Project::through`], for a number of them that is not known beforehand.
    pub fn through_all(self, linears: &[&Linear]) -> Result<Vec<Tensor>> {
        self.run(linears, UnaryOp::NONE)
    }

    /// Through the experts that `routes` names, to `[.., hidden]`.
    pub fn experts(self, experts: &Experts, routes: &Routes) -> Result<Tensor> {
        let (matrices, gate) = experts.raw();
        let out = api().experts()(&abi::Experts {
            projection: self.raw(&matrices, gate),
            choice: routes.choice.raw(),
            weights: routes.weights.raw(),
        });
        Tensor::own("experts", out)
    }

    /// As it crosses the table, lent.
    fn raw<'b>(&self, matrices: &'b [RawMatrix], gate: UnaryOp) -> abi::Projection<'b> {
        let parts = |norm: Option<&RmsNorm>| match norm.map(RmsNorm::parts) {
            Some((weight, eps)) => (weight.raw(), eps),
            None => (RawTensor::NULL, 0.0),
        };
        let (norm, eps) = parts(self.norm);
        let (post_norm, post_eps) = parts(self.post_norm);
        abi::Projection {
            x: self.x.raw(),
            norm,
            eps,
            matrices: matrices.into(),
            gate,
            post_norm,
            post_eps,
            residual: self.residual.map_or(RawTensor::NULL, Tensor::raw),
            scale: self.scale,
        }
    }

    fn run(self, linears: &[&Linear], gate: UnaryOp) -> Result<Vec<Tensor>> {
        let matrices: Vec<RawMatrix> = linears.iter().map(|linear| linear.raw()).collect();
        let out = api().project()(&self.raw(&matrices, gate));
        if out.is_empty() {
            return Err(op_error("project"));
        }
        out.into_iter()
            .map(|raw| Tensor::own("project", raw))
            .collect()
    }
}

fn one(tensors: Vec<Tensor>) -> Result<Tensor> {
    let first = tensors.into_iter().next();
    first.ok_or_else(|| Error::failed("the host returned no projection"))
}
