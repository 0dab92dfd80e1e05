//! What a pod takes of the node's disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use decide::eviction::LocalUsage;
use host::fsx;
use model::pod::DesiredPod;
use pod::ports::LocalStorage;
use tracing::warn;

use super::Paths;

/// Measures what is wanted; what cannot be measured is left out. Blocks for as long as the walks take.
pub(super) fn local_storage(paths: &Paths, pod: &DesiredPod, wanted: &LocalStorage) -> LocalUsage {
    let mut usage = LocalUsage::default();
    let volumes = paths.pod(pod.uid()).join("volumes");
    for volume in pod.spec().volumes.iter().flatten().filter(|v| wanted.volumes.contains(&v.name)) {
        let plugin = decide::volume_plugin::plugin_name(volume).replace('/', "~");
        let dir = volumes.join(plugin).join(&volume.name);
        match fsx::disk_usage(&dir) {
            Ok(used) => {
                usage.volumes.insert(volume.name.clone(), used.bytes);
            }
            // Not made yet, or just being taken down.
            Err(e) if e.is_not_found() => {}
            Err(e) => warn!(pod = pod.full_name(), volume = volume.name, err = e.full(), "Volume cannot be measured"),
        }
    }
    let logs = paths.pod_log(pod.namespace(), pod.name(), pod.uid());
    for container in &wanted.containers {
        match fsx::files_usage(&logs.join(container)) {
            Ok(used) => {
                usage.logs.insert(container.clone(), used.bytes);
            }
            Err(e) => warn!(pod = pod.full_name(), container, err = e.full(), "A container's logs cannot be measured"),
        }
    }
    if !wanted.containers.is_empty() {
        let hosts = fsx::disk_usage(&paths.pod(pod.uid()).join("etc-hosts"));
        usage.hosts = hosts.map(|used| used.bytes).unwrap_or_default();
    }
    let device = |path: &Path| std::fs::metadata(path).map(|m| m.dev()).ok();
    usage.layers_elsewhere = wanted.layers_at.as_deref().is_some_and(|at| device(at) != device(&paths.root));
    usage
}

#[cfg(test)]
mod tests {
    use model::pod::PodSource;

    use super::*;

    #[test]
    fn only_what_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        let paths = Paths {
            root: root.clone(),
            pod_logs: root.join("logs"),
            container_logs: root.join("links"),
            proc: "/proc".into(),
        };
        let put = |path: &str, bytes: usize| {
            let file = root.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, vec![b'x'; bytes]).unwrap();
        };
        put("pods/u/volumes/kubernetes.io~empty-dir/a/deep/file", 100_000);
        put("pods/u/volumes/kubernetes.io~empty-dir/b/file", 100_000);
        put("pods/u/volumes/kubernetes.io~configmap/c/file", 10);
        put("pods/u/etc-hosts", 100);
        put("logs/ns_web_u/x/0.log", 50_000);
        put("logs/ns_web_u/y/0.log", 50_000);
        let json = r#"{"metadata": {"name": "web", "namespace": "ns", "uid": "u"}, "spec": {"containers": [{"name": "x"}, {"name": "y"}],
            "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}},
                {"name": "late", "emptyDir": {}}]}}"#;
        let pod = DesiredPod::new(serde_json::from_str(json).unwrap(), PodSource::Api).unwrap();
        let names = |all: &[&str]| all.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let wanted = LocalStorage { volumes: names(&["a", "late"]), ..LocalStorage::default() };
        let usage = local_storage(&paths, &pod, &wanted);
        assert_eq!(usage.volumes.keys().collect::<Vec<_>>(), ["a"]);
        assert!(usage.volumes["a"] >= 100_000 && usage.logs.is_empty() && usage.hosts == 0, "{usage:?}");
        let wanted = LocalStorage {
            volumes: names(&["a", "b", "c"]),
            containers: names(&["x"]),
            layers_at: Some("/proc".into()),
        };
        let usage = local_storage(&paths, &pod, &wanted);
        assert_eq!((usage.volumes.len(), usage.logs.len()), (3, 1));
        assert!(usage.logs["x"] >= 50_000 && usage.hosts > 0 && usage.layers_elsewhere, "{usage:?}");
        let here = LocalStorage { layers_at: Some(root), ..LocalStorage::default() };
        assert!(!local_storage(&paths, &pod, &here).layers_elsewhere);
    }
}
