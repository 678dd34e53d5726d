//! The thread pool of the kernels: one per process, as many threads as the machine has cores.
//!
//! A kernel call is a number of pieces that threads take in turn. A decoding step makes a hundred
//! calls, and a thread that sleeps takes longer to wake up than most of them last: so between calls
//! the threads watch for the next one for about two milliseconds, and sleep only then.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long an idle thread looks for work before it sleeps.
const PATIENCE: Duration = Duration::from_millis(2);

/// How often it looks between two glances at the clock.
const LOOKS: u32 = 256;

/// One call: its pieces, to be taken in turn.
#[derive(Clone, Copy)]
struct Job {
    /// Runs one piece. The lifetime is erased: `run` returns only when no worker has it any more.
    body: *const (dyn Fn(usize) + Sync),
    pieces: usize,
}

/// On a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Next(AtomicUsize);

struct Pool {
    /// Grows by one with every job: workers look for work when it has changed.
    epoch: AtomicUsize,
    /// The current job; none between calls. Who takes it counts in `active`, under this lock.
    job: Mutex<Option<Job>>,
    /// The next piece of every thread's own range.
    next: Vec<Next>,
    /// Workers that are inside the current job.
    active: AtomicUsize,
    workers: OnceLock<Vec<Thread>>,
    /// Only one call at a time.
    turn: Mutex<()>,
}

// SAFETY: the pointer in `job` is only followed by workers that count in `active`, while the closure,
// which is Sync, is alive.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Pool {}

static THREADS: OnceLock<usize> = OnceLock::new();
static POOL: OnceLock<Pool> = OnceLock::new();

/// Sets the number of threads, before the first kernel runs. Later calls change nothing.
pub fn set_threads(threads: usize) {
    let _ = THREADS.set(threads.clamp(1, 256));
}

/// The number of threads that kernels run on.
pub fn threads() -> usize {
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get))
}

fn pool() -> &'static Pool {
    let pool = POOL.get_or_init(|| Pool {
        epoch: AtomicUsize::new(0),
        job: Mutex::new(None),
        next: (0..threads()).map(|_| Next::default()).collect(),
        active: AtomicUsize::new(0),
        workers: OnceLock::new(),
        turn: Mutex::new(()),
    });
    pool.workers.get_or_init(|| {
        (1..threads())
            .filter_map(|index| {
                let worker = std::thread::Builder::new()
                    .name(format!("kernel-{index}"))
                    .spawn(move || work(pool, index));
                worker.ok().map(|handle| handle.thread().clone())
            })
            .collect()
    });
    pool
}

/// Runs `body(0)` to `body(pieces - 1)`, in any order and on any thread, and returns when all are
/// done. Small calls should have one piece, which runs right here.
pub fn run(pieces: usize, body: impl Fn(usize) + Sync) {
    if pieces <= 1 || threads() == 1 {
        (0..pieces).for_each(body);
        return;
    }
    let pool = pool();
    let _turn = pool.turn.lock().unwrap_or_else(PoisonError::into_inner);
    let workers = pool.workers.get().map_or(&[][..], Vec::as_slice);
    let erased: &(dyn Fn(usize) + Sync) = &body;
    // SAFETY: only the lifetime changes; no worker touches the closure after `active` is back at 0,
    // which this function waits for once it has withdrawn the job.
    let erased: *const (dyn Fn(usize) + Sync) = unsafe {
        std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(erased)
    };
    for (thread, next) in pool.next.iter().enumerate() {
        next.0.store(range(thread, pieces).start, Ordering::Relaxed);
    }
    *pool.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(Job {
        body: erased,
        pieces,
    });
    pool.epoch.fetch_add(1, Ordering::Release);
    workers.iter().for_each(Thread::unpark);
    take_pieces(pool, 0, &body, pieces);
    // A worker that wakes up only now finds nothing, and nobody waits for it.
    *pool.job.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let mut spins = 0u32;
    while pool.active.load(Ordering::Acquire) != 0 {
        spins = spins.saturating_add(1);
        if spins < 8 * LOOKS {
            std::hint::spin_loop();
        } else {
            // Fewer cores than threads: let the others finish.
            std::thread::yield_now();
        }
    }
}

/// The pieces that a thread takes first: next to each other, as what they read often is.
fn range(thread: usize, pieces: usize) -> std::ops::Range<usize> {
    let of = |thread| thread * pieces / threads();
    of(thread)..of(thread + 1)
}

/// Runs pieces of this thread's range, then what others have left of theirs.
fn take_pieces(pool: &Pool, thread: usize, body: &(dyn Fn(usize) + Sync), pieces: usize) {
    for other in 0..threads() {
        let from = (thread + other) % threads();
        let end = range(from, pieces).end;
        loop {
            let piece = pool.next[from].0.fetch_add(1, Ordering::Relaxed);
            if piece >= end {
                break;
            }
            body(piece);
        }
    }
}

/// A worker's life.
fn work(pool: &'static Pool, thread: usize) {
    let mut seen = 0;
    loop {
        let (mut looks, mut idle_since) = (0u32, None);
        loop {
            let epoch = pool.epoch.load(Ordering::Acquire);
            if epoch != seen {
                seen = epoch;
                break;
            }
            looks = looks.wrapping_add(1);
            if looks % LOOKS != 0 {
                std::hint::spin_loop();
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                std::thread::park();
            }
        }
        let job = {
            let job = pool.job.lock().unwrap_or_else(PoisonError::into_inner);
            if job.is_some() {
                pool.active.fetch_add(1, Ordering::Relaxed);
            }
            *job
        };
        let Some(Job { body, pieces }) = job else {
            continue;
        };
        // SAFETY: this worker counts in `active` until it is done, and the caller waits for that.
        let body = unsafe { &*body };
        // A panic must not leave the caller waiting: what it ends is the process.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            take_pieces(pool, thread, body, pieces);
        }));
        if outcome.is_err() {
            std::process::abort();
        }
        pool.active.fetch_sub(1, Ordering::Release);
    }
}

/// Splits `0..len` into pieces of at least `least`, about four per thread, and runs `body` on each.
pub fn split(len: usize, least: usize, body: impl Fn(std::ops::Range<usize>) + Sync) {
    let most = (threads() * 4).max(1);
    let size = len.div_ceil(most).max(least.max(1));
    let pieces = len.div_ceil(size);
    run(pieces, |piece| {
        let start = piece * size;
        body(start..(start + size).min(len));
    });
}

/// A buffer that pieces write disjoint parts of.
#[derive(Clone, Copy)]
pub struct Shared<T>(*mut T, usize);

// SAFETY: `slice` makes the caller promise that parts are disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Shares a buffer for the time of a kernel call.
    pub fn new(buffer: &mut [T]) -> Self {
        Self(buffer.as_mut_ptr(), buffer.len())
    }

    /// Elements of the buffer.
    pub fn len(&self) -> usize {
        self.1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.1 == 0
    }

    /// A part of the buffer that nobody writes.
    ///
    /// # Safety
    /// The buffer is still borrowed, and nobody has a mutable part that overlaps.
    ///
    /// # Panics
    /// The part is outside the buffer.
    pub unsafe fn read(&self, start: usize, len: usize) -> &[T] {
        assert!(start <= self.1 && len <= self.1 - start);
        // SAFETY: inside the buffer, and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.add(start), len) }
    }

    /// A part of the buffer.
    ///
    /// # Safety
    /// The buffer is still borrowed, and nobody else has a part that overlaps.
    ///
    /// # Panics
    /// The part is outside the buffer.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise
    pub unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.1 && len <= self.1 - start);
        // SAFETY: inside the buffer, and the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once() {
        for pieces in [0, 1, 2, 3, 7, 100] {
            for _ in 0..200 {
                let counts: Vec<_> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                run(pieces, |piece| {
                    counts[piece].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn a_split_covers_everything() {
        for len in [0, 1, 5, 64, 1000] {
            let mut out = vec![0u8; len];
            let shared = Shared::new(&mut out);
            split(len, 3, |range| {
                // SAFETY: the ranges of a split are disjoint.
                unsafe { shared.slice(range.start, range.len()) }.fill(1);
            });
            assert!(out.iter().all(|&x| x == 1));
        }
    }
}
