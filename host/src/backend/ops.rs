//! Slots that create, read, restructure and combine tensors.

use abi_stable::std_types::{RSlice, RSliceMut};
use mlx_rs::{Array, ops as mlx};
use plugin_api::abi::{BinaryOp, DType, MAX_RANK, RawTensor, ReduceOp, TensorInfo, UnaryOp};

use super::handle::{Explain, Handle, OpResult, from_mlx, from_raw, lent, op, run, to_mlx};
use super::native;

/// The most elements a tensor may have: far beyond memory, far below overflow.
const MAX_ELEMENTS: usize = 1 << 40;

// ---- handles

pub(super) extern "C" fn clone_tensor(x: RawTensor) -> RawTensor {
    op(|| Ok(Array::clone(&*lent(x)?)))
}

pub(super) extern "C" fn drop_tensor(x: RawTensor) {
    if !x.is_null() {
        // SAFETY: the caller owns the handle and gives it up.
        drop(unsafe { from_raw(x) });
    }
}

pub(super) extern "C" fn tensor_info(x: RawTensor, info: &mut TensorInfo) -> bool {
    run(|| {
        let x = lent(x)?;
        let shape = x.shape();
        if shape.len() > MAX_RANK {
            return Err(format!("a tensor of {} axes", shape.len()));
        }
        info.dtype = from_mlx(x.dtype()).ok_or("a tensor of a dtype that has no code")?;
        info.rank = shape.len() as u32;
        info.shape[..shape.len()].copy_from_slice(shape);
        Ok(())
    })
    .is_some()
}

// ---- creation

/// The number of elements of a shape.
fn elements(shape: &[i32]) -> OpResult<usize> {
    let count = shape.iter().try_fold(1usize, |count, &n| {
        count
            .checked_mul(usize::try_from(n).ok()?)
            .filter(|&count| count <= MAX_ELEMENTS)
    });
    match count {
        Some(count) if shape.len() <= MAX_RANK => Ok(count),
        _ => Err(format!("no tensor has the shape {shape:?}")),
    }
}

/// An array with a copy of row-major bytes.
pub(super) fn array_from_bytes(data: &[u8], shape: &[i32], dtype: DType) -> OpResult<Array> {
    let kind = to_mlx(dtype)?;
    let size = dtype.size().ok_or("a dtype without a size")?;
    let count = elements(shape)?;
    if count * size != data.len() {
        return Err(format!(
            "{} bytes for {dtype:?}{shape:?}, which takes {}",
            data.len(),
            count * size
        ));
    }
    if count == 0 {
        // MLX copies from the pointer; there is nothing to copy.
        return Array::from_f32(0.0)
            .as_dtype(kind)
            .and_then(|zero| mlx::broadcast_to(&zero, shape))
            .explain();
    }
    // SAFETY: the buffer has as many bytes as the shape takes, and MLX copies them at once. It reads
    // them element by element, which allows any alignment on the supported processors only when
    // the pointer is aligned: so an unaligned one goes through an aligned copy.
    unsafe {
        if data.as_ptr().align_offset(size) == 0 {
            Ok(Array::from_raw_data(data.as_ptr().cast(), shape, kind))
        } else {
            let mut aligned = vec![0u64; data.len().div_ceil(8)];
            std::ptr::copy_nonoverlapping(
                data.as_ptr(),
                aligned.as_mut_ptr().cast::<u8>(),
                data.len(),
            );
            Ok(Array::from_raw_data(aligned.as_ptr().cast(), shape, kind))
        }
    }
}

pub(super) extern "C" fn from_bytes(
    data: RSlice<'_, u8>,
    shape: RSlice<'_, i32>,
    dtype: DType,
) -> RawTensor {
    op(|| array_from_bytes(data.as_slice(), shape.as_slice(), dtype))
}

/// One value as a scalar array.
pub(super) fn scalar(value: f32, dtype: mlx_rs::Dtype) -> OpResult<Array> {
    let scalar = Array::from_f32(value);
    if dtype == mlx_rs::Dtype::Float32 {
        return Ok(scalar);
    }
    scalar.as_dtype(dtype).explain()
}

pub(super) extern "C" fn full(shape: RSlice<'_, i32>, value: f32, dtype: DType) -> RawTensor {
    op(|| {
        let shape = shape.as_slice();
        elements(shape)?;
        let kind = to_mlx(dtype)?;
        // Memory of its own, which whoever writes to it may take over.
        let stream = mlx_rs::Stream::thread_local_or_default();
        let scalar = scalar(value, kind)?;
        // SAFETY: live handles and as many numbers as are said.
        raw_call(|out| unsafe {
            let (len, value) = (shape.len(), scalar.as_ptr());
            let dtype = kind as mlx_sys::mlx_dtype;
            mlx_sys::mlx_full(out, shape.as_ptr(), len, value, dtype, stream.as_ptr())
        })
    })
}

pub(super) extern "C" fn arange(start: i32, stop: i32) -> RawTensor {
    op(|| mlx::arange::<_, i32>(start, stop, 1).explain())
}

// ---- evaluation

pub(super) extern "C" fn eval(tensors: RSlice<'_, RawTensor>, wait: bool) -> bool {
    run(|| {
        let lent = tensors
            .iter()
            .map(|&t| lent(t))
            .collect::<OpResult<Vec<_>>>()?;
        let arrays = lent.iter().map(|t| t.array());
        if wait {
            mlx_rs::transforms::eval(arrays).explain()
        } else {
            mlx_rs::transforms::async_eval(arrays).explain()
        }
    })
    .is_some()
}

pub(super) extern "C" fn read(x: RawTensor, dtype: DType, mut out: RSliceMut<'_, u8>) -> bool {
    run(|| {
        let x = lent(x)?;
        let size = dtype.size().ok_or("a dtype without a size")?;
        let out = out.as_mut_slice();
        if out.len() != x.size() * size {
            return Err(format!(
                "a buffer of {} bytes for {} elements of {dtype:?}",
                out.len(),
                x.size()
            ));
        }
        if out.is_empty() {
            return Ok(());
        }
        let x = x.as_dtype(to_mlx(dtype)?).explain()?;
        let x = x.contiguous().explain()?;
        x.eval().explain()?;
        // SAFETY: the array is evaluated, row-contiguous and has `out.len()` bytes; any of its
        // bytes may be read as u8. The borrow ends before the array is dropped.
        unsafe {
            let data = mlx_sys::mlx_array_data_uint8(x.as_ptr());
            if data.is_null() {
                return Err("MLX holds no data for an evaluated array".to_owned());
            }
            std::ptr::copy_nonoverlapping(data, out.as_mut_ptr(), out.len());
        }
        Ok(())
    })
    .is_some()
}

// ---- structure

pub(super) extern "C" fn astype(x: RawTensor, dtype: DType) -> RawTensor {
    op(|| {
        let (x, dtype) = (lent(x)?, to_mlx(dtype)?);
        native::astype(&x, dtype).unwrap_or_else(|| x.as_dtype(dtype).explain().map(Handle::from))
    })
}

pub(super) extern "C" fn reshape(x: RawTensor, shape: RSlice<'_, i32>) -> RawTensor {
    op(|| lent(x)?.reshape(shape.as_slice()).explain())
}

pub(super) extern "C" fn transpose(x: RawTensor, axes: RSlice<'_, i32>) -> RawTensor {
    op(|| lent(x)?.transpose_axes(axes.as_slice()).explain())
}

pub(super) extern "C" fn broadcast_to(x: RawTensor, shape: RSlice<'_, i32>) -> RawTensor {
    op(|| {
        elements(shape.as_slice())?;
        mlx::broadcast_to(&*lent(x)?, shape.as_slice()).explain()
    })
}

pub(super) extern "C" fn concat(tensors: RSlice<'_, RawTensor>, axis: i32) -> RawTensor {
    op(|| {
        let lent = tensors
            .iter()
            .map(|&t| lent(t))
            .collect::<OpResult<Vec<_>>>()?;
        native::concat(&lent, axis)
            .unwrap_or_else(|| mlx::concatenate(&lent, axis).explain().map(Handle::from))
    })
}

/// Checks that `starts..stops` is a box inside `shape`.
fn check_box(shape: &[i32], starts: &[i32], stops: &[i32]) -> OpResult<()> {
    let fits = starts.len() == shape.len()
        && stops.len() == shape.len()
        && shape
            .iter()
            .zip(starts.iter().zip(stops))
            .all(|(&n, (&start, &stop))| 0 <= start && start <= stop && stop <= n);
    if fits {
        Ok(())
    } else {
        Err(format!("{starts:?}..{stops:?} is no box inside {shape:?}"))
    }
}

/// The result of a call into mlx-c that mlx-rs has no name for. Its arguments were checked, so a
/// failure is a bug and needs no better text.
pub(super) fn raw_call(call: impl FnOnce(*mut mlx_sys::mlx_array) -> i32) -> OpResult<Array> {
    // SAFETY: an empty array handle, which the call fills; owned by the `Array` either way.
    unsafe {
        let mut out = mlx_sys::mlx_array_new();
        let status = call(&mut out);
        let out = Array::from_ptr(out);
        if status == 0 {
            Ok(out)
        } else {
            Err("MLX refused the call".to_owned())
        }
    }
}

pub(super) fn slice_array(x: &Array, starts: &[i32], stops: &[i32]) -> OpResult<Array> {
    check_box(x.shape(), starts, stops)?;
    let (strides, n) = ([1; MAX_RANK], starts.len());
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: live handles, and three arrays of `n` numbers each.
    raw_call(|out| unsafe {
        mlx_sys::mlx_slice(
            out,
            x.as_ptr(),
            starts.as_ptr(),
            n,
            stops.as_ptr(),
            n,
            strides.as_ptr(),
            n,
            stream.as_ptr(),
        )
    })
}

pub(super) extern "C" fn slice(
    x: RawTensor,
    starts: RSlice<'_, i32>,
    stops: RSlice<'_, i32>,
) -> RawTensor {
    op(|| {
        let (x, starts, stops) = (lent(x)?, starts.as_slice(), stops.as_slice());
        check_box(x.shape(), starts, stops)?;
        native::slice(&x, starts, stops)
            .unwrap_or_else(|| slice_array(&x, starts, stops).map(Handle::from))
    })
}

/// A copy of `x` with the box at `starts` replaced.
pub(super) fn slice_update_array(x: &Array, update: &Array, starts: &[i32]) -> OpResult<Array> {
    if starts.len() != update.ndim() || x.dtype() != update.dtype() {
        return Err(format!(
            "{:?}{:?} does not fit into {:?}{:?} at {starts:?}",
            update.dtype(),
            update.shape(),
            x.dtype(),
            x.shape()
        ));
    }
    let lengths = update.shape().iter();
    let stops: Vec<i32> = starts
        .iter()
        .zip(lengths)
        .map(|(start, n)| start.saturating_add(*n))
        .collect();
    check_box(x.shape(), starts, &stops)?;
    let (strides, n) = ([1; MAX_RANK], starts.len());
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: live handles, and three arrays of `n` numbers each.
    raw_call(|out| unsafe {
        mlx_sys::mlx_slice_update(
            out,
            x.as_ptr(),
            update.as_ptr(),
            starts.as_ptr(),
            n,
            stops.as_ptr(),
            n,
            strides.as_ptr(),
            n,
            stream.as_ptr(),
        )
    })
}

pub(super) extern "C" fn slice_update(
    x: RawTensor,
    update: RawTensor,
    starts: RSlice<'_, i32>,
) -> RawTensor {
    op(|| slice_update_array(&*lent(x)?, &*lent(update)?, starts.as_slice()))
}

/// Indices forced into an axis: MLX reads wherever they point.
pub(super) fn clamped(x: &Array, indices: &Array, axis: i32) -> OpResult<Array> {
    let rank = x.ndim() as i32;
    let at = if axis < 0 { axis + rank } else { axis };
    if !(0..rank).contains(&at) {
        return Err(format!("there is no axis {axis} in {:?}", x.shape()));
    }
    let length = x.shape()[at as usize];
    if length == 0 && indices.size() > 0 {
        return Err("nothing can be taken from an empty axis".to_owned());
    }
    let bounds = (Array::from_int(0), Array::from_int((length - 1).max(0)));
    let indices = indices.as_dtype(mlx_rs::Dtype::Int32).explain()?;
    let indices = mlx::maximum(&indices, &bounds.0).explain()?;
    mlx::minimum(&indices, &bounds.1).explain()
}

pub(super) extern "C" fn take(x: RawTensor, indices: RawTensor, axis: i32) -> RawTensor {
    op(|| {
        let (x, indices) = (lent(x)?, lent(indices)?);
        if axis == 0
            && let Some(taken) = native::take(&x, &indices)
        {
            return taken;
        }
        let indices = clamped(&x, &indices, axis)?;
        x.take_axis(&indices, axis).explain().map(Handle::from)
    })
}

pub(super) extern "C" fn take_along_axis(x: RawTensor, indices: RawTensor, axis: i32) -> RawTensor {
    op(|| {
        let x = lent(x)?;
        let indices = clamped(&x, &*lent(indices)?, axis)?;
        x.take_along_axis(&indices, axis).explain()
    })
}

// ---- element-wise

pub(super) extern "C" fn unary(code: UnaryOp, x: RawTensor) -> RawTensor {
    op(|| {
        let x = &*lent(x)?;
        match code {
            UnaryOp::NEG => x.negative(),
            UnaryOp::EXP => x.exp(),
            UnaryOp::LOG => x.log(),
            UnaryOp::SQUARE => x.square(),
            UnaryOp::SQRT => x.sqrt(),
            UnaryOp::RSQRT => x.rsqrt(),
            UnaryOp::SIGMOID => mlx::sigmoid(x),
            UnaryOp::TANH => mlx::tanh(x),
            UnaryOp::SILU => mlx::sigmoid(x).and_then(|s| x.multiply(&s)),
            UnaryOp::GELU_TANH => return gelu_tanh(x),
            // ln(1 + e^x) = logaddexp(x, 0), which does not overflow.
            UnaryOp::SOFTPLUS => mlx::logaddexp(x, &scalar(0.0, x.dtype())?),
            UnaryOp::NOT => x.logical_not(),
            other => return Err(format!("op {other:?} is not known to this host")),
        }
        .explain()
    })
}

/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel, 2016).
pub(super) fn gelu_tanh(x: &Array) -> OpResult<Array> {
    let number = |value| scalar(value, x.dtype());
    let cube = x.square().and_then(|s| s.multiply(x)).explain()?;
    let inner = cube.multiply(&number(0.044_715)?).explain()?;
    let inner = inner.add(x).explain()?;
    let inner = inner.multiply(&number(0.797_884_6)?).explain()?;
    let gate = mlx::tanh(&inner).explain()?;
    let gate = gate.add(&number(1.0)?).explain()?;
    let half = x.multiply(&number(0.5)?).explain()?;
    half.multiply(&gate).explain()
}

pub(super) extern "C" fn binary(code: BinaryOp, a: RawTensor, b: RawTensor) -> RawTensor {
    op(|| {
        let (a, b) = (&*lent(a)?, &*lent(b)?);
        match code {
            BinaryOp::ADD => a.add(b),
            BinaryOp::SUB => a.subtract(b),
            BinaryOp::MUL => a.multiply(b),
            BinaryOp::DIV => a.divide(b),
            BinaryOp::MAX => mlx::maximum(a, b),
            BinaryOp::MIN => mlx::minimum(a, b),
            BinaryOp::LESS => a.lt(b),
            BinaryOp::LESS_EQUAL => a.le(b),
            BinaryOp::EQUAL => a.eq(b),
            BinaryOp::AND => a.logical_and(b),
            BinaryOp::OR => a.logical_or(b),
            other => return Err(format!("op {other:?} is not known to this host")),
        }
        .explain()
    })
}

pub(super) extern "C" fn select(condition: RawTensor, a: RawTensor, b: RawTensor) -> RawTensor {
    op(|| mlx::select(&*lent(condition)?, &*lent(a)?, &*lent(b)?).explain())
}

// ---- along an axis

pub(super) extern "C" fn reduce(code: ReduceOp, x: RawTensor, axis: i32, keep: bool) -> RawTensor {
    op(|| {
        let x = &*lent(x)?;
        match code {
            ReduceOp::SUM => x.sum_axis(axis, keep),
            ReduceOp::MEAN => x.mean_axis(axis, keep),
            ReduceOp::MAX => x.max_axis(axis, keep),
            ReduceOp::MIN => x.min_axis(axis, keep),
            ReduceOp::ARGMAX => {
                if let Some(found) = native::argmax(x, axis, keep) {
                    return found;
                }
                mlx::indexing::argmax_axis(x, axis, keep)
                    .and_then(|indices| indices.as_dtype(mlx_rs::Dtype::Int32))
            }
            other => return Err(format!("op {other:?} is not known to this host")),
        }
        .explain()
        .map(Handle::from)
    })
}

pub(super) extern "C" fn sort(x: RawTensor, axis: i32) -> RawTensor {
    op(|| mlx::sort_axis(&*lent(x)?, axis).explain())
}

pub(super) extern "C" fn cumsum(x: RawTensor, axis: i32) -> RawTensor {
    op(|| lent(x)?.cumsum(axis, false, true).explain())
}

pub(super) extern "C" fn softmax(x: RawTensor, axis: i32) -> RawTensor {
    op(|| mlx::softmax_axis(&*lent(x)?, axis, true).explain())
}
