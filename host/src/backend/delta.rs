//! The slot for a Gated DeltaNet layer between its projections: checks, and MLX's own kernels where the
//! host has none that fits.

use abi_stable::std_types::RVec;
use mlx_rs::{Array, Dtype, fast, ops as mlx};
use plugin_api::abi::{self, RawTensor};

use super::handle::{Explain, Handle, Lent, OpResult, handles, lent, lent_opt, ops};
use super::native;
use super::ops::slice_array;
use crate::kernels::delta::L2_EPS;

/// What the arguments say about each other.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub batch: i32,
    pub width: i32,
    pub key_heads: i32,
    pub value_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub kernel: i32,
}

impl Shape {
    pub fn channels(self) -> i32 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// The arguments of a call, as arrays.
pub(super) struct DeltaNet {
    pub qkv: Lent,
    pub z: Option<Lent>,
    pub b: Lent,
    pub a: Lent,
    pub conv: Lent,
    pub recurrent: Lent,
    pub taps: Lent,
    pub rate: Lent,
    pub dt_bias: Lent,
    pub norm: Lent,
    pub eps: f32,
    pub lens: Vec<i32>,
    pub advance: bool,
    pub shape: Shape,
}

impl DeltaNet {
    fn new(raw: &abi::GatedDelta<'_>) -> OpResult<Self> {
        let mut args = Self {
            qkv: lent(raw.qkv)?,
            z: lent_opt(raw.z)?,
            b: lent(raw.b)?,
            a: lent(raw.a)?,
            conv: lent(raw.conv_state)?,
            recurrent: lent(raw.recurrent_state)?,
            taps: lent(raw.conv_weight)?,
            rate: lent(raw.rate)?,
            dt_bias: lent(raw.dt_bias)?,
            norm: lent(raw.norm)?,
            eps: raw.eps,
            lens: raw.lens.to_vec(),
            advance: raw.advance,
            shape: Shape {
                batch: 0,
                width: 0,
                key_heads: raw.key_heads,
                value_heads: 0,
                key_dim: 0,
                value_dim: 0,
                kernel: 0,
            },
        };
        args.shape = args.checked().ok_or_else(|| {
            format!(
                "gated_delta of qkv {:?}, z {:?}, conv {:?}, recurrent {:?}, taps {:?}, {} key heads, \
                 columns {:?}",
                args.qkv.shape(),
                args.z.as_deref().map(Handle::shape),
                args.conv.shape(),
                args.recurrent.shape(),
                args.taps.shape(),
                raw.key_heads,
                args.lens,
            )
        })?;
        Ok(args)
    }

    /// The shape, if all arguments have it.
    fn checked(&self) -> Option<Shape> {
        let (&[batch, width, channels], &[_, value_heads, value_dim, key_dim]) =
            (self.qkv.shape(), self.recurrent.shape())
        else {
            return None;
        };
        let (key_heads, kernel) = (self.shape.key_heads, *self.taps.shape().first()?);
        let shape = Shape {
            batch,
            width,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            kernel,
        };
        let by_head = [batch, width, value_heads];
        let gate = |z: &Handle| z.shape() == [batch, width, value_heads * value_dim];
        let fits = [
            batch,
            width,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            kernel,
        ]
        .iter()
        .all(|&n| n > 0)
            && value_heads % key_heads == 0
            && i64::from(channels)
                == 2 * i64::from(key_heads) * i64::from(key_dim)
                    + i64::from(value_heads) * i64::from(value_dim)
            && self.z.as_deref().is_none_or(gate)
            && self.b.shape() == by_head
            && self.a.shape() == by_head
            && self.conv.shape() == [batch, kernel - 1, channels]
            && self.recurrent.shape()[0] == batch
            && self.taps.shape() == [kernel, channels]
            && self.rate.shape() == [value_heads]
            && self.dt_bias.shape() == [value_heads]
            && self.norm.shape() == [value_dim]
            && self.lens.len() == batch as usize
            && self.lens.iter().all(|len| (0..=width).contains(len));
        fits.then_some(shape)
    }

    /// Step by step: `T = 1` and `T = K` round alike.
    fn by_mlx(&self) -> OpResult<Vec<Array>> {
        let Shape {
            batch,
            width,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            kernel,
        } = self.shape;
        let dtype = self.qkv.dtype();
        let window = mlx::concatenate(&[&*self.conv, &*self.qkv], 1).explain()?;
        let mixed = self.convolved(&window)?;
        let part = |from: i32, heads: i32, dim: i32| -> OpResult<Array> {
            let [start, stop] = [[0, 0, from], [batch, width, from + heads * dim]];
            let part = slice_array(&mixed, &start, &stop)?;
            part.reshape(&[batch, width, heads, dim]).explain()
        };
        let keys = key_heads * key_dim;
        // x / sqrt(sum x^2 + eps), written as an RMS norm; queries are also scaled by Dk^-1/2.
        let unit = |x: &Array, scale: f32| -> OpResult<Array> {
            let eps = L2_EPS / key_dim as f32;
            let normed = fast::rms_norm(x, None::<&Array>, eps).explain()?;
            let scale = Array::from_f32(scale).as_dtype(dtype).explain()?;
            normed.multiply(&scale).explain()
        };
        let q = unit(&part(0, key_heads, key_dim)?, 1.0 / key_dim as f32)?;
        let k = unit(
            &part(keys, key_heads, key_dim)?,
            (key_dim as f32).powf(-0.5),
        )?;
        let v = part(2 * keys, value_heads, value_dim)?;

        let f32 = |x: &Array| x.as_dtype(Dtype::Float32).explain();
        let beta = f32(&mlx::sigmoid(&*self.b).explain()?)?;
        let a = f32(&self.a.add(&*self.dt_bias).explain()?)?;
        let a = mlx::logaddexp(&a, Array::from_f32(0.0)).explain()?;
        let decay = a.multiply(&*self.rate).and_then(|x| x.exp()).explain()?;
        // Padding leaves the state as it is: no decay, no update.
        let columns = mlx::arange::<_, i32>(0, width, 1).explain()?;
        let filled = Array::from_slice(&self.lens, &[batch, 1]);
        let filled = columns.lt(&filled).explain()?;
        let filled = filled.reshape(&[batch, width, 1]).explain()?;
        let padded =
            |x: &Array, value: f32| mlx::select(&filled, x, Array::from_f32(value)).explain();
        let (beta, decay) = (padded(&beta, 0.0)?, padded(&decay, 1.0)?);

        // [B, T, heads, D] to [B, Hv, T, D], key heads repeated for their value heads.
        let by_head = |x: &Array, heads: i32, dim: i32| -> OpResult<Array> {
            let mut x = f32(x)?;
            if heads < value_heads {
                let wide = [batch, width, heads, value_heads / heads, dim];
                x = x.reshape(&[batch, width, heads, 1, dim]).explain()?;
                x = mlx::broadcast_to(&x, &wide).explain()?;
                x = x.reshape(&[batch, width, value_heads, dim]).explain()?;
            }
            x.transpose_axes(&[0, 2, 1, 3]).explain()
        };
        let (q, k) = (
            by_head(&q, key_heads, key_dim)?,
            by_head(&k, key_heads, key_dim)?,
        );
        let v = by_head(&v, value_heads, value_dim)?;
        // [B, T, Hv] to [B, Hv, T, 1].
        let per_step = |x: &Array| -> OpResult<Array> {
            let x = x.transpose_axes(&[0, 2, 1]).explain()?;
            x.reshape(&[batch, value_heads, width, 1]).explain()
        };
        let (decay, beta) = (per_step(&decay)?, per_step(&beta)?);
        let at = |x: &Array, step: i32, dim: i32| {
            slice_array(x, &[0, 0, step, 0], &[batch, value_heads, step + 1, dim])
        };
        let mut state = Array::clone(&self.recurrent);
        let mut outputs = Vec::with_capacity(width as usize);
        for step in 0..width {
            let row = at(&k, step, key_dim)?;
            let column = |x: &Array, dim: i32| x.reshape(&[batch, value_heads, dim, 1]).explain();
            let decayed = state.multiply(&at(&decay, step, 1)?).explain()?;
            let known = decayed.matmul(&column(&row, key_dim)?).explain()?;
            let error = column(&at(&v, step, value_dim)?, value_dim)?;
            let error = error.subtract(&known).explain()?;
            let change = error.multiply(&at(&beta, step, 1)?).explain()?;
            let change = change.multiply(&row).explain()?;
            state = decayed.add(&change).explain()?;
            outputs.push(
                state
                    .matmul(&column(&at(&q, step, key_dim)?, key_dim)?)
                    .explain()?,
            );
        }
        let mut all = Vec::with_capacity(3);
        if let Some(z) = &self.z {
            all.push(self.gated(z, &outputs)?);
        }
        if self.advance {
            all.extend([self.last(&window, kernel - 1)?, state]);
        }
        Ok(all)
    }

    /// `norm(y) * silu(z)` of T times `[B, Hv, Dv, 1]`, as `z`.
    fn gated(&self, z: &Array, outputs: &[Array]) -> OpResult<Array> {
        let f32 = |x: &Array| x.as_dtype(Dtype::Float32).explain();
        let dtype = z.dtype();
        let y = mlx::concatenate(outputs, 3).explain()?;
        let y = y.transpose_axes(&[0, 3, 1, 2]).explain()?;
        let y = f32(&y.as_dtype(dtype).explain()?)?;
        let gate = f32(z)?.reshape(y.shape()).explain()?;
        let open = mlx::sigmoid(&gate)
            .and_then(|s| s.multiply(&gate))
            .explain()?;
        let y = fast::rms_norm(&y, Some(&*self.norm), self.eps).explain()?;
        let y = y.multiply(&open).explain()?.as_dtype(dtype).explain()?;
        y.reshape(z.shape()).explain()
    }

    /// The convolution and its activation: `[B, K-1+T, C]` to `[B, T, C]`.
    fn convolved(&self, window: &Array) -> OpResult<Array> {
        let Shape { batch, width, .. } = self.shape;
        let channels = self.shape.channels();
        let mut sum = Array::from_f32(0.0);
        for tap in 0..self.shape.kernel {
            let seen = slice_array(window, &[0, tap, 0], &[batch, tap + width, channels])?;
            let weight = slice_array(&self.taps, &[tap, 0], &[tap + 1, channels])?;
            let weight = weight.as_dtype(Dtype::Float32).explain()?;
            let seen = seen.as_dtype(Dtype::Float32).explain()?;
            sum = seen
                .multiply(&weight)
                .and_then(|term| sum.add(&term))
                .explain()?;
        }
        let sum = sum.as_dtype(window.dtype()).explain()?;
        mlx::sigmoid(&sum).and_then(|s| s.multiply(&sum)).explain()
    }

    /// The columns of each row before its first one that is not filled: `[B, count, C]`.
    fn last(&self, window: &Array, count: i32) -> OpResult<Array> {
        let channels = self.shape.channels();
        let rows = (0..).zip(&self.lens).map(|(row, &len)| {
            slice_array(window, &[row, len, 0], &[row + 1, len + count, channels])
        });
        mlx::concatenate(&rows.collect::<OpResult<Vec<_>>>()?, 0).explain()
    }
}

pub(super) extern "C" fn gated_delta(args: &abi::GatedDelta<'_>) -> RVec<RawTensor> {
    ops(|| {
        let net = DeltaNet::new(args)?;
        match native::gated_delta(&net) {
            Some(outcome) => outcome,
            None => net.by_mlx().map(handles),
        }
    })
}
