//! The checkpoints that tests derive from stored ones are those that peers once wrote.

use mlxhost::backend::{self, Affine, bytes_of};
use mlxhost_tests::derived::{RECIPES, quantize};
use mlxhost_tests::engine_lock;
use mlxhost_tests::tensors;
use plugin_api::Tensor;

#[test]
fn derived_checkpoints_are_what_they_were() {
    for recipe in RECIPES {
        let dir = tempfile::tempdir().unwrap();
        recipe.derive(dir.path());
    }
}

/// Groups of all sorts: positive, negative, zero, constant, tiny.
fn values() -> Vec<f32> {
    let mut values: Vec<f32> = (0u32..64 * 128)
        .map(|i| i.wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 - 0.5)
        .collect();
    values[..128].fill(0.0);
    values[128..256].fill(-0.25);
    values[256..512].iter_mut().for_each(|x| *x = x.abs());
    values[512..768].iter_mut().for_each(|x| *x *= 1e-9);
    values
}

#[test]
fn the_quantizer_of_the_host_does_what_that_of_the_tests_does() {
    let _lock = engine_lock();
    backend::install();
    let values = values();
    let weight = Tensor::from_slice(&values, &[64, 128]).unwrap();
    for (bits, group) in [(2, 32), (4, 32), (4, 64), (4, 128), (8, 64)] {
        let affine = Affine::new(bits, group).unwrap();
        let made = affine.quantize(&weight).unwrap();
        let made = made.each_ref().map(|part| bytes_of(part).unwrap());
        let (words, scales, biases) = quantize(&values, bits.into(), group.into());
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected = [
            words,
            tensors::bytes_of(&scales),
            tensors::bytes_of(&biases),
        ];
        assert!(made == expected, "{bits} bits in groups of {group}");
    }
}

#[test]
fn what_mlx_cannot_quantize_is_refused() {
    let _lock = engine_lock();
    backend::install();
    for (bits, group) in [
        (0, 64),
        (1, 64),
        (7, 64),
        (9, 64),
        (4, 0),
        (4, 16),
        (4, 255),
    ] {
        assert_eq!(Affine::new(bits, group), None);
    }
    for (bits, shape) in [
        (3, &[2, 96][..]),
        (4, &[2, 65]),
        (5, &[128]),
        (6, &[1, 2, 64]),
        (8, &[]),
    ] {
        let weight = Tensor::full(shape, 1.0, plugin_api::DType::F32).unwrap();
        let affine = Affine::new(bits, 64).unwrap();
        assert!(affine.quantize(&weight).is_err(), "{shape:?}");
    }
    let words = Tensor::full(&[2, 64], 1.0, plugin_api::DType::U32).unwrap();
    assert!(Affine::new(4, 64).unwrap().quantize(&words).is_err());
    for bits in [2, 3, 4, 5, 6, 8] {
        let weight = Tensor::full(&[2, 64], 1.0, plugin_api::DType::BF16).unwrap();
        let [words, scales, _] = Affine::new(bits, 32).unwrap().quantize(&weight).unwrap();
        let packed = 64 / 32 * i32::from(bits);
        assert_eq!(
            (words.shape(), scales.shape()),
            (vec![2, packed], vec![2, 2])
        );
        assert_eq!(scales.dtype(), plugin_api::DType::BF16);
    }
}
