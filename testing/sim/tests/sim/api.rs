//! Pods of the API server, and what becomes of them when it is slow, gone, or says something else than what is so.

use fakes::{For, Process};
use sim::api::{ApiFault, ApiRule, phase_of};
use sim::{ApiServer, Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis};

async fn node(seed: u64) -> Node {
    Node::with(Setup { seed, api: ApiServer::Streamed, ..Default::default() }).await
}

/// A pod that runs.
async fn running(node: &mut Node, manifest: &Manifest) -> String {
    let uid = node.create(manifest);
    assert!(node.until(20 * SECOND, |n| n.all_run(&uid) && n.missing().is_empty()).await, "{:?}", node.missing());
    uid
}

#[test]
fn one_pod_from_object_to_gone() {
    run(async {
        let mut node = node(1).await;
        node.runtime().script(For::Container("init".into()), [Process::exits(0, SECOND)]);
        let uid = running(&mut node, &Manifest::new("a").init("init").sidecar("side")).await;
        node.delete("a", None);
        assert!(node.until(20 * SECOND, |n| n.is_gone(&uid)).await);
        assert!(node.objects().is_empty(), "its object goes when it has ended");
        node.settle(MINUTE).await;
    });
}

/// Found by a story: a server, or what stands before it, that says 404 of a pod that is there. Its status was never told again.
#[test]
fn a_status_that_finds_no_pod_is_told_again() {
    run(async {
        let mut node = node(2).await;
        node.api().inject(ApiRule { call: "patch", fault: ApiFault::Refuse(404), times: 2 });
        running(&mut node, &Manifest::new("a")).await;
        node.settle(MINUTE).await;
    });
}

#[test]
fn an_object_that_was_forced_away_and_made_again_is_another_pod() {
    run(async {
        let mut node = node(3).await;
        node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 3 * SECOND)]);
        let first = running(&mut node, &Manifest::new("a")).await;
        node.delete("a", Some(0));
        let second = node.create(&Manifest::new("a"));
        assert!(node.until(20 * SECOND, |n| n.is_gone(&first) && n.all_run(&second)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn what_happened_while_nobody_could_be_told_is_told_afterwards() {
    run(async {
        let mut node = node(4).await;
        node.runtime().script(For::Container("app".into()), [Process::exits(0, 30 * SECOND)]);
        let job = running_job(&mut node).await;
        node.api().reach(false);
        node.run(5 * MINUTE).await;
        node.restart(SECOND).await;
        node.run(MINUTE).await;
        let phase = |n: &Node| n.objects().first().map(phase_of).unwrap_or_default();
        assert_eq!(phase(&node), "Running", "nobody could tell");
        node.api().reach(true);
        assert!(node.until(2 * MINUTE, |n| phase(n) == "Succeeded").await, "{:?}", node.missing());
        assert_eq!(node.runtime().starts(&job, "app"), 1);
        node.settle(MINUTE).await;
    });
}

async fn running_job(node: &mut Node) -> String {
    let uid = node.create(&Manifest::new("job").policy("Never"));
    assert!(node.until(10 * SECOND, |n| n.phase(&uid) == "Running").await);
    node.run(SECOND).await;
    uid
}

/// A checkpoint that a power failure has torn stops the agent's start, and nothing that runs.
#[test]
fn a_torn_checkpoint_is_complained_of_and_nothing_is_touched() {
    run(async {
        let mut node = node(5).await;
        let uid = running(&mut node, &Manifest::new("a")).await;
        let file = std::path::Path::new(sim::host::ROOT).join(pod::admit::ALLOCATED);
        node.kill();
        node.host().tear(&file);
        node.start().await;
        let before = node.runtime().changes().len();
        node.run(MINUTE).await;
        let told = node.world().asked(usize::MAX);
        assert!(told.iter().any(|line| line.contains("is corrupt")), "{}", told.join("\n"));
        assert_eq!(node.runtime().changes().len(), before);
        node.host().drop_file(&file);
        node.settle(MINUTE).await;
        assert_eq!(node.runtime().starts(&uid, "app"), 1);
    });
}

/// Found by a story: on a full disk the checkpoints were tried five times a second, each time with a line in the log.
#[test]
fn a_full_disk_is_not_written_to_all_the_time() {
    run(async {
        let mut node = node(6).await;
        let uid = running(&mut node, &Manifest::new("a")).await;
        node.host().fill(true);
        node.delete("a", None);
        node.run(millis(100)).await;
        let tries = |n: &Node| n.world().asked(usize::MAX).iter().filter(|l| l.contains("  write_atomic")).count();
        node.run(10 * SECOND).await;
        let before = tries(&node);
        node.run(5 * MINUTE).await;
        assert!(tries(&node) - before <= 60, "{} tries in five minutes", tries(&node) - before);
        node.host().fill(false);
        assert!(node.until(MINUTE, |n| n.is_gone(&uid)).await, "{:?}", node.missing());
        node.settle(MINUTE).await;
    });
}
