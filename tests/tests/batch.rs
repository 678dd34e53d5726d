//! `mlxhost batch`: a file of requests, answered together as each would be alone.

use std::path::Path;
use std::process::Output;

use mlxhost_tests::cases::{assert_refused, stderr};
use mlxhost_tests::{checkpoint, generate, ids, plugin, run};
use serde_json::{Value, json};

fn batch(dir: &Path, more: &[&str]) -> Output {
    let (input, output) = (dir.join("in.jsonl"), dir.join("out.jsonl"));
    let model = checkpoint("llama-f32");
    let args = [
        "batch",
        "--model",
        model.to_str().unwrap(),
        "--input",
        input.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
        "--ignore-eos",
        "--temperature",
        "0",
    ];
    run(&[&args[..], more].concat())
}

/// The answers in the output, by id.
fn answers(dir: &Path) -> Vec<(Value, Value)> {
    let text = std::fs::read_to_string(dir.join("out.jsonl")).unwrap();
    let answers = text.lines().map(|line| {
        let answer: Value = serde_json::from_str(line).expect("an answer per line");
        (answer["id"].clone(), answer)
    });
    answers.collect()
}

fn ask(dir: &Path, requests: &[Value]) {
    let lines: Vec<String> = requests.iter().map(Value::to_string).collect();
    std::fs::write(dir.join("in.jsonl"), lines.join("\n")).unwrap();
}

#[test]
fn a_batch_answers_like_single_requests_and_goes_on_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let prompt = |n: i32| -> Vec<i32> { (n..3 * n).collect() };
    let requests: Vec<Value> = (5..12)
        .map(|n| json!({"id": format!("r{n}"), "prompt_tokens": prompt(n), "max_tokens": 4 + n}))
        .collect();
    ask(dir, &requests);
    let ngram = plugin("ngram");
    let drafted = ["--plugin", ngram.to_str().unwrap(), "--concurrency", "3"];
    let output = batch(dir, &drafted);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let first = answers(dir);
    assert_eq!(first.len(), requests.len());
    for n in 5..12 {
        let (_, answer) = first
            .iter()
            .find(|(id, _)| *id == json!(format!("r{n}")))
            .unwrap();
        let alone = generate(&checkpoint("llama-f32"), &prompt(n), 4 + n as usize, &[]);
        assert_eq!(ids(&answer["tokens"]), ids(&alone["tokens"]));
        assert_eq!(answer["finish_reason"], "length");
    }
    // As if it had been interrupted while it wrote its last lines.
    let text = std::fs::read_to_string(dir.join("out.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let cut = format!("{}\n{}", lines[..4].join("\n"), &lines[4][..20]);
    std::fs::write(dir.join("out.jsonl"), cut).unwrap();
    let output = batch(dir, &drafted);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("4 answered before"));
    let mut names: Vec<String> = answers(dir).iter().map(|(id, _)| id.to_string()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), requests.len());
}

/// The sum of a prompt and such a limit once wrapped around.
#[test]
fn a_limit_beyond_all_numbers_is_no_crash_and_a_deadline_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let endless = json!({"prompt_tokens": [1, 2], "max_tokens": u64::MAX, "deadline": 0.3});
    ask(
        dir,
        &[endless, json!({"prompt_tokens": [3], "max_tokens": 2})],
    );
    let output = batch(dir, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut ends: Vec<(String, Value)> = answers(dir)
        .into_iter()
        .map(|(id, answer)| (id.to_string(), answer["finish_reason"].clone()))
        .collect();
    ends.sort_by(|a, b| a.0.cmp(&b.0));
    let (one, two) = (json!("deadline"), json!("length"));
    assert_eq!(ends, [("1".to_owned(), one), ("2".to_owned(), two)]);
}

#[test]
fn an_id_that_comes_twice_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let request = json!({"id": "a", "prompt_tokens": [1], "max_tokens": 1});
    ask(dir, &[request.clone(), request]);
    assert_refused(&batch(dir, &[]), 2, &["line 2", "the id \"a\" comes twice"]);
}

#[test]
fn a_request_that_makes_no_sense_is_located() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (request, says) in [
        (json!({"prompt_tokens": [1], "tokens": 3}), "tokens"),
        (json!({"max_tokens": 3}), "needs one of"),
        (json!({"prompt_tokens": [1, 999]}), "outside the vocabulary"),
        (json!({"prompt_tokens": [1], "max_tokens": 0}), "at least 1"),
        (json!({"prompt_tokens": [1], "deadline": -1}), "deadline"),
    ] {
        ask(dir, &[request]);
        assert_refused(&batch(dir, &[]), 2, &["in.jsonl: line 1", says]);
    }
    std::fs::write(dir.join("out.jsonl"), "notes\n").unwrap();
    ask(dir, &[json!({"prompt_tokens": [1]})]);
    assert_refused(&batch(dir, &[]), 2, &["out.jsonl", "line 1 is no answer"]);
    assert_eq!(
        std::fs::read_to_string(dir.join("out.jsonl")).unwrap(),
        "notes\n"
    );
}
