//! What the config of a Llama or a Qwen3 says of its layers; drafters of such layers have the same keys.

use crate::config::Config;
use crate::error::Result;
use crate::layers::{AttentionConfig, KvSource, Rope};

/// Full causal attention as a flat config describes it. `qk_norm`: queries and keys are normalised per head
/// (Qwen3).
///
/// # Errors
/// A key that matters is missing, contradicts another, or asks for what these layers are not.
pub fn dense_attention(config: &Config, qk_norm: bool) -> Result<AttentionConfig> {
    for (key, only) in [("hidden_act", "silu"), ("hidden_activation", "silu")] {
        if let Some(act) = config.opt_str(key)?.filter(|act| *act != only) {
            return Err(config.error(key, format!("is {act}; supported: {only}")));
        }
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
    let (rope, factor) = Rope::from_config(config, head_dim)?;
    Ok(AttentionConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        rope,
        qk_norm: qk_norm.then_some(eps),
        gated: false,
        scale: (head_dim as f32).powf(-0.5) * factor,
        window: 0,
        kv: KvSource::Own,
        v_norm: None,
        block: false,
    })
}
