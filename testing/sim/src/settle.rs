//! Judging a node: what is sound at every moment, what is still to come, and what must be so once it has come to rest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cri_api::v1::ContainerState;
use decide::{config, status};
use fakes::{For, Process};
use model::pod::{CONFIG_HASH, ContainerKind, DesiredPod};
use pod::status::Mirror;
use tokio::time::Instant;

use crate::api::{FakeApi, revived, uid_of};
use crate::host::{POD_LOGS, ROOT};
use crate::node::Node;
use crate::ports::short;

/// Tasks of an agent without pods: sources, reflector, dispatcher, ledger, generator, status writer.
const OWN_TASKS: usize = 10;

/// Stands between what is wrong and what happened before.
pub(crate) const RECENTLY: &str = "\n---- what happened last\n";

impl Node {
    /// Whether nothing of a pod is left anywhere.
    pub fn is_gone(&self, uid: &str) -> bool {
        self.leftovers(|other| other == uid).is_empty()
    }

    /// What is left, in runtime, host and table, of pods whose UID is such.
    pub fn leftovers(&self, such: impl Fn(&str) -> bool) -> Vec<String> {
        let mut left = Vec::new();
        let mut add = |what: &str, uid: &str| {
            if such(uid) {
                left.push(format!("{what} of {uid}"));
            }
        };
        for c in self.runtime().containers() {
            add("container", c.labels.get(config::names::POD_UID_LABEL).map(String::as_str).unwrap_or_default());
        }
        for s in self.runtime().sandboxes() {
            add("sandbox", s.metadata.as_ref().map(|m| m.uid.as_str()).unwrap_or_default());
        }
        let standing = self.host().standing();
        standing.cgroups.keys().for_each(|uid| add("cgroup", uid.as_str()));
        standing.dirs.iter().for_each(|uid| add("directory", uid.as_str()));
        standing.mounts.iter().for_each(|(uid, _)| add("mount", uid.as_str()));
        standing.log_dirs.iter().for_each(|dir| add("log directory", config::names::uid_of_log_dir(dir)));
        for log in standing.links.values() {
            let dir = log.trim_start_matches(POD_LOGS).trim_start_matches('/').split('/').next().unwrap_or_default();
            add("log link", config::names::uid_of_log_dir(dir));
        }
        let pods = PathBuf::from(ROOT).join("pods");
        for file in standing.files.keys().filter_map(|file| file.strip_prefix(&pods).ok()) {
            add("file", &file.iter().next().unwrap_or_default().to_string_lossy());
        }
        for uid in self.allocated() {
            add("allocation", &uid);
        }
        self.entries().iter().for_each(|e| add("entry", e.uid.as_str()));
        left
    }

    /// UIDs in the checkpoint of allocations.
    fn allocated(&self) -> Vec<String> {
        self.checkpoint(pod::admit::ALLOCATED).into_keys().collect()
    }

    /// A checkpoint of resources, by its file name.
    pub fn checkpoint(&self, name: &str) -> manifest::checkpoint::Allocations {
        let standing = self.host().standing();
        let bytes = standing.files.get(&PathBuf::from(ROOT).join(name));
        bytes.and_then(|bytes| manifest::checkpoint::decode_allocations(bytes).ok()).unwrap_or_default()
    }

    // ---- Judgement

    /// # Panics
    /// Something was violated.
    pub fn assert_sound(&self) {
        self.world.look();
        let mut violations = self.world.violations();
        violations.extend(crate::panics());
        assert!(violations.is_empty(), "{}{}", violations.join("\n"), self.recently());
    }

    /// Makes everything well: no more faults, and processes that end do so no more, but for those of pods that are to run to their end.
    pub fn heal(&self) {
        self.runtime().heal();
        self.runtime().come_up();
        self.host().heal();
        self.world.api.iter().for_each(FakeApi::heal);
        self.world.delay_events(Duration::ZERO);
        self.runtime().configure(|s| {
            s.status = fakes::Settings::default().status;
            (s.lost_events, s.doubled_events, s.late_events) = (0.0, 0.0, 0.0);
        });
        for pod in self.wanted() {
            for c in pod.containers() {
                let runs_on = c.kind == ContainerKind::Sidecar
                    || (c.kind == ContainerKind::App && pod.spec().restart_policy.as_deref() == Some("Always"));
                let life = if runs_on { Process::forever() } else { Process::exits(0, Duration::from_secs(1)) };
                self.runtime().script(For::PodContainer(pod.name().to_owned(), c.spec.name.clone()), [life]);
                for running in self.containers(pod.uid().as_str()).iter().filter(|_| !runs_on) {
                    if running.metadata.as_ref().is_some_and(|m| m.name == c.spec.name) {
                        self.runtime().exit(&running.id, 0);
                    }
                }
            }
        }
    }

    /// What is still to come before the node is as its manifests want it; empty when it is.
    pub fn missing(&self) -> Vec<String> {
        let wanted = self.wanted();
        let mut missing = self.leftovers(|uid| !wanted.iter().any(|pod| pod.uid().as_str() == uid));
        for pod in &wanted {
            let uid = pod.uid().as_str();
            let phase = self.phase(uid);
            let mut running = self.running(uid);
            running.sort();
            let always = pod.spec().restart_policy.as_deref() == Some("Always");
            let may_end = !always || self.evicted.contains_key(uid);
            if may_end && matches!(phase.as_str(), "Succeeded" | "Failed") {
                if !running.is_empty() {
                    missing.push(format!("{} is {phase} and runs {running:?}", pod.name()));
                }
                continue;
            }
            // A pod that is never to restart and lost its sandbox before all of its apps had run, or lost the record that they had, gets no other
            // sandbox and stays Pending, as with Go.
            let lost = self.sandboxes_of(uid).is_some_and(|ready| !ready) && !self.containers(uid).is_empty();
            if pod.spec().restart_policy.as_deref() == Some("Never") && phase == "Pending" && running.is_empty() && lost
            {
                continue;
            }
            let mut due: Vec<String> = pod
                .containers()
                .filter(|c| c.kind == ContainerKind::Sidecar || (always && c.kind == ContainerKind::App))
                .map(|c| c.spec.name.clone())
                .collect();
            due.sort();
            if !always || running != due || phase != "Running" {
                missing.push(format!("{} is {phase:?} and runs {running:?} of {due:?}", pod.name()));
            }
        }
        missing.extend(self.unequal());
        missing
    }

    /// Where the API server holds something else than the node shows.
    fn unequal(&self) -> Vec<String> {
        let Some(api) = &self.world.api else { return Vec::new() };
        let (objects, statics) = (api.pods(), self.statics());
        let mut unequal = Vec::new();
        for object in &objects {
            let uid = uid_of(object);
            let shown = match Mirror::of(object) {
                None if object.metadata.deletion_timestamp.is_some() => {
                    unequal.push(format!("object {uid} is still there"));
                    continue;
                }
                None => self.status(&uid),
                Some(mirror) => match statics.iter().find(|pod| pod.full_name() == mirror.full_name()) {
                    Some(pod) if hash_of(pod) == mirror.hash => self.status(pod.uid().as_str()),
                    _ => {
                        unequal.push(format!("mirror pod {uid} stands for nobody"));
                        continue;
                    }
                },
            };
            let held = object.status.clone().unwrap_or_default();
            let now = status::merged(&held, shown);
            let mut told = object.clone();
            told.status = Some(now.clone());
            // What the server refuses it cannot know.
            if let Some(patch) =
                cluster::patch::pod_status(&uid, &held, &now).filter(|_| revived(object, &told).is_none())
            {
                unequal.push(format!("the API server does not know of {uid}: {patch}"));
            }
        }
        let mirrored =
            |pod: &&DesiredPod| objects.iter().filter_map(Mirror::of).any(|m| m.full_name() == pod.full_name());
        for pod in statics.iter().filter(|pod| !mirrored(pod)) {
            // One that ended before it got its mirror pod gets none.
            if !matches!(self.phase(pod.uid().as_str()).as_str(), "Succeeded" | "Failed") {
                unequal.push(format!("{} has no mirror pod", pod.name()));
            }
        }
        unequal
    }

    /// Lets time pass until the node is as its manifests want it, then makes sure that the agent is at rest.
    ///
    /// # Panics
    /// It does not come to that within the limit, or something was violated.
    pub async fn settle(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            self.assert_sound();
            let missing = self.missing();
            if missing.is_empty() {
                break;
            }
            assert!(
                Instant::now() < end,
                "not settled within {limit:?}:\n{}\n{}{}",
                missing.join("\n"),
                self.inventory(),
                self.recently()
            );
            self.run(Duration::from_secs(2)).await;
        }
        // Dead containers of the way here are collected with a resync, a minute after the last collection. A container that still had an end
        // before it may take another turn.
        loop {
            self.run(Duration::from_secs(180)).await;
            let before = self.changes().len();
            self.run(Duration::from_secs(70)).await;
            self.assert_sound();
            let after = self.changes();
            if after.len() == before {
                break;
            }
            assert!(Instant::now() < end, "an agent at rest changed the runtime: {:?}", &after[before..]);
        }
        let missing = self.missing();
        assert!(missing.is_empty(), "what was settled is so no more: {missing:?}");
        self.assert_bounded();
    }

    /// The newest of what happened, below a line.
    fn recently(&self) -> String {
        format!("{RECENTLY}{}", self.world.asked(120).join("\n"))
    }

    /// What the runtime has, in words.
    fn inventory(&self) -> String {
        let mut lines = Vec::new();
        for c in self.runtime().containers() {
            let uid = c.labels.get(config::names::POD_UID_LABEL).cloned().unwrap_or_default();
            let (name, attempt) = c.metadata.as_ref().map(|m| (m.name.as_str(), m.attempt)).unwrap_or_default();
            let sandbox = self.runtime().sandbox_of(&c.id).unwrap_or_default();
            let (state, code) = (c.state().as_str_name(), c.exit_code);
            lines.push(format!("{uid} {name}/{attempt} {} {state} {code} in {}", short(&c.id), short(&sandbox)));
        }
        for s in self.runtime().sandboxes() {
            let uid = s.metadata.as_ref().map(|m| m.uid.as_str()).unwrap_or_default();
            lines.push(format!("{uid} sandbox {} {}", short(&s.id), s.state().as_str_name()));
        }
        lines.join("\n")
    }

    /// Calls so far that changed the runtime; probes do not count.
    fn changes(&self) -> Vec<fakes::Call> {
        self.runtime().changes().into_iter().filter(|call| call.call != "ExecSync").collect()
    }

    /// # Panics
    /// More is kept than the settings allow: one dead container of each name, one sandbox, one entry a pod.
    fn assert_bounded(&self) {
        let mut dead: BTreeMap<(String, String), usize> = BTreeMap::new();
        for c in self.runtime().containers().iter().filter(|c| c.state() == ContainerState::ContainerExited) {
            let uid = c.labels.get(config::names::POD_UID_LABEL).cloned().unwrap_or_default();
            *dead.entry((uid, c.metadata.clone().unwrap_or_default().name)).or_default() += 1;
        }
        for ((uid, name), count) in dead {
            let terminal = matches!(self.phase(&uid).as_str(), "Succeeded" | "Failed");
            assert!(count <= 1 || terminal, "{count} dead containers {name} of pod {uid} are kept");
        }
        assert_eq!(self.entries().len(), self.wanted().len(), "entries in the table");
        // Besides those that every agent has: a worker for each pod, and for each probe of a container.
        let probes = |c: &model::pod::ContainerEntry<'_>| {
            let spec = c.spec;
            [&spec.liveness_probe, &spec.readiness_probe, &spec.startup_probe].into_iter().flatten().count()
        };
        let own: usize = self.wanted().iter().map(|pod| 1 + pod.containers().map(|c| probes(&c)).sum::<usize>()).sum();
        let tasks = self.agent.as_ref().map_or(0, |agent| agent.tasks.count());
        assert!(tasks <= OWN_TASKS + own, "{tasks} tasks, {own} of them for pods");
    }
}

fn hash_of(pod: &DesiredPod) -> &str {
    pod.annotation(CONFIG_HASH).unwrap_or_else(|| pod.uid().as_str())
}
