//! `rubelet check`: is this host fit to be a node?
//!
//! ```text
//!   flags, files ──config──▶ gather + runtime ──facts──▶ judge ──findings──▶ render
//! ```
//!
//! What is looked at is gathered first, each look with its own deadline; judging is pure, so that every verdict has a test.

mod cluster;
mod facts;
mod gather;
mod judge;
pub(crate) mod render;
mod runtime;

use config::{FlagError, FlagProblem, Flags, HostFiles};
use model::report::{Finding, Severity};

use crate::cli::{Output, USAGE, print};
use crate::explain::to_json;

/// As it should be.
fn ok(topic: &str, message: impl Into<String>) -> Finding {
    Finding { topic: topic.into(), severity: Severity::Ok, message: message.into(), fix: String::new() }
}

/// Works, but will surprise somebody.
fn warn(topic: &str, message: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { topic: topic.into(), severity: Severity::Warning, message: message.into(), fix: fix.into() }
}

/// The node will not work.
fn error(topic: &str, message: impl Into<String>, fix: impl Into<String>) -> Finding {
    Finding { topic: topic.into(), severity: Severity::Error, message: message.into(), fix: fix.into() }
}

/// Could not be looked at.
fn unknown(topic: &str, why: &str) -> Finding {
    warn(topic, format!("could not be checked: {why}"), "run rubelet check as root on the node itself")
}

/// Checks this host for an agent with these kubelet flags and writes the findings to standard output. The exit code: 0 without
/// errors, 1 with errors, 2 when `args` are no flags. Takes some seconds when things hang; must not be called within a tokio runtime.
pub(crate) fn run(args: &[String], output: Output) -> i32 {
    if let Err(FlagError { problems }) = config::parse_flags(args)
        && problems.iter().any(|p| matches!(p, FlagProblem::Command(_)))
    {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        eprintln!("rubelet check: {}\nIt takes kubelet flags only; see rubelet check --help.", all.join("\n"));
        return USAGE;
    }
    let findings = match look(args) {
        Ok(findings) => findings,
        Err(e) => {
            eprintln!("rubelet check: {e}");
            return 1;
        }
    };
    let text = if output.json {
        to_json(&findings)
    } else {
        let style = output.style();
        Ok(render::findings(&findings, style) + "\n" + &render::summary(&findings, style))
    };
    match text {
        Ok(text) => print(&text),
        Err(e) => {
            eprintln!("rubelet check: {e}");
            return 1;
        }
    }
    i32::from(findings.iter().any(|f| f.severity == Severity::Error))
}

fn look(args: &[String]) -> std::io::Result<Vec<Finding>> {
    let (flags, problems) = usable_flags(args);
    let cgroups = gather::cgroups();
    let host = config::Host {
        cgroup_v2: cgroups.as_ref().is_ok_and(|c| c.v2),
        working_dir: std::env::current_dir().unwrap_or_else(|_| "/".into()),
    };
    let loaded = config::load(&flags, &HostFiles, &host);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let node_name = crate::node::name(&flags).map_err(|e| e.to_string());
    let (runtime_facts, cluster_facts) =
        runtime.block_on(async { tokio::join!(runtime::ask(&loaded.config), cluster::ask(&flags, &node_name)) });
    runtime.shutdown_background();
    let image_place = runtime_facts.answers.as_ref().and_then(|a| a.image_place.clone());
    let host_facts = gather::host(&flags, &loaded.config, cgroups, image_place);
    Ok(judge::all(&flags, &problems, &loaded, &host_facts, &runtime_facts, cluster_facts.as_ref()))
}

/// The flags that can be understood, and what is wrong with the others: one removed flag must not hide everything else.
fn usable_flags(args: &[String]) -> (Flags, Vec<FlagProblem>) {
    let problems = match config::parse_flags(args) {
        Ok(flags) => return (flags, Vec::new()),
        Err(FlagError { problems }) => problems,
    };
    let mut groups: Vec<Vec<String>> = Vec::new();
    for arg in args {
        match groups.last_mut() {
            Some(group) if !arg.starts_with('-') => group.push(arg.clone()),
            _ => groups.push(vec![arg.clone()]),
        }
    }
    let good: Vec<String> = groups.into_iter().filter(|group| config::parse_flags(group).is_ok()).flatten().collect();
    (config::parse_flags(&good).unwrap_or_default(), problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn good_flags_survive_bad_ones() {
        let line = "--root-dir=/x --network-plugin=cni --pod-infra-container-image p:1 --nope y -v=3 --max-pods nan";
        let (flags, problems) = usable_flags(&words(line));
        assert_eq!(flags.root_dir(), std::path::Path::new("/x"));
        assert_eq!(flags.verbosity(), Some(3));
        assert!(!flags.is_set("max-pods"));
        assert!(
            problems.iter().any(|p| matches!(p, FlagProblem::Removed { name: "network-plugin", .. })),
            "{problems:?}"
        );
        assert_eq!(usable_flags(&words("-v=2")).1, []);
    }

    #[test]
    fn a_stray_word_is_wrong_usage() {
        assert_eq!(run(&words("nonsense"), Output::default()), USAGE);
    }
}
