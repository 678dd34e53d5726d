//! What the checkpoint's config and the user's options say. Three packagings are read: DeepSpec's own (a
//! flat copy of the target's config), a Qwen3 config with a `dflash_config` whose projector is "dspark",
//! and vLLM's speculators.

use plugin_api::block::{self, Thresholds};
use plugin_api::layers::{
    ATTENTION_LAYER, AttentionConfig, FeedForwardConfig, GEMMA_LAYER, GemmaKind, KvSource, Rope,
    dense_attention, gemma_attention,
};
use plugin_api::{Checkpoint, Config, Options, Result, Tap, TargetFacts};

/// The largest block that is computed.
const MAX_BLOCK: i32 = 256;

/// What the layers are those of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backbone {
    Qwen3,
    Gemma4,
}

/// How a draft depends on the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkovForm {
    Vanilla,
    Gated,
    Rnn,
}

/// A drafter's shape and the way it is used.
pub struct Settings {
    pub backbone: Backbone,
    pub hidden: i32,
    pub vocab: i32,
    /// Tokens that it drafts, if not all.
    pub draft_vocab: Option<i32>,
    pub intermediate: i32,
    pub eps: f32,
    pub target_layers: Option<i32>,
    pub layers: Vec<AttentionConfig>,
    /// Pairs of neighbouring dimensions turn, not of halves.
    pub interleaved: bool,
    pub taps: Vec<Tap>,
    /// Columns of a block,
    pub columns: i32,
    /// of which the first that predicts,
    pub first: i32,
    pub mask: i32,
    /// A factor on embedded tokens.
    pub embed_scale: Option<f32>,
    pub softcap: Option<f32>,
    pub rank: i32,
    pub markov: MarkovForm,
    pub confidence: bool,
    pub confidence_with_markov: bool,
    pub thresholds: Thresholds,
    /// Whether it has an embedding and a head of its own; else they are the target's.
    pub own_embedding: bool,
    pub own_head: bool,
    /// Whether it is packaged as DeepSpec does, where no part of these is left out.
    is_whole: bool,
}

impl Settings {
    pub fn read(checkpoint: &Checkpoint, options: &mut Options) -> Result<Self> {
        let top = checkpoint.config()?;
        let own = top.section("dflash_config")?;
        let inner = top.section("transformer_layer_config")?;
        // The layers' keys, and the drafter's.
        let layers = inner.as_ref().unwrap_or(&top);
        let keys = own.as_ref().unwrap_or(&top);
        let backbone = backbone(&top)?;
        let attention = match backbone {
            Backbone::Qwen3 => qwen3(layers)?,
            Backbone::Gemma4 => gemma4(layers)?,
        };
        let interleaved = layers.opt_bool("rope_is_neox_style")? == Some(false);
        if interleaved && backbone != Backbone::Qwen3 {
            return Err(layers.error("rope_is_neox_style", "is false, which Qwen3 layers can be"));
        }
        let count = layers.size("num_hidden_layers")? as usize;
        let vocab = layers.size("vocab_size")?;
        let has = |prefix: &str| checkpoint.bytes(prefix) > 0;
        let mask = keys.get("mask_token_id").and_then(|id| id.as_i64());
        let Some(mask) = mask.filter(|id| (0..i64::from(vocab)).contains(id)) else {
            return Err(keys.error("mask_token_id", format!("must be an id below {vocab}")));
        };
        let (columns, first) = columns(&top, keys)?;
        let target_layers = top.opt_size("num_target_layers")?;
        let rank = match keys.get("markov_rank").map(|rank| rank.as_i64()) {
            None | Some(Some(0)) => 0,
            _ => keys.size("markov_rank")?,
        };
        let confidence = match keys.opt_bool("enable_confidence_head")? {
            Some(stated) => stated,
            None => has("confidence_head."),
        };
        let with_markov = keys.opt_bool("confidence_head_with_markov")?;
        if confidence && with_markov.unwrap_or(true) && rank == 0 {
            let problem = "needs a Markov head, and `markov_rank` is 0";
            return Err(keys.error("confidence_head_with_markov", problem));
        }
        Ok(Self {
            backbone,
            hidden: attention.hidden,
            vocab,
            draft_vocab: top
                .opt_size("draft_vocab_size")?
                .filter(|&size| size != vocab),
            intermediate: layers.size("intermediate_size")?,
            eps: layers.float("rms_norm_eps")?,
            target_layers,
            layers: vec![attention.clone(); count],
            interleaved,
            taps: taps(&top, keys, target_layers)?,
            columns,
            first,
            mask: mask as i32,
            embed_scale: match backbone {
                Backbone::Qwen3 => None,
                Backbone::Gemma4 => Some((attention.hidden as f32).sqrt()),
            },
            softcap: match backbone {
                Backbone::Qwen3 => None,
                Backbone::Gemma4 => layers.opt_float("final_logit_softcapping")?,
            },
            rank,
            markov: match keys.opt_str("markov_head_type")?.unwrap_or("vanilla") {
                "vanilla" => MarkovForm::Vanilla,
                "gated" => MarkovForm::Gated,
                "rnn" => MarkovForm::Rnn,
                other => {
                    let problem = format!("is {other:?}; supported: vanilla, gated, rnn");
                    return Err(keys.error("markov_head_type", problem));
                }
            },
            confidence,
            confidence_with_markov: with_markov.unwrap_or(true),
            thresholds: Thresholds::take(options, checkpoint.path(), confidence, Vec::new())?,
            own_embedding: has("embed_tokens."),
            own_head: has("lm_head."),
            is_whole: own.is_none() && inner.is_none(),
        })
    }

    /// Refuses a checkpoint whose tensors are not those that the config speaks of.
    pub fn require_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        let mut needed: Vec<String> = ["fc.weight", "hidden_norm.weight", "norm.weight"]
            .map(String::from)
            .into();
        let leaves: Vec<&str> = match self.backbone {
            Backbone::Qwen3 => {
                let mlp = FeedForwardConfig::Dense(self.intermediate).tensors();
                ATTENTION_LAYER.iter().chain(mlp).copied().collect()
            }
            Backbone::Gemma4 => {
                let keys = ["self_attn.k_proj.weight", "self_attn.k_norm.weight"];
                let tied = self.layers.iter().any(|layer| layer.kv == KvSource::Tied);
                let values = (!tied).then_some("self_attn.v_proj.weight");
                GEMMA_LAYER.into_iter().chain(keys).chain(values).collect()
            }
        };
        for layer in 0..self.layers.len() {
            needed.extend(leaves.iter().map(|leaf| format!("layers.{layer}.{leaf}")));
        }
        if self.rank > 0 {
            needed.extend(["w1", "w2"].map(|w| format!("markov_head.markov_{w}.weight")));
        }
        let mut with_bias = Vec::new();
        match self.markov {
            _ if self.rank == 0 => {}
            MarkovForm::Vanilla => {}
            MarkovForm::Gated => with_bias.push("markov_head.gate_proj"),
            MarkovForm::Rnn => with_bias.push("markov_head.joint_proj"),
        }
        if self.confidence {
            with_bias.push("confidence_head.proj");
        }
        needed.extend(with_bias.iter().map(|name| format!("{name}.weight")));
        if self.is_whole {
            needed.extend(with_bias.iter().map(|name| format!("{name}.bias")));
            needed.extend(["embed_tokens.weight", "lm_head.weight"].map(String::from));
        }
        if self.draft_vocab.is_some() {
            needed.extend(["lm_head.weight".into(), "d2t".into()]);
        }
        checkpoint.require_tensors(needed)?;
        checkpoint.require_layers("layers.", self.layers.len())
    }

    /// The pairing gate.
    pub fn pair(&self, path: &str, target: &TargetFacts) -> Result<()> {
        target.require(path, "hidden size", self.hidden, target.hidden_size)?;
        if let Some(layers) = self.target_layers {
            target.require(path, "target layers", layers, target.layers)?;
        }
        target.require(path, "vocabulary size", self.vocab, target.vocab_size)
    }
}

/// Which layers the drafter has.
fn backbone(top: &Config) -> Result<Backbone> {
    let architecture = top
        .get("architectures")
        .and_then(|list| list.get(0)?.as_str())
        .unwrap_or_default();
    match architecture {
        "Qwen3DSparkModel" => return Ok(Backbone::Qwen3),
        "Gemma4DSparkModel" => return Ok(Backbone::Gemma4),
        other if other.contains("Eagle3") => {
            let problem = "is EAGLE-3, whose format is not published in full; supported: DSpark";
            return Err(top.error("architectures", problem));
        }
        _ => {}
    }
    let packaged = top.section("dflash_config")?;
    let projector = match &packaged {
        Some(own) => own.opt_str("projector_type")?,
        None => None,
    };
    if projector == Some("dspark") || top.opt_str("speculators_model_type")? == Some("dspark") {
        return Ok(Backbone::Qwen3);
    }
    let problem = format!("is {architecture:?}; supported: Qwen3DSparkModel, Gemma4DSparkModel");
    Err(top.error("architectures", problem))
}

/// Layers of Qwen3. Their config may be copied from a target that turns a part of its dimensions: these turn
/// all.
fn qwen3(config: &Config) -> Result<AttentionConfig> {
    let attention = dense_attention(config, true)?;
    let (rope, factor) = Rope::full_from_config(config, attention.head_dim)?;
    check_kinds(config)?;
    Ok(AttentionConfig {
        scale: (attention.head_dim as f32).powf(-0.5) * factor,
        rope,
        block: true,
        ..attention
    })
}

/// Layers of Gemma 4: full ones, whatever the target's own are.
fn gemma4(config: &Config) -> Result<AttentionConfig> {
    if config.opt_bool("enable_moe_block")?.unwrap_or(false) {
        return Err(config.error("enable_moe_block", "is true, which is not supported"));
    }
    check_kinds(config)?;
    Ok(AttentionConfig {
        block: true,
        ..gemma_attention(config, 0, GemmaKind::Full, false)?
    })
}

fn check_kinds(config: &Config) -> Result<()> {
    config.layer_types(&[("full_attention", ())]).map(drop)
}

/// Columns of a block, and the first that predicts.
fn columns(top: &Config, keys: &Config) -> Result<(i32, i32)> {
    let size = match keys.opt_size("block_size")? {
        Some(size) => size,
        None => top.size("block_size")?,
    };
    if size > MAX_BLOCK {
        let problem = format!("is {size}, expected at most {MAX_BLOCK}");
        return Err(keys.error("block_size", problem));
    }
    let speculative = match top.section("speculators_config")? {
        Some(section) => {
            let methods = section.get("proposal_methods").and_then(|list| list.get(0));
            methods.and_then(|method| method.get("speculative_tokens")?.as_i64())
        }
        None => None,
    };
    if let Some(tokens) = speculative {
        if !(1..=i64::from(size)).contains(&tokens) {
            let problem = format!("is {size}, with {tokens} speculative tokens");
            return Err(top.error("block_size", problem));
        }
        return Ok((size, size - tokens as i32));
    }
    let anchored = keys.opt_bool("sample_from_anchor")?.unwrap_or(true);
    let counted = keys.opt_bool("dspark_bonus_anchor")?.unwrap_or(false);
    match (anchored, counted) {
        (true, false) => Ok((size, 0)),
        (false, false) => Ok((size + 1, 1)),
        (false, true) if size > 1 => Ok((size, 1)),
        _ => {
            let problem =
                "is true, which goes with `sample_from_anchor` false and 2 columns or more";
            Err(keys.error("dspark_bonus_anchor", problem))
        }
    }
}

fn taps(top: &Config, keys: &Config, target_layers: Option<i32>) -> Result<Vec<Tap>> {
    // Where the target's layers are not counted, the pairing gate sees whether it has these.
    let layers = target_layers.unwrap_or(i32::MAX);
    for (config, key) in [
        (keys, "target_layer_ids"),
        (top, "target_layer_ids"),
        (top, "aux_hidden_state_layer_ids"),
    ] {
        if let Some(ids) = config.opt_ints(key)? {
            return block::taps(config, key, &ids, layers);
        }
    }
    Err(keys.error("target_layer_ids", "is missing"))
}
