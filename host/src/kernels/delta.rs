//! A Gated DeltaNet layer between its projections: the causal convolution, the gated delta rule
//! `S *= decay; S += beta (v - S k) k^T; y = S q` step by step, and the gated norm.

use super::lanes::{Float, dot};
use super::pool::{self, Shared};
use super::rows::sigmoid;

/// Inside the root that divides queries and keys by their length.
pub const L2_EPS: f32 = 1e-6;

/// One call. Channels `C = 2 Hk Dk + Hv Dv` are those of queries, keys and values, one after the other.
pub struct GatedDelta<'a, T> {
    /// Rows.
    pub batch: usize,
    /// Columns of a row.
    pub width: usize,
    /// Query and key heads, at least 1.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Dimensions of a key, at least 1.
    pub key_dim: usize,
    /// Dimensions of a value, at least 1.
    pub value_dim: usize,
    /// Taps of the convolution, at least 1.
    pub kernel: usize,
    /// `[B, T, C]`: what goes into the convolution.
    pub qkv: &'a [T],
    /// `[B, T, Hv Dv]`: opens the gate of the outcome. Without it there is none, only the state moves on.
    pub z: Option<&'a [T]>,
    /// `[B, T, Hv]`: the sigmoid is `beta`.
    pub b: &'a [T],
    /// `[B, T, Hv]`: `decay = exp(rate softplus(a + dt_bias))`.
    pub a: &'a [T],
    /// `[B, K-1, C]`: what went into the convolution before.
    pub conv: &'a [T],
    /// `[K, C]`, oldest first.
    pub taps: &'a [T],
    /// `[Hv]`.
    pub rate: &'a [f32],
    /// `[Hv]`.
    pub dt_bias: &'a [f32],
    /// Whether `a + dt_bias` is rounded as elements are: not where the one is wider than the other.
    pub sum_rounds: bool,
    /// `[Dv]`: the weight of the outcome's norm.
    pub norm: &'a [f32],
    /// Epsilon of that norm.
    pub eps: f32,
    /// Columns of each row that are filled; the others leave the state as it is, and give zeros.
    pub lens: &'a [i32],
}

/// The recurrent states `[B, Hv, Dv, Dk]` of a call.
pub enum State<'a, T> {
    /// They stay as they are.
    Before(&'a [f32]),
    /// They become those after the last filled column, and what the convolution has to see next is
    /// written to `[B, K-1, C]`.
    Advance(&'a mut [f32], &'a mut [T]),
}

/// What pieces write to.
#[derive(Clone, Copy)]
enum SharedState<'a, T> {
    Before(&'a [f32]),
    Advance(Shared<f32>, Shared<T>),
}

impl<T: Float> GatedDelta<'_, T> {
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Writes the outcome `[B, T, Hv Dv]`, if there is to be one, and the state.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run(&self, out: &mut [T], state: State<'_, T>) {
        let (columns, channels) = (self.batch * self.width, self.channels());
        let values = self.value_heads * self.value_dim;
        let size = self.batch * values * self.key_dim;
        let seen = self.batch * (self.kernel - 1) * channels;
        assert!(self.qkv.len() == columns * channels && self.conv.len() == seen);
        assert!(self.z.map_or(0, |_| columns * values) == out.len());
        assert!(self.z.is_none_or(|z| z.len() == out.len()));
        assert!(self.a.len() == columns * self.value_heads && self.b.len() == self.a.len());
        assert!(self.taps.len() == self.kernel * channels && self.norm.len() == self.value_dim);
        assert!(self.rate.len() == self.value_heads && self.dt_bias.len() == self.value_heads);
        let fits = |&len: &i32| usize::try_from(len).is_ok_and(|len| len <= self.width);
        assert!(self.lens.len() == self.batch && self.lens.iter().all(fits));
        let state = match state {
            State::Before(state) => {
                assert_eq!(state.len(), size);
                SharedState::Before(state)
            }
            State::Advance(state, conv) => {
                assert!(state.len() == size && conv.len() == seen);
                SharedState::Advance(Shared::new(state), Shared::new(conv))
            }
        };
        let out = Shared::new(out);
        // A piece is a key head of a row with its value heads: they see no other.
        let pieces = self.batch * self.key_heads;
        let body = |piece: usize| self.head(piece, out, state);
        if size * self.width < 1 << 15 {
            (0..pieces).for_each(body);
        } else {
            pool::run(pieces, body);
        }
    }

    fn head(&self, piece: usize, out: Shared<T>, state: SharedState<'_, T>) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
        {
            // SAFETY: the processor has it.
            return unsafe { self.head_avx2(piece, out, state) };
        }
        self.head_lanes(piece, out, state);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn head_avx2(&self, piece: usize, out: Shared<T>, state: SharedState<'_, T>) {
        self.head_lanes(piece, out, state);
    }

    #[inline(always)]
    fn head_lanes(&self, piece: usize, out: Shared<T>, shared: SharedState<'_, T>) {
        let Self {
            width,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = *self;
        let (row, key_head) = (piece / key_heads, piece % key_heads);
        let filled = self.lens[row] as usize;
        let (mut q, mut k) = (vec![0.0; filled * key_dim], vec![0.0; filled * key_dim]);
        let keys = key_heads * key_dim;
        for (to, first, scale) in [
            (&mut q, key_head * key_dim, 1.0 / key_dim as f32),
            (
                &mut k,
                keys + key_head * key_dim,
                (key_dim as f32).powf(-0.5),
            ),
        ] {
            self.convolve(row, first, key_dim, to);
            self.keep(row, first, key_dim, shared);
            // x / sqrt(sum x^2 + eps), written as an RMS norm.
            for x in to.chunks_exact_mut(key_dim) {
                let mean = dot(x, x) / key_dim as f32;
                let length = 1.0 / (mean + L2_EPS / key_dim as f32).sqrt();
                for x in x {
                    *x = rounded::<T>(rounded::<T>(*x * length) * scale);
                }
            }
        }
        let mut v = vec![0.0; filled * value_dim];
        let mut y = vec![0.0; value_dim];
        let mut held = Vec::new();
        let repeat = value_heads / key_heads;
        for head in key_head * repeat..(key_head + 1) * repeat {
            let first = 2 * keys + head * value_dim;
            self.convolve(row, first, value_dim, &mut v);
            self.keep(row, first, value_dim, shared);
            let size = value_dim * key_dim;
            let at = (row * value_heads + head) * size;
            let state: &mut [f32] = match &shared {
                // SAFETY: a head's state belongs to one piece.
                SharedState::Advance(state, _) => unsafe { state.slice(at, size) },
                SharedState::Before(before) => {
                    held.clear();
                    held.extend_from_slice(&before[at..at + size]);
                    &mut held
                }
            };
            for t in 0..width {
                let gate = (row * width + t) * value_heads + head;
                if t < filled {
                    let beta = rounded::<T>(sigmoid(self.b[gate].wide()));
                    let mut a = self.a[gate].wide() + self.dt_bias[head];
                    if self.sum_rounds {
                        a = rounded::<T>(a);
                    }
                    let decay = (self.rate[head] * softplus(a)).exp();
                    let keys = t * key_dim..(t + 1) * key_dim;
                    let v = &v[t * value_dim..(t + 1) * value_dim];
                    let q = self.z.map(|_| &q[keys.clone()]);
                    step(state, q, &k[keys], v, decay, beta, &mut y);
                }
                let Some(z) = self.z else { continue };
                // SAFETY: a head's outputs belong to one piece.
                let out = unsafe { out.slice(gate * value_dim, value_dim) };
                if t < filled {
                    self.finish(&mut y, &z[gate * value_dim..], out);
                } else {
                    out.fill(T::default());
                }
            }
        }
    }

    /// What went into the convolution at a place of the window, in channel `first` and those after it.
    #[inline(always)]
    fn seen(&self, row: usize, place: usize, first: usize, count: usize) -> &[T] {
        let (channels, before) = (self.channels(), self.kernel - 1);
        match place.checked_sub(before) {
            None => &self.conv[(row * before + place) * channels + first..][..count],
            Some(t) => &self.qkv[(row * self.width + t) * channels + first..][..count],
        }
    }

    /// The convolution of some channels and its activation, of the first columns, to `[columns, count]`.
    #[inline(always)]
    fn convolve(&self, row: usize, first: usize, count: usize, to: &mut [f32]) {
        for (t, to) in to.chunks_exact_mut(count).enumerate() {
            to.fill(0.0);
            for tap in 0..self.kernel {
                let weights = &self.taps[tap * self.channels() + first..][..count];
                let seen = self.seen(row, t + tap, first, count);
                for ((to, x), weight) in to.iter_mut().zip(seen).zip(weights) {
                    *to += x.wide() * weight.wide();
                }
            }
            for x in to {
                let sum = rounded::<T>(*x);
                *x = rounded::<T>(sum * sigmoid(sum));
            }
        }
    }

    /// Writes what the convolution has to see next, in some channels.
    #[inline(always)]
    fn keep(&self, row: usize, first: usize, count: usize, state: SharedState<'_, T>) {
        let SharedState::Advance(_, conv) = state else {
            return;
        };
        let (channels, places) = (self.channels(), self.kernel - 1);
        for place in 0..places {
            let at = (row * places + place) * channels + first;
            // SAFETY: a head's channels belong to one piece.
            let to = unsafe { conv.slice(at, count) };
            to.copy_from_slice(self.seen(row, self.lens[row] as usize + place, first, count));
        }
    }

    /// `norm(y) * silu(z)`
    #[inline(always)]
    fn finish(&self, y: &mut [f32], z: &[T], out: &mut [T]) {
        for y in y.iter_mut() {
            *y = rounded::<T>(*y);
        }
        let scale = 1.0 / (dot(y, y) / y.len() as f32 + self.eps).sqrt();
        for (((out, y), z), weight) in out.iter_mut().zip(&*y).zip(z).zip(self.norm) {
            let z = z.wide();
            *out = T::narrow(y * scale * weight * (z * sigmoid(z)));
        }
    }
}

/// As an element would hold it: where the steps one by one would round.
#[inline(always)]
fn rounded<T: Float>(x: f32) -> f32 {
    T::narrow(x).wide()
}

/// `ln(1 + e^x)`
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// One column; without a query there is no `y`.
#[inline(always)]
fn step(
    state: &mut [f32],
    q: Option<&[f32]>,
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
    y: &mut [f32],
) {
    for ((row, &v), y) in state.chunks_exact_mut(k.len()).zip(v).zip(y) {
        for s in row.iter_mut() {
            *s *= decay;
        }
        let change = (v - dot(row, k)) * beta;
        for (s, k) in row.iter_mut().zip(k) {
            *s += change * k;
        }
        if let Some(q) = q {
            *y = dot(row, q);
        }
    }
}
