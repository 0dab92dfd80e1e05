//! The text format of Prometheus, version 0.0.4.

use std::fmt::Write;

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only ever grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// The value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    /// A number of something.
    Whole(u64),
    /// One that may be below 0.
    Signed(i64),
    /// Seconds, counted in the given part of one: a time in ns is `Time(ns, 1_000_000_000)`.
    Time(u64, u64),
}

impl Value {
    /// A time in ns.
    pub(crate) fn ns(ns: u64) -> Self {
        Self::Time(ns, 1_000_000_000)
    }

    /// A time in µs.
    pub(crate) fn us(us: u64) -> Self {
        Self::Time(us, 1_000_000)
    }

    /// A time in ms.
    pub(crate) fn ms(ms: u64) -> Self {
        Self::Time(ms, 1_000)
    }

    fn write(self, text: &mut String) {
        let mut digits = itoa::Buffer::new();
        match self {
            Self::Whole(number) => text.push_str(digits.format(number)),
            Self::Signed(number) => text.push_str(digits.format(number)),
            Self::Time(time, parts) => {
                text.push_str(digits.format(time / parts));
                if !time.is_multiple_of(parts) {
                    // Its leading zeros come with the 1 in front, which is left out.
                    let fraction = digits.format(parts + time % parts);
                    text.push('.');
                    text.push_str(fraction[1..].trim_end_matches('0'));
                }
            }
        }
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
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
    pub(crate) fn sample(&mut self, labels: &[&str], value: impl Into<Value>, time: Option<i64>) {
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
        text.push(' ');
        value.into().write(text);
        if let Some(time) = time {
            text.push(' ');
            text.push_str(itoa::Buffer::new().format(time));
        }
        text.push('\n');
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page() {
        let mut page = Page::default();
        let mut family = page.family("a_total", Kind::Counter, "Some.");
        family.sample(&[&labels(&[("x", "1"), ("y", "q\"\\\n")]), "", "z=\"2\""], Value::ms(1500), Some(12));
        family.sample(&[], 3, None);
        page.family("never", Kind::Gauge, "None.");
        assert_eq!(
            page.into_text(),
            "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"1\",y=\"q\\\"\\\\\\n\",z=\"2\"} 1.5 12\na_total 3\n"
        );
    }

    #[test]
    fn values() {
        for (value, text) in [
            (Value::Whole(0), "0"),
            (Value::Whole(u64::MAX), "18446744073709551615"),
            (Value::Signed(-1), "-1"),
            (Value::ns(0), "0"),
            (Value::ns(1), "0.000000001"),
            (Value::ns(5_000_000_000), "5"),
            (Value::ns(12_345_678_900), "12.3456789"),
            (Value::us(1_050_000), "1.05"),
            (Value::ms(999), "0.999"),
            (Value::Time(u64::MAX, 1_000_000_000), "18446744073.709551615"),
        ] {
            let mut page = String::new();
            value.write(&mut page);
            assert_eq!(page, text);
        }
    }

    proptest::proptest! {
        #[test]
        fn times_are_read_as_they_were(ns: u64) {
            let mut page = String::new();
            Value::ns(ns).write(&mut page);
            let (seconds, fraction) = page.split_once('.').unwrap_or((&page, ""));
            let fraction: u64 = format!("{fraction:0<9}").parse().unwrap();
            proptest::prop_assert_eq!(seconds.parse::<u64>().unwrap() * 1_000_000_000 + fraction, ns);
        }
    }
}
