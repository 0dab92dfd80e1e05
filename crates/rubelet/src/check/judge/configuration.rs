//! Flags and configuration: what the agent would say at its start.

use super::{Finding, FlagProblem, Flags, Loaded, Severity, error, ok};

/// Flags that are wrong or gone, then each finding of the configuration.
pub(super) fn judge(flags: &Flags, problems: &[FlagProblem], loaded: &Loaded) -> Vec<Finding> {
    let mut out: Vec<Finding> = problems.iter().map(flag).collect();
    out.extend(loaded.findings.iter().filter(|f| !told_elsewhere(&f.path)).map(|f| {
        let fix = match (&f.file, f.path.as_str()) {
            (Some(file), "") => format!("correct {}", file.display()),
            (Some(file), path) => format!("correct {path} in {}", file.display()),
            (None, "--config") => "write a configuration file and give it with --config".to_owned(),
            (None, "") => "change the agent's flags".to_owned(),
            (None, path) => format!("change {path}"),
        };
        let message = if f.path.is_empty() || f.message.contains(f.path.as_str()) {
            f.message.clone()
        } else {
            format!("{}: {}", f.path, f.message)
        };
        Finding { topic: "configuration".into(), severity: f.severity, message, fix }
    }));
    if out.iter().all(|f| f.severity == Severity::Ok) {
        let from = match (flags.config(), flags.config_dir()) {
            (Some(file), _) => file.display().to_string(),
            (None, Some(dir)) => dir.display().to_string(),
            (None, None) => "the flags".to_owned(),
        };
        out.push(ok("configuration", format!("{from}: nothing wrong")));
    }
    out
}

/// The judgement of the cgroup version says it with a better fix.
fn told_elsewhere(path: &str) -> bool {
    path == "failCgroupV1"
}

fn flag(problem: &FlagProblem) -> Finding {
    match problem {
        FlagProblem::Removed { name, remedy } => error(
            "flags",
            format!("--{name} no longer exists"),
            format!("take it out of the agent's command line; {remedy}"),
        ),
        other => error("flags", other.to_string(), "correct the agent's command line; rubelet --help lists the flags"),
    }
}
