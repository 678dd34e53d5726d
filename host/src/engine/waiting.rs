//! Rows whose drafter has not been told of their prompts.

use plugin_api::{Result, Tensor};

use crate::plugin::{Progress, Rows};

use super::untold::Piece;

/// Rows that began together, and what is to be told of their prompts.
pub(super) struct Waiting {
    rows: Rows,
    prompts: Vec<Piece>,
}

impl Waiting {
    pub fn new(rows: Rows) -> Self {
        Self {
            rows,
            prompts: Vec::new(),
        }
    }

    /// A part of their prompts was processed.
    pub fn push(&mut self, progress: &Progress<'_>) {
        self.prompts.push(Piece::new(progress));
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.rows.count()
    }

    /// Tokens of all prompts.
    pub fn tokens(&self) -> usize {
        self.prompts.iter().map(Piece::count).sum()
    }

    /// Bytes of taps.
    pub fn bytes(&self) -> usize {
        self.prompts.iter().map(Piece::bytes).sum()
    }

    /// Tells of the prompts, as they were processed.
    pub fn told(mut self) -> Result<Rows> {
        for piece in self.prompts {
            piece.told(|progress| self.rows.prefill(progress))?;
        }
        Ok(self.rows)
    }

    /// Keeps the given rows.
    pub fn filter(&mut self, keep: &[u32]) -> Result<()> {
        let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
        let prompts = self.prompts.iter().map(|piece| piece.filtered(keep, &rows));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        let taps: Vec<&Tensor> = prompts.iter().flat_map(|piece| &piece.taps).collect();
        Tensor::eval_all(&taps)?;
        self.prompts = prompts;
        self.rows.filter(keep)
    }
}
