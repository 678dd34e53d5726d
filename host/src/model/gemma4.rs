//! Gemma 4, text: sliding and full attention, per-layer embeddings and shared keys (E2B, E4B), keys that
//! are values too (31B), experts (26B-A4B).

use plugin_api::layers::{
    GemmaConfig, GemmaKind, GemmaLayer, Linear, RmsNorm, gemma_attention, gemma_experts,
};
use plugin_api::{Config, DonorFacts, Result, Tensor, Weights};

use super::decoder::{Decoder, Extras, Layer, Sizes};
use super::layout::Layout;

pub(super) fn build(config: &Config, w: &Weights) -> Result<Decoder> {
    let text = config.section("text_config")?;
    let text = text.as_ref().unwrap_or(config);
    let layout = Layout::find(w);
    if text.opt_str("use_bidirectional_attention")? == Some("all") {
        return Err(text.error(
            "use_bidirectional_attention",
            "is all, which is not supported",
        ));
    }
    let hidden = text.size("hidden_size")?;
    let eps = text.float("rms_norm_eps")?;
    let kinds = GemmaKind::of_layers(text)?;
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
    let experts = gemma_experts(text)?;
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
        let attention = gemma_attention(text, index, kind, is_shared)?;
        let config = GemmaConfig {
            hidden,
            intermediate: if wide && is_shared {
                2 * intermediate
            } else {
                intermediate
            },
            layer_input,
            experts,
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
        donors: donors(text, &kinds[..own])?,
    };
    Ok(Decoder::load(&layout.model, &layout.head, sizes, layers)?.with(extras))
}

/// The last layer of each kind that has keys of its own.
fn donors(text: &Config, kinds: &[GemmaKind]) -> Result<Vec<(usize, DonorFacts)>> {
    let mut donors = Vec::new();
    for kind in [GemmaKind::Full, GemmaKind::Sliding] {
        if let Some(index) = kinds.iter().rposition(|&other| other == kind) {
            let attention = gemma_attention(text, index, kind, false)?;
            let facts = DonorFacts {
                kind: kind.donor(),
                kv_heads: attention.kv_heads as u32,
                head_dim: attention.head_dim as u32,
                window: attention.window as u32,
            };
            donors.push((index, facts));
        }
    }
    Ok(donors)
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
