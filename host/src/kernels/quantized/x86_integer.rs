//! The integer products for x86-64 with AVX2.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::TILE;
use super::activations::Band;
use super::integer::Tile;

/// How far ahead of the weights in use memory is asked for those that follow.
const AHEAD: usize = 2048;

/// Lanes of sums.
pub const LANES: usize = 8;

/// Bytes of weights in a block.
const BLOCK_BYTES: usize = 32;

/// # Safety
/// The lengths of the tile fit each other, `x` has M rows of as many inputs, and `out` M
/// rows of a tile.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn rows<const M: usize>(tile: &Tile<'_>, x: Band<'_>, out: &mut [f32]) {
    // All sums first: adding up their lanes goes eight outputs at a time.
    let mut sums = [[_mm256_setzero_ps(); M]; TILE];
    for (output, sums) in sums.iter_mut().enumerate().take(tile.outputs) {
        // SAFETY: the caller's promise.
        *sums = unsafe {
            if tile.bits == 4 {
                row::<4, M>(tile, output, x)
            } else {
                row::<8, M>(tile, output, x)
            }
        };
    }
    for (first, sums) in (0..TILE).step_by(8).zip(sums.as_chunks::<8>().0) {
        for m in 0..M {
            let totals = totals(sums.map(|sums| sums[m]));
            let totals = _mm256_mul_ps(totals, _mm256_set1_ps(x.scales[m]));
            let out = &mut out[m * TILE + first..][..8];
            // SAFETY: eight places.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), totals) };
        }
    }
}

/// The sums of one output.
///
/// # Safety
/// As `rows`; the tile has as many bits as the parameter says.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn row<const BITS: usize, const M: usize>(
    tile: &Tile<'_>,
    output: usize,
    x: Band<'_>,
) -> [__m256; M] {
    let (per_block, width) = (BITS / 4, BLOCK_BYTES * 8 / BITS);
    let (parts, row_bytes) = (tile.parts(), tile.inputs * BITS / 8);
    let mut sums = [_mm256_setzero_ps(); M];
    // SAFETY: parts and blocks that are there.
    unsafe {
        let biases = tile.biases.as_ptr().add(output * parts);
        for step in 0..parts.div_ceil(LANES) {
            let left = parts - step * LANES;
            let from = biases.add(step * LANES);
            let biases = if left >= LANES {
                _mm256_loadu_ps(from)
            } else {
                _mm256_maskload_ps(from, first_lanes(left))
            };
            for (m, sum) in sums.iter_mut().enumerate() {
                let x = x.sums.as_ptr().add((step * M + m) * LANES);
                *sum = _mm256_fmadd_ps(biases, _mm256_loadu_ps(x), *sum);
            }
        }
        let scales = tile.scales.as_ptr().add(output * parts);
        let weights = tile.bytes.as_ptr().add(output * row_bytes).cast::<i8>();
        let whole = row_bytes / BLOCK_BYTES;
        let pairs = whole / 2;
        for at in (0..2 * pairs).step_by(2) {
            let from = weights.add(at * BLOCK_BYTES);
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD));
            let scales = of_blocks::<BITS>(scales.add(at * 2 / per_block));
            for (block, scale) in scales.into_iter().enumerate() {
                let weights = unpacked::<BITS>(load(from.add(block * BLOCK_BYTES)));
                let values = x.values.as_ptr().add((at + block) * M * width);
                add_block::<BITS, M>(weights, scale, values, &mut sums);
            }
        }
        if !whole.is_multiple_of(2) {
            let at = whole - 1;
            let weights = unpacked::<BITS>(load(weights.add(at * BLOCK_BYTES)));
            let scale = of_block::<BITS>(scales.add(at * 2 / per_block));
            let values = x.values.as_ptr().add(at * M * width);
            add_block::<BITS, M>(weights, scale, values, &mut sums);
        }
        if !row_bytes.is_multiple_of(BLOCK_BYTES) {
            // Half a block; the activations of the other half are zero.
            let half = _mm_loadu_si128(weights.add(whole * BLOCK_BYTES).cast());
            let half = unpacked::<BITS>(_mm256_zextsi128_si256(half));
            let scale = _mm256_set1_ps(*scales.add(whole * 2 / per_block));
            let values = x.values.as_ptr().add(whole * M * width);
            add_block::<BITS, M>(half, scale, values, &mut sums);
        }
    }
    sums
}

/// Adds the scaled products of a block.
///
/// # Safety
/// M rows of a block of activations lie behind `values`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn add_block<const BITS: usize, const M: usize>(
    weights: [__m256i; 4],
    scale: __m256,
    values: *const i16,
    sums: &mut [__m256; M],
) {
    let parts = 16 / BITS;
    for (m, sum) in sums.iter_mut().enumerate() {
        let mut dot = _mm256_setzero_si256();
        for (part, weights) in weights.iter().enumerate().take(parts) {
            // SAFETY: the caller's promise.
            let x = unsafe { load(values.add((m * parts + part) * 16).cast()) };
            dot = _mm256_add_epi32(dot, _mm256_madd_epi16(*weights, x));
        }
        *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *sum);
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

/// The weights of a block in 16 bits each: the first ones of all words, the second ones, and so on.
#[target_feature(enable = "avx2")]
#[inline]
fn unpacked<const BITS: usize>(words: __m256i) -> [__m256i; 4] {
    if BITS == 4 {
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

/// The scales of a block: of two parts for weights of 4 bits, of one for 8.
///
/// # Safety
/// Two numbers lie behind the pointer.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn of_block<const BITS: usize>(scales: *const f32) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        if BITS == 4 {
            let both = _mm256_castpd_ps(_mm256_set1_pd(scales.cast::<f64>().read_unaligned()));
            _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
        } else {
            _mm256_set1_ps(*scales)
        }
    }
}

/// The scales of two blocks.
///
/// # Safety
/// Twice as many numbers lie behind the pointer as for one.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn of_blocks<const BITS: usize>(scales: *const f32) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if BITS == 4 {
            let four = _mm_loadu_ps(scales);
            let four = _mm256_set_m128(four, four);
            [
                _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
                _mm256_permutevar_ps(four, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)),
            ]
        } else {
            [_mm256_set1_ps(*scales), _mm256_set1_ps(*scales.add(1))]
        }
    }
}

/// Which of eight lanes are the first `count`.
#[target_feature(enable = "avx2")]
#[inline]
fn first_lanes(count: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
}

/// The sums of the lanes of each: `((0+4) + (2+6)) + ((1+5) + (3+7))`.
#[target_feature(enable = "avx2")]
#[inline]
pub fn totals(x: [__m256; 8]) -> __m256 {
    // Two sums of four lanes.
    let halves = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    // Four sums of two.
    let quarters = |a, b| {
        let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
    };
    let a = quarters(halves(x[0], x[1]), halves(x[2], x[3]));
    let b = quarters(halves(x[4], x[5]), halves(x[6], x[7]));
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
    let sums = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(a, b));
    _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// What scales and biases are stored in.
pub trait Stored: Copy + Default {
    /// Eight of them, widened.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C, and eight elements lie behind the pointer.
    unsafe fn eight(from: *const Self) -> __m256;
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn eight(from: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn eight(from: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn eight(from: *const Self) -> __m256 {
        // SAFETY: the caller's promise. A bfloat16 is the upper half of a single.
        unsafe {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
    }
}

/// `from`, widened, each element TIMES times: 1, 2 or 4. Asks memory for as many after them.
///
/// # Panics
/// The lengths do not fit.
#[target_feature(enable = "avx2,f16c")]
pub fn spread<S: Stored, const TIMES: usize>(from: &[S], to: &mut [f32]) {
    assert_eq!(TIMES * from.len(), to.len());
    let (whole, last) = from.as_chunks::<8>();
    let (to, last_to) = to.split_at_mut(TIMES * 8 * whole.len());
    for (eight, to) in whole.iter().zip(to.chunks_exact_mut(8 * TIMES)) {
        let next = eight.as_ptr().wrapping_add(from.len());
        _mm_prefetch::<_MM_HINT_T0>(next.cast());
        // SAFETY: eight elements, and room for TIMES as many.
        unsafe { spread_eight::<TIMES>(S::eight(eight.as_ptr()), to.as_mut_ptr()) };
    }
    if last.is_empty() {
        return;
    }
    let (mut narrow, mut wide) = ([S::default(); 8], [0.0; 32]);
    narrow[..last.len()].copy_from_slice(last);
    // SAFETY: as above.
    unsafe { spread_eight::<TIMES>(S::eight(narrow.as_ptr()), wide.as_mut_ptr()) };
    last_to.copy_from_slice(&wide[..last_to.len()]);
}

/// # Safety
/// There is room for 8 TIMES elements.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn spread_eight<const TIMES: usize>(x: __m256, to: *mut f32) {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for part in 0..TIMES {
        // Place `8 part + lane` holds element `(8 part + lane) / TIMES`.
        let places = _mm256_add_epi32(lanes, _mm256_set1_epi32(8 * part as i32));
        let from = _mm256_srli_epi32::<1>(places);
        let from = match TIMES {
            1 => places,
            2 => from,
            _ => _mm256_srli_epi32::<1>(from),
        };
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(to.add(8 * part), _mm256_permutevar8x32_ps(x, from)) };
    }
}
