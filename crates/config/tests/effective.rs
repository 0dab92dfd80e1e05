//! Effective values: defaults, files over defaults, drop-ins over files, flags over all; and `/configz`.

// Helpers outside of test functions may panic too: that fails the test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{Memory, load_with};
use config::{AuthorizationMode, CgroupDriver, Gate, KubeletConfiguration, Loaded, configz};
use model::report::Severity;
use serde_json::{Value, json};

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

fn with_file(text: &str, args: &[&str]) -> Loaded {
    let files = Memory::of(&[("/e/c.yaml", &format!("{HEAD}{text}"))]);
    let mut all = vec!["--config=/e/c.yaml"];
    all.extend(args);
    load_with(&files, &all, true)
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn keys(value: &Value, at: &str, out: &mut Vec<String>) {
    if let Value::Object(map) = value {
        for (key, value) in map {
            let here = format!("{at}.{key}");
            out.push(here.clone());
            keys(value, &here, out);
        }
    }
}

/// A kubelet under the node test suite: its `/configz` is the fixture (sockets and static pod path cut out).
#[test]
fn configz_of_a_running_kubelet() {
    let base =
        "cgroupDriver: cgroupfs\ncgroupRoot: /\nfailCgroupV1: false\nfailSwapOn: false\nserializeImagePulls: false
fileCheckFrequency: 10s\nvolumeStatsAggPeriod: 10s\npodCIDR: 10.100.0.0/24\nevictionPressureTransitionPeriod: 30s
evictionHard: {memory.available: 250Mi, nodefs.available: \"1%\", nodefs.inodesFree: \"1%\"}
evictionMinimumReclaim: {nodefs.available: \"1%\", nodefs.inodesFree: \"1%\"}\n";
    let loaded = with_file(
        base,
        &[
            "--anonymous-auth",
            "--authentication-token-webhook=false",
            "--authorization-mode=AlwaysAllow",
            "--read-only-port=10255",
            "--tls-cert-file=/var/lib/kubelet/pki/kubelet.crt",
            "--tls-private-key-file",
            "/var/lib/kubelet/pki/kubelet.key",
            "-v",
            "4",
            "--system-cgroups=",
            "--kubelet-cgroups=",
        ],
    );
    let errors: Vec<_> = loaded.findings.iter().filter(|f| f.severity == Severity::Error).collect();
    assert!(errors.is_empty(), "{errors:?}");
    let mut got = configz(&loaded.config);
    let endpoint = got.as_object_mut().unwrap().shift_remove("containerRuntimeEndpoint");
    assert_eq!(endpoint, Some(json!("unix:///run/containerd/containerd.sock")));
    let want: Value = serde_json::from_str(include_str!("fixtures/configz.json")).unwrap();
    assert_eq!(got, want);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    keys(&got, "", &mut ours);
    keys(&want, "", &mut theirs);
    assert_eq!(ours, theirs, "field order");
}

/// Every field of the API, set to something of its type, is read back and written in the API's order.
#[test]
fn every_field() {
    let mut text = String::new();
    let mut names = Vec::new();
    for row in include_str!("fixtures/fields.tsv").lines() {
        let (name, kind) = row.split_once('\t').unwrap();
        let value = match (name, kind.trim_start_matches('*')) {
            ("cgroupDriver", _) => "systemd",
            ("cpuManagerPolicy", _) => "static",
            ("memoryManagerPolicy", _) => "Static",
            ("topologyManagerPolicy", _) => "restricted",
            ("topologyManagerScope", _) => "pod",
            ("hairpinMode", _) => "hairpin-veth",
            ("imagePullCredentialsVerificationPolicy", _) => "AlwaysVerify",
            ("configMapAndSecretChangeDetectionStrategy", _) => "Get",
            ("memoryReservationPolicy", _) => "TieredReservation",
            (_, "bool") => "true",
            (_, "string") => "/some/text",
            (_, "int32" | "int64") => "7",
            (_, "float64") => "0.5",
            (_, "metav1.Duration") => "7s",
            (_, "[]string") => "[a, b]",
            (_, "[]int32") => "[29, 23]",
            (_, "map[string]string") => "{a: b}",
            (_, "map[string]bool") => "{NodeSwap: true}",
            (_, "map[string][]string") => "{a: [b, c]}",
            (_, "KubeletAuthentication") => {
                "{x509: {clientCAFile: /ca}, webhook: {enabled: false, cacheTTL: 1s}, anonymous: {enabled: true}}"
            }
            (_, "KubeletAuthorization") => {
                "{mode: AlwaysAllow, webhook: {cacheAuthorizedTTL: 1s, cacheUnauthorizedTTL: 2s}}"
            }
            (_, "MemorySwapConfiguration") => "{swapBehavior: LimitedSwap}",
            (_, "logsapi.LoggingConfiguration") => {
                "{format: json, flushFrequency: 7s, verbosity: 3, vmodule: [{filePattern: a, verbosity: 9}], options: {text: {splitStream: true, infoBufferSize: 1Ki}, json: {splitStream: true, infoBufferSize: 2Ki}}}"
            }
            (_, "[]ShutdownGracePeriodByPodPriority") => "[{priority: 1, shutdownGracePeriodSeconds: 2}]",
            (_, "CrashLoopBackOffConfig") => "{maxContainerRestartPeriod: 7s}",
            (_, "[]MemoryReservation") => "[{numaNode: 1, limits: {memory: 1Gi}}]",
            (_, "[]v1.Taint") => "[{key: a, value: b, effect: NoSchedule}]",
            (_, "tracingapi.TracingConfiguration") => "{endpoint: 'x:1', samplingRatePerMillion: 5}",
            (_, "UserNamespaces") => "{idsPerPod: 65536}",
            other => panic!("{other:?}"),
        };
        text.push_str(&format!("{name}: {value}\n"));
        names.push(name);
    }
    let loaded = with_file(&text, &[]);
    let unread: Vec<_> = loaded.findings.iter().filter(|f| f.file.is_some()).collect();
    assert!(unread.is_empty(), "{unread:?}");
    let got = configz(&loaded.config);
    let written: Vec<_> = got.as_object().unwrap().keys().skip(2).map(String::as_str).collect();
    assert_eq!(written, names);
    let again = with_file(&text, &["--config-dir=/none"]);
    assert_eq!(again.config, loaded.config, "a missing drop-in directory changes nothing");
    // What is written reads back to the same: nothing is lost on the way to a drop-in merge.
    let files = Memory::of(&[("/e/c.json", &got.to_string())]);
    assert_eq!(load_with(&files, &["--config=/e/c.json"], true).config, loaded.config);
}

#[test]
fn a_file_has_safe_defaults() {
    let loaded = with_file("authentication: {webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n", &[]);
    assert_eq!(loaded.findings, [], "nothing to say");
    let c = loaded.config;
    assert!(!c.authentication.anonymous.enabled);
    assert_eq!(c.read_only_port, 0);
    assert_eq!(c.eviction_hard, map(&config::DEFAULT_EVICTION_HARD));
    assert_eq!(c.sync_frequency, Duration::from_mins(1));
    assert_eq!(c.crash_loop_back_off.max_container_restart_period, Some(Duration::from_mins(5)));
    assert_eq!(c.enforce_node_allocatable, ["pods"]);
    assert_eq!(c.cgroup_driver, CgroupDriver::Cgroupfs);
}

#[test]
fn a_standalone_node_cannot_ask_an_api_server() {
    let loaded = with_file("", &[]);
    let errors: Vec<_> = loaded.findings.iter().map(|f| f.path.as_str()).collect();
    assert_eq!(errors, ["authentication.webhook.enabled", "authorization.mode"]);
    let loaded = with_file("enableServer: false\n", &[]);
    assert_eq!(loaded.findings, []);
}

#[test]
fn no_file_has_the_command_lines_defaults() {
    let loaded = load_with(&Memory::default(), &[], true);
    assert!(!loaded.has_errors(), "{:?}", loaded.findings);
    assert_eq!(loaded.findings.len(), 1, "and says so");
    let c = &loaded.config;
    assert!(c.authentication.anonymous.enabled && !c.authentication.webhook.enabled);
    assert_eq!(c.authorization.mode, AuthorizationMode::AlwaysAllow);
    assert_eq!((c.port, c.read_only_port, c.healthz_port), (10250, 10255, 10248));
    assert!(c.eviction_hard.is_empty());
    let v1 = load_with(&Memory::default(), &["--fail-cgroupv1=false"], false);
    assert!(!v1.has_errors(), "{:?}", v1.findings);
}

#[test]
fn defaults_that_hang_together() {
    let c = with_file("nodeStatusUpdateFrequency: 20s\n", &[]).config;
    assert_eq!(c.node_status_report_frequency, Duration::from_secs(20));
    let c = with_file("maxParallelImagePulls: 5\n", &[]).config;
    assert!(!c.serialize_image_pulls);
    let c = with_file("podPidsLimit: -5\nport: 0\nsyncFrequency: 0s\nhealthzPort: 0\n", &[]).config;
    assert_eq!((c.pod_pids_limit, c.port, c.healthz_port), (-1, 10250, 0));
    assert_eq!(c.sync_frequency, Duration::from_mins(1));
    let c = with_file("evictionHard: {memory.available: 1Gi}\n", &[]).config;
    assert_eq!(c.eviction_hard, map(&[("memory.available", "1Gi")]));
    let c = with_file("evictionHard: {memory.available: 1Gi}\nmergeDefaultEvictionSettings: true\n", &[]).config;
    assert_eq!(c.eviction_hard.len(), 5);
    assert_eq!(c.eviction_hard["memory.available"], "1Gi");
    let c = with_file("evictionHard: {}\nenforceNodeAllocatable: []\n", &[]).config;
    assert!(c.eviction_hard.is_empty() && c.enforce_node_allocatable.is_empty());
    let c = with_file("featureGates: {KubeletCrashLoopBackOffMax: false}\n", &[]).config;
    assert_eq!(c.crash_loop_back_off.max_container_restart_period, None);
    let c = with_file("logging: {flushFrequency: 1500000000}\n", &[]).config;
    assert_eq!(c.logging.flush_frequency, Duration::from_millis(1500));
}

#[test]
fn relative_paths_start_at_the_file() {
    let text = "staticPodPath: manifests\nvolumePluginDir: ../x/./y\nresolvConf: ''\ntlsCertFile: /abs\n";
    let c = with_file(text, &["--tls-private-key-file=key"]).config;
    assert_eq!(c.static_pod_path, "/e/manifests");
    assert_eq!(c.volume_plugin_dir, "/x/y");
    assert_eq!(c.resolv_conf, "");
    assert_eq!((c.tls_cert_file.as_str(), c.tls_private_key_file.as_str()), ("/abs", "key"));
    let files = Memory::of(&[("/w/sub/c.yaml", &format!("{HEAD}staticPodPath: m\n"))]);
    let c = load_with(&files, &["--config", "sub/c.yaml"], true).config;
    assert_eq!(c.static_pod_path, "/w/sub/m");
}

#[test]
fn drop_ins_merge_and_flags_win() {
    let files = Memory::of(&[
        (
            "/e/c.yaml",
            &format!(
                "{HEAD}maxPods: 10\nclusterDNS: [1.1.1.1, 2.2.2.2]\nnodeStatusUpdateFrequency: 20s\nfeatureGates: {{EventedPLEG: true, ImageVolumeWithDigest: true}}\n"
            ),
        ),
        (
            "/e/d/10-a.conf",
            &format!(
                "{HEAD}maxPods: 20\npodsPerCore: 3\nclusterDNS: [3.3.3.3]\nevictionHard: {{memory.available: 2Gi}}\nlogging: {{verbosity: 2}}\n"
            ),
        ),
        ("/e/d/9-b.conf", &format!("{HEAD}maxPods: 30\nport: 1\n")),
        ("/e/d/sub/x.conf", &format!("{HEAD}podsPerCore: null\n")),
        ("/e/d/ignored.yaml", "junk: ["),
    ]);
    let loaded = load_with(
        &files,
        &[
            "--config=/e/c.yaml",
            "--config-dir=/e/d",
            "--port=2",
            "--feature-gates=EventedPLEG=false",
            "--vmodule=a=1",
            "--system-reserved=cpu=1",
            "--system-reserved=memory=1Gi",
        ],
        true,
    );
    assert!(loaded.findings.iter().all(|f| f.file.is_none()), "{:?}", loaded.findings);
    let c = &loaded.config;
    assert_eq!(c.max_pods, 30, "9-b after 10-a: the order is that of text");
    assert_eq!(c.port, 2);
    assert_eq!(c.pods_per_core, 0);
    assert_eq!(c.cluster_dns, ["3.3.3.3"]);
    assert_eq!(c.eviction_hard.len(), 5, "mappings merge, also with defaults");
    assert_eq!(c.eviction_hard["memory.available"], "2Gi");
    assert_eq!(c.logging.verbosity, 2);
    assert_eq!(c.node_status_report_frequency, Duration::from_secs(20));
    assert_eq!(c.system_reserved, map(&[("cpu", "1"), ("memory", "1Gi")]));
    assert_eq!(c.logging.vmodule.len(), 1);
    assert!(!loaded.gates.enabled(Gate::EventedPLEG));
    assert!(loaded.gates.enabled(Gate::ImageVolumeWithDigest));
    assert_eq!(c.feature_gates.len(), 2);
}

#[test]
fn all_errors_are_told_and_the_rest_is_used() {
    let text = "maxPods: five\nport: 70000\nsyncFrequency: 10\ncgroupDriver: foo\nauthentication: {anonymous: {enabled: maybe}}\nclusterDomain: x.y\nclusterDNS: [1]\nevictionSoft: {memory.available: 1Gi, foo: 1Gi}\nsystemReserved: {cpu: x, gpu: '1'}\nqosReserved: {memory: 101%}\ntlsMinVersion: TLS1\ntlsCipherSuites: [X]\nallowedUnsafeSysctls: [vm.x]\nstaticPodURL: ftp://x\ncontainerLogMaxSize: 10Mb\ncpuManagerPolicyOptions: {x: z, align-by-socket: 'true'}\naddress: here\npodCIDR: 10.0.0.0/33\ncontainerRuntimeEndpoint: tcp://x\nevictionMinimumReclaim: {pid.available: '-1'}\nevictionSoftGracePeriod: {nodefs.available: 5}\n";
    let loaded = with_file(text, &["--kubeconfig=/k"]);
    let mut found: Vec<_> =
        loaded.findings.iter().filter(|f| f.severity == Severity::Error).map(|f| f.path.as_str()).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(
        found,
        [
            "address",
            "allowedUnsafeSysctls",
            "authentication.anonymous.enabled",
            "cgroupDriver",
            "clusterDNS[0]",
            "containerLogMaxSize",
            "containerRuntimeEndpoint",
            "cpuManagerPolicyOptions.align-by-socket",
            "cpuManagerPolicyOptions.x",
            "evictionMinimumReclaim.pid.available",
            "evictionSoft.foo",
            "evictionSoft.memory.available",
            "evictionSoftGracePeriod.nodefs.available",
            "maxPods",
            "podCIDR",
            "port",
            "qosReserved.memory",
            "staticPodURL",
            "syncFrequency",
            "systemReserved.cpu",
            "systemReserved.gpu",
            "tlsCipherSuites",
            "tlsMinVersion",
        ]
    );
    assert_eq!(loaded.config.cluster_domain, "x.y");
    assert_eq!(loaded.config.max_pods, 110);
    let first = loaded.findings.iter().find(|f| f.path == "maxPods").unwrap();
    assert_eq!(
        first.to_string(),
        "/e/c.yaml: maxPods: cannot use \"five\" (a string): a whole number from -2147483648 to 2147483647 is needed"
    );
}

#[test]
fn unsupported_things_are_named() {
    let base = "authentication: {webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n";
    let loaded = with_file(&format!("{base}volumePluginDir: /v\nfeatureGates: {{PodsAPI: true}}\n"), &[]);
    let told: Vec<_> = loaded.findings.iter().map(|f| (f.severity, f.path.as_str())).collect();
    assert_eq!(told, [(Severity::Warning, "volumePluginDir"), (Severity::Warning, "featureGates.PodsAPI")]);
    let quiet = with_file(&format!("{base}cpuManagerPolicy: none\n"), &["--kubeconfig=", "--node-labels="]);
    assert!(!quiet.has_errors());
}

#[test]
fn node_ips() {
    for (given, count, told) in [
        ("", 0, None),
        ("10.0.0.1", 1, None),
        ("10.0.0.1, fd00::1", 2, None),
        (
            "10.0.0.1,10.0.0.2",
            2,
            Some("bad --node-ip \"10.0.0.1,10.0.0.2\": must contain either a single IP or a dual-stack pair of IPs"),
        ),
        ("::,0.0.0.0", 2, Some("bad --node-ip \"::,0.0.0.0\": dual-stack node IP cannot include '0.0.0.0' or '::'")),
        ("x,10.0.0.1", 1, Some("Could not parse some node IP(s), ignoring them IPs=[\"x\"]")),
    ] {
        let flag = format!("--node-ip={given}");
        let flags = config::parse_flags(std::slice::from_ref(&flag)).unwrap();
        assert_eq!(flags.node_ips().len(), count, "{given}");
        let loaded = with_file("enableServer: false\n", &[&flag]);
        let messages: Vec<_> = loaded.findings.iter().map(|f| f.message.as_str()).collect();
        assert_eq!(messages, told.into_iter().collect::<Vec<_>>(), "{given}");
    }
}

#[test]
fn real_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.yaml");
    std::fs::write(&file, format!("{HEAD}maxPods: 7\n")).unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    std::fs::write(dir.path().join("d/1.conf"), format!("{HEAD}maxPods: 8\n")).unwrap();
    let arg = |flag: &str, path: &std::path::Path| format!("--{flag}={}", path.display());
    let host = config::Host { cgroup_v2: true, working_dir: "/".into() };
    let run = |args: &[String]| config::load(&config::parse_flags(args).unwrap(), &config::HostFiles, &host);
    let loaded = run(&[arg("config", &file), arg("config-dir", &dir.path().join("d"))]);
    assert_eq!(loaded.config.max_pods, 8);
    // A file in place of the directory holds no drop-ins; a directory in place of the file cannot be read.
    let loaded = run(&[arg("config", &file), arg("config-dir", &file)]);
    assert_eq!(loaded.config.max_pods, 7);
    let loaded = run(&[arg("config", dir.path())]);
    assert!(loaded.findings[0].message.starts_with("failed to read kubelet config file"));
    let loaded = run(&[arg("config", &file), arg("config-dir", &dir.path().join("none"))]);
    assert!(loaded.findings[0].message.starts_with("failed to walk through kubelet dropin directory"));
    assert_eq!(KubeletConfiguration::default().max_pods, 110);
}
