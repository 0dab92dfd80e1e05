//! Pods with volumes across deaths of the agent, of the driver, of both; and the hand-over between agents.

use std::path::PathBuf;

use e2e::cluster::Cluster;
use e2e::{container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

use crate::driver::{Driver, claim, run_attached};
use crate::faults::one;
use crate::growth::{grow, wait_grown};
use crate::volumes::{SLEEP, assert_nothing_left, mounts};

/// Identity of every container of the pods: id and restarts.
fn containers(cluster: &Cluster, names: &[String]) -> Vec<Value> {
    let state = |name: &String| {
        let pod = cluster.pod(name).unwrap_or_default();
        let c = &pod["status"]["containerStatuses"][0];
        json!([name, c["containerID"], c["restartCount"], c["state"]["running"].is_object()])
    };
    names.iter().map(state).collect()
}

/// Twenty pods: plain, attached, read-only, a part of a volume, inline.
fn twenty(cluster: &Cluster) -> Vec<String> {
    let mut names = Vec::new();
    for n in 0..20 {
        let name = format!("many-{n}");
        let mut p = one(&name, &name);
        let mount = &mut p["spec"]["containers"][0]["volumeMounts"][0];
        match n % 5 {
            0 => drop(claim(cluster, "many.csi.test", &name, &json!({}))),
            1 => drop(claim(cluster, "held.csi.test", &name, &json!({}))),
            2 => {
                claim(cluster, "many.csi.test", &name, &json!({"accessModes": ["ReadOnlyMany"]}));
                p["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = json!(true);
            }
            3 => {
                claim(cluster, "many.csi.test", &name, &json!({}));
                mount["subPath"] = json!("part/of/it");
            }
            _ => p["spec"]["volumes"] = json!([{"name": "v", "csi": {"driver": "many.csi.test"}}]),
        }
        cluster.run(&p);
        names.push(name);
    }
    names
}

pub(crate) fn twenty_pods(cluster: &mut Cluster) {
    let modes = json!({"attachRequired": false, "volumeLifecycleModes": ["Persistent", "Ephemeral"]});
    let mut many = Driver::start(cluster, "many.csi.test", &modes, &[]);
    let mut held = Driver::start(cluster, "held.csi.test", &json!({"attachRequired": true}), &[]);
    many.wait_registered(cluster);
    held.wait_registered(cluster);
    let names = twenty(cluster);
    for name in &names {
        run_attached(cluster, name);
    }
    let stood = containers(cluster, &names);
    let (there, in_use) = (mounts(cluster), cluster.get_node()["status"]["volumesInUse"].clone());
    assert_eq!(in_use.as_array().map_or(0, Vec::len), 4, "{in_use}");
    // 16 staged, 20 published, 4 parts.
    assert_eq!(there.iter().filter(|m| m.ends_with("/globalmount")).count(), 16);
    assert_eq!(there.iter().filter(|m| m.ends_with("/mount")).count(), 20);

    grow(cluster, "many-0", "2Gi");
    grow(cluster, "many-1", "2Gi");
    wait_grown(cluster, "many-0", "2Gi");
    wait_grown(cluster, "many-1", "2Gi");
    // One that grows while all that could see its end die.
    many.faults(&json!({"NodeExpandVolume": {"handle": "many-5", "hang": true}}));
    grow(cluster, "many-5", "2Gi");
    wait_until("the driver is asked to let it grow", seconds(60), || {
        many.calls()
            .iter()
            .any(|c| c["method"] == "NodeExpandVolume>" && c["request"]["volume_id"] == "many-5-handle")
            .then_some(())
    });
    many.faults(&json!({}));
    for (what, agent, drivers) in [("the agent", true, false), ("the drivers", false, true), ("both", true, true)] {
        let published = many.answered("NodePublishVolume", "many-0-handle").len();
        if drivers {
            many.kill();
            held.kill();
        }
        if agent {
            cluster.node.kill();
        }
        if drivers {
            many.run();
            held.run();
        }
        if agent {
            cluster.node.run();
            cluster.wait_ready();
            wait_until(&format!("volumes are looked after, after the death of {what}"), seconds(60), || {
                (many.answered("NodePublishVolume", "many-0-handle").len() > published).then_some(())
            });
        }
        assert_eq!(containers(cluster, &names), stood, "after the death of {what}");
        assert_eq!(mounts(cluster), there, "after the death of {what}");
        // Never less; right after a start, perhaps more.
        wait_until(&format!("the attached volumes are in use, after the death of {what}"), seconds(30), || {
            let now = cluster.get_node()["status"]["volumesInUse"].clone();
            let all = in_use.as_array().unwrap().iter().all(|v| now.as_array().is_some_and(|n| n.contains(v)));
            assert!(all, "{now} without some of {in_use}");
            (now == in_use).then_some(())
        });
    }
    wait_grown(cluster, "many-5", "2Gi");
    // A container that ends is started again with its volumes; one that starts while nobody answers waits for them.
    let pod = cluster.pod("many-3").unwrap();
    cluster.exec(&pod, "c", &["sh", "-c", "echo data > /v/file; kill 1"]);
    let again = cluster.wait("it is started again", "many-3", |p| {
        p["status"]["containerStatuses"][0]["restartCount"] == 1
            && p["status"]["containerStatuses"][0]["state"]["running"].is_object()
    });
    assert_eq!(cluster.exec(&again, "c", &["cat", "/v/file"]), "data\n");

    // Pods end while the driver dies in the middle of it, and the agent too.
    many.faults(&json!({"NodeUnpublishVolume": {"handle": "many-0", "crash_after": true}}));
    for name in &names {
        cluster.delete(name);
    }
    wait_until("the driver has died", seconds(60), || many.ended().then_some(()));
    cluster.node.kill();
    many.faults(&json!({}));
    many.run();
    cluster.node.run();
    for name in &names {
        cluster.wait_gone(name, seconds(90));
    }
    assert_nothing_left(cluster);
}

pub(crate) fn hand_over(cluster: &mut Cluster) {
    let go: PathBuf = rig::lab().join("bin/kubelet");
    if !go.is_file() {
        println!("skipped: not built: lab/build-reference kubelet");
        return;
    }
    let plain = Driver::start(cluster, "plain.csi.test", &json!({"attachRequired": false}), &[]);
    let held = Driver::start(cluster, "held.csi.test", &json!({"attachRequired": true}), &[]);
    plain.wait_registered(cluster);
    held.wait_registered(cluster);
    let own = cluster.node.program().to_owned();
    claim(cluster, "plain.csi.test", "one", &json!({}));
    claim(cluster, "held.csi.test", "two", &json!({}));
    let main = with(
        container("c", SLEEP),
        json!({"volumeMounts": [{"name": "one", "mountPath": "/one", "subPath": "part"}, {"name": "two", "mountPath": "/two"}]}),
    );
    let mut p = pod("moved", [main]);
    p["spec"]["terminationGracePeriodSeconds"] = json!(1);
    p["spec"]["volumes"] = json!([{"name": "one", "persistentVolumeClaim": {"claimName": "one"}},
        {"name": "two", "persistentVolumeClaim": {"claimName": "two"}}]);
    let turn = |cluster: &mut Cluster, program: &PathBuf| {
        let before = plain.answered("NodePublishVolume", "one-handle").len();
        cluster.node.stop();
        cluster.node.set_program(program.clone());
        cluster.node.run();
        cluster.wait_ready();
        wait_until("the next agent looks after the volumes", seconds(60), || {
            let asked = plain.answered("NodePublishVolume", "one-handle").len();
            (asked > before || cluster.pod("moved").is_none()).then_some(())
        });
    };
    cluster.run(&p);
    run_attached(cluster, "moved");
    let names = ["moved".to_owned()];
    let (stood, there) = (containers(cluster, &names), mounts(cluster));
    assert_eq!(there.len(), 5, "{there:#?}");
    for program in [&go, &own, &go] {
        turn(cluster, program);
        assert_eq!(mounts(cluster), there, "with {}", program.display());
        assert_eq!(containers(cluster, &names), stood, "with {}", program.display());
        for (driver, handle) in [(&plain, "one-handle"), (&held, "two-handle")] {
            for method in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
                assert!(driver.answered(method, handle).is_empty(), "{method} with {}", program.display());
            }
        }
    }
    // What this agent made, the other one takes down.
    cluster.delete("moved");
    cluster.wait_gone("moved", seconds(60));
    assert_nothing_left(cluster);
    turn(cluster, &own);
}
