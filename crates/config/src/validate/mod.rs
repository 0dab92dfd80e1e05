//! What a configuration must satisfy. Every violation is listed, in Kubernetes' wording where it has one.
//!
//! [`validate`] holds the rules of Kubernetes' own validation and those that it only finds out while starting
//! (eviction thresholds, reservations, TLS names, sysctls): a node that cannot start should say so at once.

mod resources;
mod serving;

use std::time::Duration;

use crate::duration::{self, quote};
use crate::flags::Flags;
use crate::gates::{Gate, Gates};
use crate::labels;
use crate::load::{Host, asks_api_server};
use crate::problem::Problem;
use crate::types::KubeletConfiguration;

/// Minor version before the one whose behaviour rubelet has; its hidden metrics may be shown.
const PREVIOUS_MINOR: &str = "1.35";
/// IDs are handed to pods in blocks of this size (KEP-127).
const ID_BLOCK: i64 = 65536;

/// The place that rules report to.
pub(super) struct Report<'a> {
    out: &'a mut Vec<Problem>,
}

impl Report<'_> {
    /// A violation, in the words of a start-up check.
    fn error(&mut self, path: &str, message: impl Into<String>) {
        self.out.push(Problem::error(path, message));
    }

    fn warning(&mut self, path: &str, message: impl Into<String>) {
        self.out.push(Problem::warning(path, message));
    }

    /// A violation, in the words of the validation.
    fn invalid(&mut self, path: &str, message: impl std::fmt::Display) {
        self.error(path, format!("invalid configuration: {message}"));
    }

    fn range(&mut self, path: &str, flag: &str, value: i32, low: i32, high: i32) {
        if !(low..=high).contains(&value) {
            let text = format!("{path} (--{flag}) {value} must be between {low} and {high}, inclusive");
            self.invalid(path, text);
        }
    }

    fn not_negative(&mut self, path: &str, flag: &str, value: i64) {
        if value < 0 {
            let text = format!("{path} (--{flag}) {value} must not be a negative number");
            self.invalid(path, text);
        }
    }
}

/// Lists all that is wrong.
pub(crate) fn validate(config: &KubeletConfiguration, gates: &Gates, host: &Host, out: &mut Vec<Problem>) {
    let mut report = Report { out };
    numbers(config, &mut report);
    images(config, gates, &mut report);
    node_shutdown(config, gates, &mut report);
    containers(config, gates, &mut report);
    taints(config, &mut report);
    pod_logs(config, &mut report);
    host_rules(config, host, &mut report);
    memory_qos(config, gates, &mut report);
    resources::validate(config, gates, &mut report);
    serving::validate(config, gates, &mut report);
}

/// Without an API server nobody can be asked who a caller is.
pub(crate) fn standalone(config: &KubeletConfiguration, flags: &Flags, out: &mut Vec<Problem>) {
    if flags.kubeconfig().is_some() || !config.enable_server {
        return;
    }
    let remedy = "set it in the configuration file of a standalone node";
    let (authentication, authorization) = asks_api_server(config);
    if authentication {
        let path = "authentication.webhook.enabled";
        let text = format!("no client provided, cannot use webhook authentication: {path}: false; {remedy}");
        out.push(Problem::error(path, text));
    }
    if authorization {
        let path = "authorization.mode";
        let text = format!("no client provided, cannot use webhook authorization: {path}: AlwaysAllow; {remedy}");
        out.push(Problem::error(path, text));
    }
}

fn numbers(c: &KubeletConfiguration, r: &mut Report) {
    if c.node_lease_duration_seconds <= 0 {
        r.invalid("nodeLeaseDurationSeconds", "nodeLeaseDurationSeconds must be greater than 0");
    }
    if !c.system_cgroups.is_empty() && c.cgroup_root.is_empty() {
        r.invalid(
            "systemCgroups",
            "systemCgroups (--system-cgroups) was specified and cgroupRoot (--cgroup-root) was not specified",
        );
    }
    for (path, flag, value) in [
        ("eventBurst", "event-burst", i64::from(c.event_burst)),
        ("eventRecordQPS", "event-qps", c.event_record_qps.into()),
        ("kubeAPIBurst", "kube-api-burst", c.kube_api_burst.into()),
        ("kubeAPIQPS", "kube-api-qps", c.kube_api_qps.into()),
        ("maxOpenFiles", "max-open-files", c.max_open_files),
        ("maxPods", "max-pods", c.max_pods.into()),
        ("podsPerCore", "pods-per-core", c.pods_per_core.into()),
        ("registryBurst", "registry-burst", c.registry_burst.into()),
        ("registryPullQPS", "registry-qps", c.registry_pull_qps.into()),
    ] {
        r.not_negative(path, flag, value);
    }
    for (path, flag, value, low, high) in [
        ("imageGCHighThresholdPercent", "image-gc-high-threshold", c.image_gc_high_threshold_percent, 0, 100),
        ("imageGCLowThresholdPercent", "image-gc-low-threshold", c.image_gc_low_threshold_percent, 0, 100),
        ("iptablesDropBit", "iptables-drop-bit", c.iptables_drop_bit, 0, 31),
        ("iptablesMasqueradeBit", "iptables-masquerade-bit", c.iptables_masquerade_bit, 0, 31),
        ("oomScoreAdj", "oom-score-adj", c.oom_score_adj, -1000, 1000),
        ("port", "port", c.port, 1, 65535),
    ] {
        r.range(path, flag, value, low, high);
    }
    if c.healthz_port != 0 {
        r.range("healthzPort", "healthz-port", c.healthz_port, 1, 65535);
    }
    r.range("readOnlyPort", "read-only-port", c.read_only_port, 0, 65535);
    if c.node_status_max_images < -1 {
        let value = c.node_status_max_images;
        let text = format!("nodeStatusMaxImages (--node-status-max-images) {value} must be -1 or greater");
        r.invalid("nodeStatusMaxImages", text);
    }
    if c.sync_frequency.is_zero() {
        r.error("syncFrequency", "invalid sync frequency 0");
    }
    let previous = ["", PREVIOUS_MINOR];
    let hidden = c.show_hidden_metrics_for_version.as_str();
    if !previous.contains(&hidden) {
        r.error(
            "showHiddenMetricsForVersion",
            format!(
                "invalid showHiddenMetricsForVersion: showHiddenMetricsForVersion: Invalid value: {}: must be omitted or have the value '{PREVIOUS_MINOR}'; only the previous minor version is allowed",
                quote(hidden)
            ),
        );
    }
}

fn images(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    let (low, high) = (c.image_gc_low_threshold_percent, c.image_gc_high_threshold_percent);
    if low >= high {
        r.invalid(
            "imageGCLowThresholdPercent",
            format!("imageGCLowThresholdPercent (--image-gc-low-threshold) {low} must be less than imageGCHighThresholdPercent (--image-gc-high-threshold) {high}"),
        );
    }
    let (min, max) = (c.image_minimum_gc_age, c.image_maximum_gc_age);
    if !max.is_zero() && max <= min {
        let (min, max) = (duration::format(min), duration::format(max));
        r.invalid("imageMaximumGCAge", format!("imageMaximumGCAge {max} must be greater than imageMinimumGCAge {min}"));
    }
    if let Some(pulls) = c.max_parallel_image_pulls {
        let path = "maxParallelImagePulls";
        if pulls < 1 {
            r.invalid(path, format!("maxParallelImagePulls {pulls} must be a positive number"));
        }
        if pulls > 1 && c.serialize_image_pulls {
            r.invalid(path, "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls (--serialize-image-pulls) is set to false");
        }
    }
    let list = "preloadedImagesVerificationAllowlist";
    let policy = c.image_pull_credentials_verification_policy;
    let patterns = &c.preloaded_images_verification_allowlist;
    if gates.enabled(Gate::KubeletEnsureSecretPulledImages) {
        let named = crate::nested::ImagePullCredentialsVerificationPolicy::NeverVerifyAllowlistedImages;
        if !patterns.is_empty() && policy != Some(named) {
            // The misspelt field name is what Kubernetes prints.
            r.invalid(list, "can't set `preloadedImagesVerificationAllowlist` if `imagePullCredentialsVertificationPolicy` is not \"NeverVerifyAllowlistedImages\"");
        } else {
            for why in patterns.iter().filter_map(|p| image_pattern(p)) {
                r.invalid(list, format!("invalid image pattern in `{list}`: {why}"));
            }
        }
        return;
    }
    let off = "must not be set if KubeletEnsureSecretPulledImages feature gate is not enabled";
    if policy.is_some() {
        let path = "imagePullCredentialsVerificationPolicy";
        r.invalid(path, format!("`{path}` {off}"));
    }
    if !patterns.is_empty() {
        r.invalid(list, format!("`{list}` {off}"));
    }
}

/// What is wrong with an entry of the allowlist: an image name without tag or digest, or a prefix ending in `/*`.
fn image_pattern(pattern: &str) -> Option<String> {
    if pattern.trim() != pattern {
        return Some(format!("leading/trailing spaces are not allowed: {pattern}"));
    }
    let (name, wildcard) = match pattern.strip_suffix('*') {
        Some(head) if head.ends_with('/') => (head, true),
        _ => (pattern, false),
    };
    if name.is_empty() {
        return Some(format!("the supplied pattern is too short: {pattern}"));
    }
    if name.contains('*') {
        return Some(format!("not a valid wildcard pattern, only patterns ending with '/*' are allowed: {pattern}"));
    }
    if wildcard {
        return (name == "/").then(|| "at least registry hostname is required".to_owned());
    }
    let last = name.rsplit('/').next().unwrap_or(name);
    // A registry may have a port, so a colon is a tag only in the last part.
    (name.contains('@') || last.contains(':'))
        .then(|| format!("neither tag nor digest is accepted in an image reference: {pattern}"))
}

fn node_shutdown(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    let (all, critical) = (c.shutdown_grace_period, c.shutdown_grace_period_critical_pods);
    let by_priority = "shutdownGracePeriodByPodPriority";
    let any = !all.is_zero() || !critical.is_zero();
    if gates.enabled(Gate::GracefulNodeShutdown) {
        if critical > all {
            let (all, critical) = (duration::format(all), duration::format(critical));
            r.invalid(
                "shutdownGracePeriodCriticalPods",
                format!("shutdownGracePeriodCriticalPods {{{critical}}} must be <= shutdownGracePeriod {{{all}}}"),
            );
        }
        for (path, value) in [("shutdownGracePeriod", all), ("shutdownGracePeriodCriticalPods", critical)] {
            if !value.is_zero() && value < Duration::from_secs(1) {
                let value = duration::format(value);
                r.invalid(path, format!("{path} {{{value}}} must be either zero or otherwise >= 1 sec"));
            }
        }
    } else if any {
        r.invalid(
            "shutdownGracePeriod",
            "specifying shutdownGracePeriod or shutdownGracePeriodCriticalPods requires feature gate GracefulNodeShutdown",
        );
    }
    if c.shutdown_grace_period_by_pod_priority.is_empty() {
        return;
    }
    if !gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority) {
        r.invalid(
            by_priority,
            "Specifying shutdownGracePeriodByPodPriority requires feature gate GracefulNodeShutdownBasedOnPodPriority",
        );
    } else if any {
        r.invalid(
            by_priority,
            "Cannot specify both shutdownGracePeriodByPodPriority and shutdownGracePeriod at the same time",
        );
    }
}

fn containers(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    let quota = "cpuCFSQuotaPeriod";
    let period = c.cpu_cfs_quota_period;
    let shown = duration::format(period);
    if !gates.enabled(Gate::CustomCPUCFSQuotaPeriod) {
        if period != Duration::from_millis(100) {
            r.invalid(quota, format!("cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {{{shown}}} requires feature gate CustomCPUCFSQuotaPeriod"));
        }
    } else if period < Duration::from_millis(1) || period > Duration::from_secs(1) {
        r.invalid(
            quota,
            format!("cpuCFSQuotaPeriod (--cpu-cfs-quota-period) {{{shown}}} must be between 1ms and 1sec, inclusive"),
        );
    }
    let path = "crashLoopBackOff.maxContainerRestartPeriod";
    match (
        gates.enabled(Gate::KubeletCrashLoopBackOffMax),
        c.crash_loop_back_off.max_container_restart_period,
    ) {
        (true, None) => r.invalid(path, "FeatureGate KubeletCrashLoopBackOffMax is enabled, CrashLoopBackOff.MaxContainerRestartPeriod must be set"),
        (true, Some(cap)) if !(1_000..=300_000).contains(&cap.as_millis()) => {
            let seconds = cap.as_secs_f64();
            r.invalid(path, format!("CrashLoopBackOff.MaxContainerRestartPeriod (got: {seconds} seconds) must be set between 1s and 300s"));
        }
        (false, Some(_)) => r.invalid(path, "FeatureGate KubeletCrashLoopBackOffMax not enabled, CrashLoopBackOff.MaxContainerRestartPeriod must not be set"),
        _ => {}
    }
    if c.run_once {
        r.invalid("runOnce", "runOnce (--runOnce) true, Runonce mode has been deprecated and should not be set");
    }
    if c.container_log_max_workers < 1 {
        r.invalid("containerLogMaxWorkers", "containerLogMaxWorkers must be greater than or equal to 1");
    }
    if c.container_log_monitor_interval < Duration::from_secs(3) {
        r.invalid(
            "containerLogMonitorInterval",
            "containerLogMonitorInterval must be a positive time duration greater than or equal to 3s",
        );
    }
    if c.container_log_max_files <= 1 {
        r.invalid("containerLogMaxFiles", "containerLogMaxFiles must be greater than 1");
    }
    if let Err(e) = model::quantity::Quantity::parse(&c.container_log_max_size) {
        let text = quote(&c.container_log_max_size);
        let message =
            format!("failed to initialize container log manager: failed to parse container log max size {text}: {e}");
        r.error("containerLogMaxSize", message);
    }
    for pattern in &c.allowed_unsafe_sysctls {
        if let Some(message) = unsafe_sysctl(pattern) {
            r.error("allowedUnsafeSysctls", message);
        }
    }
}

/// What is wrong with an entry of `allowedUnsafeSysctls`.
fn unsafe_sysctl(pattern: &str) -> Option<String> {
    let segment = |text: &str| {
        let bytes = text.as_bytes();
        let good = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        bytes.first().is_some_and(good)
            && bytes.last().is_some_and(good)
            && bytes.iter().all(|b| good(b) || b"-_".contains(b))
    };
    let (heads, last) = match pattern.rfind(['.', '/']) {
        Some(at) => (Some(&pattern[..at]), &pattern[at + 1..]),
        None => (None, pattern),
    };
    // The last part may be `*` or start with letters and end with it.
    let last_fits = match last.strip_suffix('*') {
        Some("") => true,
        Some(head) => {
            let bytes = head.as_bytes();
            bytes.first().is_some_and(u8::is_ascii_alphanumeric)
                && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(b))
        }
        None => segment(last),
    };
    if pattern.len() > 253 || !last_fits || !heads.is_none_or(|h| h.split(['.', '/']).all(segment)) {
        return Some(format!(
            "sysctl {} must have at most 253 characters and match regex ([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*([a-z0-9][-_a-z0-9]*)?[a-z0-9*]",
            quote(pattern)
        ));
    }
    // With a slash before the first dot, slashes separate and dots belong to names.
    let name = match pattern.find(['.', '/']) {
        Some(at) if pattern.as_bytes()[at] == b'/' => {
            pattern.replace('.', "\u{0}").replace('/', ".").replace('\u{0}', "/")
        }
        _ => pattern.to_owned(),
    };
    let name = name.split('*').next().unwrap_or_default();
    const NAMESPACED: [&str; 10] = [
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
        "kernel.shm",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.msg",
    ];
    let known = NAMESPACED.contains(&name) || name.starts_with("net.") || name.starts_with("fs.mqueue.");
    (!known).then(|| format!("the sysctls {} are not known to be namespaced", quote(name)))
}

fn taints(c: &KubeletConfiguration, r: &mut Report) {
    for (i, taint) in c.register_with_taints.iter().enumerate() {
        let path = format!("registerWithTaints[{i}]");
        let value = taint.value.as_deref().unwrap_or_default();
        let effect = taint.effect.as_str();
        let wrong = !labels::qualified_name(&taint.key).is_empty()
            || !labels::label_value(value).is_empty()
            || !(effect.is_empty() || labels::is_taint_effect(effect));
        if wrong {
            // The form that Go prints a struct in.
            let time = taint
                .time_added
                .as_ref()
                .map_or("<nil>".to_owned(), |t| t.0.strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string());
            let key = &taint.key;
            r.error(&path, format!("invalid taint: {{{key} {value} {effect} {time}}}"));
        }
        if taint.time_added.is_some() {
            r.invalid(&path, "taint.TimeAdded is not nil");
        }
    }
}

fn pod_logs(c: &KubeletConfiguration, r: &mut Report) {
    let dir = &c.pod_logs_dir;
    let shown = quote(dir);
    if dir.is_empty() {
        r.invalid("podLogsDir", "podLogsDir was not specified");
    }
    if !dir.starts_with('/') {
        r.invalid("podLogsDir", format!("pod logs path {shown} must be absolute path"));
    }
    let parts: Vec<_> = dir.split('/').collect();
    let normal = dir == "/" || parts.iter().skip(1).all(|part| !["", ".", ".."].contains(part));
    if !normal {
        r.invalid("podLogsDir", format!("pod logs path {shown} must be normalized"));
    }
    if !dir.is_ascii() {
        r.invalid("podLogsDir", format!("pod logs path {shown} mut contains ASCII characters only"));
    }
}

fn host_rules(c: &KubeletConfiguration, host: &Host, r: &mut Report) {
    if !host.cgroup_v2 {
        if c.fail_cgroup_v1 {
            r.error("failCgroupV1", "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed in a future release");
        }
        if c.single_process_oom_kill == Some(false) {
            r.invalid(
                "singleProcessOOMKill",
                "singleProcessOOMKill must not be explicitly set to false when using cgroup v1",
            );
        }
        if c.memory_swap.swap_behavior == Some(crate::nested::SwapBehavior::LimitedSwap) {
            r.error(
                "memorySwap.swapBehavior",
                "swap feature is enabled and LimitedSwap but it is only supported with cgroupv2",
            );
        }
    }
    let path = "userNamespaces.idsPerPod";
    if let Some(ids) = c.user_namespaces.as_ref().and_then(|u| u.ids_per_pod) {
        if ids < ID_BLOCK {
            r.invalid(path, format!("{path} must not be less than {ID_BLOCK}"));
        } else if ids % ID_BLOCK != 0 {
            r.invalid(path, format!("{path} must be a multiple of {ID_BLOCK}"));
        } else if ids > i64::from(u32::MAX) {
            r.invalid(path, format!("{path} must not be more than {}", u32::MAX));
        }
    }
    if !c.kubelet_cgroups.is_empty()
        && !c.kube_reserved_cgroup.is_empty()
        && !c.kubelet_cgroups.starts_with(&c.kube_reserved_cgroup)
    {
        r.warning("kubeletCgroups", "unsupported configuration:KubeletCgroups is not within KubeReservedCgroup");
    }
}

fn memory_qos(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    let on = gates.enabled(Gate::MemoryQoS);
    match c.memory_throttling_factor {
        None if on => r.invalid(
            "memoryThrottlingFactor",
            "memoryThrottlingFactor is required when MemoryQoS feature flag is enabled",
        ),
        Some(factor) if factor <= 0.0 || factor > 1.0 => r.invalid(
            "memoryThrottlingFactor",
            format!("memoryThrottlingFactor {factor} must be greater than 0 and less than or equal to 1.0"),
        ),
        _ => {}
    }
    let policy = c.memory_reservation_policy;
    if !on && policy == crate::nested::MemoryReservationPolicy::TieredReservation {
        r.invalid(
            "memoryReservationPolicy",
            format!("memoryReservationPolicy \"{policy}\" requires MemoryQoS feature gate to be enabled"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_patterns() {
        for good in ["a", "A/b", "reg:5000/a", "reg/*", "reg.example/a/b/*"] {
            assert_eq!(image_pattern(good), None, "{good}");
        }
        for bad in ["a:b", " a", "a*b", "*", "/*", "a@sha256:0", "reg:5000/a:1", ""] {
            assert!(image_pattern(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn sysctls() {
        for good in [
            "net.*",
            "net/ipv4/ip_forward",
            "kernel.msg*",
            "kernel.shm_rmid_forced",
            "fs.mqueue.*",
            "net.ipv4.conf.eth0/1.x",
        ] {
            assert_eq!(unsafe_sysctl(good), None, "{good}");
        }
        for bad in ["vm.swappiness", "net.*.x", "*", "Net.x", "net..x", "", "kernel.*", "kernel"] {
            assert!(unsafe_sysctl(bad).is_some(), "{bad}");
        }
    }
}
