//! A stack of decoder layers between an embedding and a head.

use plugin_api::layers::{DecoderLayer, LayerCache, Linear, RmsNorm, Step};
use plugin_api::{DType, Error, Result, Tap, Tensor, Weights};

/// What every architecture of this family has.
pub(super) struct Sizes {
    pub hidden: i32,
    pub vocab: i32,
    pub eps: f32,
    /// The head is the embedding.
    pub tied: bool,
}

/// A decoder-only transformer with pre-norm residual layers.
pub(super) struct Decoder {
    sizes: Sizes,
    embedding: Linear,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    /// None: tied.
    head: Option<Linear>,
    dtype: DType,
}

/// The outcome of a forward pass, uncomputed.
pub struct Pass {
    /// `[B, T, hidden]` after the final norm.
    pub hidden: Tensor,
    /// `[B, T, hidden]` per requested tap.
    pub taps: Vec<Tensor>,
}

impl Decoder {
    /// Takes `embed_tokens`, `norm` (of `w`) and `lm_head` (of `head`) around the layers.
    pub fn load(
        w: &Weights,
        head: &Weights,
        sizes: Sizes,
        layers: Vec<DecoderLayer>,
    ) -> Result<Self> {
        let Sizes {
            hidden,
            vocab,
            eps,
            tied,
        } = sizes;
        let embedding = Linear::load(&w.child("embed_tokens"), hidden, vocab)?;
        let head = if tied {
            None
        } else {
            Some(Linear::load(&head.child("lm_head"), hidden, vocab)?)
        };
        let probe = embedding.lookup(&Tensor::from_slice(&[0], &[1])?)?;
        Ok(Self {
            embedding,
            layers,
            norm: RmsNorm::load(&w.child("norm"), hidden, eps)?,
            head,
            dtype: probe.dtype(),
            sizes,
        })
    }

    pub fn hidden(&self) -> i32 {
        self.sizes.hidden
    }

    pub fn vocab(&self) -> i32 {
        self.sizes.vocab
    }

    pub fn layers(&self) -> i32 {
        self.layers.len() as i32
    }

    /// The dtype of the residual stream.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn new_caches(&self) -> Vec<LayerCache> {
        self.layers.iter().map(DecoderLayer::new_cache).collect()
    }

    /// Every weight.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = self.embedding.tensors();
        for layer in &self.layers {
            tensors.extend(layer.tensors());
        }
        tensors.extend(self.norm.tensors());
        if let Some(head) = &self.head {
            tensors.extend(head.tensors());
        }
        tensors
    }

    /// `[..]` i32 to `[.., hidden]`.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedding.lookup(ids)
    }

    /// The matrix of the head.
    pub fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head().forward(hidden)
    }

    pub fn forward(
        &self,
        ids: &Tensor,
        step: &Step,
        caches: &mut [LayerCache],
        taps: &[Tap],
    ) -> Result<Pass> {
        if caches.len() != self.layers.len() {
            return Err(Error::failed("there must be one cache per layer"));
        }
        let mut seen: Vec<Option<Tensor>> = vec![None; taps.len()];
        let mut see = |point: Tap, h: &Tensor| {
            for (slot, _) in seen.iter_mut().zip(taps).filter(|(_, tap)| **tap == point) {
                *slot = Some(h.clone());
            }
        };
        let mut h = self.embed(ids)?;
        see(Tap::EMBEDDING, &h);
        for ((index, layer), cache) in (0..).zip(&self.layers).zip(caches) {
            h = layer.forward(&h, step, cache)?;
            see(Tap::layer(index), &h);
        }
        see(Tap::PRE_NORM, &h);
        let hidden = self.norm.forward(&h)?;
        see(Tap::FINAL, &hidden);
        let taps = seen.into_iter().zip(taps).map(|(seen, tap)| {
            seen.ok_or_else(|| Error::invalid(format!("this model has no tap {}", tap.point)))
        });
        Ok(Pass {
            taps: taps.collect::<Result<_>>()?,
            hidden,
        })
    }
}
