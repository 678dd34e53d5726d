//! What drafters keep from round to round, beside caches.

use std::rc::Rc;

use crate::abi::DType;
use crate::error::{Error, Result};
use crate::state::RowState;
use crate::tensor::Tensor;

/// What is loaded with the first rows and shared by all.
pub struct Shared<T: ?Sized>(Option<Rc<T>>);

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: ?Sized> Shared<T> {
    /// The value, made by `load` the first time.
    pub fn get_or_load(&mut self, load: impl FnOnce() -> Result<Rc<T>>) -> Result<Rc<T>> {
        match &self.0 {
            Some(value) => Ok(value.clone()),
            None => Ok(self.0.insert(load()?).clone()),
        }
    }
}

/// The hidden of each row's last processed token, `[B, 1, hidden]`.
#[derive(Default)]
pub struct LastHidden(Option<Tensor>);

impl LastHidden {
    /// The hiddens.
    ///
    /// # Errors
    /// Nothing was processed yet.
    pub fn get(&self) -> Result<&Tensor> {
        let last = self.0.as_ref();
        last.ok_or_else(|| Error::failed("drafting before the prompt"))
    }

    /// Takes each row's last filled column of `hidden` `[B, T, hidden]`, of which row `b` has `filled[b]`;
    /// a row without any keeps what it has.
    pub fn follow(&mut self, hidden: &Tensor, filled: &[i32]) -> Result<()> {
        let ends: Vec<i32> = filled.iter().map(|n| (n - 1).max(0)).collect();
        let mut last = hidden.columns(&ends, 1)?;
        if let Some(before) = self.0.as_ref().filter(|_| filled.contains(&0)) {
            let moved: Vec<i32> = filled.iter().map(|&n| i32::from(n > 0)).collect();
            let moved = Tensor::from_slice(&moved, &[filled.len() as i32, 1, 1])?;
            last = last.select(&moved.astype(DType::BOOL)?, before)?;
        }
        self.0 = Some(last);
        Ok(())
    }

    /// The given rows alone, `[n]` i32; `self` does not change.
    pub fn filtered(&self, keep: &Tensor) -> Result<Self> {
        let last = self.0.as_ref().map(|last| last.take(keep, 0));
        Ok(Self(last.transpose()?))
    }

    /// The rows of `self`, then those of `other`; neither changes.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) => Ok(Self(Some(Tensor::concat(&[a, b], 0)?))),
            (None, None) => Ok(Self(None)),
            _ => Err(Error::failed("only prefilled rows can join prefilled rows")),
        }
    }

    /// Puts one row into a state, as `last`.
    pub fn capture(&self, row: usize, state: &mut RowState) -> Result<()> {
        state.put("last", copied_row(self.get()?, row)?);
        Ok(())
    }

    /// The one row of a state.
    pub fn restored(state: &RowState) -> Result<Self> {
        Ok(Self(Some(state.get("last")?.clone())))
    }

    /// What must be computed for it to be up to date.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.0.iter()
    }
}

/// One row of a tensor, `[1, ..]`, copied: what is only a view would keep all rows alive.
pub(crate) fn copied_row(tensor: &Tensor, row: usize) -> Result<Tensor> {
    tensor.take(&Tensor::from_slice(&[row as i32], &[1])?, 0)
}

/// The rows of a group that are to be kept, strictly ascending, as indices for caches and tensors.
///
/// # Errors
/// One of them is not there.
pub fn kept_rows(keep: &[usize], count: usize) -> Result<Tensor> {
    if keep.iter().any(|&row| row >= count) {
        return Err(Error::failed("a row that does not exist cannot be kept"));
    }
    let rows: Vec<i32> = keep.iter().map(|&row| row as i32).collect();
    Tensor::from_slice(&rows, &[rows.len() as i32])
}
