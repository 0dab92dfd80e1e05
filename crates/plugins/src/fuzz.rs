//! What plugins say and what is found on disk of them, for `testing/fuzz`: each function takes bytes and panics when something is wrong. Not for others.

use std::path::{Component, Path};

use model::pod::PodUid;

use crate::devices::register::is_socket_name;
use crate::volumes::layout::{self, Layout};

/// Data files of volumes.
pub const VOLUMES: &[&[u8]] = &[
    br#"{"attachmentID":"csi-1","driverName":"plain.csi.test","nodeName":"e2e","specVolID":"pv-a","volumeHandle":"h","volumeLifecycleMode":"Persistent"}"#,
    br#"{"driverName":"d","volumeHandle":"../h","specVolID":"a/b","volumeLifecycleMode":"Ephemeral","seLinuxMountContext":"u:r:t:s0"}"#,
    b"unix.sock",
];

/// A data file of a volume: every directory that it leads to lies below the root; and the same bytes as the name of a device plugin's socket.
///
/// # Panics
/// When something is wrong.
pub fn volume(bytes: &[u8]) {
    let layout = Layout { root: "/r/k".into(), proc: "/proc".into(), node: "n".into() };
    let below = |path: &Path, root: &str| {
        path.starts_with(root) && !path.components().any(|c| matches!(c, Component::ParentDir | Component::CurDir))
    };
    if let Some(of) = layout::parse(bytes) {
        let uid = PodUid::new("u");
        let paths = [layout.staging(&of), layout.device_data(&of), layout.pod_dir(&of, &uid), layout.target(&of, &uid)];
        assert!(paths.iter().all(|p| below(p, "/r/k")), "{of:?}: {paths:?}");
    }
    let name = String::from_utf8_lossy(bytes);
    if is_socket_name(&name) {
        let path = Path::new("/r/k/device-plugins").join(&*name);
        assert!(below(&path, "/r/k/device-plugins"), "{name:?}");
    }
}
