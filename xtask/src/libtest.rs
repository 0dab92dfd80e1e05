//! Reading what Rust's test runner says.

/// Counts of one or more runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tests that passed.
    pub(crate) passed: usize,
    /// Tests that failed.
    pub(crate) failed: usize,
    /// Tests that were ignored, or said themselves that they cannot run here.
    pub(crate) skipped: usize,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

/// What a log says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// The sums.
    pub(crate) counts: Counts,
    /// Names of failed tests.
    pub(crate) failures: Vec<String>,
    /// Reasons of skipped tests.
    pub(crate) skips: Vec<String>,
    /// Where tests panicked and what they said, shortened.
    pub(crate) panics: Vec<String>,
}

/// Of what a panic says, so many lines are shown.
const PANIC_LINES: usize = 8;

/// True for `test NAME ... `; some harnesses write the names as a column.
fn ran(line: &str, name: &str) -> bool {
    let rest = line.strip_prefix("test ").and_then(|l| l.strip_prefix(name));
    rest.is_some_and(|r| r.starts_with(' ') && r.trim_start().starts_with("... "))
}

/// Sums every `test result:` line of a `cargo test` log. A test that prints `skipped: WHY` has passed as far as the runner knows,
/// but counts as skipped.
pub(crate) fn read(log: &str) -> Report {
    let mut report = Report::default();
    let mut lines = log.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("thread '") && line.contains(" panicked at ") {
            let said: Vec<&str> = lines
                .clone()
                .take_while(|l| !l.starts_with("note: ") && !l.starts_with("stack backtrace:"))
                .take(PANIC_LINES)
                .collect();
            let said = said.iter().map(|l| l.chars().take(300).collect::<String>());
            report.panics.push(std::iter::once(line.to_owned()).chain(said).collect::<Vec<_>>().join("\n"));
        } else if let Some((_, sums)) = line.split_once("test result: ") {
            let number = |word: &str| {
                let words: Vec<&str> = sums.split_whitespace().collect();
                let at = words.iter().position(|w| w.trim_end_matches(';') == word);
                at.and_then(|i| words.get(i.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
            };
            report.counts += Counts { passed: number("passed"), failed: number("failed"), skipped: number("ignored") };
        } else if let Some(at) = line.find("skipped: ").filter(|at| *at == 0 || line.starts_with("test ")) {
            report.skips.push(line[at + "skipped: ".len()..].trim().to_owned());
        } else if let Some(name) = line.strip_prefix("    ").filter(|n| !n.contains(' ')) {
            // The list after `failures:`; a name comes once, whatever else is indented.
            if log.lines().any(|l| ran(l, name)) && !report.failures.iter().any(|f| f == name) {
                report.failures.push(name.to_owned());
            }
        }
    }
    let own = report.skips.len().min(report.counts.passed);
    report.counts.passed -= own;
    report.counts.skipped += own;
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_the_results() {
        let log = "
running 3 tests
test a::one ... ok
test a::two ... FAILED
test three ... ignored, needs root

failures:

---- a::two stdout ----
thread 'a::two' (7) panicked at a.rs:1:2:
assertion failed
    left: 1
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace

failures:
    a::two

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/smoke.rs
test four ... skipped: no cpuset controller
ok
test five ... ok
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s

running 2 tests
test six   ... ok
test seven ... FAILED

failures:

---- seven ----

failures:
    seven

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";
        let report = read(log);
        assert_eq!(report.counts, Counts { passed: 3, failed: 2, skipped: 2 });
        assert_eq!(report.failures, ["a::two", "seven"]);
        assert_eq!(report.skips, ["no cpuset controller"]);
        assert_eq!(report.panics, ["thread 'a::two' (7) panicked at a.rs:1:2:\nassertion failed\n    left: 1"]);
        assert_eq!(report.counts.to_string(), "3 passed, 2 failed, 2 skipped");
        assert_eq!(Counts { passed: 1, ..Counts::default() }.to_string(), "1 passed, 0 failed");
    }

    #[test]
    fn nothing_ran() {
        assert_eq!(read("error: could not compile"), Report::default());
    }
}
