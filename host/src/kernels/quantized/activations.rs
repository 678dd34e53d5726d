//! Activations in 16 bits, for products of integers.
//!
//! The elements of a block share a scale, the largest magnitude over 32767. Sums of integer products
//! are exact, and a row's result does not depend on other rows.

use super::integer::{BLOCK_BYTES, LANES};
use crate::kernels::pool::{self, Shared};

/// The largest magnitude of an element.
const MOST: f32 = 32767.0;

/// Rows of activations, laid out as packed weights of a width are read: in blocks that go with 32
/// bytes of weights, each with eight lanes of sums.
///
/// The 16-bit words of a block of weights hold `n` weights each, 4 of 4 bits or 2 of 8. The block of
/// activations begins with those of all words' first weights, then come those of the second ones, and
/// so on. Lane `l` sums two words: the block's elements `2 n l` to `2 n (l + 1)`.
pub struct Activations {
    rows: usize,
    /// Blocks of a row; the last one is filled up with zeros.
    blocks: usize,
    /// Elements of a block.
    width: usize,
    values: Vec<i16>,
    /// Per block.
    scales: Vec<f32>,
    /// Per block and lane, the sum of activations, which a weight group's bias multiplies.
    sums: Vec<f32>,
}

/// One row, from some block on.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// `[blocks, width]`.
    pub values: &'a [i16],
    /// `[blocks]`.
    pub scales: &'a [f32],
    /// `[blocks, LANES]`.
    pub sums: &'a [f32],
}

impl Activations {
    /// Rounds `x` `[rows, inputs]` for weights of `bits` bits; `inputs` is a multiple of 32.
    pub fn quantize(x: &[f32], inputs: usize, bits: usize) -> Self {
        let (rows, width) = (x.len() / inputs, BLOCK_BYTES * 8 / bits);
        let blocks = inputs.div_ceil(width);
        let mut values = vec![0; rows * blocks * width];
        let mut scales = vec![0.0; rows * blocks];
        let mut sums = vec![0.0; rows * blocks * LANES];
        let shared = (
            Shared::new(&mut values),
            Shared::new(&mut scales),
            Shared::new(&mut sums),
        );
        pool::split(rows, (1usize << 14).div_ceil(inputs), |range| {
            for row in range {
                // SAFETY: every row belongs to one piece.
                let (values, scales, sums) = unsafe {
                    (
                        shared.0.slice(row * blocks * width, blocks * width),
                        shared.1.slice(row * blocks, blocks),
                        shared.2.slice(row * blocks * LANES, blocks * LANES),
                    )
                };
                let x = &x[row * inputs..(row + 1) * inputs];
                fill(x, bits, values, scales, sums);
            }
        });
        Self {
            rows,
            blocks,
            width,
            values,
            scales,
            sums,
        }
    }

    /// Whether the rows are laid out for such a matrix.
    pub fn fits(&self, inputs: usize, bits: usize) -> bool {
        let width = BLOCK_BYTES * 8 / bits;
        self.width == width && self.blocks == inputs.div_ceil(width)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// A row.
    pub fn row(&self, row: usize) -> Row<'_> {
        let (values, lanes) = (self.blocks * self.width, self.blocks * LANES);
        Row {
            values: &self.values[row * values..(row + 1) * values],
            scales: &self.scales[row * self.blocks..(row + 1) * self.blocks],
            sums: &self.sums[row * lanes..(row + 1) * lanes],
        }
    }
}

fn fill(x: &[f32], bits: usize, values: &mut [i16], scales: &mut [f32], sums: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { fill_avx2(x, bits, values, scales, sums) };
    }
    fill_lanes(x, bits, values, scales, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_avx2(x: &[f32], bits: usize, values: &mut [i16], scales: &mut [f32], sums: &mut [f32]) {
    fill_lanes(x, bits, values, scales, sums);
}

#[inline(always)]
fn fill_lanes(x: &[f32], bits: usize, values: &mut [i16], scales: &mut [f32], sums: &mut [f32]) {
    match bits {
        4 => blocks::<64, 4>(x, values, scales, sums),
        _ => blocks::<32, 2>(x, values, scales, sums),
    }
}

/// Blocks of W elements, N to a word of weights.
#[inline(always)]
fn blocks<const W: usize, const N: usize>(
    x: &[f32],
    values: &mut [i16],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let (values, _) = values.as_chunks_mut::<W>();
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    for (((x, values), scale), sums) in x.chunks(W).zip(values).zip(scales).zip(sums) {
        let mut block = [0.0; W];
        block[..x.len()].copy_from_slice(x);
        let mut most = 0.0f32;
        for x in &block {
            most = most.max(x.abs());
        }
        *scale = most / MOST;
        let inverse = if most > 0.0 { MOST / most } else { 0.0 };
        let mut rounded = [0i32; W];
        for (to, x) in rounded.iter_mut().zip(&block) {
            // The constant pushes the fraction out of the mantissa, which rounds to nearest even.
            const ROUND: f32 = 12_582_912.0;
            *to = ((x * inverse + ROUND) - ROUND) as i32;
        }
        for part in 0..N {
            for word in 0..W / N {
                values[part * (W / N) + word] = rounded[word * N + part] as i16;
            }
        }
        for (sum, lane) in sums.iter_mut().zip(rounded.chunks(2 * N)) {
            *sum = *scale * lane.iter().sum::<i32>() as f32;
        }
    }
}
