//! Static pods from a directory (`staticPodPath`): read when it changes and every `fileCheckFrequency`.
//!
//! Every regular file whose name does not begin with a dot counts, whatever its extension; the directory is not descended; order
//! is by name, and of several pods of one name the last counts, as in the Go kubelet, whose source holds its pods by name. A bad file is logged by
//! name and leaves the others alone. A file that was good and is bad now keeps its pod until the
//! next periodic check, so that an editor's half-written file does not stop a pod.
//!
//! Task: owned by wire.rs, ends with [`crate::ports::Tasks::stop`]. Input: a [`ManifestDir`]. Output: the bounded channel of sets; a busy dispatcher holds the
//! source back, and the next reading carries the newest state. An unreadable directory is logged and tried again.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use model::pod::{DesiredPod, PodSource, PodUid};
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::{FirstSeen, SourceSet, SourceUpdate, StaticContext, same_set};
use crate::ports::{Clock, HostResult, error_chain};

/// How long after a change the directory is read: a burst of writes is read once.
const SETTLE: Duration = Duration::from_millis(10);

/// What tells two states of a file apart: inode, modification time in ns, size.
pub type Stamp = (u64, i128, u64);

/// One file of the directory.
#[derive(Clone, Debug)]
pub struct ManifestFile {
    /// Full path as read.
    pub path: PathBuf,
    /// Its state.
    pub stamp: Stamp,
    /// Content; None when the stamp is the one already known. An error names the reason alone.
    pub content: Option<Result<Vec<u8>, String>>,
}

/// The directory as a value.
#[async_trait]
pub trait ManifestDir: Send {
    /// Reads the directory, sorted by name, contents only of files whose stamp is not in `known`. A missing directory is empty.
    async fn list(&mut self, known: &HashMap<PathBuf, Stamp>) -> HostResult<Vec<ManifestFile>>;
    /// Files that were removed since the last call, also those that are there again.
    fn removed(&mut self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Returns when something in the directory may have changed; never, where changes cannot be watched.
    async fn changed(&mut self);
}

/// What a file last gave.
struct Known {
    stamp: Stamp,
    pods: Vec<DesiredPod>,
    /// Its pods are of an older, good state of the file.
    stale: bool,
}

struct FileSource<D> {
    dir: D,
    context: StaticContext,
    clock: Clock,
    known: HashMap<PathBuf, Known>,
    order: Vec<PathBuf>,
    seen: FirstSeen,
}

/// Runs the source until its receiver is gone.
pub async fn run(
    dir: impl ManifestDir,
    period: Duration,
    context: StaticContext,
    clock: Clock,
    out: mpsc::Sender<SourceUpdate>,
) {
    let mut source =
        FileSource { dir, context, clock, known: HashMap::new(), order: Vec::new(), seen: FirstSeen::default() };
    let mut sent: Option<Vec<DesiredPod>> = None;
    let mut periodic = true;
    let mut next = tokio::time::Instant::now() + period;
    loop {
        match source.read(periodic).await {
            Ok((pods, again)) => {
                if !again.is_empty() || sent.as_ref().is_none_or(|s| !same_set(s, &pods)) {
                    let set = SourceSet { source: PodSource::File, pods: pods.clone(), again };
                    if out.send(set.into()).await.is_err() {
                        return;
                    }
                    sent = Some(pods);
                }
            }
            Err(e) => warn!(err = error_chain(&e), "Unable to read config path"),
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next) => {
                periodic = true;
                next = tokio::time::Instant::now() + period;
            }
            () = source.dir.changed() => {
                tokio::time::sleep(SETTLE).await;
                periodic = false;
            }
        }
    }
}

impl<D: ManifestDir> FileSource<D> {
    /// The pods as of now, and which of them were away since the last reading.
    async fn read(&mut self, periodic: bool) -> HostResult<(Vec<DesiredPod>, HashSet<PodUid>)> {
        let removed = self.dir.removed();
        let away = removed.iter().filter_map(|path| self.known.get(path)).flat_map(|k| &k.pods);
        let mut again: HashSet<PodUid> = away.map(|pod| pod.uid().clone()).collect();
        let stamps = self.known.iter().map(|(p, k)| (p.clone(), k.stamp)).collect();
        let files = self.dir.list(&stamps).await?;
        self.order = files.iter().map(|f| f.path.clone()).collect();
        self.known.retain(|path, _| self.order.contains(path));
        let mut changed = Vec::new();
        for file in files {
            let Some(content) = file.content else {
                continue;
            };
            changed.push(file.path.clone());
            let parsed = match content {
                Ok(bytes) => self.parse(&file.path, &bytes),
                Err(reason) => Err(reason),
            };
            match parsed {
                Ok(pods) => {
                    self.known.insert(file.path, Known { stamp: file.stamp, pods, stale: false });
                }
                Err(reason) => {
                    warn!(path = %file.path.display(), err = reason, "Could not process manifest file");
                    let pods = self.known.remove(&file.path).map(|k| k.pods).unwrap_or_default();
                    self.known.insert(file.path, Known { stamp: file.stamp, pods, stale: true });
                }
            }
        }
        if periodic {
            for (path, known) in &mut self.known {
                if known.stale && !known.pods.is_empty() {
                    info!(path = %path.display(), "Manifest file is still bad, its pod is given up");
                    known.pods.clear();
                }
            }
        }
        let fresh = self.newest_of_each_name(&changed);
        let pods = self.seen.settle(fresh);
        again.retain(|uid| pods.iter().any(|pod| pod.uid() == uid));
        Ok((pods, again))
    }

    /// The pods in the order of their files; the last one where several have one name. `changed` files are told of.
    fn newest_of_each_name(&self, changed: &[PathBuf]) -> Vec<DesiredPod> {
        let all: Vec<(&PathBuf, &DesiredPod)> = self
            .order
            .iter()
            .filter_map(|path| Some((path, self.known.get(path)?)))
            .flat_map(|(path, known)| known.pods.iter().map(move |pod| (path, pod)))
            .collect();
        let last: HashMap<String, usize> = all.iter().enumerate().map(|(i, (_, pod))| (pod.full_name(), i)).collect();
        let mut kept = Vec::with_capacity(last.len());
        for (i, (path, pod)) in all.iter().enumerate() {
            let newest = last[&pod.full_name()];
            if newest == i {
                kept.push((*pod).clone());
                continue;
            }
            let instead = all[newest].0;
            if changed.contains(path) || changed.contains(instead) {
                let (ignored, instead) = (path.display(), instead.display());
                warn!(pod = pod.full_name(), %ignored, %instead, "Several manifest files name the same pod, the last one counts");
            }
        }
        kept
    }

    fn parse(&self, path: &Path, bytes: &[u8]) -> Result<Vec<DesiredPod>, String> {
        let origin = manifest::Origin::File(path.display().to_string());
        let pods = self.context.load(bytes, &origin, self.clock.now()).map_err(|e| error_chain(&e))?;
        pods.into_iter().collect::<Result<_, _>>().map_err(|e| error_chain(&e))
    }
}
