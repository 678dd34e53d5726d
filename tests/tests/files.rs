//! Models that are incomplete, damaged or hostile: what the user reads of it.

use std::path::Path;
use std::process::Output;

use mlxhost_tests::cases::{Copy, assert_refused, replace, stderr};
use mlxhost_tests::gguf::{self, Kind};
use mlxhost_tests::{checkpoint, run};
use serde_json::{Value, json};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";

fn answer(model: &Path) -> Output {
    let model = model.to_str().unwrap();
    run(&[
        "--model",
        model,
        "--prompt-tokens",
        "1,2",
        "--max-tokens",
        "2",
        "--no-draft",
    ])
}

/// Both ways into a model refuse it in the same words.
#[track_caller]
fn assert_model_refused(model: &Path, says: &[&str]) {
    let shown = model.to_str().unwrap();
    let says = [&[shown], says].concat();
    assert_refused(&answer(model), 2, &says);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let args = ["--prompt-tokens", "1", "--out", out.to_str().unwrap()];
    assert_refused(
        &run(&[&["eval", "--model", shown], &args[..]].concat()),
        2,
        &says,
    );
    assert!(!out.exists(), "a file of a refused model");
}

/// What is done to a good model, and what is said of it.
type Case<'a> = (fn(&Copy) -> &Copy, &'a [&'a str]);

#[track_caller]
fn assert_cases(base: &str, cases: &[Case]) {
    for (damage, says) in cases {
        let model = Copy::of(base);
        damage(&model);
        assert_model_refused(model.path(), says);
    }
}

#[test]
fn a_path_that_holds_no_model_is_told_what_would_be_one() {
    let expected = "expected a directory with config.json and *.safetensors, or a .gguf file";
    assert_model_refused(Path::new("/nowhere/model"), &[expected]);
    let dir = tempfile::tempdir().unwrap();
    assert_model_refused(dir.path(), &["no config.json", expected]);
    let file = dir.path().join("notes.txt");
    std::fs::write(&file, "hello").unwrap();
    assert_model_refused(&file, &["not a GGUF file", expected]);
    let weights = checkpoint("llama-f32").join(WEIGHTS);
    assert_model_refused(&weights, &["pass the directory"]);
}

#[test]
fn an_incomplete_model_says_which_file_is_missing() {
    assert_cases(
        "llama-f32",
        &[
            (|m| m.remove(CONFIG), &["no config.json"]),
            (
                |m| m.remove(WEIGHTS),
                &[INDEX, "\"model.safetensors\"", "not in the directory"],
            ),
            (
                |m| m.remove(WEIGHTS).remove(INDEX),
                &["no *.safetensors file"],
            ),
        ],
    );
    assert_cases(
        "qwen3_5-hf-f32",
        &[
            (
                |m| m.remove("model-00002-of-00003.safetensors"),
                &[
                    "\"model-00002-of-00003.safetensors\"",
                    "download is incomplete",
                ],
            ),
            (
                |m| {
                    m.edit(INDEX, |text| {
                        replace(text, "model-00003-of", "../../00003-of")
                    })
                },
                &["not a plain file name"],
            ),
            (
                |m| {
                    let moved = "model-00001-of-00003.safetensors";
                    let other = "model-00003-of-00003.safetensors";
                    m.edit(INDEX, |text| replace(text, other, moved))
                },
                &["which does not have it", "different versions"],
            ),
        ],
    );
}

#[test]
fn a_damaged_weight_file_is_found_out() {
    assert_cases(
        "llama-f32",
        &[
            (
                |m| m.edit(WEIGHTS, |b| b.truncate(5)),
                &[WEIGHTS, "only 5 bytes long"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b.truncate(700)),
                &[WEIGHTS, "its header has"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b.truncate(b.len() - 1)),
                &[WEIGHTS, "its header describes", "download it again"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b.push(0)),
                &[WEIGHTS, "its header describes"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b[..8].fill(0xFF)),
                &[WEIGHTS, "18446744073709551615"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b[..8].fill(0)),
                &[WEIGHTS, "its header is invalid"],
            ),
            (
                |m| m.edit(WEIGHTS, |b| b[9] = 0),
                &[WEIGHTS, "its header is invalid"],
            ),
            (
                |m| m.write(INDEX, "{\"weight_map\": 3}"),
                &[INDEX, "\"weight_map\""],
            ),
            (
                |m| m.write(INDEX, "{\"weight_map\""),
                &[INDEX, "not valid JSON"],
            ),
        ],
    );
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    assert_cases(
        "llama-f32",
        &[
            (
                |m| {
                    m.remove(INDEX);
                    m.edit(WEIGHTS, |b| {
                        replace(b, "layers.2.mlp.up_proj", "layers.2.mlp.xx_proj")
                    })
                },
                &["model.layers.2.mlp.up_proj"],
            ),
            (
                |m| m.set(CONFIG, "/intermediate_size", json!(96)),
                &["model.layers.0.mlp", "128", "96"],
            ),
            (
                |m| m.set(CONFIG, "/num_hidden_layers", json!(5)),
                &["model.layers.4."],
            ),
            (
                |m| m.set(CONFIG, "/tie_word_embeddings", json!(false)),
                &["lm_head"],
            ),
        ],
    );
}

/// What engines have different defaults for, and sizes that would make layers of nothing.
#[test]
fn a_gemma4_config_that_makes_no_sense_is_located() {
    for (key, values) in [
        (
            "layer_types",
            vec![Value::Null, json!([]), json!(vec!["linear"; 8])],
        ),
        (
            "num_kv_shared_layers",
            vec![Value::Null, json!(8), json!(7), json!(-1)],
        ),
        (
            "hidden_size_per_layer_input",
            vec![Value::Null, json!(-1), json!(1 << 25)],
        ),
        (
            "global_head_dim",
            vec![Value::Null, json!(0), json!(1 << 26)],
        ),
        ("head_dim", vec![Value::Null, json!(31)]),
        ("num_key_value_heads", vec![Value::Null, json!(3)]),
        ("sliding_window", vec![Value::Null, json!(0)]),
        (
            "rope_parameters",
            vec![Value::Null, json!({}), json!({"full_attention": 3})],
        ),
        ("enable_moe_block", vec![json!(true)]),
        ("hidden_activation", vec![json!("silu")]),
        ("per_layer_config", vec![json!({"3": {"head_dim": -1}})]),
    ] {
        for value in values {
            let model = Copy::of("gemma4-f32");
            model.set(CONFIG, &format!("/text_config/{key}"), value.clone());
            let output = answer(model.path());
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{key} {value}: {text}");
            assert!(
                text.lines().count() <= 3 && text.contains(model.arg()),
                "{text}"
            );
        }
    }
}

#[test]
fn a_config_that_makes_no_sense_is_located() {
    assert_cases(
        "llama-f32",
        &[
            (|m| m.write(CONFIG, ""), &[CONFIG, "not valid JSON"]),
            (|m| m.write(CONFIG, "{\n  oops\n}"), &[CONFIG, "line 2"]),
            (|m| m.write(CONFIG, "[]"), &[CONFIG, "not an object"]),
            (|m| m.write(CONFIG, "{}"), &["model_type"]),
            (
                |m| m.set(CONFIG, "/model_type", json!("gpt9")),
                &["\"gpt9\"", "supported: gemma4, llama"],
            ),
            (|m| m.set(CONFIG, "/model_type", json!(7)), &["model_type"]),
        ],
    );
    let sizes = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ];
    for key in sizes {
        for value in [
            json!(-1),
            json!(0),
            json!("64"),
            json!(1.5),
            json!(1_u64 << 40),
        ] {
            let model = Copy::of("llama-f32");
            model.set(CONFIG, &format!("/{key}"), value);
            assert_refused(&answer(model.path()), 2, &[model.arg(), key]);
        }
    }
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    ] {
        let model = Copy::of("llama-f32");
        model.set(CONFIG, &format!("/{key}"), Value::Null);
        assert_model_refused(model.path(), &[key]);
    }
}

/// The largest size that a config may state, where layers multiply it by another.
#[test]
fn heads_without_end_are_refused() {
    for (base, section, key) in [
        ("llama-f32", "", "num_attention_heads"),
        ("qwen3-4bit-g32-f32", "", "num_attention_heads"),
        ("qwen3_5-f32", "/text_config", "num_attention_heads"),
        ("qwen3_5-f32", "/text_config", "linear_num_value_heads"),
    ] {
        let model = Copy::of(base);
        model.set(CONFIG, &format!("{section}/{key}"), json!(1 << 26));
        // The plain product would be 0 in 32 bits.
        if key == "num_attention_heads" {
            model.set(CONFIG, &format!("{section}/head_dim"), json!(64));
        }
        assert_model_refused(model.path(), &[key, "too many"]);
    }
}

#[test]
fn a_gguf_file_that_is_damaged_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let huge = [b"GGUF\x03\0\0\0".as_slice(), &[0xFF; 16]].concat();
    for (content, says) in [
        (b"hello".as_slice(), "GGUF"),
        (b"GGUF", "ends too early, at byte 4"),
        (b"GGUF\x03\0\0\0\x01", "ends too early, at byte"),
        (b"GGUF\x63\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "99"),
        (&huge, ""),
    ] {
        let file = dir.path().join("model.gguf");
        std::fs::write(&file, content).unwrap();
        assert_model_refused(&file, &[says]);
    }
    // A good file, cut in its metadata, in its tensor table and in its weights.
    let good = dir.path().join("good.gguf");
    gguf::write(&checkpoint("llama-f32"), Kind::Q8_0, &good);
    assert_eq!(answer(&good).status.code(), Some(0));
    let whole = std::fs::read(&good).unwrap();
    for (part, of) in [(1, 200), (1, 20), (1, 2), (199, 200)] {
        let file = dir.path().join("cut.gguf");
        std::fs::write(&file, &whole[..whole.len() * part / of]).unwrap();
        assert_model_refused(&file, &[]);
    }
}

#[test]
fn a_model_without_a_tokenizer_continues_token_ids_alone() {
    let model = Copy::of("llama-f32");
    model.remove("tokenizer.json");
    let text = [
        "--model",
        model.arg(),
        "--prompt",
        "hello",
        "--max-tokens",
        "2",
    ];
    assert_refused(&run(&text), 2, &[model.arg(), "tokenizer.json"]);
    let output = run(&[
        "--model",
        model.arg(),
        "--prompt-tokens",
        "1,2",
        "--max-tokens",
        "2",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(2));
    assert_eq!(answer["text"], "");
    let stop = ["--prompt-tokens", "1,2", "--stop", "x"];
    let output = run(&[&["--model", model.arg()], &stop[..]].concat());
    assert_refused(&output, 2, &["stop texts need a tokenizer"]);

    model.write("tokenizer.json", "{\"version\": \"1.0\", \"model\"");
    assert_refused(&run(&text), 2, &[model.arg(), "tokenizer.json"]);
}
