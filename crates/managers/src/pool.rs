//! Keeps running containers on the CPUs that are theirs: those without CPUs of their own on the shared pool, as it shrinks and grows.
//!
//! Task: [`keep`], owned by wire.rs, ends with the agent. Input: the pool (newest value). It looks at the runtime when the pool changes and once more a
//! while later, for a container that was made meanwhile with the pool of before; else it sleeps. Deadline: each runtime call's. Runtime slow or
//! gone: what could not be told is told with the next look, which comes after [`AGAIN`] as long as something is left.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cri::port::{CriResult, RuntimeMutator, RuntimeReader};
use cri_api::v1;
use pod::ports::Tasks;
use tracing::{info, warn};

use crate::Managers;

/// Until the second look.
const AGAIN: Duration = Duration::from_secs(10);

/// The right to say which CPUs a container runs on, and nothing else.
#[derive(Clone)]
pub struct CpusetSetter(Arc<dyn RuntimeMutator>);

impl CpusetSetter {
    /// Narrows the runtime's port.
    pub fn new(runtime: Arc<dyn RuntimeMutator>) -> Self {
        Self(runtime)
    }

    async fn set(&self, id: &str, cpus: &str) -> CriResult<()> {
        let resources = v1::LinuxContainerResources { cpuset_cpus: cpus.to_owned(), ..Default::default() };
        self.0.update_container_resources(id, resources).await
    }
}

/// Starts the task; without the static policy there is none.
pub fn keep(managers: &Managers, reader: Arc<dyn RuntimeReader>, setter: CpusetSetter, tasks: &Tasks) {
    if managers.0.book().cpus.is_none() {
        return;
    }
    let managers = managers.clone();
    tasks.spawn_until_stop(async move {
        let mut pool = managers.0.pool.subscribe();
        // What was told to which container.
        let mut told: BTreeMap<String, String> = BTreeMap::new();
        pool.mark_changed();
        loop {
            if pool.changed().await.is_err() {
                return;
            }
            let mut looks = 0;
            while looks < 2 {
                let done = look(&managers, &*reader, &setter, &mut told).await;
                looks = if done { looks + 1 } else { 1 };
                if looks < 2 {
                    tokio::select! {
                        () = tokio::time::sleep(AGAIN) => {}
                        changed = pool.changed() => match changed {
                            Ok(()) => looks = 0,
                            Err(_) => return,
                        },
                    }
                }
            }
        }
    });
}

/// Tells every running container its CPUs, those that know them already left out. False when some could not be told.
async fn look(
    managers: &Managers,
    reader: &dyn RuntimeReader,
    setter: &CpusetSetter,
    told: &mut BTreeMap<String, String>,
) -> bool {
    let state = v1::ContainerStateValue { state: v1::ContainerState::ContainerRunning as i32 };
    let filter = v1::ContainerFilter { state: Some(state), ..Default::default() };
    let running = match reader.list_containers(Some(filter)).await {
        Ok(running) => running,
        Err(e) => {
            warn!(err = &e as &dyn std::error::Error, "Containers cannot be listed, their CPUs are looked at later");
            return false;
        }
    };
    told.retain(|id, _| running.iter().any(|c| c.id == *id));
    let mut done = true;
    for container in running {
        let label = |name: &str| container.labels.get(name).map(String::as_str);
        let (Some(pod), Some(name)) = (label("io.kubernetes.pod.uid"), label("io.kubernetes.container.name")) else {
            continue;
        };
        let wanted = managers.0.book().cpus.as_ref().map(|cpus| cpus.of(pod, name).to_string()).unwrap_or_default();
        if wanted.is_empty() || told.get(&container.id) == Some(&wanted) {
            continue;
        }
        match setter.set(&container.id, &wanted).await {
            Ok(()) => {
                info!(pod, container = name, id = container.id, cpus = wanted, "Container's CPUs are set");
                told.insert(container.id, wanted);
            }
            Err(e) => {
                warn!(
                    pod,
                    container = name,
                    err = &e as &dyn std::error::Error,
                    "Container's CPUs cannot be set, it is tried again"
                );
                done = false;
            }
        }
    }
    done
}
