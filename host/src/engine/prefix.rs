//! Rows that go on from a kept state, and states that are kept.

use std::cell::RefCell;
use std::rc::Rc;

use plugin_api::layers::LayerCache;
use plugin_api::{Result, RowSpec, RowState, Tensor};

use super::drafting::Drafting;
use super::group::{Group, PREFILL_CHUNK};
use super::method::Method;
use super::row::Row;
use crate::model::TargetHandle;
use crate::prefix::{Entry, PrefixStore};

/// Where a request goes on: all of it or nothing.
pub(super) struct Restored {
    caches: Vec<LayerCache>,
    drafting: Drafting,
    processed: usize,
}

impl Restored {
    /// Takes target and drafter to the end of an entry's tokens.
    pub fn prepare(
        target: &Rc<TargetHandle>,
        method: &Method,
        spec: RowSpec,
        entry: &Entry,
    ) -> Result<Self> {
        let caches = target.model().restored(entry.target())?;
        let state: Vec<&Tensor> = caches.iter().flat_map(LayerCache::tensors).collect();
        Tensor::eval_all(&state)?;
        let drafting = match &method.drafter {
            Some(drafter) => Drafting::restore(drafter, target, spec, entry)?,
            None => Drafting::none(),
        };
        Ok(Self {
            caches,
            drafting,
            processed: entry.processed(),
        })
    }
}

impl Group {
    /// A group of one request, whose prompt begins with what was restored.
    pub(super) fn resumed(
        target: Rc<TargetHandle>,
        method: Rc<Method>,
        store: Rc<RefCell<PrefixStore>>,
        mut row: Row,
        restored: Restored,
    ) -> Self {
        row.begin();
        row.processed = restored.processed;
        row.stats.cached_tokens = restored.processed;
        Self {
            target,
            caches: restored.caches,
            rows: vec![row],
            drafting: restored.drafting,
            method,
            store: Some(store),
            firsts: vec![None],
        }
    }

    /// Keeps the state of rows with one piece of their prompt to go: other prompts may begin alike.
    pub(super) fn keep_before_last_chunk(&mut self) {
        for row in 0..self.rows.len() {
            if (1..=PREFILL_CHUNK).contains(&self.rows[row].unprocessed()) {
                self.keep(row);
            }
        }
    }

    /// Keeps a row's state, if states are kept. That it can't be does no harm.
    pub(super) fn keep(&mut self, row: usize) {
        let Some(store) = self.store.clone() else {
            return;
        };
        let tokens = self.rows[row].known();
        let (processed, namespace) = (self.rows[row].processed, &self.method.namespace);
        if processed == 0
            || tokens.len() != processed + 1
            || store.borrow_mut().contains(namespace, &tokens)
        {
            return;
        }
        match self.capture(row, tokens) {
            Ok(Some(entry)) => store.borrow_mut().put(&self.method.namespace, entry),
            Ok(None) => {}
            Err(error) => tracing::debug!("a state is not kept: {error}"),
        }
    }

    /// A row as an entry; none if its drafter, or what became of it, can't go on later.
    fn capture(&mut self, row: usize, tokens: Vec<i32>) -> Result<Option<Entry>> {
        let model = self.model().clone();
        let target = model.capture(&self.caches, row, self.rows[row].processed)?;
        let Some(draft) = self.drafting.capture(row, self.method.drafter.is_some()) else {
            return Ok(None);
        };
        let of = |state: &RowState| -> Vec<Tensor> {
            state.tensors().map(|(_, tensor)| tensor.clone()).collect()
        };
        let mut tensors = of(&target);
        tensors.extend(draft.iter().flat_map(of));
        Tensor::eval_all(&tensors.iter().collect::<Vec<_>>())?;
        Entry::new(tokens, target, draft).map(Some)
    }
}
