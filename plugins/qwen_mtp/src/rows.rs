//! A group of rows: the head's cache, and where each row stands.

use std::rc::Rc;

use plugin_api::layers::{LayerCache, Step};
use plugin_api::sampling::Sampling;
use plugin_api::{
    Advance, DraftRequest, DraftRows, Drafts, Error, LastHidden, Result, RowSpec, RowState, Tensor,
    kept_rows,
};

use crate::head::Head;
use crate::settings::Commit;

/// The form of a captured row.
const SCHEMA: &str = "qwen_mtp/1";

/// The rows of a group.
pub struct MtpRows {
    head: Rc<Head>,
    commit: Commit,
    sampling: Vec<Sampling>,
    cache: LayerCache,
    /// Rows of the cache that stand for processed tokens.
    lens: Vec<i32>,
    /// Rows after those that the last draft wrote, the same number for everyone.
    drafted: i32,
    /// The head's output there: it gives the first draft.
    last: LastHidden,
}

impl MtpRows {
    pub fn new(head: Rc<Head>, commit: Commit, rows: &[RowSpec]) -> Self {
        Self {
            cache: head.new_cache(),
            head,
            commit,
            sampling: rows.iter().map(|row| row.sampling).collect(),
            lens: vec![0; rows.len()],
            drafted: 0,
            last: LastHidden::default(),
        }
    }

    /// Appends the processed tokens of an advance, all but the first `kept` of each row, whose
    /// cached rows stay as drafted.
    fn append_true(&mut self, advance: &Advance<'_>, kept: &[i32]) -> Result<()> {
        let news: Vec<i32> = advance
            .rows
            .iter()
            .zip(kept)
            .map(|(row, kept)| row.tokens.len() as i32 - kept)
            .collect();
        let width = news.iter().copied().max().unwrap_or(0);
        if width == 0 {
            return Ok(());
        }
        // Row p of the head pairs the hidden of token p with the token after it.
        let mut tokens = Vec::new();
        for ((row, &kept), &new) in advance.rows.iter().zip(kept).zip(&news) {
            let after = row.tokens.iter().skip(1).copied().chain([row.next]);
            tokens.extend(after.skip(kept as usize).take(new as usize));
            tokens.extend((new..width).map(|_| 0));
        }
        let rows = news.len() as i32;
        let tokens = Tensor::from_slice(&tokens, &[rows, width])?;
        let hidden = advance
            .taps
            .first()
            .ok_or_else(|| Error::failed("the target's hidden did not come with the tokens"))?
            .columns(kept, width)?;
        let offsets: Vec<i32> = self.lens.iter().zip(kept).map(|(a, b)| a + b).collect();
        let step = Step::new(&offsets, &news, width, false)?;
        let out = self
            .head
            .forward(&tokens, &hidden, &step, &mut self.cache)?;
        self.last.follow(&out, &news)?;
        let state = self.cache.tensors().into_iter().chain(self.last.tensors());
        Tensor::start_all(&state.collect::<Vec<_>>())?;
        for (len, row) in self.lens.iter_mut().zip(&advance.rows) {
            *len += row.tokens.len() as i32;
        }
        self.drafted = 0;
        Ok(())
    }
}

impl DraftRows for MtpRows {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.append_true(advance, &vec![0; advance.rows.len()])
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let mut hidden = self.last.get()?.clone();
        let depth = request.max_depth() as i32;
        let ones = vec![1; self.lens.len()];
        let mut ids: Vec<Tensor> = Vec::with_capacity(depth as usize);
        for i in 0..depth {
            if let Some(previous) = ids.last() {
                let offsets: Vec<i32> = self.lens.iter().map(|len| len + i - 1).collect();
                let step = Step::new(&offsets, &ones, 1, false)?;
                hidden = self
                    .head
                    .forward(previous, &hidden, &step, &mut self.cache)?;
            }
            let positions: Vec<u32> = request.positions.iter().map(|p| p + i as u32).collect();
            ids.push(self.head.draw(&hidden, &self.sampling, &positions)?);
        }
        self.drafted = (depth - 1).max(0);
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
        let drafted = self.drafted;
        let kept: Vec<i32> = match self.commit {
            Commit::Recompute => vec![0; advance.rows.len()],
            Commit::Keep => advance
                .rows
                .iter()
                .map(|row| (row.accepted as i32).min(drafted))
                .collect(),
        };
        self.append_true(advance, &kept)
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        let rows = kept_rows(keep, self.lens.len())?;
        let cache = self.cache.filtered(&rows)?;
        self.last = self.last.filtered(&rows)?;
        self.cache = cache;
        self.lens = keep.iter().map(|&row| self.lens[row]).collect();
        self.sampling = keep.iter().map(|&row| self.sampling[row]).collect();
        Ok(())
    }

    fn append(&mut self, other: Self) -> Result<()> {
        let cache = self.cache.joined(&other.cache)?;
        let last = self.last.joined(&other.last)?;
        self.cache = cache;
        self.last = last;
        self.lens.extend(other.lens);
        self.sampling.extend(other.sampling);
        self.drafted = 0;
        Ok(())
    }

    fn row_count(&self) -> usize {
        self.lens.len()
    }

    fn capture(&self, row: usize) -> Result<Option<RowState>> {
        let mut state = RowState::new(SCHEMA, self.lens[row] as u32);
        self.cache.capture(row, "layer", &mut state)?;
        self.last.capture(row, &mut state)?;
        Ok(Some(state))
    }

    fn restore(&mut self, state: &RowState) -> Result<()> {
        state.require(SCHEMA)?;
        self.cache = self.cache.restored("layer", state)?;
        self.last = LastHidden::restored(state)?;
        self.lens = vec![state.processed() as i32];
        Ok(())
    }
}
