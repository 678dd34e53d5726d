//! The target as a plugin sees it: a table of capabilities over a model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::{ROption::RSome, RSlice};
use plugin_api::abi::{Fault, FaultCode, RawTarget, RawTensor, Reply, TargetView, TargetViewRef};
use plugin_api::layers::Linear;
use plugin_api::{Error, Result, Tensor, guard};

use super::Model;
use crate::backend::fail_with;

/// A model, lent to plugins. It must outlive all rows that were opened on it.
pub struct TargetHandle {
    lent: Box<Lent>,
}

struct Lent {
    model: Rc<Model>,
    subsets: RefCell<Subsets>,
}

/// Heads with fewer rows, by key; the key is the index plus one.
#[derive(Default)]
struct Subsets {
    heads: Vec<Linear>,
    keys: HashMap<Vec<u32>, u64>,
}

impl TargetHandle {
    /// Lends the model.
    pub fn new(model: Rc<Model>) -> Self {
        Self {
            lent: Box::new(Lent {
                model,
                subsets: RefCell::default(),
            }),
        }
    }

    /// The model it lends.
    pub fn model(&self) -> &Rc<Model> {
        &self.lent.model
    }

    /// As the boundary carries it, valid while `self` lives.
    pub fn raw(&self) -> RawTarget {
        RawTarget {
            this: std::ptr::from_ref(&*self.lent).cast(),
            table: TargetViewRef(Self::TABLE.as_prefix()),
        }
    }

    abi_stable::staticref!(const TABLE: WithMetadata<TargetView> = WithMetadata::new(TargetView {
        embed: RSome(embed),
        logits: RSome(logits),
        head_subset: RSome(head_subset),
    }));
}

/// The target behind a pointer that a plugin gives back.
fn lent<'a>(this: *const c_void) -> &'a Lent {
    // SAFETY: the pointer comes from `TargetHandle::raw`, whose owner outlives the plugin's rows,
    // and only shared borrows of it exist.
    unsafe { &*this.cast::<Lent>() }
}

fn op(body: impl FnOnce() -> Result<Tensor>) -> RawTensor {
    match guard::catch(body) {
        Ok(Ok(tensor)) => tensor.into_raw(),
        Ok(Err(error)) => fail_with(error.message()),
        Err(panic) => fail_with(&format!("panicked: {panic}")),
    }
}

/// A tensor that the plugin lends for the time of a call.
fn borrowed(raw: RawTensor) -> Result<Tensor> {
    if raw.is_null() {
        return Err(Error::failed("an argument is absent"));
    }
    // SAFETY: not null, and the ABI says that tensor arguments are live handles.
    Ok(unsafe { Tensor::borrow_raw(raw) })
}

extern "C" fn embed(this: *const c_void, ids: RawTensor, bare: bool) -> RawTensor {
    op(|| {
        let decoder = &lent(this).model.decoder;
        let ids = borrowed(ids)?;
        if bare {
            decoder.embed_bare(&ids)
        } else {
            decoder.embed(&ids)
        }
    })
}

extern "C" fn logits(this: *const c_void, hidden: RawTensor, subset: u64, bare: bool) -> RawTensor {
    op(|| {
        let (target, hidden) = (lent(this), borrowed(hidden)?);
        let subsets = target.subsets.borrow();
        let decoder = &target.model.decoder;
        let head = match subset {
            0 => decoder.head(),
            key => usize::try_from(key - 1)
                .ok()
                .and_then(|index| subsets.heads.get(index))
                .ok_or_else(|| Error::invalid(format!("there is no head subset {subset}")))?,
        };
        if bare {
            head.forward(&hidden)
        } else {
            decoder.through(head, &hidden)
        }
    })
}

extern "C" fn head_subset(this: *const c_void, ids: RSlice<'_, u32>) -> Reply<u64> {
    let outcome = guard::catch(|| select_head(lent(this), ids.as_slice()));
    match outcome {
        Ok(key) => key.map_err(Fault::from).into(),
        Err(panic) => Reply::RErr(Fault {
            code: FaultCode::FAILED,
            message: format!("panicked: {panic}").into(),
        }),
    }
}

fn select_head(target: &Lent, ids: &[u32]) -> Result<u64> {
    let mut subsets = target.subsets.borrow_mut();
    if let Some(&key) = subsets.keys.get(ids) {
        return Ok(key);
    }
    let vocab = target.model.facts().vocab_size as u32;
    let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
    match ids.last() {
        Some(&last) if ascending && last < vocab => {}
        _ => {
            return Err(Error::invalid(format!(
                "a head subset must have strictly ascending ids below {vocab}"
            )));
        }
    }
    let rows: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let rows = Tensor::from_slice(&rows, &[rows.len() as i32])?;
    let head = target.model.decoder.head().select_outputs(&rows)?;
    Tensor::eval_all(&head.tensors())?;
    subsets.heads.push(head);
    let key = subsets.heads.len() as u64;
    subsets.keys.insert(ids.to_vec(), key);
    Ok(key)
}
