//! A registry on the loopback address that serves image archives, so that a runtime's pulls are real.

use std::path::Path;
use std::process::Command;

use cri::RuntimeMutator;
use cri_api::v1;
use rig::registry::Served;

use crate::{Node, seconds};

/// A running registry; the runtime asks it for images of one host name until it is dropped.
#[derive(Debug)]
pub struct Registry(#[expect(dead_code, reason = "held until it is dropped")] rig::registry::Registry);

impl Registry {
    /// Serves `archives` (from `images/small` of the lab) as the images of `host`; `flags` as in lab/registry.py (`--user`, `--private`, `--rate`).
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start(node: &Node, host: &str, archives: &[&str], flags: &[&str]) -> Self {
        let small = rig::lab().join("images/small");
        let archives: Vec<_> = archives.iter().map(|archive| small.join(format!("{archive}.tar"))).collect();
        let hosts_dir = node.stage().join("hosts");
        let served = Served { dir: node.dir(), hosts_dir: &hosts_dir, hosts: &[host], archives: &archives, flags };
        Self(rig::registry::Registry::start(&served, seconds(10)).unwrap_or_else(|e| panic!("{e:#}")))
    }
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
