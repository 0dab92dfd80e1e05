//! Wishes, records and words of a resize.

use model::allocation::{Grant, PodAllocation, ResizeState};
use model::observed::ObservedResources;
use model::pod::DesiredPod;
use proptest::prelude::*;

use super::*;
use crate::testing::{at, hash, pod, pod_with, seen};

/// An API pod with these containers: `name: {requests}/{limits}` as `cpu,memory/cpu,memory`, empty for none.
fn containers(list: &[(&str, &str)]) -> String {
    let amounts = |text: &str| {
        let (cpu, memory) = text.split_once(',').unwrap_or((text, ""));
        let mut map = serde_json::Map::new();
        for (name, amount) in [("cpu", cpu), ("memory", memory)] {
            if !amount.is_empty() {
                map.insert(name.into(), amount.into());
            }
        }
        map
    };
    let one = |(name, text): &(&str, &str)| {
        let (requests, limits) = text.split_once('/').unwrap_or((text, ""));
        serde_json::json!({"name": name, "resources": {"requests": amounts(requests), "limits": amounts(limits)}})
    };
    serde_json::json!({"containers": list.iter().map(one).collect::<Vec<_>>()}).to_string()
}

fn with(list: &[(&str, &str)]) -> DesiredPod {
    pod(&containers(list))
}

#[test]
fn a_pod_runs_with_what_it_was_given() {
    let before = with(&[("a", "100m,64Mi/200m,"), ("b", "1,")]);
    let given = allocation_of(&before, true);
    assert!(!before.asks_other_than(&given));
    // Another way to write the same is not another wish.
    assert!(!with(&[("a", "0.1,65536Ki/0.2,"), ("b", "1000m,")]).asks_other_than(&given));
    let asked = with(&[("a", "200m,64Mi/200m,"), ("b", "1,")]);
    assert!(asked.asks_other_than(&given));
    let state = ResizeState { grant: Some(Grant { number: 1, generation: 3 }), ..Default::default() };
    let form = asked.given(&given, state.clone());
    assert_eq!((form.spec(), form.resize()), (before.spec(), &state));
    // Containers that the allocation does not name have what they ask for.
    let some = PodAllocation { containers: Default::default(), pod_level: None };
    assert!(!asked.asks_other_than(&some));
    let level = pod(r#"{"resources": {"requests": {"cpu": "2"}}, "containers": [{"name": "a"}]}"#);
    let less = PodAllocation { pod_level: None, ..allocation_of(&level, true) };
    assert!(level.asks_other_than(&less));
    assert!(level.given(&less, ResizeState::default()).spec().resources.is_none());
}

#[test]
fn only_containers_that_can_be_resized_have_an_allocation() {
    let p = pod(r#"{"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
                "containers": [{"name": "a"}], "ephemeralContainers": [{"name": "e"}]}"#);
    let names = |init| allocation_of(&p, init).containers.into_keys().collect::<Vec<_>>();
    assert_eq!(names(true), ["a", "i", "s"]);
    assert_eq!(names(false), ["a", "s"]);
}

/// As the Go kubelet's own tests have them.
#[test]
fn messages_are_gos() {
    let one = with(&[("c1", "1,1Gi")]);
    assert_eq!(
        message("started", &one, 1, ""),
        r#"Pod resize started: {"containers":[{"name":"c1","resources":{"requests":{"cpu":"1","memory":"1Gi"}}}],"generation":1}"#
    );
    let error = "Node didn't have enough resource: cpu, requested: 5000, used: 0, capacity: 4000";
    assert_eq!(
        message("OutOfcpu", &with(&[("c1", "5,4500Mi")]), 2, error),
        r#"Pod resize OutOfcpu: {"containers":[{"name":"c1","resources":{"requests":{"cpu":"5","memory":"4500Mi"}}}],"generation":2,"error":"Node didn't have enough resource: cpu, requested: 5000, used: 0, capacity: 4000"}"#
    );
    let both = pod(
        r#"{"initContainers": [{"name": "i"}], "containers": [{"name": "c", "resources": {"limits": {"cpu": "0.5"}, "requests": {"cpu": "500m"}}}]}"#,
    );
    assert_eq!(
        message("completed", &both, 0, "a<b"),
        r#"Pod resize completed: {"initContainers":[{"name":"i","resources":{}}],"containers":[{"name":"c","resources":{"limits":{"cpu":"500m"},"requests":{"cpu":"500m"}}}],"generation":0,"error":"a\u003cb"}"#
    );
}

#[test]
fn what_was_asked_for_is_counted() {
    let show = |old: &str, new: &str| {
        let list = operations(&with(&[("a", old)]), &with(&[("a", new)]), true);
        list.iter().map(|o| format!("{} {} {}", o.resource, o.requirement, o.operation)).collect::<Vec<_>>().join(", ")
    };
    for (old, new, expected) in [
        ("1,1Gi/2,2Gi", "1,1Gi/2,2Gi", ""),
        ("1,1Gi", "1000m,1024Mi", ""),
        ("1,1Gi", "2,512Mi", "cpu requests increase, memory requests decrease"),
        ("1,/2,", "1,1Gi/2,2Gi", "memory requests add, memory limits add"),
        ("1,1Gi/,1Gi", "1,", "memory requests remove, memory limits remove"),
    ] {
        assert_eq!(show(old, new), expected, "{old} {new}");
    }
}

#[test]
fn what_this_node_can_never_do() {
    let rules = |change: fn(&mut ResizeRules)| {
        let mut rules = ResizeRules::default();
        change(&mut rules);
        rules
    };
    let guaranteed = |text: &str| with(&[("a", text)]);
    let (g1, g2) = (guaranteed("1,1Gi/1,1Gi"), guaranteed("2,1Gi/2,1Gi"));
    let (gm, b1, bm) = (guaranteed("1,2Gi/1,2Gi"), guaranteed("1,1Gi/2,2Gi"), guaranteed("1,2Gi/2,3Gi"));
    let level = |cpu: &str| {
        pod(&format!(r#"{{"resources": {{"requests": {{"cpu": "{cpu}"}}}}, "containers": [{{"name": "a"}}]}}"#))
    };
    let restarts = |memory: &str| {
        pod(&format!(
            r#"{{"containers": [{{"name": "a", "resizePolicy": [{{"resourceName": "memory", "restartPolicy": "RestartContainer"}}],
                "resources": {{"requests": {{"memory": "{memory}"}}, "limits": {{"memory": "4Gi"}}}}}}]}}"#
        ))
    };
    for (asked, given, rules, expected) in [
        (&g2, &g1, rules(|_| {}), None),
        (&g2, &g1, rules(|r| r.exclusive_cpus = true), Some("guaranteed_pod_cpu_manager_static_policy")),
        (&gm, &g1, rules(|r| r.exclusive_cpus = true), None),
        (&gm, &g1, rules(|r| r.exclusive_memory = true), Some("guaranteed_pod_memory_manager_static_policy")),
        (&g2, &g1, rules(|r| r.exclusive_memory = true), None),
        (&bm, &b1, rules(|r| (r.exclusive_cpus, r.exclusive_memory) = (true, true)), None),
        (&bm, &b1, rules(|r| r.swap = true), Some("swap_limitation")),
        (&gm, &g1, rules(|r| r.swap = true), None),
        (&restarts("2Gi"), &restarts("1Gi"), rules(|r| r.swap = true), None),
        (&level("2"), &level("1"), rules(|_| {}), None),
        (&level("2"), &level("1"), rules(|r| r.pod_level = false), Some("plr_feature_gate_off")),
    ] {
        assert_eq!(infeasible(asked, given, &rules).map(|f| f.detail), expected, "{:?}", asked.spec());
    }
}

#[test]
fn wishes_are_looked_at_in_order() {
    let asks = |priority: i32, resources: &str| {
        let spec: serde_json::Value = serde_json::from_str(&containers(&[("a", resources)])).expect("json");
        let mut spec = spec;
        spec["priority"] = priority.into();
        pod(&spec.to_string())
    };
    let given = asks(0, "1,1Gi/1,1Gi");
    let order = [
        // It asks for less.
        turn(&asks(0, "1,512Mi/1,1Gi"), &given, None, true),
        turn(&asks(9, "2,1Gi/4,1Gi"), &given, Some(at(9)), true),
        // Guaranteed before the others of its priority, whoever waits longer.
        turn(&asks(5, "2,1Gi/2,1Gi"), &given, Some(at(9)), true),
        turn(&asks(5, "2,1Gi/4,1Gi"), &given, Some(at(1)), true),
        turn(&asks(5, "2,1Gi/4,1Gi"), &given, Some(at(2)), true),
        turn(&asks(5, "2,1Gi/4,1Gi"), &given, None, true),
        turn(&asks(0, "2,1Gi/2,1Gi"), &given, Some(at(0)), true),
    ];
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn progress_is_what_runs_with_other_resources() {
    let p = pod(r#"{"initContainers": [{"name": "i", "resources": {"requests": {"cpu": "1"}}}],
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}, {"name": "b"}]}"#);
    let has = |cpu: &str| {
        let resources = with(&[("a", cpu)]).spec().containers[0].resources.clone().expect("resources");
        let mut has = allocation_of(&p, true);
        has.containers.insert("a".into(), resources.clone());
        has.containers.insert("i".into(), resources);
        has
    };
    let all = ResizeRules::default();
    let apps = ResizeRules { init_containers: false, ..all };
    for (items, cpu, rules, expected) in [
        (&["s0 ready", "s0/a", "s0/b"][..], "1,", all, false),
        (&["s0 ready", "s0/a", "s0/b"], "2,", all, true),
        // What does not run starts with what the pod was given.
        (&["s0 ready", "s0/a exit=0", "s0/b"], "2,", all, false),
        (&["s0 ready", "s0/i"], "2,", all, true),
        (&["s0 ready", "s0/i"], "2,", apps, false),
    ] {
        assert_eq!(in_progress(&p, &seen(items), &has(cpu), &rules), expected, "{items:?} {cpu}");
    }
    let level = pod(r#"{"resources": {"limits": {"memory": "2Gi"}}, "containers": [{"name": "a"}]}"#);
    let mut has = allocation_of(&level, true);
    has.containers
        .insert("a".into(), record(&Default::default(), &spec_sizes(&level, &level.container("a").expect("a"))));
    let nothing = seen(&["s0 ready", "s0/a"]);
    assert!(!in_progress(&level, &nothing, &has, &all));
    has.pod_level = None;
    assert!(!in_progress(&level, &nothing, &has, &all), "without a record nothing is known to change");
    has.pod_level = pod(r#"{"resources": {"limits": {"memory": "1Gi"}}, "containers": []}"#).spec().resources.clone();
    assert!(in_progress(&level, &nothing, &has, &all));
}

#[test]
fn a_lost_record_is_taken_from_the_runtime() {
    let p = with(&[("a", "100m,64Mi/200m,128Mi")]);
    let node = crate::config::tests::node();
    let entry = p.container("a").expect("a");
    let mut c = seen(&["s0 ready", "s0/a"]).containers.remove(0);
    let shown = |c: &model::observed::ObservedContainer| sizes(None, &taken_over(&p, entry, c, &node));
    let given = spec_sizes(&p, &entry);
    assert_eq!(shown(&c), given, "the runtime says nothing");
    c.resources =
        Some(ObservedResources { cpu_shares: 102, cpu_quota: 20_000, cpu_period: 100_000, memory_limit: 128 << 20 });
    assert_eq!(shown(&c), given, "the runtime shows what was given");
    c.resources =
        Some(ObservedResources { cpu_shares: 512, cpu_quota: -1, cpu_period: 100_000, memory_limit: 64 << 20 });
    let other = model::plan::Sizes { cpu_request: 500, cpu_limit: 0, memory_request: 64 << 20, memory_limit: 64 << 20 };
    assert_eq!(shown(&c), other, "the runtime shows something else");
}

#[test]
fn conditions_are_told_and_read_back() {
    let pending = PendingResize {
        reason: PendingReason::Deferred,
        message: "Node didn't have enough resource: cpu".into(),
        generation: 3,
        since: at(5),
    };
    let mut progress = Progress::new(2, at(1));
    let shown = |progress: &Progress| {
        let status = PodStatus { conditions: Some(conditions(Some(&pending), Some(progress))), ..Default::default() };
        assert_eq!(stored_pending(&status).as_ref(), Some(&pending));
        assert_eq!(Progress::stored(&status).as_ref(), Some(progress));
        let list = status.conditions.expect("conditions");
        let one = |c: &PodCondition| {
            let (reason, generation) = (c.reason.clone().unwrap_or_default(), c.observed_generation.unwrap_or(0));
            format!("{}={} {reason} {generation}", c.type_, c.status)
        };
        list.iter().map(one).collect::<Vec<_>>()
    };
    assert_eq!(shown(&progress), ["PodResizePending=True Deferred 3", "PodResizeInProgress=True  2"]);
    assert!(progress.fail("no", at(7)));
    assert!(!progress.fail("no", at(8)), "the same again is no news");
    assert_eq!(progress.since, at(7));
    assert_eq!(shown(&progress), ["PodResizePending=True Deferred 3", "PodResizeInProgress=True Error 2"]);
}

#[test]
fn memory_in_use_is_not_taken_away() {
    let c = |name: &str, limit: i64, used: Option<u64>| (name.to_owned(), limit, used);
    for (pod, containers, expected) in [
        (None, vec![], None),
        (Some((100, Some(99))), vec![c("a", 100, Some(99))], None),
        (
            Some((100, Some(100))),
            vec![],
            Some("cannot decrease memory limits: attempting to set pod memory limit (100) below current usage (100)"),
        ),
        (
            Some((100, None)),
            vec![c("a", 50, Some(60)), c("b", 5, None)],
            Some(
                "cannot decrease memory limits: [missing pod memory usage, attempting to set container \"a\" memory limit (50) below current usage (60), missing container \"b\" memory usage]",
            ),
        ),
    ] {
        assert_eq!(memory_faults(pod, &containers).as_deref(), expected);
    }
}

// ---- The plan

fn plan(pod: &DesiredPod, items: &[&str], has: &PodAllocation, differs: bool) -> model::plan::Plan {
    let observed = seen(items);
    crate::plan::plan(&crate::plan::PlanInput {
        pod,
        observed: &observed,
        probes: &|_| Default::default(),
        backoffs: &crate::backoff::Backoffs::default(),
        now: at(1000),
        gates: Default::default(),
        container_hash: &hash,
        has: Some(crate::plan::Has { actuated: has, cgroup_differs: differs, rules: ResizeRules::default() }),
    })
}

fn show(plan: &model::plan::Plan) -> String {
    let mut parts: Vec<String> =
        plan.kill.iter().map(|k| format!("kill {} {:?} {:?}", k.name, k.reason, k.message)).collect();
    if let Some(r) = &plan.resize {
        let names = |list: &[model::plan::Update]| list.iter().map(|u| u.name.as_str()).collect::<Vec<_>>().join("+");
        parts.push(format!("memory {} cpu {} pod {}", names(&r.memory), names(&r.cpu), r.pod));
    }
    parts.extend(plan.start.iter().map(|s| format!("start {}", s.name)));
    parts.join("; ")
}

#[test]
fn running_containers_are_updated_or_restarted() {
    let policies = |cpu: &str, memory: &str| {
        format!(
            r#""resizePolicy": [{{"resourceName": "cpu", "restartPolicy": "{cpu}"}}, {{"resourceName": "memory", "restartPolicy": "{memory}"}}]"#
        )
    };
    let one = |policy: &str, cpu: &str, memory: &str| {
        pod(&format!(
            r#"{{"restartPolicy": "Never", "containers": [{{"name": "a", {policy}, "resources": {{"requests": {{"cpu": "{cpu}", "memory": "{memory}"}}, "limits": {{"memory": "4Gi"}}}}}}]}}"#
        ))
    };
    let stays = policies("NotRequired", "NotRequired");
    let mixed = policies("NotRequired", "RestartContainer");
    let runs = &["s0 ready", "s0/a"][..];
    for (policy, cpu, memory, items, expected) in [
        (&stays, "1", "1Gi", runs, ""),
        (&stays, "2", "1Gi", runs, "memory  cpu a pod false"),
        (&stays, "1", "2Gi", runs, "memory a cpu  pod false"),
        (&mixed, "2", "1Gi", runs, "memory  cpu a pod false"),
        (&mixed, "2", "2Gi", runs, "kill a Resize \"Container a resize requires restart\"; start a"),
        // What has ended is not started for its resources.
        (&mixed, "2", "2Gi", &["s0 ready", "s0/a exit=0"], ""),
    ] {
        let has = allocation_of(&one(policy, "1", "1Gi"), true);
        assert_eq!(show(&plan(&one(policy, cpu, memory), items, &has, false)), expected, "{cpu} {memory} {items:?}");
    }
    // Nothing is known to have changed.
    let none = PodAllocation::default();
    assert_eq!(show(&plan(&one(&mixed, "2", "2Gi"), runs, &none, false)), "");
    // The cgroup alone, as after an agent that was cut off.
    let has = allocation_of(&one(&stays, "1", "1Gi"), true);
    assert_eq!(show(&plan(&one(&stays, "1", "1Gi"), runs, &has, true)), "memory  cpu  pod true");
    assert_eq!(show(&plan(&one(&stays, "1", "1Gi"), &["s0 ready", "s0/a exit=0"], &has, true)), "");
}

#[test]
fn init_containers_and_sidecars_are_resized_while_they_run() {
    let spec = |cpu: &str| {
        pod(&format!(
            r#"{{"initContainers": [
                {{"name": "s", "restartPolicy": "Always", "resizePolicy": [{{"resourceName": "cpu", "restartPolicy": "RestartContainer"}}], "resources": {{"requests": {{"cpu": "{cpu}"}}}}}},
                {{"name": "i", "resources": {{"requests": {{"cpu": "{cpu}"}}}}}}],
               "containers": [{{"name": "a"}}]}}"#
        ))
    };
    let has = allocation_of(&spec("1"), true);
    let running = plan(&spec("2"), &["s0 ready", "s0/s", "s0/i"], &has, false);
    assert_eq!(
        show(&running),
        "kill s Resize \"Container s resize requires restart\"; memory  cpu i pod false; start s"
    );
}

#[test]
fn pod_level_limits_reach_containers_without_their_own() {
    let spec = |memory: &str| {
        pod(&format!(
            r#"{{"resources": {{"limits": {{"memory": "{memory}"}}}},
                "containers": [{{"name": "a"}}, {{"name": "b", "resources": {{"limits": {{"memory": "1Gi"}}}}}}]}}"#
        ))
    };
    let has = |memory: &str| {
        let p = spec(memory);
        let mut has = allocation_of(&p, true);
        for entry in p.app_containers() {
            has.containers.insert(entry.spec.name.clone(), record(&Default::default(), &spec_sizes(&p, &entry)));
        }
        has
    };
    let runs = &["s0 ready", "s0/a", "s0/b"];
    assert_eq!(show(&plan(&spec("2Gi"), runs, &has("2Gi"), false)), "");
    assert_eq!(show(&plan(&spec("4Gi"), runs, &has("2Gi"), false)), "memory a cpu  pod true");
    let later = pod_with(r#"{"deletionTimestamp": "2030-01-01T00:00:00Z"}"#, r#"{"containers": [{"name": "a"}]}"#);
    assert_eq!(show(&plan(&later, runs, &has("2Gi"), true)), "", "what ends is not resized");
}

fn limited(limits: &[(i64, i64)]) -> DesiredPod {
    let one = |(i, (cpu, memory)): (usize, &(i64, i64))| {
        let list = serde_json::json!({"cpu": format!("{cpu}m"), "memory": format!("{memory}Mi")});
        serde_json::json!({"name": format!("c{i}"), "resources": {"requests": list, "limits": list}})
    };
    pod(&serde_json::json!({"containers": limits.iter().enumerate().map(one).collect::<Vec<_>>()}).to_string())
}

proptest! {
    /// Carried out step by step, a plan brings the pod to what it was given, and on the way the limits of its containers together never exceed that
    /// of the pod.
    #[test]
    fn a_plan_converges_below_the_pods_limit(
        old in prop::collection::vec((10i64..2000, 10i64..2000), 1..5),
        change in prop::collection::vec((10i64..2000, 10i64..2000, any::<bool>(), any::<bool>()), 5),
    ) {
        let new: Vec<_> = old.iter().zip(&change).map(|(o, c)| (if c.2 { c.0 } else { o.0 }, if c.3 { c.1 } else { o.1 })).collect();
        let (before, after) = (limited(&old), limited(&new));
        let mut has = allocation_of(&before, true);
        let names: Vec<String> = (0..old.len()).map(|i| format!("c{i}")).collect();
        let items: Vec<String> = std::iter::once("s0 ready".to_owned()).chain(names.iter().map(|n| format!("s0/{n}"))).collect();
        let items: Vec<&str> = items.iter().map(String::as_str).collect();
        let options = crate::resources::PodCgroupOptions::default();
        let cgroup = |pod: &DesiredPod| crate::resources::pod_cgroup_resources(pod, &options);
        let (mut current, due) = (cgroup(&before), cgroup(&after));
        let differs = cgroup_differs(&current, &due, false);
        let made = plan(&after, &items, &has, differs);
        // Planned before it was known how the cgroup stands, it comes to the same.
        let early = plan(&after, &items, &has, false).resize;
        let known = crate::plan::Has { actuated: &has, cgroup_differs: differs, rules: ResizeRules::default() };
        prop_assert_eq!(crate::plan::with_pod_resize(early, &after, &known), made.resize.clone());
        prop_assert!(made.kill.is_empty() && made.start.is_empty());
        let resize = made.resize.clone().unwrap_or_default();
        prop_assert_eq!(made.resize.is_none(), old == new);
        let quota = |milli: i64| crate::resources::cpu::quota(milli, 100_000);
        let check = |has: &PodAllocation, current: &model::cgroup::CgroupResources| -> Result<(), TestCaseError> {
            let all: Vec<_> = has.containers.values().map(|r| sizes(None, r)).collect();
            prop_assert!(all.iter().map(|s| s.memory_limit).sum::<i64>() <= current.memory_limit.expect("limited"));
            prop_assert!(all.iter().map(|s| quota(s.cpu_limit)).sum::<i64>() <= current.cpu_quota.expect("limited"));
            Ok(())
        };
        for (kind, updates) in [(Kind::Memory, &resize.memory), (Kind::Cpu, &resize.cpu)] {
            let steps = CgroupSteps::new(kind, &current, &due);
            for step in &steps.before {
                current = merge(&current, step);
                check(&has, &current)?;
            }
            for u in updates {
                let now = sizes(None, &has.containers[&u.name]);
                let to = match kind {
                    Kind::Memory => model::plan::Sizes { memory_request: u.to.memory_request, memory_limit: u.to.memory_limit, ..now },
                    Kind::Cpu => model::plan::Sizes { cpu_request: u.to.cpu_request, cpu_limit: u.to.cpu_limit, ..now },
                };
                let made = record(&has.containers[&u.name], &to);
                has.containers.insert(u.name.clone(), made);
                check(&has, &current)?;
            }
            for step in &steps.after {
                current = merge(&current, step);
                check(&has, &current)?;
            }
        }
        prop_assert!(!cgroup_differs(&current, &due, false));
        prop_assert!(!in_progress(&after, &seen(&items), &has, &ResizeRules::default()));
        prop_assert_eq!(plan(&after, &items, &has, false).resize, None);
    }
}
