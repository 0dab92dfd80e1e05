//! Rotation against a signer in memory, under a paused clock.

use std::sync::Mutex;

use async_trait::async_trait;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestStatus,
};
use rcgen::{CertificateSigningRequestParams, Issuer};
use tokio::time::Instant;

use super::*;
use crate::calls::CertificateApi;
use crate::error::ErrorKind;
use crate::reflect::{Collection, ListAsk, Page, Scope, WatchAsk, WatchEvent, WatchStream};

/// Signs what it is asked for, for a day, unless told to fail or to deny.
struct Signer {
    requests: Mutex<Vec<CertificateSigningRequest>>,
    failures: Mutex<u32>,
    deny: Mutex<bool>,
    wall: Wall,
}

#[async_trait]
impl CertificateApi for Signer {
    async fn create_csr(&self, csr: &CertificateSigningRequest) -> ClusterResult<CertificateSigningRequest> {
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(ClusterError::new("create csr", ErrorKind::Server, "no"));
        }
        let mut made = csr.clone();
        let mut requests = self.requests.lock().unwrap();
        let number = requests.len();
        made.metadata.name = Some(format!("csr-{number}"));
        made.metadata.uid = Some(format!("u{number}"));
        let pem = String::from_utf8(csr.spec.request.0.clone()).unwrap();
        let mut asked = CertificateSigningRequestParams::from_pem(&pem).unwrap();
        let start = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs((self.wall)().as_second() as u64);
        asked.params.not_before = start;
        asked.params.not_after = start + Duration::from_secs(86400);
        let ca_key = generate().unwrap();
        let ca = Issuer::new(rcgen::CertificateParams::default(), ca_key);
        let certificate = asked.signed_by(&ca).unwrap().pem();
        let kind = if *self.deny.lock().unwrap() { "Denied" } else { "Approved" };
        made.status = Some(CertificateSigningRequestStatus {
            certificate: Some(ByteString(certificate.into_bytes())),
            conditions: Some(vec![CertificateSigningRequestCondition {
                type_: kind.into(),
                reason: Some("Because".into()),
                message: Some("so".into()),
                ..CertificateSigningRequestCondition::default()
            }]),
        });
        requests.push(made.clone());
        Ok(made)
    }

    async fn get_csr(&self, _: &str) -> ClusterResult<CertificateSigningRequest> {
        unreachable!()
    }
}

#[async_trait]
impl Collection<CertificateSigningRequest> for Signer {
    async fn list(&self, _: &Scope, _: &ListAsk) -> ClusterResult<Page<CertificateSigningRequest>> {
        unreachable!()
    }

    async fn watch(&self, scope: &Scope, _: &WatchAsk) -> ClusterResult<WatchStream<CertificateSigningRequest>> {
        use futures::StreamExt;
        let name = scope.field_selector.clone().unwrap().replace("metadata.name=", "");
        let found =
            self.requests.lock().unwrap().iter().find(|r| r.metadata.name == Some(name.clone())).cloned().unwrap();
        let mut unsigned = found.clone();
        unsigned.status = None;
        let end = WatchEvent::Bookmark { resource_version: "1".into(), initial_events_end: true };
        Ok(futures::stream::iter([Ok(WatchEvent::Upsert(unsigned)), Ok(end), Ok(WatchEvent::Upsert(found))])
            .chain(futures::stream::pending())
            .boxed())
    }

    async fn get(&self, _: Option<&str>, _: &str, _: bool) -> ClusterResult<CertificateSigningRequest> {
        unreachable!()
    }
}

fn address(kind: &str, address: &str) -> NodeAddress {
    NodeAddress { type_: kind.into(), address: address.into() }
}

struct Rig {
    signer: Arc<Signer>,
    addresses: Arc<Mutex<Vec<NodeAddress>>>,
    current: watch::Receiver<Option<Arc<Identity>>>,
    dir: tempfile::TempDir,
    _stop: tokio_util::sync::DropGuard,
}

fn rig(failures: u32) -> Rig {
    let start = Instant::now();
    let base: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let wall: Wall = Arc::new(move || base + SignedDuration::try_from(start.elapsed()).unwrap());
    let signer = Arc::new(Signer {
        requests: Mutex::default(),
        failures: Mutex::new(failures),
        deny: Mutex::new(false),
        wall: wall.clone(),
    });
    let addresses: Arc<Mutex<Vec<NodeAddress>>> = Arc::default();
    let dir = tempfile::tempdir().unwrap();
    let manager = CertManager {
        purpose: Purpose::Serving,
        store: FileStore::server(dir.path()),
        template: Box::new({
            let addresses = addresses.clone();
            move || serving_template("n1", &addresses.lock().unwrap())
        }),
        api: signer.clone(),
        wall,
        unit: Arc::new(|| 0.5),
    };
    let sender = manager.open().unwrap();
    let current = sender.subscribe();
    let stop = CancellationToken::new();
    tokio::spawn(manager.run(sender, stop.clone()));
    Rig { signer, addresses, current, dir, _stop: stop.drop_guard() }
}

impl Rig {
    async fn next(&mut self) -> Arc<Identity> {
        tokio::time::timeout(Duration::from_secs(7 * 86400), self.current.changed()).await.unwrap().unwrap();
        self.current.borrow_and_update().clone().unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn waits_for_addresses_then_renews_in_time_and_when_they_change() {
    let mut rig = rig(0);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(rig.signer.requests.lock().unwrap().is_empty(), "no address, no request");
    *rig.addresses.lock().unwrap() = vec![address("Hostname", "n1"), address("InternalIP", "10.0.0.7")];
    let first = rig.next().await;
    assert_eq!(first.info.dns_names, ["n1"]);
    assert_eq!(first.info.ip_addresses, ["10.0.0.7".parse::<std::net::IpAddr>().unwrap()]);
    let request = rig.signer.requests.lock().unwrap()[0].clone();
    assert_eq!(request.spec.signer_name, "kubernetes.io/kubelet-serving");
    assert_eq!(request.spec.usages.unwrap(), ["digital signature", "server auth"]);
    assert_eq!(request.metadata.generate_name.as_deref(), Some("csr-"));
    let start = Instant::now();
    let second = rig.next().await;
    let hours = start.elapsed().as_secs_f64() / 3600.0;
    assert!((hours - 24.0 * 0.8).abs() < 0.1, "{hours}");
    assert_ne!(second.key.secret_der(), first.key.secret_der(), "a key of its own each time");
    rig.addresses.lock().unwrap().push(address("ExternalIP", "203.0.113.9"));
    let start = Instant::now();
    assert_eq!(rig.next().await.info.ip_addresses.len(), 2);
    assert!(start.elapsed() < Duration::from_secs(5));
    let kept = FileStore::server(rig.dir.path()).current().unwrap().unwrap();
    assert_eq!(kept.info.ip_addresses.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn failures_slow_down() {
    let mut rig = rig(7);
    *rig.addresses.lock().unwrap() = vec![address("InternalIP", "10.0.0.7")];
    let start = Instant::now();
    rig.next().await;
    // 2 + 4 + 8 + 16 s, a twentieth more each, then three times 32 s.
    let took = start.elapsed().as_secs_f64();
    assert!((took - (30.0 * 1.05 + 96.0)).abs() < 2.0, "{took}");
}

#[tokio::test(start_paused = true)]
async fn a_denied_request_says_so() {
    let rig = rig(0);
    *rig.signer.deny.lock().unwrap() = true;
    let key = generate().unwrap();
    let csr = signing_request(&key, &Template::node("n1")).unwrap();
    let (name, uid) = request::create(&*rig.signer, &csr, None, "s", &[]).await.unwrap();
    let unit: Unit = Arc::new(|| 0.0);
    let e = request::wait(rig.signer.clone(), &name, &uid, SIGNING, unit.clone()).await.unwrap_err();
    assert_eq!(e.kind, ErrorKind::Forbidden);
    assert!(e.message.contains(r#"is denied, reason: "Because", message: "so""#), "{e}");
    let e = request::wait(rig.signer.clone(), &name, "other", SIGNING, unit).await.unwrap_err();
    assert!(e.message.contains("changed UIDs"), "{e}");
}

#[test]
fn renewal_lies_between_seven_and_nine_tenths() {
    let at = |s| Timestamp::from_second(s).unwrap();
    assert_eq!(renewal(at(0), at(1000), 0.0), at(700));
    assert_eq!(renewal(at(0), at(1000), 1.0), at(900));
}

#[test]
fn names_of_addresses() {
    let template = |a: &[NodeAddress]| serving_template("n", a).map(|t| t.names);
    assert_eq!(template(&[]), None);
    assert_eq!(template(&[address("Hostname", "n")]), None, "a certificate without an IP is not asked for");
    assert_eq!(
        template(&[
            address("InternalIP", "10.0.0.1"),
            address("Hostname", "z"),
            address("ExternalDNS", "a.example.com"),
            address("InternalIP", "not-an-ip"),
            address("Hostname", "z"),
        ]),
        Some(vec!["a.example.com".into(), "z".into(), "10.0.0.1".into()])
    );
}
