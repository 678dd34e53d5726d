//! What a user reads when a drafter does not suit the target, or no plugin suits the drafter.

use std::path::Path;
use std::process::Output;

use mlxhost_tests::cases::{self, Copy, assert_plain, assert_refused, replace, stderr};
use mlxhost_tests::{checkpoint, plugin, run};
use serde_json::{Value, json};

/// The Qwen3.5 target with a drafter, through the plugin `qwen_mtp`.
fn draft_with(drafter: &Path) -> Output {
    let prompt = ["--prompt", "hello", "--max-tokens", "4"];
    cases::draft_with("qwen_mtp", &checkpoint("qwen3_5-f32"), drafter, &prompt)
}

/// A change to a config: where, to what, and what is said of it.
type Misfit = (&'static str, fn() -> Value, &'static [&'static str]);

/// What makes a drafter of the Qwen3.5 target one that does not fit.
const DRAFTERS: &[Misfit] = &[
    (
        "/text_config/hidden_size",
        || json!(96),
        &["has hidden size 96", "has 64"],
    ),
    (
        "/text_config/vocab_size",
        || json!(321),
        &["has vocabulary size 321", "has 320"],
    ),
    (
        "/text_config/mtp_num_hidden_layers",
        || json!(3),
        &["mtp_num_hidden_layers", "is 3"],
    ),
    (
        "/text_config/num_attention_heads",
        || json!(-4),
        &["config.json", "num_attention_heads"],
    ),
    (
        "/text_config/head_dim",
        || Value::Null,
        &["config.json", "head_dim"],
    ),
    (
        "/model_type",
        || json!("qwen9_mtp"),
        &[
            "no loaded plugin serves",
            "\"qwen9_mtp\"",
            "qwen_mtp (qwen3_5_mtp",
        ],
    ),
    ("/model_type", || Value::Null, &["names no model_type"]),
];

#[test]
fn a_drafter_that_does_not_fit_is_refused_with_the_numbers_that_differ() {
    for (pointer, value, says) in DRAFTERS {
        let drafter = Copy::of("qwen3_5_mtp-f32");
        drafter.set("config.json", pointer, value());
        let output = draft_with(drafter.path());
        assert_refused(&output, 2, &[says, &[drafter.arg()][..]].concat());
    }
    // The pairing gate names the target, too, and says what to do.
    let drafter = Copy::of("qwen3_5_mtp-f32");
    drafter.set("config.json", "/text_config/hidden_size", json!(96));
    let target = checkpoint("qwen3_5-f32");
    let says = [
        "plugin qwen_mtp",
        target.to_str().unwrap(),
        "made for this target",
    ];
    assert_refused(&draft_with(drafter.path()), 2, &says);
}

#[test]
fn a_drafter_of_another_vocabulary_is_refused() {
    let drafter = Copy::of("qwen3_5_mtp-f32");
    drafter.write("draft_vocab.json", r#"{"ids":[1,2,400]}"#);
    let says = ["plugin qwen_mtp", "drafts the id 400", "320 tokens"];
    assert_refused(&draft_with(drafter.path()), 2, &says);
    drafter.write("draft_vocab.json", r#"{"ids":[2,1]}"#);
    assert_refused(
        &draft_with(drafter.path()),
        2,
        &["draft_vocab.json", "ascending"],
    );

    let drafter = Copy::of("qwen3_5_mtp-f32");
    drafter.edit("tokenizer.json", |text| replace(text, "<|bos|>", "<|sob|>"));
    assert_refused(
        &draft_with(drafter.path()),
        2,
        &["another token table", drafter.arg()],
    );
}

#[test]
fn a_drafter_without_all_its_weights_is_told_which_are_missing() {
    let drafter = Copy::of("qwen3_5_mtp-f32");
    drafter.keep_tensors(|name| name != "fc.weight");
    let says = [drafter.arg(), "missing tensors: fc.weight"];
    assert_refused(&draft_with(drafter.path()), 2, &says);
    drafter.keep_tensors(|name| !name.starts_with("layers"));
    assert_refused(&draft_with(drafter.path()), 2, &["fc.weight", "and 9 more"]);
}

#[test]
fn a_drafter_without_a_plugin_for_it_is_refused() {
    let (target, drafter) = (checkpoint("qwen3_5-f32"), checkpoint("qwen3_5_mtp-f32"));
    let (target, drafter) = (target.to_str().unwrap(), drafter.to_str().unwrap());
    let common = ["--model", target, "--prompt", "hello"];
    let ngram = plugin("ngram");
    for (args, says) in [
        (vec!["--drafter", drafter], "--plugin PATH"),
        (
            vec!["--drafter", drafter, "--plugin", ngram.to_str().unwrap()],
            "no loaded plugin serves",
        ),
        (
            vec!["--drafter", "/nowhere", "--plugin", ngram.to_str().unwrap()],
            "/nowhere",
        ),
    ] {
        assert_refused(&run(&[&common[..], &args].concat()), 2, &[says]);
    }
    // A plugin for checkpoints alone, and a target without a head of its own inside.
    let qwen = plugin("qwen_mtp");
    let llama = checkpoint("llama-f32");
    let args = [
        "--model",
        llama.to_str().unwrap(),
        "--prompt",
        "hi",
        "--plugin",
        qwen.to_str().unwrap(),
    ];
    assert_refused(
        &run(&args),
        2,
        &["needs a drafter checkpoint", "--drafter DIR"],
    );
    // With plugins at hand, decoding without them needs no drafter.
    let output = run(&[&args[..], &["--no-draft", "--max-tokens", "2"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_drafter_whose_weights_have_another_shape_costs_only_the_drafts() {
    let drafter = Copy::of("qwen3_5_mtp-f32");
    drafter.set("config.json", "/text_config/intermediate_size", json!(96));
    let output = draft_with(drafter.path());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!output.stdout.is_empty());
    let warning = stderr(&output);
    assert_eq!(warning.lines().count(), 1, "{warning}");
    for said in [
        "plugin qwen_mtp",
        drafter.arg(),
        "layers.0.mlp",
        "96",
        "without drafts",
    ] {
        assert!(warning.contains(said), "no {said:?} in {warning}");
    }
    assert_plain(&warning);
}

/// A target with an assistant for Gemma 4.
fn assisted(target: &Path, drafter: &Path) -> Output {
    let prompt = ["--prompt-tokens", "1,2,3", "--max-tokens", "4"];
    cases::draft_with("gemma_assistant", target, drafter, &prompt)
}

#[test]
fn an_assistant_that_does_not_fit_is_refused_naming_both() {
    let target = checkpoint("gemma4-4bit-g32-f32");
    for (pointer, value, says) in [
        (
            "/backbone_hidden_size",
            json!(96),
            "backbone hidden size 96",
        ),
        ("/text_config/vocab_size", json!(321), "vocabulary size 321"),
        (
            "/text_config/head_dim",
            json!(16),
            "head size of sliding layers 16",
        ),
        (
            "/text_config/global_head_dim",
            json!(32),
            "head size of full layers 32",
        ),
        ("/text_config/num_key_value_heads", json!(2), "key heads of"),
        ("/text_config/sliding_window", json!(8), "sliding window 8"),
        (
            "/text_config/num_kv_shared_layers",
            json!(2),
            "num_kv_shared_layers",
        ),
        ("/text_config/layer_types/0", json!("linear"), "layer_types"),
        ("/text_config/num_hidden_layers", json!(5), "layer_types"),
        (
            "/text_config/rope_parameters",
            Value::Null,
            "rope_parameters",
        ),
        ("/backbone_hidden_size", Value::Null, "backbone_hidden_size"),
        (
            "/text_config/enable_moe_block",
            json!(true),
            "enable_moe_block",
        ),
    ] {
        let drafter = Copy::of("gemma4_assistant-f32");
        let list = pointer.strip_suffix("/0");
        match list {
            Some(list) => drafter.set("config.json", list, Value::Array(vec![value; 4])),
            None => drafter.set("config.json", pointer, value),
        };
        let output = assisted(&target, drafter.path());
        assert_refused(&output, 2, &["plugin gemma_assistant", drafter.arg(), says]);
    }
    // A head that there are no tensors for.
    let drafter = Copy::of("gemma4_assistant-f32");
    drafter.set("config.json", "/use_ordered_embeddings", json!(true));
    let says = &["missing tensors", "masked_embedding"];
    assert_refused(&assisted(&target, drafter.path()), 2, says);
    // No target without such layers has keys to lend.
    let llama = checkpoint("llama-f32");
    let assistant = checkpoint("gemma4_assistant-f32");
    let says = &["plugin gemma_assistant", "llama-f32", "none to lend"];
    assert_refused(&assisted(&llama, &assistant), 2, says);
}
