//! What a user of the real program sees: answers, formats, exit codes.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Output, Stdio};

use mlxhost_tests::cases::{assert_plain, assert_refused, stderr};
use mlxhost_tests::{checkpoint, command, plugin, run, run_json};
use serde_json::Value;

fn arg(path: std::path::PathBuf) -> String {
    path.into_os_string()
        .into_string()
        .expect("a path in UTF-8")
}

/// The arguments for the Qwen3.5 target, and those for its drafter.
fn target_and_drafter() -> (Vec<String>, Vec<String>) {
    let target = vec!["--model".to_owned(), arg(checkpoint("qwen3_5-f32"))];
    let drafter = [
        "--plugin".to_owned(),
        arg(plugin("qwen_mtp")),
        "--drafter".to_owned(),
        arg(checkpoint("qwen3_5_mtp-f32")),
    ];
    let drafted = target.iter().cloned().chain(drafter).collect();
    (target, drafted)
}

fn with<'a>(base: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    base.iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect()
}

fn text(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).expect("text in UTF-8")
}

/// Runs with something on standard input.
fn run_with_input(args: &[&str], input: &[u8]) -> Output {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A refusal may come before everything is written.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

#[test]
fn help_and_version_teach() {
    let help = text(&run(&["--help"]));
    for taught in [
        "Examples:",
        "--plugin <PATH>",
        "--drafter-option",
        "MLXHOST_PLUGIN_PATH",
        "plugins",
    ] {
        assert!(help.contains(taught), "no {taught} in {help}");
    }
    assert!(text(&run(&["--version"])).starts_with("mlxhost "));
    assert!(text(&run(&["eval", "--help"])).contains("--taps"));
    let output = run(&["--frobnicate"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--frobnicate"));
}

#[test]
fn the_prompt_comes_from_an_argument_standard_input_or_a_file_of_ids() {
    let (target, _) = target_and_drafter();
    let short = ["--max-tokens", "6", "--json"];
    let named = run_json(&with(&target, &["--prompt", "hello", "--max-tokens", "6"]));
    let piped = run_with_input(&with(&target, &short), b"hello");
    let piped: Value = serde_json::from_str(&text(&piped)).unwrap();
    assert_eq!(named["tokens"], piped["tokens"]);
    let raw = run_json(&with(
        &target,
        &["--prompt", "hello", "--raw", "--max-tokens", "6"],
    ));
    assert_eq!(raw["timings"]["prompt_tokens"], 5);
    assert!(
        named["timings"]["prompt_tokens"].as_u64() > Some(5),
        "the chat template is missing"
    );

    let ids = run_json(&with(
        &target,
        &["--prompt-tokens", "1,2,3", "--max-tokens", "6"],
    ));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[1, 2,\n 3]\n").unwrap();
    let named = format!("@{}", file.path().display());
    let of_file = run_json(&with(
        &target,
        &["--prompt-tokens", &named, "--max-tokens", "6"],
    ));
    assert_eq!(ids["tokens"], of_file["tokens"]);

    for empty in [&b""[..], b" \n"] {
        let output = run_with_input(&with(&target, &short), empty);
        assert_refused(&output, 2, &["there is no prompt", "--prompt"]);
    }
    let output = run_with_input(&with(&target, &short), b"\xFF\xFE");
    assert_refused(&output, 2, &["standard input"]);
}

/// Arguments that cannot be served, and what is said of them.
const REFUSED: &[(&[&str], &str)] = &[
    (&["--prompt-tokens", ""], "no token ids"),
    (&["--prompt-tokens", "1,two"], "\"two\" is not a token id"),
    (&["--prompt-tokens", "1,99999999999"], "is not a token id"),
    (&["--prompt-tokens", "@/nowhere"], "/nowhere"),
    (
        &["--prompt-tokens", "1,320"],
        "token 320 is outside the vocabulary of 320",
    ),
    (&["--prompt-tokens=-1"], "token -1 is outside"),
    (&["--prompt-tokens", "1", "--max-tokens", "0"], "at least 1"),
    (
        &["--prompt-tokens", "1", "--temperature", "-1"],
        "temperature -1 must be",
    ),
    (
        &["--prompt-tokens", "1", "--temperature", "nan"],
        "temperature",
    ),
    (
        &["--prompt-tokens", "1", "--temperature", "inf"],
        "temperature",
    ),
    (&["--prompt-tokens", "1", "--top-p", "1.5"], "top"),
    (&["--prompt-tokens", "1", "--top-p=-0.5"], "top"),
    (&["--prompt-tokens", "1", "--min-p", "2"], "min"),
    (
        &["--prompt-tokens", "1", "--drafter-option", "speed=9"],
        "option speed is not known",
    ),
    (
        &["--prompt-tokens", "1", "--drafter-option", "hidden=odd"],
        "expected post_norm or pre_norm",
    ),
];

#[test]
fn what_cannot_be_served_is_refused_in_a_line_or_two() {
    let (_, drafted) = target_and_drafter();
    for (args, says) in REFUSED {
        assert_refused(&run(&with(&drafted, args)), 2, &[says]);
    }
    for args in [
        &["--prompt", "a", "--prompt-tokens", "1"][..],
        &["--prompt", "a", "--depth", "9999"],
        &["--prompt", "a", "--drafter-option", "novalue"],
        &["--prompt", "a", "--top-k=-3"],
        &["--prompt", "a", "--json", "--show-drafts"],
    ] {
        let output = run(&with(&drafted, args));
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(output.stdout.is_empty());
        assert_plain(&stderr(&output));
    }
}

#[test]
fn the_json_object_has_the_documented_keys_and_the_streamed_text() {
    let (target, drafted) = target_and_drafter();
    let answer = ["--prompt", "hello", "--max-tokens", "24"];
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
    let answer = ["--prompt", "hello", "--max-tokens", "24", "--stats"];
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
    let answer = ["--prompt", "hello", "--max-tokens", "24"];
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
        "3",
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

/// A long answer that is being written, and its first byte read.
fn begun(args: &[&str]) -> (Child, Vec<u8>) {
    let mut child = command(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = vec![0];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    (child, first)
}

#[test]
fn a_reader_that_goes_away_ends_the_answer_quietly() {
    let (_, drafted) = target_and_drafter();
    let long = [
        "--prompt",
        "hello",
        "--ignore-eos",
        "--max-tokens",
        "100000",
    ];
    let (mut child, _) = begun(&with(&drafted, &long));
    drop(child.stdout.take());
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    let status = child.wait().unwrap();
    assert_eq!(said, "");
    assert!(status.code().is_some(), "ended by a signal: {status}");
}

/// Everything that is printed in one piece, into a pipe that nobody reads any more.
#[test]
fn output_that_nobody_reads_is_no_crash() {
    let (target, _) = target_and_drafter();
    let library = arg(plugin("ngram"));
    let answer = ["--prompt-tokens", "1,2", "--max-tokens", "2"];
    for args in [
        with(&target, &answer),
        with(&target, &[&answer[..], &["--json"]].concat()),
        vec!["plugins", "list", "--plugin", &library],
        vec!["plugins", "list", "--plugin", &library, "--json"],
        vec!["plugins", "inspect", &library],
        vec!["plugins", "inspect", &library, "--json"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&args).stdout(writer).output().unwrap();
        assert_eq!(stderr(&output), "", "{args:?}");
        assert_eq!(output.status.code(), Some(130), "{args:?}");
    }
    // Statistics that cannot be written take nothing from the answer.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let args = with(&target, &[&answer[..], &["--stats"]].concat());
    text(&command(&args).stderr(writer).output().unwrap());
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_the_answer_and_leaves_nothing_behind() {
    let (_, drafted) = target_and_drafter();
    let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let long = [
        "--prompt",
        "hello",
        "--ignore-eos",
        "--max-tokens",
        "100000",
        "--stats",
    ];
    let mut program = command(&with(&drafted, &long));
    program
        .env("MLXHOST_CACHE_DIR", places[0].path())
        .env("TMPDIR", places[1].path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = program.spawn().unwrap();
    let mut answer = BufReader::new(child.stdout.take().unwrap());
    assert!(!answer.fill_buf().unwrap().is_empty());
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let mut rest = Vec::new();
    answer.read_to_end(&mut rest).unwrap();
    assert!(rest.ends_with(b"\n"), "the line was not ended");
    let mut said = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert!(said.contains("target passes"), "no statistics: {said}");
    assert_plain(&said);
    for place in &places {
        let left: Vec<_> = std::fs::read_dir(place.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn eval_writes_what_was_asked_or_says_why_not() {
    let (target, _) = target_and_drafter();
    let dir = tempfile::tempdir().unwrap();
    let out = arg(dir.path().join("out.safetensors"));
    let eval = |ids: &str, taps: &str, out: &str| {
        let args = ["--prompt-tokens", ids, "--taps", taps, "--out", out];
        run(&[&["eval"][..], &with(&target, &args)].concat())
    };
    for (ids, taps, says) in [
        ("1,320", "0", "320 is outside the vocabulary of 320"),
        ("1", "8", "--taps 8: the model has 8 layers"),
        ("1", "last", "--taps last: expected"),
        ("x", "0", "\"x\" is not a token id"),
    ] {
        assert_refused(&eval(ids, taps, &out), 2, &[says]);
    }
    assert_refused(
        &eval("1", "0", "/nowhere/out.safetensors"),
        1,
        &["/nowhere/out.safetensors", "can't write"],
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    assert_eq!(text(&eval("1,2,3", "embedding,7,pre_norm,final", &out)), "");
    let bytes = std::fs::read(&out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "logits",
            "tap.7",
            "tap.embedding",
            "tap.final",
            "tap.pre_norm"
        ]
    );
    assert_eq!(file.tensor("logits").unwrap().shape(), [3, 320]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
