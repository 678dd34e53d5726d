//! Where the rows of a group stand in one forward pass.

use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// One forward pass over `B` rows and `width` new columns, shared by all layers.
///
/// Row `b` has `offsets[b]` tokens cached and fills its first `lens[b]` columns; the rest is
/// padding on the right, which later passes overwrite.
pub struct Step {
    offsets: Vec<i32>,
    lens: Vec<i32>,
    width: i32,
    speculative: bool,
    valid: Option<Tensor>,
}

impl Step {
    /// Describes a pass. With `speculative`, recurrent caches keep what they need to go back to
    /// any column; the caller must then resolve them.
    pub fn new(offsets: &[i32], lens: &[i32], width: i32, speculative: bool) -> Result<Self> {
        let fits = lens.iter().all(|&n| (0..=width).contains(&n));
        if offsets.is_empty() || offsets.len() != lens.len() || width < 1 || !fits {
            return Err(Error::failed(format!(
                "a pass of width {width} with offsets {offsets:?} and lens {lens:?}"
            )));
        }
        let valid = if lens.iter().all(|&n| n == width) {
            None
        } else {
            let columns = Tensor::arange(0, width)?.reshape(&[1, width])?;
            let lens = Tensor::from_slice(lens, &[lens.len() as i32, 1])?;
            Some(columns.less(&lens)?)
        };
        Ok(Self {
            offsets: offsets.to_vec(),
            lens: lens.to_vec(),
            width,
            speculative,
            valid,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> i32 {
        self.offsets.len() as i32
    }

    /// Number of columns.
    pub fn width(&self) -> i32 {
        self.width
    }

    /// Cached tokens per row, before this pass.
    pub fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// Filled columns per row.
    pub fn lens(&self) -> &[i32] {
        &self.lens
    }

    /// Whether recurrent caches keep what they need to go back.
    pub fn speculative(&self) -> bool {
        self.speculative
    }

    /// `[B, T]` bool, true where a column is filled; none when all are.
    pub fn valid(&self) -> Option<&Tensor> {
        self.valid.as_ref()
    }

    /// `x` `[B, T, n]` where columns are filled, `value` where they are padding.
    pub fn padded_with(&self, x: &Tensor, value: f32) -> Result<Tensor> {
        let Some(valid) = &self.valid else {
            return Ok(x.clone());
        };
        let valid = valid.reshape(&[self.rows(), self.width, 1])?;
        x.select(&valid, &Tensor::full(&[], value, x.dtype())?)
    }
}
