//! Splitting the head off a full checkpoint, into a directory of its own.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use plugin_api::Tensor;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::head::{self, Head, Norms};
use super::pieces::{self, Piece};
use crate::backend::{self, Affine};
use crate::checkpoint::{Checkpoint, DType, Quoted, TensorSpec, Writer};
use crate::error::LoadError;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// What a drafter's vocabulary is known by, and what restricts drafting; copied where it is there.
const COPIED: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "draft_vocab.json",
];
const MODEL_TYPE: &str = "qwen3_5_mtp";

/// What is asked of a split.
#[derive(Clone, Copy, Debug, Default)]
pub struct SplitOptions {
    /// How the head stores its norms, where the checkpoint's structure does not say.
    pub norms: Option<Norms>,
    /// Quantizes the matrices.
    pub quantize: Option<Affine>,
    /// Replaces a head that was split off before.
    pub replace: bool,
}

/// What a split has made.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// Tensors of the new checkpoint.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How the norms were stored; now they are as they are used.
    pub norms: Norms,
    /// Whether a tokenizer was there to be copied.
    pub tokenizer: bool,
}

/// Takes the head out of the checkpoint at `from` into the new directory `out`, which appears complete or
/// not at all. `progress` hears the bytes read and those there are to read; when it breaks off, nothing
/// is left, and the result is `None`.
///
/// # Errors
/// `from` is no Qwen3.5 checkpoint with a head, the head is incomplete, how its norms are stored is not
/// clear; `out` is in use, or writing fails.
pub fn split(
    from: &Path,
    out: &Path,
    options: SplitOptions,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Option<Summary>, LoadError> {
    let place = Place::find(out, options.replace)?;
    let checkpoint = Checkpoint::open(from)?;
    let head = Head::find(&checkpoint)?.ok_or_else(|| no_head(&checkpoint))?;
    let norms = match options.norms {
        Some(norms) => norms,
        None => head.norms()?,
    };
    let pieces = pieces::plan(&head, norms)?;
    if let Some(packed) = pieces.iter().find(|p| p.spec.name.ends_with(".scales"))
        && options.quantize.is_some()
    {
        let what = format!(
            "its head is quantized already: it has {}",
            Quoted(&packed.spec.name)
        );
        return Err(
            LoadError::unsupported(from, what).remedy("leave out --bits to take it as it is")
        );
    }
    backend::install();

    let dir = place.temporary()?;
    let config = config(&head, &pieces, options.quantize);
    write_json(&dir.path().join(CONFIG), &config)?;
    let path = dir.path().join(WEIGHTS);
    let specs = specs(&pieces, options.quantize);
    let mut writer = Writer::create(&path, &specs)?;
    let all = pieces.iter().map(|piece| piece.reads).sum();
    let mut read = 0;
    for piece in &pieces {
        if progress(read, all).is_break() {
            return Ok(None);
        }
        write(piece, &checkpoint, options.quantize, &mut writer)?;
        read += piece.reads;
    }
    let bytes = writer.total();
    writer.finish()?;
    let map = specs.iter().map(|spec| (spec.name.clone(), json!(WEIGHTS)));
    let map: Map<_, _> = map.collect();
    let index = json!({"metadata": {"total_size": bytes}, "weight_map": map});
    write_json(&dir.path().join(INDEX), &index)?;
    let tokenizer = copy_tokenizer(from, dir.path())?;
    if progress(all, all).is_break() {
        return Ok(None);
    }
    place.publish(dir)?;
    Ok(Some(Summary {
        tensors: specs.len(),
        bytes,
        norms,
        tokenizer,
    }))
}

/// Why there is nothing to split off.
fn no_head(checkpoint: &Checkpoint) -> LoadError {
    let path = checkpoint.path();
    let model_type = checkpoint
        .config()
        .get("model_type")
        .and_then(Value::as_str);
    match model_type {
        Some(MODEL_TYPE) => LoadError::unsupported(path, "this head is split off already")
            .remedy("it can be used as it is, with --drafter"),
        _ if head::is_qwen3_5(checkpoint) => {
            LoadError::missing(path, "it has no mtp.* tensors, which are the head")
                .remedy("converters strip them: take the checkpoint that the publisher offers")
        }
        other => {
            let other = Quoted(other.unwrap_or_default()).to_string();
            LoadError::unsupported(path, format!("model_type {other} has no head to split off"))
                .remedy("name a full Qwen3.5 checkpoint")
        }
    }
}

/// The config of the new directory.
fn config(head: &Head, pieces: &[Piece], quantize: Option<Affine>) -> Value {
    let full = head.checkpoint.config();
    let mut text = head.text.clone();
    if let Some(text) = text.as_object_mut() {
        text.retain(|key, _| !matches!(key.as_str(), "quantization" | "quantization_config"));
    }
    let tied = |config: &Value| config.get("tie_word_embeddings").and_then(Value::as_bool);
    let mut config = json!({
        "model_type": MODEL_TYPE,
        // Columns of a verification: a draft per layer and step, and the pending token.
        "block_size": head.layers + 2,
        "tie_word_embeddings": tied(full).or(tied(&text)).unwrap_or(false),
        "text_config": text,
    });
    let scheme = match quantize {
        Some(affine) => {
            Some(json!({"group_size": affine.group(), "bits": affine.bits(), "mode": "affine"}))
        }
        None if pieces.iter().any(|p| p.spec.name.ends_with(".scales")) => own_scheme(head),
        None => None,
    };
    if let Some(scheme) = scheme {
        // mlx-lm writes both.
        config["quantization_config"] = scheme.clone();
        config["quantization"] = scheme;
    }
    config
}

/// What the full config says of the quantization of the head's modules, by their new names.
fn own_scheme(head: &Head) -> Option<Value> {
    let full = head.checkpoint.config().get("quantization")?.as_object()?;
    let own = full.iter().filter_map(|(key, value)| {
        let general = matches!(key.as_str(), "group_size" | "bits" | "mode");
        let name = if general {
            Some(key.as_str())
        } else {
            key.strip_prefix(head.prefix)
        };
        Some((name?.to_owned(), value.clone()))
    });
    Some(Value::Object(own.collect()))
}

/// The three tensors that a matrix is quantized to.
fn quantized_specs(spec: &TensorSpec, affine: Affine) -> [TensorSpec; 3] {
    let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
    let part = |leaf: &str, dtype: DType, width: usize| TensorSpec {
        name: format!("{module}.{leaf}"),
        dtype,
        shape: vec![spec.shape[0], width],
    };
    let width = spec.shape[1];
    [
        part("weight", DType::U32, width / 32 * affine.bits()),
        part("scales", spec.dtype, width / affine.group()),
        part("biases", spec.dtype, width / affine.group()),
    ]
}

/// All tensors of the new file.
fn specs(pieces: &[Piece], quantize: Option<Affine>) -> Vec<TensorSpec> {
    let mut specs = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match quantize.filter(|affine| piece.is_quantizable(affine.group())) {
            Some(affine) => specs.extend(quantized_specs(&piece.spec, affine)),
            None => specs.push(piece.spec.clone()),
        }
    }
    specs
}

/// Reads a piece and writes what becomes of it.
fn write(
    piece: &Piece,
    checkpoint: &Checkpoint,
    quantize: Option<Affine>,
    writer: &mut Writer,
) -> Result<(), LoadError> {
    let bytes = piece.read(checkpoint)?;
    let Some(affine) = quantize.filter(|affine| piece.is_quantizable(affine.group())) else {
        return writer.write(&piece.spec.name, &bytes);
    };
    let failed = |e: plugin_api::Error| LoadError::failed(checkpoint.path(), e.message());
    let weight = piece.tensor(&bytes).map_err(failed)?;
    drop(bytes);
    let parts: [Tensor; 3] = affine.quantize(&weight).map_err(failed)?;
    for (spec, part) in quantized_specs(&piece.spec, affine).iter().zip(&parts) {
        writer.write(&spec.name, &backend::bytes_of(part).map_err(failed)?)?;
    }
    Ok(())
}

/// Whether there was a tokenizer to copy.
fn copy_tokenizer(from: &Path, to: &Path) -> Result<bool, LoadError> {
    for file in COPIED {
        let source = from.join(file);
        if source.is_file() {
            std::fs::copy(&source, to.join(file)).map_err(|e| LoadError::new(&source, e))?;
        }
    }
    Ok(to.join(COPIED[0]).exists())
}

fn write_json(path: &Path, value: &Value) -> Result<(), LoadError> {
    let text = format!("{value:#}\n");
    std::fs::write(path, text).map_err(|e| LoadError::new(path, e))
}

/// Where the new directory will be.
struct Place {
    path: PathBuf,
    parent: PathBuf,
    /// Whether an older head is there.
    occupied: bool,
}

impl Place {
    /// Looks whether `out` may be made, or replaced.
    fn find(out: &Path, replace: bool) -> Result<Self, LoadError> {
        let io = |error| LoadError::new(out, error);
        // What a link leads to is what is replaced.
        let path = match out.canonicalize() {
            Err(e) if e.kind() == ErrorKind::NotFound => out.to_owned(),
            found => found.map_err(io)?,
        };
        if path.file_name().is_none() {
            let what = "not the name of a directory to be made";
            return Err(LoadError::unsupported(out, what));
        }
        let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new(".")).to_owned();
        let mut occupied = false;
        if path.exists() {
            let entries = std::fs::read_dir(&path).map_err(io)?;
            let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
            let names = names.collect::<Result<Vec<_>, _>>().map_err(io)?;
            occupied = !names.is_empty();
            if occupied && !replace {
                return Err(
                    LoadError::unsupported(out, "the directory is not empty").remedy(
                        "name a new one; a head that was split off before is replaced with --force",
                    ),
                );
            }
            // A mistyped name must not cost anybody a directory.
            let ours = |name: &std::ffi::OsString| {
                let known = [CONFIG, WEIGHTS, INDEX].iter().chain(&COPIED);
                known.into_iter().any(|own| name == own)
            };
            if occupied && !(names.iter().all(ours) && is_split_off(&path)) {
                let what = "the directory holds something else than a head that was split off";
                return Err(LoadError::unsupported(out, what).remedy(
                    "--force does not replace that: remove it yourself, or name a new one",
                ));
            }
        }
        Ok(Self {
            path,
            parent,
            occupied,
        })
    }

    /// A directory beside it, which goes away again unless it is published.
    fn temporary(&self) -> Result<TempDir, LoadError> {
        use std::os::unix::fs::PermissionsExt;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        tempfile::Builder::new()
            .prefix(&format!(".{name}."))
            .permissions(std::fs::Permissions::from_mode(0o777))
            .tempdir_in(&self.parent)
            .map_err(|e| LoadError::new(&self.parent, e))
    }

    /// Gives the finished directory its name.
    fn publish(&self, dir: TempDir) -> Result<(), LoadError> {
        let io = |error| LoadError::new(&self.path, error);
        let mut aside = None;
        if self.occupied {
            let dir = self.temporary()?;
            std::fs::rename(&self.path, dir.path().join("old")).map_err(io)?;
            aside = Some(dir);
        }
        if let Err(error) = std::fs::rename(dir.path(), &self.path) {
            if let Some(aside) = aside {
                // Kept: should the way back be barred too, the old one is still there.
                let aside = aside.keep();
                std::fs::rename(aside.join("old"), &self.path).map_err(io)?;
                let _ = std::fs::remove_dir(aside);
            }
            return Err(io(error));
        }
        // It has moved: nothing of that name is to be removed any more.
        let _ = dir.keep();
        Ok(())
    }
}

/// Whether the config in `dir` is one of a split-off head.
fn is_split_off(dir: &Path) -> bool {
    let opened = Checkpoint::open(dir);
    opened.is_ok_and(|checkpoint| checkpoint.families() == [MODEL_TYPE])
}
