//! The entries in a directory: `NAMESPACE/TOKENS-KEY.safetensors`, each written whole or not at all.
//!
//! Nothing that lies there is believed: a file that is not what its name says is never used, and says why in
//! one warning. Files are written by a thread of their own, so that rounds don't wait for the disk.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use super::file::{self, Written};
use super::{Entry, Key};
use crate::error::LoadError;

/// Entries that wait for the disk; beyond, they are not written.
const MOST_WAITING: usize = 2;

/// Files that a directory is searched through for.
const MOST_FILES: usize = 10_000;

/// Files in the making begin with this, and are debris when they are old.
const UNFINISHED: &str = ".unfinished-";
const DEBRIS: Duration = Duration::from_secs(3600);

const EXTENSION: &str = ".safetensors";

pub(super) struct Directory {
    path: PathBuf,
    limit: u64,
    /// Files that were of no use. They may be somebody else's: they stay where they are.
    distrusted: HashSet<PathBuf>,
    jobs: Option<SyncSender<(PathBuf, Written)>>,
    writer: Option<JoinHandle<()>>,
}

impl Drop for Directory {
    /// Waits until everything is written.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Directory {
    /// Makes the directory, for its owner alone: what lies in it tells what was said.
    pub fn open(path: &Path, limit: u64) -> Result<Self, LoadError> {
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path);
        made.map_err(|e| {
            LoadError::new(path, e).remedy("name another directory with --prefix-dir")
        })?;
        let (jobs, inbox) = sync_channel::<(PathBuf, Written)>(MOST_WAITING);
        let root = path.to_owned();
        let writer = std::thread::Builder::new()
            .name("prefix-writer".to_owned())
            .spawn(move || {
                for (path, entry) in inbox {
                    if let Err(error) = write(&path, entry) {
                        tracing::warn!("{}: can't be written: {error}", path.display());
                    }
                    tidy(&root, limit);
                }
            })
            .map_err(|e| LoadError::new(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            limit,
            distrusted: HashSet::new(),
            jobs: Some(jobs),
            writer: Some(writer),
        })
    }

    /// The entries of a namespace, by the number of their tokens and their keys.
    pub fn list(&self, namespace: &str) -> HashSet<(usize, Key)> {
        let Ok(files) = fs::read_dir(self.path.join(namespace)) else {
            return HashSet::new();
        };
        let files = files.take(MOST_FILES).filter_map(Result::ok);
        files
            .filter_map(|file| parse(file.file_name().to_str()?))
            .collect()
    }

    fn file(&self, namespace: &str, length: usize, key: Key) -> PathBuf {
        let name = format!("{length}-{}{EXTENSION}", key.hex());
        self.path.join(namespace).join(name)
    }

    /// The entry of these tokens; none, after a warning, if the file has anything else.
    pub fn read(&mut self, namespace: &str, key: Key, tokens: &[i32]) -> Option<Entry> {
        let path = self.file(namespace, tokens.len(), key);
        if self.distrusted.contains(&path) {
            return None;
        }
        let bytes = match self.bytes(&path) {
            Ok(bytes) => bytes,
            // Somebody tidied up meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                self.distrust(namespace, tokens.len(), key, &error.to_string());
                return None;
            }
        };
        match file::read(&path, bytes, namespace, tokens) {
            Ok(entry) => {
                // It counts as used now. Where that can't be noted, it goes a little earlier.
                let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
                Some(entry)
            }
            Err(error) => {
                self.distrust(namespace, tokens.len(), key, &error.kind().to_string());
                None
            }
        }
    }

    /// Read, not mapped: nobody can change it any more.
    fn bytes(&self, path: &Path) -> io::Result<Vec<u8>> {
        // Opening a pipe or a device could block for ever, so look before opening.
        let facts = fs::metadata(path)?;
        if !facts.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        if facts.len() > self.limit {
            return Err(io::Error::other("larger than the whole directory may be"));
        }
        let mut bytes = Vec::with_capacity(facts.len() as usize);
        File::open(path)?.take(self.limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Never uses a file again.
    pub fn distrust(&mut self, namespace: &str, length: usize, key: Key, why: &str) {
        let path = self.file(namespace, length, key);
        if path.exists() && self.distrusted.insert(path.clone()) {
            let shown = path.display();
            tracing::warn!("{shown}: ignored: {}", crate::text::one_line(why));
        }
    }

    /// Whether there is a file of that name, and nothing is known against it.
    pub fn contains(&self, namespace: &str, length: usize, key: Key) -> bool {
        let path = self.file(namespace, length, key);
        path.exists() && !self.distrusted.contains(&path)
    }

    /// Has an entry written, unless it is there or too many wait already.
    pub fn write(&mut self, namespace: &str, key: Key, entry: &Entry) {
        let length = entry.tokens.len();
        if entry.bytes() > self.limit || self.contains(namespace, length, key) {
            return;
        }
        let path = self.file(namespace, length, key);
        let Some(jobs) = &self.jobs else { return };
        let written = Written::new(namespace, entry);
        match written.map(|written| jobs.try_send((path.clone(), written))) {
            Ok(Ok(())) => {
                self.distrusted.remove(&path);
            }
            Ok(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) => {
                tracing::debug!("{}: not written: the disk is slow", path.display());
            }
            Err(error) => tracing::debug!("{}: not written: {error}", path.display()),
        }
    }
}

/// The number of tokens and the key in a file's name.
fn parse(name: &str) -> Option<(usize, Key)> {
    let (length, key) = name.strip_suffix(EXTENSION)?.split_once('-')?;
    if key.len() != 64 || !key.is_ascii() {
        return None;
    }
    let digit = |at: usize| u8::from_str_radix(&key[2 * at..2 * at + 2], 16);
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = digit(at).ok()?;
    }
    Some((length.parse().ok()?, Key(bytes)))
}

/// Puts a whole file in place.
fn write(path: &Path, entry: Written) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)?;
    let temporary = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempfile_in(dir)?;
    entry.write(temporary.path()).map_err(io::Error::other)?;
    temporary.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// Removes what was used longest ago until the rest fits, and what was never finished.
fn tidy(root: &Path, limit: u64) {
    let mut files = Vec::new();
    let namespaces = fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    for namespace in namespaces {
        let inside = fs::read_dir(namespace.path()).into_iter().flatten();
        for file in inside.filter_map(Result::ok) {
            let (name, path) = (file.file_name(), file.path());
            let Ok(facts) = fs::symlink_metadata(&path) else {
                continue;
            };
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let name = name.to_str().unwrap_or_default();
            if parse(name).is_some() && facts.is_file() {
                files.push((used, facts.len(), path));
            } else if name.starts_with(UNFINISHED) && used.elapsed().is_ok_and(|age| age > DEBRIS) {
                let _ = fs::remove_file(&path);
            }
        }
    }
    files.sort();
    let mut total: u64 = files.iter().map(|(_, len, _)| len).sum();
    for (_, len, path) in files {
        if total <= limit {
            return;
        }
        // Where it can't be removed it still counts.
        if fs::remove_file(&path).is_ok() {
            total -= len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_entries_are_read() {
        let key = Key([0xa5; 32]);
        let name = format!("12-{}.safetensors", key.hex());
        assert_eq!(
            parse(&name).map(|(n, k)| (n, k.hex())),
            Some((12, key.hex()))
        );
        for other in ["", "12-a5.safetensors", "model.safetensors", &name[1..4]] {
            assert!(parse(other).is_none(), "{other}");
        }
        assert!(parse(&name.replace("12-", "x-")).is_none());
        assert!(parse(&name.replace("a5a5", "é5")).is_none());
    }

    #[test]
    fn what_is_too_much_goes_by_age_and_what_is_not_ours_stays() {
        let dir = tempfile::tempdir().unwrap();
        let space = dir.path().join("n");
        fs::create_dir(&space).unwrap();
        let now = SystemTime::now();
        let file = |name: &str, age: u64| {
            let path = space.join(name);
            fs::write(&path, [0; 100]).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
            path
        };
        let name = |n: u8| format!("5-{}.safetensors", Key([n; 32]).hex());
        let (old, new) = (file(&name(1), 900), file(&name(2), 10));
        let (middle, foreign) = (file(&name(3), 60), file("letters.txt", 9000));
        let debris = file(".unfinished-x", 9000);
        tidy(dir.path(), 250);
        assert!(!old.exists() && !debris.exists());
        assert!(new.exists() && middle.exists() && foreign.exists());
    }
}
