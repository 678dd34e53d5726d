//! mlx-c, the C layer over MLX: where its sources come from, and their compilation.

use crate::{
    Result,
    fetch::{files, run},
    mlx::Mlx,
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The mlx-c tree inside the published crate `mlx-sys`, which cargo fetches as any other.
pub fn sources(out: &Path) -> Result<PathBuf> {
    // A package that nobody builds. `[workspace]` keeps it out of the workspace whose target directory it lies in.
    let dir = out.join("mlx-c-source");
    let manifest = dir.join("Cargo.toml");
    let text = "[package]\nname = \"mlx-c-source\"\nedition = \"2021\"\n[lib]\npath = \"lib.rs\"\n\
                [dependencies]\nmlx-sys = \"=0.7.0\"\n[workspace]\n";
    fs::create_dir_all(&dir)
        .and_then(|()| fs::write(&manifest, text))
        .and_then(|()| fs::write(dir.join("lib.rs"), ""))
        .map_err(|error| format!("can't write {}: {error}", manifest.display()))?;

    let metadata = |options: &[&str]| {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .args(["metadata", "--format-version=1", "--manifest-path"])
            .arg(&manifest)
            .args(options);
        run(
            &mut command,
            "the crate mlx-sys 0.7.0 must be in cargo's cache, or its registry be reachable",
        )
    };
    // Offline first: what is in the cache must do without the network.
    let json = metadata(&["--offline"]).or_else(|_| metadata(&[]))?;
    let root = json
        .split("\"manifest_path\":\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .map(|path| Path::new(path).with_file_name("src/mlx-c"))
        .find(|path| path.join("mlx/c/mlx.h").is_file())
        .ok_or("the crates.io crate mlx-sys 0.7.0 holds no src/mlx-c")?;
    Ok(root)
}

/// Compiles mlx-c into a static library, as two units of 13 files each: nearly all the time goes into MLX's headers,
/// which are then read twice and not 26 times (a minute and a half of CPU time).
pub fn compile(mlxc: &Path, mlx: &Mlx, out: &Path) -> Result<()> {
    let sources = files(&mlxc.join("mlx/c"))?;
    let sources = sources
        .iter()
        .filter(|path| path.extension().is_some_and(|ext| ext == "cpp"));
    let mut units = [String::new(), String::new()];
    for (index, source) in sources.enumerate() {
        units[index % 2] += &format!("#include \"{}\"\n", source.display());
    }

    let mut build = cc::Build::new();
    for (index, unit) in units.iter().enumerate() {
        let file = out.join(format!("mlxc{index}.cpp"));
        fs::write(&file, unit)
            .map_err(|error| format!("can't write {}: {error}", file.display()))?;
        build.file(file);
    }
    build
        .cpp(true)
        .std("c++20")
        .warnings(false)
        // Thin wrappers: nothing in them gains from more, and debug information would be most of the library.
        .opt_level(1)
        .debug(false)
        .include(mlxc)
        .include(mlx.include())
        // mlx-c uses std::format, which gcc 12 lacks. The shim is searched last, so never in place of a real <format>.
        .flags(["-idirafter", "shim", "-include", "format"]);
    build.try_compile("mlxc").map_err(|error| {
        format!("compiling mlx-c failed: {error}\n  remedy: a C++20 compiler is needed (g++ 12 or clang 15 at least)")
    })
}
