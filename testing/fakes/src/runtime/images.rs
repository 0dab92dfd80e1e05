//! Images: the node's store and the registry behind it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use cri_api::v1;

/// An image that can be pulled.
#[derive(Clone, Debug, Default)]
pub(crate) struct Remote {
    pub(crate) takes: Duration,
    pub(crate) login: Option<(String, String)>,
}

#[derive(Default)]
pub(crate) struct Images {
    /// By id.
    pub(crate) local: BTreeMap<String, v1::Image>,
    /// By full name.
    pub(crate) remote: BTreeMap<String, Remote>,
}

/// The name as containerd writes it in full: `busybox` is `docker.io/library/busybox:latest`.
pub(crate) fn full_name(name: &str) -> String {
    let first = name.split('/').next().unwrap_or_default();
    let hosted = name.contains('/') && (first.contains(['.', ':']) || first == "localhost");
    let name = match (hosted, name.contains('/')) {
        (true, _) => name.to_owned(),
        (false, true) => format!("docker.io/{name}"),
        (false, false) => format!("docker.io/library/{name}"),
    };
    let last = name.rsplit('/').next().unwrap_or_default();
    if last.contains([':', '@']) { name } else { format!("{name}:latest") }
}

/// 64 hexadecimal digits that depend on the text alone.
fn digest(text: &str) -> String {
    (0..4u8)
        .map(|part| {
            let mut hasher = DefaultHasher::new();
            (part, text).hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        })
        .collect()
}

impl Images {
    /// The image that a name, digest or id means.
    pub(crate) fn find(&self, name: &str) -> Option<&v1::Image> {
        let full = full_name(name);
        self.local.get(name).or_else(|| self.local.get(&format!("sha256:{name}"))).or_else(|| {
            self.local
                .values()
                .find(|image| [&image.repo_tags, &image.repo_digests].into_iter().flatten().any(|known| *known == full))
        })
    }

    /// Puts an image into the store; its id.
    pub(crate) fn add(&mut self, name: &str) -> String {
        let full = full_name(name);
        if let Some(image) = self.find(&full) {
            return image.id.clone();
        }
        let repository = full.split('@').next().unwrap_or_default();
        let tail = repository.rfind(':').filter(|at| !repository[*at..].contains('/'));
        let repository = &repository[..tail.unwrap_or(repository.len())];
        let (tags, digests) = match full.split_once('@') {
            Some(_) => (vec![], vec![full.clone()]),
            None => (vec![full.clone()], vec![format!("{repository}@sha256:{}", digest(&full))]),
        };
        let id = format!("sha256:{}", digest(&format!("config of {full}")));
        let image = v1::Image {
            id: id.clone(),
            repo_tags: tags,
            repo_digests: digests,
            size: 4 << 20,
            spec: Some(v1::ImageSpec::default()),
            ..Default::default()
        };
        self.local.insert(id.clone(), image);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("library/busybox", "docker.io/library/busybox:latest"),
            ("localhost:5000/web", "localhost:5000/web:latest"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("web@sha256:00", "docker.io/library/web@sha256:00"),
        ] {
            assert_eq!(full_name(name), full, "{name}");
        }
    }

    #[test]
    fn found_by_every_name() {
        let mut images = Images::default();
        let id = images.add("localhost:5000/web");
        let image = images.local[&id].clone();
        assert!(image.repo_digests[0].starts_with("localhost:5000/web@sha256:"));
        for name in ["localhost:5000/web", "localhost:5000/web:latest", &image.repo_digests[0], &id, &id[7..]] {
            assert_eq!(images.find(name).map(|image| &image.id), Some(&id), "{name}");
        }
        assert_eq!(images.find("localhost:5000/web:2"), None);
    }
}
