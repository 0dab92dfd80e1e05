//! Name, type, labels, buckets and help text of every figure.

use prometheus::{
    Counter, CounterVec, DEFAULT_BUCKETS, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, Opts, Registry,
    exponential_buckets,
};

use super::beside::count_registered;
use super::process::ProcessCollector;
use super::{Beside, Managers, Metrics, MetricsError, Resizes};

const POD_START_BUCKETS: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0,
    600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
const IMAGE_PULL_BUCKETS: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0,
    3600.0,
];

/// Makes figures and registers them under the subsystem `kubelet_`.
struct Definer<'a>(&'a Registry);

impl Definer<'_> {
    fn register<C: prometheus::core::Collector + Clone + 'static>(&self, metric: C) -> prometheus::Result<C> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<Counter> {
        self.register(Counter::with_opts(Opts::new(name, help).subsystem("kubelet"))?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<CounterVec> {
        self.register(CounterVec::new(Opts::new(name, help).subsystem("kubelet"), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        self.register(Gauge::with_opts(Opts::new(name, help).subsystem("kubelet"))?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        self.register(GaugeVec::new(Opts::new(name, help).subsystem("kubelet"), labels)?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::new(name, help).subsystem("kubelet").buckets(buckets.to_vec());
        self.register(Histogram::with_opts(opts)?)
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> prometheus::Result<HistogramVec> {
        let opts = HistogramOpts::new(name, help).subsystem("kubelet").buckets(buckets.to_vec());
        self.register(HistogramVec::new(opts, labels)?)
    }
}

impl Metrics {
    /// Defines and registers everything.
    ///
    /// # Errors
    /// Only when two figures share a name, which a test rules out.
    pub fn new() -> Result<Self, MetricsError> {
        let registry = Registry::new();
        let health = Registry::new();
        let probes = Registry::new();
        registry.register(Box::new(ProcessCollector::all()?))?;
        health.register(Box::new(ProcessCollector::start_time()?))?;
        probes.register(Box::new(ProcessCollector::start_time()?))?;
        let on = Definer(&registry);
        let beside = Beside::new(&registry)?;
        let resizes = Resizes::new(&registry)?;
        let managers = Managers::new(&registry)?;
        let http = ["method", "path", "server_type", "long_running"];
        let metrics = Self {
            pleg_relist_duration: on.histogram(
                "pleg_relist_duration_seconds",
                "Seconds that listing and comparing all pods of the runtime took.",
                DEFAULT_BUCKETS,
            )?,
            pleg_relist_interval: on.histogram(
                "pleg_relist_interval_seconds",
                "Seconds between two relists.",
                DEFAULT_BUCKETS,
            )?,
            pleg_pod_relist_duration: on.histogram(
                "pleg_pod_relist_duration_seconds",
                "Seconds that looking at one pod in a relist took.",
                DEFAULT_BUCKETS,
            )?,
            pleg_last_seen: on.gauge(
                "pleg_last_seen_seconds",
                "When PLEG was last seen active, in seconds since the epoch.",
            )?,
            pleg_discard_events: on.counter("pleg_discard_events", "Pod lifecycle events dropped.")?,
            evented_pleg_connection_errors: on.counter(
                "evented_pleg_connection_error_count",
                "Failures of the event stream from the runtime.",
            )?,
            evented_pleg_connections: on.counter(
                "evented_pleg_connection_success_count",
                "Event streams from the runtime that were opened.",
            )?,
            evented_pleg_latency: on.histogram(
                "evented_pleg_connection_latency_seconds",
                "Seconds from the runtime making an event to it being received.",
                DEFAULT_BUCKETS,
            )?,
            pod_worker_start_duration: on.histogram(
                "pod_worker_start_duration_seconds",
                "Seconds from first seeing a pod to its worker beginning.",
                DEFAULT_BUCKETS,
            )?,
            pod_start_duration: on.histogram(
                "pod_start_duration_seconds",
                "Seconds from first seeing a pod to it running.",
                POD_START_BUCKETS,
            )?,
            pod_start_sli_duration: on.histogram(
                "pod_start_sli_duration_seconds",
                "Seconds from a pod's creation to all its containers being seen started, without image pulls and init containers.",
                POD_START_BUCKETS,
            )?,
            pod_start_total_duration: on.histogram(
                "pod_start_total_duration_seconds",
                "Seconds from a pod's creation to all its containers being seen started.",
                POD_START_BUCKETS,
            )?,
            containers_per_pod: on.histogram(
                "containers_per_pod_count",
                "App containers of a pod.",
                &exponential_buckets(1.0, 2.0, 5)?,
            )?,
            mirror_pods: on.gauge("mirror_pods", "Admitted static pods that ought to have a mirror pod.")?,
            orphaned_runtime_pods: on.counter(
                "orphaned_runtime_pods_total",
                "Pods found in the runtime that no pod worker knew.",
            )?,
            started_pods: on.counter("started_pods_total", "Pods begun.")?,
            started_pods_errors: on.counter("started_pods_errors_total", "Pods that failed to begin.")?,
            started_user_namespaced_pods: on.counter(
                "started_user_namespaced_pods_total",
                "Pods with a user namespace begun.",
            )?,
            started_user_namespaced_pods_errors: on.counter(
                "started_user_namespaced_pods_errors_total",
                "Pods with a user namespace that failed to begin.",
            )?,
            managed_ephemeral_containers: on.gauge(
                "managed_ephemeral_containers",
                "Ephemeral containers in the pods of this node.",
            )?,
            lifecycle_http_fallbacks: on.counter(
                "lifecycle_handler_http_fallbacks_total",
                "Lifecycle hooks for which https failed and http worked.",
            )?,
            sleep_terminated_early: on.counter(
                "sleep_action_terminated_early_total",
                "Sleep hooks that were cut short.",
            )?,
            orphan_pod_cleaned_volumes: on.gauge(
                "orphan_pod_cleaned_volumes",
                "Gone pods whose volumes the last clean-up removed.",
            )?,
            orphan_pod_cleaned_volumes_errors: on.gauge(
                "orphan_pod_cleaned_volumes_errors",
                "Gone pods whose volumes the last clean-up could not remove.",
            )?,
            cgroup_version: on.gauge("cgroup_version", "Version of the host's cgroup tree: 1 or 2.")?,
            image_volume_requested: on.counter("image_volume_requested_total", "Image volumes asked for.")?,
            image_volume_mounted: on.counter("image_volume_mounted_succeed_total", "Image volumes mounted.")?,
            image_volume_errors: on.counter(
                "image_volume_mounted_errors_total",
                "Image volumes that failed to mount.",
            )?,
            runtime_operations: on.counters(
                "runtime_operations_total",
                "Calls to the container runtime by operation.",
                &["operation_type"],
            )?,
            runtime_operations_errors: on.counters(
                "runtime_operations_errors_total",
                "Failed calls to the container runtime by operation.",
                &["operation_type"],
            )?,
            runtime_operations_duration: on.histograms(
                "runtime_operations_duration_seconds",
                "Seconds that a call to the container runtime took, by operation.",
                &["operation_type"],
                &exponential_buckets(0.005, 2.5, 14)?,
            )?,
            run_podsandbox_duration: on.histograms(
                "run_podsandbox_duration_seconds",
                "Seconds that RunPodSandbox took, by runtime handler.",
                &["runtime_handler"],
                DEFAULT_BUCKETS,
            )?,
            run_podsandbox_errors: on.counters(
                "run_podsandbox_errors_total",
                "Failed RunPodSandbox calls by runtime handler.",
                &["runtime_handler"],
            )?,
            pod_worker_duration: on.histograms(
                "pod_worker_duration_seconds",
                "Seconds that one run of a pod worker took, by operation.",
                &["operation_type"],
                DEFAULT_BUCKETS,
            )?,
            running_pods: on.gauge("running_pods", "Pods with a running sandbox.")?,
            running_containers: on.gauges(
                "running_containers",
                "Containers in the runtime by state.",
                &["container_state"],
            )?,
            desired_pods: on.gauges(
                "desired_pods",
                "Pods that the node is told to run; static is true for those not from the API server.",
                &["static"],
            )?,
            active_pods: on.gauges(
                "active_pods",
                "Pods that count when a new one is admitted; static is true for those not from the API server.",
                &["static"],
            )?,
            working_pods: on.gauges(
                "working_pods",
                "Pods that workers hold: by lifecycle, by whether they are desired, orphaned or known to the runtime alone, and by static.",
                &["lifecycle", "config", "static"],
            )?,
            restarted_pods: on.counters(
                "restarted_pods_total",
                "Pods deleted and made again under the same UID.",
                &["static"],
            )?,
            cri_losing_support: on.gauges(
                "cri_losing_support",
                "The Kubernetes version from which on this container runtime is too old.",
                &["version"],
            )?,
            started_containers: on.counters(
                "started_containers_total",
                "Containers whose start was begun.",
                &["container_type"],
            )?,
            started_containers_errors: on.counters(
                "started_containers_errors_total",
                "Containers that failed to start, by error.",
                &["container_type", "code"],
            )?,
            terminated_containers: on.counters(
                "terminated_containers_total",
                "Containers that ended, by exit code and reason.",
                &["container_type", "exit_code", "reason"],
            )?,
            evictions: on.counters(
                "evictions",
                "Pods evicted, by what they were evicted for.",
                &["eviction_signal"],
            )?,
            eviction_stats_age: on.histograms(
                "eviction_stats_age_seconds",
                "Age of the figures by which a pod was chosen for eviction.",
                &["eviction_signal"],
                DEFAULT_BUCKETS,
            )?,
            preemptions: on.counters(
                "preemptions",
                "Pods that had to make room for a critical one, by what that one lacked.",
                &["preemption_signal"],
            )?,
            admission_rejections: on.counters(
                "admission_rejections_total",
                "Pods refused by this node, by reason.",
                &["reason"],
            )?,
            memory_min: on.gauges(
                "memory_qos_node_memory_min_bytes",
                "Memory that Guaranteed pods request together and that is kept from reclaim (gate MemoryQoS).",
                &[],
            )?,
            memory_low: on.gauges(
                "memory_qos_node_memory_low_bytes",
                "Memory that Burstable pods request together and that is reclaimed last (gate MemoryQoS).",
                &[],
            )?,
            shutdown_start: on.gauge(
                "graceful_shutdown_start_time_seconds",
                "When the node's shutdown began, seconds since the epoch.",
            )?,
            shutdown_end: on.gauge(
                "graceful_shutdown_end_time_seconds",
                "When the node's shutdown ended, seconds since the epoch.",
            )?,
            images_collected: on.counters(
                "image_garbage_collected_total",
                "Images removed by garbage collection, by why: for their age or for space.",
                &["reason"],
            )?,
            image_pull_duration: on.histograms(
                "image_pull_duration_seconds",
                "Seconds that an image pull took, with its wait, by size of the image.",
                &["image_size_in_bytes"],
                IMAGE_PULL_BUCKETS,
            )?,
            ensure_image_requests: on.counters(
                "image_manager_ensure_image_requests_total",
                "Images asked for by containers, by pull policy, presence and need of a pull.",
                &["pull_policy", "present_locally", "pull_required"],
            )?,
            credential_plugin_duration: on.histograms(
                "credential_provider_plugin_duration",
                "Seconds that a credential provider plugin took.",
                &["plugin_name"],
                DEFAULT_BUCKETS,
            )?,
            credential_plugin_errors: on.counters(
                "credential_provider_plugin_errors_total",
                "Credential provider plugins that could not be run or failed.",
                &["plugin_name"],
            )?,
            cgroup_manager_duration: on.histograms(
                "cgroup_manager_duration_seconds",
                "Seconds that an operation on a cgroup took.",
                &["operation_type"],
                DEFAULT_BUCKETS,
            )?,
            volume_metric_collection_duration: on.histograms(
                "volume_metric_collection_duration_seconds",
                "Seconds that measuring a volume took.",
                &["metric_source"],
                DEFAULT_BUCKETS,
            )?,
            node_name: on.gauges("node_name", "The node's name; the value is always 1.", &["node"])?,
            http_requests: on.counters("http_requests_total", "HTTP requests received.", &http)?,
            http_requests_duration: on.histograms(
                "http_requests_duration_seconds",
                "Seconds that answering an HTTP request took.",
                &http,
                DEFAULT_BUCKETS,
            )?,
            http_inflight: on.gauges("http_inflight_requests", "HTTP requests being answered.", &http)?,
            build_info: on.register(GaugeVec::new(
                Opts::new("kubernetes_build_info", "What was built, from what and for what; the value is always 1."),
                &[
                    "major",
                    "minor",
                    "git_version",
                    "git_commit",
                    "git_tree_state",
                    "build_date",
                    "go_version",
                    "compiler",
                    "platform",
                ],
            )?)?,
            feature_enabled: on.register(GaugeVec::new(
                Opts::new("kubernetes_feature_enabled", "Feature gates: 1 is on, 0 is off."),
                &["name", "stage"],
            )?)?,
            healthcheck: Definer(&health).register(GaugeVec::new(
                Opts::new("kubernetes_healthcheck", "The newest result of a health check: 1 is healthy."),
                &["name", "type"],
            )?)?,
            healthchecks: Definer(&health).register(CounterVec::new(
                Opts::new("kubernetes_healthchecks_total", "Results of health checks."),
                &["name", "type", "status"],
            )?)?,
            probe_total: Definer(&probes).register(CounterVec::new(
                Opts::new("prober_probe_total", "Tries of probes by how they ended."),
                &["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
            )?)?,
            probe_duration: Definer(&probes).register(HistogramVec::new(
                HistogramOpts::new("prober_probe_duration_seconds", "Seconds that a try of a probe took."),
                &["probe_type", "container", "pod", "namespace"],
            )?)?,
            probe_series: Default::default(),
            beside,
            resizes,
            managers,
            registry,
            health,
            probes,
        };
        for is_static in ["true", ""] {
            metrics.restarted_pods.with_label_values(&[is_static]);
        }
        count_registered(&metrics.registry)?;
        Ok(metrics)
    }
}
