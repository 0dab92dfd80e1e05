//! The text that a static pod's UID is the hash of: the internal pod, spelled out with its Go types.

use std::fmt::Write;

use model::api::Pod;
use model::quantity::{Amount, MILLI, Quantity};
use serde_json::{Map, Value};

use crate::defaults::PodLevel;
use crate::hash::fnv1a_128;
use crate::schema::{Field, Json, Kind, SCHEMA, Type};
use crate::{Origin, defaults};

/// The UID of a static pod: its own `metadata.uid`, else a hash of the pod as defaulted, and of where it came from.
///
/// `pod` is the pod as decoded, before [`crate::default_pod`] and before any change for this node.
pub fn static_uid(pod: &Pod, node_name: &str, origin: &Origin) -> String {
    let mut pod = pod.clone();
    let pod_level = defaults::apply(&mut pod);
    uid(&pod, &pod_level, node_name, origin)
}

/// As [`static_uid`], for a pod that is defaulted.
pub(crate) fn uid(pod: &Pod, pod_level: &PodLevel, node_name: &str, origin: &Origin) -> String {
    if let Some(uid) = pod.metadata.uid.as_ref().filter(|u| !u.is_empty()) {
        return uid.clone();
    }
    let mut text = dump(pod, pod_level);
    match origin {
        Origin::File(path) => {
            text.push_str("host:");
            text.push_str(node_name);
            text.push_str("file:");
            text.push_str(path);
        }
        Origin::Url(url) => {
            text.push_str("url:");
            text.push_str(url);
        }
    }
    format!("{:032x}", fnv1a_128(text))
}

/// The defaulted pod as text.
pub(crate) fn dump(pod: &Pod, pod_level: &PodLevel) -> String {
    let mut value = serde_json::to_value(pod).unwrap_or_default();
    if let Value::Object(root) = &mut value {
        root.remove("kind");
        root.remove("apiVersion");
    }
    if let Some(Value::Object(spec)) = value.get_mut("spec") {
        move_host_fields(spec);
    }
    let mut out = Dump { text: String::from("(*core.Pod)"), pod_level };
    out.value(&SCHEMA.pod(), Some(&value), "");
    out.text
}

/// In the internal pod these are part of the security context, which is always there.
fn move_host_fields(spec: &mut Map<String, Value>) {
    let fields = [
        ("hostNetwork", "HostNetwork"),
        ("hostPID", "HostPID"),
        ("hostIPC", "HostIPC"),
        ("shareProcessNamespace", "ShareProcessNamespace"),
        ("hostUsers", "HostUsers"),
    ];
    let moved: Vec<_> =
        fields.iter().filter_map(|(json, go)| Some(((*go).to_string(), spec.get(*json)?.clone()))).collect();
    let context = spec.entry("securityContext").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(context) = context {
        context.extend(moved);
    }
}

struct Dump<'a> {
    text: String,
    pod_level: &'a PodLevel,
}

impl Dump<'_> {
    /// Writes the value without its own type. `path` is known only as far as the pod's own resources.
    fn value(&mut self, ty: &Type, value: Option<&Value>, path: &str) {
        match (&ty.kind, value) {
            (Kind::Pointer(_) | Kind::List(_) | Kind::Map(_) | Kind::ResourceList, None) => self.text.push_str("<nil>"),
            (Kind::Pointer(of), value) => self.value(of, value, path),
            (Kind::List(of), Some(value)) => {
                let items = value.as_array().map_or(&[][..], Vec::as_slice);
                self.text.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        self.text.push(' ');
                    }
                    self.value(of, Some(item), "");
                }
                self.text.push(']');
            }
            (Kind::Map(of), Some(value)) => self.map(value, |out, _, v| out.value(of, Some(v), "")),
            (Kind::ResourceList, Some(value)) => {
                let exact = match path {
                    ".spec.resources.requests" => Some(&self.pod_level.requests),
                    ".spec.resources.limits" => Some(&self.pod_level.limits),
                    _ => None,
                };
                self.map(value, |out, key, v| {
                    let quantity =
                        exact.and_then(|e| e.get(key)).cloned().or_else(|| Quantity::parse(v.as_str()?).ok());
                    out.quantity(quantity.map(|mut q| {
                        q.round_up(MILLI);
                        q
                    }));
                });
            }
            (Kind::Struct, value) => self.fields(ty.name, value, path),
            (Kind::Quantity, value) => {
                self.quantity(value.and_then(Value::as_str).and_then(|t| Quantity::parse(t).ok()))
            }
            (Kind::IntOrString, value) => {
                let (kind, number, text) = match value {
                    Some(Value::String(s)) => (1, 0, s.as_str()),
                    other => (0, other.and_then(Value::as_i64).unwrap_or(0), ""),
                };
                let _ = write!(self.text, "{{Type:(intstr.Type){kind} IntVal:(int32){number} StrVal:(string){text}}}");
            }
            (Kind::Time, value) => self.time(value.and_then(Value::as_str)),
            (Kind::RawJson, value) => {
                let json = value.map(Value::to_string).unwrap_or_default();
                let bytes: Vec<String> = json.bytes().map(|b| b.to_string()).collect();
                let _ = write!(self.text, "{{Raw:([]uint8)[{}]}}", bytes.join(" "));
            }
            (Kind::Bool, value) => {
                self.text.push_str(if value.and_then(Value::as_bool) == Some(true) { "true" } else { "false" })
            }
            (Kind::Int32 | Kind::Int64, value) => {
                let _ = write!(self.text, "{}", value.and_then(Value::as_i64).unwrap_or(0));
            }
            (Kind::String, value) => self.text.push_str(value.and_then(Value::as_str).unwrap_or("")),
        }
    }

    fn fields(&mut self, ty: &str, value: Option<&Value>, path: &str) {
        self.text.push('{');
        for (i, Field { go, json, ty }) in SCHEMA.fields(ty).iter().enumerate() {
            if i > 0 {
                self.text.push(' ');
            }
            let _ = write!(self.text, "{go}:({})", ty.name);
            match json {
                Json::Inline => self.value(ty, value, path),
                Json::Moved => self.value(ty, value.and_then(|v| v.get(*go)), ""),
                Json::Name(name) => self.value(ty, value.and_then(|v| v.get(name)), &format!("{path}.{name}")),
            }
        }
        self.text.push('}');
    }

    fn map(&mut self, value: &Value, mut each: impl FnMut(&mut Self, &str, &Value)) {
        let mut entries: Vec<_> = value.as_object().into_iter().flatten().collect();
        entries.sort_by(|a, b| a.0.cmp(b.0));
        self.text.push_str("map[");
        for (i, (key, value)) in entries.into_iter().enumerate() {
            if i > 0 {
                self.text.push(' ');
            }
            self.text.push_str(key);
            self.text.push(':');
            each(self, key, value);
        }
        self.text.push(']');
    }

    fn quantity(&mut self, quantity: Option<Quantity>) {
        let (amount, text, format) = match &quantity {
            Some(q) => (q.amount(), q.source_text(), q.format().as_str()),
            None => (Amount::Int { value: 0, scale: 0 }, "", ""),
        };
        let (value, scale, dec) = match amount {
            Amount::Int { value, scale } => (value, scale, "<nil>".to_string()),
            Amount::Dec { unscaled, scale } => (0, 0, big_decimal(unscaled, scale)),
        };
        let _ = write!(
            self.text,
            "{{i:(resource.int64Amount){{value:(int64){value} scale:(resource.Scale){scale}}} \
             d:(resource.infDecAmount){{Dec:(*inf.Dec){dec}}} s:(string){text} Format:(resource.Format){format}}}"
        );
    }

    /// An unset time, or a set one in UTC. (Go adds the node's zone table to a set one, so such a UID differs between nodes anyway.)
    fn time(&mut self, text: Option<&str>) {
        let seconds = text.and_then(|t| t.parse::<jiff::Timestamp>().ok()).map(jiff::Timestamp::as_second);
        // Go counts from the year 1.
        let ext = seconds.map_or(0, |s| s + 62_135_596_800);
        let _ = write!(self.text, "{{Time:(time.Time){{wall:(uint64)0 ext:(int64){ext} loc:(*time.Location)<nil>}}}}");
    }
}

/// A long decimal: 64-bit words of the mantissa, lowest first.
fn big_decimal(unscaled: i128, scale: i32) -> String {
    let mut rest = unscaled.unsigned_abs();
    let mut words = Vec::new();
    while rest != 0 {
        words.push((rest as u64).to_string());
        rest >>= 64;
    }
    let words = if words.is_empty() { "<nil>".to_string() } else { format!("[{}]", words.join(" ")) };
    format!("{{unscaled:(big.Int){{neg:(bool){} abs:(big.nat){words}}} scale:(inf.Scale){scale}}}", unscaled < 0)
}
