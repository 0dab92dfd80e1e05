//! Volumes: subPath, memory-backed emptyDir, and what is left of pods that nobody ended.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use e2e::status::{restarts, runs, uid, waiting};
use e2e::{Node, Options, Share, container, pod, seconds, wait_until, with};
use rig::mounts;
use rustix::fs::{RenameFlags, renameat_with};
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";

fn mount(name: &str, path: &str) -> Value {
    json!({"volumeMounts": [{"name": name, "mountPath": path}]})
}

/// CVE-2017-1002101 and CVE-2021-25741: a link in the volume must not lead out of it.
#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_sub_path_does_not_leave_its_volume() {
    let node = Node::start();
    let share = Share::new(&node);
    let secret = node.dir().join("secret");
    fs::create_dir_all(&secret).unwrap();
    fs::write(secret.join("HOSTMARK"), "of the host").unwrap();
    let secret = secret.display();
    let prepare = format!(
        "cd /v; mkdir real; echo in > real/f; ln -s real z; ln -s z/../real zz; ln -s /etc x; ln -s ../../../../../.. y; mkdir z2; ln -s {secret} z2/esc; \
         ln -s {secret} abs; ln -s x/../../.. long; mkdir -p deep/real; ln -s ../real deep/up; echo file > plain"
    );
    let with_path = |name: &str, path: Value| {
        let script = format!(
            "ls -a /m > /share/{name}.tmp 2>&1; cat /m/HOSTMARK >> /share/escape 2>/dev/null; mv /share/{name}.tmp /share/{name}; {HOLD}"
        );
        let main = with(
            container("c", &script),
            json!({"volumeMounts": [with(json!({"name": "v", "mountPath": "/m"}), path)],
                                                        "env": [{"name": "UP", "value": "../.."}, {"name": "IN", "value": "real"}]}),
        );
        let mut manifest = pod(name, [main]);
        manifest["spec"]["initContainers"] = json!([with(container("i", &prepare), mount("v", "/v"))]);
        manifest["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        share.mounted(manifest)
    };
    let sub = |path: &str| json!({"subPath": path});
    // The pod, its subPath, a name that must be seen in it.
    let good = [
        ("g0", sub("z"), "f"),
        ("g1", sub("real"), "f"),
        ("g2", sub("new/deep"), "."),
        ("g3", sub("deep/up"), "f"),
        ("g4", sub("zz"), "f"),
        ("g5", sub("plain"), "/m"),
        ("g6", json!({"subPathExpr": "$(IN)"}), "f"),
    ];
    let bad = [
        ("b0", sub("x")),
        ("b1", sub("y")),
        ("b2", sub("z2/esc")),
        ("b3", sub("abs")),
        ("b4", sub("x/passwd")),
        ("b5", sub("abs/HOSTMARK")),
        ("b6", sub("long")),
        ("b7", json!({"subPathExpr": "$(UP)"})),
        ("b8", sub("y/made-by-rubelet")),
    ];
    for (name, path, _) in &good {
        node.write(&format!("{name}.yaml"), &with_path(name, path.clone()));
    }
    for (name, path) in &bad {
        node.write(&format!("{name}.yaml"), &with_path(name, path.clone()));
    }
    for (name, path, seen) in &good {
        let pod = node.wait_running(name);
        let list = wait_until(&format!("{path}: its content is seen"), seconds(20), || {
            Some(share.read(name)).filter(|l| !l.is_empty())
        });
        assert!(list.split_whitespace().any(|f| f == *seen), "{path}: {list}");
        assert_eq!(restarts(&pod, "c"), 0);
    }
    // A missing directory is made with the mode of the volume.
    let made = node.exec("g2", "c", &["stat", "-c", "%a %u %g", "/m"]).stdout;
    assert_eq!(String::from_utf8(made).unwrap(), "777 0 0\n");
    for (name, path) in &bad {
        let refused = node.wait_pod(&format!("{path}: refused with a reason"), name, |p| {
            waiting(p, "c").starts_with("CreateContainer")
        });
        assert!(!runs(&refused, "c"), "{path}");
        assert!(node.containers_of(name, "c").is_empty(), "{path}: a container was made");
        assert_eq!(share.read(name), "", "{path}");
    }
    assert_eq!(share.read("escape"), "", "the host was seen");
    assert!(!node.root().join("made-by-rubelet").exists());
    // A refused pod goes like any other.
    let refused = uid(&node.pod("b2").unwrap());
    node.remove("b2.yaml");
    node.wait_gone(&refused, seconds(60));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_sub_path_that_is_swapped_for_a_link_all_the_time_never_shows_the_host() {
    const VICTIMS: usize = 10;
    let node = Node::start();
    let share = Share::new(&node);
    let secret = node.dir().join("secret");
    fs::create_dir_all(secret.join("sub")).unwrap();
    fs::write(secret.join("sub/HOSTMARK"), "of the host").unwrap();
    // Every one starts, looks and ends, and is started again.
    let victim = |n: usize| {
        let script = "[ -e /m/HOSTMARK ] && echo out >> /share/escape; [ -e /m/f ] && echo in >> /share/inside; exit 1";
        with(
            container(&format!("c{n}"), script),
            json!({"volumeMounts": [{"name": "v", "mountPath": "/m", "subPath": "swap/sub"}]}),
        )
    };
    let mut manifest = pod("race", (0..VICTIMS).map(victim));
    let prepare = format!("mkdir -p /v/swap/sub; echo in > /v/swap/sub/f; ln -s {} /v/other", secret.display());
    manifest["spec"]["initContainers"] = json!([with(container("prepare", &prepare), mount("v", "/v"))]);
    manifest["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let manifest = share.mounted(manifest);
    node.write("race.yaml", &manifest);
    let race = node.wait_pod("the pod is there", "race", |p| restarts(p, "prepare") == 0);
    let volume = node.root().join("pods").join(uid(&race)).join("volumes/kubernetes.io~empty-dir/v");
    wait_until("the volume is prepared", seconds(30), || volume.join("other").symlink_metadata().ok());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // As a container with the whole volume would, only faster: the directory and the link take each other's place.
        scope.spawn(|| {
            let dir = fs::File::open(&volume).unwrap();
            while !stop.load(Ordering::Relaxed) {
                renameat_with(&dir, "swap", &dir, "other", RenameFlags::EXCHANGE).unwrap();
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        // The first two rounds of restarts, at 0 and 10 s, and the retries of what was refused.
        let seen = rig::poll(seconds(20), || !share.read("escape").is_empty());
        stop.store(true, Ordering::Relaxed);
        assert!(!seen, "the host was seen");
    });
    let inside = share.lines("inside").len();
    let refused = node
        .log()
        .lines()
        .filter(|l| l.contains("race-e2e_default") && l.contains("CreateContainerConfigError"))
        .count();
    println!("{inside} starts saw the inside, {refused} refusals are in the log");
    assert!(inside >= 3 && refused >= 1, "not a race: {inside} starts saw the inside, {refused} were refused");
    node.remove("race.yaml");
    node.wait_gone(&uid(&race), seconds(60));
    assert_eq!(share.read("escape"), "", "the host was seen");
    assert_eq!(fs::read_to_string(secret.join("sub/HOSTMARK")).unwrap(), "of the host");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_memory_volume_has_its_size_and_keeps_its_data() {
    let mut node = Node::start();
    let limit = |memory: &str| json!({"resources": {"limits": {"memory": memory}}});
    let script = "trap 'exit 0' TERM; while [ ! -e /v/die ]; do sleep .1; done; rm /v/die; exit 1";
    let of = |name: &str, size: Option<&str>, containers: Vec<Value>| {
        let mut manifest = pod(name, containers.into_iter().map(|c| with(c, mount("v", "/v"))));
        let mut volume = json!({"medium": "Memory"});
        if let Some(size) = size {
            volume["sizeLimit"] = json!(size);
        }
        manifest["spec"]["volumes"] = json!([{"name": "v", "emptyDir": volume}]);
        manifest
    };
    let allocatable = e2e::memory_kib() - (50 << 10);
    let pods = [
        ("size", of("size", Some("16Mi"), vec![container("c", script)]), 16 << 10),
        ("limit", of("limit", None, vec![with(container("c", script), limit("64Mi"))]), 64 << 10),
        ("both", of("both", Some("1Gi"), vec![with(container("c", script), limit("64Mi"))]), 64 << 10),
        ("none", of("none", None, vec![container("c", script)]), allocatable),
        (
            "one",
            of("one", None, vec![with(container("c", script), limit("64Mi")), container("d", script)]),
            allocatable,
        ),
        (
            "two",
            of(
                "two",
                None,
                vec![with(container("c", script), limit("64Mi")), with(container("d", script), limit("32Mi"))],
            ),
            96 << 10,
        ),
    ];
    for (name, manifest, _) in &pods {
        node.write(&format!("{name}.yaml"), manifest);
    }
    for (name, _, wanted) in &pods {
        node.wait_running(name);
        let out = String::from_utf8(node.exec(name, "c", &["df", "-k", "/v"]).stdout).unwrap();
        let size: u64 = out.split_whitespace().rev().nth(4).unwrap().parse().unwrap();
        assert!(size.abs_diff(*wanted) <= 8, "{name}: {size} KiB, not {wanted}");
    }
    let over = node.exec("size", "c", &["dd", "if=/dev/zero", "of=/v/big", "bs=1M", "count=20"]);
    assert!(over.exit_code != 0 && String::from_utf8_lossy(&over.stderr).contains("No space left"), "{over:?}");
    let mode = node.exec("size", "c", &["stat", "-c", "%a", "/v"]).stdout;
    assert_eq!(mode, b"1777\n");

    // What is in it outlives the container and the kubelet, and goes with the pod.
    node.exec("limit", "c", &["sh", "-c", "echo kept > /v/keep; touch /v/die"]);
    node.wait_pod("the container was restarted", "limit", |p| restarts(p, "c") == 1 && runs(p, "c"));
    let before: Vec<String> = mount_ids(&node.root());
    node.restart();
    let shown = node.wait_running("limit");
    std::thread::sleep(seconds(2));
    assert_eq!(node.exec("limit", "c", &["cat", "/v/keep"]).stdout, b"kept\n");
    assert_eq!(mount_ids(&node.root()), before, "mounted anew");
    assert_eq!(restarts(&node.pod("limit").unwrap(), "c"), 1);
    let uids: Vec<String> = pods.iter().map(|(name, _, _)| uid(&node.pod(name).unwrap())).collect();
    assert!(uids.contains(&uid(&shown)));
    for (name, _, _) in &pods {
        node.remove(&format!("{name}.yaml"));
    }
    for uid in uids {
        node.wait_gone(&uid, seconds(60));
    }
}

/// The ids of the mounts below a directory, which a remount does not keep.
fn mount_ids(dir: &Path) -> Vec<String> {
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let prefix = format!(" {}/", dir.display());
    let mut ids: Vec<String> =
        info.lines().filter(|l| l.contains(&prefix)).map(|l| l.split(' ').next().unwrap().to_owned()).collect();
    ids.sort();
    ids
}

fn command(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn what_a_killed_agent_left_is_cleaned_up_and_nobody_elses_data_with_it() {
    let mut node = Node::prepare(Options::default());
    let share = Share::new(&node);
    let of = |name: &str| {
        let main = with(
            container("c", HOLD),
            json!({"volumeMounts": [
                {"name": "e", "mountPath": "/e"}, {"name": "m", "mountPath": "/m"}, {"name": "d", "mountPath": "/d"},
                {"name": "e", "mountPath": "/sub", "subPath": "deep/er"},
            ]}),
        );
        let mut manifest = pod(name, [main]);
        manifest["spec"]["volumes"] = json!([
            {"name": "e", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}},
            {"name": "d", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        ]);
        share.mounted(manifest)
    };
    let names = ["killed", "unmounted", "stray", "bound", "stays"];
    for name in names {
        node.write(&format!("{name}.yaml"), &of(name));
    }
    node.run();
    let uids = names.map(|name| uid(&node.wait_running(name)));
    let [killed, unmounted, stray, bound, stays] = &uids;
    for name in names {
        assert_eq!(
            node.exec(name, "c", &["sh", "-c", "echo data > /e/f; echo data > /m/f; echo data > /sub/g; cat /d/name"])
                .stdout,
            format!("{name}-e2e").into_bytes()
        );
    }
    fs::write(share.dir().join("hosts-own"), "kept").unwrap();
    let pods = node.root().join("pods");

    node.kill();
    for name in ["killed", "unmounted", "stray", "bound"] {
        node.remove(&format!("{name}.yaml"));
    }
    // (a) the containers are killed, everything else is left; (b) as after a reboot: nothing runs, nothing is mounted, the folders are there.
    for uid in [killed, unmounted, stray, bound] {
        node.remove_from_runtime(uid);
    }
    mounts::detach(&pods.join(unmounted)).unwrap();
    // (c) a file where the folder of a volume should be empty, of a kind that no code here knows.
    let strange = pods.join(stray).join("volumes/example.com~strange/v");
    fs::create_dir_all(&strange).unwrap();
    fs::write(strange.join("somebodys"), "data").unwrap();
    // (d) a folder of somebody else bound into the pod's volume.
    let precious = node.dir().join("precious");
    fs::create_dir_all(&precious).unwrap();
    fs::write(precious.join("f"), "data").unwrap();
    let place = pods.join(bound).join("volumes/kubernetes.io~empty-dir/e/place");
    fs::create_dir_all(&place).unwrap();
    command("mount", &["--bind", precious.to_str().unwrap(), place.to_str().unwrap()]);

    let from = node.log().len();
    node.run();
    node.wait_gone(killed, seconds(60));
    node.wait_gone(unmounted, seconds(60));
    let said = |uid: &str| {
        let complaint = |l: &&str| l.starts_with(['W', 'E']) && l.contains(uid);
        node.log()[from..].lines().filter(complaint).count()
    };
    wait_until("the log says why the others are left", seconds(30), || {
        (said(stray) > 0 && said(bound) > 0).then_some(())
    });
    std::thread::sleep(seconds(7));
    assert_eq!(fs::read_to_string(precious.join("f")).unwrap(), "data", "deleted through a mount");
    assert_eq!(fs::read_to_string(place.join("f")).unwrap(), "data", "unmounted what is not its own");
    assert_eq!(fs::read_to_string(strange.join("somebodys")).unwrap(), "data");
    assert!(said(stray) <= 2 && said(bound) <= 2, "the log is flooded: {} and {}", said(stray), said(bound));
    assert_eq!(fs::read_to_string(share.dir().join("hosts-own")).unwrap(), "kept");
    // What stays ran on all the time, and new pods come up.
    assert_eq!(restarts(&node.wait_running("stays"), "c"), 0);
    assert_eq!(node.exec("stays", "c", &["cat", "/e/f", "/m/f", "/sub/g"]).stdout, b"data\ndata\ndata\n");
    node.write("after.yaml", &of("after"));
    node.wait_running("after");
    assert_eq!(uid(&node.pod("stays").unwrap()), *stays);

    // Once the obstacles are gone, so are the folders; an agent's start looks at once.
    command("umount", &[place.to_str().unwrap()]);
    fs::remove_file(strange.join("somebodys")).unwrap();
    node.restart();
    node.wait_gone(stray, seconds(30));
    node.wait_gone(bound, seconds(30));
    assert_eq!(fs::read_to_string(precious.join("f")).unwrap(), "data");
}
