//! The node's graceful shutdown on this host: logind as the service that shuts down, the workers as those who end pods.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use config::{Gate, Gates, KubeletConfiguration};
use decide::shutdown::{self, Period};
use futures::stream::BoxStream;
use host::logind::Logind;
use model::pod::PodUid;
use node::shutdown::{ActivePod, Lock, NodePods, ShutdownService, ShutdownSession, StateFile};
use pod::admit::AdmitHandle;
use pod::ends::{Disruption, EndPod, Failing, PodEnds};
use pod::ports::PodHost;
use pod::registry::{PodEntry, Registry, WorkerState};

/// How shutdowns are held up; empty: not at all.
pub(crate) fn periods(config: &KubeletConfiguration, gates: &Gates) -> Vec<Period> {
    if !gates.enabled(Gate::GracefulNodeShutdown) {
        return Vec::new();
    }
    let by_priority: Vec<_> = match gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority) {
        true => config
            .shutdown_grace_period_by_pod_priority
            .iter()
            .map(|p| Period { priority: p.priority, seconds: p.shutdown_grace_period_seconds })
            .collect(),
        false => Vec::new(),
    };
    shutdown::periods(&by_priority, config.shutdown_grace_period, config.shutdown_grace_period_critical_pods)
}

/// logind on the system bus.
pub(crate) struct SystemLogind;

struct Session(Logind);

#[async_trait]
impl ShutdownService for SystemLogind {
    async fn connect(&self) -> Result<Box<dyn ShutdownSession>, String> {
        // The bus of tests is another one; libdbus and systemd know the same variable.
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").ok();
        let logind = Logind::connect(address.as_deref()).await.map_err(|e| e.full())?;
        Ok(Box::new(Session(logind)))
    }
}

#[async_trait]
impl ShutdownSession for Session {
    async fn max_delay(&self) -> Result<Duration, String> {
        self.0.max_delay().await.map_err(|e| e.full())
    }

    async fn set_max_delay(&self, delay: Duration) -> Result<(), String> {
        let failed = |e: host::Failed| format!("unable to override inhibit delay by shutdown manager: {}", e.full());
        self.0.set_max_delay(delay).await.map_err(failed)
    }

    async fn is_shutting_down(&self) -> Result<bool, String> {
        self.0.is_shutting_down().await.map_err(|e| e.full())
    }

    async fn inhibit(&self) -> Result<Lock, String> {
        Ok(Box::new(self.0.inhibit().await.map_err(|e| e.full())?))
    }

    async fn shutdowns(&self) -> Result<BoxStream<'static, bool>, String> {
        self.0.shutdowns().await.map_err(|e| format!("failed to monitor shutdown: {}", e.full()))
    }
}

/// The state file below the root directory.
pub(crate) struct ShutdownTimes {
    host: Arc<dyn PodHost>,
    file: PathBuf,
}

impl ShutdownTimes {
    /// None without the gate.
    pub(crate) fn open(gates: &Gates, host: &Arc<dyn PodHost>, root: &Path) -> Option<Arc<dyn StateFile>> {
        let kept = gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority);
        kept.then(|| Arc::new(Self { host: host.clone(), file: root.join(shutdown::STATE_FILE) }) as Arc<dyn StateFile>)
    }
}

#[async_trait]
impl StateFile for ShutdownTimes {
    async fn read(&self) -> Result<Option<Vec<u8>>, String> {
        self.host.read_file(&self.file).await.map_err(|e| e.chain())
    }

    async fn write(&self, content: Vec<u8>) -> Result<(), String> {
        self.host.write_atomic(&self.file, content, 0o644).await.map_err(|e| e.chain())
    }
}

/// The workers' pods.
pub(crate) struct Workers {
    pub(crate) registry: Arc<Registry>,
    pub(crate) admit: AdmitHandle,
    pub(crate) ends: PodEnds,
}

/// How often it is looked whether a pod has ended: nobody needs to hear of it sooner while the machine goes down.
const LOOK: Duration = Duration::from_millis(100);

fn has_ended(entry: &PodEntry) -> bool {
    let view = entry.view();
    view.state == WorkerState::Terminated && view.finished
}

#[async_trait]
impl NodePods for Workers {
    fn active(&self) -> Vec<ActivePod> {
        let all = self.registry.all();
        let pods = all.iter().filter(|entry| !has_ended(entry)).filter_map(|entry| {
            let view = entry.view();
            // What only the runtime knows is being ended already.
            let spec = view.desired.as_ref()?.spec();
            Some(ActivePod {
                uid: entry.uid.clone(),
                name: format!("{}_{}", view.name, view.namespace),
                priority: spec.priority.unwrap_or(0),
                grace: spec.termination_grace_period_seconds,
            })
        });
        pods.collect()
    }

    async fn end(&self, uid: &PodUid, grace: i64) {
        let failing = Failing {
            reason: shutdown::REASON.to_owned(),
            message: shutdown::MESSAGE.to_owned(),
            disruption: Some(Disruption {
                reason: shutdown::DISRUPTION.to_owned(),
                message: shutdown::MESSAGE.to_owned(),
            }),
        };
        self.ends.end(EndPod { uid: uid.clone(), failing, grace: Some(grace) }).await;
        while self.registry.get(uid).is_some_and(|entry| !has_ended(&entry)) {
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn refuse(&self, shutting_down: bool) {
        self.admit.shutting_down(shutting_down).await;
    }
}
