//! Against a real API server with the node authorizer and NodeRestriction, and a controller-manager that approves and signs.
//!
//! `RUBELET_TEST_KUBECONFIG` names an administrator's kubeconfig, `RUBELET_TEST_BOOTSTRAP` one with a bootstrap token:
//! `cargo test -p cluster --test real -- --ignored --test-threads=1`. `RUBELET_TEST_APISERVER_PID` is the server's process, which one test
//! stops for a while (SIGSTOP).

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use cluster::calls::{AuthApi, LeaseApi, NodeApi, PodApi};
use cluster::client::{Call, PatchType};
use cluster::events::Recorder;
use cluster::object_cache::{ObjectCache, Strategy};
use cluster::pki::manager::serving_template;
use cluster::pki::{Bootstrap, CertManager, FileStore, Purpose};
use cluster::{
    Client, ClientOptions, ClusterConfig, Delta, ErrorKind, Reflector, Scope, patch, system_unit, system_wall,
};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenReview};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node, ObjectReference, Pod, Service};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const NODE: &str = "real-n1";

fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

async fn raw(client: &Client, path: &str) -> Value {
    client.json(Call::get("look", path)).await.unwrap()
}

fn managers(object: &Value) -> Vec<String> {
    let fields = object["metadata"]["managedFields"].as_array().unwrap();
    fields.iter().map(|f| f["manager"].as_str().unwrap().to_owned()).collect()
}

fn pod(name: &str) -> Pod {
    from(json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "configMap": {"name": "cm"}},
                {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"audience": "https://lab", "path": "t"}}]}}]},
    }))
}

fn signal(pid: &str, signal: &str) {
    assert!(std::process::Command::new("kill").args([signal, pid]).status().unwrap().success());
}

#[tokio::test]
#[ignore = "needs a real API server"]
async fn a_server_that_falls_silent_is_noticed_and_taken_up_again() {
    let config = ClusterConfig::load(std::path::Path::new(&std::env::var("RUBELET_TEST_KUBECONFIG").unwrap())).unwrap();
    let pid = std::env::var("RUBELET_TEST_APISERVER_PID").unwrap();
    let options = ClientOptions {
        ping_idle: Duration::from_secs(1),
        ping_timeout: Duration::from_secs(1),
        deadline: Duration::from_secs(2),
        ..ClientOptions::new("0.1.0")
    };
    let client = Client::new(config, options).unwrap();
    let (reflector, mut deltas, mut status) =
        Reflector::<ConfigMap>::new(Arc::new(client.clone()), Scope::named(Some("default"), "late"), 8, system_unit());
    drop(client.delete::<ConfigMap>(Some("default"), "late", None, None).await);
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(reflector.run(stop));
    assert_eq!(deltas.recv().await.unwrap(), Delta::Snapshot(vec![]));
    signal(&pid, "-STOP");
    let start = std::time::Instant::now();
    let e = tokio::time::timeout(Duration::from_secs(10), status.wait_for(|s| s.error.is_some())).await;
    let lost = e.map(|s| s.unwrap().error.clone().unwrap());
    let took = start.elapsed();
    let call = client.get::<Node>(None, "x", true).await.unwrap_err();
    signal(&pid, "-CONT");
    println!("{took:?}: {}", lost.as_ref().unwrap());
    println!("{call}");
    assert_eq!((lost.unwrap().kind, call.kind), (ErrorKind::Timeout, ErrorKind::Timeout));
    let map = from(json!({"metadata": {"name": "late", "namespace": "default"}}));
    while client.create::<ConfigMap>(&map).await.is_err_and(|e| !e.is_already_exists()) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    loop {
        match tokio::time::timeout(Duration::from_secs(60), deltas.recv()).await.unwrap().unwrap() {
            Delta::Snapshot(items) if items.is_empty() => {}
            Delta::Snapshot(items) => break assert_eq!(items[0].metadata.name.as_deref(), Some("late")),
            Delta::Upsert(item) => break assert_eq!(item.metadata.name.as_deref(), Some("late")),
            Delta::Remove(_) => panic!(),
        }
    }
}

#[tokio::test]
#[ignore = "needs a real API server"]
async fn a_node_lives_on_a_real_api_server() {
    let var = |name: &str| std::path::PathBuf::from(std::env::var(name).unwrap());
    let options = ClientOptions::new("0.1.0");
    let admin_config = ClusterConfig::load(&var("RUBELET_TEST_KUBECONFIG")).unwrap();
    let admin = Client::new(admin_config.clone(), options.clone()).unwrap();
    for name in ["p", "q"] {
        drop(admin.delete_pod("default", name, 0, None).await);
    }
    drop(admin.delete::<Node>(None, NODE, None, None).await);
    drop(admin.delete::<ConfigMap>(Some("default"), "cm", None, None).await);

    // Bootstrap.
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = Bootstrap {
        kubeconfig: dir.path().join("kubelet.conf"),
        bootstrap_kubeconfig: var("RUBELET_TEST_BOOTSTRAP"),
        cert_dir: dir.path().join("pki"),
        node: NODE.into(),
        options: options.clone(),
        unit: system_unit(),
    };
    let config = tokio::time::timeout(Duration::from_secs(60), bootstrap.run()).await.unwrap().unwrap();
    let client = Client::new(config, options.clone()).unwrap();
    println!("bootstrapped: {:?}", client.credentials().current().await.unwrap().identity.as_ref().unwrap().info);

    // The node, its status and its lease.
    let node: Node = from(json!({"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}}));
    let made = client.create_node(&node).await.unwrap();
    let other: Node = from(json!({"metadata": {"name": "other"}}));
    let e = client.create_node(&other).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Forbidden, "{e}");
    println!("{e}");
    let old = made.status.clone().unwrap_or_default();
    let mut new = old.clone();
    new.addresses = Some(from(
        json!([{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "InternalIP", "address": "fd00::1"}]),
    ));
    new.conditions = Some(from(
        json!([{"type": "Ready", "status": "True", "reason": "KubeletReady"}, {"type": "X", "status": "True"}]),
    ));
    let change = patch::node_status(&old, &new).unwrap();
    let patched = client.patch_node_status(NODE, &change).await.unwrap().status.unwrap();
    assert_eq!(patched.addresses.as_ref().unwrap().len(), 2);
    let mut next = patched.clone();
    next.conditions.as_mut().unwrap().retain(|c| c.type_ == "Ready");
    next.addresses.as_mut().unwrap().remove(0);
    let change = patch::node_status(&patched, &next).unwrap();
    let patched = client.patch_node_status(NODE, &change).await.unwrap().status.unwrap();
    assert_eq!((patched.conditions.unwrap().len(), patched.addresses.unwrap().len()), (1, 1));
    let mut labelled = made.clone();
    labelled.metadata.labels.as_mut().unwrap().insert("example.com/a".into(), "b".into());
    client.patch_node(NODE, &patch::node(&made, &labelled).unwrap()).await.unwrap();
    let lease: Lease = from(
        json!({"metadata": {"name": NODE, "namespace": "kube-node-lease"}, "spec": {"holderIdentity": NODE, "leaseDurationSeconds": 40}}),
    );
    drop(admin.delete::<Lease>(Some("kube-node-lease"), NODE, None, None).await);
    let mut lease = client.create_lease(&lease).await.unwrap();
    lease.spec.as_mut().unwrap().lease_duration_seconds = Some(41);
    let stale = lease.clone();
    client.update_lease(&lease).await.unwrap();
    assert_eq!(client.update_lease(&stale).await.unwrap_err().kind, ErrorKind::Conflict);

    // Its pods.
    let (reflector, mut deltas, _status) =
        Reflector::<Pod>::new(Arc::new(client.clone()), Scope::pods_of_node(NODE), 8, system_unit());
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(reflector.run(stop.clone()));
    assert_eq!(deltas.recv().await.unwrap(), Delta::Snapshot(vec![]));
    admin
        .create::<ConfigMap>(&from(json!({"metadata": {"name": "cm", "namespace": "default"}, "data": {"k": "1"}})))
        .await
        .unwrap();
    let p = admin.create_pod(&pod("p")).await.unwrap();
    let uid = p.metadata.uid.clone().unwrap();
    let Delta::Upsert(seen) = deltas.recv().await.unwrap() else { panic!() };
    assert_eq!(seen.metadata.uid, p.metadata.uid);
    assert!(seen.metadata.managed_fields.is_none());

    // Its status, written as the kubelet.
    let old = seen.status.clone().unwrap();
    let mut running = old.clone();
    running.phase = Some("Running".into());
    running.pod_ips = Some(from(json!([{"ip": "10.1.0.1"}])));
    running.pod_ip = Some("10.1.0.1".into());
    running.conditions.get_or_insert_default().push(from(json!({"type": "Ready", "status": "True"})));
    let change = patch::pod_status(&uid, &old, &running).unwrap();
    let wrong = patch::pod_status("1-2", &old, &running).unwrap();
    assert!(client.patch_pod_status("default", "p", &wrong).await.unwrap_err().is_other_uid());
    let stored = client.patch_pod_status("default", "p", &change).await.unwrap().status.unwrap();
    let mut moved = stored.clone();
    moved.pod_ips = Some(from(json!([{"ip": "10.1.0.2"}])));
    moved.pod_ip = Some("10.1.0.2".into());
    let change = patch::pod_status(&uid, &stored, &moved).unwrap();
    let stored = client.patch_pod_status("default", "p", &change).await.unwrap().status.unwrap();
    assert_eq!(stored.pod_ips.unwrap().len(), 1);
    let written = raw(&admin, "/api/v1/namespaces/default/pods/p").await;
    println!("field managers: {:?}", managers(&written));
    assert!(managers(&written).contains(&"kubelet".to_owned()));
    let (Delta::Upsert(_), Delta::Upsert(_)) = (deltas.recv().await.unwrap(), deltas.recv().await.unwrap()) else {
        panic!()
    };

    // What its pods use: the node authorizer allows it for the pod's sake only.
    let cache = ObjectCache::<ConfigMap>::new(Arc::new(client.clone()), Strategy::Watch, system_unit());
    cache.acquire("default", "cm");
    cache.acquire("default", "foreign");
    let mut got = cache.get("default", "cm").await;
    for _ in 0..20 {
        if got.is_ok() {
            break;
        }
        got = cache.get("default", "cm").await;
    }
    assert_eq!(got.unwrap().data.as_ref().unwrap()["k"], "1");
    let e = cache.get("default", "foreign").await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Forbidden, "{e}");
    println!("{e}");
    let change = json!({"data": {"k": "2"}});
    admin.patch::<ConfigMap>(Some("default"), "cm", None, PatchType::Merge, &change).await.unwrap();
    for _ in 0..100 {
        if cache.get("default", "cm").await.unwrap().data.as_ref().unwrap()["k"] == "2" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(cache.get("default", "cm").await.unwrap().data.as_ref().unwrap()["k"], "2");

    // Services, tokens and reviews.
    let (services, mut of_services, _s) =
        Reflector::<Service>::new(Arc::new(client.clone()), Scope::all(), 8, system_unit());
    tokio::spawn(services.without_streaming().run(stop.clone()));
    let Delta::Snapshot(services) = of_services.recv().await.unwrap() else { panic!() };
    assert!(services.iter().any(|s| s.metadata.name.as_deref() == Some("kubernetes")));
    let request: TokenRequest = from(json!({"spec": {"audiences": ["https://lab"], "expirationSeconds": 3600,
        "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": uid}}}));
    let token = client.request_token("default", "default", &request).await.unwrap().status.unwrap().token.unwrap();
    assert_eq!(token.split('.').count(), 3);
    let review: TokenReview = from(json!({"spec": {"token": token, "audiences": ["https://lab"]}}));
    let answer = client.review_token(&review).await.unwrap().status.unwrap();
    assert_eq!(answer.user.unwrap().username.as_deref(), Some("system:serviceaccount:default:default"));
    let review: SubjectAccessReview = from(json!({"spec": {"user": "nobody",
        "resourceAttributes": {"verb": "get", "resource": "nodes", "subresource": "proxy", "name": NODE}}}));
    assert!(!client.review_access(&review).await.unwrap().status.unwrap().allowed);

    // Events.
    let (recorder, writer) = Recorder::new("kubelet", NODE, Arc::new(client.clone()), system_wall(), system_unit());
    tokio::spawn(writer.run(stop.clone()));
    let about = ObjectReference {
        kind: Some("Pod".into()),
        api_version: Some("v1".into()),
        namespace: Some("default".into()),
        name: Some("p".into()),
        uid: Some(uid.clone()),
        ..ObjectReference::default()
    };
    for i in 0..3 {
        recorder.event(&about, "Warning", "BackOff", "same");
        recorder.event(&about, "Normal", "Pulled", &format!("image {i}"));
    }
    let mut of_p: Vec<Value> = vec![];
    for _ in 0..100 {
        let events = raw(&admin, "/api/v1/namespaces/default/events").await;
        let mine = |e: &&Value| e["involvedObject"]["uid"] == json!(uid);
        of_p = events["items"].as_array().unwrap().iter().filter(mine).cloned().collect();
        if of_p.len() == 4 && of_p.iter().any(|e| e["count"] == 3) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let same = of_p.iter().find(|e| e["message"] == "same").unwrap();
    assert_eq!((&same["count"], &same["reportingComponent"], of_p.len()), (&json!(3), &json!("kubelet"), 4), "{same}");

    // The serving certificate.
    let manager = CertManager {
        purpose: Purpose::Serving,
        store: FileStore::server(&dir.path().join("pki")),
        template: Box::new(|| {
            serving_template(
                NODE,
                &from::<Vec<_>>(
                    json!([{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": NODE}]),
                ),
            )
        }),
        api: Arc::new(client.clone()),
        wall: system_wall(),
        unit: system_unit(),
    };
    let current = manager.open().unwrap();
    let mut made = current.subscribe();
    tokio::spawn(manager.run(current, stop.clone()));
    let mut approved = false;
    for _ in 0..100 {
        let all = raw(&admin, "/apis/certificates.k8s.io/v1/certificatesigningrequests").await;
        let mine = all["items"].as_array().unwrap().iter().find(|r| {
            r["spec"]["signerName"] == "kubernetes.io/kubelet-serving" && r["status"].get("certificate").is_none()
        });
        if let Some(request) = mine {
            let name = request["metadata"]["name"].as_str().unwrap();
            let yes = json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "Test"}]}});
            admin
                .patch::<CertificateSigningRequest>(None, name, Some("approval"), PatchType::Strategic, &yes)
                .await
                .unwrap();
            approved = true;
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(approved);
    tokio::time::timeout(Duration::from_secs(20), made.changed()).await.unwrap().unwrap();
    println!("serving: {:?}", made.borrow().as_ref().unwrap().info);

    // The end of a pod.
    assert!(client.delete_pod("default", "p", 0, Some("1-2")).await.unwrap_err().is_other_uid());
    client.delete_pod("default", "p", 0, Some(&uid)).await.unwrap();
    loop {
        if let Delta::Remove(key) = deltas.recv().await.unwrap() {
            assert_eq!(key.uid, uid);
            break;
        }
    }

    // Wrong credentials of several kinds.
    let bad = |auth| Client::new(admin_config.with_auth(auth), options.clone()).unwrap();
    let token = cluster::kubeconfig::Token::Inline("wrong".into());
    let e = bad(cluster::kubeconfig::Auth { token: Some(token), ..Default::default() })
        .get_node(NODE, true)
        .await
        .unwrap_err();
    println!("{e}");
    assert_eq!(e.kind, ErrorKind::Unauthorized);
    let e = bad(Default::default()).get_node(NODE, true).await.unwrap_err();
    println!("{e}");
    assert_eq!(e.kind, ErrorKind::Forbidden);
}
