//! The message that a container leaves behind: its file, else the end of its log; and the lines of that log.

use std::str::FromStr;

use jiff::Timestamp;

/// Bytes that are kept of the termination message file: its end.
pub const MESSAGE_MAX: usize = 4096;
/// Bytes that are kept of the log with `FallbackToLogsOnError`.
pub const LOG_MAX: usize = 2048;
/// Lines that are kept of the log with `FallbackToLogsOnError`.
pub const LOG_LINES_MAX: usize = 80;

/// Where a line was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One line of a container log in the CRI's format: `TIME STREAM TAGS TEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// When.
    pub time: Timestamp,
    /// Where.
    pub stream: LogStream,
    /// The text; with its newline unless it is a part (tag `P`) of a longer line.
    pub text: &'a [u8],
}

/// Reads a line, its newline included.
///
/// # Errors
/// Says which part is missing.
pub fn parse_line(line: &[u8]) -> Result<LogLine<'_>, &'static str> {
    let (time, rest) = cut(line).ok_or("timestamp is not found")?;
    let time = std::str::from_utf8(time).ok().and_then(|t| Timestamp::from_str(t).ok());
    let time = time.ok_or("unexpected timestamp format")?;
    let (stream, rest) = cut(rest).ok_or("stream type is not found")?;
    let stream = match stream {
        b"stdout" => LogStream::Stdout,
        b"stderr" => LogStream::Stderr,
        _ => return Err("unexpected stream type"),
    };
    let (tags, text) = cut(rest).ok_or("log tag is not found")?;
    let partial = tags.split(|b| *b == b':').next() == Some(b"P");
    let text = if partial { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
    Ok(LogLine { time, stream, text })
}

fn cut(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|b| *b == b' ')?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

/// What [`log_tail`] makes of the end of a log file: the text of at most [`LOG_LINES_MAX`] lines, of that the last [`LOG_MAX`] bytes.
/// `log` is the file or its end; a first line that was cut in two does not parse and is left out, as other broken lines are. A line
/// without newline does not count against the lines.
pub fn log_tail(log: &[u8]) -> Vec<u8> {
    let mut newlines = 0;
    let start = log.iter().rposition(|b| {
        newlines += usize::from(*b == b'\n');
        newlines > LOG_LINES_MAX
    });
    let lines = &log[start.map_or(0, |at| at + 1)..];
    let text: Vec<u8> = lines
        .split_inclusive(|b| *b == b'\n')
        .filter_map(|line| Some(parse_line(line).ok()?.text))
        .take(LOG_LINES_MAX)
        .flatten()
        .copied()
        .collect();
    last(&text, LOG_MAX).to_vec()
}

/// What was found at the place of the termination message file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageFile {
    /// There is none (no path configured, not mounted, or the file is gone).
    Absent,
    /// Its content, or at least its last [`MESSAGE_MAX`] bytes.
    Content(Vec<u8>),
    /// It cannot be read: host path and error.
    Unreadable(String, String),
}

/// True when the log must be asked: policy `FallbackToLogsOnError`, the container failed, it did run, and its file says nothing.
pub fn wants_log(policy: &str, exit_code: i32, reason: &str, file: &MessageFile) -> bool {
    let nothing = match file {
        MessageFile::Absent => true,
        MessageFile::Content(content) => content.is_empty(),
        MessageFile::Unreadable(..) => false,
    };
    policy == "FallbackToLogsOnError" && exit_code != 0 && reason != "ContainerCannotRun" && nothing
}

/// The message of a terminated container: the runtime's, then the container's own. `log`: what [`log_tail`] gave when [`wants_log`],
/// or why it could not be read.
pub fn message(runtime: &str, file: &MessageFile, log: Option<Result<&[u8], &str>>) -> String {
    let own = match (log, file) {
        (Some(Ok(text)), _) => String::from_utf8_lossy(text).into_owned(),
        (Some(Err(error)), _) => format!("Error on reading termination message from logs: {error}"),
        (None, MessageFile::Absent) => String::new(),
        (None, MessageFile::Content(content)) => String::from_utf8_lossy(last(content, MESSAGE_MAX)).into_owned(),
        (None, MessageFile::Unreadable(path, error)) => format!("Error on reading termination log {path}: {error}"),
    };
    match (runtime.is_empty(), own.is_empty()) {
        (_, true) => runtime.into(),
        (true, false) => own,
        (false, false) => format!("{runtime}: {own}"),
    }
}

/// The last `max` bytes.
fn last(bytes: &[u8], max: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(max)..]
}

/// Bytes that all termination messages of a pod may have together.
const MAX_ALL: usize = 12 * 1024;

/// A message cut to the share that a pod of `containers` containers (of all kinds) leaves it in the status.
pub fn fit_status(message: &str, containers: usize) -> &str {
    let mut end = message.len().min(MAX_ALL / containers.max(1));
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let line = parse_line(b"2016-10-06T00:17:09.669794202Z stdout F content 1\n").expect("line");
        assert_eq!((line.stream, line.text), (LogStream::Stdout, &b"content 1\n"[..]));
        assert_eq!(line.time.to_string(), "2016-10-06T00:17:09.669794202Z");
        assert_eq!(parse_line(b"2016-10-06T00:17:09.1+02:00 stderr P:x a b\n").expect("line").text, b"a b");
        assert_eq!(parse_line(b"2016-10-06T00:17:09Z stdout F \n").expect("line").text, b"\n");
        for (line, fault) in [
            (&b"x"[..], "timestamp is not found"),
            (b"now stdout F x", "unexpected timestamp format"),
            (b"2016-10-06T00:17:09Z stdout", "stream type is not found"),
            (b"2016-10-06T00:17:09Z in F x", "unexpected stream type"),
            (b"2016-10-06T00:17:09Z stdout F", "log tag is not found"),
        ] {
            assert_eq!(parse_line(line), Err(fault));
        }
    }

    #[test]
    fn tail_of_a_log() {
        let line = |text: &str| format!("2016-10-06T00:17:09Z stdout F {text}\n");
        let log: String = (0..100).map(|i| line(&i.to_string())).collect();
        let want: String = (20..100).map(|i| format!("{i}\n")).collect();
        assert_eq!(log_tail(log.as_bytes()), want.as_bytes());
        // The end of a file that begins within a line, and a line that is not finished yet: it is the 81st and not shown.
        assert_eq!(log_tail(&log.as_bytes()[5..]), want.as_bytes());
        assert_eq!(log_tail(format!("{log}2016-10-06T00:17:09Z stdout F x").as_bytes()), want.as_bytes());
        assert_eq!(log_tail(format!("{}broken\n{}", line("a"), line("b")).as_bytes()), b"a\nb\n");
        let long = line(&"y".repeat(3000));
        assert_eq!(log_tail(format!("{}{long}", line("a")).as_bytes()).len(), LOG_MAX);
        assert_eq!(log_tail(b""), b"");
        let partial = "2016-10-06T00:17:09Z stdout P ab\n2016-10-06T00:17:09Z stdout F c\n";
        assert_eq!(log_tail(partial.as_bytes()), b"abc\n");
    }

    #[test]
    fn messages() {
        let content = |s: &str| MessageFile::Content(s.into());
        for (runtime, file, log, want) in [
            ("", MessageFile::Absent, None, ""),
            ("oom", MessageFile::Absent, None, "oom"),
            ("", content("bye"), None, "bye"),
            ("oom", content("bye"), None, "oom: bye"),
            ("", content(""), Some(Ok(&b"log\n"[..])), "log\n"),
            ("", MessageFile::Absent, Some(Err("gone")), "Error on reading termination message from logs: gone"),
            (
                "",
                MessageFile::Unreadable("/p".into(), "denied".into()),
                None,
                "Error on reading termination log /p: denied",
            ),
        ] {
            assert_eq!(message(runtime, &file, log), want);
        }
        let long = "a".repeat(10) + &"b".repeat(4096);
        assert_eq!(message("", &content(&long), None), "b".repeat(4096));
        assert_eq!(fit_status(&"é".repeat(9000), 5), "é".repeat(1228));
    }

    #[test]
    fn fall_back_to_the_log_only_after_a_failure() {
        let policy = "FallbackToLogsOnError";
        let empty = MessageFile::Content(Vec::new());
        for (policy, code, reason, file, want) in [
            (policy, 1, "Error", &empty, true),
            (policy, 137, "OOMKilled", &MessageFile::Absent, true),
            (policy, 0, "Completed", &empty, false),
            (policy, 128, "ContainerCannotRun", &empty, false),
            (policy, 1, "Error", &MessageFile::Content(b"x".to_vec()), false),
            (policy, 1, "Error", &MessageFile::Unreadable(String::new(), String::new()), false),
            ("File", 1, "Error", &empty, false),
        ] {
            assert_eq!(wants_log(policy, code, reason, file), want);
        }
    }
}
