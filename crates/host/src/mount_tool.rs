//! Mounts that need a helper of the host (`mount.nfs`): through the programs mount(8) and umount(8), with a deadline. Everything here blocks.
//!
//! A network filesystem whose server is away can hold its caller in the kernel for as long as it likes. So the call is another process's, and
//! what is not done in time is given up: the process is killed, and left to the kernel where that does not help.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
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
    let (ended, output) = match run("mount", &arguments, limit)? {
        Some(output) if output.status.success() => return Ok(()),
        Some(output) => (end_of(&output), output.stderr),
        None => (format!("no end after {} s", limit.as_secs()), Vec::new()),
    };
    Err(Failed::other(
        "mount failed",
        format!(
            "{ended}\nMounting command: mount\nMounting arguments: {}\nOutput: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output)
        ),
    ))
}

/// Unmounts what is at `target`, first as it should be (what is not written yet is written), then by force. Nothing there is done.
///
/// # Errors
/// It stays mounted.
pub fn unmount(target: &Path, limit: Duration) -> Result<()> {
    let arguments = [target.display().to_string()];
    if run("umount", &arguments, limit)?.is_some_and(|output| output.status.success()) {
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

/// How a program ended, as Go prints it.
fn end_of(output: &Output) -> String {
    match output.status.code() {
        Some(code) => format!("exit status {code}"),
        None => output.status.to_string(),
    }
}

/// Runs a program to its end; None: it was given up.
fn run(program: &str, arguments: &[String], limit: Duration) -> Result<Option<Output>> {
    let what = || format!("run {program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .attempt(what)?;
    let begun = Instant::now();
    while child.try_wait().attempt(what)?.is_none() {
        if begun.elapsed() > limit {
            give_up(child);
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
    child.wait_with_output().attempt(what).map(Some)
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
    fn what_does_not_end_is_given_up() {
        let begun = Instant::now();
        assert!(run("sleep", &["600".to_owned()], Duration::from_millis(50)).unwrap().is_none());
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}
