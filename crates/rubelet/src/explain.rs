//! `rubelet explain pod NAME`, `rubelet explain node`: the answer first, then what it rests on.

mod timeline;
pub(crate) mod words;

use jiff::Timestamp;
use model::report::{ContainerReport, NodeReport, PodReport, Severity};
use model::timeline::{StepKind, StepResult};

use crate::cli::{Agent, ExplainArgs, Output, What, print};
use crate::table::{Cell, Paint, Style, age, clean, columns, count};

/// Answers on standard output; the exit code.
pub(crate) fn run(args: &ExplainArgs) -> i32 {
    let answer = match &args.what {
        What::Pod { name, namespace, agent, output } => pod(name, namespace.as_deref(), agent, *output),
        What::Node { agent, output } => node(agent, *output),
    };
    match answer {
        Ok(text) => {
            print(&text);
            0
        }
        Err(text) => {
            eprintln!("rubelet: {text}");
            1
        }
    }
}

fn pod(name: &str, namespace: Option<&str>, agent: &Agent, output: Output) -> Result<String, String> {
    let pods: Vec<PodReport> = agent.get("/v1/pods")?;
    let pod = pick(&pods, namespace, name)?;
    if output.json { to_json(pod) } else { Ok(pod_text(pod, Timestamp::now(), output.style())) }
}

fn node(agent: &Agent, output: Output) -> Result<String, String> {
    let node: NodeReport = agent.get("/v1/node").map_err(|e| {
        format!("{e}\nWithout a running agent, rubelet check says whether this host is fit to be a node.")
    })?;
    if output.json { to_json(&node) } else { Ok(node_text(&node, output.style())) }
}

/// A value as indented JSON, with a line's end.
pub(crate) fn to_json(value: &impl serde::Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|e| format!("write the answer as JSON: {e}"))
}

/// `NAMESPACE/NAME (UID)`.
fn full_name(pod: &PodReport) -> String {
    format!("{}/{} ({})", pod.namespace, pod.name, pod.uid)
}

/// The one pod that is meant: by its whole name, its UID, or the beginning of its name or UID.
///
/// # Errors
/// None or several are meant; the text lists candidates or similar names.
fn pick<'a>(pods: &'a [PodReport], namespace: Option<&str>, name: &str) -> Result<&'a PodReport, String> {
    let (namespace, name) = match name.split_once('/') {
        Some((inline, name)) if namespace.is_none_or(|n| n == inline) => (Some(inline), name),
        Some(_) => return Err(format!("{name:?} names another namespace than --namespace")),
        None => (namespace, name),
    };
    let here: Vec<&PodReport> = pods.iter().filter(|p| namespace.is_none_or(|n| p.namespace == n)).collect();
    let rules: [fn(&PodReport, &str) -> bool; 4] = [
        |pod, name| pod.name == name,
        |pod, name| pod.uid == name,
        |pod, name| pod.name.starts_with(name),
        |pod, name| pod.uid.starts_with(name),
    ];
    let matching = |fits: &fn(&PodReport, &str) -> bool| -> Vec<&'a PodReport> {
        here.iter().copied().filter(|pod| !name.is_empty() && fits(pod, name)).collect()
    };
    let found = rules.iter().map(matching).find(|found| !found.is_empty()).unwrap_or_default();
    match found.as_slice() {
        [pod] => Ok(pod),
        [] => Err(unknown(pods, namespace, name)),
        several => {
            let names: Vec<String> = several.iter().map(|p| format!("  {}", full_name(p))).collect();
            Err(format!(
                "{name:?} fits {} pods; say which one with NAMESPACE/NAME or a UID:\n{}",
                several.len(),
                names.join("\n")
            ))
        }
    }
}

fn unknown(pods: &[PodReport], namespace: Option<&str>, name: &str) -> String {
    let place = namespace.map_or("on this node".to_owned(), |n| format!("in namespace {n} on this node"));
    if pods.is_empty() {
        return format!("no pod {name:?} {place}: it has no pods at all");
    }
    let mut near: Vec<(f64, &PodReport)> = pods
        .iter()
        .map(|p| {
            let inside = !name.is_empty() && p.name.contains(name);
            (if inside { 1.0 } else { strsim::jaro_winkler(&p.name, name) }, p)
        })
        .filter(|(score, _)| *score > 0.85)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let near: Vec<String> = near.iter().take(5).map(|(_, p)| format!("  {}", full_name(p))).collect();
    match near.as_slice() {
        [] => format!("no pod {name:?} {place}; rubelet pods lists those that are"),
        near => format!("no pod {name:?} {place}; similar names:\n{}", near.join("\n")),
    }
}

/// The first step that is still running, newest first.
fn running(pod: &PodReport) -> Option<&model::timeline::StepRecord> {
    pod.step.as_ref().filter(|s| s.result == StepResult::Running)
}

/// The answer in one sentence, and how good it is.
pub(crate) fn headline(pod: &PodReport, now: Timestamp) -> (Paint, String) {
    let who = format!("{} in {}", pod.name, pod.namespace);
    let error = pod.last_error.as_ref().map(|e| words::failure(pod, e));
    match (pod.state.as_str(), pod.phase.as_str()) {
        ("terminating", _) => {
            let now_doing = running(pod).map(|s| words::activity(pod, s, now)).or_else(|| first_wait(pod, now));
            let parts: Vec<String> = now_doing.into_iter().chain(error).collect();
            let detail = if parts.is_empty() { String::new() } else { format!(": {}", parts.join("; ")) };
            (Paint::Caution, format!("{who} is stopping{detail}"))
        }
        (_, "Succeeded") => (Paint::Good, format!("{who} has finished: every container ended well")),
        (_, "Failed") => (Paint::Bad, format!("{who} has failed: {}", end_cause(pod))),
        ("terminated", _) => (Paint::Caution, format!("{who} has stopped")),
        (_, "Running") if pod.ready => (Paint::Good, format!("{who} is running and ready{}", well(pod, now))),
        (_, phase) => {
            let state = if phase == "Running" { "runs but is not ready" } else { "is not running" };
            let (paint, cause) = cause(pod, error, now);
            (paint, format!("{who} {state}: {cause}"))
        }
    }
}

/// What there is to say of a pod that is fine.
fn well(pod: &PodReport, now: Timestamp) -> String {
    let counted = pod.containers.iter().filter(|c| words::counts(c)).count();
    let mut text = format!(": {}", count(counted, "container"));
    let since = pod.containers.iter().filter(|c| words::counts(c)).filter_map(|c| c.since).max();
    if let Some(since) = since {
        text.push_str(&format!(", all up for {}", age(since, now)));
    }
    if let Some(ip) = pod.ips.first() {
        text.push_str(&format!(", address {ip}"));
    }
    let restarted = pod.containers.iter().filter(|c| words::counts(c) && c.restarts > 0).max_by_key(|c| c.since);
    if let Some(c) = restarted {
        let why = c.last_stop.as_ref().map_or_else(String::new, |s| format!(", last after {}", words::stop(s)));
        text.push_str(&format!("; {} was restarted {}×{why}", words::title(c), c.restarts));
    }
    text
}

/// Why a failed pod failed.
fn end_cause(pod: &PodReport) -> String {
    let refused = pod.timeline.iter().rev().find(|s| s.kind == StepKind::Admit);
    if let Some(refused) = refused.filter(|s| matches!(s.result, StepResult::Failed(_))) {
        return words::failure(pod, refused);
    }
    let stopped = |c: &&ContainerReport| c.last_stop.as_ref().is_some_and(|s| s.exit_code != 0);
    if let Some(c) = pod.containers.iter().find(stopped) {
        return format!("{}: {}", words::title(c), c.last_stop.as_ref().map(words::stop).unwrap_or_default());
    }
    match &pod.last_error {
        Some(error) => words::failure(pod, error),
        None => "no container tells why".to_owned(),
    }
}

fn first_wait(pod: &PodReport, now: Timestamp) -> Option<String> {
    pod.waits_for.first().map(|w| words::wait(w, now))
}

/// Why a pod does not run or is not ready: trouble first, then what is just under way.
fn cause(pod: &PodReport, error: Option<String>, now: Timestamp) -> (Paint, String) {
    if let Some(c) = pod.containers.iter().find(|c| words::reason(c, "waiting") == Some("CrashLoopBackOff")) {
        let stop = c.last_stop.as_ref().map_or_else(|| clean(&c.message), words::stop);
        let text =
            format!("{} crashes: {stop}; restarted {}×{}", words::title(c), c.restarts, retry(pod, &c.name, now));
        return (Paint::Bad, text);
    }
    if let (Some(error), Some(record)) = (error, &pod.last_error) {
        let times = Some(words::repeated(record, now)).filter(|t| !t.is_empty());
        let times = times.map_or_else(String::new, |t| format!("; {t}"));
        return (Paint::Bad, format!("{error}{times}{}", retry(pod, &record.subject, now)));
    }
    if let Some((c, reason)) = pod.containers.iter().find_map(|c| Some((c, words::trouble(c)?))) {
        let message = clean(&c.message);
        let colon = if message.is_empty() { "" } else { ": " };
        return (Paint::Bad, format!("{}: {reason}{colon}{message}{}", words::title(c), retry(pod, &c.name, now)));
    }
    if let Some(step) = running(pod) {
        return (Paint::Caution, format!("still {}", words::activity(pod, step, now)));
    }
    if let Some(c) = pod.containers.iter().find(|c| c.kind == "init" && c.state == "running") {
        let since = c.since.map_or_else(String::new, |s| format!(" for {}", age(s, now)));
        return (Paint::Caution, format!("{} runs{since}, the others wait for it", words::title(c)));
    }
    if let Some(c) = pod.containers.iter().find(|c| words::counts(c) && c.state == "running" && !c.ready) {
        let message = Some(clean(&c.message)).filter(|m| !m.is_empty());
        let message = message.unwrap_or_else(|| "its startup or readiness probe has not succeeded".to_owned());
        return (Paint::Bad, format!("{}: {message}", words::title(c)));
    }
    let ended = |c: &&ContainerReport| words::counts(c) && c.state.starts_with("terminated");
    if let Some(c) = pod.containers.iter().find(ended) {
        let stop = c.last_stop.as_ref().map_or_else(String::new, |s| format!(": {}", words::stop(s)));
        return (Paint::Bad, format!("{} has ended{stop}", words::title(c)));
    }
    (Paint::Caution, first_wait(pod, now).unwrap_or_else(|| "nothing has failed, it is still being started".to_owned()))
}

/// `; next try in 12s`, from what the pod waits for of this container.
fn retry(pod: &PodReport, container: &str, now: Timestamp) -> String {
    let quoted = format!("{container:?}");
    let moment = pod.waits_for.iter().filter(|w| w.contains(&quoted)).find_map(|w| words::split_wait(w).1);
    moment.map_or_else(String::new, |at| format!("; {}", words::next_try(at, now)))
}

/// The answer about a pod.
pub(crate) fn pod_text(pod: &PodReport, now: Timestamp, style: Style) -> String {
    let (paint, headline) = headline(pod, now);
    let mut out = format!("{}\n\n", style.paint(paint, &headline));
    let mut field = |name: &str, value: String| out.push_str(&format!("  {name:<10}  {value}\n"));
    let ips = if pod.ips.is_empty() { "none".to_owned() } else { pod.ips.join(", ") };
    field("Pod", format!("{}/{}, UID {}, from {}", pod.namespace, pod.name, pod.uid, pod.source));
    field("Status", format!("{}, agent: {}, addresses: {ips}", pod.phase, pod.state));
    if let Some(step) = &pod.step {
        field(
            "Step",
            match step.result {
                StepResult::Running => words::activity(pod, step, now),
                _ => {
                    format!("{} {}", words::step(step.kind), step.subject).trim_end().to_owned()
                        + &format!(", {} ago", age(step.ended.unwrap_or(step.started), now))
                }
            },
        );
    }
    for (i, wait) in pod.waits_for.iter().enumerate() {
        field(if i == 0 { "Waits for" } else { "" }, words::wait(wait, now));
    }
    if let Some(error) = &pod.last_error {
        let times = Some(words::repeated(error, now)).filter(|t| !t.is_empty());
        let when = times.unwrap_or_else(|| format!("{} ago", age(error.ended.unwrap_or(error.started), now)));
        field("Last error", format!("{} ({when})", words::failure(pod, error)));
    }
    out.push_str(&format!("\n{}\n", style.paint(Paint::Strong, "Containers")));
    out.push_str(&containers(pod, now, style));
    out.push_str(&format!("\n{}\n", style.paint(Paint::Strong, "Time line")));
    out.push_str(&timeline::text(&pod.timeline, now, style));
    out
}

fn containers(pod: &PodReport, now: Timestamp, style: Style) -> String {
    let rows: Vec<Vec<Cell>> = pod
        .containers
        .iter()
        .map(|c| {
            let fine = c.ready || reason_is(c, "Completed");
            let bad = words::trouble(c).is_some() || (c.state.starts_with("terminated") && !fine);
            let paint = if bad {
                Paint::Bad
            } else if fine {
                Paint::Good
            } else {
                Paint::Caution
            };
            vec![
                c.name.as_str().into(),
                c.kind.as_str().into(),
                Cell::painted(&c.state, paint),
                if c.ready { "yes" } else { "no" }.into(),
                c.restarts.to_string().into(),
                c.since.map_or_else(|| "-".to_owned(), |s| age(s, now)).into(),
                c.image.as_str().into(),
            ]
        })
        .collect();
    let table = columns("    ", &["NAME", "KIND", "STATE", "READY", "RESTARTS", "SINCE", "IMAGE"], &rows, style);
    let mut out = String::new();
    let below = std::iter::once(None).chain(pod.containers.iter().map(Some));
    for (line, container) in table.lines().zip(below) {
        out.push_str(line);
        out.push('\n');
        let Some(c) = container else { continue };
        let message = clean(&c.message);
        if !message.is_empty() {
            out.push_str(&format!("             {message}\n"));
        }
        if let Some(stop) = &c.last_stop {
            let when = stop.at.map_or_else(String::new, |at| format!(" {} ago", age(at, now)));
            out.push_str(&format!("             last stopped{when}: {}\n", words::stop(stop)));
        }
    }
    out
}

fn reason_is(container: &ContainerReport, reason: &str) -> bool {
    words::reason(container, "terminated") == Some(reason)
}

/// The answer about the node.
pub(crate) fn node_text(node: &NodeReport, style: Style) -> String {
    let (paint, state) = if node.ready { (Paint::Good, "is ready") } else { (Paint::Bad, "is not ready") };
    let message = clean(&node.message);
    let detail = if node.ready || message.is_empty() { String::new() } else { format!(": {message}") };
    let pods = format!("{} of {} running", node.pods_running, count(node.pods, "pod"));
    let mut out = format!("{}\n", style.paint(paint, &format!("node {} {state}{detail}", node.name)));
    out.push_str(&format!("  {pods}\n"));
    if !node.findings.is_empty() {
        out.push('\n');
        out.push_str(&crate::check::render::findings(&node.findings, style));
    }
    if !node.ready && node.findings.iter().all(|f| f.severity < Severity::Error) {
        out.push_str("\nrubelet check looks at the host itself.\n");
    }
    out
}

#[cfg(test)]
pub(crate) mod tests;
