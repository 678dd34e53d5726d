//! Requests that decode together give what each gives alone, whatever is drafted for the others.

use std::cell::RefCell;

use mlxhost::engine::{Engine, Event, Finish, Request};
use mlxhost::model::KvConfig;
use plugin_api::sampling::Sampling;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use mlxhost_tests::decoding::{
    Script, ask, ask_together, collect, drafter, engine, forced_rounds, request, sampled,
};
use mlxhost_tests::together::{self, requests, rows};
use mlxhost_tests::{checkpoint, checkpoint_of, engine_lock, fixture, ids, json};

fn like_alone_with_forced_drafts(model: &str, sizes: &[usize]) {
    together::like_alone_with_forced_drafts(&checkpoint(model), sizes, &KvConfig::default());
}

#[test]
fn llama_answers_together_as_alone() {
    like_alone_with_forced_drafts("llama-f32", &[2, 3, 4, 5]);
}

#[test]
fn qwen3_answers_together_as_alone() {
    like_alone_with_forced_drafts("qwen3-f32", &[5]);
}

#[test]
fn gemma4_answers_together_as_alone() {
    like_alone_with_forced_drafts("gemma4-4bit-g32-f32", &[2, 5]);
}

#[test]
fn quantized_qwen3_answers_together_as_alone() {
    like_alone_with_forced_drafts("qwen3-4bit-g32-f32", &[5]);
}

#[test]
fn qwen3_5_answers_together_as_alone() {
    like_alone_with_forced_drafts("qwen3_5-f32", &[2, 3, 4, 5]);
}

#[test]
fn quantized_qwen3_5_answers_together_as_alone() {
    like_alone_with_forced_drafts("qwen3_5-4bit-g64-f32", &[3, 5]);
}

#[test]
fn models_with_experts_answer_together_as_alone() {
    like_alone_with_forced_drafts("qwen3_5-moe-1layer-f32", &[3]);
    like_alone_with_forced_drafts("gemma4-moe-1layer-f32", &[3]);
}

fn like_alone_with_a_head(model: &str, head: &str) {
    let commit = |how| [("commit", how)];
    like_alone_with(
        "qwen_mtp",
        model,
        head,
        &[commit("keep"), commit("recompute")],
    );
}

fn like_alone_with(plugin: &str, model: &str, head: &str, all_options: &[[(&str, &str); 1]]) {
    together::like_alone_with(plugin, model, head, all_options, &KvConfig::default());
}

#[test]
fn a_head_drafts_together_as_alone() {
    like_alone_with_a_head("qwen3_5-f32", "qwen3_5_mtp-f32");
}

#[test]
fn a_quantized_head_drafts_together_as_alone() {
    like_alone_with_a_head("qwen3_5-4bit-g64-f32", "qwen3_5_mtp-4bit-g64-f32");
}

#[test]
fn assistants_draft_together_as_alone() {
    let options = [[("positions", "publisher")], [("positions", "optiq")]];
    for head in ["gemma4_assistant-f32", "gemma4_assistant-ordered-f32"] {
        like_alone_with("gemma_assistant", "gemma4-4bit-g32-f32", head, &options);
    }
}

/// Blocks of different widths: what a row drafts does not depend on how wide its neighbour's is.
#[test]
fn block_drafters_draft_together_as_alone() {
    let whole = [[("draft_vocab", "full")]];
    like_alone_with("dflash", "qwen3_5-f32", "dflash-qwen3_5-f32", &whole);
    let cut = [[("min_confidence", "0.45")]];
    like_alone_with("deepspec", "gemma4-31b-f32", "dspark-gemma4-31b-f32", &cut);
    let bare = [[("min_confidence", "0")]];
    like_alone_with("dflash", "gemma4-f32", "dspark-bun-gemma4-f32", &bare);
}

/// Greedy answers of one group against those of a peer.
fn greedy_together(engine: &Engine, prompts: &serde_json::Value, answers: &serde_json::Value) {
    let answers: Vec<_> = answers
        .as_array()
        .expect("answers")
        .iter()
        .map(ids)
        .collect();
    let prompts = prompts.as_array().expect("prompts").iter().map(ids);
    let requests: Vec<_> = prompts
        .zip(&answers)
        .map(|(prompt, answer)| request(&prompt, answer.len()))
        .collect();
    let replies = ask_together(engine, &requests);
    let tokens: Vec<_> = replies.into_iter().map(|reply| reply.tokens).collect();
    assert_eq!(tokens, answers);
}

#[test]
fn two_prompts_together_give_what_peers_give() {
    let _lock = engine_lock();
    for name in [
        "llama-f32",
        "qwen3-f32",
        "qwen3-4bit-g32-f32",
        "qwen3_5-f32",
        "qwen3_5-4bit-g64-f32",
        "qwen3_5-hf-f32",
        "gemma4-f32",
        "gemma4-4bit-g32-f32",
        "gemma4-31b-f32",
    ] {
        // As published, a model says what it says converted.
        let like = name.replace("-hf-", "-");
        let path = format!("oracle/goldens/target-{like}/golden.json");
        let batch = &json(&fixture(&path))["batch2"];
        let engine = engine(&checkpoint(name), None);
        greedy_together(&engine, &batch["rows"], &batch["greedy"]);
    }
}

#[test]
fn two_prompts_with_a_head_give_what_peers_give() {
    let _lock = engine_lock();
    for name in [
        "spec-qwen3_5-mtp-f32",
        "spec-qwen3_5-mtp-4bitf32",
        "spec-qwen3_5q-mtp-4bitf32",
    ] {
        let golden = json(&fixture(&format!("oracle/goldens/{name}/golden.json")));
        let path = |key: &str| checkpoint_of(&golden, key);
        let source = drafter("qwen_mtp", Some(&path("drafter")), &[]);
        let engine = engine(&path("target"), Some(source));
        for run in ["batch_eq", "batch_ragged"] {
            let batch = &golden["runs"][run];
            greedy_together(&engine, &batch["prompts"], &batch["tokens"]);
        }
    }
}

#[test]
fn a_stop_token_inside_one_draft_leaves_the_others_alone() {
    let _lock = engine_lock();
    let mut script = Script::default();
    let engine = engine(&checkpoint("qwen3_5-f32"), Some(script.drafter()));
    let mut rows = rows(2);
    let plain: Vec<_> = rows.iter().map(|row| ask(&engine, &row.request)).collect();
    rows[0].accept = vec![4];
    for (row, plain) in rows.iter().zip(&plain) {
        script.add(&row.request, &plain.tokens, &row.accept);
    }
    // Token 0 comes from the prompt, 1 to 4 are drafted together, 5 is the target's own.
    for at in 0..=5 {
        rows[0].request.stop_ids = vec![plain[0].tokens[at]];
        let replies = ask_together(&engine, &requests(&rows));
        assert_eq!(replies[0].tokens, plain[0].tokens[..=at]);
        assert_eq!(replies[0].finish, Finish::Stop);
        assert_eq!(replies[1], plain[1]);
        // It was told where the first row ended, and found nothing wrong with it.
        assert_eq!(replies[1].stats.drafter.as_deref(), Some("scripted"));
    }
}

#[test]
fn cancelling_one_answer_leaves_the_others_alone() {
    let _lock = engine_lock();
    let mut script = Script::default();
    let engine = engine(&checkpoint("qwen3_5-f32"), Some(script.drafter()));
    let mut rows = rows(4);
    let plain: Vec<_> = rows.iter().map(|row| ask(&engine, &row.request)).collect();
    for (row, plain) in rows.iter().zip(&plain) {
        script.add(&row.request, &plain.tokens, &row.accept);
    }
    // They would go on for much longer than it takes to cancel them.
    rows[0].request.max_tokens = 3000;
    rows[1].request.max_tokens = 3000;

    let mut running = engine.submit_all(requests(&rows)).expect("valid requests");
    let (cancelled, left) = (running.remove(0), running.remove(0));
    for _ in 0..3 {
        assert!(matches!(cancelled.next_event(), Some(Event::Token(_))));
    }
    cancelled.cancel();
    drop(left);
    let rest: Vec<_> = cancelled.collect();
    assert!(matches!(rest.last(), Some(Event::Done(answer)) if answer.finish == Finish::Cancelled));
    for (running, plain) in running.into_iter().zip(&plain[2..]) {
        let reply = collect(running);
        assert_eq!(reply, *plain);
        assert_eq!(reply.stats.drafter.as_deref(), Some("scripted"));
    }
    // The engine is as good as before.
    script.clear();
    assert_eq!(ask(&engine, &requests(&rows)[2]), plain[2]);
}

/// A row of the property: prompt, limit, depth, accepted lengths and whether it is sampled.
fn any_row() -> impl Strategy<Value = (Vec<i32>, usize, u32, Vec<usize>, bool)> {
    (
        prop::collection::vec(0..256i32, 1..20),
        1..10usize,
        0..6u32,
        prop::collection::vec(0..6usize, 1..4),
        any::<bool>(),
    )
}

#[test]
fn any_requests_together_give_what_each_gives_alone() {
    let _lock = engine_lock();
    let script = RefCell::new(Script::default());
    let engine = engine(
        &checkpoint("qwen3_5-4bit-g64-f32"),
        Some(script.borrow().drafter()),
    );
    // The same cases in every run: what fails once fails again.
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let config = Config {
        cases: 24,
        failure_persistence: None,
        ..Config::default()
    };
    let rows = prop::collection::vec(any_row(), 2..5);
    let outcome = TestRunner::new_with_rng(config, rng).run(&rows, |rows| {
        let mut script = script.borrow_mut();
        script.clear();
        let mut requests = Vec::new();
        for (seed, (prompt, limit, depth, _, is_sampled)) in (1..).zip(&rows) {
            let temperature = if *is_sampled { 2.0 } else { 0.0 };
            requests.push(Request {
                depth: Some(*depth),
                sampling: Sampling {
                    temperature,
                    ..sampled(seed)
                },
                ..request(prompt, *limit)
            });
        }
        // Without a script nothing is drafted.
        let plain: Vec<_> = requests.iter().map(|r| ask(&engine, r)).collect();
        for ((request, plain), row) in requests.iter().zip(&plain).zip(&rows) {
            prop_assert_eq!(plain.stats.drafted_tokens(), 0);
            script.add(request, &plain.tokens, &row.3);
        }
        let together = ask_together(&engine, &requests);
        for ((plain, reply), row) in plain.iter().zip(&together).zip(&rows) {
            prop_assert_eq!(reply, plain);
            prop_assert_eq!(reply.rounds(), forced_rounds(row.1, row.2 as usize, &row.3));
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
