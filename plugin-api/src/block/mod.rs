//! What block drafters share: they look at projected hiddens of the target, and draft several tokens in
//! one pass over a block of columns that see each other.
//!
//! A family implements [`BlockDrafter`]: what a block is made of, and how tokens come out of it.
//! [`BlockRows`] makes a group of rows of it. DFlash, and DSpark in all its packagings, are made so.

mod context;
mod markov;
mod propose;
mod rows;

pub use context::{Context, ContextLayer, ContextRows};
pub use markov::{Confidence, Markov, MarkovKind};
pub use propose::{Chain, Thresholds, masked, taps};
pub use rows::{Ask, BlockDrafter, BlockRows};
