//! A loaded drafter, as the host sees it.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use abi_stable::std_types::Tuple2;
use plugin_api::abi::{
    DonorKind, DrafterInfo, FaultCode, LoadRequest, OpenRequest, PluginModuleRef, RawDrafter,
    RowSpec, Tap,
};
use plugin_api::{Error, Result, TargetFacts};

use super::calls::{Origin, seen};
use super::library::Library;
use super::rows::{Rows, fault};
use crate::backend;
use crate::error::LoadError;
use crate::model::{Model, TargetHandle};

/// The deepest draft a host asks for, whatever a plugin claims.
pub(crate) const MAX_DEPTH: u32 = 256;

/// The most hidden states of the target that a drafter gets to see.
const MAX_TAPS: usize = 64;

/// Everything that makes a drafter; can be sent to the engine thread.
#[derive(Clone)]
pub struct DrafterSource {
    /// The plugin.
    pub library: Arc<Library>,
    /// Its checkpoint, for families that have one.
    pub checkpoint: Option<PathBuf>,
    /// `--drafter-option` pairs.
    pub options: Vec<(String, String)>,
}

/// A drafter that a plugin has made. Lives on the engine thread; its rows keep it alive.
pub struct Drafter {
    raw: RawDrafter,
    origin: Arc<Origin>,
    name: String,
    taps: Vec<Tap>,
    donors: Vec<DonorKind>,
    default_depth: u32,
    max_depth: u32,
    /// Declared last: the tables above point into it.
    library: Option<Arc<Library>>,
}

impl Drop for Drafter {
    fn drop(&mut self) {
        self.seen("drop", || self.raw.table.drop()(self.raw.this));
    }
}

impl Drafter {
    /// Lets the plugin read its checkpoint, and checks what it says of itself against the target.
    ///
    /// # Errors
    /// The plugin refuses (its message), or claims what the target does not have.
    pub fn load(source: &DrafterSource, target: &Model) -> Result<Rc<Self>, LoadError> {
        let origin = Arc::new(Origin {
            name: source.library.manifest().name.clone(),
            path: Some(source.library.path().to_owned()),
        });
        let about = source
            .checkpoint
            .as_deref()
            .unwrap_or(source.library.path());
        let raw = load_raw(
            &origin,
            source.library.module(),
            source.checkpoint.as_deref(),
            &source.options,
        );
        let drafter =
            raw.and_then(|raw| Self::admit(raw, origin.clone(), Some(source.library.clone())));
        drafter
            .and_then(|drafter| drafter.pair(target).map(|()| Rc::new(drafter)))
            .map_err(|error| refused(about, &origin.name, &error))
    }

    /// A drafter of a plugin that is linked into this program: for benchmarks.
    ///
    /// # Errors
    /// As [`Drafter::load`], as the plugin's own error.
    pub fn from_module(
        module: PluginModuleRef,
        plugin: &str,
        checkpoint: Option<&Path>,
        target: &Model,
    ) -> Result<Rc<Self>> {
        let origin = Arc::new(Origin {
            name: plugin.to_owned(),
            path: None,
        });
        let raw = load_raw(&origin, module, checkpoint, &[])?;
        let drafter = Self::admit(raw, origin, None)?;
        drafter.pair(target)?;
        Ok(Rc::new(drafter))
    }

    fn admit(raw: RawDrafter, origin: Arc<Origin>, library: Option<Arc<Library>>) -> Result<Self> {
        let mut drafter = Self {
            raw,
            name: origin.name.clone(),
            origin,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: 0,
            max_depth: 0,
            library,
        };
        let info = drafter.info()?;
        if info.max_depth == 0 {
            return Err(Error::failed("it says that it cannot draft"));
        }
        if info.taps.len() > MAX_TAPS {
            let problem = format!("it wants {} hidden states", info.taps.len());
            return Err(Error::failed(problem));
        }
        drafter.name = crate::text::one_line(&info.name);
        if info.donors.len() > MAX_TAPS {
            let problem = format!("it wants {} kinds of keys", info.donors.len());
            return Err(Error::failed(problem));
        }
        drafter.taps = info.taps.into();
        drafter.donors = info.donors.into();
        drafter.max_depth = info.max_depth.min(MAX_DEPTH);
        drafter.default_depth = info.default_depth.clamp(1, drafter.max_depth);
        Ok(drafter)
    }

    /// The pairing gate.
    fn pair(&self, target: &Model) -> Result<()> {
        if let Some(tap) = self.taps.iter().find(|tap| !target.has_tap(**tap)) {
            let facts = target.facts();
            return Err(Error::mismatch(format!(
                "it wants the output of layer {}, target {} has {} layers",
                tap.point, facts.name, facts.layers
            )));
        }
        let facts = target.facts();
        let lends = |kind: &DonorKind| facts.donors.iter().any(|donor| donor.kind == *kind);
        if let Some(kind) = self.donors.iter().find(|kind| !lends(kind)) {
            return Err(Error::mismatch(format!(
                "it looks at keys of kind {kind:?}, target {} has none to lend",
                facts.name
            )));
        }
        self.fits(facts)
    }

    /// Whether the plugin takes it for a drafter of a target like that.
    ///
    /// # Errors
    /// Why not.
    pub fn fits(&self, facts: &TargetFacts) -> Result<()> {
        let facts = facts.as_abi();
        self.seen("pair", || self.raw.table.pair()(self.raw.this, &facts))
            .into_result()
            .map_err(fault)
    }

    /// What the plugin says of it, unchecked.
    ///
    /// # Errors
    /// The plugin's.
    pub fn info(&self) -> Result<DrafterInfo> {
        self.seen("info", || self.raw.table.info()(self.raw.this))
            .into_result()
            .map_err(fault)
    }

    /// A group of rows for requests that start now.
    ///
    /// # Errors
    /// The plugin's.
    pub fn open(self: &Rc<Self>, target: &Rc<TargetHandle>, specs: &[RowSpec]) -> Result<Rows> {
        let request = OpenRequest {
            target: target.raw(),
            facts: target.model().facts().as_abi(),
            rows: specs.into(),
        };
        let raw = self.seen("open", || self.raw.table.open()(self.raw.this, &request));
        let raw = raw.into_result().map_err(fault)?;
        Ok(Rows::new(raw, specs.len(), self.clone(), target.clone()))
    }

    /// Runs a call of one of its slots, or of those of its rows, for others to see while it lasts.
    pub(super) fn seen<T>(&self, slot: &'static str, call: impl FnOnce() -> T) -> T {
        seen(&self.origin, slot, call)
    }

    /// The plugin's name.
    pub fn plugin(&self) -> &str {
        &self.origin.name
    }

    /// SHA-256 of its plugin's library; empty for one that is linked into this program.
    pub fn build(&self) -> &str {
        self.library.as_ref().map_or("", |library| library.digest())
    }

    /// The drafter's own name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The taps it wants with every advance.
    pub fn taps(&self) -> &[Tap] {
        &self.taps
    }

    /// The keys of the target that it looks at.
    pub fn donors(&self) -> &[DonorKind] {
        &self.donors
    }

    /// The depth to use when the user names none.
    pub fn default_depth(&self) -> u32 {
        self.default_depth
    }

    /// The largest depth it can draft.
    pub fn max_depth(&self) -> u32 {
        self.max_depth
    }
}

fn load_raw(
    origin: &Arc<Origin>,
    module: PluginModuleRef,
    checkpoint: Option<&Path>,
    options: &[(String, String)],
) -> Result<RawDrafter> {
    let path = match checkpoint.map(|path| (path, path.to_str())) {
        None => None,
        Some((_, Some(text))) => Some(text),
        Some((path, None)) => {
            let shown = path.display();
            return Err(Error::invalid(format!(
                "{shown}: drafter paths must be valid UTF-8"
            )));
        }
    };
    let options: Vec<_> = options
        .iter()
        .map(|(key, value)| Tuple2(key.as_str().into(), value.as_str().into()))
        .collect();
    let request = LoadRequest {
        checkpoint: path.map(Into::into).into(),
        options: options.as_slice().into(),
    };
    seen(origin, "load", || module.load()(backend::api(), &request))
        .into_result()
        .map_err(fault)
}

/// The plugin's refusal as an error about the drafter.
fn refused(about: &Path, plugin: &str, error: &Error) -> LoadError {
    let shown = about.display().to_string();
    let message = error.message();
    let message = message
        .strip_prefix(&shown)
        .map_or(message, |rest| rest.trim_start_matches([':', ' ', '/']));
    let what = format!("plugin {plugin}: {message}");
    match error.code() {
        FaultCode::MISMATCH => {
            LoadError::mismatch(about, what).remedy("use the drafter that was made for this target")
        }
        FaultCode::UNSUPPORTED => LoadError::unsupported(about, what),
        FaultCode::INVALID => LoadError::malformed(about, what),
        _ => LoadError::failed(about, what),
    }
}
