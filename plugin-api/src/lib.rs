//! The stable ABI of `mlxhost` drafter plugins, and the SDK over it.
//!
//! A drafter proposes tokens; the host's target model verifies them. A drafter is a `cdylib` that
//! depends on this crate alone: it never sees MLX, a model or a cache, only [`Tensor`]s whose ops
//! the host provides, and the [`Target`]'s capabilities.
//!
//! `mlxhost plugins new NAME` writes a crate that drafts, to begin with.
//!
//! * To write a drafter without tensors, implement [`DraftSource`] and wrap it in [`SourceRows`];
//!   with tensors, implement [`DraftRows`]. Either way implement [`Drafter`] and call
//!   [`export_plugin!`].
//! * [`block`] makes a [`DraftRows`] of a drafter that drafts several tokens in one pass.
//! * [`layers`] has what models are made of; [`sampling`] the sampler that the target uses.
//! * [`abi`] is the boundary itself, for hosts and for the curious.
//!
//! Everything runs on the host's engine thread, the log excepted. A panic or an error in a drafter costs its
//! requests their speed, never their output.
//!
//! # Features
//!
//! * `log` (on by default): lines of the [`log`](https://docs.rs/log) crate, of the plugin and of what it depends
//!   on, go to the host's log.
//! * `tracing`: so do events of [`tracing`](https://docs.rs/tracing), with their fields. Spans are let be.
//!
//! # Without a host
//!
//! Tensors are the host's. In a plugin's own tests there is none, and what makes or reads a [`Tensor`], a
//! [`Checkpoint`] or a [`Target`] panics. The rest works: options, configs, facts of a target, and whatever the
//! drafter does with token ids.

#![warn(missing_docs)]

pub use abi_stable;

pub mod abi;
pub mod block;
mod checkpoint;
mod config;
mod drafter;
mod error;
#[doc(hidden)]
pub mod export;
mod forward;
pub mod guard;
mod head;
mod host;
pub mod layers;
mod options;
mod rows;
pub mod sampling;
mod state;
mod target;
mod tensor;

pub use abi::{DType, DonorFacts, DonorKind, RowSpec, Tap};
pub use checkpoint::{Checkpoint, Weights};
pub use config::Config;
pub use drafter::{
    Advance, Donor, DraftRequest, DraftRows, DraftSource, Drafter, DrafterInfo, Drafts, RowAdvance,
    SourceRows,
};
pub use error::{Error, Result};
pub use head::{DraftVocabulary, TargetHead};
pub use host::{install, log, memory_used};
pub use options::Options;
pub use rows::{LastHidden, Shared, kept_rows};
pub use state::RowState;
pub use target::{HeadSubset, Target, TargetFacts};
pub use tensor::{Element, Mask, Tensor};
