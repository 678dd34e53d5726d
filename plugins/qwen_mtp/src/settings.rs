//! What the checkpoint's config and the user's options say.

use plugin_api::layers::{AttentionConfig, FeedForwardConfig, KvSource, Rope};
use plugin_api::{Checkpoint, Config, Options, Result, Tap};

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
    /// Ascending ids that the draft head is restricted to.
    pub draft_vocab: Option<Vec<u32>>,
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
            match checkpoint.json("draft_vocab.json")? {
                Some(file) => Some(ascending_ids(&file)?),
                None => None,
            }
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
                rope: Rope::from_config(text, head_dim)?,
                qk_norm: Some(eps),
                gated: true,
                scale: (head_dim as f32).powf(-0.5),
                window: 0,
                kv: KvSource::Own,
                v_norm: None,
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
        const NEEDED: [&str; 12] = [
            "fc.weight",
            "pre_fc_norm_embedding.weight",
            "pre_fc_norm_hidden.weight",
            "norm.weight",
            "layers.0.input_layernorm.weight",
            "layers.0.post_attention_layernorm.weight",
            "layers.0.self_attn.q_proj.weight",
            "layers.0.self_attn.k_proj.weight",
            "layers.0.self_attn.v_proj.weight",
            "layers.0.self_attn.o_proj.weight",
            "layers.0.self_attn.q_norm.weight",
            "layers.0.self_attn.k_norm.weight",
        ];
        let mlp: &[&str] = match self.mlp {
            FeedForwardConfig::Dense(_) => &[
                "layers.0.mlp.gate_proj.weight",
                "layers.0.mlp.up_proj.weight",
                "layers.0.mlp.down_proj.weight",
            ],
            // The experts themselves come in several layouts.
            FeedForwardConfig::Sparse { .. } => &[
                "layers.0.mlp.gate.weight",
                "layers.0.mlp.shared_expert_gate.weight",
                "layers.0.mlp.shared_expert.gate_proj.weight",
                "layers.0.mlp.shared_expert.up_proj.weight",
                "layers.0.mlp.shared_expert.down_proj.weight",
            ],
        };
        let (prefix, leaves) = (self.prefix(), NEEDED.iter().chain(mlp));
        checkpoint.require_tensors(leaves.map(|leaf| format!("{prefix}{leaf}")))
    }
}

/// The ids of a `draft_vocab.json`.
fn ascending_ids(file: &Config) -> Result<Vec<u32>> {
    let ids = file
        .opt_ints("ids")?
        .ok_or_else(|| file.error("ids", "is missing"))?;
    let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
    if ids.is_empty() || ids[0] < 0 || !ascending {
        return Err(file.error("ids", "must be strictly ascending token ids"));
    }
    Ok(ids.into_iter().map(|id| id as u32).collect())
}
