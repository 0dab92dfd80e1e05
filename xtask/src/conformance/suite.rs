//! Kubernetes' own node test suite, started against a kubelet program.
//!
//! The suite starts etcd, an API server and the kubelet itself, at the places that a node has: ports 10250, 10255 and 10248, `/var/lib/kubelet`, and the
//! cgroup `/kubepods`. So there is one run at a time on a machine, and none beside another kubelet.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rig::{Stage, cgroup, mounts};
use serde_json::{Value, json};

use super::results::{self, Results, Spec};
use crate::shell::Shell;

/// Where the kubelet's state lies.
const ROOT: &str = "/var/lib/kubelet";
/// The cgroup of its pods.
const KUBEPODS: &str = "/kubepods";
/// How long the suite gets to end after its own limit.
const GRACE: Duration = Duration::from_secs(300);

/// A stage with the suite's images, and what the suite is to be told.
pub(crate) struct Suite<'a> {
    pub(crate) shell: &'a Shell,
    pub(crate) stage: &'a Stage,
    pub(crate) kubelet: PathBuf,
    /// Where reports and logs are kept.
    pub(crate) out: PathBuf,
}

/// What is in the way of a run.
///
/// # Errors
/// Names it.
pub(crate) fn free() -> Result<()> {
    for port in [10_250, 10_255, 10_248] {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok() {
            bail!("port {port} is taken: the suite needs the ports of a kubelet for itself");
        }
    }
    let pods = Path::new(ROOT).join("pods");
    if fs::read_dir(&pods).is_ok_and(|mut d| d.next().is_some()) {
        bail!("{} is not empty: the suite's kubelet would take over what another one left", pods.display());
    }
    if !cgroup::directories(KUBEPODS).is_empty() {
        bail!("there is a cgroup {KUBEPODS}: the suite's kubelet would take over what another one left");
    }
    Ok(())
}

impl Suite<'_> {
    /// The specs that a label filter and a focus select, without running them.
    ///
    /// # Errors
    /// When the suite does not start, or selects nothing.
    pub(crate) fn select(&self, filter: &str, focus: &str) -> Result<Vec<Spec>> {
        let report = self.dir()?.join("selected.json");
        let mut command = self.ginkgo(filter, focus);
        command.arg("--dry-run").arg("--output-dir").arg(self.dir()?).arg("--json-report=selected.json");
        command.arg(bin("e2e_node.test")).arg("--").arg("--report-dir=").arg(format!("--node-name={}", node_name()?));
        self.shell.need("listing the suite's specs", &mut command, Duration::from_secs(300))?;
        let specs = results::selected(&parse(&report)?);
        if specs.is_empty() {
            bail!("no spec has the labels `{filter}` and a name that matches `{focus}`");
        }
        Ok(specs)
    }

    /// Runs these specs, `procs` side by side, for `limit` at most; what came to an end by then.
    ///
    /// # Errors
    /// When the suite gave no report.
    pub(crate) fn run(&self, name: &str, specs: &[&Spec], procs: usize, limit: Duration) -> Result<Results> {
        let dir = self.dir()?;
        let bins = dir.join("k8s-bin");
        fs::create_dir_all(&bins)?;
        let link = bins.join("kubelet");
        let _ = fs::remove_file(&link);
        symlink(&self.kubelet, &link)?;
        fs::write(dir.join("kubelet.json"), serde_json::to_vec_pretty(&config())?)?;
        let names: Vec<String> = specs.iter().map(|s| quoted(&s.name)).collect();
        let out = self.out.join(name);
        fs::create_dir_all(&out)?;
        // What is matched is the suite's name, a space, and the spec's.
        let mut command = self.ginkgo("", &format!(" ({})$", names.join("|")));
        command.arg(format!("--procs={}", procs)).arg(format!("--timeout={}s", limit.as_secs()));
        command.args(["--output-interceptor-mode=none", "--keep-separate-reports=false"]);
        command.arg("--output-dir").arg(&out).args(["--json-report=report.json", "--junit-report=junit.xml"]);
        command.arg(bin("e2e_node.test")).arg("--");
        command.arg(format!("--k8s-bin-dir={}", bins.display())).arg(format!("--node-name={}", node_name()?));
        command.arg(format!("--container-runtime-endpoint=unix://{}", self.stage.socket().display()));
        command.args(["--prepull-images=false", "--restart-kubelet=true"]);
        command.arg(format!("--report-dir={}", out.display()));
        command.arg(format!("--kubelet-config-file={}", dir.join("kubelet.json").display()));
        // The last one is for us: it makes the kubelet known as this stage's.
        command.arg(format!(
            "--kubelet-flags=--system-cgroups= --kubelet-cgroups= --cert-dir={}",
            dir.join("pki").display()
        ));
        let ran = self.shell.run(name, &mut command, limit + GRACE);
        let cleaned = self.clean();
        let _ = fs::copy(self.shell.log(name), out.join("log"));
        // That specs failed is no error: they are in the report.
        ran?;
        cleaned?;
        let report = out.join("report.json");
        if !report.is_file() {
            let log = self.shell.log(name);
            bail!("the suite gave no report; the end of {}:\n{}", log.display(), rig::tail(&log, 25));
        }
        Ok(results::outcomes(&parse(&report)?))
    }

    /// Ends the kubelet and removes what it left at the places that it does not share.
    fn clean(&self) -> Result<()> {
        let _ = fs::remove_dir_all(self.shims());
        rig::processes::end(self.stage.dir(), rig::processes::Program::Kubelet, Duration::from_secs(5));
        rig::processes::end(&self.out, rig::processes::Program::Kubelet, Duration::from_secs(5));
        cgroup::remove(KUBEPODS)?;
        let root = Path::new(ROOT);
        mounts::detach(root)?;
        for dir in [
            "pods",
            "plugins",
            "plugins_registry",
            "device-plugins",
            "pod-resources",
            "image_manager",
            "checkpoints",
            "rubelet",
        ] {
            let dir = root.join(dir);
            if dir.is_dir() {
                mounts::remove_tree(&dir)?;
            }
        }
        for file in [
            "allocated_pods_state",
            "actuated_pods_state",
            "cpu_manager_state",
            "memory_manager_state",
            "dra_manager_state",
            "graceful_node_shutdown_state",
        ] {
            let _ = fs::remove_file(root.join(file));
        }
        Ok(())
    }

    fn ginkgo(&self, filter: &str, focus: &str) -> Command {
        let mut command = Command::new(bin("ginkgo"));
        if fs::read_to_string("/proc/1/comm").is_ok_and(|c| c.trim() != "systemd") {
            // The suite starts and stops its kubelet by systemd-run and systemctl.
            let mut path = crate::root().join("lab/shim").into_os_string();
            path.push(":");
            path.push(std::env::var_os("PATH").unwrap_or_default());
            command.env("PATH", path).env("SHIM_STATE", self.shims());
        }
        command.arg("--no-color");
        if !filter.is_empty() {
            command.arg(format!("--label-filter={filter}"));
        }
        command.arg(format!("--focus={focus}"));
        command
    }

    fn shims(&self) -> PathBuf {
        self.stage.dir().join("units")
    }

    fn dir(&self) -> Result<PathBuf> {
        let dir = self.stage.dir().join("suite");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }
}

fn bin(name: &str) -> PathBuf {
    rig::lab().join("bin").join(name)
}

fn node_name() -> Result<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host's name")?;
    Ok(name.trim().to_lowercase())
}

fn parse(file: &Path) -> Result<Value> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("{} is not JSON", file.display()))
}

/// A name as a regular expression that matches it alone.
fn quoted(name: &str) -> String {
    let plain: String =
        name.chars().flat_map(|c| r"\.+*?()|[]{}^$".contains(c).then_some('\\').into_iter().chain([c])).collect();
    // A part without text leaves two spaces in the report, and one in what is matched.
    plain.replace("  ", " +")
}

/// The KubeletConfiguration that Kubernetes runs the suite with, as far as it matters.
fn config() -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "failCgroupV1": false,
        "failSwapOn": false,
        "serializeImagePulls": false,
        "fileCheckFrequency": "10s",
        "volumeStatsAggPeriod": "10s",
        "podCIDR": "10.100.0.0/24",
        "evictionPressureTransitionPeriod": "30s",
        "evictionHard": {"memory.available": "250Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%"},
        "evictionMinimumReclaim": {"nodefs.available": "1%", "nodefs.inodesFree": "1%"},
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_match_themselves() {
        assert_eq!(super::quoted("[sig-node] a (b) c.d"), r"\[sig-node\] a \(b\) c\.d");
        assert_eq!(super::quoted("a  b c"), "a +b c");
    }
}
