//! The node's conditions: pressure and readiness, with their reasons, messages and times.

use jiff::Timestamp;
use model::api::{NodeCondition, Time};

use super::event::NodeEvent;

/// Which resources of the node are short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressures {
    /// `memory.available` is below its threshold.
    pub memory: bool,
    /// Space or inodes of a filesystem are.
    pub disk: bool,
    /// `pid.available` is.
    pub pid: bool,
}

/// How one pressure reads.
struct Words {
    kind: &'static str,
    /// Reason, message and event while there is pressure.
    short: [&'static str; 3],
    /// And while there is none.
    enough: [&'static str; 3],
}

const MEMORY: Words = Words {
    kind: "MemoryPressure",
    short: ["KubeletHasInsufficientMemory", "kubelet has insufficient memory available", "NodeHasInsufficientMemory"],
    enough: ["KubeletHasSufficientMemory", "kubelet has sufficient memory available", "NodeHasSufficientMemory"],
};
const DISK: Words = Words {
    kind: "DiskPressure",
    short: ["KubeletHasDiskPressure", "kubelet has disk pressure", "NodeHasDiskPressure"],
    enough: ["KubeletHasNoDiskPressure", "kubelet has no disk pressure", "NodeHasNoDiskPressure"],
};
const PID: Words = Words {
    kind: "PIDPressure",
    short: ["KubeletHasInsufficientPID", "kubelet has insufficient PID available", "NodeHasInsufficientPID"],
    enough: ["KubeletHasSufficientPID", "kubelet has sufficient PID available", "NodeHasSufficientPID"],
};

/// True when the node's Ready condition is True.
pub fn is_ready(conditions: Option<&Vec<NodeCondition>>) -> bool {
    conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Brings the agent's own conditions up to date and leaves others as they are. `not_ready`: why the node is not ready; None: it is.
pub(super) fn update(
    conditions: &mut Vec<NodeCondition>,
    node: &str,
    pressures: Pressures,
    not_ready: Option<&str>,
    now: Timestamp,
    events: &mut Vec<NodeEvent>,
) {
    for (words, short) in [(MEMORY, pressures.memory), (DISK, pressures.disk), (PID, pressures.pid)] {
        let [reason, message, event] = if short { words.short } else { words.enough };
        if set(conditions, words.kind, short, reason, message, now) != Change::None {
            events.push(NodeEvent::status_is(node, event));
        }
    }
    let (reason, message) = match not_ready {
        None => ("KubeletReady", "kubelet is posting ready status"),
        Some(why) => ("KubeletNotReady", why),
    };
    // Of a new node, readiness is told by those who make it.
    if set(conditions, "Ready", not_ready.is_none(), reason, message, now) == Change::Flipped {
        let event = if not_ready.is_none() { "NodeReady" } else { "NodeNotReady" };
        events.push(NodeEvent::status_is(node, event));
    }
}

#[derive(PartialEq, Eq)]
enum Change {
    None,
    New,
    Flipped,
}

fn set(
    conditions: &mut Vec<NodeCondition>,
    kind: &str,
    status: bool,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Change {
    let status = if status { "True" } else { "False" };
    let old = conditions.iter_mut().find(|c| c.type_ == kind);
    let change = match &old {
        None => Change::New,
        Some(old) if old.status == status => Change::None,
        Some(_) => Change::Flipped,
    };
    let since = old.as_ref().filter(|_| change == Change::None).and_then(|c| c.last_transition_time.clone());
    let new = NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
    };
    match old {
        Some(old) => *old = new,
        None => conditions.push(new),
    }
    change
}
