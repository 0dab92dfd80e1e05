//! Images: is it there, may it be used, and pulling it when it must be.
//!
//! Pulls are started one after the other with `serializeImagePulls`, else up to `maxParallelImagePulls` at once, and at most
//! `registryPullQPS` a second with bursts of `registryBurst`. A failed pull backs off per pod and image.
//!
//! No task of its own: each worker calls [`Images::ensure`] in its round and can drop the call (a deleted pod does not wait for its pull).
//! A pull has no deadline, as in the CRI: the runtime ends pulls that make no progress.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cri::port::{Outcome, RuntimeMutator, RuntimeReader};
use cri_api::v1;
use decide::backoff::PullBackoffs;
use decide::config::image_name::{self, PullDecision};
use decide::text::go_duration;
use jiff::Timestamp;
use model::pod::{ContainerEntry, DesiredPod, PodUid};
use telemetry::metrics::Metrics;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::info;

use crate::events::Events;
use crate::ports::Clock;

/// An image that a container can be created from.
#[derive(Clone, Debug, PartialEq)]
pub struct UsableImage {
    /// Image id or ref for ContainerConfig.image.
    pub image_ref: String,
    /// The image as the runtime has it: user, id, names.
    pub image: v1::Image,
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
    slots: Option<Semaphore>,
    bucket: Option<Mutex<Bucket>>,
    backoff: Mutex<Backoff>,
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
            slots: limits.parallel.map(Semaphore::new),
            bucket: (limits.qps > 0)
                .then(|| Mutex::new(Bucket { tokens: burst, rate: f64::from(limits.qps), burst, at: Instant::now() })),
            backoff: Mutex::default(),
        }
    }

    /// Makes the container's image usable: looks, decides by pull policy, pulls.
    ///
    /// # Errors
    /// The waiting reason and message of the API.
    pub async fn ensure(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        sandbox: &v1::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<UsableImage, ImageProblem> {
        let asked = container.spec.image.as_deref().unwrap_or_default();
        let problem = |reason, message: String| ImageProblem { reason, message, retry_at: None };
        let name = container.spec.name.as_str();
        let warning = |reason: &str, text: &str| self.events.warning(pod, name, reason, text);
        let image = image_name::with_default_tag(asked).map_err(|e| {
            let text = image_name::default_tag_error(asked, &e);
            warning("InspectFailed", &text);
            problem("InvalidImageName", text)
        })?;
        let spec = v1::ImageSpec {
            image: image.clone(),
            user_specified_image: String::new(),
            image_ref: String::new(),
            runtime_handler: runtime_handler.to_owned(),
            annotations: pod.meta().annotations.clone().unwrap_or_default(),
        };
        let present = self.reader.image_status(spec.clone()).await.map_err(|e| {
            let text = format!("Failed to inspect image \"{image}\": {}", e.message);
            warning("InspectFailed", &text);
            problem("ImageInspectError", text)
        })?;
        let policy = container.spec.image_pull_policy.as_deref().unwrap_or_default();
        let decision = image_name::pull_decision(policy, present.is_some());
        self.metrics.ensure_image(policy, Some(present.is_some()), Some(decision == PullDecision::Pull));
        match (decision, present) {
            (PullDecision::UsePresent, Some(found)) => {
                let text =
                    format!("Container image \"{asked}\" already present on machine and can be accessed by the pod");
                self.events.normal(pod, name, "Pulled", &text);
                Ok(usable(found))
            }
            (PullDecision::Never, _) => {
                let text = image_name::never_pull_message(asked);
                warning("ErrImageNeverPull", &text);
                Err(problem("ErrImageNeverPull", text))
            }
            _ => self.pull(pod, name, asked, spec, sandbox).await,
        }
    }

    async fn pull(
        &self,
        pod: &DesiredPod,
        container: &str,
        asked: &str,
        spec: v1::ImageSpec,
        sandbox: &v1::PodSandboxConfig,
    ) -> Result<UsableImage, ImageProblem> {
        let key = (pod.uid().clone(), spec.image.clone());
        if let Some(waiting) = self.in_backoff(&key, asked) {
            self.events.normal(pod, container, "BackOff", &format!("Back-off pulling image \"{asked}\""));
            return Err(waiting);
        }
        let begin = Instant::now();
        self.events.normal(pod, container, "Pulling", &format!("Pulling image \"{asked}\""));
        let _slot = match &self.slots {
            Some(slots) => slots.acquire().await.ok(),
            None => None,
        };
        if let Some(bucket) = &self.bucket
            && !lock(bucket).take(Instant::now())
        {
            let text = "pull QPS exceeded".to_owned();
            self.tell_failure(pod, container, asked, &text);
            return Err(self.failed(key, "ErrImagePull", text));
        }
        let image = spec.image.clone();
        let waited = begin.elapsed();
        info!(pod = pod.full_name(), image, "Pulling image");
        let pulled = self.mutator.pull_image(spec.clone(), None, Some(sandbox.clone())).await;
        let found = match pulled {
            Ok(reference) => {
                let by_ref = v1::ImageSpec { image: reference, ..spec };
                self.reader.image_status(by_ref).await.map_err(|e| (e, "ImageInspectError"))
            }
            Err(e) => Err((e, "ErrImagePull")),
        };
        match found {
            Ok(Some(found)) => {
                let took = begin.elapsed();
                self.metrics.image_pulled(found.size, took);
                info!(pod = pod.full_name(), image, took = ?took, bytes = found.size, "Pulled image");
                let text = format!(
                    "Successfully pulled image \"{asked}\" in {} ({} including waiting). Image size: {} bytes.",
                    go_duration(millis(took - waited)),
                    go_duration(millis(took)),
                    found.size
                );
                self.events.normal(pod, container, "Pulled", &text);
                Ok(usable(found))
            }
            Ok(None) => {
                let text = format!("image \"{image}\" vanished right after its pull");
                self.tell_failure(pod, container, asked, &text);
                Err(self.failed(key, "ErrImagePull", text))
            }
            Err((e, reason)) => {
                let reason = image_name::pull_error_reason(&e.message).unwrap_or(reason);
                let message = if e.outcome == Outcome::Unreachable {
                    format!("failed to pull image \"{image}\": {}", e.rpc_text())
                } else if reason == "ErrImagePull" {
                    e.rpc_text()
                } else {
                    image_name::pull_error_message(&image, &e.message)
                };
                self.tell_failure(pod, container, asked, &e.rpc_text());
                Err(self.failed(key, reason, message))
            }
        }
    }

    fn tell_failure(&self, pod: &DesiredPod, container: &str, asked: &str, error: &str) {
        self.events.warning(pod, container, "Failed", &format!("Failed to pull image \"{asked}\": {error}"));
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

fn usable(image: v1::Image) -> UsableImage {
    UsableImage { image_ref: image.id.clone(), image }
}
