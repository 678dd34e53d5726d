//! What a user reads when a block drafter is not for this target, or says what nobody here understands.

use std::path::Path;
use std::process::Output;

use mlxhost_tests::cases::{self, Copy, assert_plain, assert_refused, stderr};
use mlxhost_tests::checkpoint;
use mlxhost_tests::tensors;
use serde_json::{Value, json};

fn draft_with(name: &str, target: &str, drafter: &Path, more: &[&str]) -> Output {
    let prompt = ["--prompt-tokens", "1,2,3", "--max-tokens", "6"];
    let more = [&prompt[..], more].concat();
    cases::draft_with(name, &checkpoint(target), drafter, &more)
}

/// A changed key, to what, and what is said of it.
type Case = (&'static str, Value, &'static [&'static str]);

/// Every change to a drafter's config is refused, naming the drafter.
fn all_refused(plugin: &str, target: &str, drafter: &str, file: &str, cases: &[Case]) {
    for (pointer, value, says) in cases {
        let copy = Copy::of(drafter);
        copy.set(file, pointer, value.clone());
        let output = draft_with(plugin, target, copy.path(), &[]);
        let who = format!("plugin {plugin}");
        let says = [says, &[copy.arg(), who.as_str()][..]].concat();
        assert_refused(&output, 2, &says);
    }
}

#[test]
fn a_dflash_drafter_that_does_not_fit_is_refused_naming_both() {
    let target = checkpoint("qwen3-f32");
    let target = target.to_str().unwrap();
    let cases: &[Case] = &[
        ("/hidden_size", json!(96), &["hidden size 96", "has 64"]),
        (
            "/vocab_size",
            json!(512),
            &["vocabulary size 512", "has 320"],
        ),
        (
            "/num_target_layers",
            json!(9),
            &["target layers 9", "has 6"],
        ),
        // The last layer's output is seen after the final norm, if at all.
        (
            "/dflash_config/target_layer_ids",
            json!([1, 5]),
            &["target_layer_ids", "[1, 5]", "-1 to 4"],
        ),
        (
            "/dflash_config/target_layer_ids",
            json!([]),
            &["target_layer_ids"],
        ),
        (
            "/dflash_config/mask_token_id",
            json!(320),
            &["mask_token_id", "below 320"],
        ),
        (
            "/dflash_config/mask_token_id",
            Value::Null,
            &["mask_token_id"],
        ),
        ("/dflash_config", Value::Null, &["dflash_config", "missing"]),
        ("/block_size", Value::Null, &["block_size", "missing"]),
        ("/block_size", json!(1), &["block_size", "is 1"]),
        // Keys that would change what is computed.
        (
            "/dflash_config/attention_sinks",
            json!(4),
            &["attention_sinks", "no key of `dflash_config`"],
        ),
        (
            "/dflash_config/draft_window_size",
            json!(64),
            &["draft_window_size"],
        ),
        (
            "/dflash_config/swa_window_size",
            json!(64),
            &["swa_window_size", "64"],
        ),
        (
            "/layer_types/0",
            json!("sliding_attention"),
            &["sliding_window", "missing"],
        ),
        ("/rope_theta", Value::Null, &["rope_theta", "missing"]),
        ("/num_hidden_layers", json!(3), &["layer_types", "3 times"]),
        ("/hidden_act", json!("gelu"), &["hidden_act", "gelu"]),
    ];
    // A list is set as a whole.
    let (lists, keys): (Vec<Case>, Vec<Case>) = cases
        .iter()
        .cloned()
        .partition(|(pointer, ..)| pointer.ends_with("/0"));
    all_refused(
        "dflash",
        "qwen3-f32",
        "dflash-qwen3-f32",
        "config.json",
        &keys,
    );
    for (pointer, value, says) in lists {
        let copy = Copy::of("dflash-qwen3-f32");
        let list = pointer.trim_end_matches("/0");
        copy.set("config.json", list, json!([value, "full_attention"]));
        assert_refused(
            &draft_with("dflash", "qwen3-f32", copy.path(), &[]),
            2,
            says,
        );
    }
    // The pairing gate names the target.
    let copy = Copy::of("dflash-qwen3-f32");
    copy.set("config.json", "/num_target_layers", json!(9));
    let says = &[target, "made for this target"];
    assert_refused(
        &draft_with("dflash", "qwen3-f32", copy.path(), &[]),
        2,
        says,
    );
}

#[test]
fn the_same_shape_for_another_target_is_refused() {
    let drafter = checkpoint("dflash-qwen3_5-f32");
    let says = &["target layers 8", "has 6"];
    assert_refused(&draft_with("dflash", "qwen3-f32", &drafter, &[]), 2, says);
    let drafter = checkpoint("dspark-gemma4-31b-f32");
    let says = &["target layers 6", "has 8"];
    assert_refused(
        &draft_with("deepspec", "qwen3_5-f32", &drafter, &[]),
        2,
        says,
    );
    let drafter = checkpoint("dspark-bun-gemma4-f32");
    let says = &["output of layer 8", "has 6 layers"];
    assert_refused(&draft_with("dflash", "qwen3-f32", &drafter, &[]), 2, says);
}

#[test]
fn a_snapshot_that_is_not_understood_is_refused() {
    let cases: &[Case] = &[
        ("/variant", Value::Null, &["variant", "missing"]),
        ("/variant", json!("dmoon"), &["variant", "dmoon"]),
        ("/version", json!(2), &["version"]),
        ("/config/gamma", json!(0), &["gamma"]),
        ("/config/gamma", json!(100_000), &["gamma"]),
        ("/config/nHeads", json!(5), &["nHeads", "is 5"]),
        ("/config/tapLayers", json!([-1]), &["tapLayers"]),
        ("/config/tapLayers", Value::Null, &["tapLayers"]),
        ("/config/ffMult", json!(0.3), &["ffMult"]),
        ("/config/seqHead", json!("lstm"), &["seqHead", "lstm"]),
        (
            "/config/seqHead",
            json!("rnn"),
            &["missing tensors", "rnn.wH"],
        ),
        (
            "/config/sts",
            json!({"thresholds": [0.5]}),
            &["thresholds", "4 numbers"],
        ),
        ("/config/rope", json!(true), &["rope", "no key of `config`"]),
        (
            "/dims/hiddenSize",
            json!(96),
            &["target hidden size 96", "has 64"],
        ),
        ("/dims", Value::Null, &["dims"]),
        ("/config/nLayers", json!(3), &["missing tensors", "bb.2."]),
    ];
    let (target, drafter) = ("gemma4-f32", "dspark-bun-gemma4-f32");
    all_refused("dflash", target, drafter, "dspark.json", cases);
}

#[test]
fn a_dspark_drafter_that_does_not_fit_is_refused_naming_both() {
    let cases: &[Case] = &[
        (
            "/num_target_layers",
            json!(9),
            &["target layers 9", "has 6"],
        ),
        (
            "/vocab_size",
            json!(512),
            &["vocabulary size 512", "has 320"],
        ),
        ("/num_hidden_layers", json!(1), &["layer_types"]),
        (
            "/markov_head_type",
            json!("lstm"),
            &["markov_head_type", "lstm"],
        ),
        (
            "/markov_head_type",
            json!("gated"),
            &["missing tensors", "gate_proj"],
        ),
        ("/markov_rank", json!(0), &["confidence_head_with_markov"]),
        ("/block_size", json!(9999), &["block_size"]),
        (
            "/target_layer_ids",
            json!([5]),
            &["target_layer_ids", "[5]"],
        ),
        ("/mask_token_id", json!(-1), &["mask_token_id"]),
        (
            "/architectures",
            json!(["Qwen3DSparkModel2"]),
            &["no loaded plugin"],
        ),
        ("/draft_vocab_size", json!(100), &["missing tensors", "d2t"]),
        (
            "/dspark_bonus_anchor",
            json!(true),
            &["dspark_bonus_anchor"],
        ),
    ];
    for (pointer, value, says) in cases {
        let copy = Copy::of("dspark-qwen3-f32");
        copy.set("config.json", pointer, value.clone());
        let output = draft_with("deepspec", "qwen3-f32", copy.path(), &[]);
        assert_refused(&output, 2, &[says, &[copy.arg()][..]].concat());
    }
    // Layers that the config does not speak of.
    let copy = Copy::of("dspark-qwen3-f32");
    copy.set("config.json", "/num_hidden_layers", json!(1));
    copy.set("config.json", "/layer_types", json!(["full_attention"]));
    let says = &["tensors layers.1.*", "speaks of 1 layers"];
    assert_refused(
        &draft_with("deepspec", "qwen3-f32", copy.path(), &[]),
        2,
        says,
    );
}

/// A copy of a drafter without the tensors whose names contain a text.
fn without(drafter: &str, part: &str) -> Copy {
    let copy = Copy::of(drafter);
    copy.keep_tensors(|name| !name.contains(part));
    copy
}

#[test]
fn confidence_without_a_head_for_it_is_refused() {
    let sure = &["--min-confidence", "0.5"];
    let drafter = checkpoint("dflash-qwen3-f32");
    let says = &["plugin dflash", "no confidence head"];
    assert_refused(&draft_with("dflash", "qwen3-f32", &drafter, sure), 2, says);

    let copy = without("dspark-qwen3-f32", "confidence_head");
    let says = &["missing tensors", "confidence_head.proj.weight"];
    assert_refused(
        &draft_with("deepspec", "qwen3-f32", copy.path(), &[]),
        2,
        says,
    );
    copy.set("config.json", "/enable_confidence_head", json!(false));
    let says = &["plugin deepspec", "no confidence head"];
    assert_refused(
        &draft_with("deepspec", "qwen3-f32", copy.path(), sure),
        2,
        says,
    );
    // Without the wish it drafts.
    let output = draft_with("deepspec", "qwen3-f32", copy.path(), &[]);
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(0), String::new())
    );

    // Not a number that a confidence can be, and a drafter that knows of none.
    for wrong in ["1.5", "-0.1", "sure"] {
        let output = draft_with(
            "dflash",
            "qwen3-f32",
            &drafter,
            &["--min-confidence", wrong],
        );
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
    let head = checkpoint("qwen3_5_mtp-f32");
    let says = &["plugin qwen_mtp", "min_confidence"];
    assert_refused(&draft_with("qwen_mtp", "qwen3_5-f32", &head, sure), 2, says);
}

#[test]
fn weights_that_are_not_there_are_named() {
    for (drafter, plugin, target, part) in [
        (
            "dflash-qwen3-f32",
            "dflash",
            "qwen3-f32",
            "hidden_norm.weight",
        ),
        ("dspark-bun-gemma4-f32", "dflash", "gemma4-f32", "tok_proj"),
        (
            "dspark-qwen3-f32",
            "deepspec",
            "qwen3-f32",
            "markov_head.markov_w2.weight",
        ),
        (
            "dspark-gemma4-31b-f32",
            "deepspec",
            "gemma4-31b-f32",
            "layers.1.layer_scalar",
        ),
    ] {
        let copy = without(drafter, part);
        let output = draft_with(plugin, target, copy.path(), &[]);
        assert_refused(&output, 2, &[copy.arg(), "missing tensors", part]);
    }
}

#[test]
fn weights_of_another_shape_cost_only_the_drafts() {
    let warned = |plugin: &str, target: &str, copy: &Copy, says: &str| {
        let output = draft_with(plugin, target, copy.path(), &[]);
        let warning = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{warning}");
        assert_eq!(warning.lines().count(), 1, "{warning}");
        for said in ["without drafts", copy.arg(), says] {
            assert!(warning.contains(said), "no {said:?} in {warning}");
        }
        assert_plain(&warning);
    };
    let copy = Copy::of("dflash-qwen3-f32");
    copy.set("config.json", "/intermediate_size", json!(96));
    warned("dflash", "qwen3-f32", &copy, "layers.0.mlp");

    let copy = Copy::of("dspark-bun-gemma4-f32");
    copy.set("dspark.json", "/config/markovRank", json!(16));
    warned("dflash", "gemma4-f32", &copy, "w1");

    // Ids that lead outside the target's vocabulary.
    let copy = Copy::of("dspark-qwen3-f32");
    copy.set("config.json", "/draft_vocab_size", json!(4));
    let path = copy.path().join("model.safetensors");
    let mut all = tensors::read(&path);
    for name in ["lm_head.weight", "markov_head.markov_w2.weight"] {
        let tensor = all.get_mut(name).unwrap();
        tensor.values.truncate(4 * tensor.shape[1]);
        tensor.shape[0] = 4;
    }
    tensors::write(&all, &path);
    tensors::add_ints(&path, "d2t", &[0, 0, 0, 317]);
    warned("deepspec", "qwen3-f32", &copy, "the id 320");
}
