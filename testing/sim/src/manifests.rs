//! Static pod manifests: written by tests in few words, held in memory, read by the agent as a directory.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use pod::ports::{HostError, HostResult};
use pod::source::file::{ManifestDir, ManifestFile, Stamp};
use serde_json::{Value, json};
use tokio::sync::watch;

/// One container of a [`Manifest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Name.
    pub name: String,
    /// Image.
    pub image: String,
    /// Fields besides name and image, as the API has them.
    pub more: Value,
}

impl Container {
    /// A container with its own name as image.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), image: format!("registry.local/{name}:1"), more: json!({}) }
    }

    /// Another image.
    #[must_use]
    pub fn image(self, image: &str) -> Self {
        Self { image: image.to_owned(), ..self }
    }

    /// One more field.
    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.more[field] = value;
        self
    }

    fn json(&self) -> Value {
        let mut container = self.more.clone();
        container["name"] = json!(self.name);
        container["image"] = json!(self.image);
        container
    }
}

/// A static pod in few words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// `metadata.name`; the node's name is added to it.
    pub name: String,
    /// `metadata.uid`; None: generated from the content.
    pub uid: Option<String>,
    /// `spec.restartPolicy`.
    pub policy: &'static str,
    /// `spec.terminationGracePeriodSeconds`.
    pub grace: i64,
    /// `spec.hostNetwork`.
    pub host_network: bool,
    /// `spec.priority`.
    pub priority: Option<i64>,
    /// `spec.initContainers`; a sidecar has `restartPolicy: Always`.
    pub inits: Vec<Container>,
    /// `spec.containers`.
    pub apps: Vec<Container>,
}

impl Manifest {
    /// A pod with one container `app`, restart policy Always and 5 s of grace.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            uid: None,
            policy: "Always",
            grace: 5,
            host_network: false,
            priority: None,
            inits: Vec::new(),
            apps: vec![Container::new("app")],
        }
    }

    /// With a UID of its own.
    #[must_use]
    pub fn uid(self, uid: &str) -> Self {
        Self { uid: Some(uid.to_owned()), ..self }
    }

    /// Another restart policy.
    #[must_use]
    pub fn policy(self, policy: &'static str) -> Self {
        Self { policy, ..self }
    }

    /// Another grace, seconds.
    #[must_use]
    pub fn grace(self, grace: i64) -> Self {
        Self { grace, ..self }
    }

    /// In the node's network.
    #[must_use]
    pub fn on_host_network(self) -> Self {
        Self { host_network: true, ..self }
    }

    /// With a priority.
    #[must_use]
    pub fn priority(self, priority: i64) -> Self {
        Self { priority: Some(priority), ..self }
    }

    /// One more init container.
    #[must_use]
    pub fn init(mut self, name: &str) -> Self {
        self.inits.push(Container::new(name));
        self
    }

    /// One more sidecar.
    #[must_use]
    pub fn sidecar(mut self, name: &str) -> Self {
        self.inits.push(Container::new(name).with("restartPolicy", json!("Always")));
        self
    }

    /// These app containers instead of `app`.
    #[must_use]
    pub fn apps(self, apps: impl IntoIterator<Item = Container>) -> Self {
        Self { apps: apps.into_iter().collect(), ..self }
    }

    /// The manifest's text.
    pub fn text(&self) -> String {
        self.object().to_string()
    }

    /// The pod as the API has it.
    pub fn object(&self) -> Value {
        let containers = |list: &[Container]| {
            let fill = |b: &Container| {
                let mut c = b.json();
                c["imagePullPolicy"] = json!("IfNotPresent");
                c
            };
            list.iter().map(fill).collect::<Vec<_>>()
        };
        let mut metadata = json!({ "name": self.name });
        if let Some(uid) = &self.uid {
            metadata["uid"] = json!(uid);
        }
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {
                "restartPolicy": self.policy,
                "terminationGracePeriodSeconds": self.grace,
                "hostNetwork": self.host_network,
                "initContainers": containers(&self.inits),
                "containers": containers(&self.apps),
                "volumes": [{ "name": "scratch", "emptyDir": {} }],
            },
        });
        if let Some(priority) = self.priority {
            pod["spec"]["priority"] = json!(priority);
        }
        pod
    }
}

/// The manifest directory. Cheap to clone; clones are the same directory.
#[derive(Clone, Debug)]
pub struct Dir(Arc<Mutex<Content>>, watch::Sender<()>);

#[derive(Debug, Default)]
struct Content {
    files: BTreeMap<PathBuf, (Stamp, Vec<u8>)>,
    writes: u64,
    failures: u32,
}

impl Default for Dir {
    fn default() -> Self {
        Self(Arc::default(), watch::Sender::new(()))
    }
}

impl Dir {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a file of this name stands.
    pub fn path(file: &str) -> PathBuf {
        PathBuf::from("/etc/kubernetes/manifests").join(file)
    }

    /// Writes a file.
    pub fn write(&self, file: &str, bytes: impl Into<Vec<u8>>) {
        let mut content = self.content();
        content.writes += 1;
        let bytes = bytes.into();
        let stamp = (content.writes, i128::from(content.writes), bytes.len() as u64);
        content.files.insert(Self::path(file), (stamp, bytes));
        drop(content);
        self.1.send_replace(());
    }

    /// Removes a file.
    pub fn remove(&self, file: &str) {
        self.content().files.remove(&Self::path(file));
        self.1.send_replace(());
    }

    /// The next readings fail, so many times.
    pub fn fail(&self, times: u32) {
        self.content().failures = times;
    }

    /// Paths and contents, sorted.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        self.content().files.iter().map(|(path, (_, bytes))| (path.clone(), bytes.clone())).collect()
    }

    /// What the agent reads.
    pub(crate) fn reader(&self) -> Reader {
        Reader { dir: self.clone(), changed: self.1.subscribe() }
    }
}

/// The directory as the agent's source holds it.
pub(crate) struct Reader {
    dir: Dir,
    changed: watch::Receiver<()>,
}

#[async_trait]
impl ManifestDir for Reader {
    async fn list(&mut self, known: &HashMap<PathBuf, Stamp>) -> HostResult<Vec<ManifestFile>> {
        let mut content = self.dir.content();
        if content.failures > 0 {
            content.failures -= 1;
            return Err(HostError::new("read static pods", "input/output error"));
        }
        let file = |(path, (stamp, bytes)): (&PathBuf, &(Stamp, Vec<u8>))| ManifestFile {
            path: path.clone(),
            stamp: *stamp,
            content: (known.get(path) != Some(stamp)).then(|| Ok(bytes.clone())),
        };
        Ok(content.files.iter().map(file).collect())
    }

    async fn changed(&mut self) {
        if self.changed.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
