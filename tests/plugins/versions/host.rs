//! A host of API 1.1: the real one's gates and loader over the later tables, and as much of a target as a drafter on
//! token ids needs. Leads each plugin that it is given through a round, and says what of 1.1 it has.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::path::Path;
use std::process::ExitCode;

use abi_stable::prefix_type::WithMetadata;
use abi_stable::sabi_types::StaticRef;
use abi_stable::std_types::{ROption, RSlice, RStr, RString};
use plugin_api::abi::{
    Advance, DType, DraftRequest, HostApi, HostApiRef, LoadRequest, LogLevel, OpenRequest,
    RawTarget, RawTensor, RowSpec, TargetFacts, TargetView, TargetViewRef, TensorInfo, Wish,
};

#[allow(dead_code)]
#[path = "@HOST@/error.rs"]
mod error;

#[allow(dead_code)]
mod plugin {
    #[path = "@HOST@/plugin/gate.rs"]
    pub mod gate;
    #[path = "@HOST@/plugin/library.rs"]
    pub mod library;
    #[path = "@HOST@/plugin/manifest.rs"]
    pub mod manifest;
}

mod text {
    pub fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn one_line(text: &str) -> String {
        text.replace('\n', " ")
    }
}

mod paths {
    pub fn cache_dir() -> Option<std::path::PathBuf> {
        None
    }
}

use plugin::library::Library;
use plugin::manifest::PluginFile;

// ---- tensors of i32, and whatever else a plugin on token ids calls

extern "C" fn uncalled() {
    eprintln!("a slot was called that this host lacks");
    std::process::abort();
}

extern "C" fn take_error() -> RString {
    RString::new()
}

extern "C" fn log(_: LogLevel, target: RStr<'_>, message: RStr<'_>) {
    println!("{target}: {message}");
}

type Ids = (Vec<i32>, Vec<i32>);

extern "C" fn from_bytes(bytes: RSlice<'_, u8>, shape: RSlice<'_, i32>, dtype: DType) -> RawTensor {
    assert_eq!(dtype, DType::I32);
    let words = bytes.as_slice().chunks_exact(4);
    let ids = words.map(|word| i32::from_ne_bytes(word.try_into().unwrap()));
    let tensor: Ids = (ids.collect(), shape.to_vec());
    RawTensor(Box::into_raw(Box::new(tensor)).cast())
}

fn ids<'a>(tensor: RawTensor) -> &'a Ids {
    // SAFETY: all handles come from `from_bytes`, and are used only while they are live.
    unsafe { &*tensor.0.cast::<Ids>() }
}

extern "C" fn drop_tensor(tensor: RawTensor) {
    if !tensor.is_null() {
        // SAFETY: from `from_bytes`, given back once.
        drop(unsafe { Box::from_raw(tensor.0.cast::<Ids>()) });
    }
}

extern "C" fn tensor_info(tensor: RawTensor, info: &mut TensorInfo) -> bool {
    let shape = &ids(tensor).1;
    info.dtype = DType::I32;
    info.rank = shape.len() as u32;
    info.shape[..shape.len()].copy_from_slice(shape);
    true
}

extern "C" fn clock() -> u64 {
    1234
}

fn api() -> HostApiRef {
    let mut slots = MaybeUninit::<HostApi>::uninit();
    let count = size_of::<HostApi>() / size_of::<extern "C" fn()>();
    // SAFETY: the table consists of function pointers alone, all of which are set here. Those that are not
    // replaced below are only told apart by being called, which ends the process.
    let mut api = unsafe {
        let first = slots.as_mut_ptr().cast::<extern "C" fn()>();
        (0..count).for_each(|slot| first.add(slot).write(uncalled));
        slots.assume_init()
    };
    api.take_error = take_error;
    api.log = log;
    api.from_bytes = from_bytes;
    api.drop_tensor = drop_tensor;
    api.tensor_info = tensor_info;
    api.clock = clock;
    HostApiRef(StaticRef::leak_value(WithMetadata::new(api)).as_prefix())
}

extern "C" fn age(_: *const c_void) -> u32 {
    7
}

// ---- a round

fn drive(path: &Path, api: HostApiRef) -> Result<(), error::LoadError> {
    let library = Library::load(&PluginFile::read(path)?)?;
    let (module, api_of_plugin) = (library.module(), &library.manifest().api);
    let request = LoadRequest {
        checkpoint: ROption::RNone,
        options: RSlice::EMPTY,
    };
    let drafter = module.load()(api, &request).unwrap();
    let info = drafter.table.info()(drafter.this).unwrap();
    let facts = TargetFacts {
        name: "target".into(),
        model_type: "llama".into(),
        hidden_size: 8,
        layers: 2,
        vocab_size: 100,
        dtype: DType::F32,
        vocabulary: ROption::RNone,
        donors: RSlice::EMPTY,
    };
    drafter.table.pair()(drafter.this, &facts).unwrap();
    let view = TargetView {
        embed: ROption::RNone,
        logits: ROption::RNone,
        head_subset: ROption::RNone,
        age,
    };
    let view = TargetViewRef(StaticRef::leak_value(WithMetadata::new(view)).as_prefix());
    let specs = [RowSpec {
        sampling: Default::default(),
    }];
    let open = OpenRequest {
        target: RawTarget {
            this: std::ptr::null(),
            table: view,
        },
        facts,
        rows: specs.as_slice().into(),
    };
    let rows = drafter.table.open()(drafter.this, &open).unwrap();
    let advance = |tokens: &[i32], next: i32, accepted: u32, prefill: bool| {
        let (lens, next, accepted) = ([tokens.len() as u32], [next], [accepted]);
        let advance = Advance {
            lens: lens.as_slice().into(),
            tokens: tokens.into(),
            next: next.as_slice().into(),
            taps: RSlice::EMPTY,
            accepted: accepted.as_slice().into(),
        };
        let slot = if prefill {
            rows.table.prefill()
        } else {
            rows.table.commit()
        };
        slot(rows.this, &advance).unwrap();
    };
    advance(&[1, 2, 3, 1, 2], 3, 0, true);
    let request = DraftRequest {
        depths: (&[2][..]).into(),
        pending: (&[3][..]).into(),
        positions: (&[6][..]).into(),
        donors: RSlice::EMPTY,
    };
    let draft = rows.table.draft()(rows.this, &request).unwrap();
    let drafted = ids(draft.ids).0.clone();
    drop_tensor(draft.ids);
    advance(&[3], 9, 0, false);

    let greeting = module.greet().map(|slot| slot().to_string());
    let wish = Wish {
        depths: (&[3, 4][..]).into(),
        more: ROption::RSome("more".into()),
    };
    let wish = drafter
        .table
        .wish()
        .map(|slot| slot(drafter.this, &wish).unwrap());
    let tree = rows
        .table
        .draft_tree()
        .map(|slot| slot(rows.this, &request).unwrap());
    println!(
        "{} of {api_of_plugin}: drafted {drafted:?}, greeting {greeting:?}, wish {wish:?}, tree {tree:?}",
        info.name
    );
    rows.table.drop()(rows.this);
    drafter.table.drop()(drafter.this);
    Ok(())
}

fn main() -> ExitCode {
    let api = api();
    for path in std::env::args_os().skip(1) {
        if let Err(error) = drive(path.as_ref(), api) {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
