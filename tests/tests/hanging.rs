//! A plugin that never returns from a call is named; nobody waits for it for ever, and Ctrl-C ends the program.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use mlxhost::engine::{Engine, EngineConfig, EngineError, Event, Failure, Running};
use mlxhost::plugin::{DrafterSource, Hang};
use mlxhost::prefix::PrefixConfig;
use mlxhost_tests::cases::{altered_library, assert_plain, assert_refused, stderr};
use mlxhost_tests::decoding::{ask, config, drafter, request, source, start};
use mlxhost_tests::{checkpoint, command, engine_lock, plugin, run};
use serde_json::Value;
use tempfile::TempDir;

/// Far more than anything here takes, and less than a call may take without an option.
const SOON: Duration = Duration::from_secs(20);

/// Arguments for a target and a plugin that does this.
fn hostile(behave: &str) -> Vec<String> {
    let (model, library) = (checkpoint("llama-f32"), plugin("hostile"));
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let option = format!("behave={behave}");
    ["--model", &path(&model), "--plugin", &path(&library)]
        .into_iter()
        .chain(["--drafter-option", &option, "--depth", "2"])
        .map(str::to_owned)
        .collect()
}

const ASK: [&str; 5] = [
    "--prompt-tokens",
    "72,101,108",
    "--max-tokens",
    "9",
    "--ignore-eos",
];

fn answer(behave: &str, more: &[&str]) -> Command {
    let mut command = command(&[]);
    command.args(hostile(behave)).args(ASK).args(more);
    command
}

/// Its end, which has to come soon.
fn end_of(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > SOON {
            child.kill().unwrap();
            panic!(
                "still there: {}",
                stderr(&child.wait_with_output().unwrap())
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn spawn(command: &mut Command) -> Child {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the program")
}

#[track_caller]
fn assert_names(output: &Output, slot: &str) {
    let library = plugin("hostile").canonicalize().unwrap();
    let slot = format!("plugin hostile has been in `{slot}` for ");
    let says = [
        &slot,
        library.to_str().unwrap(),
        "--no-draft",
        "warning: ",
        "Ctrl-C ends the program",
    ];
    assert_refused(output, 1, &says);
}

#[test]
fn whatever_call_a_plugin_hangs_in_the_program_names_it_and_ends() {
    let begin = |behave: &str| {
        let args = ["--json", "--plugin-timeout", "1"];
        spawn(&mut answer(behave, &args))
    };
    // All at once: they do nothing but wait.
    let hanging = ["load", "info", "pair", "open", "prefill", "draft", "commit"];
    let hanging = hanging.map(|slot| (slot, begin(&format!("hang-{slot}"))));
    for (slot, child) in hanging {
        assert_names(&end_of(child), slot);
    }
    // Busy with the host's own ops, which the end of the process takes nothing from.
    assert_names(&end_of(begin("spin-draft")), "draft");
    // The answer is complete: nobody waits for what is put away.
    let output = end_of(spawn(&mut answer("hang-drop", &["--json"])));
    assert_eq!(output.status.code(), Some(0));
    let object: Value = serde_json::from_slice(&output.stdout).expect("an answer");
    assert_eq!(object["tokens"].as_array().unwrap().len(), 9);
    assert!(stderr(&output).contains("`drop`"), "{}", stderr(&output));
}

/// A batch of requests that end at different times.
fn batch(dir: &Path, behave: &str, more: &[&str]) -> Command {
    let lines = (0..8).map(|n| {
        let (len, text) = (3 + 2 * n, "7,".repeat(300));
        format!("{{\"prompt_tokens\": [{text}{n}], \"max_tokens\": {len}}}\n")
    });
    std::fs::write(dir.join("in.jsonl"), lines.collect::<String>()).unwrap();
    let mut command = command(&["batch", "--ignore-eos", "--prefix-memory", "8"]);
    command.args(hostile(behave)).args(more).args([
        "--input",
        dir.join("in.jsonl").to_str().unwrap(),
        "--output",
        dir.join("out.jsonl").to_str().unwrap(),
    ]);
    command
}

#[test]
fn a_batch_that_a_plugin_holds_up_ends_and_can_go_on_without_it() {
    let held_up = |behave| {
        let dir = tempfile::tempdir().unwrap();
        let child = spawn(&mut batch(dir.path(), behave, &["--plugin-timeout", "1"]));
        (dir, child)
    };
    let capture = held_up("hang-capture");
    let append = held_up("hang-append");
    let (dir, filter) = held_up("hang-filter");
    assert_names(&end_of(capture.1), "capture");
    assert_names(&end_of(append.1), "append");
    assert_names(&end_of(filter), "filter_rows");
    let output = end_of(spawn(&mut batch(dir.path(), "nothing", &["--no-draft"])));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let answers = std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
    assert_eq!(answers.lines().count(), 8);
    assert!(!answers.contains("\"error\""), "{answers}");
}

/// Presses Ctrl-C once the plugin hangs, by what it notes in the file `diary`.
fn interrupted(mut command: Command, diary: &Path) -> Output {
    let option = format!("diary={}", diary.display());
    let child = spawn(command.args(["--drafter-option", &option]));
    let begun = Instant::now();
    while std::fs::read(diary).is_ok_and(|text| text.is_empty()) || !diary.exists() {
        assert!(begun.elapsed() < SOON, "it did not come to that");
        std::thread::sleep(Duration::from_millis(10));
    }
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    end_of(child)
}

#[test]
fn ctrl_c_ends_the_program_while_a_plugin_hangs() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    let diary = |name: &str| -> PathBuf { dir.path().join(name) };
    for slot in ["draft", "prefill"] {
        let output = interrupted(answer(&format!("hang-{slot}"), &[]), &diary(slot));
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert_plain(&said);
        // Which one it was; there is nothing else to say.
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(&format!("plugin hostile has been in `{slot}`")));
    }
    let output = interrupted(batch(dir.path(), "hang-commit", &[]), &diary("batch"));
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    // Nothing is loaded yet that would need an end of its own.
    let output = interrupted(answer("hang-load", &[]), &diary("load"));
    let status = output.status;
    assert!(
        status.signal() == Some(2) || status.code() == Some(130),
        "{status}"
    );
}

#[test]
fn plugins_may_take_their_time_where_the_user_lets_them() {
    let plain = run(&[
        "--model",
        checkpoint("llama-f32").to_str().unwrap(),
        ASK[0],
        ASK[1],
        ASK[2],
        ASK[3],
        ASK[4],
    ]);
    // It sleeps for two seconds. A word in the log at most; then it drafts.
    for timeout in ["0", "3600"] {
        let output = end_of(spawn(&mut answer(
            "nap-draft",
            &["--plugin-timeout", timeout],
        )));
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(
            (stderr(&output).as_str(), &output.stdout),
            ("", &plain.stdout)
        );
    }
}

/// A build of `hostile` of its own, with statics of its own.
fn napping(mark: u8, behave: &str) -> (TempDir, DrafterSource) {
    let (dir, path) = altered_library(&plugin("hostile"), |bytes| bytes.push(mark));
    let source = source(&path, None, &[("behave", behave)]).expect("a plugin");
    (dir, source)
}

/// An engine that gives plugins a moment.
fn hasty(drafters: impl IntoIterator<Item = DrafterSource>) -> Engine {
    let prefix = PrefixConfig {
        memory_bytes: 8 << 20,
        ..PrefixConfig::default()
    };
    start(EngineConfig {
        plugin_timeout: Some(Duration::from_millis(200)),
        prefix,
        ..config(&checkpoint("llama-f32"), drafters)
    })
}

/// The hang that ends a request's events.
fn hang_of(running: &mut Running) -> Hang {
    let hang = running.find_map(|event| match event {
        Event::Failed(Failure::Hung(hang)) => Some(hang),
        Event::Token(_) => None,
        other => panic!("{other:?}"),
    });
    assert!(running.next_event().is_none());
    let after = running.next_event_or(Duration::ZERO);
    assert!(matches!(after, Err(EngineError::Stopped)));
    hang.expect("an end")
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn whoever_waits_is_told_and_what_comes_later_is_served() {
    let _lock = engine_lock();
    let (_dir, napper) = napping(1, "nap-draft");
    let engine = hasty([napper, drafter("ngram", None, &[])]);
    let prompt = [1, 2, 3, 1, 2, 3];
    let mut running = engine
        .submit_all(vec![request(&prompt, 20); 2])
        .expect("requests");
    let mut other = request(&prompt, 20);
    other.draft_with = mlxhost::engine::DraftWith::Plugin("ngram".to_owned());
    running.push(engine.submit(other.clone()).expect("a request"));
    for running in &mut running {
        let hang = hang_of(running);
        assert_eq!((hang.plugin.as_str(), hang.call), ("hostile", "draft"));
        assert!(hang.path.unwrap().ends_with("libhostile.so"));
        assert!(hang.lasted >= Duration::from_millis(200));
    }
    let told = engine.totals().expect_err("nobody is answered");
    assert!(matches!(told, EngineError::Hung(_)), "{told}");
    assert!(told.to_string().contains("--plugin-timeout"), "{told}");
    // It wakes up. Those who asked have gone; others come.
    let begun = Instant::now();
    while engine.totals().is_err() {
        assert!(begun.elapsed() < SOON);
    }
    let reply = ask(&engine, &request(&prompt, 20));
    assert_eq!(reply.stats.drafter.as_deref(), Some("hostile"));
    assert_eq!(ask(&engine, &other), reply);
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_swap_to_a_plugin_that_takes_too_long_changes_nothing() {
    let _lock = engine_lock();
    let engine = hasty([drafter("ngram", None, &[])]);
    let before = engine.drafters();
    let reply = ask(&engine, &request(&[1, 2, 3], 9));
    let (_dir, source) = napping(2, "nap-pair");
    let new = |source| mlxhost::engine::DrafterConfig {
        source,
        costs: None,
    };
    let why = engine.swap(new(source.clone())).expect_err("no swap");
    assert!(why.to_string().contains("has been in `pair`"), "{why}");
    let begun = Instant::now();
    while engine.totals().is_err() {
        assert!(begun.elapsed() < SOON);
    }
    assert_eq!(engine.drafters(), before);
    let again = ask(&engine, &request(&[1, 2, 3], 9));
    assert_eq!(
        (&again, again.stats.drafter.as_deref()),
        (&reply, Some("ngram"))
    );
    // Awake, it may come.
    engine.swap(new(source)).expect("a swap");
    assert_eq!(engine.drafters()[0].plugin, "hostile");
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_state_that_a_plugin_hangs_over_is_told_of_and_the_engine_is_left_behind() {
    let _lock = engine_lock();
    let (_dir, source) = napping(3, "hang-restore");
    let engine = hasty([source]);
    let prompt: Vec<i32> = (0..30).collect();
    let first = ask(&engine, &request(&prompt, 5));
    let longer = [&prompt[..], &first.tokens, &[1]].concat();
    let mut running = engine.submit(request(&longer, 5)).expect("a request");
    assert_eq!(hang_of(&mut running).call, "restore");
    let begun = Instant::now();
    drop(engine);
    assert!(begun.elapsed() < SOON);
}
