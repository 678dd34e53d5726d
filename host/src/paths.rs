//! Places on the user's machine.

use std::path::PathBuf;

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
