//! Reading the small files of a checkpoint directory, with bounds.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::LoadError;

/// The largest `tokenizer.json` that is read, in bytes. Real ones reach 35 MB.
pub(super) const MAX_TOKENIZER: u64 = 256 << 20;
/// The largest configuration file or template that is read, in bytes.
pub(super) const MAX_CONFIG: u64 = 16 << 20;

/// The bytes of `path`, at most `limit` of them; `None` if there is no such file.
///
/// # Errors
/// The file can't be read, is not a regular file, or is larger than `limit`.
pub(super) fn read_optional(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, LoadError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(LoadError::new(path, e)),
    };
    let about = file.metadata().map_err(|e| LoadError::new(path, e))?;
    if !about.is_file() {
        return Err(LoadError::malformed(path, "not a regular file"));
    }
    let mut bytes = Vec::new();
    // One byte more than the limit, so that a file that grows meanwhile is noticed too.
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| LoadError::new(path, e))?;
    if bytes.len() as u64 > limit {
        let what = format!("larger than {} MiB", limit >> 20);
        return Err(LoadError::unsupported(path, what));
    }
    Ok(Some(bytes))
}

/// The JSON object in `dir/name`; `None` if there is no such file.
///
/// # Errors
/// As [`read_optional`], or the file does not hold one JSON object.
pub(super) fn json_optional(dir: &Path, name: &str) -> Result<Option<Value>, LoadError> {
    let path = dir.join(name);
    let Some(bytes) = read_optional(&path, MAX_CONFIG)? else {
        return Ok(None);
    };
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|e| LoadError::malformed(&path, format!("not valid JSON: {e}")))?;
    if !value.is_object() {
        return Err(LoadError::malformed(&path, "not a JSON object"));
    }
    Ok(Some(value))
}

/// The UTF-8 text of `dir/name`; `None` if there is no such file.
///
/// # Errors
/// As [`read_optional`], or the file is not UTF-8.
pub(super) fn text_optional(dir: &Path, name: &str) -> Result<Option<String>, LoadError> {
    let path = dir.join(name);
    let Some(bytes) = read_optional(&path, MAX_CONFIG)? else {
        return Ok(None);
    };
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|_| LoadError::malformed(&path, "not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_oversized_and_odd_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        assert!(read_optional(&path, 4).unwrap().is_none());
        std::fs::write(&path, b"1234").unwrap();
        assert_eq!(read_optional(&path, 4).unwrap().unwrap(), b"1234");
        assert!(read_optional(&path, 3).is_err());
        assert!(read_optional(dir.path(), 3).is_err());

        std::fs::write(&path, b"[1]").unwrap();
        assert!(json_optional(dir.path(), "a").is_err());
        std::fs::write(&path, b"{").unwrap();
        assert!(json_optional(dir.path(), "a").is_err());
        std::fs::write(&path, b"\xff").unwrap();
        assert!(text_optional(dir.path(), "a").is_err());
    }

    #[test]
    fn json_that_nests_without_end_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let deep = format!("{{\"a\":{}", "[".repeat(1 << 20));
        std::fs::write(dir.path().join("a"), deep).unwrap();
        assert!(json_optional(dir.path(), "a").is_err());
    }
}
