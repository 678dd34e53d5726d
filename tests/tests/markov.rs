//! Markov heads against the formulas of their format, in double precision.

use std::collections::BTreeMap;
use std::rc::Rc;

use mlxhost_tests::decoding::Random;
use mlxhost_tests::{checkpoint, engine_lock};
use plugin_api::block::{Confidence, Markov, MarkovKind};
use plugin_api::layers::Linear;
use plugin_api::{Checkpoint, Tensor, Weights};

const VOCAB: usize = 11;
const RANK: usize = 3;
const HIDDEN: usize = 5;
const ROWS: usize = 2;

/// `y = W x + b` with `W` `[outputs, inputs]`.
struct Matrix {
    weight: Vec<f32>,
    bias: Vec<f32>,
    inputs: usize,
}

impl Matrix {
    fn new(random: &mut Random, inputs: usize, outputs: usize) -> Self {
        let mut numbers = |count: usize| -> Vec<f32> {
            (0..count)
                .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
                .collect()
        };
        Self {
            weight: numbers(inputs * outputs),
            bias: numbers(outputs),
            inputs,
        }
    }

    fn row(&self, index: usize) -> Vec<f64> {
        let row = &self.weight[index * self.inputs..][..self.inputs];
        row.iter().map(|&x| f64::from(x)).collect()
    }

    fn of(&self, x: &[f64]) -> Vec<f64> {
        let dot = |row: Vec<f64>| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
        let rows = 0..self.bias.len();
        rows.map(|i| dot(self.row(i)) + f64::from(self.bias[i]))
            .collect()
    }
}

/// As a layer, with its bias or without.
fn linear(w: &Matrix, with_bias: bool) -> Linear {
    let (inputs, outputs) = (w.inputs as i32, w.bias.len() as i32);
    let weight = Tensor::from_slice(&w.weight, &[outputs, inputs]).unwrap();
    let mut tensors = BTreeMap::from([("weight".to_owned(), weight)]);
    if with_bias {
        let bias = Tensor::from_slice(&w.bias, &[outputs]).unwrap();
        tensors.insert("bias".to_owned(), bias);
    }
    let path = checkpoint("llama-f32");
    let checkpoint = Rc::new(Checkpoint::open(path.to_str().unwrap()).unwrap());
    Linear::load(&Weights::translated(checkpoint, tensors), inputs, outputs).unwrap()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// What a head keeps between columns, and what it puts into `w2`.
type Step<'a> = dyn Fn(&mut Vec<f64>, &[f64], &[f64]) -> Vec<f64> + 'a;

fn agrees(kind: MarkovKind, step: &Step<'_>, random: &mut Random) {
    let mut w1 = Matrix::new(random, RANK, VOCAB);
    let mut w2 = Matrix::new(random, RANK, VOCAB);
    w1.bias.fill(0.0);
    w2.bias.fill(0.0);
    let head = Markov::new(linear(&w1, false), linear(&w2, false), kind);
    let judge = Matrix::new(random, HIDDEN + RANK, 1);
    let confidence = Confidence::new(linear(&judge, true), true);
    let mut states = vec![vec![0.0; RANK]; ROWS];
    let mut state = None;
    for _ in 0..4 {
        let before: Vec<i32> = (0..ROWS).map(|_| random.below(VOCAB) as i32).collect();
        let hidden = Matrix::new(random, HIDDEN, ROWS);
        let tokens = Tensor::from_slice(&before, &[ROWS as i32, 1]).unwrap();
        let hiddens = [ROWS as i32, 1, HIDDEN as i32];
        let hiddens = Tensor::from_slice(&hidden.weight, &hiddens).unwrap();
        let embedded = head.embed(&tokens).unwrap();
        let bias = head.bias(&embedded, &hiddens, &mut state).unwrap();
        let sure = confidence.of(&hiddens, Some(&embedded)).unwrap();
        assert_eq!(bias.shape(), [ROWS as i32, 1, VOCAB as i32]);
        let (bias, sure) = (bias.to_vec::<f32>().unwrap(), sure.to_vec::<f32>().unwrap());
        for row in 0..ROWS {
            let (e, h) = (w1.row(before[row] as usize), hidden.row(row));
            let expected = w2.of(&step(&mut states[row], &e, &h));
            for (got, expected) in bias[row * VOCAB..].iter().zip(&expected) {
                assert!((f64::from(*got) - expected).abs() < 1e-5);
            }
            let expected = sigmoid(judge.of(&[h, e].concat())[0]);
            assert!((f64::from(sure[row]) - expected).abs() < 1e-6);
        }
    }
}

#[test]
fn markov_heads_compute_what_their_format_says() {
    let _lock = engine_lock();
    mlxhost::backend::install();
    let random = &mut Random(7);
    agrees(MarkovKind::Vanilla, &|_, e, _| e.to_vec(), random);

    let gate = Matrix::new(random, HIDDEN + RANK, RANK);
    let gated = |_: &mut Vec<f64>, e: &[f64], h: &[f64]| -> Vec<f64> {
        let gates = gate.of(&[h, e].concat());
        gates.iter().zip(e).map(|(g, e)| sigmoid(*g) * e).collect()
    };
    agrees(MarkovKind::Gated(linear(&gate, true)), &gated, random);

    let joint = Matrix::new(random, HIDDEN + 2 * RANK, 3 * RANK);
    let gru = |s: &mut Vec<f64>, e: &[f64], h: &[f64]| -> Vec<f64> {
        let z = joint.of(&[s.as_slice(), e, h].concat());
        for (i, s) in s.iter_mut().enumerate() {
            let g = sigmoid(z[i]);
            *s = g * *s + (1.0 - g) * z[RANK + i].tanh();
        }
        z[2 * RANK..].iter().map(|o| o.tanh()).collect()
    };
    agrees(MarkovKind::Gru(linear(&joint, true)), &gru, random);

    let w = Matrix::new(random, RANK, RANK);
    let elman = |s: &mut Vec<f64>, e: &[f64], _: &[f64]| -> Vec<f64> {
        *s = w.of(s).iter().zip(e).map(|(s, e)| (s + e).tanh()).collect();
        s.clone()
    };
    agrees(MarkovKind::Elman(linear(&w, true)), &elman, random);
}
