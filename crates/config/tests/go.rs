//! The kubelet's own messages, recorded with `fixtures/record.py` on a host with cgroup v1, against ours.

// Helpers outside of test functions may panic too: that fails the test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::BTreeSet;

use common::{Memory, load_with};
use config::{Loaded, parse_flags};
use model::report::Severity;

/// The text of `err=` in a klog line, unquoted; or of a panic.
fn go_error(output: &str) -> String {
    if let Some((_, text)) = output.rsplit_once("\"command failed\" err=") {
        if let Some(lines) = text.strip_prefix("<\n") {
            let lines = lines.split("\n >").next().unwrap();
            return lines.replace("\n\t", "\n").trim_start().to_owned();
        }
        let quoted = text.trim_end().trim_start_matches('"');
        let quoted = quoted.strip_suffix('"').unwrap();
        return quoted.replace("\\\"", "\"").replace("\\\\", "\\");
    }
    let (_, panic) = output.split_once("panic: ").expect(output);
    panic.trim_end().to_owned()
}

#[test]
fn flags() {
    let text = include_str!("fixtures/flags.txt");
    let mut seen = 0;
    for entry in text.split("$ kubelet ").skip(1) {
        let (line, output) = entry.split_once('\n').unwrap();
        let want = go_error(output);
        let args: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let (got, warnings) = match parse_flags(&args) {
            Err(e) => (e.to_string(), Vec::new()),
            Ok(flags) => {
                let args: Vec<_> = args.iter().map(String::as_str).collect();
                let files = Memory::of(&[("/dev/null", "")]);
                let loaded = load_with(&files, &args, true);
                let errors = loaded.findings.iter();
                let first = errors.filter(|f| f.severity == Severity::Error).map(|f| f.message.clone());
                (first.collect::<Vec<_>>().join("\n"), flags.warnings().to_vec())
            }
        };
        if line == "--network-plugin=cni" {
            assert!(got.starts_with(&format!("{want}: removed in 1.24")), "{got}");
        } else if line.starts_with("--config=") {
            // The system's own words at the end differ.
            let ours = got.split(", error: ").next().unwrap();
            assert!(want.contains(ours), "{line}: {got}");
        } else {
            let want = want.trim_start_matches("failed to set feature gates from initial flags-based config: ");
            assert_eq!(got, want, "{line}");
        }
        for warning in warnings {
            assert!(output.contains(&warning), "{line}: {warning}");
        }
        seen += 1;
    }
    assert!(seen > 50);
}

struct Case {
    name: String,
    args: Vec<String>,
    files: Memory,
    output: String,
}

fn cases() -> Vec<Case> {
    let text = include_str!("fixtures/config.txt");
    let parse = |entry: &str| {
        let (name, rest) = entry.split_once('\n').unwrap();
        let (line, rest) = rest.strip_prefix("$ kubelet ").unwrap().split_once('\n').unwrap();
        let mut files = Memory::default();
        let mut rest = rest.strip_prefix("--- ").unwrap();
        loop {
            let (path, body) = rest.split_once('\n').unwrap();
            if path == "output" {
                return Case {
                    name: name.to_owned(),
                    args: line.split(' ').map(str::to_owned).collect(),
                    files,
                    output: body.to_owned(),
                };
            }
            let (body, after) = match body.strip_prefix("--- ") {
                Some(after) => ("", after),
                None => {
                    let at = body.find("\n--- ").unwrap();
                    (&body[..=at], &body[at + 5..])
                }
            };
            files.0.insert(path.into(), body.as_bytes().to_vec());
            rest = after;
        }
    };
    text.split("=== ").skip(1).map(parse).collect()
}

/// What the kubelet says before it starts; it says the rest later, or never.
fn own_errors(loaded: &Loaded) -> BTreeSet<(String, String)> {
    let errors = loaded.findings.iter().filter(|f| f.severity == Severity::Error);
    errors
        .filter(|f| !f.message.contains("is not supported yet"))
        .filter(|f| !f.message.starts_with("no client provided"))
        .map(|f| (f.path.clone(), f.message.clone()))
        .collect()
}

/// Takes our messages out of the kubelet's list; what is left must be separators.
fn same_messages(name: &str, go: &str, ours: impl Iterator<Item = String>) {
    let list = go.strip_prefix('[').and_then(|l| l.strip_suffix(']'));
    let mut left = list.unwrap_or(go).to_owned();
    let mut ours: Vec<_> = ours.collect::<BTreeSet<_>>().into_iter().collect();
    ours.sort_by_key(|m| std::cmp::Reverse(m.len()));
    for message in ours {
        // We add what is allowed where the kubelet does not say.
        let core = message.split("; must be").next().unwrap();
        assert!(left.contains(core), "{name}: only we say {message:?}\n{left}");
        left = left.replacen(core, "", 1);
    }
    let left: String = left.split(", ").filter(|t| !t.is_empty()).collect();
    assert_eq!(left, "", "{name}: only the kubelet says this");
}

#[test]
fn configurations() {
    let cases = cases();
    assert!(cases.len() > 100);
    for case in cases {
        let args: Vec<_> = case.args.iter().map(String::as_str).collect();
        let loaded = load_with(&case.files, &args, false);
        let name = &case.name;
        let go = go_error(&case.output);
        let errors = own_errors(&loaded);
        let all = || errors.iter().map(|(_, message)| message.clone());
        if let Some((_, list)) = go.split_once("failed to validate kubelet configuration, error: ") {
            let list = list.split(", path: &TypeMeta").next().unwrap();
            same_messages(name, list, all());
        } else if let Some(list) = go.strip_prefix("initialize logging: ") {
            let ours = all().filter(|m| m.starts_with("logging."));
            same_messages(name, list, ours);
        } else if let Some((_, list)) = go.split_once("while setting defaults, error: ") {
            let ours = errors.iter().filter(|(path, _)| path.starts_with("featureGates"));
            same_messages(name, list, ours.map(|(_, m)| m.clone()));
        } else {
            decode_error(name, &go, &loaded);
        }
        for (before, after) in [
            ("unknown field \"", "unknown field \""),
            ("duplicate field \"", "duplicate field \""),
            (": key \"", "duplicate field \""),
        ] {
            for rest in case.output.replace("\\\"", "\"").split(before).skip(1) {
                let field = rest.split('"').next().unwrap();
                let told = format!("{after}{field}\"");
                assert!(loaded.findings.iter().any(|f| f.message.starts_with(&told)), "{name}: {told}");
            }
        }
    }
}

/// The kubelet could not read the file: neither could we, and we name the file and the field.
fn decode_error(name: &str, go: &str, loaded: &Loaded) {
    let finding = loaded
        .findings
        .iter()
        .find(|f| f.severity == Severity::Error && f.file.is_some())
        .unwrap_or_else(|| panic!("{name}: no error for {go}"));
    let text = finding.to_string();
    assert!(text.starts_with("/e/"), "{name}: {text}");
    {
        if let Some((_, rest)) = go.split_once("Go struct field ") {
            let field = rest.split(' ').next().unwrap().split_once('.').unwrap().1;
            let path: String = finding.path.split(['[', ']']).step_by(2).collect();
            assert!(path.starts_with(field), "{name}: {} for {field}", finding.path);
        }
    }
    for words in [
        "Object 'Kind' is missing",
        "Object 'apiVersion' is missing",
        "was empty",
        "quantities must match the regular expression",
        "time: missing unit in duration \"10\"",
        "time: unknown unit \"x\" in duration \"5x\"",
    ] {
        assert_eq!(go.contains(words), text.contains(words), "{name}: {text}\n{go}");
    }
    if let Some((_, rest)) = go.split_once("no kind ") {
        let kind = rest.split(" in scheme").next().unwrap();
        assert!(text.contains(&format!("no kind {kind}")), "{name}: {text}");
    }
}

#[test]
fn every_flag_with_its_type_and_default() {
    let help = config::Flags::help_text();
    for row in include_str!("fixtures/flags.tsv").lines().skip(1) {
        let [name, kind, default, deprecated] = row.split('\t').collect::<Vec<_>>()[..] else {
            panic!("{row}");
        };
        let kind = match kind {
            "bool" => "",
            "version" => "version[=true]",
            "vmodule" => "pattern=N,...",
            other => other,
        };
        let head = format!("--{name} {kind} ");
        let line = help.lines().find(|l| l.contains(&head)).unwrap_or_else(|| panic!("{head}"));
        let line =
            line.replace(" (DEPRECATED: set it in the configuration file)", " CONFIG").replace(" (DEPRECATED)", " OLD");
        let mark = match deprecated {
            "config" => " CONFIG",
            "no" => "",
            _ => " OLD",
        };
        let end = if default.is_empty() { mark.to_owned() } else { format!(" (default {default}){mark}") };
        assert!(line.ends_with(&end), "{line}\n{end}");
        assert_eq!(line.contains("(default "), !default.is_empty(), "{line}");
        assert_eq!(line.contains("CONFIG"), mark == " CONFIG", "{line}");
        assert_eq!(line.contains("OLD"), mark == " OLD", "{line}");
    }
    assert_eq!(help.lines().filter(|l| l.contains("--")).count(), 149);
}
