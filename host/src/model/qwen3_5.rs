//! Qwen3.5, dense or with experts: Gated DeltaNet layers with a gated full attention every few.
//!
//! Raw checkpoints store most norms minus one.

use plugin_api::layers::{
    AttentionConfig, DecoderLayer, FeedForwardConfig, GatedDeltaConfig, KvSource, Rope,
};
use plugin_api::{Config, Result, Weights};

use super::decoder::{Decoder, Layer, Sizes};
use super::layout::Layout;
use super::llama::tied;

/// `experts`: whether the model type says that there are some.
pub(super) fn build(config: &Config, w: &Weights, experts: bool) -> Result<Decoder> {
    let text = config.section("text_config")?;
    let text = text.as_ref().unwrap_or(config);
    if experts {
        text.size("num_experts")?;
    }
    let layout = Layout::find(w);
    let hidden = text.size("hidden_size")?;
    let eps = text.float("rms_norm_eps")?;
    let heads = text.size("num_attention_heads")?;
    // Engines disagree on the default of each of these.
    let head_dim = text.size("head_dim")?;
    let kv_heads = text.size("num_key_value_heads")?;
    if heads % kv_heads != 0 {
        let problem = format!("is {kv_heads}, not a divisor of {heads} heads");
        return Err(text.error("num_key_value_heads", problem));
    }
    text.check_heads("num_attention_heads", heads, head_dim)?;
    if text.opt_bool("attn_output_gate")? == Some(false) {
        return Err(text.error("attn_output_gate", "is false, which is not supported"));
    }
    let (rope, factor) = Rope::from_config(text, head_dim)?;
    let attention = AttentionConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        rope,
        qk_norm: Some(eps),
        gated: true,
        scale: (head_dim as f32).powf(-0.5) * factor,
        window: 0,
        kv: KvSource::Own,
        v_norm: None,
        block: false,
    };
    let delta = GatedDeltaConfig {
        hidden,
        key_heads: text.size("linear_num_key_heads")?,
        value_heads: text.size("linear_num_value_heads")?,
        key_dim: text.size("linear_key_head_dim")?,
        value_dim: text.size("linear_value_head_dim")?,
        kernel: text.size("linear_conv_kernel_dim")?,
        eps,
    };
    for (key, heads, dim) in [
        ("linear_num_key_heads", delta.key_heads, delta.key_dim),
        ("linear_num_value_heads", delta.value_heads, delta.value_dim),
    ] {
        text.check_heads(key, heads, dim)?;
    }
    if delta.value_heads % delta.key_heads != 0 {
        let problem = format!("is {}, not a divisor of the value heads", delta.key_heads);
        return Err(text.error("linear_num_key_heads", problem));
    }
    let mlp = FeedForwardConfig::qwen(text)?;
    let kinds = layer_kinds(text)?;
    let raw = is_raw(&layout, &kinds);
    let model = layout.model.with_norm_offset(if raw { 1.0 } else { 0.0 });
    let layers = (0..)
        .zip(&kinds)
        .map(|(i, kind)| {
            let w = model.child("layers").child(i);
            let layer = match kind {
                Kind::Full => DecoderLayer::attention(&w, attention.clone(), mlp, eps),
                Kind::Linear => DecoderLayer::delta(&w, delta, mlp, eps),
            };
            layer.map(Layer::Plain)
        })
        .collect::<Result<_>>()?;
    let sizes = Sizes {
        hidden,
        vocab: text.size("vocab_size")?,
        eps,
        tied: match text.opt_bool("tie_word_embeddings")? {
            Some(tied) => tied,
            None => tied(config, &layout.head)?,
        },
    };
    Decoder::load(&model, &layout.head, sizes, layers)
}

/// Whether norms are stored minus one: a raw file has its convolutions as `[C, 1, K]`. (The presence of
/// `mtp.*` says nothing: converted files may carry them too.)
fn is_raw(layout: &Layout, kinds: &[Kind]) -> bool {
    match kinds.iter().position(|kind| *kind == Kind::Linear) {
        Some(layer) => {
            let layer = layout.model.child("layers").child(layer);
            let conv = layer.child("linear_attn").child("conv1d").tensor("weight");
            conv.is_ok_and(|conv| conv.dim(-1) != 1)
        }
        // Without a convolution the prefix has to tell.
        None => !layout.converted,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Linear,
    Full,
}

/// The kind of every layer: listed, or one full attention per interval.
fn layer_kinds(text: &Config) -> Result<Vec<Kind>> {
    let count = text.size("num_hidden_layers")?;
    let Some(listed) = text.get("layer_types") else {
        let interval = text.size("full_attention_interval")?;
        return Ok((1..=count)
            .map(|i| {
                if i % interval == 0 {
                    Kind::Full
                } else {
                    Kind::Linear
                }
            })
            .collect());
    };
    let kinds: Option<Vec<_>> = listed.as_array().and_then(|items| {
        items
            .iter()
            .map(|item| match item.as_str()? {
                "linear_attention" => Some(Kind::Linear),
                "full_attention" => Some(Kind::Full),
                _ => None,
            })
            .collect()
    });
    match kinds {
        Some(kinds) if kinds.len() == count as usize => Ok(kinds),
        _ => {
            let expected = format!(
                "must list {count} times linear_attention or full_attention, as num_hidden_layers says"
            );
            Err(text.error("layer_types", expected))
        }
    }
}
