//! A way to decode: with one of the drafters, or plainly.

use std::cell::RefCell;
use std::rc::Rc;

use super::depth::Costs;
use crate::plugin::Drafter;

/// What requests that decode the same way share.
pub struct Method {
    /// None: every token by a target pass of its own.
    pub drafter: Option<Rc<Drafter>>,
    /// What rounds cost.
    pub costs: RefCell<Costs>,
    /// What the numbers of a kept state depend on besides its tokens.
    pub namespace: String,
}

impl Method {
    /// Without a state that is kept.
    pub fn new(drafter: Option<Rc<Drafter>>, costs: Costs) -> Self {
        Self {
            drafter,
            costs: RefCell::new(costs),
            namespace: String::new(),
        }
    }
}
