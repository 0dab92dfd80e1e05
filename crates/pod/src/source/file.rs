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
    /// What files held that were removed since the last reading.
    away: HashMap<PathBuf, Vec<DesiredPod>>,
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
    let mut source = FileSource {
        dir,
        context,
        clock,
        known: HashMap::new(),
        away: HashMap::new(),
        order: Vec::new(),
        seen: FirstSeen::default(),
    };
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
        for path in self.dir.removed() {
            if let Some(known) = self.known.get(&path) {
                self.away.entry(path).or_insert_with(|| known.pods.clone());
            }
        }
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
        let again = self.back_again().into_iter().filter(|uid| pods.iter().any(|pod| pod.uid() == uid)).collect();
        Ok((pods, again))
    }

    /// Pods whose file was removed and is there again with the same pod in it. One with another content was edited: an editor that moves the
    /// old file aside asks for no more than the change.
    fn back_again(&mut self) -> Vec<PodUid> {
        let mut again = Vec::new();
        let known = &self.known;
        self.away.retain(|path, before| match known.get(path) {
            None => false,
            // Half written, maybe: the next reading tells.
            Some(now) if now.stale => true,
            Some(now) => {
                let same = |pod: &&DesiredPod| before.iter().any(|b| b.same_intent(pod));
                again.extend(now.pods.iter().filter(same).map(|pod| pod.uid().clone()));
                false
            }
        });
        again
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// What each reading finds: the file's content, and whether it was removed before.
    struct Script(VecDeque<(Option<&'static str>, bool)>, u64);

    #[async_trait]
    impl ManifestDir for Script {
        async fn list(&mut self, _: &HashMap<PathBuf, Stamp>) -> HostResult<Vec<ManifestFile>> {
            let (content, _) = self.0.pop_front().unwrap();
            self.1 += 1;
            let stamp = (self.1, 0, 0);
            let file = |text: &str| ManifestFile { path: "a.yaml".into(), stamp, content: Some(Ok(text.into())) };
            Ok(content.map(file).into_iter().collect())
        }

        fn removed(&mut self) -> Vec<PathBuf> {
            self.0.front().filter(|(_, removed)| *removed).map(|_| "a.yaml".into()).into_iter().collect()
        }

        async fn changed(&mut self) {}
    }

    const POD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","uid":"u"},"spec":{"containers":[{"name":"c","image":"i:1"}]}}"#;
    const EDITED: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","uid":"u"},"spec":{"containers":[{"name":"c","image":"i:2"}]}}"#;

    /// How many pods each reading gives, and how many of them were away.
    async fn read(script: &[(Option<&'static str>, bool)]) -> Vec<(usize, usize)> {
        let context = StaticContext { node_name: "n".into(), gates: manifest::Gates::default() };
        let dir = Script(script.iter().copied().collect(), 0);
        let clock = Clock::system();
        let (known, away, seen) = (HashMap::new(), HashMap::new(), FirstSeen::default());
        let mut source = FileSource { dir, context, clock, known, away, order: Vec::new(), seen };
        let mut found = Vec::new();
        for _ in script {
            let (pods, again) = source.read(false).await.unwrap();
            found.push((pods.len(), again.len()));
        }
        found
    }

    #[tokio::test]
    async fn a_manifest_that_was_away_starts_its_pod_again_unless_it_was_edited() {
        assert_eq!(read(&[(Some(POD), false), (Some(POD), true)]).await, [(1, 0), (1, 1)]);
        assert_eq!(read(&[(Some(POD), false), (Some(POD), false)]).await, [(1, 0), (1, 0)], "replaced in place");
        assert_eq!(read(&[(Some(POD), false), (Some(EDITED), true)]).await, [(1, 0), (1, 0)]);
        let half = Some(&POD[..40]);
        assert_eq!(read(&[(Some(POD), false), (half, true), (Some(POD), false)]).await, [(1, 0), (1, 0), (1, 1)]);
        assert_eq!(read(&[(Some(POD), false), (half, true), (Some(EDITED), false)]).await, [(1, 0), (1, 0), (1, 0)]);
        let gone = read(&[(Some(POD), false), (None, true), (Some(POD), false)]).await;
        assert_eq!(gone, [(1, 0), (0, 0), (1, 0)], "seen to be away: it left and came");
    }
}
