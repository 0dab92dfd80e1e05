//! Restart delays and restart counts.

use cri_api::v1::ContainerState;
use fakes::{For, Process};
use sim::{Container, Manifest, Node, run};

use super::{MINUTE, SECOND, newest, running_id, up};

/// Seconds between each end of `app` and its next start, as they come within this time; dead containers may go meanwhile.
async fn waits(node: &mut Node, uid: &str, minutes: u32) -> Vec<u64> {
    let mut seen: std::collections::BTreeMap<String, (i64, i64)> = Default::default();
    for _ in 0..minutes * 12 {
        node.run(5 * SECOND).await;
        for c in node.containers(uid) {
            if c.metadata.as_ref().is_some_and(|m| m.name == "app") {
                seen.insert(c.id.clone(), (c.started_at, c.finished_at));
            }
        }
    }
    let lives: Vec<_> = seen.into_values().collect();
    lives.windows(2).map(|pair| (pair[1].0 - pair[0].1) as u64 / 1_000_000_000).collect()
}

#[test]
fn the_curve() {
    run(async {
        let mut node = Node::new(1).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(1, SECOND)]);
        node.write("a.yaml", &Manifest::new("a").apps([Container::new("app"), Container::new("other")]));
        let uid = node.uid("a.yaml");
        let all = waits(&mut node, &uid, 26).await;
        assert_eq!(all[..9], [0, 10, 20, 40, 80, 160, 300, 300, 300]);
        // The other container never noticed, and what is dead was collected.
        assert_eq!(node.runtime().starts(&uid, "other"), 1);
        assert!(node.containers(&uid).len() <= 4, "{:?}", node.containers(&uid));
        node.assert_sound();
    });
}

#[test]
fn a_clean_exit_waits_as_well() {
    run(async {
        let mut node = Node::new(2).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(0, SECOND)]);
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        assert_eq!(waits(&mut node, &uid, 3).await[..4], [0, 10, 20, 40]);
        node.assert_sound();
    });
}

#[test]
fn a_long_run_wipes_the_slate() {
    run(async {
        let mut node = Node::new(3).await;
        let (short, long) = (Process::exits(1, SECOND), Process::exits(1, 11 * MINUTE));
        node.runtime().script(For::Container("app".into()), [short.clone(), short.clone(), short.clone(), long, short]);
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        assert_eq!(waits(&mut node, &uid, 13).await[..6], [0, 10, 20, 0, 10, 20]);
        node.assert_sound();
    });
}

/// What a wait is for is shown, and it holds up neither the other containers nor the pod's end.
#[test]
fn others_do_not_wait() {
    run(async {
        let mut node = Node::new(4).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(1, SECOND)]);
        node.write("a.yaml", &Manifest::new("a").apps([Container::new("app"), Container::new("other")]));
        let uid = node.uid("a.yaml");
        node.run(200 * SECOND).await;
        let status = node.status(&uid);
        let app = status.container_statuses.iter().flatten().find(|c| c.name == "app").unwrap().clone();
        let waiting = app.state.unwrap().waiting.unwrap();
        assert_eq!(waiting.reason.as_deref(), Some("CrashLoopBackOff"));
        let message = format!("back-off 2m40s restarting failed container=app pod=a-sim_default({uid})");
        assert_eq!(waiting.message, Some(message));
        assert_eq!(app.last_state.unwrap().terminated.unwrap().exit_code, 1);
        assert_eq!(app.restart_count, 5);

        // Another container of the pod ends in the middle of the wait.
        let other = running_id(&node, &uid, "other");
        let at = node.world().at();
        node.runtime().exit(&other, 1);
        assert!(node.until(SECOND, |n| n.running(&uid).contains(&"other".to_owned())).await);
        assert!(node.world().at() - at < SECOND);
        assert_eq!(node.runtime().starts(&uid, "app"), 6, "and the first one goes on waiting");

        node.remove("a.yaml");
        assert!(node.until(6 * SECOND, |n| n.is_gone(&uid)).await);
        node.settle(SECOND).await;
    });
}

#[test]
fn counts_never_fall() {
    run(async {
        let mut node = Node::new(5).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(1, SECOND)]);
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        let mut highest = 0;
        for round in 0..12 {
            node.run(100 * SECOND).await;
            let shown =
                node.status(&uid).container_statuses.iter().flatten().map(|c| c.restart_count).max().unwrap_or(0);
            assert!(shown >= highest, "round {round}: shown {highest}, then {shown}");
            highest = shown;
            // Somebody cleans up; now and then in the middle of a restart of the agent.
            for c in node.containers(&uid).into_iter().filter(|c| c.state() == ContainerState::ContainerExited) {
                cri::RuntimeMutator::remove_container(node.runtime(), &c.id).await.unwrap();
            }
            if round % 3 == 2 {
                node.restart(2 * SECOND).await;
            }
            node.assert_sound();
        }
        assert!(highest >= 5, "{highest}");
        let runs = node.runtime().starts(&uid, "app");
        node.runtime().script(For::Container("app".into()), [Process::forever()]);
        node.settle(6 * MINUTE).await;
        let attempt = newest(&node, &uid, "app").metadata.unwrap().attempt;
        assert!(attempt as usize >= runs, "{attempt} after {runs} runs");
    });
}

/// A new agent knows nothing of the waits of the old one, as with Go; the curve begins anew and the counts go on.
#[test]
fn an_agent_restarts_in_the_middle_of_a_wait() {
    run(async {
        let mut node = Node::new(6).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(1, SECOND)]);
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        node.run(200 * SECOND).await;
        assert_eq!(newest(&node, &uid, "app").metadata.unwrap().attempt, 5);
        node.restart(SECOND).await;
        node.run(SECOND / 2).await;
        assert_eq!(newest(&node, &uid, "app").metadata.unwrap().attempt, 6);
        // The first is that between the old and the new agent.
        assert_eq!(waits(&mut node, &uid, 2).await[1..4], [10, 20, 40]);
        node.assert_sound();
    });
}

#[test]
fn another_image_is_a_fresh_start() {
    run(async {
        let mut node = Node::new(7).await;
        let app = |image: &str| Manifest::new("a").uid("fixed").apps([Container::new("app").image(image)]);
        node.runtime().script(For::Container("app".into()), [Process::exits(1, SECOND)]);
        node.write("a.yaml", &app("registry.local/bad:1"));
        node.run(200 * SECOND).await;
        node.runtime().script(For::Container("app".into()), [Process::forever()]);
        let uid = up(&mut node, "a.yaml", &app("registry.local/good:1")).await;
        assert!(node.running(&uid) == ["app"]);
        node.settle(SECOND).await;
    });
}
