//! One agent, put together out of the real rooms.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cluster::{Reflector, Scope};
use decide::gc::ContainerGcPolicy;
use decide::userns::{IDS_PER_POD, IdPool, Ranges};
use decide::{admission, config, resources};
use model::api::{Node as NodeObject, Pod};
use model::pod::PodSource;
use model::quantity::Quantity;
use pod::desired::Dispatcher;
use pod::ends::PodEnds;
use pod::events::Events;
use pod::images::{Images, PullLimits};
use pod::pleg::Health;
use pod::ports::{Clock, PodHost, Random, Tasks};
use pod::prober::Prober;
use pod::registry::Registry;
use pod::settings::Settings;
use pod::source::{self, StaticContext};
use pod::status::{Mirrors, StatusQueue, StatusWriter};
use pod::userns::UserNamespaces;
use pod::worker::PodDeps;
use telemetry::LogLimiter;
use telemetry::metrics::Metrics;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::bugs::Bug;
use crate::host::{POD_LOGS, ROOT};
use crate::node::NODE;
use crate::ports::Ports;
use crate::world::World;

/// What of a running agent can be reached.
pub(crate) struct Agent {
    pub(crate) tasks: Tasks,
    pub(crate) cut: CancellationToken,
    pub(crate) registry: Arc<Registry>,
    pub(crate) health: watch::Receiver<Health>,
    pub(crate) ends: PodEnds,
}

/// How the start of an agent went.
pub(crate) enum Birth {
    /// It runs.
    Lives(Agent),
    /// It was cut off meanwhile.
    Cut,
    /// It ended by itself, for this reason.
    Ended(String),
}

/// Puts an agent together, as the program's wiring does; it is the one of this number.
pub(crate) async fn start(world: &Arc<World>, clock: &Clock, seed: u64, number: u64) -> Birth {
    let ports = Ports::new(world.clone(), number);
    let cut = ports.cut().clone();
    let random = Random::seeded(seed.wrapping_add(number << 32));
    tokio::select! {
        biased;
        () = cut.cancelled() => Birth::Cut,
        agent = assemble(world, clock, random, ports) => match agent {
            Ok(agent) => Birth::Lives(agent),
            Err(why) => Birth::Ended(why),
        },
    }
}

async fn assemble(world: &Arc<World>, clock: &Clock, random: Random, ports: Ports) -> Result<Agent, String> {
    let cut = ports.cut().clone();
    let ports = Arc::new(ports);
    let host: Arc<dyn PodHost> = ports.clone();
    let metrics = Arc::new(Metrics::new().map_err(|e| e.to_string())?);
    let tasks = Tasks::default();
    let registry = Arc::new(Registry::default());
    let restored = pod::admit::restore(&*host, ROOT.as_ref()).await?;
    let ranges = Ranges::new(IdPool::all(IDS_PER_POD), IDS_PER_POD, 110)?;
    let user_namespaces = UserNamespaces::restore(ranges, host.clone(), ROOT.as_ref()).await?;
    // From here on nothing is waited for: who is cut off meanwhile leaves no tasks behind.
    let pleg = pod::pleg::start(ports.clone(), registry.clone(), clock.clone(), metrics.clone(), &tasks);
    let admit = pod::admit::start(
        node_facts(),
        rules().ok_or("no rules of admission")?,
        restored,
        host.clone(),
        world.waiting.managers(),
        PathBuf::from(ROOT),
        &tasks,
    );
    let (queue, mirrors) = match world.api {
        Some(_) => {
            let queue = StatusQueue::watched();
            (queue.clone(), Mirrors::new(queue))
        }
        None => Default::default(),
    };
    let images = Images::new(
        ports.clone(),
        ports.clone(),
        clock.clone(),
        metrics.clone(),
        Events::default(),
        PullLimits { parallel: Some(1), qps: 5, burst: 10 },
    );
    let deps = Arc::new(PodDeps {
        images,
        objects: Arc::new(pod::objects::Standalone),
        prober: Prober::new(
            ports.clone(),
            tasks.clone(),
            clock.clone(),
            random.clone(),
            Events::default(),
            metrics.clone(),
        ),
        user_namespaces,
        reader: ports.clone(),
        mutator: ports.clone(),
        plugins: Arc::new(pod::ports::NoPlugins),
        managers: world.waiting.managers(),
        host,
        admit: admit.clone(),
        clock: clock.clone(),
        random: random.clone(),
        metrics,
        registry: registry.clone(),
        status: queue.clone(),
        events: Events::to(Arc::new(world.told.clone())),
        health: pleg.health.clone(),
        limiter: LogLimiter::new(Duration::from_secs(60)),
        settings: settings(clock, world.bug),
    });
    let (sets_tx, sets) = mpsc::channel(16);
    let context = StaticContext { node_name: NODE.to_owned(), gates: manifest::Gates::default() };
    let source =
        source::file::run(world.dir.reader(), Duration::from_secs(20), context, clock.clone(), sets_tx.clone());
    tasks.spawn_until_stop(source);
    let mut sources = vec![PodSource::File];
    if world.api.is_some() {
        sources.push(PodSource::Api);
        let (_, node) = watch::channel(Some(Arc::new(node_object())));
        let writer = StatusWriter::new(ports.clone(), registry.clone(), mirrors.clone(), queue, node, random.clone());
        tasks.spawn_until_stop(writer.run());
        let unit = Arc::new(move || random.unit());
        let (reflector, deltas, _) = Reflector::<Pod>::new(ports, Scope::pods_of_node(NODE), 16, unit);
        tasks.spawn_until_stop(reflector.run(tasks.stop().clone()));
        tasks.spawn_until_stop(source::api::run(deltas, mirrors.clone(), clock.clone(), sets_tx));
    }
    let dispatcher = Dispatcher::new(deps, admit, mirrors, tasks.clone(), sources, pleg.pods);
    let ends = dispatcher.ends();
    tasks.spawn(dispatcher.run(sets));
    Ok(Agent { tasks, cut, registry, health: pleg.health, ends })
}

fn node_object() -> NodeObject {
    let mut node = NodeObject::default();
    node.metadata.name = Some(NODE.to_owned());
    node.metadata.uid = Some("node-uid".to_owned());
    node
}

fn quantity(text: &str) -> Quantity {
    match Quantity::parse(text) {
        Ok(quantity) => quantity,
        Err(e) => panic!("{text}: {e:?}"),
    }
}

fn allocatable() -> resources::ResourceList {
    [("cpu", "64"), ("memory", "64Gi"), ("pods", "110")]
        .map(|(name, amount)| (name.to_owned(), quantity(amount)))
        .into()
}

/// The node as admission sees it.
pub fn node_facts() -> admission::NodeFacts {
    admission::NodeFacts {
        name: NODE.to_owned(),
        labels: BTreeMap::from([("kubernetes.io/os".to_owned(), "linux".to_owned())]),
        allocatable: allocatable(),
        supplemental_groups_policy: true,
        ..Default::default()
    }
}

/// The node's rules of admission.
pub fn rules() -> Option<admission::Rules> {
    Some(admission::Rules {
        sysctls: admission::SysctlAllowlist::new(Some("6.8.0"), &[]).ok()?,
        apparmor_error: None,
        pod_level_resources: true,
        toleration_comparison: false,
        shutting_down: false,
        resize: decide::resize::ResizeRules::default(),
    })
}

fn settings(clock: &Clock, bug: Option<Bug>) -> Settings {
    let longest = if bug == Some(Bug::BackoffReset) { decide::backoff::INITIAL } else { decide::backoff::MAX };
    Settings {
        resize: decide::resize::ResizeRules::default(),
        node_name: NODE.to_owned(),
        runtime_name: "containerd".to_owned(),
        root_dir: PathBuf::from(ROOT),
        sync_frequency: Duration::from_secs(60),
        first_restart_period: decide::backoff::INITIAL,
        max_restart_period: longest,
        restart_gates: decide::restart::RestartGates::default(),
        container_gc: ContainerGcPolicy::default(),
        memory_reserve: None,
        cluster_dns: Vec::new(),
        cluster_domain: "cluster.local".to_owned(),
        resolv_conf: None,
        local_storage_isolation: true,
        cgroups_per_qos: true,
        kubepods: resources::kubepods_name("/"),
        pod_pids_limit: None,
        status_host_ips: Vec::new(),
        runtime_handlers: Vec::new(),
        agent_started: clock.now(),
        forget_on_restart: false,
        node: config::NodeFacts {
            pod_logs_dir: POD_LOGS.to_owned(),
            host_ips: Some(vec!["192.0.2.1".to_owned()]),
            allocatable: Some(allocatable()),
            memory_capacity: 64 << 30,
            swap_capacity: 0,
            hugepage_sizes: Vec::new(),
            cgroup: config::CgroupVersion::V2,
            swap_controller: false,
            swap_behavior: config::SwapBehavior::NoSwap,
            cpu_cfs_quota: true,
            cpu_cfs_period: 100_000,
            single_process_oom_kill: false,
            memory_qos: None,
            seccomp_default: false,
            seccomp_dir: format!("{ROOT}/seccomp"),
            selinux: None,
            thermal_throttle_paths: Vec::new(),
            gates: config::Gates::default(),
        },
    }
}
