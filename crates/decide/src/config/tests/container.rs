//! Container requests: mounts, devices, resources, and the request as a whole.

use cri_api::v1;

use super::*;
use crate::resources::MemoryQos;

fn host(path: &str) -> VolumeFact {
    VolumeFact { source: VolumeSource::HostPath(path.into()), read_only: false, selinux_relabel: false }
}

#[test]
fn whole_request() {
    let node = node();
    let mut f = facts(&node);
    f.restart_count = 3;
    f.devices = DeviceFacts {
        devices: vec![v1::Device {
            container_path: "/dev/x".into(),
            host_path: "/dev/x0".into(),
            permissions: "rw".into(),
        }],
        cdi_devices: strings(&["vendor.com/gpu=0"]),
        mounts: vec![v1::Mount {
            container_path: "/plugin".into(),
            host_path: "/p".into(),
            readonly: true,
            ..Default::default()
        }],
        envs: Vec::new(),
        annotations: map(&[("io.kubernetes.container.hash", "forged"), ("plugin", "1")]),
    };
    let p = pod_with(
        r#"{"labels": {"app": "web"}, "deletionGracePeriodSeconds": 5}"#,
        &one_spec(
            r#""workingDir": "/w", "stdin": true, "stdinOnce": true, "tty": true, "terminationMessagePath": "/dev/termination-log",
               "terminationMessagePolicy": "File", "ports": [{"name": "p", "containerPort": 80, "protocol": "TCP"}, {"containerPort": 81, "hostPort": 82, "hostIP": "::1"}],
               "lifecycle": {"stopSignal": "SIGUSR1", "preStop": {"httpGet": {"path": "/q?a&b", "port": "p", "httpHeaders": [{"name": "H", "value": "<v>"}]}}},
               "volumeDevices": [{"name": "blk", "devicePath": "/dev/blk"}]"#,
            r#""terminationGracePeriodSeconds": 30"#,
        ),
    );
    f.block_devices.insert("blk".into(), BlockDevice { host_path: Some("/maps/blk".into()), read_only: true });
    let mut got = request(&p, &f).expect("request");
    assert!(got.linux.take().is_some());
    let want = v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: "a".into(), attempt: 3 }),
        image: Some(v1::ImageSpec {
            image: "sha256:abc".into(),
            user_specified_image: "busybox".into(),
            ..Default::default()
        }),
        working_dir: "/w".into(),
        mounts: vec![
            v1::Mount {
                container_path: "/plugin".into(),
                host_path: "/p".into(),
                readonly: true,
                ..Default::default()
            },
            v1::Mount {
                container_path: "/etc/hosts".into(),
                host_path: "/pods/uid-1/etc-hosts".into(),
                ..Default::default()
            },
            v1::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: "/pods/uid-1/containers/a/0123abcd".into(),
                ..Default::default()
            },
        ],
        devices: vec![
            v1::Device { container_path: "/dev/x".into(), host_path: "/dev/x0".into(), permissions: "rw".into() },
            v1::Device { container_path: "/dev/blk".into(), host_path: "/maps/blk".into(), permissions: "r".into() },
        ],
        labels: map(&[
            ("io.kubernetes.pod.name", "web"),
            ("io.kubernetes.pod.namespace", "ns"),
            ("io.kubernetes.pod.uid", "uid-1"),
            ("io.kubernetes.container.name", "a"),
        ]),
        annotations: map(&[
            ("plugin", "1"),
            ("io.kubernetes.container.hash", "e220f96"),
            ("io.kubernetes.container.restartCount", "3"),
            ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
            ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ("io.kubernetes.pod.deletionGracePeriod", "5"),
            ("io.kubernetes.pod.terminationGracePeriod", "30"),
            (
                "io.kubernetes.container.preStopHandler",
                r#"{"httpGet":{"path":"/q?a\u0026b","port":"p","httpHeaders":[{"name":"H","value":"\u003cv\u003e"}]}}"#,
            ),
            (
                "io.kubernetes.container.ports",
                r#"[{"name":"p","containerPort":80,"protocol":"TCP"},{"hostPort":82,"containerPort":81,"hostIP":"::1"}]"#,
            ),
        ]),
        log_path: "a/3.log".into(),
        stdin: true,
        stdin_once: true,
        tty: true,
        cdi_devices: vec![v1::CdiDevice { name: "vendor.com/gpu=0".into() }],
        ..Default::default()
    };
    assert_eq!(got, want);
}

#[test]
fn other_handlers_in_the_annotation() {
    let node = node();
    for (handler, want) in [
        (r#"{"exec": {"command": ["sh", "-c", "x > y"]}}"#, r#"{"exec":{"command":["sh","-c","x \u003e y"]}}"#),
        (r#"{"tcpSocket": {"host": "h", "port": 80}}"#, r#"{"tcpSocket":{"port":80,"host":"h"}}"#),
        (r#"{"sleep": {"seconds": 5}}"#, r#"{"sleep":{"seconds":5}}"#),
    ] {
        let p = one(&format!(r#""lifecycle": {{"preStop": {handler}}}"#), "");
        let got = request(&p, &facts(&node)).expect("request");
        assert_eq!(got.annotations["io.kubernetes.container.preStopHandler"], want);
    }
}

#[test]
fn stop_signal_is_gated() {
    let mut node = node();
    let signal = |node: &NodeFacts, name: &str| {
        request(&one(&format!(r#""lifecycle": {{"stopSignal": "{name}"}}"#), ""), &facts(node))
            .expect("request")
            .stop_signal
    };
    assert_eq!(signal(&node, "SIGUSR1"), 0);
    node.gates.container_stop_signals = true;
    for (name, want) in [
        ("SIGUSR1", v1::Signal::Sigusr1),
        ("SIGRTMIN", v1::Signal::Sigrtmin),
        ("SIGRTMIN+2", v1::Signal::Sigrtminplus2),
        ("SIGRTMAX-14", v1::Signal::Sigrtmaxminus14),
        ("SIGNONE", v1::Signal::RuntimeDefault),
    ] {
        assert_eq!(signal(&node, name), want as i32, "{name}");
    }
}

#[test]
fn volume_mounts() {
    let mut node = node();
    node.selinux = Some(String::new());
    let mut f = facts(&node);
    f.volumes = BTreeMap::from([
        ("data".to_string(), VolumeFact { selinux_relabel: true, ..host("/vol/data") }),
        ("cm".to_string(), VolumeFact { read_only: true, ..host("/vol/cm") }),
        (
            "img".to_string(),
            VolumeFact {
                source: VolumeSource::Image(v1::ImageSpec { image: "i".into(), ..Default::default() }),
                read_only: true,
                selinux_relabel: false,
            },
        ),
    ]);
    f.sub_path_targets.insert(1, "/sub/1".into());
    let p = one(
        r#""volumeMounts": [{"name": "data", "mountPath": "/data", "mountPropagation": "Bidirectional"},
            {"name": "data", "mountPath": "rel", "subPathExpr": "$(D)/x", "readOnly": true, "recursiveReadOnly": "Enabled"},
            {"name": "cm", "mountPath": "/etc/hosts", "mountPropagation": "HostToContainer"},
            {"name": "img", "mountPath": "/img", "subPath": "bin"}],
           "env": [{"name": "D", "value": "dir"}]"#,
        "",
    );
    let entry = p.container("a").expect("a");
    assert_eq!(
        sub_paths(&p, entry, &f),
        Ok(vec![SubPath { index: 1, volume: "data".into(), root: "/vol/data".into(), path: "dir/x".into() }])
    );
    assert!(!needs_hosts_file(&p, entry, &f.pod_ips));
    let want = vec![
        v1::Mount {
            container_path: "/data".into(),
            host_path: "/vol/data".into(),
            selinux_relabel: true,
            propagation: v1::MountPropagation::PropagationBidirectional as i32,
            ..Default::default()
        },
        v1::Mount {
            container_path: "/rel".into(),
            host_path: "/sub/1".into(),
            readonly: true,
            recursive_read_only: true,
            selinux_relabel: true,
            ..Default::default()
        },
        v1::Mount {
            container_path: "/etc/hosts".into(),
            host_path: "/vol/cm".into(),
            readonly: true,
            propagation: v1::MountPropagation::PropagationHostToContainer as i32,
            ..Default::default()
        },
        v1::Mount {
            container_path: "/img".into(),
            readonly: true,
            image: Some(v1::ImageSpec { image: "i".into(), ..Default::default() }),
            image_sub_path: "bin".into(),
            ..Default::default()
        },
    ];
    assert_eq!(request(&p, &f).expect("request").mounts, want);
    f.sub_path_targets.clear();
    assert_eq!(
        request(&p, &f).expect_err("missing").missing.as_deref(),
        Some("subPath target of volumeMount \"data\"")
    );
}

#[test]
fn faulty_mounts_and_devices() {
    let node = node();
    let mut f = facts(&node);
    f.volumes.insert("v".into(), host("/v"));
    let mount =
        |more: &str| fault(request(&one(&format!(r#""volumeMounts": [{{"mountPath": "/m", {more}}}]"#), ""), &f));
    for (more, want) in [
        (r#""name": "w""#, "cannot find volume \"w\" to mount into container \"a\""),
        (r#""name": "v", "subPath": "/abs""#, "error SubPath `/abs` must not be an absolute path"),
        (r#""name": "v", "subPath": "a/../b""#, "unable to provision SubPath `a/../b`: must not contain '..'"),
        (r#""name": "v", "subPathExpr": "$(Z)/$(Y)""#, "missing value for Y, Z"),
        (r#""name": "v", "mountPropagation": "X""#, "invalid MountPropagation mode: \"X\""),
        (
            r#""name": "v", "recursiveReadOnly": "Enabled""#,
            "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not read-only",
        ),
        (
            r#""name": "v", "readOnly": true, "recursiveReadOnly": "IfPossible", "mountPropagation": "HostToContainer""#,
            "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not compatible with \
             propagation \"HostToContainer\"",
        ),
        (
            r#""name": "v", "readOnly": true, "recursiveReadOnly": "X""#,
            "failed to resolve recursive read-only mode: unknown recursive read-only mode \"X\"",
        ),
    ] {
        assert_eq!(mount(more), want);
    }
    let rro = |mode: &str, supported: bool| {
        let p = one(
            &format!(
                r#""volumeMounts": [{{"name": "v", "mountPath": "/m", "readOnly": true, "recursiveReadOnly": "{mode}"}}]"#
            ),
            "",
        );
        let f = ContainerFacts { recursive_read_only: supported, ..f.clone() };
        request(&p, &f).map(|r| r.mounts[0].recursive_read_only).map_err(|e| e.message)
    };
    assert_eq!(rro("IfPossible", false), Ok(false));
    assert_eq!(rro("IfPossible", true), Ok(true));
    assert_eq!(rro("Disabled", true), Ok(false));
    assert_eq!(
        rro("Enabled", false),
        Err("failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not supported by the runtime"
            .into())
    );
    let device = |name: &str, path: &str| {
        fault(request(&one(&format!(r#""volumeDevices": [{{"name": "{name}", "devicePath": "{path}"}}]"#), ""), &f))
    };
    assert_eq!(device("b", "rel"), "error DevicePath `rel` must be an absolute path");
    assert_eq!(device("b", "/dev/b"), "cannot find volume \"b\" to pass into container \"a\"");
    assert_eq!(
        sub_path_error("prepare", "v", "a"),
        "failed to prepare subPath for volumeMount \"v\" of container \"a\""
    );
    assert_eq!(
        sub_path_error("create", "v", "a"),
        "failed to create subPath directory for volumeMount \"v\" of container \"a\""
    );
}

#[test]
fn agent_files() {
    let node = node();
    let mut f = facts(&node);
    let p = one(r#""terminationMessagePath": "/m""#, "");
    let paths = |f: &ContainerFacts<'_>, p: &DesiredPod| -> Vec<String> {
        request(p, f).expect("request").mounts.into_iter().map(|m| m.container_path).collect()
    };
    assert_eq!(paths(&f, &p), ["/etc/hosts", "/m"]);
    f.termination_log = None;
    assert_eq!(paths(&f, &p), ["/etc/hosts"]);
    f.pod_ips.clear();
    assert_eq!(paths(&f, &p), Vec::<String>::new());
    let on_host = one("", r#""hostNetwork": true"#);
    assert_eq!(paths(&f, &on_host), ["/etc/hosts"]);
    f.hosts_file = None;
    assert_eq!(request(&on_host, &f).expect_err("missing").missing.as_deref(), Some("hosts file"));
    f.image = None;
    let e = request(&p, &f).expect_err("missing");
    assert_eq!(
        (e.reason.as_str(), e.missing.as_deref()),
        ("CreateContainerConfigError", Some("image of container \"a\""))
    );
}

fn resources(container: &str, rest: &str, node: &NodeFacts) -> v1::LinuxContainerResources {
    let p = one(&format!(r#""resources": {container}"#), rest);
    container_resources(&p, p.container("a").expect("a"), node, false)
}

#[test]
fn linux_resources() {
    let node = node();
    let huge = |two, one| {
        vec![
            v1::HugepageLimit { page_size: "2MB".into(), limit: two },
            v1::HugepageLimit { page_size: "1GB".into(), limit: one },
        ]
    };
    let unified = map(&[("memory.oom.group", "1"), ("memory.swap.max", "0")]);
    assert_eq!(
        resources(
            r#"{"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"cpu": "500m", "memory": "2Gi", "hugepages-2Mi": "4Mi"}}"#,
            "",
            &node
        ),
        v1::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 50_000,
            cpu_shares: 256,
            memory_limit_in_bytes: 2 << 30,
            oom_score_adj: 875,
            hugepage_limits: huge(4 << 20, 0),
            unified: unified.clone(),
            ..Default::default()
        }
    );
    // No request: the limit stands for it. Nothing at all: least shares, no limits.
    assert_eq!(resources(r#"{"limits": {"cpu": "500m"}}"#, "", &node).cpu_shares, 512);
    let none = resources("{}", "", &node);
    assert_eq!((none.cpu_shares, none.cpu_quota, none.memory_limit_in_bytes, none.oom_score_adj), (2, 0, 0, 1000));
    // The pod's limits close what the container leaves open.
    let level = resources(
        r#"{"requests": {"cpu": "100m"}}"#,
        r#""resources": {"limits": {"cpu": "1", "memory": "1Gi", "hugepages-1Gi": "1Gi"}}"#,
        &node,
    );
    assert_eq!((level.cpu_shares, level.cpu_quota, level.memory_limit_in_bytes), (102, 100_000, 1 << 30));
    assert_eq!(level.hugepage_limits, huge(0, 1 << 30));

    let p = one(r#""resources": {"limits": {"cpu": "2"}}"#, "");
    assert_eq!(container_resources(&p, p.container("a").expect("a"), &node, true).cpu_quota, -1);
    let off = NodeFacts { cpu_cfs_quota: false, ..node.clone() };
    let got = resources(r#"{"limits": {"cpu": "2"}}"#, "", &off);
    assert_eq!((got.cpu_quota, got.cpu_period), (0, 0));
    let single = NodeFacts { single_process_oom_kill: true, ..node.clone() };
    assert_eq!(resources("{}", "", &single).unified, map(&[("memory.swap.max", "0")]));
    let v1_node = NodeFacts { cgroup: CgroupVersion::V1, ..node.clone() };
    let got = resources(r#"{"limits": {"memory": "1Gi"}}"#, "", &v1_node);
    assert_eq!((got.memory_swap_limit_in_bytes, got.unified), (1 << 30, map(&[])));
    let no_swap = NodeFacts { swap_controller: false, cgroup: CgroupVersion::V1, ..node };
    assert_eq!(resources(r#"{"limits": {"memory": "1Gi"}}"#, "", &no_swap).memory_swap_limit_in_bytes, 0);
}

#[test]
fn limited_swap() {
    let node = NodeFacts { swap_behavior: SwapBehavior::LimitedSwap, ..node() };
    let swap = |container: &str, rest: &str| resources(container, rest, &node).unified["memory.swap.max"].clone();
    // 1 of 8 GiB of memory: an eighth of 2 GiB of swap.
    assert_eq!(swap(r#"{"requests": {"memory": "1Gi"}}"#, ""), (256i64 << 20).to_string());
    assert_eq!(swap(r#"{"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}"#, ""), (256i64 << 20).to_string());
    assert_eq!(swap(r#"{"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}"#, ""), "0");
    assert_eq!(swap(r#"{"requests": {"cpu": "1"}}"#, ""), "0");
    assert_eq!(swap("{}", ""), "0");
    assert_eq!(swap(r#"{"requests": {"memory": "9Gi"}}"#, ""), "0");
    assert_eq!(swap(r#"{"requests": {"memory": "1Gi"}}"#, r#""priority": 2000000000"#), "0");
}

#[test]
fn memory_qos() {
    let qos = |tiered_reservation| NodeFacts {
        memory_qos: Some(MemoryQos { throttling_factor: 0.9, tiered_reservation, page_size: 4096 }),
        swap_controller: false,
        single_process_oom_kill: true,
        ..node()
    };
    let files = |container: &str, tiered| resources(container, "", &qos(tiered)).unified;
    // 1 GiB + 0.9 GiB, down to a page.
    let high = ((1.9 * f64::from(1 << 30)) as i64 / 4096 * 4096).to_string();
    let half = r#"{"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}"#;
    assert_eq!(files(half, false), map(&[("memory.min", "0"), ("memory.low", "0"), ("memory.high", &high)]));
    assert_eq!(files(half, true), map(&[("memory.low", "1073741824"), ("memory.high", &high)]));
    let full = r#"{"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}"#;
    assert_eq!(files(full, true), map(&[("memory.min", "1073741824")]));
    // Without limit: what the node can allocate, 7 GiB.
    let open = ((1.0 + 6.0 * 0.9) * f64::from(1 << 30)) as i64 / 4096 * 4096;
    assert_eq!(files(r#"{"requests": {"memory": "1Gi"}}"#, true)["memory.high"], open.to_string());
    let v1_node = NodeFacts { cgroup: CgroupVersion::V1, ..qos(true) };
    assert_eq!(resources(half, "", &v1_node).unified, map(&[]));
}
