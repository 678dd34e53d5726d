//! `mlxhost drafter`: heads that are split off full checkpoints, and what directories are said to be.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Output;

use mlxhost::backend::Affine;
use mlxhost::drafter::{self, SplitOptions};
use mlxhost_tests::cases::{Copy, arg, assert_refused, stderr, text};
use mlxhost_tests::tensors::{self, Tensor, Tensors, difference};
use mlxhost_tests::{checkpoint, engine_lock, fixture, id_list, ids, json, plugin, run, run_json};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const FULL: &str = "qwen3_5-hf-f32";
const HEAD: &str = "qwen3_5_mtp-f32";
const QUANTIZED: &str = "qwen3_5_mtp-4bit-g64-f32";

fn split(from: &Path, out: &Path, more: &[&str]) -> Output {
    let (from, out) = (from.to_str().unwrap(), out.to_str().unwrap());
    run(&[&["drafter", "split", "--from", from, "--out", out], more].concat())
}

/// A directory that is not there yet, and what keeps its parent.
fn new_place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("head");
    (dir, out)
}

/// Names, types, shapes and bytes of a checkpoint's tensors.
fn contents(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, tensor)| {
        let (dtype, shape) = (tensor.dtype().to_string(), tensor.shape().to_vec());
        (name.to_owned(), (dtype, shape, tensor.data().to_vec()))
    });
    tensors.collect()
}

/// The f32 tensors of all files of a checkpoint.
fn all_tensors(dir: &Path) -> Tensors {
    let entries = std::fs::read_dir(dir).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let files = paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.flat_map(|file| tensors::read(&file)).collect()
}

#[test]
fn the_head_is_split_off_as_mlx_vlm_splits_it() {
    let (_dir, out) = new_place();
    let said = text(&split(&checkpoint(FULL), &out, &[]));
    assert!(
        said.contains("15 tensors") && said.contains("--drafter"),
        "{said}"
    );
    let (ours, theirs) = (contents(&out), contents(&checkpoint(HEAD)));
    assert!(ours.keys().eq(theirs.keys()));
    let (ours, theirs) = (all_tensors(&out), all_tensors(&checkpoint(HEAD)));
    for (name, tensor) in &theirs {
        assert_eq!(ours[name].shape, tensor.shape, "{name}");
        let distance = difference(&ours[name], tensor);
        assert!(distance < 1e-6, "{name}: {distance}");
    }
    let config = |dir: &Path| json(&dir.join("config.json"));
    assert_eq!(config(&out), config(&checkpoint(HEAD)));
    let index = json(&out.join("model.safetensors.index.json"));
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 15);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
        assert_eq!(read(&out), read(&checkpoint(FULL)), "{file}");
    }
}

#[test]
fn the_quantized_head_is_that_of_mlx_vlm_bit_for_bit() {
    let (_dir, out) = new_place();
    text(&split(&checkpoint(FULL), &out, &["--bits", "4"]));
    assert_eq!(contents(&out), contents(&checkpoint(QUANTIZED)));
    let config = |dir: &Path| json(&dir.join("config.json"));
    assert_eq!(config(&out), config(&checkpoint(QUANTIZED)));
}

#[test]
fn a_head_that_was_split_off_drafts_like_mlx_vlm() {
    let (_dir, out) = new_place();
    text(&split(&checkpoint(FULL), &out, &[]));
    let golden = json(&fixture("oracle/goldens/spec-qwen3_5-mtp-f32/golden.json"));
    let depth = golden["draft_block_size"].as_u64().unwrap() - 1;
    let (model, library) = (arg(checkpoint("qwen3_5-f32")), arg(plugin("qwen_mtp")));
    for case in ["A", "C"] {
        let expected = &golden["runs"][case];
        let tokens = ids(&expected["tokens"]);
        // Beyond the peer's limit, which cuts its last rounds.
        let (limit, depth) = ((tokens.len() + 8).to_string(), depth.to_string());
        let answer = run_json(
            &[
                &[
                    "--model",
                    &model,
                    "--plugin",
                    &library,
                    "--drafter",
                    out.to_str().unwrap(),
                ],
                &[
                    "--prompt-tokens",
                    &id_list(&ids(&expected["prompt"])),
                    "--ignore-eos",
                ][..],
                &[
                    "--max-tokens",
                    &limit,
                    "--temperature",
                    "0",
                    "--depth",
                    &depth,
                ],
                &["--drafter-option", "commit=keep"],
            ]
            .concat(),
        );
        assert_eq!(ids(&answer["tokens"])[..tokens.len()], tokens);
        let theirs = expected["rounds"].as_array().unwrap();
        let ours = answer["rounds"].as_array().unwrap();
        assert!(!theirs.is_empty() && ours.len() >= theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            let draft = ids(&theirs["draft"][0]);
            assert_eq!(ids(&ours["drafted"])[..draft.len()], draft, "{case}");
        }
    }
}

/// A full checkpoint with these tensors, and a config as that of the fixture with `change` made.
fn full_with(tensors: &Tensors, change: impl FnOnce(&mut Value)) -> Copy {
    let model = Copy::empty();
    tensors::write_checkpoint(&checkpoint(FULL), tensors, model.path());
    let path = model.path().join("config.json");
    let mut config = json(&path);
    change(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
    model
}

/// The target's own tensors as converted, with the head's under `prefix`.
fn converted_with(head: &str, strip: &str, prefix: &str) -> Tensors {
    let mut all = all_tensors(&checkpoint("qwen3_5-f32"));
    for (name, tensor) in all_tensors(&checkpoint(head)) {
        if let Some(leaf) = name.strip_prefix(strip) {
            all.insert(format!("{prefix}{leaf}"), tensor);
        }
    }
    all
}

#[test]
fn norms_are_shifted_once_and_only_where_structure_says_so() {
    // Converted as a whole: the norms are as they are used.
    let whole = full_with(&converted_with(HEAD, "", "language_model.mtp."), |_| {});
    let (_dir, out) = new_place();
    let said = text(&split(whole.path(), &out, &[]));
    assert!(said.contains("as they were"), "{said}");
    assert_eq!(contents(&out), contents(&checkpoint(HEAD)));

    // Split off already.
    let (_again, twice) = new_place();
    let refused = split(&out, &twice, &[]);
    assert_refused(&refused, 2, &[out.to_str().unwrap(), "split off already"]);
    assert!(!twice.exists());

    // Converted, with a head that may or may not have been.
    let half = full_with(&converted_with(FULL, "mtp.", "mtp."), |_| {});
    let says = ["not clear", "mtp.*", "--norms minus-one"];
    assert_refused(&split(half.path(), &twice, &[]), 2, &says);
    text(&split(half.path(), &twice, &["--norms", "minus-one"]));
    assert_eq!(contents(&twice), contents(&checkpoint(HEAD)));
    let (_third, third) = new_place();
    text(&split(whole.path(), &third, &["--norms", "minus-one"]));
    let shifted = &all_tensors(&third)["norm.weight"];
    assert!(difference(shifted, &all_tensors(&out)["norm.weight"]) > 0.9);
}

/// What is done to the tensors of a published checkpoint, and what is said of it.
type Case<'a> = (fn(&mut Tensors), &'a [&'a str]);

#[test]
fn what_is_no_complete_head_is_refused() {
    let published = all_tensors(&checkpoint(FULL));
    let cases: &[Case] = &[
        (
            |t| t.retain(|name, _| !name.starts_with("mtp.")),
            &["no mtp.* tensors", "converters strip them"],
        ),
        (
            |t| t.retain(|name, _| !name.contains("mtp.layers.0.self_attn.v_proj")),
            &["missing tensors", "mtp.layers.0.self_attn.v_proj.weight"],
        ),
        (
            |t| t.retain(|name, _| !name.contains("conv1d")),
            &["not clear", "no convolution", "--norms"],
        ),
        (
            |t| rename(t, "mtp.", "language_model.mtp."),
            &["not clear", "as published", "language_model.mtp.*"],
        ),
        (
            |t| {
                let norm = t["mtp.norm.weight"].clone();
                t.insert("language_model.mtp.norm.weight".to_owned(), norm);
            },
            &["both mtp.* and language_model.mtp.*"],
        ),
        (
            |t| rename(t, "mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.sideways"),
            &[
                "mtp.layers.0.mlp.sideways.weight",
                "none that a Qwen3.5 head has",
            ],
        ),
        (
            |t| rename(t, "mtp.layers.0.mlp.", "mtp.layers.1.mlp."),
            &["mtp.layers.1.mlp.down_proj", "mtp_num_hidden_layers"],
        ),
        (
            |t| t.get_mut("mtp.norm.weight").unwrap().shape = vec![8, 8],
            &["mtp.norm.weight", "[8, 8]"],
        ),
    ];
    for (change, says) in cases {
        let mut tensors = published.clone();
        change(&mut tensors);
        let model = full_with(&tensors, |_| {});
        let (dir, out) = new_place();
        let says = [&[model.arg()], *says].concat();
        assert_refused(&split(model.path(), &out, &[]), 2, &says);
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "{says:?}"
        );
    }
    for (name, says) in [
        ("llama-f32", "\"llama\" has no head"),
        ("gemma4_assistant-f32", "\"gemma4_assistant\" has no head"),
        ("qwen3_5-f32", "converters strip them"),
    ] {
        let (_dir, out) = new_place();
        assert_refused(&split(&checkpoint(name), &out, &[]), 2, &[says]);
    }
    let many = full_with(&published, |config| {
        config["text_config"]["mtp_num_hidden_layers"] = json!(1u64 << 40);
    });
    let (_dir, out) = new_place();
    assert_refused(
        &split(many.path(), &out, &[]),
        2,
        &["mtp_num_hidden_layers"],
    );
}

fn rename(tensors: &mut Tensors, from: &str, to: &str) {
    let names: Vec<_> = tensors
        .keys()
        .filter(|name| name.starts_with(from))
        .cloned()
        .collect();
    for name in names {
        let tensor = tensors.remove(&name).unwrap();
        tensors.insert(name.replacen(from, to, 1), tensor);
    }
}

#[test]
fn experts_are_stacked_however_they_were_stored() {
    let (experts, rows, hidden) = (3, 32, 64);
    let random = |seed: usize, shape: &[usize]| Tensor {
        shape: shape.to_vec(),
        values: (0..shape.iter().product())
            .map(|i| ((i * 31 + seed * 17) % 101) as f32 / 101.0)
            .collect(),
    };
    let mut base = all_tensors(&checkpoint(FULL));
    base.retain(|name, _| !name.starts_with("mtp.layers.0.mlp."));
    let mlp = "mtp.layers.0.mlp";
    base.insert(format!("{mlp}.gate.weight"), random(1, &[experts, hidden]));
    let (mut fused, mut single) = (base.clone(), base);
    let mut both = random(2, &[experts, 2 * rows, hidden]);
    let down = random(3, &[experts, hidden, rows]);
    for expert in 0..experts {
        let part = |tensor: &Tensor, at: usize, shape: [usize; 2]| {
            let size = shape[0] * shape[1];
            let values = tensor.values[at * size..(at + 1) * size].to_vec();
            Tensor {
                shape: shape.to_vec(),
                values,
            }
        };
        let mut add = |name: &str, tensor| {
            single.insert(format!("{mlp}.experts.{expert}.{name}.weight"), tensor)
        };
        add("gate_proj", part(&both, 2 * expert, [rows, hidden]));
        add("up_proj", part(&both, 2 * expert + 1, [rows, hidden]));
        add("down_proj", part(&down, expert, [hidden, rows]));
    }
    both.shape = vec![experts, 2 * rows, hidden];
    fused.insert(format!("{mlp}.experts.gate_up_proj"), both);
    fused.insert(format!("{mlp}.experts.down_proj"), down);
    let moe = |config: &mut Value| {
        config["model_type"] = json!("qwen3_5_moe");
        config["text_config"]["num_experts"] = json!(3);
    };
    let (_dir, out) = new_place();
    text(&split(
        full_with(&fused, moe).path(),
        &out,
        &["--bits", "8"],
    ));
    let (_other, other) = new_place();
    text(&split(
        full_with(&single, moe).path(),
        &other,
        &["--bits", "8"],
    ));
    let made = contents(&out);
    assert_eq!(made, contents(&other));
    let shape = |name: &str| made[&format!("layers.0.mlp.{name}.weight")].1.clone();
    assert_eq!(shape("switch_mlp.up_proj"), [experts, rows, hidden]);
    assert_eq!(shape("switch_mlp.down_proj"), [experts, hidden, rows]);
    // Routers stay as they are; other matrices do not.
    assert_eq!(shape("gate"), [experts, hidden]);
    assert!(made.contains_key("fc.scales") && !made.contains_key("layers.0.mlp.gate.scales"));

    single.retain(|name, _| !name.contains("experts.2.up_proj"));
    let (_third, third) = new_place();
    let refused = split(full_with(&single, moe).path(), &third, &[]);
    assert_refused(&refused, 2, &["switch_mlp.up_proj", "2 are there"]);
}

#[test]
fn a_directory_in_use_is_left_alone() {
    let full = checkpoint(FULL);
    let (dir, out) = new_place();
    std::fs::create_dir(&out).unwrap();
    text(&split(&full, &out, &[]));
    let refused = split(&full, &out, &["--bits", "4"]);
    assert_refused(&refused, 2, &["not empty", "--force"]);
    text(&split(&full, &out, &["--bits", "4", "--force"]));
    assert_eq!(contents(&out), contents(&checkpoint(QUANTIZED)));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

    // Something else beside the head, and something else entirely.
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    let says = ["something else", "--force does not replace"];
    assert_refused(&split(&full, &out, &["--force"]), 2, &says);
    let model = Copy::of(FULL);
    assert_refused(&split(model.path(), model.path(), &["--force"]), 2, &says);
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    assert_refused(
        &split(&full, &file, &["--force"]),
        2,
        &[file.to_str().unwrap()],
    );
    let nowhere = Path::new("/nowhere/at/all");
    assert_refused(&split(&full, nowhere, &[]), 2, &["/nowhere/at"]);
}

#[test]
fn a_head_that_is_quantized_already_stays_so() {
    let mut tensors = all_tensors(&checkpoint(FULL));
    let scales = Tensor {
        shape: vec![4],
        values: vec![1.0; 4],
    };
    tensors.insert("mtp.fc.scales".to_owned(), scales);
    let scheme = json!({"group_size": 64, "bits": 4, "mtp.fc": {"bits": 8}, "lm_head": false});
    let full = full_with(&tensors, |config| config["quantization"] = scheme);
    let (_dir, out) = new_place();
    let says = ["quantized already", "fc.scales", "leave out --bits"];
    assert_refused(&split(full.path(), &out, &["--bits", "4"]), 2, &says);
    text(&split(full.path(), &out, &[]));
    assert_eq!(contents(&out)["fc.scales"].1, [4]);
    let kept = json!({"group_size": 64, "bits": 4, "fc": {"bits": 8}});
    let config = json(&out.join("config.json"));
    assert_eq!(
        (&config["quantization"], &config["quantization_config"]),
        (&kept, &kept)
    );
}

#[test]
fn an_interrupted_split_leaves_nothing() {
    let _lock = engine_lock();
    let full = checkpoint(FULL);
    let (dir, out) = new_place();
    let options = SplitOptions {
        quantize: Affine::new(4, 64),
        ..SplitOptions::default()
    };
    for stop in [0, 1, 100_000, u64::MAX] {
        let mut last = (0, 0);
        let made = drafter::split(&full, &out, options, &mut |done, all| {
            assert!(last.0 <= done && done <= all, "{last:?} {done} {all}");
            last = (done, all);
            if done >= stop.min(all) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        assert!(made.unwrap().is_none());
        assert!(last.1 > 0 && last.0 >= stop.min(last.1));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn inspection_says_what_a_directory_is() {
    let library = arg(plugin("qwen_mtp"));
    let inspect = |path: &Path| {
        run_json(&[
            "drafter",
            "inspect",
            path.to_str().unwrap(),
            "--plugin",
            &library,
        ])
    };
    for (name, kind, bits) in [
        (HEAD, "qwen3_5_mtp", json!(null)),
        (QUANTIZED, "qwen3_5_mtp", json!(4)),
        (FULL, "qwen3_5_mtp_inside", json!(null)),
    ] {
        let said = inspect(&checkpoint(name));
        assert_eq!(said["kind"], kind);
        assert_eq!(said["plugin"], "qwen_mtp");
        assert_eq!(said["plugins"][0]["name"], "qwen_mtp");
        assert_eq!(said["quantization"]["bits"], bits);
        assert_eq!(
            (&said["drafts"], &said["block_size"]),
            (&json!(2), &json!(3))
        );
        let target = &said["target"];
        assert_eq!(target["model"], "qwen3_5");
        assert_eq!(
            (&target["layers"], &target["hidden_size"]),
            (&json!(8), &json!(64))
        );
        if bits.is_null() {
            assert_eq!(
                (&said["tensors"], &said["bytes"]),
                (&json!(15), &json!(263_680))
            );
        }
    }
    for name in ["gemma4_assistant-f32", "gemma4_assistant-ordered-f32"] {
        let said = inspect(&checkpoint(name));
        assert_eq!(
            (&said["kind"], &said["plugin"]),
            (&json!("gemma4_assistant"), &json!("gemma_assistant"))
        );
        assert_eq!(said["plugins"], json!([]));
        let target = &said["target"];
        assert_eq!(
            (&target["hidden_size"], &target["window"]),
            (&json!(64), &json!(16))
        );
        assert_eq!(target["head_dims"], json!([32, 64]));
    }
    for name in ["llama-f32", "gemma4-f32", "qwen3_5-f32", "qwen3-f32"] {
        assert_eq!(inspect(&checkpoint(name))["kind"], Value::Null, "{name}");
    }
}

#[test]
fn inspection_in_words() {
    let inspect = |path: &str| run(&["drafter", "inspect", path]);
    let head = arg(checkpoint(QUANTIZED));
    let said = text(&inspect(&head));
    for part in [
        head.as_str(),
        "split off",
        "2 tokens a round, block_size 3, 1 layer,",
        "qwen3_5, hidden size 64, 8 layers, vocabulary of 320",
        "4 bits in groups of 64",
        "qwen_mtp, which is not at hand",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let said = text(&inspect(&arg(checkpoint("qwen3_5-f32"))));
    assert!(
        said.contains("none") && said.contains("converters strip them"),
        "{said}"
    );

    // A hostile config reaches no terminal.
    let copy = Copy::of(HEAD);
    copy.set(
        "config.json",
        "/text_config/model_type",
        json!("\u{1b}[31mred\nline"),
    );
    let said = inspect(copy.arg());
    mlxhost_tests::cases::assert_plain(&text(&said));
    assert_eq!(stderr(&said), "");

    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    assert_refused(&inspect(empty), 2, &[empty, "no config.json"]);
    assert_refused(&inspect("/nowhere"), 2, &["/nowhere"]);
    copy.write("config.json", "{");
    assert_refused(&inspect(copy.arg()), 2, &["not valid JSON"]);
}
