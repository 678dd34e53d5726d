//! Engines in the test's own process, and what they answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mlxhost::LoadError;
pub use mlxhost::check::Random;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::engine::{
    DraftWith, DrafterConfig, Engine, EngineConfig, Event, Finish, Limits, PLUGIN_TIMEOUT, Request,
    Round, Running, Stats,
};
use mlxhost::model::KvConfig;
use mlxhost::plugin::{DrafterSource, Library, PluginFile};
use mlxhost::prefix::PrefixConfig;
use mlxhost::text::{GgufVocab, Tokenizer};
use plugin_api::sampling::Sampling;
use serde_json::{Value, json};

use crate::plugin;

/// An engine that serves the model at `path`. Hold [`crate::engine_lock`] while it lives.
pub fn engine(path: &Path, drafter: Option<DrafterSource>) -> Engine {
    engine_storing(path, drafter, &KvConfig::default())
}

/// An engine whose target's caches store keys and values as `kv` says.
pub fn engine_storing(path: &Path, drafter: Option<DrafterSource>, kv: &KvConfig) -> Engine {
    let config = config(path, drafter);
    start(EngineConfig {
        kv: kv.clone(),
        ..config
    })
}

/// As [`engine`], within limits, and remembering.
pub fn engine_with(
    path: &Path,
    drafters: impl IntoIterator<Item = DrafterSource>,
    limits: Limits,
    prefix: PrefixConfig,
) -> Engine {
    let config = config(path, drafters);
    start(EngineConfig {
        limits,
        prefix,
        ..config
    })
}

/// The usual engine of a model.
pub fn config(path: &Path, drafters: impl IntoIterator<Item = DrafterSource>) -> EngineConfig {
    let checkpoint = Arc::new(Checkpoint::open(path).expect("the model opens"));
    let tokenizer = match checkpoint.gguf() {
        None => Tokenizer::from_dir(path),
        Some(metadata) => GgufVocab::from_metadata(path, metadata)
            .and_then(|vocabulary| Tokenizer::from_gguf(path, vocabulary)),
    };
    EngineConfig {
        checkpoint,
        tokenizer: Some(Arc::new(tokenizer.expect("the model has a tokenizer"))),
        drafters: drafters
            .into_iter()
            .map(|source| DrafterConfig {
                source,
                costs: None,
            })
            .collect(),
        kv: KvConfig::default(),
        limits: Limits::default(),
        prefix: PrefixConfig::default(),
        plugin_timeout: Some(PLUGIN_TIMEOUT),
    }
}

/// Starts an engine. Hold [`crate::engine_lock`] while it lives.
pub fn start(config: EngineConfig) -> Engine {
    Engine::start(config, |_| {}).expect("the engine starts")
}

/// A drafter of this workspace's plugin `name`.
pub fn drafter(name: &str, checkpoint: Option<&Path>, options: &[(&str, &str)]) -> DrafterSource {
    source(&plugin(name), checkpoint, options).expect("the plugin loads")
}

/// A drafter of the plugin in a file.
pub fn source(
    library: &Path,
    checkpoint: Option<&Path>,
    options: &[(&str, &str)],
) -> Result<DrafterSource, LoadError> {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Ok(DrafterSource {
        library: Library::load(&PluginFile::read(library)?)?,
        checkpoint: checkpoint.map(Path::to_owned),
        options: options.iter().map(owned).collect(),
    })
}

/// A target with a drafter for it.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub target: &'static str,
    pub plugin: &'static str,
    pub head: Option<&'static str>,
    pub option: Option<(&'static str, &'static str)>,
}

const fn paired(target: &'static str, plugin: &'static str, head: &'static str) -> Pair {
    Pair {
        target,
        plugin,
        head: Some(head),
        option: None,
    }
}

const fn confident(pair: Pair, least: &'static str) -> Pair {
    Pair {
        option: Some(("min_confidence", least)),
        ..pair
    }
}

/// A target of every kind, with every drafter that there is for it.
pub const PAIRS: [Pair; 10] = [
    Pair {
        target: "llama-f32",
        plugin: "ngram",
        head: None,
        option: None,
    },
    paired("qwen3-f32", "dflash", "dflash-qwen3-f32"),
    paired("qwen3-f32", "deepspec", "dspark-qwen3-f32"),
    paired("qwen3_5-f32", "qwen_mtp", "qwen3_5_mtp-f32"),
    paired(
        "qwen3_5-4bit-g64-f32",
        "qwen_mtp",
        "qwen3_5_mtp-4bit-g64-f32",
    ),
    paired("qwen3_5-f32", "dflash", "dflash-qwen3_5-f32"),
    paired("gemma4-f32", "gemma_assistant", "gemma4_assistant-f32"),
    paired(
        "gemma4-4bit-g32-f32",
        "gemma_assistant",
        "gemma4_assistant-ordered-f32",
    ),
    confident(paired("gemma4-f32", "dflash", "dspark-bun-gemma4-f32"), "0"),
    confident(
        paired("gemma4-31b-f32", "deepspec", "dspark-gemma4-31b-f32"),
        "0.45",
    ),
];

impl Pair {
    /// Its target, and what makes its drafter.
    pub fn open(&self) -> (PathBuf, DrafterSource) {
        let head = self.head.map(crate::checkpoint);
        let options: Vec<_> = self.option.into_iter().collect();
        let source = drafter(self.plugin, head.as_deref(), &options);
        (crate::checkpoint(self.target), source)
    }
}

/// A greedy request that only its limit ends.
pub fn request(prompt: &[i32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: Sampling::default(),
        max_tokens,
        stop_ids: Vec::new(),
        stop: Vec::new(),
        draft_with: DraftWith::Default,
        // Fixed: the depth that a host chooses depends on what else the machine does.
        depth: Some(4),
        deadline: None,
    }
}

/// Sampling with every filter in use.
pub fn sampled(seed: u64) -> Sampling {
    Sampling {
        temperature: 0.8,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.02,
        seed,
    }
}

/// An answer. Equal means that a user could not tell them apart, whatever was drafted.
#[derive(Clone, Debug)]
pub struct Reply {
    pub tokens: Vec<i32>,
    pub text: String,
    pub finish: Finish,
    /// The text that came with each token.
    pub pieces: Vec<String>,
    pub stats: Stats,
}

impl PartialEq for Reply {
    fn eq(&self, other: &Self) -> bool {
        let seen = |r: &Self| (r.tokens.clone(), r.text.clone(), r.finish);
        seen(self) == seen(other)
    }
}

impl Reply {
    /// Drafted and accepted tokens of every round.
    pub fn rounds(&self) -> Vec<(usize, usize)> {
        let counts = |round: &Round| (round.drafted.len(), round.accepted);
        self.stats.rounds.iter().map(counts).collect()
    }
}

/// Waits for the end of an answer.
pub fn collect(running: Running) -> Reply {
    let (mut tokens, mut pieces, mut drafted) = (Vec::new(), Vec::new(), 0);
    for event in running {
        match event {
            Event::Token(token) => {
                tokens.push(token.id);
                pieces.push(token.text);
                drafted += usize::from(token.drafted);
            }
            Event::Done(answer) => {
                assert_eq!(answer.stats.tokens, tokens.len());
                assert_eq!(answer.stats.accepted_tokens(), drafted);
                return Reply {
                    text: pieces.concat() + &answer.rest,
                    tokens,
                    pieces,
                    finish: answer.finish,
                    stats: answer.stats,
                };
            }
            Event::Failed(why) => panic!("the answer broke off: {why}"),
        }
    }
    panic!("the engine ended without an answer")
}

/// Serves one request.
pub fn ask(engine: &Engine, request: &Request) -> Reply {
    collect(engine.submit(request.clone()).expect("a valid request"))
}

/// The least memory in use while the first `tokens` of an answer come, for a pass in progress needs some of its own;
/// and the answer, which is cancelled then. Ask for far more: it must not end before, however far the
/// engine is ahead of whoever listens.
pub fn memory_while(engine: &Engine, request: &Request, tokens: usize) -> (i64, Stats) {
    let running = engine.submit(request.clone()).expect("a valid request");
    let (mut least, mut count) = (i64::MAX, 0);
    while let Some(event) = running.next_event() {
        match event {
            Event::Token(_) if count < tokens => {
                count += 1;
                least = least.min(plugin_api::memory_used() as i64);
            }
            Event::Token(_) => running.cancel(),
            Event::Done(answer) => {
                assert_eq!(answer.finish, Finish::Cancelled);
                return (least, answer.stats);
            }
            Event::Failed(why) => panic!("the answer broke off: {why}"),
        }
    }
    panic!("the engine ended without an answer")
}

/// Serves requests as one group.
pub fn ask_together(engine: &Engine, requests: &[Request]) -> Vec<Reply> {
    let running = engine.submit_all(requests.to_vec());
    let running = running.expect("valid requests");
    running.into_iter().map(collect).collect()
}

/// The script of the `scripted` plugin: what it drafts in the groups that begin after it was written.
pub struct Script {
    dir: tempfile::TempDir,
    rows: Vec<Value>,
}

impl Default for Script {
    /// One that drafts nothing.
    fn default() -> Self {
        let script = Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
            rows: Vec::new(),
        };
        script.write();
        script
    }
}

impl Script {
    fn path(&self) -> PathBuf {
        self.dir.path().join("script.json")
    }

    fn write(&self) {
        let script = json!({"rows": self.rows, "depth": 4});
        std::fs::write(self.path(), script.to_string()).expect("the script can be written");
    }

    /// The drafter that follows it.
    pub fn drafter(&self) -> DrafterSource {
        let path = self.path();
        let path = path.to_str().expect("a path in UTF-8");
        drafter("scripted", None, &[("script", path)])
    }

    /// Drafts nothing and checks nothing from now on.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.write();
    }

    /// For this request, whose plain answer is given, accepts so many tokens in each round.
    pub fn add(&mut self, request: &Request, answer: &[i32], accept: &[usize]) {
        self.rows.push(json!({
            "prompt": request.prompt,
            "seed": request.sampling.seed,
            "answer": answer,
            "accept": accept,
        }));
        self.write();
    }
}

/// The rounds of an answer of `tokens` tokens with these accepted lengths, if nothing ends it before.
pub fn forced_rounds(tokens: usize, depth: usize, accept: &[usize]) -> Vec<(usize, usize)> {
    // The first token comes from the prompt's pass.
    let (mut left, mut rounds) = (tokens - 1, Vec::new());
    let mut accept = accept.iter().cycle();
    while left > 0 {
        let drafted = depth.min(left - 1);
        let accepted = match drafted {
            0 => 0,
            _ => drafted.min(*accept.next().expect("a pattern")),
        };
        rounds.push((drafted, accepted));
        left -= accepted + 1;
    }
    rounds
}

/// Accepted lengths from 0 to `depth`.
pub fn pattern(random: &mut Random, depth: usize, len: usize) -> Vec<usize> {
    (0..len).map(|_| random.below(depth + 1)).collect()
}
