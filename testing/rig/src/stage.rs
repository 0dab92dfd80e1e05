//! The stage: made, recorded, and taken down again without remains.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;

use crate::containerd::{Containerd, Layout, cni_plugins, config};
use crate::processes::{Program, end};
use crate::record::{self, Taken};
use crate::registry::{Registry, Served};
use crate::{cgroup, iptables, mounts, network};

const PREFIX: &str = "rubelet-stage-";
/// Second number of the stages' subnets, 10.199.N.0/24.
const SUBNET: u8 = 199;

/// Folders with fixed places that containerd, the CNI plugins and a kubelet make when they are missing.
const SHARED: [&str; 11] = [
    "/run/containerd",
    "/run/containerd/s",
    "/run/netns",
    "/var/lib/cni",
    "/var/lib/cni/networks",
    "/var/lib/cni/results",
    "/var/log/containers",
    "/var/log/pods",
    "/var/lib/kubelet",
    "/var/lib/kubelet/device-plugins",
    "/opt/containerd",
];

/// A private place to run a containerd and a kubelet in. Dropping it removes everything.
#[derive(Debug)]
pub struct Stage {
    dir: PathBuf,
    taken: Taken,
    containerd: Option<Child>,
    registries: Vec<Registry>,
    closed: bool,
}

impl Stage {
    /// Takes a free number, and with it a directory, a subnet, a bridge and a cgroup root.
    ///
    /// # Errors
    /// Without root, without cgroups or bridges, or when 256 stages are there already.
    pub fn create(kind: &str) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("needs root: a private containerd makes mounts, cgroups and a network bridge");
        }
        let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
        let no_host_port_chains = !iptables::has_host_port_chains();
        for number in 0..=255_u8 {
            if !network::subnet_free(&routes, SUBNET, number) {
                continue;
            }
            let taken = Taken {
                bridge: format!("rubelet{number}"),
                network: format!("{PREFIX}{number}"),
                subnet: format!("10.{SUBNET}.{number}.0/24"),
                cgroup: format!("/{PREFIX}{number}"),
                forwarding: network::forwarding(),
                no_host_port_chains,
                missing_folders: SHARED.iter().map(PathBuf::from).filter(|d| !d.exists()).collect(),
            };
            // The directory is the lock on the number.
            let Some(dir) = record::claim(&format!("{PREFIX}{number}"), kind, Some(&taken))? else {
                continue;
            };
            let stage = Self { dir, taken, containerd: None, registries: Vec::new(), closed: false };
            cgroup::create(&stage.taken.cgroup)?;
            network::create_bridge(&stage.taken.bridge, &stage.taken.gateway())?;
            return Ok(stage);
        }
        bail!("no free subnet 10.{SUBNET}.N.0/24: `cargo xtask tidy` removes what earlier runs left")
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its cgroup root, to be the kubelet's `cgroupRoot` or the parent of several.
    pub fn cgroup(&self) -> &str {
        &self.taken.cgroup
    }

    /// The address of the host on the pods' network; nothing outside of this host reaches it.
    pub fn address(&self) -> String {
        self.taken.gateway()
    }

    /// containerd's socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// containerd's log.
    pub fn containerd_log(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    /// Process id of the running containerd.
    pub fn containerd_pid(&self) -> Option<u32> {
        self.containerd.as_ref().map(Child::id)
    }

    /// Starts containerd with a network for pods (and host ports, when asked) and imports the image archives.
    ///
    /// # Errors
    /// With the end of containerd's log when it does not come up within 30 s.
    pub fn start_containerd(&mut self, runtime: &Containerd, images: &[PathBuf], host_ports: bool) -> Result<()> {
        let dir = &self.dir;
        for sub in ["cni", "hosts", "ipam"] {
            fs::create_dir_all(dir.join(sub)).with_context(|| format!("cannot make {}/{sub}", dir.display()))?;
        }
        let mut plugins = vec![json!({
            "type": "bridge", "bridge": self.taken.bridge, "isGateway": true, "hairpinMode": true,
            "ipam": {"type": "host-local", "dataDir": dir.join("ipam"), "ranges": [[{"subnet": self.taken.subnet}]],
                     "routes": [{"dst": "0.0.0.0/0"}]},
        })];
        if host_ports {
            plugins.push(json!({"type": "portmap", "capabilities": {"portMappings": true}}));
        }
        let list = json!({"cniVersion": "0.4.0", "name": self.taken.network, "plugins": plugins});
        fs::write(dir.join("cni/10-stage.conflist"), list.to_string())?;
        let text = config(&Layout { dir, major: runtime.major(), cni: &cni_plugins()?, snapshotter: snapshotter(dir) });
        let file = dir.join("containerd.toml");
        fs::write(&file, text)?;
        let log = fs::File::create(self.containerd_log())?;
        let mut path = runtime.program.parent().unwrap_or(Path::new("/usr/bin")).as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path.push(":/usr/local/sbin:/usr/sbin:/sbin");
        let child = Command::new(&runtime.program)
            .arg("-c")
            .arg(&file)
            .env("PATH", path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C at the terminal is for us to handle, in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", runtime.program.display()))?;
        let child = self.containerd.insert(child);
        let socket = dir.join("containerd.sock");
        let ctr = |args: &[&str]| Command::new(&runtime.ctr).arg("-a").arg(&socket).args(args).output();
        let mut ended = None;
        let up = crate::poll(Duration::from_secs(30), || {
            ended = child.try_wait().ok().flatten();
            ended.is_some() || ctr(&["version"]).is_ok_and(|o| o.status.success())
        });
        if !up || ended.is_some() {
            let log = crate::tail(&self.dir.join("containerd.log"), 15);
            let how = ended.map_or("did not answer within 30 s".to_owned(), |s| format!("ended ({s})"));
            bail!("containerd {} {how}; the end of its log:\n{log}", runtime.version);
        }
        for image in images {
            let name = image.display().to_string();
            let out = ctr(&["-n", "k8s.io", "images", "import", &name])?;
            if !out.status.success() {
                bail!("containerd cannot import {name}: {}", String::from_utf8_lossy(&out.stderr).trim());
            }
        }
        Ok(())
    }

    /// Starts a registry that serves image archives, from which containerd pulls the images of `hosts` until the stage is closed.
    ///
    /// # Errors
    /// When it does not answer within 60 s.
    pub fn serve(&mut self, archives: &[PathBuf], hosts: &[&str]) -> Result<()> {
        let hosts_dir = self.dir.join("hosts");
        let served = Served { dir: &self.dir, hosts_dir: &hosts_dir, hosts, archives, flags: &[] };
        self.registries.push(Registry::start(&served, Duration::from_secs(60))?);
        Ok(())
    }

    /// `kill -9` of containerd; what runs in it goes on. [`Stage::start_containerd`] starts it again, without images to import.
    pub fn kill_containerd(&mut self) {
        if let Some(mut child) = self.containerd.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Removes everything; what is still there afterwards is the error.
    ///
    /// # Errors
    /// With every part that could not be removed.
    pub fn close(mut self) -> Result<()> {
        self.wipe()
    }

    fn wipe(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        self.registries.clear();
        if let Some(mut child) = self.containerd.take() {
            // It has to be waited for while it is ended, or it would stay as a zombie.
            let waiter = std::thread::spawn(move || child.wait());
            let result = wipe(&self.dir, &self.taken);
            if result.is_ok() {
                let _ = waiter.join();
            }
            return result;
        }
        wipe(&self.dir, &self.taken)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(e) = self.wipe() {
            eprintln!("rig: {} is not clean: {e:#}", self.dir.display());
        }
    }
}

/// overlayfs does not stack on overlayfs, and some kernels have none.
fn snapshotter(dir: &Path) -> &'static str {
    const OVERLAYFS: i64 = 0x794c_7630;
    let stacked = rustix::fs::statfs(dir).is_ok_and(|s| s.f_type == OVERLAYFS);
    let known = || fs::read_to_string("/proc/filesystems").is_ok_and(|f| f.lines().any(|l| l.ends_with("\toverlay")));
    let load = || Command::new("modprobe").arg("overlay").output().is_ok_and(|o| o.status.success());
    if !stacked && (known() || load()) { "overlayfs" } else { "native" }
}

/// Takes a stage down, in the order in which nothing can come back: who starts things, then what runs, then what it ran on.
pub(crate) fn wipe(dir: &Path, taken: &Taken) -> Result<()> {
    let mut steps: Vec<Result<()>> = Vec::new();
    let sockets = shim_sockets(dir);
    let sandboxes = sandboxes(dir);
    for (program, grace) in [(Program::Kubelet, 0), (Program::Registry, 0), (Program::Containerd, 5)] {
        if !end(dir, program, Duration::from_secs(grace)) {
            steps.push(Err(anyhow!("{program:?} does not end")));
        }
    }
    // Containers, while their shims are still there to reap them; then the cgroups, for which no process may be left.
    for pid in cgroup::processes(&taken.cgroup) {
        crate::processes::kill(pid, rustix::process::Signal::KILL);
    }
    if !end(dir, Program::Shim, Duration::ZERO) {
        steps.push(Err(anyhow!("a shim does not end")));
    }
    steps.push(cgroup::remove(&taken.cgroup));
    steps.push(mounts::detach(dir));
    steps.push(network::remove_bridge(&taken.bridge));
    steps.push(iptables::remove(&taken.network, taken.no_host_port_chains));
    for socket in sockets {
        let _ = fs::remove_file(socket);
    }
    remove_cached_results(taken, &sandboxes);
    remove_log_links(dir);
    let mut folders = taken.missing_folders.clone();
    folders.sort_by_key(|f| std::cmp::Reverse(f.components().count()));
    for folder in folders {
        // Only when empty: somebody else may have begun to use it.
        let _ = fs::remove_dir(folder);
    }
    network::restore_forwarding(&taken.forwarding);
    let left: Vec<String> = steps.into_iter().filter_map(|s| s.err().map(|e| format!("{e:#}"))).collect();
    if !left.is_empty() {
        bail!(left.join("; "));
    }
    // The record goes with the directory, last of all: until here another try is possible.
    mounts::remove_tree(dir)
}

/// The sockets of the shims lie in `/run/containerd/s`; each bundle says which is its own (`address` in 1.x, `bootstrap.json` in 2.x).
fn shim_sockets(dir: &Path) -> Vec<PathBuf> {
    let tasks = dir.join("state/io.containerd.runtime.v2.task");
    let list = |d: &Path| fs::read_dir(d).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    let bundles = list(&tasks).into_iter().flat_map(|namespace| list(&namespace));
    let files = bundles.flat_map(|b| [b.join("address"), b.join("bootstrap.json")]);
    files
        .filter_map(|f| {
            let text = fs::read_to_string(f).ok()?;
            let path = &text[text.find("/run/containerd/s/")?..];
            let end = path.find(|c: char| !c.is_ascii_alphanumeric() && c != '/').unwrap_or(path.len());
            Some(PathBuf::from(&path[..end]))
        })
        .collect()
}

/// The ids of the sandboxes that containerd knows.
fn sandboxes(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir.join("containerd/io.containerd.grpc.v1.cri/sandboxes")).into_iter().flatten();
    entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

/// CNI keeps each network's last result for a sandbox, in a place that cannot be configured.
fn remove_cached_results(taken: &Taken, sandboxes: &[String]) {
    for entry in fs::read_dir("/var/lib/cni/results").into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let loopback = name.strip_prefix("cni-loopback-").and_then(|n| n.strip_suffix("-lo"));
        if name.starts_with(&format!("{}-", taken.network))
            || loopback.is_some_and(|id| sandboxes.iter().any(|s| s == id))
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes the links from `/var/log/containers` into `dir`: a kubelet that is killed leaves them.
pub fn remove_log_links(dir: &Path) {
    for entry in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
        if fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(dir)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
