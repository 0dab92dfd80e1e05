//! The collection of images: those that nothing uses go when their file system is full, or when they are old.
//!
//! Task: owned by [`start`], ends with [`Tasks::stop`]; a removal that is cut off is seen the next time. Inputs: time (every [`PERIOD`]) and wishes of
//! eviction, in a queue of [`WISHES`]; those that wait together are served by one pass. Deadline: the runtime's for each call. Runtime slow or gone: the pass
//! fails, the next one begins with a new look. What may go is decided in [`decide::gc::images`]; who was used when is known to this task alone and
//! begins anew with the agent.
//!
//! It holds the right to remove images and no other ([`ImageCollection`]). A removal that the runtime refuses (somebody uses the image after all) costs
//! nothing.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cri::port::RuntimeReader;
use cri_api::v1;
use decide::gc::images::{INVALID_CAPACITY, ImageGcPolicy, ImageLedger, ImageRecord, ImagesInUse, shortage};
use decide::node::NodeEvent;
use decide::text::aggregate;
use futures::StreamExt;
use jiff::Timestamp;
use pod::images::ImageCollection;
use pod::ports::{Clock, Tasks};
use pod::registry::Registry;
use telemetry::metrics::Metrics;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info};

use crate::NodeEvents;

/// How often images are looked at (Go's `ImageGCPeriod`).
pub const PERIOD: Duration = Duration::from_secs(300);
/// Wishes that may wait.
const WISHES: usize = 4;
/// Containers with image volumes that are asked for at once.
const ASKED_AT_ONCE: usize = 8;
/// Label of a container that names its pod.
const POD_UID: &str = "io.kubernetes.pod.uid";

/// Size of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes.
    pub capacity: u64,
    /// Bytes that an unprivileged process may still write.
    pub available: u64,
}

/// Finds the size of the file system at a mount point. May block: it runs on a thread for that.
pub type FindSpace = Arc<dyn Fn(&str) -> Result<Space, String> + Send + Sync>;

/// What the task works with.
pub struct ImagePorts {
    /// Images, containers, and where the images are.
    pub reader: Arc<dyn RuntimeReader>,
    /// The right to remove images.
    pub images: ImageCollection,
    /// Sizes of file systems.
    pub space: FindSpace,
    /// Pods with image volumes are found here.
    pub registry: Arc<Registry>,
    /// Where events go.
    pub events: Arc<dyn NodeEvents>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// The clock.
    pub clock: Clock,
}

/// Asks the task to remove what is not used.
#[derive(Clone, Debug)]
pub struct ImageGc(mpsc::Sender<oneshot::Sender<Result<u64, String>>>);

impl ImageGc {
    /// Removes every image that may go, however full the disk is; the bytes that they had. Waits for a pass under way, and for the runtime.
    ///
    /// # Errors
    /// What could not be done; some images may have gone all the same.
    pub async fn remove_unused(&self) -> Result<u64, String> {
        let (answer, done) = oneshot::channel();
        let gone = || "the collection of images has ended".to_owned();
        self.0.send(answer).await.map_err(|_| gone())?;
        done.await.map_err(|_| gone())?
    }
}

/// Starts the task.
pub fn start(policy: ImageGcPolicy, ports: ImagePorts, tasks: &Tasks) -> ImageGc {
    let (wishes, asked) = mpsc::channel(WISHES);
    if policy.is_off() {
        info!("ImageGCHighThresholdPercent is set 100 and ImageMaximumGCAge is 0, Disable image GC");
    }
    let started = ports.clock.now();
    let task = Collector { policy, ports, started, ledger: ImageLedger::default(), failed_before: false };
    tasks.spawn_until_stop(task.run(asked));
    ImageGc(wishes)
}

/// Why images go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    Age,
    Space,
}

/// What is there at the beginning of a pass.
struct Look {
    at: Timestamp,
    images: Vec<v1::Image>,
}

struct Collector {
    policy: ImageGcPolicy,
    ports: ImagePorts,
    started: Timestamp,
    ledger: ImageLedger,
    failed_before: bool,
}

impl Collector {
    async fn run(mut self, mut asked: mpsc::Receiver<oneshot::Sender<Result<u64, String>>>) {
        let mut tick = tokio::time::interval(PERIOD);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(first) = asked.recv() => {
                    let mut waiting = vec![first];
                    while let Ok(more) = asked.try_recv() {
                        waiting.push(more);
                    }
                    info!("Attempting to delete unused images");
                    let result = self.free_all().await;
                    for answer in waiting {
                        // Who asked may have given up.
                        let _ = answer.send(result.clone());
                    }
                }
                _ = tick.tick() => self.periodic().await,
            }
        }
    }

    /// The regular pass, and Go's words about how it went.
    async fn periodic(&mut self) {
        if self.policy.is_off() {
            // Eviction may ask for what is not used, so it must be known.
            if let Err(reason) = self.look().await {
                info!(err = reason, "Failed to monitor images");
            }
            return;
        }
        let failed = match self.collect().await {
            Ok(()) => {
                debug!("Image garbage collection succeeded");
                false
            }
            Err(reason) if self.failed_before => {
                error!(err = reason, "Image garbage collection failed multiple times in a row");
                self.ports.events.event(&NodeEvent::warning("ImageGCFailed", reason));
                true
            }
            Err(reason) => {
                error!(err = reason, "Image garbage collection failed once");
                true
            }
        };
        if std::mem::replace(&mut self.failed_before, failed) && !failed {
            info!("Image garbage collection succeeded");
        }
    }

    async fn collect(&mut self) -> Result<(), String> {
        let look = self.look().await?;
        let old = self.ledger.too_old(self.started, look.at, &self.policy);
        let (_, failures) = self.remove(&old, u64::MAX, Why::Age).await;
        if !old.is_empty() {
            self.forget_pulls(&look).await;
        }
        if let Some(text) = aggregate(&failures) {
            let age = decide::text::go_duration(self.policy.max_age);
            return Err(format!(
                "wanted to free images older than {age}, encountered errors in image deletion: {text}"
            ));
        }
        if self.policy.high_percent >= 100 {
            return Ok(());
        }
        let space = self.space().await?;
        if space.capacity == 0 {
            let (reason, message) = INVALID_CAPACITY;
            self.ports.events.event(&NodeEvent::warning(reason, message));
            return Err(message.to_owned());
        }
        let Some(shortage) = shortage(space.capacity, space.available, &self.policy) else { return Ok(()) };
        info!(
            usage = shortage.usage_percent,
            highThreshold = self.policy.high_percent,
            amountToFree = shortage.bytes,
            lowThreshold = self.policy.low_percent,
            "Disk usage on image filesystem is over the high threshold, trying to free bytes down to the low threshold"
        );
        let freed = self.free(&look, shortage.bytes).await?;
        if freed < shortage.bytes {
            let message = shortage.not_freed(freed);
            self.ports.events.event(&NodeEvent::warning("FreeDiskSpaceFailed", message.as_str()));
            return Err(message);
        }
        Ok(())
    }

    async fn free_all(&mut self) -> Result<u64, String> {
        let look = self.look().await?;
        self.free(&look, u64::MAX).await
    }

    /// Removes images until `bytes` are free; how many became free.
    async fn free(&mut self, look: &Look, bytes: u64) -> Result<u64, String> {
        let removable = self.ledger.removable(look.at, &self.policy);
        let (freed, failures) = self.remove(&removable, bytes, Why::Space).await;
        self.forget_pulls(look).await;
        match aggregate(&failures) {
            None => Ok(freed),
            Some(text) => Err(format!(
                "wanted to free {bytes} bytes, but freed {freed} bytes space with errors in image deletion: {text}"
            )),
        }
    }

    /// Removes one image after the other until `bytes` are free; the bytes, and how removals failed.
    async fn remove(&mut self, images: &[ImageRecord], bytes: u64, why: Why) -> (u64, Vec<String>) {
        let (mut freed, mut failures) = (0u64, Vec::new());
        for image in images {
            if freed >= bytes {
                break;
            }
            let (id, handler) = (&image.key.id, &image.key.handler);
            // Its turn may come long after the look; a container may be being made of it by now.
            if self.ports.images.just_used().contains(id) {
                continue;
            }
            info!(imageID = id, size = image.size, runtimeHandler = handler, "Removing image to free bytes");
            match self.ports.images.remove(id, handler).await {
                Ok(()) => {
                    self.ledger.forget(&image.key);
                    self.ports.metrics.image_collected(why == Why::Age);
                    freed = freed.saturating_add(image.size);
                }
                Err(e) => failures.push(e.rpc_text()),
            }
        }
        (freed, failures)
    }

    /// Lists images and what uses them.
    async fn look(&mut self) -> Result<Look, String> {
        let reader = &self.ports.reader;
        let at = self.ports.clock.now();
        let lists = futures::future::try_join(reader.list_images(None), reader.list_containers(None)).await;
        let (images, containers) = lists.map_err(|e| e.rpc_text())?;
        let mut in_use = ImagesInUse::of(&containers);
        self.add_image_volumes(&containers, &mut in_use).await?;
        for id in self.ports.images.just_used() {
            in_use.add(id);
        }
        self.ledger.observe(&images, &in_use, at);
        Ok(Look { at, images })
    }

    /// Adds the images that containers have mounted as volumes. Only containers of pods with such volumes are asked for.
    async fn add_image_volumes(&self, containers: &[v1::Container], in_use: &mut ImagesInUse) -> Result<(), String> {
        let pods: HashSet<String> = self
            .ports
            .registry
            .all()
            .iter()
            .filter(|entry| {
                let view = entry.view();
                let volumes = view.desired.as_ref().and_then(|p| p.spec().volumes.as_ref());
                volumes.is_some_and(|all| all.iter().any(|v| v.image.is_some()))
            })
            .map(|entry| entry.uid.to_string())
            .collect();
        let of_them = containers.iter().filter(|c| c.labels.get(POD_UID).is_some_and(|uid| pods.contains(uid)));
        let ids: Vec<String> = of_them.map(|c| c.id.clone()).collect();
        let reader = &self.ports.reader;
        let asked = futures::stream::iter(ids).map(|id| {
            let reader = reader.clone();
            async move { reader.container_status(&id, false).await }
        });
        let statuses: Vec<_> = asked.buffer_unordered(ASKED_AT_ONCE).collect().await;
        for status in statuses {
            let mounts = match status {
                Ok(answer) => answer.status.map(|s| s.mounts).unwrap_or_default(),
                // It went meanwhile.
                Err(e) if e.is_not_found() => continue,
                Err(e) => return Err(format!("get container status: {}", e.rpc_text())),
            };
            for image in mounts.into_iter().filter_map(|m| m.image) {
                in_use.add(image.image);
            }
        }
        Ok(())
    }

    /// The file system that the images are on.
    async fn space(&self) -> Result<Space, String> {
        let info = self.ports.reader.image_fs_info().await.map_err(|e| e.rpc_text())?;
        let first = info.image_filesystems.into_iter().next();
        let first = first.ok_or("imageFs information is unavailable")?;
        let mountpoint = first.fs_id.map(|id| id.mountpoint).unwrap_or_default();
        let find = self.ports.space.clone();
        let found = tokio::task::spawn_blocking(move || find(&mountpoint)).await;
        found.unwrap_or_else(|e| Err(e.to_string())).map_err(|e| format!("get filesystem info: {e}"))
    }

    /// Records of pulls go with their images, whoever removed these.
    async fn forget_pulls(&self, look: &Look) {
        let present: BTreeSet<String> = {
            let left: HashSet<_> = self.ledger.records().map(|r| r.key.id.as_str()).collect();
            look.images
                .iter()
                .filter(|i| left.contains(i.id.as_str()))
                .flat_map(|i| std::iter::once(&i.id).chain(&i.repo_digests).chain(&i.repo_tags))
                .cloned()
                .collect()
        };
        self.ports.images.prune_records(&present, look.at).await;
    }
}

#[cfg(test)]
#[path = "images_tests.rs"]
mod tests;
