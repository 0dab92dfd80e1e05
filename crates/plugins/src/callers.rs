//! Callers of the kubelet's own gRPC sockets, whatever they think the name of the server is.
//!
//! A unix socket has no host. Many clients (grpc-go with a plain path, gRPC for Python and C++) send the socket's path as `:authority`, raw or with percent signs, which
//! the Go kubelet takes and HTTP/2 of Rust does not: it resets the stream with PROTOCOL_ERROR (hyperium/h2#487, grpc/grpc#38142). So the name is replaced on its way in.
//!
//! Only what comes from the caller is looked at, frame by frame (RFC 9113), and of header blocks only how long each field is (RFC 7541). A literal `:authority` becomes one of a
//! single letter. Caller and server keep the same table of names, where later requests refer to it by its place: as the new entry is never longer than the old one,
//! the server forgets nothing that the caller still knows. What cannot be understood goes on as it came.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Connected;

/// What a client sends first.
const PREFACE: usize = 24;
/// Length, type, flags, stream.
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The largest frame that a client may send unless it is told otherwise, and it is not.
const LARGEST: usize = 1 << 14;
/// `:authority` in the static table of names.
const AUTHORITY: usize = 1;
/// How much is read at once.
const CHUNK: usize = 8 * 1024;

/// Connections of this listener, for a server of tonic.
pub(crate) fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<Caller<UnixStream>>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(Caller::new))
}

/// A connection whose caller may name the server as it likes.
pub(crate) struct Caller<S> {
    inner: S,
    frames: Frames,
}

impl<S> Caller<S> {
    fn new(inner: S) -> Self {
        Self { inner, frames: Frames { pass: PREFACE, ..Frames::default() } }
    }
}

impl<S> Connected for Caller<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<S: AsyncRead + Unpin> AsyncRead for Caller<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.frames.ready.is_empty() {
            let mut chunk = [0; CHUNK];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                // The end, in the middle of a frame or not: the server sees what there was.
                this.frames.ready.append(&mut this.frames.held);
                break;
            }
            this.frames.take(read.filled());
        }
        let most = this.frames.ready.len().min(buf.remaining());
        buf.put_slice(&this.frames.ready[..most]);
        this.frames.ready.drain(..most);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Caller<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// What came in, cut into frames.
#[derive(Default)]
struct Frames {
    /// May be read.
    ready: Vec<u8>,
    /// The beginning of a frame whose rest is to come; at most one head, or one frame of headers.
    held: Vec<u8>,
    /// So many bytes more go on as they are.
    pass: usize,
}

impl Frames {
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.pass > 0 {
                let (now, rest) = bytes.split_at(self.pass.min(bytes.len()));
                self.ready.extend_from_slice(now);
                self.pass -= now.len();
                bytes = rest;
                continue;
            }
            let wanted = self.wanted() - self.held.len();
            let (now, rest) = bytes.split_at(wanted.min(bytes.len()));
            self.held.extend_from_slice(now);
            bytes = rest;
            if self.held.len() < FRAME_HEAD || self.held.len() < self.wanted() {
                continue;
            }
            let frame = std::mem::take(&mut self.held);
            self.pass = FRAME_HEAD + length(&frame) - frame.len();
            self.ready.extend(renamed(&frame).unwrap_or(frame));
        }
    }

    /// How much of the frame that begins with what is held must be there before it goes on: its head, and of headers all of it.
    fn wanted(&self) -> usize {
        match self.held.get(3) {
            Some(&HEADERS) if self.held.len() >= FRAME_HEAD && length(&self.held) <= LARGEST => {
                FRAME_HEAD + length(&self.held)
            }
            _ => FRAME_HEAD,
        }
    }
}

/// What a frame's head says of the length of the rest.
fn length(frame: &[u8]) -> usize {
    frame.iter().take(3).fold(0, |sum, byte| sum << 8 | usize::from(*byte))
}

/// A whole frame of headers with another authority; None: it stays as it is.
fn renamed(frame: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = frame.split_at_checked(FRAME_HEAD)?;
    let flags = head[4];
    if head[3] != HEADERS || flags & END_HEADERS == 0 || rest.len() != length(head) {
        return None;
    }
    let (padding, rest) = match flags & PADDED {
        0 => (0, rest),
        _ => (usize::from(*rest.first()?), &rest[1..]),
    };
    let rest = rest.get(..rest.len().checked_sub(padding)?)?;
    let (priority, block) = rest.split_at_checked(if flags & PRIORITY == 0 { 0 } else { 5 })?;
    let block = renamed_block(block)?;
    let size = u32::try_from(priority.len() + block.len()).ok()?.to_be_bytes();
    let mut out = vec![size[1], size[2], size[3], HEADERS, flags & !PADDED];
    out.extend_from_slice(&head[5..]);
    out.extend_from_slice(priority);
    out.extend_from_slice(&block);
    Some(out)
}

/// A header block with another authority; None: it has none that is spelled out, or is not understood.
fn renamed_block(block: &[u8]) -> Option<Vec<u8>> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        // A field by its place in the table; a new size of the table; a literal to be kept in the table; one that is not.
        let (prefix, literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let (name, after) = integer(block, at, prefix)?;
        at = after;
        if !literal {
            continue;
        }
        if name == 0 {
            at = string(block, at)?;
        }
        let end = string(block, at)?;
        if name == AUTHORITY && end > at + 1 {
            let mut out = block[..at].to_vec();
            // One letter, as it is: no name is shorter.
            out.extend_from_slice(&[1, b'k']);
            out.extend_from_slice(&block[end..]);
            return Some(out);
        }
        at = end;
    }
    None
}

/// An integer of RFC 7541, whose first byte leaves it `prefix` bits, and where what follows it begins.
fn integer(block: &[u8], at: usize, prefix: u32) -> Option<(usize, usize)> {
    let most = (1_usize << prefix) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut at = at + 1;
    if value < most {
        return Some((value, at));
    }
    for shift in (0..28).step_by(7) {
        let byte = *block.get(at)?;
        at += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

/// Where the string at this place ends.
fn string(block: &[u8], at: usize) -> Option<usize> {
    let (size, at) = integer(block, at, 7)?;
    at.checked_add(size).filter(|end| *end <= block.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut out = vec![size[1], size[2], size[3], kind, flags, 0, 0, 0, 1];
        out.extend_from_slice(payload);
        out
    }

    /// `:method POST`, `:scheme http`, `:path /p`, this authority, and a field with a name of its own.
    fn block(authority: &[u8], first: u8) -> Vec<u8> {
        let mut out = vec![0x83, 0x86, 0x44, 2, b'/', b'p', first];
        out.push(u8::try_from(authority.len()).unwrap());
        out.extend_from_slice(authority);
        out.extend_from_slice(b"\x40\x02te\x08trailers");
        out
    }

    #[test]
    fn the_authority_is_replaced_and_nothing_else() {
        for first in [0x41, 0x01, 0x11] {
            let path = b"%2Fvar%2Flib%2Fkubelet%2Fpod-resources%2Fkubelet.sock";
            assert_eq!(renamed_block(&block(path, first)), Some(block(b"k", first)));
        }
        // By its place in the table, of another name, or empty: as it was.
        assert_eq!(renamed_block(&[0x83, 0x86, 0x81]), None);
        assert_eq!(renamed_block(b"\x44\x05/p:au"), None);
        assert_eq!(renamed_block(&block(b"", 0x41)), None);
    }

    #[test]
    fn padding_goes_and_priority_stays() {
        let mut payload = vec![3, 0, 0, 0, 0, 16];
        payload.extend(block(b"/a.sock", 0x41));
        payload.extend([0, 0, 0]);
        let mut wanted = vec![0, 0, 0, 0, 16];
        wanted.extend(block(b"k", 0x41));
        let flags = END_HEADERS | PADDED | PRIORITY;
        assert_eq!(renamed(&frame(HEADERS, flags, &payload)), Some(frame(HEADERS, flags & !PADDED, &wanted)));
        // Headers that go on in another frame.
        assert_eq!(renamed(&frame(HEADERS, 0, &block(b"/a.sock", 0x41))), None);
    }

    #[tokio::test]
    async fn however_it_comes() {
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let around = [frame(4, 0, &[0; 12]), frame(0, 0, &[7; 40_000])];
        let stream = |authority: &[u8]| -> Vec<u8> {
            let mut all = preface.to_vec();
            all.extend_from_slice(&around[0]);
            for _ in 0..2 {
                all.extend(frame(HEADERS, END_HEADERS, &block(authority, 0x41)));
                all.extend_from_slice(&around[1]);
            }
            all
        };
        let (sent, wanted) = (stream(b"/run/a.sock"), stream(b"k"));
        for step in [1, 7, 4096, 100_000] {
            let (mut client, server) = tokio::io::duplex(64 * 1024);
            let sent = sent.clone();
            let writes = tokio::spawn(async move {
                for part in sent.chunks(step) {
                    client.write_all(part).await.unwrap();
                }
            });
            let mut got = Vec::new();
            Caller::new(server).read_to_end(&mut got).await.unwrap();
            writes.await.unwrap();
            assert!(got == wanted, "in steps of {step}");
        }
    }

    proptest! {
        /// Whatever a caller sends, nothing is lost and nothing panics; without a literal authority all of it arrives as it was.
        #[test]
        fn anything(bytes in proptest::collection::vec(any::<u8>(), 0..600), cut in 1_usize..50) {
            let mut frames = Frames::default();
            for part in bytes.chunks(cut) {
                frames.take(part);
            }
            let mut whole = Frames::default();
            whole.take(&bytes);
            prop_assert_eq!(&frames.ready, &whole.ready);
            prop_assert!(frames.ready.len() + frames.held.len() <= bytes.len());
            let _ = renamed_block(&bytes);
        }
    }
}
