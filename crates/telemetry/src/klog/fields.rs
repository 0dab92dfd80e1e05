//! Fields of events and spans, and how they are written in text and JSON.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};

/// A field's value, kept until the line is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Quoted in text.
    Text(String),
    /// A list or a map as JSON; stands as it is in both forms.
    Json(String),
    /// A number; stands as it is in both forms.
    Number(String),
    /// A boolean.
    Bool(bool),
}

/// Collects the fields of one event or span; the message and the verbosity apart.
#[derive(Debug, Default)]
pub(super) struct Fields {
    /// `message`.
    pub(super) message: String,
    /// `v`, when given.
    pub(super) v: Option<i64>,
    /// The others in order; of two with one name the later counts, at the later's place, as in klog.
    pub(super) pairs: Vec<(&'static str, Value)>,
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        let name = field.name();
        match (name, value) {
            ("message", Value::Text(text) | Value::Json(text) | Value::Number(text)) => self.message = text,
            ("v", Value::Number(text)) => self.v = text.parse().ok(),
            (_, value) => self.add(name.strip_prefix("r#").unwrap_or(name), value),
        }
    }

    /// Adds a pair by klog's rule for repeated names: the same value again is dropped, another value replaces the old.
    pub(super) fn add(&mut self, name: &'static str, value: Value) {
        if let Some(at) = self.pairs.iter().position(|(held, _)| *held == name) {
            if self.pairs[at].1 == value {
                return;
            }
            self.pairs.remove(at);
        }
        self.pairs.push((name, value));
    }

    /// Takes `err` out of its place: errors show it first in text, last in JSON.
    pub(super) fn take_err(&mut self) -> Option<Value> {
        let at = self.pairs.iter().position(|(name, _)| *name == "err")?;
        Some(self.pairs.remove(at).1)
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        // `?list`, `?map` and `?"text"` print what is JSON already; all else is one text.
        let parsed = match text.as_bytes().first() {
            Some(b'[' | b'{' | b'"') if field.name() != "message" => serde_json::from_str(&text).ok(),
            _ => None,
        };
        let value = match parsed {
            Some(serde_json::Value::String(inner)) => Value::Text(inner),
            Some(json) => Value::Json(json.to_string()),
            None => Value::Text(text),
        };
        self.set(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, Value::Text(value.to_owned()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, Value::Number(value.to_string()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, Value::Number(value.to_string()));
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.set(field, Value::Number(value.to_string()));
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.set(field, Value::Number(value.to_string()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(
            field,
            if value.is_finite() { Value::Number(value.to_string()) } else { Value::Text(value.to_string()) },
        );
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, Value::Bool(value));
    }

    /// An error with its chain of sources, joined by `: `.
    fn record_error(&mut self, field: &Field, error: &(dyn std::error::Error + 'static)) {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let _ = write!(text, ": {cause}");
            source = cause.source();
        }
        self.set(field, Value::Text(text));
    }
}

/// Appends ` key=value` as klog does.
pub(super) fn write_text_pair(line: &mut String, name: &str, value: &Value) {
    line.push(' ');
    line.push_str(name);
    line.push('=');
    match value {
        // Text of several lines stands indented between `<` and ` >`.
        Value::Text(text) if text.contains('\n') => {
            line.push_str("<\n");
            for part in text.strip_suffix('\n').unwrap_or(text).split('\n') {
                line.push('\t');
                line.push_str(part);
                line.push('\n');
            }
            line.push_str(" >");
        }
        Value::Text(text) => write_quoted(line, text),
        Value::Json(text) | Value::Number(text) => line.push_str(text),
        Value::Bool(value) => line.push_str(if *value { "true" } else { "false" }),
    }
}

/// Appends `,"key":value`.
pub(super) fn write_json_pair(line: &mut String, name: &str, value: &Value) {
    line.push(',');
    write_json_string(line, name);
    line.push(':');
    match value {
        Value::Text(text) => write_json_string(line, text),
        Value::Json(text) | Value::Number(text) => line.push_str(text),
        Value::Bool(value) => line.push_str(if *value { "true" } else { "false" }),
    }
}

/// Appends a string as JSON.
pub(super) fn write_json_string(line: &mut String, text: &str) {
    // Serialising a str cannot fail.
    line.push_str(&serde_json::to_string(text).unwrap_or_default());
}

/// Appends a string in Go's quoted form: what cannot be printed is escaped, and nothing in it can break the line.
pub(super) fn write_quoted(line: &mut String, text: &str) {
    line.push('"');
    for c in text.chars() {
        match c {
            '"' => line.push_str("\\\""),
            '\\' => line.push_str("\\\\"),
            '\n' => line.push_str("\\n"),
            '\r' => line.push_str("\\r"),
            '\t' => line.push_str("\\t"),
            '\x07' => line.push_str("\\a"),
            '\x08' => line.push_str("\\b"),
            '\x0b' => line.push_str("\\v"),
            '\x0c' => line.push_str("\\f"),
            ' '..='~' => line.push(c),
            '\0'..='\x7f' => {
                let _ = write!(line, "\\x{:02x}", u32::from(c));
            }
            _ if printable(c) => line.push(c),
            _ if u32::from(c) < 0x10000 => {
                let _ = write!(line, "\\u{:04x}", u32::from(c));
            }
            _ => {
                let _ = write!(line, "\\U{:08x}", u32::from(c));
            }
        }
    }
    line.push('"');
}

/// Whether a character beyond ASCII is printed as it is. The standard library's escaping knows the tables; behind another
/// character it leaves combining marks alone, as Go does.
fn printable(c: char) -> bool {
    let mut buffer = [0; 5];
    buffer[0] = b'x';
    let length = c.encode_utf8(&mut buffer[1..]).len();
    std::str::from_utf8(&buffer[..=length]).is_ok_and(|text| text.escape_debug().count() == 2)
}
