//! The inner loops of attention: scores, softmax and the mix of values, for the queries that share a
//! key head.

use std::ops::Range;

use super::lanes::{self, Float, LANES, exp_negative};
#[cfg(target_arch = "x86_64")]
use super::mix_avx512;

/// Keys, or values, that all queries pass over together.
const TILE: usize = 64;

/// Dimensions of a sum that fit registers.
const PART: usize = 32;

/// Keys and values of one head, column by column.
#[derive(Clone, Copy)]
pub struct KeyHead<'a, T> {
    /// From the head's first key on.
    pub keys: &'a [T],
    /// From the head's first value on.
    pub values: &'a [T],
    /// Elements between two keys, and between two values.
    pub strides: [usize; 2],
    /// Key `s` lies in column `s % columns`.
    pub columns: usize,
}

/// Where the keys and values of one head are looked up.
pub trait Lookup: Copy {
    /// From a position on, how many lie one after the other; at least one.
    fn run(&self, position: usize) -> usize;

    /// The keys (`side` 0) or values (1) of positions that lie one after the other, in single precision,
    /// and the elements from one to the next.
    fn get<'t>(
        &'t self,
        side: usize,
        positions: Range<usize>,
        dim: usize,
        to: &'t mut Vec<f32>,
    ) -> (&'t [f32], usize);
}

impl<T: Float> Lookup for KeyHead<'_, T> {
    #[inline(always)]
    fn run(&self, position: usize) -> usize {
        self.columns - position % self.columns
    }

    #[inline(always)]
    fn get<'t>(
        &'t self,
        side: usize,
        positions: Range<usize>,
        dim: usize,
        to: &'t mut Vec<f32>,
    ) -> (&'t [f32], usize) {
        let from = if side == 0 { self.keys } else { self.values };
        let column = positions.start % self.columns;
        let columns = column..column + positions.len();
        widened(from, self.strides[side], columns, dim, to)
    }
}

/// The positions `span` in pieces that all queries pass over together.
#[inline(always)]
fn tiles(span: Range<usize>, head: impl Lookup) -> impl Iterator<Item = Range<usize>> {
    let mut next = span.start;
    std::iter::from_fn(move || {
        let first = next;
        if first >= span.end {
            return None;
        }
        next = span.end.min(first + TILE.min(head.run(first)));
        Some(first..next)
    })
}

/// What one piece works in.
pub struct Scratch {
    dim: usize,
    /// `[queries, dim]`, scaled.
    pub queries: Vec<f32>,
    /// `[queries, keys]`.
    scores: Vec<f32>,
    /// `[queries, dim]`: the outcome.
    pub sums: Vec<f32>,
    wide: Vec<f32>,
}

impl Scratch {
    /// Room for some queries over some keys.
    pub fn new(queries: usize, dim: usize) -> Self {
        Self {
            dim,
            queries: vec![0.0; queries * dim],
            scores: Vec::new(),
            sums: vec![0.0; queries * dim],
            wide: Vec::new(),
        }
    }

    /// Mixes the values of the keys `from..to`, of which query `i` sees key `s` if `sees(i, s)`.
    pub fn mix(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if mix_avx512::fits(self.dim) {
                // SAFETY: the processor has it.
                return unsafe { self.mix_avx512(head, span, sees) };
            }
            if has!("avx2") && has!("fma") {
                // SAFETY: the processor has it.
                return unsafe { self.mix_avx2(head, span, sees) };
            }
        }
        self.mix_lanes(head, span, sees, lanes::fma);
    }

    /// # Safety
    /// [`mix_avx512::fits`] for the dimensions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn mix_avx512(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        let (dim, keys) = (self.dim, span.len());
        self.begin(keys);
        for tile in tiles(span.clone(), head) {
            let first = tile.start;
            let (tile_keys, stride) = head.get(0, tile.clone(), dim, &mut self.wide);
            for (index, query) in self.queries.chunks_exact(dim).enumerate() {
                let scores = &mut self.scores[index * keys + first - span.start..][..tile.len()];
                // SAFETY: the caller's promise.
                unsafe { mix_avx512::scores(query, tile_keys, stride, scores) };
                for (s, score) in tile.clone().zip(scores) {
                    if !sees(index, s) {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
        }
        self.share_out(&span);
        for tile in tiles(span.clone(), head) {
            let (first, count) = (tile.start - span.start, tile.len());
            let values = head.get(1, tile, dim, &mut self.wide);
            let shares = (&self.scores[first..], keys);
            // SAFETY: the caller's promise.
            unsafe { mix_avx512::add_values(shares, values, count, dim, &mut self.sums) };
        }
    }

    /// Room for the scores of so many keys, and no sums yet.
    fn begin(&mut self, keys: usize) {
        let queries = self.queries.len() / self.dim;
        self.scores.clear();
        self.scores.resize(queries * keys, f32::NEG_INFINITY);
        self.sums.fill(0.0);
    }

    /// Makes shares of the scores of the keys of a span.
    #[inline(always)]
    fn share_out(&mut self, span: &Range<usize>) {
        for scores in self.scores.chunks_exact_mut(span.len().max(1)) {
            softmax(scores, span.start);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn mix_avx2(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        self.mix_lanes(head, span, sees, f32::mul_add);
    }

    #[inline(always)]
    fn mix_lanes(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
        fma: impl Fn(f32, f32, f32) -> f32 + Copy,
    ) {
        let (dim, keys) = (self.dim, span.len());
        self.begin(keys);
        // A tile of keys, then of values, stays near while all queries pass over it.
        for tile in tiles(span.clone(), head) {
            let first = tile.start;
            let (tile_keys, stride) = head.get(0, tile.clone(), dim, &mut self.wide);
            for (index, query) in self.queries.chunks_exact(dim).enumerate() {
                let scores = &mut self.scores[index * keys + first - span.start..];
                for ((s, score), key) in tile.clone().zip(scores).zip(tile_keys.chunks(stride)) {
                    if sees(index, s) {
                        *score = dot(query, &key[..dim], fma);
                    }
                }
            }
        }
        self.share_out(&span);
        for tile in tiles(span.clone(), head) {
            let (first, count) = (tile.start, tile.len());
            let (values, stride) = head.get(1, tile, dim, &mut self.wide);
            for (index, sums) in self.sums.chunks_exact_mut(dim).enumerate() {
                let shares = &self.scores[index * keys + first - span.start..][..count];
                let (parts, rest) = sums.as_chunks_mut::<PART>();
                for (part, sums) in parts.iter_mut().enumerate() {
                    // In registers from the first key of the tile to the last.
                    let mut own = *sums;
                    for (share, value) in shares.iter().zip(values.chunks(stride)) {
                        if *share != 0.0 {
                            let value = &value[part * PART..][..PART];
                            for i in 0..PART {
                                own[i] = fma(*share, value[i], own[i]);
                            }
                        }
                    }
                    *sums = own;
                }
                let at = dim - rest.len();
                for (share, value) in shares.iter().zip(values.chunks(stride)) {
                    if *share != 0.0 {
                        for (sum, x) in rest.iter_mut().zip(&value[at..dim]) {
                            *sum = fma(*share, *x, *sum);
                        }
                    }
                }
            }
        }
    }
}

/// Some columns in single precision, and the elements from one to the next.
#[inline(always)]
pub(super) fn widened<'a, T: Float>(
    from: &'a [T],
    stride: usize,
    columns: Range<usize>,
    dim: usize,
    to: &'a mut Vec<f32>,
) -> (&'a [f32], usize) {
    if let Some(wide) = T::as_f32(from) {
        let end = ((columns.end - 1) * stride + dim).max(columns.start * stride);
        return (&wide[columns.start * stride..end], stride);
    }
    to.clear();
    for column in columns {
        to.extend(from[column * stride..][..dim].iter().map(|x| x.wide()));
    }
    (to, dim)
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32], fma: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    let (a_blocks, a_rest) = a.as_chunks::<8>();
    let (b_blocks, b_rest) = b.as_chunks::<8>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..8 {
            lanes[i] = fma(a[i], b[i], lanes[i]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// In place, the first score being that of the key `start`; a query that sees nothing gets zeros.
#[inline(always)]
fn softmax(scores: &mut [f32], start: usize) {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if most == f32::NEG_INFINITY {
        scores.fill(0.0);
        return;
    }
    for score in scores.iter_mut() {
        let hidden = *score == f32::NEG_INFINITY;
        let e = exp_negative(*score - most);
        *score = if hidden { 0.0 } else { e };
    }
    // A key's lane is that of its number, so that keys that are not seen at the ends change nothing.
    let mut sums = [0.0; LANES];
    let before = (start % LANES).wrapping_neg() % LANES;
    let (first, rest) = scores.split_at(before.min(scores.len()));
    for (sum, score) in sums[start % LANES..].iter_mut().zip(first) {
        *sum += score;
    }
    for scores in rest.chunks(LANES) {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *sum += score;
        }
    }
    let sum = lanes::total(sums);
    for score in scores.iter_mut() {
        *score /= sum;
    }
}
