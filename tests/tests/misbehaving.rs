//! A drafter that misbehaves costs speed, never an answer: the real program with the plugin
//! `hostile`, compared with the same run without drafts.

use std::process::{Command, Output};

use mlxhost_tests::cases::{assert_plain, assert_refused, stderr};
use mlxhost_tests::{checkpoint, command, plugin};
use serde_json::Value;

const TARGETS: [&str; 2] = ["llama-f32", "qwen3_5-f32"];

const PROMPT: &str = "72,101,108,108,111";

fn answer(target: &str, args: &[&str]) -> Output {
    answering(target, args).output().expect("the program runs")
}

fn answering(target: &str, args: &[&str]) -> Command {
    let target = checkpoint(target);
    let common = [
        "--model",
        target.to_str().unwrap(),
        "--prompt-tokens",
        PROMPT,
        "--max-tokens",
        "20",
        "--ignore-eos",
        "--json",
    ];
    command(&[&common, args].concat())
}

fn hostile(target: &str, behave: &str, after: u32, more: &[&str]) -> Output {
    let mut command = hostile_command(target, behave, after, more);
    command.output().expect("the program runs")
}

fn hostile_command(target: &str, behave: &str, after: u32, more: &[&str]) -> Command {
    let library = plugin("hostile");
    let behave = format!("behave={behave}");
    let after = format!("after={after}");
    let args = [
        "--plugin",
        library.to_str().unwrap(),
        "--drafter-option",
        &behave,
        "--drafter-option",
        &after,
        "--depth",
        "2",
    ];
    answering(target, &[&args, more].concat())
}

/// Tokens and text of an answer.
fn said(output: &Output) -> (Value, Value) {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    let answer: Value = serde_json::from_slice(&output.stdout).expect("a JSON object");
    (answer["tokens"].clone(), answer["text"].clone())
}

/// The one warning that a failed drafter leaves behind.
#[track_caller]
fn assert_warned(output: &Output, behave: &str, cause: &str) {
    let warning = stderr(output);
    assert_eq!(warning.lines().count(), 1, "{behave}: {warning:?}");
    let start = "mlxhost: warning: plugin hostile: ";
    assert!(warning.starts_with(start), "{behave}: {warning}");
    assert!(warning.contains(cause), "{behave}: {warning}");
    assert!(warning.len() < 500, "{behave}: {warning}");
    assert_plain(&warning);
    let answer: Value = serde_json::from_slice(&output.stdout).expect("a JSON object");
    assert!(answer["drafter"].is_null(), "{behave}: {answer}");
}

/// What `hostile` does once it drafts, and what the warning says of it.
const WHILE_DRAFTING: &[(&str, &str)] = &[
    ("panic-open", "panicked: hostile open (tests/plugins"),
    ("error-open", "hostile open"),
    ("loud-open", "red"),
    ("panic-prefill", "panicked: hostile prefill"),
    ("error-prefill", "hostile prefill"),
    ("panic-display", "panicked: hostile display (tests/plugins"),
    ("panic-draft", "panicked: hostile draft"),
    ("error-draft", "hostile draft"),
    ("loud-draft", "red"),
    ("number-draft", "panicked: no message"),
    ("bomb-draft", "panicked: no message"),
    ("panic-commit", "panicked: hostile commit"),
    ("error-commit", "hostile commit"),
    ("negative-id", "the id -1, outside the vocabulary of 320"),
    ("least-id", "the id -2147483648, outside"),
    ("large-id", "the id 2147483647, outside"),
    ("late-id", "the id 1073741824, outside"),
    ("too-many", "drafted 40 tokens, asked for"),
    ("extra-row", "drafted for 2 rows, asked for 1"),
    ("no-row", "drafted for 0 rows, asked for 1"),
    ("flat-ids", "expected [1, 1] I32"),
    ("narrow-ids", "expected [1, 2] I32"),
    ("tall-ids", "expected [1, 1] I32"),
    ("empty-ids", "expected [1, 1] I32"),
    ("float-ids", "expected [1, 1] I32"),
    ("long-ids", "expected [1, 1] I32"),
    ("null-ids", "drafted 1 tokens without ids"),
    ("miscount", "a group of 2"),
    ("panic-count", "panicked: hostile count"),
];

fn assert_nothing_lost(target: &str, after: u32) {
    let plain = said(&answer(target, &["--no-draft"]));
    for &(behave, cause) in WHILE_DRAFTING {
        let output = hostile(target, behave, after, &[]);
        assert_eq!(said(&output), plain, "{target}, {behave} after {after}");
        assert_warned(&output, behave, cause);
    }
}

#[test]
fn what_a_drafter_does_wrong_costs_one_warning_and_no_token() {
    assert_nothing_lost(TARGETS[0], 0);
}

#[test]
fn what_a_drafter_does_wrong_later_costs_no_token_either() {
    assert_nothing_lost(TARGETS[1], 2);
}

#[test]
fn what_is_odd_but_allowed_is_served() {
    let plain = said(&answer(TARGETS[0], &["--no-draft"]));
    for behave in [
        "nothing",
        "idle-ids",
        "wide-ids",
        "loud-name",
        "deep",
        "panic-drop",
    ] {
        let output = hostile(TARGETS[0], behave, 0, &[]);
        assert_eq!(said(&output), plain, "{behave}");
        assert_eq!(stderr(&output), "", "{behave}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["drafter"], "hostile", "{behave}");
    }
}

#[test]
fn what_a_plugin_logs_is_one_plain_line() {
    for behave in ["loud-log", "loud-crate"] {
        let output = hostile(TARGETS[0], behave, 0, &[]);
        assert_eq!(output.status.code(), Some(0));
        let text = stderr(&output);
        assert!(
            text.starts_with("mlxhost: warning: plugin hostile: [31mred and on"),
            "{behave}: {text}"
        );
        assert_eq!(text.lines().count(), 1, "{behave}: {text}");
        assert_plain(&text);
    }
}

#[test]
fn what_a_plugin_says_through_log_and_tracing_is_in_the_log() {
    let plain = said(&answer(TARGETS[0], &["--no-draft"]));
    let warnings = [
        "warning: plugin hostile: traced rows=1 name=\"two words\"",
        "error: plugin hostile: traced inside",
        "warning: plugin hostile: logged in a thread",
    ];
    let info = "info: plugin hostile: logged with 1 row";
    let debug = "debug: plugin hostile: library::part: logged elsewhere";
    for (wanted, lines) in [
        ("error", vec![warnings[1]]),
        ("warn", warnings.to_vec()),
        ("info", [&[info][..], &warnings].concat()),
        ("debug", [&[info, debug][..], &warnings].concat()),
    ] {
        let mut command = hostile_command(TARGETS[0], "talk", 0, &[]);
        let output = command.env("MLXHOST_LOG", wanted).output().unwrap();
        assert_eq!(said(&output), plain, "{wanted}");
        let text = stderr(&output);
        assert_plain(&text);
        let own = text.lines().filter(|line| line.contains("hostile"));
        let own: Vec<_> = own.map(|line| line.replacen("mlxhost: ", "", 1)).collect();
        assert_eq!(own, lines, "{wanted}");
    }
}

#[test]
fn sampled_answers_survive_too() {
    let drawn = ["--temperature", "0.9", "--seed", "5"];
    let plain = said(&answer(TARGETS[1], &[&drawn[..], &["--no-draft"]].concat()));
    for (behave, cause) in [("panic-draft", "panicked"), ("late-id", "outside")] {
        let output = hostile(TARGETS[1], behave, 2, &drawn);
        assert_eq!(said(&output), plain, "{behave}");
        assert_warned(&output, behave, cause);
    }
}

#[test]
fn the_statistics_say_that_nothing_drafted_to_the_end() {
    let output = hostile(TARGETS[0], "error-draft", 3, &["--stats"]);
    assert_eq!(output.status.code(), Some(0));
    let text = stderr(&output);
    assert!(text.contains("drafter  none"), "{text}");
}

#[test]
fn a_drafter_that_fails_before_it_drafts_is_an_error() {
    for (behave, code, cause) in [
        ("panic-load", 1, "panicked: hostile load"),
        ("bomb-load", 1, "panicked: no message"),
        ("error-load", 1, "hostile load"),
        ("loud-load", 2, "red"),
        ("panic-info", 1, "panicked: hostile info"),
        ("panic-pair", 1, "panicked: hostile pair"),
        ("error-pair", 1, "hostile pair"),
        ("loud-pair", 2, "red"),
        ("no-depth", 1, "cannot draft"),
        ("many-taps", 1, "1000 hidden states"),
        ("deep-tap", 2, "the output of layer 9999"),
        ("many-donors", 1, "1000 kinds of keys"),
        ("odd-donor", 2, "none to lend"),
    ] {
        let output = hostile(TARGETS[0], behave, 0, &[]);
        assert_refused(&output, code, &["plugin hostile: ", cause]);
    }
}
