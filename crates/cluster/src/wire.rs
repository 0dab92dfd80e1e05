//! JSON on the wire: lists and watch lines decoded object by object without managedFields, queries encoded.

use std::borrow::Cow;
use std::fmt::Write;

use bytes::{Bytes, BytesMut};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta, Status};
use k8s_openapi::{Metadata, Resource};
use memchr::{memchr2, memmem};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::error::{ClusterError, ErrorKind};

/// A Kubernetes object that can be read.
pub trait Object: Resource + Metadata<Ty = ObjectMeta> + DeserializeOwned + Clone + Send + Sync + 'static {}

impl<K: Resource + Metadata<Ty = ObjectMeta> + DeserializeOwned + Clone + Send + Sync + 'static> Object for K {}

/// An object whose managedFields go as soon as it is decoded: they are more than half of a pod's memory, and a list is decoded object
/// by object, so at most one of them exists at a time.
pub(crate) struct Slim<K>(pub(crate) K);

impl<'de, K: Metadata<Ty = ObjectMeta> + Deserialize<'de>> Deserialize<'de> for Slim<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = K::deserialize(deserializer)?;
        object.metadata_mut().managed_fields = None;
        Ok(Self(object))
    }
}

/// The same JSON of an object without its managedFields: to build a tree of them only to drop it is half of the work of decoding a pod. What looks odd
/// stays as it is, and goes in [`Slim`].
pub(crate) fn without_managed_fields(json: &[u8]) -> Cow<'_, [u8]> {
    const KEY: &[u8] = b"\"managedFields\":[";
    let mut out = Vec::new();
    let mut kept = 0;
    let mut from = 0;
    while let Some(at) = memmem::find(&json[from..], KEY).map(|at| from + at) {
        from = at + KEY.len();
        // A quote within a string has a backslash before it, so this is a key. With the comma before it, or the one after it, it can go.
        let Some(end) = end_of_list(json, from) else { break };
        let cut = match (at.checked_sub(1).map(|before| json[before]), json.get(end)) {
            (Some(b','), _) => at - 1..end,
            (Some(b'{'), Some(b',')) => at..end + 1,
            (Some(b'{'), Some(b'}')) => at..end,
            _ => continue,
        };
        out.extend_from_slice(&json[kept..cut.start]);
        (kept, from) = (cut.end, cut.end);
    }
    if kept == 0 {
        return Cow::Borrowed(json);
    }
    out.extend_from_slice(&json[kept..]);
    Cow::Owned(out)
}

/// Where the list ends whose first element begins at `at`; None when it does not.
fn end_of_list(json: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 1;
    loop {
        match json.get(at)? {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            b'"' => {
                at += 1;
                // To the next quote without a backslash before it; what follows a backslash is passed over.
                loop {
                    at += memchr2(b'"', b'\\', json.get(at..)?)?;
                    if json[at] == b'"' {
                        break;
                    }
                    at += 2;
                }
            }
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return Some(at);
        }
    }
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Page<K> {
    /// Its objects.
    pub items: Vec<K>,
    /// The version of the whole list.
    pub resource_version: String,
    /// Where the next page starts.
    pub next: Option<String>,
}

#[derive(Deserialize)]
#[serde(bound = "K: Metadata<Ty = ObjectMeta> + Deserialize<'de>")]
struct WireList<K> {
    #[serde(default)]
    metadata: ListMeta,
    // Go writes null for an empty list.
    items: Option<Vec<Slim<K>>>,
}

pub(crate) fn decode_page<K: Object>(body: &[u8]) -> serde_json::Result<Page<K>> {
    let list: WireList<K> = serde_json::from_slice(body)?;
    Ok(Page {
        items: list.items.unwrap_or_default().into_iter().map(|Slim(k)| k).collect(),
        resource_version: list.metadata.resource_version.unwrap_or_default(),
        next: list.metadata.continue_.filter(|c| !c.is_empty()),
    })
}

/// One line of a watch.
#[derive(Clone, Debug, PartialEq)]
pub enum WatchEvent<K> {
    /// ADDED or MODIFIED.
    Upsert(K),
    /// DELETED, with the object's last state.
    Delete(K),
    /// BOOKMARK.
    Bookmark {
        /// The watch may go on from here.
        resource_version: String,
        /// The streamed initial list ends here (annotation `k8s.io/initial-events-end`).
        initial_events_end: bool,
    },
}

#[derive(Deserialize)]
struct EventKind<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
}

#[derive(Deserialize)]
struct EventOf<T> {
    object: T,
}

#[derive(Deserialize)]
struct OnlyMeta {
    metadata: ObjectMeta,
}

/// Decodes a watch line. ERROR lines become the error that their Status says.
pub(crate) fn decode_event<K: Object>(line: &[u8]) -> Result<WatchEvent<K>, ClusterError> {
    let action = || format!("watch {}", K::URL_PATH_SEGMENT);
    let bad =
        |e: serde_json::Error| ClusterError::new(action(), ErrorKind::Other, format!("unreadable watch event: {e}"));
    let line = &*without_managed_fields(line);
    // Twice over the line: first for the type alone, which says what the object is.
    let event: EventKind<'_> = serde_json::from_slice(line).map_err(bad)?;
    let object = || serde_json::from_slice::<EventOf<Slim<K>>>(line).map(|e| e.object.0).map_err(bad);
    match event.kind {
        "ADDED" | "MODIFIED" => Ok(WatchEvent::Upsert(object()?)),
        "DELETED" => Ok(WatchEvent::Delete(object()?)),
        "BOOKMARK" => {
            let meta = serde_json::from_slice::<EventOf<OnlyMeta>>(line).map_err(bad)?.object.metadata;
            let end = meta.annotations.as_ref().and_then(|a| a.get("k8s.io/initial-events-end"));
            Ok(WatchEvent::Bookmark {
                initial_events_end: end.is_some_and(|v| v == "true"),
                resource_version: meta.resource_version.unwrap_or_default(),
            })
        }
        "ERROR" => {
            let status = serde_json::from_slice::<EventOf<Status>>(line).map_err(bad)?.object;
            Err(ClusterError::from_status(action(), 500, None, &status))
        }
        other => Err(ClusterError::new(action(), ErrorKind::Other, format!("unknown watch event type {other:?}"))),
    }
}

/// The longest watch line: objects are at most about 3 MiB in etcd.
const MAX_LINE: usize = 16 << 20;

/// Cuts a byte stream into lines.
#[derive(Default)]
pub(crate) struct Lines {
    buffer: BytesMut,
    seen: usize,
}

impl Lines {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.buffer.len() + bytes.len() > MAX_LINE {
            return Err(format!("a watch event is longer than {MAX_LINE} bytes"));
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// The next whole line without its end; None until more bytes come. Empty lines are skipped.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        loop {
            let Some(end) = self.buffer[self.seen..].iter().position(|b| *b == b'\n') else {
                self.seen = self.buffer.len();
                // One large object must not keep its buffer for as long as a watch lives.
                if self.buffer.is_empty() && self.buffer.capacity() > 64 << 10 {
                    self.buffer = BytesMut::new();
                }
                return None;
            };
            let mut line = self.buffer.split_to(self.seen + end + 1);
            self.seen = 0;
            line.truncate(line.len() - 1);
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(line.freeze());
            }
        }
    }

    /// True when a line has begun that is not whole.
    pub(crate) fn is_torn(&self) -> bool {
        !self.buffer.is_empty()
    }
}

/// Percent-encodes a path segment or a query value.
pub(crate) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            // Writing to a String cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use proptest::prelude::*;

    use super::*;

    const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"7","managedFields":[{"manager":"m","operation":"Update","fieldsV1":{"f:spec":{}}}]}}"#;

    #[test]
    fn managed_fields_are_cut_out() {
        let cut = |json: &str| String::from_utf8(without_managed_fields(json.as_bytes()).into_owned()).unwrap();
        for (json, want) in [
            (r#"{"a":1,"managedFields":[{"f:a":{}}],"b":2}"#, r#"{"a":1,"b":2}"#),
            (r#"{"managedFields":[],"b":2}"#, r#"{"b":2}"#),
            (r#"{"a":[1],"managedFields":[[{"]":"}\\"}],"\"["]}"#, r#"{"a":[1]}"#),
            (r#"[{"managedFields":[1]},{"managedFields":[2]}]"#, "[{},{}]"),
        ] {
            assert_eq!(cut(json), want);
        }
        // Text, another form, and what is no JSON: as it was.
        for same in [
            r#"{"a":"\"managedFields\":[1]"}"#,
            r#"{"a":1, "managedFields": [1]}"#,
            r#"{"managedFields":{"a":1}}"#,
            r#"{"managedFields":["a"#,
            r#""managedFields":[]"#,
            r#"{"managedFields":["\"#,
        ] {
            assert_eq!(cut(same), same);
        }
    }

    #[test]
    fn managed_fields_are_dropped_everywhere() {
        let page: Page<Pod> = decode_page(
            format!(r#"{{"kind":"PodList","metadata":{{"resourceVersion":"9","continue":"c"}},"items":[{POD}]}}"#)
                .as_bytes(),
        )
        .unwrap();
        assert_eq!((page.resource_version.as_str(), page.next.as_deref()), ("9", Some("c")));
        assert!(page.items[0].metadata.managed_fields.is_none());
        let event = decode_event::<Pod>(format!(r#"{{"type":"ADDED","object":{POD}}}"#).as_bytes()).unwrap();
        let WatchEvent::Upsert(pod) = event else { panic!("{event:?}") };
        assert_eq!(pod.metadata.name.as_deref(), Some("a"));
        assert!(pod.metadata.managed_fields.is_none());
        let empty: Page<Pod> =
            decode_page(br#"{"metadata":{"resourceVersion":"9","continue":""},"items":null}"#).unwrap();
        assert!(empty.items.is_empty() && empty.next.is_none());
    }

    #[test]
    fn bookmarks_and_errors() {
        let end = br#"{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"12","annotations":{"k8s.io/initial-events-end":"true"}},"spec":{"containers":null},"status":{}}}"#;
        assert_eq!(
            decode_event::<Pod>(end).unwrap(),
            WatchEvent::Bookmark { resource_version: "12".into(), initial_events_end: true }
        );
        let e = decode_event::<Pod>(br#"{"type":"ERROR","object":{"kind":"Status","status":"Failure","message":"too old resource version: 1 (5)","reason":"Expired","code":410}}"#).unwrap_err();
        assert!(e.is_expired() && e.kind == ErrorKind::Gone, "{e}");
        assert!(decode_event::<Pod>(b"{").is_err());
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_bytes_arrive(
            lines in proptest::collection::vec("[a-z]{1,9}", 0..9),
            cuts in proptest::collection::vec(0usize..60, 0..6),
        ) {
            let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c < text.len()).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let mut reader = Lines::default();
            let mut got = Vec::new();
            for pair in cuts.windows(2) {
                reader.push(&text.as_bytes()[pair[0]..pair[1]]).unwrap();
                while let Some(line) = reader.next() {
                    got.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            prop_assert_eq!(got, lines);
            prop_assert!(!reader.is_torn());
        }
    }

    #[test]
    fn encoding() {
        assert_eq!(encode("spec.nodeName=a b/ü"), "spec.nodeName%3Da%20b%2F%C3%BC");
    }
}
