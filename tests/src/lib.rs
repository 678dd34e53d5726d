//! What the tests share: where things are, and how to run them.

pub mod decoding;
pub mod derived;
pub mod forced;
pub mod gguf;
pub mod layouts;
pub mod tensors;
pub mod together;

pub mod cases;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use serde_json::Value;

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file or directory of `tests/fixtures`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(path)
}

/// A checkpoint of `tests/fixtures/oracle`, or one that follows from those.
pub fn checkpoint(name: &str) -> PathBuf {
    derived::find(name).unwrap_or_else(|| fixture("oracle/ckpt").join(name))
}

/// The checkpoint that a golden names as its `target` or `drafter`.
pub fn checkpoint_of(golden: &Value, key: &str) -> PathBuf {
    let path = golden[key].as_str().expect(key);
    checkpoint(path.strip_prefix("ckpt/").expect("a checkpoint"))
}

/// A JSON fixture.
pub fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The token ids of a JSON list.
pub fn ids(value: &Value) -> Vec<i32> {
    let list = value.as_array().expect("a list of ids");
    list.iter()
        .map(|id| id.as_i64().expect("an id") as i32)
        .collect()
}

/// `1,2,3`
pub fn id_list(ids: &[i32]) -> String {
    let words: Vec<_> = ids.iter().map(i32::to_string).collect();
    words.join(",")
}

/// Where cargo puts what it builds in this profile.
pub fn target_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let deps = exe.parent().expect("deps");
    deps.parent().expect("the profile's directory").to_owned()
}

/// The profile that this test or benchmark was built in.
pub fn profile() -> String {
    match target_dir().file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev".to_owned(),
        Some(name) => name.to_owned(),
    }
}

/// Builds the program and all plugins once, unless `make` has done so.
fn build() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        if std::env::var_os("MLXHOST_TESTS_BUILT").is_some() {
            return;
        }
        let packages = [
            "mlxhost",
            "deepspec",
            "dflash",
            "gemma_assistant",
            "ngram",
            "qwen_mtp",
            "scripted",
            "hostile",
            "allocator",
            "altered",
        ];
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--profile", &profile()])
            .current_dir(root());
        for package in packages {
            cargo.args(["-p", package]);
        }
        let status = cargo.status().expect("cargo runs");
        assert!(status.success(), "cargo build failed");
    });
}

/// The program.
pub fn program() -> PathBuf {
    build();
    target_dir().join("mlxhost")
}

/// The library of a plugin crate of this workspace.
pub fn plugin(name: &str) -> PathBuf {
    build();
    let file = format!(
        "{}{name}{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    target_dir().join(file)
}

/// Runs the program, without a terminal and without this environment's own settings.
pub fn run(args: &[&str]) -> Output {
    command(args).output().expect("the program runs")
}

/// The program with arguments, ready to be run.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(args)
        .env_remove("MLXHOST_PLUGIN_PATH")
        .env_remove("MLXHOST_LOG")
        // What is remembered there decides nothing but speed; still, it is the user's.
        .env(
            "MLXHOST_CACHE_DIR",
            std::env::temp_dir().join("mlxhost-tests"),
        )
        // So are the plugins that lie there.
        .env(
            "MLXHOST_DATA_DIR",
            std::env::temp_dir().join("mlxhost-tests/nothing"),
        )
        .stdin(std::process::Stdio::null());
    command
}

/// Runs the program with `--json` and gives the object that it prints.
pub fn run_json(args: &[&str]) -> Value {
    let output = run(&[args, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?} failed: {stderr}");
    serde_json::from_slice(&output.stdout).expect("a JSON object")
}

/// How many of something a test tries: as the environment says, else `usual`.
pub fn number(variable: &str, usual: usize) -> usize {
    let asked = std::env::var(variable).ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// What `mlxhost eval` writes.
pub fn eval(model: &Path, prompt: &[i32], taps: &str) -> tensors::Tensors {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let out = dir.path().join("out.safetensors");
    let prompt = id_list(prompt);
    let mut args = vec![
        "eval",
        "--exact",
        "--model",
        text(model),
        "--prompt-tokens",
        &prompt,
    ];
    args.extend(["--out", text(&out)]);
    if !taps.is_empty() {
        args.extend(["--taps", taps]);
    }
    let output = run(&args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    tensors::read(&out)
}

/// The answer in JSON to a prompt of ids, greedy and regardless of end tokens.
pub fn generate(model: &Path, prompt: &[i32], max_tokens: usize, more: &[&str]) -> Value {
    let (prompt, limit) = (id_list(prompt), max_tokens.to_string());
    let args = [
        "--model",
        text(model),
        "--prompt-tokens",
        &prompt,
        "--max-tokens",
        &limit,
        "--ignore-eos",
        "--temperature",
        "0",
    ];
    run_json(&[&args, more].concat())
}

/// Held by tests that run an engine in their own process: MLX has global state.
pub fn engine_lock() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
