//! What the managers of devices, CPUs and memory go by, out of the configuration, and their start.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use ::managers::{ClaimObjects, CpuConfig, Managers, MemoryConfig};
use config::{
    CpuManagerPolicy, Flags, Gate, Gates, KubeletConfiguration, MemoryManagerPolicy, TopologyManagerPolicy,
    TopologyManagerScope,
};
use decide::cpus::{self, CpuSet};
use decide::memory::Amounts;
use decide::placement::{Policy, Scope};
use model::pod::PodUid;
use pod::ports::Tasks;
use pod::registry::Registry;
use telemetry::metrics::Metrics;

use crate::node::{self, Resources};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Where device plugins' sockets are, wherever the root directory is, for plugins know no other place.
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
/// Another place, below the root directory unless it is absolute: tests have several agents on one host.
const DEVICE_PLUGINS_VARIABLE: &str = "RUBELET_DEVICE_PLUGINS_DIR";

/// What is configured, and what of the machine it is for.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) config: &'a KubeletConfiguration,
    pub(crate) flags: &'a Flags,
    pub(crate) gates: &'a Gates,
    pub(crate) facts: &'a Resources,
}

/// Starts the managers.
pub(crate) async fn start(
    given: Given<'_>,
    claims: Arc<dyn ClaimObjects>,
    registry: &Arc<Registry>,
    metrics: &Arc<Metrics>,
    tasks: &Tasks,
) -> Result<Managers, Failure> {
    let settings = settings(given)?;
    let registry = registry.clone();
    let health_changed = Arc::new(move |pods: &BTreeSet<String>| {
        for entry in pods.iter().filter_map(|uid| registry.get(&PodUid::new(uid.as_str()))) {
            entry.wake();
        }
    });
    Managers::start(settings, claims, health_changed, metrics.clone(), tasks).await
}

fn settings(Given { config, flags, gates, facts }: Given<'_>) -> Result<::managers::Config, Failure> {
    let place = std::env::var_os(DEVICE_PLUGINS_VARIABLE).filter(|dir| !dir.is_empty());
    let topology = host::proc::numa_topology(Path::new(node::SYS), facts.memory.total)?;
    let option =
        |of: &BTreeMap<String, String>, name: &str| of.get(name).is_some_and(|v| config::parse_bool(v) == Ok(true));
    let of_cpus = |name: &str| option(&config.cpu_manager_policy_options, name);
    let cpus = (config.cpu_manager_policy == CpuManagerPolicy::Static).then(|| CpuConfig {
        options: cpus::Options {
            full_physical_only: of_cpus("full-pcpus-only"),
            distribute_across_numa: of_cpus("distribute-cpus-across-numa"),
            align_by_socket: of_cpus("align-by-socket"),
            distribute_across_cores: of_cpus("distribute-cpus-across-cores"),
            strict_reservation: of_cpus("strict-cpu-reservation"),
            prefer_align_by_uncore_cache: of_cpus("prefer-align-cpus-by-uncorecache"),
        },
        reserved: CpuSet::parse(&config.reserved_system_cpus).unwrap_or_default(),
        count: facts
            .reservations
            .total(&facts.capacity)
            .get("cpu")
            .map_or(0, |q| usize::try_from(q.milli_value()).unwrap_or(0).div_ceil(1000)),
    });
    let memory = match config.memory_manager_policy {
        MemoryManagerPolicy::None => None,
        MemoryManagerPolicy::Static => Some(memory(config, facts)?),
    };
    Ok(::managers::Config {
        root: flags.root_dir().to_owned(),
        device_plugins: flags.root_dir().join(place.unwrap_or_else(|| DEVICE_PLUGINS.into())),
        health_status: gates.enabled(Gate::ResourceHealthStatus),
        health_message: gates.enabled(Gate::ResourceHealthStatusMessage),
        no_quota: gates.enabled(Gate::DisableCPUQuotaWithExclusiveCPUs),
        cpus,
        memory,
        policy: match config.topology_manager_policy {
            TopologyManagerPolicy::None => Policy::None,
            TopologyManagerPolicy::BestEffort => Policy::BestEffort,
            TopologyManagerPolicy::Restricted => Policy::Restricted,
            TopologyManagerPolicy::SingleNumaNode => Policy::SingleNumaNode,
        },
        scope: match config.topology_manager_scope {
            TopologyManagerScope::Container => Scope::Container,
            TopologyManagerScope::Pod => Scope::Pod,
        },
        prefer_closest: option(&config.topology_manager_policy_options, "prefer-closest-numa-nodes"),
        max_nodes: config.topology_manager_policy_options.get("max-allowable-numa-nodes").and_then(|n| n.parse().ok()),
        topology,
    })
}

fn memory(config: &KubeletConfiguration, facts: &Resources) -> Result<MemoryConfig, Failure> {
    let mut reserved: BTreeMap<i64, Amounts> = BTreeMap::new();
    for reservation in &config.reserved_memory {
        let of_node = reserved.entry(i64::from(reservation.numa_node)).or_default();
        for (kind, amount) in &reservation.limits {
            let bytes = u64::try_from(amount.value());
            of_node.insert(kind.clone(), bytes.map_err(|_| "could not covert a variable of type Quantity to int64")?);
        }
    }
    let whole = facts.reservations.total(&facts.capacity);
    let kinds = whole.iter().filter(|(name, _)| *name == "memory" || name.starts_with("hugepages-"));
    let whole = kinds.filter_map(|(name, q)| Some((name.clone(), u64::try_from(q.value()).ok()?))).collect();
    Ok(MemoryConfig { reserved, whole })
}
