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
    assert!(checkpoint.config().is_object());
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name).unwrap().unwrap();
        let elements: usize = tensor.shape.iter().product();
        let bytes = tensor.to_vec().len();
        assert_eq!(bytes, elements * tensor.dtype.size());
        // More than is said where scales do not fit f16.
        let said = checkpoint.bytes_of(name).unwrap();
        assert!(said == bytes as u64 || 2 * said == bytes as u64);
        total += said;
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
        (DType::F16, vec![16, 1])
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
        let bytes = tensor.to_vec();
        let words = bytes.as_chunks::<2>().0.iter();
        words
            .map(|b| half::f16::from_le_bytes(*b).to_f32())
            .collect()
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
    // Whatever the tensor is for, and whether or not its shape is right.
    let mut file = Gguf::llama();
    file.tensor("v.patch_embd.weight", &[3, 3, 3], 30, 54);
    assert!(fails(&file).contains("\"v.patch_embd.weight\" is BF16"));
    let mut file = Gguf::llama();
    file.tensors[1].2 = 99;
    assert!(fails(&file).contains("ggml type 99"));
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
    file.version = 3u32.swap_bytes();
    assert!(fails(&file).contains("big-endian"));
    let mut file = Gguf::llama();
    file.set("split.count", 2, 2u16.to_le_bytes().into());
    assert!(fails(&file).contains("split"));
    file.set("split.count", 2, 1u16.to_le_bytes().into());
    file.set("llama.expert_count", UINT32, 8u32.to_le_bytes().into());
    assert!(fails(&file).contains("mixture of experts"));
}

#[test]
fn biases_belong_to_projections_and_are_vectors() {
    let mut file = Gguf::llama();
    file.tensor("blk.0.attn_q.bias", &[32], 0, 128);
    let checkpoint = open(file.bytes()).unwrap();
    let bias = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias");
    assert_eq!(bias.unwrap().unwrap().shape, [32]);
    // As a quantized matrix, its scales would take the place of those of the weight.
    let mut file = Gguf::llama();
    file.tensor("blk.0.attn_q.bias", &[32, 32], 3, 32 * 20);
    assert!(fails(&file).contains("shape [32, 32], which it can't have"));
    let mut file = Gguf::llama();
    file.tensor("blk.0.attn_norm.bias", &[32], 0, 128);
    assert!(fails(&file).contains("has no place"));
    let mut file = Gguf::llama();
    file.tensor("blk.0.attn_norm.weight", &[32, 1], 0, 128);
    assert!(fails(&file).contains("which it can't have"));
}

#[test]
fn what_is_not_gguf_is_told_so() {
    for bytes in [&b""[..], b"GGU", b"GGML", b"lmgg\x03\0\0\0"] {
        let error = open(bytes.to_vec()).unwrap_err().to_string();
        assert!(error.contains("not a GGUF file"), "{error}");
    }
}

#[test]
fn a_file_is_known_by_its_content_and_through_links() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("0123abcd");
    std::fs::write(&blob, Gguf::llama().bytes()).unwrap();
    assert!(Checkpoint::open(&blob).unwrap().gguf().is_some());
    #[cfg(unix)]
    {
        let link = dir.path().join("m.gguf");
        std::os::unix::fs::symlink(&blob, &link).unwrap();
        assert_eq!(Checkpoint::open(&link).unwrap().path(), link);
    }
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, "").unwrap();
    assert!(Checkpoint::open(&empty).is_err());
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
fn alignment_is_honoured_when_it_is_a_power_of_two() {
    let set = |file: &mut Gguf, value: u32| {
        file.set("general.alignment", UINT32, value.to_le_bytes().into());
    };
    let mut file = Gguf::llama();
    file.alignment = 128;
    set(&mut file, 128);
    assert!(exercise(file.bytes()));
    // The offsets of this one are multiples of 32 only.
    file.alignment = 32;
    assert!(fails(&file).contains("not aligned to 128 bytes"));
    for value in [0, 24, 48, 1 << 21, u32::MAX] {
        set(&mut file, value);
        assert!(fails(&file).contains("general.alignment is not a power of two"));
    }
    file.set("general.alignment", STRING, string("32"));
    assert!(fails(&file).contains("general.alignment is not a power of two"));
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

#[test]
fn hostile_counts_and_lengths_are_refused() {
    let patched = |at: usize, value: u64| {
        let mut bytes = Gguf::llama().bytes();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        open(bytes).unwrap_err().to_string()
    };
    // The number of tensors, that of pairs, the length of the first key, that of its value.
    let (tensors, pairs, key) = (8, 16, 24);
    let value = key + 8 + "general.architecture".len() + 4;
    for huge in [u64::MAX, 1 << 40] {
        assert!(patched(tensors, huge).contains(&format!("claims {huge} tensors")));
        assert!(patched(pairs, huge).contains(&format!("claims {huge} metadata pairs")));
        assert!(patched(key, huge).contains("ends too early"));
        assert!(patched(value, huge).contains("ends too early"));
    }
    // Small enough to be believed: the table then runs into the tensor data.
    patched(tensors, 1 << 18);
    patched(pairs, 1 << 18);
    patched(key, 1 << 10);
    let mut file = Gguf::llama();
    file.tensors[0].1 = vec![1; 5];
    assert!(fails(&file).contains("has 5 dimensions"));
    file.tensors[0].1 = vec![32, 0];
    assert!(fails(&file).contains("invalid shape"));
    file.tensors[0].0 = "\n".repeat(1 << 20);
    let message = fails(&file);
    assert!(message.len() < 600 && message.lines().count() <= 3);
}

/// SmolLM2, if the file was fetched.
#[test]
fn smollm2_is_what_its_publisher_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        return;
    }
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut config = checkpoint.config().clone();
    let quantization = config.as_object_mut().unwrap().remove("quantization");
    assert_eq!(quantization.unwrap()["group_size"], 32);
    let expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "vocab_size": 49152, "tie_word_embeddings": true,
    });
    assert_eq!(config, expected);
    let tokens = checkpoint.gguf().unwrap();
    let tokens = tokens.get_array_of_str("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.len(), 49152);
    for layer in 0..30 {
        for (module, rows, cols) in [
            ("self_attn.q_proj", 576, 576),
            ("self_attn.k_proj", 192, 576),
            ("self_attn.v_proj", 192, 576),
            ("self_attn.o_proj", 576, 576),
            ("mlp.gate_proj", 1536, 576),
            ("mlp.up_proj", 1536, 576),
            ("mlp.down_proj", 576, 1536),
        ] {
            let name = format!("model.layers.{layer}.{module}.scales");
            let scales = checkpoint.tensor(&name).unwrap().unwrap();
            assert_eq!(scales.shape, [rows, cols / 32], "{name}");
        }
    }
}

proptest! {
    #[test]
    fn damage_never_panics(
        damage in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        number in (any::<usize>(), prop_oneof![0u64..64, Just(u64::MAX), Just(1 << 63), any::<u64>()]),
        whole: bool,
    ) {
        let mut bytes = Gguf::llama().bytes();
        // The header is the part with structure.
        let len = bytes.len().min(1500);
        for (at, byte) in damage {
            bytes[at % len] = byte;
        }
        if !whole {
            let at = number.0 % (len - 8);
            bytes[at..at + 8].copy_from_slice(&number.1.to_le_bytes());
        }
        exercise(bytes);
    }
}
