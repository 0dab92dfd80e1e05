//! What is asked of the kubelet's port through the API server: logs, pages; and who may use the port.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::SLEEP;

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// True when the tests are to do as much as they can, and take minutes: `RUBELET_E2E_FULL=1`.
pub(crate) fn full() -> bool {
    std::env::var_os("RUBELET_E2E_FULL").is_some()
}

pub(crate) fn a_log_is_followed_over_rotations(cluster: &mut Cluster) {
    // The runtime's log is looked at every 3 s at the most, so this many rotations take a while.
    let (lines, rotations) = if full() { (64_000, 20) } else { (12_000, 3) };
    let usual = rotate_often(cluster);
    let print = format!(
        "i=0; while [ $i -lt {lines} ]; do echo n$i; i=$((i+1)); [ $((i%200)) = 0 ] && sleep 0.3; done; sleep 1"
    );
    let mut manifest = pod("lines", [container("c", &print)]);
    manifest["spec"]["restartPolicy"] = json!("Never");
    cluster.run(&manifest);
    let running = cluster.wait_running("lines");
    let uid = running["metadata"]["uid"].as_str().unwrap();
    let dir = cluster.node.logs().join(format!("default_lines_{uid}/c"));
    let ended = AtomicBool::new(false);
    let (followed, rotated) = std::thread::scope(|scope| {
        // Old files go, so they are counted while they come.
        let counts = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !ended.load(Ordering::Relaxed) {
                let names = std::fs::read_dir(&dir).into_iter().flatten().flatten();
                let names = names.filter_map(|e| {
                    e.file_name().to_str()?.split_once("0.log.").map(|(_, t)| t.get(..15).unwrap_or(t).to_owned())
                });
                seen.extend(names);
                std::thread::sleep(Duration::from_millis(500));
            }
            seen.len()
        });
        let plane = &cluster.plane;
        let stamped = scope.spawn(|| plane.kubectl(["logs", "-f", "--timestamps", "lines"]).unwrap());
        let newest = scope.spawn(|| plane.kubectl(["logs", "-f", "--tail=10", "lines"]).unwrap());
        let recent = scope.spawn(|| plane.kubectl(["logs", "-f", "--since=1s", "lines"]).unwrap());
        let followed = cluster.kubectl(&["logs", "-f", "lines"]);
        let (stamped, newest) = (text(&stamped.join().unwrap().stdout), text(&newest.join().unwrap().stdout));
        let recent = text(&recent.join().unwrap().stdout);
        ended.store(true, Ordering::Relaxed);
        let plain: Vec<&str> = stamped.lines().map(|l| l.split_once(' ').unwrap().1).collect();
        assert!(plain.iter().zip(0..).all(|(l, n)| *l == format!("n{n}")) && plain.len() == lines, "{}", plain.len());
        let last: Vec<&str> = newest.lines().collect();
        let begin = lines - last.len();
        assert!(last.len() > 10 && last.iter().zip(begin..).all(|(l, n)| *l == format!("n{n}")), "{begin}");
        let begin = lines - recent.lines().count();
        assert!(begin < lines && recent.lines().zip(begin..).all(|(l, n)| l == format!("n{n}")), "{begin}");
        (followed, counts.join().unwrap())
    });
    let expected: Vec<String> = (0..lines).map(|n| format!("n{n}")).collect();
    let given = text(&followed.stdout);
    let given: Vec<&str> = given.lines().collect();
    let first = given.iter().zip(&expected).position(|(g, e)| g != e);
    assert!(given == expected, "{} lines, the first other one is {first:?}", given.len());
    assert!(rotated >= rotations, "the log was rotated {rotated} times");
    as_usual(cluster, usual);
}

/// Has small logs rotated as often as they are looked at; answers how it was before.
fn rotate_often(cluster: &mut Cluster) -> Vec<(&'static str, Value)> {
    let often = [("containerLogMaxSize", json!("20Ki")), ("containerLogMonitorInterval", json!("3s"))];
    let usual = often.iter().map(|(key, _)| (*key, cluster.node.config()[key].clone())).collect();
    as_usual(cluster, often.to_vec());
    usual
}

fn as_usual(cluster: &mut Cluster, fields: Vec<(&'static str, Value)>) {
    for (key, value) in fields {
        cluster.node.configure(key, value);
    }
    cluster.node.restart();
    cluster.wait_ready();
}

/// A container that ended, its log rotated meanwhile, and that was started anew; asked for after a restart of the kubelet.
pub(crate) fn the_log_of_the_container_before(cluster: &mut Cluster) {
    // The last of them come without a pause: there is no time to rotate between them and the end.
    const LINES: usize = 6100;
    let usual = rotate_often(cluster);
    let script = format!(
        "if [ -e /e/before ]; then echo second; {SLEEP}; fi; touch /e/before; i=0; \
         while [ $i -lt {LINES} ]; do echo first $i; i=$((i+1)); [ $((i%400)) = 0 ] && sleep 1; done; exit 3"
    );
    let mut manifest =
        pod("again", [with(container("c", &script), json!({"volumeMounts": [{"name": "e", "mountPath": "/e"}]}))]);
    manifest["spec"]["volumes"] = json!([{"name": "e", "emptyDir": {}}]);
    let uid = cluster.run(&manifest)["metadata"]["uid"].as_str().unwrap().to_owned();
    cluster.wait("the second container runs", "again", |p| {
        let status = &p["status"]["containerStatuses"][0];
        status["restartCount"] == 1 && status["state"]["running"].is_object()
    });
    cluster.node.restart();
    cluster.wait_ready();
    let logs = |more: &[&str]| {
        let out = cluster.kubectl(&[&["logs", "again"], more].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    };
    assert_eq!(logs(&[]), "second\n");
    // The newest of its files, as the Go kubelet shows it.
    let before = logs(&["--previous"]);
    let begin = LINES - before.lines().count();
    assert!(begin > 0 && begin < LINES, "{begin}");
    assert!(before.lines().zip(begin..).all(|(l, n)| l == format!("first {n}")), "{before}");
    let last = format!("first {}\nfirst {}\n", LINES - 2, LINES - 1);
    assert_eq!(logs(&["--previous", "--tail=2"]), last);
    // Nobody writes to it any more: to follow it is to read it.
    assert_eq!(logs(&["--previous", "--follow"]), before);
    assert_eq!(logs(&["--previous", "--since=1h"]), before);
    let stamped = logs(&["--previous", "--timestamps"]);
    // kubectl asks by the second.
    let second = &stamped.lines().last().unwrap()[..19];
    let since: String = stamped
        .lines()
        .filter(|l| &l[..19] >= second)
        .map(|l| l.split_once(' ').unwrap().1.to_owned() + "\n")
        .collect();
    assert_eq!(logs(&["--previous", &format!("--since-time={second}Z")]), since);
    assert_eq!(logs(&["--previous", "--limit-bytes=7"]), before[..7]);

    // The older ones are compressed, and as much others' as the newest.
    let dir = cluster.node.logs().join(format!("default_again_{uid}/c"));
    let files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap()).collect();
    let mode = |f: &std::fs::DirEntry| f.metadata().unwrap().permissions().mode() & 0o7777;
    let of = |f: &std::fs::DirEntry| f.file_name().into_string().unwrap();
    let newest = files.iter().find(|f| of(f) == "0.log").unwrap();
    assert!(files.iter().any(|f| of(f).starts_with("0.log.") && of(f).ends_with(".gz")), "{files:?}");
    assert!(files.iter().all(|f| mode(f) == mode(newest)), "{files:?}");
    as_usual(cluster, usual);
}

/// Those who follow a container that prints nothing, and go.
pub(crate) fn followers_that_go_leave_nothing(cluster: &mut Cluster) {
    cluster.run(&pod("quiet", [container("c", SLEEP)]));
    cluster.wait_running("quiet");
    let before = watches(cluster);
    let many = if full() { 50 } else { 10 };
    let mut followers: Vec<_> = (0..many)
        .map(|_| {
            let mut command = cluster.plane.kubectl_command();
            command.args(["logs", "-f", "quiet"]).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap()
        })
        .collect();
    wait_until("the log is watched", seconds(30), || (watches(cluster) > before).then_some(()));
    for follower in &mut followers {
        follower.kill().unwrap();
        follower.wait().unwrap();
    }
    wait_until("nothing is watched any more", seconds(30), || (watches(cluster) <= before).then_some(()));
}

/// Files and directories that the kubelet has the kernel watch.
fn watches(cluster: &Cluster) -> usize {
    let infos = std::fs::read_dir(format!("/proc/{}/fdinfo", cluster.node.pid())).into_iter().flatten().flatten();
    let texts = infos.filter_map(|e| std::fs::read_to_string(e.path()).ok());
    texts.map(|t| t.lines().filter(|l| l.starts_with("inotify wd:")).count()).sum()
}

/// Only with `RUBELET_E2E_FULL`: 1,000 followers that come and go, and 1 GB through a session, leave no memory behind.
pub(crate) fn memory_stays_flat(cluster: &mut Cluster) {
    if !full() {
        return;
    }
    cluster.run(&pod("much", [container("c", &format!("seq 1 20000; {SLEEP}"))]));
    cluster.wait_running("much");
    let kubectl = cluster.plane.kubectl_command();
    let config = kubectl.get_envs().find(|(n, _)| *n == "KUBECONFIG").unwrap().1.unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let file = |name: &str| config["users"][0]["user"][name].as_str().unwrap().to_owned();
    let node = cluster.get_node();
    let address = node["status"]["addresses"][0]["address"].as_str().unwrap();
    let url = format!("https://{address}:{}/containerLogs/default/much/c?follow=true", cluster.node.port("port"));
    let follow = |times: usize| {
        let script = format!(
            "seq {times} | xargs -P 50 -I N curl -sk -o /dev/null --max-time 1 --cert {} --key {} '{url}'",
            file("client-certificate"),
            file("client-key")
        );
        // Each ends by its time limit, which curl counts as a failure.
        std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
    };
    let pass = || {
        let out = cluster.kubectl(&["exec", "much", "--", "sh", "-c", "head -c 1000000000 /dev/zero"]);
        assert_eq!(out.stdout.len(), 1_000_000_000, "{}", text(&out.stderr));
    };
    let held = || {
        // Twice a minute, what bursts leave free is given back.
        std::thread::sleep(Duration::from_secs(35));
        let status = std::fs::read_to_string(format!("/proc/{}/status", cluster.node.pid())).unwrap();
        let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap()
    };
    // What is made once (certificates checked, threads, the allocator's pools) is not what is looked for.
    follow(100);
    let begin = held();
    follow(1000);
    let followed = held();
    pass();
    let passed = held();
    println!("anonymous memory in kB: {begin}, after 1,000 followers {followed}, after 1 GB {passed}");
    assert!((followed - begin).abs() <= 2048 && (passed - followed).abs() <= 2048, "{begin} {followed} {passed}");
}

pub(crate) fn the_port_is_for_those_who_may(cluster: &mut Cluster) {
    cluster.run(&pod("shown", [container("c", SLEEP)]));
    cluster.wait_running("shown");
    let node = cluster.get_node();
    let address = node["status"]["addresses"].as_array().unwrap().iter().find(|a| a["type"] == "InternalIP").unwrap();
    let server = format!("--server=https://{}:{}", address["address"].as_str().unwrap(), cluster.node.port("port"));
    let token = text(&cluster.kubectl(&["create", "token", "default"]).stdout);
    let ask = |token: &str, path: &str| {
        let token = format!("--token={}", token.trim());
        let mut command = cluster.plane.kubectl_command();
        command.env("KUBECONFIG", "/dev/null").args([
            "--insecure-skip-tls-verify",
            &server,
            &token,
            "get",
            "--raw",
            path,
        ]);
        let out = command.output().unwrap();
        (out.status.success(), text(&out.stdout) + &text(&out.stderr))
    };
    let (ok, why) = ask("made-up", "/pods");
    assert!(!ok && why.contains("must be logged in"), "{why}");
    let forbidden =
        "Forbidden (user=system:serviceaccount:default:default, verb=get, resource=nodes, subresource(s)=[pods proxy])";
    let (ok, why) = ask(&token, "/pods");
    assert!(!ok && why.contains(forbidden), "{why}");
    for arguments in [
        &["create", "clusterrole", "shows-pods", "--verb=get", "--resource=nodes/pods"][..],
        &["create", "clusterrolebinding", "shows-pods", "--clusterrole=shows-pods", "--serviceaccount=default:default"],
    ] {
        let made = cluster.kubectl(arguments);
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    // A denial is remembered for half a minute.
    let (_, pods) = wait_until("the right is seen", seconds(45), || Some(ask(&token, "/pods")).filter(|(ok, _)| *ok));
    assert!(pods.contains("\"kind\":\"PodList\"") && pods.contains("shown"), "{pods}");
    let (ok, why) = ask(&token, "/containerLogs/default/shown/c");
    assert!(!ok && why.contains("subresource(s)=[proxy])"), "{why}");
    cluster.kubectl(&["delete", "clusterrolebinding/shows-pods", "clusterrole/shows-pods"]);
}

/// What an operator asks of the node itself.
pub(crate) fn pages_of_the_node(cluster: &mut Cluster) {
    cluster.run(&pod("seen", [container("c", SLEEP)]));
    cluster.wait_running("seen");
    // The API server's own client has no right to these unless it is given one.
    let (role, binding) = ("clusterrole/asks-nodes", "clusterrolebinding/asks-nodes");
    for arguments in [
        &["create", "clusterrole", "asks-nodes", "--verb=get,create", "--resource=nodes/statusz,nodes/checkpoint"][..],
        &[
            "create",
            "clusterrolebinding",
            "asks-nodes",
            "--clusterrole=asks-nodes",
            "--user=kube-apiserver-kubelet-client",
        ],
    ] {
        let made = cluster.kubectl(arguments);
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    let raw = |path: &str| {
        let out = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy{path}", e2e::NODE)]);
        (text(&out.stdout), text(&out.stderr))
    };
    let (page, why) = raw("/flagz");
    assert!(page.contains("kubelet flagz") && page.contains("hostname-override"), "{page}{why}");
    let (page, why) = raw("/statusz");
    assert!(page.contains("Binary version") && page.contains("1.36.1"), "{page}{why}");
    let (page, why) = raw("/logs/");
    assert!(page.starts_with("<!doctype html>\n<meta name=\"viewport\""), "{page}{why}");
    let (_, why) = raw("/logs/none/such");
    assert!(why.contains("could not find the requested resource"), "{why}");
    // No criu here, so the runtime says no; what asked it and how its answer comes back is the same.
    let path = format!("/api/v1/nodes/{}/proxy/checkpoint/default/seen/c", e2e::NODE);
    let refused = cluster.kubectl(&["create", "--raw", &path, "-f", "/dev/null"]);
    assert!(text(&refused.stderr).contains("checkpointing of default/seen/c failed (rpc error: "), "{refused:?}");
    cluster.kubectl(&["delete", binding, role]);
    if crate::is_rubelet(cluster) {
        let (page, why) = raw("/debug/pods");
        assert!(page.contains("<small>default/</small>seen") && page.contains("<title>sandbox: after "), "{page}{why}");
        let (page, why) = raw("/debug/pprof/goroutine");
        assert!(page.contains(" alive, "), "{page}{why}");
    }
}
