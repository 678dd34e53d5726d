//! The whole of an attention layer between its projections: norms and rotation of queries and keys,
//! the write into the cache, the mix, the output gate.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use super::caches::fits;
use super::caches::{Caches, Head};
use super::lanes::Float;
use super::mix::{self, BLOCK, Scratch};
use super::pool::{self, Shared};
use super::rows::{Rotation, sigmoid};

/// Columns whose queries are mixed together.
const COLUMNS: usize = 16;

/// Pieces of work for each thread where threads share the positions of a head.
const PIECES: usize = 8;

/// Numbers that blocks of positions may give before they are put together, 16 MiB.
const MOST_PARTS: usize = 1 << 22;

/// One call.
pub struct Attend<'a, T> {
    /// Rows.
    pub batch: usize,
    /// Columns of a row.
    pub width: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Dimensions of a head.
    pub dim: usize,
    /// `[B, T, heads * D]`; gated `[B, T, heads * 2 D]`, per head the query and then its gate. Empty:
    /// nothing is mixed, the caches are only written to.
    pub q: &'a [T],
    /// Whether sigmoids of gates multiply the outcome.
    pub gated: bool,
    /// `[B, T, kv_heads * D]` of keys, and of values unless they are what keys are made of. Without any,
    /// the caches have those of this pass already.
    pub kv: Option<(&'a [T], Option<&'a [T]>)>,
    /// Weight `[D]` of the RMSNorm of queries.
    pub q_norm: Option<&'a [T]>,
    /// Weight `[D]` of the RMSNorm of keys.
    pub k_norm: Option<&'a [T]>,
    /// Whether values go through an RMSNorm without a weight.
    pub v_norm: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// How queries and keys are rotated.
    pub rotation: Rotation<'a>,
    /// By what position each row's first column is rotated.
    pub positions: &'a [i32],
    /// Where each row's first column stands: it sees itself and what lies before it, which is cached.
    /// Position `p` lies in column `p % capacity`, unless [`Places`] say otherwise.
    pub offsets: &'a [i32],
    /// Per row, the position before which all columns see everything; none: a column sees itself and
    /// what lies before it.
    pub ends: Option<&'a [i32]>,
    /// How many keys a query sees, its own included, before what lies after it; 0: all.
    pub window: usize,
    /// The factor on the products.
    pub scale: f32,
}

thread_local! {
    /// The angles of the last call: all layers of a pass share them.
    static ANGLES: RefCell<Angles> = RefCell::default();
    /// What a thread works in, and what becomes of blocks: memory asked for anew would cost more than little work.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static PARTS: RefCell<Vec<f32>> = RefCell::default();
}

#[derive(Default)]
struct Angles {
    key: (Vec<f32>, f32, Vec<i32>, usize),
    /// Sine and cosine, `[B, T, pairs]`.
    turns: Vec<(f32, f32)>,
}

impl Angles {
    fn of(&mut self, rotation: Rotation<'_>, offsets: &[i32], width: usize) -> &[(f32, f32)] {
        let (divisors, scale, at, columns) = &self.key;
        if *divisors != rotation.divisors
            || *scale != rotation.scale
            || *at != offsets
            || *columns != width
        {
            let key = (
                rotation.divisors.to_vec(),
                rotation.scale,
                offsets.to_vec(),
                width,
            );
            self.key = key;
            self.turns.clear();
            for &offset in offsets {
                for t in 0..width {
                    let position = rotation.scale * (offset + t as i32) as f32;
                    let turns = rotation.divisors.iter().map(|d| (position / d).sin_cos());
                    self.turns.extend(turns);
                }
            }
        }
        &self.turns
    }
}

/// Whether ends of passes lie among their columns.
pub fn fits_ends(ends: &[i32], offsets: &[i32], width: usize) -> bool {
    let within = |(end, offset): (&i32, &i32)| {
        let columns = i64::from(*end) - i64::from(*offset);
        (1..=width as i64).contains(&columns)
    };
    ends.len() == offsets.len() && ends.iter().zip(offsets).all(within)
}

impl<T: Float> Attend<'_, T> {
    /// Writes keys and values into the caches, and the mixed values to `out` `[B, T, heads * D]`.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run(&self, caches: Caches<'_, T>, out: &mut [T]) {
        let Self {
            batch,
            width,
            heads,
            kv_heads,
            dim,
            ..
        } = *self;
        let columns = batch * width;
        let queries = columns * heads * dim * if self.gated { 2 } else { 1 };
        let mixes = !self.q.is_empty();
        assert!(self.q.len() == if mixes { queries } else { 0 });
        let shared = columns * kv_heads * dim;
        assert!(
            self.kv
                .is_none_or(|(k, v)| k.len() == shared && v.unwrap_or(k).len() == shared)
        );
        assert!(caches.fit(batch * kv_heads, dim, self.kv.is_some()));
        assert!(out.len() == if mixes { columns * heads * dim } else { 0 });
        assert!(self.offsets.len() == batch);
        assert!(
            self.ends
                .is_none_or(|ends| fits_ends(ends, self.offsets, width))
        );
        assert!(self.positions.len() == batch);
        assert!(
            caches.have_room(self.offsets, width, self.window),
            "the cache is too small"
        );
        assert!(heads.is_multiple_of(kv_heads) && 2 * self.rotation.divisors.len() <= dim);

        ANGLES.with_borrow_mut(|angles| {
            let turns = angles.of(self.rotation, self.positions, width);
            let caches = &caches;
            let out = Shared::new(out);
            let head_pieces = batch * kv_heads;
            let longest = self.offsets.iter().max().map_or(0, |&o| o as usize) + width;
            let small = columns * heads * longest * dim < 1 << 15;
            let run = |pieces: usize, body: &(dyn Fn(usize) + Sync)| {
                if small {
                    (0..pieces).for_each(body);
                } else {
                    pool::run(pieces, body);
                }
            };
            let chunks = if mixes { width.div_ceil(COLUMNS) } else { 0 };
            let few = head_pieces < PIECES / 2 * pool::threads();
            if chunks == 1 && few && !small && self.share_blocks(turns, caches, out) {
                return;
            }
            if chunks == 1 {
                // One piece per key head writes its part of the cache, then reads it.
                run(head_pieces, &|piece| {
                    // SAFETY: every head of the caches belongs to one piece.
                    unsafe {
                        self.write(piece, turns, caches);
                        self.mix(piece, 0..width, turns, caches, out);
                    }
                });
                return;
            }
            // SAFETY: every head of the caches belongs to one piece.
            run(head_pieces, &|piece| unsafe {
                self.write(piece, turns, caches)
            });
            if chunks == 0 {
                return;
            }
            run(head_pieces * chunks, &|piece| {
                // The last columns take longest, so they go first.
                let chunk = chunks - 1 - piece / head_pieces;
                let range = chunk * COLUMNS..((chunk + 1) * COLUMNS).min(width);
                // SAFETY: the caches are only read now; columns of a head belong to one piece.
                unsafe { self.mix(piece % head_pieces, range, turns, caches, out) };
            });
        });
    }

    /// A query or key as it is used, from its projection.
    fn prepare(&self, x: &[T], norm: Option<&[T]>, turns: &[(f32, f32)], to: &mut [f32]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = x.wide();
        }
        // Rounded where the steps one by one would be.
        if let Some(weight) = norm {
            let scale = self.length(to);
            for (x, weight) in to.iter_mut().zip(weight) {
                *x = T::narrow(*x * scale * weight.wide()).wide();
            }
        }
        let pairs = turns.len();
        for (pair, &(sin, cos)) in turns.iter().enumerate() {
            let (a, b) = (to[pair], to[pair + pairs]);
            to[pair] = T::narrow(a * cos - b * sin).wide();
            to[pair + pairs] = T::narrow(a * sin + b * cos).wide();
        }
    }

    fn turns<'t>(&self, turns: &'t [(f32, f32)], row: usize, t: usize) -> &'t [(f32, f32)] {
        let pairs = self.rotation.divisors.len();
        &turns[(row * self.width + t) * pairs..][..pairs]
    }

    /// Puts the new keys and values of a head into the caches, if there are new ones.
    ///
    /// # Safety
    /// Nobody else has a part of this head.
    unsafe fn write(&self, piece: usize, turns: &[(f32, f32)], caches: &Caches<'_, T>) {
        let Some((k, v)) = self.kv else {
            return;
        };
        let (row, head) = (piece / self.kv_heads, piece % self.kv_heads);
        let offset = self.offsets[row] as usize;
        let mut wide = vec![0.0; self.dim];
        for t in 0..self.width {
            let from = ((row * self.width + t) * self.kv_heads + head) * self.dim;
            let x = &k[from..from + self.dim];
            self.prepare(x, self.k_norm, self.turns(turns, row, t), &mut wide);
            // SAFETY: the caller's promise.
            unsafe { caches.put(0, piece, offset + t, &wide) };
            let v = v.map_or(x, |v| &v[from..from + self.dim]);
            for (wide, x) in wide.iter_mut().zip(v) {
                *wide = x.wide();
            }
            if self.v_norm {
                let scale = self.length(&wide);
                for x in &mut wide {
                    *x = T::narrow(*x * scale).wide();
                }
            }
            // SAFETY: the caller's promise.
            unsafe { caches.put(1, piece, offset + t, &wide) };
        }
    }

    /// What divides by the root of the mean square.
    fn length(&self, x: &[f32]) -> f32 {
        1.0 / (super::lanes::dot(x, x) / self.dim as f32 + self.eps).sqrt()
    }

    /// Where there are few key heads, threads share the positions of each. False, with nothing done, if what the
    /// blocks of positions give would take much memory.
    fn share_blocks(&self, turns: &[(f32, f32)], caches: &Caches<'_, T>, out: Shared<T>) -> bool {
        let heads = self.batch * self.kv_heads;
        let columns = 0..self.width;
        let spans: Vec<_> = (0..heads).map(|head| self.span(head, &columns)).collect();
        let blocks = |head: usize| spans[head].start / BLOCK..spans[head].end.div_ceil(BLOCK);
        let all: usize = (0..heads).map(|head| blocks(head).len()).sum();
        let part_len = mix::part_len(self.heads / self.kv_heads * self.width, self.dim);
        if all * part_len > MOST_PARTS {
            return false;
        }
        // Per piece of work its head, its blocks, and how many blocks come before, of this head and of others.
        let share = all.div_ceil(PIECES * pool::threads());
        let mut work = Vec::with_capacity(heads + PIECES * pool::threads());
        let mut before = 0;
        for head in 0..heads {
            let first = before;
            for start in blocks(head).step_by(share) {
                let some = start..blocks(head).end.min(start + share);
                work.push((head, some.clone(), first, before));
                before += some.len();
            }
        }
        for head in 0..heads {
            // SAFETY: nobody else is at work yet.
            unsafe { self.write(head, turns, caches) };
        }
        let left: Vec<_> = (0..heads)
            .map(|head| AtomicUsize::new(blocks(head).len()))
            .collect();
        PARTS.with_borrow_mut(|parts| {
            parts.resize(all * part_len, 0.0);
            let parts = Shared::new(parts);
            pool::run(work.len(), |piece| {
                let (head, ref some, first, before) = work[piece];
                let of = |block: usize| (block * BLOCK).clamp(spans[head].start, spans[head].end);
                // SAFETY: every block has places of its own, and the caches are only read now.
                unsafe {
                    let parts = parts.slice(before * part_len, some.len() * part_len);
                    self.mix_parts(head, of(some.start)..of(some.end), turns, caches, parts);
                }
                // Who does the last of a head puts them together.
                if left[head].fetch_sub(some.len(), Ordering::AcqRel) == some.len() {
                    let count = blocks(head).len();
                    // SAFETY: nobody writes to them any more; the outcome of a head is written here alone.
                    unsafe {
                        let parts = parts.read(first * part_len, count * part_len);
                        self.gather(head, parts, out);
                    }
                }
            });
        });
        true
    }

    /// What a query of a pass over some columns on one key head is: its place among the rows of all heads, and its
    /// column.
    fn query(&self, piece: usize, columns: &Range<usize>, local: usize) -> (usize, usize) {
        let (row, kv_head) = (piece / self.kv_heads, piece % self.kv_heads);
        let (shared_heads, width) = (self.heads / self.kv_heads, columns.len());
        let head = kv_head * shared_heads + local / width;
        let t = columns.start + local % width;
        ((row * self.width + t) * self.heads + head, t)
    }

    /// The position that a column stands for: padding sees what the last filled column sees, so that nobody sees
    /// nothing.
    fn own(&self, row: usize, column: usize) -> usize {
        let own = self.offsets[row] as usize + column;
        self.ends
            .map_or(own, |ends| own.min(ends[row] as usize - 1))
    }

    /// The first position that a column sees, itself standing for `own`.
    fn first_seen(&self, own: usize) -> usize {
        match self.window {
            0 => 0,
            window => (own + 1).saturating_sub(window),
        }
    }

    /// The positions that some columns see on a key head.
    fn span(&self, piece: usize, columns: &Range<usize>) -> Range<usize> {
        let row = piece / self.kv_heads;
        let end = match self.ends {
            Some(ends) => ends[row] as usize,
            None => self.offsets[row] as usize + columns.end,
        };
        self.first_seen(self.own(row, columns.start))..end
    }

    /// Readies the queries of some columns on one key head.
    fn begin(
        &self,
        piece: usize,
        columns: &Range<usize>,
        turns: &[(f32, f32)],
        scratch: &mut Scratch,
    ) {
        let (dim, row) = (self.dim, piece / self.kv_heads);
        let stride = if self.gated { 2 * dim } else { dim };
        scratch.begin(self.heads / self.kv_heads * columns.len(), dim);
        for (local, to) in scratch.queries.chunks_exact_mut(dim).enumerate() {
            let (at, t) = self.query(piece, columns, local);
            let x = &self.q[at * stride..][..dim];
            self.prepare(x, self.q_norm, self.turns(turns, row, t), to);
            for x in to {
                *x *= self.scale;
            }
        }
    }

    /// Replaces the scores of positions that a query of some columns does not see.
    fn hide(
        &self,
        piece: usize,
        columns: &Range<usize>,
        local: usize,
        keys: Range<usize>,
        scores: &mut [f32],
    ) {
        let own = self.own(piece / self.kv_heads, columns.start + local % columns.len());
        let last = if self.ends.is_some() {
            keys.end
        } else {
            own + 1
        };
        let place = |position: usize| position.clamp(keys.start, keys.end) - keys.start;
        scores[..place(self.first_seen(own))].fill(f32::NEG_INFINITY);
        scores[place(last)..].fill(f32::NEG_INFINITY);
    }

    /// What blocks of positions give for the queries of all columns on one key head.
    ///
    /// # Safety
    /// Nobody writes to this head.
    unsafe fn mix_parts(
        &self,
        piece: usize,
        span: Range<usize>,
        turns: &[(f32, f32)],
        caches: &Caches<'_, T>,
        parts: &mut [f32],
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            let columns = 0..self.width;
            self.begin(piece, &columns, turns, scratch);
            let hide = |local: usize, keys: Range<usize>, scores: &mut [f32]| {
                self.hide(piece, &columns, local, keys, scores);
            };
            // SAFETY: the caller's promise.
            match unsafe { caches.head(piece, self.dim) } {
                Head::Exact(head) => scratch.mix_parts(head, span, hide, parts),
                Head::Quantized(head) => scratch.mix_parts(head, span, hide, parts),
            }
        });
    }

    /// Mixes what all blocks of positions gave for the queries of all columns on one key head.
    ///
    /// # Safety
    /// Nobody else has these columns of it.
    unsafe fn gather(&self, piece: usize, parts: &[f32], out: Shared<T>) {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.begin(self.heads / self.kv_heads * self.width, self.dim);
            scratch.gather(parts);
            // SAFETY: the caller's promise.
            unsafe { self.end(piece, &(0..self.width), &scratch.sums, out) };
        });
    }

    /// Mixes values for the queries of some columns on one key head.
    ///
    /// # Safety
    /// Nobody writes to this head, and nobody else has these columns of it.
    unsafe fn mix(
        &self,
        piece: usize,
        columns: Range<usize>,
        turns: &[(f32, f32)],
        caches: &Caches<'_, T>,
        out: Shared<T>,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            self.begin(piece, &columns, turns, scratch);
            let span = self.span(piece, &columns);
            let hide = |local: usize, keys: Range<usize>, scores: &mut [f32]| {
                self.hide(piece, &columns, local, keys, scores);
            };
            // SAFETY: the caller's promises.
            unsafe {
                match caches.head(piece, self.dim) {
                    Head::Exact(head) => scratch.mix(head, span, hide),
                    Head::Quantized(head) => scratch.mix(head, span, hide),
                }
                self.end(piece, &columns, &scratch.sums, out);
            }
        });
    }

    /// Writes the mixed values of some columns on one key head.
    ///
    /// # Safety
    /// Nobody else has these columns of it.
    unsafe fn end(&self, piece: usize, columns: &Range<usize>, sums: &[f32], out: Shared<T>) {
        let dim = self.dim;
        for (local, sums) in sums.chunks_exact(dim).enumerate() {
            let (at, _) = self.query(piece, columns, local);
            // SAFETY: the caller's promise.
            let out = unsafe { out.slice(at * dim, dim) };
            for (out, x) in out.iter_mut().zip(sums) {
                *out = T::narrow(*x);
            }
            if self.gated {
                let gate = &self.q[2 * at * dim + dim..][..dim];
                for (out, gate) in out.iter_mut().zip(gate) {
                    *out = T::narrow(out.wide() * T::narrow(sigmoid(gate.wide())).wide());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| (((i + seed) * 7919 % 1013) as f32 - 506.0) / 300.0)
            .collect()
    }

    /// Shape of a test: `[heads, kv_heads, dim]`.
    type Sizes = [usize; 3];

    struct Inputs {
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        norm: Vec<f32>,
    }

    /// Columns of a cache.
    const LONG: usize = 448;

    const DIVISORS: [f32; 3] = [1.0, 7.0, 60.0];

    fn inputs([heads, kv_heads, dim]: Sizes, columns: usize, gated: bool) -> Inputs {
        Inputs {
            q: values(columns * heads * dim * if gated { 2 } else { 1 }, 1),
            k: values(columns * kv_heads * dim, 2),
            v: values(columns * kv_heads * dim, 3),
            norm: values(dim, 4),
        }
    }

    fn attend<'a>(
        [heads, kv_heads, dim]: Sizes,
        inputs: &'a Inputs,
        offsets: &'a [i32],
        (window, gated, normed): (usize, bool, bool),
    ) -> Attend<'a, f32> {
        let batch = offsets.len();
        Attend {
            batch,
            width: inputs.k.len() / batch / kv_heads / dim,
            heads,
            kv_heads,
            dim,
            q: &inputs.q,
            gated,
            kv: Some((&inputs.k, Some(&inputs.v))),
            q_norm: normed.then_some(&inputs.norm),
            k_norm: normed.then_some(&inputs.norm),
            v_norm: false,
            eps: 1e-5,
            rotation: Rotation {
                divisors: &DIVISORS,
                scale: 0.5,
            },
            positions: offsets,
            offsets,
            ends: None,
            window,
            scale: 0.3,
        }
    }

    proptest! {
        #[test]
        fn columns_together_give_what_each_gives_alone(
            (kv_heads, repeat, half) in (1usize..3, 1usize..4, 3usize..20),
            width in 1usize..40,
            starts in prop::collection::vec(prop_oneof![0i32..20, 0i32..400], 1..4),
            window in prop::sample::select(vec![0usize, 1, 5, 30, 150]),
            gated in any::<bool>(),
            normed in any::<bool>(),
        ) {
            // Short rows go one way, long ones share their positions among threads, wide ones go a third way.
            let (heads, dim) = (kv_heads * repeat, 2 * half);
            let sizes = [heads, kv_heads, dim];
            let batch = starts.len();
            let options = (window, gated, normed);
            let all = inputs(sizes, batch * width, gated);
            let before = values(batch * kv_heads * LONG * dim, 9);
            let (mut keys, mut vals) = (before.clone(), before.clone());
            let mut out = vec![0.0; batch * width * heads * dim];
            attend(sizes, &all, &starts, options)
                .run(Caches::exact(LONG, [&mut keys[..], &mut vals[..]]), &mut out);
            for (row, &start) in starts.iter().enumerate() {
                let cache = kv_heads * LONG * dim;
                let (mut own_keys, mut own_vals) =
                    (before[row * cache..][..cache].to_vec(), before[row * cache..][..cache].to_vec());
                for t in 0..width {
                    let part = |x: &[f32]| {
                        let n = x.len() / batch / width;
                        x[(row * width + t) * n..][..n].to_vec()
                    };
                    let one = Inputs {
                        q: part(&all.q),
                        k: part(&all.k),
                        v: part(&all.v),
                        norm: all.norm.clone(),
                    };
                    let mut alone = vec![0.0; heads * dim];
                    attend(sizes, &one, &[start + t as i32], options)
                        .run(Caches::exact(LONG, [&mut own_keys[..], &mut own_vals[..]]), &mut alone);
                    prop_assert_eq!(&part(&out), &alone);
                }
                prop_assert_eq!(&keys[row * cache..][..cache], &own_keys[..]);
                prop_assert_eq!(&vals[row * cache..][..cache], &own_vals[..]);
            }
        }

        /// Passes of any width, each of which keeps some of its columns.
        #[test]
        fn a_window_that_turns_over_sees_what_a_long_cache_shows(
            (window, most) in (1usize..12, 1usize..6),
            passes in prop::collection::vec((1usize..6, 1usize..6), 1..30),
            (normed, bare) in any::<(bool, bool)>(),
        ) {
            let [heads, kv_heads, dim] = [4, 2, 6];
            let long = 200;
            let short = window + most;
            let options = (window, false, normed);
            let empty = |columns: usize| vec![f32::NAN; kv_heads * columns * dim];
            let mut caches = [(empty(long), empty(long)), (empty(short), empty(short))];
            let mut at = 0;
            for (number, (width, kept)) in passes.into_iter().enumerate() {
                let width = width.min(most);
                let mut all = inputs([heads, kv_heads, dim], width, false);
                all.k = values(all.k.len(), 100 * number);
                let mut outs = Vec::new();
                for ((keys, vals), capacity) in caches.iter_mut().zip([long, short]) {
                    let mut out = vec![0.0; width * heads * dim];
                    let start = [at as i32];
                    let mut attend = attend([heads, kv_heads, dim], &all, &start, options);
                    if bare {
                        attend.kv = Some((&all.k, None));
                        attend.v_norm = true;
                    }
                    attend.run(Caches::exact(capacity, [&mut keys[..], &mut vals[..]]), &mut out);
                    // Another look at the same keys, as a layer that has none of its own takes it.
                    let mut again = out.clone();
                    attend.kv = None;
                    attend.run(Caches::exact(capacity, [&keys[..], &vals[..]]), &mut again);
                    prop_assert_eq!(&again, &out);
                    outs.push(out);
                }
                prop_assert!(outs[0].iter().all(|x| x.is_finite()));
                prop_assert_eq!(&outs[0], &outs[1]);
                at += kept.min(width);
            }
        }

        #[test]
        fn is_the_double_precision_attention(
            (kv_heads, repeat, half) in (1usize..3, 1usize..4, 3usize..20),
            start in prop_oneof![0i32..20, 0i32..400],
            window in prop::sample::select(vec![0usize, 1, 5, 30, 150]),
            gated in any::<bool>(),
            normed in any::<bool>(),
        ) {
            let (heads, dim, at) = (kv_heads * repeat, 2 * half, start as usize);
            let sizes = [heads, kv_heads, dim];
            let one = inputs(sizes, 1, gated);
            let mut keys = values(kv_heads * LONG * dim, 7);
            let mut vals = values(kv_heads * LONG * dim, 8);
            let mut out = vec![0.0; heads * dim];
            attend(sizes, &one, &[start], (window, gated, normed))
                .run(Caches::exact(LONG, [&mut keys[..], &mut vals[..]]), &mut out);

            let turned = |x: &[f32]| -> Vec<f64> {
                let mut x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                if normed {
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
                    for (x, w) in x.iter_mut().zip(&one.norm) {
                        *x *= f64::from(*w) / (mean + 1e-5).sqrt();
                    }
                }
                for (pair, divisor) in DIVISORS.iter().enumerate() {
                    let (sin, cos) = (0.5 * f64::from(start) / f64::from(*divisor)).sin_cos();
                    let (a, b) = (x[pair], x[pair + 3]);
                    (x[pair], x[pair + 3]) = (a * cos - b * sin, a * sin + b * cos);
                }
                x
            };
            let first = if window == 0 { 0 } else { (at + 1).saturating_sub(window) };
            for head in 0..heads {
                let kv = head / repeat;
                let width = if gated { 2 * dim } else { dim };
                let q = turned(&one.q[head * width..][..dim]);
                let cached = |x: &[f32], s: usize| -> Vec<f64> {
                    x[(kv * LONG + s) * dim..][..dim].iter().map(|&x| f64::from(x)).collect()
                };
                let key = turned(&one.k[kv * dim..][..dim]);
                for (a, b) in cached(&keys, at).iter().zip(&key) {
                    prop_assert!((a - b).abs() < 1e-5);
                }
                let score = |s: usize| -> f64 {
                    let dot: f64 = cached(&keys, s).iter().zip(&q).map(|(a, b)| a * b).sum();
                    (0.3 * dot).exp()
                };
                let total: f64 = (first..=at).map(score).sum();
                for d in 0..dim {
                    let mut exact: f64 =
                        (first..=at).map(|s| score(s) / total * cached(&vals, s)[d]).sum();
                    if gated {
                        let gate = f64::from(one.q[head * width + dim + d]);
                        exact /= 1.0 + (-gate).exp();
                    }
                    let got = f64::from(out[head * dim + d]);
                    prop_assert!((got - exact).abs() < 1e-5, "{} {}", got, exact);
                }
            }
        }
    }
}
