//! Whole GGUF files through the opener: what a user sees of good, unsupported and hostile ones.

use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::fixture::{Gguf, STRING, UINT32, string};
use crate::checkpoint::{Checkpoint, DType};
use crate::error::LoadError;

fn open(bytes: Vec<u8>) -> Result<Checkpoint, LoadError> {
    Checkpoint::from_gguf(Path::new("m.gguf"), bytes.into())
}

fn fails(file: &Gguf) -> String {
    open(file.bytes()).unwrap_err().to_string()
}

/// Opens and asks for everything; whether it could be opened.
fn exercise(bytes: Vec<u8>) -> bool {
    let Ok(checkpoint) = open(bytes) else {
        return false;
    };
    let mut total = 0;
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name).unwrap().unwrap();
        let elements: usize = tensor.shape.iter().product();
        assert_eq!(tensor.bytes.len(), elements * tensor.dtype.size());
        total += tensor.bytes.len() as u64;
    }
    assert_eq!(total, checkpoint.bytes());
    if let Some(metadata) = checkpoint.gguf() {
        for key in metadata.keys() {
            metadata.get_array_of_str(key);
            metadata.get_array_of_i64(key);
            metadata.get_array_of_f32(key);
        }
    }
    true
}

#[test]
fn a_llama_is_presented_in_hugging_face_terms() {
    let mut file = Gguf::llama();
    file.set(
        "tokenizer.ggml.eos_token_id",
        UINT32,
        2u32.to_le_bytes().into(),
    );
    let checkpoint = open(file.bytes()).unwrap();
    let expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10_000,
        "eos_token_id": 2, "vocab_size": 64, "tie_word_embeddings": true,
        "quantization": {"group_size": 32, "bits": 4, "mode": "affine",
            "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"}},
    });
    assert_eq!(checkpoint.config(), &expected);
    let shape = |name: &str| {
        let tensor = checkpoint.tensor(name).unwrap().unwrap();
        (tensor.dtype, tensor.shape)
    };
    assert_eq!(
        shape("model.embed_tokens.weight"),
        (DType::U32, vec![64, 8])
    );
    assert_eq!(
        shape("model.layers.0.self_attn.k_proj.weight"),
        (DType::U32, vec![16, 4])
    );
    assert_eq!(
        shape("model.layers.0.self_attn.k_proj.biases"),
        (DType::F32, vec![16, 1])
    );
    assert_eq!(
        shape("model.layers.0.self_attn.v_proj.weight"),
        (DType::F16, vec![16, 32])
    );
    assert_eq!(shape("model.norm.weight"), (DType::F32, vec![32]));
    let metadata = checkpoint.gguf().unwrap();
    let tokens = metadata.get_array_of_str("tokenizer.ggml.tokens");
    assert_eq!(tokens.unwrap(), ["a", "ü", ""]);
    assert_eq!(metadata.get_u64("llama.context_length"), Some(128));
    assert_eq!(metadata.get_str("llama.context_length"), None);
    assert!(exercise(file.bytes()));
}

#[test]
fn only_query_and_key_rows_move() {
    let file = Gguf::llama();
    let checkpoint = open(file.bytes()).unwrap();
    let scales = |name: &str| -> Vec<f32> {
        let name = format!("model.layers.0.self_attn.{name}.scales");
        let tensor = checkpoint.tensor(&name).unwrap().unwrap();
        let words = tensor.bytes.as_chunks::<4>().0.iter();
        words.map(|b| f32::from_le_bytes(*b)).collect()
    };
    let data = &file
        .tensors
        .iter()
        .find(|t| t.0 == "blk.0.attn_q.weight")
        .unwrap()
        .3;
    let row = |row: usize| half::f16::from_le_bytes([data[row * 20], data[row * 20 + 1]]).to_f32();
    // Of the second head (rows 16..32): the first half was at even places, the second at odd ones.
    let q = scales("q_proj");
    assert_eq!(&q[16..20], &[row(16), row(18), row(20), row(22)]);
    assert_eq!(&q[24..28], &[row(17), row(19), row(21), row(23)]);
}

#[test]
fn what_is_not_supported_is_named() {
    let mut file = Gguf::llama();
    file.tensors[2].2 = 12;
    let message = fails(&file);
    assert!(
        message.contains("\"blk.0.attn_q.weight\" is Q4_K"),
        "{message}"
    );
    let mut file = Gguf::llama();
    file.set("general.architecture", STRING, string("gemma3"));
    assert!(fails(&file).contains("\"gemma3\""));
    let mut file = Gguf::llama();
    file.set("llama.rope.scaling.type", STRING, string("yarn"));
    assert!(fails(&file).contains("\"yarn\""));
    let mut file = Gguf::llama();
    file.tensor("blk.0.ffn_gate_inp.weight", &[32], 0, 128);
    assert!(fails(&file).contains("\"blk.0.ffn_gate_inp.weight\""));
    let mut file = Gguf::llama();
    file.version = 1;
    assert!(fails(&file).contains("version 1"));
}

#[test]
fn what_is_wrong_is_named() {
    let mut file = Gguf::llama();
    file.unset("llama.block_count");
    let message = fails(&file);
    assert!(
        message.contains("m.gguf") && message.contains("\"llama.block_count\" is missing"),
        "{message}"
    );
    file.set("llama.block_count", STRING, string("one"));
    assert!(fails(&file).contains("is a string"));
    file.set("llama.block_count", UINT32, u32::MAX.to_le_bytes().into());
    assert!(fails(&file).contains("but there are 5 tensors"));
    let mut file = Gguf::llama();
    file.tensors[3].1 = vec![32, 15];
    assert!(fails(&file).contains("15 rows for 1 heads"));
    let mut file = Gguf::llama();
    file.tensors.push(file.tensors[1].clone());
    assert!(fails(&file).contains("is there twice"));
    let mut file = Gguf::llama();
    file.tensors[0].1 = vec![32, 65];
    assert!(fails(&file).contains("overlap"));
    file.tensors[0].1 = vec![32, 1 << 20];
    assert!(fails(&file).contains("ends before the data"));
    file.tensors[0].1 = vec![1 << 63, 1 << 63];
    assert!(fails(&file).contains("ends before the data") || fails(&file).contains("blocks"));
    let mut file = Gguf::llama();
    file.tensors.remove(0);
    assert!(fails(&file).contains("token_embd"));
}

#[test]
fn scaling_and_an_untied_head_reach_the_config() {
    let mut file = Gguf::llama();
    file.set("llama.rope.scaling.factor", 6, 2f32.to_le_bytes().into());
    file.tensor("output.weight", &[32, 64], 1, 64 * 64);
    file.tensor("rope_freqs.weight", &[8], 0, 32);
    let checkpoint = open(file.bytes()).unwrap();
    assert_eq!(
        checkpoint.config()["rope_scaling"],
        json!({"rope_type": "linear", "factor": 2.0})
    );
    assert_eq!(checkpoint.config()["tie_word_embeddings"], json!(false));
    assert!(checkpoint.contains("lm_head.weight") && checkpoint.contains("rope_freqs.weight"));
}

#[test]
fn truncation_is_an_error_at_every_length() {
    let whole = Gguf::llama().bytes();
    // The padding after the last tensor is not needed.
    let lengths = 0..whole.len() - 32;
    assert!(
        lengths
            .into_iter()
            .all(|length| !exercise(whole[..length].to_vec()))
    );
    assert!(exercise(whole));
}

#[test]
fn hostile_arrays_end_with_the_file() {
    let element = |kind: u32, len: u64| [&kind.to_le_bytes()[..], &len.to_le_bytes()].concat();
    for value in [
        element(0, u64::MAX),
        element(12, u64::MAX / 8),
        element(8, u64::MAX),
        element(9, u64::MAX),
        element(99, 1),
        element(9, 1).repeat(100_000),
    ] {
        let mut file = Gguf::llama();
        file.set("x", 9, value);
        assert!(!exercise(file.bytes()));
    }
}

proptest! {
    #[test]
    fn damage_never_panics(damage in prop::collection::vec((0usize..1500, any::<u8>()), 1..4)) {
        let mut bytes = Gguf::llama().bytes();
        for (at, byte) in damage {
            bytes[at] = byte;
        }
        exercise(bytes);
    }
}
