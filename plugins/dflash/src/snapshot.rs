//! DSpark snapshots: a directory with `dspark.json`, whose layers have no positions but a learned one per
//! column of the block. Format: `dspark-drafter` of mlx-bun, version 1.

use std::collections::BTreeMap;
use std::rc::Rc;

use plugin_api::abi::UnaryOp;
use plugin_api::block::{
    Ask, BlockDrafter, Chain, Confidence, Context, ContextLayer, Markov, MarkovKind, Thresholds,
};
use plugin_api::layers::{
    AttentionConfig, DecoderLayer, FeedForwardConfig, KvSource, Linear, RmsNorm, Rope,
};
use plugin_api::{
    Checkpoint, Config, DType, Drafts, Options, Result, Tap, Target, TargetFacts, Tensor, Weights,
};

/// The largest block that is computed.
const MAX_BLOCK: i32 = 256;

/// Keys of `config`; another one might change what a drafter computes.
const KEYS: [&str; 9] = [
    "gamma",
    "dDraft",
    "nLayers",
    "nHeads",
    "markovRank",
    "ffMult",
    "tapLayers",
    "seqHead",
    "sts",
];

/// How a draft depends on the one before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Head {
    Markov,
    Rnn,
}

/// What `dspark.json` and the user's options say.
pub struct Settings {
    target_hidden: i32,
    vocab: i32,
    eps: f32,
    /// Columns of a block, each of which predicts.
    pub gamma: i32,
    hidden: i32,
    layers: i32,
    heads: i32,
    rank: i32,
    intermediate: i32,
    pub taps: Vec<Tap>,
    head: Head,
    thresholds: Thresholds,
}

impl Settings {
    pub fn read(checkpoint: &Checkpoint, options: &mut Options) -> Result<Self> {
        let file = checkpoint.config()?;
        // Both stamps mean the same; without one it is an older format.
        match file.opt_str("variant")? {
            Some("dspark" | "dflash") => {}
            Some(other) => {
                let problem = format!("is {other:?}; supported: dspark, dflash");
                return Err(file.error("variant", problem));
            }
            None => {
                let problem = "is missing: snapshots of before version 1 are not supported";
                return Err(file.error("variant", problem));
            }
        }
        if file.size("version")? != 1 {
            return Err(file.error("version", "is not 1, the one that is supported"));
        }
        let section = |key: &str| match file.section(key)? {
            Some(section) => Ok(section),
            None => Err(file.error(key, "is missing")),
        };
        let (config, dims) = (section("config")?, section("dims")?);
        config.only("config", &KEYS)?;
        let gamma = config.size("gamma")?;
        if gamma > MAX_BLOCK {
            return Err(config.error("gamma", format!("is {gamma}, expected at most {MAX_BLOCK}")));
        }
        let (hidden, heads) = (config.size("dDraft")?, config.size("nHeads")?);
        if hidden % heads != 0 {
            return Err(config.error("nHeads", format!("is {heads}, no divisor of {hidden}")));
        }
        let taps = config.opt_ints("tapLayers")?.unwrap_or_default();
        if taps.is_empty() || taps.iter().any(|&tap| tap < 0) {
            return Err(config.error("tapLayers", "must list layers of the target"));
        }
        let intermediate = config.float("ffMult")? * hidden as f32;
        if !(1.0..=1e8).contains(&intermediate) || intermediate.fract() != 0.0 {
            let problem = format!("makes a width of {intermediate}");
            return Err(config.error("ffMult", problem));
        }
        let head = match config.opt_str("seqHead")?.unwrap_or("markov") {
            "markov" => Head::Markov,
            "rnn" => Head::Rnn,
            other => {
                let problem = format!("is {other:?}; supported: markov, rnn");
                return Err(config.error("seqHead", problem));
            }
        };
        Ok(Self {
            target_hidden: dims.size("hiddenSize")?,
            vocab: dims.size("vocabSize")?,
            eps: dims.float("eps")?,
            gamma,
            hidden,
            layers: config.size("nLayers")?,
            heads,
            rank: config.size("markovRank")?,
            intermediate: intermediate as i32,
            taps: taps.into_iter().map(Tap::layer).collect(),
            head,
            thresholds: Thresholds::take(
                options,
                checkpoint.path(),
                true,
                calibrated(&config, gamma)?,
            )?,
        })
    }

    /// What every tensor is called, what it becomes, and whether it is turned: here a matrix is `[in, out]`.
    fn tensors(&self) -> Vec<(String, String, bool)> {
        let mut all: Vec<(String, String, bool)> = [
            ("W_c", "fc.weight", true),
            ("ctx_norm", "hidden_norm.weight", false),
            ("tok_proj", "tok_proj.weight", true),
            ("mask_emb", "mask_emb", false),
            ("block_pos", "block_pos", false),
            ("out_norm", "norm.weight", false),
            ("out_proj", "out_proj.weight", true),
            ("markov.w1", "w1.weight", false),
            ("conf.w", "confidence.weight", true),
            ("conf.b", "confidence.bias", false),
        ]
        .map(|(from, to, turned)| (from.into(), to.into(), turned))
        .into();
        let heads: &[(&str, &str, bool)] = match self.head {
            Head::Markov => &[("markov.w2", "w2.weight", true)],
            Head::Rnn => &[
                ("rnn.wH", "rnn.weight", true),
                ("rnn.bH", "rnn.bias", false),
                ("rnn.wO", "w2.weight", true),
            ],
        };
        all.extend(
            heads
                .iter()
                .map(|(from, to, turned)| ((*from).into(), (*to).into(), *turned)),
        );
        for layer in 0..self.layers {
            let parts = [
                ("attn_norm", "input_layernorm", false),
                ("q", "self_attn.q_proj", true),
                ("k", "self_attn.k_proj", true),
                ("v", "self_attn.v_proj", true),
                ("o", "self_attn.o_proj", true),
                ("ff_norm", "post_attention_layernorm", false),
                ("gate", "mlp.gate_proj", true),
                ("up", "mlp.up_proj", true),
                ("down", "mlp.down_proj", true),
            ];
            all.extend(parts.map(|(from, to, turned)| {
                let to = format!("layers.{layer}.{to}.weight");
                (format!("bb.{layer}.{from}"), to, turned)
            }));
        }
        all
    }

    /// Refuses a checkpoint that lacks tensors, naming them.
    pub fn require_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.require_tensors(self.tensors().into_iter().map(|(from, ..)| from))?;
        checkpoint.require_layers("bb.", self.layers as usize)
    }

    /// The pairing gate.
    pub fn pair(&self, path: &str, target: &TargetFacts) -> Result<()> {
        target.require(
            path,
            "target hidden size",
            self.target_hidden,
            target.hidden_size,
        )?;
        target.require(path, "vocabulary size", self.vocab, target.vocab_size)
    }
}

/// The thresholds that the snapshot was calibrated to, if it was: one per column.
fn calibrated(config: &Config, gamma: i32) -> Result<Vec<f32>> {
    let Some(sts) = config.section("sts")? else {
        return Ok(Vec::new());
    };
    let list = sts.get("thresholds").and_then(|list| list.as_array());
    let numbers = list.and_then(|list| {
        let numbers = list.iter().map(|x| x.as_f64().map(|x| x as f32));
        numbers.collect::<Option<Vec<_>>>()
    });
    match numbers {
        Some(numbers) if numbers.len() == gamma as usize => Ok(numbers),
        _ => Err(sts.error("thresholds", format!("must be a list of {gamma} numbers"))),
    }
}

/// The weights, and what the target lends.
pub struct Snapshot {
    context: Context,
    target: Target,
    gamma: i32,
    /// From the target's embedding to the block's first column.
    first: Linear,
    /// The learned position of that column, `[1, d]`.
    first_position: Tensor,
    /// The other columns, `[1, gamma - 1, d]`.
    rest: Option<Tensor>,
    out: Linear,
    markov: Markov,
    confidence: Confidence,
    thresholds: Thresholds,
}

impl Snapshot {
    /// Reads the weights, in the target's dtype.
    pub fn load(
        checkpoint: &Rc<Checkpoint>,
        settings: &Settings,
        target: Target,
        dtype: DType,
    ) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (from, to, turned) in settings.tensors() {
            let mut tensor = checkpoint.tensor(&from)?;
            if turned {
                tensor = turn(&tensor)?;
            }
            tensors.insert(to, tensor);
        }
        let w = Weights::translated(checkpoint.clone(), tensors).with_dtype(dtype);
        let (hidden, rank, eps) = (settings.hidden, settings.rank, settings.eps);
        let (gamma, vocab) = (settings.gamma, settings.vocab);
        let attention = AttentionConfig {
            hidden,
            heads: settings.heads,
            kv_heads: settings.heads,
            head_dim: hidden / settings.heads,
            rope: Rope::new(0, 1.0),
            qk_norm: None,
            gated: false,
            scale: ((hidden / settings.heads) as f32).powf(-0.5),
            window: 0,
            kv: KvSource::Own,
            v_norm: None,
            block: true,
        };
        let layer = |index: i32| {
            let w = w.child("layers").child(index);
            let mlp = FeedForwardConfig::Dense(settings.intermediate);
            let layer = DecoderLayer::attention(&w, attention.clone(), mlp, eps)?;
            Ok(ContextLayer::Plain(
                layer.with_activation(UnaryOp::GELU_TANH),
            ))
        };
        let layers = (0..settings.layers).map(layer).collect::<Result<_>>()?;
        let taps = settings.taps.len() as i32;
        let inputs = taps.checked_mul(settings.target_hidden);
        let inputs = inputs.ok_or_else(|| w.error("fc.weight", "is too wide"))?;
        let context = Context::new(
            Linear::load(&w.child("fc"), inputs, hidden)?,
            RmsNorm::load(&w.child("hidden_norm"), hidden, eps)?,
            layers,
            RmsNorm::load(&w.child("norm"), hidden, eps)?,
            dtype,
        );
        let positions = w.shaped("block_pos", &[gamma, hidden])?;
        let masks = w.shaped("mask_emb", &[gamma - 1, hidden])?;
        let rest = match gamma {
            1 => None,
            _ => {
                let rest = positions.slice(0, 1, gamma)?.add(&masks)?;
                Some(rest.reshape(&[1, gamma - 1, hidden])?)
            }
        };
        let kind = match settings.head {
            Head::Markov => MarkovKind::Vanilla,
            Head::Rnn => MarkovKind::Elman(Linear::load(&w.child("rnn"), rank, rank)?),
        };
        Ok(Self {
            context: context.normed_by_layers(),
            target,
            gamma,
            first: Linear::load(&w.child("tok_proj"), settings.target_hidden, hidden)?,
            first_position: positions.slice(0, 0, 1)?,
            rest,
            out: Linear::load(&w.child("out_proj"), hidden, settings.target_hidden)?,
            markov: Markov::new(
                Linear::load(&w.child("w1"), rank, vocab)?,
                Linear::load(&w.child("w2"), rank, vocab)?,
                kind,
            ),
            confidence: Confidence::new(
                Linear::load(&w.child("confidence"), hidden + rank, 1)?,
                true,
            ),
            thresholds: settings.thresholds.clone(),
        })
    }
}

/// `[in, out]` as `[out, in]`, row by row in memory.
fn turn(matrix: &Tensor) -> Result<Tensor> {
    let [inputs, outputs] = matrix.dims()?;
    let turned = matrix.transpose(&[1, 0])?.reshape(&[-1])?;
    turned.reshape(&[outputs, inputs])
}

impl BlockDrafter for Snapshot {
    fn context(&self) -> &Context {
        &self.context
    }

    fn columns(&self, _depth: u32) -> i32 {
        self.gamma
    }

    fn input(&self, pending: &Tensor, _width: i32) -> Result<Tensor> {
        let embedded = self.target.embed_bare(pending)?;
        let embedded = embedded.astype(self.first_position.dtype())?;
        let first = self.first.forward(&embedded)?.add(&self.first_position)?;
        let Some(rest) = &self.rest else {
            return Ok(first);
        };
        let [_, columns, hidden] = rest.dims()?;
        let rest = rest.broadcast_to(&[pending.dim(0), columns, hidden])?;
        Tensor::concat(&[&first, &rest], 1)
    }

    fn propose(&self, out: &Tensor, ask: &Ask<'_>) -> Result<Drafts> {
        let out = out.slice(1, 0, ask.max_depth().min(self.gamma))?;
        let logits = self.target.logits(&self.out.forward(&out)?, None)?;
        let chain = Chain {
            markov: Some(&self.markov),
            confidence: Some(&self.confidence),
            thresholds: &self.thresholds,
            ids: None,
        };
        chain.propose(&logits, &out, ask)
    }
}
