//! Old plugins on new hosts and new plugins on old hosts: they run, or are refused with what to do about it.
//!
//! There is one version of the API in this repository. Others are made of it: a copy of the crate `plugin-api` with
//! patches becomes a later one, with something appended to every table, or one that was altered although its version
//! stayed. Each run is a process of its own: `abi_stable` remembers the tables that a process has seen.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use mlxhost_tests::cases::{assert_refused, stderr, text as printed};
use mlxhost_tests::{checkpoint, generate, plugin, profile, root, run, target_dir, text};
use plugin_api::abi::API_VERSION;

/// A place in a file of `plugin-api/src`, which must be there once, and what comes after it.
type Patch = (&'static str, &'static str, &'static str);

/// API 1.1: a slot for each table, two new types, a code, and the SDK over some of that.
const LATER: &[Patch] = &[
    (
        "abi/host.rs",
        "pub checkpoint_vocabulary: extern \"C\" fn(RawCheckpoint) -> Reply<ROption<RString>>,",
        "pub clock: extern \"C\" fn() -> u64,",
    ),
    (
        "abi/plugin.rs",
        "pub load: extern \"C\" fn(host: HostApiRef, request: &LoadRequest<'_>) -> Reply<RawDrafter>,",
        "pub greet: extern \"C\" fn() -> RString,",
    ),
    (
        "abi/plugin.rs",
        "pub open: extern \"C\" fn(*mut c_void, &OpenRequest<'_>) -> Reply<RawRows>,",
        "pub wish: extern \"C\" fn(*mut c_void, &Wish<'_>) -> Reply<u32>,",
    ),
    (
        "abi/plugin.rs",
        "pub restore: extern \"C\" fn(*mut c_void, &RowState) -> Reply<()>,",
        "pub draft_tree: extern \"C\" fn(*mut c_void, &DraftRequest<'_>) -> Reply<u32>,",
    ),
    (
        "abi/plugin.rs",
        "pub head_subset: ROption<extern \"C\" fn(*const c_void, ids: RSlice<'_, u32>) -> Reply<u64>>,",
        "pub age: extern \"C\" fn(*const c_void) -> u32,",
    ),
    (
        "abi/plugin.rs",
        "use super::types::{DType, DonorKind, RawTensor, Reply};",
        "#[repr(C)] #[derive(StableAbi, Clone, Copy)]
        pub struct Wish<'a> { pub depths: RSlice<'a, u32>, pub more: ROption<RStr<'a>> }",
    ),
    ("abi/mod.rs", "mod types;", "pub use plugin::Wish;"),
    ("abi/types.rs", "I64 = 8,", "F64 = 9,"),
    ("export.rs", "load: load::<D>", ", greet"),
    ("export.rs", "open: open::<D>,", "wish: wish::<D>,"),
    (
        "export.rs",
        "restore: restore::<D::Rows>,",
        "draft_tree: draft_tree::<D::Rows>,",
    ),
    (
        "export.rs",
        "use crate::tensor::Tensor;",
        "extern \"C\" fn greet() -> abi_stable::std_types::RString { \"hello\".into() }
        extern \"C\" fn wish<D: Drafter>(this: *mut c_void, wish: &abi::Wish<'_>) -> Reply<u32> {
            with(this, |_: &mut D| Ok(wish.depths.iter().sum()))
        }
        extern \"C\" fn draft_tree<R: DraftRows>(this: *mut c_void, _: &abi::DraftRequest<'_>) -> Reply<u32> {
            with(this, |rows: &mut R| Ok(rows.row_count() as u32))
        }",
    ),
    (
        "host.rs",
        "use crate::error::{Error, Result};",
        "pub fn clock() -> Result<u64> {
            let slot = api().clock().ok_or_else(|| Error::unsupported(\"this host has none\"))?;
            Ok(slot())
        }",
    ),
    ("lib.rs", "pub use options::Options;", "pub use host::clock;"),
    (
        "target.rs",
        "impl Target {",
        "pub fn age(&self) -> Option<u32> { self.0.table.age().map(|slot| slot(self.0.this)) }",
    ),
];

/// Still 1.0.0 by name, but a number has moved, in a type deep below the root module: of two of the same size the
/// second is now the first.
const ALTERED: &[Patch] = &[
    ("abi/plugin.rs", "pub temperature: f32,", "pub min_p: f32,"),
    ("abi/plugin.rs", "pub top_p: f32,", "#[cfg(any())]"),
];

/// What was built.
struct Built {
    /// A plugin of API 1.1 that runs on 1.0, too.
    later: PathBuf,
    /// A plugin that claims API 1.0.
    altered: PathBuf,
    /// A plugin of API 2.0.
    next_major: PathBuf,
    /// A host of API 1.1.
    host: PathBuf,
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let workspace = Workspace::new();
        workspace.api("later_api", "1.1.0", LATER);
        workspace.api("altered_api", API_VERSION, ALTERED);
        workspace.plugin("later_plugin", "later_api", "default = [\"later\"]");
        workspace.plugin("altered_plugin", "altered_api", "");
        workspace.member("next_major", LIBRARY, "lib.rs", &source("next_major.rs"));
        workspace.host("later_host", "later_api");
        workspace.build();
        Built {
            later: library("later_plugin"),
            altered: library("altered_plugin"),
            next_major: library("next_major"),
            host: target_dir().join("later_host"),
        }
    })
}

const LIBRARY: &str = "[lib]\ncrate-type = [\"cdylib\"]\n";

/// A file of `tests/plugins/versions`.
fn source(name: &str) -> String {
    let path = root().join("tests/plugins/versions").join(name);
    std::fs::read_to_string(path).expect("a source")
}

/// A workspace apart from the repository's own.
struct Workspace(PathBuf);

impl Workspace {
    fn new() -> Self {
        let made = Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join("versions"));
        let members = ["later_plugin", "altered_plugin", "next_major", "later_host"];
        // Two crates of one name can't both be members.
        let others = ["later_api", "altered_api"];
        // By the repository's profile, so that what is the same is built once.
        let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
        let profile = manifest.find("[profile.dev]").expect("the profile");
        let profile = manifest[profile..]
            .split("[profile.dev.package.mlxhost]")
            .next();
        let profile = profile.unwrap_or_default();
        let manifest = format!(
            "[workspace]\nresolver = \"3\"\nmembers = {members:?}\nexclude = {others:?}\n\n{profile}"
        );
        made.write("Cargo.toml", &manifest);
        // Without a network cargo knows no versions but those of a lock file.
        let lock = std::fs::read_to_string(root().join("Cargo.lock")).expect("Cargo.lock");
        made.write("Cargo.lock", &lock);
        made
    }

    /// Writes a file, but not one that is as it should be: cargo goes by its time.
    fn write(&self, file: &str, content: &str) {
        let path = self.0.join(file);
        if std::fs::read_to_string(&path).is_ok_and(|old| old == content) {
            return;
        }
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(path, content).expect("a file");
    }

    fn member(&self, name: &str, manifest: &str, file: &str, source: &str) {
        let head =
            format!("[package]\nname = {name:?}\nversion = \"0.1.0\"\nedition = \"2024\"\n\n");
        self.write(&format!("{name}/Cargo.toml"), &(head + manifest));
        self.write(&format!("{name}/src/{file}"), source);
    }

    /// The API crate of that version, with something put after places of its source.
    fn api(&self, name: &str, version: &str, patches: &[Patch]) {
        let dependencies = dependencies(&["abi_stable", "serde_json"]);
        let manifest = format!(
            "[package]\nname = \"mlxhost-plugin-api\"\nversion = {version:?}\nedition = \"2024\"\n\n\
             [lib]\nname = \"plugin_api\"\n\n{dependencies}"
        );
        self.write(&format!("{name}/Cargo.toml"), &manifest);
        let from = root().join("plugin-api/src");
        let mut used = 0;
        for file in sources(&from, "") {
            let mut source = std::fs::read_to_string(from.join(&file)).expect("a source");
            for (_, place, more) in patches.iter().filter(|(of, _, _)| *of == file) {
                let parts: Vec<_> = source.split(place).collect();
                assert_eq!(parts.len(), 2, "{place:?} is not once in {file}");
                source = format!("{}{place}\n{more}\n{}", parts[0], parts[1]);
                used += 1;
            }
            self.write(&format!("{name}/src/{file}"), &source);
        }
        assert_eq!(used, patches.len(), "a patch is of no file");
    }

    fn plugin(&self, name: &str, api: &str, features: &str) {
        let manifest = format!(
            "{LIBRARY}\n[dependencies]\n{}\n[features]\nlater = []\n{features}\n",
            dependency(api)
        );
        self.member(name, &manifest, "lib.rs", &source("plugin.rs"));
    }

    fn host(&self, name: &str, api: &str) {
        let dependencies = dependencies(&[
            "abi_stable",
            "libloading",
            "object",
            "semver",
            "serde_json",
            "sha2",
            "tempfile",
            "thiserror",
            "tracing",
        ]);
        let manifest = dependencies + &dependency(api);
        let host = root()
            .join("host/src")
            .canonicalize()
            .expect("the host's source");
        let source = source("host.rs").replace("@HOST@", text(&host));
        self.member(name, &manifest, "main.rs", &source);
    }

    fn build(&self) {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--offline", "--quiet", "--profile", &profile()])
            .current_dir(&self.0);
        let target = target_dir();
        cargo.env("CARGO_TARGET_DIR", target.parent().expect("target"));
        let output = cargo.output().expect("cargo runs");
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

fn library(name: &str) -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let path = target_dir().join(format!("{prefix}{name}{suffix}"));
    path.canonicalize().expect("the plugin was built")
}

fn dependency(api: &str) -> String {
    format!("mlxhost-plugin-api = {{ path = \"../{api}\" }}\n")
}

/// As the repository's own manifest has them.
fn dependencies(names: &[&str]) -> String {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let line = |name: &&str| {
        let line = manifest
            .lines()
            .find(|line| line.starts_with(&format!("{name} = ")));
        format!("{}\n", line.expect("a dependency"))
    };
    format!(
        "[dependencies]\n{}",
        names.iter().map(line).collect::<String>()
    )
}

/// Sources below a directory, by their paths in it.
fn sources(dir: &Path, below: &str) -> Vec<String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir.join(below)).expect("a directory") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        match entry.file_type().expect("a type").is_dir() {
            true => files.extend(sources(dir, &path)),
            false => files.push(path),
        }
    }
    files
}

/// An answer of this host with these plugins.
fn answer(plugins: &[&Path], more: &[&str]) -> Output {
    let target = checkpoint("llama-f32");
    let mut args = vec![
        "--model",
        text(&target),
        "--prompt-tokens",
        "1,2,3,1,2",
        "--max-tokens",
        "6",
    ];
    for plugin in plugins {
        args.extend(["--plugin", text(plugin)]);
    }
    run(&[&args, more].concat())
}

/// These plugins, one after the other, in one process of the later host.
fn drive(plugins: &[&Path]) -> Output {
    let mut host = Command::new(&built().host);
    host.args(plugins).output().expect("the later host runs")
}

#[test]
fn a_later_plugin_runs_on_this_host_and_goes_without_what_it_lacks() {
    let later = &built().later;
    let target = checkpoint("llama-f32");
    let prompt = [1, 2, 3, 1, 2];
    let plain = generate(&target, &prompt, 12, &["--no-draft"]);
    let answer = generate(
        &target,
        &prompt,
        12,
        &["--plugin", text(later), "--depth", "2"],
    );
    assert_eq!(answer["tokens"], plain["tokens"]);
    assert_eq!(answer["drafter"], "echo");
    let rounds = answer["rounds"].as_array().expect("rounds");
    assert!(
        rounds
            .iter()
            .any(|round| round["drafted"] != serde_json::json!([])),
        "{answer}"
    );

    let said = stderr(&self::answer(&[later], &[]));
    for line in ["no clock: this host has none", "no age"] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }
    let inspected = printed(&run(&["plugins", "inspect", text(later)]));
    assert!(
        inspected.contains("built with 1.1.0, needs 1.0.0 or newer"),
        "{inspected}"
    );
}

#[test]
fn plugins_of_both_versions_serve_one_process_in_any_order() {
    let (later, this) = (&built().later, plugin("ngram"));
    for plugins in [[later, &this], [&this, later]] {
        let plugins = plugins.map(PathBuf::as_path);
        for drafter in ["echo", "ngram"] {
            let output = answer(&plugins, &["--drafter-plugin", drafter, "--json"]);
            let answer: serde_json::Value = serde_json::from_str(&printed(&output)).unwrap();
            assert_eq!(answer["drafter"], drafter);
        }
        assert_eq!(printed(&drive(&plugins)).matches("drafted [").count(), 2);
    }
}

#[test]
fn a_plugin_of_this_version_runs_on_a_later_host_which_does_not_call_what_it_lacks() {
    let said = printed(&drive(&[&plugin("ngram")]));
    let old =
        format!("ngram of {API_VERSION}: drafted [1, 2], greeting None, wish None, tree None");
    assert_eq!(said.trim_end(), old);
    let said = printed(&drive(&[&built().later]));
    for line in [
        "the host's clock says 1234",
        "the target's age is 7",
        "echo of 1.1.0: drafted [3, 3], greeting Some(\"hello\"), wish Some(7), tree Some(1)",
    ] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }
}

#[test]
fn types_that_were_altered_silently_are_refused_on_both_hosts() {
    let altered = &built().altered;
    let says = [
        text(altered),
        "plugin echo 0.1.0 claims plugin API 1.0.0, but its types are laid out differently",
        "rebuild it against mlxhost-plugin-api",
    ];
    assert_refused(
        &answer(&[altered], &[]),
        2,
        &[&says[..], &["plugin-api 1.0.0"]].concat(),
    );
    assert_refused(
        &drive(&[altered]),
        2,
        &[&says[..], &["plugin-api 1.1.0"]].concat(),
    );
}

#[test]
fn another_major_version_is_refused_on_both_hosts_and_nothing_of_it_runs() {
    let next = &built().next_major;
    let says = [
        text(next),
        "plugin next_major 0.1.0 was built for plugin API 2.0.0",
        "get a build of it for API 1.x",
    ];
    assert_refused(
        &answer(&[next], &[]),
        2,
        &[&says[..], &["this host has 1.0.0"]].concat(),
    );
    assert_refused(
        &drive(&[next]),
        2,
        &[&says[..], &["this host has 1.1.0"]].concat(),
    );
}
