//! Activations in 16 bits, for products of integers.
//!
//! The elements of a row share a scale, its largest magnitude over 32767. Sums of integer products are
//! exact, and a row's result does not depend on other rows. The error is at most one part in 65534 of
//! the largest element.

use crate::kernels::pool::{self, Shared};
use crate::kernels::rows::least_rows;

/// The largest magnitude of an element.
pub const MOST: f32 = 32767.0;

/// Rows that are multiplied together.
pub const ROWS: usize = 4;

/// Bytes of weights in a block, for each lane of sums.
pub const LANE_BYTES: usize = 4;

/// Inputs that share a scale and a bias here, whatever the matrix's groups are: as many parts as there
/// are lanes are a step.
pub const PART: usize = 32;

/// A cache line of values: loads of vectors never straddle two.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [i16; 32]); // read through pointers

/// The values of some lines.
fn values_of(lines: &mut [Line]) -> &mut [i16] {
    // SAFETY: a line is 32 values without padding.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 32) }
}

/// Rows of activations, laid out as packed weights of a width are read by loops with some number of
/// lanes, 8 or 16.
///
/// The 16-bit words of a block of weights hold `n` weights each, 4 of 4 bits or 2 of 8. A block of
/// activations begins with those of all words' first weights, then come those of the second ones, and
/// so on. The rows of a band, up to [`ROWS`], take turns block by block.
pub struct Activations {
    rows: usize,
    lanes: usize,
    /// Elements of a block.
    width: usize,
    /// Blocks of a row; filled up with zeros.
    blocks: usize,
    /// Steps of a row; the last one may be short.
    steps: usize,
    /// Per band `[blocks, rows, width]`.
    values: Vec<Line>,
    /// Per row.
    scales: Vec<f32>,
    /// Sums of values over the parts of steps, which biases multiply. Per band `[steps, rows, lanes]`.
    sums: Vec<f32>,
}

/// Up to [`ROWS`] rows.
#[derive(Clone, Copy)]
pub struct Band<'a> {
    /// `[blocks, rows, width]`.
    pub values: &'a [i16],
    /// `[rows]`.
    pub scales: &'a [f32],
    /// `[steps, rows, lanes]`.
    pub sums: &'a [f32],
}

impl Activations {
    /// Rounds `x` `[rows, inputs]` for weights of `bits` bits and loops with so many lanes; `inputs` is a
    /// multiple of 32.
    pub fn quantize(x: &[f32], inputs: usize, bits: usize, lanes: usize) -> Self {
        let (rows, width) = (x.len() / inputs, width(bits, lanes));
        let (blocks, steps) = (inputs.div_ceil(width), inputs.div_ceil(PART * lanes));
        let mut values = vec![Line::default(); rows * blocks * width / 32];
        let mut scales = vec![0.0; rows];
        let mut sums = vec![0.0; rows * steps * lanes];
        let shared = (
            Shared::new(values_of(&mut values)),
            Shared::new(&mut scales),
            Shared::new(&mut sums),
        );
        pool::split(rows.div_ceil(ROWS), least_rows(ROWS * inputs), |bands| {
            for band in bands {
                let first = band * ROWS;
                let count = ROWS.min(rows - first);
                let (at, len) = (first * blocks * width, count * blocks * width);
                // SAFETY: every band belongs to one piece.
                let (values, scales, sums) = unsafe {
                    (
                        shared.0.slice(at, len),
                        shared.1.slice(first, count),
                        shared.2.slice(first * steps * lanes, count * steps * lanes),
                    )
                };
                for row in 0..count {
                    let x = &x[(first + row) * inputs..][..inputs];
                    let places = (&mut *values, &mut scales[row], &mut *sums);
                    fill(x, (bits, lanes), (row, count), places);
                }
            }
        });
        Self {
            rows,
            lanes,
            width,
            blocks,
            steps,
            values,
            scales,
            sums,
        }
    }

    /// Whether the rows are laid out for such a matrix.
    pub fn fits(&self, inputs: usize, bits: usize) -> bool {
        let width = width(bits, self.lanes);
        (self.width, self.blocks) == (width, inputs.div_ceil(width))
            && self.steps == inputs.div_ceil(PART * self.lanes)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Lanes of the loops that the rows are laid out for.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// The rows from `index * ROWS` on.
    pub fn band(&self, index: usize) -> Band<'_> {
        let first = index * ROWS;
        let rows = first..(first + ROWS).min(self.rows);
        let of = |len: usize| rows.start * len..rows.end * len;
        // SAFETY: a line is 32 values without padding.
        let values = unsafe {
            std::slice::from_raw_parts(self.values.as_ptr().cast(), self.values.len() * 32)
        };
        Band {
            values: &values[of(self.blocks * self.width)],
            scales: &self.scales[rows.clone()],
            sums: &self.sums[of(self.steps * self.lanes)],
        }
    }
}

/// Elements of a block.
pub fn width(bits: usize, lanes: usize) -> usize {
    lanes * LANE_BYTES * 8 / bits
}

/// A band's values and sums, and the scale of one of its rows.
pub type Places<'a> = (&'a mut [i16], &'a mut f32, &'a mut [f32]);

/// Lays out a row for weights of so many bits and so many lanes.
fn fill(x: &[f32], form: (usize, usize), row: (usize, usize), places: Places<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        use super::x86_vnni;
        if form.1 == x86_vnni::LANES && x86_vnni::available() {
            // SAFETY: the processor has what the loops use.
            return unsafe {
                match form.0 {
                    4 => x86_vnni::fill::<4>(x, row, places),
                    _ => x86_vnni::fill::<8>(x, row, places),
                }
            };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it.
            return unsafe { fill_avx2(x, form, row, places) };
        }
    }
    fill_lanes(x, form, row, places);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_avx2(x: &[f32], form: (usize, usize), row: (usize, usize), places: Places<'_>) {
    fill_lanes(x, form, row, places);
}

/// Written so that compilers make vectors of it.
#[inline(always)]
pub fn fill_lanes(x: &[f32], form: (usize, usize), row: (usize, usize), places: Places<'_>) {
    match form {
        (4, 16) => blocks::<128, 4, 16>(x, row, places),
        (4, _) => blocks::<64, 4, 8>(x, row, places),
        (_, 16) => blocks::<64, 2, 16>(x, row, places),
        _ => blocks::<32, 2, 8>(x, row, places),
    }
}

/// Row `row` of `rows`, in blocks of W elements, N to a word of weights, for L lanes.
#[inline(always)]
fn blocks<const W: usize, const N: usize, const L: usize>(
    x: &[f32],
    (row, rows): (usize, usize),
    (values, scale, sums): Places<'_>,
) {
    let mut lanes = [0.0f32; 16];
    let (parts, _) = x.as_chunks::<16>();
    for part in parts {
        for (most, x) in lanes.iter_mut().zip(part) {
            *most = most.max(x.abs());
        }
    }
    let most = lanes.into_iter().fold(0.0f32, f32::max);
    *scale = most / MOST;
    let inverse = if most > 0.0 { MOST / most } else { 0.0 };
    let (values, _) = values.as_chunks_mut::<W>();
    for (index, x) in x.chunks(W).enumerate() {
        let mut block = [0.0; W];
        block[..x.len()].copy_from_slice(x);
        let mut rounded = [0i32; W];
        for (to, x) in rounded.iter_mut().zip(&block) {
            // The constant pushes the fraction out of the mantissa, which rounds to nearest even.
            const ROUND: f32 = 12_582_912.0;
            *to = ((x * inverse + ROUND) - ROUND) as i32;
        }
        let values = &mut values[index * rows + row];
        for part in 0..N {
            for word in 0..W / N {
                values[part * (W / N) + word] = rounded[word * N + part] as i16;
            }
        }
        for (part, values) in rounded.chunks(PART).enumerate() {
            let part = index * (W / PART) + part;
            let sum: i32 = values.iter().sum();
            if let Some(place) = sums.get_mut((part / L * rows + row) * L + part % L) {
                *place = sum as f32;
            }
        }
    }
}
