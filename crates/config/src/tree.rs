//! Text of a configuration file to a value tree: JSON when it starts with `{`, else YAML 1.1.
//!
//! Of several YAML documents only the first counts, as in Kubernetes. Of a duplicate key the last one counts; the
//! duplicates are reported.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// A node that still has every pair of a mapping.
enum Node {
    Leaf(Value),
    List(Vec<Node>),
    Pairs(Vec<(String, Node)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a YAML or JSON value")
            }
            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Leaf(Value::Null))
            }
            fn visit_none<E>(self) -> Result<Node, E> {
                Ok(Node::Leaf(Value::Null))
            }
            fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Node, D::Error> {
                Node::deserialize(d)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Node, E> {
                Ok(Node::Leaf(v.into()))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Node, E> {
                Ok(Node::Leaf(v.into()))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Node, E> {
                Ok(Node::Leaf(v.into()))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Node, E> {
                Ok(Node::Leaf(Number::from_f64(v).map_or(Value::Null, Value::Number)))
            }
            fn visit_str<E>(self, v: &str) -> Result<Node, E> {
                Ok(Node::Leaf(v.into()))
            }
            fn visit_string<E>(self, v: String) -> Result<Node, E> {
                Ok(Node::Leaf(v.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Node::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Node::Pairs(pairs))
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// A parsed file.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) value: Value,
    /// Paths of keys given more than once in one mapping, in the order found.
    pub(crate) duplicates: Vec<String>,
    /// YAML documents in the file; only the first is in `value`.
    pub(crate) documents: usize,
}

/// `parent.key`.
pub(crate) fn join(parent: &str, key: &str) -> String {
    if parent.is_empty() { key.to_owned() } else { format!("{parent}.{key}") }
}

fn settle(node: Node, at: &str, duplicates: &mut Vec<String>) -> Value {
    match node {
        Node::Leaf(value) => value,
        Node::List(items) => {
            items.into_iter().enumerate().map(|(i, item)| settle(item, &format!("{at}[{i}]"), duplicates)).collect()
        }
        Node::Pairs(pairs) => {
            let mut map = Map::new();
            for (key, node) in pairs {
                let here = join(at, &key);
                let value = settle(node, &here, duplicates);
                if map.insert(key, value).is_some() && !duplicates.contains(&here) {
                    duplicates.push(here);
                }
            }
            Value::Object(map)
        }
    }
}

/// Parses a file.
///
/// # Errors
/// The parser's message, when the text is neither UTF-8 JSON nor UTF-8 YAML.
pub(crate) fn parse(data: &[u8]) -> Result<Tree, String> {
    let text = std::str::from_utf8(data).map_err(|e| format!("not UTF-8 text: {e}"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents: Vec<Node> = if text.trim_start().starts_with('{') {
        vec![serde_json::from_str(text).map_err(|e| format!("json: {e}"))?]
    } else {
        let options = serde_saphyr::options! {
            legacy_octal_numbers: true,
            duplicate_keys: serde_saphyr::DuplicateKeyPolicy::PassThrough,
            with_snippet: false,
        };
        serde_saphyr::from_multiple_with_options(text, options).map_err(|e| format!("yaml: {e}"))?
    };
    let count = documents.len();
    let mut duplicates = Vec::new();
    let value = if count == 0 { Value::Null } else { settle(documents.swap_remove(0), "", &mut duplicates) };
    Ok(Tree { value, duplicates, documents: count })
}

/// JSON merge patch (RFC 7386): objects merge by key, null removes, everything else replaces.
pub(crate) fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else {
        return;
    };
    for (key, value) in patch {
        if value.is_null() {
            target.shift_remove(key);
        } else {
            merge_patch(target.entry(key.as_str()).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What Kubernetes' YAML reader makes of these scalars, seen in its messages.
    #[test]
    fn yaml_1_1_scalars() {
        for (text, value) in [
            ("yes", json!(true)),
            ("On", json!(true)),
            ("y", json!(true)),
            ("off", json!(false)),
            ("0100", json!(64)),
            ("-0100", json!(-64)),
            ("0o100", json!(64)),
            ("0x10", json!(16)),
            ("1_0", json!(10)),
            ("0b11", json!(3)),
            ("1:10", json!("1:10")),
            ("'5'", json!("5")),
            ("~", json!(null)),
            ("", json!(null)),
            ("2001-01-01", json!("2001-01-01")),
        ] {
            let tree = parse(format!("a: {text}\n").as_bytes()).unwrap();
            assert_eq!(tree.value, json!({ "a": value }), "{text}");
        }
    }

    #[test]
    fn duplicates_and_documents() {
        let tree = parse(b"a: 1\nb: {c: 1, c: 2}\na: 3\n---\nx: 1\n").unwrap();
        assert_eq!(tree.value, json!({"a": 3, "b": {"c": 2}}));
        assert_eq!(tree.duplicates, ["b.c", "a"]);
        assert_eq!(tree.documents, 2);
        let tree = parse(br#" {"a": 1, "a": 2}"#).unwrap();
        assert_eq!(tree.value, json!({"a": 2}));
        assert_eq!(tree.duplicates, ["a"]);
    }

    #[test]
    fn anchors_bom_and_errors() {
        let tree = parse("\u{feff}x: &a {b: 1}\ny: {<<: *a, c: 2}\n".as_bytes()).unwrap();
        assert_eq!(tree.value, json!({"x": {"b": 1}, "y": {"b": 1, "c": 2}}));
        assert!(parse(b"a: [").unwrap_err().starts_with("yaml: "));
        assert!(parse(b"a:\n\t- b\n").is_err());
        assert!(parse(br#"{"a": 1,}"#).unwrap_err().starts_with("json: "));
        assert!(parse(b"a: \xff\xfe").is_err());
    }

    #[test]
    fn merge() {
        let mut base = json!({"a": {"b": 1, "c": 2}, "l": [1, 2], "n": 1});
        merge_patch(&mut base, &json!({"a": {"b": 3, "d": 4}, "l": [9], "n": null}));
        assert_eq!(base, json!({"a": {"b": 3, "c": 2, "d": 4}, "l": [9]}));
    }
}
