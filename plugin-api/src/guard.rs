//! Keeping panics on the side that caused them.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics of this image silent and remembers their message and place for [`catch`].
///
/// A plugin has a standard library of its own, hence a hook of its own: the host's is untouched.
pub(crate) fn capture_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            let message = info.payload_as_str().unwrap_or("no message");
            let text = match info.location() {
                Some(place) => format!("{message} ({}:{})", place.file(), place.line()),
                None => message.to_owned(),
            };
            LAST_PANIC.with_borrow_mut(|last| *last = Some(text));
        }));
    });
}

/// Runs `body`; a panic in it comes back as its message.
///
/// What `body` was changing may be left half done: the caller must not use it again.
///
/// ```
/// use plugin_api::guard;
///
/// assert_eq!(guard::catch(|| 2 + 2), Ok(4));
/// assert!(guard::catch(|| panic!("no row {}", 7)).unwrap_err().contains("no row 7"));
/// ```
pub fn catch<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        let captured = LAST_PANIC.with_borrow_mut(Option::take);
        let message = captured.unwrap_or_else(|| {
            let text = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned());
            text.unwrap_or_else(|| "no message".to_owned())
        });
        // Leaked: its destructor could panic again, past this guard.
        std::mem::forget(payload);
        message
    })
}

#[cfg(test)]
mod tests {
    use super::catch;

    #[test]
    fn a_panic_comes_back_as_its_message() {
        assert_eq!(catch(|| 3), Ok(3));
        let message = catch(|| panic!("row {}", 7)).unwrap_err();
        assert!(message.contains("row 7"), "{message}");
    }

    #[test]
    fn a_payload_that_panics_when_dropped_is_contained() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert!(catch(|| std::panic::panic_any(Bomb)).is_err());
    }
}
