//! Connections of the Go kubelet to a registration socket, made palatable.
//!
//! It dials the socket by its bare path, and grpc-go sends that path as `:authority`; h2 refuses such a request as malformed. So what a
//! client sends goes through here, and the field's value becomes `localhost`. It stands for itself in the dynamic table (RFC 7541), so that
//! later requests that refer to it are right too.

use std::path::{Path, PathBuf};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

const PREFACE: usize = 24;
const HEADERS: u8 = 1;
/// HPACK: literal with incremental indexing, name 1 of the static table.
const AUTHORITY: u8 = 0x41;

/// Takes connections at `listener` and passes them on to the socket at `inner`.
pub(crate) async fn serve(listener: UnixListener, inner: PathBuf) {
    while let Ok((client, _)) = listener.accept().await {
        let inner = inner.clone();
        tokio::spawn(async move {
            let _ = pass(client, &inner).await;
        });
    }
}

async fn pass(client: UnixStream, inner: &Path) -> std::io::Result<()> {
    let (mut from, mut back) = client.into_split();
    let (mut answers, mut to) = UnixStream::connect(inner).await?.into_split();
    let forth = async {
        let mut preface = [0; PREFACE];
        from.read_exact(&mut preface).await?;
        to.write_all(&preface).await?;
        loop {
            let mut head = [0; 9];
            if from.read_exact(&mut head).await.is_err() {
                return to.shutdown().await;
            }
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            from.read_exact(&mut payload).await?;
            // grpc-go sends neither padding nor priority.
            if head[3] == HEADERS {
                payload = with_localhost(&payload).unwrap_or(payload);
                let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
                head[..3].copy_from_slice(&length[1..]);
            }
            to.write_all(&head).await?;
            to.write_all(&payload).await?;
        }
    };
    let back = async {
        tokio::io::copy(&mut answers, &mut back).await?;
        back.shutdown().await
    };
    tokio::try_join!(forth, back).map(|_: ((), ())| ())
}

/// An HPACK integer with a prefix of so many bits at `at`, and where it ends.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut next = at + 1;
    if value == most {
        let mut shift = 0;
        loop {
            let byte = usize::from(*block.get(next)?);
            next += 1;
            value += (byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    Some((value, next))
}

/// Where the string at `at` ends.
fn string(block: &[u8], at: usize) -> Option<usize> {
    let (length, next) = integer(block, at, 7)?;
    Some(next + length)
}

/// The block with another value of a literal `:authority`; None when it has none.
fn with_localhost(block: &[u8]) -> Option<Vec<u8>> {
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        let bits = match first {
            0x80.. => 7,
            0x40.. => 6,
            0x20.. => 5,
            _ => 4,
        };
        let (name, mut next) = integer(block, at, bits)?;
        if bits == 6 || bits == 4 {
            if name == 0 {
                next = string(block, next)?;
            }
            let value = next;
            next = string(block, next)?;
            if first == AUTHORITY {
                let mut out = block[..value].to_vec();
                out.push(9);
                out.extend_from_slice(b"localhost");
                out.extend_from_slice(block.get(next..)?);
                return Some(out);
            }
        }
        at = next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_authority_is_replaced() {
        // :method POST, :scheme http, :path "/x", :authority "/a/b.sock", a header with a name of its own.
        let block = b"\x83\x86\x44\x02/x\x41\x09/a/b.sock\x40\x01n\x01v";
        assert_eq!(with_localhost(block).unwrap(), b"\x83\x86\x44\x02/x\x41\x09localhost\x40\x01n\x01v");
        assert_eq!(with_localhost(b"\x83\x86\xbe"), None);
    }
}
