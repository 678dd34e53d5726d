//! `y = x W^T` with `W` in MLX's affine form: 4 or 8 bits, a scale and a bias per group.
//!
//! Every sum runs over two sets of 16 lanes, even and odd blocks of 16 inputs, whatever the number of
//! rows: a row's result is the same bit for bit alone and among others.

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

/// Rows of `x` that are multiplied with packed weights; more than these are worth unpacking for.
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
        let kernels = Kernels::best();
        let out = Shared::new(y);
        // A small product is done before another thread has noticed it.
        let small = rows * self.outputs * self.inputs < 1 << 16;
        let tiles = self.outputs.div_ceil(TILE);
        let most = if small {
            1
        } else {
            tiles.min(pool::threads() * 8)
        };
        let share = tiles.div_ceil(most.max(1)).max(1);
        pool::run(tiles.div_ceil(share), |piece| {
            let mut tile = Tile::new(self);
            for index in piece * share..((piece + 1) * share).min(tiles) {
                tile.take(self, index * TILE);
                if rows > BLOCK {
                    tile.multiply_unpacked(kernels, x, rows, out, self.outputs);
                } else if rows > 0 {
                    tile.multiply_packed(kernels, x, rows, out, self.outputs);
                }
            }
        });
    }
}

/// A few consecutive outputs of a matrix.
struct Tile<'a> {
    first: usize,
    packed: Packed<'a>,
    /// Scales and biases, widened where they are stored narrow.
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// `[outputs, inputs]`, for many rows.
    weights: Vec<f32>,
}

/// Packed weights of `outputs` consecutive outputs.
#[derive(Clone, Copy)]
struct Packed<'a> {
    words: &'a [u32],
    outputs: usize,
    inputs: usize,
    group: usize,
    bits: usize,
}

impl<'a> Packed<'a> {
    fn words_of(&self, output: usize) -> &'a [u32] {
        let words = self.inputs * self.bits / 32;
        &self.words[output * words..(output + 1) * words]
    }
}

impl<'a> Tile<'a> {
    fn new(matrix: &QuantizedMatrix<'a>) -> Self {
        Self {
            first: 0,
            packed: Packed {
                words: &[],
                outputs: 0,
                inputs: matrix.inputs,
                group: matrix.group,
                bits: matrix.bits,
            },
            scales: Vec::new(),
            biases: Vec::new(),
            weights: Vec::new(),
        }
    }

    /// Turns to the outputs from `first` on.
    fn take(&mut self, matrix: &QuantizedMatrix<'a>, first: usize) {
        let outputs = TILE.min(matrix.outputs - first);
        let words = matrix.inputs * matrix.bits / 32;
        let groups = matrix.inputs / matrix.group;
        self.first = first;
        self.packed.words = &matrix.words[first * words..(first + outputs) * words];
        self.packed.outputs = outputs;
        for (to, from) in [
            (&mut self.scales, matrix.scales),
            (&mut self.biases, matrix.biases),
        ] {
            to.resize(outputs * groups, 0.0);
            from.widen(first * groups, to);
        }
    }

    fn multiply_packed(
        &self,
        kernels: Kernels,
        x: &[f32],
        rows: usize,
        out: Shared<f32>,
        stride: usize,
    ) {
        let mut sums = [[0.0; BLOCK]; TILE];
        let args = (self.packed, &self.scales[..], &self.biases[..]);
        // SAFETY: the kernels were chosen for what this processor has, and all lengths fit.
        unsafe { (kernels.packed)(args, x, rows, &mut sums) };
        for row in 0..rows {
            // SAFETY: an output of all rows belongs to one tile.
            let out = unsafe { out.slice(row * stride + self.first, self.packed.outputs) };
            for (out, sums) in out.iter_mut().zip(&sums) {
                *out = sums[row];
            }
        }
    }

    fn multiply_unpacked(
        &mut self,
        kernels: Kernels,
        x: &[f32],
        rows: usize,
        out: Shared<f32>,
        stride: usize,
    ) {
        let (inputs, outputs) = (self.packed.inputs, self.packed.outputs);
        let args = (self.packed, &self.scales[..], &self.biases[..]);
        self.weights.resize(outputs * inputs, 0.0);
        // SAFETY: as in `multiply_packed`.
        unsafe { (kernels.unpack)(args, &mut self.weights) };
        for first in (0..rows).step_by(DENSE_ROWS) {
            let count = DENSE_ROWS.min(rows - first);
            let x = &x[first * inputs..(first + count) * inputs];
            let mut sums = [[0.0; BLOCK]; TILE];
            // SAFETY: as above.
            unsafe { (kernels.dense)(&self.weights, inputs, x, count, &mut sums) };
            for row in 0..count {
                let at = (first + row) * stride + self.first;
                // SAFETY: an output of all rows belongs to one tile.
                let out = unsafe { out.slice(at, outputs) };
                for (out, sums) in out.iter_mut().zip(&sums) {
                    *out = sums[row];
                }
            }
        }
    }
}

/// Rows that unpacked weights are multiplied with at a time.
const DENSE_ROWS: usize = 6;

/// Sums per output and row.
type Sums = [[f32; BLOCK]; TILE];

/// Packed weights with their scales and biases.
type Weights<'a> = (Packed<'a>, &'a [f32], &'a [f32]);

/// The inner loops for one kind of processor. All sum in the same order.
#[derive(Clone, Copy)]
struct Kernels {
    /// All outputs of a tile with at most `BLOCK` rows of `x`.
    packed: unsafe fn(Weights<'_>, x: &[f32], rows: usize, sums: &mut Sums),
    /// A tile's weights, row-major.
    unpack: unsafe fn(Weights<'_>, weights: &mut [f32]),
    /// Unpacked weights with at most `DENSE_ROWS` rows of `x`.
    dense: unsafe fn(weights: &[f32], inputs: usize, x: &[f32], rows: usize, sums: &mut Sums),
}

impl Kernels {
    const PORTABLE: Self = Self {
        packed: |weights, x, rows, sums| lanes::packed(weights, x, rows, sums, |a, b, c| a * b + c),
        unpack: |weights, out| lanes::unpack(weights, out, |a, b, c| a * b + c),
        dense: |weights, inputs, x, rows, sums| {
            lanes::dense(weights, inputs, x, rows, sums, |a, b, c| a * b + c);
        },
    };

    /// The best ones for this processor.
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                return x86::AVX512;
            }
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
            {
                return x86::AVX2;
            }
        }
        Self::PORTABLE
    }
}

/// The loops over arrays of lanes, written so that compilers make vectors of them; `fma` is
/// `a * b + c`, fused where the processor has it.
mod lanes {
    use super::{BLOCK, LANES, Packed, Sums, Weights, total};

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
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Kernels, Packed, Sums, Weights, lanes};

    pub const AVX2: Kernels = Kernels {
        packed: packed_avx2,
        unpack: unpack_avx2,
        dense: dense_avx2,
    };

    pub const AVX512: Kernels = Kernels {
        packed,
        unpack,
        dense,
    };

    #[target_feature(enable = "avx2,fma")]
    fn packed_avx2(weights: Weights<'_>, x: &[f32], rows: usize, sums: &mut Sums) {
        lanes::packed(weights, x, rows, sums, f32::mul_add);
    }

    #[target_feature(enable = "avx2,fma")]
    fn unpack_avx2(weights: Weights<'_>, out: &mut [f32]) {
        lanes::unpack(weights, out, f32::mul_add);
    }

    #[target_feature(enable = "avx2,fma")]
    fn dense_avx2(weights: &[f32], inputs: usize, x: &[f32], rows: usize, sums: &mut Sums) {
        lanes::dense(weights, inputs, x, rows, sums, f32::mul_add);
    }

    /// Where a tile's `N` outputs from one on begin, and how far apart they are.
    #[derive(Clone, Copy)]
    struct Outputs<'a> {
        packed: Packed<'a>,
        scales: &'a [f32],
        biases: &'a [f32],
        first: usize,
    }

    /// The sum of 32 lanes: even and odd blocks first, then as a tree.
    #[target_feature(enable = "avx512f")]
    fn reduce(even: __m512, odd: __m512) -> f32 {
        let sixteen = _mm512_add_ps(even, odd);
        let eight = _mm256_add_ps(
            _mm512_castps512_ps256(sixteen),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sixteen))),
        );
        let four = _mm_add_ps(
            _mm256_castps256_ps128(eight),
            _mm256_extractf128_ps::<1>(eight),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[target_feature(enable = "avx512f")]
    fn packed((packed, scales, biases): Weights<'_>, x: &[f32], rows: usize, sums: &mut Sums) {
        let mut first = 0;
        while first < packed.outputs {
            let outputs = Outputs {
                packed,
                scales,
                biases,
                first,
            };
            let left = packed.outputs - first;
            // As many outputs together as leave 16 sums in registers.
            first += match rows {
                1 if left >= 4 => several::<1, 4>(outputs, x, sums),
                1 => several::<1, 1>(outputs, x, sums),
                2 if left >= 4 => several::<2, 4>(outputs, x, sums),
                2 => several::<2, 1>(outputs, x, sums),
                3 if left >= 2 => several::<3, 2>(outputs, x, sums),
                3 => several::<3, 1>(outputs, x, sums),
                4 if left >= 2 => several::<4, 2>(outputs, x, sums),
                4 => several::<4, 1>(outputs, x, sums),
                5 => several::<5, 1>(outputs, x, sums),
                6 => several::<6, 1>(outputs, x, sums),
                7 => several::<7, 1>(outputs, x, sums),
                _ => several::<8, 1>(outputs, x, sums),
            };
        }
    }

    #[target_feature(enable = "avx512f")]
    fn several<const M: usize, const N: usize>(
        outputs: Outputs<'_>,
        x: &[f32],
        sums: &mut Sums,
    ) -> usize {
        assert!(x.len() == M * outputs.packed.inputs && M <= BLOCK);
        // SAFETY: `x` has M rows, and the tile N outputs from `first` on.
        let (even, odd) = unsafe {
            if outputs.packed.bits == 4 {
                four::<M, N>(outputs, x)
            } else {
                eight::<M, N>(outputs, x)
            }
        };
        for n in 0..N {
            for m in 0..M {
                sums[outputs.first + n][m] = reduce(even[n][m], odd[n][m]);
            }
        }
        N
    }

    /// Even and odd partial sums of N outputs and M rows.
    type Partial<const M: usize, const N: usize> = ([[__m512; M]; N], [[__m512; M]; N]);

    /// 32 weights of 4 bits: all 16 values that a group's weights can have fit one register, so that
    /// a permutation by the packed words is the dequantization.
    ///
    /// # Safety
    /// Four words lie behind the pointer.
    #[target_feature(enable = "avx512f")]
    unsafe fn nibbles(words: *const u32, table: __m512) -> (__m512, __m512) {
        let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        let low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let high = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        // SAFETY: the caller's promise.
        let packed = _mm512_castsi128_si512(unsafe { _mm_loadu_si128(words.cast()) });
        let pick = |half| {
            let words = _mm512_permutexvar_epi32(half, packed);
            _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table)
        };
        (pick(low), pick(high))
    }

    #[target_feature(enable = "avx512f")]
    fn table(scale: f32, bias: f32) -> __m512 {
        let steps = _mm512_setr_ps(
            0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
        );
        _mm512_fmadd_ps(steps, _mm512_set1_ps(scale), _mm512_set1_ps(bias))
    }

    /// 32 weights of 8 bits.
    ///
    /// # Safety
    /// Eight words lie behind the pointer.
    #[target_feature(enable = "avx512f")]
    unsafe fn bytes(words: *const u32, scale: f32, bias: f32) -> (__m512, __m512) {
        let (scale, bias) = (_mm512_set1_ps(scale), _mm512_set1_ps(bias));
        let widen = |from: *const u32| {
            // SAFETY: four of the caller's words.
            let bytes = unsafe { _mm_loadu_si128(from.cast()) };
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), scale, bias)
        };
        // SAFETY: inside the eight words.
        (widen(words), widen(unsafe { words.add(4) }))
    }

    /// # Safety
    /// `x` has M rows of inputs, and the tile N outputs from `first` on.
    #[target_feature(enable = "avx512f")]
    unsafe fn four<const M: usize, const N: usize>(
        Outputs {
            packed,
            scales,
            biases,
            first,
        }: Outputs<'_>,
        x: &[f32],
    ) -> Partial<M, N> {
        let (inputs, words) = (packed.inputs, packed.inputs / 8);
        let (groups, pairs) = (inputs / packed.group, packed.group / 32);
        let mut even = [[_mm512_setzero_ps(); M]; N];
        let mut odd = [[_mm512_setzero_ps(); M]; N];
        let mut at = 0;
        for group in 0..groups {
            let mut tables = [_mm512_setzero_ps(); N];
            for (n, slot) in tables.iter_mut().enumerate() {
                let index = (first + n) * groups + group;
                // SAFETY: a tile has scales and biases for every group of its outputs.
                *slot =
                    unsafe { table(*scales.get_unchecked(index), *biases.get_unchecked(index)) };
            }
            for _ in 0..pairs {
                // SAFETY: columns `at..at + 32` of outputs and rows that are there.
                unsafe {
                    for n in 0..N {
                        let from = packed.words.as_ptr().add((first + n) * words + at / 8);
                        let (w0, w1) = nibbles(from, tables[n]);
                        for m in 0..M {
                            let x = x.as_ptr().add(m * inputs + at);
                            even[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x), w0, even[n][m]);
                            odd[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(16)), w1, odd[n][m]);
                        }
                    }
                }
                at += 32;
            }
        }
        (even, odd)
    }

    /// # Safety
    /// As [`four`].
    #[target_feature(enable = "avx512f")]
    unsafe fn eight<const M: usize, const N: usize>(
        Outputs {
            packed,
            scales,
            biases,
            first,
        }: Outputs<'_>,
        x: &[f32],
    ) -> Partial<M, N> {
        let (inputs, words) = (packed.inputs, packed.inputs / 4);
        let (groups, pairs) = (inputs / packed.group, packed.group / 32);
        let mut even = [[_mm512_setzero_ps(); M]; N];
        let mut odd = [[_mm512_setzero_ps(); M]; N];
        for group in 0..groups {
            for pair in 0..pairs {
                let at = group * packed.group + pair * 32;
                // SAFETY: as in `four`.
                unsafe {
                    for n in 0..N {
                        let index = (first + n) * groups + group;
                        let from = packed.words.as_ptr().add((first + n) * words + at / 4);
                        let (scale, bias) =
                            (*scales.get_unchecked(index), *biases.get_unchecked(index));
                        let (w0, w1) = bytes(from, scale, bias);
                        for m in 0..M {
                            let x = x.as_ptr().add(m * inputs + at);
                            even[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x), w0, even[n][m]);
                            odd[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(16)), w1, odd[n][m]);
                        }
                    }
                }
            }
        }
        (even, odd)
    }

    #[target_feature(enable = "avx512f")]
    fn unpack((packed, scales, biases): Weights<'_>, out: &mut [f32]) {
        let groups = packed.inputs / packed.group;
        for (output, out) in out.chunks_exact_mut(packed.inputs).enumerate() {
            let words = packed.words_of(output);
            for (at, out) in out.chunks_exact_mut(32).enumerate() {
                let group = output * groups + at * 32 / packed.group;
                let (scale, bias) = (scales[group], biases[group]);
                let from = &words[at * packed.bits..(at + 1) * packed.bits];
                // SAFETY: 32 weights take `bits` words, which `from` has; `out` has 32 elements.
                unsafe {
                    let (w0, w1) = if packed.bits == 4 {
                        nibbles(from.as_ptr(), table(scale, bias))
                    } else {
                        bytes(from.as_ptr(), scale, bias)
                    };
                    _mm512_storeu_ps(out.as_mut_ptr(), w0);
                    _mm512_storeu_ps(out.as_mut_ptr().add(16), w1);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    fn dense(weights: &[f32], inputs: usize, x: &[f32], rows: usize, sums: &mut Sums) {
        match rows {
            1 => rows_of::<1>(weights, inputs, x, sums),
            2 => rows_of::<2>(weights, inputs, x, sums),
            3 => rows_of::<3>(weights, inputs, x, sums),
            4 => rows_of::<4>(weights, inputs, x, sums),
            5 => rows_of::<5>(weights, inputs, x, sums),
            _ => rows_of::<6>(weights, inputs, x, sums),
        }
    }

    #[target_feature(enable = "avx512f")]
    fn rows_of<const M: usize>(weights: &[f32], inputs: usize, x: &[f32], sums: &mut Sums) {
        assert!(x.len() == M * inputs && inputs.is_multiple_of(32));
        let outputs = weights.len() / inputs;
        let mut first = 0;
        while first < outputs {
            // SAFETY: `x` has M rows, and there are as many outputs as are asked for.
            unsafe {
                first += if outputs - first >= 2 {
                    product::<M, 2>(&weights[first * inputs..], inputs, x, &mut sums[first..])
                } else {
                    product::<M, 1>(&weights[first * inputs..], inputs, x, &mut sums[first..])
                };
            }
        }
    }

    /// # Safety
    /// `x` has M rows, `weights` at least N, of `inputs` elements, a multiple of 32.
    #[target_feature(enable = "avx512f")]
    unsafe fn product<const M: usize, const N: usize>(
        weights: &[f32],
        inputs: usize,
        x: &[f32],
        sums: &mut [[f32; BLOCK]],
    ) -> usize {
        let mut even = [[_mm512_setzero_ps(); M]; N];
        let mut odd = [[_mm512_setzero_ps(); M]; N];
        for at in (0..inputs).step_by(32) {
            // SAFETY: columns `at..at + 32` of rows and outputs that are there.
            unsafe {
                for n in 0..N {
                    let w = weights.as_ptr().add(n * inputs + at);
                    let (w0, w1) = (_mm512_loadu_ps(w), _mm512_loadu_ps(w.add(16)));
                    for m in 0..M {
                        let x = x.as_ptr().add(m * inputs + at);
                        even[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x), w0, even[n][m]);
                        odd[n][m] = _mm512_fmadd_ps(_mm512_loadu_ps(x.add(16)), w1, odd[n][m]);
                    }
                }
            }
        }
        for n in 0..N {
            for m in 0..M {
                sums[n][m] = reduce(even[n][m], odd[n][m]);
            }
        }
        N
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
            rows in 1usize..=BLOCK,
            outputs in 1usize..=TILE,
            groups in 1usize..6,
            bits in prop::sample::select(vec![4usize, 8]),
        ) {
            let inputs = groups * 32;
            let case = case(rows, outputs, inputs, 32, bits);
            let packed = Packed {
                words: &case.words,
                outputs,
                inputs,
                group: 32,
                bits,
            };
            let weights = (packed, &case.scales[..], &case.biases[..]);
            let mut all = vec![Kernels::PORTABLE, Kernels::best()];
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("fma") {
                all.push(x86::AVX2);
            }
            let few = rows.min(DENSE_ROWS);
            let results: Vec<_> = all
                .into_iter()
                .map(|kernels| {
                    let (mut sums, mut dense) = ([[0.0; BLOCK]; TILE], [[0.0; BLOCK]; TILE]);
                    let mut unpacked = vec![0.0; outputs * inputs];
                    // SAFETY: the processor has what these need; the lengths fit.
                    unsafe {
                        (kernels.packed)(weights, &case.x, rows, &mut sums);
                        (kernels.unpack)(weights, &mut unpacked);
                        let x = &case.x[..few * inputs];
                        (kernels.dense)(&unpacked, inputs, x, few, &mut dense);
                    }
                    // Unpacking first changes no bit.
                    for output in 0..outputs {
                        assert_eq!(sums[output][..few], dense[output][..few]);
                    }
                    sums
                })
                .collect();
            for sums in &results[1..] {
                for (a, b) in results[0].iter().flatten().zip(sums.iter().flatten()) {
                    prop_assert!((a - b).abs() < 1e-4, "{} {}", a, b);
                }
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
