//! The inner loops of attention for x86-64 with AVX-512. Every score and every sum of values is made in an order
//! that does not depend on what else is computed beside it.

use std::arch::x86_64::*;

/// Keys whose scores are made together, and elements of a vector.
const LANES: usize = 16;

/// Dimensions of sums that stay in registers.
const PART: usize = 64;

/// Queries whose sums do.
const QUERIES: usize = 4;

/// Whether the processor and the head's dimensions allow it.
pub fn fits(dim: usize) -> bool {
    dim.is_multiple_of(LANES) && std::arch::is_x86_feature_detected!("avx512f")
}

/// The products of a query with keys that lie `stride` elements apart, one per place of `scores`.
///
/// # Safety
/// [`fits`] for the query's length.
///
/// # Panics
/// There are not as many keys.
#[target_feature(enable = "avx512f")]
pub unsafe fn scores(query: &[f32], keys: &[f32], stride: usize, scores: &mut [f32]) {
    let (dim, count) = (query.len(), scores.len());
    assert!(count == 0 || (count - 1) * stride + dim <= keys.len());
    for (block, scores) in scores.chunks_mut(LANES).enumerate() {
        // Where there are fewer keys, the last one stands in for those that are not there.
        let last = block * LANES + scores.len() - 1;
        let key = |lane: usize| (block * LANES + lane).min(last) * stride;
        let mut sums = [_mm512_setzero_ps(); LANES];
        for at in (0..dim).step_by(LANES) {
            // SAFETY: inside the query and each key, by the assertion.
            unsafe {
                let query = _mm512_loadu_ps(query.as_ptr().add(at));
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let key = _mm512_loadu_ps(keys.as_ptr().add(key(lane) + at));
                    *sum = _mm512_fmadd_ps(query, key, *sum);
                }
            }
        }
        let there = !0 >> (LANES - scores.len());
        // SAFETY: the places of the bits.
        unsafe { _mm512_mask_storeu_ps(scores.as_mut_ptr(), there, totals(sums)) };
    }
}

/// The sums of the lanes of each, all made in the same order.
#[target_feature(enable = "avx512f")]
#[inline]
fn totals(x: [__m512; LANES]) -> __m512 {
    let pairs = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let fours = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    };
    let quarters = |a, b| {
        let even = _mm512_shuffle_f32x4::<0x88>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    let four = |at: usize| {
        let (a, b) = (pairs(x[at], x[at + 1]), pairs(x[at + 2], x[at + 3]));
        fours(a, b)
    };
    quarters(quarters(four(0), four(4)), quarters(four(8), four(12)))
}

/// Adds values, which lie `stride` elements apart, to the sums `[queries, dim]`, each times its share. The shares
/// of a query begin `step` elements after those of the one before. A share of zero adds nothing, whatever the
/// value is.
///
/// # Safety
/// [`fits`] for `dim`.
///
/// # Panics
/// There are not as many values or shares.
#[target_feature(enable = "avx512f")]
pub unsafe fn add_values(
    (shares, step): (&[f32], usize),
    (values, stride): (&[f32], usize),
    count: usize,
    dim: usize,
    sums: &mut [f32],
) {
    let queries = sums.len() / dim;
    assert!(queries == 0 || (queries - 1) * step + count <= shares.len());
    assert!(count == 0 || (count - 1) * stride + dim <= values.len());
    for (index, sums) in sums.chunks_mut(QUERIES * dim).enumerate() {
        let shares = &shares[index * QUERIES * step..];
        for part in (0..dim).step_by(PART) {
            let vectors = (dim - part).min(PART) / LANES;
            // SAFETY: [`fits`], and by the assertions everything is there.
            unsafe {
                let shares = (shares.as_ptr(), step);
                let values = (values.as_ptr().add(part), stride);
                let to = (sums.as_mut_ptr().add(part), dim);
                match sums.len() / dim {
                    1 => few::<1>(shares, values, count, vectors, to),
                    2 => few::<2>(shares, values, count, vectors, to),
                    3 => few::<3>(shares, values, count, vectors, to),
                    _ => few::<QUERIES>(shares, values, count, vectors, to),
                }
            }
        }
    }
}

/// Up to [`PART`] dimensions for Q queries: places, and the elements from one to the next.
///
/// # Safety
/// The places are there.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn few<const Q: usize>(
    (shares, step): (*const f32, usize),
    (values, stride): (*const f32, usize),
    count: usize,
    vectors: usize,
    (sums, dim): (*mut f32, usize),
) {
    const V: usize = PART / LANES;
    let there: [__mmask16; V] = std::array::from_fn(|v| if v < vectors { !0 } else { 0 });
    // SAFETY: the caller's promise; vectors that are not there are masked.
    unsafe {
        let place = |q: usize, v: usize| sums.wrapping_add(q * dim + v * LANES);
        let mut own = [[_mm512_setzero_ps(); V]; Q];
        for (q, own) in own.iter_mut().enumerate() {
            for (v, own) in own.iter_mut().enumerate() {
                *own = _mm512_maskz_loadu_ps(there[v], place(q, v));
            }
        }
        for at in 0..count {
            let mut value = [_mm512_setzero_ps(); V];
            for (v, value) in value.iter_mut().enumerate() {
                let from = values.wrapping_add(at * stride + v * LANES);
                *value = _mm512_maskz_loadu_ps(there[v], from);
            }
            for (q, own) in own.iter_mut().enumerate() {
                let share = _mm512_set1_ps(*shares.add(q * step + at));
                let counts = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(share, _mm512_setzero_ps());
                for (own, value) in own.iter_mut().zip(value) {
                    *own = _mm512_mask3_fmadd_ps(share, value, *own, counts);
                }
            }
        }
        for (q, own) in own.iter().enumerate() {
            for (v, own) in own.iter().enumerate() {
                _mm512_mask_storeu_ps(place(q, v), there[v], *own);
            }
        }
    }
}
