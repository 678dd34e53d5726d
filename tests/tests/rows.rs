//! Requests that decode together give what each gives alone, whatever is drafted for the others.

use std::cell::RefCell;
use std::path::Path;

use mlxhost::engine::{Engine, Event, Finish, Request};
use plugin_api::sampling::Sampling;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use mlxhost_tests::decoding::{
    Reply, Script, ask, ask_together, collect, drafter, engine, forced_rounds, request, sampled,
};
use mlxhost_tests::{checkpoint, checkpoint_of, engine_lock, fixture, ids, json};

/// A request and what will be accepted of its drafts.
struct Row {
    request: Request,
    accept: Vec<usize>,
}

/// Rows that differ in everything: the first `n` of five.
fn rows(n: usize) -> Vec<Row> {
    let golden = json(&fixture("oracle/goldens/target-llama-f32/golden.json"));
    let prompt = |case: &str| ids(&golden["cases"][case]["prompt"]);
    // Longer than one pass over a prompt takes in.
    let long: Vec<_> = prompt("A").into_iter().cycle().take(264).collect();
    let hot = |seed| Sampling {
        temperature: 3.0,
        ..sampled(seed)
    };
    let greedy = Sampling::default();
    let row = |prompt: &[i32], max_tokens, depth, sampling, accept: &[usize]| Row {
        request: Request {
            depth: Some(depth),
            sampling,
            ..request(prompt, max_tokens)
        },
        accept: accept.to_vec(),
    };
    let mut rows = vec![
        row(&prompt("A"), 14, 4, greedy, &[0, 4, 2, 1, 3]),
        row(&prompt("B"), 9, 2, hot(5), &[2, 0, 1]),
        row(&long, 11, 3, greedy, &[1, 3, 0, 2]),
        row(&prompt("C"), 16, 5, sampled(7), &[5, 0, 3]),
        row(&prompt("A")[..5], 12, 0, hot(9), &[0]),
    ];
    rows.truncate(n);
    rows
}

fn requests(rows: &[Row]) -> Vec<Request> {
    rows.iter().map(|row| row.request.clone()).collect()
}

/// What each request gives alone and without a drafter.
fn alone(model: &Path, rows: &[Row]) -> Vec<Reply> {
    let engine = engine(model, None);
    rows.iter().map(|row| ask(&engine, &row.request)).collect()
}

fn like_alone_with_forced_drafts(model: &str, sizes: &[usize]) {
    let _lock = engine_lock();
    let model = checkpoint(model);
    let all = rows(5);
    let plain = alone(&model, &all);
    let mut script = Script::default();
    let engine = engine(&model, Some(script.drafter()));
    for (row, plain) in all.iter().zip(&plain) {
        script.add(&row.request, &plain.tokens, &row.accept);
    }
    for &n in sizes {
        let rows = rows(n);
        let replies = ask_together(&engine, &requests(&rows));
        for (index, (row, reply)) in rows.iter().zip(&replies).enumerate() {
            assert_eq!(*reply, plain[index], "row {index} of {n}");
            assert_eq!(reply.stats.drafter.as_deref(), Some("scripted"));
            let depth = row.request.depth.unwrap_or(0) as usize;
            let forced = forced_rounds(row.request.max_tokens, depth, &row.accept);
            assert_eq!(reply.rounds(), forced, "row {index} of {n}");
        }
    }
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

/// A drafter drafts for each row as it does for that row alone.
fn like_alone_with(plugin: &str, model: &str, head: &str, all_options: &[[(&str, &str); 1]]) {
    let _lock = engine_lock();
    let (model, head) = (checkpoint(model), checkpoint(head));
    let rows = rows(4);
    let plain = alone(&model, &rows);
    for options in all_options {
        let source = drafter(plugin, Some(&head), options);
        let engine = engine(&model, Some(source));
        let together = ask_together(&engine, &requests(&rows));
        for ((row, plain), reply) in rows.iter().zip(&plain).zip(&together) {
            assert_eq!(reply, plain, "{options:?}");
            assert_eq!(reply.stats.drafter.as_deref(), Some(plugin));
            let single = ask(&engine, &row.request);
            assert_eq!(single, *plain, "{options:?}");
            assert_eq!(single.stats.rounds, reply.stats.rounds, "{options:?}");
        }
        let accepted = together.iter().map(|r| r.stats.accepted_tokens());
        assert!(accepted.sum::<usize>() > 0);
    }
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
