//! Plugins: found, checked and loaded; and the drafters they make.
//!
//! A library passes four gates before it drafts: its [`Manifest`] is read without running it, its
//! version compared, its table layouts checked, and its drafter paired with the target.

mod calls;
mod discover;
mod drafter;
mod gate;
mod library;
mod lock;
mod manifest;
mod registry;
mod rows;

pub(crate) use calls::Calls;
pub use calls::Hang;
pub use discover::{Candidate, Place, Search, Searched, Verdict};
pub(crate) use drafter::MAX_DEPTH;
pub use drafter::{Drafter, DrafterSource};
pub use gate::check_version;
pub use library::Library;
pub use lock::Lock;
pub use manifest::{Manifest, PluginFile};
pub use registry::{Choice, Registry};
pub use rows::{Draft, Progress, Rows};
