//! The CPU kernels: plain functions over slices, each split over the thread pool.
//!
//! A kernel's sums have one order, whatever the number of rows it is given: a row's result is the
//! same bit for bit whether it is computed alone or with others, so that verifying drafts never
//! changes a near-tie.

pub mod attend;
pub mod attention;
pub mod caches;
pub mod delta;
pub mod experts;
pub mod kv;
pub mod lanes;
pub mod matrix;
mod mix;
#[cfg(target_arch = "x86_64")]
mod mix_avx512;
pub mod pool;
pub mod project;
pub mod quantized;
pub mod rows;

use std::sync::atomic::{AtomicBool, Ordering};

static EXACT: AtomicBool = AtomicBool::new(false);

/// Whether products take activations as they are, instead of rounding them to 16 bits for packed
/// weights. Holds for graphs that are built from now on.
pub fn set_exact(exact: bool) {
    EXACT.store(exact, Ordering::Relaxed);
}

/// See [`set_exact`].
pub fn exact() -> bool {
    EXACT.load(Ordering::Relaxed)
}
