//! What this host is: facts that are read once at start, and the node's values that follow from them and the configuration.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use config::{
    CgroupDriver, CpuManagerPolicy, Flags, Gate, Gates, KubeletConfiguration, MemoryManagerPolicy, SwapBehavior,
};
use decide::admission;
use decide::config::{self as requests, CgroupVersion};
use decide::cpus::CpuSet;
use decide::gc::images::ImageGcPolicy;
use decide::resize::ResizeRules;
use decide::resources::{
    self, EvictionReserve, MemoryQos, MemoryReserve, Reservations, Reserve, ReservedGroup, ResourceList,
};
use decide::userns::{self, IdPool, Ranges};
use host::cgroup::CgroupLayout;
use model::cgroup::CgroupResources;
use model::quantity::{Format, Quantity};
use node::images::Space;
use tracing::{info, warn};

/// Where the kernel shows itself.
pub(crate) const PROC: &str = "/proc";
pub(crate) const SYS: &str = "/sys";
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// The node's name: `--hostname-override`, else the host's name in lower case.
pub(crate) fn name(flags: &Flags) -> Result<String, Box<dyn Error + Send + Sync>> {
    let name = match flags.hostname_override() {
        Some(name) => name.trim().to_lowercase(),
        None => host::proc::hostname()?.trim().to_lowercase(),
    };
    if name.is_empty() {
        return Err("the node has no name: set a hostname or --hostname-override".into());
    }
    Ok(name)
}

/// The node's addresses, main one first. Unknown in a host without routes, which is no fault in standalone mode.
pub(crate) fn addresses(flags: &Flags, name: &str) -> Vec<IpAddr> {
    let given = flags.node_ips();
    let chosen: Vec<IpAddr> = given.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    if !chosen.is_empty() {
        return chosen;
    }
    let prefer_v6 = given.first().is_some_and(IpAddr::is_ipv6);
    match host::proc::detect_node_ip(Path::new(PROC), Path::new(SYS), name, prefer_v6) {
        Ok(ip) => vec![ip],
        Err(e) => {
            info!(reason = e.full(), "The node's address is not known");
            Vec::new()
        }
    }
}

/// This machine's architecture as Kubernetes names it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Resources of the node.
#[derive(Clone, Debug)]
pub(crate) struct Resources {
    pub(crate) capacity: ResourceList,
    pub(crate) cpus: Vec<usize>,
    pub(crate) max_pids: Option<u64>,
    pub(crate) allocatable: ResourceList,
    pub(crate) reservations: Reservations,
    pub(crate) memory: host::proc::MemoryInfo,
    pub(crate) hugepage_sizes: Vec<String>,
}

/// Capacity and what of it is for pods.
pub(crate) fn resources(
    config: &KubeletConfiguration,
    flags: &Flags,
) -> Result<Resources, Box<dyn Error + Send + Sync>> {
    let (proc, sys) = (Path::new(PROC), Path::new(SYS));
    let cpus = host::proc::online_cpus(sys)?;
    let memory = host::proc::memory(proc)?;
    let storage = host::fsx::filesystem(flags.root_dir())?;
    let huge = host::proc::huge_pages(sys)?;
    let whole = |n: u64, format| Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), format);
    let per_core = i64::from(config.pods_per_core) * i64::try_from(cpus.len())?;
    let max = i64::from(config.max_pods);
    let pods = if per_core > 0 { max.min(per_core) } else { max };
    let mut capacity = ResourceList::from([
        ("cpu".to_owned(), whole(cpus.len() as u64, Format::DecimalSI)),
        ("memory".to_owned(), whole(memory.total, Format::BinarySI)),
        ("ephemeral-storage".to_owned(), whole(storage.capacity, Format::BinarySI)),
        ("pods".to_owned(), Quantity::from_value(pods, Format::DecimalSI)),
    ]);
    for pages in &huge {
        let name = format!("hugepages-{}", whole(pages.size, Format::BinarySI));
        capacity.insert(name, whole(pages.size * pages.count, Format::BinarySI));
    }
    let threshold = |signal: &str| config.eviction_hard.get(signal).and_then(|text| reserve(text));
    let eviction = if flags.allocatable_ignores_eviction() {
        EvictionReserve::default()
    } else {
        EvictionReserve {
            memory_available: threshold("memory.available"),
            nodefs_available: threshold("nodefs.available"),
        }
    };
    let mut reservations = Reservations {
        kube: resources::reserved_list(&config.kube_reserved)?,
        system: resources::reserved_list(&config.system_reserved)?,
        eviction,
    };
    let reserved =
        CpuSet::parse(&config.reserved_system_cpus).map_err(|e| format!("unable to parse reserved-cpus list: {e}"))?;
    if !reserved.is_empty() {
        let online: CpuSet = cpus.iter().filter_map(|cpu| u32::try_from(*cpu).ok()).collect();
        if !reserved.is_subset(&online) {
            let given = &config.reserved_system_cpus;
            return Err(format!("reserved-cpus: {given} is not a subset of online-cpus: {online}").into());
        }
        info!(cpus = %reserved, "reservedSystemCPUs takes the place of the CPU in kubeReserved and systemReserved");
        reservations.kube.remove("cpu");
        reservations.system.insert("cpu".to_owned(), whole(reserved.len() as u64, Format::DecimalSI));
    }
    resources::validate_reservations(&capacity, &reservations)?;
    let max_pids = host::proc::max_pids(proc)
        .inspect_err(|e| warn!(err = e.full(), "The node's number of processes is not known and will not be limited"))
        .ok();
    Ok(Resources {
        allocatable: resources::allocatable(&capacity, &reservations),
        capacity,
        cpus,
        max_pids,
        reservations,
        memory,
        hugepage_sizes: huge.into_iter().map(|p| p.name).collect(),
    })
}

impl Resources {
    /// What is written into the cgroup above all pods; `enforce_pods`: `pods` is in `enforceNodeAllocatable`.
    pub(crate) fn kubepods(&self, enforce_pods: bool) -> CgroupResources {
        let mut capacity = self.capacity.clone();
        // Not among the node's resources that the API shows.
        if let Some(pids) = self.max_pids.and_then(|n| i64::try_from(n).ok()) {
            capacity.insert(resources::PIDS.to_owned(), Quantity::from_value(pids, Format::DecimalSI));
        }
        resources::kubepods_resources(&capacity, &self.reservations, enforce_pods, &self.hugepage_sizes, &self.cpus)
    }
}

/// When images are collected.
pub(crate) fn image_gc(config: &KubeletConfiguration) -> ImageGcPolicy {
    let percent = |p: i32| u64::try_from(p).unwrap_or(100);
    ImageGcPolicy {
        high_percent: percent(config.image_gc_high_threshold_percent),
        low_percent: percent(config.image_gc_low_threshold_percent),
        min_age: config.image_minimum_gc_age,
        max_age: config.image_maximum_gc_age,
    }
}

/// The size of the file system at a mount point. Blocks.
pub(crate) fn space(mountpoint: &str) -> Result<Space, String> {
    let figures = host::fsx::filesystem(Path::new(mountpoint)).map_err(|e| e.full())?;
    Ok(Space { capacity: figures.capacity, available: figures.available })
}

/// All pods together are held to what is allocatable (`enforceNodeAllocatable`).
pub(crate) fn enforces_pods(config: &KubeletConfiguration) -> bool {
    config.enforce_node_allocatable.iter().any(|e| e == "pods")
}

/// The groups of what is reserved, with what is written into them.
pub(crate) fn reserved_groups(
    config: &KubeletConfiguration,
    gates: &Gates,
    layout: &CgroupLayout,
    facts: &Resources,
) -> Vec<ReservedGroup> {
    let protect = gates.enabled(Gate::MemoryQoS) && layout.version == host::cgroup::CgroupVersion::V2;
    resources::reserved_groups(
        &config.enforce_node_allocatable,
        (&config.system_reserved_cgroup, &config.kube_reserved_cgroup),
        &facts.reservations,
        &facts.hugepage_sizes,
        protect,
    )
}

/// Memory that is kept for the better classes of pods (gate QOSReserved, `qosReserved`).
pub(crate) fn memory_reserve(config: &KubeletConfiguration, gates: &Gates, facts: &Resources) -> Option<MemoryReserve> {
    let percent = config.qos_reserved.get(resources::MEMORY).filter(|_| gates.enabled(Gate::QOSReserved))?;
    let percent = percent.strip_suffix('%')?.parse().ok()?;
    Some(MemoryReserve { percent, allocatable: facts.kubepods(true).memory_limit? })
}

/// A threshold's value: a percentage or a quantity.
fn reserve(text: &str) -> Option<Reserve> {
    match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f32>().ok().map(|p| Reserve::Percentage(p / 100.0)),
        None => Quantity::parse(text).ok().map(Reserve::Quantity),
    }
}

/// Why this host may not be a node with this configuration, in the Go kubelet's words; what the configuration itself forbids was found with it.
pub(crate) fn refusal(config: &KubeletConfiguration) -> Option<String> {
    let swap = host::proc::swap_devices(Path::new(PROC)).unwrap_or_default();
    (config.fail_swap_on && !swap.is_empty()).then(|| {
        format!(
            "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false. /proc/swaps contained: {swap:?}"
        )
    })
}

/// What requests to the runtime need to know of the node.
pub(crate) fn request_facts(
    config: &KubeletConfiguration,
    flags: &Flags,
    gates: &Gates,
    layout: &CgroupLayout,
    node: &Resources,
    addresses: &[IpAddr],
) -> requests::NodeFacts {
    let v2 = layout.version == host::cgroup::CgroupVersion::V2;
    let memory_qos = (v2 && gates.enabled(Gate::MemoryQoS)).then(|| MemoryQos {
        throttling_factor: config.memory_throttling_factor.unwrap_or(0.9),
        tiered_reservation: config.memory_reservation_policy == config::MemoryReservationPolicy::TieredReservation,
        page_size: i64::try_from(rustix::param::page_size()).unwrap_or(4096),
    });
    requests::NodeFacts {
        pod_logs_dir: config.pod_logs_dir.clone(),
        host_ips: (!addresses.is_empty()).then(|| addresses.iter().map(ToString::to_string).collect()),
        allocatable: Some(node.allocatable.clone()),
        memory_capacity: i64::try_from(node.memory.total).unwrap_or(i64::MAX),
        swap_capacity: i64::try_from(node.memory.swap_total).unwrap_or(i64::MAX),
        hugepage_sizes: node.hugepage_sizes.clone(),
        cgroup: if v2 { CgroupVersion::V2 } else { CgroupVersion::V1 },
        swap_controller: swap_controller(v2),
        swap_behavior: match config.memory_swap.swap_behavior {
            Some(SwapBehavior::LimitedSwap) => requests::SwapBehavior::LimitedSwap,
            _ => requests::SwapBehavior::NoSwap,
        },
        cpu_cfs_quota: config.cpu_cfs_quota,
        cpu_cfs_period: i64::try_from(config.cpu_cfs_quota_period.as_micros()).unwrap_or(100_000),
        single_process_oom_kill: config.single_process_oom_kill.unwrap_or(!v2),
        memory_qos,
        seccomp_default: config.seccomp_default || flags.seccomp_default(),
        seccomp_dir: flags.root_dir().join("seccomp").display().to_string(),
        selinux: Path::new("/sys/fs/selinux/enforce").exists().then(selinux_file_context),
        thermal_throttle_paths: host::proc::thermal_throttle_paths(Path::new(SYS)).unwrap_or_default(),
        gates: requests::Gates {
            container_stop_signals: gates.enabled(Gate::ContainerStopSignals),
            env_files: gates.enabled(Gate::EnvFiles),
            hostname_override: gates.enabled(Gate::HostnameOverride),
            pod_level_resources: gates.enabled(Gate::PodLevelResources),
            selinux_mount: gates.enabled(Gate::SELinuxMount),
        },
    }
}

/// The label of the policy for files of containers; empty: it has none. Where it is: go-selinux's places.
fn selinux_file_context() -> String {
    let config = std::fs::read_to_string("/etc/selinux/config").unwrap_or_default();
    let policy = config.lines().rev().find_map(|l| Some(l.trim().strip_prefix("SELINUXTYPE=")?.trim().to_owned()));
    let policy = format!("/etc/selinux/{}/contexts/lxc_contexts", policy.unwrap_or_else(|| "targeted".to_owned()));
    let texts = ["/usr/share/containers/selinux/contexts", &policy].into_iter().map(std::fs::read_to_string);
    texts.flatten().next().and_then(|text| decide::selinux::file_context(&text)).unwrap_or_default()
}

/// Whether swap can be limited: on v2 by the file in the agent's own cgroup, on v1 by the one at the root.
fn swap_controller(v2: bool) -> bool {
    if !v2 {
        return Path::new("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists();
    }
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|l| l.strip_prefix("0::")).unwrap_or("/");
    PathBuf::from(format!("{CGROUPS}{path}")).join("memory.swap.max").exists()
}

/// What admission needs to know of the node, in standalone mode: the labels are those that it would register with.
pub(crate) fn admission_facts(
    name: &str,
    flags: &Flags,
    node: &Resources,
    groups_policy: bool,
) -> admission::NodeFacts {
    let arch = architecture();
    let mut labels: BTreeMap<String, String> = flags.node_labels();
    for (key, value) in [
        ("kubernetes.io/hostname", name),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch),
    ] {
        labels.insert(key.to_owned(), value.to_owned());
    }
    admission::NodeFacts {
        name: name.to_owned(),
        labels,
        taints: Vec::new(),
        allocatable: node.allocatable.clone(),
        supplemental_groups_policy: groups_policy,
        pressures: Vec::new(),
    }
}

/// Rules of admission from the configuration.
pub(crate) fn admission_rules(
    config: &KubeletConfiguration,
    gates: &Gates,
) -> Result<admission::Rules, Box<dyn Error + Send + Sync>> {
    let kernel = host::proc::kernel_version();
    let apparmor = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
    Ok(admission::Rules {
        sysctls: admission::SysctlAllowlist::new(Some(&kernel), &config.allowed_unsafe_sysctls)?,
        apparmor_error: (!apparmor.starts_with('Y')).then(|| "AppArmor is not enabled on the host".to_owned()),
        pod_level_resources: gates.enabled(Gate::PodLevelResources),
        toleration_comparison: gates.enabled(Gate::TaintTolerationComparisonOperators),
        shutting_down: false,
        resize: resize_rules(config, gates),
    })
}

/// What this node can resize.
pub(crate) fn resize_rules(config: &KubeletConfiguration, gates: &Gates) -> ResizeRules {
    let v2 = Path::new(CGROUPS).join("cgroup.controllers").exists();
    ResizeRules {
        init_containers: gates.enabled(Gate::InPlacePodVerticalScalingInitContainers),
        pod_level: gates.enabled(Gate::InPlacePodLevelResourcesVerticalScaling),
        exclusive_cpus: config.cpu_manager_policy == CpuManagerPolicy::Static
            && !gates.enabled(Gate::InPlacePodVerticalScalingExclusiveCPUs),
        exclusive_memory: config.memory_manager_policy == MemoryManagerPolicy::Static
            && !gates.enabled(Gate::InPlacePodVerticalScalingExclusiveMemory),
        swap: v2 && config.memory_swap.swap_behavior == Some(SwapBehavior::LimitedSwap) && swap_controller(v2),
    }
}

/// Settings of this process: files it may open, and how unlikely the kernel is to kill it.
pub(crate) fn set_up_process(config: &KubeletConfiguration) {
    let wanted = u64::try_from(config.max_open_files).unwrap_or(1_000_000);
    let now = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = rustix::process::Rlimit { current: Some(wanted), maximum: Some(wanted) };
    if now.current.is_some_and(|n| n < wanted)
        && rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).is_err()
    {
        let most = rustix::process::Rlimit { current: now.maximum, ..now };
        if let Err(e) = rustix::process::setrlimit(rustix::process::Resource::Nofile, most) {
            warn!(err = &e as &dyn Error, wanted, "Failed to set rlimit on max file handles");
        }
    }
    if let Err(e) = host::proc::write_oom_score_adj(Path::new(PROC), None, config.oom_score_adj) {
        warn!(
            err = e.full(),
            value = config.oom_score_adj,
            "Failed to set the agent's own oom_score_adj, going on without"
        );
    }
}

/// The cgroup driver in force: the runtime's word, else the configuration's.
pub(crate) fn cgroup_driver(config: &KubeletConfiguration, runtime: Option<i32>) -> CgroupDriver {
    use cri_api::v1::CgroupDriver as Told;
    match runtime.and_then(|d| Told::try_from(d).ok()) {
        Some(Told::Systemd) => CgroupDriver::Systemd,
        Some(Told::Cgroupfs) => CgroupDriver::Cgroupfs,
        None => config.cgroup_driver,
    }
}

/// The ids that pods with `hostUsers: false` may get: those that `/etc/subuid` gives the user `kubelet`, where there is such a user and the program
/// `getsubids`; else all but the host's own.
///
/// # Errors
/// Go's message: the ids do not fit the configuration, or the user's cannot be had.
pub(crate) fn id_ranges(config: &KubeletConfiguration) -> Result<Ranges, String> {
    let ids = config.user_namespaces.as_ref().and_then(|u| u.ids_per_pod);
    let ids = ids.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).unwrap_or(userns::IDS_PER_POD);
    let pool = kubelet_ids()?.unwrap_or_else(|| IdPool::all(ids));
    let max_pods = u32::try_from(config.max_pods).unwrap_or(0);
    Ranges::new(pool, ids, max_pods).map_err(|e| format!("create user namespace manager: {e}"))
}

/// The subordinate ids of the user `kubelet`; None: there is no such user, or nobody to ask.
fn kubelet_ids() -> Result<Option<IdPool>, String> {
    const USER: &str = "kubelet";
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    if !users.lines().any(|line| line.split(':').next() == Some(USER)) {
        return Ok(None);
    }
    let ask = |arguments: &[&str]| std::process::Command::new("getsubids").args(arguments).output();
    let failed = |what: &str| format!("error retrieving additional {what} for user \"{USER}\"");
    let uids = match ask(&[USER]) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        answer => answer.map_err(|e| format!("{}: {e}", failed("uids")))?,
    };
    let gids = ask(&["-g", USER]).map_err(|e| format!("{}: {e}", failed("gids")))?;
    // The user is there and the program is: then it must have ids, wherever they are kept.
    if !uids.status.success() || !gids.status.success() {
        return Err(failed("ids"));
    }
    if uids.stdout != gids.stdout {
        return Err(format!("mismatched subuids and subgids for user \"{USER}\""));
    }
    IdPool::parse_getsubids(&String::from_utf8_lossy(&uids.stdout)).map(Some)
}
