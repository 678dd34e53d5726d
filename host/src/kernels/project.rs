//! Projections: several matrices on the same rows, with what comes before and after in the same call.

use std::borrow::Cow;
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
        run_all(std::slice::from_ref(self), &mut [outputs]);
    }

    /// How many outputs there are: a gate makes one of two.
    fn made(&self) -> usize {
        match self.gate {
            Some(_) => 1,
            None => self.matrices.len(),
        }
    }

    /// The rows in single precision, after the norm.
    fn wide_rows(&self) -> Cow<'_, [f32]> {
        let Some((weight, eps)) = self.norm else {
            let owned = || Cow::Owned(T::widened(self.x.to_vec()));
            return T::as_f32(self.x).map_or_else(owned, Cow::Borrowed);
        };
        let mut normed = vec![T::default(); self.x.len()];
        rows::rms_norm(self.x, Some(weight), eps, self.inputs, &mut normed);
        Cow::Owned(T::widened(normed))
    }

    /// Whether the only output changes once more when its rows are complete.
    fn whole_rows(&self) -> bool {
        self.post_norm.is_some() || self.scale != 1.0
    }

    fn end(&self) -> End<'_, T> {
        End {
            post_norm: self.post_norm,
            residual: self.residual,
            scale: self.scale,
        }
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

/// Runs several projections as one piece of work; `outputs` are those of each.
///
/// # Panics
/// The lengths do not fit.
pub fn run_all<T: Float>(projects: &[Project<'_, T>], outputs: &mut [&mut [&mut [T]]]) {
    assert_eq!(projects.len(), outputs.len());
    let rows: Vec<_> = projects.iter().map(Project::wide_rows).collect();
    let inputs: Vec<_> = projects
        .iter()
        .zip(&rows)
        .map(|(project, x)| Input::new(x, project.inputs, project.matrices, project.exact))
        .collect();
    let mut shared = Vec::with_capacity(projects.len());
    // All tiles of all outputs, in one list.
    let mut tiles = Vec::new();
    let mut work = 0;
    for (at, (project, outputs)) in projects.iter().zip(outputs.iter_mut()).enumerate() {
        assert_eq!(project.matrices.len(), project.offsets.len());
        assert_eq!(project.made(), outputs.len());
        for (index, matrix) in project.matrices[..project.made()].iter().enumerate() {
            let firsts = (0..matrix.outputs()).step_by(TILE);
            tiles.extend(firsts.map(|first| (at, index, first)));
        }
        let widths = project.matrices.iter().map(Matrix::outputs);
        work += widths.sum::<usize>() * project.x.len();
        shared.push(
            outputs
                .iter_mut()
                .map(|out| Shared::new(out))
                .collect::<Vec<_>>(),
        );
    }
    let pieces = if work < 1 << 16 {
        1
    } else {
        pool::threads() * 32
    };
    let share = tiles.len().div_ceil(pieces).max(1);
    pool::run(tiles.len().div_ceil(share), |piece| {
        WORKPLACE.with_borrow_mut(|place| {
            for &(at, index, first) in tiles.iter().skip(piece * share).take(share) {
                let project = &projects[at];
                let rows = project.x.len() / project.inputs;
                place.sums.resize(rows * TILE, 0.0);
                project.tile(index, first, &inputs[at], &shared[at][index], place);
            }
        });
    });
    for (project, outputs) in projects.iter().zip(outputs.iter_mut()) {
        if let ([out], true) = (&mut **outputs, project.whole_rows()) {
            project.end().apply(out, project.matrices[0].outputs());
        }
    }
}

/// What becomes of complete rows.
pub(super) struct End<'a, T> {
    pub post_norm: Option<(&'a [T], f32)>,
    pub residual: Option<&'a [T]>,
    pub scale: f32,
}

impl<T: Float> End<'_, T> {
    /// The norm, what is added, and the factor.
    pub fn apply(&self, out: &mut [T], width: usize) {
        let rows = out.len() / width;
        let shared = Shared::new(out);
        pool::split(rows, rows::least_rows(width), |range| {
            let mut wide = vec![0.0f32; width];
            for row in range {
                // SAFETY: every row belongs to one piece.
                let out = unsafe { shared.slice(row * width, width) };
                for (wide, x) in wide.iter_mut().zip(&*out) {
                    *wide = x.wide();
                }
                self.row(row, &mut wide);
                for (out, x) in out.iter_mut().zip(&wide) {
                    *out = T::narrow(*x);
                }
            }
        });
    }

    /// One row, rounded where the steps one by one would be.
    pub fn row(&self, row: usize, wide: &mut [f32]) {
        let width = wide.len();
        if let Some((weight, eps)) = self.post_norm {
            let scale = 1.0 / (dot(wide, wide) / width as f32 + eps).sqrt();
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
        for x in wide.iter_mut() {
            *x *= factor;
        }
    }
}
