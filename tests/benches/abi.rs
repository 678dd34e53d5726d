//! What the boundary costs: one op call, and decoding through a plugin against the same drafter
//! linked into the program.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use mlxhost::backend;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::engine::{Costs, DraftWith, Event, Group, Method, Request};
use mlxhost::model::{Model, TargetHandle};
use mlxhost::plugin::{Drafter, DrafterSource, Library, PluginFile};
use mlxhost_tests::{checkpoint, plugin};
use plugin_api::abi::RawTensor;
use plugin_api::export::Tables;

/// An op of the table that does nothing, so that what is measured is the call.
fn op_call(c: &mut Criterion) {
    let api = backend::api();
    c.bench_function("op call across the ABI", |b| {
        b.iter(|| std::hint::black_box(api).drop_tensor()(std::hint::black_box(RawTensor::NULL)));
    });
}

/// One answer of 48 tokens, from prompt to end.
fn decode(target: &Rc<TargetHandle>, drafter: &Rc<Drafter>) -> Duration {
    let (events, inbox) = mpsc::channel();
    let request = Request {
        prompt: (10..34).collect(),
        sampling: plugin_api::sampling::Sampling::default(),
        max_tokens: 48,
        stop_ids: Vec::new(),
        stop: Vec::new(),
        draft_with: DraftWith::Default,
        depth: Some(3),
        deadline: None,
    };
    let requests = vec![(request, events, Arc::new(AtomicBool::new(false)))];
    let started = Instant::now();
    let method = Rc::new(Method::new(Some(drafter.clone()), Costs::load(None)));
    Group::serve(target.clone(), method, None, requests);
    let took = started.elapsed();
    let done = inbox.iter().any(|event| matches!(event, Event::Done(_)));
    assert!(done, "the answer is complete");
    took
}

/// Pairs in turn, so that whatever else the machine does falls on both sides.
fn plugin_against_static(_: &mut Criterion) {
    backend::install();
    let open = |name: &str| Arc::new(Checkpoint::open(&checkpoint(name)).expect("a checkpoint"));
    let model = Model::load(open("qwen3_5-f32"), None).expect("a model");
    let head = checkpoint("qwen3_5_mtp-f32");
    let file = PluginFile::read(&plugin("qwen_mtp")).expect("a plugin");
    let source = DrafterSource {
        library: Library::load(&file).expect("a library"),
        checkpoint: Some(head.clone()),
        options: Vec::new(),
    };
    let loaded = Drafter::load(&source, &model).expect("a drafter");
    let module = Tables::<qwen_mtp::QwenMtp>::module();
    let linked =
        Drafter::from_module(module, "static", Some(&head), &model).expect("a static drafter");
    let target = Rc::new(TargetHandle::new(Rc::new(model)));
    let mut ratios: Vec<f64> = (0..60)
        .map(|_| {
            let plain = decode(&target, &linked).as_secs_f64();
            decode(&target, &loaded).as_secs_f64() / plain
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| ratios[(share * (ratios.len() - 1) as f64) as usize];
    println!(
        "plugin / static decode time, {} pairs: median {:.3}, quartiles {:.3} to {:.3}",
        ratios.len(),
        at(0.5),
        at(0.25),
        at(0.75)
    );
}

criterion_group!(benches, op_call, plugin_against_static);
criterion_main!(benches);
