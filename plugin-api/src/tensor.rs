//! The one tensor type, for the host's models and for plugins alike.

use std::fmt;

use abi_stable::std_types::{RSlice, RSliceMut};

use crate::abi::{
    AttentionMask, BinaryOp, DType, MAX_RANK, RawTensor, ReduceOp, TensorInfo, UnaryOp,
};
use crate::error::{Error, Result};
use crate::host::{api, check, op_error};

/// An n-dimensional array that the host owns. Cloning is cheap and shares the data; dropping
/// releases it. Ops build a lazy graph: shape errors show at once, the rest at [`Tensor::eval`] or
/// when it is read. Lives on the engine thread.
///
/// ```no_run
/// use plugin_api::{Result, Tensor};
///
/// fn sums() -> Result<Vec<f32>> {
///     let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     x.sum(-1)?.to_vec() // [3.0, 7.0]
/// }
/// ```
pub struct Tensor(RawTensor);

impl Clone for Tensor {
    fn clone(&self) -> Self {
        Self(api().clone_tensor()(self.0))
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        api().drop_tensor()(self.0);
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}{:?})", self.dtype(), self.shape())
    }
}

fn slice<T>(items: &[T]) -> RSlice<'_, T> {
    RSlice::from_slice(items)
}

/// An element that tensors can be made from and read into.
pub trait Element: Copy + Default + 'static {
    /// Its dtype.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// The bytes of plain elements.
fn bytes_of<T: Element>(items: &[T]) -> &[u8] {
    // SAFETY: `Element` is implemented here alone, for padding-free numbers; u8 has no alignment.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), size_of_val(items)) }
}

fn bytes_of_mut<T: Element>(items: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and every bit pattern is a valid number.
    unsafe { std::slice::from_raw_parts_mut(items.as_mut_ptr().cast(), size_of_val(items)) }
}

impl Tensor {
    /// Takes ownership of a handle; null becomes the error of the op that returned it.
    pub(crate) fn own(op: &str, raw: RawTensor) -> Result<Self> {
        if raw.is_null() {
            Err(op_error(op))
        } else {
            Ok(Self(raw))
        }
    }

    /// Takes ownership of a handle that the other side handed over.
    ///
    /// # Safety
    /// `raw` must be null or a live handle that this call may consume.
    pub unsafe fn from_raw(raw: RawTensor) -> Option<Self> {
        (!raw.is_null()).then_some(Self(raw))
    }

    /// Another handle to a tensor that the other side lends.
    ///
    /// # Safety
    /// `raw` must be a live handle for the time of the call.
    pub unsafe fn borrow_raw(raw: RawTensor) -> Self {
        Self(api().clone_tensor()(raw))
    }

    /// The handle, lent: valid while `self` is.
    pub fn raw(&self) -> RawTensor {
        self.0
    }

    /// The handle, handed over to the other side.
    pub fn into_raw(self) -> RawTensor {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }

    // ---- facts

    fn info(&self) -> TensorInfo {
        let mut info = TensorInfo {
            dtype: DType::F32,
            rank: 0,
            shape: [0; MAX_RANK],
        };
        let known = api().tensor_info()(self.0, &mut info);
        debug_assert!(known, "tensors of a larger rank are never made");
        info
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.info().dtype
    }

    /// Lengths of the axes.
    pub fn shape(&self) -> Vec<i32> {
        let info = self.info();
        info.shape[..info.rank as usize].to_vec()
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.info().rank as usize
    }

    /// Length of one axis (negative: from the end); 0 when there is no such axis.
    pub fn dim(&self, axis: i32) -> i32 {
        let info = self.info();
        let axis = if axis < 0 {
            axis + info.rank as i32
        } else {
            axis
        };
        if (0..info.rank as i32).contains(&axis) {
            info.shape[axis as usize]
        } else {
            0
        }
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> u64 {
        let count: u64 = self.shape().iter().map(|&n| n as u64).product();
        count * self.dtype().size().unwrap_or(0) as u64
    }

    /// The shape as `N` numbers.
    ///
    /// # Errors
    /// When the rank is not `N`.
    pub fn dims<const N: usize>(&self) -> Result<[i32; N]> {
        self.shape()
            .try_into()
            .map_err(|shape: Vec<i32>| Error::failed(format!("expected {N} axes, found {shape:?}")))
    }

    // ---- creation

    /// A tensor with a copy of `data`, row-major.
    pub fn from_slice<T: Element>(data: &[T], shape: &[i32]) -> Result<Self> {
        Self::from_bytes(bytes_of(data), shape, T::DTYPE)
    }

    /// A tensor with a copy of row-major bytes.
    pub fn from_bytes(data: &[u8], shape: &[i32], dtype: DType) -> Result<Self> {
        Self::own(
            "from_bytes",
            api().from_bytes()(slice(data), slice(shape), dtype),
        )
    }

    /// A tensor filled with one value.
    pub fn full(shape: &[i32], value: f32, dtype: DType) -> Result<Self> {
        Self::own("full", api().full()(slice(shape), value, dtype))
    }

    /// `start..stop` as i32.
    pub fn arange(start: i32, stop: i32) -> Result<Self> {
        Self::own("arange", api().arange()(start, stop))
    }

    // ---- evaluation

    /// Computes the tensor now.
    pub fn eval(&self) -> Result<()> {
        Self::eval_all(&[self])
    }

    /// Computes several tensors now, in one pass.
    pub fn eval_all(tensors: &[&Self]) -> Result<()> {
        let raw: Vec<_> = tensors.iter().map(|t| t.0).collect();
        check("eval", api().eval()(slice(&raw), true))
    }

    /// Starts to compute several tensors and returns.
    pub fn start_all(tensors: &[&Self]) -> Result<()> {
        let raw: Vec<_> = tensors.iter().map(|t| t.0).collect();
        check("eval", api().eval()(slice(&raw), false))
    }

    /// Computes the tensor and copies it out, row-major, converted to `T`.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let count = self.shape().iter().map(|&n| n as usize).product();
        let mut out = vec![T::default(); count];
        let bytes = RSliceMut::from_mut_slice(bytes_of_mut(&mut out));
        check("read", api().read()(self.0, T::DTYPE, bytes))?;
        Ok(out)
    }

    /// Computes the tensor and copies it out, row-major, as its elements are.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.bytes() as usize];
        let bytes = RSliceMut::from_mut_slice(&mut out);
        check("read", api().read()(self.0, self.dtype(), bytes))?;
        Ok(out)
    }

    // ---- structure

    /// Converts elements; the same tensor when nothing changes.
    pub fn astype(&self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        Self::own("astype", api().astype()(self.0, dtype))
    }

    /// Same elements, another shape; one axis may be -1.
    pub fn reshape(&self, shape: &[i32]) -> Result<Self> {
        Self::own("reshape", api().reshape()(self.0, slice(shape)))
    }

    /// Permutes the axes.
    pub fn transpose(&self, axes: &[i32]) -> Result<Self> {
        Self::own("transpose", api().transpose()(self.0, slice(axes)))
    }

    /// Repeats axes of length 1 to the given shape.
    pub fn broadcast_to(&self, shape: &[i32]) -> Result<Self> {
        Self::own("broadcast_to", api().broadcast_to()(self.0, slice(shape)))
    }

    /// Joins along an axis.
    pub fn concat(tensors: &[&Self], axis: i32) -> Result<Self> {
        let raw: Vec<_> = tensors.iter().map(|t| t.0).collect();
        Self::own("concat", api().concat()(slice(&raw), axis))
    }

    /// The entries `start..stop` of one axis (negative: from the end).
    pub fn slice(&self, axis: i32, start: i32, stop: i32) -> Result<Self> {
        let mut stops = self.shape();
        let rank = stops.len() as i32;
        let axis = if axis < 0 { axis + rank } else { axis };
        if !(0..rank).contains(&axis) || start < 0 || start > stop || stop > stops[axis as usize] {
            return Err(Error::failed(format!(
                "slice {start}..{stop} of axis {axis} is outside {stops:?}"
            )));
        }
        let mut starts = vec![0; stops.len()];
        starts[axis as usize] = start;
        stops[axis as usize] = stop;
        Self::own(
            "slice",
            api().slice()(self.0, slice(&starts), slice(&stops)),
        )
    }

    /// A copy with the box at `starts` replaced by `update`.
    pub fn slice_update(&self, update: &Self, starts: &[i32]) -> Result<Self> {
        Self::own(
            "slice_update",
            api().slice_update()(self.0, update.0, slice(starts)),
        )
    }

    /// Picks entries along an axis by indices of any shape.
    pub fn take(&self, indices: &Self, axis: i32) -> Result<Self> {
        Self::own("take", api().take()(self.0, indices.0, axis))
    }

    /// Picks one entry per position along an axis.
    pub fn take_along_axis(&self, indices: &Self, axis: i32) -> Result<Self> {
        Self::own(
            "take_along_axis",
            api().take_along_axis()(self.0, indices.0, axis),
        )
    }

    /// `len` columns of `[B, T, ..]`, beginning at a column of its own for each row. Columns beyond
    /// the last one repeat it.
    pub fn columns(&self, starts: &[i32], len: i32) -> Result<Self> {
        let (shape, rows) = (self.shape(), starts.len() as i32);
        let [batch, width, rest @ ..] = shape.as_slice() else {
            return Err(Error::failed(format!("columns of {shape:?}")));
        };
        if *batch != rows || *width == 0 || starts.iter().any(|&start| start < 0) {
            return Err(Error::failed(format!("columns {starts:?} of {shape:?}")));
        }
        if starts.iter().all(|&start| start == starts[0]) && starts[0] + len <= *width {
            return self.slice(1, starts[0], starts[0] + len);
        }
        let at = |start: i32| (start..start + len).map(|column| column.min(width - 1));
        let indices: Vec<i32> = starts.iter().flat_map(|&start| at(start)).collect();
        let mut index_shape = vec![rows, len];
        index_shape.extend(rest.iter().map(|_| 1));
        let mut full = vec![rows, len];
        full.extend(rest);
        let indices = Self::from_slice(&indices, &index_shape)?.broadcast_to(&full)?;
        self.take_along_axis(&indices, 1)
    }

    // ---- element-wise

    /// Applies a function to every element.
    pub fn unary(&self, op: UnaryOp) -> Result<Self> {
        Self::own("unary", api().unary()(op, self.0))
    }

    /// Combines two tensors element by element, with broadcasting.
    pub fn binary(&self, op: BinaryOp, other: &Self) -> Result<Self> {
        Self::own("binary", api().binary()(op, self.0, other.0))
    }

    /// `self + other`
    pub fn add(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::ADD, other)
    }

    /// `self - other`
    pub fn sub(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::SUB, other)
    }

    /// `self * other`
    pub fn mul(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::MUL, other)
    }

    /// `self / other`
    pub fn div(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::DIV, other)
    }

    /// `self < other`
    pub fn less(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::LESS, other)
    }

    /// `self <= other`
    pub fn less_equal(&self, other: &Self) -> Result<Self> {
        self.binary(BinaryOp::LESS_EQUAL, other)
    }

    /// A scalar of this tensor's dtype, so that arithmetic with it changes no dtype.
    fn scalar(&self, value: f32) -> Result<Self> {
        Self::full(&[], value, self.dtype())
    }

    /// `self * value`, in this dtype.
    pub fn scale(&self, value: f32) -> Result<Self> {
        self.mul(&self.scalar(value)?)
    }

    /// `self + value`, in this dtype.
    pub fn shift(&self, value: f32) -> Result<Self> {
        self.add(&self.scalar(value)?)
    }

    /// `condition ? self : other`, element by element.
    pub fn select(&self, condition: &Self, other: &Self) -> Result<Self> {
        Self::own("select", api().select()(condition.0, self.0, other.0))
    }

    /// `exp(self)`
    pub fn exp(&self) -> Result<Self> {
        self.unary(UnaryOp::EXP)
    }

    /// `-self`
    pub fn neg(&self) -> Result<Self> {
        self.unary(UnaryOp::NEG)
    }

    /// `1 / (1 + exp(-self))`
    pub fn sigmoid(&self) -> Result<Self> {
        self.unary(UnaryOp::SIGMOID)
    }

    /// `self * sigmoid(self)`
    pub fn silu(&self) -> Result<Self> {
        self.unary(UnaryOp::SILU)
    }

    /// `cap * tanh(self / cap)`
    pub fn softcap(&self, cap: f32) -> Result<Self> {
        self.scale(1.0 / cap)?.unary(UnaryOp::TANH)?.scale(cap)
    }

    // ---- along an axis

    /// Reduces along an axis.
    pub fn reduce(&self, op: ReduceOp, axis: i32, keep_axis: bool) -> Result<Self> {
        Self::own("reduce", api().reduce()(op, self.0, axis, keep_axis))
    }

    /// Index of the first largest element along an axis, as i32.
    pub fn argmax(&self, axis: i32) -> Result<Self> {
        self.reduce(ReduceOp::ARGMAX, axis, false)
    }

    /// Sum along an axis, which is dropped.
    pub fn sum(&self, axis: i32) -> Result<Self> {
        self.reduce(ReduceOp::SUM, axis, false)
    }

    /// Sorts ascending along an axis.
    pub fn sort(&self, axis: i32) -> Result<Self> {
        Self::own("sort", api().sort()(self.0, axis))
    }

    /// Running sums along an axis.
    pub fn cumsum(&self, axis: i32) -> Result<Self> {
        Self::own("cumsum", api().cumsum()(self.0, axis))
    }

    /// Softmax along an axis.
    pub fn softmax(&self, axis: i32) -> Result<Self> {
        Self::own("softmax", api().softmax()(self.0, axis))
    }

    // ---- linear algebra and blocks

    /// Matrix product, broadcasting over leading axes.
    pub fn matmul(&self, other: &Self) -> Result<Self> {
        Self::own("matmul", api().matmul()(self.0, other.0))
    }

    /// The matrix that packed weights stand for, `[out, in]`.
    pub fn dequantize(&self, scales: &Self, biases: &Self, group: i32, bits: i32) -> Result<Self> {
        Self::own(
            "dequantize",
            api().dequantize()(self.0, scales.0, biases.0, group, bits),
        )
    }

    /// The `k` largest scores along the last axis, as weights and indices; see [`crate::abi::HostApi`].
    pub fn route(&self, k: i32, scale: Option<&Self>) -> Result<[Self; 2]> {
        let scale = scale.map_or(RawTensor::NULL, |scale| scale.0);
        let out = api().route()(self.0, k, scale);
        if out.is_empty() {
            return Err(op_error("route"));
        }
        let tensors = out.into_iter().map(|raw| Self::own("route", raw));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        tensors
            .try_into()
            .map_err(|_| Error::failed("the host returned another number of tensors"))
    }

    /// Root-mean-square norm over the last axis.
    pub fn rms_norm(&self, weight: Option<&Self>, eps: f32) -> Result<Self> {
        let weight = weight.map_or(RawTensor::NULL, |w| w.0);
        Self::own("rms_norm", api().rms_norm()(self.0, weight, eps))
    }

    /// Rotary embedding of `[B, heads, T, D]`; see [`crate::abi::HostApi`].
    pub fn rope(
        &self,
        dims: i32,
        base: f32,
        freqs: Option<&Self>,
        scale: f32,
        offsets: &Self,
    ) -> Result<Self> {
        let freqs = freqs.map_or(RawTensor::NULL, |f| f.0);
        Self::own(
            "rope",
            api().rope()(self.0, dims, base, freqs, scale, offsets.0),
        )
    }

    /// Attention with `self` as the queries; see [`crate::abi::HostApi`].
    pub fn attention(&self, k: &Self, v: &Self, scale: f32, mask: &Mask) -> Result<Self> {
        let (kind, tensor) = match mask {
            Mask::None => (AttentionMask::NONE, RawTensor::NULL),
            Mask::Causal => (AttentionMask::CAUSAL, RawTensor::NULL),
            Mask::Tensor(mask) => (AttentionMask::TENSOR, mask.0),
        };
        Self::own(
            "attention",
            api().attention()(self.0, k.0, v.0, scale, kind, tensor),
        )
    }
}

/// What an attention may look at.
#[derive(Clone, Debug)]
pub enum Mask {
    /// Every key.
    None,
    /// The last query sees every key, each earlier one sees one less.
    Causal,
    /// Boolean, broadcasts to `[B, heads, T, S]`, true = visible.
    Tensor(Tensor),
}
