//! The CSINode: which drivers the node has, with their limits.
//!
//! Task: owned by [`start`], ends with [`Tasks::stop`]. Inputs: the node's object, and the registered drivers, both as newest values. Without a
//! CSINode the node is not ready. A request that fails is tried again after 100 ms, doubling to 7 s; the drivers do not wait for it.

use std::sync::Arc;
use std::time::Duration;

use cluster::Backoff;
use cluster::calls::NodeApi;
use cluster::error::ClusterResult;
use decide::node::csi::{self, Drivers};
use model::api::Node;
use pod::ports::{Random, Tasks};
use tokio::sync::watch;

use crate::object::unit;

/// First and longest pause between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(7));

/// Starts the task; true once the object is there.
pub(crate) fn start(
    api: Arc<dyn NodeApi>,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    mut drivers: watch::Receiver<Arc<Drivers>>,
    random: &Random,
    tasks: &Tasks,
) -> watch::Receiver<bool> {
    let (ready, receiver) = watch::channel(false);
    let random = random.clone();
    tasks.spawn_until_stop(async move {
        loop {
            let Ok(newest) = node.wait_for(Option::is_some).await.map(|n| n.clone()) else { return };
            let Some(newest) = newest else { continue };
            let uid = newest.metadata.uid.clone();
            let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1, unit(&random)).with_jitter(0.0);
            let known = drivers.borrow_and_update().clone();
            while let Err(e) = put(&*api, &newest, &known).await {
                tracing::warn!(err = %e, "CSINode cannot be written, it is tried again");
                tokio::time::sleep(backoff.next_delay().max(e.retry_after().unwrap_or_default())).await;
                let same = node.borrow().as_ref().is_some_and(|n| n.metadata.uid == uid);
                if !same || drivers.has_changed().unwrap_or(false) {
                    break;
                }
            }
            let same = node.borrow().as_ref().is_some_and(|n| n.metadata.uid == uid);
            if !same || drivers.has_changed().unwrap_or(false) {
                continue;
            }
            ready.send_if_modified(|ready| !std::mem::replace(ready, true));
            let another = node.wait_for(|n| n.as_ref().is_some_and(|n| n.metadata.uid != uid));
            tokio::select! {
                Ok(_) = another => {}
                Ok(()) = drivers.changed() => drivers.mark_changed(),
                else => return,
            }
        }
    });
    receiver
}

async fn put(api: &dyn NodeApi, node: &Node, drivers: &Drivers) -> ClusterResult<()> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let existing = match api.get_csi_node(name).await {
        Ok(existing) => Some(existing),
        Err(e) if e.is_not_found() => None,
        Err(e) => return Err(e),
    };
    match csi::csi_node(existing.as_ref(), node, drivers) {
        None => Ok(()),
        Some(wanted) if existing.is_none() => api.create_csi_node(&wanted).await.map(|_| ()),
        Some(wanted) => api.update_csi_node(&wanted).await.map(|_| ()),
    }
}
