//! Handles: how an MLX array crosses the op table, and what happens when an op fails.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use abi_stable::std_types::{RString, RVec};
use mlx_rs::{Array, Dtype};
use plugin_api::abi::{DType, RawTensor};
use plugin_api::guard;

thread_local! {
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A result inside the backend; the message goes to `take_error`.
pub(super) type OpResult<T> = Result<T, String>;

/// Hands an array over as a handle, which now owns it.
pub(super) fn into_raw(array: Array) -> RawTensor {
    RawTensor(ManuallyDrop::new(array).as_ptr().ctx)
}

/// Takes an array back from a handle.
///
/// # Safety
/// `raw` must come from [`into_raw`] and be given up by its owner.
pub(super) unsafe fn from_raw(raw: RawTensor) -> Array {
    // SAFETY: the handle is the context of an array that `into_raw` forgot.
    unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx: raw.0 }) }
}

/// An array as lent by a handle.
pub(super) struct Lent(ManuallyDrop<Array>);

impl std::ops::Deref for Lent {
    type Target = Array;

    fn deref(&self) -> &Array {
        &self.0
    }
}

impl AsRef<Array> for Lent {
    fn as_ref(&self) -> &Array {
        &self.0
    }
}

/// The array behind a handle that a caller lends.
pub(super) fn lent(raw: RawTensor) -> OpResult<Lent> {
    if raw.is_null() {
        return Err("an argument is absent".to_owned());
    }
    // SAFETY: the ABI says that tensor arguments are live handles for the time of the call; the
    // array is not dropped through this one.
    Ok(Lent(ManuallyDrop::new(unsafe { from_raw(raw) })))
}

/// The array behind a handle that may be null.
pub(super) fn lent_opt(raw: RawTensor) -> OpResult<Option<Lent>> {
    if raw.is_null() {
        Ok(None)
    } else {
        lent(raw).map(Some)
    }
}

/// Runs the body of a slot. An error or a panic is kept for `take_error` and gives `None`.
pub(super) fn run<T>(body: impl FnOnce() -> OpResult<T>) -> Option<T> {
    let outcome = guard::catch(body).unwrap_or_else(|panic| Err(format!("panicked: {panic}")));
    match outcome {
        Ok(value) => Some(value),
        Err(message) => {
            LAST_ERROR.with_borrow_mut(|last| *last = Some(message));
            None
        }
    }
}

/// Null, with a message for `take_error`.
pub fn fail_with(message: &str) -> RawTensor {
    LAST_ERROR.with_borrow_mut(|last| *last = Some(message.to_owned()));
    RawTensor::NULL
}

/// [`run`] for a slot that returns a tensor.
pub(super) fn op(body: impl FnOnce() -> OpResult<Array>) -> RawTensor {
    run(body).map_or(RawTensor::NULL, into_raw)
}

/// [`run`] for a slot that returns several tensors, or none when it fails.
pub(super) fn ops(body: impl FnOnce() -> OpResult<Vec<Array>>) -> RVec<RawTensor> {
    let arrays = run(body).unwrap_or_default();
    arrays.into_iter().map(into_raw).collect()
}

/// The slot of that name.
pub(super) extern "C" fn take_error() -> RString {
    LAST_ERROR
        .with_borrow_mut(Option::take)
        .unwrap_or_default()
        .into()
}

/// The message of an MLX exception, without the place in the binding that raised it.
pub(super) trait Explain<T> {
    fn explain(self) -> OpResult<T>;
}

impl<T> Explain<T> for Result<T, mlx_rs::error::Exception> {
    fn explain(self) -> OpResult<T> {
        self.map_err(|e| e.what().to_owned())
    }
}

pub(super) fn to_mlx(dtype: DType) -> OpResult<Dtype> {
    Ok(match dtype {
        DType::F32 => Dtype::Float32,
        DType::F16 => Dtype::Float16,
        DType::BF16 => Dtype::Bfloat16,
        DType::U8 => Dtype::Uint8,
        DType::U32 => Dtype::Uint32,
        DType::I32 => Dtype::Int32,
        DType::BOOL => Dtype::Bool,
        DType::I64 => Dtype::Int64,
        other => return Err(format!("dtype {other:?} is not known to this host")),
    })
}

pub(super) fn from_mlx(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::Float32 => DType::F32,
        Dtype::Float16 => DType::F16,
        Dtype::Bfloat16 => DType::BF16,
        Dtype::Uint8 => DType::U8,
        Dtype::Uint32 => DType::U32,
        Dtype::Int32 => DType::I32,
        Dtype::Bool => DType::BOOL,
        Dtype::Int64 => DType::I64,
        _ => return None,
    })
}
