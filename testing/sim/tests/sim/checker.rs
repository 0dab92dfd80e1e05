//! The checker itself: each rule is broken once, on a made-up log.

use std::time::Duration;

use sim::check::{Ask, Checker, Fact, Form};

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A pod with an init container, a sidecar and an app; in it a ready sandbox.
fn checker() -> Checker {
    let form = Form {
        uid: "u".into(),
        name: "p".into(),
        grace: 10,
        always: true,
        watched: false,
        inits: vec![("init".into(), false), ("side".into(), true)],
        apps: vec!["app".into()],
        images: [("app".to_owned(), "img".to_owned())].into(),
    };
    let mut checker = Checker::default();
    checker.take(at(0), Fact::AgentStarts);
    checker.take(at(0), Fact::Wanted(form));
    checker.take(at(0), Fact::SandboxReady { id: "s".into(), uid: "u".into() });
    checker
}

fn create(checker: &mut Checker, when: u64, id: &str, name: &str, count: u32) {
    let created = Fact::Created {
        id: id.into(),
        uid: "u".into(),
        name: name.into(),
        sandbox: "s".into(),
        image: "img".into(),
        count,
    };
    checker.take(at(when), created);
}

fn start(checker: &mut Checker, when: u64, id: &str, name: &str, count: u32) {
    create(checker, when, id, name, count);
    checker.take(at(when), Fact::Asked(Ask::Start(id.into())));
    checker.take(at(when), Fact::Started(id.into()));
}

/// Initialised, and the app runs as `a0`.
fn running() -> Checker {
    let mut checker = checker();
    start(&mut checker, 0, "i0", "init", 0);
    checker.take(at(1), Fact::Exited("i0".into(), 0));
    start(&mut checker, 1, "s0", "side", 0);
    start(&mut checker, 1, "a0", "app", 0);
    assert_eq!(checker.violations(), [] as [&str; 0]);
    checker
}

#[track_caller]
fn caught(checker: &Checker, words: &str) {
    let all = checker.violations();
    assert!(all.iter().any(|v| v.contains(words)), "{words:?} is not among {all:?}");
}

fn unwanted() -> Fact {
    Fact::Unwanted { uid: "u".into(), known: true, grace: None }
}

fn stop(id: &str, grace: u64) -> Fact {
    Fact::Asked(Ask::Stop(id.into(), at(grace)))
}

#[test]
fn an_ordinary_life_is_sound() {
    let mut c = running();
    c.take(at(5), Fact::Exited("a0".into(), 1));
    start(&mut c, 5, "a1", "app", 1);
    c.take(at(6), Fact::Exited("a1".into(), 1));
    start(&mut c, 16, "a2", "app", 2);
    c.take(at(20), unwanted());
    c.take(at(20), stop("a2", 10));
    c.take(at(21), Fact::Exited("a2".into(), 143));
    c.take(at(22), stop("s0", 8));
    c.take(at(22), Fact::Exited("s0".into(), 143));
    c.take(at(22), Fact::Asked(Ask::StopSandbox("s".into())));
    c.take(at(22), Fact::SandboxEnded("s".into()));
    for id in ["a0", "a1", "a2", "s0", "i0"] {
        c.take(at(23), Fact::Asked(Ask::Remove(id.into())));
        c.take(at(23), Fact::Gone(id.into()));
    }
    c.take(at(23), Fact::Asked(Ask::RemoveSandbox("s".into())));
    c.take(at(23), Fact::Asked(Ask::TakeAway("u".into(), "removal of the directory")));
    assert_eq!(c.violations(), [] as [&str; 0]);
}

#[test]
fn two_of_a_name_are_caught() {
    let mut c = running();
    start(&mut c, 2, "a1", "app", 1);
    caught(&c, "started while a0 was running");
}

#[test]
fn two_sandboxes_are_caught() {
    let mut c = running();
    c.take(at(2), Fact::SandboxReady { id: "t".into(), uid: "u".into() });
    caught(&c, "is ready beside s");
}

#[test]
fn an_app_before_its_init_containers_is_caught() {
    let mut c = checker();
    start(&mut c, 0, "i0", "init", 0);
    c.take(at(1), Fact::Exited("i0".into(), 1));
    start(&mut c, 1, "s0", "side", 0);
    caught(&c, "side (s0) in pod u started before init container init was through");
    let mut c = checker();
    start(&mut c, 0, "a0", "app", 0);
    caught(&c, "before init container side was through");
}

#[test]
fn a_start_during_the_end_is_caught() {
    let mut c = running();
    c.take(at(5), unwanted());
    c.take(at(6), Fact::Asked(Ask::Create("s".into())));
    caught(&c, "a container was asked for in pod u, unwanted");
    // Wanted again: first what began to end must end.
    let mut c = running();
    c.take(at(5), unwanted());
    c.take(at(6), stop("a0", 10));
    let form = Form { uid: "u".into(), ..Form::default() };
    c.take(at(6), Fact::Wanted(form));
    c.take(at(7), Fact::Asked(Ask::RunSandbox("u".into())));
    caught(&c, "while its end was under way");
}

#[test]
fn a_pod_that_nobody_wanted_is_caught() {
    let mut c = checker();
    c.take(at(0), Fact::Asked(Ask::RunSandbox("x".into())));
    caught(&c, "which nobody ever wanted");
}

#[test]
fn a_short_grace_is_caught() {
    let mut c = running();
    c.take(at(5), unwanted());
    c.take(at(7), stop("a0", 7));
    caught(&c, "8s of its grace are left");
    let mut c = running();
    c.take(at(5), unwanted());
    c.take(at(50), stop("a0", 1));
    caught(&c, "at least 2 s are due");
}

#[test]
fn a_kill_without_reason_is_caught() {
    let mut c = running();
    c.take(at(5), stop("a0", 10));
    caught(&c, "which was well and wanted");
}

#[test]
fn an_end_without_grace_is_caught() {
    for ask in [
        Ask::StopSandbox("s".into()),
        Ask::RemoveSandbox("s".into()),
        Ask::Remove("a0".into()),
        Ask::TakeAway("u".into(), "removal of the directory"),
    ] {
        let mut c = running();
        c.take(at(5), Fact::Asked(ask));
        caught(&c, "while app (a0) was running");
    }
}

#[test]
fn a_start_before_its_back_off_is_caught() {
    let mut c = running();
    c.take(at(5), Fact::Exited("a0".into(), 1));
    start(&mut c, 5, "a1", "app", 1);
    c.take(at(6), Fact::Exited("a1".into(), 1));
    start(&mut c, 15, "a2", "app", 2);
    caught(&c, "its back-off is 10s");
    // After a run of more than ten minutes it begins anew.
    let mut c = running();
    c.take(at(5), Fact::Exited("a0".into(), 1));
    start(&mut c, 5, "a1", "app", 1);
    c.take(at(700), Fact::Exited("a1".into(), 1));
    start(&mut c, 700, "a2", "app", 2);
    assert_eq!(c.violations(), [] as [&str; 0]);
}

#[test]
fn a_count_that_falls_is_caught() {
    let mut c = running();
    c.take(at(5), Fact::Exited("a0".into(), 1));
    c.take(at(5), Fact::Gone("a0".into()));
    create(&mut c, 6, "a1", "app", 0);
    caught(&c, "restartCount of app in pod u went from 0 to 0");
}
