//! Playing a story: its items one after the other on a simulated node; then everything is healed, and the node must come to be as it is wanted.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cri_api::v1::{ContainerState, ContainerStatus};
use decide::config::names;
use fakes::{Fault, For, Rule};
use futures::FutureExt;
use jiff::SignedDuration;
use model::api::Pod;
use pod::status::Mirror;

use crate::bugs::Bug;
use crate::host::ROOT;
use crate::manifests::Manifest;
use crate::node::{ApiServer, NODE, Node, Setup};
use crate::settle::RECENTLY;
use crate::story::{Act, FILES, OBJECTS, Script, Story};

/// How long the end may take: the longest calls that hang, one after the other, and the longest back-off after them.
const END: Duration = Duration::from_secs(2400);
/// How long an orderly end may take.
const DRAIN: Duration = Duration::from_secs(5);

/// What happened in runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Items by kind.
    pub acts: BTreeMap<&'static str, u64>,
    /// Runtime calls that went wrong, by rule or because the runtime was down.
    pub runtime_faults: u64,
    /// Host calls that went wrong.
    pub host_faults: u64,
    /// Calls of the API server that went wrong, and watches that were broken.
    pub api_faults: u64,
    /// Calls of the agent that change something.
    pub effects: u64,
    /// Facts that the invariants were checked against.
    pub checks: u64,
    /// Virtual seconds.
    pub seconds: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        for (kind, count) in other.acts {
            *self.acts.entry(kind).or_default() += count;
        }
        self.runtime_faults += other.runtime_faults;
        self.host_faults += other.host_faults;
        self.api_faults += other.api_faults;
        self.effects += other.effects;
        self.checks += other.checks;
        self.seconds += other.seconds;
    }
}

/// How a story ended.
#[derive(Clone, Debug)]
pub struct Played {
    /// What happened, in numbers.
    pub tally: Tally,
    /// What was wrong, if anything was.
    pub failure: Option<String>,
    /// Every item, fault and call in its order.
    pub lines: Vec<String>,
}

/// Plays a story, on a clock of its own. `verbose`: calls that only look are told too.
pub fn play(story: &Story, bug: Option<Bug>, verbose: bool) -> Played {
    crate::run(async {
        let runtime = fakes::Settings {
            events: story.events,
            lost_events: story.unreliable.0,
            doubled_events: story.unreliable.1,
            late_events: story.unreliable.2,
            ..Default::default()
        };
        let node = Node::without_agent(Setup { seed: story.seed, runtime, api: story.api, bug });
        if verbose {
            node.world().verbose();
        }
        let mut player = Player { node, sick: Arc::default(), manifests: Default::default(), tally: Tally::default() };
        let failure = AssertUnwindSafe(player.play(story)).catch_unwind().await.err().map(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default();
            text.split(RECENTLY).next().unwrap_or_default().to_owned()
        });
        Played { tally: player.count(), failure, lines: player.node.world().asked(usize::MAX) }
    })
}

struct Player {
    node: Node,
    /// Whether exec probes fail.
    sick: Arc<AtomicBool>,
    manifests: [Option<Manifest>; FILES],
    tally: Tally,
}

impl Player {
    fn count(&mut self) -> Tally {
        let calls = self.node.runtime().calls();
        let failed = |c: &&fakes::Call| c.ended.as_ref().is_none_or(|e| *e != fakes::Ended::Answered);
        self.tally.runtime_faults = calls.iter().filter(failed).count() as u64;
        self.tally.host_faults = self.node.host().faults();
        self.tally.api_faults = self.node.world().api.as_ref().map_or(0, crate::api::FakeApi::faults);
        self.tally.effects = self.node.world().effects();
        self.tally.checks = self.node.world().checks();
        self.tally.seconds = self.node.world().at().as_secs();
        self.tally.clone()
    }

    async fn play(&mut self, story: &Story) {
        for name in ["a0", "a1", "i0", "i1"] {
            let sick = self.sick.clone();
            self.node.runtime().script_exec(name, move |command| {
                let fails = command == ["fail"] || (command == ["probe"] && sick.load(Ordering::Relaxed));
                let output = cri::ExecOutput { exit_code: fails.into(), ..Default::default() };
                fakes::Exec { output, takes: Duration::from_millis(20) }
            });
        }
        self.node.start().await;
        for item in &story.items {
            self.node.world().tell(format!("* {}", item.act));
            if story.api != ApiServer::None || !item.act.needs_api() {
                *self.tally.acts.entry(item.act.kind()).or_default() += 1;
                self.act(&item.act).await;
            }
            self.node.assert_sound();
            self.node.run(item.then).await;
            self.node.assert_sound();
        }
        self.node.world().tell("* all is healed");
        self.node.world().cut_at(None);
        self.node.host().heal();
        self.node.start().await;
        self.sick.store(false, Ordering::Relaxed);
        self.node.heal();
        self.node.settle(END).await;
    }

    async fn act(&mut self, act: &Act) {
        match act {
            Act::Write(slot, script) => {
                self.script(script, &format!("{}-{NODE}", script.manifest.name));
                self.write(*slot, script.manifest.clone());
            }
            Act::Image(slot, app, version) => {
                // The same pod with another image; under a generated UID it is another pod of the same name.
                if let Some(mut manifest) = self.manifests[*slot].take() {
                    let app = app % manifest.apps.len();
                    manifest.apps[app].image = image(*version);
                    self.write(*slot, manifest);
                }
            }
            Act::Remove(slot) => {
                if self.manifests[*slot].take().is_some() {
                    self.node.remove(&file(*slot));
                }
            }
            Act::Away(slot, away) => {
                if let Some(manifest) = self.manifests[*slot].clone() {
                    self.node.remove(&file(*slot));
                    self.node.run(*away).await;
                    self.node.write(&file(*slot), &manifest);
                }
            }
            // In a file of its own: one that was good keeps its pod until the next periodic look, which no rule here can tell.
            Act::BadManifest(which) => {
                let bytes = [&b"kind: Pod, of a kind"[..], b"", b"{", b"\xff\xfe"][*which % 4];
                self.node.write_bytes("bad.yaml", bytes.to_vec());
            }
            Act::RestartRuntime(down) => self.node.runtime().restart(*down),
            Act::Runtime(rule) => {
                if rule.hangs() && rule.befalls("PullImage") {
                    // Pulls have no deadline; the runtime itself gives up one that makes no progress.
                    self.node.runtime().inject(Rule::new("PullImage", Fault::Delay(Duration::from_secs(300))));
                }
                self.node.runtime().inject(rule.clone());
            }
            Act::LateEvents(late) => self.node.world().delay_events(*late),
            Act::Network(ready) => self.network(*ready),
            Act::Host(rule) => self.node.host().inject(rule.clone()),
            Act::Full(full) => self.node.host().fill(*full),
            Act::Jump(seconds) => self.node.jump(SignedDuration::from_secs(*seconds)),
            Act::Heal => {
                self.node.runtime().heal();
                self.node.host().heal();
                self.node.world().delay_events(Duration::ZERO);
                self.node.world().api.iter().for_each(crate::api::FakeApi::heal);
            }
            Act::Sick(sick) => self.sick.store(*sick, Ordering::Relaxed),
            Act::Exit(pick, code) => {
                if let Some(id) = self.container(*pick) {
                    self.node.runtime().exit(&id, *code);
                }
            }
            Act::LoseSight(pick) => {
                if let Some(id) = self.container(*pick) {
                    self.node.runtime().lose_sight(&id);
                }
            }
            Act::EndSandbox(pick) => {
                let all = self.node.runtime().sandboxes();
                if let Some(sandbox) = chosen(&all, *pick) {
                    self.node.runtime().end_sandbox(&sandbox.id);
                }
            }
            Act::RemoveDead => {
                // Of a container that is not to run again only the runtime remembers that it has run.
                let pods = self.node.wanted();
                let again = |c: &&ContainerStatus| {
                    let uid = c.labels.get(names::POD_UID_LABEL).map(String::as_str).unwrap_or_default();
                    let pod = pods.iter().find(|pod| pod.uid().as_str() == uid);
                    c.state() == ContainerState::ContainerExited
                        && pod
                            .is_none_or(|pod| pod.is_static() || pod.spec().restart_policy.as_deref() == Some("Always"))
                };
                let all = self.node.runtime().containers();
                for c in all.iter().filter(again) {
                    let _ = cri::RuntimeMutator::remove_container(self.node.runtime(), &c.id).await;
                }
            }
            Act::Kill(_) | Act::Cut(..) | Act::Replace(_) | Act::Reboot(..) | Act::Torn(_) => self.end_agent(act).await,
            _ => self.at_the_api(act).await,
        }
    }

    /// What ends agents.
    async fn end_agent(&mut self, act: &Act) {
        match act {
            Act::Kill(down) => self.node.restart(*down).await,
            Act::Cut(calls, before, down) => {
                let at = self.node.world().effects() + calls;
                self.node.comes_back_after(*down);
                if *before { self.node.world().cut_before(at) } else { self.node.world().cut_at(Some(at)) }
            }
            Act::Replace(down) => {
                self.node.drain(DRAIN).await;
                self.node.run(*down).await;
                self.node.start().await;
            }
            Act::Reboot(runtime, agent) => {
                self.node.kill();
                self.node.runtime().reboot(*runtime);
                self.node.run(*agent).await;
                self.node.start().await;
            }
            Act::Torn(which) => {
                let name = [pod::admit::ALLOCATED, pod::admit::ACTUATED][*which % 2];
                let path = std::path::Path::new(ROOT).join(name);
                self.node.kill();
                self.node.host().tear(&path);
                self.node.start().await;
                self.node.run(Duration::from_secs(15)).await;
                self.node.kill();
                self.node.host().drop_file(&path);
                self.node.start().await;
            }
            _ => {}
        }
    }

    /// What people, controllers and networks do to the API server.
    async fn at_the_api(&mut self, act: &Act) {
        let object = |slot: &usize| format!("q{}", slot % OBJECTS);
        match act {
            Act::Create(slot, script) => {
                let name = object(slot);
                self.script(script, &name);
                self.node.delete(&name, Some(0));
                self.node.create(&script.manifest);
            }
            Act::ApiImage(slot, app, version) => {
                self.node.api().edit(&object(slot), |pod| {
                    let containers = pod.spec.as_mut().map(|s| &mut s.containers);
                    if let Some(containers) = containers {
                        let app = app % containers.len();
                        containers[app].image = Some(image(*version));
                    }
                });
            }
            Act::Delete(slot, grace) => self.node.delete(&object(slot), *grace),
            Act::DeleteMirror(pick) => {
                let mut all = self.node.api().pods();
                all.retain(|pod| Mirror::of(pod).is_some());
                if let Some(mirror) = chosen(&all, *pick) {
                    self.node.delete(&mirror.metadata.name.clone().unwrap_or_default(), None);
                }
            }
            Act::Evict(pick) => {
                let all: Vec<Pod> = self.node.objects();
                if let Some(pod) = chosen(&all, *pick) {
                    self.node.evict(&crate::api::uid_of(pod)).await;
                }
            }
            Act::Api(rule) => self.node.api().inject(rule.clone()),
            Act::Reach(up) => self.node.api().reach(*up),
            Act::BreakWatches(expired) => self.node.api().break_watches(*expired),
            Act::Lag(watches, lists) => self.node.api().lag(*watches, *lists),
            _ => {}
        }
    }

    fn write(&mut self, slot: usize, manifest: Manifest) {
        self.node.write(&file(slot), &manifest);
        self.manifests[slot] = Some(manifest);
    }

    /// Scripts the processes of a pod of this name.
    fn script(&self, script: &Script, pod: &str) {
        for (container, lives) in &script.lives {
            self.node.runtime().script(For::PodContainer(pod.to_owned(), container.clone()), lives.clone());
        }
        if let Some(takes) = script.pull {
            self.node.runtime().add_remote_image(&script.manifest.apps[0].image, takes, None);
        }
    }

    /// One of the containers that run.
    fn container(&self, pick: usize) -> Option<String> {
        let mut all = self.node.runtime().containers();
        all.retain(|c| c.state() == ContainerState::ContainerRunning);
        chosen(&all, pick).map(|c| c.id.clone())
    }

    fn network(&self, ready: bool) {
        self.node.runtime().configure(|s| {
            for c in s.status.status.iter_mut().flat_map(|s| &mut s.conditions) {
                if c.r#type == "NetworkReady" {
                    c.status = ready;
                }
            }
        });
    }
}

fn file(slot: usize) -> String {
    format!("{slot}.yaml")
}

fn image(version: u32) -> String {
    format!("registry.local/app:v{version}")
}

fn chosen<T>(all: &[T], pick: usize) -> Option<&T> {
    (!all.is_empty()).then(|| &all[pick % all.len()])
}
