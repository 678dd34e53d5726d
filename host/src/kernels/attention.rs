//! Attention of a few queries over many cached keys, for ragged rows.

use super::lanes::Float;
use super::mix::{KeyHead, Scratch};
use super::pool::{self, Shared};

/// Which keys a query sees.
#[derive(Clone, Copy)]
pub enum Visible<'a> {
    /// All.
    All,
    /// The last query all, each earlier one a key less.
    Causal,
    /// As a mask `[B, T, S]` says.
    Mask(&'a [bool]),
}

/// The shape of a call.
#[derive(Clone, Copy)]
pub struct Attention {
    /// Rows.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Queries of a row.
    pub width: usize,
    /// Keys of a row.
    pub span: usize,
    /// Dimensions of a head.
    pub dim: usize,
    /// The factor on the products.
    pub scale: f32,
    /// Elements between rows, heads and columns of queries, keys and values.
    pub strides: [[usize; 3]; 3],
}

impl Attention {
    /// Mixes values into `out` `[B, T, heads, D]`.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run<T: Float>(&self, q: &[T], k: &[T], v: &[T], visible: Visible<'_>, out: &mut [T]) {
        let Self {
            batch,
            heads,
            kv_heads,
            width,
            span,
            dim,
            ..
        } = *self;
        assert_eq!(out.len(), batch * heads * width * dim);
        if let Visible::Mask(mask) = visible {
            assert_eq!(mask.len(), batch * width * span);
        }
        let shared = Shared::new(out);
        let shared_heads = heads / kv_heads;
        // A piece is one key head of a row: its keys are read once for all queries on them.
        let body = |piece: usize| {
            let (row, kv_head) = (piece / kv_heads, piece % kv_heads);
            let mut scratch = Scratch::default();
            scratch.begin(shared_heads * width, dim);
            let query = |local: usize| (kv_head * shared_heads + local / width, local % width);
            for (local, to) in scratch.queries.chunks_exact_mut(dim).enumerate() {
                let (head, t) = query(local);
                let from = self.at(0, row, head, t);
                for (to, x) in to.iter_mut().zip(&q[from..from + dim]) {
                    *to = x.wide() * self.scale;
                }
            }
            let head = KeyHead {
                keys: &k[self.at(1, row, kv_head, 0)..],
                values: &v[self.at(2, row, kv_head, 0)..],
                strides: [self.strides[1][2], self.strides[2][2]],
                columns: usize::MAX,
            };
            scratch.mix(head, 0..span, |local, keys, scores| {
                let column = local % width;
                match visible {
                    Visible::All => {}
                    Visible::Causal => {
                        let seen = (span + column + 1).saturating_sub(width);
                        let first = seen.clamp(keys.start, keys.end) - keys.start;
                        scores[first..].fill(f32::NEG_INFINITY);
                    }
                    Visible::Mask(mask) => {
                        let mask = &mask[(row * width + column) * span..][..span][keys];
                        for (score, sees) in scores.iter_mut().zip(mask) {
                            if !sees {
                                *score = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
            });
            for (local, sums) in scratch.sums.chunks_exact(dim).enumerate() {
                let (head, t) = query(local);
                // SAFETY: every head of a row belongs to one piece.
                let out = unsafe { shared.slice(((row * width + t) * heads + head) * dim, dim) };
                for (out, x) in out.iter_mut().zip(sums) {
                    *out = T::narrow(*x);
                }
            }
        };
        if span == 0 || batch * heads * width * span * dim < 1 << 16 {
            (0..batch * kv_heads).for_each(body);
        } else {
            pool::run(batch * kv_heads, body);
        }
    }

    fn at(&self, tensor: usize, row: usize, head: usize, column: usize) -> usize {
        let [rows, heads, columns] = self.strides[tensor];
        row * rows + head * heads + column * columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| (((i + seed) * 7919 % 1013) as f32 - 506.0) / 300.0)
            .collect()
    }

    #[test]
    fn is_the_double_precision_mix() {
        let (batch, heads, kv_heads, width, span, dim) = (2, 4, 2, 3, 9, 20);
        let attention = Attention {
            batch,
            heads,
            kv_heads,
            width,
            span,
            dim,
            scale: 0.3,
            strides: [
                [heads * width * dim, width * dim, dim],
                [kv_heads * span * dim, span * dim, dim],
                [kv_heads * span * dim, span * dim, dim],
            ],
        };
        let q = values(batch * heads * width * dim, 1);
        let k = values(batch * kv_heads * span * dim, 2);
        let v = values(batch * kv_heads * span * dim, 3);
        let mut out = vec![0.0; q.len()];
        attention.run(&q, &k, &v, Visible::Causal, &mut out);
        for b in 0..batch {
            for h in 0..heads {
                for t in 0..width {
                    let at = |x: &[f32], head: usize, s: usize, n: usize, d: usize| {
                        f64::from(
                            x[(b * n + head * if n == heads * width { width } else { span } + s)
                                * dim
                                + d],
                        )
                    };
                    let seen = span - width + t + 1;
                    let score = |s: usize| -> f64 {
                        let terms = (0..dim).map(|d| {
                            at(&q, h, t, heads * width, d) * at(&k, h / 2, s, kv_heads * span, d)
                        });
                        (terms.sum::<f64>() * 0.3).exp()
                    };
                    let total: f64 = (0..seen).map(score).sum();
                    for d in 0..dim {
                        let exact: f64 = (0..seen)
                            .map(|s| score(s) / total * at(&v, h / 2, s, kv_heads * span, d))
                            .sum();
                        let got = f64::from(out[((b * width + t) * heads + h) * dim + d]);
                        assert!((got - exact).abs() < 2e-6, "{got} {exact}");
                    }
                }
            }
        }
    }

    #[test]
    fn keys_that_are_not_seen_change_nothing() {
        let attention = |span: usize| Attention {
            batch: 1,
            heads: 1,
            kv_heads: 1,
            width: 1,
            span,
            dim: 8,
            scale: 1.0,
            strides: [[8, 8, 8], [1000, 1000, 8], [1000, 1000, 8]],
        };
        let (q, k, v) = (values(8, 1), values(80, 2), values(80, 3));
        let (mut short, mut long) = (vec![0.0; 8], vec![0.0; 8]);
        attention(6).run(&q, &k, &v, Visible::All, &mut short);
        let mask: Vec<bool> = (0..10).map(|s| s < 6).collect();
        attention(10).run(&q, &k, &v, Visible::Mask(&mask), &mut long);
        assert_eq!(short, long);
    }
}
