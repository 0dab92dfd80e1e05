//! The address range of this node's pods, told to the runtime (CRI UpdateRuntimeConfig): for one that is not configured for itself, as
//! containerd with a CNI configuration template.
//!
//! Task: [`PodCidr::follow`], owned by `wire`, ends with the agent (a call cut off is made again by the next one). Input: the Node object, a
//! watch channel. Deadline: the client's for runtime calls. Runtime gone: tried again every 10 s, as often as Go looks.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use cri::{CriResult, RuntimeMutator};
use decide::node::pod_cidr;
use model::api::Node;
use tokio::sync::watch;
use tracing::{info, warn};

/// Pause after a failure.
const AGAIN: Duration = Duration::from_secs(10);

/// The right to tell the runtime this, and nothing else of the right to change it.
pub(crate) struct PodCidr {
    runtime: Arc<dyn RuntimeMutator>,
    /// What the runtime was told last.
    given: String,
}

impl PodCidr {
    /// The runtime is as nobody told it anything.
    pub(crate) fn new(runtime: Arc<dyn RuntimeMutator>) -> Self {
        Self { runtime, given: String::new() }
    }

    /// Tells the runtime `cidr`, unless it knows.
    pub(crate) async fn give(&mut self, cidr: &str) -> CriResult<()> {
        if cidr != self.given {
            let network = cri_api::v1::NetworkConfig { pod_cidr: cidr.to_owned() };
            self.runtime.update_runtime_config(cri_api::v1::RuntimeConfig { network_config: Some(network) }).await?;
            info!(originalPodCIDR = self.given, newPodCIDR = cidr, "Updating Pod CIDR");
            cidr.clone_into(&mut self.given);
        }
        Ok(())
    }

    /// Tells the runtime what the node's object says, now and when it changes. An object that says nothing changes nothing.
    pub(crate) async fn follow(mut self, mut node: watch::Receiver<Option<Arc<Node>>>) {
        let mut failing = false;
        loop {
            let cidr = node.borrow_and_update().as_deref().map(pod_cidr).filter(|cidr| !cidr.is_empty());
            let told = match &cidr {
                Some(cidr) => self.give(cidr).await,
                None => Ok(()),
            };
            if let Err(e) = &told
                && !failing
            {
                warn!(err = e as &dyn Error, cidr, "Pod CIDR could not be given to the runtime, will retry");
            }
            failing = told.is_err();
            tokio::select! {
                changed = node.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = tokio::time::sleep(AGAIN), if failing => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use cri::CriClient;
    use fakes::{FakeRuntime, Fault, Rule};
    use model::api::NodeSpec;

    use super::*;

    fn node(cidrs: &[&str]) -> Option<Arc<Node>> {
        let all: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
        let spec = NodeSpec { pod_cidr: all.first().cloned(), pod_cidrs: Some(all), ..NodeSpec::default() };
        Some(Arc::new(Node { spec: Some(spec), ..Node::default() }))
    }

    // What the Go kubelet sends: nothing without a range, the list with commas, nothing again when it stays the same.
    #[tokio::test]
    async fn the_runtime_is_told_once_for_each_change_and_again_after_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = FakeRuntime::new(1);
        let server = fakes::serve(&runtime, &dir.path().join("cri.sock")).unwrap();
        let client = CriClient::connect(&server.endpoint(), None, Duration::from_secs(10)).unwrap();
        let (newest, seen) = watch::channel(None);
        let task = tokio::spawn(PodCidr::new(Arc::new(client)).follow(seen));
        let told = || (runtime.pod_cidr(), runtime.calls_of("UpdateRuntimeConfig").len());
        let wait = async |cidr: &str, calls: usize| {
            let wanted = (cidr.to_owned(), calls);
            let done = tokio::time::timeout(Duration::from_secs(10), async {
                while told() != wanted {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            assert!(done.await.is_ok(), "{wanted:?}, not {:?}", told());
        };
        newest.send_replace(Some(Arc::default()));
        newest.send_replace(node(&["10.1.0.0/24", "fd00:1::/64"]));
        wait("10.1.0.0/24,fd00:1::/64", 1).await;
        // Another heartbeat.
        newest.send_replace(node(&["10.1.0.0/24", "fd00:1::/64"]));
        newest.send_replace(node(&[]));
        newest.send_replace(node(&["10.2.0.0/24"]));
        wait("10.2.0.0/24", 2).await;
        runtime.inject(Rule::new("UpdateRuntimeConfig", Fault::Fail(14, "busy".to_owned())));
        newest.send_replace(node(&["10.3.0.0/24"]));
        wait("10.2.0.0/24", 3).await;
        runtime.heal();
        // A change or 10 s, whichever comes first.
        newest.send_replace(node(&["10.3.0.0/24"]));
        wait("10.3.0.0/24", 4).await;
        drop(newest);
        task.await.unwrap();
    }
}
