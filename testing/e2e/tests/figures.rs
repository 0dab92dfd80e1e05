//! The pages of figures, compared with those that the Go kubelet gives for the same pods, name by name and field by field.
//!
//! Without the Go kubelet its names alone are compared, as recorded in `fixtures/figures/go-names.tsv`; with `RUBELET_E2E_RECORD=1` they are
//! written anew.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use e2e::{Node, Options, container, pod, seconds, sidecar, wait_until, with};
use serde_json::{Value, json};

const PAGES: [&str; 5] = ["/metrics", "/metrics/cadvisor", "/metrics/probes", "/metrics/resource", "/metrics/slis"];
const SUMMARIES: [&str; 2] = ["/stats/summary", "/stats/summary?only_cpu_and_memory=true"];
/// Names that only Go has, by their beginnings. What they count is not there: client-go's queues, DRA.
const ONLY_GO: [&str; 3] = ["go_", "workqueue_", "dra_operations_duration_seconds"];
/// Names that are there once something happened, which depends on the run.
const PASSING: [&str; 3] =
    ["kubelet_http_requests_duration_seconds", "kubelet_evictions", "kubelet_runtime_operations_errors_total"];

/// The shape of a metric: its type and the names of its labels.
type Shape = (String, BTreeSet<String>);

/// Everything that one kubelet says.
struct Told {
    shapes: BTreeMap<(String, String), Shape>,
    /// By page: name and labels without those that differ from run to run, to the value.
    samples: BTreeMap<String, BTreeMap<String, f64>>,
    summaries: Vec<BTreeMap<String, Value>>,
}

/// The Go kubelet, whose figures have names.
fn go_kubelet(dir: &Path) -> Option<PathBuf> {
    let program = rig::lab().join("bin/kubelet");
    if !program.is_file() {
        return None;
    }
    let socket = std::env::var("RUBELET_E2E_CONTAINERD_SOCK").ok()?;
    Some(rig::kubelet::with_named_figures(&program, Path::new(&socket), dir).unwrap())
}

fn manifests() -> Vec<(&'static str, Value)> {
    let busy = with(
        container(
            "busy",
            "dd if=/dev/zero of=/e/x bs=1k count=300 2>/dev/null; while true; do i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done; sleep 0.2; done",
        ),
        json!({"resources": {"limits": {"memory": "64Mi", "cpu": "500m"}}, "volumeMounts": [{"name": "e", "mountPath": "/e"}],
               "readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 2}}),
    );
    let mut web = pod("web", [busy, container("talks", "while true; do echo 12345678901234567890; sleep 0.2; done")]);
    web["spec"]["initContainers"] = json!([container("first", "true"), sidecar("side", "exec sleep 1000000")]);
    web["spec"]["volumes"] = json!([{"name": "e", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/tmp"}}]);
    let mut host = pod("host", [container("c", "exec sleep 1000000")]);
    host["spec"]["hostNetwork"] = json!(true);
    vec![("web", web), ("host", host)]
}

/// Runs the pods under one kubelet and asks for all pages.
fn told(program: Option<PathBuf>) -> Told {
    let go = program.is_some();
    let node = Node::with(Options { program, ..Options::default() });
    for (name, manifest) in manifests() {
        node.write(&format!("{name}.yaml"), &manifest);
    }
    for (name, _) in manifests() {
        node.wait_running(name);
    }
    let get = |page: &str| node.get(page).filter(|(code, _)| *code == 200).map(|(_, text)| text);
    let summary = |page: &str| serde_json::from_str::<Value>(&get(page)?).ok();
    // The Go kubelet looks at a container some ten seconds after its start, at the runtime's writable layers and at volumes once in a while.
    wait_until("figures of all containers", seconds(120), || {
        let full = summary(SUMMARIES[0])?;
        let pods = full["pods"].as_array()?;
        let known = |c: &Value| c["cpu"]["usageNanoCores"].is_u64() && c["rootfs"]["inodesUsed"].as_u64() > Some(0);
        let whole =
            |p: &Value| p["network"].is_object() && p["containers"].as_array().is_some_and(|all| all.iter().all(known));
        let web = pods.iter().find(|p| p["podRef"]["name"] == "web-e2e")?;
        (pods.len() == 2
            && pods.iter().all(whole)
            && web["containers"].as_array()?.len() == 3
            && web["volume"].is_array())
        .then_some(())
    });
    if go {
        std::thread::sleep(seconds(20));
    }
    let mut told = Told { shapes: BTreeMap::new(), samples: BTreeMap::new(), summaries: Vec::new() };
    for page in PAGES {
        let text = get(page).unwrap_or_else(|| panic!("{page} is not given"));
        read_page(page, &text, &node, &mut told);
    }
    for page in SUMMARIES {
        let mut fields = BTreeMap::new();
        flatten(&summary(page).unwrap(), String::new(), &mut fields);
        told.summaries.push(fields);
    }
    told
}

/// Takes a page of metrics apart.
fn read_page(page: &str, text: &str, node: &Node, told: &mut Told) {
    let mut kind = (String::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, type_) = rest.split_once(' ').unwrap();
            kind = (name.to_owned(), type_.to_owned());
            told.shapes.insert((page.to_owned(), kind.0.clone()), (kind.1.clone(), BTreeSet::new()));
            continue;
        }
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let (series, value) = match line.split_once("} ") {
            Some((series, value)) => (series, value),
            None => line.split_once(' ').unwrap_or_else(|| panic!("{line}")),
        };
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        assert!(name.starts_with(&kind.0), "{line} under {kind:?}");
        // No value that is looked at here holds a comma or a quote.
        let labels: BTreeMap<&str, &str> =
            labels.split(',').filter_map(|l| l.split_once('=')).map(|(k, v)| (k, v.trim_matches('"'))).collect();
        let shape = told.shapes.get_mut(&(page.to_owned(), kind.0.clone())).unwrap();
        shape.1.extend(labels.keys().filter(|l| !["le", "quantile"].contains(l)).map(ToString::to_string));
        let value: f64 = value.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
        let shown = |(k, v): (&&str, &&str)| {
            let v = match *k {
                "id" => group(v, node),
                "name" if !v.is_empty() => "ID".to_owned(),
                // A static pod's comes from its manifest and the place of that.
                "pod_uid" => "UID".to_owned(),
                _ => (*v).to_owned(),
            };
            format!("{k}={v}")
        };
        let key = format!("{name}{{{}}}", labels.iter().map(shown).collect::<Vec<_>>().join(","));
        told.samples.entry(page.to_owned()).or_default().insert(key, value);
    }
}

/// A group's path without what differs from run to run.
fn group(path: &str, node: &Node) -> String {
    let path = path.replacen(node.cgroup(), "", 1);
    let part = |part: &str| match part {
        _ if part.starts_with("pod") => "POD".to_owned(),
        _ if part.len() == 64 => "ID".to_owned(),
        _ => part.to_owned(),
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// Every field by its path; items of lists by their names.
fn flatten(value: &Value, path: String, fields: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(all) => all.iter().for_each(|(k, v)| flatten(v, format!("{path}.{k}"), fields)),
        Value::Array(all) => {
            for item in all {
                let name = item["name"].as_str().or(item["podRef"]["name"].as_str()).unwrap_or_default();
                flatten(item, format!("{path}[{name}]"), fields);
            }
        }
        other => {
            fields.insert(path, other.clone());
        }
    }
}

fn names_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/figures/go-names.tsv")
}

/// The recorded names of the Go kubelet.
fn recorded() -> BTreeMap<(String, String), Shape> {
    let text = fs::read_to_string(names_file()).unwrap();
    let line = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let labels = fields[3].split(',').filter(|l| !l.is_empty()).map(str::to_owned).collect();
        ((fields[0].to_owned(), fields[1].to_owned()), (fields[2].to_owned(), labels))
    };
    text.lines().filter(|l| !l.starts_with('#')).map(line).collect()
}

fn record(shapes: &BTreeMap<(String, String), Shape>) {
    let mut text = "# page, name, type, labels: of the Go kubelet 1.36.1 without an API server, go_* left out. Made by this test.\n".to_owned();
    for ((page, name), (kind, labels)) in shapes.iter().filter(|((_, name), _)| !name.starts_with("go_")) {
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        text.push_str(&format!("{page}\t{name}\t{kind}\t{}\n", labels.join(",")));
    }
    fs::create_dir_all(names_file().parent().unwrap()).unwrap();
    fs::write(names_file(), text).unwrap();
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn pages_are_as_the_go_kubelets() {
    let dir = tempfile::tempdir().unwrap();
    let go = go_kubelet(dir.path()).map(|program| told(Some(program)));
    if let Some(go) = &go
        && std::env::var_os("RUBELET_E2E_RECORD").is_some()
    {
        record(&go.shapes);
    }
    let ours = told(None);
    let expected = go.as_ref().map_or_else(recorded, |go| go.shapes.clone());

    let mut wrong = Vec::new();
    let (mut same, mut all) = (0, 0);
    for (key, shape) in &expected {
        let found = ours.shapes.get(key);
        if key.1.starts_with("go_") || (found.is_none() && PASSING.contains(&key.1.as_str())) {
            continue;
        }
        all += 1;
        match found {
            Some(found) if found == shape => same += 1,
            Some(found) => wrong.push(format!("{key:?}: {found:?} instead of {shape:?}")),
            None if ONLY_GO.iter().any(|n| key.1.starts_with(n)) => {}
            None => wrong.push(format!("{key:?} is missing")),
        }
    }
    println!("{same} of {all} names with the same type and labels");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(same * 100 >= all * 95, "{same} of {all}");

    let Some(go) = go else {
        println!("skipped in part: the Go kubelet is not built (lab/build-reference kubelet)");
        return;
    };
    let mut wrong = Vec::new();
    compare_samples(&go, &ours, &mut wrong);
    for (go, ours) in go.summaries.iter().zip(&ours.summaries) {
        compare_summary(go, ours, &mut wrong);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Every series of pods and containers is there, and what does not change by itself is the same.
fn compare_samples(go: &Told, ours: &Told, wrong: &mut Vec<String>) {
    for page in ["/metrics/cadvisor", "/metrics/resource", "/metrics/probes"] {
        for (series, value) in &go.samples[page] {
            // File systems and interfaces of the node are those of a moment; a process's start is its own.
            if series.starts_with("container_fs_") || series.contains("interface=") || series.starts_with("process_") {
                continue;
            }
            let Some(found) = ours.samples[page].get(series) else {
                wrong.push(format!("{page}: {series} is missing"));
                continue;
            };
            let fixed =
                ["container_spec_", "machine_", "container_threads_max", "container_ulimits", "container_health"];
            if fixed.iter().any(|f| series.starts_with(f)) && found != value && !series.contains("id=/kubepods,") {
                wrong.push(format!("{page}: {series} is {found} instead of {value}"));
            }
            let near = |limit: f64| (found - value).abs() <= limit || found / value < 4.0 && value / found < 4.0;
            let pods = series.contains("id=/kubepods/");
            if pods && series.starts_with("container_memory_rss") && !near(512.0 * 1024.0) {
                wrong.push(format!("{page}: {series} is {found}, and with Go {value}"));
            }
            if pods
                && ["container_processes", "container_threads{"].iter().any(|f| series.starts_with(f))
                && (found - value).abs() > 2.0
            {
                wrong.push(format!("{page}: {series} is {found}, and with Go {value}"));
            }
        }
    }
}

/// Every field is there, and the figures are of the same size.
fn compare_summary(go: &BTreeMap<String, Value>, ours: &BTreeMap<String, Value>, wrong: &mut Vec<String>) {
    for (path, value) in go {
        // Where the kernel does not count pressure Go shows zeros; the node's interfaces are those of the moment.
        if path.contains(".psi.") || path.contains("interfaces[") {
            continue;
        }
        let Some(found) = ours.get(path) else {
            wrong.push(format!("{path} is missing"));
            continue;
        };
        let (Some(found), Some(value)) = (found.as_f64(), value.as_f64()) else {
            assert_eq!(found.is_string(), value.is_string(), "{path}");
            continue;
        };
        let field = path.rsplit('.').next().unwrap_or_default();
        let (share, more) = match field {
            "capacityBytes" | "inodes" | "maxpid" => (0.0, 0.0),
            // Each run has its own files, and others write to this disk.
            "usedBytes" if path.starts_with(".pods") => (0.5, 262_144.0),
            "inodesUsed" if path.starts_with(".pods") => (0.2, 3.0),
            "usageBytes" | "workingSetBytes" | "rssBytes" if path.starts_with(".pods") => (3.0, 1_048_576.0),
            "usageNanoCores" if path.starts_with(".pods") => (5.0, 50e6),
            "process_count" => (0.0, 2.0),
            "availableBytes" if path.contains(".memory.") && path.starts_with(".pods") => (0.05, 2_097_152.0),
            _ => continue,
        };
        let difference = (found - value).abs();
        if difference > more && difference > share * found.min(value) {
            wrong.push(format!("{path} is {found}, and with Go {value}"));
        }
    }
    for path in ours.keys().filter(|p| p.starts_with(".pods") && !p.contains(".psi.") && !p.contains("interfaces[")) {
        if !go.contains_key(path) {
            wrong.push(format!("{path} is more than Go gives"));
        }
    }
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn many_askers_share_a_collection() {
    let node = Node::start();
    for (name, manifest) in manifests() {
        node.write(&format!("{name}.yaml"), &manifest);
    }
    for (name, _) in manifests() {
        node.wait_running(name);
    }
    let calls = || {
        let (_, page) = node.get("/metrics").unwrap();
        let line = page
            .lines()
            .find(|l| l.starts_with("kubelet_runtime_operations_total{operation_type=\"list_container_stats\"}"));
        line.and_then(|l| l.rsplit_once(' ')?.1.parse::<u64>().ok()).unwrap_or_default()
    };
    let before = calls();
    let port = node.port("readOnlyPort");
    let asked: Vec<_> = (0..40)
        .map(|_| std::thread::spawn(move || rig::http::get_tcp(port, "/stats/summary").map(|(code, _)| code)))
        .collect();
    for thread in asked {
        assert_eq!(thread.join().unwrap().unwrap(), 200);
    }
    // The page itself asks for logs and layers once more when the shared ones are old.
    let made = calls() - before;
    assert!(made <= 4, "{made} collections for 40 askers");
}
