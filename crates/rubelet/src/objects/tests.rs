//! The port against collections in memory, under a paused clock.

use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cluster::reflect::{ListAsk, Object, Page, WatchAsk, WatchEvent, WatchStream};
use cluster::{ClusterResult, ErrorKind};
use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestStatus, TokenReview};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use model::api::{Pod, Time};
use model::pod::PodSource;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::*;

/// Objects of one kind by namespace and name.
struct Store<K: Object> {
    objects: Mutex<BTreeMap<(String, String), K>>,
    gets: AtomicUsize,
    changes: broadcast::Sender<WatchEvent<K>>,
    open: Arc<AtomicUsize>,
    down: Mutex<bool>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn key<K: Object>(object: &K) -> (String, String) {
    let key = ObjectKey::of(object);
    (key.namespace, key.name)
}

impl<K: Object> Store<K> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            objects: Mutex::default(),
            gets: AtomicUsize::new(0),
            changes: broadcast::Sender::new(16),
            open: Arc::default(),
            down: Mutex::default(),
        })
    }

    fn put(&self, object: Value) {
        let object: K = serde_json::from_value(object).unwrap();
        lock(&self.objects).insert(key(&object), object.clone());
        let _ = self.changes.send(WatchEvent::Upsert(object));
    }

    fn delete(&self, namespace: &str, name: &str) {
        let gone = lock(&self.objects).remove(&(namespace.to_owned(), name.to_owned())).unwrap();
        let _ = self.changes.send(WatchEvent::Delete(gone));
    }

    fn watches(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl<K: Object> Collection<K> for Store<K> {
    async fn list(&self, _: &Scope, _: &ListAsk) -> ClusterResult<Page<K>> {
        unreachable!("this server streams")
    }

    async fn watch(&self, scope: &Scope, _: &WatchAsk) -> ClusterResult<WatchStream<K>> {
        let named = scope.field_selector.as_deref().map(|s| s.replace("metadata.name=", ""));
        let namespace = scope.namespace.clone();
        let mine = move |k: &K| {
            let (n, name) = key(k);
            namespace.as_ref().is_none_or(|ns| *ns == n) && named.as_ref().is_none_or(|s| *s == name)
        };
        self.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(self.open.clone());
        let changes = tokio_stream::wrappers::BroadcastStream::new(self.changes.subscribe());
        let mut first: Vec<_> =
            lock(&self.objects).values().filter(|k| mine(k)).cloned().map(|k| Ok(WatchEvent::Upsert(k))).collect();
        first.push(Ok(WatchEvent::Bookmark { resource_version: "5".into(), initial_events_end: true }));
        let later = changes.filter_map(move |change| {
            let _held = &open;
            let event = change.unwrap();
            let mine = match &event {
                WatchEvent::Upsert(k) | WatchEvent::Delete(k) => mine(k),
                WatchEvent::Bookmark { .. } => true,
            };
            futures::future::ready(mine.then_some(Ok(event)))
        });
        Ok(futures::stream::iter(first).chain(later).boxed())
    }

    async fn get(&self, namespace: Option<&str>, name: &str, _: bool) -> ClusterResult<K> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        if *lock(&self.down) {
            return Err(ClusterError::new("get", ErrorKind::Unreachable, "no route"));
        }
        let key = (namespace.unwrap_or_default().to_owned(), name.to_owned());
        lock(&self.objects).get(&key).cloned().ok_or(ClusterError::new("get", ErrorKind::NotFound, "not found"))
    }
}

/// Issues tokens `t1`, `t2`, …, with claims while there is a UID; each says in a header of its own what it was asked for.
struct Issuer {
    start: tokio::time::Instant,
    /// Of the service account.
    uid: Mutex<Option<String>>,
    asked: Mutex<Vec<TokenRequest>>,
    down: Mutex<bool>,
}

fn epoch() -> Timestamp {
    "2026-11-29T00:00:00Z".parse().unwrap()
}

impl Issuer {
    fn now(&self) -> Timestamp {
        epoch() + SignedDuration::try_from(self.start.elapsed()).unwrap()
    }
}

#[async_trait]
impl AuthApi for Issuer {
    async fn request_token(&self, ns: &str, account: &str, request: &TokenRequest) -> ClusterResult<TokenRequest> {
        assert_eq!((ns, account), ("ns", "sa"));
        if *lock(&self.down) {
            return Err(ClusterError::new("create token", ErrorKind::Unreachable, "dial tcp: refused"));
        }
        let mut asked = lock(&self.asked);
        asked.push(request.clone());
        let mut answer = request.clone();
        let spec = answer.spec.as_mut().unwrap();
        let seconds = *spec.expiration_seconds.get_or_insert(3600);
        answer.status = Some(TokenRequestStatus {
            token: Some(match &*lock(&self.uid) {
                None => format!("t{}", asked.len()),
                Some(uid) => {
                    let claims = json!({"kubernetes.io": {"serviceaccount": {"uid": uid}}}).to_string();
                    format!("t{}.{}.s", asked.len(), URL_SAFE_NO_PAD.encode(claims))
                }
            }),
            expiration_timestamp: Some(Time(self.now() + SignedDuration::from_secs(seconds))),
        });
        Ok(answer)
    }

    async fn review_token(&self, _: &TokenReview) -> ClusterResult<TokenReview> {
        unreachable!()
    }

    async fn review_access(&self, _: &SubjectAccessReview) -> ClusterResult<SubjectAccessReview> {
        unreachable!()
    }
}

struct NoStorage;

#[async_trait]
impl StorageApi for NoStorage {
    async fn get_claim(&self, _: &str, name: &str) -> ClusterResult<PersistentVolumeClaim> {
        let text = format!("persistentvolumeclaims \"{name}\" not found");
        Err(ClusterError::new("get", ErrorKind::NotFound, text))
    }
    async fn get_volume(&self, _: &str) -> ClusterResult<PersistentVolume> {
        unreachable!()
    }
    async fn patch_claim_status(&self, _: &str, _: &str, _: &Value) -> ClusterResult<PersistentVolumeClaim> {
        unreachable!()
    }
    async fn get_attachment(&self, _: &str) -> ClusterResult<VolumeAttachment> {
        unreachable!()
    }
    async fn get_csi_driver(&self, _: &str) -> ClusterResult<CSIDriver> {
        unreachable!()
    }
}

struct World {
    maps: Arc<Store<ConfigMap>>,
    secrets: Arc<Store<Secret>>,
    services: Arc<Store<Service>>,
    bundles: Arc<Store<ClusterTrustBundle>>,
    classes: Arc<Store<RuntimeClass>>,
    accounts: Arc<Store<ServiceAccount>>,
    issuer: Arc<Issuer>,
    objects: Arc<ClusterObjects>,
    _tasks: Tasks,
}

fn world() -> World {
    let issuer = Arc::new(Issuer {
        start: tokio::time::Instant::now(),
        uid: Mutex::default(),
        asked: Mutex::default(),
        down: Mutex::default(),
    });
    let (maps, secrets, services, bundles) = (Store::new(), Store::new(), Store::new(), Store::new());
    let (classes, accounts) = (Store::new(), Store::new());
    let sources = Sources {
        config_maps: maps.clone(),
        secrets: secrets.clone(),
        services: services.clone(),
        accounts: accounts.clone(),
        bundles: bundles.clone(),
        classes: classes.clone(),
        auth: issuer.clone(),
        storage: Arc::new(NoStorage),
    };
    let tasks = Tasks::default();
    let (unit, clock) = (Arc::new(|| 0.0), issuer.clone());
    let wall: Wall = Arc::new(move || clock.now());
    let objects = ClusterObjects::start(sources, Strategy::Watch, true, unit, wall, &tasks);
    World { maps, secrets, services, bundles, classes, accounts, issuer, objects, _tasks: tasks }
}

fn pod(uid: &str, spec: Value) -> (DesiredPod, Arc<PodEntry>) {
    let object: Pod =
        serde_json::from_value(json!({"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec": spec}))
            .unwrap();
    let pod = DesiredPod::new(object, PodSource::Api).unwrap();
    let entry = PodEntry::new(PodUid::new(uid), "ns", uid, Some(pod.clone()), epoch());
    (pod, Arc::new(entry))
}

fn with_map(uid: &str, name: &str) -> (DesiredPod, Arc<PodEntry>) {
    pod(
        uid,
        json!({"serviceAccountName": "sa", "containers": [], "volumes": [{"name": "v", "configMap": {"name": name}}]}),
    )
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_wakes_those_who_use_the_object_and_nobody_else() {
    let w = world();
    w.maps.put(json!({"metadata": {"namespace": "ns", "name": "m"}, "data": {"k": "1"}}));
    w.maps.put(json!({"metadata": {"namespace": "ns", "name": "other"}}));
    let (a, wake_a) = with_map("a", "m");
    let (b, wake_b) = with_map("b", "m");
    let (c, wake_c) = with_map("c", "other");
    w.objects.follow(&a, &wake_a);
    w.objects.follow(&b, &wake_b);
    w.objects.follow(&c, &wake_c);
    assert_eq!(w.objects.config_map("ns", "m").await.unwrap().data.as_ref().unwrap()["k"], "1");
    settle().await;
    assert!(!wake_a.take_objects_changed(), "the first answer is no news");
    w.maps.put(json!({"metadata": {"namespace": "ns", "name": "m"}, "data": {"k": "2"}}));
    settle().await;
    assert_eq!(w.objects.config_map("ns", "m").await.unwrap().data.as_ref().unwrap()["k"], "2");
    let woken = || [&wake_a, &wake_b, &wake_c].map(|e| e.take_objects_changed());
    assert_eq!(woken(), [true, true, false]);
    // The newer form of a names something else.
    let (a2, _) = with_map("a", "other");
    w.objects.follow(&a2, &wake_a);
    w.maps.delete("ns", "m");
    settle().await;
    assert_eq!(woken(), [false, true, false]);
    let gone = w.objects.config_map("ns", "m").await;
    assert_eq!(gone, Err(ObjectError::NotFound("configmap \"m\" not found".into())));
    assert_eq!(w.maps.watches(), 2);
    w.objects.forget(b.uid());
    settle().await;
    assert_eq!(w.maps.watches(), 1, "the last user of m is gone");
    w.objects.forget(a.uid());
    w.objects.forget(c.uid());
    settle().await;
    assert_eq!((w.maps.watches(), lock(&w.objects.index).config_maps.len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn what_was_missing_wakes_when_it_comes() {
    let w = world();
    let (a, wake) = pod(
        "a",
        json!({"containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "s"}}]}], "imagePullSecrets": [{"name": "p"}]}),
    );
    w.objects.follow(&a, &wake);
    let missing = w.objects.secret("ns", "s").await;
    assert_eq!(missing, Err(ObjectError::NotFound("secret \"s\" not found".into())));
    w.secrets.put(json!({"metadata": {"namespace": "ns", "name": "s"}, "data": {"k": "dg=="}}));
    settle().await;
    assert!(wake.take_objects_changed());
    assert_eq!(w.objects.secret("ns", "s").await.unwrap().data.as_ref().unwrap()["k"].0, b"v");
    assert_eq!(w.secrets.watches(), 2);
}

#[tokio::test(start_paused = true)]
async fn tokens_are_kept_renewed_and_outlive_the_api_server_for_a_while() {
    let w = world();
    let (a, wake) = with_map("a", "m");
    w.objects.follow(&a, &wake);
    let get = async |audience: &str| w.objects.token(&a, audience, Some(1000)).await;
    let first = get("").await.unwrap();
    assert_eq!((first.token.as_str(), first.renew_at), ("t1", epoch() + SignedDuration::from_secs(800)));
    assert_eq!(get("").await.unwrap(), first);
    assert_eq!(get("vault").await.unwrap().token, "t2");
    {
        let asked = lock(&w.issuer.asked);
        let spec = asked[1].spec.clone().unwrap();
        assert_eq!((spec.audiences, spec.expiration_seconds), (Some(vec!["vault".to_owned()]), Some(1000)));
        let bound = spec.bound_object_ref.unwrap();
        assert_eq!((bound.kind.as_deref(), bound.uid.as_deref()), (Some("Pod"), Some("a")));
        assert_eq!(asked[0].spec.clone().unwrap().audiences, None);
    }
    tokio::time::sleep(Duration::from_secs(801)).await;
    *lock(&w.issuer.down) = true;
    let kept = get("").await.unwrap();
    assert_eq!((kept.token.as_str(), kept.renew_at > w.issuer.now()), ("t1", true));
    tokio::time::sleep(Duration::from_secs(200)).await;
    let e = get("").await.unwrap_err().to_string();
    assert!(e.starts_with("token ") && e.ends_with(" expired and refresh failed: dial tcp: refused"), "{e}");
    *lock(&w.issuer.down) = false;
    assert_eq!(get("").await.unwrap().token, "t3");
    w.objects.forget(a.uid());
    *lock(&w.issuer.down) = true;
    assert_eq!(get("").await, Err(ObjectError::Failed("failed to fetch token: dial tcp: refused".into())));
}

#[tokio::test(start_paused = true)]
async fn an_account_that_is_made_again_gets_new_tokens() {
    let w = world();
    let account = |uid: &str| {
        w.accounts.put(json!({"metadata": {"namespace": "ns", "name": "sa", "uid": uid}}));
        *lock(&w.issuer.uid) = Some(uid.to_owned());
    };
    account("u1");
    let pods = ["a", "b"].map(|uid| with_map(uid, "m"));
    // As each sync does, all day long; its answer is the number of the token.
    let sync = async || {
        let mut numbers = Vec::new();
        for (pod, _) in &pods {
            let token = w.objects.token(pod, "", Some(86_400)).await.unwrap().token;
            numbers.push(token.split('.').next().unwrap_or_default().to_owned());
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        numbers
    };
    for _ in 0..30 {
        assert_eq!(sync().await, ["t1", "t2"]);
    }
    let asked = w.accounts.gets.load(Ordering::SeqCst);
    assert!((5..=6).contains(&asked), "both pods' account was asked for {asked} times in half an hour");
    // Gone, and not there yet: nothing better is to be had.
    w.accounts.delete("ns", "sa");
    for _ in 0..7 {
        assert_eq!(sync().await, ["t1", "t2"]);
    }
    account("u2");
    sync().await;
    assert_eq!(sync().await, ["t3", "t4"], "the new account's");
    // While the server is away, the old ones are kept.
    account("u3");
    *lock(&w.accounts.down) = true;
    *lock(&w.issuer.down) = true;
    for _ in 0..7 {
        assert_eq!(sync().await, ["t3", "t4"]);
    }
    *lock(&w.accounts.down) = false;
    for _ in 0..2 {
        assert_eq!(sync().await, ["t3", "t4"], "known to be of another account, and none to be had");
    }
    *lock(&w.issuer.down) = false;
    assert_eq!(sync().await, ["t5", "t6"]);
    // What was learned goes with the pods.
    for (pod, _) in &pods {
        w.objects.forget(pod.uid());
    }
    assert!(w.objects.tokens.is_empty());
}

#[tokio::test(start_paused = true)]
async fn services_as_variables() {
    let w = world();
    let service = |ns: &str, name: &str, ip: &str| json!({"metadata": {"namespace": ns, "name": name}, "spec": {"clusterIP": ip, "ports": [{"port": 80, "protocol": "TCP"}]}});
    w.services.put(service("default", "kubernetes", "10.0.0.1"));
    w.services.put(service("ns", "web", "10.0.0.2"));
    w.services.put(service("other", "far", "10.0.0.3"));
    assert_eq!(w.objects.service_variables("ns", true, false).await, None, "not listed yet");
    let names = |v: Option<BTreeMap<String, String>>| {
        v.unwrap().into_iter().filter(|(k, _)| k.ends_with("_HOST")).collect::<Vec<_>>()
    };
    let var = |k: &str, v: &str| (k.to_owned(), v.to_owned());
    let both = vec![var("KUBERNETES_SERVICE_HOST", "10.0.0.1"), var("WEB_SERVICE_HOST", "10.0.0.2")];
    assert_eq!(names(w.objects.service_variables("ns", true, true).await), both);
    assert_eq!(names(w.objects.service_variables("ns", false, true).await), both[..1]);
    assert_eq!(names(w.objects.service_variables("default", true, true).await), both[..1]);
    w.services.delete("ns", "web");
    settle().await;
    assert_eq!(names(w.objects.service_variables("ns", true, true).await), both[..1]);
}

#[tokio::test(start_paused = true)]
async fn trust_bundles_are_followed_once_a_pod_shows_one() {
    let w = world();
    let pem = |text: &str| format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
    let bundle = |name: &str, content: &str| json!({"metadata": {"name": name, "labels": {"l": name}}, "spec": {"signerName": "s/s", "trustBundle": pem(content)}});
    w.bundles.put(bundle("a", "YQ=="));
    w.bundles.put(bundle("b", "Yg=="));
    let (p, wake) = pod(
        "p",
        json!({"containers": [], "volumes": [{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"name": "a", "path": "x"}}]}}]}),
    );
    w.objects.follow(&p, &wake);
    assert_eq!(w.bundles.watches(), 0);
    let named = |name: &str| TrustBundles::Named(name.to_owned());
    let early = w.objects.trust_anchors(&named("a"), false).await.unwrap_err().to_string();
    assert_eq!(early, "ClusterTrustBundle informer has not yet synced");
    settle().await;
    assert!(wake.take_objects_changed());
    let text = |r: ObjectResult<Vec<u8>>| r.map(|b| String::from_utf8(b).unwrap()).map_err(|e| e.to_string());
    assert_eq!(text(w.objects.trust_anchors(&named("a"), false).await), Ok(pem("YQ==")));
    assert_eq!(text(w.objects.trust_anchors(&named("no"), true).await), Ok(String::new()));
    assert_eq!(
        text(w.objects.trust_anchors(&named("no"), false).await),
        Err("while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"no\" not found".into())
    );
    let signer = |selector: Option<Value>| TrustBundles::Signer {
        name: "s/s".into(),
        selector: selector.map(|s| serde_json::from_value(s).unwrap()),
    };
    let all = signer(Some(json!({})));
    assert_eq!(text(w.objects.trust_anchors(&all, false).await), Ok(format!("{}{}", pem("YQ=="), pem("Yg=="))));
    assert_eq!(
        text(w.objects.trust_anchors(&signer(None), false).await),
        Err("combination of signerName and labelSelector matched zero ClusterTrustBundles".into())
    );
    w.bundles.delete("", "b");
    settle().await;
    assert!(wake.take_objects_changed());
    assert_eq!(text(w.objects.trust_anchors(&all, false).await), Ok(pem("YQ==")));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_class_names_a_handler() {
    let w = world();
    w.classes.put(json!({"metadata": {"name": "fast"}, "handler": "kata"}));
    assert_eq!(w.objects.runtime_handler("fast").await, Ok("kata".to_owned()));
    let gone = w.objects.runtime_handler("slow").await.unwrap_err().to_string();
    assert_eq!(gone, "runtimeclass.node.k8s.io \"slow\" not found");
    *lock(&w.classes.down) = true;
    assert_eq!(w.objects.runtime_handler("fast").await, Ok("kata".to_owned()), "what was said last holds");
    let unknown = w.objects.runtime_handler("slow").await.unwrap_err().to_string();
    assert_eq!(unknown, "failed to lookup RuntimeClass slow: no route");
    *lock(&w.classes.down) = false;
    w.classes.delete("", "fast");
    assert!(w.objects.runtime_handler("fast").await.is_err(), "a class that is gone is gone");
}
