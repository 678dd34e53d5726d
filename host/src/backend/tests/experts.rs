//! Mixtures of experts against sums in double precision.

use plugin_api::abi::{Experts, Projection, RawMatrix, RawTensor, UnaryOp};
use plugin_api::{DType, Tensor};
use proptest::prelude::*;

use super::{serial, tensor, with_mlx_kernels};

/// Matrices `[E, out, in]`.
struct Stack {
    weight: Tensor,
    /// Scales and biases.
    packed: Option<[Tensor; 2]>,
    bits: i32,
    /// What they stand for.
    dense: Vec<f32>,
}

const GROUP: i32 = 32;

impl Stack {
    fn new(seed: u64, shape: [i32; 3], bits: i32) -> Self {
        let [count, outputs, inputs] = shape;
        if bits == 0 {
            let weight = tensor(seed, &shape);
            let dense = weight.to_vec().unwrap();
            return Self {
                weight,
                packed: None,
                bits,
                dense,
            };
        }
        let words: Vec<u32> = (0..count * outputs * inputs * bits / 32)
            .map(|i| (i as u32).wrapping_mul(2_654_435_761) ^ seed as u32)
            .collect();
        let weight = Tensor::from_slice(&words, &[count, outputs, inputs * bits / 32]).unwrap();
        let groups = [count, outputs, inputs / GROUP];
        let step = 2.0 / (1 << bits) as f32;
        let scales = tensor(seed + 1, &groups).scale(step).unwrap();
        let biases = tensor(seed + 2, &groups).scale(0.5).unwrap();
        let dense = weight.dequantize(&scales, &biases, GROUP, bits).unwrap();
        Self {
            weight,
            packed: Some([scales, biases]),
            bits,
            dense: dense.to_vec().unwrap(),
        }
    }

    fn raw(&self) -> RawMatrix {
        let of = |index: usize| {
            let packed = self.packed.as_ref();
            packed.map_or(RawTensor::NULL, |packed| packed[index].raw())
        };
        RawMatrix {
            weight: self.weight.raw(),
            scales: of(0),
            biases: of(1),
            offset: RawTensor::NULL,
            group: GROUP,
            bits: self.bits,
        }
    }
}

/// The arguments of a call.
struct Case {
    x: Tensor,
    norm: Option<Tensor>,
    post_norm: Option<Tensor>,
    residual: Option<Tensor>,
    choice: Vec<i32>,
    chosen: i32,
    weights: Tensor,
    /// Gate, up, down.
    matrices: [Stack; 3],
    gate: UnaryOp,
}

impl Case {
    /// `sizes`: rows, width, inner width, experts, chosen.
    fn new(seed: u64, sizes: [i32; 5], bits: i32, gelu: bool, around: bool) -> Self {
        let [rows, width, inner, count, chosen] = sizes;
        let stack = |more: u64, outputs, inputs| {
            // A width that is no multiple of the group stays dense, as in checkpoints.
            let bits = if inputs % GROUP == 0 { bits } else { 0 };
            Stack::new(seed + 10 * more, [count, outputs, inputs], bits)
        };
        let picks = (0..rows * chosen).map(|i| (i as u64 * 7 + seed * 31 + 5) % 1_000_003);
        Self {
            x: tensor(seed + 100, &[1, rows, width]),
            norm: around.then(|| tensor(seed + 101, &[width])),
            post_norm: around.then(|| tensor(seed + 102, &[width])),
            residual: around.then(|| tensor(seed + 103, &[1, rows, width])),
            // Ids outside, too.
            choice: picks
                .map(|pick| (pick * pick % (count as u64 + 2)) as i32 - 1)
                .collect(),
            chosen,
            weights: positive(&tensor(seed + 104, &[1, rows, chosen])),
            matrices: [
                stack(1, inner, width),
                stack(2, inner, width),
                stack(3, width, inner),
            ],
            gate: if gelu {
                UnaryOp::GELU_TANH
            } else {
                UnaryOp::SILU
            },
        }
    }

    fn run(&self) -> Result<Tensor, String> {
        let null = RawTensor::NULL;
        let opt = |x: &Option<Tensor>| x.as_ref().map_or(null, Tensor::raw);
        let mut shape = self.x.shape();
        *shape.last_mut().unwrap() = self.chosen;
        let choice = Tensor::from_slice(&self.choice, &shape).unwrap();
        let matrices = self.matrices.each_ref().map(Stack::raw);
        let out = (super::super::api().experts())(&Experts {
            projection: Projection {
                x: self.x.raw(),
                norm: opt(&self.norm),
                eps: 1e-5,
                matrices: matrices[..].into(),
                gate: self.gate,
                post_norm: opt(&self.post_norm),
                post_eps: 1e-5,
                residual: opt(&self.residual),
                scale: 1.0,
            },
            choice: choice.raw(),
            weights: self.weights.raw(),
        });
        // SAFETY: a new tensor, handed over.
        unsafe { Tensor::from_raw(out) }
            .ok_or_else(|| (super::super::api().take_error())().to_string())
    }

    /// The same with only some rows.
    fn rows(&self, start: i32, stop: i32) -> Case {
        let part = |x: &Tensor| x.slice(1, start, stop).unwrap();
        let chosen = self.chosen as usize;
        Case {
            x: part(&self.x),
            norm: self.norm.clone(),
            post_norm: self.post_norm.clone(),
            residual: self.residual.as_ref().map(part),
            choice: self.choice[start as usize * chosen..stop as usize * chosen].to_vec(),
            chosen: self.chosen,
            weights: part(&self.weights),
            matrices: self.matrices.each_ref().map(|stack| Stack {
                weight: stack.weight.clone(),
                packed: stack.packed.clone(),
                bits: stack.bits,
                dense: stack.dense.clone(),
            }),
            gate: self.gate,
        }
    }

    fn reference(&self) -> Vec<f64> {
        let [_, rows, width] = self.x.dims::<3>().unwrap();
        let (width, chosen) = (width as usize, self.chosen as usize);
        let [count, inner, _] = self.matrices[0].weight.dims::<3>().unwrap();
        let inner = inner as usize;
        let values = |x: &Tensor| -> Vec<f64> {
            let values: Vec<f32> = x.to_vec().unwrap();
            values.into_iter().map(f64::from).collect()
        };
        let norm = |x: &mut [f64], weight: &Option<Tensor>| {
            let Some(weight) = weight else { return };
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            for (x, weight) in x.iter_mut().zip(values(weight)) {
                *x = *x * weight / (mean + 1e-5).sqrt();
            }
        };
        let product = |index: usize, expert: usize, outputs: usize, x: &[f64]| -> Vec<f64> {
            let all = &self.matrices[index].dense;
            let rows = all.chunks_exact(x.len()).skip(expert * outputs);
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            rows.take(outputs).map(dot).collect()
        };
        let open = |x: f64| match self.gate {
            UnaryOp::SILU => x / (1.0 + (-x).exp()),
            _ => x / 2.0 * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x * x * x)).tanh()),
        };
        let (x, weights) = (values(&self.x), values(&self.weights));
        let residual = self.residual.as_ref().map(values);
        let mut out = Vec::new();
        for row in 0..rows as usize {
            let mut x = x[row * width..][..width].to_vec();
            norm(&mut x, &self.norm);
            let mut sum = vec![0.0; width];
            let slots = row * chosen..(row + 1) * chosen;
            for (&id, weight) in self.choice[slots.clone()].iter().zip(&weights[slots]) {
                let expert = id.clamp(0, count - 1) as usize;
                let (gate, up) = (product(0, expert, inner, &x), product(1, expert, inner, &x));
                let gated: Vec<_> = gate.iter().zip(&up).map(|(g, u)| open(*g) * u).collect();
                for (sum, y) in sum.iter_mut().zip(product(2, expert, width, &gated)) {
                    *sum += weight * y;
                }
            }
            norm(&mut sum, &self.post_norm);
            if let Some(residual) = &residual {
                let before = &residual[row * width..];
                sum.iter_mut()
                    .zip(before)
                    .for_each(|(x, before)| *x += before);
            }
            out.extend(sum);
        }
        out
    }

    /// Compares both kernels with the reference, relative to the largest element.
    fn check(&self, bound: f64) {
        let reference = self.reference();
        let largest = reference.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
        for (name, got) in [
            ("own", self.run()),
            ("MLX", with_mlx_kernels(|| self.run())),
        ] {
            let got = got.unwrap();
            assert_eq!(got.shape(), self.x.shape());
            let got: Vec<f32> = got.to_vec().unwrap();
            let pairs = got.iter().zip(&reference);
            let error = pairs.map(|(a, b)| (f64::from(*a) - b).abs() / largest);
            let error = error.fold(0.0, f64::max);
            assert!(error < bound, "{name}: {error}");
        }
    }
}

/// As a router's: of both signs, an expert chosen twice could cancel itself, and the norm that follows
/// would blow up what rounding left of it.
fn positive(weights: &Tensor) -> Tensor {
    let values: Vec<f32> = weights.to_vec().unwrap();
    let values: Vec<f32> = values.iter().map(|x| x.abs() + 0.1).collect();
    Tensor::from_slice(&values, &weights.shape()).unwrap()
}

/// Runs with activations as they are.
fn exactly(body: impl FnOnce()) {
    crate::kernels::set_exact(true);
    body();
    crate::kernels::set_exact(false);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn experts_agree_with_sums_in_double_precision(
        (rows, count) in (0..24i32, 1..7i32),
        // Not all of them are whole tiles, and 40 is left to MLX.
        width in prop::sample::select(vec![32, 64, 96, 40]),
        inner in prop::sample::select(vec![32, 64, 160, 24]),
        chosen in 1..4i32,
        bits in prop::sample::select(vec![0, 4, 8]),
        (gelu, around) in any::<(bool, bool)>(),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let case = Case::new(seed, [rows, width, inner, count, chosen], bits, gelu, around);
        exactly(|| case.check(2e-5));
        // Rounded to 16 bits.
        case.check(1e-3);
    }

    #[test]
    fn a_row_gives_alone_what_it_gives_among_others(
        (rows, count, chosen) in (1..24i32, 1..7i32, 1..4i32),
        bits in prop::sample::select(vec![0, 4, 8]),
        around in any::<bool>(),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let case = Case::new(seed, [rows, 64, 96, count, chosen], bits, false, around);
        let values = |case: &Case| -> Vec<f32> { case.run().unwrap().to_vec().unwrap() };
        for exact in [true, false] {
            crate::kernels::set_exact(exact);
            let all = values(&case);
            for row in 0..rows {
                let alone = values(&case.rows(row, row + 1));
                assert_eq!(alone, all[row as usize * 64..][..64], "row {row}");
            }
            let (first, rest) = (values(&case.rows(0, rows / 2)), values(&case.rows(rows / 2, rows)));
            assert_eq!([first, rest].concat(), all);
        }
        crate::kernels::set_exact(false);
    }

    #[test]
    fn routes_are_the_largest_scores(
        (rows, count) in (0..9i32, 1..40i32),
        share in 0.0..1.0f64,
        (coarse, scaled) in any::<(bool, bool)>(),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let k = ((f64::from(count) * share) as i32).max(1);
        let mut scores = tensor(seed, &[rows, 1, count]).scale(3.0).unwrap();
        if coarse {
            // Many ties.
            scores = scores.astype(DType::I32).unwrap().astype(DType::F32).unwrap();
        }
        let scale = tensor(seed + 1, &[count]);
        let scale = scaled.then_some(&scale);
        let factors: Vec<f32> = scale.map_or(vec![1.0; count as usize], |s| s.to_vec().unwrap());
        let all: Vec<f32> = scores.to_vec().unwrap();
        let run = || scores.route(k, scale).unwrap();
        for [weights, choice] in [run(), with_mlx_kernels(run)] {
            prop_assert_eq!(weights.shape(), [rows, 1, k]);
            prop_assert_eq!(choice.shape(), [rows, 1, k]);
            let (weights, choice) = (weights.to_vec::<f32>().unwrap(), choice.to_vec::<i32>().unwrap());
            for (row, scores) in all.chunks_exact(count as usize).enumerate() {
                let mut order: Vec<i32> = (0..count).collect();
                order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
                order.truncate(k as usize);
                let at = row * k as usize;
                prop_assert_eq!(&choice[at..][..k as usize], &order);
                let e: Vec<f64> = order.iter().map(|i| f64::from(scores[*i as usize]).exp()).collect();
                for ((weight, e_i), index) in weights[at..].iter().zip(&e).zip(&order) {
                    let expected = e_i / e.iter().sum::<f64>() * f64::from(factors[*index as usize]);
                    prop_assert!((f64::from(*weight) - expected).abs() < 1e-6);
                }
            }
        }
    }
}

#[test]
fn all_rows_may_go_through_one_expert() {
    let _serial = serial();
    for expert in [0, 4, 99, -7] {
        let mut case = Case::new(3, [37, 64, 32, 5, 2], 4, true, false);
        case.choice.fill(expert);
        exactly(|| case.check(2e-5));
    }
}

#[test]
fn experts_in_bfloat16_are_close_to_those_in_single_precision() {
    let _serial = serial();
    for bits in [0, 4] {
        let case = Case::new(5, [9, 64, 96, 6, 3], bits, false, true);
        let narrow = |x: &Tensor| x.astype(DType::BF16).unwrap();
        let bf16 = Case {
            x: narrow(&case.x),
            norm: case.norm.as_ref().map(narrow),
            post_norm: case.post_norm.as_ref().map(narrow),
            residual: case.residual.as_ref().map(narrow),
            weights: narrow(&case.weights),
            matrices: case.matrices.each_ref().map(|stack| Stack {
                weight: match &stack.packed {
                    None => narrow(&stack.weight),
                    Some(_) => stack.weight.clone(),
                },
                packed: stack
                    .packed
                    .as_ref()
                    .map(|both| both.each_ref().map(narrow)),
                bits: stack.bits,
                dense: Vec::new(),
            }),
            choice: case.choice.clone(),
            ..case.rows(0, 0)
        };
        let expected: Vec<f32> = case.run().unwrap().to_vec().unwrap();
        for got in [bf16.run(), with_mlx_kernels(|| bf16.run())] {
            let got = got.unwrap();
            assert_eq!(got.dtype(), DType::BF16);
            let got: Vec<f32> = got.to_vec().unwrap();
            let error = got.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            assert!(error.fold(0.0, f32::max) < 0.1);
        }
    }
}

#[test]
fn experts_that_do_not_fit_are_refused() {
    let _serial = serial();
    let good = || Case::new(1, [2, 32, 64, 3, 2], 4, false, true);
    let refused = |change: fn(&mut Case), says: &str| {
        let mut case = good();
        change(&mut case);
        let error = case.run().expect_err(says);
        assert!(error.contains(says), "{error}");
    };
    assert!(good().run().is_ok());
    refused(|c| c.gate = UnaryOp::NONE, "gate");
    refused(|c| c.gate = UnaryOp::EXP, "gate");
    refused(|c| c.weights = tensor(1, &[1, 2, 3]), "weights");
    refused(|c| c.x = tensor(1, &[1, 2, 64]), "experts of");
    refused(|c| c.norm = Some(tensor(1, &[31])), "norm");
    refused(|c| c.residual = Some(tensor(1, &[1, 1, 32])), "added");
    refused(|c| c.matrices.swap(0, 2), "experts of");
    refused(
        |c| c.matrices[1] = Stack::new(1, [2, 64, 32], 4),
        "experts of",
    );
    refused(|c| c.matrices[2].bits = 8, "8 bits");
    refused(|c| c.matrices[2].packed = None, "experts of");
    refused(|c| c.matrices[0].weight = tensor(1, &[64, 32]), "gate of");
    refused(
        |c| {
            c.chosen = 0;
            c.choice.clear();
            c.weights = Tensor::from_slice::<f32>(&[], &[1, 2, 0]).unwrap();
        },
        "a choice of",
    );
    let scores = tensor(1, &[2, 3]);
    for (k, scale) in [(0, None), (4, None), (-1, None), (1, Some(tensor(1, &[2])))] {
        assert!(scores.route(k, scale.as_ref()).is_err());
    }
}
