//! What drafting keeps in memory as a text grows, and as requests come and go.

use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::engine::{Engine, Request};
use mlxhost::model::Model;
use serde_json::json;

use mlxhost_tests::cases::Copy;
use mlxhost_tests::decoding::{PAIRS, Random, ask, drafter, engine, memory_while, request};
use mlxhost_tests::{checkpoint, engine_lock, number};

/// Tokens of prompts, and of the answers: no buffer grows while one is decoded.
const PROMPTS: [usize; 2] = [300, 3850];
const ANSWER: usize = 150;

fn memory(engine: &Engine, prompt: usize) -> i64 {
    let prompt: Vec<i32> = (0..prompt).map(|i| (i * i % 251) as i32).collect();
    let request = Request {
        depth: Some(3),
        ..request(&prompt, 20 * ANSWER)
    };
    let (least, stats) = memory_while(engine, &request, ANSWER);
    assert_eq!(stats.drafter.as_deref(), Some("dflash"));
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
    // With full attention, the drafter alone would take 3.6 MB more. A pass that is always under way when
    // the memory is looked at takes some hundred KB.
    assert!((grown - target).abs() < 1 << 20, "{grown}, not {target}");
}

/// How many come and go; `MLXHOST_REQUESTS` says another number.
fn requests() -> usize {
    number("MLXHOST_REQUESTS", 80)
}

#[test]
fn hundreds_of_requests_that_end_anyhow_leave_nothing_behind() {
    let _lock = engine_lock();
    // A recurrent state and a head; keys that are lent, and windows.
    for pair in [PAIRS[3], PAIRS[6]] {
        let (model, source) = pair.open();
        let engine = engine(&model, Some(source));
        let mut random = Random(3);
        let mut serve = |count: usize| {
            let mut running = Vec::new();
            for n in 0..count {
                let prompt: Vec<i32> = (0..1 + random.below(40))
                    .map(|_| random.below(250) as i32)
                    .collect();
                let request = request(&prompt, 1 + random.below(8));
                let one = engine.submit(request).expect("a valid request");
                for _ in 0..random.below(4) {
                    one.next_event();
                }
                match random.below(4) {
                    0 => one.cancel(),
                    // Whoever does not listen any more has cancelled.
                    1 => continue,
                    _ => {}
                }
                running.push(one);
                if n % 8 == 7 {
                    running.drain(..).flatten().for_each(drop);
                }
            }
            running.into_iter().flatten().for_each(drop);
            // What it says it has ended is gone by the time another has been answered.
            ask(&engine, &request(&[1, 2, 3], 4));
        };
        serve(20);
        let before = settled();
        serve(requests());
        let after = settled();
        assert!(
            after <= before + before / 50,
            "{pair:?}: {before}, then {after}"
        );
    }
}

/// The memory in use once the engine has let go of what it served: the end of an answer is told before that.
fn settled() -> u64 {
    let mut least = plugin_api::memory_used();
    for _ in 0..50 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        least = least.min(plugin_api::memory_used());
    }
    least
}
