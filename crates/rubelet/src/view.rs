//! What the endpoints show of the node, put together from the table of pods and the health of the runtime.

use std::sync::Arc;
use std::time::Duration;

use ::managers::Managers;
use cluster::Client;
use cluster::reflect::ReflectorStatus;
use config::Flags;
use decide::pleg;
use jiff::Timestamp;
use model::api::{ContainerState, ContainerStatus, Pod};
use model::pod::{ContainerKind, DesiredPod};
use model::report::{ContainerReport, Finding, NodeReport, PodReport, Severity};
use model::timeline::StepResult;
use pod::pleg::Health;
use pod::ports::Clock;
use pod::registry::{PodEntry, PodView, Registry};
use serve::NodeView;
use tokio::sync::watch;

/// Without a sign of life of the dispatcher for this long, the loop counts as stuck.
const SYNC_LOOP_LIMIT: Duration = Duration::from_secs(180);

/// The node as others see it.
pub(crate) struct View {
    pub(crate) node_name: String,
    pub(crate) registry: Arc<Registry>,
    pub(crate) health: watch::Receiver<Health>,
    pub(crate) all_seen: watch::Receiver<bool>,
    /// None in standalone mode.
    pub(crate) api: Option<ApiView>,
    pub(crate) clock: Clock,
    pub(crate) configz: serde_json::Value,
    pub(crate) flags: Flags,
    pub(crate) managers: Managers,
}

/// The way to the API server, as its watches show it.
pub(crate) struct ApiView {
    pub(crate) client: Client,
    pub(crate) node: watch::Receiver<ReflectorStatus>,
    pub(crate) pods: watch::Receiver<ReflectorStatus>,
}

impl ApiView {
    fn finding(&self) -> Finding {
        let server = &self.client.config().server;
        let (node, pods) = (self.node.borrow(), self.pods.borrow());
        // An open watch may outlive the credentials that it was opened with.
        let trouble = self.client.trouble();
        let error = trouble.as_ref().or(node.error.as_ref()).or(pods.error.as_ref());
        let (severity, message, fix) = match error {
            Some(e) => {
                let what = "look at the API server and at the way to it; rubelet check asks it";
                let fix = if e.advice.is_empty() { what } else { &e.advice };
                let severity = if pods.synced { Severity::Warning } else { Severity::Error };
                (severity, format!("{server}: {}: {}", e.action, e.message), fix.to_owned())
            }
            None if pods.synced => {
                (Severity::Ok, format!("{server} answers; node and pods are watched"), String::new())
            }
            None => (Severity::Warning, format!("{server}: the pods of this node are not known yet"), String::new()),
        };
        Finding { topic: "API server".to_owned(), severity, message, fix }
    }
}

impl NodeView for View {
    fn pods(&self) -> Vec<Pod> {
        let shown = |entry: Arc<PodEntry>| {
            let view = entry.view();
            let mut pod = view.desired.as_ref()?.to_pod();
            pod.status = Some(view.status.clone());
            // The kernel's form of a sysctl's name, in which it is asked for.
            let security = pod.spec.as_mut().and_then(|spec| spec.security_context.as_mut());
            for sysctl in security.into_iter().flat_map(|c| c.sysctls.iter_mut().flatten()) {
                sysctl.name = decide::admission::sysctl_name(&sysctl.name);
            }
            Some(pod)
        };
        self.registry.shown().into_iter().filter_map(shown).collect()
    }

    fn pod_reports(&self) -> Vec<PodReport> {
        self.registry.shown().iter().map(|entry| report(entry.uid.as_str(), &entry.view())).collect()
    }

    fn node_report(&self) -> NodeReport {
        let health = self.health.borrow().clone();
        let now = self.clock.now();
        let message = pleg::ready_message(&health.facts(), &[], now);
        let entries = self.registry.all();
        NodeReport {
            name: self.node_name.clone(),
            ready: message.is_none(),
            message: message.unwrap_or_else(|| "kubelet is posting ready status".to_owned()),
            findings: {
                let api = self.api.as_ref().map(ApiView::finding);
                api.into_iter().chain(findings(&health, *self.all_seen.borrow(), now)).collect()
            },
            pods: entries.len(),
            pods_running: entries.iter().filter(|e| all_run(&e.view())).count(),
        }
    }

    fn sync_loop_healthy(&self) -> Result<(), String> {
        let idle = self.registry.since_beat();
        if idle > SYNC_LOOP_LIMIT { Err("sync Loop took longer than expected".to_owned()) } else { Ok(()) }
    }

    fn device_plugins_healthy(&self) -> Result<(), String> {
        self.managers.plugins().and_then(|plugins| plugins.problem()).map_or(Ok(()), Err)
    }

    fn configz(&self) -> serde_json::Value {
        self.configz.clone()
    }

    fn flags(&self) -> Vec<(String, String)> {
        self.flags.all()
    }
}

fn all_run(view: &PodView) -> bool {
    view.status.phase.as_deref() == Some("Running")
        && view
            .status
            .container_statuses
            .iter()
            .flatten()
            .all(|c| c.state.as_ref().is_some_and(|s| s.running.is_some()))
}

/// Each part that the node's readiness hangs on.
fn findings(health: &Health, all_seen: bool, now: Timestamp) -> Vec<Finding> {
    let facts = health.facts();
    let part = |topic: &str, error: Option<String>, good: String, fix: &str| Finding {
        topic: topic.to_owned(),
        severity: if error.is_some() { Severity::Error } else { Severity::Ok },
        fix: if error.is_some() { fix.to_owned() } else { String::new() },
        message: error.unwrap_or(good),
    };
    let runtime = pleg::runtime_errors(&facts, now);
    let (relist, runtime): (Vec<_>, Vec<_>) = runtime.into_iter().partition(|e| e.starts_with("PLEG"));
    let join = |errors: Vec<String>| (!errors.is_empty()).then(|| errors.join("; "));
    let events = if health.evented {
        "the runtime's event stream is open; a full list is taken once a minute"
    } else {
        "no event stream: the runtime is listed every second"
    };
    let last = health.error.as_ref().map_or_else(String::new, |e| format!(" (last try: {e})"));
    vec![
        part(
            "runtime",
            join(runtime),
            "the container runtime answers and is ready".to_owned(),
            "look at the runtime's service and log (systemctl status containerd); rubelet check tests the socket",
        ),
        part(
            "network",
            health.network_error(),
            "the runtime's network is ready".to_owned(),
            "install a CNI configuration in the directory that the runtime reads (/etc/cni/net.d) and its plugins",
        ),
        part(
            "pleg",
            join(relist).map(|e| e + &last),
            events.to_owned(),
            "the runtime's lists fail or hang: look at its load and log, and at the number of dead containers",
        ),
        Finding {
            topic: "sources".to_owned(),
            severity: if all_seen { Severity::Ok } else { Severity::Warning },
            message: if all_seen { "every source of pods was read" } else { "a source of pods was not read yet" }
                .to_owned(),
            fix: if all_seen {
                ""
            } else {
                "until every source was read once, nothing is removed; look at the log for staticPodURL"
            }
            .to_owned(),
        },
    ]
}

/// One pod, for people.
fn report(uid: &str, view: &PodView) -> PodReport {
    let timeline = view.timeline();
    // A failure is answered by a later step of the same kind and subject.
    let last_error = timeline.iter().enumerate().rev().find(|(at, s)| {
        matches!(s.result, StepResult::Failed(_) | StepResult::Unknown(_))
            && !timeline[at + 1..].iter().any(|later| later.kind == s.kind && later.subject == s.subject)
    });
    let source = view.desired.as_ref().map_or("runtime", |p| p.source().as_str());
    let ready = view.status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    PodReport {
        uid: uid.to_owned(),
        namespace: view.namespace.clone(),
        name: view.name.clone(),
        source: source.to_owned(),
        phase: view.status.phase.clone().unwrap_or_else(|| "Unknown".to_owned()),
        ready,
        ips: view.status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect(),
        state: view.state.as_str().to_owned(),
        step: timeline.iter().rev().find(|s| s.ended.is_none()).or(timeline.last()).cloned(),
        last_error: last_error.map(|(_, s)| s.clone()),
        waits_for: view.waits_for.clone(),
        containers: view.desired.as_ref().map(|pod| containers(pod, view)).unwrap_or_default(),
        timeline: timeline.to_vec(),
    }
}

fn containers(pod: &DesiredPod, view: &PodView) -> Vec<ContainerReport> {
    let status = &view.status;
    let all = || {
        let lists = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
        lists.into_iter().flat_map(|l| l.iter().flatten())
    };
    pod.containers()
        .map(|entry| {
            let name = &entry.spec.name;
            let found: Option<&ContainerStatus> = all().find(|s| s.name == *name);
            let (state, message, since) = describe(found.and_then(|s| s.state.as_ref()));
            ContainerReport {
                name: name.clone(),
                kind: match entry.kind {
                    ContainerKind::Init => "init",
                    ContainerKind::Sidecar => "sidecar",
                    ContainerKind::App => "app",
                    ContainerKind::Ephemeral => "ephemeral",
                }
                .to_owned(),
                image: entry.spec.image.clone().unwrap_or_default(),
                state,
                message,
                since,
                ready: found.is_some_and(|s| s.ready),
                restarts: found.map_or(0, |s| s.restart_count.unsigned_abs()),
                last_stop: view.last_stops.get(name).cloned(),
            }
        })
        .collect()
}

fn describe(state: Option<&ContainerState>) -> (String, String, Option<Timestamp>) {
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    match state {
        Some(ContainerState { running: Some(r), .. }) => {
            ("running".to_owned(), String::new(), r.started_at.as_ref().map(|t| t.0))
        }
        Some(ContainerState { terminated: Some(t), .. }) => {
            (format!("terminated: {}", text(&t.reason)), text(&t.message), t.finished_at.as_ref().map(|t| t.0))
        }
        Some(ContainerState { waiting: Some(w), .. }) => {
            (format!("waiting: {}", text(&w.reason)), text(&w.message), None)
        }
        _ => ("waiting".to_owned(), String::new(), None),
    }
}
