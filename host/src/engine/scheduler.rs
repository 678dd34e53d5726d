//! Which requests are served when: admission, prompts in pieces between rounds, joins and leaves.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::group::{Group, chunks};
use super::method::{Method, Methods};
use super::prefix::Restored;
use super::row::Row;
use super::thread::{Command, Limits, Submission};
use crate::model::TargetHandle;
use crate::prefix::PrefixStore;
use crate::text::Tokenizer;

/// Serves requests as they come, on the engine thread.
///
/// Time goes round: a piece of one group's prompts, then a round of every group that decodes. So a row
/// never waits for more than one piece of somebody's prompt, and a request that comes late joins the
/// others between two rounds. It gives what it would give alone.
pub(super) struct Scheduler {
    target: Rc<TargetHandle>,
    methods: Methods,
    tokenizer: Option<Arc<Tokenizer>>,
    store: Option<Rc<RefCell<PrefixStore>>>,
    limits: Limits,
    /// Not begun, in the order in which they came.
    waiting: VecDeque<Waiting>,
    /// Whose prompts are being processed, by whose turn it is.
    prompts: VecDeque<Group>,
    /// Whose answers are being decoded.
    answers: Vec<Group>,
}

/// A request, and the way that was chosen for it when it came.
type Waiting = (Row, Rc<Method>);

impl Scheduler {
    /// One without anything to do.
    pub fn new(
        target: Rc<TargetHandle>,
        methods: Methods,
        tokenizer: Option<Arc<Tokenizer>>,
        store: Option<PrefixStore>,
        limits: Limits,
    ) -> Self {
        Self {
            target,
            methods,
            tokenizer,
            store: store.map(|store| Rc::new(RefCell::new(store))),
            limits,
            waiting: VecDeque::new(),
            prompts: VecDeque::new(),
            answers: Vec::new(),
        }
    }

    /// Serves until nobody can ask any more and nothing is left to do.
    pub fn run(mut self, inbox: &Receiver<Command>) {
        loop {
            if self.is_idle() {
                self.methods.save();
                match inbox.recv() {
                    Ok(command) => self.obey(command),
                    Err(_) => return,
                }
            }
            while let Ok(command) = inbox.try_recv() {
                self.obey(command);
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

    fn obey(&mut self, command: Command) {
        match command {
            Command::Serve(submissions) => self.enqueue(submissions),
            Command::Swap(drafter, report) => {
                let begun = Instant::now();
                let before = self.methods.clone();
                let outcome = self.methods.swap(&self.target, &drafter);
                tracing::debug!("a swap took {:.1?} between two rounds", begun.elapsed());
                // Whoever asked was told that the plugin takes too long, and that nothing has changed.
                if report.send(outcome).is_err() {
                    self.methods = before;
                }
            }
            Command::Totals(report) => {
                // Whoever asked may have gone.
                let _ = report.send(self.methods.totals());
            }
        }
    }

    fn enqueue(&mut self, submissions: Vec<Submission>) {
        for (request, events, cancel) in submissions {
            let method = self.methods.choose(&request.draft_with).clone();
            let row = Row::new(request, self.tokenizer.clone(), events, cancel);
            self.waiting.push_back((row, method));
        }
    }

    /// Requests that end before they begin.
    fn drop_ended(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some((mut row, method)) = self.waiting.pop_front() else {
                return;
            };
            match row.ended() {
                Some(finish) => row.finish(finish, None),
                None => self.waiting.push_back((row, method)),
            }
        }
    }

    /// Begins with as many of the waiting requests as there is room for, in their order. Those whose prompts
    /// take the same number of passes go together.
    fn admit(&mut self) {
        let mut admitted: Vec<Waiting> = Vec::new();
        let all = self.prompts.iter().chain(&self.answers);
        let mut count: usize = all.clone().map(|group| group.rows.len()).sum();
        let mut bytes: u64 = all.flat_map(|g| &g.rows).map(|row| self.bytes(row)).sum();
        while let Some((row, _)) = self.waiting.front() {
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
        let mut fresh = Vec::new();
        for waiting in admitted {
            fresh.extend(self.resume(waiting));
        }
        while let Some((first, method)) = fresh.first() {
            let (passes, method) = (chunks(first), method.clone());
            let alike =
                |(row, other): &Waiting| chunks(row) == passes && Rc::ptr_eq(other, &method);
            let (together, later) = fresh.into_iter().partition(alike);
            fresh = later;
            let rows = together.into_iter().map(|(row, _)| row).collect();
            let (target, store) = (self.target.clone(), self.store.clone());
            let group = Group::new(target, method, store, rows);
            self.prompts.push_back(group);
        }
    }

    /// Begins with a request where a kept state ends; gives it back if there is none.
    fn resume(&mut self, (row, method): Waiting) -> Option<Waiting> {
        let Some(store) = &self.store else {
            return Some((row, method));
        };
        let found = store
            .borrow_mut()
            .find(&method.namespace, &row.request.prompt);
        let Some(entry) = found else {
            return Some((row, method));
        };
        match Restored::prepare(&self.target, &method, row.spec(), &entry) {
            Ok(restored) => {
                let (target, store) = (self.target.clone(), store.clone());
                let group = Group::resumed(target, method, store, row, restored);
                self.prompts.push_back(group);
                None
            }
            Err(error) => {
                tracing::warn!("a kept state can't be used: {}", error.message());
                store.borrow_mut().remove(&method.namespace, &entry);
                Some((row, method))
            }
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
        let method = group.method.clone();
        let mut left = Some(group);
        let answers = self.answers.iter_mut();
        for other in answers.filter(|other| Rc::ptr_eq(&other.method, &method)) {
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
