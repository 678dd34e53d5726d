//! A drafter that misbehaves as told, to show that no drafter can change an answer.
//!
//! `behave` names what it does and `after` how many rounds it waits. Until then it proposes the
//! pending token once more: right by chance alone. Each time it errs, a line goes into the file
//! `diary`, if there is to be one.

use std::cell::RefCell;
use std::io::Write;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use plugin_api::abi::LogLevel;
use plugin_api::{
    Advance, Checkpoint, DType, DraftRequest, DraftRows, Drafter, DrafterInfo, Drafts, Error,
    Options, Result, RowSpec, RowState, Target, TargetFacts, Tensor, export_plugin,
};

/// What a user's terminal should never be made to do.
const LOUD: &str = "\x1b[31mred\x07\n\nand\r on many\n lines\x00 ";

/// The drafter; it has no weights.
struct Hostile {
    behave: String,
    after: u32,
}

/// Dropping it panics: as a field, or as the payload of another panic.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("hostile destructor");
    }
}

/// Showing it panics.
struct Unspeakable;

impl std::fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("hostile display");
    }
}

/// A line of each kind, by both crates, and one from another thread.
fn talk(rows: usize) {
    log::info!("logged with {rows} row");
    log::debug!(target: "library::part", "logged elsewhere");
    tracing::warn!(rows, name = "two words", "traced");
    tracing::info_span!("span", rows).in_scope(|| tracing::error!("traced inside"));
    let thread = std::thread::spawn(|| log::warn!("logged in a thread"));
    thread.join().expect("the thread logs");
}

/// Where it notes what it does.
static DIARY: OnceLock<Diary> = OnceLock::new();

struct Diary {
    file: std::fs::File,
    path: PathBuf,
}

fn note(line: &str) {
    if let Some(mut diary) = DIARY.get().map(|diary| &diary.file) {
        writeln!(diary, "{line}").expect("the diary can be written");
    }
}

/// Known by the same name in every build, and different in each that a test makes.
#[unsafe(no_mangle)]
#[used]
static HOSTILE_MARK: [u8; 12] = *b"MARK-0000000";

/// The mark as the system's loader has bound its name.
fn mark() -> String {
    // SAFETY: this library defines it, so the loader has found one; it is never written to.
    unsafe extern "C" {
        #[link_name = "HOSTILE_MARK"]
        safe static BOUND: [u8; 12];
    }
    String::from_utf8_lossy(&BOUND).into_owned()
}

/// Notes the end of the thread that has it.
struct Farewell(&'static str);

impl Drop for Farewell {
    fn drop(&mut self) {
        note(self.0);
    }
}

thread_local! {
    static FAREWELL: RefCell<Option<Farewell>> = const { RefCell::new(None) };
}

fn say_farewell(whose: &'static str) {
    FAREWELL.with_borrow_mut(|farewell| *farewell = Some(Farewell(whose)));
}

/// Leaves a destructor in the host's thread, and a thread of its own, until there is a file beside the diary.
fn linger() {
    static LINGERS: AtomicBool = AtomicBool::new(false);
    if LINGERS.swap(true, Ordering::Relaxed) {
        return;
    }
    say_farewell("the host's thread ends");
    let diary = DIARY.get().expect("a diary");
    let end = diary.path.with_extension("end");
    std::thread::spawn(move || {
        say_farewell("a thread of the plugin ends");
        while !end.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}

/// Waits for a future on this thread, as asynchronous runtimes do.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Waits for work that other threads do, and that wakes this one.
fn wait_for_others() {
    let done = Arc::new(AtomicI32::new(0));
    let mut threads = Vec::new();
    let work = std::future::poll_fn(|context| {
        if threads.is_empty() {
            threads.extend((0..3).map(|n| {
                let (done, waker) = (done.clone(), context.waker().clone());
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(n));
                    done.fetch_add(1, Ordering::SeqCst);
                    waker.wake();
                })
            }));
        }
        match done.load(Ordering::SeqCst) {
            3 => Poll::Ready(()),
            _ => Poll::Pending,
        }
    });
    block_on(work);
    for thread in threads {
        thread.join().expect("a thread that works");
    }
}

/// Calls of all drafters together, for those that are never twice the same.
static CALLS: AtomicI32 = AtomicI32::new(0);

/// Longer than somebody waits who is in a hurry.
const NAP: Duration = Duration::from_secs(2);

/// For ever, as far as anybody waits.
const LONG: Duration = Duration::from_secs(3600);

/// What every call does first: panics or fails, when that is what was asked for in `place`.
fn misstep(behave: &str, place: &str) -> Result<()> {
    let how = behave.strip_suffix(place);
    let how = how.and_then(|how| how.strip_suffix('-'));
    if how.is_some() {
        note(behave);
    }
    match how {
        Some("panic") => panic!("hostile {place}"),
        Some("bomb") => std::panic::panic_any(Bomb),
        Some("number") => std::panic::panic_any(7),
        Some("hang") => loop {
            std::thread::sleep(LONG);
        },
        // Only the first time in this process.
        Some("nap") if CALLS.fetch_add(1, Ordering::Relaxed) == 0 => {
            std::thread::sleep(NAP);
            Ok(())
        }
        // Busy with the host's ops.
        Some("spin") => {
            let mut sum = Tensor::full(&[64, 64], 0.0, DType::F32)?;
            loop {
                sum = sum.matmul(&sum)?;
                sum.eval()?;
            }
        }
        Some("error") => Err(Error::failed(format!("hostile {place}"))),
        Some("loud") => Err(Error::invalid(LOUD.repeat(1000))),
        _ => Ok(()),
    }
}

impl Drafter for Hostile {
    type Rows = HostileRows;

    fn load(_checkpoint: Option<Checkpoint>, options: &mut Options) -> Result<Self> {
        let behave: Option<String> = options.take("behave")?;
        let behave = behave.ok_or_else(|| Error::invalid("hostile needs the option behave"))?;
        if let Some(path) = options.take::<String>("diary")? {
            DIARY.get_or_init(|| Diary {
                file: std::fs::File::create(&path).expect("the diary"),
                path: path.into(),
            });
        }
        misstep(&behave, "load")?;
        match behave.as_str() {
            "any-option" => drop(options.take::<String>("no-such-option")?),
            "leak-thread" => drop(std::thread::spawn(|| std::thread::sleep(LONG))),
            _ => {}
        }
        Ok(Self {
            behave,
            after: options.take("after")?.unwrap_or(0),
        })
    }

    fn info(&self) -> DrafterInfo {
        misstep(&self.behave, "info").expect("info has no way to fail");
        let claims = |what: &str| self.behave == what;
        DrafterInfo {
            name: match claims("loud-name") {
                true => LOUD.repeat(100_000),
                false if claims("fickle") => {
                    format!("hostile-{}", CALLS.fetch_add(1, Ordering::Relaxed))
                }
                false if claims("mark") => mark(),
                false => "hostile".into(),
            },
            weight_bytes: u64::MAX,
            taps: match self.behave.as_str() {
                "many-taps" => vec![plugin_api::Tap::FINAL; 1000],
                "deep-tap" => vec![plugin_api::Tap::layer(9999)],
                _ => Vec::new(),
            },
            donors: match self.behave.as_str() {
                "many-donors" => vec![plugin_api::DonorKind::FULL; 1000],
                "odd-donor" => vec![plugin_api::DonorKind(77)],
                _ => Vec::new(),
            },
            default_depth: if claims("deep") { u32::MAX } else { 2 },
            max_depth: match self.behave.as_str() {
                "no-depth" => 0,
                "deep" => u32::MAX,
                _ => 4,
            },
        }
    }

    fn pair(&self, _target: &TargetFacts) -> Result<()> {
        misstep(&self.behave, "pair")
    }

    fn open(&mut self, _: Target, _: &TargetFacts, rows: &[RowSpec]) -> Result<HostileRows> {
        misstep(&self.behave, "open")?;
        match self.behave.as_str() {
            "loud-log" => plugin_api::log(LogLevel::WARN, "hostile", LOUD),
            "loud-crate" => log::warn!("{LOUD}"),
            "panic-display" => log::error!("{Unspeakable}"),
            "talk" => talk(rows.len()),
            "linger" => linger(),
            _ => {}
        }
        Ok(HostileRows {
            behave: self.behave.clone(),
            rounds_left: self.after,
            rows: rows.len(),
            processed: vec![0; rows.len()],
            is_restored: false,
            _bomb: (self.behave == "panic-drop").then(|| Bomb),
        })
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = misstep(&self.behave, "drop");
    }
}

/// A group.
struct HostileRows {
    behave: String,
    rounds_left: u32,
    rows: usize,
    /// Tokens of each row.
    processed: Vec<u32>,
    is_restored: bool,
    _bomb: Option<Bomb>,
}

impl HostileRows {
    fn count(&mut self, advance: &Advance<'_>) {
        for (processed, row) in self.processed.iter_mut().zip(&advance.rows) {
            *processed += row.tokens.len() as u32;
        }
    }

    fn acts(&self) -> bool {
        self.rounds_left == 0
    }

    /// The same proposal for every row.
    fn propose(&self, ids: &[i32]) -> Result<Drafts> {
        Drafts::from_lists(&vec![ids.to_vec(); self.rows])
    }

    /// Each row's pending token once more, where a draft is wanted.
    fn repeat(&self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let rows = request.pending.iter().zip(request.depths);
        let lists: Vec<Vec<i32>> = rows
            .map(|(&id, &depth)| vec![id; (depth as usize).min(1)])
            .collect();
        Drafts::from_lists(&lists)
    }

    /// The same token for every row that wants a draft.
    fn like(&self, request: &DraftRequest<'_>, id: i32) -> Result<Drafts> {
        let rows = request.depths.iter();
        let lists: Vec<Vec<i32>> = rows
            .map(|&depth| vec![id; (depth as usize).min(1)])
            .collect();
        Drafts::from_lists(&lists)
    }

    /// A draft that does not match what it says of itself.
    fn shaped(&self, ids: Result<Tensor>, lens: &[u32]) -> Result<Drafts> {
        Ok(Drafts {
            ids: Some(ids?),
            lens: lens.to_vec(),
        })
    }
}

impl DraftRows for HostileRows {
    fn prefill(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.count(advance);
        misstep(&self.behave, "prefill")
    }

    fn draft(&mut self, request: &DraftRequest<'_>) -> Result<Drafts> {
        let rows = self.rows as i32;
        if !self.acts() {
            return self.repeat(request);
        }
        misstep(&self.behave, "draft")?;
        match self.behave.as_str() {
            "negative-id" => self.propose(&[-1]),
            "least-id" => self.propose(&[i32::MIN]),
            "large-id" => self.propose(&[i32::MAX]),
            // The target draws no token of that number either: right up to the last one.
            "late-id" => self.propose(&[request.pending[0], 1 << 30]),
            "too-many" => self.propose(&[1; 40]),
            "extra-row" => self.shaped(Tensor::from_slice(&[1], &[1, 1]), &vec![1; self.rows + 1]),
            "no-row" => self.shaped(Tensor::from_slice(&[1], &[1, 1]), &[]),
            "flat-ids" => self.shaped(Tensor::from_slice(&[1], &[1]), &[1]),
            "narrow-ids" => self.shaped(Tensor::from_slice(&[1], &[rows, 1]), &[2]),
            "tall-ids" => self.shaped(Tensor::from_slice(&[1, 1], &[rows + 1, 1]), &[1]),
            "empty-ids" => self.shaped(Tensor::full(&[rows, 0], 0.0, DType::I32), &[1]),
            "float-ids" => self.shaped(Tensor::full(&[rows, 1], 0.5, DType::F32), &[1]),
            "long-ids" => self.shaped(Tensor::full(&[rows, 1], 5.0, DType::I64), &[1]),
            "null-ids" => Ok(Drafts {
                ids: None,
                lens: vec![1; self.rows],
            }),
            "wait" => {
                wait_for_others();
                self.repeat(request)
            }
            "abort" => std::process::abort(),
            "exit" => std::process::exit(0),
            "print" => {
                println!("hostile was here");
                self.repeat(request)
            }
            "print-error" => {
                eprintln!("hostile was here");
                self.repeat(request)
            }
            "leak-tensor" => {
                std::mem::forget(Tensor::from_slice(&[1.0f32; 256], &[16, 16])?);
                self.repeat(request)
            }
            "crowd" => self.like(request, rows),
            "unsteady" => self.like(request, CALLS.fetch_add(1, Ordering::Relaxed) % 7),
            "forgetful" if self.is_restored => self.like(request, 3),
            "idle-ids" => self.shaped(Tensor::full(&[7, 7, 7], 0.0, DType::F32), &[0]),
            "wide-ids" => self.shaped(Tensor::full(&[rows, 100_000], 9.0, DType::I32), &[1]),
            _ => self.repeat(request),
        }
    }

    fn commit(&mut self, advance: &Advance<'_>) -> Result<()> {
        self.count(advance);
        if self.acts() {
            misstep(&self.behave, "commit")?;
        }
        self.rounds_left = self.rounds_left.saturating_sub(1);
        Ok(())
    }

    fn filter_rows(&mut self, keep: &[usize]) -> Result<()> {
        misstep(&self.behave, "filter")?;
        self.rows = keep.len();
        self.processed = match self.behave.as_str() {
            // The right number of rows, but not the right ones.
            "keep-first" => self.processed[..keep.len()].to_vec(),
            _ => keep.iter().map(|&row| self.processed[row]).collect(),
        };
        Ok(())
    }

    fn append(&mut self, mut other: Self) -> Result<()> {
        misstep(&self.behave, "append")?;
        self.rows += other.rows;
        self.processed.append(&mut other.processed);
        Ok(())
    }

    fn capture(&self, row: usize) -> Result<Option<RowState>> {
        misstep(&self.behave, "capture")?;
        let ahead = u32::from(self.behave == "ahead");
        Ok(Some(RowState::new(
            "hostile/1",
            self.processed[row] + ahead,
        )))
    }

    fn restore(&mut self, state: &RowState) -> Result<()> {
        misstep(&self.behave, "restore")?;
        state.require("hostile/1")?;
        self.processed = vec![state.processed()];
        self.is_restored = true;
        Ok(())
    }

    fn row_count(&self) -> usize {
        match self.behave.as_str() {
            "miscount" if self.acts() => self.rows + 1,
            "panic-count" if self.acts() => panic!("hostile count"),
            _ => self.rows,
        }
    }
}

export_plugin! {
    drafter: Hostile,
    name: "hostile",
    families: [],
    options: {
        "behave": "what it does wrong",
        "after": "rounds before it does, default 0",
        "diary": "a file that is told each time",
    },
}
