//! The dependencies against `deny.toml`, without cargo-deny: licences, crates that are not wanted, and where they come from.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use spdx::expression::Expression;
use spdx::{LicenseReq, ParseMode};

use crate::shell::read;

/// What `deny.toml` says.
struct Rules {
    allowed: Vec<String>,
    banned: Vec<String>,
}

/// What is wrong with the dependencies on the machines that rubelet is built for.
///
/// # Errors
/// When cargo cannot tell them, or `deny.toml` cannot be read.
pub(crate) fn check() -> Result<Vec<String>> {
    let rules = rules(&std::fs::read_to_string(crate::root().join("deny.toml")).context("deny.toml")?)?;
    let mut wrong = BTreeSet::new();
    for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
        let mut metadata = crate::setup::cargo();
        metadata.args(["metadata", "--format-version=1", "--locked", "--all-features", "--filter-platform", target]);
        let found: Value = serde_json::from_str(&read(&mut metadata)?).context("cargo metadata")?;
        let packages = found["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
        wrong.extend(judge(&rules, packages));
    }
    Ok(wrong.into_iter().collect())
}

fn rules(text: &str) -> Result<Rules> {
    let file: toml::Table = text.parse().context("deny.toml")?;
    let list = |section: &str, key: &str| -> Vec<toml::Value> {
        file.get(section).and_then(|s| s.get(key)).and_then(toml::Value::as_array).cloned().unwrap_or_default()
    };
    let text = |value: &toml::Value| value.as_str().map(str::to_owned);
    let allowed: Vec<String> = list("licenses", "allow").iter().filter_map(text).collect();
    let banned = list("bans", "deny").iter().filter_map(|b| text(b.get("crate")?)).collect();
    if allowed.is_empty() {
        bail!("deny.toml allows no licence");
    }
    Ok(Rules { allowed, banned })
}

fn judge(rules: &Rules, packages: &[Value]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut registries = BTreeSet::new();
    for package in packages {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let (name, version) = (text("name"), text("version"));
        let own = package["source"].is_null();
        let licence = text("license");
        if !fits(licence, &rules.allowed) {
            wrong.push(format!("{name} {version}: licence {licence:?} is not allowed by deny.toml"));
        }
        if rules.banned.iter().any(|b| b == name) {
            wrong.push(format!("{name} {version}: banned by deny.toml"));
        }
        match text("source") {
            "" => {}
            source if source.starts_with("registry+") => drop(registries.insert(source)),
            other => wrong.push(format!("{name} {version}: comes from {other}, not from the registry")),
        }
        if own {
            let any = package["dependencies"].as_array().into_iter().flatten();
            let any = any.filter(|d| d["req"] == "*" && !d["source"].is_null());
            wrong.extend(any.map(|d| format!("{name} takes any version of {}", d["name"])));
        }
    }
    if registries.len() > 1 {
        wrong.push(format!("{} registries: {registries:?}", registries.len()));
    }
    if packages.is_empty() {
        wrong.push("cargo tells of no package".to_owned());
    }
    wrong
}

/// True when the licences that are allowed are enough for this expression.
fn fits(expression: &str, allowed: &[String]) -> bool {
    // Old packages write `/` for OR.
    let Ok(expression) = Expression::parse_mode(expression, ParseMode::LAX) else { return false };
    let shown = |req: &LicenseReq| req.to_string();
    expression.evaluate(|req| allowed.iter().any(|a| *a == shown(req)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn licences_and_sources() {
        let rules = rules(
            "[licenses]\nallow = [\"MIT\", \"Apache-2.0\", \"Apache-2.0 WITH LLVM-exception\"]\n[bans]\ndeny = [{ crate = \"openssl\" }]\n",
        )
        .unwrap();
        for (expression, fine) in [
            ("MIT", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0-only OR MIT", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", false),
            ("GPL-3.0-only", false),
            ("MIT AND ISC", false),
            ("", false),
            ("no licence", false),
        ] {
            assert_eq!(fits(expression, &rules.allowed), fine, "{expression}");
        }
        let package = |name: &str, source: Value, dependencies: Value| json!({"name": name, "version": "1.0.0", "license": "MIT", "source": source, "dependencies": dependencies});
        let judged = |package: Value| judge(&rules, &[package]);
        let star = json!([{"name": "b", "req": "*", "source": "registry+https://a"}]);
        assert!(judged(package("a", json!("registry+https://a"), star.clone())).is_empty());
        assert!(judged(package("a", Value::Null, json!([{"name": "b", "req": "*", "source": null}]))).is_empty());
        assert_eq!(judged(package("a", Value::Null, star)).len(), 1);
        assert_eq!(judged(package("openssl", Value::Null, json!([]))).len(), 1);
        assert_eq!(judged(package("a", json!("git+https://a"), json!([]))).len(), 1);
        let two = [package("a", json!("registry+x"), json!([])), package("b", json!("registry+y"), json!([]))];
        assert_eq!(judge(&rules, &two).len(), 1);
    }
}
