//! The plain values that the tables pass around.

use std::ffi::c_void;

use abi_stable::StableAbi;
use abi_stable::std_types::{RResult, RString};

// `usize` crosses as the length of slices and texts. So far there are hosts for 64-bit machines alone, and
// layouts are written down for these.
const _: () = assert!(size_of::<usize>() == 8, "the ABI is for 64-bit machines");

/// The largest rank a tensor can have.
pub const MAX_RANK: usize = 8;

/// A tensor owned by the host, as an opaque handle. Null means "failed" where a slot returns one
/// and "absent" where a slot documents it as optional.
#[repr(transparent)]
#[derive(StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor(pub *mut c_void);

impl RawTensor {
    /// The absent tensor.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// Whether this is [`RawTensor::NULL`].
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $code:ident = $value:literal,)* }) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(StableAbi, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);

        impl $name {
            $($(#[$doc])* pub const $code: Self = Self($value);)*

            /// All codes that this build knows.
            pub const ALL: &'static [Self] = &[$(Self::$code),*];

            /// The name of the code, or `None` when this build does not know it.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($code)),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({})"), self.0),
                }
            }
        }
    };
}

codes! {
    /// What keys and values of a target a drafter looks at: those of its last layer of that kind that
    /// has keys of its own.
    DonorKind {
        /// Full attention.
        FULL = 1,
        /// Attention in a sliding window.
        SLIDING = 2,
    }
}

codes! {
    /// The element type of a tensor.
    DType {
        /// 32-bit float.
        F32 = 1,
        /// IEEE half.
        F16 = 2,
        /// bfloat16.
        BF16 = 3,
        /// Unsigned byte.
        U8 = 4,
        /// 32-bit unsigned integer (packed quantized weights).
        U32 = 5,
        /// 32-bit integer (token ids, indices).
        I32 = 6,
        /// Boolean, one byte each.
        BOOL = 7,
        /// 64-bit integer.
        I64 = 8,
    }
}

impl UnaryOp {
    /// No op, where one is optional.
    pub const NONE: Self = Self(0);
}

impl DType {
    /// Bytes per element; `None` for an unknown code.
    pub fn size(self) -> Option<usize> {
        Some(match self {
            Self::U8 | Self::BOOL => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
            _ => return None,
        })
    }

    /// Whether elements are floating point.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }
}

codes! {
    /// Element-wise functions of one tensor.
    UnaryOp {
        /// `-x`
        NEG = 1,
        /// `exp(x)`
        EXP = 2,
        /// `ln(x)`
        LOG = 3,
        /// `x * x`
        SQUARE = 4,
        /// `sqrt(x)`
        SQRT = 5,
        /// `1 / sqrt(x)`
        RSQRT = 6,
        /// `1 / (1 + exp(-x))`
        SIGMOID = 7,
        /// `tanh(x)`
        TANH = 8,
        /// `x * sigmoid(x)`
        SILU = 9,
        /// The tanh approximation of GELU.
        GELU_TANH = 10,
        /// `ln(1 + exp(x))`
        SOFTPLUS = 11,
        /// Logical not.
        NOT = 12,
    }
}

codes! {
    /// Element-wise functions of two tensors, with broadcasting. Comparisons give [`DType::BOOL`].
    BinaryOp {
        /// `a + b`
        ADD = 1,
        /// `a - b`
        SUB = 2,
        /// `a * b`
        MUL = 3,
        /// `a / b`
        DIV = 4,
        /// The larger one.
        MAX = 5,
        /// The smaller one.
        MIN = 6,
        /// `a < b`
        LESS = 7,
        /// `a <= b`
        LESS_EQUAL = 8,
        /// `a == b`
        EQUAL = 9,
        /// Logical and.
        AND = 10,
        /// Logical or.
        OR = 11,
    }
}

codes! {
    /// Reductions along one axis.
    ReduceOp {
        /// Sum.
        SUM = 1,
        /// Arithmetic mean.
        MEAN = 2,
        /// Largest element.
        MAX = 3,
        /// Smallest element.
        MIN = 4,
        /// Index of the first largest element, as [`DType::I32`].
        ARGMAX = 5,
    }
}

codes! {
    /// What an attention may look at.
    AttentionMask {
        /// Every key.
        NONE = 1,
        /// The last query sees every key, each earlier one sees one less.
        CAUSAL = 2,
        /// A boolean tensor that broadcasts to `[B, heads, T, S]`, true = visible.
        TENSOR = 3,
    }
}

codes! {
    /// Severity of a log line.
    LogLevel {
        /// Something failed.
        ERROR = 1,
        /// Something is likely not as intended.
        WARN = 2,
        /// Worth knowing once.
        INFO = 3,
        /// For developers.
        DEBUG = 4,
        /// For developers, in the inner loop.
        TRACE = 5,
    }
}

codes! {
    /// The kind of a [`Fault`].
    FaultCode {
        /// What was passed in (a file, an option, a shape) cannot be used.
        INVALID = 1,
        /// Two things do not belong together, e.g. a drafter and a target.
        MISMATCH = 2,
        /// The other side lacks a capability.
        UNSUPPORTED = 3,
        /// An operation failed.
        FAILED = 4,
        /// The implementation panicked; the instance must not be used again, only dropped.
        PANICKED = 5,
        /// The instance panicked earlier.
        POISONED = 6,
    }
}

/// Why a call failed. Owned by the receiver.
#[repr(C)]
#[derive(StableAbi, Clone, Debug)]
pub struct Fault {
    /// The kind.
    pub code: FaultCode,
    /// One or two sentences for the user: what, where, and the numbers that differ.
    pub message: RString,
}

/// What a fallible slot returns.
pub type Reply<T> = RResult<T, Fault>;

/// The facts of a tensor.
#[repr(C)]
#[derive(StableAbi, Clone, Copy, Debug)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: DType,
    /// How many entries of `shape` count.
    pub rank: u32,
    /// Lengths of the axes.
    pub shape: [i32; MAX_RANK],
}
