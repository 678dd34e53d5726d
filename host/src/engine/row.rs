//! One request inside a group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

use plugin_api::RowSpec;

use crate::text::{TextStream, Tokenizer};

use super::depth::Acceptance;
use super::request::{Answer, Event, Failure, Finish, Request, Token};
use super::stats::Stats;

/// Tokens that an answer is expected to have if it may: there is room for them at once.
const LIKELY: usize = 256;

/// A request while it is served.
pub(super) struct Row {
    pub request: Request,
    pub stats: Stats,
    /// Tokens that the target's caches hold.
    pub processed: usize,
    /// The delivered tokens; the target has not processed the last one yet.
    pub answer: Vec<i32>,
    pub acceptance: Acceptance,
    /// It has ended, and whoever asked knows: it stays only until the caches could be cut.
    pub over: bool,
    stream: Option<TextStream>,
    events: Sender<Event>,
    cancel: Arc<AtomicBool>,
    /// When it came, and when work on it began.
    came: Instant,
    began: Option<Instant>,
    first_token: Option<Instant>,
}

/// How much of a round's tokens was delivered.
pub(super) struct Delivered {
    /// How many tokens, at least one.
    pub count: usize,
    /// Why the answer ends with them, if it does.
    pub finish: Option<Finish>,
}

impl Row {
    pub fn new(
        request: Request,
        tokenizer: Option<Arc<Tokenizer>>,
        events: Sender<Event>,
        cancel: Arc<AtomicBool>,
    ) -> Self {
        let stats = Stats {
            prompt_tokens: request.prompt.len(),
            ..Stats::default()
        };
        let stops = request.stop.clone();
        Self {
            stream: tokenizer.map(|tokenizer| TextStream::new(tokenizer, stops, true)),
            request,
            stats,
            processed: 0,
            answer: Vec::new(),
            acceptance: Acceptance::default(),
            over: false,
            events,
            cancel,
            came: Instant::now(),
            began: None,
            first_token: None,
        }
    }

    /// The last delivered token, which the target has not processed yet.
    pub fn pending(&self) -> i32 {
        self.answer.last().copied().unwrap_or(0)
    }

    /// Tokens that may still be generated.
    pub fn remaining(&self) -> usize {
        match self.over {
            true => 1,
            false => self.request.max_tokens.saturating_sub(self.stats.tokens),
        }
    }

    /// Tokens of the prompt that are to be processed yet.
    pub fn unprocessed(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.processed)
    }

    /// Tokens that it will have at least, or likely: the prompt and the beginning of a long answer.
    pub fn expected(&self) -> usize {
        self.request.prompt.len() + self.request.max_tokens.min(LIKELY)
    }

    /// What a drafter is told of it.
    pub fn spec(&self) -> RowSpec {
        RowSpec {
            sampling: self.request.sampling,
        }
    }

    /// The processed tokens, and the one after them.
    pub fn known(&self) -> Vec<i32> {
        let all = self.request.prompt.iter().chain(&self.answer);
        all.take(self.processed + 1).copied().collect()
    }

    /// Work on the request begins.
    pub fn begin(&mut self) {
        self.began = Some(Instant::now());
    }

    /// How it ends from outside, if it does: cancelled, or because its time is over.
    pub fn ended(&self) -> Option<Finish> {
        let is_late = |deadline| self.came.elapsed() > deadline;
        if self.over || self.cancel.load(Ordering::Relaxed) {
            Some(Finish::Cancelled)
        } else if self.request.deadline.is_some_and(is_late) {
            Some(Finish::Deadline)
        } else {
            None
        }
    }

    /// Delivers a round's tokens up to the end of the answer; the first `drafted` of them came from
    /// the drafter. The last delivered one becomes the pending token.
    pub fn deliver(&mut self, tokens: &[i32], drafted: usize) -> Delivered {
        if self.over {
            self.answer.extend(tokens.first());
            return Delivered {
                count: 1,
                finish: Some(Finish::Cancelled),
            };
        }
        self.first_token.get_or_insert_with(Instant::now);
        let mut finish = None;
        let mut count = 0;
        for (index, &id) in tokens.iter().enumerate() {
            let mut text = String::new();
            let ends = self.request.stop_ids.contains(&id);
            if let Some(stream) = self.stream.as_mut().filter(|_| !ends) {
                let piece = stream.push(id);
                text = piece.text;
                if piece.stopped {
                    finish = Some(Finish::Stop);
                }
            }
            count += 1;
            self.stats.tokens += 1;
            self.answer.push(id);
            // A receiver that is gone cancels the request at the next round.
            let token = Token {
                id,
                text,
                drafted: index < drafted,
            };
            if self.events.send(Event::Token(token)).is_err() {
                self.cancel.store(true, Ordering::Relaxed);
            }
            if ends {
                finish = Some(Finish::Stop);
            } else if finish.is_none() && self.remaining() == 0 {
                finish = Some(Finish::Length);
            }
            if finish.is_some() {
                break;
            }
        }
        Delivered { count, finish }
    }

    /// Ends the answer, once.
    pub fn finish(&mut self, finish: Finish, drafter: Option<&str>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let rest = self.stream.as_mut().map(TextStream::finish);
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let began = self.began.unwrap_or(now);
        self.stats.queued = began - self.came;
        self.stats.prefill = first.saturating_duration_since(began);
        self.stats.decode = now - first;
        self.stats.drafter = drafter.map(str::to_owned);
        let _ = self.events.send(Event::Done(Answer {
            finish,
            rest: rest.unwrap_or_default(),
            stats: std::mem::take(&mut self.stats),
        }));
    }

    /// Ends the request without an answer.
    pub fn fail(self, why: &str) {
        if self.over {
            return;
        }
        let _ = self
            .events
            .send(Event::Failed(Failure::Engine(why.to_owned())));
    }
}
