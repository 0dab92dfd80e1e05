//! Metrics under the Go kubelet's names, types, labels and buckets, so that dashboards work unchanged.
//!
//! [`Metrics`] is made once and passed on as `Arc<Metrics>`; nothing here is global. Figures without labels are fields to
//! be used directly; those with labels have a method that allows only the label values Go uses.
//!
//! As with Go, a figure with labels appears on the page with its first value.

mod beside;
mod calls;
mod define;
mod managers;
mod process;
mod resize;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus::{Counter, CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramVec, Registry, TextEncoder};

pub use beside::{Beside, Labelled};
pub use calls::{admission_reason, image_size_bucket, operation_type};
pub use managers::{Managers, PodResourcesCall};
pub use resize::Resizes;

/// The metrics could not be set up: two figures share a name or a name is malformed.
#[derive(Debug, thiserror::Error)]
#[error("setting up the metrics registry")]
pub struct MetricsError(#[from] prometheus::Error);

/// The kind of a container in the `container_type` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerType {
    /// App containers.
    App,
    /// Init containers and sidecars.
    Init,
    /// Ephemeral containers.
    Ephemeral,
}

impl ContainerType {
    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::App => "container",
            Self::Init => "init_container",
            Self::Ephemeral => "ephemeral_container",
        }
    }
}

/// What a pod worker was at: the `operation_type` label of `kubelet_pod_worker_duration_seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOperation {
    /// First sync of a pod.
    Create,
    /// Sync after a change of its definition.
    Update,
    /// Any other sync.
    Sync,
    /// Terminating.
    Kill,
    /// Clean-up after the last container stopped.
    Terminated,
}

/// Pods that workers hold, counted for `kubelet_working_pods`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkingPods {
    /// In the desired set, static.
    pub desired_static: StateCounts,
    /// In the desired set, from the API server.
    pub desired: StateCounts,
    /// No longer desired, static.
    pub orphan_static: StateCounts,
    /// No longer desired, from the API server.
    pub orphan: StateCounts,
    /// Found in the runtime alone.
    pub runtime_only: StateCounts,
}

/// Pods by the state of their worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Syncing.
    pub sync: usize,
    /// Terminating.
    pub terminating: usize,
    /// Terminated.
    pub terminated: usize,
}

/// Containers in the runtime by state, for `kubelet_running_containers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerCounts {
    /// CONTAINER_CREATED.
    pub created: usize,
    /// CONTAINER_RUNNING.
    pub running: usize,
    /// CONTAINER_EXITED.
    pub exited: usize,
    /// CONTAINER_UNKNOWN.
    pub unknown: usize,
}

/// What was built, for `kubernetes_build_info`.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuildInfo<'a> {
    /// Kubernetes major version (`1`).
    pub major: &'a str,
    /// Kubernetes minor version (`36`).
    pub minor: &'a str,
    /// Version with a leading `v`.
    pub git_version: &'a str,
    /// Commit.
    pub git_commit: &'a str,
    /// `clean`, `dirty` or `archive`.
    pub git_tree_state: &'a str,
    /// RFC 3339.
    pub build_date: &'a str,
    /// Version of the language's tools; the label keeps Go's name.
    pub go_version: &'a str,
    /// Compiler (`rustc`).
    pub compiler: &'a str,
    /// `linux/amd64`.
    pub platform: &'a str,
}

/// Which probe of which container.
#[derive(Clone, Copy, Debug)]
pub struct ProbedContainer<'a> {
    /// `Liveness`, `Readiness` or `Startup`.
    pub probe_type: &'a str,
    /// The pod's namespace.
    pub namespace: &'a str,
    /// The pod's name.
    pub pod: &'a str,
    /// The pod's UID.
    pub uid: &'a str,
    /// The container's name.
    pub container: &'a str,
}

/// Every figure rubelet feeds. Durations are seconds.
pub struct Metrics {
    registry: Registry,
    health: Registry,
    probes: Registry,

    /// Seconds that a relist took.
    pub pleg_relist_duration: Histogram,
    /// Seconds between two relists.
    pub pleg_relist_interval: Histogram,
    /// Seconds that looking at one pod within a relist took.
    pub pleg_pod_relist_duration: Histogram,
    /// When PLEG was last seen active, seconds since the epoch.
    pub pleg_last_seen: Gauge,
    /// Pod events dropped because the channel was full.
    pub pleg_discard_events: Counter,
    /// Failed attempts to open the CRI event stream, or breaks of it.
    pub evented_pleg_connection_errors: Counter,
    /// Opened CRI event streams.
    pub evented_pleg_connections: Counter,
    /// Seconds from the runtime making a CRI event to rubelet receiving it.
    pub evented_pleg_latency: Histogram,
    /// Seconds from first seeing a pod to its worker beginning.
    pub pod_worker_start_duration: Histogram,
    /// Seconds from first seeing a pod to it running.
    pub pod_start_duration: Histogram,
    /// Seconds from a pod's creation to all its containers being seen started, without image pulls and init containers.
    pub pod_start_sli_duration: Histogram,
    /// Seconds from a pod's creation to all its containers being seen started.
    pub pod_start_total_duration: Histogram,
    /// App containers of a pod, seen each time that a worker is made for one.
    pub containers_per_pod: Histogram,
    /// Static pods that ought to have a mirror pod.
    pub mirror_pods: Gauge,
    /// Pods found in the runtime that no worker knew.
    pub orphaned_runtime_pods: Counter,
    /// Pods begun: one for each attempt to make a sandbox.
    pub started_pods: Counter,
    /// Attempts to make a sandbox that failed.
    pub started_pods_errors: Counter,
    /// Pods with a user namespace begun.
    pub started_user_namespaced_pods: Counter,
    /// Pods with a user namespace that failed to begin.
    pub started_user_namespaced_pods_errors: Counter,
    /// Ephemeral containers in the pods held.
    pub managed_ephemeral_containers: Gauge,
    /// Lifecycle hooks for which https was tried and http worked.
    pub lifecycle_http_fallbacks: Counter,
    /// Sleep hooks that were cut short.
    pub sleep_terminated_early: Counter,
    /// Pods whose left-over volumes the last clean-up removed.
    pub orphan_pod_cleaned_volumes: Gauge,
    /// Pods whose left-over volumes the last clean-up could not remove.
    pub orphan_pod_cleaned_volumes_errors: Gauge,
    /// 1 or 2.
    pub cgroup_version: Gauge,
    /// Image volumes asked for by containers being started.
    pub image_volume_requested: Counter,
    /// Image volumes mounted.
    pub image_volume_mounted: Counter,
    /// Image volumes that failed to mount.
    pub image_volume_errors: Counter,
    /// What is not the kubelet's own.
    pub beside: Beside,
    /// In-place resizes.
    pub resizes: Resizes,
    /// Devices, CPUs and memory of containers.
    pub managers: Managers,

    runtime_operations: CounterVec,
    runtime_operations_errors: CounterVec,
    runtime_operations_duration: HistogramVec,
    run_podsandbox_duration: HistogramVec,
    run_podsandbox_errors: CounterVec,
    pod_worker_duration: HistogramVec,
    running_pods: Gauge,
    running_containers: GaugeVec,
    desired_pods: GaugeVec,
    active_pods: GaugeVec,
    working_pods: GaugeVec,
    restarted_pods: CounterVec,
    cri_losing_support: GaugeVec,
    started_containers: CounterVec,
    started_containers_errors: CounterVec,
    terminated_containers: CounterVec,
    admission_rejections: CounterVec,
    evictions: CounterVec,
    eviction_stats_age: HistogramVec,
    preemptions: CounterVec,
    memory_min: GaugeVec,
    memory_low: GaugeVec,
    shutdown_start: Gauge,
    shutdown_end: Gauge,
    images_collected: CounterVec,
    image_pull_duration: HistogramVec,
    ensure_image_requests: CounterVec,
    credential_plugin_duration: HistogramVec,
    credential_plugin_errors: CounterVec,
    cgroup_manager_duration: HistogramVec,
    volume_metric_collection_duration: HistogramVec,
    node_name: GaugeVec,
    build_info: GaugeVec,
    feature_enabled: GaugeVec,
    http_requests: CounterVec,
    http_requests_duration: HistogramVec,
    http_inflight: GaugeVec,
    healthcheck: GaugeVec,
    healthchecks: CounterVec,
    probe_total: CounterVec,
    probe_duration: HistogramVec,
    probe_series: Mutex<HashMap<String, BTreeSet<[String; 4]>>>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Content-Type of [`Metrics::encode`].
    pub const CONTENT_TYPE: &'static str = "text/plain; version=0.0.4; charset=utf-8";

    /// The text of `/metrics`, format 0.0.4.
    pub fn encode(&self) -> Result<String, MetricsError> {
        encode(&self.registry)
    }

    /// The text of `/metrics/slis`: results of the health checks.
    pub fn encode_slis(&self) -> Result<String, MetricsError> {
        encode(&self.health)
    }

    /// The text of `/metrics/probes`.
    pub fn encode_probes(&self) -> Result<String, MetricsError> {
        encode(&self.probes)
    }

    /// One try of a probe (`Liveness`, `Readiness`, `Startup`) and how it ended; None: it could not be made.
    pub fn probed(&self, probe: ProbedContainer<'_>, result: Option<bool>, took: Duration) {
        let ProbedContainer { probe_type, namespace, pod, uid, container } = probe;
        let word = match result {
            Some(true) => "successful",
            Some(false) => "failed",
            None => "unknown",
        };
        self.probe_total.with_label_values(&[probe_type, word, container, pod, namespace, uid]).inc();
        // As in Go, a failure has no duration.
        if result != Some(false) {
            self.probe_duration.with_label_values(&[probe_type, container, pod, namespace]).observe(took.as_secs_f64());
        }
        let mut series = self.probe_series.lock().unwrap_or_else(PoisonError::into_inner);
        let of_pod = series.entry(uid.to_owned()).or_default();
        let key = [probe_type, container, pod, namespace];
        if !of_pod.iter().any(|known| known == &key) {
            of_pod.insert(key.map(str::to_owned));
        }
    }

    /// The pod is gone: its probes are no longer shown.
    pub fn forget_probes(&self, uid: &str) {
        let gone = self.probe_series.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
        for [probe_type, container, pod, namespace] in gone.into_iter().flatten() {
            for word in ["successful", "failed", "unknown"] {
                let _ =
                    self.probe_total.remove_label_values(&[&*probe_type, word, &*container, &*pod, &*namespace, uid]);
            }
            let _ = self.probe_duration.remove_label_values(&[&*probe_type, &*container, &*pod, &*namespace]);
        }
    }

    /// A pod was evicted for the sake of this signal (`memory.available`, `emptydirfs.limit`, …).
    pub fn evicted(&self, signal: &str) {
        self.evictions.with_label_values(&[signal]).inc();
    }

    /// How old the figures were by which a pod was chosen for eviction.
    pub fn eviction_stats_age(&self, signal: &str, age: Duration) {
        self.eviction_stats_age.with_label_values(&[signal]).observe(age.as_secs_f64());
    }

    /// A pod had to make room for a critical one that lacked this resource.
    pub fn preempted(&self, resource: &str) {
        self.preemptions.with_label_values(&[resource]).inc();
    }

    /// One CRI call, named as in the API (`RunPodSandbox`), its duration and whether it failed.
    pub fn runtime_operation(&self, call: &str, took: Duration, failed: bool) {
        let operation = [operation_type(call)];
        self.runtime_operations.with_label_values(&operation).inc();
        self.runtime_operations_duration.with_label_values(&operation).observe(took.as_secs_f64());
        if failed {
            self.runtime_operations_errors.with_label_values(&operation).inc();
        }
    }

    /// One RunPodSandbox call by its runtime handler, besides [`Metrics::runtime_operation`].
    pub fn run_podsandbox(&self, runtime_handler: &str, took: Duration, failed: bool) {
        self.run_podsandbox_duration.with_label_values(&[runtime_handler]).observe(took.as_secs_f64());
        if failed {
            self.run_podsandbox_errors.with_label_values(&[runtime_handler]).inc();
        }
    }

    /// One run of a pod worker.
    pub fn pod_worker(&self, operation: WorkerOperation, took: Duration) {
        let label = match operation {
            WorkerOperation::Create => "create",
            WorkerOperation::Update => "update",
            WorkerOperation::Sync => "sync",
            WorkerOperation::Kill => "kill",
            WorkerOperation::Terminated => "terminated",
        };
        self.pod_worker_duration.with_label_values(&[label]).observe(took.as_secs_f64());
    }

    /// What the newest relist saw: pods with a running sandbox, and containers by state.
    pub fn running(&self, pods: usize, containers: ContainerCounts) {
        self.running_pods.set(pods as f64);
        let ContainerCounts { created, running, exited, unknown } = containers;
        for (state, count) in [("created", created), ("running", running), ("exited", exited), ("unknown", unknown)] {
            self.running_containers.with_label_values(&[state]).set(count as f64);
        }
    }

    /// Pods that rubelet is told to run.
    pub fn desired_pods(&self, static_pods: usize, api_pods: usize) {
        set_static(&self.desired_pods, static_pods, api_pods);
    }

    /// Pods counted when a new one is admitted.
    pub fn active_pods(&self, static_pods: usize, api_pods: usize) {
        set_static(&self.active_pods, static_pods, api_pods);
    }

    /// Pods that workers hold.
    pub fn working_pods(&self, pods: &WorkingPods) {
        for (counts, config, is_static) in [
            (&pods.desired_static, "desired", "true"),
            (&pods.desired, "desired", ""),
            (&pods.orphan_static, "orphan", "true"),
            (&pods.orphan, "orphan", ""),
            (&pods.runtime_only, "runtime_only", "unknown"),
        ] {
            for (lifecycle, count) in
                [("sync", counts.sync), ("terminating", counts.terminating), ("terminated", counts.terminated)]
            {
                self.working_pods.with_label_values(&[lifecycle, config, is_static]).set(count as f64);
            }
        }
    }

    /// A pod deleted and made again under the same UID.
    pub fn pod_restarted(&self, is_static: bool) {
        self.restarted_pods.with_label_values(&[static_label(is_static)]).inc();
    }

    /// The runtime does not know RuntimeConfig (KEP-4033): from this Kubernetes version on it cannot be used.
    pub fn runtime_loses_support(&self, version: &str) {
        self.cri_losing_support.with_label_values(&[version]).set(1.0);
    }

    /// A container's start was begun.
    pub fn container_started(&self, kind: ContainerType) {
        self.started_containers.with_label_values(&[kind.label()]).inc();
    }

    /// A container's start failed; `code` is the waiting reason (`ErrImagePull`, `CreateContainerError`, …).
    pub fn container_start_failed(&self, kind: ContainerType, code: &str) {
        self.started_containers_errors.with_label_values(&[kind.label(), code]).inc();
    }

    /// A container was seen terminated for the first time; `reason` is its status' reason.
    pub fn container_terminated(&self, kind: ContainerType, exit_code: i32, reason: &str) {
        self.terminated_containers.with_label_values(&[kind.label(), &exit_code.to_string(), reason]).inc();
    }

    /// A pod was refused at admission, with its status' reason.
    pub fn admission_rejected(&self, reason: &str) {
        self.admission_rejections.with_label_values(&[admission_reason(reason)]).inc();
    }

    /// Memory in bytes that is protected for Guaranteed and for Burstable pods; only with gate MemoryQoS is it ever said.
    pub fn memory_protected(&self, guaranteed: i64, burstable: i64) {
        self.memory_min.with_label_values::<&str>(&[]).set(guaranteed as f64);
        self.memory_low.with_label_values::<&str>(&[]).set(burstable as f64);
    }

    /// When the node's last graceful shutdown began and ended, in seconds since the epoch; 0: not yet.
    pub fn graceful_shutdown(&self, start: i64, end: i64) {
        self.shutdown_start.set(start as f64);
        self.shutdown_end.set(end as f64);
    }

    /// Counts an image that garbage collection removed: for its age, or for space.
    pub fn image_collected(&self, for_age: bool) {
        self.images_collected.with_label_values(&[if for_age { "age" } else { "space" }]).inc();
    }

    /// An image was pulled: its size in bytes (0: not known), and the time including the wait for a free puller.
    pub fn image_pulled(&self, size: u64, took: Duration) {
        self.image_pull_duration.with_label_values(&[image_size_bucket(size)]).observe(took.as_secs_f64());
    }

    /// A credential provider plugin has run.
    pub fn credential_plugin(&self, name: &str, took: Duration, failed: bool) {
        self.credential_plugin_duration.with_label_values(&[name]).observe(took.as_secs_f64());
        if failed {
            self.credential_plugin_errors.with_label_values(&[name]).inc();
        }
    }

    /// A container's image was asked for: its imagePullPolicy, whether it was present, and whether a pull was needed;
    /// `None` when the request failed before that was known.
    pub fn ensure_image(&self, pull_policy: &str, present: Option<bool>, pull_required: Option<bool>) {
        let label = |value: Option<bool>| value.map_or("unknown", |value| if value { "true" } else { "false" });
        self.ensure_image_requests
            .with_label_values(&[pull_policy.to_ascii_lowercase().as_str(), label(present), label(pull_required)])
            .inc();
    }

    /// One operation on a pod's cgroup: `create`, `update` or `destroy`.
    pub fn cgroup_operation(&self, operation: &'static str, took: Duration) {
        self.cgroup_manager_duration.with_label_values(&[operation]).observe(took.as_secs_f64());
    }

    /// What a volume takes was measured, by `du` (a walk), `statfs`, or the driver of this name.
    pub fn volume_measured(&self, source: &str, took: Duration) {
        self.volume_metric_collection_duration.with_label_values(&[source]).observe(took.as_secs_f64());
    }

    /// The node's name; once, at start.
    pub fn set_node_name(&self, node: &str) {
        self.node_name.reset();
        self.node_name.with_label_values(&[node]).set(1.0);
    }

    /// What was built; once, at start.
    pub fn set_build_info(&self, info: BuildInfo<'_>) {
        let BuildInfo {
            major,
            minor,
            git_version,
            git_commit,
            git_tree_state,
            build_date,
            go_version,
            compiler,
            platform,
        } = info;
        self.build_info
            .with_label_values(&[
                major,
                minor,
                git_version,
                git_commit,
                git_tree_state,
                build_date,
                go_version,
                compiler,
                platform,
            ])
            .set(1.0);
    }

    /// A feature gate: stage is `ALPHA`, `BETA`, `DEPRECATED` or, for GA, empty.
    pub fn set_feature(&self, name: &str, stage: &str, enabled: bool) {
        self.feature_enabled.with_label_values(&[name, stage]).set(f64::from(u8::from(enabled)));
    }

    /// Counts an HTTP request from now until the value it returns is dropped. `method` and `path` must already be taken
    /// from a closed set.
    pub fn http_request(
        &self,
        method: &'static str,
        path: &'static str,
        server_type: &'static str,
        long_running: bool,
    ) -> HttpRequest {
        let labels = [method, path, server_type, if long_running { "true" } else { "false" }];
        self.http_requests.with_label_values(&labels).inc();
        let inflight = self.http_inflight.with_label_values(&labels);
        inflight.inc();
        HttpRequest {
            inflight,
            duration: self.http_requests_duration.with_label_values(&labels),
            started: std::time::Instant::now(),
        }
    }

    /// The result of one health check of `/healthz`.
    pub fn health_check(&self, name: &'static str, healthy: bool) {
        self.healthcheck.with_label_values(&[name, "healthz"]).set(f64::from(u8::from(healthy)));
        let status = if healthy { "success" } else { "error" };
        self.healthchecks.with_label_values(&[name, "healthz", status]).inc();
    }
}

/// A running HTTP request; dropping it ends it.
pub struct HttpRequest {
    inflight: Gauge,
    duration: Histogram,
    started: std::time::Instant,
}

impl Drop for HttpRequest {
    fn drop(&mut self) {
        self.inflight.dec();
        self.duration.observe(self.started.elapsed().as_secs_f64());
    }
}

fn encode(registry: &Registry) -> Result<String, MetricsError> {
    let mut text = Vec::with_capacity(64 * 1024);
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    // The encoder writes only what came from `String`s.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn static_label(is_static: bool) -> &'static str {
    if is_static { "true" } else { "" }
}

fn set_static(gauge: &GaugeVec, static_pods: usize, api_pods: usize) {
    gauge.with_label_values(&[static_label(true)]).set(static_pods as f64);
    gauge.with_label_values(&[static_label(false)]).set(api_pods as f64);
}

#[cfg(test)]
mod tests;
