//! Checkpoints that follow exactly from stored ones. They are made when a test first needs them, and kept
//! beside what cargo builds.
//!
//! Each was once stored too, as its peer wrote it. Its digest stands for that: they are the same bit for bit.

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::tensors::{self, Tensor, Tensors, bytes_of};
use crate::{checkpoint, fixture, json, target_dir};

/// How a checkpoint comes about.
pub struct Recipe {
    pub name: &'static str,
    /// Of all tensors: names, types, shapes and bytes.
    digest: &'static str,
    make: fn(&Path),
}

/// All derived checkpoints.
pub const RECIPES: [Recipe; 6] = [
    Recipe {
        name: "gemma4-4bit-g32-f32",
        digest: "8458480b549d20af30dc3153cfbffef46e271341bf94fded060b8b5451905d91",
        make: |out| {
            let quantized = quantized("gemma4-f32", 32);
            write(&quantized, "mlx", out);
            configure("gemma4-f32", out, |config| {
                add_scheme(config, 32);
                config["eos_token_id"] = json!(257);
            });
        },
    },
    Recipe {
        name: "gemma4_assistant-f32",
        digest: "83b2f09eb0c108c666a1fa7d06a9f8784706c58b892374caaebd7786c15f4bbb",
        make: |out| {
            let ordered = f32_tensors("gemma4_assistant-ordered-f32");
            let plain = ordered.into_iter();
            let plain = plain.filter(|(name, _)| !name.starts_with("masked_embedding."));
            write(&stored(plain), "pt", out);
            configure("gemma4_assistant-ordered-f32", out, |config| {
                config["use_ordered_embeddings"] = json!(false);
            });
        },
    },
    Recipe {
        name: "qwen3-4bit-g32-f32",
        digest: "6363b964db89648c1b30f67187ee0d9412d1063e664cd5050fcef7d0de359ea3",
        make: |out| {
            write(&quantized("qwen3-f32", 32), "mlx", out);
            configure("qwen3-f32", out, |config| add_scheme(config, 32));
        },
    },
    Recipe {
        name: "qwen3_5-4bit-g64-f32",
        digest: "88dc38f37a847e1dde97042ec9d56c08d03f26e467ef94394a93cbf2a35dacc5",
        make: |out| {
            let mut text_only = quantized("qwen3_5-f32", 64);
            text_only.retain(|stored| !stored.name.starts_with("vision_tower."));
            write(&text_only, "mlx", out);
            configure("qwen3_5-f32", out, |config| {
                add_scheme(config, 64);
                let config = config.as_object_mut().expect("an object");
                config.remove("vision_config");
                let rope = &mut config["text_config"]["rope_parameters"];
                // The converter's older name of that key.
                rope["type"] = rope
                    .as_object_mut()
                    .expect("rope")
                    .remove("rope_type")
                    .expect("a type");
            });
        },
    },
    Recipe {
        name: "qwen3_5-hf-f32",
        digest: "20c354ecc24176d1276b0d397d5b141e34108b0143abb28bf681e98ce546c2a1",
        make: |out| {
            write_shards(&published(), 3, out);
            configure("qwen3_5-f32", out, |_| {});
        },
    },
    Recipe {
        name: "qwen3_5_mtp-4bit-g64-f32",
        digest: "a5f1f4d5d5f3b4920035b25f9100a6260c350f16b4339b7780b67cdb33aa7266",
        make: |out| {
            write(&quantized("qwen3_5_mtp-f32", 64), "mlx", out);
            configure("qwen3_5_mtp-f32", out, |config| add_scheme(config, 64));
        },
    },
];

/// The derived checkpoint of that name, if there is one.
pub fn find(name: &str) -> Option<PathBuf> {
    let recipe = RECIPES.iter().find(|recipe| recipe.name == name)?;
    let all = target_dir().join("derived");
    // What is there has this content, whoever made it.
    let place = all.join(format!("{name}-{}", &recipe.digest[..12]));
    if !place.is_dir() {
        std::fs::create_dir_all(&all).expect("a directory for derived checkpoints");
        let dir = tempfile::tempdir_in(&all).expect("a temporary directory");
        recipe.derive(dir.path());
        // Another test may have been faster.
        match std::fs::rename(dir.path(), &place) {
            Ok(()) => drop(dir.keep()),
            Err(e) => assert!(place.is_dir(), "{}: {e}", place.display()),
        }
    }
    Some(place)
}

impl Recipe {
    /// Makes it anew in the empty directory `out`.
    pub fn derive(&self, out: &Path) {
        (self.make)(out);
        let digest = digest(out);
        assert_eq!(digest, self.digest, "{} has changed", self.name);
    }
}

/// A tensor as it lies in a file.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn f32_tensors(name: &str) -> Tensors {
    tensors::read(&checkpoint(name).join("model.safetensors"))
}

fn stored(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Vec<Stored> {
    let as_is = |(name, tensor): (String, Tensor)| Stored {
        name,
        dtype: Dtype::F32,
        bytes: bytes_of(&tensor.values),
        shape: tensor.shape,
    };
    tensors.into_iter().map(as_is).collect()
}

/// A checkpoint in 4 bits, as mlx-lm makes it: every matrix whose rows are whole groups.
fn quantized(name: &str, group: usize) -> Vec<Stored> {
    let mut out = Vec::new();
    for (name, tensor) in f32_tensors(name) {
        let module = name
            .strip_suffix(".weight")
            .filter(|_| matches!(tensor.shape[..], [_, width] if width % group == 0));
        let Some(module) = module else {
            out.extend(stored([(name, tensor)]));
            continue;
        };
        let (rows, width) = (tensor.shape[0], tensor.shape[1]);
        let (words, scales, biases) = quantize(&tensor.values, 4, group);
        let mut add = |leaf: &str, dtype, columns, bytes| {
            out.push(Stored {
                name: format!("{module}.{leaf}"),
                dtype,
                shape: vec![rows, columns],
                bytes,
            })
        };
        let packed = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        add("weight", Dtype::U32, width / 8, packed);
        add("scales", Dtype::F32, width / group, bytes_of(&scales));
        add("biases", Dtype::F32, width / group, bytes_of(&biases));
    }
    out
}

/// MLX's affine quantization, for widths of which a word holds a whole number. (Not by MLX: it has
/// global state, and tests run side by side.)
pub fn quantize(values: &[f32], bits: u32, group: usize) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let most = ((1u32 << bits) - 1) as f32;
    let (mut words, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks(group) {
        let low = group.iter().copied().fold(f32::INFINITY, f32::min);
        let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The end that is farther from zero is met exactly, and zero too.
        let below = low.abs() > high.abs();
        let step = ((high - low) / most).max(1e-7);
        let (step, edge) = if below { (step, low) } else { (-step, high) };
        let steps = (edge / step).round_ties_even();
        let (scale, bias) = if steps == 0.0 {
            (step, 0.0)
        } else {
            (edge / steps, edge)
        };
        let level = |x: &f32| ((x - bias) / scale).round_ties_even().clamp(0.0, most) as u32;
        let packed = group.chunks(32 / bits as usize).map(|word| {
            let levels = word.iter().zip(0..);
            levels.fold(0, |word, (x, at)| word | level(x) << (at * bits))
        });
        words.extend(packed);
        scales.push(scale);
        biases.push(bias);
    }
    (words, scales, biases)
}

/// Qwen3.5 as published: its own names, norms minus one, and the head and the vision tower inside.
fn published() -> Vec<Stored> {
    let mut all = Tensors::new();
    for (name, mut tensor) in f32_tensors("qwen3_5-f32") {
        let within = name.strip_prefix("language_model.");
        let name = match (within, name.strip_prefix("vision_tower.")) {
            (Some(within), _) => match within.strip_prefix("model.") {
                Some(leaf) => format!("model.language_model.{leaf}"),
                None => within.to_owned(),
            },
            (None, Some(leaf)) => format!("model.visual.{leaf}"),
            (None, None) => panic!("{name} is of neither part"),
        };
        if name.ends_with("conv1d.weight") {
            tensor.shape.swap(1, 2);
        }
        if name.ends_with("patch_embed.proj.weight") {
            tensor = channels_first(&tensor);
        }
        if name.starts_with("model.language_model.") && !name.ends_with("linear_attn.norm.weight") {
            lower_norm(&name, &mut tensor);
        }
        all.insert(name, tensor);
    }
    for (name, mut tensor) in f32_tensors("qwen3_5_mtp-f32") {
        lower_norm(&name, &mut tensor);
        all.insert(format!("mtp.{name}"), tensor);
    }
    stored(all)
}

/// Takes one off the weights of a norm.
fn lower_norm(name: &str, tensor: &mut Tensor) {
    if tensor.shape.len() == 1 && name.contains("norm") {
        tensor.values.iter_mut().for_each(|x| *x -= 1.0);
    }
}

/// `[O, T, H, W, C]` to `[O, C, T, H, W]`.
fn channels_first(tensor: &Tensor) -> Tensor {
    let shape = &tensor.shape;
    let (outputs, channels) = (shape[0], shape[4]);
    let inner: usize = shape[1..4].iter().product();
    let mut values = Vec::with_capacity(tensor.values.len());
    for output in 0..outputs {
        for channel in 0..channels {
            let at = |place| tensor.values[(output * inner + place) * channels + channel];
            values.extend((0..inner).map(at));
        }
    }
    let shape = [&[outputs, channels], &shape[1..4]].concat();
    Tensor { shape, values }
}

fn write(tensors: &[Stored], format: &str, out: &Path) {
    write_file(tensors, format, &out.join("model.safetensors"));
    if format == "mlx" {
        let map = tensors
            .iter()
            .map(|t| (t.name.clone(), json!("model.safetensors")));
        write_index(tensors, map.collect(), out);
    }
}

fn write_shards(tensors: &[Stored], count: usize, out: &Path) {
    let mut map = Map::new();
    let shards = tensors.chunks(tensors.len().div_ceil(count));
    for (index, shard) in (1..).zip(shards) {
        let file = format!("model-{index:05}-of-{count:05}.safetensors");
        write_file(shard, "pt", &out.join(&file));
        map.extend(shard.iter().map(|t| (t.name.clone(), json!(file))));
    }
    write_index(tensors, map, out);
}

fn write_file(tensors: &[Stored], format: &str, path: &Path) {
    let views = tensors.iter().map(|stored| {
        let view = TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes);
        (&stored.name, view.expect("the shape fits"))
    });
    let metadata = [("format".to_owned(), format.to_owned())];
    safetensors::serialize_to_file(views, Some(metadata.into()), path).expect("a file");
}

fn write_index(tensors: &[Stored], map: Map<String, Value>, out: &Path) {
    let total: usize = tensors.iter().map(|stored| stored.bytes.len()).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let text = format!("{index:#}");
    std::fs::write(out.join("model.safetensors.index.json"), text).expect("an index");
}

/// The other files, as those of `like`, with a change to the config.
fn configure(like: &str, out: &Path, change: impl FnOnce(&mut Value)) {
    let like = fixture("oracle/ckpt").join(like);
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        if like.join(file).exists() {
            std::fs::copy(like.join(file), out.join(file)).expect(file);
        }
    }
    let mut config = json(&like.join("config.json"));
    change(&mut config);
    std::fs::write(out.join("config.json"), format!("{config:#}")).expect("a config");
}

fn add_scheme(config: &mut Value, group: usize) {
    for key in ["quantization", "quantization_config"] {
        config[key] = json!({"group_size": group, "bits": 4, "mode": "affine"});
    }
}

/// SHA-256 over all tensors of a directory, in the order of their names.
fn digest(dir: &Path) -> String {
    let mut all = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(dir).expect("a checkpoint") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(&path).expect("a file");
            let file = SafeTensors::deserialize(&bytes).expect("safetensors");
            for (name, tensor) in file.iter() {
                let shape: Vec<_> = tensor.shape().iter().map(usize::to_string).collect();
                let head = format!("{name} {} {}\n", tensor.dtype(), shape.join(","));
                all.insert(name.to_owned(), [head.as_bytes(), tensor.data()].concat());
            }
        }
    }
    let digest = Sha256::digest(all.into_values().collect::<Vec<_>>().concat());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
