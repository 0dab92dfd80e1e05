//! The node's own pull credentials: files of docker's formats, and credential provider plugins.
//!
//! Files: the first readable `config.json` in the root directory, the working directory, `~/.docker`, `/.docker`, else the first `.dockercfg` in the
//! root directory, the working directory, `~`, `/`; read again when five minutes old. A file that cannot be understood is passed over.

pub(crate) mod config;
mod plugin;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use decide::credentials::{Credential, DockerConfig, Keyring, Origin, parse_config_json, parse_dockercfg};
use model::pod::DesiredPod;
use pod::images::NodeCredentials;
use pod::objects::PodObjects;
use telemetry::metrics::Metrics;
use tokio::time::Instant;
use tracing::{debug, error};

use config::Provider;
use plugin::Plugin;

/// How long files are taken as read.
const FRESH: Duration = Duration::from_secs(300);

/// Where files may be, the first one first.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Directories of `config.json`.
    pub(crate) config_json: Vec<PathBuf>,
    /// Directories of `.dockercfg`.
    pub(crate) dockercfg: Vec<PathBuf>,
}

impl Places {
    /// The usual ones. An empty `home` is the working directory.
    pub(crate) fn new(root: &Path, home: &Path) -> Self {
        let here = PathBuf::from(".");
        Self {
            config_json: vec![root.to_owned(), here.clone(), home.join(".docker"), PathBuf::from("/.docker")],
            dockercfg: vec![root.to_owned(), here, home.to_owned(), PathBuf::from("/")],
        }
    }

    /// The first file that can be read; blocks.
    fn read(&self) -> DockerConfig {
        type Parse = fn(&[u8]) -> Result<DockerConfig, String>;
        let formats: [(&[PathBuf], &str, Parse); 2] =
            [(&self.config_json, "config.json", parse_config_json), (&self.dockercfg, ".dockercfg", parse_dockercfg)];
        for (dirs, name, parse) in formats {
            for path in dirs.iter().map(|dir| dir.join(name)) {
                let read = host::fsx::read_if_there(&path).map_err(|e| e.full());
                match read.and_then(|content| content.map(|c| parse(&c)).transpose()) {
                    Ok(Some(config)) => return config,
                    Ok(None) => {}
                    Err(e) => debug!(path = %path.display(), err = e, "A file of pull credentials cannot be read"),
                }
            }
        }
        DockerConfig::new()
    }
}

/// All of them.
pub(crate) struct NodeKeyring {
    places: Places,
    files: Mutex<Option<(Instant, Arc<DockerConfig>)>>,
    plugins: Vec<Plugin>,
}

impl NodeKeyring {
    /// Files in these places, and these plugins in the directory `bin`.
    pub(crate) fn new(
        places: Places,
        providers: Vec<Provider>,
        bin: &Path,
        objects: &Arc<dyn PodObjects>,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let plugins = providers.into_iter().map(|p| Plugin::new(p, bin, objects.clone(), metrics.clone())).collect();
        Self { places, files: Mutex::default(), plugins }
    }

    async fn files(&self) -> Arc<DockerConfig> {
        let known = self.files.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, config)) = known
            && at.elapsed() < FRESH
        {
            return config;
        }
        let places = self.places.clone();
        let read = tokio::task::spawn_blocking(move || places.read()).await;
        let config = Arc::new(read.unwrap_or_default());
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), config.clone()));
        config
    }
}

#[async_trait]
impl NodeCredentials for NodeKeyring {
    async fn lookup(&self, pod: &DesiredPod, repository: &str) -> Vec<Credential> {
        let mut files = Keyring::default();
        files.add(&Origin::Node, &*self.files().await);
        let mut found = files.lookup(repository);
        let mut given = Keyring::default();
        for plugin in &self.plugins {
            match plugin.provide(pod, repository).await {
                Ok(Some((config, origin))) => given.add(&origin, &config),
                Ok(None) => {}
                Err(e) => {
                    let (pod, image) = (pod.full_name(), repository);
                    error!(provider = plugin.name(), pod, image, err = e, "Failed to provide credentials for image");
                }
            }
        }
        found.extend(given.lookup(repository));
        found
    }
}

#[cfg(test)]
mod tests;
