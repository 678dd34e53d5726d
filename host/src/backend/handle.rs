//! Handles: how an MLX array crosses the op table, and what happens when an op fails.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::{NonNull, null};
use std::sync::atomic::{AtomicU32, Ordering};

use abi_stable::std_types::{RString, RVec};
use mlx_rs::{Array, Dtype};
use plugin_api::abi::{DType, RawTensor};
use plugin_api::guard;

thread_local! {
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A result inside the backend; the message goes to `take_error`.
pub(super) type OpResult<T> = Result<T, String>;

/// Axes that a handle remembers the lengths of.
const AXES: usize = 4;

/// Counts what may have moved the data of arrays that nobody computed anew.
static MOVES: AtomicU32 = AtomicU32::new(0);

/// To be called when arrays were moved in memory.
pub(super) fn moved() {
    MOVES.fetch_add(1, Ordering::Release);
}

/// What a handle points to: an array, and what kernels ask of it, side by side. To ask MLX for shape, dtype
/// and data leads through four places in memory, which a pass over all weights finds cold each time.
#[repr(align(64))]
pub(super) struct Handle {
    array: Array,
    /// The first element, of an array that is computed and row-contiguous; null: to be asked for.
    data: Cell<*const c_void>,
    /// [`MOVES`] when `data` was set.
    moves: Cell<u32>,
    dtype: Dtype,
    /// More than [`AXES`]: `shape` does not hold it.
    rank: u32,
    shape: [i32; AXES],
}

impl Handle {
    /// The array's lengths.
    pub fn shape(&self) -> &[i32] {
        match self.shape.get(..self.rank as usize) {
            Some(shape) => shape,
            None => self.array.shape(),
        }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its elements.
    pub fn size(&self) -> usize {
        self.shape().iter().map(|&n| n as usize).product()
    }

    /// The first element if that is known: the array is computed and row-contiguous then. Else null.
    pub fn data(&self) -> *const c_void {
        let current = self.moves.get() == MOVES.load(Ordering::Acquire);
        if current { self.data.get() } else { null() }
    }

    /// Remembers where the first element of a computed, row-contiguous array is.
    pub fn found(&self, data: *const c_void) {
        self.moves.set(MOVES.load(Ordering::Acquire));
        self.data.set(data);
    }

    /// The array.
    pub fn array(&self) -> &Array {
        &self.array
    }
}

impl From<Array> for Handle {
    fn from(array: Array) -> Self {
        let lengths = array.shape();
        let (rank, mut shape) = (lengths.len(), [0; AXES]);
        if let Some(shape) = shape.get_mut(..rank) {
            shape.copy_from_slice(lengths);
        }
        Self {
            data: Cell::new(null()),
            moves: Cell::new(0),
            dtype: array.dtype(),
            rank: rank as u32,
            shape,
            array,
        }
    }
}

impl Deref for Handle {
    type Target = Array;

    fn deref(&self) -> &Array {
        &self.array
    }
}

impl AsRef<Array> for Handle {
    fn as_ref(&self) -> &Array {
        &self.array
    }
}

/// Hands an array over as a handle, which now owns it.
pub(super) fn into_raw(handle: impl Into<Handle>) -> RawTensor {
    RawTensor(Box::into_raw(Box::new(handle.into())).cast())
}

/// Takes an array back from a handle.
///
/// # Safety
/// `raw` must come from [`into_raw`] and be given up by its owner.
pub(super) unsafe fn from_raw(raw: RawTensor) -> Box<Handle> {
    // SAFETY: the box that `into_raw` made.
    unsafe { Box::from_raw(raw.0.cast()) }
}

/// What a caller lends for the time of a call.
#[derive(Clone, Copy)]
pub(super) struct Lent(NonNull<Handle>);

impl Deref for Lent {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        // SAFETY: `lent` says that it lives as long as the call.
        unsafe { self.0.as_ref() }
    }
}

impl AsRef<Array> for Lent {
    fn as_ref(&self) -> &Array {
        self.array()
    }
}

/// The array behind a handle that a caller lends.
pub(super) fn lent(raw: RawTensor) -> OpResult<Lent> {
    // The ABI says that tensor arguments are live handles for the time of the call.
    let handle = NonNull::new(raw.0.cast());
    handle
        .map(Lent)
        .ok_or_else(|| "an argument is absent".to_owned())
}

/// The array behind a handle that may be null.
pub(super) fn lent_opt(raw: RawTensor) -> OpResult<Option<Lent>> {
    Ok(NonNull::new(raw.0.cast()).map(Lent))
}

/// Arrays as handles.
pub(super) fn handles(arrays: Vec<Array>) -> Vec<Handle> {
    arrays.into_iter().map(Handle::from).collect()
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
pub(super) fn op<T: Into<Handle>>(body: impl FnOnce() -> OpResult<T>) -> RawTensor {
    run(body).map_or(RawTensor::NULL, into_raw)
}

/// [`run`] for a slot that returns several tensors, or none when it fails.
pub(super) fn ops(body: impl FnOnce() -> OpResult<Vec<Handle>>) -> RVec<RawTensor> {
    let handles = run(body).unwrap_or_default();
    handles.into_iter().map(into_raw).collect()
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
