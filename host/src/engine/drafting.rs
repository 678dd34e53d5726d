//! A drafter inside a group. Whatever it does wrong ends the drafting, never the answers.

use std::rc::Rc;

use plugin_api::abi::{Donor, DraftRequest, FaultCode};
use plugin_api::{DonorKind, Result, RowSpec, RowState, Tap};

use crate::model::TargetHandle;
use crate::plugin::{Draft, Drafter, Progress, Rows};
use crate::prefix::Entry;

use super::untold::Untold;

/// The drafting of a group: going on, or given up.
pub(super) struct Drafting {
    rows: Option<Rows>,
    drafter: Option<Rc<Drafter>>,
    /// What the drafter has not been told of.
    untold: Untold,
    /// Tokens that it was told of before the last draft, beyond those of the round before.
    caught_up: usize,
}

impl Drafting {
    /// Without a drafter: plain decoding.
    pub fn none() -> Self {
        Self {
            rows: None,
            drafter: None,
            untold: Untold::default(),
            caught_up: 0,
        }
    }

    /// Opens rows for a new group.
    pub fn open(drafter: &Rc<Drafter>, target: &Rc<TargetHandle>, specs: &[RowSpec]) -> Self {
        let mut drafting = Self {
            rows: None,
            drafter: Some(drafter.clone()),
            untold: Untold::default(),
            caught_up: 0,
        };
        let rows = drafter.open(target, specs);
        drafting.rows = drafting.survive(rows);
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
            rows: Some(rows),
            drafter: Some(drafter.clone()),
            untold: Untold::default(),
            caught_up: 0,
        })
    }

    /// What the drafter needs to go on with a row later, maybe nothing but its tokens. None: it can't, or there
    /// was to be a drafter and there is none any more.
    pub fn capture(&mut self, row: usize, is_wanted: bool) -> Option<Option<RowState>> {
        self.tell();
        if self.rows.is_none() {
            return (!is_wanted).then_some(None);
        }
        let state = self.call(|rows| rows.capture(row as u32))?;
        (state.is_some() || self.taps().is_empty()).then_some(state)
    }

    /// The plugin that drafts, if one still does.
    pub fn plugin(&self) -> Option<&str> {
        self.rows.as_ref().map(|rows| rows.drafter().plugin())
    }

    /// The taps that every pass must take for the drafter.
    pub fn taps(&self) -> Vec<Tap> {
        self.rows
            .as_ref()
            .map_or_else(Vec::new, |rows| rows.drafter().taps().to_vec())
    }

    /// The keys of the target that the drafter looks at.
    pub fn donors(&self) -> Vec<DonorKind> {
        self.rows
            .as_ref()
            .map_or_else(Vec::new, |rows| rows.drafter().donors().to_vec())
    }

    /// The deepest draft that can be asked for, 0 without a drafter.
    pub fn max_depth(&self) -> u32 {
        self.rows
            .as_ref()
            .map_or(0, |rows| rows.drafter().max_depth())
    }

    /// The deepest draft that is worth a try: drafters are made for some depth.
    pub fn sensible_depth(&self) -> u32 {
        self.rows.as_ref().map_or(0, |rows| {
            let drafter = rows.drafter();
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
        self.rows = None;
        self.untold = Untold::default();
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
        self.call(|rows| rows.prefill(progress));
    }

    /// A round has kept these tokens, after a draft or (`drafted` false) without one.
    pub fn commit(&mut self, progress: &Progress<'_>, drafted: bool) {
        if self.rows.is_none() {
            return;
        }
        if !drafted && progress.tokens.iter().all(|tokens| tokens.len() == 1) {
            self.untold.push(progress);
            if self.untold.is_much() {
                self.tell();
            }
            return;
        }
        self.tell();
        self.call(|rows| rows.commit(progress));
    }

    /// Tells the drafter of the rounds that it has not heard of. How many tokens there were.
    fn tell(&mut self) -> usize {
        let pieces = self.untold.take();
        let Some(pieces) = self.survive(pieces) else {
            return 0;
        };
        let mut count = 0;
        for piece in pieces {
            count += piece.tokens.iter().map(Vec::len).sum::<usize>();
            let tokens: Vec<&[i32]> = piece.tokens.iter().map(Vec::as_slice).collect();
            let progress = Progress {
                tokens: &tokens,
                next: &piece.next,
                accepted: &vec![0; tokens.len()],
                taps: &piece.taps,
            };
            self.call(|rows| rows.commit(&progress));
        }
        count
    }

    /// Tokens that a draft would have to wait for: the drafter is to be told of them first.
    pub fn behind(&self) -> usize {
        self.untold.tokens()
    }

    /// How many tokens the last draft had to wait for.
    pub fn take_caught_up(&mut self) -> usize {
        std::mem::take(&mut self.caught_up)
    }

    /// Takes in the rows of another group's drafting; false, with nothing changed here, if the two can't be
    /// one. Where the drafter fails at it, the other goes on without drafts; so do these if it panicked.
    pub fn join(&mut self, other: &mut Self) -> bool {
        let (Some(rows), Some(more)) = (&mut self.rows, &other.rows) else {
            return self.rows.is_none() && other.rows.is_none();
        };
        let untold = match self
            .untold
            .joined(&other.untold, [rows.count(), more.count()])
        {
            Ok(untold) => untold,
            Err(error) => {
                tracing::debug!("rows stay apart: {}", error.message());
                return false;
            }
        };
        let before = rows.count();
        match other.rows.take().map(|more| rows.append(more)) {
            Some(Err(error)) => {
                // An instance that panicked, or lost count, is not as it was.
                let is_sound = error.code() != FaultCode::PANICKED && rows.count() == before;
                other.give_up(error.message());
                if !is_sound {
                    self.give_up(error.message());
                }
                false
            }
            _ => {
                self.untold = untold;
                true
            }
        }
    }

    /// Keeps the given rows.
    pub fn filter(&mut self, keep: &[u32]) {
        let untold = self.untold.filtered(keep);
        if let Some(untold) = self.survive(untold) {
            self.untold = untold;
        }
        self.call(|rows| rows.filter(keep));
    }
}
