//! A group of requests that decode together, row for row as each would alone.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;

use plugin_api::layers::{LayerCache, Step};
use plugin_api::sampling::{self, Sampling};
use plugin_api::{Result, RowSpec, Tensor};

use crate::model::{Model, TargetHandle};
use crate::plugin::Drafter;
use crate::text::Tokenizer;

use super::depth::Costs;
use super::drafting::{Drafting, Progress};
use super::request::{Event, Finish, Request};
use super::row::Row;

/// Prompt tokens per row and pass: bounds the memory of a long prompt.
const PREFILL_CHUNK: usize = 256;

/// Requests that share their forward passes. Lives on the engine thread.
pub struct Group {
    pub(super) target: Rc<TargetHandle>,
    pub(super) caches: Vec<LayerCache>,
    pub(super) rows: Vec<Row>,
    pub(super) drafting: Drafting,
    pub(super) costs: Rc<RefCell<Costs>>,
}

impl Group {
    /// A group of valid requests (see [`Request::validate`]), each with the channel that hears of
    /// it and the flag that cancels it.
    pub fn new(
        target: Rc<TargetHandle>,
        drafter: Option<&Rc<Drafter>>,
        tokenizer: Option<&Arc<Tokenizer>>,
        costs: Rc<RefCell<Costs>>,
        requests: Vec<(Request, Sender<Event>, Arc<AtomicBool>)>,
    ) -> Self {
        let specs: Vec<_> = requests
            .iter()
            .map(|(request, ..)| RowSpec {
                sampling: request.sampling,
            })
            .collect();
        let rows = requests
            .into_iter()
            .map(|(request, events, cancel)| Row::new(request, tokenizer.cloned(), events, cancel));
        Self {
            caches: target.model().new_caches(),
            drafting: drafter.map_or_else(Drafting::none, |drafter| {
                Drafting::open(drafter, &target, &specs)
            }),
            rows: rows.collect(),
            costs,
            target,
        }
    }

    /// Serves all requests to their end.
    pub fn run(mut self) {
        let outcome = self.prefill().and_then(|()| {
            while !self.rows.is_empty() {
                self.round()?;
                self.drop_cancelled()?;
            }
            Ok(())
        });
        if let Err(error) = outcome {
            for row in self.rows.drain(..) {
                row.fail(error.message());
            }
        }
    }

    pub(super) fn model(&self) -> &Rc<Model> {
        self.target.model()
    }

    pub(super) fn offsets(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.processed as i32).collect()
    }

    /// Processes the prompts, delivers every row's first token, and lets the drafter follow.
    fn prefill(&mut self) -> Result<()> {
        let longest = self.rows.iter().map(|row| row.request.prompt.len()).max();
        let mut firsts: Vec<Option<i32>> = vec![None; self.rows.len()];
        for start in (0..longest.unwrap_or(0)).step_by(PREFILL_CHUNK) {
            if self.rows.iter().all(Row::is_cancelled) {
                break;
            }
            self.prefill_chunk(start, &mut firsts)?;
        }
        let mut finished = Vec::new();
        for (row, first) in self.rows.iter_mut().zip(firsts) {
            finished.push(match first {
                Some(first) => row.deliver(&[first], 0).finish,
                None => Some(Finish::Cancelled),
            });
        }
        self.drop_finished(&finished)
    }

    /// Processes the prompts from column `start`. Rows whose prompt ends draw their first token.
    fn prefill_chunk(&mut self, start: usize, firsts: &mut [Option<i32>]) -> Result<()> {
        let chunk = |row: &Row| -> std::ops::Range<usize> {
            let n = row.request.prompt.len();
            start.min(n)..(start + PREFILL_CHUNK).min(n)
        };
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

    fn drop_cancelled(&mut self) -> Result<()> {
        let cancelled = |row: &Row| row.is_cancelled().then_some(Finish::Cancelled);
        let finished: Vec<_> = self.rows.iter().map(cancelled).collect();
        self.drop_finished(&finished)
    }

    /// Takes finished rows out of the group. Prepared in full before anything changes.
    pub(super) fn drop_finished(&mut self, finished: &[Option<Finish>]) -> Result<()> {
        if finished.iter().all(Option::is_none) {
            return Ok(());
        }
        let keep: Vec<u32> = (0..)
            .zip(finished)
            .filter(|(_, finish)| finish.is_none())
            .map(|(row, _)| row)
            .collect();
        if !keep.is_empty() {
            let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
            let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
            let caches = self.caches.iter().map(|cache| cache.filtered(&rows));
            self.caches = caches.collect::<Result<_>>()?;
        }
        let plugin = self.drafting.plugin().map(str::to_owned);
        let rows = std::mem::take(&mut self.rows);
        for (row, finish) in rows.into_iter().zip(finished) {
            match finish {
                None => self.rows.push(row),
                Some(finish) => row.finish(*finish, plugin.as_deref()),
            }
        }
        if !keep.is_empty() {
            self.drafting.filter(&keep);
        }
        Ok(())
    }
}
