//! YAML documents, read as Kubernetes reads them: YAML 1.1 scalars, the first document only, the last of equal keys wins.
//!
//! The parser gives events; which type a plain scalar has is decided here, because the answer (`yes`, `0644`, `1_000`, `1e3`, `012`)
//! differs between YAML versions and libraries and ends up in running containers.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, Tag};

use crate::node::{Node, unique};

/// What aliases may add to a document, in bytes, roughly. Larger documents grow by expansion, not by what was written.
const MAX_ALIAS_BYTES: usize = 16 << 20;
/// Cost of a node besides its text.
const NODE_BYTES: usize = 48;
/// Deepest nesting, aliases expanded; well below what the call stack takes.
const MAX_DEPTH: usize = 128;

/// Reads the first document of a YAML stream.
pub(crate) fn parse(text: &str) -> Result<Node, String> {
    if let Some(c) = text.chars().find(|c| !readable(*c)) {
        return Err(format!("control characters are not allowed ({c:?})"));
    }
    let mut options = granit_parser::options! {
        block_scalar_eof_without_line_feed: true,
        bom_inside_document_as_content: true,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    options.set_emit_comments(false);
    let mut events = Parser::new_from_str_with_options(text, options);
    let mut loader = Loader { anchors: HashMap::new(), budget: MAX_ALIAS_BYTES };
    loop {
        match next(&mut events)? {
            Event::StreamEnd => return Ok(Node::Null),
            Event::StreamStart | Event::DocumentStart(..) => {}
            event => {
                let root = loader.node(event, &mut events)?.node;
                // Whatever follows within the document is an error; later documents are not looked at.
                next(&mut events)?;
                return Ok(root);
            }
        }
    }
}

/// Characters that a YAML stream may hold.
fn readable(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='~' | '\u{85}' | '\u{a0}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

fn next<'i>(events: Events<'_, 'i>) -> Result<Event<'i>, String> {
    match events.next() {
        Some(Ok((event, _))) => Ok(event),
        Some(Err(e)) => Err(e.to_string()),
        None => Ok(Event::StreamEnd),
    }
}

/// A finished node.
#[derive(Clone)]
struct Loaded {
    node: Node,
    /// What it takes, roughly, aliases expanded.
    bytes: usize,
    depth: usize,
}

impl Loaded {
    fn leaf(node: Node, text: &str) -> Self {
        Self { node, bytes: NODE_BYTES + text.len(), depth: 1 }
    }
}

type Events<'a, 'i> = &'a mut dyn Iterator<Item = Result<(Event<'i>, granit_parser::Span), granit_parser::ScanError>>;

struct Loader {
    /// Finished anchored nodes. One that is still open is not here, so a node cannot contain itself.
    anchors: HashMap<usize, Loaded>,
    budget: usize,
}

impl Loader {
    fn node<'i>(&mut self, event: Event<'i>, events: Events<'_, 'i>) -> Result<Loaded, String> {
        let (anchor, loaded) = match event {
            Event::Alias(id) => return self.alias(id),
            Event::Scalar(text, style, anchor, tag) => {
                (anchor, Loaded::leaf(scalar(&text, style, tag.as_deref())?, &text))
            }
            Event::SequenceStart(_, anchor, _) => (anchor, self.sequence(events)?),
            Event::MappingStart(_, anchor, _) => (anchor, self.mapping(events)?),
            event => return Err(format!("did not find expected node content ({event:?})")),
        };
        if loaded.depth > MAX_DEPTH {
            return Err("exceeded max depth".into());
        }
        if anchor != 0 {
            self.anchors.insert(anchor, loaded.clone());
        }
        Ok(loaded)
    }

    fn alias(&mut self, id: usize) -> Result<Loaded, String> {
        let loaded = self.anchors.get(&id).ok_or("anchor value contains itself")?;
        self.budget = self.budget.checked_sub(loaded.bytes).ok_or("document contains excessive aliasing")?;
        Ok(loaded.clone())
    }

    fn sequence<'i>(&mut self, events: Events<'_, 'i>) -> Result<Loaded, String> {
        let (mut items, mut bytes, mut depth) = (Vec::new(), NODE_BYTES, 1);
        loop {
            let event = match next(events)? {
                Event::SequenceEnd => return Ok(Loaded { node: Node::Array(items), bytes, depth }),
                event => event,
            };
            let item = self.node(event, events)?;
            bytes += item.bytes;
            depth = depth.max(item.depth + 1);
            items.push(item.node);
        }
    }

    fn mapping<'i>(&mut self, events: Events<'_, 'i>) -> Result<Loaded, String> {
        let (mut entries, mut bytes, mut depth) = (Vec::new(), NODE_BYTES, 1);
        loop {
            let event = match next(events)? {
                Event::MappingEnd => break,
                event => event,
            };
            let merge = is_merge(&event);
            let key = self.node(event, events)?;
            let value = next(events)?;
            let value = self.node(value, events)?;
            bytes += key.bytes + value.bytes;
            depth = depth.max(value.depth + 1);
            if merge {
                merge_into(&mut entries, value.node)?;
            } else {
                entries.push((key_text(key.node)?, value.node));
            }
        }
        let mut entries = unique(entries);
        // Kubernetes turns YAML into JSON with sorted keys; which of several errors is reported first follows from that.
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Loaded { node: Node::Object(entries), bytes, depth })
    }
}

fn is_merge(event: &Event<'_>) -> bool {
    let Event::Scalar(text, style, _, tag) = event else { return false };
    text == "<<"
        && match tag.as_deref() {
            None => matches!(style, ScalarStyle::Plain),
            Some(tag) => yaml_tag(tag) == Some("merge"),
        }
}

/// `<<` takes the keys of one mapping or of several; what comes later in the document wins, whichever it is.
fn merge_into(entries: &mut Vec<(String, Node)>, value: Node) -> Result<(), String> {
    match value {
        Node::Object(more) => entries.extend(more),
        Node::Array(items) => {
            // The first of several has the last word.
            for item in items.into_iter().rev() {
                match item {
                    Node::Object(more) => entries.extend(more),
                    _ => return Err("map merge requires map or sequence of maps as the value".into()),
                }
            }
        }
        _ => return Err("map merge requires map or sequence of maps as the value".into()),
    }
    Ok(())
}

fn key_text(key: Node) -> Result<String, String> {
    match key {
        Node::String(s) => Ok(s),
        Node::Number(n) => Ok(n),
        Node::Bool(b) => Ok(b.to_string()),
        other => Err(format!("unsupported map key of type: {}", other.kind())),
    }
}

/// The name behind `!!`, for tags of the YAML namespace.
fn yaml_tag(tag: &Tag) -> Option<&str> {
    (tag.handle() == "tag:yaml.org,2002:").then(|| tag.suffix())
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Node, String> {
    let plain = matches!(style, ScalarStyle::Plain);
    let Some(tag) = tag else {
        return if plain { resolve(text) } else { Ok(Node::String(text.into())) };
    };
    let wanted = match yaml_tag(tag) {
        Some(name @ ("bool" | "int" | "float" | "null" | "timestamp")) => name,
        // Own tags do not change a value.
        _ => return Ok(Node::String(text.into())),
    };
    let node = resolve(text)?;
    let fits = match (&node, wanted) {
        (Node::Bool(_), "bool") | (Node::Null, "null") | (Node::Number(_), "float") => true,
        (Node::Number(n), "int") => !n.contains(['.', 'e']),
        (Node::String(_), "timestamp") => true,
        _ => false,
    };
    if fits { Ok(node) } else { Err(format!("cannot decode !!{} `{text}` as a !!{wanted}", node.kind())) }
}

/// The value of a plain scalar by YAML 1.1 as Kubernetes' parser has it.
fn resolve(text: &str) -> Result<Node, String> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Ok(Node::Null),
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return Ok(Node::Bool(true));
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return Ok(Node::Bool(false));
        }
        ".nan" | ".NaN" | ".NAN" | ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf"
        | "-.INF" => {
            return Err(format!("json: unsupported value: {text}"));
        }
        _ => {}
    }
    let string = || Ok(Node::String(text.into()));
    match text.as_bytes()[0] {
        b'.' => match go_float(text) {
            Some(f) => Ok(Node::Number(json_float(f)?)),
            None => string(),
        },
        b'0'..=b'9' | b'+' | b'-' if !is_timestamp(text) => {
            let digits = text.replace('_', "");
            if let Some(n) = integer(&digits) {
                return Ok(Node::Number(n));
            }
            match go_float(&digits).filter(|_| float_shape(&digits)) {
                Some(f) => Ok(Node::Number(json_float(f)?)),
                None => string(),
            }
        }
        _ => string(),
    }
}

/// An integer of 64 bits, signed or unsigned, in base 10, `0x`, `0o`, `0b` or, with a leading zero, 8.
fn integer(text: &str) -> Option<String> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match digits.get(..2).map(str::to_ascii_lowercase).as_deref() {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        _ if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    let value = i128::from(u64::from_str_radix(digits, radix).ok()?);
    let value = if negative { -value } else { value };
    // An unsigned number carries no sign.
    let signed = text.starts_with(['+', '-']);
    (value >= i128::from(i64::MIN) && (value <= i128::from(i64::MAX) || !signed)).then(|| value.to_string())
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn float_shape(text: &str) -> bool {
    let s = text.strip_prefix(['+', '-']).unwrap_or(text);
    let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
    let whole = digits(s);
    let mut rest = &s[whole..];
    if let Some(fraction) = rest.strip_prefix('.') {
        let n = digits(fraction);
        if whole == 0 && n == 0 {
            return false;
        }
        rest = &fraction[n..];
    } else if whole == 0 {
        return false;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        return !exponent.is_empty() && exponent.bytes().all(|b| b.is_ascii_digit());
    }
    rest.is_empty()
}

/// A finite number; None for text that is not one or is out of range.
fn go_float(text: &str) -> Option<f64> {
    text.parse::<f64>().ok().filter(|f| f.is_finite() && float_shape(text))
}

/// A float as Go's JSON encoder writes it: shortest digits, exponent form below 10⁻⁶ and from 10²¹.
fn json_float(f: f64) -> Result<String, String> {
    if !f.is_finite() {
        return Err(format!("json: unsupported value: {f}"));
    }
    let size = f.abs();
    if size != 0.0 && !(1e-6..1e21).contains(&size) {
        let text = format!("{f:e}");
        // Go writes the sign of the exponent always, and two digits only above.
        return Ok(match text.split_once('e') {
            Some((m, e)) if !e.starts_with('-') => format!("{m}e+{e}"),
            _ => text,
        });
    }
    Ok(format!("{f}"))
}

/// `2001-1-2`, with or without a time: a timestamp stays a string.
fn is_timestamp(text: &str) -> bool {
    text.len() > 5 && text.as_bytes()[4] == b'-' && text[..4].bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars() {
        let n = |s: &str| Node::Number(s.into());
        let s = |s: &str| Node::String(s.into());
        let table = [
            ("yes", Node::Bool(true)),
            ("on", Node::Bool(true)),
            ("y", Node::Bool(true)),
            ("Off", Node::Bool(false)),
            ("~", Node::Null),
            ("0644", n("420")),
            ("0o644", n("420")),
            ("0x1F", n("31")),
            ("-0x1F", n("-31")),
            ("0b11", n("3")),
            ("08", n("8")),
            ("1_000", n("1000")),
            ("+5", n("5")),
            ("1e3", n("1000")),
            ("1.50", n("1.5")),
            ("1e-7", n("1e-7")),
            ("1e21", n("1e+21")),
            ("123456789012345678901", n("123456789012345680000")),
            ("18446744073709551615", n("18446744073709551615")),
            ("-9223372036854775808", n("-9223372036854775808")),
            (".5", n("0.5")),
            ("2001-01-02", s("2001-01-02")),
            ("1.2.3", s("1.2.3")),
            ("100m", s("100m")),
            ("1:30", s("1:30")),
            ("-", s("-")),
            ("+", s("+")),
            ("0", n("0")),
            ("-0", n("0")),
            ("0.0", n("0")),
            ("infinity", s("infinity")),
            ("1e400", s("1e400")),
        ];
        for (text, want) in table {
            assert_eq!(resolve(text), Ok(want), "{text}");
        }
        assert!(resolve(".nan").is_err());
    }

    #[test]
    fn merges_duplicates_and_documents() {
        let got =
            parse("base: &b {p: 1, q: 2}\nd: {<<: *b, q: 3}\nd2: {q: 3, <<: *b}\na: 1\na: 2\n---\nz: 1\n").unwrap();
        assert_eq!(got.get("a"), Some(&Node::Number("2".into())));
        assert_eq!(got.get("z"), None);
        assert_eq!(got.get("d").and_then(|d| d.get("q")), Some(&Node::Number("3".into())));
        assert_eq!(got.get("d2").and_then(|d| d.get("q")), Some(&Node::Number("2".into())));
    }

    #[test]
    fn bombs_are_refused() {
        let mut text = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
        for i in 1..12 {
            let p = i - 1;
            text += &format!("a{i}: &a{i} [*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p}]\n");
        }
        assert_eq!(parse(&text).unwrap_err(), "document contains excessive aliasing");
        assert!(parse(&"[".repeat(100_000)).is_err());
        assert!(parse(&"- ".repeat(100_000)).is_err());
        assert!(parse("a: &a [*a]").is_err());
        let deep: String = (1..5000).map(|i| format!("a{i}: &a{i} [*a{}]\n", i - 1)).collect();
        assert_eq!(parse(&format!("a0: &a0 x\n{deep}")).unwrap_err(), "exceeded max depth");
    }
}
