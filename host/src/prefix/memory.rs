//! The entries in memory: those that were used last, as far as they fit.

use std::collections::HashMap;
use std::rc::Rc;

use super::{Entry, Key};

pub(super) struct Memory {
    entries: HashMap<Key, Kept>,
    limit: u64,
    bytes: u64,
    clock: u64,
}

struct Kept {
    entry: Rc<Entry>,
    bytes: u64,
    used: u64,
}

impl Memory {
    pub fn new(limit: u64) -> Self {
        Self {
            entries: HashMap::new(),
            limit,
            bytes: 0,
            clock: 0,
        }
    }

    /// How many tokens entries have.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.entries.values().map(|kept| kept.entry.tokens.len())
    }

    /// An entry, which is used now.
    pub fn get(&mut self, key: Key, tokens: &[i32]) -> Option<Rc<Entry>> {
        self.clock += 1;
        let kept = self.entries.get_mut(&key)?;
        if kept.entry.tokens != tokens {
            return None;
        }
        kept.used = self.clock;
        Some(kept.entry.clone())
    }

    /// Takes an entry in, in place of those that were used longest ago. One that is larger than everything
    /// is not kept.
    pub fn put(&mut self, key: Key, entry: Rc<Entry>) {
        let bytes = entry.bytes();
        if bytes > self.limit {
            return;
        }
        self.remove(key);
        while self.bytes + bytes > self.limit {
            let oldest = self.entries.iter().min_by_key(|(_, kept)| kept.used);
            let Some(&oldest) = oldest.map(|(key, _)| key) else {
                break;
            };
            self.remove(oldest);
        }
        self.clock += 1;
        self.bytes += bytes;
        let used = self.clock;
        self.entries.insert(key, Kept { entry, bytes, used });
    }

    pub fn remove(&mut self, key: Key) {
        if let Some(kept) = self.entries.remove(&key) {
            self.bytes -= kept.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::key;
    use super::*;
    use plugin_api::RowState;

    fn entry(tokens: &[i32]) -> Rc<Entry> {
        let state = RowState::new("x/1", tokens.len() as u32 - 1);
        Rc::new(Entry::new(tokens.to_vec(), state, None).unwrap())
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        // Without tensors an entry takes four bytes a token.
        let mut memory = Memory::new(36);
        let entries = [entry(&[1, 2, 3]), entry(&[1, 2, 4]), entry(&[1, 5, 6])];
        let keys: Vec<Key> = entries
            .iter()
            .map(|e| key("n", &e.tokens).unwrap())
            .collect();
        for (key, entry) in keys.iter().zip(&entries) {
            memory.put(*key, entry.clone());
        }
        assert!(memory.get(keys[0], &[1, 2, 3]).is_some());
        assert!(memory.get(keys[0], &[1, 2, 9]).is_none(), "other tokens");
        let new = entry(&[7, 7]);
        memory.put(key("n", &new.tokens).unwrap(), new);
        assert!(memory.get(keys[1], &[1, 2, 4]).is_none(), "the oldest");
        assert!(memory.get(keys[0], &[1, 2, 3]).is_some());
        assert_eq!(memory.bytes, 32);
        let large = entry(&[0; 10]);
        memory.put(key("n", &large.tokens).unwrap(), large);
        assert_eq!(memory.bytes, 32, "too large to be kept");
        assert_ne!(
            key("n", &[1, 2]),
            key("m", &[1, 2]),
            "a namespace of its own"
        );
    }
}
