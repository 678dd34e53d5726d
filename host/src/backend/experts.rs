//! The slots of mixtures of experts: checks, and MLX's own kernels where the host has none that fits.

use abi_stable::std_types::RVec;
use mlx_rs::{Array, Dtype, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Handle, Lent, OpResult, handles, lent, lent_opt, op, ops};
use super::native;
use super::ops::{clamped, raw_call};
use super::project::{Matrix, Projection, gated};
use crate::kernels::rows::Gate;

/// The arguments of a call, of shapes that fit each other.
pub(super) struct Experts {
    pub projection: Projection,
    pub choice: Lent,
    pub weights: Lent,
    pub gate: Gate,
    /// `E`.
    pub count: i32,
    /// `H`.
    pub width: i32,
    /// `I`.
    pub inner: i32,
    /// `k`.
    pub chosen: i32,
}

impl Experts {
    fn new(raw: &abi::Experts<'_>) -> OpResult<Self> {
        let projection = Projection::new(&raw.projection)?;
        let (choice, weights) = (lent(raw.choice)?, lent(raw.weights)?);
        let [gate, up, down] = &projection.matrices[..] else {
            let count = projection.matrices.len();
            return Err(format!("{count} matrices, expected gate, up and down"));
        };
        let shape = projection.x.shape();
        let Some((&width, rows)) = shape.split_last() else {
            return Err("the input has no axes".to_owned());
        };
        let &[count, inner, _] = gate.weight.shape() else {
            let shape = gate.weight.shape();
            return Err(format!("a gate of {shape:?}, expected [experts, out, in]"));
        };
        for (matrix, outputs, inputs) in [
            (gate, inner, width),
            (up, inner, width),
            (down, width, inner),
        ] {
            stacked(matrix, [count, outputs, inputs])?;
        }
        let &[ref leading @ .., chosen] = choice.shape() else {
            return Err("the choice has no axes".to_owned());
        };
        if leading != rows || chosen == 0 || choice.dtype() != Dtype::Int32 {
            return Err(format!(
                "a choice of {:?}{:?} for rows of {shape:?}, expected one or more i32 per row",
                choice.dtype(),
                choice.shape()
            ));
        }
        if weights.shape() != choice.shape() || weights.dtype() != projection.x.dtype() {
            return Err(format!(
                "weights {:?}{:?} for a choice of {:?} and rows of {:?}",
                weights.dtype(),
                weights.shape(),
                choice.shape(),
                projection.x.dtype()
            ));
        }
        for norm in [&projection.norm, &projection.post_norm] {
            if let Some((norm, _)) = norm.as_ref().filter(|(norm, _)| norm.shape() != [width]) {
                return Err(format!("a norm of {:?} for {shape:?}", norm.shape()));
            }
        }
        if let Some(residual) = projection.residual.as_ref().filter(|x| x.shape() != shape) {
            return Err(format!(
                "{:?} cannot be added to {shape:?}",
                residual.shape()
            ));
        }
        Ok(Self {
            gate: projection.gate.ok_or("experts without a gate")?,
            projection,
            choice,
            weights,
            count,
            width,
            inner,
            chosen,
        })
    }

    /// Step by step.
    fn by_mlx(&self) -> OpResult<Array> {
        let x = &self.projection.x;
        if x.size() == 0 {
            return Ok(Array::clone(x));
        }
        let rows = x.size() as i32 / self.width;
        let each = [rows, self.chosen];
        let choice = self.choice.reshape(&each).explain()?;
        let gate = &self.projection.matrices[0];
        let choice = clamped(&gate.weight, &choice, 0)?.as_dtype(Dtype::Uint32);
        let choice = choice.explain()?;
        let product =
            |index: usize, x: &Array| gathered(&self.projection.matrices[index], x, &choice);
        let normed = self.projection.normed()?;
        let normed = normed.reshape(&[rows, 1, 1, self.width]).explain()?;
        let opened = gated(self.gate, &product(0, &normed)?, &product(1, &normed)?)?;
        let made = product(2, &opened)?;
        let weights = self.weights.reshape(&[rows, self.chosen, 1, 1]).explain()?;
        let weighted = made.multiply(&weights).explain()?;
        let sum = weighted
            .as_dtype(Dtype::Float32)
            .and_then(|each| each.sum_axis(1, false))
            .and_then(|sum| sum.as_dtype(x.dtype()))
            .and_then(|sum| sum.reshape(x.shape()))
            .explain()?;
        self.projection.finished(sum)
    }
}

/// Checks that a matrix is `[E, out, in]`, all of it.
fn stacked(matrix: &Matrix, shape: [i32; 3]) -> OpResult<()> {
    if matrix.offset.is_some() {
        return Err("experts with an offset".to_owned());
    }
    let [count, outputs, inputs] = shape;
    let is = |array: &Array, width: i64| {
        let leading = [i64::from(count), i64::from(outputs)];
        array.ndim() == 3
            && array.shape()[..2].iter().map(|&n| i64::from(n)).eq(leading)
            && i64::from(array.shape()[2]) == width
    };
    let fits = match &matrix.quantized {
        None => is(&matrix.weight, inputs.into()) && matrix.weight.dtype().is_float(),
        Some(quantized) => {
            let (inputs, bits) = (i64::from(inputs), i64::from(quantized.bits));
            let group = i64::from(quantized.group);
            (1..=8).contains(&bits)
                && group > 0
                && inputs % group == 0
                && is(&matrix.weight, inputs * bits / 32)
                && matrix.weight.dtype() == Dtype::Uint32
                && is(&quantized.scales, inputs / group)
                && is(&quantized.biases, inputs / group)
        }
    };
    if fits && count > 0 && outputs > 0 && inputs > 0 {
        return Ok(());
    }
    let got = matrix.weight.shape();
    let scales = matrix.quantized.as_ref();
    let scales = scales.map_or(String::new(), |q| {
        format!(
            " with scales {:?}, groups of {} and {} bits",
            q.scales.shape(),
            q.group,
            q.bits
        )
    });
    Err(format!(
        "experts of {got:?}{scales} where {shape:?} is needed"
    ))
}

/// The products of `x` `[rows, k or 1, 1, in]` with the matrices that `choice` `[rows, k]` names,
/// `[rows, k, 1, out]`.
fn gathered(matrix: &Matrix, x: &Array, choice: &Array) -> OpResult<Array> {
    if let Some(quantized) = &matrix.quantized {
        let narrowed = |scales: &Array| scales.as_dtype(x.dtype()).explain();
        let (scales, biases) = (narrowed(&quantized.scales)?, narrowed(&quantized.biases)?);
        return mlx::gather_qmm(
            x,
            &*matrix.weight,
            &scales,
            &biases,
            None,
            choice,
            true,
            quantized.group,
            quantized.bits,
            false,
        )
        .explain();
    }
    // On a CPU, MLX gathers single precision only.
    let device = mlx_rs::Device::try_default().and_then(|device| device.get_type());
    let wide = matches!(device, Ok(mlx_rs::DeviceType::Cpu));
    let of = |array: &Array| match wide {
        true => array.as_dtype(Dtype::Float32).explain(),
        false => array.as_dtype(x.dtype()).explain(),
    };
    let turned = of(&matrix.weight)?.transpose_axes(&[0, 2, 1]).explain()?;
    let input = of(x)?;
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: live handles; an empty one stands for all rows of `input` in turn.
    let product = raw_call(|out| unsafe {
        let all = mlx_sys::mlx_array_new();
        mlx_sys::mlx_gather_mm(
            out,
            input.as_ptr(),
            turned.as_ptr(),
            all,
            choice.as_ptr(),
            false,
            stream.as_ptr(),
        )
    })?;
    product.as_dtype(x.dtype()).explain()
}

pub(super) extern "C" fn experts(args: &abi::Experts<'_>) -> RawTensor {
    op(|| {
        let experts = Experts::new(args)?;
        match native::experts(&experts) {
            Some(mixed) => mixed,
            None => experts.by_mlx().map(Handle::from),
        }
    })
}

pub(super) extern "C" fn route(scores: RawTensor, k: i32, scale: RawTensor) -> RVec<RawTensor> {
    ops(|| {
        let (scores, scale) = (lent(scores)?, lent_opt(scale)?);
        let count = scores.shape().last().copied().unwrap_or(0);
        if !(1..=count).contains(&k) || !scores.dtype().is_float() {
            return Err(format!("{k} of {:?}{:?}", scores.dtype(), scores.shape()));
        }
        if let Some(scale) = scale.as_ref().filter(|scale| scale.shape() != [count]) {
            return Err(format!("factors {:?} for {count} experts", scale.shape()));
        }
        match native::route(&scores, k, scale.as_deref()) {
            Some(routed) => routed,
            None => route_by_mlx(&scores, k, scale.as_deref().map(Handle::array)).map(handles),
        }
    })
}

fn route_by_mlx(scores: &Array, k: i32, scale: Option<&Array>) -> OpResult<Vec<Array>> {
    let wide = scores.as_dtype(Dtype::Float32).explain()?;
    let order = mlx::argsort_axis(wide.negative().explain()?, -1).explain()?;
    let (starts, mut stops) = (vec![0; scores.ndim()], scores.shape().to_vec());
    if let Some(last) = stops.last_mut() {
        *last = k;
    }
    let choice = super::ops::slice_array(&order, &starts, &stops)?;
    let best = wide.take_along_axis(&choice, -1).explain()?;
    let mut weights = mlx::softmax_axis(&best, -1, true).explain()?;
    if let Some(scale) = scale {
        let scale = scale.as_dtype(Dtype::Float32).explain()?;
        let factors = scale.take_axis(&choice, 0).explain()?;
        weights = weights.multiply(&factors).explain()?;
    }
    Ok(vec![
        weights.as_dtype(scores.dtype()).explain()?,
        choice.as_dtype(Dtype::Int32).explain()?,
    ])
}
