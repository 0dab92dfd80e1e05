//! Keeps one certificate valid: renewed by CSR after 70–90 % of its life, at once when it no longer says what it should.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cert::Identity;
use super::key::{Template, generate, signing_request};
use super::request::{self, Requests};
use super::store::FileStore;
use crate::error::{ClusterError, ClusterResult};
use crate::{Backoff, Unit, Wall};

/// How long a request may stay unsigned (as client-go's manager).
const SIGNING: Duration = Duration::from_secs(15 * 60);
/// Tries with growing waits; after them one every [`SLOW`].
const FAST_TRIES: u32 = 5;
const SLOW: Duration = Duration::from_secs(32);
/// How often a template that can change is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The node towards the API server.
    Client,
    /// The node's own server.
    Serving,
}

impl Purpose {
    /// The signer that is asked.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Key usages. Without key encipherment, which is for RSA keys.
    pub fn usages(self) -> [&'static str; 2] {
        match self {
            Self::Client => ["digital signature", "client auth"],
            Self::Serving => ["digital signature", "server auth"],
        }
    }
}

/// The serving certificate's names: those of the node's addresses; None while there is no IP among them.
pub fn serving_template(node: &str, addresses: &[NodeAddress]) -> Option<Template> {
    let mut names = BTreeSet::new();
    let mut has_ip = false;
    for a in addresses.iter().filter(|a| !a.address.is_empty()) {
        let is_ip = a.address.parse::<std::net::IpAddr>().is_ok();
        let wanted = match a.type_.as_str() {
            "Hostname" => true,
            "InternalIP" | "ExternalIP" => is_ip,
            "InternalDNS" | "ExternalDNS" => true,
            _ => false,
        };
        if wanted {
            has_ip |= is_ip;
            // DNS names first, each sort in its own order.
            names.insert((is_ip, a.address.clone()));
        }
    }
    let names = names.into_iter().map(|(_, name)| name).collect();
    has_ip.then(|| Template { names, ..Template::node(node) })
}

/// When to renew: 70 to 90 % of the certificate's life.
pub fn renewal(not_before: Timestamp, not_after: Timestamp, unit: f64) -> Timestamp {
    let life = not_after.duration_since(not_before).as_secs_f64();
    let part = SignedDuration::try_from_secs_f64(life * (0.7 + 0.2 * unit)).unwrap_or_default();
    not_before.checked_add(part).unwrap_or(not_after)
}

/// Why the certificate must be renewed now, whatever its age.
fn mismatch(identity: &Identity, template: &Template) -> Option<String> {
    let info = &identity.info;
    if info.common_name != template.common_name {
        return Some(format!("it names {:?}, not {:?}", info.common_name, template.common_name));
    }
    if let Some(missing) = template.organizations.iter().find(|o| !info.organizations.contains(o)) {
        return Some(format!("it lacks organization {missing:?}"));
    }
    let lacks = |name: &&String| match name.parse::<std::net::IpAddr>() {
        Ok(ip) => !info.ip_addresses.contains(&ip),
        Err(_) => !info.dns_names.contains(name),
    };
    template.names.iter().find(lacks).map(|name| format!("it lacks the name {name}"))
}

/// What a manager is made of.
pub struct CertManager {
    /// For what.
    pub purpose: Purpose,
    /// Where it is kept.
    pub store: FileStore,
    /// What it is to say; None: not known yet.
    pub template: Box<dyn Fn() -> Option<Template> + Send + Sync>,
    /// Who is asked; for the client certificate the client with the current one.
    pub api: Arc<dyn Requests>,
    /// The clock.
    pub wall: Wall,
    /// Randomness.
    pub unit: Unit,
}

impl CertManager {
    /// The pair on disk now, and later ones, through the channel.
    ///
    /// # Errors
    /// There is a pair that cannot be read.
    pub fn open(&self) -> ClusterResult<watch::Sender<Option<Arc<Identity>>>> {
        Ok(watch::Sender::new(self.store.current()?.map(Arc::new)))
    }

    /// Renews until it is stopped; each new pair goes to disk, then to `current`.
    pub async fn run(self, current: watch::Sender<Option<Arc<Identity>>>, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.work(&current) => {}
        }
    }

    async fn work(&self, current: &watch::Sender<Option<Arc<Identity>>>) {
        loop {
            let held = current.borrow().clone();
            let template = self.due(held.as_deref()).await;
            let mut backoff =
                Backoff::new(Duration::from_secs(2), Duration::from_secs(32), self.unit.clone()).with_jitter(0.1);
            let mut tries = 0;
            loop {
                match self.renew(&template).await {
                    Ok(identity) => {
                        tracing::info!(purpose = ?self.purpose, not_after = %identity.info.not_after, "Certificate rotated");
                        current.send_replace(Some(Arc::new(identity)));
                        break;
                    }
                    Err(error) => tracing::error!(%error, purpose = ?self.purpose, "Certificate rotation failed"),
                }
                tries += 1;
                tokio::time::sleep(if tries < FAST_TRIES { backoff.next_delay() } else { SLOW }).await;
                // Another template: begin anew.
                if (self.template)().as_ref() != Some(&template) {
                    break;
                }
            }
        }
    }

    /// Waits until a renewal is due; gives what to ask for.
    async fn due(&self, current: Option<&Identity>) -> Template {
        let at = current.map(|c| renewal(c.info.not_before, c.info.not_after, (self.unit)()));
        let mut said = false;
        loop {
            if let Some(template) = (self.template)() {
                let Some((current, at)) = current.zip(at) else { return template };
                if let Some(why) = mismatch(current, &template) {
                    tracing::info!(purpose = ?self.purpose, why, "Certificate is renewed before its time");
                    return template;
                }
                if (self.wall)() >= at {
                    return template;
                }
            } else if !said {
                said = true;
                tracing::debug!(purpose = ?self.purpose, "The node's addresses are not known yet; no certificate is asked for");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn renew(&self, template: &Template) -> Result<Identity, ClusterError> {
        let key = generate()?;
        let csr = signing_request(&key, template)?;
        let (name, uid) =
            request::create(&*self.api, &csr, None, self.purpose.signer(), &self.purpose.usages()).await?;
        let certificate = request::wait(self.api.clone(), &name, &uid, SIGNING, self.unit.clone()).await?;
        self.store.update(&certificate, &key.serialize_pem(), (self.wall)())
    }
}

#[cfg(test)]
#[path = "manager_tests.rs"]
mod tests;
