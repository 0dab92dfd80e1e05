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

/// How often the pods' workers asked the runtime, by method; a relist takes no filter.
fn asked(node: &Node, method: &str) -> usize {
    node.runtime().calls_of(method).len()
}

/// What was asked from an exit until the pod has been at rest for some seconds: the statuses of the container that ended and of the one that runs now.
#[test]
fn an_exit_costs_no_lists() {
    run(async {
        let mut node = node(8, |_| {}).await;
        let uid = seasoned(&mut node, "a").await;
        // Not near a relist, which is due every full minute.
        node.run(20 * SECOND).await;
        for _ in 0..3 {
            node.runtime().forget_calls();
            assert!(restart_takes(&mut node, &uid).await <= millis(50));
            node.run(5 * SECOND).await;
            assert_eq!((asked(&node, "ListPodSandbox"), asked(&node, "ListContainers")), (0, 0));
            assert_eq!((asked(&node, "ContainerStatus"), asked(&node, "PodSandboxStatus")), (2, 0));
            node.run(15 * MINUTE - 5 * SECOND).await;
        }
        node.settle(MINUTE).await;
    });
}

/// Events that tell what is known cost nothing, whenever and how often they come.
#[test]
fn old_news_is_no_news() {
    run(async {
        let mut node = node(9, |_| {}).await;
        let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
        let started = node.runtime().last_event().expect("the event of its start");
        node.run(3 * MINUTE + 20 * SECOND).await;
        let stopped = {
            assert!(restart_takes(&mut node, &uid).await <= millis(50));
            let event = node.runtime().last_event().expect("the event of the second start");
            let of_first = |c: &&cri_api::v1::ContainerStatus| c.state() == ContainerState::ContainerExited;
            let first =
                event.containers_statuses.iter().find(of_first).expect("the first one, which has ended").id.clone();
            let kind = cri_api::v1::ContainerEventType::ContainerStoppedEvent.into();
            cri_api::v1::ContainerEventResponse { container_id: first, container_event_type: kind, ..event }
        };
        node.run(5 * SECOND).await;
        node.runtime().forget_calls();
        for _ in 0..100 {
            node.runtime().tell(started.clone());
            node.runtime().tell(stopped.clone());
            node.run(millis(20)).await;
        }
        for method in ["ListPodSandbox", "ListContainers", "ContainerStatus", "CreateContainer"] {
            assert_eq!(asked(&node, method), 0, "{method}");
        }
        node.settle(MINUTE).await;
    });
}

/// An event that comes late does not hide what came after it.
#[test]
fn a_stale_event_hides_no_exit() {
    run(async {
        for late_first in [true, false] {
            let mut node = node(10, |_| {}).await;
            let uid = up(&mut node, "a.yaml", &Manifest::new("a")).await;
            let started = node.runtime().last_event().expect("the event of its start");
            node.run(3 * MINUTE + 20 * SECOND).await;
            let id = running_id(&node, &uid, "app");
            if late_first {
                node.runtime().tell(started.clone());
            }
            assert!(node.runtime().exit(&id, 1));
            node.runtime().tell(started);
            let again = |n: &Node| {
                n.containers(&uid).iter().any(|c| c.id != id && c.state() == ContainerState::ContainerRunning)
            };
            assert!(node.until(millis(50), again).await);
            node.settle(MINUTE).await;
        }
    });
}

/// Two containers end, and the event of the first is lost: that of the second shows both.
#[test]
fn an_event_shows_what_a_lost_one_told() {
    run(async {
        let mut node = node(11, |_| {}).await;
        let two = Manifest::new("a").apps([sim::Container::new("app"), sim::Container::new("other")]);
        let uid = up(&mut node, "a.yaml", &two).await;
        node.run(3 * MINUTE + 20 * SECOND).await;
        let (app, other) = (running_id(&node, &uid, "app"), running_id(&node, &uid, "other"));
        node.runtime().configure(|s| s.lost_events = 1.0);
        assert!(node.runtime().exit(&app, 1));
        node.runtime().configure(|s| s.lost_events = 0.0);
        assert!(node.runtime().exit(&other, 1));
        let again =
            |n: &Node| n.all_run(&uid) && running_id(n, &uid, "app") != app && running_id(n, &uid, "other") != other;
        let in_time = node.until(millis(50), again).await;
        assert!(in_time);
        node.settle(MINUTE).await;
    });
}

/// Every event comes after the one that follows it, as far as one does.
#[test]
fn late_events_are_made_good_by_the_relist() {
    run(async {
        let mut node = node(12, |s| s.late_events = 1.0).await;
        let uid = seasoned(&mut node, "a").await;
        for _ in 0..3 {
            assert!(restart_takes(&mut node, &uid).await <= millis(61_000));
            node.run(2 * MINUTE).await;
        }
        node.settle(MINUTE).await;
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
