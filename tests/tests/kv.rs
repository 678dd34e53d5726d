//! Quantized keys and values: other answers than with exact ones, but the same whatever is drafted and
//! whoever else is there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::model::{KvBits, KvConfig, Model};
use mlxhost_tests::cases::{Copy, assert_refused, text};
use mlxhost_tests::decoding::{ask, engine_storing, memory_while, request};
use mlxhost_tests::forced::{drafts_change_nothing, prompt};
use mlxhost_tests::together::{like_alone_with, like_alone_with_forced_drafts};
use mlxhost_tests::{checkpoint, engine_lock, id_list, root, run, tensors};
use serde_json::json;

fn kv(bits: KvBits, start: u32) -> KvConfig {
    KvConfig {
        bits: Some(bits),
        start,
        ..KvConfig::default()
    }
}

/// Both numbers of bits; everything quantized, a part of the prompt exact, and a part of the answer too.
fn all() -> [KvConfig; 3] {
    let later = prompt().len() as u32 + 6;
    [
        kv(KvBits::Four, 0),
        kv(KvBits::Eight, 7),
        kv(KvBits::Four, later),
    ]
}

/// A Llama with heads of 32 dimensions: a Qwen3 without its norms.
fn llama() -> Copy {
    let copy = Copy::of("qwen3-f32");
    copy.set("config.json", "/model_type", json!("llama"));
    copy
}

fn drafts_change_nothing_for(model: &Path) {
    for kv in all() {
        drafts_change_nothing(model, &prompt(), &[3], &kv);
    }
}

#[test]
fn drafts_change_nothing_for_llama() {
    drafts_change_nothing_for(llama().path());
}

#[test]
fn drafts_change_nothing_for_qwen3() {
    drafts_change_nothing_for(&checkpoint("qwen3-4bit-g32-f32"));
}

#[test]
fn drafts_change_nothing_for_gemma4() {
    drafts_change_nothing_for(&checkpoint("gemma4-4bit-g32-f32"));
}

#[test]
fn drafts_change_nothing_for_gemma4_whose_keys_are_values() {
    drafts_change_nothing_for(&checkpoint("gemma4-31b-f32"));
}

#[test]
fn drafts_change_nothing_for_qwen3_5() {
    drafts_change_nothing_for(&checkpoint("qwen3_5-f32"));
}

#[test]
fn drafts_change_nothing_with_experts() {
    for model in ["qwen3_5-moe-1layer-f32", "gemma4-moe-1layer-f32"] {
        drafts_change_nothing(&checkpoint(model), &prompt(), &[4], &kv(KvBits::Eight, 7));
    }
}

#[test]
fn drafts_change_nothing_where_layers_differ() {
    let mut kv = kv(KvBits::Four, 3);
    kv.group = Some(32);
    kv.layers = BTreeMap::from([(0, None), (3, Some(KvBits::Eight))]);
    drafts_change_nothing(&checkpoint("gemma4-f32"), &prompt(), &[3], &kv);
}

/// The buffers of the sliding layers have 512 columns, those for first positions too: both go on at their
/// beginning.
#[test]
fn drafts_change_nothing_where_windows_turn_over() {
    let model = checkpoint("gemma4-4bit-g32-f32");
    for (length, start) in [(505, 0), (605, 100), (1005, 1015)] {
        let prompt: Vec<i32> = prompt().into_iter().cycle().take(length).collect();
        drafts_change_nothing(&model, &prompt, &[4], &kv(KvBits::Eight, start));
    }
}

#[test]
fn rows_answer_together_as_alone() {
    for model in ["qwen3-f32", "gemma4-4bit-g32-f32", "qwen3_5-f32"] {
        let model = checkpoint(model);
        like_alone_with_forced_drafts(&model, &[1, 2, 3, 4], &kv(KvBits::Four, 0));
        // Between the lengths of the prompts, and within the answers to some.
        like_alone_with_forced_drafts(&model, &[2, 4], &kv(KvBits::Eight, 20));
    }
    like_alone_with_forced_drafts(llama().path(), &[3], &kv(KvBits::Eight, 7));
}

#[test]
fn drafters_that_look_at_the_target_go_on() {
    for kv in [kv(KvBits::Four, 0), kv(KvBits::Eight, 20)] {
        let commit = [[("commit", "keep")], [("commit", "recompute")]];
        let (model, head) = ("qwen3_5-f32", "qwen3_5_mtp-f32");
        like_alone_with("qwen_mtp", model, head, &commit, &kv);
        let positions = [[("positions", "publisher")], [("positions", "optiq")]];
        let (model, head) = ("gemma4-4bit-g32-f32", "gemma4_assistant-f32");
        like_alone_with("gemma_assistant", model, head, &positions, &kv);
    }
}

/// With every position exact, nothing changes at all.
#[test]
fn a_start_beyond_the_text_is_no_quantization() {
    let _lock = engine_lock();
    for model in ["qwen3-f32", "gemma4-f32"] {
        let model = checkpoint(model);
        let request = request(&prompt(), 12);
        let exact = ask(
            &engine_storing(&model, None, &KvConfig::default()),
            &request,
        );
        let late = ask(
            &engine_storing(&model, None, &kv(KvBits::Four, 500)),
            &request,
        );
        assert_eq!(exact, late);
    }
}

/// The mean Kullback-Leibler divergence of two files of logits, and its maximum.
fn divergence(exact: &Path, other: &Path) -> (f64, f64) {
    let rows = |path: &Path| {
        let logits = tensors::read(path).remove("logits").expect("logits");
        let width = logits.shape[1];
        let rows = logits.values.chunks(width).map(|row| {
            let row: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = row.iter().map(|x| (x - most).exp()).sum();
            row.iter().map(|x| x - most - total.ln()).collect()
        });
        rows.collect::<Vec<Vec<f64>>>()
    };
    let (exact, other) = (rows(exact), rows(other));
    let each: Vec<f64> = exact
        .iter()
        .zip(&other)
        .map(|(p, q)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum())
        .collect();
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    (mean, each.iter().copied().fold(0.0, f64::max))
}

/// How far SmolLM2 with so many bits is from itself with exact keys and values.
fn smollm2(more: &[&str]) -> Option<(f64, f64)> {
    let model = root().join("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        println!("skipped: {} is not there", model.display());
        return None;
    }
    let golden = root().join("models/smollm2-mtp/bf16/golden.json");
    let case = &mlxhost_tests::json(&golden)["prompts"][0];
    let ids = |key: &str| mlxhost_tests::ids(&case[key]);
    let text_ids = id_list(&[ids("prompt_ids"), ids("greedy_ids")].concat());
    let dir = tempfile::tempdir().expect("a temporary directory");
    let files = ["exact", "other"].map(|name| dir.path().join(name));
    for (file, more) in files.iter().zip([&[][..], more]) {
        let arg = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let (model, file) = (arg(&model), arg(file));
        let args = [
            "eval",
            "--model",
            &model,
            "--prompt-tokens",
            &text_ids,
            "--out",
            &file,
        ];
        text(&run(&[&args, more].concat()));
    }
    Some(divergence(&files[0], &files[1]))
}

#[test]
fn eight_bits_hardly_change_what_a_model_says() {
    // As documented.
    let Some((mean, most)) = smollm2(&["--kv-bits", "8"]) else {
        return;
    };
    println!("8 bits: {mean:e}, {most:e}");
    assert!(mean < 2e-3 && most < 5e-2, "{mean:e} {most:e}");
    let Some((four, _)) = smollm2(&["--kv-bits", "4"]) else {
        return;
    };
    println!("4 bits: {four:e}");
    assert!(mean < four / 10.0, "{mean:e} {four:e}");
}

/// Tokens of prompts and answers: no buffer grows while one is decoded.
const PROMPTS: [usize; 2] = [300, 1700];
const ANSWER: usize = 60;

/// Tokens of a long answer that there is room for at once.
const ROOM: usize = 256;

fn memory(model: &Path, kv: &KvConfig, prompt: usize) -> i64 {
    let engine = engine_storing(model, None, kv);
    let prompt: Vec<i32> = (0..prompt).map(|i| (i * i % 251) as i32).collect();
    let request = request(&prompt, 20 * ANSWER);
    memory_while(&engine, &request, ANSWER).0
}

#[test]
fn caches_take_the_memory_that_they_are_said_to_take() {
    let _lock = engine_lock();
    mlxhost::backend::install();
    let path = checkpoint("qwen3-f32");
    let bytes = |kv: &KvConfig, tokens: usize| {
        let checkpoint = Checkpoint::open(&path).map(Arc::new).expect("a checkpoint");
        let model = Model::load_with(checkpoint, None, kv).expect("a model");
        model.cache_bytes(tokens)
    };
    let exact = bytes(&KvConfig::default(), 1900);
    // Heads of 32 dimensions, 128 bytes: codes, a scale and a bias.
    assert_eq!(bytes(&kv(KvBits::Eight, 0), 1900) * 128, exact * 36);
    assert_eq!(bytes(&kv(KvBits::Four, 0), 1900) * 128, exact * 20);
    assert!(bytes(&kv(KvBits::Four, 100_000), 1900) >= exact);
    for config in [
        KvConfig::default(),
        kv(KvBits::Eight, 0),
        kv(KvBits::Four, 700),
    ] {
        let used = PROMPTS.map(|prompt| memory(&path, &config, prompt));
        let said = PROMPTS.map(|prompt| bytes(&config, prompt + ROOM) as i64);
        let (grown, said) = (used[1] - used[0], said[1] - said[0]);
        assert!(
            (grown - said).abs() < 256 << 10,
            "{config:?}: {grown}, not {said}"
        );
    }
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let llama = checkpoint("llama-f32");
    let qwen = checkpoint("qwen3_5-f32");
    let gemma = checkpoint("gemma4-f32");
    let refused = |model: &Path, more: &[&str], says: &[&str]| {
        let model = model.to_str().expect("a path in UTF-8");
        let args = ["--model", model, "--prompt", "hello", "--max-tokens", "2"];
        let output = run(&[&args, more].concat());
        assert_refused(&output, 2, says);
    };
    let eight = ["--kv-bits", "8"];
    // Heads of 16 dimensions.
    refused(
        &llama,
        &eight,
        &["llama-f32", "heads of 16 dimensions", "32"],
    );
    let wide = [&eight[..], &["--kv-group-size", "64"]].concat();
    refused(&qwen, &wide, &["layer 3", "heads of 32 dimensions", "64"]);
    refused(
        &qwen,
        &["--kv-group-size", "32"],
        &["--kv-group-size", "--kv-bits"],
    );
    refused(
        &qwen,
        &["--quantized-kv-start", "3"],
        &["--quantized-kv-start", "--kv-bits"],
    );
    refused(&qwen, &["--kv-bits-layer", "0=8"], &["layer 0", "no keys"]);
    refused(&gemma, &["--kv-bits-layer", "7=8"], &["layer 7", "no keys"]);
    refused(&gemma, &["--kv-bits-layer", "99=8"], &["no layer 99"]);
    let twice = ["--kv-bits-layer", "0=8", "--kv-bits-layer", "0=4"];
    refused(&gemma, &twice, &["--kv-bits-layer", "layer 0", "twice"]);
    for (option, value) in [
        ("--kv-bits", "5"),
        ("--kv-bits", "16"),
        ("--kv-group-size", "48"),
        ("--quantized-kv-start", "x"),
        ("--quantized-kv-start", "4294967295"),
        ("--kv-bits-layer", "3"),
        ("--kv-bits-layer", "3=5"),
    ] {
        let output = run(&[option, value]);
        assert_eq!(output.status.code(), Some(2), "{option} {value}");
        let says = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(says.contains(option) && says.contains(value), "{says}");
    }
    let help = text(&run(&["--help"]));
    for taught in ["--kv-bits <BITS>", "--quantized-kv-start", "mlx-lm"] {
        assert!(help.contains(taught), "no {taught} in {help}");
    }
}
