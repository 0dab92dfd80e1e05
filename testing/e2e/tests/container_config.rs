//! What a container sees: its environment and arguments, its resolv.conf, the downward API.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;

use e2e::{Node, Options, Share, container, pod, seconds, wait_until, with};
use serde_json::{Value, json};

const HOLD: &str = "exec sleep 1000000";

/// The environment that the first process of a container was started with.
fn environment(share: &Share, file: &str) -> BTreeMap<String, String> {
    let text = wait_until(&format!("{file} is written"), seconds(60), || {
        Some(share.read(file)).filter(|t| t.contains("HOSTNAME="))
    });
    text.split('\0').filter_map(|e| e.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// kubernetes/kubernetes#136323 and the rules of `$(NAME)`.
#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn dollars_in_env_command_and_args() {
    // Name, value, what the container gets.
    const ENV: [(&str, &str, &str); 25] = [
        ("E1", "$é", "$é"),
        ("E2", "$中", "$中"),
        ("E3", "$😀", "$😀"),
        ("E4", "a$", "a$"),
        ("E5", "$$", "$"),
        ("E6", "$$$", "$$"),
        ("A", "va", "va"),
        ("E7", "$(A)", "va"),
        ("E8", "$$(A)", "$(A)"),
        ("E9", "$(MISSING)", "$(MISSING)"),
        ("E10", "$(A", "$(A"),
        ("E11", "$()", "$()"),
        ("B", "<$(A)>", "<va>"),
        ("E12", "$(A)$(B)", "va<va>"),
        ("E13", "$A", "$A"),
        ("E14", "$(C)", "$(C)"),
        ("C", "later", "later"),
        ("x.y-z", "dots", "dots"),
        ("E15", "$(x.y-z)", "dots"),
        ("E16", "$$$(A)", "$va"),
        ("E17", "$($(A))", "$($(A))"),
        ("E18", "é$(A)é$$é", "évaé$é"),
        ("E19", "", ""),
        ("E20", "line\n$(A)", "line\nva"),
        ("A", "again", "again"),
    ];
    let node = Node::start();
    let share = Share::new(&node);
    let args: Vec<(&str, &str)> = ENV.iter().filter(|(k, _, _)| k.starts_with('E')).map(|(_, v, w)| (*v, *w)).collect();
    let mut main = container("c", "");
    // Command and args see the last value of each variable, whatever the order.
    main["command"] = json!([
        "sh",
        "-c",
        "cat /proc/1/environ > /share/env; for a; do printf '%s\\0' \"$a\"; done > /share/args; echo $0 > /share/zero; exec sleep 1000000",
        "$$(A)$(A)"
    ]);
    main["args"] = json!(args.iter().map(|(v, _)| v).collect::<Vec<_>>());
    main["env"] = ENV.iter().map(|(k, v, _)| json!({"name": k, "value": v})).collect();
    node.write("dollar.yaml", &share.mounted(pod("dollar", [main])));
    wait_until("the container wrote", seconds(60), || (!share.read("zero").is_empty()).then_some(()));

    let got = environment(&share, "env");
    for (name, value, wanted) in ENV {
        let wanted = if name == "A" { "again" } else { wanted };
        assert_eq!(got.get(name).map(String::as_str), Some(wanted), "env {name}: {value:?}");
    }
    let got: Vec<String> = share.read("args").split_terminator('\0').map(str::to_owned).collect();
    assert_eq!(got.len(), args.len());
    for ((value, in_env), got) in args.iter().zip(got) {
        let wanted = if *value == "$(C)" { "later".to_owned() } else { in_env.replace("va", "again") };
        let wanted = if *value == "$(A)$(B)" { "again<va>".to_owned() } else { wanted };
        assert_eq!(got, wanted, "arg {value:?}");
    }
    assert_eq!(share.read("zero"), "$(A)again\n");
}

/// Nameservers, search domains and sorted options of a resolv.conf.
fn resolver(share: &Share, pod: &str) -> (Vec<String>, Vec<String>, Vec<String>) {
    let text = wait_until(&format!("{pod} wrote its resolv.conf"), seconds(60), || {
        Some(share.read(pod)).filter(|t| t.contains("END"))
    });
    let of = |key: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|l| l.strip_prefix(key)?.strip_prefix(' '));
        lines.flat_map(|l| l.split_whitespace().map(str::to_owned)).collect()
    };
    let mut options = of("options");
    options.sort();
    (of("nameserver"), of("search"), options)
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_resolver_file_of_every_dns_policy() {
    let mut node = Node::prepare(Options::default());
    let file = node.dir().join("resolv.test");
    fs::write(
        &file,
        "# a comment\nnameserver 10.1.0.1\n; another\nnameserver 10.1.0.2\nnameserver fe80::1%eth0\nnameserver 10.1.0.4\n\
         search old.test\nsearch a.test b.test a.test . c.test\noptions timeout:3\noptions attempts:2 ndots:3\n",
    )
    .unwrap();
    node.configure("resolvConf", json!(file));
    node.configure("clusterDNS", json!(["10.97.0.10"]));
    node.configure("clusterDomain", json!("cluster.local"));
    let share = Share::new(&node);
    let plus = json!({"nameservers": ["10.9.9.9"], "searches": ["extra.test", "a.test"],
                      "options": [{"name": "ndots", "value": "7"}, {"name": "edns0"}]});
    let many: Vec<String> = (0..32).map(|i| format!("s{i}.test")).collect();
    let pods: Vec<(&str, Value)> = vec![
        ("default", json!({"dnsPolicy": "Default"})),
        ("cluster", json!({})),
        ("host", json!({"hostNetwork": true})),
        ("clusterhost", json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"})),
        ("none", json!({"dnsPolicy": "None", "dnsConfig": plus})),
        ("plus", json!({"dnsConfig": plus})),
        ("defaultplus", json!({"dnsPolicy": "Default", "dnsConfig": plus})),
        ("many", json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.9.9.9"], "searches": many}})),
    ];
    for (name, fields) in &pods {
        let script = format!(
            "cat /etc/resolv.conf > /share/{name}.tmp; echo END >> /share/{name}.tmp; mv /share/{name}.tmp /share/{name}; {HOLD}"
        );
        let mut manifest = share.mounted(pod(name, [container("c", &script)]));
        manifest["spec"] = with(manifest["spec"].clone(), fields.clone());
        node.write(&format!("{name}.yaml"), &manifest);
    }
    node.run();

    let strings = |all: &[&str]| all.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let host_options = strings(&["attempts:2", "ndots:3", "timeout:3"]);
    let default = resolver(&share, "default");
    assert_eq!(default.0, strings(&["10.1.0.1", "10.1.0.2", "fe80::1%eth0"]), "at most three, in order");
    assert_eq!(default.2, host_options, "the options of all lines");
    assert!(default.1.starts_with(&strings(&["a.test", "b.test"])), "the last search line: {:?}", default.1);
    assert!(!default.1.contains(&".".to_owned()) && default.1.contains(&"c.test".to_owned()), "{:?}", default.1);
    assert_eq!(resolver(&share, "host"), default, "ClusterFirst with hostNetwork is Default");

    let cluster = strings(&["default.svc.cluster.local", "svc.cluster.local", "cluster.local"]);
    for name in ["cluster", "clusterhost"] {
        let (servers, searches, options) = resolver(&share, name);
        assert_eq!(servers, ["10.97.0.10"], "{name}");
        assert_eq!(searches, [cluster.clone(), strings(&["a.test", "b.test", "c.test"])].concat(), "{name}");
        assert_eq!(options.iter().filter(|o| o.starts_with("ndots")).collect::<Vec<_>>(), ["ndots:5"], "{name}");
    }
    let extra = strings(&["edns0", "ndots:7"]);
    assert_eq!(resolver(&share, "none"), (strings(&["10.9.9.9"]), strings(&["extra.test", "a.test"]), extra.clone()));
    let (servers, searches, options) = resolver(&share, "plus");
    assert_eq!(servers, ["10.97.0.10", "10.9.9.9"]);
    assert_eq!(searches, [cluster, strings(&["a.test", "b.test", "c.test", "extra.test"])].concat());
    assert!(options.contains(&"ndots:7".to_owned()) && options.contains(&"edns0".to_owned()), "{options:?}");
    assert!(!options.contains(&"ndots:5".to_owned()), "{options:?}");
    let (servers, _, options) = resolver(&share, "defaultplus");
    assert_eq!(servers.len(), 3, "{servers:?}");
    assert_eq!(options, strings(&["attempts:2", "edns0", "ndots:7", "timeout:3"]));
    assert_eq!(resolver(&share, "many").1, many);
    wait_until("a warning names the nameservers that are used", seconds(5), || {
        node.log()
            .lines()
            .any(|l| l.contains("Nameserver limits were exceeded") && l.contains("10.1.0.1 10.1.0.2 fe80::1%eth0"))
            .then_some(())
    });

    // Without a file of the host, pods are shown the way to nowhere.
    for (name, _) in &pods {
        node.remove(&format!("{name}.yaml"));
    }
    node.kill();
    node.configure("resolvConf", json!(""));
    node.run();
    let script = format!(
        "cat /etc/resolv.conf > /share/empty.tmp; echo END >> /share/empty.tmp; mv /share/empty.tmp /share/empty; {HOLD}"
    );
    let mut manifest = share.mounted(pod("empty", [container("c", &script)]));
    manifest["spec"]["dnsPolicy"] = json!("Default");
    node.write("empty.yaml", &manifest);
    let (servers, searches, _) = resolver(&share, "empty");
    assert_eq!((servers, searches), (strings(&["127.0.0.1"]), strings(&["."])));
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_downward_api_rounds_up_and_falls_back_to_allocatable() {
    let node = Node::start();
    let share = Share::new(&node);
    let resource = |name: &str, resource: &str, divisor: &str| {
        let mut field = json!({"resource": resource});
        if !divisor.is_empty() {
            field["divisor"] = json!(divisor);
        }
        json!({"name": name, "valueFrom": {"resourceFieldRef": field}})
    };
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let dump =
        |name: &str| format!("cat /proc/1/environ > /share/{name}.tmp; mv /share/{name}.tmp /share/{name}; {HOLD}");

    let mut sized = pod(
        "sized",
        [
            with(
                container("c", &dump("sized")),
                json!({
                    "resources": {"limits": {"cpu": "1500m", "memory": "1073741825"}, "requests": {"cpu": "100m", "memory": "1Mi"}},
                    "env": [
                        resource("CPU", "limits.cpu", ""), resource("CPU0", "limits.cpu", "0"), resource("CPUM", "limits.cpu", "1m"),
                        resource("RCPU", "requests.cpu", ""), resource("MEM", "limits.memory", ""), resource("MEMK", "limits.memory", "1Ki"),
                        resource("MEMM", "limits.memory", "1Mi"), resource("MEMG", "limits.memory", "1Gi"), resource("RMEM", "requests.memory", "1Ki"),
                        field("NAME", "metadata.name"), field("SPACE", "metadata.namespace"), field("UID", "metadata.uid"),
                        field("LABEL", "metadata.labels['l']"), field("ANNOTATION", "metadata.annotations['a/b']"), field("NODE", "spec.nodeName"),
                        field("ACCOUNT", "spec.serviceAccountName"), field("IP", "status.podIP"), field("IPS", "status.podIPs"),
                        field("HOST", "status.hostIP"), field("HOSTS", "status.hostIPs"),
                    ],
                }),
            ),
            with(container("other", HOLD), json!({"resources": {"limits": {"cpu": "250m", "memory": "64Mi"}}})),
        ],
    );
    sized["metadata"]["labels"] = json!({"l": "v1", "k": "w"});
    sized["metadata"]["annotations"] = json!({"a/b": "q\"uo\\te\nnew ü"});
    let item = |path: &str, source: Value| with(json!({"path": path}), source);
    let of = |container: &str, resource: &str, divisor: &str| json!({"resourceFieldRef": {"containerName": container, "resource": resource, "divisor": divisor}});
    sized["spec"]["volumes"] = json!([{"name": "d", "downwardAPI": {"defaultMode": 0o640, "items": [
        item("labels", json!({"fieldRef": {"fieldPath": "metadata.labels"}})),
        item("annotations", json!({"fieldRef": {"fieldPath": "metadata.annotations"}})),
        with(item("deep/cpu", of("c", "limits.cpu", "1m")), json!({"mode": 0o400})),
        item("other", of("other", "limits.memory", "1Mi")),
        item("othercpu", of("other", "limits.cpu", "1")),
    ]}}]);
    sized["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "d", "mountPath": "/d"}]);
    node.write("sized.yaml", &share.mounted(sized));
    let plain = with(
        container("c", &dump("plain")),
        json!({"env": [
            resource("CPU", "limits.cpu", ""), resource("MEM", "limits.memory", ""), resource("DISK", "limits.ephemeral-storage", ""),
            resource("RCPU", "requests.cpu", "1m"), resource("RMEM", "requests.memory", ""),
        ]}),
    );
    node.write("plain.yaml", &share.mounted(pod("plain", [plain])));

    let shown = node.wait_running("sized");
    let got = environment(&share, "sized");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let wanted = [
        ("CPU", "2"),
        ("CPU0", "2"),
        ("CPUM", "1500"),
        ("RCPU", "1"),
        ("MEM", "1073741825"),
        ("MEMK", "1048577"),
        ("MEMM", "1025"),
        ("MEMG", "2"),
        ("RMEM", "1024"),
        ("NAME", "sized-e2e"),
        ("SPACE", "default"),
        ("LABEL", "v1"),
        ("ANNOTATION", "q\"uo\\te\nnew ü"),
        ("NODE", "e2e"),
    ];
    for (name, value) in wanted {
        assert_eq!(got.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert_eq!(got["UID"], text(&shown["metadata"]["uid"]));
    assert_eq!(got["IP"], text(&shown["status"]["podIP"]));
    assert_eq!(got["IPS"], got["IP"]);
    assert!(got["HOST"].parse::<std::net::IpAddr>().is_ok(), "{}", got["HOST"]);
    assert!(got["HOSTS"].split(',').any(|ip| ip == got["HOST"]), "{}", got["HOSTS"]);

    let file = |path: &str| {
        let out = node.exec("sized", "c", &["cat", &format!("/d/{path}")]);
        assert_eq!(out.exit_code, 0, "{path}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(file("labels"), "k=\"w\"\nl=\"v1\"");
    assert!(file("annotations").lines().any(|l| l == "a/b=\"q\\\"uo\\\\te\\nnew ü\""), "{}", file("annotations"));
    assert_eq!((file("deep/cpu"), file("other"), file("othercpu")), ("1500".into(), "64".into(), "1".into()));
    let modes = node.exec("sized", "c", &["stat", "-L", "-c", "%a", "/d/labels", "/d/deep/cpu"]).stdout;
    assert_eq!(String::from_utf8(modes).unwrap(), "640\n400\n");

    // No limit: what the node can give to pods, not what it has. The node's configuration keeps 50Mi of memory and 1 % of the disk.
    let got = environment(&share, "plain");
    assert_eq!(got["CPU"], std::thread::available_parallelism().unwrap().to_string());
    assert_eq!(got["MEM"], (e2e::memory_kib() * 1024 - (50 << 20)).to_string());
    let disk = rustix::fs::statvfs(node.root()).unwrap();
    let disk = disk.f_blocks * disk.f_frsize;
    let got_disk: u64 = got["DISK"].parse().unwrap();
    assert!(got_disk < disk && got_disk > disk / 100 * 98, "{got_disk} of {disk}");
    assert_eq!((got["RCPU"].as_str(), got["RMEM"].as_str()), ("0", "0"));
}
