//! The plugin ABI is frozen: what it is was written down for each version, in `plugin-api/abi`, and a change needs
//! a new version and a line in the changelog.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mlxhost_tests::layouts::{broken_promises, describe, difference};
use mlxhost_tests::root;
use plugin_api::abi::{API_VERSION, MIN_API_VERSION};
use sha2::{Digest, Sha256};

/// Set to write down the ABI of a version that is not released yet.
const RECORD: &str = "MLXHOST_RECORD_ABI";

/// Of every version that changed the ABI: a file of it, listed with its digest as `sha256sum` does.
const SUMS: &str = "SHA256SUMS";

fn records_dir() -> PathBuf {
    root().join("plugin-api/abi")
}

/// Major and minor version, by which records go: a patch version can't change the ABI.
fn minor(version: &str) -> (u64, u64) {
    let mut numbers = version.split('.').map(|n| n.parse().expect("a number"));
    let mut next = || numbers.next().expect("major.minor");
    (next(), next())
}

fn file((major, minor): (u64, u64)) -> String {
    format!("{major}.{minor}.txt")
}

fn records() -> BTreeMap<(u64, u64), String> {
    let mut records = BTreeMap::new();
    for entry in std::fs::read_dir(records_dir()).expect("plugin-api/abi") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let text = std::fs::read_to_string(&path).expect("a record");
            records.insert(minor(stem.expect("a version")), text);
        }
    }
    records
}

fn sums(records: &BTreeMap<(u64, u64), String>) -> String {
    let line = |(version, text): (&(u64, u64), &String)| {
        let digest = Sha256::digest(text.as_bytes());
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}  {}\n", file(*version))
    };
    records.iter().map(line).collect()
}

/// The heading of a version in the changelog's part on the plugin API, and what stands below.
fn changes(version: &str) -> Option<(String, String)> {
    let changelog = std::fs::read_to_string(root().join("CHANGELOG.md")).expect("the changelog");
    let (_, part) = changelog
        .split_once("\n## Plugin API\n")
        .expect("a part on the plugin API");
    let part = part.split("\n## ").next().unwrap_or(part);
    let of_version = part
        .split("\n### ")
        .find(|text| text.starts_with(&format!("[{version}]")))?;
    let (heading, below) = of_version.split_once('\n')?;
    Some((heading.to_owned(), below.to_owned()))
}

/// Released versions have a date in the changelog.
fn is_released(version: &str) -> bool {
    let heading = changes(version)
        .map(|(heading, _)| heading)
        .unwrap_or_default();
    let dated = heading
        .split_once(" - ")
        .map(|(_, date)| date.starts_with(|c: char| c.is_ascii_digit()));
    dated.unwrap_or(false)
}

#[test]
fn the_abi_is_the_one_that_was_written_down() {
    let this = minor(API_VERSION);
    let now = format!(
        "# The plugin ABI {}.{} on 64-bit machines. Written by tests/tests/abi.rs; see docs/abi.md.\n\n{}",
        this.0,
        this.1,
        describe()
    );
    let mut records = records();
    let first = format!("{}.{}.0", this.0, this.1);
    let released = is_released(&first) && records.contains_key(&this);
    if std::env::var_os(RECORD).is_some() && !released {
        records.insert(this, now.clone());
        std::fs::write(records_dir().join(file(this)), &now).expect("the record can be written");
        std::fs::write(records_dir().join(SUMS), sums(&records)).expect("so can its digest");
    }
    let (last, text) = records.range(..=this).next_back().expect("a record");
    let difference = difference(text, &now);
    if difference.is_empty() {
        return;
    }
    let (old, what_to_do) = (
        file(*last),
        match released {
            true => {
                "This version is released, its ABI fixed: raise the minor version in plugin-api/Cargo.toml (the \
                 major one, if more than slots, codes and types were added), say so in CHANGELOG.md, and run this \
                 test again with"
            }
            false => "Say so in CHANGELOG.md, and run this test again with",
        },
    );
    panic!(
        "the ABI is not that of plugin-api/abi/{old}:\n\n{difference}\n{what_to_do} {RECORD}=1 \
         (docs/abi.md has the rules)"
    );
}

#[test]
fn what_was_written_down_stays_and_only_grows_within_a_major_version() {
    let records = records();
    let listed = std::fs::read_to_string(records_dir().join(SUMS)).expect("the list of digests");
    assert_eq!(
        listed,
        sums(&records),
        "a file of plugin-api/abi was changed by hand: take it back from the release"
    );
    for ((old, old_text), (new, new_text)) in records.iter().zip(records.iter().skip(1)) {
        if old.0 == new.0 {
            let broken = broken_promises(old_text, new_text);
            assert!(
                broken.is_empty(),
                "{} after {}: {broken:?}",
                file(*new),
                file(*old)
            );
        }
    }
}

#[test]
fn the_changelog_tells_of_every_version_of_the_abi() {
    let versions = records()
        .into_keys()
        .map(|(major, minor)| format!("{major}.{minor}.0"));
    for version in versions.chain([API_VERSION.to_owned()]) {
        let said = changes(&version)
            .map(|(_, below)| below)
            .unwrap_or_default();
        assert!(
            said.lines().any(|line| line.starts_with("- ")),
            "CHANGELOG.md says nothing of plugin API {version}"
        );
    }
    // A plugin would claim to run where nothing was promised.
    let [this, oldest] = [API_VERSION, MIN_API_VERSION].map(minor);
    assert!(oldest <= this && oldest.0 == this.0, "{MIN_API_VERSION}");
}

#[test]
fn nothing_that_crosses_is_left_out() {
    let text = describe();
    let words: Vec<_> = text
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    // Rust's side of things: what makes a section, and versions, which are said elsewhere.
    let not_crossing = ["Embedded", "API_VERSION", "MIN_API_VERSION", "ALL"];
    let mut declared = 0;
    for entry in std::fs::read_dir(root().join("plugin-api/src/abi")).expect("the ABI's source") {
        let source = std::fs::read_to_string(entry.expect("an entry").path()).expect("a source");
        for line in source.lines() {
            let line = line.trim_start();
            let name = ["pub struct ", "pub enum ", "pub union ", "pub const "];
            let name = name.iter().find_map(|kind| line.strip_prefix(kind));
            // `$name` and `fn` are no names.
            let name = name.map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_'));
            let Some(name) = name.and_then(|mut words| words.next()) else {
                continue;
            };
            if !name.is_empty() && name != "fn" && !not_crossing.contains(&name) {
                assert!(
                    words.contains(&name),
                    "{name} is not reached from the root module"
                );
                declared += 1;
            }
        }
    }
    assert!(declared >= 40, "only {declared} declarations were found");
}

#[test]
fn growth_at_the_end_keeps_the_promise_and_nothing_else_does() {
    let old = describe();
    let at_the_end = |paragraph: &str, line: &str| {
        let start = old
            .find(&format!("{paragraph}\n"))
            .or_else(|| old.find(&format!("{paragraph}:")));
        let start = start.expect("the paragraph");
        let end = start + old[start..].find("\n\n").expect("its end");
        format!("{}\n  {line}{}", &old[..end], &old[end..])
    };
    for new in [
        at_the_end("table HostApi", "44 clock: fn() -> u64"),
        at_the_end("codes DType", "F64 = 9"),
        format!("{old}struct Later: 4 bytes, aligned to 4, C\n  0 number: u32\n\n"),
    ] {
        assert_eq!(broken_promises(&old, &new), Vec::<String>::new());
        assert!(difference(&old, &new).contains('+'), "not even noticed");
        // The other way round something is missing.
        assert!(!broken_promises(&new, &old).is_empty());
    }
    let replaced = |from: &str, to: &str| {
        assert!(old.contains(from), "{from}");
        old.replacen(from, to, 1)
    };
    for (new, said) in [
        (
            at_the_end("struct Sampling", "24 penalty: f32"),
            "Sampling has changed, and can't grow",
        ),
        (
            at_the_end("constants", "LIMIT = 3"),
            "constants has changed",
        ),
        (
            replaced("2 memory_used:", "2 memory:"),
            "HostApi has changed other than",
        ),
        (
            replaced("the first 4 slots", "the first 3 slots"),
            "Drafter has changed other than",
        ),
        (
            replaced("0 temperature: f32", "0 temperature: u32"),
            "Sampling has changed",
        ),
        (
            replaced("  BF16 = 3", "  BF16 = 10"),
            "DType has changed other than",
        ),
        (
            replaced("table DraftRows", "table Rows"),
            "DraftRows is gone",
        ),
    ] {
        let broken = broken_promises(&old, &new).join("; ");
        assert!(broken.contains(said), "no {said:?} in {broken:?}");
    }
}
