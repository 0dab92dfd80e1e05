//! What pods take from the API server: files and owners in volumes, claims, variables, pull credentials.
//!
//! The fixtures are what the Go kubelet 1.36.1 gave: `RUBELET_BIN=~/.cache/rubelet-lab/bin/kubelet RUBELET_E2E_RECORD=1` writes them anew.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use e2e::cluster::{Cluster, Test, main as harness};
use e2e::{NODE, Registry, Withdrawn, container, pod, seconds, status, wait_until, with};
use serde_json::{Value, json};

fn main() -> ExitCode {
    const TESTS: &[Test] = &[
        ("volumes_lie_on_disk_as_the_go_kubelets", volumes_lie_on_disk_as_the_go_kubelets),
        ("modes_and_owners_are_the_go_kubelets", modes_and_owners_are_the_go_kubelets),
        ("faults_of_objects_are_told", faults_of_objects_are_told),
        ("a_change_arrives_in_all_volumes_at_once", a_change_arrives_in_all_volumes_at_once),
        ("claims_lead_to_directories_of_the_node", claims_lead_to_directories_of_the_node),
        ("a_claim_that_is_not_bound_is_told", a_claim_that_is_not_bound_is_told),
        ("a_private_image_needs_its_secret", a_private_image_needs_its_secret),
    ];
    harness(TESTS)
}

/// Long enough that no test sees its end.
const SLEEP: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// Compares with what the Go kubelet gave.
#[track_caller]
fn assert_fixture(name: &str, text: &str) {
    let file =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/objects")).join(format!("{name}.txt"));
    if std::env::var_os("RUBELET_E2E_RECORD").is_some() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        return;
    }
    let expected = fs::read_to_string(&file).unwrap();
    assert!(expected == text, "not as in {}:\n{text}\nbut\n{expected}", file.display());
}

/// Everything below a directory: path, mode, owner, group, target of a link. Names with a time in them are told as `VERSION`.
fn tree(root: &Path) -> String {
    fn visit(root: &Path, dir: &Path, lines: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let plain = |text: &str| {
                let parts = text.split('/').map(|p| if p.starts_with("..2") { "VERSION" } else { p });
                parts.collect::<Vec<_>>().join("/")
            };
            let mode = meta.permissions().mode() & 0o7777;
            let mut line = format!(
                "{} {mode:o} {}:{}",
                plain(path.strip_prefix(root).unwrap().to_str().unwrap()),
                meta.uid(),
                meta.gid()
            );
            if meta.is_symlink() {
                line.push_str(&format!(" -> {}", plain(fs::read_link(&path).unwrap().to_str().unwrap())));
            }
            lines.push(line);
            if meta.is_dir() {
                visit(root, &path, lines);
            }
        }
    }
    let mut lines = Vec::new();
    visit(root, root, &mut lines);
    lines.sort();
    lines.join("\n") + "\n"
}

fn objects(cluster: &Cluster, name: &str) {
    cluster.create(
        "configmaps",
        &json!({"metadata": {"name": name}, "data": {"a": "1", "b": "2"}, "binaryData": {"raw": "AAEC"}, "immutable": name == "fixed"}),
    );
    cluster.create("secrets", &json!({"metadata": {"name": name}, "stringData": {"key": "s3cret"}}));
}

/// A pod with volumes of all kinds of files.
fn full(name: &str, objects: &str) -> Value {
    let kinds = ["plain", "picked", "hidden", "all", "info"];
    let mounts: Vec<Value> = kinds.iter().map(|v| json!({"name": v, "mountPath": format!("/v/{v}")})).collect();
    let mut manifest = pod(name, [with(container("c", SLEEP), json!({"volumeMounts": mounts}))]);
    manifest["metadata"]["labels"] = json!({"app": "x"});
    manifest["spec"]["volumes"] = json!([
        {"name": "plain", "configMap": {"name": objects}},
        {"name": "picked", "configMap": {"name": objects, "defaultMode": 0o640,
            "items": [{"key": "a", "path": "dir/deep/a"}, {"key": "raw", "path": "raw", "mode": 0o400}]}},
        {"name": "hidden", "secret": {"secretName": objects, "defaultMode": 0o400}},
        {"name": "all", "projected": {"defaultMode": 0o444, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600, "audience": "me"}},
            {"configMap": {"name": objects, "items": [{"key": "b", "path": "b"}]}},
            {"secret": {"name": objects}},
            {"secret": {"name": "nowhere", "optional": true}},
            {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        ]}},
        {"name": "info", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]);
    manifest
}

fn volumes_lie_on_disk_as_the_go_kubelets(cluster: &mut Cluster) {
    objects(cluster, "fixed");
    cluster.run(&full("laid", "fixed"));
    let laid = cluster.wait_running("laid");
    let dir = cluster.node.root().join("pods").join(status::uid(&laid));
    assert_fixture("layout", &format!("{}{}", tree(&dir.join("volumes")), tree(&dir.join("plugins"))));
    cluster.delete("laid");
    cluster.wait_gone("laid", seconds(30));
    wait_until("its directory is gone", seconds(60), || (!dir.exists()).then_some(()));
}

fn modes_and_owners_are_the_go_kubelets(cluster: &mut Cluster) {
    objects(cluster, "owned");
    let contexts = [
        ("user", json!({"runAsUser": 1000})),
        ("group", json!({"fsGroup": 2000})),
        ("both", json!({"runAsUser": 1000, "fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch"})),
    ];
    for (name, context) in &contexts {
        let mut manifest = full(name, "owned");
        manifest["spec"]["securityContext"] = context.clone();
        cluster.run(&manifest);
    }
    let mut text = String::new();
    for (name, _) in &contexts {
        let running = cluster.wait_running(name);
        let dir = cluster.node.root().join("pods").join(status::uid(&running)).join("volumes");
        text.push_str(&format!("{name}\n{}", tree(&dir)));
        let read = cluster.exec(&running, "c", &["sh", "-c", "cut -c1-2 /v/all/token; cat /v/plain/a"]);
        assert_eq!(read, "ey\n1", "{name}");
    }
    assert_fixture("owners", &text);
}

fn faults_of_objects_are_told(cluster: &mut Cluster) {
    objects(cluster, "partial");
    let key = |kind: &str| json!({"name": "X", "valueFrom": {kind: {"name": "partial", "key": "no"}}});
    let volume = |name: &str, volume: Value| {
        let mut manifest =
            pod(name, [with(container("c", SLEEP), json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}))]);
        manifest["spec"]["volumes"] = json!([with(json!({"name": "v"}), volume)]);
        cluster.run(&manifest);
    };
    for (name, env) in [("no-key", key("configMapKeyRef")), ("no-secret-key", key("secretKeyRef"))] {
        cluster.run(&pod(name, [with(container("c", SLEEP), json!({"env": [env]}))]));
    }
    volume("no-file", json!({"configMap": {"name": "partial", "items": [{"key": "no", "path": "no"}]}}));
    volume("no-secret-file", json!({"secret": {"secretName": "partial", "items": [{"key": "no", "path": "no"}]}}));
    volume(
        "nothing",
        json!({"projected": {"sources": [{"configMap": {"name": "nowhere"}}, {"secret": {"name": "nowhere"}}]}}),
    );
    for (name, message) in [
        ("no-key", "couldn't find key no in ConfigMap default/partial"),
        ("no-secret-key", "couldn't find key no in Secret default/partial"),
    ] {
        let waits = cluster.wait("it waits", name, |p| status::waiting(p, "c") == "CreateContainerConfigError");
        assert_eq!(status::of(&waits, "c")["state"]["waiting"]["message"], message);
        let told = ("Failed".to_owned(), format!("Error: {message}"));
        wait_until("it is told", seconds(30), || cluster.events(name).contains(&told).then_some(()));
    }
    for (name, message) in [
        ("no-file", "configmap references non-existent config key: no"),
        ("no-secret-file", "references non-existent secret key: no"),
        ("nothing", "[configmap \"nowhere\" not found, secret \"nowhere\" not found]"),
    ] {
        let text = format!("MountVolume.SetUp failed for volume \"v\" : {message}");
        let told = ("FailedMount".to_owned(), text);
        wait_until(&format!("it is told of {name}"), seconds(30), || {
            cluster.events(name).contains(&told).then_some(())
        });
    }
    // What was missing comes.
    let more = json!({"data": {"no": "here"}});
    cluster.api().merge("/api/v1/namespaces/default/configmaps/partial", &more).unwrap();
    cluster.wait_running("no-file");
    cluster.wait_running("no-key");
}

fn a_change_arrives_in_all_volumes_at_once(cluster: &mut Cluster) {
    objects(cluster, "changing");
    cluster.run(&full("watching", "changing"));
    let watching = cluster.wait_running("watching");
    let read = |script: &str| cluster.exec(&watching, "c", &["sh", "-c", script]);
    let merge = |path: &str, fields: Value| {
        cluster.api().merge(&format!("/api/v1/namespaces/default/{path}/changing"), &fields).unwrap()
    };
    let token = read("cat /v/all/token");
    merge("configmaps", json!({"data": {"a": "new", "c": "more"}}));
    merge("secrets", json!({"stringData": {"key": "other"}}));
    wait_until("the changes arrive", seconds(90), || {
        let seen = read("cat /v/plain/a /v/picked/dir/deep/a /v/hidden/key /v/all/key; ls /v/plain");
        (seen == "newnewotherothera\nb\nc\nraw\n").then_some(())
    });
    merge("configmaps", json!({"data": {"b": null}}));
    wait_until("the removal arrives", seconds(90), || (read("ls /v/plain") == "a\nc\nraw\n").then_some(()));
    // A source whose key is gone keeps the volume as it was, and is told.
    assert_eq!(read("cat /v/all/b"), "2");
    let text = "MountVolume.SetUp failed for volume \"all\" : configmap references non-existent config key: b";
    let told = ("FailedMount".to_owned(), text.to_owned());
    wait_until("the lost key is told", seconds(30), || cluster.events("watching").contains(&told).then_some(()));
    assert_eq!(read("cat /v/all/token"), token);
    assert_eq!(cluster.pod("watching").unwrap()["status"]["containerStatuses"][0]["restartCount"], 0);
}

/// A volume that only the claim of the same name gets.
fn claim(cluster: &Cluster, name: &str, source: Value) {
    let mut volume = json!({"metadata": {"name": name}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": "default", "name": name},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions":
            [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]}]}},
    }});
    for (key, value) in source.as_object().unwrap() {
        volume["spec"][key] = value.clone();
    }
    cluster.api().create("/api/v1/persistentvolumes", &volume).unwrap();
    cluster.create("persistentvolumeclaims", &claim_object(name, name));
    wait_until("the claim is bound", seconds(60), || {
        let path = format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}");
        (cluster.api().get(&path).unwrap()["status"]["phase"] == "Bound").then_some(())
    });
}

fn claim_object(name: &str, volume: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
        "resources": {"requests": {"storage": "1Gi"}}}})
}

fn claims_lead_to_directories_of_the_node(cluster: &mut Cluster) {
    let disk = cluster.node.dir().join("disk");
    for sub in ["local", "path"] {
        fs::create_dir_all(disk.join(sub)).unwrap();
        fs::write(disk.join(sub).join("data"), sub).unwrap();
    }
    claim(cluster, "local-pv", json!({"local": {"path": disk.join("local")}}));
    claim(cluster, "path-pv", json!({"hostPath": {"path": disk.join("path")}}));
    claim(cluster, "lost-pv", json!({"local": {"path": disk.join("lost")}}));
    let mut manifest = pod(
        "claiming",
        [with(
            container("c", SLEEP),
            json!({"volumeMounts": [{"name": "l", "mountPath": "/l"}, {"name": "p", "mountPath": "/p"}]}),
        )],
    );
    manifest["spec"]["securityContext"] = json!({"fsGroup": 3000});
    manifest["spec"]["volumes"] = json!([
        {"name": "l", "persistentVolumeClaim": {"claimName": "local-pv"}},
        {"name": "p", "persistentVolumeClaim": {"claimName": "path-pv", "readOnly": true}},
    ]);
    cluster.run(&manifest);
    let claiming = cluster.wait_running("claiming");
    let sh = |script: &str| cluster.exec(&claiming, "c", &["sh", "-c", script]);
    assert_eq!(
        sh("cat /l/data /p/data; echo new > /l/written; echo x > /p/written 2>/dev/null || echo refused"),
        "localpathrefused\n"
    );
    assert_eq!(fs::read_to_string(disk.join("local/written")).unwrap(), "new\n");
    let dir = cluster.node.root().join("pods").join(status::uid(&claiming));
    assert_fixture("claims", &format!("{}disk\n{}", tree(&dir.join("volumes")), tree(&disk)));

    manifest["metadata"]["name"] = json!("lost");
    manifest["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = json!("lost-pv");
    cluster.run(&manifest);
    let text = format!(
        "MountVolume.NewMounter initialization failed for volume \"lost-pv\" : path {:?} does not exist",
        disk.join("lost")
    );
    wait_until("the missing path is told", seconds(60), || {
        cluster.events("lost").contains(&("FailedMount".to_owned(), text.clone())).then_some(())
    });

    cluster.delete("claiming");
    cluster.wait_gone("claiming", seconds(30));
    wait_until("the pod's directory is gone", seconds(60), || (!dir.exists()).then_some(()));
    assert_eq!(fs::read_to_string(disk.join("local/data")).unwrap(), "local", "what is claimed stays");
}

fn a_claim_that_is_not_bound_is_told(cluster: &mut Cluster) {
    cluster.create("persistentvolumeclaims", &claim_object("unbound", "nowhere"));
    let mut manifest =
        pod("unbound", [with(container("c", SLEEP), json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}))]);
    manifest["spec"]["volumes"] = json!([
        {"name": "v", "persistentVolumeClaim": {"claimName": "unbound"}},
    ]);
    cluster.run(&manifest);
    manifest["metadata"]["name"] = json!("unclaimed");
    manifest["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = json!("nowhere");
    cluster.run(&manifest);
    for (name, claim, reason) in [
        ("unbound", "unbound", "PVC is not bound"),
        ("unclaimed", "nowhere", "failed to fetch PVC from API server: persistentvolumeclaims \"nowhere\" not found"),
    ] {
        let text = format!(
            "Unable to attach or mount volumes: unmounted volumes=[v], unattached volumes=[], failed to process volumes=[v]: \
             error processing PVC default/{claim}: {reason}"
        );
        // Of a claim that does not exist the node authorizer may speak first.
        wait_until(&format!("it is told of {name}: {text}"), seconds(60), || {
            let told = cluster.events(name);
            let same = told.iter().any(|(r, m)| r == "FailedMount" && *m == text);
            let refused = told
                .iter()
                .any(|(r, m)| r == "FailedMount" && m.starts_with(&text[..150]) && m.contains("no relationship found"));
            (same || name == "unclaimed" && refused).then_some(())
        });
    }
}

fn a_private_image_needs_its_secret(cluster: &mut Cluster) {
    const IMAGE: &str = "lab.test/nonroot:1";
    let _back = Withdrawn::new(&cluster.node, IMAGE, "nonroot");
    let registry =
        Registry::start(&cluster.node, "lab.test", &["nonroot"], &["--user", "me:right", "--private", "nonroot"]);
    let login = |user: &str, password: &str| {
        let config = json!({"auths": {"https://lab.test/v1/": {"username": user, "password": password}}}).to_string();
        json!({"type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config}})
    };
    for (name, password) in [("wrong", "guessed"), ("right", "right"), ("same", "right")] {
        cluster.create("secrets", &with(login("me", password), json!({"metadata": {"name": name}})));
    }
    let run = |name: &str, policy: &str, secrets: &[&str]| {
        let main = with(container("c", SLEEP), json!({"image": IMAGE, "imagePullPolicy": policy}));
        let mut manifest = pod(name, [main]);
        manifest["spec"]["imagePullSecrets"] = secrets.iter().map(|s| json!({"name": s})).collect();
        cluster.run(&manifest)
    };
    let waits = |name: &str, reasons: &[&str]| {
        cluster.wait(&format!("{name} waits"), name, |p| reasons.contains(&status::waiting(p, "c")))
    };
    run("anonymous", "IfNotPresent", &[]);
    waits("anonymous", &["ErrImagePull", "ImagePullBackOff"]);
    run("owner", "IfNotPresent", &["gone", "wrong", "right"]);
    cluster.wait_running("owner");
    let told = (
        "FailedToRetrieveImagePullSecret".to_owned(),
        "Unable to retrieve some image pull secrets (gone); attempting to pull the image may not succeed.".to_owned(),
    );
    wait_until("the missing secret is told", seconds(10), || cluster.events("owner").contains(&told).then_some(()));
    // It is there now, for those who have the secret or the same login.
    run("friend", "Never", &["right"]);
    run("other-friend", "IfNotPresent", &["same"]);
    run("thief", "IfNotPresent", &["wrong"]);
    run("quiet-thief", "Never", &[]);
    cluster.wait_running("friend");
    cluster.wait_running("other-friend");
    waits("thief", &["ErrImagePull", "ImagePullBackOff"]);
    let never = waits("quiet-thief", &["ErrImageNeverPull"]);
    assert_eq!(
        status::of(&never, "c")["state"]["waiting"]["message"],
        format!("Container image \"{IMAGE}\" is not present with pull policy of Never")
    );
    let dir = cluster.node.root().join("image_manager");
    assert_eq!(fs::metadata(dir.join("pulled")).unwrap().permissions().mode() & 0o7777, 0o700);
    let mut records = Vec::new();
    for entry in fs::read_dir(dir.join("pulled")).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("}\n"), "{text}");
        records.push((path, serde_json::from_str::<Value>(&text).unwrap()));
    }
    let (file, record) = records.iter().find(|(_, r)| r["credentialMapping"]["lab.test/nonroot"].is_object()).unwrap();
    let secrets = record["credentialMapping"]["lab.test/nonroot"]["kubernetesSecrets"].as_array().unwrap();
    let names: Vec<&str> = secrets.iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["right", "same"]);
    assert_eq!(secrets[0]["credentialHash"], secrets[1]["credentialHash"]);
    assert_eq!(record["kind"], "ImagePulledRecord");
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("sha256-"));
    assert_fixture("pull-hash", &format!("{}\n", secrets[0]["credentialHash"].as_str().unwrap()));
    drop(registry);
}
