//! The integer products for x86-64, once for AVX2 and once for the dot products of VNNI.

use std::arch::x86_64::*;

use super::activations::Row;
use super::integer::{BLOCK_BYTES, LANES, Outputs};
use super::{Scales, TILE};

/// Scales and biases by their element type.
const F32: u8 = 0;
const BF16: u8 = 1;
const F16: u8 = 2;

/// The loops with one way, `$dot`, to add the products of pairs of 16-bit numbers to sums.
macro_rules! loops {
    ($name:ident, $features:literal, $dot:path) => {
        pub mod $name {
            use super::*;

            /// # Safety
            /// The tile is part of a matrix whose lengths fit, the rows have as many inputs, and
            /// `out` has M rows of a tile.
            #[target_feature(enable = $features)]
            pub unsafe fn block<const M: usize>(
                tile: Outputs<'_, '_>,
                x: [Row<'_>; M],
                out: &mut [f32],
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match (tile.0.bits, tile.0.scales) {
                        (4, Scales::F32(_)) => outputs::<F32, true, M>(tile, x, out),
                        (4, Scales::Bf16(_)) => outputs::<BF16, true, M>(tile, x, out),
                        (4, Scales::F16(_)) => outputs::<F16, true, M>(tile, x, out),
                        (_, Scales::F32(_)) => outputs::<F32, false, M>(tile, x, out),
                        (_, Scales::Bf16(_)) => outputs::<BF16, false, M>(tile, x, out),
                        (_, Scales::F16(_)) => outputs::<F16, false, M>(tile, x, out),
                    }
                }
            }

            /// # Safety
            /// As `block`; scales and bits are what the parameters say.
            #[target_feature(enable = $features)]
            unsafe fn outputs<const KIND: u8, const NIBBLES: bool, const M: usize>(
                tile: Outputs<'_, '_>,
                x: [Row<'_>; M],
                out: &mut [f32],
            ) {
                let (_, first, count) = tile;
                let mut output = 0;
                while output < count {
                    // Several outputs at a time where few rows leave registers for them, so that
                    // additions do not wait for each other.
                    let left = count - output;
                    // SAFETY: the caller's promise, and as many outputs as are left.
                    output += unsafe {
                        if M == 1 && left >= 4 {
                            sums::<KIND, NIBBLES, M, 4>(tile, first, output, x, out)
                        } else if M <= 2 && left >= 2 {
                            sums::<KIND, NIBBLES, M, 2>(tile, first, output, x, out)
                        } else {
                            sums::<KIND, NIBBLES, M, 1>(tile, first, output, x, out)
                        }
                    };
                }
            }

            /// # Safety
            /// As `outputs`, with N outputs from `output` on.
            #[target_feature(enable = $features)]
            unsafe fn sums<const KIND: u8, const NIBBLES: bool, const M: usize, const N: usize>(
                (matrix, ..): Outputs<'_, '_>,
                first: usize,
                output: usize,
                x: [Row<'_>; M],
                out: &mut [f32],
            ) -> usize {
                let width = if NIBBLES { 64 } else { 32 };
                let row_bytes = matrix.inputs * matrix.bits / 8;
                let groups = matrix.inputs / matrix.group;
                // Two groups in a block, or one in one or more blocks.
                let pair = width > matrix.group;
                let shift = (matrix.group / width).max(1).trailing_zeros();
                let (scales, biases) = (matrix.scales.pointer(), matrix.biases.pointer());
                let mut sums = [[_mm256_setzero_ps(); M]; N];
                let whole = row_bytes / BLOCK_BYTES;
                for at in 0..row_bytes.div_ceil(BLOCK_BYTES) {
                    let group = if width > matrix.group {
                        2 * at
                    } else {
                        at >> shift
                    };
                    for n in 0..N {
                        let byte = (first + output + n) * row_bytes + at * BLOCK_BYTES;
                        let index = (first + output + n) * groups + group;
                        // SAFETY: a block of an output, its scales and biases, and a block of
                        // every row, which are there.
                        unsafe {
                            let from = matrix.words.as_ptr().cast::<i8>().add(byte);
                            let weights = if at < whole {
                                load(from)
                            } else {
                                // Half a block; the activations of the other half are zero.
                                _mm256_zextsi128_si256(_mm_loadu_si128(from.cast()))
                            };
                            let pair = pair && at < whole;
                            let scale = spread::<KIND>(scales, index, pair);
                            let bias = spread::<KIND>(biases, index, pair);
                            let parts = parts::<NIBBLES>(weights);
                            for m in 0..M {
                                let values = x[m].values.as_ptr().add(at * width);
                                let mut dot = _mm256_setzero_si256();
                                for (part, weights) in parts.iter().enumerate() {
                                    if NIBBLES || part < 2 {
                                        let x = load(values.add(part * 16).cast());
                                        dot = $dot(dot, *weights, x);
                                    }
                                }
                                let x_scale = _mm256_broadcast_ss(&*x[m].scales.as_ptr().add(at));
                                let x_sum = _mm256_loadu_ps(x[m].sums.as_ptr().add(at * LANES));
                                let factor = _mm256_mul_ps(scale, x_scale);
                                let sum = &mut sums[n][m];
                                *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, *sum);
                                *sum = _mm256_fmadd_ps(bias, x_sum, *sum);
                            }
                        }
                    }
                }
                for n in 0..N {
                    for m in 0..M {
                        out[m * TILE + output + n] = total(sums[n][m]);
                    }
                }
                N
            }
        }
    };
}

loops!(avx2, "avx2,fma,f16c", dot_avx2);
loops!(vnni, "avx2,fma,f16c,avx512f,avx512vl,avx512vnni", dot_vnni);

/// The weights of a block in 16 bits each: the first ones of all words, the second ones, and so on.
#[target_feature(enable = "avx2")]
#[inline]
fn parts<const NIBBLES: bool>(words: __m256i) -> [__m256i; 4] {
    if NIBBLES {
        let low = _mm256_set1_epi16(15);
        [
            _mm256_and_si256(words, low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(words), low),
            _mm256_and_si256(_mm256_srli_epi16::<8>(words), low),
            _mm256_srli_epi16::<12>(words),
        ]
    } else {
        let zero = _mm256_setzero_si256();
        let low = _mm256_and_si256(words, _mm256_set1_epi16(255));
        [low, _mm256_srli_epi16::<8>(words), zero, zero]
    }
}

/// # Safety
/// 32 bytes lie behind the pointer.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load(from: *const i8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(from.cast()) }
}

/// The number at `index` in all lanes; with `pair`, in the lower four, and the next one in the upper.
///
/// # Safety
/// They are there, of the type that `KIND` says.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn spread<const KIND: u8>(from: *const u8, index: usize, pair: bool) -> __m256 {
    // SAFETY: the caller's promise, for all reads.
    unsafe {
        if KIND == F32 {
            let from = from.cast::<f32>().add(index);
            if !pair {
                return _mm256_broadcast_ss(&*from);
            }
            let both = _mm256_castpd_ps(_mm256_set1_pd(from.cast::<f64>().read_unaligned()));
            return _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
        }
        let from = from.cast::<u16>().add(index);
        let both = if pair {
            from.cast::<i32>().read_unaligned()
        } else {
            i32::from(*from).wrapping_mul(0x1_0001)
        };
        if KIND == BF16 {
            // The upper halves of numbers in single precision.
            let up = _mm256_setr_epi32(16, 16, 16, 16, 0, 0, 0, 0);
            let wide = _mm256_sllv_epi32(_mm256_set1_epi32(both), up);
            _mm256_castsi256_ps(_mm256_and_si256(wide, _mm256_set1_epi32(!0xffff)))
        } else {
            let wide = _mm256_cvtph_ps(_mm_set1_epi32(both));
            _mm256_permutevar_ps(wide, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
        }
    }
}

/// The sum of the lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn total(x: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

#[target_feature(enable = "avx2")]
#[inline]
fn dot_avx2(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    _mm256_add_epi32(sum, _mm256_madd_epi16(w, x))
}

#[target_feature(enable = "avx2,avx512f,avx512vl,avx512vnni")]
#[inline]
fn dot_vnni(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    _mm256_dpwssd_epi32(sum, w, x)
}
