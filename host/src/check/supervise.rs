//! Running a test in a process of its own.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{OUTPUT, Report, Test, Verdict};
use crate::text::one_line;

/// How often it is looked whether the process has ended.
const PACE: Duration = Duration::from_millis(5);

/// What is read of what a plugin prints.
const MOST_OUTPUT: u64 = 64 << 10;

/// Waits for a process that runs `test`, and ends it after `limit`. `command` makes the process for a path to
/// write its report to; `dir` is for files of that kind.
///
/// # Errors
/// The system's: the process can't be started, or a file not written.
pub fn supervise(
    test: &Test,
    dir: &Path,
    limit: Duration,
    command: impl FnOnce(&Path) -> Command,
) -> std::io::Result<Report> {
    let report = dir.join("report.json");
    let _ = std::fs::remove_file(&report);
    let (out, err) = (dir.join("stdout"), dir.join("stderr"));
    // Files, not pipes: nobody has to read them for the process to go on.
    let mut process = command(&report)
        .stdin(Stdio::null())
        .stdout(File::create(&out)?)
        .stderr(File::create(&err)?)
        .spawn()?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > limit {
            // It may have ended in this very moment; then there is nothing to kill.
            let _ = process.kill();
            process.wait()?;
            break None;
        }
        std::thread::sleep(PACE);
    };
    let (out, err) = (printed(&out)?, printed(&err)?);
    Ok(judge(test, status, &report, limit, (&out, &err)))
}

fn judge(
    test: &Test,
    status: Option<ExitStatus>,
    report: &Path,
    limit: Duration,
    (out, err): (&str, &str),
) -> Report {
    let Some(status) = status else {
        let why = format!("no answer within {} s", limit.as_secs_f32());
        return Report::new(test.name, Verdict::Crashed, &why);
    };
    let found = Report::read(test.name, report).filter(|_| status.success());
    let Some(found) = found else {
        let how = match status.signal() {
            Some(signal) => format!("ended by signal {signal}{}", signal_name(signal)),
            None => format!("ended with code {}", status.code().unwrap_or(-1)),
        };
        let last = err.lines().rfind(|line| !line.trim().is_empty());
        let said = last.map(|line| format!(": {line}")).unwrap_or_default();
        return Report::new(test.name, Verdict::Crashed, &format!("{how}{said}"));
    };
    if test.name != OUTPUT || found.verdict != Verdict::Passed {
        return found;
    }
    let noise = [("output", out), ("error", err)];
    let noise = noise
        .into_iter()
        .filter(|(_, text)| !text.trim().is_empty());
    let notes = noise.map(|(which, text)| {
        let begins: String = one_line(text).chars().take(60).collect();
        format!("it prints to standard {which}: {begins:?}")
    });
    match notes.collect::<Vec<_>>() {
        notes if notes.is_empty() => found,
        notes => Report::new(test.name, Verdict::Warning, &notes.join("; ")),
    }
}

fn printed(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MOST_OUTPUT)
        .read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The signals that plugins die of, alike on Linux and macOS but for one.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 if cfg!(target_os = "linux") => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        10 if cfg!(target_os = "macos") => " (SIGBUS)",
        11 => " (SIGSEGV)",
        _ => "",
    }
}
