//! What must be known before a request can be built.

use std::collections::BTreeMap;

use cri_api::v1;

use super::dns::DnsConfig;
use super::env::EnvSources;
use super::hostname::PodHostname;
use crate::resources::{MemoryQos, ResourceList};

/// Version of the node's cgroup hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// Controllers apart.
    V1,
    /// Unified.
    V2,
}

/// KubeletConfiguration `memorySwap.swapBehavior`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SwapBehavior {
    /// No swap for pods (also the default).
    #[default]
    NoSwap,
    /// Burstable pods get a share in proportion to their memory request (KEP-2400).
    LimitedSwap,
}

/// The feature gates that change a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gates {
    /// ContainerStopSignals, off by default.
    pub container_stop_signals: bool,
    /// EnvFiles, on by default.
    pub env_files: bool,
    /// HostnameOverride, on by default.
    pub hostname_override: bool,
    /// PodLevelResources, on by default.
    pub pod_level_resources: bool,
    /// SELinuxMount, off by default.
    pub selinux_mount: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            container_stop_signals: false,
            env_files: true,
            hostname_override: true,
            pod_level_resources: true,
            selinux_mount: false,
        }
    }
}

/// What is the same for every pod of the node.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// `podLogsDir`.
    pub pod_logs_dir: String,
    /// The node's addresses, the preferred one first. None: not known yet.
    pub host_ips: Option<Vec<String>>,
    /// Node allocatable (downward API defaults, MemoryQoS). None: not known yet.
    pub allocatable: Option<ResourceList>,
    /// MemTotal in bytes.
    pub memory_capacity: i64,
    /// SwapTotal in bytes.
    pub swap_capacity: i64,
    /// Page sizes under `/sys/kernel/mm/hugepages`, in the cgroup file's spelling (`2MB`, `1GB`), in the directory's order.
    pub hugepage_sizes: Vec<String>,
    /// cgroup version.
    pub cgroup: CgroupVersion,
    /// True when the swap controller's file exists in the agent's own cgroup (v2) or at the root (v1).
    pub swap_controller: bool,
    /// `memorySwap.swapBehavior`.
    pub swap_behavior: SwapBehavior,
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in µs.
    pub cpu_cfs_period: i64,
    /// `singleProcessOOMKill`; false is the default on cgroup v2.
    pub single_process_oom_kill: bool,
    /// Gate MemoryQoS; None: off.
    pub memory_qos: Option<MemoryQos>,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// `ROOT/seccomp`.
    pub seccomp_dir: String,
    /// The kernel enforces or permits SELinux: the label of its policy for files of containers, empty when the policy has none.
    pub selinux: Option<String>,
    /// Those `/sys/devices/system/cpu/cpuN/thermal_throttle` that exist.
    pub thermal_throttle_paths: Vec<String>,
    /// Feature gates.
    pub gates: Gates,
}

/// User namespaces, as `hostUsers: false` needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserNamespaceFacts {
    /// The runtime handler can do it.
    pub supported: bool,
    /// Name of the RuntimeClass's handler; empty for the default one.
    pub handler: String,
    /// The pod's range, reserved by the caller. None: not reserved.
    pub mappings: Option<Vec<v1::IdMapping>>,
}

/// What [`super::sandbox_config`] needs.
#[derive(Clone, Debug)]
pub struct SandboxFacts<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// CRI metadata attempt.
    pub attempt: u32,
    /// What [`super::hostname::pod_hostname`] gave. Not needed with host network.
    pub hostname: Option<PodHostname>,
    /// What [`super::dns::pod_dns`] gave.
    pub dns: Option<DnsConfig>,
    /// The pod cgroup's path as the cgroup driver writes it; empty without `cgroupsPerQOS`.
    pub cgroup_parent: String,
    /// User namespaces.
    pub user_namespace: UserNamespaceFacts,
    /// Groups that its volumes ask for (annotation `pv.beta.kubernetes.io/gid`).
    pub volume_gids: Vec<i64>,
    /// A container of the pod holds CPUs of its own: no quota.
    pub exclusive_cpus: bool,
}

/// Whom an image runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageUser {
    /// A number.
    Uid(i64),
    /// A name that only the image can resolve.
    Name(String),
}

impl ImageUser {
    /// From ImageStatus: the number if there is one, else the name, else root.
    pub fn of(image: &v1::Image) -> Self {
        match &image.uid {
            Some(uid) => Self::Uid(uid.value),
            None if !image.username.is_empty() => Self::Name(image.username.clone()),
            None => Self::Uid(0),
        }
    }
}

/// The image that the pull step found or pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedImage {
    /// The id or reference that the pull step gave.
    pub reference: String,
    /// Whom it runs as.
    pub user: ImageUser,
}

/// Where a mounted volume is.
#[derive(Clone, Debug, PartialEq)]
pub enum VolumeSource {
    /// A path of the host.
    HostPath(String),
    /// An image volume: the runtime mounts it.
    Image(v1::ImageSpec),
}

/// A mounted volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeFact {
    /// Where it is.
    pub source: VolumeSource,
    /// The volume itself is read-only (secret, configMap, projected, downwardAPI, image, `readOnly: true` of the source).
    pub read_only: bool,
    /// The runtime must relabel it: managed by the kubelet, supports SELinux and not labelled for an earlier container of the pod.
    pub selinux_relabel: bool,
}

/// A block volume that is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// The symlink to the device on the host; None when it is not there (the container then goes without).
    pub host_path: Option<String>,
    /// From the claim's `readOnly`.
    pub read_only: bool,
}

/// What device plugins and DRA add to a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceFacts {
    /// Device nodes.
    pub devices: Vec<v1::Device>,
    /// Qualified CDI names.
    pub cdi_devices: Vec<String>,
    /// Mounts.
    pub mounts: Vec<v1::Mount>,
    /// Variables, before all others.
    pub envs: Vec<(String, String)>,
    /// Container annotations.
    pub annotations: BTreeMap<String, String>,
}

/// What [`super::container_config`] needs.
#[derive(Clone, Debug)]
pub struct ContainerFacts<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// FNV-1a-32 of image and name, as the annotation `io.kubernetes.container.hash` carries it.
    pub hash: u32,
    /// CRI attempt and restart count.
    pub restart_count: u32,
    /// The image. None: not resolved yet.
    pub image: Option<ResolvedImage>,
    /// The pod's addresses, the node's preferred family first (host network: the node's addresses). Empty: none yet.
    pub pod_ips: Vec<String>,
    /// Mounted volumes by the name in `spec.volumes`.
    pub volumes: BTreeMap<String, VolumeFact>,
    /// Mapped block volumes by the name in `spec.volumes`.
    pub block_devices: BTreeMap<String, BlockDevice>,
    /// Bind targets that the caller prepared for [`super::sub_paths`], by index in `volumeMounts`.
    pub sub_path_targets: BTreeMap<usize, String>,
    /// ConfigMaps, Secrets, services and variable files.
    pub env: EnvSources,
    /// `pods/UID/etc-hosts`. Needed when [`super::needs_hosts_file`].
    pub hosts_file: Option<String>,
    /// The empty file that was made for this start below `containers/NAME`. None: it could not be made; the container goes without.
    pub termination_log: Option<String>,
    /// Device plugins and DRA.
    pub devices: DeviceFacts,
    /// User namespaces.
    pub user_namespace: UserNamespaceFacts,
    /// Groups that the pod's volumes ask for.
    pub volume_gids: Vec<i64>,
    /// The runtime handler mounts recursively read-only.
    pub recursive_read_only: bool,
    /// This container holds CPUs of its own: no quota.
    pub exclusive_cpus: bool,
    /// CRI id of the ephemeral container's target. Needed when the spec names one.
    pub target_id: Option<String>,
}
