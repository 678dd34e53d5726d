//! The layer of Gemma 4: norms before and after each part, and an input of its own per layer.

use crate::abi::{DType, UnaryOp};
use crate::checkpoint::Weights;
use crate::error::{Error, Result};
use crate::layers::{
    Attention, AttentionConfig, Experts, ExpertsConfig, LayerCache, Linear, Project, QuantizedKv,
    RmsNorm, Routes, Step,
};
use crate::tensor::Tensor;

/// The tensors of a layer without keys of its own, for [`crate::Checkpoint::require_tensors`].
pub const GEMMA_LAYER: [&str; 11] = [
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "layer_scalar",
    "self_attn.q_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
];

/// The shape of a Gemma 4 layer beside its attention.
#[derive(Clone, Copy, Debug)]
pub struct GemmaConfig {
    /// Width of the residual stream.
    pub hidden: i32,
    /// Width of the feed-forward block.
    pub intermediate: i32,
    /// Width of the layer's own input (per-layer embeddings); 0: there is none.
    pub layer_input: i32,
    /// Experts beside the feed-forward block, if there are any.
    pub experts: Option<ExpertsConfig>,
    /// Epsilon of all norms.
    pub eps: f32,
}

/// `h += norm(attention(norm(h))); h += norm(mlp(norm(h)))`, then what the layer's own input adds, and a
/// factor on everything.
pub struct GemmaLayer {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    pre_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    post_norm: RmsNorm,
    mixture: Option<Box<Mixture>>,
    own_input: Option<OwnInput>,
    /// `layer_scalar`.
    factor: f32,
}

/// What turns `mlp(h)` into `norm(mlp(h)) + norm(experts(norm(h)))`; the router has a norm of its own.
struct Mixture {
    router_norm: RmsNorm,
    router: Linear,
    /// A factor on what each expert gives, `[E]`.
    scale: Tensor,
    chosen: i32,
    dense_norm: RmsNorm,
    pre_norm: RmsNorm,
    experts: Experts,
    post_norm: RmsNorm,
}

impl Mixture {
    fn load(w: &Weights, config: ExpertsConfig, eps: f32) -> Result<Self> {
        let ExpertsConfig { hidden, count, .. } = config;
        let norm = |name: &str| RmsNorm::load(&w.child(name), hidden, eps);
        let (router, experts) = (w.child("router"), w.child("experts"));
        let scale = router.shaped("scale", &[hidden])?;
        Ok(Self {
            router_norm: RmsNorm::new(scale.scale((hidden as f32).powf(-0.5))?, eps),
            router: Linear::load(&router.child("proj"), hidden, count)?,
            scale: router.shaped("per_expert_scale", &[count])?,
            chosen: config.chosen,
            dense_norm: norm("post_feedforward_layernorm_1")?,
            pre_norm: norm("pre_feedforward_layernorm_2")?,
            experts: Experts::load(&experts.child("switch_glu"), &experts, config)?,
            post_norm: norm("post_feedforward_layernorm_2")?,
        })
    }

    fn tensors(&self) -> Vec<&Tensor> {
        let norms = [
            &self.router_norm,
            &self.dense_norm,
            &self.pre_norm,
            &self.post_norm,
        ];
        let norms = norms.into_iter().flat_map(RmsNorm::tensors);
        norms
            .chain([&self.scale])
            .chain(self.router.tensors())
            .chain(self.experts.tensors())
            .collect()
    }

    /// `mlp`: what comes out of the feed-forward block, before any norm.
    fn forward(&self, h: &Tensor, mlp: Project<'_>, down: &Linear) -> Result<Tensor> {
        let dense = mlp.post_norm(&self.dense_norm).with(down)?;
        let scores = Project::of(h).norm(&self.router_norm).with(&self.router)?;
        let routes = Routes::of(&scores, self.chosen, Some(&self.scale))?;
        Project::of(h)
            .norm(&self.pre_norm)
            .post_norm(&self.post_norm)
            .plus(&dense)
            .experts(&self.experts, &routes)
    }
}

/// `h += norm(projection(gelu(gate(h)) * input))`
struct OwnInput {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
}

impl GemmaLayer {
    /// Takes `self_attn`, `mlp`, the four norms, `layer_scalar`; `per_layer_*` where there is such an input;
    /// `router`, `experts` and three more norms where there are experts.
    pub fn load(w: &Weights, attention: AttentionConfig, config: GemmaConfig) -> Result<Self> {
        let GemmaConfig {
            hidden,
            intermediate,
            layer_input,
            experts,
            eps,
        } = config;
        let norm = |name: &str| RmsNorm::load(&w.child(name), hidden, eps);
        let mlp = w.child("mlp");
        let own_input = match layer_input {
            0 => None,
            width => Some(OwnInput {
                gate: Linear::load(&w.child("per_layer_input_gate"), hidden, width)?,
                projection: Linear::load(&w.child("per_layer_projection"), width, hidden)?,
                norm: norm("post_per_layer_input_norm")?,
            }),
        };
        let factor = w.shaped("layer_scalar", &[1])?.to_vec::<f32>()?;
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(&w.child("self_attn"), attention)?,
            post_attention_norm: norm("post_attention_layernorm")?,
            pre_norm: norm("pre_feedforward_layernorm")?,
            gate: Linear::load(&mlp.child("gate_proj"), hidden, intermediate)?,
            up: Linear::load(&mlp.child("up_proj"), hidden, intermediate)?,
            down: Linear::load(&mlp.child("down_proj"), intermediate, hidden)?,
            post_norm: norm("post_feedforward_layernorm")?,
            mixture: experts
                .map(|config| Mixture::load(w, config, eps).map(Box::new))
                .transpose()?,
            own_input,
            factor: factor.first().copied().unwrap_or(1.0),
        })
    }

    /// An empty cache of the kind that this layer looks at.
    pub fn new_cache(&self) -> LayerCache {
        self.cache_stored(None)
    }

    /// As [`GemmaLayer::new_cache`], with keys and values stored as `kv` says; none: as they are.
    pub fn cache_stored(&self, kv: Option<QuantizedKv>) -> LayerCache {
        LayerCache::Kv(self.attention.new_cache(kv))
    }

    /// Bytes of a row's cache after so many tokens.
    pub fn cache_bytes(&self, tokens: usize, dtype: DType, kv: Option<QuantizedKv>) -> u64 {
        self.attention.cache_bytes(tokens, dtype, kv)
    }

    /// Dimensions of a head.
    pub fn head_dim(&self) -> i32 {
        self.attention.head_dim()
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        let norms = [
            &self.input_norm,
            &self.post_attention_norm,
            &self.pre_norm,
            &self.post_norm,
        ];
        let own = self.own_input.iter();
        let linears = [&self.gate, &self.up, &self.down].into_iter();
        let linears = linears.chain(own.clone().flat_map(|own| [&own.gate, &own.projection]));
        let norms = norms.into_iter().chain(own.map(|own| &own.norm));
        linears
            .flat_map(Linear::tensors)
            .chain(norms.flat_map(RmsNorm::tensors))
            .chain(self.attention.tensors())
            .chain(self.mixture.iter().flat_map(|mixture| mixture.tensors()))
            .collect()
    }

    /// Puts the keys and values of `context`, `[B, T, hidden]`, into the cache, as those of columns that
    /// are no part of the stream.
    pub fn remember(&self, context: &Tensor, step: &Step, cache: &mut LayerCache) -> Result<()> {
        let LayerCache::Kv(cache) = cache else {
            return Err(Error::failed("this cache belongs to another kind of layer"));
        };
        self.attention.remember(context, None, step, cache)
    }

    /// `[B, T, hidden]` to the same shape. `input`: the layer's own, `[B, T, layer_input]`, where there is
    /// one. The cache is the layer's own, or the one that it shares.
    pub fn forward(
        &self,
        h: &Tensor,
        step: &Step,
        cache: &mut LayerCache,
        input: Option<&Tensor>,
    ) -> Result<Tensor> {
        let LayerCache::Kv(cache) = cache else {
            return Err(Error::failed("this cache belongs to another kind of layer"));
        };
        let mixed = self.attention.mixed(h, &self.input_norm, step, cache)?;
        let h = Project::of(&mixed)
            .post_norm(&self.post_attention_norm)
            .plus(h)
            .with(self.attention.out())?;
        let x =
            Project::of(&h)
                .norm(&self.pre_norm)
                .gated(UnaryOp::GELU_TANH, &self.gate, &self.up)?;
        let mlp = Project::of(&x);
        let h = match (&self.mixture, &self.own_input) {
            (Some(mixture), _) => {
                let mixed = mixture.forward(&h, mlp, &self.down)?;
                h.add(&self.post_norm.forward(&mixed)?)?
            }
            (None, Some(_)) => mlp.post_norm(&self.post_norm).plus(&h).with(&self.down)?,
            (None, None) => {
                let mlp = mlp.post_norm(&self.post_norm).plus(&h);
                return mlp.scaled(self.factor).with(&self.down);
            }
        };
        let Some(own) = &self.own_input else {
            return h.scale(self.factor);
        };
        let input = input.ok_or_else(|| Error::failed("the layer's own input is absent"))?;
        let gate = Project::of(&h).with(&own.gate)?;
        let x = gate.unary(UnaryOp::GELU_TANH)?.mul(input)?;
        Project::of(&x)
            .post_norm(&own.norm)
            .plus(&h)
            .scaled(self.factor)
            .with(&own.projection)
    }
}
