//! Statuses on one line, against Go's.

use std::collections::BTreeMap;
use std::net::IpAddr;

use model::api::{ContainerState, ContainerStatus, PodCondition, PodStatus};
use model::observed::ObservedPod;
use model::pod::DesiredPod;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing::{at, pod, pod_with, seen, static_pod};

/// What a test changes about the input.
#[derive(Default, Clone)]
struct With<'a> {
    previous: Option<&'a PodStatus>,
    waiting: &'a [(&'a str, &'a str, &'a str)],
    startup: &'a [(&'a str, bool)],
    ready: &'a [(&'a str, bool)],
    host_ips: &'a [IpAddr],
    ended: bool,
    failure: Option<&'a Failure>,
    extra: &'a [PodCondition],
    now: i64,
    agent_started: i64,
    terminating: bool,
    actuated: Option<&'a PodAllocation>,
}

fn make(pod: &DesiredPod, observed: &ObservedPod, with: &With<'_>) -> PodStatus {
    let waiting: BTreeMap<String, WaitingReason> = with
        .waiting
        .iter()
        .map(|(n, r, m)| ((*n).to_owned(), WaitingReason { reason: (*r).into(), message: (*m).into() }))
        .collect();
    let find = |list: &[(&str, bool)], id: &str| list.iter().find(|(i, _)| *i == id).map(|(_, v)| *v);
    pod_status(&StatusInput {
        pod,
        observed,
        previous: with.previous,
        waiting: &waiting,
        probes: &|id| ProbeResults { startup: find(with.startup, id), ready: find(with.ready, id) },
        runtime_name: "containerd",
        host_ips: with.host_ips,
        qos_class: "BestEffort",
        actuated: with.actuated,
        pod_resources: None,
        ended: with.ended,
        failure: with.failure,
        extra_conditions: with.extra,
        recursive_read_only: true,
        agent_started: at(with.agent_started),
        forget_on_restart: false,
        terminating: with.terminating,
        gates: Default::default(),
        now: at(1000 + with.now),
    })
}

fn state(s: Option<&ContainerState>) -> String {
    let Some(s) = s else { return "none".into() };
    if let Some(w) = &s.waiting {
        return format!("waiting:{}", w.reason.as_deref().unwrap_or("-"));
    }
    if let Some(t) = &s.terminated {
        return format!("{}:{}", t.reason.as_deref().unwrap_or("-"), t.exit_code);
    }
    if s.running.is_some() { "running".into() } else { "-".into() }
}

/// `web=running ready n1 last Error:1`
fn line(s: &ContainerStatus) -> String {
    let mut text = format!("{}={}", s.name, state(s.state.as_ref()));
    if s.started == Some(true) {
        text += " started";
    }
    if s.ready {
        text += " ready";
    }
    if s.restart_count > 0 {
        text += &format!(" n{}", s.restart_count);
    }
    let last = state(s.last_state.as_ref());
    if last != "-" {
        text += &format!(" last {last}");
    }
    text
}

fn show(s: &PodStatus) -> String {
    let all = [&s.init_container_statuses, &s.container_statuses, &s.ephemeral_container_statuses];
    let lines: Vec<String> = all.into_iter().flatten().flatten().map(line).collect();
    format!("{}: {}", s.phase.as_deref().unwrap_or_default(), lines.join(", "))
}

fn conditions(s: &PodStatus) -> Vec<String> {
    s.conditions
        .iter()
        .flatten()
        .map(|c| {
            let parts = [Some(c.status.clone()), c.reason.clone(), c.message.clone()];
            format!("{}={}", c.type_, parts.into_iter().flatten().collect::<Vec<_>>().join(" "))
        })
        .collect()
}

const ONE: &str = r#"{"containers":[{"name":"web","image":"img"}]}"#;
const NEVER: &str = r#"{"restartPolicy":"Never","containers":[{"name":"web"}]}"#;
const INIT: &str = r#"{"initContainers":[{"name":"i1"},{"name":"i2"}],"containers":[{"name":"web"}]}"#;
const SIDE: &str = r#"{"restartPolicy":"Never","initContainers":[{"name":"s","restartPolicy":"Always"}],"containers":[{"name":"web"}]}"#;

fn check(spec: &str, rows: &[(&[&str], &str)]) {
    let pod = pod(spec);
    for (items, expected) in rows {
        assert_eq!(show(&make(&pod, &seen(items), &With::default())), *expected, "{spec} {items:?}");
    }
}

#[test]
fn phases_and_states() {
    check(
        ONE,
        &[
            (&[], "Pending: web=waiting:ContainerCreating"),
            (&["s0 ready", "s0/web created"], "Pending: web=waiting:-"),
            (&["s0 ready", "s0/web running"], "Running: web=running started ready"),
            (&["s0 ready", "s0/web exit=1"], "Running: web=Error:1"),
            (&["s0 ready", "s0/web exit=0"], "Running: web=Completed:0"),
            (&["s0 ready", "s0/web exit=1", "s0/web running"], "Running: web=running started ready n1 last Error:1"),
        ],
    );
    check(
        NEVER,
        &[
            (&["s0 ready", "s0/web exit=0"], "Succeeded: web=Completed:0"),
            (&["s0 ready", "s0/web exit=3"], "Failed: web=Error:3"),
        ],
    );
    check(
        r#"{"restartPolicy":"OnFailure","containers":[{"name":"web"}]}"#,
        &[
            (&["s0 ready", "s0/web exit=0"], "Succeeded: web=Completed:0"),
            (&["s0 ready", "s0/web exit=3"], "Running: web=Error:3"),
        ],
    );
    check(
        r#"{"restartPolicy":"Never","containers":[{"name":"b"},{"name":"a","restartPolicy":"OnFailure"}]}"#,
        &[
            (&["s0 ready", "s0/a exit=1", "s0/b exit=0"], "Running: a=Error:1, b=Completed:0"),
            (&["s0 ready", "s0/a exit=0", "s0/b exit=0"], "Succeeded: a=Completed:0, b=Completed:0"),
            (&["s0 ready", "s0/a running", "s0/b exit=2"], "Running: a=running started ready, b=Error:2"),
        ],
    );
    check(
        INIT,
        &[
            (
                &["s0 ready", "s0/i1 running"],
                "Pending: i1=running started, i2=waiting:PodInitializing, web=waiting:PodInitializing",
            ),
            (
                &["s0 ready", "s0/i1 exit=1"],
                "Pending: i1=Error:1, i2=waiting:PodInitializing, web=waiting:PodInitializing",
            ),
            (
                &["s0 ready", "s0/i1 exit=0", "s0/i2 exit=0", "s0/web running"],
                "Running: i1=Completed:0 ready, i2=Completed:0 ready, web=running started ready",
            ),
            // The records are gone, and so is the last status: an app proves that they completed.
            (
                &["s0 ready", "s0/web running"],
                "Running: i1=Completed:0 ready, i2=Completed:0 ready, web=running started ready",
            ),
        ],
    );
    check(
        r#"{"restartPolicy":"Never","initContainers":[{"name":"i"}],"containers":[{"name":"web"}]}"#,
        &[(&["s0 ready", "s0/i exit=2"], "Failed: i=Error:2, web=waiting:PodInitializing")],
    );
    check(
        SIDE,
        &[
            (&["s0 ready", "s0/s running"], "Pending: s=running started ready, web=waiting:PodInitializing"),
            // The sidecar's code does not colour the phase.
            (&["s0 ready", "s0/s exit=7", "s0/web exit=0"], "Succeeded: s=Error:7, web=Completed:0"),
            (&["s0 ready", "s0/s running", "s0/web exit=0"], "Running: s=running started ready, web=Completed:0"),
        ],
    );
    // A sidecar that restarts does not make an initialised pod Pending.
    let slow =
        r#"{"initContainers":[{"name":"s","restartPolicy":"Always","startupProbe":{}}],"containers":[{"name":"web"}]}"#;
    check(
        slow,
        &[
            (&["s0 ready", "s0/s running"], "Pending: s=running, web=waiting:PodInitializing"),
            (&["s0 ready", "s0/s running", "s0/web running"], "Running: s=running, web=running started ready"),
        ],
    );
}

#[test]
fn a_new_sandbox_begins_from_the_start() {
    let pod = pod(INIT);
    let before = make(&pod, &seen(&["s0 ready", "s0/i1 exit=0", "s0/i2 exit=0", "s0/web running"]), &With::default());
    let rows: [(&[&str], &str); 4] = [
        (
            &["s0 dead", "s0/i2 exit=0", "s0/web exit=137", "s1 ready"],
            "Pending: i1=waiting:PodInitializing last Completed:0, i2=waiting:PodInitializing last Completed:0, \
             web=waiting:PodInitializing last Error:137",
        ),
        (
            &["s0 dead", "s0/i2 exit=0", "s0/web exit=137", "s1 ready", "s1/i1 running n=1 id=i1.1"],
            "Pending: i1=running started n1 last Completed:0, i2=waiting:PodInitializing last Completed:0, \
             web=waiting:PodInitializing last Error:137",
        ),
        (
            &["s0 dead", "s0/web exit=137", "s1 ready", "s1/i1 exit=0 n=1 id=i1.1", "s1/i2 exit=0 n=1 id=i2.1"],
            // Initialised again: the app, which ran before, is about to restart.
            "Running: i1=Completed:0 ready n1 last Completed:0, i2=Completed:0 ready n1 last Completed:0, \
             web=waiting:PodInitializing last Error:137",
        ),
        (
            &["s0 dead", "s0/web exit=137", "s1 ready", "s1/i2 exit=0 n=1 id=i2.1", "s1/web running"],
            "Running: i1=Completed:0 ready, i2=Completed:0 ready n1 last Completed:0, \
             web=running started ready n1 last Error:137",
        ),
    ];
    for (items, expected) in rows {
        let with = With { previous: Some(&before), ..Default::default() };
        let status = make(&pod, &seen(items), &with);
        if expected.starts_with("Pending") && !items.iter().any(|i| i.contains("s1/i2")) {
            assert!(conditions(&status).iter().any(|c| c.starts_with("Initialized=False ContainersNotInitialized")));
        }
        assert_eq!(show(&status), expected, "{items:?}");
    }
}

#[test]
fn condition_order_reasons_and_messages() {
    let pod = pod_with(r#"{"generation":3}"#, INIT);
    let status = make(&pod, &seen(&[]), &With::default());
    assert_eq!(
        conditions(&status),
        [
            "PodReadyToStartContainers=False",
            "Initialized=False ContainersNotInitialized containers with incomplete status: [i1 i2]",
            "Ready=False ContainersNotReady containers with unready status: [web]",
            "ContainersReady=False ContainersNotReady containers with unready status: [web]",
            "PodScheduled=True",
        ]
    );
    assert!(status.conditions.iter().flatten().all(|c| c.observed_generation == Some(3)));
    assert_eq!(status.observed_generation, Some(3));
    let done = make(&pod_with(r#"{"generation":3}"#, NEVER), &seen(&["s0 ready", "s0/web exit=0"]), &With::default());
    assert_eq!(
        conditions(&done),
        [
            "PodReadyToStartContainers=True",
            "Initialized=True PodCompleted",
            "Ready=False PodCompleted",
            "ContainersReady=False PodCompleted",
            "PodScheduled=True",
        ]
    );
    let failed = make(&super::tests::pod(NEVER), &seen(&["s0 dead", "s0/web exit=1"]), &With::default());
    assert_eq!(
        conditions(&failed),
        [
            "PodReadyToStartContainers=False",
            "Initialized=True",
            "Ready=False PodFailed",
            "ContainersReady=False PodFailed",
            "PodScheduled=True",
        ]
    );
    let up = make(&super::tests::pod(ONE), &seen(&["s0 ready", "s0/web running"]), &With::default());
    assert!(conditions(&up).iter().all(|c| c.ends_with("=True")));
}

#[test]
fn readiness_gates_and_foreign_conditions() {
    let spec: serde_json::Value = json!({
        "readinessGates": [{"conditionType": "a/x"}, {"conditionType": "b/y"}],
        "containers": [{"name": "web"}],
    });
    let mut object = pod(&spec.to_string()).to_pod();
    object.status = serde_json::from_value(json!({"conditions": [
        {"type": "a/x", "status": "False"}, {"type": "Ready", "status": "True"}]}))
    .expect("status");
    let pod = DesiredPod::new(object, model::pod::PodSource::Api).expect("pod");
    let status = make(&pod, &seen(&["s0 ready", "s0/web running"]), &With::default());
    let list = conditions(&status);
    assert_eq!(list[0], "a/x=False");
    assert!(
        list.contains(
            &"Ready=False ReadinessGatesNotReady the status of pod readiness gate \"a/x\" is not \"True\", but False, \
          corresponding condition of pod readiness gate \"b/y\" does not exist."
                .to_owned()
        )
    );
    assert!(list.contains(&"ContainersReady=True".to_owned()));
    assert_eq!(list.iter().filter(|c| c.starts_with("Ready=")).count(), 1);
}

#[test]
fn times_of_transition_stay() {
    let pod = pod(ONE);
    let first = make(&pod, &seen(&["s0 ready"]), &With::default());
    let with = With { previous: Some(&first), now: 50, ..Default::default() };
    let second = make(&pod, &seen(&["s0 ready", "s0/web running"]), &with);
    let time = |s: &PodStatus, kind: &str| {
        let c = s.conditions.iter().flatten().find(|c| c.type_ == kind).expect("condition");
        c.last_transition_time.clone().expect("time").0
    };
    assert_eq!(time(&second, "PodScheduled"), at(1000));
    assert_eq!(time(&second, "Initialized"), at(1000));
    assert_eq!(time(&second, "Ready"), at(1050));
    assert_eq!(second.start_time.expect("start").0, at(1000));
}

#[test]
fn waiting_reasons() {
    let pod = pod(ONE);
    let why: &[(&str, &str, &str)] =
        &[("web", "CrashLoopBackOff", "back-off 10s restarting failed container=web pod=web_ns(uid-1)")];
    let with = With { waiting: why, ..Default::default() };
    let status = make(&pod, &seen(&["s0 ready", "s0/web exit=1"]), &with);
    assert_eq!(show(&status), "Running: web=waiting:CrashLoopBackOff last Error:1");
    let pull = With { waiting: &[("web", "ErrImagePull", "no such host")], ..Default::default() };
    let status = make(&pod, &seen(&["s0 ready"]), &pull);
    assert_eq!(show(&status), "Pending: web=waiting:ErrImagePull");
    let waiting =
        status.container_statuses.expect("statuses")[0].state.clone().expect("state").waiting.expect("waiting");
    assert_eq!(waiting.message.as_deref(), Some("no such host"));
    // A reason of long ago does not cover a container that runs, or that has ended for good.
    assert_eq!(show(&make(&pod, &seen(&["s0 ready", "s0/web running"]), &with)), "Running: web=running started ready");
    let never = super::tests::pod(NEVER);
    assert_eq!(show(&make(&never, &seen(&["s0 ready", "s0/web exit=1"]), &with)), "Failed: web=Error:1");
}

#[test]
fn what_the_runtime_lost_is_remembered() {
    let pod = pod(ONE);
    let ran = make(&pod, &seen(&["s0 ready", "s0/web exit=1", "s0/web running"]), &With::default());
    let with = With { previous: Some(&ran), ..Default::default() };
    // The container is gone, and the record of the run before with it.
    assert_eq!(
        show(&make(&pod, &seen(&["s0 ready"]), &with)),
        "Pending: web=waiting:ContainerCreating n1 last Error:1".replace("Pending", "Running")
    );
    // The count and the last end do not fall back when dead containers are collected.
    assert_eq!(
        show(&make(&pod, &seen(&["s0 ready", "s0/web running n=1"]), &with)),
        "Running: web=running started ready n1 last Error:1"
    );
    let fresh = make(&pod, &seen(&["s0 ready", "s0/web running"]), &With::default());
    let with = With { previous: Some(&fresh), ..Default::default() };
    assert_eq!(
        show(&make(&pod, &seen(&["s0 ready"]), &with)),
        "Running: web=waiting:ContainerCreating n1 last ContainerStatusUnknown:137"
    );
    assert_eq!(
        show(&make(&pod, &seen(&["s0 ready", "s0/web unknown"]), &with)),
        "Running: web=ContainerStatusUnknown:137 n1"
    );
    let lost = make(&pod, &seen(&["s0 ready", "s0/web unknown"]), &with);
    let again =
        make(&pod, &seen(&["s0 ready", "s0/web unknown"]), &With { previous: Some(&lost), ..Default::default() });
    assert_eq!(show(&again), "Running: web=ContainerStatusUnknown:137 n1");
    // A record of a run that had ended stays as it was.
    let ended = make(&super::tests::pod(NEVER), &seen(&["s0 ready", "s0/web exit=4"]), &With::default());
    let with = With { previous: Some(&ended), ..Default::default() };
    assert_eq!(show(&make(&super::tests::pod(NEVER), &seen(&[]), &with)), "Failed: web=Error:4");
}

#[test]
fn started_and_ready() {
    let spec = r#"{"containers":[{"name":"web","startupProbe":{},"readinessProbe":{}}]}"#;
    let pod = pod(spec);
    let observed = seen(&["s0 ready", "s0/web running"]);
    let of = |with: With<'_>| show(&make(&pod, &observed, &with));
    assert_eq!(of(With::default()), "Running: web=running");
    assert_eq!(of(With { startup: &[("web.0", true)], ..Default::default() }), "Running: web=running started");
    assert_eq!(
        of(With { startup: &[("web.0", true)], ready: &[("web.0", true)], ..Default::default() }),
        "Running: web=running started ready"
    );
    // Not started: not ready, whatever the readiness probe says.
    assert_eq!(
        of(With { startup: &[("web.0", false)], ready: &[("web.0", true)], ..Default::default() }),
        "Running: web=running"
    );
    // The agent was restarted long after the container: both are kept until a probe says otherwise.
    let up =
        make(&pod, &observed, &With { startup: &[("web.0", true)], ready: &[("web.0", true)], ..Default::default() });
    let kept = With { previous: Some(&up), agent_started: 500, ..Default::default() };
    assert_eq!(of(kept.clone()), "Running: web=running started ready");
    assert_eq!(of(With { ready: &[("web.0", false)], ..kept.clone() }), "Running: web=running started");
    // A container that was not ready does not become so by the restart.
    let down = make(&pod, &observed, &With { startup: &[("web.0", true)], ..Default::default() });
    assert_eq!(
        of(With { previous: Some(&down), agent_started: 500, ..Default::default() }),
        "Running: web=running started"
    );
    // A new container inherits nothing from the one before.
    let next = seen(&["s0 ready", "s0/web exit=1", "s0/web running"]);
    assert_eq!(show(&make(&pod, &next, &kept)), "Running: web=running n1 last Error:1");
    // Startup probes no longer run while the pod ends.
    assert_eq!(
        of(With { terminating: true, ready: &[("web.0", true)], ..Default::default() }),
        "Running: web=running started ready"
    );
}

fn failure(reason: &str, unless_well: bool) -> Failure {
    Failure { reason: reason.into(), message: "The node was low on resource: memory. ".into(), unless_well }
}

/// As the Go kubelet 1.36.1 does it (node suite, CriticalPod): Succeeded without a reason when every container ends with 0.
#[test]
fn a_preempted_pod_that_ends_well_has_succeeded() {
    let pod = pod(ONE);
    let preempted = failure("Preempting", true);
    let up = make(&pod, &seen(&["s0 ready", "s0/web running"]), &With::default());
    let with = With { previous: Some(&up), failure: Some(&preempted), ..Default::default() };
    let ending = make(&pod, &seen(&["s0 ready", "s0/web running"]), &with);
    assert_eq!((ending.phase.as_deref(), ending.reason.as_deref()), (Some("Running"), None));
    for (code, phase, reason) in [("exit=0", "Succeeded", None), ("exit=1", "Failed", Some("Preempting"))] {
        let with = With { previous: Some(&ending), failure: Some(&preempted), ended: true, ..Default::default() };
        let ended = make(&pod, &seen(&["s0 dead", &format!("s0/web {code}")]), &with);
        assert_eq!((ended.phase.as_deref(), ended.reason.as_deref()), (Some(phase), reason));
        assert_eq!(ended.message.is_some(), reason.is_some());
    }
}

#[test]
fn failure_and_terminal_phases() {
    let pod = pod(ONE);
    let running = seen(&["s0 ready", "s0/web running"]);
    let evicted = failure("Evicted", false);
    let up = make(&pod, &running, &With::default());
    let status = make(&pod, &running, &With { previous: Some(&up), failure: Some(&evicted), ..Default::default() });
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    // Not shown while something runs; reason and message wait with it.
    let shown = publishable(Some(&up), status.clone(), true);
    assert_eq!((shown.phase.as_deref(), shown.reason.as_deref()), (Some("Running"), None));
    let shown = publishable(Some(&up), status.clone(), false);
    assert_eq!((shown.phase.as_deref(), shown.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    // It stays, reason and message with it, even when the containers end well.
    let later = make(
        &pod,
        &seen(&["s0 dead", "s0/web exit=0"]),
        &With { previous: Some(&status), ended: true, ..Default::default() },
    );
    assert_eq!((later.phase.as_deref(), later.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    assert_eq!(later.message, status.message);
    // Everything was stopped: by exit code, whatever the policy; static pods are only between two runs.
    let stopped = seen(&["s0 dead", "s0/web exit=0"]);
    let ended = With { ended: true, ..Default::default() };
    assert_eq!(make(&pod, &stopped, &ended).phase.as_deref(), Some("Succeeded"));
    assert_eq!(make(&pod, &seen(&["s0 dead", "s0/web exit=137"]), &ended).phase.as_deref(), Some("Failed"));
    assert_eq!(make(&static_pod(ONE), &stopped, &ended).phase.as_deref(), Some("Running"));
    // A terminal status is never ready.
    let mut odd = up.clone();
    odd.phase = Some("Failed".into());
    let odd = publishable(Some(&up), odd, false);
    assert!(conditions(&odd).contains(&"Ready=False PodFailed".to_owned()));
}

#[test]
fn disruption_target_comes_with_the_terminal_phase() {
    let pod = pod(NEVER);
    let condition: PodCondition = serde_json::from_value(json!({
        "type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}))
    .expect("condition");
    let up = make(&pod, &seen(&["s0 ready", "s0/web running"]), &With::default());
    let extra = [condition];
    let with = With { previous: Some(&up), extra: &extra, ..Default::default() };
    let has = |s: &PodStatus| s.conditions.iter().flatten().any(|c| c.type_ == "DisruptionTarget");
    let running = make(&pod, &seen(&["s0 ready", "s0/web running"]), &with);
    assert!(has(&running));
    assert!(!has(&publishable(Some(&up), running.clone(), true)));
    let carried = With { previous: Some(&running), ..Default::default() };
    let done = make(&pod, &seen(&["s0 dead", "s0/web exit=1"]), &carried);
    assert!(has(&publishable(Some(&up), done, false)));
}

#[test]
fn a_pod_that_vanished_has_failed() {
    let gone = finished(&pod(INIT), make(&pod(INIT), &seen(&["s0 ready", "s0/i1 running"]), &With::default()));
    assert_eq!(
        show(&gone),
        "Failed: i1=ContainerStatusUnknown:137 started, i2=waiting:PodInitializing, web=waiting:PodInitializing"
    );
    let gone = finished(&pod(ONE), make(&pod(ONE), &seen(&["s0 ready", "s0/web running"]), &With::default()));
    assert_eq!(show(&gone), "Failed: web=ContainerStatusUnknown:137 started ready");
    let gone = finished(&static_pod(ONE), make(&static_pod(ONE), &seen(&[]), &With::default()));
    assert_eq!(gone.phase.as_deref(), Some("Pending"));
    let done = make(&pod(NEVER), &seen(&["s0 dead", "s0/web exit=0"]), &With::default());
    assert_eq!(show(&finished(&pod(NEVER), done)), "Succeeded: web=Completed:0");
}

#[test]
fn rejection() {
    let refusal = Rejection { reason: "NodePorts", message: "Predicate NodePorts failed: x", qos_class: "Burstable" };
    let status = rejected(&pod_with(r#"{"generation":2}"#, ONE), &refusal, at(5));
    assert_eq!(
        serde_json::to_value(&status).expect("json"),
        json!({"phase": "Failed", "reason": "NodePorts", "message": "Pod was rejected: Predicate NodePorts failed: x",
            "qosClass": "Burstable", "observedGeneration": 2, "startTime": "2023-11-14T22:13:25Z"})
    );
}

#[test]
fn addresses_by_family() {
    let ip = |s: &str| s.parse::<IpAddr>().expect("ip");
    let list = |s: &PodStatus| -> Vec<String> { s.pod_ips.iter().flatten().map(|i| i.ip.clone()).collect() };
    let strings = |v: &[&str]| v.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let mut observed = seen(&["s0 ready", "s0/web running"]);
    observed.sandboxes[0].ips = strings(&["fd00::1", "10.0.0.1", "10.0.0.2"]);
    let v4 = [ip("192.168.0.1")];
    let v6 = [ip("fd01::1"), ip("192.168.0.1")];
    let of =
        |pod: &DesiredPod, o: &ObservedPod, host_ips: &[IpAddr]| make(pod, o, &With { host_ips, ..Default::default() });
    assert_eq!(list(&of(&pod(ONE), &observed, &[])), ["10.0.0.1", "fd00::1"]);
    let status = of(&pod(ONE), &observed, &v6);
    assert_eq!(list(&status), ["fd00::1", "10.0.0.1"]);
    assert_eq!(status.pod_ip.as_deref(), Some("fd00::1"));
    assert_eq!(status.host_ip.as_deref(), Some("fd01::1"));
    let host = pod(r#"{"hostNetwork":true,"containers":[{"name":"web"}]}"#);
    let on_host = seen(&["s0 ready host", "s0/web running"]);
    assert_eq!(list(&of(&host, &on_host, &v4)), ["192.168.0.1"]);
    assert_eq!(list(&of(&host, &on_host, &v6)), ["fd01::1", "192.168.0.1"]);
    // Standalone: Go shows none.
    assert_eq!(list(&of(&host, &on_host, &[])), [""; 0]);
    // A pod that ended keeps what it had.
    let never = pod(NEVER);
    let up = make(&never, &seen(&["s0 ready", "s0/web running"]), &With::default());
    let done = make(&never, &seen(&["s0 dead", "s0/web exit=0"]), &With { previous: Some(&up), ..Default::default() });
    assert_eq!(list(&done), ["10.0.0.7"]);
    // A sandbox that is not ready has no address.
    assert_eq!(list(&make(&pod(ONE), &seen(&["s0 dead"]), &With::default())), [""; 0]);
}

#[test]
fn what_a_container_status_holds() {
    let spec = r#"{"containers":[{"name":"web","image":"img",
        "resources":{"requests":{"cpu":"100m","memory":"64Mi"},"limits":{"cpu":"200m","memory":"64Mi"}},
        "volumeMounts":[{"name":"v","mountPath":"/v","readOnly":true,"recursiveReadOnly":"IfPossible"},{"name":"w","mountPath":"/w"}]}]}"#;
    let pod = pod(spec);
    let mut observed = seen(&["s0 ready", "s0/web running"]);
    observed.containers[0].resources = Some(model::observed::ObservedResources {
        cpu_shares: 153,
        cpu_quota: 25000,
        cpu_period: 100_000,
        memory_limit: 128 << 20,
    });
    observed.containers[0].user = Some((1000, 1000, vec![7]));
    let status = make(&pod, &observed, &With::default());
    assert_eq!(
        serde_json::to_value(&status.container_statuses.expect("statuses")[0]).expect("json"),
        json!({"name": "web", "image": "img", "imageID": "sha256:1", "containerID": "containerd://web.0",
            "ready": true, "started": true, "restartCount": 0, "lastState": {},
            "state": {"running": {"startedAt": "2023-11-14T22:13:21Z"}},
            "allocatedResources": {"cpu": "100m", "memory": "64Mi"},
            "resources": {"requests": {"cpu": "150m", "memory": "64Mi"}, "limits": {"cpu": "250m", "memory": "128Mi"}},
            "user": {"linux": {"uid": 1000, "gid": 1000, "supplementalGroups": [7]}},
            "volumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": true, "recursiveReadOnly": "Enabled"},
                {"name": "w", "mountPath": "/w"}]})
    );
    observed.containers[0].state = model::observed::ContainerState::Exited;
    observed.containers[0].finished_at = Some(at(9));
    observed.containers[0].exit_code = 137;
    observed.containers[0].reason = "OOMKilled".into();
    observed.containers[0].message = "é".repeat(10_000);
    let status = make(&pod, &observed, &With::default());
    let t = status.container_statuses.expect("statuses")[0].state.clone().expect("state").terminated.expect("ended");
    assert_eq!((t.exit_code, t.reason.as_deref()), (137, Some("OOMKilled")));
    assert_eq!(t.container_id.as_deref(), Some("containerd://web.0"));
    assert_eq!(t.message.expect("message").len(), MAX_TERMINATION_MESSAGES);
}

/// The runtime tells the limits in its own numbers; nobody but the agent knows the request, and says it as it was given.
#[test]
fn a_memory_request_stays_in_its_words() {
    let spec = r#"{"containers":[{"name":"web","image":"img","resources":{"requests":{"memory":"100M"},"limits":{"memory":"100M"}}}]}"#;
    let pod = pod(spec);
    let mut observed = seen(&["s0 ready", "s0/web running"]);
    let resources = |observed: &ObservedPod| {
        let given = pod.spec().containers[0].resources.clone().expect("resources");
        let actuated = PodAllocation { containers: [("web".to_owned(), given)].into(), pod_level: None };
        let status = make(&pod, observed, &With { actuated: Some(&actuated), ..Default::default() });
        serde_json::to_value(&status.container_statuses.expect("statuses")[0].resources).expect("json")
    };
    observed.containers[0].resources =
        Some(model::observed::ObservedResources { memory_limit: 100_000_000, ..Default::default() });
    assert_eq!(resources(&observed), json!({"requests": {"memory": "100M"}, "limits": {"memory": "100000000"}}));
    observed.containers[0].resources = None;
    assert_eq!(resources(&observed), json!({"requests": {"memory": "100M"}, "limits": {"memory": "100000000"}}));
}

#[test]
fn all_containers_restarting() {
    let spec = r#"{"restartPolicy":"Never","containers":[
        {"name":"a","restartPolicy":"Never","restartPolicyRules":[{"action":"RestartAllContainers","exitCodes":{"operator":"In","values":[88]}}]},
        {"name":"b"}]}"#;
    let pod = pod(spec);
    let asked = seen(&["s0 ready", "s0/a exit=88", "s0/b running"]);
    let first = make(&pod, &asked, &With::default());
    assert_eq!(show(&first), "Running: a=Error:88, b=running started ready");
    assert_eq!(
        conditions(&first).last().map(String::as_str),
        Some("AllContainersRestarting=True RestartAllContainersStarted container exited with restart policy rule")
    );
    let second = make(&pod, &seen(&["s0 ready"]), &With { previous: Some(&first), ..Default::default() });
    assert_eq!(
        show(&second),
        "Running: a=waiting:RestartingAllContainers n1 last RestartingAllContainers:137, \
         b=waiting:RestartingAllContainers n1 last RestartingAllContainers:137"
    );
    assert_eq!(conditions(&second).last().map(String::as_str), Some("AllContainersRestarting=False"));
}

proptest! {
    /// A terminal phase is never left, and observing the same twice changes nothing.
    #[test]
    fn terminal_is_for_good(
        walk in prop::collection::vec((0usize..6, any::<bool>(), any::<bool>()), 1..12),
        policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        init in any::<bool>(),
    ) {
        let init = if init { r#""initContainers":[{"name":"i"}],"# } else { "" };
        let pod = pod(&format!(r#"{{"restartPolicy":"{policy}",{init}"containers":[{{"name":"web"}}]}}"#));
        let views: [&[&str]; 6] = [
            &[],
            &["s0 ready", "s0/i exit=0", "s0/web running"],
            &["s0 ready", "s0/i exit=0", "s0/web exit=0"],
            &["s0 dead", "s0/i exit=1", "s0/web exit=1"],
            &["s0 ready", "s0/i running"],
            &["s0 dead", "s0/web unknown"],
        ];
        let failure = failure("Evicted", false);
        let mut last: Option<PodStatus> = None;
        for (view, ended, failed) in walk {
            let observed = seen(views[view]);
            let with = With { previous: last.as_ref(), ended, failure: failed.then_some(&failure), ..Default::default() };
            let next = make(&pod, &observed, &with);
            let again = make(&pod, &observed, &With { previous: Some(&next), ended, failure: failed.then_some(&failure), now: 77, ..Default::default() });
            prop_assert_eq!(&next.phase, &again.phase);
            prop_assert_eq!(&next.conditions, &again.conditions);
            if let Some(phase) = last.as_ref().and_then(|s| s.phase.as_deref()).filter(|p| is_terminal(p)) {
                prop_assert_eq!(next.phase.as_deref(), Some(phase));
            }
            last = Some(next);
        }
    }
}
