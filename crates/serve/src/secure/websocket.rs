//! Sessions by WebSocket, translated here for the runtime's streaming server (gate ExtendWebSocketsToKubelet, KEP-4006, KEP-3331):
//!
//! | subprotocol | each message | towards the runtime |
//! |---|---|---|
//! | `v5.channel.k8s.io` | a channel's number, then its bytes; `255 N` ends channel N | one SPDY stream a channel |
//! | `SPDY/3.1+portforward.k8s.io` | bytes of a SPDY connection | the same bytes |
//!
//! Other subprotocols are the runtime's own business ([`upgrade`](super::upgrade)). As there, a session runs on its connection's task, with one
//! piece in flight each way: a slow side slows the other.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Sink, SinkExt as _, Stream, StreamExt as _};
use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use ring::digest;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode};
use tokio_tungstenite::tungstenite::{Error, Message};

use super::spdy::{self, Said};
use super::upgrade::{self, Activity, SessionSlot};
use crate::reply::{ReplyBody, error};

/// A session's channels.
pub(crate) const CHANNELS: &str = "v5.channel.k8s.io";
/// A tunnel for a port-forward.
pub(crate) const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
/// A subprotocol that is no protocol but the caller's token.
pub(crate) const BEARER: &str = "base64url.bearer.authorization.k8s.io.";

const PROTOCOLS: HeaderName = http::header::SEC_WEBSOCKET_PROTOCOL;
/// For the runtime to accept the streams.
const ACCEPTED: Duration = Duration::from_secs(30);
/// For a client to take the last words and to close.
const LINGER: Duration = Duration::from_secs(5);
/// Bytes of a tunnel in one message.
const PIECE: usize = 16 << 10;
/// Of a client's message; a frame of SPDY holds 16 MiB. kubectl sends 32 KiB.
const MESSAGE: usize = 8 << 20;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The channel on which the end of another is told.
const CLOSE: u8 = 255;

/// Whether the client asks for a WebSocket.
pub(crate) fn asked_for(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, wanted: &str| {
        headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).any(|v| v.to_ascii_lowercase().contains(wanted))
    };
    has(CONNECTION, "upgrade") && has(UPGRADE, "websocket")
}

/// The subprotocols that the client offers, the best first.
pub(crate) fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(PROTOCOLS).iter().filter_map(|v| v.to_str().ok());
    values.flat_map(|v| v.split(',')).map(str::trim).filter(|p| !p.is_empty())
}

/// True when a WebSocket with this subprotocol is asked for.
pub(crate) fn offers(headers: &HeaderMap, protocol: &str) -> bool {
    asked_for(headers) && protocols(headers).any(|p| p.eq_ignore_ascii_case(protocol))
}

/// Takes the caller's token out of the subprotocols: the runtime must not see it, and would have to answer with it.
pub(crate) fn without_token(headers: &mut HeaderMap) {
    if !protocols(headers).any(|p| p.starts_with(BEARER)) {
        return;
    }
    let rest = protocols(headers).filter(|p| !p.starts_with(BEARER)).collect::<Vec<_>>().join(",");
    match HeaderValue::from_str(&rest) {
        Ok(rest) if !rest.is_empty() => headers.insert(PROTOCOLS, rest),
        _ => headers.remove(PROTOCOLS),
    };
}

/// Which streams a session has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ends {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
    pub(crate) tty: bool,
}

impl Ends {
    /// Channels with the names that their streams have at the runtime, in the order in which it wants them.
    fn channels(self) -> impl Iterator<Item = (u8, &'static str)> {
        [
            (ERROR, "error", true),
            (STDIN, "stdin", self.stdin),
            (STDOUT, "stdout", self.stdout),
            (STDERR, "stderr", self.stderr),
            (RESIZE, "resize", self.tty),
        ]
        .into_iter()
        .filter_map(|(channel, name, wanted)| wanted.then_some((channel, name)))
    }
}

/// What is carried.
pub(crate) enum Carry {
    /// [`CHANNELS`]
    Channels(Ends),
    /// [`TUNNEL`]
    Tunnel,
}

/// Takes the client's WebSocket, connected to the runtime's streaming server at `url`.
pub(crate) async fn translate(
    mut request: Request<Incoming>,
    url: &str,
    carry: Carry,
    idle: Duration,
    slot: &SessionSlot,
) -> Response<ReplyBody> {
    let Some(accept) = accept(request.headers()) else {
        return error(StatusCode::BAD_REQUEST, "not a WebSocket handshake of version 13");
    };
    let (client_protocol, runtime_protocol) = match carry {
        Carry::Channels(_) => (CHANNELS, "v4.channel.k8s.io"),
        Carry::Tunnel => (TUNNEL, "portforward.k8s.io"),
    };
    let runtime = match upgrade::open_spdy(url, runtime_protocol).await {
        Ok(runtime) => runtime,
        Err(refusal) => return *refusal,
    };
    let client = hyper::upgrade::on(&mut request);
    slot.put(Box::pin(async move {
        let (client, runtime) = match tokio::try_join!(client, runtime) {
            Ok((client, runtime)) => (TokioIo::new(client), TokioIo::new(runtime)),
            Err(e) => return tracing::debug!(err = %e, "A session ended before it began"),
        };
        let config =
            WebSocketConfig::default().read_buffer_size(PIECE).write_buffer_size(0).max_message_size(Some(MESSAGE));
        let client = WebSocketStream::from_raw_socket(client, Role::Server, Some(config)).await;
        let activity = Arc::new(Activity::default());
        let carried = async {
            match carry {
                Carry::Channels(ends) => channels(client, runtime, ends, &activity).await,
                Carry::Tunnel => tunnel(client, runtime, &activity).await,
            }
        };
        tokio::select! {
            () = carried => {}
            () = activity.ceased(idle) => tracing::debug!("A session without traffic was ended"),
        }
    }));
    let mut answer = Response::new(ReplyBody::new(Bytes::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(http::header::SEC_WEBSOCKET_ACCEPT, accept);
    headers.insert(PROTOCOLS, HeaderValue::from_static(client_protocol));
    answer
}

/// The proof that the handshake was understood (RFC 6455, 4.2.2).
fn accept(headers: &HeaderMap) -> Option<HeaderValue> {
    let key = headers.get(http::header::SEC_WEBSOCKET_KEY)?;
    if headers.get(http::header::SEC_WEBSOCKET_VERSION)? != "13" {
        return None;
    }
    let text = [key.as_bytes(), b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"].concat();
    let digest = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &text);
    HeaderValue::from_str(&STANDARD.encode(digest.as_ref())).ok()
}

fn good_bye() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))
}

/// Says good-bye, and waits for the client's.
async fn close<C>(client: &mut WebSocketStream<C>)
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let closed = async {
        if client.send(good_bye()).await.is_ok() {
            while client.next().await.is_some_and(|m| m.is_ok()) {}
        }
    };
    let _ = tokio::time::timeout(LINGER, closed).await;
}

/// Bytes both ways, until one side ends.
async fn tunnel<C, R>(client: WebSocketStream<C>, runtime: R, activity: &Activity)
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite,
{
    let (mut to_client, mut from_client) = client.split();
    let (mut from_runtime, mut to_runtime) = tokio::io::split(runtime);
    let up = async {
        while let Some(Ok(message)) = from_client.next().await {
            activity.note();
            match message {
                Message::Binary(bytes) => to_runtime.write_all(&bytes).await?,
                Message::Close(_) => break,
                _ => {}
            }
            activity.note();
        }
        io::Result::Ok(())
    };
    let down = async {
        loop {
            let mut piece = vec![0; PIECE];
            let n = from_runtime.read(&mut piece).await.unwrap_or(0);
            activity.note();
            piece.truncate(n);
            if n == 0 || to_client.send(Message::Binary(piece.into())).await.is_err() {
                return;
            }
        }
    };
    let runtime_ended = tokio::select! { _ = up => false, () = down => true };
    if let (true, Ok(mut client)) = (runtime_ended, to_client.reunite(from_client)) {
        close(&mut client).await;
    }
}

/// How a session of channels ended.
enum End {
    /// The runtime has ended all streams.
    Complete,
    /// The connection to it broke.
    Broken,
    /// The client went.
    Client,
}

/// A session of channels, until the runtime has ended its streams.
async fn channels<C, R>(client: WebSocketStream<C>, runtime: R, ends: Ends, activity: &Activity)
where
    C: AsyncRead + AsyncWrite + Unpin,
    R: AsyncRead + AsyncWrite,
{
    let (mut to_client, mut from_client) = client.split();
    let (from_runtime, mut to_runtime) = tokio::io::split(runtime);
    let mut from_runtime = spdy::Reader::new(from_runtime);
    // A stream's number by its channel.
    let numbers: Vec<(u8, u32)> = ends.channels().map(|(channel, _)| channel).zip((1..).step_by(2)).collect();
    let opened = async {
        let mut writer = spdy::Writer::default();
        for ((_, name), (_, number)) in ends.channels().zip(&numbers) {
            to_runtime.write_all(&writer.open(*number, &[("streamtype", name)])).await.ok()?;
        }
        let mut missing = numbers.len();
        while missing > 0 {
            match from_runtime.next().await.ok()?? {
                Said::Accepted(_) => missing -= 1,
                Said::Reset(_) | Said::Ended(_) | Said::GoAway => return None,
                Said::Ping(id) => to_runtime.write_all(&spdy::pong(id)).await.ok()?,
                Said::Data(..) => {}
            }
        }
        Some(())
    };
    let opened = tokio::time::timeout(ACCEPTED, opened).await.is_ok_and(|o| o.is_some());
    let end = if opened {
        // What must be written to the runtime beside what the client sends.
        let (pings, pinged) = mpsc::channel(8);
        let up = upwards(&mut from_client, &mut to_runtime, &numbers, pinged, activity);
        let down = downwards(&mut from_runtime, &mut to_client, &numbers, &pings, activity);
        tokio::select! { end = up => end, end = down => end }
    } else {
        End::Broken
    };
    let Ok(mut client) = to_client.reunite(from_client) else { return };
    match end {
        End::Client => return,
        End::Complete => {}
        End::Broken => {
            let status = br#"{"metadata":{},"status":"Failure","message":"Internal error occurred: the connection to the container runtime was lost","reason":"InternalError","details":{"causes":[{"message":"the connection to the container runtime was lost"}]},"code":500}"#;
            let _ = tokio::time::timeout(LINGER, client.send(on(ERROR, status))).await;
        }
    }
    close(&mut client).await;
}

fn on(channel: u8, bytes: &[u8]) -> Message {
    let mut message = Vec::with_capacity(bytes.len() + 1);
    message.push(channel);
    message.extend_from_slice(bytes);
    Message::Binary(message.into())
}

/// From the client to the runtime.
async fn upwards(
    client: &mut (impl Stream<Item = Result<Message, Error>> + Unpin),
    runtime: &mut (impl AsyncWrite + Unpin),
    numbers: &[(u8, u32)],
    mut pings: mpsc::Receiver<[u8; 4]>,
    activity: &Activity,
) -> End {
    let mut open: Vec<(u8, u32)> = numbers.iter().filter(|(c, _)| [STDIN, RESIZE].contains(c)).copied().collect();
    loop {
        let message = tokio::select! {
            message = client.next() => message,
            Some(id) = pings.recv() => {
                if runtime.write_all(&spdy::pong(id)).await.is_err() {
                    return End::Broken;
                }
                continue;
            }
        };
        activity.note();
        let bytes = match message {
            Some(Ok(Message::Binary(bytes))) => bytes,
            Some(Ok(Message::Text(text))) => text.into(),
            Some(Ok(Message::Close(_)) | Err(_)) | None => return End::Client,
            Some(Ok(_)) => continue,
        };
        // What is for no channel that can be written is nothing.
        let Some((channel, bytes)) = bytes.split_first() else { continue };
        let (channel, last) = match (*channel, bytes) {
            (CLOSE, [ended]) => (*ended, true),
            (channel, _) => (channel, false),
        };
        let Some(at) = open.iter().position(|(c, _)| *c == channel) else { continue };
        let number = open[at].1;
        let bytes = if last { &[] } else { bytes };
        if last {
            open.remove(at);
        } else if bytes.is_empty() {
            continue;
        }
        let written = async {
            runtime.write_all(&spdy::data_head(number, bytes.len(), last)).await?;
            runtime.write_all(bytes).await?;
            runtime.flush().await
        };
        if written.await.is_err() {
            return End::Broken;
        }
        activity.note();
    }
}

/// From the runtime to the client.
async fn downwards<R: AsyncRead + Unpin>(
    runtime: &mut spdy::Reader<R>,
    client: &mut (impl Sink<Message> + Unpin),
    numbers: &[(u8, u32)],
    pings: &mpsc::Sender<[u8; 4]>,
    activity: &Activity,
) -> End {
    let mut open: Vec<(u8, u32)> =
        numbers.iter().filter(|(c, _)| [ERROR, STDOUT, STDERR].contains(c)).copied().collect();
    // An empty message, for clients that wait to be told that the session stands.
    let first = open.iter().map(|(c, _)| *c).min().unwrap_or(ERROR);
    if client.send(on(first, b"")).await.is_err() {
        return End::Client;
    }
    loop {
        let said = runtime.next().await;
        activity.note();
        match said {
            Ok(Some(Said::Data(number, bytes))) => {
                let channel = open.iter().find(|(_, n)| *n == number).map(|(c, _)| *c);
                if let Some(channel) = channel.filter(|_| !bytes.is_empty())
                    && client.send(on(channel, &bytes)).await.is_err()
                {
                    return End::Client;
                }
            }
            Ok(Some(Said::Ended(number) | Said::Reset(number))) => {
                open.retain(|(_, n)| *n != number);
                if open.is_empty() {
                    return End::Complete;
                }
            }
            Ok(Some(Said::Ping(id))) => {
                // When eight wait already, the other side is not reading, and its pings are of no use to it.
                let _ = pings.try_send(id);
            }
            Ok(Some(Said::Accepted(_) | Said::GoAway)) => {}
            // The status was told when its stream has ended.
            Ok(None) if open.iter().all(|(c, _)| *c != ERROR) => return End::Complete,
            Ok(None) | Err(_) => return End::Broken,
        }
        activity.note();
    }
}
