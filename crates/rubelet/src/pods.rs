//! `rubelet pods`: the pods of the running agent, one a line.

use jiff::Timestamp;
use model::report::PodReport;
use model::timeline::StepResult;

use crate::cli::{PodsArgs, print};
use crate::explain::{to_json, words};
use crate::table::{Cell, Paint, Style, age, columns};

/// Answers on standard output; the exit code.
pub(crate) fn run(args: &PodsArgs) -> i32 {
    let answer = args.agent.get::<Vec<PodReport>>("/v1/pods").and_then(|mut pods| {
        pods.retain(|p| args.namespace.as_ref().is_none_or(|n| p.namespace == *n));
        if args.output.json {
            return to_json(&pods);
        }
        if pods.is_empty() {
            // For a person only: a table without rows is what scripts expect.
            let place = args.namespace.as_ref().map_or("on this node".to_owned(), |n| format!("in namespace {n}"));
            eprintln!("no pods {place}");
        }
        Ok(text(&pods, Timestamp::now(), args.output.style()))
    });
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

const HEAD: [&str; 8] = ["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "STEP", "SINCE", "WAITS FOR / LAST ERROR"];

/// The table.
pub(crate) fn text(pods: &[PodReport], now: Timestamp, style: Style) -> String {
    let rows: Vec<Vec<Cell>> = pods.iter().map(|pod| row(pod, now)).collect();
    if rows.is_empty() { String::new() } else { columns("", &HEAD, &rows, style) }
}

fn row(pod: &PodReport, now: Timestamp) -> Vec<Cell> {
    let counted = || pod.containers.iter().filter(|c| words::counts(c));
    let ready = format!("{}/{}", counted().filter(|c| c.ready).count(), counted().count());
    let restarts: u32 = pod.containers.iter().map(|c| c.restarts).fold(0, u32::saturating_add);
    let (paint, status) = status(pod);
    let (step, since) = match &pod.step {
        Some(step) => {
            let name = format!("{} {}", words::step(step.kind), step.subject);
            (name.trim_end().to_owned(), age(step.ended.unwrap_or(step.started), now))
        }
        None => ("-".to_owned(), "-".to_owned()),
    };
    vec![
        pod.namespace.as_str().into(),
        pod.name.as_str().into(),
        ready.into(),
        Cell::painted(status, paint),
        restarts.to_string().into(),
        step.into(),
        since.into(),
        last(pod, now).into(),
    ]
}

/// The phase, or the reason why it is not what it should be.
fn status(pod: &PodReport) -> (Paint, &str) {
    let troubled = pod.containers.iter().find_map(words::trouble);
    match (pod.state.as_str(), pod.phase.as_str()) {
        ("terminating", _) => (Paint::Caution, "Terminating"),
        (_, "Succeeded") => (Paint::Good, "Succeeded"),
        (_, "Failed") => (Paint::Bad, "Failed"),
        (_, phase) => match troubled {
            Some(reason) => (Paint::Bad, reason),
            None if phase == "Running" && pod.ready => (Paint::Good, phase),
            None => (Paint::Caution, phase),
        },
    }
}

/// What it waits for, then what last went wrong.
fn last(pod: &PodReport, now: Timestamp) -> String {
    let waits = pod.waits_for.iter().map(|w| words::wait(w, now));
    let error = pod.last_error.as_ref().filter(|e| !matches!(e.result, StepResult::Done | StepResult::Running));
    waits.chain(error.map(|e| words::failure(pod, e))).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::tests::{at, crashing, pulling, well};

    #[test]
    fn one_line_a_pod() {
        let wanted = "\
NAMESPACE    NAME         READY  STATUS            RESTARTS  STEP            SINCE  WAITS FOR / LAST ERROR
default      web-node-a   2/2    Running           1         ready           1m30s
default      pull-node-a  0/1    ImagePullBackOff  0         image pull app  8s     container \"app\": ImagePullBackOff; next try in 12s | container \"app\": image pull fails: no such host
kube-system  db-node-a    0/1    CrashLoopBackOff  5         start db        40s    container \"db\": CrashLoopBackOff; next try in 2m40s
";
        assert_eq!(text(&[well(), pulling(), crashing()], at(100), Style::default()), wanted);
    }

    #[test]
    fn a_terminal_gets_lines_of_its_width() {
        let style = Style { color: false, width: Some(120) };
        let shown = text(&[well(), pulling(), crashing()], at(100), style);
        assert!(shown.lines().all(|l| l.chars().count() <= 120), "{shown}");
        assert!(shown.lines().nth(2).is_some_and(|l| l.ends_with('…')), "{shown}");
    }

    #[test]
    fn a_pod_that_ends() {
        let mut pod = well();
        pod.state = "terminating".into();
        pod.step = None;
        assert_eq!(status(&pod), (Paint::Caution, "Terminating"));
        pod.state = "terminated".into();
        pod.phase = "Failed".into();
        assert_eq!(status(&pod), (Paint::Bad, "Failed"));
        assert_eq!(text(&[], at(0), Style::default()), "");
    }
}
