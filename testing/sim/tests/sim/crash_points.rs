//! The agent is cut off at every call that changes something, one after the other; the next agent must bring everything to its end.

use fakes::{For, Process};
use sim::{Container, Manifest, Node, run};

use super::{MINUTE, SECOND, millis};

/// Six pods: plain with an init container and a sidecar, in a crash loop, run to its end, edited, removed, removed and put back.
async fn story(node: &mut Node) {
    let process = |pod: &str, name: &str, life: Process| {
        node.runtime().script(For::PodContainer(format!("{pod}-sim"), name.into()), [life]);
    };
    process("order", "init", Process::exits(0, SECOND));
    process("loop", "app", Process::exits(1, 2 * SECOND));
    process("once", "app", Process::exits(0, 3 * SECOND));
    process("edited", "app", Process::forever().trapping_term(0, 2 * SECOND));
    process("removed", "app", Process::forever().ignoring_term());
    process("back", "app", Process::forever().trapping_term(0, 3 * SECOND));
    let edited = |n: u32| Manifest::new("edited").apps([Container::new("app").image(&format!("registry.local/e:{n}"))]);
    let back = Manifest::new("back").uid("back").grace(10);
    node.write("a.yaml", &Manifest::new("order").init("init").sidecar("side"));
    node.write("b.yaml", &Manifest::new("loop"));
    node.write("c.yaml", &Manifest::new("once").policy("Never"));
    node.write("d.yaml", &edited(1));
    node.write("e.yaml", &Manifest::new("removed").grace(4).sidecar("side"));
    node.write("f.yaml", &back);
    node.run(8 * SECOND).await;
    node.write("d.yaml", &edited(2));
    node.remove("e.yaml");
    node.remove("f.yaml");
    node.run(millis(500)).await;
    node.write("f.yaml", &back);
    node.run(20 * SECOND).await;
}

async fn end(node: &mut Node) {
    node.assert_sound();
    node.runtime().script(For::PodContainer("loop-sim".into(), "app".into()), [Process::forever()]);
    let limit = node.world().at() + 2 * MINUTE;
    while !node.missing().is_empty() {
        assert!(node.world().at() < limit, "{:?}\n{}", node.missing(), node.world().asked(80).join("\n"));
        node.run(SECOND).await;
    }
    node.assert_sound();
    let once = node.uid("c.yaml");
    assert_eq!(node.phase(&once), "Succeeded");
    assert_eq!(node.runtime().starts(&once, "app"), 1, "what ran to its end does not run again");
}

#[test]
fn every_call_may_be_the_last() {
    let effects = run(async {
        let mut node = Node::new(1).await;
        story(&mut node).await;
        node.world().cut_at(None);
        end(&mut node).await;
        node.settle(MINUTE).await;
        node.world().effects()
    });
    assert!((100..600).contains(&effects), "{effects} calls");
    for effect in 1..=effects {
        run(async {
            let mut node = Node::without_agent(sim::Setup { seed: 1, ..Default::default() });
            // The next agent comes at once, or when what was to end had the time to.
            node.comes_back_after([millis(10), 7 * SECOND][effect as usize % 2]);
            node.world().cut_at(Some(effect));
            node.start().await;
            story(&mut node).await;
            end(&mut node).await;
        });
    }
}
