//! The real program against what other implementations computed (`fixtures/oracle`).
//!
//! Logits and hidden states within a tolerance that peers keep among each other; greedy tokens, and
//! the drafts of multi-token-prediction heads, exactly.

use std::path::{Path, PathBuf};

use serde_json::Value;

use mlxhost_tests::gguf::{self, Kind};
use mlxhost_tests::tensors::{self, Tensors, difference};
use mlxhost_tests::{checkpoint, checkpoint_of, eval, fixture, generate, ids, json, plugin, text};

/// Peers differ by up to 6e-5 on these checkpoints.
const TOLERANCE: f32 = 2e-4;

fn golden(name: &str) -> Value {
    json(&fixture(&format!("oracle/goldens/{name}/golden.json")))
}

fn golden_tensors(name: &str) -> Tensors {
    tensors::read(&fixture(&format!(
        "oracle/goldens/{name}/tensors.safetensors"
    )))
}

/// A target against its golden: all cases.
fn agrees_with_peers(name: &str) {
    agrees_with_peers_on(name, name);
}

/// A target against the golden of a checkpoint that says the same.
fn agrees_with_peers_on(name: &str, like: &str) {
    let model = checkpoint(name);
    let (golden, tensors) = (
        golden(&format!("target-{like}")),
        golden_tensors(&format!("target-{like}")),
    );
    for (case, expected) in golden["cases"].as_object().expect("cases") {
        let prompt = ids(&expected["prompt"]);
        let prefix = format!("{case}.tap");
        let layers: Vec<_> = tensors
            .keys()
            .filter_map(|name| name.strip_prefix(&prefix))
            .collect();
        assert_eq!(layers.is_empty(), case != "A", "taps are of case A");
        let mut taps = layers.clone();
        if case == "A" {
            taps.push("final");
        }
        let got = eval(&model, &prompt, &taps.join(","));
        let close = |ours: &str, theirs: &str| {
            let distance = difference(&got[ours], &tensors[theirs]);
            assert!(distance < TOLERANCE, "{name} {theirs}: {distance}");
        };
        close("logits", &format!("{case}.logits"));
        for layer in layers {
            close(&format!("tap.{layer}"), &format!("A.tap{layer}"));
        }
        if case == "A" {
            close("tap.final", "A.final_norm");
        }
        let greedy = ids(&expected["greedy"]);
        let answer = generate(&model, &prompt, greedy.len(), &[]);
        assert_eq!(ids(&answer["tokens"]), greedy, "{name} {case}");
        assert_eq!(answer["finish_reason"], "length");
    }
}

#[test]
fn llama_agrees_with_peers() {
    agrees_with_peers("llama-f32");
}

#[test]
fn qwen3_agrees_with_peers() {
    agrees_with_peers("qwen3-f32");
}

#[test]
fn quantized_qwen3_agrees_with_peers() {
    agrees_with_peers("qwen3-4bit-g32-f32");
}

#[test]
fn gemma4_with_inputs_per_layer_and_shared_keys_agrees_with_peers() {
    agrees_with_peers("gemma4-f32");
}

#[test]
fn quantized_gemma4_agrees_with_peers() {
    agrees_with_peers("gemma4-4bit-g32-f32");
}

#[test]
fn gemma4_whose_keys_are_values_too_agrees_with_peers() {
    agrees_with_peers("gemma4-31b-f32");
}

#[test]
fn qwen3_5_agrees_with_peers() {
    agrees_with_peers("qwen3_5-f32");
}

#[test]
fn quantized_qwen3_5_agrees_with_peers() {
    agrees_with_peers("qwen3_5-4bit-g64-f32");
}

#[test]
fn qwen3_5_as_published_agrees_with_peers() {
    agrees_with_peers_on("qwen3_5-hf-f32", "qwen3_5-f32");
}

/// A checkpoint that was cut to its first layer and some of its experts, against what that layer gave in the
/// whole, in the columns that go through these experts.
fn first_layer_agrees_with_peers(name: &str) {
    let golden = golden(&format!("target-{name}"));
    let tensors = golden_tensors(&format!("target-{name}"));
    let case = &golden["cases"]["A"];
    let mut tap = eval(&checkpoint(name), &ids(&case["prompt"]), "0")["tap.0"].clone();
    let width = tap.shape[tap.shape.len() - 1];
    let columns = ids(&case["columns"]).into_iter();
    let kept = columns.map(|column| &tap.values[column as usize * width..][..width]);
    tap.values = kept.collect::<Vec<_>>().concat();
    let distance = difference(&tap, &tensors["A.tap0"]);
    assert!(distance < TOLERANCE, "{name}: {distance}");
}

#[test]
fn qwen3_5_with_experts_agrees_with_peers() {
    first_layer_agrees_with_peers("qwen3_5-moe-1layer-f32");
}

#[test]
fn gemma4_with_experts_agrees_with_peers() {
    first_layer_agrees_with_peers("gemma4-moe-1layer-f32");
}

/// The drafted ids and the accepted count of each round.
fn rounds(answer: &Value) -> Vec<(Vec<i32>, usize)> {
    let rounds = answer["rounds"].as_array().expect("rounds").iter();
    let round = |round: &Value| (ids(&round["drafted"]), count(&round["accepted"]));
    rounds.map(round).collect()
}

fn count(value: &Value) -> usize {
    value.as_f64().expect("a number") as usize
}

/// The rounds of a drafter against those of mlx-vlm.
fn drafts_like_mlx_vlm(name: &str, plugin_name: &str, option: &str) {
    let golden = golden(name);
    let (target, head) = (
        checkpoint_of(&golden, "target"),
        checkpoint_of(&golden, "drafter"),
    );
    let plugin = plugin(plugin_name);
    let depth = count(&golden["draft_block_size"]) - 1;
    for run in ["A", "C"] {
        let expected = &golden["runs"][run];
        let (prompt, tokens) = (ids(&expected["prompt"]), ids(&expected["tokens"]));
        // At its limit the peer drafts one token more than we do, who count the target's own token:
        // going on a little keeps all its rounds away from our limit.
        let answer = generate(
            &target,
            &prompt,
            tokens.len() + 8,
            &[
                "--plugin",
                text(&plugin),
                "--drafter",
                text(&head),
                "--drafter-option",
                option,
                "--depth",
                &depth.to_string(),
            ],
        );
        assert_eq!(answer["drafter"], plugin_name);
        assert_eq!(ids(&answer["tokens"])[..tokens.len()], tokens);
        let ours = rounds(&answer);
        let theirs = expected["rounds"].as_array().expect("rounds");
        assert!(ours.len() >= theirs.len());
        for (index, (round, (drafted, accepted))) in theirs.iter().zip(ours).enumerate() {
            let draft = ids(&round["draft"][0]);
            let case = format!("{name} {run}, round {index}");
            assert_eq!(drafted[..draft.len()], draft, "{case}");
            // The last one was drafted shorter.
            let accepted = accepted.min(count(&expected["draft_lens"][index]));
            assert_eq!(accepted, count(&expected["accept_lens"][index]), "{case}");
        }
    }
}

/// mlx-vlm keeps accepted rows of a head's cache as drafted.
const KEEP: &str = "commit=keep";

#[test]
fn the_gemma4_assistant_drafts_like_mlx_vlm() {
    let assistant = "gemma_assistant";
    drafts_like_mlx_vlm("spec-gemma4-assistant-f32", assistant, "positions=mlx_vlm");
    drafts_like_mlx_vlm(
        "spec-gemma4-assistant-ordered-f32",
        assistant,
        "positions=mlx_vlm",
    );
    drafts_like_mlx_vlm("spec-gemma4q-assistant-f32", assistant, "positions=mlx_vlm");
}

/// The first rounds of the assistant against a peer's; the peer lists drafts and accepted counts.
fn assistant_drafts_like(name: &str, option: &str, most: usize) {
    let golden = golden(name);
    let head = match name.contains("ordered") {
        true => checkpoint("gemma4_assistant-ordered-f32"),
        false => checkpoint("gemma4_assistant-f32"),
    };
    let (plugin, target) = (plugin("gemma_assistant"), checkpoint("gemma4-f32"));
    for run in ["A", "C"] {
        let expected = &golden["runs"][run];
        let options = [
            "--plugin",
            text(&plugin),
            "--drafter",
            text(&head),
            "--drafter-option",
            option,
            "--depth",
            "3",
        ];
        let ours = rounds(&generate(&target, &ids(&expected["prompt"]), 48, &options));
        let theirs = expected["rounds"].as_array().expect("rounds");
        // The last round was cut by the peer's own limit.
        let most = most.min(theirs.len() - 1);
        for (index, (round, (drafted, accepted))) in theirs.iter().zip(ours).take(most).enumerate()
        {
            let case = format!("{name} {run}, round {index}");
            assert_eq!(drafted, ids(&round["draft"]), "{case}");
            if !round["accepted"].is_null() {
                assert_eq!(accepted, count(&round["accepted"]), "{case}");
            }
        }
    }
}

#[test]
fn the_gemma4_assistant_drafts_like_optiq() {
    for name in [
        "spec-optiq-gemma4-assistant",
        "spec-optiq-gemma4-assistant-ordered",
    ] {
        assistant_drafts_like(name, "positions=optiq", usize::MAX);
    }
}

/// Later rounds of the publisher's code look at rejected tokens.
#[test]
fn the_gemma4_assistant_begins_like_the_publisher() {
    for name in [
        "spec-hf-gemma4-assistant",
        "spec-hf-gemma4-assistant-ordered",
    ] {
        assistant_drafts_like(name, "positions=publisher", 1);
    }
}

#[test]
fn the_qwen3_5_head_drafts_like_mlx_vlm() {
    drafts_like_mlx_vlm("spec-qwen3_5-mtp-f32", "qwen_mtp", KEEP);
}

#[test]
fn the_quantized_qwen3_5_head_drafts_like_mlx_vlm() {
    drafts_like_mlx_vlm("spec-qwen3_5-mtp-4bitf32", "qwen_mtp", KEEP);
}

#[test]
fn the_quantized_head_on_a_quantized_target_drafts_like_mlx_vlm() {
    drafts_like_mlx_vlm("spec-qwen3_5q-mtp-4bitf32", "qwen_mtp", KEEP);
}

#[test]
fn the_head_inside_a_published_checkpoint_drafts_like_the_separate_one() {
    let model = checkpoint("qwen3_5-hf-f32");
    let (plugin, head) = (plugin("qwen_mtp"), checkpoint("qwen3_5_mtp-f32"));
    let prompt = ids(&golden("target-qwen3_5-f32")["cases"]["A"]["prompt"]);
    for commit in ["commit=keep", "commit=recompute"] {
        let options = [
            "--plugin",
            text(&plugin),
            "--drafter-option",
            commit,
            "--depth",
            "3",
        ];
        let inside = generate(&model, &prompt, 32, &options);
        assert_eq!(inside["drafter"], "qwen_mtp");
        let named = [&options[..], &["--drafter", text(&head)]].concat();
        let separate = generate(&model, &prompt, 32, &named);
        assert_eq!(rounds(&inside), rounds(&separate), "{commit}");
        assert_eq!(inside["tokens"], separate["tokens"]);
    }
}

/// The llama golden's prompt C and the logits for it.
fn llama_case() -> (Vec<i32>, Tensors) {
    let prompt = ids(&golden("target-llama-f32")["cases"]["C"]["prompt"]);
    (prompt, golden_tensors("target-llama-f32"))
}

/// A GGUF file of the llama checkpoint.
fn llama_gguf(dir: &Path, kind: Kind) -> PathBuf {
    let file = dir.join("llama.gguf");
    gguf::write(&checkpoint("llama-f32"), kind, &file);
    file
}

#[test]
fn a_gguf_file_says_what_the_checkpoint_it_was_made_of_says() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (prompt, golden) = llama_case();
    // F16 rounds weights by up to 5e-4 of their size.
    for (kind, tolerance) in [(Kind::F32, TOLERANCE), (Kind::F16, 0.05)] {
        let file = llama_gguf(dir.path(), kind);
        let got = eval(&file, &prompt, "");
        let distance = difference(&got["logits"], &golden["C.logits"]);
        assert!(distance < tolerance, "{kind:?}: {distance}");
        println!("{kind:?}: {distance}");
    }
}

#[test]
fn gguf_weights_stand_for_exactly_what_the_format_says() {
    let (prompt, golden) = llama_case();
    for kind in [Kind::F16, Kind::Q8_0, Kind::Q4_0, Kind::Q4_1] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let decoded = dir.path().join("decoded");
        gguf::write_decoded(&checkpoint("llama-f32"), kind, &decoded);
        let expected = eval(&decoded, &prompt, "");
        let got = eval(&llama_gguf(dir.path(), kind), &prompt, "");
        let distance = difference(&got["logits"], &expected["logits"]);
        assert!(distance < TOLERANCE, "{kind:?}: {distance}");
        // Else the comparison would say little.
        let moved = difference(&expected["logits"], &golden["C.logits"]);
        assert!(moved > TOLERANCE, "{kind:?} changes nothing: {moved}");
        println!("{kind:?}: {distance}, moved {moved}");
    }
}
