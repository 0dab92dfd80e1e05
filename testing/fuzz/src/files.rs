//! Files that people, the Go kubelet, drivers and an earlier agent leave: manifests, configuration, checkpoints, small texts.

#![allow(clippy::expect_used)]

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use config::load::DirEntry;
use config::{Files, Host, parse_flags};
use decide::config::{dns, env_file, expand, image_name, termination};
use decide::credentials::records::{PullIntent, PulledRecord};
use decide::userns::{IdPool, Ranges};
use manifest::checkpoint::{decode_allocations, encode_allocations};
use manifest::managers as kept;
use manifest::{Gates, Origin};
use model::pod::{DesiredPod, PodSource, PodUid};

/// Manifests, as a file and as the answer of a URL.
pub const MANIFESTS: &[&[u8]] = &[
    b"apiVersion: v1\nkind: Pod\nmetadata: {name: web, uid: own, labels: {a: b}}\nspec:\n  containers:\n  - {name: c, image: 'a:1', command: [sh, '$(A)'], env: [{name: A, value: '1'}]}\n",
    b"{\"kind\":\"PodList\",\"apiVersion\":\"v1\",\"items\":[{\"metadata\":{\"name\":\"a\"},\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"a\"}]}}]}",
    b"apiVersion: v1\nkind: Pod\nmetadata: &m {name: a}\nspec: {volumes: [{name: v, emptyDir: {medium: Memory, sizeLimit: 1Gi}}], containers: [{name: c, image: b, volumeMounts: [{name: v, mountPath: /v, subPath: x/y}], resources: {limits: {cpu: 500m}}}]}\n",
];

/// A manifest: a pod that is taken has names that lead nowhere, and can be written and read again.
pub fn manifest(bytes: &[u8]) {
    for origin in [Origin::File("/m/x.yaml".into()), Origin::Url("http://h/x".into())] {
        let seen = jiff::Timestamp::UNIX_EPOCH;
        let Ok(pods) = manifest::load(bytes, &origin, "node-a", seen, &Gates::default()) else { continue };
        for pod in pods.into_iter().flatten() {
            let names = [pod.uid().as_str(), pod.name(), pod.namespace()].into_iter();
            let names = names.chain(pod.containers().map(|c| c.spec.name.as_str()));
            let all: Vec<&str> = names.chain(pod.spec().volumes.iter().flatten().map(|v| v.name.as_str())).collect();
            assert!(all.iter().all(|n| !n.contains('/') && *n != ".." && *n != "."), "{all:?}");
            let text = serde_json::to_vec(&pod.to_pod()).expect("it came from JSON or YAML");
            let again = serde_json::from_slice(&text).expect("it was just written");
            let again = DesiredPod::new(again, PodSource::File).expect("it was one before");
            assert!(again.same_intent(&pod), "{again:?} is another pod than {pod:?}");
            for c in pod.containers() {
                let image = c.spec.image.as_deref().unwrap_or_default();
                assert!(!manifest::container_hash_text(image, &c.spec.name).is_empty());
            }
        }
    }
}

/// What stands between a configuration and its drop-ins.
const CUT: &[u8] = b"\n=====\n";

/// A configuration and drop-ins.
pub const CONFIGURATIONS: &[&[u8]] = &[
    b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nstaticPodPath: m\nevictionHard: {memory.available: 100Mi}\nfeatureGates: {AllAlpha: true}\n",
    b"{\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"kind\":\"KubeletConfiguration\",\"maxPods\":7}\n=====\nevictionHard: null\nmaxPods: 9\nsyncFrequency: 1m5s\n=====\nkubeReserved: {cpu: 100m}\nreservedSystemCPUs: 0-1,3\n",
    b"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nauthentication: {x509: {clientCAFile: ca}, webhook: {enabled: false}}\nregisterWithTaints: [{key: a, effect: NoSchedule}]\ntlsCipherSuites: [TLS_AES_128_GCM_SHA256]\nshutdownGracePeriodByPodPriority: [{priority: 1, shutdownGracePeriodSeconds: 3}]\n",
];

struct Memory(BTreeMap<PathBuf, Vec<u8>>);

impl Files for Memory {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let below = self.0.keys().filter(|p| p.parent() == Some(path));
        Ok(below.map(|p| DirEntry { name: name(p), is_dir: false }).collect())
    }
}

fn name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn loaded(config: &[u8], more: &[&[u8]], cgroup_v2: bool) -> config::Loaded {
    let args = ["--config=/etc/k/config", "--config-dir=/etc/k/config.d"].map(str::to_owned);
    let flags = parse_flags(&args).expect("they are flags");
    let more = more.iter().enumerate().map(|(n, text)| (format!("/etc/k/config.d/{n}.conf").into(), text.to_vec()));
    let files = Memory(std::iter::once(("/etc/k/config".into(), config.to_vec())).chain(more).collect());
    config::load(&flags, &files, &Host { cgroup_v2, working_dir: "/w".into() })
}

/// A configuration is read to the end whatever it says; what it came to can be shown, and is the same when that is read again.
pub fn configuration(bytes: &[u8]) {
    let mut parts = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(CUT.len()).position(|w| w == CUT) {
        parts.push(&rest[..at]);
        rest = &rest[at + CUT.len()..];
    }
    parts.push(rest);
    for cgroup_v2 in [false, true] {
        let first = loaded(parts[0], &parts[1..], cgroup_v2);
        let shown = config::configz(&first.config);
        if first.has_errors() {
            continue;
        }
        let again = loaded(shown.to_string().as_bytes(), &[], cgroup_v2);
        assert_eq!(config::configz(&again.config), shown, "{:?}", again.findings);
    }
}

/// Kubeconfigs.
pub const KUBECONFIGS: &[&[u8]] = &[
    b"apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://h:6443', certificate-authority: ca.crt}}]\nusers: [{name: u, user: {client-certificate: k.pem, client-key: k.pem}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n",
    b"{\"apiVersion\":\"v1\",\"kind\":\"Config\",\"current-context\":\"x\",\"contexts\":[{\"name\":\"x\",\"context\":{\"cluster\":\"c\",\"user\":\"u\"}}],\"clusters\":[{\"name\":\"c\",\"cluster\":{\"server\":\"https://[::1]/p\",\"certificate-authority-data\":\"YQ==\",\"proxy-url\":\"http://p:1\",\"tls-server-name\":\"n\"}}],\"users\":[{\"name\":\"u\",\"user\":{\"token\":\"t\",\"exec\":{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"command\":\"c\",\"args\":[\"a\"],\"env\":[{\"name\":\"A\",\"value\":\"b\"}]}}}]}",
];

/// A kubeconfig: the server is one, and a certificate is asked for unless the file says otherwise.
pub fn kubeconfig(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(found) = cluster::kubeconfig::ClusterConfig::parse(Path::new("/d/k.conf"), &text) {
        assert!(found.server.scheme_str() == Some("https") && found.server.host().is_some(), "{}", found.server);
        assert!(
            !found.insecure_skip_tls_verify || text.contains("insecure-skip-tls-verify"),
            "verification went by itself"
        );
    }
}

/// Of which kind in the first byte, then the file.
pub const CHECKPOINTS: &[&[u8]] = &[
    b"\x00{\"data\":\"{\\\"entries\\\":{\\\"u1\\\":{\\\"ContainerResources\\\":{\\\"c\\\":{\\\"requests\\\":{\\\"cpu\\\":\\\"100m\\\"}}}}}}\",\"checksum\":1}",
    b"\x01{\"policyName\":\"static\",\"defaultCpuSet\":\"0-3\",\"entries\":{\"u1\":{\"c\":\"4-5\"}},\"checksum\":1}",
    b"\x02{\"policyName\":\"Static\",\"machineState\":{\"0\":{\"numberOfAssignments\":0,\"memoryMap\":{\"memory\":{\"total\":1,\"systemReserved\":0,\"allocatable\":1,\"reserved\":0,\"free\":1}},\"cells\":[0]}},\"entries\":{},\"checksum\":1}",
    b"\x03{\"Data\":{\"PodDeviceEntries\":[{\"PodUID\":\"u\",\"ContainerName\":\"c\",\"ResourceName\":\"a/b\",\"DeviceIDs\":{\"-1\":[\"d\"]},\"AllocResp\":\"\"}],\"RegisteredDevices\":{\"a/b\":[\"d\"]}},\"Checksum\":1}",
    b"\x04{\"version\":\"v1\",\"data\":\"{}\",\"checksum\":1}",
    b"\x05{\"kind\":\"ImagePullIntent\",\"apiVersion\":\"kubelet.config.k8s.io/v1alpha1\",\"image\":\"a\"}",
    b"\x06{\"kind\":\"ImagePulledRecord\",\"apiVersion\":\"kubelet.config.k8s.io/v1alpha1\",\"lastUpdatedTime\":\"2026-01-01T00:00:00Z\",\"imageRef\":\"r\",\"credentialMapping\":{\"a\":{\"nodePodsAccessible\":true}}}",
    b"\x07{\"startTime\":\"2026-01-01T00:00:00Z\",\"endTime\":null}",
    b"\x08{\"uidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}],\"gidMappings\":[{\"hostId\":65536,\"containerId\":0,\"length\":65536}]}",
    b"\x09{\"auths\":{\"r.test\":{\"auth\":\"YTpi\"}}}",
    b"\x0a{\"r.test\":{\"auth\":\"YTpi\",\"email\":\"x\"}}",
    b"\x0b{\"c\":{\"container\":\"id\",\"started\":true}}",
    b"\x0c{\"reason\":\"Evicted\",\"message\":\"m\",\"grace\":1}",
];

/// A checkpoint or record: what was taken is the same when it is written and read again.
pub fn checkpoint(bytes: &[u8]) {
    let Some((kind, file)) = bytes.split_first() else { return };
    match kind % 13 {
        0 => again(decode_allocations(file), encode_allocations, decode_allocations),
        1 => again(kept::decode_cpus(file), kept::encode_cpus, kept::decode_cpus),
        2 => again(kept::decode_memory(file), kept::encode_memory, kept::decode_memory),
        3 => again(kept::decode_devices(file), kept::encode_devices, kept::decode_devices),
        4 => again(kept::decode_claims(file), |c| kept::encode_claims(c), kept::decode_claims),
        5 => again(PullIntent::decode(file), PullIntent::encode, PullIntent::decode),
        6 => again(PulledRecord::decode(file), PulledRecord::encode, PulledRecord::decode),
        7 => drop(decide::shutdown::Times::decode(file)),
        8 => {
            let mut ranges = Ranges::new(IdPool::all(65536), 65536, 110).expect("the usual");
            let (one, two) = (PodUid::new("one"), PodUid::new("two"));
            if ranges.record(&one, file).is_ok() {
                let theirs = ranges.allocate(&two).expect("there is more than one");
                assert_ne!(ranges.allocate(&one).expect("it has one"), theirs, "one range for two pods");
            }
        }
        9 => drop(decide::credentials::parse_config_json(file)),
        10 => drop(decide::credentials::parse_dockercfg(file)),
        _ => pod::fuzz::kept(file),
    }
}

fn again<T: std::fmt::Debug + PartialEq, E: std::fmt::Debug>(
    found: Result<T, E>,
    encode: impl Fn(&T) -> Vec<u8>,
    decode: impl Fn(&[u8]) -> Result<T, E>,
) {
    if let Ok(found) = found {
        assert_eq!(decode(&encode(&found)).expect("it was just written"), found);
    }
}

/// Resolver files.
pub const RESOLVERS: &[&[u8]] = &[
    b"# x\nnameserver 10.0.0.1\nnameserver fe80::1%eth0\nsearch a.test b.test .\noptions ndots:5 timeout:1\noptions rotate\n",
    b"domain a\nnameserver 1\nnameserver 2\nnameserver 3\nnameserver 4\nsearch a a a. b\n",
];

/// A host's resolver file, for pods of every policy: what a container gets is within the limits of resolvers.
pub fn resolver(bytes: &[u8]) {
    let Ok(host) = dns::parse(&String::from_utf8_lossy(bytes)) else { return };
    for policy in ["Default", "ClusterFirst", "ClusterFirstWithHostNet"] {
        let pod = serde_json::json!({"metadata": {"name": "n", "namespace": "ns", "uid": "u"},
            "spec": {"dnsPolicy": policy, "containers": []}});
        let pod = DesiredPod::new(serde_json::from_value(pod).expect("a pod"), PodSource::Api).expect("a pod");
        let settings = dns::DnsSettings {
            cluster_dns: vec!["10.96.0.10".into()],
            cluster_domain: "cluster.local".into(),
            host: Some(host.clone()),
            node_ips: vec!["10.0.0.1".into()],
        };
        let found = dns::pod_dns(&pod, &settings).config;
        assert!(found.servers.len() <= 3 && found.searches.len() <= 32, "{found:?}");
        assert!(found.searches.join(" ").len() <= 2048, "{found:?}");
        let blank = |s: &String| s.is_empty() || s.contains(char::is_whitespace);
        assert!(![&found.servers, &found.searches, &found.options].into_iter().flatten().any(blank), "{found:?}");
    }
}

/// Of which kind in the first byte, then the text.
pub const TEXTS: &[&[u8]] = &[
    b"\x00A=1\n# x\nB='a b'\nC=\"x\\ny\"\n",
    b"\x011.5Gi",
    b"\x02reg.test:5000/a/b:1@sha256:0123456789012345678901234567890123456789012345678901234567890123",
    b"\x030-3,7,9-11",
    b"\x041h2m3.5s",
    b"\x05a$(A)$$(B)$(C",
    b"\x06process = \"system_u:system_r:container_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n",
    b"\x07a.b.c",
    b"\x0865536:65536:7208960\n",
    b"\x092026-11-29T01:02:03.4Z stdout F text\n2026-11-29T01:02:03.4Z stderr P te",
];

/// Small texts: none of them is taken for more than it is.
pub fn text(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(rest);
    match kind % 10 {
        0 => drop(env_file::value_of(&text, "A")),
        1 => {
            if let Ok(found) = model::quantity::Quantity::parse(&text) {
                let shown = found.to_string();
                let again = model::quantity::Quantity::parse(&shown).expect("it was just written");
                assert_eq!(again.to_string(), shown, "{text:?}");
            }
        }
        2 => drop(image_name::parse(&text)),
        3 => {
            if let Ok(found) = decide::cpus::CpuSet::parse(&text) {
                assert_eq!(decide::cpus::CpuSet::parse(&found.to_string()).expect("it was just written"), found);
            }
        }
        4 => {
            if let Ok(found) = config::duration::parse_signed(&text) {
                let _ = found.as_secs();
            }
        }
        5 => {
            let known = |name: &str| (name == "A").then(|| "$(A)".to_owned());
            assert!(expand::expand(&text, known).len() <= 5 * text.len() + 1);
        }
        6 => drop(decide::selinux::file_context(&text)),
        7 => drop(config::parse_bool(&text)),
        8 => drop(IdPool::parse_getsubids(&text)),
        _ => {
            let tail = termination::log_tail(rest);
            assert!(tail.len() <= rest.len().min(termination::LOG_MAX));
            let _ = decide::config::objects::account_uid(&text);
        }
    }
}
