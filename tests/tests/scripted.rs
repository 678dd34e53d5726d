//! Drafts never change an answer: whatever is accepted, it is plain decoding's, token for token.
//!
//! The `scripted` plugin forces how many tokens are accepted in each round, and checks that the host
//! tells it exactly what was delivered.

use std::path::Path;

use mlxhost::engine::{Finish, Request};
use mlxhost::model::KvConfig;
use mlxhost_tests::decoding::{Reply, ask, engine, request};
use mlxhost_tests::forced::{self, Scripted, TOKENS, prompt};
use mlxhost_tests::gguf::{self, Kind};
use mlxhost_tests::{checkpoint, engine_lock};

/// Greedy and sampled answers under every forced acceptance.
fn drafts_change_nothing(model: &Path) {
    drafts_change_nothing_after(model, &prompt(), &[1, 2, 3, 4, 5]);
}

fn drafts_change_nothing_after(model: &Path, prompt: &[i32], depths: &[usize]) {
    forced::drafts_change_nothing(model, prompt, depths, &KvConfig::default());
}

#[test]
fn drafts_change_nothing_for_llama() {
    drafts_change_nothing(&checkpoint("llama-f32"));
}

#[test]
fn drafts_change_nothing_for_quantized_llama_gguf() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("llama.gguf");
    gguf::write(&checkpoint("llama-f32"), Kind::Q4_1, &file);
    drafts_change_nothing(&file);
}

#[test]
fn drafts_change_nothing_for_qwen3() {
    drafts_change_nothing(&checkpoint("qwen3-f32"));
}

#[test]
fn drafts_change_nothing_for_quantized_qwen3() {
    drafts_change_nothing(&checkpoint("qwen3-4bit-g32-f32"));
}

#[test]
fn drafts_change_nothing_for_gemma4() {
    drafts_change_nothing(&checkpoint("gemma4-31b-f32"));
}

/// The caches of the sliding layers have 512 columns: the answer goes on at their beginning.
#[test]
fn drafts_change_nothing_where_the_windows_of_gemma4_turn_over() {
    let prompt: Vec<i32> = prompt().into_iter().cycle().take(505).collect();
    drafts_change_nothing_after(&checkpoint("gemma4-4bit-g32-f32"), &prompt, &[4]);
}

#[test]
fn drafts_change_nothing_for_qwen3_5() {
    drafts_change_nothing(&checkpoint("qwen3_5-f32"));
}

#[test]
fn drafts_change_nothing_for_quantized_qwen3_5() {
    drafts_change_nothing(&checkpoint("qwen3_5-4bit-g64-f32"));
}

#[test]
fn drafts_change_nothing_for_qwen3_5_as_published() {
    drafts_change_nothing(&checkpoint("qwen3_5-hf-f32"));
}

#[test]
fn drafts_change_nothing_for_qwen3_5_with_experts() {
    drafts_change_nothing(&checkpoint("qwen3_5-moe-1layer-f32"));
}

#[test]
fn drafts_change_nothing_for_gemma4_with_experts() {
    drafts_change_nothing(&checkpoint("gemma4-moe-1layer-f32"));
}

/// Answers that end, each compared with the plain one that ends the same way.
///
/// `ends` makes the requests out of a long plain answer.
fn ends_are_the_same(model: &Path, ends: impl Fn(&Reply) -> Vec<Request>) {
    let plain_engine = engine(model, None);
    let long = ask(&plain_engine, &request(&prompt(), TOKENS));
    let requests = ends(&long);
    assert!(!requests.is_empty());
    let plain: Vec<_> = requests.iter().map(|r| ask(&plain_engine, r)).collect();
    drop(plain_engine);
    let mut scripted = Scripted::new(model, &KvConfig::default());
    for (request, plain) in requests.iter().zip(&plain) {
        // With all accepted, ends fall inside accepted drafts; with others on the token after them.
        for (depth, accept) in [(5, vec![5]), (3, vec![0, 3]), (2, vec![1, 2, 0])] {
            let request = Request {
                depth: Some(depth),
                ..request.clone()
            };
            let reply = scripted.ask(&request, &long.tokens, &accept);
            assert_eq!(reply, *plain, "{request:?}, {accept:?}");
        }
    }
}

/// A recurrent and an attention-only target: they roll back differently.
fn both(ends: impl Fn(&Reply) -> Vec<Request>) {
    let _lock = engine_lock();
    for model in ["qwen3_5-f32", "llama-f32"] {
        ends_are_the_same(&checkpoint(model), &ends);
    }
}

#[test]
fn a_token_limit_inside_a_draft_cuts_there() {
    both(|_| {
        (1..=12)
            .map(|max_tokens| request(&prompt(), max_tokens))
            .collect()
    });
}

#[test]
fn a_stop_token_inside_a_draft_ends_the_answer_there() {
    both(|long| {
        let stops = long.tokens[..12].iter();
        let requests = stops.map(|&stop| Request {
            stop_ids: vec![stop],
            ..request(&prompt(), TOKENS)
        });
        requests.collect()
    });
}

#[test]
fn a_stop_text_inside_a_draft_ends_the_answer_there() {
    both(|long| {
        let mut stops: Vec<String> = Vec::new();
        for pair in long.pieces[..12].windows(2) {
            stops.extend([pair[0].clone(), pair.concat()]);
        }
        stops.retain(|stop| !stop.is_empty());
        let requests = stops.into_iter().map(|stop| Request {
            stop: vec![stop],
            ..request(&prompt(), TOKENS)
        });
        requests.collect()
    });
}

#[test]
fn a_drafter_that_finds_itself_misled_is_dropped_and_the_answer_goes_on() {
    let _lock = engine_lock();
    let mut scripted = Scripted::new(&checkpoint("llama-f32"), &KvConfig::default());
    let request = request(&prompt(), TOKENS);
    let plain = ask(&scripted.engine, &request);
    // The script believes in another token than what will be delivered: to it, the host lies.
    let mut believed = plain.tokens.clone();
    believed[5] ^= 1;
    scripted.script.add(&request, &believed, &[2]);
    let reply = ask(&scripted.engine, &request);
    assert_eq!(reply, plain);
    assert_eq!(reply.stats.drafter, None);
    assert!(reply.stats.accepted_tokens() > 0);
}

#[test]
fn a_stop_text_is_not_part_of_the_answer() {
    let _lock = engine_lock();
    let engine = engine(&checkpoint("llama-f32"), None);
    let long = ask(&engine, &request(&prompt(), TOKENS));
    let stop = long.pieces.iter().find(|p| p.as_str() > " ").cloned();
    let stop = stop.expect("the answer has text");
    let reply = ask(
        &engine,
        &Request {
            stop: vec![stop.clone()],
            ..request(&prompt(), TOKENS)
        },
    );
    assert_eq!(reply.finish, Finish::Stop);
    assert!(!reply.text.contains(&stop), "{:?}", reply.text);
    assert!(long.text.starts_with(&(reply.text.clone() + &stop)));
}
