//! The ways to decode: with one of the drafters, or plainly.

use std::cell::RefCell;
use std::rc::Rc;

use plugin_api::RowSpec;
use plugin_api::sampling::Sampling;

use super::depth::Costs;
use super::request::DraftWith;
use super::thread::{DrafterConfig, DrafterFacts};
use super::totals::Totals;
use crate::error::LoadError;
use crate::model::TargetHandle;
use crate::plugin::Drafter;
use crate::prefix::PrefixConfig;

/// What requests that decode the same way share.
pub struct Method {
    /// None: every token by a target pass of its own.
    pub drafter: Option<Rc<Drafter>>,
    /// What rounds cost.
    pub costs: RefCell<Costs>,
    /// What the numbers of a kept state depend on besides its tokens.
    pub namespace: String,
    /// What it has come to.
    pub totals: RefCell<Totals>,
}

impl Method {
    /// Without a state that is kept.
    pub fn new(drafter: Option<Rc<Drafter>>, costs: Costs) -> Self {
        Self {
            drafter,
            costs: RefCell::new(costs),
            namespace: String::new(),
            totals: RefCell::default(),
        }
    }

    fn plugin(&self) -> Option<&str> {
        self.drafter.as_ref().map(|drafter| drafter.plugin())
    }
}

/// All ways in which requests can be decoded now.
#[derive(Clone)]
pub(super) struct Methods {
    /// One per drafter, the default first.
    drafted: Vec<Rc<Method>>,
    plain: Rc<Method>,
    /// What kept states depend on.
    prefix: PrefixConfig,
    identity: String,
}

impl Methods {
    /// Those of a target with some drafters. `identity`: as [`PrefixConfig::identity`] says.
    ///
    /// # Errors
    /// A drafter can't be used.
    pub fn load(
        target: &TargetHandle,
        prefix: PrefixConfig,
        identity: String,
        drafters: &[DrafterConfig],
    ) -> Result<Self, LoadError> {
        let mut plain = Method::new(None, Costs::load(None));
        plain.namespace = prefix.namespace(&identity, None)?;
        let mut methods = Self {
            drafted: Vec::with_capacity(drafters.len()),
            plain: Rc::new(plain),
            prefix,
            identity,
        };
        for drafter in drafters {
            let method = methods.with(target, drafter)?;
            methods.drafted.push(Rc::new(method));
        }
        Ok(methods)
    }

    fn with(&self, target: &TargetHandle, config: &DrafterConfig) -> Result<Method, LoadError> {
        let drafter = Drafter::load(&config.source, target.model())?;
        let mut method = Method::new(Some(drafter), Costs::load(config.costs.clone()));
        method.namespace = self
            .prefix
            .namespace(&self.identity, Some(&config.source))?;
        Ok(method)
    }

    /// Puts a drafter in the place of the one of the same plugin, else of the default. Gives what there is then.
    ///
    /// # Errors
    /// It can't be loaded, or can't make rows; nothing has changed.
    pub fn swap(
        &mut self,
        target: &Rc<TargetHandle>,
        config: &DrafterConfig,
    ) -> Result<Vec<DrafterFacts>, LoadError> {
        let method = Rc::new(self.with(target, config)?);
        if let Some(drafter) = &method.drafter {
            let specs = [RowSpec {
                sampling: Sampling::default(),
            }];
            drafter.open(target, &specs).map_err(|error| {
                let what = format!("plugin {}: {}", drafter.plugin(), error.message());
                LoadError::failed(config.source.library.path(), what)
            })?;
        }
        let alike = |other: &Rc<Method>| other.plugin() == method.plugin();
        let at = self.drafted.iter().position(alike).unwrap_or(0);
        match self.drafted.get_mut(at) {
            Some(old) => {
                let old = std::mem::replace(old, method);
                old.costs.borrow().save();
            }
            None => self.drafted.push(method),
        }
        Ok(self.facts())
    }

    /// The way that a request asks for.
    pub fn choose(&self, with: &DraftWith) -> &Rc<Method> {
        let chosen = match with {
            DraftWith::Default => self.drafted.first(),
            DraftWith::Plugin(name) => {
                let mut methods = self.drafted.iter();
                methods.find(|method| method.plugin() == Some(name))
            }
            DraftWith::Nothing => None,
        };
        chosen.unwrap_or(&self.plain)
    }

    /// What the engine tells of them.
    pub fn facts(&self) -> Vec<DrafterFacts> {
        let drafters = self.drafted.iter().filter_map(|m| m.drafter.as_ref());
        let facts = drafters.map(|drafter| DrafterFacts {
            plugin: drafter.plugin().to_owned(),
            build: drafter.build().to_owned(),
            name: drafter.name().to_owned(),
            depth: drafter.default_depth(),
        });
        facts.collect()
    }

    /// What each has come to, by the plugin's name; last and without a name, plain decoding.
    pub fn totals(&self) -> Vec<(Option<String>, Totals)> {
        let all = self.drafted.iter().chain([&self.plain]);
        let of = |method: &Rc<Method>| {
            let plugin = method.plugin().map(str::to_owned);
            (plugin, method.totals.borrow().clone())
        };
        all.map(of).collect()
    }

    /// Keeps what rounds cost for later runs.
    pub fn save(&self) {
        for method in &self.drafted {
            method.costs.borrow().save();
        }
    }
}
