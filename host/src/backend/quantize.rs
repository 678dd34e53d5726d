//! MLX's affine quantization, for the host's own tools: plugins only read quantized weights.

use abi_stable::std_types::RSliceMut;
use mlx_rs::ops as mlx;
use plugin_api::{Error, Result, Tensor};

use super::handle::{Explain, OpResult, into_raw, lent, take_error};
use super::ops;

/// Packed words with a scale and a bias per group of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine {
    bits: i32,
    group: i32,
}

impl Affine {
    /// A scheme that MLX has: 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128.
    pub fn new(bits: u8, group: u8) -> Option<Self> {
        let known = matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128);
        known.then_some(Self {
            bits: bits.into(),
            group: group.into(),
        })
    }

    /// Bits of an element.
    pub fn bits(self) -> usize {
        self.bits as usize
    }

    /// Elements that share a scale and a bias.
    pub fn group(self) -> usize {
        self.group as usize
    }

    /// Words, scales and biases for a matrix `[out, in]` whose `in` is a multiple of the group.
    ///
    /// # Errors
    /// It is no such matrix, or MLX fails.
    pub fn quantize(self, weight: &Tensor) -> Result<[Tensor; 3]> {
        let parts = self.parts(weight).map_err(Error::failed)?;
        // SAFETY: each is a fresh handle of this table, which the result now owns.
        let owned = parts.map(|part| unsafe { Tensor::from_raw(into_raw(part)) });
        match owned {
            [Some(words), Some(scales), Some(biases)] => Ok([words, scales, biases]),
            _ => Err(Error::failed("MLX gave no array")),
        }
    }

    fn parts(self, weight: &Tensor) -> OpResult<[mlx_rs::Array; 3]> {
        let weight = lent(weight.raw())?;
        match weight.shape() {
            [_, width] if width % self.group == 0 => {}
            other => return Err(format!("{other:?} in groups of {}", self.group)),
        }
        let (words, scales, biases) = mlx::quantize(&*weight, self.group, self.bits).explain()?;
        Ok([words, scales, biases])
    }
}

/// The elements of a tensor, row-major and little endian, in its own type.
///
/// # Errors
/// Computing it fails, or it is of a type without a size.
pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let dtype = tensor.dtype();
    let size = dtype
        .size()
        .ok_or_else(|| Error::failed("a dtype without a size"))?;
    let count = tensor
        .shape()
        .iter()
        .map(|&n| n as usize)
        .product::<usize>();
    let mut bytes = vec![0; count * size];
    if ops::read(tensor.raw(), dtype, RSliceMut::from_mut_slice(&mut bytes)) {
        Ok(bytes)
    } else {
        Err(Error::failed(take_error()))
    }
}
