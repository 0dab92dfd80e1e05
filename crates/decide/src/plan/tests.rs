//! One row for each rule: what should run, what does run, and the round that follows.

use std::collections::BTreeMap;

use model::observed::ObservedPod;
use model::plan::{Plan, SandboxStep};
use model::pod::DesiredPod;

use super::{PlanInput, ProbeVerdicts, StartupVerdict, last_exit, plan};
use crate::backoff::Backoffs;
use crate::restart::RestartGates;
use crate::testing::{at, hash, pod, pod_with, seen};

/// A plan on one line.
fn show(p: &Plan) -> String {
    let mut parts = Vec::new();
    if p.kill_pod {
        parts.push("kill-pod".to_owned());
    }
    parts.extend(p.kill.iter().map(|k| {
        let grace = k.grace.map(|g| format!(" {g}s")).unwrap_or_default();
        format!("kill {} {:?}{grace}", k.id, k.reason)
    }));
    parts.extend(p.prune.iter().map(|id| format!("prune {id}")));
    if let SandboxStep::Create { attempt } = p.sandbox {
        parts.push(format!("create {attempt}"));
    }
    parts.extend(p.start.iter().map(|s| {
        let n = s.restart_count.map_or("?".to_owned(), |n| n.to_string());
        format!("start {}#{n}", s.name)
    }));
    parts.extend(p.waiting.iter().map(|w| format!("wait {}", w.name)));
    parts.join(", ")
}

/// The verdicts of the probes in these tests, by container id: `live` failed its liveness probe, `slow` its startup probe, `up` passed it.
type Probes<'a> = &'a [(&'a str, &'a str)];

fn round(pod: &DesiredPod, observed: &ObservedPod, probes: Probes<'_>) -> Plan {
    let map: BTreeMap<&str, ProbeVerdicts> = probes
        .iter()
        .map(|(id, word)| {
            let verdicts = match *word {
                "live" => ProbeVerdicts { liveness_failed: true, startup: StartupVerdict::Started },
                "slow" => ProbeVerdicts { liveness_failed: false, startup: StartupVerdict::Failed },
                _ => ProbeVerdicts { liveness_failed: false, startup: StartupVerdict::Started },
            };
            (*id, verdicts)
        })
        .collect();
    plan(&PlanInput {
        pod,
        observed,
        probes: &|id| map.get(id).copied().unwrap_or_default(),
        backoffs: &Backoffs::default(),
        now: at(1000),
        gates: RestartGates::default(),
        container_hash: &hash,
        has: None,
    })
}

/// Checks rows of (observed, probes, expected) against one spec.
fn check(spec: &str, rows: &[(&[&str], Probes<'_>, &str)]) {
    let pod = pod(spec);
    for (items, probes, expected) in rows {
        assert_eq!(show(&round(&pod, &seen(items), probes)), *expected, "{spec}\n{items:?} {probes:?}");
    }
}

const ONE: &str = r#"{"containers":[{"name":"web","image":"img"}]}"#;
const ONE_ON_FAILURE: &str = r#"{"restartPolicy":"OnFailure","containers":[{"name":"web"}]}"#;
const ONE_NEVER: &str = r#"{"restartPolicy":"Never","containers":[{"name":"web"}]}"#;
const TWO_NEVER: &str = r#"{"restartPolicy":"Never","containers":[{"name":"a"},{"name":"b"}]}"#;

#[test]
fn sandbox_is_made_kept_or_replaced() {
    check(
        ONE,
        &[
            (&[], &[], "create 0, start web#?"),
            (&["s0 ready"], &[], "start web#?"),
            (&["s0 ready", "s0/web running"], &[], ""),
            // Not ready.
            (&["s0 dead"], &[], "kill-pod, create 1, start web#?"),
            (&["s3 dead", "s3/web exit=1"], &[], "kill-pod, create 4, start web#1"),
            // Two ready ones.
            (&["s0 ready", "s1 ready", "s1/web running"], &[], "kill-pod, create 2, start web#1"),
            // The newest is not the ready one.
            (&["s0 ready", "s1 dead"], &[], "kill-pod, create 2, start web#?"),
            // No address.
            (&["s0 ready noip"], &[], "kill-pod, create 1, start web#?"),
            // The node's network, which the spec does not ask for.
            (&["s0 ready host"], &[], "kill-pod, create 1, start web#?"),
            // Containers of a vanished sandbox.
            (&["s0/web running"], &[], "kill-pod, create 0, start web#1"),
        ],
    );
    check(
        r#"{"hostNetwork":true,"containers":[{"name":"web"}]}"#,
        &[
            (&["s0 ready host", "s0/web running"], &[], ""),
            (&["s0 ready", "s0/web running"], &[], "kill-pod, create 1, start web#1"),
        ],
    );
}

#[test]
fn a_finished_pod_gets_no_new_sandbox() {
    check(
        ONE_NEVER,
        &[
            (&["s0 dead", "s0/web exit=0"], &[], ""),
            (&["s0 dead", "s0/web exit=1"], &[], ""),
            // Cut off: it had its run.
            (&["s0 dead", "s0/web running"], &[], "kill-pod"),
            (&["s0 dead", "s0/web unknown"], &[], "kill-pod"),
            // It never ran: there is something to run.
            (&["s0 dead"], &[], "kill-pod, create 1, start web#?"),
            (&["s0 dead", "s0/web created"], &[], "kill-pod, prune web.0, create 1, start web#1"),
        ],
    );
    // One of two ran: the other does not run either.
    check(TWO_NEVER, &[(&["s0 dead", "s0/a exit=0"], &[], "")]);
    check(
        ONE_ON_FAILURE,
        &[
            (&["s0 dead", "s0/web exit=0"], &[], ""),
            (&["s0 dead", "s0/web exit=1"], &[], "kill-pod, create 1, start web#1"),
            (&["s0 dead", "s0/web running"], &[], "kill-pod, create 1, start web#1"),
        ],
    );
    check(
        r#"{"restartPolicy":"OnFailure","containers":[{"name":"a"},{"name":"b"}]}"#,
        &[(&["s0 dead", "s0/a exit=0", "s0/b exit=3"], &[], "kill-pod, create 1, start b#1")],
    );
}

#[test]
fn apps_restart_by_policy() {
    check(
        ONE,
        &[
            (&["s0 ready", "s0/web exit=0"], &[], "start web#1"),
            (&["s0 ready", "s0/web exit=1 n=4"], &[], "start web#5"),
            (&["s0 ready", "s0/web exit=1 n=4", "s0/web exit=1 n=2"], &[], "start web#5"),
        ],
    );
    check(
        ONE_ON_FAILURE,
        &[
            (&["s0 ready", "s0/web exit=1"], &[], "start web#1"),
            // Everything has ended: the sandbox goes.
            (&["s0 ready", "s0/web exit=0"], &[], "kill-pod"),
        ],
    );
    check(
        TWO_NEVER,
        &[
            (&["s0 ready", "s0/a exit=1", "s0/b running"], &[], ""),
            (&["s0 ready", "s0/a exit=1", "s0/b exit=0"], &[], "kill-pod"),
            (&["s0 ready", "s0/a exit=1"], &[], "start b#?"),
            // What ended in an earlier sandbox stays ended.
            (&["s0 dead", "s0/a exit=0", "s1 ready", "s1/b running"], &[], ""),
        ],
    );
}

#[test]
fn restart_rules_go_before_policies() {
    let rules = r#"{"restartPolicy":"Never","containers":[
        {"name":"a","restartPolicy":"Never","restartPolicyRules":[
            {"action":"Restart","exitCodes":{"operator":"In","values":[42]}}]},
        {"name":"b","restartPolicy":"Always"},{"name":"c"}]}"#;
    let rest = ["s0 ready", "s0/b running", "s0/c running"];
    let with = |a: &'static str| [&rest[..], &[a]].concat();
    check(
        rules,
        &[
            (&with("s0/a exit=42"), &[], "start a#1"),
            (&with("s0/a exit=1"), &[], ""),
            (&["s0 ready", "s0/a running", "s0/b exit=0", "s0/c running"], &[], "start b#1"),
            // A container with a policy of its own keeps the pod going through a lost sandbox.
            (&["s0 dead", "s0/a exit=1", "s0/b exit=137", "s0/c exit=137"], &[], "kill-pod, create 1, start b#1"),
        ],
    );
    let pod = pod(rules);
    let observed = seen(&with("s0/a exit=42"));
    let off = RestartGates { container_restart_rules: false, restart_all_containers: true };
    let p = plan(&PlanInput {
        pod: &pod,
        observed: &observed,
        probes: &|_| ProbeVerdicts::default(),
        backoffs: &Backoffs::default(),
        now: at(1000),
        gates: off,
        container_hash: &hash,
        has: None,
    });
    assert_eq!(show(&p), "");
}

#[test]
fn restart_all_removes_everything_sources_last() {
    let spec = r#"{"restartPolicy":"Never","initContainers":[{"name":"i"}],"containers":[
        {"name":"a","restartPolicy":"Never","restartPolicyRules":[
            {"action":"RestartAllContainers","exitCodes":{"operator":"In","values":[88]}}]},
        {"name":"b"}]}"#;
    check(
        spec,
        &[
            (
                &["s0 ready", "s0/i exit=0", "s0/a exit=88", "s0/b running"],
                &[],
                "kill b.0 RestartAllContainers 0s, prune b.0, prune i.0, prune a.0",
            ),
            (&["s0 ready", "s0/a exit=88"], &[], "prune a.0"),
            // Done: everything begins anew in the same sandbox.
            (&["s0 ready"], &[], "start i#?"),
            (&["s0 ready", "s0/i exit=0", "s0/a exit=1", "s0/b running"], &[], ""),
            (&["s0 dead", "s0/i exit=0", "s0/a exit=1", "s0/b exit=137"], &[], ""),
        ],
    );
}

#[test]
fn running_apps_are_killed_for_a_reason_only() {
    let probed = r#"{"containers":[{"name":"web","image":"img",
        "livenessProbe":{"terminationGracePeriodSeconds":3},
        "startupProbe":{"terminationGracePeriodSeconds":4}}]}"#;
    let running: &[&str] = &["s0 ready", "s0/web running image=img"];
    check(
        probed,
        &[
            (running, &[], ""),
            (running, &[("web.0", "up")], ""),
            (running, &[("web.0", "live")], "kill web.0 LivenessProbe 3s, start web#1"),
            (running, &[("web.0", "slow")], "kill web.0 StartupProbe 4s, start web#1"),
            // The verdict of an earlier container says nothing about this one.
            (&["s0 ready", "s0/web exit=1", "s0/web running"], &[("web.0", "live")], ""),
            (&["s0 ready", "s0/web running image=old"], &[], "kill web.0 DefinitionChanged, start web#1"),
            (&["s0 ready", "s0/web unknown"], &[], "kill web.0 UnknownState, start web#1"),
            (&["s0 ready", "s0/web running", "s0/gone running"], &[], "kill gone.0 NotInSpec"),
            (&["s0 ready", "s0/web running", "s0/gone exit=0"], &[], ""),
            // Never two: the newest stays.
            (&["s0 ready", "s0/web running", "s0/web running"], &[], "kill web.0 UnknownState"),
            (&["s0 dead", "s0/web running", "s1 ready"], &[], "kill web.0 SandboxChanged, start web#1"),
        ],
    );
    // A verdict counts only with the probe in the spec.
    check(ONE, &[(running, &[("web.0", "live")], ""), (running, &[("web.0", "slow")], "")]);
    // Never: killed, not started again; the pod ends in the next round, so that the reason is not lost.
    check(
        r#"{"restartPolicy":"Never","containers":[{"name":"web","livenessProbe":{}}]}"#,
        &[
            (&["s0 ready", "s0/web running"], &[("web.0", "live")], "kill web.0 LivenessProbe"),
            (&["s0 ready", "s0/web exit=137"], &[("web.0", "live")], "kill-pod"),
            (&["s0 dead", "s0/web exit=137"], &[], ""),
        ],
    );
    let p = round(&pod(probed), &seen(running), &[("web.0", "live")]);
    assert_eq!(p.kill[0].message, "Container web failed liveness probe, will be restarted");
    let p = round(&pod(ONE), &seen(&["s0 ready", "s0/web unknown"]), &[]);
    assert_eq!(p.kill[0].message, "Container is in \"unknown\" state, try killing it before restart");
}

#[test]
fn what_was_only_created_is_made_anew() {
    check(
        ONE,
        &[
            (&["s0 ready", "s0/web created"], &[], "prune web.0, start web#1"),
            (&["s0 ready", "s0/web exit=1", "s0/web created"], &[], "prune web.1, start web#2"),
            (&["s0 ready", "s0/web created", "s0/web running"], &[], ""),
        ],
    );
    check(ONE_NEVER, &[(&["s0 ready", "s0/web created"], &[], "prune web.0, start web#1")]);
    check(
        INIT,
        &[
            (&["s0 ready", "s0/i1 created"], &[], "prune i1.0, start i1#1"),
            (&["s0 ready", "s0/i1 exit=0", "s0/i2 created"], &[], "prune i2.0, start i2#1"),
        ],
    );
}

const INIT: &str = r#"{"initContainers":[{"name":"i1"},{"name":"i2"}],"containers":[{"name":"web"}]}"#;

#[test]
fn init_containers_run_one_after_the_other() {
    check(
        INIT,
        &[
            (&[], &[], "create 0, start i1#?"),
            (&["s0 ready"], &[], "start i1#?"),
            (&["s0 ready", "s0/i1 running"], &[], ""),
            (&["s0 ready", "s0/i1 exit=0"], &[], "start i2#?"),
            (&["s0 ready", "s0/i1 exit=1"], &[], "start i1#1"),
            (&["s0 ready", "s0/i1 exit=0", "s0/i2 running"], &[], ""),
            (&["s0 ready", "s0/i1 exit=0", "s0/i2 exit=0"], &[], "start web#?"),
            (&["s0 ready", "s0/i1 exit=0", "s0/i2 exit=7"], &[], "start i2#1"),
            (&["s0 ready", "s0/i1 unknown"], &[], "kill i1.0 UnknownState, start i1#1"),
            // The latest that has begun tells: records of the earlier ones may be gone.
            (&["s0 ready", "s0/i2 exit=0"], &[], "start web#?"),
            (&["s0 ready", "s0/web running"], &[], ""),
            (&["s0 ready", "s0/web exit=1"], &[], "start web#1"),
            // One that was never started proves nothing.
            (&["s0 ready", "s0/web created"], &[], "start i1#?"),
            // One record is enough.
            (&["s0 ready", "s0/i1 exit=1", "s0/i1 exit=0", "s0/i2 running"], &[], "prune i1.0"),
        ],
    );
}

#[test]
fn init_containers_run_again_in_a_new_sandbox() {
    let old = ["s0 dead", "s0/i1 exit=0", "s0/i2 exit=0", "s0/web exit=137"];
    let with = |more: &[&'static str]| [&old[..], more].concat();
    check(
        INIT,
        &[
            (&old, &[], "kill-pod, prune i2.0, prune i1.0, create 1, start i1#1"),
            (
                &["s0 dead", "s0/i1 exit=0", "s0/web created"],
                &[],
                "kill-pod, prune web.0, prune i1.0, create 1, start i1#1",
            ),
            // Records of the old sandbox that could not be removed decide nothing; they are removed on the way.
            (&with(&["s1 ready"]), &[], "start i1#1"),
            (&with(&["s1 ready", "s1/i1 exit=0"]), &[], "prune i1.0, start i2#1"),
            (&with(&["s1 ready", "s1/i1 exit=0", "s1/i2 exit=0"]), &[], "prune i1.0, prune i2.0, start web#1"),
            (&["s0 dead", "s0/web created", "s1 ready"], &[], "start i1#?"),
        ],
    );
}

#[test]
fn init_failure_by_policy() {
    let never = r#"{"restartPolicy":"Never","initContainers":[{"name":"i"}],"containers":[{"name":"web"}]}"#;
    check(
        never,
        &[
            (&["s0 ready", "s0/i exit=1"], &[], "kill-pod"),
            (&["s0 ready", "s0/i unknown"], &[], "kill-pod"),
            (&["s0 dead", "s0/i exit=1"], &[], ""),
            (&["s0 dead", "s0/i running"], &[], "kill-pod"),
            // Nothing failed and no app ran: initialisation may be repeated.
            (&["s0 dead", "s0/i exit=0"], &[], "kill-pod, prune i.0, create 1, start i#1"),
        ],
    );
    check(
        r#"{"initContainers":[{"name":"i","restartPolicy":"Never"}],"containers":[{"name":"web"}]}"#,
        &[(&["s0 ready", "s0/i exit=1"], &[], "kill-pod"), (&["s0 dead", "s0/i exit=1"], &[], "")],
    );
    check(
        r#"{"restartPolicy":"Never","containers":[{"name":"web"}],"initContainers":[
            {"name":"i","restartPolicy":"OnFailure"}]}"#,
        &[(&["s0 ready", "s0/i exit=1"], &[], "start i#1")],
    );
}

#[test]
fn sidecars() {
    let spec = r#"{"initContainers":[
        {"name":"s1","image":"img","restartPolicy":"Always","startupProbe":{"terminationGracePeriodSeconds":2},"livenessProbe":{}},
        {"name":"i"},{"name":"s2","restartPolicy":"Always"}],"containers":[{"name":"web"}]}"#;
    let up: Probes<'_> = &[("s1.0", "up")];
    let begun: &[&str] = &["s0 ready", "s0/s1 running", "s0/i exit=0", "s0/s2 running"];
    let all: &[&str] = &["s0 ready", "s0/s1 running image=img", "s0/i exit=0", "s0/s2 running", "s0/web running"];
    let with = |base: &[&'static str], more: &'static str| [base, &[more]].concat();
    check(
        spec,
        &[
            (&["s0 ready"], &[], "start s1#?"),
            // The startup probe gates the next.
            (&["s0 ready", "s0/s1 running"], &[], ""),
            (&["s0 ready", "s0/s1 running"], up, "start i#?"),
            (&["s0 ready", "s0/s1 running"], &[("s1.0", "slow")], "kill s1.0 StartupProbe 2s, start s1#1"),
            (&["s0 ready", "s0/s1 running", "s0/i running"], up, ""),
            // A sidecar that ends starts again at once, whatever its exit code, and holds up nothing that has begun.
            (&["s0 ready", "s0/s1 exit=0", "s0/i running"], &[], "start s1#1"),
            (&["s0 ready", "s0/s1 exit=0", "s0/i exit=0"], &[], "start s1#1, start s2#?"),
            (&["s0 ready", "s0/s1 exit=3"], &[], "start s1#1"),
            (begun, up, "start web#?"),
            (all, up, ""),
            (&with(&all[..4], "s0/web exit=1"), up, "start web#1"),
            (&["s0 ready", "s0/i exit=0", "s0/s2 running", "s0/web running"], &[], "start s1#?"),
            (
                &["s0 ready", "s0/s1 running image=old", "s0/s2 running", "s0/web running"],
                up,
                "kill s1.0 DefinitionChanged, start s1#1",
            ),
            (all, &[("s1.0", "live")], "kill s1.0 LivenessProbe, start s1#1"),
            (
                &["s0 ready", "s0/s1 unknown", "s0/s2 running", "s0/web running"],
                &[],
                "kill s1.0 UnknownState, start s1#1",
            ),
        ],
    );
    // Sidecars do not keep a finished pod alive, and are not restarted in it.
    let never = r#"{"restartPolicy":"Never","initContainers":[{"name":"s","restartPolicy":"Always"}],"containers":[{"name":"web"}]}"#;
    check(
        never,
        &[
            (&["s0 ready", "s0/s running", "s0/web exit=0"], &[], "kill-pod"),
            (&["s0 ready", "s0/s exit=1", "s0/web exit=0"], &[], "kill-pod"),
            (&["s0 ready", "s0/s exit=1", "s0/web running"], &[], "start s#1"),
            (&["s0 ready", "s0/s exit=1"], &[], "start s#1"),
            (&["s0 dead", "s0/s exit=7", "s0/web exit=0"], &[], ""),
        ],
    );
    let p = round(&pod(spec), &seen(all), &[("s1.0", "live")]);
    assert_eq!(p.kill[0].message, "Init container s1 failed liveness probe");
}

#[test]
fn ephemeral_containers_start_once() {
    check(
        r#"{"initContainers":[{"name":"i"}],"containers":[{"name":"web"}],
            "ephemeralContainers":[{"name":"dbg","image":"busybox"}]}"#,
        &[
            (&["s0 ready", "s0/i running"], &[], "start dbg#?"),
            (&["s0 ready", "s0/i exit=0", "s0/web running"], &[], "start dbg#?"),
            (&["s0 ready", "s0/i exit=0", "s0/dbg exit=1"], &[], "start web#?"),
            (&["s0 ready", "s0/i running", "s0/dbg running"], &[], ""),
            (&["s0 ready", "s0/i running", "s0/dbg created"], &[], "prune dbg.0, start dbg#1"),
            (&[], &[], "create 0, start i#?"),
        ],
    );
}

#[test]
fn a_pod_that_is_being_deleted_starts_nothing() {
    let pod = pod_with(r#"{"deletionTimestamp":"2026-01-01T00:00:00Z"}"#, ONE);
    for items in [&["s0 ready"][..], &["s0 dead"], &["s0 ready", "s0/web exit=1"], &[]] {
        assert_eq!(show(&round(&pod, &seen(items), &[])), "");
    }
}

#[test]
fn crash_backoff_holds_one_container_only() {
    let pod = pod(r#"{"containers":[{"name":"web","image":"img"},{"name":"other"}]}"#);
    let observed = seen(&["s0 ready", "s0/web exit=1 at=100", "s0/other exit=1 at=100"]);
    let mut backoffs = Backoffs::default();
    let h = hash("img", "web");
    backoffs.record_start(pod.uid(), "web", h, Some(at(90)), at(90));
    let at_time = |now: i64, backoffs: &Backoffs| {
        plan(&PlanInput {
            pod: &pod,
            observed: &observed,
            probes: &|_| ProbeVerdicts::default(),
            backoffs,
            now: at(now),
            gates: RestartGates::default(),
            container_hash: &hash,
            has: None,
        })
    };
    let p = at_time(105, &backoffs);
    assert_eq!(show(&p), "start other#1, wait web");
    assert_eq!(p.waiting[0].reason, "CrashLoopBackOff");
    assert_eq!(p.waiting[0].message, "back-off 10s restarting failed container=web pod=web_ns(uid-1)");
    assert_eq!(p.wake_at, Some(at(110)));
    assert_eq!(show(&at_time(110, &backoffs)), "start web#1, start other#1");
    assert_eq!(last_exit(&observed, "web"), Some(at(100)));
    // A pod whose only container waits is not finished.
    let alone = super::tests::pod(ONE);
    let observed = seen(&["s0 ready", "s0/web exit=1 at=100"]);
    let p = plan(&PlanInput {
        pod: &alone,
        observed: &observed,
        probes: &|_| ProbeVerdicts::default(),
        backoffs: &backoffs,
        now: at(105),
        gates: RestartGates::default(),
        container_hash: &hash,
        has: None,
    });
    assert_eq!(show(&p), "wait web");
    assert_eq!(p.sandbox, SandboxStep::Keep("s0".into()));
}
