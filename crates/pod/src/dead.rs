//! The limit of dead containers for the whole node (`--maximum-dead-containers`), where there is one: no worker sees further than its own pod.
//!
//! Task: owned by wire.rs and started only with a limit, ends with [`Tasks::stop`]. Every minute it lists sandboxes and containers, decides what is too much
//! ([`decide::gc`]) and asks the workers of those pods to remove it. It removes nothing itself. Runtime slow or gone: the next minute tries again.

use std::sync::Arc;
use std::time::Duration;

use cri::port::RuntimeReader;
use decide::gc::{ContainerGc, ContainerGcPolicy, Removal, container_gc};
use tracing::warn;

use crate::ports::{Clock, Tasks};
use crate::registry::{Collect, Registry};

/// Go's `ContainerGCPeriod`.
const PERIOD: Duration = Duration::from_secs(60);

/// Starts the task, if the node has a limit.
pub fn start(
    policy: ContainerGcPolicy,
    reader: Arc<dyn RuntimeReader>,
    registry: Arc<Registry>,
    clock: Clock,
    tasks: &Tasks,
) {
    if policy.max_total < 0 {
        return;
    }
    tasks.spawn_until_stop(async move {
        let mut tick = tokio::time::interval(PERIOD);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            if let Err(e) = check(policy, &*reader, &registry, &clock).await {
                warn!(err = %e, "Container garbage collection failed");
            }
        }
    });
}

async fn check(
    policy: ContainerGcPolicy,
    reader: &dyn RuntimeReader,
    registry: &Registry,
    clock: &Clock,
) -> cri::port::CriResult<()> {
    let lists = futures::future::try_join(reader.list_pod_sandbox(None), reader.list_containers(None)).await?;
    let pods = decide::observe::group(&lists.0, &lists.1);
    let removals = container_gc(&ContainerGc {
        pods: &pods,
        // Each worker removes all of a pod that is gone.
        gone: &|_| false,
        held: &|_| false,
        sources_ready: false,
        policy,
        now: clock.now(),
    });
    for removal in removals {
        let Removal::Container { uid, id, .. } = removal else { continue };
        if let Some(entry) = registry.get(&uid) {
            entry.collect(Collect::These(vec![id]));
        }
    }
    Ok(())
}
