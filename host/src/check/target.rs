//! A tiny target for drafters that take any: random weights that follow from a seed, as a checkpoint on disk.

use std::path::Path;

use serde_json::json;

use super::stage::Random;
use crate::checkpoint::{DType, TensorSpec, Writer};
use crate::error::LoadError;

const HIDDEN: usize = 64;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const MLP: usize = 128;
const VOCAB: usize = 256;
const SEED: u64 = 1;

/// Writes the checkpoint into a directory that exists.
///
/// # Errors
/// A file can't be written.
pub fn write(dir: &Path) -> Result<(), LoadError> {
    let config = json!({
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": MLP,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    let path = dir.join("config.json");
    std::fs::write(&path, config.to_string()).map_err(|e| LoadError::new(&path, e))?;

    let tensors = tensors();
    let mut writer = Writer::create(&dir.join("model.safetensors"), &tensors)?;
    let mut random = Random(SEED);
    for tensor in &tensors {
        let count: usize = tensor.shape.iter().product();
        let width = tensor.shape.last().copied().unwrap_or(1) as f32;
        let is_norm = tensor.shape.len() == 1;
        let value = |_| {
            // Even between -1 and 1; a sum of `width` of them comes out about as large as one.
            let even = random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
            let value = match is_norm {
                true => 1.0 + 0.1 * even,
                false => even * (3.0 / width).sqrt(),
            };
            value.to_le_bytes()
        };
        let bytes: Vec<u8> = (0..count).flat_map(value).collect();
        writer.write(&tensor.name, &bytes)?;
    }
    writer.finish()
}

fn tensors() -> Vec<TensorSpec> {
    let spec = |name: String, shape: &[usize]| TensorSpec {
        name,
        dtype: DType::F32,
        shape: shape.to_vec(),
    };
    let mut tensors = vec![
        spec("model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN]),
        spec("model.norm.weight".to_owned(), &[HIDDEN]),
        spec("lm_head.weight".to_owned(), &[VOCAB, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", &[HIDDEN][..]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[HEADS * HEAD, HIDDEN]),
            ("self_attn.k_proj", &[KV_HEADS * HEAD, HIDDEN]),
            ("self_attn.v_proj", &[KV_HEADS * HEAD, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HEADS * HEAD]),
            ("mlp.gate_proj", &[MLP, HIDDEN]),
            ("mlp.up_proj", &[MLP, HIDDEN]),
            ("mlp.down_proj", &[HIDDEN, MLP]),
        ] {
            tensors.push(spec(format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    tensors
}
