//! What drafting keeps in memory as a text grows.

use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::engine::{Engine, Event, Request};
use mlxhost::model::Model;
use serde_json::json;

use mlxhost_tests::cases::Copy;
use mlxhost_tests::decoding::{drafter, engine, request};
use mlxhost_tests::{checkpoint, engine_lock};

/// Tokens of prompts, and of the answers: no buffer grows while one is decoded.
const PROMPTS: [usize; 2] = [300, 3850];
const ANSWER: usize = 150;

/// The least memory in use while an answer is decoded: a pass in progress needs some of its own.
fn memory(engine: &Engine, prompt: usize) -> i64 {
    let prompt: Vec<i32> = (0..prompt).map(|i| (i * i % 251) as i32).collect();
    let request = Request {
        depth: Some(3),
        ..request(&prompt, ANSWER)
    };
    let mut least = i64::MAX;
    for event in engine.submit(request).expect("a valid request") {
        match event {
            Event::Token(_) => least = least.min(plugin_api::memory_used() as i64),
            Event::Done(answer) => {
                assert_eq!(answer.stats.tokens, ANSWER);
                assert_eq!(answer.stats.drafter.as_deref(), Some("dflash"));
            }
            Event::Failed(why) => panic!("the answer broke off: {why}"),
        }
    }
    least
}

#[test]
fn a_drafter_that_slides_keeps_no_more_after_thousands_of_tokens() {
    let _lock = engine_lock();
    mlxhost::backend::install();
    let path = checkpoint("gemma4-f32");
    // What the target's own caches grow by.
    let target = {
        let model = Checkpoint::open(&path).map(Arc::new);
        let model = Model::load(model.expect("a checkpoint"), None).expect("a model");
        let bytes = PROMPTS.map(|prompt| model.cache_bytes(prompt + ANSWER) as i64);
        bytes[1] - bytes[0]
    };
    let copy = Copy::of("dflash-qwen3-f32");
    copy.set("config.json", "/num_target_layers", json!(8));
    let kinds = json!(["sliding_attention", "sliding_attention"]);
    copy.set("config.json", "/layer_types", kinds);
    copy.set("config.json", "/sliding_window", json!(64));
    let source = drafter("dflash", Some(copy.path()), &[]);
    let engine = engine(&path, Some(source));
    let used = PROMPTS.map(|prompt| memory(&engine, prompt));
    let grown = used[1] - used[0];
    // With full attention, the drafter alone would take 3.6 MB more.
    assert!((grown - target).abs() < 256 << 10, "{grown}, not {target}");
}
