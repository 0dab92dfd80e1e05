//! The object cache against a collection in memory, under a paused clock.

use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use futures::StreamExt;
use tokio::sync::broadcast;

use super::*;
use crate::reflect::{ListAsk, Page, WatchAsk, WatchEvent, WatchStream};

struct Store {
    objects: Mutex<HashMap<String, ConfigMap>>,
    changes: broadcast::Sender<(u64, WatchEvent<ConfigMap>)>,
    open: Arc<AtomicUsize>,
    gets: AtomicUsize,
    down: std::sync::atomic::AtomicBool,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn map(name: &str, value: &str, immutable: bool) -> ConfigMap {
    let mut map = ConfigMap::default();
    map.metadata.name = Some(name.to_owned());
    map.data = Some([("k".to_owned(), value.to_owned())].into());
    map.immutable = Some(immutable);
    map
}

impl Store {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            objects: Mutex::default(),
            changes: broadcast::Sender::new(16),
            open: Arc::default(),
            gets: AtomicUsize::new(0),
            down: false.into(),
        })
    }

    fn put(&self, map: ConfigMap) {
        self.objects.lock().unwrap().insert(map.metadata.name.clone().unwrap(), map.clone());
        let _ = self.changes.send((0, WatchEvent::Upsert(map)));
    }

    fn delete(&self, name: &str) {
        let gone = self.objects.lock().unwrap().remove(name).unwrap();
        let _ = self.changes.send((0, WatchEvent::Delete(gone)));
    }

    fn check(&self) -> ClusterResult<()> {
        if self.down.load(Ordering::SeqCst) {
            return Err(ClusterError::new("fake", ErrorKind::Unreachable, "dial: refused"));
        }
        Ok(())
    }
}

#[async_trait]
impl Collection<ConfigMap> for Store {
    async fn list(&self, _: &Scope, _: &ListAsk) -> ClusterResult<Page<ConfigMap>> {
        unreachable!("this server streams")
    }

    async fn watch(&self, scope: &Scope, _: &WatchAsk) -> ClusterResult<WatchStream<ConfigMap>> {
        self.check()?;
        assert_eq!(scope.namespace.as_deref(), Some("ns"));
        let name = scope.field_selector.clone().unwrap().replace("metadata.name=", "");
        self.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(self.open.clone());
        let changes = tokio_stream::wrappers::BroadcastStream::new(self.changes.subscribe());
        let mut first: Vec<_> =
            self.objects.lock().unwrap().get(&name).cloned().into_iter().map(|m| Ok(WatchEvent::Upsert(m))).collect();
        first.push(Ok(WatchEvent::Bookmark { resource_version: "5".into(), initial_events_end: true }));
        let later = changes.filter_map(move |change| {
            let _held = &open;
            let event = change.unwrap().1;
            let mine = match &event {
                WatchEvent::Upsert(m) | WatchEvent::Delete(m) => m.metadata.name.as_deref() == Some(&name),
                WatchEvent::Bookmark { .. } => true,
            };
            futures::future::ready(mine.then_some(Ok(event)))
        });
        Ok(futures::stream::iter(first).chain(later).boxed())
    }

    async fn get(&self, _: Option<&str>, name: &str, _: bool) -> ClusterResult<ConfigMap> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        self.check()?;
        self.objects.lock().unwrap().get(name).cloned().ok_or(ClusterError::new(
            "get",
            ErrorKind::NotFound,
            "not found",
        ))
    }
}

fn cache(store: &Arc<Store>, strategy: Strategy) -> ObjectCache<ConfigMap> {
    ObjectCache::new(store.clone(), strategy, Arc::new(|| 0.0))
}

async fn value(cache: &ObjectCache<ConfigMap>, name: &str) -> Result<String, String> {
    let map = cache.get("ns", name).await.map_err(|e| e.message)?;
    Ok(map.data.as_ref().unwrap()["k"].clone())
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn one_watch_per_object_shared_by_pods_closed_with_the_last() {
    let store = Store::new();
    store.put(map("a", "1", false));
    let cache = cache(&store, Strategy::Watch);
    assert_eq!(value(&cache, "a").await, Err("object \"ns\"/\"a\" not registered".into()));
    cache.acquire("ns", "a");
    cache.acquire("ns", "a");
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
    store.put(map("a", "2", false));
    settle().await;
    assert_eq!(value(&cache, "a").await, Ok("2".into()));
    store.delete("a");
    settle().await;
    assert_eq!(value(&cache, "a").await, Err("configmap \"a\" not found".into()));
    assert_eq!(store.open.load(Ordering::SeqCst), 1);
    cache.release("ns", "a");
    settle().await;
    assert_eq!(store.open.load(Ordering::SeqCst), 1);
    cache.release("ns", "a");
    settle().await;
    assert_eq!((store.open.load(Ordering::SeqCst), cache.size()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn an_idle_watch_is_closed_and_opened_by_the_next_read() {
    let store = Store::new();
    store.put(map("a", "1", false));
    let cache = cache(&store, Strategy::Watch);
    cache.acquire("ns", "a");
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
    tokio::time::sleep(IDLE * 2).await;
    assert_eq!((store.open.load(Ordering::SeqCst), cache.size()), (0, (1, 0)));
    store.put(map("a", "2", false));
    assert_eq!(value(&cache, "a").await, Ok("2".into()), "never the old value after a time without a watch");
    assert_eq!(store.open.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn an_immutable_object_is_read_once() {
    let store = Store::new();
    store.put(map("a", "1", true));
    let cache = cache(&store, Strategy::Watch);
    cache.acquire("ns", "a");
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
    tokio::time::sleep(IDLE * 3).await;
    assert_eq!((store.open.load(Ordering::SeqCst), cache.size()), (0, (1, 0)));
    store.down.store(true, Ordering::SeqCst);
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
}

#[tokio::test(start_paused = true)]
async fn no_answer_says_what_go_says_and_why() {
    let store = Store::new();
    store.down.store(true, Ordering::SeqCst);
    let cache = cache(&store, Strategy::Watch);
    cache.acquire("ns", "a");
    let e = cache.get("ns", "a").await.unwrap_err();
    assert_eq!(e.message, "failed to sync configmap cache: timed out waiting for the condition");
    assert_eq!((e.kind, e.advice.contains("dial: refused")), (ErrorKind::Unreachable, true));
    store.down.store(false, Ordering::SeqCst);
    store.put(map("a", "1", false));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
}

#[tokio::test(start_paused = true)]
async fn the_ttl_strategy_reads_again_when_old_and_keeps_the_old_when_it_cannot() {
    let store = Store::new();
    store.put(map("a", "1", false));
    let cache = cache(&store, Strategy::Cache(ObjectTtl::default()));
    cache.acquire("ns", "a");
    for _ in 0..3 {
        assert_eq!(value(&cache, "a").await, Ok("1".into()));
    }
    assert_eq!(store.gets.load(Ordering::SeqCst), 1);
    store.put(map("a", "2", false));
    cache.acquire("ns", "a");
    assert_eq!(value(&cache, "a").await, Ok("2".into()), "a new pod gets the newest");
    tokio::time::sleep(Duration::from_secs(61)).await;
    store.down.store(true, Ordering::SeqCst);
    assert_eq!(value(&cache, "a").await, Ok("2".into()));
    assert_eq!(store.gets.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn the_ttl_may_change_while_it_is_in_use() {
    let store = Store::new();
    store.put(map("a", "1", false));
    let ttl = ObjectTtl::default();
    let cache = cache(&store, Strategy::Cache(ttl.clone()));
    cache.acquire("ns", "a");
    let mut seen = Vec::new();
    for (version, age) in [(2, None), (3, Some(30)), (4, Some(300)), (5, Some(0)), (6, None)] {
        assert!(value(&cache, "a").await.is_ok());
        store.put(map("a", &version.to_string(), false));
        ttl.set(age.map(Duration::from_secs));
        tokio::time::sleep(Duration::from_secs(40)).await;
        seen.push(value(&cache, "a").await.unwrap());
    }
    assert_eq!(seen, ["1", "3", "3", "5", "5"]);
}

#[tokio::test(start_paused = true)]
async fn a_held_object_is_followed_without_reads_and_changes_are_told() {
    let store = Store::new();
    store.put(map("a", "1", false));
    let told = Arc::new(AtomicUsize::new(0));
    let count = told.clone();
    let changed: OnChange = Arc::new(move |namespace, name| {
        assert_eq!((namespace, name), ("ns", "a"));
        count.fetch_add(1, Ordering::SeqCst);
    });
    let cache = ObjectCache::telling(store.clone(), Strategy::Watch, Arc::new(|| 0.0), changed);
    cache.acquire("ns", "a");
    cache.hold("ns", "a");
    assert_eq!(value(&cache, "a").await, Ok("1".into()));
    tokio::time::sleep(IDLE * 3).await;
    assert_eq!((store.open.load(Ordering::SeqCst), told.load(Ordering::SeqCst)), (1, 0));
    store.put(map("a", "2", false));
    settle().await;
    assert_eq!(told.load(Ordering::SeqCst), 1);
    store.delete("a");
    settle().await;
    assert_eq!(told.load(Ordering::SeqCst), 2);
    store.put(map("a", "3", false));
    settle().await;
    assert_eq!(told.load(Ordering::SeqCst), 3);
    cache.unhold("ns", "a");
    tokio::time::sleep(IDLE * 2).await;
    assert_eq!((store.open.load(Ordering::SeqCst), cache.size()), (0, (1, 0)));
}
