//! The pages over a fake runtime and a tree of fixtures that stands for the host.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cri::RuntimeMutator;
use cri_api::v1;
use fakes::FakeRuntime;
use host::cgroup::CgroupLayout;
use jiff::Timestamp;
use serde_json::Value;
use stats::{ClaimedVolume, Claims, DriverFigures, GroupSettings, Settings, Stats, StorageSettings};
use telemetry::metrics::Metrics;

struct NoClaims;

#[async_trait::async_trait]
impl Claims for NoClaims {
    async fn claims(&self, _: &str) -> Vec<ClaimedVolume> {
        Vec::new()
    }

    async fn drivers(&self) -> HashMap<String, Vec<DriverFigures>> {
        HashMap::new()
    }
}

fn put(root: &Path, path: &str, text: &str) {
    let file = root.join(path);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, text).unwrap();
}

/// Which kernel interface the fixtures are in.
#[derive(Clone, Copy, PartialEq)]
enum Kernel {
    V1,
    V2,
}

struct World {
    dir: tempfile::TempDir,
    kernel: Kernel,
    runtime: FakeRuntime,
    stats: Stats,
    sandbox: String,
    container: String,
}

const POD: &str = "/kubepods/burstable/poduid-a";

impl World {
    async fn new(kernel: Kernel) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let runtime = FakeRuntime::new(1);
        runtime.add_image("lab/busybox:1");
        let labels = |more: &[(&str, &str)]| {
            let all = [("pod.name", "a"), ("pod.namespace", "default"), ("pod.uid", "uid-a")];
            all.iter().chain(more).map(|(k, v)| (format!("io.kubernetes.{k}"), (*v).to_owned())).collect()
        };
        let config = v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: "a".into(),
                uid: "uid-a".into(),
                namespace: "default".into(),
                attempt: 0,
            }),
            labels: labels(&[]),
            log_directory: "/logs".into(),
            ..Default::default()
        };
        let sandbox = runtime.run_pod_sandbox(config.clone(), "").await.unwrap();
        let container = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "web".into(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: "lab/busybox:1".into(), ..Default::default() }),
            labels: labels(&[("container.name", "web")]),
            log_path: "web/0.log".into(),
            ..Default::default()
        };
        let container = runtime.create_container(&sandbox, container, config).await.unwrap();
        runtime.start_container(&container).await.unwrap();

        let mounts = match kernel {
            Kernel::V1 => ["cpu", "cpuacct", "memory", "pids"]
                .iter()
                .enumerate()
                .map(|(n, c)| format!("{} 1 0:{n} / {}/cg/{c} rw - cgroup cgroup rw,{c}\n", n + 5, d.display()))
                .collect(),
            Kernel::V2 => format!("5 1 0:5 / {}/cg rw - cgroup2 cgroup2 rw\n", d.display()),
        };
        put(d, "proc/self/mountinfo", &format!("1 0 254:0 / / rw - ext4 /dev/vda rw\n{mounts}"));
        put(d, "cg/cgroup.controllers", "cpu memory pids io\n");
        put(d, "proc/diskstats", "254 0 vda 1 2 3 4000 5 6 7 8000 0 10000 11000\n");
        put(d, "proc/uptime", "1000.0 1.0\n");
        put(d, "proc/loadavg", "0 0 0 1/77 5\n");
        put(d, "proc/sys/kernel/pid_max", "32768\n");
        put(d, "proc/sys/kernel/threads-max", "100000\n");
        put(d, "proc/1/net/dev", "eth0: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n");
        put(d, "proc/70/net/dev", "lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\neth0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n");
        let meminfo = [
            "MemTotal",
            "MemFree",
            "MemAvailable",
            "Buffers",
            "Cached",
            "SwapCached",
            "Active",
            "Inactive",
            "SwapTotal",
            "SwapFree",
            "Dirty",
            "Writeback",
            "Mapped",
            "Slab",
            "Committed_AS",
            "VmallocTotal",
            "VmallocUsed",
            "VmallocChunk",
        ];
        put(
            d,
            "proc/meminfo",
            &meminfo.map(|k| format!("{k}: {} kB\n", if k == "MemTotal" { 1000 } else { 0 })).concat(),
        );
        put(d, "proc/sys/kernel/random/boot_id", "boot\n");
        put(d, "sys/devices/system/cpu/online", "0-1\n");
        put(d, "etc/os-release", "PRETTY_NAME=\"Some Linux\"\n");
        put(d, "root/pods/uid-a/volumes/kubernetes.io~empty-dir/e/x", "12345");
        put(d, "root/pods/uid-a/etc-hosts", "x");
        put(d, "logs/default_a_uid-a/web/0.log", "hello\n");
        let layout = CgroupLayout::detect(&d.join("cg"), &d.join("proc")).unwrap();
        let settings = Settings {
            node_name: "node-a".into(),
            groups: GroupSettings {
                layout,
                kubepods: "/kubepods".into(),
                proc: d.join("proc"),
                sys: d.join("sys"),
                system: vec![("kubelet", "/system/kubelet".into())],
            },
            storage: StorageSettings { root: d.join("root"), pod_logs: d.join("logs") },
            volume_period: Some(Duration::from_secs(60)),
            node_root: d.to_owned(),
            started: Timestamp::now(),
        };
        let stats =
            Stats::new(settings, Arc::new(runtime.clone()), Arc::new(NoClaims), Arc::new(Metrics::new().unwrap()));
        let world = Self { dir, kernel, runtime, stats, sandbox, container };
        for path in ["/", "/kubepods", "/kubepods/burstable", "/system/kubelet"] {
            world.group(path, 1_000_000_000, "");
        }
        world.group(POD, 3_000_000_000, "");
        world.group(&format!("{POD}/{}", world.sandbox), 1_000_000_000, "70\n");
        world.group(&format!("{POD}/{}", world.container), 2_000_000_000, "71\n72\n");
        world.group(&format!("{POD}/{}/made-inside", world.container), 1_000_000, "");
        world
    }

    /// A group that has used so much CPU, with 1000 bytes of memory of which 400 are inactive files.
    fn group(&self, path: &str, cpu_ns: u64, processes: &str) {
        let d = self.dir.path();
        let file = |controller: &str, name: &str, text: &str| {
            let dir = if self.kernel == Kernel::V1 { format!("{controller}/") } else { String::new() };
            put(d, &format!("cg/{dir}{}/{name}", path.trim_matches('/')), text);
        };
        match self.kernel {
            Kernel::V1 => {
                file("cpuacct", "cpuacct.usage", &cpu_ns.to_string());
                file("cpu", "cgroup.procs", processes);
                file("cpu", "cpu.shares", "1024\n");
                file("memory", "memory.usage_in_bytes", "1000\n");
                file("memory", "memory.stat", "total_rss 300\ntotal_inactive_file 400\ntotal_swap 0\npgfault 5\n");
                file("pids", "pids.current", "2\n");
            }
            Kernel::V2 => {
                file("", "cpu.stat", &format!("usage_usec {}\n", cpu_ns / 1000));
                file("", "cgroup.procs", processes);
                file("", "cpu.weight", "100\n");
                file("", "memory.current", "1000\n");
                file("", "memory.swap.current", "0\n");
                file("", "memory.stat", "anon 300\ninactive_file 400\npgfault 5\n");
                file(
                    "",
                    "memory.pressure",
                    "some avg10=1.00 avg60=0.00 avg300=0.00 total=5000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n",
                );
                file("", "pids.current", "2\n");
            }
        }
    }

    async fn summary(&self, only_cpu_and_memory: bool) -> Value {
        serde_json::from_slice(&self.stats.summary(only_cpu_and_memory).await.unwrap()).unwrap()
    }
}

async fn summary_of(kernel: Kernel) {
    let world = World::new(kernel).await;
    let summary = world.summary(false).await;
    assert_eq!(summary["node"]["nodeName"], "node-a");
    assert_eq!(summary["node"]["memory"]["availableBytes"], 1_024_000 - 600);
    assert_eq!(summary["node"]["network"]["rxBytes"], 100);
    assert_eq!(summary["node"]["rlimit"]["curproc"], 77);
    let system: Vec<_> = summary["node"]["systemContainers"].as_array().unwrap().iter().map(|c| &c["name"]).collect();
    assert_eq!(system, ["kubelet", "pods"]);
    assert!(summary["node"]["runtime"]["imageFs"]["usedBytes"].is_u64(), "{summary:#}");
    let pods = summary["pods"].as_array().unwrap();
    assert_eq!(pods.len(), 1);
    let pod = &pods[0];
    assert_eq!(pod["podRef"]["uid"], "uid-a");
    assert_eq!(pod["cpu"]["usageCoreNanoSeconds"], 3_000_000_000_u64);
    assert_eq!(pod["cpu"]["usageNanoCores"], 0, "the first answer has a rate too");
    assert_eq!(pod["network"]["name"], "eth0");
    assert_eq!(pod["network"]["txBytes"], 20);
    assert_eq!(pod["network"]["interfaces"].as_array().unwrap().len(), 1);
    assert_eq!(pod["process_stats"]["process_count"], 2);
    assert_eq!(pod["volume"][0]["name"], "e");
    assert_eq!(pod["volume"][0]["inodesUsed"], 2);
    let container = &pod["containers"][0];
    assert_eq!(container["name"], "web");
    assert_eq!(container["cpu"]["usageCoreNanoSeconds"], 2_000_000_000_u64);
    assert_eq!(container["memory"]["workingSetBytes"], 600);
    assert!(container["rootfs"]["usedBytes"].is_u64() && container["logs"]["inodesUsed"] == 1, "{container:#}");
    assert_eq!(container["memory"]["psi"]["some"]["total"] == 5_000_000, kernel == Kernel::V2);
    assert_eq!(container["memory"]["psi"].is_null(), kernel == Kernel::V1);
}

#[tokio::test]
async fn a_summary_on_v1() {
    summary_of(Kernel::V1).await;
}

#[tokio::test]
async fn a_summary_on_v2() {
    summary_of(Kernel::V2).await;
}

async fn cadvisor_of(kernel: Kernel) {
    let world = World::new(kernel).await;
    let page = String::from_utf8(world.stats.cadvisor().await.unwrap().to_vec()).unwrap();
    let of = |container: &str, id: &str, image: &str| {
        let name = id.rsplit('/').next().unwrap();
        format!(
            "{{container=\"{container}\",id=\"{id}\",image=\"{image}\",name=\"{name}\",namespace=\"default\",pod=\"a\""
        )
    };
    let container = of("web", &format!("{POD}/{}", world.container), "docker.io/lab/busybox:1");
    let sandbox = format!("{{container=\"\",id=\"{POD}/{}\"", world.sandbox);
    let pod = format!("{{container=\"\",id=\"{POD}\",image=\"\",name=\"\",namespace=\"default\",pod=\"a\"");
    let nested = format!(
        "{{container=\"\",id=\"{POD}/{}/made-inside\",image=\"\",name=\"\",namespace=\"\",pod=\"\"",
        world.container
    );
    let root = "{container=\"\",id=\"/\",image=\"\",name=\"\",namespace=\"\",pod=\"\"";
    for (start, value) in [
        (format!("container_cpu_usage_seconds_total{container},cpu=\"total\"}}"), "2"),
        (format!("container_cpu_usage_seconds_total{pod},cpu=\"total\"}}"), "3"),
        (format!("container_cpu_usage_seconds_total{nested},cpu=\"total\"}}"), "0.001"),
        (format!("container_memory_working_set_bytes{container}}}"), "600"),
        (format!("container_memory_failures_total{container},failure_type=\"pgfault\",scope=\"hierarchy\"}}"), "5"),
        (format!("container_processes{container}}}"), "2"),
        (format!("container_threads{container}}}"), "2"),
        (format!("container_tasks_state{container},state=\"running\"}}"), "0"),
        (format!("container_network_receive_bytes_total{root},interface=\"eth0\"}}"), "100"),
        (format!("container_fs_reads_total{root},device=\"/dev/vda\"}}"), "1"),
        (format!("container_fs_read_seconds_total{root},device=\"/dev/vda\"}}"), "4"),
        (format!("container_spec_memory_limit_bytes{root}}}"), "1024000"),
        ("machine_cpu_cores{boot_id=\"boot\",machine_id=\"\",system_uuid=\"\"}".to_owned(), "2"),
        ("container_scrape_error".to_owned(), "0"),
    ] {
        let line = page.lines().find(|l| l.starts_with(&start)).unwrap_or_else(|| panic!("{start} is not in\n{page}"));
        let found = line[start.len()..].trim().split(' ').next().unwrap();
        assert_eq!(found, value, "{line}");
    }
    let network: Vec<_> = page.lines().filter(|l| l.starts_with("container_network_receive_bytes_total{")).collect();
    assert_eq!(network.len(), 2, "the node and the sandbox alone: {network:#?}");
    assert!(network.iter().any(|l| l.starts_with(&format!("container_network_receive_bytes_total{sandbox}"))));
    let pressure = format!("container_pressure_memory_waiting_seconds_total{container}}} 5 ");
    assert_eq!(page.contains(&pressure), kernel == Kernel::V2);
    assert!(!page.contains("container_cpu_cfs_periods_total"), "no group has a quota");
}

#[tokio::test]
async fn cadvisors_page_on_v1() {
    cadvisor_of(Kernel::V1).await;
}

#[tokio::test]
async fn cadvisors_page_on_v2() {
    cadvisor_of(Kernel::V2).await;
}

#[tokio::test]
async fn the_resource_page() {
    let world = World::new(Kernel::V1).await;
    let page = world.stats.resource().await;
    for start in [
        "container_cpu_usage_seconds_total{container=\"web\",namespace=\"default\",pod=\"a\"} 2 ",
        "container_memory_working_set_bytes{container=\"web\",namespace=\"default\",pod=\"a\"} 600 ",
        "container_swap_limit_bytes{container=\"web\",namespace=\"default\",pod=\"a\"} 0 ",
        "node_cpu_usage_seconds_total 1 ",
        "node_memory_working_set_bytes 600 ",
        "pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"a\"} 3 ",
        "resource_scrape_error 0",
    ] {
        assert!(page.lines().any(|l| l.starts_with(start)), "{start} is not in\n{page}");
    }
    let asked: Vec<_> = world.runtime.calls().iter().map(|c| c.call).filter(|c| c.contains("Stats")).collect();
    assert!(asked.is_empty(), "the groups tell it: {asked:?}");
    world.runtime.go_down();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(120)).await;
    tokio::time::resume();
    assert!(world.stats.resource().await.ends_with("resource_scrape_error 1\n"));
}

#[tokio::test]
async fn rates_are_made_of_the_looks_of_those_who_ask() {
    let world = World::new(Kernel::V2).await;
    world.summary(true).await;
    // A container's group that is not here (a virtual machine's) is told by the runtime.
    std::fs::remove_dir_all(world.dir.path().join(format!("cg{POD}/{}", world.container))).unwrap();
    tokio::time::sleep(stats::SHARED + Duration::from_millis(50)).await;
    world.group(POD, 4_000_000_000, "");
    let summary = world.summary(true).await;
    let pod = &summary["pods"][0];
    let rate = pod["cpu"]["usageNanoCores"].as_u64().unwrap();
    assert!((300_000_000..500_000_000).contains(&rate), "a second of CPU in a little more than two: {rate}");
    assert!(pod["containers"][0]["cpu"]["usageCoreNanoSeconds"].is_u64(), "{pod:#}");
    assert_eq!(world.runtime.calls_of("ListContainerStats").len(), 1);
}

#[tokio::test]
async fn many_who_ask_at_once_share() {
    let world = World::new(Kernel::V2).await;
    let all = futures::future::join_all((0..30).map(|_| world.summary(false))).await;
    assert!(all.iter().all(|s| s["pods"][0]["podRef"]["name"] == "a"));
    for call in ["ListContainerStats", "ImageFsInfo", "ListContainers", "ListPodSandbox"] {
        assert!(world.runtime.calls_of(call).len() <= 2, "{call}");
    }
    world.runtime.forget_calls();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(world.runtime.calls().is_empty(), "nothing is asked while nobody asks");
}

#[tokio::test]
async fn one_look_serves_all_pages() {
    let world = World::new(Kernel::V1).await;
    world.summary(true).await;
    tokio::time::sleep(stats::SHARED + Duration::from_millis(50)).await;
    world.stats.cadvisor().await.unwrap();
    // What has changed since is seen by the next look only.
    world.group(POD, 9_000_000_000, "");
    let summary = world.summary(false).await;
    let pod = &summary["pods"][0];
    assert_eq!(pod["cpu"]["usageCoreNanoSeconds"], 3_000_000_000_u64);
    assert_eq!(pod["containers"].as_array().unwrap().len(), 1, "groups made inside are nobody's");
    assert!(world.stats.resource().await.contains("pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"a\"} 3 "));
    tokio::time::sleep(stats::SHARED + Duration::from_millis(50)).await;
    // A look at CPU and memory alone does not do for cAdvisor's page.
    assert_eq!(world.summary(true).await["pods"][0]["cpu"]["usageCoreNanoSeconds"], 9_000_000_000_u64);
    world.group(POD, 10_000_000_000, "");
    let page = String::from_utf8(world.stats.cadvisor().await.unwrap().to_vec()).unwrap();
    let line = page
        .lines()
        .find(|l| {
            l.starts_with("container_cpu_usage_seconds_total")
                && l.contains("image=\"\",name=\"\",namespace=\"default\"")
        })
        .unwrap();
    assert!(line.contains("} 10 "), "{line}");
}
