//! What a user of the real program reads as the answer, and of the answer.

use mlxhost_tests::cases::{assert_plain, stderr, target_and_drafter, text, with};
use mlxhost_tests::{command, run, run_json};

#[test]
fn the_json_object_has_the_documented_keys_and_the_streamed_text() {
    let (target, drafted) = target_and_drafter();
    let answer = ["--prompt", "hello", "--max-tokens", "24", "--depth", "3"];
    let object = run_json(&with(&drafted, &answer));
    let keys: Vec<_> = object
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        [
            "drafter",
            "finish_reason",
            "rounds",
            "text",
            "timings",
            "tokens"
        ]
    );
    assert_eq!(object["drafter"], "qwen_mtp");
    assert_eq!(object["finish_reason"], "length");
    assert_eq!(object["tokens"].as_array().unwrap().len(), 24);
    let rounds = object["rounds"].as_array().unwrap();
    let accepted: u64 = rounds
        .iter()
        .map(|round| round["accepted"].as_u64().unwrap())
        .sum();
    assert_eq!(accepted + rounds.len() as u64 + 1, 24, "{rounds:?}");
    assert!(rounds.len() < 23, "nothing was ever accepted: {rounds:?}");

    let streamed = text(&run(&with(&drafted, &answer)));
    assert_eq!(streamed.strip_suffix('\n'), object["text"].as_str());
    let plain = run_json(&with(&target, &answer));
    assert_eq!(plain["tokens"], object["tokens"]);
    assert!(plain["drafter"].is_null());
    let undrafted = run_json(&with(&drafted, &[&answer[..], &["--no-draft"]].concat()));
    assert_eq!(undrafted["tokens"], object["tokens"]);
    assert!(undrafted["drafter"].is_null());
}

#[test]
fn statistics_tell_what_was_drafted_and_accepted() {
    let (target, drafted) = target_and_drafter();
    let answer = [
        "--prompt",
        "hello",
        "--max-tokens",
        "24",
        "--stats",
        "--depth",
        "3",
    ];
    let output = run(&with(&drafted, &answer));
    let stats = stderr(&output);
    for said in [
        "prompt ",
        "answer   24 tokens",
        "target passes",
        "tokens per pass",
        "drafter  qwen_mtp: ",
        "drafted tokens accepted (",
        "by position 1: ",
        ", 2: ",
    ] {
        assert!(stats.contains(said), "no {said:?} in {stats}");
    }
    assert_plain(&stats);
    assert!(
        !text(&output).contains("tokens per pass"),
        "statistics in the answer"
    );
    assert!(stderr(&run(&with(&target, &answer))).contains("drafter  none"));
}

#[test]
fn drafted_tokens_are_green_unless_colours_are_unwanted() {
    let (_, drafted) = target_and_drafter();
    let answer = ["--prompt", "hello", "--max-tokens", "24", "--depth", "3"];
    let plain = text(&run(&with(&drafted, &answer)));
    let args = with(&drafted, &[&answer[..], &["--show-drafts"]].concat());
    let shown = text(&run(&args));
    assert!(
        shown.contains("\x1b[32m") && shown.contains("\x1b[0m"),
        "{shown:?}"
    );
    let last = |code: &str| shown.rfind(code);
    assert!(
        last("\x1b[0m") > last("\x1b[32m"),
        "the colour stays on: {shown:?}"
    );
    assert_eq!(shown.replace("\x1b[32m", "").replace("\x1b[0m", ""), plain);
    let output = command(&args).env("NO_COLOR", "1").output().unwrap();
    assert_eq!(text(&output), plain);
}

#[test]
fn the_same_seed_gives_the_same_answer_with_and_without_a_drafter() {
    let (target, drafted) = target_and_drafter();
    let tokens = |base: &[String], seed: &str| {
        let sampled = [
            "--prompt",
            "hello",
            "--max-tokens",
            "32",
            "--temperature",
            "1",
            "--top-k",
            "40",
        ];
        run_json(&with(base, &[&sampled[..], &["--seed", seed]].concat()))["tokens"].take()
    };
    let answers = ["1", "2", "3"].map(|seed| tokens(&target, seed));
    for (seed, answer) in ["1", "2", "3"].iter().zip(&answers) {
        assert_eq!(tokens(&drafted, seed), *answer, "seed {seed}");
    }
    assert_ne!(answers[0], answers[1]);
}

#[test]
fn an_answer_ends_before_a_stop_text_and_at_the_end_of_text_token() {
    let (_, drafted) = target_and_drafter();
    let base = ["--prompt", "hello", "--max-tokens", "24"];
    let whole = run_json(&with(&drafted, &base));
    let whole = whole["text"].as_str().unwrap();
    let stop: String = whole
        .chars()
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(1)
        .collect();
    let stopped = run_json(&with(&drafted, &[&base[..], &["--stop", &stop]].concat()));
    assert_eq!(stopped["text"].as_str(), whole.split(&stop).next());
    assert_eq!(stopped["finish_reason"], "stop");

    // Hot enough to draw the end-of-text token, 257, within the limit.
    let hot = [
        "--prompt",
        "hello",
        "--temperature",
        "5",
        "--seed",
        "9",
        "--max-tokens",
        "3000",
    ];
    let ended = run_json(&with(&drafted, &hot));
    let ids = ended["tokens"].as_array().unwrap();
    assert_eq!(ended["finish_reason"], "stop");
    assert_eq!(ids.last().unwrap(), 257);
    let limit = (ids.len() + 3).to_string();
    let hot = [&hot[..6], &["--max-tokens", &limit, "--ignore-eos"]].concat();
    let longer = run_json(&with(&drafted, &hot));
    assert_eq!(longer["finish_reason"], "length");
    assert_eq!(longer["tokens"].as_array().unwrap()[..ids.len()], ids[..]);
}
