//! The simulated node put through what nodes go through.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod api;
mod checker;
mod clock;
mod collection;
mod crash_loop;
mod crash_points;
mod events;
mod life;
mod planted;
mod probes;
mod resize;
mod runtime;
mod seeds;
mod static_pods;

use std::time::Duration;

use cri_api::v1::{ContainerState, ContainerStatus};
use sim::Node;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// The newest container of this name.
fn newest(node: &Node, uid: &str, name: &str) -> ContainerStatus {
    let of_name = |c: &ContainerStatus| c.metadata.as_ref().is_some_and(|m| m.name == name);
    node.containers(uid).into_iter().rfind(of_name).expect("a container of this name")
}

/// The id of the container of this name that runs.
fn running_id(node: &Node, uid: &str, name: &str) -> String {
    let c = newest(node, uid, name);
    assert_eq!(c.state(), ContainerState::ContainerRunning);
    c.id
}

/// Seconds from the beginning at which containers of this name were started; those that were removed since are left out.
fn starts(node: &Node, uid: &str, name: &str) -> Vec<f64> {
    let epoch = fakes::Settings::default().epoch.as_nanosecond();
    let of_name = |c: &ContainerStatus| c.metadata.as_ref().is_some_and(|m| m.name == name) && c.started_at > 0;
    let at = |c: ContainerStatus| (i128::from(c.started_at) - epoch) as f64 / 1e9;
    node.containers(uid).into_iter().filter(of_name).map(at).collect()
}

/// Makes the node ready for a pod and waits until all of it runs.
async fn up(node: &mut Node, file: &str, manifest: &sim::Manifest) -> String {
    node.write(file, manifest);
    let uid = node.uid(file);
    assert!(node.until(20 * SECOND, |n| n.all_run(&uid) && n.phase(&uid) == "Running").await, "{:?}", node.missing());
    uid
}
