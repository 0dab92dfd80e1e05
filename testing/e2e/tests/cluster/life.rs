//! A pod's life in detail: probes, hooks, the end, what the spec asks of the runtime.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cri::RuntimeMutator;
use cri_api::v1::{Container, ContainerState};
use e2e::cluster::Cluster;
use e2e::status::{condition, id, of, restarts, runs, uid, waiting};
use e2e::{Share, container, pod, seconds, wait_until, with};
use rig::containerd::BUSYBOX;
use serde_json::{Value, json};

use crate::{SLEEP, nothing_left};

const DEAF: &str = "trap '' TERM; while :; do sleep .2; done";

fn exec(script: &str, more: Value) -> Value {
    with(json!({"exec": {"command": ["sh", "-c", script]}, "periodSeconds": 1, "timeoutSeconds": 5}), more)
}

fn graced(mut pod: Value, grace: i64) -> Value {
    pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
    pod
}

/// Deletes pods and tells after how many seconds each had nothing running any more; then waits until they are gone.
fn ends(cluster: &Cluster, names: &[&str]) -> Vec<f64> {
    let begin = Instant::now();
    for name in names {
        cluster.delete(name);
    }
    let mut took = vec![0.0; names.len()];
    wait_until("all have ended", seconds(60), || {
        let all = cluster.node.containers();
        let running = |name: &str| {
            let alive = |c: &&Container| c.state() == ContainerState::ContainerRunning;
            all.iter().filter(alive).any(|c| c.labels["io.kubernetes.pod.name"] == name)
        };
        for (took, name) in took.iter_mut().zip(names) {
            if *took == 0.0 && !running(name) {
                *took = begin.elapsed().as_secs_f64();
            }
        }
        took.iter().all(|t| *t > 0.0).then_some(())
    });
    for name in names {
        cluster.wait_gone(name, seconds(60));
    }
    took
}

/// A07: a hook takes its time off the grace; a failed one is told and changes nothing; a later, shorter grace counts.
pub(crate) fn hooks_at_the_end_take_no_more_than_the_grace(cluster: &mut Cluster) {
    let hook = |script: &str| json!({"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", script]}}}});
    let hooked = |name: &str, script: &str, what: &str| pod(name, [with(container("c", script), hook(what))]);
    cluster.run(&graced(hooked("hangs", DEAF, "sleep 1000"), 8));
    cluster.run(&graced(hooked("most", SLEEP, "sleep 5"), 10));
    cluster.run(&graced(hooked("fails", SLEEP, "exit 3"), 30));
    cluster.run(&graced(hooked("shortened", DEAF, "sleep 1000"), 600));
    for name in ["hangs", "most", "fails", "shortened"] {
        cluster.wait_running(name);
    }
    cluster.delete("shortened");
    let took = ends(cluster, &["hangs", "most", "fails"]);
    println!("{took:.1?}");
    assert!((7.5..8.0 + 2.0 + 6.0).contains(&took[0]), "hook and process together: {took:?}");
    assert!((4.5..9.5).contains(&took[1]), "the hook, then the process at once: {took:?}");
    assert!(took[2] < 8.0, "a hook that fails holds up nothing: {took:?}");
    let told = cluster.events("fails");
    assert!(told.contains(&("FailedPreStopHook".into(), "PreStopHook failed".into())), "{told:?}");
    assert!(cluster.pod("shortened").is_some());
    let begin = Instant::now();
    cluster.api().delete("/api/v1/namespaces/default/pods/shortened", &json!({"gracePeriodSeconds": 3})).unwrap();
    cluster.wait_gone("shortened", seconds(30));
    assert!(begin.elapsed() < seconds(12), "the later, shorter grace counts: {:?}", begin.elapsed());
}

/// A11: a pod whose postStart hook hangs is shown waiting, can be looked into, and ends when it is told to.
pub(crate) fn a_hook_at_the_start_that_hangs_holds_up_no_end(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let hook = |hook: Value| json!({"lifecycle": {"postStart": hook}});
    let start = "echo start >> /share/$HOSTNAME; trap 'exit 0' TERM; sleep 1000000 & wait";
    for (name, what) in [
        ("long", json!({"exec": {"command": ["sleep", "1000"]}})),
        ("nap", json!({"sleep": {"seconds": 600}})),
        ("nobody", json!({"httpGet": {"host": "127.0.0.1", "port": 1, "path": "/"}})),
        ("bad", json!({"exec": {"command": ["sh", "-c", "exit 1"]}})),
    ] {
        // The API wants a nap to be shorter than the grace.
        let grace = if name == "nap" { 700 } else { 5 };
        cluster.run(&graced(share.mounted(pod(name, [with(container("c", start), hook(what))])), grace));
    }
    for name in ["long", "nap"] {
        wait_until("it has started", seconds(30), || (!share.read(name).is_empty()).then_some(()));
    }
    std::thread::sleep(seconds(5));
    for name in ["long", "nap"] {
        let shown = cluster.pod(name).unwrap();
        assert_eq!(
            (waiting(&shown, "c"), of(&shown, "c")["started"].as_bool().unwrap_or_default()),
            ("ContainerCreating", false)
        );
    }
    let inside =
        &cluster.node.containers().into_iter().find(|c| c.labels["io.kubernetes.pod.name"] == "long").unwrap().id;
    let out =
        cluster.node.ask(cluster.node.cri().exec_sync(inside, vec!["echo".into(), "hi".into()], Some(seconds(20))));
    assert_eq!(out.stdout, b"hi\n", "it can be looked into meanwhile");
    let took = ends(cluster, &["long", "nap"]);
    println!("{took:.1?}");
    assert!(took.iter().all(|t| *t < 5.0 + 2.0 + 5.0), "{took:?}");
    for name in ["nobody", "bad"] {
        cluster.wait("the container is killed and waits", name, |p| {
            restarts(p, "c") >= 1 && ["CrashLoopBackOff", "PostStartHookError"].contains(&waiting(p, "c"))
        });
        let told = cluster.events(name);
        assert!(told.iter().any(|(reason, _)| reason == "FailedPostStartHook"), "{told:?}");
        assert!(
            told.iter().any(|(reason, text)| reason == "Killing" && text.contains("FailedPostStartHook")),
            "{told:?}"
        );
    }
}

/// A12: all four kinds go on until the end.
pub(crate) fn readiness_is_asked_while_a_pod_ends(cluster: &mut Cluster) {
    // On TERM the server goes away, and the process with it 15 s later.
    let server = "mkdir -p /w; echo ok > /w/ok; httpd -p 8080 -h /w; trap 'rm /w/ok; killall httpd; sleep 15; exit 0' TERM; while :; do sleep .2; done";
    let probe = |what: Value| json!({"readinessProbe": with(what, json!({"periodSeconds": 1, "failureThreshold": 1}))});
    let kinds = [
        ("exec", json!({"exec": {"command": ["test", "-e", "/w/ok"]}})),
        ("http", json!({"httpGet": {"port": 8080, "path": "/ok"}})),
        ("tcp", json!({"tcpSocket": {"port": 8080}})),
    ];
    for (name, what) in &kinds {
        let mut c = with(container("c", server), probe(what.clone()));
        c["livenessProbe"] = exec("test -e /w/ok", json!({"failureThreshold": 1}));
        cluster.run(&graced(pod(name, [c]), 40));
    }
    let before = kinds.each_ref().map(|(name, _)| cluster.wait_running(name));
    for (name, _) in &kinds {
        cluster.delete(name);
    }
    let began = Instant::now();
    for ((name, _), before) in kinds.iter().zip(&before) {
        let shown = cluster.wait("it is told that it is not ready", name, |p| condition(p, "Ready") == "False");
        assert!(began.elapsed() < seconds(10), "{name}: {:?}", began.elapsed());
        assert_eq!(condition(&shown, "ContainersReady"), "False", "{name}");
        assert!(runs(&shown, "c"), "{name} still runs");
        assert_eq!((id(&shown, "c"), restarts(&shown, "c")), (id(before, "c"), 0), "{name}");
    }
    for (name, _) in &kinds {
        cluster.wait_gone(name, seconds(60));
        let killed = cluster.events(name).iter().filter(|(reason, _)| reason == "Killing").count();
        assert_eq!(killed, 1, "{name}: liveness has no say any more");
    }
}

/// A15 and A16: what is found of a container is that container's, and outlives the kubelet.
pub(crate) fn probes_know_their_container(cluster: &mut Cluster) {
    let share = Share::new(&cluster.node);
    let slow = "rm -f /tmp/ok; echo start >> /share/log; (sleep 4; touch /tmp/ok; echo up >> /share/log) & while [ ! -e /share/die ]; do sleep .1; done; rm /share/die; exit 1";
    let asks = |what: &str| format!("echo {what} >> /share/log; test -e /tmp/ok");
    let c = with(
        container("c", slow),
        json!({
            "startupProbe": exec(&asks("startup"), json!({"failureThreshold": 60})),
            "livenessProbe": exec(&asks("live"), json!({"failureThreshold": 2})),
            "readinessProbe": exec(&asks("ready"), json!({"failureThreshold": 1})),
        }),
    );
    cluster.run(&share.mounted(pod("gated", [c])));
    let first = cluster.wait("it is ready", "gated", |p| condition(p, "Ready") == "True");
    cluster.exec(&first, "c", &["rm", "/tmp/ok"]);
    let second = cluster.wait("liveness restarts it, and it comes up", "gated", |p| {
        restarts(p, "c") == 1 && condition(p, "Ready") == "True"
    });
    share.put("die", "");
    cluster.wait("a crash restarts it, and it comes up", "gated", |p| {
        restarts(p, "c") == 2 && condition(p, "Ready") == "True" && id(p, "c") != id(&second, "c")
    });
    let lines = share.lines("log");
    for run in lines.split(|l| l == "start").skip(1) {
        // Each came up.
        let up = run.iter().position(|l| l == "up").unwrap();
        // The old container's last answers may still be on their way when the new one starts.
        let early: Vec<&String> = run[..up].iter().filter(|l| *l != "startup").collect();
        assert!(early.is_empty(), "asked before its own startup: {run:?}");
    }

    let startups = |share: &Share| share.lines("log").iter().filter(|l| *l == "startup").count();
    let (asked, before) = (startups(&share), cluster.pod("gated").unwrap());
    for _ in 0..2 {
        cluster.node.restart();
        let end = Instant::now() + seconds(4);
        while Instant::now() < end {
            let now = cluster.pod("gated").unwrap();
            assert_eq!((condition(&now, "Ready"), condition(&now, "ContainersReady")), ("True", "True"));
            assert_eq!(of(&now, "c")["started"], true);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let after = cluster.pod("gated").unwrap();
    assert_eq!((id(&after, "c"), restarts(&after, "c")), (id(&before, "c"), 2));
    assert_eq!(after["status"]["conditions"], before["status"]["conditions"], "with the times of their last changes");
    assert_eq!(startups(&share), asked, "it had started long ago");
}

/// Answers HTTP by path and notes what it was asked.
fn server(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let (port, asked) = (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<String>>>::default());
    let log = asked.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 2048];
            let n = stream.read(&mut head).unwrap_or(0);
            let path = String::from_utf8_lossy(&head[..n]).split(' ').nth(1).unwrap_or_default().to_owned();
            log.lock().unwrap().push(path.clone());
            let _ = stream.write_all(answer(&path).as_bytes());
        }
    });
    (port, asked)
}

fn http(status: u16, location: &str, body: &str) -> String {
    let location = if location.is_empty() { String::new() } else { format!("Location: {location}\r\n") };
    format!("HTTP/1.1 {status} X\r\n{location}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

/// A17, with the Go kubelet's words in the events.
pub(crate) fn http_probes_follow_redirects_on_the_same_host(cluster: &mut Cluster) {
    let (elsewhere, contacted) = server(|_| http(200, "", ""));
    let (port, asked) = server(move |path| match path {
        "/fine" => http(200, "", "ok"),
        "/same" => http(302, "/fine", ""),
        "/samebad" => http(302, "/bad", ""),
        "/other" => http(302, &format!("http://127.0.0.2:{elsewhere}/"), "moved"),
        "/loop" => http(302, "/loop", ""),
        "/big" => http(200, "", &"x".repeat(50 << 10)),
        "/odd" => http(399, "", ""),
        _ => http(500, "", "secret"),
    });
    let wanted = [
        ("fine", true),
        ("same", true),
        ("samebad", false),
        ("other", true),
        ("loop", false),
        ("big", true),
        ("odd", true),
        ("bad", false),
    ];
    let asks = |name: &str| json!({"readinessProbe": {"httpGet": {"host": "127.0.0.1", "port": port, "path": format!("/{name}")}, "periodSeconds": 1, "failureThreshold": 1}});
    cluster.run(&pod("redirects", wanted.map(|(name, _)| with(container(name, SLEEP), asks(name)))));
    let good = |p: &Value| wanted.iter().all(|(name, ready)| !ready || of(p, name)["ready"] == true);
    cluster.wait("the good ones are ready", "redirects", good);
    wait_until("all were asked", seconds(20), || {
        let asked = asked.lock().unwrap();
        wanted.iter().all(|(name, _)| asked.contains(&format!("/{name}"))).then_some(())
    });
    std::thread::sleep(seconds(2));
    let shown = cluster.pod("redirects").unwrap();
    for (name, ready) in wanted {
        assert_eq!(of(&shown, name)["ready"], ready, "{name}");
    }
    assert!(contacted.lock().unwrap().is_empty(), "another host was asked");
    let told = cluster.events("redirects");
    for (reason, text) in [
        ("ProbeWarning", "Readiness probe warning: Probe terminated redirects, Response body: moved"),
        ("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 500"),
        ("Unhealthy", "Readiness probe failed: Get \"/loop\": stopped after 10 redirects"),
    ] {
        assert!(told.contains(&(reason.into(), text.into())), "{text} is not among {told:?}");
    }
}

/// A18: a command that takes too long has failed, and a probe's own grace is for its own kill.
pub(crate) fn probes_that_take_too_long_have_failed(cluster: &mut Cluster) {
    let slow = exec("sleep 30", json!({"periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 3}));
    let probed = |name: &str, script: &str, kind: &str, probe: Value| {
        pod(name, [with(container("c", script), json!({kind: probe}))])
    };
    cluster.run(&probed("slow", SLEEP, "livenessProbe", slow.clone()));
    cluster.run(&probed("unready", SLEEP, "readinessProbe", slow));
    let much = exec("head -c 1048576 /dev/zero | tr '\\0' x", json!({}));
    cluster.run(&probed("much", SLEEP, "readinessProbe", much));
    let own = |file: &str| {
        exec(&format!("test ! -e {file}"), json!({"failureThreshold": 1, "terminationGracePeriodSeconds": 2}))
    };
    cluster.run(&graced(probed("deaf", DEAF, "livenessProbe", own("/tmp/bad")), 300));
    cluster.run(&graced(probed("calm", DEAF, "livenessProbe", own("/tmp/bad")), 300));
    let deaf = cluster.wait_running("deaf");
    cluster.wait_running("calm");
    cluster.exec(&deaf, "c", &["touch", "/tmp/bad"]);
    let begin = Instant::now();
    cluster.wait("killed within the probe's grace", "deaf", |p| restarts(p, "c") == 1 && runs(p, "c"));
    assert!(begin.elapsed() < seconds(15), "{:?}", begin.elapsed());
    cluster.wait("restarted after three", "slow", |p| restarts(p, "c") >= 1);
    let told = cluster.events("slow");
    let timed_out = "Liveness probe failed: command timed out: \"sh -c sleep 30\" timed out after 1s";
    assert!(told.contains(&("Unhealthy".into(), timed_out.into())), "{told:?}");
    assert!(
        told.contains(&("Killing".into(), "Container c failed liveness probe, will be restarted".into())),
        "{told:?}"
    );
    assert_eq!(condition(&cluster.pod("unready").unwrap(), "Ready"), "False");
    cluster.wait_running("much");
    cluster.delete("calm");
    std::thread::sleep(seconds(6));
    // The pod's own grace counts for its end.
    let calm = cluster.pod("calm").unwrap();
    assert!(runs(&calm, "c"));
    cluster.api().delete("/api/v1/namespaces/default/pods/calm", &json!({"gracePeriodSeconds": 0})).unwrap();
    nothing_left(cluster, &uid(&calm));
}

/// The runtime's handler that a class names, the volume that is an image, and user namespaces where the runtime has none.
pub(crate) fn the_runtime_is_asked_for_classes_and_images(cluster: &mut Cluster) {
    for (name, handler) in [("plain", "runc"), ("unknown", "no-such-handler")] {
        let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler});
        cluster.api().create("/apis/node.k8s.io/v1/runtimeclasses", &class).unwrap();
    }
    let of_class = |name: &str, class: &str| {
        let mut pod = pod(name, [container("c", SLEEP)]);
        pod["spec"]["runtimeClassName"] = json!(class);
        pod
    };
    cluster.run(&of_class("classed", "plain"));
    cluster.run(&of_class("misclassed", "unknown"));
    let mut image = pod("imaged", [container("c", "ls /image/bin/sh && exec sleep 1000000")]);
    image["spec"]["volumes"] = json!([{"name": "i", "image": {"reference": BUSYBOX, "pullPolicy": "IfNotPresent"}},
        {"name": "none", "image": {"reference": "lab.test/none:1", "pullPolicy": "Never"}}]);
    image["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "i", "mountPath": "/image"}]);
    let mut without = image.clone();
    without["metadata"]["name"] = json!("unimaged");
    without["spec"]["containers"][0]["volumeMounts"][0]["name"] = json!("none");
    cluster.run(&image);
    cluster.run(&without);
    cluster.wait_running("classed");
    let sandbox =
        cluster.node.sandboxes().into_iter().find(|s| s.metadata.as_ref().unwrap().name == "classed").unwrap();
    assert_eq!(sandbox.runtime_handler, "runc");
    let running = cluster.wait_running("imaged");
    assert!(
        cluster.exec(&running, "c", &["sh", "-c", "echo x > /image/x || echo refused"]).contains("refused"),
        "it is read-only"
    );
    cluster.wait("its image may not be pulled", "unimaged", |p| waiting(p, "c") == "ErrImageNeverPull");
    wait_until("the runtime refuses the handler", seconds(30), || {
        let refused = |e: &(String, String)| e.0 == "FailedCreatePodSandBox" && e.1.contains("no-such-handler");
        cluster.events("misclassed").iter().any(refused).then_some(())
    });
    let mut own = pod("own-users", [container("c", "cat /proc/self/uid_map; exec sleep 1000000")]);
    own["spec"]["hostUsers"] = json!(false);
    cluster.run(&own);
    let supports = cluster.get_node()["status"]["runtimeHandlers"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|h| h["name"].as_str().unwrap_or_default().is_empty() && h["features"]["userNamespaces"] == true);
    if supports {
        let pod = cluster.wait_running("own-users");
        let map = cluster.exec(&pod, "c", &["cat", "/proc/self/uid_map"]);
        let words: Vec<&str> = map.split_whitespace().collect();
        assert_eq!((words[0], words[2]), ("0", "65536"), "{map}");
        assert_ne!(words[1], "0");
    } else {
        wait_until("user namespaces are refused", seconds(30), || {
            let text = "Failed to create pod sandbox: can't set `spec.hostUsers: false`, runtime does not support user namespaces";
            cluster.events("own-users").contains(&("FailedCreatePodSandBox".into(), text.into())).then_some(())
        });
    }
    for name in ["plain", "unknown"] {
        cluster.api().delete(&format!("/apis/node.k8s.io/v1/runtimeclasses/{name}"), &Value::Null).unwrap();
    }
}
