//! What rows are drafted with and on: a target, a drafter, and the text of each row.

use std::rc::Rc;

use plugin_api::sampling::Sampling;
use plugin_api::{RowSpec, RowState, Tap, Tensor};

use crate::backend;
use crate::model::TargetHandle;
use crate::plugin::Drafter;

/// Numbers that are the same in every run (splitmix64).
pub struct Random(pub u64);

impl Random {
    /// A number below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// A target, and a drafter that was paired with it.
pub(super) struct Stage {
    pub target: Rc<TargetHandle>,
    pub drafter: Rc<Drafter>,
    /// The hiddens that the drafter is given: those it asked for, unless an experiment says otherwise.
    pub taps: Vec<Tap>,
    /// Declared last: what is dropped before may be under way.
    pub _finish: backend::Finish,
}

/// One row: its text, and all that its drafter was told and said.
#[derive(Clone)]
pub(super) struct Row {
    /// How it is sampled.
    pub spec: RowSpec,
    /// The prompt, the first pending token included.
    pub prompt: Vec<i32>,
    /// Tokens that the text comes back to again and again, so that drafters that look for that find it.
    phrase: Vec<i32>,
    /// What the target has processed.
    pub tokens: Vec<i32>,
    /// The token that follows them.
    pub pending: i32,
    pub events: Vec<Event>,
}

/// A call, as it concerned one row.
#[derive(Clone)]
pub(super) enum Event {
    Told {
        is_prompt: bool,
        tokens: Vec<i32>,
        next: i32,
        accepted: u32,
        /// `[1, tokens, hidden]` each.
        taps: Vec<Tensor>,
    },
    Drafted {
        depth: u32,
        ids: Vec<i32>,
    },
}

impl Row {
    /// A greedy row with a prompt of `len` tokens (and the pending one) that follows from a seed.
    pub fn new(seed: u64, len: usize, vocab: i32) -> Self {
        let mut random = Random(seed);
        let vocab = vocab.max(2) as usize;
        let phrase: Vec<i32> = (0..3 + random.below(5))
            .map(|_| random.below(vocab) as i32)
            .collect();
        let mut row = Self {
            spec: RowSpec {
                sampling: Sampling::default(),
            },
            prompt: Vec::new(),
            phrase,
            tokens: Vec::new(),
            pending: 0,
            events: Vec::new(),
        };
        row.prompt = (0..=len.max(1)).map(|at| row.text(at, vocab)).collect();
        row.pending = row.prompt[0];
        row
    }

    /// A greedy row with that prompt, of two tokens or more.
    pub fn prompted(prompt: &[i32], vocab: i32) -> Self {
        let mut row = Self::new(0, 1, vocab);
        if prompt.len() > 1 {
            row.prompt = prompt.to_vec();
            row.pending = prompt[0];
        }
        row
    }

    /// With other sampling.
    pub fn sampled(mut self, sampling: Sampling) -> Self {
        self.spec.sampling = sampling;
        self
    }

    /// What stands at a place of its text: mostly the phrase, now and then something else.
    pub fn text(&self, at: usize, vocab: usize) -> i32 {
        let chance = Random(self.phrase[0] as u64 ^ ((at as u64) << 20)).below(vocab * 6);
        match chance % 6 {
            0 => (chance / 6) as i32,
            _ => self.phrase[at % self.phrase.len()],
        }
    }

    /// Tokens of the prompt that are to be processed yet, the pending one apart.
    pub fn unprocessed(&self) -> usize {
        (self.prompt.len() - 1).saturating_sub(self.tokens.len())
    }

    /// Some tokens more have been processed, and another one follows.
    pub fn advance(&mut self, tokens: &[i32], next: i32) {
        self.tokens.extend(tokens);
        self.pending = next;
    }
}

/// What a row needs to go on later.
#[derive(Clone)]
pub(super) struct Kept {
    pub row: Row,
    /// None: its tokens are told again.
    pub draft: Option<RowState>,
    pub target: RowState,
}

impl Stage {
    /// Tokens that the target knows.
    pub fn vocab(&self) -> i32 {
        self.target.model().facts().vocab_size
    }

    /// The deepest draft that tests ask for, unless they are about depth.
    pub fn depth(&self) -> u32 {
        self.drafter.max_depth().min(6)
    }
}
