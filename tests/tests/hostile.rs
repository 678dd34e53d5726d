//! What plugins of other programs have done to their hosts, by the rows of the table in `docs/hostile.md` that have no
//! other place. Each time the host serves the next request as if nothing had been.

#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlxhost::LoadError;
use mlxhost::engine::{DraftWith, DrafterConfig, Engine, Event, Request};
use mlxhost::plugin::{DrafterSource, Library, PluginFile};
use mlxhost_tests::cases::{altered_library, assert_plain, assert_refused, replace, stderr};
use mlxhost_tests::decoding::{Reply, ask, drafter, engine, request, sampled, source};
use mlxhost_tests::{checkpoint, command, engine_lock, plugin, run, text};
use object::{Object, ObjectSection};
use serde_json::Value;
use tempfile::TempDir;

/// An engine that ngram drafts for, and what it says to two requests.
struct Host {
    engine: Engine,
    asked: Vec<(Request, Reply)>,
}

impl Host {
    fn new() -> Self {
        let engine = engine(&checkpoint("llama-f32"), Some(drafter("ngram", None, &[])));
        let mut other = request(&[9, 8, 7], 12);
        other.sampling = sampled(3);
        let asked = [request(&[1, 2, 3, 1, 2, 3], 20), other];
        let asked = asked.map(|request| {
            let reply = ask(&engine, &request);
            (request, reply)
        });
        Self {
            asked: asked.into(),
            engine,
        }
    }

    fn swap(&self, source: DrafterSource) {
        let costs = None;
        self.engine
            .swap(DrafterConfig { source, costs })
            .expect("a swap");
    }

    /// What the drafter's own code says that it is called.
    fn name(&self) -> String {
        self.engine.drafters()[0].name.clone()
    }

    /// Its answers are what they were, and this plugin drafts to their end.
    #[track_caller]
    fn assert_serves(&self, plugin: &str) {
        for (request, reply) in &self.asked {
            let again = ask(&self.engine, request);
            assert_eq!(
                (&again, again.stats.drafter.as_deref()),
                (reply, Some(plugin))
            );
        }
    }
}

fn ngram() -> DrafterSource {
    drafter("ngram", None, &[])
}

/// A build of a plugin with a text in place of another, as long.
fn build(name: &str, from: &str, to: &str) -> (TempDir, PathBuf) {
    altered_library(&plugin(name), |bytes| replace(bytes, from, to))
}

/// A build of `hostile` that this process has not loaded yet.
fn marked(number: u32) -> (TempDir, PathBuf) {
    build("hostile", "MARK-0000000", &format!("MARK-{number:07}"))
}

fn hostile(library: &Path, behave: &str) -> DrafterSource {
    source(library, None, &[("behave", behave)]).expect("a plugin")
}

/// Waits for something that has to come.
#[track_caller]
fn until(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it never comes");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Pieces of this process's memory that come from the library with these bytes.
fn mapped(library: &Path) -> usize {
    let file = PluginFile::read(library).expect("a library");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux");
    maps.lines()
        .filter(|line| line.contains(file.digest()))
        .count()
}

#[test]
fn t1_destructors_and_threads_of_an_image_end_long_after_a_swap() {
    let _lock = engine_lock();
    let dir = tempfile::tempdir().unwrap();
    let diary = dir.path().join("diary.txt");
    let noted = || std::fs::read_to_string(&diary).unwrap();
    let host = Host::new();
    let (build, library) = marked(1);
    let options = [("behave", "linger"), ("diary", diary.to_str().unwrap())];
    host.swap(source(&library, None, &options).expect("a plugin"));
    host.assert_serves("hostile");
    // Its file goes, its drafter, then its groups; others come.
    drop(build);
    for number in 2..6 {
        let (_build, library) = marked(number);
        host.swap(hostile(&library, "nothing"));
        host.assert_serves("hostile");
    }
    host.swap(ngram());
    host.assert_serves("ngram");
    assert_eq!(noted(), "");
    // The engine's thread ends, which has a thread-local of the first image.
    drop(host);
    assert_eq!(noted(), "the host's thread ends\n");
    let host = Host::new();
    std::fs::write(diary.with_extension("end"), "").unwrap();
    until(|| noted().lines().count() == 2);
    assert!(noted().ends_with("a thread of the plugin ends\n"));
    host.assert_serves("ngram");
}

#[test]
fn t2_t9_a_file_that_is_written_over_is_another_build_and_harms_none_that_runs() {
    let _lock = engine_lock();
    let host = Host::new();
    let (_dir, path) = build("ngram", "\"version\":\"0.1.0\"", "\"version\":\"0.1.7\"");
    host.swap(source(&path, None, &[]).expect("a plugin"));
    let mut asked = request(&[1, 2, 3, 1, 2, 3], 400);
    let mut long = host.engine.submit(asked.clone()).expect("a request");
    let token = |event| match event {
        Event::Token(token) => Ok(token.id),
        Event::Done(answer) => Err(answer.stats.drafter),
        Event::Failed(why) => panic!("the answer broke off: {why}"),
    };
    let mut tokens = vec![token(long.next_event().expect("an event")).expect("a token")];
    // In place, as `cp` does it: cut off, then nonsense, then another plugin, under the same path.
    std::fs::write(&path, []).unwrap();
    host.assert_serves("ngram");
    std::fs::write(&path, vec![0xcc; 1 << 21]).unwrap();
    host.assert_serves("ngram");
    std::fs::copy(plugin("hostile"), &path).unwrap();
    host.assert_serves("ngram");
    host.swap(hostile(&path, "nothing"));
    // What it is called is said by the code that runs.
    assert_eq!(host.name(), "hostile");
    host.assert_serves("hostile");
    let who = long.find_map(|event| token(event).map(|id| tokens.push(id)).err());
    assert_eq!(who.flatten().as_deref(), Some("ngram"));
    asked.draft_with = DraftWith::Nothing;
    assert_eq!(ask(&host.engine, &asked).tokens, tokens);
}

/// The library as its linker would have marked it: never to be unloaded.
fn nodelete(bytes: &mut [u8]) {
    const DT_FLAGS_1: u64 = 0x6fff_fffb;
    const DF_1_NODELETE: u8 = 0x8;
    let range = {
        let file = object::File::parse(&*bytes).expect("a library");
        let section = file.section_by_name(".dynamic");
        section.and_then(|s| s.file_range()).expect("dynamic")
    };
    let entries = &mut bytes[range.0 as usize..(range.0 + range.1) as usize];
    let is_flags = |entry: &&mut [u8]| entry[..8] == DT_FLAGS_1.to_le_bytes();
    let flags = entries.chunks_exact_mut(16).find(is_flags);
    flags.expect("DT_FLAGS_1")[8] |= DF_1_NODELETE;
}

#[test]
fn t4_t5_images_stay_mapped_whether_or_not_their_file_says_so() {
    let _lock = engine_lock();
    let host = Host::new();
    let (_dir, usual) = marked(10);
    let (_dir, kept) = altered_library(&usual, |bytes| nodelete(bytes));
    for library in [&usual, &kept, &usual] {
        host.swap(hostile(library, "mark"));
        assert_eq!(host.name(), "MARK-0000010");
        host.assert_serves("hostile");
    }
    let pieces = [mapped(&usual), mapped(&kept)];
    host.swap(ngram());
    host.assert_serves("ngram");
    drop(host);
    assert!(pieces.iter().all(|&count| count > 0));
    assert_eq!(pieces, [mapped(&usual), mapped(&kept)]);
}

#[test]
fn t14_a_plugin_may_wait_for_threads_of_its_own() {
    let _lock = engine_lock();
    let host = Host::new();
    let (_dir, library) = marked(20);
    host.swap(hostile(&library, "wait"));
    host.assert_serves("hostile");
    let library = plugin("hostile");
    let options = ["--drafter-option", "behave=wait", "--only", "threads"];
    let check = run(&[&["plugins", "check", text(&library)], &options[..]].concat());
    let said = mlxhost_tests::cases::text(&check);
    assert!(said.starts_with("passed   threads "), "{said}");
}

/// An answer of the program with a plugin: its tokens, and who drafted.
fn program(library: &Path, behave: &str) -> (Value, Value, String) {
    let model = checkpoint("llama-f32");
    let option = format!("behave={behave}");
    let output = run(&[
        "--plugin",
        text(library),
        "--model",
        text(&model),
        "--drafter-option",
        &option,
        "--prompt-tokens",
        "1,2,3",
        "--max-tokens",
        "12",
        "--json",
    ]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{behave}: {said}");
    assert_plain(&said);
    let answer: Value = serde_json::from_slice(&output.stdout).expect("an answer");
    (answer["tokens"].clone(), answer["drafter"].clone(), said)
}

#[test]
fn t17_memory_goes_back_to_whoever_allocated_it() {
    // Either allocator ends the process over memory of the other's.
    let own = plugin("allocator");
    for behave in [
        "nothing",
        "mark",
        "loud-name",
        "talk",
        "loud-log",
        "error-open",
        "panic-prefill",
        "error-draft",
        "loud-draft",
        "bomb-draft",
        "too-many",
        "panic-commit",
    ] {
        let (tokens, who, said) = program(&plugin("hostile"), behave);
        let (same, as_well, words) = program(&own, behave);
        assert_eq!((same, as_well), (tokens, who), "{behave}");
        // Panics have the same place, by another way.
        let words = words.replace("allocator/src/../../", "");
        assert_eq!(words, said, "{behave}");
    }
    // Two such images in one process, beside others.
    let _lock = engine_lock();
    let host = Host::new();
    for number in ["MARK-0000031", "MARK-0000032"] {
        let (_dir, library) = build("allocator", "MARK-0000000", number);
        host.swap(hostile(&library, "mark"));
        assert_eq!(host.name(), number);
        host.assert_serves("hostile");
        host.swap(ngram());
        host.assert_serves("ngram");
    }
}

#[test]
fn t18_an_allocator_in_a_plugin_is_seen_and_survived() {
    let output = run(&[
        "plugins",
        "check",
        text(&plugin("allocator")),
        "--json",
        "--drafter-option",
        "behave=nothing",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let sheet: Value = serde_json::from_slice(&output.stdout).expect("reports");
    let reports = sheet["tests"].as_array().unwrap();
    let of = |test: &str| {
        let mut reports = reports.iter();
        reports
            .find(|report| report["test"] == test)
            .expect("a report")
    };
    assert_eq!(of("self-contained")["verdict"], "warning");
    let why = of("self-contained")["why"].as_str().unwrap();
    assert!(why.contains("#[global_allocator] of its own"), "{why}");
    // All else is as with `hostile` when it does nothing.
    for test in [
        "slots", "depths", "leaving", "joining", "resuming", "fuzz", "memory",
    ] {
        assert_eq!(of(test)["verdict"], "passed", "{}", of(test));
    }
}

#[test]
fn t20_each_image_uses_its_own_of_a_symbol_that_several_have() {
    let _lock = engine_lock();
    let host = Host::new();
    let builds = [41, 42, 43].map(marked);
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        for at in order {
            host.swap(hostile(&builds[at].1, "mark"));
            assert_eq!(host.name(), format!("MARK-{:07}", 41 + at));
            host.assert_serves("hostile");
        }
    }
}

#[test]
fn t21_no_name_is_looked_for_where_the_system_looks() {
    // Who is loaded from there ends every run.
    let decoys = tempfile::tempdir().unwrap();
    let own = tempfile::tempdir().unwrap();
    let name = "libngram.so";
    std::fs::copy(plugin("scripted"), decoys.path().join(name)).unwrap();
    let model = checkpoint("llama-f32");
    let answer = |named: &str, dir: &Path| {
        let args = ["--plugin", named, "--model", text(&model)];
        let ask = ["--prompt-tokens", "1,2,3", "--max-tokens", "4", "--json"];
        let mut command = command(&[&args[..], &ask].concat());
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let mut paths = vec![decoys.path().to_owned()];
        paths.extend(std::env::split_paths(&path));
        command
            .current_dir(dir)
            .env("LD_LIBRARY_PATH", std::env::join_paths(paths).unwrap());
        command.output().unwrap()
    };
    for named in [name, "ngram", "./libngram.so"] {
        assert_refused(&answer(named, own.path()), 2, &[named]);
    }
    std::fs::copy(plugin("ngram"), own.path().join(name)).unwrap();
    for named in [name, "./libngram.so"] {
        let output = answer(named, own.path());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["drafter"], "ngram");
    }
}

#[test]
fn t23_threads_that_a_plugin_leaves_are_no_obstacle() {
    let (tokens, who, _) = program(&plugin("hostile"), "leak-thread");
    assert_eq!(who, "hostile");
    let (plain, ..) = program(&plugin("hostile"), "nothing");
    assert_eq!(tokens, plain);
    let _lock = engine_lock();
    let host = Host::new();
    for _ in 0..3 {
        host.swap(drafter("hostile", None, &[("behave", "leak-thread")]));
        host.assert_serves("hostile");
    }
}

fn load(path: &Path) -> Result<(), LoadError> {
    Library::load(&PluginFile::read(path)?).map(drop)
}

#[test]
fn t26_a_plugin_that_is_refused_leaves_nothing_that_adds_up() {
    let _lock = engine_lock();
    let host = Host::new();
    let (_dir, path) = build("ngram", "\"version\":\"0.1.0\"", "\"version\":\"0.1.8\"");
    let good = std::fs::read(&path).unwrap();
    let refuse = |bytes: &[u8], says: &str| {
        std::fs::write(&path, bytes).unwrap();
        for _ in 0..5 {
            let why = load(&path).expect_err("a refusal").to_string();
            assert!(why.contains(says), "{why}");
        }
    };
    let changed = |from: &str, to: &str| {
        let mut bytes = good.clone();
        replace(&mut bytes, from, to);
        bytes
    };
    refuse(b"no library at all", "not a library");
    // Gates that come before anything is mapped, and the system's own refusal.
    let too_new = changed(
        "\"api\":\"1.0.0\",\"min_api\":\"1.0.0\"",
        "\"api\":\"1.9.0\",\"min_api\":\"1.9.0\"",
    );
    refuse(&too_new, "needs plugin API 1.9.0");
    assert_eq!(mapped(&path), 0);
    refuse(&changed("\0libc.so.6", "\0libq.so.6"), "libq.so.6");
    assert_eq!(mapped(&path), 0);
    // One that has to be mapped to be looked at is so once, however often it is tried.
    let altered = plugin("altered");
    let pieces = [(); 5].map(|()| {
        let why = load(&altered).expect_err("a refusal").to_string();
        assert!(why.contains("laid out differently"), "{why}");
        mapped(&altered)
    });
    assert!(pieces[0] > 0);
    assert_eq!(pieces, [pieces[0]; 5]);
    // The same path, mended.
    std::fs::write(&path, &good).unwrap();
    host.assert_serves("ngram");
    host.swap(source(&path, None, &[]).expect("a plugin"));
    host.assert_serves("ngram");
    assert!(mapped(&path) > 0);
}
