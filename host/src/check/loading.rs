//! Tests up to the first draft: gates, options, pairing, and what can't be used.

use object::{Object, ObjectSection, ObjectSymbol};
use plugin_api::abi::FaultCode;
use plugin_api::{Error, RowState, TargetFacts};

use super::report::{Broken, Finding, Outcome};
use super::stage::{Row, Stage};
use super::subject::Subject;
use super::target;
use crate::plugin::{Drafter, Library, MAX_DEPTH, Progress};
use crate::text::one_line;

/// An option that no plugin has.
const NO_OPTION: &str = "no-such-option";

pub(super) fn gates(subject: &Subject) -> Outcome {
    let file = subject.file()?;
    let library = Library::load(&file)?;
    let manifest = library.manifest();
    Ok(Finding::Passed(format!(
        "{} {}, built with plugin API {}",
        manifest.name, manifest.version, manifest.api
    )))
}

/// What other allocators leave in a library: names of functions, and texts that stay when names are stripped.
const ALLOCATORS: [(&str, &[&str], &str); 3] = [
    ("jemalloc", &["rjem_", "je_malloc", "je_free"], "<jemalloc>"),
    ("mimalloc", &["mi_malloc", "mi_free"], "mimalloc: "),
    ("snmalloc", &["sn_malloc", "sn_rust_alloc"], "snmalloc"),
];

pub(super) fn self_contained(subject: &Subject) -> Outcome {
    let file = subject.file()?;
    let bytes = file.bytes();
    let library = object::File::parse(bytes).map_err(|e| Broken(e.to_string()))?;
    let symbols = library.symbols().chain(library.dynamic_symbols());
    let defined = symbols.filter(|symbol| !symbol.is_undefined());
    let defined: Vec<&str> = defined.filter_map(|symbol| symbol.name().ok()).collect();
    let mut notes = Vec::new();
    for (name, functions, text) in ALLOCATORS {
        let mut names = defined.iter().map(|name| name.trim_start_matches('_'));
        let has_function = names.any(|name| functions.iter().any(|f| name.starts_with(f)));
        if has_function || contains(bytes, text.as_bytes()) {
            notes.push(format!(
                "it brings {name}: several plugins that do break each other's thread-locals on some systems"
            ));
        }
    }
    if has_global_allocator(&defined) {
        notes.push("it has a #[global_allocator] of its own".to_owned());
    }
    if defined
        .iter()
        .any(|name| matches!(*name, "malloc" | "free"))
    {
        notes.push("it defines malloc or free of its own".to_owned());
    }
    if has_static_tls(&library) {
        notes.push(
            "it needs static thread-local storage (DF_STATIC_TLS), of which a process has little"
                .to_owned(),
        );
    }
    Ok(Finding::noting(
        notes,
        "no allocator of its own, no static thread-locals",
    ))
}

/// Whether there is a `#[global_allocator]`, where names were not stripped: what Rust code allocates with, and
/// without the standard library's own behind it. Older compilers have a name for it.
fn has_global_allocator(defined: &[&str]) -> bool {
    let hooks = ["__rust_alloc", "__rust_dealloc", "__rust_realloc"];
    let is_hook = |name: &&str| hooks.iter().any(|hook| name.ends_with(hook));
    let has = |part: &str| defined.iter().any(|name| name.contains(part));
    has("__rg_alloc") || (defined.iter().any(is_hook) && !has("__rdl_"))
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    let first = |&byte: &u8| byte == text[0];
    let mut at = 0;
    while let Some(next) = bytes[at..].iter().position(first) {
        at += next;
        if bytes[at..].starts_with(text) {
            return true;
        }
        at += 1;
    }
    false
}

/// Whether the flags of an ELF file's dynamic section (64 bits, little endian: what plugins are made for) say so.
fn has_static_tls(library: &object::File<'_>) -> bool {
    const DT_FLAGS: u64 = 30;
    const DF_STATIC_TLS: u64 = 0x10;
    let section = library.section_by_name(".dynamic");
    let Some(Ok(data)) = section.map(|section| section.data()) else {
        return false;
    };
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    data.chunks_exact(16)
        .map(|entry| (word(&entry[..8]), word(&entry[8..])))
        .any(|(tag, value)| tag == DT_FLAGS && value & DF_STATIC_TLS != 0)
}

pub(super) fn drafter(subject: &Subject) -> Outcome {
    let target = subject.target()?;
    let drafter = subject.load(&target)?;
    let facts = target.model().facts();
    Ok(Finding::Passed(format!(
        "{} drafts up to {} tokens for {}, hidden size {}",
        drafter.name(),
        drafter.max_depth(),
        facts.model_type,
        facts.hidden_size
    )))
}

pub(super) fn options(subject: &Subject) -> Outcome {
    let target = subject.target()?;
    let odd = [(NO_OPTION.to_owned(), "1".to_owned())];
    match Drafter::load(&subject.source(&odd)?, target.model()) {
        Ok(_) => Err(Broken(format!(
            "it loads with the option {NO_OPTION}=1: a misspelt option goes unnoticed"
        ))),
        Err(error) if error.to_string().contains(NO_OPTION) => {
            Ok(Finding::Passed("refused by name".to_owned()))
        }
        Err(error) => Ok(Finding::Warning(format!(
            "refused, but not by name: {}",
            error.kind()
        ))),
    }
}

pub(super) fn info(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let first = stage.drafter.info()?;
    // It is to be the same at any time: also when it has drafted.
    let mut group = stage.begun(1, 1)?;
    group.round(&[1], &[0])?;
    drop(group);
    let again = stage.drafter.info()?;
    if format!("{first:?}") != format!("{again:?}") {
        return Err(Broken("it says something else of itself later".to_owned()));
    }
    let mut notes = Vec::new();
    if first.name.is_empty() || first.name.len() > 64 || *first.name != one_line(&first.name) {
        notes.push("its name is not a short plain text".to_owned());
    }
    if first.default_depth == 0 || first.default_depth > first.max_depth {
        notes.push(format!(
            "its usual depth is {}, its largest {}",
            first.default_depth, first.max_depth
        ));
    }
    if first.max_depth > MAX_DEPTH {
        notes.push(format!(
            "it says that it drafts {} tokens; no host asks for more than {MAX_DEPTH}",
            first.max_depth
        ));
    }
    let stored = subject.drafter_checkpoint()?.map_or(0, |c| c.bytes());
    // Packed weights may be widened as they are loaded.
    if first.weight_bytes > stored.saturating_mul(8) {
        notes.push(format!(
            "it says that it keeps {} bytes of weights, its checkpoint has {stored}",
            first.weight_bytes
        ));
    }
    Ok(Finding::noting(
        notes,
        format!(
            "{}: {} taps, {} donors, depth {} of {}",
            first.name,
            first.taps.len(),
            first.donors.len(),
            first.default_depth,
            first.max_depth
        ),
    ))
}

pub(super) fn pairing(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let facts = stage.target.model().facts().clone();
    let drafter = &stage.drafter;
    let depends = !drafter.taps().is_empty() || !drafter.donors().is_empty();
    let mut others: Vec<(&str, TargetFacts)> = vec![
        (
            "another hidden size",
            TargetFacts {
                hidden_size: facts.hidden_size + 64,
                ..facts.clone()
            },
        ),
        (
            "a vocabulary of another size",
            TargetFacts {
                vocab_size: facts.vocab_size + 1,
                ..facts.clone()
            },
        ),
    ];
    if !drafter.donors().is_empty() {
        let mut keys = facts.clone();
        for donor in &mut keys.donors {
            donor.head_dim *= 2;
        }
        others.push(("keys of another shape", keys));
    }
    let (mut notes, mut refused) = (Vec::new(), Vec::new());
    for (what, other) in others {
        match drafter.fits(&other) {
            Ok(()) if depends => notes.push(format!("it accepts a target with {what}")),
            Ok(()) => {}
            Err(error) if error.code() == FaultCode::MISMATCH => refused.push(what),
            Err(error) if error.code() == FaultCode::PANICKED => {
                return Err(Broken(format!("{what}: {error}")));
            }
            Err(error) => notes.push(format!("{what} is no mismatch to it: {error}")),
        }
    }
    // A refusal is no state: the right one is still accepted.
    drafter.fits(&facts)?;
    let passed = match refused.is_empty() {
        true => "it takes any target, and needs none of its hiddens or keys".to_owned(),
        false => format!("it refuses {}", refused.join(", ")),
    };
    Ok(Finding::noting(notes, passed))
}

/// What came of calls that can't be served.
#[derive(Default)]
struct Answers {
    tried: usize,
    notes: Vec<String>,
}

impl Answers {
    /// A call that must be refused, or that may be (`must` false).
    fn hear<T>(&mut self, what: &str, must: bool, answer: Result<T, Error>) {
        self.tried += 1;
        match answer {
            Ok(_) if must => self.notes.push(format!("{what} is accepted")),
            Ok(_) => {}
            Err(error) if error.code() == FaultCode::PANICKED => {
                self.notes.push(format!("{what}: {error}"));
            }
            Err(_) => {}
        }
    }
}

pub(super) fn bad_calls(subject: &Subject) -> Outcome {
    let stage = subject.stage()?;
    let mut answers = Answers::default();
    files(subject, &stage, &mut answers)?;
    calls(&stage, &mut answers)?;
    states(&stage, &mut answers)?;
    // None of that is anybody else's business.
    let mut group = stage.begun(1, 2)?;
    group.round(&[stage.depth(), stage.depth()], &[1, 0])?;
    let tried = answers.tried;
    Ok(Finding::noting(
        answers.notes,
        format!("{tried} of them, and it goes on"),
    ))
}

/// Drafters that are none.
fn files(subject: &Subject, stage: &Stage, answers: &mut Answers) -> Result<(), Broken> {
    let dir = tempfile::tempdir().map_err(|e| Broken(format!("no temporary directory: {e}")))?;
    target::write(dir.path())?;
    let places = [
        ("a drafter that is not there", dir.path().join("nowhere")),
        ("a target in place of a drafter", dir.path().to_owned()),
    ];
    for (what, place) in places {
        let mut source = subject.source(&[])?;
        source.checkpoint = Some(place);
        match Drafter::load(&source, stage.target.model()) {
            Ok(_) => answers.hear(what, true, Ok(())),
            Err(error) => {
                // The code of the fault is gone, its words are not.
                let text = error.kind().to_string();
                let code = match text.contains(": panicked: ") {
                    true => FaultCode::PANICKED,
                    false => FaultCode::INVALID,
                };
                answers.hear::<()>(what, true, Err(Error::new(code, text)));
            }
        }
    }
    Ok(())
}

/// Calls that no host makes; a plugin has to look at sizes all the same.
fn calls(stage: &Stage, answers: &mut Answers) -> Result<(), Broken> {
    let fresh = || stage.open(vec![Row::new(1, 8, stage.vocab())]);
    answers.hear("a draft before the prompt", false, fresh()?.draft(&[1]));
    answers.hear(
        "a state before the prompt",
        false,
        fresh()?.rows().capture(0),
    );
    let mut group = stage.begun(1, 1)?;
    answers.hear(
        "a state of a row that is not there",
        true,
        group.rows().capture(1),
    );
    let two = Progress {
        tokens: &[&[1], &[1]],
        next: &[1, 1],
        accepted: &[0, 0],
        taps: &[],
    };
    let mut group = stage.begun(1, 1)?;
    answers.hear("news of two rows to one", true, group.rows().commit(&two));
    if !stage.taps.is_empty() {
        let bare = Progress {
            tokens: &[&[1]],
            next: &[1],
            accepted: &[0],
            taps: &[],
        };
        let mut group = stage.begun(1, 1)?;
        answers.hear(
            "tokens without the hiddens",
            true,
            group.rows().commit(&bare),
        );
    }
    Ok(())
}

/// States of other drafters, or with holes.
fn states(stage: &Stage, answers: &mut Answers) -> Result<(), Broken> {
    let captured = stage.begun(1, 1)?.rows().capture(0)?;
    let Some(state) = captured else {
        return Ok(());
    };
    let fresh = |rows: usize| stage.open(vec![Row::new(1, 8, stage.vocab()); rows]);
    let foreign = RowState::new("of-another-plugin/1", state.processed());
    answers.hear(
        "a state of another form",
        true,
        fresh(1)?.rows().restore(&foreign),
    );
    if state.tensors().next().is_some() {
        let hollow = RowState::new(state.schema(), state.processed());
        answers.hear(
            "a state without its tensors",
            true,
            fresh(1)?.rows().restore(&hollow),
        );
    }
    answers.hear(
        "one row's state for two rows",
        true,
        fresh(2)?.rows().restore(&state),
    );
    Ok(())
}
