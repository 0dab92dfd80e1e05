//! The structs and enums inside [`crate::KubeletConfiguration`] (`kubelet.config.k8s.io/v1beta1`,
//! `logging` and `tracing` of component-base).

use std::collections::BTreeMap;
use std::time::Duration;

use model::quantity::{Format, Quantity};

use crate::field::{choice, config_struct};

/// `"a", "b" or "c"`.
fn or_list(values: &[&str]) -> String {
    let quoted: Vec<_> = values.iter().map(|v| format!("\"{v}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.join(""),
    }
}

fn option_message(value: &str, field: &str, valid: &[&str]) -> String {
    let valid = or_list(valid);
    format!("invalid configuration: option {value} specified for {field}. Valid options are {valid}")
}

choice! {
    /// Who writes pod cgroups: the kubelet itself, or systemd on its behalf.
    pub enum CgroupDriver {
        /// The cgroup filesystem.
        Cgroupfs = "cgroupfs",
        /// systemd slices.
        Systemd = "systemd",
    }
    default Cgroupfs;
    wrong |value| option_message(&value, "cgroupDriver (--cgroup-driver)", &["cgroupfs", "systemd"]);
}

choice! {
    /// How a pod reaches itself through its own Service.
    pub enum HairpinMode {
        /// The bridge is put into promiscuous mode.
        PromiscuousBridge = "promiscuous-bridge",
        /// The hairpin flag is set on the pod's veth.
        HairpinVeth = "hairpin-veth",
        /// Nothing is done.
        None = "none",
    }
    default PromiscuousBridge;
    wrong |value| option_message(
        &value,
        "hairpinMode (--hairpin-mode)",
        &["none", "hairpin-veth", "promiscuous-bridge"],
    );
}

choice! {
    /// Whether containers may own whole CPUs.
    pub enum CpuManagerPolicy {
        /// All share all CPUs.
        None = "none",
        /// Guaranteed pods with whole-number requests own CPUs.
        Static = "static",
    }
    default None;
    wrong |value| format!(
        "invalid configuration: cpuManagerPolicy (--cpu-manager-policy): unknown policy: {value}; must be one of: \"none\", \"static\""
    );
}

choice! {
    /// Whether containers are pinned to NUMA memory.
    pub enum MemoryManagerPolicy {
        /// No pinning.
        None = "None",
        /// Guaranteed pods are pinned.
        Static = "Static",
    }
    default None;
    wrong |value| format!(
        "invalid configuration: memoryManagerPolicy (--memory-manager-policy): unknown policy: {value}; must be one of: \"None\", \"Static\""
    );
}

choice! {
    /// How CPU, memory and device placements are brought together.
    pub enum TopologyManagerPolicy {
        /// Not at all.
        None = "none",
        /// Prefer one NUMA node, admit anyway.
        BestEffort = "best-effort",
        /// Refuse pods that do not fit the preferred placement.
        Restricted = "restricted",
        /// Refuse pods that do not fit one NUMA node.
        SingleNumaNode = "single-numa-node",
    }
    default None;
    wrong |value| format!(
        "invalid configuration: topologyManagerPolicy (--topology-manager-policy) {value} must be one of: [\"none\" \"best-effort\" \"restricted\" \"single-numa-node\"]"
    );
}

choice! {
    /// What a topology hint is computed for.
    pub enum TopologyManagerScope {
        /// Each container.
        Container = "container",
        /// The whole pod.
        Pod = "pod",
    }
    default Container;
    wrong |value| format!(
        "invalid configuration: topologyManagerScope (--topology-manager-scope) {value} must be one of: \"container\", or \"pod\""
    );
}

choice! {
    /// Who may use the kubelet's own API.
    pub enum AuthorizationMode {
        /// Everybody who is authenticated.
        AlwaysAllow = "AlwaysAllow",
        /// Whom the API server's SubjectAccessReview allows.
        Webhook = "Webhook",
    }
    default Webhook;
    wrong |value| format!(
        "unknown authorization mode {}: authorization.mode (--authorization-mode) must be \"AlwaysAllow\" or \"Webhook\"",
        value.trim_matches('"')
    );
}

choice! {
    /// Which images need the pod's own pull credentials though they are on the node (KEP-2535).
    pub enum ImagePullCredentialsVerificationPolicy {
        /// None.
        NeverVerify = "NeverVerify",
        /// All but those that were there before the kubelet pulled them.
        NeverVerifyPreloadedImages = "NeverVerifyPreloadedImages",
        /// All but those preloaded ones that `preloadedImagesVerificationAllowlist` names.
        NeverVerifyAllowlistedImages = "NeverVerifyAllowlistedImages",
        /// All.
        AlwaysVerify = "AlwaysVerify",
    }
    default NeverVerifyPreloadedImages;
    wrong |value| option_message(
        &value,
        "imagePullCredentialsVerificationPolicy",
        &["NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify"],
    );
}

choice! {
    /// Whether memory requests are protected by the kernel (KEP-2570).
    pub enum MemoryReservationPolicy {
        /// No memory.min or memory.low.
        None = "None",
        /// memory.min for Guaranteed, memory.low for Burstable pods.
        TieredReservation = "TieredReservation",
    }
    default None;
    wrong |value| option_message(&value, "memoryReservationPolicy", &["None", "TieredReservation"]);
}

choice! {
    /// How changes of ConfigMaps and Secrets are noticed.
    pub enum ChangeDetectionStrategy {
        /// Fetched whenever needed.
        Get = "Get",
        /// Fetched and kept for a while.
        Cache = "Cache",
        /// Watched.
        Watch = "Watch",
    }
    default Watch;
    wrong |value| format!(
        "unknown configmap and secret manager mode: {}: configMapAndSecretChangeDetectionStrategy must be \"Get\", \"Cache\" or \"Watch\"",
        value.trim_matches('"')
    );
}

choice! {
    /// May pods use swap (KEP-2400).
    pub enum SwapBehavior {
        /// Burstable pods, in proportion to their memory request.
        LimitedSwap = "LimitedSwap",
        /// No pod.
        NoSwap = "NoSwap",
    }
    default NoSwap;
    wrong |value| format!(
        "invalid configuration: memorySwap.swapBehavior {value} must be one of: \"\", \"LimitedSwap\" or \"NoSwap\""
    );
}

choice! {
    /// The form of log lines.
    pub enum LogFormat {
        /// klog lines.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
    default Text;
    wrong |value| format!(
        "logging.format: Invalid value: {value}: Unsupported log format; must be \"text\" or \"json\""
    );
}

config_struct! {
    /// How callers of the kubelet's own API prove who they are; all given ways are tried.
    pub struct Authentication {
        /// Client certificates.
        x509: X509Authentication = always "x509";
        /// Bearer tokens, checked by the API server (TokenReview).
        webhook: WebhookAuthentication = always "webhook";
        /// Callers without credentials.
        anonymous: AnonymousAuthentication = always "anonymous";
    }
}

config_struct! {
    /// Client certificates.
    pub struct X509Authentication {
        /// PEM file with the CAs to trust; empty: client certificates are not looked at.
        client_ca_file: String = zero "clientCAFile";
    }
}

config_struct! {
    /// Bearer tokens.
    pub struct WebhookAuthentication {
        /// Ask the API server.
        enabled: bool = ptr "enabled" true;
        /// How long an answer is kept.
        cache_ttl: Duration = always "cacheTTL" Duration::from_mins(2);
    }
}

config_struct! {
    /// Callers without credentials.
    pub struct AnonymousAuthentication {
        /// They are `system:anonymous` instead of being refused.
        enabled: bool = ptr "enabled" false;
    }
}

config_struct! {
    /// Who may use the kubelet's own API.
    pub struct Authorization {
        /// The mode.
        mode: AuthorizationMode = ptr "mode";
        /// Settings of mode Webhook.
        webhook: WebhookAuthorization = always "webhook";
    }
}

config_struct! {
    /// How long answers of the API server are kept.
    pub struct WebhookAuthorization {
        /// "Allowed".
        cache_authorized_ttl: Duration = always "cacheAuthorizedTTL" Duration::from_mins(5);
        /// "Denied".
        cache_unauthorized_ttl: Duration = always "cacheUnauthorizedTTL" Duration::from_secs(30);
    }
}

config_struct! {
    /// Swap for pods.
    pub struct MemorySwap {
        /// None: as NoSwap.
        swap_behavior: Option<SwapBehavior> = opt "swapBehavior";
    }
}

config_struct! {
    /// The crash back-off of containers.
    pub struct CrashLoopBackOff {
        /// Its cap, 1 s to 300 s. Only set while gate KubeletCrashLoopBackOffMax is on.
        max_container_restart_period: Option<Duration> = opt "maxContainerRestartPeriod";
    }
}

config_struct! {
    /// Memory set aside on one NUMA node.
    pub struct MemoryReservation {
        /// NUMA node number.
        numa_node: i32 = ptr "numaNode";
        /// `memory` and `hugepages-SIZE`, in bytes.
        limits: BTreeMap<String, Quantity> = ptr "limits";
    }
}

config_struct! {
    /// Time that pods get on node shutdown.
    pub struct ShutdownGracePeriodByPodPriority {
        /// For pods of this priority and up to the next entry's.
        priority: i32 = ptr "priority";
        /// Seconds.
        shutdown_grace_period_seconds: i64 = ptr "shutdownGracePeriodSeconds";
    }
}

config_struct! {
    /// User namespaces of pods (KEP-127).
    pub struct UserNamespaces {
        /// IDs mapped into each pod: a multiple of 65536; none: 65536.
        ids_per_pod: Option<i64> = opt "idsPerPod";
    }
}

config_struct! {
    /// OpenTelemetry traces.
    pub struct Tracing {
        /// Collector (`host:port`, `unix://…`); none: localhost:4317.
        endpoint: Option<String> = opt "endpoint";
        /// Samples per million spans; none: only what the parent sampled.
        sampling_rate_per_million: Option<i32> = opt "samplingRatePerMillion";
    }
}

config_struct! {
    /// The log.
    pub struct Logging {
        /// Form of the lines.
        format: LogFormat = ptr "format";
        /// Longest time a line may wait in a buffer.
        flush_frequency: Duration = always "flushFrequency" Duration::from_secs(5);
        /// klog's `-v`: 0 is the least.
        verbosity: u32 = ptr "verbosity";
        /// Other verbosities for source files by name pattern.
        vmodule: Vec<VmoduleItem> = opt "vmodule";
        /// Options of each format.
        options: LogOptions = always "options";
    }
}

config_struct! {
    /// Verbosity of some source files.
    pub struct VmoduleItem {
        /// Base name of the file, with `*` and `?`.
        file_pattern: String = ptr "filePattern";
        /// Their verbosity.
        verbosity: u32 = ptr "verbosity";
    }
}

config_struct! {
    /// Options of each log format.
    pub struct LogOptions {
        /// For `text`.
        text: LogRouting = always "text";
        /// For `json`.
        json: LogRouting = always "json";
    }
}

config_struct! {
    /// Where lines go; both need gate LoggingAlphaOptions.
    pub struct LogRouting {
        /// Errors to stderr, the rest to stdout, instead of all to stderr.
        split_stream: bool = zero "splitStream";
        /// Bytes that may wait in a buffer when the streams are split; 0: none.
        info_buffer_size: Quantity = always "infoBufferSize" Quantity::from_value(0, Format::DecimalSI);
    }
}
