//! The plugin `hostile` with an allocator of its own, which plugins must not have. It knows its own memory, and ends
//! the process when it is given any other to free; the system's does so with its.

use std::alloc::{GlobalAlloc, Layout, System};

#[path = "../../hostile/src/lib.rs"]
mod hostile;

#[global_allocator]
static OWN: Own = Own;

/// Memory of the system's, begun by a tag.
struct Own;

/// Before every piece of memory.
const TAG: u64 = 0x6f77_6e20_6d65_6d6f;

/// The bytes before a piece, for the tag, and the layout with them.
fn tagged(layout: Layout) -> Option<(usize, Layout)> {
    let before = layout.align().max(size_of::<u64>());
    let size = layout.size().checked_add(before)?;
    let with = Layout::from_size_align(size, before).ok()?;
    Some((before, with))
}

// SAFETY: pieces are the system's, moved by a multiple of their alignment; a layout gives the same move each time.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((before, with)) = tagged(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: `with` is not empty. The tag lies inside, aligned as `before` is a multiple of its size.
        unsafe {
            let start = System.alloc(with);
            if start.is_null() {
                return start;
            }
            let piece = start.add(before);
            piece.cast::<u64>().sub(1).write(TAG);
            piece
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        let Some((before, with)) = tagged(layout) else {
            std::process::abort();
        };
        // SAFETY: a piece of this allocator has its tag there. So has any other, of the system's: what the system
        // knows of it.
        unsafe {
            let tag = piece.cast::<u64>().sub(1);
            if tag.read() != TAG {
                std::process::abort();
            }
            tag.write(0);
            System.dealloc(piece.sub(before), with);
        }
    }
}
