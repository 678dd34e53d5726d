//! Sampling by a keyed inverse CDF, on the device.
//!
//! A draw is a function of (seed, position) and the logits alone: one uniform number, pushed
//! through the inverse CDF in token order. So it is the same at any batch size and whether or not
//! a drafter runs, and a drafter that draws with the same key agrees with the target as often as
//! their distributions overlap (the coupling of inverse transform sampling).
//!
//! A drafter draws with the position of the token that it predicts:
//!
//! ```no_run
//! use plugin_api::sampling::{self, Sampling};
//! use plugin_api::{DraftRequest, Result, Tensor};
//!
//! /// The first draft of each row from its logits `[B, 1, V]`, as `[B, 1]`.
//! fn first(logits: &Tensor, rows: &[Sampling], request: &DraftRequest<'_>) -> Result<Tensor> {
//!     sampling::draw(logits, rows, request.positions)
//! }
//! ```

pub use crate::abi::Sampling;
use crate::abi::{BinaryOp, DType, ReduceOp, UnaryOp};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Whether no random number is used.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0
    }

    fn filters(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Says which value is out of range.
    ///
    /// ```
    /// use plugin_api::sampling::Sampling;
    ///
    /// let sampling = Sampling { top_p: 1.5, ..Sampling::default() };
    /// let error = sampling.validate().unwrap_err();
    /// assert_eq!(error.message(), "top-p 1.5 must be above 0 and at most 1");
    /// ```
    pub fn validate(&self) -> Result<()> {
        let problem = if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            format!("temperature {} must be 0 or more", self.temperature)
        } else if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            format!("top-p {} must be above 0 and at most 1", self.top_p)
        } else if !(0.0..=1.0).contains(&self.min_p) {
            format!("min-p {} must be between 0 and 1", self.min_p)
        } else {
            return Ok(());
        };
        Err(Error::invalid(problem))
    }
}

/// The uniform number in [0, 1) of (seed, position): 24 bits of a finalised 64-bit mix, so that it
/// is exact in f32.
///
/// ```
/// use plugin_api::sampling::uniform;
///
/// assert_eq!(uniform(7, 100), uniform(7, 100));
/// assert_ne!(uniform(7, 100), uniform(7, 101));
/// assert!((0.0..1.0).contains(&uniform(7, 100)));
/// ```
pub fn uniform(seed: u64, position: u32) -> f32 {
    // Two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014): the first separates seeds,
    // the second positions, so that neighbouring seeds do not share shifted sequences.
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed) ^ u64::from(position)) >> 40;
    bits as f32 / (1u32 << 24) as f32
}

/// Draws one token per row and column.
///
/// `logits` `[B, T, V]`; row `b` samples by `rows[b]`, its column `t` with the key of position
/// `positions[b] + t`. Returns `[B, T]` i32, uncomputed.
pub fn draw(logits: &Tensor, rows: &[Sampling], positions: &[u32]) -> Result<Tensor> {
    let [batch, width, _] = logits.dims()?;
    if rows.len() != batch as usize || positions.len() != batch as usize {
        return Err(Error::failed(format!(
            "draw: {batch} rows of logits, {} samplers, {} positions",
            rows.len(),
            positions.len()
        )));
    }
    let greedy = logits.argmax(-1)?;
    if rows.iter().all(Sampling::is_greedy) {
        return Ok(greedy);
    }
    let column = |values: Vec<f32>| Tensor::from_slice(&values, &[batch, 1, 1]);
    let temperature = rows
        .iter()
        .map(|s| if s.is_greedy() { 1.0 } else { s.temperature })
        .collect();
    let scaled = logits.astype(DType::F32)?.div(&column(temperature)?)?;
    let mut weights = scaled.softmax(-1)?;
    if rows.iter().any(Sampling::filters) {
        weights = filtered(&weights, rows)?;
    }
    let mut keys = Vec::with_capacity((batch * width) as usize);
    for (sampling, &position) in rows.iter().zip(positions) {
        keys.extend((0..width as u32).map(|t| uniform(sampling.seed, position.wrapping_add(t))));
    }
    let keys = Tensor::from_slice(&keys, &[batch, width, 1])?;
    let drawn = inverse_cdf(&weights, &keys)?;
    if rows.iter().any(Sampling::is_greedy) {
        let flags: Vec<i32> = rows.iter().map(|s| i32::from(s.is_greedy())).collect();
        let flags = Tensor::from_slice(&flags, &[batch, 1])?.astype(DType::BOOL)?;
        return greedy.select(&flags, &drawn);
    }
    Ok(drawn)
}

/// The first token whose running sum exceeds `u` times the total. Tokens of weight 0 never win.
fn inverse_cdf(weights: &Tensor, u: &Tensor) -> Result<Tensor> {
    let vocab = weights.dim(-1);
    let sums = weights.cumsum(-1)?;
    let total = sums.slice(-1, vocab - 1, vocab)?;
    let passed = sums.less_equal(&total.mul(u)?)?.astype(DType::I32)?;
    // Rounding could let u * total reach the total: stay below the last token that has weight.
    let last = weights
        .binary(BinaryOp::LESS_EQUAL, &Tensor::full(&[], 0.0, DType::F32)?)?
        .unary(UnaryOp::NOT)?
        .astype(DType::I32)?
        .mul(&Tensor::arange(0, vocab)?)?
        .reduce(ReduceOp::MAX, -1, false)?;
    passed.sum(-1)?.binary(BinaryOp::MIN, &last)
}

/// `weights` `[B, T, V]` with the tokens that a row's filters reject set to 0.
fn filtered(weights: &Tensor, rows: &[Sampling]) -> Result<Tensor> {
    let [batch, width, vocab] = weights.dims()?;
    let zero = Tensor::full(&[], 0.0, DType::F32)?;
    // Descending: sort the negated weights.
    let sorted = weights.neg()?.sort(-1)?.neg()?;
    // top-k: the k-th largest weight is the threshold.
    let kth: Vec<i32> = rows
        .iter()
        .map(|s| match s.top_k {
            0 => vocab - 1,
            k => k.min(vocab as u32) as i32 - 1,
        })
        .collect();
    let kth = Tensor::from_slice(&kth, &[batch, 1, 1])?.broadcast_to(&[batch, width, 1])?;
    let mut threshold = sorted.take_along_axis(&kth, -1)?;
    let kept = sorted.select(&threshold.less_equal(&sorted)?, &zero)?;
    // top-p over what top-k left: token i stays if the mass before it is below p.
    let total = kept.reduce(ReduceOp::SUM, -1, true)?;
    let p: Vec<f32> = rows.iter().map(|s| s.top_p).collect();
    let p = Tensor::from_slice(&p, &[batch, 1, 1])?.mul(&total)?;
    let before = kept.cumsum(-1)?.sub(&kept)?;
    // A row with top-p 1 keeps all: `before` may round up to the total.
    let all: Vec<i32> = rows.iter().map(|s| i32::from(s.top_p >= 1.0)).collect();
    let all = Tensor::from_slice(&all, &[batch, 1, 1])?.astype(DType::BOOL)?;
    let inside = before.less(&p)?.binary(BinaryOp::OR, &all)?;
    let outside_is_large = kept.select(&inside, &Tensor::full(&[], 2.0, DType::F32)?)?;
    let edge = outside_is_large.reduce(ReduceOp::MIN, -1, true)?;
    threshold = threshold.binary(BinaryOp::MAX, &edge)?;
    // min-p is relative to the likeliest token.
    let min_p: Vec<f32> = rows.iter().map(|s| s.min_p).collect();
    let floor = Tensor::from_slice(&min_p, &[batch, 1, 1])?.mul(&sorted.slice(-1, 0, 1)?)?;
    threshold = threshold.binary(BinaryOp::MAX, &floor)?;
    weights.select(&threshold.less_equal(weights)?, &zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_is_in_range_and_spreads() {
        let mut sum = 0.0f64;
        for position in 0..10_000 {
            let u = uniform(7, position);
            assert!((0.0..1.0).contains(&u));
            sum += f64::from(u);
        }
        assert!((sum / 10_000.0 - 0.5).abs() < 0.01);
        assert_ne!(uniform(1, 2), uniform(2, 1));
    }

    #[test]
    fn out_of_range_values_are_named() {
        let bad = Sampling {
            top_p: 0.0,
            ..Sampling::default()
        };
        assert!(bad.validate().unwrap_err().message().contains("top-p"));
        let nan = Sampling {
            temperature: f32::NAN,
            ..Sampling::default()
        };
        assert!(nan.validate().is_err());
    }
}
