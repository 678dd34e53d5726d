//! Places on the user's machine.

use std::io;
use std::path::{Path, PathBuf};

/// `$MLXHOST_CACHE_DIR`, else `$XDG_CACHE_HOME/mlxhost`, else `~/.cache/mlxhost`.
pub fn cache_dir() -> Option<PathBuf> {
    absolute("MLXHOST_CACHE_DIR")
        .or_else(|| absolute("XDG_CACHE_HOME").map(|dir| dir.join("mlxhost")))
        .or_else(|| absolute("HOME").map(|dir| dir.join(".cache/mlxhost")))
}

/// What the user has put there for the program, and what it keeps for good: `$MLXHOST_DATA_DIR`, else
/// `$XDG_DATA_HOME/mlxhost`, else `~/.local/share/mlxhost`.
pub fn data_dir() -> Option<PathBuf> {
    absolute("MLXHOST_DATA_DIR")
        .or_else(|| absolute("XDG_DATA_HOME").map(|dir| dir.join("mlxhost")))
        .or_else(|| absolute("HOME").map(|dir| dir.join(".local/share/mlxhost")))
}

/// A path inside the tree that the program is installed in: beside the `bin` that holds it.
pub fn installed(inside: &str) -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?.canonicalize().ok()?;
    Some(exe.parent()?.parent()?.join(inside))
}

fn absolute(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
}

/// Writes a file as a whole or not at all, and the directories above it where they are missing.
///
/// # Errors
/// The system's; an older file of that name is then as it was.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let temporary = tempfile::NamedTempFile::new_in(dir)?;
    std::fs::write(temporary.path(), bytes)?;
    temporary.persist(path).map_err(|e| e.error)?;
    Ok(())
}
