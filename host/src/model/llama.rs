//! Llama (and what shares its architecture under that `model_type`), safetensors and GGUF.

use plugin_api::layers::{AttentionConfig, DecoderLayer, FeedForwardConfig, KvSource, Rope};
use plugin_api::{Config, Result, Weights};

use super::decoder::{Decoder, Layer, Sizes};

pub(super) fn build(config: &Config, w: &Weights) -> Result<Decoder> {
    dense(config, w, false)
}

/// The layout that Llama and Qwen3 share; `qk_norm`: queries and keys are normalised per head.
pub(super) fn dense(config: &Config, w: &Weights, qk_norm: bool) -> Result<Decoder> {
    for (key, only) in [("hidden_act", "silu"), ("hidden_activation", "silu")] {
        if let Some(act) = config.opt_str(key)?.filter(|act| *act != only) {
            return Err(config.error(key, format!("is {act}; supported: {only}")));
        }
    }
    if config.opt_bool("use_sliding_window")?.unwrap_or(false) {
        return Err(config.error("use_sliding_window", "is true, which is not supported"));
    }
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.opt_size("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match config.opt_size("head_dim")? {
        Some(dim) => dim,
        // Qwen3's heads are wider than hidden / heads, so there it must be stated.
        None if qk_norm || hidden % heads != 0 => {
            return Err(config.error("head_dim", "is missing"));
        }
        None => hidden / heads,
    };
    if heads % kv_heads != 0 {
        let problem = format!("is {kv_heads}, not a divisor of {heads} heads");
        return Err(config.error("num_key_value_heads", problem));
    }
    config.check_heads("num_attention_heads", heads, head_dim)?;
    let eps = config.float("rms_norm_eps")?;
    let model = w.child("model");
    let mut rope = Rope::from_config(config, head_dim)?;
    if w.contains("rope_freqs.weight") {
        rope = rope.with_factors(&w.tensor("rope_freqs.weight")?.to_vec::<f32>()?)?;
    }
    let attention = AttentionConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        rope,
        qk_norm: qk_norm.then_some(eps),
        gated: false,
        scale: (head_dim as f32).powf(-0.5),
        window: 0,
        kv: KvSource::Own,
        v_norm: None,
    };
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
