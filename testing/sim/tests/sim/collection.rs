//! Dead containers: how many stay, and what goes when somebody asks.

use std::time::Duration;

use cri_api::v1::ContainerState;
use fakes::{Fault, For, Process, Rule};
use pod::registry::Collect;
use sim::{HostFault, HostRule, Manifest, Node, run};
use tokio::sync::oneshot;

use super::{MINUTE, SECOND, up};

fn dead(node: &Node, uid: &str) -> usize {
    node.containers(uid).iter().filter(|c| c.state() == ContainerState::ContainerExited).count()
}

/// Asks the workers of all pods, and waits until they have done it.
async fn remove_unused(node: &mut Node) {
    let answers: Vec<_> = node
        .entries()
        .iter()
        .map(|entry| {
            let (done, answer) = oneshot::channel();
            entry.collect(Collect::Unused(done));
            answer
        })
        .collect();
    node.run(5 * SECOND).await;
    for mut answer in answers {
        // Dropped is answered.
        assert_ne!(answer.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    }
}

#[test]
fn a_pod_that_lives_keeps_one_of_each_name() {
    run(async {
        let mut node = Node::new(1).await;
        let lives = [Process::exits(1, SECOND), Process::exits(1, SECOND), Process::exits(1, SECOND)];
        node.runtime().script(For::Container("app".into()), lives.into_iter().chain([Process::forever()]));
        node.write("a.yaml", &Manifest::new("a"));
        let uid = node.uid("a.yaml");
        assert!(node.until(MINUTE, |n| n.runtime().starts(&uid, "app") == 4 && n.all_run(&uid)).await);
        assert!(dead(&node, &uid) > 1);
        remove_unused(&mut node).await;
        assert_eq!((dead(&node, &uid), node.containers(&uid).len()), (1, 2));
        // Those that are named go, unless they run.
        let ids = node.containers(&uid).into_iter().map(|c| c.id).collect();
        node.entries()[0].collect(Collect::These(ids));
        node.run(5 * SECOND).await;
        assert_eq!((dead(&node, &uid), node.containers(&uid).len()), (0, 1));
        assert!(node.all_run(&uid));
        node.assert_sound();
    });
}

#[test]
fn a_pod_that_has_completed_keeps_one_of_each_name_without_being_asked() {
    run(async {
        let mut node = Node::new(2).await;
        let lives = [Process::exits(1, SECOND), Process::exits(1, SECOND), Process::exits(0, SECOND)];
        node.runtime().script(For::Container("app".into()), lives);
        node.write("a.yaml", &Manifest::new("a").policy("OnFailure"));
        let uid = node.uid("a.yaml");
        assert!(node.until(2 * MINUTE, |n| n.phase(&uid) == "Succeeded").await);
        node.run(10 * SECOND).await;
        assert_eq!(dead(&node, &uid), 1);
        // A static pod keeps it whatever happens: else the next agent would run it again.
        remove_unused(&mut node).await;
        assert_eq!(dead(&node, &uid), 1);
        node.restart(Duration::from_secs(1)).await;
        node.run(MINUTE).await;
        assert_eq!((node.runtime().starts(&uid, "app"), node.phase(&uid).as_str()), (3, "Succeeded"));
        node.assert_sound();
    });
}

/// What the Go kubelet tells of a collection that fails is told, each time, and no more when it goes well again.
#[test]
fn what_cannot_be_collected_is_told() {
    run(async {
        let mut node = Node::new(3).await;
        up(&mut node, "a.yaml", &Manifest::new("a")).await;
        node.host().inject(HostRule::new("prune_logs", HostFault::Fail));
        node.run(2 * MINUTE + 5 * SECOND).await;
        let failed = |node: &Node| {
            let told = node.world().told.all();
            told.into_iter().filter(|t| t.starts_with("sim ContainerGCFailed ")).count()
        };
        assert!((2..=3).contains(&failed(&node)), "{:?}", node.world().told.all());
        node.host().heal();
        node.run(SECOND).await;
        let before = failed(&node);
        node.run(3 * MINUTE).await;
        assert_eq!(failed(&node), before);
        node.runtime().inject(Rule::new("ListContainers", Fault::Fail(14, "nobody is there".into())));
        node.run(3 * MINUTE).await;
        let told = node.world().told.all();
        assert!(told.iter().any(|t| t.contains("ContainerGCFailed") && t.contains("nobody is there")), "{told:?}");
    });
}
