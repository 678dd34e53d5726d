//! Places on the user's machine.

use std::io;
use std::path::{Path, PathBuf};

/// `$MLXHOST_CACHE_DIR`, else `$XDG_CACHE_HOME/mlxhost`, else `~/.cache/mlxhost`.
pub fn cache_dir() -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("MLXHOST_CACHE_DIR")
        .or_else(|| absolute("XDG_CACHE_HOME").map(|dir| dir.join("mlxhost")))
        .or_else(|| absolute("HOME").map(|dir| dir.join(".cache/mlxhost")))
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
