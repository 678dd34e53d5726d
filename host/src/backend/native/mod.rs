//! The op table's blocks by the host's own kernels, where they take the arguments: on the CPU.
//!
//! Each function gives `None` when MLX's own kernels must do: another device, another dtype or shape.

mod attend;
mod blocks;
mod delta;
mod experts;
mod little;
mod prepare;
mod project;

use std::cell::Cell;
use std::sync::LazyLock;

use mlx_rs::Dtype;

use super::handle::{Handle, OpResult};
pub(super) use attend::attend;
pub(super) use blocks::{MaskKind, argmax, attention, rms_norm, rope};
pub(super) use delta::gated_delta;
pub(super) use experts::{experts, route};
pub(super) use little::{astype, concat, dequantize, slice, take};
use prepare::{Buffers, Output, compute};
pub(super) use prepare::{filled, settle};
pub(super) use project::project;

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

pub(super) fn enabled() -> bool {
    *ENABLED && !STOCK.get()
}

/// What the elements of an activation are.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    F32,
    Bf16,
    F16,
}

fn kind(array: &Handle) -> Option<Kind> {
    float_kind(array.dtype())
}

fn float_kind(dtype: Dtype) -> Option<Kind> {
    match dtype {
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
            $crate::backend::native::Kind::F32 => {
                type $t = f32;
                $body
            }
            $crate::backend::native::Kind::Bf16 => {
                type $t = half::bf16;
                $body
            }
            $crate::backend::native::Kind::F16 => {
                type $t = half::f16;
                $body
            }
        }
    };
}

use by_kind;

fn one(mut outputs: Vec<Handle>) -> OpResult<Handle> {
    outputs
        .pop()
        .ok_or_else(|| "a kernel without output".to_owned())
}

fn elements(array: &Handle) -> usize {
    array.size()
}

/// The divisors of a rotary embedding with a plain base.
fn divisors(base: f32, dims: usize) -> Vec<f32> {
    let power = |pair: usize| base.powf((2 * pair) as f32 / dims as f32);
    (0..dims / 2).map(power).collect()
}

/// The lengths of an array's axes, if it has `N`.
fn lengths<const N: usize>(array: &Handle) -> Option<[usize; N]> {
    let shape: [i32; N] = array.shape().try_into().ok()?;
    Some(shape.map(|n| n as usize))
}
