//! The kubelet's own port: its settings out of the configuration, and what it asks of the node.

use std::path::PathBuf;
use std::sync::Arc;

use cluster::calls::AuthApi;
use cluster::pki::key::Template;
use cluster::pki::manager::serving_template;
use cluster::pki::{CertManager, FileStore, Identity, Purpose};
use config::{AuthorizationMode, Flags, Gate, Gates, KubeletConfiguration};
use host::logs::tree::LogTree;
use model::api::Node;
use pod::ports::Tasks;
use pod::registry::{Registry, WorkerState};
use serve::{
    Authentication, Authorization, ContainerPort, Handlers, Health, PodFacts, PodLookup, SecureParts, Server,
    ServingCertificate, TlsSettings,
};
use telemetry::metrics::Metrics;
use tokio::sync::watch;

use crate::join::Cluster;
use crate::version;
use crate::view::View;

/// What `/logs/` shows.
const SYSTEM_LOGS: &str = "/var/log";

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What the server needs beside the configuration.
pub(crate) struct Needs<'a> {
    pub(crate) cluster: Option<&'a Cluster>,
    /// The Node object; None: standalone.
    pub(crate) node: Option<watch::Receiver<Option<Arc<Node>>>>,
    pub(crate) node_name: &'a str,
    pub(crate) view: Arc<View>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) containers: Arc<dyn ContainerPort>,
    pub(crate) figures: Arc<dyn serve::Figures>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) health: Health,
}

/// Pods by name, out of the table of pods.
struct Pods(Arc<Registry>);

impl PodLookup for Pods {
    fn pod(&self, namespace: &str, name: &str) -> Option<PodFacts> {
        // A pod that is replaced by another of its name is there twice until its end; the living one is meant.
        let entry = self.0.find(namespace, name, |view| view.state != WorkerState::Terminated)?;
        let view = entry.view();
        let desired = view.desired.as_ref()?;
        Some(PodFacts {
            uid: entry.uid.as_str().to_owned(),
            containers: desired.containers().map(|c| (c.spec.name.clone(), c.spec.tty == Some(true))).collect(),
            status: view.status.clone(),
        })
    }
}

/// Builds the server; with `serverTLSBootstrap` also starts the task that keeps its certificate.
///
/// # Errors
/// Certificates, keys or CAs cannot be used.
pub(crate) fn server(
    config: &KubeletConfiguration,
    flags: &Flags,
    gates: &Gates,
    needs: Needs<'_>,
    tasks: &Tasks,
) -> Result<Server, Failure> {
    let api = || -> Option<Arc<dyn AuthApi>> { needs.cluster.map(|c| Arc::new(c.client.clone()) as Arc<dyn AuthApi>) };
    let authentication = Authentication {
        client_ca_file: path(&config.authentication.x509.client_ca_file),
        tokens: api()
            .filter(|_| config.authentication.webhook.enabled)
            .map(|a| (a, config.authentication.webhook.cache_ttl)),
        anonymous: config.authentication.anonymous.enabled,
    };
    let authorization = match (config.authorization.mode, api()) {
        (AuthorizationMode::AlwaysAllow, _) => Authorization::AlwaysAllow,
        (AuthorizationMode::Webhook, Some(api)) => Authorization::Webhook {
            api,
            keep_allowed: config.authorization.webhook.cache_authorized_ttl,
            keep_denied: config.authorization.webhook.cache_unauthorized_ttl,
        },
        (AuthorizationMode::Webhook, None) => return Err("no client provided, cannot use webhook authorization".into()),
    };
    let certificate = match (path(&config.tls_cert_file), path(&config.tls_private_key_file)) {
        (Some(certificate), Some(key)) => ServingCertificate::Files { certificate, key },
        _ => match (needs.cluster, needs.node) {
            (Some(cluster), Some(node)) if config.server_tls_bootstrap => {
                ServingCertificate::Issued(issued(cluster, node, flags, needs.node_name, tasks)?)
            }
            _ => ServingCertificate::SelfSigned {
                directory: flags.cert_dir().to_owned(),
                host: needs.node_name.to_owned(),
            },
        },
    };
    let parts = SecureParts {
        tls: TlsSettings {
            certificate,
            min_version: config.tls_min_version.clone(),
            cipher_suites: config.tls_cipher_suites.clone(),
            curves: config.tls_curve_preferences.clone(),
        },
        authentication,
        authorization,
        node_name: needs.node_name.to_owned(),
        fine_grained: gates.enabled(Gate::KubeletFineGrainedAuthz),
        handlers: Handlers {
            debugging: config.enable_debugging_handlers,
            system_logs: config.enable_system_log_handler,
            log_query: config.enable_system_log_query && gates.enabled(Gate::NodeLogQuery),
            profiling: config.enable_profiling_handler,
            debug_flags: config.enable_debug_flags_handler,
            checkpoint: gates.enabled(Gate::ContainerCheckpoint),
            flagz: gates.enabled(Gate::ComponentFlagz),
            statusz: gates.enabled(Gate::ComponentStatusz),
        },
        translate: gates.enabled(Gate::ExtendWebSocketsToKubelet),
        split_streams: gates.enabled(Gate::PodLogsQuerySplitStreams),
        streaming_idle: config.streaming_connection_idle_timeout,
        view: needs.view,
        pods: Arc::new(Pods(needs.registry)),
        containers: needs.containers,
        figures: needs.figures,
        metrics: needs.metrics,
        health: needs.health,
        system_logs: LogTree::new(PathBuf::from(SYSTEM_LOGS), vec![PathBuf::from(&config.pod_logs_dir)]),
        pod_logs: PathBuf::from(&config.pod_logs_dir),
        checkpoints: flags.root_dir().join("checkpoints"),
        version: version::KUBERNETES.trim_start_matches('v'),
    };
    Ok(Server::kubelet(parts)?)
}

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

/// Keeps the serving certificate that the API server signs, for the addresses that the Node object has.
fn issued(
    cluster: &Cluster,
    node: watch::Receiver<Option<Arc<Node>>>,
    flags: &Flags,
    node_name: &str,
    tasks: &Tasks,
) -> Result<watch::Receiver<Option<Arc<Identity>>>, Failure> {
    let name = node_name.to_owned();
    let template = move || -> Option<Template> {
        let node = node.borrow().clone()?;
        serving_template(&name, node.status.as_ref()?.addresses.as_deref().unwrap_or_default())
    };
    let manager = CertManager {
        purpose: Purpose::Serving,
        store: FileStore::server(flags.cert_dir()),
        template: Box::new(template),
        api: Arc::new(cluster.client.clone()),
        wall: cluster::system_wall(),
        unit: cluster::system_unit(),
    };
    let current = manager.open()?;
    let newest = current.subscribe();
    tasks.spawn(manager.run(current, tasks.stop().clone()));
    Ok(newest)
}
