//! A plugin of API 2.0. Between major versions the manifest is all that stays, so it has nothing else; whoever maps
//! it is ended.

const TEXT: &[u8] = br#"{"manifest":1,"name":"next_major","version":"0.1.0","api":"2.0.0","min_api":"2.0.0","families":[null],"options":{"":null}}"#;

#[used]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mlxhost"))]
#[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".mlxhost"))]
static MANIFEST: [u8; TEXT.len()] = {
    let mut bytes = [0; TEXT.len()];
    bytes.copy_from_slice(TEXT);
    bytes
};

extern "C" fn mapped() {
    std::process::abort();
}

#[used]
#[cfg_attr(
    target_vendor = "apple",
    unsafe(link_section = "__DATA,__mod_init_func")
)]
#[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".init_array"))]
static CONSTRUCTOR: extern "C" fn() = mapped;
