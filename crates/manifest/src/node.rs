//! A document as a tree, before anything is known about its types.
//!
//! Numbers keep their text: a quantity written as a bare number is read from that text, and the static pod UID depends on it.

/// One value of a YAML or JSON document.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    /// A JSON number as text.
    Number(String),
    String(String),
    Array(Vec<Node>),
    /// Keys are unique.
    Object(Vec<(String, Node)>),
}

impl Node {
    /// What JSON calls this kind of value.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "bool",
            Self::Number(_) => "number",
            Self::String(_) => "string",
            Self::Array(_) => "array",
            Self::Object(_) => "object",
        }
    }

    /// The value of a key of an object.
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        match self {
            Self::Object(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }
}

/// Makes keys unique, the last one winning, in the place where the key was first seen.
pub(crate) fn unique(entries: Vec<(String, Node)>) -> Vec<(String, Node)> {
    let mut seen = std::collections::HashMap::with_capacity(entries.len());
    let mut out: Vec<(String, Node)> = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        match seen.get(&key) {
            Some(&at) => {
                let slot: &mut (String, Node) = &mut out[at];
                slot.1 = value;
            }
            None => {
                seen.insert(key.clone(), out.len());
                out.push((key, value));
            }
        }
    }
    out
}
