//! Projections: several matrices on the same rows, with what comes before and after in the same call.

use std::cell::RefCell;

use super::lanes::{Float, dot};
use super::matrix::{Input, Matrix, Scratch};
use super::pool::{self, Shared};
use super::quantized::TILE;
use super::rows::{self, Gate};

/// What a thread works in: memory asked for anew would cost more than a small piece of work.
#[derive(Default)]
struct Workplace {
    scratch: Scratch,
    /// `[rows, TILE]`.
    sums: Vec<f32>,
    /// As `sums`.
    gate: Vec<f32>,
}

thread_local! {
    static WORKPLACE: RefCell<Workplace> = RefCell::default();
}

/// A norm, one or more matrices, and what becomes of their products.
pub struct Project<'a, T> {
    /// `[rows, inputs]`.
    pub x: &'a [T],
    /// Width of a row.
    pub inputs: usize,
    /// Weight and epsilon of the RMSNorm that `x` goes through first.
    pub norm: Option<(&'a [T], f32)>,
    /// What the rows are multiplied with.
    pub matrices: &'a [Matrix<'a>],
    /// Added to the products, one list per matrix.
    pub offsets: &'a [Option<&'a [T]>],
    /// Of two matrices: the only output is `gate(first) * second`.
    pub gate: Option<Gate>,
    /// Weight and epsilon of the RMSNorm that the only output goes through next.
    pub post_norm: Option<(&'a [T], f32)>,
    /// `[rows, outputs]`, added to the only output then.
    pub residual: Option<&'a [T]>,
    /// A factor on the only output at the end.
    pub scale: f32,
    /// Whether activations stay as they are.
    pub exact: bool,
}

impl<T: Float> Project<'_, T> {
    /// Writes one `[rows, outputs]` per matrix, or the gated one.
    ///
    /// # Panics
    /// The lengths do not fit.
    pub fn run(&self, outputs: &mut [&mut [T]]) {
        let rows = self.x.len() / self.inputs;
        assert_eq!(self.matrices.len(), self.offsets.len());
        let mut normed = Vec::new();
        let x = match self.norm {
            Some((weight, eps)) => {
                normed.resize(self.x.len(), T::default());
                rows::rms_norm(self.x, Some(weight), eps, self.inputs, &mut normed);
                &normed
            }
            None => self.x,
        };
        let wide;
        let x = match T::as_f32(x) {
            Some(x) => x,
            None => {
                wide = x.iter().map(|x| x.wide()).collect::<Vec<f32>>();
                &wide
            }
        };
        let input = Input::new(x, self.inputs, self.matrices, self.exact);
        let shared: Vec<_> = outputs.iter_mut().map(|out| Shared::new(out)).collect();
        // All tiles of all outputs, in one list.
        let mut tiles = Vec::new();
        let made = if self.gate.is_some() {
            1
        } else {
            self.matrices.len()
        };
        assert_eq!(made, shared.len());
        for (index, matrix) in self.matrices[..made].iter().enumerate() {
            tiles.extend(
                (0..matrix.outputs())
                    .step_by(TILE)
                    .map(|first| (index, first)),
            );
        }
        let work: usize = self.matrices.iter().map(Matrix::outputs).sum::<usize>() * x.len();
        let pieces = if work < 1 << 16 {
            1
        } else {
            pool::threads() * 8
        };
        let share = tiles.len().div_ceil(pieces).max(1);
        pool::run(tiles.len().div_ceil(share), |piece| {
            WORKPLACE.with_borrow_mut(|place| {
                place.sums.resize(rows * TILE, 0.0);
                for &(index, first) in tiles.iter().skip(piece * share).take(share) {
                    self.tile(index, first, &input, &shared[index], place);
                }
            });
        });
        if let ([out], true) = (outputs, self.whole_rows()) {
            self.finish(out);
        }
    }

    /// Whether the only output changes once more when its rows are complete.
    fn whole_rows(&self) -> bool {
        self.post_norm.is_some() || self.scale != 1.0
    }

    /// The norm after the product, what is added, and the factor.
    fn finish(&self, out: &mut [T]) {
        let width = self.matrices[0].outputs();
        let shared = Shared::new(out);
        let rows = self.x.len() / self.inputs;
        pool::split(rows, rows::least_rows(width), |range| {
            let mut wide = vec![0.0f32; width];
            for row in range {
                // SAFETY: every row belongs to one piece.
                let out = unsafe { shared.slice(row * width, width) };
                for (wide, x) in wide.iter_mut().zip(&*out) {
                    *wide = x.wide();
                }
                // Rounded where the steps one by one would be.
                if let Some((weight, eps)) = self.post_norm {
                    let scale = 1.0 / (dot(&wide, &wide) / width as f32 + eps).sqrt();
                    for (x, weight) in wide.iter_mut().zip(weight) {
                        *x = T::narrow(*x * scale * weight.wide()).wide();
                    }
                }
                if let Some(residual) = self.residual {
                    for (x, before) in wide.iter_mut().zip(&residual[row * width..]) {
                        *x = T::narrow(before.wide() + *x).wide();
                    }
                }
                let factor = T::narrow(self.scale).wide();
                for (out, x) in out.iter_mut().zip(&wide) {
                    *out = T::narrow(x * factor);
                }
            }
        });
    }

    /// A few outputs of all rows.
    fn tile(
        &self,
        index: usize,
        first: usize,
        x: &Input<'_>,
        out: &Shared<T>,
        place: &mut Workplace,
    ) {
        let Workplace {
            scratch,
            sums,
            gate,
        } = place;
        let total = self.matrices[index].outputs();
        let count = TILE.min(total - first);
        self.product(index, first, x, sums, scratch);
        if let Some(op) = self.gate {
            gate.resize(sums.len(), 0.0);
            gate.copy_from_slice(sums);
            self.product(1, first, x, sums, scratch);
            // Rounded where the steps one by one would be.
            for x in gate.iter_mut().chain(sums.iter_mut()) {
                *x = T::narrow(*x).wide();
            }
            rows::gate_in_place(op, gate, sums);
        }
        for (row, sums) in sums.chunks_exact(TILE).enumerate() {
            let at = row * total + first;
            // SAFETY: every tile of a row belongs to one piece.
            let out = unsafe { out.slice(at, count) };
            match self.residual.filter(|_| !self.whole_rows()) {
                Some(residual) => {
                    for ((out, sum), before) in out.iter_mut().zip(sums).zip(&residual[at..]) {
                        *out = T::narrow(before.wide() + T::narrow(*sum).wide());
                    }
                }
                None => {
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = T::narrow(*sum);
                    }
                }
            }
        }
    }

    /// The product with one matrix, and its offset.
    fn product(
        &self,
        index: usize,
        first: usize,
        x: &Input<'_>,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.matrices[index].multiply(first, x, sums, scratch);
        if let Some(offset) = self.offsets[index] {
            for sums in sums.chunks_exact_mut(TILE) {
                for (sum, offset) in sums.iter_mut().zip(&offset[first..]) {
                    *sum = T::narrow(*sum).wide() + offset.wide();
                }
            }
        }
    }
}
