//! OpenBLAS in place of the reference BLAS of the Linux CPU wheel, from Debian's packages, without root.

use crate::{
    Result,
    fetch::{Scratch, files, run},
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// OpenBLAS and the two libraries it needs that not every machine has.
const PACKAGES: [&str; 3] = ["libopenblas0-pthread", "libgfortran5", "libquadmath0"];
const NEEDS: [&str; 2] = ["libgfortran.so.5", "libquadmath.so.0"];

/// Whether to look for OpenBLAS: yes, unless `MLXHOST_BLAS=wheel`.
pub fn wanted() -> bool {
    println!("cargo::rerun-if-env-changed=MLXHOST_BLAS");
    env::var_os("MLXHOST_BLAS").is_none_or(|value| value != "wheel")
}

pub struct Openblas {
    files: Vec<PathBuf>,
    _dir: Scratch,
}

impl Openblas {
    /// Downloads and unpacks the packages inside `dir`.
    pub fn download(dir: &Path) -> Result<Self> {
        let scratch = Scratch::new(dir, "openblas")?;
        let dir = &scratch.0;
        let remedy = "OpenBLAS is taken from Debian packages (apt-get and dpkg-deb)";
        let download = |options: &[String]| {
            run(
                Command::new("apt-get")
                    .args(options)
                    .arg("download")
                    .args(PACKAGES)
                    .current_dir(dir),
                remedy,
            )
        };
        if download(&[]).is_err() {
            // No package lists, as in a fresh container: fetch them into a place of our own, which needs no root.
            let lists = dir.join("lists");
            let archives = dir.join("archives");
            for path in [lists.join("partial"), archives.join("partial")] {
                fs::create_dir_all(&path)
                    .map_err(|error| format!("can't create {}: {error}", path.display()))?;
            }
            let options = [
                format!("-oDir::State::lists={}", lists.display()),
                format!("-oDir::Cache={}", archives.display()),
            ];
            run(Command::new("apt-get").args(&options).arg("update"), remedy)?;
            download(&options)?;
        }
        let tree = dir.join("tree");
        for package in files(dir)?
            .iter()
            .filter(|path| path.extension().is_some_and(|ext| ext == "deb"))
        {
            run(
                Command::new("dpkg-deb").arg("-x").arg(package).arg(&tree),
                remedy,
            )?;
        }
        Ok(Self {
            files: files(&tree)?,
            _dir: scratch,
        })
    }

    /// Puts OpenBLAS in place of the wheel's BLAS. The loader goes by file name, and finds what OpenBLAS needs by
    /// libmlx's own rpath (`$ORIGIN/../../mlx_cpu.libs`: a DT_RPATH, which libraries further down inherit).
    pub fn install(&self, root: &Path) -> Result<()> {
        let blas = files(root)?
            .into_iter()
            .find(|path| name(path).starts_with("libblas-"))
            .ok_or("the wheel brings no BLAS of its own")?;
        // Removed first, lest a hard link to it be written through.
        fs::remove_file(&blas)
            .map_err(|error| format!("can't replace {}: {error}", blas.display()))?;
        self.copy(|file| name(file).starts_with("libopenblasp-"), &blas)?;
        for need in NEEDS {
            self.copy(|file| name(file) == need, &blas.with_file_name(need))?;
        }
        Ok(())
    }

    fn copy(&self, wanted: impl Fn(&Path) -> bool, to: &Path) -> Result<()> {
        let from = self.files.iter().find(|file| wanted(file)).ok_or_else(|| {
            format!(
                "Debian's packages hold nothing to install as {}",
                to.display()
            )
        })?;
        fs::copy(from, to).map_err(|error| format!("can't write {}: {error}", to.display()))?;
        Ok(())
    }
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}
