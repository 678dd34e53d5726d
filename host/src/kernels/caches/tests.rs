//! Attention over quantized caches.

use proptest::prelude::*;

use super::*;
use crate::kernels::attend::Attend;
use crate::kernels::rows::Rotation;

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (((i + seed) * 7919 % 1013) as f32 - 506.0) / 300.0)
        .collect()
}

fn packings() -> impl Strategy<Value = Packing> {
    prop::sample::select(Packing::all().collect::<Vec<_>>())
}

/// Quantized buffers of a test: first positions and the others, keys and values.
struct Store {
    places: Places,
    capacity: usize,
    first: [Vec<f32>; 2],
    packed: [Vec<u32>; 2],
}

impl Store {
    fn new(places: Places, heads: usize, capacity: usize, dim: usize) -> Self {
        let words = places.packing.words(dim).unwrap();
        Self {
            places,
            capacity,
            // Nobody may look at what was never written.
            first: [(); 2].map(|()| vec![f32::NAN; heads * places.first * dim]),
            packed: [(); 2].map(|()| vec![u32::MAX; heads * capacity * words]),
        }
    }

    fn written(&mut self) -> Caches<'_, f32> {
        Caches {
            capacity: self.capacity,
            exact: self.first.each_mut().map(|x| x.as_mut_slice().into()),
            quantized: Some((
                self.places,
                self.packed.each_mut().map(|x| x.as_mut_slice().into()),
            )),
        }
    }

    fn read(&self) -> Caches<'_, f32> {
        Caches {
            capacity: self.capacity,
            exact: self.first.each_ref().map(|x| x.as_slice().into()),
            quantized: Some((
                self.places,
                self.packed.each_ref().map(|x| x.as_slice().into()),
            )),
        }
    }
}

/// Rows of `dim` at positions from `start` on as they come back from their words.
fn dequantized(x: &[f32], dim: usize, columns: usize, start: usize, packing: Packing) -> Vec<f32> {
    let mut words = vec![0; packing.words(dim).unwrap()];
    let mut back = x.to_vec();
    for (at, row) in back.chunks_exact_mut(dim).enumerate() {
        if at % columns >= start && row[0].is_finite() {
            packing.encode(row, &mut words);
            packing.decode(&words, dim, row);
        }
    }
    back
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Passes of any width, each of which keeps some of its columns, over caches that turn over: against
    /// long caches of the same numbers in single precision.
    #[test]
    fn queries_see_what_words_stand_for(
        packing in packings(),
        groups in 1usize..3,
        (window, most, start) in (0usize..12, 1usize..6, 0usize..30),
        passes in prop::collection::vec((1usize..6, 1usize..6), 1..24),
        (normed, bare, gated) in any::<(bool, bool, bool)>(),
    ) {
        let (heads, kv_heads, dim) = (4, 2, groups * packing.group);
        let long = 200;
        let short = if window == 0 { long } else { window + most };
        let places = Places { packing, start, first: start.min(short) };
        let mut store = Store::new(places, kv_heads, short, dim);
        let mut exact = [(); 2].map(|()| vec![f32::NAN; kv_heads * long * dim]);
        let norm = values(dim, 4);
        let mut at = 0;
        for (number, (width, kept)) in passes.into_iter().enumerate() {
            let width = width.min(most);
            let q = values(width * heads * dim * if gated { 2 } else { 1 }, 1);
            let k = values(width * kv_heads * dim, 100 * number);
            let v = values(width * kv_heads * dim, 100 * number + 7);
            let offsets = [at as i32];
            let attend = |kv, q| Attend {
                batch: 1,
                width,
                heads,
                kv_heads,
                dim,
                q,
                gated,
                kv,
                q_norm: normed.then_some(&norm[..]),
                k_norm: normed.then_some(&norm[..]),
                v_norm: bare,
                eps: 1e-5,
                rotation: Rotation { divisors: &[1.0, 7.0, 60.0], scale: 0.5 },
                positions: &offsets,
                offsets: &offsets,
                ends: None,
                window,
                scale: 0.1,
            };
            let new = Some((&k[..], (!bare).then_some(&v[..])));
            let mut out = vec![0.0; width * heads * dim];
            attend(new, &q[..]).run(store.written(), &mut out);
            // Another look at the same keys, as a layer that has none of its own takes it.
            let mut again = out.clone();
            attend(None, &q[..]).run(store.read(), &mut again);
            prop_assert_eq!(&again, &out);
            let buffers = exact.each_mut().map(|x| x.as_mut_slice());
            attend(new, &[]).run(Caches::exact(long, buffers), &mut []);
            let seen = exact.each_ref().map(|x| dequantized(x, dim, long, start, packing));
            let mut expected = out.clone();
            let buffers = seen.each_ref().map(|x| x.as_slice());
            attend(None, &q[..]).run(Caches::exact(long, buffers), &mut expected);
            prop_assert!(out.iter().all(|x| x.is_finite()));
            prop_assert_eq!(&out, &expected);
            at += kept.min(width);
        }
    }

    #[test]
    fn is_the_double_precision_attention_over_dequantized_keys(
        packing in packings(),
        (kv_heads, repeat, groups) in (1usize..3, 1usize..4, 1usize..3),
        starts in prop::collection::vec(0i32..20, 1..4),
        width in 1usize..20,
        start in 0usize..30,
        window in prop::sample::select(vec![0usize, 1, 5]),
    ) {
        let (heads, dim, columns) = (kv_heads * repeat, groups * packing.group, 48);
        let batch = starts.len();
        let places = Places { packing, start, first: start };
        let mut store = Store::new(places, batch * kv_heads, columns, dim);
        let q = values(batch * width * heads * dim, 1);
        let all = [2, 3].map(|seed| values(batch * kv_heads * columns * dim, seed));
        // What lies before the pass, stored a position at a time; then the pass.
        for (row, &offset) in starts.iter().enumerate() {
            for head in row * kv_heads..(row + 1) * kv_heads {
                for (side, all) in all.iter().enumerate() {
                    for position in 0..offset as usize {
                        let x = &all[(head * columns + position) * dim..][..dim];
                        // SAFETY: nobody else has a part of the head.
                        unsafe { store.written().put(side, head, position, x) };
                    }
                }
            }
        }
        let new = all.each_ref().map(|all| {
            let mut new = Vec::new();
            for (row, &offset) in starts.iter().enumerate() {
                for t in 0..width {
                    for head in row * kv_heads..(row + 1) * kv_heads {
                        let at = (head * columns + offset as usize + t) * dim;
                        new.extend_from_slice(&all[at..][..dim]);
                    }
                }
            }
            new
        });
        let mut out = vec![0.0; batch * width * heads * dim];
        Attend {
            batch,
            width,
            heads,
            kv_heads,
            dim,
            q: &q[..],
            gated: false,
            kv: Some((&new[0], Some(&new[1]))),
            q_norm: None,
            k_norm: None,
            v_norm: false,
            eps: 1e-5,
            rotation: Rotation { divisors: &[], scale: 1.0 },
            positions: &starts,
            offsets: &starts,
            ends: None,
            window,
            scale: 0.1,
        }
        .run(store.written(), &mut out);
        let [keys, vals] = all.each_ref().map(|x| dequantized(x, dim, columns, start, packing));
        let cached = |x: &[f32], head: usize, s: usize, d: usize| {
            f64::from(x[(head * columns + s) * dim + d])
        };
        for (row, &offset) in starts.iter().enumerate() {
            for (t, head) in (0..width).flat_map(|t| (0..heads).map(move |head| (t, head))) {
                let own = offset as usize + t;
                let kv = row * kv_heads + head / repeat;
                let at = ((row * width + t) * heads + head) * dim;
                let first = if window == 0 { 0 } else { (own + 1).saturating_sub(window) };
                let score = |s: usize| -> f64 {
                    let terms = (0..dim).map(|d| f64::from(q[at + d]) * cached(&keys, kv, s, d));
                    (f64::from(0.1f32) * terms.sum::<f64>()).exp()
                };
                let scores: Vec<f64> = (first..=own).map(score).collect();
                let total: f64 = scores.iter().sum();
                for d in (0..dim).step_by(7) {
                    let terms = (first..=own).zip(&scores);
                    let exact: f64 = terms.map(|(s, score)| score / total * cached(&vals, kv, s, d)).sum();
                    let got = f64::from(out[at + d]);
                    prop_assert!((got - exact).abs() < 2e-5, "{} {}", got, exact);
                }
            }
        }
    }
}

#[test]
fn caches_that_do_not_fit_are_told_apart() {
    let packing = Packing { bits: 8, group: 32 };
    let places = |start, first| Places {
        packing,
        start,
        first,
    };
    let mut store = Store::new(places(7, 7), 2, 16, 64);
    assert!(store.written().fit(2, 64, true));
    assert!(!store.written().fit(2, 64, false));
    assert!(store.read().fit(2, 64, false));
    assert!(!store.read().fit(2, 32, false));
    assert!(!store.read().fit(3, 64, false));
    assert!(!store.read().fit(2, 48, false));
    // 7 exact positions, then 16.
    assert!(store.read().have_room(&[0, 22], 1, 0));
    assert!(!store.read().have_room(&[0, 23], 1, 0));
    assert!(store.read().have_room(&[0, 500], 1, 6));
    assert!(!store.read().have_room(&[-1], 1, 6));
    assert!(!fits(&[0], 1, 0, 0, None));
    assert!(!fits(&[0], 1, 8, 0, Some((5, 0))));
    assert!(!fits(&[2], 2, 8, 0, Some((5, 3))));
    assert!(fits(&[2], 1, 8, 0, Some((5, 3))));
}
