//! Volumes of plugins as pods' workers ask for them, and what those volumes take from the API server.
//!
//! Tasks: one follows the CSIDriver objects, from the first driver on; it ends with [`Tasks::stop`] and holds what it last saw while the API
//! server is away. One has drivers asked for their limits ([`limits`]).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use cluster::calls::StorageApi;
use cluster::events::Recorder;
use cluster::{Client, Delta, Reflector, Scope};
use decide::csi::{CsiVolume, DriverRules, Growth, ResizeNews, SecretName};
use decide::selinux::Counted;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec};
use model::Timestamp;
use model::api::{ObjectReference, Secret};
use model::pod::{DesiredPod, PodUid};
use plugins::csi::Drivers;
use plugins::csi::limits::{self, Periods};
use plugins::volumes::{Attachment, Layout, Objects, Standing, Volumes, Wish};
use pod::events::Events;
use pod::objects::PodObjects;
use pod::ports::{HostError, HostResult, PluginVolume, PluginVolumes, Tasks};
use pod::registry::PodEntry;
use telemetry::metrics::{Labelled, Metrics};
use tokio::sync::watch;
use tracing::warn;

use crate::join::Cluster;
use crate::node;

/// Deltas of CSIDrivers that may wait.
const DEPTH: usize = 16;
/// gRPC's number for it.
const RESOURCE_EXHAUSTED: i32 = 8;
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
            Standing::Ready { path, relabel } => PluginVolume::Ready { path, relabel },
            Standing::Waits(what) => PluginVolume::Waits(what),
            Standing::Failed { reason, message, fresh } => PluginVolume::Failed { reason, message, fresh },
            Standing::Exhausted => PluginVolume::Exhausted,
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
    selinux: bool,
    tasks: &Tasks,
) -> Result<Volumes, tokio::task::JoinError> {
    let layout = Layout { root: root.to_owned(), proc: node::PROC.into(), node: node_name.to_owned() };
    let (drivers, stop) = (drivers.clone(), tasks.stop().clone());
    tokio::task::spawn_blocking(move || Volumes::new(layout, selinux, drivers, objects, stop)).await
}

/// What CSIDriver objects ask for, by name; None until the first list.
type Rules = Option<Arc<BTreeMap<String, CSIDriverSpec>>>;

/// The API server, for volumes.
pub(crate) struct ClusterVolumes {
    client: Client,
    recorder: Recorder,
    objects: Arc<dyn PodObjects>,
    events: Events,
    metrics: Arc<Metrics>,
    followed: OnceLock<watch::Receiver<Rules>>,
    tasks: Tasks,
}

impl ClusterVolumes {
    pub(crate) fn new(
        cluster: &Cluster,
        objects: Arc<dyn PodObjects>,
        events: Events,
        metrics: Arc<Metrics>,
        tasks: &Tasks,
    ) -> Self {
        Self {
            client: cluster.client.clone(),
            recorder: cluster.recorder.clone(),
            objects,
            events,
            metrics,
            followed: OnceLock::new(),
            tasks: tasks.clone(),
        }
    }

    fn followed(&self) -> watch::Receiver<Rules> {
        let follow = || {
            let source = Arc::new(self.client.clone());
            let (reflector, mut deltas, _) =
                Reflector::<CSIDriver>::new(source, Scope::all(), DEPTH, cluster::system_unit());
            self.tasks.spawn(reflector.run(self.tasks.stop().clone()));
            let (told, rules) = watch::channel(None);
            self.tasks.spawn(async move {
                while let Some(delta) = deltas.recv().await {
                    told.send_modify(|table| take(table, delta));
                }
            });
            rules
        };
        self.followed.get_or_init(follow).clone()
    }

    /// Has the drivers that want it asked again and again how many volumes they can take. The CSIDrivers are followed from the first driver on.
    pub(crate) async fn follow_limits(self: Arc<Self>, drivers: Drivers) {
        let mut registered = drivers.registered();
        if registered.wait_for(|all| !all.is_empty()).await.is_err() {
            return;
        }
        let mut rules = self.followed();
        let (told, periods) = watch::channel(Arc::default());
        let asked = drivers.clone();
        let ask = move |name: String| {
            let drivers = asked.clone();
            async move {
                if let Err(e) = drivers.refresh(&name).await {
                    warn!(driver = name, err = e, "Driver does not say how many volumes it can take");
                }
            }
        };
        let translate = async {
            loop {
                let table = rules.borrow_and_update().clone().unwrap_or_default();
                let period = |spec: &CSIDriverSpec| DriverRules(Some(spec.clone())).limit_period();
                let all: Periods = table.iter().filter_map(|(n, spec)| Some((n.clone(), period(spec)?))).collect();
                told.send_if_modified(|known| {
                    let news = **known != all;
                    if news {
                        *known = Arc::new(all);
                    }
                    news
                });
                if rules.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::join!(translate, limits::run(registered, periods, ask, self.tasks.stop().clone()));
    }
}

fn take(rules: &mut Rules, delta: Delta<CSIDriver>) {
    let named = |d: CSIDriver| (d.metadata.name.unwrap_or_default(), d.spec);
    let mut table = rules.take().map(Arc::unwrap_or_clone).unwrap_or_default();
    match delta {
        Delta::Snapshot(all) => table = all.into_iter().map(named).collect(),
        Delta::Upsert(driver) => table.extend([named(driver)]),
        Delta::Remove(key) => drop(table.remove(&key.name)),
    }
    *rules = Some(Arc::new(table));
}

#[async_trait]
impl Objects for ClusterVolumes {
    async fn rules(&self, driver: &str) -> Result<DriverRules, String> {
        let mut rules = self.followed();
        match tokio::time::timeout(DRIVERS, rules.wait_for(Option::is_some)).await {
            Ok(Ok(table)) => Ok(DriverRules(table.as_ref().and_then(|t| t.get(driver)).cloned())),
            _ => Err("the CSIDriver objects are not known yet".to_owned()),
        }
    }

    async fn attachment(&self, name: &str) -> Result<Attachment, String> {
        let found = self.client.get_attachment(name).await.map_err(|e| e.message)?;
        let status = found.status.unwrap_or_default();
        let code = status.attach_error.and_then(|e| e.error_code);
        Ok(Attachment {
            attached: status.attached,
            exhausted: code == Some(RESOURCE_EXHAUSTED),
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

    async fn resized(&self, pod: &DesiredPod, growth: &Growth, news: &ResizeNews) -> Result<(), String> {
        let Some(patch) = growth.patch(news, Timestamp::now()) else { return Ok(()) };
        let patched = self.client.patch_claim_status(pod.namespace(), &growth.claim, &patch).await;
        patched.map(|_| ()).map_err(|e| e.message)
    }

    fn labelled(&self, counted: Counted, plugin: &str, access_mode: &'static str) {
        self.metrics.beside.selinux(match counted {
            Counted::Admitted => Labelled::Admitted(plugin, access_mode),
            Counted::PodMismatch { refused } => Labelled::PodMismatch(access_mode, refused),
            Counted::VolumeMismatch { refused } => Labelled::VolumeMismatch(plugin, access_mode, refused),
        });
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

    async fn resized(&self, _: &DesiredPod, _: &Growth, _: &ResizeNews) -> Result<(), String> {
        alone()
    }

    fn labelled(&self, _: Counted, _: &str, _: &'static str) {}

    fn event(&self, _: &DesiredPod, _: Option<&Growth>, _: bool, _: &str, _: &str) {}
}
