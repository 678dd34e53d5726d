//! `mlxhost plugins`: looking at plugins without running them.

use mlxhost::plugin::{PluginFile, check_version};
use serde_json::{Value, json};

use super::args::{PluginsArgs, PluginsCommand};
use super::error::CliError;
use super::load;

/// Lists or inspects plugins.
pub fn run(args: &PluginsArgs) -> Result<(), CliError> {
    match &args.command {
        PluginsCommand::List { paths, json } => {
            let registry = load::registry(paths)?;
            if *json {
                let plugins: Vec<_> = registry.found().iter().map(describe).collect();
                println!("{}", Value::Array(plugins));
                return Ok(());
            }
            for refused in registry.refused() {
                eprintln!("mlxhost: passed over: {refused}");
            }
            if registry.found().is_empty() {
                println!(
                    "no plugins; name them with --plugin, --plugin-dir or MLXHOST_PLUGIN_PATH"
                );
            }
            for file in registry.found() {
                let manifest = file.manifest();
                println!(
                    "{} {}  {}  {}",
                    manifest.name,
                    manifest.version,
                    serves(file),
                    file.path().display()
                );
            }
            Ok(())
        }
        PluginsCommand::Inspect { path, json } => {
            let file = PluginFile::read(path)?;
            if *json {
                println!("{}", describe(&file));
            } else {
                print(&file);
            }
            Ok(())
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

fn print(file: &PluginFile) {
    let manifest = file.manifest();
    println!("{} {}", manifest.name, manifest.version);
    println!("  file      {}", file.path().display());
    println!("  sha256    {}", file.digest());
    println!(
        "  api       built with {}, needs {} or newer",
        manifest.api, manifest.min_api
    );
    match check_version(file) {
        Ok(()) => println!("  verdict   this host can load it"),
        Err(error) => println!("  verdict   {}", error.kind()),
    }
    println!("  drafters  {}", serves(file));
    for (key, help) in &manifest.options {
        println!("  option    {key}: {help}");
    }
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
