//! Every flag of the kubelet 1.36.1: its type, what it sets and whether it is deprecated.

use Deprecated::{Cadvisor, Eviction, In125, In125Csi, Never};
use Kind::{
    Bool, BoolMap, Duration, GoBool, GoDuration, GoInt, Int32, Int64, Ip, Labels, LessMap, Level, List, Map, Multimap,
    PairMap, Quantity, ReservedMemory, Taints, Text, Version, Vmodule,
};

/// How a flag's text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    /// The same through Go's `flag` package, with its shorter messages; so the next two with Go in their name.
    GoBool,
    Int32,
    Int64,
    GoInt,
    /// klog's verbosity.
    Level,
    Duration,
    GoDuration,
    Text,
    Ip,
    Quantity,
    /// Comma-separated.
    List,
    /// `key=value` pairs, comma-separated.
    Map,
    /// One `key=value` pair; a comma belongs to the value.
    PairMap,
    /// `key<value` pairs.
    LessMap,
    /// `key=value` or `key`.
    Labels,
    BoolMap,
    /// `key:value` pairs, each key with several values.
    Multimap,
    Taints,
    ReservedMemory,
    /// `pattern=N` pairs.
    Vmodule,
    Version,
}

impl Kind {
    /// The type as `--help` names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Bool | GoBool => "",
            Int32 => "int32",
            Int64 | GoInt => "int",
            Level => "Level",
            Duration | GoDuration => "duration",
            Text => "string",
            Ip => "ip",
            Quantity => "quantity",
            List => "strings",
            Map | PairMap | LessMap | Labels => "mapStringString",
            BoolMap => "mapStringBool",
            Multimap => "colonSeparatedMultimapStringString",
            Taints => "[]v1.Taint",
            ReservedMemory => "reserved-memory",
            Vmodule => "pattern=N,...",
            Version => "version[=true]",
        }
    }
}

/// Why a flag should not be used; users search for these texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deprecated {
    Never,
    /// It belongs into the configuration file.
    Config,
    Cadvisor,
    Eviction,
    In125,
    In125Csi,
}

impl Deprecated {
    pub(super) fn message(self) -> Option<&'static str> {
        Some(match self {
            Never => return None,
            Self::Config => {
                "This parameter should be set via the config file specified by the Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for more information."
            }
            Cadvisor => {
                "This is a cadvisor flag that was mistakenly registered with the Kubelet. Due to legacy concerns, it will follow the standard CLI deprecation timeline before being removed."
            }
            Eviction => "Use --eviction-hard or --eviction-soft instead. Will be removed in a future version.",
            In125 => "will be removed in 1.25 or later.",
            In125Csi => "will be removed in 1.25 or later. in favor of using CSI.",
        })
    }
}

/// What a flag sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// This field of the configuration.
    Field(&'static str),
    /// The process itself; with the default text.
    Own(&'static str),
}

/// One flag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) target: Target,
    pub(super) deprecated: Deprecated,
}

impl Spec {
    /// The one-letter form.
    pub(super) fn shorthand(&self) -> Option<char> {
        match self.name {
            "v" => Some('v'),
            "help" => Some('h'),
            _ => None,
        }
    }
}

/// Fields whose flags stay.
const KEPT: [&str; 5] =
    ["failCgroupV1", "logging.flushFrequency", "logging.verbosity", "logging.vmodule", "providerID"];

const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

const fn config(name: &'static str, kind: Kind, field: &'static str) -> Spec {
    let mut deprecated = Deprecated::Config;
    let mut i = 0;
    while i < KEPT.len() {
        if same(KEPT[i], field) {
            deprecated = Never;
        }
        i += 1;
    }
    Spec { name, kind, target: Target::Field(field), deprecated }
}

const fn own(name: &'static str, kind: Kind, deprecated: Deprecated, default: &'static str) -> Spec {
    Spec { name, kind, target: Target::Own(default), deprecated }
}

/// The flags, by name.
pub(super) const FLAGS: &[Spec] = &[
    config("address", Ip, "address"),
    config("allowed-unsafe-sysctls", List, "allowedUnsafeSysctls"),
    config("anonymous-auth", Bool, "authentication.anonymous.enabled"),
    own("application-metrics-count-limit", GoInt, Cadvisor, "100"),
    config("authentication-token-webhook", Bool, "authentication.webhook.enabled"),
    config("authentication-token-webhook-cache-ttl", Duration, "authentication.webhook.cacheTTL"),
    config("authorization-mode", Text, "authorization.mode"),
    config("authorization-webhook-cache-authorized-ttl", Duration, "authorization.webhook.cacheAuthorizedTTL"),
    config("authorization-webhook-cache-unauthorized-ttl", Duration, "authorization.webhook.cacheUnauthorizedTTL"),
    own("boot-id-file", Text, Cadvisor, "/proc/sys/kernel/random/boot_id"),
    own("bootstrap-kubeconfig", Text, Never, ""),
    own("cert-dir", Text, Never, "/var/lib/kubelet/pki"),
    config("cgroup-driver", Text, "cgroupDriver"),
    config("cgroup-root", Text, "cgroupRoot"),
    config("cgroups-per-qos", Bool, "cgroupsPerQOS"),
    config("client-ca-file", Text, "authentication.x509.clientCAFile"),
    own("cloud-provider", Text, Never, ""),
    config("cluster-dns", List, "clusterDNS"),
    config("cluster-domain", Text, "clusterDomain"),
    own("config", Text, Never, ""),
    own("config-dir", Text, Never, ""),
    own("container-hints", Text, Cadvisor, "/etc/cadvisor/container_hints.json"),
    config("container-log-max-files", Int32, "containerLogMaxFiles"),
    config("container-log-max-size", Text, "containerLogMaxSize"),
    config("container-runtime-endpoint", Text, "containerRuntimeEndpoint"),
    own("containerd", Text, Cadvisor, "/run/containerd/containerd.sock"),
    own("containerd-namespace", Text, Cadvisor, "k8s.io"),
    config("contention-profiling", Bool, "enableContentionProfiling"),
    config("cpu-cfs-quota", Bool, "cpuCFSQuota"),
    config("cpu-cfs-quota-period", Duration, "cpuCFSQuotaPeriod"),
    config("cpu-manager-policy", Text, "cpuManagerPolicy"),
    config("cpu-manager-policy-options", PairMap, "cpuManagerPolicyOptions"),
    config("cpu-manager-reconcile-period", Duration, "cpuManagerReconcilePeriod"),
    config("enable-controller-attach-detach", Bool, "enableControllerAttachDetach"),
    config("enable-debugging-handlers", Bool, "enableDebuggingHandlers"),
    own("enable-load-reader", GoBool, Cadvisor, ""),
    config("enable-server", Bool, "enableServer"),
    config("enforce-node-allocatable", List, "enforceNodeAllocatable"),
    config("event-burst", Int32, "eventBurst"),
    config("event-qps", Int32, "eventRecordQPS"),
    own("event-storage-age-limit", Text, Cadvisor, "default=0"),
    own("event-storage-event-limit", Text, Cadvisor, "default=0"),
    config("eviction-hard", LessMap, "evictionHard"),
    config("eviction-max-pod-grace-period", Int32, "evictionMaxPodGracePeriod"),
    config("eviction-minimum-reclaim", Map, "evictionMinimumReclaim"),
    config("eviction-pressure-transition-period", Duration, "evictionPressureTransitionPeriod"),
    config("eviction-soft", LessMap, "evictionSoft"),
    config("eviction-soft-grace-period", Map, "evictionSoftGracePeriod"),
    own("exit-on-lock-contention", Bool, Never, ""),
    own("experimental-allocatable-ignore-eviction", Bool, In125, ""),
    own("experimental-mounter-path", Text, In125Csi, ""),
    config("fail-cgroupv1", Bool, "failCgroupV1"),
    config("fail-swap-on", Bool, "failSwapOn"),
    config("feature-gates", BoolMap, "featureGates"),
    config("file-check-frequency", Duration, "fileCheckFrequency"),
    own("global-housekeeping-interval", GoDuration, Cadvisor, "1m0s"),
    config("hairpin-mode", Text, "hairpinMode"),
    config("healthz-bind-address", Ip, "healthzBindAddress"),
    config("healthz-port", Int32, "healthzPort"),
    own("help", Bool, Never, ""),
    own("hostname-override", Text, Never, ""),
    own("housekeeping-interval", GoDuration, Never, "10s"),
    config("http-check-frequency", Duration, "httpCheckFrequency"),
    own("image-credential-provider-bin-dir", Text, Never, ""),
    own("image-credential-provider-config", Text, Never, ""),
    config("image-gc-high-threshold", Int32, "imageGCHighThresholdPercent"),
    config("image-gc-low-threshold", Int32, "imageGCLowThresholdPercent"),
    config("image-service-endpoint", Text, "imageServiceEndpoint"),
    config("kernel-memcg-notification", Bool, "kernelMemcgNotification"),
    config("kube-api-burst", Int32, "kubeAPIBurst"),
    config("kube-api-content-type", Text, "contentType"),
    config("kube-api-qps", Int32, "kubeAPIQPS"),
    config("kube-reserved", Map, "kubeReserved"),
    config("kube-reserved-cgroup", Text, "kubeReservedCgroup"),
    own("kubeconfig", Text, Never, ""),
    config("kubelet-cgroups", Text, "kubeletCgroups"),
    config("local-storage-capacity-isolation", Bool, "localStorageCapacityIsolation"),
    own("lock-file", Text, Never, ""),
    own("log-cadvisor-usage", GoBool, Cadvisor, ""),
    config("log-flush-frequency", Duration, "logging.flushFrequency"),
    config("log-json-info-buffer-size", Quantity, "logging.options.json.infoBufferSize"),
    config("log-json-split-stream", Bool, "logging.options.json.splitStream"),
    config("log-text-info-buffer-size", Quantity, "logging.options.text.infoBufferSize"),
    config("log-text-split-stream", Bool, "logging.options.text.splitStream"),
    config("logging-format", Text, "logging.format"),
    own("machine-id-file", Text, Cadvisor, "/etc/machine-id,/var/lib/dbus/machine-id"),
    config("make-iptables-util-chains", Bool, "makeIPTablesUtilChains"),
    config("manifest-url", Text, "staticPodURL"),
    config("manifest-url-header", Multimap, "staticPodURLHeader"),
    config("max-open-files", Int64, "maxOpenFiles"),
    config("max-pods", Int32, "maxPods"),
    own("maximum-dead-containers", Int32, Eviction, "-1"),
    own("maximum-dead-containers-per-container", Int32, Eviction, "1"),
    config("memory-manager-policy", Text, "memoryManagerPolicy"),
    own("minimum-container-ttl-duration", Duration, Eviction, ""),
    config("minimum-image-ttl-duration", Duration, "imageMinimumGCAge"),
    own("node-ip", Text, Never, ""),
    own("node-labels", Labels, Never, ""),
    config("node-status-max-images", Int32, "nodeStatusMaxImages"),
    config("node-status-update-frequency", Duration, "nodeStatusUpdateFrequency"),
    config("oom-score-adj", Int32, "oomScoreAdj"),
    config("pod-cidr", Text, "podCIDR"),
    config("pod-manifest-path", Text, "staticPodPath"),
    config("pod-max-pids", Int64, "podPidsLimit"),
    config("pods-per-core", Int32, "podsPerCore"),
    config("port", Int32, "port"),
    config("protect-kernel-defaults", Bool, "protectKernelDefaults"),
    config("provider-id", Text, "providerID"),
    config("qos-reserved", Map, "qosReserved"),
    config("read-only-port", Int32, "readOnlyPort"),
    config("register-node", Bool, "registerNode"),
    config("register-with-taints", Taints, "registerWithTaints"),
    config("registry-burst", Int32, "registryBurst"),
    config("registry-qps", Int32, "registryPullQPS"),
    config("reserved-cpus", Text, "reservedSystemCPUs"),
    config("reserved-memory", ReservedMemory, "reservedMemory"),
    config("resolv-conf", Text, "resolvConf"),
    own("root-dir", Text, Never, "/var/lib/kubelet"),
    config("rotate-certificates", Bool, "rotateCertificates"),
    config("rotate-server-certificates", Bool, "serverTLSBootstrap"),
    config("runonce", Bool, "runOnce"),
    own("runtime-cgroups", Text, Never, ""),
    config("runtime-request-timeout", Duration, "runtimeRequestTimeout"),
    own("seccomp-default", Bool, Never, ""),
    config("serialize-image-pulls", Bool, "serializeImagePulls"),
    own("storage-driver-buffer-duration", GoDuration, Cadvisor, "1m0s"),
    own("storage-driver-db", Text, Cadvisor, "cadvisor"),
    own("storage-driver-host", Text, Cadvisor, "localhost:8086"),
    own("storage-driver-password", Text, Cadvisor, "root"),
    own("storage-driver-secure", GoBool, Cadvisor, ""),
    own("storage-driver-table", Text, Cadvisor, "stats"),
    own("storage-driver-user", Text, Cadvisor, "root"),
    config("streaming-connection-idle-timeout", Duration, "streamingConnectionIdleTimeout"),
    config("sync-frequency", Duration, "syncFrequency"),
    config("system-cgroups", Text, "systemCgroups"),
    config("system-reserved", Map, "systemReserved"),
    config("system-reserved-cgroup", Text, "systemReservedCgroup"),
    config("tls-cert-file", Text, "tlsCertFile"),
    config("tls-cipher-suites", List, "tlsCipherSuites"),
    config("tls-min-version", Text, "tlsMinVersion"),
    config("tls-private-key-file", Text, "tlsPrivateKeyFile"),
    config("topology-manager-policy", Text, "topologyManagerPolicy"),
    config("topology-manager-policy-options", Map, "topologyManagerPolicyOptions"),
    config("topology-manager-scope", Text, "topologyManagerScope"),
    config("v", Level, "logging.verbosity"),
    own("version", Version, Never, ""),
    config("vmodule", Vmodule, "logging.vmodule"),
    config("volume-plugin-dir", Text, "volumePluginDir"),
    config("volume-stats-agg-period", Duration, "volumeStatsAggPeriod"),
];
