//! Where plugins are found, which one is taken, and what a run leaves behind.

use std::path::{Path, PathBuf};
use std::process::Output;

use mlxhost_tests::cases::{assert_plain, assert_refused, replace, stderr};
use mlxhost_tests::{checkpoint, command, plugin, run};
use serde_json::Value;
use tempfile::TempDir;

/// A directory with copies of plugins, and things that are none.
fn directory(plugins: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in plugins {
        let library = plugin(name);
        std::fs::copy(&library, dir.path().join(library.file_name().unwrap())).unwrap();
    }
    std::fs::write(dir.path().join("README.md"), "not a plugin").unwrap();
    dir
}

/// `plugins list --json` with arguments and a search path: names and paths.
fn list(args: &[&str], search_path: &str) -> Vec<(String, PathBuf)> {
    let mut list = command(&["plugins", "list", "--json"]);
    let output = list
        .args(args)
        .env("MLXHOST_PLUGIN_PATH", search_path)
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let plugins: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let pair = |plugin: &Value| {
        let text = |key: &str| plugin[key].as_str().unwrap().to_owned();
        (text("name"), PathBuf::from(text("path")))
    };
    plugins.iter().map(pair).collect()
}

fn names(found: &[(String, PathBuf)]) -> Vec<&str> {
    found.iter().map(|(name, _)| name.as_str()).collect()
}

fn answer(args: &[&str], environment: &[(&str, &Path)]) -> Output {
    let target = checkpoint("llama-f32");
    let common = [
        "--model",
        target.to_str().unwrap(),
        "--prompt-tokens",
        "1,2,3",
        "--max-tokens",
        "4",
        "--json",
    ];
    let mut command = command(&[&common, args].concat());
    command.envs(environment.iter().copied()).output().unwrap()
}

fn drafter(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["drafter"].take()
}

#[test]
fn plugins_are_found_by_file_by_directory_and_in_the_environment() {
    let both = directory(&["ngram", "hostile"]);
    let shown = both.path().to_str().unwrap();
    let library = plugin("qwen_mtp");
    let library = library.to_str().unwrap();
    assert_eq!(names(&list(&["--plugin", library], "")), ["qwen_mtp"]);
    assert_eq!(
        names(&list(&["--plugin-dir", shown], "")),
        ["hostile", "ngram"]
    );
    assert_eq!(names(&list(&[], shown)), ["hostile", "ngram"]);
    assert_eq!(names(&list(&[], library)), ["qwen_mtp"]);
    let all = format!("{library}:{shown}");
    assert_eq!(names(&list(&[], &all)), ["qwen_mtp", "hostile", "ngram"]);
    assert!(list(&[], "").is_empty());

    let found = answer(&[], &[("MLXHOST_PLUGIN_PATH", &plugin("ngram"))]);
    assert_eq!(drafter(&found), "ngram");
    assert_eq!(drafter(&answer(&[], &[])), Value::Null);
}

#[test]
fn the_first_plugin_of_a_name_wins() {
    let (first, second) = (directory(&["ngram"]), directory(&["ngram"]));
    let [one, two] = [&first, &second].map(|dir| dir.path().to_str().unwrap());
    let of = |found: &[(String, PathBuf)]| {
        assert_eq!(names(found), ["ngram"]);
        found[0].1.parent().unwrap().to_owned()
    };
    let real = |dir: &str| Path::new(dir).canonicalize().unwrap();
    assert_eq!(
        of(&list(&["--plugin-dir", one, "--plugin-dir", two], "")),
        real(one)
    );
    assert_eq!(of(&list(&["--plugin-dir", two], one)), real(two));
    let library = plugin("ngram");
    let args = ["--plugin-dir", one, "--plugin", library.to_str().unwrap()];
    assert_eq!(
        of(&list(&args, two)),
        library.canonicalize().unwrap().parent().unwrap()
    );
}

#[test]
fn the_working_directory_is_never_searched() {
    let dir = directory(&["ngram"]);
    let library = plugin("ngram");
    let file = library.file_name().unwrap().to_str().unwrap();
    for entry in [".", "", file, "./"] {
        let mut list = command(&["plugins", "list"]);
        let list = list
            .current_dir(dir.path())
            .env("MLXHOST_PLUGIN_PATH", entry);
        let output = list.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            text.contains("no plugins; name them with"),
            "{entry:?}: {text}"
        );
        if !entry.is_empty() {
            let why = stderr(&output);
            assert!(why.contains("relative entry"), "{entry:?}: {why}");
        }
    }
    // A file that the user names is another matter.
    let mut inspect = command(&["plugins", "inspect", file]);
    assert!(inspect.current_dir(dir.path()).status().unwrap().success());
}

#[test]
fn what_is_broken_in_a_directory_is_listed_and_passed_over() {
    let dir = directory(&["ngram"]);
    let broken = dir
        .path()
        .join(format!("broken{}", std::env::consts::DLL_SUFFIX));
    std::fs::write(&broken, "nothing of the kind").unwrap();
    let shown = dir.path().to_str().unwrap();

    let output = run(&["plugins", "list", "--plugin-dir", shown]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.starts_with("ngram 0.1.0  needs no checkpoint  /"),
        "{text}"
    );
    let why = stderr(&output);
    assert!(
        why.contains("passed over") && why.contains("not a library"),
        "{why}"
    );
    assert!(
        why.contains(broken.canonicalize().unwrap().to_str().unwrap()),
        "{why}"
    );
    assert_plain(&why);

    let output = answer(&["--plugin-dir", shown], &[]);
    assert_eq!(drafter(&output), "ngram");
    assert_eq!(stderr(&output), "");
    // Named, it is an error; so is a directory that is not there.
    assert_refused(
        &answer(&["--plugin", broken.to_str().unwrap()], &[]),
        2,
        &["not a library"],
    );
    assert_refused(
        &answer(&["--plugin-dir", "/nowhere/at/all"], &[]),
        2,
        &["/nowhere/at/all"],
    );
}

#[test]
fn no_copy_is_left_in_the_cache_directory() {
    let cache = tempfile::tempdir().unwrap();
    let inside = cache.path().join("mlxhost");
    let environment = [("MLXHOST_CACHE_DIR", inside.as_path())];
    let good = plugin("ngram");
    assert_eq!(
        drafter(&answer(&["--plugin", good.to_str().unwrap()], &environment)),
        "ngram"
    );
    assert!(inside.is_dir(), "the copy was made elsewhere");
    let altered = plugin("altered");
    let output = answer(&["--plugin", altered.to_str().unwrap()], &environment);
    assert_eq!(output.status.code(), Some(2));
    let bad = ["--drafter-option", "behave=panic-load"];
    let hostile = plugin("hostile");
    let output = answer(
        &[&["--plugin", hostile.to_str().unwrap()], &bad[..]].concat(),
        &environment,
    );
    assert_eq!(output.status.code(), Some(1));
    // What rounds cost is remembered there, nothing else.
    let left: Vec<_> = std::fs::read_dir(&inside)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["costs"]);
}

#[test]
fn a_cache_that_cannot_be_written_is_no_obstacle() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let library = plugin("ngram");
    let args = ["--plugin", library.to_str().unwrap()];
    let output = answer(&args, &[("MLXHOST_CACHE_DIR", file.path())]);
    assert_eq!(drafter(&output), "ngram");
}

#[test]
#[cfg_attr(
    target_vendor = "apple",
    ignore = "an altered library has no valid signature"
)]
fn a_plugin_overwritten_while_it_runs_changes_nothing() {
    use mlxhost::plugin::{Library, PluginFile};
    let dir = directory(&["ngram"]);
    let path = dir.path().join(plugin("ngram").file_name().unwrap());
    let read = PluginFile::read(&path).unwrap();
    // Between the check and the load, and after it: the worst kind of install, in place.
    let mut other = std::fs::read(&path).unwrap();
    replace(&mut other, "\"name\":\"ngram\"", "\"name\":\"other\"");
    std::fs::write(&path, &other).unwrap();
    let first = Library::load(&read).unwrap();
    assert_eq!(first.manifest().name, "ngram");
    std::fs::write(&path, b"gone").unwrap();
    let again = Library::load(&read).unwrap();
    assert_eq!(first.digest(), again.digest());
    // The new file is another plugin, which the process can have besides the first.
    std::fs::write(&path, &other).unwrap();
    let second = Library::load(&PluginFile::read(&path).unwrap()).unwrap();
    assert_eq!(second.manifest().name, "other");
    assert_ne!(second.digest(), first.digest());
}

/// `plugins list --explain --json`, with a search path.
fn explain(args: &[&str], environment: &[(&str, &Path)]) -> Value {
    let mut list = command(&["plugins", "list", "--explain", "--json"]);
    let output = list.args(args).envs(environment.iter().copied()).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Place, file name and verdict of every file that was found.
fn verdicts(explained: &Value) -> Vec<(String, String, String)> {
    let candidates = explained["candidates"].as_array().unwrap();
    let text = |candidate: &Value, key: &str| candidate[key].as_str().unwrap().to_owned();
    let row = |candidate: &Value| {
        let path = PathBuf::from(text(candidate, "path"));
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (text(candidate, "place"), name, text(candidate, "verdict"))
    };
    candidates.iter().map(row).collect()
}

fn rows(of: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
    let own = |text: &str| text.to_owned();
    of.iter()
        .map(|(a, b, c)| (own(a), own(b), own(c)))
        .collect()
}

fn mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn every_place_is_searched_in_its_order_and_every_file_has_a_verdict() {
    let (dir, user) = (
        directory(&["ngram", "hostile"]),
        tempfile::tempdir().unwrap(),
    );
    let plugins = user.path().join("plugins");
    std::fs::create_dir(&plugins).unwrap();
    for name in ["ngram", "scripted"] {
        let library = plugin(name);
        std::fs::copy(&library, plugins.join(library.file_name().unwrap())).unwrap();
    }
    let broken = plugins.join(format!("libzero{}", std::env::consts::DLL_SUFFIX));
    std::fs::write(&broken, "").unwrap();
    let named = plugin("qwen_mtp");
    let environment = [
        ("MLXHOST_DATA_DIR", user.path()),
        ("MLXHOST_PLUGIN_PATH", dir.path()),
    ];
    let args = ["--plugin", named.to_str().unwrap()];
    let explained = explain(&args, &environment);
    let expected = [
        ("--plugin", "libqwen_mtp", "loaded"),
        ("MLXHOST_PLUGIN_PATH", "libhostile", "loaded"),
        ("MLXHOST_PLUGIN_PATH", "libngram", "loaded"),
        ("user", "libngram", "shadowed"),
        ("user", "libscripted", "loaded"),
        ("user", "libzero", "refused"),
    ];
    assert_eq!(verdicts(&explained), rows(&expected));
    let shadowed = &explained["candidates"][3];
    let by = shadowed["by"].as_str().unwrap();
    assert!(
        by.starts_with(dir.path().canonicalize().unwrap().to_str().unwrap()),
        "{by}"
    );
    assert!(
        explained["candidates"][5]["why"]
            .as_str()
            .unwrap()
            .contains("not a library")
    );

    let mut text = command(&["plugins", "list", "--explain"]);
    let text = text.args(args).envs(environment).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    for says in [
        "user: ",
        "  loaded    ",
        "  shadowed  ",
        "  refused   ",
        "by /",
    ] {
        assert!(text.contains(says), "{says:?} is not in {text}");
    }
}

/// Runs the program as a user whom modes stop; root gives that right up first. None where root can't.
fn stopped_by_modes(args: &[&str]) -> Option<std::process::Command> {
    let closed = tempfile::tempdir().unwrap();
    mode(closed.path(), 0);
    let program = command(args);
    if std::fs::read_dir(closed.path()).is_err() {
        return Some(program);
    }
    let mut without = std::process::Command::new("setpriv");
    without.args(["--bounding-set", "-dac_override,-dac_read_search"]);
    let mut probe = std::process::Command::new("setpriv");
    probe.args(without.get_args()).arg("ls").arg(closed.path());
    if probe
        .output()
        .is_ok_and(|seen| seen.status.code() == Some(2))
    {
        without.arg(program.get_program()).args(program.get_args());
        for (key, value) in program.get_envs() {
            match value {
                Some(value) => without.env(key, value),
                None => without.env_remove(key),
            };
        }
        return Some(without);
    }
    None
}

#[test]
#[cfg(target_os = "linux")]
fn a_directory_that_cannot_be_read_is_a_warning() {
    if stopped_by_modes(&[]).is_none() {
        return eprintln!("not tried: modes don't stop this user, and setpriv is not there");
    }
    let (user, good) = (tempfile::tempdir().unwrap(), directory(&["ngram"]));
    let [closed, standing] = [directory(&["scripted"]), directory(&["scripted"])];
    let plugins = user.path().join("plugins");
    std::os::unix::fs::symlink(standing.path(), &plugins).unwrap();
    for (dir, bits) in [(&user, 0o755), (&good, 0o755), (&closed, 0), (&standing, 0)] {
        mode(dir.path(), bits);
    }
    let search = std::env::join_paths([closed.path(), good.path()]).unwrap();
    let output = |args: &[&str]| {
        let mut command = stopped_by_modes(args).expect("as before");
        command
            .env("MLXHOST_PLUGIN_PATH", &search)
            .env("MLXHOST_DATA_DIR", user.path());
        command.output().unwrap()
    };
    let listed = output(&["plugins", "list", "--explain", "--json"]);
    assert_eq!(listed.status.code(), Some(0), "{}", stderr(&listed));
    let explained: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let expected = [("MLXHOST_PLUGIN_PATH", "libngram", "loaded")];
    assert_eq!(verdicts(&explained), rows(&expected));
    let why = stderr(&output(&["plugins", "list"]));
    assert_eq!(why.matches("Permission denied").count(), 2, "{why}");
    for dir in [closed.path(), plugins.as_path()] {
        assert!(why.contains(dir.to_str().unwrap()), "{why}");
    }
    // Named, it is the user's mistake; so as not to be in the way of the removal, the modes are given back.
    let named = output(&[
        "plugins",
        "list",
        "--plugin-dir",
        closed.path().to_str().unwrap(),
    ]);
    assert_eq!(named.status.code(), Some(0), "{}", stderr(&named));
    for dir in [&closed, &standing] {
        mode(dir.path(), 0o755);
    }
}

#[test]
fn what_lies_in_the_users_directory_drafts_unasked_and_need_not_serve() {
    let user = tempfile::tempdir().unwrap();
    let plugins = user.path().join("plugins");
    std::fs::create_dir(&plugins).unwrap();
    let put = |name: &str| {
        let library = plugin(name);
        std::fs::copy(&library, plugins.join(library.file_name().unwrap())).unwrap();
    };
    let environment = [("MLXHOST_DATA_DIR", user.path())];
    // It serves no such model: nothing is drafted, and nobody minds.
    put("qwen_mtp");
    let output = answer(&[], &environment);
    assert_eq!(
        (drafter(&output), stderr(&output)),
        (Value::Null, String::new())
    );
    put("ngram");
    assert_eq!(drafter(&answer(&[], &environment)), "ngram");
    assert_eq!(drafter(&answer(&["--no-draft"], &environment)), Value::Null);
}

#[test]
fn the_plugin_that_drafts_can_be_named() {
    let both = directory(&["ngram", "scripted"]);
    let dir = ["--plugin-dir", both.path().to_str().unwrap()];
    let named = |name| answer(&[&dir[..], &["--drafter-plugin", name]].concat(), &[]);
    assert_eq!(drafter(&named("ngram")), "ngram");
    assert_refused(
        &named("nobody"),
        2,
        &["nobody", "there are: ngram, scripted"],
    );
}

#[test]
fn what_anyone_may_write_to_is_refused_unless_it_is_trusted() {
    let dir = directory(&["ngram"]);
    let file = dir.path().join(plugin("ngram").file_name().unwrap());
    let [shown, whole] = [&file, dir.path()].map(|path| path.to_str().unwrap());
    let says = ["anyone may write to it", "--trust-writable-plugins"];
    let trusting = |args: &[&str]| answer(&[args, &["--trust-writable-plugins"]].concat(), &[]);

    mode(&file, 0o666);
    assert_refused(&answer(&["--plugin", shown], &[]), 2, &says);
    assert_eq!(drafter(&answer(&["--plugin-dir", whole], &[])), Value::Null);
    assert_eq!(drafter(&trusting(&["--plugin", shown])), "ngram");
    mode(&file, 0o644);
    assert_eq!(drafter(&answer(&["--plugin", shown], &[])), "ngram");

    // Anyone could put another file in its place.
    mode(dir.path(), 0o777);
    assert_refused(&answer(&["--plugin", shown], &[]), 2, &says);
    assert_refused(&answer(&["--plugin-dir", whole], &[]), 2, &says);
    assert_eq!(drafter(&trusting(&["--plugin-dir", whole])), "ngram");
    // With the sticky bit only beside it: whoever names this one means it.
    mode(dir.path(), 0o1777);
    assert_eq!(drafter(&answer(&["--plugin", shown], &[])), "ngram");
    assert_refused(&answer(&["--plugin-dir", whole], &[]), 2, &says);
}

#[test]
fn with_a_lock_nothing_else_is_loaded() {
    let (dir, data) = (
        directory(&["ngram", "scripted"]),
        tempfile::tempdir().unwrap(),
    );
    let [whole, lock] = [dir.path().to_owned(), data.path().join("mine.lock")];
    let [whole, lock] = [&whole, &lock].map(|path| path.to_str().unwrap());
    let file = dir.path().join(plugin("ngram").file_name().unwrap());
    let shown = file.to_str().unwrap();
    let run = |args: &[&str]| {
        let mut command = command(args);
        command
            .env("MLXHOST_DATA_DIR", data.path())
            .output()
            .unwrap()
    };
    let locked = ["--plugin-lock", lock];
    let output = run(&[&["plugins", "lock", "--plugin", shown], &locked[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let pinned: Value = serde_json::from_slice(&std::fs::read(lock).unwrap()).unwrap();
    let digest = pinned["plugins"]["ngram"].as_str().unwrap();
    assert_eq!(digest.len(), 64);

    let found = explain(&[&["--plugin-dir", whole], &locked[..]].concat(), &[]);
    let place = "--plugin-dir";
    let expected = [
        (place, "libngram", "loaded"),
        (place, "libscripted", "refused"),
    ];
    assert_eq!(verdicts(&found), rows(&expected));
    let answered = |args: &[&str]| answer(&[args, &locked[..]].concat(), &[]);
    assert_eq!(drafter(&answered(&["--plugin", shown])), "ngram");

    // Another build, and one that calls itself by the name of the first.
    let other = plugin("scripted");
    let says = ["not pinned", "plugins lock"];
    assert_refused(&answered(&["--plugin", other.to_str().unwrap()]), 2, &says);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.push(0);
    std::fs::write(&file, &bytes).unwrap();
    assert_refused(
        &answered(&["--plugin", shown]),
        2,
        &["pinned for ngram", "plugins lock"],
    );
    // It is pinned anew; the file where nobody named one; and one that makes no sense.
    assert!(
        run(&["plugins", "lock", "--plugin", shown])
            .status
            .success()
    );
    let usual = data.path().join("plugins.lock");
    let environment = [("MLXHOST_DATA_DIR", data.path())];
    assert_eq!(
        drafter(&answer(&["--plugin", shown], &environment)),
        "ngram"
    );
    for text in ["", "{}", "{\"lock\": 2, \"plugins\": {}}", "[1, 2"] {
        std::fs::write(&usual, text).unwrap();
        let output = answer(&["--plugin", shown], &environment);
        assert_refused(&output, 2, &["not a lock file", "plugins lock"]);
    }
    std::fs::remove_file(&usual).unwrap();
    assert_eq!(
        drafter(&answer(&["--plugin", shown], &environment)),
        "ngram"
    );
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        dir.path()
            .join(format!("{name}{}", std::env::consts::DLL_SUFFIX))
    };
    std::os::unix::fs::symlink(path("loop"), path("loop")).unwrap();
    std::fs::create_dir(path("directory")).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(path("fifo"))
        .status();
    assert!(made.unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
    for name in ["loop", "directory", "fifo", "device"] {
        let path = path(name);
        let shown = path.to_str().unwrap();
        let says = if name == "loop" {
            "symbolic links"
        } else {
            "not a file"
        };
        assert_refused(&answer(&["--plugin", shown], &[]), 2, &[says]);
    }
    let found = explain(&["--plugin-dir", dir.path().to_str().unwrap()], &[]);
    let all = verdicts(&found);
    assert_eq!(all.len(), 4);
    assert!(
        all.iter().all(|(_, _, verdict)| verdict == "refused"),
        "{all:?}"
    );
}
