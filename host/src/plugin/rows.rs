//! A group of rows that a plugin drafts for. Nothing that comes back is believed unchecked.

use std::rc::Rc;

use plugin_api::abi::{Advance, DType, DraftRequest, Fault, RawRows, RawTensor};
use plugin_api::{Error, Result, RowState, Tensor};

use super::drafter::Drafter;
use crate::model::TargetHandle;

/// A group of rows. Any error means that the group is of no use any more.
pub struct Rows {
    raw: RawRows,
    /// Whether they are ours to give back.
    owned: bool,
    /// How many there are.
    count: usize,
    drafter: Rc<Drafter>,
    /// The plugin holds pointers to it.
    _target: Rc<TargetHandle>,
}

impl Drop for Rows {
    fn drop(&mut self) {
        if self.owned {
            let drop = self.raw.table.drop();
            self.drafter.seen("drop", || drop(self.raw.this));
        }
    }
}

/// A checked draft: shapes and lengths are right, ids are not yet known.
pub struct Draft {
    /// `[B, W]` i32, `W` the largest of `lens`; none when no row drafted.
    pub ids: Option<Tensor>,
    /// Proposed tokens per row, at most what was asked for.
    pub lens: Vec<u32>,
}

/// What happened to the rows since the last call, as lists per row.
pub struct Progress<'a> {
    /// Processed tokens.
    pub tokens: &'a [&'a [i32]],
    /// The token that follows them.
    pub next: &'a [i32],
    /// How many of them were drafted.
    pub accepted: &'a [u32],
    /// The requested taps of the pass that processed them.
    pub taps: &'a [Tensor],
}

impl Rows {
    pub(super) fn new(
        raw: RawRows,
        count: usize,
        drafter: Rc<Drafter>,
        target: Rc<TargetHandle>,
    ) -> Self {
        Self {
            raw,
            owned: true,
            count,
            drafter,
            _target: target,
        }
    }

    /// The drafter they belong to.
    pub fn drafter(&self) -> &Rc<Drafter> {
        &self.drafter
    }

    /// A part of the prompt was processed.
    pub fn prefill(&mut self, progress: &Progress<'_>) -> Result<()> {
        let slot = self.raw.table.prefill();
        with_advance(progress, |advance| {
            self.drafter
                .seen("prefill", || slot(self.raw.this, advance))
        })
        .into_result()
        .map_err(fault)
    }

    /// Exactly these tokens are kept.
    pub fn commit(&mut self, progress: &Progress<'_>) -> Result<()> {
        let slot = self.raw.table.commit();
        with_advance(progress, |advance| {
            self.drafter.seen("commit", || slot(self.raw.this, advance))
        })
        .into_result()
        .map_err(fault)
    }

    /// Asks for drafts and checks all but the ids.
    pub fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Draft> {
        let slot = self.raw.table.draft();
        let reply = self
            .drafter
            .seen("draft", || slot(self.raw.this, request))
            .into_result()
            .map_err(fault)?;
        // SAFETY: the ABI hands the ids over, null or a live handle.
        let ids = unsafe { Tensor::from_raw(reply.ids) };
        let (depths, lens) = (request.depths.as_slice(), reply.lens.as_slice());
        if lens.len() != depths.len() {
            let problem = format!(
                "drafted for {} rows, asked for {}",
                lens.len(),
                depths.len()
            );
            return Err(Error::failed(problem));
        }
        if let Some((&len, &depth)) = lens.iter().zip(depths).find(|(len, depth)| len > depth) {
            return Err(Error::failed(format!(
                "drafted {len} tokens, asked for {depth}"
            )));
        }
        let width = lens.iter().copied().max().unwrap_or(0) as i32;
        if width == 0 {
            let lens = lens.to_vec();
            return Ok(Draft { ids: None, lens });
        }
        let ids =
            ids.ok_or_else(|| Error::failed(format!("drafted {width} tokens without ids")))?;
        let shape = ids.shape();
        if ids.dtype() != DType::I32
            || shape.len() != 2
            || shape[0] != lens.len() as i32
            || shape[1] < width
        {
            let expected = format!("[{}, {width}] I32", lens.len());
            return Err(Error::failed(format!(
                "drafted ids {ids:?}, expected {expected}"
            )));
        }
        Ok(Draft {
            ids: Some(ids.slice(1, 0, width)?),
            lens: lens.to_vec(),
        })
    }

    /// Takes in the rows of another group of the same drafter. On an error these are as before, and the
    /// others are gone.
    pub fn append(&mut self, mut other: Self) -> Result<()> {
        let expected = self.count + other.count;
        // The plugin owns them from here on, whatever comes of it.
        other.owned = false;
        let slot = self.raw.table.append();
        self.drafter
            .seen("append", || slot(self.raw.this, other.raw))
            .into_result()
            .map_err(fault)?;
        match self.counted() {
            count if count == expected => {
                self.count = expected;
                Ok(())
            }
            count => {
                let problem = format!("has {count} rows after an append to {expected}");
                Err(Error::failed(problem))
            }
        }
    }

    /// What one row needs to go on from here in another group; none: no more than its tokens.
    pub fn capture(&mut self, row: u32) -> Result<Option<RowState>> {
        let slot = self.raw.table.capture();
        let state = self.drafter.seen("capture", || slot(self.raw.this, row));
        let state = state.into_result().map_err(fault)?.into_option();
        if state
            .iter()
            .flat_map(|s| s.tensors.iter())
            .any(|named| named.tensor.is_null())
        {
            return Err(Error::failed("captured a tensor that is absent"));
        }
        // SAFETY: the ABI hands the tensors over.
        Ok(state.map(|state| unsafe { RowState::from_abi(state) }))
    }

    /// Puts a new group of one row where a captured row was. On an error it is of no use.
    pub fn restore(&mut self, state: &RowState) -> Result<()> {
        let raw = state.as_abi();
        let slot = self.raw.table.restore();
        self.drafter
            .seen("restore", || slot(self.raw.this, &raw))
            .into_result()
            .map_err(fault)
    }

    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many rows the plugin says that there are.
    pub fn counted(&self) -> usize {
        let slot = self.raw.table.row_count();
        self.drafter.seen("row_count", || slot(self.raw.this)) as usize
    }

    /// Keeps the given rows, strictly ascending.
    pub fn filter(&mut self, keep: &[u32]) -> Result<()> {
        let slot = self.raw.table.filter_rows();
        self.drafter
            .seen("filter_rows", || slot(self.raw.this, keep.into()))
            .into_result()
            .map_err(fault)?;
        let count = self.counted();
        if count == keep.len() {
            self.count = count;
            Ok(())
        } else {
            let problem = format!("has {count} rows after keeping {}", keep.len());
            Err(Error::failed(problem))
        }
    }
}

/// Lends the progress as the boundary carries it.
fn with_advance<T>(progress: &Progress<'_>, body: impl FnOnce(&Advance<'_>) -> T) -> T {
    let lens: Vec<u32> = progress.tokens.iter().map(|t| t.len() as u32).collect();
    let tokens: Vec<i32> = progress.tokens.concat();
    let taps: Vec<RawTensor> = progress.taps.iter().map(Tensor::raw).collect();
    body(&Advance {
        lens: lens.as_slice().into(),
        tokens: tokens.as_slice().into(),
        next: progress.next.into(),
        taps: taps.as_slice().into(),
        accepted: progress.accepted.into(),
    })
}

/// A fault's message on one line: it is shown to the user.
pub(super) fn fault(fault: Fault) -> Error {
    Error::new(fault.code, crate::text::one_line(&fault.message))
}
