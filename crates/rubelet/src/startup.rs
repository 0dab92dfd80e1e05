//! How long the node's start took, for the metrics: from the start of the system to this process, to the registration, to Ready.
//!
//! Task: one, from the start until the node is Ready for the first time. Input: the node's object as the watch shows it. It does nothing else,
//! and nothing waits for it.

use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use model::api::Node;
use pod::ports::Tasks;
use telemetry::metrics::Metrics;
use tokio::sync::watch;

/// Follows the node's start. To be called when its registration begins.
pub(crate) fn follow(mut node: watch::Receiver<Option<Arc<Node>>>, proc: &Path, metrics: &Arc<Metrics>, tasks: &Tasks) {
    let begun = Timestamp::now();
    let (Ok(up), Ok(Some(own))) = (host::proc::uptime(proc), host::proc::process(proc, std::process::id())) else {
        return;
    };
    let ticks = rustix::param::clock_ticks_per_second();
    let (up, pre_kubelet) = (up.as_secs_f64(), own.start_ticks as f64 / ticks as f64);
    let figures = metrics.clone();
    figures.beside.node_startup_pre_kubelet.set(pre_kubelet);
    figures.beside.node_startup_pre_registration.set((up - pre_kubelet).max(0.0));
    let since = move || Timestamp::now().duration_since(begun).as_secs_f64();
    tasks.spawn_until_stop(async move {
        if node.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let registration = since();
        figures.beside.node_startup_registration.set(registration);
        if node.wait_for(|node| node.as_deref().is_some_and(is_ready)).await.is_err() {
            return;
        }
        let ready = since();
        figures.beside.node_startup_post_registration.set(ready - registration);
        figures.beside.node_startup.set(up + ready);
    });
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}
