//! `y = x W^T` with `W` in MLX's affine form: 4 or 8 bits, a scale and a bias per group.
//!
//! Every sum runs over two sets of 16 lanes, even and odd blocks of 16 inputs, whatever the number of
//! rows: a row's result is the same bit for bit alone and among others.

mod lanes;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use half::{bf16, f16};

use super::lanes::{Float, LANES, total};
use super::pool::{self, Shared};

/// Scales or biases, in the type they are stored in.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

impl Scales<'_> {
    /// Elements `start..start + out.len()`, widened.
    fn widen(self, start: usize, out: &mut [f32]) {
        fn copy<T: Float>(from: &[T], out: &mut [f32]) {
            for (out, &x) in out.iter_mut().zip(from) {
                *out = x.wide();
            }
        }
        match self {
            Self::F32(all) => out.copy_from_slice(&all[start..start + out.len()]),
            Self::Bf16(all) => copy(&all[start..], out),
            Self::F16(all) => copy(&all[start..], out),
        }
    }
}

/// A packed matrix `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub struct QuantizedMatrix<'a> {
    /// `[outputs, inputs * bits / 32]`, low bits first.
    pub words: &'a [u32],
    /// `[outputs, inputs / group]`.
    pub scales: Scales<'a>,
    /// As `scales`.
    pub biases: Scales<'a>,
    /// Outputs.
    pub outputs: usize,
    /// Inputs, a multiple of `group`.
    pub inputs: usize,
    /// 32, 64 or 128.
    pub group: usize,
    /// 4 or 8.
    pub bits: usize,
}

/// Rows of `x` that are multiplied with packed weights; more than these are worth unpacking for.
const BLOCK: usize = 8;

/// Outputs that a thread takes at a time.
const TILE: usize = 16;

impl QuantizedMatrix<'_> {
    /// Whether the kernel takes matrices of this shape.
    pub fn supports(inputs: usize, group: usize, bits: usize) -> bool {
        matches!(bits, 4 | 8) && matches!(group, 32 | 64 | 128) && inputs.is_multiple_of(group)
    }

    /// `x` `[rows, inputs]` to `y` `[rows, outputs]`.
    ///
    /// # Panics
    /// The lengths do not fit the shape.
    pub fn multiply(&self, x: &[f32], y: &mut [f32]) {
        let rows = x.len() / self.inputs;
        assert!(x.len() == rows * self.inputs && y.len() == rows * self.outputs);
        assert_eq!(
            self.words.len(),
            self.outputs * self.inputs * self.bits / 32
        );
        let kernels = Kernels::best();
        let out = Shared::new(y);
        // A small product is done before another thread has noticed it.
        let small = rows * self.outputs * self.inputs < 1 << 16;
        let tiles = self.outputs.div_ceil(TILE);
        let most = if small {
            1
        } else {
            tiles.min(pool::threads() * 8)
        };
        let share = tiles.div_ceil(most.max(1)).max(1);
        pool::run(tiles.div_ceil(share), |piece| {
            let mut tile = Tile::new(self);
            for index in piece * share..((piece + 1) * share).min(tiles) {
                tile.take(self, index * TILE);
                if rows > BLOCK {
                    tile.multiply_unpacked(kernels, x, rows, out, self.outputs);
                } else if rows > 0 {
                    tile.multiply_packed(kernels, x, rows, out, self.outputs);
                }
            }
        });
    }
}

/// A few consecutive outputs of a matrix.
struct Tile<'a> {
    first: usize,
    packed: Packed<'a>,
    /// Scales and biases, widened where they are stored narrow.
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// `[outputs, inputs]`, for many rows.
    weights: Vec<f32>,
}

/// Packed weights of `outputs` consecutive outputs.
#[derive(Clone, Copy)]
struct Packed<'a> {
    words: &'a [u32],
    outputs: usize,
    inputs: usize,
    group: usize,
    bits: usize,
}

impl<'a> Packed<'a> {
    fn words_of(&self, output: usize) -> &'a [u32] {
        let words = self.inputs * self.bits / 32;
        &self.words[output * words..(output + 1) * words]
    }
}

impl<'a> Tile<'a> {
    fn new(matrix: &QuantizedMatrix<'a>) -> Self {
        Self {
            first: 0,
            packed: Packed {
                words: &[],
                outputs: 0,
                inputs: matrix.inputs,
                group: matrix.group,
                bits: matrix.bits,
            },
            scales: Vec::new(),
            biases: Vec::new(),
            weights: Vec::new(),
        }
    }

    /// Turns to the outputs from `first` on.
    fn take(&mut self, matrix: &QuantizedMatrix<'a>, first: usize) {
        let outputs = TILE.min(matrix.outputs - first);
        let words = matrix.inputs * matrix.bits / 32;
        let groups = matrix.inputs / matrix.group;
        self.first = first;
        self.packed.words = &matrix.words[first * words..(first + outputs) * words];
        self.packed.outputs = outputs;
        for (to, from) in [
            (&mut self.scales, matrix.scales),
            (&mut self.biases, matrix.biases),
        ] {
            to.resize(outputs * groups, 0.0);
            from.widen(first * groups, to);
        }
    }

    fn multiply_packed(
        &self,
        kernels: Kernels,
        x: &[f32],
        rows: usize,
        out: Shared<f32>,
        stride: usize,
    ) {
        let mut sums = [[0.0; BLOCK]; TILE];
        let args = (self.packed, &self.scales[..], &self.biases[..]);
        // SAFETY: the kernels were chosen for what this processor has, and all lengths fit.
        unsafe { (kernels.packed)(args, x, rows, &mut sums) };
        for row in 0..rows {
            // SAFETY: an output of all rows belongs to one tile.
            let out = unsafe { out.slice(row * stride + self.first, self.packed.outputs) };
            for (out, sums) in out.iter_mut().zip(&sums) {
                *out = sums[row];
            }
        }
    }

    fn multiply_unpacked(
        &mut self,
        kernels: Kernels,
        x: &[f32],
        rows: usize,
        out: Shared<f32>,
        stride: usize,
    ) {
        let (inputs, outputs) = (self.packed.inputs, self.packed.outputs);
        let args = (self.packed, &self.scales[..], &self.biases[..]);
        self.weights.resize(outputs * inputs, 0.0);
        // SAFETY: as in `multiply_packed`.
        unsafe { (kernels.unpack)(args, &mut self.weights) };
        for first in (0..rows).step_by(DENSE_ROWS) {
            let count = DENSE_ROWS.min(rows - first);
            let x = &x[first * inputs..(first + count) * inputs];
            let mut sums = [[0.0; BLOCK]; TILE];
            // SAFETY: as above.
            unsafe { (kernels.dense)(&self.weights, inputs, x, count, &mut sums) };
            for row in 0..count {
                let at = (first + row) * stride + self.first;
                // SAFETY: an output of all rows belongs to one tile.
                let out = unsafe { out.slice(at, outputs) };
                for (out, sums) in out.iter_mut().zip(&sums) {
                    *out = sums[row];
                }
            }
        }
    }
}

/// Rows that unpacked weights are multiplied with at a time.
const DENSE_ROWS: usize = 6;

/// Sums per output and row.
type Sums = [[f32; BLOCK]; TILE];

/// Packed weights with their scales and biases.
type Weights<'a> = (Packed<'a>, &'a [f32], &'a [f32]);

/// The inner loops for one kind of processor. All sum in the same order.
#[derive(Clone, Copy)]
struct Kernels {
    /// All outputs of a tile with at most `BLOCK` rows of `x`.
    packed: unsafe fn(Weights<'_>, x: &[f32], rows: usize, sums: &mut Sums),
    /// A tile's weights, row-major.
    unpack: unsafe fn(Weights<'_>, weights: &mut [f32]),
    /// Unpacked weights with at most `DENSE_ROWS` rows of `x`.
    dense: unsafe fn(weights: &[f32], inputs: usize, x: &[f32], rows: usize, sums: &mut Sums),
}

impl Kernels {
    const PORTABLE: Self = Self {
        packed: |weights, x, rows, sums| lanes::packed(weights, x, rows, sums, |a, b, c| a * b + c),
        unpack: |weights, out| lanes::unpack(weights, out, |a, b, c| a * b + c),
        dense: |weights, inputs, x, rows, sums| {
            lanes::dense(weights, inputs, x, rows, sums, |a, b, c| a * b + c);
        },
    };

    /// The best ones for this processor.
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                return x86::AVX512;
            }
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
            {
                return x86::AVX2;
            }
        }
        Self::PORTABLE
    }
}
