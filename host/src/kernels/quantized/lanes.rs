//! The loops over arrays of lanes, written so that compilers make vectors of them. `fma` is
//! `a * b + c`, fused where the processor has it.

use super::float::{BLOCK, Packed, Sums, Weights};
use crate::kernels::lanes::{LANES, total};

#[inline(always)]
fn block(
    packed: &Packed<'_>,
    words: &[u32],
    block: usize,
    scale: f32,
    bias: f32,
    fma: impl Fn(f32, f32, f32) -> f32,
) -> [f32; LANES] {
    let mut weights = [0.0f32; LANES];
    if packed.bits == 4 {
        let words = &words[block * 2..block * 2 + 2];
        for (i, weight) in weights.iter_mut().enumerate() {
            let q = words[i / 8] >> (4 * (i % 8)) & 15;
            *weight = fma(q as f32, scale, bias);
        }
    } else {
        let words = &words[block * 4..block * 4 + 4];
        for (i, weight) in weights.iter_mut().enumerate() {
            let q = words[i / 4] >> (8 * (i % 4)) & 255;
            *weight = fma(q as f32, scale, bias);
        }
    }
    weights
}

#[inline(always)]
pub fn packed(
    (packed, scales, biases): Weights<'_>,
    x: &[f32],
    rows: usize,
    sums: &mut Sums,
    fma: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    let (inputs, per_group) = (packed.inputs, packed.group / LANES);
    let groups = inputs / packed.group;
    for (output, sums) in sums.iter_mut().enumerate().take(packed.outputs) {
        let words = packed.words_of(output);
        let mut halves = [[[0.0f32; LANES]; BLOCK]; 2];
        for at in 0..inputs / LANES {
            let group = output * groups + at / per_group;
            let weights = block(&packed, words, at, scales[group], biases[group], fma);
            for (row, lanes) in halves[at % 2].iter_mut().enumerate().take(rows) {
                let x = &x[row * inputs + at * LANES..][..LANES];
                for i in 0..LANES {
                    lanes[i] = fma(x[i], weights[i], lanes[i]);
                }
            }
        }
        for row in 0..rows {
            sums[row] = both(halves[0][row], halves[1][row]);
        }
    }
}

#[inline(always)]
pub fn unpack(
    (packed, scales, biases): Weights<'_>,
    out: &mut [f32],
    fma: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    let per_group = packed.group / LANES;
    let groups = packed.inputs / packed.group;
    for (output, out) in out.chunks_exact_mut(packed.inputs).enumerate() {
        let words = packed.words_of(output);
        for (at, out) in out.chunks_exact_mut(LANES).enumerate() {
            let group = output * groups + at / per_group;
            out.copy_from_slice(&block(
                &packed,
                words,
                at,
                scales[group],
                biases[group],
                fma,
            ));
        }
    }
}

#[inline(always)]
pub fn dense(
    weights: &[f32],
    inputs: usize,
    x: &[f32],
    rows: usize,
    sums: &mut Sums,
    fma: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    for (weights, sums) in weights.chunks_exact(inputs).zip(sums) {
        for (row, sum) in sums.iter_mut().enumerate().take(rows) {
            let x = &x[row * inputs..(row + 1) * inputs];
            let mut halves = [[0.0f32; LANES]; 2];
            let blocks = x.chunks_exact(LANES).zip(weights.chunks_exact(LANES));
            for (at, (x, w)) in blocks.enumerate() {
                for i in 0..LANES {
                    halves[at % 2][i] = fma(x[i], w[i], halves[at % 2][i]);
                }
            }
            *sum = both(halves[0], halves[1]);
        }
    }
}

#[inline(always)]
fn both(mut even: [f32; LANES], odd: [f32; LANES]) -> f32 {
    for i in 0..LANES {
        even[i] += odd[i];
    }
    total(even)
}
