//! TLS as configured, and certificates that change while the server runs.

use tokio::sync::watch;

use super::*;
use cluster::pki::Identity;

/// The server's certificate, version and suite that a client gets.
async fn shake(running: &Running, change: impl FnOnce(&mut ClientConfig)) -> Option<(Vec<u8>, String, String)> {
    let mut config = client(None);
    change(&mut config);
    let stream = running.connect(config).await.ok()?;
    let tls = stream.get_ref().1;
    let certificate = tls.peer_certificates()?[0].to_vec();
    Some((
        certificate,
        format!("{:?}", tls.protocol_version()?),
        format!("{:?}", tls.negotiated_cipher_suite()?.suite()),
    ))
}

fn only_tls12(config: &mut ClientConfig) {
    let mut new = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(AnyServer::new(Arc::new(ring::default_provider())))
        .with_no_client_auth();
    new.alpn_protocols = config.alpn_protocols.clone();
    *config = new;
}

#[tokio::test]
async fn versions_and_suites() {
    let chacha = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256";
    for (min, suites, tls12) in [
        ("", &[][..], Some("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384")),
        ("VersionTLS10", &[], Some("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384")),
        ("VersionTLS12", &["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305"], Some(chacha)),
        ("VersionTLS12", &["TLS_AES_128_GCM_SHA256", "TLS_RSA_WITH_AES_128_CBC_SHA"], None),
        ("VersionTLS13", &["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305"], None),
        ("VersionTLS13", &[], None),
    ] {
        let running = Running::start(FakePods::default(), |_, parts| {
            parts.tls.min_version = min.into();
            parts.tls.cipher_suites = suites.iter().map(|s| (*s).to_owned()).collect();
        })
        .await;
        let got = shake(&running, only_tls12).await;
        assert_eq!(got.map(|g| g.2).as_deref(), tls12, "{min} {suites:?}");
        assert_eq!(shake(&running, |_| {}).await.unwrap().1, "TLSv1_3", "{min} {suites:?}");
    }
}

#[tokio::test]
async fn curves() {
    let running = Running::start(FakePods::default(), |_, parts| parts.tls.curves = vec![24, 23]).await;
    let stream = running.connect(client(None)).await.unwrap();
    let group = stream.get_ref().1.negotiated_key_exchange_group().map(|g| g.name());
    // The client would have taken X25519 first.
    assert!(matches!(group, Some(rustls::NamedGroup::secp384r1 | rustls::NamedGroup::secp256r1)), "{group:?}");
    let settings = TlsSettings {
        certificate: ServingCertificate::SelfSigned {
            directory: running.directory.path().join("pki"),
            host: "x".into(),
        },
        min_version: String::new(),
        cipher_suites: Vec::new(),
        curves: vec![25],
    };
    let error = crate::secure::tls::server_config(&settings, false).unwrap_err().to_string();
    assert!(error.contains("none of tlsCurvePreferences [25]"), "{error}");
}

#[tokio::test]
async fn both_protocols() {
    let running = Running::start(FakePods::default(), |_, _| {}).await;
    let mut config = client(None);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = running.connect(config).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, http_body_util::Empty<Bytes>>(
        TokioExecutor::new(),
        TokioIo::new(stream),
    )
    .await
    .unwrap();
    tokio::spawn(connection);
    for (method, path, status) in
        [("GET", "/healthz", 200), ("POST", "/exec/default/x/y?output=1", 404), ("GET", "/pods", 200)]
    {
        let request = Request::builder().method(method).uri(format!("https://localhost{path}"));
        let answer = sender.send_request(request.body(http_body_util::Empty::new()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
    }
}

#[tokio::test]
async fn certificates_from_files() {
    let ca = Ca::new("servers");
    let server = |p: &mut CertificateParams| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let (old, new) = (ca.sign("old", &[], server), ca.sign("new", &[], server));
    let write = |directory: &Path, pair: &Pair| {
        std::fs::write(directory.join("tls.crt"), &pair.certificate).unwrap();
        std::fs::write(directory.join("tls.key"), &pair.key).unwrap();
    };
    let running = Running::start(FakePods::default(), |directory, parts| {
        write(directory, &old);
        let (certificate, key) = (directory.join("tls.crt"), directory.join("tls.key"));
        parts.tls.certificate = ServingCertificate::Files { certificate, key };
    })
    .await;
    let der = |pair: &Pair| Some(CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap().to_vec());
    let got = async || shake(&running, |_| {}).await.map(|g| g.0);
    assert_eq!(got().await, der(&old));
    // Half of the change: the two files do not belong together, and the old pair stays.
    std::fs::write(running.directory.path().join("tls.crt"), &new.certificate).unwrap();
    assert_eq!(got().await, der(&old));
    write(running.directory.path(), &new);
    assert_eq!(got().await, der(&new));
    std::fs::remove_file(running.directory.path().join("tls.key")).unwrap();
    assert_eq!(got().await, der(&new));
}

#[tokio::test]
async fn issued_and_self_signed_certificates() {
    let ca = Ca::new("servers");
    let pair = ca.sign("node", &[], |_| {});
    let identity = Arc::new(Identity::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes()).unwrap());
    let (issue, newest) = watch::channel(None);
    let running =
        Running::start(FakePods::default(), |_, parts| parts.tls.certificate = ServingCertificate::Issued(newest))
            .await;
    assert_eq!(shake(&running, |_| {}).await, None, "there is no certificate yet");
    issue.send_replace(Some(identity.clone()));
    assert_eq!(shake(&running, |_| {}).await.unwrap().0, identity.chain[0].to_vec());

    let running = Running::start(FakePods::default(), |_, _| {}).await;
    let first = shake(&running, |_| {}).await.unwrap().0;
    assert!(running.directory.path().join("pki/kubelet.crt").exists());
    assert_eq!(shake(&running, |_| {}).await.unwrap().0, first);
    let broken = |_: &Path, parts: &mut SecureParts| {
        parts.authentication.client_ca_file = Some("/no/such/ca.crt".into());
    };
    let directory = tempfile::tempdir().unwrap();
    let mut parts = parts(directory.path(), &Arc::new(FakeContainers::default()), FakePods::default());
    broken(directory.path(), &mut parts);
    let error = Server::kubelet(parts).unwrap_err().to_string();
    assert!(error.contains("clientCAFile") && error.contains("/no/such/ca.crt"), "{error}");
}

/// Connections that never speak are let go, and do not keep others out for long.
#[tokio::test]
async fn silent_clients() {
    let directory = tempfile::tempdir().unwrap();
    let containers = Arc::new(FakeContainers::default());
    let limits = Limits { head: Duration::from_millis(100), connections: 2, ..Limits::default() };
    let server =
        Server::kubelet(parts(directory.path(), &containers, FakePods::default())).unwrap().with_limits(limits);
    let bound = server.bind_tcp(([127, 0, 0, 1], 0).into()).await.unwrap();
    let (address, stop) = (bound.local_addr().unwrap(), CancellationToken::new());
    tokio::spawn(bound.run(stop.clone()));
    let connect = || async {
        let stream = TcpStream::connect(address).await.unwrap();
        TlsConnector::from(Arc::new(client(None))).connect(ServerName::try_from("localhost").unwrap(), stream).await
    };
    let (mut one, _two) = (connect().await.unwrap(), connect().await.unwrap());
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(5), one.read_to_end(&mut rest)).await.expect("it is kept");
    tokio::time::timeout(Duration::from_secs(5), connect()).await.expect("nobody else gets in").unwrap();
}
