//! The drafter's weights, and how drafts come out of a block.

use std::collections::BTreeMap;
use std::rc::Rc;

use plugin_api::block::{
    self, Ask, BlockDrafter, Chain, Confidence, Context, ContextLayer, Markov, MarkovKind,
    Thresholds,
};
use plugin_api::layers::{
    AttentionConfig, DecoderLayer, FeedForwardConfig, GemmaConfig, GemmaLayer, Linear,
};
use plugin_api::{Checkpoint, DType, Drafts, Result, Target, Tensor, Weights};

use crate::settings::{Backbone, MarkovForm, Settings};

/// The weights, and what the target lends.
pub struct DSpark {
    context: Context,
    target: Target,
    embedding: Option<Linear>,
    embed_scale: Option<f32>,
    head: Option<Linear>,
    softcap: Option<f32>,
    /// The target's ids of what the head gives, `[draft vocabulary]` i32.
    ids: Option<Tensor>,
    markov: Option<Markov>,
    confidence: Option<Confidence>,
    thresholds: Thresholds,
    columns: i32,
    first: i32,
    mask: i32,
}

impl DSpark {
    /// Reads the weights, in the target's dtype.
    pub fn load(
        checkpoint: &Rc<Checkpoint>,
        settings: &Settings,
        target: Target,
        dtype: DType,
    ) -> Result<Self> {
        let mut w = Weights::new(checkpoint.clone()).with_dtype(dtype);
        if settings.interleaved {
            w = halved(checkpoint, settings)?.with_dtype(dtype);
        }
        let (hidden, eps, rank) = (settings.hidden, settings.eps, settings.rank);
        let layer = |(index, attention): (usize, &AttentionConfig)| {
            let w = w.child("layers").child(index);
            let (attention, intermediate) = (attention.clone(), settings.intermediate);
            match settings.backbone {
                Backbone::Qwen3 => {
                    let mlp = FeedForwardConfig::Dense(intermediate);
                    DecoderLayer::attention(&w, attention, mlp, eps).map(ContextLayer::Plain)
                }
                Backbone::Gemma4 => {
                    let config = GemmaConfig {
                        hidden,
                        intermediate,
                        layer_input: 0,
                        experts: None,
                        eps,
                    };
                    GemmaLayer::load(&w, attention, config).map(ContextLayer::Gemma)
                }
            }
        };
        let layers = settings.layers.iter().enumerate().map(layer);
        let layers = layers.collect::<Result<_>>()?;
        let drafted = settings.draft_vocab.unwrap_or(settings.vocab);
        let matrix = |wanted: bool, name: &str, outputs: i32| match wanted {
            true => Linear::load(&w.child(name), hidden, outputs).map(Some),
            false => Ok(None),
        };
        let sizes = (settings.taps.len(), hidden, eps);
        Ok(Self {
            context: Context::load(&w, sizes, layers, dtype)?,
            target,
            embedding: matrix(settings.own_embedding, "embed_tokens", settings.vocab)?,
            embed_scale: settings.embed_scale,
            head: matrix(settings.own_head, "lm_head", drafted)?,
            softcap: settings.softcap,
            ids: match settings.draft_vocab {
                Some(count) => Some(target_ids(checkpoint, count, settings.vocab)?),
                None => None,
            },
            markov: match rank {
                0 => None,
                _ => Some(markov(&w.child("markov_head"), settings, drafted)?),
            },
            confidence: match settings.confidence {
                false => None,
                true => {
                    let with_markov = settings.confidence_with_markov;
                    let inputs = if with_markov { hidden + rank } else { hidden };
                    let w = w.child("confidence_head").child("proj");
                    Some(Confidence::new(Linear::load(&w, inputs, 1)?, with_markov))
                }
            },
            thresholds: settings.thresholds.clone(),
            columns: settings.columns,
            first: settings.first,
            mask: settings.mask,
        })
    }
}

fn markov(w: &Weights, settings: &Settings, drafted: i32) -> Result<Markov> {
    let (hidden, rank) = (settings.hidden, settings.rank);
    let kind = match settings.markov {
        MarkovForm::Vanilla => MarkovKind::Vanilla,
        MarkovForm::Gated => {
            let inputs = hidden + rank;
            MarkovKind::Gated(Linear::load(&w.child("gate_proj"), inputs, rank)?)
        }
        MarkovForm::Rnn => {
            let inputs = hidden + 2 * rank;
            MarkovKind::Gru(Linear::load(&w.child("joint_proj"), inputs, 3 * rank)?)
        }
    };
    Ok(Markov::new(
        Linear::load(&w.child("markov_w1"), rank, settings.vocab)?,
        Linear::load(&w.child("markov_w2"), rank, drafted)?,
        kind,
    ))
}

/// The target's id of each drafted one: `d2t` holds the differences.
fn target_ids(checkpoint: &Rc<Checkpoint>, count: i32, vocab: i32) -> Result<Tensor> {
    let w = Weights::new(checkpoint.clone());
    let differences = checkpoint.tensor("d2t")?;
    if differences.shape() != [count] || differences.dtype().is_float() {
        let problem = format!(
            "is {:?}{:?}, expected {count} integers",
            differences.dtype(),
            differences.shape()
        );
        return Err(w.error("d2t", problem));
    }
    let differences = differences.astype(DType::I32)?.to_vec::<i32>()?;
    let ids: Vec<i32> = (0..)
        .zip(differences)
        .map(|(id, more): (i32, i32)| id.saturating_add(more))
        .collect();
    if let Some(id) = ids.iter().find(|id| !(0..vocab).contains(*id)) {
        return Err(w.error("d2t", format!("leads to the id {id}, of {vocab}")));
    }
    Tensor::from_slice(&ids, &[count])
}

/// The weights for a rotation that pairs halves, of those for one that pairs neighbours.
fn halved(checkpoint: &Rc<Checkpoint>, settings: &Settings) -> Result<Weights> {
    let mut tensors = BTreeMap::new();
    let dim = settings.layers.first().map_or(0, |layer| layer.head_dim);
    for name in checkpoint.names() {
        let mut tensor = checkpoint.tensor(&name)?;
        if ["q_proj", "k_proj", "q_norm", "k_norm"]
            .iter()
            .any(|part| name.contains(&format!("self_attn.{part}.")))
        {
            // Rows of each head: the even ones, then the odd ones.
            let order = (0..tensor.dim(0)).map(|row| {
                let (head, at) = (row / dim * dim, row % dim);
                let half = dim / 2;
                head + if at < half {
                    2 * at
                } else {
                    2 * (at - half) + 1
                }
            });
            let order: Vec<i32> = order.collect();
            let order = Tensor::from_slice(&order, &[order.len() as i32])?;
            tensor = tensor.take(&order, 0)?;
        }
        tensors.insert(name, tensor);
    }
    Ok(Weights::translated(checkpoint.clone(), tensors))
}

impl BlockDrafter for DSpark {
    fn context(&self) -> &Context {
        &self.context
    }

    fn columns(&self, _depth: u32) -> i32 {
        self.columns
    }

    fn input(&self, pending: &Tensor, width: i32) -> Result<Tensor> {
        let ids = block::masked(pending, self.mask, width)?;
        let embedded = match &self.embedding {
            Some(embedding) => embedding.lookup(&ids)?,
            None => self.target.embed_bare(&ids)?,
        };
        match self.embed_scale {
            Some(scale) => embedded.scale(scale),
            None => Ok(embedded),
        }
    }

    fn propose(&self, out: &Tensor, ask: &Ask<'_>) -> Result<Drafts> {
        let last = (self.first + ask.max_depth()).min(self.columns);
        let out = out.slice(1, self.first, last)?;
        let mut logits = match &self.head {
            Some(head) => head.forward(&out)?,
            None => self.target.logits_bare(&out, None)?,
        };
        if let Some(cap) = self.softcap {
            logits = logits.softcap(cap)?;
        }
        let chain = Chain {
            markov: self.markov.as_ref(),
            confidence: self.confidence.as_ref(),
            thresholds: &self.thresholds,
            ids: self.ids.as_ref(),
        };
        chain.propose(&logits, &out, ask)
    }
}
