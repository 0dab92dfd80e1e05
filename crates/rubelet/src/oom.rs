//! Tells the cluster when the node itself ran out of memory.
//!
//! Task: owned by wire.rs, ends with [`Tasks::stop`]. It wakes on lines of the kernel's log and keeps nothing; a log that it cannot keep up with loses
//! its oldest lines. Containers that the kernel killed within their own limits are told of by their pods.

use std::path::Path;
use std::sync::Arc;

use decide::node::NodeEvent;
use host::kmsg::{KernelLog, OomReader};
use node::NodeEvents;
use pod::ports::Tasks;
use tracing::{info, warn};

const KMSG: &str = "/dev/kmsg";

/// Starts the task. Without a kernel log, as in some containers, there is nothing to tell.
pub(crate) fn start(events: Arc<dyn NodeEvents>, tasks: &Tasks) {
    let mut log = match KernelLog::open(Path::new(KMSG)) {
        Ok(log) => log,
        Err(e) => {
            warn!(err = e.full(), "The kernel's log cannot be read, that the node ran out of memory will not be told");
            return;
        }
    };
    tasks.spawn_until_stop(async move {
        let mut reader = OomReader::default();
        loop {
            let line = match log.next().await {
                Ok(line) => line,
                Err(e) => {
                    warn!(err = e.full(), "Unexpectedly stopped receiving OOM notifications");
                    return;
                }
            };
            if let Some(oom) = reader.line(&line) {
                info!(process = oom.process, pid = oom.pid, "Got sys oom event");
                events.event(&NodeEvent::system_oom(&oom.process, oom.pid));
            }
        }
    });
}
