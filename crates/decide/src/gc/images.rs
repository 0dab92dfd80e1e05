//! Which images may go: what is known of each over time ([`ImageLedger`]), how much is to be freed, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cri_api::v1;
use jiff::{SignedDuration, Timestamp};

use super::older_than;

/// An image: its id, and the runtime handler that it was pulled for where the runtime tells them apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageKey {
    /// CRI image id.
    pub id: String,
    /// CRI runtime handler; empty for the default one.
    pub handler: String,
}

/// An image as image collection sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRecord {
    /// Which one.
    pub key: ImageKey,
    /// Bytes.
    pub size: u64,
    /// When this agent first saw it.
    pub first_detected: Timestamp,
    /// When a container last used it; None: not since it was first seen.
    pub last_used: Option<Timestamp>,
    /// The runtime pins it (the sandbox image).
    pub pinned: bool,
    /// Something uses it now.
    pub in_use: bool,
}

impl ImageRecord {
    /// Not used by anything, not pinned, and known for at least this long.
    fn removable(&self, now: Timestamp, min_age: Duration) -> bool {
        !self.pinned && !self.in_use && older_than(now, self.first_detected, min_age).is_some()
    }

    /// Least recently used first; never used counts as oldest.
    fn age_key(&self) -> (Option<Timestamp>, Timestamp, &ImageKey) {
        (self.last_used, self.first_detected, &self.key)
    }
}

/// What uses images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagesInUse {
    /// Ids, digests and names, each with the runtime handler that it is used with.
    used: BTreeSet<(String, String)>,
    /// Those that are used with any handler.
    everywhere: BTreeSet<String>,
}

impl ImagesInUse {
    /// The images of these containers, running or not: one that has ended may be looked into, and its image started again.
    pub fn of(containers: &[v1::Container]) -> Self {
        let mut all = Self::default();
        for c in containers {
            let handler = c.image.as_ref().map_or("", |i| i.runtime_handler.as_str());
            for reference in [&c.image_id, &c.image_ref].into_iter().filter(|r| !r.is_empty()) {
                all.used.insert((reference.clone(), handler.to_owned()));
            }
        }
        all
    }

    /// Adds an id, a digest or a full name, whatever the handler: the image of a volume, or one that a container is being made of.
    pub fn add(&mut self, reference: impl Into<String>) {
        self.everywhere.insert(reference.into());
    }

    fn contains(&self, image: &v1::Image, handler: &str) -> bool {
        let mut references = std::iter::once(&image.id).chain(&image.repo_digests).chain(&image.repo_tags);
        references.any(|r| {
            // A runtime that does not tell handlers apart shows none.
            let by_handler = || match handler {
                "" => self.used.range((r.clone(), String::new())..).next().is_some_and(|(used, _)| used == r),
                _ => self.used.contains(&(r.clone(), handler.to_owned())),
            };
            self.everywhere.contains(r) || by_handler()
        })
    }
}

/// What is known of the node's images over time.
#[derive(Clone, Debug, Default)]
pub struct ImageLedger {
    records: BTreeMap<ImageKey, ImageRecord>,
}

impl ImageLedger {
    /// Takes in what is there and what is used now. Images that have gone, by whose hand ever, are forgotten.
    pub fn observe(&mut self, images: &[v1::Image], in_use: &ImagesInUse, now: Timestamp) {
        let mut before = std::mem::take(&mut self.records);
        for image in images {
            let handler = image.spec.as_ref().map_or("", |s| s.runtime_handler.as_str());
            let key = ImageKey { id: image.id.clone(), handler: handler.to_owned() };
            let used = in_use.contains(image, handler);
            let known = before.remove(&key);
            let record = ImageRecord {
                size: image.size,
                first_detected: known.as_ref().map_or(now, |k| k.first_detected),
                last_used: used.then_some(now).or(known.and_then(|k| k.last_used)),
                pinned: image.pinned,
                in_use: used,
                key: key.clone(),
            };
            self.records.insert(key, record);
        }
    }

    /// Forgets an image that was removed.
    pub fn forget(&mut self, key: &ImageKey) {
        self.records.remove(key);
    }

    /// All that are there.
    pub fn records(&self) -> impl Iterator<Item = &ImageRecord> {
        self.records.values()
    }

    /// Those that may go, least recently used first, then by when they were first seen.
    pub fn removable(&self, now: Timestamp, policy: &ImageGcPolicy) -> Vec<ImageRecord> {
        let mut all: Vec<_> = self.records().filter(|i| i.removable(now, policy.min_age)).cloned().collect();
        all.sort_by(|a, b| a.age_key().cmp(&b.age_key()));
        all
    }

    /// Those that nothing used for longer than `imageMaximumGCAge`, in the same order. While the agent itself is younger than that it cannot know.
    pub fn too_old(&self, agent_started: Timestamp, now: Timestamp, policy: &ImageGcPolicy) -> Vec<ImageRecord> {
        let max = SignedDuration::try_from(policy.max_age).unwrap_or(SignedDuration::MAX);
        if max.is_zero() || now.duration_since(agent_started) <= max {
            return Vec::new();
        }
        let mut all = self.removable(now, policy);
        all.retain(|i| now.duration_since(i.last_used.unwrap_or(i.first_detected)) > max);
        all
    }
}

/// When images are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// `imageGCHighThresholdPercent`: from this usage on space is freed; 100 switches it off.
    pub high_percent: u64,
    /// `imageGCLowThresholdPercent`: down to this usage.
    pub low_percent: u64,
    /// `imageMinimumGCAge`.
    pub min_age: Duration,
    /// `imageMaximumGCAge`; zero switches it off.
    pub max_age: Duration,
}

impl Default for ImageGcPolicy {
    fn default() -> Self {
        Self { high_percent: 85, low_percent: 80, min_age: Duration::from_secs(120), max_age: Duration::ZERO }
    }
}

impl ImageGcPolicy {
    /// Nothing is ever removed but under the pressure of eviction.
    pub fn is_off(&self) -> bool {
        self.high_percent >= 100 && self.max_age.is_zero()
    }
}

/// What is to be freed on the image file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Whole percent in use, rounded up.
    pub usage_percent: u64,
    /// Size of the file system in bytes.
    pub capacity: u64,
    /// Bytes to free.
    pub bytes: u64,
}

impl Shortage {
    /// Go's message, of an event and in the log, when all that may go has gone and it is not enough.
    pub fn not_freed(&self, freed: u64) -> String {
        format!(
            "Insufficient free disk space on the node's image filesystem ({}% of {} used). Failed to free sufficient space by deleting \
             unused images (freed {freed} bytes). Investigate disk usage, as it could be used by active images, logs, volumes, or other data.",
            self.usage_percent,
            size(self.capacity)
        )
    }
}

/// The reason of the event when the file system has no size, and its message.
pub const INVALID_CAPACITY: (&str, &str) = ("InvalidDiskCapacity", "invalid capacity 0 on image filesystem");

/// How much is to be freed; None while usage is below the high threshold. `capacity` and `available` in bytes.
pub fn shortage(capacity: u64, available: u64, policy: &ImageGcPolicy) -> Option<Shortage> {
    if capacity == 0 || policy.high_percent >= 100 {
        return None;
    }
    let (left, whole) = (u128::from(available.min(capacity)), u128::from(capacity));
    let usage = 100 - left * 100 / whole;
    if usage < u128::from(policy.high_percent) {
        return None;
    }
    let wanted = whole * u128::from(100 - policy.low_percent.min(100)) / 100;
    let bytes = u64::try_from(wanted.saturating_sub(left)).ok().filter(|b| *b > 0)?;
    Some(Shortage { usage_percent: u64::try_from(usage).unwrap_or(100), capacity, bytes })
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::at;

    fn image(id: &str, size: u64) -> v1::Image {
        v1::Image { id: id.into(), size, ..v1::Image::default() }
    }

    fn container(id: &str) -> v1::Container {
        v1::Container { image_ref: id.into(), ..v1::Container::default() }
    }

    fn ids(records: &[ImageRecord]) -> Vec<&str> {
        records.iter().map(|r| r.key.id.as_str()).collect()
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn how_much_to_free() {
        let policy = ImageGcPolicy::default();
        let bytes = |available, policy: &ImageGcPolicy| shortage(1000, available, policy).map(|s| s.bytes);
        assert_eq!(bytes(160, &policy), None);
        // Usage is a whole number of percent, rounded up.
        assert_eq!(bytes(159, &policy), Some(41));
        assert_eq!(bytes(150, &policy), Some(50));
        assert_eq!(bytes(0, &policy), Some(200));
        assert_eq!(shortage(0, 0, &policy), None);
        assert_eq!(bytes(0, &ImageGcPolicy { high_percent: 100, ..policy }), None);
        assert_eq!(bytes(2000, &policy), None);
        // Between the thresholds nothing is missing.
        assert_eq!(bytes(150, &ImageGcPolicy { high_percent: 85, low_percent: 85, ..policy }), None);

        let found = shortage(100 * GIB, 10 * GIB, &policy).unwrap();
        assert_eq!(
            found.not_freed(7),
            "Insufficient free disk space on the node's image filesystem (90% of 100.0 GiB used). Failed to free sufficient space by \
             deleting unused images (freed 7 bytes). Investigate disk usage, as it could be used by active images, logs, volumes, or \
             other data."
        );
        assert_eq!([size(5), size(1536), size(3 << 20), size(5 << 40)], ["5 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"]);
    }

    #[test]
    fn least_recently_used_images_go_first() {
        let policy = ImageGcPolicy::default();
        let mut ledger = ImageLedger::default();
        let mut images: Vec<_> = ["late", "early", "never", "pinned", "busy", "tagged"].map(|id| image(id, 10)).into();
        images[3].pinned = true;
        images[5].repo_tags = vec!["docker.io/library/data:1".into()];
        ledger.observe(&images, &ImagesInUse::of(&[container("early")]), at(100));
        ledger.observe(&images, &ImagesInUse::of(&[container("late"), container("busy")]), at(500));
        images.push(image("young", 10));
        let mut in_use = ImagesInUse::of(&[container("busy")]);
        in_use.add("docker.io/library/data:1");
        ledger.observe(&images, &in_use, at(950));
        assert_eq!(ids(&ledger.removable(at(1000), &policy)), ["never", "early", "late"]);
        assert_eq!(ids(&ledger.removable(at(1070), &policy)), ["never", "young", "early", "late"]);

        let old = ImageGcPolicy { max_age: Duration::from_secs(600), ..policy };
        assert_eq!(ids(&ledger.too_old(at(0), at(1070), &old)), ["never", "early"]);
        assert_eq!(ids(&ledger.too_old(at(500), at(1070), &old)), [""; 0], "the agent is too young to know");
        assert_eq!(ids(&ledger.too_old(at(0), at(1070), &policy)), [""; 0]);

        // What somebody else removed, and brought again, begins anew.
        ledger.observe(&images[1..], &ImagesInUse::default(), at(1100));
        ledger.observe(&images, &ImagesInUse::default(), at(1110));
        assert!(!ids(&ledger.removable(at(1200), &policy)).contains(&"late"));
    }

    #[test]
    fn images_by_runtime_handler() {
        let of = |handler: &str| v1::ImageSpec { runtime_handler: handler.into(), ..v1::ImageSpec::default() };
        let with = |handler: &str| v1::Image { spec: Some(of(handler)), ..image("a", 1) };
        let uses = |handler: &str| v1::Container { image: Some(of(handler)), ..container("a") };
        let removable = |images: &[v1::Image], containers: &[v1::Container]| {
            let mut ledger = ImageLedger::default();
            ledger.observe(images, &ImagesInUse::of(containers), at(800));
            let keys = ledger.removable(at(1000), &ImageGcPolicy::default());
            keys.into_iter().map(|r| r.key.handler).collect::<Vec<_>>()
        };
        assert_eq!(removable(&[with("runc"), with("kata")], &[uses("kata")]), ["runc"]);
        assert_eq!(removable(&[with("")], &[uses("kata")]), [""; 0], "the runtime does not tell handlers apart");
        assert_eq!(removable(&[with("")], &[]), [""]);
    }

    proptest! {
        /// Never a pinned, used or young one; the order is by last use.
        #[test]
        fn only_what_may_go(looks in prop::collection::vec(prop::collection::vec((0usize..6, any::<bool>(), any::<bool>()), 0..6), 1..6)) {
            let mut ledger = ImageLedger::default();
            let mut now = 0;
            let (mut images, mut used) = (Vec::new(), Vec::new());
            for look in &looks {
                now += 100;
                images = look.iter().map(|(n, pinned, _)| v1::Image { pinned: *pinned, ..image(&format!("i{n}"), 1) }).collect::<Vec<_>>();
                images.sort_by(|a, b| a.id.cmp(&b.id));
                images.dedup_by(|a, b| a.id == b.id);
                used = look.iter().filter(|(_, _, used)| *used).map(|(n, _, _)| container(&format!("i{n}"))).collect::<Vec<_>>();
                ledger.observe(&images, &ImagesInUse::of(&used), at(now));
            }
            let removable = ledger.removable(at(now), &ImageGcPolicy::default());
            for r in &removable {
                prop_assert!(images.iter().any(|i| i.id == r.key.id && !i.pinned));
                prop_assert!(!used.iter().any(|c| c.image_ref == r.key.id));
                prop_assert!(r.first_detected <= at(now - 120));
            }
            prop_assert!(removable.windows(2).all(|w| w[0].last_used <= w[1].last_used));
            prop_assert_eq!(ledger.records().count(), images.len());
        }
    }
}
