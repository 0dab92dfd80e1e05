//! Resource claims: read from the API server, prepared and taken back by their drivers.
//!
//! Task: one takes back claims of pods that went while no agent was there, owned by [`crate::Managers`], ends with the agent. Input: the pods that are gone
//! (newest value). It asks again every [`AGAIN`] while a driver does not answer, and sleeps when nothing is left. Everything else is done by the
//! worker that needs it, which waits for the drivers, each within the deadline of its call.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use decide::claims::{self, Claim, ClaimedDevice, Claims};
use k8s_openapi::api::resource::v1::ResourceClaim;
use manifest::managers::{self as checkpoint, ClaimDevice, ClaimDriver, ClaimEntry};
use model::api::{ResourceHealth, ResourceStatus};
use model::pod::{ContainerEntry, DesiredPod};
use plugins::dra::{ClaimDrivers, DeviceReport, Listener};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::Inner;
use crate::config::Config;

/// Between two tries to take claims back. Go's number.
const AGAIN: Duration = Duration::from_secs(60);

/// What the managers need of the API server for claims.
#[async_trait]
pub trait ClaimObjects: Send + Sync {
    /// The newest form of a claim. The error is the server's.
    async fn claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, String>;
    /// An instance of a driver came or went: without one, what it offers (its ResourceSlices) must not stay for long. Never waits.
    fn driver_changed(&self, driver: &str, usable: bool);
}

/// A node without API server: nobody there can have claims.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoClaims;

#[async_trait]
impl ClaimObjects for NoClaims {
    async fn claim(&self, _: &str, name: &str) -> Result<ResourceClaim, String> {
        Err(format!("resourceclaims.resource.k8s.io \"{name}\" not found"))
    }

    fn driver_changed(&self, _: &str, _: bool) {}
}

/// How a device is, until when.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    healthy: Option<bool>,
    message: String,
    until: Instant,
}

/// By driver, then pool and name.
pub(crate) type Reports = BTreeMap<String, BTreeMap<(String, String), Health>>;

/// The claims that an earlier agent wrote down.
pub(crate) async fn restore(config: &Config) -> Result<Claims, String> {
    let path = config.root.join(checkpoint::CLAIMS);
    let shown = path.display().to_string();
    let found = crate::restore::read(path, checkpoint::decode_claims).await;
    let found =
        found.map_err(|e| format!("checkpoint {shown}: {e}: drain this node and delete the file to start afresh"))?;
    let device = |d: ClaimDevice| ClaimedDevice {
        pool: d.pool_name,
        name: d.device_name,
        share: d.share_id,
        requests: d.request_names.unwrap_or_default(),
        cdi: d.cdi_device_ids.unwrap_or_default(),
    };
    let claim = |e: ClaimEntry| Claim {
        uid: e.claim_uid,
        name: e.claim_name,
        namespace: e.namespace,
        pods: e.pods.unwrap_or_default().into_keys().collect(),
        drivers: e
            .driver_state
            .unwrap_or_default()
            .into_iter()
            .map(|(driver, state)| (driver, state.devices.unwrap_or_default().into_iter().map(device).collect()))
            .collect(),
        prepared: false,
    };
    Ok(Claims::restore(found.unwrap_or_default().into_iter().map(claim)))
}

fn some<T: Clone>(list: &[T]) -> Option<Vec<T>> {
    (!list.is_empty()).then(|| list.to_vec())
}

pub(crate) fn encode(claims: &Claims) -> Vec<u8> {
    let device = |d: &ClaimedDevice| ClaimDevice {
        pool_name: d.pool.clone(),
        device_name: d.name.clone(),
        share_id: d.share.clone(),
        request_names: some(&d.requests),
        cdi_device_ids: some(&d.cdi),
    };
    let entry = |c: &Claim| ClaimEntry {
        claim_uid: c.uid.clone(),
        claim_name: c.name.clone(),
        namespace: c.namespace.clone(),
        pods: Some(c.pods.iter().map(|uid| (uid.clone(), serde_json::json!({}))).collect()),
        driver_state: Some(
            c.drivers
                .iter()
                .map(|(driver, devices)| {
                    let devices: Vec<ClaimDevice> = devices.iter().map(device).collect();
                    (driver.clone(), ClaimDriver { devices: some(&devices) })
                })
                .collect(),
        ),
    };
    let all: Vec<ClaimEntry> = claims.all().map(entry).collect();
    checkpoint::encode_claims(&all)
}

impl Inner {
    fn drivers(&self) -> Result<&ClaimDrivers, String> {
        self.drivers.get().ok_or_else(|| "drivers of claims cannot be asked yet".to_owned())
    }

    pub(crate) fn count_claims(&self) {
        let book = self.book();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for driver in book.claims.all().flat_map(|c| c.drivers.keys()) {
            *counts.entry(driver).or_default() += 1;
        }
        let metrics = &self.metrics.managers;
        metrics.claims("<any>", book.claims.all().count());
        for (driver, count) in counts {
            metrics.claims(driver, count);
        }
    }

    /// Has every claim of a pod prepared.
    pub(crate) async fn prepare_claims(&self, pod: &DesiredPod) -> Result<(), String> {
        // Looked at as a whole before anything is noted: a pod that may not start at all must not have to be taken back.
        let mut wanted = Vec::new();
        for named in claims::of_pod(pod)? {
            let object = self.objects.claim(pod.namespace(), &named.object).await;
            let object = object.map_err(|e| format!("fetch ResourceClaim {}: {e}", named.object))?;
            claims::check(pod, &named, &object)?;
            let claim = Claim::of(&object)?;
            for driver in claim.drivers.keys() {
                self.drivers()?.find(driver)?;
            }
            wanted.push(claim);
        }
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        let mut preparing = Vec::new();
        {
            let mut book = self.book();
            for claim in &wanted {
                if book.claims.claim(pod.uid().as_str(), claim)? {
                    preparing.push(claim.clone());
                    for driver in claim.drivers.keys() {
                        batches.entry(driver.clone()).or_default().push(claim.clone());
                    }
                }
            }
        }
        // Written before a driver is asked: what it prepares must be known to whoever comes next.
        self.writer.written().await;
        for (driver, claims) in &batches {
            let mut prepared = self.drivers()?.prepare(driver, claims).await?;
            let mut book = self.book();
            for claim in claims {
                book.claims.answered(claim, driver, prepared.remove(&claim.uid).unwrap_or_default());
            }
        }
        for claim in &preparing {
            self.book().claims.prepared(claim);
        }
        self.count_claims();
        if !preparing.is_empty() {
            self.writer.written().await;
        }
        Ok(())
    }

    /// Has everything taken back that only this pod used.
    pub(crate) async fn unprepare_claims(&self, pod: &str) -> Result<(), String> {
        let last = self.book().claims.leave(pod);
        let mut batches: BTreeMap<&str, Vec<Claim>> = BTreeMap::new();
        for claim in &last {
            for driver in claim.drivers.keys() {
                batches.entry(driver).or_default().push(claim.clone());
            }
        }
        for (driver, claims) in batches {
            self.drivers()?.unprepare(driver, &claims).await?;
        }
        for claim in &last {
            self.book().claims.forget(claim);
        }
        self.count_claims();
        self.writer.written().await;
        Ok(())
    }

    /// How the claimed devices of a container are.
    pub(crate) fn claims_health(&self, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Vec<ResourceStatus> {
        let named = container.spec.resources.iter().flat_map(|r| r.claims.iter().flatten());
        let book = self.book();
        let now = Instant::now();
        let mut all = Vec::new();
        for claim in named {
            let request = claim.request.as_deref().filter(|r| !r.is_empty());
            let Ok(Some(object)) = claims::object_of(pod, &claim.name) else { continue };
            let Some(known) = book.claims.get(pod.namespace(), &object.object) else { continue };
            let mut resources: Vec<ResourceHealth> = Vec::new();
            for (driver, device) in known.drivers.iter().flat_map(|(driver, all)| all.iter().map(move |d| (driver, d)))
            {
                if !claims::is_for(device, request.unwrap_or_default()) {
                    continue;
                }
                let place = (device.pool.clone(), device.name.clone());
                let report = book.reports.get(driver).and_then(|r| r.get(&place)).filter(|h| h.until > now);
                let health = match report.and_then(|h| h.healthy) {
                    Some(true) => "Healthy",
                    Some(false) => "Unhealthy",
                    None => "Unknown",
                };
                let message = report.map(|h| h.message.clone()).filter(|m| self.config.health_message && !m.is_empty());
                let own = || format!("{driver}/{}/{}", device.pool, device.name);
                let resource_id = device.cdi.first().cloned().unwrap_or_else(own);
                if !resources.iter().any(|r| r.resource_id == resource_id) {
                    resources.push(ResourceHealth { health: Some(health.to_owned()), message, resource_id });
                }
            }
            let name = match request {
                Some(request) => format!("claim:{}/{request}", claim.name),
                None => format!("claim:{}", claim.name),
            };
            if !resources.is_empty() {
                all.push(ResourceStatus { name, resources: Some(resources) });
            }
        }
        all
    }
}

/// What a message of a device's health is cut to, in bytes (`ResourceHealthMessageMaxLength`).
const MESSAGE_MAX: usize = 1024;

fn short(message: String) -> String {
    if message.len() <= MESSAGE_MAX {
        return message;
    }
    let mut end = MESSAGE_MAX - 3;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...", &message[..end])
}

impl Listener for Inner {
    fn reported(&self, driver: &str, devices: Vec<DeviceReport>) {
        let now = Instant::now();
        let mut changed = BTreeSet::new();
        {
            let mut book = self.book();
            let known = book.reports.entry(driver.to_owned()).or_default();
            for report in devices {
                let new = Health { healthy: report.healthy, message: short(report.message), until: now + report.holds };
                let same = known.get(&report.device).is_some_and(|old| {
                    (old.healthy, old.message.as_str()) == (new.healthy, new.message.as_str()) && old.until > now
                });
                known.insert(report.device.clone(), new);
                if !same {
                    changed.insert(report.device);
                }
            }
        }
        self.tell_of_claims(driver, |device| changed.contains(&(device.pool.clone(), device.name.clone())));
    }

    fn silent(&self, driver: &str) {
        if self.book().reports.remove(driver).is_some() {
            self.tell_of_claims(driver, |_| true);
        }
    }

    fn changed(&self, driver: &str, usable: bool) {
        self.objects.driver_changed(driver, usable);
    }

    fn called(&self, driver: &str, method: &'static str, code: &str, took: Duration) {
        self.metrics.managers.claims_call(driver, method, code, took);
    }
}

impl Inner {
    /// Tells of pods that have such devices of this driver.
    fn tell_of_claims(&self, driver: &str, which: impl Fn(&ClaimedDevice) -> bool) {
        let pods: BTreeSet<String> = {
            let book = self.book();
            let has = |c: &&Claim| c.drivers.get(driver).is_some_and(|all| all.iter().any(&which));
            book.claims.all().filter(has).flat_map(|c| c.pods.iter().cloned()).collect()
        };
        self.health_of(pods);
    }
}

/// The task that takes back what is left of pods that are gone.
pub(crate) async fn take_back(of: Arc<Inner>, mut gone: watch::Receiver<BTreeSet<String>>) {
    loop {
        let pods = gone.borrow_and_update().clone();
        let mut left = false;
        for pod in pods {
            if !of.book().claims.holds_any(&pod) {
                continue;
            }
            match of.unprepare_claims(&pod).await {
                Ok(()) => info!(uid = pod, "Took back the resource claims of a pod that is gone"),
                Err(why) => {
                    warn!(
                        uid = pod,
                        err = why,
                        "Resource claims of a pod that is gone cannot be taken back, it is tried again"
                    );
                    left = true;
                }
            }
        }
        tokio::select! {
            changed = gone.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(AGAIN), if left => {}
        }
    }
}
