//! What was computed once is not computed again, and nobody can tell but by the time it takes.

use std::fs;
use std::path::{Path, PathBuf};

use mlxhost::engine::{DraftWith, EngineConfig, Limits, Request};
use mlxhost::model::{KvBits, KvConfig};
use mlxhost::plugin::DrafterSource;
use mlxhost::prefix::PrefixConfig;
use plugin_api::sampling::Sampling;

use mlxhost_tests::cases::{assert_plain, stderr};
use mlxhost_tests::decoding::{
    PAIRS, Reply, ask, ask_together, config, drafter, engine, engine_with, request, sampled, start,
};
use mlxhost_tests::{checkpoint, command, engine_lock, id_list, plugin, root, run_json, text};

/// So many bytes of memory and nothing else.
fn memory(bytes: u64) -> PrefixConfig {
    PrefixConfig {
        memory_bytes: bytes,
        ..PrefixConfig::default()
    }
}

/// Files alone.
fn files(dir: &Path) -> PrefixConfig {
    PrefixConfig {
        memory_bytes: 0,
        dir: Some(dir.to_owned()),
        dir_bytes: 1 << 30,
    }
}

fn prompt(tokens: usize) -> Vec<i32> {
    (0..tokens).map(|i| (i * i * 7 + i) as i32 % 251).collect()
}

/// The request that goes on where an answer of `first` tokens ended.
fn continued(request: &Request, answer: &[i32], first: usize) -> Request {
    Request {
        prompt: [&request.prompt, &answer[..first]].concat(),
        max_tokens: request.max_tokens - first,
        ..request.clone()
    }
}

/// The files of a directory tier.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let spaces = fs::read_dir(dir)
        .expect("the directory")
        .map(|e| e.expect("an entry").path());
    let files = spaces.flat_map(|space| fs::read_dir(space).expect("a namespace"));
    files.map(|e| e.expect("an entry").path()).collect()
}

/// Keys and values as they are.
fn exact() -> KvConfig {
    KvConfig::default()
}

/// An answer in two parts, the second from what is kept of the first, against one that never stopped.
/// The first part has `least` tokens or a few more.
fn goes_on(
    model: &Path,
    source: Option<&DrafterSource>,
    request: &Request,
    least: usize,
    kv: &KvConfig,
) {
    let engine = |prefix: PrefixConfig| {
        start(EngineConfig {
            prefix,
            kv: kv.clone(),
            ..config(model, source.cloned())
        })
    };
    let whole = ask(&engine(PrefixConfig::default()), request);
    // The second part draws its first token without a draft: its rounds begin where a round of the whole did.
    let mut tokens = 0;
    let ends = whole.stats.rounds.iter().map(|round| {
        tokens += round.accepted + 1;
        tokens
    });
    let first = ends
        .into_iter()
        .find(|end| *end >= least)
        .expect("a long answer");
    let dir = tempfile::tempdir().expect("a temporary directory");
    for prefix in [memory(1 << 30), files(dir.path())] {
        let keeps_files = prefix.dir.is_some();
        let mut running = engine(prefix.clone());
        let begin = Request {
            max_tokens: first,
            ..request.clone()
        };
        let begun = ask(&running, &begin);
        assert_eq!(begun.tokens, whole.tokens[..first]);
        if keeps_files {
            // Another process, so to speak.
            drop(running);
            running = engine(prefix);
        }
        let more = continued(request, &whole.tokens, first);
        let rest = ask(&running, &more);
        assert_eq!(
            rest.stats.cached_tokens,
            more.prompt.len() - 1,
            "{keeps_files}"
        );
        assert_eq!(rest.tokens, whole.tokens[first..], "{keeps_files}");
        assert_eq!(rest.stats.drafter, whole.stats.drafter);
        let rounds = &whole.stats.rounds;
        assert_eq!(
            rest.stats.rounds,
            rounds[rounds.len() - rest.stats.rounds.len()..]
        );
    }
}

#[test]
fn an_answer_goes_on_from_what_is_kept_as_if_it_had_never_stopped() {
    let _lock = engine_lock();
    let hot = Sampling {
        temperature: 3.0,
        ..sampled(3)
    };
    for (sampling, tokens) in [(Sampling::default(), 40), (hot, 21)] {
        for case in PAIRS {
            println!("{case:?}");
            let (model, source) = case.open();
            let request = Request {
                sampling,
                ..request(&prompt(tokens), 30)
            };
            goes_on(&model, Some(&source), &request, 11, &exact());
        }
        for model in [
            "llama-f32",
            "qwen3_5-f32",
            "gemma4-f32",
            "qwen3_5-moe-1layer-f32",
        ] {
            let request = Request {
                sampling,
                ..request(&prompt(tokens), 20)
            };
            goes_on(&checkpoint(model), None, &request, 9, &exact());
        }
    }
}

#[test]
fn windows_that_have_turned_over_go_on_too() {
    let _lock = engine_lock();
    for case in PAIRS
        .iter()
        .filter(|case| case.target.starts_with("gemma4"))
    {
        let (model, source) = case.open();
        // Sliding layers have room for 512 columns.
        for (tokens, first) in [(500, 24), (1100, 9)] {
            goes_on(
                &model,
                Some(&source),
                &request(&prompt(tokens), first + 12),
                first,
                &exact(),
            );
        }
    }
}

#[test]
fn an_answer_goes_on_where_keys_are_quantized() {
    let _lock = engine_lock();
    let kv = |bits, start| KvConfig {
        bits: Some(bits),
        start,
        ..exact()
    };
    // Quantized from the first token, from within the prompt, from within the second part, and not yet.
    for (pair, starts) in [
        (1, &[0, 55][..]),
        (3, &[0, 7, 55, 2000]),
        (5, &[7]),
        (6, &[0, 7, 55, 2000]),
        (9, &[55]),
    ] {
        let case = &PAIRS[pair];
        let (model, source) = case.open();
        for kv in starts.iter().map(|start| kv(KvBits::Eight, *start)) {
            println!("{case:?}, {kv:?}");
            goes_on(&model, Some(&source), &request(&prompt(40), 24), 9, &kv);
        }
    }
    // Sliding layers have room for 512 columns, and for as many of the exact ones.
    let (model, source) = PAIRS[6].open();
    for kv in [kv(KvBits::Four, 100), kv(KvBits::Eight, 1110)] {
        let request = request(&prompt(1100), 20);
        goes_on(&model, Some(&source), &request, 6, &kv);
    }
}

#[test]
fn what_was_stored_otherwise_is_not_gone_on_with() {
    let _lock = engine_lock();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let cached = |kv: &KvConfig| {
        let engine = start(EngineConfig {
            prefix: files(dir.path()),
            kv: kv.clone(),
            ..config(&checkpoint("qwen3_5-f32"), None)
        });
        let request = request(&prompt(600), 3);
        ask(&engine, &request).stats.cached_tokens
    };
    let eight = KvConfig {
        bits: Some(KvBits::Eight),
        ..exact()
    };
    let later = KvConfig {
        start: 9,
        ..eight.clone()
    };
    let settings = [exact(), eight, later];
    assert_eq!(settings.each_ref().map(&cached), [0, 0, 0]);
    assert_eq!(settings.each_ref().map(&cached), [512, 512, 512]);
}

#[test]
fn a_prompt_that_begins_like_another_is_processed_from_where_they_part() {
    let _lock = engine_lock();
    let (model, source) = PAIRS[3].open();
    let [one, mut other] = [prompt(600), prompt(600)];
    other.truncate(560);
    other.extend([3, 1, 4, 1, 5]);
    let plain = ask(&engine(&model, None), &request(&other, 12));
    let mut hits = Vec::new();
    for drafter in [None, Some(source)] {
        let engine = engine_with(&model, drafter, Limits::default(), memory(1 << 30));
        ask(&engine, &request(&one, 5));
        let reply = ask(&engine, &request(&other, 12));
        assert_eq!(reply, plain);
        hits.push(reply.stats.cached_tokens);
        // Several at once, some of which begin with what is known.
        let requests = [&other, &one, &prompt(30)].map(|prompt| request(prompt, 12));
        let together = ask_together(&engine, &requests);
        assert_eq!(together[0], plain);
        assert_eq!(together[0].stats.cached_tokens, 512);
        assert_eq!(together[1].stats.cached_tokens, 512);
        assert_eq!(together[2].stats.cached_tokens, 0);
    }
    assert_eq!(hits, [512, 512], "with a drafter as without one");
}

#[test]
fn what_does_not_fit_into_memory_is_forgotten() {
    let _lock = engine_lock();
    let model = checkpoint("llama-f32");
    let cached = |bytes: u64| {
        let engine = engine_with(&model, None, Limits::default(), memory(bytes));
        let requests = [1, 2, 3].map(|seed| request(&prompt(40 + seed), 10));
        let answers = requests.each_ref().map(|request| ask(&engine, request));
        let again = requests.iter().zip(&answers).map(|(request, answer)| {
            let more = continued(
                &Request {
                    max_tokens: 20,
                    ..request.clone()
                },
                &answer.tokens,
                10,
            );
            ask(&engine, &more).stats.cached_tokens > 0
        });
        again.collect::<Vec<_>>()
    };
    assert_eq!(cached(1 << 30), [true; 3]);
    assert_eq!(cached(1), [false; 3]);
    assert!(cached(200 << 10).contains(&false));
}

#[test]
fn a_file_that_is_not_what_its_name_says_is_never_used() {
    let _lock = engine_lock();
    let model = checkpoint("qwen3_5-f32");
    let first = request(&prompt(33), 8);
    let whole = ask(&engine(&model, None), &request(&prompt(33), 20));
    let more = continued(&request(&prompt(33), 20), &whole.tokens, 8);
    let made = |dir: &Path| {
        drop(ask(
            &engine_with(&model, None, Limits::default(), files(dir)),
            &first,
        ));
        let [file] = entries(dir).try_into().expect("one entry");
        file
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&PathBuf));
    let edit = |file: &PathBuf, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(file).expect("an entry");
        change(&mut bytes);
        fs::write(file, bytes).expect("a changed entry");
    };
    let damages: [Damage; 8] = [
        ("a bit of a tensor", &|file| {
            edit(file, &|bytes| {
                let last = bytes.len() - 9;
                bytes[last] ^= 4;
            })
        }),
        ("a letter of the header", &|file| {
            edit(file, &|bytes| {
                let at = bytes
                    .windows(9)
                    .position(|w| w == b"\"target.s")
                    .expect("a note");
                bytes[at + 1] = b'T';
            })
        }),
        ("cut", &|file| {
            edit(file, &|bytes| bytes.truncate(bytes.len() / 2))
        }),
        ("empty", &|file| edit(file, &|bytes| bytes.clear())),
        ("longer", &|file| edit(file, &|bytes| bytes.extend([0; 64]))),
        ("a foreign file", &|file| {
            let other = checkpoint("qwen3_5-f32").join("model.safetensors");
            fs::copy(other, file).expect("a copy");
        }),
        ("a directory", &|file| {
            fs::remove_file(file).expect("removed");
            fs::create_dir(file).expect("a directory");
        }),
        ("a pipe", &|file| {
            fs::remove_file(file).expect("removed");
            let made = std::process::Command::new("mkfifo").arg(file).status();
            assert!(made.expect("mkfifo runs").success());
        }),
    ];
    for (what, damage) in damages {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = made(dir.path());
        damage(&file);
        let engine = engine_with(&model, None, Limits::default(), files(dir.path()));
        let reply = ask(&engine, &more);
        assert_eq!(reply.stats.cached_tokens, 0, "{what}");
        assert_eq!(reply.tokens, whole.tokens[8..], "{what}");
    }
    // A state of another text, and one of another drafter, under this one's name.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = made(dir.path());
    let other = tempfile::tempdir().expect("a temporary directory");
    let elsewhere = Request {
        prompt: prompt(34)[1..].to_vec(),
        ..first.clone()
    };
    drop(ask(
        &engine_with(&model, None, Limits::default(), files(other.path())),
        &elsewhere,
    ));
    fs::copy(&entries(other.path())[0], &file).expect("a copy");
    let engine = engine_with(&model, None, Limits::default(), files(dir.path()));
    assert_eq!(ask(&engine, &more).stats.cached_tokens, 0);
    drop(engine);
    let drafted = engine_with(
        &model,
        [drafter("ngram", None, &[])],
        Limits::default(),
        files(dir.path()),
    );
    assert_eq!(ask(&drafted, &more).stats.cached_tokens, 0);
    let nothing = Request {
        draft_with: DraftWith::Nothing,
        ..more.clone()
    };
    assert_eq!(
        ask(&drafted, &nothing).stats.cached_tokens,
        0,
        "still damaged"
    );
}

#[test]
fn a_directory_stays_within_its_size() {
    let _lock = engine_lock();
    let model = checkpoint("llama-f32");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = PrefixConfig {
        dir_bytes: 100 << 10,
        ..files(dir.path())
    };
    let engine = engine_with(&model, None, Limits::default(), config);
    for tokens in 20..40 {
        ask(&engine, &request(&prompt(tokens), 4));
    }
    drop(engine);
    let sizes = entries(dir.path())
        .into_iter()
        .map(|file| fs::metadata(file).expect("a file").len());
    let total: u64 = sizes.sum();
    assert!((1..=100 << 10).contains(&total), "{total}");
}

/// The program itself, which ends between the two parts.
#[test]
fn a_later_run_goes_on_from_a_directory_and_says_what_it_ignores() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (model, kept) = (checkpoint("qwen3_5-f32"), dir.path().join("kept"));
    let (plugin, head) = (plugin("qwen_mtp"), checkpoint("qwen3_5_mtp-f32"));
    let args = |prompt: &str, tokens: &str| -> Vec<String> {
        let args = [
            "--model",
            text(&model),
            "--plugin",
            text(&plugin),
            "--drafter",
            text(&head),
            "--prompt-tokens",
            prompt,
            "--max-tokens",
            tokens,
            "--ignore-eos",
            "--temperature",
            "0",
            "--prefix-dir",
            text(&kept),
        ];
        args.map(str::to_owned).to_vec()
    };
    fn refs(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }
    let first = run_json(&refs(&args(&id_list(&prompt(30)), "10")));
    assert_eq!(first["timings"]["cached_tokens"], 0);
    let answer = mlxhost_tests::ids(&first["tokens"]);
    let both = id_list(&[prompt(30), answer].concat());
    let second = run_json(&refs(&args(&both, "10")));
    assert_eq!(second["timings"]["cached_tokens"], 39);
    assert_eq!(second["drafter"], "qwen_mtp");
    for file in entries(&kept) {
        fs::write(file, "nonsense").expect("a damaged entry");
    }
    let output = command(&refs(&args(&both, "10")))
        .arg("--json")
        .output()
        .expect("it runs");
    let said = stderr(&output);
    assert!(
        output.status.success() && said.contains("ignored"),
        "{said}"
    );
    assert!(said.lines().count() <= 2, "{said}");
    assert_plain(&said);
    let third: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(third["tokens"], second["tokens"]);
    assert_eq!(third["timings"]["cached_tokens"], 0);
}

/// The bundled pair: what is accepted after a restored conversation is what would have been accepted.
#[test]
fn a_restored_conversation_is_drafted_as_well_as_one_that_never_stopped() {
    let model = root().join("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !model.exists() {
        println!("skipped: {} is not there", model.display());
        return;
    }
    let _lock = engine_lock();
    let head = root().join("models/smollm2-mtp/4bit");
    let source = drafter("qwen_mtp", Some(&head), &[]);
    let golden = mlxhost_tests::json(&root().join("models/smollm2-mtp/bf16/golden.json"));
    let prompt = mlxhost_tests::ids(&golden["prompts"][0]["prompt_ids"]);
    let whole_request = Request {
        depth: Some(3),
        ..request(&prompt, 96)
    };
    let engine = engine_with(&model, [source], Limits::default(), memory(1 << 30));
    let whole = ask(&engine, &whole_request);
    ask(
        &engine,
        &Request {
            max_tokens: 32,
            ..whole_request.clone()
        },
    );
    let more = continued(&whole_request, &whole.tokens, 32);
    let rest = ask(&engine, &more);
    assert_eq!(rest.stats.cached_tokens, more.prompt.len() - 1);
    assert_eq!(rest.tokens, whole.tokens[32..]);
    let share = |reply: &Reply| {
        let mut left = reply.tokens.len();
        let rounds = reply.stats.rounds.iter().rev().take_while(|round| {
            left = left.saturating_sub(round.accepted + 1);
            reply.tokens.len() - left < 64
        });
        let (drafts, right) = rounds.fold((0, 0), |(drafts, right), round| {
            (drafts + round.drafted.len(), right + round.accepted)
        });
        right as f64 / drafts as f64
    };
    let (restored, never_stopped) = (share(&rest), share(&whole));
    assert!(restored > 0.2, "{restored}");
    assert!(
        (restored - never_stopped).abs() < 0.02,
        "{restored}, {never_stopped}"
    );
}
