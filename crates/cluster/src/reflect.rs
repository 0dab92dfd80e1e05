//! A collection of the API server, followed: a whole picture first, then every change, for as long as it runs.
//!
//! The initial list is streamed where the server can (KEP-3157), else paged. A watch that the server closes is opened again where it
//! left off; after a broken one or 410 the picture is taken anew, never older than what was seen. Nothing is kept here: deltas go into
//! a bounded channel, and a slow reader slows the stream down.

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::Client;
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::{Backoff, Unit};

pub use crate::wire::{Object, Page, WatchEvent};

/// Objects in a page of a list (as client-go's pager).
const PAGE: u32 = 500;
/// The shortest time that we ask a watch to stay open; the longest is twice that (as client-go).
const WATCH_TIME: Duration = Duration::from_secs(300);
/// A watch that ends sooner without a word counts as a failure.
const SHORT_WATCH: Duration = Duration::from_secs(1);
/// How long the end of a streamed initial list may take before it is listed instead.
const STREAMED_LIST: Duration = Duration::from_secs(60);

/// `metadata.resourceVersion` as a number, for telling which of two copies of an object is newer (KEP-5504); None when it is none.
pub fn version_of(meta: &ObjectMeta) -> Option<u128> {
    meta.resource_version.as_deref()?.parse().ok()
}

/// Which object of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Namespace; empty for what has none.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

impl ObjectKey {
    /// The key of an object.
    pub fn of<K: Object>(object: &K) -> Self {
        let meta = object.metadata();
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
        }
    }
}

/// One step of what is known about a collection.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta<K> {
    /// The whole collection as of now: what is not in it is gone.
    Snapshot(Vec<K>),
    /// Made or changed.
    Upsert(K),
    /// Gone.
    Remove(ObjectKey),
}

/// Which objects of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// One namespace, else all.
    pub namespace: Option<String>,
    /// Field selector.
    pub field_selector: Option<String>,
    /// Label selector.
    pub label_selector: Option<String>,
}

impl Scope {
    /// All objects.
    pub fn all() -> Self {
        Self::default()
    }

    /// The pods that are bound to a node.
    pub fn pods_of_node(node: &str) -> Self {
        Self { field_selector: Some(format!("spec.nodeName={node}")), ..Self::default() }
    }

    /// One object; namespace None for kinds without.
    pub fn named(namespace: Option<&str>, name: &str) -> Self {
        Self {
            namespace: namespace.map(str::to_owned),
            field_selector: Some(format!("metadata.name={name}")),
            label_selector: None,
        }
    }

    fn query(&self) -> Vec<(&'static str, String)> {
        let selectors = [("fieldSelector", &self.field_selector), ("labelSelector", &self.label_selector)];
        selectors.into_iter().filter_map(|(k, v)| Some((k, v.clone()?))).collect()
    }
}

/// What to ask of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListAsk {
    /// `""` newest, `"0"` any, else not older than.
    pub resource_version: String,
    /// Objects per page; 0: all at once.
    pub limit: u32,
    /// The next page.
    pub next: Option<String>,
}

/// What to ask of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchAsk {
    /// Where to start.
    pub resource_version: String,
    /// Begin with what there is, and a bookmark at its end.
    pub initial_events: bool,
    /// When the server is to close it.
    pub timeout: Duration,
}

/// A stream of watch events; it ends when the server closes the watch, errors end it too.
pub type WatchStream<K> = BoxStream<'static, ClusterResult<WatchEvent<K>>>;

/// A collection that can be listed and watched. [`Client`] is one for every kind; fakes implement it too.
#[async_trait]
pub trait Collection<K: Object>: Send + Sync {
    /// One page.
    async fn list(&self, scope: &Scope, ask: &ListAsk) -> ClusterResult<Page<K>>;
    /// A watch, with bookmarks.
    async fn watch(&self, scope: &Scope, ask: &WatchAsk) -> ClusterResult<WatchStream<K>>;
    /// One object; `from_cache`: any version the server has at hand.
    async fn get(&self, namespace: Option<&str>, name: &str, from_cache: bool) -> ClusterResult<K>;
}

#[async_trait]
impl<K: Object> Collection<K> for Client {
    async fn list(&self, scope: &Scope, ask: &ListAsk) -> ClusterResult<Page<K>> {
        let mut query = scope.query();
        if ask.limit > 0 {
            query.push(("limit", ask.limit.to_string()));
        }
        match &ask.next {
            // The version of a continued list is inside its token.
            Some(next) => query.push(("continue", next.clone())),
            None if !ask.resource_version.is_empty() => {
                query.push(("resourceVersion", ask.resource_version.clone()));
            }
            None => {}
        }
        self.list_page(scope.namespace.as_deref(), query).await
    }

    async fn watch(&self, scope: &Scope, ask: &WatchAsk) -> ClusterResult<WatchStream<K>> {
        let mut query = scope.query();
        query.push(("allowWatchBookmarks", "true".to_owned()));
        query.push(("timeoutSeconds", ask.timeout.as_secs().to_string()));
        if !ask.resource_version.is_empty() {
            query.push(("resourceVersion", ask.resource_version.clone()));
        }
        if ask.initial_events {
            query.push(("sendInitialEvents", "true".to_owned()));
            query.push(("resourceVersionMatch", "NotOlderThan".to_owned()));
        }
        // The server closes it first, unless it is gone.
        let silence = ask.timeout + Duration::from_secs(30);
        Client::watch(self, scope.namespace.as_deref(), query, silence).await
    }

    async fn get(&self, namespace: Option<&str>, name: &str, from_cache: bool) -> ClusterResult<K> {
        Client::get(self, namespace, name, from_cache).await
    }
}

/// How a reflector is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReflectorStatus {
    /// A whole picture was delivered once.
    pub synced: bool,
    /// A watch is open, as far as we know.
    pub watching: bool,
    /// Why not; None while all is well.
    pub error: Option<ClusterError>,
}

enum State<K> {
    /// Nothing is known, or nothing that can be gone on from.
    Empty,
    /// The initial list comes through a watch.
    Streaming { stream: WatchStream<K>, objects: BTreeMap<(String, String), K>, until: Instant },
    /// The initial list comes page by page.
    Paging { version: String, next: String, items: Vec<K> },
    /// The picture is known up to `version`; no watch is open.
    Known { version: String },
    /// A watch is open.
    Watching { version: String, stream: WatchStream<K>, opened: Instant, quiet: bool },
}

/// Follows one collection.
pub struct Reflector<K: Object> {
    source: Arc<dyn Collection<K>>,
    scope: Scope,
    deltas: mpsc::Sender<Delta<K>>,
    status: watch::Sender<ReflectorStatus>,
    backoff: Backoff,
    unit: Unit,
    /// Streamed lists are worth a try.
    streaming: bool,
    /// The newest version that was seen; a new picture must not be older. None: none yet.
    seen: Option<String>,
    /// The server cannot serve `seen` any more: take the newest there is.
    lost: bool,
}

impl<K: Object> Reflector<K> {
    /// A reflector whose deltas come out of the receiver; `depth` is how many may wait there.
    pub fn new(
        source: Arc<dyn Collection<K>>,
        scope: Scope,
        depth: usize,
        unit: Unit,
    ) -> (Self, mpsc::Receiver<Delta<K>>, watch::Receiver<ReflectorStatus>) {
        let (deltas, receiver) = mpsc::channel(depth.max(1));
        let (status, status_receiver) = watch::channel(ReflectorStatus::default());
        let this = Self {
            source,
            scope,
            deltas,
            status,
            backoff: Backoff::reflector(unit.clone()),
            unit,
            streaming: true,
            seen: None,
            lost: false,
        };
        (this, receiver, status_receiver)
    }

    /// Never asks for a streamed list.
    #[must_use]
    pub fn without_streaming(mut self) -> Self {
        self.streaming = false;
        self
    }

    /// Runs until it is stopped or nobody listens any more.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut state = State::Empty;
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                next = self.step(state) => next,
            };
            match next {
                Some(next) => state = next,
                None => return,
            }
        }
    }

    async fn step(&mut self, state: State<K>) -> Option<State<K>> {
        match state {
            State::Empty if self.streaming => self.open_streamed_list().await,
            State::Empty => self.list("", None, Vec::new()).await,
            State::Paging { version, next, items } => self.list(&version, Some(next), items).await,
            State::Streaming { stream, objects, until } => self.streamed(stream, objects, until).await,
            State::Known { version } => self.open_watch(version).await,
            State::Watching { version, stream, opened, quiet } => self.watched(version, stream, opened, quiet).await,
        }
    }

    fn watch_time(&self) -> Duration {
        WATCH_TIME.mul_f64(1.0 + (self.unit)())
    }

    /// The version that a new picture must at least have: `""` is the newest.
    fn at_least(&self) -> String {
        if self.lost { String::new() } else { self.seen.clone().unwrap_or_default() }
    }

    async fn open_streamed_list(&mut self) -> Option<State<K>> {
        let ask = WatchAsk { resource_version: self.at_least(), initial_events: true, timeout: self.watch_time() };
        match self.source.watch(&self.scope, &ask).await {
            Ok(stream) => {
                Some(State::Streaming { stream, objects: BTreeMap::new(), until: Instant::now() + STREAMED_LIST })
            }
            Err(error) if error.kind == ErrorKind::Invalid => {
                tracing::debug!(%error, "The API server does not stream lists; listing");
                self.streaming = false;
                Some(State::Empty)
            }
            Err(error) => self.failed(error, State::Empty).await,
        }
    }

    async fn streamed(
        &mut self,
        mut stream: WatchStream<K>,
        mut objects: BTreeMap<(String, String), K>,
        until: Instant,
    ) -> Option<State<K>> {
        let name = |k: &K| {
            let meta = k.metadata();
            (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
        };
        loop {
            match tokio::time::timeout_at(until, stream.next()).await {
                Ok(Some(Ok(WatchEvent::Upsert(k)))) => drop(objects.insert(name(&k), k)),
                Ok(Some(Ok(WatchEvent::Delete(k)))) => drop(objects.remove(&name(&k))),
                Ok(Some(Ok(WatchEvent::Bookmark { resource_version, initial_events_end: true }))) => {
                    self.deliver(objects.into_values().collect(), &resource_version).await?;
                    self.watching();
                    return Some(State::Watching {
                        version: resource_version,
                        stream,
                        opened: Instant::now(),
                        quiet: false,
                    });
                }
                Ok(Some(Ok(WatchEvent::Bookmark { .. }))) => {}
                Ok(Some(Err(error))) if error.kind == ErrorKind::Invalid => {
                    self.streaming = false;
                    return Some(State::Empty);
                }
                Ok(Some(Err(error))) => return self.failed(error, State::Empty).await,
                Ok(None) => {
                    let error = self.error(ErrorKind::Server, "the watch ended before the streamed list did");
                    return self.failed(error, State::Empty).await;
                }
                Err(_) => {
                    tracing::warn!(
                        kind = K::KIND,
                        "The streamed list did not end within {} s; listing",
                        STREAMED_LIST.as_secs()
                    );
                    self.streaming = false;
                    return Some(State::Empty);
                }
            }
        }
    }

    /// One page; `version` is that of the first page.
    async fn list(&mut self, version: &str, next: Option<String>, mut items: Vec<K>) -> Option<State<K>> {
        let first = next.is_none();
        let resource_version = match &self.seen {
            // Any version will do at first: the watch cache answers, which spares etcd a full scan for each node.
            None if !self.lost => "0".to_owned(),
            _ => self.at_least(),
        };
        // With a version the watch cache answers, which does not page.
        let limit = if matches!(resource_version.as_str(), "" | "0") { PAGE } else { 0 };
        match self.source.list(&self.scope, &ListAsk { resource_version, limit, next }).await {
            Ok(page) => {
                items.extend(page.items);
                let version = if first { page.resource_version } else { version.to_owned() };
                match page.next {
                    Some(next) => Some(State::Paging { version, next, items }),
                    None => {
                        self.deliver(items, &version).await?;
                        Some(State::Known { version })
                    }
                }
            }
            Err(error) => self.failed(error, State::Empty).await,
        }
    }

    async fn deliver(&mut self, items: Vec<K>, version: &str) -> Option<()> {
        self.saw(version);
        self.lost = false;
        self.deltas.send(Delta::Snapshot(items)).await.ok()?;
        self.status.send_if_modified(|s| !std::mem::replace(&mut s.synced, true));
        Some(())
    }

    fn saw(&mut self, version: &str) {
        if !version.is_empty() {
            self.seen = Some(version.to_owned());
        }
    }

    async fn open_watch(&mut self, version: String) -> Option<State<K>> {
        let ask = WatchAsk { resource_version: version.clone(), initial_events: false, timeout: self.watch_time() };
        match self.source.watch(&self.scope, &ask).await {
            Ok(stream) => {
                self.watching();
                Some(State::Watching { version, stream, opened: Instant::now(), quiet: true })
            }
            // What we know stays true up to its version: no new picture because the server is away or busy.
            Err(error) if matches!(error.kind, ErrorKind::Unreachable | ErrorKind::Throttled { .. }) => {
                self.failed(error, State::Known { version }).await
            }
            Err(error) => self.failed(error, State::Empty).await,
        }
    }

    async fn watched(
        &mut self,
        mut version: String,
        mut stream: WatchStream<K>,
        opened: Instant,
        quiet: bool,
    ) -> Option<State<K>> {
        match stream.next().await {
            Some(Ok(event)) => {
                let delta = match event {
                    WatchEvent::Bookmark { resource_version, .. } => {
                        version = resource_version;
                        None
                    }
                    WatchEvent::Upsert(k) => {
                        version = k.metadata().resource_version.clone().unwrap_or(version);
                        Some(Delta::Upsert(k))
                    }
                    WatchEvent::Delete(k) => {
                        version = k.metadata().resource_version.clone().unwrap_or(version);
                        Some(Delta::Remove(ObjectKey::of(&k)))
                    }
                };
                self.saw(&version);
                if let Some(delta) = delta {
                    self.deltas.send(delta).await.ok()?;
                }
                Some(State::Watching { version, stream, opened, quiet: false })
            }
            None if quiet && opened.elapsed() < SHORT_WATCH => {
                let error = self.error(ErrorKind::Server, "the watch ended at once");
                self.failed(error, State::Known { version }).await
            }
            None => Some(State::Known { version }),
            Some(Err(error)) if matches!(error.kind, ErrorKind::Throttled { .. }) => {
                self.failed(error, State::Known { version }).await
            }
            Some(Err(error)) => self.failed(error, State::Empty).await,
        }
    }

    fn error(&self, kind: ErrorKind, message: &str) -> ClusterError {
        ClusterError::new(format!("watch {}", K::URL_PATH_SEGMENT), kind, message)
    }

    fn watching(&self) {
        self.status.send_if_modified(|s| {
            let changed = !s.watching || s.error.is_some();
            if s.error.take().is_some() {
                tracing::info!(kind = K::KIND, "Watching again");
            }
            s.watching = true;
            changed
        });
    }

    /// Notes a failure, waits, and goes on in `then`.
    async fn failed(&mut self, error: ClusterError, then: State<K>) -> Option<State<K>> {
        // The first failure and each new reason are worth a line, the same one every 30 s is not.
        let known = self.status.borrow().error.as_ref().is_some_and(|e| e.message == error.message);
        if known || error.is_expired() || error.kind.concerns_every_call() {
            tracing::debug!(%error, "Failed to watch");
        } else {
            tracing::warn!(%error, "Failed to watch");
        }
        if error.is_expired() {
            self.lost = true;
        }
        let wait = self.backoff.next_delay().max(error.retry_after().unwrap_or_default());
        self.status.send_modify(|s| {
            s.watching = false;
            s.error = Some(error);
        });
        tokio::select! {
            biased;
            () = tokio::time::sleep(wait) => Some(then),
            () = self.deltas.closed() => None,
        }
    }
}

#[cfg(test)]
#[path = "reflect_tests.rs"]
mod tests;
