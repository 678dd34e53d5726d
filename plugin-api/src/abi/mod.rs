//! The ABI: everything that crosses the boundary between the host and a plugin. Frozen as 1.0.
//!
//! Rules that hold for every table here (they are what "stable" means):
//!
//! * A table is a prefix type: within a major version a slot is appended, never moved, retyped, renamed or
//!   removed. One that comes after 1.0 stands below the `last_prefix_field` mark and is read as an `Option`; where
//!   it is absent the caller has another way, or an error, and never panics. A table holds 64 slots at most.
//! * A struct can't grow, as it is lent by reference and lies in lists: a new slot takes a new struct.
//! * Codes are numbers in a newtype, not Rust enums: an unknown one is an error, never undefined behaviour, so
//!   codes can be appended within a major version.
//! * No slot unwinds. A body that can panic runs inside [`crate::guard`] on the side that implements it, and the
//!   panic comes back as a [`Fault`].
//! * Ownership is written on each slot. Borrowed arguments live until the call returns. What is returned belongs to
//!   the caller.
//! * Everything happens on the host's engine thread, one call at a time. No slot may be called from another thread,
//!   except [`HostApi::log`].
//! * Every type derives `StableAbi` and is reached from [`PluginModule`]: the host compares the layouts of what is
//!   reached. Nothing depends on the compiler's version.
//!
//! What this is in bytes is written down in `abi/1.0.txt` of the crate's source, and a test compares. `docs/abi.md` in
//! the repository says how it grows.

mod host;
mod manifest;
mod plugin;
mod types;

pub use host::{
    Attend, Experts, GatedDelta, HostApi, HostApiRef, Projection, RawCheckpoint, RawMatrix,
};
pub use manifest::{Embedded, MAX_MANIFEST_BYTES, SECTION, section_bytes, total_len};
pub use plugin::{
    Advance, Donor, DonorFacts, DraftReply, DraftRequest, DraftRows, DraftRowsRef, Drafter,
    DrafterInfo, DrafterRef, LoadRequest, NamedTensor, OpenRequest, PluginModule, PluginModuleRef,
    RawDrafter, RawRows, RawTarget, RowSpec, RowState, Sampling, Tap, TargetFacts, TargetView,
    TargetViewRef,
};
pub use types::{
    AttentionMask, BinaryOp, DType, DonorKind, Fault, FaultCode, LogLevel, MAX_RANK, RawTensor,
    ReduceOp, Reply, TensorInfo, UnaryOp,
};

/// The symbol of a plugin's `abi_stable` library header, which leads to its root module.
pub const HEADER_SYMBOL: &str = "mlxhost_plugin_header";

/// The version of this ABI, as `major.minor.patch`.
pub const API_VERSION: &str = env!("CARGO_PKG_VERSION");

/// The oldest host that a plugin built with this crate can run on.
///
/// It moves only when the SDK starts to need a slot that older hosts lack.
pub const MIN_API_VERSION: &str = "1.0.0";
