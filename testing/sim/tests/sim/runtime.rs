//! A runtime that is slow, down, restarted, too talkative, or loses answers.

use cri::client::MAX_ANSWER;
use cri_api::v1::ContainerState;
use fakes::{Fault, For, Process, Rule};
use sim::{Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis, running_id, up};

fn ids(node: &Node) -> Vec<String> {
    let running = |c: &cri_api::v1::ContainerStatus| c.state() == ContainerState::ContainerRunning;
    node.runtime().containers().into_iter().filter(running).map(|c| c.id).collect()
}

#[test]
fn answers_that_are_too_large() {
    run(async {
        let mut node = Node::new(1).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        up(&mut node, "b.yaml", &Manifest::new("b")).await;
        assert_eq!(node.not_ready(), None);
        let before = ids(&node);
        // Up to the client's limit all is fine.
        node.runtime().inject(Rule::new("ListContainers", Fault::Pad(MAX_ANSWER)));
        node.run(5 * MINUTE).await;
        assert_eq!(node.not_ready(), None);
        node.runtime().heal();
        node.runtime().inject(Rule::new("ListContainers", Fault::Pad(MAX_ANSWER + 1)));
        node.run(4 * MINUTE + 500 * millis(1)).await;
        let told = node.not_ready().unwrap();
        let (head, tail) = told.split_once(" ago; ").unwrap();
        assert!(
            head.starts_with("PLEG is not healthy: pleg was last seen active 3m") || head.contains("active 4m"),
            "{told}"
        );
        assert_eq!(tail, "threshold is 3m0s");
        let error = node.health().error.unwrap();
        assert!(error.contains("grpc: received message larger than max (16777217 vs. 16777216)"), "{error}");
        assert_eq!(ids(&node), before, "pods are left alone");
        node.runtime().heal();
        assert!(node.until(2 * SECOND, |n| n.not_ready().is_none()).await, "it heals with the next good pass");
        assert_eq!(ids(&node), before);
        assert_eq!(node.phase(&uid), "Running");
        node.settle(MINUTE).await;
    });
}

#[test]
fn down_for_a_minute_at_the_start() {
    run(async {
        let mut node = Node::without_agent(Setup::default());
        node.runtime().restart(MINUTE);
        node.start().await;
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        node.run(40 * SECOND).await;
        let told = node.not_ready().unwrap();
        assert!(told.contains("container runtime status check may not have completed yet"), "{told}");
        node.run(21 * SECOND).await;
        assert!(node.until(10 * SECOND, |n| n.all_run(&uid)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn unreachable_for_a_minute() {
    run(async {
        let mut node = Node::new(3).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let doomed = up(&mut node, "b.yaml", &Manifest::new("b")).await;
        let before = running_id(&node, &uid, "app");
        node.runtime().go_down();
        node.run(35 * SECOND).await;
        assert!(node.not_ready().unwrap().contains("container runtime is down"), "{:?}", node.not_ready());
        // What is asked for meanwhile is done afterwards.
        node.remove("b.yaml");
        node.write("c.yaml", &Manifest::new("c"));
        let new = node.uid("c.yaml");
        node.run(25 * SECOND).await;
        node.runtime().come_up();
        assert!(node.until(20 * SECOND, |n| n.not_ready().is_none() && n.all_run(&new) && n.is_gone(&doomed)).await);
        assert_eq!(running_id(&node, &uid, "app"), before);
        node.settle(MINUTE).await;
    });
}

/// Restarted at every moment of a start, a pull and an end: ids and counts of what runs stay, and what was interrupted is done.
#[test]
fn restarted_in_the_middle_of_everything() {
    run(async {
        for step in 0..14u64 {
            let mut node = Node::new(step).await;
            let still = up(&mut node, "a.yaml", &Manifest::new("a").sidecar("side")).await;
            node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 2 * SECOND)]);
            let ending = up(&mut node, "b.yaml", &Manifest::new("b").grace(10)).await;
            let before = (running_id(&node, &still, "app"), running_id(&node, &still, "side"));
            // Every call takes a while, so that the restart hits each of them.
            for call in ["RunPodSandbox", "CreateContainer", "StartContainer", "StopPodSandbox", "RemovePodSandbox"] {
                node.runtime().inject(Rule::new(call, Fault::Delay(millis(400))));
            }
            node.runtime().add_remote_image("registry.local/new:1", SECOND, None);
            let fresh =
                Manifest::new("c").init("init").apps([sim::Container::new("app").image("registry.local/new:1")]);
            node.runtime().script(For::Container("init".into()), [Process::exits(0, millis(300))]);
            node.write("c.yaml", &fresh);
            node.remove("b.yaml");
            node.run(millis(250 * step)).await;
            node.runtime().restart(millis(300));
            let starting = node.uid("c.yaml");
            let done = |n: &Node| n.all_run(&starting) && n.is_gone(&ending);
            assert!(node.until(40 * SECOND, done).await, "step {step}: {:?}", node.missing());
            assert_eq!((running_id(&node, &still, "app"), running_id(&node, &still, "side")), before);
            node.runtime().heal();
            node.settle(MINUTE).await;
        }
    });
}

/// containerd 2 cannot remove a container whose start was cut off at a certain moment, until it is restarted (containerd issue 11037). All else of the
/// pod goes, the same manifest can come back, and what is left is asked for ever more rarely, until it can go.
#[test]
fn a_container_that_the_runtime_does_not_remove() {
    run(async {
        let mut node = Node::new(8).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let id = running_id(&node, &uid, "app");
        let refusal = Fault::Fail(9, format!("cannot delete running task {id}: failed precondition"));
        node.runtime().inject(Rule::new("RemoveContainer", refusal).about("/app"));
        node.remove("a.yaml");
        let only_in_runtime = |n: &Node| {
            let left = n.leftovers(|u| u == uid);
            let kept = ["container", "sandbox", "entry"];
            !left.is_empty() && left.iter().all(|l| kept.iter().any(|k| l.starts_with(k)))
        };
        assert!(node.until(40 * SECOND, only_in_runtime).await, "{:?}", node.leftovers(|u| u == uid));
        node.run(5 * MINUTE).await;
        let tries = |n: &Node| n.runtime().calls().iter().filter(|c| c.call == "RemoveContainer").count();
        let before = tries(&node);
        node.run(10 * MINUTE).await;
        let often = tries(&node) - before;
        assert!((6..=25).contains(&often), "{often} tries in ten minutes");
        assert!(!node.runtime().changes().iter().any(|c| c.call == "RemovePodSandbox"), "its container is still in it");
        // The pod itself is not held up.
        let again = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        assert_eq!(again, uid);
        node.runtime().heal();
        node.settle(5 * MINUTE).await;
    });
}

#[test]
fn stopped_for_four_minutes() {
    run(async {
        let mut node = Node::new(5).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let before = ids(&node);
        let down = node.world().at();
        node.runtime().inject(Rule::new("*", Fault::Hang));
        // Events stay away as well.
        node.runtime().configure(|s| s.lost_events = 1.0);
        node.run(4 * MINUTE).await;
        let told = node.not_ready().unwrap();
        assert!(told.contains("container runtime is down"), "{told}");
        assert!(told.contains("PLEG is not healthy: pleg was last seen active "), "{told}");
        node.runtime().heal();
        node.runtime().configure(|s| s.lost_events = 0.0);
        // Calls that hang end by their own deadline of two minutes.
        assert!(node.until(3 * MINUTE, |n| n.not_ready().is_none()).await, "{:?}", node.not_ready());
        assert!(node.world().at() - down < 7 * MINUTE);
        assert_eq!(ids(&node), before, "no kills");
        assert_eq!(node.phase(&uid), "Running");
        node.settle(3 * MINUTE).await;
    });
}

#[test]
fn no_network_for_a_while() {
    run(async {
        let mut node = Node::new(6).await;
        let running = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let network = |node: &Node, ready: bool| {
            node.runtime().configure(|s| {
                for c in s.status.status.iter_mut().flat_map(|s| &mut s.conditions) {
                    if c.r#type == "NetworkReady" {
                        c.status = ready;
                        (c.reason, c.message) = match ready {
                            true => (String::new(), String::new()),
                            false => ("NetworkPluginNotReady".into(), "cni plugin not initialized".into()),
                        };
                    }
                }
            });
        };
        network(&node, false);
        node.run(6 * SECOND).await;
        let told = node.not_ready().unwrap();
        assert_eq!(
            told,
            "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:cni plugin not initialized"
        );
        up(&mut node, "host.yaml", &Manifest::new("host").on_host_network()).await;
        node.write("own.yaml", &Manifest::new("own"));
        let own = node.uid("own.yaml");
        node.run(MINUTE).await;
        assert!(node.containers(&own).is_empty(), "it waits");
        assert_eq!(node.running(&running), ["app"], "what runs, runs on");
        network(&node, true);
        assert!(node.until(7 * SECOND, |n| n.all_run(&own)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn lost_answers() {
    run(async {
        for call in [
            "RunPodSandbox",
            "CreateContainer",
            "StartContainer",
            "StopContainer",
            "StopPodSandbox",
            "RemoveContainer",
            "RemovePodSandbox",
            "PullImage",
        ] {
            for fault in [Fault::LoseAnswer, Fault::DoAndHang] {
                for times in [1, 3] {
                    if call == "PullImage" && fault == Fault::DoAndHang {
                        // A pull has no deadline: the runtime itself ends one that hangs.
                        continue;
                    }
                    let mut node = Node::new(7).await;
                    node.runtime().inject(Rule::new(call, fault.clone()).times(times));
                    let manifest = Manifest::new("a").init("init").sidecar("side");
                    node.runtime().script(For::Container("init".into()), [Process::exits(0, SECOND)]);
                    node.write("a.yaml", &manifest);
                    let uid = node.uid("a.yaml");
                    let limit = 15 * MINUTE;
                    assert!(
                        node.until(limit, |n| n.all_run(&uid)).await,
                        "{call} {fault:?} {times}: {:?}",
                        node.missing()
                    );
                    assert_eq!(node.runtime().sandboxes().len(), 1, "{call} {fault:?} {times}");
                    node.remove("a.yaml");
                    assert!(
                        node.until(limit, |n| n.is_gone(&uid)).await,
                        "{call} {fault:?} {times}: {:?}",
                        node.missing()
                    );
                    node.assert_sound();
                }
            }
        }
    });
}

/// A process that no signal ends: its pod is Terminating for as long as it takes, and nobody else waits.
#[test]
fn a_process_that_does_not_die() {
    run(async {
        let mut node = Node::new(8).await;
        node.runtime().script(For::PodContainer("a-sim".into(), "app".into()), [Process::forever().unkillable()]);
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").grace(2)).await;
        let id = running_id(&node, &uid, "app");
        node.world().unkillable(&id);
        node.remove("a.yaml");
        node.run(10 * MINUTE).await;
        assert_eq!(node.running(&uid), ["app"]);
        up(&mut node, "b.yaml", &Manifest::new("b")).await;
        node.runtime().exit(&id, 137);
        assert!(node.until(4 * MINUTE, |n| n.is_gone(&uid)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn the_machine_reboots() {
    run(async {
        let mut node = Node::new(9).await;
        node.runtime().script(For::Container("init".into()), [Process::exits(0, SECOND)]);
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").init("init").sidecar("side")).await;
        node.kill();
        node.runtime().reboot(millis(0));
        node.run(30 * SECOND).await;
        node.start().await;
        assert!(node.until(10 * SECOND, |n| n.all_run(&uid)).await);
        let ready =
            node.runtime().sandboxes().into_iter().filter(|s| s.metadata.as_ref().unwrap().attempt == 1).count();
        assert_eq!(ready, 1);
        node.settle(2 * MINUTE).await;
    });
}
