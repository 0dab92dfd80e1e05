//! The client against a runtime that speaks the real wire on a real socket.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cri::{
    CallObserver, CriClient, CriError, Outcome, RuntimeMutator, RuntimeReader, RuntimeStreaming, validate_version,
};
use cri_api::v1;
use fakes::{Exec, FakeRuntime, FakeServer, Fault, For, Process, Rule, serve};
use futures::StreamExt;
use tempfile::TempDir;

struct Node {
    runtime: FakeRuntime,
    server: Option<FakeServer>,
    client: CriClient,
    socket: PathBuf,
    _folder: TempDir,
}

impl Node {
    fn with_timeout(timeout: Duration) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("runtime.sock");
        let runtime = FakeRuntime::new(1);
        let server = serve(&runtime, &socket).unwrap();
        let client = CriClient::connect(&server.endpoint(), None, timeout).unwrap();
        Self { runtime, server: Some(server), client, socket, _folder: folder }
    }

    fn new() -> Self {
        Self::with_timeout(Duration::from_secs(120))
    }
}

fn sandbox() -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: "a".into(),
            uid: "uid-a".into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        linux: Some(v1::LinuxPodSandboxConfig::default()),
        labels: [("io.kubernetes.pod.uid".to_owned(), "uid-a".to_owned())].into(),
        ..Default::default()
    }
}

fn container(name: &str) -> v1::ContainerConfig {
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(image("busybox")),
        ..Default::default()
    }
}

/// Those who ask for the same within a moment share one answer; a failure is nobody's.
#[tokio::test]
async fn one_look_at_the_images_file_system_serves_all() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    let asked = || runtime.calls().iter().filter(|c| c.call == "ImageFsInfo").count();
    runtime.inject(Rule::new("ImageFsInfo", Fault::Fail(14, "not yet".into())).times(1));
    assert!(client.image_fs_info().await.is_err());
    let before = asked();
    let others = client.clone();
    let (a, b) = tokio::join!(client.image_fs_info(), others.image_fs_info());
    assert_eq!(a.unwrap(), b.unwrap());
    assert_eq!(asked() - before, 1);
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    client.image_fs_info().await.unwrap();
    assert_eq!(asked() - before, 2);
}

fn image(name: &str) -> v1::ImageSpec {
    v1::ImageSpec { image: name.into(), ..Default::default() }
}

async fn start(client: &CriClient) -> (String, String) {
    client.pull_image(image("busybox"), None, None).await.unwrap();
    let pod = client.run_pod_sandbox(sandbox(), "runc").await.unwrap();
    let id = client.create_container(&pod, container("web"), sandbox()).await.unwrap();
    client.start_container(&id).await.unwrap();
    (pod, id)
}

#[tokio::test]
async fn every_call() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    validate_version(&client.version().await.unwrap()).unwrap();
    assert_eq!(client.status(true).await.unwrap().runtime_handlers.len(), 2);
    let config = client.runtime_config().await.unwrap();
    assert_eq!(config.linux.unwrap().cgroup_driver(), v1::CgroupDriver::Cgroupfs);
    let network = v1::NetworkConfig { pod_cidr: "10.1.0.0/24".into() };
    client.update_runtime_config(v1::RuntimeConfig { network_config: Some(network) }).await.unwrap();
    assert_eq!(runtime.pod_cidr(), "10.1.0.0/24");

    assert_eq!(client.image_status(image("busybox")).await.unwrap(), None);
    let (pod, id) = start(client).await;
    let image_id = client.image_status(image("busybox")).await.unwrap().unwrap().id;
    assert_eq!(client.list_images(None).await.unwrap()[0].id, image_id);
    assert_eq!(client.image_fs_info().await.unwrap().image_filesystems.len(), 1);

    let answer = client.pod_sandbox_status(&pod, false).await.unwrap();
    assert_eq!(answer.status.unwrap().metadata, sandbox().metadata);
    let filter = v1::PodSandboxFilter { id: pod.clone(), ..Default::default() };
    assert_eq!(client.list_pod_sandbox(Some(filter)).await.unwrap()[0].runtime_handler, "runc");
    assert_eq!(client.list_pod_sandbox(None).await.unwrap()[0].labels, sandbox().labels);

    let status = client.container_status(&id, true).await.unwrap().status.unwrap();
    assert_eq!((status.state(), &status.image_id), (v1::ContainerState::ContainerRunning, &image_id));
    let filter = |state: v1::ContainerState| {
        Some(v1::ContainerFilter {
            state: Some(v1::ContainerStateValue { state: state.into() }),
            pod_sandbox_id: pod.clone(),
            ..Default::default()
        })
    };
    let running = client.list_containers(filter(v1::ContainerState::ContainerRunning)).await.unwrap();
    assert_eq!((running.len(), &running[0].id), (1, &id));
    assert_eq!(client.list_containers(filter(v1::ContainerState::ContainerExited)).await.unwrap(), vec![]);

    assert_eq!(client.container_stats(&id).await.unwrap().attributes.unwrap().id, id);
    assert_eq!(client.list_container_stats(None).await.unwrap().len(), 1);
    assert_eq!(client.pod_sandbox_stats(&pod).await.unwrap().attributes.unwrap().id, pod);
    assert_eq!(client.list_pod_sandbox_stats(None).await.unwrap().len(), 1);
    assert_eq!(client.list_metric_descriptors().await.unwrap().len(), 1);
    assert_eq!(client.list_pod_sandbox_metrics().await.unwrap()[0].pod_sandbox_id, pod);

    let linux = v1::LinuxContainerResources { cpu_shares: 512, ..Default::default() };
    client.update_container_resources(&id, linux.clone()).await.unwrap();
    let status = client.container_status(&id, false).await.unwrap().status.unwrap();
    assert_eq!(status.resources.unwrap().linux.unwrap().cpu_shares, 512);
    let request = v1::UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: pod.clone(),
        resources: Some(linux.clone()),
        ..Default::default()
    };
    client.update_pod_sandbox_resources(request).await.unwrap();
    assert_eq!(runtime.sandbox_config(&pod).unwrap().linux.unwrap().resources, Some(linux));

    client.reopen_container_log(&id).await.unwrap();
    client.checkpoint_container(&id, "/tmp/archive.tar", Duration::from_secs(1)).await.unwrap();
    runtime.script_exec("web", |command| Exec {
        output: cri::ExecOutput { stdout: command.join(" ").into(), stderr: b"\xff".to_vec(), exit_code: 3 },
        ..Default::default()
    });
    let output = client.exec_sync(&id, vec!["ls".into(), "/".into()], Some(Duration::from_secs(1))).await.unwrap();
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice(), output.exit_code), (&b"ls /"[..], &b"\xff"[..], 3));

    let request = v1::ExecRequest { container_id: id.clone(), cmd: vec!["sh".into()], ..Default::default() };
    assert!(client.exec(request).await.unwrap().contains("/exec/"));
    let request = v1::AttachRequest { container_id: id.clone(), ..Default::default() };
    assert!(client.attach(request).await.unwrap().contains("/attach/"));
    let request = v1::PortForwardRequest { pod_sandbox_id: pod.clone(), port: vec![80] };
    assert!(client.port_forward(request).await.unwrap().contains("/portforward/"));

    client.stop_container(&id, Duration::from_millis(1)).await.unwrap();
    let status = client.container_status(&id, false).await.unwrap().status.unwrap();
    assert_eq!(status.exit_code, 143, "a grace of less than a second is a second, not none");
    client.remove_container(&id).await.unwrap();
    client.stop_pod_sandbox(&pod).await.unwrap();
    client.remove_pod_sandbox(&pod).await.unwrap();
    client.remove_image(image(&image_id)).await.unwrap();
    assert_eq!((runtime.containers().len(), runtime.sandboxes().len()), (0, 0));

    let error = client.container_status(&id, false).await.unwrap_err();
    assert_eq!((error.outcome, error.code, error.target.as_str()), (Outcome::NotFound, 5, id.as_str()));
    assert!(error.rpc_text().starts_with("rpc error: code = NotFound desc = an error occurred when try to find"));
    client.stop_container(&id, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn answers_up_to_16_mib() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    start(client).await;
    let mib = |tenths: usize| tenths * (1 << 20) / 10;
    for (size, fits) in
        [(mib(39), true), (mib(41), true), (mib(80), true), (mib(159), true), (16 << 20, true), (mib(170), false)]
    {
        runtime.inject(Rule::new("ListContainers", Fault::Pad(size)).times(1));
        runtime.inject(Rule::new("ListPodSandbox", Fault::Pad(size)).times(1));
        runtime.inject(Rule::new("ListImages", Fault::Pad(size)).times(1));
        let answers = [
            client.list_containers(None).await.map(|list| list.len()),
            client.list_pod_sandbox(None).await.map(|list| list.len()),
            client.list_images(None).await.map(|list| list.len()),
        ];
        for answer in answers {
            match answer {
                Ok(items) => assert!(fits && items == 1, "{size}"),
                Err(error) => {
                    assert!(!fits, "{size}: {error}");
                    assert_eq!((error.outcome, error.code), (Outcome::ResourceExhausted, 8));
                    assert_eq!(error.message, format!("grpc: received message larger than max ({size} vs. 16777216)"));
                }
            }
        }
        assert_eq!(client.list_containers(None).await.unwrap().len(), 1, "after {size}");
    }
}

#[tokio::test]
async fn deadlines() {
    let tick = Duration::from_millis(60);
    let Node { runtime, client, server: _server, .. } = &Node::with_timeout(tick);
    let (_, id) = start(client).await;
    runtime.inject(Rule::new("ContainerStatus", Fault::Hang));
    let error = client.container_status(&id, false).await.unwrap_err();
    assert_eq!((error.outcome, error.code), (Outcome::Unknown, 4));
    assert_eq!(error.rpc_text(), "rpc error: code = DeadlineExceeded desc = context deadline exceeded");
    client.version().await.unwrap();

    // Each of these takes longer than the ordinary deadline.
    let longer = || Fault::Delay(tick * 3 / 2);
    runtime.inject(Rule::new("Version", longer()).times(1));
    assert!(client.version().await.unwrap_err().outcome_unknown());
    runtime.inject(Rule::new("RunPodSandbox", longer()));
    let mut other = sandbox();
    other.metadata.get_or_insert_default().uid = "uid-b".into();
    client.run_pod_sandbox(other, "").await.unwrap();
    runtime.inject(Rule::new("PullImage", longer()));
    client.pull_image(image("web"), None, None).await.unwrap();
    runtime.inject(Rule::new("ExecSync", longer()));
    client.exec_sync(&id, vec!["true".into()], None).await.unwrap();
    client.exec_sync(&id, vec!["true".into()], Some(Duration::from_secs(1))).await.unwrap();
    runtime.inject(Rule::new("CheckpointContainer", longer()));
    client.checkpoint_container(&id, "/x", tick * 4).await.unwrap();
    runtime.inject(Rule::new("StopContainer", longer()));
    client.stop_container(&id, Duration::from_secs(1)).await.unwrap();
}

#[tokio::test]
async fn an_abandoned_pull_is_cancelled() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    runtime.add_remote_image("web", Duration::from_millis(50), None);
    let pull = client.pull_image(image("web"), None, None);
    tokio::select! {
        _ = pull => panic!("it hangs"),
        () = runtime.until(|runtime| !runtime.calls_of("PullImage").is_empty()) => {}
    }
    // A pull that went on would end within this one.
    runtime.add_remote_image("slow", Duration::from_millis(150), None);
    client.pull_image(image("slow"), None, None).await.unwrap();
    assert_eq!(client.image_status(image("web")).await.unwrap(), None);
}

#[tokio::test]
async fn gone_and_back() {
    let mut node = Node::new();
    let (pod, id) = start(&node.client).await;
    let client = node.client.clone();

    // The answer is lost in the middle: it was done.
    node.runtime.inject(Rule::new("StopPodSandbox", Fault::LoseAnswer).times(1));
    let error = client.stop_pod_sandbox(&pod).await.unwrap_err();
    assert_eq!((error.outcome, error.code), (Outcome::Unknown, 14), "{error}");
    assert_eq!(client.container_status(&id, false).await.unwrap().status.unwrap().exit_code, 137);

    // The runtime restarts: nothing is sent until it is back.
    node.runtime.go_down();
    wait_for(|| !node.socket.exists()).await;
    let mut error = client.version().await.unwrap_err();
    while error.outcome == Outcome::Unknown {
        // It went out on the connection before this client had heard of its end.
        error = client.version().await.unwrap_err();
    }
    assert_eq!((error.outcome, error.code), (Outcome::Unreachable, 14));
    assert_eq!(
        error.message,
        format!(
            "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: no such file or directory\"",
            node.socket.display()
        )
    );
    node.runtime.come_up();
    wait_for(|| node.socket.exists()).await;
    client.version().await.unwrap();

    // A stale socket without listener.
    node.server = None;
    drop(std::os::unix::net::UnixListener::bind(&node.socket).unwrap());
    // A call on the broken connection of before may have been done for all the client can know.
    let error = loop {
        match client.version().await.unwrap_err() {
            error if error.outcome == Outcome::Unknown => {}
            error => break error,
        }
    };
    assert_eq!(error.outcome, Outcome::Unreachable);
    assert!(error.message.ends_with("connect: connection refused\""), "{error}");
    std::fs::remove_file(&node.socket).unwrap();
    node.server = Some(serve(&node.runtime, &node.socket).unwrap());
    client.remove_pod_sandbox(&pod).await.unwrap();
}

/// For what happens in the file system, which tells no one.
async fn wait_for(reached: impl Fn() -> bool) {
    while !reached() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn events() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    let mut events = client.container_events().await.unwrap();
    // The first poll asks; the runtime subscribes when the request arrives, and there is no sign of that before an event.
    let (first, id) = tokio::join!(events.next(), async {
        let (pod, id) = start(client).await;
        for attempt in 1..=20 {
            let metadata = Some(v1::ContainerMetadata { name: "more".into(), attempt });
            let config = v1::ContainerConfig { metadata, ..container("more") };
            client.create_container(&pod, config, sandbox()).await.unwrap();
        }
        id
    });
    assert!(first.unwrap().is_ok());
    client.remove_container(&id).await.unwrap();
    loop {
        let event = events.next().await.unwrap().unwrap();
        if event.container_event_type() == v1::ContainerEventType::ContainerDeletedEvent {
            assert_eq!((event.container_id.as_str(), event.containers_statuses.len()), (id.as_str(), 21));
            break;
        }
    }
    runtime.restart(Duration::ZERO);
    assert_eq!(events.next().await.unwrap().unwrap_err().outcome, Outcome::Unknown);
    assert!(events.next().await.is_none());

    runtime.configure(|settings| settings.events = false);
    let mut events = client.container_events().await.unwrap();
    let error = loop {
        // The connection may still have to be made anew.
        match events.next().await {
            Some(Err(error)) if error.outcome == Outcome::Unimplemented => break error,
            Some(Err(_)) | None => events = client.container_events().await.unwrap(),
            Some(Ok(event)) => panic!("{event:?}"),
        }
    };
    assert_eq!(error.call, "GetContainerEvents");
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn lists_in_parts() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    let (pod, _) = start(client).await;
    for attempt in 1..6 {
        let metadata = Some(v1::ContainerMetadata { name: "more".into(), attempt });
        client.create_container(&pod, v1::ContainerConfig { metadata, ..container("more") }, sandbox()).await.unwrap();
    }
    runtime.configure(|settings| settings.list_streaming = Some(2));
    let made = |call: &str| runtime.calls_of(call).len();
    let streaming = client.clone().with_list_streaming(true);
    assert_eq!(streaming.list_containers(None).await.unwrap().len(), 6);
    assert_eq!(streaming.list_pod_sandbox(None).await.unwrap().len(), 1);
    assert_eq!(streaming.list_container_stats(None).await.unwrap().len(), 1);
    assert_eq!(streaming.list_pod_sandbox_stats(None).await.unwrap().len(), 1);
    assert_eq!(streaming.list_pod_sandbox_metrics().await.unwrap().len(), 1);
    assert_eq!(streaming.list_images(None).await.unwrap().len(), 1);
    assert_eq!((made("StreamContainers"), made("ListContainers")), (1, 0));
    assert_eq!((made("StreamImages"), made("ListImages")), (1, 0));

    runtime.configure(|settings| settings.list_streaming = None);
    for _ in 0..2 {
        assert_eq!(streaming.list_containers(None).await.unwrap().len(), 6);
        assert_eq!(streaming.list_pod_sandbox(None).await.unwrap().len(), 1);
        assert_eq!(streaming.list_images(None).await.unwrap().len(), 1);
    }
    assert_eq!((made("StreamContainers"), made("ListContainers")), (2, 2));
    assert_eq!((made("StreamPodSandboxes"), made("ListPodSandbox")), (1, 2));
    assert_eq!((made("StreamImages"), made("ListImages")), (2, 2));
}

#[tokio::test]
async fn the_runtime_s_configuration_is_asked_for_again() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    runtime.configure(|settings| settings.cgroup_driver = None);
    assert_eq!(client.runtime_config().await.unwrap_err().outcome, Outcome::Unimplemented);
    assert_eq!(runtime.calls_of("RuntimeConfig").len(), 1);

    runtime.configure(|settings| settings.cgroup_driver = Some(v1::CgroupDriver::Systemd));
    runtime.inject(Rule::new("RuntimeConfig", Fault::Fail(2, "not yet".into())).times(1));
    let began = std::time::Instant::now();
    let config = client.runtime_config().await.unwrap();
    assert_eq!(config.linux.unwrap().cgroup_driver(), v1::CgroupDriver::Systemd);
    assert!(began.elapsed() >= Duration::from_secs(2));
}

#[derive(Default)]
struct Seen(Mutex<Vec<(&'static str, Option<Outcome>)>>);

impl CallObserver for Seen {
    fn observed(&self, call: &'static str, _took: Duration, error: Option<&CriError>) {
        self.0.lock().unwrap().push((call, error.map(|error| error.outcome)));
    }
}

#[tokio::test]
async fn an_observer_sees_every_call() {
    let node = Node::new();
    let seen = Arc::new(Seen::default());
    let client = node.client.clone().with_observer(seen.clone());
    client.version().await.unwrap();
    client.stop_container("c0", Duration::ZERO).await.unwrap();
    node.runtime.configure(|settings| settings.events = false);
    assert!(client.container_events().await.unwrap().next().await.unwrap().is_err());
    let expected = [
        ("Version", None),
        ("StopContainer", Some(Outcome::NotFound)),
        ("GetContainerEvents", Some(Outcome::Unimplemented)),
    ];
    assert_eq!(*seen.0.lock().unwrap(), expected);
}

#[tokio::test]
async fn answers_that_lack_something_are_errors() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    runtime.configure(|settings| settings.status.status = None);
    let error = client.status(false).await.unwrap_err();
    assert_eq!(
        (error.outcome, error.message.as_str()),
        (Outcome::Failed, "RuntimeReady or NetworkReady condition are not set")
    );
    runtime.add_image("web");
    runtime.edit_image("web", |image| image.size = 0);
    let error = client.image_status(image("web")).await.unwrap_err();
    assert_eq!(error.rpc_text(), "Id or size of image \"web\" is not set");
}

#[tokio::test]
async fn a_runtime_of_its_own_for_images() {
    let (node, images) = (Node::new(), Node::new());
    let endpoint = |node: &Node| node.server.as_ref().unwrap().endpoint();
    let client = CriClient::connect(&endpoint(&node), Some(&endpoint(&images)), Duration::from_secs(120)).unwrap();
    client.pull_image(image("busybox"), None, None).await.unwrap();
    client.version().await.unwrap();
    assert_eq!((node.runtime.calls().len(), images.runtime.calls().len()), (1, 1));
    assert_eq!(images.runtime.calls()[0].call, "PullImage");
}

#[tokio::test]
async fn a_process_that_traps_its_stop_signal() {
    let Node { runtime, client, server: _server, .. } = &Node::new();
    runtime.script(For::Image("busybox".into()), [Process::forever().trapping_term(9, Duration::from_millis(30))]);
    let (_, id) = start(client).await;
    client.stop_container(&id, Duration::from_secs(30)).await.unwrap();
    assert_eq!(client.container_status(&id, false).await.unwrap().status.unwrap().exit_code, 9);
}
