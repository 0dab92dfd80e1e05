//! From bytes to [`Pod`] objects: the syntax, the kind, and each field's type.

use model::api::Pod;
use serde_json::{Map, Number, Value};

use crate::node::Node;
use crate::schema::{Kind, SCHEMA, Type};
use crate::{ManifestError, Origin, json, yaml};

/// The largest file or answer that is read, bytes.
pub const MAX_BYTES: usize = 10 << 20;

/// Reads the pods of a manifest: one pod, or from a URL also a list of pods.
///
/// Unknown fields are ignored, names are case-sensitive, `null` counts as absent. Nothing is defaulted.
///
/// # Errors
/// The text is not YAML or JSON, or not UTF-8, or too large; it is no pod; a field has a value of the wrong type. The outer error is
/// about the whole manifest, an inner one about one pod of a list.
pub fn decode(bytes: &[u8], origin: &Origin) -> Result<Vec<Result<Pod, ManifestError>>, ManifestError> {
    let unparsable = |reason: String| match origin {
        Origin::File(path) => ManifestError::File { path: path.clone(), reason },
        Origin::Url(url) => ManifestError::Url { url: url.clone(), reason },
    };
    if bytes.len() > MAX_BYTES {
        return Err(unparsable(format!("limit {MAX_BYTES} bytes exceeded")));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| unparsable(format!("yaml: invalid UTF-8: {e}")))?;
    let is_json = text.trim_start().starts_with('{');
    let node = if is_json { json::parse(text) } else { yaml::parse(text).map_err(|e| format!("yaml: {e}")) };
    let node = node.map_err(unparsable)?;
    let (kind, api_version) = type_meta(&node).map_err(unparsable)?;
    let lists = matches!(origin, Origin::Url(_));
    match (kind, api_version) {
        ("Pod", "v1") => Ok(vec![Ok(pod(&node).map_err(unparsable)?)]),
        ("PodList" | "List", "v1") if lists => {
            let items = match node.get("items") {
                Some(Node::Array(items)) => items.as_slice(),
                None | Some(Node::Null) => &[],
                Some(other) => {
                    return Err(unparsable(format!(
                        "{kind} in version \"v1\" cannot be handled as a {kind}: json: cannot unmarshal {} into Go struct field \
                         {kind}.items of type []v1.Pod",
                        other.kind()
                    )));
                }
            };
            Ok(items.iter().map(|item| list_item(item, kind).map_err(unparsable)).collect())
        }
        _ => Err(unparsable(format!("invalid pod: kind \"{kind}\" of apiVersion \"{api_version}\" is not a Pod"))),
    }
}

fn list_item(item: &Node, list: &str) -> Result<Pod, String> {
    // Items of a PodList need not say what they are.
    if list == "List" || item.get("kind").is_some() {
        let (kind, api_version) = type_meta(item)?;
        if (kind, api_version) != ("Pod", "v1") {
            return Err(format!("invalid pod: kind \"{kind}\" of apiVersion \"{api_version}\" is not a Pod"));
        }
    }
    pod(item)
}

/// `kind` and `apiVersion`.
fn type_meta(node: &Node) -> Result<(&str, &str), String> {
    let text = |key: &str, go: &str| match node.get(key) {
        None | Some(Node::Null) => Ok(""),
        Some(Node::String(s)) => Ok(s.as_str()),
        Some(other) => Err(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {} into Go struct field .{key} of type {go}",
            other.kind()
        )),
    };
    if !matches!(node, Node::Object(_) | Node::Null) {
        return Err(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {} into Go value of type struct",
            node.kind()
        ));
    }
    let (kind, api_version) = (text("kind", "string")?, text("apiVersion", "string")?);
    if kind.is_empty() {
        return Err("Object 'Kind' is missing".into());
    }
    if api_version.is_empty() {
        return Err("Object 'apiVersion' is missing".into());
    }
    Ok((kind, api_version))
}

fn pod(node: &Node) -> Result<Pod, String> {
    let context = |e: String| format!("Pod in version \"v1\" cannot be handled as a Pod: {e}");
    let ty = SCHEMA.pod();
    let mut check = Check { at: Vec::new(), owner: "Pod", first: None };
    let value = check.value(&ty, node).map_err(context)?;
    if let Some(e) = check.first {
        return Err(context(e));
    }
    let mut value = value.unwrap_or_else(|| Value::Object(Map::new()));
    if let Value::Object(root) = &mut value {
        root.insert("kind".into(), "Pod".into());
        root.insert("apiVersion".into(), "v1".into());
    }
    serde_json::from_value(value).map_err(|e| context(e.to_string()))
}

/// A walk along the types: drops what they do not know, and notes the first value of a wrong type.
struct Check<'a> {
    /// JSON names from the root.
    at: Vec<&'a str>,
    /// Go struct that the last name belongs to.
    owner: &'a str,
    first: Option<String>,
}

impl<'a> Check<'a> {
    fn mismatch<T>(&mut self, found: &str, wanted: &str) -> Result<Option<T>, String> {
        let text = self.text(found, wanted);
        self.first.get_or_insert(text);
        Ok(None)
    }

    fn text(&self, found: &str, wanted: &str) -> String {
        let wanted = wanted.replace("core.", "v1.");
        if self.at.is_empty() {
            return format!("json: cannot unmarshal {found} into Go value of type {wanted}");
        }
        format!(
            "json: cannot unmarshal {found} into Go struct field {}.{} of type {wanted}",
            self.owner,
            self.at.join(".")
        )
    }

    /// The value in the form that the typed decoder takes; None: absent. `Err` is for errors that end Go's decoding at once.
    fn value(&mut self, ty: &'a Type, node: &'a Node) -> Result<Option<Value>, String> {
        Ok(match (&ty.kind, node) {
            (_, Node::Null) => None,
            (Kind::Pointer(of), node) => return self.value(of, node),
            (Kind::Struct, Node::Object(entries)) => {
                let (owner, mut out) = (self.owner, Map::new());
                for (key, node) in entries {
                    let Some((inline, field)) = SCHEMA.json_field(ty.name, key) else { continue };
                    self.owner = ty.name.split_once('.').map_or(ty.name, |(_, name)| name);
                    let depth = self.at.len();
                    self.at.extend(inline);
                    self.at.push(key);
                    let value = self.value(&field.ty, node);
                    self.at.truncate(depth);
                    if let Some(value) = value? {
                        out.insert(key.clone(), value);
                    }
                }
                self.owner = owner;
                Some(Value::Object(out))
            }
            (Kind::List(of), Node::Array(items)) => {
                let mut out = Vec::with_capacity(items.len());
                for item in items {
                    out.push(self.value(of, item)?.unwrap_or_else(|| zero(of)));
                }
                Some(Value::Array(out))
            }
            (Kind::Map(_) | Kind::ResourceList, Node::Object(entries)) => {
                let mut out = Map::new();
                for (key, node) in entries {
                    let value = match &ty.kind {
                        Kind::Map(of) => self.value(of, node)?.unwrap_or_else(|| zero(of)),
                        // An empty text is a quantity that was never set.
                        _ => quantity(node)?.unwrap_or_else(|| "".into()),
                    };
                    out.insert(key.clone(), value);
                }
                Some(Value::Object(out))
            }
            (Kind::String, Node::String(s)) => Some(Value::String(s.clone())),
            (Kind::Bool, Node::Bool(b)) => Some(Value::Bool(*b)),
            (Kind::Int32 | Kind::Int64, Node::Number(n)) => {
                let fits = |v: &i64| matches!(ty.kind, Kind::Int64) || i32::try_from(*v).is_ok();
                match n.parse::<i64>().ok().filter(fits) {
                    Some(v) => Some(Value::Number(v.into())),
                    None => return self.mismatch(&format!("number {n}"), ty.name),
                }
            }
            (Kind::Quantity, node) => quantity(node)?,
            (Kind::Time, Node::String(s)) => {
                s.parse::<jiff::Timestamp>()
                    .map_err(|e| format!("parsing time {s:?} as \"2006-01-02T15:04:05Z07:00\": {e}"))?;
                Some(Value::String(s.clone()))
            }
            (Kind::Time, other) => {
                return Err(self.text(other.kind(), "string"));
            }
            (Kind::IntOrString, Node::String(s)) => Some(Value::String(s.clone())),
            (Kind::IntOrString, Node::Number(n)) => match n.parse::<i32>() {
                Ok(v) => Some(Value::Number(v.into())),
                Err(_) => return Err(self.text(&format!("number {n}"), "int32")),
            },
            (Kind::IntOrString, other) => {
                return Err(self.text(other.kind(), "int32"));
            }
            (Kind::RawJson, node) => Some(raw(node)),
            (_, other) => return self.mismatch(other.kind(), ty.name),
        })
    }
}

/// What a `null` in a list or a map stands for.
fn zero(ty: &Type) -> Value {
    match &ty.kind {
        Kind::Struct => Value::Object(Map::new()),
        Kind::Int32 | Kind::Int64 => Value::Number(0.into()),
        Kind::Bool => Value::Bool(false),
        Kind::Quantity => Value::String("0".into()),
        _ => Value::String(String::new()),
    }
}

fn quantity(node: &Node) -> Result<Option<Value>, String> {
    let text = match node {
        Node::Null => return Ok(None),
        Node::String(s) | Node::Number(s) => s.trim(),
        // Not a quantity, whatever its text.
        _ => "?",
    };
    model::quantity::Quantity::parse(text).map_err(|e| e.to_string())?;
    Ok(Some(Value::String(text.into())))
}

fn raw(node: &Node) -> Value {
    match node {
        Node::Null => Value::Null,
        Node::Bool(b) => Value::Bool(*b),
        Node::Number(n) => serde_json::from_str(n).map_or(Value::Null, |n: Number| Value::Number(n)),
        Node::String(s) => Value::String(s.clone()),
        Node::Array(items) => items.iter().map(raw).collect(),
        Node::Object(entries) => Value::Object(entries.iter().map(|(k, v)| (k.clone(), raw(v))).collect()),
    }
}
