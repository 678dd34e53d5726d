//! `y = x W^T` with `W` in MLX's affine form: 4 or 8 bits, a scale and a bias per group.
//!
//! Every sum runs over two sets of 16 lanes, even and odd blocks of 16 inputs, whatever the
//! processor and the number of rows.

use half::{bf16, f16};

use super::lanes::{Float, LANES, total};
use super::pool::{self, Shared};

/// Scales or biases, in the type they are stored in.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

impl Scales<'_> {
    /// Elements `start..start + out.len()`, widened.
    fn widen(self, start: usize, out: &mut [f32]) {
        fn copy<T: Float>(from: &[T], out: &mut [f32]) {
            for (out, &x) in out.iter_mut().zip(from) {
                *out = x.wide();
            }
        }
        match self {
            Self::F32(all) => out.copy_from_slice(&all[start..start + out.len()]),
            Self::Bf16(all) => copy(&all[start..], out),
            Self::F16(all) => copy(&all[start..], out),
        }
    }
}

/// A packed matrix `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub struct QuantizedMatrix<'a> {
    /// `[outputs, inputs * bits / 32]`, low bits first.
    pub words: &'a [u32],
    /// `[outputs, inputs / group]`.
    pub scales: Scales<'a>,
    /// As `scales`.
    pub biases: Scales<'a>,
    /// Outputs.
    pub outputs: usize,
    /// Inputs, a multiple of `group`.
    pub inputs: usize,
    /// 32, 64 or 128.
    pub group: usize,
    /// 4 or 8.
    pub bits: usize,
}

/// Rows of `x` that are taken together: as many sums as the registers hold.
const BLOCK: usize = 8;

/// Outputs that a thread takes at a time.
const TILE: usize = 16;

impl QuantizedMatrix<'_> {
    /// Whether the kernel takes matrices of this shape.
    pub fn supports(inputs: usize, group: usize, bits: usize) -> bool {
        matches!(bits, 4 | 8) && matches!(group, 32 | 64 | 128) && inputs.is_multiple_of(group)
    }

    /// `x` `[rows, inputs]` to `y` `[rows, outputs]`.
    ///
    /// # Panics
    /// The lengths do not fit the shape.
    pub fn multiply(&self, x: &[f32], y: &mut [f32]) {
        let rows = x.len() / self.inputs;
        assert!(x.len() == rows * self.inputs && y.len() == rows * self.outputs);
        assert_eq!(
            self.words.len(),
            self.outputs * self.inputs * self.bits / 32
        );
        let kernel = kernel();
        let out = Shared::new(y);
        // A small product is done before another thread has noticed it.
        let small = rows * self.outputs * self.inputs < 1 << 16;
        let tiles = self.outputs.div_ceil(TILE);
        let most = if small {
            1
        } else {
            tiles.min(pool::threads() * 8)
        };
        let share = tiles.div_ceil(most.max(1));
        pool::run(tiles.div_ceil(share.max(1)), |piece| {
            let mut scratch = Scratch::new(self);
            for tile in piece * share..((piece + 1) * share).min(tiles) {
                let outputs = tile * TILE..((tile + 1) * TILE).min(self.outputs);
                for first in (0..rows).step_by(BLOCK) {
                    let count = BLOCK.min(rows - first);
                    let x = &x[first * self.inputs..(first + count) * self.inputs];
                    for output in outputs.clone() {
                        let mut sums = [0.0; BLOCK];
                        scratch.load(self, output);
                        // SAFETY: `kernel` was chosen for what this processor has; the lengths were
                        // checked above.
                        unsafe { kernel(&scratch.row(self, output), x, count, &mut sums) };
                        for (row, &sum) in sums[..count].iter().enumerate() {
                            let at = (first + row) * self.outputs + output;
                            // SAFETY: every element of `y` belongs to one piece.
                            let out = unsafe { out.slice(at, 1) };
                            out[0] = sum;
                        }
                    }
                }
            }
        });
    }
}

/// The scales and biases of one output, widened.
struct Scratch {
    scales: Vec<f32>,
    biases: Vec<f32>,
    output: Option<usize>,
}

impl Scratch {
    fn new(matrix: &QuantizedMatrix<'_>) -> Self {
        let groups = matrix.inputs / matrix.group;
        Self {
            scales: vec![0.0; groups],
            biases: vec![0.0; groups],
            output: None,
        }
    }

    fn load(&mut self, matrix: &QuantizedMatrix<'_>, output: usize) {
        if self.output != Some(output) {
            let groups = self.scales.len();
            matrix.scales.widen(output * groups, &mut self.scales);
            matrix.biases.widen(output * groups, &mut self.biases);
            self.output = Some(output);
        }
    }

    fn row<'a>(&'a self, matrix: &QuantizedMatrix<'a>, output: usize) -> Row<'a> {
        let words = matrix.inputs * matrix.bits / 32;
        Row {
            words: &matrix.words[output * words..(output + 1) * words],
            scales: &self.scales,
            biases: &self.biases,
            group: matrix.group,
            bits: matrix.bits,
        }
    }
}

/// One output's weights.
struct Row<'a> {
    words: &'a [u32],
    scales: &'a [f32],
    biases: &'a [f32],
    group: usize,
    bits: usize,
}

/// Multiplies one output's weights with `count` rows of `x`.
type Kernel = unsafe fn(&Row<'_>, x: &[f32], count: usize, sums: &mut [f32; BLOCK]);

/// The best kernel for this processor.
fn kernel() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return x86::avx512;
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
        {
            return x86::avx2;
        }
    }
    portable
}

/// Written so that compilers make vectors of it.
unsafe fn portable(row: &Row<'_>, x: &[f32], count: usize, sums: &mut [f32; BLOCK]) {
    lanes_of(row, x, count, sums, |a, b, c| a * b + c);
}

/// The algorithm over arrays of lanes; `fma` is `a * b + c`, fused where the processor has it.
#[inline(always)]
fn lanes_of(
    row: &Row<'_>,
    x: &[f32],
    count: usize,
    sums: &mut [f32; BLOCK],
    fma: impl Fn(f32, f32, f32) -> f32,
) {
    let inputs = row.words.len() * 32 / row.bits;
    let per_group = row.group / LANES;
    let mut even = [[0.0f32; LANES]; BLOCK];
    let mut odd = [[0.0f32; LANES]; BLOCK];
    for block in 0..inputs / LANES {
        let (scale, bias) = (row.scales[block / per_group], row.biases[block / per_group]);
        let mut weights = [0.0f32; LANES];
        if row.bits == 4 {
            let words = &row.words[block * 2..block * 2 + 2];
            for (i, weight) in weights.iter_mut().enumerate() {
                let q = words[i / 8] >> (4 * (i % 8)) & 15;
                *weight = fma(q as f32, scale, bias);
            }
        } else {
            let words = &row.words[block * 4..block * 4 + 4];
            for (i, weight) in weights.iter_mut().enumerate() {
                let q = words[i / 4] >> (8 * (i % 4)) & 255;
                *weight = fma(q as f32, scale, bias);
            }
        }
        let lanes = if block % 2 == 0 { &mut even } else { &mut odd };
        for (m, lanes) in lanes.iter_mut().enumerate().take(count) {
            let at = m * inputs + block * LANES;
            let x = &x[at..at + LANES];
            for i in 0..LANES {
                lanes[i] = fma(x[i], weights[i], lanes[i]);
            }
        }
    }
    for m in 0..count {
        for i in 0..LANES {
            even[m][i] += odd[m][i];
        }
        sums[m] = total(even[m]);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, LANES, Row, lanes_of};
    use crate::kernels::lanes::total;

    /// # Safety
    /// The processor has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn avx2(row: &Row<'_>, x: &[f32], count: usize, sums: &mut [f32; BLOCK]) {
        lanes_of(row, x, count, sums, f32::mul_add);
    }

    /// # Safety
    /// The processor has AVX-512F; `x` has `count` rows of as many inputs as `row`.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512(row: &Row<'_>, x: &[f32], count: usize, sums: &mut [f32; BLOCK]) {
        // SAFETY: the caller's promise, for every number of rows.
        unsafe {
            match (row.bits, count) {
                (4, 1) => four::<1>(row, x, sums),
                (4, 2) => four::<2>(row, x, sums),
                (4, 3) => four::<3>(row, x, sums),
                (4, 4) => four::<4>(row, x, sums),
                (4, 5) => four::<5>(row, x, sums),
                (4, 6) => four::<6>(row, x, sums),
                (4, 7) => four::<7>(row, x, sums),
                (4, _) => four::<8>(row, x, sums),
                (_, 1) => eight::<1>(row, x, sums),
                (_, 2) => eight::<2>(row, x, sums),
                (_, 3) => eight::<3>(row, x, sums),
                (_, 4) => eight::<4>(row, x, sums),
                (_, 5) => eight::<5>(row, x, sums),
                (_, 6) => eight::<6>(row, x, sums),
                (_, 7) => eight::<7>(row, x, sums),
                (_, _) => eight::<8>(row, x, sums),
            }
        }
    }

    /// The lanes of one row to its sum.
    #[target_feature(enable = "avx512f")]
    fn reduce(even: __m512, odd: __m512) -> f32 {
        let mut lanes = [0.0; LANES];
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), _mm512_add_ps(even, odd)) };
        total(lanes)
    }

    /// 4 bits: all 16 values that a group's weights can have fit one register, so that a permutation
    /// by the packed words is the dequantization.
    ///
    /// # Safety
    /// As [`avx512`], with `M` rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn four<const M: usize>(row: &Row<'_>, x: &[f32], sums: &mut [f32; BLOCK]) {
        let inputs = row.words.len() * 8;
        debug_assert!(x.len() >= M * inputs);
        let pairs = row.group / 32;
        // SAFETY: all loads lie inside the row's words, scales and biases and inside `M` rows of
        // `x`, as the loops' bounds say.
        unsafe {
            let steps = _mm512_setr_ps(
                0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
            );
            let shifts =
                _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let mut even = [_mm512_setzero_ps(); M];
            let mut odd = [_mm512_setzero_ps(); M];
            let mut words = row.words.as_ptr();
            let mut x = x.as_ptr();
            for (scale, bias) in row.scales.iter().zip(row.biases) {
                let table = _mm512_fmadd_ps(steps, _mm512_set1_ps(*scale), _mm512_set1_ps(*bias));
                for _ in 0..pairs {
                    let packed = _mm512_castsi128_si512(_mm_loadu_si128(words.cast()));
                    let low = _mm512_permutexvar_epi32(halves, packed);
                    let high = _mm512_permutexvar_epi32(
                        _mm512_add_epi32(halves, _mm512_set1_epi32(2)),
                        packed,
                    );
                    let w0 = _mm512_permutexvar_ps(_mm512_srlv_epi32(low, shifts), table);
                    let w1 = _mm512_permutexvar_ps(_mm512_srlv_epi32(high, shifts), table);
                    for m in 0..M {
                        let x = x.add(m * inputs);
                        even[m] = _mm512_fmadd_ps(_mm512_loadu_ps(x), w0, even[m]);
                        odd[m] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(16)), w1, odd[m]);
                    }
                    words = words.add(4);
                    x = x.add(32);
                }
            }
            for m in 0..M {
                sums[m] = reduce(even[m], odd[m]);
            }
        }
    }

    /// # Safety
    /// As [`avx512`], with `M` rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn eight<const M: usize>(row: &Row<'_>, x: &[f32], sums: &mut [f32; BLOCK]) {
        let inputs = row.words.len() * 4;
        debug_assert!(x.len() >= M * inputs);
        let pairs = row.group / 32;
        // SAFETY: as in `four`.
        unsafe {
            let mut even = [_mm512_setzero_ps(); M];
            let mut odd = [_mm512_setzero_ps(); M];
            let mut bytes = row.words.as_ptr().cast::<u8>();
            let mut x = x.as_ptr();
            let widen = |from: *const u8| {
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())))
            };
            for (scale, bias) in row.scales.iter().zip(row.biases) {
                let (scale, bias) = (_mm512_set1_ps(*scale), _mm512_set1_ps(*bias));
                for _ in 0..pairs {
                    let w0 = _mm512_fmadd_ps(widen(bytes), scale, bias);
                    let w1 = _mm512_fmadd_ps(widen(bytes.add(16)), scale, bias);
                    for m in 0..M {
                        let x = x.add(m * inputs);
                        even[m] = _mm512_fmadd_ps(_mm512_loadu_ps(x), w0, even[m]);
                        odd[m] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(16)), w1, odd[m]);
                    }
                    bytes = bytes.add(32);
                    x = x.add(32);
                }
            }
            for m in 0..M {
                sums[m] = reduce(even[m], odd[m]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A matrix of random words, and its weights in double precision.
    struct Case {
        words: Vec<u32>,
        scales: Vec<f32>,
        biases: Vec<f32>,
        weights: Vec<f64>,
        x: Vec<f32>,
    }

    fn case(rows: usize, outputs: usize, inputs: usize, group: usize, bits: usize) -> Case {
        let mut state = (rows + 31 * outputs + 1009 * inputs + bits) as u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 32) as u32
        };
        let mut unit = |scale: f32| (random() as f32 / u32::MAX as f32 - 0.5) * scale;
        let groups = outputs * inputs / group;
        let scales: Vec<f32> = (0..groups).map(|_| unit(0.1)).collect();
        let biases: Vec<f32> = (0..groups).map(|_| unit(0.5)).collect();
        let x: Vec<f32> = (0..rows * inputs).map(|_| unit(2.0)).collect();
        let words: Vec<u32> = (0..outputs * inputs * bits / 32)
            .map(|i| (unit(1e9) as i64 as u32) ^ (i as u32).wrapping_mul(2_654_435_761))
            .collect();
        let per_word = 32 / bits;
        let weights = (0..outputs * inputs).map(|i| {
            let q = words[i / per_word] >> (bits * (i % per_word)) & ((1 << bits) - 1);
            f64::from(q) * f64::from(scales[i / group]) + f64::from(biases[i / group])
        });
        Case {
            weights: weights.collect(),
            words,
            scales,
            biases,
            x,
        }
    }

    fn product(
        case: &Case,
        x: &[f32],
        outputs: usize,
        inputs: usize,
        group: usize,
        bits: usize,
    ) -> Vec<f32> {
        let matrix = QuantizedMatrix {
            words: &case.words,
            scales: Scales::F32(&case.scales),
            biases: Scales::F32(&case.biases),
            outputs,
            inputs,
            group,
            bits,
        };
        let mut y = vec![f32::NAN; x.len() / inputs * outputs];
        matrix.multiply(x, &mut y);
        y
    }

    proptest! {
        #[test]
        fn is_the_double_precision_product_and_rows_do_not_mix(
            rows in 0usize..20,
            outputs in 1usize..70,
            groups in 1usize..6,
            group in prop::sample::select(vec![32usize, 64, 128]),
            bits in prop::sample::select(vec![4usize, 8]),
        ) {
            let inputs = groups * group;
            let case = case(rows, outputs, inputs, group, bits);
            let y = product(&case, &case.x, outputs, inputs, group, bits);
            for row in 0..rows {
                let x = &case.x[row * inputs..(row + 1) * inputs];
                for output in 0..outputs {
                    let w = &case.weights[output * inputs..(output + 1) * inputs];
                    let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * w);
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    let error = (f64::from(y[row * outputs + output]) - terms.sum::<f64>()).abs();
                    prop_assert!(error <= 2e-6 * size + 1e-30, "{error:e} of {size:e}");
                }
                let alone = product(&case, x, outputs, inputs, group, bits);
                prop_assert_eq!(&y[row * outputs..(row + 1) * outputs], &alone[..]);
            }
        }

        #[test]
        fn every_kernel_agrees(
            count in 1usize..=BLOCK,
            groups in 1usize..6,
            bits in prop::sample::select(vec![4usize, 8]),
        ) {
            let inputs = groups * 32;
            let case = case(count, 1, inputs, 32, bits);
            let row = Row {
                words: &case.words,
                scales: &case.scales,
                biases: &case.biases,
                group: 32,
                bits,
            };
            let run = |kernel: Kernel| {
                let mut sums = [0.0; BLOCK];
                // SAFETY: the callers below checked for the features; the lengths fit.
                unsafe { kernel(&row, &case.x, count, &mut sums) };
                sums
            };
            let plain = run(portable);
            let best = run(kernel());
            for (a, b) in plain.iter().zip(best) {
                prop_assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
        }
    }

    #[test]
    fn narrow_scales_are_widened() {
        let case = case(1, 4, 64, 32, 4);
        let narrow = |all: &[f32]| all.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let wide = |all: &[bf16]| all.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let (scales, biases) = (narrow(&case.scales), narrow(&case.biases));
        let mut matrix = QuantizedMatrix {
            words: &case.words,
            scales: Scales::Bf16(&scales),
            biases: Scales::Bf16(&biases),
            outputs: 4,
            inputs: 64,
            group: 32,
            bits: 4,
        };
        let (mut a, mut b) = ([0.0; 4], [0.0; 4]);
        matrix.multiply(&case.x, &mut a);
        let (scales, biases) = (wide(&scales), wide(&biases));
        matrix.scales = Scales::F32(&scales);
        matrix.biases = Scales::F32(&biases);
        matrix.multiply(&case.x, &mut b);
        assert_eq!(a, b);
    }
}
