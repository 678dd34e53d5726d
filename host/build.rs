//! Compiles what the kernels need of MLX in C++, and lets the program find libmlx: in the installed tree beside it,
//! else where the build found it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/backend/native/prepare.cpp");
    let include = std::env::var("DEP_MLX_INCLUDE").expect("mlx-sys publishes include");
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .include(include)
        .file("src/backend/native/prepare.cpp")
        .compile("mlxhost_prepare");
    let lib_dir = std::env::var("DEP_MLX_LIB_DIR")
        .expect("mlx-sys is a direct dependency and publishes lib_dir");
    let here = if cfg!(target_os = "macos") {
        "@loader_path"
    } else {
        "$ORIGIN"
    };
    println!("cargo::rustc-link-arg=-Wl,-rpath,{here}/../lib/mlxhost/mlx/lib");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib_dir}");
}
