//! Drafts the last token once more.

use plugin_api::{
    Checkpoint, DraftSource, Drafter, DrafterInfo, Options, Result, RowSpec, SourceRows, Target,
    TargetFacts, export_plugin,
};

struct Echo;

/// Says what it finds of what API 1.1 appends.
#[cfg(feature = "later")]
fn look_around(target: &Target) {
    match plugin_api::clock() {
        Ok(time) => plugin_api::warn!("the host's clock says {time}"),
        Err(error) => plugin_api::warn!("no clock: {error}"),
    }
    match target.age() {
        Some(age) => plugin_api::warn!("the target's age is {age}"),
        None => plugin_api::warn!("no age"),
    }
}

#[cfg(not(feature = "later"))]
fn look_around(_: &Target) {}

impl Drafter for Echo {
    type Rows = SourceRows<Last>;

    fn load(_checkpoint: Option<Checkpoint>, _options: &mut Options) -> Result<Self> {
        Ok(Self)
    }

    fn info(&self) -> DrafterInfo {
        DrafterInfo {
            name: "echo".into(),
            weight_bytes: 0,
            taps: Vec::new(),
            donors: Vec::new(),
            default_depth: 2,
            max_depth: 4,
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        Ok(())
    }

    fn open(&mut self, target: Target, _: &TargetFacts, rows: &[RowSpec]) -> Result<Self::Rows> {
        look_around(&target);
        Ok(SourceRows::new(rows.iter().map(|_| Last(None))))
    }
}

struct Last(Option<i32>);

impl DraftSource for Last {
    fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        self.0 = tokens.last().copied().or(self.0);
        Ok(())
    }

    fn draft(&mut self, depth: usize) -> Result<Vec<i32>> {
        Ok(self.0.map(|last| vec![last; depth]).unwrap_or_default())
    }

    fn commit(&mut self, tokens: &[i32], _accepted: usize) -> Result<()> {
        self.prefill(tokens)
    }
}

export_plugin! {
    drafter: Echo,
    name: "echo",
    families: [],
    options: {},
}
