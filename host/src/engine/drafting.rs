//! A drafter inside a group. Whatever it does wrong ends the drafting, never the answers.

use std::rc::Rc;

use plugin_api::abi::{Donor, DraftRequest, FaultCode};
use plugin_api::{DonorKind, Result, RowSpec, RowState, Tap};

use crate::model::TargetHandle;
use crate::plugin::{Draft, Drafter, Progress, Rows};
use crate::prefix::Entry;

use super::untold::Untold;
use super::waiting::Waiting;

/// The drafting of a group: going on, or given up.
///
/// The drafter hears of prompts and of rounds without drafts when it is to draft, not before: following costs it
/// passes of its own, and while drafts do not pay they would be for nothing.
#[derive(Default)]
pub(super) struct Drafting {
    drafter: Option<Rc<Drafter>>,
    /// The rows whose prompts the drafter has heard of, if there are any.
    rows: Option<Rows>,
    /// Those after them, in order.
    waiting: Vec<Waiting>,
    /// Rounds that the drafter has not been told of.
    untold: Untold,
    /// Tokens that it was told of before the last draft, beyond those of the round before.
    caught_up: usize,
}

impl Drafting {
    /// Without a drafter: plain decoding.
    pub fn none() -> Self {
        Self::default()
    }

    /// Opens rows for a new group.
    pub fn open(drafter: &Rc<Drafter>, target: &Rc<TargetHandle>, specs: &[RowSpec]) -> Self {
        let mut drafting = Self {
            drafter: Some(drafter.clone()),
            ..Self::default()
        };
        let rows = drafter.open(target, specs);
        let rows = drafting.survive(rows);
        drafting.waiting.extend(rows.map(Waiting::new));
        drafting
    }

    /// Opens a row that goes on from an entry.
    ///
    /// # Errors
    /// The drafter can't; the entry is of no use with it.
    pub fn restore(
        drafter: &Rc<Drafter>,
        target: &Rc<TargetHandle>,
        spec: RowSpec,
        entry: &Entry,
    ) -> Result<Self> {
        let mut rows = drafter.open(target, &[spec])?;
        match entry.draft() {
            Some(state) => rows.restore(state)?,
            None => {
                // It keeps nothing but tokens.
                let (tokens, next) = entry.tokens().split_at(entry.processed());
                let progress = Progress {
                    tokens: &[tokens],
                    next,
                    accepted: &[0],
                    taps: &[],
                };
                rows.prefill(&progress)?;
            }
        }
        Ok(Self {
            drafter: Some(drafter.clone()),
            rows: Some(rows),
            ..Self::default()
        })
    }

    /// What the drafter needs to go on with a row later, maybe nothing but its tokens. None: it can't, or there
    /// was to be a drafter and there is none any more.
    pub fn capture(&mut self, row: usize, is_wanted: bool) -> Option<Option<RowState>> {
        self.tell();
        if self.drafter.is_none() {
            return (!is_wanted).then_some(None);
        }
        let state = self.call(|rows| rows.capture(row as u32))?;
        (state.is_some() || self.taps().is_empty()).then_some(state)
    }

    /// The plugin that drafts, if one still does.
    pub fn plugin(&self) -> Option<&str> {
        self.drafter.as_ref().map(|drafter| drafter.plugin())
    }

    /// The taps that every pass must take for the drafter.
    pub fn taps(&self) -> Vec<Tap> {
        self.drafter
            .as_ref()
            .map_or_else(Vec::new, |drafter| drafter.taps().to_vec())
    }

    /// The keys of the target that the drafter looks at.
    pub fn donors(&self) -> Vec<DonorKind> {
        self.drafter
            .as_ref()
            .map_or_else(Vec::new, |drafter| drafter.donors().to_vec())
    }

    /// The deepest draft that can be asked for, 0 without a drafter.
    pub fn max_depth(&self) -> u32 {
        self.drafter
            .as_ref()
            .map_or(0, |drafter| drafter.max_depth())
    }

    /// The deepest draft that is worth a try: drafters are made for some depth.
    pub fn sensible_depth(&self) -> u32 {
        self.drafter.as_ref().map_or(0, |drafter| {
            drafter
                .default_depth()
                .saturating_mul(2)
                .max(4)
                .min(drafter.max_depth())
        })
    }

    /// Gives up on the drafter, with one warning, when a call failed.
    fn survive<T>(&mut self, outcome: Result<T>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.give_up(error.message());
                None
            }
        }
    }

    /// Says what is wrong with drafts that are never right, and where to look. A drafter without taps only goes by
    /// the text, which may be to blame.
    pub fn complain(&self, problem: &str) {
        if let Some(drafter) = self.drafter.as_ref().filter(|d| !d.taps().is_empty()) {
            let plugin = drafter.plugin();
            tracing::warn!(
                "plugin {plugin}: {problem}; `mlxhost plugins check` with --drafter and --model looks for the cause"
            );
        }
    }

    /// Stops drafting and says why.
    pub fn give_up(&mut self, why: &str) {
        if let Some(drafter) = self.drafter.take() {
            let plugin = drafter.plugin();
            tracing::warn!("plugin {plugin}: {why}; going on without drafts");
        }
        *self = Self::none();
    }

    /// Runs a call on the rows, if there are any; an error ends the drafting.
    fn call<T>(&mut self, body: impl FnOnce(&mut Rows) -> Result<T>) -> Option<T> {
        let outcome = body(self.rows.as_mut()?);
        self.survive(outcome)
    }

    /// A draft; none without a drafter or when nothing was drafted.
    pub fn draft(
        &mut self,
        depths: &[u32],
        pending: &[i32],
        positions: &[u32],
        donors: &[Donor],
    ) -> Option<Draft> {
        if depths.iter().all(|&depth| depth == 0) {
            return None;
        }
        self.caught_up = self.tell();
        let request = DraftRequest {
            depths: depths.into(),
            pending: pending.into(),
            positions: positions.into(),
            donors: donors.into(),
        };
        self.call(|rows| rows.draft(&request))
            .filter(|draft| draft.ids.is_some())
    }

    /// A part of the prompts was processed.
    pub fn prefill(&mut self, progress: &Progress<'_>) {
        if let Some(waiting) = self.waiting.last_mut() {
            waiting.push(progress);
            self.tell_if_much();
        } else {
            self.call(|rows| rows.prefill(progress));
        }
    }

    /// A round has kept these tokens, after a draft or (`drafted` false) without one.
    pub fn commit(&mut self, progress: &Progress<'_>, drafted: bool) {
        if self.drafter.is_none() {
            return;
        }
        if !drafted && progress.tokens.iter().all(|tokens| tokens.len() == 1) {
            self.untold.push(progress);
            return self.tell_if_much();
        }
        self.tell();
        self.call(|rows| rows.commit(progress));
    }

    fn tell_if_much(&mut self) {
        let prompts = self.waiting.iter().map(Waiting::bytes).sum();
        if self.untold.is_much(prompts) {
            self.tell();
        }
    }

    /// Tells the drafter of all that it has not heard of. How many tokens there were.
    fn tell(&mut self) -> usize {
        let told = self.try_to_tell();
        self.survive(told).unwrap_or(0)
    }

    fn try_to_tell(&mut self) -> Result<usize> {
        let mut count = 0;
        for waiting in std::mem::take(&mut self.waiting) {
            count += waiting.tokens();
            let told = waiting.told()?;
            match &mut self.rows {
                Some(rows) => rows.append(told)?,
                None => self.rows = Some(told),
            }
        }
        for piece in self.untold.take()? {
            count += piece.count();
            if let Some(rows) = &mut self.rows {
                piece.told(|progress| rows.commit(progress))?;
            }
        }
        Ok(count)
    }

    /// Tokens that a draft would have to wait for: the drafter is to be told of them first.
    pub fn behind(&self) -> usize {
        self.untold.tokens() + self.waiting.iter().map(Waiting::tokens).sum::<usize>()
    }

    /// How many tokens the last draft had to wait for.
    pub fn take_caught_up(&mut self) -> usize {
        std::mem::take(&mut self.caught_up)
    }

    /// Takes in the rows of another group's drafting; false, with nothing changed here, if the two can't be
    /// one. Where the drafter fails at it, the other goes on without drafts; so do these if it panicked.
    pub fn join(&mut self, other: &mut Self) -> bool {
        // Where drafting is going on, what fails must fail here, before the two are one.
        if other.rows.is_some() || (self.rows.is_some() && self.behind() == 0) {
            self.tell();
            other.tell();
        }
        if self.drafter.is_none() || other.drafter.is_none() {
            return self.drafter.is_none() && other.drafter.is_none();
        }
        let untold = match self
            .untold
            .joined(&other.untold, [self.count(), other.count()])
        {
            Ok(untold) => untold,
            Err(error) => {
                tracing::debug!("rows stay apart: {}", error.message());
                return false;
            }
        };
        if let (Some(rows), Some(more)) = (&mut self.rows, other.rows.take())
            && let Err(error) = rows.append(more)
        {
            // An instance that panicked, or lost count, is not as it was.
            let is_sound = error.code() != FaultCode::PANICKED && rows.counted() == rows.count();
            other.give_up(error.message());
            if !is_sound {
                self.give_up(error.message());
            }
            return false;
        }
        self.waiting.append(&mut other.waiting);
        self.untold = untold;
        true
    }

    /// Rows whose prompts the drafter has heard of.
    fn known(&self) -> usize {
        self.rows.as_ref().map_or(0, Rows::count)
    }

    /// All rows.
    fn count(&self) -> usize {
        self.known() + self.waiting.iter().map(Waiting::count).sum::<usize>()
    }

    /// Keeps the given rows.
    pub fn filter(&mut self, keep: &[u32]) {
        if self.drafter.is_some() {
            let filtered = self.try_to_filter(keep);
            self.survive(filtered);
        }
    }

    fn try_to_filter(&mut self, keep: &[u32]) -> Result<()> {
        self.untold = self.untold.filtered(keep)?;
        let mut begin = self.known() as u32;
        let (first, mut rest) = keep.split_at(keep.partition_point(|&row| row < begin));
        match &mut self.rows {
            _ if first.is_empty() => self.rows = None,
            Some(rows) if first.len() < begin as usize => rows.filter(first)?,
            _ => {}
        }
        for mut waiting in std::mem::take(&mut self.waiting) {
            let end = begin + waiting.count() as u32;
            let (mine, others) = rest.split_at(rest.partition_point(|&row| row < end));
            let mine: Vec<u32> = mine.iter().map(|row| row - begin).collect();
            if !mine.is_empty() {
                if mine.len() < waiting.count() {
                    waiting.filter(&mine)?;
                }
                self.waiting.push(waiting);
            }
            (begin, rest) = (end, others);
        }
        Ok(())
    }
}
