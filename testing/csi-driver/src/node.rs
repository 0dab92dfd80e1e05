//! The driver's work.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use host::mount;
use plugins::wire::csi_v1 as csi;
use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};
use tonic::{Request, Response, Status};

use crate::log::Log;
use crate::{Arguments, faults, served};

const PROC: &str = "/proc";

#[derive(Clone)]
pub(crate) struct Node {
    arguments: Arc<Arguments>,
    log: Log,
}

type Answer<T> = Result<Response<T>, Status>;

fn internal(e: impl std::fmt::Display) -> Status {
    Status::internal(e.to_string())
}

impl Node {
    pub(crate) fn new(arguments: &Arguments, log: Log) -> Self {
        Self { arguments: Arc::new(arguments.clone()), log }
    }

    fn volume(&self, handle: &str) -> PathBuf {
        self.arguments.data.join("volumes").join(handle.replace('/', "_"))
    }

    /// Most volumes on the node; a file may say so later.
    fn limit(&self) -> i64 {
        let told = std::fs::read_to_string(self.arguments.data.join("limit")).ok();
        told.and_then(|n| n.trim().parse().ok()).unwrap_or(self.arguments.limit)
    }

    /// Something is wrong with all volumes while there is a file that says what.
    fn health(&self) -> csi::VolumeCondition {
        let told = std::fs::read_to_string(self.arguments.data.join("health")).ok();
        csi::VolumeCondition { abnormal: told.is_some(), message: told.unwrap_or_default() }
    }

    /// Records and runs one call with its faults.
    async fn call<T>(
        &self,
        method: &str,
        handle: &str,
        request: Value,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Answer<T> {
        self.log.line(&format!("{method}>"), request.clone(), "");
        let result = match faults::before(&self.arguments.data, method, handle).await {
            Ok(after) => after.done(work()),
            Err(status) => Err(status),
        };
        let answer = match &result {
            Ok(_) => "OK".to_owned(),
            Err(e) => format!("{:?}: {}", e.code(), e.message()),
        };
        self.log.line(method, request, &answer);
        result.map(Response::new)
    }
}

fn capability(c: Option<&csi::VolumeCapability>) -> Value {
    use csi::volume_capability::AccessType;
    let Some(c) = c else { return Value::Null };
    let mode = c.access_mode.map(|m| m.mode().as_str_name()).unwrap_or_default();
    match &c.access_type {
        Some(AccessType::Block(_)) => json!({"block": {}, "access_mode": mode}),
        Some(AccessType::Mount(m)) => json!({"mount": {"fs_type": m.fs_type, "mount_flags": m.mount_flags,
            "volume_mount_group": m.volume_mount_group}, "access_mode": mode}),
        None => json!({"access_mode": mode}),
    }
}

fn is_block(c: Option<&csi::VolumeCapability>) -> bool {
    matches!(c.and_then(|c| c.access_type.as_ref()), Some(csi::volume_capability::AccessType::Block(_)))
}

/// Binds, unless something stands there already.
fn bind(source: &Path, target: &Path, read_only: bool) -> Result<(), Status> {
    if mount::is_mount_point(Path::new(PROC), target).map_err(internal)? {
        return Ok(());
    }
    std::fs::create_dir_all(target).map_err(internal)?;
    mount::bind(source, target, false).map_err(internal)?;
    if read_only {
        mount::remount_read_only(Path::new(PROC), target).map_err(internal)?;
    }
    Ok(())
}

fn unbind(target: &Path) -> Result<(), Status> {
    while mount::is_mount_point(Path::new(PROC), target).map_err(internal)? {
        mount::unmount(target).map_err(internal)?;
    }
    Ok(())
}

#[tonic::async_trait]
impl served::csi::node_server::Node for Node {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Answer<csi::NodeStageVolumeResponse> {
        let r = request.into_inner();
        let told = json!({"volume_id": r.volume_id, "publish_context": r.publish_context,
            "staging_target_path": r.staging_target_path, "volume_capability": capability(r.volume_capability.as_ref()),
            "secrets": r.secrets, "volume_context": r.volume_context});
        let source = self.volume(&r.volume_id);
        self.call("NodeStageVolume", &r.volume_id, told, || {
            std::fs::create_dir_all(&source).map_err(internal)?;
            if !is_block(r.volume_capability.as_ref()) {
                bind(&source, Path::new(&r.staging_target_path), false)?;
            }
            Ok(csi::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Answer<csi::NodeUnstageVolumeResponse> {
        let r = request.into_inner();
        let told = json!({"volume_id": r.volume_id, "staging_target_path": r.staging_target_path});
        self.call("NodeUnstageVolume", &r.volume_id, told, || {
            unbind(Path::new(&r.staging_target_path))?;
            Ok(csi::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Answer<csi::NodePublishVolumeResponse> {
        let r = request.into_inner();
        let told = json!({"volume_id": r.volume_id, "publish_context": r.publish_context,
            "staging_target_path": r.staging_target_path, "target_path": r.target_path,
            "volume_capability": capability(r.volume_capability.as_ref()), "readonly": r.readonly,
            "secrets": r.secrets, "volume_context": r.volume_context});
        let volume = self.volume(&r.volume_id);
        self.call("NodePublishVolume", &r.volume_id, told, || {
            let target = Path::new(&r.target_path);
            std::fs::create_dir_all(&volume).map_err(internal)?;
            if is_block(r.volume_capability.as_ref()) {
                // A node of a device that is in every kernel: a test looks at its numbers only.
                let device = rustix::fs::makedev(7, 0);
                return match rustix::fs::mknodat(CWD, target, FileType::BlockDevice, Mode::from_raw_mode(0o600), device)
                {
                    Err(e) if e != rustix::io::Errno::EXIST => Err(internal(e)),
                    _ => Ok(csi::NodePublishVolumeResponse {}),
                };
            }
            let staged = Path::new(&r.staging_target_path);
            let source = if r.staging_target_path.is_empty() { volume.as_path() } else { staged };
            bind(source, target, r.readonly)?;
            // What a pod can read shows what the driver was told last.
            if let Some(tokens) = r.volume_context.get("csi.storage.k8s.io/serviceAccount.tokens") {
                std::fs::write(volume.join("tokens"), tokens).map_err(internal)?;
            }
            Ok(csi::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Answer<csi::NodeUnpublishVolumeResponse> {
        let r = request.into_inner();
        let told = json!({"volume_id": r.volume_id, "target_path": r.target_path});
        self.call("NodeUnpublishVolume", &r.volume_id, told, || {
            let target = Path::new(&r.target_path);
            unbind(target)?;
            match std::fs::symlink_metadata(target) {
                Ok(meta) if meta.is_dir() => std::fs::remove_dir(target).map_err(internal)?,
                Ok(_) => std::fs::remove_file(target).map_err(internal)?,
                Err(_) => {}
            }
            if r.volume_id.starts_with("csi-") {
                // The kubelet made the handle up for one pod: the volume ends with it.
                let _ = std::fs::remove_dir_all(self.volume(&r.volume_id));
            }
            Ok(csi::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Answer<csi::NodeGetVolumeStatsResponse> {
        use csi::volume_usage::Unit;
        let r = request.into_inner();
        let told = json!({"volume_id": r.volume_id, "volume_path": r.volume_path, "staging_target_path": r.staging_target_path});
        self.call("NodeGetVolumeStats", &r.volume_id, told, || {
            let usage = |unit: Unit, total: i64, used: i64| csi::VolumeUsage {
                available: total - used,
                total,
                used,
                unit: unit.into(),
            };
            Ok(csi::NodeGetVolumeStatsResponse {
                usage: vec![usage(Unit::Bytes, 1 << 30, 1 << 20), usage(Unit::Inodes, 1000, 7)],
                volume_condition: Some(self.health()),
            })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Answer<csi::NodeExpandVolumeResponse> {
        let r = request.into_inner();
        let bytes = r.capacity_range.map_or(0, |c| c.required_bytes);
        let told = json!({"volume_id": r.volume_id, "volume_path": r.volume_path, "required_bytes": bytes,
            "staging_target_path": r.staging_target_path, "volume_capability": capability(r.volume_capability.as_ref()),
            "secrets": r.secrets});
        let size = self.arguments.data.join("volumes").join(format!("{}.size", r.volume_id));
        self.call("NodeExpandVolume", &r.volume_id, told, || {
            std::fs::write(size, bytes.to_string()).map_err(internal)?;
            Ok(csi::NodeExpandVolumeResponse { capacity_bytes: bytes })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Answer<csi::NodeGetCapabilitiesResponse> {
        use csi::node_service_capability::{Rpc, Type, rpc};
        self.call("NodeGetCapabilities", "", json!({}), || {
            let kind = |name: &str| match name {
                "stage" => rpc::Type::StageUnstageVolume,
                "stats" => rpc::Type::GetVolumeStats,
                "expand" => rpc::Type::ExpandVolume,
                "condition" => rpc::Type::VolumeCondition,
                "multi-writer" => rpc::Type::SingleNodeMultiWriter,
                "group" => rpc::Type::VolumeMountGroup,
                _ => rpc::Type::Unknown,
            };
            let one = |name: &String| csi::NodeServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind(name).into() })),
            };
            let all = self.arguments.capabilities.iter().map(one).collect();
            Ok(csi::NodeGetCapabilitiesResponse { capabilities: all })
        })
        .await
    }

    async fn node_get_info(&self, _: Request<csi::NodeGetInfoRequest>) -> Answer<csi::NodeGetInfoResponse> {
        self.call("NodeGetInfo", "", json!({}), || {
            let topology = self.arguments.topology.as_deref().and_then(|t| t.split_once('='));
            Ok(csi::NodeGetInfoResponse {
                node_id: self.arguments.node_id.clone(),
                max_volumes_per_node: self.limit(),
                accessible_topology: topology
                    .map(|(k, v)| csi::Topology { segments: BTreeMap::from([(k.to_owned(), v.to_owned())]) }),
            })
        })
        .await
    }
}

#[tonic::async_trait]
impl served::csi::identity_server::Identity for Node {
    async fn get_plugin_info(&self, _: Request<csi::GetPluginInfoRequest>) -> Answer<csi::GetPluginInfoResponse> {
        self.call("GetPluginInfo", "", json!({}), || {
            Ok(csi::GetPluginInfoResponse {
                name: self.arguments.name.clone(),
                vendor_version: "1".to_owned(),
                manifest: BTreeMap::new(),
            })
        })
        .await
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Answer<csi::GetPluginCapabilitiesResponse> {
        self.call("GetPluginCapabilities", "", json!({}), || Ok(csi::GetPluginCapabilitiesResponse {})).await
    }

    async fn probe(&self, _: Request<csi::ProbeRequest>) -> Answer<csi::ProbeResponse> {
        self.call("Probe", "", json!({}), || Ok(csi::ProbeResponse { ready: Some(true) })).await
    }
}
