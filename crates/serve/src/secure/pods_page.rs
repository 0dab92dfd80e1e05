//! `/debug/pods`: each pod's way from its source to ready as a picture, for people who look for the slow or the stuck one among many.
//!
//! One row a pod, those with trouble first. All pictures share one axis, the time since a pod was queued, on a logarithmic scale: a start of a second and
//! a restart a day later are seen in the same picture, and rows can be compared. The page is whole in itself: no script, nothing fetched.
//! `?namespace=NAME` shows one namespace.

use std::fmt::Write as _;

use jiff::Timestamp;
use model::report::{NodeReport, PodReport};
use model::timeline::{StepKind, StepRecord, StepResult};

use super::system_logs::escape;

/// Of a picture, in pixels.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 24.0;
/// The scale is even below, and logarithmic above; seconds.
const LINEAR: f64 = 0.1;
/// Marks of the axis: seconds and words.
const MARKS: [(f64, &str); 9] = [
    (0.1, "0.1 s"),
    (1.0, "1 s"),
    (10.0, "10 s"),
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (21600.0, "6 h"),
    (86400.0, "1 d"),
    (604_800.0, "7 d"),
];
/// Longer texts are cut in the table; the tooltip has all of it.
const TEXT: usize = 160;

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#6a737d;--line:#d8dee4;--head:#f6f8fa;\
--queue:#aab2bb;--prep:#8c6bd6;--volumes:#1b9e9e;--sandbox:#3b7dd8;--pull:#e08a1e;--start:#2da44e;--ready:#116329;--wait:#f0b8b8;--stop:#8b949e;--bad:#cf222e}\
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#8b949e;--line:#30363d;--head:#161b22;--ready:#56d364;--wait:#6e3636;--bad:#ff7b72}}\
body{font:13px/1.35 system-ui,sans-serif;margin:12px;background:var(--bg);color:var(--fg)}\
h1{font-size:16px;margin:0 0 4px}p{margin:4px 0;color:var(--dim)}\
table{border-collapse:collapse;width:100%}\
th{white-space:nowrap;position:sticky;top:0;background:var(--head);text-align:left;padding:3px 8px;border-bottom:1px solid var(--line);font-weight:600;z-index:1}\
td{padding:2px 8px;border-bottom:1px solid var(--line);vertical-align:middle;white-space:nowrap}\
td.t{white-space:normal;overflow-wrap:anywhere;min-width:180px}td.n{text-align:right}small{color:var(--dim)}\
.bad{color:var(--bad)}.good{color:var(--ready)}svg{display:block}\
.g{stroke:var(--line)}.x{fill:var(--dim);font-size:10px}\
.q{fill:var(--queue)}.a{fill:var(--prep)}.v{fill:var(--volumes)}.s{fill:var(--sandbox)}.p{fill:var(--pull)}.c{fill:var(--start)}\
.r{fill:var(--ready)}.w{fill:var(--wait)}.e{fill:var(--stop)}.f{fill:var(--bad)}\
i{display:inline-block;width:10px;height:10px;margin:0 4px 0 10px}\
i.q{background:var(--queue)}i.a{background:var(--prep)}i.v{background:var(--volumes)}i.s{background:var(--sandbox)}i.p{background:var(--pull)}\
i.c{background:var(--start)}i.r{background:var(--ready)}i.w{background:var(--wait)}i.e{background:var(--stop)}i.f{background:var(--bad)}";

/// How a kind of step is drawn: its class, its words, and whether it concerns the pod as a whole.
fn look(kind: StepKind) -> (&'static str, &'static str, bool) {
    match kind {
        StepKind::Queued => ("q", "queued", true),
        StepKind::Admit => ("a", "admitted", true),
        StepKind::Network => ("w", "waits for the network", true),
        StepKind::Cgroup => ("a", "cgroup", true),
        StepKind::Directories => ("a", "directories", true),
        StepKind::Volumes => ("v", "volumes", true),
        StepKind::Sandbox => ("s", "sandbox", true),
        StepKind::Pull => ("p", "pull", false),
        StepKind::Create => ("c", "create", false),
        StepKind::Start => ("c", "start", false),
        StepKind::PostStart => ("c", "postStart hook", false),
        StepKind::Resize => ("a", "resize", false),
        StepKind::Stop => ("e", "stop", false),
        StepKind::StopSandbox => ("e", "stop of the sandbox", true),
        StepKind::BackOff => ("w", "back-off", false),
        StepKind::Ready => ("r", "ready", true),
        StepKind::Cleanup => ("e", "clean-up", true),
        StepKind::RemoveCgroup => ("e", "removal of the cgroup", true),
        StepKind::Gone => ("e", "gone", true),
    }
}

fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64().max(0.0)
}

/// The axis.
#[derive(Clone, Copy)]
struct Scale {
    /// Its end, in seconds.
    end: f64,
}

impl Scale {
    fn x(self, seconds: f64) -> f64 {
        WIDTH * (seconds.min(self.end) / LINEAR).ln_1p() / (self.end / LINEAR).ln_1p()
    }
}

/// A duration in words, as short as can be.
fn took(seconds: f64) -> String {
    match seconds {
        s if s < 0.0995 => format!("{:.0} ms", s * 1000.0),
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3600.0),
        s => format!("{:.0} d", s / 86400.0),
    }
}

/// The page.
pub(crate) fn page(node: &NodeReport, mut pods: Vec<PodReport>, namespace: Option<&str>, now: Timestamp) -> String {
    pods.retain(|p| namespace.is_none_or(|n| n == p.namespace));
    pods.sort_by_cached_key(|p| (!troubled(p), p.namespace.clone(), p.name.clone()));
    let ages = pods.iter().filter_map(|p| Some(seconds(p.timeline.first()?.started, now)));
    let scale = Scale { end: ages.fold(90.0, f64::max) };
    let marks: Vec<(f64, &str)> =
        MARKS.iter().filter(|(at, _)| *at <= scale.end).map(|(at, w)| (scale.x(*at), *w)).collect();
    let with_error = pods.iter().filter(|p| p.last_error.is_some()).count();
    let ready = pods.iter().filter(|p| p.ready).count();

    // Writing to a String cannot fail.
    let mut out = String::with_capacity(16 << 10);
    let name = escape(&node.name);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Pods of {name}</title><style>{STYLE}</style></head><body>\n<h1>Pods of {name}</h1>\n\
         <p><span class=\"{}\">{}</span>: {}</p>\n<p>{} pods, {ready} ready, {with_error} with an error; at {}</p>\n<p>",
        if node.ready { "good" } else { "bad" },
        if node.ready { "Ready" } else { "NotReady" },
        escape(&node.message),
        pods.len(),
        now.strftime("%Y-%m-%d %H:%M:%S UTC"),
    );
    for (class, words) in [
        ("q", "queued"),
        ("a", "admission, cgroup, directories"),
        ("v", "volumes"),
        ("s", "sandbox"),
        ("p", "pull"),
        ("c", "create, start"),
        ("r", "ready"),
        ("w", "waits"),
        ("e", "ends"),
        ("f", "failed"),
    ] {
        let _ = write!(out, "<i class=\"{class}\"></i>{words}");
    }
    out += ". Upper lane: the pod, lower lane: its containers.</p>\n<svg width=\"0\" height=\"0\"><defs><g id=\"m\">";
    for (x, _) in &marks {
        let _ = write!(out, "<line class=\"g\" x1=\"{x:.1}\" x2=\"{x:.1}\" y2=\"{HEIGHT}\"/>");
    }
    let _ = write!(
        out,
        "</g></defs></svg>\n<table><thead><tr><th>Pod</th><th>State</th><th>Ready</th><th>Restarts</th><th>\
         <svg width=\"{WIDTH}\" height=\"14\">"
    );
    let mut free = 0.0;
    for (x, words) in &marks {
        // Words that would run into the ones before, or out of the picture, are left out; their line stays.
        if *x > free + 14.0 && *x < WIDTH - 16.0 {
            let _ = write!(out, "<text class=\"x\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"11\">{words}</text>");
            free = x + 22.0;
        }
    }
    out += "</svg></th><th>To ready</th><th>Now, last error</th></tr></thead><tbody>\n";
    for pod in &pods {
        row(&mut out, pod, scale, now);
    }
    out += "</tbody></table></body></html>\n";
    out
}

/// What somebody may want to look at first.
fn troubled(pod: &PodReport) -> bool {
    pod.last_error.is_some() || (!pod.ready && !matches!(pod.phase.as_str(), "Succeeded"))
}

fn row(out: &mut String, pod: &PodReport, scale: Scale, now: Timestamp) {
    let ready = pod.containers.iter().filter(|c| c.ready).count();
    let restarts: u32 = pod.containers.iter().map(|c| c.restarts).sum();
    let state = if pod.state == "syncing" { String::new() } else { format!(" <small>{}</small>", escape(&pod.state)) };
    let bad = if pod.phase == "Failed" { " class=\"bad\"" } else { "" };
    let _ = write!(
        out,
        "<tr><td title=\"{}\"><small>{}/</small>{}</td><td><span{bad}>{}</span>{state}</td><td class=\"n\">{ready}/{}</td><td class=\"n\">{}</td><td>",
        escape(&pod.uid),
        escape(&pod.namespace),
        escape(&pod.name),
        escape(&pod.phase),
        pod.containers.iter().filter(|c| c.kind != "init").count().max(ready),
        if restarts > 0 { restarts.to_string() } else { String::new() },
    );
    let to_ready = picture(out, &pod.timeline, scale, now);
    let _ = write!(out, "</td><td class=\"n\">{}</td><td class=\"t\">", to_ready.map(took).unwrap_or_default());
    let step = pod.step.as_ref().filter(|s| s.ended.is_none()).map(|s| {
        let subject = if s.subject.is_empty() { String::new() } else { format!(" {}", s.subject) };
        format!("{}{subject} for {}", look(s.kind).1, took(seconds(s.started, now)))
    });
    let mut parts: Vec<String> = step.iter().chain(&pod.waits_for).map(|text| cell(text)).collect();
    if let Some(error) = &pod.last_error
        && let StepResult::Failed(why) | StepResult::Unknown(why) = &error.result
    {
        let times = if error.count > 1 { format!(" ({}×)", error.count) } else { String::new() };
        let ago = took(seconds(error.ended.unwrap_or(error.started), now));
        let text = format!("{}{times}, {ago} ago: {why}", look(error.kind).1);
        parts.push(format!("<span class=\"bad\">{}</span>", cell(&text)));
    }
    let _ = writeln!(out, "{}</td></tr>", parts.join("<br>"));
}

/// A text, cut if it is long.
fn cut(text: &str) -> String {
    text.char_indices().nth(TEXT).map_or_else(|| text.to_owned(), |(end, _)| format!("{}…", &text[..end]))
}

/// The same, with all of it in the tooltip.
fn cell(text: &str) -> String {
    let short = cut(text);
    if short == text { escape(text) } else { format!("<span title=\"{}\">{}</span>", escape(text), escape(&short)) }
}

/// Draws the time line; how long it took to become ready, in seconds, if it did.
fn picture(out: &mut String, steps: &[StepRecord], scale: Scale, now: Timestamp) -> Option<f64> {
    let _ = write!(out, "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\"><use href=\"#m\"/>");
    let begin = steps.first().map_or(now, |s| s.started);
    let mut ready = None;
    for (at, step) in steps.iter().enumerate() {
        let (class, words, of_pod) = look(step.kind);
        let failed = matches!(step.result, StepResult::Failed(_) | StepResult::Unknown(_));
        let class = if failed { "f" } else { class };
        // From the queue to whatever comes next, the pod waits.
        let end = match step.kind {
            StepKind::Queued => steps.get(at + 1).map_or(now, |next| next.started),
            _ => step.ended.unwrap_or(now),
        };
        let (from, to) = (seconds(begin, step.started), seconds(begin, end));
        let (x, right) = (scale.x(from), scale.x(to));
        let tip = {
            let subject = if step.subject.is_empty() { String::new() } else { format!(" {}", step.subject) };
            let times = if step.count > 1 { format!(", {}×", step.count) } else { String::new() };
            let how = match &step.result {
                StepResult::Running => " so far".to_owned(),
                StepResult::Done => String::new(),
                StepResult::Failed(why) => format!(", failed: {}", cut(why)),
                StepResult::Unknown(why) => format!(", outcome unknown: {}", cut(why)),
            };
            escape(&format!("{words}{subject}: after {}, took {}{times}{how}", took(from), took(to - from)))
        };
        if step.kind == StepKind::Ready {
            let after = seconds(begin, step.ended.unwrap_or(step.started));
            let x = scale.x(after).min(WIDTH - 3.0);
            ready = ready.or(Some(after));
            let _ = write!(
                out,
                "<rect class=\"r\" x=\"{x:.1}\" width=\"3\" height=\"{HEIGHT}\"><title>{tip}</title></rect>"
            );
            continue;
        }
        let (y, width) = (if of_pod { 2 } else { 13 }, (right - x).max(2.0));
        let x = x.min(WIDTH - width);
        let _ = write!(
            out,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"9\"><title>{tip}</title></rect>"
        );
    }
    out.push_str("</svg>");
    ready
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::tests::pod_report;

    fn at(seconds: f64) -> Timestamp {
        "2026-11-29T12:00:00Z".parse::<Timestamp>().unwrap() + jiff::SignedDuration::from_secs_f64(seconds)
    }

    fn step(kind: StepKind, subject: &str, from: f64, to: Option<f64>, result: StepResult) -> StepRecord {
        StepRecord { kind, subject: subject.into(), started: at(from), ended: to.map(at), result, count: 1 }
    }

    fn node() -> NodeReport {
        NodeReport {
            name: "node-a".into(),
            ready: true,
            message: "kubelet is posting ready status".into(),
            findings: Vec::new(),
            pods: 0,
            pods_running: 0,
        }
    }

    fn started(name: &str, speed: f64) -> PodReport {
        let mut pod = pod_report("default", name, name);
        let done = |kind, subject: &str, from: f64, to: f64| {
            step(kind, subject, from * speed, Some(to * speed), StepResult::Done)
        };
        pod.timeline = vec![
            done(StepKind::Queued, "", 0.0, 0.0),
            done(StepKind::Admit, "", 0.03, 0.05),
            done(StepKind::Volumes, "", 0.06, 0.1),
            done(StepKind::Sandbox, "", 0.1, 0.5),
            done(StepKind::Pull, "lab.test/busybox:1", 0.5, 1.4),
            done(StepKind::Create, "app", 1.4, 1.5),
            done(StepKind::Start, "app", 1.5, 1.6),
            done(StepKind::Ready, "", 2.0, 2.0),
        ];
        pod
    }

    #[test]
    fn rows_and_their_order() {
        let mut stuck = pod_report("kube-system", "z<b>", "2");
        stuck.ready = false;
        stuck.phase = "Pending".into();
        let why = "pull \"<script>\": ".to_owned() + &"x".repeat(400);
        let failed = step(StepKind::Pull, "bad:1", 0.1, Some(0.4), StepResult::Failed(why));
        stuck.timeline = vec![step(StepKind::Queued, "", 0.0, Some(0.0), StepResult::Done), failed.clone()];
        stuck.last_error = Some(failed);
        stuck.step = Some(step(StepKind::BackOff, "app", 0.4, None, StepResult::Running));
        stuck.waits_for = vec!["back-off of container \"app\"".into()];
        let page = page(&node(), vec![started("web", 1.0), stuck], None, at(30.0));
        let (trouble, good) = (page.find("z&lt;b&gt;").unwrap(), page.find("</small>web").unwrap());
        assert!(trouble < good, "the one with trouble comes first");
        assert!(!page.contains("<b>") && !page.contains("<script"), "texts are no markup");
        for wanted in [
            "2 pods, 1 ready, 1 with an error",
            "back-off app for 30 s<br>back-off of container &#34;app&#34;<br><span class=\"bad\">",
            "<td class=\"n\">2.0 s</td>",
            "<title>pull lab.test/busybox:1: after 0.5 s, took 0.9 s</title>",
            "<rect class=\"f\"",
            ">1 min<",
        ] {
            assert!(page.contains(wanted), "{wanted} is not in {page}");
        }
        assert!(!page.contains("http"), "nothing is fetched from elsewhere");
    }

    #[test]
    fn one_namespace_and_none() {
        let pods = || vec![started("web", 1.0), pod_report("other", "hidden", "3")];
        assert!(!page(&node(), pods(), Some("default"), at(5.0)).contains("hidden"));
        assert!(page(&node(), Vec::new(), None, at(5.0)).contains("0 pods"));
    }

    #[test]
    fn words_of_times() {
        for (seconds, words) in [
            (0.004, "4 ms"),
            (0.25, "0.2 s"),
            (61.0, "61 s"),
            (600.0, "10 min"),
            (90_000.0, "25 h"),
            (864_000.0, "10 d"),
        ] {
            assert_eq!(took(seconds), words);
        }
    }

    /// `RUBELET_PODS_PAGE=FILE cargo test -p serve a_page_of_400` writes the page for a look at it.
    #[test]
    fn a_page_of_400() {
        let mut pods: Vec<PodReport> =
            (0..400).map(|n| started(&format!("web-{n:03}"), 0.4 + f64::from(n % 37) / 8.0)).collect();
        for (n, pod) in pods.iter_mut().enumerate().filter(|(n, _)| n % 60 == 7) {
            let failed = step(
                StepKind::Start,
                "app",
                20.0,
                Some(20.5),
                StepResult::Failed(
                    "start container \"app\": OCI runtime create failed: exec: \"/bin/nope\": no such file".into(),
                ),
            );
            pod.timeline.push(failed.clone());
            pod.timeline.push(step(
                StepKind::BackOff,
                "app",
                20.5,
                if n % 2 == 0 { None } else { Some(60.0) },
                StepResult::Running,
            ));
            pod.last_error = Some(failed);
            pod.ready = false;
            pod.waits_for = vec!["back-off of container \"app\" until 12:01:00".into()];
        }
        let page = page(&node(), pods, None, at(5400.0));
        assert!(page.len() < 1 << 20, "{} bytes", page.len());
        if let Some(file) = std::env::var_os("RUBELET_PODS_PAGE") {
            std::fs::write(file, page).unwrap();
        }
    }
}
