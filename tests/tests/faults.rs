//! Tensor ops of the target fail, as they do where memory ends: nobody else's answer changes.
//!
//! Between the host's models and its op table lies another table here, which fails as it is told.
//! Plugins keep the host's own.

use std::sync::atomic::{AtomicU32, Ordering};

use mlxhost::backend;
use mlxhost::engine::{Engine, Event, Limits, Request};
use mlxhost::prefix::PrefixConfig;
use plugin_api::abi::{
    Attend, DType, GatedDelta, HostApi, HostApiRef, MAX_RANK, Projection, RawTensor, TensorInfo,
};
use plugin_api::abi_stable::prefix_type::WithMetadata;
use plugin_api::abi_stable::std_types::{RSlice, RSliceMut, RVec};

use mlxhost_tests::decoding::{PAIRS, Random, Reply, ask, engine_with, request, sampled};
use mlxhost_tests::engine_lock;

/// Every how many ops of a kind one fails; 0: none.
struct Fault {
    every: AtomicU32,
    seen: AtomicU32,
    failed: AtomicU32,
}

impl Fault {
    const fn none() -> Self {
        Self {
            every: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            failed: AtomicU32::new(0),
        }
    }

    fn set(&self, every: u32) {
        self.every.store(every, Ordering::SeqCst);
    }

    fn strikes(&self) -> bool {
        let every = self.every.load(Ordering::SeqCst);
        let strikes = every > 0 && self.seen.fetch_add(1, Ordering::SeqCst) % every == every - 1;
        self.failed.fetch_add(u32::from(strikes), Ordering::SeqCst);
        strikes
    }

    fn failed(&self) -> u32 {
        self.failed.load(Ordering::SeqCst)
    }
}

/// Rows taken out of caches, caches put together, and anything at all.
static CUT: Fault = Fault::none();
static JOIN: Fault = Fault::none();
static ANY: Fault = Fault::none();

fn real() -> HostApiRef {
    backend::api()
}

fn rank(tensor: RawTensor) -> u32 {
    let mut info = TensorInfo {
        dtype: DType::F32,
        rank: 0,
        shape: [0; MAX_RANK],
    };
    real().tensor_info()(tensor, &mut info);
    info.rank
}

/// One tensor or null.
fn unless(fails: bool, op: impl FnOnce() -> RawTensor) -> RawTensor {
    if fails { RawTensor::NULL } else { op() }
}

/// Tensors or none.
fn several(op: impl FnOnce() -> RVec<RawTensor>) -> RVec<RawTensor> {
    if ANY.strikes() { RVec::new() } else { op() }
}

extern "C" fn take(x: RawTensor, indices: RawTensor, axis: i32) -> RawTensor {
    let fails = axis == 0 && rank(x) == 4 && CUT.strikes();
    unless(fails || ANY.strikes(), || real().take()(x, indices, axis))
}

extern "C" fn concat(tensors: RSlice<'_, RawTensor>, axis: i32) -> RawTensor {
    let fails = axis == 0 && tensors.first().is_some_and(|x| rank(*x) == 4) && JOIN.strikes();
    unless(fails || ANY.strikes(), || real().concat()(tensors, axis))
}

extern "C" fn slice(x: RawTensor, starts: RSlice<'_, i32>, stops: RSlice<'_, i32>) -> RawTensor {
    unless(ANY.strikes(), || real().slice()(x, starts, stops))
}

extern "C" fn reshape(x: RawTensor, shape: RSlice<'_, i32>) -> RawTensor {
    unless(ANY.strikes(), || real().reshape()(x, shape))
}

extern "C" fn project(projection: &Projection<'_>) -> RVec<RawTensor> {
    several(|| real().project()(projection))
}

extern "C" fn attend(attend: &Attend<'_>) -> RVec<RawTensor> {
    several(|| real().attend()(attend))
}

extern "C" fn gated_delta(delta: &GatedDelta<'_>) -> RVec<RawTensor> {
    several(|| real().gated_delta()(delta))
}

extern "C" fn eval(tensors: RSlice<'_, RawTensor>, wait: bool) -> bool {
    !ANY.strikes() && real().eval()(tensors, wait)
}

extern "C" fn read(x: RawTensor, dtype: DType, bytes: RSliceMut<'_, u8>) -> bool {
    !ANY.strikes() && real().read()(x, dtype, bytes)
}

/// Puts the failing table in the place of the host's, once.
fn install() {
    macro_rules! table {
        ($($own:ident)*; $($same:ident)*) => {
            HostApi { $($own,)* $($same: real().$same(),)* }
        };
    }
    let table = table! {
        take concat slice reshape project attend gated_delta eval read;
        take_error log memory_used clone_tensor drop_tensor tensor_info from_bytes full arange
        astype transpose broadcast_to slice_update take_along_axis unary binary select reduce sort
        cumsum softmax matmul route experts dequantize rms_norm rope attention checkpoint_open
        checkpoint_drop checkpoint_config checkpoint_names checkpoint_tensor checkpoint_bytes
        checkpoint_vocabulary
    };
    let table: &'static WithMetadata<HostApi> = Box::leak(Box::new(WithMetadata::new(table)));
    plugin_api::install(HostApiRef(table.static_as_prefix()));
}

/// Requests of different lengths and samplers; the second begins as the first does, and goes on.
fn pool(engine: &Engine) -> Vec<(Request, Reply)> {
    let mut random = Random(5);
    let mut pool: Vec<(Request, Reply)> = Vec::new();
    for seed in 0..6 {
        let prompt = match pool.first() {
            Some((request, reply)) if seed == 1 => [&request.prompt[..], &reply.tokens].concat(),
            _ => (0..1 + random.below(30))
                .map(|_| random.below(250) as i32)
                .collect(),
        };
        let mut request = request(&prompt, 4 + random.below(12));
        if seed % 2 == 1 {
            request.sampling = sampled(seed);
        }
        let reply = ask(engine, &request);
        pool.push((request, reply));
    }
    pool
}

/// Asks all, some later than others, while `fault` strikes every so many times. Says how many answers broke off;
/// all that came are what each gives alone.
fn broken(engine: &Engine, pool: &[(Request, Reply)], fault: &Fault, every: u32) -> usize {
    fault.set(every);
    let mut running = Vec::new();
    for (index, (request, reply)) in pool.iter().enumerate() {
        let one = engine.submit(request.clone()).expect("a valid request");
        let first = (index % 3 == 2).then(|| one.next_event()).flatten();
        running.push((first, one, reply));
    }
    let mut broken = 0;
    for (first, one, reply) in running {
        let mut tokens = Vec::new();
        let end = first.into_iter().chain(one).find_map(|event| match event {
            Event::Token(token) => {
                tokens.push(token.id);
                None
            }
            Event::Done(answer) => Some(Ok(answer.finish)),
            Event::Failed(why) => Some(Err(why.to_string())),
        });
        match end.expect("every request ends") {
            Ok(finish) => {
                assert_eq!((&tokens, finish), (&reply.tokens, reply.finish));
            }
            Err(why) => {
                assert!(!why.is_empty());
                assert!(reply.tokens.starts_with(&tokens));
                broken += 1;
            }
        }
    }
    fault.set(0);
    broken
}

/// With every kind of target and drafter, and a memory of what was said.
fn each(mut test: impl FnMut(&Engine, &[(Request, Reply)])) {
    let _lock = engine_lock();
    install();
    for pair in [PAIRS[0], PAIRS[3], PAIRS[6]] {
        let (model, source) = pair.open();
        let prefix = PrefixConfig {
            memory_bytes: 8 << 20,
            ..PrefixConfig::default()
        };
        let engine = engine_with(&model, [source], Limits::default(), prefix);
        let pool = pool(&engine);
        test(&engine, &pool);
        // Nothing of it stays.
        assert_eq!(broken(&engine, &pool, &ANY, 0), 0, "{pair:?}");
    }
}

/// Whatever strikes at it, every answer comes.
fn harms_nobody(fault: &Fault) {
    each(|engine, pool| {
        for every in [1, 3] {
            let before = fault.failed();
            assert_eq!(broken(engine, pool, fault, every), 0);
            assert!(fault.failed() > before, "no fault");
        }
    });
}

#[test]
fn rows_that_cannot_be_taken_out_of_caches_leave_later() {
    harms_nobody(&CUT);
}

#[test]
fn rows_whose_caches_cannot_be_joined_stay_apart() {
    harms_nobody(&JOIN);
}

#[test]
fn whatever_fails_answers_are_right_or_there_is_none() {
    let mut broke = 0;
    each(|engine, pool| {
        for every in [17, 61, 211] {
            let before = ANY.failed();
            broke += broken(engine, pool, &ANY, every);
            assert!(ANY.failed() > before, "no fault");
        }
    });
    assert!(broke > 0, "nothing that failed was needed");
}
