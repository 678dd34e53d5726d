//! What a user of the real program sees around an answer: prompts, refusals, exit codes, Ctrl-C.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Output, Stdio};

use mlxhost_tests::cases::{
    arg, assert_plain, assert_refused, stderr, target_and_drafter, text, with,
};
use mlxhost_tests::{command, plugin, run, run_json};
use serde_json::Value;

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
    let (target, _) = target_and_drafter();
    for (args, says) in [
        (["--drafter", "here"], "a drafter was given, but no plugin"),
        (
            ["--drafter-option", "speed=9"],
            "an option for a drafter was given, but no plugin",
        ),
    ] {
        assert_refused(
            &run(&with(&target, &[&args[..], &["--prompt", "a"]].concat())),
            2,
            &[says],
        );
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
        // What rounds cost may be remembered.
        let mut left = std::fs::read_dir(place.path()).unwrap();
        let other = left.find(|entry| entry.as_ref().unwrap().file_name() != "costs");
        assert!(other.is_none(), "{other:?}");
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
