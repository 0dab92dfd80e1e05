//! The executor's starting half: containers one after the other.
//!
//! Each container: image → restart count and files → request → create → start → postStart. Facts that arrive late are gathered here and
//! given to the pure [`decide::config`]; what is missing comes back as the API's waiting reason. Calls that change the runtime are never cut off;
//! only a pull and a hook are, when the pod is to end.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cri_api::v1;
use decide::config::{
    self, BlockDevice, ConfigError, ContainerFacts, ResolvedImage, VolumeFact, VolumeSource,
    env::{self, EnvSources, Source},
    hosts_file, image_name,
};
use model::api::Secret;
use model::observed::ObservedPod;
use model::plan::{Kill, KillReason, Start};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};
use model::timeline::StepKind;
use telemetry::metrics::{ContainerType, Metrics};
use tracing::{info, warn};

use super::hooks::{self, HookContext};
use super::image::ImageVolumes;
use crate::images::ImageProblem;
use crate::objects::{ObjectError, ObjectResult};
use crate::ports::{ContainerFiles, ContainerPaths, MountedVolumes, error_chain};
use crate::worker::{FailedPull, Intent, Worker};

/// Why a container did not start: waiting reason and message of the API.
pub(crate) struct StartFailure {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) retry_at: Option<jiff::Timestamp>,
    /// False when the pod is to end and the start was given up for it.
    pub(crate) report: bool,
    /// CRI id of the container that it is about; an event says the container's name instead, so that those of one kind are counted together.
    id: Option<String>,
    /// The image that could not be had. The puller's own words went before: the event is the reason alone.
    image: Option<String>,
    /// It is that of a volume.
    volume: bool,
}

impl StartFailure {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_at: None, report: true, id: None, image: None, volume: false }
    }

    /// The start was given up, which is no fault of the container.
    pub(super) fn given_up(why: &str) -> Self {
        Self { report: false, ..Self::new("", why) }
    }

    /// The container's image cannot be had.
    pub(super) fn image(p: ImageProblem, image: &str) -> Self {
        Self { retry_at: p.retry_at, image: Some(image.to_owned()), ..Self::new(p.reason, p.message) }
    }

    /// The image of a volume cannot be had.
    pub(super) fn volume_image(p: ImageProblem, image: &str) -> Self {
        Self { volume: true, ..Self::image(p, image) }
    }

    /// The text of the event.
    fn event(&self, container: &str) -> String {
        match &self.id {
            _ if self.image.is_some() => format!("Error: {}", self.reason),
            Some(id) => format!("Error: {}", self.message.replace(id, container)),
            None => format!("Error: {}", self.message),
        }
    }
}

impl From<ConfigError> for StartFailure {
    fn from(e: ConfigError) -> Self {
        Self::new(e.reason.as_str(), e.to_string())
    }
}

/// What a round starts its containers in.
pub(crate) struct Ground<'a> {
    /// The pod as this round saw it.
    pub(crate) observed: &'a ObservedPod,
    /// CRI id of the sandbox.
    pub(crate) sandbox_id: &'a str,
    /// Its request.
    pub(crate) sandbox: &'a v1::PodSandboxConfig,
    /// The runtime's handler that it runs under.
    pub(crate) handler: &'a str,
    /// The pod's volumes.
    pub(crate) volumes: &'a MountedVolumes,
}

impl Worker {
    /// Starts one container; on failure its waiting reason stays until a later start succeeds.
    pub(crate) async fn start_container(
        &mut self,
        pod: &DesiredPod,
        ground: &Ground<'_>,
        images: &mut ImageVolumes,
        start: &Start,
    ) -> Result<(), StartFailure> {
        let Some(entry) = pod.container(&start.name) else {
            return Ok(());
        };
        let kind = container_type(start.kind);
        self.deps.metrics.container_started(kind);
        let result = self.try_start(pod, ground, images, &entry, start).await;
        match &result {
            Ok(()) => {
                self.problems.remove(&start.name);
                self.pulls.remove(&start.name);
            }
            Err(failure) if failure.report => {
                self.deps.metrics.container_start_failed(kind, failure.reason);
                let key = format!("start {} {} {}", pod.uid(), start.name, failure.reason);
                if self.deps.limiter.allow(&key, std::time::Instant::now()).is_some() {
                    warn!(
                        pod = pod.full_name(),
                        container = start.name,
                        reason = failure.reason,
                        err = failure.message,
                        "Container cannot be started"
                    );
                }
                self.deps.events.warning(pod, &start.name, "Failed", &failure.event(&start.name));
                self.problems.insert(start.name.clone(), (failure.reason.to_owned(), failure.message.clone()));
                match failure.retry_at {
                    Some(retry_at) => {
                        let image = failure.image.clone().unwrap_or_default();
                        let message = match failure.reason {
                            "ImagePullBackOff" => failure.message.clone(),
                            reason => image_name::back_off_message(&image, &format!("{reason}: {}", failure.message)),
                        };
                        let pull = FailedPull { retry_at, message, image, volume: failure.volume };
                        self.pulls.insert(start.name.clone(), pull)
                    }
                    None => self.pulls.remove(&start.name),
                };
            }
            Err(_) => {}
        }
        result
    }

    async fn try_start(
        &mut self,
        pod: &DesiredPod,
        ground: &Ground<'_>,
        images: &mut ImageVolumes,
        entry: &ContainerEntry<'_>,
        start: &Start,
    ) -> Result<(), StartFailure> {
        let deps = self.deps.clone();
        let name = &start.name;
        let Ground { observed, sandbox_id, sandbox, .. } = *ground;
        self.image_volumes(pod, entry, sandbox, images).await?;
        let image = self.image(pod, entry, sandbox).await?;
        let request = self.container_request(pod, ground, images, entry, image, start).await?;
        let restart_count = request.metadata.as_ref().map_or(0, |m| m.attempt);
        let hash = hash_of(entry);
        self.still_wanted()?;
        // A container that is stopped for new resources starts again as it has no record: it gets one with its start only. A new agent finds in the runtime
        // what one was given that runs without a record.
        let early = !decide::resize::may_restart(entry.spec);
        if early {
            self.note_given(pod, entry).await;
        }
        let create = deps.mutator.create_container(sandbox_id, request, sandbox.clone());
        let created = self.step(StepKind::Create, name, create).await;
        count_image_volumes(&deps.metrics, entry, images, created.as_ref().err());
        let id = created.map_err(|e| StartFailure::new("CreateContainerError", e))?;
        deps.events.normal(pod, name, "Created", "Container created");
        // The back-off counts from the exit that this start answers.
        self.backoffs.record_start(pod.uid(), name, hash, decide::plan::last_exit(observed, name), deps.clock.now());
        self.still_wanted()?;
        let started = self.step(StepKind::Start, name, deps.mutator.start_container(&id)).await;
        if !early {
            self.note_given(pod, entry).await;
        }
        started.map_err(|e| StartFailure { id: Some(id.clone()), ..StartFailure::new("RunContainerError", e) })?;
        self.made.push((id.clone(), sandbox_id.to_owned()));
        deps.events.normal(pod, name, "Started", "Container started");
        info!(pod = pod.full_name(), container = name, id, restarts = restart_count, "Started container");
        if let Err(e) = deps.host.link_log(pod, name, &id, restart_count).await {
            warn!(pod = pod.full_name(), container = name, err = e.chain(), "Log link cannot be made");
        }
        self.post_start(pod, observed, entry, &id).await
    }

    /// An error when the pod is to end: nothing more of it is made or started then.
    fn still_wanted(&self) -> Result<(), StartFailure> {
        match &*self.intent.borrow() {
            Intent::Run(_) => Ok(()),
            Intent::End(_) => Err(StartFailure { report: false, ..StartFailure::new("", "the pod is to end") }),
        }
    }

    /// Gathers the facts and builds the request.
    async fn container_request(
        &self,
        pod: &DesiredPod,
        ground: &Ground<'_>,
        images: &ImageVolumes,
        entry: &ContainerEntry<'_>,
        image: ResolvedImage,
        start: &Start,
    ) -> Result<v1::ContainerConfig, StartFailure> {
        let settings = &self.deps.settings;
        let Ground { observed, sandbox_id, handler, volumes, .. } = *ground;
        let failed = |reason: String| StartFailure::new("CreateContainerConfigError", reason);
        let user_namespace = self.user_namespace(pod, handler).await.map_err(failed)?;
        let pod_ips = self.pod_ips(pod, observed, sandbox_id);
        let target_id = (entry.kind == ContainerKind::Ephemeral)
            .then(|| pod.ephemeral_target(entry.index))
            .flatten()
            .and_then(|target| observed.newest_in(target, sandbox_id))
            .map(|c| c.id.clone());
        let grant = self.deps.managers.container(pod, entry).await.map_err(failed)?;
        let mut facts = ContainerFacts {
            node: &settings.node,
            hash: hash_of(entry),
            restart_count: start.restart_count.unwrap_or(0),
            image: Some(image),
            volumes: volumes
                .iter()
                .filter(|(_, v)| !v.device)
                .map(|(name, v)| {
                    let source = VolumeSource::HostPath(v.host_path.display().to_string());
                    (name.clone(), VolumeFact { source, read_only: v.read_only, selinux_relabel: v.relabel })
                })
                .chain(images.iter().map(|(name, image)| {
                    let source = VolumeSource::Image(image.clone());
                    (name.clone(), VolumeFact { source, read_only: true, selinux_relabel: false })
                }))
                .collect(),
            pod_ips,
            block_devices: volumes
                .iter()
                .filter(|(_, v)| v.device)
                .map(|(name, v)| {
                    let host_path = Some(v.host_path.display().to_string());
                    (name.clone(), BlockDevice { host_path, read_only: v.read_only })
                })
                .collect(),
            sub_path_targets: BTreeMap::new(),
            env: EnvSources::default(),
            hosts_file: None,
            termination_log: None,
            devices: grant.devices,
            user_namespace,
            volume_gids: volume_gids(volumes),
            recursive_read_only: self.handler_features(handler).is_some_and(|f| f.recursive_read_only_mounts),
            exclusive_cpus: grant.exclusive_cpus,
            target_id,
        };
        facts.env = self.env_sources(pod, entry, volumes).await;
        // What is refused leaves nothing behind: each try would make another file.
        config::check_container(pod, *entry, &facts)?;
        let logs = self.deps.host.log_dir(pod, &entry.spec.name).await;
        let from_logs = logs.map_err(|e| StartFailure::new("CreateContainerError", e.chain()))?;
        // The logs also know of runs whose container was removed while an older one of its name stayed.
        facts.restart_count = facts.restart_count.max(from_logs.map_or(0, |n| n.saturating_add(1)));
        let paths = self.container_files(pod, entry, volumes, &facts).await.map_err(failed)?;
        facts.hosts_file = paths.hosts_file.map(|p| p.display().to_string());
        facts.termination_log = paths.termination_log.map(|p| p.display().to_string());
        facts.sub_path_targets = paths.sub_paths.into_iter().map(|(i, p)| (i, p.display().to_string())).collect();
        let mut request = config::container_config(pod, *entry, &facts)?;
        if let Some(resources) = request.linux.as_mut().and_then(|l| l.resources.as_mut()) {
            resources.cpuset_cpus = grant.cpus;
            resources.cpuset_mems = grant.memory_nodes;
        }
        Ok(request)
    }

    /// Asks for everything that the container's variables refer to.
    async fn env_sources(&self, pod: &DesiredPod, entry: &ContainerEntry<'_>, volumes: &MountedVolumes) -> EnvSources {
        let objects = &self.deps.objects;
        let namespace = pod.namespace();
        let needed = env::needed_sources(*entry);
        let links = pod.spec().enable_service_links == Some(true);
        let mut sources = EnvSources {
            standalone: objects.standalone(),
            // A static pod must start while the API server is away.
            services: objects.service_variables(namespace, links, !pod.is_static()).await,
            ..EnvSources::default()
        };
        if !sources.standalone {
            for name in needed.config_maps {
                let asked = objects.config_map(namespace, &name).await;
                sources.config_maps.insert(name, source(asked.map(|map| map.data.clone().unwrap_or_default())));
            }
            for name in needed.secrets {
                let data = |secret: &Secret| {
                    secret.data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone())).collect::<BTreeMap<_, _>>()
                };
                let asked = objects.secret(namespace, &name).await;
                sources.secrets.insert(name, source(asked.map(|secret| data(&secret))));
            }
        }
        for (volume, path) in needed.files {
            let Some(mounted) = volumes.get(&volume) else { continue };
            let read = self.deps.host.read_in_volume(&mounted.host_path, &path).await;
            let text = match read {
                Ok(Some(bytes)) => Source::Found(String::from_utf8_lossy(&bytes).into_owned()),
                Ok(None) => Source::NotFound,
                Err(e) => Source::Failed(e.chain()),
            };
            sources.files.insert((volume, path), text);
        }
        sources
    }

    /// Makes the files that the container gets mounted.
    async fn container_files(
        &self,
        pod: &DesiredPod,
        entry: &ContainerEntry<'_>,
        volumes: &MountedVolumes,
        facts: &ContainerFacts<'_>,
    ) -> Result<ContainerPaths, String> {
        let sub_paths = config::sub_paths(pod, *entry, facts).map_err(|e| e.to_string())?;
        let hosts = if config::needs_hosts_file(pod, *entry, &facts.pod_ips) {
            let nodes = if pod.host_network() {
                self.deps.host.read_file(Path::new("/etc/hosts")).await.map_err(|e| e.chain())?
            } else {
                None
            };
            let hostname = self.hostname(pod)?;
            Some(hosts_file::content(pod, hostname.as_ref(), &facts.pod_ips, nodes.as_deref()))
        } else {
            None
        };
        let files = ContainerFiles {
            termination_log_name: self.deps.random.hex8(),
            hosts,
            sub_paths: sub_paths.into_iter().map(|s| (s.index, (s.volume, s.path))).collect(),
        };
        let prepared = self.deps.host.prepare_container(pod, entry, volumes, &files).await;
        prepared.map_err(|e| error_chain(&*e.source))
    }

    /// The addresses that containers of this sandbox see as the pod's.
    pub(crate) fn pod_ips(&self, pod: &DesiredPod, observed: &ObservedPod, sandbox_id: &str) -> Vec<String> {
        if pod.host_network() {
            return self.deps.host.host_ips();
        }
        observed.sandboxes.iter().find(|s| s.id == sandbox_id).map(|s| s.ips.clone()).unwrap_or_default()
    }

    /// Where probes without a host of their own go.
    pub(crate) fn probe_address(&self, pod: &DesiredPod, observed: &ObservedPod) -> Option<String> {
        if pod.host_network() {
            return Some(self.deps.host.host_ips().into_iter().next().unwrap_or_else(|| "127.0.0.1".to_owned()));
        }
        observed.sandboxes.first().and_then(|s| s.ips.first().cloned())
    }

    /// Runs the postStart hook. A failure kills the container; the restart policy decides what follows.
    async fn post_start(
        &mut self,
        pod: &DesiredPod,
        observed: &ObservedPod,
        entry: &ContainerEntry<'_>,
        id: &str,
    ) -> Result<(), StartFailure> {
        let Some(hook) = entry.spec.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else {
            return Ok(());
        };
        let name = &entry.spec.name;
        let ip = observed.sandboxes.first().and_then(|s| s.ips.first().cloned());
        let context = HookContext {
            runtime: &*self.deps.mutator,
            metrics: &self.deps.metrics,
            container_id: id,
            place: hooks::place(name, &config::pod_text(pod)),
            spec: Some(entry.spec),
            pod_ip: ip.as_deref(),
            fell_back: &|message| self.http_fallback(pod, message),
        };
        let mut newer = self.intent.clone();
        let ran = self
            .step(StepKind::PostStart, name, async {
                tokio::select! {
                    biased;
                    result = hooks::run(hook, &context) => result,
                    // A hook that hangs must not hold up the pod's end (A11).
                    () = to_end(&mut newer) => Err("the pod is to end".to_owned()),
                    () = self.stop.cancelled() => Err("the agent stops".to_owned()),
                }
            })
            .await;
        let Err(reason) = ran else { return Ok(()) };
        if matches!(&*self.intent.borrow(), Intent::End(_)) || self.stop.is_cancelled() {
            return Err(StartFailure { report: false, ..StartFailure::new("", reason) });
        }
        warn!(pod = pod.full_name(), container = name, err = reason, "FailedPostStartHook: PostStartHook failed");
        self.deps.events.warning(pod, name, "FailedPostStartHook", "PostStartHook failed");
        let kill = Kill {
            id: id.to_owned(),
            name: name.clone(),
            kind: Some(entry.kind),
            reason: KillReason::PostStartHook,
            message: "FailedPostStartHook".to_owned(),
            grace: None,
        };
        // The container is too new for the round's look, and its end has a hook of its own.
        let killed = match self.observe().await {
            Ok(fresh) => self.kill(pod, &fresh, &[kill]).await,
            Err(e) => Err(e.to_string()),
        };
        if let Err(e) = killed {
            self.note_failure("stop", &e);
        }
        Err(StartFailure::new("PostStartHookError", reason))
    }
}

/// What the runtime's message begins with when an image volume cannot be mounted.
const IMAGE_VOLUME_FAILED: &str = "ImageVolumeMountFailed";

fn count_image_volumes(metrics: &Metrics, entry: &ContainerEntry<'_>, images: &ImageVolumes, failed: Option<&String>) {
    let mounted = entry.spec.volume_mounts.iter().flatten().filter(|m| images.contains_key(&m.name)).count() as f64;
    if mounted > 0.0 {
        metrics.image_volume_requested.inc_by(mounted);
        match failed {
            Some(why) if why.starts_with(IMAGE_VOLUME_FAILED) => metrics.image_volume_errors.inc_by(mounted),
            _ => metrics.image_volume_mounted.inc_by(mounted),
        }
    }
}

/// An object that was asked for, as a fact.
fn source<T>(asked: ObjectResult<T>) -> Source<T> {
    match asked {
        Ok(data) => Source::Found(data),
        Err(ObjectError::NotFound(_)) => Source::NotFound,
        Err(ObjectError::Failed(reason)) => Source::Failed(reason),
    }
}

/// Groups that the volumes ask for, each once.
pub(super) fn volume_gids(volumes: &MountedVolumes) -> Vec<i64> {
    let gids: BTreeSet<i64> = volumes.values().filter_map(|v| v.gid).collect();
    gids.into_iter().collect()
}

/// Returns when the pod is to end; never, when nobody can say so any more.
pub(crate) async fn to_end(intent: &mut tokio::sync::watch::Receiver<Intent>) {
    if intent.wait_for(|i| matches!(i, Intent::End(_))).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The hash of image and name that is written into the container.
pub(crate) fn hash_of(entry: &ContainerEntry<'_>) -> u32 {
    manifest::container_hash(entry.spec.image.as_deref().unwrap_or_default(), &entry.spec.name)
}

pub(super) fn container_type(kind: ContainerKind) -> ContainerType {
    match kind {
        ContainerKind::Init | ContainerKind::Sidecar => ContainerType::Init,
        ContainerKind::App => ContainerType::App,
        ContainerKind::Ephemeral => ContainerType::Ephemeral,
    }
}
