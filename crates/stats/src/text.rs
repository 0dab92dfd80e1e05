//! The text format of Prometheus, version 0.0.4.

use std::fmt::{Display, Write};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only ever grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A page that is being written.
#[derive(Debug, Default)]
pub(crate) struct Page {
    text: String,
}

/// Writes the samples of one metric; its head comes with the first.
#[derive(Debug)]
pub(crate) struct Family<'p> {
    page: &'p mut Page,
    name: &'static str,
    kind: Kind,
    help: &'static str,
    begun: bool,
}

impl Page {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { text: String::with_capacity(bytes) }
    }

    pub(crate) fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) -> Family<'_> {
        Family { page: self, name, kind, help, begun: false }
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

impl Family<'_> {
    /// One sample; `labels` as [`label`] makes them, joined by commas; `time` in ms since the epoch.
    pub(crate) fn sample(&mut self, labels: &[&str], value: impl Display, time: Option<i64>) {
        let text = &mut self.page.text;
        if !std::mem::replace(&mut self.begun, true) {
            let kind = match self.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            let _ = writeln!(text, "# HELP {0} {1}\n# TYPE {0} {kind}", self.name, self.help);
        }
        text.push_str(self.name);
        let mut labels = labels.iter().filter(|l| !l.is_empty());
        if let Some(first) = labels.next() {
            text.push('{');
            text.push_str(first);
            for label in labels {
                text.push(',');
                text.push_str(label);
            }
            text.push('}');
        }
        let _ = match time {
            Some(time) => writeln!(text, " {value} {time}"),
            None => writeln!(text, " {value}"),
        };
    }
}

/// A label with its value escaped.
pub(crate) fn label(name: &str, value: &str) -> String {
    let mut label = String::with_capacity(name.len() + value.len() + 3);
    label.push_str(name);
    label.push_str("=\"");
    for c in value.chars() {
        match c {
            '\\' => label.push_str("\\\\"),
            '"' => label.push_str("\\\""),
            '\n' => label.push_str("\\n"),
            c => label.push(c),
        }
    }
    label.push('"');
    label
}

/// Several labels in one piece.
pub(crate) fn labels(all: &[(&str, &str)]) -> String {
    all.iter().map(|(name, value)| label(name, value)).collect::<Vec<_>>().join(",")
}

/// Seconds of a time in ns.
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page() {
        let mut page = Page::default();
        let mut family = page.family("a_total", Kind::Counter, "Some.");
        family.sample(&[&labels(&[("x", "1"), ("y", "q\"\\\n")]), "", "z=\"2\""], 1.5, Some(12));
        family.sample(&[], 3, None);
        page.family("never", Kind::Gauge, "None.");
        assert_eq!(
            page.into_text(),
            "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"1\",y=\"q\\\"\\\\\\n\",z=\"2\"} 1.5 12\na_total 3\n"
        );
    }
}
