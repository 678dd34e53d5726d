//! Drafters on disk: what a directory holds, and how the head inside a Qwen3.5 checkpoint is split off.
//!
//! Runs no plugin: what is said here follows from configs and from tensors' names and shapes.

mod head;
mod kind;
mod pieces;
mod split;

pub use head::Norms;
pub use kind::{Description, Kind, Quantization, Target, describe};
pub use split::{SplitOptions, Summary, split};
