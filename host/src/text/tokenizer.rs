//! A checkpoint's tokenizer, from a directory or from a GGUF file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerImpl,
};

use super::detokenize::{Decoding, MAX_ID, Rules, Table};
use super::special::Special;
use super::spm::Spm;
use super::{ChatTemplate, GgufVocab, TextError, files, guarded, one_line};
use crate::error::LoadError;

/// Turns text into tokens and back, as the checkpoint it comes from does.
///
/// Immutable, `Send + Sync`; wrap it in an `Arc` to share it.
pub struct Tokenizer {
    engine: Engine,
    table: Table,
    digest: String,
    /// What encoding with special tokens begins and ends with, if the engine doesn't see to it.
    begin: Option<i32>,
    end: Option<i32>,
    eos: Vec<i32>,
    chat: Option<ChatTemplate>,
}

/// What turns text into tokens.
pub(super) enum Engine {
    Crate(Box<tokenizers::Tokenizer>),
    Spm(
        Box<
            TokenizerImpl<
                Spm,
                NormalizerWrapper,
                PreTokenizerWrapper,
                PostProcessorWrapper,
                DecoderWrapper,
            >,
        >,
    ),
}

impl Engine {
    fn encode(&self, text: &str, add_special: bool) -> tokenizers::Result<Vec<u32>> {
        let encoding = match self {
            Self::Crate(tokenizer) => tokenizer.encode_fast(text, add_special)?,
            Self::Spm(tokenizer) => tokenizer.encode_fast(text, add_special)?,
        };
        Ok(encoding.get_ids().to_vec())
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and from the files beside it the tokens that end a text
    /// (`generation_config.json`, else `config.json`; and `eos_token`) and the chat template
    /// (`chat_template.jinja`, else the one in `tokenizer_config.json`).
    ///
    /// # Errors
    /// `tokenizer.json` is missing, one of the files can't be read or is not valid, or the
    /// tokenizer is of a kind that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("tokenizer.json");
        let Some(bytes) = files::read_optional(&path, files::MAX_TOKENIZER)? else {
            return Err(LoadError::missing(&path, "there is no such file")
                .remedy("copy tokenizer.json from the original model into the directory"));
        };
        let special = Special::from_dir(dir)?;
        let built = guarded(|| from_json(&bytes));
        let (engine, table, digest) = built
            .unwrap_or_else(|| Err(Refusal::Malformed("it makes the reader fail".to_owned())))
            .map_err(|refusal| match refusal {
                Refusal::Malformed(what) => LoadError::malformed(&path, what),
                Refusal::Unsupported(what) => LoadError::unsupported(&path, what),
            })?;
        let id = |name: &str| {
            let id = engine.token_to_id(special.tokens.get(name)?)?;
            i32::try_from(id).ok()
        };
        let begin = id("bos_token").filter(|_| special.add_bos);
        let mut eos = special.eos_ids;
        eos.extend(id("eos_token"));
        Ok(Self {
            engine: Engine::Crate(engine),
            table,
            digest,
            begin,
            end: None,
            eos: sorted(eos),
            chat: special
                .chat_template
                .map(|source| ChatTemplate::new(&source, special.tokens)),
        })
    }

    /// Builds the tokenizer of the GGUF file at `path`.
    ///
    /// # Errors
    /// The vocabulary is not one: merges of tokens that don't exist, too long tokens.
    pub fn from_gguf(path: &Path, vocab: GgufVocab) -> Result<Self, LoadError> {
        let malformed = |what: &str| LoadError::malformed(path, format!("tokenizer: {what}"));
        let engine = guarded(|| vocab.engine())
            .unwrap_or_else(|| Err("it can't be built".into()))
            .map_err(|e| malformed(&one_line(&e.to_string())))?;
        let tokens = vocab
            .table()
            .map(|(id, t, kind)| (id, t, kind.is_special()));
        let table = Table::new(vocab.rules(), tokens).map_err(|e| malformed(&e))?;
        let digest = digest(vocab.table().map(|(id, token, _)| (id, token)));
        Ok(Self {
            engine,
            table,
            digest,
            begin: vocab.bos.filter(|_| vocab.add_bos),
            end: vocab.eos.filter(|_| vocab.add_eos),
            eos: sorted(vocab.eos_ids),
            chat: vocab
                .chat_template
                .map(|source| ChatTemplate::new(&source, vocab.names)),
        })
    }

    /// The tokens of `text`. Special tokens that are written out in it become themselves.
    ///
    /// With `add_special`, the tokens that the checkpoint wants around a text are added, above all
    /// the one at the beginning; a rendered [`ChatTemplate`] has them already.
    ///
    /// # Errors
    /// The text has a character that the vocabulary can't express, or the tokenizer is broken.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<i32>, TextError> {
        let ids = guarded(|| self.engine.encode(text, add_special))
            .unwrap_or_else(|| Err("it fails on this text".into()))
            .map_err(|e| TextError::Encode(one_line(&e.to_string())))?;
        let mut tokens = Vec::with_capacity(ids.len() + 2);
        for id in ids {
            // The file says which tokens are added, so they may be any.
            let known = i32::try_from(id).ok().filter(|id| self.table.contains(*id));
            let unknown = || TextError::Encode(format!("it gives {id}, which is not a token"));
            tokens.push(known.ok_or_else(unknown)?);
        }
        if add_special {
            if let Some(begin) = self.begin.filter(|begin| tokens.first() != Some(begin)) {
                tokens.insert(0, begin);
            }
            tokens.extend(self.end);
        }
        Ok(tokens)
    }

    /// The text of `ids`; without special tokens if `skip_special`. Bytes that are not UTF-8, and
    /// ids outside the vocabulary, give U+FFFD.
    pub fn decode(&self, ids: &[i32], skip_special: bool) -> String {
        let (mut decoding, mut text) = (self.start_decoding(), String::new());
        for id in ids {
            self.decode_one(&mut decoding, *id, skip_special, &mut text);
        }
        decoding.finish(&mut text);
        text
    }

    pub(super) fn start_decoding(&self) -> Decoding {
        self.table.start()
    }

    /// Appends to `text` what is certain after `id`.
    pub(super) fn decode_one(
        &self,
        decoding: &mut Decoding,
        id: i32,
        skip_special: bool,
        text: &mut String,
    ) {
        self.table.push(decoding, id, skip_special, text);
    }

    /// One more than the highest id. A model may have more rows, as padding.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// SHA-256 of all ids with their tokens, in hexadecimal: the same for two tokenizers whose ids
    /// mean the same, whatever files they come from.
    pub fn table_digest(&self) -> String {
        self.digest.clone()
    }

    /// The tokens that end a text, ascending.
    pub fn eos_ids(&self) -> &[i32] {
        &self.eos
    }

    /// The chat template, if the checkpoint has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref()
    }

    /// Whether `id` is a special token, which is no part of what is said.
    pub fn is_special(&self, id: i32) -> bool {
        self.table.is_special(id)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("digest", &self.digest)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// Why a `tokenizer.json` is not accepted.
enum Refusal {
    Malformed(String),
    Unsupported(String),
}

/// Reads a `tokenizer.json`.
fn from_json(bytes: &[u8]) -> Result<(Box<tokenizers::Tokenizer>, Table, String), Refusal> {
    let mut engine = tokenizers::Tokenizer::from_bytes(bytes)
        .map_err(|e| Refusal::Malformed(one_line(&e.to_string())))?;
    // Settings of whoever saved the file, not of the model.
    let _ = engine.with_truncation(None);
    engine.with_padding(None);
    if let ModelWrapper::BPE(bpe) = engine.get_model()
        && bpe.dropout.is_some_and(|rate| rate > 0.0)
    {
        let what = "a model with dropout, which encodes at random,";
        return Err(Refusal::Unsupported(format!("{what} is not supported")));
    }
    let decoder = serde_json::to_value(engine.get_decoder()).unwrap_or(Value::Null);
    let rules = Rules::from_json(&decoder).map_err(Refusal::Unsupported)?;

    let mut tokens: BTreeMap<u32, String> = BTreeMap::new();
    for (token, id) in engine.get_vocab(true) {
        if id > MAX_ID {
            return Err(Refusal::Malformed(format!(
                "token id {id} is above {MAX_ID}"
            )));
        }
        if let Some(other) = tokens.insert(id, token) {
            let what = format!("id {id} has two tokens, one is {other:.40?}");
            return Err(Refusal::Malformed(what));
        }
    }
    let added = engine.get_added_tokens_decoder();
    // An added token is decoded in the form that normalizing gave it.
    let written: Vec<(u32, String, bool)> = tokens
        .iter()
        .map(|(id, token)| {
            let special = added.get(id).is_some_and(|token| token.special);
            let text = engine.id_to_token(*id).unwrap_or_else(|| token.clone());
            (*id, text, special)
        })
        .collect();
    let entries = written
        .iter()
        .map(|(id, text, special)| (*id, text.as_str(), *special));
    let table = Table::new(rules, entries).map_err(Refusal::Malformed)?;
    let digest = digest(tokens.iter().map(|(id, token)| (*id, token.as_str())));
    Ok((Box::new(engine), table, digest))
}

/// The digest of a table that is ascending by id.
fn digest<'a>(table: impl Iterator<Item = (u32, &'a str)>) -> String {
    let mut hash = Sha256::new();
    for (id, token) in table {
        hash.update(id.to_le_bytes());
        hash.update((token.len() as u64).to_le_bytes());
        hash.update(token);
    }
    super::hex(&hash.finalize())
}

fn sorted(mut ids: Vec<i32>) -> Vec<i32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
