//! Another build drafts from one request to the next, while others decode; and what fails changes nothing.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlxhost::engine::{DrafterConfig, Engine, Event, Finish, Running};
use mlxhost_tests::cases::{altered_library, replace};
use mlxhost_tests::decoding::{Random, Reply, ask, drafter, engine, request, sampled, source};
use mlxhost_tests::{checkpoint, command, engine_lock, number, plugin};
use tempfile::TempDir;

/// Swaps to builds that were never loaded before; `MLXHOST_SWAPS` says another number.
fn swaps() -> usize {
    number("MLXHOST_SWAPS", 40)
}

/// A build of `ngram` that nobody has seen yet: another text, at another digest.
fn build(number: usize) -> (TempDir, PathBuf) {
    altered_library(&plugin("ngram"), |bytes| {
        replace(
            bytes,
            "\"version\":\"0.1.0\"",
            &format!("\"version\":\"0.1.{}\"", number % 10),
        );
        bytes.extend_from_slice(number.to_string().as_bytes());
    })
}

fn config(path: &Path, options: &[(&str, &str)]) -> Result<DrafterConfig, mlxhost::LoadError> {
    Ok(DrafterConfig {
        source: source(path, None, options)?,
        costs: None,
    })
}

/// Requests that are served all the time.
struct Traffic {
    asked: Vec<(mlxhost::engine::Request, Reply)>,
    running: Vec<(usize, Running, Vec<i32>)>,
    finished: usize,
}

impl Traffic {
    fn begin(engine: &Engine) -> Self {
        let mut random = Random(17);
        let asked = (0..4).map(|seed| {
            let prompt: Vec<i32> = (0..3 + random.below(20))
                .map(|_| random.below(9) as i32)
                .collect();
            let mut request = request(&prompt, 60 + 20 * seed);
            if seed % 2 == 1 {
                request.sampling = sampled(seed as u64);
            }
            let reply = ask(engine, &request);
            (request, reply)
        });
        let mut traffic = Self {
            asked: asked.collect(),
            running: Vec::new(),
            finished: 0,
        };
        for which in 0..4 {
            traffic.submit(engine, which);
        }
        traffic
    }

    fn submit(&mut self, engine: &Engine, which: usize) {
        let running = engine
            .submit(self.asked[which].0.clone())
            .expect("a valid request");
        self.running.push((which, running, Vec::new()));
    }

    /// Takes what has been said by now; whoever is done asks again.
    fn listen(&mut self, engine: &Engine) {
        for (which, running, mut tokens) in std::mem::take(&mut self.running) {
            loop {
                match running.next_event_or(Duration::ZERO).expect("an engine") {
                    Some(Event::Token(token)) => tokens.push(token.id),
                    Some(Event::Failed(why)) => panic!("an answer broke off: {why}"),
                    Some(Event::Done(answer)) => {
                        assert_eq!(
                            (answer.finish, &tokens),
                            (Finish::Length, &self.asked[which].1.tokens)
                        );
                        self.finished += 1;
                        self.submit(engine, which);
                        break;
                    }
                    None => {
                        self.running.push((which, running, tokens));
                        break;
                    }
                }
            }
        }
    }
}

/// Bytes of a library that the system maps.
fn mapped(library: &Path) -> usize {
    use object::{Object, ObjectSegment};
    let bytes = std::fs::read(library).expect("a library");
    let file = object::File::parse(&*bytes).expect("a library");
    file.segments().map(|segment| segment.size() as usize).sum()
}

/// Bytes of memory that this process holds.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

#[test]
fn hundreds_of_builds_draft_in_turn_while_others_decode() {
    let _lock = engine_lock();
    let engine = engine(&checkpoint("llama-f32"), Some(drafter("ngram", None, &[])));
    let mut traffic = Traffic::begin(&engine);
    let mut swapped = |number: usize| {
        let (_dir, path) = build(number);
        let config = config(&path, &[]).expect("a build that loads");
        let digest = config.source.library.digest().to_owned();
        engine.swap(config).expect("a swap");
        let now = engine.drafters();
        assert_eq!((now.len(), &now[0].build), (1, &digest));
        for _ in 0..3 {
            traffic.listen(&engine);
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    (0..5).for_each(&mut swapped);
    let before = resident();
    (5..5 + swaps()).for_each(&mut swapped);
    let grown = resident().saturating_sub(before) / swaps();
    // An image stays mapped for good. Those of `make build` are smaller: 600 KB are their limit.
    let image = mapped(&plugin("ngram"));
    assert!(
        grown < image + (200 << 10),
        "{grown} bytes a swap for an image of {image}"
    );
    while traffic.finished < 4 {
        traffic.listen(&engine);
    }
    // Code that differs, too, back and forth; then the engine's thread ends, which has used all of it.
    for name in ["hostile", "ngram", "hostile", "ngram"] {
        let options: &[_] = if name == "hostile" {
            &[("behave", "nothing")]
        } else {
            &[]
        };
        engine
            .swap(config(&plugin(name), options).expect("a plugin"))
            .expect("a swap");
        assert_eq!(engine.drafters()[0].plugin, name);
        traffic.listen(&engine);
        let (request, reply) = &traffic.asked[0];
        let again = ask(&engine, request);
        assert_eq!(
            (&again, again.stats.drafter.as_deref()),
            (reply, Some(name))
        );
    }
}

#[test]
fn a_swap_that_fails_at_any_step_leaves_the_old_build_in_place() {
    let _lock = engine_lock();
    let engine = engine(&checkpoint("llama-f32"), Some(drafter("ngram", None, &[])));
    let mut traffic = Traffic::begin(&engine);
    let before = engine.drafters();
    let whole = std::fs::read(plugin("ngram")).expect("a library");
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        path
    };
    let hostile = plugin("hostile");
    let wrong: [(PathBuf, &[_], &str); 9] = [
        (file("empty.so", b""), &[], "not a library"),
        (
            file("half.so", &whole[..whole.len() / 2]),
            &[],
            "not a library",
        ),
        (dir.path().join("gone.so"), &[], "No such file"),
        (dir.path().to_owned(), &[], "not a file"),
        (plugin("altered"), &[], "laid out differently"),
        (plugin("ngram"), &[("nonsense", "1")], "nonsense"),
        (hostile.clone(), &[("behave", "error-load")], "hostile load"),
        (hostile.clone(), &[("behave", "panic-pair")], "hostile pair"),
        (hostile, &[("behave", "panic-open")], "hostile open"),
    ];
    for (path, options, says) in wrong {
        let outcome = match config(&path, options) {
            Ok(config) => engine.swap(config).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let why = outcome.expect_err("no swap");
        assert!(why.contains(says), "{}: {why}", path.display());
        assert_eq!(engine.drafters(), before);
        traffic.listen(&engine);
        let (request, reply) = &traffic.asked[1];
        assert_eq!(ask(&engine, request), *reply);
    }
}

#[test]
fn requests_in_the_queue_keep_the_drafter_that_they_came_for() {
    let _lock = engine_lock();
    let engine = engine(&checkpoint("llama-f32"), Some(drafter("ngram", None, &[])));
    let long = engine
        .submit(request(&[1, 2, 3, 1, 2, 3], 300))
        .expect("a request");
    long.next_event();
    engine
        .swap(config(&plugin("hostile"), &[("behave", "nothing")]).expect("a plugin"))
        .expect("a swap");
    let answer = long.into_iter().find_map(|event| match event {
        Event::Done(answer) => Some(answer),
        _ => None,
    });
    let stats = answer.expect("an answer").stats;
    assert_eq!(stats.drafter.as_deref(), Some("ngram"));
    let next = ask(&engine, &request(&[1, 2, 3], 5));
    assert_eq!(next.stats.drafter.as_deref(), Some("hostile"));
}

#[test]
fn a_plugin_that_is_built_anew_drafts_in_the_running_program() {
    let dir = tempfile::tempdir().expect("a directory");
    let library = plugin("ngram");
    let path = dir.path().join(library.file_name().expect("a name"));
    std::fs::copy(&library, &path).expect("a copy");
    let input = dir.path().join("requests.jsonl");
    let lines = (0..400).map(|n| {
        format!(
            "{{\"id\": \"{n}\", \"prompt_tokens\": [1, 2, {n}]}}\n",
            n = n % 200
        )
    });
    let lines: Vec<String> = lines
        .enumerate()
        .map(|(at, line)| line.replacen(&format!("\"{}\"", at % 200), &format!("\"{at}\""), 1))
        .collect();
    std::fs::write(&input, lines.concat()).expect("a file");
    let model = checkpoint("llama-f32");
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (output, log) = (dir.path().join("answers.jsonl"), dir.path().join("log"));
    let mut child = command(&["batch", "--watch", "--max-tokens", "100"])
        .args(["--model", &text(&model), "--plugin", &text(&path)])
        .args(["--input", &text(&input), "--output", &text(&output)])
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("the program");
    let told = || std::fs::read_to_string(&log).unwrap_or_default();
    // Bounded by the end of the program, which has plenty to do.
    let mut wait = |says: &str| {
        while !told().contains(says) {
            let ended = child.try_wait().expect("a child");
            assert!(ended.is_none(), "ended before {says:?}: {}", told());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let begun = Instant::now();
    while !output.exists() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (_dir, other) = build(7);
    let renamed = |bytes: &[u8]| {
        let new = dir.path().join("new");
        std::fs::write(&new, bytes).expect("a file");
        std::fs::rename(&new, &path).expect("a new file");
    };
    renamed(&std::fs::read(other).expect("a build"));
    wait("ngram 0.1.7, build");
    renamed(b"no library");
    wait("not swapped, the old build goes on");
    let ended = child.wait().expect("an end");
    assert!(ended.success(), "{}", told());
    let answers = std::fs::read_to_string(&output).expect("answers");
    assert_eq!(answers.lines().count(), 400);
}
