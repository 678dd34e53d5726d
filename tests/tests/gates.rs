//! What a user reads when a plugin or a drafter is refused: who, why, and what to do.
//!
//! Altered copies of real libraries stand for the plugins of other times and machines.

use std::path::{Path, PathBuf};
use std::process::Output;

use mlxhost_tests::cases::{Copy, altered_library, assert_refused, replace, stderr};
use mlxhost_tests::{checkpoint, plugin, run, run_json};
use object::{Object, ObjectSection};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A short answer of the small llama with a plugin.
fn answer_with(library: &Path) -> Output {
    let target = checkpoint("llama-f32");
    run(&[
        "--plugin",
        library.to_str().unwrap(),
        "--model",
        target.to_str().unwrap(),
        "--prompt-tokens",
        "1,2,3,1,2",
        "--max-tokens",
        "4",
    ])
}

fn inspect(library: &Path) -> Output {
    run(&["plugins", "inspect", library.to_str().unwrap()])
}

/// The plugin `ngram` with a part of its manifest replaced.
fn with_manifest(changes: &[(&str, &str)]) -> (TempDir, PathBuf) {
    altered_library(&plugin("ngram"), |bytes| {
        let range = {
            let file = object::File::parse(&**bytes).expect("a library");
            let section = file.section_by_name(plugin_api::abi::SECTION);
            section.and_then(|s| s.file_range()).expect("a manifest")
        };
        let section = &mut bytes[range.0 as usize..(range.0 + range.1) as usize];
        for (from, to) in changes {
            replace(section, from, to);
        }
    })
}

#[test]
fn what_is_no_library_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let whole = std::fs::read(plugin("ngram")).unwrap();
    for (path, says) in [
        (file("text.so", b"hello, I am no library"), "not a library"),
        (file("empty.so", b""), "not a library"),
        (file("head.so", &whole[..3000]), "not a library"),
        (file("half.so", &whole[..whole.len() / 2]), "not a library"),
        (dir.path().to_owned(), "--plugin-dir"),
        (
            dir.path().join("nowhere.so"),
            "name the plugin's library file",
        ),
    ] {
        let shown = path.to_str().unwrap();
        assert_refused(&answer_with(&path), 2, &[shown, says]);
        assert_refused(&inspect(&path), 2, &[shown, says]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_of_another_machine_is_refused() {
    let library = plugin("ngram");
    // e_machine: RISC-V.
    let (_dir, path) = altered_library(&library, |bytes| bytes[18..20].copy_from_slice(&[243, 0]));
    let says = [
        path.to_str().unwrap(),
        "Riscv64",
        std::env::consts::ARCH,
        "for this machine",
    ];
    assert_refused(&answer_with(&path), 2, &says);
    // e_type: a program.
    let (_dir, path) = altered_library(&library, |bytes| bytes[16..18].copy_from_slice(&[2, 0]));
    assert_refused(
        &answer_with(&path),
        2,
        &[path.to_str().unwrap(), "not a shared library"],
    );
}

#[test]
fn a_library_that_is_no_plugin_is_refused() {
    let section = plugin_api::abi::SECTION;
    let other = section.replace("host", "hose");
    let (_dir, path) = altered_library(&plugin("ngram"), |bytes| replace(bytes, section, &other));
    let says = [
        path.to_str().unwrap(),
        "not an mlxhost plugin",
        "export_plugin!",
    ];
    assert_refused(&answer_with(&path), 2, &says);
    assert_refused(&inspect(&path), 2, &says);
}

#[test]
fn a_broken_manifest_says_what_it_lacks() {
    for (from, to, says) in [
        ("{\"manifest\"", "[\"manifest\"", "not valid JSON"),
        ("\"manifest\":1", "\"manifest\":7", "format 1"),
        ("\"name\":\"ngram\"", "\"name\":\"../..\"", "has the name"),
        (
            "\"api\":\"1.0.0\"",
            "\"api\":\"1.0.x\"",
            "has api \"1.0.x\"",
        ),
    ] {
        let (_dir, path) = with_manifest(&[(from, to)]);
        let says = ["its manifest", says, path.to_str().unwrap()];
        assert_refused(&inspect(&path), 2, &says);
        assert_refused(&answer_with(&path), 2, &says);
    }
}

/// The claimed API versions, what is said of them, and the remedy; none where it loads.
const VERSIONS: &[(&str, &str, Option<[&str; 2]>)] = &[
    (
        "2.0.0",
        "1.0.0",
        Some(["for plugin API 2.0.0", "a build of it for API 1.x"]),
    ),
    (
        "2.0.0",
        "2.0.0",
        Some(["for plugin API 2.0.0", "a build of it for API 1.x"]),
    ),
    (
        "0.9.0",
        "0.1.0",
        Some(["for plugin API 0.9.0", "a build of it for API 1.x"]),
    ),
    (
        "1.9.0",
        "1.9.0",
        Some(["needs plugin API 1.9.0 or newer", "update mlxhost"]),
    ),
    ("1.9.0", "1.0.0", None),
    ("1.0.7", "1.0.0", None),
];

fn with_versions(api: &str, min_api: &str) -> (TempDir, PathBuf) {
    let (api, min) = (
        format!("\"api\":\"{api}\""),
        format!("\"min_api\":\"{min_api}\""),
    );
    with_manifest(&[("\"api\":\"1.0.0\"", &api), ("\"min_api\":\"1.0.0\"", &min)])
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_plugin_of_another_api_version_is_told_which_and_what_to_do() {
    for (api, min_api, refused) in VERSIONS {
        let (_dir, path) = with_versions(api, min_api);
        let output = answer_with(&path);
        let shown = path.to_str().unwrap();
        match refused {
            Some(says) => {
                let says = [
                    &says[..],
                    &["plugin ngram 0.1.0", shown, "this host has 1.0.0"],
                ];
                assert_refused(&output, 2, &says.concat());
            }
            None => assert_eq!(output.status.code(), Some(0), "{api}: {}", stderr(&output)),
        }
    }
}

#[test]
fn inspecting_a_plugin_tells_whether_it_would_load() {
    for (api, min_api, refused) in VERSIONS {
        let (_dir, path) = with_versions(api, min_api);
        let output = inspect(&path);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let built = format!("built with {api}, needs {min_api} or newer");
        let verdict = refused.map_or("this host can load it", |says| says[0]);
        for said in [
            "ngram 0.1.0",
            path.to_str().unwrap(),
            &built,
            verdict,
            "longest",
        ] {
            assert!(text.contains(said), "{said:?} is not in {text}");
        }
        let object = run_json(&["plugins", "inspect", path.to_str().unwrap()]);
        assert_eq!(object["api"], *api);
        assert_eq!(object["refused"].is_null(), refused.is_none(), "{object}");
    }
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_plugin_whose_tables_cannot_be_trusted_is_refused() {
    let altered = plugin("altered").canonicalize().unwrap();
    let remedy = "rebuild it against mlxhost-plugin-api 1.0.0";
    let says = [
        "plugin altered 0.1.0",
        "claims plugin API 1.0.0",
        "laid out differently",
    ];
    let says = [&says[..], &[remedy, altered.to_str().unwrap()]].concat();
    assert_refused(&answer_with(&altered), 2, &says);
    // A look at it runs nothing, so it cannot know.
    assert_eq!(inspect(&altered).status.code(), Some(0));

    for (from, to, says) in [
        (
            "mlxhost_plugin_header",
            "mlxhost_plugin_heater",
            "exports no root module",
        ),
        (
            "abi stable library for Rust",
            "abi stable library for Dust",
            "version of abi_stable",
        ),
    ] {
        let (_dir, path) = altered_library(&plugin("ngram"), |bytes| replace(bytes, from, to));
        let says = ["plugin ngram 0.1.0", says, remedy, path.to_str().unwrap()];
        assert_refused(&answer_with(&path), 2, &says);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_plugin_whose_own_libraries_are_missing_is_a_failure() {
    let change = |bytes: &mut Vec<u8>| replace(bytes, "\0libc.so.6", "\0libq.so.6");
    let (_dir, path) = altered_library(&plugin("ngram"), change);
    let says = [
        path.to_str().unwrap(),
        "libq.so.6",
        "are its own libraries installed?",
    ];
    assert_refused(&answer_with(&path), 1, &says);
}

/// The Qwen3.5 target with a drafter, through the plugin `qwen_mtp`.
fn draft_with(drafter: &Path) -> Output {
    let (library, target) = (plugin("qwen_mtp"), checkpoint("qwen3_5-f32"));
    run(&[
        "--plugin",
        library.to_str().unwrap(),
        "--model",
        target.to_str().unwrap(),
        "--drafter",
        drafter.to_str().unwrap(),
        "--prompt",
        "hello",
        "--max-tokens",
        "4",
    ])
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

/// Keeps the tensors of a checkpoint's file that `keep` wants.
fn keep_tensors(copy: &Copy, keep: impl Fn(&str) -> bool) {
    let path = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let kept = file.tensors().into_iter().filter(|(name, _)| keep(name));
    safetensors::serialize_to_file(kept, None, &path).unwrap();
}

#[test]
fn a_drafter_without_all_its_weights_is_told_which_are_missing() {
    let drafter = Copy::of("qwen3_5_mtp-f32");
    keep_tensors(&drafter, |name| name != "fc.weight");
    let says = [drafter.arg(), "missing tensors: fc.weight"];
    assert_refused(&draft_with(drafter.path()), 2, &says);
    keep_tensors(&drafter, |name| !name.starts_with("layers"));
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
