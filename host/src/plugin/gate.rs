//! The second and the third gate: API version and table layouts.

use abi_stable::StableAbi;
use abi_stable::abi_stability::abi_checking::check_layout_compatibility;
use abi_stable::library::AbiHeaderRef;
use plugin_api::abi::{API_VERSION, HEADER_SYMBOL, PluginModuleRef};
use semver::Version;

use super::manifest::PluginFile;
use crate::error::LoadError;

/// The API version of this host.
pub(super) fn host_version() -> Version {
    Version::parse(API_VERSION).unwrap_or_else(|_| Version::new(0, 0, 0))
}

/// Same major; a host that is newer than the plugin always serves it, an older one if the plugin
/// says so.
///
/// # Errors
/// Which version the plugin needs, which one this host has, and what to do.
pub fn check_version(file: &PluginFile) -> Result<(), LoadError> {
    let plugin = file.manifest();
    let host = host_version();
    let refuse =
        |what: String, remedy: String| Err(LoadError::mismatch(file.path(), what).remedy(remedy));
    let built = format!("plugin {} {}", plugin.name, plugin.version);
    if plugin.api.major != host.major {
        return refuse(
            format!(
                "{built} was built for plugin API {}, this host has {host}",
                plugin.api
            ),
            format!("get a build of it for API {}.x", host.major),
        );
    }
    if plugin.api > host && plugin.min_api > host {
        return refuse(
            format!(
                "{built} needs plugin API {} or newer, this host has {host}",
                plugin.min_api
            ),
            "update mlxhost, or get an older build of the plugin".to_owned(),
        );
    }
    Ok(())
}

/// The root module of an opened library, if all types it shares with the host are laid out alike.
pub(super) fn check_layout(
    file: &PluginFile,
    library: &libloading::Library,
) -> Result<PluginModuleRef, LoadError> {
    let plugin = file.manifest();
    let refuse = |what: String| {
        LoadError::mismatch(
            file.path(),
            format!("plugin {} {} {what}", plugin.name, plugin.version),
        )
        .remedy(format!(
            "rebuild it against mlxhost-plugin-api {}",
            host_version()
        ))
    };
    // SAFETY: the symbol of this name is an `AbiHeader` in every plugin; `upgrade` checks its magic
    // before it trusts the rest. The library is never unloaded.
    let header = unsafe { library.get::<AbiHeaderRef>(HEADER_SYMBOL) };
    let header = header.map_err(|_| refuse("exports no root module".to_owned()))?;
    let header = header
        .upgrade()
        .map_err(|_| refuse("was built with another version of abi_stable".to_owned()))?;
    let theirs = header
        .layout()
        .ok_or_else(|| refuse("carries no description of its types".to_owned()))?;
    let ours = PluginModuleRef::LAYOUT;
    // The check takes its first argument to be the older side, which may have fewer slots.
    let outcome = if plugin.api < host_version() {
        check_layout_compatibility(theirs, ours)
    } else {
        check_layout_compatibility(ours, theirs)
    };
    if let Err(errors) = outcome {
        tracing::debug!("layout check of {}: {errors}", file.path().display());
        let what = format!(
            "claims plugin API {}, but its types are laid out differently",
            plugin.api
        );
        return Err(refuse(what));
    }
    // SAFETY: the layouts of all types reachable from the root module were compared above.
    let module = unsafe { header.unchecked_layout::<PluginModuleRef>() };
    module.map_err(|e| refuse(format!("failed to make its root module ({e})")))
}
