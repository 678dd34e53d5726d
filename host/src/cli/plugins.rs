//! `mlxhost plugins`: looking at plugins without running them.

use mlxhost::plugin::{PluginFile, check_version};
use serde_json::{Value, json};

use super::args::{PluginsArgs, PluginsCommand};
use super::error::CliError;
use super::{load, new, output};

/// Lists or inspects plugins.
pub fn run(args: &PluginsArgs) -> Result<(), CliError> {
    match &args.command {
        PluginsCommand::New(args) => new::run(args),
        PluginsCommand::List { paths, json } => {
            let registry = load::registry(paths)?;
            if *json {
                let plugins: Vec<_> = registry.found().iter().map(describe).collect();
                return output::write(&format!("{}\n", Value::Array(plugins)));
            }
            for refused in registry.refused() {
                output::note(format_args!("mlxhost: passed over: {refused}"));
            }
            if registry.found().is_empty() {
                return output::write(
                    "no plugins; name them with --plugin, --plugin-dir or MLXHOST_PLUGIN_PATH\n",
                );
            }
            for file in registry.found() {
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
