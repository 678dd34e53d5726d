//! Elements and short sums.

use half::{bf16, f16};

/// A floating-point element of an activation or a scale.
pub trait Float: Copy + Default + Send + Sync + 'static {
    /// Exact.
    fn wide(self) -> f32;
    /// Rounds to nearest even.
    fn narrow(x: f32) -> Self;
    /// The elements themselves, if they are single precision.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
    /// The same numbers in single precision.
    fn widened(all: Vec<Self>) -> Vec<f32> {
        all.iter().map(|x| x.wide()).collect()
    }
}

impl Float for f32 {
    fn wide(self) -> f32 {
        self
    }

    fn narrow(x: f32) -> Self {
        x
    }

    fn as_f32(all: &[Self]) -> Option<&[f32]> {
        Some(all)
    }

    fn widened(all: Vec<Self>) -> Vec<f32> {
        all
    }
}

impl Float for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Float for f16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }

    fn narrow(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// How many partial sums a long sum has: what the widest vectors hold.
pub const LANES: usize = 16;

/// The sum of the lanes, as a tree, so that its order is the same everywhere.
#[inline(always)]
pub fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `a * b + c`, fused where that is an instruction.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "aarch64") {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// `sum a[i] b[i]`.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    total(lanes)
}

/// `e^x` for `x <= 0`, within 2 units in the last place; vectorizes, unlike the library's.
#[inline(always)]
pub fn exp_negative(x: f32) -> f32 {
    // Below this the result is no normal number any more.
    let x = x.max(-87.0);
    // x = n ln 2 + r, |r| <= ln 2 / 2, with ln 2 in two parts.
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    // The minimax polynomial of Cephes' expf.
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.000_000_3e-1;
    let p = p * r * r + r + 1.0;
    p * f32::from_bits(((n as i32 + 127) << 23) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_the_last_places() {
        for i in 0..80_000 {
            let x = -(i as f32) * 1e-3;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_negative(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "{x}: {error:e}");
        }
        assert_eq!(exp_negative(0.0), 1.0);
        assert!(exp_negative(f32::NEG_INFINITY) < 1e-37);
    }
}
