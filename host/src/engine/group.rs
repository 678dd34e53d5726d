//! A group of requests that decode together, row for row as each would alone.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;

use plugin_api::layers::{LayerCache, Step};
use plugin_api::sampling::{self, Sampling};
use plugin_api::{Result, Tensor};

use crate::model::{Model, TargetHandle};
use crate::plugin::Progress;
use crate::prefix::PrefixStore;
use crate::text::Tokenizer;

use super::drafting::Drafting;
use super::method::Method;
use super::request::{Event, Finish, Request};
use super::row::Row;

/// Prompt tokens per row and pass: bounds the memory of a long prompt.
pub(super) const PREFILL_CHUNK: usize = 256;

/// Requests that share their forward passes. Lives on the engine thread.
pub struct Group {
    pub(super) target: Rc<TargetHandle>,
    pub(super) caches: Vec<LayerCache>,
    pub(super) rows: Vec<Row>,
    pub(super) drafting: Drafting,
    pub(super) method: Rc<Method>,
    /// Where the states of rows are kept, if they are.
    pub(super) store: Option<Rc<RefCell<PrefixStore>>>,
    /// The first tokens of answers whose prompts are processed while others are not.
    pub(super) firsts: Vec<Option<i32>>,
}

/// Passes that a row's prompt takes.
pub(super) fn chunks(row: &Row) -> usize {
    row.unprocessed().div_ceil(PREFILL_CHUNK)
}

impl Group {
    /// A group of requests that begin together, from the beginning.
    pub(super) fn new(
        target: Rc<TargetHandle>,
        method: Rc<Method>,
        store: Option<Rc<RefCell<PrefixStore>>>,
        mut rows: Vec<Row>,
    ) -> Self {
        let specs: Vec<_> = rows.iter().map(Row::spec).collect();
        rows.iter_mut().for_each(Row::begin);
        let mut caches = target.model().new_caches();
        let most = rows.iter().map(Row::expected).max().unwrap_or(0);
        caches.iter_mut().for_each(|cache| cache.expect(most));
        Self {
            caches,
            drafting: match &method.drafter {
                Some(drafter) => Drafting::open(drafter, &target, &specs),
                None => Drafting::none(),
            },
            rows,
            firsts: vec![None; specs.len()],
            method,
            store,
            target,
        }
    }

    /// Serves valid requests (see [`Request::validate`]), each with the channel that hears of it and the flag
    /// that cancels it, to their end, and nobody else.
    pub fn serve(
        target: Rc<TargetHandle>,
        method: Rc<Method>,
        tokenizer: Option<&Arc<Tokenizer>>,
        requests: Vec<(Request, Sender<Event>, Arc<AtomicBool>)>,
    ) {
        let rows = requests
            .into_iter()
            .map(|(request, events, cancel)| Row::new(request, tokenizer.cloned(), events, cancel));
        let mut group = Self::new(target, method, None, rows.collect());
        while !group.rows.is_empty() {
            if let Err(error) = group.step() {
                return group.fail(error.message());
            }
        }
    }

    /// One pass over the prompts while there are any, then one round. Rows that end leave.
    pub(super) fn step(&mut self) -> Result<()> {
        if self.has_prompts() {
            return self.prefill();
        }
        self.round()?;
        self.drop_ended();
        Ok(())
    }

    /// Whether there are prompts to be processed yet.
    pub(super) fn has_prompts(&self) -> bool {
        self.rows.iter().any(|row| row.unprocessed() > 0)
    }

    /// Ends all requests without an answer.
    pub(super) fn fail(self, why: &str) {
        for row in self.rows {
            row.fail(why);
        }
    }

    /// Takes in the rows of another group that has processed its prompts; gives it back, as it was, if they
    /// can't be one. Prepared in full before anything changes here: the drafter's part comes last, and
    /// it is the drafter's to leave all as it was if it fails.
    pub(super) fn join(&mut self, mut other: Self) -> Option<Self> {
        let prepared = || -> Result<Vec<LayerCache>> {
            let pairs = self.caches.iter().zip(&other.caches);
            let caches = pairs
                .map(|(a, b)| a.joined(b))
                .collect::<Result<Vec<_>>>()?;
            let state: Vec<&Tensor> = caches.iter().flat_map(LayerCache::tensors).collect();
            Tensor::eval_all(&state)?;
            Ok(caches)
        };
        let caches = match prepared() {
            Ok(caches) => caches,
            Err(error) => {
                tracing::debug!("rows stay apart: {}", error.message());
                return Some(other);
            }
        };
        if !self.drafting.join(&mut other.drafting) {
            return Some(other);
        }
        self.caches = caches;
        self.rows.append(&mut other.rows);
        self.firsts.append(&mut other.firsts);
        None
    }

    pub(super) fn model(&self) -> &Rc<Model> {
        self.target.model()
    }

    pub(super) fn offsets(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.processed as i32).collect()
    }

    /// One pass over the prompts. After the last one, delivers every row's first token.
    fn prefill(&mut self) -> Result<()> {
        self.drop_ended();
        if self.rows.is_empty() {
            return Ok(());
        }
        let mut firsts = std::mem::take(&mut self.firsts);
        let outcome = self.prefill_chunk(&mut firsts);
        self.firsts = firsts;
        outcome?;
        if self.has_prompts() {
            self.keep_before_last_chunk();
            return Ok(());
        }
        let mut finished = Vec::new();
        for (row, first) in self.rows.iter_mut().zip(&self.firsts) {
            finished.push(first.and_then(|first| row.deliver(&[first], 0).finish));
        }
        self.drop_finished(&finished);
        Ok(())
    }

    /// Processes a piece of every prompt. Rows whose prompt ends draw their first token.
    fn prefill_chunk(&mut self, firsts: &mut [Option<i32>]) -> Result<()> {
        let chunk = |row: &Row| row.processed..row.processed + row.unprocessed().min(PREFILL_CHUNK);
        let chunks: Vec<_> = self.rows.iter().map(chunk).collect();
        let width = chunks.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let mut ids = Vec::with_capacity(chunks.len() * width);
        for (row, chunk) in self.rows.iter().zip(&chunks) {
            ids.extend(&row.request.prompt[chunk.clone()]);
            ids.extend(std::iter::repeat_n(0, width - chunk.len()));
        }
        let ids = Tensor::from_slice(&ids, &[chunks.len() as i32, width as i32])?;
        let lens: Vec<i32> = chunks.iter().map(|chunk| chunk.len() as i32).collect();
        let step = Step::new(&self.offsets(), &lens, width as i32, false)?;
        let taps = self.drafting.taps();
        let model = self.model().clone();
        let pass = model.forward(&ids, &step, &mut self.caches, &taps)?;
        let state: Vec<&Tensor> = self.caches.iter().flat_map(LayerCache::tensors).collect();
        Tensor::start_all(&state)?;

        let ends = |row: usize| {
            let chunk = &chunks[row];
            !chunk.is_empty() && chunk.end == self.rows[row].request.prompt.len()
        };
        let ending: Vec<usize> = (0..chunks.len()).filter(|&row| ends(row)).collect();
        if !ending.is_empty() {
            let last = ending
                .iter()
                .map(|&row| {
                    let (at, len) = (row as i32, lens[row]);
                    pass.hidden.slice(0, at, at + 1)?.slice(1, len - 1, len)
                })
                .collect::<Result<Vec<_>>>()?;
            let last = Tensor::concat(&last.iter().collect::<Vec<_>>(), 0)?;
            let sampling: Vec<Sampling> = ending
                .iter()
                .map(|&row| self.rows[row].request.sampling)
                .collect();
            let positions: Vec<u32> = ending.iter().map(|&row| chunks[row].end as u32).collect();
            let drawn = sampling::draw(&model.logits(&last)?, &sampling, &positions)?;
            for (&row, first) in ending.iter().zip(drawn.to_vec::<i32>()?) {
                firsts[row] = Some(first);
            }
        }
        Tensor::eval_all(&state)?;

        let tokens: Vec<&[i32]> = self
            .rows
            .iter()
            .zip(&chunks)
            .map(|(row, chunk)| &row.request.prompt[chunk.clone()])
            .collect();
        let next: Vec<i32> = self
            .rows
            .iter()
            .zip(&chunks)
            .zip(firsts.iter())
            .map(|((row, chunk), first)| {
                let following = row.request.prompt.get(chunk.end).copied();
                following.or(*first).unwrap_or(0)
            })
            .collect();
        self.drafting.prefill(&Progress {
            tokens: &tokens,
            next: &next,
            accepted: &vec![0; tokens.len()],
            taps: &pass.taps,
        });
        for (row, chunk) in self.rows.iter_mut().zip(&chunks) {
            row.processed += chunk.len();
        }
        Ok(())
    }

    /// Takes out the rows that end from outside.
    fn drop_ended(&mut self) {
        let finished: Vec<_> = self.rows.iter().map(Row::ended).collect();
        self.drop_finished(&finished);
    }

    /// Ends finished rows and takes them out of the group. Prepared in full before anything changes: where the
    /// caches can't be cut now, the others go on as they are, and the rows leave later.
    pub(super) fn drop_finished(&mut self, finished: &[Option<Finish>]) {
        if finished.iter().all(Option::is_none) {
            return;
        }
        for (row, finish) in finished.iter().enumerate() {
            if finish.is_some() && !self.rows[row].over {
                self.keep(row);
            }
        }
        let plugin = self.drafting.plugin();
        for (row, finish) in self.rows.iter_mut().zip(finished) {
            if let Some(finish) = finish {
                row.finish(*finish, plugin);
            }
        }
        let staying = (0..).zip(finished).filter(|(_, end)| end.is_none());
        let keep: Vec<u32> = staying.map(|(row, _)| row).collect();
        if keep.is_empty() {
            self.rows.clear();
            return;
        }
        match self.filtered(&keep) {
            Ok(caches) => self.caches = caches,
            Err(error) => {
                tracing::debug!("rows that have ended stay for now: {}", error.message());
                return;
            }
        }
        self.firsts = keep.iter().map(|&row| self.firsts[row as usize]).collect();
        let rows = std::mem::take(&mut self.rows).into_iter().zip(finished);
        self.rows = rows
            .filter_map(|(row, end)| end.is_none().then_some(row))
            .collect();
        self.drafting.filter(&keep);
    }

    /// The caches of the given rows alone.
    fn filtered(&self, keep: &[u32]) -> Result<Vec<LayerCache>> {
        let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
        let caches = self.caches.iter().map(|cache| cache.filtered(&rows));
        let caches = caches.collect::<Result<Vec<_>>>()?;
        let state: Vec<&Tensor> = caches.iter().flat_map(LayerCache::tensors).collect();
        Tensor::eval_all(&state)?;
        Ok(caches)
    }
}
