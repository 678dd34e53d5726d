//! The layers that target models and drafters are made of, over [`crate::Tensor`].
//!
//! Hiddens are `[B, T, hidden]`: `B` rows, `T` columns. Rows are ragged: each stands at its own
//! offset and may fill fewer columns than the widest; [`Step`] says which.
//!
//! ```no_run
//! use plugin_api::layers::{DecoderLayer, LayerCache, Step};
//! use plugin_api::{Result, Tensor};
//!
//! /// One more column for two rows that stand at 7 and 12: `[2, 1, hidden]` in and out.
//! fn step(layer: &DecoderLayer, cache: &mut LayerCache, x: &Tensor) -> Result<Tensor> {
//!     let step = Step::new(&[7, 12], &[1, 1], 1, false)?;
//!     layer.forward(x, &step, cache)
//! }
//! ```

mod attention;
mod cache;
mod decoder;
mod delta;
mod dense_config;
mod experts;
mod feed_forward;
mod gemma;
mod gemma_config;
mod kv;
mod linear;
mod matrix;
mod mlp;
mod norm;
mod project;
mod rope;
mod step;

pub use attention::{Attention, AttentionConfig, KvSource};
pub use cache::{DeltaCache, KvCache, LayerCache};
pub use decoder::{ATTENTION_LAYER, DecoderLayer, Mixer};
pub use delta::{GatedDeltaConfig, GatedDeltaNet};
pub use dense_config::dense_attention;
pub use experts::{Experts, ExpertsConfig, Routes};
pub use feed_forward::{FeedForward, FeedForwardConfig, SparseMlp};
pub use gemma::{GEMMA_LAYER, GemmaConfig, GemmaLayer};
pub use gemma_config::{GemmaKind, gemma_attention, gemma_experts};
pub use kv::QuantizedKv;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::RmsNorm;
pub use project::Project;
pub use rope::Rope;
pub use step::Step;
