//! Devices: chosen by the book, granted by their plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use decide::config::DeviceFacts;
use decide::devices::{Allocation, Choice, Device, Devices, Ids, Options, Want};
use decide::numa::{Hints, NumaMask};
use manifest::managers::{self as checkpoint, DeviceCheckpoint, DeviceEntry};
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};
use model::quantity::Quantity;
use plugins::devices::{DevicePlugins, Listener};
use tracing::{error, info};

use crate::Inner;

/// Devices that init containers had, by resource.
pub(crate) type Reusable = BTreeMap<String, Ids>;

/// What an earlier agent left.
#[derive(Default)]
pub(crate) struct Restored {
    pub(crate) devices: Devices,
    /// Resources that had plugins.
    pub(crate) resources: Vec<String>,
    /// There is a checkpoint, whatever is in it.
    pub(crate) found: bool,
}

/// Reads the checkpoint. One that cannot be used is as good as none, as with Go: what runs keeps its devices,
/// whatever is written down about them.
pub(crate) async fn restore(dir: &Path) -> Restored {
    let path = dir.join(checkpoint::DEVICES);
    let shown = path.display().to_string();
    let read = tokio::task::spawn_blocking(move || host::fsx::read_if_there(&path)).await;
    let bytes = match read {
        Ok(Ok(Some(bytes))) => bytes,
        Ok(Ok(None)) => return Restored::default(),
        Ok(Err(e)) => {
            error!(err = e.full(), checkpoint = shown, "The devices' checkpoint cannot be read, going on without");
            return Restored { found: true, ..Restored::default() };
        }
        Err(_) => return Restored { found: true, ..Restored::default() },
    };
    let found = match checkpoint::decode_devices(&bytes) {
        Ok(found) => found,
        Err(e) => {
            let err = &e as &dyn std::error::Error;
            error!(err, checkpoint = shown, "The devices' checkpoint cannot be used, going on without");
            return Restored { found: true, ..Restored::default() };
        }
    };
    info!(checkpoint = shown, entries = found.entries.len(), "Read the devices' checkpoint");
    let entries = found.entries.into_iter().filter_map(|e| {
        let allocation = Allocation { devices: e.ids(), response: Some(e.response()?.into()) };
        Some((e.pod, e.container, e.resource, allocation))
    });
    let resources: Vec<String> = found.registered.into_keys().collect();
    Restored { devices: Devices::restore(entries, resources.clone()), resources, found: true }
}

/// The checkpoint's content.
pub(crate) fn encode(devices: &Devices) -> Vec<u8> {
    let entries = devices.allocations().map(|(pod, container, resource, allocation)| {
        let response = allocation.response.as_deref().unwrap_or_default();
        DeviceEntry::new(pod, container, resource, &allocation.devices, response)
    });
    checkpoint::encode_devices(&DeviceCheckpoint {
        entries: entries.collect(),
        registered: devices.registered().into_iter().map(|(name, ids)| (name, ids.into_iter().collect())).collect(),
    })
}

/// Resources of a container that come from a claim instead (gate DRAExtendedResource).
fn is_claimed(pod: &DesiredPod, container: &str, resource: &str) -> bool {
    let claimed = pod.stored_status().and_then(|s| s.extended_resource_claim_status.as_ref());
    let mut mappings = claimed.into_iter().flat_map(|c| &c.request_mappings);
    mappings.any(|m| m.container_name == container && m.resource_name == resource)
}

/// Amounts in a container's limits that plugins serve.
pub(crate) fn wanted(devices: &Devices, pod: &DesiredPod, container: &ContainerEntry<'_>) -> Vec<(String, usize)> {
    let limits = container.spec.resources.iter().flat_map(|r| r.limits.iter().flatten());
    limits
        .filter(|(name, _)| devices.serves(name) && !is_claimed(pod, &container.spec.name, name))
        .filter_map(|(name, q)| Some((name.clone(), usize::try_from(Quantity::of(q).ok()?.value()).ok()?)))
        .collect()
}

fn reusable_of<'a>(reusable: &'a Reusable, resource: &str) -> std::borrow::Cow<'a, Ids> {
    reusable.get(resource).map_or_else(Default::default, std::borrow::Cow::Borrowed)
}

/// Hints for one container.
pub(crate) fn hints(
    devices: &Devices,
    pod: &DesiredPod,
    container: &ContainerEntry<'_>,
    reusable: &Reusable,
    nodes: &[i64],
) -> Vec<Hints> {
    let hint = |(resource, needed): (String, usize)| {
        let want = Want {
            pod: pod.uid().as_str(),
            container: &container.spec.name,
            resource: &resource,
            needed,
            reusable: &reusable_of(reusable, &resource),
            affinity: None,
            running: false,
        };
        devices.hints(&want, nodes)
    };
    wanted(devices, pod, container).into_iter().map(hint).collect()
}

/// Hints for all containers of a pod together.
pub(crate) fn pod_hints(devices: &Devices, pod: &DesiredPod, nodes: &[i64]) -> Vec<Hints> {
    let containers: Vec<ContainerEntry<'_>> = crate::lasting(pod).collect();
    let amounts = crate::at_once(&containers, &|c| {
        wanted(devices, pod, c).into_iter().map(|(name, n)| (name, n as u64)).collect()
    });
    let hint = |(resource, needed): (String, u64)| {
        devices.pod_hints(pod.uid().as_str(), &resource, usize::try_from(needed).unwrap_or(usize::MAX), nodes)
    };
    amounts.into_iter().map(hint).collect()
}

/// Devices that are kept for a container until their plugin grants them.
pub(crate) struct Reservation {
    resource: String,
    needed: usize,
    affinity: Option<NumaMask>,
    /// What the plugin is to be asked before: those to choose from, and those that must be among them.
    ask: Option<(Ids, Ids)>,
}

/// Chooses devices for a container and keeps them for it.
pub(crate) fn reserve(
    devices: &mut Devices,
    pod: &DesiredPod,
    container: &ContainerEntry<'_>,
    alive: bool,
    affinity: Option<NumaMask>,
    reusable: &Reusable,
) -> Result<Vec<Reservation>, String> {
    let mut all = Vec::new();
    for (resource, needed) in wanted(devices, pod, container) {
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        let reusable = reusable_of(reusable, &resource);
        let want = Want {
            pod: uid,
            container: name,
            resource: &resource,
            needed,
            reusable: &reusable,
            affinity,
            running: alive,
        };
        let mut ask = None;
        let mut choice = devices.choose(&want, None)?;
        if let Choice::Ask { available, must_include, .. } = choice {
            // Whatever the plugin prefers, as many are kept meanwhile.
            ask = Some((available, must_include));
            choice = devices.choose(&want, Some(&Ids::new()))?;
        }
        if let Choice::Take(ids) = choice {
            devices.reserve(uid, name, &resource, &ids);
            all.push(Reservation { resource, needed, affinity, ask });
        }
    }
    Ok(all)
}

/// What an init container had is free for those after it; what any other one has is not.
pub(crate) fn note_reusable(
    devices: &Devices,
    pod: &DesiredPod,
    container: &ContainerEntry<'_>,
    reusable: &mut Reusable,
) {
    for (resource, allocation) in devices.of_container(pod.uid().as_str(), &container.spec.name).into_iter().flatten() {
        let ids = allocation.ids();
        let known = reusable.entry(resource.clone()).or_default();
        if container.kind == ContainerKind::Init {
            known.extend(ids);
        } else {
            known.retain(|id| !ids.contains(id));
        }
    }
}

impl Inner {
    fn plugins(&self) -> Result<&DevicePlugins, String> {
        self.plugins.get().ok_or_else(|| "device plugins cannot be asked yet".to_owned())
    }

    /// Has plugins grant what is kept for a container. True when there was something.
    pub(crate) async fn grant(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
        reserved: Vec<Reservation>,
        reusable: &Reusable,
    ) -> Result<bool, String> {
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        // Whatever becomes of this task, what was not granted is free again.
        let _guard = Unreserve { of: self, pod: uid, container: name, all: &reserved };
        for Reservation { resource, needed, affinity, ask } in &reserved {
            if let Some((available, must_include)) = ask {
                let preferred = self.plugins()?.preferred(resource, available, must_include, *needed).await?;
                let mut book = self.book();
                // Those kept are free for a moment in which nobody else looks.
                book.devices.refused(uid, name, resource);
                let reusable = reusable_of(reusable, resource);
                let want = Want {
                    pod: uid,
                    container: name,
                    resource,
                    needed: *needed,
                    reusable: &reusable,
                    affinity: *affinity,
                    running: false,
                };
                if let Choice::Take(ids) = book.devices.choose(&want, Some(&preferred))? {
                    book.devices.reserve(uid, name, resource, &ids);
                }
            }
            let kept = self.book().devices.allocation(uid, name, resource).map(Allocation::ids);
            let ids = kept.ok_or("the pod has gone meanwhile")?;
            let began = Instant::now();
            let answer = self.plugins()?.allocate(resource, &ids).await;
            self.metrics.managers.device_allocated(resource, began.elapsed());
            if !self.book().devices.granted(uid, name, resource, answer?) {
                return Err("the pod has gone meanwhile".to_owned());
            }
        }
        Ok(!reserved.is_empty())
    }

    /// What a container's devices add to its request. Their plugins prepare them first, those that want to.
    pub(crate) async fn container_devices(
        &self,
        pod: &DesiredPod,
        container: &ContainerEntry<'_>,
    ) -> Result<DeviceFacts, String> {
        let (uid, name) = (pod.uid().as_str(), container.spec.name.as_str());
        let wanted = wanted(&self.book().devices, pod, container);
        let mut missing = false;
        for (resource, needed) in wanted.iter().filter(|(_, needed)| *needed > 0) {
            let (has, pre_start) = {
                let book = self.book();
                let has = book.devices.allocation(uid, name, resource).map(Allocation::ids);
                (has, book.devices.options(resource).is_some_and(|o| o.pre_start))
            };
            missing |= has.is_none();
            if !pre_start {
                continue;
            }
            let ids = has.ok_or_else(|| {
                format!(
                    "no devices found allocated in local cache for pod {uid}, container {name}, resource {resource}"
                )
            })?;
            debug_assert_eq!(ids.len(), *needed);
            self.plugins()?.pre_start(resource, &ids).await?;
        }
        if missing {
            // Its plugin was not there yet when the pod was admitted.
            let none = Reusable::new();
            let reserved = reserve(&mut self.book().devices, pod, container, false, None, &none)?;
            if self.grant(pod, container, reserved, &none).await? {
                self.writer.written().await;
            }
        }
        let book = self.book();
        let answers = book.devices.of_container(uid, name).into_iter().flatten();
        Ok(plugins::devices::facts(
            answers.map(|(resource, a)| (resource.as_str(), a.response.as_deref().unwrap_or_default())),
        ))
    }

    pub(crate) fn health_of(&self, pods: BTreeSet<String>) {
        if self.config.health_status && !pods.is_empty() {
            (self.health_changed)(&pods);
        }
    }
}

/// Frees what is kept and was not granted.
struct Unreserve<'a> {
    of: &'a Inner,
    pod: &'a str,
    container: &'a str,
    all: &'a [Reservation],
}

impl Drop for Unreserve<'_> {
    fn drop(&mut self) {
        let mut book = self.of.book();
        for reservation in self.all {
            book.devices.refused(self.pod, self.container, &reservation.resource);
        }
    }
}

impl Listener for Inner {
    fn registering(&self, resource: &str) {
        self.metrics.managers.device_registration(resource);
    }

    fn connected(&self, resource: &str, options: Options) {
        self.book().devices.connected(resource, options);
        self.tell_amounts();
    }

    fn listed(&self, resource: &str, devices: BTreeMap<String, Device>) {
        let pods = self.book().devices.listed(resource, devices);
        self.tell_amounts();
        self.writer.soon();
        self.health_of(pods);
    }

    fn disconnected(&self, resource: &str) {
        let pods = self.book().devices.disconnected(resource);
        self.tell_amounts();
        self.writer.soon();
        self.health_of(pods);
    }

    fn expired(&self, resource: &str) {
        self.book().devices.expired(resource);
        self.tell_amounts();
        self.writer.soon();
    }
}
