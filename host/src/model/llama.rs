//! Llama (and what shares its architecture under that `model_type`), safetensors and GGUF.

use plugin_api::layers::{DecoderLayer, FeedForwardConfig, dense_attention};
use plugin_api::{Config, Result, Weights};

use super::decoder::{Decoder, Layer, Sizes};

pub(super) fn build(config: &Config, w: &Weights) -> Result<Decoder> {
    dense(config, w, false)
}

/// The layout that Llama and Qwen3 share; `qk_norm`: queries and keys are normalised per head.
pub(super) fn dense(config: &Config, w: &Weights, qk_norm: bool) -> Result<Decoder> {
    if config.opt_bool("use_sliding_window")?.unwrap_or(false) {
        return Err(config.error("use_sliding_window", "is true, which is not supported"));
    }
    let mut attention = dense_attention(config, qk_norm)?;
    let hidden = attention.hidden;
    let eps = config.float("rms_norm_eps")?;
    let model = w.child("model");
    if w.contains("rope_freqs.weight") {
        let factors = w.tensor("rope_freqs.weight")?.to_vec::<f32>()?;
        attention.rope = attention.rope.with_factors(&factors)?;
    }
    let mlp = FeedForwardConfig::Dense(config.size("intermediate_size")?);
    let layers = (0..config.size("num_hidden_layers")?)
        .map(|i| {
            let w = model.child("layers").child(i);
            DecoderLayer::attention(&w, attention.clone(), mlp, eps).map(Layer::Plain)
        })
        .collect::<Result<_>>()?;
    let sizes = Sizes {
        hidden,
        vocab: config.size("vocab_size")?,
        eps,
        tied: tied(config, w)?,
    };
    Decoder::load(&model, w, sizes, layers)
}

/// Whether the head is the embedding: as the config says, else by the absence of a head.
pub(super) fn tied(config: &Config, head: &Weights) -> Result<bool> {
    let stated = config.opt_bool("tie_word_embeddings")?;
    Ok(stated.unwrap_or(!head.contains("lm_head.weight")))
}
