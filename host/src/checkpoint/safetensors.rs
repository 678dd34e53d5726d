//! Safetensors: which files of a directory count, and what their headers say.
//!
//! The header's own rules (ranges contiguous from 0, lengths that fit shape and type) are checked by the
//! `safetensors` crate; the sizes around it are checked here, because that crate's whole-file check adds a
//! length out of the header without a guard, which is a panic where overflow checks are on.

use std::collections::btree_map;
use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::{Component, Path};

use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use serde_json::Value;

use super::{Bytes, Contents, DType, Entry, Quoted, TensorData, read_json_object};
use crate::error::LoadError;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// The index of the largest models has about 9 MB.
const MAX_INDEX: u64 = 64 << 20;
/// A header takes some 100 bytes a tensor, and parsing it takes several times its size in memory.
const MAX_HEADER: u64 = 32 << 20;
/// Characters of a parser's message that are shown.
const MAX_MESSAGE: usize = 240;
const DAMAGED: &str = "the file is damaged or incomplete: download it again";

type Tensors = BTreeMap<String, Entry>;

/// All tensors of the checkpoint in `dir`, by name.
pub(super) fn open_dir(dir: &Path) -> Result<Tensors, LoadError> {
    let index = dir.join(INDEX);
    if let Some(value) = read_json_object(&index, MAX_INDEX)? {
        return open_indexed(dir, &index, &value);
    }
    let mut tensors = Tensors::new();
    for file in unindexed(dir)? {
        for (name, entry) in open_file(&dir.join(&file))? {
            match tensors.entry(name) {
                btree_map::Entry::Vacant(slot) => slot.insert(entry),
                btree_map::Entry::Occupied(slot) => {
                    let what = format!(
                        "tensor {} is in {file} and in another file before it",
                        Quoted(slot.key())
                    );
                    return Err(LoadError::malformed(dir, what)
                        .remedy("remove the files that are not part of this checkpoint"));
                }
            };
        }
    }
    Ok(tensors)
}

/// The weight files of a directory without an index, sorted.
fn unindexed(dir: &Path) -> Result<Vec<String>, LoadError> {
    if dir.join(SINGLE).is_file() {
        return Ok(vec![SINGLE.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| LoadError::new(dir, e))? {
        let name = entry.map_err(|e| LoadError::new(dir, e))?.file_name();
        // `consolidated*` is the same weights once more, in the publisher's layout; dot files are debris.
        if let Some(name) = name.to_str()
            && name.ends_with(".safetensors")
            && !name.starts_with("consolidated")
            && !name.starts_with('.')
        {
            files.push(name.to_owned());
        }
    }
    if files.iter().any(|name| name.starts_with("model")) {
        files.retain(|name| name.starts_with("model"));
    }
    files.sort();
    if files.is_empty() {
        return Err(
            LoadError::missing(dir, "there is no *.safetensors file in it")
                .remedy("download the weights beside config.json, or pass a .gguf file"),
        );
    }
    Ok(files)
}

/// The tensors that the index lists, each from the shard it names.
fn open_indexed(dir: &Path, index: &Path, value: &Value) -> Result<Tensors, LoadError> {
    let Some(map) = value.get("weight_map").and_then(Value::as_object) else {
        return Err(LoadError::malformed(index, "it has no \"weight_map\" object").remedy(DAMAGED));
    };
    let mut shards: BTreeMap<&str, Tensors> = BTreeMap::new();
    let mut tensors = Tensors::new();
    for (name, shard) in map {
        let tensor = Quoted(name);
        let shard = shard.as_str().ok_or_else(|| {
            LoadError::malformed(
                index,
                format!("the shard of tensor {tensor} is not a string"),
            )
        })?;
        let quoted = Quoted(shard);
        if !is_plain_file_name(shard) {
            let what = format!("shard {quoted} of tensor {tensor} is not a plain file name");
            return Err(LoadError::malformed(index, what));
        }
        let there = match shards.entry(shard) {
            btree_map::Entry::Occupied(slot) => slot.into_mut(),
            btree_map::Entry::Vacant(slot) => {
                let path = dir.join(shard);
                // A link of a download cache whose target is gone counts as missing too.
                if std::fs::metadata(&path).is_err_and(|e| e.kind() == ErrorKind::NotFound) {
                    let what = format!("it lists shard {quoted}, which is not in the directory");
                    return Err(LoadError::missing(index, what)
                        .remedy("the download is incomplete: fetch the missing shard"));
                }
                slot.insert(open_file(&path)?)
            }
        };
        let entry = there.remove(name).ok_or_else(|| {
            let what = format!("it lists tensor {tensor} in {quoted}, which does not have it");
            LoadError::missing(index, what)
                .remedy("index and shards are of different versions: download both again")
        })?;
        tensors.insert(name.clone(), entry);
    }
    Ok(tensors)
}

/// No directory, no parent, no root: an index must not reach out of its directory.
fn is_plain_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let plain = matches!(parts.next(), Some(Component::Normal(part)) if part == name);
    plain && parts.next().is_none() && !name.contains(['\\', '\0'])
}

fn open_file(path: &Path) -> Result<Tensors, LoadError> {
    read(path, &Bytes::map(path)?).map(|(tensors, _)| tensors)
}

/// All tensors of a file that is not a checkpoint's, and what its header says beside them. `bytes` are all
/// of `path`; the file itself is not looked at.
pub(crate) fn parse(path: &Path, bytes: Vec<u8>) -> Result<(Stored, Notes), LoadError> {
    let (tensors, notes) = read(path, &Bytes::from(bytes))?;
    let stored = tensors.into_iter().filter_map(|(name, entry)| match entry {
        Entry::Stored(tensor) => Some((name, tensor)),
        Entry::Refused { .. } | Entry::Converted(_) => None,
    });
    Ok((stored.collect(), notes))
}

/// Tensors by name.
pub(crate) type Stored = BTreeMap<String, TensorData>;

/// The `__metadata__` of a header.
pub(crate) type Notes = HashMap<String, String>;

/// The tensors of one safetensors file whose contents are `file`.
fn read(path: &Path, file: &Bytes) -> Result<(Tensors, Notes), LoadError> {
    let malformed = |what: String| LoadError::malformed(path, what).remedy(DAMAGED);
    let Some((length, _)) = file.split_first_chunk::<8>() else {
        return Err(malformed(format!("only {} bytes long", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    let rest = (file.len() - 8) as u64;
    if length > rest {
        let what = format!("its header has {length} bytes, but {rest} follow");
        return Err(malformed(what));
    }
    if length > MAX_HEADER {
        let what = format!("its header has {length} bytes; the limit is {MAX_HEADER}");
        return Err(malformed(what));
    }
    // Fits: it is at most the file's length.
    let start = 8 + length as usize;
    let header: Metadata = serde_json::from_slice(&file[8..start])
        .map_err(|e| malformed(format!("its header is invalid: {}", one_line(&e))))?;
    let (described, present) = (header.data_len(), file.len() - start);
    if described != present {
        let what = format!("it has {present} bytes of tensors, its header describes {described}");
        return Err(malformed(what));
    }
    let mut tensors = Tensors::new();
    for (name, info) in header.tensors() {
        let (from, to) = info.data_offsets;
        // The ranges were checked to tile 0..described, so both lookups hold.
        let bytes = start
            .checked_add(from)
            .zip(start.checked_add(to))
            .and_then(|(from, to)| file.slice(from..to))
            .ok_or_else(|| malformed(format!("tensor {} lies outside the file", Quoted(&name))))?;
        let entry = match element(info.dtype) {
            Some(dtype) => Entry::Stored(TensorData {
                dtype,
                shape: info.shape.clone(),
                contents: Contents::Stored(bytes),
            }),
            None => Entry::Refused {
                dtype: info.dtype.to_string(),
                bytes: bytes.len() as u64,
            },
        };
        tensors.insert(name, entry);
    }
    Ok((tensors, header.metadata().clone().unwrap_or_default()))
}

/// The parser's message, which may quote the header, without its control characters and unbounded length.
fn one_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let chars = text.chars().filter(|c| !c.is_control());
    chars.take(MAX_MESSAGE).collect()
}

/// Our name of an element type, `None` for those nothing computes with.
fn element(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::U16 => DType::U16,
        Dtype::I16 => DType::I16,
        Dtype::U32 => DType::U32,
        Dtype::I32 => DType::I32,
        Dtype::U64 => DType::U64,
        Dtype::I64 => DType::I64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Checkpoint;
    use super::*;
    use ::safetensors::tensor::TensorView;
    use proptest::prelude::*;

    /// A file with one tensor per name, each `[2, 3]` of `dtype`, filled with `fill`.
    fn file(names: &[&str], dtype: Dtype, fill: u8) -> Vec<u8> {
        let data = vec![fill; 6 * dtype.bitsize() / 8];
        let views = names.iter().map(|name| {
            let view = TensorView::new(dtype, vec![2, 3], &data).unwrap();
            (name.to_string(), view)
        });
        ::safetensors::serialize(views, None).unwrap()
    }

    fn header(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn dir(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        for (name, bytes) in files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    }

    fn error(dir: &tempfile::TempDir) -> String {
        Checkpoint::open(dir.path()).unwrap_err().to_string()
    }

    fn names(dir: &tempfile::TempDir) -> Vec<String> {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        checkpoint.names().map(str::to_owned).collect()
    }

    /// Whether the file could be read; what was read must then be what the header says.
    fn reads(bytes: Vec<u8>) -> bool {
        let Ok((tensors, _)) = read(Path::new("x"), &bytes.into()) else {
            return false;
        };
        for entry in tensors.values() {
            if let Entry::Stored(tensor) = entry {
                let elements: usize = tensor.shape.iter().product();
                assert_eq!(tensor.to_vec().len(), elements * tensor.dtype.size());
            }
        }
        true
    }

    fn refusal(bytes: Vec<u8>) -> String {
        let error = read(Path::new("x"), &bytes.into()).unwrap_err().to_string();
        assert!(error.lines().count() <= 3 && error.len() < 600, "{error}");
        error
    }

    #[test]
    fn a_single_file_is_read() {
        let d = dir(&[("model.safetensors", &file(&["b", "a"], Dtype::F16, 7))]);
        let checkpoint = Checkpoint::open(d.path()).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.bytes(), 24);
        assert!(checkpoint.tensor("c").is_none() && checkpoint.gguf().is_none());
        let tensor = checkpoint.tensor("a").unwrap().unwrap();
        drop(checkpoint);
        assert_eq!(tensor.to_vec(), [7; 12]);
        assert_eq!((tensor.dtype, tensor.shape), (DType::F16, vec![2, 3]));
    }

    #[test]
    fn without_an_index_the_right_files_count() {
        let (one, two) = (file(&["a"], Dtype::U8, 1), file(&["b"], Dtype::U8, 1));
        let d = dir(&[("model-1.safetensors", &one), ("other.safetensors", &two)]);
        assert_eq!(names(&d), ["a"]);
        let d = dir(&[("x.safetensors", &one), ("y.safetensors", &two)]);
        assert_eq!(names(&d), ["a", "b"]);
        let d = dir(&[("x.safetensors", &one), ("consolidated.safetensors", &two)]);
        assert_eq!(names(&d), ["a"]);
        let d = dir(&[("x.safetensors", &one), ("y.safetensors", &one)]);
        assert!(error(&d).contains("\"a\" is in y.safetensors and in another"));
    }

    #[test]
    fn the_index_rules() {
        let (one, two) = (
            file(&["a", "extra"], Dtype::U8, 1),
            file(&["b"], Dtype::U8, 2),
        );
        let index = |map: &str| format!("{{\"weight_map\":{map}}}").into_bytes();
        let with = |map: &str| dir(&[("1.st", &one), ("2.st", &two), (INDEX, &index(map))]);
        assert_eq!(names(&with(r#"{"a":"1.st","b":"2.st"}"#)), ["a", "b"]);
        let missing = error(&with(r#"{"a":"3.st"}"#));
        assert!(
            missing.contains(INDEX) && missing.contains("3.st"),
            "{missing}"
        );
        assert!(missing.contains("incomplete"), "{missing}");
        assert!(error(&with(r#"{"b":"1.st"}"#)).contains("does not have it"));
        for outside in [
            "../1.st",
            "/etc/passwd",
            "..",
            "",
            "./1.st",
            "d/1.st",
            "1.st/",
        ] {
            let message = error(&with(&format!(r#"{{"a":"{outside}"}}"#)));
            assert!(message.contains("plain file name"), "{message}");
        }
        assert!(error(&with("[]")).contains("weight_map"));
        assert!(error(&with(r#"{"a":1}"#)).contains("not a string"));
    }

    #[test]
    fn an_element_type_is_refused_only_when_asked_for() {
        let d = dir(&[("model.safetensors", &file(&["a"], Dtype::F8_E4M3, 1))]);
        let checkpoint = Checkpoint::open(d.path()).unwrap();
        let message = checkpoint.tensor("a").unwrap().unwrap_err().to_string();
        assert!(
            message.contains("\"a\"") && message.contains("F8_E4M3"),
            "{message}"
        );
    }

    #[test]
    fn of_a_name_in_two_shards_the_index_picks_one() {
        let (one, two) = (file(&["a"], Dtype::U8, 1), file(&["a"], Dtype::U8, 2));
        let index = br#"{"weight_map":{"a":"2.st"}}"#;
        let d = dir(&[("1.st", &one), ("2.st", &two), (INDEX, index)]);
        let checkpoint = Checkpoint::open(d.path()).unwrap();
        assert_eq!(checkpoint.tensor("a").unwrap().unwrap().to_vec(), [2; 6]);
    }

    /// The layout of the Hugging Face cache: snapshot entries are links to blobs without an extension.
    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        use std::os::unix::fs::symlink;
        let shard = file(&["a"], Dtype::U8, 1);
        let index = br#"{"weight_map":{"a":"1.st"}}"#;
        let blobs = dir(&[("blob", &shard), ("index", index)]);
        let blob = |name: &str| blobs.path().join(name);
        let snapshot = tempfile::tempdir().unwrap();
        let link = |from: &str, to: &str| symlink(blob(from), snapshot.path().join(to)).unwrap();
        link("config.json", "config.json");
        link("index", INDEX);
        link("blob", "1.st");
        assert_eq!(names(&snapshot), ["a"]);
        std::fs::remove_file(blob("blob")).unwrap();
        assert!(error(&snapshot).contains("\"1.st\", which is not in the directory"));
    }

    #[test]
    fn an_index_is_bounded() {
        let d = dir(&[(SINGLE, &file(&["a"], Dtype::U8, 1))]);
        let index = std::fs::File::create(d.path().join(INDEX)).unwrap();
        index.set_len(MAX_INDEX + 1).unwrap();
        assert!(error(&d).contains("larger than 64 MiB"));
    }

    #[test]
    fn hostile_header_lengths_are_refused() {
        let claim = |length: u64, rest: usize| {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.resize(8 + rest, b' ');
            refusal(bytes)
        };
        assert!(claim(u64::MAX, 2).contains("has 18446744073709551615 bytes, but 2 follow"));
        assert!(claim(3, 2).contains("has 3 bytes, but 2 follow"));
        assert!(claim(0, 2).contains("header is invalid"));
        let limit = MAX_HEADER as usize;
        assert!(claim(MAX_HEADER + 1, limit + 1).contains("the limit is"));
        let d = dir(&[(SINGLE, b"")]);
        assert!(error(&d).contains("only 0 bytes long"));
    }

    #[test]
    fn hostile_headers_are_refused() {
        let max = usize::MAX;
        let of = |dtype: &str, shape: &str, from: usize, to: usize| {
            let text = format!(
                r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#
            );
            header(&text, 8)
        };
        let one = |shape: &str, from: usize, to: usize| of("U8", shape, from, to);
        assert!(reads(one("[2,4]", 0, 8)));
        // A length that does not fit the shape; a gap; past the end; products that overflow.
        refusal(one("[2,3]", 0, 8));
        refusal(one("[1]", 4, 5));
        refusal(one("[9]", 0, 9));
        refusal(one(&format!("[{max}]"), 0, max));
        refusal(one(&format!("[{max},2]"), 0, 8));
        assert!(reads(of("F64", "[1]", 0, 8)));
        refusal(of("F64", &format!("[{}]", max / 64 + 2), 0, 8));
        refusal(header(&"[".repeat(100_000), 0));
        let pair = |a: &str, b: &str| {
            let text = format!(
                r#"{{"a":{{"dtype":"U8","shape":[8],"data_offsets":{a}}},
                    "b":{{"dtype":"U8","shape":[8],"data_offsets":{b}}}}}"#
            );
            header(&text, 16)
        };
        assert!(reads(pair("[0,8]", "[8,16]")));
        refusal(pair("[0,8]", "[0,8]"));
        refusal(pair("[0,8]", "[4,12]"));
        refusal(pair("[8,0]", "[8,16]"));
        // What the parser quotes of the header reaches the message cut and on one line.
        let dtype = "\\n\\u001b".repeat(10_000);
        let text = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[],"data_offsets":[0,0]}}}}"#);
        assert!(refusal(header(&text, 0)).contains("header is invalid"));
    }

    #[test]
    fn truncation_is_an_error_at_every_length() {
        let whole = file(&["a", "b", "c"], Dtype::F32, 3);
        assert!((0..whole.len()).all(|length| !reads(whole[..length].to_vec())));
    }

    proptest! {
        #[test]
        fn damage_never_panics(damage in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
            let mut bytes = file(&["a", "b"], Dtype::U32, 0);
            let len = bytes.len();
            for (at, byte) in damage {
                bytes[at % len] = byte;
            }
            reads(bytes);
        }

        /// Bytes at random rarely leave the JSON valid; numbers at random do.
        #[test]
        fn numbers_never_panic(
            shape in prop::collection::vec(prop_oneof![0usize..4, any::<usize>()], 0..4),
            from in prop_oneof![0usize..17, any::<usize>()],
            to in prop_oneof![0usize..17, any::<usize>()],
            dtype in prop::sample::select(vec!["U8", "F4", "BF16", "F64", "X"]),
        ) {
            let text = format!(
                r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}}}"#
            );
            reads(header(&text, 16));
        }
    }
}
