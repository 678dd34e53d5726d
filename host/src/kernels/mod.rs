//! The CPU kernels: plain functions over slices, each split over the thread pool.
//!
//! A kernel's sums have one order, whatever the number of rows it is given: a row's result is the
//! same bit for bit whether it is computed alone or with others, so that verifying drafts never
//! changes a near-tie.

pub mod attention;
pub mod delta;
pub mod lanes;
pub mod pool;
pub mod quantized;
pub mod rows;
