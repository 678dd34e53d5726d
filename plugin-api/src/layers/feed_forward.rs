//! What follows the mixer of a decoder layer: one block for all columns, or experts.

use crate::abi::UnaryOp;
use crate::checkpoint::Weights;
use crate::config::Config;
use crate::error::Result;
use crate::layers::{Experts, ExpertsConfig, Linear, Mlp, Project, RmsNorm, Routes};
use crate::tensor::Tensor;

/// The shape of a feed-forward block.
#[derive(Clone, Copy, Debug)]
pub enum FeedForwardConfig {
    /// One block of this width.
    Dense(i32),
    /// Experts, and beside them a block that all columns go through.
    Sparse {
        /// The experts.
        experts: ExpertsConfig,
        /// Width of the shared block.
        shared: i32,
    },
}

impl FeedForwardConfig {
    /// What a Qwen3.5 text config says: experts if it has `num_experts`, else one block.
    pub fn qwen(text: &Config) -> Result<Self> {
        if let Some(act) = text.opt_str("hidden_act")?.filter(|act| *act != "silu") {
            return Err(text.error("hidden_act", format!("is {act}; supported: silu")));
        }
        if text.get("num_experts").is_none_or(|count| count == 0) {
            return Ok(Self::Dense(text.size("intermediate_size")?));
        }
        if text.opt_bool("norm_topk_prob")? == Some(false) {
            return Err(text.error("norm_topk_prob", "is false, which is not supported"));
        }
        if let Some(step) = text.opt_size("decoder_sparse_step")?.filter(|&n| n != 1) {
            let problem = format!("is {step}; supported: 1, experts in every layer");
            return Err(text.error("decoder_sparse_step", problem));
        }
        if text
            .opt_ints("mlp_only_layers")?
            .is_some_and(|layers| !layers.is_empty())
        {
            let problem = "lists layers without experts, which is not supported";
            return Err(text.error("mlp_only_layers", problem));
        }
        Ok(Self::Sparse {
            experts: ExpertsConfig::read(text, "num_experts_per_tok", UnaryOp::SILU)?,
            shared: text.size("shared_expert_intermediate_size")?,
        })
    }
}

impl FeedForwardConfig {
    /// The tensors of a layer's block, for [`crate::Checkpoint::require_tensors`]; not those of experts,
    /// which come in several layouts.
    pub fn tensors(&self) -> &'static [&'static str] {
        match self {
            Self::Dense(_) => &[
                "mlp.gate_proj.weight",
                "mlp.up_proj.weight",
                "mlp.down_proj.weight",
            ],
            Self::Sparse { .. } => &[
                "mlp.gate.weight",
                "mlp.shared_expert_gate.weight",
                "mlp.shared_expert.gate_proj.weight",
                "mlp.shared_expert.up_proj.weight",
                "mlp.shared_expert.down_proj.weight",
            ],
        }
    }
}

/// A feed-forward block.
pub enum FeedForward {
    /// One block.
    Dense(Mlp),
    /// Experts and a shared block.
    Sparse(Box<SparseMlp>),
}

impl FeedForward {
    /// Takes what [`Mlp::load`] or [`SparseMlp::load`] takes.
    pub fn load(w: &Weights, hidden: i32, config: FeedForwardConfig) -> Result<Self> {
        match config {
            FeedForwardConfig::Dense(width) => Mlp::load(w, hidden, width).map(Self::Dense),
            FeedForwardConfig::Sparse { experts, shared } => {
                let mlp = SparseMlp::load(w, experts, shared)?;
                Ok(Self::Sparse(Box::new(mlp)))
            }
        }
    }

    /// With another activation of a dense block.
    #[must_use]
    pub fn with_activation(self, activation: UnaryOp) -> Self {
        match self {
            Self::Dense(mlp) => Self::Dense(mlp.with_activation(activation)),
            sparse @ Self::Sparse(_) => sparse,
        }
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Dense(mlp) => mlp.tensors(),
            Self::Sparse(mlp) => mlp.tensors(),
        }
    }

    /// `h + block(norm(h))`, `[.., hidden]`.
    pub fn forward(&self, h: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(h, norm),
            Self::Sparse(mlp) => mlp.forward(h, norm),
        }
    }
}

/// SwiGLU experts, and one that all columns go through behind a gate of its own:
/// `experts(x) + sigmoid(shared_gate(x)) * shared(x)`.
pub struct SparseMlp {
    router: Linear,
    chosen: i32,
    experts: Experts,
    shared: Mlp,
    shared_gate: Linear,
}

impl SparseMlp {
    /// Takes `gate` (the router), `switch_mlp` or `experts`, `shared_expert` and `shared_expert_gate`.
    pub fn load(w: &Weights, config: ExpertsConfig, shared: i32) -> Result<Self> {
        let hidden = config.hidden;
        Ok(Self {
            router: Linear::load(&w.child("gate"), hidden, config.count)?,
            chosen: config.chosen,
            experts: Experts::load(&w.child("switch_mlp"), &w.child("experts"), config)?,
            shared: Mlp::load(&w.child("shared_expert"), hidden, shared)?,
            shared_gate: Linear::load(&w.child("shared_expert_gate"), hidden, 1)?,
        })
    }

    /// The tensors it holds.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [
            self.router.tensors(),
            self.experts.tensors(),
            self.shared.tensors(),
            self.shared_gate.tensors(),
        ]
        .concat()
    }

    /// `h + block(norm(h))`, `[.., hidden]`.
    pub fn forward(&self, h: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let x = Project::of(h).norm(norm);
        let [scores, gate] = x.through([&self.router, &self.shared_gate])?;
        let shared = self.shared.unadded(h, norm)?.mul(&gate.sigmoid()?)?;
        let routes = Routes::of(&scores, self.chosen, None)?;
        h.add(&x.plus(&shared).experts(&self.experts, &routes)?)
    }
}
