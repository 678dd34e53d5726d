//! The MLX library and headers: an unpacked wheel, with a fast BLAS in it where there is one.

use crate::{
    Result, blas,
    fetch::{Needs, cached, wheel},
};
use std::{
    env,
    path::{Path, PathBuf},
};

/// The MLX version that mlx-c 0.7.0 is written against.
const VERSION: &str = "0.32.2";

/// An unpacked wheel: `mlx/{include,lib}`, on Linux what libmlx needs in `*.libs` beside `mlx`.
pub struct Mlx {
    pub root: PathBuf,
}

pub fn obtain() -> Result<Mlx> {
    let target = |name| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let (os, arch) = (target("OS"), target("ARCH"));
    if env::var_os("TARGET") != env::var_os("HOST") {
        return Err(
            "cross compilation is not supported: pip picks the wheel of the machine that builds"
                .into(),
        );
    }
    let cuda = cfg!(feature = "cuda");
    let package = match os.as_str() {
        "linux" if cuda => "mlx-cuda-13",
        "linux" => "mlx-cpu",
        // Not tested by the authors of this file, who had no Mac.
        "macos" if !cuda => "mlx-metal",
        _ => {
            return Err(format!(
                "there is no MLX wheel for {os}{}",
                if cuda { " with CUDA" } else { "" }
            ));
        }
    };
    let key = format!("{package}-{VERSION}-{arch}");
    let fetch = |dir: &Path| {
        // The CUDA wheel finds NVIDIA's libraries beside itself, as pip would lay them out.
        let needs = if cuda {
            Needs::Dependencies
        } else {
            Needs::Nothing
        };
        wheel(&format!("{package}=={VERSION}"), needs, dir)
    };
    let with_openblas = |dir: &Path| {
        let openblas = blas::Openblas::download(dir)?;
        fetch(dir)?;
        openblas.install(dir)
    };

    // A tree of its own per BLAS: a build that asks for the other one must not change it under a running program.
    let fast = (os == "linux" && blas::wanted())
        .then(|| cached(&format!("{key}-openblas"), with_openblas));
    let root = match fast {
        Some(Ok(root)) => root,
        other => {
            let root = cached(&key, fetch)?;
            if let Some(Err(why)) = other {
                println!(
                    "cargo::warning=mlx-sys: no OpenBLAS, so MLX keeps the slow BLAS of its wheel \
                     (MLXHOST_BLAS=wheel silences this): {}",
                    why.lines().map(str::trim).collect::<Vec<_>>().join("; ")
                );
            }
            root
        }
    };

    let mlx = Mlx { root };
    for part in [mlx.library(), mlx.include().join("mlx/mlx.h")] {
        if !part.is_file() {
            return Err(format!(
                "{} is missing: delete {} and build again",
                part.display(),
                mlx.root.display()
            ));
        }
    }
    Ok(mlx)
}

impl Mlx {
    pub fn include(&self) -> PathBuf {
        self.root.join("mlx/include")
    }

    fn lib_dir(&self) -> PathBuf {
        self.root.join("mlx/lib")
    }

    fn library(&self) -> PathBuf {
        self.lib_dir().join(if cfg!(target_os = "macos") {
            "libmlx.dylib"
        } else {
            "libmlx.so"
        })
    }

    /// Tells cargo to link libmlx, and dependents (as `DEP_MLX_*`) where it lies.
    pub fn link(&self) {
        let lib_dir = self.lib_dir();
        println!("cargo::rustc-link-search=native={}", lib_dir.display());
        println!("cargo::rustc-link-lib=dylib=mlx");
        // Only for this crate's own tests; see the README for what a dependent does.
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib_dir.display());
        println!("cargo::metadata=root={}", self.root.display());
        println!("cargo::metadata=lib_dir={}", lib_dir.display());
        println!("cargo::metadata=include={}", self.include().display());
        println!("cargo::metadata=version={VERSION}");
        // Someone who clears the cache gets it filled again by the next build.
        println!("cargo::rerun-if-changed={}", self.library().display());
    }
}
