//! Bugs that are planted at the agent's ports, to see that the simulation finds such ones: what the agent is told or what it asks is changed in
//! the way in which an agent with that bug would see or do it.

use std::collections::{BTreeMap, BTreeSet};

use cri_api::v1::{self, ContainerEventType, ContainerState};
use decide::config::names;
use serde_json::Value;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Of an exit that is announced twice, nothing is taken note of.
    DoubledExitIgnored,
    /// The back-off starts over after the first restart.
    BackoffReset,
    /// A container that was stopped for its pod's end is started once more.
    StartAfterStop,
    /// After its restart the agent takes an init container that failed for one that is through.
    InitSkipped,
    /// Statuses keep the restart count of before.
    StaleCount,
    /// The API object of a pod goes as soon as its deletion is asked for, and not when the pod has ended.
    EarlyDelete,
    /// The restart count begins anew when an agent does.
    CountForgotten,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::DoubledExitIgnored,
        Self::BackoffReset,
        Self::StartAfterStop,
        Self::InitSkipped,
        Self::StaleCount,
        Self::EarlyDelete,
        Self::CountForgotten,
    ];
}

/// What a planted bug has to remember.
#[derive(Debug, Default)]
pub(crate) struct Planted {
    bug: Option<Bug>,
    stops: BTreeMap<String, u32>,
    deaf: BTreeSet<String>,
}

impl Planted {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        Self { bug, ..Self::default() }
    }

    /// An event as the agent takes it.
    pub(crate) fn event(&mut self, event: &v1::ContainerEventResponse) {
        if self.bug == Some(Bug::DoubledExitIgnored)
            && event.container_event_type() == ContainerEventType::ContainerStoppedEvent
        {
            let count = self.stops.entry(event.container_id.clone()).or_default();
            *count += 1;
            if *count == 2 {
                self.deaf.insert(event.container_id.clone());
            }
        }
    }

    /// A container in a list as the agent sees it.
    pub(crate) fn show(&self, container: &mut v1::Container) {
        if self.deaf.contains(&container.id) {
            container.state = ContainerState::ContainerRunning.into();
        }
    }

    /// A container's status as this agent sees it.
    pub(crate) fn status(&self, status: &mut v1::ContainerStatus, agent: u64) {
        if self.deaf.contains(&status.id) {
            status.state = ContainerState::ContainerRunning.into();
            (status.finished_at, status.exit_code) = (0, 0);
        }
        let name = status.metadata.as_ref().map(|m| m.name.clone()).unwrap_or_default();
        if self.bug == Some(Bug::InitSkipped) && agent > 1 && name.starts_with('i') {
            status.exit_code = 0;
        }
        if self.bug == Some(Bug::CountForgotten) && agent > 1 {
            status.annotations.insert(names::RESTART_COUNT.to_owned(), "0".to_owned());
        }
    }
}

/// Puts restart counts that are one behind into a status patch; whether there were any.
pub(crate) fn stale_count(patch: &mut Value) -> bool {
    let mut stale = false;
    for status in patch["status"]["containerStatuses"].as_array_mut().into_iter().flatten() {
        if let Some(count) = status["restartCount"].as_i64().filter(|count| *count > 0) {
            status["restartCount"] = (count - 1).into();
            stale = true;
        }
    }
    stale
}
