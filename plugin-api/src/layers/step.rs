//! Where the rows of a group stand in one forward pass.

use crate::error::{Error, Result};

/// One forward pass over `B` rows and `width` new columns, shared by all layers.
///
/// Row `b` has `offsets[b]` tokens cached and fills its first `lens[b]` columns; the rest is
/// padding on the right, which later passes overwrite.
pub struct Step {
    offsets: Vec<i32>,
    positions: Vec<i32>,
    lens: Vec<i32>,
    width: i32,
    speculative: bool,
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
        Ok(Self {
            offsets: offsets.to_vec(),
            positions: offsets.to_vec(),
            lens: lens.to_vec(),
            width,
            speculative,
        })
    }

    /// With other positions for the rotation than the offsets.
    pub fn with_positions(mut self, positions: Vec<i32>) -> Self {
        debug_assert_eq!(positions.len(), self.offsets.len());
        self.positions = positions;
        self
    }

    /// By what position each row's first column is rotated.
    pub fn positions(&self) -> &[i32] {
        &self.positions
    }

    /// The position after each row's last filled column, at least after its first one.
    pub fn ends(&self) -> Vec<i32> {
        let filled = self.offsets.iter().zip(&self.lens);
        filled.map(|(offset, len)| offset + (*len).max(1)).collect()
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
}
