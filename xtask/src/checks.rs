//! The repository's own rules, as far as a machine can check them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell::Shell;

/// Longest file that passes without a word, in lines.
const LONG: usize = 800;

/// Hosts of package registries. In pieces, since this file must not name them either.
const REGISTRIES: [[&str; 2]; 8] = [
    ["crates", ".io"],
    ["pypi", ".org"],
    ["pythonhosted", ".org"],
    ["registry.npmjs", ".org"],
    ["proxy.golang", ".org"],
    ["sum.golang", ".org"],
    ["deb.debian", ".org"],
    ["repo.maven.apache", ".org"],
];

/// What a check found.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    Error(String),
    Warning(String),
}

/// Checks every file that git knows or would add; true when no rule is broken.
///
/// # Errors
/// When git cannot list the files.
pub(crate) fn run(shell: &Shell) -> Result<bool> {
    let out = Command::new("git")
        .current_dir(crate::root())
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .output()
        .context("cannot run git")?;
    if !out.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    let mut fine = true;
    for name in String::from_utf8_lossy(&out.stdout).split('\0').filter(|n| !n.is_empty()) {
        shell.check()?;
        // Not text, or removed and not yet committed: nothing to read.
        let Ok(text) = std::fs::read_to_string(crate::root().join(name)) else {
            continue;
        };
        for finding in check(name, &text) {
            match finding {
                Finding::Error(what) => {
                    fine = false;
                    println!("error: {name}: {what}");
                }
                Finding::Warning(what) => println!("warning: {name}: {what}"),
            }
        }
    }
    for wrong in crate::named_tests::check(crate::root()).into_iter().chain(crate::dependencies::check()?) {
        fine = false;
        println!("error: {wrong}");
    }
    Ok(fine)
}

fn check(name: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    if Path::new(name).extension().is_some_and(|e| e == "rs") {
        if !text.starts_with("//!") {
            found.push(Finding::Error("a module opens with `//!` and says what it is for".into()));
        }
        let lines = text.lines().count();
        if lines > LONG {
            found.push(Finding::Warning(format!("{lines} lines; split it by topic")));
        }
        if !name.starts_with("crates/host/") {
            // The compiler denies the code itself; this is the way around it.
            let allow = ["allow", "(unsafe_code)"].concat();
            let word = ["un", "safe"].concat();
            let stands = |line: &str| {
                let code = line.split("//").next().unwrap_or_default();
                code.match_indices(&word).any(|(at, _)| {
                    let name = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
                    let rest = &code[at + word.len()..];
                    !name && [" {", " fn ", " impl ", " extern "].iter().any(|what| rest.starts_with(what))
                })
            };
            if text.contains(&allow) || text.contains(&allow.replace("allow", "expect")) || text.lines().any(stands) {
                found.push(Finding::Error("`unsafe` may stand only in crates/host".into()));
            }
        }
    }
    if Path::new(name).file_name().is_some_and(|f| f == "Cargo.toml")
        && text.contains("[package]")
        && !text.contains("[lints]\nworkspace = true")
    {
        found.push(Finding::Error("without `[lints] workspace = true` the compiler denies nothing here".into()));
    }
    if matches!(name, "crates/decide/Cargo.toml" | "crates/manifest/Cargo.toml" | "crates/model/Cargo.toml")
        && text.lines().any(|l| l.trim_start().starts_with("tokio"))
    {
        found.push(Finding::Error("this crate is pure: no tokio".into()));
    }
    // The lock file is cargo's.
    if name != "Cargo.lock" {
        for (number, line) in text.lines().enumerate() {
            if let Some(host) = REGISTRIES.iter().map(|r| r.concat()).find(|h| line.contains(h)) {
                found.push(Finding::Error(format!("line {}: names the package registry {host}", number + 1)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_against_the_rules() {
        let error = |name: &str, text: &str| check(name, text).iter().any(|f| matches!(f, Finding::Error(_)));
        assert!(!error("crates/pod/src/a.rs", "//! A.\nfn a() {}\n"));
        assert!(error("crates/pod/src/a.rs", "fn a() {}\n"));
        let unsafe_ok = format!("//! A.\n#![{}]\n", ["allow", "(unsafe_code)"].concat());
        assert!(error("crates/pod/src/a.rs", &unsafe_ok));
        assert!(!error("crates/host/src/a.rs", &unsafe_ok));
        let block = format!("//! A.\nfn a() {{ {} {{ }} }}\n", ["un", "safe"].concat());
        assert!(error("crates/pod/src/a.rs", &block) && !error("crates/host/src/a.rs", &block));
        assert!(!error(
            "crates/pod/src/a.rs",
            "//! A.\n// It is unsafe { } in a way.\nfn a() { for a in not_unsafe { } }\n"
        ));
        assert!(error("crates/pod/Cargo.toml", "[package]\nname = \"pod\"\n"));
        assert!(!error("crates/pod/Cargo.toml", "[package]\nname = \"pod\"\n\n[lints]\nworkspace = true\n"));
        assert!(error("crates/decide/Cargo.toml", "[dependencies]\ntokio.workspace = true\n"));
        assert!(!error("crates/pod/Cargo.toml", "[dependencies]\ntokio.workspace = true\n"));
        let host = format!("see https://{}/x\n", REGISTRIES[0].concat());
        assert!(error("README.md", &host));
        assert!(!error("Cargo.lock", &host));
        let long = format!("//! A.\n{}", "\n".repeat(LONG));
        assert_eq!(check("crates/pod/src/a.rs", &long), [Finding::Warning("801 lines; split it by topic".into())]);
    }
}
