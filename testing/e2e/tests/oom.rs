//! What the kernel kills when a container takes more memory than it may have: on cgroup v2 the whole container, unless `singleProcessOOMKill` says
//! otherwise; on cgroup v1 one process (A33).
#![allow(clippy::unwrap_used)]

use e2e::status::{of, phase, restarts, runs, waiting};
use e2e::{Node, Options, container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

/// Takes 100 MiB at once.
const EATS: &str = "dd if=/dev/zero of=/dev/null bs=100M count=1";
const HOLD: &str = "exec sleep 1000000";

fn limited(name: &str, script: &str) -> Value {
    with(container(name, script), json!({"resources": {"limits": {"memory": "32Mi"}}}))
}

/// The reason and the exit code of how the container last ended.
fn last(pod: &Value, container: &str) -> (String, i64) {
    let status = of(pod, container);
    let ended = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    let ended = ended.into_iter().find(|t| t.is_object()).unwrap_or(&Value::Null);
    (ended["reason"].as_str().unwrap_or_default().to_owned(), ended["exitCode"].as_i64().unwrap_or(-1))
}

fn killed() -> (String, i64) {
    ("OOMKilled".to_owned(), 137)
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_container_that_eats_is_killed_and_says_so() {
    let node = Node::start();
    node.write("main.yaml", &pod("main", [limited("c", &format!("exec {EATS}"))]));
    let pod_of = |manifest: &Value, policy: &str| with_policy(manifest.clone(), policy);
    let init = |name: &str| {
        let mut manifest = pod(name, [container("c", HOLD)]);
        manifest["spec"]["initContainers"] = json!([limited("i", &format!("exec {EATS}"))]);
        manifest
    };
    node.write("never.yaml", &pod_of(&init("never"), "Never"));
    node.write("always.yaml", &pod_of(&init("always"), "Always"));
    let failed = node.wait_pod("its init container is not tried again", "never", |p| phase(p) == "Failed");
    assert_eq!((last(&failed, "i"), restarts(&failed, "i")), (killed(), 0));
    assert!(!runs(&failed, "c"));
    // With back-off, again and again.
    for (name, c) in [("main", "c"), ("always", "i")] {
        let found = node.wait_pod("it is killed and waits", name, |p| {
            restarts(p, c) >= 2 && waiting(p, c) == "CrashLoopBackOff" && last(p, c) == killed()
        });
        assert_ne!(phase(&found), "Failed");
    }
}

fn with_policy(mut manifest: Value, policy: &str) -> Value {
    manifest["spec"]["restartPolicy"] = json!(policy);
    manifest
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn one_process_or_all_of_them() {
    let unified = rig::cgroup::unified();
    let ways: &[(Option<bool>, bool)] =
        if unified { &[(None, true), (Some(true), false)] } else { &[(None, false), (Some(true), false)] };
    for &(single, all) in ways {
        let options = match single {
            Some(single) => Options::default().config(json!({"singleProcessOOMKill": single})),
            None => Options::default(),
        };
        let node = Node::with(options);
        // Said once, by a container that has not been killed yet.
        let child = format!("{EATS}; echo child ended with $?; {HOLD}");
        node.write("child.yaml", &with_policy(pod("child", [limited("c", &child)]), "Never"));
        node.write("quiet.yaml", &with_policy(pod("quiet", [limited("c", HOLD)]), "Never"));
        if all {
            let found = node.wait_pod("all of it is killed", "child", |p| phase(p) == "Failed");
            assert_eq!(last(&found, "c"), killed(), "{single:?}");
            assert!(!node.container_log(&found, "c").contains("child ended"));
        } else {
            let found = node.wait_running("child");
            wait_until("the child is killed", seconds(30), || {
                node.container_log(&found, "c").contains("child ended with 137").then_some(())
            });
            let still = node.pod("child").unwrap();
            assert!(runs(&still, "c") && restarts(&still, "c") == 0, "{still}");
        }
        if unified {
            let quiet = node.wait_running("quiet");
            let group = node.exec("quiet", "c", &["sh", "-c", "cat /sys/fs/cgroup/memory.oom.group"]);
            assert_eq!(String::from_utf8_lossy(&group.stdout).trim(), if all { "1" } else { "0" }, "{quiet}");
        }
        // A process that came by exec is one of the container's.
        node.wait_running("quiet");
        // It says in the container's log that it ended: another exec could itself be what the kernel kills.
        let eats = format!("({EATS}; echo ended with $? > /proc/1/fd/1) > /dev/null 2>&1 &");
        node.exec("quiet", "c", &["sh", "-c", &eats]);
        if all {
            let found = node.wait_pod("all of it is killed", "quiet", |p| phase(p) == "Failed");
            assert_eq!(last(&found, "c"), killed());
        } else {
            let still = node.pod("quiet").unwrap();
            wait_until("the process is killed", seconds(30), || {
                node.container_log(&still, "c").contains("ended with 137").then_some(())
            });
            let still = node.pod("quiet").unwrap();
            assert!(runs(&still, "c") && restarts(&still, "c") == 0, "{still}");
        }
    }
}
