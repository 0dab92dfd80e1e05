//! Field paths and errors in the API server's form.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use crate::hash::go_json_string;
use crate::schema::{Json as Name, Kind, SCHEMA, Type};

/// The path of a field, as `spec.containers[0].ports`.
#[derive(Clone, Debug)]
pub(crate) struct Path(String);

impl Path {
    pub(crate) fn new(root: &str) -> Self {
        Self(root.into())
    }

    /// A field of this struct.
    pub(crate) fn child(&self, name: &str) -> Self {
        if self.0.is_empty() { Self(name.into()) } else { Self(format!("{}.{name}", self.0)) }
    }

    /// An element of this list.
    pub(crate) fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    /// An entry of this map.
    pub(crate) fn key(&self, key: &str) -> Self {
        Self(format!("{}[{key}]", self.0))
    }
}

/// One broken rule: the field, what kind of fault, the value and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    field: String,
    body: String,
}

impl FieldError {
    /// The field's path.
    pub fn field(&self) -> &str {
        &self.field
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.body)
    }
}

/// A value as an error shows it.
pub(crate) trait Shown {
    fn shown(&self) -> String;
}

impl Shown for &str {
    fn shown(&self) -> String {
        go_quote(self)
    }
}

impl Shown for &String {
    fn shown(&self) -> String {
        go_quote(self)
    }
}

impl Shown for i32 {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for i64 {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for bool {
    fn shown(&self) -> String {
        self.to_string()
    }
}

/// Anything else, as JSON.
pub(crate) struct Json<'a, T>(pub(crate) &'a T);

impl<T: Serialize> Shown for Json<'_, T> {
    fn shown(&self) -> String {
        serde_json::to_string(self.0).unwrap_or_default()
    }
}

/// A struct of the internal API, whose fields have their Go names and are all there.
pub(crate) struct Internal<'a, T>(pub(crate) &'static str, pub(crate) &'a T);

impl<T: Serialize> Shown for Internal<'_, T> {
    fn shown(&self) -> String {
        let value = serde_json::to_value(self.1).unwrap_or_default();
        internal(&Type { name: self.0, kind: Kind::Struct }, Some(&value))
    }
}

fn internal(ty: &Type, value: Option<&Value>) -> String {
    match (&ty.kind, value) {
        (Kind::Pointer(of), Some(value)) => internal(of, Some(value)),
        (Kind::List(of), Some(Value::Array(items))) => {
            format!("[{}]", items.iter().map(|i| internal(of, Some(i))).collect::<Vec<_>>().join(","))
        }
        (Kind::Struct, value) => {
            let fields = SCHEMA.fields(ty.name).iter().map(|f| {
                let value = match &f.json {
                    Name::Name(name) => value.and_then(|v| v.get(name)),
                    _ => value,
                };
                format!("\"{}\":{}", f.go, internal(&f.ty, value))
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        (Kind::String, None) => "\"\"".into(),
        (Kind::Bool, None) => "false".into(),
        (Kind::Int32 | Kind::Int64, None) => "0".into(),
        (_, Some(Value::String(s))) => go_json_string(s),
        (_, Some(value)) => value.to_string(),
        (_, None) => "null".into(),
    }
}

/// A string in Go's quotes.
pub(crate) fn go_quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c if c.is_control() || (c.is_whitespace() && c != ' ') => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The errors found so far.
#[derive(Default)]
pub(crate) struct Errors(pub(crate) Vec<FieldError>);

impl Errors {
    fn push(&mut self, path: &Path, kind: &str, value: Option<String>, detail: &str) {
        let mut body = kind.to_string();
        for part in [value.as_deref().unwrap_or(""), detail] {
            if !part.is_empty() {
                body.push_str(": ");
                body.push_str(part);
            }
        }
        self.0.push(FieldError { field: path.0.clone(), body });
    }

    pub(crate) fn required(&mut self, path: &Path, detail: &str) {
        self.push(path, "Required value", None, detail);
    }

    pub(crate) fn forbidden(&mut self, path: &Path, detail: &str) {
        self.push(path, "Forbidden", None, detail);
    }

    pub(crate) fn invalid(&mut self, path: &Path, value: impl Shown, detail: &str) {
        self.push(path, "Invalid value", Some(value.shown()), detail);
    }

    /// One [`Errors::invalid`] for each message.
    pub(crate) fn invalid_each(&mut self, path: &Path, value: &str, messages: Vec<String>) {
        for message in messages {
            self.invalid(path, value, &message);
        }
    }

    pub(crate) fn duplicate(&mut self, path: &Path, value: impl Shown) {
        self.push(path, "Duplicate value", Some(value.shown()), "");
    }

    pub(crate) fn not_found(&mut self, path: &Path, value: &str, detail: &str) {
        self.push(path, "Not found", Some(value.shown()), detail);
    }

    pub(crate) fn not_supported(&mut self, path: &Path, value: &str, supported: &[&str]) {
        let list: Vec<String> = supported.iter().map(|s| go_quote(s)).collect();
        self.push(
            path,
            "Unsupported value",
            Some(go_json_string(value)),
            &format!("supported values: {}", list.join(", ")),
        );
    }

    pub(crate) fn too_long(&mut self, path: &Path, max_bytes: usize) {
        self.push(path, "Too long", None, &format!("may not be more than {max_bytes} bytes"));
    }

    pub(crate) fn too_many(&mut self, path: &Path, found: usize, max: usize) {
        self.push(path, "Too many", Some(found.to_string()), &format!("must have at most {max} items"));
    }

    /// `value` must be one of these.
    pub(crate) fn one_of(&mut self, path: &Path, value: &str, supported: &[&str]) {
        if !supported.contains(&value) {
            self.not_supported(path, value, supported);
        }
    }

    /// As [`Errors::one_of`], with its own error for an empty text.
    pub(crate) fn required_one_of(&mut self, path: &Path, value: &str, supported: &[&str]) {
        if value.is_empty() {
            self.required(path, "");
        } else {
            self.one_of(path, value, supported);
        }
    }

    /// `value` must not be empty.
    pub(crate) fn non_empty(&mut self, path: &Path, value: &str) {
        if value.is_empty() {
            self.required(path, "");
        }
    }

    pub(crate) fn non_negative(&mut self, path: &Path, value: i64) {
        if value < 0 {
            self.invalid(path, value, "must be greater than or equal to 0");
        }
    }
}
