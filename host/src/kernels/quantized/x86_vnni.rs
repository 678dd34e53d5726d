//! The integer products for x86-64 with AVX-512 and the dot products of VNNI.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::{bf16, f16};

use super::activations::{Activations, Band, MOST, PART, Places, ROWS};
use super::x86_integer::totals;
use super::{QuantizedMatrix, Scales, TILE};

/// Lanes of sums.
pub const LANES: usize = 16;

/// How far ahead of the weights in use memory is asked for those that follow.
const AHEAD: usize = 4096;

/// Bytes of weights in a block.
const BLOCK: usize = 64;

/// Whether the processor has what the loops use.
pub fn available() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f")
        && has!("avx512bw")
        && has!("avx512vl")
        && has!("avx512vnni")
        && has!("avx2")
        && has!("fma")
}

/// Consecutive outputs of a matrix.
struct Tile<'a, S> {
    /// Packed weights.
    bytes: &'a [u8],
    /// Per output.
    scales: &'a [S],
    /// As `scales`.
    biases: &'a [S],
    /// At most [`TILE`].
    outputs: usize,
    /// Inputs.
    inputs: usize,
    /// Inputs of a scale.
    group: usize,
}

/// [`super::integer::multiply`].
///
/// # Safety
/// [`available`], and all lengths fit.
pub unsafe fn multiply(
    matrix: &QuantizedMatrix<'_>,
    first: usize,
    outputs: usize,
    x: &Activations,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (matrix.scales, matrix.biases) {
            (Scales::F32(scales), Scales::F32(biases)) => {
                bands(matrix, (scales, biases), first, outputs, x, out);
            }
            (Scales::Bf16(scales), Scales::Bf16(biases)) => {
                bands(matrix, (scales, biases), first, outputs, x, out);
            }
            (Scales::F16(scales), Scales::F16(biases)) => {
                bands(matrix, (scales, biases), first, outputs, x, out);
            }
            _ => unreachable!("scales and biases are of one type"),
        }
    }
}

/// # Safety
/// As [`multiply`].
unsafe fn bands<S: Stored>(
    matrix: &QuantizedMatrix<'_>,
    (scales, biases): (&[S], &[S]),
    first: usize,
    outputs: usize,
    x: &Activations,
    out: &mut [f32],
) {
    let of = |width: usize| first * width..(first + outputs) * width;
    let groups = matrix.inputs / matrix.group;
    let tile = Tile {
        bytes: &matrix.bytes()[of(matrix.inputs * matrix.bits / 8)],
        scales: &scales[of(groups)],
        biases: &biases[of(groups)],
        outputs,
        inputs: matrix.inputs,
        group: matrix.group,
    };
    for (index, out) in out.chunks_mut(ROWS * TILE).enumerate() {
        let x = x.band(index);
        // SAFETY: the caller's promise.
        unsafe {
            match (out.len() / TILE, matrix.bits) {
                (1, 4) => rows::<S, 4, 1>(&tile, x, out),
                (2, 4) => rows::<S, 4, 2>(&tile, x, out),
                (3, 4) => rows::<S, 4, 3>(&tile, x, out),
                (_, 4) => rows::<S, 4, 4>(&tile, x, out),
                (1, _) => rows::<S, 8, 1>(&tile, x, out),
                (2, _) => rows::<S, 8, 2>(&tile, x, out),
                (3, _) => rows::<S, 8, 3>(&tile, x, out),
                (_, _) => rows::<S, 8, 4>(&tile, x, out),
            }
        }
    }
}

/// # Safety
/// [`available`]; the lengths of the tile fit each other and the bits, `x` has M rows of as many inputs, laid
/// out for [`LANES`], and `out` M rows of a tile.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows<S: Stored, const BITS: usize, const M: usize>(
    tile: &Tile<'_, S>,
    x: Band<'_>,
    out: &mut [f32],
) {
    // Adding up the lanes of sums goes eight outputs at a time.
    for first in (0..TILE.min(tile.outputs)).step_by(8) {
        let mut sums = MaybeUninit::<[[[__m512; M]; 2]; 4]>::uninit();
        for pair in 0..4 {
            let first = first + 2 * pair;
            // SAFETY: the caller's promise; each pair is a place of the sums.
            unsafe {
                let two = match tile.outputs.saturating_sub(first) {
                    0 => [[_mm512_setzero_ps(); M]; 2],
                    1 => [
                        outputs_of::<S, BITS, M, 1>(tile, first, x)[0],
                        [_mm512_setzero_ps(); M],
                    ],
                    _ => outputs_of::<S, BITS, M, 2>(tile, first, x),
                };
                sums.as_mut_ptr()
                    .cast::<[[__m512; M]; 2]>()
                    .add(pair)
                    .write(two);
            }
        }
        // SAFETY: all four were written.
        let sums = unsafe { sums.assume_init_ref() }.as_flattened();
        for m in 0..M {
            let totals = totals(std::array::from_fn(|output| halves_added(sums[output][m])));
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
/// As `rows`; the tile has N outputs from `first` on.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn outputs_of<S: Stored, const BITS: usize, const M: usize, const N: usize>(
    tile: &Tile<'_, S>,
    first: usize,
    x: Band<'_>,
) -> [[__m512; M]; N] {
    let mut sums = [[_mm512_setzero_ps(); M]; N];
    let (groups, row_bytes) = (tile.inputs / tile.group, tile.inputs * BITS / 8);
    // Parts that share a scale: 1, 2 or 4.
    let together = tile.group / PART;
    let shift = _mm_cvtsi32_si128(together.trailing_zeros() as i32);
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // The scale of each part of a step, and the part of each lane of a block.
    let of_parts = _mm512_srl_epi32(lanes, shift);
    let of_lanes = if BITS == 4 {
        _mm512_srli_epi32::<2>(lanes)
    } else {
        _mm512_srli_epi32::<3>(lanes)
    };
    // Parts of a block, and elements of it.
    let (per_block, width) = (16 / BITS, BLOCK * 8 / BITS);
    let mut values = x.values.as_ptr();
    // SAFETY: groups and blocks that are there; what lies beyond a row is masked, and zero then.
    unsafe {
        let weights = tile.bytes.as_ptr().add(first * row_bytes);
        let scales = tile.scales.as_ptr().add(first * groups);
        let biases = tile.biases.as_ptr().add(first * groups);
        // A step is as many parts as there are lanes.
        for step in 0..(groups * together).div_ceil(LANES) {
            let group = step * LANES / together;
            let there = first_lanes((groups - group).min(LANES / together));
            let mut step_scales = [_mm512_setzero_ps(); N];
            for (n, sums) in sums.iter_mut().enumerate() {
                let at = n * groups + group;
                // These streams are thin: the processor does not see them coming.
                for stream in [scales, biases] {
                    let ahead = stream.add(at).cast::<i8>().wrapping_add(AHEAD / 8);
                    _mm_prefetch::<_MM_HINT_T0>(ahead);
                }
                let scales = S::sixteen(scales.add(at), there);
                step_scales[n] = _mm512_permutexvar_ps(of_parts, scales);
                let biases = S::sixteen(biases.add(at), there);
                let biases = _mm512_permutexvar_ps(of_parts, biases);
                for (m, sum) in sums.iter_mut().enumerate() {
                    let x = x.sums.as_ptr().add((step * M + m) * LANES);
                    *sum = _mm512_fmadd_ps(biases, _mm512_loadu_ps(x), *sum);
                }
            }
            let start = step * LANES / per_block * BLOCK;
            let end = row_bytes.min(start + LANES / per_block * BLOCK);
            let mut places = of_lanes;
            let mut at = start;
            while at + BLOCK <= end {
                let mut blocks = [([_mm512_setzero_si512(); 4], _mm512_setzero_ps()); N];
                for (n, block) in blocks.iter_mut().enumerate() {
                    let from = weights.add(n * row_bytes + at).cast::<i8>();
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD));
                    let words = _mm512_loadu_si512(from.cast());
                    let scales = _mm512_permutexvar_ps(places, step_scales[n]);
                    *block = (unpacked::<BITS>(words), scales);
                }
                add_block::<BITS, M, N>(&blocks, values, &mut sums);
                values = values.add(M * width);
                places = _mm512_add_epi32(places, _mm512_set1_epi32(per_block as i32));
                at += BLOCK;
            }
            if at < end {
                let there = first_lanes((end - at) / 4);
                let mut blocks = [([_mm512_setzero_si512(); 4], _mm512_setzero_ps()); N];
                for (n, block) in blocks.iter_mut().enumerate() {
                    let from = weights.add(n * row_bytes + at);
                    let words = _mm512_maskz_loadu_epi32(there, from.cast());
                    let scales = _mm512_permutexvar_ps(places, step_scales[n]);
                    *block = (unpacked::<BITS>(words), scales);
                }
                add_block::<BITS, M, N>(&blocks, values, &mut sums);
            }
        }
    }
    sums
}

/// Adds the scaled products of a block of each output.
///
/// # Safety
/// M rows of a block of activations lie behind `values`.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn add_block<const BITS: usize, const M: usize, const N: usize>(
    blocks: &[([__m512i; 4], __m512); N],
    values: *const i16,
    sums: &mut [[__m512; M]; N],
) {
    let parts = 16 / BITS;
    for m in 0..M {
        let mut dots = [_mm512_setzero_si512(); N];
        for part in 0..parts {
            // SAFETY: the caller's promise.
            let x = unsafe { _mm512_loadu_si512(values.add((m * parts + part) * 32).cast()) };
            for (dot, (weights, _)) in dots.iter_mut().zip(blocks) {
                *dot = added(*dot, weights[part], x);
            }
        }
        for ((dot, (_, scales)), sums) in dots.iter().zip(blocks).zip(sums.iter_mut()) {
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(*dot), *scales, sums[m]);
        }
    }
}

/// `sums` and the products of pairs of 16-bit numbers. Written in assembly because compilers make two instructions
/// of the intrinsic, for a latency that does not matter here.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn added(mut sums: __m512i, weights: __m512i, x: __m512i) -> __m512i {
    // SAFETY: only registers, and the processor has the instruction.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {sums}, {weights}, {x}",
            sums = inout(zmm_reg) sums,
            weights = in(zmm_reg) weights,
            x = in(zmm_reg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
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

/// What scales and biases are stored in.
trait Stored: Copy {
    /// Sixteen of them, widened; zero where `there` has no bit, which is not read.
    ///
    /// # Safety
    /// [`available`], and the elements of the bits lie behind the pointer.
    unsafe fn sixteen(from: *const Self, there: __mmask16) -> __m512;
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn sixteen(from: *const Self, there: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(there, from) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn sixteen(from: *const Self, there: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from.cast())) }
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn sixteen(from: *const Self, there: __mmask16) -> __m512 {
        // SAFETY: the caller's promise. A bfloat16 is the upper half of a single.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }
}

/// Row `row` of `rows` of a band, as [`Activations`] lays it out for weights of BITS bits.
///
/// # Safety
/// [`available`].
///
/// # Panics
/// There is no room.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn fill<const BITS: usize>(
    x: &[f32],
    (row, rows): (usize, usize),
    (values, scale, sums): Places<'_>,
) {
    // Elements and parts of a block.
    let (width, parts) = (BLOCK * 8 / BITS, 16 / BITS);
    let blocks = x.len().div_ceil(width);
    assert!(values.len() >= blocks * rows * width && row < rows);
    assert!(sums.len() >= x.len().div_ceil(PART * LANES) * rows * LANES);
    // SAFETY: elements that are there.
    let load = |at: usize| unsafe {
        let there = first_lanes(x.len().saturating_sub(at));
        _mm512_maskz_loadu_ps(there, x.as_ptr().wrapping_add(at))
    };
    let mut most = _mm512_setzero_ps();
    for at in (0..x.len()).step_by(16) {
        most = _mm512_max_ps(most, _mm512_abs_ps(load(at)));
    }
    let most = _mm512_reduce_max_ps(most);
    *scale = most / MOST;
    let inverse = _mm512_set1_ps(if most > 0.0 { MOST / most } else { 0.0 });
    for block in 0..blocks {
        let to = &mut values[(block * rows + row) * width..][..width];
        // Each 32 elements of two vectors in one: four of the first, four of the second, and so on.
        let mut packed = [_mm512_setzero_si512(); 4];
        for (part, packed) in packed.iter_mut().enumerate().take(parts) {
            let at = block * width + part * PART;
            if at >= x.len() {
                break;
            }
            let rounded = |at| _mm512_cvtps_epi32(_mm512_mul_ps(load(at), inverse));
            let (low, high) = (rounded(at), rounded(at + 16));
            *packed = _mm512_packs_epi32(low, high);
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
            let part = at / PART;
            sums[(part / LANES * rows + row) * LANES + part % LANES] = sum as f32;
        }
        let laid_out = if BITS == 4 {
            by_fours(packed)
        } else {
            by_twos(packed)
        };
        for (to, values) in to.chunks_exact_mut(32).zip(laid_out) {
            // SAFETY: as many places.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), values) };
        }
    }
}

/// Of 128 elements the first of each four, the second, and so on.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn by_fours(packed: [__m512i; 4]) -> [__m512i; 4] {
    const PLACES: [i16; 32] = {
        let mut places = [0; 32];
        let mut at = 0;
        while at < 32 {
            let (part, word) = (at / 8, at % 8);
            places[at] = (8 * (word % 4) + 4 * (word / 4) + part) as i16;
            at += 1;
        }
        places
    };
    // SAFETY: 64 bytes.
    let places = unsafe { _mm512_loadu_si512(PLACES.as_ptr().cast()) };
    let [a, b, c, d] = packed.map(|packed| _mm512_permutexvar_epi16(places, packed));
    // Now quarters of the four have to change places.
    let (ab, cd) = (
        _mm512_shuffle_i32x4::<0x44>(a, b),
        _mm512_shuffle_i32x4::<0x44>(c, d),
    );
    let (ab_high, cd_high) = (
        _mm512_shuffle_i32x4::<0xee>(a, b),
        _mm512_shuffle_i32x4::<0xee>(c, d),
    );
    [
        _mm512_shuffle_i32x4::<0x88>(ab, cd),
        _mm512_shuffle_i32x4::<0xdd>(ab, cd),
        _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high),
        _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high),
    ]
}

/// Of 64 elements the even ones and the odd ones.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn by_twos([low, high, ..]: [__m512i; 4]) -> [__m512i; 4] {
    const PLACES: [i16; 64] = {
        let mut places = [0; 64];
        let mut at = 0;
        while at < 64 {
            let (element, odd) = (at % 32 * 2, at / 32);
            let (source, element) = (element / 32, element % 32 + odd);
            let (vector, element) = (element / 16, element % 16);
            places[at] = (32 * source + 8 * (element / 4) + 4 * vector + element % 4) as i16;
            at += 1;
        }
        places
    };
    // SAFETY: twice 64 bytes.
    let [even, odd] = [0, 32].map(|at| unsafe { _mm512_loadu_si512(PLACES[at..].as_ptr().cast()) });
    let zero = _mm512_setzero_si512();
    [
        _mm512_permutex2var_epi16(low, even, high),
        _mm512_permutex2var_epi16(low, odd, high),
        zero,
        zero,
    ]
}
