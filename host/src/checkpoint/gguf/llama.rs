//! What a GGUF file of architecture `llama` says, in Hugging Face terms: tensor names and config.

use std::path::Path;

use serde_json::{Number, Value, json};

use super::{Metadata, Quoted};
use crate::error::LoadError;

const ARCHITECTURE: &str = "llama";

/// The sizes that the tensors must agree with, and the rest of the config.
#[derive(Debug)]
pub(super) struct Llama {
    pub(super) layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    config: Value,
}

/// What a GGUF tensor is called, and what has to be known about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Module path, without `.weight` or `.bias`.
    pub(super) module: String,
    /// `weight` or `bias`.
    pub(super) leaf: &'static str,
    /// Whether it is a matrix; if not, it is a vector.
    pub(super) matrix: bool,
    /// Rows are grouped by this many heads and were reordered within each.
    pub(super) heads: Option<u64>,
}

impl Llama {
    /// Reads the hyperparameters; refuses what a plain dense llama does not have.
    pub(super) fn read(path: &Path, metadata: &Metadata) -> Result<Self, LoadError> {
        let keys = Keys { path, metadata };
        match metadata.get_str("general.architecture") {
            Some(ARCHITECTURE) => {}
            Some(other) => {
                let what = format!(
                    "architecture {}; of GGUF files, only \"llama\" is supported",
                    Quoted(other)
                );
                return Err(LoadError::unsupported(path, what)
                    .remedy("use the model's safetensors checkpoint instead"));
            }
            None => return Err(keys.missing("general.architecture", "a string")),
        }
        if metadata
            .get_u64("split.count")
            .is_some_and(|parts| parts > 1)
        {
            return Err(
                LoadError::unsupported(path, "one part of a split GGUF model")
                    .remedy("merge the parts first (llama-gguf-split --merge)"),
            );
        }
        if keys.optional_size("llama.expert_count")?.unwrap_or(0) > 0 {
            return Err(LoadError::unsupported(
                path,
                "a mixture of experts (llama.expert_count)",
            ));
        }
        let hidden = keys.size("llama.embedding_length")?;
        let layers = keys.size("llama.block_count")?;
        let heads = keys.size("llama.attention.head_count")?;
        let kv_heads = keys
            .optional_size("llama.attention.head_count_kv")?
            .unwrap_or(heads);
        let head_dim = match keys.optional_size("llama.attention.key_length")? {
            Some(dim) => dim,
            None if heads > 0 => hidden / heads,
            None => 0,
        };
        if heads == 0
            || kv_heads == 0
            || heads % kv_heads != 0
            || head_dim == 0
            || head_dim % 2 != 0
        {
            let what = format!("{heads} heads of size {head_dim}, {kv_heads} for keys and values");
            return Err(LoadError::malformed(path, what));
        }
        for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            if let Some(dim) = keys.optional_size(key)?.filter(|dim| *dim != head_dim) {
                let what = format!("{key} is {dim}, which differs from the head size {head_dim}");
                return Err(LoadError::unsupported(path, what));
            }
        }
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": keys.size("llama.feed_forward_length")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": keys.size("llama.context_length")?,
            "rms_norm_eps": match keys.float("llama.attention.layer_norm_rms_epsilon")? {
                Some(eps) => eps,
                None => return Err(keys.missing("llama.attention.layer_norm_rms_epsilon", "a float")),
            },
            // llama.cpp's default, for files from before this was written.
            "rope_theta": keys.float("llama.rope.freq_base")?.unwrap_or(10_000.into()),
        });
        if let Some(scaling) = keys.rope_scaling()? {
            config["rope_scaling"] = scaling;
        }
        if let Some(id) = keys.optional_size("tokenizer.ggml.bos_token_id")? {
            config["bos_token_id"] = id.into();
        }
        let eos = keys.optional_size("tokenizer.ggml.eos_token_id")?;
        let eot = keys.optional_size("tokenizer.ggml.eot_token_id")?;
        match (eos, eot) {
            (Some(eos), Some(eot)) if eos != eot => config["eos_token_id"] = json!([eos, eot]),
            (Some(id), _) | (None, Some(id)) => config["eos_token_id"] = id.into(),
            (None, None) => {}
        }
        if let Some(id) = keys.optional_size("tokenizer.ggml.padding_token_id")? {
            config["pad_token_id"] = id.into();
        }
        Ok(Self {
            layers,
            heads,
            kv_heads,
            head_dim,
            config,
        })
    }

    /// The config, completed by what only the tensors tell.
    pub(super) fn into_config(
        mut self,
        vocab: usize,
        tied: bool,
        quantization: Option<Value>,
    ) -> Value {
        self.config["vocab_size"] = vocab.into();
        self.config["tie_word_embeddings"] = tied.into();
        if let Some(quantization) = quantization {
            self.config["quantization"] = quantization;
        }
        self.config
    }

    /// Rows per head.
    pub(super) fn head_dim(&self) -> u64 {
        self.head_dim
    }

    /// What the GGUF tensor `name` is; `None` when a dense llama has no such tensor.
    pub(super) fn target(&self, name: &str) -> Option<Target> {
        let (stem, leaf) = match name.rsplit_once('.')? {
            (stem, "weight") => (stem, "weight"),
            (stem, "bias") => (stem, "bias"),
            _ => return None,
        };
        let Some(rest) = stem.strip_prefix("blk.") else {
            let (module, matrix) = match stem {
                "token_embd" => ("model.embed_tokens", true),
                "output_norm" => ("model.norm", false),
                "output" => ("lm_head", true),
                // Per-frequency divisors (llama 3 scaling). No Hugging Face checkpoint has them.
                "rope_freqs" => ("rope_freqs", false),
                _ => return None,
            };
            return (leaf == "weight").then(|| Target {
                module: module.to_owned(),
                leaf,
                matrix,
                heads: None,
            });
        };
        let (layer, part) = rest.split_once('.')?;
        let number: u64 = layer.parse().ok()?;
        // One spelling per layer ("01", "+1" are others), so that no two names meet in one.
        if number >= self.layers || number.to_string() != layer {
            return None;
        }
        let (module, projection, heads) = match part {
            "attn_norm" => ("input_layernorm", false, None),
            "attn_q" => ("self_attn.q_proj", true, Some(self.heads)),
            "attn_k" => ("self_attn.k_proj", true, Some(self.kv_heads)),
            "attn_v" => ("self_attn.v_proj", true, None),
            "attn_output" => ("self_attn.o_proj", true, None),
            "ffn_norm" => ("post_attention_layernorm", false, None),
            "ffn_gate" => ("mlp.gate_proj", true, None),
            "ffn_up" => ("mlp.up_proj", true, None),
            "ffn_down" => ("mlp.down_proj", true, None),
            _ => return None,
        };
        // A norm has no bias; that of a projection is a vector.
        let is_bias = leaf == "bias";
        (projection || !is_bias).then(|| Target {
            module: format!("model.layers.{layer}.{module}"),
            leaf,
            matrix: projection && !is_bias,
            heads,
        })
    }
}

/// Required and optional keys, with errors that name them.
struct Keys<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
}

impl Keys<'_> {
    fn missing(&self, key: &str, wanted: &str) -> LoadError {
        match self.metadata.kind(key) {
            None => LoadError::missing(self.path, format!("metadata key {key:?} is missing")),
            Some(kind) => LoadError::malformed(
                self.path,
                format!("metadata key {key:?} is {kind} that is not {wanted}"),
            ),
        }
    }

    /// A count or an id; none in any model needs more than 32 bits.
    fn optional_size(&self, key: &str) -> Result<Option<u64>, LoadError> {
        match self.metadata.get_u64(key) {
            Some(value) if value <= u64::from(u32::MAX) => Ok(Some(value)),
            None if !self.metadata.contains(key) => Ok(None),
            _ => Err(self.missing(key, "a number from 0 to 2^32 - 1")),
        }
    }

    fn size(&self, key: &str) -> Result<u64, LoadError> {
        match self.optional_size(key)? {
            Some(value) => Ok(value),
            None => Err(self.missing(key, "a number")),
        }
    }

    /// A positive float, as the shortest decimal that rounds to it: 1e-5, not 0.000009999999747378752.
    fn float(&self, key: &str) -> Result<Option<Number>, LoadError> {
        match self.metadata.get_f32(key) {
            None if !self.metadata.contains(key) => Ok(None),
            Some(value) if value.is_finite() && value > 0.0 => {
                let decimal = value.to_string().parse().unwrap_or(f64::from(value));
                Ok(Number::from_f64(decimal))
            }
            _ => Err(self.missing(key, "a positive float")),
        }
    }

    fn rope_scaling(&self) -> Result<Option<Value>, LoadError> {
        let key = "llama.rope.scaling.type";
        let kind = match self.metadata.get_str(key) {
            None if self.metadata.contains(key) => return Err(self.missing(key, "a string")),
            // A factor without a type is linear scaling; `scale_linear` is its old name.
            kind => kind.unwrap_or("linear"),
        };
        match kind {
            "none" => Ok(None),
            "linear" => {
                // Some files say 0 for "no scaling".
                let written = |key: &str| self.metadata.get_f32(key) != Some(0.0);
                let mut factor = None;
                for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
                    if factor.is_none() && written(key) {
                        factor = self.float(key)?;
                    }
                }
                Ok(factor.map(|factor| json!({"rope_type": "linear", "factor": factor})))
            }
            other => {
                let what = format!(
                    "rope scaling of type {}; \"linear\" is supported",
                    Quoted(other)
                );
                Err(LoadError::unsupported(self.path, what))
            }
        }
    }
}
