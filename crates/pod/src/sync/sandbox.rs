//! The sandbox: what its request is made of, which of the runtime's handlers it runs under (RuntimeClass), and which host ids it maps.

use cri_api::v1;
use decide::config::{self, SandboxFacts, UserNamespaceFacts, dns, hostname};
use model::pod::DesiredPod;
use model::timeline::StepKind;
use tokio::time::Instant;
use tracing::{info, warn};

use super::start::volume_gids;
use crate::worker::Worker;

impl Worker {
    /// The sandbox's request: the same for RunPodSandbox and for every CreateContainer in it.
    pub(crate) async fn sandbox_request(
        &self,
        pod: &DesiredPod,
        attempt: u32,
        handler: &str,
    ) -> Result<v1::PodSandboxConfig, String> {
        let settings = &self.deps.settings;
        let facts = SandboxFacts {
            node: &settings.node,
            attempt,
            hostname: self.hostname(pod)?,
            dns: Some(self.dns(pod).await?),
            cgroup_parent: self.cgroup_parent(pod),
            user_namespace: self.user_namespace(pod, handler).await?,
            volume_gids: self.prepared.as_ref().map_or_else(Vec::new, |(_, volumes)| volume_gids(volumes)),
            exclusive_cpus: self.deps.managers.exclusive_cpus(pod.uid()),
        };
        config::sandbox_config(pod, &facts).map_err(|e| e.to_string())
    }

    /// What the runtime says that a handler can do; None: it does not know the handler, or is too old to say.
    pub(crate) fn handler_features(&self, handler: &str) -> Option<v1::RuntimeHandlerFeatures> {
        let health = self.deps.health.borrow();
        let handlers = health.handlers.as_deref().unwrap_or(&self.deps.settings.runtime_handlers);
        handlers.iter().find(|h| h.name == handler)?.features
    }

    /// The pod's range of host ids, when it is to have a user namespace of its own.
    pub(crate) async fn user_namespace(&self, pod: &DesiredPod, handler: &str) -> Result<UserNamespaceFacts, String> {
        if pod.spec().host_users != Some(false) {
            return Ok(UserNamespaceFacts::default());
        }
        let supported = self.handler_features(handler).is_some_and(|f| f.user_namespaces);
        let mappings = if supported { Some(self.deps.user_namespaces.of(pod.uid()).await?) } else { None };
        Ok(UserNamespaceFacts { supported, handler: handler.to_owned(), mappings })
    }

    pub(crate) fn hostname(&self, pod: &DesiredPod) -> Result<Option<hostname::PodHostname>, String> {
        if pod.host_network() {
            return Ok(None);
        }
        let gate = self.deps.settings.node.gates.hostname_override;
        hostname::pod_hostname(pod, &self.deps.settings.cluster_domain, gate).map(Some).map_err(|e| e.to_string())
    }

    /// The pod's resolv.conf; overstepped limits are a warning.
    async fn dns(&self, pod: &DesiredPod) -> Result<dns::DnsConfig, String> {
        let settings = &self.deps.settings;
        let mut host = None;
        if let Some(path) = &settings.resolv_conf {
            let bytes = self.deps.host.read_file(path).await.map_err(|e| e.chain())?;
            let text = bytes.ok_or_else(|| format!("open {}: no such file or directory", path.display()))?;
            host = Some(dns::parse(&String::from_utf8_lossy(&text)).map_err(|e| e.to_string())?);
        }
        let made = dns::pod_dns(
            pod,
            &dns::DnsSettings {
                cluster_dns: settings.cluster_dns.clone(),
                cluster_domain: settings.cluster_domain.clone(),
                host,
                node_ips: self.deps.host.host_ips(),
            },
        );
        for warning in &made.warnings {
            let key = format!("dns {} {}", pod.uid(), warning.message);
            if self.deps.limiter.allow(&key, std::time::Instant::now()).is_some() {
                warn!(pod = pod.full_name(), reason = warning.reason, "{}", warning.message);
                self.deps.events.pod_warning(pod, warning.reason, &warning.message);
            }
        }
        Ok(made.config)
    }

    /// Creates the sandbox; its id and the handler that it runs under.
    pub(crate) async fn create_sandbox(&mut self, pod: &DesiredPod, attempt: u32) -> Result<(String, String), String> {
        let failed = |e: String| {
            warn!(pod = pod.full_name(), uid = %pod.uid(), err = e, "FailedCreatePodSandBox: Failed to create pod sandbox");
            let text = format!("Failed to create pod sandbox: {e}");
            self.deps.events.pod_warning(pod, "FailedCreatePodSandBox", &text);
            text
        };
        if let Err(why) = self.deps.managers.prepare(pod).await {
            let text = format!("Failed to prepare dynamic resources: {why}");
            self.deps.events.pod_warning(pod, "FailedPrepareDynamicResources", &text);
            return Err(text);
        }
        let userns = pod.spec().host_users == Some(false);
        if userns {
            self.deps.metrics.started_user_namespaced_pods.inc();
        }
        let made = async {
            let class = pod.spec().runtime_class_name.as_deref().filter(|name| !name.is_empty());
            let handler = match class {
                Some(class) => self.deps.objects.runtime_handler(class).await.map_err(|e| e.to_string())?,
                None => String::new(),
            };
            if !handler.is_empty() {
                info!(pod = pod.full_name(), handler, "Running pod with runtime handler");
            }
            let request = self.sandbox_request(pod, attempt, &handler).await?;
            let call = Instant::now();
            let made = self.step(StepKind::Sandbox, "", self.deps.mutator.run_pod_sandbox(request, &handler)).await;
            self.deps.metrics.run_podsandbox(&handler, call.elapsed(), made.is_err());
            Ok((made?, handler))
        };
        let made = made.await;
        self.deps.metrics.started_pods.inc();
        if made.is_err() {
            self.deps.metrics.started_pods_errors.inc();
            if userns {
                self.deps.metrics.started_user_namespaced_pods_errors.inc();
            }
        }
        made.map_err(failed)
    }
}
