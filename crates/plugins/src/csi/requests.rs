//! What a driver is asked, built from the volume and from what was gathered for it.

use std::collections::BTreeMap;

use decide::csi::CsiVolume;

use super::Capabilities;
use crate::wire::csi_v1::volume_capability::access_mode::Mode;
use crate::wire::csi_v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::wire::csi_v1::{
    CapacityRange, NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability,
};

/// What is gathered for a call beside the volume itself.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// What the driver can do.
    pub capabilities: Capabilities,
    /// `attachmentMetadata` of the attachment.
    pub publish: BTreeMap<String, String>,
    /// The secret's content, and tokens where they belong there.
    pub secrets: BTreeMap<String, String>,
    /// Attributes beside the volume's own: of the pod, and tokens.
    pub attributes: BTreeMap<String, String>,
    /// The pod's group, when the driver is to take it.
    pub group: Option<i64>,
    /// The SELinux label to mount with.
    pub label: Option<String>,
}

/// The first of the volume's access modes, as CSI names it. Only a driver that says so knows the finer names.
fn mode(volume: &CsiVolume, single_node: bool) -> Mode {
    match (volume.access_modes.first().map_or("ReadWriteOnce", String::as_str), single_node) {
        ("ReadOnlyMany", _) => Mode::MultiNodeReaderOnly,
        ("ReadWriteMany", _) => Mode::MultiNodeMultiWriter,
        ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
        ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
        _ => Mode::SingleNodeWriter,
    }
}

fn capability(volume: &CsiVolume, context: &Context) -> VolumeCapability {
    let label = context.label.as_deref().map(decide::selinux::mount_option);
    let options = volume.mount_options.iter().cloned().chain(label).collect();
    let access_type = if volume.block {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume {
            fs_type: volume.fs_type.clone(),
            mount_flags: options,
            volume_mount_group: context.group.map(|g| g.to_string()).unwrap_or_default(),
        })
    };
    let mode = mode(volume, context.capabilities.single_node).into();
    VolumeCapability { access_mode: Some(AccessMode { mode }), access_type: Some(access_type) }
}

/// NodeStageVolume.
pub fn stage_request(volume: &CsiVolume, context: &Context, staging: &str) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        volume_id: volume.handle.clone(),
        publish_context: context.publish.clone(),
        staging_target_path: staging.to_owned(),
        volume_capability: Some(capability(volume, context)),
        secrets: context.secrets.clone(),
        volume_context: volume.attributes.clone(),
    }
}

/// NodePublishVolume; `staging` empty: the driver does not stage.
pub fn publish_request(volume: &CsiVolume, context: &Context, staging: &str, target: &str) -> NodePublishVolumeRequest {
    let mut attributes = volume.attributes.clone();
    attributes.extend(context.attributes.clone());
    NodePublishVolumeRequest {
        volume_id: volume.handle.clone(),
        publish_context: context.publish.clone(),
        staging_target_path: staging.to_owned(),
        target_path: target.to_owned(),
        volume_capability: Some(capability(volume, context)),
        readonly: volume.read_only,
        secrets: context.secrets.clone(),
        volume_context: attributes,
    }
}

/// NodeExpandVolume to so many bytes; `path`: where it is published or, before that, staged.
pub fn expand_request(
    volume: &CsiVolume,
    context: &Context,
    staging: &str,
    path: &str,
    bytes: i64,
) -> NodeExpandVolumeRequest {
    NodeExpandVolumeRequest {
        volume_id: volume.handle.clone(),
        volume_path: path.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        staging_target_path: staging.to_owned(),
        volume_capability: Some(capability(volume, context)),
        secrets: context.secrets.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(modes: &[&str]) -> CsiVolume {
        CsiVolume {
            driver: "d".into(),
            handle: "h".into(),
            spec_name: "pv".into(),
            lifecycle: decide::csi::Lifecycle::Persistent,
            fs_type: "ext4".into(),
            access_modes: modes.iter().map(ToString::to_string).collect(),
            mount_options: vec!["noatime".into()],
            read_only: true,
            attributes: [("a".to_owned(), "1".to_owned())].into(),
            stage_secret: None,
            publish_secret: None,
            expand_secret: None,
            block: false,
            affinity: None,
            growth: None,
            labels: Default::default(),
            may_have_label: false,
            disk: None,
        }
    }

    #[test]
    fn access_modes() {
        for (modes, fine, want) in [
            (&[][..], false, Mode::SingleNodeWriter),
            (&["ReadWriteOnce"], false, Mode::SingleNodeWriter),
            (&["ReadWriteOnce"], true, Mode::SingleNodeMultiWriter),
            (&["ReadWriteOncePod"], false, Mode::SingleNodeWriter),
            (&["ReadWriteOncePod"], true, Mode::SingleNodeSingleWriter),
            (&["ReadOnlyMany", "ReadWriteOnce"], true, Mode::MultiNodeReaderOnly),
            (&["ReadWriteMany"], true, Mode::MultiNodeMultiWriter),
        ] {
            assert_eq!(mode(&volume(modes), fine), want, "{modes:?} {fine}");
        }
    }

    #[test]
    fn requests() {
        let context = Context {
            attributes: [("b".to_owned(), "2".to_owned())].into(),
            secrets: [("s".to_owned(), "x".to_owned())].into(),
            group: Some(7),
            label: Some("u:r:t:s0:c1,c2".to_owned()),
            ..Context::default()
        };
        let stage = stage_request(&volume(&[]), &context, "/s");
        assert_eq!((stage.volume_context.len(), stage.secrets.len()), (1, 1), "pods' attributes are for publish");
        assert!(!format!("{stage:?}").contains('x'), "secrets are not printed");
        let publish = publish_request(&volume(&[]), &context, "/s", "/t");
        assert_eq!((publish.volume_context.len(), publish.readonly, publish.target_path.as_str()), (2, true, "/t"));
        let Some(AccessType::Mount(mount)) = publish.volume_capability.and_then(|c| c.access_type) else { panic!() };
        assert_eq!(
            (mount.volume_mount_group.as_str(), mount.mount_flags),
            ("7", vec!["noatime".to_owned(), "context=\"u:r:t:s0:c1,c2\"".to_owned()])
        );
        let block = CsiVolume { block: true, ..volume(&[]) };
        let stage = stage_request(&block, &context, "/s");
        assert!(matches!(stage.volume_capability.unwrap().access_type, Some(AccessType::Block(_))));
        assert_eq!(expand_request(&block, &context, "/s", "/t", 9).capacity_range.unwrap().required_bytes, 9);
    }
}
