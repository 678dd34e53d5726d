//! What was computed once: the state of a row at a boundary, to go on from when the same text begins again.
//!
//! An entry has the tokens that were processed and the one that followed, which the drafter has been told
//! of; it serves a prompt that begins with all of them. It pairs the target's caches with the drafter's own
//! state, and is used as a whole or not at all. Recurrent layers and sliding windows can't go back, so an
//! entry serves no shorter prefix than its own. Memory holds what was used last; a directory, if there is
//! one, what outlives the process.

mod dir;
mod file;
pub mod identity;
mod memory;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use plugin_api::{Result, RowState};
use sha2::{Digest, Sha256};

use crate::error::LoadError;
use crate::kernels;
use crate::model::KvConfig;
use crate::plugin::DrafterSource;
use crate::text::hex;
use dir::Directory;
use identity::Depth;
use memory::Memory;

/// Where states are kept, and how much of them. By default nowhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixConfig {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// A directory that outlives the process. Others may use it at the same time.
    pub dir: Option<PathBuf>,
    /// Bytes of files in that directory; beyond, those that were used longest ago are removed.
    pub dir_bytes: u64,
}

impl PrefixConfig {
    /// Whether anything is to be kept.
    pub fn is_on(&self) -> bool {
        self.memory_bytes > 0 || self.dir.is_some()
    }

    /// How closely one must look at files to tell whether states are of the same.
    fn depth(&self) -> Depth {
        match self.dir {
            Some(_) => Depth::Content,
            None => Depth::Revision,
        }
    }

    /// The digest of a target's checkpoint and of how its caches store; empty where nothing is kept.
    ///
    /// # Errors
    /// It can't be read.
    pub fn identity(&self, target: &Path, kv: &KvConfig) -> std::result::Result<String, LoadError> {
        if !self.is_on() {
            return Ok(String::new());
        }
        let weights = identity::of_checkpoint(target, self.depth())?;
        Ok(identity::of_facts(&[&weights, &format!("{kv:?}")]))
    }

    /// The namespace of a target with that identity and a drafter: all that the numbers of their states
    /// depend on besides tokens.
    ///
    /// # Errors
    /// The drafter's checkpoint can't be read.
    pub fn namespace(
        &self,
        target: &str,
        drafter: Option<&DrafterSource>,
    ) -> std::result::Result<String, LoadError> {
        if !self.is_on() {
            return Ok(String::new());
        }
        let mut facts = vec![
            env!("CARGO_PKG_VERSION").to_owned(),
            format!("exact {}", kernels::exact()),
            target.to_owned(),
        ];
        if let Some(source) = drafter {
            facts.push(source.library.digest().to_owned());
            facts.push(match &source.checkpoint {
                Some(path) => identity::of_checkpoint(path, self.depth())?,
                None => String::new(),
            });
            facts.extend(source.options.iter().map(|option| format!("{option:?}")));
        }
        let facts: Vec<&str> = facts.iter().map(String::as_str).collect();
        Ok(identity::of_facts(&facts))
    }
}

/// A row at a boundary.
pub struct Entry {
    /// The processed tokens, and the one after them.
    tokens: Vec<i32>,
    target: RowState,
    draft: Option<RowState>,
}

impl Entry {
    /// The state of a row and of its drafter after all `tokens` but the last.
    ///
    /// # Errors
    /// One of the two stands somewhere else.
    pub fn new(tokens: Vec<i32>, target: RowState, draft: Option<RowState>) -> Result<Self> {
        let aligned = |state: &RowState| state.processed() as usize + 1 == tokens.len();
        if !aligned(&target) || !draft.as_ref().is_none_or(aligned) {
            return Err(plugin_api::Error::failed(format!(
                "states after {} and {:?} tokens do not belong to {} tokens",
                target.processed(),
                draft.as_ref().map(RowState::processed),
                tokens.len()
            )));
        }
        Ok(Self {
            tokens,
            target,
            draft,
        })
    }

    /// The processed tokens, and the one after them.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Processed tokens.
    pub fn processed(&self) -> usize {
        self.tokens.len() - 1
    }

    /// The target's part.
    pub fn target(&self) -> &RowState {
        &self.target
    }

    /// The drafter's part; none without a drafter, and for one that needs only the tokens.
    pub fn draft(&self) -> Option<&RowState> {
        self.draft.as_ref()
    }

    fn bytes(&self) -> u64 {
        let of = |state: &RowState| -> u64 {
            let sizes = state.tensors().map(|(_, tensor)| tensor.bytes());
            sizes.sum()
        };
        4 * self.tokens.len() as u64 + of(&self.target) + self.draft.as_ref().map_or(0, of)
    }
}

/// What an entry is found by: its tokens, and everything else that its numbers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key([u8; 32]);

impl Key {
    fn hex(&self) -> String {
        hex(&self.0)
    }
}

/// The keys of all prefixes of a prompt that have one of some lengths, the longest first.
fn keys(
    namespace: &str,
    tokens: &[i32],
    mut lengths: Vec<usize>,
) -> impl Iterator<Item = (usize, Key)> {
    lengths.retain(|&length| (1..=tokens.len()).contains(&length));
    lengths.sort_unstable();
    lengths.dedup();
    let mut digest = Sha256::new_with_prefix(namespace);
    let mut done = 0;
    let mut all = Vec::with_capacity(lengths.len());
    for length in lengths {
        for token in &tokens[done..length] {
            digest.update(token.to_le_bytes());
        }
        done = length;
        all.push((length, Key(digest.clone().finalize().into())));
    }
    all.into_iter().rev()
}

fn key(namespace: &str, tokens: &[i32]) -> Option<Key> {
    let mut keys = keys(namespace, tokens, vec![tokens.len()]);
    keys.next().map(|(_, key)| key)
}

/// The states that are kept. Lives on the engine thread.
pub struct PrefixStore {
    memory: Memory,
    dir: Option<Directory>,
}

impl PrefixStore {
    /// A store as configured; none if nothing is to be kept.
    ///
    /// # Errors
    /// The directory can't be made.
    pub fn open(config: &PrefixConfig) -> std::result::Result<Option<Self>, LoadError> {
        if !config.is_on() {
            return Ok(None);
        }
        let dir = match &config.dir {
            Some(dir) => Some(Directory::open(dir, config.dir_bytes)?),
            None => None,
        };
        Ok(Some(Self {
            memory: Memory::new(config.memory_bytes),
            dir,
        }))
    }

    /// The entry that serves the longest part of a prompt.
    pub fn find(&mut self, namespace: &str, prompt: &[i32]) -> Option<Rc<Entry>> {
        let dir = self.dir.as_mut();
        let on_disk = dir.map(|dir| dir.list(namespace)).unwrap_or_default();
        let lengths = self.memory.lengths().chain(on_disk.iter().map(|(n, _)| *n));
        for (length, key) in keys(namespace, prompt, lengths.collect()) {
            if let Some(entry) = self.memory.get(key, &prompt[..length]) {
                return Some(entry);
            }
            let dir = self
                .dir
                .as_mut()
                .filter(|_| on_disk.contains(&(length, key)));
            if let Some(entry) = dir.and_then(|dir| dir.read(namespace, key, &prompt[..length])) {
                let entry = Rc::new(entry);
                self.memory.put(key, entry.clone());
                return Some(entry);
            }
        }
        None
    }

    /// Whether there is an entry of exactly these tokens. In memory, that counts as a use of it.
    pub fn contains(&mut self, namespace: &str, tokens: &[i32]) -> bool {
        let Some(key) = key(namespace, tokens) else {
            return false;
        };
        let dir = self.dir.as_ref();
        self.memory.get(key, tokens).is_some()
            || dir.is_some_and(|dir| dir.contains(namespace, tokens.len(), key))
    }

    /// Keeps an entry.
    pub fn put(&mut self, namespace: &str, entry: Entry) {
        let Some(key) = key(namespace, &entry.tokens) else {
            return;
        };
        if let Some(dir) = &mut self.dir {
            dir.write(namespace, key, &entry);
        }
        self.memory.put(key, Rc::new(entry));
    }

    /// Forgets an entry that turned out to be of no use.
    pub fn remove(&mut self, namespace: &str, entry: &Entry) {
        let Some(key) = key(namespace, &entry.tokens) else {
            return;
        };
        self.memory.remove(key);
        if let Some(dir) = &mut self.dir {
            dir.distrust(
                namespace,
                entry.tokens.len(),
                key,
                "it could not be restored",
            );
        }
    }
}
