//! Weights in MLX's affine form, 4 or 8 bits with a scale and a bias per group, and their products
//! `y = x W^T` with activations as they are ([`float`]) or rounded to 16 bits ([`integer`]).

pub mod activations;
pub mod float;
pub mod integer;
mod lanes;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_integer;
#[cfg(target_arch = "x86_64")]
mod x86_vnni;

use std::ops::Range;

use half::{bf16, f16};

use super::lanes::Float;

/// Outputs that are computed together.
pub const TILE: usize = 16;

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
    fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
            Self::F16(all) => all.len(),
        }
    }

    /// Some of them.
    pub fn part(self, part: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[part]),
            Self::Bf16(all) => Self::Bf16(&all[part]),
            Self::F16(all) => Self::F16(&all[part]),
        }
    }

    /// The elements from `start` on, widened, each TIMES times in a row: 1, 2 or 4.
    fn spread<const TIMES: usize>(self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len() / TIMES;
        match self {
            Self::F32(all) => spread::<_, TIMES>(&all[range], out),
            Self::Bf16(all) => spread::<_, TIMES>(&all[range], out),
            Self::F16(all) => spread::<_, TIMES>(&all[range], out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
use x86_integer::Stored;

/// What scales and biases are stored in.
#[cfg(not(target_arch = "x86_64"))]
trait Stored: Copy {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: Copy> Stored for T {}

fn spread<S: Float + Stored, const TIMES: usize>(from: &[S], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("f16c") {
            // SAFETY: the processor has it.
            return unsafe { x86_integer::spread::<S, TIMES>(from, out) };
        }
    }
    for (out, x) in out.chunks_exact_mut(TIMES).zip(from) {
        out.fill(x.wide());
    }
}

/// A packed matrix `[outputs, inputs]`.
#[derive(Clone, Copy)]
pub struct QuantizedMatrix<'a> {
    /// `[outputs, inputs * bits / 32]`, low bits first.
    pub words: &'a [u32],
    /// `[outputs, inputs / group]`.
    pub scales: Scales<'a>,
    /// As `scales`, and of the same type.
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

impl QuantizedMatrix<'_> {
    /// Whether the kernels take matrices of this shape.
    pub fn supports(inputs: usize, group: usize, bits: usize) -> bool {
        // Bytes of packed words are read as such.
        cfg!(target_endian = "little")
            && matches!(bits, 4 | 8)
            && matches!(group, 32 | 64 | 128)
            && inputs.is_multiple_of(group)
    }

    /// # Panics
    /// The lengths do not fit the shape, which the loops rely on.
    fn check(&self) {
        assert!(Self::supports(self.inputs, self.group, self.bits));
        let weights = self.outputs * self.inputs;
        assert_eq!(self.words.len(), weights * self.bits / 32);
        assert_eq!(self.scales.len(), weights / self.group);
        assert_eq!(self.biases.len(), weights / self.group);
        let alike = std::mem::discriminant(&self.scales) == std::mem::discriminant(&self.biases);
        assert!(alike, "scales and biases of different types");
    }

    /// The packed weights as bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: any word is four bytes.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), 4 * self.words.len()) }
    }
}
