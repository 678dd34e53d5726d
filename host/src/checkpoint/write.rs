//! Writing safetensors one tensor at a time, so that no more than one has to be in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{DType, Quoted};
use crate::error::LoadError;

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of all elements.
    ///
    /// # Errors
    /// There are more than fit into an address.
    fn len(&self, path: &Path) -> Result<usize, LoadError> {
        let count = self.shape.iter().copied();
        let bytes = count
            .chain([self.dtype.size()])
            .try_fold(1usize, usize::checked_mul);
        bytes.ok_or_else(|| {
            LoadError::malformed(path, format!("tensor {} is too large", Quoted(&self.name)))
        })
    }
}

/// A safetensors file in the making: its header is written first, its tensors in any order.
pub struct Writer {
    path: PathBuf,
    file: File,
    /// Where each tensor that is still to come lies, and its length.
    open: BTreeMap<String, (u64, usize)>,
    total: u64,
}

impl Writer {
    /// Creates the file; `tensors` are all that will be in it. Its metadata has the format `mlx`: names
    /// and layouts are those of converted checkpoints.
    ///
    /// # Errors
    /// The file can't be written, or two tensors have one name.
    pub fn create(path: &Path, tensors: &[TensorSpec]) -> Result<Self, LoadError> {
        // Wide elements first, so that each tensor is aligned to its own.
        let mut order: Vec<_> = tensors.iter().collect();
        order.sort_by(|a, b| {
            let width = b.dtype.size().cmp(&a.dtype.size());
            width.then_with(|| a.name.cmp(&b.name))
        });
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "mlx"}));
        let (mut open, mut total) = (BTreeMap::new(), 0u64);
        for tensor in order {
            let len = tensor.len(path)?;
            let end = total + len as u64;
            let dtype = format!("{:?}", tensor.dtype).to_uppercase();
            let entry =
                json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [total, end]});
            header.insert(tensor.name.clone(), entry);
            if open.insert(tensor.name.clone(), (total, len)).is_some() {
                let what = format!("two tensors would be called {}", Quoted(&tensor.name));
                return Err(LoadError::malformed(path, what));
            }
            total = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let start = 8 + header.len() as u64;
        for (offset, _) in open.values_mut() {
            *offset += start;
        }
        let io = |error| LoadError::new(path, error);
        let mut file = File::create_new(path).map_err(io)?;
        file.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.set_len(start + total))
            .map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            open,
            total,
        })
    }

    /// Bytes of all tensors together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Writes one of the tensors.
    ///
    /// # Errors
    /// There is none of that name left, it has another length, or the file can't be written.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), LoadError> {
        match self.open.remove(name) {
            Some((offset, len)) if len == bytes.len() => {
                let written = self.file.write_all_at(bytes, offset);
                written.map_err(|e| LoadError::new(&self.path, e))
            }
            found => {
                let expected = found.map_or(0, |(_, len)| len);
                let (got, name) = (bytes.len(), Quoted(name));
                let what = format!("tensor {name} has {got} bytes where {expected} were expected");
                Err(LoadError::failed(&self.path, what))
            }
        }
    }

    /// Ends the file, after all tensors, and waits for the disk.
    ///
    /// # Errors
    /// A tensor was not written, or the disk fails.
    pub fn finish(self) -> Result<(), LoadError> {
        if let Some(name) = self.open.keys().next() {
            let what = format!("tensor {} was not written", Quoted(name));
            return Err(LoadError::failed(&self.path, what));
        }
        let synced = self.file.sync_all();
        synced.map_err(|e| LoadError::new(&self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::super::safetensors::open_dir;
    use super::*;

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn what_was_written_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let specs = [
            spec("b", DType::BF16, &[3]),
            spec("a", DType::U32, &[2, 1]),
            spec("none", DType::F32, &[0, 4]),
        ];
        let mut writer = Writer::create(&path, &specs).unwrap();
        writer.write("b", &[1, 2, 3, 4, 5, 6]).unwrap();
        writer.write("none", &[]).unwrap();
        writer.write("a", &[9; 8]).unwrap();
        assert_eq!(writer.total(), 14);
        writer.finish().unwrap();
        let tensors = open_dir(dir.path()).unwrap();
        assert_eq!(tensors.len(), 3);
        let super::super::Entry::Stored(b) = &tensors["b"] else {
            panic!("stored as it was given")
        };
        assert_eq!((b.dtype, b.to_vec()), (DType::BF16, vec![1, 2, 3, 4, 5, 6]));
        assert!(Writer::create(&path, &specs).is_err(), "overwritten");
    }

    #[test]
    fn a_file_that_would_be_wrong_is_not_finished() {
        let dir = tempfile::tempdir().unwrap();
        let create = |name: &str, specs: &[TensorSpec]| {
            Writer::create(&dir.path().join(name), specs).map_err(|e| e.to_string())
        };
        let one = [spec("a", DType::U8, &[2])];
        let mut writer = create("x", &one).unwrap();
        assert!(writer.write("a", &[1]).is_err());
        let mut writer = create("y", &one).unwrap();
        assert!(writer.write("b", &[1]).is_err());
        assert!(writer.finish().unwrap_err().to_string().contains("\"a\""));
        let twice = [one[0].clone(), one[0].clone()];
        assert!(create("z", &twice).err().unwrap().contains("two tensors"));
        let endless = [spec("a", DType::F32, &[usize::MAX, 2])];
        assert!(create("w", &endless).err().unwrap().contains("too large"));
    }
}
