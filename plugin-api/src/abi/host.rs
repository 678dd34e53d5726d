//! What the host offers to a plugin: the op table, checkpoints and the log.

use std::ffi::c_void;

use abi_stable::StableAbi;
use abi_stable::std_types::{ROption, RSlice, RSliceMut, RStr, RString, RVec};

use super::types::{
    AttentionMask, BinaryOp, DType, LogLevel, RawTensor, ReduceOp, Reply, TensorInfo, UnaryOp,
};

/// An open checkpoint owned by the host, as an opaque handle.
#[repr(transparent)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawCheckpoint(pub *mut c_void);

/// The arguments of one [`HostApi::gated_delta`] call; all borrowed. Channels `C = 2 Hk Dk + Hv Dv` are
/// those of queries, keys and values, one after the other; value head `h` uses key head `h / (Hv / Hk)`.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct GatedDelta<'a> {
    /// What goes into the convolution, `[B, T, C]`.
    pub qkv: RawTensor,
    /// What opens the gate of the outcome, `[B, T, Hv * Dv]`. Null: there is none, only states move on.
    pub z: RawTensor,
    /// `beta = sigmoid(b)`, `[B, T, Hv]`.
    pub b: RawTensor,
    /// `decay = exp(rate * softplus(a + dt_bias))`, `[B, T, Hv]`.
    pub a: RawTensor,
    /// What went into the convolution before, `[B, K-1, C]`.
    pub conv_state: RawTensor,
    /// The state before the first column, `[B, Hv, Dv, Dk]` f32.
    pub recurrent_state: RawTensor,
    /// Weights of the convolution, oldest first, `[K, C]`.
    pub conv_weight: RawTensor,
    /// `-exp(A_log)`, `[Hv]` f32.
    pub rate: RawTensor,
    /// `[Hv]`.
    pub dt_bias: RawTensor,
    /// Weight of the outcome's RMSNorm, `[Dv]` f32.
    pub norm: RawTensor,
    /// Epsilon of that norm.
    pub eps: f32,
    /// `Hk`.
    pub key_heads: i32,
    /// Columns of each row that are filled. The others leave the state as it is; what they give is
    /// to be ignored.
    pub lens: RSlice<'a, i32>,
    /// Whether the states after the last filled column are wanted.
    pub advance: bool,
}

/// A weight matrix of one [`HostApi::project`] call; all borrowed.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct RawMatrix {
    /// `[out, in]`; quantized: packed words, u32 `[out, in * bits / 32]`.
    pub weight: RawTensor,
    /// `[out, in / group]`; null: not quantized.
    pub scales: RawTensor,
    /// As `scales`: a weight is `scale * q + bias`.
    pub biases: RawTensor,
    /// `[out]`, added to the product, or null.
    pub offset: RawTensor,
    /// Weights that share a scale.
    pub group: i32,
    /// Bits of a packed weight.
    pub bits: i32,
}

/// The inputs of one [`HostApi::project`] call; all borrowed.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[.., in]`.
    pub x: RawTensor,
    /// Weight `[in]` of an RMSNorm that `x` goes through first, or null.
    pub norm: RawTensor,
    /// The norm's epsilon.
    pub eps: f32,
    /// One or more matrices.
    pub matrices: RSlice<'a, RawMatrix>,
    /// With two matrices: the only output is `gate(first) * second`. None: [`UnaryOp`] of code 0.
    pub gate: UnaryOp,
    /// Weight `[out]` of an RMSNorm that the only output goes through next, or null.
    pub post_norm: RawTensor,
    /// That norm's epsilon.
    pub post_eps: f32,
    /// `[.., out]`, added to the only output then, or null.
    pub residual: RawTensor,
    /// A factor on the only output at the end; 1 otherwise.
    pub scale: f32,
}

/// The inputs of one [`HostApi::experts`] call; all borrowed.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// The input, the experts' matrices, and what comes before and after, as in [`HostApi::project`]. There
    /// are three matrices with a leading axis of experts in all that they consist of, `[E, out, in]` and so
    /// on, and without offsets: gate and up, `[E, I, H]`, and down, `[E, H, I]`. `gate` is required.
    pub projection: Projection<'a>,
    /// The experts that a row of the input goes through, `[.., k]` i32. An index outside `0..E` is taken for
    /// the nearest one inside.
    pub choice: RawTensor,
    /// Their weights, `[.., k]` in the dtype of the input.
    pub weights: RawTensor,
}

/// The inputs of one [`HostApi::attend`] call; all borrowed.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// `[B, T, heads * D]`; with `gated` `[B, T, heads * 2 D]`: per head a query, then its gate. Null:
    /// nothing is looked at; keys and values only go into the caches.
    pub q: RawTensor,
    /// `[B, T, kv_heads * D]`. Null: the caches have the keys and values of this pass already, put there
    /// by another layer; they are only read, and not returned.
    pub k: RawTensor,
    /// As `k`. Null: values are made of what keys are made of, `k`.
    pub v: RawTensor,
    /// Cached keys `[B, kv_heads, capacity, D]`; position `p` lies in column `p % capacity`. Or quantized
    /// ones, u32 `[B, kv_heads, capacity, D * bits / 32 + D / group]`, of the positions from `start` on: `p`
    /// lies in column `(p - start) % capacity`. A row of them is codes of 4 or 8 bits, the first element in
    /// the lowest bits, then per group of 32, 64 or 128 elements a word with the scale in its low half and
    /// the bias in its high one, both f16: an element is `scale * code + bias`. What is new is quantized as
    /// it is written, and the queries of the same pass see it so.
    pub keys: RawTensor,
    /// Cached values, as `keys`.
    pub values: RawTensor,
    /// Beside quantized keys: those of the positions before `start`, as they are, `[B, kv_heads, columns,
    /// D]`; `p` lies in column `p % columns`. Null: `start` is 0.
    pub first_keys: RawTensor,
    /// As `first_keys`.
    pub first_values: RawTensor,
    /// The first position that is quantized; 0 where none is.
    pub start: i32,
    /// Weight `[D]` of the RMSNorm of queries, or null: no norm.
    pub q_norm: RawTensor,
    /// As `q_norm`, of keys.
    pub k_norm: RawTensor,
    /// Whether values go through an RMSNorm without a weight.
    pub v_norm: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: i32,
    /// Key and value heads.
    pub kv_heads: i32,
    /// Whether the outcome is multiplied by the sigmoid of the gates.
    pub gated: bool,
    /// Rotary embedding, as in [`HostApi::rope`]: the dimensions that turn,
    pub rope_dims: i32,
    /// the base,
    pub rope_base: f32,
    /// the divisors or null,
    pub rope_freqs: RawTensor,
    /// and the factor on positions.
    pub rope_scale: f32,
    /// By what position the first column of each row is rotated; mostly its offset.
    pub positions: RSlice<'a, i32>,
    /// The position of each row's first column, which sees itself and what lies before it. The columns
    /// of the pass fit the capacity, or with a window the capacity is at least the window and them.
    pub offsets: RSlice<'a, i32>,
    /// Empty: a column sees itself and what lies before it. Else, per row, the position before which all
    /// columns of the pass see everything, those after them included; within the pass's columns.
    pub ends: RSlice<'a, i32>,
    /// Keys that a query sees, its own included, and none further back; 0: all.
    pub window: i32,
    /// The factor on products of queries and keys.
    pub scale: f32,
}

/// The host's table. Valid for the life of the process.
///
/// Unless a slot says otherwise: tensor arguments are borrowed; a returned tensor is owned by the
/// caller, who gives it back with `drop_tensor`; null means failure, and `take_error` then tells
/// why. Ops may be lazy: a failure that depends on values shows at `eval` or `read`. Shapes and dtypes
/// are checked at the call. Negative axes count from the end. Since 1.0.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = HostApiRef)))]
pub struct HostApi {
    /// The message of the last failed op on this thread, which it clears.
    pub take_error: extern "C" fn() -> RString,
    /// Writes a line to the host's log, or drops it where the user does not want to see lines of that level; one
    /// that the host does not know counts as [`LogLevel::TRACE`].
    /// `target` names the plugin. What is not plain text of one line is made so. From any thread, at any time
    /// after the table was handed over.
    pub log: extern "C" fn(level: LogLevel, target: RStr<'_>, message: RStr<'_>),
    /// Bytes of tensor memory now in use by the process.
    pub memory_used: extern "C" fn() -> u64,

    /// Another handle to the same tensor.
    pub clone_tensor: extern "C" fn(RawTensor) -> RawTensor,
    /// Gives a handle back. Null is ignored.
    pub drop_tensor: extern "C" fn(RawTensor),
    /// Writes dtype and shape. Returns false when the rank exceeds [`super::MAX_RANK`].
    pub tensor_info: extern "C" fn(RawTensor, &mut TensorInfo) -> bool,

    /// A tensor from row-major bytes, which are copied.
    pub from_bytes: extern "C" fn(RSlice<'_, u8>, RSlice<'_, i32>, DType) -> RawTensor,
    /// A tensor filled with one value.
    pub full: extern "C" fn(RSlice<'_, i32>, f32, DType) -> RawTensor,
    /// `start, start + 1, … stop - 1` as `[stop - start]` i32.
    pub arange: extern "C" fn(start: i32, stop: i32) -> RawTensor,

    /// Computes the given tensors; with `wait` false it only starts to. False on failure.
    pub eval: extern "C" fn(RSlice<'_, RawTensor>, wait: bool) -> bool,
    /// Computes one tensor, casts it to `dtype` and copies it out, row-major. The buffer must have
    /// exactly the right size. False on failure.
    pub read: extern "C" fn(RawTensor, DType, RSliceMut<'_, u8>) -> bool,

    /// Converts elements.
    pub astype: extern "C" fn(RawTensor, DType) -> RawTensor,
    /// Same elements, another shape; one axis may be -1.
    pub reshape: extern "C" fn(RawTensor, RSlice<'_, i32>) -> RawTensor,
    /// Permutes the axes.
    pub transpose: extern "C" fn(RawTensor, RSlice<'_, i32>) -> RawTensor,
    /// Repeats axes of length 1 (and new leading ones) to the given shape.
    pub broadcast_to: extern "C" fn(RawTensor, RSlice<'_, i32>) -> RawTensor,
    /// Joins along an axis.
    pub concat: extern "C" fn(RSlice<'_, RawTensor>, axis: i32) -> RawTensor,
    /// The box `starts..stops` (one entry per axis).
    pub slice: extern "C" fn(RawTensor, RSlice<'_, i32>, RSlice<'_, i32>) -> RawTensor,
    /// A copy of the first with the box at `starts` replaced by the second.
    pub slice_update: extern "C" fn(RawTensor, RawTensor, RSlice<'_, i32>) -> RawTensor,
    /// Picks entries along an axis by an index tensor of any rank. Indices are clamped into range.
    pub take: extern "C" fn(RawTensor, indices: RawTensor, axis: i32) -> RawTensor,
    /// Picks one entry per position along an axis. Indices are clamped into range.
    pub take_along_axis: extern "C" fn(RawTensor, indices: RawTensor, axis: i32) -> RawTensor,

    /// Element-wise, one argument.
    pub unary: extern "C" fn(UnaryOp, RawTensor) -> RawTensor,
    /// Element-wise, two arguments.
    pub binary: extern "C" fn(BinaryOp, RawTensor, RawTensor) -> RawTensor,
    /// `condition ? a : b`, element-wise.
    pub select: extern "C" fn(condition: RawTensor, a: RawTensor, b: RawTensor) -> RawTensor,
    /// Reduces along an axis.
    pub reduce: extern "C" fn(ReduceOp, RawTensor, axis: i32, keep_axis: bool) -> RawTensor,
    /// Sorts ascending along an axis.
    pub sort: extern "C" fn(RawTensor, axis: i32) -> RawTensor,
    /// Running sums along an axis, in index order.
    pub cumsum: extern "C" fn(RawTensor, axis: i32) -> RawTensor,
    /// Softmax along an axis, accumulated in f32.
    pub softmax: extern "C" fn(RawTensor, axis: i32) -> RawTensor,

    /// Matrix product with broadcasting over leading axes.
    pub matmul: extern "C" fn(RawTensor, RawTensor) -> RawTensor,
    /// Products of `x` with weight matrices, `x W^T`, and what comes before and after. Returns one
    /// `[.., out]` per matrix, or the gated one; empty on failure. What is rounded where is as if
    /// the steps were made one by one, in the dtype of `x`.
    pub project: extern "C" fn(&Projection<'_>) -> RVec<RawTensor>,
    /// The `k` largest of `scores` `[.., E]` along the last axis, larger ones first, of equal ones those with
    /// the lower index: their softmax, times `scale` `[E]` of each unless that is null, `[.., k]` in the
    /// dtype of the scores; and their indices, `[.., k]` i32. Computed in f32. Empty on failure.
    pub route: extern "C" fn(scores: RawTensor, k: i32, scale: RawTensor) -> RVec<RawTensor>,
    /// A mixture of experts: the sum over a row's `k` experts of
    /// `weight * down(gate(first x) * second x)`, `[.., H]`. Products and the gated value are rounded to the
    /// dtype of `x`, so is each weighted outcome; these are added in the order of the choice in f32 and
    /// rounded once. What a row gives does not depend on the other rows, as far as that holds for
    /// `project`.
    pub experts: extern "C" fn(&Experts<'_>) -> RawTensor,
    /// `scales * q + biases`, `[out, in]` in the dtype of `scales`.
    pub dequantize: extern "C" fn(
        w: RawTensor,
        scales: RawTensor,
        biases: RawTensor,
        group: i32,
        bits: i32,
    ) -> RawTensor,

    /// `weight * x / sqrt(mean(x^2) + eps)` over the last axis; a null weight counts as 1.
    pub rms_norm: extern "C" fn(x: RawTensor, weight: RawTensor, eps: f32) -> RawTensor,
    /// Rotary embedding of `x` `[B, heads, T, D]`: half-split pairs on the first `dims` of `D`.
    /// Row `b`, column `t` stands at position `offsets[b] + t`. The angle of pair `j` is
    /// `scale * position / base^(2j/dims)`, or `scale * position / freqs[j]` when `freqs` is given.
    pub rope: extern "C" fn(
        x: RawTensor,
        dims: i32,
        base: f32,
        freqs: RawTensor,
        scale: f32,
        offsets: RawTensor,
    ) -> RawTensor,
    /// Attention of `q` `[B, Hq, T, D]` over `k`, `v` `[B, Hk, S, D]`, `Hq` a multiple of `Hk`.
    /// `mask` is read when the kind is [`AttentionMask::TENSOR`], else null.
    pub attention: extern "C" fn(
        q: RawTensor,
        k: RawTensor,
        v: RawTensor,
        scale: f32,
        kind: AttentionMask,
        mask: RawTensor,
    ) -> RawTensor,
    /// Self-attention between its projections, causal or over a block: norms and rotation of queries
    /// and keys, the new keys and values into the cache at each row's offset, the mix, the gate.
    /// Returns the mix `[B, T, heads * D]` if there are queries; if there are new keys and values, all of
    /// them, and the first ones where those lie elsewhere; empty on failure. A cache to which the caller's handle is
    /// the only one may be written in place: use what is returned from there on, and clone the
    /// handle before where the old content is still wanted.
    pub attend: extern "C" fn(&Attend<'_>) -> RVec<RawTensor>,
    /// Gated DeltaNet between its projections: the causal convolution with SiLU, L2 norms of queries
    /// and keys, the rule `S *= decay; S += beta (v - S k) k^T; y = S q` column by column, and
    /// `norm(y) * silu(z)`. Returns that, `[B, T, Hv * Dv]`, unless `z` is null; then, to `advance`, what
    /// the next call's convolution has to see, `[B, K-1, C]`, and the state after the last filled
    /// column, `[B, Hv, Dv, Dk]`, for which `recurrent_state` may be written in place as the caches of
    /// `attend` are. Empty on failure. A call of the same columns gives the same states, bit for
    /// bit, with and without `z` and whatever comes after them: so that one may look ahead
    /// without advancing, and advance by fewer columns later.
    pub gated_delta: extern "C" fn(&GatedDelta<'_>) -> RVec<RawTensor>,

    /// Opens a directory (config.json and safetensors) or a GGUF file. The handle is owned by the
    /// caller, who gives it back with `checkpoint_drop`.
    pub checkpoint_open: extern "C" fn(path: RStr<'_>) -> Reply<RawCheckpoint>,
    /// Closes a checkpoint. Tensors taken from it stay valid.
    pub checkpoint_drop: extern "C" fn(RawCheckpoint),
    /// The text of config.json.
    pub checkpoint_config: extern "C" fn(RawCheckpoint) -> RString,
    /// The names of all tensors, sorted.
    pub checkpoint_names: extern "C" fn(RawCheckpoint) -> RVec<RString>,
    /// One tensor by name, mapped from the file. Null when absent or unreadable.
    pub checkpoint_tensor: extern "C" fn(RawCheckpoint, name: RStr<'_>) -> RawTensor,
    /// Bytes of the tensors whose names start with a prefix.
    pub checkpoint_bytes: extern "C" fn(RawCheckpoint, prefix: RStr<'_>) -> u64,
    /// The digest of the token table beside the checkpoint; none when it carries no tokenizer.
    #[sabi(last_prefix_field)]
    pub checkpoint_vocabulary: extern "C" fn(RawCheckpoint) -> Reply<ROption<RString>>,
}
