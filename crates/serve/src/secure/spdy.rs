//! The client's side of SPDY/3.1 as Kubernetes' streaming servers speak it (moby/spdystream): a few streams that the client opens, data both
//! ways, no flow control.
//!
//! Header blocks are to be zlib streams over a fixed dictionary. What is sent is stored, not compressed, and needs neither; what is received
//! (SYN_REPLY) is not looked at: that a stream was accepted is all there is to know.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Control frame types.
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
/// The flag of a stream's last frame.
const FIN: u8 = 1;
/// Longer control frames are none that a streaming server sends.
const MAX_CONTROL: usize = 64 << 10;
/// Bytes of data handed on at once.
const PIECE: usize = 16 << 10;

/// Makes the frames that the client sends.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    /// The compression's own head was sent; it covers the whole connection.
    begun: bool,
}

impl Writer {
    /// Opens a stream (odd numbers, rising); names of header fields in lower case. Header blocks are shorter than 64 KiB.
    pub(crate) fn open(&mut self, stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
        let mut block = length(fields.len()).to_vec();
        for text in fields.iter().flat_map(|(name, value)| [name, value]) {
            block.extend(length(text.len()));
            block.extend(text.bytes());
        }
        let mut payload = stream.to_be_bytes().to_vec();
        // No associated stream, priority 0.
        payload.extend([0; 6]);
        if !std::mem::replace(&mut self.begun, true) {
            payload.extend([0x78, 0x01]);
        }
        let size = u16::try_from(block.len()).unwrap_or(u16::MAX);
        payload.push(0);
        payload.extend(size.to_le_bytes());
        payload.extend((!size).to_le_bytes());
        payload.extend(&block[..usize::from(size)]);
        // An empty block: at it, Go's library hands on what came before.
        payload.extend([0, 0, 0, 0xff, 0xff]);
        control(SYN_STREAM, 0, &payload)
    }
}

fn length(n: usize) -> [u8; 4] {
    u32::try_from(n).unwrap_or(u32::MAX).to_be_bytes()
}

fn control(kind: u16, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x80, 3];
    frame.extend(kind.to_be_bytes());
    frame.push(flags);
    frame.extend(&length(payload.len())[1..]);
    frame.extend(payload);
    frame
}

/// The head of a frame with so much data (less than 16 MiB); `last`: the stream's half is over.
pub(crate) fn data_head(stream: u32, size: usize, last: bool) -> [u8; 8] {
    let ([a, b, c, d], [_, x, y, z]) = (stream.to_be_bytes(), length(size));
    [a, b, c, d, u8::from(last), x, y, z]
}

/// The answer to a ping.
pub(crate) fn pong(id: [u8; 4]) -> Vec<u8> {
    control(PING, 0, &id)
}

/// What the server says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// A stream is accepted.
    Accepted(u32),
    /// Data of a stream, possibly none.
    Data(u32, Vec<u8>),
    /// A stream has no more.
    Ended(u32),
    /// A stream is refused or broken off.
    Reset(u32),
    /// To be answered with the same number.
    Ping([u8; 4]),
    /// The server is about to close the connection.
    GoAway,
}

/// Reads the server's frames.
#[derive(Debug)]
pub(crate) struct Reader<R> {
    from: R,
    /// The data frame that is being read: its stream, what is left of it, and whether it is the last.
    rest: Option<(u32, usize, bool)>,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(crate) fn new(from: R) -> Self {
        Self { from, rest: None }
    }

    /// The next thing said; None when the connection ends between two frames. Not to be cut short: what was read by then would be lost.
    ///
    /// # Errors
    /// The connection ends within a frame, or what comes is no SPDY.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Said>> {
        loop {
            if let Some((stream, left, last)) = self.rest {
                if left == 0 {
                    self.rest = None;
                    if last {
                        return Ok(Some(Said::Ended(stream)));
                    }
                    continue;
                }
                let mut piece = vec![0; left.min(PIECE)];
                let n = self.from.read(&mut piece).await?;
                if n == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                piece.truncate(n);
                self.rest = Some((stream, left - n, last));
                return Ok(Some(Said::Data(stream, piece)));
            }
            let mut head = [0; 8];
            if self.from.read(&mut head[..1]).await? == 0 {
                return Ok(None);
            }
            self.from.read_exact(&mut head[1..]).await?;
            let [a, b, c, d, flags, x, y, z] = head;
            let size = u32::from_be_bytes([0, x, y, z]) as usize;
            if a & 0x80 == 0 {
                self.rest = Some((u32::from_be_bytes([a, b, c, d]), size, flags & FIN != 0));
                continue;
            }
            if size > MAX_CONTROL {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a control frame of SPDY is too long"));
            }
            let mut payload = vec![0; size];
            self.from.read_exact(&mut payload).await?;
            let number = payload.first_chunk::<4>().copied().unwrap_or_default();
            let stream = u32::from_be_bytes(number) & 0x7fff_ffff;
            return Ok(Some(match u16::from_be_bytes([c, d]) {
                SYN_REPLY if flags & FIN != 0 => Said::Ended(stream),
                SYN_REPLY => Said::Accepted(stream),
                HEADERS if flags & FIN != 0 => Said::Ended(stream),
                RST_STREAM => Said::Reset(stream),
                PING => Said::Ping(number),
                GOAWAY => Said::GoAway,
                // Settings and windows are of no account here, and servers open no streams.
                _ => continue,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    async fn all(bytes: &[u8]) -> (Vec<Said>, bool) {
        let mut reader = Reader::new(bytes);
        let mut said = Vec::new();
        loop {
            match reader.next().await {
                Ok(Some(next)) => said.push(next),
                Ok(None) => return (said, true),
                Err(_) => return (said, false),
            }
        }
    }

    #[test]
    fn streams_are_opened_as_servers_expect() {
        let mut writer = Writer::default();
        let fields = b"\0\0\0\x01\0\0\0\x0astreamtype\0\0\0\x05error";
        let mut first = b"\x80\x03\0\x01\0\0\0\x2e\0\0\0\x01\0\0\0\0\0\0\x78\x01\0\x1b\0\xe4\xff".to_vec();
        first[7] = u8::try_from(10 + 2 + 5 + fields.len() + 5).unwrap();
        first[21..25].copy_from_slice(&[fields.len() as u8, 0, !(fields.len() as u8), 0xff]);
        first.extend(fields);
        first.extend([0, 0, 0, 0xff, 0xff]);
        assert_eq!(writer.open(1, &[("streamtype", "error")]), first);
        let second = writer.open(3, &[("streamtype", "error")]);
        assert_eq!((second.len(), &second[18..23]), (first.len() - 2, &first[20..25]), "one zlib stream for all");
        assert_eq!(data_head(3, 0x01_02_03, true), [0, 0, 0, 3, 1, 1, 2, 3]);
    }

    #[tokio::test]
    async fn what_servers_say() {
        let mut bytes = control(SYN_REPLY, 0, b"\0\0\0\x01compressed");
        bytes.extend(control(4, 0, b"settings"));
        bytes.extend(data_head(5, 3, false));
        bytes.extend(b"abc");
        bytes.extend(data_head(5, 0, true));
        bytes.extend(control(RST_STREAM, 0, b"\0\0\0\x07\0\0\0\x05"));
        bytes.extend(pong([0, 0, 0, 2]));
        bytes.extend(control(GOAWAY, 0, &[0; 8]));
        let expected = [
            Said::Accepted(1),
            Said::Data(5, b"abc".to_vec()),
            Said::Ended(5),
            Said::Reset(7),
            Said::Ping([0, 0, 0, 2]),
            Said::GoAway,
        ];
        let (said, whole) = all(&bytes).await;
        assert_eq!((said.as_slice(), whole), (&expected[..], true));
        assert!(!all(&bytes[..bytes.len() - 1]).await.1, "the end is missing");
        assert!(!all(&control(PING, 0, &vec![0; MAX_CONTROL + 1])).await.1, "too long");
    }

    proptest! {
        /// Whatever comes, reading ends, and gives no more data than came.
        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (said, _) = runtime.block_on(all(&bytes));
            let data: usize = said.iter().map(|s| if let Said::Data(_, d) = s { d.len() } else { 0 }).sum();
            prop_assert!(data <= bytes.len());
        }
    }
}
