//! What the demo and the tests need on the machine, installed or built when it is missing.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rig::cluster;
use rig::containerd::{Containerd, cni_plugins};
use rig::find_program;

use crate::shell::Shell;

/// What the Go kubelet is called in tables.
pub(crate) const GO: &str = "Go kubelet";

/// Programs and the Debian packages that have them.
const NEEDED: [(&str, &str); 7] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("ip", "iproute2"),
    ("iptables-save", "iptables"),
    ("gcc", "gcc libc6-dev"),
    ("python3", "python3"),
];

/// The packages that are missing.
pub(crate) fn missing() -> Vec<&'static str> {
    let mut packages: Vec<&str> =
        NEEDED.iter().filter(|(program, _)| find_program(program).is_none()).map(|(_, package)| *package).collect();
    if cni_plugins().is_err() {
        packages.push("containernetworking-plugins");
    }
    packages.dedup();
    packages
}

/// Installs what is missing.
///
/// # Errors
/// Says what is missing when this is not root or there is no apt-get.
pub(crate) fn prepare(shell: &Shell) -> Result<()> {
    let missing = missing();
    if !rustix::process::geteuid().is_root() {
        let also = if missing.is_empty() { String::new() } else { format!(" (and needs: {})", missing.join(" ")) };
        bail!("needs root, for containers, cgroups and a network bridge{also}: run it as root or with sudo");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if find_program("apt-get").is_none() {
        bail!(
            "missing: {}; there is no apt-get here, so install them with this system's package manager",
            missing.join(" ")
        );
    }
    println!("  installing {}", missing.join(" "));
    shell.need("apt packages", &mut Command::new(crate::root().join("lab/setup")), Duration::from_secs(900))
}

/// The images of the demo and the tests, made on the spot when they are not there.
pub(crate) fn images(shell: &Shell) -> Result<Vec<PathBuf>> {
    let small = rig::lab().join("images/small");
    let all = ["pause", "nonroot", "busybox"].map(|n| small.join(format!("{n}.tar")));
    if !all.iter().all(|f| f.is_file()) {
        shell.need(
            "making images",
            &mut Command::new(crate::root().join("lab/make-images")),
            Duration::from_secs(600),
        )?;
    }
    Ok(all.to_vec())
}

/// The containerd 2 that is built from its Go modules; building it takes a few minutes once.
///
/// # Errors
/// Without Go, or when the build fails.
pub(crate) fn reference(shell: &Shell) -> Result<Containerd> {
    if let Some(found) = Containerd::reference() {
        return Ok(found);
    }
    if find_program("go").is_none() {
        bail!("containerd 2 is not built, and there is no Go here to build it from its modules");
    }
    let mut command = Command::new(crate::root().join("lab/build-reference"));
    shell.need("building containerd 2", command.arg("containerd"), Duration::from_secs(1800))?;
    Containerd::reference().context("lab/build-reference ended well, but its containerd does not run")
}

/// The parts of the control plane, and kubectl; building them takes some minutes once.
///
/// # Errors
/// Without Go, or when the build fails.
pub(crate) fn control_plane(shell: &Shell, options: &cluster::Options) -> Result<()> {
    let missing = cluster::missing(options);
    if missing.is_empty() {
        return Ok(());
    }
    if find_program("go").is_none() {
        bail!("not built, and there is no Go here to build it from its modules: {}", missing.join(" "));
    }
    let mut command = Command::new(crate::root().join("lab/build-reference"));
    shell.need("building the control plane", command.args(missing), Duration::from_secs(3600))
}

/// Kubernetes' own node test suite and what it starts; building them takes some minutes once.
///
/// # Errors
/// Without Go, or when the build fails.
pub(crate) fn node_suite(shell: &Shell) -> Result<()> {
    let bin = rig::lab().join("bin");
    if ["e2e_node.test", "ginkgo", "agnhost", "nnp", "sampledeviceplugin"].iter().all(|p| bin.join(p).is_file()) {
        return Ok(());
    }
    if find_program("go").is_none() {
        bail!("the node test suite is not built, and there is no Go here to build it from its modules");
    }
    let mut command = Command::new(crate::root().join("lab/build-reference"));
    shell.need("building the node test suite", command.args(["suite", "agnhost"]), Duration::from_secs(3600))
}

/// The images of the node test suite, made on the spot when they are not there, and the name of the registry that their names begin with.
///
/// # Errors
/// When they cannot be made.
pub(crate) fn suite_images(shell: &Shell) -> Result<(Vec<PathBuf>, String)> {
    let dir = rig::lab().join("images/suite");
    let prefix = dir.join("prefix");
    // The last two that are made.
    if !prefix.is_file() || !dir.join("kitten.tar").is_file() {
        if find_program("mmdebstrap").is_none() {
            let mut command = Command::new(crate::root().join("lab/setup"));
            shell.need("apt packages", command.arg("mmdebstrap"), Duration::from_secs(900))?;
        }
        let mut command = Command::new(crate::root().join("lab/make-images"));
        shell.need("making the suite's images", command.arg("suite"), Duration::from_secs(1200))?;
    }
    let text = fs::read_to_string(&prefix).with_context(|| format!("cannot read {}", prefix.display()))?;
    let host = text.trim().split('/').next().unwrap_or_default().to_owned();
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut images: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "tar")).collect();
    images.sort();
    Ok((images, host))
}

/// The system's containerd.
///
/// # Errors
/// When there is none.
pub(crate) fn system() -> Result<Containerd> {
    Containerd::system().context("no containerd in PATH: install the package containerd")
}

/// Builds rubelet and gives the path of the binary, with `release` as it is released ([`crate::dist`]); `RUBELET_BIN` names another program instead (for the tests, the Go kubelet).
///
/// # Errors
/// With the compiler's last words.
pub(crate) fn rubelet(shell: &Shell, release: bool) -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("RUBELET_BIN") {
        return std::path::absolute(PathBuf::from(program)).context("RUBELET_BIN");
    }
    if release {
        return crate::dist::build(shell);
    }
    let mut command = cargo();
    command.args(["build", "--package", "rubelet"]);
    shell.need("building rubelet", &mut command, Duration::from_secs(3600))?;
    built("rubelet", false)
}

/// The kubelets that are compared, and how they are called: rubelet's release build, and the Go kubelet where it is built.
///
/// # Errors
/// With the compiler's last words.
pub(crate) fn kubelets(shell: &Shell) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut kubelets = vec![("rubelet", rubelet(shell, true)?)];
    let go = rig::lab().join("bin/kubelet");
    if go.is_file() {
        kubelets.push((GO, go));
    } else {
        println!("the Go kubelet is not built (lab/build-reference kubelet): rubelet alone is measured");
    }
    Ok(kubelets)
}

/// Builds the fake runtime that is a process of its own.
///
/// # Errors
/// With the compiler's last words.
pub(crate) fn fake_runtime(shell: &Shell) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--package", "fakes"]);
    shell.need("building the fake runtime", &mut command, Duration::from_secs(3600))?;
    built("fake-runtime", false)
}

/// cargo's directory for what it builds.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::root().join("target"), PathBuf::from)
}

/// Where cargo put a program.
pub(crate) fn built(name: &str, release: bool) -> Result<PathBuf> {
    let file = target().join(if release { "release" } else { "debug" }).join(name);
    if !file.is_file() {
        bail!("cargo built {name}, but not at {}", file.display());
    }
    Ok(file)
}

/// Builds the CSI driver that tests start, beside rubelet.
///
/// # Errors
/// With the compiler's last words.
pub(crate) fn csi_driver(shell: &Shell) -> Result<()> {
    let mut command = cargo();
    command.args(["build", "--package", "csi-driver"]);
    shell.need("building the CSI driver for tests", &mut command, Duration::from_secs(3600))
}

/// cargo, in the repository's root.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::root());
    command
}

/// The simulated node, with these arguments, built to play thousands of stories, which takes some minutes once.
pub(crate) fn sim(arguments: &[String]) -> Command {
    let mut command = cargo();
    command.args(["run", "--quiet", "--profile", "sim", "--package", "sim", "--"]).args(arguments);
    command
}
