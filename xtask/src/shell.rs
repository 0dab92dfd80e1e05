//! Running a program with its output in a log, a line of progress, a deadline, and an end at Ctrl-C.

use std::fs;
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

/// Ctrl-C, `SIGTERM` or `SIGHUP` came: everything started is taken down on the way out.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// What a short command writes, without a log.
///
/// # Errors
/// It cannot be run, or does not end well: with its words.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where the commands of one run write and how they are stopped.
pub(crate) struct Shell {
    stop: Arc<AtomicBool>,
    logs: PathBuf,
    terminal: bool,
}

impl Shell {
    pub(crate) fn new() -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot catch signals")?;
        }
        let logs = crate::root().join("target/xtask");
        fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        Ok(Self { stop, logs, terminal: std::io::stdout().is_terminal() })
    }

    /// True after Ctrl-C.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The error to leave with after Ctrl-C.
    pub(crate) fn check(&self) -> Result<()> {
        if self.stopped() { Err(Interrupted.into()) } else { Ok(()) }
    }

    /// Waits until `done` says true; false when `limit` passed first, an error after Ctrl-C.
    pub(crate) fn wait(&self, limit: Duration, mut done: impl FnMut() -> bool) -> Result<bool> {
        let start = Instant::now();
        while !done() {
            self.check()?;
            if start.elapsed() >= limit {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(true)
    }

    /// The log of the step `name`.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
        self.logs.join(format!("{name}.log"))
    }

    /// Runs `command` with its output in the log of `what`, and gives its exit status.
    ///
    /// # Errors
    /// When it cannot start, takes longer than `limit`, or after Ctrl-C; then it and what it started are ended.
    pub(crate) fn run(&self, what: &str, command: &mut Command, limit: Duration) -> Result<ExitStatus> {
        self.check()?;
        let log = self.log(what);
        // A new file: a killed run's child may still be writing to the old one.
        let _ = fs::remove_file(&log);
        let file = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let program = command.get_program().to_string_lossy().into_owned();
        // A group of its own: Ctrl-C at the terminal comes to us, and the whole group is ended from here.
        let child = command
            .env("CARGO_TERM_COLOR", "never")
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let mut child = Group(child);
        let start = Instant::now();
        let mut shown = start;
        let ended = loop {
            if let Some(status) = child.0.try_wait().with_context(|| program.clone())? {
                break Ok(status);
            }
            if self.stopped() {
                break Err(Interrupted.into());
            }
            if start.elapsed() > limit {
                break Err(anyhow::anyhow!("{what}: not done after {} s", limit.as_secs()));
            }
            let every = if self.terminal { 1 } else { 30 };
            if shown.elapsed() >= Duration::from_secs(every) {
                shown = Instant::now();
                self.progress(what, start.elapsed(), &log);
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        if self.terminal && start.elapsed() >= Duration::from_secs(1) {
            let _ = write!(std::io::stdout(), "\r\x1b[K");
        }
        ended
    }

    /// As [`Shell::run`], but anything other than success is an error with the end of the log.
    pub(crate) fn need(&self, what: &str, command: &mut Command, limit: Duration) -> Result<()> {
        let start = Instant::now();
        let status = self.run(what, command, limit)?;
        if !status.success() {
            let log = self.log(what);
            bail!("{what} failed ({status}); the end of {}:\n{}", log.display(), rig::tail(&log, 25));
        }
        if start.elapsed() >= Duration::from_secs(1) {
            println!("  {what}: {:.0} s", start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    fn progress(&self, what: &str, elapsed: Duration, log: &Path) {
        let last = rig::tail(log, 1);
        let line = format!("  {what} … {} s  {}", elapsed.as_secs(), last.trim());
        let line: String = line.chars().filter(|c| !c.is_control()).take(79).collect();
        let mut out = std::io::stdout();
        // Nobody may be listening any more (`| head`): the step goes on all the same.
        let _ = if self.terminal { write!(out, "\r{line}\x1b[K") } else { writeln!(out, "{line}") };
        let _ = out.flush();
    }
}

/// A child with its process group. Dropped while it runs: `SIGINT`, after 5 s `SIGKILL`, to all of the group.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        let Some(group) = Pid::from_raw(self.0.id().cast_signed()) else { return };
        let _ = kill_process_group(group, Signal::INT);
        rig::poll(Duration::from_secs(5), || !matches!(self.0.try_wait(), Ok(None)));
        // What is left of the group, also when its leader ended alone.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.0.wait();
    }
}
