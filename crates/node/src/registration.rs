//! Making the Node object, or putting right the one that is there.

use std::time::Duration;

use cluster::error::ClusterResult;
use cluster::{Backoff, patch};
use decide::node::{NodeEvent, initial, reconcile};
use model::api::{Node, NodeStatus};
use serde_json::Value;

use crate::keeper::Keeper;
use crate::object::unit;

/// First and longest pause between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(7));
/// How long the watch is waited for: it says whether there is an object already.
const PICTURE: Duration = Duration::from_secs(2);

impl Keeper {
    /// Registers the node, however long it takes.
    pub(crate) async fn register(&mut self) {
        let _ = tokio::time::timeout(PICTURE, self.object.first_picture()).await;
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1, unit(&self.random())).with_jitter(0.0);
        while let Err(e) = self.try_register().await {
            self.failed("Unable to register node with API server", &e);
            let pause = backoff.next_delay().max(e.retry_after().unwrap_or_default());
            tokio::time::sleep(pause).await;
        }
        self.registered = true;
        self.went_well();
    }

    async fn try_register(&mut self) -> ClusterResult<()> {
        let name = self.config.identity.name.clone();
        let composed = self.compose(&NodeStatus::default());
        let wanted = initial(&self.config.identity, composed.status);
        let existing = match self.object.newest() {
            Some(node) => node,
            None => match self.ports.nodes.create_node(&wanted).await {
                Ok(node) => {
                    tracing::info!(node = name, "Successfully registered node");
                    self.tell(&composed.events);
                    self.reports.wrote(true, &self.ports.random);
                    self.written(node);
                    // A new node is seen to become ready, also when it is so from the beginning.
                    if self.ready {
                        self.tell(&[NodeEvent::status_is(&name, "NodeReady")]);
                    }
                    return Ok(());
                }
                Err(e) if e.is_already_exists() => {
                    let node = self.ports.nodes.get_node(&name, false).await?;
                    self.object.offer(node.clone());
                    node.into()
                }
                Err(e) => return Err(e),
            },
        };
        let fixed = reconcile(&existing, &wanted, &self.config.identity);
        if let Some(patch) = whole_patch(&existing, &fixed) {
            let answer = self.ports.nodes.patch_node_status(&name, &patch).await;
            match answer {
                Ok(node) => self.written(node),
                Err(e) => {
                    if e.is_not_found() {
                        self.object.gone(&existing);
                    }
                    return Err(e);
                }
            }
        }
        tracing::info!(node = name, "Node was previously registered");
        self.tell(&composed.events);
        Ok(())
    }
}

/// One patch for labels, annotations and status: the status subresource takes all three.
pub(crate) fn whole_patch(old: &Node, new: &Node) -> Option<Value> {
    let (old_status, new_status) = (old.status.clone().unwrap_or_default(), new.status.clone().unwrap_or_default());
    let status = patch::node_status(&old_status, &new_status);
    match (patch::node(old, new), status) {
        (Some(mut object), Some(mut status)) => {
            if let Some(metadata) = object.get_mut("metadata") {
                status["metadata"] = metadata.take();
            }
            Some(status)
        }
        (object, status) => status.or(object),
    }
}

#[cfg(test)]
#[path = "registration_tests.rs"]
mod tests;
