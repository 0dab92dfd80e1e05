//! Shares of file servers that pods have mounted: how full they are. A server may never answer.
//!
//! Tasks: one of tokio's blocking threads for each share that is being asked; it ends with the answer, and its share is not asked again
//! before. Queue: none; no more than [`AT_ONCE`] are asked at a time. Deadline: who asks waits no longer than [`PATIENCE`], and gets what
//! was known before. A server that hangs so holds back the figures of its own shares, and nothing else.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host::fsx::FilesystemFigures;
use host::mount::MountTable;
use jiff::Timestamp;

/// The directory of a pod's shares below its volumes.
pub(crate) const NFS: &str = "kubernetes.io~nfs";
/// How long one who asks for figures waits for the servers.
const PATIENCE: Duration = Duration::from_secs(2);
/// Shares that are asked at once: each takes a thread for as long as its server is silent.
const AT_ONCE: usize = 16;

/// How full a share is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) at: Timestamp,
    /// How long its server took to answer.
    pub(crate) took: Duration,
    pub(crate) fs: FilesystemFigures,
}

#[derive(Debug, Default)]
struct State {
    asked: BTreeSet<PathBuf>,
    known: HashMap<PathBuf, Share>,
}

/// What was answered last, and which shares are being asked. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares(Arc<Mutex<State>>);

impl Shares {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks how full these shares are; the answers, new and old. `ask` blocks.
    pub(crate) async fn measure(
        &self,
        places: Vec<PathBuf>,
        ask: impl Fn(&Path) -> Option<FilesystemFigures> + Clone + Send + 'static,
    ) -> HashMap<PathBuf, Share> {
        let there: BTreeSet<PathBuf> = places.into_iter().collect();
        let mut running = Vec::new();
        for place in &there {
            {
                let mut state = self.state();
                if state.asked.len() >= AT_ONCE || !state.asked.insert(place.clone()) {
                    continue;
                }
            }
            let (shares, place, ask) = (self.clone(), place.clone(), ask.clone());
            running.push(tokio::task::spawn_blocking(move || {
                let (at, begun) = (Timestamp::now(), Instant::now());
                let answer = ask(&place);
                let mut state = shares.state();
                state.asked.remove(&place);
                match answer {
                    Some(fs) => drop(state.known.insert(place, Share { at, took: begun.elapsed(), fs })),
                    None => drop(state.known.remove(&place)),
                }
            }));
        }
        let _ = tokio::time::timeout(PATIENCE, futures::future::join_all(running)).await;
        let mut state = self.state();
        state.known.retain(|place, _| there.contains(place));
        state.known.clone()
    }
}

/// The shares that are mounted for pods whose directories are below `pods`. Asks no server.
pub(crate) fn mounted(table: &MountTable, pods: &Path) -> Vec<PathBuf> {
    // The root directory may be a link.
    let real = std::fs::canonicalize(pods).unwrap_or_else(|_| pods.to_owned());
    let all = table.at_or_below(&real).into_iter().filter_map(|mount| {
        let below = mount.mount_point.strip_prefix(&real).ok()?;
        let parts: Vec<_> = below.iter().collect();
        let is_share = matches!(parts[..], [_, volumes, plugin, _] if volumes == "volumes" && plugin == NFS);
        is_share.then(|| pods.join(below))
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(used: u64) -> FilesystemFigures {
        FilesystemFigures { capacity: 100, used, ..FilesystemFigures::default() }
    }

    #[test]
    fn shares_of_pods() {
        let table = MountTable::parse(
            b"1 0 0:9 / /root/pods/u/volumes/kubernetes.io~nfs/data rw - nfs4 host:/x rw\n\
              2 0 0:9 / /root/pods/u/volumes/kubernetes.io~nfs/data/below rw - nfs4 host:/x rw\n\
              3 0 0:8 / /root/pods/u/volumes/kubernetes.io~empty-dir/m rw - tmpfs tmpfs rw\n\
              4 0 0:9 / /mnt/nfs rw - nfs4 host:/x rw\n",
        );
        assert_eq!(
            mounted(&table, Path::new("/root/pods")),
            [Path::new("/root/pods/u/volumes/kubernetes.io~nfs/data")]
        );
    }

    #[tokio::test]
    async fn a_server_that_hangs_holds_back_its_own_shares_only() {
        let shares = Shares::default();
        let (hangs, answers) = (PathBuf::from("/hangs"), PathBuf::from("/answers"));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let asked = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let ask = {
            let asked = asked.clone();
            move |place: &Path| {
                let times = asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
                if place == Path::new("/hangs") {
                    let _ = held.lock().unwrap().recv();
                }
                Some(figures(times))
            }
        };
        let places = vec![hangs.clone(), answers.clone()];
        let first = shares.measure(places.clone(), ask.clone()).await;
        assert_eq!(first.keys().collect::<Vec<_>>(), [&answers]);
        // The one that hangs is not asked again, and nobody waits for it.
        let begun = Instant::now();
        let second = shares.measure(places.clone(), ask.clone()).await;
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 3);
        assert!(second[&answers].fs.used > first[&answers].fs.used);
        drop(release);
        while !shares.state().asked.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(shares.measure(places, |_| None).await.is_empty(), "what does not answer any more has no figures");
    }
}
