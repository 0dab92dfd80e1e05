//! Node-side admission: whether a pod may run here, and what it takes away from the node while it does.
//!
//! The [`Ledger`] is the node's book of admitted pods. Refusals come in Go's order, the first one wins, and have Go's reasons and messages.

mod fit;
mod node;
mod preempt;
mod sysctl;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use model::api::{AppArmorProfile, Container, Taint};
use model::pod::{ContainerKind, DesiredPod, PodUid};

use crate::resize::ResizeRules;
use crate::resources::{QosClass, ResourceList, has_pod_level_resources, is_critical, qos_class};
use crate::text::go_list;

pub use fit::{Amounts, HostPort};
pub use node::matches_selector;
pub use sysctl::{SysctlAllowlist, SysctlPatternError, sysctl_name};

/// Why a pod may not run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// `status.reason` and event reason.
    pub reason: String,
    /// Event message; `status.message` has `Pod was rejected: ` before it.
    pub message: String,
}

impl Refusal {
    fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

/// The node as admission sees it: the API's object, or in standalone mode what the agent itself would register.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.taints`.
    pub taints: Vec<Taint>,
    /// `status.allocatable`, `pods` among it.
    pub allocatable: ResourceList,
    /// `status.features.supplementalGroupsPolicy`.
    pub supplemental_groups_policy: bool,
    /// Pressure conditions that hold (`MemoryPressure`, …).
    pub pressures: Vec<String>,
}

/// What this agent allows.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Sysctls that pods may set.
    pub sysctls: SysctlAllowlist,
    /// Why AppArmor cannot be enforced (`AppArmor is not enabled on the host`); None: it can.
    pub apparmor_error: Option<String>,
    /// Gate `PodLevelResources`.
    pub pod_level_resources: bool,
    /// Gate `TaintTolerationComparisonOperators`.
    pub toleration_comparison: bool,
    /// The node is shutting down.
    pub shutting_down: bool,
    /// What can be resized.
    pub resize: ResizeRules,
}

/// A pod that was admitted.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Admitted {
    /// Pods that must be ended to make room for it, as `Preempting`.
    pub preempt: Vec<PodUid>,
    /// The first resource of which there was not enough; empty: there was of all.
    pub lacked: String,
}

/// What one admitted pod holds.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    requests: Amounts,
    ports: Vec<HostPort>,
    critical: bool,
    priority: Option<i32>,
    qos: QosClass,
}

/// The book of admitted pods. One task owns it and admits one pod at a time. Pods in a terminal phase hold nothing: they are released, or
/// never entered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    pods: BTreeMap<PodUid, Entry>,
    used: Amounts,
    /// By pods that were given the room of others: what those held, until it is certain that they are ended.
    displaced: BTreeMap<PodUid, Vec<(PodUid, Entry)>>,
}

impl Ledger {
    /// Judges a pod and, when it may run, books it. A pod that is booked already is judged anew as if it were not; when refused, it is
    /// no longer booked.
    ///
    /// # Errors
    /// The refusal that comes first in Go's order.
    pub fn admit(&mut self, pod: &DesiredPod, node: &NodeFacts, rules: &Rules) -> Result<Admitted, Refusal> {
        self.release(pod.uid());
        let entry = Entry {
            requests: Amounts::of_pod(pod, rules.pod_level_resources),
            ports: fit::host_ports(pod),
            critical: is_critical(pod),
            priority: pod.spec().priority,
            qos: qos_class(pod, rules.pod_level_resources),
        };
        pressure(pod, &entry, node)?;
        rules.sysctls.check(pod)?;
        let admitted = self.predicates(pod, &entry, node, rules)?;
        apparmor(pod, rules)?;
        if has_pod_level_resources(pod) && !rules.pod_level_resources {
            return Err(Refusal::new("PodLevelResourcesNotSupported", "PodLevelResources feature gate is disabled"));
        }
        if rules.shutting_down {
            return Err(Refusal::new("NodeShutdown", "Pod was rejected as the node is shutting down."));
        }
        // Their room is the newcomer's from now on: nobody else may count on it.
        for uid in &admitted.preempt {
            if let Some(victim) = self.remove(uid) {
                self.displaced.entry(pod.uid().clone()).or_default().push((uid.clone(), victim));
            }
        }
        self.used.add(&entry.requests);
        self.pods.insert(pod.uid().clone(), entry);
        Ok(admitted)
    }

    /// Judges whether a booked pod may have other resources; `pod` asks for them. Granted, it holds the larger of both until [`Ledger::settle`] says that it
    /// has given up the rest; refused, it holds what it held.
    ///
    /// # Errors
    /// The refusal that comes first in Go's order.
    pub fn resize(&mut self, pod: &DesiredPod, node: &NodeFacts, rules: &Rules) -> Result<Admitted, Refusal> {
        let before = self.pods.get(pod.uid()).cloned();
        let verdict = self.admit(pod, node, rules);
        if let Some(before) = before {
            match &verdict {
                Ok(_) => {
                    self.confirm(pod.uid());
                    self.hold_at_least(pod.uid(), &before.requests);
                }
                Err(_) => {
                    self.used.add(&before.requests);
                    self.pods.insert(pod.uid().clone(), before);
                }
            }
        }
        verdict
    }

    /// A booked pod holds at least this much: what it still has of an earlier allocation.
    pub fn hold_at_least(&mut self, uid: &PodUid, amounts: &Amounts) {
        if let Some(entry) = self.pods.get_mut(uid) {
            self.used.sub(&entry.requests);
            entry.requests.raise(amounts);
            self.used.add(&entry.requests);
        }
    }

    /// A booked pod has what it was given and no more (`pod`: in the form in which it runs); true when that leaves room for others.
    pub fn settle(&mut self, pod: &DesiredPod, pod_level_resources: bool) -> bool {
        let Some(entry) = self.pods.get_mut(pod.uid()) else { return false };
        let now = Amounts::of_pod(pod, pod_level_resources);
        let before = std::mem::replace(&mut entry.requests, now.clone());
        self.used.sub(&before);
        self.used.add(&now);
        before.iter().any(|(name, n)| n > now.get(name))
    }

    /// Books a pod without judging it: it ran before this agent started and is ending, or was admitted before.
    pub fn book(&mut self, pod: &DesiredPod, pod_level_resources: bool) {
        self.release(pod.uid());
        let entry = Entry {
            requests: Amounts::of_pod(pod, pod_level_resources),
            ports: fit::host_ports(pod),
            critical: is_critical(pod),
            priority: pod.spec().priority,
            qos: qos_class(pod, pod_level_resources),
        };
        self.used.add(&entry.requests);
        self.pods.insert(pod.uid().clone(), entry);
    }

    /// Gives back what a pod holds; call it when its phase is terminal or it is gone. Nothing happens when it holds nothing.
    pub fn release(&mut self, uid: &PodUid) {
        self.remove(uid);
        self.displaced.remove(uid);
        self.displaced.retain(|_, victims| {
            victims.retain(|(victim, _)| victim != uid);
            !victims.is_empty()
        });
    }

    fn remove(&mut self, uid: &PodUid) -> Option<Entry> {
        let entry = self.pods.remove(uid)?;
        self.used.sub(&entry.requests);
        Some(entry)
    }

    /// The pod starts, and those whose room it was given are ended.
    pub fn confirm(&mut self, uid: &PodUid) {
        self.displaced.remove(uid);
    }

    /// The pod does not start after all: it holds nothing, and those whose room it was given keep theirs, as far as they are still there.
    pub fn take_back(&mut self, uid: &PodUid) {
        let victims = self.displaced.remove(uid).unwrap_or_default();
        self.release(uid);
        for (uid, entry) in victims {
            self.used.add(&entry.requests);
            self.pods.insert(uid, entry);
        }
    }

    /// What all admitted pods hold together.
    pub fn usage(&self) -> &Amounts {
        &self.used
    }

    /// How many pods are admitted.
    pub fn pods(&self) -> usize {
        self.pods.len()
    }

    /// True when this pod is booked.
    pub fn holds(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// What the scheduler checked too, repeated on the node.
    fn predicates(
        &self,
        pod: &DesiredPod,
        entry: &Entry,
        node: &NodeFacts,
        rules: &Rules,
    ) -> Result<Admitted, Refusal> {
        let os_label = pod.meta().labels.as_ref().and_then(|l| l.get("kubernetes.io/os"));
        if os_label.is_some_and(|os| os != "linux") {
            return Err(Refusal::new(
                "PodOSSelectorNodeLabelDoesNotMatch",
                "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            ));
        }
        if pod.spec().os.as_ref().is_some_and(|os| os.name != "linux") {
            return Err(Refusal::new("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"));
        }
        let strict = pod.spec().security_context.as_ref().and_then(|s| s.supplemental_groups_policy.as_deref());
        if strict == Some("Strict") && !node.supplemental_groups_policy {
            return Err(Refusal::new(
                "SupplementalGroupsPolicyNotSupported",
                "SupplementalGroupsPolicy=Strict is not supported in this node",
            ));
        }
        let capacity = Amounts::of_list(&node.allocatable);
        let shortages = fit::shortages(&entry.requests, &self.used, &capacity, self.pods.len());
        let mut others: Vec<Refusal> = Vec::new();
        let mut failed = |name: &str, why: &str| {
            others.push(Refusal::new(name, format!("Predicate {name} failed: {why}")));
        };
        if !node::selected(pod, node) {
            failed("NodeAffinity", "node(s) didn't match Pod's node affinity/selector");
        }
        if pod.spec().node_name.as_deref().is_some_and(|n| !n.is_empty() && n != node.name) {
            failed("NodeName", "node(s) didn't match the requested node name");
        }
        if self.pods.values().any(|other| fit::ports_conflict(&entry.ports, &other.ports)) {
            failed("NodePorts", "node(s) didn't have free ports for the requested pod ports");
        }
        if !pod.is_static() && !node::tolerated(pod, &node.taints, rules.toleration_comparison) {
            failed("TaintToleration", "node(s) had taints that the pod didn't tolerate");
        }
        if entry.critical {
            // Shortage alone never turns a critical pod away: others make room.
            if let Some(first) = others.into_iter().next() {
                return Err(first);
            }
            let needed: Vec<(String, i64)> =
                shortages.iter().map(|s| (s.resource.clone(), s.requested - (s.capacity - s.used))).collect();
            return match self.victims(entry, &needed) {
                Ok(preempt) => {
                    let lacked = needed.first().map(|(resource, _)| resource.clone()).unwrap_or_default();
                    Ok(Admitted { preempt, lacked })
                }
                Err(e) => Err(Refusal::new(
                    "UnexpectedAdmissionError",
                    format!("Unexpected error while attempting to recover from admission failure: {e}"),
                )),
            };
        }
        match shortages.first().map(fit::Shortage::refusal).or_else(|| others.into_iter().next()) {
            Some(refusal) => Err(refusal),
            None => Ok(Admitted::default()),
        }
    }
}

/// A node under pressure takes critical pods only; under memory pressure alone also those that ask for something or tolerate it. A pod that runs
/// here already, under an earlier agent, is no news: whether it must go is for eviction to say.
fn pressure(pod: &DesiredPod, entry: &Entry, node: &NodeFacts) -> Result<(), Refusal> {
    let runs = pod.stored_status().and_then(|s| s.phase.as_deref()) == Some("Running");
    if node.pressures.is_empty() || entry.critical || runs {
        return Ok(());
    }
    if node.pressures == ["MemoryPressure"] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".into(),
            effect: "NoSchedule".into(),
            ..Default::default()
        };
        if entry.qos != QosClass::BestEffort || node::tolerates(pod, &taint, false) {
            return Ok(());
        }
    }
    Err(Refusal::new("Evicted", format!("The node had condition: {}. ", go_list(&node.pressures))))
}

/// Profiles can be enforced, and name something. Pods that run already are not judged again.
fn apparmor(pod: &DesiredPod, rules: &Rules) -> Result<(), Refusal> {
    let pending = pod.stored_status().and_then(|s| s.phase.as_deref()).is_none_or(|p| p == "Pending");
    if !pending {
        return Ok(());
    }
    let profiles: Vec<AppArmorProfile> =
        pod.containers().filter_map(|e| apparmor_profile(pod, e.spec)).filter(|p| p.type_ != "Unconfined").collect();
    if profiles.is_empty() {
        return Ok(());
    }
    let refuse = |e: &str| Err(Refusal::new("AppArmor", format!("Cannot enforce AppArmor: {e}")));
    if let Some(e) = &rules.apparmor_error {
        return refuse(e);
    }
    let nameless = |p: &AppArmorProfile| p.localhost_profile.as_deref().is_none_or(|name| name.trim().is_empty());
    if profiles.iter().any(|p| p.type_ == "Localhost" && nameless(p)) {
        return refuse("invalid empty AppArmor profile name");
    }
    Ok(())
}

/// The profile of a container: its own, else the annotation's (static pods may have that only), else the pod's.
fn apparmor_profile(pod: &DesiredPod, container: &Container) -> Option<AppArmorProfile> {
    if let Some(p) = container.security_context.as_ref().and_then(|s| s.app_armor_profile.clone()) {
        return Some(p);
    }
    let key = format!("container.apparmor.security.beta.kubernetes.io/{}", container.name);
    let profile = |type_: &str, name: Option<&str>| {
        Some(AppArmorProfile { type_: type_.into(), localhost_profile: name.map(str::to_owned) })
    };
    let annotated = match pod.annotation(&key) {
        Some("runtime/default") => profile("RuntimeDefault", None),
        Some("unconfined") => profile("Unconfined", None),
        Some(v) => v.strip_prefix("localhost/").and_then(|name| profile("Localhost", Some(name))),
        None => None,
    };
    annotated.or_else(|| pod.spec().security_context.as_ref()?.app_armor_profile.clone())
}

/// Names of containers that hold host ports for the pod's whole life: apps and sidecars.
fn lasting(kind: ContainerKind) -> bool {
    matches!(kind, ContainerKind::App | ContainerKind::Sidecar)
}

/// UIDs in a stable order.
fn uids<'a>(entries: impl Iterator<Item = &'a PodUid>) -> Vec<PodUid> {
    entries.cloned().collect::<BTreeSet<_>>().into_iter().collect()
}
