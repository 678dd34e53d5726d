//! What is known of a drafter after many rounds.

use mlxhost::engine::{DraftWith, Limits, Request, Stats, Totals};
use mlxhost::prefix::PrefixConfig;
use mlxhost_tests::cases::stderr;
use mlxhost_tests::decoding::{PAIRS, ask, ask_together, drafter, engine_with, request};
use mlxhost_tests::{checkpoint, engine_lock, plugin, run, text};

#[test]
fn the_engine_knows_what_each_drafter_has_come_to() {
    let _lock = engine_lock();
    let (model, source) = PAIRS[3].open();
    let engine = engine_with(
        &model,
        [source, drafter("ngram", None, &[])],
        Limits::default(),
        PrefixConfig::default(),
    );
    let prompt = [5, 6, 7, 5, 6, 7, 5, 6];
    let asked = |with| Request {
        draft_with: with,
        ..request(&prompt, 30)
    };
    let replies = ask_together(
        &engine,
        &[asked(DraftWith::Default), asked(DraftWith::Default)],
    );
    let plain = ask(&engine, &asked(DraftWith::Nothing));
    let totals = engine.totals().expect("an engine");
    let names: Vec<_> = totals.iter().map(|(name, _)| name.as_deref()).collect();
    assert_eq!(names, [Some("qwen_mtp"), Some("ngram"), None]);
    let [head, unused, none] = [0, 1, 2].map(|at: usize| &totals[at].1);
    let sum = |of: fn(&Stats) -> usize| replies.iter().map(|r| of(&r.stats)).sum::<usize>();
    assert_eq!(head.rows as usize, sum(|stats| stats.rounds.len()));
    assert_eq!(head.tokens as usize, sum(|stats| stats.tokens - 1));
    assert_eq!(head.drafted(), sum(Stats::drafted_tokens));
    assert_eq!(head.accepted(), sum(Stats::accepted_tokens));
    let most = replies.iter().map(|r| r.stats.rounds.len() as u64).max();
    assert_eq!(Some(head.rounds), most);
    assert_eq!(*unused, Totals::default());
    let rounds = plain.stats.rounds.len() as u64;
    assert_eq!(
        (none.rounds, none.tokens, none.drafted()),
        (rounds, rounds, 0)
    );
}

#[test]
fn a_drafter_that_is_hardly_ever_right_is_spoken_of_once() {
    let [model, head, library] = [
        checkpoint("qwen3-f32"),
        checkpoint("dflash-qwen3-f32"),
        plugin("dflash"),
    ];
    let args = |depth| {
        let mut args = vec!["--plugin", text(&library), "--model", text(&model)];
        args.extend([
            "--drafter",
            text(&head),
            "--prompt-tokens",
            "1,2,3",
            "--json",
        ]);
        args.extend(["--max-tokens", "700", "--ignore-eos", "--depth", depth]);
        args
    };
    let output = run(&args("3"));
    assert!(output.status.success());
    let told = stderr(&output);
    assert_eq!(told.lines().count(), 1, "{told}");
    for says in [
        "plugin dflash: only",
        "right in 200 rounds",
        "plugins check",
    ] {
        assert!(told.contains(says), "{told}");
    }
    assert_eq!(stderr(&run(&args("0"))), "");
}
