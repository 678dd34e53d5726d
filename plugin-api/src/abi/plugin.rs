//! What a plugin offers to the host, and the target as the plugin sees it.
//!
//! Life of a drafter: [`PluginModule::load`] reads the drafter's directory, [`Drafter::pair`] says
//! whether it fits the target, [`Drafter::open`] makes one group of rows, [`DraftRows`] drafts for
//! it. A group is opened, prefilled, then alternates `draft` and `commit`; see [`DraftRows`].

use std::ffi::c_void;

use abi_stable::StableAbi;
use abi_stable::library::RootModule;
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{ROption, RSlice, RStr, RString, RVec, Tuple2};

use super::host::HostApiRef;
use super::types::{DType, DonorKind, RawTensor, Reply};

/// The root module of a plugin library. Since 1.0.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
pub struct PluginModule {
    /// Reads a drafter: its config and options, not yet its weights. May be called many times.
    #[sabi(last_prefix_field)]
    pub load: extern "C" fn(host: HostApiRef, request: &LoadRequest<'_>) -> Reply<RawDrafter>,
}

impl RootModule for PluginModuleRef {
    abi_stable::declare_root_module_statics! {PluginModuleRef}

    const BASE_NAME: &'static str = "mlxhost_plugin";
    const NAME: &'static str = "mlxhost_plugin";
    const VERSION_STRINGS: VersionStrings = abi_stable::package_version_strings!();
}

/// What [`PluginModule::load`] is told; borrowed for the call.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct LoadRequest<'a> {
    /// Path of the drafter's checkpoint; none for families without weights.
    pub checkpoint: ROption<RStr<'a>>,
    /// `--drafter-option key=value` pairs. A key the plugin does not know is an error.
    pub options: RSlice<'a, Tuple2<RStr<'a>, RStr<'a>>>,
}

/// A loaded drafter, owned by the host; given back with [`Drafter::drop`].
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct RawDrafter {
    /// The plugin's own pointer.
    pub this: *mut c_void,
    /// Its table, valid as long as the library is mapped.
    pub table: DrafterRef,
}

/// The table of a loaded drafter. Since 1.0.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = DrafterRef)))]
pub struct Drafter {
    /// Destroys the drafter. The host has dropped all its rows before.
    pub drop: extern "C" fn(*mut c_void),
    /// Identity, needs and limits. Constant over the life of the drafter.
    pub info: extern "C" fn(*mut c_void) -> Reply<DrafterInfo>,
    /// Does this drafter fit that target? Called before `open`, allocates nothing that lasts. The
    /// fault names both and the number that differs.
    pub pair: extern "C" fn(*mut c_void, &TargetFacts<'_>) -> Reply<()>,
    /// A group of rows, all at position 0.
    #[sabi(last_prefix_field)]
    pub open: extern "C" fn(*mut c_void, &OpenRequest<'_>) -> Reply<RawRows>,
}

/// A hidden state of the target that a drafter wants to see.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tap {
    /// `0..layers`: the output of that layer; `layers` itself is [`Tap::FINAL`]. [`Tap::PRE_NORM`] and [`Tap::FINAL`]: the last
    /// hidden before and after the final norm. [`Tap::EMBEDDING`]: the input of layer 0.
    pub point: i32,
}

impl Tap {
    /// The input of the first layer.
    pub const EMBEDDING: Self = Self { point: -1 };
    /// The output of the last layer, before the final norm.
    pub const PRE_NORM: Self = Self { point: -2 };
    /// The last hidden after the final norm: what the head sees.
    pub const FINAL: Self = Self { point: -3 };

    /// The output of layer `index`.
    pub fn layer(index: i32) -> Self {
        Self { point: index }
    }
}

/// What a drafter says of itself. Owned by the host.
#[repr(C)]
#[derive(StableAbi, Clone, Debug)]
pub struct DrafterInfo {
    /// A name for messages and statistics.
    pub name: RString,
    /// Bytes of weights it will keep resident.
    pub weight_bytes: u64,
    /// The taps it wants with every `prefill` and `commit`, in this order.
    pub taps: RVec<Tap>,
    /// The keys and values of the target that it wants to look at with every `draft`, in this order.
    pub donors: RVec<DonorKind>,
    /// The depth it was made for, used when the user names none.
    pub default_depth: u32,
    /// The largest depth it can draft.
    pub max_depth: u32,
}

/// The target as the pairing gate sees it; borrowed for the call.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct TargetFacts<'a> {
    /// A name for messages (the checkpoint's path).
    pub name: RStr<'a>,
    /// `model_type` of its text model, e.g. `qwen3_5_text` becomes `qwen3_5`.
    pub model_type: RStr<'a>,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Rows of the head.
    pub vocab_size: u32,
    /// Dtype of the residual stream.
    pub dtype: DType,
    /// Digest of its token table; none when it was loaded without a tokenizer.
    pub vocabulary: ROption<RStr<'a>>,
    /// The keys and values that it lends.
    pub donors: RSlice<'a, DonorFacts>,
}

/// The shape of keys and values that a target lends.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct DonorFacts {
    /// What kind of layer they are of.
    pub kind: DonorKind,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Dimensions of a head.
    pub head_dim: u32,
    /// Keys that the layer's own queries see; 0: all.
    pub window: u32,
}

/// Keys and values of the target, as its layer's cache holds them; borrowed.
///
/// Position `p` of each row lies in column `p % capacity`. All processed tokens are there, of a sliding
/// layer the window and some more; what lies beyond a row's processed tokens means nothing. They may be
/// quantized. They serve [`super::HostApi::attend`] as they are, field by field, without new keys; they must
/// not be kept.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct Donor {
    /// `[B, kv_heads, capacity, D]`, normalised and rotated; or quantized, as [`super::Attend::keys`].
    pub keys: RawTensor,
    /// As `keys`.
    pub values: RawTensor,
    /// [`super::Attend::first_keys`]; null: `start` is 0.
    pub first_keys: RawTensor,
    /// As `first_keys`.
    pub first_values: RawTensor,
    /// [`super::Attend::start`].
    pub start: i32,
}

/// How a row is sampled. Filters apply after the temperature, in the order top-k, top-p, min-p.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the first largest logit.
    pub temperature: f32,
    /// Keep the smallest set of most likely tokens that holds this much probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all. Ties at the edge are kept.
    pub top_k: u32,
    /// The key of all draws of this row.
    pub seed: u64,
}

/// What is constant over the life of a row.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct RowSpec {
    /// How the target samples this row; a drafter that samples the same way is accepted more.
    pub sampling: Sampling,
}

/// What [`Drafter::open`] is told; borrowed for the call.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct OpenRequest<'a> {
    /// The target. It outlives the rows; the handle itself may be copied.
    pub target: RawTarget,
    /// The target's facts, as the pairing gate saw them.
    pub facts: TargetFacts<'a>,
    /// One entry per row.
    pub rows: RSlice<'a, RowSpec>,
}

/// The target's capabilities, owned by the host, alive as long as the rows that were opened on it.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct RawTarget {
    /// The host's own pointer.
    pub this: *const c_void,
    /// Its table.
    pub table: TargetViewRef,
}

/// The table of a target. A slot that is none is a capability this target lacks. Since 1.0.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = TargetViewRef)))]
pub struct TargetView {
    /// The input embeddings of ids: `[..]` i32 to `[.., hidden]`, as the target's first layer gets
    /// them, or with `bare` as the matrix has them, without the factor of some models. Null on failure.
    pub embed: ROption<extern "C" fn(*const c_void, ids: RawTensor, bare: bool) -> RawTensor>,
    /// The head on hiddens after the final norm: `[.., hidden]` to `[.., vocabulary]`, with `bare`
    /// without the softcap of some models. `subset` is 0 for the whole head, or a key from
    /// `head_subset`. Null on failure.
    pub logits: ROption<
        extern "C" fn(*const c_void, hidden: RawTensor, subset: u64, bare: bool) -> RawTensor,
    >,
    /// Restricts the head to some rows: strictly ascending ids. The key is never 0 and stays valid
    /// as long as the target; the same ids give the same key.
    #[sabi(last_prefix_field)]
    pub head_subset: ROption<extern "C" fn(*const c_void, ids: RSlice<'_, u32>) -> Reply<u64>>,
}

/// One row's state between two rounds: what a drafter needs to go on from there in another group. Whoever
/// gets it from a [`Reply`] owns its tensors; by reference they are borrowed for the call.
#[repr(C)]
#[derive(StableAbi, Debug)]
pub struct RowState {
    /// What wrote it and in which form; it is given back to that alone.
    pub schema: RString,
    /// Tokens of the row that the target had processed.
    pub processed: u32,
    /// In any order; names are unique. They share nothing with the group: that goes on.
    pub tensors: RVec<NamedTensor>,
}

/// A tensor of a [`RowState`].
#[repr(C)]
#[derive(StableAbi, Clone, Debug)]
pub struct NamedTensor {
    /// Its name.
    pub name: RString,
    /// Never null.
    pub tensor: RawTensor,
}

/// A group of rows, owned by the host; given back with [`DraftRows::drop`].
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct RawRows {
    /// The plugin's own pointer.
    pub this: *mut c_void,
    /// Its table, valid as long as the library is mapped.
    pub table: DraftRowsRef,
}

/// Tokens that the target has processed since the last call, for every row of the group; borrowed.
///
/// Row `b` processed `lens[b]` tokens (maybe none). `tokens` holds them back to back. `next[b]` is
/// the token that follows them: the next one of the prompt, or the pending token that the target
/// has sampled but not yet processed.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct Advance<'a> {
    /// Processed tokens per row.
    pub lens: RSlice<'a, u32>,
    /// The processed tokens of row 0, then row 1, …
    pub tokens: RSlice<'a, i32>,
    /// The token that follows, per row. A row with `lens[b] == 0` may have any value here.
    pub next: RSlice<'a, i32>,
    /// One tensor `[B, T, hidden]` per requested tap, `T` at least the largest of `lens`; columns
    /// at or after `lens[b]` are padding.
    pub taps: RSlice<'a, RawTensor>,
    /// In `commit`: how many of the drafted tokens of each row are among the processed ones (they
    /// are `tokens[1..=accepted]` of the row). In `prefill`: zeros.
    pub accepted: RSlice<'a, u32>,
}

/// What [`DraftRows::draft`] is told; borrowed for the call.
#[repr(C)]
#[derive(StableAbi, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// At most this many tokens per row; 0 for a row that wants none.
    pub depths: RSlice<'a, u32>,
    /// The pending token of each row, which the first draft follows.
    pub pending: RSlice<'a, i32>,
    /// The position of the first drafted token in each row (its index in prompt + answer): the key
    /// of its random draw.
    pub positions: RSlice<'a, u32>,
    /// What the target lends, as [`DrafterInfo::donors`] asked for it. A row has `positions[b] - 1`
    /// processed tokens: all but its pending one.
    pub donors: RSlice<'a, Donor>,
}

/// Drafted tokens. Owned by the host.
#[repr(C)]
#[derive(StableAbi, Debug)]
pub struct DraftReply {
    /// `[B, W]` i32; may still be uncomputed. Null when no row drafted. Entries at or after
    /// `lens[b]` are ignored.
    pub ids: RawTensor,
    /// How many of them each row proposes, at most its depth.
    pub lens: RVec<u32>,
}

/// The table of a group of rows. Since 1.0.
///
/// Order of calls: `prefill` one or more times until the prompt is processed, then rounds of
/// `draft` and `commit`. Rounds in which the host asks for no draft have a `commit` alone, one for
/// each or one for several of them. After a fault the group is only dropped.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = DraftRowsRef)))]
pub struct DraftRows {
    /// Destroys the group.
    pub drop: extern "C" fn(*mut c_void),
    /// A part of the prompt was processed by the target.
    pub prefill: extern "C" fn(*mut c_void, &Advance<'_>) -> Reply<()>,
    /// Proposes tokens.
    pub draft: extern "C" fn(*mut c_void, &DraftRequest<'_>) -> Reply<DraftReply>,
    /// The target verified a draft: exactly these tokens are kept.
    pub commit: extern "C" fn(*mut c_void, &Advance<'_>) -> Reply<()>,
    /// Keeps the given rows, in the given (strictly ascending) order, and forgets the others.
    pub filter_rows: extern "C" fn(*mut c_void, keep: RSlice<'_, u32>) -> Reply<()>,
    /// Appends the rows of another group of the same drafter, which is consumed whatever the
    /// outcome. On a fault this group is as before. Only between rounds.
    pub append: extern "C" fn(*mut c_void, other: RawRows) -> Reply<()>,
    /// Rows in the group. After a panic 0: this slot alone has no other way to fail.
    pub row_count: extern "C" fn(*mut c_void) -> u32,
    /// What one row needs to go on from here in another group; nothing changes here. None: the drafter
    /// keeps no more of a row than its tokens, and is told them again with `prefill`. To one that wants taps
    /// they can't be told: a row of its that gives none is not resumed. Only between rounds, when some of
    /// the prompt is processed.
    pub capture: extern "C" fn(*mut c_void, row: u32) -> Reply<ROption<RowState>>,
    /// Puts a new group of one row where the row of a captured state was, instead of the first `prefill`.
    #[sabi(last_prefix_field)]
    pub restore: extern "C" fn(*mut c_void, &RowState) -> Reply<()>,
}
