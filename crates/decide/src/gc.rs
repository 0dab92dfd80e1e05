//! What may be thrown away: dead containers and sandboxes, pods that nobody wants, log directories; images ([`images`]).

pub mod images;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use model::observed::{ContainerState, ObservedContainer, ObservedPod};
use model::pod::PodUid;

/// How many dead containers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerGcPolicy {
    /// For each container name of a pod (`--maximum-dead-containers-per-container`); negative: any number.
    pub max_per_name: i64,
    /// On the node (`--maximum-dead-containers`); negative: any number.
    pub max_total: i64,
    /// Younger ones, counted from creation, are not touched (`--minimum-container-ttl-duration`).
    pub min_age: Duration,
}

impl Default for ContainerGcPolicy {
    fn default() -> Self {
        Self { max_per_name: 1, max_total: -1, min_age: Duration::ZERO }
    }
}

/// One thing to remove from the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removal {
    /// RemoveContainer; its log files and the link to them go too.
    Container {
        /// Its pod.
        uid: PodUid,
        /// CRI id.
        id: String,
        /// Container name.
        name: String,
        /// Its state is unknown: it is stopped first.
        stop_first: bool,
    },
    /// StopPodSandbox, in case it never was, then RemovePodSandbox.
    Sandbox {
        /// Its pod.
        uid: PodUid,
        /// CRI id.
        id: String,
    },
}

/// What container collection decides from.
pub struct ContainerGc<'a> {
    /// Everything in the runtime, by pod.
    pub pods: &'a BTreeMap<PodUid, ObservedPod>,
    /// True for a pod that has ended for good: nothing of it is kept.
    pub gone: &'a dyn Fn(&PodUid) -> bool,
    /// True for a container whose end its worker has not read yet: it stays.
    pub held: &'a dyn Fn(&str) -> bool,
    /// True when every source of pods has been heard; before that no pod counts as gone.
    pub sources_ready: bool,
    /// How many are kept.
    pub policy: ContainerGcPolicy,
    /// Now.
    pub now: Timestamp,
}

/// Dead containers and sandboxes to remove, in this order. Running containers, ready sandboxes, sandboxes with containers and the
/// newest sandbox of a pod that is not gone are never among them.
pub fn container_gc(gc: &ContainerGc<'_>) -> Vec<Removal> {
    let mut removed: Vec<(&PodUid, &ObservedContainer)> = Vec::new();
    // Dead containers of pods that stay, newest first within each name.
    let mut kept: BTreeMap<(&PodUid, &str), Vec<&ObservedContainer>> = BTreeMap::new();
    for (uid, pod) in gc.pods {
        let gone = gc.sources_ready && (gc.gone)(uid);
        for c in &pod.containers {
            // A created container of a living pod is about to start, or its worker replaces it.
            let dead = match c.state {
                ContainerState::Running => false,
                ContainerState::Created => gone,
                ContainerState::Exited | ContainerState::Unknown => true,
            };
            if !dead || older_than(gc.now, c.created_at, gc.policy.min_age).is_none() || (gc.held)(&c.id) {
                continue;
            }
            if gone {
                removed.push((uid, c));
            } else {
                kept.entry((uid, &c.name)).or_default().push(c);
            }
        }
    }
    if let Ok(max) = usize::try_from(gc.policy.max_per_name) {
        cut(&mut kept, max, &mut removed);
    }
    if let Ok(max) = usize::try_from(gc.policy.max_total) {
        let total = |kept: &BTreeMap<_, Vec<&ObservedContainer>>| kept.values().map(Vec::len).sum::<usize>();
        if total(&kept) > max {
            // An equal share for each name first, then the oldest of all.
            let share = (max / kept.len().max(1)).max(1);
            cut(&mut kept, share, &mut removed);
            let excess = total(&kept).saturating_sub(max);
            let mut all: Vec<_> =
                kept.iter().flat_map(|(&(uid, _), list)| list.iter().map(move |&c| (uid, c))).collect();
            all.sort_by_key(|(_, c)| c.created_at);
            removed.extend(all.into_iter().take(excess));
        }
    }
    let removed_ids: BTreeSet<&str> = removed.iter().map(|(_, c)| c.id.as_str()).collect();
    let mut removals: Vec<Removal> = removed
        .iter()
        .map(|(uid, c)| Removal::Container {
            uid: (*uid).clone(),
            id: c.id.clone(),
            name: c.name.clone(),
            stop_first: c.state == ContainerState::Unknown,
        })
        .collect();
    for (uid, pod) in gc.pods {
        let keep = usize::from(!(gc.sources_ready && (gc.gone)(uid)));
        for s in pod.sandboxes.iter().skip(keep).rev() {
            let used = pod.containers.iter().any(|c| c.sandbox_id == s.id && !removed_ids.contains(c.id.as_str()));
            if !s.ready && !used {
                removals.push(Removal::Sandbox { uid: uid.clone(), id: s.id.clone() });
            }
        }
    }
    removals
}

/// Moves all but the newest `max` of each name to `removed`.
fn cut<'a>(
    kept: &mut BTreeMap<(&'a PodUid, &'a str), Vec<&'a ObservedContainer>>,
    max: usize,
    removed: &mut Vec<(&'a PodUid, &'a ObservedContainer)>,
) {
    for (&(uid, _), list) in kept.iter_mut() {
        list.sort_by_key(|c| std::cmp::Reverse((c.restart_count, c.created_at)));
        removed.extend(list.drain(max.min(list.len())..).map(|c| (uid, c)));
    }
    kept.retain(|_, list| !list.is_empty());
}

/// The age of something, when it is at least `min`. What was made in the future was made before the clock was set back: how old it is nobody knows, and it
/// is not kept for that.
fn older_than(now: Timestamp, since: Timestamp, min: Duration) -> Option<SignedDuration> {
    let age = now.duration_since(since);
    (age.is_negative() || age >= SignedDuration::try_from(min).unwrap_or(SignedDuration::MAX)).then_some(age)
}

/// Runtime pods that no worker knows. They are ended with [`crate::terminate::ORPHAN_GRACE`]. None while a source has not been heard: an
/// API pod must not die because the API server is slow.
pub fn orphan_pods<'a>(
    pods: &'a BTreeMap<PodUid, ObservedPod>,
    known: &dyn Fn(&PodUid) -> bool,
    sources_ready: bool,
) -> Vec<&'a ObservedPod> {
    if !sources_ready {
        return Vec::new();
    }
    pods.values().filter(|p| !known(&p.uid) && (p.anything_alive() || !p.containers.is_empty())).collect()
}

/// The pod UID in the name of a pod's log directory, `NAMESPACE_NAME_UID`.
pub fn log_dir_uid(name: &str) -> Option<PodUid> {
    let (rest, uid) = name.rsplit_once('_')?;
    (rest.contains('_') && !uid.is_empty()).then(|| PodUid::new(uid))
}

/// Log directories of pods that are gone; `gone` must be false for every pod while a source has not been heard. Names of another shape
/// are not the kubelet's and stay.
pub fn orphan_log_dirs<'a>(names: impl IntoIterator<Item = &'a str>, gone: &dyn Fn(&PodUid) -> bool) -> Vec<&'a str> {
    names.into_iter().filter(|n| log_dir_uid(n).is_some_and(|uid| gone(&uid))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{at, seen};

    fn ids(removals: &[Removal]) -> Vec<String> {
        removals
            .iter()
            .map(|r| match r {
                Removal::Container { id, stop_first: true, .. } => format!("stop {id}"),
                Removal::Container { id, .. } | Removal::Sandbox { id, .. } => id.clone(),
            })
            .collect()
    }

    fn collect(items: &[&str], gone: bool, policy: ContainerGcPolicy, held: &str) -> Vec<String> {
        let pod = seen(items);
        let pods = BTreeMap::from([(pod.uid.clone(), pod)]);
        ids(&container_gc(&ContainerGc {
            pods: &pods,
            gone: &|_| gone,
            held: &|id| id == held,
            sources_ready: true,
            policy,
            now: at(100),
        }))
    }

    const MANY: &[&str] =
        &["s0 dead", "s0/web exit=1", "s1 ready", "s1/web exit=1", "s1/web exit=1", "s1/web running", "s1/i exit=0"];

    #[test]
    fn one_dead_container_of_each_name_stays() {
        let default = ContainerGcPolicy::default();
        assert_eq!(collect(MANY, false, default, ""), ["web.1", "web.0", "s0"]);
        assert_eq!(collect(MANY, false, ContainerGcPolicy { max_per_name: 2, ..default }, ""), ["web.0", "s0"]);
        assert_eq!(collect(MANY, false, ContainerGcPolicy { max_per_name: -1, ..default }, ""), [""; 0]);
        // Not old enough: created at seconds 1, 3, 4 and 6 of 100.
        let young = ContainerGcPolicy { max_per_name: 0, min_age: Duration::from_secs(96), ..default };
        assert_eq!(collect(MANY, false, young, ""), ["web.2", "web.1", "web.0", "s0"]);
        let young = ContainerGcPolicy { max_per_name: 0, min_age: Duration::from_secs(98), ..default };
        assert_eq!(collect(MANY, false, young, ""), ["web.0", "s0"]);
        // Its worker has not read how it ended.
        assert_eq!(collect(MANY, false, default, "web.0"), ["web.1"]);
        assert_eq!(
            collect(MANY, false, ContainerGcPolicy { max_per_name: 0, ..default }, "web.2"),
            ["i.0", "web.1", "web.0", "s0"]
        );
    }

    #[test]
    fn a_limit_for_the_node() {
        let some = ContainerGcPolicy { max_per_name: -1, max_total: 2, ..Default::default() };
        assert_eq!(collect(MANY, false, some, ""), ["web.1", "web.0", "s0"]);
        let one = ContainerGcPolicy { max_per_name: -1, max_total: 1, ..Default::default() };
        assert_eq!(collect(MANY, false, one, ""), ["web.1", "web.0", "web.2", "s0"]);
        let none = ContainerGcPolicy { max_per_name: -1, max_total: 0, ..Default::default() };
        assert_eq!(collect(MANY, false, none, ""), ["web.1", "web.0", "web.2", "i.0", "s0"]);
    }

    #[test]
    fn of_a_pod_that_is_gone_only_what_runs_stays() {
        let default = ContainerGcPolicy::default();
        assert_eq!(collect(MANY, true, default, ""), ["web.2", "web.1", "i.0", "web.0", "s0"]);
        assert_eq!(
            collect(&["s0 dead", "s0/web unknown", "s0/x created"], true, default, ""),
            ["x.0", "stop web.0", "s0"]
        );
        assert_eq!(collect(&["s0 dead", "s1 dead"], true, default, ""), ["s0", "s1"]);
        assert_eq!(collect(&["s0 dead", "s1 dead"], false, default, ""), ["s0"]);
        assert_eq!(collect(&["s0 ready", "s1 dead"], false, default, ""), [""; 0]);
        // What is being made of a living pod stays.
        assert_eq!(collect(&["s0 ready", "s0/web exit=1", "s0/web created"], false, default, ""), [""; 0]);
        // Before all sources were heard nobody is gone.
        let pod = seen(MANY);
        let pods = BTreeMap::from([(pod.uid.clone(), pod)]);
        let early = container_gc(&ContainerGc {
            pods: &pods,
            gone: &|_| true,
            held: &|_| false,
            sources_ready: false,
            policy: ContainerGcPolicy::default(),
            now: at(100),
        });
        assert_eq!(ids(&early), ["web.1", "web.0", "s0"]);
    }

    #[test]
    fn orphans() {
        let pod = seen(MANY);
        let pods = BTreeMap::from([(pod.uid.clone(), pod)]);
        assert_eq!(orphan_pods(&pods, &|_| false, true).len(), 1);
        assert_eq!(orphan_pods(&pods, &|_| false, false).len(), 0);
        assert_eq!(orphan_pods(&pods, &|_| true, true).len(), 0);
        let names = ["ns_web_uid-1", "ns_web_uid-2", "stray", "a_b"];
        assert_eq!(orphan_log_dirs(names, &|uid| uid.as_str() == "uid-2"), ["ns_web_uid-2"]);
        assert_eq!(log_dir_uid("stray"), None);
        assert_eq!(log_dir_uid("a_b"), None);
    }

    proptest! {
        /// Never anything alive, never the newest sandbox of a living pod, and once done there is nothing left to do.
        #[test]
        fn only_the_dead(states in prop::collection::vec((0usize..3, 0usize..4, 0usize..3), 0..20), gone in any::<bool>()) {
            let words = ["running", "exit=0", "created", "unknown"];
            let items: Vec<String> = ["s0 dead".to_owned(), "s1 dead".to_owned(), "s2 ready".to_owned()]
                .into_iter()
                .chain(states.iter().map(|(name, state, sandbox)| format!("s{sandbox}/c{name} {}", words[*state])))
                .collect();
            let mut pod = seen(&items.iter().map(String::as_str).collect::<Vec<_>>());
            for _ in 0..2 {
                let pods = BTreeMap::from([(pod.uid.clone(), pod.clone())]);
                let removals = container_gc(&ContainerGc {
                    pods: &pods, gone: &|_| gone, held: &|_| false, sources_ready: true,
                    policy: ContainerGcPolicy::default(), now: at(1000),
                });
                for r in &removals {
                    match r {
                        Removal::Container { id, .. } => {
                            let c = pod.containers.iter().find(|c| c.id == *id).unwrap();
                            prop_assert!(c.state != ContainerState::Running);
                            prop_assert!(gone || c.state != ContainerState::Created);
                            pod.containers.retain(|c| c.id != *id);
                        }
                        Removal::Sandbox { id, .. } => {
                            prop_assert!(id != "s2");
                            prop_assert!(!pod.containers.iter().any(|c| c.sandbox_id == *id));
                            pod.sandboxes.retain(|s| s.id != *id);
                        }
                    }
                }
            }
            let pods = BTreeMap::from([(pod.uid.clone(), pod.clone())]);
            let again = container_gc(&ContainerGc {
                pods: &pods, gone: &|_| gone, held: &|_| false, sources_ready: true,
                policy: ContainerGcPolicy::default(), now: at(1000),
            });
            prop_assert!(again.is_empty());
        }
    }
}
