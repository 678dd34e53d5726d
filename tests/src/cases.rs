//! What the tests of refusals share: altered copies of good inputs, and what a refusal looks like.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

/// A copy of a checkpoint of `tests/fixtures/oracle` that may be changed.
pub struct Copy(TempDir);

impl Copy {
    /// Copies all of its files.
    pub fn of(checkpoint: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for entry in std::fs::read_dir(crate::checkpoint(checkpoint)).expect("a checkpoint") {
            let entry = entry.expect("an entry");
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a copy");
        }
        Self(dir)
    }

    /// An empty directory, to be filled.
    pub fn empty() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The directory as an argument.
    pub fn arg(&self) -> &str {
        self.0.path().to_str().expect("a path in UTF-8")
    }

    /// Deletes a file.
    pub fn remove(&self, file: &str) -> &Self {
        std::fs::remove_file(self.path().join(file)).expect("a file to remove");
        self
    }

    /// Writes a file.
    pub fn write(&self, file: &str, content: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.path().join(file), content).expect("a file to write");
        self
    }

    /// Replaces the bytes of a file.
    pub fn edit(&self, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> &Self {
        let mut bytes = std::fs::read(self.path().join(file)).expect("a file to edit");
        change(&mut bytes);
        self.write(file, bytes)
    }

    /// Keeps the tensors of `model.safetensors` that `keep` wants.
    pub fn keep_tensors(&self, keep: impl Fn(&str) -> bool) -> &Self {
        let path = self.path().join("model.safetensors");
        let bytes = std::fs::read(&path).expect("a file of tensors");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        let kept = file.tensors().into_iter().filter(|(name, _)| keep(name));
        safetensors::serialize_to_file(kept, None, &path).expect("the file can be written");
        self
    }

    /// Sets a key of a JSON file, named by its JSON pointer; null removes it.
    pub fn set(&self, file: &str, pointer: &str, value: Value) -> &Self {
        let mut json = crate::json(&self.path().join(file));
        let (parent, key) = pointer.rsplit_once('/').expect("a JSON pointer");
        let parent = json.pointer_mut(parent).and_then(Value::as_object_mut);
        let parent = parent.expect("an object to set a key of");
        match value {
            Value::Null => parent.remove(key),
            value => parent.insert(key.to_owned(), value),
        };
        self.write(file, json.to_string())
    }
}

/// A target with a drafter, through a plugin of this workspace; `more` has the prompt.
pub fn draft_with(plugin: &str, target: &Path, drafter: &Path, more: &[&str]) -> Output {
    let library = crate::plugin(plugin);
    let args = [
        "--plugin",
        crate::text(&library),
        "--model",
        crate::text(target),
        "--drafter",
        crate::text(drafter),
    ];
    crate::run(&[&args[..], more].concat())
}

/// A changed copy of a plugin's library, in a directory of its own.
pub fn altered_library(library: &Path, change: impl FnOnce(&mut Vec<u8>)) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join(library.file_name().expect("a file name"));
    let mut bytes = std::fs::read(library).expect("a library");
    change(&mut bytes);
    std::fs::write(&path, bytes).expect("a copy of the library");
    // As the program names it.
    let path = path.canonicalize().expect("the copy");
    (dir, path)
}

/// Replaces every occurrence of `from` by `to`, of the same length; there is at least one.
pub fn replace(bytes: &mut [u8], from: &str, to: &str) {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    assert_eq!(from.len(), to.len(), "a replacement of the same length");
    let mut found = 0;
    let mut at = 0;
    while let Some(next) = bytes[at..].iter().position(|&b| b == from[0]) {
        at += next;
        if bytes[at..].starts_with(from) {
            bytes[at..at + to.len()].copy_from_slice(to);
            found += 1;
        }
        at += 1;
    }
    assert!(found > 0, "there is no {from:?}");
}

/// What the program wrote to standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A refusal as the user should see it: nothing on standard output, at most three plain lines with
/// all of `says`, and the exit code.
#[track_caller]
pub fn assert_refused(output: &Output, code: i32, says: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty(), "an answer besides {text}");
    for said in says {
        assert!(text.contains(said), "no {said:?} in: {text}");
    }
    assert!(text.lines().count() <= 3, "more than three lines: {text}");
    assert!(text.len() < 2000, "a long message: {text}");
    assert_plain(&text);
}

/// No panic of the program's own, no backtrace, nothing that a terminal would obey.
#[track_caller]
pub fn assert_plain(text: &str) {
    for trace in ["thread '", "backtrace", "RUST_"] {
        assert!(!text.contains(trace), "{text}");
    }
    let control = |c: char| c.is_control() && c != '\n';
    assert!(!text.contains(control), "control characters: {text:?}");
}

/// A path as an argument.
pub fn arg(path: PathBuf) -> String {
    path.into_os_string()
        .into_string()
        .expect("a path in UTF-8")
}

/// The arguments for the Qwen3.5 target, and those for its drafter.
pub fn target_and_drafter() -> (Vec<String>, Vec<String>) {
    let target = vec!["--model".to_owned(), arg(crate::checkpoint("qwen3_5-f32"))];
    let drafter = [
        "--plugin".to_owned(),
        arg(crate::plugin("qwen_mtp")),
        "--drafter".to_owned(),
        arg(crate::checkpoint("qwen3_5_mtp-f32")),
    ];
    let drafted = target.iter().cloned().chain(drafter).collect();
    (target, drafted)
}

/// Arguments, and more of them.
pub fn with<'a>(base: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    base.iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect()
}

/// What the program wrote to standard output, when it succeeded.
#[track_caller]
pub fn text(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).expect("text in UTF-8")
}
