//! The host's own kernels against MLX's, through the op table; and what the table refuses.

mod experts;
mod kv;

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugin_api::abi::{Attend, BinaryOp, GatedDelta, Projection, RawMatrix, RawTensor, UnaryOp};
use plugin_api::{DType, Mask, Result, Tensor};
use proptest::prelude::*;

use super::{install, with_mlx_kernels};

/// MLX has global state: one test at a time.
fn serial() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    install();
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers in -1..1 that differ by seed.
fn tensor(seed: u64, shape: &[i32]) -> Tensor {
    let count: i32 = shape.iter().product();
    let mut state = seed.wrapping_mul(2) + 1;
    let values: Vec<f32> = (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(99);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_slice(&values, shape).expect("a tensor")
}

/// The largest difference between an op on the host's kernels and on MLX's.
fn difference(op: impl Fn() -> Result<Tensor>) -> f32 {
    let own = op().expect("the host's kernel");
    let mlx = with_mlx_kernels(|| op().expect("MLX's kernel"));
    assert_eq!(own.shape(), mlx.shape());
    assert_eq!(own.dtype(), mlx.dtype());
    let (own, mlx) = (own.to_vec::<f32>().unwrap(), mlx.to_vec::<f32>().unwrap());
    let pairs = own.iter().zip(&mlx);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn norms_gates_and_rotations_agree_with_mlx(
        (b, h, t) in (1..4i32, 1..4i32, 1..5i32),
        half in 1..20i32,
        seed in 0..1000u64,
        narrow in any::<bool>(),
    ) {
        let _serial = serial();
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        // One step of the last place of numbers below 2, and some.
        let bound = if narrow { 2e-2 } else { 2e-6 };
        let d = 2 * half;
        let x = tensor(seed, &[b, h, t, d]).astype(dtype).unwrap();
        let w = tensor(seed + 1, &[d]).astype(dtype).unwrap();
        prop_assert!(difference(|| x.rms_norm(Some(&w), 1e-5)) < bound * 4.0);
        prop_assert!(difference(|| x.rms_norm(None, 1e-5)) < bound * 4.0);
        let offsets: Vec<i32> = (0..b).map(|row| row * 37).collect();
        let offsets = Tensor::from_slice(&offsets, &[b]).unwrap();
        let dims = (half / 2 + 1) * 2;
        let strided = x.transpose(&[0, 2, 1, 3]).unwrap();
        let rope = |x: &Tensor| x.rope(dims.min(d), 1e4, None, 0.5, &offsets);
        // The angle itself is rounded, differently.
        prop_assert!(difference(|| rope(&x)) < bound.max(2e-4));
        prop_assert!(difference(|| rope(&strided)) < bound.max(2e-4));
        let freqs: Vec<f32> = (0..dims.min(d) / 2).map(|j| 1.0 + j as f32).collect();
        let freqs = Tensor::from_slice(&freqs, &[dims.min(d) / 2]).unwrap();
        let scaled = || x.rope(dims.min(d), 1e4, Some(&freqs), 1.0, &offsets);
        prop_assert!(difference(scaled) < bound.max(2e-4));
    }

    #[test]
    fn attention_agrees_with_mlx(
        (b, kv_heads, repeat, t) in (1..4i32, 1..3i32, 1..4i32, 1..5i32),
        (more, d) in (0..60i32, 1..40i32),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let span = t + more;
        let q = tensor(seed, &[b, kv_heads * repeat, t, d]);
        // A view into a longer buffer, as caches give it.
        let cached = |seed| tensor(seed, &[b, kv_heads, span + 7, d]).slice(2, 0, span);
        let (k, v) = (cached(seed + 1).unwrap(), cached(seed + 2).unwrap());
        for mask in [Mask::None, Mask::Causal] {
            prop_assert!(difference(|| q.attention(&k, &v, 0.3, &mask)) < 2e-6);
        }
        let keys = Tensor::arange(0, span).unwrap().reshape(&[1, 1, 1, span]).unwrap();
        let last: Vec<i32> = (0..b * t).map(|i| (i * 5) % span).collect();
        let last = Tensor::from_slice(&last, &[b, 1, t, 1]).unwrap();
        let mask = Mask::Tensor(keys.less_equal(&last).unwrap());
        prop_assert!(difference(|| q.attention(&k, &v, 0.3, &mask)) < 2e-6);
    }

    #[test]
    fn gated_delta_agrees_with_mlx(
        lens in prop::collection::vec(0..6i32, 1..3),
        (hk, repeat, taps) in (1..3i32, 1..3i32, 1..5i32),
        (dk, dv) in (1..40i32, 1..40i32),
        narrow in any::<bool>(),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        let (b, t, hv) = (lens.len() as i32, 5, hk * repeat);
        let channels = 2 * hk * dk + hv * dv;
        let of = |seed, shape: &[i32]| tensor(seed, shape).astype(dtype).unwrap();
        let inputs = [
            of(seed, &[b, t, channels]),
            of(seed + 1, &[b, t, hv * dv]),
            of(seed + 2, &[b, t, hv]),
            of(seed + 3, &[b, t, hv]),
            of(seed + 4, &[b, taps - 1, channels]),
            tensor(seed + 5, &[b, hv, dv, dk]),
            of(seed + 6, &[taps, channels]),
            tensor(seed + 7, &[hv]).sigmoid().unwrap().neg().unwrap(),
            of(seed + 8, &[hv]),
            tensor(seed + 9, &[dv]),
        ];
        let [qkv, z, beta, a, conv, recurrent, weights, rate, dt_bias, norm] = &inputs;
        // A handle of its own, without which it would be written in place.
        let held = recurrent.clone();
        let run = |gated: bool, advance: bool, lens: &[i32]| -> Vec<Tensor> {
            let out = (super::api().gated_delta())(&GatedDelta {
                qkv: qkv.raw(),
                z: if gated { z.raw() } else { RawTensor::NULL },
                b: beta.raw(),
                a: a.raw(),
                conv_state: conv.raw(),
                recurrent_state: recurrent.raw(),
                conv_weight: weights.raw(),
                rate: rate.raw(),
                dt_bias: dt_bias.raw(),
                norm: norm.raw(),
                eps: 1e-5,
                key_heads: hk,
                lens: lens.into(),
                advance,
            });
            let made = usize::from(gated) + if advance { 2 } else { 0 };
            assert_eq!(out.len(), made, "{}", (super::api().take_error())());
            // SAFETY: new tensors, handed over.
            out.into_iter().map(|raw| unsafe { Tensor::from_raw(raw) }.unwrap()).collect()
        };
        // Sums are rounded in another order: of bfloat16 a step of the last place, passed on.
        let bound = if narrow { 6e-2 } else { 2e-5 };
        // What padding gives is nobody's business.
        for (row, &len) in (0..).zip(&lens) {
            let filled = || run(true, false, &lens)[0].slice(0, row, row + 1)?.slice(1, 0, len);
            prop_assert!(difference(filled) < bound);
        }
        prop_assert_eq!(difference(|| Ok(run(true, true, &lens)[1].clone())), 0.0);
        prop_assert!(difference(|| Ok(run(true, true, &lens)[2].clone())) < bound);
        // A state is the same without the outcome, and whatever follows it.
        let values = |x: &Tensor| x.to_vec::<f32>().unwrap();
        let full = run(false, true, &vec![t; lens.len()]);
        for (row, &len) in (0..).zip(&lens) {
            let of = |all: &[Tensor]| values(&all[all.len() - 1].slice(0, row, row + 1).unwrap());
            let alone = run(false, true, &lens);
            prop_assert_eq!(of(&run(true, true, &lens)), of(&alone));
            if len == t {
                prop_assert_eq!(of(&alone), of(&full));
            }
        }
        prop_assert_eq!(held.to_vec::<f32>().unwrap(), tensor(seed + 5, &[b, hv, dv, dk]).to_vec::<f32>().unwrap());
    }

    #[test]
    fn projections_agree_with_mlx(
        (rows, outputs, groups) in (1..20i32, 1..40i32, 1..5i32),
        group in prop::sample::select(vec![32, 64, 128]),
        bits in prop::sample::select(vec![0, 4, 8]),
        (normed, gated, narrow, finished) in any::<(bool, bool, bool, bool)>(),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let inputs = groups * group;
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        let tensor = |seed, shape: &[i32]| tensor(seed, shape).astype(dtype).unwrap();
        let x = tensor(seed, &[1, rows, inputs]);
        let norm = tensor(seed + 7, &[inputs]);
        let words: Vec<u32> = (0..outputs * inputs * bits / 32)
            .map(|i| (i as u32).wrapping_mul(2_654_435_761) ^ seed as u32)
            .collect();
        let packed = Tensor::from_slice(&words, &[outputs, inputs * bits / 32]).unwrap();
        let scales = tensor(seed + 1, &[outputs, groups]).scale(0.01).unwrap();
        let biases = tensor(seed + 2, &[outputs, groups]).scale(0.1).unwrap();
        let dense = tensor(seed + 3, &[outputs, inputs]);
        let offset = tensor(seed + 4, &[outputs]);
        let residual = tensor(seed + 5, &[1, rows, outputs]);
        let post_norm = tensor(seed + 6, &[outputs]);
        let null = RawTensor::NULL;
        let matrix = RawMatrix {
            weight: if bits == 0 { dense.raw() } else { packed.raw() },
            scales: if bits == 0 { null } else { scales.raw() },
            biases: if bits == 0 { null } else { biases.raw() },
            offset: offset.raw(),
            group,
            bits,
        };
        let matrices = [matrix, matrix];
        let run = || {
            let out = (super::api().project())(&Projection {
                x: x.raw(),
                norm: if normed { norm.raw() } else { null },
                eps: 1e-5,
                matrices: matrices[..if gated { 2 } else { 1 }].into(),
                gate: if gated { UnaryOp::SILU } else { UnaryOp::NONE },
                post_norm: if finished { post_norm.raw() } else { null },
                // Not less: of a row that is almost 0, the norm would blow up what rounding left.
                post_eps: 1e-2,
                residual: residual.raw(),
                scale: if finished { 0.5 } else { 1.0 },
            });
            assert_eq!(out.len(), 1, "{}", (super::api().take_error())());
            // SAFETY: a new tensor, handed over.
            Ok(unsafe { Tensor::from_raw(out[0]) }.unwrap())
        };
        crate::kernels::set_exact(true);
        let error = difference(run);
        crate::kernels::set_exact(false);
        let size = (inputs as f32) * if gated { 30.0 } else { 3.0 };
        let bound = if narrow { 1e-2 } else { 2e-7 };
        prop_assert!(error < bound * size, "{error}");
    }

    #[test]
    fn self_attention_agrees_with_mlx(
        (kv_heads, repeat, half, t) in (1..3i32, 1..4i32, 2..20i32, 1..20i32),
        offsets in prop::collection::vec(0..40i32, 1..4),
        window in prop::sample::select(vec![0, 1, 7]),
        (normed, gated, freqs) in any::<(bool, bool, bool)>(),
        block in prop::option::of(1..20i32),
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let (b, d) = (offsets.len() as i32, 2 * half);
        let heads = kv_heads * repeat;
        let q = tensor(seed, &[b, t, heads * d * if gated { 2 } else { 1 }]);
        let k = tensor(seed + 1, &[b, t, kv_heads * d]);
        let v = tensor(seed + 2, &[b, t, kv_heads * d]);
        // With a window, later passes go on at the caches' beginning.
        let capacity = if window == 0 { 64 } else { window + t + 2 };
        let cache = |seed| tensor(seed, &[b, kv_heads, capacity, d]);
        let positions: Vec<i32> = offsets.iter().map(|offset| offset + 1).collect();
        let ends: Vec<i32> = match block {
            Some(filled) => offsets.iter().map(|offset| offset + filled.min(t)).collect(),
            None => Vec::new(),
        };
        let (keys, values) = (cache(seed + 3), cache(seed + 4));
        let norm = tensor(seed + 5, &[d]);
        let rope_dims = (half / 2 + 1) * 2;
        let divisors: Vec<f32> = (0..rope_dims / 2).map(|j| 1.0 + j as f32).collect();
        let divisors = Tensor::from_slice(&divisors, &[rope_dims / 2]).unwrap();
        let optional = |given: bool, x: &Tensor| if given { x.raw() } else { RawTensor::NULL };
        // Handles of their own, without which they would be written in place.
        let (held, also) = (keys.clone(), values.clone());
        // With queries the mix comes first; without them there is none.
        for (q, index) in [(Some(&q), 0), (Some(&q), 1), (Some(&q), 2), (None, 0), (None, 1)] {
            let run = || {
                let out = (super::api().attend())(&Attend {
                    q: q.map_or(RawTensor::NULL, Tensor::raw),
                    k: k.raw(),
                    v: optional(!gated, &v),
                    keys: keys.raw(),
                    values: values.raw(),
                    first_keys: RawTensor::NULL,
                    first_values: RawTensor::NULL,
                    start: 0,
                    q_norm: optional(normed, &norm),
                    k_norm: optional(normed, &norm),
                    v_norm: normed,
                    eps: 1e-5,
                    heads,
                    kv_heads,
                    gated,
                    rope_dims,
                    rope_base: 1e4,
                    rope_freqs: optional(freqs, &divisors),
                    rope_scale: 0.5,
                    positions: positions.as_slice().into(),
                    offsets: offsets.as_slice().into(),
                    ends: if q.is_some() { ends.as_slice().into() } else { [].as_slice().into() },
                    window,
                    scale: 0.3,
                });
                let wanted = if q.is_some() { 3 } else { 2 };
                assert_eq!(out.len(), wanted, "{}", (super::api().take_error())());
                // SAFETY: new tensors, handed over.
                let mut out = out.into_iter().map(|raw| unsafe { Tensor::from_raw(raw) }.unwrap());
                Ok(out.nth(index).unwrap())
            };
            // The angle itself is rounded, differently.
            prop_assert!(difference(run) < 3e-4);
        }
        // Whoever still holds the caches sees them as they were.
        prop_assert_eq!(held.to_vec::<f32>().unwrap(), cache(seed + 3).to_vec::<f32>().unwrap());
        prop_assert_eq!(also.to_vec::<f32>().unwrap(), cache(seed + 4).to_vec::<f32>().unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn little_steps_agree_with_mlx(
        (a, b, c) in (1..4i32, 1..5i32, 1..6i32),
        (axis, more) in (0..3usize, 1..4i32),
        cut in prop::array::uniform6(0..7i32),
        ids in prop::collection::vec(-2..7i32, 1..5),
        (bits, group) in (prop::sample::select(vec![4, 8]), prop::sample::select(vec![32, 64])),
        strided in any::<bool>(),
        kind in 0..3usize,
        seed in 0..1000u64,
    ) {
        let _serial = serial();
        let dtype = [DType::F32, DType::BF16, DType::F16][kind];
        let shape = [a, b, c];
        let mut x = tensor(seed, &shape).astype(dtype).unwrap();
        if strided {
            x = tensor(seed, &[c, b, a]).astype(dtype).unwrap().transpose(&[2, 1, 0]).unwrap();
        }
        let mut other = shape;
        other[axis] = more;
        let other = tensor(seed + 1, &other).astype(dtype).unwrap();
        for axis in [axis as i32, axis as i32 - 3] {
            prop_assert_eq!(difference(|| Tensor::concat(&[&x, &other, &x], axis)), 0.0);
        }
        let starts: Vec<i32> = (0..3).map(|i| cut[i] % (shape[i] + 1)).collect();
        let lens: Vec<i32> = (0..3).map(|i| cut[3 + i] % (shape[i] - starts[i] + 1)).collect();
        prop_assert_eq!(
            difference(|| (0..3).try_fold(x.clone(), |x, i| {
                x.slice(i as i32, starts[i], starts[i] + lens[i])
            })),
            0.0
        );
        let ids = Tensor::from_slice(&ids, &[ids.len() as i32]).unwrap();
        prop_assert_eq!(difference(|| x.take(&ids, 0)), 0.0);
        for to in [DType::F32, DType::BF16, DType::F16] {
            prop_assert_eq!(difference(|| x.astype(to)), 0.0);
        }
        let words: Vec<u32> = (0..a * 16 * bits).map(|i| (i as u32 + 7).wrapping_mul(2_654_435_761)).collect();
        let words = Tensor::from_slice(&words, &[a, 16 * bits]).unwrap();
        let scales = |seed| tensor(seed, &[a, 512 / group]).astype(dtype).unwrap();
        let (scales, biases) = (scales(seed), scales(seed + 1));
        prop_assert_eq!(difference(|| words.dequantize(&scales, &biases, group, bits)), 0.0);
    }
}

#[test]
fn settled_weights_are_the_same_to_all_who_hold_them() {
    let _serial = serial();
    let large = tensor(1, &[300, 70]);
    let (also, view) = (large.clone(), large.transpose(&[1, 0]).unwrap());
    let narrow = tensor(2, &[33]).astype(DType::BF16).unwrap();
    let empty = Tensor::from_slice::<f32>(&[], &[0, 4]).unwrap();
    let all = [&large, &narrow, &empty, &view];
    Tensor::eval_all(&all).unwrap();
    let values = |x: &Tensor| x.to_vec::<f32>().unwrap();
    let before = all.map(values);
    super::settle(&all).unwrap();
    assert_eq!(all.map(values), before);
    assert_eq!(values(&also), before[0]);
    // Once more: what lies in a block can be moved on.
    super::settle(&[&also]).unwrap();
    assert_eq!(values(&large), before[0]);
}

#[test]
fn indices_outside_an_axis_are_forced_into_it() {
    let _serial = serial();
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3]).unwrap();
    let wild = Tensor::from_slice(&[-5, i32::MAX, 1], &[3]).unwrap();
    assert_eq!(
        x.take(&wild, 0).unwrap().to_vec::<f32>().unwrap(),
        [1.0, 3.0, 2.0]
    );
    let along = x.take_along_axis(&wild, 0).unwrap();
    assert_eq!(along.to_vec::<f32>().unwrap(), [1.0, 3.0, 2.0]);
}

#[test]
fn what_does_not_fit_is_an_error_that_says_so() {
    let _serial = serial();
    let x = tensor(1, &[2, 3]);
    let y = tensor(2, &[4, 5]);
    for (outcome, says) in [
        (x.matmul(&y), "matmul"),
        (x.reshape(&[7]), "reshape"),
        (x.slice(1, 1, 9), "outside"),
        (x.slice_update(&y, &[0, 0]), "slice_update"),
        (Tensor::concat(&[&x, &y], 0), "concat"),
        (x.take(&Tensor::arange(0, 1).unwrap(), 5), "axis 5"),
        (Tensor::full(&[i32::MAX; 4], 0.0, DType::F32), "shape"),
        (Tensor::full(&[-1], 0.0, DType::F32), "shape"),
        (Tensor::from_bytes(&[0; 3], &[1], DType::F32), "3 bytes"),
        (x.astype(DType(99)), "99"),
        (x.binary(BinaryOp(99), &x), "99"),
    ] {
        let error = outcome.expect_err(says);
        assert!(error.message().contains(says), "{error}");
    }
}

#[test]
fn padding_and_raggedness_leave_a_view_contiguous() {
    let _serial = serial();
    let x = Tensor::arange(0, 24).unwrap().reshape(&[2, 3, 4]).unwrap();
    let columns = x.columns(&[0, 2], 2).unwrap();
    let expected = [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 20, 21, 22, 23];
    assert_eq!(columns.to_vec::<i32>().unwrap(), expected);
    let turned = x.transpose(&[2, 0, 1]).unwrap();
    assert_eq!(turned.to_vec::<i32>().unwrap()[..6], [0, 4, 8, 12, 16, 20]);
}
