//! Single processes.

use std::io::Write;
use std::path::Path;

use crate::error::{Attempt, Result, found};

/// What is known of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Its id.
    pub pid: u32,
    /// Its name (`comm`), at most 15 bytes.
    pub name: String,
    /// Its arguments; empty for kernel threads and zombies.
    pub command: Vec<String>,
    /// When it started, in clock ticks since boot: with the id, it names the process for good.
    pub start_ticks: u64,
    /// The state letter of proc_pid_stat(5): `R`, `S`, `Z`, …
    pub state: char,
}

/// Every process id now.
///
/// # Errors
/// `proc` cannot be listed.
pub fn pids(proc: &Path) -> Result<Vec<u32>> {
    let entries = std::fs::read_dir(proc).on("list", proc)?;
    Ok(entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// One process; None when there is none of this id.
///
/// # Errors
/// Its files cannot be read.
pub fn process(proc: &Path, pid: u32) -> Result<Option<ProcessInfo>> {
    let dir = proc.join(pid.to_string());
    let stat = dir.join("stat");
    let text = match std::fs::read(&stat) {
        // ESRCH: it ended between open and read.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(3) => return Ok(None),
        other => String::from_utf8_lossy(&other.on("read", &stat)?).into_owned(),
    };
    // The name stands in parentheses and may hold any byte, these included.
    let Some((head, tail)) = text.rsplit_once(')') else { return Ok(None) };
    let name = head.split_once('(').map_or("", |(_, n)| n).to_owned();
    let fields: Vec<_> = tail.split_whitespace().collect();
    let state = fields.first().and_then(|f| f.chars().next()).unwrap_or('?');
    let start_ticks = fields.get(19).and_then(|f| f.parse().ok()).unwrap_or_default();
    let cmdline = found(std::fs::read(dir.join("cmdline"))).unwrap_or_default().unwrap_or_default();
    let command = cmdline.split(|b| *b == 0).map(|a| String::from_utf8_lossy(a).into_owned());
    let mut command: Vec<_> = command.collect();
    command.pop();
    Ok(Some(ProcessInfo { pid, name, command, start_ticks, state }))
}

/// Sets how likely the kernel is to kill this process (None: this one) when memory runs out: -1000 … 1000.
/// A refusal ([`crate::Failed::is_refused`]) is met in user namespaces and need not stop the caller.
///
/// # Errors
/// There is no such process, or the kernel refuses.
pub fn write_oom_score_adj(proc: &Path, pid: Option<u32>, score: i32) -> Result<()> {
    let path = proc.join(pid.map_or("self".into(), |p| p.to_string())).join("oom_score_adj");
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(score.to_string().as_bytes()))
        .attempt(|| format!("write {score} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{get, put};

    #[test]
    fn a_name_may_hold_parentheses() {
        let dir = tempfile::tempdir().unwrap();
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 99 1";
        put(dir.path(), "7/stat", stat);
        put(dir.path(), "7/cmdline", "sleep\x00100\x00");
        let p = process(dir.path(), 7).unwrap().unwrap();
        assert_eq!((p.name.as_str(), p.state, p.start_ticks), ("a) b (c", 'S', 4711));
        assert_eq!(p.command, ["sleep", "100"]);
        assert_eq!(process(dir.path(), 8).unwrap(), None);
        assert_eq!(pids(dir.path()).unwrap(), [7]);
    }

    #[test]
    fn this_process() {
        let p = process(Path::new("/proc"), std::process::id()).unwrap().unwrap();
        assert!(p.start_ticks > 0);
        assert!(!p.command.is_empty());
    }

    #[test]
    fn the_score_is_written() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "self/oom_score_adj", "0");
        write_oom_score_adj(dir.path(), None, -999).unwrap();
        assert_eq!(get(dir.path().join("self/oom_score_adj")), "-999");
        assert!(write_oom_score_adj(dir.path(), Some(9), 1).unwrap_err().is_not_found());
    }
}
