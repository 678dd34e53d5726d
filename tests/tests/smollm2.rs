//! The bundled model and head against the drafts that another implementation computed for them.

use std::path::PathBuf;

use serde_json::Value;

use mlxhost_tests::{id_list, ids, json, plugin, root, run_json};

/// Target passes to compare: the model is large for a CPU.
const ROUNDS: usize = 8;

/// The bundled model, if `make model` has fetched it.
fn bundled() -> Option<PathBuf> {
    let path = root().join("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    let there = path.exists();
    if !there {
        println!("skipped: {} is not there", path.display());
    }
    there.then_some(path)
}

fn number(value: &Value) -> usize {
    value.as_u64().expect("a number") as usize
}

/// The first golden prompt, drafted with these options, against the rounds stored under `key`.
fn drafts_like_the_golden(commit: &str, draft_vocab: &str, key: &str) {
    let Some(model) = bundled() else { return };
    let head = root().join("models/smollm2-mtp/bf16");
    let golden = json(&head.join("golden.json"));
    let case = &golden["prompts"][0];
    let expected = &case[key].as_array().expect("rounds")[..ROUNDS];
    // The answer's first token, then what each of the rounds keeps; some more, so that the limit
    // doesn't shorten the last drafts.
    let kept: usize = expected.iter().map(|r| number(&r["accepted"]) + 1).sum();
    let depth = number(&golden["depth"]);
    let text = |path: &PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    let answer = run_json(&[
        "--plugin",
        &text(&plugin("qwen_mtp")),
        "--model",
        &text(&model),
        "--drafter",
        &text(&head),
        "--drafter-option",
        &format!("commit={commit}"),
        "--drafter-option",
        &format!("draft_vocab={draft_vocab}"),
        "--depth",
        &depth.to_string(),
        "--prompt-tokens",
        &id_list(&ids(&case["prompt_ids"])),
        "--max-tokens",
        &(1 + kept + 1).to_string(),
        "--ignore-eos",
        "--temperature",
        "0",
    ]);
    assert_eq!(answer["drafter"], "qwen_mtp");
    let tokens = ids(&answer["tokens"]);
    assert_eq!(tokens, ids(&case["greedy_ids"])[..tokens.len()]);
    let rounds = answer["rounds"].as_array().expect("rounds");
    for (index, (ours, theirs)) in rounds.iter().zip(expected).enumerate() {
        let drafted = ids(&ours["drafted"]);
        assert_eq!(drafted, ids(&theirs["drafts"])[..drafted.len()], "{index}");
        let accepted = number(&theirs["accepted"]).min(drafted.len());
        assert_eq!(number(&ours["accepted"]), accepted, "{index}");
    }
    assert!(rounds.len() >= ROUNDS);
}

#[test]
fn the_bundled_head_drafts_from_true_hiddens() {
    drafts_like_the_golden("recompute", "full", "rounds_rewrite_full");
}

#[test]
fn the_bundled_head_drafts_from_kept_rows_and_its_own_vocabulary() {
    drafts_like_the_golden("keep", "auto", "rounds_keep_reduced");
}
