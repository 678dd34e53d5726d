//! From arguments to a running engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mlxhost::LoadError;
use mlxhost::checkpoint::Checkpoint;
use mlxhost::engine::{DrafterConfig, Engine, EngineConfig, Limits};
use mlxhost::kernels::{self, pool};
use mlxhost::model::KvConfig;
use mlxhost::paths;
use mlxhost::plugin::{Choice, DrafterSource, Library, Registry, Search, Verdict};
use mlxhost::prefix::PrefixConfig;
use mlxhost::text::{GenerationDefaults, GgufVocab, Tokenizer, hex, one_line};
use sha2::{Digest, Sha256};

use super::args::{ModelArgs, PluginPaths};
use super::error::CliError;
use super::swap::Watch;

/// The bundled target and its drafters, below a `models` directory.
const BUNDLED_MODEL: &str = "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf";
const BUNDLED_DRAFTERS: [&str; 2] = ["smollm2-mtp/4bit", "smollm2-dflash/4bit"];

/// Shorter loads need no progress bar.
const PATIENCE: Duration = Duration::from_millis(500);

/// Everything that answers need.
pub struct Loaded {
    /// Declared first: it ends before the engine.
    _watch: Option<Watch>,
    pub engine: Arc<Engine>,
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub defaults: GenerationDefaults,
}

/// What a command needs of an engine.
pub struct Needs {
    pub limits: Limits,
    pub prefix: PrefixConfig,
    /// A model without a tokenizer will do.
    pub ids_alone: bool,
    /// Requests may name other drafters than the default.
    pub all_drafters: bool,
}

/// Loads what the user named.
pub fn load(args: &ModelArgs, needs: Needs) -> Result<Loaded, CliError> {
    args.compute.apply();
    let kv = args.kv.config()?;
    let registry = registry(&args.plugins)?;
    let (model, bundled) = target(args)?;
    let checkpoint = Arc::new(Checkpoint::open(&model)?);
    let tokenizer = tokenizer(&checkpoint, needs.ids_alone)?.map(Arc::new);
    let defaults = if model.is_dir() {
        GenerationDefaults::from_dir(&model)?
    } else {
        GenerationDefaults::default()
    };
    let only = args.drafter_plugin.as_deref();
    let mut sources: Vec<_> = drafter(args, &registry, &checkpoint, bundled, only)?
        .into_iter()
        .collect();
    let watched = sources
        .first()
        .map(|source| source.library.path().to_owned());
    if args.watch && watched.is_none() {
        return Err(CliError::input(
            "--watch: there is no drafter whose plugin could change",
        ));
    }
    if needs.all_drafters && !sources.is_empty() {
        other_drafters(args, &registry, &checkpoint, &mut sources)?;
    }
    let drafters = sources.into_iter().map(|source| DrafterConfig {
        costs: costs(&model, &source, &kv),
        source,
    });
    let drafters = drafters.collect();
    let bytes = checkpoint.bytes();
    let config = EngineConfig {
        checkpoint,
        tokenizer: tokenizer.clone(),
        drafters,
        limits: needs.limits,
        prefix: needs.prefix,
        kv,
        plugin_timeout: args.plugin_timeout(),
    };
    let progress = Progress::new("loading", bytes);
    let engine = Engine::start(config, {
        let progress = progress.clone();
        move |bytes| progress.add(bytes)
    });
    progress.end();
    let engine = Arc::new(engine?);
    let watched = watched.filter(|_| args.watch);
    Ok(Loaded {
        _watch: watched
            .map(|path| Watch::start(args, &engine, &path))
            .transpose()?,
        engine,
        tokenizer,
        defaults,
    })
}

/// The target, and whether it is the bundled one.
fn target(args: &ModelArgs) -> Result<(PathBuf, bool), CliError> {
    Ok(match &args.model {
        Some(path) => (path.clone(), false),
        None => (bundled(BUNDLED_MODEL)?, true),
    })
}

/// What drafts with the plugin at `path` instead, with all else as the user said. Loads the library.
pub fn replacement(args: &ModelArgs, path: &Path) -> Result<DrafterConfig, CliError> {
    let registry = discover(&Search {
        named: vec![path.to_owned()],
        lock: lock_file(&args.plugins),
        trust_writable: args.plugins.trust_writable_plugins,
        ..Search::default()
    })?;
    let (model, bundled) = target(args)?;
    let checkpoint = Checkpoint::open(&model)?;
    let source = drafter(args, &registry, &checkpoint, bundled, None)?
        .ok_or_else(|| CliError::input("this run decodes without drafts"))?;
    Ok(DrafterConfig {
        costs: costs(&model, &source, &args.kv.config()?),
        source,
    })
}

/// Where what rounds cost is remembered, for this pair as this process computes.
fn costs(model: &Path, drafter: &DrafterSource, kv: &KvConfig) -> Option<PathBuf> {
    let mut digest = Sha256::new();
    let mut add = |part: &dyn std::fmt::Debug| digest.update(format!("{part:?};"));
    for path in [Some(model), drafter.checkpoint.as_deref()]
        .into_iter()
        .flatten()
    {
        let path = path.canonicalize().ok()?;
        let facts = path.metadata().ok()?;
        add(&(&path, facts.len(), facts.modified().ok()));
    }
    add(&(drafter.library.digest(), &drafter.options));
    add(kv);
    add(&(pool::threads(), kernels::exact(), env!("CARGO_PKG_VERSION")));
    let name = hex(&digest.finalize()[..16]);
    Some(
        paths::cache_dir()?
            .join("costs")
            .join(name)
            .with_extension("json"),
    )
}

/// A bar over bytes, hidden until the work has taken a while; on a pipe it stays hidden.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
}

impl Progress {
    /// The bar begins with `verb`.
    pub fn new(verb: &'static str, bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::hidden());
        let style = format!("{verb} {{wide_bar}} {{bytes}}/{{total_bytes}} {{eta}}");
        let style = ProgressStyle::with_template(&style);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let started = Instant::now();
        Self { bar, started }
    }

    /// More bytes are done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        if self.started.elapsed() > PATIENCE && self.bar.is_hidden() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// The bar goes away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// Where the user's paths say that plugins are.
pub fn search(paths: &PluginPaths) -> Search {
    let search = Search {
        named: paths.plugin.clone(),
        directories: paths.plugin_dir.clone(),
        lock: lock_file(paths),
        trust_writable: paths.trust_writable_plugins,
        ..Search::default()
    };
    let search_path = std::env::var_os("MLXHOST_PLUGIN_PATH");
    search
        .with_search_path(search_path.as_deref())
        .with_standing()
}

/// The file that says which plugins are allowed.
pub fn lock_file(paths: &PluginPaths) -> Option<PathBuf> {
    let usual = || Some(paths::data_dir()?.join("plugins.lock"));
    paths.plugin_lock.clone().or_else(usual)
}

/// Looks for plugins. What the user has named has to be right.
pub fn discover(search: &Search) -> Result<Registry, CliError> {
    let mut registry = Registry::discover(search)?;
    match registry.take_refusal_of_named() {
        Some(error) => Err(error.into()),
        None => Ok(registry),
    }
}

/// The plugins that the user's paths hold. What was not named and can't be used is passed over.
pub fn registry(paths: &PluginPaths) -> Result<Registry, CliError> {
    let registry = discover(&search(paths))?;
    for searched in registry.searched() {
        if let Some(problem) = &searched.problem {
            tracing::warn!("plugins: {}", one_line(&problem.to_string()));
        }
    }
    for candidate in registry.candidates() {
        if let Verdict::Refused(error) = &candidate.verdict {
            tracing::debug!("not a plugin: {error}");
        }
    }
    Ok(registry)
}

/// The model's tokenizer; a model without one can only continue token ids.
pub fn tokenizer(checkpoint: &Checkpoint, optional: bool) -> Result<Option<Tokenizer>, LoadError> {
    let path = checkpoint.path();
    if let Some(metadata) = checkpoint.gguf() {
        let vocab = GgufVocab::from_metadata(path, metadata)?;
        return Tokenizer::from_gguf(path, vocab).map(Some);
    }
    if optional && !path.join("tokenizer.json").exists() {
        return Ok(None);
    }
    Tokenizer::from_dir(path).map(Some)
}

/// What drafts, if anything.
fn drafter(
    args: &ModelArgs,
    registry: &Registry,
    target: &Checkpoint,
    bundled_model: bool,
    only: Option<&str>,
) -> Result<Option<DrafterSource>, CliError> {
    if args.no_draft || args.depth == Some(0) {
        return Ok(None);
    }
    let is_asked_for = !args.drafter.is_empty() || only.is_some();
    if registry.found().next().is_none() && only.is_none() {
        let given = match (args.drafter.first(), args.drafter_option.first()) {
            (Some(_), _) => "a drafter",
            (None, Some(_)) => "an option for a drafter",
            (None, None) => return Ok(None),
        };
        return Err(CliError::input(format!(
            "{given} was given, but no plugin\n  name one with --plugin PATH"
        )));
    }
    let named = match args.drafter.first() {
        Some(path) => Some(open_drafter(path)?),
        // The bundled head goes with the bundled model, if a plugin for it is there.
        None if bundled_model => bundled_drafter(registry)?,
        None => None,
    };
    let choice = match choose(registry, named.as_ref(), target, only) {
        Ok(choice) => choice,
        // Plugins that lie where they are looked for unasked need not serve every model.
        Err(error) if !is_asked_for && !registry.is_asked_for() => {
            tracing::debug!("no drafts: {error}");
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let mut options = args.drafter_option.clone();
    if let Some(threshold) = args.min_confidence {
        options.push(("min_confidence".to_owned(), threshold.to_string()));
    }
    Ok(Some(DrafterSource {
        library: choice.library,
        checkpoint: choice.checkpoint,
        options,
    }))
}

/// The plugin for a drafter, or for none that is named.
fn choose(
    registry: &Registry,
    named: Option<&Checkpoint>,
    target: &Checkpoint,
    only: Option<&str>,
) -> Result<Choice, LoadError> {
    let families = named.map(Checkpoint::families);
    let drafter = named.map(Checkpoint::path).zip(families.as_deref());
    registry.choose(drafter, (target.path(), &model_type(target)), only)
}

/// Beside the default: the other drafters that are named, and the plugins that need none.
fn other_drafters(
    args: &ModelArgs,
    registry: &Registry,
    target: &Checkpoint,
    sources: &mut Vec<DrafterSource>,
) -> Result<(), CliError> {
    let mut choices = Vec::new();
    for path in args.drafter.iter().skip(1) {
        choices.push(choose(registry, Some(&open_drafter(path)?), target, None)?);
    }
    for file in registry.found() {
        if file.manifest().families.is_empty() {
            choices.push(Choice {
                library: Library::load(file)?,
                checkpoint: None,
            });
        }
    }
    for choice in choices {
        let name = |library: &Library| library.manifest().name.clone();
        let taken = |known: &DrafterSource| name(&known.library) == name(&choice.library);
        if sources.iter().any(taken) {
            if choice.checkpoint.is_none() {
                continue;
            }
            return Err(CliError::input(format!(
                "two drafters of plugin {}: a request could not tell them apart",
                name(&choice.library)
            )));
        }
        sources.push(DrafterSource {
            library: choice.library,
            checkpoint: choice.checkpoint,
            options: Vec::new(),
        });
    }
    Ok(())
}

/// The `model_type` of a checkpoint's config.
pub fn model_type(checkpoint: &Checkpoint) -> String {
    let value = checkpoint.config().get("model_type");
    value
        .and_then(|v| v.as_str())
        .unwrap_or_default()
        .to_owned()
}

/// A drafter's checkpoint, which has to say what it is.
fn open_drafter(path: &Path) -> Result<Checkpoint, CliError> {
    let checkpoint = Checkpoint::open(path)?;
    if checkpoint.families().is_empty() {
        return Err(LoadError::malformed(path, "its config names no model_type").into());
    }
    Ok(checkpoint)
}

/// The first of the bundled drafters that a plugin at hand serves.
fn bundled_drafter(registry: &Registry) -> Result<Option<Checkpoint>, CliError> {
    for place in BUNDLED_DRAFTERS {
        let checkpoint = open_drafter(&bundled(place)?)?;
        if registry.serves(&checkpoint.families()) {
            return Ok(Some(checkpoint));
        }
    }
    Ok(None)
}

/// A bundled file: in the source tree that the program was built in, or in the tree that it is
/// installed in.
fn bundled(file: &str) -> Result<PathBuf, CliError> {
    let exe = std::env::current_exe().and_then(|exe| exe.canonicalize());
    let exe = exe.map_err(|e| CliError::io("can't find the program's own directory", &e))?;
    let places = ["models", "share/mlxhost/models"];
    exe.ancestors()
        .skip(1)
        .take(4)
        .flat_map(|dir| places.map(|place| dir.join(place).join(file)))
        .find(|path| path.exists())
        .ok_or_else(|| {
            CliError::input(format!(
                "no --model, and the bundled {file} is not there\n  `make model` fetches it, or name a model with --model PATH"
            ))
        })
}
