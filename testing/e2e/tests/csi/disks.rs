//! Disks that the host makes available without a driver. A loop device stands for the disk, and a link like udev's for a Fibre Channel's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::driver::claim_of;
use crate::faults::one;
use crate::volumes::SLEEP;

/// A loop device over a file of its own, and links to it. They end with this value.
struct Loop {
    device: PathBuf,
    links: Vec<PathBuf>,
}

impl Loop {
    /// None: this machine has none left.
    fn new(dir: &Path, name: &str) -> Option<Self> {
        let file = dir.join(name);
        fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&file).output().unwrap();
        let device = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
        made.status.success().then_some(Self { device, links: Vec::new() })
    }

    fn link(&mut self, at: &str) {
        let at = PathBuf::from(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&at);
        std::os::unix::fs::symlink(&self.device, &at).unwrap();
        self.links.push(at);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        for link in &self.links {
            let _ = fs::remove_file(link);
        }
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

/// Mount points below the root directory with this in their path.
fn mounts(cluster: &Cluster, part: &str) -> Vec<String> {
    let root = cluster.node.root();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let all = table.lines().filter_map(|l| l.split(' ').nth(4));
    let mut all: Vec<String> =
        all.filter(|m| Path::new(m).starts_with(&root) && m.contains(part)).map(str::to_owned).collect();
    all.sort();
    all
}

fn in_use(cluster: &Cluster) -> Value {
    cluster.get_node()["status"]["volumesInUse"].clone()
}

pub(crate) fn disks_without_a_driver(cluster: &mut Cluster) {
    let dir = cluster.node.dir().to_owned();
    let (Some(raw), Some(formatted), Some(mut fibre)) =
        (Loop::new(&dir, "raw"), Loop::new(&dir, "formatted"), Loop::new(&dir, "fibre"))
    else {
        println!("skipped: no loop devices");
        return;
    };
    let wwn = format!("5006{:08x}", std::process::id());
    fibre.link(&format!("/dev/disk/by-path/fc-0x{wwn}-lun-3"));
    let local = |device: &Path, mode: &str| json!({"local": {"path": device}, "volumeMode": mode});
    claim_of(cluster, "raw-disk", &local(&raw.device, "Block"));
    claim_of(cluster, "formatted", &local(&formatted.device, "Filesystem"));
    claim_of(cluster, "fibre", &json!({"fc": {"targetWWNs": [wwn], "lun": 3, "fsType": "ext4"}}));
    let main = with(
        container("c", SLEEP),
        json!({"volumeDevices": [{"name": "raw-disk", "devicePath": "/dev/raw"}],
            "volumeMounts": [{"name": "formatted", "mountPath": "/f"}, {"name": "fibre", "mountPath": "/fc"}]}),
    );
    let mut p = pod("disks", [main]);
    p["spec"]["terminationGracePeriodSeconds"] = json!(1);
    p["spec"]["securityContext"] = json!({"fsGroup": 4321});
    let volume = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    p["spec"]["volumes"] = json!([volume("raw-disk"), volume("formatted"), volume("fibre")]);
    cluster.run(&p);
    let running = cluster.wait_running("disks");
    let uid = running["metadata"]["uid"].as_str().unwrap().to_owned();
    let script = "echo x > /f/file; echo y > /fc/file; stat -c %g /f/file /fc/file; \
        echo raw | dd of=/dev/raw conv=notrunc,fsync 2>/dev/null; head -c 4 /dev/raw";
    assert_eq!(cluster.exec(&running, "c", &["sh", "-c", script]), "4321\n4321\nraw\n");
    let attached = json!([format!("kubernetes.io/fc/[{wwn}]:3")]);
    assert_eq!(in_use(cluster), attached, "no other node may have it, and local disks are no controller's");

    // As the Go kubelet lays them out.
    let root = cluster.node.root();
    let at = |path: &str| root.join(path).display().to_string();
    let plugins = [
        at(&format!("plugins/kubernetes.io/fc/{wwn}-lun-3")),
        at("plugins/kubernetes.io/local-volume/mounts/pv-formatted"),
        at(&format!("plugins/kubernetes.io~local-volume/volumeDevices/pv-raw-disk/{uid}")),
    ];
    let pods = [
        at(&format!("pods/{uid}/volumes/kubernetes.io~fc/pv-fibre")),
        at(&format!("pods/{uid}/volumes/kubernetes.io~local-volume/pv-formatted")),
    ];
    assert_eq!(mounts(cluster, "plugins/kubernetes.io"), plugins);
    assert_eq!(
        mounts(cluster, "volumes/kubernetes.io~fc").len() + mounts(cluster, "volumes/kubernetes.io~local").len(),
        2
    );
    for path in &pods {
        assert!(mounts(cluster, &uid).contains(path), "{path}");
    }
    let link = root.join(format!("pods/{uid}/volumeDevices/kubernetes.io~local-volume/pv-raw-disk"));
    assert_eq!(fs::read_link(&link).unwrap(), raw.device);

    // Killed and started again, it knows all of them, and mounts none twice.
    let stood = mounts(cluster, "kubernetes.io");
    cluster.node.kill();
    cluster.node.run();
    cluster.wait_ready();
    wait_until("it is in use for the next agent", seconds(30), || (in_use(cluster) == attached).then_some(()));
    assert_eq!(mounts(cluster, "kubernetes.io"), stood);
    // Pods that are deleted while nobody is there.
    cluster.node.kill();
    cluster.delete("disks");
    cluster.node.run();
    cluster.wait_gone("disks", seconds(90));
    let mut left = Vec::new();
    let gone = rig::poll(seconds(60), || {
        left = mounts(cluster, "kubernetes.io~");
        left.extend(mounts(cluster, "plugins/kubernetes.io"));
        left.extend(plugins.iter().filter(|p| Path::new(p).exists()).cloned());
        left.extend(in_use(cluster).as_array().into_iter().flatten().map(ToString::to_string));
        left.is_empty()
    });
    assert!(gone, "left: {left:#?}");

    // What is on them stays, and nothing is formatted a second time.
    let mut again = one("again", "formatted");
    again["spec"]["containers"][0]["command"] = json!(["sh", "-c", format!("cat /v/file; {SLEEP}")]);
    cluster.run(&again);
    let running = cluster.wait_running("again");
    assert_eq!(cluster.exec(&running, "c", &["cat", "/v/file"]), "x\n");
    cluster.delete("again");
    cluster.wait_gone("again", seconds(60));
    wait_until("the disk is free", seconds(30), || mounts(cluster, "pv-formatted").is_empty().then_some(()));
}
