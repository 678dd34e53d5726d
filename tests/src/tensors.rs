//! f32 tensors in files.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// A tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// The tensors of a file, by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// The f32 tensors of a safetensors file.
pub fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    file.iter()
        .filter(|(_, tensor)| tensor.dtype() == Dtype::F32)
        .map(|(name, tensor)| {
            let (values, _) = tensor.data().as_chunks();
            let values = values.iter().map(|x| f32::from_le_bytes(*x)).collect();
            let shape = tensor.shape().to_vec();
            (name.to_owned(), Tensor { shape, values })
        })
        .collect()
}

/// The largest difference of two tensors with the same number of elements.
pub fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(
        a.values.len(),
        b.values.len(),
        "{:?} {:?}",
        a.shape,
        b.shape
    );
    let pairs = a.values.iter().zip(&b.values);
    // A NaN anywhere must not look like agreement.
    let largest = pairs
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |x, y| if x > y || x.is_nan() { x } else { y });
    if largest.is_nan() {
        f32::INFINITY
    } else {
        largest
    }
}

/// Little-endian bytes.
pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Writes a checkpoint with these tensors; all the rest is that of `like`.
pub fn write_checkpoint(like: &Path, tensors: &Tensors, out: &Path) {
    std::fs::create_dir_all(out).expect("the directory can be made");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(like.join(file), out.join(file)).expect(file);
    }
    write(tensors, &out.join("model.safetensors"));
}

/// Writes a safetensors file.
pub fn write(tensors: &Tensors, path: &Path) {
    let bytes: Vec<_> = tensors.values().map(|t| bytes_of(&t.values)).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, tensor), bytes)| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes);
        (name, view.expect("the shape fits"))
    });
    safetensors::serialize_to_file(views, None, path).expect("the file can be written");
}

/// Adds a list of 64-bit integers to a safetensors file.
pub fn add_ints(path: &Path, name: &str, values: &[i32]) {
    let old = std::fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&old).expect("safetensors");
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|x| i64::from(*x).to_le_bytes())
        .collect();
    let ints = TensorView::new(Dtype::I64, vec![values.len()], &bytes).expect("a list");
    let all = file.tensors().into_iter().chain([(name.to_owned(), ints)]);
    safetensors::serialize_to_file(all, None, path).expect("the file can be written");
}
