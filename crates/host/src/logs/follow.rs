//! Tells those who follow logs that something happened to them, by one inotify(7) instance for all: a host has only 128 for a user.
//!
//! The instance and its task are there while anybody follows. The task owns the event stream; followers hold a flag word each, so there is no
//! queue that could overflow. A follower that is slow sees several events as one; when the kernel loses events, everybody is told to look.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::StreamExt;
use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::sync::Notify;

use crate::error::{Attempt, Failed, Result};

const WROTE: u8 = 1;
const CLOSED: u8 = 2;
const CREATED: u8 = 4;
const GONE: u8 = 8;

/// What happened to a log since it was last asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changes(u8);

impl Changes {
    /// A writer closed it, or a file that was rotated from it: the container may have ended, or a rotation is complete.
    pub fn closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    /// A new file has its name.
    pub fn created(self) -> bool {
        self.0 & CREATED != 0
    }

    /// Its directory was removed.
    pub fn gone(self) -> bool {
        self.0 & GONE != 0
    }
}

/// All logs that are followed.
#[derive(Clone, Default)]
pub struct LogWatch(Arc<Mutex<Option<Live>>>);

struct Live {
    watches: Watches,
    directories: HashMap<WatchDescriptor, Vec<Arc<Signal>>>,
    task: tokio::task::AbortHandle,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
struct Signal {
    name: OsString,
    flags: AtomicU8,
    wake: Notify,
}

impl Signal {
    fn set(&self, flags: u8) {
        self.flags.fetch_or(flags, Ordering::Relaxed);
        self.wake.notify_one();
    }
}

/// One log that is followed; dropped, it is no longer.
pub struct Follower {
    watch: LogWatch,
    directory: WatchDescriptor,
    signal: Arc<Signal>,
}

impl LogWatch {
    fn live(&self) -> MutexGuard<'_, Option<Live>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to follow a log. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The directory is not there, or inotify is not to be had (`fs.inotify.max_user_instances`, `max_user_watches`).
    pub fn follow(&self, log: &Path) -> Result<Follower> {
        let what = || format!("follow log {}", log.display());
        let (Some(directory), Some(name)) = (log.parent(), log.file_name()) else {
            return Err(Failed::other(what(), "it is no path of a file"));
        };
        let mut guard = self.live();
        if guard.is_none() {
            let inotify = Inotify::init().attempt(what)?;
            let watches = inotify.watches();
            let mut events = inotify.into_event_stream([0; 4096]).attempt(what)?;
            let shared = Arc::downgrade(&self.0);
            let task = tokio::spawn(async move {
                while let Some(event) = events.next().await {
                    let Some(shared) = shared.upgrade() else { return };
                    let mut guard = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(live) = guard.as_mut() else { return };
                    match event {
                        Ok(event) => live.tell(&event.wd, event.mask, event.name.as_deref()),
                        // Nothing more will come: followers look for themselves from time to time.
                        Err(e) => {
                            tracing::warn!(err = %e, "Log files are no longer watched");
                            return;
                        }
                    }
                }
            });
            *guard = Some(Live { watches, directories: HashMap::new(), task: task.abort_handle() });
        }
        let Some(live) = guard.as_mut() else { return Err(Failed::other(what(), "no watch")) };
        let mask = WatchMask::MODIFY
            | WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::DELETE_SELF
            | WatchMask::ONLYDIR;
        let added = live.watches.add(directory, mask);
        let signal = Arc::new(Signal { name: name.to_owned(), flags: AtomicU8::new(0), wake: Notify::new() });
        match added {
            Ok(wd) => {
                live.directories.entry(wd.clone()).or_default().push(signal.clone());
                drop(guard);
                Ok(Follower { watch: self.clone(), directory: wd, signal })
            }
            Err(e) => {
                if live.directories.is_empty() {
                    *guard = None;
                }
                Err(Failed::new(what(), e))
            }
        }
    }

    /// How many logs are followed.
    pub fn followers(&self) -> usize {
        self.live().as_ref().map_or(0, |live| live.directories.values().map(Vec::len).sum())
    }
}

impl Live {
    fn tell(&mut self, directory: &WatchDescriptor, mask: EventMask, name: Option<&OsStr>) {
        if mask.contains(EventMask::Q_OVERFLOW) {
            self.directories.values().flatten().for_each(|s| s.set(WROTE | CLOSED | CREATED));
            return;
        }
        for signal in self.directories.get(directory).into_iter().flatten() {
            let own = name == Some(&signal.name);
            if mask.intersects(EventMask::DELETE_SELF | EventMask::IGNORED | EventMask::UNMOUNT) {
                signal.set(GONE);
            } else if mask.contains(EventMask::MODIFY) {
                // A rotated log is written to until the runtime has opened the new one.
                signal.set(WROTE);
            } else if mask.contains(EventMask::CLOSE_WRITE) {
                signal.set(CLOSED);
            } else if own && mask.intersects(EventMask::CREATE | EventMask::MOVED_TO) {
                signal.set(CREATED);
            }
        }
    }
}

impl Follower {
    /// Waits until something happened since the last call. Cancel safe.
    pub async fn changed(&self) -> Changes {
        loop {
            let flags = self.signal.flags.swap(0, Ordering::Relaxed);
            if flags != 0 {
                return Changes(flags);
            }
            self.signal.wake.notified().await;
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut guard = self.watch.live();
        let Some(live) = guard.as_mut() else { return };
        if let Some(signals) = live.directories.get_mut(&self.directory) {
            signals.retain(|s| !Arc::ptr_eq(s, &self.signal));
            if signals.is_empty() {
                live.directories.remove(&self.directory);
                // A directory that was removed took its watch along: no error.
                let _ = live.watches.remove(self.directory.clone());
            }
        }
        if live.directories.is_empty() {
            *guard = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::put;

    async fn next(follower: &Follower) -> Changes {
        tokio::time::timeout(Duration::from_secs(10), follower.changed()).await.expect("nothing happened")
    }

    #[tokio::test]
    async fn writes_rotation_and_end() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let log = put(dir.path(), "0.log", "");
        let watch = LogWatch::default();
        let (one, two) = (watch.follow(&log).unwrap(), watch.follow(&log).unwrap());
        assert_eq!(watch.followers(), 2);
        let mut file = std::fs::OpenOptions::new().append(true).open(&log).unwrap();
        file.write_all(b"x").unwrap();
        assert_eq!(next(&one).await, Changes(WROTE));
        assert_eq!(next(&two).await, Changes(WROTE));
        std::fs::rename(&log, dir.path().join("0.log.1")).unwrap();
        let mut new = std::fs::File::create(&log).unwrap();
        assert!(next(&one).await.created());
        new.write_all(b"y").unwrap();
        drop(file);
        while !next(&one).await.closed() {}
        drop((one, two));
        assert_eq!(watch.followers(), 0);
        assert!(watch.live().is_none(), "nothing is watched while nobody follows");
        let again = watch.follow(&log).unwrap();
        drop(new);
        assert!(next(&again).await.closed());
        std::fs::remove_dir_all(dir.path()).unwrap();
        while !next(&again).await.gone() {}
        drop(again);
        assert!(watch.follow(&log).is_err());
        assert!(watch.live().is_none());
    }
}
