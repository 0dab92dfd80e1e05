//! What an API server sends, for `testing/fuzz`: each function takes bytes and panics when something is wrong. Not for others.

use k8s_openapi::api::core::v1::Pod;

use crate::wire::{Lines, decode_event, decode_page, without_managed_fields};

/// Lines of a watch.
pub const WATCHES: &[&[u8]] = &[
    b"{\"type\":\"ADDED\",\"object\":{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"name\":\"a\",\"managedFields\":[{\"manager\":\"m]\",\"fieldsV1\":{\"f:x\":{\"k:{\\\"a\\\":[1]}\":{}}}}],\"uid\":\"u\"},\"spec\":{\"containers\":[]}}}\n",
    b"{\"type\":\"BOOKMARK\",\"object\":{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"resourceVersion\":\"7\",\"annotations\":{\"k8s.io/initial-events-end\":\"true\"}}}}\n\n",
    b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"code\":410,\"reason\":\"Expired\",\"message\":\"too old\"}}\n{\"type\":\"DELETED\",\"obj",
    b"{\"kind\":\"PodList\",\"apiVersion\":\"v1\",\"metadata\":{\"resourceVersion\":\"9\",\"continue\":\"c\"},\"items\":[{\"metadata\":{\"name\":\"a\",\"managedFields\":[{\"operation\":\"Update\"}]}}]}",
];

/// A watch: it is the same however its bytes arrive; and what is cut out of an object before it is read makes no other one of it.
///
/// # Panics
/// When something is wrong.
pub fn watch(bytes: &[u8]) {
    let lines = |pieces: usize| {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for piece in bytes.chunks(pieces) {
            if lines.push(piece).is_err() {
                return found;
            }
            while let Some(line) = lines.next() {
                found.push(line);
            }
        }
        found
    };
    let all = lines(bytes.len().max(1));
    assert_eq!(all, lines(3), "cut otherwise");
    for line in &all {
        let cut = without_managed_fields(line);
        let fields = |json: &[u8]| serde_json::from_slice::<serde_json::Value>(json).ok();
        if let (Some(before), Some(after)) = (fields(line), fields(&cut)) {
            assert_eq!(stripped(before), stripped(after), "{:?}", String::from_utf8_lossy(line));
        }
        let _ = decode_event::<Pod>(line);
    }
    let _ = decode_page::<Pod>(bytes);
}

/// Without managedFields anywhere.
fn stripped(mut value: serde_json::Value) -> serde_json::Value {
    match &mut value {
        serde_json::Value::Object(fields) => {
            fields.remove("managedFields");
            fields.values_mut().for_each(|v| *v = stripped(v.take()));
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(|v| *v = stripped(v.take())),
        _ => {}
    }
    value
}
