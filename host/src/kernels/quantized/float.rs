//! Products with activations as they are.
//!
//! Every sum runs over two sets of 16 lanes, even and odd blocks of 16 inputs, whatever the number of
//! rows: a row's result is the same bit for bit alone and among others.

use super::lanes;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{QuantizedMatrix, TILE};

/// Rows of `x` that are multiplied with packed weights; more than these are worth unpacking for.
pub(super) const BLOCK: usize = 8;

/// What a thread works in, kept from tile to tile.
#[derive(Default)]
pub struct Scratch {
    /// Scales and biases in single precision.
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// `[outputs, inputs]`, for many rows.
    weights: Vec<f32>,
}

/// Multiplies the outputs `first..first + outputs` of a matrix with all rows of `x`
/// `[rows, inputs]`, to `out` `[rows, TILE]`.
///
/// # Panics
/// The lengths do not fit.
pub fn multiply(
    matrix: &QuantizedMatrix<'_>,
    first: usize,
    outputs: usize,
    x: &[f32],
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    matrix.check();
    let rows = out.len() / TILE;
    assert!(outputs <= TILE && first + outputs <= matrix.outputs);
    assert!(x.len() == rows * matrix.inputs && out.len() == rows * TILE);
    if rows == 0 {
        return;
    }
    let (words, groups) = (
        matrix.inputs * matrix.bits / 32,
        matrix.inputs / matrix.group,
    );
    let packed = Packed {
        words: &matrix.words[first * words..(first + outputs) * words],
        outputs,
        inputs: matrix.inputs,
        group: matrix.group,
        bits: matrix.bits,
    };
    for (to, from) in [
        (&mut scratch.scales, matrix.scales),
        (&mut scratch.biases, matrix.biases),
    ] {
        to.resize(outputs * groups, 0.0);
        from.spread::<1>(first * groups, to);
    }
    let weights = (packed, &scratch.scales[..], &scratch.biases[..]);
    let kernels = Kernels::best();
    if rows > BLOCK {
        scratch.weights.resize(outputs * matrix.inputs, 0.0);
        // SAFETY: the kernels were chosen for what this processor has, and all lengths fit.
        unsafe { (kernels.unpack)(weights, &mut scratch.weights) };
        return dense(&scratch.weights, matrix.inputs, x, out);
    }
    let mut sums = [[0.0; BLOCK]; TILE];
    // SAFETY: as above.
    unsafe { (kernels.packed)(weights, x, rows, &mut sums) };
    store(&sums, outputs, out);
}

/// Multiplies weights `[outputs, inputs]` with all rows of `x`, to `out` `[rows, TILE]`; `inputs` is a
/// multiple of 32.
///
/// # Panics
/// The lengths do not fit.
pub fn dense(weights: &[f32], inputs: usize, x: &[f32], out: &mut [f32]) {
    let outputs = weights.len() / inputs;
    assert!(inputs.is_multiple_of(32) && outputs <= TILE && weights.len() == outputs * inputs);
    assert_eq!(x.len() / inputs, out.len() / TILE);
    let kernels = Kernels::best();
    for (x, out) in x
        .chunks(DENSE_ROWS * inputs)
        .zip(out.chunks_mut(DENSE_ROWS * TILE))
    {
        let mut sums = [[0.0; BLOCK]; TILE];
        // SAFETY: the kernels were chosen for what this processor has, and all lengths fit.
        unsafe { (kernels.dense)(weights, inputs, x, x.len() / inputs, &mut sums) };
        store(&sums, outputs, out);
    }
}

/// Output by output to row by row.
fn store(sums: &Sums, outputs: usize, out: &mut [f32]) {
    for (row, out) in out.chunks_exact_mut(TILE).enumerate() {
        for (out, sums) in out.iter_mut().zip(&sums[..outputs]) {
            *out = sums[row];
        }
    }
}

/// Packed weights of `outputs` consecutive outputs.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub words: &'a [u32],
    pub outputs: usize,
    pub inputs: usize,
    pub group: usize,
    pub bits: usize,
}

impl<'a> Packed<'a> {
    pub fn words_of(&self, output: usize) -> &'a [u32] {
        let words = self.inputs * self.bits / 32;
        &self.words[output * words..(output + 1) * words]
    }
}

/// Rows that unpacked weights are multiplied with at a time.
pub(super) const DENSE_ROWS: usize = 6;

/// Sums per output and row.
pub(super) type Sums = [[f32; BLOCK]; TILE];

/// Packed weights with their scales and biases.
pub(super) type Weights<'a> = (Packed<'a>, &'a [f32], &'a [f32]);

/// The inner loops for one kind of processor. All sum in the same order.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// All outputs of a tile with at most `BLOCK` rows of `x`.
    pub packed: unsafe fn(Weights<'_>, x: &[f32], rows: usize, sums: &mut Sums),
    /// A tile's weights, row-major.
    pub unpack: unsafe fn(Weights<'_>, weights: &mut [f32]),
    /// Unpacked weights with at most `DENSE_ROWS` rows of `x`.
    pub dense: unsafe fn(weights: &[f32], inputs: usize, x: &[f32], rows: usize, sums: &mut Sums),
}

impl Kernels {
    pub const PORTABLE: Self = Self {
        packed: |weights, x, rows, sums| lanes::packed(weights, x, rows, sums, |a, b, c| a * b + c),
        unpack: |weights, out| lanes::unpack(weights, out, |a, b, c| a * b + c),
        dense: |weights, inputs, x, rows, sums| {
            lanes::dense(weights, inputs, x, rows, sums, |a, b, c| a * b + c);
        },
    };

    /// The best ones for this processor.
    pub fn best() -> Self {
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
