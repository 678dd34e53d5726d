//! Quantized caches through the op table: the host's kernel against MLX's ops.

use plugin_api::abi::{Attend, RawTensor};
use plugin_api::layers::QuantizedKv;
use plugin_api::{DType, Tensor};
use proptest::prelude::*;

use super::super::{api, with_mlx_kernels};
use super::{serial, tensor};

/// A call over quantized caches.
#[derive(Debug)]
struct Call {
    kv: QuantizedKv,
    dim: i32,
    kv_heads: i32,
    repeat: i32,
    width: i32,
    offsets: Vec<i32>,
    window: i32,
    /// Norms and rotation, and values out of keys.
    dressed: bool,
    ends: Vec<i32>,
    dtype: DType,
    seed: u64,
}

/// What a call starts from: keys, values, then those of first positions.
type Stored = Vec<Tensor>;

impl Call {
    fn batch(&self) -> i32 {
        self.offsets.len() as i32
    }

    fn tensor(&self, seed: u64, shape: &[i32]) -> Tensor {
        tensor(self.seed + seed, shape).astype(self.dtype).unwrap()
    }

    /// Caches that other passes have filled up to the offsets, by the host's own kernel.
    fn stored(&self) -> Stored {
        let capacity = if self.window == 0 {
            64
        } else {
            self.window + self.width.max(40)
        };
        let shape = |columns, width| [self.batch(), self.kv_heads, columns, width];
        let packed = Tensor::full(&shape(capacity, self.kv.words(self.dim)), 0.0, DType::U32);
        let packed = packed.unwrap();
        let mut stored = vec![packed.clone(), packed];
        if self.kv.start > 0 {
            let first = shape(self.kv.start.min(capacity), self.dim);
            let first = Tensor::full(&first, 0.0, self.dtype).unwrap();
            stored.extend([first.clone(), first]);
        }
        let most = self.offsets.iter().max().copied().unwrap_or(0);
        if most > 0 {
            let zeros = vec![0; self.offsets.len()];
            let k = self.tensor(11, &[self.batch(), most, self.kv_heads * self.dim]);
            let out = self.run(&stored, &zeros, None, Some(&k), None, &[]);
            stored = out;
        }
        stored
    }

    fn run(
        &self,
        stored: &Stored,
        offsets: &[i32],
        q: Option<&Tensor>,
        k: Option<&Tensor>,
        v: Option<&Tensor>,
        ends: &[i32],
    ) -> Vec<Tensor> {
        let raw = |x: Option<&Tensor>| x.map_or(RawTensor::NULL, Tensor::raw);
        let norm = self.tensor(5, &[self.dim]);
        let norm = if self.dressed {
            norm.raw()
        } else {
            RawTensor::NULL
        };
        let out = (api().attend())(&Attend {
            q: raw(q),
            k: raw(k),
            v: raw(v),
            keys: stored[0].raw(),
            values: stored[1].raw(),
            first_keys: raw(stored.get(2)),
            first_values: raw(stored.get(3)),
            start: self.kv.start,
            q_norm: norm,
            k_norm: norm,
            v_norm: self.dressed,
            eps: 1e-5,
            heads: self.kv_heads * self.repeat,
            kv_heads: self.kv_heads,
            gated: false,
            rope_dims: if self.dressed { 12 } else { 0 },
            rope_base: 1e4,
            rope_freqs: RawTensor::NULL,
            rope_scale: 1.0,
            positions: offsets.into(),
            offsets: offsets.into(),
            ends: ends.into(),
            window: self.window,
            scale: 0.3,
        });
        assert!(!out.is_empty(), "{}", (api().take_error())());
        // SAFETY: new tensors, handed over.
        let own = out
            .into_iter()
            .map(|raw| unsafe { Tensor::from_raw(raw) }.unwrap());
        own.collect()
    }

    /// A pass by the host's kernel and by MLX's ops: the mix, and the caches after it. `new`: whether the
    /// pass has keys of its own.
    fn both(&self, new: bool) -> [Vec<Tensor>; 2] {
        let stored = self.stored();
        // Nothing is written in place while someone else holds it.
        let _held = stored.clone();
        let (b, t) = (self.batch(), self.width);
        let q = self.tensor(1, &[b, t, self.kv_heads * self.repeat * self.dim]);
        let k = self.tensor(2, &[b, t, self.kv_heads * self.dim]);
        let v = self.tensor(3, &[b, t, self.kv_heads * self.dim]);
        let k = new.then_some(&k);
        let v = k.and((!self.dressed).then_some(&v));
        let run = || self.run(&stored, &self.offsets, Some(&q), k, v, &self.ends);
        [run(), with_mlx_kernels(run)]
    }
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()));
    let (a, b) = (a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
    assert!(a.iter().chain(&b).all(|x| x.is_finite()));
    let pairs = a.iter().zip(&b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn words(x: &Tensor) -> Vec<u32> {
    let bytes = super::super::bytes_of(x).unwrap();
    let words = bytes.chunks_exact(4);
    words
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

fn calls() -> impl Strategy<Value = Call> {
    (
        (1..3i32, 1..4i32, 1..20i32),
        prop::collection::vec(0..40i32, 1..4),
        prop::sample::select(vec![(4, 32), (8, 32), (4, 64), (8, 64), (8, 128)]),
        prop::sample::select(vec![0, 1, 7, 41, 60]),
        prop::sample::select(vec![0, 1, 7]),
        (any::<bool>(), any::<bool>()),
        prop::option::of(1..20i32),
        0..1000u64,
    )
        .prop_map(
            |(
                (kv_heads, repeat, width),
                offsets,
                (bits, group),
                start,
                window,
                (double, narrow),
                block,
                seed,
            )| Call {
                kv: QuantizedKv { bits, group, start },
                dim: group * if double { 2 } else { 1 },
                kv_heads,
                repeat,
                width,
                window,
                dressed: false,
                ends: block.map_or_else(Vec::new, |filled| {
                    offsets
                        .iter()
                        .map(|offset| offset + filled.min(width))
                        .collect()
                }),
                offsets,
                dtype: if narrow { DType::BF16 } else { DType::F32 },
                seed,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Without norms and rotation, which MLX rounds otherwise, the words are the same to the bit.
    #[test]
    fn quantized_attention_agrees_with_mlx(call in calls()) {
        let _serial = serial();
        let bound = if call.dtype == DType::BF16 { 2e-2 } else { 2e-5 };
        let [own, mlx] = call.both(true);
        prop_assert_eq!(own.len(), if call.kv.start > 0 { 5 } else { 3 });
        prop_assert!(difference(&own[0], &mlx[0]) < bound);
        for side in [1, 2] {
            prop_assert_eq!(words(&own[side]), words(&mlx[side]));
        }
        for (own, mlx) in own[3..].iter().zip(&mlx[3..]) {
            prop_assert_eq!(difference(own, mlx), 0.0);
        }
    }

    /// With them, caches that are only looked at: those of another layer, or lent to a drafter.
    #[test]
    fn a_look_at_quantized_keys_agrees_with_mlx(call in calls()) {
        let _serial = serial();
        let call = Call { dressed: true, ..call };
        let bound = if call.dtype == DType::BF16 { 5e-2 } else { 3e-4 };
        let [own, mlx] = call.both(false);
        prop_assert_eq!((own.len(), mlx.len()), (1, 1));
        prop_assert!(difference(&own[0], &mlx[0]) < bound);
    }

    /// All of it: keys that are rounded otherwise may get the next code.
    #[test]
    fn codes_are_at_most_one_apart(call in calls()) {
        let _serial = serial();
        let call = Call { dressed: true, dtype: DType::F32, ..call };
        let [own, mlx] = call.both(true);
        let codes = (call.dim * call.kv.bits / 32) as usize;
        for side in [1, 2] {
            let (own, mlx) = (words(&own[side]), words(&mlx[side]));
            let rows = own.chunks(call.kv.words(call.dim) as usize);
            for (own, mlx) in rows.zip(mlx.chunks(call.kv.words(call.dim) as usize)) {
                for (a, b) in own[..codes].iter().zip(&mlx[..codes]) {
                    for shift in (0..32).step_by(call.kv.bits as usize) {
                        let code = |word: &u32| (word >> shift & ((1 << call.kv.bits) - 1)) as i32;
                        prop_assert!((code(a) - code(b)).abs() <= 1);
                    }
                }
            }
        }
        let bound = if call.kv.bits == 4 { 0.3 } else { 0.03 };
        prop_assert!(difference(&own[0], &mlx[0]) < bound);
    }
}

#[test]
fn caches_that_are_no_such_thing_are_refused() {
    let _serial = serial();
    let call = Call {
        kv: QuantizedKv {
            bits: 8,
            group: 32,
            start: 7,
        },
        dim: 32,
        kv_heads: 1,
        repeat: 1,
        width: 1,
        offsets: vec![3],
        window: 0,
        dressed: false,
        ends: Vec::new(),
        dtype: DType::F32,
        seed: 1,
    };
    let stored = call.stored();
    let q = tensor(1, &[1, 1, 32]);
    let refused = |stored: &Stored, start: i32, q: &Tensor| {
        let raw = |at: usize| stored.get(at).map_or(RawTensor::NULL, Tensor::raw);
        let out = (api().attend())(&Attend {
            q: q.raw(),
            k: RawTensor::NULL,
            v: RawTensor::NULL,
            keys: raw(0),
            values: raw(1),
            first_keys: raw(2),
            first_values: raw(3),
            start,
            q_norm: RawTensor::NULL,
            k_norm: RawTensor::NULL,
            v_norm: false,
            eps: 1e-5,
            heads: 1,
            kv_heads: 1,
            gated: false,
            rope_dims: 0,
            rope_base: 1e4,
            rope_freqs: RawTensor::NULL,
            rope_scale: 1.0,
            positions: [3].as_slice().into(),
            offsets: [3].as_slice().into(),
            ends: [].as_slice().into(),
            window: 0,
            scale: 1.0,
        });
        let error = (api().take_error())();
        for raw in &out {
            // SAFETY: a new tensor, handed over.
            drop(unsafe { Tensor::from_raw(*raw) });
        }
        out.is_empty() && error.contains("attend")
    };
    assert!(!refused(&stored, 7, &q));
    // First positions without a place, a place without any, too small a place.
    assert!(refused(&stored[..2].to_vec(), 7, &q));
    assert!(refused(&stored, 0, &q));
    assert!(refused(&stored, -1, &q));
    let short = |x: &Tensor| x.slice(2, 0, 2).unwrap();
    let cut = vec![
        stored[0].clone(),
        stored[1].clone(),
        short(&stored[2]),
        short(&stored[3]),
    ];
    assert!(refused(&cut, 7, &q));
    // Rows of words for other heads.
    assert!(refused(&stored, 7, &tensor(1, &[1, 1, 48])));
    let odd = vec![
        stored[0].slice(3, 0, 6).unwrap(),
        stored[1].slice(3, 0, 6).unwrap(),
    ];
    assert!(refused(&odd, 0, &q));
    // Exact keys have no first positions.
    let exact = tensor(1, &[1, 1, 16, 32]);
    let exact = vec![exact.clone(), exact, stored[2].clone(), stored[3].clone()];
    assert!(refused(&exact, 7, &q));
}
