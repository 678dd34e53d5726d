//! How a cache stores keys and values.

use crate::abi::DType;

/// Quantized keys and values: affine, per token and head, in groups along the head dimension.
///
/// Whether a position is quantized depends on the position alone, and it is quantized when it is written:
/// so what a query sees does not depend on the widths of passes, on drafts or on other rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedKv {
    /// Bits of an element: 4 or 8.
    pub bits: i32,
    /// Elements that share a scale and a bias: 32, 64 or 128, a divisor of the head dimension.
    pub group: i32,
    /// Positions below stay as they are, for good.
    pub start: i32,
}

impl QuantizedKv {
    /// Words of 32 bits of a row of `dim` elements: codes, then a scale and a bias per group.
    pub fn words(self, dim: i32) -> i32 {
        dim * self.bits / 32 + dim / self.group
    }
}

/// Bytes of a key or value of `dim` elements as it is stored, and exact.
pub(super) fn row_bytes(kv: Option<QuantizedKv>, dim: i32, dtype: DType) -> (u64, u64) {
    let exact = dim as u64 * dtype.size().unwrap_or(4) as u64;
    (kv.map_or(exact, |kv| 4 * kv.words(dim) as u64), exact)
}
