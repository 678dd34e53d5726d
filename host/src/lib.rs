//! The engine of `mlxhost`: language models on MLX, made faster by speculative decoding through
//! plugins. `docs/` describes the architecture.

pub mod backend;
pub mod check;
pub mod checkpoint;
pub mod drafter;
pub mod engine;
mod error;
pub mod kernels;
pub mod model;
pub mod paths;
pub mod plugin;
pub mod prefix;
pub mod text;

pub use error::{LoadError, LoadErrorKind};
