//! Models that are incomplete, damaged or hostile: what the user reads, and that nothing crashes.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::model::Model;
use mlxhost_tests::cases::{Copy, assert_refused, replace, stderr};
use mlxhost_tests::{checkpoint, engine_lock, run};
use proptest::prelude::*;
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
type Case<'a> = (fn(&Copy), &'a [&'a str]);

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
            (|m| drop(m.remove(CONFIG)), &["no config.json"]),
            (
                |m| drop(m.remove(WEIGHTS)),
                &[INDEX, "\"model.safetensors\"", "not in the directory"],
            ),
            (
                |m| drop(m.remove(WEIGHTS).remove(INDEX)),
                &["no *.safetensors file"],
            ),
        ],
    );
    assert_cases(
        "qwen3_5-hf-f32",
        &[
            (
                |m| drop(m.remove("model-00002-of-00003.safetensors")),
                &[
                    "\"model-00002-of-00003.safetensors\"",
                    "download is incomplete",
                ],
            ),
            (
                |m| {
                    drop(m.edit(INDEX, |text| {
                        replace(text, "model-00003-of", "../../00003-of")
                    }))
                },
                &["not a plain file name"],
            ),
            (
                |m| {
                    let moved = "model-00001-of-00003.safetensors";
                    let other = "model-00003-of-00003.safetensors";
                    drop(m.edit(INDEX, |text| replace(text, other, moved)));
                },
                &["which does not have it", "different versions"],
            ),
        ],
    );
}

#[test]
fn a_damaged_weight_file_is_found_out() {
    let header = |m: &Copy, length: u64| {
        m.edit(WEIGHTS, |bytes| {
            bytes[..8].copy_from_slice(&length.to_le_bytes())
        });
    };
    let _ = header;
    assert_cases(
        "llama-f32",
        &[
            (
                |m| drop(m.edit(WEIGHTS, |b| b.truncate(5))),
                &[WEIGHTS, "only 5 bytes long"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b.truncate(700))),
                &[WEIGHTS, "its header has"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b.truncate(b.len() - 1))),
                &[WEIGHTS, "its header describes", "download it again"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b.push(0))),
                &[WEIGHTS, "its header describes"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b[..8].fill(0xFF))),
                &[WEIGHTS, "18446744073709551615"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b[..8].fill(0))),
                &[WEIGHTS, "its header is invalid"],
            ),
            (
                |m| drop(m.edit(WEIGHTS, |b| b[9] = 0)),
                &[WEIGHTS, "its header is invalid"],
            ),
            (
                |m| drop(m.write(INDEX, "{\"weight_map\": 3}")),
                &[INDEX, "\"weight_map\""],
            ),
            (
                |m| drop(m.write(INDEX, "{\"weight_map\"")),
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
                    });
                },
                &["model.layers.2.mlp.up_proj"],
            ),
            (
                |m| drop(m.set(CONFIG, "/intermediate_size", json!(96))),
                &["model.layers.0.mlp", "128", "96"],
            ),
            (
                |m| drop(m.set(CONFIG, "/num_hidden_layers", json!(5))),
                &["model.layers.4."],
            ),
            (
                |m| drop(m.set(CONFIG, "/tie_word_embeddings", json!(false))),
                &["lm_head"],
            ),
        ],
    );
}

#[test]
fn a_config_that_makes_no_sense_is_located() {
    assert_cases(
        "llama-f32",
        &[
            (|m| drop(m.write(CONFIG, "")), &[CONFIG, "not valid JSON"]),
            (
                |m| drop(m.write(CONFIG, "{\n  oops\n}")),
                &[CONFIG, "line 2"],
            ),
            (|m| drop(m.write(CONFIG, "[]")), &[CONFIG, "not an object"]),
            (|m| drop(m.write(CONFIG, "{}")), &["model_type"]),
            (
                |m| drop(m.set(CONFIG, "/model_type", json!("gpt9"))),
                &["\"gpt9\"", "supported: llama"],
            ),
            (
                |m| drop(m.set(CONFIG, "/model_type", json!(7))),
                &["model_type"],
            ),
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

#[test]
fn a_gguf_file_that_is_damaged_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let huge = [b"GGUF\x03\0\0\0".as_slice(), &[0xFF; 16]].concat();
    for (content, says) in [
        (b"hello".as_slice(), "GGUF"),
        (b"GGUF", "GGUF"),
        (b"GGUF\x03\0\0\0\x01", ""),
        (b"GGUF\x63\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "99"),
        (&huge, ""),
    ] {
        let file = dir.path().join("model.gguf");
        std::fs::write(&file, content).unwrap();
        assert_model_refused(&file, &[says]);
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

/// Opens and loads in this process: whatever comes of it, it is no panic.
fn load(model: &Copy) {
    let _lock = engine_lock();
    mlxhost::backend::install();
    if let Err(error) = Checkpoint::open(model.path())
        .and_then(|checkpoint| Model::load(Arc::new(checkpoint), None).map(drop))
    {
        let text = error.to_string();
        assert!(text.lines().count() <= 3, "{text}");
        assert!(text.contains(model.arg()), "{text}");
    }
}

/// Where in a file damage is done, as a share of the part of it that matters.
fn damage(bytes: &mut Vec<u8>, part: usize, flips: &[(f64, u8)], cut: Option<f64>) {
    let part = part.min(bytes.len());
    for (at, value) in flips {
        bytes[((part - 1) as f64 * at) as usize] ^= value;
    }
    if let Some(at) = cut {
        bytes.truncate((bytes.len() as f64 * at) as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_makes_loading_panic(
        base in prop::sample::select(vec!["llama-f32", "qwen3-4bit-g32-f32", "qwen3_5-4bit-g64-f32"]),
        file in prop::sample::select(vec![CONFIG, INDEX, WEIGHTS]),
        flips in prop::collection::vec((0.0..1.0f64, 1..=255u8), 1..4),
        cut in prop::option::weighted(0.2, 0.0..1.0f64),
    ) {
        let model = Copy::of(base);
        if file == WEIGHTS {
            // Without the index, which would hide a damaged name.
            model.remove(INDEX);
        }
        model.edit(file, |bytes| {
            let header = match file {
                WEIGHTS => bytes.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize + 8),
                _ => bytes.len(),
            };
            damage(bytes, header, &flips, cut);
        });
        load(&model);
    }

    #[test]
    fn no_number_in_a_config_makes_loading_panic(
        base in prop::sample::select(vec!["llama-f32", "qwen3_5-f32", "qwen3-4bit-g32-f32"]),
        pick in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(-1), json!(0), json!(1), json!(3), json!(7), json!(63), json!(65), json!(1e300), json!(-0.5),
            json!(i32::MAX), json!(i64::MAX), json!(u64::MAX), json!(null), json!(""), json!("default"),
            json!([]), json!({}), json!(true), json!([1, 2, 3]), json!(["full_attention"]),
        ]),
    ) {
        let model = Copy::of(base);
        let config = mlxhost_tests::json(&model.path().join(CONFIG));
        let pointers = pointers(&config, "");
        model.set(CONFIG, pick.get(&pointers), value);
        load(&model);
    }
}

/// The JSON pointers of all keys below `value`.
fn pointers(value: &Value, prefix: &str) -> Vec<String> {
    let keys = value.as_object().into_iter().flatten();
    keys.flat_map(|(key, value)| {
        let here = format!("{prefix}/{key}");
        let below = pointers(value, &here);
        [here].into_iter().chain(below)
    })
    .collect()
}
