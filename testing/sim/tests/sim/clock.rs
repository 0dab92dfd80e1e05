//! The machine's clock is set forward or back while pods run. Found by stories made from seeds.

use fakes::{For, Process};
use jiff::SignedDuration;
use sim::{Manifest, Node, run};

use super::{MINUTE, SECOND, newest, starts, up};

const HOUR: SignedDuration = SignedDuration::from_secs(3600);

/// A pod whose container ends two seconds after each start.
async fn looping(node: &mut Node) -> String {
    node.runtime().script(For::Container("app".into()), [Process::exits(1, 2 * SECOND)]);
    node.write("a.yaml", &Manifest::new("a"));
    let uid = node.uid("a.yaml");
    node.run(5 * SECOND).await;
    uid
}

/// What was made last is what was started last, whatever the time on it: the restart count goes up, and back-off holds.
#[test]
fn set_back_the_newest_container_is_the_newest() {
    run(async {
        let mut node = Node::new(1).await;
        let uid = looping(&mut node).await;
        node.jump(-HOUR);
        node.run(20 * MINUTE).await;
        node.assert_sound();
        let attempt = newest(&node, &uid, "app").metadata.unwrap().attempt;
        assert!((4..12).contains(&attempt), "{attempt} restarts in twenty minutes");
        node.runtime().script(For::Container("app".into()), [Process::forever()]);
        node.settle(20 * MINUTE).await;
    });
}

/// Nobody waits until it is again as late as it was.
#[test]
fn set_back_during_a_back_off_it_does_not_wait_an_hour() {
    run(async {
        let mut node = Node::new(2).await;
        let uid = looping(&mut node).await;
        node.run(20 * SECOND).await;
        let before = node.runtime().starts(&uid, "app");
        node.jump(-HOUR);
        node.run(2 * MINUTE).await;
        assert!(node.runtime().starts(&uid, "app") > before, "{}", node.world().asked(30).join("\n"));
        node.assert_sound();
    });
}

/// Dead containers from the future are collected like others.
#[test]
fn set_back_dead_containers_do_not_pile_up() {
    run(async {
        let mut node = Node::new(3).await;
        looping(&mut node).await;
        node.run(30 * SECOND).await;
        node.jump(-HOUR);
        node.runtime().script(For::Container("app".into()), [Process::forever()]);
        node.settle(30 * MINUTE).await;
    });
}

#[test]
fn set_forward_nothing_is_stopped() {
    run(async {
        let mut node = Node::new(4).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a").sidecar("side")).await;
        node.jump(HOUR * 24);
        node.run(10 * MINUTE).await;
        assert_eq!(starts(&node, &uid, "app").len(), 1);
        node.settle(MINUTE).await;
    });
}
