//! Writing the node's status when it changed, or when it was not written for long.

use std::time::Duration;

use cluster::error::{ClusterResult, ErrorKind};
use decide::node::csi::mark_node;
use decide::node::{changed, metadata_of_status};
use model::api::Node;
use pod::ports::Random;
use tokio::time::Instant;

use crate::keeper::Keeper;
use crate::lease::unanswered;
use crate::registration::whole_patch;

/// Tries of one update.
const TRIES: usize = 5;

/// When the status is written although it did not change.
pub(crate) struct Reports {
    period: Duration,
    next: Option<Instant>,
}

impl Reports {
    pub(crate) fn new(period: Duration) -> Self {
        Self { period, next: None }
    }

    fn due(&self) -> bool {
        self.next.is_none_or(|next| Instant::now() >= next)
    }

    /// A status was written. After a change the next report comes at a random time around the period, so that nodes which changed
    /// together (a zone that failed) do not report together ever after.
    pub(crate) fn wrote(&mut self, changed: bool, random: &Random) {
        let period = if changed { self.period.mul_f64(0.5 + random.unit()) } else { self.period };
        self.next = Some(Instant::now() + period);
    }
}

impl Keeper {
    /// Brings the status up to date; gives up after [`TRIES`], until the next tick.
    pub(crate) async fn update(&mut self) {
        for attempt in 0..TRIES {
            let Err(e) = self.try_update(attempt == 0).await else { return self.went_well() };
            if attempt > 0 && unanswered(&e) {
                (self.ports.cut_connections)();
            }
            self.failed("Unable to update node status", &e);
            // Trying again at once helps against a stale object or a server that hiccups, not against these.
            let pointless = !matches!(e.kind, ErrorKind::Timeout | ErrorKind::Server | ErrorKind::Conflict);
            if pointless {
                return;
            }
        }
    }

    async fn try_update(&mut self, first: bool) -> ClusterResult<()> {
        let Some(node) = self.current(first).await? else { return Ok(()) };
        self.uid.clone_from(&node.metadata.uid);
        let old = node.status.clone().unwrap_or_default();
        let composed = self.compose(&old);
        let mut fresh = Node { status: Some(composed.status), ..Node::clone(&node) };
        metadata_of_status(&mut fresh, &self.config.identity);
        if let Some(drivers) = &mut self.ports.drivers {
            mark_node(&mut fresh, &drivers.borrow_and_update());
        }
        let is_changed = fresh.metadata != node.metadata || fresh.status.as_ref().is_some_and(|s| changed(&old, s));
        if !is_changed && !self.reports.due() {
            self.seen(&node);
            return Ok(());
        }
        let Some(patch) = whole_patch(&node, &fresh) else {
            self.seen(&node);
            self.reports.wrote(false, &self.ports.random);
            return Ok(());
        };
        match self.heartbeat().patch_node_status(&self.config.identity.name, &patch).await {
            Ok(answer) => {
                self.tell(&composed.events);
                self.reports.wrote(is_changed, &self.ports.random);
                self.written(answer);
                Ok(())
            }
            Err(e) => {
                if e.is_not_found() {
                    self.object.gone(&node);
                    self.registered = false;
                }
                Err(e)
            }
        }
    }

    /// Nothing to write: what is there is what we would write.
    fn seen(&mut self, node: &Node) {
        if node.status.is_some() {
            self.written(node.clone());
        }
    }

    /// The object to start from: the watch's at first, then the server's newest. None: there is none, somebody is to make it.
    async fn current(&mut self, first: bool) -> ClusterResult<Option<std::sync::Arc<Node>>> {
        if first {
            if let Some(node) = self.object.newest() {
                return Ok(Some(node));
            }
            if self.object.is_absent() {
                return Ok(None);
            }
        }
        match self.heartbeat().get_node(&self.config.identity.name, first).await {
            Ok(node) => {
                self.object.offer(node.clone());
                Ok(Some(node.into()))
            }
            Err(e) if e.is_not_found() => {
                self.registered = false;
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}
