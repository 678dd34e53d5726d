//! Block drafters against what other implementations drafted, in every packaging there is.

use std::path::{Path, PathBuf};

use mlxhost::engine::{Engine, Request};
use serde_json::{Value, json};

use mlxhost_tests::cases::Copy;
use mlxhost_tests::decoding::{Reply, ask, drafter, engine, request};
use mlxhost_tests::{checkpoint, engine_lock, fixture, ids, json};

fn golden(name: &str) -> Value {
    json(&fixture(&format!("oracle/goldens/{name}/golden.json")))
}

/// A checkpoint that a golden names. One of its targets has a twin here in another layout.
fn named(golden: &Value, key: &str) -> PathBuf {
    let path = golden[key].as_str().expect(key);
    let name = path.trim_start_matches("ckpt/");
    checkpoint(&name.replace("gemma4-31b-text", "gemma4-31b"))
}

fn at_depth(prompt: &[i32], max_tokens: usize, depth: usize) -> Request {
    Request {
        depth: Some(depth as u32),
        ..request(prompt, max_tokens)
    }
}

/// A peer's rounds: what it drafted, and how much of that was kept.
fn rounds(run: &Value) -> Vec<(Vec<i32>, usize)> {
    let kept = run.get("accepted").or(run.get("accept_lens"));
    let kept = kept.and_then(Value::as_array).expect("accepted lengths");
    let rounds = run["rounds"].as_array().expect("rounds").iter().zip(kept);
    rounds
        .map(|(round, kept)| {
            let draft = match &round["draft"][0] {
                Value::Array(_) => ids(&round["draft"][0]),
                _ => ids(&round["draft"]),
            };
            (draft, kept.as_f64().expect("a length") as usize)
        })
        .collect()
}

/// How the block of a draft that is shorter than asked for came to be.
#[derive(Clone, Copy, PartialEq)]
enum Short {
    /// The block itself was shorter.
    Block,
    /// The draft was cut.
    Draft,
}

/// Rounds of shorter blocks that are tried, each from where the peer stood.
const SHORT_ROUNDS: usize = 6;

/// Every round of a run, at a depth that the peer may have gone below.
fn drafts_as(engine: &Engine, run: &Value, depth: usize, short: Short) {
    let (prompt, tokens) = (ids(&run["prompt"]), ids(&run["tokens"]));
    let reply = ask(engine, &at_depth(&prompt, tokens.len() + depth + 1, depth));
    assert_eq!(reply.tokens[..tokens.len()], tokens);
    let mut ours = reply.stats.rounds.iter();
    let (mut done, mut ours_done, mut tried) = (0, 0, 0);
    for (index, (draft, kept)) in rounds(run).into_iter().enumerate() {
        let whole = short == Short::Draft || draft.len() == depth;
        if whole && ours_done == done {
            let round = ours.next().expect("a round");
            assert_eq!(round.drafted[..draft.len()], draft, "round {index}");
            assert_eq!(round.accepted.min(draft.len()), kept, "round {index}");
            ours_done += round.accepted + 1;
        } else if tried < SHORT_ROUNDS {
            tried += 1;
            let before = [&prompt[..], &tokens[..done]].concat();
            let reply = ask(engine, &at_depth(&before, draft.len() + 2, draft.len()));
            let round = &reply.stats.rounds[0];
            assert_eq!(round.drafted, draft, "round {index}");
            assert_eq!(round.accepted, kept, "round {index}");
        }
        done += kept + 1;
        // Where ours went further, they may meet again.
        while ours_done < done
            && let Some(round) = ours.next()
        {
            ours_done += round.accepted + 1;
        }
    }
}

#[test]
fn dflash_drafts_like_its_authors() {
    let _lock = engine_lock();
    let golden = golden("spec-torch-dflash-qwen3");
    let source = drafter("dflash", Some(&named(&golden, "drafter")), &[]);
    let engine = engine(&named(&golden, "target"), Some(source));
    for run in ["A", "C"] {
        drafts_as(&engine, &golden["runs"][run], 5, Short::Block);
    }
}

#[test]
fn dflash_on_a_hybrid_target_drafts_like_mlx_vlm() {
    let _lock = engine_lock();
    let golden = golden("spec-vlm-dflash-qwen3_5");
    let source = drafter("dflash", Some(&named(&golden, "drafter")), &[]);
    let engine = engine(&named(&golden, "target"), Some(source));
    for run in ["A", "C"] {
        drafts_as(&engine, &golden["runs"][run], 5, Short::Block);
    }
}

/// A copy of a checkpoint with some keys of its config changed.
fn changed(checkpoint: &str, keys: &Value) -> Copy {
    let copy = Copy::of(checkpoint);
    for (key, value) in keys.as_object().expect("keys") {
        copy.set("config.json", &format!("/{key}"), value.clone());
    }
    copy
}

#[test]
fn dflash_with_sliding_layers_and_on_gemma4_drafts_like_its_authors() {
    let _lock = engine_lock();
    let variants = golden("spec-torch-dflash-variants");
    let run = &golden("spec-torch-dflash-qwen3")["runs"]["A"];
    let (prompt, tokens) = (ids(&run["prompt"]), ids(&run["tokens"]));
    for (name, case) in variants["cases"].as_object().expect("cases") {
        let copy = changed("dflash-qwen3-f32", &case["config"]);
        let source = drafter("dflash", Some(copy.path()), &[]);
        let engine = engine(&named(case, "target"), Some(source));
        let mut done = 0;
        let drafts = case["drafts"].as_array().expect("drafts").iter();
        for (draft, (_, kept)) in drafts.zip(rounds(run)) {
            let before = [&prompt[..], &tokens[..done]].concat();
            let reply = ask(&engine, &at_depth(&before, 7, 5));
            assert_eq!(reply.stats.rounds[0].drafted, ids(draft), "{name} {done}");
            done += kept + 1;
        }
    }
}

/// The drafter of a golden in some form, on its target.
fn form(golden: &Value, plugin: &str, path: &Path, options: &[(&str, &str)]) -> Engine {
    let source = drafter(plugin, Some(path), options);
    engine(&named(golden, "target"), Some(source))
}

#[test]
fn deepspec_drafts_like_its_authors() {
    let _lock = engine_lock();
    for name in ["spec-torch-dspark-qwen3", "spec-torch-dspark-gemma4-31b"] {
        let golden = golden(name);
        let path = named(&golden, "drafter");
        let whole = form(&golden, "deepspec", &path, &[]);
        for run in ["A", "C"] {
            drafts_as(&whole, &golden["runs"][run], 4, Short::Draft);
        }
        let sure = form(&golden, "deepspec", &path, &[("min_confidence", "0.5")]);
        let run = &golden["runs"]["A_conf0.5"];
        drafts_as(&sure, run, 4, Short::Draft);
        // Exactly as long, where the peer's own limit was far.
        let prompt = ids(&run["prompt"]);
        let reply = ask(&sure, &at_depth(&prompt, 60, 4));
        let theirs = rounds(run);
        let most = theirs.len() - 4;
        for ((draft, _), ours) in theirs.iter().zip(&reply.stats.rounds).take(most) {
            assert_eq!(*draft, ours.drafted, "{name}");
        }
        // Some drafts ended at once, and a round without one is a plain step.
        let strict = form(&golden, "deepspec", &path, &[("min_confidence", "1")]);
        let reply = ask(&strict, &at_depth(&prompt, 20, 4));
        assert_eq!(reply.stats.drafted_tokens(), 0);
        assert_eq!(reply.tokens, ids(&run["tokens"])[..20]);
        assert_eq!(reply.stats.drafter.as_deref(), Some("deepspec"));
    }
}

/// Rounds of a drafter in some form, which must be those of the whole golden.
fn like_the_golden(golden: &Value, plugin: &str, path: &Path) {
    let engine = form(golden, plugin, path, &[]);
    drafts_as(&engine, &golden["runs"]["A"], 4, Short::Draft);
}

#[test]
fn dspark_snapshots_draft_alike_under_both_stamps() {
    let _lock = engine_lock();
    let golden = golden("spec-bun-dspark-gemma4");
    let engine = form(&golden, "dflash", &named(&golden, "drafter"), &[]);
    for run in ["A", "C"] {
        drafts_as(&engine, &golden["runs"][run], 4, Short::Draft);
    }
    drop(engine);
    let copy = Copy::of("dspark-bun-gemma4-f32");
    copy.set("dspark.json", "/variant", json!("dflash"));
    like_the_golden(&golden, "dflash", copy.path());
}

/// The first round's draft with each of these thresholds.
fn first_drafts(golden: &Value, copy: &Copy, options: &[(&str, &str)]) -> Reply {
    let engine = form(golden, "dflash", copy.path(), options);
    let prompt = ids(&golden["runs"]["A"]["prompt"]);
    ask(&engine, &at_depth(&prompt, 8, 4))
}

#[test]
fn thresholds_that_a_snapshot_was_calibrated_to_end_its_drafts() {
    let _lock = engine_lock();
    let golden = golden("spec-bun-dspark-gemma4");
    let round = &golden["runs"]["A"]["rounds"][0];
    let sure: Vec<f64> = (round["confidence"].as_array().expect("confidences").iter())
        .map(|x| x.as_f64().expect("a confidence"))
        .collect();
    for end in 0..4 {
        let list: Vec<f64> = (0..4)
            .map(|column| sure[column] + if column == end { 0.01 } else { -0.01 })
            .collect();
        let copy = Copy::of("dspark-bun-gemma4-f32");
        copy.set("dspark.json", "/config/sts", json!({ "thresholds": list }));
        let reply = first_drafts(&golden, &copy, &[]);
        assert_eq!(reply.stats.rounds[0].drafted, ids(&round["draft"])[..end]);
        // What the user says goes before.
        let reply = first_drafts(&golden, &copy, &[("min_confidence", "0")]);
        assert_eq!(reply.stats.rounds[0].drafted, ids(&round["draft"]));
    }
}

/// The tensors of a checkpoint's only file, changed.
fn with_tensors(copy: &Copy, change: impl FnOnce(&mut mlxhost_tests::tensors::Tensors)) {
    let path = copy.path().join("model.safetensors");
    let mut tensors = mlxhost_tests::tensors::read(&path);
    change(&mut tensors);
    mlxhost_tests::tensors::write(&tensors, &path);
}

/// Rows of each head that a rotation of halves pairs, as one of neighbours has them.
fn interleave(tensors: &mut mlxhost_tests::tensors::Tensors) {
    for (name, tensor) in tensors {
        let turned = ["q_proj", "k_proj", "q_norm", "k_norm"];
        if !turned.iter().any(|part| name.contains(part)) {
            continue;
        }
        let (dim, rows) = (32, tensor.shape[0]);
        let width = tensor.values.len() / rows;
        let old = tensor.values.clone();
        for row in 0..rows {
            let (head, at) = (row / dim * dim, row % dim);
            let from = head
                + if at % 2 == 0 {
                    at / 2
                } else {
                    dim / 2 + at / 2
                };
            tensor.values[row * width..][..width].copy_from_slice(&old[from * width..][..width]);
        }
    }
}

#[test]
fn other_packagings_of_dspark_draft_as_deepspecs_own() {
    let _lock = engine_lock();
    let golden = golden("spec-torch-dspark-qwen3");
    let own = [
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ];
    let config = json(&checkpoint("dspark-qwen3-f32").join("config.json"));

    // A Qwen3 config with a section of its own, and neighbours that turn.
    let copy = Copy::of("dspark-qwen3-f32");
    let mut section = json!({"projector_type": "dspark"});
    for key in own {
        section[key] = config[key].clone();
        copy.set("config.json", &format!("/{key}"), Value::Null);
    }
    copy.set("config.json", "/architectures", json!(["Qwen3ForCausalLM"]));
    copy.set("config.json", "/dflash_config", section);
    copy.set("config.json", "/rope_is_neox_style", json!(false));
    with_tensors(&copy, interleave);
    like_the_golden(&golden, "deepspec", copy.path());

    // With the embedding and the head of the target, from which its own were trained.
    with_tensors(&copy, |tensors| {
        tensors.remove("embed_tokens.weight");
        tensors.remove("lm_head.weight");
    });
    let run = &golden["runs"]["A"];
    let engine = form(&golden, "deepspec", copy.path(), &[]);
    let reply = ask(&engine, &at_depth(&ids(&run["prompt"]), 48, 4));
    assert_eq!(reply.tokens, ids(&run["tokens"]));
    assert!(reply.stats.accepted_tokens() > 10);
    drop(engine);

    // vLLM's speculators: the layers in a section, taps under another name.
    let copy = Copy::of("dspark-qwen3-f32");
    let mut outer = json!({
        "speculators_model_type": "dspark",
        "transformer_layer_config": config,
        "aux_hidden_state_layer_ids": config["target_layer_ids"],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
    });
    for key in own.iter().filter(|key| **key != "target_layer_ids") {
        outer[*key] = config[*key].clone();
    }
    copy.write("config.json", outer.to_string());
    like_the_golden(&golden, "deepspec", copy.path());
}

#[test]
fn a_draft_vocabulary_of_its_own_leads_to_the_targets_ids() {
    let _lock = engine_lock();
    let golden = golden("spec-torch-dspark-qwen3");
    // Every third token is left out, none of those that the golden drafts.
    let drafted: Vec<i32> = rounds(&golden["runs"]["A"])
        .into_iter()
        .flat_map(|(draft, _)| draft)
        .collect();
    let kept: Vec<usize> = (0..320)
        .filter(|id| id % 3 != 0 || drafted.contains(&(*id as i32)))
        .collect();
    let copy = Copy::of("dspark-qwen3-f32");
    copy.set("config.json", "/draft_vocab_size", json!(kept.len()));
    with_tensors(&copy, |tensors| {
        for name in ["lm_head.weight", "markov_head.markov_w2.weight"] {
            let tensor = tensors.get_mut(name).expect(name);
            let width = tensor.shape[1];
            let rows = kept
                .iter()
                .map(|id| tensor.values[id * width..][..width].to_vec());
            tensor.values = rows.collect::<Vec<_>>().concat();
            tensor.shape[0] = kept.len();
        }
    });
    let d2t: Vec<i32> = (0..).zip(&kept).map(|(at, id)| *id as i32 - at).collect();
    mlxhost_tests::tensors::add_ints(&copy.path().join("model.safetensors"), "d2t", &d2t);
    like_the_golden(&golden, "deepspec", copy.path());
}
