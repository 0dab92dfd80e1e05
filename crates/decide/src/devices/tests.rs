//! Choosing devices: Go's refusals in its words, and that no device ever has two holders.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

const GPU: &str = "example.com/gpu";

fn ids(list: &[&str]) -> Ids {
    list.iter().map(ToString::to_string).collect()
}

/// Healthy devices with one node each, or none for -1.
fn devices(list: &[(&str, i64)]) -> BTreeMap<String, Device> {
    let device = |node: i64| Device { healthy: true, nodes: if node < 0 { Vec::new() } else { vec![node] } };
    list.iter().map(|(id, node)| (id.to_string(), device(*node))).collect()
}

fn with(list: &[(&str, i64)]) -> Devices {
    let mut all = Devices::default();
    all.connected(GPU, Options::default());
    all.listed(GPU, devices(list));
    all
}

fn want<'a>(pod: &'a str, needed: usize, reusable: &'a Ids) -> Want<'a> {
    Want { pod, container: "c", resource: GPU, needed, reusable, affinity: None, running: false }
}

fn give(all: &mut Devices, pod: &str, needed: usize) -> Result<Ids, String> {
    let none = Ids::new();
    match all.choose(&want(pod, needed, &none), None)? {
        Choice::Take(ids) => {
            all.reserve(pod, "c", GPU, &ids);
            assert!(all.granted(pod, "c", GPU, Arc::from([1u8].as_slice())));
            Ok(ids)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn refusals() {
    let none = Ids::new();
    let refused = |all: &Devices, needed| all.choose(&want("p", needed, &none), None).unwrap_err();
    let mut all = Devices::default();
    assert_eq!(refused(&all, 1), "cannot allocate unregistered device example.com/gpu");
    all.connected(GPU, Options::default());
    assert_eq!(refused(&all, 1), "no healthy devices present; cannot allocate unhealthy devices example.com/gpu");
    all.listed(GPU, devices(&[("a", -1), ("b", -1)]));
    assert_eq!(
        refused(&all, 3),
        "requested number of devices unavailable for example.com/gpu. Requested: 3, Available: 2"
    );
    give(&mut all, "q", 1).unwrap();
    assert_eq!(
        refused(&all, 2),
        "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1"
    );
    give(&mut all, "p", 1).unwrap();
    assert_eq!(
        refused(&all, 2),
        "pod \"p\" container \"c\" changed request for resource \"example.com/gpu\" from 1 to 2"
    );
    assert_eq!(all.choose(&want("p", 1, &none), None), Ok(Choice::Nothing));
    all.listed(GPU, devices(&[("a", -1)]));
    assert_eq!(
        refused(&all, 1),
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices example.com/gpu"
    );
    all.disconnected(GPU);
    assert_eq!(refused(&all, 1), "no healthy devices present; cannot allocate unhealthy devices example.com/gpu");
    let running = Want { running: true, ..want("p", 1, &none) };
    assert_eq!(all.choose(&running, None), Ok(Choice::Nothing), "what runs keeps what it has");
}

#[test]
fn the_plugin_is_asked_what_it_prefers() {
    let mut all = Devices::default();
    all.connected(GPU, Options { preferred: true, ..Options::default() });
    all.listed(GPU, devices(&[("a", -1), ("b", -1), ("c", -1)]));
    let none = Ids::new();
    let asked = all.choose(&want("p", 2, &none), None).unwrap();
    assert_eq!(asked, Choice::Ask { available: ids(&["a", "b", "c"]), must_include: Ids::new(), size: 2 });
    let chosen = all.choose(&want("p", 2, &none), Some(&ids(&["c", "b", "x"]))).unwrap();
    assert_eq!(chosen, Choice::Take(ids(&["b", "c"])));
    // An answer that is too short is filled up.
    assert_eq!(all.choose(&want("p", 2, &none), Some(&ids(&["c"]))), Ok(Choice::Take(ids(&["a", "c"]))));
    // Meanwhile somebody else took it.
    all.reserve("q", "c", GPU, &ids(&["c"]));
    assert_eq!(all.choose(&want("p", 2, &none), Some(&ids(&["c"]))), Ok(Choice::Take(ids(&["a", "b"]))));
}

#[test]
fn an_init_containers_devices_are_used_again() {
    let all = with(&[("a", -1), ("b", -1), ("c", -1)]);
    let reusable = ids(&["c"]);
    let mut all = all;
    all.reserve("p", "init", GPU, &ids(&["c"]));
    assert_eq!(all.choose(&want("p", 1, &reusable), None), Ok(Choice::Take(ids(&["c"]))));
    assert_eq!(all.choose(&want("p", 2, &reusable), None), Ok(Choice::Take(ids(&["a", "c"]))));
}

#[test]
fn aligned_devices_come_first() {
    let all = with(&[("a", 0), ("b", 1), ("c", 1), ("d", -1)]);
    let none = Ids::new();
    let on = |node, needed| Want { affinity: Some(NumaMask::of([node])), ..want("p", needed, &none) };
    assert_eq!(all.choose(&on(1, 1), None), Ok(Choice::Take(ids(&["b"]))));
    assert_eq!(all.choose(&on(1, 2), None), Ok(Choice::Take(ids(&["b", "c"]))));
    assert_eq!(all.choose(&on(1, 3), None), Ok(Choice::Take(ids(&["a", "b", "c"]))));
    assert_eq!(all.choose(&on(0, 4), None), Ok(Choice::Take(ids(&["a", "b", "c", "d"]))));
}

#[test]
fn amounts_follow_the_plugin() {
    let mut all = with(&[("a", -1), ("b", -1)]);
    let amount = |all: &Devices| all.amounts().get(GPU).map(|a| (a.capacity, a.allocatable));
    assert_eq!(amount(&all), Some((2, 2)));
    give(&mut all, "p", 1).unwrap();
    assert_eq!(all.disconnected(GPU), BTreeSet::from(["p".to_owned()]));
    assert_eq!(amount(&all), Some((2, 0)));
    assert!(all.disconnected(GPU).is_empty(), "told once");
    // The same list again: everything is healthy again.
    assert_eq!(all.listed(GPU, devices(&[("a", -1), ("b", -1)])), BTreeSet::from(["p".to_owned()]));
    assert_eq!(amount(&all), Some((2, 2)));
    all.expired(GPU);
    assert_eq!(amount(&all), None);
    assert!(all.serves(GPU), "a pod still has one");
    all.ended("p");
    assert!(!all.serves(GPU));
}

#[test]
fn health_is_remembered_after_the_end() {
    let mut all = with(&[("a", -1)]);
    give(&mut all, "p", 1).unwrap();
    assert!(all.ended("p") && !all.ended("p"));
    assert!(all.in_use(GPU).is_empty());
    assert_eq!(all.allocations().count(), 0);
    all.listed(GPU, BTreeMap::from([("a".to_owned(), Device::default())]));
    let told = |id: &str, healthy| vec![DeviceHealth { id: id.into(), healthy }];
    assert_eq!(all.health("p", "c"), BTreeMap::from([(GPU.to_owned(), told("a", false))]));
    all.listed(GPU, BTreeMap::new());
    assert_eq!(all.health("p", "c"), BTreeMap::from([(GPU.to_owned(), told("a", true))]));
    assert!(all.release("p"));
    assert!(all.health("p", "c").is_empty());
}

#[test]
fn a_restart_waits_for_the_plugin() {
    let allocation =
        Allocation { devices: BTreeMap::from([(0, vec!["a".into()])]), response: Some(Arc::from([].as_slice())) };
    let mut all = Devices::restore([("p".into(), "c".into(), GPU.into(), allocation)], [GPU.to_owned()]);
    assert_eq!(all.amounts()[GPU], Amount::default());
    assert_eq!(all.in_use(GPU), ids(&["a"]));
    all.connected(GPU, Options::default());
    assert_eq!(all.amounts()[GPU], Amount::default());
    all.listed(GPU, devices(&[("a", 0), ("b", 0)]));
    assert_eq!(give(&mut all, "q", 1), Ok(ids(&["b"])));
    assert!(!all.retain(&|_| true) && all.retain(&|uid| uid == "q"));
    assert_eq!(all.in_use(GPU), ids(&["b"]));
}

#[test]
fn hints() {
    let all = with(&[("a", 0), ("b", 0), ("c", 1)]);
    let none = Ids::new();
    let found = |needed| {
        let hints = all.hints(&want("p", needed, &none), &[0, 1]).unwrap();
        hints.iter().map(|h| (h.affinity.unwrap().to_string(), h.preferred)).collect::<Vec<_>>()
    };
    let text = |list: &[(&str, bool)]| list.iter().map(|(m, p)| (m.to_string(), *p)).collect::<Vec<_>>();
    assert_eq!(found(1), text(&[("01", true), ("10", true), ("11", false)]));
    assert_eq!(found(2), text(&[("01", true), ("11", false)]));
    assert_eq!(found(3), text(&[("11", true)]));
    assert_eq!(found(4), []);
    assert_eq!(with(&[("a", -1)]).hints(&want("p", 1, &none), &[0, 1]), None);
}

#[test]
fn names() {
    for (name, valid) in [
        ("example.com/gpu", true),
        ("nvidia.com/mig-1g.5gb", true),
        ("gpu", false),
        ("kubernetes.io/gpu", false),
        ("x.kubernetes.io/gpu", false),
        ("requests.example.com/gpu", false),
        ("example.com/", false),
        ("/gpu", false),
        ("Example.com/gpu", false),
        ("example.com/g/pu", false),
        ("example.com/-gpu", false),
    ] {
        assert_eq!(is_extended_resource(name), valid, "{name}");
    }
}

#[derive(Clone, Debug)]
enum Event {
    List(Vec<(u8, bool, i64)>),
    Gone,
    Ask { pod: u8, needed: usize, node: Option<i64>, prefers: Vec<u8>, answers: bool },
    End(u8),
    Release(u8),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        prop::collection::vec((0u8..6, any::<bool>(), -1i64..2), 0..6).prop_map(Event::List),
        Just(Event::Gone),
        (0u8..5, 0usize..4, prop::option::of(0i64..2), prop::collection::vec(0u8..6, 0..4), any::<bool>())
            .prop_map(|(pod, needed, node, prefers, answers)| Event::Ask { pod, needed, node, prefers, answers }),
        (0u8..5).prop_map(Event::End),
        (0u8..5).prop_map(Event::Release),
    ]
}

proptest! {
    /// Whatever happens: a device has one holder, a container gets as many as it asked for, and all of them were healthy and free.
    #[test]
    fn one_holder(events in prop::collection::vec(event(), 0..40), preferred in any::<bool>()) {
        let mut all = Devices::default();
        let none = Ids::new();
        for event in events {
            match event {
                Event::List(list) => {
                    all.connected(GPU, Options { preferred, pre_start: false });
                    let device = |node: i64, healthy| Device { healthy, nodes: if node < 0 { vec![] } else { vec![node] } };
                    all.listed(GPU, list.into_iter().map(|(id, h, node)| (format!("d{id}"), device(node, h))).collect());
                }
                Event::Gone => { all.disconnected(GPU); }
                Event::Ask { pod, needed, node, prefers, answers } => {
                    let pod = format!("p{pod}");
                    let affinity = node.map(|n| NumaMask::of([n]));
                    let want = Want { affinity, ..want(&pod, needed, &none) };
                    let prefers: Ids = prefers.iter().map(|id| format!("d{id}")).collect();
                    let choice = match all.choose(&want, None) {
                        Ok(Choice::Ask { available, must_include, size }) => {
                            prop_assert!(preferred && size == needed && must_include.is_subset(&available));
                            all.choose(&want, Some(&prefers))
                        }
                        other => other,
                    };
                    match choice {
                        Ok(Choice::Take(ids)) => {
                            prop_assert_eq!(ids.len(), needed);
                            prop_assert!(ids.is_disjoint(&all.in_use(GPU)));
                            prop_assert!(ids.is_subset(&all.registered()[GPU]));
                            all.reserve(&pod, "c", GPU, &ids);
                            if answers {
                                all.granted(&pod, "c", GPU, Arc::from([].as_slice()));
                            } else {
                                all.refused(&pod, "c", GPU);
                            }
                        }
                        Ok(Choice::Nothing) => {}
                        Ok(Choice::Ask { .. }) => prop_assert!(false, "asked twice"),
                        Err(_) => {}
                    }
                }
                Event::End(pod) => { all.ended(&format!("p{pod}")); }
                Event::Release(pod) => { all.release(&format!("p{pod}")); }
            }
            let mut holders = BTreeMap::new();
            for (pod, _, _, allocation) in all.allocations() {
                for id in allocation.ids() {
                    let before = holders.insert(id.clone(), pod.to_owned());
                    prop_assert!(before.is_none(), "{} has {:?} and {}", id, before, pod);
                }
            }
        }
    }
}
