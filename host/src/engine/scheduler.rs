//! Which requests are served when: admission, prompts in pieces between rounds, joins and leaves.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::depth::Costs;
use super::group::{Group, chunks};
use super::row::Row;
use super::thread::{Limits, Submission};
use crate::model::TargetHandle;
use crate::plugin::Drafter;
use crate::text::Tokenizer;

/// Serves requests as they come, on the engine thread.
///
/// Time goes round: a piece of one group's prompts, then a round of every group that decodes. So a row
/// never waits for more than one piece of somebody's prompt, and a request that comes late joins the
/// others between two rounds. It gives what it would give alone.
pub(super) struct Scheduler {
    target: Rc<TargetHandle>,
    drafter: Option<Rc<Drafter>>,
    tokenizer: Option<Arc<Tokenizer>>,
    costs: Rc<RefCell<Costs>>,
    limits: Limits,
    /// Not begun, in the order in which they came.
    waiting: VecDeque<Row>,
    /// Whose prompts are being processed, by whose turn it is.
    prompts: VecDeque<Group>,
    /// Whose answers are being decoded.
    answers: Vec<Group>,
}

impl Scheduler {
    /// One without anything to do.
    pub fn new(
        target: Rc<TargetHandle>,
        drafter: Option<Rc<Drafter>>,
        tokenizer: Option<Arc<Tokenizer>>,
        costs: Costs,
        limits: Limits,
    ) -> Self {
        Self {
            target,
            drafter,
            tokenizer,
            costs: Rc::new(RefCell::new(costs)),
            limits,
            waiting: VecDeque::new(),
            prompts: VecDeque::new(),
            answers: Vec::new(),
        }
    }

    /// Serves until nobody can ask any more and nothing is left to do.
    pub fn run(mut self, inbox: &Receiver<Vec<Submission>>) {
        loop {
            if self.is_idle() {
                if self.drafter.is_some() {
                    self.costs.borrow().save();
                }
                match inbox.recv() {
                    Ok(submissions) => self.enqueue(submissions),
                    Err(_) => return,
                }
            }
            while let Ok(submissions) = inbox.try_recv() {
                self.enqueue(submissions);
            }
            self.drop_ended();
            self.admit();
            self.process_prompts();
            self.decode();
        }
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prompts.is_empty() && self.answers.is_empty()
    }

    fn enqueue(&mut self, submissions: Vec<Submission>) {
        let tokenizer = &self.tokenizer;
        self.waiting.extend(
            submissions.into_iter().map(|(request, events, cancel)| {
                Row::new(request, tokenizer.clone(), events, cancel)
            }),
        );
    }

    /// Requests that end before they begin.
    fn drop_ended(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(row) = self.waiting.pop_front() else {
                return;
            };
            match row.ended() {
                Some(finish) => row.finish(finish, None),
                None => self.waiting.push_back(row),
            }
        }
    }

    /// Begins with as many of the waiting requests as there is room for, in their order. Those whose prompts
    /// take the same number of passes go together.
    fn admit(&mut self) {
        let mut admitted: Vec<Row> = Vec::new();
        let all = self.prompts.iter().chain(&self.answers);
        let mut count: usize = all.clone().map(|group| group.rows.len()).sum();
        let mut bytes: u64 = all.flat_map(|g| &g.rows).map(|row| self.bytes(row)).sum();
        while let Some(row) = self.waiting.front() {
            let more = self.bytes(row);
            let fits =
                count < self.limits.rows && bytes.saturating_add(more) <= self.limits.cache_bytes;
            // A request that never fits is served alone.
            if !fits && count > 0 {
                break;
            }
            count += 1;
            bytes = bytes.saturating_add(more);
            admitted.extend(self.waiting.pop_front());
        }
        while let Some(first) = admitted.first() {
            let passes = chunks(first);
            let (together, later) = admitted.into_iter().partition(|row| chunks(row) == passes);
            admitted = later;
            self.prompts.push_back(Group::new(
                self.target.clone(),
                self.drafter.as_ref(),
                self.costs.clone(),
                together,
            ));
        }
    }

    /// What a row's caches take at its longest.
    fn bytes(&self, row: &Row) -> u64 {
        let request = &row.request;
        let tokens = request.prompt.len().saturating_add(request.max_tokens);
        self.target.model().cache_bytes(tokens)
    }

    /// One pass over the prompts of the group whose turn it is.
    fn process_prompts(&mut self) {
        let Some(mut group) = self.prompts.pop_front() else {
            return;
        };
        match group.step() {
            Ok(()) if group.rows.is_empty() => {}
            Ok(()) if group.has_prompts() => self.prompts.push_back(group),
            Ok(()) => self.settle(group),
            Err(error) => group.fail(error.message()),
        }
    }

    /// Lets a group decode with the others, or beside them where they can't be one.
    fn settle(&mut self, group: Group) {
        let mut left = Some(group);
        for other in &mut self.answers {
            if let Some(group) = left.take() {
                left = other.join(group);
            }
        }
        self.answers.extend(left);
    }

    /// One round of every group that decodes.
    fn decode(&mut self) {
        let groups = std::mem::take(&mut self.answers);
        for mut group in groups {
            match group.step() {
                Ok(()) if group.rows.is_empty() => {}
                Ok(()) => self.answers.push(group),
                Err(error) => group.fail(error.message()),
            }
        }
    }
}
