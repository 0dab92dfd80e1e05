//! `KubeletConfiguration` of `kubelet.config.k8s.io/v1beta1`, all fields, with the defaults of a configuration file.
//!
//! Two defaults hang on other values and are set in [`crate::load`]: `nodeStatusReportFrequency` follows
//! `nodeStatusUpdateFrequency` when only that one is given, `serializeImagePulls` is false when
//! `maxParallelImagePulls` is above 1. Two hang on feature gates: `crashLoopBackOff.maxContainerRestartPeriod` and
//! `imagePullCredentialsVerificationPolicy`.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::SignedDuration;
use model::api::Taint;

use crate::field::config_struct;
use crate::nested::{
    Authentication, Authorization, CgroupDriver, ChangeDetectionStrategy, CpuManagerPolicy, CrashLoopBackOff,
    HairpinMode, ImagePullCredentialsVerificationPolicy, Logging, MemoryManagerPolicy, MemoryReservation,
    MemoryReservationPolicy, MemorySwap, ShutdownGracePeriodByPodPriority, TopologyManagerPolicy, TopologyManagerScope,
    Tracing, UserNamespaces,
};

/// apiVersion of the only version there is.
pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// kind of the configuration.
pub const KIND: &str = "KubeletConfiguration";

/// Hard eviction thresholds of a configuration file that names none (Linux).
pub const DEFAULT_EVICTION_HARD: [(&str, &str); 5] = [
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];

config_struct! {
    /// The kubelet's configuration, with every default filled in.
    pub struct KubeletConfiguration {
        /// Serve the HTTPS API at all.
        enable_server: bool = ptr "enableServer" true;
        /// Directory (or one file) of static pods; empty: none.
        static_pod_path: String = zero "staticPodPath";
        /// Directory of pod logs.
        pod_logs_dir: String = zero "podLogsDir" "/var/log/pods".to_owned();
        /// Longest time between two syncs of a pod.
        sync_frequency: Duration = always "syncFrequency" Duration::from_mins(1);
        /// How often `static_pod_path` is read again without a file event.
        file_check_frequency: Duration = always "fileCheckFrequency" Duration::from_secs(20);
        /// How often `static_pod_url` is fetched.
        http_check_frequency: Duration = always "httpCheckFrequency" Duration::from_secs(20);
        /// URL of static pods; empty: none.
        static_pod_url: String = zero "staticPodURL";
        /// Headers for that URL.
        static_pod_url_header: BTreeMap<String, Vec<String>> = opt "staticPodURLHeader";
        /// Address that the API and the read-only port listen on.
        address: String = zero "address" "0.0.0.0".to_owned();
        /// Port of the API, 1 to 65535.
        port: i32 = zero "port" 10250;
        /// Port without authentication; 0: none.
        read_only_port: i32 = zero "readOnlyPort";
        /// Serving certificate (PEM); empty: self-signed or bootstrapped.
        tls_cert_file: String = zero "tlsCertFile";
        /// Its key.
        tls_private_key_file: String = zero "tlsPrivateKeyFile";
        /// Names of the TLS 1.2 cipher suites to offer; empty: the library's.
        tls_cipher_suites: Vec<String> = opt "tlsCipherSuites";
        /// TLS key exchange groups by IANA number; empty: the library's.
        tls_curve_preferences: Vec<i32> = opt "tlsCurvePreferences";
        /// `VersionTLS12` and the like; empty: VersionTLS12.
        tls_min_version: String = zero "tlsMinVersion";
        /// Renew the client certificate before it ends.
        rotate_certificates: bool = zero "rotateCertificates";
        /// Ask the API server for a serving certificate.
        server_tls_bootstrap: bool = zero "serverTLSBootstrap";
        /// Who is calling the API.
        authentication: Authentication = always "authentication";
        /// Who may.
        authorization: Authorization = always "authorization";
        /// Image pulls a second; 0: no limit.
        registry_pull_qps: i32 = ptr "registryPullQPS" 5;
        /// Burst of these.
        registry_burst: i32 = zero "registryBurst" 10;
        /// Which images need the pod's own credentials; none while gate KubeletEnsureSecretPulledImages is off.
        image_pull_credentials_verification_policy: Option<ImagePullCredentialsVerificationPolicy>
            = opt "imagePullCredentialsVerificationPolicy";
        /// Images that policy NeverVerifyAllowlistedImages leaves alone; `/*` at the end matches all below.
        preloaded_images_verification_allowlist: Vec<String> = opt "preloadedImagesVerificationAllowlist";
        /// Events a second; 0: no limit.
        event_record_qps: i32 = ptr "eventRecordQPS" 50;
        /// Burst of these.
        event_burst: i32 = zero "eventBurst" 100;
        /// exec, attach, logs, port forwarding over the API.
        enable_debugging_handlers: bool = ptr "enableDebuggingHandlers" true;
        /// Lock contention profiling.
        enable_contention_profiling: bool = zero "enableContentionProfiling";
        /// Port of /healthz; 0: none.
        healthz_port: i32 = ptr "healthzPort" 10248;
        /// Address it listens on.
        healthz_bind_address: String = zero "healthzBindAddress" "127.0.0.1".to_owned();
        /// oom_score_adj of the kubelet, -1000 to 1000.
        oom_score_adj: i32 = ptr "oomScoreAdj" -999;
        /// DNS domain of the cluster; empty: none.
        cluster_domain: String = zero "clusterDomain";
        /// DNS servers for pods with dnsPolicy ClusterFirst.
        cluster_dns: Vec<String> = opt "clusterDNS";
        /// Idle time after which exec, attach and port forwarding end.
        streaming_connection_idle_timeout: Duration = always "streamingConnectionIdleTimeout" Duration::from_hours(4);
        /// How often the node status is computed.
        node_status_update_frequency: Duration = always "nodeStatusUpdateFrequency" Duration::from_secs(10);
        /// How often it is posted without a change.
        node_status_report_frequency: Duration = always "nodeStatusReportFrequency" Duration::from_mins(5);
        /// Seconds that the node's Lease lasts; renewed after a quarter.
        node_lease_duration_seconds: i32 = zero "nodeLeaseDurationSeconds" 40;
        /// Youngest age at which an unused image may go.
        image_minimum_gc_age: Duration = always "imageMinimumGCAge" Duration::from_mins(2);
        /// Oldest age that an unused image may reach; 0: any.
        image_maximum_gc_age: Duration = always "imageMaximumGCAge";
        /// Percent of the image disk above which images are removed.
        image_gc_high_threshold_percent: i32 = ptr "imageGCHighThresholdPercent" 85;
        /// Percent down to which they are removed.
        image_gc_low_threshold_percent: i32 = ptr "imageGCLowThresholdPercent" 80;
        /// How often disk use of volumes is measured; negative: never.
        volume_stats_agg_period: SignedDuration = always "volumeStatsAggPeriod" SignedDuration::from_mins(1);
        /// Cgroup of the kubelet; empty: where it was started.
        kubelet_cgroups: String = zero "kubeletCgroups";
        /// Cgroup to put other processes of the system in; empty: leave them.
        system_cgroups: String = zero "systemCgroups";
        /// Cgroup above all pods; empty: `/`.
        cgroup_root: String = zero "cgroupRoot";
        /// Build the QoS and pod cgroups.
        cgroups_per_qos: bool = ptr "cgroupsPerQOS" true;
        /// Who writes them; the runtime's answer to RuntimeConfig beats this.
        cgroup_driver: CgroupDriver = ptr "cgroupDriver";
        /// CPU manager.
        cpu_manager_policy: CpuManagerPolicy = ptr "cpuManagerPolicy";
        /// Kill one process on OOM instead of the whole container; none: false on cgroup v2.
        single_process_oom_kill: Option<bool> = opt "singleProcessOOMKill";
        /// Options of the CPU manager.
        cpu_manager_policy_options: BTreeMap<String, String> = opt "cpuManagerPolicyOptions";
        /// How often CPU sets are compared with the runtime's.
        cpu_manager_reconcile_period: Duration = always "cpuManagerReconcilePeriod" Duration::from_secs(10);
        /// Memory manager.
        memory_manager_policy: MemoryManagerPolicy = ptr "memoryManagerPolicy";
        /// Topology manager.
        topology_manager_policy: TopologyManagerPolicy = ptr "topologyManagerPolicy";
        /// Its scope.
        topology_manager_scope: TopologyManagerScope = ptr "topologyManagerScope";
        /// Its options.
        topology_manager_policy_options: BTreeMap<String, String> = opt "topologyManagerPolicyOptions";
        /// Share of requests (`memory: 50%`) that lower QoS classes cannot use; needs gate QOSReserved.
        qos_reserved: BTreeMap<String, String> = opt "qosReserved";
        /// Deadline of runtime calls, but for long ones.
        runtime_request_timeout: Duration = always "runtimeRequestTimeout" Duration::from_mins(2);
        /// Hairpin traffic.
        hairpin_mode: HairpinMode = ptr "hairpinMode";
        /// Pods that may run here.
        max_pods: i32 = zero "maxPods" 110;
        /// Pod addresses in standalone mode.
        pod_cidr: String = zero "podCIDR";
        /// PIDs in a pod; -1: all that the node has.
        pod_pids_limit: i64 = ptr "podPidsLimit" -1;
        /// The node's resolver file; empty: none, pods get no host DNS settings.
        resolv_conf: String = ptr "resolvConf" "/etc/resolv.conf".to_owned();
        /// Gone; true is refused.
        run_once: bool = zero "runOnce";
        /// Enforce CPU limits by quota.
        cpu_cfs_quota: bool = ptr "cpuCFSQuota" true;
        /// Period of that quota, 1 ms to 1 s.
        cpu_cfs_quota_period: Duration = ptr "cpuCFSQuotaPeriod" Duration::from_millis(100);
        /// Images listed in the node status; -1: all.
        node_status_max_images: i32 = ptr "nodeStatusMaxImages" 50;
        /// Open files of the kubelet.
        max_open_files: i64 = zero "maxOpenFiles" 1_000_000;
        /// Content type towards the API server.
        content_type: String = zero "contentType" "application/vnd.kubernetes.protobuf".to_owned();
        /// Requests a second to the API server.
        kube_api_qps: i32 = ptr "kubeAPIQPS" 50;
        /// Burst of these.
        kube_api_burst: i32 = zero "kubeAPIBurst" 100;
        /// Pull one image at a time.
        serialize_image_pulls: bool = ptr "serializeImagePulls" true;
        /// Pulls at a time when not serialized; none: no limit.
        max_parallel_image_pulls: Option<i32> = opt "maxParallelImagePulls";
        /// Thresholds that evict at once: signal to quantity or percentage.
        eviction_hard: BTreeMap<String, String> = opt "evictionHard";
        /// Thresholds that evict after a grace period.
        eviction_soft: BTreeMap<String, String> = opt "evictionSoft";
        /// These grace periods, as duration text.
        eviction_soft_grace_period: BTreeMap<String, String> = opt "evictionSoftGracePeriod";
        /// How long a pressure condition stays after the pressure ended.
        eviction_pressure_transition_period: Duration = always "evictionPressureTransitionPeriod" Duration::from_mins(5);
        /// Seconds a pod gets at most on a soft eviction; negative: what it asks for.
        eviction_max_pod_grace_period: i32 = zero "evictionMaxPodGracePeriod";
        /// What an eviction must win back at least, by signal.
        eviction_minimum_reclaim: BTreeMap<String, String> = opt "evictionMinimumReclaim";
        /// Add the default hard thresholds that `evictionHard` does not name.
        merge_default_eviction_settings: bool = ptr "mergeDefaultEvictionSettings" false;
        /// Pods for each CPU; 0: no such limit.
        pods_per_core: i32 = zero "podsPerCore";
        /// Attach and detach is the controller manager's work.
        enable_controller_attach_detach: bool = ptr "enableControllerAttachDetach" true;
        /// Refuse to start when kernel settings differ, instead of changing them.
        protect_kernel_defaults: bool = zero "protectKernelDefaults";
        /// Keep the KUBE-MARK iptables chains.
        make_iptables_util_chains: bool = ptr "makeIPTablesUtilChains" true;
        /// No longer used.
        iptables_masquerade_bit: i32 = ptr "iptablesMasqueradeBit" 14;
        /// No longer used.
        iptables_drop_bit: i32 = ptr "iptablesDropBit" 15;
        /// Gates set by file and flags; ask [`crate::Gates`] for effective ones.
        feature_gates: BTreeMap<String, bool> = opt "featureGates";
        /// Refuse to start on a host with swap.
        fail_swap_on: bool = ptr "failSwapOn" true;
        /// Swap for pods.
        memory_swap: MemorySwap = always "memorySwap";
        /// Size at which a container log is rotated, as quantity text.
        container_log_max_size: String = zero "containerLogMaxSize" "10Mi".to_owned();
        /// Log files kept for a container, at least 2.
        container_log_max_files: i32 = ptr "containerLogMaxFiles" 5;
        /// Rotations at a time.
        container_log_max_workers: i32 = ptr "containerLogMaxWorkers" 1;
        /// How often log sizes are looked at, at least 3 s.
        container_log_monitor_interval: Duration = ptr "containerLogMonitorInterval" Duration::from_secs(10);
        /// How ConfigMaps and Secrets are followed.
        config_map_and_secret_change_detection_strategy: ChangeDetectionStrategy
            = ptr "configMapAndSecretChangeDetectionStrategy";
        /// Kept for the system: cpu, memory, ephemeral-storage, pid as quantity text.
        system_reserved: BTreeMap<String, String> = opt "systemReserved";
        /// Kept for Kubernetes' own programs.
        kube_reserved: BTreeMap<String, String> = opt "kubeReserved";
        /// CPUs kept for both (`0-3,8`); overrides the cpu counts above.
        reserved_system_cpus: String = zero "reservedSystemCPUs";
        /// Minor version whose hidden metrics are shown again; empty: none.
        show_hidden_metrics_for_version: String = zero "showHiddenMetricsForVersion";
        /// Cgroup that `system_reserved` is enforced on.
        system_reserved_cgroup: String = zero "systemReservedCgroup";
        /// Cgroup that `kube_reserved` is enforced on.
        kube_reserved_cgroup: String = zero "kubeReservedCgroup";
        /// What is enforced: pods, system-reserved, kube-reserved, their -compressible forms, none.
        enforce_node_allocatable: Vec<String> = opt "enforceNodeAllocatable" vec!["pods".to_owned()];
        /// Sysctls, or patterns ending in `*`, that pods may set beyond the safe ones.
        allowed_unsafe_sysctls: Vec<String> = opt "allowedUnsafeSysctls";
        /// Directory of FlexVolume plugins.
        volume_plugin_dir: String = zero "volumePluginDir"
            "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/".to_owned();
        /// ID of this machine at its cloud.
        provider_id: String = zero "providerID";
        /// Use kernel notifications for memory thresholds.
        kernel_memcg_notification: bool = zero "kernelMemcgNotification";
        /// The log.
        logging: Logging = always "logging";
        /// Serve /logs.
        enable_system_log_handler: bool = ptr "enableSystemLogHandler" true;
        /// Let /logs be queried.
        enable_system_log_query: bool = ptr "enableSystemLogQuery" false;
        /// Time that node shutdown is held up for pods; 0: not at all.
        shutdown_grace_period: Duration = always "shutdownGracePeriod";
        /// Part of it that is kept for critical pods.
        shutdown_grace_period_critical_pods: Duration = always "shutdownGracePeriodCriticalPods";
        /// Or time by priority, instead of the two above.
        shutdown_grace_period_by_pod_priority: Vec<ShutdownGracePeriodByPodPriority>
            = opt "shutdownGracePeriodByPodPriority";
        /// Crash back-off.
        crash_loop_back_off: CrashLoopBackOff = always "crashLoopBackOff";
        /// Memory kept for the system on each NUMA node.
        reserved_memory: Vec<MemoryReservation> = opt "reservedMemory";
        /// Serve /debug/pprof.
        enable_profiling_handler: bool = ptr "enableProfilingHandler" true;
        /// Serve /debug/flags/v.
        enable_debug_flags_handler: bool = ptr "enableDebugFlagsHandler" true;
        /// RuntimeDefault as seccomp profile where a pod names none (the flag `--seccomp-default` asks for it too).
        seccomp_default: bool = ptr "seccompDefault" false;
        /// Factor of memory.high under gate MemoryQoS, above 0 up to 1.
        memory_throttling_factor: Option<f64> = opt "memoryThrottlingFactor" Some(0.9);
        /// Memory protection under gate MemoryQoS.
        memory_reservation_policy: MemoryReservationPolicy = ptr "memoryReservationPolicy";
        /// Taints that the node registers with.
        register_with_taints: Vec<Taint> = opt "registerWithTaints";
        /// Register the node at the API server.
        register_node: bool = ptr "registerNode" true;
        /// Traces; none: off.
        tracing: Option<Tracing> = opt "tracing";
        /// Count ephemeral storage.
        local_storage_capacity_isolation: bool = ptr "localStorageCapacityIsolation" true;
        /// Socket of the container runtime.
        container_runtime_endpoint: String = always "containerRuntimeEndpoint"
            "unix:///run/containerd/containerd.sock".to_owned();
        /// Socket of the image service; empty: the runtime's.
        image_service_endpoint: String = zero "imageServiceEndpoint";
        /// Refuse to start on cgroup v1.
        fail_cgroup_v1: bool = ptr "failCgroupV1" true;
        /// User namespaces of pods.
        user_namespaces: Option<UserNamespaces> = opt "userNamespaces";
    }
}

/// A port as a socket takes it; 0 (none) for a value that validation refuses.
#[must_use]
pub fn port_number(port: i32) -> u16 {
    u16::try_from(port).unwrap_or(0)
}

impl KubeletConfiguration {
    /// What holds when there is no configuration file: Kubernetes keeps the old command line's open defaults then,
    /// and has no hard eviction thresholds.
    #[must_use]
    pub fn without_file() -> Self {
        let mut config = Self::default();
        config.authentication.anonymous.enabled = true;
        config.authentication.webhook.enabled = false;
        config.authorization.mode = crate::nested::AuthorizationMode::AlwaysAllow;
        config.read_only_port = 10255;
        config
    }
}
