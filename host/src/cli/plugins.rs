//! `mlxhost plugins`: looking at plugins without running them, and checking them.

use mlxhost::plugin::{Candidate, Lock, PluginFile, Registry, Search, Verdict, check_version};
use serde_json::{Value, json};

use super::args::{PluginPaths, PluginsArgs, PluginsCommand};
use super::error::CliError;
use super::{check, load, new, output};

/// Lists, inspects or checks plugins.
pub fn run(args: &PluginsArgs) -> Result<(), CliError> {
    match &args.command {
        PluginsCommand::Check(check) => check::run(check),
        PluginsCommand::New(args) => new::run(args),
        PluginsCommand::List {
            paths,
            explain,
            json,
        } => list(&Registry::discover(&load::search(paths))?, *explain, *json),
        PluginsCommand::Lock { paths } => lock(paths),
        PluginsCommand::Inspect { path, json } => {
            let file = PluginFile::read(path)?;
            output::write(&if *json {
                format!("{}\n", describe(&file))
            } else {
                sheet(&file)
            })
        }
    }
}

fn list(registry: &Registry, explain: bool, json: bool) -> Result<(), CliError> {
    if json {
        let found: Vec<_> = registry.found().map(describe).collect();
        let value = match explain {
            true => explained_in_json(registry),
            false => Value::Array(found),
        };
        return output::write(&format!("{value}\n"));
    }
    if explain {
        return output::write(&explained(registry));
    }
    for searched in registry.searched() {
        if let Some(problem) = &searched.problem {
            output::note(format_args!("mlxhost: passed over: {problem}"));
        }
    }
    for candidate in registry.candidates() {
        if let Verdict::Refused(error) = &candidate.verdict {
            output::note(format_args!("mlxhost: passed over: {error}"));
        }
    }
    let found: Vec<_> = registry.found().collect();
    if found.is_empty() {
        return output::write(
            "no plugins; name them with --plugin, --plugin-dir or MLXHOST_PLUGIN_PATH\n",
        );
    }
    for file in found {
        let manifest = file.manifest();
        output::write(&format!(
            "{} {}  {}  {}\n",
            manifest.name,
            manifest.version,
            serves(file),
            file.path().display()
        ))?;
    }
    Ok(())
}

/// Place by place, and file by file, what was looked at.
fn explained(registry: &Registry) -> String {
    let mut text = String::new();
    let places = registry.searched();
    let mut candidates = registry.candidates().iter().peekable();
    for searched in places {
        let (place, path) = (searched.place, searched.path.display());
        text += &match &searched.problem {
            None => format!("{place}: {path}\n"),
            Some(problem) => format!("{place}: {path}: not searched: {}\n", problem.kind()),
        };
        let is_here = |candidate: &&Candidate| {
            candidate.place == searched.place
                && (candidate.path == searched.path
                    || candidate.path.parent() == Some(&searched.path))
        };
        let mut count = 0;
        while let Some(candidate) = candidates.next_if(is_here) {
            count += 1;
            text += &verdict(candidate);
        }
        if count == 0 && searched.problem.is_none() {
            text += "  nothing there\n";
        }
    }
    if places.is_empty() {
        text +=
            "no place was searched: there is none of --plugin, --plugin-dir, MLXHOST_PLUGIN_PATH\n";
    }
    text
}

fn verdict(candidate: &Candidate) -> String {
    let path = candidate.path.display();
    match &candidate.verdict {
        Verdict::Usable(file) => {
            let manifest = file.manifest();
            let (name, version) = (&manifest.name, &manifest.version);
            format!(
                "  loaded    {path}\n            {name} {version}, {}\n",
                serves(file)
            )
        }
        Verdict::Refused(error) => format!("  refused   {path}\n            {}\n", error.kind()),
        Verdict::Shadowed { file, by } => format!(
            "  shadowed  {path}\n            {} {}, by {}\n",
            file.manifest().name,
            file.manifest().version,
            by.display()
        ),
    }
}

fn explained_in_json(registry: &Registry) -> Value {
    let places = registry.searched().iter().map(|searched| {
        json!({
            "place": searched.place.to_string(),
            "path": searched.path,
            "problem": searched.problem.as_ref().map(|problem| problem.kind().to_string()),
        })
    });
    let candidates = registry.candidates().iter().map(|candidate| {
        let (verdict, plugin, why, by) = match &candidate.verdict {
            Verdict::Usable(file) => ("loaded", Some(describe(file)), None, None),
            Verdict::Refused(error) => ("refused", None, Some(error.kind().to_string()), None),
            Verdict::Shadowed { file, by } => ("shadowed", Some(describe(file)), None, Some(by)),
        };
        json!({
            "place": candidate.place.to_string(),
            "path": candidate.path,
            "verdict": verdict,
            "why": why,
            "by": by,
            "plugin": plugin,
        })
    });
    json!({
        "places": places.collect::<Vec<_>>(),
        "candidates": candidates.collect::<Vec<_>>(),
    })
}

/// Pins what there is now; an older lock file does not count.
fn lock(paths: &PluginPaths) -> Result<(), CliError> {
    let path = load::lock_file(paths).ok_or_else(|| {
        CliError::input("there is no place for a lock file\n  name one with --plugin-lock FILE")
    })?;
    let registry = load::discover(&Search {
        lock: None,
        ..load::search(paths)
    })?;
    let files: Vec<_> = registry.found().collect();
    if files.is_empty() {
        return Err(CliError::input(
            "there are no plugins to allow\n  name them with --plugin, --plugin-dir or MLXHOST_PLUGIN_PATH",
        ));
    }
    Lock::write(&path, &files)?;
    let mut text = format!("{}\n", path.display());
    for file in files {
        text += &format!("  {}  {}\n", file.digest(), file.manifest().name);
    }
    output::write(
        &(text + "Only these are loaded from now on; delete the file to allow all again.\n"),
    )
}

fn serves(file: &PluginFile) -> String {
    let families = &file.manifest().families;
    if families.is_empty() {
        "needs no checkpoint".to_owned()
    } else {
        format!("serves {}", families.join(", "))
    }
}

fn sheet(file: &PluginFile) -> String {
    let manifest = file.manifest();
    let verdict = match check_version(file) {
        Ok(()) => "this host can load it".to_owned(),
        Err(error) => error.kind().to_string(),
    };
    let mut sheet = format!(
        "{} {}\n  file      {}\n  sha256    {}\n  api       built with {}, needs {} or newer\n",
        manifest.name,
        manifest.version,
        file.path().display(),
        file.digest(),
        manifest.api,
        manifest.min_api
    );
    sheet += &format!("  verdict   {verdict}\n  drafters  {}\n", serves(file));
    for (key, help) in &manifest.options {
        sheet += &format!("  option    {key}: {help}\n");
    }
    sheet
}

fn describe(file: &PluginFile) -> Value {
    let manifest = file.manifest();
    json!({
        "name": manifest.name,
        "version": manifest.version.to_string(),
        "path": file.path(),
        "sha256": file.digest(),
        "api": manifest.api.to_string(),
        "min_api": manifest.min_api.to_string(),
        "families": manifest.families,
        "options": manifest.options,
        "refused": check_version(file).err().map(|error| error.kind().to_string()),
    })
}
