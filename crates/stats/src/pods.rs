//! What each pod uses now, for who has to choose among them.

use std::collections::HashMap;
use std::path::Path;

use decide::eviction::{ContainerUsage, PodUsage, Usage};
use tracing::warn;

use crate::groups::Groups;
use crate::names::{Names, Owner};
use crate::storage::{Storage, StorageSettings};
use crate::{Stats, StatsError, blocking};

/// Volumes that are on the node's disk and end with their pod; the others may lie on a file system that does not answer.
const LOCAL: [&str; 2] = ["kubernetes.io~empty-dir", "kubernetes.io~configmap"];

type Volumes = HashMap<String, Vec<(String, Usage)>>;

impl Stats {
    /// What each pod uses, by UID; with `disks` also what its files take, which is measured anew. Pods of which nothing stands in the runtime are left
    /// out.
    ///
    /// # Errors
    /// The runtime does not tell what runs, or the host does not answer.
    pub async fn pods(&self, disks: bool) -> Result<HashMap<String, PodUsage>, StatsError> {
        let usage = self.usage(false).await?;
        let (storage, volumes) = match disks {
            false => (None, Volumes::new()),
            true => {
                let storage = self.storage(&usage.names).await?;
                let (settings, names) = (self.settings.clone(), usage.names.clone());
                let volumes = blocking(move || Ok(volumes(&settings.storage, &names))).await?;
                (Some(storage), volumes)
            }
        };
        let told = |id: &str| usage.fallback.get(id)?.memory.as_ref()?.working_set_bytes.map(|v| v.value);
        Ok(compose(&usage.names, &usage.groups, &told, storage.as_deref(), volumes))
    }
}

/// Blocks for as long as the walks take.
fn volumes(settings: &StorageSettings, names: &Names) -> Volumes {
    let mut all = Volumes::new();
    for pod in &names.pods {
        let dir = settings.root.join("pods").join(&pod.uid).join("volumes");
        let found = LOCAL.iter().flat_map(|plugin| of_plugin(&dir.join(plugin)));
        all.insert(pod.uid.clone(), found.collect());
    }
    all
}

fn of_plugin(dir: &Path) -> Vec<(String, Usage)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match host::fsx::disk_usage(&entry.path()) {
            Ok(used) => {
                let name = entry.file_name().to_string_lossy().into_owned();
                found.push((name, Usage { bytes: used.bytes, inodes: used.inodes }));
            }
            Err(e) if e.is_not_found() => {}
            Err(e) => warn!(err = e.full(), "A volume cannot be measured"),
        }
    }
    found
}

fn compose(
    names: &Names,
    groups: &Groups,
    told: &dyn Fn(&str) -> Option<u64>,
    storage: Option<&Storage>,
    mut volumes: Volumes,
) -> HashMap<String, PodUsage> {
    let mut pods: Vec<PodUsage> = vec![PodUsage::default(); names.pods.len()];
    let mut memory: Vec<Option<u64>> = vec![None; names.containers.len()];
    for group in &groups.all {
        let working_set = group.figures.memory.map(|m| m.working_set);
        match group.owner {
            Owner::Pod(at) => pods[at].memory = working_set,
            Owner::Container(at) => {
                memory[at] = working_set;
                pods[names.containers[at].pod].processes += group.processes.unwrap_or_default();
            }
            Owner::Sandbox(_) | Owner::Other => {}
        }
    }
    for (at, container) in names.containers.iter().enumerate() {
        let pod = &mut pods[container.pod];
        let uid = &names.pods[container.pod].uid;
        let layer = storage.and_then(|s| s.layers.get(&container.id));
        let logs = storage.and_then(|s| s.logs.get(&(uid.clone(), container.name.clone())));
        pod.containers.push(ContainerUsage {
            name: container.name.clone(),
            memory: memory[at].or_else(|| told(&container.id)),
            layer: layer
                .map(|l| Usage { bytes: l.used.unwrap_or_default(), inodes: l.inodes_used.unwrap_or_default() }),
            logs: logs.map(|l| Usage { bytes: l.bytes, inodes: l.inodes }),
        });
    }
    for (pod, name) in pods.iter_mut().zip(&names.pods) {
        // Without a group of its own a pod uses what its containers use.
        let of_containers = pod.containers.iter().filter_map(|c| c.memory).reduce(u64::saturating_add);
        pod.memory = pod.memory.or(of_containers);
        pod.volumes = volumes.remove(&name.uid).unwrap_or_default();
    }
    names.pods.iter().map(|name| name.uid.clone()).zip(pods).collect()
}

#[cfg(test)]
mod tests {
    use cri_api::v1;
    use host::cgroup::{GroupFigures, MemoryFigures};
    use host::fsx::{DiskUsage, FilesystemFigures};
    use host::proc::OpenFiles;
    use jiff::Timestamp;

    use super::*;
    use crate::groups::Group;

    #[test]
    fn each_has_its_own() {
        let labels = |uid: &str, container: &str| {
            let all = [
                ("io.kubernetes.pod.uid", uid),
                ("io.kubernetes.pod.name", uid),
                ("io.kubernetes.container.name", container),
            ];
            all.map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect()
        };
        let sandbox =
            |id: &str, uid: &str| v1::PodSandbox { id: id.into(), labels: labels(uid, ""), ..Default::default() };
        let container = |id: &str, sandbox: &str, name: &str| v1::Container {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            state: v1::ContainerState::ContainerRunning as i32,
            labels: labels("", name),
            ..Default::default()
        };
        let names = Names::new(
            vec![sandbox("s1", "u1"), sandbox("s2", "u2")],
            vec![container("c1", "s1", "a"), container("c2", "s1", "b"), container("c3", "s2", "vm")],
        );
        let group = |path: &str, working_set: u64, processes: Option<u64>| Group {
            path: path.into(),
            owner: names.owner(path),
            at: Timestamp::UNIX_EPOCH,
            figures: GroupFigures {
                memory: Some(MemoryFigures { working_set, ..Default::default() }),
                ..GroupFigures::default()
            },
            nano_cores: None,
            interfaces: None,
            processes,
            open: OpenFiles::default(),
            open_limit: None,
        };
        let groups = Groups {
            all: vec![
                group("/kubepods/podu1", 1000, None),
                group("/kubepods/podu1/s1", 5, None),
                group("/kubepods/podu1/c1", 600, Some(3)),
                group("/kubepods/podu1/c2", 300, Some(2)),
            ],
            rated: false,
        };
        let usage = |bytes: u64, inodes: u64| Usage { bytes, inodes };
        let storage = Storage {
            at: Timestamp::UNIX_EPOCH,
            root: FilesystemFigures::default(),
            images: None,
            layers_fs: None,
            layers: [(
                "c1".to_owned(),
                crate::storage::Usage { at: Timestamp::UNIX_EPOCH, used: Some(7), inodes_used: Some(1), fs: None },
            )]
            .into(),
            logs: [(("u1".to_owned(), "b".to_owned()), DiskUsage { bytes: 9, inodes: 2 })].into(),
            hosts: HashMap::new(),
        };
        let volumes = Volumes::from([("u1".to_owned(), vec![("v".to_owned(), usage(4, 4))])]);
        let told = |id: &str| (id == "c3").then_some(77);
        let pods = compose(&names, &groups, &told, Some(&storage), volumes);
        let u1 = &pods["u1"];
        assert_eq!((u1.memory, u1.processes), (Some(1000), 5));
        assert_eq!(u1.volumes, [("v".to_owned(), usage(4, 4))]);
        let shown: Vec<_> = u1.containers.iter().map(|c| (c.name.as_str(), c.memory, c.layer, c.logs)).collect();
        assert_eq!(shown, [("a", Some(600), Some(usage(7, 1)), None), ("b", Some(300), None, Some(usage(9, 2)))]);
        // A container without a group here, in a pod without one.
        assert_eq!((pods["u2"].memory, pods["u2"].containers[0].memory), (Some(77), Some(77)));
    }

    #[test]
    fn local_volumes_are_walked() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, bytes: usize| {
            let file = dir.path().join("pods/u/volumes").join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, vec![b'x'; bytes]).unwrap();
        };
        put("kubernetes.io~empty-dir/scratch/a/b", 50_000);
        put("kubernetes.io~configmap/settings/key", 10);
        put("kubernetes.io~csi/remote/mount/x", 50_000);
        let labels = [("io.kubernetes.pod.uid".to_owned(), "u".to_owned())];
        let sandbox = v1::PodSandbox { id: "s".into(), labels: labels.into(), ..Default::default() };
        let names = Names::new(vec![sandbox], Vec::new());
        let settings = StorageSettings { root: dir.path().to_owned(), pod_logs: dir.path().join("logs") };
        let found = volumes(&settings, &names);
        let shown: Vec<_> = found["u"].iter().map(|(name, used)| (name.as_str(), used.inodes)).collect();
        assert_eq!(shown, [("scratch", 3), ("settings", 2)]);
    }
}
