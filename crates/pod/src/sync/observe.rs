//! The worker's own look at its pod: a fresh observation before every plan.
//!
//! Two filtered lists give ids and states; details that cannot change (an exited container, a ready sandbox with its addresses) are asked once
//! and kept. Termination messages are read at the first sight of an exit, before anything may remove the container.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cri::port::{CriResult, RuntimeReader};
use cri_api::v1;
use decide::config::termination::{self, MessageFile};
use model::observed::{ContainerState, ObservedContainer, ObservedPod, ObservedSandbox};
use model::pod::PodUid;

use crate::ports::PodHost;

/// How much of a log is read for FallbackToLogsOnError, bytes: 80 lines of at most 2 KiB in all, with room for the lines' heads.
const LOG_TAIL: u64 = 16 * 1024;

/// Looks at one pod.
pub struct Observer {
    reader: Arc<dyn RuntimeReader>,
    host: Arc<dyn PodHost>,
    containers: HashMap<String, ObservedContainer>,
    sandboxes: HashMap<String, ObservedSandbox>,
}

impl Observer {
    /// An observer without memory.
    pub fn new(reader: Arc<dyn RuntimeReader>, host: Arc<dyn PodHost>) -> Self {
        Self { reader, host, containers: HashMap::new(), sandboxes: HashMap::new() }
    }

    /// What the runtime has of this pod now. Every call it makes begins after this one did.
    ///
    /// # Errors
    /// The call that failed; nothing may be concluded then.
    pub async fn observe(&mut self, uid: &PodUid, namespace: &str, name: &str) -> CriResult<ObservedPod> {
        let label = BTreeMap::from([(decide::config::names::POD_UID_LABEL.to_owned(), uid.to_string())]);
        let sandbox_filter = v1::PodSandboxFilter { label_selector: label.clone(), ..Default::default() };
        let container_filter = v1::ContainerFilter { label_selector: label, ..Default::default() };
        let (sandboxes, containers) = futures::future::try_join(
            self.reader.list_pod_sandbox(Some(sandbox_filter)),
            self.reader.list_containers(Some(container_filter)),
        )
        .await?;
        let mut pod = ObservedPod::empty(uid.clone(), name, namespace);
        for listed in &sandboxes {
            pod.sandboxes.extend(self.sandbox(listed).await?);
        }
        for listed in &containers {
            pod.containers.extend(self.container(listed).await?);
        }
        pod.sort();
        self.sandboxes.retain(|id, _| pod.sandboxes.iter().any(|s| s.id == *id));
        self.containers.retain(|id, _| pod.containers.iter().any(|c| c.id == *id));
        Ok(pod)
    }

    /// The container was changed: the next look asks for its details again.
    pub fn forget(&mut self, id: &str) {
        self.containers.remove(id);
    }

    /// What the last look showed.
    pub fn last(&self, uid: &PodUid, namespace: &str, name: &str) -> ObservedPod {
        let mut pod = ObservedPod::empty(uid.clone(), name, namespace);
        pod.sandboxes.extend(self.sandboxes.values().cloned());
        pod.containers.extend(self.containers.values().cloned());
        pod.sort();
        pod
    }

    /// Adds a sandbox that was made a moment ago to what was seen of its pod: one call instead of a whole look.
    ///
    /// # Errors
    /// The call failed, or the runtime has no such sandbox.
    pub async fn add_sandbox(&mut self, pod: &mut ObservedPod, id: &str) -> CriResult<()> {
        let answer = self.reader.pod_sandbox_status(id, false).await?;
        if let Some(status) = &answer.status {
            let full = decide::observe::sandbox_from_status(status);
            self.sandboxes.insert(full.id.clone(), full.clone());
            pod.sandboxes.push(full);
            pod.sort();
        }
        Ok(())
    }

    /// A sandbox with its addresses; None when it vanished meanwhile.
    async fn sandbox(&mut self, listed: &v1::PodSandbox) -> CriResult<Option<ObservedSandbox>> {
        let seen = decide::observe::sandbox(listed, None);
        if let Some(known) = self.sandboxes.get(&listed.id)
            && known.ready == seen.ready
            && (known.host_network || !known.ips.is_empty() || !known.ready)
        {
            return Ok(Some(known.clone()));
        }
        match self.reader.pod_sandbox_status(&listed.id, false).await {
            Ok(answer) => {
                let full = decide::observe::sandbox(listed, answer.status.as_ref());
                self.sandboxes.insert(full.id.clone(), full.clone());
                Ok(Some(full))
            }
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// A container with everything that its status says; None when it vanished meanwhile.
    async fn container(&mut self, listed: &v1::Container) -> CriResult<Option<ObservedContainer>> {
        let state = decide::observe::container(listed).state;
        if let Some(known) = self.containers.get(&listed.id)
            && known.state == state
            && state != ContainerState::Unknown
        {
            return Ok(Some(known.clone()));
        }
        let answer = match self.reader.container_status(&listed.id, false).await {
            Ok(answer) => answer,
            Err(e) if e.is_not_found() => return Ok(None),
            Err(e) => return Err(e),
        };
        let Some(status) = answer.status else {
            return Ok(None);
        };
        let mut full = decide::observe::container_from_status(&status, &listed.pod_sandbox_id);
        if full.state == ContainerState::Exited {
            full.message = self.termination_message(&full).await;
        }
        self.containers.insert(full.id.clone(), full.clone());
        Ok(Some(full))
    }

    /// The runtime's message and what the container left behind, or why that cannot be read.
    async fn termination_message(&self, container: &ObservedContainer) -> String {
        let mut file = MessageFile::Absent;
        if let Some(path) = &container.termination_message_host_path {
            match self.host.read_tail(path, termination::MESSAGE_MAX as u64).await {
                Ok(Some(content)) => file = MessageFile::Content(content),
                Ok(None) => {}
                Err(e) => file = MessageFile::Unreadable(path.clone(), e.chain()),
            }
        }
        let policy = &container.termination_message_policy;
        if !termination::wants_log(policy, container.exit_code, &container.reason, &file) {
            return termination::message(&container.message, &file, None);
        }
        let log = match self.host.read_tail(&container.log_path, LOG_TAIL).await {
            Ok(log) => Ok(termination::log_tail(&log.unwrap_or_default())),
            Err(e) => Err(e.chain()),
        };
        let log = log.as_deref().map_err(String::as_str);
        termination::message(&container.message, &file, Some(log))
    }
}
