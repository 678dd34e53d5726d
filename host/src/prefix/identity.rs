//! What a state depends on besides tokens: which bytes computed it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use crate::error::LoadError;
use crate::paths;
use crate::text::hex;

/// Files of a checkpoint that change its numbers: what it is, and its weights.
const EXTENSIONS: [&str; 2] = ["json", "safetensors"];

/// Read at a time.
const BLOCK: usize = 1 << 20;

/// No file system's clock is coarser.
const TICK: Duration = Duration::from_secs(3);

/// What identifies a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Where it lies, its size and when it was changed: enough inside one process.
    Revision,
    /// Its bytes: what outlives the process must know them. Read once per revision, and remembered.
    Content,
}

/// The digest of a checkpoint, a directory or a file, as 64 hex digits.
///
/// # Errors
/// It can't be read.
pub fn of_checkpoint(path: &Path, depth: Depth) -> Result<String, LoadError> {
    let io = |error| LoadError::new(path, error);
    let mut digest = Sha256::new();
    for file in files(path).map_err(io)? {
        let name = file.file_name().unwrap_or_default().as_encoded_bytes();
        digest.update((name.len() as u64).to_le_bytes());
        digest.update(name);
        let own = match depth {
            Depth::Revision => revision(&file),
            Depth::Content => content(&file),
        };
        digest.update(own.map_err(|e| LoadError::new(&file, e))?);
    }
    Ok(hex(&digest.finalize()))
}

/// The digest of several facts, as 64 hex digits.
pub fn of_facts(facts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for fact in facts {
        digest.update((fact.len() as u64).to_le_bytes());
        digest.update(fact);
    }
    hex(&digest.finalize())
}

/// The files of a checkpoint, by name.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let file = entry?.path();
        let extension = file.extension().and_then(|e| e.to_str());
        if extension.is_some_and(|e| EXTENSIONS.contains(&e)) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Which file it is and since when: another one, or a changed one, has another digest.
fn revision(file: &Path) -> io::Result<[u8; 32]> {
    use std::os::unix::fs::MetadataExt;
    let facts = file.metadata()?;
    let mut digest = Sha256::new();
    for number in [
        facts.dev(),
        facts.ino(),
        facts.size(),
        facts.mtime() as u64,
        facts.mtime_nsec() as u64,
        facts.ctime() as u64,
        facts.ctime_nsec() as u64,
    ] {
        digest.update(number.to_le_bytes());
    }
    Ok(digest.finalize().into())
}

/// The digest of a file's bytes.
fn content(file: &Path) -> io::Result<[u8; 32]> {
    let before = revision(file)?;
    let memo = paths::cache_dir().map(|dir| dir.join("digests").join(hex(&before)));
    if let Some(known) = memo.as_deref().and_then(recall) {
        return Ok(known);
    }
    let mut digest = Sha256::new();
    let mut reader = File::open(file)?;
    let mut block = vec![0; BLOCK];
    loop {
        match reader.read(&mut block)? {
            0 => break,
            n => digest.update(&block[..n]),
        }
    }
    let digest: [u8; 32] = digest.finalize().into();
    // Changed while it was read: right for what was read, wrong to remember. And what was changed just now
    // may be changed again within the same tick of the file system's clock.
    let is_settled = revision(file).is_ok_and(|after| after == before) && age(file)? > TICK;
    if let Some(memo) = memo.filter(|_| is_settled) {
        remember(&memo, &digest);
    }
    Ok(digest)
}

fn age(file: &Path) -> io::Result<Duration> {
    use std::os::unix::fs::MetadataExt;
    let changed = Duration::from_secs(file.metadata()?.ctime().max(0) as u64);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(now.unwrap_or_default().saturating_sub(changed))
}

fn recall(memo: &Path) -> Option<[u8; 32]> {
    let facts = memo.metadata().ok()?;
    if !facts.is_file() || facts.len() != 32 {
        return None;
    }
    std::fs::read(memo).ok()?.try_into().ok()
}

/// Losing it does no harm.
fn remember(memo: &Path, digest: &[u8]) {
    if let Err(error) = paths::write_whole(memo, digest) {
        tracing::debug!("{}: can't write: {error}", memo.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_its_bytes_wherever_it_lies() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for dir in &dirs {
            std::fs::write(dir.path().join("config.json"), "{}").unwrap();
            std::fs::write(dir.path().join("model.safetensors"), "weights").unwrap();
            std::fs::write(dir.path().join("README.md"), dir.path().to_str().unwrap()).unwrap();
        }
        let digest = |dir: &Path, depth| of_checkpoint(dir, depth).unwrap();
        let [a, b] = [dirs[0].path(), dirs[1].path()];
        assert_eq!(digest(a, Depth::Content), digest(b, Depth::Content));
        assert_ne!(digest(a, Depth::Revision), digest(b, Depth::Revision));
        let before = (digest(b, Depth::Content), digest(b, Depth::Revision));
        // The same size and, by a coarse clock, maybe the same time.
        std::fs::write(b.join("model.safetensors"), "Weights").unwrap();
        assert_ne!(digest(b, Depth::Content), before.0);
        std::fs::rename(b.join("model.safetensors"), b.join("other.safetensors")).unwrap();
        assert_ne!(digest(b, Depth::Content), digest(a, Depth::Content));
        let file = b.join("other.safetensors");
        assert_eq!(digest(&file, Depth::Content).len(), 64);
        assert!(of_checkpoint(&b.join("nothing"), Depth::Content).is_err());
    }

    #[test]
    fn facts_do_not_run_together() {
        assert_ne!(of_facts(&["ab", "c"]), of_facts(&["a", "bc"]));
        assert_eq!(of_facts(&["a"]), of_facts(&["a"]));
    }
}
