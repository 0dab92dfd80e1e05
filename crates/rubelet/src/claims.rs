//! Resource claims at the API server, and what drivers offer there (ResourceSlices) on this node.
//!
//! A driver that is gone must not have pods sent here: what it offers is deleted at start, when no driver is there yet, and when its last
//! instance has been gone for [`DELAY`]. Drivers that come back publish it anew.
//!
//! Task: one for each deletion; it ends when that is done, the driver is back, or the agent stops. API server away: it is tried again for ever, at longer
//! and longer intervals.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::managers::ClaimObjects;
use async_trait::async_trait;
use cluster::client::{Call, path_of};
use cluster::{Client, ErrorKind};
use http::Method;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use pod::ports::Tasks;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

/// How long a driver may be gone before what it offers is deleted. Go's number.
const DELAY: Duration = Duration::from_secs(30);
/// First and longest wait after a failure. Go's numbers.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(300);

pub(crate) struct ClusterClaims {
    client: Client,
    node: String,
    tasks: Tasks,
    /// Deletions under way, by driver.
    wiping: Mutex<BTreeMap<String, CancellationToken>>,
}

impl ClusterClaims {
    pub(crate) fn start(client: &Client, node: &str, tasks: &Tasks) -> Arc<Self> {
        let this =
            Self { client: client.clone(), node: node.to_owned(), tasks: tasks.clone(), wiping: Mutex::default() };
        tasks.spawn_until_stop(wipe(this.client.clone(), this.node.clone(), None));
        Arc::new(this)
    }
}

#[async_trait]
impl ClaimObjects for ClusterClaims {
    async fn claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, String> {
        self.client.get::<ResourceClaim>(Some(namespace), name, false).await.map_err(|e| e.message)
    }

    fn driver_changed(&self, driver: &str, usable: bool) {
        let mut wiping = self.wiping.lock().unwrap_or_else(PoisonError::into_inner);
        if usable {
            if let Some(stop) = wiping.remove(driver) {
                stop.cancel();
            }
            return;
        }
        let stop = self.tasks.stop().child_token();
        wiping.insert(driver.to_owned(), stop.clone());
        let (client, node, driver) = (self.client.clone(), self.node.clone(), driver.to_owned());
        self.tasks.spawn(async move {
            let wiping = async {
                tokio::time::sleep(DELAY).await;
                wipe(client, node, Some(driver)).await;
            };
            tokio::select! { biased; () = stop.cancelled() => {}, () = wiping => {} }
        });
    }
}

/// Deletes what a driver, or every one, offers on this node.
async fn wipe(client: Client, node: String, driver: Option<String>) {
    let mut selector = format!("spec.nodeName={node}");
    if let Some(driver) = &driver {
        selector.push_str(&format!(",spec.driver={driver}"));
    }
    let mut wait = FIRST;
    loop {
        let call = Call::get("delete ResourceSlices", path_of::<ResourceSlice>(None, None, None));
        let options = json!({"kind": "DeleteOptions", "apiVersion": "v1"});
        let done = match call.with_body(Method::DELETE, &options) {
            Ok(mut call) => {
                call.query.push(("fieldSelector", selector.clone()));
                client.send(call).await
            }
            Err(e) => Err(e),
        };
        match done {
            Ok(_) => {
                info!(selector, "Deleted ResourceSlices");
                return;
            }
            // A server without this API has none.
            Err(e) if e.kind == ErrorKind::NotFound => return,
            Err(e) => debug!(
                err = &e as &dyn std::error::Error,
                selector, "ResourceSlices cannot be deleted, it is tried again"
            ),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST);
    }
}
