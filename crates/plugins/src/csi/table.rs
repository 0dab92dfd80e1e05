//! The drivers that are registered, and the handler that registers them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use decide::node::csi::{DriverNode, Drivers as Registered};
use tokio::sync::watch;

use super::{CallObserver, Calls};
use crate::registration::Handler;
use crate::wire::channel;
use crate::wire::csi_v1::NodeGetInfoResponse;
use crate::wire::registration_v1::PluginInfo;

/// A registered driver.
#[derive(Debug)]
pub struct Driver {
    /// The way to it.
    pub calls: Calls,
    /// The highest version that it speaks.
    version: (u32, u32, u32),
}

/// The table. Clones share it.
#[derive(Clone)]
pub struct Drivers {
    drivers: Arc<Mutex<BTreeMap<String, Arc<Driver>>>>,
    told: watch::Sender<Arc<Registered>>,
    observer: Option<Arc<dyn CallObserver>>,
}

impl Default for Drivers {
    fn default() -> Self {
        Self { drivers: Arc::default(), told: watch::Sender::new(Arc::default()), observer: None }
    }
}

/// `v1.2.3`, `1.2`, `1`.
fn version(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let text = text.split(['-', '+']).next()?;
    let mut parts = text.split('.').map(str::parse::<u32>);
    let first = parts.next()?.ok()?;
    let mut next = || parts.next().unwrap_or(Ok(0)).ok();
    Some((first, next()?, next()?))
}

/// The highest version 1 among them.
fn highest(name: &str, versions: &[String]) -> Result<(u32, u32, u32), String> {
    let failed = format!("kubernetes.io/csi: RegisterPlugin for CSI driver {name:?} failed.");
    if versions.is_empty() {
        return Err(format!("{failed} Plugin returned an empty list for supported versions"));
    }
    let best = versions.iter().filter_map(|v| version(v)).filter(|v| v.0 == 1).max();
    best.ok_or_else(|| format!("{failed} None of the versions specified {versions:?} are supported."))
}

/// Most volumes on the node; None: it sets no limit.
fn limit(told: &NodeGetInfoResponse) -> Option<i32> {
    (told.max_volumes_per_node > 0).then(|| i32::try_from(told.max_volumes_per_node).unwrap_or(i32::MAX))
}

impl Drivers {
    /// A table whose drivers' calls are looked on at.
    pub fn observed_by(observer: Arc<dyn CallObserver>) -> Self {
        Self { observer: Some(observer), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Driver>>> {
        self.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A registered driver.
    ///
    /// # Errors
    /// There is none of that name, in the words that events carry.
    pub fn get(&self, name: &str) -> Result<Arc<Driver>, String> {
        let missing = || format!("driver name {name} not found in the list of registered CSI drivers");
        self.lock().get(name).cloned().ok_or_else(missing)
    }

    /// What is registered, as it changes.
    pub fn registered(&self) -> watch::Receiver<Arc<Registered>> {
        self.told.subscribe()
    }

    /// Asks a driver again for what it says of the node; what the node's objects say of it follows.
    ///
    /// # Errors
    /// It is not registered, or does not answer.
    pub async fn refresh(&self, name: &str) -> Result<(), String> {
        let driver = self.get(name)?;
        let told =
            driver.calls.info().await.map_err(|e| format!("failed to get NodeGetInfo from driver {name:?}: {e}"))?;
        let limit = limit(&told);
        self.told.send_if_modified(|told| {
            // Only the number is taken: pods may have been placed by the rest, and the driver may have gone meanwhile.
            let Some(Some(known)) = told.get(name) else { return false };
            if known.limit == limit {
                return false;
            }
            let mut new = Registered::clone(told);
            new.insert(name.to_owned(), Some(DriverNode { limit, ..known.clone() }));
            *told = Arc::new(new);
            true
        });
        Ok(())
    }

    fn tell(&self, name: &str, node: Option<DriverNode>) {
        self.told.send_modify(|told| {
            let mut new = Registered::clone(told);
            new.insert(name.to_owned(), node);
            *told = Arc::new(new);
        });
    }
}

#[async_trait]
impl Handler for Drivers {
    fn kind(&self) -> &'static str {
        "CSIPlugin"
    }

    async fn register(&self, info: &PluginInfo) -> Result<(), String> {
        let name = info.name.as_str();
        let version = highest(name, &info.supported_versions)?;
        if let Some(there) = self.lock().get(name).filter(|d| d.version > version) {
            let (a, b, c) = there.version;
            return Err(format!(
                "kubernetes.io/csi: RegisterPlugin for CSI driver {name:?} failed. Another driver with the same name is already \
                 registered with a higher supported version: \"{a}.{b}.{c}\""
            ));
        }
        if !Path::new(&info.endpoint).is_absolute() {
            return Err(format!("endpoint {:?} of CSI driver {name:?} is not an absolute path", info.endpoint));
        }
        let calls = Calls::new(name, channel(info.endpoint.clone().into()), self.observer.clone());
        let told = calls.info().await.map_err(|e| format!("failed to get NodeGetInfo from driver {name:?}: {e}"))?;
        if told.node_id.is_empty() {
            return Err(format!("error adding CSI driver node info: driverNodeID must not be empty (driver {name:?})"));
        }
        let node = DriverNode {
            limit: limit(&told),
            node_id: told.node_id,
            topology: told.accessible_topology.map(|t| t.segments).unwrap_or_default(),
        };
        self.lock().insert(name.to_owned(), Arc::new(Driver { calls, version }));
        self.tell(name, Some(node));
        Ok(())
    }

    fn gone(&self, name: &str) {
        self.lock().remove(name);
        self.tell(name, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        for (text, want) in [
            ("v1.2.3", Some((1, 2, 3))),
            ("1", Some((1, 0, 0))),
            ("1.5.0-rc1", Some((1, 5, 0))),
            ("x", None),
            ("1.x", None),
        ] {
            assert_eq!(version(text), want, "{text}");
        }
        let all = |list: &[&str]| highest("d", &list.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(all(&["0.3.0", "1.0.0", "v1.4.0", "2.0.0"]), Ok((1, 4, 0)));
        assert!(all(&[]).unwrap_err().ends_with("Plugin returned an empty list for supported versions"));
        assert!(all(&["0.3.0", "nonsense"]).unwrap_err().contains("None of the versions specified"));
    }
}
