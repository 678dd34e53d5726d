//! What a Gemma 4 text config says of its layers; targets and drafters have the same keys.

use crate::abi::{DonorKind, UnaryOp};
use crate::config::Config;
use crate::error::Result;
use crate::layers::{AttentionConfig, ExpertsConfig, KvSource, Rope};

/// What a layer of Gemma 4 attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmaKind {
    /// A sliding window.
    Sliding,
    /// Everything before.
    Full,
}

impl GemmaKind {
    /// The keys that layers of this kind lend, or look at.
    pub fn donor(self) -> DonorKind {
        match self {
            Self::Full => DonorKind::FULL,
            Self::Sliding => DonorKind::SLIDING,
        }
    }

    /// What every layer attends to, as `layer_types` of a text config lists it.
    ///
    /// # Errors
    /// That is missing, or the layers are of a sort that these are not: another activation.
    pub fn of_layers(text: &Config) -> Result<Vec<GemmaKind>> {
        let only = "gelu_pytorch_tanh";
        if let Some(act) = text
            .opt_str("hidden_activation")?
            .filter(|act| *act != only)
        {
            return Err(text.error("hidden_activation", format!("is {act}; supported: {only}")));
        }
        let kinds = text.layer_types(&[
            ("sliding_attention", GemmaKind::Sliding),
            ("full_attention", GemmaKind::Full),
        ])?;
        kinds.ok_or_else(|| text.error("layer_types", "is missing"))
    }
}

/// The attention of a layer as a Gemma 4 text config describes it. `shared`: it has no keys of its own.
pub fn gemma_attention(
    text: &Config,
    index: usize,
    kind: GemmaKind,
    shared: bool,
) -> Result<AttentionConfig> {
    let (hidden, eps) = (text.size("hidden_size")?, text.float("rms_norm_eps")?);
    // Newer files state sizes that differ per layer, and only there.
    let own = match text.section("per_layer_config")? {
        Some(all) => all.section(&index.to_string())?,
        None => None,
    };
    let stated = |key: &str| match &own {
        Some(own) => own.opt_size(key),
        None => Ok(None),
    };
    let tied = kind == GemmaKind::Full && text.opt_bool("attention_k_eq_v")?.unwrap_or(false);
    let head_dim = match (stated("head_dim")?, kind) {
        (Some(dim), _) => dim,
        (None, GemmaKind::Sliding) => text.size("head_dim")?,
        (None, GemmaKind::Full) => text.size("global_head_dim")?,
    };
    let kv_heads = match (stated("num_key_value_heads")?, tied) {
        (Some(heads), _) => heads,
        (None, true) => match text.opt_size("num_global_key_value_heads")? {
            Some(heads) => heads,
            None => text.size("num_key_value_heads")?,
        },
        (None, false) => text.size("num_key_value_heads")?,
    };
    let heads = text.size("num_attention_heads")?;
    if heads % kv_heads != 0 {
        let problem = format!("is {kv_heads}, not a divisor of {heads} heads");
        return Err(text.error("num_key_value_heads", problem));
    }
    text.check_heads("num_attention_heads", heads, head_dim)?;
    if head_dim % 2 != 0 {
        return Err(text.error("head_dim", format!("is {head_dim}, an odd number")));
    }
    Ok(AttentionConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        rope: rope(text, kind, head_dim)?,
        qk_norm: Some(eps),
        gated: false,
        scale: 1.0,
        window: match kind {
            GemmaKind::Sliding => text.size("sliding_window")?,
            GemmaKind::Full => 0,
        },
        kv: match (shared, tied) {
            (true, _) => KvSource::Shared,
            (false, true) => KvSource::Tied,
            (false, false) => KvSource::Own,
        },
        v_norm: Some(eps),
        block: false,
    })
}

/// The experts that every layer has beside its feed-forward block, if the config enables them.
pub fn gemma_experts(text: &Config) -> Result<Option<ExpertsConfig>> {
    if !text.opt_bool("enable_moe_block")?.unwrap_or(false) {
        return Ok(None);
    }
    ExpertsConfig::read(text, "top_k_experts", UnaryOp::GELU_TANH).map(Some)
}

fn rope(text: &Config, kind: GemmaKind, head_dim: i32) -> Result<Rope> {
    let name = match kind {
        GemmaKind::Sliding => "sliding_attention",
        GemmaKind::Full => "full_attention",
    };
    let parameters = text.section("rope_parameters")?;
    let Some(section) = parameters
        .and_then(|all| all.section(name).transpose())
        .transpose()?
    else {
        return Err(text.error("rope_parameters", format!("says nothing about {name}")));
    };
    let base = section.float("rope_theta")?;
    if base <= 0.0 {
        return Err(section.error(
            "rope_theta",
            format!("is {base}, expected a positive number"),
        ));
    }
    match section.str("rope_type")? {
        "default" => Ok(Rope::new(head_dim, base)),
        "proportional" => {
            let share = section.float("partial_rotary_factor")?;
            if !(0.0..=1.0).contains(&share) {
                let problem = format!("is {share}, expected 0 to 1");
                return Err(section.error("partial_rotary_factor", problem));
            }
            Rope::proportional(head_dim, base, share)
        }
        other => {
            let problem = format!("is {other}; supported: default, proportional");
            Err(section.error("rope_type", problem))
        }
    }
}
