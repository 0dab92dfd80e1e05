//! Flags that earlier kubelets had and Kubernetes removed, with what to do instead.

/// A flag that is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Removed {
    pub(super) name: &'static str,
    /// It stood alone; else it took a value.
    pub(super) boolean: bool,
    /// What to do instead.
    pub(super) remedy: &'static str,
}

const DOCKERSHIM: &str = "removed in 1.24 with dockershim; drop it: the container runtime brings its own network and image settings (containerRuntimeEndpoint names its socket)";
const CNI: &str = "removed in 1.24 with dockershim; configure CNI in the container runtime";
const KLOG: &str =
    "removed in 1.26; drop it: lines go to stderr, use -v, vmodule and logging in the configuration file";
const SOURCES: &str = "removed; drop it and restrict host namespaces by admission policy";
const EARLY: &str = "removed; drop it, it has no effect any more";
const RKT: &str = "removed with rkt; drop it";
const CADVISOR: &str = "removed; drop it, it has no effect any more";

const fn text(name: &'static str, remedy: &'static str) -> Removed {
    Removed { name, boolean: false, remedy }
}

const fn switch(name: &'static str, remedy: &'static str) -> Removed {
    Removed { name, boolean: true, remedy }
}

pub(super) const REMOVED: &[Removed] = &[
    switch("add-dir-header", KLOG),
    switch("allow-privileged", "removed; drop it and restrict privileged pods by admission policy"),
    switch("alsologtostderr", KLOG),
    text("api-servers", "removed; name the API server in the file given with --kubeconfig"),
    text(
        "azure-container-registry-config",
        "removed; use a credential provider plugin (--image-credential-provider-config)",
    ),
    switch("babysit-daemons", EARLY),
    text("bootstrap-checkpoint-path", "removed; drop it and use static pods"),
    text("cadvisor-port", "removed; scrape /metrics/cadvisor on the kubelet's port"),
    text("chaos-chance", EARLY),
    text("cloud-config", "removed with the in-tree cloud providers; configure the external cloud controller manager"),
    text("cni-bin-dir", CNI),
    text("cni-cache-dir", CNI),
    text("cni-conf-dir", CNI),
    switch("configure-cbr0", CNI),
    text(
        "container-runtime",
        "removed in 1.27; drop it: only remote runtimes exist, containerRuntimeEndpoint names the socket",
    ),
    switch("containerized", "removed; drop it and run the kubelet on the host"),
    text("docker", CADVISOR),
    switch("docker-disable-shared-pid", "removed; use shareProcessNamespace in the pod"),
    text("docker-endpoint", DOCKERSHIM),
    text("docker-env-metadata-whitelist", CADVISOR),
    text("docker-exec-handler", DOCKERSHIM),
    switch("docker-only", CADVISOR),
    text("docker-root", CADVISOR),
    switch("docker-tls", CADVISOR),
    text("docker-tls-ca", CADVISOR),
    text("docker-tls-cert", CADVISOR),
    text("docker-tls-key", CADVISOR),
    text("dynamic-config-dir", "removed in 1.24; use --config and --config-dir and restart the kubelet"),
    switch("enable-cri", "removed; drop it: the CRI is the only way"),
    switch("enable-custom-metrics", EARLY),
    text("experimental-allowed-unsafe-sysctls", "renamed; set allowedUnsafeSysctls in the configuration file"),
    text("experimental-bootstrap-kubeconfig", "renamed; use --bootstrap-kubeconfig"),
    switch("experimental-check-node-capabilities-before-mount", "removed; drop it and use CSI drivers"),
    switch("experimental-cri", "removed; drop it: the CRI is the only way"),
    switch("experimental-dockershim", DOCKERSHIM),
    text("experimental-dockershim-root-directory", DOCKERSHIM),
    switch("experimental-fail-swap-on", "renamed; set failSwapOn in the configuration file"),
    switch("experimental-kernel-memcg-notification", "renamed; set kernelMemcgNotification in the configuration file"),
    switch("experimental-logging-sanitization", "removed; drop it"),
    text("experimental-nvidia-gpus", "removed; use a device plugin"),
    text("experimental-qos-reserved", "renamed; set qosReserved in the configuration file"),
    text("google-json-key", "removed; use a credential provider plugin (--image-credential-provider-config)"),
    text("host-ipc-sources", SOURCES),
    text("host-network-sources", SOURCES),
    text("host-pid-sources", SOURCES),
    text(
        "image-pull-progress-deadline",
        "removed in 1.24 with dockershim; set it in the container runtime (containerd: image_pull_progress_timeout)",
    ),
    text("iptables-drop-bit", "removed; drop it, it has no effect any more"),
    text("iptables-masquerade-bit", "removed; drop it, it has no effect any more"),
    switch("keep-terminated-pod-volumes", "removed; drop it: volumes of ended pods are always unmounted"),
    text("log-backtrace-at", KLOG),
    text("log-dir", KLOG),
    text("log-file", KLOG),
    text("log-file-max-size", KLOG),
    switch("logtostderr", KLOG),
    text("low-diskspace-threshold-mb", "removed; set evictionHard in the configuration file"),
    text("master-service-namespace", "removed; drop it: services are only read from the pod's own namespace"),
    text("network-plugin", CNI),
    text("network-plugin-dir", CNI),
    text("network-plugin-mtu", CNI),
    text("non-masquerade-cidr", "removed in 1.24 with dockershim; use the CNI plugin's setting or ip-masq-agent"),
    switch("one-output", KLOG),
    text("outofdisk-transition-frequency", "removed; set evictionPressureTransitionPeriod in the configuration file"),
    text(
        "pod-infra-container-image",
        "removed in 1.35; set the sandbox image in the container runtime (containerd: pinned_images.sandbox)",
    ),
    switch("really-crash-for-testing", EARLY),
    switch("reconcile-cidr", EARLY),
    switch("redirect-container-streaming", "removed; drop it: streams go through the kubelet"),
    switch("register-schedulable", "removed; set registerWithTaints in the configuration file"),
    switch("require-kubeconfig", "removed; give --kubeconfig to join a cluster, leave it out for standalone mode"),
    text("resource-container", "renamed; set kubeletCgroups in the configuration file"),
    text("rkt-api-endpoint", RKT),
    text("rkt-path", RKT),
    text("rkt-stage1-image", RKT),
    text("seccomp-profile-root", "removed; profiles are read from seccomp/ below --root-dir"),
    switch("skip-headers", KLOG),
    switch("skip-log-headers", KLOG),
    text("stderrthreshold", KLOG),
    text("system-container", "renamed; set systemCgroups in the configuration file"),
    text("windows-priorityclass", "not on Linux"),
    switch("windows-service", "not on Linux"),
];
