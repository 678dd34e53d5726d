//! Mixtures of experts in the layouts that checkpoints have them in.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use mlxhost_tests::cases::{Copy, assert_refused};
use mlxhost_tests::tensors::{self, Tensor, Tensors, bytes_of, difference};
use mlxhost_tests::{checkpoint, eval, fixture, generate, ids, plugin, run, text};

const QWEN: &str = "qwen3_5-moe-1layer-f32";
const GEMMA: &str = "gemma4-moe-1layer-f32";
const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

fn prompt(name: &str) -> Vec<i32> {
    let golden = fixture(&format!("oracle/goldens/target-{name}/golden.json"));
    ids(&mlxhost_tests::json(&golden)["cases"]["A"]["prompt"])
}

fn logits(model: &Path, name: &str) -> Tensor {
    eval(model, &prompt(name), "")["logits"].clone()
}

/// Logits of a checkpoint with other tensors, and how far they are from those of the fixture.
fn distance(name: &str, tensors: &Tensors) -> f32 {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    tensors::write_checkpoint(&checkpoint(name), tensors, &model);
    difference(&logits(&model, name), &logits(&checkpoint(name), name))
}

/// Takes the stacked matrices of a layer's experts out: gate, up and down.
fn take_stacks(tensors: &mut Tensors, prefix: &str) -> [Tensor; 3] {
    ["gate_proj", "up_proj", "down_proj"].map(|part| {
        let name = format!("{prefix}.{part}.weight");
        tensors.remove(&name).expect(&name)
    })
}

/// Gate and up of each expert below each other.
fn fused(gate: &Tensor, up: &Tensor) -> Tensor {
    let [count, inner, hidden] = gate.shape[..] else {
        panic!("{:?}", gate.shape)
    };
    let experts = gate.values.chunks(inner * hidden);
    let pairs = experts.zip(up.values.chunks(inner * hidden));
    Tensor {
        shape: vec![count, 2 * inner, hidden],
        values: pairs.flat_map(|(gate, up)| [gate, up].concat()).collect(),
    }
}

/// The tensors with each layer's experts as they are published, under `experts`.
fn with_fused_experts(mut tensors: Tensors, switch: &str) -> Tensors {
    let suffix = format!("{switch}.gate_proj.weight");
    let found: Vec<String> = tensors
        .keys()
        .filter_map(|name| name.strip_suffix(&suffix).map(str::to_owned))
        .collect();
    assert!(!found.is_empty());
    for parent in found {
        let [gate, up, down] = take_stacks(&mut tensors, &format!("{parent}{switch}"));
        tensors.insert(format!("{parent}experts.gate_up_proj"), fused(&gate, &up));
        tensors.insert(format!("{parent}experts.down_proj"), down);
    }
    tensors
}

fn renamed(tensors: Tensors, from: &str, to: &str) -> Tensors {
    let renamed = tensors.into_iter().map(|(name, tensor)| {
        let rest = name.strip_prefix(from).map(|rest| format!("{to}{rest}"));
        (rest.unwrap_or(name), tensor)
    });
    renamed.collect()
}

/// A Qwen checkpoint as it is published.
fn published(tensors: Tensors) -> Tensors {
    let tensors = with_fused_experts(tensors, "switch_mlp");
    let mut tensors = renamed(tensors, "language_model.model.", "model.language_model.");
    for (name, tensor) in &mut tensors {
        if name.ends_with("conv1d.weight") {
            tensor.shape.swap(1, 2);
        } else if tensor.shape.len() == 1
            && name.ends_with("norm.weight")
            && !name.contains("linear_attn")
        {
            tensor.values.iter_mut().for_each(|x| *x -= 1.0);
        }
    }
    tensors
}

fn fixture_tensors(name: &str) -> Tensors {
    tensors::read(&checkpoint(name).join(WEIGHTS))
}

#[test]
fn qwen_experts_as_published_are_the_converted_ones() {
    // Norms lose a bit on their way.
    let distance = distance(QWEN, &published(fixture_tensors(QWEN)));
    assert!(distance < 2e-5, "{distance}");
}

#[test]
fn gemma_experts_as_published_are_the_converted_ones() {
    let tensors = with_fused_experts(fixture_tensors(GEMMA), "switch_glu");
    // The parent of the switch is called as the published ones are.
    let tensors: Tensors = tensors
        .into_iter()
        .map(|(name, tensor)| (name.replace("experts.experts.", "experts."), tensor))
        .collect();
    let tensors = renamed(tensors, "language_model.model.", "model.language_model.");
    assert_eq!(distance(GEMMA, &tensors), 0.0);
}

#[test]
fn a_block_per_expert_is_the_same_as_a_stack() {
    let mut tensors = fixture_tensors(QWEN);
    let mlp = "language_model.model.layers.0.mlp";
    let stacks = take_stacks(&mut tensors, &format!("{mlp}.switch_mlp"));
    for (part, stack) in ["gate_proj", "up_proj", "down_proj"].iter().zip(stacks) {
        let size = stack.shape[1] * stack.shape[2];
        for (expert, values) in stack.values.chunks(size).enumerate() {
            let tensor = Tensor {
                shape: stack.shape[1..].to_vec(),
                values: values.to_vec(),
            };
            tensors.insert(format!("{mlp}.experts.{expert}.{part}.weight"), tensor);
        }
    }
    assert_eq!(distance(QWEN, &tensors), 0.0);
    tensors.remove(&format!("{mlp}.experts.3.up_proj.weight"));
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    tensors::write_checkpoint(&checkpoint(QWEN), &tensors, &model);
    let args = [
        "--model",
        text(&model),
        "--prompt-tokens",
        "1",
        "--no-draft",
    ];
    assert_refused(&run(&args), 2, &["mlp.experts.3.up_proj.weight"]);
}

/// Packed words, scales and biases of the last axis in groups, and the numbers that these stand for.
fn quantize(tensor: &Tensor, bits: u32, group: usize) -> (Vec<u32>, [Vec<f32>; 2], Vec<f32>) {
    let most = ((1u32 << bits) - 1) as f32;
    let (mut words, mut scales, mut biases, mut values) = (vec![], vec![], vec![], vec![]);
    for group in tensor.values.chunks(group) {
        let low = group.iter().copied().fold(f32::INFINITY, f32::min);
        let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = ((high - low) / most).max(1e-8);
        let packed: Vec<u32> = group
            .iter()
            .map(|x| ((x - low) / scale).round().clamp(0.0, most) as u32)
            .collect();
        values.extend(packed.iter().map(|&q| scale * q as f32 + low));
        for word in packed.chunks((32 / bits) as usize) {
            let shifted = word.iter().zip(0..).map(|(q, at)| q << (at * bits));
            words.push(shifted.fold(0, |word, q| word | q));
        }
        scales.push(scale);
        biases.push(low);
    }
    (words, [scales, biases], values)
}

/// Experts of 4 bits, their router of 8, as MLX's converters do it.
fn quantized_experts_are_what_they_stand_for(name: &str) {
    let tensors = fixture_tensors(name);
    let mut decoded = tensors.clone();
    let mut packed: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut count = 0;
    for (name, tensor) in &tensors {
        let stacked = tensor.shape.len() == 3 && !name.contains("conv1d");
        let router = ["mlp.gate.", "shared_expert_gate.", "router.proj."];
        let (bits, group) = match router.iter().any(|router| name.contains(router)) {
            true => (8, 64),
            false => (4, 32),
        };
        if !stacked && bits == 4 {
            let bytes = bytes_of(&tensor.values);
            packed.insert(name.clone(), (Dtype::F32, tensor.shape.clone(), bytes));
            continue;
        }
        count += 1;
        let (words, scales, values) = quantize(tensor, bits, group);
        decoded.get_mut(name).unwrap().values = values;
        let (leading, inputs) = (tensor.shape.len() - 1, tensor.shape[tensor.shape.len() - 1]);
        let shape = |width: usize| [&tensor.shape[..leading], &[width]].concat();
        let words = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let width = inputs * bits as usize / 32;
        packed.insert(name.clone(), (Dtype::U32, shape(width), words));
        let module = name.strip_suffix("weight").expect("a weight");
        for (leaf, values) in ["scales", "biases"].iter().zip(scales) {
            let entry = (Dtype::F32, shape(inputs / group), bytes_of(&values));
            packed.insert(format!("{module}{leaf}"), entry);
        }
    }
    assert!(count >= 4);
    let dir = tempfile::tempdir().unwrap();
    let (dense, model) = (dir.path().join("dense"), dir.path().join("packed"));
    tensors::write_checkpoint(&checkpoint(name), &decoded, &dense);
    tensors::write_checkpoint(&checkpoint(name), &decoded, &model);
    let views = packed.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &model.join(WEIGHTS)).unwrap();
    let expected = logits(&dense, name);
    let distance = difference(&logits(&model, name), &expected);
    assert!(distance < 2e-4, "{name}: {distance}");
    // Else the comparison would say little.
    let moved = difference(&logits(&checkpoint(name), name), &expected);
    assert!(
        moved > 2e-3,
        "{name}: quantization changes nothing: {moved}"
    );
}

#[test]
fn quantized_qwen_experts_are_what_they_stand_for() {
    quantized_experts_are_what_they_stand_for(QWEN);
}

#[test]
fn quantized_gemma_experts_are_what_they_stand_for() {
    quantized_experts_are_what_they_stand_for(GEMMA);
}

/// The tensors of a prediction head whose block is that of the target's layer.
fn head_with_experts() -> Tensors {
    let mut head = tensors::read(&checkpoint("qwen3_5_mtp-f32").join(WEIGHTS));
    head.retain(|name, _| !name.contains(".mlp."));
    let block = "language_model.model.layers.0.mlp.";
    for (name, tensor) in fixture_tensors(QWEN) {
        if let Some(leaf) = name.strip_prefix(block) {
            head.insert(format!("layers.0.mlp.{leaf}"), tensor);
        }
    }
    head
}

#[test]
fn a_prediction_head_with_experts_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let head = dir.path().join("head");
    tensors::write_checkpoint(&checkpoint(QWEN), &head_with_experts(), &head);
    let config = mlxhost_tests::json(&checkpoint(QWEN).join(CONFIG));
    let config = json!({
        "model_type": "qwen3_5_mtp", "block_size": 3, "text_config": config["text_config"],
    });
    std::fs::write(head.join(CONFIG), config.to_string()).unwrap();
    let (plugin, prompt) = (plugin("qwen_mtp"), prompt(QWEN));
    let plain = generate(&checkpoint(QWEN), &prompt, 24, &["--no-draft"]);
    let drafting = ["--plugin", text(&plugin), "--depth", "3"];
    let named = [&drafting[..], &["--drafter", text(&head)]].concat();
    let split = generate(&checkpoint(QWEN), &prompt, 24, &named);
    assert_eq!(split["drafter"], "qwen_mtp");
    assert_eq!(split["tokens"], plain["tokens"]);

    // The same head inside the checkpoint, as published.
    let mut whole = fixture_tensors(QWEN);
    for (name, tensor) in head_with_experts() {
        whole.insert(format!("mtp.{name}"), tensor);
    }
    let mut whole = published(whole);
    for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
        let norm = whole.get_mut(&format!("mtp.{norm}.weight")).unwrap();
        norm.values.iter_mut().for_each(|x| *x -= 1.0);
    }
    let model = dir.path().join("model");
    tensors::write_checkpoint(&checkpoint(QWEN), &whole, &model);
    let inside = generate(&model, &prompt, 24, &drafting);
    assert_eq!(inside["drafter"], "qwen_mtp");
    assert_eq!(inside["tokens"], plain["tokens"]);
    assert_eq!(inside["rounds"], split["rounds"]);
}

/// Sizes that make no sense, and switches that change what is computed.
#[test]
fn a_config_of_experts_that_makes_no_sense_is_located() {
    let counts = |value: Value| {
        [
            json!(0),
            json!(-1),
            json!(7),
            json!(1 << 26),
            json!(1_u64 << 40),
            value,
        ]
    };
    let null = Value::Null;
    for (name, key, values) in [
        (QWEN, "num_experts", &counts(null.clone())[..]),
        (
            QWEN,
            "num_experts_per_tok",
            &[json!(0), json!(9), null.clone()],
        ),
        (QWEN, "moe_intermediate_size", &counts(null.clone())),
        (
            QWEN,
            "shared_expert_intermediate_size",
            &counts(null.clone()),
        ),
        (QWEN, "norm_topk_prob", &[json!(false), json!(1)]),
        (QWEN, "decoder_sparse_step", &[json!(2), json!("1")]),
        (QWEN, "mlp_only_layers", &[json!([0]), json!({})]),
        (QWEN, "hidden_act", &[json!("gelu")]),
        (GEMMA, "num_experts", &counts(null.clone())),
        (GEMMA, "top_k_experts", &[json!(0), json!(6), null.clone()]),
        (GEMMA, "moe_intermediate_size", &counts(null)),
        (GEMMA, "enable_moe_block", &[json!(3)]),
    ] {
        for value in values {
            let model = Copy::of(name);
            model.set(CONFIG, &format!("/text_config/{key}"), value.clone());
            let args = ["--model", model.arg(), "--prompt-tokens", "1", "--no-draft"];
            let output = run(&args);
            println!("{key} {value}: {}", String::from_utf8_lossy(&output.stderr));
            assert_refused(&output, 2, &[model.arg()]);
        }
    }
}
