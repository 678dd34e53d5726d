//! What the checkpoint's config and the user's options say.

use plugin_api::layers::{ATTENTION_LAYER, AttentionConfig, FeedForwardConfig, KvSource, Rope};
use plugin_api::{Checkpoint, DraftVocabulary, Options, Result, Tap};

/// What happens to the cached rows of drafted tokens that were accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// They are computed again from the target's true hiddens.
    Recompute,
    /// They stay as drafted, from the head's own outputs.
    Keep,
}

/// A head's shape and the way it is used.
pub struct Settings {
    /// The `mtp.*` tensors of a full checkpoint, whose norms are stored minus one.
    pub inside_target: bool,
    pub hidden: i32,
    pub vocab: i32,
    pub mlp: FeedForwardConfig,
    pub eps: f32,
    pub attention: AttentionConfig,
    /// The depth it was made for.
    pub depth: u32,
    pub tap: Tap,
    pub commit: Commit,
    pub draft_vocab: Option<DraftVocabulary>,
}

impl Settings {
    pub fn read(checkpoint: &Checkpoint, options: &mut Options) -> Result<Self> {
        let config = checkpoint.config()?;
        let inside_target = match config.str("model_type")? {
            "qwen3_5_mtp" => false,
            "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" => true,
            other => {
                let problem = format!(
                    "is {other:?}; expected qwen3_5_mtp, or qwen3_5 or qwen3_5_moe with mtp.*"
                );
                return Err(config.error("model_type", problem));
            }
        };
        let text = config.section("text_config")?;
        let text = text.as_ref().unwrap_or(&config);
        if let Some(layers) = text.opt_size("mtp_num_hidden_layers")?.filter(|&n| n != 1) {
            let problem = format!("is {layers}; heads of one layer are supported");
            return Err(text.error("mtp_num_hidden_layers", problem));
        }
        if text.opt_bool("mtp_use_dedicated_embeddings")? == Some(true) {
            return Err(text.error(
                "mtp_use_dedicated_embeddings",
                "is true, which is not supported",
            ));
        }
        if text.opt_bool("attn_output_gate")? == Some(false) {
            return Err(text.error("attn_output_gate", "is false, which is not supported"));
        }
        let hidden = text.size("hidden_size")?;
        let head_dim = text.size("head_dim")?;
        let eps = text.float("rms_norm_eps")?;
        let (heads, kv_heads) = (
            text.size("num_attention_heads")?,
            text.size("num_key_value_heads")?,
        );
        if heads % kv_heads != 0 {
            let problem = format!("is {kv_heads}, not a divisor of {heads} heads");
            return Err(text.error("num_key_value_heads", problem));
        }
        text.check_heads("num_attention_heads", heads, head_dim)?;
        let (rope, factor) = Rope::from_config(text, head_dim)?;
        // block_size counts the pending token too.
        let depth = match config.opt_size("block_size")? {
            Some(block) => (block - 1).clamp(1, 16) as u32,
            None => 2,
        };
        let tap = options.take_choice(
            "hidden",
            &[("post_norm", Tap::FINAL), ("pre_norm", Tap::PRE_NORM)],
        )?;
        let commit = options.take_choice(
            "commit",
            &[("recompute", Commit::Recompute), ("keep", Commit::Keep)],
        )?;
        let restrict = options.take_choice("draft_vocab", &[("auto", true), ("full", false)])?;
        let draft_vocab = if restrict.unwrap_or(true) {
            DraftVocabulary::of(checkpoint)?
        } else {
            None
        };
        Ok(Self {
            inside_target,
            hidden,
            vocab: text.size("vocab_size")?,
            mlp: FeedForwardConfig::qwen(text)?,
            eps,
            attention: AttentionConfig {
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
            },
            depth,
            tap: tap.unwrap_or(Tap::FINAL),
            commit: commit.unwrap_or(Commit::Recompute),
            draft_vocab,
        })
    }

    /// What its tensors' names begin with.
    pub fn prefix(&self) -> &'static str {
        if self.inside_target { "mtp." } else { "" }
    }

    /// Refuses a checkpoint that lacks tensors, naming them.
    pub fn require_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        let prefix = self.prefix();
        let own = [
            "fc.weight",
            "pre_fc_norm_embedding.weight",
            "pre_fc_norm_hidden.weight",
            "norm.weight",
        ];
        let layer = ATTENTION_LAYER.iter().chain(self.mlp.tensors());
        let layer = layer.map(|leaf| format!("layers.0.{leaf}"));
        let needed = own.map(String::from).into_iter().chain(layer);
        checkpoint.require_tensors(needed.map(|leaf| format!("{prefix}{leaf}")))?;
        checkpoint.require_layers(&format!("{prefix}layers."), 1)
    }
}
