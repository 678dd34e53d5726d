//! Gemma 4, text: sliding and full attention, per-layer embeddings and shared keys (E2B, E4B), keys that
//! are values too (31B). The mixture of experts (26B-A4B) is refused.

use plugin_api::layers::{
    AttentionConfig, GemmaConfig, GemmaLayer, KvSource, Linear, RmsNorm, Rope,
};
use plugin_api::{Config, Result, Tensor, Weights};

use super::decoder::{Decoder, Extras, Layer, Sizes};
use super::layout::Layout;

pub(super) fn build(config: &Config, w: &Weights) -> Result<Decoder> {
    let text = config.section("text_config")?;
    let text = text.as_ref().unwrap_or(config);
    let layout = Layout::find(w);
    for (key, only) in [("hidden_activation", "gelu_pytorch_tanh")] {
        if let Some(act) = text.opt_str(key)?.filter(|act| *act != only) {
            return Err(text.error(key, format!("is {act}; supported: {only}")));
        }
    }
    if text.opt_bool("enable_moe_block")?.unwrap_or(false) {
        return Err(text.error("enable_moe_block", "is true, which is not supported"));
    }
    if text.opt_str("use_bidirectional_attention")? == Some("all") {
        return Err(text.error(
            "use_bidirectional_attention",
            "is all, which is not supported",
        ));
    }
    let hidden = text.size("hidden_size")?;
    let eps = text.float("rms_norm_eps")?;
    let kinds = layer_kinds(text)?;
    let count = kinds.len();
    // Engines disagree on the defaults of these, so they must be stated.
    let shared = match text.get("num_kv_shared_layers").and_then(|n| n.as_u64()) {
        Some(n) if (n as usize) < count => n as usize,
        _ => {
            return Err(text.error(
                "num_kv_shared_layers",
                format!("must be 0 to {}", count - 1),
            ));
        }
    };
    let layer_input = match text.get("hidden_size_per_layer_input").map(|n| n.as_i64()) {
        Some(Some(0)) => 0,
        _ => text.size("hidden_size_per_layer_input")?,
    };
    let intermediate = text.size("intermediate_size")?;
    let wide = shared > 0 && text.opt_bool("use_double_wide_mlp")?.unwrap_or(false);

    let own = count - shared;
    let mut layers = Vec::with_capacity(count);
    let mut caches = Vec::with_capacity(count);
    for (index, &kind) in kinds.iter().enumerate() {
        let is_shared = index >= own;
        let source = match is_shared {
            false => index,
            true => kinds[..own]
                .iter()
                .rposition(|&other| other == kind)
                .ok_or_else(|| {
                    let problem = format!("leaves no layer whose keys layer {index} could share");
                    text.error("num_kv_shared_layers", problem)
                })?,
        };
        caches.push(source);
        let attention = attention(text, index, kind, is_shared, (hidden, eps))?;
        let config = GemmaConfig {
            hidden,
            intermediate: if wide && is_shared {
                2 * intermediate
            } else {
                intermediate
            },
            layer_input,
            eps,
        };
        let w = layout.model.child("layers").child(index);
        layers.push(Layer::Gemma(GemmaLayer::load(&w, attention, config)?));
    }
    let vocab = match config.opt_size("vocab_size")? {
        Some(vocab) => vocab,
        None => text.size("vocab_size")?,
    };
    let sizes = Sizes {
        hidden,
        vocab,
        eps,
        tied: text.opt_bool("tie_word_embeddings")?.unwrap_or(true),
    };
    let per_layer = match layer_input {
        0 => None,
        width => Some(PerLayer::load(
            &layout.model,
            text,
            count as i32,
            width,
            hidden,
            eps,
        )?),
    };
    let extras = Extras {
        embed_scale: Some((hidden as f32).sqrt()),
        softcap: text.opt_float("final_logit_softcapping")?,
        per_layer,
        caches: Some(caches),
    };
    Ok(Decoder::load(&layout.model, &layout.head, sizes, layers)?.with(extras))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sliding,
    Full,
}

fn layer_kinds(text: &Config) -> Result<Vec<Kind>> {
    let count = text.size("num_hidden_layers")? as usize;
    let kinds = text.get("layer_types").and_then(|value| {
        let items = value.as_array()?;
        items
            .iter()
            .map(|item| match item.as_str()? {
                "sliding_attention" => Some(Kind::Sliding),
                "full_attention" => Some(Kind::Full),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
    });
    match kinds {
        Some(kinds) if kinds.len() == count => Ok(kinds),
        _ => {
            let expected = format!(
                "must list {count} times sliding_attention or full_attention, as num_hidden_layers says"
            );
            Err(text.error("layer_types", expected))
        }
    }
}

fn attention(
    text: &Config,
    index: usize,
    kind: Kind,
    shared: bool,
    (hidden, eps): (i32, f32),
) -> Result<AttentionConfig> {
    // Newer files state sizes that differ per layer, and only there.
    let own = match text.section("per_layer_config")? {
        Some(all) => all.section(&index.to_string())?,
        None => None,
    };
    let stated = |key: &str| match &own {
        Some(own) => own.opt_size(key),
        None => Ok(None),
    };
    let tied = kind == Kind::Full && text.opt_bool("attention_k_eq_v")?.unwrap_or(false);
    let head_dim = match (stated("head_dim")?, kind) {
        (Some(dim), _) => dim,
        (None, Kind::Sliding) => text.size("head_dim")?,
        (None, Kind::Full) => text.size("global_head_dim")?,
    };
    let kv_heads = match (stated("num_key_value_heads")?, tied) {
        (Some(heads), _) => heads,
        (None, true) => match text.opt_size("num_global_key_value_heads")? {
            Some(heads) => heads,
            None => text.size("num_key_value_heads")?,
        },
        (None, false) => text.size("num_key_value_heads")?,
    };
    let heads = text.size("num_attention_heads")?;
    if heads % kv_heads != 0 {
        let problem = format!("is {kv_heads}, not a divisor of {heads} heads");
        return Err(text.error("num_key_value_heads", problem));
    }
    text.check_heads("num_attention_heads", heads, head_dim)?;
    if head_dim % 2 != 0 {
        return Err(text.error("head_dim", format!("is {head_dim}, an odd number")));
    }
    Ok(AttentionConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        rope: rope(text, kind, head_dim)?,
        qk_norm: Some(eps),
        gated: false,
        scale: 1.0,
        window: match kind {
            Kind::Sliding => text.size("sliding_window")?,
            Kind::Full => 0,
        },
        kv: match (shared, tied) {
            (true, _) => KvSource::Shared,
            (false, true) => KvSource::Tied,
            (false, false) => KvSource::Own,
        },
        v_norm: Some(eps),
    })
}

fn rope(text: &Config, kind: Kind, head_dim: i32) -> Result<Rope> {
    let name = match kind {
        Kind::Sliding => "sliding_attention",
        Kind::Full => "full_attention",
    };
    let parameters = text.section("rope_parameters")?;
    let Some(section) = parameters
        .and_then(|all| all.section(name).transpose())
        .transpose()?
    else {
        return Err(text.error("rope_parameters", format!("says nothing about {name}")));
    };
    let base = section.float("rope_theta")?;
    if base <= 0.0 {
        return Err(section.error(
            "rope_theta",
            format!("is {base}, expected a positive number"),
        ));
    }
    match section.str("rope_type")? {
        "default" => Ok(Rope::new(head_dim, base)),
        "proportional" => {
            let share = section.float("partial_rotary_factor")?;
            if !(0.0..=1.0).contains(&share) {
                let problem = format!("is {share}, expected 0 to 1");
                return Err(section.error("partial_rotary_factor", problem));
            }
            Rope::proportional(head_dim, base, share)
        }
        other => {
            let problem = format!("is {other}; supported: default, proportional");
            Err(section.error("rope_type", problem))
        }
    }
}

/// The inputs that each layer has of its own: from the tokens, and from the embedded tokens.
pub(super) struct PerLayer {
    embedding: Linear,
    projection: Linear,
    norm: RmsNorm,
    layers: i32,
    width: i32,
    hidden: i32,
}

impl PerLayer {
    fn load(
        w: &Weights,
        text: &Config,
        layers: i32,
        width: i32,
        hidden: i32,
        eps: f32,
    ) -> Result<Self> {
        let vocab = text.size("vocab_size_per_layer_input")?;
        let Some(all) = layers.checked_mul(width) else {
            return Err(text.error("hidden_size_per_layer_input", "is too large"));
        };
        Ok(Self {
            embedding: Linear::load(&w.child("embed_tokens_per_layer"), all, vocab)?,
            projection: Linear::load(&w.child("per_layer_model_projection"), hidden, all)?,
            norm: RmsNorm::load(&w.child("per_layer_projection_norm"), width, eps)?,
            layers,
            width,
            hidden,
        })
    }

    pub fn tensors(&self) -> Vec<&Tensor> {
        let linears = [&self.embedding, &self.projection].into_iter();
        linears
            .flat_map(Linear::tensors)
            .chain(self.norm.tensors())
            .collect()
    }

    /// From `ids` `[B, T]` and `h` `[B, T, hidden]`, `[B, T, width]` for each layer.
    pub fn inputs(&self, ids: &Tensor, h: &Tensor) -> Result<Vec<Tensor>> {
        let [rows, columns] = ids.dims()?;
        let shape = [rows, columns, self.layers, self.width];
        let tokens = self
            .embedding
            .lookup(ids)?
            .scale((self.width as f32).sqrt())?;
        let context = self
            .projection
            .forward(h)?
            .scale((self.hidden as f32).powf(-0.5))?;
        let context = self.norm.forward(&context.reshape(&shape)?)?;
        let both = context
            .add(&tokens.reshape(&shape)?)?
            .scale(0.5f32.sqrt())?;
        (0..self.layers)
            .map(|layer| {
                let own = both.slice(2, layer, layer + 1)?;
                own.reshape(&[rows, columns, self.width])
            })
            .collect()
    }
}
