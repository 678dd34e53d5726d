//! `mlxhost plugins new`: a crate that drafts, to begin with.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use plugin_api::abi::API_VERSION;
use serde_json::Value;

use super::error::CliError;
use super::output;

pub const HELP: &str = "\
Examples:
  mlxhost plugins new my_drafter
      A drafter on token ids, in ./my_drafter: it works, and the place for another idea is src/memory.rs.
  mlxhost plugins new my_drafter --kind rows --path ../mlxhost/plugin-api
      The same with the group of rows made by hand, built against a checkout of mlxhost.

The crate builds wherever it lies. Its own tests need neither mlxhost nor a model. The directory appears complete
or not at all.";

/// A crate to begin with.
#[derive(clap::Args)]
pub struct NewArgs {
    /// What the plugin and its crate are called: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// What it begins with.
    #[arg(long, value_enum, default_value_t = Kind::Source)]
    pub kind: Kind,
    /// Build against this copy of the plugin API, the directory plugin-api of a checkout [default: the
    /// published version].
    #[arg(long, value_name = "PLUGIN_API_DIR")]
    pub path: Option<PathBuf>,
    /// The directory to make. It must not exist, or be empty [default: NAME].
    #[arg(long, value_name = "OUT")]
    pub dir: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Kind {
    /// One request at a time, tokens in and out (`DraftSource`).
    Source,
    /// A group of rows that leave, join and go on later (`DraftRows`).
    Rows,
}

/// Strict and reserved words of Rust.
const KEYWORDS: &str = "as async await break const continue crate dyn else enum extern false fn for gen if impl in let \
    loop match mod move mut pub ref return self static struct super trait true type unsafe use where while \
    abstract become box do final macro override priv try typeof unsized virtual yield";

/// Crates that every plugin has already.
const CRATES: [&str; 7] = [
    "alloc",
    "core",
    "mlxhost_plugin_api",
    "plugin_api",
    "proc_macro",
    "std",
    "test",
];

/// The longest name in a manifest.
const MAX_NAME: usize = 64;

/// Writes the crate and says what to do next.
pub fn run(args: &NewArgs) -> Result<(), CliError> {
    let name = args.name.as_str();
    check_name(name)?;
    let dependency = dependency(args.path.as_deref())?;
    let out = args.dir.as_deref().unwrap_or(Path::new(name));
    let parent = check_place(out)?;
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = format!("target/release/{prefix}{}{suffix}", name.replace('-', "_"));
    let fill = |template: &str| {
        template
            .replace("{{name}}", name)
            .replace("{{library}}", &library)
            // Last: a path may look like anything.
            .replace("{{dependency}}", &dependency)
    };
    let files = templates(args.kind).map(|(file, template)| (file, fill(template)));
    write(out, parent, &files)
        .map_err(|e| CliError::io(format_args!("can't write {}", out.display()), &e))?;
    output::write(&format!(
        "{}: a drafter that proposes what followed each token the last time. Next:\n  \
           cd {} && cargo test && cargo build --release\n  \
           mlxhost plugins check {library}\n  \
           mlxhost --plugin {library} --prompt 'One, two, one, two' --stats\n",
        out.display(),
        shell_word(out),
    ))
}

/// The files of a new crate, with places for the name, the library's path and the dependency.
fn templates(kind: Kind) -> [(&'static str, &'static str); 5] {
    let lib = match kind {
        Kind::Source => include_str!("templates/source.rs"),
        Kind::Rows => include_str!("templates/rows.rs"),
    };
    [
        ("Cargo.toml", include_str!("templates/manifest.toml")),
        ("README.md", include_str!("templates/README.md")),
        (".gitignore", include_str!("templates/gitignore")),
        ("src/lib.rs", lib),
        ("src/memory.rs", include_str!("templates/memory.rs")),
    ]
}

/// Refuses what cargo, rustc or the host would not take for the name of a plugin.
fn check_name(name: &str) -> Result<(), CliError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase());
    if !begins || !name.chars().all(plain) || name.len() > MAX_NAME {
        let shown: String = name.chars().take(MAX_NAME + 1).collect();
        return Err(CliError::input(format!(
            "{shown:?} can't be the name of a plugin\n  take 1 to {MAX_NAME} lower-case letters, digits, - and _, \
             a letter first, such as my_drafter"
        )));
    }
    let word = name.replace('-', "_");
    if KEYWORDS.split(' ').any(|keyword| keyword == word) || CRATES.contains(&word.as_str()) {
        return Err(CliError::input(format!(
            "{name:?} means something else to Rust\n  take another name, such as {name}_drafter"
        )));
    }
    Ok(())
}

/// What Cargo.toml says of the plugin API.
fn dependency(path: Option<&Path>) -> Result<String, CliError> {
    let Some(path) = path else {
        // This host's major version, in whatever minor version is the newest.
        let major = API_VERSION.split('.').next().unwrap_or(API_VERSION);
        return Ok(format!("{major:?}"));
    };
    let refused = |why: &dyn std::fmt::Display| {
        CliError::input(format!(
            "--path {}: {why}\n  name the directory plugin-api of a checkout of mlxhost",
            path.display()
        ))
    };
    let dir = path.canonicalize().map_err(|e| refused(&e))?;
    let manifest = std::fs::read_to_string(dir.join("Cargo.toml"))
        .map_err(|e| refused(&format_args!("its Cargo.toml: {e}")))?;
    let package = "name = \"mlxhost-plugin-api\"";
    if !manifest.lines().any(|line| line.trim() == package) {
        return Err(refused(&"its Cargo.toml is of something else"));
    }
    let dir = dir.to_str().filter(|dir| !dir.contains(char::is_control));
    let dir = dir.ok_or_else(|| refused(&"a Cargo.toml can't hold that path"))?;
    // Without control characters, a string of JSON is one of TOML.
    Ok(format!("{{ path = {} }}", Value::from(dir)))
}

/// The directory in which `out` can be made.
fn check_place(out: &Path) -> Result<&Path, CliError> {
    let refused = |why: &dyn std::fmt::Display| {
        let shown = out.display();
        CliError::input(format!("{shown}: {why}\n  name a new one with --dir"))
    };
    let in_use = std::fs::read_dir(out).map(|mut entries| entries.next().is_some());
    match in_use {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(refused(&e)),
        Ok(true) => return Err(refused(&"the directory is not empty")),
        // It is about to be replaced: who stands in it, or came by a link, would keep looking at the old one.
        Ok(false) if out.is_symlink() || is_here(out) || out.file_name().is_none() => {
            return Err(refused(&"this directory can't be replaced"));
        }
        Ok(false) => {}
    }
    match out.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) if parent.is_dir() => Ok(parent),
        Some(parent) => Err(refused(&format_args!("there is no {}", parent.display()))),
        None => Err(refused(&"not the name of a directory")),
    }
}

/// Whether a directory is the working directory.
fn is_here(dir: &Path) -> bool {
    let here = std::env::current_dir().and_then(|here| here.canonicalize());
    matches!((here, dir.canonicalize()), (Ok(here), Ok(dir)) if here == dir)
}

/// Makes `out` in `parent`, with these files or not at all.
fn write(out: &Path, parent: &Path, files: &[(&str, String)]) -> std::io::Result<()> {
    let dir = tempfile::Builder::new()
        .prefix(".mlxhost-new-")
        // As any new directory: what the user's mask leaves of it.
        .permissions(std::fs::Permissions::from_mode(0o777))
        .tempdir_in(parent)?;
    std::fs::create_dir(dir.path().join("src"))?;
    for (file, text) in files {
        std::fs::write(dir.path().join(file), text)?;
    }
    // Takes the place of an empty directory, and of nothing else.
    std::fs::rename(dir.path(), out)?;
    // It is not there any more under its own name.
    let _ = dir.keep();
    Ok(())
}

/// A path as a word of a shell's command line.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    match text.chars().all(plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_crates() {
        for good in ["a", "my_drafter", "my-drafter-2", "union", &"x".repeat(64)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        let long = "x".repeat(65);
        for bad in [
            "",
            "2x",
            "_x",
            "-x",
            "My",
            "a.b",
            "a/b",
            "..",
            "ä",
            "a b",
            "a\n",
            "fn",
            "self",
            "proc-macro",
            &long,
        ] {
            let error = check_name(bad).expect_err(bad);
            assert!(error.code() == 2 && error.to_string().lines().count() == 2);
        }
    }

    #[test]
    fn templates_have_places_that_are_filled_and_no_others() {
        for kind in [Kind::Source, Kind::Rows] {
            for (file, template) in templates(kind) {
                let rest = ["name", "library", "dependency"]
                    .iter()
                    .fold(template.to_owned(), |text, place| {
                        text.replace(&format!("{{{{{place}}}}}"), "")
                    });
                assert!(!rest.contains("{{") && !rest.contains("}}"), "{file}");
            }
        }
    }

    #[test]
    fn paths_are_quoted_where_a_shell_would_read_something_else() {
        assert_eq!(shell_word(Path::new("../a-b/c.d")), "../a-b/c.d");
        assert_eq!(shell_word(Path::new("it's here")), r"'it'\''s here'");
    }
}
