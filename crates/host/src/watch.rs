//! One directory, watched by inotify(7).
//!
//! ```text
//!            the directory is there            it goes, or is moved away
//!  waiting ───────────────────────▶ watching ──────────────────────────▶ waiting
//!  (nearest ancestor is watched)    Rescan                               Rescan
//! ```
//!
//! Events say where to look, never what is true: the reader looks at the directory. Whatever may have been missed comes as
//! [`DirEvent::Rescan`].

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};

use crate::error::{Attempt, Failed, Result};

/// What happened in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirEvent {
    /// An entry of this name came, was written to and closed, or got another mode or owner.
    Changed(OsString),
    /// An entry of this name went.
    Removed(OsString),
    /// Anything may have happened: the watch begins, the directory came or went, or events were lost.
    Rescan,
}

/// Watches one directory, not those below it. It may be missing, and may come and go.
pub struct DirWatch {
    path: PathBuf,
    watches: Watches,
    stream: EventStream<[u8; 8192]>,
    /// The directory's watch while it is there.
    directory: Option<WatchDescriptor>,
    /// The nearest ancestor's watch while it is not.
    ancestor: Option<WatchDescriptor>,
    pending: VecDeque<DirEvent>,
}

impl DirWatch {
    /// Begins to watch; the first event is [`DirEvent::Rescan`]. Must be called within a tokio runtime. A path that names a file is watched
    /// as that file: each change is a Rescan.
    ///
    /// # Errors
    /// inotify is not to be had (`fs.inotify.max_user_instances`).
    pub fn new(path: &Path) -> Result<Self> {
        let what = || format!("watch {}", path.display());
        let inotify = Inotify::init().attempt(what)?;
        let watches = inotify.watches();
        let stream = inotify.into_event_stream([0; 8192]).attempt(what)?;
        let path = path.to_owned();
        let pending = VecDeque::from([DirEvent::Rescan]);
        let mut watch = Self { path, watches, stream, directory: None, ancestor: None, pending };
        watch.arm()?;
        Ok(watch)
    }

    /// True while the directory itself is there and watched.
    pub fn is_watching(&self) -> bool {
        self.directory.is_some()
    }

    /// The next event. Cancel safe: no event is lost when the future is dropped.
    ///
    /// # Errors
    /// inotify fails; the watch is of no more use.
    pub async fn next(&mut self) -> Result<DirEvent> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Ok(event);
            }
            let what = || format!("watch {}", self.path.display());
            let event = match self.stream.next().await {
                Some(event) => event.attempt(what)?,
                None => return Err(Failed::other(what(), "the event stream ended")),
            };
            self.take(&event.wd, event.mask, event.name)?;
        }
    }

    fn take(&mut self, wd: &WatchDescriptor, mask: EventMask, name: Option<OsString>) -> Result<()> {
        if mask.contains(EventMask::Q_OVERFLOW) {
            self.rescan();
            return Ok(());
        }
        if self.directory.as_ref() == Some(wd) {
            if mask.intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT)
            {
                if let Some(wd) = self.directory.take() {
                    // A directory that was moved is still watched, under its other name. One that was deleted is not: no error.
                    let _ = self.watches.remove(wd);
                }
                self.rescan();
                return self.arm();
            }
            match name {
                Some(name) if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) => {
                    self.pending.push_back(DirEvent::Removed(name));
                }
                Some(name) => self.pending.push_back(DirEvent::Changed(name)),
                // Of the directory itself: its mode or owner.
                None => self.rescan(),
            }
            return Ok(());
        }
        if self.directory.is_none() {
            return self.arm();
        }
        // An event of a watch that was given up.
        Ok(())
    }

    fn rescan(&mut self) {
        // What was queued before is part of it.
        self.pending.clear();
        self.pending.push_back(DirEvent::Rescan);
    }

    /// Watches the directory, or the nearest ancestor that is there until it comes.
    fn arm(&mut self) -> Result<()> {
        let own = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::ATTRIB
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF;
        let coming = WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        // A part of the path may come between a failed attempt and the watch on its parent; so each watch on an ancestor is followed by
        // another look. The bound is never met but by a path that comes and goes all the time.
        for _ in 0..64 {
            match self.watches.add(&self.path, own) {
                Ok(wd) => {
                    self.drop_ancestor(Some(&wd));
                    self.directory = Some(wd);
                    self.rescan();
                    return Ok(());
                }
                Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {}
                Err(e) => return Err(Failed::new(format!("watch {}", self.path.display()), e)),
            }
            let mut watched = None;
            for ancestor in self.path.ancestors().skip(1) {
                let ancestor = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
                if let Ok(wd) = self.watches.add(ancestor, coming) {
                    watched = Some((ancestor.to_owned(), wd));
                    break;
                }
            }
            let Some((ancestor, wd)) = watched else {
                let why = "no directory above it can be watched";
                return Err(Failed::other(format!("watch {}", self.path.display()), why));
            };
            let same = self.ancestor.as_ref() == Some(&wd);
            if !same {
                self.drop_ancestor(Some(&wd));
                self.ancestor = Some(wd);
            }
            // The part of the path right below the ancestor: if it is there by now, look again.
            let below = self.path.ancestors().take_while(|p| *p != ancestor).last().unwrap_or(&self.path);
            if !below.exists() {
                return Ok(());
            }
            if below != self.path && !below.is_dir() {
                // A file in the way; it must go first, and its going is not an event of the mask above.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Gives up the ancestor's watch, unless the directory has the same one.
    fn drop_ancestor(&mut self, keep: Option<&WatchDescriptor>) {
        if let Some(wd) = self.ancestor.take()
            && Some(&wd) != keep
        {
            let _ = self.watches.remove(wd);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::put;

    async fn next(watch: &mut DirWatch) -> DirEvent {
        tokio::time::timeout(Duration::from_secs(10), watch.next()).await.expect("no event came").unwrap()
    }

    /// Events until one of these comes.
    async fn until(watch: &mut DirWatch, wanted: &DirEvent) {
        while next(watch).await != *wanted {}
    }

    fn changed(name: &str) -> DirEvent {
        DirEvent::Changed(name.into())
    }

    fn removed(name: &str) -> DirEvent {
        DirEvent::Removed(name.into())
    }

    #[tokio::test]
    async fn files_come_change_move_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = DirWatch::new(dir.path()).unwrap();
        assert_eq!(next(&mut watch).await, DirEvent::Rescan);
        put(dir.path(), "a", "1");
        assert_eq!(next(&mut watch).await, changed("a"), "created");
        assert_eq!(next(&mut watch).await, changed("a"), "written and closed");
        std::fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        assert_eq!(next(&mut watch).await, removed("a"));
        assert_eq!(next(&mut watch).await, changed("b"));
        std::fs::remove_file(dir.path().join("b")).unwrap();
        until(&mut watch, &removed("b")).await;
        // Below a subdirectory nothing is seen.
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        assert_eq!(next(&mut watch).await, changed("sub"));
        put(dir.path(), "sub/x", "");
        put(dir.path(), "last", "");
        assert_eq!(next(&mut watch).await, changed("last"));
    }

    #[tokio::test]
    async fn a_directory_that_goes_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifests");
        std::fs::create_dir(&path).unwrap();
        let mut watch = DirWatch::new(&path).unwrap();
        assert_eq!(next(&mut watch).await, DirEvent::Rescan);
        std::fs::remove_dir(&path).unwrap();
        until(&mut watch, &DirEvent::Rescan).await;
        assert!(!watch.is_watching());
        std::fs::create_dir(&path).unwrap();
        until(&mut watch, &DirEvent::Rescan).await;
        assert!(watch.is_watching());
        put(&path, "a", "");
        until(&mut watch, &changed("a")).await;

        // Moved away, and another put in its place.
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        until(&mut watch, &DirEvent::Rescan).await;
        std::fs::create_dir(&path).unwrap();
        until(&mut watch, &DirEvent::Rescan).await;
        put(dir.path(), "old/stranger", "");
        put(&path, "b", "");
        assert_eq!(next(&mut watch).await, changed("b"));
    }

    #[tokio::test]
    async fn a_directory_that_comes_late_and_deep() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/manifests");
        let mut watch = DirWatch::new(&path).unwrap();
        assert_eq!(next(&mut watch).await, DirEvent::Rescan);
        assert!(!watch.is_watching());
        std::fs::create_dir_all(&path).unwrap();
        put(&path, "early", "");
        until(&mut watch, &DirEvent::Rescan).await;
        assert!(watch.is_watching(), "what came before the watch is found by the rescan");
        put(&path, "later", "");
        until(&mut watch, &changed("later")).await;
    }

    #[tokio::test]
    async fn step_by_step_over_several_levels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let mut watch = DirWatch::new(&path).unwrap();
        assert_eq!(next(&mut watch).await, DirEvent::Rescan);
        for _ in 0..3 {
            std::fs::create_dir(dir.path().join("a")).unwrap();
            // The watch moves down when it is polled.
            assert!(tokio::time::timeout(Duration::from_millis(20), watch.next()).await.is_err());
            std::fs::create_dir(&path).unwrap();
            until(&mut watch, &DirEvent::Rescan).await;
            assert!(watch.is_watching());
            std::fs::remove_dir_all(dir.path().join("a")).unwrap();
            while watch.is_watching() {
                next(&mut watch).await;
            }
        }
    }

    #[tokio::test]
    async fn lost_events_ask_for_a_rescan() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = DirWatch::new(dir.path()).unwrap();
        next(&mut watch).await;
        let wd = watch.directory.clone().unwrap();
        watch.take(&wd, EventMask::CREATE, Some("a".into())).unwrap();
        watch.take(&wd, EventMask::Q_OVERFLOW, None).unwrap();
        assert_eq!(next(&mut watch).await, DirEvent::Rescan);
        assert!(watch.pending.is_empty());
    }
}
