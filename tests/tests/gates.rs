//! What a user reads when a plugin is refused: which one, why, and what to do.
//!
//! Altered copies of real libraries stand for the plugins of other times and machines.

use std::path::{Path, PathBuf};
use std::process::Output;

use mlxhost_tests::cases::{altered_library, assert_refused, replace, stderr};
use mlxhost_tests::{checkpoint, plugin, run, run_json};
use object::{Object, ObjectSection};
use tempfile::TempDir;

/// A short answer of the small llama with a plugin.
fn answer_with(library: &Path) -> Output {
    let target = checkpoint("llama-f32");
    run(&[
        "--plugin",
        library.to_str().unwrap(),
        "--model",
        target.to_str().unwrap(),
        "--prompt-tokens",
        "1,2,3,1,2",
        "--max-tokens",
        "4",
    ])
}

fn inspect(library: &Path) -> Output {
    run(&["plugins", "inspect", library.to_str().unwrap()])
}

/// The plugin `ngram` with a part of its manifest replaced.
fn with_manifest(changes: &[(&str, &str)]) -> (TempDir, PathBuf) {
    altered_library(&plugin("ngram"), |bytes| {
        let range = {
            let file = object::File::parse(&**bytes).expect("a library");
            let section = file.section_by_name(plugin_api::abi::SECTION);
            section.and_then(|s| s.file_range()).expect("a manifest")
        };
        let section = &mut bytes[range.0 as usize..(range.0 + range.1) as usize];
        for (from, to) in changes {
            replace(section, from, to);
        }
    })
}

#[test]
fn what_is_no_library_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let whole = std::fs::read(plugin("ngram")).unwrap();
    for (path, says) in [
        (file("text.so", b"hello, I am no library"), "not a library"),
        (file("empty.so", b""), "not a library"),
        (file("head.so", &whole[..3000]), "not a library"),
        (file("half.so", &whole[..whole.len() / 2]), "not a library"),
        (dir.path().to_owned(), "--plugin-dir"),
        (
            dir.path().join("nowhere.so"),
            "name the plugin's library file",
        ),
    ] {
        let shown = path.to_str().unwrap();
        assert_refused(&answer_with(&path), 2, &[shown, says]);
        assert_refused(&inspect(&path), 2, &[shown, says]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_of_another_machine_is_refused() {
    let library = plugin("ngram");
    // e_machine: RISC-V.
    let (_dir, path) = altered_library(&library, |bytes| bytes[18..20].copy_from_slice(&[243, 0]));
    let says = [
        path.to_str().unwrap(),
        "Riscv64",
        std::env::consts::ARCH,
        "for this machine",
    ];
    assert_refused(&answer_with(&path), 2, &says);
    // e_type: a program.
    let (_dir, path) = altered_library(&library, |bytes| bytes[16..18].copy_from_slice(&[2, 0]));
    assert_refused(
        &answer_with(&path),
        2,
        &[path.to_str().unwrap(), "not a shared library"],
    );
}

#[test]
fn a_library_that_is_no_plugin_is_refused() {
    let section = plugin_api::abi::SECTION;
    let other = section.replace("host", "hose");
    let (_dir, path) = altered_library(&plugin("ngram"), |bytes| replace(bytes, section, &other));
    let says = [
        path.to_str().unwrap(),
        "not an mlxhost plugin",
        "export_plugin!",
    ];
    assert_refused(&answer_with(&path), 2, &says);
    assert_refused(&inspect(&path), 2, &says);
}

#[test]
fn a_broken_manifest_says_what_it_lacks() {
    for (from, to, says) in [
        ("{\"manifest\"", "[\"manifest\"", "not valid JSON"),
        ("\"manifest\":1", "\"manifest\":7", "format 1"),
        ("\"name\":\"ngram\"", "\"name\":\"../..\"", "has the name"),
        (
            "\"api\":\"1.0.0\"",
            "\"api\":\"1.0.x\"",
            "has api \"1.0.x\"",
        ),
    ] {
        let (_dir, path) = with_manifest(&[(from, to)]);
        let says = ["its manifest", says, path.to_str().unwrap()];
        assert_refused(&inspect(&path), 2, &says);
        assert_refused(&answer_with(&path), 2, &says);
    }
}

/// The claimed API versions, what is said of them, and the remedy; none where it loads.
const VERSIONS: &[(&str, &str, Option<[&str; 2]>)] = &[
    (
        "2.0.0",
        "1.0.0",
        Some(["for plugin API 2.0.0", "a build of it for API 1.x"]),
    ),
    (
        "2.0.0",
        "2.0.0",
        Some(["for plugin API 2.0.0", "a build of it for API 1.x"]),
    ),
    (
        "0.9.0",
        "0.1.0",
        Some(["for plugin API 0.9.0", "a build of it for API 1.x"]),
    ),
    (
        "1.9.0",
        "1.9.0",
        Some(["needs plugin API 1.9.0 or newer", "update mlxhost"]),
    ),
    ("1.9.0", "1.0.0", None),
    ("1.0.7", "1.0.0", None),
];

fn with_versions(api: &str, min_api: &str) -> (TempDir, PathBuf) {
    let (api, min) = (
        format!("\"api\":\"{api}\""),
        format!("\"min_api\":\"{min_api}\""),
    );
    with_manifest(&[("\"api\":\"1.0.0\"", &api), ("\"min_api\":\"1.0.0\"", &min)])
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_plugin_of_another_api_version_is_told_which_and_what_to_do() {
    for (api, min_api, refused) in VERSIONS {
        let (_dir, path) = with_versions(api, min_api);
        let output = answer_with(&path);
        let shown = path.to_str().unwrap();
        match refused {
            Some(says) => {
                let says = [
                    &says[..],
                    &["plugin ngram 0.1.0", shown, "this host has 1.0.0"],
                ];
                assert_refused(&output, 2, &says.concat());
            }
            None => assert_eq!(output.status.code(), Some(0), "{api}: {}", stderr(&output)),
        }
    }
}

#[test]
fn inspecting_a_plugin_tells_whether_it_would_load() {
    for (api, min_api, refused) in VERSIONS {
        let (_dir, path) = with_versions(api, min_api);
        let output = inspect(&path);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let built = format!("built with {api}, needs {min_api} or newer");
        let verdict = refused.map_or("this host can load it", |says| says[0]);
        for said in [
            "ngram 0.1.0",
            path.to_str().unwrap(),
            &built,
            verdict,
            "longest",
        ] {
            assert!(text.contains(said), "{said:?} is not in {text}");
        }
        let object = run_json(&["plugins", "inspect", path.to_str().unwrap()]);
        assert_eq!(object["api"], *api);
        assert_eq!(object["refused"].is_null(), refused.is_none(), "{object}");
    }
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_plugin_whose_tables_cannot_be_trusted_is_refused() {
    let altered = plugin("altered").canonicalize().unwrap();
    let remedy = "rebuild it against mlxhost-plugin-api 1.0.0";
    let says = [
        "plugin altered 0.1.0",
        "claims plugin API 1.0.0",
        "laid out differently",
    ];
    let says = [&says[..], &[remedy, altered.to_str().unwrap()]].concat();
    assert_refused(&answer_with(&altered), 2, &says);
    // A look at it runs nothing, so it cannot know.
    assert_eq!(inspect(&altered).status.code(), Some(0));

    for (from, to, says) in [
        (
            "mlxhost_plugin_header",
            "mlxhost_plugin_heater",
            "exports no root module",
        ),
        (
            "abi stable library for Rust",
            "abi stable library for Dust",
            "version of abi_stable",
        ),
    ] {
        let (_dir, path) = altered_library(&plugin("ngram"), |bytes| replace(bytes, from, to));
        let says = ["plugin ngram 0.1.0", says, remedy, path.to_str().unwrap()];
        assert_refused(&answer_with(&path), 2, &says);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_plugin_whose_own_libraries_are_missing_is_a_failure() {
    let change = |bytes: &mut Vec<u8>| replace(bytes, "\0libc.so.6", "\0libq.so.6");
    let (_dir, path) = altered_library(&plugin("ngram"), change);
    let says = [
        path.to_str().unwrap(),
        "libq.so.6",
        "are its own libraries installed?",
    ];
    assert_refused(&answer_with(&path), 1, &says);
}
