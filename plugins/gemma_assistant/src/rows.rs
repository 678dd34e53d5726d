//! A group of rows. All that a row keeps is the target's hidden at its last processed token.

use std::rc::Rc;

use plugin_api::sampling::Sampling;
use plugin_api::{
    Advance, DraftRequest, DraftRows, Drafts, Error, LastHidden, Result, RowSpec, RowState, Tensor,
    kept_rows,
};

use crate::model::Assistant;

/// The form of a captured row.
const SCHEMA: &str = "gemma_assistant/1";

/// The rows of a group.
pub struct AssistantRows {
    model: Rc<Assistant>,
    sampling: Vec<Sampling>,
    /// After the target's final norm.
    last: LastHidden,
    /// Tokens of each row.
    processed: Vec<u32>,
    has_drafted: bool,
}

impl AssistantRows {
    pub fn new(model: Rc<Assistant>, rows: &[RowSpec]) -> Self {
        Self {
            model,
            sampling: rows.iter().map(|row| row.sampling).collect(),
            last: LastHidden::default(),
            processed: vec![0; rows.len()],
            has_drafted: false,
        }
    }

    /// Takes the hidden of each row's last processed token.
    fn follow(&mut self, advance: &Advance<'_>) -> Result<()> {
        let lens: Vec<i32> = advance
            .rows
            .iter()
            .map(|row| row.tokens.len() as i32)
            .collect();
        if lens.iter().all(|&len| len == 0) {
            return Ok(());
        }
        let hidden = advance
            .taps
            .first()
            .ok_or_else(|| Error::failed("the target's hidden did not come with the tokens"))?;
        self.last.follow(hidden, &lens)?;
        Tensor::start_all(&self.last.tensors().collect::<Vec<_>>())?;
        for (processed, len) in self.processed.iter_mut().zip(lens) {
            *processed += len as u32;
        }
        Ok(())
    }
}

impl DraftRows for AssistantRows {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance)
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let mut hidden = self.last.get()?.clone();
        let mut keys = self.model.keys(&request.donors, !self.has_drafted)?;
        self.has_drafted = true;
        let processed: Vec<i32> = request.positions.iter().map(|p| *p as i32 - 1).collect();
        let rows = request.pending.len() as i32;
        let pending = Tensor::from_slice(request.pending, &[rows, 1])?;
        let mut ids: Vec<Tensor> = Vec::new();
        for k in 0..request.max_depth() {
            let token = ids.last().unwrap_or(&pending);
            let (out, next) = self
                .model
                .step(k as i32, token, &hidden, &processed, &mut keys)?;
            let positions: Vec<u32> = request.positions.iter().map(|p| p + k).collect();
            ids.push(self.model.draw(&out, &self.sampling, &positions)?);
            hidden = next;
        }
        let ids = match ids.as_slice() {
            [] => None,
            ids => Some(Tensor::concat(&ids.iter().collect::<Vec<_>>(), 1)?),
        };
        Ok(Drafts {
            ids,
            lens: request.depths.to_vec(),
        })
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.follow(advance)
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        let rows = kept_rows(keep, self.sampling.len())?;
        self.last = self.last.filtered(&rows)?;
        self.sampling = keep.iter().map(|&row| self.sampling[row]).collect();
        self.processed = keep.iter().map(|&row| self.processed[row]).collect();
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        self.last = self.last.joined(&other.last)?;
        self.sampling.extend(other.sampling);
        self.processed.extend(other.processed);
        Ok(())
    }

    fn row_count(&self) -> usize {
        self.sampling.len()
    }

    fn capture(&self, row: usize) -> Result<Option<RowState>> {
        let mut state = RowState::new(SCHEMA, self.processed[row]);
        self.last.capture(row, &mut state)?;
        Ok(Some(state))
    }

    fn restore(&mut self, state: &RowState) -> Result<()> {
        state.require(SCHEMA)?;
        self.last = LastHidden::restored(state)?;
        self.processed = vec![state.processed()];
        Ok(())
    }
}
