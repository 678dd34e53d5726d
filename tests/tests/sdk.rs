//! From `mlxhost plugins new` to drafts: crates that lie outside the repository, built as their authors build
//! them, and what becomes of names and places that can't be.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mlxhost_tests::cases::{self, assert_plain, assert_refused, stderr};
use mlxhost_tests::{checkpoint, command, generate, id_list, ids, root, run, text};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A crate that the program wrote.
struct Crate {
    name: &'static str,
    dir: TempDir,
}

impl Crate {
    fn new(name: &'static str, kind: &str) -> Self {
        let made = Self {
            name,
            dir: tempfile::tempdir().unwrap(),
        };
        let (api, out) = (root().join("plugin-api"), made.path());
        let output = run(&[
            "plugins",
            "new",
            name,
            "--kind",
            kind,
            "--path",
            text(&api),
            "--dir",
            text(&out),
        ]);
        let said = cases::text(&output);
        for next in [
            "cargo build --release",
            "plugins check",
            "--plugin",
            text(&out),
        ] {
            assert!(said.contains(next), "no {next:?} in {said}");
        }
        assert!((3..=5).contains(&said.lines().count()), "{said}");
        assert_plain(&said);
        // A new crate has no lock file, and cargo without a network knows no versions but those of a lock file: of
        // what only other systems need, nothing was ever downloaded. Those of the workspace will do, as the
        // workspace was built with them.
        std::fs::copy(root().join("Cargo.lock"), out.join("Cargo.lock")).unwrap();
        made
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(self.name)
    }

    /// What its author would run; what it depends on is built once for all crates and runs.
    fn cargo(&self, args: &[&str]) -> Output {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(args).current_dir(self.path());
        let output = cargo.env("CARGO_TARGET_DIR", target()).output().unwrap();
        let said = stderr(&output);
        assert!(output.status.success(), "{} {args:?}: {said}", self.name);
        assert!(!said.contains("warning"), "{} {args:?}: {said}", self.name);
        output
    }

    /// Its library, built, with its own tests passed.
    fn library(&self) -> PathBuf {
        let tests = self.cargo(&["test", "--offline"]);
        let passed = String::from_utf8_lossy(&tests.stdout).into_owned();
        assert!(
            passed.contains("4 passed") || passed.contains("5 passed"),
            "{passed}"
        );
        self.cargo(&["build", "--offline"]);
        let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let file = format!("{prefix}{}{suffix}", self.name.replace('-', "_"));
        target().join("debug").join(file)
    }

    /// Formatting and lints, where the tools for that are installed.
    fn is_clean(&self) {
        let has = |tool| {
            let version = Command::new(env!("CARGO"))
                .args([tool, "--version"])
                .output();
            version.is_ok_and(|output| output.status.success())
        };
        if has("fmt") {
            self.cargo(&["fmt", "--check"]);
        }
        if has("clippy") {
            self.cargo(&[
                "clippy",
                "--offline",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ]);
        }
    }
}

/// Where these crates are built.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("sdk")
}

/// Drafted and accepted tokens of an answer in JSON.
fn drafted(answer: &Value) -> [u64; 2] {
    let rounds = answer["rounds"].as_array().expect("rounds");
    let drafted = rounds
        .iter()
        .map(|round| ids(&round["drafted"]).len() as u64);
    let accepted = rounds.iter().filter_map(|round| round["accepted"].as_u64());
    [drafted.sum(), accepted.sum()]
}

/// Long enough for the small model to come back to what it said before.
const TOKENS: usize = 220;

/// Drafts, some of them right, and the answer without drafts.
fn assert_drafts(made: &Crate, library: &Path, more: &[&str], prompt: &[i32]) -> Value {
    let model = checkpoint("llama-f32");
    let plain = generate(&model, prompt, TOKENS, &["--no-draft"]);
    let args = [&["--plugin", text(library), "--depth", "3"], more].concat();
    let answer = generate(&model, prompt, TOKENS, &args);
    assert_eq!(answer["tokens"], plain["tokens"], "{}", made.name);
    assert_eq!(answer["drafter"], made.name);
    let [drafted, accepted] = drafted(&answer);
    assert!(drafted > 0 && accepted > 0, "{}: {answer}", made.name);
    answer
}

const PROMPT: [i32; 11] = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7];

#[test]
fn a_new_crate_builds_passes_its_tests_and_drafts() {
    let made = Crate::new("sdk-source", "source");
    let library = made.library();
    assert_drafts(&made, &library, &[], &PROMPT);
    assert_drafts(&made, &library, &["--drafter-option", "most=1"], &PROMPT);

    let model = checkpoint("llama-f32");
    for (option, says) in [
        ("most=0", "expected 1 to 32"),
        ("least=1", "option least is not known"),
    ] {
        let wrong = [
            "--plugin",
            text(&library),
            "--model",
            text(&model),
            "--prompt-tokens",
            "1,2",
            "--drafter-option",
            option,
        ];
        assert_refused(&run(&wrong), 2, &["plugin sdk-source", says]);
    }
    made.is_clean();
}

#[test]
fn a_new_crate_of_rows_serves_groups_that_change_and_rows_that_go_on() {
    let made = Crate::new("sdk_rows", "rows");
    let library = made.library();
    let states = tempfile::tempdir().unwrap();
    let keep = ["--prefix-dir", text(states.path())];
    let first = assert_drafts(&made, &library, &keep, &PROMPT);
    assert_eq!(first["timings"]["cached_tokens"], 0);
    // In another process, from the state at the end of that answer.
    let longer = [&PROMPT[..], &ids(&first["tokens"]), &[5, 6]].concat();
    let second = assert_drafts(&made, &library, &keep, &longer);
    assert!(
        second["timings"]["cached_tokens"].as_u64() > Some(TOKENS as u64),
        "{second}"
    );

    together(&library);
    made.is_clean();
}

/// Requests of all lengths, three at a time: each is answered as it would be alone.
fn together(library: &Path) {
    let model = checkpoint("llama-f32");
    let dir = tempfile::tempdir().unwrap();
    let [input, output] = ["in.jsonl", "out.jsonl"].map(|file| dir.path().join(file));
    let sizes: Vec<usize> = vec![30, 170, 5, 90, 240, 40, 120];
    let prompt = |n: usize| PROMPT.iter().map(|id| id + n as i32).collect::<Vec<_>>();
    let ask =
        |&n: &usize| json!({"id": n, "prompt_tokens": prompt(n), "max_tokens": n, "depth": 2});
    let lines: Vec<String> = sizes.iter().map(|n| ask(n).to_string()).collect();
    std::fs::write(&input, lines.join("\n")).unwrap();
    let ran = run(&[
        "batch",
        "--model",
        text(&model),
        "--plugin",
        text(library),
        "--concurrency",
        "3",
        "--input",
        text(&input),
        "--output",
        text(&output),
        "--ignore-eos",
        "--temperature",
        "0",
    ]);
    assert_eq!(ran.status.code(), Some(0), "{}", stderr(&ran));
    assert!(!stderr(&ran).contains("warning"), "{}", stderr(&ran));
    let answers = std::fs::read_to_string(&output).unwrap();
    assert_eq!(answers.lines().count(), sizes.len());
    let mut accepted = 0;
    for line in answers.lines() {
        let answer: Value = serde_json::from_str(line).unwrap();
        let n = answer["id"].as_u64().expect("the id") as usize;
        let alone = generate(&model, &prompt(n), n, &["--no-draft"]);
        assert_eq!(
            answer["tokens"],
            alone["tokens"],
            "{n}: {}",
            id_list(&prompt(n))
        );
        assert_eq!(answer["drafter"], "sdk_rows", "{n}");
        accepted += drafted(&answer)[1];
    }
    assert!(accepted > 0, "no draft was right");
}

#[test]
fn without_a_path_the_published_version_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut new = command(&["plugins", "new", "my_drafter"]);
    let output = new.current_dir(dir.path()).output().unwrap();
    assert!(cases::text(&output).contains("cd my_drafter &&"));
    let manifest = std::fs::read_to_string(dir.path().join("my_drafter/Cargo.toml")).unwrap();
    let major = plugin_api::abi::API_VERSION.split('.').next().unwrap();
    assert!(
        manifest.contains(&format!("mlxhost-plugin-api = \"{major}\"\n")),
        "{manifest}"
    );
    let mut files: Vec<_> = ["", "src"]
        .iter()
        .flat_map(|sub| names(&dir.path().join("my_drafter").join(sub)))
        .collect();
    files.sort();
    let expected = [
        ".gitignore",
        "Cargo.toml",
        "README.md",
        "lib.rs",
        "memory.rs",
        "src",
    ];
    assert_eq!(files, expected);
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn an_empty_directory_is_taken_and_what_is_in_use_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    std::fs::create_dir(place("empty")).unwrap();
    std::fs::create_dir(place("full")).unwrap();
    std::fs::write(place("full").join("notes"), "mine").unwrap();
    std::fs::write(place("file"), "mine").unwrap();
    std::os::unix::fs::symlink(place("empty"), place("link")).unwrap();

    let new = |out: &Path| run(&["plugins", "new", "d", "--dir", text(out)]);
    for (name, says) in [
        ("full", "not empty"),
        ("file", "directory"),
        ("link", "can't be replaced"),
        ("no/such/parent", "there is no"),
        ("..", "not empty"),
    ] {
        let out = place(name);
        assert_refused(&new(&out), 2, &[text(&out), says, "--dir"]);
    }
    // Whoever is in a directory would be left with one that is gone.
    let mut here = command(&["plugins", "new", "d", "--dir", "."]);
    let output = here.current_dir(place("empty")).output().unwrap();
    assert_refused(&output, 2, &["can't be replaced", "--dir"]);
    assert_eq!(names(&place("full")), ["notes"]);

    assert_eq!(new(&place("empty")).status.code(), Some(0));
    assert_eq!(names(&place("empty")).len(), 4);
    assert_refused(&new(&place("empty")), 2, &["not empty"]);
    // Nothing half done is left beside them.
    let mut left = names(dir.path());
    left.sort();
    assert_eq!(left, ["empty", "file", "full", "link"]);
}

#[test]
fn a_name_that_no_crate_can_have_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let long = "x".repeat(65);
    let huge = "x".repeat(100_000);
    for name in [
        "",
        "2x",
        "My",
        "a/b",
        "../up",
        "a b",
        "ä",
        "\u{1b}[31m",
        ".",
        &long,
        &huge,
    ] {
        let mut new = command(&["plugins", "new", name]);
        let output = new.current_dir(dir.path()).output().unwrap();
        assert_refused(
            &output,
            2,
            &["can't be the name of a plugin", "such as my_drafter"],
        );
    }
    for name in [
        "fn",
        "async",
        "gen",
        "self",
        "std",
        "plugin-api",
        "mlxhost-plugin-api",
    ] {
        let mut new = command(&["plugins", "new", name]);
        let output = new.current_dir(dir.path()).output().unwrap();
        assert_refused(&output, 2, &[name, "another name"]);
    }
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_path_that_is_not_the_plugin_api_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (path, says) in [
        (dir.path().join("nowhere"), "No such file"),
        (dir.path().to_owned(), "its Cargo.toml"),
        (root().join("host"), "of something else"),
        (root().join("Cargo.toml"), "its Cargo.toml"),
    ] {
        let mut new = command(&["plugins", "new", "d", "--path", text(&path)]);
        let output = new.current_dir(dir.path()).output().unwrap();
        assert_refused(&output, 2, &[text(&path), says, "the directory plugin-api"]);
    }
    assert!(names(dir.path()).is_empty());
}
