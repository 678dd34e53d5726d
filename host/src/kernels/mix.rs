//! The inner loops of attention: scores, softmax and the mix of values, for the queries that share a
//! key head.

use super::lanes::{Float, LANES, exp_negative, total};

/// Keys and values of one head, column by column.
#[derive(Clone, Copy)]
pub struct KeyHead<'a, T> {
    /// From the head's first key on.
    pub keys: &'a [T],
    /// From the head's first value on.
    pub values: &'a [T],
    /// Elements between two keys, and between two values.
    pub strides: [usize; 2],
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
            wide: vec![0.0; dim],
        }
    }

    /// Mixes the values of the keys `from..to`, of which query `i` sees key `s` if `sees(i, s)`.
    pub fn mix<T: Float>(
        &mut self,
        head: KeyHead<'_, T>,
        span: std::ops::Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") {
                // SAFETY: the processor has it.
                return unsafe { self.mix_avx512(head, span, sees) };
            }
            if has!("avx2") && has!("fma") {
                // SAFETY: the processor has it.
                return unsafe { self.mix_avx2(head, span, sees) };
            }
        }
        self.mix_lanes(head, span, sees, |a, b, c| {
            if cfg!(target_arch = "aarch64") {
                a.mul_add(b, c)
            } else {
                a * b + c
            }
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,fma")]
    fn mix_avx512<T: Float>(
        &mut self,
        head: KeyHead<'_, T>,
        span: std::ops::Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        self.mix_lanes(head, span, sees, f32::mul_add);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn mix_avx2<T: Float>(
        &mut self,
        head: KeyHead<'_, T>,
        span: std::ops::Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        self.mix_lanes(head, span, sees, f32::mul_add);
    }

    #[inline(always)]
    fn mix_lanes<T: Float>(
        &mut self,
        head: KeyHead<'_, T>,
        span: std::ops::Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
        fma: impl Fn(f32, f32, f32) -> f32 + Copy,
    ) {
        let (dim, keys) = (self.dim, span.len());
        let queries = self.queries.len() / dim;
        self.scores.clear();
        self.scores.resize(queries * keys, f32::NEG_INFINITY);
        self.sums.fill(0.0);
        for (at, s) in span.clone().enumerate() {
            let key = &head.keys[s * head.strides[0]..][..dim];
            let key = widened(key, &mut self.wide);
            for (index, query) in self.queries.chunks_exact(dim).enumerate() {
                if sees(index, s) {
                    self.scores[index * keys + at] = dot(query, key, fma);
                }
            }
        }
        for scores in self.scores.chunks_exact_mut(keys.max(1)) {
            softmax(scores);
        }
        for (at, s) in span.enumerate() {
            let value = &head.values[s * head.strides[1]..][..dim];
            let value = widened(value, &mut self.wide);
            for (index, sums) in self.sums.chunks_exact_mut(dim).enumerate() {
                let share = self.scores[index * keys + at];
                if share != 0.0 {
                    for (sum, x) in sums.iter_mut().zip(value) {
                        *sum = fma(share, *x, *sum);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn widened<'a, T: Float>(from: &'a [T], to: &'a mut [f32]) -> &'a [f32] {
    if let Some(wide) = T::as_f32(from) {
        return wide;
    }
    for (to, x) in to.iter_mut().zip(from) {
        *to = x.wide();
    }
    to
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32], fma: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..LANES {
            lanes[i] = fma(a[i], b[i], lanes[i]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    total(lanes)
}

/// In place; a query that sees nothing gets zeros.
#[inline(always)]
fn softmax(scores: &mut [f32]) {
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
    // In order, so that keys that are not seen at the ends change nothing.
    let mut sum = 0.0;
    for score in scores.iter() {
        sum += score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}
