//! One row at a boundary between two rounds, as named tensors: to be kept, and to go on from later.

use std::collections::BTreeMap;

use crate::abi;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// What one row has after so many processed tokens, apart from the others of its group.
///
/// Its tensors share nothing with the group that it was taken from.
///
/// ```no_run
/// use plugin_api::{Result, RowState, Tensor};
///
/// const SCHEMA: &str = "my_drafter/1";
///
/// fn capture(processed: u32, last: &Tensor) -> RowState {
///     let mut state = RowState::new(SCHEMA, processed);
///     state.put("last", last.clone());
///     state
/// }
///
/// fn restore(state: &RowState) -> Result<(u32, Tensor)> {
///     // A state of an older build may be in another form.
///     state.require(SCHEMA)?;
///     Ok((state.processed(), state.get("last")?.clone()))
/// }
/// ```
#[derive(Clone, Debug)]
pub struct RowState {
    schema: String,
    processed: u32,
    tensors: BTreeMap<String, Tensor>,
}

impl RowState {
    /// A state without tensors yet. `schema` names what wrote it and in which form, e.g. `my_drafter/1`;
    /// whoever changes the form changes the name.
    pub fn new(schema: impl Into<String>, processed: u32) -> Self {
        Self {
            schema: schema.into(),
            processed,
            tensors: BTreeMap::new(),
        }
    }

    /// What wrote it, and in which form.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// Tokens that were processed.
    pub fn processed(&self) -> u32 {
        self.processed
    }

    /// The tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// Adds a tensor.
    pub fn put(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.tensors.insert(name.into(), tensor);
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        let tensor = self.tensors.get(name);
        tensor.ok_or_else(|| Error::invalid(format!("the state has no {name}")))
    }

    /// Refuses a state in another form.
    ///
    /// # Errors
    /// The message has both.
    pub fn require(&self, schema: &str) -> Result<()> {
        match self.schema == schema {
            true => Ok(()),
            false => Err(Error::mismatch(format!(
                "the state is of form {:?}, needed is {schema:?}",
                self.schema
            ))),
        }
    }

    /// As the boundary carries it, lent.
    pub fn as_abi(&self) -> abi::RowState {
        let tensors = self.tensors().map(|(name, tensor)| abi::NamedTensor {
            name: name.into(),
            tensor: tensor.raw(),
        });
        self.with(tensors.collect())
    }

    /// As the boundary carries it, handed over.
    pub(crate) fn into_abi(mut self) -> abi::RowState {
        let tensors = std::mem::take(&mut self.tensors);
        let tensors = tensors.into_iter().map(|(name, tensor)| abi::NamedTensor {
            name: name.into(),
            tensor: tensor.into_raw(),
        });
        self.with(tensors.collect())
    }

    fn with(&self, tensors: Vec<abi::NamedTensor>) -> abi::RowState {
        abi::RowState {
            schema: self.schema.as_str().into(),
            processed: self.processed,
            tensors: tensors.into(),
        }
    }

    /// A state that the other side lends.
    ///
    /// # Safety
    /// Its tensors must be null or live handles for the time of the call.
    pub(crate) unsafe fn borrow_abi(raw: &abi::RowState) -> Self {
        let mut state = Self::new(raw.schema.as_str(), raw.processed);
        for named in raw.tensors.iter().filter(|named| !named.tensor.is_null()) {
            // SAFETY: not null, so live, says the caller.
            let tensor = unsafe { Tensor::borrow_raw(named.tensor) };
            state.put(named.name.as_str(), tensor);
        }
        state
    }

    /// A state that the other side hands over.
    ///
    /// # Safety
    /// Its tensors must be null or live handles that this call may consume.
    pub unsafe fn from_abi(raw: abi::RowState) -> Self {
        let mut state = Self::new(raw.schema, raw.processed);
        for named in raw.tensors {
            // SAFETY: as the caller says.
            if let Some(tensor) = unsafe { Tensor::from_raw(named.tensor) } {
                state.put(named.name, tensor);
            }
        }
        state
    }
}
