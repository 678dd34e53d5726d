//! From ggml blocks to MLX affine quantization, without loss.
//!
//! A ggml block holds 32 values of a row with their scale; MLX wants the packed values, the scales and the
//! offsets of a matrix in three tensors. Values, scales and offsets are converted independently of each
//! other, so nothing has to be cached between asking for one and for the next.
//!
//! `w = scale * q + bias` with: Q4_0 `d * (q - 8)`: bias `-8 d`; Q4_1 `d * q + m`; Q8_0 `d * q` with signed
//! `q`: stored as `q + 128`, bias `-128 d`. `d` and `m` are f16, and so are scales and offsets: multiples of a
//! power of two are exact, unless `d` is so large that they overflow. A tensor with such a one has f32.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::thread;

use half::f16;

use crate::checkpoint::{Bytes, Contents, DType, TensorData};

/// Values in a block, and so the group size.
pub(super) const BLOCK: usize = 32;
/// Bytes of rows, read or written, that a thread takes at a time; less is not worth a second thread.
const SHARE: usize = 1 << 18;
const MAX_THREADS: usize = 8;

/// The ggml types that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q8_0,
}

impl Kind {
    /// The type with that ggml id, or the name of one that is not read.
    pub(super) fn from_id(id: u32) -> Result<Self, String> {
        let name = match id {
            0 => return Ok(Kind::F32),
            1 => return Ok(Kind::F16),
            2 => return Ok(Kind::Q4_0),
            3 => return Ok(Kind::Q4_1),
            8 => return Ok(Kind::Q8_0),
            6 => "Q5_0",
            7 => "Q5_1",
            9 => "Q8_1",
            10 => "Q2_K",
            11 => "Q3_K",
            12 => "Q4_K",
            13 => "Q5_K",
            14 => "Q6_K",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            20 => "IQ4_NL",
            21 => "IQ3_S",
            22 => "IQ2_S",
            23 => "IQ4_XS",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            30 => "BF16",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            34 => "TQ1_0",
            35 => "TQ2_0",
            39 => "MXFP4",
            40 => "NVFP4",
            _ => return Err(format!("an unknown type (ggml type {id})")),
        };
        Err(name.to_owned())
    }

    /// Bits of a quantized value; `None` for floats.
    pub(super) fn bits(self) -> Option<usize> {
        match self {
            Kind::F32 | Kind::F16 => None,
            Kind::Q4_0 | Kind::Q4_1 => Some(4),
            Kind::Q8_0 => Some(8),
        }
    }

    /// Bytes of a block (for floats: of a value).
    fn block_bytes(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::F16 => 2,
            Kind::Q4_0 => 2 + 16,
            Kind::Q4_1 => 2 + 2 + 16,
            Kind::Q8_0 => 2 + 32,
        }
    }

    /// Bytes of a row of `cols` values; `None` when they do not make whole blocks or overflow.
    pub(super) fn row_bytes(self, cols: usize) -> Option<usize> {
        let blocks = match self.bits() {
            None => cols,
            Some(_) if cols.is_multiple_of(BLOCK) => cols / BLOCK,
            Some(_) => return None,
        };
        blocks.checked_mul(self.block_bytes())
    }

    pub(super) fn float(self) -> DType {
        match self {
            Kind::F16 => DType::F16,
            _ => DType::F32,
        }
    }
}

/// Which tensor of the three (or the only one) a [`Converted`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The rows of a float tensor, reordered.
    Rows,
    /// The packed values: u32 `[out, in * bits / 32]`.
    Values,
    /// `[out, in / 32]`.
    Scales,
    /// As the scales.
    Biases,
}

/// A tensor that is made from a GGUF tensor when asked for.
#[derive(Clone, Debug)]
pub(crate) struct Converted {
    pub(super) part: Part,
    pub(super) kind: Kind,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Whether it was a matrix; without, it is a vector of `rows` elements and `cols` is 1.
    pub(super) matrix: bool,
    /// For query and key projections: rows per head, to be brought back into their order. Even.
    pub(super) head_dim: Option<usize>,
    /// All rows as in the file: `rows * kind.row_bytes(cols)`.
    pub(in crate::checkpoint) source: Bytes,
    /// What [`Converted::multiples_fit`] found, for all parts of a tensor: it reads everything.
    pub(super) fits: Arc<OnceLock<bool>>,
}

impl Converted {
    fn dtype(&self) -> DType {
        match self.part {
            Part::Rows => self.kind.float(),
            Part::Values => DType::U32,
            Part::Scales | Part::Biases if self.kind == Kind::Q4_1 || self.multiples_fit() => {
                DType::F16
            }
            Part::Scales | Part::Biases => DType::F32,
        }
    }

    /// Whether f16 holds the offsets that are multiples of a scale. Scales have the type of offsets.
    fn multiples_fit(&self) -> bool {
        let most = f16::MAX.to_f32_const() / 128.0;
        let fits = |block: &[u8]| {
            let scale = f16::from_le_bytes([block[0], block[1]]);
            scale.to_f32_const().abs() <= most
        };
        *self.fits.get_or_init(|| {
            let (size, all) = (self.kind.block_bytes(), self.source.len());
            let piece = SHARE / size * size;
            (0..all).step_by(piece).all(|start| {
                let piece = self.source.slice(start..all.min(start + piece));
                piece.is_none_or(|piece| {
                    let fit = piece.chunks_exact(size).all(fits);
                    piece.release();
                    fit
                })
            })
        })
    }

    /// Elements of a converted row.
    fn width(&self) -> usize {
        match self.part {
            Part::Rows => self.cols,
            Part::Values => self.cols / BLOCK * self.kind.bits().unwrap_or(0),
            Part::Scales | Part::Biases => self.cols / BLOCK,
        }
    }

    /// Bytes of the converted tensor, without reading the file. Never more than 1.2 times those in it,
    /// or 1.4 where f16 does not hold the scales, which is not known here.
    pub(crate) fn len(&self) -> usize {
        let size = match self.part {
            Part::Rows => self.kind.float().size(),
            Part::Values => DType::U32.size(),
            Part::Scales | Part::Biases => DType::F16.size(),
        };
        self.rows * self.width() * size
    }

    /// The tensor that it will be.
    pub(crate) fn describe(&self) -> TensorData {
        let mut shape = vec![self.rows];
        if self.matrix {
            shape.push(self.width());
        }
        TensorData {
            dtype: self.dtype(),
            shape,
            contents: Contents::Converted(self.clone()),
        }
    }

    /// Converts to a type. Uses the cores there are for a large tensor.
    pub(crate) fn write_to(&self, dtype: DType, out: &mut [u8]) {
        let row_in = self.kind.row_bytes(self.cols).unwrap_or(0);
        let row_out = self.width() * dtype.size();
        for_rows(out, row_out, row_in, |rows, out| {
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(row_out)) {
                let start = self.source_row(row) * row_in;
                if let Some(blocks) = self.source.get(start..start + row_in) {
                    self.convert_row(dtype, blocks, out);
                }
            }
            // Rows of a head may lie elsewhere in it: then some pages are read once more.
            if let Some(done) = self.source.slice(rows.start * row_in..rows.end * row_in) {
                done.release();
            }
        });
    }

    /// The row of the file that holds row `row` of the model.
    ///
    /// llama.cpp rotates neighbouring rows (2j, 2j+1) of a head where Hugging Face rotates (j, j + D/2), so
    /// its converter stores `w.reshape(heads, 2, D/2, in).swapaxes(1, 2)`: row (half p, j) went to 2j + p.
    fn source_row(&self, row: usize) -> usize {
        match self.head_dim {
            Some(dim) if dim > 1 => {
                let (head, within) = (row / dim, row % dim);
                let (half, j) = (within / (dim / 2), within % (dim / 2));
                head * dim + 2 * j + half
            }
            _ => row,
        }
    }

    fn convert_row(&self, dtype: DType, row: &[u8], out: &mut [u8]) {
        match (self.part, self.kind) {
            (Part::Rows, _) | (_, Kind::F32 | Kind::F16) => out.copy_from_slice(row),
            (Part::Values, Kind::Q4_0) => blocks::<18, 16>(row, out, |b, o| nibbles(&b[2..], o)),
            (Part::Values, Kind::Q4_1) => blocks::<20, 16>(row, out, |b, o| nibbles(&b[4..], o)),
            (Part::Values, Kind::Q8_0) => blocks::<34, 32>(row, out, |b, o| {
                // Adding 128 to a signed byte flips its top bit.
                for (o, b) in o.iter_mut().zip(&b[2..]) {
                    *o = b ^ 0x80;
                }
            }),
            (Part::Scales, Kind::Q4_1) => blocks::<20, 2>(row, out, |b, o| *o = [b[0], b[1]]),
            (Part::Biases, Kind::Q4_1) => blocks::<20, 2>(row, out, |b, o| *o = [b[2], b[3]]),
            (Part::Scales, Kind::Q4_0) => multiples::<18>(dtype, row, out, 1.0),
            (Part::Scales, Kind::Q8_0) => multiples::<34>(dtype, row, out, 1.0),
            (Part::Biases, Kind::Q4_0) => multiples::<18>(dtype, row, out, -8.0),
            (Part::Biases, Kind::Q8_0) => multiples::<34>(dtype, row, out, -128.0),
        }
    }
}

/// Calls `convert` for each block of `IN` bytes with its place, `OUT` bytes, in the output.
fn blocks<const IN: usize, const OUT: usize>(
    row: &[u8],
    out: &mut [u8],
    convert: impl Fn(&[u8; IN], &mut [u8; OUT]),
) {
    let (row, _) = row.as_chunks::<IN>();
    let (out, _) = out.as_chunks_mut::<OUT>();
    for (block, out) in row.iter().zip(out) {
        convert(block, out);
    }
}

/// The f16 that every block begins with, times `factor`.
fn multiples<const IN: usize>(dtype: DType, row: &[u8], out: &mut [u8], factor: f32) {
    let value = |block: &[u8; IN]| factor * f16::from_le_bytes([block[0], block[1]]).to_f32_const();
    match dtype {
        DType::F16 => blocks::<IN, 2>(row, out, |block, out| {
            *out = f16::from_f32_const(value(block)).to_le_bytes();
        }),
        _ => blocks::<IN, 4>(row, out, |block, out| *out = value(block).to_le_bytes()),
    }
}

/// 16 bytes whose low nibbles are values 0..16 and high nibbles values 16..32, to value order.
fn nibbles(block: &[u8], out: &mut [u8; 16]) {
    let (words, _) = block.as_chunks::<8>();
    let [a, b] = words else { return };
    let (a, b) = (u64::from_le_bytes(*a), u64::from_le_bytes(*b));
    let packed = [pack(a), pack(b), pack(a >> 4), pack(b >> 4)];
    let (out, _) = out.as_chunks_mut::<4>();
    for (out, word) in out.iter_mut().zip(packed) {
        *out = word.to_le_bytes();
    }
}

/// The low nibbles of eight bytes, moved together, first byte lowest.
fn pack(word: u64) -> u32 {
    let word = word & 0x0f0f_0f0f_0f0f_0f0f;
    let word = (word | word >> 4) & 0x00ff_00ff_00ff_00ff;
    let word = (word | word >> 8) & 0x0000_ffff_0000_ffff;
    (word | word >> 16) as u32
}

/// Calls `each` with rows of `out`, their numbers and bytes, on several threads if it is large.
fn for_rows(
    out: &mut [u8],
    row_bytes: usize,
    source_row_bytes: usize,
    each: impl Fn(Range<usize>, &mut [u8]) + Sync,
) {
    if row_bytes == 0 {
        return;
    }
    let rows_a_share = (SHARE / row_bytes.max(source_row_bytes)).max(1);
    // Asked once: it reads files.
    static CORES: LazyLock<usize> =
        LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));
    let helpers = CORES
        .min(MAX_THREADS)
        .min(out.len() / SHARE)
        .saturating_sub(1);
    let shares = Mutex::new(out.chunks_mut(rows_a_share * row_bytes).enumerate());
    // Never poisoned: nothing in `next` panics.
    let next = || shares.lock().ok().and_then(|mut shares| shares.next());
    let work = || {
        while let Some((nth, share)) = next() {
            let first = nth * rows_a_share;
            each(first..first + share.len() / row_bytes, share);
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no thread is to be had, the others (at least this one) do its work.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of a triple, as MLX computes them.
    fn dequantize(values: &[u8], scale: &[u8], bias: &[u8], bits: usize) -> Vec<f32> {
        let wide = |b: &[u8]| match *b {
            [a, b] => f16::from_le_bytes([a, b]).to_f32(),
            _ => f32::from_le_bytes(b.try_into().unwrap()),
        };
        let (scale, bias) = (wide(scale), wide(bias));
        let words = values
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| u32::from_le_bytes(*w));
        words
            .flat_map(|w| (0..32 / bits).map(move |i| (w >> (i * bits)) & ((1 << bits) - 1)))
            .map(|q| scale * q as f32 + bias)
            .collect()
    }

    fn convert(kind: Kind, part: Part, block: &[u8]) -> Vec<u8> {
        let source = block.to_vec().into();
        let (rows, cols, matrix, head_dim) = (1, BLOCK, true, None);
        let tensor = Converted {
            part,
            kind,
            rows,
            cols,
            matrix,
            head_dim,
            source,
            fits: Arc::default(),
        };
        tensor.describe().to_vec()
    }

    fn values(kind: Kind, block: &[u8]) -> Vec<f32> {
        let part = |part| convert(kind, part, block);
        let (values, scales, biases) = (part(Part::Values), part(Part::Scales), part(Part::Biases));
        dequantize(&values, &scales, &biases, kind.bits().unwrap())
    }

    #[test]
    fn blocks_keep_their_values_and_order() {
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-3.0).to_le_bytes();
        // Byte j: value j in the low nibble, value j + 16 in the high one.
        let q: Vec<u8> = (0..16u8).map(|j| j | (15 - j) << 4).collect();
        let plain = (0..16).chain((0..16).rev()).map(|q| q as f32);
        let q4_0: Vec<f32> = plain.clone().map(|q| 0.5 * (q - 8.0)).collect();
        assert_eq!(values(Kind::Q4_0, &[&d[..], &q].concat()), q4_0);
        let q4_1: Vec<f32> = plain.map(|q| 0.5 * q - 3.0).collect();
        assert_eq!(values(Kind::Q4_1, &[&d[..], &m, &q].concat()), q4_1);
        let q: Vec<u8> = (0..32u8).map(|j| (j * 8).wrapping_add(128)).collect();
        let q8_0: Vec<f32> = q.iter().map(|q| 0.5 * f32::from(*q as i8)).collect();
        assert_eq!(values(Kind::Q8_0, &[&d[..], &q].concat()), q8_0);
    }

    #[test]
    fn scales_that_f16_does_not_hold_the_multiples_of_are_f32() {
        for (d, size) in [(500.0f32, 2), (511.0, 2), (512.0, 4), (60000.0, 4)] {
            let q = [1u8; 32];
            let block = [&f16::from_f32(d).to_le_bytes()[..], &q].concat();
            let d = f16::from_f32(d).to_f32();
            assert_eq!(convert(Kind::Q8_0, Part::Scales, &block).len(), size);
            assert_eq!(values(Kind::Q8_0, &block), [d; 32]);
        }
    }

    #[test]
    fn rows_of_a_head_are_put_back() {
        // Two heads of 6 rows; what the exporter does to rows 0..12 (see `source_row`), written out.
        let stored = [
            0.0f32, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0,
        ];
        let source: Vec<u8> = stored.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (part, kind, rows, cols) = (Part::Rows, Kind::F32, 12, 1);
        let (matrix, head_dim, source) = (true, Some(6), source.into());
        let tensor = Converted {
            part,
            kind,
            rows,
            cols,
            matrix,
            head_dim,
            source,
            fits: Arc::default(),
        }
        .describe();
        let bytes = tensor.to_vec();
        let back = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|v| f32::from_le_bytes(*v));
        assert!(back.eq((0..12).map(|v| v as f32)));
        assert_eq!(tensor.shape, [12, 1]);
    }

    #[test]
    fn every_row_is_converted_once_at_any_size() {
        for (rows, row_bytes) in [(0, 3), (1, 1), (1000, 7), (5, SHARE + 1), (4099, 1024)] {
            let mut out = vec![0u8; rows * row_bytes];
            for_rows(&mut out, row_bytes, 100, |rows, out| {
                for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
                    out.iter_mut().for_each(|o| *o += row as u8);
                }
            });
            let rows = out.chunks_exact(row_bytes).enumerate();
            assert!(
                rows.into_iter()
                    .all(|(row, out)| out.iter().all(|o| *o == row as u8))
            );
        }
    }
}
