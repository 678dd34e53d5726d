//! Rows that a drafter has not heard of, with what it is to be told of their prompts.

use std::rc::Rc;

use plugin_api::{Result, RowSpec, Tensor};

use crate::model::TargetHandle;
use crate::plugin::{Drafter, Progress, Rows};

use super::untold::Piece;

/// Rows that began together.
pub(super) struct Unopened {
    specs: Vec<RowSpec>,
    prompts: Vec<Piece>,
}

impl Unopened {
    pub fn new(specs: Vec<RowSpec>) -> Self {
        Self {
            specs,
            prompts: Vec::new(),
        }
    }

    /// A part of their prompts was processed.
    pub fn push(&mut self, progress: &Progress<'_>) {
        self.prompts.push(Piece::new(progress));
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.specs.len()
    }

    /// Tokens of all prompts.
    pub fn tokens(&self) -> usize {
        self.prompts.iter().map(Piece::count).sum()
    }

    /// Bytes of taps.
    pub fn bytes(&self) -> usize {
        self.prompts.iter().map(Piece::bytes).sum()
    }

    /// Opens them, and tells the drafter of their prompts as they were processed.
    pub fn open(&self, drafter: &Rc<Drafter>, target: &Rc<TargetHandle>) -> Result<Rows> {
        let mut rows = drafter.open(target, &self.specs)?;
        for piece in &self.prompts {
            piece.told(|progress| rows.prefill(progress))?;
        }
        Ok(rows)
    }

    /// The given rows alone.
    pub fn filtered(&self, keep: &[u32]) -> Result<Self> {
        let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
        let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
        let prompts = self.prompts.iter().map(|piece| piece.filtered(keep, &rows));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        let taps: Vec<&Tensor> = prompts.iter().flat_map(|piece| &piece.taps).collect();
        Tensor::eval_all(&taps)?;
        Ok(Self {
            specs: keep.iter().map(|&row| self.specs[row as usize]).collect(),
            prompts,
        })
    }
}
