//! A library that claims the plugin API but has a root module of its own, which is laid out otherwise.

use abi_stable::StableAbi;
use abi_stable::library::{CheckTypeLayout, LibHeader, RootModule, RootModuleResult};
use abi_stable::prefix_type::WithMetadata;
use abi_stable::sabi_types::VersionStrings;
use plugin_api::abi::{API_VERSION, Embedded, section_bytes, total_len};

/// Looks like [`plugin_api::abi::PluginModule`], but `load` is a number.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginModuleRef)))]
#[sabi(missing_field(panic))]
pub struct PluginModule {
    #[sabi(last_prefix_field)]
    pub load: usize,
}

impl RootModule for PluginModuleRef {
    abi_stable::declare_root_module_statics! {PluginModuleRef}

    const BASE_NAME: &'static str = "mlxhost_plugin";
    const NAME: &'static str = "mlxhost_plugin";
    const VERSION_STRINGS: VersionStrings = abi_stable::package_version_strings!();
}

struct Tables;

impl Tables {
    abi_stable::staticref!(const MODULE: WithMetadata<PluginModule> =
        WithMetadata::new(PluginModule { load: 0xDEAD }));
}

const PARTS: &[&str] = &[
    "{\"manifest\":1,\"name\":\"altered\",\"version\":\"0.1.0\",\"api\":\"",
    API_VERSION,
    "\",\"min_api\":\"",
    API_VERSION,
    "\",\"families\":[null],\"options\":{}}",
];

#[used]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mlxhost"))]
#[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".mlxhost"))]
static MANIFEST: Embedded<{ total_len(PARTS) }> = section_bytes(PARTS);

extern "C" fn root() -> RootModuleResult {
    abi_stable::library::__call_root_module_loader(|| PluginModuleRef(Tables::MODULE.as_prefix()))
}

#[unsafe(export_name = "mlxhost_plugin_header")]
static HEADER: LibHeader =
    // SAFETY: `root` returns the erased form of this very module type.
    unsafe { LibHeader::from_constructor::<PluginModuleRef>(root, CheckTypeLayout::Yes) };
