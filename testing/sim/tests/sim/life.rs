//! The ordinary ways of a pod's life.

use fakes::{Fault, For, Process, Rule};
use serde_json::json;
use sim::{Container, Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis, newest, running_id, starts, up};

#[test]
fn one_pod_from_manifest_to_gone() {
    run(async {
        let mut node = Node::new(1).await;
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        assert!(node.until(SECOND, |n| n.phase(&uid) == "Running").await);
        node.settle(10 * SECOND).await;
        node.remove("a.yaml");
        assert!(node.until(SECOND, |n| n.is_gone(&uid)).await);
        node.settle(SECOND).await;
        // A file system that never knew it.
        let standing = node.host().standing();
        assert!(standing.dirs.is_empty() && standing.cgroups.is_empty() && standing.logs.is_empty());
    });
}

#[test]
fn qos_levels_are_made_before_the_pods_below_them() {
    run(async {
        let mut node = Node::without_agent(Setup { seed: 7, ..Default::default() });
        for n in 0..10 {
            node.write(&format!("{n}.yaml"), &Manifest::new(&format!("p{n}")));
        }
        node.start().await;
        assert!(node.until(10 * SECOND, |n| n.entries().len() == 10 && n.missing().is_empty()).await);
        let standing = node.host().standing();
        assert_eq!((standing.levels.len(), standing.early.len()), (3, 0), "{:?}", standing.early);
    });
}

/// What a container is made with is on record before the runtime is asked, as the Go kubelet's is: also of one that the runtime refuses, or cannot start.
#[test]
fn what_cannot_start_has_its_resources_on_record() {
    run(async {
        let mut node = Node::new(8).await;
        for (call, container) in [("CreateContainer", "/uncreated"), ("StartContainer", "/unstarted")] {
            node.runtime().inject(Rule::new(call, Fault::Fail(2, "no such profile".into())).about(container));
        }
        let manifest = Manifest::new("a").apps([Container::new("uncreated"), Container::new("unstarted")]);
        node.write("a.yaml", &manifest);
        node.run(5 * SECOND).await;
        let uid = node.uid("a.yaml");
        let actuated = node.checkpoint(pod::admit::ACTUATED);
        let names: Vec<&str> = actuated[&uid].containers.keys().map(String::as_str).collect();
        assert_eq!(names, ["uncreated", "unstarted"]);
    });
}

/// A pod that a device plugin holds up is shown with what it waits for, and holds up no other.
#[test]
fn a_pod_that_waits_for_its_admission_is_shown() {
    run(async {
        let mut node = Node::new(10).await;
        node.world().waiting.hold("uid-held");
        let held = Manifest::new("held").uid("uid-held");
        node.write("a.yaml", &held);
        up(&mut node, "b.yaml", &Manifest::new("b")).await;
        let find = |node: &Node| node.shown().into_iter().find(|e| e.uid.as_str() == "uid-held");
        {
            let entry = find(&node).expect("it is no secret");
            let view = entry.view();
            assert_eq!(view.status.phase.as_deref(), Some("Pending"));
            assert_eq!(view.timeline().last().map(|s| s.kind), Some(model::timeline::StepKind::Admit));
            assert!(view.waits_for.iter().any(|w| w.contains("plugin")), "{:?}", view.waits_for);
        }
        // Taken away it is forgotten; it comes back, and runs when the plugin answers.
        node.remove("a.yaml");
        node.run(SECOND).await;
        assert!(find(&node).is_none());
        node.write("a.yaml", &held);
        node.run(SECOND).await;
        assert!(find(&node).is_some());
        node.world().waiting.release();
        assert!(node.until(5 * SECOND, |n| n.phase("uid-held") == "Running").await);
        let entry = find(&node).unwrap();
        assert!(entry.view().waits_for.is_empty());
        drop(entry);
        node.settle(MINUTE).await;
    });
}

#[test]
fn init_containers_and_sidecars_in_order() {
    run(async {
        let mut node = Node::new(2).await;
        let pod = "order-sim".to_owned();
        let lasting = |s: u32| [Process::exits(0, s * SECOND)];
        node.runtime().script(For::PodContainer(pod.clone(), "one".into()), lasting(3));
        node.runtime().script(For::PodContainer(pod, "three".into()), lasting(2));
        let manifest = Manifest::new("order").init("one").sidecar("two").init("three").sidecar("four").grace(30);
        let uid = up(&mut node, "a.yaml", &manifest).await;
        let at = |name: &str| starts(&node, &uid, name)[0].round();
        assert_eq!(["one", "two", "three", "four", "app"].map(at), [0.0, 3.0, 3.0, 5.0, 5.0]);

        // Stopped in reverse: the app, then the sidecars from the last to the first.
        node.runtime().forget_calls();
        node.remove("a.yaml");
        assert!(node.until(10 * SECOND, |n| n.is_gone(&uid)).await);
        let stopped: Vec<String> = node.runtime().calls_of("StopContainer").into_iter().map(|c| c.subject).collect();
        assert_eq!(stopped, ["default/order-sim/app", "default/order-sim/four", "default/order-sim/two"]);
        node.settle(SECOND).await;
    });
}

#[test]
fn a_sidecar_waits_for_deaf_apps_within_its_grace() {
    run(async {
        let mut node = Node::new(3).await;
        node.runtime().script(For::Container("app".into()), [Process::forever().ignoring_term()]);
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").sidecar("side").grace(6)).await;
        let began = node.world().at();
        node.remove("a.yaml");
        assert!(node.until(20 * SECOND, |n| n.is_gone(&uid)).await);
        let took = (node.world().at() - began).as_secs_f64();
        // The app is killed after its grace; the sidecar has the minimum left.
        assert!((6.0..8.5).contains(&took), "{took}");
        node.settle(SECOND).await;
    });
}

#[test]
fn restart_policies() {
    run(async {
        let mut node = Node::new(4).await;
        for (file, policy, code, phase, count) in [
            ("a", "Never", 0, "Succeeded", 1),
            ("b", "Never", 3, "Failed", 1),
            ("c", "OnFailure", 0, "Succeeded", 1),
            ("d", "OnFailure", 3, "Running", 3),
            ("e", "Always", 0, "Running", 3),
        ] {
            node.runtime()
                .script(For::PodContainer(format!("{file}-sim"), "app".into()), [Process::exits(code, SECOND)]);
            let file = format!("{file}.yaml");
            node.write(&file, &Manifest::new(&file[..1]).policy(policy));
            let uid = node.uid(&file);
            node.run(15 * SECOND).await;
            assert_eq!(
                (node.phase(&uid).as_str(), node.runtime().starts(&uid, "app")),
                (phase, count),
                "{policy} {code}"
            );
        }
        // What is complete stays so, also for the next agent.
        let uid = node.uid("a.yaml");
        node.restart(SECOND).await;
        node.run(10 * MINUTE).await;
        assert_eq!((node.phase(&uid).as_str(), node.runtime().starts(&uid, "app")), ("Succeeded", 1));
        let standing = node.host().standing();
        assert!(
            standing.mounts.iter().all(|(owner, _)| owner.as_str() != uid),
            "volumes of a complete pod are unmounted"
        );
        assert!(standing.cgroups.keys().all(|owner| owner.as_str() != uid));
        assert!(standing.dirs.iter().any(|owner| owner.as_str() == uid), "its directory stays with its manifest");
        node.assert_sound();
        for file in ["a.yaml", "b.yaml", "c.yaml", "d.yaml", "e.yaml"] {
            node.remove(file);
        }
        node.settle(MINUTE).await;
    });
}

#[test]
fn a_pod_that_loses_its_sandbox_gets_another() {
    run(async {
        let mut node = Node::new(5).await;
        node.runtime().script(For::Container("init".into()), [Process::exits(0, SECOND)]);
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").init("init").sidecar("side")).await;
        let first = node.runtime().sandboxes()[0].id.clone();
        node.runtime().end_sandbox(&first);
        assert!(node.until(MINUTE, |n| n.runtime().sandboxes().iter().any(|s| s.id != first) && n.all_run(&uid)).await);
        let ready: Vec<_> = node.runtime().sandboxes().into_iter().filter(|s| s.id != first).collect();
        assert_eq!(ready.len(), 1);
        assert_eq!(ready[0].metadata.as_ref().unwrap().attempt, 1);
        // Every count went on, though the records of the init containers went with the sandbox.
        for name in ["init", "side", "app"] {
            assert_eq!(newest(&node, &uid, name).metadata.unwrap().attempt, 1, "{name}");
        }
        node.settle(MINUTE).await;
    });
}

#[test]
fn restart_all_containers_keeps_the_counts() {
    run(async {
        let mut node = Node::new(6).await;
        let rules = json!([{ "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [88] } }]);
        let app = Container::new("app").with("restartPolicy", json!("Never")).with("restartPolicyRules", rules);
        let lives = [Process::exits(88, 5 * SECOND), Process::exits(88, 5 * SECOND), Process::forever()];
        node.runtime().script(For::Container("app".into()), lives);
        node.runtime().script(For::Container("init".into()), [Process::exits(0, SECOND)]);
        let manifest = Manifest::new("all").init("init").apps([app, Container::new("other")]);
        node.write("a.yaml", &manifest);
        let uid = node.uid("a.yaml");
        node.run(2 * MINUTE).await;
        assert_eq!(node.running(&uid).len(), 2, "{:?}", node.world().asked(40));
        for name in ["init", "app", "other"] {
            assert_eq!(newest(&node, &uid, name).metadata.unwrap().attempt, 2, "{name}");
        }
        assert_eq!(node.runtime().sandboxes().len(), 1, "the sandbox stays");
    });
}

#[test]
fn the_end_of_a_pod_cuts_a_pull_short() {
    run(async {
        let mut node = Node::new(7).await;
        node.runtime().add_remote_image("registry.local/app:1", 10 * MINUTE, None);
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        node.run(5 * SECOND).await;
        assert_eq!(node.phase(&uid), "Pending");
        node.remove("a.yaml");
        assert!(node.until(SECOND, |n| n.is_gone(&uid)).await);
        node.settle(SECOND).await;
    });
}

#[test]
fn a_corrected_image_does_not_wait_for_the_wrong_one() {
    run(async {
        let mut node = Node::new(8).await;
        node.runtime().add_remote_image("registry.local/wrong", 60 * MINUTE, None);
        let with = |image: &str| Manifest::new("a").uid("fixed").apps([Container::new("app").image(image)]);
        node.write("a.yaml", &with("registry.local/wrong"));
        node.run(5 * SECOND).await;
        node.write("a.yaml", &with("registry.local/right:1"));
        assert!(node.until(SECOND, |n| n.all_run("fixed")).await, "{:?}", node.world().asked(20));
        node.settle(SECOND).await;
    });
}

#[test]
fn a_pull_that_fails_backs_off_alone() {
    run(async {
        let mut node = Node::new(9).await;
        node.runtime().inject(fakes::Rule::new("PullImage", fakes::Fault::Fail(2, "no such host".into())).about("bad"));
        let bad = Container::new("bad").image("registry.local/bad:1");
        node.write("a.yaml", &Manifest::new("a").apps([bad, Container::new("good")]));
        let uid = node.uid("a.yaml");
        node.run(200 * SECOND).await;
        assert_eq!(node.running(&uid), ["good"]);
        // At 0, 10, 30, 70, 150 s.
        assert_eq!(node.runtime().calls_of("PullImage").iter().filter(|c| c.subject.contains("bad")).count(), 5);
        node.runtime().heal();
        assert!(node.until(3 * MINUTE, |n| n.all_run(&uid)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn a_failing_liveness_probe_restarts_one_container() {
    run(async {
        let mut node = Node::new(10).await;
        let sick = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let told = sick.clone();
        node.runtime().script_exec("app", move |_| {
            let exit_code = i32::from(told.load(std::sync::atomic::Ordering::Relaxed));
            fakes::Exec { output: cri::ExecOutput { exit_code, ..Default::default() }, takes: millis(10) }
        });
        let probe = json!({ "exec": { "command": ["check"] }, "periodSeconds": 2, "failureThreshold": 3 });
        let app = Container::new("app").with("livenessProbe", probe);
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").apps([app, Container::new("other")])).await;
        let (app, other) = (running_id(&node, &uid, "app"), running_id(&node, &uid, "other"));
        node.run(MINUTE).await;
        assert_eq!(running_id(&node, &uid, "app"), app, "well, so left alone");
        sick.store(true, std::sync::atomic::Ordering::Relaxed);
        let restarted = |n: &Node| n.runtime().starts(&uid, "app") == 2;
        assert!(node.until(10 * SECOND, restarted).await);
        sick.store(false, std::sync::atomic::Ordering::Relaxed);
        node.run(MINUTE).await;
        assert_eq!(node.runtime().starts(&uid, "app"), 2);
        assert_eq!(running_id(&node, &uid, "other"), other);
        node.assert_sound();
    });
}

#[test]
fn a_host_that_fails_holds_up_its_pod_only() {
    run(async {
        let mut node = Node::new(11).await;
        node.host().inject(sim::HostRule::new("mount_volumes", sim::HostFault::Hang).about("stuck"));
        node.write("a.yaml", &Manifest::new("a").uid("stuck"));
        node.run(SECOND).await;
        up(&mut node, "b.yaml", &Manifest::new("b").uid("free")).await;
        node.remove("b.yaml");
        assert!(node.until(SECOND, |n| n.is_gone("free")).await);
        assert_eq!(node.phase("stuck"), "Pending");
        node.assert_sound();
    });
}

#[test]
fn an_orphaned_directory_that_hangs_holds_up_nobody() {
    run(async {
        let mut node = Node::new(12).await;
        up(&mut node, "a.yaml", &Manifest::new("a").uid("left")).await;
        node.kill();
        // While no agent looks, the pod goes and the runtime forgets it, but its directory stays, with a mount that hangs.
        node.remove("a.yaml");
        node.runtime().reboot(millis(0));
        for s in node.runtime().sandboxes() {
            cri::RuntimeMutator::remove_pod_sandbox(node.runtime(), &s.id).await.unwrap();
        }
        node.host().inject(sim::HostRule::new("remove_pod_dir", sim::HostFault::Hang).about("left"));
        node.start().await;
        node.run(SECOND).await;
        up(&mut node, "b.yaml", &Manifest::new("b").uid("free")).await;
        node.remove("b.yaml");
        assert!(node.until(SECOND, |n| n.is_gone("free")).await);
        // The mount comes back to life with the next agent.
        node.host().heal();
        node.restart(SECOND).await;
        node.settle(2 * MINUTE).await;
    });
}

#[test]
fn an_orderly_stop_leaves_containers_alone() {
    run(async {
        let mut node = Node::new(13).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let id = running_id(&node, &uid, "app");
        node.runtime().forget_calls();
        assert!(node.drain(5 * SECOND).await);
        node.run(10 * SECOND).await;
        node.start().await;
        node.run(MINUTE).await;
        assert_eq!(running_id(&node, &uid, "app"), id);
        assert_eq!(node.runtime().changes(), []);
        node.settle(SECOND).await;
    });
}
