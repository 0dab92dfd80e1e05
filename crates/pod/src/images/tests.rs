//! Pulls and the right to images, against the fake runtime and files in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use decide::credentials::records::Policy;
use decide::credentials::{Login, Origin};
use fakes::FakeRuntime;
use jiff::SignedDuration;
use model::api::{ConfigMap, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount};
use model::pod::PodSource;
use serde_json::json;

use super::*;
use crate::events::EventSink;
use crate::objects::{ObjectError, ObjectResult, Token, TrustBundles};
use crate::ports::HostResult;
use crate::registry::PodEntry;

const IMAGE: &str = "reg.test/team/app:1";

#[derive(Clone, Default)]
struct Disk(Arc<Mutex<BTreeMap<PathBuf, Vec<u8>>>>);

#[async_trait]
impl records::RecordFiles for Disk {
    async fn read(&self, path: &Path) -> HostResult<Option<Vec<u8>>> {
        Ok(lock(&self.0).get(path).cloned())
    }
    async fn write(&self, path: &Path, content: Vec<u8>) -> HostResult<()> {
        lock(&self.0).insert(path.to_owned(), content);
        Ok(())
    }
    async fn remove(&self, path: &Path) -> HostResult<()> {
        lock(&self.0).remove(path);
        Ok(())
    }
    async fn list(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>> {
        let all = lock(&self.0);
        let inside = all.iter().filter(|(path, _)| path.parent() == Some(dir));
        Ok(inside.map(|(path, c)| (path.file_name().unwrap().to_str().unwrap().to_owned(), c.clone())).collect())
    }
}

/// Pull secrets by name.
#[derive(Default)]
struct Secrets(BTreeMap<String, Arc<Secret>>);

impl Secrets {
    fn with(mut self, name: &str, user: &str, password: &str) -> Self {
        let config = json!({"auths": {"reg.test": {"username": user, "password": password}}}).to_string();
        let mut secret = Secret { type_: Some("kubernetes.io/dockerconfigjson".to_owned()), ..Secret::default() };
        secret.metadata.name = Some(name.to_owned());
        secret.metadata.namespace = Some("ns".to_owned());
        secret.metadata.uid = Some(format!("uid-{name}"));
        let bytes = model::k8s_openapi::ByteString(config.into_bytes());
        secret.data = Some([(".dockerconfigjson".to_owned(), bytes)].into());
        self.0.insert(name.to_owned(), Arc::new(secret));
        self
    }
}

#[async_trait]
impl PodObjects for Secrets {
    fn follow(&self, _: &DesiredPod, _: &Arc<PodEntry>) {}
    fn forget(&self, _: &PodUid) {}
    async fn config_map(&self, _: &str, _: &str) -> ObjectResult<Arc<ConfigMap>> {
        unreachable!()
    }
    async fn secret(&self, _: &str, name: &str) -> ObjectResult<Arc<Secret>> {
        let missing = || ObjectError::NotFound(format!("secret {name:?} not found"));
        self.0.get(name).cloned().ok_or_else(missing)
    }
    async fn token(&self, _: &DesiredPod, _: &str, _: Option<i64>) -> ObjectResult<Token> {
        unreachable!()
    }
    async fn service_account(&self, _: &str, _: &str) -> ObjectResult<ServiceAccount> {
        unreachable!()
    }
    async fn trust_anchors(&self, _: &TrustBundles, _: bool) -> ObjectResult<Vec<u8>> {
        unreachable!()
    }
    async fn claim(&self, _: &str, _: &str) -> ObjectResult<PersistentVolumeClaim> {
        unreachable!()
    }
    async fn volume(&self, _: &str) -> ObjectResult<PersistentVolume> {
        unreachable!()
    }
    async fn runtime_handler(&self, _: &str) -> ObjectResult<String> {
        unreachable!()
    }
    async fn service_variables(&self, _: &str, _: bool, _: bool) -> Option<BTreeMap<String, String>> {
        unreachable!()
    }
}

/// The node's own credentials, for every repository.
struct Own(Vec<Credential>);

#[async_trait]
impl NodeCredentials for Own {
    async fn lookup(&self, _: &DesiredPod, repository: &str) -> Vec<Credential> {
        assert_eq!(repository, "reg.test/team/app");
        self.0.clone()
    }
}

#[derive(Default)]
struct Heard(Mutex<Vec<String>>);

impl EventSink for Heard {
    fn event(&self, _: &ObjectReference, kind: &'static str, reason: &str, message: &str) {
        lock(&self.0).push(format!("{kind} {reason} {message}"));
    }
}

struct World {
    runtime: Arc<FakeRuntime>,
    disk: Disk,
    heard: Arc<Heard>,
    images: Images,
}

fn world(policy: Policy, secrets: Secrets, own: Vec<Credential>) -> World {
    let runtime = Arc::new(FakeRuntime::new(1));
    runtime.add_remote_image(IMAGE, Duration::from_secs(1), Some(("u", "right")));
    on(&runtime, Disk::default(), policy, secrets, own)
}

fn on(runtime: &Arc<FakeRuntime>, disk: Disk, policy: Policy, secrets: Secrets, own: Vec<Credential>) -> World {
    let clock = Clock::virtual_from("2026-11-29T12:00:00Z".parse().unwrap());
    let heard = Arc::new(Heard::default());
    let images = Images::new(
        runtime.clone(),
        runtime.clone(),
        clock.clone(),
        Arc::new(Metrics::new().unwrap()),
        Events::to(heard.clone()),
        PullLimits { parallel: Some(1), qps: 0, burst: 0 },
    )
    .with_credentials(Arc::new(secrets), Arc::new(Own(own)))
    .with_records(Records::new(disk.clone(), Path::new("/root"), policy, clock));
    World { runtime: runtime.clone(), disk, heard, images }
}

fn pod(uid: &str, policy: &str, secrets: &[&str]) -> DesiredPod {
    let names: Vec<_> = secrets.iter().map(|name| json!({"name": name})).collect();
    let object: Pod = serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {"imagePullSecrets": names, "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": policy}]},
    }))
    .unwrap();
    DesiredPod::new(object, PodSource::Api).unwrap()
}

impl World {
    async fn ensure(&self, pod: &DesiredPod) -> Result<String, (&'static str, String)> {
        let container = pod.container("c").unwrap().spec;
        let wanted = Wanted {
            image: container.image.as_deref().unwrap(),
            policy: container.image_pull_policy.as_deref().unwrap(),
            container: "c",
        };
        let used = self.images.ensure(pod, &wanted, &v1::PodSandboxConfig::default(), "").await;
        used.map(|u| u.image_ref).map_err(|p| (p.reason, p.message))
    }

    fn files(&self, dir: &str) -> Vec<String> {
        let dir = Path::new("/root/image_manager").join(dir);
        let all = lock(&self.disk.0);
        let inside = all.iter().filter(|(path, _)| path.parent() == Some(&dir));
        inside.map(|(_, content)| String::from_utf8(content.clone()).unwrap()).collect()
    }

    fn pulls(&self) -> usize {
        self.runtime.calls_of("PullImage").len()
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.heard.0))
    }
}

#[tokio::test(start_paused = true)]
async fn every_credential_is_tried_and_the_one_that_worked_is_recorded() {
    let secrets = Secrets::default().with("bad", "u", "wrong").with("good", "u", "right");
    let w = world(Policy::NeverVerifyPreloaded, secrets, Vec::new());
    let id = w.ensure(&pod("a", "IfNotPresent", &["bad", "gone", "good"])).await.unwrap();
    assert_eq!(w.pulls(), 2);
    let record = w.files("pulled").pop().unwrap();
    let hash = Login { username: "u".into(), password: "right".into(), email: String::new() }.hash();
    let want = json!({
        "kind": "ImagePulledRecord", "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "lastUpdatedTime": "2026-11-29T12:00:01Z", "imageRef": id,
        "credentialMapping": {"reg.test/team/app": {"kubernetesSecrets":
            [{"uid": "uid-good", "namespace": "ns", "name": "good", "credentialHash": hash}]}},
    });
    assert_eq!(serde_json::from_str::<serde_json::Value>(&record).unwrap(), want);
    assert!(w.files("pulling").is_empty());
    let events = w.events();
    assert_eq!(
        events[0],
        "Warning FailedToRetrieveImagePullSecret Unable to retrieve some image pull secrets (gone); attempting to pull the image may not succeed."
    );
    assert_eq!(events[1], format!("Normal Pulling Pulling image \"{IMAGE}\""));
    assert!(
        events[2].starts_with(&format!(
            "Normal Pulled Successfully pulled image \"{IMAGE}\" in 1s (1s including waiting). Image size: "
        )),
        "{events:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_the_right_does_not_run_anothers_image() {
    let secrets = || Secrets::default().with("good", "u", "right").with("bad", "u", "wrong");
    let w = world(Policy::NeverVerifyPreloaded, secrets(), Vec::new());
    let id = w.ensure(&pod("owner", "IfNotPresent", &["good"])).await.unwrap();
    assert_eq!(w.pulls(), 1);
    // It has the secret: nothing is pulled.
    assert_eq!(w.ensure(&pod("friend", "IfNotPresent", &["good"])).await, Ok(id.clone()));
    assert_eq!(w.ensure(&pod("friend", "Never", &["good"])).await, Ok(id));
    assert_eq!(w.pulls(), 1);
    w.events();
    // It has none, or a wrong one: it is as if the image was not there.
    let (reason, message) = w.ensure(&pod("thief", "IfNotPresent", &[])).await.unwrap_err();
    assert_eq!((reason, message.contains("authorization failed")), ("ErrImagePull", true), "{message}");
    assert_eq!(w.pulls(), 2);
    let never = w.ensure(&pod("thief", "Never", &["bad"])).await.unwrap_err();
    let text = format!("Container image \"{IMAGE}\" is not present with pull policy of Never");
    assert_eq!(never, ("ErrImageNeverPull", text.clone()));
    let events = w.events();
    assert_eq!(events[0], format!("Normal Pulling Pulling image \"{IMAGE}\""));
    assert!(
        events[1].starts_with(&format!(
            "Warning Failed Failed to pull image \"{IMAGE}\": rpc error: code = Unknown desc = failed to pull"
        )),
        "{events:?}"
    );
    assert_eq!(events[2], format!("Warning ErrImageNeverPull {text}"));
    assert_eq!(w.pulls(), 2);
    assert!(w.files("pulling").is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_nodes_own_credentials_are_everybodys() {
    let own = |password: &str| Credential {
        login: Login { username: "u".into(), password: password.into(), email: String::new() },
        origin: Origin::Node,
    };
    let w = world(Policy::AlwaysVerify, Secrets::default(), vec![own("old"), own("right")]);
    w.ensure(&pod("a", "IfNotPresent", &[])).await.unwrap();
    assert_eq!(w.pulls(), 2);
    assert!(w.files("pulled")[0].contains(r#"{"nodePodsAccessible":true}"#));
    w.ensure(&pod("b", "Never", &[])).await.unwrap();
    assert_eq!(w.pulls(), 2);
    assert!(w.events().last().unwrap().ends_with("already present on machine and can be accessed by the pod"));
}

#[tokio::test(start_paused = true)]
async fn what_was_there_before_is_everybodys_unless_the_policy_says_otherwise() {
    for (policy, want) in [
        (Policy::NeverVerify, true),
        (Policy::NeverVerifyPreloaded, true),
        (Policy::NeverVerifyAllowlisted(vec!["reg.test/team/*".into()]), true),
        (Policy::NeverVerifyAllowlisted(vec!["reg.test/other".into()]), false),
        (Policy::AlwaysVerify, false),
    ] {
        let w = world(policy.clone(), Secrets::default(), Vec::new());
        w.runtime.add_image(IMAGE);
        assert_eq!(w.ensure(&pod("a", "Never", &[])).await.is_ok(), want, "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_was_cut_off_leaves_its_intent_and_the_next_agent_knows() {
    let secrets = || Secrets::default().with("good", "u", "right");
    let w = world(Policy::NeverVerifyPreloaded, secrets(), Vec::new());
    let owner = pod("owner", "IfNotPresent", &["good"]);
    assert!(tokio::time::timeout(Duration::from_millis(500), w.ensure(&owner)).await.is_err());
    assert_eq!(w.files("pulling").len(), 1);
    // The runtime had it all the same.
    w.runtime.add_image(IMAGE);
    assert!(w.ensure(&pod("thief", "Never", &[])).await.is_err());
    let next = on(&w.runtime, w.disk.clone(), Policy::NeverVerifyPreloaded, secrets(), Vec::new());
    next.images.records.as_ref().unwrap().take_over(&*w.runtime).await;
    assert_eq!((next.files("pulling").len(), next.files("pulled").len()), (0, 1));
    assert!(!next.files("pulled")[0].contains("credentialMapping"));
    assert!(next.ensure(&pod("thief", "Never", &[])).await.is_err());
    next.ensure(&owner).await.unwrap();
    assert!(next.files("pulled")[0].contains("uid-good"));
}

#[tokio::test(start_paused = true)]
async fn all_errors_are_told() {
    let secrets = Secrets::default().with("bad", "u", "wrong").with("worse", "x", "y");
    let w = world(Policy::NeverVerifyPreloaded, secrets, Vec::new());
    let a = pod("a", "Always", &["bad", "worse"]);
    let (reason, message) = w.ensure(&a).await.unwrap_err();
    assert_eq!((reason, w.pulls()), ("ErrImagePull", 2));
    // The same text twice is said once.
    assert!(message.starts_with("rpc error: code = Unknown desc = failed to pull"), "{message}");
    let (reason, again) = w.ensure(&a).await.unwrap_err();
    assert_eq!(reason, "ImagePullBackOff");
    assert_eq!(again, format!("Back-off pulling image \"{IMAGE}\": ErrImagePull: {message}"));
    assert_eq!(w.pulls(), 2);
}

#[tokio::test(start_paused = true)]
async fn records_go_with_their_images_unless_a_pull_renews_them() {
    let secrets = || Secrets::default().with("good", "u", "right");
    let w = world(Policy::NeverVerifyPreloaded, secrets(), Vec::new());
    let owner = pod("owner", "IfNotPresent", &["good"]);
    let id = w.ensure(&owner).await.unwrap();
    let collection = w.images.collection();
    assert_eq!(collection.just_used(), std::slice::from_ref(&id));
    let now = || "2026-11-29T12:00:00Z".parse::<Timestamp>().unwrap();
    let after = |seconds| now().saturating_add(SignedDuration::from_secs(seconds)).unwrap();
    // It is there, by whatever name; it was recorded after the look (at second 1).
    collection.prune_records(&[id.clone()].into(), after(100)).await;
    collection.prune_records(&[].into(), after(1)).await;
    assert_eq!(w.files("pulled").len(), 1);
    let mut changed = w.images.changed();
    changed.mark_unchanged();
    collection.remove(&id, "").await.unwrap();
    assert!(changed.has_changed().unwrap());
    collection.prune_records(&[].into(), after(2)).await;
    assert_eq!(w.files("pulled").len(), 0);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(collection.just_used(), [""; 0]);
    // What somebody put there now is nobody's.
    w.runtime.add_image(IMAGE);
    w.ensure(&pod("other", "Never", &[])).await.unwrap();
}
