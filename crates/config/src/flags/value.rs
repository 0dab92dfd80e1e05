//! The text of a flag to a value, with the rules and messages of Go's `strconv`, `flag` and `pflag`.

use std::net::IpAddr;

use model::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::table::Kind;
use crate::duration::{self, quote};
use crate::labels;

/// What a flag takes when it stands alone; None: it needs a value.
pub(super) fn without_value(kind: Kind) -> Option<&'static str> {
    matches!(kind, Kind::Bool | Kind::GoBool | Kind::Version).then_some("true")
}

/// What Go reads as a truth value (`strconv.ParseBool`).
///
/// # Errors
/// Go's words: it is none.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("strconv.ParseBool: parsing {}: invalid syntax", quote(text))),
    }
}

/// `strconv.ParseInt(text, 0, …)`: prefixes 0x, 0o, 0b and 0, underscores between digits.
fn go_int(text: &str, min: i64, max: i64) -> Result<i64, &'static str> {
    const SYNTAX: &str = "invalid syntax";
    let (negative, rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = rest.to_ascii_lowercase();
    let (radix, prefixed, digits) = if let Some(d) = lower.strip_prefix("0x") {
        (16, true, d)
    } else if let Some(d) = lower.strip_prefix("0o") {
        (8, true, d)
    } else if let Some(d) = lower.strip_prefix("0b") {
        (2, true, d)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (8, true, &lower[1..])
    } else {
        (10, false, lower.as_str())
    };
    let misplaced = digits.ends_with('_') || digits.contains("__") || (digits.starts_with('_') && !prefixed);
    let plain = digits.replace('_', "");
    if misplaced || plain.is_empty() || !plain.chars().all(|c| c.is_digit(radix)) {
        return Err(SYNTAX);
    }
    let range = || "value out of range";
    let magnitude = i128::from_str_radix(&plain, radix).map_err(|_| range())?;
    let value = if negative { -magnitude } else { magnitude };
    i64::try_from(value).ok().filter(|v| (min..=max).contains(v)).ok_or_else(range)
}

fn pflag_int(text: &str, min: i64, max: i64) -> Result<Value, String> {
    go_int(text, min, max).map(Value::from).map_err(|e| format!("strconv.ParseInt: parsing {}: {e}", quote(text)))
}

/// `strconv.ParseUint(text, 10, 31)`.
fn level(text: &str) -> Result<u32, String> {
    let fail = |e| format!("strconv.ParseUint: parsing {}: {e}", quote(text));
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(fail("invalid syntax"));
    }
    text.parse::<u32>().ok().filter(|v| *v <= 0x7fff_ffff).ok_or_else(|| fail("value out of range"))
}

/// One line of comma-separated values as Go's `encoding/csv` reads it.
fn csv(text: &str) -> Result<Vec<String>, String> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let fail = |at: usize, what: &str| Err(format!("parse error on line 1, column {at}: {what}"));
    let mut fields = Vec::new();
    let mut rest = text;
    loop {
        let start = text.len() - rest.len();
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut field = String::new();
            let mut tail = quoted;
            loop {
                let Some(end) = tail.find('"') else {
                    return fail(text.len() + 1, "extraneous or missing \" in quoted-field");
                };
                field.push_str(&tail[..end]);
                tail = &tail[end + 1..];
                match tail.strip_prefix('"') {
                    Some(more) => {
                        field.push('"');
                        tail = more;
                    }
                    None => break,
                }
            }
            fields.push(field);
            match tail.strip_prefix(',') {
                Some(more) => rest = more,
                None if tail.is_empty() => return Ok(fields),
                None => {
                    let at = text.len() - tail.len();
                    return fail(at, "extraneous or missing \" in quoted-field");
                }
            }
        } else {
            let end = rest.find(',').unwrap_or(rest.len());
            if let Some(bare) = rest[..end].find('"') {
                return fail(start + bare + 1, "bare \" in non-quoted-field");
            }
            fields.push(rest[..end].to_owned());
            match rest[end..].strip_prefix(',') {
                Some(more) => rest = more,
                None => return Ok(fields),
            }
        }
    }
}

fn pairs<'t>(text: &'t str, separator: char, what: &str) -> Result<Vec<(&'t str, &'t str)>, String> {
    text.split(',').filter(|part| !part.is_empty()).map(|part| pair(part, separator, what)).collect()
}

fn pair<'t>(part: &'t str, separator: char, what: &str) -> Result<(&'t str, &'t str), String> {
    let (key, value) = part.split_once(separator).ok_or_else(|| format!("malformed pair, expect {what}"))?;
    Ok((key.trim(), value.trim()))
}

fn taint(text: &str) -> Result<(String, Value), String> {
    let invalid = || format!("invalid taint spec: {text}");
    let (head, effect) = match text.split(':').collect::<Vec<_>>()[..] {
        [head] => (head, ""),
        [head, effect] => (head, effect),
        _ => return Err(invalid()),
    };
    if text.contains(':') && !labels::is_taint_effect(effect) {
        return Err(format!("invalid taint effect: {effect}, unsupported taint effect"));
    }
    let (key, value) = match head.split('=').collect::<Vec<_>>()[..] {
        _ if effect.is_empty() => (head, ""),
        [key] => (key, ""),
        [key, value] => (key, value),
        _ => return Err(invalid()),
    };
    let wrong = [labels::label_value(value), labels::qualified_name(key)];
    if let Some(errors) = wrong.iter().find(|errors| !errors.is_empty()) {
        return Err(format!("{}, {}", invalid(), errors.join("; ")));
    }
    if effect.is_empty() {
        return Err(invalid());
    }
    let value = json!({"key": key, "value": value, "effect": effect});
    Ok((format!("{effect} {key}"), value))
}

fn taints(text: &str) -> Result<Value, String> {
    let mut seen = Vec::new();
    let mut list = Vec::new();
    for part in text.split(',').filter(|_| !text.is_empty()) {
        // A trailing "-" removes a taint elsewhere; there is none to remove here.
        if part.ends_with('-') {
            continue;
        }
        let (identity, value) = taint(part)?;
        if seen.contains(&identity) {
            return Err(format!("duplicated taints with the same key and effect: {part}"));
        }
        seen.push(identity);
        list.push(value);
    }
    Ok(list.into())
}

fn reserved_memory(text: &str) -> Result<Vec<Value>, String> {
    text.split(';')
        .map(|reservation| {
            let format = || {
                format!("the reserved memory has incorrect format, expected numaNodeID:type=quantity[,type=quantity...], got {reservation}")
            };
            let [node, types] = reservation.split(':').collect::<Vec<_>>()[..] else {
                return Err(format());
            };
            let node: i32 = node.parse().map_err(|_| {
                format!("failed to convert the NUMA node ID, expected integer, got {node}")
            })?;
            let mut limits = Map::new();
            for part in types.split(',') {
                let [name, amount] = part.split('=').collect::<Vec<_>>()[..] else {
                    return Err(format!(
                        "the reserved limit has incorrect value, expected type=quantity, got {part}"
                    ));
                };
                if name != "memory" && !name.starts_with("hugepages-") {
                    let name = quote(name);
                    return Err(format!("memory type conversion error, unknown type: {name}"));
                }
                Quantity::parse(amount)
                    .map_err(|_| format!("failed to parse the quantity: {amount}"))?;
                limits.insert(name.to_owned(), amount.into());
            }
            Ok(json!({"numaNode": node, "limits": limits}))
        })
        .collect()
}

fn vmodule(text: &str) -> Result<Vec<Value>, String> {
    text.split(',')
        .filter(|part| !part.is_empty())
        .map(|part| match part.split('=').collect::<Vec<_>>()[..] {
            [pattern, verbosity] if !pattern.is_empty() && !verbosity.is_empty() => {
                let verbosity = level(verbosity).map_err(|e| format!("parsing verbosity in {}: {e}", quote(part)))?;
                Ok(json!({"filePattern": pattern, "verbosity": verbosity}))
            }
            _ => Err(format!("{} does not have the pattern=N format", quote(part))),
        })
        .collect()
}

fn version(text: &str) -> Result<Value, String> {
    if text == "raw" {
        return Ok("raw".into());
    }
    if let Some(number) = text.strip_prefix('v') {
        let core = number.split(['-', '+']).next().unwrap_or_default();
        let parts: Vec<_> = core.split('.').collect();
        if parts.len() == 3 && parts.iter().all(|p| p.parse::<u32>().is_ok()) {
            return Ok(text.into());
        }
        return Err(format!("could not parse {} as version", quote(text)));
    }
    parse_bool(text).map(|yes| if yes { "true".into() } else { Value::Null })
}

fn extended(old: Option<&Value>, new: Vec<Value>) -> Value {
    let mut list = old.and_then(Value::as_array).cloned().unwrap_or_default();
    list.extend(new);
    list.into()
}

fn merged(old: Option<&Value>, new: Vec<(&str, Value)>) -> Value {
    let mut map = old.and_then(Value::as_object).cloned().unwrap_or_default();
    map.extend(new.into_iter().map(|(k, v)| (k.to_owned(), v)));
    map.into()
}

fn strings<'t>(pairs: Vec<(&'t str, &'t str)>) -> Vec<(&'t str, Value)> {
    pairs.into_iter().map(|(k, v)| (k, v.into())).collect()
}

/// Parses one occurrence of a flag. `old` is what earlier occurrences gave; lists and maps add to it.
/// `Ok(None)`: the occurrence changes nothing.
pub(super) fn parse(kind: Kind, text: &str, old: Option<&Value>) -> Result<Option<Value>, String> {
    let value = match kind {
        Kind::Bool => parse_bool(text)?.into(),
        Kind::GoBool => parse_bool(text).map_err(|_| "parse error")?.into(),
        Kind::Int32 => pflag_int(text, i32::MIN.into(), i32::MAX.into())?,
        Kind::Int64 => pflag_int(text, i64::MIN, i64::MAX)?,
        Kind::GoInt => {
            go_int(text, i64::MIN, i64::MAX).map_err(|e| if e == "invalid syntax" { "parse error" } else { e })?.into()
        }
        Kind::Level => level(text)?.into(),
        Kind::Duration => {
            duration::parse_signed(text).map_err(|e| e.to_string())?;
            text.into()
        }
        Kind::GoDuration => {
            duration::parse_signed(text).map_err(|_| "parse error")?;
            text.into()
        }
        Kind::Text => text.into(),
        Kind::Ip => match text.parse::<IpAddr>() {
            _ if text.is_empty() => return Ok(None),
            Ok(_) => text.into(),
            Err(_) => return Err(format!("{} is not a valid IP address", quote(text))),
        },
        Kind::Quantity => {
            Quantity::parse(text).map_err(|e| e.to_string())?;
            text.into()
        }
        Kind::List => extended(old, csv(text)?.into_iter().map(Value::from).collect()),
        Kind::Map => merged(old, strings(pairs(text, '=', "string=string")?)),
        Kind::PairMap => merged(old, strings(vec![pair(text, '=', "string=string")?])),
        Kind::LessMap => merged(old, strings(pairs(text, '<', "string<string")?)),
        Kind::Labels => {
            let split = |part: &'_ str| -> (String, Value) {
                let (key, value) = part.split_once('=').unwrap_or((part, ""));
                (key.trim().to_owned(), value.trim().into())
            };
            let new: Vec<_> = text.split(',').filter(|p| !p.is_empty()).map(split).collect();
            merged(old, new.iter().map(|(k, v)| (k.as_str(), v.clone())).collect())
        }
        Kind::BoolMap => {
            let mut new = Vec::new();
            for (key, value) in pairs(text, '=', "string=bool")? {
                let on = parse_bool(value).map_err(|e| format!("invalid value of {key}: {value}, err: {e}"))?;
                new.push((key, on.into()));
            }
            merged(old, new)
        }
        Kind::Multimap => {
            let mut map = old.and_then(Value::as_object).cloned().unwrap_or_default();
            for (key, value) in pairs(text, ':', "string:string")? {
                let entry = extended(map.get(key), vec![value.into()]);
                map.insert(key.to_owned(), entry);
            }
            map.into()
        }
        Kind::Taints => taints(text)?,
        Kind::ReservedMemory if text.is_empty() => return Ok(None),
        Kind::ReservedMemory => extended(old, reserved_memory(text)?),
        Kind::Vmodule => extended(old, vmodule(text)?),
        Kind::Version => version(text)?,
    };
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_flags_add() {
        let first = parse(Kind::Map, "a=1,b=2", None).unwrap();
        let second = parse(Kind::Map, " a = 3,", first.as_ref()).unwrap();
        assert_eq!(second, Some(json!({"a": "3", "b": "2"})));
        let first = parse(Kind::List, "a,\"b,c\"", None).unwrap();
        assert_eq!(parse(Kind::List, "d", first.as_ref()).unwrap(), Some(json!(["a", "b,c", "d"])));
        assert_eq!(parse(Kind::List, "", None).unwrap(), Some(json!([])));
        let first = parse(Kind::Multimap, "a:1,a:2", None).unwrap();
        assert_eq!(
            parse(Kind::Multimap, "b:x:y,a:3", first.as_ref()).unwrap(),
            Some(json!({"a": ["1", "2", "3"], "b": ["x:y"]}))
        );
        assert_eq!(parse(Kind::PairMap, "a=b,c=d", None).unwrap(), Some(json!({"a": "b,c=d"})));
        assert_eq!(
            parse(Kind::LessMap, "memory.available<1Gi", None).unwrap(),
            Some(json!({"memory.available": "1Gi"}))
        );
        assert_eq!(parse(Kind::Labels, "a,b=c=d", None).unwrap(), Some(json!({"a": "", "b": "c=d"})));
    }

    #[test]
    fn numbers_as_go_reads_them() {
        for (text, value) in [("0x10", 16), ("010", 8), ("0b11", 3), ("1_000", 1000), ("-5", -5), ("+5", 5), ("0", 0)] {
            assert_eq!(parse(Kind::Int32, text, None).unwrap(), Some(json!(value)));
        }
        for text in ["", "1__0", "_1", "1_", "09", "0x", "1.0", "-"] {
            assert!(parse(Kind::Int32, text, None).is_err(), "{text}");
        }
        assert!(parse(Kind::Int32, "2147483648", None).is_err());
        assert!(parse(Kind::Level, "2147483648", None).is_err());
        assert!(parse(Kind::Level, "+1", None).is_err());
    }

    #[test]
    fn taints_and_reservations() {
        assert_eq!(
            parse(Kind::Taints, "a=b:NoSchedule,c:NoExecute", None).unwrap(),
            Some(json!([
                {"key": "a", "value": "b", "effect": "NoSchedule"},
                {"key": "c", "value": "", "effect": "NoExecute"},
            ]))
        );
        assert_eq!(
            parse(Kind::Taints, "a:NoSchedule,a=x:NoSchedule", None).unwrap_err(),
            "duplicated taints with the same key and effect: a=x:NoSchedule"
        );
        assert_eq!(
            parse(Kind::ReservedMemory, "0:memory=1Gi,hugepages-2Mi=4Mi;1:memory=2Gi", None).unwrap(),
            Some(json!([
                {"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "4Mi"}},
                {"numaNode": 1, "limits": {"memory": "2Gi"}},
            ]))
        );
    }
}
