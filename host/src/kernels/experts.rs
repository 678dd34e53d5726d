//! A mixture of experts: which experts a row goes through, and feed-forward blocks of which each row
//! takes a few.

use super::lanes::Float;
use super::matrix::Matrix;
use super::pool::{self, Shared};
use super::project::{End, Project, run_all};
use super::rows::{Gate, least_rows};

/// The `chosen` largest of each row of `scores` `[rows, count]`, larger ones first, of equal ones those
/// with the lower index: their softmax times the factor of each, and their indices, `[rows, chosen]`.
///
/// # Panics
/// The lengths do not fit.
pub fn route<T: Float>(
    scores: &[T],
    count: usize,
    scale: Option<&[T]>,
    chosen: usize,
    weights: &mut [T],
    choice: &mut [i32],
) {
    assert!((1..=count).contains(&chosen) && weights.len() == choice.len());
    assert!(scale.is_none_or(|scale| scale.len() == count));
    assert_eq!(scores.len() / count, weights.len() / chosen);
    let mut best: Vec<(f32, usize)> = Vec::with_capacity(chosen + 1);
    let rows = scores.chunks_exact(count);
    let outputs = weights
        .chunks_exact_mut(chosen)
        .zip(choice.chunks_exact_mut(chosen));
    for (scores, (weights, choice)) in rows.zip(outputs) {
        best.clear();
        for (index, score) in scores.iter().enumerate() {
            let score = score.wide();
            let place = best.iter().position(|(other, _)| score > *other);
            let place = place.unwrap_or(best.len());
            if place < chosen {
                best.truncate(chosen - 1);
                best.insert(place, (score, index));
            }
        }
        let largest = best[0].0;
        best.iter_mut().for_each(|(x, _)| *x = (*x - largest).exp());
        let total: f32 = best.iter().map(|(x, _)| x).sum();
        for ((x, index), (weight, choice)) in best.iter().zip(weights.iter_mut().zip(choice)) {
            let factor = scale.map_or(1.0, |scale| scale[*index].wide());
            *weight = T::narrow(x / total * factor);
            *choice = *index as i32;
        }
    }
}

/// Experts, and what happens around them.
pub struct Experts<'a, T> {
    /// `[rows, width]`.
    pub x: &'a [T],
    /// Width of a row, before and after.
    pub width: usize,
    /// Weight and epsilon of the RMSNorm that `x` goes through first.
    pub norm: Option<(&'a [T], f32)>,
    /// How many experts there are.
    pub count: usize,
    /// Experts a row goes through.
    pub chosen: usize,
    /// `[rows, chosen]`; an index outside is taken for the nearest one.
    pub choice: &'a [i32],
    /// `[rows, chosen]`.
    pub weights: &'a [T],
    /// The matrices of all experts, one below the other: of the gate, beside it, and down.
    pub matrices: &'a [Matrix<'a>; 3],
    /// What opens the gate.
    pub gate: Gate,
    /// Weight and epsilon of the RMSNorm that the outcome goes through next.
    pub post_norm: Option<(&'a [T], f32)>,
    /// `[rows, width]`, added to the outcome then.
    pub residual: Option<&'a [T]>,
    /// A factor on the outcome at the end.
    pub scale: f32,
    /// Whether activations stay as they are.
    pub exact: bool,
}

/// Rows that go through the same expert.
struct Share {
    expert: usize,
    rows: usize,
}

impl<T: Float> Experts<'_, T> {
    /// Writes `[rows, width]`: the sum over the chosen experts of `weight * down(gate(x) * up(x))`.
    ///
    /// Rows are put together by expert, so that the weights of each are read once. What a row gives does
    /// not depend on which others there are.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run(&self, out: &mut [T]) {
        let (width, chosen) = (self.width, self.chosen);
        let rows = self.x.len() / width;
        assert!(self.x.len() == rows * width && out.len() == self.x.len());
        assert!(self.choice.len() == rows * chosen && self.weights.len() == rows * chosen);
        if rows == 0 {
            return;
        }
        let (shares, places) = self.shares();
        let normed;
        let x = match self.norm {
            Some((weight, eps)) => {
                let mut x = vec![T::default(); self.x.len()];
                super::rows::rms_norm(self.x, Some(weight), eps, width, &mut x);
                normed = x;
                &normed
            }
            None => self.x,
        };
        let mut gathered = vec![T::default(); places.len() * width];
        for (slot, &place) in places.iter().enumerate() {
            let row = slot / chosen;
            gathered[place * width..][..width].copy_from_slice(&x[row * width..][..width]);
        }
        let inner = self.matrices[0].outputs() / self.count;
        let gated = self.stage(&shares, &gathered, width, &[0, 1], inner, Some(self.gate));
        let made = self.stage(&shares, &gated, inner, &[2], width, None);
        self.combine(&made, &places, out);
    }

    /// The experts that rows go through; and, for every choice of every row, where it lies in a list that is
    /// sorted by expert.
    fn shares(&self) -> (Vec<Share>, Vec<usize>) {
        let last = self.count - 1;
        let experts = || {
            self.choice
                .iter()
                .map(move |&id| (id.max(0) as usize).min(last))
        };
        let mut starts = vec![0; self.count];
        experts().for_each(|expert| starts[expert] += 1);
        let mut shares = Vec::new();
        let mut next = 0;
        for (expert, start) in starts.iter_mut().enumerate() {
            let rows = std::mem::replace(start, next);
            next += rows;
            if rows > 0 {
                shares.push(Share { expert, rows });
            }
        }
        let places = experts().map(|expert| {
            starts[expert] += 1;
            starts[expert] - 1
        });
        (shares, places.collect())
    }

    /// The rows of each share through one matrix of its expert, or two with a gate.
    fn stage(
        &self,
        shares: &[Share],
        x: &[T],
        inputs: usize,
        matrices: &[usize],
        outputs: usize,
        gate: Option<Gate>,
    ) -> Vec<T> {
        let mut made = vec![T::default(); x.len() / inputs * outputs];
        let of_expert = |share: &Share| -> Vec<Matrix<'_>> {
            let part =
                |&index: &usize| self.matrices[index].part(share.expert * outputs, outputs, inputs);
            matrices.iter().map(part).collect()
        };
        let parts: Vec<_> = shares.iter().map(of_expert).collect();
        let (mut rest_in, mut rest_out) = (x, &mut made[..]);
        let mut projects = Vec::with_capacity(shares.len());
        let mut buffers = Vec::with_capacity(shares.len());
        for (share, matrices) in shares.iter().zip(&parts) {
            let (x, after) = rest_in.split_at(share.rows * inputs);
            rest_in = after;
            let (out, after) = std::mem::take(&mut rest_out).split_at_mut(share.rows * outputs);
            rest_out = after;
            buffers.push([out]);
            projects.push(Project {
                x,
                inputs,
                norm: None,
                matrices,
                offsets: &[None, None][..matrices.len()],
                gate,
                post_norm: None,
                residual: None,
                scale: 1.0,
                exact: self.exact,
            });
        }
        let mut buffers: Vec<_> = buffers.iter_mut().map(|out| &mut out[..]).collect();
        run_all(&projects, &mut buffers);
        made
    }

    /// The weighted sums, and what becomes of them.
    fn combine(&self, made: &[T], places: &[usize], out: &mut [T]) {
        let (width, chosen) = (self.width, self.chosen);
        let end = End {
            post_norm: self.post_norm,
            residual: self.residual,
            scale: self.scale,
        };
        let shared = Shared::new(out);
        pool::split(places.len() / chosen, least_rows(width), |range| {
            let mut sums = vec![0.0f32; width];
            for row in range {
                sums.fill(0.0);
                for slot in row * chosen..(row + 1) * chosen {
                    let weight = self.weights[slot].wide();
                    let made = &made[places[slot] * width..][..width];
                    for (sum, x) in sums.iter_mut().zip(made) {
                        *sum += T::narrow(weight * x.wide()).wide();
                    }
                }
                for sum in &mut sums {
                    *sum = T::narrow(*sum).wide();
                }
                end.row(row, &mut sums);
                // SAFETY: every row belongs to one piece.
                let out = unsafe { shared.slice(row * width, width) };
                for (out, sum) in out.iter_mut().zip(&sums) {
                    *out = T::narrow(*sum);
                }
            }
        });
    }
}
