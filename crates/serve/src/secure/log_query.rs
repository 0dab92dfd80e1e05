//! The node log query (KEP-2258): logs of services out of the journal or from files below `/var/log`, or one file.
//!
//! | parameter | |
//! |---|---|
//! | `query` | a file's path below `/var/log` (with a slash), or up to four services |
//! | `sinceTime`, `untilTime`, `boot`, `tailLines`, `pattern` | only for services whose logs are in the journal |
//!
//! The journal is read by `journalctl`, whose output is passed on as it comes; a client that goes, and the end of [`QUERY`], end it too. All texts
//! are the Go kubelet's.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use host::logs::tree::{LogEntry, LogTree};
use http::StatusCode;
use jiff::Timestamp;
use regex_syntax::ast::{self, ErrorKind};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::route::first;
use super::system_logs::{QUERY, pieces};

/// Services in one query.
const SERVICES: usize = 4;
/// Bytes of a service's name.
const NAME: usize = 256;
const MAX_LINES: i64 = 100_000;
const PIECE: usize = 16 << 10;

type Pieces = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

/// How a query is answered.
pub(crate) enum Answered {
    /// By this file below `/var/log`.
    File(String),
    /// By this error.
    Refused(StatusCode, String),
    /// By text that is still being made.
    Text(Pieces),
}

/// A query that has the right form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Query {
    files: Vec<String>,
    services: Vec<String>,
    since: Option<Timestamp>,
    until: Option<(String, Timestamp)>,
    boot: Option<i64>,
    tail: Option<i64>,
    pattern: Option<String>,
}

/// True when a query is meant, and not the list of the directory.
pub(crate) fn is_query(parameters: &[(String, String)]) -> bool {
    first(parameters, "query").is_some()
        || ["sinceTime", "untilTime", "boot", "tailLines", "pattern"]
            .iter()
            .any(|key| first(parameters, key).is_some_and(|v| !v.is_empty()))
}

/// Answers a query. Files are looked at on threads where that may block.
pub(crate) async fn answer(tree: &Arc<LogTree>, parameters: &[(String, String)]) -> Answered {
    let query = match Query::parse(parameters) {
        Ok(query) => query,
        Err(wrong) => return Answered::Refused(StatusCode::BAD_REQUEST, joined(&wrong)),
    };
    let (seen, asked) = (tree.clone(), query.clone());
    let wrong = tokio::task::spawn_blocking(move || asked.check(&|path| seen.open(path).map(drop))).await;
    let wrong = wrong.unwrap_or_else(|e| vec![e.to_string()]);
    if !wrong.is_empty() {
        return Answered::Refused(StatusCode::NOT_ACCEPTABLE, joined(&wrong));
    }
    match query.files.into_iter().next() {
        Some(file) => Answered::File(file),
        None => Answered::Text(services(tree.clone(), Query { files: Vec::new(), ..query }).await),
    }
}

/// Several errors as Go lists them.
fn joined(wrong: &[String]) -> String {
    match wrong {
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

impl Query {
    /// # Errors
    /// Every value that is not of its type.
    fn parse(parameters: &[(String, String)]) -> Result<Self, Vec<String>> {
        let mut query = Self::default();
        let mut wrong = Vec::new();
        let value = |key: &str| first(parameters, key).filter(|v| !v.is_empty());
        let asked: Vec<&str> = parameters.iter().filter(|(k, _)| k == "query").map(|(_, v)| v.as_str()).collect();
        for name in asked.iter().filter(|name| !name.trim().is_empty()) {
            let list = if name.contains(['/', '\\']) { &mut query.files } else { &mut query.services };
            list.push((*name).to_owned());
        }
        if !asked.is_empty() && query.files.is_empty() && query.services.is_empty() {
            wrong.push(format!("query: Invalid value: {}: may not be empty", list(&asked)));
        }
        let mut time = |key: &str| {
            let text = value(key)?;
            let time = text.parse::<Timestamp>();
            if time.is_err() {
                wrong.push(format!("{key}: Invalid value: {text:?}: invalid time format"));
            }
            Some((text.to_owned(), time.ok()?))
        };
        query.since = time("sinceTime").map(|(_, time)| time);
        query.until = time("untilTime");
        let mut number = |key: &str| {
            let text = value(key)?;
            let number = number(text);
            if let Err(why) = number {
                wrong.push(format!("{key}: Invalid value: {text:?}: strconv.Atoi: parsing {text:?}: {why}"));
            }
            number.ok()
        };
        query.boot = number("boot");
        query.tail = number("tailLines");
        query.pattern = value("pattern").map(str::to_owned);
        if wrong.is_empty() { Ok(query) } else { Err(wrong) }
    }

    fn has_options(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.boot.is_some()
            || self.tail.is_some()
            || self.pattern.is_some()
    }

    /// Everything that is out of range; `open` tries a file.
    fn check(&self, open: &dyn Fn(&str) -> io::Result<()>) -> Vec<String> {
        let mut wrong = Vec::new();
        match (self.files.as_slice(), self.services.as_slice()) {
            ([], []) => wrong.push("query: Required value: cannot be empty with options".to_owned()),
            ([], services) => {
                if services.len() > SERVICES {
                    wrong.push(format!("query: Too many: {}: must have at most {SERVICES} items", services.len()));
                }
                for name in services {
                    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"@_:.-".contains(&b);
                    if name.len() >= NAME {
                        wrong.push(format!("query: Invalid value: {name:?}: length must be less than {NAME}"));
                    } else if !name.bytes().all(allowed) {
                        wrong.push(format!("query: Invalid value: {name:?}: input contains unsupported characters"));
                    }
                }
            }
            ([file], []) if !self.has_options() => {
                if let Err(e) = opened(file, open) {
                    wrong.push(format!("query: Invalid value: {}: statat {file}: {e}", list(&[file])));
                }
            }
            ([_], []) => {
                wrong.push(format!("query: Invalid value: {}: cannot specify file with options", list(&self.files)))
            }
            (files, []) => {
                wrong.push(format!("query: Invalid value: {}: cannot specify more than one file", list(files)))
            }
            (files, services) => {
                let both = format!("[{}], [{}]", files.join(" "), services.join(" "));
                wrong.push(format!("query: Invalid value: {both:?}: cannot specify a file and service"));
            }
        }
        if let (Some(since), Some((text, until))) = (&self.since, &self.until)
            && until < since
        {
            wrong.push(format!("untilTime: Invalid value: {text:?}: must be after `sinceTime`"));
        }
        if let Some(boot) = self.boot.filter(|b| *b > 0) {
            wrong.push(format!("boot: Invalid value: {boot}: must be less than 1"));
        }
        if let Some(tail) = self.tail.filter(|t| !(0..=MAX_LINES).contains(t)) {
            wrong.push(format!("tailLines: Invalid value: {tail}: must be between 0 and {MAX_LINES}, inclusive"));
        }
        if let Some(pattern) = &self.pattern
            && let Some(why) = regexp_error(pattern)
        {
            wrong.push(format!("pattern: Invalid value: {pattern:?}: error parsing regexp: {why}"));
        }
        wrong
    }

    /// What `journalctl` is to do for these services.
    fn arguments(&self, services: &[String]) -> Vec<String> {
        // With the zone: without, journalctl takes the host's.
        let stamp = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        let mut arguments: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"].map(str::to_owned).to_vec();
        arguments.extend(self.since.map(|t| format!("--since={}", stamp(t))));
        arguments.extend(self.until.as_ref().map(|(_, t)| format!("--until={}", stamp(*t))));
        if let Some(tail) = self.tail {
            arguments.extend(["--pager-end".to_owned(), format!("--lines={tail}")]);
        }
        arguments.extend(services.iter().map(|s| format!("--unit={s}")));
        arguments.extend(self.pattern.iter().map(|p| format!("--grep={p}")));
        if let Some(boot) = self.boot {
            arguments.extend(["--boot".to_owned(), boot.to_string()]);
        }
        arguments
    }
}

/// What must hold for every query: journalctl takes nothing of a caller's for an option of its own.
pub(crate) fn check_arguments(parameters: &[(String, String)]) {
    let Ok(query) = Query::parse(parameters) else { return };
    if !query.check(&|_| Ok(())).is_empty() {
        return;
    }
    const OPTIONS: [&str; 10] = [
        "--utc",
        "--no-pager",
        "--output=short-precise",
        "--pager-end",
        "--boot",
        "--since=",
        "--until=",
        "--lines=",
        "--unit=",
        "--grep=",
    ];
    let known = |a: &str| OPTIONS.iter().any(|o| a == *o || (o.ends_with('=') && a.starts_with(o)));
    for argument in query.arguments(&query.services) {
        let boot = query.boot.is_some_and(|b| argument == b.to_string());
        assert!(known(&argument) || boot, "{argument:?} of {query:?}");
    }
}

/// A list as Kubernetes' errors show it.
fn list<S: serde::Serialize>(items: &[S]) -> String {
    serde_json::to_string(items).unwrap_or_default()
}

fn number(text: &str) -> Result<i64, &'static str> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("invalid syntax");
    }
    text.parse().map_err(|_| "value out of range")
}

/// Tries a file; why it cannot be shown, in Go's words.
fn opened(path: &str, open: &dyn Fn(&str) -> io::Result<()>) -> Result<(), String> {
    open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied if e.raw_os_error().is_some() => "permission denied".to_owned(),
        io::ErrorKind::NotADirectory => "not a directory".to_owned(),
        _ => e.to_string(),
    })
}

/// Why Go's regexp library refuses a pattern; None: it does not, or for a reason that only journalctl's library can tell.
fn regexp_error(pattern: &str) -> Option<String> {
    let error = ast::parse::Parser::new().parse(pattern).err()?;
    let at = |range: std::ops::Range<usize>| pattern.get(range).unwrap_or_default();
    let (start, end) = (error.span().start.offset, error.span().end.offset);
    Some(match error.kind() {
        ErrorKind::ClassUnclosed => format!("missing closing ]: `{}`", at(start..pattern.len())),
        ErrorKind::ClassRangeInvalid => format!("invalid character class range: `{}`", at(start..end)),
        ErrorKind::GroupUnclosed => format!("missing closing ): `{pattern}`"),
        ErrorKind::GroupUnopened => format!("unexpected ): `{pattern}`"),
        ErrorKind::GroupNameEmpty
        | ErrorKind::GroupNameInvalid
        | ErrorKind::GroupNameUnexpectedEof
        | ErrorKind::GroupNameDuplicate { .. } => {
            let group = pattern[..start.min(pattern.len())].rfind("(?").unwrap_or(start);
            format!("invalid named capture: `{}`", at(group..pattern.len()))
        }
        ErrorKind::RepetitionMissing => {
            format!("missing argument to repetition operator: `{}`", at(start..end.max(start + 1)))
        }
        ErrorKind::RepetitionCountInvalid => {
            let brace = pattern[..start.min(pattern.len())].rfind('{').unwrap_or(start);
            let close = pattern[brace..].find('}').map_or(pattern.len(), |n| brace + n + 1);
            format!("invalid repeat count: `{}`", at(brace..close))
        }
        ErrorKind::EscapeUnexpectedEof => "trailing backslash at end of expression: ``".to_owned(),
        ErrorKind::EscapeUnrecognized | ErrorKind::UnsupportedBackreference => {
            format!("invalid escape sequence: `{}`", at(start..end))
        }
        ErrorKind::UnsupportedLookAround | ErrorKind::FlagUnrecognized | ErrorKind::FlagUnexpectedEof => {
            format!("invalid or unsupported Perl syntax: `{}`", at(start..end))
        }
        _ => return None,
    })
}

/// The logs of services: first what is in the journal, then files.
async fn services(tree: Arc<LogTree>, query: Query) -> Pieces {
    let until = Instant::now() + QUERY;
    let units = tokio::time::timeout_at(until, units()).await.unwrap_or_default();
    let in_journal = |name: &String| units.lines().any(|unit| unit.strip_suffix(".service") == Some(name));
    let (native, others): (Vec<String>, Vec<String>) = query.services.iter().cloned().partition(in_journal);
    let mut parts: Vec<Pieces> = Vec::new();
    let text = |text: String| -> Pieces { Box::pin(futures::stream::iter([Bytes::from(text)])) };
    if !native.is_empty() {
        parts.push(match journal(&query.arguments(&native)) {
            Ok((child, output)) => Box::pin(output_of(child, output, until)),
            Err(e) => {
                tracing::warn!(err = %e, "journalctl cannot be started");
                text("\nerror: journal output not available\n".to_owned())
            }
        });
    }
    if !others.is_empty() && query.has_options() {
        let others = others.join(" ");
        parts.push(text(format!(
            "\noptions present and query resolved to log files for [{others}]\ntry without specifying options\n"
        )));
    } else {
        for name in others {
            let tree = tree.clone();
            let asked = name.clone();
            let found = tokio::task::spawn_blocking(move || service_file(&tree, &asked)).await;
            parts.push(match found {
                Ok(Ok(Some((file, length)))) => pieces(file, length),
                Ok(Ok(None)) => text(format!("\nlog not found for {name}\n")),
                Ok(Err(why)) => text(format!("\nerror getting log for {name}: {why}\n")),
                Err(e) => text(format!("\nerror getting log for {name}: {e}\n")),
            });
        }
    }
    Box::pin(futures::stream::iter(parts).flatten())
}

/// A service's log file by the usual names.
fn service_file(tree: &LogTree, name: &str) -> Result<Option<(File, u64)>, String> {
    for path in [name.to_owned(), format!("{name}.log"), format!("{name}/{name}.log")] {
        match tree.open(&path) {
            Ok(LogEntry::File { file, length, .. }) => return Ok(Some((file, length))),
            Ok(LogEntry::Directory { .. }) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(e) => return Err(format!("openat {path}: {e}")),
        }
    }
    Ok(None)
}

/// The units that the journal has lines of, one a line; nothing without a journal.
async fn units() -> String {
    let mut command = Command::new("journalctl");
    command.args(["--field", "_SYSTEMD_UNIT"]).stdin(Stdio::null()).kill_on_drop(true);
    match command.output().await {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        _ => String::new(),
    }
}

/// Starts `journalctl`; both its outputs come through one pipe, in their order.
fn journal(arguments: &[String]) -> io::Result<(Child, Receiver)> {
    let (output, input) = io::pipe()?;
    let mut command = Command::new("journalctl");
    command.args(arguments).stdin(Stdio::null()).stdout(input.try_clone()?).stderr(input).kill_on_drop(true);
    let child = command.spawn()?;
    Ok((child, Receiver::from_owned_fd(OwnedFd::from(output))?))
}

/// What it prints until it ends, or `until`; it ends with the stream.
fn output_of(child: Child, output: Receiver, until: Instant) -> impl Stream<Item = Bytes> + Send {
    futures::stream::unfold((child, output), move |(child, mut output)| async move {
        let mut piece = vec![0; PIECE];
        match tokio::time::timeout_at(until, output.read(&mut piece)).await {
            Ok(Ok(n)) if n > 0 => {
                piece.truncate(n);
                Some((Bytes::from(piece), (child, output)))
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secure::route::parameters;

    /// The error of a query; empty: none. Files of this tree: `d/a.log`.
    fn wrong(query: &str) -> String {
        let open = |path: &str| match path {
            "d/a.log" => Ok(()),
            path if path.starts_with(['/', '.']) => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, "path escapes from parent"))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        match Query::parse(&parameters(Some(query))) {
            Ok(query) => joined(&query.check(&open)),
            Err(wrong) => format!("400 {}", joined(&wrong)),
        }
        .replace("[]", "")
    }

    /// Recorded from the Go kubelet 1.36.1.
    #[test]
    fn refusals_are_gos() {
        for (query, expected) in [
            ("query=a", ""),
            ("query=d/a.log", ""),
            ("query=a&boot=0&tailLines=%2B5&pattern=x.y&sinceTime=2020-01-01T00:00:00%2B02:00", ""),
            ("query=", r#"400 query: Invalid value: [""]: may not be empty"#),
            ("query=%20", r#"400 query: Invalid value: [" "]: may not be empty"#),
            ("query=&query=a", ""),
            ("query=../x", r#"query: Invalid value: ["../x"]: statat ../x: path escapes from parent"#),
            ("query=/d/a.log", r#"query: Invalid value: ["/d/a.log"]: statat /d/a.log: path escapes from parent"#),
            ("query=a/b", r#"query: Invalid value: ["a/b"]: statat a/b: no such file or directory"#),
            ("query=d%5Ca.log", r#"query: Invalid value: ["d\\a.log"]: statat d\a.log: no such file or directory"#),
            ("query=a/b&query=x", r#"query: Invalid value: "[a/b], [x]": cannot specify a file and service"#),
            ("query=a/b&query=c/d", r#"query: Invalid value: ["a/b","c/d"]: cannot specify more than one file"#),
            ("query=d/a.log&tailLines=1", r#"query: Invalid value: ["d/a.log"]: cannot specify file with options"#),
            ("boot=0", "query: Required value: cannot be empty with options"),
            ("query=a&query=b&query=c&query=d&query=e", "query: Too many: 5: must have at most 4 items"),
            ("query=a%20b", r#"query: Invalid value: "a b": input contains unsupported characters"#),
            ("query=a@b_c:d.e", ""),
            ("query=a*b", r#"query: Invalid value: "a*b": input contains unsupported characters"#),
            ("query=a&tailLines=-1", "tailLines: Invalid value: -1: must be between 0 and 100000, inclusive"),
            ("query=a&tailLines=100001", "tailLines: Invalid value: 100001: must be between 0 and 100000, inclusive"),
            (
                "query=a&tailLines=5_0",
                r#"400 tailLines: Invalid value: "5_0": strconv.Atoi: parsing "5_0": invalid syntax"#,
            ),
            (
                "query=a&boot=99999999999999999999",
                r#"400 boot: Invalid value: "99999999999999999999": strconv.Atoi: parsing "99999999999999999999": value out of range"#,
            ),
            ("query=a&boot=1", "boot: Invalid value: 1: must be less than 1"),
            ("query=a&untilTime=x", r#"400 untilTime: Invalid value: "x": invalid time format"#),
            (
                "query=a&sinceTime=2022-01-01T00:00:00Z&untilTime=2020-01-01T00:00:00Z",
                r#"untilTime: Invalid value: "2020-01-01T00:00:00Z": must be after `sinceTime`"#,
            ),
            (
                "query=a&sinceTime=x&boot=z",
                r#"400 [sinceTime: Invalid value: "x": invalid time format, boot: Invalid value: "z": strconv.Atoi: parsing "z": invalid syntax]"#,
            ),
            (
                "query=a/b&boot=1",
                r#"[query: Invalid value: ["a/b"]: cannot specify file with options, boot: Invalid value: 1: must be less than 1]"#,
            ),
        ] {
            assert_eq!(wrong(query), expected, "{query}");
        }
        let long = "a".repeat(NAME);
        let expected = format!("query: Invalid value: \"{long}\": length must be less than 256");
        assert_eq!(wrong(&format!("query={long}")), expected);
    }

    /// Recorded from the Go kubelet 1.36.1.
    #[test]
    fn patterns() {
        for (pattern, expected) in [
            ("a.*b|c{2,3}[^x]\\d", None),
            ("[", Some("missing closing ]: `[`")),
            ("(", Some("missing closing ): `(`")),
            (")", Some("unexpected ): `)`")),
            ("*", Some("missing argument to repetition operator: `*`")),
            ("a{2,1}", Some("invalid repeat count: `{2,1}`")),
            ("a(?=b)", Some("invalid or unsupported Perl syntax: `(?=`")),
            ("\\", Some("trailing backslash at end of expression: ``")),
            ("(?P<x", Some("invalid named capture: `(?P<x`")),
        ] {
            assert_eq!(regexp_error(pattern).as_deref(), expected, "{pattern}");
        }
    }

    #[test]
    fn what_journalctl_does() {
        let query = "query=a&sinceTime=2020-01-01T00:00:00%2B02:00&untilTime=2021-02-03T04:05:06Z&tailLines=3&boot=-2&pattern=x%20y";
        let query = Query::parse(&parameters(Some(query))).unwrap();
        let expected = [
            "--utc",
            "--no-pager",
            "--output=short-precise",
            "--since=2019-12-31 22:00:00 UTC",
            "--until=2021-02-03 04:05:06 UTC",
            "--pager-end",
            "--lines=3",
            "--unit=a",
            "--unit=b",
            "--grep=x y",
            "--boot",
            "-2",
        ];
        assert_eq!(query.arguments(&["a".into(), "b".into()]), expected);
        assert!(is_query(&parameters(Some("query="))) && is_query(&parameters(Some("boot=x"))));
        assert!(!is_query(&parameters(Some("foo=1&sinceTime="))) && !is_query(&[]));
    }

    proptest::proptest! {
        /// No query makes reading it fail, and no name leads to an option of journalctl.
        #[test]
        fn any_query(query in "\\PC{0,80}", pattern in "\\PC{0,20}") {
            wrong(&query);
            regexp_error(&pattern);
            if let Ok(query) = Query::parse(&parameters(Some(&query))) {
                let arguments = query.arguments(&query.services);
                proptest::prop_assert!(arguments.iter().filter(|a| !a.starts_with("--")).count() <= 1);
            }
        }
    }
}
