//! Volumes of plugins as pods' workers ask for them, and what those volumes take from the API server.
//!
//! Task: one follows the CSIDriver objects, from the first question on; it ends with [`Tasks::stop`] and holds what it last saw while the API
//! server is away.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cluster::calls::StorageApi;
use cluster::events::Recorder;
use cluster::{Client, Delta, Reflector, Scope};
use decide::csi::{CsiVolume, DriverRules, Growth, SecretName};
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec};
use model::Timestamp;
use model::api::{ObjectReference, Secret};
use model::pod::{DesiredPod, PodUid};
use plugins::csi::Drivers;
use plugins::volumes::{Attachment, Layout, Objects, Standing, Volumes, Wish};
use pod::events::Events;
use pod::objects::PodObjects;
use pod::ports::{HostError, HostResult, PluginVolume, PluginVolumes, Tasks};
use pod::registry::PodEntry;
use serde_json::json;
use tokio::sync::watch;

use crate::join::Cluster;
use crate::node;

/// Deltas of CSIDrivers that may wait.
const DEPTH: usize = 16;
/// How long a mount waits for the first list of them.
const DRIVERS: Duration = Duration::from_secs(10);

/// The port of the workers.
pub(crate) struct Port(pub(crate) Volumes);

#[async_trait]
impl PluginVolumes for Port {
    async fn mount(&self, pod: &DesiredPod, entry: &Arc<PodEntry>, volume: &CsiVolume, again: bool) -> PluginVolume {
        let entry = Arc::downgrade(entry);
        let wake = Arc::new(move || {
            if let Some(entry) = entry.upgrade() {
                entry.objects_changed();
            }
        });
        match self.0.mount(Wish { pod: pod.clone(), volume: volume.clone(), again, wake }).await {
            Standing::Ready { path } => PluginVolume::Ready(path),
            Standing::Waits(what) => PluginVolume::Waits(what),
            Standing::Failed { reason, message, fresh } => PluginVolume::Failed { reason, message, fresh },
        }
    }

    async fn unmount(&self, uid: &PodUid) -> HostResult<()> {
        self.0.unmount(uid).await.map_err(|e| HostError::new("unmount volumes of plugins", e))
    }
}

/// Looks for volumes of plugins on disk; nothing is begun before they are started.
pub(crate) async fn find(
    root: &Path,
    node_name: &str,
    drivers: &Drivers,
    objects: Arc<dyn Objects>,
    tasks: &Tasks,
) -> Result<Volumes, tokio::task::JoinError> {
    let layout = Layout { root: root.to_owned(), proc: node::PROC.into(), node: node_name.to_owned() };
    let (drivers, stop) = (drivers.clone(), tasks.stop().clone());
    tokio::task::spawn_blocking(move || Volumes::new(layout, drivers, objects, stop)).await
}

/// What CSIDriver objects ask for, by name; None until the first list.
type Rules = Option<BTreeMap<String, CSIDriverSpec>>;

/// The followed CSIDrivers.
struct Followed {
    table: Arc<Mutex<Rules>>,
    seen: watch::Receiver<bool>,
}

/// The API server, for volumes.
pub(crate) struct ClusterVolumes {
    client: Client,
    recorder: Recorder,
    objects: Arc<dyn PodObjects>,
    events: Events,
    followed: OnceLock<Followed>,
    tasks: Tasks,
}

impl ClusterVolumes {
    pub(crate) fn new(cluster: &Cluster, objects: Arc<dyn PodObjects>, events: Events, tasks: &Tasks) -> Self {
        Self {
            client: cluster.client.clone(),
            recorder: cluster.recorder.clone(),
            objects,
            events,
            followed: OnceLock::new(),
            tasks: tasks.clone(),
        }
    }

    fn followed(&self) -> &Followed {
        self.followed.get_or_init(|| {
            let source = Arc::new(self.client.clone());
            let (reflector, mut deltas, _) =
                Reflector::<CSIDriver>::new(source, Scope::all(), DEPTH, cluster::system_unit());
            self.tasks.spawn(reflector.run(self.tasks.stop().clone()));
            let table: Arc<Mutex<Rules>> = Arc::default();
            let (told, seen) = watch::channel(false);
            let taken = table.clone();
            self.tasks.spawn(async move {
                while let Some(delta) = deltas.recv().await {
                    take(&mut taken.lock().unwrap_or_else(PoisonError::into_inner), delta);
                    told.send_if_modified(|told| !std::mem::replace(told, true));
                }
            });
            Followed { table, seen }
        })
    }
}

fn take(table: &mut Rules, delta: Delta<CSIDriver>) {
    let named = |d: CSIDriver| (d.metadata.name.unwrap_or_default(), d.spec);
    match delta {
        Delta::Snapshot(all) => *table = Some(all.into_iter().map(named).collect()),
        Delta::Upsert(driver) => {
            let (name, spec) = named(driver);
            table.get_or_insert_default().insert(name, spec);
        }
        Delta::Remove(key) => {
            if let Some(table) = table {
                table.remove(&key.name);
            }
        }
    }
}

#[async_trait]
impl Objects for ClusterVolumes {
    async fn rules(&self, driver: &str) -> Result<DriverRules, String> {
        let followed = self.followed();
        let mut seen = followed.seen.clone();
        if !matches!(tokio::time::timeout(DRIVERS, seen.wait_for(|seen| *seen)).await, Ok(Ok(_))) {
            return Err("the CSIDriver objects are not known yet".to_owned());
        }
        let table = followed.table.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(DriverRules(table.as_ref().and_then(|t| t.get(driver)).cloned()))
    }

    async fn attachment(&self, name: &str) -> Result<Attachment, String> {
        let found = self.client.get_attachment(name).await.map_err(|e| e.message)?;
        let status = found.status.unwrap_or_default();
        Ok(Attachment {
            attached: status.attached,
            is_going: found.metadata.deletion_timestamp.is_some(),
            metadata: status.attachment_metadata.unwrap_or_default(),
        })
    }

    async fn secret(&self, name: &SecretName) -> Result<BTreeMap<String, String>, String> {
        let secret: Secret = self.client.get(Some(&name.namespace), &name.name, false).await.map_err(|e| e.message)?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, text(value.0))).collect())
    }

    async fn token(
        &self,
        pod: &DesiredPod,
        audience: &str,
        seconds: Option<i64>,
    ) -> Result<(String, Timestamp), String> {
        // Without a word about it, a token lives for an hour.
        let token = self.objects.token(pod, audience, seconds.or(Some(3600))).await.map_err(|e| e.to_string())?;
        Ok((token.token, token.ends))
    }

    async fn grown(&self, pod: &DesiredPod, growth: &Growth) -> Result<(), String> {
        let over = |kind: &str| json!({"$patch": "delete", "type": kind});
        let patch = json!({
            "metadata": {"uid": growth.claim_uid},
            "status": {
                "capacity": {"storage": growth.text},
                "allocatedResourceStatuses": {"storage": null},
                "conditions": [over("FileSystemResizePending"), over("Resizing"), over("NodeResizeError")],
            },
        });
        let patched = self.client.patch_claim_status(pod.namespace(), &growth.claim, &patch).await;
        patched.map(|_| ()).map_err(|e| e.message)
    }

    fn event(&self, pod: &DesiredPod, claim: Option<&Growth>, warning: bool, reason: &str, message: &str) {
        if warning {
            self.events.pod_warning(pod, reason, message);
        } else {
            self.events.pod_normal(pod, reason, message);
        }
        if let Some(growth) = claim {
            let about = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                namespace: Some(pod.namespace().to_owned()),
                name: Some(growth.claim.clone()),
                uid: Some(growth.claim_uid.clone()),
                ..ObjectReference::default()
            };
            self.recorder.event(&about, if warning { "Warning" } else { "Normal" }, reason, message);
        }
    }
}

/// No API server: what stands can be taken down, and nothing else.
pub(crate) struct Alone;

fn alone<T>() -> Result<T, String> {
    Err("there is no API server that could be asked".to_owned())
}

#[async_trait]
impl Objects for Alone {
    async fn rules(&self, _: &str) -> Result<DriverRules, String> {
        alone()
    }

    async fn attachment(&self, _: &str) -> Result<Attachment, String> {
        alone()
    }

    async fn secret(&self, _: &SecretName) -> Result<BTreeMap<String, String>, String> {
        alone()
    }

    async fn token(&self, _: &DesiredPod, _: &str, _: Option<i64>) -> Result<(String, Timestamp), String> {
        alone()
    }

    async fn grown(&self, _: &DesiredPod, _: &Growth) -> Result<(), String> {
        alone()
    }

    fn event(&self, _: &DesiredPod, _: Option<&Growth>, _: bool, _: &str, _: &str) {}
}
