//! Restarts: delays and counts, restart policies, hooks, probes.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use cri::RuntimeMutator;
use cri_api::v1::ContainerState;
use e2e::status::{condition, id, of, phase, restarts, runs, uid, waiting};
use e2e::{Node, Share, container, pod, seconds, sidecar, wait_until, with};
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";
/// Notes the uptime in seconds, to two digits behind the point.
const NOTE: &str = "read T X < /proc/uptime; echo $T >> /share/";

/// The moments noted in a file.
fn moments(share: &Share, file: &str) -> Vec<f64> {
    share.lines(file).iter().map(|l| l.parse().unwrap()).collect()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn restarts_wait_longer_each_time_and_counts_never_fall() {
    let mut node = Node::start();
    let share = Share::new(&node);
    let fails = |name: &str, code: u8| container(name, &format!("{NOTE}{name}; exit {code}"));
    node.write(
        "calm.yaml",
        &share.mounted(pod("loop", [fails("one", 1), fails("zero", 0), fails("swept", 1), container("calm", HOLD)])),
    );
    let mut initial = pod("initial", [container("c", HOLD)]);
    initial["spec"]["initContainers"] = json!([fails("init", 1)]);
    node.write("initial.yaml", &share.mounted(initial));
    node.wait_pod("the calm one runs", "loop", |p| runs(p, "calm"));
    let calm = id(&node.pod("loop").unwrap(), "calm").to_owned();

    // Whatever is looked at from now on, no count ever falls.
    let mut counts = std::collections::BTreeMap::new();
    let mut look = |node: &Node| {
        for name in ["loop", "initial"] {
            let Some(pod) = node.pod(name) else { continue };
            for container in ["one", "zero", "swept", "calm", "init"] {
                if of(&pod, container).is_object() {
                    let now = restarts(&pod, container);
                    let before = counts.insert(container, now).unwrap_or_default();
                    assert!(now >= before, "the count of {container} fell from {before} to {now}");
                }
            }
        }
    };
    let mut swept = 0;
    let reached = rig::poll(seconds(110), || {
        look(&node);
        // What has ended is removed behind the kubelet's back, newest and all.
        if moments(&share, "swept").len() > swept {
            for dead in node.containers_of("loop", "swept") {
                if dead.state == ContainerState::ContainerExited as i32 {
                    node.ask(node.cri().remove_container(&dead.id));
                    swept = moments(&share, "swept").len();
                }
            }
        }
        ["one", "zero", "init"].iter().all(|n| moments(&share, n).len() >= 5)
    });
    assert!(
        reached,
        "not five starts of each within 110 s: {:?} {:?} {:?}",
        moments(&share, "one"),
        moments(&share, "zero"),
        moments(&share, "init")
    );
    for name in ["one", "zero", "init"] {
        let at = moments(&share, name);
        let gaps: Vec<f64> = at.windows(2).take(4).map(|w| w[1] - w[0]).collect();
        println!("{name}: {gaps:.1?}");
        assert!(gaps[0] < 8.0, "{name}: the first restart waited: {gaps:.1?}");
        for (gap, wanted) in gaps[1..].iter().zip([10.0, 20.0, 40.0]) {
            assert!(*gap > wanted - 0.6 && *gap < wanted + 9.0, "{name}: {gap:.1} s instead of {wanted}: {gaps:.1?}");
        }
    }

    let shown = node.wait_pod("all wait in back-off", "loop", |p| {
        ["one", "zero", "swept"].iter().all(|c| waiting(p, c) == "CrashLoopBackOff")
    });
    let one = of(&shown, "one");
    let message = one["state"]["waiting"]["message"].as_str().unwrap();
    assert!(message.starts_with("back-off 1m20s restarting failed container=one pod=loop-e2e_default("), "{message}");
    assert_eq!(one["lastState"]["terminated"]["exitCode"], 1);
    assert_eq!(of(&shown, "zero")["lastState"]["terminated"]["exitCode"], 0);
    assert_eq!(one["started"], false);
    let attempt = node.container("loop", "one").metadata.unwrap().attempt;
    assert_eq!(u64::from(attempt), restarts(&shown, "one"));
    assert!(restarts(&shown, "swept") >= 2, "{}", restarts(&shown, "swept"));
    assert_eq!(waiting(&node.pod("initial").unwrap(), "c"), "PodInitializing");
    assert_eq!(phase(&node.pod("initial").unwrap()), "Pending");

    // The agent is killed in the middle of a wait of 80 s.
    node.restart();
    let until = Instant::now() + seconds(4);
    while Instant::now() < until {
        look(&node);
        std::thread::sleep(Duration::from_millis(100));
    }
    let shown = node.wait_pod("seen again", "loop", |p| runs(p, "calm"));
    assert!(restarts(&shown, "one") >= 4 && restarts(&shown, "swept") >= 2, "{:#}", shown["status"]);
    // None of it concerned the calm one, nor does a wait delay the end.
    assert_eq!((id(&shown, "calm"), restarts(&shown, "calm")), (calm.as_str(), 0));
    node.remove("calm.yaml");
    node.wait_gone(&uid(&shown), seconds(15));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn restart_policies_and_final_phases() {
    let mut node = Node::start();
    let share = Share::new(&node);
    let exits = |name: &str, code: u8| container(name, &format!("echo x >> /share/$HOSTNAME.{name}; exit {code}"));
    let second = |name: &str| container(name, "echo x >> /share/$HOSTNAME.c; [ $(wc -l < /share/$HOSTNAME.c) -ge 2 ]");
    let of_policy = |name: &str, policy: &str, containers: Vec<Value>| {
        let mut manifest = share.mounted(pod(name, containers));
        manifest["spec"]["restartPolicy"] = json!(policy);
        node.write(&format!("{name}.yaml"), &manifest);
    };
    of_policy("never0", "Never", vec![exits("c", 0), exits("d", 0)]);
    of_policy("never1", "Never", vec![exits("c", 0), exits("d", 3)]);
    of_policy("onfail0", "OnFailure", vec![exits("c", 0)]);
    of_policy("onfail1", "OnFailure", vec![second("c")]);
    of_policy("always", "Always", vec![exits("c", 0)]);
    let mut init = share.mounted(pod("initfails", [exits("c", 0)]));
    init["spec"]["initContainers"] = json!([container("i", "exit 7")]);
    init["spec"]["restartPolicy"] = json!("Never");
    node.write("initfails.yaml", &init);
    let mut job = share.mounted(pod("job", [container("c", "sleep 1; exit 0")]));
    job["spec"]["initContainers"] = json!([sidecar("side", "trap 'exit 7' TERM; sleep 1000000 & wait")]);
    job["spec"]["restartPolicy"] = json!("Never");
    node.write("job.yaml", &job);

    let ends = [
        ("never0", "Succeeded"),
        ("never1", "Failed"),
        ("onfail0", "Succeeded"),
        ("onfail1", "Succeeded"),
        ("initfails", "Failed"),
        ("job", "Succeeded"),
    ];
    for (name, wanted) in ends {
        let ended = node.wait_pod(&format!("{name} ends"), name, |p| matches!(phase(p), "Succeeded" | "Failed"));
        assert_eq!(phase(&ended), wanted, "{name}: {:#}", ended["status"]);
        assert_eq!(condition(&ended, "Ready"), "False", "{name}");
    }
    let always = node.wait_pod("restarted after exit 0", "always", |p| restarts(p, "c") >= 1);
    assert_eq!(phase(&always), "Running");
    // It waits 10 s now, and the status says so from the beginning, though nothing else happens in the pod.
    wait_until("its wait is shown", seconds(7), || {
        (waiting(&node.pod("always").unwrap(), "c") == "CrashLoopBackOff").then_some(())
    });
    let starts = |file: &str| share.lines(file).len();
    assert_eq!(
        (starts("never0-e2e.c"), starts("never1-e2e.d"), starts("onfail0-e2e.c"), starts("onfail1-e2e.c")),
        (1, 1, 1, 2)
    );
    assert_eq!(of(&node.pod("never1").unwrap(), "d")["state"]["terminated"]["exitCode"], 3);
    assert_eq!(restarts(&node.pod("onfail1").unwrap(), "c"), 1);
    assert_eq!(share.lines("initfails-e2e.c").len(), 0, "the main one ran though its init container failed");
    assert_eq!(of(&node.pod("initfails").unwrap(), "i")["state"]["terminated"]["exitCode"], 7);

    // What has ended stays ended, also for the next agent.
    node.restart();
    std::thread::sleep(seconds(3));
    for (name, wanted) in ends {
        node.wait_pod(&format!("{name} is known to have ended"), name, |p| phase(p) == wanted);
    }
    assert_eq!(
        (starts("never0-e2e.c"), starts("never1-e2e.d"), starts("onfail0-e2e.c"), starts("onfail1-e2e.c")),
        (1, 1, 1, 2)
    );
    let ended = uid(&node.pod("never1").unwrap());
    node.remove("never1.yaml");
    node.wait_gone(&ended, seconds(30));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn hooks_run_in_their_place_and_in_their_time() {
    let node = Node::start();
    let share = Share::new(&node);
    let hook = |kind: &str, script: &str| json!({"lifecycle": {kind: {"exec": {"command": ["sh", "-c", script]}}}});
    let traps =
        "trap 'echo term >> /share/$HOSTNAME; exit 0' TERM; echo start >> /share/$HOSTNAME; sleep 1000000 & wait";
    let write = |name: &str, containers: Vec<Value>, grace: u64| {
        let mut manifest = share.mounted(pod(name, containers));
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        node.write(&format!("{name}.yaml"), &manifest);
    };
    let post = hook("postStart", "sleep 2; echo hooked >> /share/post-e2e");
    write(
        "post",
        vec![
            with(container("a", "echo a >> /share/post-e2e; exec sleep 1000000"), post),
            container("b", "echo b >> /share/post-e2e; exec sleep 1000000"),
        ],
        1,
    );
    write(
        "pre",
        vec![with(
            container("c", traps),
            hook("preStop", "echo pre >> /share/pre-e2e; sleep 1; echo done >> /share/pre-e2e"),
        )],
        30,
    );
    write(
        "hangs",
        vec![with(container("c", "trap '' TERM; while :; do sleep 1; done"), hook("preStop", "sleep 1000"))],
        4,
    );
    write("fails", vec![with(container("c", traps), hook("postStart", "exit 3"))], 1);
    write("stuck", vec![with(container("c", traps), hook("postStart", "sleep 1000"))], 2);
    write("naps", vec![with(container("c", traps), json!({"lifecycle": {"preStop": {"sleep": {"seconds": 2}}}}))], 30);

    node.wait_pod("the first container of post is there", "post", |p| {
        of(p, "a").is_object() && share.read("post-e2e").contains('a')
    });
    let early = node.pod("post").unwrap();
    if !share.read("post-e2e").contains("hooked") {
        assert_eq!(condition(&early, "Ready"), "False", "ready before its hook ended");
    }
    node.wait_running("post");
    wait_until("b has begun", seconds(10), || share.read("post-e2e").contains('b').then_some(()));
    assert_eq!(share.lines("post-e2e"), ["a", "hooked", "b"]);

    let failing =
        node.wait_pod("a failed postStart hook: killed and started again", "fails", |p| restarts(p, "c") >= 1);
    assert!(share.read("fails-e2e").contains("term"), "not ended gracefully: {}", share.read("fails-e2e"));
    assert_ne!(condition(&failing, "Ready"), "True");
    node.wait_pod("and waits", "fails", |p| matches!(waiting(p, "c"), "CrashLoopBackOff" | "PostStartHookError"));
    assert!(node.log().contains("PostStartHook"), "the log does not say why");

    for name in ["pre", "hangs", "naps"] {
        node.wait_running(name);
    }
    wait_until("stuck has started", seconds(20), || share.read("stuck-e2e").contains("start").then_some(()));
    let uids = ["pre", "hangs", "naps", "stuck"].map(|name| uid(&node.pod(name).unwrap()));
    let began = Instant::now();
    for name in ["pre", "hangs", "naps", "stuck"] {
        node.remove(&format!("{name}.yaml"));
    }
    let mut took = [Duration::ZERO; 4];
    wait_until("all have ended", seconds(60), || {
        let alive: Vec<String> = node
            .containers()
            .into_iter()
            .filter(|c| c.state == ContainerState::ContainerRunning as i32)
            .filter_map(|c| c.labels.get("io.kubernetes.pod.uid").cloned())
            .collect();
        for (took, uid) in took.iter_mut().zip(&uids) {
            if took.is_zero() && !alive.contains(uid) {
                *took = began.elapsed();
            }
        }
        took.iter().all(|t| !t.is_zero()).then_some(())
    });
    let [pre, hangs, naps, stuck] = took.map(|t| t.as_secs_f64());
    println!("ended after: pre {pre:.1} s, hangs {hangs:.1} s, naps {naps:.1} s, stuck {stuck:.1} s");
    assert_eq!(share.lines("pre-e2e"), ["start", "pre", "done", "term"]);
    assert_eq!(share.lines("naps-e2e"), ["start", "term"]);
    assert!((1.0..15.0).contains(&pre), "{pre}");
    assert!((2.0..15.0).contains(&naps), "{naps}");
    // The hook's time comes off the grace; a little is left for the process when it used up all.
    assert!((4.0..4.0 + 2.0 + 6.0).contains(&hangs), "{hangs}");
    assert!(stuck < 12.0, "a postStart hook held up the end: {stuck}");
    for uid in uids {
        node.wait_gone(&uid, seconds(30));
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn probes_decide_about_readiness_restarts_and_the_start() {
    let mut node = Node::start();
    let share = Share::new(&node);
    let probe = |kind: &str, what: Value, threshold: u64| json!({kind: with(json!({"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": threshold}), what)});
    let exec = |script: &str| json!({"exec": {"command": ["sh", "-c", script]}});
    let web = "mkdir -p /w; echo ok > /w/ready; httpd -p 8080 -h /w; exec sleep 1000000";
    let http = json!({"httpGet": {"port": 8080, "path": "/ready"}});
    node.write(
        "ready.yaml",
        &pod("ready", [with(container("c", web), probe("readinessProbe", http, 1)), container("d", HOLD)]),
    );
    let lives =
        with(container("c", "touch /tmp/ok; exec sleep 1000000"), probe("livenessProbe", exec("test -e /tmp/ok"), 2));
    let tcp = with(
        container("c", "httpd -p 8080; exec sleep 1000000"),
        probe("livenessProbe", json!({"tcpSocket": {"port": 8080}, "initialDelaySeconds": 3}), 2),
    );
    node.write("lives.yaml", &pod("lives", [lives, container("d", HOLD)]));
    node.write("tcp.yaml", &pod("tcp", [tcp, container("d", HOLD)]));
    // Health comes after 4 s; until then neither readiness nor liveness may be asked.
    let slow = "rm -f /share/up; echo start >> /share/asked; (sleep 4; touch /share/up) & exec sleep 1000000";
    let gated = with(
        with(
            container("c", slow),
            probe(
                "startupProbe",
                exec("echo startup >> /share/asked; test -e /share/up && echo up >> /share/asked"),
                60,
            ),
        ),
        with(
            probe("livenessProbe", exec("echo live >> /share/asked; test -e /share/up"), 2),
            probe("readinessProbe", exec("echo ready >> /share/asked; test -e /share/up"), 1),
        ),
    );
    node.write("gated.yaml", &share.mounted(pod("gated", [gated])));
    node.write(
        "never-up.yaml",
        &pod("never-up", [with(container("c", HOLD), probe("startupProbe", exec("exit 1"), 3))]),
    );

    let first = node.wait_pod("ready by HTTP", "ready", |p| condition(p, "Ready") == "True");
    assert_eq!(of(&first, "c")["ready"], true);
    assert_eq!(node.exec("ready", "c", &["rm", "/w/ready"]).exit_code, 0);
    let not = node.wait_pod("not ready", "ready", |p| condition(p, "Ready") == "False");
    assert_eq!((of(&not, "c")["ready"].as_bool(), of(&not, "d")["ready"].as_bool()), (Some(false), Some(true)));
    assert_eq!(condition(&not, "ContainersReady"), "False");
    assert_eq!(restarts(&not, "c"), 0, "readiness restarts nothing");
    assert_eq!(node.exec("ready", "c", &["sh", "-c", "echo ok > /w/ready"]).exit_code, 0);
    node.wait_pod("ready again", "ready", |p| condition(p, "Ready") == "True");

    let before = [node.wait_running("lives"), node.wait_running("tcp")];
    assert_eq!(before.each_ref().map(|p| restarts(p, "c")), [0, 0]);
    assert_eq!(node.exec("lives", "c", &["rm", "/tmp/ok"]).exit_code, 0);
    assert_eq!(node.exec("tcp", "c", &["killall", "httpd"]).exit_code, 0);
    for (name, before) in ["lives", "tcp"].iter().zip(&before) {
        let after = node.wait_pod("liveness restarts the container", name, |p| restarts(p, "c") == 1 && runs(p, "c"));
        assert_eq!(id(&after, "d"), id(before, "d"), "{name}: its neighbour was restarted");
        assert_eq!(of(&after, "c")["lastState"]["terminated"]["exitCode"], 137);
    }
    let gave_up = node.wait_pod("a start that never succeeds is ended", "never-up", |p| restarts(p, "c") >= 1);
    assert_ne!(condition(&gave_up, "Ready"), "True");
    let log = node.log();
    assert!(log.contains("Container c failed liveness probe, will be restarted"));
    assert!(log.contains("Container c failed startup probe, will be restarted"));

    let gated = node.wait_pod("ready after its start", "gated", |p| condition(p, "Ready") == "True");
    assert_eq!((of(&gated, "c")["started"].as_bool(), restarts(&gated, "c")), (Some(true), 0));
    wait_until("asked all", seconds(10), || share.read("asked").contains("live").then_some(()));
    let gate = |lines: &[String]| {
        let up = lines.iter().position(|l| l == "up").unwrap();
        assert!(up >= 2 && lines[..up].iter().all(|l| l == "start" || l == "startup"), "{lines:#?}");
        let after: Vec<&String> = lines[up..].iter().filter(|l| *l == "startup").collect();
        assert!(after.is_empty(), "the startup probe went on after its success: {lines:#?}");
    };
    gate(&share.lines("asked"));
    // The next container of that name is gated as the first was (kubernetes/kubernetes#141155).
    std::fs::write(share.dir().join("asked"), "").unwrap();
    std::fs::remove_file(share.dir().join("up")).unwrap();
    node.wait_pod("liveness restarts the gated one", "gated", |p| restarts(p, "c") == 1);
    node.wait_pod("ready again", "gated", |p| condition(p, "Ready") == "True" && id(p, "c") != id(&gated, "c"));
    wait_until("asked all", seconds(10), || {
        let lines = share.lines("asked");
        let start = lines.iter().position(|l| l == "start")?;
        lines[start..].iter().any(|l| l == "live").then_some(())
    });
    let lines = share.lines("asked");
    gate(&lines[lines.iter().position(|l| l == "start").unwrap()..]);
    assert_eq!(restarts(&node.pod("gated").unwrap(), "c"), 1);

    // A new agent, without an API server to remember for it, probes before it says Ready; nothing is restarted for that.
    let before = ["ready", "gated", "lives"].map(|n| node.pod(n).unwrap());
    node.restart();
    for before in &before {
        let name = before["metadata"]["name"].as_str().unwrap();
        let after = node.wait_pod("ready again", name, |p| condition(p, "Ready") == "True");
        assert_eq!((id(&after, "c"), restarts(&after, "c")), (id(before, "c"), restarts(before, "c")), "{name}");
    }
}
