//! Volumes without a driver's process: what is on disk, what waits, and what the API server says.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use decide::csi::Lifecycle;
use model::api::{Node, Pod};
use model::pod::PodSource;
use serde_json::{Value, json};

use super::*;

/// What the API server says, and what it was told.
#[derive(Default)]
struct World {
    rules: Value,
    attachment: Mutex<Attachment>,
    events: Mutex<Vec<String>>,
}

#[async_trait]
impl Objects for World {
    async fn rules(&self, _: &str) -> Result<DriverRules, String> {
        Ok(DriverRules(serde_json::from_value(self.rules.clone()).ok()))
    }

    async fn attachment(&self, _: &str) -> Result<Attachment, String> {
        Ok(lock(&self.attachment).clone())
    }

    async fn secret(&self, _: &SecretName) -> Result<BTreeMap<String, String>, String> {
        Err("no secret".to_owned())
    }

    async fn token(&self, _: &DesiredPod, _: &str, _: Option<i64>) -> Result<(String, Timestamp), String> {
        Err("no token".to_owned())
    }

    async fn resized(&self, _: &DesiredPod, _: &Growth, _: &ResizeNews) -> Result<(), String> {
        Ok(())
    }

    fn labelled(&self, counted: selinux::Counted, plugin: &str, access_mode: &'static str) {
        lock(&self.events).push(format!("{counted:?} {plugin} {access_mode}"));
    }

    fn event(&self, _: &DesiredPod, _: Option<&Growth>, _: bool, reason: &str, message: &str) {
        lock(&self.events).push(format!("{reason} {message}"));
    }
}

fn pod(uid: &str) -> DesiredPod {
    let pod = json!({"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec": {"containers": []}});
    DesiredPod::new(serde_json::from_value::<Pod>(pod).unwrap(), PodSource::Api).unwrap()
}

fn volume(name: &str) -> CsiVolume {
    let bound =
        json!({"metadata": {"name": name}, "spec": {"csi": {"driver": "d", "volumeHandle": format!("{name}-handle")}}});
    let (bound, claim) = (serde_json::from_value(bound).unwrap(), serde_json::from_value(json!({})).unwrap());
    CsiVolume::claimed(&bound, &claim, false).unwrap().unwrap()
}

struct Rig {
    dir: tempfile::TempDir,
    world: Arc<World>,
    node: watch::Sender<Option<Arc<Node>>>,
    seen: watch::Sender<bool>,
    woken: Arc<AtomicUsize>,
    stop: CancellationToken,
}

impl Rig {
    fn new(rules: Value) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            world: Arc::new(World { rules, ..World::default() }),
            node: watch::Sender::new(None),
            seen: watch::Sender::new(false),
            woken: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    fn layout(&self) -> Layout {
        Layout { root: self.dir.path().to_owned(), proc: "/proc".into(), node: "n".into() }
    }

    /// An agent that starts: it looks at the disk, and begins.
    fn start(&self) -> Volumes {
        let volumes = Volumes::new(self.layout(), false, Drivers::default(), self.world.clone(), self.stop.clone());
        let view = NodeView { node: self.node.subscribe(), reported: volumes.in_use() };
        volumes.start(Some(view), self.seen.subscribe());
        volumes
    }

    fn wish(&self, uid: &str, volume: CsiVolume) -> Wish {
        let woken = self.woken.clone();
        let wake = Arc::new(move || {
            woken.fetch_add(1, Ordering::Relaxed);
        });
        Wish { pod: pod(uid), volume, again: false, wake }
    }

    /// Leaves a staged and published volume on disk, as an agent before left it.
    fn left(&self, uid: &str, name: &str) {
        let (layout, of) = (self.layout(), identity(name));
        for dir in [layout.staging(&of), layout.target(&of, &PodUid::new(uid))] {
            std::fs::create_dir_all(dir).unwrap();
        }
        layout::write(&layout.device_data(&of), &layout.device_content(&of)).unwrap();
        let pod_data = layout.pod_dir(&of, &PodUid::new(uid)).join(layout::DATA);
        layout::write(&pod_data, &layout.pod_content(&of)).unwrap();
    }

    fn has(&self, path: &str) -> bool {
        self.dir.path().join(path).exists()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn identity(name: &str) -> Identity {
    Identity {
        driver: "d".into(),
        handle: format!("{name}-handle"),
        spec_name: name.into(),
        lifecycle: Lifecycle::Persistent,
        block: false,
        label: None,
        dir: None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_can_take_no_more_says_so_after_a_while() {
    let rig = Rig::new(json!({"attachRequired": true, "nodeAllocatableUpdatePeriodSeconds": 10}));
    let volumes = rig.start();
    let wish = || rig.wish("u", volume("pv"));
    assert!(matches!(volumes.mount(wish()).await, Standing::Waits(_)));
    assert_eq!(**volumes.in_use().borrow(), ["kubernetes.io/csi/d^pv-handle"], "before it is attached");
    lock(&rig.world.attachment).exhausted = true;
    tokio::time::sleep(ATTACH - Duration::from_secs(3)).await;
    assert!(matches!(volumes.mount(wish()).await, Standing::Waits(_)), "it may still come");
    assert_eq!(rig.woken.load(Ordering::Relaxed), 0);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(rig.woken.load(Ordering::Relaxed), 1);
    assert_eq!(volumes.mount(wish()).await, Standing::Exhausted);
    // The pod goes, and with it all of it.
    volumes.unmount(&PodUid::new("u")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(volumes.in_use().borrow().is_empty() && lock(&volumes.0.cells).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_sets_no_period_is_waited_for() {
    let rig = Rig::new(json!({"attachRequired": true}));
    let volumes = rig.start();
    lock(&rig.world.attachment).exhausted = true;
    volumes.mount(rig.wish("u", volume("pv"))).await;
    tokio::time::sleep(ATTACH * 3).await;
    assert!(matches!(volumes.mount(rig.wish("u", volume("pv"))).await, Standing::Waits(_)));
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_pod_that_is_gone_waits_for_its_driver() {
    let rig = Rig::new(json!({}));
    rig.left("gone", "pv");
    let volumes = rig.start();
    assert_eq!(**volumes.in_use().borrow(), ["kubernetes.io/csi/d^pv-handle"], "nobody may detach it");
    rig.seen.send_replace(true);
    let told = volumes.unmount(&PodUid::new("gone")).await.unwrap_err();
    assert!(told.contains("driver name d not found in the list of registered CSI drivers"), "{told}");
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(rig.has("pods/gone/volumes/kubernetes.io~csi/pv/mount"), "only its driver takes it down");
    assert_eq!(volumes.in_use().borrow().len(), 1);
    // The next agent finds it as it was.
    let next = rig.start();
    assert_eq!(next.in_use().borrow().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_on_disk_in_pieces_is_taken_as_it_is() {
    let rig = Rig::new(json!({}));
    let data = |path: &str, text: &str| {
        let file = rig.dir.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    let pods = "pods/u/volumes/kubernetes.io~csi";
    data(&format!("{pods}/torn/vol_data.json"), r#"{"driverName":"d","#);
    data(&format!("{pods}/empty/vol_data.json"), "");
    data(&format!("{pods}/nameless/vol_data.json"), r#"{"driverName":"","volumeHandle":"h"}"#);
    data(&format!("{pods}/numbers/vol_data.json"), r#"{"driverName":7}"#);
    data(
        &format!("{pods}/whole/vol_data.json"),
        r#"{"driverName":"d","volumeHandle":"whole-handle","more":"of a newer agent"}"#,
    );
    // Published, and its staging gone: a crash between the two, or a driver that does not stage.
    std::fs::create_dir_all(rig.dir.path().join(format!("{pods}/bare"))).unwrap();
    let volumes = rig.start();
    let known: Vec<String> = lock(&volumes.0.cells).keys().cloned().collect();
    assert_eq!(known, ["kubernetes.io/csi/d^whole-handle"]);
    rig.seen.send_replace(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    for name in ["torn", "empty", "nameless", "numbers", "whole", "bare"] {
        assert!(rig.has(&format!("{pods}/{name}")), "{name} is left as it is");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_of_a_wanted_pod_is_touched_before_its_worker_comes() {
    let rig = Rig::new(json!({"attachRequired": false}));
    rig.left("u", "pv");
    let volumes = rig.start();
    rig.seen.send_replace(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(lock(&rig.world.events).is_empty());
    // Its worker asks for it: the driver is missing, which is told, and what stands stays.
    let standing = volumes.mount(rig.wish("u", volume("pv"))).await;
    let Standing::Failed { reason, message, fresh } = standing else { panic!("{standing:?}") };
    assert!(fresh && reason == "FailedMount" && message.contains("driver name d not found"), "{message}");
    let again = volumes.mount(rig.wish("u", volume("pv"))).await;
    assert!(matches!(again, Standing::Failed { fresh: false, .. }), "a pod is told once of each try: {again:?}");
    assert!(rig.has("pods/u/volumes/kubernetes.io~csi/pv/vol_data.json"));
}

/// Names that the API server may let through, and names in data files.
#[tokio::test(start_paused = true)]
async fn no_name_leads_out_of_the_volumes_directories() {
    let rig = Rig::new(json!({}));
    let volumes = rig.start();
    let mut wishes = Vec::new();
    for name in ["..", ".", "a\0b", ""] {
        wishes.push(CsiVolume { spec_name: name.into(), ..volume("pv") });
    }
    for name in ["..", "../d", "a/b", "/etc", ""] {
        wishes.push(CsiVolume { driver: name.into(), ..volume("pv") });
    }
    let disk = |spec: serde_json::Value| {
        let bound = json!({"metadata": {"name": "pv"}, "spec": spec});
        decide::disk::claimed(&serde_json::from_value(bound).unwrap(), "ns", false).unwrap().unwrap()
    };
    let iqn = "iqn.2026-01.test:a";
    for (portal, interface, iqn) in [
        ("../../../../etc/x", "default", iqn),
        ("10.0.0.1", "../../x", iqn),
        ("10.0.0.1", "a/b", iqn),
        ("10.0.0.1", "default", "iqn.2026-01.test:a/../../../../x"),
    ] {
        wishes
            .push(disk(json!({"iscsi": {"targetPortal": portal, "iscsiInterface": interface, "iqn": iqn, "lun": 0}})));
    }
    wishes.push(disk(json!({"fc": {"wwids": ["../../../x"]}})));
    wishes.push(disk(json!({"fc": {"targetWWNs": ["/x"], "lun": 1}})));
    for wish in wishes {
        let text = format!("{wish:?}");
        let standing = volumes.mount(rig.wish("u", wish)).await;
        let Standing::Failed { message, .. } = standing else { panic!("{text}: {standing:?}") };
        assert!(message.ends_with("cannot be the name of a directory"), "{text}: {message}");
    }
    assert!(lock(&volumes.0.cells).is_empty());
    let fine = disk(json!({"iscsi": {"targetPortal": "[fd00::1]:3260", "iqn": iqn, "lun": 0}}));
    let named = fine.disk.as_ref().unwrap().dir("pv");
    let of = Identity { driver: fine.driver.clone(), dir: Some(named), ..identity("pv") };
    assert_eq!(of.check(), Ok(()));
    // What somebody wrote into a data file.
    let data = |name: &str, text: &str| {
        let file = rig.dir.path().join("pods/u/volumes/kubernetes.io~csi").join(name).join("vol_data.json");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    data("one", r#"{"driverName":"../../../x","volumeHandle":"h","specVolID":"one"}"#);
    data("two", r#"{"driverName":"d","volumeHandle":"h","specVolID":".."}"#);
    data("three", r#"{"driverName":"d","volumeHandle":"../../h","specVolID":"three"}"#);
    let next = rig.start();
    let known: Vec<String> = lock(&next.0.cells).keys().cloned().collect();
    assert_eq!(known, ["kubernetes.io/csi/d^../../h"], "a handle is hashed before it is a name");
}

/// A local directory, and a file that is none.
#[tokio::test]
async fn local_paths_are_looked_at() {
    let rig = Rig::new(json!({}));
    let volumes = rig.start();
    let local = |name: &str, path: &Path, mode: &str| {
        let bound = json!({"metadata": {"name": name}, "spec": {"local": {"path": path}, "volumeMode": mode}});
        decide::disk::claimed(&serde_json::from_value(bound).unwrap(), "ns", false).unwrap().unwrap()
    };
    let file = rig.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (name, path, mode, want) in [
        (
            "lost",
            rig.dir.path().join("lost"),
            "Filesystem",
            "MountVolume.NewMounter initialization failed for volume \"lost\" : path",
        ),
        ("file", file.clone(), "Filesystem", "only directory and block device are supported"),
        ("raw", file.clone(), "Block", "only directory and block device are supported"),
        ("dir", rig.dir.path().to_owned(), "Block", "is no block device"),
    ] {
        let standing = volumes.mount(rig.wish("u", local(name, &path, mode))).await;
        let Standing::Failed { message, .. } = standing else { panic!("{name}: {standing:?}") };
        assert!(message.contains(want), "{name}: {message}");
    }
    volumes.unmount(&PodUid::new("u")).await.unwrap();
    assert!(volumes.in_use().borrow().is_empty(), "no controller attaches what is local");
}
