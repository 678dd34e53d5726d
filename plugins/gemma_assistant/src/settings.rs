//! What the checkpoint's config and the user's options say.

use plugin_api::layers::{AttentionConfig, GEMMA_LAYER, GemmaKind, gemma_attention};
use plugin_api::{Checkpoint, DonorKind, Options, Result};

/// Where a draft's queries stand and how far back they see: engines differ. With `n` processed tokens and
/// a window of `W`:
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// At `n`, all steps of a draft; the last `W + 1` keys. As in the publisher's code.
    Publisher,
    /// At `n - 1`; the last `W` keys in the first draft, and `W - 1` in all others.
    MlxVlm,
    /// At `n + k` in step `k`; the last `W - 1` keys.
    Optiq,
}

impl Positions {
    /// The position of step `k` of a draft after `n` tokens.
    pub fn of(self, n: i32, k: i32) -> i32 {
        match self {
            Self::Publisher => n,
            Self::MlxVlm => n - 1,
            Self::Optiq => n + k,
        }
    }

    /// Keys of sliding layers that are seen where the target sees `window`.
    pub fn window(self, window: i32, first_draft: bool) -> i32 {
        match self {
            Self::Publisher => window + 1,
            Self::MlxVlm if first_draft => window,
            // A window of 1 is no window at all, but it must not become 0, which means all.
            Self::MlxVlm | Self::Optiq => (window - 1).max(1),
        }
    }
}

/// The ordered head: tokens are sorted into groups, and only those of the best groups are drafted.
#[derive(Clone, Copy)]
pub struct Ordered {
    /// Groups of the same size.
    pub centroids: i32,
    /// Groups whose tokens are looked at.
    pub best: i32,
}

/// An assistant's shape and the way it is used.
pub struct Settings {
    /// Width of the target's residual stream.
    pub backbone: i32,
    pub hidden: i32,
    pub vocab: i32,
    pub intermediate: i32,
    pub eps: f32,
    /// The window of the target's sliding layers.
    pub window: i32,
    pub layers: Vec<(GemmaKind, AttentionConfig)>,
    /// The head is the embedding.
    pub tied: bool,
    pub ordered: Option<Ordered>,
    pub positions: Positions,
}

impl Settings {
    pub fn read(checkpoint: &Checkpoint, options: &mut Options) -> Result<Self> {
        let config = checkpoint.config()?;
        let Some(text) = config.section("text_config")? else {
            return Err(config.error("text_config", "is missing"));
        };
        if text
            .get("hidden_size_per_layer_input")
            .is_some_and(|n| n.as_i64() != Some(0))
        {
            return Err(text.error("hidden_size_per_layer_input", "must be 0 in an assistant"));
        }
        if text.opt_bool("enable_moe_block")?.unwrap_or(false) {
            return Err(text.error("enable_moe_block", "is true, which assistants cannot have"));
        }
        let kinds = GemmaKind::of_layers(&text)?;
        // None of them has keys of its own, however it is said.
        let shared = text.get("num_kv_shared_layers").and_then(|n| n.as_u64());
        if shared.is_some_and(|n| n != 0 && n != kinds.len() as u64) {
            let problem = format!("must be all {} layers of an assistant", kinds.len());
            return Err(text.error("num_kv_shared_layers", problem));
        }
        let positions = options.take_choice(
            "positions",
            &[
                ("publisher", Positions::Publisher),
                ("mlx_vlm", Positions::MlxVlm),
                ("optiq", Positions::Optiq),
            ],
        )?;
        let positions = positions.unwrap_or(Positions::Publisher);
        let mut layers = Vec::with_capacity(kinds.len());
        let mut window = 0;
        for (index, kind) in kinds.into_iter().enumerate() {
            let attention = gemma_attention(&text, index, kind, true)?;
            if kind == GemmaKind::Sliding {
                window = attention.window;
            }
            layers.push((kind, attention));
        }
        let vocab = text.size("vocab_size")?;
        let ordered = match config.opt_bool("use_ordered_embeddings")?.unwrap_or(false) {
            false => None,
            true => {
                let ordered = Ordered {
                    centroids: config.size("num_centroids")?,
                    best: config.size("centroid_intermediate_top_k")?,
                };
                if vocab % ordered.centroids != 0 || ordered.best > ordered.centroids {
                    let problem = format!("is {}, for {vocab} tokens", ordered.centroids);
                    return Err(config.error("num_centroids", problem));
                }
                Some(ordered)
            }
        };
        Ok(Self {
            backbone: config.size("backbone_hidden_size")?,
            hidden: text.size("hidden_size")?,
            vocab,
            intermediate: text.size("intermediate_size")?,
            eps: text.float("rms_norm_eps")?,
            window,
            layers,
            tied: config.opt_bool("tie_word_embeddings")?.unwrap_or(true),
            ordered,
            positions,
        })
    }

    /// The kinds of keys that its layers look at.
    pub fn donors(&self) -> Vec<DonorKind> {
        let has = |kind: &GemmaKind| self.layers.iter().any(|(own, _)| own == kind);
        let kinds = [GemmaKind::Full, GemmaKind::Sliding].into_iter();
        kinds.filter(has).map(GemmaKind::donor).collect()
    }

    /// Refuses a checkpoint that lacks tensors, naming them.
    pub fn require_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        let mut needed: Vec<String> = [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "pre_projection.weight",
            "post_projection.weight",
        ]
        .map(String::from)
        .into();
        if !self.tied {
            needed.push("lm_head.weight".into());
        }
        if self.ordered.is_some() {
            needed.push("masked_embedding.centroids.weight".into());
            needed.push("masked_embedding.token_ordering".into());
        }
        for layer in 0..self.layers.len() {
            needed.extend(GEMMA_LAYER.map(|leaf| format!("model.layers.{layer}.{leaf}")));
        }
        checkpoint.require_tensors(needed)?;
        checkpoint.require_layers("model.layers.", self.layers.len())
    }
}
