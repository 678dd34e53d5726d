//! Builds mlx-c over an official MLX wheel and generates its Rust bindings.
//!
//! MLX comes from PyPI, the mlx-c sources from the published `mlx-sys` crate: nothing is vendored, and nothing but
//! mlx-c is compiled. What is downloaded lies in one cache that all checkouts of a user share.

#[path = "build/bind.rs"]
mod bind;
#[path = "build/blas.rs"]
mod blas;
#[path = "build/fetch.rs"]
mod fetch;
#[path = "build/mlx.rs"]
mod mlx;
#[path = "build/mlxc.rs"]
mod mlxc;

use std::{env, path::PathBuf, process::ExitCode};

/// Every step's error is a text for the user: what failed, and the remedy where one is known.
type Result<T> = std::result::Result<T, String>;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("mlx-sys: {text}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<()> {
    for path in ["build.rs", "build", "shim"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let out =
        PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?);

    let mlx = mlx::obtain()?;
    let mlxc = mlxc::sources(&out)?;
    bind::generate(&mlxc, &out)?;
    mlxc::compile(&mlxc, &mlx, &out)?;
    mlx.link();
    Ok(())
}
