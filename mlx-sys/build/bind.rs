//! Rust bindings for mlx-c's headers.

use crate::{
    Result,
    fetch::{Needs, cached, files, wheel},
};
use std::{env, path::Path, process::Command};

/// The libclang for machines that have none.
const LIBCLANG: &str = "libclang==18.1.1";

pub fn generate(mlxc: &Path, out: &Path) -> Result<()> {
    let mut builder = bindgen::Builder::default()
        .rust_target(
            "1.85.0"
                .parse()
                .map_err(|error| format!("bindgen: {error}"))?,
        )
        .rust_edition(bindgen::RustEdition::Edition2024)
        .clang_arg(format!("-I{}", mlxc.display()))
        .allowlist_item("_?mlx_.*|MLX_.*|b?float16_t")
        .layout_tests(false);
    if !cfg!(target_vendor = "apple") {
        // half.h declares half types only for ARM, by headers that are the compiler's own. `src/off_apple.rs` has them.
        builder = builder.clang_arg("-DMLX_HALF_H");
    }
    for arg in libclang()? {
        builder = builder.clang_arg(arg);
    }
    for header in files(&mlxc.join("mlx/c"))? {
        if header.extension().is_some_and(|ext| ext == "h")
            && header.parent() == Some(&mlxc.join("mlx/c"))
        {
            builder = builder.header(header.to_string_lossy());
        }
    }
    let bindings = builder
        .generate()
        .map_err(|error| format!("bindgen failed on mlx-c's headers: {error}"))?;
    let file = out.join("bindings.rs");
    bindings
        .write_to_file(&file)
        .map_err(|error| format!("can't write {}: {error}", file.display()))
}

/// Makes sure that bindgen finds a libclang, and gives the arguments that it needs.
fn libclang() -> Result<Vec<String>> {
    for name in ["LIBCLANG_PATH", "LLVM_CONFIG_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if clang_sys::load().is_err() {
        let root = cached(&LIBCLANG.replace("==", "-"), |dir| {
            wheel(LIBCLANG, Needs::Nothing, dir)
        })?;
        let library = files(&root)?
            .into_iter()
            .find(|file| file.file_stem().is_some_and(|stem| stem == "libclang"))
            .ok_or_else(|| {
                format!(
                    "there is no libclang in {}: delete it and build again",
                    root.display()
                )
            })?;
        // SAFETY: this process has no other thread.
        unsafe { env::set_var("LIBCLANG_PATH", library) };
    }
    // A libclang without its clang lacks stddef.h and the like; the C compiler's serve, where clang's own aren't found.
    let compiler = cc::Build::new()
        .try_get_compiler()
        .map_err(|error| format!("no C compiler: {error}"))?;
    let include = Command::new(compiler.path())
        .arg("-print-file-name=include")
        .output();
    Ok(match include {
        Ok(output) if output.status.success() => {
            vec![
                "-idirafter".into(),
                String::from_utf8_lossy(&output.stdout).trim().into(),
            ]
        }
        _ => Vec::new(),
    })
}
