//! Products of packed weights and activations in 16 bits.
//!
//! The sum of a block's integer products is exact. It is scaled and added to its lane in f32, block
//! after block, in the same order for any number of rows: a row's result is the same bit for bit
//! alone and among others.

use super::activations::{Activations, Band, LANE_BYTES, PART, ROWS, width};
#[cfg(target_arch = "x86_64")]
use super::x86_vnni;
use super::{QuantizedMatrix, Scales, TILE};
use crate::kernels::lanes::fma;

/// What a thread works in, kept from tile to tile.
#[derive(Default)]
pub struct Scratch {
    scales: Vec<f32>,
    biases: Vec<f32>,
}

/// Consecutive outputs of a matrix.
pub struct Tile<'a> {
    /// Packed weights.
    pub bytes: &'a [u8],
    /// `[outputs, parts]`, in single precision.
    pub scales: &'a [f32],
    /// As `scales`.
    pub biases: &'a [f32],
    /// At most [`TILE`].
    pub outputs: usize,
    /// Inputs.
    pub inputs: usize,
    /// 4 or 8.
    pub bits: usize,
}

impl Tile<'_> {
    /// Scales of an output.
    pub fn parts(&self) -> usize {
        self.inputs / PART
    }
}

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
    scratch: &mut Scratch,
) {
    matrix.check();
    assert!(outputs <= TILE && first + outputs <= matrix.outputs);
    assert!(x.fits(matrix.inputs, matrix.bits) && out.len() == x.rows() * TILE);
    #[cfg(target_arch = "x86_64")]
    if x.lanes() == x86_vnni::LANES && x86_vnni::available() {
        // SAFETY: the processor has what the loops use, and all lengths were checked.
        return unsafe { x86_vnni::multiply(matrix, first, outputs, x, out) };
    }
    let tile = scratch.tile(matrix, first, outputs);
    for (index, out) in out.chunks_mut(ROWS * TILE).enumerate() {
        let band = x.band(index);
        match out.len() / TILE {
            1 => rows::<1>(&tile, band, x.lanes(), out),
            2 => rows::<2>(&tile, band, x.lanes(), out),
            3 => rows::<3>(&tile, band, x.lanes(), out),
            _ => rows::<4>(&tile, band, x.lanes(), out),
        }
    }
}

impl Scratch {
    /// Prepares some outputs of a checked matrix.
    pub fn tile<'a>(
        &'a mut self,
        matrix: &'a QuantizedMatrix<'_>,
        first: usize,
        outputs: usize,
    ) -> Tile<'a> {
        let row_bytes = matrix.inputs * matrix.bits / 8;
        spread(matrix, matrix.scales, first, outputs, &mut self.scales);
        spread(matrix, matrix.biases, first, outputs, &mut self.biases);
        Tile {
            bytes: &matrix.bytes()[first * row_bytes..(first + outputs) * row_bytes],
            scales: &self.scales,
            biases: &self.biases,
            outputs,
            inputs: matrix.inputs,
            bits: matrix.bits,
        }
    }
}

/// The scales (or biases) of some outputs, part by part.
fn spread(
    matrix: &QuantizedMatrix<'_>,
    from: Scales<'_>,
    first: usize,
    outputs: usize,
    to: &mut Vec<f32>,
) {
    let (groups, times) = (matrix.inputs / matrix.group, matrix.group / PART);
    to.resize(outputs * groups * times, 0.0);
    match times {
        1 => from.spread::<1>(first * groups, to),
        2 => from.spread::<2>(first * groups, to),
        _ => from.spread::<4>(first * groups, to),
    }
}

/// The loops for a number of lanes.
fn rows<const M: usize>(tile: &Tile<'_>, x: Band<'_>, lanes: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_integer;
        use std::arch::is_x86_feature_detected as has;
        if lanes == x86_integer::LANES && has!("avx2") && has!("fma") {
            // SAFETY: the processor has what the loops use; `multiply` checked all lengths.
            return unsafe { x86_integer::rows::<M>(tile, x, out) };
        }
    }
    match lanes {
        16 => self::lanes::<M, 16>(tile, x, out),
        _ => self::lanes::<M, 8>(tile, x, out),
    }
}

/// How many lanes the best loops for this processor have: 8 or 16.
pub fn best_lanes() -> usize {
    #[cfg(target_arch = "x86_64")]
    if x86_vnni::available() {
        return x86_vnni::LANES;
    }
    8
}

/// Written so that compilers make vectors of it.
pub fn lanes<const M: usize, const L: usize>(tile: &Tile<'_>, x: Band<'_>, out: &mut [f32]) {
    let (parts, bits, block) = (tile.parts(), tile.bits, L * LANE_BYTES);
    let (row_bytes, width) = (tile.inputs * bits / 8, width(bits, L));
    for output in 0..tile.outputs {
        let scales = &tile.scales[output * parts..(output + 1) * parts];
        let biases = &tile.biases[output * parts..(output + 1) * parts];
        let weights = &tile.bytes[output * row_bytes..(output + 1) * row_bytes];
        let mut sums = [[0.0f32; L]; M];
        for (step, biases) in biases.chunks(L).enumerate() {
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = &x.sums[(step * M + row) * L..][..L];
                for (sum, (bias, x)) in sums.iter_mut().zip(biases.iter().zip(x)) {
                    *sum = fma(*bias, *x, *sum);
                }
            }
        }
        for (at, weights) in weights.chunks(block).enumerate() {
            // Beyond the weights there is nothing to add.
            let mut lanes = [[0u8; LANE_BYTES]; L];
            lanes.as_flattened_mut()[..weights.len()].copy_from_slice(weights);
            for (row, sums) in sums.iter_mut().enumerate() {
                let values = &x.values[(at * M + row) * width..][..width];
                for (lane, (sum, [a, b, c, d])) in sums.iter_mut().zip(lanes).enumerate() {
                    let mut dot = 0i32;
                    for (word, packed) in [[a, b], [c, d]].into_iter().enumerate() {
                        for part in 0..16 / bits {
                            let w = u16::from_le_bytes(packed) >> (part * bits) & ((1 << bits) - 1);
                            let x = values[part * 2 * L + 2 * lane + word];
                            dot += i32::from(w) * i32::from(x);
                        }
                    }
                    // Beyond the inputs there is nothing to scale.
                    let part = (at * width + lane * width / L) / PART;
                    let scale = scales.get(part).copied().unwrap_or(0.0);
                    *sum = fma(dot as f32, scale, *sum);
                }
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let mut width = L / 2;
            while width > 0 {
                for i in 0..width {
                    sums[i] += sums[i + width];
                }
                width /= 2;
            }
            out[row * TILE + output] = sums[0] * x.scales[row];
        }
    }
}
