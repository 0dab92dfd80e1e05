//! What runs is seen: at once by events, a relist later without them.

use cri_api::v1::ContainerState;
use sim::{Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis, running_id, up};

async fn node(seed: u64, change: impl FnOnce(&mut fakes::Settings)) -> Node {
    let mut runtime = fakes::Settings::default();
    change(&mut runtime);
    Node::with(Setup { seed, runtime, ..Default::default() }).await
}

/// How long it takes from an exit to the restart.
async fn restart_takes(node: &mut Node, uid: &str) -> std::time::Duration {
    let id = running_id(node, uid, "app");
    let at = node.world().at();
    assert!(node.runtime().exit(&id, 1));
    let again =
        |n: &Node| n.containers(uid).iter().any(|c| c.id != id && c.state() == ContainerState::ContainerRunning);
    assert!(node.until(3 * MINUTE, again).await, "never restarted");
    node.assert_sound();
    node.world().at() - at
}

/// A pod that has run long enough to restart at once.
async fn seasoned(node: &mut Node, name: &str) -> String {
    let uid = up(node, &format!("{name}.yaml"), &Manifest::new(name)).await;
    node.run(3 * MINUTE).await;
    uid
}

#[test]
fn with_events_at_once_and_hardly_any_lists() {
    run(async {
        let mut node = node(1, |_| {}).await;
        let uid = seasoned(&mut node, "a").await;
        assert!(node.health().evented);
        node.runtime().forget_calls();
        assert!(restart_takes(&mut node, &uid).await <= millis(50));
        node.run(10 * MINUTE).await;
        let all = node.runtime().calls_of("ListPodSandbox").len();
        // Ten relists, the rounds of the restart, and one resync that looks anew.
        assert!(all <= 18, "{all} lists in ten minutes");
    });
}

#[test]
fn without_events_within_a_relist() {
    run(async {
        let mut node = node(2, |s| s.events = false).await;
        let uid = seasoned(&mut node, "a").await;
        assert!(!node.health().evented);
        assert!(restart_takes(&mut node, &uid).await <= millis(1100));
    });
}

#[test]
fn doubled_events_do_no_harm() {
    run(async {
        let mut node = node(3, |s| s.doubled_events = 1.0).await;
        let uid = seasoned(&mut node, "a").await;
        assert!(restart_takes(&mut node, &uid).await <= millis(50));
        assert_eq!(node.runtime().starts(&uid, "app"), 2);
        node.settle(MINUTE).await;
    });
}

/// A second reader of the runtime's events gets some of ours.
#[test]
fn a_shared_stream_is_distrusted() {
    run(async {
        let mut node = node(4, |_| {}).await;
        let (a, b) = (seasoned(&mut node, "a").await, seasoned(&mut node, "b").await);
        node.runtime().configure(|s| s.lost_events = 1.0);
        // The first lost exit is found by the next relist, at the latest a minute later.
        assert!(restart_takes(&mut node, &a).await <= millis(61_000));
        node.run(65 * SECOND).await;
        assert!(!node.health().evented, "found out");
        assert!(restart_takes(&mut node, &b).await <= millis(1100));
        // Alone again, the stream is trusted after a while.
        node.runtime().configure(|s| s.lost_events = 0.0);
        node.run(6 * MINUTE).await;
        assert!(node.health().evented);
        node.settle(MINUTE).await;
        assert!(node.health().evented, "and stays so when nothing is lost");
    });
}

#[test]
fn a_stream_that_breaks_is_opened_again() {
    run(async {
        let mut node = node(5, |_| {}).await;
        let uid = seasoned(&mut node, "a").await;
        node.runtime().restart(5 * SECOND);
        node.run(2 * SECOND).await;
        assert!(!node.health().evented);
        node.run(MINUTE).await;
        assert!(node.health().evented);
        assert!(restart_takes(&mut node, &uid).await <= millis(50));
        node.settle(MINUTE).await;
    });
}

/// Both kinds of trouble: the pods' changes of a busy node are not taken for lost events.
#[test]
fn a_busy_node_trusts_its_events() {
    run(async {
        let mut node = node(6, |_| {}).await;
        for n in 0..20 {
            node.write(&format!("{n:02}.yaml"), &Manifest::new(&format!("p{n}")));
            node.run(millis(700)).await;
        }
        for n in 0..20 {
            node.remove(&format!("{n:02}.yaml"));
            node.run(millis(4700)).await;
            assert!(node.health().evented, "after {n}");
        }
        node.settle(MINUTE).await;
    });
}

#[test]
fn a_slow_list_does_not_hold_up_events() {
    run(async {
        let mut node = node(7, |_| {}).await;
        let uid = seasoned(&mut node, "a").await;
        // The relist is due every full minute; a pod's own look must not be the one that is caught.
        node.run(4 * MINUTE - millis(100) - node.world().at()).await;
        node.runtime().inject(fakes::Rule::new("ListPodSandbox", fakes::Fault::Delay(30 * SECOND)).times(1));
        node.run(millis(200)).await;
        node.runtime().heal();
        assert!(node.runtime().calls_of("ListPodSandbox").iter().any(|c| c.ended.is_none()), "the relist is under way");
        node.run(SECOND).await;
        assert!(restart_takes(&mut node, &uid).await <= millis(50));
        node.settle(2 * MINUTE).await;
        assert!(node.health().evented);
    });
}
