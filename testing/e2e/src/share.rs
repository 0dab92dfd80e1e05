//! A directory of the host that containers write to, and what their lines prove.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::Node;

/// A directory of the host, at `/share` in the containers that get it. It outlives containers, pods and kubelets, and goes with the node.
#[derive(Debug)]
pub struct Share {
    dir: PathBuf,
}

impl Share {
    /// A new and empty one below the node's directory: tests that share the node use the same names in it.
    ///
    /// # Panics
    /// When it cannot be made.
    #[track_caller]
    pub fn new(node: &Node) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let dir = node.dir().join(format!("share-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        Self { dir }
    }

    /// Its path on the host.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The pod with the directory mounted at `/share` in every container.
    #[must_use]
    pub fn mounted(&self, mut pod: Value) -> Value {
        let spec = &mut pod["spec"];
        for list in ["initContainers", "containers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                push(&mut container["volumeMounts"], json!({"name": "share", "mountPath": "/share"}));
            }
        }
        push(&mut spec["volumes"], json!({"name": "share", "hostPath": {"path": self.dir}}));
        pod
    }

    /// What a file holds; empty when it is not there.
    pub fn read(&self, file: &str) -> String {
        fs::read(self.dir.join(file)).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// The lines of a file.
    pub fn lines(&self, file: &str) -> Vec<String> {
        self.read(file).lines().map(str::to_owned).collect()
    }

    /// The beginning of a script, by which a process notes in `/share/twice` that another one of this name runs at the same moment. What
    /// proves it is the reader of a FIFO, which the kernel takes away also from a process that is killed.
    ///
    /// # Panics
    /// When the FIFO cannot be made.
    #[track_caller]
    pub fn alone(&self, name: &str) -> String {
        let fifo = self.dir.join(format!("{name}.fifo"));
        match mknodat(CWD, &fifo, FileType::Fifo, Mode::from(0o666), 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => panic!("{}: {e}", fifo.display()),
        }
        // Without a reader the writer hangs in open(2).
        format!("F=/share/{name}.fifo; timeout .5 sh -c \"echo > $F\" && echo {name} >> /share/twice; exec 8<>$F; ")
    }

    /// A file that a container waits for.
    ///
    /// # Panics
    /// When it cannot be written.
    #[track_caller]
    pub fn put(&self, file: &str, text: &str) {
        fs::write(self.dir.join(file), text).unwrap_or_else(|e| panic!("{file}: {e}"));
    }
}

fn push(list: &mut Value, item: Value) {
    match list.as_array_mut() {
        Some(items) => items.push(item),
        None => *list = json!([item]),
    }
}

/// A script that runs until SIGTERM and says in `/share/FILE` when it starts, is told to end, and has ended `shutdown` seconds later:
/// `start BOOT NOTE`, `term BOOT`, `stop BOOT`. Each run has another BOOT.
pub fn noting(file: &str, note: &str, shutdown: f64) -> String {
    format!(
        "read B < /proc/sys/kernel/random/uuid; end() {{ echo term $B >> /share/{file}; sleep {shutdown}; echo stop $B >> /share/{file}; exit 0; }}; \
         trap end TERM; echo start $B {note} >> /share/{file}; sleep 1000000 & wait"
    )
}

/// The runs in the lines of [`noting`] that have begun and not ended, oldest first.
pub fn alive(lines: &[String]) -> Vec<String> {
    let ended: HashSet<&str> = lines.iter().filter_map(|l| l.strip_prefix("stop ")).collect();
    lines.iter().filter_map(|l| boot(l)).filter(|b| !ended.contains(b)).map(str::to_owned).collect()
}

/// The greatest number of runs at one time.
pub fn most_at_once(lines: &[String]) -> usize {
    let mut now = HashSet::new();
    let mut most = 0;
    for line in lines {
        if let Some(boot) = boot(line) {
            now.insert(boot);
        } else if let Some(boot) = line.strip_prefix("stop ") {
            now.remove(boot);
        }
        most = most.max(now.len());
    }
    most
}

/// The run of a `start` line.
fn boot(line: &str) -> Option<&str> {
    line.strip_prefix("start ")?.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn counts_runs() {
        let apart = all("start a x\nterm a\nstop a\nstart b x");
        assert_eq!((most_at_once(&apart), alive(&apart)), (1, vec!["b".to_owned()]));
        let together = all("start a\nterm a\nstart b\nstop a");
        assert_eq!((most_at_once(&together), alive(&together)), (2, vec!["b".to_owned()]));
        // Told to end before its first line was written.
        let early = all("term a\nstop a\nstart b");
        assert_eq!((most_at_once(&early), alive(&early)), (1, vec!["b".to_owned()]));
        assert_eq!(most_at_once(&[]), 0);
    }
}
