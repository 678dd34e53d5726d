//! The loops for x86-64: AVX-512 by hand, AVX2 by the compiler.

use std::arch::x86_64::*;

use super::float::{BLOCK, Kernels, Packed, Sums, Weights};
use super::lanes;

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
            *slot = unsafe { table(*scales.get_unchecked(index), *biases.get_unchecked(index)) };
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
