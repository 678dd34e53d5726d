//! A conformance suite for plugins.
//!
//! A plugin is native code and may do anything, so each test runs in a process of its own with a time limit
//! ([`supervise`]); inside it, [`Test::run`] leads the plugin as the engine would and says what it found.

mod doctor;
mod drafting;
mod fuzz;
mod group;
mod loading;
mod moving;
mod report;
mod resources;
mod stage;
mod subject;
mod supervise;
mod target;

pub use report::{Report, Verdict};
pub use stage::Random;
pub use subject::Subject;
pub use supervise::supervise;
pub use target::write as write_target;

use report::Outcome;

/// What a test needs to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The library alone.
    Library,
    /// A drafter that it makes, and a target for that.
    Drafter,
    /// A drafter and a target that the user named.
    Pair,
}

/// One thing that is checked.
pub struct Test {
    /// Its name, for the user.
    pub name: &'static str,
    /// What it checks, one sentence.
    pub about: &'static str,
    /// What it needs.
    pub needs: Needs,
    body: fn(&Subject) -> Outcome,
}

impl Test {
    /// The test of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TESTS.iter().find(|test| test.name == name)
    }

    /// Whether its failure means that nothing of the plugin can be run.
    pub fn is_gate(&self) -> bool {
        self.name == GATES
    }

    /// Runs it in this process.
    pub fn run(&self, subject: &Subject) -> Report {
        Report::of(self.name, (self.body)(subject))
    }
}

const fn test(
    name: &'static str,
    needs: Needs,
    body: fn(&Subject) -> Outcome,
    about: &'static str,
) -> Test {
    Test {
        name,
        about,
        needs,
        body,
    }
}

/// The test of the gates that a library has to pass.
const GATES: &str = "gates";

/// The test whose failure means that there is no drafter for others to test.
pub const DRAFTER: &str = "drafter";

/// The test in which what a plugin prints counts.
pub const OUTPUT: &str = "output";

/// The test that `--reproduce` repeats.
pub const FUZZ: &str = "fuzz";

/// All tests, in the order in which they run.
pub static TESTS: &[Test] = &[
    test(
        GATES,
        Needs::Library,
        loading::gates,
        "It passes the manifest, version and layout gates.",
    ),
    test(
        "self-contained",
        Needs::Library,
        loading::self_contained,
        "It brings no memory allocator of its own and no thread-locals that limit how many plugins load.",
    ),
    test(
        DRAFTER,
        Needs::Drafter,
        loading::drafter,
        "It makes a drafter that fits the target.",
    ),
    test(
        "options",
        Needs::Drafter,
        loading::options,
        "It refuses an option that it does not know.",
    ),
    test(
        "info",
        Needs::Drafter,
        loading::info,
        "What it says of itself is sound, and the same each time.",
    ),
    test(
        "pairing",
        Needs::Drafter,
        loading::pairing,
        "It refuses targets of another hidden size, vocabulary or key shape, if it depends on them.",
    ),
    test(
        "slots",
        Needs::Drafter,
        moving::slots,
        "Every slot of its tables answers.",
    ),
    test(
        "depths",
        Needs::Drafter,
        drafting::depths,
        "At every depth its drafts are no longer than asked, and of tokens that the target knows.",
    ),
    test(
        "accepted",
        Needs::Drafter,
        drafting::accepted,
        "It goes on after every accepted length, different for each row.",
    ),
    test(
        "skipped",
        Needs::Drafter,
        drafting::skipped,
        "It follows rounds without drafts, one or several at a time.",
    ),
    test(
        "idle-rows",
        Needs::Drafter,
        drafting::idle_rows,
        "Rows that want no draft, or have no news, stand beside rows that do.",
    ),
    test(
        "neighbours",
        Needs::Drafter,
        drafting::neighbours,
        "A row's drafts do not depend on the other rows of its group.",
    ),
    test(
        "repeatable",
        Needs::Drafter,
        drafting::repeatable,
        "The same history brings the same drafts, greedy and sampled.",
    ),
    test(
        "leaving",
        Needs::Drafter,
        moving::leaving,
        "Rows leave after opening, in the prompt and between rounds; the others go on as before.",
    ),
    test(
        "joining",
        Needs::Drafter,
        moving::joining,
        "Groups become one between rounds; all rows go on as before.",
    ),
    test(
        "resuming",
        Needs::Drafter,
        moving::resuming,
        "A row that was captured, in the prompt or between rounds, goes on elsewhere as it does here.",
    ),
    test(
        "bad-calls",
        Needs::Drafter,
        loading::bad_calls,
        "Files, states and calls that it can't use come back as faults.",
    ),
    test(
        OUTPUT,
        Needs::Drafter,
        moving::output,
        "It prints nothing: standard output is the answer.",
    ),
    test(
        "threads",
        Needs::Drafter,
        resources::threads,
        "No thread outlives its drafter.",
    ),
    test(
        "memory",
        Needs::Drafter,
        resources::memory,
        "Thousands of rounds leave nothing behind; refused drafts take no memory.",
    ),
    test(
        "speed",
        Needs::Drafter,
        resources::speed,
        "How long a draft takes beside a step of the target; it never fails.",
    ),
    test(
        FUZZ,
        Needs::Drafter,
        fuzz::fuzz,
        "Random lives of groups, by seeds; every row drafts as it would alone.",
    ),
    test(
        "acceptance",
        Needs::Pair,
        doctor::acceptance,
        "How many of its drafts the target says itself; where it is few, what the cause may be.",
    ),
];

#[cfg(test)]
mod tests {
    use super::TESTS;

    #[test]
    fn names_are_unique_and_sentences_end() {
        for (index, test) in TESTS.iter().enumerate() {
            assert!(TESTS[..index].iter().all(|other| other.name != test.name));
            assert!(test.about.ends_with('.'), "{}", test.name);
        }
    }
}
