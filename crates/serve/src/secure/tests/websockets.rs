//! WebSockets that are translated, on a fake streaming server that speaks SPDY as containerd's does.

use futures::{SinkExt as _, StreamExt as _};
use tokio::net::TcpListener;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;
use crate::secure::spdy::data_head;

const EXEC: &str = "/exec/default/web/app?command=cat&input=1&output=1&error=1";
const STATUS: &[u8] = br#"{"metadata":{},"status":"Success"}"#;

struct Streaming {
    running: Running,
    listener: TcpListener,
    api: Arc<FakeApi>,
}

impl Streaming {
    async fn start(change: impl FnOnce(&mut SecureParts)) -> Self {
        let statuses = json!({"containerStatuses": [running("app", "c1"), running("tty", "c2")]});
        let pods = FakePods(HashMap::from([("web", pod("web", &[("app", false), ("tty", true)], statuses))]));
        let api = Arc::new(FakeApi::default());
        let tokens = (api.clone() as Arc<dyn AuthApi>, Duration::from_secs(60));
        let running = Running::start(pods, |_, parts| {
            parts.authentication.tokens = Some(tokens);
            change(parts);
        })
        .await;
        for (name, id) in [("app", "c1"), ("tty", "c2")] {
            running.containers.running.lock().unwrap().insert(("web".into(), name.into()), id.into());
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        *running.containers.url.lock().unwrap() = format!("http://{}/exec/token", listener.local_addr().unwrap());
        Self { running, listener, api }
    }

    /// Asks for a WebSocket; the stream, and the answer's head.
    async fn ask(&self, path: &str, protocols: &str) -> (TlsStream<TcpStream>, String) {
        let mut client = self.running.connect(client(None)).await.unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: {protocols}\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        let head = read_head(&mut client).await;
        (client, head)
    }

    async fn session(&self, path: &str, protocol: &str) -> (WebSocketStream<TlsStream<TcpStream>>, Runtime) {
        let (asked, runtime) = tokio::join!(self.ask(path, protocol), Runtime::accept(&self.listener));
        let (client, head) = asked;
        for line in [
            "HTTP/1.1 101 Switching Protocols\r\n",
            "sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n",
            &format!("sec-websocket-protocol: {protocol}\r\n"),
        ] {
            assert!(head.contains(line), "{head}");
        }
        (WebSocketStream::from_raw_socket(client, Role::Client, None).await, runtime)
    }
}

async fn read_head(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// The runtime's end of a session.
struct Runtime {
    stream: TcpStream,
    asked: String,
    /// Streams by name.
    streams: HashMap<String, u32>,
}

impl Runtime {
    async fn accept(listener: &TcpListener) -> Self {
        let (mut stream, _) = listener.accept().await.unwrap();
        let asked = read_head(&mut stream).await;
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
        Self { stream, asked, streams: HashMap::new() }
    }

    /// The next frame: type (0: data), stream, last, payload.
    async fn frame(&mut self) -> (u16, u32, bool, Vec<u8>) {
        let mut head = [0; 8];
        self.stream.read_exact(&mut head).await.unwrap();
        let size = u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize;
        let mut payload = vec![0; size];
        self.stream.read_exact(&mut payload).await.unwrap();
        let last = head[4] & 1 != 0;
        match head[0] & 0x80 {
            0 => (0, u32::from_be_bytes([head[0], head[1], head[2], head[3]]), last, payload),
            _ => {
                let number = payload.first_chunk::<4>().map_or(0, |n| u32::from_be_bytes(*n));
                (u16::from_be_bytes([head[2], head[3]]), number, last, payload)
            }
        }
    }

    /// Takes the streams that the client opens, and accepts them.
    async fn open(mut self, names: &[&str]) -> Self {
        for name in names {
            let (kind, number, _, payload) = self.frame().await;
            let text = String::from_utf8_lossy(&payload).into_owned();
            assert!(kind == 1 && text.contains(name) && text.contains("streamtype"), "{name}: {text:?}");
            self.streams.insert((*name).to_owned(), number);
            let mut reply = vec![0x80, 3, 0, 2, 0, 0, 0, 4];
            reply.extend(number.to_be_bytes());
            self.stream.write_all(&reply).await.unwrap();
        }
        self
    }

    async fn say(&mut self, name: &str, data: &[u8], last: bool) {
        self.stream.write_all(&data_head(self.streams[name], data.len(), last)).await.unwrap();
        self.stream.write_all(data).await.unwrap();
    }
}

fn bytes(message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>) -> Vec<u8> {
    match message.unwrap().unwrap() {
        Message::Binary(bytes) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_become_streams() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    let lower = runtime.asked.to_ascii_lowercase();
    for wanted in
        ["post /exec/token http/1.1\r\n", "upgrade: spdy/3.1\r\n", "x-stream-protocol-version: v4.channel.k8s.io"]
    {
        assert!(lower.contains(wanted), "{}", runtime.asked);
    }
    assert!(!lower.contains("websocket"), "{}", runtime.asked);
    let mut runtime = runtime.open(&["error", "stdin", "stdout", "stderr"]).await;
    assert_eq!(bytes(client.next().await), [1], "the session stands");
    client.send(Message::Binary(b"\0in".to_vec().into())).await.unwrap();
    assert_eq!(runtime.frame().await, (0, runtime.streams["stdin"], false, b"in".to_vec()));
    // What is for no channel that takes anything is left out.
    for nothing in [&b"\x01x"[..], b"\x04x", b"\x09x", b"", b"\xff\x07", b"\xff", b"\0"] {
        client.send(Message::Binary(nothing.to_vec().into())).await.unwrap();
    }
    runtime.say("stdout", b"out", false).await;
    runtime.say("stderr", b"err", false).await;
    assert_eq!((bytes(client.next().await), bytes(client.next().await)), (b"\x01out".to_vec(), b"\x02err".to_vec()));
    client.send(Message::Ping(b"alive".to_vec().into())).await.unwrap();
    assert_eq!(client.next().await.unwrap().unwrap(), Message::Pong(b"alive".to_vec().into()));
    runtime.stream.write_all(&[0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2]).await.unwrap();
    assert_eq!(runtime.frame().await, (6, 2, false, vec![0, 0, 0, 2]), "a ping is answered");
    // Half an end: the rest still comes.
    client.send(Message::Binary(vec![255, 0].into())).await.unwrap();
    assert_eq!(runtime.frame().await, (0, runtime.streams["stdin"], true, Vec::new()));
    client.send(Message::Binary(b"\0late".to_vec().into())).await.unwrap();
    runtime.say("stdout", b"rest", true).await;
    runtime.say("stderr", b"", true).await;
    runtime.say("error", STATUS, true).await;
    assert_eq!(bytes(client.next().await), b"\x01rest");
    assert_eq!(bytes(client.next().await), [b"\x03", STATUS].concat());
    match client.next().await.unwrap().unwrap() {
        Message::Close(Some(frame)) => assert_eq!(u16::from(frame.code), 1000),
        other => panic!("{other:?}"),
    }
    let page = streaming.running.metrics.encode().unwrap();
    assert!(page.contains(r#"path="exec",server_type="readwrite"} 1"#), "{page}");
}

/// As with SPDY (A35): ten minutes of silence, over which the clock jumps, end nothing.
#[tokio::test]
async fn ten_minutes_of_silence_end_nothing() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    let mut runtime = runtime.open(&["error", "stdin", "stdout", "stderr"]).await;
    assert_eq!(bytes(client.next().await), [1], "the session stands");
    tokio::time::pause();
    for _ in 0..10 {
        tokio::time::advance(Duration::from_secs(60)).await;
        tokio::task::yield_now().await;
    }
    tokio::time::resume();
    client.send(Message::Binary(b"\0in".to_vec().into())).await.unwrap();
    assert_eq!(runtime.frame().await, (0, runtime.streams["stdin"], false, b"in".to_vec()));
    runtime.say("stdout", b"out", false).await;
    assert_eq!(bytes(client.next().await), b"\x01out");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_is_resized() {
    let streaming = Streaming::start(|_| {}).await;
    let path = "/attach/default/web/tty?input=1&output=1&error=1";
    let (mut client, runtime) = streaming.session(path, "v5.channel.k8s.io").await;
    let mut runtime = runtime.open(&["error", "stdin", "stdout", "resize"]).await;
    client.send(Message::Binary(b"\x04{\"Width\":80,\"Height\":24}".to_vec().into())).await.unwrap();
    let size = b"{\"Width\":80,\"Height\":24}".to_vec();
    assert_eq!(runtime.frame().await, (0, runtime.streams["resize"], false, size));
    // The client goes, and so does the session.
    drop(client);
    assert_eq!(runtime.stream.read(&mut [0; 8]).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn much_both_ways() {
    let streaming = Streaming::start(|_| {}).await;
    let (client, runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    let runtime = runtime.open(&["error", "stdin", "stdout", "stderr"]).await;
    let (number, streams) = (runtime.streams["stdin"], runtime.streams.clone());
    let sent: Vec<u8> = (0..8_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    // Echoes stdin, as cat does.
    let echo = tokio::spawn(async move {
        let mut runtime = runtime;
        loop {
            let (_, stream, last, data) = runtime.frame().await;
            assert_eq!(stream, number);
            runtime.say("stdout", &data, last).await;
            if last {
                break;
            }
        }
        runtime.say("stderr", b"", true).await;
        runtime.say("error", STATUS, true).await;
        assert_eq!(runtime.streams, streams);
        runtime
    });
    let (mut to, mut from) = client.split();
    let input = sent.clone();
    let writer = tokio::spawn(async move {
        for piece in input.chunks(100_000) {
            to.send(Message::Binary([&[0], piece].concat().into())).await.unwrap();
        }
        to.send(Message::Binary(vec![255, 0].into())).await.unwrap();
        to
    });
    let mut got = Vec::with_capacity(sent.len());
    let mut status = Vec::new();
    while let Some(Ok(Message::Binary(message))) = from.next().await {
        match message[0] {
            1 => got.extend_from_slice(&message[1..]),
            3 => status.extend_from_slice(&message[1..]),
            other => panic!("channel {other}"),
        }
    }
    assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
    assert_eq!(status, STATUS);
    drop(writer.await.unwrap());
    echo.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_client_slows_the_runtime() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    let mut runtime = runtime.open(&["error", "stdin", "stdout", "stderr"]).await;
    // Nobody reads: what the server takes is bounded by the kernel's buffers and its own.
    let frame = [&data_head(runtime.streams["stdout"], 60_000, false)[..], &[7; 60_000]].concat();
    let (mut said, mut part) = (0_usize, 0);
    loop {
        match tokio::time::timeout(Duration::from_millis(300), runtime.stream.write(&frame[part..])).await {
            Ok(n) => part += n.unwrap(),
            Err(_) => break,
        }
        if part == frame.len() {
            (said, part) = (said + 60_000, 0);
        }
        assert!(said < 64 << 20, "the server takes everything");
    }
    let ended = tokio::spawn(async move {
        runtime.stream.write_all(&frame[part..]).await.unwrap();
        for name in ["stdout", "stderr", "error"] {
            runtime.say(name, b"", true).await;
        }
        runtime
    });
    let mut heard = 0;
    while let Some(Ok(Message::Binary(message))) = client.next().await {
        heard += message.len() - 1;
    }
    assert_eq!(heard, said + 60_000);
    ended.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_breaks_off_is_told() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    let runtime = runtime.open(&["error", "stdin", "stdout", "stderr"]).await;
    assert_eq!(bytes(client.next().await), [1]);
    drop(runtime);
    let status = bytes(client.next().await);
    assert!(status[0] == 3 && String::from_utf8_lossy(&status).contains("\"status\":\"Failure\""), "{status:?}");
    assert!(matches!(client.next().await, Some(Ok(Message::Close(_)))));
    // The runtime takes the connection and refuses the streams.
    let (mut client, mut runtime) = streaming.session(EXEC, "v5.channel.k8s.io").await;
    runtime.frame().await;
    runtime.stream.write_all(&[0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 3]).await.unwrap();
    assert_eq!(bytes(client.next().await)[0], 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_carries_bytes() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, mut runtime) = streaming.session("/portForward/default/web", "SPDY/3.1+portforward.k8s.io").await;
    let lower = runtime.asked.to_ascii_lowercase();
    assert!(lower.contains("x-stream-protocol-version: portforward.k8s.io\r\n"), "{}", runtime.asked);
    client.send(Message::Binary(b"question".to_vec().into())).await.unwrap();
    let mut buffer = [0; 8];
    runtime.stream.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"question");
    runtime.stream.write_all(b"answer").await.unwrap();
    assert_eq!(bytes(client.next().await), b"answer");
    runtime.stream.shutdown().await.unwrap();
    assert!(matches!(client.next().await, Some(Ok(Message::Close(_)))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_gate_it_is_the_runtimes_business() {
    let streaming = Streaming::start(|parts| parts.translate = false).await;
    for (path, protocol) in [(EXEC, "v5.channel.k8s.io"), ("/portForward/default/web", "SPDY/3.1+portforward.k8s.io")] {
        let (_, runtime) = tokio::join!(streaming.ask(path, protocol), Runtime::accept(&streaming.listener));
        let wanted = format!("sec-websocket-protocol: {protocol}\r\n").to_ascii_lowercase();
        assert!(runtime.asked.to_ascii_lowercase().contains(&wanted), "{}", runtime.asked);
    }
    // Other protocols always are.
    let streaming = Streaming::start(|_| {}).await;
    let (_, runtime) = tokio::join!(streaming.ask(EXEC, "v4.channel.k8s.io"), Runtime::accept(&streaming.listener));
    assert!(runtime.asked.to_ascii_lowercase().contains("sec-websocket-protocol: v4.channel.k8s.io\r\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_among_the_protocols() {
    let streaming = Streaming::start(|parts| parts.authentication.anonymous = false).await;
    streaming.api.tokens.lock().unwrap().insert("good".into(), "bob".into());
    let bearer = |token: &str| {
        use base64::Engine as _;
        let token = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(token);
        format!("base64url.bearer.authorization.k8s.io.{token}")
    };
    let (good, bad) = (bearer("good"), bearer("bad"));
    for (what, protocols) in [
        ("none", "v4.channel.k8s.io".to_owned()),
        ("bad", format!("{bad}, v4.channel.k8s.io")),
        ("two", format!("{good}, {good}, v4.channel.k8s.io")),
        ("alone", good.clone()),
        ("no base64", "base64url.bearer.authorization.k8s.io.!!, v4.channel.k8s.io".to_owned()),
    ] {
        let (_, head) = streaming.ask(EXEC, &protocols).await;
        assert!(head.starts_with("HTTP/1.1 401 "), "{what}: {head}");
    }
    let protocols = format!("{good}, v4.channel.k8s.io");
    let (_, runtime) = tokio::join!(streaming.ask(EXEC, &protocols), Runtime::accept(&streaming.listener));
    let asked = runtime.asked.to_ascii_lowercase();
    assert!(asked.contains("sec-websocket-protocol: v4.channel.k8s.io\r\n") && !asked.contains("bearer"), "{asked}");
    let protocols = format!("{good}, v5.channel.k8s.io");
    let (asked, _) = tokio::join!(streaming.ask(EXEC, &protocols), Runtime::accept(&streaming.listener));
    let (mut client, head) = asked;
    assert!(head.contains("sec-websocket-protocol: v5.channel.k8s.io\r\n"), "{head}");
    client.shutdown().await.unwrap();
}
