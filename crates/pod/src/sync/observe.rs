//! The worker's own look at its pod: a fresh observation before every plan.
//!
//! Two filtered lists give ids and states; details that cannot change (an exited container, a ready sandbox with its addresses) are asked once
//! and kept. Termination messages are read at the first sight of an exit, before anything may remove the container.
//!
//! A runtime goes through all its containers for a filtered list. So while its events are trusted, a look may do without: what was seen last, and what
//! events told since, says which containers there is news of, and only those are asked for ([`Observer::catch_up`]). What an event says is not
//! taken for the truth, only for the reason to ask; one that came late, twice or in another order says nothing new. What was not seen whole,
//! and whatever else was done to the pod, leads to the lists again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cri::port::{CriResult, RuntimeReader};
use cri_api::v1;
use decide::config::termination::{self, MessageFile};
use decide::pleg::{Stage, Told};
use model::observed::{ContainerState, ObservedContainer, ObservedPod, ObservedSandbox};
use model::pod::PodUid;
use tokio::time::Instant;

use crate::ports::PodHost;

/// How much of a log is read for FallbackToLogsOnError, bytes: 80 lines of at most 2 KiB in all, with room for the lines' heads.
const LOG_TAIL: u64 = 16 * 1024;

/// Looks at one pod.
pub struct Observer {
    reader: Arc<dyn RuntimeReader>,
    host: Arc<dyn PodHost>,
    containers: HashMap<String, ObservedContainer>,
    sandboxes: HashMap<String, ObservedSandbox>,
    /// The two are all that there is, but for what is to be asked.
    whole: bool,
    /// Containers to ask for, with their sandboxes.
    ask: Vec<(String, String)>,
    /// When everything was last looked at.
    looked: Option<Instant>,
}

/// What is told of a pod, against what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum News {
    /// It is known.
    Nothing,
    /// These containers have come further, those are gone.
    Of { further: Vec<String>, gone: Vec<String> },
    /// Only a look at everything says what it means.
    Unclear,
}

impl Observer {
    /// An observer without memory.
    pub fn new(reader: Arc<dyn RuntimeReader>, host: Arc<dyn PodHost>) -> Self {
        let (containers, sandboxes) = (HashMap::new(), HashMap::new());
        Self { reader, host, containers, sandboxes, whole: false, ask: Vec::new(), looked: None }
    }

    /// What the runtime has of this pod now. Every call it makes begins after this one did.
    ///
    /// # Errors
    /// The call that failed; nothing may be concluded then.
    pub async fn observe(&mut self, uid: &PodUid, namespace: &str, name: &str) -> CriResult<ObservedPod> {
        self.doubt();
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
        (self.whole, self.looked) = (true, Some(Instant::now()));
        Ok(pod)
    }

    /// When everything was last looked at, with success.
    pub fn looked(&self) -> Option<Instant> {
        self.looked
    }

    /// Something was done to the pod: what is known of it may not be so any more.
    pub fn doubt(&mut self) {
        self.whole = false;
        self.ask.clear();
    }

    /// These were removed and those started, and nothing else was done.
    pub fn changed(&mut self, removed: &[String], started: &[(String, String)]) {
        for id in removed {
            self.containers.remove(id);
            self.sandboxes.remove(id);
        }
        self.ask.extend_from_slice(started);
    }

    /// Whether nothing that was told is news, and what is known is all that there is.
    pub fn knows(&self, told: &Told) -> bool {
        self.whole && self.ask.is_empty() && self.news(told) == News::Nothing
    }

    fn news(&self, told: &Told) -> News {
        let (mut further, mut gone) = (Vec::new(), Vec::new());
        for (id, stage) in told.iter() {
            let known = match (self.containers.get(id), self.sandboxes.get(id)) {
                (Some(c), _) => Stage::of(c.state),
                (None, Some(s)) => Some(Stage::of_sandbox(s.ready)),
                // It went a while ago, or is about to be asked for.
                (None, None) if stage == Stage::Gone || self.ask.iter().any(|(asked, _)| asked == id) => continue,
                (None, None) => None,
            };
            match known {
                None => return News::Unclear,
                Some(known) if stage <= known => {}
                Some(_) if self.sandboxes.contains_key(id) => return News::Unclear,
                // Removed by somebody else before it was seen to end.
                Some(known) if stage == Stage::Gone && known < Stage::Exited => return News::Unclear,
                Some(_) if stage == Stage::Gone => gone.push(id.to_owned()),
                Some(_) => further.push(id.to_owned()),
            }
        }
        if further.is_empty() && gone.is_empty() { News::Nothing } else { News::Of { further, gone } }
    }

    /// Brings what is known up to what was told, without the lists; what is known then is what [`Observer::last`] gives. False when that cannot be done.
    ///
    /// # Errors
    /// The call that failed; nothing may be concluded then.
    pub async fn catch_up(&mut self, told: &Told) -> CriResult<bool> {
        let unclear = |s: &ObservedSandbox| s.ready && !s.host_network && s.ips.is_empty();
        if !self.whole
            || self.sandboxes.values().any(unclear)
            || self.containers.values().any(|c| c.state == ContainerState::Unknown)
        {
            return Ok(false);
        }
        let (further, gone) = match self.news(told) {
            News::Nothing => (Vec::new(), Vec::new()),
            News::Of { further, gone } => (further, gone),
            News::Unclear => return Ok(false),
        };
        let mut asked = std::mem::take(&mut self.ask);
        asked.extend(
            further.into_iter().filter_map(|id| Some((id.clone(), self.containers.get(&id)?.sandbox_id.clone()))),
        );
        // Until all of them have answered it is not known what there is.
        self.whole = false;
        for (id, sandbox_id) in asked {
            if self.ask_for(&id, &sandbox_id).await?.is_none() {
                self.containers.remove(&id);
            }
        }
        for id in gone {
            self.containers.remove(&id);
        }
        self.whole = true;
        Ok(true)
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
        self.ask_for(&listed.id, &listed.pod_sandbox_id).await
    }

    /// Asks for a container's status; None when it vanished meanwhile.
    async fn ask_for(&mut self, id: &str, sandbox_id: &str) -> CriResult<Option<ObservedContainer>> {
        let answer = match self.reader.container_status(id, false).await {
            Ok(answer) => answer,
            Err(e) if e.is_not_found() => return Ok(None),
            Err(e) => return Err(e),
        };
        let Some(status) = answer.status else {
            return Ok(None);
        };
        let mut full = decide::observe::container_from_status(&status, sandbox_id);
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
