//! Pod lifecycle events: what changed between two looks at the runtime, and whether looking still works.

use std::collections::BTreeMap;
use std::time::Duration;

use cri_api::v1;
use jiff::Timestamp;
use model::observed::ContainerState;
use model::pod::PodUid;

use crate::observe;
use crate::text::{aggregate, go_duration};

/// The longest time without a complete look at the runtime that still counts as healthy.
pub const RELIST_THRESHOLD: Duration = Duration::from_secs(180);
/// The longest time without an answer to the runtime's Status call before it counts as down.
pub const RUNTIME_THRESHOLD: Duration = Duration::from_secs(30);

/// State of a sandbox or container, as far as events tell states apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// Running container, ready sandbox.
    Running,
    /// Exited container, sandbox not ready.
    Exited,
    /// Created or unknown.
    Other,
}

impl From<ContainerState> for Seen {
    fn from(state: ContainerState) -> Self {
        match state {
            ContainerState::Running => Self::Running,
            ContainerState::Exited => Self::Exited,
            ContainerState::Created | ContainerState::Unknown => Self::Other,
        }
    }
}

/// What happened to one sandbox or container, by CRI id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlegEvent {
    /// It runs.
    Started(String),
    /// It ended.
    Died(String),
    /// The runtime no longer has it.
    Removed(String),
    /// It is created, or its state is not known.
    Changed(String),
}

/// A look at the runtime, cut down to what events need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<PodUid, BTreeMap<Box<str>, Seen>>);

impl Fingerprint {
    /// From list answers. Foreign sandboxes and containers are left out.
    pub fn new(sandboxes: &[v1::PodSandbox], containers: &[v1::Container]) -> Self {
        let mut all = Self::default();
        for s in sandboxes {
            if let Some(uid) = observe::sandbox_uid(s) {
                let ready = s.state == v1::PodSandboxState::SandboxReady as i32;
                all.set(uid, &s.id, Some(if ready { Seen::Running } else { Seen::Exited }));
            }
        }
        for c in containers {
            if let Some(uid) = observe::container_uid(c) {
                all.set(uid, &c.id, Some(observe::container(c).state.into()));
            }
        }
        all
    }

    /// Takes in one fact that came by event. None: the runtime no longer has it.
    pub fn set(&mut self, uid: PodUid, id: &str, seen: Option<Seen>) {
        match seen {
            Some(seen) => {
                self.0.entry(uid).or_default().insert(id.into(), seen);
            }
            None => {
                if let Some(ids) = self.0.get_mut(&uid) {
                    ids.remove(id);
                    if ids.is_empty() {
                        self.0.remove(&uid);
                    }
                }
            }
        }
    }

    /// Every pod that the runtime has something of.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.0.keys()
    }

    /// True when the runtime has nothing of this pod.
    pub fn is_gone(&self, uid: &PodUid) -> bool {
        !self.0.contains_key(uid)
    }
}

/// How far something of the runtime's has come. It goes only this way: the later of two stages that are told of it, in whatever order they come, is the
/// newer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// A container that was never started.
    Created,
    /// Running container, ready sandbox.
    Running,
    /// Exited container, sandbox not ready.
    Exited,
    /// The runtime has it no more.
    Gone,
}

impl Stage {
    /// Of a container; None for a state that says nothing of how far it has come.
    pub fn of(state: ContainerState) -> Option<Self> {
        match state {
            ContainerState::Created => Some(Self::Created),
            ContainerState::Running => Some(Self::Running),
            ContainerState::Exited => Some(Self::Exited),
            ContainerState::Unknown => None,
        }
    }

    /// Of a sandbox.
    pub fn of_sandbox(ready: bool) -> Self {
        if ready { Self::Running } else { Self::Exited }
    }
}

/// What events told of one pod, its sandbox and containers by CRI id. What is told twice, late or in another order comes to the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told(BTreeMap<Box<str>, Stage>);

impl Told {
    /// What one event says; None when it shows something that cannot be told apart by stages.
    pub fn by(event: &v1::ContainerEventResponse) -> Option<Self> {
        let mut told = Self::default();
        if let Some(sandbox) = &event.pod_sandbox_status {
            let ready = sandbox.state == v1::PodSandboxState::SandboxReady as i32;
            told.add(&sandbox.id, Stage::of_sandbox(ready));
        }
        for status in &event.containers_statuses {
            told.add(&status.id, Stage::of(observe::state(status.state))?);
        }
        let stage = match v1::ContainerEventType::try_from(event.container_event_type).ok()? {
            v1::ContainerEventType::ContainerCreatedEvent => Stage::Created,
            v1::ContainerEventType::ContainerStartedEvent => Stage::Running,
            v1::ContainerEventType::ContainerStoppedEvent => Stage::Exited,
            v1::ContainerEventType::ContainerDeletedEvent => Stage::Gone,
        };
        told.add(&event.container_id, stage);
        Some(told)
    }

    fn add(&mut self, id: &str, stage: Stage) {
        let known = self.0.entry(id.into()).or_insert(stage);
        *known = stage.max(*known);
    }

    /// Takes in what another event says.
    pub fn join(&mut self, other: Self) {
        for (id, stage) in other.0 {
            self.add(&id, stage);
        }
    }

    /// Of how many sandboxes and containers something is told.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Nothing is told.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What is told, by CRI id.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Stage)> {
        self.0.iter().map(|(id, stage)| (&**id, *stage))
    }
}

/// The events between two looks, for pods that changed only. Cost: the size of both.
pub fn diff(old: &Fingerprint, new: &Fingerprint) -> BTreeMap<PodUid, Vec<PlegEvent>> {
    let none = BTreeMap::new();
    let mut events: BTreeMap<PodUid, Vec<PlegEvent>> = BTreeMap::new();
    for (uid, now) in &new.0 {
        let was = old.0.get(uid).unwrap_or(&none);
        if was == now {
            continue;
        }
        let mut list = gone(was, now);
        for (id, seen) in now {
            if was.get(id) != Some(seen) {
                let id = id.to_string();
                list.push(match seen {
                    Seen::Running => PlegEvent::Started(id),
                    Seen::Exited => PlegEvent::Died(id),
                    Seen::Other => PlegEvent::Changed(id),
                });
            }
        }
        events.insert(uid.clone(), list);
    }
    for (uid, was) in &old.0 {
        if !new.0.contains_key(uid) {
            events.insert(uid.clone(), gone(was, &none));
        }
    }
    events
}

/// What vanished. Something that vanished without having been seen dead also died.
fn gone(was: &BTreeMap<Box<str>, Seen>, now: &BTreeMap<Box<str>, Seen>) -> Vec<PlegEvent> {
    let mut list = Vec::new();
    for (id, seen) in was {
        if !now.contains_key(id) {
            if *seen != Seen::Exited {
                list.push(PlegEvent::Died(id.to_string()));
            }
            list.push(PlegEvent::Removed(id.to_string()));
        }
    }
    list
}

/// Whether looking at the runtime still works.
///
/// # Errors
/// Go's words, without the prefix `PLEG is not healthy: `.
pub fn health(last_success: Option<Timestamp>, now: Timestamp, threshold: Duration) -> Result<(), String> {
    let Some(last) = last_success else { return Err("pleg has yet to be successful".into()) };
    let elapsed = Duration::try_from(now.duration_since(last)).unwrap_or_default();
    if elapsed > threshold {
        return Err(format!(
            "pleg was last seen active {} ago; threshold is {}",
            go_duration(elapsed),
            go_duration(threshold)
        ));
    }
    Ok(())
}

/// What readiness of the node knows about the runtime.
#[derive(Clone, Debug, Default)]
pub struct RuntimeFacts<'a> {
    /// When the Status call last answered.
    pub last_status: Option<Timestamp>,
    /// Conditions of that answer; None before the first.
    pub conditions: Option<&'a [v1::RuntimeCondition]>,
    /// When a look at the runtime last succeeded.
    pub last_relist: Option<Timestamp>,
    /// Longest time between looks that counts as healthy.
    pub relist_threshold: Duration,
}

fn condition_error(conditions: &[v1::RuntimeCondition], name: &str, what: &str) -> Option<String> {
    match conditions.iter().find(|c| c.r#type == name) {
        Some(c) if c.status => None,
        Some(c) => Some(format!("{what} not ready: {name}=false reason:{} message:{}", c.reason, c.message)),
        None => Some(format!("{what} not ready: <nil>")),
    }
}

/// Why the runtime itself makes the node not ready; empty when it does not. While it is down, no pod is synced.
pub fn runtime_errors(facts: &RuntimeFacts<'_>, now: Timestamp) -> Vec<String> {
    let mut errors = Vec::new();
    match facts.last_status {
        None => errors.push("container runtime status check may not have completed yet".to_owned()),
        Some(last) if Duration::try_from(now.duration_since(last)).unwrap_or_default() >= RUNTIME_THRESHOLD => {
            errors.push("container runtime is down".to_owned());
        }
        Some(_) => {}
    }
    if let Err(e) = health(facts.last_relist, now, facts.relist_threshold) {
        errors.push(format!("PLEG is not healthy: {e}"));
    }
    if let Some(conditions) = facts.conditions {
        errors.extend(condition_error(conditions, "RuntimeReady", "container runtime"));
    }
    errors
}

/// Why pods cannot have a network; None when they can. While it stands, only host-network pods start.
pub fn network_error(conditions: Option<&[v1::RuntimeCondition]>) -> Option<String> {
    match conditions {
        None => Some("network state unknown".to_owned()),
        Some(conditions) => condition_error(conditions, "NetworkReady", "container runtime network"),
    }
}

/// The message of the node's Ready condition: [`None`] when the runtime gives no reason against readiness, else every error, as Go joins
/// them. `others` are errors found elsewhere (storage, shutdown, missing capacity), in their order.
pub fn ready_message(facts: &RuntimeFacts<'_>, others: &[String], now: Timestamp) -> Option<String> {
    let mut errors = runtime_errors(facts, now);
    errors.extend(network_error(facts.conditions));
    errors.extend_from_slice(others);
    aggregate(&errors)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::at;

    fn uid(n: &str) -> PodUid {
        PodUid::new(n)
    }

    fn look(items: &[(&str, &str, Seen)]) -> Fingerprint {
        let mut f = Fingerprint::default();
        for (pod, id, seen) in items {
            f.set(uid(pod), id, Some(*seen));
        }
        f
    }

    #[test]
    fn events() {
        use PlegEvent::{Changed, Died, Removed, Started};
        let of = |old: &[(&str, &str, Seen)], new: &[(&str, &str, Seen)]| {
            diff(&look(old), &look(new)).remove(&uid("p")).unwrap_or_default()
        };
        let id = || "c".to_owned();
        let (run, exit, other) = (("p", "c", Seen::Running), ("p", "c", Seen::Exited), ("p", "c", Seen::Other));
        assert_eq!(of(&[], &[run]), [Started(id())]);
        assert_eq!(of(&[], &[exit]), [Died(id())]);
        assert_eq!(of(&[], &[other]), [Changed(id())]);
        assert_eq!(of(&[run], &[run]), []);
        assert_eq!(of(&[run], &[exit]), [Died(id())]);
        assert_eq!(of(&[other], &[run]), [Started(id())]);
        assert_eq!(of(&[run], &[other]), [Changed(id())]);
        assert_eq!(of(&[exit], &[]), [Removed(id())]);
        assert_eq!(of(&[run], &[]), [Died(id()), Removed(id())]);
        assert_eq!(of(&[run, ("p", "d", Seen::Running)], &[("p", "d", Seen::Running)]), [Died(id()), Removed(id())]);
        let other_pod = diff(&look(&[run, ("q", "x", Seen::Running)]), &look(&[exit, ("q", "x", Seen::Running)]));
        assert_eq!(other_pod.keys().collect::<Vec<_>>(), [&uid("p")]);
    }

    fn event(
        kind: v1::ContainerEventType,
        about: &str,
        ready: bool,
        containers: &[(&str, v1::ContainerState)],
    ) -> v1::ContainerEventResponse {
        let state = if ready { v1::PodSandboxState::SandboxReady } else { v1::PodSandboxState::SandboxNotready };
        v1::ContainerEventResponse {
            container_id: about.into(),
            container_event_type: kind.into(),
            pod_sandbox_status: Some(v1::PodSandboxStatus {
                id: "s".into(),
                state: state.into(),
                ..Default::default()
            }),
            containers_statuses: containers
                .iter()
                .map(|(id, state)| v1::ContainerStatus {
                    id: (*id).into(),
                    state: (*state).into(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        }
    }

    #[test]
    fn what_an_event_tells() {
        use v1::ContainerEventType::{ContainerDeletedEvent, ContainerStartedEvent, ContainerStoppedEvent};
        use v1::ContainerState::{ContainerExited, ContainerRunning, ContainerUnknown};
        let told = |event| Told::by(&event).map(|t| t.iter().map(|(id, s)| (id.to_owned(), s)).collect::<Vec<_>>());
        let all =
            |pairs: &[(&str, Stage)]| Some(pairs.iter().map(|(id, s)| ((*id).to_owned(), *s)).collect::<Vec<_>>());
        // A runtime that removes after it has told: the event counts, not what it still shows.
        assert_eq!(
            told(event(ContainerDeletedEvent, "c", true, &[("c", ContainerExited), ("d", ContainerRunning)])),
            all(&[("c", Stage::Gone), ("d", Stage::Running), ("s", Stage::Running)])
        );
        // An event that came late shows more than it says.
        assert_eq!(
            told(event(ContainerStartedEvent, "c", false, &[("c", ContainerExited)])),
            all(&[("c", Stage::Exited), ("s", Stage::Exited)])
        );
        // One without statuses.
        assert_eq!(
            told(event(ContainerStoppedEvent, "c", true, &[])),
            all(&[("c", Stage::Exited), ("s", Stage::Running)])
        );
        assert_eq!(told(event(ContainerStoppedEvent, "c", true, &[("d", ContainerUnknown)])), None);
        let odd = v1::ContainerEventResponse { container_event_type: 9, ..Default::default() };
        assert_eq!(told(odd), None);
    }

    proptest! {
        /// Lost, doubled and swapped events: what is known never goes back, and the newest of those that came is known.
        #[test]
        fn what_is_told_never_goes_back(order in proptest::collection::vec(0usize..4, 1..12)) {
            use v1::ContainerEventType as Kind;
            let life = [
                (Kind::ContainerCreatedEvent, Stage::Created),
                (Kind::ContainerStartedEvent, Stage::Running),
                (Kind::ContainerStoppedEvent, Stage::Exited),
                (Kind::ContainerDeletedEvent, Stage::Gone),
            ];
            let mut told = Told::default();
            for &n in &order {
                told.join(Told::by(&event(life[n].0, "c", true, &[])).expect("stages"));
            }
            let newest = order.iter().map(|&n| life[n].1).max();
            prop_assert_eq!(told.iter().find(|(id, _)| *id == "c").map(|(_, stage)| stage), newest);
        }
    }

    #[test]
    fn from_lists() {
        let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let sandbox = v1::PodSandbox {
            id: "s".into(),
            metadata: Some(v1::PodSandboxMetadata { uid: "p".into(), ..Default::default() }),
            state: v1::PodSandboxState::SandboxReady as i32,
            labels: labels(&[(observe::LABEL_POD_UID, "p")]),
            ..Default::default()
        };
        let container = v1::Container {
            id: "c".into(),
            state: v1::ContainerState::ContainerExited as i32,
            labels: labels(&[(observe::LABEL_POD_UID, "p"), (observe::LABEL_CONTAINER_NAME, "web")]),
            ..Default::default()
        };
        let foreign = v1::Container { id: "f".into(), ..Default::default() };
        let mut seen = Fingerprint::new(std::slice::from_ref(&sandbox), &[container, foreign]);
        assert_eq!(seen, look(&[("p", "s", Seen::Running), ("p", "c", Seen::Exited)]));
        assert_eq!(seen.pods().count(), 1);
        seen.set(uid("p"), "s", None);
        assert!(!seen.is_gone(&uid("p")));
        seen.set(uid("p"), "c", None);
        assert!(seen.is_gone(&uid("p")));
        assert_eq!(seen, Fingerprint::default());
    }

    #[test]
    fn health_in_gos_words() {
        assert_eq!(health(None, at(0), RELIST_THRESHOLD), Err("pleg has yet to be successful".into()));
        assert_eq!(health(Some(at(0)), at(180), RELIST_THRESHOLD), Ok(()));
        let late = at(190).saturating_add(jiff::SignedDuration::from_millis(500)).expect("time");
        assert_eq!(
            health(Some(at(0)), late, RELIST_THRESHOLD),
            Err("pleg was last seen active 3m10.5s ago; threshold is 3m0s".into())
        );
        // A clock that was set back is no reason to alarm.
        assert_eq!(health(Some(at(100)), at(0), RELIST_THRESHOLD), Ok(()));
    }

    #[test]
    fn ready_messages() {
        let condition = |t: &str, status| v1::RuntimeCondition {
            r#type: t.into(),
            status,
            reason: "NetworkPluginNotReady".into(),
            message: "cni plugin not initialized".into(),
        };
        let message = |conditions: Option<&[v1::RuntimeCondition]>, last: Option<i64>, relist: Option<i64>| {
            let facts = RuntimeFacts {
                last_status: last.map(at),
                conditions,
                last_relist: relist.map(at),
                relist_threshold: RELIST_THRESHOLD,
            };
            ready_message(&facts, &[], at(1000))
        };
        let good = [condition("RuntimeReady", true), condition("NetworkReady", true)];
        assert_eq!(message(Some(&good), Some(999), Some(999)), None);
        assert_eq!(
            message(None, None, None).as_deref(),
            Some(
                "[container runtime status check may not have completed yet, PLEG is not healthy: pleg has yet to be successful, \
                 network state unknown]"
            )
        );
        assert_eq!(message(Some(&good), Some(970), Some(999)).as_deref(), Some("container runtime is down"));
        assert_eq!(message(Some(&good), Some(971), Some(999)), None);
        let no_network = [condition("RuntimeReady", true), condition("NetworkReady", false)];
        assert_eq!(
            message(Some(&no_network), Some(999), Some(999)).as_deref(),
            Some(
                "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady \
                 message:cni plugin not initialized"
            )
        );
        let no_runtime = [condition("RuntimeReady", false), condition("NetworkReady", true)];
        assert_eq!(
            message(Some(&no_runtime), Some(999), Some(999)).as_deref(),
            Some(
                "container runtime not ready: RuntimeReady=false reason:NetworkPluginNotReady message:cni plugin not initialized"
            )
        );
    }

    fn looks() -> impl Strategy<Value = Fingerprint> {
        let seen = prop_oneof![Just(Seen::Running), Just(Seen::Exited), Just(Seen::Other)];
        prop::collection::btree_map((0u8..4, 0u8..4), seen, 0..12).prop_map(|m| {
            let mut f = Fingerprint::default();
            for ((pod, id), seen) in m {
                f.set(uid(&pod.to_string()), &format!("{pod}-{id}"), Some(seen));
            }
            f
        })
    }

    proptest! {
        /// A pod has events exactly when something of it changed, and applying them to the old look gives the new one.
        #[test]
        fn events_are_the_difference(old in looks(), new in looks()) {
            let events = diff(&old, &new);
            let mut replayed = old.clone();
            for (uid, list) in &events {
                for e in list {
                    match e {
                        PlegEvent::Started(id) => replayed.set(uid.clone(), id, Some(Seen::Running)),
                        PlegEvent::Died(id) => replayed.set(uid.clone(), id, Some(Seen::Exited)),
                        PlegEvent::Removed(id) => replayed.set(uid.clone(), id, None),
                        PlegEvent::Changed(id) => replayed.set(uid.clone(), id, Some(Seen::Other)),
                    }
                }
            }
            prop_assert_eq!(&replayed, &new);
            let all: BTreeSet<&PodUid> = old.pods().chain(new.pods()).collect();
            for uid in all {
                prop_assert_eq!(events.contains_key(uid), old.0.get(uid) != new.0.get(uid));
            }
        }
    }
}
