//! Joining a cluster: who the node is to the API server, and the tasks that keep that so. Without `--kubeconfig` there is none of this.
//!
//! Nothing here keeps static pods waiting: while there are no credentials yet, or no server answers, the client's calls fail and are repeated
//! by those who make them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cluster::events::Recorder;
use cluster::object_cache::{ObjectTtl, Strategy};
use cluster::pki::key::Template;
use cluster::pki::{Bootstrap, CertManager, FileStore, Purpose};
use cluster::reflect::ReflectorStatus;
use cluster::{Backoff, Client, ClientOptions, ClusterConfig, Reflector, RequestObserver, Scope};
use config::{ChangeDetectionStrategy, Flags, KubeletConfiguration};
use http::Method;
use model::api::Node;
use pod::admit::AdmitHandle;
use pod::ports::{Clock, Tasks};
use pod::source::{self, SourceUpdate};
use pod::status::Mirrors;
use telemetry::metrics::Metrics;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::objects::{ClusterObjects, Sources};
use crate::version;

/// Changes of pods that may wait for the dispatcher; then the watch waits.
const DELTAS: usize = 16;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The way to the API server.
pub(crate) struct Cluster {
    /// For everything.
    pub(crate) client: Client,
    /// Takes events; a task writes them.
    pub(crate) recorder: Recorder,
    /// Age at which strategy Cache reads again; the node's object may say it.
    object_ttl: ObjectTtl,
}

/// Where credentials come from.
struct Plan {
    config: ClusterConfig,
    /// To be run until it succeeds.
    bootstrap: Option<Bootstrap>,
    /// Where the client certificate is kept and renewed, with `rotateCertificates`.
    store: Option<FileStore>,
}

/// Counts requests to the API server.
struct ApiMetrics(Arc<Metrics>);

impl RequestObserver for ApiMetrics {
    fn observed(&self, method: &Method, host: &str, code: u16, took: Duration, bytes: usize) {
        self.0.beside.api_request(method.as_str(), host, code, took, bytes);
    }

    fn answered(&self, method: &Method, host: &str, bytes: usize) {
        self.0.beside.api_answer(method.as_str(), host, bytes);
    }

    fn held(&self, method: &Method, host: &str, waited: Duration) {
        self.0.beside.api_request_held(method.as_str(), host, waited);
    }
}

impl Cluster {
    /// Reads the kubeconfig and starts the tasks of credentials and events; None without `--kubeconfig`.
    ///
    /// # Errors
    /// The file is missing or cannot be used, and there is no bootstrap kubeconfig to begin with.
    pub(crate) fn connect(
        flags: &Flags,
        config: &KubeletConfiguration,
        node_name: &str,
        metrics: &Arc<Metrics>,
        tasks: &Tasks,
    ) -> Result<Option<Self>, Failure> {
        let Some(kubeconfig) = flags.kubeconfig() else {
            info!("Standalone mode, no API client");
            return Ok(None);
        };
        let mut options = ClientOptions::new(version::RUBELET);
        options.qps = f64::from(config.kube_api_qps);
        options.burst = u32::try_from(config.kube_api_burst).unwrap_or(0);
        options.observer = Some(Arc::new(ApiMetrics(metrics.clone())));
        let plan = Plan::make(kubeconfig, flags, config, node_name, &options)?;
        info!(server = %plan.config.server, "Joining the cluster");
        let client = Client::new(plan.config, options)?;
        metrics.beside.transport_made();
        let events =
            client.with_limit(f64::from(config.event_record_qps), u32::try_from(config.event_burst).unwrap_or(0));
        let (recorder, writer) =
            Recorder::new("kubelet", node_name, Arc::new(events), cluster::system_wall(), cluster::system_unit());
        tasks.spawn(writer.run(tasks.stop().clone()));
        tasks.spawn_until_stop(keep_credentials(client.clone(), node_name.to_owned(), plan.bootstrap, plan.store));
        Ok(Some(Self { client, recorder, object_ttl: ObjectTtl::default() }))
    }

    /// What pods take from the API server. `trust_bundles`: gate ClusterTrustBundleProjection.
    pub(crate) fn objects(
        &self,
        config: &KubeletConfiguration,
        trust_bundles: bool,
        tasks: &Tasks,
    ) -> Arc<ClusterObjects> {
        let strategy = match config.config_map_and_secret_change_detection_strategy {
            ChangeDetectionStrategy::Get => Strategy::Get,
            ChangeDetectionStrategy::Cache => Strategy::Cache(self.object_ttl.clone()),
            ChangeDetectionStrategy::Watch => Strategy::Watch,
        };
        let sources = Sources::of(&Arc::new(self.client.clone()));
        let (unit, wall) = (cluster::system_unit(), cluster::system_wall());
        ClusterObjects::start(sources, strategy, trust_bundles, unit, wall, tasks)
    }

    /// Tells admission and the cache of objects what the node's object says, now and whenever it changes; the value given is true once
    /// they were told.
    pub(crate) fn follow_node(
        &self,
        mut node: watch::Receiver<Option<Arc<Node>>>,
        admit: AdmitHandle,
        tasks: &Tasks,
    ) -> watch::Receiver<bool> {
        let (told, known) = watch::channel(false);
        let object_ttl = self.object_ttl.clone();
        tasks.spawn_until_stop(async move {
            loop {
                let newest = node.borrow_and_update().clone();
                object_ttl.set(newest.as_deref().and_then(decide::node::object_ttl));
                if let Some(newest) = newest {
                    admit.node(&newest).await;
                    told.send_replace(true);
                }
                if node.changed().await.is_err() {
                    return;
                }
            }
        });
        known
    }

    /// Follows the pods that are bound to the node, from the moment on when admission knows the node (`known`): before that nobody can say which of
    /// them it may run. Gives how the watch is doing.
    pub(crate) fn follow_pods(
        &self,
        node_name: &str,
        mut known: watch::Receiver<bool>,
        mirrors: Mirrors,
        clock: Clock,
        out: mpsc::Sender<SourceUpdate>,
        tasks: &Tasks,
    ) -> watch::Receiver<ReflectorStatus> {
        let source = Arc::new(self.client.clone());
        let scope = Scope::pods_of_node(node_name);
        let (reflector, deltas, status) = Reflector::new(source, scope, DELTAS, cluster::system_unit());
        let stop = tasks.stop().clone();
        tasks.spawn_until_stop(async move {
            if known.wait_for(|k| *k).await.is_ok() {
                reflector.run(stop).await;
            }
        });
        tasks.spawn_until_stop(source::api::run(deltas, mirrors, clock, out));
        status
    }
}

impl Plan {
    fn make(
        kubeconfig: PathBuf,
        flags: &Flags,
        config: &KubeletConfiguration,
        node_name: &str,
        options: &ClientOptions,
    ) -> Result<Self, Failure> {
        let cert_dir = flags.cert_dir().to_owned();
        let store = FileStore::client(&cert_dir);
        if let Some(bootstrap_kubeconfig) = flags.bootstrap_kubeconfig() {
            let bootstrap = Bootstrap {
                kubeconfig,
                bootstrap_kubeconfig,
                cert_dir,
                node: node_name.to_owned(),
                options: options.clone(),
                unit: cluster::system_unit(),
            };
            if bootstrap.existing().is_none() {
                let from = ClusterConfig::load(&bootstrap.bootstrap_kubeconfig)?;
                let config_then = from.with_auth(store_auth(&store));
                let store = config.rotate_certificates.then_some(store);
                return Ok(Self { config: config_then, bootstrap: Some(bootstrap), store });
            }
            return Self::from_kubeconfig(&bootstrap.kubeconfig, store, config.rotate_certificates);
        }
        Self::from_kubeconfig(&kubeconfig, store, config.rotate_certificates)
    }

    fn from_kubeconfig(kubeconfig: &std::path::Path, store: FileStore, rotate: bool) -> Result<Self, Failure> {
        let config = ClusterConfig::load(kubeconfig)?;
        let Some((certificate, key)) = config.auth.certificate.clone().filter(|_| rotate) else {
            return Ok(Self { config, bootstrap: None, store: None });
        };
        // The certificate of the kubeconfig is the first of those that follow it.
        if store.current()?.is_none() {
            let read = |m: &cluster::kubeconfig::Material| m.read().map_err(|e| format!("read {}: {e}", m.describe()));
            let key = String::from_utf8(read(&key)?).map_err(|e| format!("{} is not PEM: {e}", key.describe()))?;
            store.update(&read(&certificate)?, &key, jiff::Timestamp::now())?;
        }
        Ok(Self { config: config.with_auth(store_auth(&store)), bootstrap: None, store: Some(store) })
    }
}

/// The pair that the store calls current.
fn store_auth(store: &FileStore) -> cluster::kubeconfig::Auth {
    let current = cluster::kubeconfig::Material::File(store.current_path());
    cluster::kubeconfig::Auth { certificate: Some((current.clone(), current)), ..Default::default() }
}

/// Gets the first client certificate, then renews it; the client is told of each new one. Ends when there is nothing to renew.
async fn keep_credentials(client: Client, node: String, bootstrap: Option<Bootstrap>, store: Option<FileStore>) {
    if let Some(bootstrap) = bootstrap {
        let mut backoff = Backoff::reflector(cluster::system_unit());
        while let Err(e) = bootstrap.run().await {
            error!(err = &e as &dyn std::error::Error, "Bootstrap of the client certificate failed, it is tried again");
            tokio::time::sleep(backoff.next_delay()).await;
        }
        client.credentials().recheck().await;
        info!("The client certificate is there");
    }
    let Some(store) = store else { return };
    let manager = CertManager {
        purpose: Purpose::Client,
        store,
        template: Box::new(move || Some(Template::node(&node))),
        api: Arc::new(client.clone()),
        wall: cluster::system_wall(),
        unit: cluster::system_unit(),
    };
    let current = match manager.open() {
        Ok(current) => current,
        Err(e) => {
            warn!(err = &e as &dyn std::error::Error, "The client certificate is not renewed");
            return;
        }
    };
    let mut renewed = current.subscribe();
    let told = async move {
        while renewed.changed().await.is_ok() {
            client.credentials().recheck().await;
            // A connection keeps the certificate that it was made with.
            client.close_connections();
        }
    };
    tokio::join!(manager.run(current, tokio_util::sync::CancellationToken::new()), told);
}
