//! Figures of the managers of devices, CPUs, memory and topology, of the pod-resources socket, and of resource claims.

use std::time::Duration;

use prometheus::{
    Counter, CounterVec, DEFAULT_BUCKETS, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, Opts, Registry,
    exponential_buckets,
};

/// A call to the pod-resources socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodResourcesCall {
    /// List.
    List,
    /// Get.
    Get,
    /// GetAllocatableResources.
    GetAllocatable,
}

/// See the module.
#[derive(Debug)]
pub struct Managers {
    /// Containers that were to get CPUs of their own.
    pub cpu_pinning_requests: Counter,
    /// Failures to give a container CPUs of its own.
    pub cpu_pinning_errors: Counter,
    /// CPUs that belong to one container.
    pub exclusive_cpus: Gauge,
    /// The shared pool, in thousandths of a CPU.
    pub shared_pool_milli: Gauge,
    /// Containers that were to get memory of their own.
    pub memory_pinning_requests: Counter,
    /// Failures to give a container memory of its own.
    pub memory_pinning_errors: Counter,
    /// Pods whose resources were to be placed.
    pub topology_requests: Counter,
    /// Pods refused for the places of their resources.
    pub topology_errors: Counter,
    /// Milliseconds that placing a pod's resources took.
    pub topology_duration: Histogram,
    cpus_per_numa: GaugeVec,
    aligned: CounterVec,
    not_aligned: CounterVec,
    device_registrations: CounterVec,
    device_allocation: HistogramVec,
    pod_resources: CounterVec,
    pod_resources_calls: [CounterVec; 3],
    pod_resources_errors: [CounterVec; 3],
    claims_in_use: GaugeVec,
    claim_operations: HistogramVec,
    claim_calls: HistogramVec,
}

impl Managers {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| -> prometheus::Result<Counter> {
            let made = Counter::with_opts(Opts::new(name, help).subsystem("kubelet"))?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let counters = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<CounterVec> {
            let made = CounterVec::new(Opts::new(name, help).subsystem("kubelet"), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<Gauge> {
            let made = Gauge::with_opts(Opts::new(name, help).subsystem("kubelet"))?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let gauges = |subsystem: &str, name: &str, help: &str, labels: &[&str]| -> prometheus::Result<GaugeVec> {
            let made = GaugeVec::new(Opts::new(name, help).subsystem(subsystem), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let histograms = |subsystem: &str, name: &str, help: &str, labels: &[&str], buckets: Vec<f64>| {
            let opts = HistogramOpts::new(name, help).subsystem(subsystem).buckets(buckets);
            let made = HistogramVec::new(opts, labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok::<_, prometheus::Error>(made)
        };
        let topology_duration = Histogram::with_opts(
            HistogramOpts::new(
                "topology_manager_admission_duration_ms",
                "Milliseconds that placing a pod's resources took.",
            )
            .subsystem("kubelet")
            .buckets(exponential_buckets(0.05, 2.0, 15)?),
        )?;
        registry.register(Box::new(topology_duration.clone()))?;
        // 15 bounds from 0.1 s to 40 s, each the same factor from the one before.
        let claims: Vec<f64> = (0..15).map(|i| 0.1 * 400f64.powf(f64::from(i) / 14.0)).collect();
        let version = ["server_api_version"];
        let calls = ["list", "get", "get_allocatable"];
        let of_calls = |what: &str, help: &str| -> prometheus::Result<[CounterVec; 3]> {
            let one = |call: &str| counters(&format!("pod_resources_endpoint_{what}_{call}"), help, &version);
            Ok([one(calls[0])?, one(calls[1])?, one(calls[2])?])
        };
        let boundary = ["scope", "boundary"];
        let claims_in_use =
            gauges("dra", "resource_claims_in_use", "Resource claims in use by driver.", &["driver_name"])?;
        claims_in_use.with_label_values(&["<any>"]).set(0.0);
        Ok(Self {
            cpu_pinning_requests: counter(
                "cpu_manager_pinning_requests_total",
                "Containers that were to get CPUs of their own.",
            )?,
            cpu_pinning_errors: counter(
                "cpu_manager_pinning_errors_total",
                "Failures to give a container CPUs of its own.",
            )?,
            exclusive_cpus: gauge("cpu_manager_exclusive_cpu_allocation_count", "CPUs that belong to one container.")?,
            shared_pool_milli: gauge(
                "cpu_manager_shared_pool_size_millicores",
                "CPUs in the shared pool of the CPU manager's static policy.",
            )?,
            memory_pinning_requests: counter(
                "memory_manager_pinning_requests_total",
                "Containers that were to get memory of their own.",
            )?,
            memory_pinning_errors: counter(
                "memory_manager_pinning_errors_total",
                "Failures to give a container memory of its own.",
            )?,
            topology_requests: counter(
                "topology_manager_admission_requests_total",
                "Pods whose resources were to be placed.",
            )?,
            topology_errors: counter(
                "topology_manager_admission_errors_total",
                "Pods refused for the places of their resources.",
            )?,
            topology_duration,
            cpus_per_numa: gauges(
                "kubelet",
                "cpu_manager_allocation_per_numa",
                "CPUs that belong to one container, by NUMA node.",
                &["numa_node"],
            )?,
            aligned: counters(
                "container_aligned_compute_resources_count",
                "Allocations of aligned resources.",
                &boundary,
            )?,
            not_aligned: counters(
                "container_aligned_compute_resources_failure_count",
                "Allocations that could not be aligned.",
                &boundary,
            )?,
            device_registrations: counters(
                "device_plugin_registration_total",
                "Registrations of device plugins.",
                &["resource_name"],
            )?,
            device_allocation: histograms(
                "kubelet",
                "device_plugin_alloc_duration_seconds",
                "Seconds that device plugins took to allocate.",
                &["resource_name"],
                DEFAULT_BUCKETS.to_vec(),
            )?,
            pod_resources: counters(
                "pod_resources_endpoint_requests_total",
                "Requests to the pod-resources socket.",
                &version,
            )?,
            pod_resources_calls: of_calls("requests", "Requests of one kind to the pod-resources socket.")?,
            pod_resources_errors: of_calls("errors", "Requests of one kind to the pod-resources socket that failed.")?,
            claims_in_use,
            claim_operations: histograms(
                "dra",
                "operations_duration_seconds",
                "Seconds that handling all resource claims of a pod took.",
                &["operation_name", "is_error"],
                claims.clone(),
            )?,
            claim_calls: histograms(
                "dra",
                "grpc_operations_duration_seconds",
                "Seconds that calls to drivers of resource claims took.",
                &["driver_name", "method_name", "grpc_status_code"],
                claims,
            )?,
        })
    }

    /// A device plugin asked to be registered.
    pub fn device_registration(&self, resource: &str) {
        self.device_registrations.with_label_values(&[resource]).inc();
    }

    /// A device plugin was asked to allocate.
    pub fn device_allocated(&self, resource: &str, took: Duration) {
        self.device_allocation.with_label_values(&[resource]).observe(took.as_secs_f64());
    }

    /// A call to the pod-resources socket; `version`: `v1` or `v1alpha1`.
    pub fn pod_resources_call(&self, version: &str, call: PodResourcesCall, failed: bool) {
        self.pod_resources.with_label_values(&[version]).inc();
        self.pod_resources_calls[call as usize].with_label_values(&[version]).inc();
        if failed {
            self.pod_resources_errors[call as usize].with_label_values(&[version]).inc();
        }
    }

    /// Resources of a container (`scope` `container`) or pod (`pod`) were given; `boundary`: `numa_node`, `physical_cpu`, `uncore_cache`.
    pub fn alignment(&self, scope: &str, boundary: &str, aligned: bool) {
        let counter = if aligned { &self.aligned } else { &self.not_aligned };
        counter.with_label_values(&[scope, boundary]).inc();
    }

    /// CPUs of a NUMA node that belong to one container.
    pub fn numa_cpus(&self, node: i64, cpus: usize) {
        self.cpus_per_numa.with_label_values(&[node.to_string().as_str()]).set(cpus as f64);
    }

    /// Resource claims that pods use, by driver; `<any>`: all.
    pub fn claims(&self, driver: &str, count: usize) {
        self.claims_in_use.with_label_values(&[driver]).set(count as f64);
    }

    /// All claims of a pod were prepared (`PrepareResources`) or given back (`UnprepareResources`).
    pub fn claims_handled(&self, operation: &str, took: Duration, failed: bool) {
        let failed = if failed { "true" } else { "false" };
        self.claim_operations.with_label_values(&[operation, failed]).observe(took.as_secs_f64());
    }

    /// A call to a driver of claims; `code`: gRPC's name of the status.
    pub fn claims_call(&self, driver: &str, method: &str, code: &str, took: Duration) {
        self.claim_calls.with_label_values(&[driver, method, code]).observe(took.as_secs_f64());
    }
}
