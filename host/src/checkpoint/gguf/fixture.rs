//! Writes small GGUF files for the tests.

pub(super) const UINT32: u32 = 4;
pub(super) const STRING: u32 = 8;

/// A GGUF file in the making.
pub(super) struct Gguf {
    pub(super) version: u32,
    /// What the data is aligned to; the file says so only if `general.alignment` is set.
    pub(super) alignment: usize,
    pub(super) pairs: Vec<(String, u32, Vec<u8>)>,
    /// Name, dimensions innermost first, ggml type, data.
    pub(super) tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub(super) fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

pub(super) fn strings(texts: &[&str]) -> Vec<u8> {
    let mut bytes = STRING.to_le_bytes().to_vec();
    bytes.extend((texts.len() as u64).to_le_bytes());
    texts.iter().for_each(|text| bytes.extend(string(text)));
    bytes
}

impl Gguf {
    /// A llama with one layer, hidden size 32, two heads of 16, one of them for keys, 64 tokens.
    pub(super) fn llama() -> Self {
        let mut file = Self {
            version: 3,
            alignment: 32,
            pairs: Vec::new(),
            tensors: Vec::new(),
        };
        file.set("general.architecture", STRING, string("llama"));
        for (key, value) in [
            ("block_count", 1u32),
            ("context_length", 128),
            ("embedding_length", 32),
            ("feed_forward_length", 64),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
        ] {
            file.set(&format!("llama.{key}"), UINT32, value.to_le_bytes().into());
        }
        file.set(
            "llama.attention.layer_norm_rms_epsilon",
            6,
            1e-5f32.to_le_bytes().into(),
        );
        file.set("tokenizer.ggml.tokens", 9, strings(&["a", "ü", ""]));
        let (q4_1, q8_0, f32) = (3, 8, 0);
        file.tensor("token_embd.weight", &[32, 64], q8_0, 64 * 34);
        file.tensor("output_norm.weight", &[32], f32, 128);
        file.tensor("blk.0.attn_q.weight", &[32, 32], q4_1, 32 * 20);
        file.tensor("blk.0.attn_k.weight", &[32, 16], q4_1, 16 * 20);
        file.tensor("blk.0.attn_v.weight", &[32, 16], 1, 16 * 64);
        file
    }

    pub(super) fn set(&mut self, key: &str, kind: u32, value: Vec<u8>) {
        self.pairs.retain(|pair| pair.0 != key);
        self.pairs.push((key.to_owned(), kind, value));
    }

    pub(super) fn unset(&mut self, key: &str) {
        self.pairs.retain(|pair| pair.0 != key);
    }

    /// Adds a tensor of `len` bytes that differ from one another.
    pub(super) fn tensor(&mut self, name: &str, dims: &[u64], kind: u32, len: usize) {
        let data = (0..len).map(|i| (i * 7 % 60) as u8).collect();
        self.tensors
            .push((name.to_owned(), dims.to_vec(), kind, data));
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.pairs {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, dims, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}
