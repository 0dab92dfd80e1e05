//! Mounts that need a helper of the host (`mount.nfs`): through the programs mount(8) and umount(8), with a deadline. Everything here blocks.
//!
//! A network filesystem whose server is away can hold its caller in the kernel for as long as it likes. So the call is another process's, and
//! what is not done in time is given up: the process is killed, and left to the kernel where that does not help.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;

use crate::error::{Attempt, Failed, Result};

/// How long a mount or unmount may take. The Go kubelet's number for an unmount.
pub const LIMIT: Duration = Duration::from_secs(120);

/// How often it is looked whether the program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Mounts `source` at `target`, which must be there.
///
/// # Errors
/// The program cannot be started, fails, or is not done in time; the text is the Go kubelet's.
pub fn mount(fs_type: &str, source: &str, target: &Path, options: &[String], limit: Duration) -> Result<()> {
    let mut arguments = vec!["-t".to_owned(), fs_type.to_owned()];
    if !options.is_empty() {
        arguments.extend(["-o".to_owned(), options.join(",")]);
    }
    arguments.extend([source.to_owned(), target.display().to_string()]);
    let ended = run("mount", &arguments, limit)?;
    if ended.is_success() {
        return Ok(());
    }
    Err(Failed::other(
        "mount failed",
        format!(
            "{}\nMounting command: mount\nMounting arguments: {}\nOutput: {}",
            ended.how,
            arguments.join(" "),
            ended.output
        ),
    ))
}

/// Unmounts what is at `target`, first as it should be (what is not written yet is written), then by force. Nothing there is done.
///
/// # Errors
/// It stays mounted.
pub fn unmount(target: &Path, limit: Duration) -> Result<()> {
    let arguments = [target.display().to_string()];
    if run("umount", &arguments, limit)?.is_success() {
        return Ok(());
    }
    let forced = rustix::mount::unmount(target, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW).or_else(|_| {
        // Out of sight at least; it goes with its last user.
        rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
    });
    match forced {
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) | Ok(()) => Ok(()),
        Err(e) => Err(Failed::new(format!("unmount {}", target.display()), e)),
    }
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    status: Option<ExitStatus>,
    /// In words, as Go prints it.
    how: String,
    /// What it wrote.
    pub(crate) output: String,
}

impl Ended {
    fn is_success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// Its exit code; None: it was killed.
    pub(crate) fn code(&self) -> Option<i32> {
        self.status?.code()
    }

    /// What it wrote, when it did its work.
    ///
    /// # Errors
    /// It did not; `what` says what was attempted.
    pub(crate) fn done(self, what: &str) -> Result<String> {
        if self.is_success() {
            return Ok(self.output);
        }
        Err(Failed::other(what, format!("{}: {}", self.how, self.output.trim())))
    }
}

/// Runs a program to its end, or until it is given up.
///
/// # Errors
/// It cannot be started or waited for.
pub(crate) fn run(program: &str, arguments: &[String], limit: Duration) -> Result<Ended> {
    // Arguments may be secrets.
    let what = || format!("run {program}");
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .attempt(what)?;
    // Read beside the waiting: a program that writes much would wait for its reader.
    let readers = [read(child.stdout.take()), read(child.stderr.take())];
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().attempt(what)? {
            Some(status) => break Some(status),
            None if begun.elapsed() > limit => {
                give_up(child);
                break None;
            }
            None => std::thread::sleep(LOOK),
        }
    };
    let how = match status {
        None => format!("no end after {} s", limit.as_secs()),
        Some(status) => status.code().map_or_else(|| status.to_string(), |code| format!("exit status {code}")),
    };
    // Of one that was given up nothing is waited for: what it started may hold its output open.
    let output = match status {
        None => String::new(),
        Some(_) => readers.into_iter().flatten().filter_map(|r| r.recv_timeout(limit).ok()).collect(),
    };
    Ok(Ended { status, how, output })
}

/// Reads what a program writes, in a thread of its own that ends with it.
fn read(from: Option<impl Read + Send + 'static>) -> Option<mpsc::Receiver<String>> {
    let mut from = from?;
    let (to, all) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        let _ = to.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    Some(all)
}

/// Kills it; where the kernel holds it, its end is waited for elsewhere.
fn give_up(mut child: Child) {
    let _ = child.kill();
    std::thread::spawn(move || child.wait());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_programs_words() {
        let dir = tempfile::tempdir().unwrap();
        let failed = mount("no-such-type", "nowhere", dir.path(), &["ro".to_owned(), "soft".to_owned()], LIMIT);
        let text = failed.unwrap_err().full();
        assert!(text.starts_with("mount failed: exit status "), "{text}");
        let arguments = format!("Mounting arguments: -t no-such-type -o ro,soft nowhere {}", dir.path().display());
        assert!(text.contains(&arguments), "{text}");
    }

    #[test]
    fn much_output_and_codes() {
        let shell = |script: &str| run("sh", &["-c".to_owned(), script.to_owned()], LIMIT).unwrap();
        let much = shell("head -c 1000000 /dev/zero | tr '\\0' x; echo end >&2; exit 3");
        assert_eq!((much.code(), much.output.len()), (Some(3), 1_000_004));
        assert_eq!(shell("echo fine").done("x").unwrap(), "fine\n");
        assert_eq!(shell("echo no; exit 7").done("try it").unwrap_err().full(), "try it: exit status 7: no");
    }

    #[test]
    fn what_does_not_end_is_given_up() {
        let begun = Instant::now();
        let ended = run("sleep", &["600".to_owned()], Duration::from_millis(50)).unwrap();
        assert_eq!((ended.code(), ended.how.as_str()), (None, "no end after 0 s"));
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
