//! The cache directory and the ways into it: commands, pip, an atomic "make this directory once".

use crate::Result;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
    time::{SystemTime, UNIX_EPOCH},
};

/// `$MLXHOST_CACHE_DIR`, else `$XDG_CACHE_HOME/mlxhost`, else `~/.cache/mlxhost`.
pub fn cache_dir() -> Result<PathBuf> {
    for name in ["MLXHOST_CACHE_DIR", "XDG_CACHE_HOME", "HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    // A relative one would mean a different place for every build script.
    let absolute = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("MLXHOST_CACHE_DIR")
        .or_else(|| absolute("XDG_CACHE_HOME").map(|path| path.join("mlxhost")))
        .or_else(|| absolute("HOME").map(|path| path.join(".cache/mlxhost")))
        .ok_or_else(|| "no cache directory: set MLXHOST_CACHE_DIR to an absolute path".into())
}

/// The cache's directory `name`, filled by `fill` where it isn't there yet.
///
/// `fill` writes to a private directory that is renamed when it is complete, so an interrupted build leaves nothing
/// half-made, and of two builds that race the second takes what the first made.
pub fn cached(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let cache = cache_dir()?;
    let dest = cache.join(name);
    if dest.is_dir() {
        return Ok(dest);
    }
    let temp = Scratch::new(&cache, name)?;
    fill(&temp.0)?;
    match fs::rename(&temp.0, &dest) {
        Ok(()) => Ok(dest),
        Err(_) if dest.is_dir() => Ok(dest),
        Err(error) => Err(format!(
            "can't move {} to {}: {error}",
            temp.0.display(),
            dest.display()
        )),
    }
}

/// A directory that goes away with its owner (unless it was renamed meanwhile).
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(parent: &Path, name: &str) -> Result<Self> {
        // The time too: containers that share a cache have the same process ids.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |age| age.as_nanos());
        let path = parent.join(format!(".{name}.{}.{now}", process::id()));
        fs::create_dir_all(&path)
            .map_err(|error| format!("can't create {}: {error}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command and gives its stdout; the error shows the command, its last lines of output and the remedy.
pub fn run(command: &mut Command, remedy: &str) -> Result<String> {
    let shown = format!("{command:?}").replace('"', "");
    let output = command
        .output()
        .map_err(|error| format!("can't run `{shown}`: {error}\n  remedy: {remedy}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(12)..].join("\n    ");
    Err(format!(
        "`{shown}` failed ({})\n    {tail}\n  remedy: {remedy}",
        output.status
    ))
}

/// Whether [`wheel`] takes what a wheel requires as well.
#[derive(Clone, Copy, PartialEq)]
pub enum Needs {
    Nothing,
    Dependencies,
}

/// Downloads the wheel `requirement` and unpacks it into `dest`.
pub fn wheel(requirement: &str, needs: Needs, dest: &Path) -> Result<()> {
    let download = Scratch::new(dest, "wheel")?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-cache-dir",
        "--no-input",
    ])
    .args([
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--dest",
    ])
    .arg(&download.0)
    .arg(requirement);
    if needs == Needs::Nothing {
        pip.arg("--no-deps");
    }
    run(
        &mut pip,
        "python3 with a recent pip is needed (Debian: python3-pip), and a package index with a wheel for this platform",
    )?;
    for file in files(&download.0)? {
        // A wheel is a zip file; python's own module spares a crate.
        run(
            Command::new("python3")
                .args(["-m", "zipfile", "-e"])
                .arg(file)
                .arg(dest),
            "is the disk full? MLXHOST_CACHE_DIR (by default ~/.cache/mlxhost) names another place",
        )?;
    }
    Ok(())
}

/// All files under `dir`, links not followed.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let fail = |error| format!("can't list {}: {error}", dir.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if entry.file_type().map_err(fail)?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}
