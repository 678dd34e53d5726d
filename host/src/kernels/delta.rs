//! The gated delta rule: `S *= decay; S += beta (v - S k) k^T; y = S q`, step by step.

use super::lanes::dot;
use super::pool::{self, Shared};

/// The shape of a call.
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta {
    /// Rows.
    pub batch: usize,
    /// Steps.
    pub width: usize,
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Dimensions of a key.
    pub key_dim: usize,
    /// Dimensions of a value.
    pub value_dim: usize,
    /// Whether the state after every step is wanted, or only the last.
    pub every_state: bool,
}

impl GatedDelta {
    /// `[q, k, v]` are `[B, T, heads, D]`, `decay` and `beta` `[B, T, Hv]`, `state` `[B, Hv, Dv, Dk]`.
    /// Writes `y` `[B, T, Hv, Dv]` and the states after each step, or after the last.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run(
        &self,
        [q, k, v]: [&[f32]; 3],
        decay: &[f32],
        beta: &[f32],
        state: &[f32],
        y: &mut [f32],
        after: &mut [&mut [f32]],
    ) {
        let Self {
            batch,
            width,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = *self;
        assert_eq!(y.len(), batch * width * value_heads * value_dim);
        assert_eq!(after.len(), if self.every_state { width } else { 1 });
        let y = Shared::new(y);
        let after: Vec<_> = after.iter_mut().map(|state| Shared::new(state)).collect();
        let repeat = value_heads / key_heads;
        // A piece is a value head of a row: heads do not see each other.
        let body = |piece: usize| {
            let (row, head) = (piece / value_heads, piece % value_heads);
            let size = value_dim * key_dim;
            let mut current = state[piece * size..(piece + 1) * size].to_vec();
            for t in 0..width {
                let column = row * width + t;
                let key_at = (column * key_heads + head / repeat) * key_dim;
                let (q, k) = (&q[key_at..key_at + key_dim], &k[key_at..key_at + key_dim]);
                let gate = column * value_heads + head;
                let v = &v[gate * value_dim..(gate + 1) * value_dim];
                // SAFETY: a head's outputs and states belong to one piece.
                let y = unsafe { y.slice(gate * value_dim, value_dim) };
                step(&mut current, q, k, v, decay[gate], beta[gate], y);
                if self.every_state || t + 1 == width {
                    let index = if self.every_state { t } else { 0 };
                    // SAFETY: as above.
                    unsafe { after[index].slice(piece * size, size) }.copy_from_slice(&current);
                }
            }
        };
        if batch * value_heads * width * value_dim * key_dim < 1 << 15 {
            (0..batch * value_heads).for_each(body);
        } else {
            pool::run(batch * value_heads, body);
        }
    }
}

fn step(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, y: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has it.
        return unsafe { step_avx2(state, q, k, v, decay, beta, y) };
    }
    step_lanes(state, q, k, v, decay, beta, y);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn step_avx2(
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
    y: &mut [f32],
) {
    step_lanes(state, q, k, v, decay, beta, y);
}

#[inline(always)]
fn step_lanes(
    state: &mut [f32],
    q: &[f32],
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
        *y = dot(row, q);
    }
}
