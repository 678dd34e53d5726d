//! Products of packed weights and activations in 16 bits.
//!
//! A block's sum of integers is exact. It is scaled and added to its lane in f32, block after block,
//! in the same order for any number of rows: a row's result is the same bit for bit alone and among
//! others.

use super::activations::{Activations, Row};
use super::{QuantizedMatrix, TILE};

/// Lanes of sums.
pub const LANES: usize = 8;

/// Bytes of weights in a block.
pub const BLOCK_BYTES: usize = 32;

/// Multiplies the outputs `first..first + outputs` of a matrix with all rows of `x`, to `out`
/// `[rows, TILE]`.
///
/// # Panics
/// The lengths do not fit.
pub fn multiply(
    matrix: &QuantizedMatrix<'_>,
    first: usize,
    outputs: usize,
    x: &Activations,
    out: &mut [f32],
) {
    matrix.check();
    assert!(outputs <= TILE && first + outputs <= matrix.outputs);
    assert!(x.fits(matrix.inputs, matrix.bits) && out.len() == x.rows() * TILE);
    for (index, out) in out.chunks_mut(4 * TILE).enumerate() {
        let row = |i| x.row(4 * index + i);
        let tile = (matrix, first, outputs);
        match out.len() / TILE {
            1 => block(tile, [row(0)], out),
            2 => block(tile, [row(0), row(1)], out),
            3 => block(tile, [row(0), row(1), row(2)], out),
            _ => block(tile, [row(0), row(1), row(2), row(3)], out),
        }
    }
}

/// A matrix, its first output and the number of outputs.
pub type Outputs<'a, 'm> = (&'a QuantizedMatrix<'m>, usize, usize);

fn block<const M: usize>(tile: Outputs<'_, '_>, x: [Row<'_>; M], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_integer::{avx2, vnni};
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("fma") && has!("f16c") {
            // SAFETY: the processor has what the loops use; `multiply` checked all lengths.
            return unsafe {
                if has!("avx512vnni") && has!("avx512vl") {
                    vnni::block(tile, x, out)
                } else {
                    avx2::block(tile, x, out)
                }
            };
        }
    }
    lanes(tile, x, out);
}

/// `a * b + c`, fused where that is an instruction.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "aarch64") {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// Written so that compilers make vectors of it.
pub fn lanes<const M: usize>(
    (matrix, first, outputs): Outputs<'_, '_>,
    x: [Row<'_>; M],
    out: &mut [f32],
) {
    let &QuantizedMatrix {
        inputs,
        group,
        bits,
        ..
    } = matrix;
    let (row_bytes, width) = (inputs * bits / 8, BLOCK_BYTES * 8 / bits);
    let groups = inputs / group;
    for output in 0..outputs {
        let weights = &matrix.bytes()[(first + output) * row_bytes..][..row_bytes];
        let mut sums = [[0.0f32; LANES]; M];
        for (at, weights) in weights.chunks(BLOCK_BYTES).enumerate() {
            let mut bytes = [0u8; BLOCK_BYTES];
            bytes[..weights.len()].copy_from_slice(weights);
            let mut scales = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                let column = (at * width + lane * width / LANES).min(inputs - 1);
                let index = (first + output) * groups + column / group;
                scales.0[lane] = matrix.scales.at(index);
                scales.1[lane] = matrix.biases.at(index);
            }
            for (x, sums) in x.iter().zip(&mut sums) {
                let values = &x.values[at * width..(at + 1) * width];
                let x_sums = &x.sums[at * LANES..];
                for lane in 0..LANES {
                    let mut dot = 0i32;
                    for word in 2 * lane..2 * lane + 2 {
                        let packed = u16::from_le_bytes([bytes[2 * word], bytes[2 * word + 1]]);
                        for part in 0..16 / bits {
                            let w = packed >> (part * bits) & ((1 << bits) - 1);
                            dot += i32::from(w) * i32::from(values[part * 16 + word]);
                        }
                    }
                    let scaled = fma(dot as f32, scales.0[lane] * x.scales[at], sums[lane]);
                    sums[lane] = fma(scales.1[lane], x_sums[lane], scaled);
                }
            }
        }
        for (row, [a, b, c, d, e, f, g, h]) in sums.into_iter().enumerate() {
            out[row * TILE + output] = ((a + e) + (c + g)) + ((b + f) + (d + h));
        }
    }
}
