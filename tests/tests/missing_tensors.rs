//! A drafter of whatever family that lacks one of its tensors is refused by name, before anything of it is read; one
//! that has more than it needs drafts as without.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::model::Model;
use mlxhost::plugin::{Drafter, DrafterSource};
use mlxhost::{LoadError, LoadErrorKind};
use mlxhost_tests::cases::{Copy, assert_refused, draft_with, stderr};
use mlxhost_tests::decoding::{PAIRS, Pair};
use mlxhost_tests::{checkpoint, engine_lock};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

const WEIGHTS: &str = "model.safetensors";

/// All pairs whose drafter has tensors.
fn pairs() -> impl Iterator<Item = Pair> {
    PAIRS.into_iter().filter(|pair| pair.head.is_some())
}

fn names(checkpoint: &Path) -> Vec<String> {
    let bytes = std::fs::read(checkpoint.join(WEIGHTS)).expect("tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    file.names().into_iter().map(str::to_owned).collect()
}

/// A copy without a list of its tensors beside them.
fn unlisted(head: &str) -> Copy {
    let copy = Copy::of(head);
    let index = "model.safetensors.index.json";
    if copy.path().join(index).exists() {
        copy.remove(index);
    }
    copy
}

/// Everything of a pair that loading a drafter needs.
struct Loader {
    source: DrafterSource,
    target: Model,
}

impl Loader {
    fn new(pair: &Pair) -> Self {
        mlxhost::backend::install();
        let (target, source) = pair.open();
        let target = Checkpoint::open(&target).expect("a target");
        let target = Model::load(Arc::new(target), None).expect("a model");
        Self { source, target }
    }

    fn load(&self, drafter: &Path) -> Result<(), LoadError> {
        let source = DrafterSource {
            checkpoint: Some(drafter.to_owned()),
            ..self.source.clone()
        };
        Drafter::load(&source, &self.target).map(drop)
    }
}

#[test]
fn every_tensor_that_is_missing_is_named() {
    let _lock = engine_lock();
    for pair in pairs() {
        let (loader, head) = (Loader::new(&pair), pair.head.expect("a head"));
        loader.load(&checkpoint(head)).expect("a drafter");
        let all = names(&checkpoint(head));
        assert!(all.len() > 10);
        for name in all {
            for copy in [Copy::of(head), unlisted(head)] {
                copy.keep_tensors(|other| other != name);
                let why = loader.load(copy.path());
                let why = why.expect_err(&format!("{head} is loaded without {name}"));
                assert!(matches!(why.kind(), LoadErrorKind::Malformed(_)), "{why:?}");
                let why = why.to_string();
                assert!(
                    why.contains(copy.arg()) && why.contains(&name),
                    "{name}: {why}"
                );
            }
        }
    }
}

/// An answer of the program with a pair, and this in place of its drafter.
fn answer(pair: &Pair, drafter: &Path) -> Output {
    let ask = ["--prompt-tokens", "1,2,3,1,2,3", "--max-tokens", "12"];
    let more = ["--depth", "3", "--ignore-eos", "--json"];
    let target = checkpoint(pair.target);
    draft_with(pair.plugin, &target, drafter, &[&ask[..], &more].concat())
}

/// One pair of every plugin.
fn families() -> Vec<Pair> {
    let mut families: Vec<Pair> = Vec::new();
    for pair in pairs() {
        if families.iter().all(|known| known.plugin != pair.plugin) {
            families.push(pair);
        }
    }
    assert_eq!(families.len(), 4);
    families
}

#[test]
fn the_program_refuses_what_is_not_whole() {
    for pair in families() {
        let head = pair.head.expect("a head");
        let last = names(&checkpoint(head)).into_iter().max().expect("a name");
        let copy = Copy::of(head);
        copy.keep_tensors(|name| name != last);
        let who = format!("plugin {}: ", pair.plugin);
        let says = [copy.arg(), &who, "missing tensors: ", &last];
        assert_refused(&answer(&pair, copy.path()), 2, &says);
    }
}

/// A copy of a drafter with one tensor more.
fn with_tensor(head: &str, name: &str) -> Copy {
    let copy = unlisted(head);
    let path = copy.path().join(WEIGHTS);
    let bytes = std::fs::read(&path).expect("tensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let more = TensorView::new(Dtype::F32, vec![2, 2], &[0; 16]).expect("a tensor");
    let all = file.tensors().into_iter().chain([(name.to_owned(), more)]);
    safetensors::serialize_to_file(all, None, &path).expect("a file");
    copy
}

#[test]
fn tensors_that_nobody_asks_for_are_passed_over() {
    for pair in families() {
        let head = pair.head.expect("a head");
        let of = |drafter: &Path| {
            let output = answer(&pair, drafter);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            let answer: Value = serde_json::from_slice(&output.stdout).expect("an answer");
            assert_eq!(answer["drafter"], pair.plugin);
            (answer["tokens"].clone(), answer["rounds"].clone())
        };
        let copy = with_tensor(head, "something.else.weight");
        assert_eq!(of(copy.path()), of(&checkpoint(head)), "{head}");
    }
}

#[test]
fn layers_that_the_config_does_not_speak_of_are_refused() {
    let _lock = engine_lock();
    for pair in pairs() {
        let (loader, head) = (Loader::new(&pair), pair.head.expect("a head"));
        // The last layer's number, and what comes before it.
        let all = names(&checkpoint(head));
        let number = |name: &String| -> Option<(String, u32)> {
            let (prefix, rest) = ["layers.", "bb."].into_iter().find_map(|part| {
                let at = name.find(part)? + part.len();
                Some(name.split_at(at))
            })?;
            Some((prefix.to_owned(), rest.split('.').next()?.parse().ok()?))
        };
        let last = all.iter().filter_map(number).max_by_key(|(_, n)| *n);
        let (prefix, last) = last.expect("a layer");
        let next = format!("{prefix}{}.", last + 1);
        let copy = with_tensor(head, &format!("{next}input_layernorm.weight"));
        let why = loader.load(copy.path()).expect_err("a refusal").to_string();
        let says = [copy.arg(), &next, &format!("speaks of {} layers", last + 1)];
        for said in says {
            assert!(why.contains(said), "{said}: {why}");
        }
    }
}
