//! Probes and hooks over restarts, and on the way to the end; ranges of host ids.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cri_api::v1;
use fakes::{Exec, For, Process};
use serde_json::{Value, json};
use sim::{Container, Manifest, Node, Setup, run};

use super::{MINUTE, SECOND, millis, newest, running_id, up};

/// What commands in the container `app` find, and when which were run.
#[derive(Clone, Default)]
struct Checks(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    well: bool,
    log: Vec<(tokio::time::Instant, String)>,
}

impl Checks {
    /// Commands succeed while all is well; `hang` never ends.
    fn of(node: &Node) -> Self {
        let checks = Self::default();
        checks.set(true);
        let state = checks.0.clone();
        node.runtime().script_exec("app", move |command| {
            let mut state = state.lock().unwrap();
            state.log.push((tokio::time::Instant::now(), command[0].clone()));
            let output = cri::ExecOutput { exit_code: i32::from(!state.well), ..Default::default() };
            let takes = if command[0] == "hang" { Duration::from_secs(100_000) } else { millis(10) };
            Exec { output, takes }
        });
        checks
    }

    fn set(&self, well: bool) {
        self.0.lock().unwrap().well = well;
    }

    /// Commands that were run since a moment.
    fn since(&self, at: tokio::time::Instant) -> Vec<String> {
        let state = self.0.lock().unwrap();
        state.log.iter().filter(|(when, _)| *when >= at).map(|(_, what)| what.clone()).collect()
    }
}

fn exec(command: &str, more: Value) -> Value {
    let mut probe = json!({"exec": {"command": [command]}, "periodSeconds": 1});
    for (key, value) in more.as_object().unwrap() {
        probe[key] = value.clone();
    }
    probe
}

fn app(probes: &[(&str, Value)]) -> Container {
    probes.iter().fold(Container::new("app"), |c, (kind, probe)| c.with(kind, probe.clone()))
}

fn status(node: &Node, uid: &str) -> model::api::ContainerStatus {
    node.status(uid).container_statuses.unwrap().into_iter().find(|c| c.name == "app").unwrap()
}

fn condition(node: &Node, uid: &str, kind: &str) -> String {
    let conditions = node.status(uid).conditions.unwrap_or_default();
    conditions.into_iter().find(|c| c.type_ == kind).map(|c| c.status).unwrap_or_default()
}

/// A15: whatever ended the one before, a new container is asked for nothing else until its own startup probe succeeded.
#[test]
fn every_new_container_waits_for_its_startup_probe() {
    run(async {
        let mut node = Node::new(20).await;
        let checks = Checks::of(&node);
        let probes = [
            ("startupProbe", exec("startup", json!({"failureThreshold": 60}))),
            ("livenessProbe", exec("live", json!({"failureThreshold": 2}))),
            ("readinessProbe", exec("ready", json!({"failureThreshold": 1}))),
        ];
        node.write("a.yaml", &Manifest::new("a").apps([app(&probes)]));
        let uid = node.uid("a.yaml");
        for round in 0..3 {
            assert!(node.until(20 * SECOND, |n| condition(n, &uid, "Ready") == "True").await, "round {round}");
            assert_eq!(node.runtime().starts(&uid, "app"), round + 1);
            node.run(3 * SECOND).await;
            let before = running_id(&node, &uid, "app");
            checks.set(false);
            if round == 1 {
                // This time nobody has to find out.
                node.runtime().exit(&before, 1);
            }
            let replaced = |n: &Node| n.runtime().starts(&uid, "app") == round + 2;
            assert!(node.until(20 * SECOND, replaced).await, "round {round}");
            let began = tokio::time::Instant::now();
            node.run(8 * SECOND).await;
            let asked = checks.since(began);
            assert!(asked.len() >= 6 && asked.iter().all(|what| what == "startup"), "round {round}: {asked:?}");
            let shown = status(&node, &uid);
            assert_eq!((shown.started, shown.ready), (Some(false), false), "round {round}");
            assert_eq!(node.runtime().starts(&uid, "app"), round + 2, "killed while it was starting");
            let up_at = tokio::time::Instant::now();
            checks.set(true);
            node.run(5 * SECOND).await;
            let asked = checks.since(up_at);
            assert_eq!(asked.iter().filter(|what| *what == "startup").count(), 1, "round {round}: {asked:?}");
            assert!(asked.iter().any(|what| what == "live") && asked.iter().any(|what| what == "ready"));
        }
        node.assert_sound();
    });
}

/// A16, without an API server: a restarted agent knows what was found of these very containers.
#[test]
fn what_probes_found_outlives_the_agent() {
    run(async {
        let mut node = Node::new(21).await;
        let checks = Checks::of(&node);
        let probes = [
            ("startupProbe", exec("startup", json!({}))),
            ("readinessProbe", exec("ready", json!({"periodSeconds": 40, "failureThreshold": 1}))),
        ];
        node.write("a.yaml", &Manifest::new("a").apps([app(&probes)]));
        let uid = node.uid("a.yaml");
        assert!(node.until(50 * SECOND, |n| condition(n, &uid, "Ready") == "True").await);
        let id = running_id(&node, &uid, "app");
        for _ in 0..3 {
            node.restart(SECOND).await;
            let began = tokio::time::Instant::now();
            let seen = |n: &Node| !condition(n, &uid, "Ready").is_empty();
            assert!(node.until(5 * SECOND, seen).await);
            for _ in 0..20 {
                let shown = status(&node, &uid);
                assert_eq!((shown.started, shown.ready), (Some(true), true));
                assert_eq!(condition(&node, &uid, "ContainersReady"), "True");
                node.run(millis(250)).await;
            }
            assert!(!checks.since(began).contains(&"startup".to_owned()), "it had started long ago");
        }
        assert_eq!((running_id(&node, &uid, "app"), node.runtime().starts(&uid, "app")), (id.clone(), 1));
        // What was found while no agent looked away counts; another container begins anew.
        checks.set(false);
        assert!(node.until(MINUTE, |n| condition(n, &uid, "Ready") == "False").await);
        node.restart(SECOND).await;
        node.run(2 * SECOND).await;
        assert_eq!(condition(&node, &uid, "Ready"), "False");
        node.kill();
        node.runtime().exit(&id, 1);
        node.start().await;
        assert!(node.until(10 * SECOND, |n| n.runtime().starts(&uid, "app") == 2).await);
        node.run(2 * SECOND).await;
        assert_eq!(status(&node, &uid).started, Some(false));
        node.remove("a.yaml");
        node.settle(MINUTE).await;
        assert!(node.host().standing().files.keys().all(|f| !f.ends_with("rubelet-probes")), "nothing is left of it");
    });
}

/// A12: readiness goes on to the end, the others do not.
#[test]
fn readiness_is_asked_until_the_end() {
    run(async {
        let mut node = Node::new(22).await;
        let checks = Checks::of(&node);
        node.runtime().script(For::Container("app".into()), [Process::forever().trapping_term(0, 30 * SECOND)]);
        let probes = [
            ("livenessProbe", exec("live", json!({"failureThreshold": 1}))),
            ("readinessProbe", exec("ready", json!({"failureThreshold": 1}))),
        ];
        node.write("a.yaml", &Manifest::new("a").grace(60).apps([app(&probes)]));
        let uid = node.uid("a.yaml");
        assert!(node.until(10 * SECOND, |n| condition(n, &uid, "Ready") == "True").await);
        node.remove("a.yaml");
        node.run(SECOND).await;
        checks.set(false);
        let began = tokio::time::Instant::now();
        assert!(node.until(2 * SECOND, |n| condition(n, &uid, "Ready") == "False").await, "told at once");
        assert_eq!(condition(&node, &uid, "ContainersReady"), "False");
        node.run(10 * SECOND).await;
        let asked = checks.since(began);
        assert!(asked.len() >= 10 && asked.iter().all(|what| what == "ready"), "{asked:?}");
        assert_eq!(node.runtime().calls_of("StopContainer").len(), 1, "no second kill");
        assert_eq!(node.runtime().starts(&uid, "app"), 1);
        node.settle(MINUTE).await;
    });
}

/// A07: what a preStop hook takes comes off the grace; of nothing there is twice as much.
#[test]
fn a_hook_that_hangs_takes_no_more_than_the_grace() {
    run(async {
        for (grace, hook, at_least, at_most) in
            [(20, "hang", 20.0, 22.6), (20, "quick", 20.0, 20.6), (1, "hang", 1.0, 3.6)]
        {
            let mut node = Node::new(23).await;
            let checks = Checks::of(&node);
            node.runtime().script(For::Container("app".into()), [Process::forever().ignoring_term()]);
            let hooked = Container::new("app").with("lifecycle", json!({"preStop": {"exec": {"command": [hook]}}}));
            let uid = up(&mut node, "a.yaml", &Manifest::new("a").grace(grace).apps([hooked])).await;
            let began = tokio::time::Instant::now();
            node.remove("a.yaml");
            assert!(node.until(MINUTE, |n| n.running(&uid).is_empty()).await);
            let took = began.elapsed().as_secs_f64();
            assert!((at_least..at_most).contains(&took), "{hook} in {grace}: {took}");
            assert_eq!(checks.since(began), [hook], "once");
            node.settle(MINUTE).await;
        }
    });
}

/// A11: a pod whose postStart hook hangs ends when it is told to.
#[test]
fn a_post_start_hook_that_hangs_holds_up_no_end() {
    run(async {
        let mut node = Node::new(24).await;
        Checks::of(&node);
        let hooked = Container::new("app").with("lifecycle", json!({"postStart": {"exec": {"command": ["hang"]}}}));
        node.write("a.yaml", &Manifest::new("a").grace(5).apps([hooked, Container::new("later")]));
        let uid = node.uid("a.yaml");
        node.run(5 * SECOND).await;
        let waits = status(&node, &uid).state.unwrap().waiting;
        assert!(waits.is_some(), "it is not up before its hook has ended");
        assert_eq!(node.runtime().starts(&uid, "later"), 0);
        let began = tokio::time::Instant::now();
        node.remove("a.yaml");
        assert!(node.until(MINUTE, |n| n.is_gone(&uid)).await);
        let took = began.elapsed().as_secs_f64();
        assert!(took < 7.5, "{took}");
        node.settle(MINUTE).await;
    });
}

/// A18: a probe that takes too long has failed; its own grace is for its own kill only.
#[test]
fn probes_that_take_too_long_and_graces_of_their_own() {
    run(async {
        let mut node = Node::new(25).await;
        Checks::of(&node);
        let slow = exec("hang", json!({"periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 3}));
        node.runtime().script(For::PodContainer("deaf-sim".into(), "app".into()), [Process::forever().ignoring_term()]);
        node.write("slow.yaml", &Manifest::new("slow").apps([app(&[("livenessProbe", slow.clone())])]));
        node.write("unready.yaml", &Manifest::new("unready").apps([app(&[("readinessProbe", slow.clone())])]));
        let mut own = slow;
        own["terminationGracePeriodSeconds"] = json!(2);
        node.write("deaf.yaml", &Manifest::new("deaf").grace(300).apps([app(&[("livenessProbe", own.clone())])]));
        own["failureThreshold"] = json!(100);
        let calm = Manifest::new("calm").grace(300).apps([app(&[("livenessProbe", own)])]);
        node.runtime().script(For::PodContainer("calm-sim".into(), "app".into()), [Process::forever().ignoring_term()]);
        node.write("calm.yaml", &calm);
        let [slow, unready, deaf, calm] = ["slow", "unready", "deaf", "calm"].map(|n| node.uid(&format!("{n}.yaml")));
        node.run(4 * SECOND).await;
        assert_eq!(node.runtime().starts(&slow, "app"), 1, "not before the third failure");
        assert!(node.until(8 * SECOND, |n| n.runtime().starts(&slow, "app") == 2).await);
        assert_eq!(condition(&node, &unready, "Ready"), "False");
        assert_eq!(node.runtime().starts(&unready, "app"), 1);
        assert!(
            node.until(4 * SECOND, |n| n.runtime().starts(&deaf, "app") == 2).await,
            "killed within its probe's grace"
        );
        let stops = node.runtime().calls_of("StopContainer");
        assert!(stops.iter().filter(|c| c.subject.contains("deaf-sim")).count() == 1, "{stops:?}");
        // An end of the pod is none of the probe's business.
        node.remove("calm.yaml");
        node.run(10 * SECOND).await;
        assert_eq!(node.running(&calm).len(), 1, "the pod's own grace counts");
        assert_eq!(newest(&node, &calm, "app").state(), v1::ContainerState::ContainerRunning);
        assert!(node.until(6 * MINUTE, |n| n.is_gone(&calm)).await);
        node.assert_sound();
    });
}

/// The range of host ids that a pod's sandbox maps.
fn mapped(node: &Node, uid: &str) -> Vec<v1::IdMapping> {
    let sandbox = node.runtime().sandboxes().into_iter().filter(|s| s.metadata.as_ref().is_some_and(|m| m.uid == uid));
    let newest = sandbox.max_by_key(|s| s.created_at).expect("a sandbox");
    let config = node.runtime().sandbox_config(&newest.id).unwrap();
    let options = config.linux.unwrap().security_context.unwrap().namespace_options.unwrap().userns_options.unwrap();
    assert_eq!(options.mode(), v1::NamespaceMode::Pod);
    assert_eq!(options.uids, options.gids);
    options.uids
}

fn with_users(name: &str) -> Vec<u8> {
    let mut manifest: Value = serde_json::from_str(&Manifest::new(name).text()).unwrap();
    manifest["spec"]["hostUsers"] = json!(false);
    manifest.to_string().into_bytes()
}

#[test]
fn ranges_of_host_ids_are_kept_over_everything_and_given_back() {
    run(async {
        let mut runtime = fakes::Settings::default();
        for handler in &mut runtime.status.runtime_handlers {
            handler.features = Some(v1::RuntimeHandlerFeatures { user_namespaces: true, ..Default::default() });
        }
        let mut node = Node::with(Setup { seed: 26, runtime, ..Default::default() }).await;
        for name in ["a", "b"] {
            node.write_bytes(&format!("{name}.yaml"), with_users(name));
        }
        let [a, b] = ["a.yaml", "b.yaml"].map(|f| node.uid(f));
        assert!(node.until(20 * SECOND, |n| n.all_run(&a) && n.all_run(&b)).await);
        let [of_a, of_b] = [&a, &b].map(|uid| mapped(&node, uid));
        assert_eq!((of_a[0].container_id, of_a[0].length), (0, 65_536));
        assert!(of_a[0].host_id >= 65_536 && of_a[0].host_id.is_multiple_of(65_536));
        assert_ne!(of_a, of_b);
        let files = |node: &Node| {
            let files = node.host().standing().files;
            files.into_iter().filter(|(path, _)| path.ends_with("userns")).map(|(_, text)| text).collect::<Vec<_>>()
        };
        assert_eq!(files(&node).len(), 2);
        let config = node.runtime().container_config(&running_id(&node, &a, "app")).unwrap();
        assert!(
            config.mounts.iter().all(|m| m.uid_mappings == of_a && m.gid_mappings == of_a),
            "volumes are mapped too"
        );

        // The next agent knows them, for a new sandbox as well; and gives them to nobody else.
        node.restart(SECOND).await;
        let sandbox = node.runtime().sandboxes().into_iter().find(|s| s.metadata.as_ref().unwrap().uid == a).unwrap();
        node.runtime().end_sandbox(&sandbox.id);
        node.write_bytes("c.yaml", with_users("c"));
        let c = node.uid("c.yaml");
        assert!(node.until(30 * SECOND, |n| n.all_run(&c) && n.runtime().starts(&a, "app") == 2).await);
        assert_eq!(mapped(&node, &a), of_a);
        let of_c = mapped(&node, &c);
        assert!(of_c != of_a && of_c != of_b);

        node.remove("b.yaml");
        assert!(node.until(MINUTE, |n| n.is_gone(&b)).await);
        assert_eq!(files(&node).len(), 2, "given back");
        for file in ["a.yaml", "c.yaml"] {
            node.remove(file);
        }
        node.settle(MINUTE).await;
        assert!(files(&node).is_empty());
    });
}

#[test]
fn a_runtime_without_user_namespaces_is_told_of_none() {
    run(async {
        let mut runtime = fakes::Settings::default();
        runtime.status.runtime_handlers.iter_mut().for_each(|handler| handler.features = None);
        let mut node = Node::with(Setup { seed: 27, runtime, ..Default::default() }).await;
        node.write_bytes("a.yaml", with_users("a"));
        let uid = node.uid("a.yaml");
        node.run(10 * SECOND).await;
        assert_eq!(node.phase(&uid), "Pending");
        assert!(node.runtime().sandboxes().is_empty(), "not run as if nothing had been asked for");
    });
}
