//! Products against double precision, kernels against each other.

use proptest::prelude::*;

use half::{bf16, f16};

use super::activations::Activations;
use super::float::{BLOCK, DENSE_ROWS, Kernels, Packed};
use super::*;
use crate::kernels::matrix::Matrix;
use crate::kernels::project::Project;

/// A matrix of random words, and its weights in double precision.
struct Case {
    words: Vec<u32>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    weights: Vec<f64>,
    x: Vec<f32>,
}

fn case(rows: usize, outputs: usize, inputs: usize, group: usize, bits: usize) -> Case {
    let mut state = (rows + 31 * outputs + 1009 * inputs + bits) as u64;
    let mut random = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 32) as u32
    };
    let mut unit = |scale: f32| (random() as f32 / u32::MAX as f32 - 0.5) * scale;
    let groups = outputs * inputs / group;
    let scales: Vec<f32> = (0..groups).map(|_| unit(0.1)).collect();
    let biases: Vec<f32> = (0..groups).map(|_| unit(0.5)).collect();
    let x: Vec<f32> = (0..rows * inputs).map(|_| unit(2.0)).collect();
    let words: Vec<u32> = (0..outputs * inputs * bits / 32)
        .map(|i| (unit(1e9) as i64 as u32) ^ (i as u32).wrapping_mul(2_654_435_761))
        .collect();
    let per_word = 32 / bits;
    let weights = (0..outputs * inputs).map(|i| {
        let q = words[i / per_word] >> (bits * (i % per_word)) & ((1 << bits) - 1);
        f64::from(q) * f64::from(scales[i / group]) + f64::from(biases[i / group])
    });
    Case {
        weights: weights.collect(),
        words,
        scales,
        biases,
        x,
    }
}

impl Case {
    fn matrix(
        &self,
        outputs: usize,
        inputs: usize,
        group: usize,
        bits: usize,
    ) -> QuantizedMatrix<'_> {
        QuantizedMatrix {
            words: &self.words,
            scales: Scales::F32(&self.scales),
            biases: Scales::F32(&self.biases),
            outputs,
            inputs,
            group,
            bits,
        }
    }
}

fn product(matrix: QuantizedMatrix<'_>, x: &[f32], exact: bool) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / matrix.inputs * matrix.outputs];
    let project = Project {
        x,
        inputs: matrix.inputs,
        norm: None,
        matrices: &[Matrix::Quantized(matrix)],
        offsets: &[None],
        gate: None,
        post_norm: None,
        scale: 1.0,
        residual: None,
        exact,
    };
    project.run(&mut [&mut y]);
    y
}

/// A row of activations as 16 bits hold it.
fn rounded(x: &[f32]) -> Vec<f64> {
    let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let round = |x: &f32| (x * (32767.0 / most)).round_ties_even() * (most / 32767.0);
    x.iter()
        .map(|x| if most > 0.0 { f64::from(round(x)) } else { 0.0 })
        .collect()
}

proptest! {
    #[test]
    fn is_the_double_precision_product_and_rows_do_not_mix(
        rows in 0usize..20,
        outputs in 1usize..70,
        groups in 1usize..12,
        group in prop::sample::select(vec![32usize, 64, 128]),
        bits in prop::sample::select(vec![4usize, 8]),
        exact in any::<bool>(),
    ) {
        let inputs = groups * group;
        let case = case(rows, outputs, inputs, group, bits);
        let matrix = case.matrix(outputs, inputs, group, bits);
        let y = product(matrix, &case.x, exact);
        for row in 0..rows {
            let x = &case.x[row * inputs..(row + 1) * inputs];
            let taken: Vec<f64> = if exact {
                x.iter().map(|&x| f64::from(x)).collect()
            } else {
                rounded(x)
            };
            for output in 0..outputs {
                let w = &case.weights[output * inputs..(output + 1) * inputs];
                let terms = taken.iter().zip(w).map(|(x, w)| x * w);
                let size: f64 = terms.clone().map(f64::abs).sum();
                let error = (f64::from(y[row * outputs + output]) - terms.sum::<f64>()).abs();
                // Offsets and products cancel: the sum of their sizes is what rounding acts on.
                prop_assert!(error <= 8e-6 * size + 1e-5, "{error:e} of {size:e}");
            }
            let alone = product(matrix, x, exact);
            prop_assert_eq!(&y[row * outputs..(row + 1) * outputs], &alone[..]);
        }
    }

    #[test]
    fn integer_loops_agree(
        rows in 1usize..=4,
        outputs in 1usize..=TILE,
        groups in 1usize..12,
        group in prop::sample::select(vec![32usize, 64, 128]),
        bits in prop::sample::select(vec![4usize, 8]),
        kind in 0..3,
        lanes in prop::sample::select(vec![8usize, 16]),
    ) {
        let inputs = groups * group;
        let case = case(rows, outputs, inputs, group, bits);
        let bf16s = |all: &[f32]| all.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let f16s = |all: &[f32]| all.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
        let narrow = (bf16s(&case.scales), bf16s(&case.biases), f16s(&case.scales), f16s(&case.biases));
        let mut matrix = case.matrix(outputs, inputs, group, bits);
        match kind {
            0 => {}
            1 => (matrix.scales, matrix.biases) = (Scales::Bf16(&narrow.0), Scales::Bf16(&narrow.1)),
            _ => (matrix.scales, matrix.biases) = (Scales::F16(&narrow.2), Scales::F16(&narrow.3)),
        }
        let x = Activations::quantize(&case.x, inputs, bits, lanes);
        let mut best = vec![0.0; rows * TILE];
        let mut scratch = integer::Scratch::default();
        integer::multiply(&matrix, 0, outputs, &x, &mut best, &mut scratch);
        let mut plain = vec![0.0; rows * TILE];
        for (row, plain) in plain.chunks_mut(TILE).enumerate() {
            let alone = &case.x[row * inputs..(row + 1) * inputs];
            let alone = Activations::quantize(alone, inputs, bits, 8);
            integer::lanes::<1, 8>(&scratch.tile(&matrix, 0, outputs), alone.band(0), plain);
        }
        for (a, b) in best.iter().zip(&plain) {
            // Fused and unfused additions.
            prop_assert!((a - b).abs() < 1e-4, "{} {}", a, b);
        }
    }

    #[test]
    fn activations_are_laid_out_alike(
        rows in 1usize..=4,
        parts in 1usize..40,
        bits in prop::sample::select(vec![4usize, 8]),
    ) {
        let inputs = parts * 32;
        let x = case(rows, 1, inputs, 32, bits).x;
        let best = Activations::quantize(&x, inputs, bits, 16);
        let best = best.band(0);
        let (mut values, mut sums) = (vec![0; best.values.len()], vec![0.0; best.sums.len()]);
        for row in 0..rows {
            let mut scale = 0.0;
            let places = (&mut values[..], &mut scale, &mut sums[..]);
            let x = &x[row * inputs..][..inputs];
            activations::fill_lanes(x, (bits, 16), (row, rows), places);
            prop_assert_eq!(scale, best.scales[row]);
        }
        prop_assert_eq!(&values[..], best.values);
        prop_assert_eq!(&sums[..], best.sums);
    }

    #[test]
    fn every_kernel_agrees(
        rows in 1usize..=BLOCK,
        outputs in 1usize..=TILE,
        groups in 1usize..12,
        bits in prop::sample::select(vec![4usize, 8]),
    ) {
        let inputs = groups * 32;
        let case = case(rows, outputs, inputs, 32, bits);
        let packed = Packed {
            words: &case.words,
            outputs,
            inputs,
            group: 32,
            bits,
        };
        let weights = (packed, &case.scales[..], &case.biases[..]);
        let mut all = vec![Kernels::PORTABLE, Kernels::best()];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") {
            all.push(x86::AVX2);
        }
        let few = rows.min(DENSE_ROWS);
        let results: Vec<_> = all
            .into_iter()
            .map(|kernels| {
                let (mut sums, mut dense) = ([[0.0; BLOCK]; TILE], [[0.0; BLOCK]; TILE]);
                let mut unpacked = vec![0.0; outputs * inputs];
                // SAFETY: the processor has what these need; the lengths fit.
                unsafe {
                    (kernels.packed)(weights, &case.x, rows, &mut sums);
                    (kernels.unpack)(weights, &mut unpacked);
                    let x = &case.x[..few * inputs];
                    (kernels.dense)(&unpacked, inputs, x, few, &mut dense);
                }
                // Unpacking first changes no bit.
                for output in 0..outputs {
                    assert_eq!(sums[output][..few], dense[output][..few]);
                }
                sums
            })
            .collect();
        for sums in &results[1..] {
            for (a, b) in results[0].iter().flatten().zip(sums.iter().flatten()) {
                prop_assert!((a - b).abs() < 1e-4, "{} {}", a, b);
            }
        }
    }
}

#[test]
fn narrow_scales_are_widened() {
    let case = case(1, 4, 64, 32, 4);
    let narrow = |all: &[f32]| all.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
    let wide = |all: &[bf16]| all.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let (scales, biases) = (narrow(&case.scales), narrow(&case.biases));
    let mut matrix = case.matrix(4, 64, 32, 4);
    (matrix.scales, matrix.biases) = (Scales::Bf16(&scales), Scales::Bf16(&biases));
    let narrow = [true, false].map(|exact| product(matrix, &case.x, exact));
    let (scales, biases) = (wide(&scales), wide(&biases));
    (matrix.scales, matrix.biases) = (Scales::F32(&scales), Scales::F32(&biases));
    assert_eq!(
        narrow,
        [true, false].map(|exact| product(matrix, &case.x, exact))
    );
}
