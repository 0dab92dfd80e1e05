//! `/logs/`: the files below `/var/log`, as Go's file server gives them; with `enableSystemLogQuery`, a query instead ([`log_query`]).
//!
//! A file goes out piece by piece as the client takes it, as containers' logs do.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::Stream;
use host::logs::tree::{LogEntry, LogTree};
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName, HeaderValue, IF_MODIFIED_SINCE,
    IF_UNMODIFIED_SINCE, LAST_MODIFIED, LOCATION, RANGE,
};
use http::{HeaderMap, Response, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::Outgoing;
use super::log_query;
use crate::reply::{HTML, Reply, ReplyBody, TEXT, error, nosniff, not_found, reply};

/// Bytes read at once.
const PIECE: usize = 64 << 10;
/// What tells text from other bytes.
const SNIFF: usize = 512;
/// Of a range that begins after the file's end.
const NO_OVERLAP: &str = "invalid range: failed to overlap";
/// Characters of a path that stay as they are in a link.
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b',')
    .remove(b'/')
    .remove(b':')
    .remove(b';')
    .remove(b'=')
    .remove(b'@');

/// Answers `GET /logs/PATH`.
pub(crate) async fn answer(
    tree: &Arc<LogTree>,
    queries: bool,
    path: &str,
    query: Option<&str>,
    parameters: &[(String, String)],
    headers: &HeaderMap,
) -> Outgoing {
    let mut path = path.to_owned();
    let mut shown = path.clone();
    if queries && log_query::is_query(parameters) {
        if !path.is_empty() {
            return error(StatusCode::NOT_ACCEPTABLE, "path not allowed in query mode").into();
        }
        match log_query::answer(tree, parameters).await {
            log_query::Answered::File(name) => {
                path = name;
                shown = String::new();
            }
            log_query::Answered::Refused(status, why) => return error(status, &why).into(),
            log_query::Answered::Text(pieces) => return pieces.into(),
        }
    }
    let (opened, looked) = (tree.clone(), path.clone());
    let entry = tokio::task::spawn_blocking(move || opened.open(looked.trim_matches('/'))).await;
    let moved = |to: String| {
        let to = query.map_or_else(|| to.clone(), |query| format!("{to}?{query}"));
        let mut reply = Response::new(ReplyBody::new(Bytes::new()));
        *reply.status_mut() = StatusCode::MOVED_PERMANENTLY;
        match HeaderValue::from_str(&to) {
            Ok(to) => {
                reply.headers_mut().insert(LOCATION, to);
                reply
            }
            Err(_) => not_found(),
        }
    };
    let name = |path: &str| {
        let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        utf8_percent_encode(last, PATH).to_string()
    };
    let slash = path.is_empty() || path.ends_with('/');
    match entry {
        // A query names the file itself; there is nowhere to be moved to.
        Ok(Ok(LogEntry::Directory { entries, modified })) if slash || shown.is_empty() => {
            directory(&entries, modified, headers).into()
        }
        Ok(Ok(LogEntry::Directory { .. })) => moved(format!("{}/", name(&shown))).into(),
        Ok(Ok(LogEntry::File { .. })) if slash && !shown.is_empty() => moved(format!("../{}", name(&shown))).into(),
        Ok(Ok(LogEntry::File { file, length, modified })) => give(file, length, modified, headers).await,
        Ok(Err(e)) => refusal(&e).into(),
        Err(e) => error(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()).into(),
    }
}

fn refusal(e: &io::Error) -> Reply {
    match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => not_found(),
        io::ErrorKind::PermissionDenied => error(StatusCode::FORBIDDEN, "403 Forbidden"),
        _ => error(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error"),
    }
}

fn directory(entries: &[(String, bool)], modified: Option<SystemTime>, headers: &HeaderMap) -> Reply {
    let status = condition(headers, modified);
    if status == Some(StatusCode::NOT_MODIFIED) {
        let mut reply = Response::new(ReplyBody::new(Bytes::new()));
        *reply.status_mut() = StatusCode::NOT_MODIFIED;
        return reply;
    }
    let mut page = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n".to_owned();
    for (name, is_dir) in entries {
        let name = if *is_dir { format!("{name}/") } else { name.clone() };
        // Else the part before the colon would be a scheme.
        let here = if name.split('/').next().is_some_and(|first| first.contains(':')) { "./" } else { "" };
        let link = format!("{here}{}", utf8_percent_encode(&name, PATH));
        page += &format!("<a href=\"{link}\">{}</a>\n", escape(&name));
    }
    page += "</pre>\n";
    stamped(reply(StatusCode::OK, HTML, page), modified)
}

/// Text for HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;").replace('\'', "&#39;")
}

fn stamped<B>(mut response: Response<B>, modified: Option<SystemTime>) -> Response<B> {
    if let Some(value) = modified.and_then(|m| HeaderValue::from_str(&httpdate::fmt_http_date(m)).ok()) {
        response.headers_mut().insert(LAST_MODIFIED, value);
    }
    response
}

/// The status that the request's conditions ask for instead of 200.
fn condition(headers: &HeaderMap, modified: Option<SystemTime>) -> Option<StatusCode> {
    let whole = |t: SystemTime| t.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let modified = whole(modified?);
    let time = |name: HeaderName| {
        let value = headers.get(name)?.to_str().ok()?;
        httpdate::parse_http_date(value).ok().map(whole)
    };
    if time(IF_UNMODIFIED_SINCE).is_some_and(|since| modified > since) {
        return Some(StatusCode::PRECONDITION_FAILED);
    }
    time(IF_MODIFIED_SINCE).is_some_and(|since| modified <= since).then_some(StatusCode::NOT_MODIFIED)
}

/// What of a file is asked for: where, and how much; None: all of it.
///
/// # Errors
/// The text of the 416.
fn range(value: Option<&str>, length: u64) -> Result<Option<(u64, u64)>, &'static str> {
    let Some(value) = value else { return Ok(None) };
    let wrong = "invalid range";
    let spec = value.strip_prefix("bytes=").ok_or(wrong)?;
    // Several at once may be answered with everything.
    if spec.contains(',') {
        return Ok(None);
    }
    let (first, last) = spec.trim().split_once('-').ok_or(wrong)?;
    let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
        true => text.parse::<u64>().map_err(|_| wrong),
        false => Err(wrong),
    };
    let (start, end) = match (first.trim(), last.trim()) {
        ("", "") => return Err(wrong),
        ("", suffix) => (length.saturating_sub(number(suffix)?), length),
        (first, "") => (number(first)?, length),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong);
            }
            (first, last.saturating_add(1).min(length))
        }
    };
    if start >= length {
        return Err(NO_OVERLAP);
    }
    Ok(Some((start, end - start)))
}

async fn give(mut file: File, length: u64, modified: Option<SystemTime>, headers: &HeaderMap) -> Outgoing {
    if let Some(status) = condition(headers, modified) {
        let mut answer = Response::new(ReplyBody::new(Bytes::new()));
        *answer.status_mut() = status;
        return stamped(answer, modified).into();
    }
    let asked = match range(headers.get(RANGE).map(|v| v.to_str().unwrap_or_default()), length) {
        Ok(asked) => asked,
        Err(why) => {
            let mut answer = error(StatusCode::RANGE_NOT_SATISFIABLE, why);
            if why == NO_OVERLAP
                && let Ok(value) = HeaderValue::from_str(&format!("bytes */{length}"))
            {
                answer.headers_mut().insert(CONTENT_RANGE, value);
            }
            return answer.into();
        }
    };
    let (start, size) = asked.unwrap_or((0, length));
    let begun = tokio::task::spawn_blocking(move || {
        let mut first = Vec::new();
        (&file).take(SNIFF as u64).read_to_end(&mut first)?;
        file.seek(SeekFrom::Start(start))?;
        io::Result::Ok((content_type(&first), file))
    });
    let (kind, file) = match begun.await {
        Ok(Ok(begun)) => begun,
        Ok(Err(e)) => return refusal(&e).into(),
        Err(e) => return error(StatusCode::INTERNAL_SERVER_ERROR, &e.to_string()).into(),
    };
    let mut answer = stamped(Response::new(pieces(file, size)), modified);
    let fields = answer.headers_mut();
    fields.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    fields.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    fields.insert(http::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    fields.insert(CONTENT_LENGTH, HeaderValue::from(size));
    if asked.is_some() {
        if let Ok(value) = HeaderValue::from_str(&format!("bytes {start}-{}/{length}", start + size - 1)) {
            fields.insert(CONTENT_RANGE, value);
        }
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Outgoing::Pieces(answer)
}

/// Compressed, text or neither; never a kind that a browser would run.
fn content_type(first: &[u8]) -> &'static str {
    let binary = |b: &u8| matches!(b, 0..=8 | 11 | 14..=26 | 28..=31);
    if first.starts_with(&[0x1f, 0x8b, 8]) {
        "application/x-gzip"
    } else if first.iter().any(binary) {
        "application/octet-stream"
    } else {
        TEXT
    }
}

/// The next so many bytes of a file, read as they are taken. One that shrinks meanwhile breaks the answer off.
pub(crate) fn pieces(file: File, size: u64) -> Pin<Box<dyn Stream<Item = Bytes> + Send>> {
    Box::pin(futures::stream::unfold((Some(file), size), |(file, left)| async move {
        let file = file?;
        if left == 0 {
            return None;
        }
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; PIECE.min(usize::try_from(left).unwrap_or(PIECE))];
            let n = (&file).read(&mut piece)?;
            piece.truncate(n);
            io::Result::Ok((piece, file))
        });
        match read.await {
            Ok(Ok((piece, file))) if !piece.is_empty() => {
                let left = left - piece.len() as u64;
                Some((Bytes::from(piece), (Some(file), left)))
            }
            _ => None,
        }
    }))
}

/// How long a query may take.
pub(crate) const QUERY: Duration = Duration::from_secs(30);

impl From<Pin<Box<dyn Stream<Item = Bytes> + Send>>> for Outgoing {
    /// The answer to a query.
    fn from(pieces: Pin<Box<dyn Stream<Item = Bytes> + Send>>) -> Self {
        let mut answer = Response::new(pieces);
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain;charset=UTF-8"));
        Self::Pieces(answer)
    }
}

/// A page that is no error.
pub(crate) fn html(page: String) -> Reply {
    nosniff(reply(StatusCode::OK, HTML, page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (value, expected) in [
            ("bytes=0-2", Ok(Some((0, 3)))),
            ("bytes=-3", Ok(Some((11, 3)))),
            ("bytes=-99", Ok(Some((0, 14)))),
            ("bytes=5-", Ok(Some((5, 9)))),
            ("bytes=5-99", Ok(Some((5, 9)))),
            ("bytes=0-1,3-4", Ok(None)),
            ("bytes=100-", Err("invalid range: failed to overlap")),
            ("bytes=-0", Err("invalid range: failed to overlap")),
            ("bytes=x", Err("invalid range")),
            ("bytes=2-1", Err("invalid range")),
            ("bytes=+1-2", Err("invalid range")),
            ("bytes=-", Err("invalid range")),
            ("bytes=18446744073709551615-18446744073709551615", Err("invalid range: failed to overlap")),
            ("lines=1-2", Err("invalid range")),
        ] {
            assert_eq!(range(Some(value), 14), expected, "{value}");
        }
        assert_eq!(range(None, 14), Ok(None));
        assert!(range(Some("bytes=0-0"), 0).is_err());
    }

    #[test]
    fn kinds() {
        for (bytes, kind) in [
            (&b"one\ntwo\x1b[0m"[..], TEXT),
            (b"", TEXT),
            (b"<html><script>", TEXT),
            (&[0x1f, 0x8b, 8, 0], "application/x-gzip"),
            (&[0x7f, b'E', 0], "application/octet-stream"),
        ] {
            assert_eq!(content_type(bytes), kind);
        }
    }
}
