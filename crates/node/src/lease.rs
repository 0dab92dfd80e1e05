//! The node's lease (KEP-589): the sign of life that the node controller goes by.
//!
//! Task: owned by [`start`], ends with [`Tasks::stop`]. Input: the Node object (its uid is the lease's owner). No queue. Deadline: the
//! client's for each request. API server slow or gone: five tries at once, then again and again with a backoff up to 7 s; when tries go
//! unanswered, the connections are cut, since the path may have died without a word.

use std::sync::Arc;
use std::time::Duration;

use cluster::calls::LeaseApi;
use cluster::error::{ClusterError, ClusterResult, ErrorKind};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use model::api::{Node, ObjectMeta, OwnerReference};
use pod::ports::{Clock, Random, Tasks};

use crate::object::NodeObject;
use crate::{NodeConfig, NodePorts};

/// Where node leases live.
const NAMESPACE: &str = "kube-node-lease";
/// Renewed after this part of its duration.
const RENEW: f64 = 0.25;
/// The renewal is this much later at most.
const JITTER: f64 = 0.04;
/// Tries of one renewal.
const TRIES: usize = 5;
/// First and longest pause between attempts to get the lease at all.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(7));

/// Starts the task.
pub(crate) fn start(config: &NodeConfig, ports: &NodePorts, object: NodeObject, tasks: &Tasks) {
    let keeper = LeaseKeeper {
        api: ports.leases.clone(),
        cut: ports.cut_connections.clone(),
        object,
        name: config.identity.name.clone(),
        duration: config.lease_duration,
        clock: ports.clock.clone(),
        latest: None,
        failing: None,
    };
    tasks.spawn_until_stop(keeper.run(ports.random.clone()));
}

struct LeaseKeeper {
    api: Arc<dyn LeaseApi>,
    cut: Arc<dyn Fn() + Send + Sync>,
    object: NodeObject,
    name: String,
    duration: Duration,
    clock: Clock,
    /// The lease as last written; None: to be asked for.
    latest: Option<Lease>,
    /// Why the last try failed, while it does.
    failing: Option<String>,
}

impl LeaseKeeper {
    async fn run(mut self, random: Random) {
        loop {
            self.renew().await;
            tokio::time::sleep(random.jitter(self.duration.mul_f64(RENEW), JITTER)).await;
        }
    }

    /// Renews the lease, however long it takes.
    async fn renew(&mut self) {
        let mut pause = BACKOFF.0;
        loop {
            if let Some(latest) = self.latest.take()
                && self.update(latest).await
            {
                return;
            }
            match self.get_or_create().await {
                Ok(Got::Created) => return self.went_well(),
                Ok(Got::Found) => continue,
                Err(e) => {
                    if unanswered(&e) {
                        (self.cut)();
                    }
                    self.failed(&e);
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    /// Writes the renewed lease; false: it must be looked at anew.
    async fn update(&mut self, mut latest: Lease) -> bool {
        for attempt in 0..TRIES {
            match self.api.update_lease(&self.renewed(Some(&latest))).await {
                Ok(written) => {
                    self.latest = Some(written);
                    self.went_well();
                    return true;
                }
                Err(e) if e.is_not_found() => return false,
                Err(e) if e.kind == ErrorKind::Conflict => match self.api.get_lease(NAMESPACE, &self.name).await {
                    Ok(theirs) => latest = theirs,
                    Err(_) => return false,
                },
                Err(e) => {
                    if attempt > 0 && unanswered(&e) {
                        (self.cut)();
                    }
                    let hopeless = !e.kind.is_transient();
                    self.failed(&e);
                    if hopeless || e.kind == ErrorKind::Unreachable {
                        return false;
                    }
                }
            }
        }
        false
    }

    async fn get_or_create(&mut self) -> ClusterResult<Got> {
        match self.api.get_lease(NAMESPACE, &self.name).await {
            Ok(lease) => {
                self.latest = Some(lease);
                return Ok(Got::Found);
            }
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
        // Without its owner the lease would outlive the node.
        let _ = self.object.node().wait_for(Option::is_some).await;
        match self.api.create_lease(&self.renewed(None)).await {
            Ok(lease) => {
                self.latest = Some(lease);
                Ok(Got::Created)
            }
            Err(e) if e.is_already_exists() => Ok(Got::Found),
            Err(e) => Err(e),
        }
    }

    /// The lease with a new time.
    fn renewed(&self, base: Option<&Lease>) -> Lease {
        let mut lease = base.cloned().unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        if let Some(node) = self.object.newest() {
            own(&mut lease, &node, &self.name);
        }
        let spec = lease.spec.get_or_insert_default();
        *spec = LeaseSpec {
            holder_identity: Some(self.name.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
            renew_time: Some(MicroTime(self.clock.now())),
            ..std::mem::take(spec)
        };
        lease
    }

    fn went_well(&mut self) {
        if self.failing.take().is_some() {
            tracing::info!(node = self.name, "The node's lease is renewed again");
        }
    }

    /// The same failure again and again is worth one line.
    fn failed(&mut self, error: &ClusterError) {
        let text = error.to_string();
        if self.failing.as_ref() == Some(&text) || error.kind.concerns_every_call() {
            tracing::debug!(err = text, node = self.name, "Failed to renew the node's lease");
        } else {
            tracing::error!(err = text, node = self.name, "Failed to renew the node's lease, will retry");
            self.failing = Some(text);
        }
    }
}

enum Got {
    Created,
    Found,
}

/// The path to the API server may be dead.
pub(crate) fn unanswered(error: &ClusterError) -> bool {
    error.kind == ErrorKind::Timeout && error.code == 0
}

/// Makes the node the lease's owner; an owner that was an earlier node of that name is replaced, or the lease would go with it.
fn own(lease: &mut Lease, node: &Node, name: &str) {
    let uid = node.metadata.uid.clone().unwrap_or_default();
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: name.to_owned(),
        uid,
        ..OwnerReference::default()
    };
    let owners = lease.metadata.owner_references.get_or_insert_default();
    match owners.iter().position(|o| o.kind == "Node" && o.name == name) {
        Some(at) => owners[at] = owner,
        None if owners.is_empty() => owners.push(owner),
        None => {}
    }
}
