//! Random damage to small models: an error at most, never a panic.

use std::sync::Arc;

use mlxhost::checkpoint::Checkpoint;
use mlxhost::model::Model;
use mlxhost_tests::cases::Copy;
use mlxhost_tests::engine_lock;
use proptest::prelude::*;
use serde_json::{Value, json};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";

/// Opens and loads in this process: whatever comes of it, it is no panic.
fn load(model: &Copy) {
    let _lock = engine_lock();
    mlxhost::backend::install();
    if let Err(error) = Checkpoint::open(model.path())
        .and_then(|checkpoint| Model::load(Arc::new(checkpoint), None).map(drop))
    {
        let text = error.to_string();
        assert!(text.lines().count() <= 3, "{text}");
        assert!(text.contains(model.arg()), "{text}");
    }
}

/// Where in a file damage is done, as a share of the part of it that matters.
fn damage(bytes: &mut Vec<u8>, part: usize, flips: &[(f64, u8)], cut: Option<f64>) {
    let part = part.min(bytes.len());
    for (at, value) in flips {
        bytes[((part - 1) as f64 * at) as usize] ^= value;
    }
    if let Some(at) = cut {
        bytes.truncate((bytes.len() as f64 * at) as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_makes_loading_panic(
        base in prop::sample::select(vec!["llama-f32", "qwen3-4bit-g32-f32", "qwen3_5-4bit-g64-f32"]),
        file in prop::sample::select(vec![CONFIG, INDEX, WEIGHTS]),
        flips in prop::collection::vec((0.0..1.0f64, 1..=255u8), 1..4),
        cut in prop::option::weighted(0.2, 0.0..1.0f64),
    ) {
        let model = Copy::of(base);
        if file == WEIGHTS {
            // Without the index, which would hide a damaged name.
            model.remove(INDEX);
        }
        model.edit(file, |bytes| {
            let header = match file {
                WEIGHTS => bytes.first_chunk().map_or(0, |n| u64::from_le_bytes(*n) as usize + 8),
                _ => bytes.len(),
            };
            damage(bytes, header, &flips, cut);
        });
        load(&model);
    }

    #[test]
    fn no_number_in_a_config_makes_loading_panic(
        base in prop::sample::select(vec!["llama-f32", "qwen3_5-f32", "qwen3-4bit-g32-f32", "qwen3_5-moe-1layer-f32", "gemma4-moe-1layer-f32"]),
        pick in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(-1), json!(0), json!(1), json!(3), json!(7), json!(63), json!(65), json!(1e300), json!(-0.5),
            json!(i32::MAX), json!(i64::MAX), json!(u64::MAX), json!(null), json!(""), json!("default"),
            json!([]), json!({}), json!(true), json!([1, 2, 3]), json!(["full_attention"]),
        ]),
    ) {
        let model = Copy::of(base);
        let config = mlxhost_tests::json(&model.path().join(CONFIG));
        let pointers = pointers(&config, "");
        model.set(CONFIG, pick.get::<String>(&pointers), value);
        load(&model);
    }
}

/// The JSON pointers of all keys below `value`.
fn pointers(value: &Value, prefix: &str) -> Vec<String> {
    let keys = value.as_object().into_iter().flatten();
    keys.flat_map(|(key, value)| {
        let here = format!("{prefix}/{key}");
        let below = pointers(value, &here);
        [here].into_iter().chain(below)
    })
    .collect()
}
