//! The containerd programs that may be there, and the configuration of a private one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The sandbox image of a private containerd.
pub const PAUSE: &str = "lab.test/pause:1";
/// The image that pods of the demo and the tests run; `:2` is another image with the same content.
pub const BUSYBOX: &str = "lab.test/busybox:1";

/// An installed containerd.
#[derive(Clone, Debug)]
pub struct Containerd {
    /// The daemon.
    pub program: PathBuf,
    /// Its `ctr`.
    pub ctr: PathBuf,
    /// As `2.2.9`.
    pub version: String,
}

impl Containerd {
    /// The one that `lab/build-reference containerd` built.
    pub fn reference() -> Option<Self> {
        let dir = crate::lab().join("bin/containerd2");
        let all = ["containerd", "ctr", "containerd-shim-runc-v2"].map(|n| dir.join(n));
        all.iter().all(|f| f.is_file()).then(|| Self::at(&all[0], &all[1]).ok()).flatten()
    }

    /// The one of the system's package.
    pub fn system() -> Option<Self> {
        Self::at(&crate::find_program("containerd")?, &crate::find_program("ctr")?).ok()
    }

    fn at(program: &Path, ctr: &Path) -> Result<Self> {
        let out = Command::new(program).arg("--version").output().with_context(|| program.display().to_string())?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let version = version(&text).with_context(|| format!("{} says {text:?}", program.display()))?;
        Ok(Self { program: program.to_owned(), ctr: ctr.to_owned(), version })
    }

    /// The first number of the version.
    pub fn major(&self) -> u32 {
        self.version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or_default()
    }
}

/// `containerd NAME VERSION REVISION`, where Debian's version reads `1.6.20~ds1`.
fn version(text: &str) -> Option<String> {
    let word = text.split_whitespace().nth(2)?.trim_start_matches('v');
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
    (!word[..end].is_empty()).then(|| word[..end].to_owned())
}

/// The folder of the CNI plugins.
///
/// # Errors
/// When none of the usual folders has them.
pub fn cni_plugins() -> Result<PathBuf> {
    for dir in ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"].map(Path::new) {
        if ["bridge", "host-local", "loopback", "portmap"].iter().all(|p| dir.join(p).is_file()) {
            return Ok(dir.to_owned());
        }
    }
    bail!("no CNI plugins in /usr/lib/cni or /opt/cni/bin: install containernetworking-plugins")
}

/// What a configuration is made of.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) major: u32,
    pub(crate) cni: &'a Path,
    pub(crate) snapshotter: &'a str,
}

/// The configuration: everything that containerd writes lies below the directory, but for the shims' sockets, whose place is fixed.
pub(crate) fn config(l: &Layout<'_>) -> String {
    let (dir, cni, snapshotter) = (l.dir.display(), l.cni.display(), l.snapshotter);
    let common = format!(
        r#"root = "{dir}/containerd"
state = "{dir}/state"
[grpc]
  address = "{dir}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/opt"
"#
    );
    if l.major < 2 {
        return format!(
            r#"version = 2
{common}[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{dir}/hosts"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{dir}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{dir}/runc"
"#
        );
    }
    format!(
        r#"version = 3
{common}[plugins."io.containerd.nri.v1.nri"]
  disable = true
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE}"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "{dir}/hosts"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni}"]
    conf_dir = "{dir}/cni"
    use_internal_loopback = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      Root = "{dir}/runc"
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions() {
        assert_eq!(
            version("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1"),
            Some("1.6.20".into())
        );
        assert_eq!(version("containerd github.com/containerd/containerd/v2 2.2.9 "), Some("2.2.9".into()));
        assert_eq!(version("containerd x v2.1.4-rc.1 abc"), Some("2.1.4".into()));
        assert_eq!(version("containerd"), None);
    }
}
