//! Figures beside the kubelet's own: requests to the API server, volumes, what the Go kubelet's libraries count, and what belongs to parts that
//! never do anything here.

use std::time::Duration;

use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, Opts, Registry, exponential_buckets,
};

/// What never happens here, and so stays 0: these parts are not there, or not built so that it could happen.
const IDLE_COUNTERS: [(&str, &str); 20] = [
    // Libraries of the API server that the Go kubelet has linked in.
    ("aggregator_discovery_aggregation_count_total", "Aggregations of discovery; there are none here."),
    ("aggregator_discovery_nopeer_requests_total", "Discovery without peers; there is none here."),
    ("aggregator_discovery_peer_aggregated_cache_hits_total", "Discovery of peers; there is none here."),
    ("aggregator_discovery_peer_aggregated_cache_misses_total", "Discovery of peers; there is none here."),
    ("apiserver_audit_event_total", "Audit events; there are none here."),
    ("apiserver_audit_requests_rejected_total", "Requests refused for want of auditing; there are none here."),
    ("apiserver_storage_data_key_generation_failures_total", "Failed data keys; nothing is stored encrypted here."),
    ("apiserver_storage_envelope_transformation_cache_misses_total", "Misses of data keys; there are none here."),
    ("apiserver_validation_declarative_validation_mismatch_total", "Mismatches of validations; there are none here."),
    ("apiserver_validation_declarative_validation_panic_total", "Panics of validations; there are none here."),
    ("apiserver_validation_duplicate_validation_error_total", "Doubled errors of validations; there are none here."),
    ("apiserver_webhooks_x509_insecure_sha1_total", "Webhooks with SHA-1 certificates; such are refused."),
    ("apiserver_webhooks_x509_missing_san_total", "Webhooks without SAN in their certificates; such are refused."),
    ("cardinality_enforcement_unexpected_categorizations_total", "Label values outside of a list; no list is set."),
    ("disabled_metrics_total", "Metrics that are switched off; none can be."),
    ("hidden_metrics_total", "Metrics that are hidden; none are."),
    ("force_cleaned_failed_volume_operation_errors_total", "Failed clean-ups of volumes that were not rebuilt."),
    ("force_cleaned_failed_volume_operations_total", "Clean-ups of volumes that were not rebuilt."),
    ("kubelet_pod_watch_events_dropped_total", "Events about pods dropped before they were looked at; none ever are."),
    ("rest_client_transport_cert_rotation_gc_calls_total", "Removals of transports; the one stays."),
];
const IDLE_COUNTERS_OF_MANAGERS: [(&str, &str); 2] = [
    ("reconstruct_volume_operations_errors_total", "Failures to rebuild a volume's state from its directory."),
    ("reconstruct_volume_operations_total", "Volumes' states rebuilt from their directories; the state is not lost."),
];
const IDLE_GAUGES: [(&str, &str); 3] = [
    ("apiserver_envelope_encryption_dek_cache_fill_percent", "Data keys kept; there are none here."),
    ("kubelet_imagemanager_inmemory_pulledrecords_usage_percent", "Records of pulls kept in memory; none are."),
    ("kubelet_imagemanager_inmemory_pullintents_usage_percent", "Begun pulls kept in memory; none are."),
];

/// See the module.
#[derive(Debug)]
pub struct Beside {
    /// Records of pulled images on the disk.
    pub pulled_records: Gauge,
    /// Pulls begun, on the disk.
    pub pull_intents: Gauge,
    /// Seconds from a pod's status changing to the API server having taken it.
    pub pod_status_sync_duration: Histogram,
    /// Seconds that the first pod with a network of its own took to start, as `pod_start_sli_duration` counts.
    pub first_network_pod_start: Gauge,
    /// Seconds from the start of the system to the node being Ready.
    pub node_startup: Gauge,
    /// Of these: to this process.
    pub node_startup_pre_kubelet: Gauge,
    /// From there to the first attempt to register the node.
    pub node_startup_pre_registration: Gauge,
    /// The registration.
    pub node_startup_registration: Gauge,
    /// From there to the node being Ready.
    pub node_startup_post_registration: Gauge,
    client_certificates: Histogram,
    authz_requests: CounterVec,
    authz_duration: HistogramVec,
    must_pull_checks: CounterVec,
    websockets: CounterVec,
    requests: CounterVec,
    request_duration: HistogramVec,
    request_size: HistogramVec,
    response_size: HistogramVec,
    rate_limiter_duration: HistogramVec,
    transports: CounterVec,
    transport_entries: Gauge,
    storage_operations: HistogramVec,
    csi_operations: HistogramVec,
    volume_operations: HistogramVec,
    volumes: GaugeVec,
    /// Of SELinux labels: admitted; pods' mismatches refused and not; volumes' mismatches refused and not.
    selinux: [GaugeVec; 5],
}

/// What came of the SELinux label of a pod's volume, with the names of its plugin (`kubernetes.io/csi/DRIVER`) and of its widest access mode
/// (`RWOP`); the last of mismatches: the pod was refused for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labelled<'a> {
    /// The label is clear.
    Admitted(&'a str, &'static str),
    /// The pod's containers want different labels.
    PodMismatch(&'static str, bool),
    /// Other pods have it with another label.
    VolumeMismatch(&'a str, &'static str, bool),
}

const STORAGE_BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];
const REQUEST_BUCKETS: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
const SIZE_BUCKETS: &[f64] =
    &[64.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0];
const STATUS_BUCKETS: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
const HOUR: f64 = 3600.0;
const DAY: f64 = 24.0 * HOUR;
const EXPIRY_BUCKETS: &[f64] = &[
    0.0,
    HOUR / 2.0,
    HOUR,
    2.0 * HOUR,
    6.0 * HOUR,
    12.0 * HOUR,
    DAY,
    2.0 * DAY,
    4.0 * DAY,
    7.0 * DAY,
    30.0 * DAY,
    90.0 * DAY,
    180.0 * DAY,
    360.0 * DAY,
];
const ROTATION_BUCKETS: &[f64] = &[
    HOUR / 6.0,
    HOUR / 2.0,
    HOUR,
    4.0 * HOUR,
    DAY,
    7.0 * DAY,
    30.0 * DAY,
    90.0 * DAY,
    180.0 * DAY,
    360.0 * DAY,
    1440.0 * DAY,
];

/// A metric that is registered in this registry.
struct On<'a>(&'a Registry);

impl On<'_> {
    fn put<C: prometheus::core::Collector + Clone + 'static>(&self, metric: C) -> prometheus::Result<C> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        self.put(Gauge::with_opts(Opts::new(name, help))?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        self.put(GaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<CounterVec> {
        self.put(CounterVec::new(Opts::new(name, help), labels)?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        self.put(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?)
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> prometheus::Result<HistogramVec> {
        self.put(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?)
    }
}

impl Beside {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let on = On(registry);
        for (name, help) in IDLE_COUNTERS.iter().chain(&IDLE_COUNTERS_OF_MANAGERS) {
            on.put(Counter::with_opts(Opts::new(*name, *help))?)?;
        }
        for (name, help) in IDLE_GAUGES {
            on.gauge(name, help)?;
        }
        on.histogram(
            "apiserver_storage_data_key_generation_duration_seconds",
            "Seconds that making a data key took; there are none here.",
            &exponential_buckets(5e-6, 2.0, 14)?,
        )?;
        on.histogram(
            "rest_client_exec_plugin_certificate_rotation_age",
            "Age of credential plugins' certificates when they were replaced, seconds.",
            ROTATION_BUCKETS,
        )?;
        on.gauge(
            "rest_client_exec_plugin_ttl_seconds",
            "Seconds until the end of credential plugins' certificates; without any: +Inf.",
        )?
        .set(f64::INFINITY);
        on.gauges("kubelet_metrics_provider", "By whose rules pods are measured; always 1.", &["provider"])?
            .with_label_values(&["cadvisor"])
            .set(1.0);
        let by_request = ["verb", "host"];
        let startup = |name: &str, help: &str| on.gauge(&format!("kubelet_node_startup_{name}duration_seconds"), help);
        Ok(Self {
            pulled_records: on.gauge("kubelet_imagemanager_ondisk_pulledrecords", "Records of pulls on the disk.")?,
            pull_intents: on.gauge("kubelet_imagemanager_ondisk_pullintents", "Begun pulls on the disk.")?,
            pod_status_sync_duration: on.histogram(
                "kubelet_pod_status_sync_duration_seconds",
                "Seconds from a change of a pod's status to the API server having taken it.",
                STATUS_BUCKETS,
            )?,
            first_network_pod_start: on.gauge(
                "kubelet_first_network_pod_start_sli_duration_seconds",
                "Seconds that the first pod with a network of its own took to start, without image pulls.",
            )?,
            node_startup: startup("", "Seconds from the start of the system to the node being Ready.")?,
            node_startup_pre_kubelet: startup("pre_kubelet_", "Seconds from the start of the system to this process.")?,
            node_startup_pre_registration: startup(
                "pre_registration_",
                "Seconds from the start of this process to the first attempt to register the node.",
            )?,
            node_startup_registration: startup("registration_", "Seconds that registering the node took.")?,
            node_startup_post_registration: startup(
                "post_registration_",
                "Seconds from the node's registration to it being Ready.",
            )?,
            client_certificates: on.histogram(
                "apiserver_client_certificate_expiration_seconds",
                "Seconds that callers' certificates were still valid.",
                EXPIRY_BUCKETS,
            )?,
            authz_requests: on.counters(
                "apiserver_delegated_authz_request_total",
                "Questions to the API server whether a caller may.",
                &["code"],
            )?,
            authz_duration: on.histograms(
                "apiserver_delegated_authz_request_duration_seconds",
                "Seconds that they took.",
                &["code"],
                &[0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 5.0, 10.0],
            )?,
            must_pull_checks: on.counters(
                "kubelet_imagemanager_image_mustpull_checks_total",
                "Checks whether a pod may use an image that is there, by result.",
                &["result"],
            )?,
            websockets: on.counters(
                "kubelet_websocket_streaming_requests_total",
                "Sessions that came by WebSocket and were translated here.",
                &["subresource"],
            )?,
            requests: on.counters(
                "rest_client_requests_total",
                "Requests to the API server.",
                &["code", "method", "host"],
            )?,
            request_duration: on.histograms(
                "rest_client_request_duration_seconds",
                "Seconds until the API server's answer began.",
                &by_request,
                REQUEST_BUCKETS,
            )?,
            request_size: on.histograms(
                "rest_client_request_size_bytes",
                "Bytes of requests' bodies.",
                &by_request,
                SIZE_BUCKETS,
            )?,
            response_size: on.histograms(
                "rest_client_response_size_bytes",
                "Bytes of answers' bodies.",
                &by_request,
                SIZE_BUCKETS,
            )?,
            rate_limiter_duration: on.histograms(
                "rest_client_rate_limiter_duration_seconds",
                "Seconds that requests were held back by the rate limit.",
                &by_request,
                REQUEST_BUCKETS,
            )?,
            transports: on.counters(
                "rest_client_transport_create_calls_total",
                "Transports to the API server by where they came from.",
                &["result"],
            )?,
            transport_entries: on.gauge("rest_client_transport_cache_entries", "Transports to the API server.")?,
            storage_operations: on.histograms(
                "storage_operation_duration_seconds",
                "Seconds that an operation on a pod's volumes took.",
                &["volume_plugin", "operation_name", "status", "migrated"],
                STORAGE_BUCKETS,
            )?,
            csi_operations: on.histograms(
                "csi_operations_seconds",
                "Seconds that a call to a CSI driver took.",
                &["driver_name", "method_name", "grpc_status_code", "migrated"],
                STORAGE_BUCKETS,
            )?,
            volume_operations: on.histograms(
                "volume_operation_total_seconds",
                "Seconds from the beginning to the success of an operation on a pod's volumes.",
                &["plugin_name", "operation_name"],
                STORAGE_BUCKETS,
            )?,
            volumes: on.gauges(
                "volume_manager_total_volumes",
                "Volumes of the node's pods.",
                &["plugin_name", "state"],
            )?,
            // Those of containers (`volume_manager_selinux_container_*`) are of labels that cannot be put together: none such is asked for.
            selinux: [
                on.gauges(
                    "volume_manager_selinux_volumes_admitted_total",
                    "Volumes whose SELinux label is clear.",
                    &["volume_plugin", "access_mode"],
                )?,
                on.gauges(
                    "volume_manager_selinux_pod_context_mismatch_errors_total",
                    "Tries of pods that were refused for containers that want different SELinux labels of a volume.",
                    &["access_mode"],
                )?,
                on.gauges(
                    "volume_manager_selinux_pod_context_mismatch_warnings_total",
                    "Pods whose containers want different SELinux labels of a volume that is mounted without.",
                    &["access_mode"],
                )?,
                on.gauges(
                    "volume_manager_selinux_volume_context_mismatch_errors_total",
                    "Tries of pods that were refused for a volume that others have with another SELinux label.",
                    &["volume_plugin", "access_mode"],
                )?,
                on.gauges(
                    "volume_manager_selinux_volume_context_mismatch_warnings_total",
                    "Pods that want another SELinux label than others of a volume that is mounted without.",
                    &["volume_plugin", "access_mode"],
                )?,
            ],
        })
    }

    /// A request to the API server; `code` 0: there was no answer. A duration of None: the answer's head did not come.
    pub fn api_request(&self, method: &str, host: &str, code: u16, took: Duration, bytes: usize) {
        let code = if code == 0 { "<error>".to_owned() } else { code.to_string() };
        self.requests.with_label_values(&[code.as_str(), method, host]).inc();
        self.request_duration.with_label_values(&[method, host]).observe(took.as_secs_f64());
        self.request_size.with_label_values(&[method, host]).observe(bytes as f64);
    }

    /// A session by WebSocket is translated: `exec`, `attach` or `portforward`.
    pub fn websocket_translated(&self, subresource: &'static str) {
        self.websockets.with_label_values(&[subresource]).inc();
    }

    /// The body of an answer of the API server.
    pub fn api_answer(&self, method: &str, host: &str, bytes: usize) {
        self.response_size.with_label_values(&[method, host]).observe(bytes as f64);
    }

    /// A request waited so long for its turn.
    pub fn api_request_held(&self, method: &str, host: &str, waited: Duration) {
        self.rate_limiter_duration.with_label_values(&[method, host]).observe(waited.as_secs_f64());
    }

    /// A transport to the API server was made.
    pub fn transport_made(&self) {
        self.transports.with_label_values(&["miss"]).inc();
        self.transport_entries.inc();
    }

    /// A caller showed a certificate that is valid for so many more seconds.
    pub fn client_certificate(&self, seconds: f64) {
        self.client_certificates.observe(seconds);
    }

    /// The API server was asked whether a caller may, and answered or did not.
    pub fn delegated_authz(&self, answered: bool, took: Duration) {
        let code = if answered { "201" } else { "<error>" };
        self.authz_requests.with_label_values(&[code]).inc();
        self.authz_duration.with_label_values(&[code]).observe(took.as_secs_f64());
    }

    /// Whether a pod may use an image that is there: `credentialPolicyAllowed`, `credentialRecordFound`, `mustAuthenticate` or `error`.
    pub fn must_pull_check(&self, result: &'static str) {
        self.must_pull_checks.with_label_values(&[result]).inc();
    }

    /// A volume of this plugin (`kubernetes.io/configmap`) was made ready, or was not; in one step with all volumes of its pod.
    pub fn volume_mounted(&self, plugin: &str, took: Duration, failed: bool) {
        let status = if failed { "fail-unknown" } else { "success" };
        self.storage_operations
            .with_label_values(&[plugin, "volume_mount", status, "false"])
            .observe(took.as_secs_f64());
        if !failed {
            self.volume_operations.with_label_values(&[plugin, "overall_volume_mount"]).observe(took.as_secs_f64());
        }
    }

    /// A call to a CSI driver, with the code that gRPC gives.
    pub fn csi_call(&self, driver: &str, method: &str, code: &str, took: Duration) {
        self.csi_operations.with_label_values(&[driver, method, code, "false"]).observe(took.as_secs_f64());
    }

    /// Counts what came of a volume's SELinux label.
    pub fn selinux(&self, labelled: Labelled<'_>) {
        let [admitted, pod_errors, pod_warnings, errors, warnings] = &self.selinux;
        match labelled {
            Labelled::Admitted(plugin, mode) => admitted.with_label_values(&[plugin, mode]).inc(),
            Labelled::PodMismatch(mode, true) => pod_errors.with_label_values(&[mode]).inc(),
            Labelled::PodMismatch(mode, false) => pod_warnings.with_label_values(&[mode]).inc(),
            Labelled::VolumeMismatch(plugin, mode, true) => errors.with_label_values(&[plugin, mode]).inc(),
            Labelled::VolumeMismatch(plugin, mode, false) => warnings.with_label_values(&[plugin, mode]).inc(),
        }
    }

    /// Volumes by plugin: those that pods ask for, and those that are there.
    pub fn volumes<'a>(&self, counts: impl Iterator<Item = (&'a str, usize, usize)>) {
        self.volumes.reset();
        for (plugin, desired, actual) in counts {
            self.volumes.with_label_values(&[plugin, "desired_state_of_world"]).set(desired as f64);
            self.volumes.with_label_values(&[plugin, "actual_state_of_world"]).set(actual as f64);
        }
    }
}

/// Counts what is registered, by the stability that Go gives metrics: here all may change.
pub(super) fn count_registered(registry: &Registry) -> prometheus::Result<()> {
    let registered = CounterVec::new(
        Opts::new("registered_metrics_total", "Metrics on this page that are there without any label."),
        &["stability_level", "deprecated_version"],
    )?;
    registry.register(Box::new(registered.clone()))?;
    registered.with_label_values(&["ALPHA", ""]).inc_by(registry.gather().len() as f64);
    Ok(())
}
