//! DFlash as its authors publish it: Qwen3 layers over projected hiddens of the target, a block of one
//! known token and masks. Format: `DFlashDraftModel` of z-lab.

use std::rc::Rc;

use plugin_api::block::{self, Ask, BlockDrafter, Chain, Context, ContextLayer, Thresholds};
use plugin_api::layers::{
    ATTENTION_LAYER, AttentionConfig, DecoderLayer, FeedForwardConfig, dense_attention,
};
use plugin_api::{
    Checkpoint, Config, DType, DraftVocabulary, Drafts, Options, Result, Tap, Target, TargetFacts,
    TargetHead, Tensor, Weights,
};

/// The largest block that is computed.
const MAX_BLOCK: i32 = 257;

/// What the checkpoint's config and the user's options say.
pub struct Settings {
    hidden: i32,
    vocab: i32,
    mlp: FeedForwardConfig,
    eps: f32,
    target_layers: i32,
    layers: Vec<AttentionConfig>,
    pub taps: Vec<Tap>,
    /// Columns of a block: the known token and the drafts.
    pub block: i32,
    /// As many of them as are used unless the user says otherwise.
    pub usual_block: i32,
    mask: i32,
    /// A factor on embedded tokens.
    input_scale: f32,
    /// A factor on logits, and what then limits them.
    output_scale: f32,
    softcap: Option<f32>,
    vocabulary: Option<DraftVocabulary>,
    thresholds: Thresholds,
    /// What the names of its tensors begin with.
    prefix: &'static str,
}

/// Keys of `dflash_config`; another one might change what a drafter computes.
const KEYS: [&str; 11] = [
    "block_size",
    "causal",
    "dflash_query_causal",
    "draft_window_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "output_multiplier",
    "runtime_block_size",
    "swa_window_size",
    "target_layer_ids",
];

impl Settings {
    pub fn read(checkpoint: &Checkpoint, options: &mut Options) -> Result<Self> {
        let config = checkpoint.config()?;
        let Some(own) = config.section("dflash_config")? else {
            return Err(config.error("dflash_config", "is missing"));
        };
        own.only("dflash_config", &KEYS)?;
        let attention = dense_attention(&config, true)?;
        let target_layers = config.size("num_target_layers")?;
        let count = config.size("num_hidden_layers")?;
        let ids = match own.opt_ints("target_layer_ids")? {
            Some(ids) => ids,
            None => usual_taps(target_layers, count),
        };
        let block = match own.opt_size("block_size")? {
            Some(block) => block,
            None => config.size("block_size")?,
        };
        if !(2..=MAX_BLOCK).contains(&block) {
            let problem = format!("is {block}, expected 2 to {MAX_BLOCK}");
            return Err(own.error("block_size", problem));
        }
        let usual_block = own.opt_size("runtime_block_size")?.unwrap_or(block);
        let vocab = config.size("vocab_size")?;
        let softcap = own.opt_float("final_logit_softcapping")?;
        let restrict = options.take_choice("draft_vocab", &[("auto", true), ("full", false)])?;
        let path = checkpoint.path();
        Ok(Self {
            hidden: attention.hidden,
            vocab,
            mlp: FeedForwardConfig::Dense(config.size("intermediate_size")?),
            eps: config.float("rms_norm_eps")?,
            target_layers,
            layers: layers(&config, &own, &attention, count)?,
            taps: block::taps(&own, "target_layer_ids", &ids, target_layers)?,
            block,
            usual_block: usual_block.clamp(2, block),
            mask: match own.get("mask_token_id").and_then(|id| id.as_i64()) {
                Some(id) if (0..i64::from(vocab)).contains(&id) => id as i32,
                _ => {
                    let problem = format!("must be an id below {vocab}");
                    return Err(own.error("mask_token_id", problem));
                }
            },
            input_scale: own.opt_float("input_embedding_scale")?.unwrap_or(1.0),
            output_scale: own.opt_float("output_multiplier")?.unwrap_or(1.0),
            softcap: softcap.filter(|&cap| cap > 0.0),
            vocabulary: match restrict.unwrap_or(true) {
                true => DraftVocabulary::of(checkpoint)?,
                false => None,
            },
            thresholds: Thresholds::take(options, path, false, Vec::new())?,
            prefix: match checkpoint.bytes("model.fc.") {
                0 => "",
                _ => "model.",
            },
        })
    }

    /// Refuses a checkpoint that lacks tensors, naming them.
    pub fn require_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        let own = ["fc.weight", "hidden_norm.weight", "norm.weight"];
        let layers = 0..self.layers.len();
        let layers = layers.flat_map(|i| {
            let leaves = ATTENTION_LAYER.iter().chain(self.mlp.tensors());
            leaves.map(move |leaf| format!("layers.{i}.{leaf}"))
        });
        let needed = own.map(String::from).into_iter().chain(layers);
        checkpoint.require_tensors(needed.map(|leaf| format!("{}{leaf}", self.prefix)))?;
        checkpoint.require_layers(&format!("{}layers.", self.prefix), self.layers.len())
    }

    /// The pairing gate.
    pub fn pair(&self, path: &str, target: &TargetFacts) -> Result<()> {
        target.require(path, "hidden size", self.hidden, target.hidden_size)?;
        target.require(path, "target layers", self.target_layers, target.layers)?;
        target.require(path, "vocabulary size", self.vocab, target.vocab_size)?;
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.require(path, target),
            None => Ok(()),
        }
    }
}

/// The layers that drafters look at when their config does not say: evenly spread, but for the last ones.
/// As the publisher's code rounds: halves to the even number.
fn usual_taps(target_layers: i32, count: i32) -> Vec<i32> {
    if count == 1 {
        return vec![target_layers / 2];
    }
    let span = f64::from(target_layers - 4) / f64::from(count - 1);
    let tap = |i: i32| (1.0 + f64::from(i) * span).round_ties_even() as i32;
    (0..count).map(tap).collect()
}

/// The attention of every layer. Columns of a block see each other, unless the layer slides: those are
/// causal, as they were trained, if nothing else is stated.
fn layers(
    config: &Config,
    own: &Config,
    attention: &AttentionConfig,
    count: i32,
) -> Result<Vec<AttentionConfig>> {
    let mut causal = config.opt_bool("is_causal")?;
    for key in ["causal", "dflash_query_causal"] {
        causal = causal.or(own.opt_bool(key)?);
    }
    let window = config.opt_size("sliding_window")?;
    if own.get("draft_window_size").is_some() {
        return Err(own.error("draft_window_size", "is stated, which is not supported"));
    }
    if let Some(other) = own.opt_size("swa_window_size")?
        && Some(other) != window
    {
        let problem = format!("is {other}, and `sliding_window` is {window:?}");
        return Err(own.error("swa_window_size", problem));
    }
    let names = [("full_attention", false), ("sliding_attention", true)];
    let kinds = config.layer_types(&names)?;
    let kinds = kinds.unwrap_or_else(|| vec![false; count as usize]);
    let layer = |slides: bool| {
        let window = match (slides, window) {
            (false, _) => 0,
            (true, Some(window)) => window,
            (true, None) => return Err(config.error("sliding_window", "is missing")),
        };
        Ok(AttentionConfig {
            window,
            block: !causal.unwrap_or(slides),
            ..attention.clone()
        })
    };
    kinds.into_iter().map(layer).collect()
}

/// The weights, and what the target lends.
pub struct Published {
    context: Context,
    target: Target,
    head: TargetHead,
    block: i32,
    mask: i32,
    input_scale: f32,
    output_scale: f32,
    softcap: Option<f32>,
    thresholds: Thresholds,
}

impl Published {
    /// Reads the weights, in the target's dtype.
    pub fn load(
        checkpoint: &Rc<Checkpoint>,
        settings: &Settings,
        target: Target,
        dtype: DType,
    ) -> Result<Self> {
        let w = Weights::new(checkpoint.clone()).with_dtype(dtype);
        let w = match settings.prefix {
            "" => w,
            prefix => w.child(prefix.trim_end_matches('.')),
        };
        let layer = |(index, attention): (usize, &AttentionConfig)| {
            let w = w.child("layers").child(index);
            let (mlp, eps) = (settings.mlp, settings.eps);
            DecoderLayer::attention(&w, attention.clone(), mlp, eps).map(ContextLayer::Plain)
        };
        let layers = settings.layers.iter().enumerate().map(layer);
        let layers = layers.collect::<Result<_>>()?;
        let sizes = (settings.taps.len(), settings.hidden, settings.eps);
        Ok(Self {
            context: Context::load(&w, sizes, layers, dtype)?,
            target,
            head: TargetHead::open(target, settings.vocabulary.as_ref())?,
            block: settings.block,
            mask: settings.mask,
            input_scale: settings.input_scale,
            output_scale: settings.output_scale,
            softcap: settings.softcap,
            thresholds: settings.thresholds.clone(),
        })
    }
}

impl BlockDrafter for Published {
    fn context(&self) -> &Context {
        &self.context
    }

    fn columns(&self, depth: u32) -> i32 {
        (1 + depth as i32).min(self.block)
    }

    fn input(&self, pending: &Tensor, width: i32) -> Result<Tensor> {
        let ids = block::masked(pending, self.mask, width)?;
        let embedded = self.target.embed_bare(&ids)?;
        match self.input_scale {
            1.0 => Ok(embedded),
            scale => embedded.scale(scale),
        }
    }

    fn propose(&self, out: &Tensor, ask: &Ask<'_>) -> Result<Drafts> {
        // The first column is the known token's.
        let drafting = out.slice(1, 1, out.dim(1))?;
        let mut logits = self.head.logits_bare(&drafting)?;
        if self.output_scale != 1.0 {
            logits = logits.scale(self.output_scale)?;
        }
        if let Some(cap) = self.softcap {
            logits = logits.softcap(cap)?;
        }
        let chain = Chain {
            markov: None,
            confidence: None,
            thresholds: &self.thresholds,
            ids: self.head.ids(),
        };
        chain.propose(&logits, &drafting, ask)
    }
}
