//! Whole tokenizers against what is known about them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::Checkpoint;

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

/// SmolLM2, if the file was fetched.
fn smollm2() -> Option<Arc<Tokenizer>> {
    let path = models().join("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        return None;
    }
    Some(Arc::new(gguf(&path).unwrap()))
}

fn gguf(path: &Path) -> Result<Tokenizer, crate::error::LoadError> {
    let checkpoint = Checkpoint::open(path)?;
    let vocab = GgufVocab::from_metadata(path, checkpoint.gguf().unwrap())?;
    Tokenizer::from_gguf(path, vocab)
}

fn ids(value: &Value) -> Vec<i32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_i64().unwrap() as i32).collect()
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[i32], skip_special: bool) -> String {
    let mut stream = TextStream::new(tokenizer.clone(), Vec::new(), skip_special);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).text).collect();
    pieces.concat() + &stream.finish()
}

#[test]
fn smollm2_makes_the_prompts_and_texts_of_its_goldens() {
    let golden = std::fs::read(models().join("smollm2-mtp/bf16/golden.json"));
    let (Some(tokenizer), Ok(golden)) = (smollm2(), golden) else {
        return;
    };
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let prompts = golden["prompts"].as_array().unwrap();
    assert!(!prompts.is_empty());
    for prompt in prompts {
        let user = Message::new(Role::User, prompt["prompt"].as_str().unwrap());
        let text = tokenizer
            .chat_template()
            .unwrap()
            .render(&[user], true)
            .unwrap();
        let prompt_ids = ids(&prompt["prompt_ids"]);
        assert_eq!(tokenizer.encode(&text, false).unwrap(), prompt_ids);
        assert_eq!(tokenizer.decode(&prompt_ids, false), text);
        let greedy = ids(&prompt["greedy_ids"]);
        assert_eq!(
            tokenizer.decode(&greedy, true),
            prompt["text"].as_str().unwrap()
        );
        assert_eq!(
            streamed(&tokenizer, &greedy, true),
            prompt["text"].as_str().unwrap()
        );
    }
}

#[test]
fn smollm2_facts() {
    fn shared<T: Send + Sync>() {}
    shared::<(Tokenizer, ChatTemplate, TextStream)>();
    let Some(tokenizer) = smollm2() else { return };
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.eos_ids(), [2]);
    assert!(tokenizer.is_special(0) && tokenizer.is_special(2) && !tokenizer.is_special(17));
    assert!(!tokenizer.is_special(-1) && !tokenizer.is_special(49152));
    // Digits one by one, no token at the beginning.
    let digits = tokenizer.encode("1234", true).unwrap();
    assert_eq!(digits.len(), 4);
    assert_eq!(
        tokenizer.decode(&[1, 9690, 2, 49152], true),
        "system\u{fffd}"
    );
    assert_eq!(
        tokenizer.decode(&[1, 9690, 2], false),
        "<|im_start|>system<|im_end|>"
    );
    for text in [
        "",
        "  a\n\n b\t",
        "naïve 東京 🦀👩‍👩‍👧",
        "\u{0}\u{1b}",
        "it's I'LL",
    ] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
    let long = "a".repeat(200_000) + &" ".repeat(200_000) + &"é".repeat(50_000);
    let ids = tokenizer.encode(&long, true).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), long);
}

#[test]
fn smollm2_streams_what_it_decodes() {
    let Some(tokenizer) = smollm2() else { return };
    let sequence = prop::collection::vec(-2..49160i32, 0..60);
    // The first tokens are special, the next ones single bytes.
    let low = prop::collection::vec(0..280i32, 0..60);
    proptest!(ProptestConfig::with_cases(300), |(a in sequence, b in low, skip: bool)| {
        for ids in [&a, &b] {
            prop_assert_eq!(streamed(&tokenizer, ids, skip), tokenizer.decode(ids, skip));
        }
    });
}

/// Byte-level BPE over the 256 bytes, as the files of test models are.
fn byte_tokenizer(dir: &Path, change: impl FnOnce(&mut Value)) {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<String, Value> = (0..)
        .zip(alphabet)
        .map(|(i, c): (u32, char)| (c.to_string(), json!(i)))
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let mut file = json!({
        "version": "1.0",
        // What whoever saved the file had set; it must not cut texts.
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(256, "<|bos|>"), special(257, "<|eos|>")],
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": vocab, "merges": []}
    });
    change(&mut file);
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
}

#[test]
fn a_directory() {
    let dir = tempfile::tempdir().unwrap();
    byte_tokenizer(dir.path(), |_| ());
    let config = r#"{"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": true,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    std::fs::write(
        dir.path().join("config.json"),
        r#"{"eos_token_id": [3, 257]}"#,
    )
    .unwrap();
    let tokenizer = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
    assert_eq!(tokenizer.vocab_size(), 258);
    assert_eq!(tokenizer.eos_ids(), [3, 257]);
    assert_eq!(tokenizer.encode("ab", false).unwrap().len(), 2);
    let ids = tokenizer.encode("abc<|eos|>", true).unwrap();
    assert_eq!((ids.len(), ids[0], ids[4]), (5, 256, 257));
    assert_eq!(tokenizer.encode("<|bos|>", true).unwrap(), [256]);
    assert_eq!(tokenizer.decode(&ids, true), "abc");
    let template = tokenizer.chat_template().unwrap();
    let text = template
        .render(&[Message::new(Role::User, "x")], true)
        .unwrap();
    assert_eq!(text, "<|bos|>x");
    proptest!(|(ids in prop::collection::vec(-1..260i32, 0..50), text: String, skip: bool)| {
        prop_assert_eq!(streamed(&tokenizer, &ids, skip), tokenizer.decode(&ids, skip));
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, false), text);
    });
}

#[test]
fn directories_that_are_not_right() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut Value)| {
        byte_tokenizer(dir.path(), change);
        Tokenizer::from_dir(dir.path()).unwrap_err().to_string()
    };
    let dropout = refused(&|f| f["model"]["dropout"] = json!(0.1));
    assert!(dropout.contains("dropout"), "{dropout}");
    let decoder = refused(&|f| {
        f["decoder"] =
            json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": true})
    });
    assert!(decoder.contains("CTC"), "{decoder}");
    refused(&|f| f["model"] = json!({"type": "Magic"}));
    refused(&|f| f["model"]["merges"] = json!(["nowhere to"]));
    refused(&|f| f["model"]["vocab"]["a"] = json!(4_000_000_000u32));
    refused(&|f| f["model"]["vocab"]["a"] = json!(1));
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    assert!(Tokenizer::from_dir(dir.path()).is_err());
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let missing = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(missing.contains("tokenizer.json") && missing.lines().count() == 2);
}

/// A GGUF file with the metadata that any llama model has, one tensor, and `pairs`.
struct File {
    pairs: Vec<u8>,
    count: u64,
}

impl File {
    fn new() -> Self {
        let mut file = Self {
            pairs: Vec::new(),
            count: 0,
        };
        file.str("general.architecture", "llama");
        for (key, value) in [
            ("block_count", 1),
            ("context_length", 8),
            ("embedding_length", 2),
            ("feed_forward_length", 2),
            ("attention.head_count", 1),
        ] {
            file.u32(&format!("llama.{key}"), value);
        }
        file.key("llama.attention.layer_norm_rms_epsilon", 6);
        file.pairs.extend(1e-5f32.to_le_bytes());
        file
    }

    fn text(&mut self, text: &str) {
        self.pairs.extend((text.len() as u64).to_le_bytes());
        self.pairs.extend(text.as_bytes());
    }

    fn key(&mut self, key: &str, kind: u32) {
        self.count += 1;
        self.text(key);
        self.pairs.extend(kind.to_le_bytes());
    }

    fn str(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        self.text(value);
    }

    fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.pairs.extend(value.to_le_bytes());
    }

    fn bool(&mut self, key: &str, value: bool) {
        self.key(key, 7);
        self.pairs.push(value.into());
    }

    fn array(&mut self, key: &str, kind: u32, len: usize) {
        self.key(key, 9);
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend((len as u64).to_le_bytes());
    }

    /// `tokenizer.ggml.` tokens, types and scores.
    fn tokens(&mut self, tokens: &[(&str, i32, f32)]) {
        self.array("tokenizer.ggml.tokens", 8, tokens.len());
        tokens.iter().for_each(|t| self.text(t.0));
        self.array("tokenizer.ggml.token_type", 5, tokens.len());
        tokens
            .iter()
            .for_each(|t| self.pairs.extend(t.1.to_le_bytes()));
        self.array("tokenizer.ggml.scores", 6, tokens.len());
        tokens
            .iter()
            .for_each(|t| self.pairs.extend(t.2.to_le_bytes()));
    }

    fn merges(&mut self, merges: &[&str]) {
        self.array("tokenizer.ggml.merges", 8, merges.len());
        merges.iter().for_each(|m| self.text(m));
    }

    fn load(mut self) -> Result<Tokenizer, crate::error::LoadError> {
        let pairs = std::mem::take(&mut self.pairs);
        self.text("token_embd.weight");
        let tensor = std::mem::replace(&mut self.pairs, pairs);
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.pairs);
        bytes.extend(tensor);
        // A matrix of 2 by 2, F32, at the beginning of the data.
        bytes.extend(2u32.to_le_bytes());
        bytes.extend([2u64.to_le_bytes(); 2].concat());
        bytes.extend([0; 12]);
        bytes.resize(bytes.len().next_multiple_of(32) + 32, 0);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).unwrap();
        gguf(&path)
    }
}

fn spm() -> File {
    let mut file = File::new();
    file.str("tokenizer.ggml.model", "llama");
    let mut tokens = vec![("<unk>", 2, 0.), ("<s>", 3, 0.), ("</s>", 3, 0.)];
    tokens.extend([("<0xC3>", 6, 0.), ("<0xA9>", 6, 0.)]);
    tokens.extend([("\u{2581}", 1, -9.), ("a", 1, -9.), ("b", 1, -9.)]);
    tokens.extend([
        ("\u{2581}a", 1, -2.),
        ("ab", 1, -1.),
        ("\u{2581}ab", 1, -3.),
    ]);
    tokens.extend([("<user>", 4, 0.), ("[PAD12]", 5, 0.)]);
    file.tokens(&tokens);
    file.u32("tokenizer.ggml.bos_token_id", 1);
    file.u32("tokenizer.ggml.eos_token_id", 2);
    file
}

#[test]
fn sentencepiece_in_gguf() {
    let tokenizer = Arc::new(spm().load().unwrap());
    assert_eq!(tokenizer.eos_ids(), [2]);
    assert_eq!(tokenizer.vocab_size(), 12);
    let encode = |text| tokenizer.encode(text, true).unwrap();
    assert_eq!(encode("ab"), [1, 10]);
    assert_eq!(encode("a ab"), [1, 8, 10]);
    assert_eq!(encode("aé"), [1, 8, 3, 4]);
    assert_eq!(encode("a<user>x</s>"), [1, 8, 11, 5, 0, 2]);
    assert_eq!(encode(""), [1]);
    for text in ["ab a  ab", " é", ""] {
        assert_eq!(tokenizer.decode(&encode(text), true), text);
    }
    proptest!(|(ids in prop::collection::vec(-1..15i32, 0..30), skip: bool)| {
        prop_assert_eq!(streamed(&tokenizer, &ids, skip), tokenizer.decode(&ids, skip));
    });

    let mut file = spm();
    file.bool("tokenizer.ggml.add_space_prefix", false);
    file.bool("tokenizer.ggml.add_bos_token", false);
    file.bool("tokenizer.ggml.add_eos_token", true);
    let tokenizer = file.load().unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [9, 2]);
    assert_eq!(tokenizer.decode(&[10, 9], true), " abab");
}

fn bpe(pre: &str) -> File {
    let mut file = File::new();
    file.str("tokenizer.ggml.model", "gpt2");
    file.str("tokenizer.ggml.pre", pre);
    let mut tokens = vec![("<|eot_id|>", 3, 0.)];
    for token in [
        "1", "2", "3", "4", "12", "123", "1234", "a", "aaa", "Ã", "©", "Ã©", "Ġ", "Ġa",
    ] {
        tokens.push((token, 1, 0.));
    }
    tokens.push(("a a", 4, 0.));
    file.tokens(&tokens);
    file.u32("tokenizer.ggml.bos_token_id", 0);
    file
}

/// How text is cut decides what can be merged.
#[test]
fn byte_level_in_gguf() {
    for (pre, number, word, decomposed) in [
        ("gpt-2", vec![7], vec![8, 8, 8], None),
        ("default", vec![7], vec![8, 8, 8], None),
        ("smollm", vec![1, 2, 3, 4], vec![8, 8, 8], None),
        ("llama-bpe", vec![0, 6, 4], vec![0, 9], None),
        ("qwen2", vec![1, 2, 3, 4], vec![8, 8, 8], Some(vec![12])),
    ] {
        let mut file = bpe(pre);
        file.merges(&["1 2", "12 3", "123 4", "Ã ©", "Ġ a"]);
        let tokenizer = file.load().unwrap();
        assert_eq!(tokenizer.eos_ids(), [0]);
        let encode = |text| tokenizer.encode(text, true).unwrap();
        assert_eq!(encode("1234"), number, "{pre}");
        assert_eq!(encode("aaa"), word, "{pre}");
        assert_eq!(
            tokenizer.encode("é a<|eot_id|>a aa", false).unwrap(),
            [12, 14, 0, 15, 8]
        );
        if let Some(composed) = decomposed {
            assert_eq!(encode("e\u{301}"), composed, "{pre}");
        }
        assert_eq!(
            tokenizer.decode(&[12, 14, 11, 0, 15], true),
            "é a\u{fffd}a a"
        );
    }
}

#[test]
fn tokenizers_in_gguf_that_are_refused() {
    let text = |file: File| file.load().unwrap_err().to_string();
    let missing = text(File::new());
    assert!(
        missing.contains("tokenizer.ggml.model is missing"),
        "{missing}"
    );
    let mut file = File::new();
    file.str("tokenizer.ggml.model", "t5");
    file.tokens(&[("a", 1, 0.)]);
    let t5 = text(file);
    assert!(
        t5.contains("\"t5\" is not supported; gpt2 and llama are"),
        "{t5}"
    );
    let mut file = bpe("deepseek-coder");
    file.merges(&[]);
    let pre = text(file);
    assert!(pre.contains("deepseek-coder"), "{pre}");
    assert!(text(bpe("smollm")).contains("merges is missing"));
    for merge in ["a", "", " ", "a b"] {
        let mut file = bpe("smollm");
        file.merges(&[merge]);
        assert!(file.load().is_err(), "{merge:?}");
    }
    for (key, value) in [("eos_token_id", 99), ("eot_token_id", u32::MAX)] {
        let mut file = spm();
        file.u32(&format!("tokenizer.ggml.{key}"), value);
        assert!(file.load().is_err());
    }
    let mut file = File::new();
    file.str("tokenizer.ggml.model", "llama");
    file.tokens(&[("a", 9, 0.)]);
    assert!(text(file).contains("token_type"));
    let mut file = File::new();
    file.str("tokenizer.ggml.model", "llama");
    file.u32("tokenizer.ggml.tokens", 1);
    assert!(text(file).contains("tokens is an integer"));
}

/// The same ids and tokens are the same table, whatever the file.
#[test]
fn the_digest_is_of_the_table() {
    let dir = tempfile::tempdir().unwrap();
    byte_tokenizer(dir.path(), |f| {
        f["model"]["vocab"] = json!({"a": 0, "b": 1, "ab": 2});
        f["model"]["merges"] = json!(["a b"]);
        f["added_tokens"][0]["id"] = json!(3);
        f["added_tokens"][1]["id"] = json!(4);
    });
    let ours = Tokenizer::from_dir(dir.path()).unwrap().table_digest();
    let tokens = [
        ("a", 1, 0.),
        ("b", 1, 0.),
        ("ab", 1, 0.),
        ("<|bos|>", 3, 0.),
        ("<|eos|>", 3, 0.),
    ];
    let digest = |tokens: &[(&str, i32, f32)]| {
        let mut file = File::new();
        file.str("tokenizer.ggml.model", "gpt2");
        file.tokens(tokens);
        file.merges(&["a b"]);
        file.load().unwrap().table_digest()
    };
    assert_eq!(digest(&tokens), ours);
    let padded = [&tokens[..], &[("[PAD5]", 5, 0.)]].concat();
    assert_eq!(digest(&padded), ours);
    let mut other = tokens;
    other.swap(3, 4);
    assert_ne!(digest(&other), ours);
    assert_eq!(ours.len(), 64);
}
