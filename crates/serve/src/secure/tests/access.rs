//! Who gets in, and what they may.

use super::*;

struct Cluster {
    running: Running,
    api: Arc<FakeApi>,
    ca: Ca,
}

impl Cluster {
    async fn start(anonymous: bool, tokens: bool, webhook: bool) -> Self {
        let (api, ca) = (Arc::new(FakeApi::default()), Ca::new("clients"));
        let (seen, pem) = (api.clone(), ca.pem.clone());
        let running = Running::start(FakePods::default(), move |directory, parts| {
            let file = directory.join("client-ca.crt");
            std::fs::write(&file, pem).unwrap();
            let tokens = tokens.then(|| (seen.clone() as Arc<dyn AuthApi>, Duration::from_secs(120)));
            parts.authentication = Authentication { client_ca_file: Some(file), tokens, anonymous };
            if webhook {
                parts.authorization = Authorization::Webhook {
                    api: seen,
                    keep_allowed: Duration::from_secs(300),
                    keep_denied: Duration::from_secs(30),
                };
            }
        })
        .await;
        Self { running, api, ca }
    }
}

#[tokio::test]
async fn who_somebody_is() {
    let other = Ca::new("others");
    for anonymous in [false, true] {
        let cluster = Cluster::start(anonymous, true, false).await;
        cluster.api.tokens.lock().unwrap().insert("good".into(), "bob".into());
        let ca = &cluster.ca;
        let past = |p: &mut CertificateParams| p.not_after = rcgen::date_time_ymd(2021, 1, 1);
        let alice = ca.sign("alice", &["dev"], |_| {});
        let expired = ca.sign("alice", &[], past);
        let early = ca.sign("alice", &[], |p| p.not_before = rcgen::date_time_ymd(2100, 1, 1));
        let server = ca.sign("alice", &[], |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
        let nameless = ca.sign("", &["dev"], |_| {});
        let stranger = other.sign("alice", &[], |_| {});
        let nobody = if anonymous { 200 } else { 401 };
        for (what, who, token, status) in [
            ("nothing", None, "", nobody),
            ("a certificate", Some(&alice), "", 200),
            ("expired", Some(&expired), "", 401),
            ("not valid yet", Some(&early), "", 401),
            ("a server's", Some(&server), "", 401),
            ("without a name", Some(&nameless), "", nobody),
            ("another CA's", Some(&stranger), "", 401),
            ("a token", None, "Bearer good", 200),
            ("a token in other letters", None, "bearer good", 200),
            ("a bad token", None, "Bearer bad", 401),
            ("no token", None, "Bearer ", nobody),
            ("another scheme", None, "Basic good", nobody),
            ("a bad certificate and a good token", Some(&stranger), "Bearer good", 200),
        ] {
            let headers = [("authorization", token)];
            let headers = if token.is_empty() { &headers[..0] } else { &headers[..] };
            let answer = cluster.running.ask_as(who, "GET /healthz", headers).await;
            let expected = if status == 401 { "Unauthorized" } else { "ok" };
            assert_eq!((answer.status, answer.body.as_str()), (status, expected), "{what}, anonymous {anonymous}");
        }
        // Whom nobody has to ask about.
        assert_eq!(cluster.running.ask_as(Some(&stranger), "GET /unknown", &[]).await.status, 404);
        assert_eq!(cluster.running.ask_as(Some(&stranger), "GET /stats", &[]).await.status, 307);
        assert_eq!(cluster.running.ask_as(Some(&stranger), "GET /containerLogs", &[]).await.status, 401);
    }
}

#[tokio::test]
async fn without_any_way_nobody_gets_in() {
    let running = Running::start(FakePods::default(), |_, parts| parts.authentication.anonymous = false).await;
    assert_eq!(running.ask("GET /healthz").await.status, 401);
}

/// For each endpoint: nobody, somebody with nothing, with its own subresource, with the general one, with another's.
#[tokio::test]
async fn what_somebody_may() {
    let other = Ca::new("others");
    for (request, verb, fine) in [
        ("GET /pods", "get", "pods"),
        ("GET /pods/", "get", "pods"),
        ("GET /runningpods/", "get", "pods"),
        ("GET /healthz", "get", "healthz"),
        ("GET /healthz/ping", "get", "healthz"),
        ("GET /configz", "get", "configz"),
        ("GET /metrics", "get", "metrics"),
        ("GET /metrics/slis", "get", "metrics"),
        ("GET /stats/summary", "get", "stats"),
        ("GET /logs/", "get", "log"),
        ("GET /logs/a/b", "get", "log"),
        ("GET /logs/%2e%2e/exec", "get", "log"),
        ("GET /logs/?query=x", "get", "log"),
        ("POST /checkpoint/default/a/b", "create", "checkpoint"),
        ("GET /flagz", "get", "configz"),
        ("GET /statusz", "get", "statusz"),
        ("GET /debug/pods", "get", "pods"),
        ("PUT /debug/flags/v", "update", "proxy"),
        ("GET /debug/pprof/heap", "get", "proxy"),
        ("GET /containerLogs/default/a/b", "get", "proxy"),
        ("POST /run/default/a/b", "create", "proxy"),
        ("GET /exec/default/a/b?output=1", "get", "proxy"),
        ("POST /exec/default/a/b?output=1", "create", "proxy"),
        ("POST /attach/default/a/b?output=1", "create", "proxy"),
        ("POST /portForward/default/a", "create", "proxy"),
        ("PATCH /exec/default/a/b", "patch", "proxy"),
        ("DELETE /pods", "delete", "pods"),
        ("PUT /pods", "update", "pods"),
        ("OPTIONS /pods", "", "pods"),
        ("GET /debug/pprof/", "get", "proxy"),
    ] {
        // Of the old ones; those that came with a right of their own have no other.
        let has_proxy = ["pods", "healthz", "configz"].contains(&fine) && !request.ends_with("/flagz");
        let subresources = if has_proxy { format!("{fine} proxy") } else { fine.to_owned() };
        let forbidden = format!("Forbidden (user=bob, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n");
        for (granted, allowed) in
            [(None, false), (Some(fine), true), (Some("proxy"), has_proxy || fine == "proxy"), (Some("other"), false)]
        {
            let cluster = Cluster::start(false, true, true).await;
            cluster.api.tokens.lock().unwrap().insert("t".into(), "bob".into());
            let grant = granted.map(|s| ("bob".to_owned(), verb.to_owned(), s.to_owned()));
            cluster.api.allowed.lock().unwrap().extend(grant);
            let answer = cluster.running.ask_as(None, request, &[("authorization", "Bearer t")]).await;
            if allowed {
                let refused = answer.status == 401 || answer.body.starts_with("Forbidden (");
                assert!(!refused, "{request} with {granted:?}: {answer:?}");
            } else {
                assert_eq!((answer.status, &answer.body), (403, &forbidden), "{request} with {granted:?}");
            }
            assert_eq!(cluster.running.ask(request).await.status, 401, "{request}");
        }
        // Whoever is not known gets nowhere, whatever the name on the certificate may do.
        let cluster = Cluster::start(false, true, true).await;
        let all = ["pods", "healthz", "configz", "metrics", "stats", "log", "checkpoint", "statusz", "proxy"];
        let may = all.map(|s| ("bob".to_owned(), verb.to_owned(), s.to_owned()));
        cluster.api.allowed.lock().unwrap().extend(may);
        let past = |p: &mut CertificateParams| p.not_after = rcgen::date_time_ymd(2021, 1, 1);
        let (stranger, expired) = (other.sign("bob", &[], |_| {}), cluster.ca.sign("bob", &[], past));
        let known = cluster.ca.sign("bob", &[], |_| {});
        for (what, who, token, in_or_out) in [
            ("a wrong CA", Some(&stranger), None, false),
            ("an expired certificate", Some(&expired), None, false),
            ("a token that is refused", None, Some("Bearer bad"), false),
            ("a good certificate", Some(&known), None, true),
        ] {
            let headers: Vec<(&str, &str)> = token.map(|t| ("authorization", t)).into_iter().collect();
            let answer = cluster.running.ask_as(who, request, &headers).await;
            assert_eq!(answer.status != 401, in_or_out, "{request} with {what}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn the_question_and_its_caches() {
    let cluster = Cluster::start(true, true, true).await;
    let alice = cluster.ca.sign("alice", &["dev"], |_| {});
    let may = ("alice".to_owned(), "get".to_owned(), "proxy".to_owned());
    cluster.api.allowed.lock().unwrap().insert(may);
    for _ in 0..3 {
        assert_eq!(cluster.running.ask_as(Some(&alice), "GET /pods", &[]).await.status, 200);
    }
    {
        let asked = cluster.api.asked.lock().unwrap();
        assert_eq!(asked.len(), 2, "the fine one, then the general one, then from memory");
        let mut spec = serde_json::to_value(&asked[0].spec).unwrap();
        let id = spec["extra"].take()["authentication.kubernetes.io/credential-id"][0].as_str().unwrap().to_owned();
        assert!(id.starts_with("X509SHA256=") && id.len() == 11 + 64, "{id}");
        let expected = json!({"user": "alice", "groups": ["dev", "system:authenticated"], "extra": null,
            "resourceAttributes": {"verb": "get", "version": "v1", "resource": "nodes", "subresource": "pods", "name": "node-a"}});
        assert_eq!(spec, expected);
    }
    let answer = cluster.running.ask("GET /metrics").await;
    assert_eq!(answer.status, 403);
    let spec = cluster.api.asked.lock().unwrap().last().unwrap().spec.clone();
    assert_eq!(
        (spec.user.as_deref(), spec.groups),
        (Some("system:anonymous"), Some(vec!["system:unauthenticated".into()]))
    );
    // A denial is kept too.
    let before = cluster.api.reviews.load(Ordering::Relaxed);
    cluster.running.ask("GET /metrics").await;
    assert_eq!(cluster.api.reviews.load(Ordering::Relaxed), before);
}

#[tokio::test]
async fn nobody_can_be_asked() {
    let cluster = Cluster::start(false, true, true).await;
    let alice = cluster.ca.sign("alice", &[], |_| {});
    *cluster.api.down.lock().unwrap() = Some(ErrorKind::Forbidden);
    let answer = cluster.running.ask_as(Some(&alice), "GET /pods", &[]).await;
    let text = "Authorization error (user=alice, verb=get, resource=nodes, subresource=pods)";
    assert_eq!((answer.status, answer.body.as_str()), (500, text));
    let answer = cluster.running.ask_as(None, "GET /pods", &[("authorization", "Bearer t")]).await;
    assert_eq!((answer.status, answer.body.as_str()), (401, "Unauthorized"));
    // Nothing of it is kept.
    *cluster.api.down.lock().unwrap() = None;
    let may = ("alice".to_owned(), "get".to_owned(), "pods".to_owned());
    cluster.api.allowed.lock().unwrap().insert(may);
    assert_eq!(cluster.running.ask_as(Some(&alice), "GET /pods", &[]).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn passing_failures_are_asked_about_again() {
    let tries = AtomicUsize::new(0);
    let answer = crate::secure::authz::retried(|| async {
        match tries.fetch_add(1, Ordering::Relaxed) {
            0..3 => Err(ClusterError::new("ask", ErrorKind::Unreachable, "refused")),
            n => Ok(n),
        }
    });
    assert_eq!(answer.await.unwrap(), 3);
    let never = crate::secure::authz::in_time(std::future::pending::<ClusterResult<()>>());
    assert_eq!(never.await.unwrap_err().kind, ErrorKind::Timeout);
}

#[tokio::test]
async fn another_client_ca_takes_effect_at_once() {
    let cluster = Cluster::start(false, false, false).await;
    let (new, alice) = (Ca::new("new"), cluster.ca.sign("alice", &[], |_| {}));
    let carol = new.sign("carol", &[], |_| {});
    let file = cluster.running.directory.path().join("client-ca.crt");
    let status = async |who| cluster.running.ask_as(Some(who), "GET /healthz", &[]).await.status;
    assert_eq!((status(&alice).await, status(&carol).await), (200, 401));
    std::fs::write(&file, "half a file").unwrap();
    assert_eq!((status(&alice).await, status(&carol).await), (200, 401));
    std::fs::write(&file, &new.pem).unwrap();
    assert_eq!((status(&alice).await, status(&carol).await), (401, 200));
}
