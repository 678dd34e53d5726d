//! Makes GGUF files out of llama checkpoints, as llama.cpp's converter does; and what their weights
//! then stand for, as a checkpoint again.
//!
//! Written from the formats' descriptions (`ggml-common.h`, `convert_hf_to_gguf.py`), not from the
//! reader under test.

use std::f64::consts::PI;
use std::path::Path;

use half::f16;
use serde_json::Value;

use crate::json;
use crate::tensors::{self, Tensor, Tensors, bytes_of};

/// Values in a quantized block.
const BLOCK: usize = 32;

/// The element type of a file's matrices; its vectors are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q8_0,
}

impl Kind {
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
        }
    }

    /// The values as the file has them, and what those stand for.
    fn encode(self, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
        match self {
            Self::F32 => (bytes_of(values), values.to_vec()),
            Self::F16 => {
                let short: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
                let bytes = short.iter().flat_map(|x| x.to_le_bytes()).collect();
                (bytes, short.iter().map(|x| x.to_f32()).collect())
            }
            _ => {
                let blocks = values.chunks_exact(BLOCK).map(|block| self.block(block));
                let (bytes, values): (Vec<_>, Vec<_>) = blocks.unzip();
                (bytes.concat(), values.concat())
            }
        }
    }

    /// One block of a quantized type.
    fn block(self, x: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let least = x.iter().copied().fold(f32::INFINITY, f32::min);
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let furthest = if -least > most { least } else { most };
        let (d, m) = match self {
            Self::Q4_1 => ((most - least) / 15.0, least),
            Self::Q8_0 => (furthest.abs() / 127.0, 0.0),
            _ => (furthest / -8.0, 0.0),
        };
        let (d, m) = (f16::from_f32(d), f16::from_f32(m));
        let (scale, offset) = (d.to_f32(), m.to_f32());
        let q = |x: f32, from: f32, to: f32| match scale {
            0.0 => 0.0f32.clamp(from, to),
            _ => ((x - offset) / scale).round().clamp(from, to),
        };
        let mut bytes = d.to_le_bytes().to_vec();
        let range = match self {
            Self::Q4_1 => {
                bytes.extend(m.to_le_bytes());
                (0.0, 15.0)
            }
            Self::Q8_0 => (-127.0, 127.0),
            _ => (-8.0, 7.0),
        };
        let q: Vec<f32> = x.iter().map(|&x| q(x, range.0, range.1)).collect();
        let nibble = |q: f32| (q - range.0) as u8;
        match self {
            Self::Q8_0 => bytes.extend(q.iter().map(|&q| q as i8 as u8)),
            // Byte j holds the values j and j + 16.
            _ => bytes.extend((0..16).map(|j| nibble(q[j]) | nibble(q[j + 16]) << 4)),
        }
        (bytes, q.iter().map(|q| q * scale + offset).collect())
    }
}

/// Writes the llama checkpoint in `dir` as a GGUF file.
pub fn write(dir: &Path, kind: Kind, out: &Path) {
    let config = json(&dir.join("config.json"));
    let size = |key: &str| config[key].as_u64().expect(key) as usize;
    let mut file = File::default();
    let head_dim = size("head_dim");
    file.text("general.architecture", "llama");
    for (key, value) in [
        ("block_count", size("num_hidden_layers")),
        ("context_length", size("max_position_embeddings")),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", size("intermediate_size")),
        ("attention.head_count", size("num_attention_heads")),
        ("attention.head_count_kv", size("num_key_value_heads")),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("vocab_size", size("vocab_size")),
    ] {
        file.number(&format!("llama.{key}"), value as u32);
    }
    for (key, from) in [
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rope.freq_base", "rope_theta"),
    ] {
        let value = config[from].as_f64().expect(from) as f32;
        file.float(&format!("llama.{key}"), value);
    }
    tokenizer(&mut file, dir, &config);
    for (name, weight) in weights(dir) {
        let heads = match name.rsplit('.').nth(1) {
            Some("q_proj") => size("num_attention_heads"),
            Some("k_proj") => size("num_key_value_heads"),
            _ => 0,
        };
        let values = match heads {
            0 => weight.values,
            _ => interleaved(&weight, heads),
        };
        let kind = if weight.shape.len() > 1 {
            kind
        } else {
            Kind::F32
        };
        let data = kind.encode(&values).0;
        file.tensor(&gguf_name(&name), &weight.shape, kind, data);
    }
    if let Some(factors) = rope_factors(&config) {
        let data = bytes_of(&factors);
        file.tensor("rope_freqs.weight", &[factors.len()], Kind::F32, data);
    }
    std::fs::write(out, file.bytes()).expect("the file can be written");
}

/// Writes what the weights of [`write`]'s file stand for, as f32, as a checkpoint like that in `dir`.
pub fn write_decoded(dir: &Path, kind: Kind, out: &Path) {
    let mut weights = weights(dir);
    for weight in weights.values_mut().filter(|w| w.shape.len() > 1) {
        weight.values = kind.encode(&weight.values).1;
    }
    tensors::write_checkpoint(dir, &weights, out);
}

fn weights(dir: &Path) -> Tensors {
    tensors::read(&dir.join("model.safetensors"))
}

fn gguf_name(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let mut name = name.replace("layers.", "blk.");
    for (from, to) in [
        ("embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ] {
        name = name.replace(from, to);
    }
    match name.strip_prefix("norm.") {
        Some(leaf) => format!("output_norm.{leaf}"),
        None => name,
    }
}

/// Rows of a query or key projection in the order in which llama.cpp rotates: of each head,
/// the halves' rows in turn.
fn interleaved(weight: &Tensor, heads: usize) -> Vec<f32> {
    let (rows, cols) = (weight.shape[0], weight.shape[1]);
    let dim = rows / heads;
    let mut out = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        let (head, within) = (row / dim, row % dim);
        let from = head * dim + (within % 2) * (dim / 2) + within / 2;
        out.extend(&weight.values[from * cols..(from + 1) * cols]);
    }
    out
}

/// Divisors of the plain frequencies, for llama 3 rope scaling.
fn rope_factors(config: &Value) -> Option<Vec<f32>> {
    let scaling = config.get("rope_scaling").filter(|s| s.is_object())?;
    assert_eq!(scaling["rope_type"], "llama3");
    let number = |key: &str| scaling[key].as_f64().expect(key);
    let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
    let (factor, context) = (number("factor"), number("original_max_position_embeddings"));
    let base = config["rope_theta"].as_f64().expect("rope_theta");
    let dims = config["head_dim"].as_u64().expect("head_dim");
    let factors = (0..dims / 2).map(|pair| {
        let wavelength = 2.0 * PI * base.powf(2.0 * pair as f64 / dims as f64);
        let smooth = (context / wavelength - low) / (high - low);
        let smooth = smooth.clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
    });
    Some(factors.collect())
}

/// A byte-level tokenizer without merges.
fn tokenizer(file: &mut File, dir: &Path, config: &Value) {
    let source = json(&dir.join("tokenizer.json"));
    assert_eq!(source["model"]["merges"], serde_json::json!([]));
    let size = config["vocab_size"].as_u64().expect("vocab_size") as usize;
    // 5: not used.
    let mut tokens: Vec<_> = (0..size).map(|id| (format!("[PAD{id}]"), 5u32)).collect();
    for (token, id) in source["model"]["vocab"].as_object().expect("a vocabulary") {
        tokens[id.as_u64().expect("an id") as usize] = (token.clone(), 1);
    }
    for added in source["added_tokens"].as_array().expect("added tokens") {
        let token = added["content"].as_str().expect("a text").to_owned();
        tokens[added["id"].as_u64().expect("an id") as usize] = (token, 3);
    }
    file.text("tokenizer.ggml.model", "gpt2");
    file.text("tokenizer.ggml.pre", "gpt-2");
    let texts = tokens.iter().map(|(text, _)| string(text)).collect();
    file.array("tokenizer.ggml.tokens", 8, texts);
    let kinds = tokens.iter().map(|(_, kind)| kind.to_le_bytes().into());
    file.array("tokenizer.ggml.token_type", 5, kinds.collect());
    file.array("tokenizer.ggml.merges", 8, Vec::new());
    for name in ["bos", "eos"] {
        let id = config[format!("{name}_token_id")].as_u64().expect("an id");
        file.number(&format!("tokenizer.ggml.{name}_token_id"), id as u32);
    }
}

/// The file in the making.
#[derive(Default)]
struct File {
    pairs: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl File {
    fn pair(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.pairs
            .push([&string(key), &kind.to_le_bytes()[..], value].concat());
    }

    fn number(&mut self, key: &str, value: u32) {
        self.pair(key, 4, &value.to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.pair(key, 6, &value.to_le_bytes());
    }

    fn text(&mut self, key: &str, value: &str) {
        self.pair(key, 8, &string(value));
    }

    fn array(&mut self, key: &str, kind: u32, items: Vec<Vec<u8>>) {
        let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()];
        self.pair(key, 9, &[head.concat(), items.concat()].concat());
    }

    fn tensor(&mut self, name: &str, shape: &[usize], kind: Kind, data: Vec<u8>) {
        let mut info = string(name);
        info.extend((shape.len() as u32).to_le_bytes());
        // Innermost first.
        for &dim in shape.iter().rev() {
            info.extend((dim as u64).to_le_bytes());
        }
        info.extend(kind.id().to_le_bytes());
        info.extend((self.data.len() as u64).to_le_bytes());
        self.infos.push(info);
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.infos.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.infos.concat());
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}
