//! A control plane from the lab's programs: comes up, lets in whom it should, survives an outage, and leaves nothing.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rig::cluster::{ControlPlane, Options, Part, Refused, missing};
use rig::processes::working_in;
use serde_json::{Value, json};

fn code(result: anyhow::Result<Value>) -> u16 {
    result.map_or_else(|e| e.downcast_ref::<Refused>().map_or(0, |r| r.code), |_| 200)
}

/// True, and said, when programs are missing.
fn lacks_programs(options: &Options) -> bool {
    let lacking = missing(options);
    if !lacking.is_empty() {
        println!("skipped: not built: lab/build-reference {}", lacking.join(" "));
    }
    !lacking.is_empty()
}

#[test]
#[ignore = "needs the programs of the control plane: cargo xtask test"]
fn a_node_has_the_rights_of_a_node_and_data_outlive_the_api_server() {
    if lacks_programs(&Options::default()) {
        return;
    }
    let start = Instant::now();
    let plane = ControlPlane::start("test", Options::default()).unwrap();
    println!("ready after {:.1} s", start.elapsed().as_secs_f64());
    let dir = plane.dir().to_owned();
    plane.namespace("default").unwrap();
    let node = plane.api_as("system:node:n1", Some("system:nodes")).unwrap();
    assert_eq!(code(node.create("/api/v1/nodes", &json!({"metadata": {"name": "n1"}}))), 200);
    assert_eq!(code(node.create("/api/v1/nodes", &json!({"metadata": {"name": "n2"}}))), 403, "NodeRestriction");
    assert_eq!(code(node.get("/api/v1/secrets")), 403, "the Node authorizer");
    let out = plane.kubectl(["get", "nodes", "--output=name"]).unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "node/n1\n", "{}", String::from_utf8_lossy(&out.stderr));

    let lonely =
        json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "x"}]}});
    let pod = plane.api().create("/api/v1/namespaces/default/pods", &lonely).unwrap();
    assert_eq!(pod["spec"]["serviceAccountName"], "default", "the ServiceAccount admission ran");
    plane.stop_api_server();
    assert!(plane.api().get("/api/v1/nodes/n1").is_err());
    plane.start_api_server().unwrap();
    let again = plane.api().get("/api/v1/namespaces/default/pods/p").unwrap();
    assert_eq!(again["metadata"]["uid"], pod["metadata"]["uid"]);

    assert_eq!(working_in(&dir).len(), 2, "etcd and the API server, found without their process ids");
    plane.close().unwrap();
    assert!(working_in(&dir).is_empty() && !dir.exists());
}

#[test]
#[ignore = "needs the programs of the control plane: cargo xtask test"]
fn a_bootstrap_token_gets_a_node_its_certificate() {
    if lacks_programs(&Options::all()) {
        return;
    }
    let plane = ControlPlane::start("test", Options { scheduler: false, ..Options::all() }).unwrap();
    plane.namespace("default").unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:n1");
    let csr = params.serialize_request(&key).unwrap().pem().unwrap();
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "n1"},
        "spec": {"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": ["digital signature", "client auth"],
                 "request": STANDARD.encode(csr)},
    });
    let file = plane.dir().join("csr.json");
    std::fs::write(&file, request.to_string()).unwrap();
    let kubeconfig = plane.bootstrap_kubeconfig();
    let out =
        plane.kubectl_command().arg("--kubeconfig").arg(kubeconfig).args(["create", "-f"]).arg(file).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let path = "/apis/certificates.k8s.io/v1/certificatesigningrequests/n1";
    let signed = rig::poll(Duration::from_secs(30), || {
        plane.api().get(path).is_ok_and(|c| c["status"]["certificate"].is_string())
    });
    assert!(signed, "{:#}\n{}", plane.api().get(path).unwrap(), rig::tail(&plane.log(Part::ControllerManager), 10));
}

#[test]
#[ignore = "needs the programs of the control plane: cargo xtask test"]
fn what_a_killed_owner_left_is_found_and_removed() {
    if lacks_programs(&Options::default()) {
        return;
    }
    let plane = ControlPlane::start("test", Options::default()).unwrap();
    let dir = plane.dir().to_owned();
    let file = dir.join("record.json");
    let record = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, record.replace("\"start\": ", "\"start\": 1")).unwrap();
    std::mem::forget(plane);
    rig::remains().iter().find(|r| r.dir == dir).unwrap().wipe().unwrap();
    assert!(working_in(&dir).is_empty() && !dir.exists());
}
