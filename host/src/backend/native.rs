//! The op table's blocks by the host's own kernels, where they take the arguments: on the CPU.
//!
//! Each function gives `None` when MLX's own kernels must do: another device, another dtype or shape.

use std::cell::Cell;
use std::sync::LazyLock;

use half::{bf16, f16};
use mlx_rs::{Array, Dtype};

use super::handle::OpResult;
use super::primitive::{Buffers, Kernel, Output, node};
use crate::kernels::attention::{Attention, Visible};
use crate::kernels::delta::GatedDelta;
use crate::kernels::lanes::Float;
use crate::kernels::quantized::{QuantizedMatrix, Scales};
use crate::kernels::rows::{self, HeadShape, Rotation};

/// Whether kernels run on the CPU at all, and are not switched off by `MLXHOST_KERNELS=mlx`.
static ENABLED: LazyLock<bool> = LazyLock::new(|| {
    let stock = std::env::var_os("MLXHOST_KERNELS").is_some_and(|value| value == "mlx");
    let device = mlx_rs::Device::try_default().and_then(|device| device.get_type());
    !stock && matches!(device, Ok(mlx_rs::DeviceType::Cpu))
});

thread_local! {
    static STOCK: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body` with MLX's own kernels on this thread: the reference that tests compare with.
pub fn with_mlx_kernels<T>(body: impl FnOnce() -> T) -> T {
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            STOCK.set(self.0);
        }
    }
    let _reset = Reset(STOCK.replace(true));
    body()
}

fn enabled() -> bool {
    *ENABLED && !STOCK.get()
}

/// What the elements of an activation are.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    F32,
    Bf16,
    F16,
}

fn kind(array: &Array) -> Option<Kind> {
    match array.dtype() {
        Dtype::Float32 => Some(Kind::F32),
        Dtype::Bfloat16 => Some(Kind::Bf16),
        Dtype::Float16 => Some(Kind::F16),
        _ => None,
    }
}

/// Runs a generic kernel body for the element type.
macro_rules! by_kind {
    ($kind:expr, $t:ident => $body:expr) => {
        match $kind {
            Kind::F32 => {
                type $t = f32;
                $body
            }
            Kind::Bf16 => {
                type $t = bf16;
                $body
            }
            Kind::F16 => {
                type $t = f16;
                $body
            }
        }
    };
}

fn one(mut outputs: Vec<Array>) -> OpResult<Array> {
    outputs
        .pop()
        .ok_or_else(|| "a kernel without output".to_owned())
}

fn elements(array: &Array) -> usize {
    array.size()
}

// ---- quantized product

struct Quantized {
    kind: Kind,
    scales: Kind,
    rows: usize,
    outputs: usize,
    inputs: usize,
    group: usize,
    bits: usize,
}

impl Kernel for Quantized {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let (rows, outputs, inputs) = (self.rows, self.outputs, self.inputs);
        let groups = outputs * inputs / self.group;
        // SAFETY: `quantized_matmul` checked dtypes and shapes: x [rows, inputs], words, scales and
        // biases of a matrix [outputs, inputs], y [rows, outputs].
        unsafe {
            let scales = |index| match self.scales {
                Kind::F32 => Scales::F32(buffers.input(index, groups)),
                Kind::Bf16 => Scales::Bf16(buffers.input(index, groups)),
                Kind::F16 => Scales::F16(buffers.input(index, groups)),
            };
            let matrix = QuantizedMatrix {
                words: buffers.input(1, outputs * inputs * self.bits / 32),
                scales: scales(2),
                biases: scales(3),
                outputs,
                inputs,
                group: self.group,
                bits: self.bits,
            };
            if self.kind == Kind::F32 {
                matrix.multiply(
                    buffers.input(0, rows * inputs),
                    buffers.output(0, rows * outputs),
                );
                return;
            }
            by_kind!(self.kind, T => {
                let x: &[T] = buffers.input(0, rows * inputs);
                let x: Vec<f32> = x.iter().map(|x| x.wide()).collect();
                let mut y = vec![0.0; rows * outputs];
                matrix.multiply(&x, &mut y);
                let out: &mut [T] = buffers.output(0, rows * outputs);
                for (out, y) in out.iter_mut().zip(y) {
                    *out = Float::narrow(y);
                }
            });
        }
    }
}

pub(super) fn quantized_matmul(
    x: &Array,
    w: &Array,
    scales: &Array,
    biases: &Array,
    group: i32,
    bits: i32,
) -> Option<OpResult<Array>> {
    let (kind_x, kind_s) = (kind(x)?, kind(scales)?);
    let (&[outputs, words], &[_, groups]) = (w.shape(), scales.shape()) else {
        return None;
    };
    let (group, bits) = (usize::try_from(group).ok()?, usize::try_from(bits).ok()?);
    let inputs = *x.shape().last()? as usize;
    let fits = enabled()
        && QuantizedMatrix::supports(inputs, group, bits)
        && w.dtype() == Dtype::Uint32
        && words as usize == inputs * bits / 32
        && scales.shape() == [outputs, (inputs / group) as i32]
        && biases.shape() == [outputs, groups]
        && biases.dtype() == scales.dtype();
    if !fits {
        return None;
    }
    let kernel = Quantized {
        kind: kind_x,
        scales: kind_s,
        rows: elements(x) / inputs,
        outputs: outputs as usize,
        inputs,
        group,
        bits,
    };
    let mut shape = x.shape().to_vec();
    *shape.last_mut()? = outputs;
    let output = Output {
        shape: &shape,
        // MLX promotes to what both have in common.
        dtype: if kind_x == kind_s {
            x.dtype()
        } else {
            return None;
        },
    };
    Some(node(kernel, &[x, w, scales, biases], 0, &[output]).and_then(one))
}

// ---- norm

struct RmsNorm {
    kind: Kind,
    len: usize,
    width: usize,
    weighted: bool,
    eps: f32,
}

impl Kernel for RmsNorm {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        by_kind!(self.kind, T => {
            // SAFETY: `rms_norm` checked dtypes and shapes.
            let (x, out): (&[T], &mut [T]) =
                unsafe { (buffers.input(0, self.len), buffers.output(0, self.len)) };
            let weight: Option<Vec<f32>> = self.weighted.then(|| {
                // SAFETY: as above.
                let weight: &[T] = unsafe { buffers.input(1, self.width) };
                weight.iter().map(|w| w.wide()).collect()
            });
            rows::rms_norm(x, weight.as_deref(), self.eps, self.width, out);
        });
    }
}

pub(super) fn rms_norm(x: &Array, weight: Option<&Array>, eps: f32) -> Option<OpResult<Array>> {
    let width = *x.shape().last()?;
    let same = |w: &Array| w.dtype() == x.dtype() && w.shape() == [width];
    if !enabled() || width == 0 || !weight.is_none_or(same) {
        return None;
    }
    let kernel = RmsNorm {
        kind: kind(x)?,
        len: elements(x),
        width: width as usize,
        weighted: weight.is_some(),
        eps,
    };
    let inputs: Vec<&Array> = [x].into_iter().chain(weight).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
    };
    Some(node(kernel, &inputs, 0, &[output]).and_then(one))
}

// ---- gate

struct SiluMul {
    kind: Kind,
    len: usize,
}

impl Kernel for SiluMul {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        by_kind!(self.kind, T => {
            // SAFETY: `silu_mul` checked dtypes and shapes.
            let (gate, up, out): (&[T], &[T], &mut [T]) = unsafe {
                (
                    buffers.input(0, self.len),
                    buffers.input(1, self.len),
                    buffers.output(0, self.len),
                )
            };
            rows::silu_mul(gate, up, out);
        });
    }
}

pub(super) fn silu_mul(gate: &Array, up: &Array) -> Option<OpResult<Array>> {
    if !enabled() || gate.shape() != up.shape() || gate.dtype() != up.dtype() {
        return None;
    }
    let kernel = SiluMul {
        kind: kind(gate)?,
        len: elements(gate),
    };
    let output = Output {
        shape: gate.shape(),
        dtype: gate.dtype(),
    };
    Some(node(kernel, &[gate, up], 0, &[output]).and_then(one))
}

// ---- rotary embedding

struct Rope {
    kind: Kind,
    shape: [usize; 4],
    dims: usize,
    base: f32,
    given: bool,
    scale: f32,
}

/// `[B, heads, T, D]` that a kernel reads by strides.
struct Heads<'a, T> {
    data: &'a [T],
    strides: [usize; 3],
}

/// # Safety
/// The input is `[B, heads, T, D]` of `T`, flagged as strided.
unsafe fn heads<'a, T>(buffers: &'a Buffers<'_>, index: usize, shape: [usize; 4]) -> Heads<'a, T> {
    let [b, h, t, d] = shape;
    // SAFETY: four axes.
    let strides = match unsafe { buffers.strides::<4>(index) } {
        Some([rows, heads, columns, _]) => [rows as usize, heads as usize, columns as usize],
        None => [h * t * d, t * d, d],
    };
    let last = |n: usize, stride: usize| n.saturating_sub(1) * stride;
    let len = match b * h * t * d {
        0 => 0,
        _ => last(b, strides[0]) + last(h, strides[1]) + last(t, strides[2]) + d,
    };
    Heads {
        // SAFETY: from the first element to the last one of the array; MLX's strides are not
        // negative here, as none of the table's ops makes such views.
        data: unsafe { buffers.input(index, len) },
        strides,
    }
}

impl Kernel for Rope {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let [batch, heads_count, width, dim] = self.shape;
        let pairs = self.dims / 2;
        by_kind!(self.kind, T => {
            // SAFETY: `rope` checked dtypes and shapes: x, offsets [B], divisors [dims / 2] if given.
            unsafe {
                let x = heads::<T>(buffers, 0, self.shape);
                let offsets = buffers.input::<i32>(1, batch);
                let computed: Vec<f32>;
                let divisors = if self.given {
                    buffers.input::<f32>(2, pairs)
                } else {
                    let power = |j: usize| self.base.powf((2 * j) as f32 / self.dims as f32);
                    computed = (0..pairs).map(power).collect();
                    &computed
                };
                let shape = HeadShape {
                    batch,
                    heads: heads_count,
                    width,
                    dim,
                    strides: x.strides,
                };
                let rotation = Rotation {
                    divisors,
                    scale: self.scale,
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                rows::rope(x.data, shape, rotation, offsets, out);
            }
        });
    }
}

fn shape4(array: &Array) -> Option<[usize; 4]> {
    let shape: [i32; 4] = array.shape().try_into().ok()?;
    Some(shape.map(|n| n as usize))
}

pub(super) fn rope(
    x: &Array,
    dims: i32,
    base: f32,
    freqs: Option<&Array>,
    scale: f32,
    offsets: &Array,
) -> Option<OpResult<Array>> {
    let shape = shape4(x)?;
    let dims = usize::try_from(dims).ok()?;
    let given = |f: &Array| f.dtype() == Dtype::Float32 && f.shape() == [dims as i32 / 2];
    let fits = enabled()
        && dims.is_multiple_of(2)
        && dims <= shape[3]
        && offsets.dtype() == Dtype::Int32
        && freqs.is_none_or(given);
    if !fits {
        return None;
    }
    let kernel = Rope {
        kind: kind(x)?,
        shape,
        dims,
        base,
        given: freqs.is_some(),
        scale,
    };
    let inputs: Vec<&Array> = [x, offsets].into_iter().chain(freqs).collect();
    let output = Output {
        shape: x.shape(),
        dtype: x.dtype(),
    };
    Some(node(kernel, &inputs, 1, &[output]).and_then(one))
}

// ---- attention

/// The mask of a call.
#[derive(Clone, Copy)]
pub(super) enum MaskKind {
    All,
    Causal,
    Given,
}

struct Attend {
    kind: Kind,
    q: [usize; 4],
    kv: [usize; 4],
    scale: f32,
    mask: MaskKind,
}

impl Kernel for Attend {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let ([batch, heads_count, width, dim], [_, kv_heads, span, _]) = (self.q, self.kv);
        by_kind!(self.kind, T => {
            // SAFETY: `attention` checked dtypes and shapes; the mask is [B, 1, T, S] bool.
            unsafe {
                let q = heads::<T>(buffers, 0, self.q);
                let (k, v) = (heads::<T>(buffers, 1, self.kv), heads::<T>(buffers, 2, self.kv));
                let visible = match self.mask {
                    MaskKind::All => Visible::All,
                    MaskKind::Causal => Visible::Causal,
                    MaskKind::Given => Visible::Mask(buffers.input(3, batch * width * span)),
                };
                let attention = Attention {
                    batch,
                    heads: heads_count,
                    kv_heads,
                    width,
                    span,
                    dim,
                    scale: self.scale,
                    strides: [q.strides, k.strides, v.strides],
                };
                let out = buffers.output(0, batch * heads_count * width * dim);
                attention.run(q.data, k.data, v.data, visible, out);
            }
        });
    }
}

pub(super) fn attention(
    q: &Array,
    k: &Array,
    v: &Array,
    scale: f32,
    kind_of_mask: MaskKind,
    mask: Option<&Array>,
) -> Option<OpResult<Array>> {
    let (sq, sk) = (shape4(q)?, shape4(k)?);
    let dtype = q.dtype();
    let given = |m: &Array| {
        m.dtype() == Dtype::Bool && m.shape() == [sq[0] as i32, 1, sq[2] as i32, sk[2] as i32]
    };
    let fits = enabled()
        && k.shape() == v.shape()
        && k.dtype() == dtype
        && v.dtype() == dtype
        && sk[0] == sq[0]
        && sk[3] == sq[3]
        && sk[1] > 0
        && sq[1].is_multiple_of(sk[1])
        && mask.is_none_or(given);
    if !fits {
        return None;
    }
    let kernel = Attend {
        kind: kind(q)?,
        q: sq,
        kv: sk,
        scale,
        mask: kind_of_mask,
    };
    let inputs: Vec<&Array> = [q, k, v].into_iter().chain(mask).collect();
    let shape = [sq[0], sq[2], sq[1], sq[3]].map(|n| n as i32);
    let output = Output {
        shape: &shape,
        dtype,
    };
    let mixed = node(kernel, &inputs, 0b111, &[output]).and_then(one);
    // The kernel writes columns first, as the projection after it reads them.
    Some(mixed.and_then(|mixed| {
        mixed
            .transpose_axes(&[0, 2, 1, 3])
            .map_err(|e| e.what().to_owned())
    }))
}

// ---- gated delta rule

struct Delta {
    rule: GatedDelta,
    kind: Kind,
}

impl Kernel for Delta {
    unsafe fn run(&self, buffers: &Buffers<'_>) {
        let rule = &self.rule;
        let (columns, states) = (
            rule.batch * rule.width,
            if rule.every_state { rule.width } else { 1 },
        );
        by_kind!(self.kind, T => {
            // SAFETY: `gated_delta` checked dtypes and shapes.
            unsafe {
                let wide = |index: usize, len: usize| -> Vec<f32> {
                    let x: &[T] = buffers.input(index, len);
                    x.iter().map(|x| x.wide()).collect()
                };
                let keys = columns * rule.key_heads * rule.key_dim;
                let values = columns * rule.value_heads * rule.value_dim;
                let gates = columns * rule.value_heads;
                let state = rule.batch * rule.value_heads * rule.value_dim * rule.key_dim;
                let mut y = vec![0.0; values];
                let mut after: Vec<&mut [f32]> =
                    (0..states).map(|i| buffers.output(1 + i, state)).collect();
                rule.run(
                    [&wide(0, keys), &wide(1, keys), &wide(2, values)],
                    buffers.input(3, gates),
                    &wide(4, gates),
                    buffers.input(5, state),
                    &mut y,
                    &mut after,
                );
                let out: &mut [T] = buffers.output(0, values);
                for (out, y) in out.iter_mut().zip(y) {
                    *out = Float::narrow(y);
                }
            }
        });
    }
}

/// `q`, `k`, `v`, `decay`, `beta`, `state`, whose shapes the caller has checked against `rule`.
pub(super) fn gated_delta(rule: GatedDelta, inputs: [&Array; 6]) -> Option<OpResult<Vec<Array>>> {
    let [q, k, v, decay, beta, state] = inputs;
    let dtype = v.dtype();
    let fits = enabled()
        && [q, k, beta].iter().all(|x| x.dtype() == dtype)
        && [decay, state].iter().all(|x| x.dtype() == Dtype::Float32);
    if !fits {
        return None;
    }
    let kernel = Delta {
        rule,
        kind: kind(v)?,
    };
    let states = if rule.every_state { rule.width } else { 1 };
    let mut outputs = vec![Output {
        shape: v.shape(),
        dtype,
    }];
    outputs.extend((0..states).map(|_| Output {
        shape: state.shape(),
        dtype: Dtype::Float32,
    }));
    Some(node(kernel, &inputs, 0, &outputs))
}
