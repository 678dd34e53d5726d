//! The host's own CPU kernels between MLX's arrays: the Rust side of `prepare.cpp`.
//!
//! A kernel runs at once, on the calling thread and the pool. A node of MLX's graph would cost more than
//! many of these kernels do: memory for the node, a walk over the graph, and a hand-over to another
//! thread, which then shares two cores with this one.

use std::ffi::{CStr, c_char, c_int, c_void};

use mlx_rs::{Array, Dtype};
use plugin_api::abi::DType;

use crate::backend::handle::{self, Handle, OpResult, to_mlx};

/// Bytes for the text of an MLX exception.
const ERROR_ROOM: usize = 512;

/// Bytes of weights that share an allocation: some large pages, and little beside a model.
const BLOCK: usize = 32 << 20;

/// The buffers of a kernel.
pub(super) struct Buffers {
    inputs: Vec<RawInput>,
    outputs: Vec<RawOutput>,
}

impl Buffers {
    /// The first `len` elements of an input.
    ///
    /// # Safety
    /// The input has elements of type `T`, at least `len` of them from its first one on.
    pub unsafe fn input<T>(&self, index: usize, len: usize) -> &[T] {
        if len == 0 {
            return &[];
        }
        // SAFETY: the caller's promise; MLX aligns buffers, and whoever lent the arrays keeps them.
        unsafe { std::slice::from_raw_parts(self.inputs[index].data.cast(), len) }
    }

    /// The strides of an input in elements; none when it is row-contiguous.
    ///
    /// # Safety
    /// The input has `N` axes.
    pub unsafe fn strides<const N: usize>(&self, index: usize) -> Option<[i64; N]> {
        let strides = self.inputs[index].strides;
        // SAFETY: not null, hence one entry per axis.
        (!strides.is_null()).then(|| unsafe { *strides.cast::<[i64; N]>() })
    }

    /// The first `len` elements of an output.
    ///
    /// # Safety
    /// The output has `len` elements of type `T`, and no other slice of it is alive.
    #[allow(clippy::mut_from_ref)] // the buffers are disjoint, and the caller takes each once
    pub unsafe fn output<T>(&self, index: usize, len: usize) -> &mut [T] {
        if len == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise; as above.
        unsafe { std::slice::from_raw_parts_mut(self.outputs[index].data.cast(), len) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        let copies = self.inputs.iter().map(|input| input.packed);
        let made = self.outputs.iter().map(|output| output.handle);
        copies.chain(made).for_each(|handle| drop(own(handle)));
    }
}

/// What a kernel makes.
pub(super) struct Output<'a> {
    pub shape: &'a [i32],
    pub dtype: Dtype,
    /// The input whose content it starts with: in the same buffer if the lender's handle is the only
    /// one that holds it. The lender then has to use the output from there on.
    pub from: Option<usize>,
}

#[repr(C)]
struct RawOutput {
    shape: *const c_int,
    rank: usize,
    dtype: c_int,
    from: c_int,
    handle: *mut c_void,
    data: *mut c_void,
}

#[repr(C)]
struct RawInput {
    handle: *mut c_void,
    strided: bool,
    data: *const c_void,
    strides: *const i64,
    packed: *mut c_void,
}

unsafe extern "C" {
    fn mlxhost_prepare(
        inputs: *mut RawInput,
        input_count: usize,
        outputs: *mut RawOutput,
        output_count: usize,
        error: *mut c_char,
        error_room: usize,
    ) -> c_int;

    fn mlxhost_staying(
        shape: *const c_int,
        rank: usize,
        dtype: c_int,
        handle: *mut *mut c_void,
        data: *mut *mut c_void,
        error: *mut c_char,
        error_room: usize,
    ) -> c_int;
    fn mlxhost_settle(
        handles: *const *mut c_void,
        count: usize,
        block_bytes: usize,
        error: *mut c_char,
        error_room: usize,
    ) -> c_int;
}

/// A new array that stays for long, whose bytes `fill` writes, all of them.
pub(in crate::backend) fn filled(
    shape: &[i32],
    dtype: DType,
    fill: impl FnOnce(&mut [u8]),
) -> OpResult<Array> {
    let size = dtype.size().ok_or("a dtype without a size")?;
    let dtype = to_mlx(dtype)? as c_int;
    let (mut handle, mut data) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a shape of the stated length, and a dtype of MLX.
    let made = explained(|error| unsafe {
        mlxhost_staying(
            shape.as_ptr(),
            shape.len(),
            dtype,
            &mut handle,
            &mut data,
            error,
            ERROR_ROOM,
        )
    });
    let array = own(handle);
    made?;
    let bytes = shape.iter().map(|&n| n as usize).product::<usize>() * size;
    if bytes > 0 {
        // SAFETY: a new array of that size, of numbers, which are their bytes.
        fill(unsafe { std::slice::from_raw_parts_mut(data.cast(), bytes) });
    }
    array.ok_or_else(|| "no array was made".into())
}

/// Moves computed arrays side by side into large pages, each at the start of a cache line.
///
/// Weights are read from one end to the other in every pass: with small pages, a good part of that time
/// goes to finding out where they are.
pub(in crate::backend) fn settle(arrays: &[&Array]) -> OpResult<()> {
    let handles: Vec<_> = arrays.iter().map(|array| array.as_ptr().ctx).collect();
    // SAFETY: live arrays that nobody computes with meanwhile: they belong to this thread.
    let settled = explained(|error| unsafe {
        mlxhost_settle(handles.as_ptr(), handles.len(), BLOCK, error, ERROR_ROOM)
    });
    handle::moved();
    settled
}

/// The outcome of a call that leaves 0, or 1 and a text.
fn explained(call: impl FnOnce(*mut c_char) -> c_int) -> OpResult<()> {
    // The last byte stays zero.
    let mut error = [0; ERROR_ROOM];
    if call(error.as_mut_ptr()) == 0 {
        return Ok(());
    }
    // SAFETY: ends with a zero.
    let why = unsafe { CStr::from_ptr(error.as_ptr()) };
    Err(why.to_string_lossy().into_owned())
}

/// The array behind a handle of the other side, if it made one.
fn own(handle: *mut c_void) -> Option<Array> {
    // SAFETY: a new array, handed over once.
    (!handle.is_null()).then(|| unsafe { Array::from_ptr(mlx_sys::mlx_array { ctx: handle }) })
}

/// Runs a kernel: computes what the inputs stand for, allocates the outputs, and has `body` fill them.
/// Inputs whose bit is set in `strided` may come strided, as long as their last axis is contiguous; the
/// others are packed first.
pub(super) fn compute(
    inputs: &[&Handle],
    strided: u64,
    outputs: &[Output<'_>],
    body: impl FnOnce(&Buffers),
) -> OpResult<Vec<Handle>> {
    let raw_input = |(index, array): (usize, &&Handle)| RawInput {
        handle: array.as_ptr().ctx,
        strided: strided >> index & 1 != 0,
        data: array.data(),
        strides: std::ptr::null(),
        packed: std::ptr::null_mut(),
    };
    let raw_output = |output: &Output<'_>| RawOutput {
        shape: output.shape.as_ptr(),
        rank: output.shape.len(),
        dtype: output.dtype as c_int,
        from: output.from.map_or(-1, |index| index as c_int),
        handle: std::ptr::null_mut(),
        data: std::ptr::null_mut(),
    };
    let mut buffers = Buffers {
        inputs: inputs.iter().enumerate().map(raw_input).collect(),
        outputs: outputs.iter().map(raw_output).collect(),
    };
    // SAFETY: live arrays, and lists of the stated lengths.
    explained(|error| unsafe {
        mlxhost_prepare(
            buffers.inputs.as_mut_ptr(),
            buffers.inputs.len(),
            buffers.outputs.as_mut_ptr(),
            buffers.outputs.len(),
            error,
            ERROR_ROOM,
        )
    })?;
    for (input, raw) in inputs.iter().zip(&buffers.inputs) {
        if raw.packed.is_null() && raw.strides.is_null() {
            input.found(raw.data);
        }
    }
    body(&buffers);
    let made = buffers.outputs.iter_mut().filter_map(|output| {
        let array = own(std::mem::replace(&mut output.handle, std::ptr::null_mut()))?;
        let handle = Handle::from(array);
        handle.found(output.data);
        Some(handle)
    });
    Ok(made.collect())
}
