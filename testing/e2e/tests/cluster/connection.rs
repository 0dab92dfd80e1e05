//! The way to the API server loses what it carries.

use std::time::{Duration, Instant};

use e2e::cluster::Cluster;
use e2e::{NODE, container, pod, seconds, status};
use rig::cluster::{Way, is_ready};

use crate::SLEEP;

/// Makes a pod and waits until it runs; how long that took. The node must be Ready all the time.
#[track_caller]
fn reached_within(cluster: &Cluster, name: &str, limit: Duration) -> Duration {
    let start = Instant::now();
    cluster.run(&pod(name, [container("c", SLEEP)]));
    loop {
        if status::phase(&cluster.pod(name).unwrap()) == "Running" {
            return start.elapsed();
        }
        assert!(is_ready(&cluster.get_node()), "the node was given up after {:?}", start.elapsed());
        assert!(start.elapsed() < limit, "{name} does not run after {limit:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn that_swallows_everything_is_left(cluster: &mut Cluster) {
    let proxy = cluster.plane.proxy().unwrap();
    let kubeconfig = cluster.plane.node_kubeconfig_by(NODE, proxy.address()).unwrap();
    let mut flags: Vec<String> =
        cluster.node.flags().iter().filter(|f| !f.starts_with("--kubeconfig=")).cloned().collect();
    flags.push(format!("--kubeconfig={}", kubeconfig.display()));
    cluster.node.kill();
    cluster.node.set_flags(flags);
    cluster.node.run();
    cluster.wait_ready();
    cluster.run(&pod("steady", [container("c", SLEEP)]));
    let steady = cluster.wait_running("steady");

    // Not closed, but nothing comes through any more; a new connection would do.
    let before = proxy.accepted();
    proxy.lose_connections();
    let took = reached_within(cluster, "after-loss", seconds(50));
    println!("a connection that loses everything was left after {took:?}, {} new ones", proxy.accepted() - before);
    assert!(proxy.accepted() > before);

    // New connections lead nowhere either, then nobody listens, then all is well.
    proxy.set(Way::Lost);
    proxy.lose_connections();
    std::thread::sleep(seconds(6));
    proxy.set(Way::Closed);
    std::thread::sleep(seconds(4));
    proxy.set(Way::Open);
    let took = reached_within(cluster, "after-all", seconds(50));
    println!("after an outage of 10 s it took {took:?}");
    let still = cluster.wait_running("steady");
    assert_eq!((status::id(&still, "c"), status::restarts(&still, "c")), (status::id(&steady, "c"), 0));
    cluster.wait_ready();
}
