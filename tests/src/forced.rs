//! Single requests whose accepted lengths a script forces.

use std::path::Path;

use mlxhost::engine::{Engine, Request};
use mlxhost::model::KvConfig;
use plugin_api::sampling::Sampling;

use crate::decoding::{
    Random, Reply, Script, ask, engine_storing, forced_rounds, pattern, request, sampled,
};
use crate::{engine_lock, fixture, ids, json};

/// Tokens of an answer.
pub const TOKENS: usize = 16;

/// Case A of every target's goldens.
pub fn prompt() -> Vec<i32> {
    let golden = fixture("oracle/goldens/target-llama-f32/golden.json");
    ids(&json(&golden)["cases"]["A"]["prompt"])
}

/// Every accepted length of the depth, in both orders, at random, and always the whole draft.
fn patterns(depth: usize) -> [Vec<usize>; 4] {
    [
        (0..=depth).collect(),
        (0..=depth).rev().collect(),
        pattern(&mut Random(depth as u64), depth, 9),
        vec![depth],
    ]
}

/// An engine with the scripted drafter, and its script.
pub struct Scripted {
    pub script: Script,
    pub engine: Engine,
}

impl Scripted {
    /// Its target's caches store keys and values as `kv` says.
    pub fn new(model: &Path, kv: &KvConfig) -> Self {
        let script = Script::default();
        let engine = engine_storing(model, Some(script.drafter()), kv);
        Self { script, engine }
    }

    /// The answer with these accepted lengths, `answer` being the plain one.
    pub fn ask(&mut self, request: &Request, answer: &[i32], accept: &[usize]) -> Reply {
        self.script.clear();
        self.script.add(request, answer, accept);
        let reply = ask(&self.engine, request);
        // A drafter that was told something wrong would have been given up.
        assert_eq!(reply.stats.drafter.as_deref(), Some("scripted"));
        reply
    }
}

/// Greedy and sampled answers to a prompt under every forced acceptance are those of plain decoding.
pub fn drafts_change_nothing(model: &Path, prompt: &[i32], depths: &[usize], kv: &KvConfig) {
    let _lock = engine_lock();
    // These models are sure of themselves: a high temperature makes them try other tokens.
    let hot = Sampling {
        temperature: 3.0,
        ..sampled(2)
    };
    let samplings = [Sampling::default(), sampled(1), hot];
    let requests = samplings.map(|sampling| Request {
        sampling,
        ..request(prompt, TOKENS)
    });
    let plain = engine_storing(model, None, kv);
    let answers = requests.each_ref().map(|request| ask(&plain, request));
    drop(plain);
    assert!(answers.iter().all(|reply| reply.tokens.len() == TOKENS));
    assert_ne!(answers[0].tokens, answers[2].tokens, "nothing was sampled");

    let mut scripted = Scripted::new(model, kv);
    for (request, plain) in requests.iter().zip(&answers) {
        for &depth in depths {
            for accept in patterns(depth) {
                let request = Request {
                    depth: Some(depth as u32),
                    ..request.clone()
                };
                let reply = scripted.ask(&request, &plain.tokens, &accept);
                let case = format!("{:?}, depth {depth}, {accept:?}", request.sampling);
                assert_eq!(reply, *plain, "{case}");
                assert_eq!(
                    reply.rounds(),
                    forced_rounds(TOKENS, depth, &accept),
                    "{case}"
                );
            }
        }
    }
}
