//! What `mlxhost plugins check` says of plugins that keep the rules, and of those that don't.

use std::path::Path;
use std::process::Output;

use mlxhost_tests::cases::{Copy, altered_library, assert_refused, stderr};
use mlxhost_tests::decoding::{PAIRS, Pair};
use mlxhost_tests::{checkpoint, number, plugin, run};
use serde_json::Value;

fn check(library: &Path, args: &[&str]) -> Output {
    let library = library.to_str().unwrap();
    run(&[&["plugins", "check", library], args].concat())
}

/// Its reports, and its exit code.
fn reports(name: &str, args: &[&str]) -> (Vec<(String, String, String)>, Option<i32>) {
    let output = check(&plugin(name), &[args, &["--json"]].concat());
    let sheet: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no JSON: {}", stderr(&output)));
    assert_eq!(sheet["plugin"], name);
    let text = |report: &Value, key: &str| report[key].as_str().unwrap().to_owned();
    let reports = sheet["tests"].as_array().unwrap().iter();
    let reports = reports.map(|r| (text(r, "test"), text(r, "verdict"), text(r, "why")));
    (reports.collect(), output.status.code())
}

/// Every test passes, but for those named, which are skipped or warn.
#[track_caller]
fn assert_sound(name: &str, args: &[&str], but: &[(&str, &str)]) {
    let (reports, code) = reports(name, args);
    for (test, verdict, why) in &reports {
        let expected = but.iter().find(|(but, _)| but == test);
        let expected = expected.map_or("passed", |(_, verdict)| verdict);
        assert_eq!(verdict, expected, "{name}: {test}: {why}");
    }
    assert_eq!(code, Some(0));
}

/// As [`assert_sound`], but for thousands of rounds, which take long with these.
fn assert_pair_sound(pair: &Pair) {
    let listed = run(&["plugins", "check", "--list", "--json"]);
    let listed: Vec<Value> = serde_json::from_slice(&listed.stdout).unwrap();
    let names = listed.iter().map(|test| test["test"].as_str().unwrap());
    let names: Vec<&str> = names.filter(|name| *name != "memory").collect();
    assert_sound_in(pair, &names);
}

/// As [`assert_sound`], of these tests alone.
fn assert_sound_in(pair: &Pair, tests: &[&str]) {
    let of_pair = arguments(pair);
    let only = tests.iter().flat_map(|test| ["--only", test]);
    let args: Vec<&str> = refs(&of_pair).into_iter().chain(only).collect();
    assert_sound(pair.plugin, &args, &[]);
}

/// What names a pair's target and drafter.
fn arguments(pair: &Pair) -> Vec<String> {
    let path = |name| checkpoint(name).to_str().unwrap().to_owned();
    let mut args = vec!["--model".to_owned(), path(pair.target)];
    if let Some(head) = pair.head {
        args.extend(["--drafter".to_owned(), path(head)]);
    }
    if let Some((key, value)) = pair.option {
        args.extend(["--drafter-option".to_owned(), format!("{key}={value}")]);
    }
    args
}

fn refs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn a_drafter_without_weights_passes_on_the_built_in_target() {
    assert_sound("ngram", &[], &[("acceptance", "skipped")]);
}

#[test]
fn a_block_drafter_passes() {
    assert_pair_sound(&PAIRS[5]);
}

#[test]
fn a_block_drafter_with_a_confidence_head_passes() {
    // What it shares with the one above was tried there.
    let own = ["drafter", "pairing", "depths", "neighbours", "fuzz"];
    assert_sound_in(&PAIRS[2], &own);
}

#[test]
fn a_head_passes() {
    assert_pair_sound(&PAIRS[3]);
}

#[test]
fn an_assistant_passes() {
    // It looks at more of the target's window than the target does, also after it was resumed.
    assert_pair_sound(&Pair {
        head: Some("gemma4_assistant-ordered-f32"),
        ..PAIRS[6]
    });
}

/// Every test with every pair, which takes a minute each: as many as `MLXHOST_CHECKS` says, else none.
#[test]
fn every_pair_passes_everything() {
    // Drafters of random weights are right by chance.
    let untrained = [("acceptance", "warning")];
    for pair in &PAIRS[..number("MLXHOST_CHECKS", 0).min(PAIRS.len())] {
        let is_trained = !matches!(pair.head, Some("dflash-qwen3-f32"));
        let but: &[_] = if is_trained { &[] } else { &untrained };
        assert_sound(pair.plugin, &refs(&arguments(pair)), but);
    }
}

#[test]
fn thousands_of_rounds_of_a_head_leave_nothing() {
    let (target, head) = (checkpoint("qwen3_5-f32"), checkpoint("qwen3_5_mtp-f32"));
    let args = [
        "--model",
        target.to_str().unwrap(),
        "--drafter",
        head.to_str().unwrap(),
        "--only",
        "memory",
        "--timeout",
        "20",
    ];
    assert_sound("qwen_mtp", &args, &[]);
}

#[test]
fn without_a_drafter_what_needs_one_is_skipped() {
    let (reports, code) = reports("qwen_mtp", &[]);
    assert_eq!(code, Some(0));
    for (test, verdict, why) in reports {
        if ["gates", "self-contained"].contains(&test.as_str()) {
            assert_eq!(verdict, "passed", "{test}: {why}");
        } else {
            assert_eq!(verdict, "skipped", "{test}: {why}");
            assert!(why.contains("--drafter DIR --model DIR"), "{why}");
        }
    }
}

/// What `hostile` does, the test that sees it, the verdict, and what that says.
const HOSTILE: &[(&str, &str, &str, &str)] = &[
    ("error-load", "drafter", "failed", "hostile load"),
    ("panic-load", "drafter", "failed", "panicked: hostile load"),
    ("panic-info", "drafter", "failed", "panicked: hostile info"),
    ("error-pair", "drafter", "failed", "hostile pair"),
    ("no-depth", "drafter", "failed", "cannot draft"),
    ("any-option", "options", "failed", "misspelt"),
    ("fickle", "info", "failed", "something else"),
    ("deep", "info", "warning", "4294967295 tokens"),
    ("loud-name", "info", "warning", "short plain text"),
    ("error-open", "slots", "failed", "open: hostile open"),
    ("panic-prefill", "slots", "failed", "prefill: panicked"),
    ("error-draft", "slots", "failed", "draft: hostile draft"),
    ("panic-draft", "slots", "failed", "draft: panicked"),
    ("bomb-draft", "slots", "failed", "draft: panicked"),
    ("error-commit", "slots", "failed", "commit: hostile commit"),
    ("panic-commit", "slots", "failed", "commit: panicked"),
    ("error-filter", "leaving", "failed", "filter_rows: hostile"),
    ("panic-filter", "leaving", "failed", "filter_rows: panicked"),
    ("error-append", "joining", "failed", "append: hostile"),
    ("panic-append", "joining", "failed", "append: panicked"),
    ("error-capture", "resuming", "failed", "capture: hostile"),
    ("panic-restore", "resuming", "failed", "restore: panicked"),
    ("panic-restore", "bad-calls", "warning", "panicked"),
    ("negative-id", "depths", "failed", "the id -1, outside"),
    ("late-id", "depths", "failed", "the id 1073741824, outside"),
    ("too-many", "depths", "failed", "drafted 40 tokens"),
    ("null-ids", "depths", "failed", "without ids"),
    ("float-ids", "speed", "failed", "expected [1, 1] I32"),
    ("miscount", "slots", "failed", "row_count says"),
    ("crowd", "neighbours", "failed", "alone"),
    ("crowd", "fuzz", "failed", "--reproduce"),
    ("unsteady", "repeatable", "failed", "told the same again"),
    ("keep-first", "fuzz", "failed", "processed"),
    ("ahead", "resuming", "failed", "processed tokens"),
    ("forgetful", "resuming", "failed", "alone"),
    ("print", "output", "warning", "standard output: \"hostile"),
    ("print-error", "output", "warning", "standard error: \"host"),
    ("leak-thread", "threads", "failed", "threads more stay"),
    ("leak-tensor", "memory", "failed", "bytes of tensors more"),
    ("hang-draft", "slots", "crashed", "no answer within 2 s"),
    ("hang-load", "drafter", "crashed", "no answer within 2 s"),
    ("abort", "slots", "crashed", "SIGABRT"),
    ("exit", "slots", "crashed", "ended with code 0"),
    ("panic-drop", "slots", "failed", "append: panicked"),
    ("wide-ids", "speed", "passed", ""),
];

#[test]
fn what_is_hostile_gets_the_verdict_that_it_deserves() {
    for &(behave, test, verdict, says) in HOSTILE {
        let option = format!("behave={behave}");
        let mut args = vec!["--drafter-option", &option, "--only", test];
        if behave.starts_with("hang") {
            args.extend(["--timeout", "2"]);
        }
        let (reports, code) = reports("hostile", &args);
        let (seen, was, why) = &reports[0];
        assert_eq!(
            (seen.as_str(), was.as_str()),
            (test, verdict),
            "{behave}: {why}"
        );
        assert!(why.contains(says), "{behave}: {why}");
        let is_bad = ["failed", "crashed"].contains(&verdict);
        assert_eq!(code, Some(i32::from(is_bad)), "{behave}");
    }
}

#[test]
fn a_plugin_that_makes_no_drafter_says_so_once() {
    let (reports, code) = reports("hostile", &["--drafter-option", "behave=error-load"]);
    assert_eq!(code, Some(1));
    for (test, verdict, why) in reports {
        match test.as_str() {
            "gates" | "self-contained" => assert_eq!(verdict, "passed", "{test}: {why}"),
            "drafter" => assert_eq!(verdict, "failed"),
            _ => assert_eq!(verdict, "skipped", "{test}: {why}"),
        }
    }
    let (reports, code) = self::reports("altered", &[]);
    assert_eq!(code, Some(1));
    let (test, verdict, why) = &reports[0];
    assert_eq!((test.as_str(), verdict.as_str()), ("gates", "failed"));
    assert!(why.contains("laid out differently"), "{why}");
    let rest = &reports[2..];
    assert!(rest.iter().all(|(_, verdict, _)| verdict == "skipped"));
}

#[test]
#[cfg(target_os = "linux")]
fn allocators_and_static_thread_locals_are_seen_in_the_file() {
    use object::{Object, ObjectSection};
    let only = ["--only", "self-contained"];
    let says = |path: &Path, says: &str| {
        let output = check(path, &only);
        let text = mlxhost_tests::cases::text(&output);
        assert!(
            text.starts_with("warning ") && text.contains(says),
            "{text}"
        );
    };
    let ngram = plugin("ngram");
    let (_dir, path) = altered_library(&ngram, |bytes| bytes.extend(b"<jemalloc>: out of memory"));
    says(&path, "it brings jemalloc");
    let (_dir, path) = altered_library(&ngram, |bytes| {
        let range = {
            let file = object::File::parse(&**bytes).expect("a library");
            let section = file.section_by_name(".dynamic");
            section.and_then(|s| s.file_range()).expect("dynamic")
        };
        let entries = &mut bytes[range.0 as usize..(range.0 + range.1) as usize];
        let mut entries = entries.chunks_exact_mut(16);
        let flags = entries.find(|entry| entry[..8] == 30u64.to_le_bytes());
        flags.expect("DT_FLAGS")[8] |= 0x10;
    });
    says(&path, "DF_STATIC_TLS");
}

#[test]
fn a_life_that_failed_is_repeated_by_its_seed() {
    let crowd = ["--drafter-option", "behave=crowd"];
    let (fuzzed, _) = reports("hostile", &[&crowd[..], &["--only", "fuzz"]].concat());
    let why = &fuzzed[0].2;
    let (_, seed) = why.split_once("--reproduce ").expect("a seed");
    let seed = seed.split_whitespace().next().unwrap();
    let (again, code) = reports("hostile", &[&crowd[..], &["--reproduce", seed]].concat());
    assert_eq!((again.len(), &again[0].2, code), (1, why, Some(1)));
    let (sound, code) = reports("ngram", &["--reproduce", "18446744073709551615"]);
    assert_eq!(
        (sound[0].1.as_str(), code),
        ("passed", Some(0)),
        "{sound:?}"
    );
}

#[test]
fn tests_are_listed_with_what_they_check() {
    let output = run(&["plugins", "check", "--list"]);
    let text = mlxhost_tests::cases::text(&output);
    assert!(text.lines().count() > 20, "{text}");
    assert!(text.contains("resuming ") && text.contains("goes on elsewhere"));
    let output = run(&["plugins", "check", "--list", "--json"]);
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list[0]["test"], "gates");
    assert_eq!(list.len(), text.lines().count());
}

#[test]
fn reports_are_lines_and_a_sum() {
    let output = check(
        &plugin("ngram"),
        &["--only", "slots", "--only", "acceptance"],
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("passed   slots "), "{text}");
    assert!(lines[1].starts_with("skipped  acceptance "), "{text}");
    let sum = "ngram: 1 passed, 0 warning, 1 skipped, 0 failed, 0 crashed";
    assert_eq!(lines[2..], [sum]);
    let failed = ["--drafter-option", "behave=error-draft", "--only", "slots"];
    let output = check(&plugin("hostile"), &failed);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "mlxhost: plugin hostile did not pass 1 of 1 tests\n"
    );
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let none = tempfile::NamedTempFile::new().unwrap();
    let none = none.path().to_str().unwrap();
    let refused = |args: &[&str], says: &[&str]| {
        let output = run(&[&["plugins", "check"], args].concat());
        assert_refused(&output, 2, says);
    };
    refused(&[none], &[none, "not a library"]);
    refused(&["/nowhere/at/all.so"], &["/nowhere/at/all.so"]);
    let library = plugin("ngram");
    let library = library.to_str().unwrap();
    refused(&[library, "--only", "nonsense"], &["nonsense", "--list"]);
    refused(&[library, "--model", "/nowhere"], &["/nowhere"]);
    let target = checkpoint("llama-f32");
    let target = target.to_str().unwrap();
    refused(
        &[library, "--model", target, "--drafter", "/nowhere"],
        &["/nowhere"],
    );
    let output = run(&["plugins", "check", library, "--drafter", target]);
    assert_eq!(output.status.code(), Some(2));
}

/// Why few drafts of a head are accepted that was changed.
fn diagnosis(change: impl FnOnce(&Copy)) -> String {
    let copy = Copy::of("qwen3_5_mtp-f32");
    change(&copy);
    diagnosis_with(&checkpoint("qwen3_5-f32"), &copy)
}

fn diagnosis_with(target: &Path, copy: &Copy) -> String {
    let args = [
        "--model",
        target.to_str().unwrap(),
        "--drafter",
        copy.arg(),
        "--only",
        "acceptance",
    ];
    let (reports, code) = reports("qwen_mtp", &args);
    assert_eq!(code, Some(0));
    let (_, verdict, why) = &reports[0];
    assert_eq!(verdict, "warning", "{why}");
    why.clone()
}

/// Changes the elements of the tensors that `which` names.
fn rewrite(copy: &Copy, which: impl Fn(&str) -> bool, to: impl Fn(f32) -> f32) {
    let path = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let changed = |data: &[u8]| -> Vec<u8> {
        let words = data.chunks_exact(4);
        let words = words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        words.flat_map(|word| to(word).to_le_bytes()).collect()
    };
    let tensors: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, tensor)| {
            let data = match which(&name) {
                true => changed(tensor.data()),
                false => tensor.data().to_vec(),
            };
            (name, tensor.dtype(), tensor.shape().to_vec(), data)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name, view)
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
}

#[test]
fn a_head_that_is_seldom_right_is_looked_at() {
    let is_norm = |name: &str| name.contains("norm");
    let why = diagnosis(|copy| rewrite(copy, is_norm, |x| x - 1.0));
    assert!(why.contains("one was not added"), "{why}");
    let why = diagnosis(|copy| rewrite(copy, is_norm, |x| x + 1.0));
    assert!(why.contains("added twice"), "{why}");
    let why = diagnosis(|copy| rewrite(copy, |name| name == "fc.weight", |_| 0.0));
    assert!(
        why.contains("all numbers are equal") && why.contains("fc.weight"),
        "{why}"
    );
    let why = diagnosis(|copy| rewrite(copy, |name| name == "fc.weight", |_| f32::NAN));
    assert!(why.contains("numbers that are none"), "{why}");
}

#[test]
fn a_head_that_is_given_the_wrong_hidden_is_told_which_is_better() {
    // A target whose final norm turns the hidden around, and whose head turns it back: it says the same, and a
    // drafter for the hidden before the norm is right only about that one.
    let (target, drafter) = (Copy::of("qwen3_5-f32"), Copy::of("qwen3_5_mtp-f32"));
    let turned = |name: &str| name.ends_with("model.norm.weight") || name.contains("lm_head");
    rewrite(&target, turned, |x| -x);
    rewrite(&drafter, |name| name == "norm.weight", |x| -x);
    let why = diagnosis_with(target.path(), &drafter);
    assert!(why.contains("hidden from before its final norm"), "{why}");
}
