//! A registry on the loopback address that serves image archives, so that a runtime's pulls are real.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cri::RuntimeMutator;
use cri_api::v1;

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

/// An image that the runtime does not have while this lives; afterwards it is as it was imported, without what a pull adds to its names.
pub struct Withdrawn<'n> {
    node: &'n Node,
    image: String,
    archive: String,
}

impl<'n> Withdrawn<'n> {
    /// Takes the image away. `archive` (in `images/small` of the lab) is what brings it back.
    ///
    /// # Panics
    /// When the runtime refuses.
    pub fn new(node: &'n Node, image: &str, archive: &str) -> Self {
        let spec = v1::ImageSpec { image: image.to_owned(), ..Default::default() };
        node.ask(node.cri().remove_image(spec));
        Self { node, image: image.to_owned(), archive: archive.to_owned() }
    }
}

impl Drop for Withdrawn<'_> {
    fn drop(&mut self) {
        let socket = self.node.stage().join("containerd.sock");
        let archive = rig::lab().join(format!("images/small/{}.tar", self.archive));
        let ours = rig::lab().join("bin/containerd2/ctr");
        // The newer program imports by itself, so that an older containerd will do.
        for (ctr, more) in [(ours.as_path(), &["--local"][..]), (Path::new("ctr"), &[])] {
            let run = |arguments: &[&str]| {
                let ctr =
                    Command::new(ctr).arg("-a").arg(&socket).args(["-n", "k8s.io", "images"]).args(arguments).output();
                ctr.is_ok_and(|o| o.status.success())
            };
            let names = Command::new(ctr).arg("-a").arg(&socket).args(["-n", "k8s.io", "images", "ls", "-q"]).output();
            let names = names.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
            let repository = self.image.rsplit_once(':').map_or(self.image.as_str(), |(name, _)| name);
            let pulled: Vec<&str> = names.lines().filter(|n| n.starts_with(repository)).collect();
            let mut import = vec!["import"];
            import.extend(more);
            let archive = archive.display().to_string();
            import.push(&archive);
            if (pulled.is_empty() || run(&[&["rm", "--sync"][..], &pulled[..]].concat())) && run(&import) {
                return;
            }
        }
        eprintln!("the image {} could not be brought back", self.image);
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.hosts);
    }
}
