//! Images: is it there, may it be used, and pulling it when it must be.
//!
//! Pulls are started one after the other with `serializeImagePulls`, else up to `maxParallelImagePulls` at once, and at most
//! `registryPullQPS` a second with bursts of `registryBurst`. A failed pull backs off per pod and image.
//!
//! All credentials that fit the image are tried until one works. Who pulled what is recorded ([`records`]), and an image that is there is used only
//! by pods that have proven their right to it.
//!
//! No task of its own: each worker calls [`Images::ensure`] in its round and can drop the call (a deleted pod does not wait for its pull).
//! A pull has no deadline, as in the CRI: the runtime ends pulls that make no progress.

mod collection;
pub mod records;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cri::port::{CriError, Outcome, RuntimeMutator, RuntimeReader};
use cri_api::v1;
use decide::backoff::PullBackoffs;
use decide::config::image_name::{self, PullDecision};
use decide::credentials::records::{Access, PullCredentials, without_tag};
use decide::credentials::{Credential, Keyring};
use decide::text::{aggregate, go_duration};
use jiff::Timestamp;
use model::pod::{DesiredPod, PodUid};
use telemetry::metrics::Metrics;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tracing::{error, info};

use crate::events::Events;
use crate::objects::{PodObjects, Standalone};
use crate::ports::Clock;
pub use collection::ImageCollection;
use collection::Touched;
pub use records::Records;

/// An image that a container can be created from.
#[derive(Clone, Debug, PartialEq)]
pub struct UsableImage {
    /// Image id or ref for ContainerConfig.image.
    pub image_ref: String,
    /// The image as the runtime has it: user, id, names.
    pub image: v1::Image,
}

/// An image that is to be made usable.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Its name, as the spec has it.
    pub image: &'a str,
    /// Pull policy.
    pub policy: &'a str,
    /// The container that events are about; empty: the pod.
    pub container: &'a str,
}

/// Why a container's image cannot be used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageProblem {
    /// Waiting reason of the API: `ErrImagePull`, `ImagePullBackOff`, …
    pub reason: &'static str,
    /// Go's message.
    pub message: String,
    /// When a try makes sense again; None: the next sync.
    pub retry_at: Option<Timestamp>,
}

/// Credentials that the node has for every pod, or for a pod's service account: files of docker's formats, plugins.
#[async_trait]
pub trait NodeCredentials: Send + Sync {
    /// Those that fit a repository (`docker.io/library/x`), in the order in which they are to be tried. What cannot be had is logged and left
    /// out; never takes longer than a plugin's minute for each plugin.
    async fn lookup(&self, pod: &DesiredPod, repository: &str) -> Vec<Credential>;
}

/// A node without credentials.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCredentials;

#[async_trait]
impl NodeCredentials for NoCredentials {
    async fn lookup(&self, _pod: &DesiredPod, _repository: &str) -> Vec<Credential> {
        Vec::new()
    }
}

/// Credentials of one start, once they were looked up.
#[derive(Default)]
struct OnceCredentials(Option<Vec<Credential>>);

/// How a pull failed.
struct PullError {
    /// The API's reason.
    reason: &'static str,
    /// The API's message.
    message: String,
    /// The error itself, as events have it.
    event: String,
}

impl PullError {
    fn plain(message: String) -> Self {
        Self { reason: "ErrImagePull", event: message.clone(), message }
    }

    fn one(e: &CriError, reason: &'static str, image: &str) -> Self {
        let reason = image_name::pull_error_reason(&e.message).unwrap_or(reason);
        let message = if e.outcome == Outcome::Unreachable {
            format!("failed to pull image \"{image}\": {}", e.rpc_text())
        } else if reason == "ErrImagePull" {
            e.rpc_text()
        } else {
            image_name::pull_error_message(image, &e.message)
        };
        Self { reason, message, event: e.rpc_text() }
    }
}

/// How pulls are limited.
#[derive(Clone, Copy, Debug)]
pub struct PullLimits {
    /// Pulls at once; None: no limit.
    pub parallel: Option<usize>,
    /// Pulls started a second; 0: no limit.
    pub qps: u32,
    /// Burst on top of it.
    pub burst: u32,
}

/// Pulls that failed: how long each waits, and how the last one ended.
#[derive(Default)]
struct Backoff {
    waits: PullBackoffs,
    errors: HashMap<(PodUid, String), String>,
}

/// Image handling, shared by all workers.
pub struct Images {
    reader: Arc<dyn RuntimeReader>,
    mutator: Arc<dyn RuntimeMutator>,
    clock: Clock,
    metrics: Arc<Metrics>,
    events: Events,
    /// Counts pulls and removals, for whoever lists images.
    changed: watch::Sender<u64>,
    /// Images that containers are being made of.
    touched: Arc<Touched>,
    slots: Option<Semaphore>,
    bucket: Option<Mutex<Bucket>>,
    backoff: Mutex<Backoff>,
    objects: Arc<dyn PodObjects>,
    node: Arc<dyn NodeCredentials>,
    records: Option<Arc<Records>>,
}

/// A token bucket over tokio's clock.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    rate: f64,
    burst: f64,
    at: Instant,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        self.tokens = (self.tokens + self.rate * (now - self.at).as_secs_f64()).min(self.burst);
        self.at = now;
        let granted = self.tokens >= 1.0;
        if granted {
            self.tokens -= 1.0;
        }
        granted
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Images {
    /// Image handling over this runtime.
    pub fn new(
        reader: Arc<dyn RuntimeReader>,
        mutator: Arc<dyn RuntimeMutator>,
        clock: Clock,
        metrics: Arc<Metrics>,
        events: Events,
        limits: PullLimits,
    ) -> Self {
        let burst = f64::from(limits.burst.max(1));
        Self {
            reader,
            mutator,
            clock,
            metrics,
            events,
            changed: watch::Sender::new(0),
            touched: Arc::default(),
            slots: limits.parallel.map(Semaphore::new),
            bucket: (limits.qps > 0)
                .then(|| Mutex::new(Bucket { tokens: burst, rate: f64::from(limits.qps), burst, at: Instant::now() })),
            backoff: Mutex::default(),
            objects: Arc::new(Standalone),
            node: Arc::new(NoCredentials),
            records: None,
        }
    }

    /// Images with these credentials: the pod's pull secrets by way of `objects`, the node's own by way of `node`.
    #[must_use]
    pub fn with_credentials(mut self, objects: Arc<dyn PodObjects>, node: Arc<dyn NodeCredentials>) -> Self {
        self.objects = objects;
        self.node = node;
        self
    }

    /// Images whose pulls are recorded, and whose use must be proven (gate KubeletEnsureSecretPulledImages).
    #[must_use]
    pub fn with_records(mut self, records: Records) -> Self {
        self.records = Some(Arc::new(records));
        self
    }

    /// Makes an image usable: looks, decides by pull policy and by the pod's right to it, pulls.
    ///
    /// # Errors
    /// The waiting reason and message of the API.
    pub async fn ensure(
        &self,
        pod: &DesiredPod,
        wanted: &Wanted<'_>,
        sandbox: &v1::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<UsableImage, ImageProblem> {
        let Wanted { image: asked, policy, container: name } = *wanted;
        let told = |reason, event: &str, message: String| {
            self.events.warning(pod, name, event, &message);
            ImageProblem { reason, message, retry_at: None }
        };
        let image = image_name::with_default_tag(asked)
            .map_err(|e| told("InvalidImageName", "InspectFailed", image_name::default_tag_error(asked, &e)))?;
        let spec = v1::ImageSpec {
            image: image.clone(),
            user_specified_image: String::new(),
            image_ref: String::new(),
            runtime_handler: runtime_handler.to_owned(),
            annotations: pod.meta().annotations.clone().unwrap_or_default(),
        };
        let present = if policy == "Always" {
            None
        } else {
            // The name stands empty in Go's text.
            let failed = |e: CriError| format!("Failed to inspect image \"\": {}", e.rpc_text());
            self.reader
                .image_status(spec.clone())
                .await
                .map_err(|e| told("ImageInspectError", "InspectFailed", failed(e)))?
        };
        let never = || told("ErrImageNeverPull", "ErrImageNeverPull", image_name::never_pull_message(asked));
        let decision = image_name::pull_decision(policy, present.is_some());
        let looked = (policy != "Always").then_some(present.is_some());
        let mut credentials = OnceCredentials::default();
        let found = match (decision, present) {
            (PullDecision::UsePresent, Some(found)) => {
                self.may_use(pod, asked, &image, &found.id, &mut credentials).await?.then_some(found)
            }
            (PullDecision::Never, _) => {
                self.metrics.ensure_image(policy, looked, Some(false));
                return Err(never());
            }
            _ => None,
        };
        self.metrics.ensure_image(policy, looked, Some(found.is_none()));
        match found {
            Some(found) => {
                let message = image_name::present_message(asked, self.records.is_some());
                self.events.normal(pod, name, "Pulled", &message);
                Ok(self.usable(found))
            }
            // Whether it is there at all must not be told to those who may not use it.
            None if policy == "Never" => Err(never()),
            None => {
                let key = (pod.uid().clone(), spec.image.clone());
                if let Some(waiting) = self.in_backoff(&key, asked) {
                    self.events.normal(pod, name, "BackOff", &image_name::back_off_message(asked, ""));
                    return Err(waiting);
                }
                let credentials = self.credentials(pod, &image, &mut credentials).await?;
                self.pull(pod, name, asked, spec, sandbox, &credentials).await
            }
        }
    }

    /// True when the pod may use an image that is there.
    async fn may_use(
        &self,
        pod: &DesiredPod,
        asked: &str,
        image: &str,
        image_ref: &str,
        credentials: &mut OnceCredentials,
    ) -> Result<bool, ImageProblem> {
        let Some(records) = &self.records else { return Ok(true) };
        let (record, intended) = match records.find(asked, image_ref).await {
            Ok(known) => known,
            Err(reason) => {
                error!(image = asked, err = reason, "Unable to access cache records about image pulls");
                self.metrics.beside.must_pull_check("error");
                return Ok(false);
            }
        };
        if !records.policy().must_verify(asked, record.is_some() || intended) {
            self.metrics.beside.must_pull_check("credentialPolicyAllowed");
            return Ok(true);
        }
        let (Some(record), Ok(name)) = (record, without_tag(asked)) else {
            self.metrics.beside.must_pull_check("mustAuthenticate");
            return Ok(false);
        };
        let access = match records::access(Some(&record), &name) {
            Access::Depends => {
                let own = self.credentials(pod, image, credentials).await?;
                records::access_with(&record, &name, &own)
            }
            known => known,
        };
        let proven = matches!(access, Access::Granted | Access::GrantedNewly(_));
        let result = if proven { "credentialRecordFound" } else { "mustAuthenticate" };
        self.metrics.beside.must_pull_check(result);
        match access {
            Access::Granted => Ok(true),
            Access::GrantedNewly(who) => {
                if let Err(reason) = records.record(asked, image_ref, Some(&who)).await {
                    error!(image = asked, err = reason, "failed to write an image pulled record");
                }
                Ok(true)
            }
            Access::Unproven | Access::Depends => Ok(false),
        }
    }

    /// All credentials that may be tried: of the pod's secrets, of the node's files, of its plugins. Looked up once for each start.
    async fn credentials(
        &self,
        pod: &DesiredPod,
        image: &str,
        once: &mut OnceCredentials,
    ) -> Result<Vec<Credential>, ImageProblem> {
        if let Some(known) = &once.0 {
            return Ok(known.clone());
        }
        let problem = |message| ImageProblem { reason: "ErrImagePull", message, retry_at: None };
        let repository = image_name::parse(image).map_err(problem)?.repository;
        let mut keyring = Keyring::default();
        let mut missing = Vec::new();
        let names = pod.spec().image_pull_secrets.iter().flatten().map(|r| r.name.as_str()).filter(|n| !n.is_empty());
        for name in names {
            match self.objects.secret(pod.namespace(), name).await {
                Ok(secret) => keyring.add_secret(&secret).map_err(problem)?,
                Err(e) => {
                    info!(pod = pod.full_name(), secret = name, err = %e, "Unable to retrieve pull secret, the image pull may not succeed.");
                    missing.push(name);
                }
            }
        }
        if !missing.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            );
            self.events.pod_warning(pod, "FailedToRetrieveImagePullSecret", &message);
        }
        let mut all = keyring.lookup(&repository);
        all.extend(self.node.lookup(pod, &repository).await);
        Ok(once.0.insert(all).clone())
    }

    async fn pull(
        &self,
        pod: &DesiredPod,
        container: &str,
        asked: &str,
        spec: v1::ImageSpec,
        sandbox: &v1::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<UsableImage, ImageProblem> {
        let key = (pod.uid().clone(), spec.image.clone());
        let image = spec.image.clone();
        let waiting = Instant::now();
        self.events.normal(pod, container, "Pulling", &format!("Pulling image \"{asked}\""));
        let intent = match &self.records {
            Some(records) => Some(records.intend(asked).await.map_err(|reason| ImageProblem {
                reason: "ErrImagePull",
                message: format!("Failed to record image pull intent for container image \"{asked}\": {reason}"),
                retry_at: None,
            })?),
            None => None,
        };
        let _slot = match &self.slots {
            Some(slots) => slots.acquire().await.ok(),
            None => None,
        };
        let begin = Instant::now();
        info!(pod = pod.full_name(), image, "Pulling image");
        let pulled = self.try_all(&spec, sandbox, credentials).await;
        let (used, found) = match pulled {
            Ok((reference, used)) => {
                let by_ref = v1::ImageSpec { image: reference.clone(), ..spec };
                let found = self.reader.image_status(by_ref).await;
                (Some((reference, used)), found.map_err(|e| PullError::one(&e, "ImageInspectError", &image)))
            }
            Err(e) => (None, Err(e)),
        };
        if let (Some(records), Some(intent)) = (&self.records, intent) {
            let used = used.map(|(reference, used)| (reference, PullCredentials::of(used.as_ref())));
            records.finish(intent, used).await;
        }
        let failed = match found {
            Ok(Some(found)) => {
                let took = begin.elapsed();
                self.metrics.image_pulled(found.size, waiting.elapsed());
                self.changed.send_modify(|n| *n += 1);
                info!(pod = pod.full_name(), image, took = ?took, bytes = found.size, "Pulled image");
                let message = format!(
                    "Successfully pulled image \"{asked}\" in {} ({} including waiting). Image size: {} bytes.",
                    go_duration(millis(took)),
                    go_duration(millis(waiting.elapsed())),
                    found.size
                );
                self.events.normal(pod, container, "Pulled", &message);
                return Ok(self.usable(found));
            }
            Ok(None) => PullError::plain(format!("image \"{image}\" vanished right after its pull")),
            Err(e) => e,
        };
        self.events.warning(pod, container, "Failed", &format!("Failed to pull image \"{asked}\": {}", failed.event));
        Err(self.failed(key, failed.reason, failed.message))
    }

    /// Pulls with one credential after the other, without any when there are none; what worked.
    async fn try_all(
        &self,
        spec: &v1::ImageSpec,
        sandbox: &v1::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<(String, Option<Credential>), PullError> {
        let all: Vec<Option<&Credential>> =
            if credentials.is_empty() { vec![None] } else { credentials.iter().map(Some).collect() };
        let mut errors = Vec::new();
        for credential in all {
            if let Some(bucket) = &self.bucket
                && !lock(bucket).take(Instant::now())
            {
                errors.push(PullError::plain("pull QPS exceeded".to_owned()));
                continue;
            }
            let auth = credential.map(|c| v1::AuthConfig {
                username: c.login.username.clone(),
                password: c.login.password.clone(),
                ..v1::AuthConfig::default()
            });
            match self.mutator.pull_image(spec.clone(), auth, Some(sandbox.clone())).await {
                Ok(reference) => return Ok((reference, credential.cloned())),
                Err(e) => errors.push(PullError::one(&e, "ErrImagePull", &spec.image)),
            }
        }
        if errors.len() == 1
            && let Some(only) = errors.pop()
        {
            return Err(only);
        }
        let texts: Vec<String> = errors.into_iter().map(|e| e.event).collect();
        Err(PullError::plain(aggregate(&texts).unwrap_or_default()))
    }

    /// The problem of a pull that must wait, if it must.
    fn in_backoff(&self, key: &(PodUid, String), asked: &str) -> Option<ImageProblem> {
        let backoff = lock(&self.backoff);
        let wait = backoff.waits.waits(&key.0, &key.1, self.clock.now())?;
        let error = backoff.errors.get(key).map_or("", String::as_str);
        Some(ImageProblem {
            reason: "ImagePullBackOff",
            message: image_name::back_off_message(asked, error),
            retry_at: Some(wait.until),
        })
    }

    /// Notes a failure and tells when to try again.
    fn failed(&self, key: (PodUid, String), reason: &'static str, message: String) -> ImageProblem {
        let now = self.clock.now();
        let mut backoff = lock(&self.backoff);
        backoff.waits.record_failure(&key.0, &key.1, now);
        let retry_at = backoff.waits.waits(&key.0, &key.1, now).map(|w| w.until);
        backoff.errors.insert(key, format!("{reason}: {message}"));
        ImageProblem { reason, message, retry_at }
    }

    /// Counts up with every image that was pulled or removed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// What the collection of images may do.
    pub fn collection(&self) -> ImageCollection {
        ImageCollection::new(
            self.mutator.clone(),
            self.changed.clone(),
            self.touched.clone(),
            self.records.clone(),
            self.clock.clone(),
        )
    }

    /// An image that a container is about to be made of: it stays.
    fn usable(&self, image: v1::Image) -> UsableImage {
        self.touched.note(&image.id, self.clock.now());
        UsableImage { image_ref: image.id.clone(), image }
    }

    /// Forgets a pod that is gone.
    pub fn forget(&self, uid: &PodUid) {
        let mut backoff = lock(&self.backoff);
        backoff.waits.remove_pod(uid);
        backoff.errors.retain(|(u, _), _| u != uid);
    }
}

/// Durations of events have whole milliseconds.
fn millis(d: Duration) -> Duration {
    Duration::from_millis(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
#[path = "images/tests.rs"]
mod tests;
