//! A registry on the loopback address that serves image archives (`lab/registry.py`), so that a runtime's pulls are real.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// A running registry; a runtime asks it for the images of some host names until it is dropped.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    hosts: Vec<PathBuf>,
}

/// What a registry is started with.
#[derive(Debug)]
pub struct Served<'a> {
    /// Its log and links to the archives lie here, below the stage: by that the stage knows what to end.
    pub dir: &'a Path,
    /// The runtime's folder of hosts (`config_path`).
    pub hosts_dir: &'a Path,
    /// Host names whose images it serves.
    pub hosts: &'a [&'a str],
    /// Image archives.
    pub archives: &'a [PathBuf],
    /// As in lab/registry.py (`--user`, `--private`, `--rate`).
    pub flags: &'a [&'a str],
}

impl Registry {
    /// Starts one and tells the runtime of it.
    ///
    /// # Errors
    /// When it does not answer within `patience`, with the end of its log.
    pub fn start(served: &Served<'_>, patience: Duration) -> Result<Self> {
        let [port] = crate::free_ports().context("no free port on the loopback address")?;
        let log = served.dir.join("registry.log");
        let output = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab/registry.py"));
        command.args(["--port", &port.to_string()]).args(served.flags);
        for archive in served.archives {
            let name = archive.file_name().unwrap_or_default().to_string_lossy();
            let link = served.dir.join(format!("served-{name}"));
            let _ = fs::remove_file(&link);
            symlink(archive, &link).with_context(|| format!("cannot link {}", link.display()))?;
            command.arg(link);
        }
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let child = command.spawn().context("cannot start python3")?;
        let hosts = served.hosts.iter().map(|host| served.hosts_dir.join(host)).collect();
        let registry = Self { child, hosts };
        let mirror = format!(
            "server = \"http://127.0.0.1:{port}\"\n[host.\"http://127.0.0.1:{port}\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
        );
        for host in &registry.hosts {
            fs::create_dir_all(host)
                .and_then(|()| fs::write(host.join("hosts.toml"), &mirror))
                .with_context(|| format!("cannot write {}/hosts.toml", host.display()))?;
        }
        if !crate::poll(patience, || crate::http::get_tcp(port, "/v2/").is_ok()) {
            bail!("the registry does not answer; the end of its log:\n{}", crate::tail(&log, 15));
        }
        Ok(registry)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for host in &self.hosts {
            let _ = fs::remove_dir_all(host);
        }
    }
}
