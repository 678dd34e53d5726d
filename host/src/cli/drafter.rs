//! `mlxhost drafter`: looking at drafters, and splitting them off full checkpoints.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mlxhost::backend::Affine;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::drafter::{self, Description, Norms, SplitOptions, Target};
use mlxhost::plugin::{PluginFile, Registry, check_version};
use mlxhost::text::one_line;
use serde_json::{Value, json};

use super::args::{DrafterArgs, DrafterCommand, SplitArgs, StoredNorms};
use super::error::CliError;
use super::load::{self, Progress};
use super::output;

/// Splits or inspects.
pub fn run(args: &DrafterArgs) -> Result<(), CliError> {
    match &args.command {
        DrafterCommand::Split(args) => split(args),
        DrafterCommand::Inspect { path, paths, json } => {
            let registry = load::registry(paths)?;
            let checkpoint = Checkpoint::open(path)?;
            let found = drafter::describe(&checkpoint)?;
            let families = checkpoint.families();
            let plugins = serving(&registry, &families);
            output::write(&match (&found, json) {
                (found, true) => format!("{}\n", to_json(&checkpoint, found.as_ref(), &plugins)),
                (Some(found), false) => sheet(path, found, &plugins),
                (None, false) => no_drafter(path, &families),
            })
        }
    }
}

fn split(args: &SplitArgs) -> Result<(), CliError> {
    let quantize = match args.bits {
        None => None,
        Some(bits) => match Affine::new(bits, args.group_size) {
            None => return Err(CliError::input("MLX has no such quantization")),
            affine => affine,
        },
    };
    let norms = args.norms.map(|norms| match norms {
        StoredNorms::MinusOne => Norms::MinusOne,
        StoredNorms::AsUsed => Norms::AsUsed,
    });
    let options = SplitOptions {
        norms,
        quantize,
        replace: args.force,
    };
    // A second press ends nothing sooner: what was begun has to be removed.
    let pressed = Arc::new(AtomicBool::new(false));
    let flag = pressed.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| CliError::Failure(format!("can't watch for Ctrl-C: {e}")))?;
    let (mut bar, mut last) = (None, 0);
    let summary = drafter::split(&args.from, &args.out, options, &mut |done, all| {
        let bar = bar.get_or_insert_with(|| Progress::new("splitting", all));
        bar.add(done - last);
        last = done;
        if pressed.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    if let Some(bar) = bar {
        bar.end();
    }
    let summary = summary?.ok_or(CliError::Interrupted)?;
    let stored = match quantize {
        Some(affine) => format!(", {} bits in groups of {}", affine.bits(), affine.group()),
        None => String::new(),
    };
    let norms = match summary.norms {
        Norms::MinusOne => "were stored minus one; now they are as they are used",
        Norms::AsUsed => "are as they were",
    };
    let (from, out) = (args.from.display(), args.out.display());
    let mut text = format!(
        "{out}\n  size      {} tensors, {}{stored}\n  norms     {norms}\n",
        summary.tensors,
        size(summary.bytes)
    );
    if !summary.tokenizer {
        text += "  note      there was no tokenizer.json to copy: vocabularies can't be compared\n";
    }
    text += &format!(
        "  try it    mlxhost --plugin plugins/qwen_mtp.so --model {from} --drafter {out} --stats --prompt Hello\n"
    );
    output::write(&text)
}

/// The plugins at hand that serve one of these families.
fn serving<'a>(registry: &'a Registry, families: &[&str]) -> Vec<&'a PluginFile> {
    let serves = |file: &&PluginFile| {
        let mut own = file.manifest().families.iter();
        own.any(|family| families.contains(&family.as_str()))
    };
    registry.found().filter(serves).collect()
}

fn sheet(path: &Path, found: &Description, plugins: &[&PluginFile]) -> String {
    let mut sheet = format!("{}\n", path.display());
    let mut line = |key: &str, value: String| {
        if !value.is_empty() {
            sheet += &format!("  {key:<9} {value}\n");
        }
    };
    line("drafter", found.kind.title().to_owned());
    let own = [
        found
            .drafts
            .map(|n| format!("{} a round", count(n, "token"))),
        found.block.map(|n| format!("block_size {n}")),
        found.layers.map(|n| count(n, "layer")),
        found.hidden.map(|n| format!("hidden size {n}")),
    ];
    line("drafts", list(own));
    line("target", target(&found.target));
    let dtypes: Vec<_> = found.dtypes.iter().map(String::as_str).collect();
    let packed = found
        .quantization
        .map(|packed| match (packed.bits, packed.group) {
            (Some(bits), Some(group)) => format!("{bits} bits in groups of {group}"),
            _ => "quantized".to_owned(),
        });
    let weights = [
        Some(count(found.tensors as u64, "tensor")),
        Some(size(found.bytes)),
        Some(dtypes.join(" and ")).filter(|text| !text.is_empty()),
        packed,
    ];
    line("weights", list(weights));
    let known = found.kind.plugin();
    if plugins.is_empty() {
        line(
            "plugin",
            format!("{known}, which is not at hand: --plugin PATH or --plugin-dir DIR"),
        );
    }
    for file in plugins {
        let manifest = file.manifest();
        let refused = match check_version(file) {
            Ok(()) => String::new(),
            Err(error) => format!(", refused: {}", error.kind()),
        };
        let (name, version, path) = (&manifest.name, &manifest.version, file.path().display());
        line("plugin", format!("{name} {version}, {path}{refused}"));
    }
    sheet
}

fn target(target: &Target) -> String {
    list([
        target.model.as_deref().map(one_line),
        target.hidden.map(|n| format!("hidden size {n}")),
        target.layers.map(|n| count(n, "layer")),
        target.vocab.map(|n| format!("vocabulary of {n}")),
        target.taps.as_ref().map(|taps| format!("taps {taps:?}")),
        target.window.map(|n| format!("window of {n}")),
        target
            .head_dims
            .map(|[sliding, full]| format!("head dimensions {sliding} and {full} (sliding, full)")),
    ])
}

fn count(n: u64, what: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {what}{plural}")
}

fn list<const N: usize>(parts: [Option<String>; N]) -> String {
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    parts.join(", ")
}

fn no_drafter(path: &Path, families: &[&str]) -> String {
    let is = match families {
        [] => "its config names no type".to_owned(),
        names => format!("its config says {}", names.join(", ")),
    };
    let is = one_line(&is);
    let mut text = format!("{}\n  drafter   none: {is}\n", path.display());
    if families.iter().any(|family| family.starts_with("qwen3_5")) {
        text += "  note      it has no mtp.* tensors: converters strip them, the published checkpoint has them\n";
    }
    text
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn to_json(checkpoint: &Checkpoint, found: Option<&Description>, plugins: &[&PluginFile]) -> Value {
    let plugins: Vec<_> = plugins
        .iter()
        .map(|file| {
            json!({
                "name": file.manifest().name,
                "version": file.manifest().version.to_string(),
                "path": file.path(),
                "refused": check_version(file).err().map(|error| error.kind().to_string()),
            })
        })
        .collect();
    let mut sheet = json!({
        "path": checkpoint.path(),
        "families": checkpoint.families(),
        "kind": found.map(|found| found.kind.name()),
        "plugins": plugins,
    });
    if let Some(found) = found {
        let target = &found.target;
        sheet["plugin"] = json!(found.kind.plugin());
        sheet["target"] = json!({
            "model": target.model,
            "hidden_size": target.hidden,
            "layers": target.layers,
            "vocab_size": target.vocab,
            "taps": target.taps,
            "window": target.window,
            "head_dims": target.head_dims,
        });
        sheet["drafts"] = json!(found.drafts);
        sheet["block_size"] = json!(found.block);
        sheet["layers"] = json!(found.layers);
        sheet["hidden_size"] = json!(found.hidden);
        sheet["tensors"] = json!(found.tensors);
        sheet["bytes"] = json!(found.bytes);
        sheet["dtypes"] = json!(found.dtypes);
        sheet["quantization"] = json!(
            found
                .quantization
                .map(|packed| json!({"bits": packed.bits, "group_size": packed.group}))
        );
    }
    sheet
}
