//! The time line of a pod as text.

use jiff::Timestamp;
use model::timeline::{StepRecord, StepResult};

use super::words;
use crate::table::{Cell, Paint, Style, age, clean, columns, took};

/// Longest run of steps that is looked for as one round.
const LONGEST_ROUND: usize = 8;

/// A part of the time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The record at this index.
    Step(usize),
    /// The same steps over and over, left out: how many in a round, how many rounds, index of the last one left out.
    Rounds { steps: usize, rounds: usize, last: usize },
}

/// Same step with the same outcome.
fn alike(a: &StepRecord, b: &StepRecord) -> bool {
    a.kind == b.kind && a.subject == b.subject && a.result == b.result
}

/// Folds rounds: a container that crashes all day repeats its few steps, and the first and the last round say it all.
fn fold(steps: &[StepRecord]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < steps.len() {
        let best = (1..=LONGEST_ROUND)
            .map(|size| (size, rounds(&steps[at..], size)))
            .filter(|&(_, rounds)| rounds >= 4)
            .max_by_key(|&(size, rounds)| (size * rounds, std::cmp::Reverse(size)));
        match best {
            Some((size, rounds)) => {
                let end = at + size * rounds;
                parts.extend((at..at + size).map(Part::Step));
                parts.push(Part::Rounds { steps: size, rounds: rounds - 2, last: end - size - 1 });
                parts.extend((end - size..end).map(Part::Step));
                at = end;
            }
            None => {
                parts.push(Part::Step(at));
                at += 1;
            }
        }
    }
    parts
}

/// How many times the first `size` steps come in a row.
fn rounds(steps: &[StepRecord], size: usize) -> usize {
    let same = |n: &usize| (0..size).all(|i| steps.get(n * size + i).is_some_and(|s| alike(s, &steps[i])));
    (0..).take_while(same).count()
}

/// The time line, oldest first, one line a step; errors in full below their step.
pub(crate) fn text(steps: &[StepRecord], now: Timestamp, style: Style) -> String {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    let mut below: Vec<Option<String>> = Vec::new();
    for part in fold(steps) {
        match part {
            Part::Step(i) => {
                rows.push(row(&steps[i], now));
                below.push(detail(&steps[i]).map(|d| format!("             {}\n", style.paint(Paint::Bad, &d))));
            }
            Part::Rounds { steps: size, rounds, last } => {
                let until = steps[last].ended.unwrap_or(steps[last].started);
                rows.push(vec![age(until, now).into()]);
                let what = if size == 1 { "same step".to_owned() } else { format!("same {size} steps") };
                below.push(Some(format!(
                    "    … the {what} {rounds}× more, the last of these {} ago\n",
                    age(until, now)
                )));
            }
        }
    }
    let table = columns("    ", &["AGO", "STEP", "WHAT", "TOOK", "RESULT"], &rows, style);
    let mut lines = table.lines();
    let mut out = lines.next().map_or_else(String::new, |head| format!("{head}\n"));
    for (line, below) in lines.zip(below) {
        // A folded part stands for itself; its row only took part in the alignment.
        if !below.as_ref().is_some_and(|b| b.starts_with("    …")) {
            out.push_str(line);
            out.push('\n');
        }
        out.push_str(&below.unwrap_or_default());
    }
    out
}

fn row(step: &StepRecord, now: Timestamp) -> Vec<Cell> {
    let instant = step.ended == Some(step.started);
    // What was tried many times has no one duration.
    let took = match step.ended {
        Some(ended) if step.count == 1 && !instant => took(ended.duration_since(step.started)),
        _ => String::new(),
    };
    let result = match &step.result {
        StepResult::Done => Cell::painted("done", Paint::Good),
        StepResult::Running => Cell::painted(format!("running for {}", age(step.started, now)), Paint::Caution),
        StepResult::Failed(_) => Cell::painted(counted("failed", step, now), Paint::Bad),
        StepResult::Unknown(_) => Cell::painted(counted("outcome unknown", step, now), Paint::Bad),
    };
    vec![
        age(step.started, now).into(),
        words::step(step.kind).into(),
        step.subject.as_str().into(),
        took.into(),
        result,
    ]
}

fn counted(word: &str, step: &StepRecord, now: Timestamp) -> String {
    format!("{word} {}", words::repeated(step, now)).trim_end().to_owned()
}

fn detail(step: &StepRecord) -> Option<String> {
    match &step.result {
        StepResult::Failed(detail) | StepResult::Unknown(detail) => Some(clean(detail)).filter(|d| !d.is_empty()),
        StepResult::Done | StepResult::Running => None,
    }
}

#[cfg(test)]
mod tests {
    use model::timeline::StepKind;

    use super::*;
    use crate::explain::tests::{at, step};

    #[test]
    fn rounds_are_folded() {
        let mut steps = vec![step(StepKind::Queued, "file", 0, 0, StepResult::Done)];
        for round in 0..6 {
            let t = 10 + round * 10;
            steps.push(step(StepKind::Create, "app", t, t + 1, StepResult::Done));
            steps.push(step(StepKind::Start, "app", t + 1, t + 2, StepResult::Done));
        }
        steps.push(step(StepKind::Ready, "", 90, 90, StepResult::Done));
        let parts = fold(&steps);
        let wanted = [
            Part::Step(0),
            Part::Step(1),
            Part::Step(2),
            Part::Rounds { steps: 2, rounds: 4, last: 10 },
            Part::Step(11),
            Part::Step(12),
            Part::Step(13),
        ];
        assert_eq!(parts, wanted);
        let wanted = "    \
    AGO    STEP    WHAT  TOOK  RESULT
    1m40s  queued  file        done
    1m30s  create  app   1.0s  done
    1m29s  start   app   1.0s  done
    … the same 2 steps 4× more, the last of these 48s ago
    40s    create  app   1.0s  done
    39s    start   app   1.0s  done
    10s    ready               done
";
        assert_eq!(text(&steps, at(100), Style::default()), wanted);
    }

    #[test]
    fn few_rounds_are_shown_as_they_are() {
        let steps: Vec<_> = (0..3).map(|t| step(StepKind::Start, "app", t, t, StepResult::Done)).collect();
        assert_eq!(fold(&steps), [Part::Step(0), Part::Step(1), Part::Step(2)]);
        assert!(fold(&[]).is_empty());
    }

    #[test]
    fn failures_and_running_steps() {
        let mut pull = step(StepKind::Pull, "app", 0, 88, StepResult::Failed("no such\nhost".into()));
        pull.count = 12;
        let mut sandbox = step(StepKind::Sandbox, "", 90, 0, StepResult::Running);
        sandbox.ended = None;
        let unknown = step(StepKind::Stop, "db", 89, 90, StepResult::Unknown("context deadline exceeded".into()));
        let wanted = "    \
    AGO    STEP        WHAT  TOOK  RESULT
    1m40s  image pull  app         failed 12× the same way, last 12s ago
             no such host
    11s    stop        db    1.0s  outcome unknown
             context deadline exceeded
    10s    sandbox                 running for 10s
";
        assert_eq!(text(&[pull, unknown, sandbox], at(100), Style::default()), wanted);
    }
}
