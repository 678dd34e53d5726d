//! What a checkpoint hands out: bytes, their element type and their shape.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use super::gguf;
use crate::error::LoadError;

/// Bytes that are copied between two times that the file's pages are given back.
const PIECE: usize = 4 << 20;

/// The element types a [`TensorData`] can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits (also the packed words of quantized weights).
    U32,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an `F32`.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One tensor as it is to be used: row-major, little endian, last dimension contiguous.
#[derive(Clone, Debug)]
pub struct TensorData {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first; `[out, in]` for a linear layer. Empty for a scalar.
    pub shape: Vec<usize>,
    /// [`TensorData::len`] bytes; that was checked.
    pub(super) contents: Contents,
}

/// Where the elements of a tensor come from.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    /// The bytes of a file, as they are.
    Stored(Bytes),
    /// Made from them.
    Converted(gguf::Converted),
}

impl TensorData {
    /// The bytes of all elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes all elements, on several threads where they are converted and many. The file's pages do not
    /// count as memory of this process any more then.
    ///
    /// # Panics
    /// `out` is not [`TensorData::len`] long.
    pub fn write_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len());
        match &self.contents {
            Contents::Stored(bytes) => {
                // In pieces: no more than one of them is in memory twice.
                for (nth, out) in out.chunks_mut(PIECE).enumerate() {
                    if let Some(piece) = bytes.slice(nth * PIECE..nth * PIECE + out.len()) {
                        out.copy_from_slice(&piece);
                        piece.release();
                    }
                }
            }
            Contents::Converted(tensor) => tensor.write_to(self.dtype, out),
        }
    }

    /// Says that it is not needed soon.
    pub(crate) fn release(&self) {
        match &self.contents {
            Contents::Stored(bytes) => bytes.release(),
            Contents::Converted(tensor) => tensor.source.release(),
        }
    }

    /// All elements.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        self.write_to(&mut out);
        out
    }
}

/// Bytes that are either a range of a memory-mapped file or owned; shared, so cloning is cheap.
///
/// Mapped bytes hold the map (not the file handle) for as long as any clone lives. If someone truncates
/// the file meanwhile, touching the lost pages ends the process with SIGBUS, and if someone rewrites it in
/// place, the values change: no program can guard a map against that. Replace model files by renaming a new
/// file over the old one (as download tools do), which leaves existing maps as they were.
#[derive(Clone)]
pub struct Bytes {
    storage: Storage,
    range: Range<usize>,
}

#[derive(Clone)]
enum Storage {
    Map(Arc<Mmap>),
    Owned(Arc<Vec<u8>>),
}

impl Storage {
    fn all(&self) -> &[u8] {
        match self {
            Storage::Map(map) => map,
            Storage::Owned(bytes) => bytes,
        }
    }
}

impl Bytes {
    /// Maps a whole regular file, read-only.
    pub(crate) fn map(path: &Path) -> Result<Self, LoadError> {
        let io = |error: io::Error| LoadError::new(path, error);
        // Opening a pipe or a device could block for ever, so look before opening.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(LoadError::unsupported(path, "not a regular file"));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is private to this process and read-only. That nobody else changes the file while
        // it is mapped can't be enforced; `Bytes` documents what happens then.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let range = 0..map.len();
        Ok(Self {
            storage: Storage::Map(Arc::new(map)),
            range,
        })
    }

    /// Says that these bytes are not needed soon, so that a file's pages do not count as memory of this
    /// process. They can be read again.
    pub(crate) fn release(&self) {
        #[cfg(unix)]
        if let Storage::Map(map) = &self.storage {
            let (start, len) = (self.range.start, self.range.len());
            // SAFETY: the map is read-only and of a file, from which its pages come back unchanged.
            // Advice only: what it brings may be nothing.
            let _ = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len)
            };
        }
    }

    /// The part of these bytes at `range`; `None` when it reaches beyond them.
    pub(crate) fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        Some(Self {
            storage: self.storage.clone(),
            range: self.range.start + range.start..self.range.start + range.end,
        })
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self {
            storage: Storage::Owned(Arc::new(bytes)),
            range,
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // `range` is inside by construction; the fallback only spares a panic path.
        self.storage
            .all()
            .get(self.range.clone())
            .unwrap_or_default()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.storage {
            Storage::Map(_) => "mapped",
            Storage::Owned(_) => "owned",
        };
        write!(f, "Bytes({} {kind})", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside_and_nest() {
        let bytes = Bytes::from((0u8..10).collect::<Vec<_>>());
        let middle = bytes.slice(2..8).unwrap();
        assert_eq!(&*middle, &[2, 3, 4, 5, 6, 7]);
        assert_eq!(&*middle.slice(1..3).unwrap(), &[3, 4]);
        assert!(middle.slice(0..7).is_none());
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = middle.slice(3..2);
        assert!(reversed.is_none());
        assert!(middle.slice(6..6).unwrap().is_empty());
    }

    #[test]
    fn a_map_outlives_its_file_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, b"abc").unwrap();
        let bytes = Bytes::map(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(&*bytes, b"abc");
        assert!(Bytes::map(dir.path()).is_err());
    }
}
