//! From a bootstrap token to a client certificate (`--bootstrap-kubeconfig`).
//!
//! The key is kept in `kubelet-client.key.tmp` until the certificate is there, and the request's name is made from it: a restart in the
//! middle takes up the same request.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rcgen::KeyPair;

use super::cert::CertInfo;
use super::key::{self, Template};
use super::manager::Purpose;
use super::request;
use super::store::{FileStore, write_private};
use crate::Unit;
use crate::client::{Client, ClientOptions};
use crate::error::{ClusterError, ClusterResult, ErrorKind};
use crate::kubeconfig::ClusterConfig;

/// How long a bootstrap request may stay unsigned (as Go: an hour).
const SIGNING: Duration = Duration::from_secs(3600);

/// What bootstrap works with.
#[derive(Clone)]
pub struct Bootstrap {
    /// `--kubeconfig`: written at the end.
    pub kubeconfig: PathBuf,
    /// `--bootstrap-kubeconfig`.
    pub bootstrap_kubeconfig: PathBuf,
    /// `--cert-dir`.
    pub cert_dir: PathBuf,
    /// The node's name.
    pub node: String,
    /// For the client that uses the bootstrap credentials.
    pub options: ClientOptions,
    /// Randomness.
    pub unit: Unit,
}

impl Bootstrap {
    /// The kubeconfig's cluster, when its client certificate exists and is valid: no bootstrap is needed. A kubeconfig that cannot be
    /// used is logged and counts as absent.
    pub fn existing(&self) -> Option<ClusterConfig> {
        if !self.kubeconfig.exists() {
            return None;
        }
        let usable = || -> Result<ClusterConfig, String> {
            let config = ClusterConfig::load(&self.kubeconfig).map_err(|e| e.to_string())?;
            let (certificate, _) = config.auth.certificate.as_ref().ok_or("it has no client certificate")?;
            let pem = certificate.read().map_err(|e| format!("read {}: {e}", certificate.describe()))?;
            let now = (self.options.wall)();
            for der in super::cert::certificates(&pem)? {
                let info = CertInfo::of(&der)?;
                if now > info.not_after {
                    return Err(format!("part of the client certificate in it is expired: {}", info.not_after));
                }
            }
            Ok(config)
        };
        usable()
            .inspect_err(|error| tracing::warn!(error, "Existing kubeconfig {} is not used", self.kubeconfig.display()))
            .ok()
    }

    /// Asks for the certificate, waits for it, writes it and the kubeconfig. May be repeated after a failure.
    ///
    /// # Errors
    /// Any kind: the bootstrap credentials are refused, nobody approves, the disk refuses.
    pub async fn run(&self) -> ClusterResult<ClusterConfig> {
        let from = ClusterConfig::load(&self.bootstrap_kubeconfig)?;
        let client = Client::new(from.clone(), self.options.clone())?;
        let (key, temporary) = self.key()?;
        let template = Template::node(&self.node);
        let usages = Purpose::Client.usages();
        let csr = key::signing_request(&key, &template)?;
        let name = key::digested_name(&key, &template, &usages);
        let (name, uid) = request::create(&client, &csr, Some(&name), Purpose::Client.signer(), &usages).await.map_err(|e| {
            if e.kind == ErrorKind::Unauthorized || e.kind == ErrorKind::Forbidden {
                e.advise("the bootstrap token has expired or may not create certificate signing requests: make a new one (kubeadm token create)")
            } else {
                e
            }
        })?;
        tracing::info!(csr = name, "Waiting for client certificate to be issued");
        let certificate = match request::wait(Arc::new(client), &name, &uid, SIGNING, self.unit.clone()).await {
            Ok(certificate) => certificate,
            Err(error) => {
                // A denied or deleted request must not be taken up again.
                if matches!(error.kind, ErrorKind::Forbidden | ErrorKind::NotFound | ErrorKind::Server) {
                    drop(fs::remove_file(&temporary));
                }
                return Err(error);
            }
        };
        let store = FileStore::client(&self.cert_dir);
        store.update(&certificate, &key.serialize_pem(), (self.options.wall)())?;
        if let Err(error) = fs::remove_file(&temporary)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(%error, "Failed cleaning up private key file");
        }
        let text = from.bootstrapped(&store.current_path())?;
        let fail = |e: std::io::Error| {
            ClusterError::new(
                format!("write kubeconfig {}", self.kubeconfig.display()),
                ErrorKind::Other,
                e.to_string(),
            )
        };
        if let Some(parent) = self.kubeconfig.parent() {
            fs::create_dir_all(parent).map_err(fail)?;
        }
        let part = self.kubeconfig.with_extension("tmp");
        write_private(&part, text.as_bytes()).and_then(|()| fs::rename(&part, &self.kubeconfig)).map_err(fail)?;
        ClusterConfig::load(&self.kubeconfig)
    }

    /// The key of an earlier try, or a new one that is kept.
    fn key(&self) -> ClusterResult<(KeyPair, PathBuf)> {
        let path = self.cert_dir.join("kubelet-client.key.tmp");
        if let Some(key) = fs::read_to_string(&path).ok().as_deref().and_then(key::from_pem) {
            return Ok((key, path));
        }
        let key = key::generate()?;
        fs::create_dir_all(&self.cert_dir)
            .and_then(|()| write_private(&path, key.serialize_pem().as_bytes()))
            .map_err(|e| ClusterError::new(format!("keep key {}", path.display()), ErrorKind::Other, e.to_string()))?;
        Ok((key, path))
    }
}
