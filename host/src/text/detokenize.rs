//! Tokens back to bytes, and bytes to text as they come.
//!
//! Every decoder that is supported says for each token, on its own, which bytes it stands for (but
//! for spaces at the very beginning). So the bytes are worked out once, at load; decoding is then
//! appending bytes and letting out what is complete UTF-8.

use serde_json::Value;

/// The highest id that is accepted: tables are indexed by id, and a file may claim any.
pub(super) const MAX_ID: u32 = (1 << 22) - 1;
/// The most bytes that all tokens together may decode to.
const MAX_BYTES: usize = 256 << 20;
/// What SentencePiece writes instead of a space.
pub(super) const SPACE: char = '\u{2581}';

/// How tokens become bytes.
#[derive(Debug, Default)]
pub(super) struct Rules {
    steps: Vec<Step>,
    /// How many spaces are taken off the beginning of the text.
    strip: usize,
    /// The first token loses all of its spaces (`Metaspace`).
    bare_first: bool,
    /// Whether the steps so far joined the tokens.
    fused: bool,
}

#[derive(Debug)]
enum Step {
    Replace { from: String, to: String },
    ByteFallback,
    ByteLevel,
}

impl Rules {
    /// Tokens are written in the alphabet of byte-level BPE.
    pub(super) fn byte_level() -> Self {
        Self {
            steps: vec![Step::ByteLevel],
            ..Self::default()
        }
    }

    /// SentencePiece with byte tokens; `prefixed` if encoding puts a space before the text.
    pub(super) fn sentencepiece(prefixed: bool) -> Self {
        let spaces = Step::Replace {
            from: SPACE.to_string(),
            to: " ".to_owned(),
        };
        Self {
            steps: vec![Step::ByteFallback, spaces],
            strip: usize::from(prefixed),
            ..Self::default()
        }
    }

    /// The rules of a decoder as in `tokenizer.json`.
    ///
    /// # Errors
    /// What is not supported about it.
    pub(super) fn from_json(decoder: &Value) -> Result<Self, String> {
        let mut rules = Self::default();
        rules.read(decoder)?;
        Ok(rules)
    }

    fn read(&mut self, decoder: &Value) -> Result<(), String> {
        let text = |key: &str| decoder.get(key).and_then(Value::as_str);
        let kind = text("type").unwrap_or("null");
        let unsupported = |what: &str| Err(format!("decoder {kind}: {what} is not supported"));
        match kind {
            "Sequence" => {
                let parts = decoder.get("decoders").and_then(Value::as_array);
                for part in parts.into_iter().flatten() {
                    self.read(part)?;
                }
            }
            "ByteLevel" if self.fused => return unsupported("use after joining"),
            "ByteLevel" => {
                self.steps.push(Step::ByteLevel);
                self.fused = true;
            }
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => self.fused = true,
            "Replace" => {
                let from = decoder.get("pattern").and_then(|p| p.get("String"));
                let (Some(from), Some(to)) = (from.and_then(Value::as_str), text("content")) else {
                    return unsupported("a pattern other than a string");
                };
                // A longer pattern could match across tokens.
                if from.is_empty() || (self.fused && from.chars().count() > 1) {
                    return unsupported("this pattern");
                }
                self.replace(from, to);
            }
            "Metaspace" => {
                self.replace(text("replacement").unwrap_or("\u{2581}"), " ");
                self.bare_first = text("prepend_scheme") != Some("never");
            }
            "Strip" => {
                let count = |key: &str| decoder.get(key).and_then(Value::as_u64).unwrap_or(0);
                if !self.fused || text("content") != Some(" ") || count("stop") != 0 {
                    return unsupported("anything but leading spaces of the whole text");
                }
                self.strip = usize::try_from(count("start")).unwrap_or(usize::MAX);
            }
            _ => return Err(format!("the decoder {kind:.40} is not supported")),
        }
        Ok(())
    }

    fn replace(&mut self, from: &str, to: &str) {
        let (from, to) = (from.to_owned(), to.to_owned());
        self.steps.push(Step::Replace { from, to });
    }

    /// What `token` stands for when it is not the first.
    fn bytes(&self, token: &str) -> Vec<u8> {
        let mut text = token.to_owned();
        for step in &self.steps {
            match step {
                Step::Replace { from, to } => text = text.replace(from, to),
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return vec![byte];
                    }
                }
                Step::ByteLevel => {
                    // A token with other characters was added as plain text.
                    let bytes: Option<Vec<u8>> = text.chars().map(level_byte).collect();
                    return bytes.unwrap_or_else(|| text.into_bytes());
                }
            }
        }
        text.into_bytes()
    }
}

/// The byte that a token like `<0x0A>` stands for.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that a character of the byte-level alphabet stands for.
///
/// Printable characters of Latin-1 are themselves; the other bytes, in order, are the characters
/// from U+0100 on.
fn level_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        c @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(c).ok(),
        c @ 0x100..=0x120 => u8::try_from(c - 0x100).ok(),
        c @ 0x121..=0x142 => u8::try_from(c - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// What every id stands for.
pub(super) struct Table {
    bytes: Vec<u8>,
    /// By id; `None` where the vocabulary has no token.
    entries: Vec<Option<Entry>>,
    rules: Rules,
}

#[derive(Clone, Copy)]
struct Entry {
    start: usize,
    end: usize,
    special: bool,
}

impl Table {
    /// The table of `tokens`: id, text in the vocabulary, whether it is special.
    ///
    /// # Errors
    /// An id is too high, or the tokens are too long.
    pub(super) fn new<'a>(
        rules: Rules,
        tokens: impl IntoIterator<Item = (u32, &'a str, bool)>,
    ) -> Result<Self, String> {
        let (mut bytes, mut entries) = (Vec::new(), Vec::new());
        for (id, token, special) in tokens {
            if id > MAX_ID {
                return Err(format!("token id {id} is above {MAX_ID}"));
            }
            let at = id as usize;
            if entries.len() <= at {
                entries.resize(at + 1, None);
            }
            let start = bytes.len();
            bytes.extend_from_slice(&rules.bytes(token));
            let end = bytes.len();
            if end > MAX_BYTES {
                return Err(format!("the tokens exceed {} MiB", MAX_BYTES >> 20));
            }
            entries[at] = Some(Entry {
                start,
                end,
                special,
            });
        }
        Ok(Self {
            bytes,
            entries,
            rules,
        })
    }

    /// One more than the highest id.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn entry(&self, id: i32) -> Option<Entry> {
        *self.entries.get(usize::try_from(id).ok()?)?
    }

    /// Whether `id` is in the vocabulary.
    pub(super) fn contains(&self, id: i32) -> bool {
        self.entry(id).is_some()
    }

    /// Whether `id` is a special token.
    pub(super) fn is_special(&self, id: i32) -> bool {
        self.entry(id).is_some_and(|entry| entry.special)
    }

    /// The state at the beginning of a text.
    pub(super) fn start(&self) -> Decoding {
        Decoding {
            pending: Vec::new(),
            strip: self.rules.strip,
            bare: self.rules.bare_first,
        }
    }

    /// Appends to `text` what is certain after `id`.
    pub(super) fn push(
        &self,
        decoding: &mut Decoding,
        id: i32,
        skip_special: bool,
        text: &mut String,
    ) {
        let bytes = match self.entry(id) {
            Some(entry) if skip_special && entry.special => return,
            Some(entry) => self.bytes.get(entry.start..entry.end).unwrap_or_default(),
            None => "\u{fffd}".as_bytes(),
        };
        decoding.push(bytes, text);
    }
}

/// Where the decoding of one text has got to.
#[derive(Debug)]
pub(super) struct Decoding {
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
    /// How many leading spaces are still to be taken off.
    strip: usize,
    /// The next token is the first, and loses its spaces.
    bare: bool,
}

impl Decoding {
    fn push(&mut self, mut bytes: &[u8], text: &mut String) {
        if std::mem::take(&mut self.bare) {
            self.pending.extend(bytes.iter().filter(|b| **b != b' '));
            bytes = &[];
        }
        while self.strip > 0
            && let Some((first, rest)) = bytes.split_first()
        {
            if *first == b' ' {
                self.strip -= 1;
                bytes = rest;
            } else {
                self.strip = 0;
            }
        }
        self.pending.extend_from_slice(bytes);
        let done = lossy(&self.pending, text);
        self.pending.drain(..done);
    }

    /// Appends what is still held back: a character cut short becomes U+FFFD.
    pub(super) fn finish(&mut self, text: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends `bytes` to `text` as `String::from_utf8_lossy` would, but for a character that could
/// still be completed. Returns how many bytes were used.
fn lossy(bytes: &[u8], text: &mut String) -> usize {
    let mut at = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        at += chunk.valid().len();
        let invalid = chunk.invalid();
        let last = at + invalid.len() == bytes.len();
        let open = |e: std::str::Utf8Error| e.error_len().is_none();
        if last && std::str::from_utf8(invalid).is_err_and(open) {
            break;
        }
        if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            at += invalid.len();
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn decode(table: &Table, ids: &[i32]) -> String {
        let (mut decoding, mut text) = (table.start(), String::new());
        for id in ids {
            table.push(&mut decoding, *id, false, &mut text);
        }
        decoding.finish(&mut text);
        text
    }

    fn table(rules: Rules, tokens: &[&str]) -> Table {
        Table::new(rules, (0..).zip(tokens).map(|(i, t)| (i, *t, false))).unwrap()
    }

    #[test]
    fn the_byte_alphabet_is_that_of_the_crate() {
        use tokenizers::Decoder;
        use tokenizers::pre_tokenizers::byte_level::ByteLevel;
        let mut seen = [false; 256];
        for c in ByteLevel::alphabet() {
            let byte = level_byte(c).unwrap();
            assert!(!std::mem::replace(&mut seen[usize::from(byte)], true));
            if byte.is_ascii() {
                let theirs = ByteLevel::default().decode(vec![c.to_string()]).unwrap();
                assert_eq!(theirs.as_bytes(), [byte]);
            }
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(
            (0..=0x10_ffff)
                .filter_map(char::from_u32)
                .filter_map(level_byte)
                .count(),
            256
        );
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        for other in ["<0x+A>", "<0x0A", "<0xA>", "<0x0aa>", "<0xä>", ""] {
            assert_eq!(byte_token(other), None);
        }
    }

    #[test]
    fn sentencepiece_spaces_and_bytes() {
        let tokens = ["\u{2581}a", "\u{2581}", "<0xC3>", "<0xA4>", "b"];
        let t = table(Rules::sentencepiece(true), &tokens);
        assert_eq!(decode(&t, &[0, 0, 2, 3, 4]), "a aäb");
        assert_eq!(decode(&t, &[1, 1, 4]), " b");
        assert_eq!(
            decode(&t, &[4, 2, 4, 9, -1, 2]),
            "b\u{fffd}b\u{fffd}\u{fffd}\u{fffd}"
        );
        let t = table(Rules::sentencepiece(false), &tokens);
        assert_eq!(decode(&t, &[0]), " a");
    }

    #[test]
    fn decoders_of_real_files() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let t = table(Rules::from_json(&llama).unwrap(), &["\u{2581}a", "<0x41>"]);
        assert_eq!(decode(&t, &[0, 1, 0]), "aA a");
        let meta =
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"});
        let t = table(Rules::from_json(&meta).unwrap(), &["\u{2581}a\u{2581}"]);
        assert_eq!(decode(&t, &[0, 0]), "a a ");

        for bad in [
            json!(null),
            json!({"type": "WordPiece", "prefix": "##"}),
            json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}),
            json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
            json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
        ] {
            assert!(
                Rules::from_json(&bad)
                    .unwrap_err()
                    .contains("not supported")
            );
        }
    }

    #[test]
    fn ids_without_bounds_are_refused() {
        assert!(Table::new(Rules::byte_level(), [(u32::MAX, "a", false)]).is_err());
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_lossy_text(pieces: Vec<Vec<u8>>) {
            let mut decoding = table(Rules::byte_level(), &[]).start();
            let mut text = String::new();
            for piece in &pieces {
                decoding.push(piece, &mut text);
                prop_assert!(decoding.pending.len() < 4);
            }
            decoding.finish(&mut text);
            let all = pieces.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&all));
        }

        /// Random bytes are rarely almost characters; these are.
        #[test]
        fn also_where_characters_are_cut(
            pieces in prop::collection::vec(prop::sample::select(
                vec![0xe2u8, 0x96, 0x81, 0xf0, 0x9f, 0x98, 0x80, 0xc3, 0xa4, 0x41, 0xed, 0xa0]
            ), 0..40)
        ) {
            let mut decoding = table(Rules::byte_level(), &[]).start();
            let mut text = String::new();
            for byte in &pieces {
                decoding.push(&[*byte], &mut text);
            }
            decoding.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&pieces));
        }
    }
}
