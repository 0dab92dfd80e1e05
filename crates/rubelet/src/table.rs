//! Text for people: columns, colours, ages. Colour and width only where a terminal is.

use std::io::IsTerminal;

use clap::ValueEnum;
use jiff::{SignedDuration, Timestamp};

/// `--color`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How text is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Style {
    /// With ANSI colours.
    pub(crate) color: bool,
    /// Columns of the terminal; None: not a terminal, nothing is cut.
    pub(crate) width: Option<usize>,
}

/// A colour, by what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Paint {
    Good,
    Caution,
    Bad,
    Strong,
    Faint,
}

impl Style {
    /// The style for standard output.
    pub(crate) fn of_stdout(choice: ColorChoice) -> Self {
        let out = std::io::stdout();
        let terminal = out.is_terminal();
        let set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
        let size = terminal.then(|| rustix::termios::tcgetwinsize(&out).ok());
        Self {
            color: match choice {
                ColorChoice::Auto => terminal && !dumb && !set("NO_COLOR"),
                ColorChoice::Always => true,
                ColorChoice::Never => false,
            },
            // A serial console does not know its size.
            width: size.flatten().map(|s| usize::from(s.ws_col)).filter(|&w| w > 0),
        }
    }

    /// The text in this colour.
    pub(crate) fn paint(self, paint: Paint, text: &str) -> String {
        let code = match paint {
            Paint::Good => "32",
            Paint::Caution => "33",
            Paint::Bad => "31",
            Paint::Strong => "1",
            Paint::Faint => "2",
        };
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    text: String,
    paint: Option<Paint>,
}

impl Cell {
    /// A coloured cell.
    pub(crate) fn painted(text: impl AsRef<str>, paint: Paint) -> Self {
        Self { text: clean(text.as_ref()), paint: Some(paint) }
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: clean(text.as_ref()), paint: None }
    }
}

/// Columns below a head, two spaces apart, every line behind `indent`. On a terminal the last column is cut to its width.
pub(crate) fn columns(indent: &str, head: &[&str], rows: &[Vec<Cell>], style: Style) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.text.chars().count());
        }
    }
    let mut out = String::new();
    let head: Vec<Cell> = head.iter().map(|h| Cell::painted(h, Paint::Faint)).collect();
    for row in std::iter::once(&head).chain(rows) {
        line(&mut out, indent, row, &widths, style);
    }
    out
}

fn line(out: &mut String, indent: &str, row: &[Cell], widths: &[usize], style: Style) {
    // What stands after the last filled cell would only be trailing space.
    let filled = row.iter().rposition(|c| !c.text.is_empty()).map_or(0, |i| i + 1);
    let mut used = indent.chars().count();
    out.push_str(indent);
    for (i, (cell, width)) in row.iter().zip(widths).take(filled).enumerate() {
        let text = match style.width {
            Some(all) if i + 1 == widths.len() => cut(&cell.text, all.saturating_sub(used)),
            _ => cell.text.clone(),
        };
        let shown = text.chars().count();
        out.push_str(&cell.paint.map_or_else(|| text.clone(), |p| style.paint(p, &text)));
        if i + 1 < filled {
            out.push_str(&" ".repeat(width.saturating_sub(shown) + 2));
        }
        used += width + 2;
    }
    out.push('\n');
}

/// At most this many characters, the last being `…` when some are left out; a cell keeps 8 on any terminal.
fn cut(text: &str, width: usize) -> String {
    let width = width.max(8);
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 1).chain(['…']).collect()
}

/// One line without control characters: messages of the runtime and of containers may hold any.
pub(crate) fn clean(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| c.is_control()).map(str::trim).filter(|w| !w.is_empty()).collect();
    words.join(" ")
}

/// A span of whole seconds in at most two units: `12s`, `3m12s`, `14m`, `5h3m`, `4d2h`, `40d`.
pub(crate) fn span(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if big >= 10 || small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => two(seconds / 60, "m", seconds % 60, "s"),
        3_600..86_400 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "m"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
    }
}

/// How long something took: as [`span`], with parts of a second below 10 s (`4ms`, `1.2s`).
pub(crate) fn took(duration: SignedDuration) -> String {
    match duration.as_millis().max(0) {
        ms @ 0..1_000 => format!("{ms}ms"),
        ms @ 1_000..10_000 => format!("{}.{}s", ms / 1_000, ms % 1_000 / 100),
        _ => span(duration),
    }
}

/// How long ago; zero for a moment to come.
pub(crate) fn age(then: Timestamp, now: Timestamp) -> String {
    span(now.duration_since(then))
}

/// `1 pod`, `2 pods`.
pub(crate) fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// An error and everything that caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some errors repeat their source in their own text.
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans() {
        for (seconds, text) in [
            (-5, "0s"),
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (192, "3m12s"),
            (14 * 60 + 5, "14m"),
            (3_600, "1h"),
            (5 * 3_600 + 3 * 60 + 9, "5h3m"),
            (86_400 * 4 + 7_200, "4d2h"),
            (86_400 * 40 + 7_200, "40d"),
        ] {
            assert_eq!(span(SignedDuration::from_secs(seconds)), text);
        }
        for (ms, text) in [(0, "0ms"), (4, "4ms"), (999, "999ms"), (1_250, "1.2s"), (9_999, "9.9s"), (10_400, "10s")] {
            assert_eq!(took(SignedDuration::from_millis(ms)), text);
        }
    }

    fn table(style: Style) -> String {
        let rows = vec![
            vec!["web".into(), Cell::painted("Running", Paint::Good), "".into()],
            vec!["db".into(), "X".into(), "no such\nimage: \x1b[31mbad\tname".into()],
        ];
        columns("", &["NAME", "STATUS", "ERROR"], &rows, style)
    }

    #[test]
    fn columns_stand_below_each_other() {
        let plain = "\
NAME  STATUS   ERROR
web   Running
db    X        no such image: [31mbad name
";
        assert_eq!(table(Style::default()), plain);
        let narrow = table(Style { color: false, width: Some(25) });
        assert_eq!(narrow.lines().last(), Some("db    X        no such i…"));
        assert!(narrow.lines().all(|l| l.chars().count() <= 25));
    }

    #[test]
    fn colours_do_not_shift_columns() {
        let coloured = table(Style { color: true, width: None });
        assert_eq!(coloured.lines().nth(1), Some("web   \x1b[32mRunning\x1b[0m"));
        assert!(coloured.starts_with("\x1b[2mNAME\x1b[0m  "));
    }
}
