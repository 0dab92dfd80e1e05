//! The client, the reflector and bootstrap against an API server on the real wire.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod fake;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cluster::calls::{AuthApi, EventApi, LeaseApi, PodApi};
use cluster::kubeconfig::{Auth, Material, Token};
use cluster::pki::Bootstrap;
use cluster::reflect::ReflectorStatus;
use cluster::{Client, ClientOptions, ClusterConfig, Delta, ErrorKind, Reflector, Scope};
use fake::{BlackHole, Ca, Server, What, plain_http, status_text};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

fn config(address: SocketAddr, ca: &str, auth: Auth) -> ClusterConfig {
    ClusterConfig {
        path: "/etc/kubernetes/kubelet.conf".into(),
        server: format!("https://{address}").parse().unwrap(),
        ca: Some(Material::Inline(ca.as_bytes().into())),
        insecure_skip_tls_verify: false,
        tls_server_name: None,
        proxy: None,
        auth,
    }
}

fn options() -> ClientOptions {
    ClientOptions {
        deadline: Duration::from_secs(3),
        ping_idle: Duration::from_millis(150),
        ping_timeout: Duration::from_millis(150),
        ..ClientOptions::new("0.1.0")
    }
}

fn client(server: &Server) -> Client {
    Client::new(config(server.address, &server.ca.pem, Auth::default()), options()).unwrap()
}

fn pod(name: &str) -> serde_json::Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}"),
        "managedFields": [{"manager": "m", "operation": "Update", "fieldsV1": {"f:x": {}}}]}, "spec": {"containers": []}})
}

fn at(name: &str) -> String {
    format!("/api/v1/namespaces/ns/pods/{name}")
}

struct Followed {
    deltas: mpsc::Receiver<Delta<Pod>>,
    status: watch::Receiver<ReflectorStatus>,
    _stop: DropGuard,
}

fn follow(client: &Client) -> Followed {
    let (reflector, deltas, status) =
        Reflector::new(Arc::new(client.clone()), Scope::pods_of_node("n1"), 8, Arc::new(|| 0.0));
    let stop = CancellationToken::new();
    tokio::spawn(reflector.run(stop.clone()));
    Followed { deltas, status, _stop: stop.drop_guard() }
}

impl Followed {
    async fn next(&mut self) -> String {
        let name = |p: Pod| {
            assert!(p.metadata.managed_fields.is_none());
            p.metadata.name.unwrap()
        };
        match tokio::time::timeout(Duration::from_secs(8), self.deltas.recv()).await.expect("a delta").unwrap() {
            Delta::Snapshot(pods) => {
                let mut names: Vec<String> = pods.into_iter().map(name).collect();
                names.sort();
                format!("= {}", names.join(","))
            }
            Delta::Upsert(p) => format!("+ {}", name(p)),
            Delta::Remove(key) => format!("- {} {}", key.name, key.uid),
        }
    }
}

#[tokio::test]
async fn calls_go_over_one_http2_connection_as_the_kubelet() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let client = client(&server);
    client.get_pod("ns", "a").await.unwrap();
    let calls = (0..20).map(|_| client.get_pod("ns", "a"));
    for got in futures::future::join_all(calls).await {
        assert!(got.unwrap().metadata.managed_fields.is_none());
    }
    let seen = server.seen();
    assert!(seen.iter().all(|s| s.http2 && s.connection == 1), "{seen:?}");
    assert!(seen[0].agent.starts_with("kubelet/v1.36.1 (linux/") && seen[0].agent.ends_with(") rubelet/0.1.0"));
}

#[tokio::test]
async fn a_server_without_http2_is_served_too() {
    let ca = Arc::new(Ca::new());
    let pem = ca.issue("server", &["127.0.0.1"], (2020, 2100));
    let server = Server::start_with(ca, &pem, false).await;
    server.put(&at("a"), pod("a"));
    let client = client(&server);
    let mut followed = follow(&client);
    assert_eq!(followed.next().await, "= a");
    client.get_pod("ns", "a").await.unwrap();
    server.put(&at("b"), pod("b"));
    assert_eq!(followed.next().await, "+ b");
    assert!(server.seen().iter().all(|s| !s.http2));
}

#[tokio::test]
async fn each_tls_fault_says_what_to_do() {
    let server = Server::start().await;
    let ca = Arc::new(Ca::new());
    let expired = Server::start_with(ca.clone(), &ca.issue("s", &["127.0.0.1"], (2020, 2021)), true).await;
    let early = Server::start_with(ca.clone(), &ca.issue("s", &["127.0.0.1"], (2090, 2100)), true).await;
    let misnamed = Server::start_with(ca.clone(), &ca.issue("s", &["elsewhere.test"], (2020, 2100)), true).await;
    for (address, ca, word) in [
        (server.address, &ca.pem, "did not sign"),
        (expired.address, &ca.pem, "has expired"),
        (early.address, &ca.pem, "clock is behind"),
        (misnamed.address, &ca.pem, "tls-server-name"),
        (plain_http().await, &ca.pem, "does not speak TLS"),
    ] {
        let client = Client::new(config(address, ca, Auth::default()), options()).unwrap();
        let e = client.get_pod("ns", "a").await.unwrap_err();
        assert!(e.kind == ErrorKind::Tls && e.to_string().contains(word), "{word}: {e}");
        assert!(e.to_string().starts_with("get pod ns/a: TLS: "), "{e}");
    }
    let mut named = config(misnamed.address, &ca.pem, Auth::default());
    named.tls_server_name = Some("elsewhere.test".into());
    let e = Client::new(named, options()).unwrap().get_pod("ns", "a").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::NotFound);
    let mut blind = config(expired.address, &ca.pem, Auth::default());
    (blind.ca, blind.insecure_skip_tls_verify) = (None, true);
    let e = Client::new(blind, options()).unwrap().get_pod("ns", "a").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn nobody_there_is_told_from_no_answer() {
    let server = Server::start().await;
    let free = { std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap() };
    let gone = Client::new(config(free, &server.ca.pem, Auth::default()), options()).unwrap();
    let e = gone.get_pod("ns", "a").await.unwrap_err();
    assert!(e.kind == ErrorKind::Unreachable && e.advice.contains("up and reachable"), "{e}");
    server.fault("/pods/a", What::Hang);
    let start = Instant::now();
    let e = client(&server).with_deadline(Duration::from_millis(200)).get_pod("ns", "a").await.unwrap_err();
    assert!(e.outcome_unknown() && e.message.contains("within 200ms"), "{e}");
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn a_rejected_token_is_read_again_once() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    *server.token.lock().unwrap() = Some("new".into());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "old").unwrap();
    let auth = Auth { token: Some(Token::File(file.clone())), ..Auth::default() };
    let client = Client::new(config(server.address, &server.ca.pem, auth), options()).unwrap();
    let e = client.get_pod("ns", "a").await.unwrap_err();
    assert!(e.kind == ErrorKind::Unauthorized && e.advice.contains("renew"), "{e}");
    assert_eq!(server.seen().len(), 1, "nothing new to try with");
    std::fs::write(&file, "new\n").unwrap();
    client.get_pod("ns", "a").await.unwrap();
    assert_eq!(server.seen().iter().map(|s| s.bearer.as_str()).collect::<Vec<_>>()[1..], ["Bearer old", "Bearer new"]);
}

#[tokio::test]
async fn a_wrong_clock_is_named_when_credentials_are_refused() {
    let server = Server::start().await;
    *server.token.lock().unwrap() = Some("x".into());
    *server.date.lock().unwrap() = Some("Wed, 01 Jan 2020 00:00:00 GMT".into());
    let client = client(&server);
    let e = client.get_pod("ns", "a").await.unwrap_err();
    assert!(e.advice.contains("s ahead of the API server's"), "{e}");
    assert!(client.clock_skew().as_hours() < -24 * 365);
}

/// A redirect is an answer that cannot be used: neither is it followed, nor does anybody else get the token.
#[tokio::test]
async fn no_redirect_is_followed() {
    let server = Server::start().await;
    // One that the client would trust.
    let pem = server.ca.issue("other", &["127.0.0.1"], (2020, 2100));
    let other = Server::start_with(server.ca.clone(), &pem, true).await;
    server.put(&at("a"), pod("a"));
    other.put(&at("a"), pod("a"));
    let auth = Auth { token: Some(Token::Inline("secret".into())), ..Auth::default() };
    let client = Client::new(config(server.address, &server.ca.pem, auth), options()).unwrap();
    for status in [301, 302, 303, 307, 308] {
        let place = ("location", format!("https://{}{}", other.address, at("a")));
        server.fault("/pods/a", What::Answer(status, vec![place], String::new()));
        client.get_pod("ns", "a").await.unwrap_err();
    }
    assert_eq!(server.seen().len(), 5, "{:?}", server.seen());
    assert!(other.seen().is_empty(), "{:?}", other.seen());
    client.get_pod("ns", "a").await.unwrap();
}

#[tokio::test]
async fn retry_after_is_honoured_and_bounded_by_the_deadline() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let busy = |s: u32| {
        What::Answer(429, vec![("retry-after", s.to_string())], status_text(429, "TooManyRequests", "slow down"))
    };
    server.fault("/pods/a", busy(1));
    let start = Instant::now();
    client(&server).get_pod("ns", "a").await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));
    server.fault("/pods/a", busy(60));
    let e = client(&server).with_deadline(Duration::from_secs(20)).get_pod("ns", "a").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Throttled { retry_after: Some(Duration::from_secs(60)) });
    server.fault("/pods/a", What::Answer(429, vec![], status_text(429, "TooManyRequests", "slow down")));
    let e = client(&server).get_pod("ns", "a").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Throttled { retry_after: None });
}

#[tokio::test]
async fn writes_carry_uid_type_and_grace() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let client = client(&server);
    let patch = |uid: &str| json!({"metadata": {"uid": uid}, "status": {"phase": "Running"}});
    let e = client.patch_pod_status("ns", "a", &patch("other")).await.unwrap_err();
    assert!(e.is_other_uid(), "{e}");
    let patched = client.patch_pod_status("ns", "a", &patch("u-a")).await.unwrap();
    assert_eq!(patched.status.unwrap().phase.as_deref(), Some("Running"));
    let seen = server.seen();
    assert_eq!(seen[1].path, "/api/v1/namespaces/ns/pods/a/status");
    assert_eq!(seen[1].content_type, "application/strategic-merge-patch+json");
    assert!(client.delete_pod("ns", "a", 0, Some("other")).await.unwrap_err().is_other_uid());
    client.delete_pod("ns", "a", 0, Some("u-a")).await.unwrap();
    assert_eq!(server.seen()[3].body["gracePeriodSeconds"], 0);
    assert!(client.get_pod("ns", "a").await.unwrap_err().is_not_found());
    let mirror: Pod = serde_json::from_value(pod("m")).unwrap();
    client.create_pod(&mirror).await.unwrap();
    assert!(client.create_pod(&mirror).await.unwrap_err().is_already_exists());
    client.get_lease("kube-node-lease", "n1").await.unwrap_err();
    client.request_token("ns", "default", &Default::default()).await.unwrap();
    client
        .create_event(&cluster::events::correlate::make(
            &Default::default(),
            "kubelet",
            "n1",
            "Normal",
            "Starting",
            "m",
            jiff::Timestamp::now(),
        ))
        .await
        .unwrap();
    let paths: Vec<String> = server.seen().iter().rev().take(3).map(|s| s.path.clone()).collect();
    assert_eq!(paths[2], "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1");
    assert_eq!(paths[1], "/api/v1/namespaces/ns/serviceaccounts/default/token");
    assert_eq!(paths[0], "/api/v1/namespaces/default/events");
}

#[tokio::test]
async fn a_collection_is_followed_streamed_and_paged() {
    for streamed in [true, false] {
        let server = Server::start().await;
        server.streams_lists.store(streamed, Ordering::SeqCst);
        for name in ["a", "b", "c"] {
            server.put(&at(name), pod(name));
        }
        let mut followed = follow(&client(&server));
        assert_eq!(followed.next().await, "= a,b,c");
        server.put(&at("d"), pod("d"));
        assert_eq!(followed.next().await, "+ d");
        server.remove(&at("a"));
        assert_eq!(followed.next().await, "- a u-a");
        let seen = server.seen();
        assert!(seen.iter().all(|s| s.path.contains("fieldSelector=spec.nodeName%3Dn1")), "{seen:?}");
        let lists = seen.iter().filter(|s| !s.path.contains("watch=true")).count();
        assert_eq!(lists, if streamed { 0 } else { 2 }, "the fake's pages hold two");
    }
}

#[tokio::test]
async fn gone_and_torn_watches_take_a_new_picture() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    // The first watch brings its picture and is closed; what follows is compacted away.
    let first = json!({"type": "ADDED", "object": pod("a")}).to_string();
    let end = json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "11", "annotations": {"k8s.io/initial-events-end": "true"}}}}).to_string();
    server.fault("sendInitialEvents", What::Lines(vec![first, end]));
    server.put(&at("b"), pod("b"));
    server.compact();
    let mut followed = follow(&client(&server));
    assert_eq!(followed.next().await, "= a");
    assert_eq!(followed.next().await, "= a,b");
    let asked: Vec<String> = server.seen().iter().map(|s| s.path.clone()).collect();
    assert!(asked[1].contains("resourceVersion=11") && !asked[1].contains("sendInitialEvents"), "{asked:?}");
    assert!(asked[2].contains("sendInitialEvents") && !asked[2].contains("resourceVersion=1"), "{asked:?}");

    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let first = json!({"type": "ADDED", "object": pod("a")}).to_string();
    let end = json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "11", "annotations": {"k8s.io/initial-events-end": "true"}}}}).to_string();
    server.fault("sendInitialEvents", What::Torn(vec![first, end]));
    let mut followed = follow(&client(&server));
    assert_eq!(followed.next().await, "= a");
    assert_eq!(followed.next().await, "= a");
    server.put(&at("b"), pod("b"));
    assert_eq!(followed.next().await, "+ b");
}

#[tokio::test]
async fn a_connection_that_swallows_packets_is_noticed() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let hole = BlackHole::start(server.address).await;
    let client = Client::new(config(hole.address, &server.ca.pem, Auth::default()), options()).unwrap();
    let mut followed = follow(&client);
    assert_eq!(followed.next().await, "= a");
    hole.freeze(true);
    server.put(&at("b"), pod("b"));
    let start = Instant::now();
    let failed = followed.status.wait_for(|s| s.error.is_some());
    let error = tokio::time::timeout(Duration::from_secs(5), failed).await.unwrap().unwrap().error.clone().unwrap();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    hole.freeze(false);
    assert_eq!(followed.next().await, "= a,b");
}

#[tokio::test]
async fn connections_can_be_cut_from_outside() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let options = ClientOptions { ping_idle: Duration::from_secs(600), ..options() };
    let client = Client::new(config(server.address, &server.ca.pem, Auth::default()), options).unwrap();
    let mut followed = follow(&client);
    assert_eq!(followed.next().await, "= a");
    client.close_connections();
    assert_eq!(followed.next().await, "= a");
    assert_eq!(server.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_rotated_client_certificate_is_used_without_restart_and_breaks_no_watch() {
    let server = Server::start().await;
    server.put(&at("a"), pod("a"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("current.pem");
    std::fs::write(&file, server.ca.issue("system:node:one", &[], (2020, 2100))).unwrap();
    let material = Material::File(file.clone());
    let auth = Auth { certificate: Some((material.clone(), material)), ..Auth::default() };
    let client = Client::new(config(server.address, &server.ca.pem, auth), options()).unwrap();
    let mut followed = follow(&client);
    assert_eq!(followed.next().await, "= a");
    std::fs::write(&file, server.ca.issue("system:node:two", &[], (2020, 2100))).unwrap();
    client.credentials().recheck().await;
    client.get_pod("ns", "a").await.unwrap();
    let seen = server.seen();
    assert_eq!((seen[0].peer.as_str(), seen[0].connection), ("system:node:one", 1));
    assert_eq!((seen[1].peer.as_str(), seen[1].connection), ("system:node:two", 2));
    server.put(&at("b"), pod("b"));
    assert_eq!(followed.next().await, "+ b");
    assert_eq!(server.seen().len(), 2, "the watch went on");
}

#[tokio::test]
async fn bootstrap_ends_in_a_kubeconfig_that_works() {
    let server = Server::start().await;
    *server.token.lock().unwrap() = Some("boot.strap".into());
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("ca.crt"), &server.ca.pem).unwrap();
    std::fs::write(
        path("bootstrap.conf"),
        format!(
            "clusters: [{{name: c, cluster: {{server: 'https://{}', certificate-authority: ca.crt}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\nusers: [{{name: u, user: {{token: boot.strap}}}}]\n",
            server.address
        ),
    )
    .unwrap();
    let bootstrap = Bootstrap {
        kubeconfig: path("kubelet.conf"),
        bootstrap_kubeconfig: path("bootstrap.conf"),
        cert_dir: path("pki"),
        node: "n1".into(),
        options: options(),
        unit: Arc::new(|| 0.5),
    };
    assert!(bootstrap.existing().is_none());
    let made = bootstrap.run().await.unwrap();
    assert_eq!(bootstrap.existing(), Some(made.clone()));
    assert!(!path("pki/kubelet-client.key.tmp").exists());
    assert!(path("pki/kubelet-client-current.pem").is_symlink());
    let request = server.seen().into_iter().find(|s| s.method == "POST").unwrap();
    assert_eq!(request.body["spec"]["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
    assert_eq!(request.body["spec"]["usages"], json!(["digital signature", "client auth"]));
    assert!(request.body["metadata"]["name"].as_str().unwrap().starts_with("node-csr-"));
    *server.token.lock().unwrap() = None;
    let client = Client::new(made, options()).unwrap();
    drop(client.get_pod("ns", "a").await);
    assert_eq!(server.seen().last().unwrap().peer, "system:node:n1");
}

#[tokio::test]
async fn a_proxy_in_the_kubeconfig_is_used() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let ca = Arc::new(Ca::new());
    let server = Server::start_with(ca.clone(), &ca.issue("s", &["api.test"], (2020, 2100)), true).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let via = listener.local_addr().unwrap();
    let to = server.address;
    let asked = tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 1024];
        let count = near.read(&mut head).await.unwrap();
        near.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.unwrap();
        let mut far = tokio::net::TcpStream::connect(to).await.unwrap();
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
        String::from_utf8_lossy(&head[..count]).into_owned()
    });
    let mut proxied = config(server.address, &ca.pem, Auth::default());
    proxied.server = "https://api.test:6443".parse().unwrap();
    proxied.proxy = Some(format!("http://user:pass@{via}").parse().unwrap());
    let e = Client::new(proxied, options()).unwrap().get_pod("ns", "a").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::NotFound, "{e}");
    let head = asked.await.unwrap();
    assert!(
        head.starts_with("CONNECT api.test:6443 HTTP/1.1\r\n")
            && head.contains("Proxy-Authorization: Basic dXNlcjpwYXNz"),
        "{head}"
    );
}
