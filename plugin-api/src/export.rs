//! Making the tables of a plugin out of a [`Drafter`].

use std::ffi::c_void;
use std::marker::PhantomData;

use abi_stable::prefix_type::WithMetadata;
use abi_stable::std_types::{RErr, ROk, ROption, RSlice};

use crate::abi::{self, Fault, FaultCode, RawDrafter, RawRows, Reply};
use crate::checkpoint::Checkpoint;
use crate::drafter::{Advance, Donor, DraftRequest, DraftRows, Drafter, RowAdvance};
use crate::error::{Error, Result};
use crate::forward;
use crate::guard;
use crate::options::Options;
use crate::state::RowState;
use crate::target::{Target, TargetFacts};
use crate::tensor::Tensor;

/// A value behind a table's `this`, and whether a call on it has panicked.
struct Instance<T> {
    value: T,
    poisoned: bool,
}

fn boxed<T>(value: T) -> *mut c_void {
    let instance = Instance {
        value,
        poisoned: false,
    };
    Box::into_raw(Box::new(instance)).cast()
}

fn reply<T>(outcome: Result<Result<T>, String>) -> Reply<T> {
    match outcome {
        Ok(Ok(value)) => ROk(value),
        Ok(Err(error)) => RErr(error.into()),
        Err(panic) => RErr(Fault {
            code: FaultCode::PANICKED,
            message: format!("panicked: {panic}").into(),
        }),
    }
}

/// Runs a slot's body on the instance behind `this`.
fn with<T, R>(this: *mut c_void, body: impl FnOnce(&mut T) -> Result<R>) -> Reply<R> {
    // SAFETY: `this` came from `boxed::<T>` (the tables pair it with functions of the same T), is
    // live until the `drop` slot, and the ABI allows one call at a time.
    let instance = unsafe { &mut *this.cast::<Instance<T>>() };
    if instance.poisoned {
        // With what it was given: the destructor of that is the plugin's code, too.
        let _ = guard::catch(|| drop(body));
        return RErr(Fault {
            code: FaultCode::POISONED,
            message: "it panicked earlier".into(),
        });
    }
    let outcome = guard::catch(|| body(&mut instance.value));
    instance.poisoned = outcome.is_err();
    reply(outcome)
}

extern "C" fn drop_instance<T>(this: *mut c_void) {
    // A destructor that panics leaks the rest: better than ending the host.
    let _ = guard::catch(|| {
        // SAFETY: the `drop` slot is called once, with a pointer from `boxed::<T>`.
        drop(unsafe { Box::from_raw(this.cast::<Instance<T>>()) });
    });
}

/// The tables of one drafter type.
#[doc(hidden)]
pub struct Tables<D>(PhantomData<D>);

impl<D: Drafter> Tables<D> {
    abi_stable::staticref!(const MODULE: WithMetadata<abi::PluginModule> =
        WithMetadata::new(abi::PluginModule { load: load::<D> }));

    abi_stable::staticref!(const DRAFTER: WithMetadata<abi::Drafter> =
    WithMetadata::new(abi::Drafter {
        drop: drop_instance::<D>,
        info: info::<D>,
        pair: pair::<D>,
        open: open::<D>,
    }));

    abi_stable::staticref!(const ROWS: WithMetadata<abi::DraftRows> =
    WithMetadata::new(abi::DraftRows {
        drop: drop_instance::<D::Rows>,
        prefill: prefill::<D::Rows>,
        draft: draft::<D::Rows>,
        commit: commit::<D::Rows>,
        filter_rows: filter_rows::<D::Rows>,
        append: append::<D::Rows>,
        row_count: row_count::<D::Rows>,
        capture: capture::<D::Rows>,
        restore: restore::<D::Rows>,
    }));

    /// The root module, for a host that links the plugin statically.
    pub fn module() -> abi::PluginModuleRef {
        abi::PluginModuleRef(Self::MODULE.as_prefix())
    }

    /// The root module of a loaded library, whose panics are then reported through faults alone, and whose
    /// lines go to the host's log under the plugin's name. `module` is a path inside the plugin's crate.
    pub fn exported_module(name: &'static str, module: &'static str) -> abi::PluginModuleRef {
        guard::capture_panics();
        forward::install(name, module);
        Self::module()
    }
}

extern "C" fn load<D: Drafter>(
    host: abi::HostApiRef,
    request: &abi::LoadRequest<'_>,
) -> Reply<RawDrafter> {
    reply(guard::catch(|| {
        crate::host::install(host);
        let checkpoint = match request.checkpoint.into_option() {
            Some(path) => Some(Checkpoint::open(path.into())?),
            None => None,
        };
        let pairs = request.options.iter();
        let mut options = Options::new(pairs.map(|p| (String::from(p.0), String::from(p.1))));
        let drafter = D::load(checkpoint, &mut options)?;
        options.finish()?;
        Ok(RawDrafter {
            this: boxed(drafter),
            table: abi::DrafterRef(Tables::<D>::DRAFTER.as_prefix()),
        })
    }))
}

extern "C" fn info<D: Drafter>(this: *mut c_void) -> Reply<abi::DrafterInfo> {
    with(this, |drafter: &mut D| {
        let info = drafter.info();
        Ok(abi::DrafterInfo {
            name: info.name.into(),
            weight_bytes: info.weight_bytes,
            taps: info.taps.into(),
            donors: info.donors.into(),
            default_depth: info.default_depth,
            max_depth: info.max_depth,
        })
    })
}

extern "C" fn pair<D: Drafter>(this: *mut c_void, facts: &abi::TargetFacts<'_>) -> Reply<()> {
    with(this, |drafter: &mut D| {
        drafter.pair(&TargetFacts::from_abi(facts))
    })
}

extern "C" fn open<D: Drafter>(
    this: *mut c_void,
    request: &abi::OpenRequest<'_>,
) -> Reply<RawRows> {
    with(this, |drafter: &mut D| {
        let facts = TargetFacts::from_abi(&request.facts);
        let target = Target::new(request.target);
        let rows = drafter.open(target, &facts, request.rows.as_slice())?;
        Ok(RawRows {
            this: boxed(rows),
            table: abi::DraftRowsRef(Tables::<D>::ROWS.as_prefix()),
        })
    })
}

/// The rows of an advance, checked against each other.
fn advance<'a>(raw: &abi::Advance<'a>, rows: usize) -> Result<Advance<'a>> {
    let (lens, next) = (raw.lens.as_slice(), raw.next.as_slice());
    let accepted = raw.accepted.as_slice();
    let mut tokens = raw.tokens.as_slice();
    let total: usize = lens.iter().map(|&n| n as usize).sum();
    if [lens.len(), next.len(), accepted.len()] != [rows; 3] || tokens.len() != total {
        return Err(Error::failed(format!(
            "an advance of {} rows and {} tokens for a group of {rows} rows and {total} tokens",
            lens.len(),
            tokens.len()
        )));
    }
    let mut out = Vec::with_capacity(rows);
    for ((&len, &next), &accepted) in lens.iter().zip(next).zip(accepted) {
        let (mine, rest) = tokens.split_at(len as usize);
        tokens = rest;
        out.push(RowAdvance {
            tokens: mine,
            next,
            accepted: accepted as usize,
        });
    }
    let taps = raw.taps.iter();
    // SAFETY: the host lends live handles for the time of the call.
    let taps = taps
        .map(|&tap| unsafe { Tensor::borrow_raw(tap) })
        .collect();
    Ok(Advance { rows: out, taps })
}

extern "C" fn prefill<R: DraftRows>(this: *mut c_void, raw: &abi::Advance<'_>) -> Reply<()> {
    with(this, |rows: &mut R| {
        let advance = advance(raw, rows.row_count())?;
        rows.prefill(&advance)
    })
}

extern "C" fn commit<R: DraftRows>(this: *mut c_void, raw: &abi::Advance<'_>) -> Reply<()> {
    with(this, |rows: &mut R| {
        let advance = advance(raw, rows.row_count())?;
        rows.commit(&advance)
    })
}

fn lent(donor: &abi::Donor) -> Result<Donor> {
    // SAFETY: live handles, lent for the time of the call.
    let own = |raw: abi::RawTensor| (!raw.is_null()).then(|| unsafe { Tensor::borrow_raw(raw) });
    match (own(donor.keys), own(donor.values)) {
        (Some(keys), Some(values)) => Ok(Donor {
            keys,
            values,
            first: own(donor.first_keys).zip(own(donor.first_values)),
            start: donor.start,
        }),
        _ => Err(Error::failed("the host lends no keys")),
    }
}

extern "C" fn draft<R: DraftRows>(
    this: *mut c_void,
    request: &abi::DraftRequest<'_>,
) -> Reply<abi::DraftReply> {
    with(this, |rows: &mut R| {
        let request = DraftRequest {
            depths: request.depths.as_slice(),
            pending: request.pending.as_slice(),
            positions: request.positions.as_slice(),
            donors: request.donors.iter().map(lent).collect::<Result<_>>()?,
        };
        let count = rows.row_count();
        let sizes = [
            request.depths.len(),
            request.pending.len(),
            request.positions.len(),
        ];
        if sizes != [count; 3] {
            let problem = format!("a draft for {sizes:?} rows in a group of {count}");
            return Err(Error::failed(problem));
        }
        let drafts = rows.draft(&request)?;
        Ok(abi::DraftReply {
            ids: drafts.ids.map_or(abi::RawTensor::NULL, Tensor::into_raw),
            lens: drafts.lens.into(),
        })
    })
}

extern "C" fn filter_rows<R: DraftRows>(this: *mut c_void, keep: RSlice<'_, u32>) -> Reply<()> {
    with(this, |rows: &mut R| {
        let keep: Vec<usize> = keep.iter().map(|&row| row as usize).collect();
        rows.filter_rows(&keep)
    })
}

extern "C" fn append<R: DraftRows>(this: *mut c_void, other: RawRows) -> Reply<()> {
    // SAFETY: the ABI says that `other` is of the same drafter, hence a boxed Instance<R>, and that
    // this call consumes it.
    let other = unsafe { Box::from_raw(other.this.cast::<Instance<R>>()) };
    with(this, move |rows: &mut R| match other.poisoned {
        true => Err(Error::failed("the rows to append have panicked")),
        false => rows.append(other.value),
    })
}

extern "C" fn row_count<R: DraftRows>(this: *mut c_void) -> u32 {
    match with(this, |rows: &mut R| Ok(rows.row_count() as u32)) {
        ROk(count) => count,
        RErr(_) => 0,
    }
}

extern "C" fn capture<R: DraftRows>(this: *mut c_void, row: u32) -> Reply<ROption<abi::RowState>> {
    with(this, |rows: &mut R| {
        if row as usize >= rows.row_count() {
            return Err(Error::failed(format!("there is no row {row} to capture")));
        }
        let state = rows.capture(row as usize)?;
        Ok(state.map(RowState::into_abi).into())
    })
}

extern "C" fn restore<R: DraftRows>(this: *mut c_void, state: &abi::RowState) -> Reply<()> {
    with(this, |rows: &mut R| {
        if rows.row_count() != 1 {
            return Err(Error::failed("a state is of one row"));
        }
        // SAFETY: the host lends live handles for the time of the call.
        rows.restore(&unsafe { RowState::borrow_abi(state) })
    })
}

/// Refuses characters that would need escaping in the manifest, at compile time.
#[doc(hidden)]
pub const fn plain(text: &str) -> &str {
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        assert!(
            bytes[i] != b'"' && bytes[i] != b'\\' && bytes[i] >= b' ',
            "manifest texts must not contain quotes, backslashes or control characters"
        );
        i += 1;
    }
    text
}

/// Makes a `cdylib` crate a plugin: embeds its manifest and exports its root module.
///
/// `name` is what messages and `mlxhost plugins` call it: letters, digits, `-`, `_` and `.`. `families` are the
/// `model_type`s of the drafter checkpoints that it serves; none: it needs no checkpoint. `options` are the keys
/// of `--drafter-option` with a line of help each. None of these texts may have quotes or backslashes.
///
/// A library can be one plugin only.
///
/// ```standalone_crate
/// use plugin_api::{
///     Checkpoint, DraftSource, Drafter, DrafterInfo, Options, Result, RowSpec, SourceRows, Target,
///     TargetFacts, export_plugin,
/// };
///
/// /// Drafts the last token once more.
/// struct Echo;
///
/// impl Drafter for Echo {
///     type Rows = SourceRows<Last>;
///
///     fn load(_checkpoint: Option<Checkpoint>, _options: &mut Options) -> Result<Self> {
///         Ok(Self)
///     }
///
///     fn info(&self) -> DrafterInfo {
///         DrafterInfo {
///             name: "echo".into(),
///             weight_bytes: 0,
///             taps: Vec::new(),
///             donors: Vec::new(),
///             default_depth: 1,
///             max_depth: 1,
///         }
///     }
///
///     fn pair(&self, _target: &TargetFacts) -> Result<()> {
///         Ok(())
///     }
///
///     fn open(&mut self, _: Target, _: &TargetFacts, rows: &[RowSpec]) -> Result<Self::Rows> {
///         Ok(SourceRows::new(rows.iter().map(|_| Last(None))))
///     }
/// }
///
/// /// The last token of a request.
/// struct Last(Option<i32>);
///
/// impl DraftSource for Last {
///     fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
///         self.0 = tokens.last().copied();
///         Ok(())
///     }
///
///     fn draft(&mut self, _depth: usize) -> Result<Vec<i32>> {
///         Ok(Vec::from_iter(self.0))
///     }
///
///     fn commit(&mut self, tokens: &[i32], _accepted: usize) -> Result<()> {
///         self.prefill(tokens)
///     }
/// }
///
/// export_plugin! {
///     drafter: Echo,
///     name: "echo",
///     families: [],
///     options: {},
/// }
/// ```
#[macro_export]
macro_rules! export_plugin {
    (
        drafter: $drafter:ty,
        name: $name:literal,
        families: [$($family:literal),* $(,)?],
        options: { $($key:literal: $help:literal),* $(,)? } $(,)?
    ) => {
        const _: () = {
            use $crate::export::plain;

            const PARTS: &[&str] = &[
                "{\"manifest\":1,\"name\":\"", plain($name),
                "\",\"version\":\"", plain(env!("CARGO_PKG_VERSION")),
                "\",\"api\":\"", $crate::abi::API_VERSION,
                "\",\"min_api\":\"", $crate::abi::MIN_API_VERSION,
                "\",\"families\":[",
                $("\"", plain($family), "\",",)*
                "null],\"options\":{",
                $("\"", plain($key), "\":\"", plain($help), "\",",)*
                "\"\":null}}",
            ];

            #[used]
            #[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mlxhost"))]
            #[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".mlxhost"))]
            static MANIFEST: $crate::abi::Embedded<{ $crate::abi::total_len(PARTS) }> =
                $crate::abi::section_bytes(PARTS);

            extern "C" fn root() -> $crate::abi_stable::library::RootModuleResult {
                $crate::abi_stable::library::__call_root_module_loader(|| {
                    $crate::export::Tables::<$drafter>::exported_module($name, module_path!())
                })
            }

            // The name is abi::HEADER_SYMBOL.
            #[unsafe(export_name = "mlxhost_plugin_header")]
            static HEADER: $crate::abi_stable::library::LibHeader =
                // SAFETY: `root` returns the erased form of this very module type.
                unsafe {
                    $crate::abi_stable::library::LibHeader::from_constructor::<
                        $crate::abi::PluginModuleRef,
                    >(root, $crate::abi_stable::library::CheckTypeLayout::Yes)
                };
        };
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::{DraftSource, SourceRows};

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    impl DraftSource for Bomb {
        fn prefill(&mut self, _: &[i32]) -> Result<()> {
            Ok(())
        }

        fn draft(&mut self, _: usize) -> Result<Vec<i32>> {
            Ok(Vec::new())
        }

        fn commit(&mut self, _: &[i32], _: usize) -> Result<()> {
            Ok(())
        }
    }

    type Rows = SourceRows<Bomb>;

    fn rows(poisoned: bool) -> RawRows {
        let value: Rows = SourceRows::new([Bomb]);
        let instance = Box::new(Instance { value, poisoned });
        RawRows {
            this: Box::into_raw(instance).cast(),
            table: abi::DraftRowsRef(Tables::<NoDrafter>::ROWS.as_prefix()),
        }
    }

    struct NoDrafter;

    impl Drafter for NoDrafter {
        type Rows = Rows;

        fn load(_: Option<Checkpoint>, _: &mut Options) -> Result<Self> {
            Ok(Self)
        }

        fn info(&self) -> crate::DrafterInfo {
            unreachable!("not asked for")
        }

        fn pair(&self, _: &TargetFacts) -> Result<()> {
            Ok(())
        }

        fn open(&mut self, _: Target, _: &TargetFacts, _: &[abi::RowSpec]) -> Result<Rows> {
            Ok(SourceRows::new([]))
        }
    }

    #[test]
    fn rows_that_panic_when_dropped_end_nothing_wherever_they_are_given_up() {
        for (here, other) in [(true, false), (false, true), (true, true)] {
            let (here, other) = (rows(here), rows(other));
            let outcome = here.table.append()(here.this, other);
            assert!(outcome.is_err(), "rows that have panicked were appended");
            here.table.drop()(here.this);
        }
    }
}
