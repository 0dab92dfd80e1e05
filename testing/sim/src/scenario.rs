//! Whole runs from one number: pods of all kinds come, change, exit and go while the runtime, its events, the host and the agent fail.
//!
//! The same seed gives the same run. At the end everything is healed, and the node must come to be as its manifests want it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cri_api::v1::ContainerState;
use fakes::{Fault, For, Process, Rule};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::host::{HostFault, HostRule};
use crate::manifests::{Container, Manifest};
use crate::node::{Node, Setup};

/// Manifest files that come and go.
const FILES: [&str; 6] = ["a.yaml", "b.yaml", "c.yaml", "d.yaml", "e.yaml", "f.yaml"];

/// How long the end may take: the longest calls that hang, one after the other, and the longest back-off after them.
const END: Duration = Duration::from_secs(2400);

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Steps made.
    pub steps: u64,
    /// Manifests written, changed or removed.
    pub manifests: u64,
    /// Runtime calls that went wrong, by rule or because the runtime was down.
    pub runtime_faults: u64,
    /// Host calls that went wrong.
    pub host_faults: u64,
    /// Agents that were cut off.
    pub kills: u64,
    /// Calls of the agent that change something.
    pub effects: u64,
    /// Virtual seconds.
    pub seconds: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.manifests += other.manifests;
        self.runtime_faults += other.runtime_faults;
        self.host_faults += other.host_faults;
        self.kills += other.kills;
        self.effects += other.effects;
        self.seconds += other.seconds;
    }
}

/// Runs the scenario of this seed.
///
/// # Panics
/// Something was violated, or the node does not come to be as wanted. The message holds what happened.
pub async fn play(seed: u64) -> Tally {
    let mut random = SmallRng::seed_from_u64(seed);
    let runtime = fakes::Settings {
        events: random.random_bool(0.8),
        lost_events: *[0.0, 0.0, 0.1, 1.0].choose(&mut random).unwrap_or(&0.0),
        doubled_events: *[0.0, 0.3].choose(&mut random).unwrap_or(&0.0),
        late_events: *[0.0, 0.3].choose(&mut random).unwrap_or(&0.0),
        ..Default::default()
    };
    let node = Node::with(Setup { seed, runtime }).await;
    let sick = Arc::new(AtomicBool::new(false));
    for name in ["a0", "a1", "i0", "i1"] {
        let sick = sick.clone();
        node.runtime().script_exec(name, move |command| {
            let fails = command == ["fail"] || (command == ["probe"] && sick.load(Ordering::Relaxed));
            let output = cri::ExecOutput { exit_code: fails.into(), ..Default::default() };
            fakes::Exec { output, takes: Duration::from_millis(20) }
        });
    }
    let (manifests, tally) = (Default::default(), Tally::default());
    let player = Player { node, sick, random, manifests, tally, versions: 0 };
    player.play().await
}

struct Player {
    node: Node,
    /// Whether exec probes fail.
    sick: Arc<AtomicBool>,
    random: SmallRng,
    manifests: [Option<Manifest>; FILES.len()],
    tally: Tally,
    versions: u32,
}

impl Player {
    async fn play(mut self) -> Tally {
        for _ in 0..self.random.random_range(1..4) {
            self.write();
        }
        for _ in 0..self.random.random_range(10..50) {
            self.tally.steps += 1;
            self.step().await;
            self.node.assert_sound();
            let time = self.time();
            tracing::info!(?time, "Time passes");
            self.node.run(time).await;
            self.node.assert_sound();
        }
        tracing::info!("All is healed");
        self.node.world().cut_at(None);
        self.node.start().await;
        self.sick.store(false, Ordering::Relaxed);
        self.node.heal();
        self.node.settle(END).await;
        let calls = self.node.runtime().calls();
        let failed = |c: &&fakes::Call| c.ended.as_ref().is_none_or(|e| *e != fakes::Ended::Answered);
        self.tally.runtime_faults = calls.iter().filter(failed).count() as u64;
        self.tally.host_faults = self.node.host().faults();
        self.tally.effects = self.node.world().effects();
        self.tally.seconds = self.node.world().at().as_secs();
        self.tally
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.random.random_ratio(1, n)
    }

    /// From a millisecond to a few minutes; mostly seconds.
    fn time(&mut self) -> Duration {
        let exponent = self.random.random_range(-3.0..2.2);
        Duration::from_secs_f64(10f64.powf(exponent)).max(Duration::from_millis(1))
    }

    async fn step(&mut self) {
        match self.random.random_range(0..29) {
            0..4 => self.write(),
            4..6 => self.remove(),
            6..8 => self.put_back().await,
            8..11 => self.exit(),
            11 => self.end_sandbox(),
            12 => self.lose_sight(),
            13 => self.remove_dead().await,
            14 => {
                let down = self.time().min(Duration::from_secs(60));
                tracing::info!(?down, "The runtime restarts");
                self.node.runtime().restart(down);
            }
            15..19 => self.runtime_fault(),
            19..21 => self.host_fault(),
            21 => {
                tracing::info!("Faults end");
                self.node.runtime().heal();
                self.node.host().heal();
            }
            22 => {
                let down = self.time();
                tracing::info!(?down, "The agent is cut off");
                self.tally.kills += 1;
                self.node.restart(down).await;
            }
            23 => {
                let soon = self.node.world().effects() + self.random.random_range(1..12);
                tracing::info!(soon, "The agent is going to be cut off at a call");
                self.tally.kills += 1;
                let down = self.time();
                self.node.comes_back_after(down);
                self.node.world().cut_at(Some(soon));
            }
            24 => {
                let ready = self.random.random_bool(0.5);
                tracing::info!(ready, "The network");
                self.node.runtime().configure(|s| {
                    for c in s.status.status.iter_mut().flat_map(|s| &mut s.conditions) {
                        if c.r#type == "NetworkReady" {
                            c.status = ready;
                        }
                    }
                });
            }
            25 => {
                let down = self.time();
                tracing::info!(?down, "The machine reboots");
                self.tally.kills += 1;
                self.node.kill();
                self.node.runtime().reboot(down);
                let down = self.time();
                self.node.run(down).await;
                self.node.start().await;
            }
            26 => {
                let sick = self.random.random_bool(0.5);
                tracing::info!(sick, "Probes");
                self.sick.store(sick, Ordering::Relaxed);
            }
            27 => {
                // In a file of its own: one that was good keeps its pod until the next periodic look, which no rule here can tell.
                let bytes = *[&b"kind: Pod, of a kind"[..], b"", b"{", b"\xff\xfe"]
                    .choose(&mut self.random)
                    .unwrap_or(&&b""[..]);
                tracing::info!(?bytes, "A bad manifest");
                self.node.write_bytes("bad.yaml", bytes.to_vec());
            }
            _ => {
                let deadline = Duration::from_secs(5);
                self.node.drain(deadline).await;
                let down = self.time();
                tracing::info!(?down, "The agent is replaced in an orderly way");
                self.node.run(down).await;
                self.node.start().await;
            }
        }
    }

    /// A new pod, or a change of one.
    fn write(&mut self) {
        let slot = self.random.random_range(0..FILES.len());
        let manifest = match self.manifests[slot].take() {
            Some(mut old) if !self.one_in(3) => {
                // The same pod with another image; under a generated UID it is another pod of the same name.
                self.versions += 1;
                let at = self.random.random_range(0..old.apps.len());
                old.apps[at].image = format!("registry.local/app:v{}", self.versions);
                old
            }
            _ => self.manifest(slot),
        };
        tracing::info!(file = FILES[slot], manifest = manifest.text(), "Manifest");
        self.tally.manifests += 1;
        self.node.write(FILES[slot], &manifest);
        self.manifests[slot] = Some(manifest);
    }

    fn remove(&mut self) {
        let slot = self.random.random_range(0..FILES.len());
        if self.manifests[slot].take().is_some() {
            tracing::info!(file = FILES[slot], "Removed");
            self.tally.manifests += 1;
            self.node.remove(FILES[slot]);
        }
    }

    /// Takes a file away and puts it back after a while.
    async fn put_back(&mut self) {
        let slot = self.random.random_range(0..FILES.len());
        if let Some(manifest) = self.manifests[slot].clone() {
            let away = self.time().min(Duration::from_secs(10));
            tracing::info!(file = FILES[slot], ?away, "Away and back");
            self.tally.manifests += 2;
            self.node.remove(FILES[slot]);
            self.node.run(away).await;
            self.node.write(FILES[slot], &manifest);
        }
    }

    fn manifest(&mut self, slot: usize) -> Manifest {
        // Two files may name the same pod.
        let name = format!("p{}", if self.one_in(8) { 0 } else { slot });
        let policy =
            *["Always", "Always", "Always", "OnFailure", "Never"].choose(&mut self.random).unwrap_or(&"Always");
        let grace = *[0, 1, 2, 5, 30].choose(&mut self.random).unwrap_or(&5);
        let mut manifest = Manifest::new(&name).policy(policy).grace(grace);
        manifest.host_network = self.one_in(6);
        if self.one_in(2) {
            // One and the same UID stands for one and the same set of containers.
            self.versions += 1;
            manifest.uid = Some(format!("fixed-{slot}-{}", self.versions));
        }
        for n in 0..self.random.random_range(0..3) {
            manifest =
                if self.one_in(2) { manifest.init(&format!("i{n}")) } else { manifest.sidecar(&format!("i{n}")) };
        }
        let apps = self.random.random_range(1..3);
        manifest = manifest.apps((0..apps).map(|n| Container::new(&format!("a{n}"))));
        for app in 0..apps {
            let extra = self.extra();
            if let Some((field, value)) = extra {
                // A hook may not sleep longer than the grace.
                manifest.grace = if field == "lifecycle" { manifest.grace.max(8) } else { manifest.grace };
                manifest.apps[app].more[field] = value;
            }
        }
        let pod = format!("{name}-{}", crate::node::NODE);
        for container in manifest.inits.iter().chain(&manifest.apps) {
            let runs_on = container.more.get("restartPolicy").is_some() || manifest.apps.contains(container);
            let lives = self.lives(runs_on);
            self.node.runtime().script(For::PodContainer(pod.clone(), container.name.clone()), lives);
        }
        if self.one_in(4) {
            let image = manifest.apps[0].image.clone();
            let takes = self.time().min(Duration::from_secs(30));
            self.node.runtime().add_remote_image(&image, takes, None);
        }
        manifest
    }

    /// A hook or a probe, now and then.
    fn extra(&mut self) -> Option<(&'static str, Value)> {
        let seconds = self.random.random_range(1..8);
        let exec = |what: &str| json!({ "exec": { "command": [what] } });
        Some(match self.random.random_range(0..20) {
            0 => ("lifecycle", json!({ "preStop": { "sleep": { "seconds": seconds } } })),
            1 => ("lifecycle", json!({ "preStop": exec("fail"), "postStart": { "sleep": { "seconds": seconds } } })),
            2 => ("lifecycle", json!({ "postStart": exec("well") })),
            3 => ("livenessProbe", json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds })),
            4 => (
                "startupProbe",
                json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds, "failureThreshold": 2 }),
            ),
            5 => ("readinessProbe", json!({ "exec": { "command": ["probe"] }, "periodSeconds": seconds })),
            _ => return None,
        })
    }

    /// What a container's processes do, life by life.
    fn lives(&mut self, runs_on: bool) -> Vec<Process> {
        (0..self.random.random_range(1..4))
            .map(|_| {
                let code = *[0, 0, 1].choose(&mut self.random).unwrap_or(&0);
                let after = self.time();
                let life = match self.random.random_range(0..10) {
                    0 => Process::broken("exec: \"app\": executable file not found in $PATH"),
                    1..4 => Process::exits(code, after),
                    _ if runs_on => Process::forever(),
                    _ => Process::exits(code, after.min(Duration::from_secs(3))),
                };
                match self.random.random_range(0..5) {
                    0 => life.ignoring_term(),
                    1 => life.trapping_term(0, after),
                    _ => life,
                }
            })
            .collect()
    }

    fn container(&mut self, such: impl Fn(ContainerState) -> bool) -> Option<String> {
        let all = self.node.runtime().containers();
        let fit: Vec<String> = all.into_iter().filter(|c| such(c.state())).map(|c| c.id).collect();
        fit.choose(&mut self.random).cloned()
    }

    fn exit(&mut self) {
        if let Some(id) = self.container(|s| s == ContainerState::ContainerRunning) {
            let code = *[0, 1, 137].choose(&mut self.random).unwrap_or(&0);
            tracing::info!(id, code, "A container exits");
            self.node.runtime().exit(&id, code);
        }
    }

    fn end_sandbox(&mut self) {
        let ids: Vec<String> = self.node.runtime().sandboxes().into_iter().map(|s| s.id).collect();
        if let Some(id) = ids.choose(&mut self.random) {
            tracing::info!(id, "A sandbox ends");
            self.node.runtime().end_sandbox(id);
        }
    }

    fn lose_sight(&mut self) {
        if let Some(id) = self.container(|s| s == ContainerState::ContainerRunning) {
            tracing::info!(id, "The runtime loses sight of a container");
            self.node.runtime().lose_sight(&id);
        }
    }

    /// Somebody cleans up in the runtime behind the agent's back.
    async fn remove_dead(&mut self) {
        let dead: Vec<String> = self
            .node
            .runtime()
            .containers()
            .into_iter()
            .filter(|c| c.state() == ContainerState::ContainerExited)
            .map(|c| c.id)
            .collect();
        tracing::info!(?dead, "Dead containers are removed");
        for id in dead {
            let _ = cri::RuntimeMutator::remove_container(self.node.runtime(), &id).await;
        }
    }

    fn runtime_fault(&mut self) {
        const CALLS: [&str; 14] = [
            "RunPodSandbox",
            "StopPodSandbox",
            "RemovePodSandbox",
            "CreateContainer",
            "StartContainer",
            "StopContainer",
            "RemoveContainer",
            "PullImage",
            "ImageStatus",
            "ListPodSandbox",
            "ListContainers",
            "ContainerStatus",
            "PodSandboxStatus",
            "*",
        ];
        let call = *CALLS.choose(&mut self.random).unwrap_or(&"*");
        let fault = match self.random.random_range(0..8) {
            0..2 => Fault::Fail(2, "transport is closing".into()),
            // Of a container that is there, no runtime says that it is not; of what a new one needs it may.
            2 if matches!(
                call,
                "RunPodSandbox" | "CreateContainer" | "StartContainer" | "PullImage" | "ImageStatus"
            ) =>
            {
                Fault::Fail(5, "not found".into())
            }
            2 => Fault::Fail(4, "context deadline exceeded".into()),
            3..5 => Fault::LoseAnswer,
            5 => Fault::Delay(self.time().min(Duration::from_secs(20))),
            6 => Fault::Hang,
            _ => Fault::DoAndHang,
        };
        let hangs = matches!(fault, Fault::Hang | Fault::DoAndHang);
        let rule = Rule::new(call, fault);
        let rule = match self.random.random_range(0..3) {
            0 => rule.times(1),
            1 => rule.times(4),
            _ => rule.chance(0.3).times(20),
        };
        tracing::info!(?rule, "The runtime goes wrong");
        if hangs && matches!(call, "*" | "PullImage") {
            // Pulls have no deadline; the runtime itself gives up one that makes no progress.
            self.node.runtime().inject(Rule::new("PullImage", Fault::Delay(Duration::from_secs(300))));
        }
        self.node.runtime().inject(rule);
    }

    fn host_fault(&mut self) {
        const CALLS: [&str; 12] = [
            "ensure_cgroup",
            "update_cgroup",
            "cgroup_settings",
            "remove_pod_cgroup",
            "make_pod_dirs",
            "mount_volumes",
            "remove_pod_dir",
            "unmount_volumes",
            "prepare_container",
            "remove_container_log",
            "remove_pod_logs",
            "log_dir",
        ];
        let call = *CALLS.choose(&mut self.random).unwrap_or(&"mount_volumes");
        let fault = match self.random.random_range(0..4) {
            0 => HostFault::DoAndFail,
            1 => HostFault::Delay(self.time().min(Duration::from_secs(20))),
            _ => HostFault::Fail,
        };
        let times = self.random.random_range(1..6);
        tracing::info!(call, ?fault, times, "The host goes wrong");
        self.node.host().inject(HostRule::new(call, fault).times(times));
    }
}
