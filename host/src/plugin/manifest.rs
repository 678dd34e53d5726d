//! The first gate: what a library says of itself, read from its file without running it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use object::{Object, ObjectKind, ObjectSection};
use plugin_api::abi::{MAX_MANIFEST_BYTES, SECTION};
use semver::Version;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::LoadError;

/// Larger files are not plugins: they have no weights in them.
const MAX_LIBRARY_BYTES: u64 = 256 << 20;

/// The format of the manifest that this host reads.
const FORMAT: u64 = 1;

/// What a plugin says of itself.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// Its name, unique among the plugins of a run.
    pub name: String,
    /// Its own version.
    pub version: Version,
    /// The API version it was built with.
    pub api: Version,
    /// The lowest API version it can run on.
    pub min_api: Version,
    /// The `model_type`s of the drafter checkpoints it serves; none: it needs no checkpoint.
    pub families: Vec<String>,
    /// Keys of `--drafter-option`, with a line of help each.
    pub options: BTreeMap<String, String>,
}

/// A plugin's file: read once, so that what was checked is what will be loaded.
pub struct PluginFile {
    path: PathBuf,
    bytes: Vec<u8>,
    manifest: Manifest,
    /// Made when it is asked for: most of the plugins that are found are never loaded.
    digest: OnceLock<String>,
}

impl PluginFile {
    /// Reads a library and its manifest. Runs nothing of it.
    ///
    /// # Errors
    /// Not a file, too large, not a library of this machine, without a manifest, or with a broken
    /// one.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        // An absolute path, so that the loader never searches for a bare name.
        let path = path
            .canonicalize()
            .map_err(|e| LoadError::new(path, e).remedy("name the plugin's library file"))?;
        let facts = std::fs::metadata(&path).map_err(|e| LoadError::new(&path, e))?;
        if !facts.is_file() {
            return Err(LoadError::unsupported(&path, "not a file")
                .remedy("name the plugin's library file, or its directory with --plugin-dir"));
        }
        if facts.len() > MAX_LIBRARY_BYTES {
            let size = format!("{} MiB is too large for a plugin", facts.len() >> 20);
            return Err(LoadError::unsupported(&path, size));
        }
        // It may grow meanwhile.
        let mut bytes = Vec::new();
        std::fs::File::open(&path)
            .and_then(|file| file.take(MAX_LIBRARY_BYTES).read_to_end(&mut bytes))
            .map_err(|e| LoadError::new(&path, e))?;
        let manifest = parse(&path, &section(&path, &bytes)?)?;
        Ok(Self {
            digest: OnceLock::new(),
            path,
            bytes,
            manifest,
        })
    }

    /// Its canonical path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of its content, hexadecimal.
    pub fn digest(&self) -> &str {
        let digest = || crate::text::hex(&Sha256::digest(&self.bytes));
        self.digest.get_or_init(digest)
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

/// The manifest's bytes out of the library's section.
fn section(path: &Path, bytes: &[u8]) -> Result<Vec<u8>, LoadError> {
    let no_library = |what: String| {
        LoadError::malformed(path, what).remedy("a plugin is a cdylib made with plugin-api")
    };
    let file =
        object::File::parse(bytes).map_err(|e| no_library(format!("not a library ({e})")))?;
    let native = native_architecture();
    if Some(file.architecture()) != native || file.format() != native_format() {
        return Err(LoadError::unsupported(
            path,
            format!(
                "a {:?} library for {:?}; this machine loads {:?} for {}",
                file.format(),
                file.architecture(),
                native_format(),
                std::env::consts::ARCH
            ),
        )
        .remedy("build the plugin for this machine"));
    }
    if file.kind() != ObjectKind::Dynamic {
        return Err(no_library(format!(
            "not a shared library but {:?}",
            file.kind()
        )));
    }
    let Some(section) = file.section_by_name(SECTION) else {
        let what = format!("not an mlxhost plugin: it has no {SECTION} section");
        return Err(LoadError::missing(path, what)
            .remedy("a plugin exports itself with plugin_api::export_plugin!"));
    };
    if section.size() > MAX_MANIFEST_BYTES as u64 {
        return Err(no_library(format!(
            "its manifest takes {} bytes",
            section.size()
        )));
    }
    section
        .data()
        .map(<[u8]>::to_vec)
        .map_err(|e| no_library(format!("its manifest can't be read ({e})")))
}

fn native_architecture() -> Option<object::Architecture> {
    match std::env::consts::ARCH {
        "x86_64" => Some(object::Architecture::X86_64),
        "aarch64" => Some(object::Architecture::Aarch64),
        _ => None,
    }
}

fn native_format() -> object::BinaryFormat {
    if cfg!(target_vendor = "apple") {
        object::BinaryFormat::MachO
    } else {
        object::BinaryFormat::Elf
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Manifest, LoadError> {
    let broken = |what: String| {
        LoadError::malformed(path, format!("its manifest {what}"))
            .remedy("build the plugin with plugin-api's export_plugin!")
    };
    // Sections may be padded with zeros.
    let end = bytes.iter().rposition(|&b| b != 0).map_or(0, |at| at + 1);
    let value: Value = serde_json::from_slice(&bytes[..end])
        .map_err(|e| broken(format!("is not valid JSON: {e}")))?;
    if value.get("manifest").and_then(Value::as_u64) != Some(FORMAT) {
        return Err(broken(format!(
            "is not of format {FORMAT}, which this host reads"
        )));
    }
    let text = |key: &str| {
        let text = value.get(key).and_then(Value::as_str);
        text.ok_or_else(|| broken(format!("lacks {key:?}")))
    };
    let version = |key: &str| {
        let text = text(key)?;
        Version::parse(text).map_err(|e| broken(format!("has {key} {text:?}: {e}")))
    };
    let name = text("name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(broken(format!(
            "has the name {name:?}: expected letters, digits, - _ ."
        )));
    }
    // Both lists end in an entry that the macro needs and nobody means.
    let families = value.get("families").and_then(Value::as_array);
    let families = families.ok_or_else(|| broken("lacks \"families\"".to_owned()))?;
    let options = value.get("options").and_then(Value::as_object);
    let options = options.into_iter().flatten();
    Ok(Manifest {
        name: name.to_owned(),
        version: version("version")?,
        api: version("api")?,
        min_api: version("min_api")?,
        families: families
            .iter()
            .filter_map(|family| family.as_str().map(str::to_owned))
            .collect(),
        options: options
            .filter_map(|(key, help)| Some((key.clone(), help.as_str()?.to_owned())))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"manifest":1,"name":"x","version":"0.1.0","api":"1.0.0",
        "min_api":"1.0.0","families":["a",null],"options":{"k":"help","":null}}"#;

    #[test]
    fn reads_what_the_macro_writes() {
        let manifest = parse(Path::new("p"), GOOD.as_bytes()).unwrap();
        assert_eq!(manifest.families, ["a"]);
        assert_eq!(manifest.options.len(), 1);
        let padded = [GOOD.as_bytes(), &[0; 7]].concat();
        assert!(parse(Path::new("p"), &padded).is_ok());
    }

    #[test]
    fn says_what_a_broken_manifest_lacks() {
        for (from, to, says) in [
            ("\"manifest\":1", "\"manifest\":9", "format 1"),
            ("\"name\":\"x\"", "\"name\":\"x/y\"", "name"),
            ("0.1.0", "one", "version"),
            ("\"api\":\"1.0.0\",", "", "api"),
            ("families", "famines", "families"),
            ("{\"manifest\"", "{\"manifest", "JSON"),
        ] {
            let error = parse(Path::new("p"), GOOD.replace(from, to).as_bytes()).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
