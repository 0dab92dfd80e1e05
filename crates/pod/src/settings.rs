//! Settings and facts of the node that every pod's work needs; fixed for the life of the process.

use std::path::PathBuf;
use std::time::Duration;

use cri_api::v1;
use decide::config::NodeFacts;
use decide::gc::ContainerGcPolicy;
use decide::resize::ResizeRules;
use decide::resources::MemoryReserve;
use decide::restart::RestartGates;
use model::cgroup::CgroupName;

/// What is configured or was found out about the node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What can be resized.
    pub resize: ResizeRules,
    /// The node's name.
    pub node_name: String,
    /// The runtime's name, the scheme of container ids in status (`containerd://…`).
    pub runtime_name: String,
    /// The root directory (`--root-dir`).
    pub root_dir: PathBuf,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
    /// First wait of the crash back-off.
    pub first_restart_period: Duration,
    /// `crashLoopBackOff.maxContainerRestartPeriod`.
    pub max_restart_period: Duration,
    /// Gates of container restart rules.
    pub restart_gates: RestartGates,
    /// Which dead containers are kept.
    pub container_gc: ContainerGcPolicy,
    /// `clusterDNS`.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`.
    pub cluster_domain: String,
    /// `resolvConf`; None: pods start from an empty one.
    pub resolv_conf: Option<PathBuf>,
    /// `localStorageCapacityIsolation`: limits of local storage hold.
    pub local_storage_isolation: bool,
    /// `cgroupsPerQOS`.
    pub cgroups_per_qos: bool,
    /// The cgroup above all pods.
    pub kubepods: CgroupName,
    /// Memory that is kept for the better classes of pods (gate QOSReserved); None: the classes' groups have no limit.
    pub memory_reserve: Option<MemoryReserve>,
    /// `podPidsLimit`; None: no limit of its own.
    pub pod_pids_limit: Option<i64>,
    /// Addresses that statuses show; empty in standalone mode, as with Go.
    pub status_host_ips: Vec<std::net::IpAddr>,
    /// The runtime's handlers as they were when the agent started: they count until its status is asked anew.
    pub runtime_handlers: Vec<v1::RuntimeHandler>,
    /// When this agent started.
    pub agent_started: jiff::Timestamp,
    /// Gate ChangeContainerStatusOnKubeletRestart.
    pub forget_on_restart: bool,
    /// What requests to the runtime need of the node.
    pub node: NodeFacts,
}
