//! Requests that decode together, each with an accepted length of its own.

use std::path::Path;

use mlxhost::engine::Request;
use mlxhost::model::KvConfig;
use plugin_api::sampling::Sampling;

use crate::decoding::{
    Reply, Script, ask, ask_together, drafter, engine_storing, forced_rounds, request, sampled,
};
use crate::{checkpoint, engine_lock, fixture, ids, json};

/// A request and what will be accepted of its drafts.
pub struct Row {
    pub request: Request,
    pub accept: Vec<usize>,
}

/// Rows that differ in everything: the first `n` of five.
pub fn rows(n: usize) -> Vec<Row> {
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

/// The requests alone.
pub fn requests(rows: &[Row]) -> Vec<Request> {
    rows.iter().map(|row| row.request.clone()).collect()
}

/// What each request gives alone and without a drafter.
fn alone(model: &Path, rows: &[Row], kv: &KvConfig) -> Vec<Reply> {
    let engine = engine_storing(model, None, kv);
    rows.iter().map(|row| ask(&engine, &row.request)).collect()
}

/// The first of the rows together, so many at a time, with forced drafts: each gives what it gives alone.
pub fn like_alone_with_forced_drafts(model: &Path, sizes: &[usize], kv: &KvConfig) {
    let _lock = engine_lock();
    let all = rows(5);
    let plain = alone(model, &all, kv);
    let mut script = Script::default();
    let engine = engine_storing(model, Some(script.drafter()), kv);
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

/// A drafter drafts for each row as it does for that row alone.
pub fn like_alone_with(
    plugin: &str,
    model: &str,
    head: &str,
    all_options: &[[(&str, &str); 1]],
    kv: &KvConfig,
) {
    let _lock = engine_lock();
    let (model, head) = (checkpoint(model), checkpoint(head));
    let rows = rows(4);
    let plain = alone(&model, &rows, kv);
    for options in all_options {
        let source = drafter(plugin, Some(&head), options);
        let engine = engine_storing(&model, Some(source), kv);
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
