//! Figures of in-place resizes.

use std::time::Duration;

use prometheus::{CounterVec, Gauge, GaugeVec, HistogramOpts, HistogramVec, Opts, Registry};

const BUCKETS: &[f64] = &[
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0, 300_000.0,
    600_000.0,
];

/// See the module.
#[derive(Debug)]
pub struct Resizes {
    /// Pods whose resources are being changed.
    pub in_progress: Gauge,
    requested: CounterVec,
    duration: HistogramVec,
    pending: GaugeVec,
    infeasible: CounterVec,
    deferred_accepted: CounterVec,
}

impl Resizes {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let opts = |name: &str, help: &str| Opts::new(name, help).subsystem("kubelet");
        let resizes = Self {
            in_progress: Gauge::with_opts(opts("pod_in_progress_resizes", "Pods whose resources are being changed."))?,
            requested: CounterVec::new(
                opts(
                    "container_requested_resizes_total",
                    "Changes of containers' resources that were asked for: each resource of each container counts.",
                ),
                &["resource", "requirement", "operation"],
            )?,
            duration: HistogramVec::new(
                HistogramOpts::new(
                    "pod_resize_duration_milliseconds",
                    "Milliseconds that changing a pod's resources took.",
                )
                .subsystem("kubelet")
                .buckets(BUCKETS.to_vec()),
                &["success"],
            )?,
            pending: GaugeVec::new(
                opts("pod_pending_resizes", "Pods that were not given the resources that they ask for."),
                &["reason"],
            )?,
            infeasible: CounterVec::new(
                opts(
                    "pod_infeasible_resizes_total",
                    "Resources that were asked for and that this node can never give.",
                ),
                &["reason_detail"],
            )?,
            deferred_accepted: CounterVec::new(
                opts("pod_deferred_accepted_resizes_total", "Resources that were given after they had been put off."),
                &["retry_trigger"],
            )?,
        };
        registry.register(Box::new(resizes.in_progress.clone()))?;
        registry.register(Box::new(resizes.requested.clone()))?;
        registry.register(Box::new(resizes.duration.clone()))?;
        registry.register(Box::new(resizes.pending.clone()))?;
        registry.register(Box::new(resizes.infeasible.clone()))?;
        registry.register(Box::new(resizes.deferred_accepted.clone()))?;
        Ok(resizes)
    }

    /// A new spec asks for this of one container: `cpu` or `memory`, `requests` or `limits`, `add`, `remove`, `increase` or `decrease`.
    pub fn requested(&self, resource: &str, requirement: &str, operation: &str) {
        self.requested.with_label_values(&[resource, requirement, operation]).inc();
    }

    /// One try to change a pod's resources.
    pub fn actuated(&self, took: Duration, success: bool) {
        let success = if success { "true" } else { "false" };
        self.duration.with_label_values(&[success]).observe(took.as_secs_f64() * 1000.0);
    }

    /// How many pods wait for resources now, by reason. A reason without pods is not shown, as with Go.
    pub fn pending(&self, deferred: usize, infeasible: usize) {
        self.pending.reset();
        for (reason, count) in [("deferred", deferred), ("infeasible", infeasible)] {
            if count > 0 {
                self.pending.with_label_values(&[reason]).set(count as f64);
            }
        }
    }

    /// This node can never give what was asked for.
    pub fn infeasible(&self, detail: &str) {
        self.infeasible.with_label_values(&[detail]).inc();
    }

    /// What had been put off was given; `trigger`: why it was looked at again.
    pub fn deferred_accepted(&self, trigger: &str) {
        self.deferred_accepted.with_label_values(&[trigger]).inc();
    }
}
