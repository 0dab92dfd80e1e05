//! The summary against what the Go kubelet gives.

use std::collections::HashMap;

use cri_api::v1;
use host::cgroup::{Detail, GroupFigures, MemoryFigures, Pressure, PressureLine};
use host::fsx::{DiskUsage, FilesystemFigures};
use host::proc::{InterfaceTraffic, OpenFiles, Traffic};
use serde_json::{Value, json};

use super::*;
use crate::groups::{Group, Groups};
use crate::names::{Names, Owner};
use crate::storage::{Storage, Usage, Volume};

const AT: i64 = 1_795_996_400;

fn at(seconds: i64) -> Timestamp {
    Timestamp::new(AT + seconds, 700_000_000).unwrap()
}

fn names() -> Names {
    let label = |(k, v): (&str, &str)| (format!("io.kubernetes.{k}"), v.to_owned());
    let sandbox = v1::PodSandbox {
        id: "s1".into(),
        created_at: AT * 1_000_000_000,
        labels: [("pod.name", "web"), ("pod.namespace", "default"), ("pod.uid", "u1")].map(label).into(),
        ..v1::PodSandbox::default()
    };
    let container = |id: &str, name: &str| v1::Container {
        id: id.into(),
        pod_sandbox_id: "s1".into(),
        created_at: (AT + 2) * 1_000_000_000,
        state: v1::ContainerState::ContainerRunning as i32,
        labels: [label(("container.name", name))].into(),
        ..v1::Container::default()
    };
    Names::new(vec![sandbox], vec![container("c1", "a"), container("c2", "virtual")])
}

fn group(path: &str, owner: Owner, figures: GroupFigures) -> Group {
    Group {
        path: path.into(),
        owner,
        at: at(10),
        figures: GroupFigures { created: Some(at(1)), ..figures },
        nano_cores: Some(7),
        interfaces: None,
        processes: None,
        open: OpenFiles::default(),
        open_limit: None,
    }
}

fn figures(limit: Option<u64>) -> GroupFigures {
    let memory = MemoryFigures {
        usage: 1000,
        working_set: 600,
        rss: 300,
        page_faults: 5,
        major_page_faults: 1,
        limit,
        swap: 3,
        swap_counted: true,
        ..MemoryFigures::default()
    };
    GroupFigures { cpu_ns: Some(123), memory: Some(memory), ..GroupFigures::default() }
}

fn groups() -> Groups {
    let line = PressureLine { total: 9, avg10: 1.5, avg60: 2.0, avg300: 0.0 };
    let mut pod = group("/kubepods/podu1", Owner::Pod(0), figures(None));
    pod.figures.pressure.cpu = Some(Pressure { some: line, full: PressureLine::default() });
    let mut sandbox = group("/kubepods/podu1/s1", Owner::Sandbox(0), figures(None));
    let traffic = |bytes| Traffic { bytes, packets: 1, errors: 2, dropped: 0 };
    sandbox.interfaces = Some(
        ["tun0", "eth0"]
            .map(|name| InterfaceTraffic { name: name.into(), received: traffic(10), sent: traffic(20) })
            .into(),
    );
    let mut container = group("/kubepods/podu1/c1", Owner::Container(0), figures(Some(2000)));
    container.processes = Some(2);
    Groups {
        all: vec![
            group("/", Owner::Other, figures(None)),
            group("/kubepods", Owner::Other, figures(Some(5000))),
            pod,
            sandbox,
            container,
        ],
        detail: Detail::Full,
        outside: None,
        rated: true,
    }
}

fn summary(storage: Option<&Storage>, volumes: Option<&HashMap<String, Vec<Volume>>>) -> Value {
    let told = v1::ContainerStats {
        cpu: Some(v1::CpuUsage {
            timestamp: (AT + 9) * 1_000_000_000,
            usage_core_nano_seconds: Some(v1::UInt64Value { value: 77 }),
            ..v1::CpuUsage::default()
        }),
        ..v1::ContainerStats::default()
    };
    let inputs = Inputs {
        node_name: "n",
        system: &[("pods", "/kubepods"), ("runtime", "/gone")],
        started: at(0),
        node: NodeFacts { booted: at(-5), memory: 8000, swap: 100, processes: Some((32_768, 12)) },
        names: &names(),
        groups: &groups(),
        fallback: &HashMap::from([("c2".to_owned(), told)]),
        storage,
        volumes,
        now: at(11),
    };
    serde_json::from_slice(&compose(&inputs).to_json().unwrap()).unwrap()
}

#[test]
fn cpu_and_memory_alone() {
    let found = summary(None, None);
    let cpu = json!({"time": "2026-11-29T23:53:30Z", "usageNanoCores": 7, "usageCoreNanoSeconds": 123});
    let memory = |available: Option<u64>| {
        let mut memory = json!({"time": "2026-11-29T23:53:30Z", "usageBytes": 1000, "workingSetBytes": 600, "rssBytes": 300,
                                "pageFaults": 5, "majorPageFaults": 1});
        if let Some(available) = available {
            memory["availableBytes"] = json!(available);
        }
        memory
    };
    assert_eq!(
        found["node"],
        json!({
            "nodeName": "n",
            "systemContainers": [{"name": "pods", "startTime": "2026-11-29T23:53:21Z", "cpu": cpu, "memory": memory(Some(4400)),
                                  "swap": {"time": "2026-11-29T23:53:30Z", "swapUsageBytes": 3}}],
            "startTime": "2026-11-29T23:53:15Z",
            "cpu": cpu, "memory": memory(Some(7400)),
            "swap": {"time": "2026-11-29T23:53:30Z", "swapAvailableBytes": 97, "swapUsageBytes": 3},
        })
    );
    let pod = &found["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": "web", "namespace": "default", "uid": "u1"}));
    assert_eq!(pod["startTime"], "2026-11-29T23:53:20Z");
    assert_eq!(pod["memory"], memory(None));
    assert_eq!(
        pod["cpu"]["psi"],
        json!({"full": {"total": 0, "avg10": 0, "avg60": 0, "avg300": 0}, "some": {"total": 9, "avg10": 1.5, "avg60": 2, "avg300": 0}})
    );
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(pod), ["podRef", "startTime", "containers", "cpu", "memory", "swap"]);
    assert_eq!(pod["containers"][0]["memory"], memory(Some(1400)));
    assert_eq!(keys(&pod["containers"][0]), ["name", "startTime", "cpu", "memory", "swap"]);
    assert_eq!(
        pod["containers"][1],
        json!({"name": "virtual", "startTime": "2026-11-29T23:53:22Z", "cpu": {"time": "2026-11-29T23:53:29Z", "usageCoreNanoSeconds": 77}})
    );
}

#[test]
fn everything() {
    let fs = FilesystemFigures { capacity: 100, available: 40, used: 55, inodes: 10, inodes_free: 3, inodes_used: 7 };
    let usage = |used, inodes| Usage { at: at(8), used: Some(used), inodes_used: Some(inodes), fs: Some(fs) };
    let volume = |name: &str, claim: Option<&str>, ephemeral| Volume {
        name: name.into(),
        claim: claim.map(Into::into),
        ephemeral,
        usage: usage(1000, 100),
        abnormal: claim.map(|_| true),
    };
    let storage = Storage {
        at: at(9),
        root: fs,
        images: Some(usage(30, 4)),
        layers_fs: None,
        layers: HashMap::from([("c1".to_owned(), usage(20, 2))]),
        logs: HashMap::from([(("u1".to_owned(), "a".to_owned()), DiskUsage { bytes: 8, inodes: 1 })]),
        hosts: HashMap::from([("u1".to_owned(), DiskUsage { bytes: 4, inodes: 1 })]),
    };
    let volumes =
        HashMap::from([("u1".to_owned(), vec![volume("e", None, true), volume("data", Some("mine"), false)])]);
    let found = summary(Some(&storage), Some(&volumes));
    let shown = |time: &str, used: u64, inodes: u64| {
        json!({"time": time, "availableBytes": 40, "capacityBytes": 100, "usedBytes": used, "inodesFree": 3, "inodes": 10,
               "inodesUsed": inodes})
    };
    let (t8, t9) = ("2026-11-29T23:53:28Z", "2026-11-29T23:53:29Z");
    assert_eq!(found["node"]["fs"], shown(t9, 55, 7));
    assert_eq!(found["node"]["runtime"], json!({"imageFs": shown(t8, 30, 4), "containerFs": shown(t8, 30, 4)}));
    assert_eq!(found["node"]["rlimit"], json!({"time": "2026-11-29T23:53:31Z", "maxpid": 32768, "curproc": 12}));
    let pod = &found["pods"][0];
    assert_eq!(pod["containers"][0]["rootfs"], shown(t8, 20, 2));
    assert_eq!(pod["containers"][0]["logs"], shown(t9, 8, 1));
    assert_eq!(pod["containers"][0]["io"], json!({"time": "2026-11-29T23:53:30Z"}));
    let mut own = shown(t8, 1000, 100);
    own["name"] = json!("e");
    assert_eq!(pod["volume"][0], own);
    assert_eq!(pod["volume"][1]["pvcRef"], json!({"name": "mine", "namespace": "default"}));
    assert_eq!(pod["volume"][1]["volumeHealthStats"], json!({"abnormal": true}));
    // Layer, log, hosts file, and the volume that ends with the pod.
    assert_eq!(pod["ephemeral-storage"], shown(t9, 20 + 8 + 4 + 1000, 2 + 1 + 1 + 100));
    assert_eq!(pod["process_stats"], json!({"process_count": 2}));
    let interface = |name: &str| json!({"name": name, "rxBytes": 10, "rxErrors": 2, "txBytes": 20, "txErrors": 2});
    let mut network = interface("eth0");
    network["time"] = json!("2026-11-29T23:53:30Z");
    network["interfaces"] = json!([interface("tun0"), interface("eth0")]);
    assert_eq!(pod["network"], network);
}
