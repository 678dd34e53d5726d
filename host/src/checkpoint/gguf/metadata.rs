//! Typed access to the key/value pairs of a GGUF file.

use std::collections::BTreeMap;
use std::fmt;

use crate::checkpoint::Bytes;

/// The key/value pairs of a GGUF file: hyperparameters, tokenizer, chat template.
///
/// Getters answer `None` both for a key that is not there and for one whose value is of another kind;
/// [`Metadata::kind`] tells the two apart. Numbers convert where nothing is lost.
#[derive(Debug)]
pub struct Metadata {
    pairs: BTreeMap<String, Value>,
}

impl Metadata {
    pub(super) fn new(pairs: BTreeMap<String, Value>) -> Self {
        Self { pairs }
    }

    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.pairs.get(key)
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.keys().map(String::as_str)
    }

    /// Whether the key is there, with whatever value.
    pub fn contains(&self, key: &str) -> bool {
        self.pairs.contains_key(key)
    }

    /// What kind of value the key has, in words, for error messages.
    pub fn kind(&self, key: &str) -> Option<&'static str> {
        self.value(key).map(|value| match value {
            Value::Uint(_) | Value::Int(_) => "an integer",
            Value::F32(_) | Value::F64(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::Str(_) => "a string",
            Value::Array(_) => "an array",
        })
    }

    /// A non-negative integer, stored in any integer type.
    pub fn get_u64(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            Value::Uint(value) => Some(*value),
            Value::Int(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// An integer, stored in any integer type.
    pub fn get_i64(&self, key: &str) -> Option<i64> {
        match self.value(key)? {
            Value::Uint(value) => i64::try_from(*value).ok(),
            Value::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// A float; one stored in double precision is rounded.
    pub fn get_f32(&self, key: &str) -> Option<f32> {
        match self.value(key)? {
            Value::F32(value) => Some(*value),
            Value::F64(value) => Some(*value as f32),
            _ => None,
        }
    }

    /// A boolean.
    pub fn get_bool(&self, key: &str) -> Option<bool> {
        match self.value(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A string.
    pub fn get_str(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::Str(value) => Some(value),
            _ => None,
        }
    }

    /// An array of strings (the token table, the merges). Borrows from the map; collected on every call.
    pub fn get_array_of_str(&self, key: &str) -> Option<Vec<&str>> {
        let array = self.array(key, |kind| kind == ElementType::String)?;
        let mut rest: &[u8] = &array.bytes;
        let mut strings = Vec::new();
        for _ in 0..array.len {
            let (len, after) = rest.split_first_chunk::<8>()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (text, after) = after.split_at_checked(len)?;
            strings.push(std::str::from_utf8(text).ok()?);
            rest = after;
        }
        Some(strings)
    }

    /// An array of integers of any type (token types); `None` if one of them does not fit.
    pub fn get_array_of_i64(&self, key: &str) -> Option<Vec<i64>> {
        self.numbers(key, |value| match value {
            Value::Uint(value) => i64::try_from(value).ok(),
            Value::Int(value) => Some(value),
            _ => None,
        })
    }

    /// An array of floats (token scores).
    pub fn get_array_of_f32(&self, key: &str) -> Option<Vec<f32>> {
        self.numbers(key, |value| match value {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        })
    }

    fn array(&self, key: &str, wanted: impl Fn(ElementType) -> bool) -> Option<&Array> {
        match self.value(key)? {
            Value::Array(array) if wanted(array.kind) => Some(array),
            _ => None,
        }
    }

    fn numbers<T>(&self, key: &str, convert: impl Fn(Value) -> Option<T>) -> Option<Vec<T>> {
        let array = self.array(key, |kind| kind.size().is_some())?;
        let elements = array.bytes.chunks_exact(array.kind.size()?);
        elements
            .map(|bytes| convert(array.kind.decode(bytes)?))
            .collect()
    }
}

/// A value as stored; integers are widened.
#[derive(Debug)]
pub(super) enum Value {
    Uint(u64),
    Int(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// An array left in place: a token table decoded into values would be several times its size in the file.
#[derive(Debug)]
pub(super) struct Array {
    pub(super) kind: ElementType,
    pub(super) len: usize,
    /// The elements as in the file; they were walked once, so they are known to be well formed.
    pub(super) bytes: Bytes,
}

/// The types of metadata values and of array elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ElementType {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        use ElementType::*;
        // In the order of their ids.
        let all = [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ];
        all.get(usize::try_from(id).ok()?).copied()
    }

    /// Bytes of a value; `None` for those of variable size.
    pub(super) fn size(self) -> Option<usize> {
        use ElementType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }

    /// The value of exactly `self.size()` bytes; `None` when they are not one.
    pub(super) fn decode(self, bytes: &[u8]) -> Option<Value> {
        use ElementType::*;
        Some(match self {
            U8 => Value::Uint(u8::from_le_bytes(bytes.try_into().ok()?).into()),
            I8 => Value::Int(i8::from_le_bytes(bytes.try_into().ok()?).into()),
            U16 => Value::Uint(u16::from_le_bytes(bytes.try_into().ok()?).into()),
            I16 => Value::Int(i16::from_le_bytes(bytes.try_into().ok()?).into()),
            U32 => Value::Uint(u32::from_le_bytes(bytes.try_into().ok()?).into()),
            I32 => Value::Int(i32::from_le_bytes(bytes.try_into().ok()?).into()),
            U64 => Value::Uint(u64::from_le_bytes(bytes.try_into().ok()?)),
            I64 => Value::Int(i64::from_le_bytes(bytes.try_into().ok()?)),
            F32 => Value::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            F64 => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            Bool => match bytes {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                _ => return None,
            },
            String | Array => return None,
        })
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
