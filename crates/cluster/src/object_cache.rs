//! ConfigMaps and Secrets by name, kept only while a pod uses them (`configMapAndSecretChangeDetectionStrategy`).
//!
//! Watch: one watch per object, closed after a minute without a read unless somebody holds the object, and for good once it is immutable.
//! Cache: read again when older than the node's TTL. Get: read each time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::Unit;
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::reflect::{Collection, Delta, Object, Reflector, Scope};

/// How long a read waits for the first answer (as Go).
const SYNC: Duration = Duration::from_secs(1);
/// How long a watch lives without a read.
const IDLE: Duration = Duration::from_secs(60);

/// How changes are noticed.
#[derive(Clone, Debug)]
pub enum Strategy {
    /// `Get`.
    Get,
    /// `Cache`, with the age at which a read goes to the server again.
    Cache(ObjectTtl),
    /// `Watch`.
    Watch,
}

/// An age that others may change while it is in use; clones share it.
#[derive(Clone, Debug)]
pub struct ObjectTtl(Arc<AtomicU64>);

impl ObjectTtl {
    /// Without a word from anybody: a minute, as Go.
    pub const DEFAULT: Duration = Duration::from_secs(60);

    /// Changes it; None: back to [`Self::DEFAULT`]. Whole milliseconds count.
    pub fn set(&self, ttl: Option<Duration>) {
        let ttl = ttl.unwrap_or(Self::DEFAULT).as_millis();
        self.0.store(u64::try_from(ttl).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// As it is now.
    pub fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

impl Default for ObjectTtl {
    fn default() -> Self {
        let ttl = Self(Arc::default());
        ttl.set(None);
        ttl
    }
}

/// An object that may be declared never to change.
pub trait MaybeImmutable {
    /// `immutable: true`.
    fn is_immutable(&self) -> bool;
}

impl MaybeImmutable for ConfigMap {
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

impl MaybeImmutable for Secret {
    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

#[derive(Clone)]
enum Known<K> {
    /// Not asked, or no answer yet.
    Nothing(Option<ClusterError>),
    Absent,
    Present(Arc<K>),
}

struct Entry<K> {
    users: usize,
    /// Users that are to hear of every change: the watch stays open without reads.
    holders: usize,
    known: watch::Sender<Known<K>>,
    fetched: Option<Instant>,
    used: Instant,
    watching: Option<CancellationToken>,
}

impl<K> Drop for Entry<K> {
    fn drop(&mut self) {
        if let Some(stop) = &self.watching {
            stop.cancel();
        }
    }
}

type Key = (String, String);

/// Called with namespace and name when an object that was known has changed, come or gone.
pub type OnChange = Arc<dyn Fn(&str, &str) + Send + Sync>;

struct Inner<K: Object> {
    source: Arc<dyn Collection<K>>,
    strategy: Strategy,
    unit: Unit,
    changed: OnChange,
    entries: Mutex<HashMap<Key, Entry<K>>>,
}

/// A cache of one kind.
pub struct ObjectCache<K: Object + MaybeImmutable>(Arc<Inner<K>>);

impl<K: Object + MaybeImmutable> Clone for ObjectCache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Object + MaybeImmutable> Inner<K> {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Entry<K>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Object + MaybeImmutable> ObjectCache<K> {
    /// An empty cache.
    pub fn new(source: Arc<dyn Collection<K>>, strategy: Strategy, unit: Unit) -> Self {
        Self::telling(source, strategy, unit, Arc::new(|_, _| {}))
    }

    /// An empty cache that tells of changes (strategy Watch only). The callback must not block and not call the cache.
    pub fn telling(source: Arc<dyn Collection<K>>, strategy: Strategy, unit: Unit, changed: OnChange) -> Self {
        Self(Arc::new(Inner { source, strategy, unit, changed, entries: Mutex::default() }))
    }

    /// A pod begins to use an object; a watch starts, a cached value is no longer taken as fresh.
    pub fn acquire(&self, namespace: &str, name: &str) {
        let mut entries = self.0.entries();
        let key = (namespace.to_owned(), name.to_owned());
        let entry = entries.entry(key.clone()).or_insert_with(|| Entry {
            users: 0,
            holders: 0,
            known: watch::Sender::new(Known::Nothing(None)),
            fetched: None,
            used: Instant::now(),
            watching: None,
        });
        entry.users += 1;
        entry.fetched = None;
        self.ensure_watch(&key, entry);
    }

    /// A pod no longer uses it; with the last one everything known about it goes.
    pub fn release(&self, namespace: &str, name: &str) {
        let mut entries = self.0.entries();
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(entry) = entries.get_mut(&key) {
            entry.users -= 1;
            if entry.users == 0 {
                entries.remove(&key);
            }
        }
    }

    /// From now on every change of an acquired object is told: its watch stays open. Undone by [`ObjectCache::unhold`], not by a release.
    pub fn hold(&self, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(entry) = self.0.entries().get_mut(&key) {
            entry.holders += 1;
            self.ensure_watch(&key, entry);
        }
    }

    /// See [`ObjectCache::hold`].
    pub fn unhold(&self, namespace: &str, name: &str) {
        if let Some(entry) = self.0.entries().get_mut(&(namespace.to_owned(), name.to_owned())) {
            entry.holders = entry.holders.saturating_sub(1);
        }
    }

    /// How many objects are held, and how many watches are open.
    pub fn size(&self) -> (usize, usize) {
        let entries = self.0.entries();
        (entries.len(), entries.values().filter(|e| e.watching.is_some()).count())
    }

    /// The object.
    ///
    /// # Errors
    /// NotFound; Invalid when no pod has acquired it; Timeout `failed to sync configmap cache: timed out waiting for the condition`, with
    /// the reason as advice, when there was no answer within a second; any kind of a read.
    pub async fn get(&self, namespace: &str, name: &str) -> ClusterResult<Arc<K>> {
        match &self.0.strategy {
            Strategy::Get => self.0.source.get(Some(namespace), name, false).await.map(Arc::new),
            Strategy::Cache(ttl) => self.get_cached(namespace, name, ttl.get()).await,
            Strategy::Watch => self.get_watched(namespace, name).await,
        }
    }

    fn not_registered(namespace: &str, name: &str) -> ClusterError {
        ClusterError::new(
            format!("get {}", K::KIND.to_lowercase()),
            ErrorKind::Invalid,
            format!("object {namespace:?}/{name:?} not registered"),
        )
    }

    fn not_found(name: &str) -> ClusterError {
        let kind = K::KIND.to_lowercase();
        let mut error =
            ClusterError::new(format!("get {kind}"), ErrorKind::NotFound, format!("{kind} {name:?} not found"));
        error.code = 404;
        "NotFound".clone_into(&mut error.reason);
        error
    }

    async fn get_watched(&self, namespace: &str, name: &str) -> ClusterResult<Arc<K>> {
        let mut known = {
            let mut entries = self.0.entries();
            let key = (namespace.to_owned(), name.to_owned());
            let entry = entries.get_mut(&key).ok_or_else(|| Self::not_registered(namespace, name))?;
            entry.used = Instant::now();
            self.ensure_watch(&key, entry);
            entry.known.subscribe()
        };
        let arrived = known.wait_for(|k| !matches!(k, Known::Nothing(_)));
        let arrived = tokio::time::timeout(SYNC, arrived).await.map(|r| r.map(|k| k.clone()));
        match arrived {
            Ok(Ok(Known::Present(object))) => Ok(object),
            Ok(Ok(Known::Absent)) => Err(Self::not_found(name)),
            Ok(Ok(Known::Nothing(_)) | Err(_)) => Err(Self::not_registered(namespace, name)),
            Err(_) => {
                let Known::Nothing(cause) = known.borrow().clone() else {
                    return Err(Self::not_registered(namespace, name));
                };
                let kind = K::KIND.to_lowercase();
                Err(ClusterError::new(
                    format!("get {kind} {namespace}/{name}"),
                    cause.as_ref().map_or(ErrorKind::Timeout, |c| c.kind),
                    format!("failed to sync {kind} cache: timed out waiting for the condition"),
                )
                .advise(cause.map(|c| c.to_string()).unwrap_or_default()))
            }
        }
    }

    async fn get_cached(&self, namespace: &str, name: &str, ttl: Duration) -> ClusterResult<Arc<K>> {
        let key = (namespace.to_owned(), name.to_owned());
        let (held, first) = {
            let entries = self.0.entries();
            let entry = entries.get(&key).ok_or_else(|| Self::not_registered(namespace, name))?;
            let held = match &*entry.known.borrow() {
                Known::Present(object) => Some(object.clone()),
                _ => None,
            };
            if let Some(object) = &held
                && (object.is_immutable() || entry.fetched.is_some_and(|at| at.elapsed() < ttl))
            {
                return Ok(object.clone());
            }
            (held, entry.fetched.is_none())
        };
        // After a pod was added the newest is wanted, later any the server has at hand.
        match self.0.source.get(Some(namespace), name, !first).await {
            Ok(object) => {
                let object = Arc::new(object);
                if let Some(entry) = self.0.entries().get_mut(&key) {
                    entry.fetched = Some(Instant::now());
                    entry.known.send_replace(Known::Present(object.clone()));
                }
                Ok(object)
            }
            Err(error) if error.kind.is_transient() => held.ok_or(error),
            Err(error) => Err(error),
        }
    }

    fn ensure_watch(&self, key: &Key, entry: &mut Entry<K>) {
        let done = matches!(&*entry.known.borrow(), Known::Present(k) if k.is_immutable());
        if !matches!(self.0.strategy, Strategy::Watch) || entry.watching.is_some() || done {
            return;
        }
        let stop = CancellationToken::new();
        entry.watching = Some(stop.clone());
        let follow = Follow { cache: Arc::downgrade(&self.0), key: key.clone(), stop: stop.clone() };
        let scope = Scope::named(Some(&key.0), &key.1);
        let (reflector, deltas, status) = Reflector::new(self.0.source.clone(), scope, 4, self.0.unit.clone());
        tokio::spawn(reflector.run(stop));
        tokio::spawn(follow.run(deltas, status));
    }
}

/// Carries one watch's deltas into the cache, until it is idle or released.
struct Follow<K: Object> {
    cache: std::sync::Weak<Inner<K>>,
    key: Key,
    stop: CancellationToken,
}

impl<K: Object + MaybeImmutable> Follow<K> {
    async fn run(
        self,
        mut deltas: tokio::sync::mpsc::Receiver<Delta<K>>,
        mut status: watch::Receiver<crate::reflect::ReflectorStatus>,
    ) {
        let mut look = tokio::time::interval(IDLE);
        look.tick().await;
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                delta = deltas.recv() => match delta {
                    Some(delta) => {
                        if !self.take(delta) {
                            break;
                        }
                    }
                    None => return,
                },
                Ok(()) = status.changed() => {
                    let error = status.borrow_and_update().error.clone();
                    self.with(|entry| entry.known.send_if_modified(|known| match known {
                        Known::Nothing(cause) => { *cause = error; true }
                        _ => false,
                    }));
                }
                _ = look.tick() => {
                    let idle = self.with(|entry| {
                        let idle = entry.holders == 0 && entry.used.elapsed() >= IDLE;
                        if idle {
                            // Without a watch what we know grows old: the next read asks again.
                            entry.known.send_replace(Known::Nothing(None));
                            entry.watching = None;
                        }
                        idle
                    });
                    if idle != Some(false) {
                        break;
                    }
                }
            }
        }
        self.stop.cancel();
    }

    /// False when nothing more needs to be followed.
    fn take(&self, delta: Delta<K>) -> bool {
        let known = match delta {
            Delta::Snapshot(items) => match items.into_iter().find(|k| k.metadata().name.as_ref() == Some(&self.key.1))
            {
                Some(object) => Known::Present(Arc::new(object)),
                None => Known::Absent,
            },
            Delta::Upsert(object) => Known::Present(Arc::new(object)),
            Delta::Remove(_) => Known::Absent,
        };
        let last = matches!(&known, Known::Present(k) if k.is_immutable());
        let told = self.with(|entry| {
            let news = is_news(&entry.known.borrow(), &known);
            entry.known.send_replace(known);
            if last {
                entry.watching = None;
            }
            news
        });
        if told == Some(true)
            && let Some(cache) = self.cache.upgrade()
        {
            (cache.changed)(&self.key.0, &self.key.1);
        }
        told.is_some() && !last
    }

    /// Runs on the entry, unless it is gone or another watch has taken over.
    fn with<T>(&self, work: impl FnOnce(&mut Entry<K>) -> T) -> Option<T> {
        let cache = self.cache.upgrade()?;
        let mut entries = cache.entries();
        let entry = entries.get_mut(&self.key)?;
        if self.stop.is_cancelled() || entry.watching.is_none() {
            return None;
        }
        Some(work(entry))
    }
}

/// What was known is not so any more. The first answer is no news: whoever asked waits for it.
fn is_news<K: Object>(before: &Known<K>, now: &Known<K>) -> bool {
    match (before, now) {
        (Known::Nothing(_), _) => false,
        (Known::Absent, Known::Absent) => false,
        (Known::Present(a), Known::Present(b)) => {
            let (a, b) = (a.metadata(), b.metadata());
            a.uid != b.uid || a.resource_version != b.resource_version || a.resource_version.is_none()
        }
        _ => true,
    }
}

#[cfg(test)]
#[path = "object_cache_tests.rs"]
mod tests;
