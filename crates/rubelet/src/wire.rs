//! The map of the program: makes the values, hands out the rights, starts the tasks. Nothing is decided here.
//!
//! ```text
//!   config, flags ─▶ facts of the host ─▶ ports ─▶ [bind sockets] ─▶ tasks
//!                                                                     source ─▶ dispatcher ─▶ workers ─▶ runtime
//!                                                                                  ▲                        │
//!                                                                                  └──────── pleg ◀─────────┘
//! ```
//!
//! The right to change the runtime is the one `Arc<dyn RuntimeMutator>` below: workers hold it, image pulls and probes on their behalf, the
//! log rotator, the keeper of the CPU pool and the teller of the pods' address range narrowed forms of it.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ::managers::{ClaimObjects, CpusetSetter, NoClaims, keep_pool, serve_pod_resources};
use ::node::eviction::{Eviction, EvictionPorts};
use ::node::shutdown::ShutdownPorts;
use config::{CgroupDriver, Flags, Gate, Gates, KubeletConfiguration};
use cri::port::RuntimeStreaming;
use cri::{CallObserver, CriClient, CriError, RuntimeMutator, RuntimeReader};
use decide::credentials::records::Policy;
use decide::gc::ContainerGcPolicy;
use decide::node::NodeEvent;
use decide::resources;
use decide::restart::RestartGates;
use host::cgroup::{CgroupLayout, CgroupManager, HostCgroups, SystemdBus};
use model::pod::PodSource;
use plugins::csi::Drivers;
use plugins::volumes::{NodeView, Objects};
use pod::desired::Dispatcher;
use pod::events::Events;
use pod::images::{Images, PullLimits, Records};
use pod::logs::{LogLimits, LogReopener};
use pod::objects::{PodObjects, Standalone};
use pod::ports::{Clock, PodHost, Random, Tasks};
use pod::prober::Prober;
use pod::registry::Registry;
use pod::settings::Settings;
use pod::source::{self, SourceUpdate, StaticContext};
use pod::status::{Mirrors, StatusQueue, StatusWriter};
use pod::userns::UserNamespaces;
use pod::worker::PodDeps;
use serve::{Bound, Checks, CriContainers, Health, Server};
use telemetry::LogLimiter;
use telemetry::klog;
use telemetry::metrics::{BuildInfo, Metrics};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::claims::ClusterClaims;
use crate::credentials::{self, NodeKeyring, Places};
use crate::eviction;
use crate::figures;
use crate::https;
use crate::join::Cluster;
use crate::machine::{self, AllPods};
use crate::managers;
use crate::manifest_dir::DiskManifests;
use crate::node;
use crate::node_host::{NodeHost, Paths};
use crate::node_object::{self, Parts};
use crate::oom;
use crate::plugin_volumes::{self, ClusterVolumes};
use crate::pod_cidr::PodCidr;
use crate::shutdown;
use crate::startup;
use crate::version;
use crate::view::{ApiView, View};

type Failure = Box<dyn Error + Send + Sync>;

/// What the configuration came to.
pub(crate) struct Input {
    pub(crate) flags: Flags,
    pub(crate) config: KubeletConfiguration,
    pub(crate) gates: Gates,
    pub(crate) layout: CgroupLayout,
    pub(crate) log: klog::Handle,
}

/// A program that runs: its tasks, and its servers in the order in which they are drained.
pub(crate) struct Running {
    pub(crate) tasks: Tasks,
    pub(crate) servers: Vec<Bound>,
    /// What the service manager's watchdog goes by.
    pub(crate) health: Health,
}

/// Counts calls to the runtime and to drivers.
struct CallMetrics(Arc<Metrics>);

impl CallObserver for CallMetrics {
    fn observed(&self, call: &'static str, took: Duration, error: Option<&CriError>) {
        self.0.runtime_operation(call, took, error.is_some());
    }
}

impl plugins::csi::CallObserver for CallMetrics {
    fn called(&self, driver: &str, method: &'static str, code: &'static str, took: Duration) {
        self.0.beside.csi_call(driver, method, code, took);
    }
}

/// Builds, binds and starts everything.
///
/// # Errors
/// What keeps this host from being a node: the runtime cannot be used, a port is taken, a directory cannot be made.
pub(crate) async fn start(input: Input) -> Result<Running, Failure> {
    let Input { flags, config, gates, layout, log } = input;
    let node_name = node::name(&flags)?;
    let metrics = Arc::new(Metrics::new()?);
    describe(&metrics, &gates, &node_name);
    metrics.cgroup_version.set(if layout.version == host::cgroup::CgroupVersion::V2 { 2.0 } else { 1.0 });

    make_directories(&flags, &config)?;
    let runtime = Runtime::connect(&config, &gates, &metrics).await?;
    let tasks = Tasks::default();
    let cluster = Cluster::connect(&flags, &config, &node_name, &metrics, &tasks)?;
    let addresses = node::addresses(&flags, &node_name);
    let facts = node::resources(&config, &flags)?;
    let kubepods = resources::kubepods_name(&config.cgroup_root);
    let cgroups = cgroup_manager(layout.clone(), node::cgroup_driver(&config, runtime.cgroup_driver));
    let kubepods_path = cgroups.cri_cgroup_parent(&kubepods);
    let node_events = node_object::events(cluster.as_ref(), &node_name);
    node_events.event(&NodeEvent::starting());
    machine::tune_kernel(Path::new(node::PROC), config.protect_kernel_defaults)?;
    let all_pods = AllPods {
        cgroups: cgroups.clone(),
        name: kubepods.clone(),
        resources: facts.kubepods(node::enforces_pods(&config)),
    };
    let host: Arc<dyn PodHost> = Arc::new(NodeHost::new(
        Paths {
            root: flags.root_dir().to_owned(),
            pod_logs: PathBuf::from(&config.pod_logs_dir),
            container_logs: PathBuf::from(decide::config::names::CONTAINER_LOGS_DIR),
            proc: PathBuf::from(node::PROC),
        },
        cgroups.clone(),
        kubepods.clone(),
        addresses.iter().map(ToString::to_string).collect(),
    ));
    if config.cgroups_per_qos {
        all_pods.enforce(node_events.clone(), &tasks).await?;
    }
    machine::reserve(&*cgroups, &node::reserved_groups(&config, &gates, &layout, &facts), &*node_events)?;
    let proc = Path::new(node::PROC);
    machine::sort_processes(&config, HostCgroups::cgroupfs(layout.clone(), proc), proc, &tasks);

    let clock = Clock::system();
    let random = Random::from_os();
    // The kubelet's port gets the right to run a command in a container, and nothing else of it.
    let containers = CriContainers::new(runtime.reader.clone(), runtime.streaming.clone(), runtime.mutator.clone());
    let registry = Arc::new(Registry::default());
    let pleg = pod::pleg::start(runtime.reader.clone(), registry.clone(), clock.clone(), metrics.clone(), &tasks);
    let mut pod_cidr = PodCidr::new(runtime.mutator.clone());
    if let Err(e) = pod_cidr.give(&config.pod_cidr).await {
        warn!(err = &e as &dyn Error, cidr = config.pod_cidr, "Pod CIDR could not be given to the runtime");
    }
    let claims: Arc<dyn ClaimObjects> = match &cluster {
        Some(cluster) => ClusterClaims::start(&cluster.client, &node_name, &tasks),
        None => Arc::new(NoClaims),
    };
    let given = managers::Given { config: &config, flags: &flags, gates: &gates, facts: &facts };
    let managers = managers::start(given, claims, &registry, &metrics, &tasks).await?;
    keep_pool(&managers, runtime.reader.clone(), CpusetSetter::new(runtime.mutator.clone()), &tasks);
    let restored = pod::admit::restore(&*host, flags.root_dir()).await?;
    let admit = pod::admit::start(
        node::admission_facts(&node_name, &flags, &facts, runtime.groups_policy),
        node::admission_rules(&config, &gates)?,
        restored,
        host.clone(),
        Arc::new(managers.clone()),
        flags.root_dir().to_owned(),
        &tasks,
    );
    let user_namespaces = node::id_ranges(&config)?;
    let user_namespaces = UserNamespaces::restore(user_namespaces, host.clone(), flags.root_dir()).await?;
    let quick_restarts = gates.enabled(Gate::ReduceDefaultCrashLoopBackOffDecay);
    let settings = Settings {
        resize: node::resize_rules(&config, &gates),
        node_name: node_name.clone(),
        runtime_name: runtime.name.clone(),
        root_dir: flags.root_dir().to_owned(),
        sync_frequency: config.sync_frequency,
        first_restart_period: if quick_restarts { Duration::from_secs(1) } else { decide::backoff::INITIAL },
        max_restart_period: config.crash_loop_back_off.max_container_restart_period.unwrap_or(if quick_restarts {
            Duration::from_secs(60)
        } else {
            decide::backoff::MAX
        }),
        restart_gates: RestartGates {
            container_restart_rules: gates.enabled(Gate::ContainerRestartRules),
            restart_all_containers: gates.enabled(Gate::RestartAllContainersOnContainerExits),
        },
        container_gc: ContainerGcPolicy {
            max_per_name: i64::from(flags.maximum_dead_containers_per_container()),
            max_total: i64::from(flags.maximum_dead_containers()),
            min_age: flags.minimum_container_ttl(),
        },
        cluster_dns: config.cluster_dns.clone(),
        cluster_domain: config.cluster_domain.clone(),
        resolv_conf: (!config.resolv_conf.is_empty()).then(|| PathBuf::from(&config.resolv_conf)),
        memory_reserve: node::memory_reserve(&config, &gates, &facts),
        local_storage_isolation: config.local_storage_capacity_isolation,
        cgroups_per_qos: config.cgroups_per_qos,
        kubepods,
        pod_pids_limit: Some(config.pod_pids_limit).filter(|limit| *limit > 0),
        // Standalone, Go's kubelet knows of no address of its node.
        status_host_ips: if cluster.is_some() { addresses.clone() } else { Vec::new() },
        runtime_handlers: runtime.handlers,
        agent_started: clock.now(),
        forget_on_restart: gates.enabled(Gate::ChangeContainerStatusOnKubeletRestart),
        node: node::request_facts(&config, &flags, &gates, &layout, &facts, &addresses),
    };
    pod::logs::start(
        log_limits(&config),
        runtime.reader.clone(),
        LogReopener::new(runtime.mutator.clone()),
        host.clone(),
        clock.clone(),
        &tasks,
    );
    pod::dead::start(settings.container_gc, runtime.reader.clone(), registry.clone(), clock.clone(), &tasks);
    let queue = if cluster.is_some() { StatusQueue::watched() } else { StatusQueue::default() };
    let mirrors = Mirrors::new(queue.clone());
    let events = cluster.as_ref().map_or_else(Events::default, |c| Events::to(Arc::new(c.recorder.clone())));
    let objects: Arc<dyn PodObjects> = match &cluster {
        Some(cluster) => cluster.objects(&config, gates.enabled(Gate::ClusterTrustBundleProjection), &tasks),
        None => Arc::new(Standalone),
    };
    let drivers = Drivers::observed_by(Arc::new(CallMetrics(metrics.clone())));
    let volume_objects: Arc<dyn Objects> = match &cluster {
        Some(cluster) => {
            let volumes =
                Arc::new(ClusterVolumes::new(cluster, objects.clone(), events.clone(), metrics.clone(), &tasks));
            tasks.spawn_until_stop(volumes.clone().follow_limits(drivers.clone()));
            volumes
        }
        None => Arc::new(plugin_volumes::Alone),
    };
    // Before the node tells anything: what stands is in use.
    let volumes = plugin_volumes::find(
        flags.root_dir(),
        &node_name,
        &drivers,
        volume_objects,
        settings.node.selinux.is_some(),
        &tasks,
    )
    .await?;
    let mut images = Images::new(
        runtime.reader.clone(),
        runtime.mutator.clone(),
        clock.clone(),
        metrics.clone(),
        events.clone(),
        pull_limits(&config),
    )
    .with_credentials(objects.clone(), Arc::new(node_credentials(&flags, &gates, &objects, &metrics)?));
    if let Some(policy) = verification(&config) {
        let records = Records::new(host.clone(), flags.root_dir(), policy, clock.clone());
        records.take_over(&*runtime.reader).await;
        images = images.with_records(records);
    }
    let image_gc = ::node::images::ImagePorts {
        reader: runtime.reader.clone(),
        images: images.collection(),
        space: Arc::new(node::space),
        registry: registry.clone(),
        events: node_events.clone(),
        metrics: metrics.clone(),
        clock: clock.clone(),
    };
    let image_gc = ::node::images::start(node::image_gc(&config), image_gc, &tasks);
    let figures_parts = figures::Parts {
        reader: runtime.reader.clone(),
        objects: objects.clone(),
        layout: layout.clone(),
        kubepods: kubepods_path.clone(),
        started: settings.agent_started,
        volumes: volumes.clone(),
        events: events.clone(),
        volume_health: gates.enabled(Gate::CSIVolumeHealth),
    };
    let stats = figures::stats(&config, &flags, figures_parts, &node_name, &registry, &metrics);
    let places = eviction::Places {
        root: flags.root_dir().to_owned(),
        proc: PathBuf::from(node::PROC),
        layout,
        kubepods: config.cgroups_per_qos.then_some(kubepods_path),
        split_disks: gates.enabled(Gate::KubeletSeparateDiskGC),
    };
    let eviction_ports = EvictionPorts {
        figures: Arc::new(eviction::NodeFigures::new(places, runtime.reader.clone(), stats.clone())),
        reclaim: Arc::new(eviction::Unused { registry: registry.clone(), images: image_gc }),
        admit: Arc::new(admit.clone()),
        registry: registry.clone(),
        events: events.clone(),
        node_events: node_events.clone(),
        metrics: metrics.clone(),
    };
    // The node's first word about its pressures is true.
    let eviction = Eviction::start(eviction::config(&config, &flags, &gates), eviction_ports).await?;
    oom::start(node_events.clone(), &tasks);
    let deps = Arc::new(PodDeps {
        images,
        objects,
        prober: Prober::new(
            runtime.mutator.clone(),
            tasks.clone(),
            clock.clone(),
            random.clone(),
            events.clone(),
            metrics.clone(),
        ),
        user_namespaces,
        reader: runtime.reader,
        mutator: runtime.mutator,
        host: host.clone(),
        plugins: Arc::new(plugin_volumes::Port(volumes.clone())),
        managers: Arc::new(managers.clone()),
        admit: admit.clone(),
        clock: clock.clone(),
        random,
        metrics: metrics.clone(),
        registry: registry.clone(),
        status: queue.clone(),
        events,
        health: pleg.health.clone(),
        limiter: LogLimiter::new(Duration::from_secs(60)),
        settings,
    });
    let (updates_tx, updates) = mpsc::channel(16);
    let mut sources = sources(&config, &gates, &node_name, &clock, updates_tx.clone(), &tasks)?;
    let (mut api, mut node_object, mut node_view) = (None, None, None);
    let (not_ready_out, not_ready) = watch::channel(Vec::new());
    if let Some(cluster) = &cluster {
        let parts = Parts {
            runtime: deps.reader.clone(),
            health: pleg.health.clone(),
            images_changed: deps.images.changed(),
            declared_features: node_object::declared_features(&gates),
            volumes_in_use: volumes.in_use(),
            drivers: drivers.registered(),
            pressures: eviction.pressures(),
            not_ready,
            events: node_events.clone(),
            devices: managers.amounts(),
            new_machine: managers.new_machine(),
            clock: clock.clone(),
            random: deps.random.clone(),
        };
        let handles = node_object::start(cluster, &flags, &config, &node_name, &facts, parts, &tasks);
        startup::follow(handles.node.clone(), Path::new(node::PROC), &metrics, &tasks);
        let pod_api = Arc::new(cluster.client.clone());
        let writer = StatusWriter::new(
            pod_api,
            registry.clone(),
            mirrors.clone(),
            queue,
            handles.node.clone(),
            deps.random.clone(),
        )
        .with_metrics(metrics.clone());
        tasks.spawn_until_stop(writer.run());
        sources.push(PodSource::Api);
        node_object = Some(handles.node.clone());
        node_view = Some(NodeView { node: handles.node.clone(), reported: handles.volumes_reported });
        tasks.spawn_until_stop(pod_cidr.follow(handles.node.clone()));
        let known = cluster.follow_node(handles.node, admit.clone(), &tasks);
        let pods = cluster.follow_pods(&node_name, known, mirrors.clone(), clock.clone(), updates_tx, &tasks);
        api = Some(ApiView { client: cluster.client.clone(), node: handles.watching, pods });
    }
    let shutdown_admit = admit.clone();
    let dispatcher = Dispatcher::new(deps, admit, mirrors, tasks.clone(), sources, pleg.pods);
    volumes.start(node_view, dispatcher.all_seen());
    tasks.spawn_until_stop(eviction.run(dispatcher.ends()));
    let shutdown_ports = ShutdownPorts {
        service: Arc::new(shutdown::SystemLogind),
        pods: Arc::new(shutdown::Workers {
            registry: registry.clone(),
            admit: shutdown_admit,
            ends: dispatcher.ends(),
        }),
        state: shutdown::ShutdownTimes::open(&gates, &host, flags.root_dir()),
        events: node_events,
        metrics: metrics.clone(),
        clock: clock.clone(),
    };
    ::node::shutdown::start(shutdown::periods(&config, &gates), shutdown_ports, not_ready_out, &tasks);
    let registry_dir = flags.root_dir().join("plugins_registry");
    let mut handlers: Vec<Arc<dyn plugins::registration::Handler>> = vec![Arc::new(drivers)];
    handlers.extend(managers.plugins().map(|p| Arc::new(p) as Arc<dyn plugins::registration::Handler>));
    handlers.extend(managers.drivers().map(|d| Arc::new(d) as Arc<dyn plugins::registration::Handler>));
    tasks.spawn(plugins::registration::run(registry_dir, handlers, tasks.stop().clone()));
    let only_active = gates.enabled(Gate::KubeletPodResourcesListUseActivePods);
    serve_pod_resources(&flags.root_dir().join("pod-resources"), &managers, registry.clone(), only_active, &tasks)?;
    let view: Arc<View> = Arc::new(View {
        node_name,
        registry,
        health: pleg.health,
        all_seen: dispatcher.all_seen(),
        api,
        clock,
        configz: config::configz(&config),
        flags: flags.clone(),
        managers,
    });
    let health = Health::new(view.clone(), metrics.clone(), Some(log));
    let figures = figures::open(&flags, stats, &view, &metrics);
    let secure = if config.enable_server {
        let needs = https::Needs {
            cluster: cluster.as_ref(),
            node: node_object,
            node_name: &view.node_name,
            view: view.clone(),
            registry: view.registry.clone(),
            containers: Arc::new(containers),
            figures: figures.clone(),
            metrics: metrics.clone(),
            health: health.clone(),
        };
        Some(https::server(&config, &flags, &gates, needs, &tasks)?)
    } else {
        None
    };
    let servers = bind(&config, &flags, view, figures, metrics, health.clone(), secure).await?;
    tasks.spawn(dispatcher.run(updates));
    Ok(Running { tasks, servers, health })
}

/// What is to be known of the runtime before anything is asked of it.
struct Runtime {
    reader: Arc<dyn RuntimeReader>,
    mutator: Arc<dyn RuntimeMutator>,
    streaming: Arc<dyn RuntimeStreaming>,
    name: String,
    cgroup_driver: Option<i32>,
    groups_policy: bool,
    handlers: Vec<cri_api::v1::RuntimeHandler>,
}

impl Runtime {
    async fn connect(config: &KubeletConfiguration, gates: &Gates, metrics: &Arc<Metrics>) -> Result<Self, Failure> {
        let endpoint = &config.container_runtime_endpoint;
        let image_endpoint = Some(config.image_service_endpoint.as_str()).filter(|e| !e.is_empty());
        let client = CriClient::connect(endpoint, image_endpoint, config.runtime_request_timeout)?
            .with_list_streaming(gates.enabled(Gate::CRIListStreaming))
            .with_observer(Arc::new(CallMetrics(metrics.clone())));
        let client = Arc::new(client);
        let unusable = |e: &dyn std::fmt::Display| {
            format!(
                "the container runtime at {endpoint} cannot be used: {e}. Start it (systemctl start containerd), or name its socket \
                 with containerRuntimeEndpoint; rubelet check looks closer"
            )
        };
        let version = client.version().await.map_err(|e| unusable(&e))?;
        cri::validate_version(&version).map_err(|e| unusable(&e))?;
        info!(runtime = version.runtime_name, version = version.runtime_version, "Container runtime initialized");
        let cgroup_driver = match client.runtime_config().await {
            Ok(answer) => answer.linux.map(|l| l.cgroup_driver),
            Err(e) if e.outcome == cri::Outcome::Unimplemented => {
                info!(
                    "CRI implementation should be updated to support RuntimeConfig. Falling back to using cgroupDriver from kubelet config"
                );
                metrics.runtime_loses_support("1.37.0");
                None
            }
            Err(e) => return Err(unusable(&e).into()),
        };
        let status = client.status(false).await.map_err(|e| unusable(&e))?;
        Ok(Self {
            reader: client.clone(),
            streaming: client.clone(),
            mutator: client,
            name: version.runtime_name,
            cgroup_driver,
            groups_policy: status.features.is_some_and(|f| f.supplemental_groups_policy),
            handlers: status.runtime_handlers,
        })
    }
}

fn cgroup_manager(layout: CgroupLayout, driver: CgroupDriver) -> Arc<dyn CgroupManager> {
    let proc = Path::new(node::PROC);
    match driver {
        CgroupDriver::Cgroupfs => Arc::new(HostCgroups::cgroupfs(layout, proc)),
        CgroupDriver::Systemd => Arc::new(HostCgroups::systemd(layout, proc, Arc::new(SystemdBus::default()))),
    }
}

fn make_directories(flags: &Flags, config: &KubeletConfiguration) -> Result<(), Failure> {
    let root = flags.root_dir();
    for dir in [
        root.to_owned(),
        root.join("pods"),
        root.join("plugins"),
        root.join("plugins_registry"),
        root.join("pod-resources"),
    ] {
        host::fsx::ensure_dirs(&dir, 0o750)?;
    }
    if config.image_pull_credentials_verification_policy.is_some() {
        for dir in ["pulling", "pulled"] {
            host::fsx::ensure_dirs(&root.join("image_manager").join(dir), 0o700)?;
        }
    }
    host::fsx::ensure_dirs(Path::new(&config.pod_logs_dir), 0o750)?;
    host::fsx::ensure_dirs(Path::new(decide::config::names::CONTAINER_LOGS_DIR), 0o755)?;
    if let Err(e) = host::mount::make_rshared(Path::new(node::PROC), root) {
        warn!(
            err = e.full(),
            "The root directory's mounts cannot be shared, volumes with mountPropagation Bidirectional will not reach the host"
        );
    }
    Ok(())
}

/// Starts a task for each configured source; which ones there are.
fn sources(
    config: &KubeletConfiguration,
    gates: &Gates,
    node_name: &str,
    clock: &Clock,
    out: mpsc::Sender<SourceUpdate>,
    tasks: &Tasks,
) -> Result<Vec<PodSource>, Failure> {
    let context = StaticContext {
        node_name: node_name.to_owned(),
        gates: manifest::Gates {
            prevent_static_pod_api_references: gates.enabled(Gate::PreventStaticPodAPIReferences),
            pod_level_resources: gates.enabled(Gate::PodLevelResources),
            container_restart_rules: gates.enabled(Gate::ContainerRestartRules),
            restart_all_containers: gates.enabled(Gate::RestartAllContainersOnContainerExits),
            ..manifest::Gates::default()
        },
    };
    let mut sources = Vec::new();
    if !config.static_pod_path.is_empty() {
        info!(path = config.static_pod_path, "Adding static pod path");
        sources.push(PodSource::File);
        let dir = DiskManifests::new(PathBuf::from(&config.static_pod_path));
        let task = source::file::run(dir, config.file_check_frequency, context.clone(), clock.clone(), out.clone());
        tasks.spawn_until_stop(task);
    }
    if !config.static_pod_url.is_empty() {
        info!(url = config.static_pod_url, "Adding pod URL");
        sources.push(PodSource::Http);
        let headers = config
            .static_pod_url_header
            .iter()
            .flat_map(|(k, all)| all.iter().map(|v| (k.clone(), v.clone())))
            .collect();
        let url = source::url::ManifestUrl::parse(&config.static_pod_url, headers)?;
        let task = source::url::run(url, config.http_check_frequency, context, clock.clone(), out);
        tasks.spawn_until_stop(task);
    }
    Ok(sources)
}

/// The node's own pull credentials.
fn node_credentials(
    flags: &Flags,
    gates: &Gates,
    objects: &Arc<dyn PodObjects>,
    metrics: &Arc<Metrics>,
) -> Result<NodeKeyring, Failure> {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let places = Places::new(flags.root_dir(), &home);
    let (config, bin) = (flags.image_credential_provider_config(), flags.image_credential_provider_bin_dir());
    let (Some(config), Some(bin)) = (&config, &bin) else {
        if config.is_some() || bin.is_some() {
            return Err("--image-credential-provider-config and --image-credential-provider-bin-dir go together".into());
        }
        return Ok(NodeKeyring::new(places, Vec::new(), Path::new(""), objects, metrics));
    };
    let tokens = gates.enabled(Gate::KubeletServiceAccountTokenForCredentialProviders);
    let providers = credentials::config::load(config, bin, tokens)
        .map_err(|e| format!("Failed to register CRI auth plugins: {e}"))?;
    Ok(NodeKeyring::new(places, providers, bin, objects, metrics))
}

/// Who must prove the right to an image that is there; None: gate KubeletEnsureSecretPulledImages is off.
fn verification(config: &KubeletConfiguration) -> Option<Policy> {
    use config::ImagePullCredentialsVerificationPolicy as Configured;
    Some(match config.image_pull_credentials_verification_policy? {
        Configured::NeverVerify => Policy::NeverVerify,
        Configured::NeverVerifyPreloadedImages => Policy::NeverVerifyPreloaded,
        Configured::NeverVerifyAllowlistedImages => {
            Policy::NeverVerifyAllowlisted(config.preloaded_images_verification_allowlist.clone())
        }
        Configured::AlwaysVerify => Policy::AlwaysVerify,
    })
}

fn pull_limits(config: &KubeletConfiguration) -> PullLimits {
    let parallel = config.max_parallel_image_pulls.and_then(|n| usize::try_from(n).ok());
    PullLimits {
        parallel: if config.serialize_image_pulls && parallel.is_none_or(|n| n < 2) { Some(1) } else { parallel },
        qps: u32::try_from(config.registry_pull_qps).unwrap_or(0),
        burst: u32::try_from(config.registry_burst).unwrap_or(0),
    }
}

fn log_limits(config: &KubeletConfiguration) -> LogLimits {
    let size = model::quantity::Quantity::parse(&config.container_log_max_size).map_or(10 << 20, |q| q.value());
    LogLimits {
        pod_logs_dir: config.pod_logs_dir.clone(),
        max_size: size,
        max_files: u32::try_from(config.container_log_max_files).unwrap_or(5),
        workers: usize::try_from(config.container_log_max_workers).unwrap_or(1),
        interval: config.container_log_monitor_interval,
    }
}

/// Opens every socket before anything runs, so that a taken port is known at once.
async fn bind(
    config: &KubeletConfiguration,
    flags: &Flags,
    view: Arc<View>,
    figures: Arc<dyn serve::Figures>,
    metrics: Arc<Metrics>,
    health: Health,
    secure: Option<Server>,
) -> Result<Vec<Bound>, Failure> {
    let address = |ip: &str, port: i32| -> Result<SocketAddr, Failure> {
        let ip: IpAddr = ip.parse().map_err(|e| format!("address {ip:?} is not an IP address: {e}"))?;
        Ok(SocketAddr::new(ip, config::port_number(port)))
    };
    let mut servers = Vec::new();
    if config.healthz_port > 0 {
        let at = address(&config.healthz_bind_address, config.healthz_port)?;
        servers.push(Server::healthz(health.clone(), Checks::Ping).bind_tcp(at).await?);
    }
    if config.read_only_port > 0 {
        let at = address(&config.address, config.read_only_port)?;
        servers.push(Server::read_only(view.clone(), figures, metrics, health).bind_tcp(at).await?);
    }
    if let Some(secure) = secure {
        servers.push(secure.bind_tcp(address(&config.address, config.port)?).await?);
    }
    let socket = serve::socket_path(flags.root_dir());
    servers.push(Server::local(view).bind_unix(&socket).await?);
    Ok(servers)
}

/// Metrics that say what this program is.
fn describe(metrics: &Metrics, gates: &Gates, node_name: &str) {
    metrics.set_node_name(node_name);
    metrics.set_build_info(BuildInfo {
        major: "1",
        minor: "36",
        git_version: version::KUBERNETES,
        git_commit: version::COMMIT,
        git_tree_state: "archive",
        build_date: "",
        go_version: "",
        compiler: "rustc",
        platform: "linux/amd64",
    });
    for (name, stage) in Gates::stages() {
        let stage = match stage {
            config::Stage::Alpha => "ALPHA",
            config::Stage::Beta => "BETA",
            config::Stage::Ga => "",
            config::Stage::Deprecated => "DEPRECATED",
        };
        metrics.set_feature(name, stage, gates.enabled_by_name(name).unwrap_or(false));
    }
}
