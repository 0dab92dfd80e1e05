//! The local socket from both ends: its API, the file, and what the client says when rubelet is not well.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use model::report::{NodeReport, PodReport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::server::tests::FakeNode;
use crate::{NodeView, Server};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn local_api() {
    let root = tempfile::tempdir().unwrap();
    let socket = crate::socket_path(root.path());
    let node = Arc::new(FakeNode::default());
    let bound = Server::local(node.clone()).bind_unix(&socket).await.unwrap();
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    let stop = CancellationToken::new();
    let task = tokio::spawn(bound.run(stop.clone()));

    let pods: Vec<PodReport> = get_json(&socket, "/v1/pods").await.unwrap();
    assert_eq!(pods, node.pod_reports());
    for path in
        ["/v1/pods/kube-system/etcd-node-a", "/v1/pods/kube-system/436d763b", "/v1/pods/kube-system/et", "/v1/pods/et"]
    {
        let pod: PodReport = get_json(&socket, path).await.unwrap();
        assert_eq!(pod.name, "etcd-node-a", "{path}");
    }
    let report: NodeReport = get_json(&socket, "/v1/node").await.unwrap();
    assert_eq!(report, node.node_report());
    let configz: serde_json::Value = get_json(&socket, "/v1/configz").await.unwrap();
    assert_eq!(configz, node.configz());

    for (path, status, message) in [
        ("/v1/pods/default/nope", 404, "no pod \"nope\" in namespace default"),
        ("/v1/pods/nope", 404, "no pod \"nope\" on this node"),
        (
            "/v1/pods/default/web",
            409,
            "\"web\" fits several pods: default/web-node-a (0f7af893), default/web-node-b (3fcf1f62)",
        ),
        ("/v2/pods", 404, "/v2/pods is not served by this version of rubelet"),
    ] {
        match get_json::<PodReport>(&socket, path).await.unwrap_err() {
            ClientError::Refused { status: have, message: text } => {
                assert_eq!((have.as_u16(), text.as_str()), (status, message));
            }
            other => panic!("{path}: {other}"),
        }
    }
    let post = "POST /v1/pods HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut stream = UnixStream::connect(&socket).await.unwrap();
    stream.write_all(post.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("allow: GET\r\n"), "{answer}");
    assert!(answer.ends_with(r#"{"error":"POST is not served here, only GET"}"#), "{answer}");

    // A second one must not take the place of the first.
    let error = Server::local(node.clone()).bind_unix(&socket).await.unwrap_err();
    assert!(error.to_string().ends_with("another rubelet runs with this --root-dir: stop it first"), "{error}");

    stop.cancel();
    assert_eq!(task.await.unwrap().drain(Duration::from_secs(60)).await, 0);
    assert!(!socket.exists());
}

#[tokio::test]
async fn what_lies_at_the_sockets_path() {
    let root = tempfile::tempdir().unwrap();
    let socket = crate::socket_path(root.path());
    let node = Arc::new(FakeNode::default());
    // Left behind by a process that was killed.
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let bound = Server::local(node.clone()).bind_unix(&socket).await.unwrap();
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    // Another one's socket is left alone at the end.
    std::fs::remove_file(&socket).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    drop(bound);
    assert!(socket.exists());

    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "precious").unwrap();
    let error = Server::local(node.clone()).bind_unix(&socket).await.unwrap_err();
    assert!(error.to_string().ends_with("it is no socket: remove it"), "{error}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");

    let long = root.path().join("x".repeat(120));
    let error = Server::local(node).bind_unix(&crate::socket_path(&long)).await.unwrap_err();
    assert!(error.to_string().contains("choose a shorter --root-dir"), "{error}");
}

#[tokio::test]
async fn client_says_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("rubelet.sock");
    let error = get_json::<NodeReport>(&socket, "/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
    assert!(error.to_string().ends_with("rubelet.sock: is rubelet running with this --root-dir?"), "{error}");

    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let error = get_json::<NodeReport>(&socket, "/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");

    let error = get_json::<NodeReport>(&socket, "/v1/pods/a b").await.unwrap_err();
    assert!(matches!(error, ClientError::BadPath { .. }), "{error}");

    std::fs::remove_file(&socket).unwrap();
    let bound = Server::local(Arc::new(FakeNode::default())).bind_unix(&socket).await.unwrap();
    let server = tokio::spawn(bound.run(CancellationToken::new()));
    let error = get_json::<NodeReport>(&socket, "/v1/configz").await.unwrap_err();
    assert!(matches!(error, ClientError::Undecodable { .. }), "{error}");
    server.abort();
}

/// A rubelet that accepts but never answers.
#[tokio::test(start_paused = true)]
async fn client_gives_up_on_a_hung_rubelet() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("rubelet.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let error = get_json::<NodeReport>(&socket, "/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::Hung { after, .. } if after.as_secs() == 10), "{error}");
}

/// And one that dies in the middle.
#[tokio::test]
async fn client_sees_a_broken_connection() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("rubelet.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 16];
        let _ = stream.read(&mut head).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{").await;
    });
    let error = get_json::<NodeReport>(&socket, "/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    server.await.unwrap();
}
