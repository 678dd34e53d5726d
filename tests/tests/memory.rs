//! What drafting keeps in memory while an answer grows.

use mlxhost::engine::{Event, Request};
use serde_json::json;

use mlxhost_tests::cases::Copy;
use mlxhost_tests::decoding::{drafter, engine, request};
use mlxhost_tests::{checkpoint, engine_lock};

/// Where memory is looked at: well before buffers that grow by 256 tokens at a time grow again.
const MARKS: [usize; 2] = [180, 3980];
/// Tokens after a mark, of which the least memory counts: a pass in progress needs some of its own.
const LOOKS: usize = 40;

#[test]
fn a_drafter_that_slides_keeps_no_more_after_thousands_of_tokens() {
    let _lock = engine_lock();
    mlxhost::backend::install();
    let copy = Copy::of("dflash-qwen3-f32");
    let kinds = json!(["sliding_attention", "sliding_attention"]);
    copy.set("config.json", "/layer_types", kinds);
    copy.set("config.json", "/sliding_window", json!(64));
    let source = drafter("dflash", Some(copy.path()), &[]);
    let engine = engine(&checkpoint("qwen3-f32"), Some(source));
    let request = Request {
        depth: Some(3),
        ..request(&[5, 6, 7, 8], MARKS[1] + LOOKS + 8)
    };
    let mut least = [i64::MAX; 2];
    let mut count = 0;
    for event in engine.submit(request).expect("a valid request") {
        match event {
            Event::Token(_) => count += 1,
            Event::Done(answer) => assert_eq!(answer.stats.tokens, count),
            Event::Failed(why) => panic!("the answer broke off: {why}"),
        }
        for (least, mark) in least.iter_mut().zip(MARKS) {
            if (mark..mark + LOOKS).contains(&count) {
                *least = (*least).min(plugin_api::memory_used() as i64);
            }
        }
    }
    // The target's six layers of two heads with 32 dimensions, keys and values in f32, grew by this.
    let steps = |tokens: usize| tokens.next_multiple_of(256) as i64;
    let target = (steps(MARKS[1]) - steps(MARKS[0])) * 6 * 2 * 2 * 32 * 4;
    let grown = least[1] - least[0];
    assert!((grown - target).abs() < 64 << 10, "{grown}, not {target}");
}
