//! Opening a library, for good.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use plugin_api::abi::PluginModuleRef;
use sha2::{Digest, Sha256};

use super::gate;
use super::manifest::{Manifest, PluginFile};
use crate::error::LoadError;
use crate::text::{hex, one_line};

/// A loaded plugin. It stays mapped until the process ends: Rust libraries can't be unloaded
/// soundly (thread-locals, statics, abi_stable's layout cache).
pub struct Library {
    path: PathBuf,
    digest: String,
    manifest: Manifest,
    module: PluginModuleRef,
}

/// What is mapped already, by content: the same bytes are never mapped twice.
static MAPPED: LazyLock<Mutex<HashMap<String, Image>>> = LazyLock::new(Mutex::default);

/// A library for good.
struct Image {
    library: ManuallyDrop<libloading::Library>,
    /// Its root module, once it has passed the layout gate.
    module: Option<PluginModuleRef>,
}

impl Library {
    /// Passes a file through the version and the layout gate.
    ///
    /// The bytes that were checked are written to a private directory and loaded from there, so
    /// that nobody can exchange the file in between, and rebuilding a plugin never changes the
    /// pages of a running one. The copy is deleted once it is mapped.
    ///
    /// # Errors
    /// A gate refuses, or the system's loader does.
    pub fn load(file: &PluginFile) -> Result<Arc<Self>, LoadError> {
        gate::check_version(file)?;
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let image = match mapped.entry(file.digest().to_owned()) {
            Entry::Occupied(image) => image.into_mut(),
            // Also one that is refused then: its constructors have run, and may have left threads or hooks.
            Entry::Vacant(place) => place.insert(Image {
                library: ManuallyDrop::new(map(file)?),
                module: None,
            }),
        };
        let module = match image.module {
            Some(module) => module,
            None => *image
                .module
                .insert(gate::check_layout(file, &image.library)?),
        };
        Ok(Arc::new(Self {
            path: file.path().to_owned(),
            digest: file.digest().to_owned(),
            manifest: file.manifest().clone(),
            module,
        }))
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// SHA-256 of its content.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its root module.
    pub fn module(&self) -> PluginModuleRef {
        self.module
    }
}

fn map(file: &PluginFile) -> Result<libloading::Library, LoadError> {
    let failed = |what: String| LoadError::failed(file.path(), what);
    let dir = private_dir().map_err(|e| {
        failed(format!("no private directory for its copy: {e}"))
            .remedy("make the cache directory writable (MLXHOST_CACHE_DIR names another)")
    })?;
    let copy = dir
        .path()
        .join(format!("{}{}", file.digest(), std::env::consts::DLL_SUFFIX));
    write_verified(&copy, file).map_err(|e| failed(format!("can't copy it: {e}")))?;
    open(&copy).map_err(|e| {
        // The loader's own words say which library or symbol is missing.
        let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        failed(format!("the system can't load it: {}", one_line(&why)))
            .remedy("is it built for this system, and are its own libraries installed?")
    })
}

/// A directory that only this user can enter (mode 0700), removed with the value.
fn private_dir() -> std::io::Result<tempfile::TempDir> {
    let cache = crate::paths::cache_dir().filter(|dir| std::fs::create_dir_all(dir).is_ok());
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("plugin-");
    // The user's cache first: temporary directories are often mounted noexec.
    match cache.map(|dir| builder.tempdir_in(dir)) {
        Some(Ok(dir)) => Ok(dir),
        _ => builder.tempdir(),
    }
}

fn write_verified(copy: &Path, file: &PluginFile) -> std::io::Result<()> {
    let mut out = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(copy)?;
    out.write_all(file.bytes())?;
    drop(out);
    let digest = Sha256::digest(std::fs::read(copy)?);
    if hex(&digest) == file.digest() {
        Ok(())
    } else {
        Err(std::io::Error::other("the copy differs from what was read"))
    }
}

#[cfg(unix)]
fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: loading runs the library's constructors; the user chose to run this plugin. NOW: a
    // missing symbol is an error here and not a crash later. LOCAL: its symbols replace nobody's.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Into::into)
}

#[cfg(not(unix))]
compile_error!("plugins are loaded with dlopen: Linux and macOS only");
