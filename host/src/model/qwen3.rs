//! Qwen3, dense.

use plugin_api::{Config, Result, Weights};

use super::decoder::Decoder;
use super::llama;

pub(super) fn build(config: &Config, w: &Weights) -> Result<Decoder> {
    llama::dense(config, w, true)
}
