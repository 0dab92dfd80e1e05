//! Registration, and volumes of every kind beside what the Go kubelet did with them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use e2e::cluster::{Cluster, shape};
use e2e::{NODE, container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::driver::{Driver, attach, claim, run_attached};

/// Long enough that no test sees its end.
pub(crate) const SLEEP: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// Compares with what the Go kubelet gave.
#[track_caller]
fn assert_fixture(name: &str, text: &str) {
    let file = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/csi")).join(format!("{name}.txt"));
    if std::env::var_os("RUBELET_E2E_RECORD").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        return;
    }
    let expected = fs::read_to_string(&file).unwrap();
    assert!(expected == text, "not as in {}:\n{text}\nbut\n{expected}", file.display());
}

fn csi_node(cluster: &Cluster) -> Value {
    let node = cluster.api().get(&format!("/apis/storage.k8s.io/v1/csinodes/{NODE}")).unwrap();
    json!({"annotations": node["metadata"]["annotations"], "owners": node["metadata"]["ownerReferences"],
        "spec": node["spec"]})
}

pub(crate) fn drivers_come_and_go(cluster: &mut Cluster) {
    // Sockets that answer nothing, or nonsense, keep nobody waiting.
    let registry = cluster.node.root().join("plugins_registry");
    let silent = registry.join("silent.sock");
    let _silent = UnixListener::bind(&silent).unwrap();
    fs::write(registry.join("file.sock"), "no socket").unwrap();
    let spec = json!({"attachRequired": false});
    let old = Driver::start(cluster, "old.csi.test", &spec, &["--versions", "0.3.0"]);
    let other = Driver::start(cluster, "other.csi.test", &spec, &["--kind", "TeaPlugin"]);
    let mut plain =
        Driver::start(cluster, "plain.csi.test", &spec, &["--topology", "csi.test/zone=z1", "--limit", "7"]);
    let bare = Driver::start(cluster, "bare.csi.test", &spec, &[]);
    plain.wait_registered(cluster);
    bare.wait_registered(cluster);
    let marks = |c: &Cluster| {
        let node = c.get_node();
        json!({"zone": node["metadata"]["labels"]["csi.test/zone"],
            "ids": node["metadata"]["annotations"]["csi.volume.kubernetes.io/nodeid"]})
    };
    let both = r#"{"bare.csi.test":"csi-node","plain.csi.test":"csi-node"}"#;
    wait_until("the node names its drivers", seconds(20), || (marks(cluster)["ids"] == both).then_some(()));
    let mut told = csi_node(cluster);
    told["spec"]["drivers"].as_array_mut().unwrap().sort_by_key(|d| d["name"].as_str().map(str::to_owned));
    let mut text = format!("{:#}\n{:#}\n", shape(&told), marks(cluster));
    for driver in [&plain, &old, &other] {
        let answer = wait_until("the plugin is told", seconds(20), || {
            driver.calls().into_iter().find(|c| c["method"] == "NotifyRegistrationStatus")
        });
        let registered = answer["request"]["plugin_registered"] == true;
        assert_eq!(registered, driver.name == "plain.csi.test", "{answer}");
        text.push_str(&format!("{} registered: {registered}\n", driver.name));
    }

    plain.uninstall();
    wait_until("the driver is gone", seconds(20), || {
        let left = csi_node(cluster)["spec"]["drivers"].as_array().map_or(0, Vec::len);
        (left == 1 && marks(cluster)["ids"] == r#"{"bare.csi.test":"csi-node"}"#).then_some(())
    });
    text.push_str(&format!("without: {:#}\n", marks(cluster)));
    plain.run();
    plain.wait_registered(cluster);
    wait_until("the node names it again", seconds(20), || (marks(cluster)["ids"] == both).then_some(()));
    // The node agent comes back, and so do they.
    let before = plain.calls().len();
    cluster.node.restart();
    wait_until("it is registered with the next agent", seconds(20), || {
        plain.calls()[before..].iter().any(|c| c["method"] == "NotifyRegistrationStatus").then_some(())
    });
    assert_fixture("registration", &text);
    for file in [&silent, &registry.join("file.sock")] {
        fs::remove_file(file).unwrap();
    }
}

/// Paths, UIDs and tokens replaced.
fn plain(cluster: &Cluster, uid: &str, text: &str) -> String {
    text.replace(cluster.node.root().to_str().unwrap(), "ROOT").replace(uid, "UID")
}

/// The calls that change something, each once, as the driver was asked.
fn calls(cluster: &Cluster, uid: &str, driver: &Driver) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for mut call in driver.calls() {
        let method = call["method"].as_str().unwrap().to_owned();
        if !["NodeStage", "NodeUnstage", "NodePublish", "NodeUnpublish", "NodeExpand"]
            .iter()
            .any(|m| method.starts_with(m))
            || method.ends_with('>')
        {
            continue;
        }
        let tokens = &mut call["request"]["volume_context"]["csi.storage.k8s.io/serviceAccount.tokens"];
        if let Some(text) = tokens.as_str() {
            let parsed: Value = serde_json::from_str(text).unwrap();
            let token = &parsed["vault"];
            assert!(token["token"].as_str().unwrap().split('.').count() == 3, "{text}");
            assert!(token["expirationTimestamp"].as_str().unwrap().ends_with('Z'), "{text}");
            *tokens = json!("TOKENS");
        } else if tokens.is_null()
            && let Some(context) = call["request"]["volume_context"].as_object_mut()
        {
            context.remove("csi.storage.k8s.io/serviceAccount.tokens");
        }
        // The handle of an inline volume is made of the pod's UID.
        if call["request"]["volume_id"].as_str().unwrap().starts_with("csi-") {
            call["request"]["volume_id"] = json!("INLINE");
        }
        all.insert(plain(cluster, uid, &format!("{} {call}", driver.name)));
    }
    all
}

/// Everything of drivers on disk: kind, mode, owner, path; content of data files.
fn tree(cluster: &Cluster, uid: &str) -> String {
    fn visit(dir: &Path, lines: &mut Vec<String>) {
        for entry in fs::read_dir(dir).into_iter().flatten() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let kind = match meta.file_type() {
                t if t.is_dir() => "dir",
                t if t.is_symlink() => "link",
                t if t.is_block_device() => "block",
                _ => "file",
            };
            let mut line = format!("{} {kind} {:o} {}", path.display(), meta.permissions().mode() & 0o7777, meta.gid());
            if path.ends_with("vol_data.json") {
                let mut data: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                if data["volumeLifecycleMode"] == "Ephemeral" {
                    (data["volumeHandle"], data["attachmentID"]) = (json!("INLINE"), json!("INLINE"));
                }
                line.push_str(&format!(" {data}"));
            }
            lines.push(line);
            if meta.is_dir() {
                visit(&path, lines);
            }
        }
    }
    let mut lines = Vec::new();
    let root = cluster.node.root();
    for dir in ["plugins".to_owned(), format!("pods/{uid}/volumes"), format!("pods/{uid}/volumeDevices")] {
        visit(&root.join(dir), &mut lines);
    }
    // Of a driver that does not stage, the Go kubelet makes a directory on the node, and leaves it there.
    lines.retain(|l| l.contains("csi") && !l.contains("plugins/kubernetes.io/csi/bare.csi.test"));
    lines.sort();
    plain(cluster, uid, &(lines.join("\n") + "\n"))
}

/// Mount points below the root directory that a driver made, how often each.
pub(crate) fn mounts(cluster: &Cluster) -> Vec<String> {
    let root = cluster.node.root();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut all: Vec<String> = table
        .lines()
        .filter_map(|l| l.split(' ').nth(4))
        .filter(|m| Path::new(m).starts_with(&root) && (m.contains("csi") || m.contains("volume-subpaths")))
        .map(str::to_owned)
        .collect();
    all.sort();
    all
}

/// What is left of any driver, here and at the API server.
fn left(cluster: &Cluster) -> Vec<String> {
    let mut left: Vec<String> = attach(cluster).iter().map(|a| format!("attachment {a}")).collect();
    left.extend(mounts(cluster).iter().map(|m| format!("mount {m}")));
    let plugin = cluster.node.root().join("plugins/kubernetes.io/csi");
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    for dir in entries(&plugin).iter().flat_map(|driver| entries(driver)) {
        // The shared directories of block volumes stay, empty.
        let shared = dir.ends_with("volumeDevices/staging") || dir.ends_with("volumeDevices/publish");
        if !shared || !entries(&dir).is_empty() {
            left.push(format!("directory {}", dir.display()));
        }
    }
    let status = cluster.get_node()["status"].clone();
    for list in ["volumesInUse", "volumesAttached"] {
        if !status[list].is_null() {
            left.push(format!("{list} {}", status[list]));
        }
    }
    left
}

/// Nothing of any driver is left.
#[track_caller]
pub(crate) fn assert_nothing_left(cluster: &Cluster) {
    let mut last = Vec::new();
    let gone = rig::poll(seconds(60), || {
        last = left(cluster);
        last.is_empty()
    });
    assert!(gone, "left after 60 s: {last:#?}");
}

pub(crate) fn as_by_the_go_kubelet(cluster: &mut Cluster) {
    let plain_driver = Driver::start(
        cluster,
        "plain.csi.test",
        &json!({"attachRequired": false, "podInfoOnMount": true, "fsGroupPolicy": "File", "requiresRepublish": true,
            "volumeLifecycleModes": ["Persistent", "Ephemeral"], "tokenRequests": [{"audience": "vault"}]}),
        &[],
    );
    let att = Driver::start(
        cluster,
        "att.csi.test",
        &json!({"attachRequired": true}),
        &["--capabilities", "stage,stats,expand,multi-writer"],
    );
    let bare = Driver::start(cluster, "bare.csi.test", &json!({"attachRequired": false}), &["--capabilities", "group"]);
    for driver in [&plain_driver, &att, &bare] {
        driver.wait_registered(cluster);
    }
    cluster.create("secrets", &json!({"metadata": {"name": "s"}, "stringData": {"user": "me"}}));
    let secret = json!({"namespace": "default", "name": "s"});
    let secrets =
        json!({"csi": {"nodePublishSecretRef": secret, "nodeStageSecretRef": secret}, "mountOptions": ["noatime"]});
    claim(cluster, "plain.csi.test", "a", &secrets);
    claim(cluster, "att.csi.test", "b", &json!({"accessModes": ["ReadWriteOncePod"]}));
    claim(cluster, "bare.csi.test", "many", &json!({"accessModes": ["ReadWriteMany"]}));
    claim(cluster, "plain.csi.test", "ro", &json!({"accessModes": ["ReadOnlyMany"]}));
    let main = with(
        container("c", SLEEP),
        json!({"volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b"},
            {"name": "i", "mountPath": "/i"}, {"name": "many", "mountPath": "/many"}, {"name": "ro", "mountPath": "/ro"},
            {"name": "a", "mountPath": "/part", "subPath": "deep/part"}]}),
    );
    let mut p = pod("full", [main]);
    p["spec"]["securityContext"] = json!({"fsGroup": 1234});
    p["spec"]["serviceAccountName"] = json!("default");
    p["spec"]["terminationGracePeriodSeconds"] = json!(2);
    p["spec"]["volumes"] = json!([
        {"name": "a", "persistentVolumeClaim": {"claimName": "a"}}, {"name": "b", "persistentVolumeClaim": {"claimName": "b"}},
        {"name": "many", "persistentVolumeClaim": {"claimName": "many"}},
        {"name": "ro", "persistentVolumeClaim": {"claimName": "ro", "readOnly": true}},
        {"name": "i", "csi": {"driver": "plain.csi.test", "volumeAttributes": {"size": "1"}}}]);
    cluster.run(&p);
    // The node says that it is to be used before it is attached, and waits for that.
    wait_until("the volume is in use", seconds(20), || {
        (cluster.get_node()["status"]["volumesInUse"] == json!(["kubernetes.io/csi/att.csi.test^b-handle"]))
            .then_some(())
    });
    let running = run_attached(cluster, "full");
    let uid = running["metadata"]["uid"].as_str().unwrap().to_owned();
    let said = cluster.exec(&running, "c", &["sh", "-c", "echo x > /part/f && cat /a/deep/part/f; touch /ro/f; id -G"]);
    assert_eq!(said.lines().collect::<Vec<_>>(), ["x", "0 1234"]);
    let files = tree(cluster, &uid);

    // Growth while it is used.
    let api = cluster.api();
    api.merge("/api/v1/persistentvolumes/pv-a", &json!({"spec": {"capacity": {"storage": "2Gi"}}})).unwrap();
    let pending = json!({"status": {"allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"},
        "conditions": [{"type": "FileSystemResizePending", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let path = "/api/v1/namespaces/default/persistentvolumeclaims/a";
    api.merge(&format!("{path}/status"), &pending).unwrap();
    let status = wait_until("the claim has grown", seconds(30), || {
        let status = api.get(path).unwrap()["status"].clone();
        (status["capacity"]["storage"] == "2Gi").then_some(status)
    });
    let grown = "MountVolume.NodeExpandVolume succeeded for volume \"pv-a\" e2e".to_owned();
    for about in ["full", "a"] {
        wait_until("the growth is told", seconds(10), || {
            cluster.events(about).contains(&("FileSystemResizeSuccessful".to_owned(), grown.clone())).then_some(())
        });
    }
    // Gone through again and again, for new tokens.
    let published = |handle: &str| plain_driver.answered("NodePublishVolume", handle).len();
    let before = published("a-handle");
    wait_until("it is published again", seconds(20), || (published("a-handle") > before).then_some(()));

    // Across a restart of the agent nothing is mounted twice, and the attachment stays in use.
    let stood = mounts(cluster);
    assert_eq!(stood.len(), stood.iter().collect::<BTreeSet<_>>().len(), "{stood:#?}");
    cluster.node.restart();
    let before = published("a-handle");
    wait_until("it is published by the next agent", seconds(20), || (published("a-handle") > before).then_some(()));
    assert_eq!(mounts(cluster), stood);
    wait_until("the attached volume is in use", seconds(20), || {
        (cluster.get_node()["status"]["volumesInUse"] == json!(["kubernetes.io/csi/att.csi.test^b-handle"]))
            .then_some(())
    });
    let same = cluster.pod("full").unwrap();
    assert_eq!(same["status"]["containerStatuses"][0]["restartCount"], 0);

    cluster.delete("full");
    cluster.wait_gone("full", seconds(60));
    wait_until("the volumes are unstaged", seconds(30), || {
        let unstaged = |d: &Driver, handle: &str| !d.answered("NodeUnstageVolume", handle).is_empty();
        (unstaged(&plain_driver, "a-handle") && unstaged(&plain_driver, "ro-handle") && unstaged(&att, "b-handle"))
            .then_some(())
    });
    if std::env::var_os("RUBELET_E2E_RECORD").is_none() {
        // The Go kubelet leaves the directory of a volume that was not staged.
        assert_nothing_left(cluster);
    }
    let mut asked = calls(cluster, &uid, &plain_driver);
    asked.extend(calls(cluster, &uid, &att));
    asked.extend(calls(cluster, &uid, &bare));
    let text = format!("{files}\n{:#}\n\n{}\n", shape(&status), asked.into_iter().collect::<Vec<_>>().join("\n"));
    assert_fixture("volumes", &text);
    // The data of a volume are its driver's, whatever becomes of pods.
    assert_eq!(fs::read_to_string(plain_driver.data.join("volumes/a-handle/deep/part/f")).unwrap(), "x\n");
}

pub(crate) fn a_block_volume_is_a_device(cluster: &mut Cluster) {
    let driver = Driver::start(cluster, "block.csi.test", &json!({"attachRequired": false}), &[]);
    driver.wait_registered(cluster);
    claim(cluster, "block.csi.test", "raw", &json!({"volumeMode": "Block"}));
    let main = with(container("c", SLEEP), json!({"volumeDevices": [{"name": "raw", "devicePath": "/dev/raw"}]}));
    let mut p = pod("block", [main]);
    p["spec"]["terminationGracePeriodSeconds"] = json!(1);
    p["spec"]["volumes"] = json!([{"name": "raw", "persistentVolumeClaim": {"claimName": "raw"}}]);
    cluster.run(&p);
    let running = cluster.wait_running("block");
    let uid = running["metadata"]["uid"].as_str().unwrap();
    let listed = cluster.exec(&running, "c", &["ls", "-l", "/dev/raw"]);
    assert!(listed.starts_with('b') && listed.contains("7,   0"), "{listed}");
    let root = cluster.node.root();
    let devices = root.join("plugins/kubernetes.io/csi/volumeDevices");
    let link = root.join("pods").join(uid).join("volumeDevices/kubernetes.io~csi/pv-raw");
    assert_eq!(fs::read_link(&link).unwrap(), devices.join("publish/pv-raw").join(uid));
    assert_eq!(mounts(cluster), [devices.join("pv-raw/dev").join(uid).display().to_string()]);
    let global = devices.join("pv-raw/dev").display().to_string();
    let told = format!("MapVolume.MapPodDevice succeeded for volume \"pv-raw\" globalMapPath \"{global}\"");
    wait_until("it is told", seconds(10), || {
        cluster.events("block").contains(&("SuccessfulMountVolume".to_owned(), told.clone())).then_some(())
    });
    cluster.node.restart();
    wait_until("the next agent asks for it again", seconds(20), || {
        (driver.answered("NodePublishVolume", "raw-handle").len() > 1).then_some(())
    });
    cluster.delete("block");
    cluster.wait_gone("block", seconds(60));
    assert_nothing_left(cluster);
}

pub(crate) fn limits_change(cluster: &mut Cluster) {
    let spec = json!({"attachRequired": true, "nodeAllocatableUpdatePeriodSeconds": 10});
    let driver = Driver::start(cluster, "narrow.csi.test", &spec, &["--limit", "7"]);
    let count = |entry: &Value| entry["allocatable"]["count"].clone();
    assert_eq!(count(&driver.wait_registered(cluster)), 7);
    fs::write(driver.data.join("limit"), "4").unwrap();
    wait_until("the CSINode has the new limit", seconds(60), || {
        (count(&driver.wait_registered(cluster)) == 4).then_some(())
    });
    // An attachment that fails for want of room: the pod cannot stay here, and the driver is asked again at once.
    claim(cluster, "narrow.csi.test", "surplus", &json!({}));
    cluster.run(&crate::faults::one("surplus", "surplus"));
    let path = "/apis/storage.k8s.io/v1/volumeattachments";
    wait_until("it is being attached", seconds(60), || {
        let all = cluster.api().list(path).unwrap();
        let name = all.iter().find(|a| a["spec"]["attacher"] == "narrow.csi.test")?["metadata"]["name"].clone();
        let full = json!({"status": {"attached": false, "attachError": {"time": "2026-01-01T00:00:00Z", "message": "full", "errorCode": 8}}});
        cluster.api().merge(&format!("{path}/{}/status", name.as_str()?), &full).ok()
    });
    let refused = wait_until("the pod is refused", seconds(180), || {
        cluster.pod("surplus").filter(|p| p["status"]["phase"] == "Failed")
    });
    let status = &refused["status"];
    assert_eq!(status["reason"], "VolumeAttachmentLimitExceeded");
    let text = "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[v], unattached volumes=[v], failed to \
        process volumes=[]: context deadline exceeded";
    assert_eq!(status["message"], format!("Pod was rejected: {text}"));
    wait_until("it is told", seconds(20), || {
        let told = ("VolumeAttachmentLimitExceeded".to_owned(), text.to_owned());
        cluster.events("surplus").contains(&told).then_some(())
    });
    cluster.delete("surplus");
    cluster.wait_gone("surplus", seconds(60));
    assert_nothing_left(cluster);
}

/// Kubernetes' own driver for tests, built from its Go module: another hand's reading of the interface.
pub(crate) fn mock_driver(cluster: &mut Cluster) {
    let program = rig::lab().join("bin/mock-csi-driver");
    if !program.is_file() {
        println!("skipped: not built: lab/build-reference mock-csi-driver");
        return;
    }
    let object = json!({"metadata": {"name": "mock.csi.test"}, "spec": {"attachRequired": false}});
    cluster.api().delete("/apis/storage.k8s.io/v1/csidrivers/mock.csi.test", &Value::Null).unwrap();
    cluster.api().create("/apis/storage.k8s.io/v1/csidrivers", &object).unwrap();
    let (socket, registry) =
        (cluster.node.dir().join("mock.sock"), cluster.node.root().join("plugins_registry/mock.sock"));
    let log_file = cluster.node.dir().join("mock.log");
    let mut child = std::process::Command::new(program)
        .arg("--socket")
        .arg(&socket)
        .arg("--registry")
        .arg(&registry)
        .stderr(fs::File::create(&log_file).unwrap())
        .spawn()
        .unwrap();
    let log = || fs::read_to_string(&log_file).unwrap_or_default();
    wait_until("it is told that it is registered", seconds(30), || log().contains("registered: true").then_some(()));
    // It knows the volumes 1 to 3.
    let mock = json!({"csi": {"volumeHandle": "1", "fsType": "ext4"}});
    claim(cluster, "mock.csi.test", "mock", &mock);
    cluster.run(&crate::faults::one("mock", "mock"));
    cluster.wait_running("mock");
    crate::growth::grow(cluster, "mock", "200Gi");
    crate::growth::wait_grown(cluster, "mock", "200Gi");
    let summary = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{NODE}/proxy/stats/summary")]);
    assert!(summary.status.success(), "{}", String::from_utf8_lossy(&summary.stderr));
    cluster.delete("mock");
    cluster.wait_gone("mock", seconds(60));
    assert_nothing_left(cluster);
    wait_until("it is unstaged", seconds(30), || log().contains("NodeUnstageVolume").then_some(()));
    let _ = child.kill();
    let _ = child.wait();
    let _ = fs::remove_file(&registry);
    let text = log();
    for call in [
        "NodeGetInfo",
        "NodeGetCapabilities",
        "NodeStageVolume",
        "NodePublishVolume",
        "NodeExpandVolume",
        "NodeUnpublishVolume",
    ] {
        assert!(text.contains(call), "{call} is missing:\n{text}");
    }
    assert!(!text.contains("rpc error"), "it refused something:\n{text}");
}
