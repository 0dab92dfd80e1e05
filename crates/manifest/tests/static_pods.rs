//! Whole manifests: UIDs, the changes for the node, refusals.

#![allow(clippy::unwrap_used)]

use manifest::{Gates, ManifestError, Origin, load, static_uid};
use model::Timestamp;
use model::pod::DesiredPod;

fn file(name: &str) -> Origin {
    Origin::File(format!("/etc/kubernetes/manifests/{name}"))
}

fn seen() -> Timestamp {
    "2026-01-02T03:04:05.678Z".parse().unwrap()
}

fn pods(bytes: &[u8], origin: &Origin) -> Vec<Result<DesiredPod, ManifestError>> {
    load(bytes, origin, "node-a", seen(), &Gates::default()).unwrap()
}

/// UIDs that Go's file source gives, node `node-a`.
#[test]
fn uids_of_files() {
    let table: [(&str, &[u8], &str); 5] = [
        ("a.yaml", include_bytes!("manifests/a.yaml"), "0f7af893d68581c9696c10b8cc1b2b5b"),
        ("b.yaml", include_bytes!("manifests/b.yaml"), "3fcf1f62edcae51dde453a19e5c11546"),
        ("c.json", include_bytes!("manifests/c.json"), "436d763ba00feba2ef574c927975d876"),
        ("k.yaml", include_bytes!("manifests/k.yaml"), "a73b4c3c0409f921e5f6b5dda6bf4977"),
        ("q.yaml", include_bytes!("manifests/q.yaml"), "3bd2329de14d989b432e3fd02b6e9490"),
    ];
    for (name, bytes, want) in table {
        let pod = manifest::decode(bytes, &file(name)).unwrap().remove(0).unwrap();
        assert_eq!(static_uid(&pod, "node-a", &file(name)), want, "{name}");
    }
}

#[test]
fn uid_of_a_url() {
    let origin = Origin::Url("http://127.0.0.1:18099/a.yaml".into());
    let pods = pods(include_bytes!("manifests/a.yaml"), &origin);
    let pod = pods[0].as_ref().unwrap();
    assert_eq!(pod.uid().as_str(), "2ce0916f5df508999a08eccee6ba2417");
    assert_eq!(pod.annotation("kubernetes.io/config.source"), Some("http"));
    assert_eq!(pod.spec().tolerations, None);
}

/// Go's answers to 137 manifests: UIDs, and the exact errors. Errors about entries of maps come in no fixed order from Go.
#[test]
fn answers_as_go_does() {
    let origin = Origin::File("/m/x.json".into());
    let mut accepted = 0;
    for line in include_str!("answers.tsv").lines().filter(|l| !l.starts_with('#')) {
        let mut columns = line.splitn(3, '\t');
        let (uid, error, text) = (columns.next().unwrap(), columns.next().unwrap(), columns.next().unwrap());
        let error: String = serde_json::from_str(error).unwrap();
        let got =
            load(text.as_bytes(), &origin, "node-a", seen(), &Gates::default()).and_then(|mut pods| pods.remove(0));
        match got {
            Ok(pod) => {
                assert_eq!("", error, "{text}");
                assert_eq!(pod.uid().as_str(), uid, "{text}");
                accepted += 1;
            }
            Err(ManifestError::Invalid(errors)) => {
                let mut rest = error.clone();
                let mut errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
                errors.sort_by_key(|e| std::cmp::Reverse(e.len()));
                for e in errors {
                    assert!(rest.contains(&e), "{text}\n{e}\n{error}");
                    rest = rest.replacen(&e, "", 1);
                }
                assert_eq!(rest.replace(' ', ""), "invalidpod:[]", "{text}\n{error}");
            }
            Err(ManifestError::File { reason, .. }) => {
                assert!(!error.is_empty() && reason.ends_with(&error), "{text}\n{reason}\n{error}");
            }
            Err(e) => assert_eq!(e.to_string(), error, "{text}"),
        }
    }
    assert_eq!(accepted, 29);
}

#[test]
fn changes_for_the_node() {
    let text = b"---\n{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {containers: [{name: c, image: a, resources: {limits: {cpu: 0.0005}}}]}}";
    let pods = load(text, &file("w.yaml"), "Node-A.example", seen(), &Gates::default());
    // The node's name must be a DNS subdomain; only the pod's name is put in lower case.
    let Err(ManifestError::Invalid(errors)) = pods.unwrap().remove(0) else { panic!() };
    assert_eq!(errors.iter().map(manifest::FieldError::field).collect::<Vec<_>>(), ["spec.nodeName"]);
    let pod = load(text, &file("w.yaml"), "node-a.example", seen(), &Gates::default()).unwrap().remove(0).unwrap();
    assert_eq!((pod.name(), pod.namespace()), ("web-node-a.example", "default"));
    assert_eq!(pod.spec().node_name.as_deref(), Some("node-a.example"));
    assert_eq!(pod.annotation("kubernetes.io/config.hash"), Some(pod.uid().as_str()));
    assert_eq!(pod.annotation("kubernetes.io/config.source"), Some("file"));
    assert_eq!(pod.annotation("kubernetes.io/config.seen"), Some("2026-01-02T03:04:05.678Z"));
    assert_eq!(pod.stored_status().unwrap().phase.as_deref(), Some("Pending"));
    let toleration = &pod.spec().tolerations.as_ref().unwrap()[0];
    assert_eq!((toleration.operator.as_deref(), toleration.effect.as_deref()), (Some("Exists"), Some("NoExecute")));
    let resources = pod.spec().containers[0].resources.as_ref().unwrap();
    assert_eq!(resources.requests.as_ref().unwrap()["cpu"].0, "1m");
}

#[test]
fn an_own_uid_stays() {
    let text =
        b"---\n{apiVersion: v1, kind: Pod, metadata: {name: a, uid: own}, spec: {containers: [{name: c, image: a}]}}";
    let pod = pods(text, &file("u.yaml")).remove(0).unwrap();
    assert_eq!(pod.uid().as_str(), "own");
    assert_eq!(pod.annotation("kubernetes.io/config.hash"), Some("own"));
    // Directories are named after it.
    let text = String::from_utf8_lossy(text).replace("own", "../../../etc");
    let refused = pods(text.as_bytes(), &file("u.yaml")).remove(0).unwrap_err().to_string();
    assert_eq!(refused, "invalid pod: metadata.uid: \"../../../etc\" cannot be part of a path");
}

#[test]
fn lists_come_from_urls_only() {
    let list = br#"{"kind":"PodList","apiVersion":"v1","items":[
        {"metadata":{"name":"a"},"spec":{"containers":[{"name":"c","image":"a"}]}},
        {"metadata":{"name":"b"},"spec":{"containers":[{"name":"c","image":7}]}},
        {"metadata":{"name":"c"},"spec":{"containers":[]}},
        {"kind":"Service","apiVersion":"v1","metadata":{"name":"d"}},
        {"metadata":{"name":"e"},"spec":{"containers":[{"name":"c","image":"a"}]}}]}"#;
    let got = pods(list, &Origin::Url("http://x/".into()));
    let names: Vec<_> = got.iter().map(|p| p.as_ref().ok().map(|p| p.name().to_string())).collect();
    assert_eq!(names, [Some("a-node-a".into()), None, None, None, Some("e-node-a".into())]);
    assert!(got[3].as_ref().unwrap_err().to_string().contains(r#"kind "Service" of apiVersion "v1" is not a Pod"#));
    assert!(load(list, &file("l.json"), "node-a", seen(), &Gates::default()).is_err());
}

#[test]
fn what_is_not_a_pod() {
    let error = |bytes: &[u8]| load(bytes, &file("x"), "node-a", seen(), &Gates::default()).unwrap_err().to_string();
    assert_eq!(
        error(b"kind: Service\napiVersion: v1\n"),
        "/etc/kubernetes/manifests/x: couldn't parse as pod(invalid pod: kind \"Service\" of apiVersion \"v1\" is not a Pod), please check \
         config file"
    );
    assert!(error(b"").contains("Object 'Kind' is missing"));
    assert!(error(b"kind: Pod\n").contains("Object 'apiVersion' is missing"));
    assert!(error(b"- a\n").contains("cannot unmarshal array"));
    assert!(error(b"\x7fELF\x02\x01\x01\x00\x00").contains("control characters"));
    assert!(error(b"\xff\xfe\x00a").contains("invalid UTF-8"));
    assert!(error(b"{\"kind\":\"Pod\"").contains("unexpected end of JSON input"));
    assert!(error(&vec![b'#'; manifest::MAX_BYTES + 1]).contains("limit 10485760 bytes exceeded"));
}

#[test]
fn yaml_as_kubernetes_reads_it() {
    let text = b"apiVersion: v1\nkind: Pod\nmetadata: {name: a, Labels: {x: y}, nothing: 1}\nspec:\n  hostNetwork: no\n  hostNetwork: yes\n  \
        containers:\n  - name: c\n    image: \"1\"\n    stdin: on\n    command: null\n    args: []\n  volumes:\n  - name: d\n    \
        downwardAPI: {defaultMode: 0644, items: [{path: p, mode: 0o400, fieldRef: {fieldPath: metadata.name}}]}\n---\nkind: Service\n";
    let pod = pods(text, &file("y.yaml")).remove(0).unwrap();
    assert!(pod.host_network());
    assert_eq!(pod.meta().labels, None);
    let c = &pod.spec().containers[0];
    assert_eq!((c.stdin, c.command.as_ref(), c.args.as_deref()), (Some(true), None, Some(&[][..])));
    let downward = pod.spec().volumes.as_ref().unwrap()[0].downward_api.as_ref().unwrap();
    assert_eq!(downward.default_mode, Some(420));
    assert_eq!(downward.items.as_ref().unwrap()[0].mode, Some(256));
}

#[test]
fn references_with_the_gate_off() {
    let gates = Gates { prevent_static_pod_api_references: false, ..Gates::default() };
    let with = |what: &str| {
        let text = format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {{containers: [{{name: c, image: a}}], {what}}}}}"
        );
        load(text.as_bytes(), &file("g"), "node-a", seen(), &gates).unwrap().remove(0)
    };
    assert!(with("volumes: [{name: s, secret: {secretName: x}}]").is_ok());
    let claims = with("resourceClaims: [{name: a, resourceClaimName: b}]").unwrap_err();
    assert_eq!(claims.to_string(), "static pods may not use ResourceClaims");
    let bundle =
        with("volumes: [{name: s, projected: {sources: [{clusterTrustBundle: {name: some, path: p}}]}}]").unwrap_err();
    assert_eq!(bundle.to_string(), "static pods may not use ClusterTrustBundle projected volume sources");
}
