//! Explanations of pods that are made up, as they must read.

use model::report::{ContainerReport, Finding, NodeReport, PodReport, Severity, StopReport};
use model::timeline::{StepKind, StepRecord, StepResult};

use super::*;

/// So many seconds after the story begins.
pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_780_000_000 + second).unwrap()
}

pub(crate) fn step(kind: StepKind, subject: &str, from: i64, to: i64, result: StepResult) -> StepRecord {
    StepRecord { kind, subject: subject.into(), started: at(from), ended: Some(at(to)), result, count: 1 }
}

fn container(name: &str, kind: &str, state: &str, since: i64) -> ContainerReport {
    ContainerReport {
        name: name.into(),
        kind: kind.into(),
        image: format!("registry.example/{name}:1"),
        state: state.into(),
        message: String::new(),
        since: Some(at(since)),
        ready: state == "running",
        restarts: 0,
        last_stop: None,
    }
}

fn pod(name: &str, namespace: &str, uid: &str) -> PodReport {
    let steps = vec![
        step(StepKind::Queued, "file", 0, 0, StepResult::Done),
        step(StepKind::Admit, "", 0, 0, StepResult::Done),
        step(StepKind::Sandbox, "", 0, 1, StepResult::Done),
    ];
    PodReport {
        uid: uid.into(),
        namespace: namespace.into(),
        name: name.into(),
        source: "file".into(),
        phase: "Pending".into(),
        ready: false,
        ips: vec!["10.1.0.7".into()],
        state: "syncing".into(),
        step: steps.last().cloned(),
        last_error: None,
        waits_for: Vec::new(),
        containers: Vec::new(),
        timeline: steps,
    }
}

/// Runs and is ready.
pub(crate) fn well() -> PodReport {
    let mut pod = pod("web-node-a", "default", "0f7af893");
    let mut app = container("app", "app", "running", 8);
    app.restarts = 1;
    app.last_stop = Some(StopReport {
        why: "liveness probe".into(),
        exit_code: 137,
        reason: "Error".into(),
        at: Some(at(7)),
        message: String::new(),
    });
    let mut init = container("migrate", "init", "terminated: Completed", 2);
    init.ready = true;
    pod.containers = vec![init, container("log", "sidecar", "running", 3), app];
    pod.timeline.push(step(StepKind::Pull, "app", 3, 5, StepResult::Done));
    pod.timeline.push(step(StepKind::Ready, "", 10, 10, StepResult::Done));
    pod.step = pod.timeline.last().cloned();
    (pod.phase, pod.ready) = ("Running".into(), true);
    pod
}

/// Cannot get its image.
pub(crate) fn pulling() -> PodReport {
    let mut pod = pod("pull-node-a", "default", "3fcf1f62");
    let mut app = container("app", "app", "waiting: ImagePullBackOff", 0);
    app.since = None;
    app.message = "Back-off pulling image \"registry.example/app:1\"".into();
    pod.containers = vec![app];
    let mut pull = step(StepKind::Pull, "app", 2, 92, StepResult::Failed("no such host".into()));
    pull.count = 12;
    pod.timeline.push(pull.clone());
    (pod.step, pod.last_error) = (Some(pull.clone()), Some(pull));
    pod.waits_for = vec![format!("container \"app\": ImagePullBackOff until {:.0}", at(112))];
    pod
}

/// Crashes all the time.
pub(crate) fn crashing() -> PodReport {
    let mut pod = pod("db-node-a", "kube-system", "436d763b");
    let mut db = container("db", "app", "waiting: CrashLoopBackOff", 0);
    (db.ready, db.since, db.restarts) = (false, None, 5);
    db.message = "back-off 2m40s restarting failed container=db pod=db-node-a_kube-system(436d763b)".into();
    db.last_stop = Some(StopReport {
        why: "exit".into(),
        exit_code: 1,
        reason: "Error".into(),
        at: Some(at(61)),
        message: "no\nspace".into(),
    });
    pod.containers = vec![db];
    pod.phase = "Running".into();
    pod.timeline.push(step(StepKind::Start, "db", 60, 60, StepResult::Done));
    pod.step = pod.timeline.last().cloned();
    pod.waits_for = vec![format!("container \"db\": CrashLoopBackOff until {:.0}", at(260))];
    pod
}

fn shown(pod: &PodReport) -> String {
    pod_text(pod, at(100), Style::default())
}

#[test]
fn a_pod_that_is_fine() {
    let wanted = "\
web-node-a in default is running and ready: 2 containers, all up for 1m32s, address 10.1.0.7; container \"app\" was restarted 1×, last after liveness probe, exit code 137 (Error)

  Pod         default/web-node-a, UID 0f7af893, from file
  Status      Running, agent: syncing, addresses: 10.1.0.7
  Step        ready, 1m30s ago

Containers
    NAME     KIND     STATE                  READY  RESTARTS  SINCE  IMAGE
    migrate  init     terminated: Completed  yes    0         1m38s  registry.example/migrate:1
    log      sidecar  running                yes    0         1m37s  registry.example/log:1
    app      app      running                yes    1         1m32s  registry.example/app:1
             last stopped 1m33s ago: liveness probe, exit code 137 (Error)

Time line
    AGO    STEP        WHAT  TOOK  RESULT
    1m40s  queued      file        done
    1m40s  admission               done
    1m40s  sandbox           1.0s  done
    1m37s  image pull  app   2.0s  done
    1m30s  ready                   done
";
    assert_eq!(shown(&well()), wanted);
}

#[test]
fn a_pod_that_cannot_pull() {
    let wanted = "\
pull-node-a in default is not running: container \"app\": image pull fails: no such host; 12× the same way, last 8s ago; next try in 12s

  Pod         default/pull-node-a, UID 3fcf1f62, from file
  Status      Pending, agent: syncing, addresses: 10.1.0.7
  Step        image pull app, 8s ago
  Waits for   container \"app\": ImagePullBackOff; next try in 12s
  Last error  container \"app\": image pull fails: no such host (12× the same way, last 8s ago)

Containers
    NAME  KIND  STATE                      READY  RESTARTS  SINCE  IMAGE
    app   app   waiting: ImagePullBackOff  no     0         -      registry.example/app:1
             Back-off pulling image \"registry.example/app:1\"

Time line
    AGO    STEP        WHAT  TOOK  RESULT
    1m40s  queued      file        done
    1m40s  admission               done
    1m40s  sandbox           1.0s  done
    1m38s  image pull  app         failed 12× the same way, last 8s ago
             no such host
";
    assert_eq!(shown(&pulling()), wanted);
}

#[test]
fn headlines() {
    let change = |mut pod: PodReport, f: &dyn Fn(&mut PodReport)| {
        f(&mut pod);
        pod
    };
    let fresh = || pod("web", "default", "u");
    let exited = |code| StopReport {
        why: "exit".into(),
        exit_code: code,
        reason: "Error".into(),
        at: None,
        message: String::new(),
    };
    let running_step =
        |kind, subject: &str| StepRecord { ended: None, ..step(kind, subject, 66, 66, StepResult::Running) };
    let cases: Vec<(PodReport, Paint, &str)> = vec![
        (
            crashing(),
            Paint::Bad,
            "db-node-a in kube-system runs but is not ready: container \"db\" crashes: exit code 1 (Error): no space; restarted 5×; next try in 2m40s",
        ),
        (
            change(fresh(), &|p| {
                p.containers = vec![container("app", "app", "waiting: ContainerCreating", 0)];
                p.step = Some(running_step(StepKind::Pull, "app"));
            }),
            Paint::Caution,
            "web in default is not running: still container \"app\": pulling the image, for 34s",
        ),
        (
            change(fresh(), &|p| p.step = Some(running_step(StepKind::Sandbox, ""))),
            Paint::Caution,
            "web in default is not running: still creating the sandbox, for 34s",
        ),
        (
            change(fresh(), &|p| {
                p.last_error =
                    Some(step(StepKind::Sandbox, "", 60, 61, StepResult::Unknown("context deadline exceeded".into())));
            }),
            Paint::Bad,
            "web in default is not running: sandbox creation has no known outcome: context deadline exceeded",
        ),
        (
            change(fresh(), &|p| {
                p.containers = vec![container("app", "app", "waiting: InvalidImageName", 0)];
                p.containers[0].message = "couldn't parse image name".into();
            }),
            Paint::Bad,
            "web in default is not running: container \"app\": InvalidImageName: couldn't parse image name",
        ),
        (
            change(fresh(), &|p| {
                p.containers = vec![
                    container("setup", "init", "running", 40),
                    container("app", "app", "waiting: PodInitializing", 0),
                ];
            }),
            Paint::Caution,
            "web in default is not running: init container \"setup\" runs for 1m, the others wait for it",
        ),
        (
            change(fresh(), &|p| {
                p.phase = "Running".into();
                p.containers = vec![container("app", "app", "running", 40)];
                p.containers[0].ready = false;
            }),
            Paint::Bad,
            "web in default runs but is not ready: container \"app\": its startup or readiness probe has not succeeded",
        ),
        (
            change(fresh(), &|p| {
                p.phase = "Failed".into();
                p.timeline.push(step(
                    StepKind::Admit,
                    "",
                    1,
                    1,
                    StepResult::Failed("OutOfcpu: Node didn't have enough resource: cpu".into()),
                ));
            }),
            Paint::Bad,
            "web in default has failed: admission is refused: OutOfcpu: Node didn't have enough resource: cpu",
        ),
        (
            change(fresh(), &|p| {
                p.phase = "Failed".into();
                p.containers = vec![
                    container("ok", "app", "terminated: Completed", 9),
                    container("app", "app", "terminated: Error", 9),
                ];
                p.containers[0].last_stop = Some(exited(0));
                p.containers[1].last_stop = Some(exited(3));
            }),
            Paint::Bad,
            "web in default has failed: container \"app\": exit code 3 (Error)",
        ),
        (
            change(fresh(), &|p| p.phase = "Succeeded".into()),
            Paint::Good,
            "web in default has finished: every container ended well",
        ),
        (
            change(well(), &|p| {
                p.state = "terminating".into();
                p.step = Some(running_step(StepKind::Stop, "app"));
            }),
            Paint::Caution,
            "web-node-a in default is stopping: container \"app\": stopping the container, for 34s",
        ),
        (
            change(fresh(), &|p| p.waits_for = vec!["the runtime's network".into()]),
            Paint::Caution,
            "web in default is not running: the runtime's network",
        ),
        (fresh(), Paint::Caution, "web in default is not running: nothing has failed, it is still being started"),
    ];
    for (pod, paint, text) in cases {
        assert_eq!(headline(&pod, at(100)), (paint, text.to_owned()));
    }
}

#[test]
fn which_pod_is_meant() {
    let pods = [
        pod("web-node-a", "default", "0f7af893"),
        pod("web-node-a2", "default", "3fcf1f62"),
        pod("web-node-a", "kube-system", "436d763b"),
        pod("etcd-node-a", "kube-system", "2ce0916f"),
    ];
    for (namespace, name, uid) in [
        (None, "default/web-node-a", "0f7af893"),
        (Some("kube-system"), "web", "436d763b"),
        (None, "kube-system/web", "436d763b"),
        (None, "etcd", "2ce0916f"),
        (None, "3fcf1f62", "3fcf1f62"),
        (None, "3fcf", "3fcf1f62"),
        (None, "web-node-a2", "3fcf1f62"),
    ] {
        let found = pick(&pods, namespace, name).map(|p| p.uid.as_str());
        assert_eq!(found, Ok(uid), "{namespace:?} {name}");
    }
    for (namespace, name, text) in [
        (
            None,
            "web-node-a",
            "\"web-node-a\" fits 2 pods; say which one with NAMESPACE/NAME or a UID:\n  default/web-node-a (0f7af893)\n  kube-system/web-node-a (436d763b)",
        ),
        (None, "node-a2", "no pod \"node-a2\" on this node; similar names:\n  default/web-node-a2 (3fcf1f62)"),
        (
            Some("default"),
            "etdc-node-a",
            "no pod \"etdc-node-a\" in namespace default on this node; similar names:\n  kube-system/etcd-node-a (2ce0916f)",
        ),
        (None, "zzz", "no pod \"zzz\" on this node; rubelet pods lists those that are"),
        (None, "", "no pod \"\" on this node; rubelet pods lists those that are"),
        (Some("default"), "kube-system/etcd", "\"kube-system/etcd\" names another namespace than --namespace"),
    ] {
        assert_eq!(pick(&pods, namespace, name).map(full_name), Err(text.to_owned()));
    }
    assert_eq!(
        pick(&[], None, "web").map(full_name),
        Err("no pod \"web\" on this node: it has no pods at all".to_owned())
    );
}

#[test]
fn the_node() {
    let mut node = NodeReport {
        name: "node-a".into(),
        ready: false,
        message: "container runtime network not ready: NetworkReady=false".into(),
        findings: vec![Finding {
            topic: "network".into(),
            severity: Severity::Error,
            message: "NetworkReady=false: cni plugin not initialized".into(),
            fix: "put a CNI configuration into /etc/cni/net.d".into(),
        }],
        pods: 3,
        pods_running: 1,
    };
    let wanted = "\
node node-a is not ready: container runtime network not ready: NetworkReady=false
  1 of 3 pods running

ERROR  network  NetworkReady=false: cni plugin not initialized
                fix: put a CNI configuration into /etc/cni/net.d
";
    assert_eq!(node_text(&node, Style::default()), wanted);
    (node.ready, node.pods, node.pods_running) = (true, 1, 1);
    node.findings.clear();
    assert_eq!(node_text(&node, Style::default()), "node node-a is ready\n  1 of 1 pod running\n");
}

#[test]
fn colour_is_only_added() {
    let coloured = pod_text(&pulling(), at(100), Style { color: true, width: None });
    let mut plain = coloured.clone();
    for code in ["\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[2m", "\x1b[0m"] {
        plain = plain.replace(code, "");
    }
    assert_ne!(coloured, plain);
    assert_eq!(plain, shown(&pulling()));
}

#[test]
fn json_is_the_report() {
    let text = to_json(&crashing()).unwrap();
    assert_eq!(serde_json::from_str::<PodReport>(&text).unwrap(), crashing());
}
