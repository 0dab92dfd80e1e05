//! A registry on the loopback address that serves image archives, so that a runtime's pulls are real.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::{Node, seconds, wait_until};

/// A running registry; the runtime asks it for images of one host name until it is dropped.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    hosts: PathBuf,
}

impl Registry {
    /// Serves `archives` (from `images/small` of the lab) as the images of `host`; `flags` as in lab/registry.py (`--user`, `--private`, `--rate`).
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start(node: &Node, host: &str, archives: &[&str], flags: &[&str]) -> Self {
        let [port] = rig::free_ports().unwrap_or_else(|e| panic!("no free port: {e}"));
        let script = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../lab/registry.py"));
        let log = fs::File::create(node.dir().join("registry.log")).unwrap_or_else(|e| panic!("registry.log: {e}"));
        let child = Command::new("python3")
            .arg(script)
            .args(["--port", &port.to_string()])
            .args(flags)
            // By a path below the stage, by which the stage knows what to end.
            .args(archives.iter().map(|a| link(node, a)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap_or_else(|e| panic!("registry.log: {e}")))
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start python3: {e}"));
        let hosts = node.stage().join("hosts").join(host);
        let mirror = format!(
            "server = \"http://127.0.0.1:{port}\"\n[host.\"http://127.0.0.1:{port}\"]\n  capabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::create_dir_all(&hosts)
            .and_then(|()| fs::write(hosts.join("hosts.toml"), mirror))
            .unwrap_or_else(|e| panic!("{}: {e}", hosts.display()));
        let registry = Self { child, hosts };
        wait_until("the registry answers", seconds(10), || rig::http::get_tcp(port, "/v2/").ok());
        registry
    }
}

fn link(node: &Node, archive: &str) -> PathBuf {
    let to = node.dir().join(format!("served-{archive}.tar"));
    let from = rig::lab().join(format!("images/small/{archive}.tar"));
    let _ = fs::remove_file(&to);
    std::os::unix::fs::symlink(&from, &to).unwrap_or_else(|e| panic!("{}: {e}", to.display()));
    to
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.hosts);
    }
}
