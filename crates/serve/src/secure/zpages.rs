//! `/flagz` and `/statusz` (KEP-4828, KEP-4827): for people as text, for programs by their media types.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::reply::{JSON, Reply, reply, text};

const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.";

/// Versions of group `config.k8s.io` that are served; the first is the newest.
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

/// What the client takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Text,
    /// `application/json` or `application/yaml`, and which of [`VERSIONS`].
    Object {
        subtype: &'static str,
        version: &'static str,
    },
    Neither,
}

/// Reads the Accept header field: the range with the highest q that can be served.
fn wanted(headers: &HeaderMap, kind: &str) -> Wanted {
    let accept = headers.get(ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if accept.trim().is_empty() {
        return Wanted::Text;
    }
    let mut ranges: Vec<(f32, Wanted)> = accept.split(',').map(|range| one(range, kind)).collect();
    ranges.sort_by(|a, b| b.0.total_cmp(&a.0));
    ranges.into_iter().map(|(_, wanted)| wanted).find(|w| *w != Wanted::Neither).unwrap_or(Wanted::Neither)
}

fn one(range: &str, kind: &str) -> (f32, Wanted) {
    let mut parts = range.split(';').map(str::trim);
    let media = parts.next().unwrap_or_default().to_ascii_lowercase();
    let (mut q, mut group, mut version, mut of) = (1.0, None, None, None);
    for (key, value) in parts.filter_map(|p| p.split_once('=')) {
        match key.trim() {
            "q" => q = value.trim().parse().unwrap_or(1.0),
            "g" => group = Some(value.trim()),
            "v" => version = Some(value.trim()),
            "as" => of = Some(value.trim()),
            _ => {}
        }
    }
    let wanted = match (media.as_str(), group, version, of) {
        ("*/*" | "text/*" | "text/plain", None, None, None) => Wanted::Text,
        (_, Some("config.k8s.io"), Some(version), Some(of)) if of == kind => {
            let subtype = ["json", "yaml"].into_iter().find(|s| media.strip_prefix("application/") == Some(s));
            let version = VERSIONS.into_iter().find(|v| *v == version);
            match (subtype, version) {
                (Some(subtype), Some(version)) => Wanted::Object { subtype, version },
                _ => Wanted::Neither,
            }
        }
        _ => Wanted::Neither,
    };
    (q, wanted)
}

/// The answer as it is wanted; JSON is YAML too.
fn answer(
    headers: &HeaderMap,
    kind: &str,
    text_page: impl FnOnce() -> String,
    object: impl FnOnce() -> Value,
) -> Reply {
    match wanted(headers, kind) {
        Wanted::Text => text(text_page()),
        Wanted::Neither => not_acceptable(headers),
        Wanted::Object { subtype, version } => {
            let mut whole = Map::new();
            whole.insert("kind".into(), json!(kind));
            whole.insert("apiVersion".into(), json!(format!("config.k8s.io/{version}")));
            whole.insert("metadata".into(), json!({"name": "kubelet"}));
            if let Value::Object(fields) = object() {
                whole.extend(fields);
            }
            let mut answer = reply(StatusCode::OK, JSON, format!("{}\n", Value::Object(whole)));
            let media = format!("application/{subtype};g=config.k8s.io;v={version};as={kind}");
            if let Ok(media) = HeaderValue::from_str(&media) {
                answer.headers_mut().insert(CONTENT_TYPE, media);
            }
            let lower = kind.to_ascii_lowercase();
            let old =
                format!("299 - \"This version of the {lower} endpoint is deprecated. Please use a newer version.\"");
            if version != VERSIONS[0]
                && let Ok(old) = HeaderValue::from_str(&old)
            {
                answer.headers_mut().insert(HeaderName::from_static("warning"), old);
            }
            answer
        }
    }
}

/// Written as the client wants plain JSON, or else as for people.
fn not_acceptable(headers: &HeaderMap) -> Reply {
    let message = "only the following media types are accepted: application/json, application/yaml, text/plain";
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
                        "reason": "NotAcceptable", "code": 406});
    let accept = headers.get(ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let json = accept.split(',').any(|range| range.trim().starts_with("application/json") && !range.contains("as="));
    let body = if json { format!("{status}\n") } else { format!("{status:#}") };
    reply(StatusCode::NOT_ACCEPTABLE, JSON, body)
}

/// The command line's flags with their values.
pub(crate) fn flags(headers: &HeaderMap, flags: &[(String, String)]) -> Reply {
    let page = || {
        let lines: String = flags.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        format!("\nkubelet flagz\n{WARNING}\n{lines}")
    };
    answer(headers, "Flagz", page, || {
        let map: Map<String, Value> = flags.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({"flags": map})
    })
}

/// What the process is, and for how long it has run. `version` is Kubernetes' (`1.36.1`).
pub(crate) fn status(headers: &HeaderMap, version: &str, paths: &[&str], started: Timestamp, now: Timestamp) -> Reply {
    let up = now.duration_since(started).as_secs().max(0);
    let emulated = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    let page = || {
        let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
        format!(
            "\nkubelet statusz\n{WARNING}\n\nStarted: {}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\nGo version: none\n\
             Binary version: {version}\nEmulation version: {emulated}\nPaths: {}\n",
            started.strftime("%a %b %e %H:%M:%S UTC %Y"),
            paths.join(" ")
        )
    };
    answer(headers, "Statusz", page, || {
        json!({"startTime": started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(), "uptimeSeconds": up, "goVersion": "none",
               "binaryVersion": version, "emulationVersion": emulated, "paths": paths})
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_types() {
        let object = |subtype, version| Wanted::Object { subtype, version };
        for (accept, expected) in [
            ("", Wanted::Text),
            ("*/*", Wanted::Text),
            ("text/html, text/plain;q=0.5", Wanted::Text),
            ("application/json", Wanted::Neither),
            ("text/html", Wanted::Neither),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz", object("json", "v1beta1")),
            ("application/yaml; g=config.k8s.io; v=v1alpha1; as=Flagz", object("yaml", "v1alpha1")),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Statusz", Wanted::Neither),
            ("application/json;v=v2;g=config.k8s.io;as=Flagz", Wanted::Neither),
            ("application/cbor;v=v1beta1;g=config.k8s.io;as=Flagz", Wanted::Neither),
            ("text/plain;q=0.1,application/json;v=v1beta1;g=config.k8s.io;as=Flagz;q=0.9", object("json", "v1beta1")),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
            assert_eq!(wanted(&headers, "Flagz"), expected, "{accept}");
        }
        assert_eq!(wanted(&HeaderMap::new(), "Flagz"), Wanted::Text);
    }
}
