//! The configuration reference of the documentation (docs/configuration.md), made from the code: `RUBELET_WRITE_DOCS=1 cargo test --package config
//! reference` writes it anew, and the test says when it is no longer true.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use crate::field::Field as _;
use crate::gates::{Gate, Gates, Stage};
use crate::support;
use crate::types::KubeletConfiguration;

const HEAD: &str = "# Configuration reference

`rubelet --config FILE` takes a `KubeletConfiguration` (`kubelet.config.k8s.io/v1beta1`), and drop-ins over it from `--config-dir`; flags come last.
Values are checked as Kubernetes 1.36 checks them, and everything that is wrong is named at once. `/configz` shows what is in effect. What has no
effect yet says so here, and in a warning at start when it is set.

";

/// A field of one of the structs, as the source tells of it.
struct Row {
    /// In the code.
    own: String,
    name: String,
    kind: String,
    text: String,
}

/// The structs of a source file: name, what they are for, fields.
fn structs(source: &str) -> Vec<(String, String, Vec<Row>)> {
    let mut all = Vec::new();
    for block in source.split("config_struct! {").skip(1) {
        let block = block.split("\n}\n").next().unwrap();
        let (mut docs, mut pending) = (String::new(), String::new());
        let mut current: Option<(String, String, Vec<Row>)> = None;
        for line in block.lines().map(str::trim) {
            if let Some(doc) = line.strip_prefix("///") {
                docs += doc;
            } else if let Some(rest) = line.strip_prefix("pub struct ") {
                current = Some((rest.trim_end_matches(" {").to_owned(), std::mem::take(&mut docs), Vec::new()));
            } else if !line.is_empty() && line != "}" && !line.starts_with('#') {
                pending += line;
                pending.push(' ');
                if !line.ends_with(';') {
                    continue;
                }
                let declared = std::mem::take(&mut pending);
                let (own, after) = declared.split_once(": ").unwrap();
                let (kind, after) = after.split_once(" =").unwrap();
                let name = after.split('"').nth(1).unwrap();
                let text = std::mem::take(&mut docs).trim().to_owned();
                current.as_mut().unwrap().2.push(Row {
                    own: own.to_owned(),
                    name: name.to_owned(),
                    kind: kind.trim().to_owned(),
                    text,
                });
            }
        }
        all.extend(current);
    }
    all
}

/// The values that enums of the configuration can have, by the enum's name.
fn choices(source: &str) -> BTreeMap<String, Vec<String>> {
    let blocks = source.split("choice! {").skip(1).map(|b| b.split("default ").next().unwrap());
    let name = |b: &str| b.split("pub enum ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let values = |b: &str| {
        let declared = b.lines().map(str::trim).filter(|l| !l.starts_with("//") && l.contains(" = \""));
        declared.filter_map(|l| l.split('"').nth(1)).map(str::to_owned).collect()
    };
    blocks.map(|b| (name(b), values(b))).collect()
}

/// The type in words of the configuration.
fn kind(of: &str, choices: &BTreeMap<String, Vec<String>>) -> String {
    let inner = of.strip_prefix("Option<").and_then(|o| o.strip_suffix('>')).unwrap_or(of);
    match inner {
        "bool" => "true or false".into(),
        "i32" | "i64" | "u32" | "u64" | "u8" => "number".into(),
        "f64" => "fraction".into(),
        "String" => "text".into(),
        "Duration" | "SignedDuration" => "duration".into(),
        "Vec<String>" => "list of text".into(),
        "Vec<i32>" => "list of numbers".into(),
        map if map.starts_with("BTreeMap") => "map".into(),
        list if list.starts_with("Vec<") => format!("list of {}", kind(&list[4..list.len() - 1], choices)),
        "Taint" => "taint".into(),
        other => match choices.get(other) {
            Some(values) => values.iter().map(|v| format!("`{v}`")).collect::<Vec<_>>().join(", "),
            None => format!("[{other}](#{})", other.to_lowercase()),
        },
    }
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::Object(map)) if map.is_empty() => String::new(),
        Some(Value::Object(_)) => "see there".into(),
        Some(Value::String(text)) if text.is_empty() => String::new(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(other) => format!("`{other}`"),
    }
}

fn effect(path: &str) -> String {
    let row = support::FIELDS.iter().find(|(field, ..)| *field == path);
    row.map(|(_, _, why)| format!(" **No effect yet**: {why}.")).unwrap_or_default()
}

fn text() -> String {
    let mut out = HEAD.to_owned();
    let eviction_hard = crate::DEFAULT_EVICTION_HARD.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let config = KubeletConfiguration { eviction_hard, ..KubeletConfiguration::default() };
    let defaults = config.write();
    let all: Vec<_> = [include_str!("types.rs"), include_str!("nested.rs")].into_iter().flat_map(structs).collect();
    let choices = choices(include_str!("nested.rs"));
    let own: BTreeMap<String, String> =
        all.iter().flat_map(|(.., rows)| rows).map(|r| (format!("`{}`", r.own), format!("`{}`", r.name))).collect();
    // Where each nested struct stands, for its defaults.
    let place = |name: &str| {
        let paths = all.iter().flat_map(|(of, _, rows)| rows.iter().map(move |row| (of, row)));
        let found = paths.into_iter().find(|(_, row)| row.kind.contains(name));
        found.map(|(of, row)| (of.clone(), row.name.clone()))
    };
    let path_of = |name: &str| {
        let (mut path, mut name) = (Vec::new(), name.to_owned());
        while let Some((above, field)) = place(&name) {
            path.insert(0, field);
            name = above;
        }
        path
    };
    for (name, about, rows) in &all {
        let path = path_of(name);
        writeln!(out, "## {name}\n\n{}", about.trim()).unwrap();
        if !path.is_empty() {
            writeln!(out, "In `{}`.", path.join(".")).unwrap();
        }
        out += "\n| field | type | default | |\n|---|---|---|---|\n";
        let here = path.iter().try_fold(&defaults, |v, key| v.get(key.as_str()));
        for row in rows {
            let full: Vec<&str> = path.iter().map(String::as_str).chain([row.name.as_str()]).collect();
            let value = shown(here.and_then(|v| v.get(&row.name)));
            let links = row.text.replace("[`", "`").replace("`]", "`");
            let links =
                own.iter().filter(|(code, _)| code.contains('_')).fold(links, |t, (code, name)| t.replace(code, name));
            writeln!(
                out,
                "| `{}` | {} | {value} | {links}{} |",
                row.name,
                kind(&row.kind, &choices),
                effect(&full.join("."))
            )
            .unwrap();
        }
        out.push('\n');
    }
    out += "## Feature gates\n\nThese change what rubelet does. The kubelet's others are known, and named in a warning when they stand elsewhere than their default.\n\n";
    out += "| gate | stage | default |\n|---|---|---|\n";
    let standard = Gates::default();
    for &gate in support::HONOURED_GATES {
        let stage = match Gates::stages()[gate.name()] {
            Stage::Alpha => "alpha",
            Stage::Beta => "beta",
            Stage::Ga => "GA",
            Stage::Deprecated => "deprecated",
        };
        writeln!(out, "| `{}` | {stage} | {} |", gate.name(), if standard.enabled(gate) { "on" } else { "off" })
            .unwrap();
    }
    out += "\nFlags: `rubelet --help`, or the manual page.\n";
    out
}

#[test]
fn the_reference_is_true() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let made = text();
    if std::env::var_os("RUBELET_WRITE_DOCS").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let first = written.lines().zip(made.lines()).find(|(a, b)| a != b);
    assert!(
        written == made,
        "docs/configuration.md is out of date; RUBELET_WRITE_DOCS=1 writes it anew; first: {first:?}"
    );
    // Every field is there.
    let Value::Object(fields) = KubeletConfiguration::default().write() else { panic!("no map") };
    for field in fields.keys() {
        assert!(made.contains(&format!("\n| `{field}` |")), "{field}");
    }
    assert_eq!(Gate::ALL.len(), Gate::ALL.iter().filter(|g| Gates::stages().contains_key(g.name())).count());
}
