//! Kernels that treat rows one by one: norms, rotations, gates.

use super::lanes::{Float, dot, exp_negative};
use super::pool::{self, Shared};

/// Elements below which a call stays on one thread.
const SMALL: usize = 1 << 14;

/// Rows of a width that are worth a second thread.
pub(in crate::kernels) fn least_rows(width: usize) -> usize {
    SMALL.div_ceil(width.max(1))
}

/// `weight * x / sqrt(mean(x^2) + eps)` for every row of `x` `[rows, width]`.
///
/// # Panics
/// The lengths do not fit.
pub fn rms_norm<T: Float>(x: &[T], weight: Option<&[T]>, eps: f32, width: usize, out: &mut [T]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(width));
    assert!(weight.is_none_or(|weight| weight.len() == width));
    let shared = Shared::new(out);
    pool::split(x.len() / width, least_rows(width), |rows| {
        let mut wide = vec![0.0f32; width];
        for row in rows {
            let x = &x[row * width..(row + 1) * width];
            for (wide, x) in wide.iter_mut().zip(x) {
                *wide = x.wide();
            }
            let scale = 1.0 / (dot(&wide, &wide) / width as f32 + eps).sqrt();
            // SAFETY: every row belongs to one piece.
            let out = unsafe { shared.slice(row * width, width) };
            match weight {
                Some(weight) => {
                    for ((out, x), weight) in out.iter_mut().zip(&wide).zip(weight) {
                        *out = T::narrow(x * scale * weight.wide());
                    }
                }
                None => {
                    for (out, x) in out.iter_mut().zip(&wide) {
                        *out = T::narrow(x * scale);
                    }
                }
            }
        }
    });
}

/// Where the largest element of every row of `x` `[rows, width]` is, of equal ones the first. What is no number
/// is not larger than any; a row that begins with it gives 0.
///
/// # Panics
/// The lengths do not fit.
pub fn argmax<T: Float>(x: &[T], width: usize, out: &mut [i32]) {
    assert!(width > 0 && x.len() == out.len() * width);
    let shared = Shared::new(out);
    pool::split(x.len() / width, least_rows(width), |rows| {
        for row in rows {
            let place = largest(&x[row * width..(row + 1) * width]);
            // SAFETY: every row belongs to one piece.
            let out = unsafe { shared.slice(row, 1) };
            out[0] = place as i32;
        }
    });
}

/// Elements that are compared together.
const TOGETHER: usize = 64;

fn largest<T: Float>(x: &[T]) -> usize {
    let mut lanes = [x[0].wide(); 16];
    for part in x.chunks(lanes.len()) {
        for (most, x) in lanes.iter_mut().zip(part) {
            let x = x.wide();
            *most = if x > *most { x } else { *most };
        }
    }
    let most = lanes.into_iter().fold(lanes[0], f32::max);
    let is_there = |part: &[T]| part.iter().fold(false, |is, x| is | (x.wide() == most));
    let part = x.chunks(TOGETHER).position(is_there);
    part.map_or(0, |part| {
        let first = part * TOGETHER;
        let place = x[first..].iter().position(|x| x.wide() == most);
        first + place.unwrap_or(0)
    })
}

/// What opens the gate of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e^-x)`
    Silu,
    /// GELU in its tanh approximation (Hendrycks and Gimpel, 2016).
    GeluTanh,
}

/// `up = gate(x) * up`, on one thread.
pub fn gate_in_place(gate: Gate, x: &[f32], up: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has it.
        return unsafe { gate_in_place_avx2(gate, x, up) };
    }
    gate_in_place_lanes(gate, x, up);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn gate_in_place_avx2(gate: Gate, x: &[f32], up: &mut [f32]) {
    gate_in_place_lanes(gate, x, up);
}

#[inline(always)]
fn gate_in_place_lanes(gate: Gate, x: &[f32], up: &mut [f32]) {
    match gate {
        Gate::Silu => {
            for (up, &x) in up.iter_mut().zip(x) {
                *up *= x * sigmoid(x);
            }
        }
        Gate::GeluTanh => {
            // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
            let twice = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
            for (up, &x) in up.iter_mut().zip(x) {
                *up *= x * sigmoid(twice * (x + 0.044_715 * x * x * x));
            }
        }
    }
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    // By the sign, so that the exponential never overflows.
    let e = exp_negative(-x.abs());
    if x >= 0.0 {
        1.0 / (1.0 + e)
    } else {
        e / (1.0 + e)
    }
}

/// What a rotary embedding turns by.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// The divisor of the position, per pair; dimension `j` is paired with `j + divisors.len()`.
    pub divisors: &'a [f32],
    /// A factor on the position.
    pub scale: f32,
}

/// Where the heads of `[B, heads, T, D]` lie.
#[derive(Clone, Copy)]
pub struct HeadShape {
    /// Rows.
    pub batch: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Columns.
    pub width: usize,
    /// Dimensions of a head.
    pub dim: usize,
    /// Elements between rows, heads and columns of the input; the output is row-major.
    pub strides: [usize; 3],
}

/// Rotates every head of `x`; row `b`, column `t` stands at `offsets[b] + t`. Dimensions beyond the
/// pairs are copied.
///
/// # Panics
/// The lengths do not fit.
pub fn rope<T: Float>(
    x: &[T],
    shape: HeadShape,
    rotation: Rotation<'_>,
    offsets: &[i32],
    out: &mut [T],
) {
    let HeadShape {
        batch,
        heads,
        width,
        dim,
        strides,
    } = shape;
    let pairs = rotation.divisors.len();
    assert!(2 * pairs <= dim && offsets.len() == batch && out.len() == batch * heads * width * dim);
    let shared = Shared::new(out);
    let columns = batch * width;
    pool::split(columns, least_rows(heads * dim * 4), |range| {
        let mut turns = vec![(0.0f32, 0.0f32); pairs];
        for column in range {
            let (row, t) = (column / width, column % width);
            let position = rotation.scale * (offsets[row] + t as i32) as f32;
            for (turn, divisor) in turns.iter_mut().zip(rotation.divisors) {
                *turn = (position / divisor).sin_cos();
            }
            for head in 0..heads {
                let from = row * strides[0] + head * strides[1] + t * strides[2];
                let x = &x[from..from + dim];
                // SAFETY: every column belongs to one piece.
                let out = unsafe { shared.slice(((row * heads + head) * width + t) * dim, dim) };
                for (pair, &(sin, cos)) in turns.iter().enumerate() {
                    let (a, b) = (x[pair].wide(), x[pair + pairs].wide());
                    out[pair] = T::narrow(a * cos - b * sin);
                    out[pair + pairs] = T::narrow(a * sin + b * cos);
                }
                out[2 * pairs..].copy_from_slice(&x[2 * pairs..]);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0)
            .collect()
    }

    #[test]
    fn the_first_of_the_largest_is_found() {
        for width in [1, 2, 15, 16, 17, 64, 65, 1000] {
            let x = values(5 * width);
            let mut found = vec![-1; 5];
            argmax(&x, width, &mut found);
            for (row, found) in x.chunks(width).zip(found) {
                let largest = row.iter().copied().fold(f32::MIN, f32::max);
                let first = row.iter().position(|&x| x == largest);
                assert_eq!(first, Some(found as usize));
            }
        }
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        for (row, place) in [
            ([nan, 1.0, 2.0], 0),
            ([1.0, nan, 2.0], 2),
            ([low, nan, low], 0),
            ([low, low, low], 0),
            ([-0.0, 0.0, low], 0),
        ] {
            let mut found = [-1];
            argmax(&row, 3, &mut found);
            assert_eq!(found, [place]);
        }
    }

    #[test]
    fn norms_and_gates_are_what_double_precision_says() {
        let (x, weight) = (values(3 * 70), values(70));
        let mut out = vec![0.0; x.len()];
        rms_norm(&x, Some(&weight), 1e-5, 70, &mut out);
        for (x, out) in x.chunks(70).zip(out.chunks(70)) {
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 70.0;
            for i in 0..70 {
                let exact = f64::from(weight[i]) * f64::from(x[i]) / (mean + 1e-5).sqrt();
                assert!((f64::from(out[i]) - exact).abs() < 1e-6 * (1.0 + exact.abs()));
            }
        }
        let (x, up) = (values(101), values(101));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gelu = |x: f64| {
            let y = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x * 0.5 * (1.0 + y.tanh())
        };
        let mut outs = [up.clone(), up.clone()];
        gate_in_place(Gate::Silu, &x, &mut outs[0]);
        gate_in_place(Gate::GeluTanh, &x, &mut outs[1]);
        for i in 0..101 {
            let (x, up) = (f64::from(x[i]), f64::from(up[i]));
            for (out, exact) in [(outs[0][i], silu(x) * up), (outs[1][i], gelu(x) * up)] {
                assert!((f64::from(out) - exact).abs() < 1e-6 * (1.0 + exact.abs()));
            }
        }
    }

    #[test]
    fn a_rotation_keeps_lengths_and_position_zero() {
        let x = values(2 * 3 * 2 * 8);
        let shape = HeadShape {
            batch: 2,
            heads: 3,
            width: 2,
            dim: 8,
            strides: [48, 16, 8],
        };
        let rotation = Rotation {
            divisors: &[1.0, 10.0, 100.0],
            scale: 1.0,
        };
        let mut out = vec![0.0; x.len()];
        rope(&x, shape, rotation, &[0, 5], &mut out);
        assert_eq!(out[..8], x[..8]);
        for (a, b) in x.chunks(8).zip(out.chunks(8)) {
            assert!((dot(a, a) - dot(b, b)).abs() < 1e-4);
            assert_eq!(a[6..], b[6..]);
        }
    }
}
