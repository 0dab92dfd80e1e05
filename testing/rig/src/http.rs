//! One `GET` over a unix socket or a TCP port, for rubelet's local endpoints.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(5);

/// Status code and body of `GET path` on a unix socket.
///
/// # Errors
/// When the socket does not answer within 5 s or not with HTTP.
pub fn get_unix(socket: &Path, path: &str) -> io::Result<(u16, Vec<u8>)> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    get(stream, path)
}

/// Status code and body of `GET path` on a port of the loopback address.
///
/// # Errors
/// When the port does not answer within 5 s or not with HTTP.
pub fn get_tcp(port: u16, path: &str) -> io::Result<(u16, Vec<u8>)> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    get(stream, path)
}

/// HTTP/1.0: the server sends no chunks and closes at the end.
fn get(mut stream: impl Read + Write, path: &str) -> io::Result<(u16, Vec<u8>)> {
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&answer).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not an HTTP answer"))
}

pub(crate) fn parse(answer: &[u8]) -> Option<(u16, Vec<u8>)> {
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let code = head.strip_prefix("HTTP/1.")?.split_whitespace().nth(1)?.parse().ok()?;
    Some((code, answer[end + 4..].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_code_and_body() {
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nhello"), Some((200, b"hello".to_vec())));
        assert_eq!(parse(b"HTTP/1.0 404 Not Found\r\n\r\n"), Some((404, Vec::new())));
        assert_eq!(parse(b"SSH-2.0\r\n\r\n"), None);
        assert_eq!(parse(b""), None);
    }
}
