//! Pull intents and records on disk: `ROOT/image_manager/{pulling,pulled}/sha256-HEX`. What they mean is decided in
//! [`decide::credentials::records`].
//!
//! An intent stays when its pull was cut off (a deleted pod, a crash): the image may have come all the same, and must not pass for one that
//! was always there.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use cri::port::RuntimeReader;
use decide::credentials::records::{self, Policy, PullCredentials, PullIntent, PulledRecord, file_name, without_tag};
use jiff::{SignedDuration, Timestamp};
use tracing::{error, info};

use crate::ports::{Clock, HostResult, PodHost};

pub use decide::credentials::records::{access, access_with};

const FILE_MODE: u32 = 0o600;

/// The files behind the records.
#[async_trait]
pub trait RecordFiles: Send + Sync {
    /// Content; None when absent.
    async fn read(&self, path: &Path) -> HostResult<Option<Vec<u8>>>;
    /// Written as a whole or not at all.
    async fn write(&self, path: &Path, content: Vec<u8>) -> HostResult<()>;
    /// Absent is done.
    async fn remove(&self, path: &Path) -> HostResult<()>;
    /// Names and contents of a directory's files.
    async fn list(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>>;
}

#[async_trait]
impl RecordFiles for Arc<dyn PodHost> {
    async fn read(&self, path: &Path) -> HostResult<Option<Vec<u8>>> {
        self.read_file(path).await
    }

    async fn write(&self, path: &Path, content: Vec<u8>) -> HostResult<()> {
        self.write_atomic(path, content, FILE_MODE).await
    }

    async fn remove(&self, path: &Path) -> HostResult<()> {
        self.remove_file(path).await
    }

    async fn list(&self, dir: &Path) -> HostResult<Vec<(String, Vec<u8>)>> {
        self.list_files(dir).await
    }
}

/// The records of this node's images.
pub struct Records {
    disk: Box<dyn RecordFiles>,
    pulling: PathBuf,
    pulled: PathBuf,
    policy: Policy,
    clock: Clock,
    /// Pulls of an image that run now.
    running: Arc<Mutex<HashMap<String, usize>>>,
    /// One change of the files at a time.
    files: tokio::sync::Mutex<()>,
}

/// A pull that was begun.
pub struct Intent {
    image: String,
    running: Arc<Mutex<HashMap<String, usize>>>,
}

fn counts(m: &Mutex<HashMap<String, usize>>) -> MutexGuard<'_, HashMap<String, usize>> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Intent {
    fn drop(&mut self) {
        let mut running = counts(&self.running);
        if let Some(count) = running.get_mut(&self.image) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.image);
            }
        }
    }
}

impl Records {
    /// Records below `ROOT/image_manager`; its directories `pulling` and `pulled` are there.
    pub fn new(disk: impl RecordFiles + 'static, root: &Path, policy: Policy, clock: Clock) -> Self {
        let dir = root.join("image_manager");
        Self {
            disk: Box::new(disk),
            pulling: dir.join("pulling"),
            pulled: dir.join("pulled"),
            policy,
            clock,
            running: Arc::default(),
            files: tokio::sync::Mutex::default(),
        }
    }

    /// Whose right must be proven.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// At the start: what was being pulled when an earlier agent ended and is there now was pulled, by nobody knows whom.
    pub async fn take_over(&self, runtime: &dyn RuntimeReader) {
        let files = match self.disk.list(&self.pulling).await {
            Ok(files) => files,
            Err(e) => return error!(err = e.chain(), "there were errors listing ImagePullIntents"),
        };
        let intents: Vec<String> = files
            .into_iter()
            .filter(|(name, _)| name.starts_with("sha256-") && !name.ends_with(".tmp"))
            .filter_map(|(name, content)| match PullIntent::decode(&content) {
                Ok(intent) => Some(intent.image),
                Err(e) => {
                    error!(file = name, err = e, "A pull intent cannot be read");
                    None
                }
            })
            .collect();
        if intents.is_empty() {
            return;
        }
        let images = match runtime.list_images(None).await {
            Ok(images) => images,
            Err(e) => return error!(err = &e as &dyn std::error::Error, "failed to list images"),
        };
        for image in images {
            for name in image.repo_digests.iter().chain(&image.repo_tags).filter(|n| intents.contains(n)) {
                info!(image = name, id = image.id, "An image whose pull was not seen to end is taken for pulled");
                match self.record(name, &image.id, None).await {
                    Ok(()) => self.remove_intent(name).await,
                    Err(reason) => error!(image = name, err = reason, "failed to write an image pull record"),
                }
            }
        }
    }

    /// Notes that a pull begins. `image` as the spec has it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn intend(&self, image: &str) -> Result<Intent, String> {
        let _turn = self.files.lock().await;
        let file = self.pulling.join(file_name(image));
        let written = self.disk.write(&file, PullIntent::new(image).encode()).await;
        written.map_err(|e| format!("failed to record image pull intent: {}", e.chain()))?;
        *counts(&self.running).entry(image.to_owned()).or_default() += 1;
        Ok(Intent { image: image.to_owned(), running: self.running.clone() })
    }

    /// A pull has ended, with this image and these credentials, or without success.
    pub async fn finish(&self, intent: Intent, pulled: Option<(String, PullCredentials)>) {
        let image = intent.image.clone();
        if let Some((image_ref, who)) = pulled
            && let Err(reason) = self.record(&image, &image_ref, Some(&who)).await
        {
            // The intent stays: the image was pulled, and a restarted agent makes a record of it.
            return error!(image, err = reason, "failed to write image pulled record");
        }
        drop(intent);
        if !counts(&self.running).contains_key(&image) {
            self.remove_intent(&image).await;
        }
    }

    async fn remove_intent(&self, image: &str) {
        let _turn = self.files.lock().await;
        if let Err(e) = self.disk.remove(&self.pulling.join(file_name(image))).await {
            error!(image, err = e.chain(), "failed to remove image pull intent");
        }
    }

    /// What is known of an image: its record, and whether a pull of it was begun.
    ///
    /// # Errors
    /// A file cannot be read, or not understood.
    pub async fn find(&self, image: &str, image_ref: &str) -> Result<(Option<PulledRecord>, bool), String> {
        let _turn = self.files.lock().await;
        let record = self.read(image_ref).await?;
        if record.is_some() || counts(&self.running).contains_key(image) {
            return Ok((record, true));
        }
        let file = self.pulling.join(file_name(image));
        let intended = match self.disk.read(&file).await.map_err(|e| e.chain())? {
            Some(content) => PullIntent::decode(&content)?.image == image,
            None => false,
        };
        Ok((None, intended))
    }

    async fn read(&self, image_ref: &str) -> Result<Option<PulledRecord>, String> {
        let file = self.pulled.join(file_name(image_ref));
        let Some(content) = self.disk.read(&file).await.map_err(|e| e.chain())? else { return Ok(None) };
        Ok(Some(PulledRecord::decode(&content)?).filter(|r| r.image_ref == image_ref))
    }

    /// Adds who may use an image; None: nobody is known.
    ///
    /// # Errors
    /// The image's name cannot be read, or the file not be written.
    pub async fn record(&self, image: &str, image_ref: &str, who: Option<&PullCredentials>) -> Result<(), String> {
        let name = without_tag(image)?;
        let now = self.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let _turn = self.files.lock().await;
        let known = self.read(image_ref).await.unwrap_or_else(|reason| {
            info!(image, err = reason, "failed to retrieve an ImagePulledRecord");
            None
        });
        let fresh = known.is_none();
        let mut record = known.unwrap_or_else(|| records::PulledRecord::new(image_ref, &now));
        let changed = who.is_some_and(|who| record.merge(&name, who, &now));
        if !fresh && !changed {
            return Ok(());
        }
        let file = self.pulled.join(file_name(image_ref));
        self.disk.write(&file, record.encode()).await.map_err(|e| e.chain())
    }

    /// Removes the records of images that are not among `present` (ids, digests, names), as listed at `listed`. Younger records stay: their image may have
    /// come since. What cannot be removed is removed the next time.
    pub async fn prune(&self, present: &BTreeSet<String>, listed: Timestamp) {
        let files = match self.disk.list(&self.pulled).await {
            Ok(files) => files,
            Err(e) => return error!(err = e.chain(), "there were errors listing ImagePulledRecords"),
        };
        for (name, content) in files.into_iter().filter(|(name, _)| name.starts_with("sha256-")) {
            // One that cannot be read says nothing about its image.
            let Ok(record) = PulledRecord::decode(&content) else { continue };
            if present.contains(&record.image_ref) || name != file_name(&record.image_ref) {
                continue;
            }
            let _turn = self.files.lock().await;
            // Read again in its turn: a pull that ended meanwhile has renewed it. Times in records are whole seconds.
            let known = self.read(&record.image_ref).await.ok().flatten();
            let updated = known.and_then(|r| r.last_updated_time?.parse::<Timestamp>().ok());
            let old =
                updated.is_some_and(|at| at.saturating_add(SignedDuration::from_secs(1)).is_ok_and(|at| at <= listed));
            if !old {
                continue;
            }
            info!(image = record.image_ref, "The image is gone, so is the record of its pull");
            if let Err(e) = self.disk.remove(&self.pulled.join(name)).await {
                error!(image = record.image_ref, err = e.chain(), "failed to remove an ImagePulledRecord");
            }
        }
    }
}
