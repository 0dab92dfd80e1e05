//! The volumes of a pod: gathering what they show, making them, and writing them anew when it changes.
//!
//! Volumes that fail hold up the pod's start, each with a message of its own, and are tried again after 500 ms, doubling to 2m2s, or at once when
//! an object that the pod uses changes. Once they stand, they are gone through again when an object changes, when a token is due, and with
//! every resync; a failure then leaves the old content and the running containers alone.

use std::collections::BTreeMap;
use std::time::Duration;

use decide::config::claims::{ClaimedVolume, Place};
use decide::config::objects::{self as files, DEFAULT_MODE, VolumeFile, VolumeFiles};
use decide::config::{claims, downward, volume_is_used};
use decide::csi::CsiVolume;
use decide::disk;
use decide::resources;
use decide::selinux;
use decide::text::{aggregate, go_list};
use futures::future::join_all;
use jiff::{SignedDuration, Timestamp};
use model::api::{ProjectedVolumeSource, Volume, VolumeProjection};
use model::pod::DesiredPod;
use model::quantity::Quantity;
use model::timeline::{StepKind, StepResult};
use tokio::time::Instant;
use tracing::warn;

use super::start::to_end;
use crate::objects::{ObjectError, ObjectResult, TrustBundles};
use crate::ports::{MountedVolume, MountedVolumes, PluginVolume, VolumePayloads, VolumeResults};
use crate::worker::{EndReason, Intent, Next, Worker};

/// First wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// The longest one.
const LONGEST_WAIT: Duration = Duration::from_secs(122);

/// How long the API server may take to say what volumes show that stand already: meanwhile the worker does nothing else for its pod.
const REFRESH: Duration = Duration::from_secs(5);

/// How a pod's volumes stand.
#[derive(Debug, Default)]
pub(crate) struct VolumeWork {
    /// When they were last gone through.
    made: Option<Instant>,
    /// An object changed since.
    stale: bool,
    /// When they must be gone through again: a token is due, or a failed try is worth another one.
    pub(crate) wake_at: Option<Timestamp>,
    /// Tries that failed in a row.
    failures: u32,
    /// When the next try may be made.
    retry_at: Option<Instant>,
    /// Among them are volumes of plugins, which may want to be gone through again.
    plugins: bool,
    /// The node can take no more volumes of a kind that the pod needs; the message of its refusal.
    refused: Option<String>,
}

/// Reason of a pod's refusal, KEP-4876.
const LIMIT_EXCEEDED: &str = "VolumeAttachmentLimitExceeded";

/// What came of asking the plugins.
#[derive(Default)]
struct Asked {
    /// What is not ready yet, and has its events behind it.
    waits: Vec<String>,
    /// Volumes of which the node can take no more.
    exhausted: Vec<String>,
}

/// What the volumes of a pod show, as far as it could be had.
#[derive(Default)]
struct Gathered {
    payloads: VolumePayloads,
    /// Messages by volume.
    failed: BTreeMap<String, String>,
    /// Claims that cannot be followed, by volume: these are not even tried.
    unprocessed: BTreeMap<String, String>,
    /// Volumes of plugins, with the group that a claim's volume asks for.
    plugins: BTreeMap<String, (CsiVolume, Option<i64>)>,
    /// When the first token is due.
    due: Option<Timestamp>,
}

impl Gathered {
    /// It is a plugin's.
    fn plug(&mut self, name: &str, volume: CsiVolume, gid: Option<i64>) {
        self.payloads.left_out.insert(name.to_owned());
        self.plugins.insert(name.to_owned(), (volume, gid));
    }

    /// It cannot be followed.
    fn not_tried(&mut self, name: &str, reason: String) {
        self.payloads.left_out.insert(name.to_owned());
        self.unprocessed.insert(name.to_owned(), reason);
    }

    /// Its step failed.
    fn fail(&mut self, name: &str, step: &str, reason: &str) {
        self.payloads.left_out.insert(name.to_owned());
        self.failed.insert(name.to_owned(), format!("{step} failed for volume \"{name}\" : {reason}"));
    }
}

impl Worker {
    /// Keeps what the pod names at hand.
    pub(crate) fn follow_objects(&mut self, pod: &DesiredPod) {
        if let Some(known) = self.followed.as_mut().filter(|known| known.same_intent(pod)) {
            // Of the same forms only the newest is held.
            known.clone_from(pod);
            return;
        }
        self.deps.objects.follow(pod, &self.entry);
        self.followed = Some(pod.clone());
        // Another form is tried at once.
        self.volumes.retry_at = None;
    }

    /// When to come back while a failed try must wait.
    pub(crate) fn volumes_rest(&mut self) -> Option<Next> {
        self.volumes_wait().then(|| self.volume_retry())
    }

    /// True while a failed try must wait. A changed object ends the wait.
    fn volumes_wait(&mut self) -> bool {
        self.volumes.stale |= self.entry.take_objects_changed();
        !self.volumes.stale && self.volumes.retry_at.is_some_and(|at| at > Instant::now())
    }

    /// When volumes that failed are tried again.
    fn volume_retry(&self) -> Next {
        Next::At(self.volumes.retry_at.unwrap_or_else(Instant::now))
    }

    /// Goes through volumes that stand when what they show may have changed.
    pub(crate) async fn refresh_volumes(&mut self, pod: &DesiredPod) {
        let changing = self.volumes.plugins || pod.spec().volumes.iter().flatten().any(changes);
        if self.volumes_wait() || !changing {
            return;
        }
        let due = self.volumes.wake_at.is_some_and(|at| at <= self.deps.clock.now());
        let old = self.volumes.made.is_none_or(|at| at.elapsed() >= self.deps.settings.sync_frequency);
        if !due && !old && !self.volumes.stale {
            return;
        }
        match self.make_volumes(pod, REFRESH).await {
            Ok(volumes) => self.prepared = Some((pod.clone(), volumes)),
            Err(reason) if !self.is_to_end() => self.note_failure("volumes", &reason),
            Err(_) => {}
        }
    }

    /// Makes the volumes of a pod that waits for them.
    pub(crate) async fn first_volumes(&mut self, pod: &DesiredPod) -> Result<(), Next> {
        match self.make_volumes(pod, Duration::MAX).await {
            Ok(volumes) => {
                self.prepared = Some((pod.clone(), volumes));
                Ok(())
            }
            Err(reason) => {
                if let Some(message) = self.volumes.refused.take() {
                    return Err(self.refuse(pod, message));
                }
                if !self.is_to_end() {
                    self.failed("volumes", &reason);
                }
                Err(self.volume_retry())
            }
        }
    }

    /// The pod cannot stay on this node: it ends as one that was not admitted.
    fn refuse(&mut self, pod: &DesiredPod, message: String) -> Next {
        warn!(pod = pod.full_name(), reason = LIMIT_EXCEEDED, err = message, "Pod was rejected");
        self.deps.events.pod_warning(pod, LIMIT_EXCEEDED, &message);
        self.deps.metrics.admission_rejected(LIMIT_EXCEEDED);
        self.ending = Some(EndReason::Refused { reason: LIMIT_EXCEEDED.to_owned(), message });
        Next::Ended
    }

    /// The pod, or the agent, is to end: what fails now needs no words.
    fn is_to_end(&self) -> bool {
        self.stop.is_cancelled() || matches!(&*self.intent.borrow(), Intent::End(_))
    }

    /// Makes all volumes ready. Given up when the pod is to end, or when what they show is not known in time.
    async fn make_volumes(&mut self, pod: &DesiredPod, limit: Duration) -> Result<MountedVolumes, String> {
        let deps = self.deps.clone();
        self.volumes.stale = false;
        self.entry.begin(StepKind::Volumes, "", deps.clock.now());
        let mut newer = self.intent.clone();
        let gathered = tokio::select! {
            biased;
            gathered = tokio::time::timeout(limit, self.gather(pod)) => {
                gathered.map_err(|_| "the API server does not answer in time; what stands stays as it is")
            }
            () = to_end(&mut newer) => Err("the pod is to end"),
            () = self.stop.cancelled() => Err("the agent stops"),
        };
        let result = match gathered {
            Ok(gathered) => self.mount(pod, gathered).await,
            Err(reason) => Err(reason.to_owned()),
        };
        let outcome = match &result {
            Ok(_) => StepResult::Done,
            Err(reason) => StepResult::Failed(reason.clone()),
        };
        self.entry.end(StepKind::Volumes, "", outcome, deps.clock.now());
        match &result {
            Ok(_) => {
                self.volumes.failures = 0;
                self.volumes.retry_at = None;
            }
            Err(_) => {
                let wait = FIRST_WAIT.saturating_mul(1 << self.volumes.failures.min(8)).min(LONGEST_WAIT);
                self.volumes.failures += 1;
                self.volumes.retry_at = Some(Instant::now() + wait);
                let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::ZERO);
                self.volumes.wake_at = deps.clock.now().saturating_add(wait).ok();
            }
        }
        result
    }

    async fn mount(&mut self, pod: &DesiredPod, gathered: Gathered) -> Result<MountedVolumes, String> {
        let Gathered { payloads, mut failed, unprocessed, plugins, due } = gathered;
        let began = Instant::now();
        let mut results = self.deps.host.mount_volumes(pod, payloads).await.map_err(|e| e.chain())?;
        self.volumes.plugins = !plugins.is_empty();
        let mut newer = self.intent.clone();
        let Asked { waits, exhausted } = tokio::select! {
            biased;
            asked = self.mount_plugins(pod, plugins, &mut results) => asked,
            // What a plugin has begun goes on, and is undone with the pod.
            () = to_end(&mut newer) => Asked { waits: vec!["the pod is to end".to_owned()], ..Asked::default() },
        };
        self.volumes.refused = (!exhausted.is_empty()).then(|| {
            let names: Vec<&str> = exhausted.iter().map(String::as_str).collect();
            format!(
                "Node has reached its volume attachment limit, rejecting pod. unmounted volumes={}, unattached volumes={}, failed \
                 to process volumes=[]: context deadline exceeded",
                go_list(&missing(pod, &results.mounted)),
                go_list(&names)
            )
        });
        self.volumes.made = Some(Instant::now());
        self.volumes.wake_at = due;
        failed.extend(results.failed);
        for volume in pod.spec().volumes.iter().flatten() {
            let bad = failed.contains_key(&volume.name);
            if bad || results.mounted.contains_key(&volume.name) {
                let plugin = decide::volume_plugin::plugin_name(volume);
                self.deps.metrics.beside.volume_mounted(plugin, began.elapsed(), bad);
            }
        }
        for message in failed.values() {
            self.deps.events.pod_warning(pod, "FailedMount", message);
        }
        if failed.is_empty() && unprocessed.is_empty() && waits.is_empty() {
            return Ok(results.mounted);
        }
        let mut messages: Vec<String> = failed.values().cloned().chain(waits).collect();
        if !unprocessed.is_empty() {
            let message = unmounted(pod, &results.mounted, &unprocessed);
            self.deps.events.pod_warning(pod, "FailedMount", &message);
            messages.push(message);
        }
        Err(messages.join("; "))
    }

    /// Asks the plugins.
    async fn mount_plugins(
        &self,
        pod: &DesiredPod,
        plugins: BTreeMap<String, (CsiVolume, Option<i64>)>,
        results: &mut VolumeResults,
    ) -> Asked {
        let again = self.is_prepared(pod);
        let all = plugins.into_iter().map(|(name, (volume, gid))| async move {
            let stands = self.deps.plugins.mount(pod, &self.entry, &volume, again).await;
            (name, volume, gid, stands)
        });
        let mut asked = Asked::default();
        for (name, volume, gid, stands) in join_all(all).await {
            match stands {
                PluginVolume::Ready { path, relabel } => {
                    let mounted = MountedVolume {
                        read_only: volume.read_only,
                        gid,
                        device: volume.block,
                        spec_name: Some(volume.spec_name),
                        relabel: relabel && !volume.read_only,
                        ..MountedVolume::at(path)
                    };
                    results.mounted.insert(name, mounted);
                }
                PluginVolume::Waits(what) => asked.waits.push(what),
                PluginVolume::Exhausted => {
                    asked.waits.push(format!("the node can take no more volumes of driver {}", volume.driver));
                    asked.exhausted.push(name);
                }
                PluginVolume::Failed { reason, message, fresh } => {
                    if fresh {
                        self.deps.events.pod_warning(pod, reason, &message);
                    }
                    asked.waits.push(message);
                }
            }
        }
        asked
    }

    /// Asks for everything that the volumes show.
    async fn gather(&self, pod: &DesiredPod) -> Gathered {
        let mut gathered = Gathered::default();
        for volume in pod.spec().volumes.iter().flatten().filter(|v| volume_is_used(pod, &v.name)) {
            let name = &volume.name;
            if let Some(size) = self.memory_size(pod, volume) {
                gathered.payloads.memory_sizes.insert(name.clone(), size);
            }
            if let Some(wanted) = claims::claim_of(pod, volume) {
                match self.claimed(pod, volume, &wanted).await {
                    Ok(ClaimedVolume { place: Place::Csi(mut volume), gid, .. }) => {
                        self.label(pod, name, &mut volume);
                        gathered.plug(name, *volume, gid);
                    }
                    Ok(claimed) => {
                        gathered.payloads.claimed.insert(name.clone(), claimed);
                    }
                    Err(reason) => {
                        let reason = format!("error processing PVC {}/{}: {reason}", pod.namespace(), wanted.name);
                        gathered.not_tried(name, reason);
                    }
                }
                continue;
            }
            let of_driver = match &volume.csi {
                Some(source) => Ok(Some(CsiVolume::inline(pod, name, source))),
                None => CsiVolume::migrated_inline(pod.namespace(), volume),
            };
            let own = match of_driver {
                Ok(None) => match disk::inline(pod, volume) {
                    Ok(own) => own,
                    Err(reason) => {
                        gathered.fail(name, "MountVolume.NewMounter initialization", &reason);
                        continue;
                    }
                },
                Ok(own) => own,
                Err(reason) => {
                    gathered.not_tried(name, reason);
                    continue;
                }
            };
            if let Some(mut own) = own {
                self.label(pod, name, &mut own);
                gathered.plug(name, own, None);
                continue;
            }
            match self.volume_files(pod, volume, &mut gathered.due).await {
                Ok(Some(shown)) => {
                    gathered.payloads.files.insert(name.clone(), shown);
                }
                Ok(None) => {}
                Err(reason) => gathered.fail(name, "MountVolume.SetUp", &reason),
            }
        }
        gathered
    }

    /// Notes the SELinux labels that the pod wants of a volume, and whether it may be mounted with one.
    fn label(&self, pod: &DesiredPod, name: &str, volume: &mut CsiVolume) {
        let node = &self.deps.settings.node;
        if let Some(context) = &node.selinux {
            volume.labels = selinux::volume_labels(pod, name, context);
            volume.may_have_label = selinux::may_have_label(&volume.access_modes, node.gates.selinux_mount);
        }
    }

    fn memory_size(&self, pod: &DesiredPod, volume: &Volume) -> Option<u64> {
        let in_memory = match &volume.empty_dir {
            Some(dir) => dir.medium.as_deref() == Some("Memory"),
            None => volume.downward_api.is_some() || volume.projected.is_some() || volume.secret.is_some(),
        };
        let allocatable = self.deps.settings.node.allocatable.as_ref().filter(|_| in_memory)?;
        let limit = volume.empty_dir.as_ref().and_then(|dir| Quantity::of(dir.size_limit.as_ref()?).ok());
        u64::try_from(resources::memory_volume_size(pod, limit.as_ref(), allocatable)).ok()
    }

    async fn claimed(
        &self,
        pod: &DesiredPod,
        volume: &Volume,
        wanted: &claims::ClaimRef,
    ) -> Result<claims::ClaimedVolume, String> {
        let objects = &self.deps.objects;
        let claim = objects
            .claim(pod.namespace(), &wanted.name)
            .await
            .map_err(|e| format!("failed to fetch PVC from API server: {e}"))?;
        let name = claims::bound_volume(pod, wanted, &claim)?;
        let bound =
            objects.volume(&name).await.map_err(|e| format!("failed to fetch PV {name} from API server: {e}"))?;
        claims::claimed(pod, volume, wanted, &claim, &bound)
    }

    /// The files of a volume of files; None for other volumes.
    async fn volume_files(
        &self,
        pod: &DesiredPod,
        volume: &Volume,
        due: &mut Option<Timestamp>,
    ) -> Result<Option<VolumeFiles>, String> {
        let objects = &self.deps.objects;
        let namespace = pod.namespace();
        if let Some(source) = &volume.config_map {
            let optional = source.optional == Some(true);
            let map = found(objects.config_map(namespace, &source.name).await, optional)?;
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            return files::config_map_files(map.as_deref(), source.items.as_deref(), mode, optional).map(Some);
        }
        if let Some(source) = &volume.secret {
            let optional = source.optional == Some(true);
            let name = source.secret_name.as_deref().unwrap_or_default();
            let secret = found(objects.secret(namespace, name).await, optional)?;
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            return files::secret_files(secret.as_deref(), source.items.as_deref(), mode, optional).map(Some);
        }
        if let Some(source) = &volume.downward_api {
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            return self.downward(pod, source.items.as_deref(), mode).map(Some);
        }
        match &volume.projected {
            Some(source) => self.projected(pod, source, due).await.map(Some),
            None => Ok(None),
        }
    }

    fn downward(
        &self,
        pod: &DesiredPod,
        items: Option<&[model::api::DownwardAPIVolumeFile]>,
        mode: i32,
    ) -> Result<VolumeFiles, String> {
        let allocatable = self.deps.settings.node.allocatable.as_ref();
        let made = downward::item_files(pod, items.unwrap_or_default(), mode, allocatable)?;
        Ok(made.into_iter().map(|(path, (data, mode))| (path, VolumeFile { data, mode, uid: None })).collect())
    }

    /// Files of all sources, a later one over an earlier one; the faults of all of them.
    async fn projected(
        &self,
        pod: &DesiredPod,
        volume: &ProjectedVolumeSource,
        due: &mut Option<Timestamp>,
    ) -> Result<VolumeFiles, String> {
        let mode = volume.default_mode.unwrap_or(DEFAULT_MODE);
        let (mut all, mut faults) = (VolumeFiles::new(), Vec::new());
        for source in volume.sources.iter().flatten() {
            match self.projection(pod, source, mode, due).await {
                Ok(made) => all.extend(made),
                Err(fault) => faults.push(fault),
            }
        }
        aggregate(&faults).map_or(Ok(all), Err)
    }

    async fn projection(
        &self,
        pod: &DesiredPod,
        source: &VolumeProjection,
        mode: i32,
        due: &mut Option<Timestamp>,
    ) -> Result<VolumeFiles, String> {
        let objects = &self.deps.objects;
        let private =
            |data: Vec<u8>| VolumeFile { data, mode: files::token_mode(pod, mode), uid: files::file_user(pod) };
        if let Some(s) = &source.secret {
            let optional = s.optional == Some(true);
            let secret = found(objects.secret(pod.namespace(), &s.name).await, optional)?;
            return files::secret_files(secret.as_deref(), s.items.as_deref(), mode, optional);
        }
        if let Some(s) = &source.config_map {
            let optional = s.optional == Some(true);
            let map = found(objects.config_map(pod.namespace(), &s.name).await, optional)?;
            return files::config_map_files(map.as_deref(), s.items.as_deref(), mode, optional);
        }
        if let Some(s) = &source.downward_api {
            return self.downward(pod, s.items.as_deref(), mode);
        }
        if let Some(s) = &source.service_account_token {
            let audience = s.audience.as_deref().unwrap_or_default();
            let token = objects.token(pod, audience, s.expiration_seconds).await.map_err(|e| e.to_string())?;
            *due = Some(due.map_or(token.renew_at, |at| at.min(token.renew_at)));
            return Ok([(s.path.clone(), private(token.token.into_bytes()))].into());
        }
        if let Some(s) = &source.cluster_trust_bundle {
            let bundles = match (&s.name, &s.signer_name) {
                (Some(name), _) => TrustBundles::Named(name.clone()),
                (None, Some(name)) => TrustBundles::Signer { name: name.clone(), selector: s.label_selector.clone() },
                (None, None) => {
                    return Err("ClusterTrustBundle projection requires either name or signerName to be set".into());
                }
            };
            let optional = s.optional == Some(true);
            let anchors = objects.trust_anchors(&bundles, optional).await.map_err(|e| e.to_string())?;
            return Ok([(s.path.clone(), private(anchors))].into());
        }
        if source.pod_certificate.is_some() {
            // Gate PodCertificateRequest, off by default.
            return Err("unimplemented".into());
        }
        Ok(VolumeFiles::new())
    }
}

/// The object; None when it is optional and not there.
fn found<T>(answer: ObjectResult<T>, optional: bool) -> Result<Option<T>, String> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(ObjectError::NotFound(_)) if optional => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// What a volume shows may change while the pod runs.
fn changes(volume: &Volume) -> bool {
    let projected = volume.projected.iter().flat_map(|p| p.sources.iter().flatten());
    volume.config_map.is_some() || volume.secret.is_some() || projected.into_iter().any(|s| s.downward_api.is_none())
}

/// Names of the volumes that the pod uses and does not have, in the pod's order.
fn missing<'a>(pod: &'a DesiredPod, mounted: &MountedVolumes) -> Vec<&'a str> {
    let used = pod.spec().volumes.iter().flatten().filter(|v| v.image.is_none() && volume_is_used(pod, &v.name));
    used.map(|v| v.name.as_str()).filter(|n| !mounted.contains_key(*n)).collect()
}

/// The message about claims that cannot be followed.
fn unmounted(pod: &DesiredPod, mounted: &MountedVolumes, unprocessed: &BTreeMap<String, String>) -> String {
    let names: Vec<&str> = unprocessed.keys().map(String::as_str).collect();
    let reasons: Vec<&str> = unprocessed.values().map(String::as_str).collect();
    format!(
        "Unable to attach or mount volumes: unmounted volumes={}, unattached volumes=[], failed to process volumes={}: {}",
        go_list(&missing(pod, mounted)),
        go_list(&names),
        reasons.join("; ")
    )
}
