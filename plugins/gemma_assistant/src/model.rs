//! The assistant's weights and one step of it.

use std::rc::Rc;

use plugin_api::abi::{BinaryOp, ReduceOp};
use plugin_api::layers::{
    GemmaConfig, GemmaKind, GemmaLayer, KvCache, LayerCache, Linear, RmsNorm, Step,
};
use plugin_api::sampling::{self, Sampling};
use plugin_api::{Checkpoint, DType, Donor, DonorKind, Error, Result, Target, Tensor, Weights};

use crate::settings::{Ordered, Positions, Settings};

/// The weights, and what the target lends for as long as rows live.
pub struct Assistant {
    target: Target,
    pre: Linear,
    layers: Vec<(GemmaKind, GemmaLayer)>,
    norm: RmsNorm,
    post: Linear,
    head: Linear,
    order: Option<Order>,
    positions: Positions,
    /// Keys that the target's sliding layers see.
    window: i32,
    donors: Vec<DonorKind>,
    dtype: DType,
}

/// Which tokens are looked at.
struct Order {
    centroids: Linear,
    /// The group of each token, `[V]` i32.
    group: Tensor,
    best: i32,
}

/// The target's keys for the time of a draft.
pub struct Keys {
    full: Option<LayerCache>,
    sliding: Option<LayerCache>,
}

impl Assistant {
    /// Reads the weights, in the target's dtype.
    pub fn load(
        checkpoint: &Rc<Checkpoint>,
        settings: &Settings,
        target: Target,
        dtype: DType,
    ) -> Result<Self> {
        let w = Weights::new(checkpoint.clone()).with_dtype(dtype);
        let (hidden, vocab, eps) = (settings.hidden, settings.vocab, settings.eps);
        let config = GemmaConfig {
            hidden,
            intermediate: settings.intermediate,
            layer_input: 0,
            experts: None,
            eps,
        };
        let model = w.child("model");
        let layer = |(index, (kind, attention)): (usize, &(GemmaKind, _))| {
            let w = model.child("layers").child(index);
            Ok((
                *kind,
                GemmaLayer::load(&w, Clone::clone(attention), config)?,
            ))
        };
        let head = if settings.tied {
            model.child("embed_tokens")
        } else {
            w.child("lm_head")
        };
        let order = match settings.ordered {
            Some(ordered) => Some(Order::load(
                &w.child("masked_embedding"),
                checkpoint,
                ordered,
                hidden,
                vocab,
            )?),
            None => None,
        };
        Ok(Self {
            target,
            pre: Linear::load(&w.child("pre_projection"), 2 * settings.backbone, hidden)?,
            layers: settings
                .layers
                .iter()
                .enumerate()
                .map(layer)
                .collect::<Result<_>>()?,
            norm: RmsNorm::load(&model.child("norm"), hidden, eps)?,
            post: Linear::load(&w.child("post_projection"), hidden, settings.backbone)?,
            head: Linear::load(&head, hidden, vocab)?,
            order,
            positions: settings.positions,
            window: settings.window,
            donors: settings.donors(),
            dtype,
        })
    }

    /// The target's keys as the layers look at them.
    pub fn keys(&self, donors: &[Donor], first_draft: bool) -> Result<Keys> {
        let find = |kind, window| {
            let at = self.donors.iter().position(|donor| *donor == kind)?;
            let cache = KvCache::lent(donors.get(at)?, window);
            Some(LayerCache::Kv(cache))
        };
        let window = self.positions.window(self.window, first_draft);
        let keys = Keys {
            full: find(DonorKind::FULL, 0),
            sliding: find(DonorKind::SLIDING, window),
        };
        if donors.len() == self.donors.len() {
            Ok(keys)
        } else {
            Err(Error::failed(
                "the target's keys did not come with the request",
            ))
        }
    }

    /// Step `k` of a draft after `processed[b]` tokens: from a token per row, `[B, 1]` i32, and the hidden
    /// before it, `[B, 1, backbone]`, the head's input and the next hidden.
    pub fn step(
        &self,
        k: i32,
        token: &Tensor,
        hidden: &Tensor,
        processed: &[i32],
        keys: &mut Keys,
    ) -> Result<(Tensor, Tensor)> {
        let embedded = self.target.embed(token)?.astype(self.dtype)?;
        let hidden = hidden.astype(self.dtype)?;
        let mut x = self
            .pre
            .forward(&Tensor::concat(&[&embedded, &hidden], -1)?)?;
        // Each query sees the last processed token and what lies before it.
        let offsets: Vec<i32> = processed.iter().map(|n| n - 1).collect();
        let positions = processed.iter().map(|n| self.positions.of(*n, k));
        let ones = vec![1; processed.len()];
        let step = Step::new(&offsets, &ones, 1, false)?.with_positions(positions.collect());
        for (kind, layer) in &self.layers {
            let cache = match kind {
                GemmaKind::Full => keys.full.as_mut(),
                GemmaKind::Sliding => keys.sliding.as_mut(),
            };
            let cache = cache.ok_or_else(|| Error::failed("the target lends no such keys"))?;
            x = layer.forward(&x, &step, cache, None)?;
        }
        let out = self.norm.forward(&x)?;
        let next = self.post.forward(&out)?;
        Ok((out, next))
    }

    /// One token per row from the head's input, drawn as the target draws it: `[B, 1]`.
    pub fn draw(&self, out: &Tensor, rows: &[Sampling], positions: &[u32]) -> Result<Tensor> {
        let mut logits = self.head.forward(out)?;
        if let Some(order) = &self.order {
            logits = order.restrict(out, &logits)?;
        }
        sampling::draw(&logits, rows, positions)
    }
}

impl Order {
    fn load(
        w: &Weights,
        checkpoint: &Checkpoint,
        ordered: Ordered,
        hidden: i32,
        vocab: i32,
    ) -> Result<Self> {
        // Integers, which have no dtype to be read in.
        let order = checkpoint.tensor(&w.name("token_ordering"))?;
        if order.shape() != [vocab] {
            let problem = format!("has shape {:?}, the config says [{vocab}]", order.shape());
            return Err(w.error("token_ordering", problem));
        }
        let order = order.astype(DType::I32)?.to_vec::<i32>()?;
        let size = vocab / ordered.centroids;
        let mut group = vec![-1; vocab as usize];
        for (place, token) in (0..).zip(order) {
            match usize::try_from(token)
                .ok()
                .and_then(|token| group.get_mut(token))
            {
                Some(slot) if *slot < 0 => *slot = place / size,
                _ => {
                    let problem = format!("has the token {token} twice or outside 0..{vocab}");
                    return Err(w.error("token_ordering", problem));
                }
            }
        }
        Ok(Self {
            centroids: Linear::load(&w.child("centroids"), hidden, ordered.centroids)?,
            group: Tensor::from_slice(&group, &[vocab])?,
            best: ordered.best,
        })
    }

    /// The logits of tokens outside the best groups become less than any other.
    fn restrict(&self, out: &Tensor, logits: &Tensor) -> Result<Tensor> {
        let scores = self.centroids.forward(out)?;
        let count = scores.dim(-1);
        let least = scores
            .sort(-1)?
            .slice(-1, count - self.best, count - self.best + 1)?;
        let within = least.less_equal(&scores)?.take(&self.group, -1)?;
        let high = Tensor::full(&[], f32::MAX, logits.dtype())?;
        let floor = logits
            .select(&within, &high)?
            .reduce(ReduceOp::MIN, -1, true)?;
        let floor = floor.binary(BinaryOp::SUB, &Tensor::full(&[], 1.0, logits.dtype())?)?;
        logits.select(&within, &floor)
    }
}
