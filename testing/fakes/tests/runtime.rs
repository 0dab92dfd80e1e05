//! The fake runtime's own rules, through the port and under paused time.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use cri::{CriError, Outcome, RuntimeMutator, RuntimeReader};
use cri_api::v1::{self, ContainerState};
use fakes::{Ended, Exec, FakeRuntime, Fault, For, Process, Rule};
use futures::StreamExt;
use tokio::time::Instant;

const SECOND: Duration = Duration::from_secs(1);

fn sandbox(pod: &str, attempt: u32) -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: pod.into(),
            uid: format!("uid-{pod}"),
            namespace: "default".into(),
            attempt,
        }),
        log_directory: format!("/var/log/pods/default_{pod}_uid-{pod}"),
        ..Default::default()
    }
}

fn container(name: &str, attempt: u32) -> v1::ContainerConfig {
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: name.into(), attempt }),
        image: Some(v1::ImageSpec { image: "busybox".into(), ..Default::default() }),
        log_path: format!("{name}/{attempt}.log"),
        ..Default::default()
    }
}

/// A runtime with busybox and one sandbox of pod `a`.
async fn with_sandbox() -> (FakeRuntime, String) {
    let runtime = FakeRuntime::new(1);
    runtime.add_image("busybox");
    let id = runtime.run_pod_sandbox(sandbox("a", 0), "").await.unwrap();
    (runtime, id)
}

async fn start(runtime: &FakeRuntime, sandbox_id: &str, name: &str, attempt: u32) -> Result<String, CriError> {
    let id = runtime.create_container(sandbox_id, container(name, attempt), sandbox("a", 0)).await?;
    runtime.start_container(&id).await.map(|()| id)
}

async fn status(runtime: &FakeRuntime, id: &str) -> v1::ContainerStatus {
    runtime.container_status(id, false).await.unwrap().status.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_life() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let id = runtime.create_container(&sandbox_id, container("web", 0), sandbox("a", 0)).await.unwrap();
    assert_eq!(status(&runtime, &id).await.state(), ContainerState::ContainerCreated);
    assert!(runtime.live_containers("uid-a").is_empty());

    runtime.start_container(&id).await.unwrap();
    let running = status(&runtime, &id).await;
    assert_eq!(running.state(), ContainerState::ContainerRunning);
    assert!(running.started_at > running.created_at);
    assert_eq!(running.log_path, "/var/log/pods/default_a_uid-a/web/0.log");
    assert_eq!(running.image.unwrap().image, "docker.io/library/busybox:latest");
    assert_eq!(runtime.live_containers("uid-a").len(), 1);

    assert!(runtime.exit(&id, 3));
    let exited = status(&runtime, &id).await;
    assert_eq!((exited.state(), exited.exit_code), (ContainerState::ContainerExited, 3));
    assert_eq!(exited.reason, "Error");

    runtime.remove_container(&id).await.unwrap();
    assert!(runtime.container_status(&id, false).await.unwrap_err().is_not_found());
    // What is gone counts as removed and stopped.
    runtime.remove_container(&id).await.unwrap();
    runtime.stop_container(&id, SECOND).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn names_are_reserved_until_removal() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let error = runtime.run_pod_sandbox(sandbox("a", 0), "").await.unwrap_err();
    assert_eq!(error.outcome, Outcome::Failed);
    assert_eq!(
        error.message,
        format!(
            "failed to reserve sandbox name \"a_default_uid-a_0\": name \"a_default_uid-a_0\" is reserved for {sandbox_id:?}"
        )
    );
    let id = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    let error = start(&runtime, &sandbox_id, "web", 0).await.unwrap_err();
    assert!(error.message.contains("name \"web_a_default_uid-a_0\" is reserved for"), "{error}");
    runtime.remove_container(&id).await.unwrap();
    start(&runtime, &sandbox_id, "web", 0).await.unwrap();

    runtime.remove_pod_sandbox(&sandbox_id).await.unwrap();
    assert!(runtime.containers().is_empty());
    runtime.run_pod_sandbox(sandbox("a", 0), "").await.unwrap();
    assert_eq!(runtime.invariants(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn what_a_start_needs() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let mut unknown_image = container("web", 0);
    unknown_image.image = Some(v1::ImageSpec { image: "nothing".into(), ..Default::default() });
    let error = runtime.create_container(&sandbox_id, unknown_image, sandbox("a", 0)).await.unwrap_err();
    assert!(error.is_not_found() && error.message.contains("nothing"), "{error}");
    assert!(start(&runtime, "5no", "web", 0).await.unwrap_err().is_not_found());
    assert!(runtime.run_pod_sandbox(sandbox("b", 0), "kata").await.unwrap_err().message.contains("\"kata\""));

    let id = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    let error = runtime.start_container(&id).await.unwrap_err();
    assert!(error.message.ends_with("container is in CONTAINER_RUNNING state"), "{error}");

    let waiting = runtime.create_container(&sandbox_id, container("late", 0), sandbox("a", 0)).await.unwrap();
    runtime.end_sandbox(&sandbox_id);
    assert!(runtime.start_container(&waiting).await.unwrap_err().message.ends_with("is not running"));
    assert!(start(&runtime, &sandbox_id, "more", 0).await.is_err());

    runtime.script(
        For::Container("broken".into()),
        [Process::broken("exec: \"nope\": executable file not found in $PATH")],
    );
    let fresh = runtime.run_pod_sandbox(sandbox("c", 0), "").await.unwrap();
    let error = start(&runtime, &fresh, "broken", 0).await.unwrap_err();
    assert_eq!(error.message, "exec: \"nope\": executable file not found in $PATH");
    let dead = runtime.containers().into_iter().find(|c| c.metadata.as_ref().unwrap().name == "broken").unwrap();
    assert_eq!(
        (dead.state(), dead.exit_code, dead.reason.as_str()),
        (ContainerState::ContainerExited, 128, "StartError")
    );
}

#[tokio::test(start_paused = true)]
async fn scripts_follow_the_starts() {
    let (runtime, sandbox_id) = with_sandbox().await;
    runtime.script(
        For::Container("job".into()),
        [Process::exits(1, SECOND), Process::out_of_memory(2 * SECOND), Process::exits(0, Duration::ZERO)],
    );
    let mut ends = vec![];
    for attempt in 0..4 {
        let id = start(&runtime, &sandbox_id, "job", attempt).await.unwrap();
        let began = Instant::now();
        runtime.until(|runtime| runtime.live_containers("uid-a").is_empty()).await;
        let status = status(&runtime, &id).await;
        ends.push((status.exit_code, status.reason, began.elapsed().as_secs()));
    }
    let expected = [(1, "Error", 1), (137, "OOMKilled", 2), (0, "Completed", 0), (0, "Completed", 0)];
    assert_eq!(ends, expected.map(|(code, reason, took)| (code, reason.to_owned(), took)));
    assert_eq!(runtime.starts("uid-a", "job"), 4);
}

#[tokio::test(start_paused = true)]
async fn stops() {
    let cases = [
        ("dies", Process::forever(), 30, 0, 143),
        ("deaf", Process::forever().ignoring_term(), 30, 30, 137),
        ("traps", Process::forever().trapping_term(0, 5 * SECOND), 30, 5, 0),
        ("slow", Process::forever().trapping_term(0, 50 * SECOND), 30, 30, 137),
        ("at-once", Process::forever().trapping_term(0, 5 * SECOND), 0, 0, 137),
        ("ending", Process::exits(7, 2 * SECOND).trapping_term(0, 5 * SECOND), 30, 2, 7),
    ];
    let (runtime, sandbox_id) = with_sandbox().await;
    for (name, script, grace, took, code) in cases {
        runtime.script(For::PodContainer("a".into(), name.into()), [script]);
        let id = start(&runtime, &sandbox_id, name, 0).await.unwrap();
        let began = Instant::now();
        runtime.stop_container(&id, SECOND * grace).await.unwrap();
        let status = status(&runtime, &id).await;
        assert_eq!((began.elapsed().as_secs(), status.exit_code), (took, code), "{name}");
    }
    runtime.script(For::Container("stuck".into()), [Process::forever().unkillable()]);
    let id = start(&runtime, &sandbox_id, "stuck", 0).await.unwrap();
    let began = Instant::now();
    let error = runtime.stop_container(&id, 10 * SECOND).await.unwrap_err();
    assert!(error.outcome_unknown());
    assert_eq!(began.elapsed(), 130 * SECOND);
    assert_eq!(runtime.live_containers("uid-a").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stopping_sandbox_stops_its_containers() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let id = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    runtime.stop_pod_sandbox(&sandbox_id).await.unwrap();
    assert_eq!(status(&runtime, &id).await.exit_code, 137);
    let answer = runtime.pod_sandbox_status(&sandbox_id, false).await.unwrap();
    assert_eq!(answer.status.as_ref().unwrap().state(), v1::PodSandboxState::SandboxNotready);
    assert_eq!((answer.containers_statuses.len(), answer.timestamp > 0), (1, true));
}

#[tokio::test(start_paused = true)]
async fn faults() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let version = || runtime.version();
    runtime.inject(Rule::new("Version", Fault::Fail(2, "no".into())).times(2));
    assert_eq!(version().await.unwrap_err().message, "no");
    assert_eq!(version().await.unwrap_err().outcome, Outcome::Failed);
    version().await.unwrap();

    runtime.inject(Rule::new("Version", Fault::Delay(5 * SECOND)).times(1));
    let began = Instant::now();
    version().await.unwrap();
    assert_eq!(began.elapsed(), 5 * SECOND);

    runtime.inject(Rule::new("RunPodSandbox", Fault::Hang).about("default/b"));
    let began = Instant::now();
    assert!(runtime.run_pod_sandbox(sandbox("b", 0), "").await.unwrap_err().outcome_unknown());
    assert_eq!(began.elapsed(), 240 * SECOND);
    assert_eq!(runtime.sandboxes().len(), 1);

    runtime.inject(Rule::new("CreateContainer", Fault::LoseAnswer).times(1));
    assert!(start(&runtime, &sandbox_id, "web", 0).await.unwrap_err().outcome_unknown());
    assert_eq!(runtime.containers().len(), 1);
    assert!(start(&runtime, &sandbox_id, "web", 0).await.unwrap_err().message.contains("is reserved for"));

    runtime.inject(Rule::new("StopPodSandbox", Fault::DoAndHang).times(1));
    assert!(runtime.stop_pod_sandbox(&sandbox_id).await.unwrap_err().outcome_unknown());
    assert_eq!(runtime.sandboxes()[0].state(), v1::PodSandboxState::SandboxNotready);

    for (size, fits) in [(16 << 20, true), ((16 << 20) + 1, false)] {
        runtime.inject(Rule::new("ListContainers", Fault::Pad(size)).times(1));
        let answer = runtime.list_containers(None).await;
        assert_eq!(answer.as_ref().map_err(|error| error.outcome).is_ok(), fits);
        assert!(answer.is_ok_and(|list| list.len() == 1) || !fits);
    }
    let ended = |call| runtime.calls_of(call).into_iter().map(|call| call.ended).collect::<Vec<_>>();
    assert_eq!(ended("StopPodSandbox"), [None]);
    assert_eq!(ended("CreateContainer")[0], Some(Ended::Lost));
}

#[tokio::test(start_paused = true)]
async fn chance_is_a_matter_of_the_seed() {
    async fn outcomes(seed: u64) -> Vec<bool> {
        let runtime = FakeRuntime::new(seed);
        runtime.inject(Rule::new("*", Fault::Fail(2, "no".into())).chance(0.5));
        let mut all = vec![];
        for _ in 0..64 {
            all.push(runtime.version().await.is_ok());
        }
        all
    }
    let (one, two) = (outcomes(7).await, outcomes(8).await);
    assert_eq!(one, outcomes(7).await);
    assert_ne!(one, two);
    assert!(one.contains(&true) && one.contains(&false));
}

#[tokio::test(start_paused = true)]
async fn restart_and_reboot() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let id = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    runtime.inject(Rule::new("Version", Fault::Hang).times(1));
    let hanging = tokio::spawn({
        let runtime = runtime.clone();
        async move { runtime.version().await }
    });
    runtime.until(|runtime| !runtime.calls_of("Version").is_empty()).await;
    runtime.restart(10 * SECOND);
    assert_eq!(hanging.await.unwrap().unwrap_err().outcome, Outcome::Unknown);
    assert_eq!(runtime.version().await.unwrap_err().outcome, Outcome::Unreachable);
    tokio::time::sleep(11 * SECOND).await;
    runtime.version().await.unwrap();
    assert_eq!(status(&runtime, &id).await.state(), ContainerState::ContainerRunning);

    runtime.reboot(Duration::ZERO);
    let dead = status(&runtime, &id).await;
    assert_eq!((dead.state(), dead.exit_code), (ContainerState::ContainerExited, 255));
    assert_eq!(runtime.sandboxes()[0].state(), v1::PodSandboxState::SandboxNotready);
}

#[tokio::test(start_paused = true)]
async fn events() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let mut events = runtime.container_events().await.unwrap();
    runtime.script(For::Container("job".into()), [Process::exits(0, SECOND)]);
    let id = start(&runtime, &sandbox_id, "job", 0).await.unwrap();
    let mut seen = vec![];
    for _ in 0..3 {
        let event = events.next().await.unwrap().unwrap();
        assert_eq!((event.container_id.as_str(), event.containers_statuses.len()), (id.as_str(), 1));
        seen.push((event.container_event_type(), event.containers_statuses[0].state()));
    }
    use v1::ContainerEventType as Kind;
    assert_eq!(
        seen,
        [
            (Kind::ContainerCreatedEvent, ContainerState::ContainerCreated),
            (Kind::ContainerStartedEvent, ContainerState::ContainerRunning),
            (Kind::ContainerStoppedEvent, ContainerState::ContainerExited),
        ]
    );
    runtime.configure(|settings| settings.lost_events = 1.0);
    let next = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    runtime.configure(|settings| (settings.lost_events, settings.doubled_events) = (0.0, 1.0));
    runtime.exit(&next, 0);
    for _ in 0..2 {
        let event = events.next().await.unwrap().unwrap();
        assert_eq!(event.container_event_type(), Kind::ContainerStoppedEvent);
    }
    runtime.restart(Duration::ZERO);
    assert_eq!(events.next().await.unwrap().unwrap_err().outcome, Outcome::Unknown);
    assert!(events.next().await.is_none());

    runtime.configure(|settings| settings.events = false);
    let mut events = runtime.container_events().await.unwrap();
    assert_eq!(events.next().await.unwrap().unwrap_err().outcome, Outcome::Unimplemented);
}

#[tokio::test(start_paused = true)]
async fn broken_invariants_are_seen() {
    let (runtime, sandbox_id) = with_sandbox().await;
    start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    assert_eq!(runtime.invariants().len(), 0);
    start(&runtime, &sandbox_id, "web", 1).await.unwrap();
    assert_eq!(runtime.invariants().len(), 1);
    runtime.run_pod_sandbox(sandbox("a", 1), "").await.unwrap();
    assert_eq!(runtime.invariants().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn pulls_and_execs() {
    let (runtime, sandbox_id) = with_sandbox().await;
    let spec = |image: &str| v1::ImageSpec { image: image.into(), ..Default::default() };
    runtime.configure(|settings| settings.open_registry = false);
    let error = runtime.pull_image(spec("nothing"), None, None).await.unwrap_err();
    assert!(error.is_not_found() && error.message.starts_with("failed to pull and unpack image"), "{error}");

    runtime.add_remote_image("r.local/web:1", 3 * SECOND, Some(("me", "secret")));
    assert!(runtime.pull_image(spec("r.local/web:1"), None, None).await.unwrap_err().message.contains("denied"));
    let auth = v1::AuthConfig { username: "me".into(), password: "secret".into(), ..Default::default() };
    let began = Instant::now();
    let id = runtime.pull_image(spec("r.local/web:1"), Some(auth), None).await.unwrap();
    assert_eq!(began.elapsed(), 3 * SECOND);
    assert_eq!(runtime.image_status(spec("r.local/web:1")).await.unwrap().unwrap().id, id);
    runtime.remove_image(spec(&id)).await.unwrap();
    assert_eq!(runtime.image_status(spec("r.local/web:1")).await.unwrap(), None);

    let web = start(&runtime, &sandbox_id, "web", 0).await.unwrap();
    runtime.script_exec("web", |command| Exec {
        output: cri::ExecOutput { exit_code: command.len() as i32, ..Default::default() },
        takes: 4 * SECOND,
    });
    let exec = |timeout| runtime.exec_sync(&web, vec!["ls".into(), "/".into()], timeout);
    assert_eq!(exec(None).await.unwrap().exit_code, 2);
    let error = exec(Some(SECOND)).await.unwrap_err();
    assert_eq!((error.outcome, error.code), (Outcome::Unknown, 4));
}
