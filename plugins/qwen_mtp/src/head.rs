//! The head's weights and its forward pass.

use std::rc::Rc;

use plugin_api::layers::{DecoderLayer, LayerCache, Linear, RmsNorm, Step};
use plugin_api::sampling::{self, Sampling};
use plugin_api::{Checkpoint, DType, Result, Target, TargetHead, Tensor, Weights};

use crate::settings::Settings;

/// The weights, and what the target lends.
pub struct Head {
    target: Target,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    fc: Linear,
    layer: DecoderLayer,
    norm: RmsNorm,
    dtype: DType,
    head: TargetHead,
}

impl Head {
    /// Reads the weights, in the target's dtype.
    pub fn load(
        checkpoint: &Rc<Checkpoint>,
        settings: &Settings,
        target: Target,
        dtype: DType,
    ) -> Result<Self> {
        let mut w = Weights::new(checkpoint.clone()).with_dtype(dtype);
        if settings.inside_target {
            w = w.child("mtp").with_norm_offset(1.0);
        }
        let (hidden, eps) = (settings.hidden, settings.eps);
        Ok(Self {
            target,
            embedding_norm: RmsNorm::load(&w.child("pre_fc_norm_embedding"), hidden, eps)?,
            hidden_norm: RmsNorm::load(&w.child("pre_fc_norm_hidden"), hidden, eps)?,
            fc: Linear::load(&w.child("fc"), 2 * hidden, hidden)?,
            layer: DecoderLayer::attention(
                &w.child("layers").child(0),
                settings.attention.clone(),
                settings.mlp,
                eps,
            )?,
            norm: RmsNorm::load(&w.child("norm"), hidden, eps)?,
            dtype,
            head: TargetHead::open(target, settings.draft_vocab.as_ref())?,
        })
    }

    /// An empty cache for a group.
    pub fn new_cache(&self) -> LayerCache {
        self.layer.new_cache()
    }

    /// Tokens `[B, T]` i32 and the hiddens before them `[B, T, hidden]` to the hiddens after them.
    pub fn forward(
        &self,
        tokens: &Tensor,
        hidden: &Tensor,
        step: &Step,
        cache: &mut LayerCache,
    ) -> Result<Tensor> {
        let embedded = self.target.embed(tokens)?.astype(self.dtype)?;
        let embedded = self.embedding_norm.forward(&embedded)?;
        let hidden = self.hidden_norm.forward(&hidden.astype(self.dtype)?)?;
        let x = self
            .fc
            .forward(&Tensor::concat(&[&embedded, &hidden], -1)?)?;
        self.norm.forward(&self.layer.forward(&x, step, cache)?)
    }

    /// One token per row from the hiddens `[B, 1, hidden]`, drawn as the target draws it: `[B, 1]`.
    pub fn draw(&self, hidden: &Tensor, rows: &[Sampling], positions: &[u32]) -> Result<Tensor> {
        let logits = self.head.logits(hidden)?;
        let drawn = sampling::draw(&logits, rows, positions)?;
        match self.head.ids() {
            Some(ids) => ids.take(&drawn, 0),
            None => Ok(drawn),
        }
    }
}
