//! Sessions through to a fake streaming server, which speaks no SPDY: bytes are bytes.

use tokio::net::TcpListener;

use super::*;

struct Streaming {
    running: Running,
    listener: TcpListener,
}

impl Streaming {
    async fn start(change: impl FnOnce(&mut SecureParts)) -> Self {
        let statuses = json!({"containerStatuses": [running("app", "c1"), running("tty", "c2")]});
        let pods = FakePods(HashMap::from([
            ("web", pod("web", &[("app", false), ("tty", true)], statuses)),
            ("idle", pod("idle", &[("app", false)], json!({}))),
        ]));
        let running = Running::start(pods, |_, parts| change(parts)).await;
        for (name, id) in [("app", "c1"), ("tty", "c2")] {
            running.containers.running.lock().unwrap().insert(("web".into(), name.into()), id.into());
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        *running.containers.url.lock().unwrap() = format!("http://{}/exec/token?x=1", listener.local_addr().unwrap());
        Self { running, listener }
    }

    /// A client and the runtime, with a session between them; and the request that the runtime got.
    async fn session(&self) -> (TlsStream<TcpStream>, TcpStream, String) {
        let mut client = self.running.connect(client(None)).await.unwrap();
        let head = "POST /exec/default/web/app?command=sh&command=-c&input=1&output=1 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\
                    Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\nAuthorization: Bearer secret\r\nContent-Length: 0\r\n\r\n";
        client.write_all(head.as_bytes()).await.unwrap();
        let (mut runtime, _) = self.listener.accept().await.unwrap();
        let asked = read_head(&mut runtime).await;
        // The first bytes of the session come in one piece with the answer.
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                      X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\nfirst";
        runtime.write_all(answer.as_bytes()).await.unwrap();
        let answer = read_head(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{answer}");
        for header in ["connection: upgrade", "upgrade: spdy/3.1", "x-stream-protocol-version: v4.channel.k8s.io"] {
            assert!(answer.to_ascii_lowercase().contains(header), "{answer}");
        }
        let mut first = [0; 5];
        client.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"first");
        (client, runtime, asked)
    }
}

async fn read_head(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_runtime_is_asked() {
    let streaming = Streaming::start(|_| {}).await;
    let (_client, _runtime, asked) = streaming.session().await;
    assert!(asked.starts_with("POST /exec/token?x=1 HTTP/1.1\r\n"), "{asked}");
    let address = streaming.listener.local_addr().unwrap();
    let lower = asked.to_ascii_lowercase();
    for wanted in
        [&format!("host: {address}\r\n"), "upgrade: spdy/3.1\r\n", "x-stream-protocol-version: v4.channel.k8s.io\r\n"]
    {
        assert!(lower.contains(wanted), "{asked}");
    }
    assert!(!lower.contains("secret"), "the caller's token is not for the runtime");
    let upgrade = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
    *streaming.running.containers.url.lock().unwrap() = String::new();
    for request in [
        "POST /exec/default/web/app?command=a&tty=1&output=1&error=1",
        "POST /exec/default/web/uid/app?command=a+b&error=1",
        "POST /attach/default/web/app?input=1&output=1&error=1&tty=1",
        "POST /attach/default/web/tty?output=1&error=1",
        "POST /portForward/default/web",
    ] {
        let answer = streaming.running.ask_as(None, request, &upgrade).await;
        // The runtime knows nothing of it.
        assert_eq!((answer.status, answer.body.as_str()), (404, "rpc error: code = NotFound desc = no such thing"));
    }
    let asked = streaming.running.containers.asked.lock().unwrap().clone();
    let exec = |cmd: &[&str], tty, stdin, stdout, stderr| {
        let cmd = cmd.iter().map(|c| (*c).to_owned()).collect();
        format!("{:?}", v1::ExecRequest { container_id: "c1".into(), cmd, tty, stdin, stdout, stderr })
    };
    let attach = |id: &str, tty, stdin, stdout, stderr| {
        format!("{:?}", v1::AttachRequest { container_id: id.into(), stdin, tty, stdout, stderr })
    };
    let expected = [
        exec(&["sh", "-c"], false, true, true, false),
        exec(&["a"], true, false, true, false),
        exec(&["a b"], false, false, false, true),
        attach("c1", false, true, true, false),
        attach("c2", true, false, true, false),
        format!("{:?}", v1::PortForwardRequest { pod_sandbox_id: "sandbox-web".into(), port: Vec::new() }),
    ];
    assert_eq!(asked, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_of_a_websocket() {
    let streaming = Streaming::start(|_| {}).await;
    *streaming.running.containers.url.lock().unwrap() = String::new();
    let number = |text: &str, why: &str| {
        format!("unable to parse {text:?} as a port: strconv.ParseUint: parsing {text:?}: {why}")
    };
    for (query, protocol, expected) in [
        ("", "v4.channel.k8s.io", "query parameter \"port\" is required".to_owned()),
        ("?port=", "v4.channel.k8s.io", "query parameter \"port\" cannot be empty".to_owned()),
        ("?port=x", "v4.channel.k8s.io", number("x", "invalid syntax")),
        ("?port=%2B80", "v4.channel.k8s.io", number("+80", "invalid syntax")),
        ("?port=65536", "v4.channel.k8s.io", number("65536", "value out of range")),
        ("?port=0", "v4.channel.k8s.io", "port \"0\" must be > 0".to_owned()),
        ("?port=80,81&port=82", "v4.channel.k8s.io", String::new()),
        ("", "SPDY/3.1+portforward.k8s.io", String::new()),
    ] {
        let headers = [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", protocol)];
        let answer = streaming.running.ask_as(None, &format!("GET /portForward/default/web{query}"), &headers).await;
        match expected.is_empty() {
            true => assert_eq!(answer.status, 404, "{query}"),
            false => assert_eq!((answer.status, answer.body), (400, expected), "{query}"),
        }
    }
    let asked = streaming.running.containers.asked.lock().unwrap().clone();
    assert!(asked[0].contains("port: [80, 81, 82]") && asked[1].contains("port: []"), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ways_and_half_ends() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, mut runtime, _) = streaming.session().await;
    client.write_all(b"question").await.unwrap();
    let mut buffer = [0; 8];
    runtime.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"question");
    // The client has said all; the runtime answers at length, then ends.
    client.shutdown().await.unwrap();
    assert_eq!(runtime.read(&mut buffer).await.unwrap(), 0);
    let long: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();
    let said = long.clone();
    let writer = tokio::spawn(async move {
        runtime.write_all(&said).await.unwrap();
        runtime.shutdown().await.unwrap();
    });
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).await.unwrap();
    writer.await.unwrap();
    assert!(heard == long, "{} of {} bytes", heard.len(), long.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_side_slows_the_other() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, mut runtime, _) = streaming.session().await;
    // Nobody reads: what the server takes is bounded by the kernel's buffers and its own.
    let mut taken = 0_usize;
    let piece = vec![7_u8; 64 << 10];
    while let Ok(n) = tokio::time::timeout(Duration::from_millis(300), runtime.write(&piece)).await {
        taken += n.unwrap();
        assert!(taken < 64 << 20, "the server takes everything");
    }
    // Longer than an answer may stall elsewhere is fine here; all of it arrives.
    drop(runtime);
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard.len(), taken);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_side_that_goes_takes_the_other_along() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, runtime, _) = streaming.session().await;
    drop(runtime);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());
    let (client, mut runtime, _) = streaming.session().await;
    drop(client);
    assert_eq!(runtime.read(&mut [0; 8]).await.unwrap(), 0);
    // The server stops.
    let (mut client, mut runtime, _) = streaming.session().await;
    streaming.running.stop.cancel();
    assert_eq!(runtime.read(&mut [0; 8]).await.unwrap(), 0);
    let _ = client.read(&mut [0; 8]).await;
    assert_eq!(streaming.running.task.await.unwrap().drain(Duration::from_secs(5)).await, 0);
}

/// No timer of the server's own, of a connection, a request or an answer, ends a session in which nothing is said for ten minutes (A35): the
/// clock jumps over them, so that all that are due within them have their turn.
#[tokio::test]
async fn a_session_that_is_silent_for_ten_minutes_goes_on() {
    let streaming = Streaming::start(|_| {}).await;
    let (mut client, mut runtime, _) = streaming.session().await;
    let mut heard = [0; 3];
    tokio::time::pause();
    for _ in 0..10 {
        tokio::time::advance(Duration::from_secs(60)).await;
        tokio::task::yield_now().await;
    }
    tokio::time::resume();
    client.write_all(b"one").await.unwrap();
    runtime.read_exact(&mut heard).await.unwrap();
    runtime.write_all(b"two").await.unwrap();
    client.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"two");
}

#[tokio::test(start_paused = true)]
async fn sessions_without_traffic_end() {
    use crate::secure::upgrade::relay;
    let minute = Duration::from_secs(60);
    let (mut client, near) = tokio::io::duplex(64);
    let (far, mut runtime) = tokio::io::duplex(64);
    let began = tokio::time::Instant::now();
    let session = tokio::spawn(async move {
        relay(near, far, minute).await;
        began.elapsed()
    });
    tokio::time::sleep(minute / 2).await;
    client.write_all(b"x").await.unwrap();
    runtime.read_u8().await.unwrap();
    tokio::time::sleep(minute / 2).await;
    runtime.write_all(b"x").await.unwrap();
    client.read_u8().await.unwrap();
    assert_eq!(session.await.unwrap().as_secs(), 120);
    // Zero: however long.
    let (_client, near) = tokio::io::duplex(64);
    let (far, _runtime) = tokio::io::duplex(64);
    let week = Duration::from_secs(7 * 86400);
    assert!(tokio::time::timeout(week, relay(near, far, Duration::ZERO)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals() {
    let streaming = Streaming::start(|_| {}).await;
    let upgrade = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
    let exec = "POST /exec/default/web/app?command=a&output=1";
    // The runtime's own "no", with its header fields.
    let ask = streaming.running.ask_as(None, exec, &upgrade);
    let refuse = async {
        let (mut runtime, _) = streaming.listener.accept().await.unwrap();
        read_head(&mut runtime).await;
        let answer = "HTTP/1.1 403 Forbidden\r\nX-Accepted-Stream-Protocol-Versions: channel.k8s.io\r\nContent-Length: 9\r\n\r\nno such x";
        runtime.write_all(answer.as_bytes()).await.unwrap();
    };
    let (answer, ()) = tokio::join!(ask, refuse);
    assert_eq!((answer.status, answer.body.as_str()), (403, "no such x"));
    assert_eq!(answer.headers["x-accepted-stream-protocol-versions"], "channel.k8s.io");
    for (request, status, text) in [
        ("POST /exec/default/idle/app?output=1", 500, "container not found (\"app\")"),
        ("POST /attach/default/idle/app?output=1", 500, "container app not found in pod idle_default"),
        ("POST /portForward/default/idle", 500, "pod not found (\"idle_default\")"),
        ("POST /exec/default/none/app?output=1", 404, "pod does not exist"),
        ("POST /exec/default/web/app", 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("POST /exec/default/web/app?output=1", 500, "Upgrade request required\n"),
    ] {
        let answer = streaming.running.ask(request).await;
        assert_eq!((answer.status, answer.body.as_str()), (status, text), "{request}");
    }
    // Nobody is there.
    let url = "http://127.0.0.1:1/exec/token".to_owned();
    for (url, text) in
        [(url, "error dialing backend: "), ("https://x/".into(), "the runtime's streaming server is not spoken to")]
    {
        *streaming.running.containers.url.lock().unwrap() = url;
        let answer = streaming.running.ask_as(None, exec, &upgrade).await;
        assert_eq!(answer.status, 500);
        assert!(answer.body.starts_with(text), "{answer:?}");
    }
}
