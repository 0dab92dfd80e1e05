//! What drivers say of their volumes' room and health (NodeGetVolumeStats), when somebody asks.
//!
//! Tasks: one for each driver that is being asked; it ends with its answers. Queue: none, a driver that has not answered yet is not asked
//! again. Deadline: two minutes for each call; who asks waits no longer than [`PATIENCE`] and gets what was known before. A driver that hangs
//! so holds back the figures of its own volumes, and nothing else.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures::StreamExt;
use model::Timestamp;
use model::pod::PodUid;
use tracing::debug;

use super::{Shared, Volumes, lock};
use crate::csi::{Capabilities, Driver};
use crate::wire::csi_v1::volume_usage::Unit;
use crate::wire::csi_v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse};

/// How long one who asks for figures waits for drivers.
const PATIENCE: Duration = Duration::from_secs(2);
/// Calls to one driver at once.
const AT_ONCE: usize = 8;

/// Room of one unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All there is.
    pub total: u64,
    /// What can still be used.
    pub available: u64,
    /// What is used.
    pub used: u64,
}

/// A driver's word of a volume's health (CSI `VolumeCondition`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Something is wrong with it.
    pub abnormal: bool,
    /// What, for people.
    pub message: String,
}

/// What a driver says of one volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFigures {
    /// Name of the PersistentVolume; of an inline volume, its name in the pod.
    pub spec_name: String,
    /// Name of the driver.
    pub driver: String,
    /// When it was asked.
    pub at: Timestamp,
    /// How long it took to answer.
    pub took: Duration,
    /// Bytes.
    pub bytes: Room,
    /// Inodes; zeros where the driver does not say.
    pub inodes: Room,
    /// Only of drivers that tell (VOLUME_CONDITION).
    pub health: Option<Health>,
}

/// A pod's volume, to be asked for.
#[derive(Clone, Debug)]
struct Place {
    uid: PodUid,
    key: String,
    spec_name: String,
    request: NodeGetVolumeStatsRequest,
}

/// What was answered last, and which drivers are being asked.
#[derive(Default)]
pub(super) struct Figures(Mutex<State>);

#[derive(Default)]
struct State {
    asked: BTreeSet<String>,
    known: HashMap<(PodUid, String), VolumeFigures>,
}

impl Volumes {
    /// Figures of all pods' volumes. Drivers that do not tell any, or not in time, leave theirs out, or as they were.
    pub async fn figures(&self) -> BTreeMap<PodUid, Vec<VolumeFigures>> {
        let places = self.0.places();
        let mut there: BTreeSet<(PodUid, String)> = BTreeSet::new();
        let mut running = Vec::new();
        for (driver, places) in places {
            there.extend(places.iter().map(|p| (p.uid.clone(), p.key.clone())));
            let Ok(found) = self.0.drivers.get(&driver) else { continue };
            if lock(&self.0.figures.0).asked.insert(driver.clone()) {
                let shared = self.0.clone();
                running.push(tokio::spawn(async move {
                    tokio::select! {
                        () = shared.stop.cancelled() => {}
                        () = ask(&shared, &driver, &found, places) => {}
                    }
                    lock(&shared.figures.0).asked.remove(&driver);
                }));
            }
        }
        let _ = tokio::time::timeout(PATIENCE, futures::future::join_all(running)).await;
        let mut state = lock(&self.0.figures.0);
        state.known.retain(|key, _| there.contains(key));
        let mut all: BTreeMap<PodUid, Vec<VolumeFigures>> = BTreeMap::new();
        for ((uid, _), figures) in &state.known {
            all.entry(uid.clone()).or_default().push(figures.clone());
        }
        all
    }
}

impl Shared {
    /// The volumes that stand for pods, by driver.
    fn places(&self) -> BTreeMap<String, Vec<Place>> {
        let cells: Vec<_> = lock(&self.cells).values().cloned().collect();
        let mut all: BTreeMap<String, Vec<Place>> = BTreeMap::new();
        for cell in cells {
            for (uid, of) in cell.published() {
                let request = NodeGetVolumeStatsRequest {
                    volume_id: of.handle.clone(),
                    volume_path: self.layout.figures_path(&of, &uid).display().to_string(),
                    staging_target_path: String::new(),
                };
                let place = Place { uid, key: of.key(), spec_name: of.spec_name, request };
                all.entry(of.driver).or_default().push(place);
            }
        }
        all
    }
}

/// Asks a driver for all of its volumes.
async fn ask(shared: &Shared, name: &str, driver: &Driver, places: Vec<Place>) {
    let can = match driver.calls.capabilities().await {
        Ok(can) if can.stats => can,
        Ok(_) => return,
        Err(e) => return debug!(driver = name, err = %e, "Driver does not say what it can do"),
    };
    let asked = futures::stream::iter(places).for_each_concurrent(AT_ONCE, |place| async move {
        let (at, begun) = (Timestamp::now(), Instant::now());
        let Place { uid, key, spec_name, request } = place;
        match driver.calls.stats(request).await {
            Ok(answer) => {
                let Some((bytes, inodes, health)) = read(can, answer) else { return };
                let (driver, took) = (name.to_owned(), begun.elapsed());
                let figures = VolumeFigures { spec_name, driver, at, took, bytes, inodes, health };
                lock(&shared.figures.0).known.insert((uid, key), figures);
            }
            Err(e) => debug!(driver = name, volume = spec_name, err = %e, "Driver does not tell a volume's figures"),
        }
    });
    asked.await;
}

/// What an answer says; None: nothing.
fn read(can: Capabilities, answer: NodeGetVolumeStatsResponse) -> Option<(Room, Room, Option<Health>)> {
    if answer.usage.is_empty() && !can.condition {
        return None;
    }
    let number = |n: i64| u64::try_from(n).unwrap_or_default();
    let (mut bytes, mut inodes) = (Room::default(), Room::default());
    for usage in &answer.usage {
        let room = Room { total: number(usage.total), available: number(usage.available), used: number(usage.used) };
        match usage.unit() {
            Unit::Bytes => bytes = room,
            Unit::Inodes => inodes = room,
            Unit::Unknown => {}
        }
    }
    let told = answer.volume_condition.unwrap_or_default();
    let health = can.condition.then_some(Health { abnormal: told.abnormal, message: told.message });
    Some((bytes, inodes, health))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::csi_v1::{VolumeCondition, VolumeUsage};

    #[test]
    fn answers() {
        let usage = |unit: Unit, total| VolumeUsage { total, available: total - 1, used: 1, unit: unit.into() };
        let (plain, tells) = (Capabilities::default(), Capabilities { condition: true, ..Capabilities::default() });
        let empty = NodeGetVolumeStatsResponse::default();
        assert_eq!(read(plain, empty.clone()), None);
        let fine = Health { abnormal: false, message: String::new() };
        assert_eq!(read(tells, empty), Some((Room::default(), Room::default(), Some(fine))));
        let full = NodeGetVolumeStatsResponse {
            usage: vec![usage(Unit::Bytes, 100), usage(Unit::Inodes, 10), usage(Unit::Unknown, 5)],
            volume_condition: Some(VolumeCondition { abnormal: true, message: "torn".into() }),
        };
        let room = |total: u64| Room { total, available: total - 1, used: 1 };
        assert_eq!(read(plain, full.clone()), Some((room(100), room(10), None)), "a word that it does not announce");
        let torn = Health { abnormal: true, message: "torn".into() };
        assert_eq!(read(tells, full), Some((room(100), room(10), Some(torn))));
    }
}
