//! Findings as text.

use model::report::{Finding, Severity};

use crate::table::{Paint, Style, clean, count};

/// One line a finding, its fix below it.
pub(crate) fn findings(findings: &[Finding], style: Style) -> String {
    let topics = findings.iter().map(|f| f.topic.chars().count()).max().unwrap_or_default();
    let mut out = String::new();
    for f in findings {
        let (mark, paint) = match f.severity {
            Severity::Ok => ("ok   ", Paint::Good),
            Severity::Warning => ("warn ", Paint::Caution),
            Severity::Error => ("ERROR", Paint::Bad),
        };
        let mark = style.paint(paint, mark);
        out.push_str(&format!("{mark}  {:<topics$}  {}\n", f.topic, clean(&f.message)));
        if !f.fix.is_empty() {
            // Below the message: 5 for the mark and 2 for each gap.
            let indent = " ".repeat(5 + 2 + topics + 2);
            for line in format!("fix: {}", f.fix).lines() {
                out.push_str(&format!("{indent}{}\n", style.paint(Paint::Strong, line)));
            }
        }
    }
    out
}

/// The last line.
pub(crate) fn summary(findings: &[Finding], style: Style) -> String {
    let of = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let (errors, warnings) = (of(Severity::Error), of(Severity::Warning));
    let (paint, verdict) = match (errors, warnings) {
        (0, 0) => (Paint::Good, "this host is fit to be a node"),
        (0, _) => (Paint::Caution, "this host can be a node"),
        _ => (Paint::Bad, "this host is not fit to be a node yet"),
    };
    let counts = format!("{}, {}, {} ok", count(errors, "error"), count(warnings, "warning"), of(Severity::Ok));
    format!("{}: {counts}\n", style.paint(paint, verdict))
}

#[cfg(test)]
mod tests {
    use super::super::{error, ok, warn};
    use super::*;

    #[test]
    fn text() {
        let all = [
            ok("swap", "off"),
            warn("clock", "nothing keeps it", "install chrony"),
            error("runtime socket", "x: not\nthere", "start it:\nsystemctl start containerd"),
        ];
        let wanted = "\
ok     swap            off
warn   clock           nothing keeps it
                       fix: install chrony
ERROR  runtime socket  x: not there
                       fix: start it:
                       systemctl start containerd
";
        assert_eq!(findings(&all, Style::default()), wanted);
        assert_eq!(
            summary(&all, Style::default()),
            "this host is not fit to be a node yet: 1 error, 1 warning, 1 ok\n"
        );
        assert_eq!(summary(&all[..2], Style::default()), "this host can be a node: 0 errors, 1 warning, 1 ok\n");
        assert_eq!(summary(&all[..1], Style::default()), "this host is fit to be a node: 0 errors, 0 warnings, 1 ok\n");
        let coloured = findings(&all, Style { color: true, width: None });
        assert!(coloured.starts_with("\x1b[32mok   \x1b[0m  swap"));
    }
}
