//! The integer products for x86-64 with AVX-512 and the dot products of VNNI.

use std::arch::x86_64::*;

use super::TILE;
use super::activations::Band;
use super::integer::Tile;
use super::x86_integer::{AHEAD, totals};

/// Lanes of sums.
pub const LANES: usize = 16;

/// Bytes of weights in a block.
const BLOCK: usize = 64;

/// Whether the processor has what the loops use.
pub fn available() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f") && has!("avx512vl") && has!("avx512vnni") && has!("avx2") && has!("fma")
}

/// # Safety
/// [`available`]; the lengths of the tile fit each other, `x` has M rows of as many inputs, laid out for
/// [`LANES`], and `out` M rows of a tile.
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512vnni")]
pub unsafe fn rows<const M: usize>(tile: &Tile<'_>, x: Band<'_>, out: &mut [f32]) {
    // All sums first: adding up their lanes goes eight outputs at a time.
    let mut sums = [[_mm512_setzero_ps(); M]; TILE];
    for (pair, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let first = 2 * pair;
        let left = tile.outputs.saturating_sub(first);
        let [one, _] = sums;
        // SAFETY: the caller's promise.
        unsafe {
            match (left, tile.bits) {
                (0, _) => break,
                (1, 4) => outputs::<4, M, 1>(tile, first, x, std::array::from_mut(one)),
                (1, _) => outputs::<8, M, 1>(tile, first, x, std::array::from_mut(one)),
                (_, 4) => outputs::<4, M, 2>(tile, first, x, sums),
                (_, _) => outputs::<8, M, 2>(tile, first, x, sums),
            }
        }
    }
    for (first, sums) in (0..TILE).step_by(8).zip(sums.as_chunks::<8>().0) {
        for m in 0..M {
            let totals = totals(sums.map(|sums| halves_added(sums[m])));
            let totals = _mm256_mul_ps(totals, _mm256_set1_ps(x.scales[m]));
            let out = &mut out[m * TILE + first..][..8];
            // SAFETY: eight places.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), totals) };
        }
    }
}

/// The sums of N outputs side by side: what is loaded of `x` serves all of them.
///
/// # Safety
/// As `rows`; the tile has as many bits as the parameter says, and N outputs from `first` on.
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512vnni")]
#[inline]
unsafe fn outputs<const BITS: usize, const M: usize, const N: usize>(
    tile: &Tile<'_>,
    first: usize,
    x: Band<'_>,
    sums: &mut [[__m512; M]; N],
) {
    let (parts, row_bytes) = (tile.parts(), tile.inputs * BITS / 8);
    // Parts of a block.
    let per_block = BLOCK * 8 / BITS / 32;
    // SAFETY: parts and blocks that are there.
    unsafe {
        let biases = tile.biases.as_ptr().add(first * parts);
        for step in 0..parts.div_ceil(LANES) {
            let lanes = first_lanes(parts - step * LANES);
            for (n, sums) in sums.iter_mut().enumerate() {
                let from = biases.add(n * parts + step * LANES);
                let biases = _mm512_maskz_loadu_ps(lanes, from);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let x = x.sums.as_ptr().add((step * M + m) * LANES);
                    *sum = _mm512_fmadd_ps(biases, _mm512_loadu_ps(x), *sum);
                }
            }
        }
        let scales = tile.scales.as_ptr().add(first * parts);
        let bytes = tile.bytes.as_ptr().add(first * row_bytes);
        let values = x.values.as_ptr();
        let whole = row_bytes / BLOCK;
        for at in 0..whole {
            let mut weights = [([_mm512_setzero_si512(); 4], _mm512_setzero_ps()); N];
            for (n, weights) in weights.iter_mut().enumerate() {
                let from = bytes.add(n * row_bytes + at * BLOCK).cast::<i8>();
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD));
                let scales = scales.add(n * parts + at * per_block);
                let scales = if BITS == 4 {
                    _mm_loadu_ps(scales)
                } else {
                    _mm_castpd_ps(_mm_load_sd(scales.cast()))
                };
                let words = _mm512_loadu_si512(from.cast());
                *weights = (unpacked::<BITS>(words), spread::<BITS>(scales));
            }
            add_block::<BITS, M, N>(weights, values.add(at * M * BLOCK * 8 / BITS), sums);
        }
        let rest = row_bytes % BLOCK;
        if rest == 0 {
            return;
        }
        // Weights and scales beyond a row are zero.
        let words = first_lanes(rest / 4);
        let parts_left = (parts - whole * per_block) as u8;
        let mut weights = [([_mm512_setzero_si512(); 4], _mm512_setzero_ps()); N];
        for (n, weights) in weights.iter_mut().enumerate() {
            let from = bytes.add(n * row_bytes + whole * BLOCK);
            let scales = scales.add(n * parts + whole * per_block);
            let scales = _mm_maskz_loadu_ps((1 << parts_left) - 1, scales);
            let words = _mm512_maskz_loadu_epi32(words, from.cast());
            *weights = (unpacked::<BITS>(words), spread::<BITS>(scales));
        }
        add_block::<BITS, M, N>(weights, values.add(whole * M * BLOCK * 8 / BITS), sums);
    }
}

/// Adds the scaled products of a block of each output.
///
/// # Safety
/// M rows of a block of activations lie behind `values`.
#[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512vnni")]
#[inline]
unsafe fn add_block<const BITS: usize, const M: usize, const N: usize>(
    weights: [([__m512i; 4], __m512); N],
    values: *const i16,
    sums: &mut [[__m512; M]; N],
) {
    let parts = 16 / BITS;
    for m in 0..M {
        let mut dots = [_mm512_setzero_si512(); N];
        for part in 0..parts {
            // SAFETY: the caller's promise.
            let x = unsafe { _mm512_loadu_si512(values.add((m * parts + part) * 32).cast()) };
            for (dot, (weights, _)) in dots.iter_mut().zip(&weights) {
                *dot = _mm512_dpwssd_epi32(*dot, weights[part], x);
            }
        }
        for ((dot, (_, scales)), sums) in dots.iter().zip(&weights).zip(sums.iter_mut()) {
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(*dot), *scales, sums[m]);
        }
    }
}

/// The weights of a block in 16 bits each: the first ones of all words, the second ones, and so on.
#[target_feature(enable = "avx512f")]
#[inline]
fn unpacked<const BITS: usize>(words: __m512i) -> [__m512i; 4] {
    // Shifts of 32 bits do: what comes in from the word above is masked away.
    if BITS == 4 {
        let low = _mm512_set1_epi32(0x000f_000f);
        [
            _mm512_and_si512(words, low),
            _mm512_and_si512(_mm512_srli_epi32::<4>(words), low),
            _mm512_and_si512(_mm512_srli_epi32::<8>(words), low),
            _mm512_and_si512(_mm512_srli_epi32::<12>(words), low),
        ]
    } else {
        let (low, zero) = (_mm512_set1_epi32(0x00ff_00ff), _mm512_setzero_si512());
        let high = _mm512_and_si512(_mm512_srli_epi32::<8>(words), low);
        [_mm512_and_si512(words, low), high, zero, zero]
    }
}

/// The scales of a block's parts for its lanes: of four for weights of 4 bits, of two for 8.
#[target_feature(enable = "avx512f")]
#[inline]
fn spread<const BITS: usize>(scales: __m128) -> __m512 {
    let places = if BITS == 4 {
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    } else {
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
    };
    _mm512_permutexvar_ps(places, _mm512_castps128_ps512(scales))
}

/// The first `count` of sixteen lanes.
fn first_lanes(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// The upper eight lanes added to the lower ones.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves_added(x: __m512) -> __m256 {
    let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x));
    _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(upper))
}
