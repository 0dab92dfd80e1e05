//! Variables, command and arguments.

use super::super::env::{NeededSources, needed_sources, service_variables, variables};
use super::*;

fn vars(container: &str, facts: &ContainerFacts<'_>) -> Result<BTreeMap<String, String>, String> {
    let p = one(container, r#""nodeName": "node-a", "serviceAccountName": "default""#);
    let entry = p.container("a").expect("container");
    let vars = variables(&p, entry, facts).map_err(|e| e.message)?;
    Ok(vars.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect())
}

#[test]
fn references_look_back_and_at_services_only() {
    let node = node();
    let mut f = facts(&node);
    f.env.services = Some(map(&[("SVC", "10.0.0.1"), ("A", "hidden")]));
    let got = vars(
        r#""env": [{"name": "EARLY", "value": "$(LATE)"}, {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(SVC)"},
            {"name": "LATE", "value": "x"}, {"name": "ESC", "value": "$$(A)"}, {"name": "A", "value": "$(A)2"}, {"name": "NONE"}]"#,
        &f,
    );
    assert_eq!(
        got,
        Ok(map(&[
            ("EARLY", "$(LATE)"),
            ("A", "12"),
            ("B", "110.0.0.1"),
            ("LATE", "x"),
            ("ESC", "$(A)"),
            ("NONE", ""),
            ("SVC", "10.0.0.1")
        ]))
    );
}

#[test]
fn order_is_of_first_mention() {
    let node = node();
    let mut f = facts(&node);
    f.devices.envs = vec![("DEV".into(), "0".into())];
    f.env.services = Some(map(&[("Z_PORT", "1"), ("K_PORT", "2")]));
    let p =
        one(r#""env": [{"name": "z", "value": "1"}, {"name": "b", "value": "2"}, {"name": "z", "value": "3"}]"#, "");
    let got: Vec<_> =
        request(&p, &f).expect("request").envs.into_iter().map(|e| format!("{}={}", e.key, e.value)).collect();
    assert_eq!(got, ["DEV=0", "z=3", "b=2", "K_PORT=2", "Z_PORT=1"]);
}

#[test]
fn command_and_args_see_the_final_variables() {
    let node = node();
    let mut f = facts(&node);
    f.env.services = Some(map(&[("SVC", "s")]));
    f.devices.envs = vec![("DEV".into(), "d".into())];
    let p = one(
        r#""command": ["$(A)", "$é$$x$(NO)"], "args": ["$(SVC)-$(DEV)", "$$(A)", "$("],
           "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]"#,
        "",
    );
    let got = request(&p, &f).expect("request");
    assert_eq!(got.command, ["2", "$é$x$(NO)"]);
    assert_eq!(got.args, ["s-d", "$(A)", "$("]);
}

#[test]
fn env_from() {
    let node = node();
    let mut f = facts(&node);
    f.env.config_maps.insert("cm".into(), found(map(&[("1x", "a"), ("a-b", "b"), ("a.b", "c"), ("ok", "cm")])));
    f.env.secrets.insert("s".into(), found(BTreeMap::from([("ok".to_string(), b"secret".to_vec())])));
    f.env.config_maps.insert("gone".into(), Source::NotFound);
    let container = r#""envFrom": [{"configMapRef": {"name": "cm"}}, {"secretRef": {"name": "s"}},
            {"prefix": "P_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "gone", "optional": true}}],
        "env": [{"name": "a.b", "value": "$(ok)"}]"#;
    let want = map(&[("1x", "a"), ("a-b", "b"), ("a.b", "secret"), ("ok", "secret"), ("P_ok", "secret")]);
    assert_eq!(vars(container, &f), Ok(want));
    let needed = one(container, "");
    assert_eq!(
        needed_sources(needed.container("a").expect("a")),
        NeededSources {
            config_maps: ["cm", "gone"].map(String::from).into(),
            secrets: ["s".to_string()].into(),
            files: Default::default()
        }
    );

    let missing = r#""envFrom": [{"configMapRef": {"name": "gone"}}]"#;
    assert_eq!(vars(missing, &f), Err("configmap \"gone\" not found".into()));
    f.env.secrets.insert("x".into(), Source::Failed("boom".into()));
    assert_eq!(vars(r#""envFrom": [{"secretRef": {"name": "x", "optional": true}}]"#, &f), Err("boom".into()));
    let unknown = variables(
        &one(r#""envFrom": [{"secretRef": {"name": "y"}}]"#, ""),
        one(r#""envFrom": [{"secretRef": {"name": "y"}}]"#, "").container("a").expect("a"),
        &f,
    );
    assert_eq!(unknown.expect_err("missing").missing.as_deref(), Some("secret \"y\""));
    f.env.standalone = true;
    assert_eq!(vars(missing, &f), Err("couldn't get configMap ns/gone, no kubeClient defined".into()));
}

#[test]
fn keys() {
    let node = node();
    let mut f = facts(&node);
    f.env.config_maps.insert("cm".into(), found(map(&[("k", "v")])));
    f.env.secrets.insert("s".into(), found(BTreeMap::from([("k".to_string(), vec![b'x', 0xff])])));
    f.env.secrets.insert("gone".into(), Source::NotFound);
    let key = |kind: &str, name: &str, key: &str, optional: bool| {
        format!(
            r#""env": [{{"name": "V", "value": "", "valueFrom": {{"{kind}": {{"name": "{name}", "key": "{key}", "optional": {optional}}}}}}}]"#
        )
    };
    let cm = "configMapKeyRef";
    let secret = "secretKeyRef";
    let one = |v: &str| Ok(map(&[("V", v)]));
    assert_eq!(vars(&key(cm, "cm", "k", false), &f), one("v"));
    assert_eq!(vars(&key(secret, "s", "k", false), &f), one("x\u{fffd}"));
    assert_eq!(vars(&key(cm, "cm", "no", true), &f), Ok(map(&[])));
    assert_eq!(vars(&key(cm, "cm", "no", false), &f), Err("couldn't find key no in ConfigMap ns/cm".into()));
    assert_eq!(vars(&key(secret, "s", "no", false), &f), Err("couldn't find key no in Secret ns/s".into()));
    assert_eq!(vars(&key(secret, "gone", "k", true), &f), Ok(map(&[])));
    assert_eq!(vars(&key(secret, "gone", "k", false), &f), Err("secret \"gone\" not found".into()));
}

#[test]
fn files() {
    let node = node();
    let mut f = facts(&node);
    let volume = VolumeFact { source: VolumeSource::HostPath("/v".into()), read_only: false, selinux_relabel: false };
    f.volumes.insert("v".into(), volume);
    f.env.files.insert(("v".into(), "d/f".into()), found("A='one'\nB='$(X)'\n".into()));
    f.env.files.insert(("v".into(), "bad".into()), found("A=one\n".into()));
    let var = |volume: &str, path: &str, key: &str, optional: bool| {
        format!(
            r#""env": [{{"name": "V", "valueFrom": {{"fileKeyRef": {{"volumeName": "{volume}", "path": "{path}", "key": "{key}", "optional": {optional}}}}}}}]"#
        )
    };
    assert_eq!(vars(&var("v", "d/f", "A", false), &f), Ok(map(&[("V", "one")])));
    assert_eq!(vars(&var("v", "d/f", "B", false), &f), Ok(map(&[("V", "$(X)")])));
    assert_eq!(vars(&var("v", "d/f", "C", true), &f), Ok(map(&[])));
    assert_eq!(
        vars(&var("v", "d/f", "C", false), &f),
        Err("environment variable key \"C\" not found in file \"/v/d/f\"".into())
    );
    assert_eq!(vars(&var("v", "bad", "A", false), &f), Err("couldn't parse env file".into()));
    assert_eq!(
        vars(&var("w", "f", "A", false), &f),
        Err("cannot find the volume \"w\" referenced by FileKeyRef".into())
    );
    assert_eq!(vars(&var("v", "new", "A", false), &f), Err("file \"new\" of volume \"v\" is not known yet".into()));
}

#[test]
fn services_must_have_been_read_unless_static() {
    let node = node();
    let mut f = facts(&node);
    f.env.services = None;
    let api = one("", "");
    assert_eq!(fault(request(&api, &f)), "services have not yet been read at least once, cannot construct envvars");
    let from_file = pod_from(model::pod::PodSource::File, "{}", &one_spec("", ""));
    assert_eq!(request(&from_file, &f).expect("request").envs, []);
    let unset = pod(r#"{"containers": [{"name": "a"}]}"#);
    assert_eq!(
        fault(request(&unset, &facts(&node))),
        "nil pod.spec.enableServiceLinks encountered, cannot construct envvars"
    );
}

#[test]
fn service_links() {
    let service = |namespace: &str, name: &str, ip: &str, ports: &str| -> model::api::Service {
        serde_json::from_str(&format!(
            r#"{{"metadata": {{"namespace": "{namespace}", "name": "{name}"}}, "spec": {{"clusterIP": "{ip}", "ports": {ports}}}}}"#
        ))
        .expect("service")
    };
    let services = [
        service("default", "kubernetes", "10.96.0.1", r#"[{"name": "https", "port": 443}]"#),
        service(
            "ns",
            "my-db",
            "fd00::5",
            r#"[{"name": "a-b", "port": 53, "protocol": "UDP"}, {"port": 80, "name": ""}]"#,
        ),
        service("ns", "headless", "None", r#"[{"port": 1}]"#),
        service("other", "x", "10.96.0.9", r#"[{"port": 1}]"#),
    ];
    let kubernetes = map(&[
        ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
        ("KUBERNETES_SERVICE_PORT", "443"),
        ("KUBERNETES_SERVICE_PORT_HTTPS", "443"),
        ("KUBERNETES_PORT", "tcp://10.96.0.1:443"),
        ("KUBERNETES_PORT_443_TCP", "tcp://10.96.0.1:443"),
        ("KUBERNETES_PORT_443_TCP_PROTO", "tcp"),
        ("KUBERNETES_PORT_443_TCP_PORT", "443"),
        ("KUBERNETES_PORT_443_TCP_ADDR", "10.96.0.1"),
    ]);
    assert_eq!(service_variables(&services, "ns", false), kubernetes);
    let mut all = kubernetes;
    all.extend(map(&[
        ("MY_DB_SERVICE_HOST", "fd00::5"),
        ("MY_DB_SERVICE_PORT", "53"),
        ("MY_DB_SERVICE_PORT_A_B", "53"),
        ("MY_DB_PORT", "udp://[fd00::5]:53"),
        ("MY_DB_PORT_53_UDP", "udp://[fd00::5]:53"),
        ("MY_DB_PORT_53_UDP_PROTO", "udp"),
        ("MY_DB_PORT_53_UDP_PORT", "53"),
        ("MY_DB_PORT_53_UDP_ADDR", "fd00::5"),
        ("MY_DB_PORT_80_TCP", "tcp://[fd00::5]:80"),
        ("MY_DB_PORT_80_TCP_PROTO", "tcp"),
        ("MY_DB_PORT_80_TCP_PORT", "80"),
        ("MY_DB_PORT_80_TCP_ADDR", "fd00::5"),
    ]));
    assert_eq!(service_variables(&services, "ns", true), all);
}
