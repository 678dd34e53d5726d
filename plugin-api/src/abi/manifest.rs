//! The manifest: a JSON text in a named section of the library, readable without running it.

/// The section's name: ELF section, or Mach-O section of the `__DATA` segment.
pub const SECTION: &str = if cfg!(target_vendor = "apple") {
    "__mlxhost"
} else {
    ".mlxhost"
};

/// The largest manifest that a host reads.
pub const MAX_MANIFEST_BYTES: usize = 64 * 1024;

/// `N` bytes placed in the manifest section by [`crate::export_plugin!`].
#[repr(transparent)]
pub struct Embedded<const N: usize>(pub [u8; N]);

/// Joins text at compile time into the bytes of a section; `N` must be the total length.
pub const fn section_bytes<const N: usize>(parts: &[&str]) -> Embedded<N> {
    let mut out = [0; N];
    let mut at = 0;
    let mut part = 0;
    while part < parts.len() {
        let bytes = parts[part].as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            out[at] = bytes[i];
            at += 1;
            i += 1;
        }
        part += 1;
    }
    assert!(at == N, "the manifest's length was computed wrongly");
    Embedded(out)
}

/// The total length of some texts, at compile time.
pub const fn total_len(parts: &[&str]) -> usize {
    let mut len = 0;
    let mut part = 0;
    while part < parts.len() {
        len += parts[part].len();
        part += 1;
    }
    len
}
