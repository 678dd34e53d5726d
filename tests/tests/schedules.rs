//! Requests that come and go at any time give what each gives alone.
//!
//! Schedules are drawn from seeds: who comes when, how long its answer is, who is cancelled, what is accepted
//! of its drafts. `MLXHOST_SCHEDULES` says how many are tried for each target and drafter.

use std::path::Path;

use mlxhost::engine::{Engine, Event, Finish, Limits, Request, Running};
use mlxhost::plugin::DrafterSource;
use mlxhost::prefix::PrefixConfig;
use plugin_api::sampling::Sampling;

use mlxhost_tests::decoding::{
    PAIRS, Random, Reply, Script, ask, drafter, engine, engine_with, pattern, request, sampled,
};
use mlxhost_tests::{checkpoint, engine_lock, number};

/// Tokens of the longest answers.
const LONGEST: usize = 20;

/// Requests that schedules are made of.
const POOL: usize = 12;

fn schedules() -> usize {
    number("MLXHOST_SCHEDULES", 2)
}

/// Requests that differ in everything, and what each gives alone. Some are the beginning of others.
fn pool(model: &Path) -> (Vec<Request>, Vec<Reply>) {
    let engine = engine(model, None);
    let mut random = Random(11);
    let (mut requests, mut replies): (Vec<Request>, Vec<Reply>) = (Vec::new(), Vec::new());
    for seed in 0..POOL as u64 {
        let prompt: Vec<i32> = match seed {
            // Longer than one pass over a prompt takes in.
            0 => (0..260).map(|_| random.below(250) as i32).collect(),
            2..6 => {
                let before = seed as usize - 1;
                [&requests[before].prompt[..], &replies[before].tokens].concat()
            }
            _ => (0..1 + random.below(40))
                .map(|_| random.below(250) as i32)
                .collect(),
        };
        let sampling = match seed % 3 {
            0 => Sampling::default(),
            1 => sampled(seed),
            _ => Sampling {
                temperature: 3.0,
                ..sampled(seed)
            },
        };
        let request = Request {
            sampling,
            ..request(&prompt, LONGEST)
        };
        replies.push(ask(&engine, &request));
        requests.push(request);
    }
    (requests, replies)
}

/// A request under way: which of the pool it is, how long its answer may be, and what came of it.
struct Under {
    which: usize,
    limit: usize,
    running: Running,
    tokens: Vec<i32>,
    finish: Option<Finish>,
}

impl Under {
    /// Takes some of what it has to say.
    fn listen(&mut self, events: usize) {
        for _ in 0..events {
            match self.running.next_event() {
                Some(Event::Token(token)) => self.tokens.push(token.id),
                Some(Event::Done(answer)) => self.finish = Some(answer.finish),
                Some(Event::Failed(why)) => panic!("the answer broke off: {why}"),
                None => return,
            }
        }
    }
}

/// One schedule.
fn play(engine: &Engine, (requests, replies): &(Vec<Request>, Vec<Reply>), seed: usize) {
    let mut random = Random(seed as u64);
    let mut under: Vec<Under> = Vec::new();
    for _ in 0..1 + random.below(8) {
        let which = random.below(POOL);
        let limit = 1 + random.below(LONGEST);
        let depth = random.below(6) as u32;
        let request = Request {
            max_tokens: limit,
            depth: Some(depth),
            ..requests[which].clone()
        };
        let running = engine.submit(request).expect("a valid request");
        let (tokens, finish) = (Vec::new(), None);
        under.push(Under {
            which,
            limit,
            running,
            tokens,
            finish,
        });
        // The next one comes some rounds later, or at once; someone may leave meanwhile.
        if random.below(3) > 0 {
            let someone = random.below(under.len());
            under[someone].listen(1 + random.below(6));
        }
        if random.below(5) == 0 {
            let someone = random.below(under.len());
            under[someone].running.cancel();
        }
    }
    for under in &mut under {
        under.listen(usize::MAX);
        let alone = &replies[under.which].tokens;
        match under.finish.expect("every answer ends") {
            Finish::Length => assert_eq!(under.tokens, alone[..under.limit], "schedule {seed}"),
            Finish::Cancelled => {
                assert!(alone.starts_with(&under.tokens), "schedule {seed}");
            }
            other => panic!("schedule {seed} ended by {other:?}"),
        }
    }
}

fn all_schedules(model: &Path, source: &DrafterSource, pool: &(Vec<Request>, Vec<Reply>)) {
    // Once with states that are kept, so that rows come from them and go into them.
    for memory_bytes in [0, 1 << 20] {
        let prefix = PrefixConfig {
            memory_bytes,
            ..PrefixConfig::default()
        };
        let engine = engine_with(model, [source.clone()], Limits::default(), prefix);
        for seed in 0..schedules() {
            play(&engine, pool, seed);
        }
        // Whoever drafted still does.
        let last = ask(&engine, &pool.0[7]);
        assert_eq!(last, pool.1[7]);
        assert_eq!(
            last.stats.drafter.as_deref(),
            Some(&*source.library.manifest().name)
        );
    }
}

#[test]
fn whoever_comes_and_goes_with_any_drafter_gets_what_it_gets_alone() {
    let _lock = engine_lock();
    for pair in PAIRS {
        println!("{pair:?}");
        let (model, source) = pair.open();
        all_schedules(&model, &source, &pool(&model));
    }
}

#[test]
fn whoever_comes_and_goes_with_forced_drafts_gets_what_it_gets_alone() {
    let _lock = engine_lock();
    let targets = [
        "llama-f32",
        "qwen3-4bit-g32-f32",
        "qwen3_5-f32",
        "qwen3_5-moe-1layer-f32",
        "gemma4-f32",
        "gemma4-moe-1layer-f32",
    ];
    for target in targets {
        println!("{target}");
        let model = checkpoint(target);
        let pool = pool(&model);
        let mut script = Script::default();
        let mut random = Random(5);
        for (request, reply) in pool.0.iter().zip(&pool.1) {
            script.add(request, &reply.tokens, &pattern(&mut random, 5, 7));
        }
        all_schedules(&model, &script.drafter(), &pool);
    }
}

/// Wherever a drafter fails when rows come, go, are kept and go on, the target's answers are all there.
#[test]
fn whoever_comes_and_goes_is_answered_whatever_a_drafter_fails_at() {
    let _lock = engine_lock();
    let diary = tempfile::NamedTempFile::new().expect("a temporary file");
    let path = diary.path().to_str().expect("a path in UTF-8");
    let mut missing = Vec::new();
    for target in ["llama-f32", "qwen3_5-f32"] {
        let model = checkpoint(target);
        let pool = pool(&model);
        for place in [
            "open", "prefill", "draft", "commit", "append", "filter", "capture", "restore",
        ] {
            for (how, after) in [("error", "0"), ("panic", "2")] {
                let behave = format!("{how}-{place}");
                let options = [("behave", &*behave), ("after", after), ("diary", path)];
                let prefix = PrefixConfig {
                    memory_bytes: 1 << 20,
                    ..PrefixConfig::default()
                };
                let source = drafter("hostile", None, &options);
                let engine = engine_with(&model, [source], Limits::default(), prefix);
                let notes = || std::fs::read_to_string(path).expect("the diary").len();
                let before = notes();
                for seed in 0..schedules() {
                    play(&engine, &pool, seed);
                }
                // The second goes on from the first.
                for (request, reply) in pool.0.iter().zip(&pool.1).skip(1).take(2) {
                    assert_eq!(ask(&engine, request), *reply, "{target} {behave}");
                }
                if notes() == before {
                    missing.push((target, behave));
                }
            }
        }
    }
    assert!(missing.is_empty(), "never happened: {missing:?}");
}
