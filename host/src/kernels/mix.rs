//! The inner loops of attention: scores, softmax and the mix of values, for the queries that share a
//! key head.

use std::ops::Range;

use super::lanes::{self, Float, LANES, exp_negative};
#[cfg(target_arch = "x86_64")]
use super::mix_avx512;

/// Positions that are mixed on their own, before they come to those of the blocks before: what lies in a block
/// depends on the positions alone. So the sums are the same whoever else is looked at, and whether one thread goes
/// through all blocks or several share them.
pub const BLOCK: usize = 64;

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

/// The positions of a span, block by block.
#[inline(always)]
fn blocks(span: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let numbers = span.start / BLOCK..span.end.div_ceil(BLOCK);
    numbers.map(move |block| span.start.max(block * BLOCK)..span.end.min((block + 1) * BLOCK))
}

/// The positions of a block in pieces that lie one after the other, and the place of the first in the block.
#[inline(always)]
fn runs(block: Range<usize>, head: impl Lookup) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut next = block.start;
    std::iter::from_fn(move || {
        let first = next;
        if first >= block.end {
            return None;
        }
        next = block.end.min(first + head.run(first));
        Some((first % BLOCK, first..next))
    })
}

/// What one piece of work is done in.
#[derive(Default)]
pub struct Scratch {
    dim: usize,
    /// `[queries, dim]`, scaled.
    pub queries: Vec<f32>,
    /// `[queries, BLOCK]`: of one block.
    scores: Vec<f32>,
    /// What came of one block.
    part: Vec<f32>,
    /// `[queries, dim]`: the outcome.
    pub sums: Vec<f32>,
    /// Of the blocks so far, per query, the largest score and the sum of shares.
    ends: Vec<[f32; 2]>,
    wide: Vec<f32>,
}

/// Numbers that a block makes of so many queries: `[queries, dim]` of sums, which are yet to be divided by the sum
/// of the shares, then per query the largest score and the sum of shares.
pub fn part_len(queries: usize, dim: usize) -> usize {
    queries * (dim + 2)
}

impl Scratch {
    /// Room for some queries.
    pub fn begin(&mut self, queries: usize, dim: usize) {
        self.dim = dim;
        self.queries.resize(queries * dim, 0.0);
        self.scores.resize(queries * BLOCK, 0.0);
        self.part.resize(part_len(queries, dim), 0.0);
        self.sums.clear();
        self.sums.resize(queries * dim, 0.0);
        self.ends.clear();
        self.ends.resize(queries, [f32::NEG_INFINITY, 0.0]);
    }

    /// Mixes the values of a span. `hide` replaces the scores of a query at positions that it does not see by minus
    /// infinity.
    pub fn mix(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        hide: impl Fn(usize, Range<usize>, &mut [f32]),
    ) {
        let mut part = std::mem::take(&mut self.part);
        for block in blocks(span) {
            self.block(head, block, &hide, &mut part);
            self.add(&part);
        }
        self.part = part;
        self.end();
    }

    /// What [`Scratch::mix`] makes of each block of a span, one after the other to `parts`.
    ///
    /// # Panics
    /// There are not as many places.
    pub fn mix_parts(
        &mut self,
        head: impl Lookup,
        span: Range<usize>,
        hide: impl Fn(usize, Range<usize>, &mut [f32]),
        parts: &mut [f32],
    ) {
        for (block, part) in blocks(span).zip(parts.chunks_exact_mut(self.part.len())) {
            self.block(head, block, &hide, part);
        }
    }

    /// Mixes what all blocks of a span gave.
    pub fn gather(&mut self, parts: &[f32]) {
        for part in parts.chunks_exact(self.part.len()) {
            self.add(part);
        }
        self.end();
    }

    /// One block.
    #[inline(always)]
    fn block(
        &mut self,
        head: impl Lookup,
        block: Range<usize>,
        hide: &impl Fn(usize, Range<usize>, &mut [f32]),
        part: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if mix_avx512::fits(self.dim) {
                // SAFETY: the processor has it.
                return unsafe { self.block_avx512(head, block, hide, part) };
            }
            if has!("avx2") && has!("fma") {
                // SAFETY: the processor has it.
                return unsafe { self.block_avx2(head, block, hide, part) };
            }
        }
        self.block_lanes(head, block, hide, part, lanes::fma);
    }

    /// # Safety
    /// [`mix_avx512::fits`] for the dimensions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn block_avx512(
        &mut self,
        head: impl Lookup,
        block: Range<usize>,
        hide: &impl Fn(usize, Range<usize>, &mut [f32]),
        part: &mut [f32],
    ) {
        let dim = self.dim;
        for (place, run) in runs(block.clone(), head) {
            let count = run.len();
            let (keys, stride) = head.get(0, run, dim, &mut self.wide);
            let queries = self.queries.chunks_exact(dim);
            for (query, scores) in queries.zip(self.scores.chunks_exact_mut(BLOCK)) {
                // SAFETY: the caller's promise.
                unsafe { mix_avx512::scores(query, keys, stride, &mut scores[place..][..count]) };
            }
        }
        let sums = self.share_out(&block, hide, part);
        for (place, run) in runs(block, head) {
            let count = run.len();
            let values = head.get(1, run, dim, &mut self.wide);
            let shares = (&self.scores[place..], BLOCK);
            // SAFETY: the caller's promise.
            unsafe { mix_avx512::add_values(shares, values, count, dim, sums) };
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn block_avx2(
        &mut self,
        head: impl Lookup,
        block: Range<usize>,
        hide: &impl Fn(usize, Range<usize>, &mut [f32]),
        part: &mut [f32],
    ) {
        self.block_lanes(head, block, hide, part, f32::mul_add);
    }

    #[inline(always)]
    fn block_lanes(
        &mut self,
        head: impl Lookup,
        block: Range<usize>,
        hide: &impl Fn(usize, Range<usize>, &mut [f32]),
        part: &mut [f32],
        fma: impl Fn(f32, f32, f32) -> f32 + Copy,
    ) {
        let dim = self.dim;
        // Keys, then values, stay near while all queries pass over them.
        for (place, run) in runs(block.clone(), head) {
            let count = run.len();
            let (keys, stride) = head.get(0, run, dim, &mut self.wide);
            let queries = self.queries.chunks_exact(dim);
            for (query, scores) in queries.zip(self.scores.chunks_exact_mut(BLOCK)) {
                for (score, key) in scores[place..][..count].iter_mut().zip(keys.chunks(stride)) {
                    *score = dot(query, &key[..dim], fma);
                }
            }
        }
        let sums = self.share_out(&block, hide, part);
        for (place, run) in runs(block, head) {
            let count = run.len();
            let (values, stride) = head.get(1, run, dim, &mut self.wide);
            let shares = self.scores.chunks_exact(BLOCK);
            for (shares, sums) in shares.zip(sums.chunks_exact_mut(dim)) {
                let shares = &shares[place..][..count];
                let (parts, rest) = sums.as_chunks_mut::<PART>();
                for (part, sums) in parts.iter_mut().enumerate() {
                    // In registers from the first key of the run to the last.
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

    /// Makes shares of a block's scores, and says what the largest score of each query was and the sum of its
    /// shares. The place of the sums of values, all zero.
    #[inline(always)]
    fn share_out<'p>(
        &mut self,
        block: &Range<usize>,
        hide: &impl Fn(usize, Range<usize>, &mut [f32]),
        part: &'p mut [f32],
    ) -> &'p mut [f32] {
        let (sums, ends) = part.split_at_mut(self.queries.len());
        let (ends, _) = ends.as_chunks_mut::<2>();
        let (scores, _) = self.scores.as_chunks_mut::<BLOCK>();
        let (first, count) = (block.start % BLOCK, block.len());
        for (index, (scores, end)) in scores.iter_mut().zip(ends).enumerate() {
            scores[..first].fill(f32::NEG_INFINITY);
            scores[first + count..].fill(f32::NEG_INFINITY);
            hide(index, block.clone(), &mut scores[first..][..count]);
            *end = share(scores);
        }
        sums.fill(0.0);
        sums
    }

    /// Adds what a block gave to the blocks before.
    fn add(&mut self, part: &[f32]) {
        let (sums, ends) = part.split_at(self.queries.len());
        let (ends, _) = ends.as_chunks::<2>();
        let own = self.sums.chunks_exact_mut(self.dim).zip(&mut self.ends);
        for ((own, [most, shares]), (sums, new)) in own.zip(sums.chunks_exact(self.dim).zip(ends)) {
            let larger = if new[0] > *most { new[0] } else { *most };
            if larger == f32::NEG_INFINITY {
                continue;
            }
            // 1 for the larger of the two, and 0 for nothing at all.
            let factor = |most: f32| match most {
                f32::NEG_INFINITY => 0.0,
                most => exp_negative(most - larger),
            };
            let (a, b) = (factor(*most), factor(new[0]));
            weighted(own, a, sums, b);
            (*most, *shares) = (larger, *shares * a + new[1] * b);
        }
    }

    /// Divides by the sums of shares. A query that sees nothing has zeros.
    fn end(&mut self) {
        for (sums, [_, shares]) in self.sums.chunks_exact_mut(self.dim).zip(&self.ends) {
            if *shares > 0.0 {
                sums.iter_mut().for_each(|sum| *sum /= shares);
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

/// `own a + new b`, in place of `own`.
fn weighted(own: &mut [f32], a: f32, new: &[f32], b: f32) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { weighted_avx2(own, a, new, b) };
    }
    weighted_lanes(own, a, new, b);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn weighted_avx2(own: &mut [f32], a: f32, new: &[f32], b: f32) {
    weighted_lanes(own, a, new, b);
}

#[inline(always)]
fn weighted_lanes(own: &mut [f32], a: f32, new: &[f32], b: f32) {
    for (own, new) in own.iter_mut().zip(new) {
        *own = *own * a + *new * b;
    }
}

/// Shares in place of a block's scores, not yet divided by their sum. The largest score, and that sum; minus infinity
/// and zeros where nothing is seen.
#[inline(always)]
fn share(scores: &mut [f32; BLOCK]) -> [f32; 2] {
    let (scores, _) = scores.as_chunks_mut::<LANES>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut most = [f32::NEG_INFINITY; LANES];
    for scores in &*scores {
        for (most, score) in most.iter_mut().zip(scores) {
            *most = larger(*most, *score);
        }
    }
    let most = most.into_iter().fold(f32::NEG_INFINITY, larger);
    if most == f32::NEG_INFINITY {
        scores.as_flattened_mut().fill(0.0);
        return [most, 0.0];
    }
    let mut sums = [0.0; LANES];
    for scores in scores {
        for (sum, score) in sums.iter_mut().zip(scores) {
            let e = exp_negative(*score - most);
            *score = if *score == f32::NEG_INFINITY { 0.0 } else { e };
            *sum += *score;
        }
    }
    [most, lanes::total(sums)]
}
