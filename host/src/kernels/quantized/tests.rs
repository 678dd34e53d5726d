//! Products against double precision, kernels against each other.

use proptest::prelude::*;

use super::*;

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

fn product(
    case: &Case,
    x: &[f32],
    outputs: usize,
    inputs: usize,
    group: usize,
    bits: usize,
) -> Vec<f32> {
    let matrix = QuantizedMatrix {
        words: &case.words,
        scales: Scales::F32(&case.scales),
        biases: Scales::F32(&case.biases),
        outputs,
        inputs,
        group,
        bits,
    };
    let mut y = vec![f32::NAN; x.len() / inputs * outputs];
    matrix.multiply(x, &mut y);
    y
}

proptest! {
    #[test]
    fn is_the_double_precision_product_and_rows_do_not_mix(
        rows in 0usize..20,
        outputs in 1usize..70,
        groups in 1usize..6,
        group in prop::sample::select(vec![32usize, 64, 128]),
        bits in prop::sample::select(vec![4usize, 8]),
    ) {
        let inputs = groups * group;
        let case = case(rows, outputs, inputs, group, bits);
        let y = product(&case, &case.x, outputs, inputs, group, bits);
        for row in 0..rows {
            let x = &case.x[row * inputs..(row + 1) * inputs];
            for output in 0..outputs {
                let w = &case.weights[output * inputs..(output + 1) * inputs];
                let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * w);
                let size: f64 = terms.clone().map(f64::abs).sum();
                let error = (f64::from(y[row * outputs + output]) - terms.sum::<f64>()).abs();
                prop_assert!(error <= 2e-6 * size + 1e-30, "{error:e} of {size:e}");
            }
            let alone = product(&case, x, outputs, inputs, group, bits);
            prop_assert_eq!(&y[row * outputs..(row + 1) * outputs], &alone[..]);
        }
    }

    #[test]
    fn every_kernel_agrees(
        rows in 1usize..=BLOCK,
        outputs in 1usize..=TILE,
        groups in 1usize..6,
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
    let mut matrix = QuantizedMatrix {
        words: &case.words,
        scales: Scales::Bf16(&scales),
        biases: Scales::Bf16(&biases),
        outputs: 4,
        inputs: 64,
        group: 32,
        bits: 4,
    };
    let (mut a, mut b) = ([0.0; 4], [0.0; 4]);
    matrix.multiply(&case.x, &mut a);
    let (scales, biases) = (wide(&scales), wide(&biases));
    matrix.scales = Scales::F32(&scales);
    matrix.biases = Scales::F32(&biases);
    matrix.multiply(&case.x, &mut b);
    assert_eq!(a, b);
}
