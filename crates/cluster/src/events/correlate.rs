//! Which events are written, and as what. Pure: the time is an argument.
//!
//! Three steps, with client-go's figures: ten events that differ in their message only, within ten minutes, become one "combined" event;
//! an event that was seen before becomes a patch of its count; 25 events of one type for one object pass at once, then one in five minutes.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::lru::Lru;

/// Entries in each cache.
const CACHE: usize = 4096;
/// Different messages before they are combined.
const MAX_SIMILAR: usize = 10;
/// How long after the last one similar events still count.
const SIMILAR_FOR: SignedDuration = SignedDuration::from_mins(10);
/// Events of one type about one object at once.
const SPAM_BURST: f64 = 25.0;
/// And then one in this many seconds.
const SPAM_SECONDS: f64 = 300.0;

/// What is to be done about an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Nothing: too many of its kind.
    Skip,
    /// POST it.
    Create(Box<Event>),
    /// PATCH the one that is there; POST it when that is gone.
    Patch {
        /// The whole event.
        event: Box<Event>,
        /// The strategic merge patch.
        patch: Value,
    },
}

/// What the server made of an event, as far as somebody needs it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StoredEvent {
    /// Its name and version.
    pub metadata: StoredMeta,
    /// How often it happened.
    pub count: Option<i32>,
    /// When it happened first.
    pub first_timestamp: Option<Time>,
}

/// The name and version of an event.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StoredMeta {
    /// Name.
    pub name: Option<String>,
    /// Version.
    pub resource_version: Option<String>,
}

/// What stands for the parts that make two events the same: a digest, since the parts take a hundred times more room, for thousands of events.
type Key = [u8; 16];

#[derive(Debug)]
struct Similar {
    /// Digests of different messages, at most [`MAX_SIMILAR`].
    messages: Vec<Key>,
    last: Timestamp,
}

#[derive(Clone, Debug)]
struct Seen {
    count: i32,
    first: Option<Time>,
    name: Option<String>,
    resource_version: Option<String>,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Timestamp,
}

/// The memory of what was recorded.
#[derive(Debug)]
pub struct Correlator {
    similar: Lru<Key, Similar>,
    seen: Lru<Key, Seen>,
    spam: Lru<Key, Bucket>,
}

impl Default for Correlator {
    fn default() -> Self {
        Self { similar: Lru::new(CACHE), seen: Lru::new(CACHE), spam: Lru::new(CACHE) }
    }
}

/// An event about an object, from `component` on `host`. Named `OBJECT.HEX` after the time in nanoseconds; an object whose name cannot
/// be part of an event's name (not a DNS subdomain) gets a name made of the time and its uid alone.
pub fn make(
    about: &ObjectReference,
    component: &str,
    host: &str,
    kind: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Event {
    let mut event = Event {
        involved_object: about.clone(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        type_: Some(kind.to_owned()),
        source: Some(EventSource { component: Some(component.to_owned()), host: Some(host.to_owned()) }),
        reporting_component: Some(component.to_owned()),
        reporting_instance: Some(host.to_owned()),
        ..Event::default()
    };
    event.metadata.name = Some(name_of(about, now));
    let namespace = about.namespace.as_deref().filter(|n| !n.is_empty()).unwrap_or("default");
    event.metadata.namespace = Some(namespace.to_owned());
    event
}

fn name_of(about: &ObjectReference, now: Timestamp) -> String {
    let hex = format!("{:x}", now.as_nanosecond());
    let name = format!("{}.{hex}", about.name.as_deref().unwrap_or_default());
    if is_dns_subdomain(&name) {
        return name;
    }
    let uid: String = about.uid.as_deref().unwrap_or("x").chars().filter(char::is_ascii_hexdigit).collect();
    format!("{}.{hex}", if uid.is_empty() { "x".to_owned() } else { uid.to_lowercase() })
}

fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253
        && name.split('.').all(|label| {
            let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
            let bytes = label.as_bytes();
            bytes.first().copied().is_some_and(inner)
                && bytes.last().copied().is_some_and(inner)
                && bytes.iter().all(|b| inner(*b) || *b == b'-')
        })
}

/// The digest of parts; a character that no part holds keeps them apart.
fn key(parts: &[Option<&str>]) -> Key {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(part.unwrap_or_default());
        digest.update("\u{1f}");
    }
    let digest = digest.finalize();
    std::array::from_fn(|i| digest[i])
}

fn source(event: &Event) -> [Option<&str>; 2] {
    let source = event.source.as_ref();
    [source.and_then(|s| s.component.as_deref()), source.and_then(|s| s.host.as_deref())]
}

fn object(event: &Event) -> [Option<&str>; 5] {
    let o = &event.involved_object;
    [o.kind.as_deref(), o.namespace.as_deref(), o.name.as_deref(), o.uid.as_deref(), o.api_version.as_deref()]
}

fn exact_key(event: &Event) -> Key {
    let rest = [
        event.involved_object.field_path.as_deref(),
        event.type_.as_deref(),
        event.reason.as_deref(),
        event.message.as_deref(),
    ];
    key(&[&source(event)[..], &object(event)[..], &rest[..]].concat())
}

fn similar_key(event: &Event) -> Key {
    let rest = [
        event.type_.as_deref(),
        event.reason.as_deref(),
        event.reporting_component.as_deref(),
        event.reporting_instance.as_deref(),
    ];
    key(&[&source(event)[..], &object(event)[..], &rest[..]].concat())
}

fn spam_key(event: &Event) -> Key {
    key(&[&source(event)[..], &object(event)[..], &[event.type_.as_deref()][..]].concat())
}

impl Correlator {
    /// What to do about an event that happened now.
    pub fn correlate(&mut self, event: Event, now: Timestamp) -> Outcome {
        let (event, exact) = self.combine(event, now);
        let outcome = self.count(event, exact);
        let of = match &outcome {
            Outcome::Create(event) | Outcome::Patch { event, .. } => spam_key(event),
            Outcome::Skip => return outcome,
        };
        if self.passes(&of, now) { outcome } else { Outcome::Skip }
    }

    /// The server's version of an event that was written: its name and count are what the next one goes on from.
    pub fn written(&mut self, event: &Event, stored: StoredEvent) {
        let seen = Seen {
            count: stored.count.unwrap_or(1),
            first: stored.first_timestamp,
            name: stored.metadata.name,
            resource_version: stored.metadata.resource_version,
        };
        let slot = self.seen.entry(&exact_key(event), || seen.clone());
        *slot = seen;
    }

    fn combine(&mut self, mut event: Event, now: Timestamp) -> (Event, Key) {
        let exact = exact_key(&event);
        let similar = similar_key(&event);
        let message = event.message.clone().unwrap_or_default();
        let told = key(&[Some(&message)]);
        let record = self.similar.entry(&similar, || Similar { messages: Vec::with_capacity(1), last: now });
        if now.duration_since(record.last) > SIMILAR_FOR {
            record.messages.clear();
        }
        record.last = now;
        if !record.messages.contains(&told) {
            record.messages.push(told);
        }
        if record.messages.len() < MAX_SIMILAR {
            return (event, exact);
        }
        // One place is kept free, so that the set does not grow.
        if let Some(any) = record.messages.iter().position(|m| *m != told) {
            record.messages.swap_remove(any);
        }
        event.metadata.name = Some(name_of(&event.involved_object, now));
        event.metadata.annotations = None;
        event.message = Some(format!("(combined from similar events): {message}"));
        event.first_timestamp = Some(Time(now));
        event.last_timestamp = Some(Time(now));
        event.count = Some(1);
        (event, similar)
    }

    fn count(&mut self, mut event: Event, exact: Key) -> Outcome {
        let before = self.seen.get(&exact).cloned().filter(|s| s.count > 0);
        if let Some(before) = &before {
            event.metadata.name.clone_from(&before.name);
            event.metadata.resource_version.clone_from(&before.resource_version);
            event.first_timestamp.clone_from(&before.first);
            event.count = Some(before.count + 1);
        }
        let seen = Seen {
            count: event.count.unwrap_or(1),
            first: event.first_timestamp.clone(),
            name: event.metadata.name.clone(),
            resource_version: event.metadata.resource_version.clone(),
        };
        let slot = self.seen.entry(&exact, || seen.clone());
        *slot = seen;
        if before.is_none() {
            return Outcome::Create(Box::new(event));
        }
        let patch = json!({
            "count": event.count,
            "lastTimestamp": event.last_timestamp,
            "message": event.message,
        });
        Outcome::Patch { event: Box::new(event), patch }
    }

    fn passes(&mut self, key: &Key, now: Timestamp) -> bool {
        let bucket = self.spam.entry(key, || Bucket { tokens: SPAM_BURST, at: now });
        let passed = now.duration_since(bucket.at).as_secs_f64().max(0.0);
        bucket.tokens = (bucket.tokens + passed / SPAM_SECONDS).min(SPAM_BURST);
        bucket.at = now;
        let ok = bucket.tokens >= 1.0;
        if ok {
            bucket.tokens -= 1.0;
        }
        ok
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).unwrap()
    }

    fn pod(name: &str) -> ObjectReference {
        ObjectReference {
            kind: Some("Pod".into()),
            api_version: Some("v1".into()),
            namespace: Some("ns".into()),
            name: Some(name.into()),
            uid: Some("0F-u".into()),
            ..ObjectReference::default()
        }
    }

    fn event(message: &str, seconds: i64) -> Event {
        make(&pod("web"), "kubelet", "n1", "Warning", "BackOff", message, at(seconds))
    }

    #[test]
    fn an_event_carries_what_go_writes() {
        let e = event("Back-off", 0);
        assert_eq!(e.metadata.name.as_deref(), Some("web.17979cfe362a0000"));
        assert_eq!(i128::from_str_radix("17979cfe362a0000", 16).unwrap(), at(0).as_nanosecond());
        assert_eq!(e.metadata.namespace.as_deref(), Some("ns"));
        assert_eq!((e.reporting_component.as_deref(), e.reporting_instance.as_deref()), (Some("kubelet"), Some("n1")));
        assert_eq!((e.count, &e.first_timestamp), (Some(1), &e.last_timestamp));
        let node = ObjectReference { kind: Some("Node".into()), name: Some("n1".into()), ..ObjectReference::default() };
        let e = make(&node, "kubelet", "n1", "Normal", "NodeReady", "m", at(0));
        assert_eq!(e.metadata.namespace.as_deref(), Some("default"));
        assert!(name_of(&pod("Not_A_Name"), at(0)).starts_with("0f.1797"), "{}", name_of(&pod("Not_A_Name"), at(0)));
    }

    #[test]
    fn the_same_event_becomes_a_count() {
        let mut c = Correlator::default();
        let Outcome::Create(first) = c.correlate(event("m", 0), at(0)) else { panic!() };
        let metadata = StoredMeta { name: first.metadata.name.clone(), resource_version: Some("42".into()) };
        let first_timestamp = first.first_timestamp.clone();
        c.written(&first, StoredEvent { metadata, count: first.count, first_timestamp });
        let Outcome::Patch { event: second, patch } = c.correlate(event("m", 30), at(30)) else { panic!() };
        assert_eq!(second.metadata.name, first.metadata.name);
        assert_eq!(second.metadata.resource_version.as_deref(), Some("42"));
        assert_eq!(second.first_timestamp, first.first_timestamp);
        assert_eq!(patch, json!({"count": 2, "lastTimestamp": "2023-11-14T22:13:50Z", "message": "m"}));
        let Outcome::Create(_) = c.correlate(event("other", 31), at(31)) else { panic!() };
    }

    #[test]
    fn ten_similar_events_are_combined_and_the_combined_one_counted() {
        let mut c = Correlator::default();
        for i in 0..9 {
            let Outcome::Create(e) = c.correlate(event(&format!("m{i}"), i), at(i)) else { panic!() };
            assert_eq!(e.message, Some(format!("m{i}")));
        }
        let Outcome::Create(e) = c.correlate(event("m9", 9), at(9)) else { panic!() };
        assert_eq!(e.message.as_deref(), Some("(combined from similar events): m9"));
        let Outcome::Patch { event: e, patch } = c.correlate(event("m10", 10), at(10)) else { panic!() };
        assert_eq!(e.count, Some(2));
        assert_eq!(patch["message"], "(combined from similar events): m10");
        // After ten quiet minutes they stand alone again.
        let later = 10 + 601;
        let Outcome::Create(e) = c.correlate(event("m11", later), at(later)) else { panic!() };
        assert_eq!(e.message.as_deref(), Some("m11"));
    }

    #[test]
    fn after_a_burst_of_25_one_passes_every_five_minutes() {
        let mut c = Correlator::default();
        let passed = (0..100).filter(|_| c.correlate(event("m", 0), at(0)) != Outcome::Skip).count();
        assert_eq!(passed, 25);
        assert_eq!(c.correlate(event("m", 299), at(299)), Outcome::Skip);
        // What was skipped still counts.
        let Outcome::Patch { patch, .. } = c.correlate(event("m", 301), at(301)) else { panic!() };
        assert_eq!(patch["count"], 102);
        assert_eq!(c.correlate(event("m", 302), at(302)), Outcome::Skip);
        // Another type for the same object has a burst of its own.
        let mut normal = event("m", 302);
        normal.type_ = Some("Normal".into());
        assert_ne!(c.correlate(normal, at(302)), Outcome::Skip);
    }
}
