//! What came out of the node test suite: read from its reports, kept as a table, compared with another kubelet's.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// How a spec ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// It held.
    Passed,
    /// It did not, or it did not come to an end.
    Failed,
    /// It said itself that it cannot run here.
    Skipped,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }

    fn parse(word: &str) -> Option<Self> {
        [Self::Passed, Self::Failed, Self::Skipped].into_iter().find(|s| s.word() == word)
    }
}

/// The result of one spec.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) state: State,
    /// Seconds that it took.
    pub(crate) seconds: f64,
    /// Why it failed or was skipped: the beginning of its message.
    pub(crate) why: String,
}

/// Results by the spec's full name.
pub(crate) type Results = BTreeMap<String, Outcome>;

/// A spec that the suite has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    /// Full name: the texts of its containers and its own, by spaces.
    pub(crate) name: String,
    /// It runs alone.
    pub(crate) serial: bool,
}

/// The specs that a dry run would run.
pub(crate) fn selected(report: &Value) -> Vec<Spec> {
    let selected = specs(report).filter(|s| s["State"] == "passed").map(name);
    selected.map(|name| Spec { serial: name.contains("[Serial]"), name }).collect()
}

/// The specs that ran, or said that they cannot.
pub(crate) fn outcomes(report: &Value) -> Results {
    specs(report)
        .filter_map(|s| {
            let message = s["Failure"]["Message"].as_str().unwrap_or_default();
            let state = match s["State"].as_str()? {
                "passed" => State::Passed,
                // Without a message it was only left out by the filter, or the time was up before it.
                "skipped" if message.is_empty() => return None,
                "skipped" => State::Skipped,
                // The run was ended from outside: it says nothing about the kubelet.
                "interrupted" | "aborted" => return None,
                _ if message.starts_with("A suite timeout occurred") => return None,
                _ => State::Failed,
            };
            let why = message.chars().take(160).map(|c| if c.is_control() { ' ' } else { c }).collect();
            let seconds = s["RunTime"].as_f64().unwrap_or_default() / 1e9;
            Some((name(s), Outcome { state, seconds, why }))
        })
        .collect()
}

fn specs(report: &Value) -> impl Iterator<Item = &Value> {
    let suites = report.as_array().into_iter().flatten();
    suites.flat_map(|s| s["SpecReports"].as_array().into_iter().flatten()).filter(|s| s["LeafNodeType"] == "It")
}

fn name(spec: &Value) -> String {
    let texts = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().chain([&spec["LeafNodeText"]]);
    texts.filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
}

/// Reads a table; one that is not there is empty.
///
/// # Errors
/// When a line is not of the form `state TAB seconds TAB spec TAB why`.
pub(crate) fn read(file: &Path) -> Result<Results> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Results::new()),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", file.display())),
    };
    let row = |line: &str| {
        let mut fields = line.split('\t');
        let state = State::parse(fields.next()?)?;
        let seconds = fields.next()?.parse().ok()?;
        Some((fields.next()?.to_owned(), Outcome { state, seconds, why: fields.next().unwrap_or("").to_owned() }))
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
        .map(|(n, line)| row(line).with_context(|| format!("{}, line {}: not a result", file.display(), n + 1)))
        .collect()
}

/// Writes a table, as a whole or not at all.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(file: &Path, results: &Results) -> Result<()> {
    let mut rows: Vec<_> = results.iter().collect();
    rows.sort_by_key(|(name, o)| (o.state.word(), name.as_str()));
    let mut text = String::new();
    for (name, o) in rows {
        let _ = writeln!(text, "{}\t{:.1}\t{name}\t{}", o.state.word(), o.seconds, o.why);
    }
    let new = file.with_extension("new");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, file))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// The area of a spec: the first words of its name, up to a bracket or a stop of its own.
pub(crate) fn area(name: &str) -> String {
    let rest = name.strip_prefix("[sig-").and_then(|n| n.split_once("] ")).map_or(name, |(_, rest)| rest);
    let end = rest.find(" [").unwrap_or(rest.len());
    rest[..end].split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Two kubelets' results for the same specs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Comparison {
    /// Passed, failed and skipped.
    pub(crate) counts: [usize; 3],
    /// Those of these that the other kubelet passes.
    pub(crate) bar: usize,
    /// Specs that only the other kubelet passes.
    pub(crate) lost: Vec<String>,
    /// Specs that only this one passes.
    pub(crate) won: Vec<String>,
    /// Specs that failed and of which nothing is known of the other.
    pub(crate) unknown: Vec<String>,
}

impl Comparison {
    /// Compares what ran with the other's results.
    pub(crate) fn of(ours: &Results, other: &Results) -> Self {
        let mut all = Self::default();
        for (name, outcome) in ours {
            all.counts[outcome.state as usize] += 1;
            let passed = outcome.state == State::Passed;
            match other.get(name).map(|o| o.state) {
                Some(State::Passed) => {
                    all.bar += 1;
                    if !passed {
                        all.lost.push(name.clone());
                    }
                }
                Some(_) if passed => all.won.push(name.clone()),
                None if outcome.state == State::Failed => all.unknown.push(name.clone()),
                Some(_) | None => {}
            }
        }
        all
    }

    /// Prints a table by area and the differences by name.
    pub(crate) fn show(&self, ours: &Results, other: &Results, who: &str) {
        let mut areas: BTreeMap<String, ([usize; 3], usize)> = BTreeMap::new();
        for (name, outcome) in ours {
            let (counts, bar) = areas.entry(area(name)).or_default();
            counts[outcome.state as usize] += 1;
            *bar += usize::from(other.get(name).is_some_and(|o| o.state == State::Passed));
        }
        println!("\n  {:<40} {:>7} {:>7} {:>7} {:>10}", "area", "passed", "failed", "skipped", "Go passes");
        for (area, (counts, bar)) in &areas {
            println!("  {area:<40} {:>7} {:>7} {:>7} {bar:>10}", counts[0], counts[1], counts[2]);
        }
        let [passed, failed, skipped] = self.counts;
        println!("  {:<40} {passed:>7} {failed:>7} {skipped:>7} {:>10}\n", who, self.bar);
        for (what, names) in [
            ("passed by Go only", &self.lost),
            ("passed here only", &self.won),
            ("failed here, and Go's result is not on record", &self.unknown),
        ] {
            if !names.is_empty() {
                println!("{what}:");
            }
            for name in names {
                let why = ours.get(name).map_or("", |o| o.why.as_str());
                println!("  {name}\n      {why}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn outcome(state: State) -> Outcome {
        Outcome { state, seconds: 1.5, why: "w".to_owned() }
    }

    #[test]
    fn reports_are_read() {
        let spec = |state: &str, leaf: &str, message: &str| {
            json!({"LeafNodeType": "It", "State": state, "ContainerHierarchyTexts": ["[sig-node] Pods", "when"],
                   "LeafNodeText": leaf, "RunTime": 2_000_000_000_u64, "Failure": {"Message": message}})
        };
        let report = json!([{"SpecReports": [
            spec("passed", "a", ""), spec("failed", "b", "no\ttab"), spec("skipped", "c", ""), spec("skipped", "d", "no GPU"),
            spec("timedout", "e", "late"), spec("interrupted", "f", "x"),
            spec("timedout", "g", "A suite timeout occurred"), {"LeafNodeType": "BeforeSuite", "State": "passed"},
        ]}]);
        let all = outcomes(&report);
        let states: Vec<_> = all.iter().map(|(n, o)| (n.rsplit_once(' ').unwrap().1, o.state)).collect();
        assert_eq!(states, [("a", State::Passed), ("b", State::Failed), ("d", State::Skipped), ("e", State::Failed)]);
        assert_eq!(all["[sig-node] Pods when b"].why, "no tab");
        assert_eq!(selected(&report), [Spec { name: "[sig-node] Pods when a".to_owned(), serial: false }]);
    }

    #[test]
    fn tables_come_back() {
        let file = std::env::temp_dir().join(format!("rubelet-results-{}", std::process::id()));
        let all = Results::from([("a b".to_owned(), outcome(State::Failed)), ("c".to_owned(), outcome(State::Passed))]);
        write(&file, &all).unwrap();
        assert_eq!(read(&file).unwrap(), all);
        fs::write(&file, "green\t1\tx\n").unwrap();
        let error = read(&file).unwrap_err().to_string();
        fs::remove_file(&file).unwrap();
        assert!(error.ends_with("line 1: not a result"), "{error}");
        assert!(read(&file).unwrap().is_empty());
    }

    #[test]
    fn differences_have_names() {
        use State::{Failed, Passed, Skipped};
        let of =
            |all: &[(&str, State)]| -> Results { all.iter().map(|(n, s)| ((*n).to_owned(), outcome(*s))).collect() };
        let ours = of(&[("a", Passed), ("b", Failed), ("c", Passed), ("d", Failed), ("e", Failed), ("f", Skipped)]);
        let go = of(&[("a", Passed), ("b", Passed), ("c", Failed), ("d", Failed), ("f", Passed), ("g", Passed)]);
        let found = Comparison::of(&ours, &go);
        assert_eq!(found.counts, [2, 3, 1]);
        assert_eq!(found.bar, 3);
        assert_eq!(
            (found.lost, found.won, found.unknown),
            (vec!["b".into(), "f".into()], vec!["c".into()], vec!["e".into()])
        );
    }

    #[test]
    fn areas_are_short() {
        assert_eq!(area("[sig-node] Probing container should be"), "Probing container should");
        assert_eq!(area("[sig-node] Container Lifecycle Hook [Serial] when"), "Container Lifecycle Hook");
        assert_eq!(area("[sig-storage] EmptyDir volumes pod"), "EmptyDir volumes pod");
        assert_eq!(area("Alone"), "Alone");
    }
}
