//! Every figure is compared with the list of the Go kubelet 1.36.1.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// name, type, labels as the Go kubelet has them; those rubelet feeds.
const REFERENCE: &str = include_str!("../../tests/go-metrics.tsv");

/// Gives every figure a value, so that it appears on the page.
fn filled() -> Metrics {
    let metrics = Metrics::new().unwrap();
    let second = Duration::from_secs(1);
    metrics.runtime_operation("PullImage", second, true);
    metrics.run_podsandbox("", second, true);
    metrics.pod_worker(WorkerOperation::Create, second);
    metrics.running(1, ContainerCounts { running: 2, exited: 1, ..ContainerCounts::default() });
    metrics.desired_pods(3, 0);
    metrics.active_pods(3, 0);
    metrics.working_pods(&WorkingPods {
        desired_static: StateCounts { sync: 2, terminating: 1, terminated: 0 },
        ..WorkingPods::default()
    });
    metrics.pod_restarted(true);
    metrics.runtime_loses_support("1.37.0");
    metrics.container_started(ContainerType::Init);
    metrics.container_start_failed(ContainerType::App, "ErrImagePull");
    metrics.container_terminated(ContainerType::App, 137, "OOMKilled");
    metrics.admission_rejected("OutOfcpu");
    metrics.image_pulled(700 << 20, second);
    metrics.ensure_image("IfNotPresent", Some(true), None);
    metrics.cgroup_operation("create", second);
    metrics.set_node_name("node-a");
    metrics.set_build_info(BuildInfo::default());
    metrics.set_feature("SidecarContainers", "", true);
    metrics.health_check("ping", true);
    drop(metrics.http_request("GET", "pods", "readonly", false));
    metrics.credential_plugin("p", second, true);
    metrics.volume_measured("du", second);
    metrics.resizes.requested("cpu", "limits", "increase");
    metrics.resizes.actuated(second, true);
    metrics.resizes.pending(1, 0);
    metrics.resizes.infeasible("swap_limitation");
    metrics.resizes.deferred_accepted("pods_removed");
    let beside = &metrics.beside;
    beside.api_request("GET", "127.0.0.1:6443", 200, second, 0);
    beside.api_answer("GET", "127.0.0.1:6443", 100);
    beside.api_request_held("GET", "127.0.0.1:6443", second);
    beside.transport_made();
    beside.websocket_translated("exec");
    beside.client_certificate(1e6);
    beside.delegated_authz(true, second);
    beside.must_pull_check("credentialPolicyAllowed");
    beside.volume_mounted("kubernetes.io/configmap", second, false);
    beside.volumes([("kubernetes.io/configmap", 1, 1)].into_iter());
    metrics
}

fn shape(registry: &Registry) -> BTreeMap<String, (String, BTreeSet<String>)> {
    registry
        .gather()
        .iter()
        .map(|family| {
            let kind = format!("{:?}", family.get_field_type()).to_lowercase();
            let labels = family.get_metric()[0].get_label().iter().map(|label| label.name().to_owned()).collect();
            (family.name().to_owned(), (kind, labels))
        })
        .collect()
}

#[test]
fn names_types_and_labels_are_gos() {
    let expected: BTreeMap<_, _> = REFERENCE
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut fields = line.split('\t');
            let mut next = || fields.next().unwrap().to_owned();
            let (name, kind, labels) = (next(), next(), next());
            let labels: BTreeSet<String> =
                labels.split(',').filter(|label| !label.is_empty()).map(str::to_owned).collect();
            (name, (kind, labels))
        })
        .collect();
    let actual = shape(&filled().registry);
    assert_eq!(actual, expected);
}

/// A node without drivers shows nothing of them, so they are not in the reference.
#[test]
fn calls_to_drivers() {
    let metrics = Metrics::new().unwrap();
    metrics.beside.csi_call("d", "/csi.v1.Node/NodeGetInfo", "OK", Duration::from_secs(1));
    let line = "csi_operations_seconds_count{driver_name=\"d\",grpc_status_code=\"OK\",method_name=\"/csi.v1.Node/NodeGetInfo\",migrated=\"false\"} 1";
    let text = metrics.encode().unwrap();
    assert!(text.lines().any(|have| have == line), "{text}");
}

/// Nor does one without SELinux show labels. Names, types and labels are those of k8s.io/kubernetes 1.36.1.
#[test]
fn labels_of_volumes() {
    let metrics = Metrics::new().unwrap();
    let plugin = "kubernetes.io/csi/d";
    for labelled in [
        Labelled::Admitted(plugin, "RWOP"),
        Labelled::PodMismatch("RWOP", true),
        Labelled::PodMismatch("RWX", false),
        Labelled::VolumeMismatch(plugin, "RWOP", true),
        Labelled::VolumeMismatch(plugin, "RWO", false),
    ] {
        metrics.beside.selinux(labelled);
    }
    let text = metrics.encode().unwrap();
    for line in [
        "# TYPE volume_manager_selinux_volumes_admitted_total gauge",
        "volume_manager_selinux_volumes_admitted_total{access_mode=\"RWOP\",volume_plugin=\"kubernetes.io/csi/d\"} 1",
        "volume_manager_selinux_pod_context_mismatch_errors_total{access_mode=\"RWOP\"} 1",
        "volume_manager_selinux_pod_context_mismatch_warnings_total{access_mode=\"RWX\"} 1",
        "volume_manager_selinux_volume_context_mismatch_errors_total{access_mode=\"RWOP\",volume_plugin=\"kubernetes.io/csi/d\"} 1",
        "volume_manager_selinux_volume_context_mismatch_warnings_total{access_mode=\"RWO\",volume_plugin=\"kubernetes.io/csi/d\"} 1",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
}

#[test]
fn sli_page() {
    let shape = shape(&filled().health);
    let names: Vec<&str> = shape.keys().map(String::as_str).collect();
    assert_eq!(names, ["kubernetes_healthcheck", "kubernetes_healthchecks_total", "process_start_time_seconds"]);
    let text = filled().encode_slis().unwrap();
    assert!(text.contains("kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n"), "{text}");
    assert!(
        text.contains("kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 1\n"),
        "{text}"
    );
}

#[test]
fn probes_page() {
    let metrics = Metrics::new().unwrap();
    let probe = ProbedContainer { probe_type: "Liveness", namespace: "ns", pod: "web", uid: "u", container: "c" };
    metrics.probed(probe, Some(true), Duration::from_millis(30));
    metrics.probed(probe, Some(false), Duration::from_millis(30));
    metrics.probed(ProbedContainer { uid: "v", pod: "other", ..probe }, None, Duration::from_secs(3));
    let text = metrics.encode_probes().unwrap();
    for line in [
        "prober_probe_total{container=\"c\",namespace=\"ns\",pod=\"web\",pod_uid=\"u\",probe_type=\"Liveness\",result=\"successful\"} 1",
        "prober_probe_total{container=\"c\",namespace=\"ns\",pod=\"web\",pod_uid=\"u\",probe_type=\"Liveness\",result=\"failed\"} 1",
        "prober_probe_duration_seconds_count{container=\"c\",namespace=\"ns\",pod=\"web\",probe_type=\"Liveness\"} 1",
        "prober_probe_duration_seconds_count{container=\"c\",namespace=\"ns\",pod=\"other\",probe_type=\"Liveness\"} 1",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
    metrics.forget_probes("u");
    let text = metrics.encode_probes().unwrap();
    assert!(!text.contains("web") && text.contains("other"), "{text}");
}

#[test]
fn page_shows_what_was_recorded() {
    let text = filled().encode().unwrap();
    for line in [
        "kubelet_runtime_operations_total{operation_type=\"pull_image\"} 1",
        "kubelet_runtime_operations_errors_total{operation_type=\"pull_image\"} 1",
        "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"pull_image\",le=\"0.48828125\"} 0",
        "kubelet_runtime_operations_duration_seconds_count{operation_type=\"pull_image\"} 1",
        "kubelet_running_pods 1",
        "kubelet_running_containers{container_state=\"running\"} 2",
        "kubelet_desired_pods{static=\"true\"} 3",
        "kubelet_desired_pods{static=\"\"} 0",
        "kubelet_restarted_pods_total{static=\"true\"} 1",
        "kubelet_restarted_pods_total{static=\"\"} 0",
        "kubelet_cri_losing_support{version=\"1.37.0\"} 1",
        "kubelet_working_pods{config=\"desired\",lifecycle=\"terminating\",static=\"true\"} 1",
        "kubelet_working_pods{config=\"runtime_only\",lifecycle=\"sync\",static=\"unknown\"} 0",
        "kubelet_started_containers_errors_total{code=\"ErrImagePull\",container_type=\"container\"} 1",
        "kubelet_image_pull_duration_seconds_sum{image_size_in_bytes=\"500MB-1GB\"} 1",
        "kubelet_image_manager_ensure_image_requests_total{present_locally=\"true\",pull_policy=\"ifnotpresent\",pull_required=\"unknown\"} 1",
        "kubelet_http_inflight_requests{long_running=\"false\",method=\"GET\",path=\"pods\",server_type=\"readonly\"} 0",
        "kubelet_node_name{node=\"node-a\"} 1",
        "# TYPE process_cpu_seconds_total counter",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
}

#[test]
fn buckets_are_gos() {
    let buckets = |name: &str| -> Vec<f64> {
        let families = filled().registry.gather();
        let family = families.iter().find(|family| family.name() == name).unwrap();
        let histogram = family.get_metric()[0].get_histogram();
        histogram.get_bucket().iter().map(prometheus::proto::Bucket::upper_bound).collect()
    };
    assert_eq!(buckets("kubelet_containers_per_pod_count"), [1.0, 2.0, 4.0, 8.0, 16.0]);
    assert_eq!(buckets("kubelet_pod_start_sli_duration_seconds").len(), 25);
    assert_eq!(buckets("kubelet_image_pull_duration_seconds").len(), 18);
    assert_eq!(buckets("kubelet_runtime_operations_duration_seconds").len(), 14);
    assert_eq!(
        buckets("kubelet_pleg_relist_duration_seconds"),
        [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
    );
}

/// The process figures are this process's.
#[test]
fn process_figures() {
    let text = filled().encode().unwrap();
    let figure = |name: &str| -> f64 {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap().parse().unwrap()
    };
    let now = jiff::Timestamp::now().as_second() as f64;
    let started = figure("process_start_time_seconds");
    assert!(started <= now + 2.0 && started > now - 3600.0, "{started} {now}");
    let resident = figure("process_resident_memory_bytes");
    assert!(resident > 100e3 && resident < figure("process_virtual_memory_bytes"), "{resident}");
    assert!(figure("process_open_fds") >= 3.0 && figure("process_open_fds") < figure("process_max_fds"));
    let _ = (figure("process_network_receive_bytes_total"), figure("process_network_transmit_bytes_total"));
    let _ = (figure("process_virtual_memory_max_bytes"), figure("process_cpu_seconds_total"));
}
