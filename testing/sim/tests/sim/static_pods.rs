//! Manifests that change, go, come back, are bad, or name the same pod.

use fakes::{For, Process};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use sim::{Container, Manifest, Node, run};

use super::{MINUTE, SECOND, millis, newest, running_id, up};

/// A pod with a fixed UID whose process takes 5 s to end, out of 20 s of grace.
fn slow() -> Manifest {
    Manifest::new("fixed").uid("11111111-2222").grace(20)
}

async fn with_slow(seed: u64) -> Node {
    let mut node = Node::new(seed).await;
    node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 5 * SECOND)]);
    up(&mut node, "a.yaml", &slow()).await;
    node
}

#[test]
fn removed_and_put_back_at_once() {
    run(async {
        let mut node = with_slow(1).await;
        let mut random = SmallRng::seed_from_u64(1);
        for round in 0..10 {
            let old = running_id(&node, "11111111-2222", "app");
            node.remove("a.yaml");
            node.run(millis(random.random_range(200..3000))).await;
            node.write("a.yaml", &slow());
            let new = |n: &Node| n.running("11111111-2222") == ["app"] && newest(n, "11111111-2222", "app").id != old;
            assert!(node.until(10 * SECOND, new).await, "round {round}: {:?}", node.world().asked(30));
            node.assert_sound();
        }
        node.settle(SECOND).await;
    });
}

#[test]
fn put_back_with_another_image() {
    run(async {
        let mut node = with_slow(2).await;
        let old = running_id(&node, "11111111-2222", "app");
        node.remove("a.yaml");
        node.run(SECOND).await;
        node.write("a.yaml", &slow().apps([Container::new("app").image("registry.local/other:2")]));
        let new = |n: &Node| n.running("11111111-2222") == ["app"] && newest(n, "11111111-2222", "app").id != old;
        assert!(node.until(10 * SECOND, new).await);
        let id = running_id(&node, "11111111-2222", "app");
        let image = node.runtime().container_config(&id).unwrap().image.unwrap();
        assert_eq!(image.user_specified_image, "registry.local/other:2");
        node.settle(SECOND).await;
    });
}

#[test]
fn overwritten_several_times_in_a_second() {
    run(async {
        let mut node = with_slow(3).await;
        for n in 0..8 {
            node.write("a.yaml", &slow().apps([Container::new("app").image(&format!("registry.local/app:{n}"))]));
            node.run(millis(100)).await;
        }
        node.settle(MINUTE).await;
        let id = running_id(&node, "11111111-2222", "app");
        let hash = node.runtime().container_config(&id).unwrap().annotations["io.kubernetes.container.hash"].clone();
        assert_eq!(hash, manifest::container_hash_text("registry.local/app:7", "app"));
    });
}

#[test]
fn a_change_under_a_generated_uid_is_another_pod() {
    run(async {
        let mut node = Node::new(4).await;
        node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 3 * SECOND)]);
        let version = |n: u32| {
            Manifest::new("web").grace(10).apps([Container::new("app").image(&format!("registry.local/web:{n}"))])
        };
        let mut uid = up(&mut node, "a.yaml", &version(0)).await;
        for n in 1..5 {
            node.write("a.yaml", &version(n));
            let next = node.uid("a.yaml");
            assert_ne!(uid, next);
            node.run(SECOND).await;
            assert_eq!((node.running(&uid).len(), node.containers(&next).len()), (1, 0), "the old one ends first");
            let calls = node.runtime().calls().len();
            assert!(node.until(5 * SECOND, |node| node.all_run(&next)).await);
            assert!(node.runtime().calls().len() - calls < 200, "in a few calls, not in circles");
            assert!(node.is_gone(&uid));
            uid = next;
        }
        // Changed and changed again before the first change came to be: it never runs.
        node.write("a.yaml", &version(10));
        let skipped = node.uid("a.yaml");
        node.run(SECOND).await;
        node.write("a.yaml", &version(11));
        node.settle(MINUTE).await;
        assert_eq!(node.runtime().starts(&skipped, "app"), 0);
    });
}

#[test]
fn changed_while_no_agent_looked() {
    run(async {
        let mut node = Node::new(5).await;
        let version =
            |n: u32| Manifest::new("web").apps([Container::new("app").image(&format!("registry.local/web:{n}"))]);
        let old = up(&mut node, "a.yaml", &version(0)).await;
        let gone = up(&mut node, "b.yaml", &Manifest::new("gone")).await;
        node.kill();
        node.write("a.yaml", &version(1));
        node.remove("b.yaml");
        node.run(MINUTE).await;
        assert_eq!(node.running(&old), ["app"], "without an agent all runs on");
        node.start().await;
        let new = node.uid("a.yaml");
        assert!(node.until(5 * SECOND, |n| n.all_run(&new) && n.is_gone(&old) && n.is_gone(&gone)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn two_files_that_name_one_pod() {
    run(async {
        let mut node = Node::new(6).await;
        let named = |image: &str| Manifest::new("same").apps([Container::new("app").image(image)]);
        let first = up(&mut node, "a.yaml", &named("registry.local/a:1")).await;
        node.write("b.yaml", &named("registry.local/b:1"));
        let second = node.uid("b.yaml");
        node.settle(MINUTE).await;
        let (runs, other) = if node.running(&first).is_empty() { ("b.yaml", first) } else { ("a.yaml", second) };
        assert!(node.containers(&other).is_empty());
        // The one that ran goes, the other one takes its place.
        let old = node.uid(runs);
        node.remove(runs);
        assert!(node.until(10 * SECOND, |n| n.all_run(&other) && n.is_gone(&old)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn bad_manifests_among_good_ones() {
    run(async {
        let mut node = Node::new(7).await;
        for (file, bytes) in [
            ("00-empty.yaml", &b""[..]),
            ("01-broken.yaml", b"kind: Pod\n  metadata: {"),
            ("02-binary", b"\x7fELF\x02\x01\x01\x00\xff\xfe"),
            ("03-service.yaml", b"{apiVersion: v1, kind: Service, metadata: {name: s}}"),
            ("04-nameless.yaml", b"{apiVersion: v1, kind: Pod, spec: {containers: [{name: a, image: b}]}}"),
            (
                "05-secret.yaml",
                b"{apiVersion: v1, kind: Pod, metadata: {name: s}, spec: {containers: [{name: a, image: b}], volumes: [{name: v, secret: {secretName: x}}]}}",
            ),
        ] {
            node.write_bytes(file, bytes.to_vec());
        }
        let good = up(&mut node, "50-good.yaml", &Manifest::new("good")).await;
        // A good one that becomes bad keeps its pod until the next periodic look, then gives it up.
        let text = Manifest::new("good").text();
        node.write_bytes("60-late.yaml", b"half of a".to_vec());
        let half = text.as_bytes()[..text.len() / 2].to_vec();
        let dir = node.world().dir.clone();
        dir.write("50-good.yaml", half);
        node.run(SECOND).await;
        assert_eq!(node.running(&good), ["app"], "an editor at work stops no pod");
        node.write("50-good.yaml", &Manifest::new("good"));
        node.run(30 * SECOND).await;
        assert_eq!(node.runtime().starts(&good, "app"), 1);
        // And a directory that cannot be read takes nothing away.
        dir.fail(5);
        dir.write("70-more.yaml", b"".to_vec());
        node.run(30 * SECOND).await;
        assert_eq!(node.running(&good), ["app"]);
        node.settle(MINUTE).await;
        node.write_bytes("50-good.yaml", b"bad for good".to_vec());
        assert!(node.until(30 * SECOND, |n| n.is_gone(&good)).await);
        node.settle(MINUTE).await;
    });
}

#[test]
fn removed_while_it_backs_off_or_waits_for_its_name() {
    run(async {
        let mut node = Node::new(8).await;
        node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 4 * SECOND)]);
        let version = |n: u32| Manifest::new("web").grace(10).apps([Container::new("app").image(&format!("i:{n}"))]);
        let old = up(&mut node, "a.yaml", &version(0)).await;
        node.write("a.yaml", &version(1));
        let queued = node.uid("a.yaml");
        node.run(SECOND).await;
        node.remove("a.yaml");
        assert!(node.until(5 * SECOND, |n| n.is_gone(&old) && n.is_gone(&queued)).await);
        assert_eq!(node.runtime().starts(&queued, "app"), 0);
        node.settle(SECOND).await;
    });
}
