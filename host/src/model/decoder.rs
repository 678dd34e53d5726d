//! A stack of decoder layers between an embedding and a head.

use plugin_api::layers::{
    DecoderLayer, GemmaLayer, LayerCache, Linear, QuantizedKv, RmsNorm, Step,
};
use plugin_api::{DType, DonorFacts, Error, Result, Tap, Tensor, Weights};

use super::gemma4::PerLayer;
use super::kv::KvConfig;

/// What every architecture has.
pub(super) struct Sizes {
    pub hidden: i32,
    pub vocab: i32,
    pub eps: f32,
    /// The head is the embedding.
    pub tied: bool,
}

/// What some architectures have.
#[derive(Default)]
pub(super) struct Extras {
    /// A factor on embedded tokens.
    pub embed_scale: Option<f32>,
    /// Logits become `softcap * tanh(logits / softcap)`.
    pub softcap: Option<f32>,
    /// Inputs that each layer has of its own.
    pub per_layer: Option<PerLayer>,
    /// The layer whose cache each layer looks at; none: its own.
    pub caches: Option<Vec<usize>>,
    /// Layers that lend their keys to drafters, and what those are like.
    pub donors: Vec<(usize, DonorFacts)>,
}

/// A layer of one of the kinds there are.
pub(super) enum Layer {
    Plain(DecoderLayer),
    Gemma(GemmaLayer),
}

impl Layer {
    fn new_cache(&self, kv: Option<QuantizedKv>) -> LayerCache {
        match self {
            Self::Plain(layer) => layer.cache_stored(kv),
            Self::Gemma(layer) => layer.cache_stored(kv),
        }
    }

    fn cache_bytes(&self, tokens: usize, dtype: DType, kv: Option<QuantizedKv>) -> u64 {
        match self {
            Self::Plain(layer) => layer.cache_bytes(tokens, dtype, kv),
            Self::Gemma(layer) => layer.cache_bytes(tokens, dtype, kv),
        }
    }

    fn head_dim(&self) -> Option<i32> {
        match self {
            Self::Plain(layer) => layer.head_dim(),
            Self::Gemma(layer) => Some(layer.head_dim()),
        }
    }

    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Plain(layer) => layer.tensors(),
            Self::Gemma(layer) => layer.tensors(),
        }
    }
}

/// A decoder-only transformer.
pub(super) struct Decoder {
    sizes: Sizes,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// None: tied.
    head: Option<Linear>,
    dtype: DType,
    extras: Extras,
    /// How each layer that has a cache stores keys and values; beyond its end: as they are.
    kv: Vec<Option<QuantizedKv>>,
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
    pub fn load(w: &Weights, head: &Weights, sizes: Sizes, layers: Vec<Layer>) -> Result<Self> {
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
            extras: Extras::default(),
            kv: Vec::new(),
        })
    }

    /// The same with more to it.
    pub fn with(self, extras: Extras) -> Self {
        Self { extras, ..self }
    }

    /// The same with caches that store keys and values as `kv` says.
    ///
    /// # Errors
    /// That does not fit the layers.
    pub fn storing(mut self, kv: &KvConfig) -> Result<Self> {
        let own = self.cache_count();
        let layers = self.layers.iter().enumerate();
        let head_dims: Vec<_> = layers
            .map(|(index, layer)| layer.head_dim().filter(|_| index < own))
            .collect();
        self.kv = kv.of_layers(&head_dims)?;
        Ok(self)
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

    /// One per layer that has keys or a state of its own; those are the first ones.
    pub fn new_caches(&self) -> Vec<LayerCache> {
        self.own().map(|(layer, kv)| layer.new_cache(kv)).collect()
    }

    /// Bytes of a row's caches after so many tokens.
    pub fn cache_bytes(&self, tokens: usize) -> u64 {
        self.own()
            .map(|(layer, kv)| layer.cache_bytes(tokens, self.dtype, kv))
            .sum()
    }

    /// The layers that have a cache of their own, and how it stores keys and values.
    fn own(&self) -> impl Iterator<Item = (&Layer, Option<QuantizedKv>)> {
        let layers = self.layers.iter().take(self.cache_count()).enumerate();
        layers.map(|(index, layer)| (layer, self.kv.get(index).copied().flatten()))
    }

    fn cache_count(&self) -> usize {
        let last = self
            .extras
            .caches
            .as_ref()
            .and_then(|caches| caches.iter().max());
        last.map_or(self.layers.len(), |last| last + 1)
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
        if let Some(per_layer) = &self.extras.per_layer {
            tensors.extend(per_layer.tensors());
        }
        tensors
    }

    /// `[..]` i32 to `[.., hidden]`.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let embedded = self.embed_bare(ids)?;
        match self.extras.embed_scale {
            Some(scale) => embedded.scale(scale),
            None => Ok(embedded),
        }
    }

    /// As [`Decoder::embed`], without a factor.
    pub fn embed_bare(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedding.lookup(ids)
    }

    /// Layers that lend their keys to drafters.
    pub fn donors(&self) -> &[(usize, DonorFacts)] {
        &self.extras.donors
    }

    /// The matrix of the head.
    pub fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.through(self.head(), hidden)
    }

    /// Logits by the head or a part of it.
    pub fn through(&self, head: &Linear, hidden: &Tensor) -> Result<Tensor> {
        let logits = head.forward(hidden)?;
        match self.extras.softcap {
            Some(cap) => logits.softcap(cap),
            None => Ok(logits),
        }
    }

    pub fn forward(
        &self,
        ids: &Tensor,
        step: &Step,
        caches: &mut [LayerCache],
        taps: &[Tap],
    ) -> Result<Pass> {
        if caches.len() != self.cache_count() {
            return Err(Error::failed("the caches are those of another model"));
        }
        let mut seen: Vec<Option<Tensor>> = vec![None; taps.len()];
        let mut see = |point: Tap, h: &Tensor| {
            for (slot, _) in seen.iter_mut().zip(taps).filter(|(_, tap)| **tap == point) {
                *slot = Some(h.clone());
            }
        };
        let mut h = self.embed(ids)?;
        see(Tap::EMBEDDING, &h);
        let inputs = match &self.extras.per_layer {
            Some(per_layer) => per_layer.inputs(ids, &h)?,
            None => Vec::new(),
        };
        for (index, layer) in self.layers.iter().enumerate() {
            let source = self
                .extras
                .caches
                .as_ref()
                .map_or(index, |caches| caches[index]);
            let cache = &mut caches[source];
            h = match layer {
                Layer::Plain(layer) => layer.forward(&h, step, cache)?,
                Layer::Gemma(layer) => layer.forward(&h, step, cache, inputs.get(index))?,
            };
            see(Tap::layer(index as i32), &h);
        }
        see(Tap::PRE_NORM, &h);
        let hidden = self.norm.forward(&h)?;
        see(Tap::FINAL, &hidden);
        see(Tap::layer(self.layers()), &hidden);
        let taps = seen.into_iter().zip(taps).map(|(seen, tap)| {
            seen.ok_or_else(|| Error::invalid(format!("this model has no tap {}", tap.point)))
        });
        Ok(Pass {
            taps: taps.collect::<Result<_>>()?,
            hidden,
        })
    }
}
