//! Sandbox requests.

use cri_api::v1;

use super::super::dns::DnsConfig;
use super::super::hostname::{PodHostname, pod_hostname};
use super::*;

fn sandbox_facts(node: &NodeFacts) -> SandboxFacts<'_> {
    SandboxFacts {
        node,
        attempt: 2,
        hostname: Some(PodHostname { hostname: "web".into(), domain: String::new() }),
        dns: Some(DnsConfig {
            servers: strings(&["1.1.1.1"]),
            searches: strings(&["a"]),
            options: strings(&["ndots:5"]),
        }),
        cgroup_parent: "/kubepods/burstable/poduid-1".into(),
        user_namespace: UserNamespaceFacts::default(),
        volume_gids: Vec::new(),
        exclusive_cpus: false,
    }
}

#[test]
fn whole_request() {
    let node = node();
    let p = pod_with(
        r#"{"labels": {"app": "web", "io.kubernetes.pod.name": "forged"}, "annotations": {"kubernetes.io/config.source": "file"}}"#,
        &one_spec(
            r#""resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}},
               "ports": [{"containerPort": 80, "hostPort": 8080, "protocol": "TCP"}, {"containerPort": 80, "hostPort": 8080, "protocol": "TCP"},
                         {"containerPort": 53, "protocol": "UDP", "name": "dns"}, {"containerPort": 54, "name": "dns"}]"#,
            r#""securityContext": {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}], "fsGroup": 2000,
               "supplementalGroups": [3000], "supplementalGroupsPolicy": "Strict", "runAsUser": 1000, "runAsGroup": 1001,
               "seLinuxOptions": {"level": "s0:c1"}}, "overhead": {"cpu": "10m", "memory": "1Mi"}"#,
        ),
    );
    let mut f = sandbox_facts(&node);
    f.volume_gids = vec![4000];
    let got = sandbox_config(&p, &f).expect("request");
    let oom = map(&[("memory.oom.group", "1")]);
    let want = v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: "web".into(),
            uid: "uid-1".into(),
            namespace: "ns".into(),
            attempt: 2,
        }),
        hostname: "web".into(),
        log_directory: "/var/log/pods/ns_web_uid-1".into(),
        dns_config: Some(v1::DnsConfig {
            servers: strings(&["1.1.1.1"]),
            searches: strings(&["a"]),
            options: strings(&["ndots:5"]),
        }),
        port_mappings: vec![
            v1::PortMapping { protocol: 0, container_port: 80, host_port: 8080, host_ip: String::new() },
            v1::PortMapping { protocol: 1, container_port: 53, host_port: 0, host_ip: String::new() },
        ],
        labels: map(&[
            ("app", "web"),
            ("io.kubernetes.pod.name", "web"),
            ("io.kubernetes.pod.namespace", "ns"),
            ("io.kubernetes.pod.uid", "uid-1"),
        ]),
        annotations: map(&[("kubernetes.io/config.source", "file")]),
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/burstable/poduid-1".into(),
            security_context: Some(v1::LinuxSandboxSecurityContext {
                namespace_options: Some(v1::NamespaceOption {
                    pid: v1::NamespaceMode::Container as i32,
                    userns_options: Some(v1::UserNamespace {
                        mode: v1::NamespaceMode::Node as i32,
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                selinux_options: Some(v1::SeLinuxOption { level: "s0:c1".into(), ..Default::default() }),
                run_as_user: Some(v1::Int64Value { value: 1000 }),
                run_as_group: Some(v1::Int64Value { value: 1001 }),
                supplemental_groups: vec![2000, 4000, 3000],
                supplemental_groups_policy: 1,
                seccomp: Some(v1::SecurityProfile::default()),
                ..Default::default()
            }),
            sysctls: map(&[("net.ipv4.ip_unprivileged_port_start", "0")]),
            overhead: Some(v1::LinuxContainerResources {
                cpu_period: 100_000,
                cpu_quota: 1_000,
                cpu_shares: 10,
                memory_limit_in_bytes: 1 << 20,
                unified: oom.clone(),
                ..Default::default()
            }),
            resources: Some(v1::LinuxContainerResources {
                cpu_period: 100_000,
                cpu_quota: 50_000,
                cpu_shares: 102,
                memory_limit_in_bytes: 128 << 20,
                unified: oom,
                ..Default::default()
            }),
        }),
        windows: None,
    };
    assert_eq!(got, want);
}

#[test]
fn hosts_namespaces_and_privilege() {
    let node = node();
    let p = pod(
        r#"{"hostNetwork": true, "hostPID": true, "hostIPC": true, "shareProcessNamespace": true, "containers": [{"name": "a"}],
            "initContainers": [{"name": "i", "securityContext": {"privileged": true}}]}"#,
    );
    let mut f = sandbox_facts(&node);
    f.hostname = None;
    let got = sandbox_config(&p, &f).expect("request");
    assert_eq!(got.hostname, "");
    let linux = got.linux.expect("linux");
    assert_eq!(linux.overhead, Some(v1::LinuxContainerResources::default()));
    let context = linux.security_context.expect("context");
    assert!(context.privileged);
    let options = context.namespace_options.expect("namespaces");
    let at_node = v1::NamespaceMode::Node as i32;
    assert_eq!((options.network, options.pid, options.ipc), (at_node, at_node, at_node));

    let shared = one("", r#""shareProcessNamespace": true"#);
    let got = sandbox_config(&shared, &sandbox_facts(&node)).expect("request").linux.expect("linux");
    let options = got.security_context.expect("context").namespace_options.expect("namespaces");
    assert_eq!((options.network, options.pid, options.ipc), (0, 0, 0));
    // No CPU anywhere: the least shares and no quota.
    let resources = got.resources.expect("resources");
    assert_eq!((resources.cpu_shares, resources.cpu_quota, resources.memory_limit_in_bytes), (2, 0, 0));
}

#[test]
fn faults_and_missing_facts() {
    let node = node();
    let missing = |f: &SandboxFacts<'_>, p: &DesiredPod| {
        let e = sandbox_config(p, f).expect_err("missing");
        assert_eq!(e.reason, Reason::CreatePodSandbox);
        e.missing
    };
    let p = one("", "");
    let f = SandboxFacts { dns: None, ..sandbox_facts(&node) };
    assert_eq!(missing(&f, &p).as_deref(), Some("DNS configuration"));
    let f = SandboxFacts { hostname: None, ..sandbox_facts(&node) };
    assert_eq!(missing(&f, &p).as_deref(), Some("host name"));

    let private = one("", r#""hostUsers": false"#);
    let mut f = sandbox_facts(&node);
    assert_eq!(
        fault(sandbox_config(&private, &f)),
        "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
    );
    f.user_namespace.handler = "kata".into();
    assert_eq!(
        fault(sandbox_config(&private, &f)),
        "can't set `spec.hostUsers: false`, RuntimeClass handler \"kata\" does not support user namespaces"
    );
    f.user_namespace.supported = true;
    assert_eq!(missing(&f, &private).as_deref(), Some("user namespace range"));
    let ids = vec![v1::IdMapping { host_id: 65_536, container_id: 0, length: 65_536 }];
    f.user_namespace.mappings = Some(ids.clone());
    let context = sandbox_config(&private, &f).expect("request").linux.expect("linux").security_context;
    let userns = context.expect("context").namespace_options.expect("namespaces").userns_options.expect("userns");
    assert_eq!((userns.mode, &userns.uids, &userns.gids), (0, &ids, &ids));

    let long = pod_with(
        &format!(r#"{{"name": "{}"}}"#, "h".repeat(63)),
        r#"{"containers": [], "subdomain": "s", "setHostnameAsFQDN": true}"#,
    );
    let hostname = pod_hostname(&long, "cluster.local", true).ok();
    let e = sandbox_config(&long, &SandboxFacts { hostname, ..sandbox_facts(&node) }).expect_err("too long");
    assert_eq!(e.reason.as_str(), "CreatePodSandboxError");
    assert!(e.message.ends_with("is too long (64 characters is the max, 86 characters requested)"), "{e}");
    let odd = one("", r#""securityContext": {"supplementalGroupsPolicy": "X"}"#);
    let e = sandbox_config(&odd, &sandbox_facts(&node)).expect_err("unknown");
    assert_eq!((e.reason, e.message.as_str()), (Reason::CreatePodSandbox, "unsupported supplementalGroupsPolicy: X"));
}
