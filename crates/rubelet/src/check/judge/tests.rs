//! Judgements on facts that are made up, one table for each topic.

use std::collections::BTreeMap;
use std::time::Duration;

use ::host::fsx::FilesystemFigures;
use ::host::proc::MemoryInfo;
use config::{CgroupDriver, HostFiles, KubeletConfiguration, SwapBehavior};
use cri_api::v1;
use model::report::NodeReport;

use super::super::facts::{Answers, Cgroups, Clock, Cni, Listener, Place, PlaceState, Resolver, Role};
use super::*;

const GIB: u64 = 1 << 30;

/// A host on which nothing is wrong.
fn good_host() -> HostFacts {
    HostFacts {
        euid: 0,
        init: Ok("systemd".into()),
        node_name: Ok("node-a".into()),
        cgroups: Ok(Cgroups {
            v2: true,
            controllers: ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"].map(str::to_owned).to_vec(),
        }),
        memory: Ok(MemoryInfo { total: 8 * GIB, free: 4 * GIB, available: 6 * GIB, swap_total: 0, swap_free: 0 }),
        swap: Ok(Vec::new()),
        sysctls: BTreeMap::from(
            [
                ("vm.overcommit_memory", "1"),
                ("vm.panic_on_oom", "0"),
                ("kernel.panic", "10"),
                ("kernel.panic_on_oops", "1"),
                ("kernel.keys.root_maxkeys", "1000000"),
                ("kernel.keys.root_maxbytes", "25000000"),
                ("net.ipv4.ip_forward", "1"),
            ]
            .map(|(name, value)| (name, Some(value.to_owned()))),
        ),
        cpus: Ok(4),
        pids: Ok((32_768, 300)),
        listeners: Ok(Vec::new()),
        oom_score: Ok(()),
        resolver: Ok(Resolver { text: "nameserver 192.0.2.53\nsearch example.org\n".into(), behind_stub: false }),
        clock: Clock { now: moment(), hardware: Some(moment().as_second() + 2), keeper: Some("chronyd".into()) },
        places: vec![
            place(Role::Root, "/var/lib/kubelet"),
            place(Role::Logs, "/var/log/pods"),
            place(Role::Manifests, "/etc/kubernetes/manifests"),
            place(Role::Images, "/var/lib/containerd"),
        ],
        iptables: true,
        agent: Ok(None),
    }
}

fn moment() -> jiff::Timestamp {
    "2026-06-01T10:00:00Z".parse().unwrap()
}

fn place(role: Role, path: &str) -> Place {
    let figures = FilesystemFigures {
        capacity: 100 * GIB,
        available: 60 * GIB,
        used: 40 * GIB,
        inodes: 1_000_000,
        inodes_free: 900_000,
        inodes_used: 100_000,
    };
    let state = PlaceState { directory: Some(true), writable: Ok(()), filesystem: Ok(figures), device: Some(1) };
    Place { role, path: path.into(), state: Ok(state) }
}

fn good_runtime() -> RuntimeFacts {
    let condition = |name: &str| v1::RuntimeCondition { r#type: name.into(), status: true, ..Default::default() };
    RuntimeFacts {
        endpoint: "unix:///run/containerd/containerd.sock".into(),
        socket: Ok(()),
        answers: Some(Answers {
            version: Ok(v1::VersionResponse {
                version: "0.1.0".into(),
                runtime_name: "containerd".into(),
                runtime_version: "v2.2.0".into(),
                runtime_api_version: "v1".into(),
            }),
            status: Ok(v1::StatusResponse {
                status: Some(v1::RuntimeStatus {
                    conditions: vec![condition("RuntimeReady"), condition("NetworkReady")],
                }),
                ..Default::default()
            }),
            driver: Ok(Some(CgroupDriver::Systemd)),
            sandboxes: Ok((3, Duration::from_millis(2))),
            containers: Ok((7, Duration::from_millis(4))),
            image_place: Some("/var/lib/containerd".into()),
            cni: Cni { dir: "/etc/cni/net.d".into(), files: Ok(vec!["10-bridge.conflist".into()]) },
        }),
    }
}

fn good_config() -> KubeletConfiguration {
    KubeletConfiguration {
        cgroup_driver: CgroupDriver::Systemd,
        static_pod_path: "/etc/kubernetes/manifests".into(),
        eviction_hard: config::DEFAULT_EVICTION_HARD.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        ..Default::default()
    }
}

fn host_with(change: impl FnOnce(&mut HostFacts)) -> HostFacts {
    let mut facts = good_host();
    change(&mut facts);
    facts
}

fn config_with(change: impl FnOnce(&mut KubeletConfiguration)) -> KubeletConfiguration {
    let mut config = good_config();
    change(&mut config);
    config
}

/// Exactly these findings: severity, a part of the message, a part of the fix.
#[track_caller]
fn expect(found: &[Finding], wanted: &[(Severity, &str, &str)]) {
    assert_eq!(found.len(), wanted.len(), "{found:#?}");
    for (finding, (severity, message, fix)) in found.iter().zip(wanted) {
        assert_eq!(finding.severity, *severity, "{finding:#?}");
        assert!(finding.message.contains(message), "{message:?} in {finding:#?}");
        assert!(finding.fix.contains(fix), "{fix:?} in {finding:#?}");
        assert_eq!(finding.fix.is_empty(), finding.severity == Severity::Ok, "a fault has a fix: {finding:#?}");
    }
}

use Severity::{Error, Ok as Good, Warning};

#[test]
fn a_good_host_has_nothing_but_good_findings() {
    let flags = Flags::default();
    let host = config::Host { cgroup_v2: true, working_dir: "/".into() };
    let mut loaded = config::load(&flags, &HostFiles, &host);
    loaded.config = good_config();
    loaded.findings.clear();
    let found = all(&flags, &[], &loaded, &good_host(), &good_runtime(), None);
    let bad: Vec<_> = found.iter().filter(|f| f.severity != Good).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let topics: Vec<_> = found.iter().map(|f| f.topic.as_str()).collect();
    let mut once = topics.clone();
    once.dedup();
    assert_eq!(
        once,
        [
            "configuration",
            "rights",
            "node name",
            "runtime",
            "runtime status",
            "pod network",
            "runtime lists",
            "cgroup driver",
            "cgroups",
            "swap",
            "kernel settings",
            "network settings",
            "ports",
            "root directory",
            "pod logs",
            "static pods",
            "image store",
            "memory",
            "pods",
            "resolver",
            "clock",
        ]
    );
}

#[test]
fn configuration() {
    let finding = |severity, file: Option<&str>, path: &str, message: &str| config::ConfigFinding {
        severity,
        file: file.map(Into::into),
        path: path.into(),
        message: message.into(),
    };
    let host = config::Host { cgroup_v2: true, working_dir: "/".into() };
    let mut loaded = config::load(&Flags::default(), &HostFiles, &host);
    loaded.findings = vec![
        finding(Warning, Some("/etc/k.yaml"), "foo", "unknown field"),
        finding(Error, Some("/etc/k.yaml"), "", "failed to decode"),
        finding(Error, None, "failCgroupV1", "told with the cgroups"),
    ];
    let problems = [
        FlagProblem::Removed { name: "network-plugin", remedy: "configure CNI in the container runtime" },
        FlagProblem::Unknown("nope".into()),
    ];
    expect(
        &super::configuration::judge(&Flags::default(), &problems, &loaded),
        &[
            (Error, "--network-plugin no longer exists", "configure CNI"),
            (Error, "unknown flag: --nope", "command line"),
            (Warning, "foo: unknown field", "correct foo in /etc/k.yaml"),
            (Error, "failed to decode", "correct /etc/k.yaml"),
        ],
    );
    loaded.findings.clear();
    expect(&super::configuration::judge(&Flags::default(), &[], &loaded), &[(Good, "nothing wrong", "")]);
}

#[test]
fn agent_rights_and_name() {
    let node = |ready| NodeReport {
        name: "node-a".into(),
        ready,
        message: "PLEG is not healthy".into(),
        findings: Vec::new(),
        pods: 0,
        pods_running: 0,
    };
    for (agent, wanted) in [
        (Ok(Some(node(true))), (Good, "node-a, which is ready", "")),
        (Ok(Some(node(false))), (Warning, "not ready: PLEG is not healthy", "explain node")),
        (Err("did not answer".to_owned()), (Warning, "did not answer", "journalctl")),
    ] {
        expect(&host::judge_agent(&host_with(|f| f.agent = agent)), &[wanted]);
    }
    let config = good_config();
    expect(&host::judge_rights(&host_with(|f| f.euid = 1000), &config), &[(Error, "user 1000", "sudo")]);
    let refused = host_with(|f| f.oom_score = Err("write -999: refused".into()));
    expect(
        &host::judge_rights(&refused, &config),
        &[(Warning, "oom_score_adj -999 cannot be set: write -999", "CAP_SYS")],
    );
    for (name, severity) in [
        ("node-a", Good),
        ("a.b-c.example", Good),
        ("localhost", Warning),
        ("Node", Error),
        ("a_b", Error),
        ("-a", Error),
        ("a..b", Error),
        ("", Error),
    ] {
        let found = host::judge_name(&host_with(|f| f.node_name = Ok(name.into())));
        assert_eq!(found[0].severity, severity, "{name:?}");
    }
    let long = host_with(|f| f.node_name = Ok("a".repeat(254)));
    assert_eq!(host::judge_name(&long)[0].severity, Error);
}

fn runtime_with(change: impl FnOnce(&mut Answers)) -> RuntimeFacts {
    let mut facts = good_runtime();
    facts.answers.as_mut().map(change).unwrap();
    facts
}

fn of_version(name: &str, version: &str) -> RuntimeFacts {
    runtime_with(|a| {
        let answer = a.version.as_mut().unwrap();
        (answer.runtime_name, answer.runtime_version) = (name.into(), version.into());
    })
}

#[test]
fn a_runtime_that_does_not_answer() {
    let mut facts = good_runtime();
    facts.socket = Err("/run/x.sock does not exist".into());
    facts.answers = None;
    expect(&runtime::judge(&facts), &[(Error, "does not exist", "containerRuntimeEndpoint")]);
    assert!(runtime::judge_driver(&facts, &good_host(), &good_config()).is_empty());
    let hung = runtime_with(|a| a.version = Err("no answer within 5 s".into()));
    expect(&runtime::judge(&hung), &[(Error, "no answer within 5 s", "restart the runtime")]);
    assert!(runtime::judge_driver(&hung, &good_host(), &good_config()).is_empty());
    let half = runtime_with(|a| {
        a.status = Err("no answer within 5 s".into());
        a.containers = Err("no answer within 5 s".into());
    });
    expect(
        &runtime::judge(&half)[1..],
        &[(Error, "no answer within 5 s", "log"), (Error, "cannot be listed: no answer", "dead containers")],
    );
}

#[test]
fn runtime_versions() {
    for (name, version, severity) in [
        ("containerd", "v2.2.0", Good),
        ("containerd", "1.6.20~ds1", Good),
        ("containerd", "1.5.9", Error),
        ("containerd", "v1.7.0-rc.1", Good),
        ("cri-o", "1.36.0", Good),
        ("docker", "26.0.0", Warning),
    ] {
        let found = runtime::judge(&of_version(name, version));
        assert_eq!(found[0].severity, severity, "{name} {version}");
        assert!(found[0].message.contains(version));
    }
}

#[test]
fn runtime_conditions_and_lists() {
    let bad = |files: Result<Vec<String>, String>| {
        runtime_with(|a| {
            let status = a.status.as_mut().unwrap().status.as_mut().unwrap();
            status.conditions[1].status = false;
            status.conditions[1].reason = "NetworkPluginNotReady".into();
            status.conditions[1].message = "cni plugin not initialized".into();
            a.cni.files = files;
        })
    };
    let network = |facts: &RuntimeFacts| runtime::judge(facts)[2..3].to_vec();
    expect(
        &network(&bad(Ok(Vec::new()))),
        &[(
            Error,
            "NetworkPluginNotReady: cni plugin not initialized; /etc/cni/net.d has no network",
            "put a CNI configuration",
        )],
    );
    expect(&network(&bad(Ok(vec!["10-x.conf".into()]))), &[(Error, "has 10-x.conf", "first file")]);
    expect(&network(&bad(Err("list /etc/cni/net.d: no such file".into()))), &[(Error, "no such file", "put a CNI")]);
    let silent = runtime_with(|a| a.status.as_mut().unwrap().status = None);
    expect(&runtime::judge(&silent)[1..2], &[(Error, "does not say", "log")]);
    let slow = runtime_with(|a| a.containers = Ok((5000, Duration::from_millis(1500))));
    expect(&runtime::judge(&slow)[3..], &[(Warning, "5000 containers in 1500 ms", "crictl rm")]);
}

#[test]
fn cgroup_drivers() {
    use CgroupDriver::{Cgroupfs, Systemd};
    let (new, old) = (("containerd", "2.2.0"), ("containerd", "1.6.20"));
    for (runtime, told, configured, init, wanted) in [
        (new, Some(Systemd), Systemd, "systemd", (Good, "systemd, the runtime's too", "")),
        (new, Some(Cgroupfs), Cgroupfs, "init", (Good, "cgroupfs, the runtime's too", "")),
        (new, Some(Systemd), Cgroupfs, "systemd", (Good, "systemd, from the runtime", "")),
        (new, Some(Cgroupfs), Systemd, "systemd", (Warning, "is obeyed", "SystemdCgroup = true")),
        (new, Some(Systemd), Cgroupfs, "tini", (Error, "process 1 is tini", "cgroupfs")),
        (new, Some(Cgroupfs), Cgroupfs, "systemd", (Warning, "two writers", "cgroupDriver: systemd")),
        (
            old,
            Some(Systemd),
            Cgroupfs,
            "systemd",
            (Error, "the runtime uses systemd, the agent cgroupfs", "cgroupDriver: systemd"),
        ),
        (
            old,
            Some(Cgroupfs),
            Systemd,
            "systemd",
            (Error, "the runtime uses cgroupfs, the agent systemd", "SystemdCgroup = true"),
        ),
        (old, Some(Systemd), Systemd, "systemd", (Good, "systemd", "")),
        (old, None, Systemd, "systemd", (Good, "does not say", "")),
        (old, None, Systemd, "sh", (Error, "process 1 is sh", "boot with systemd")),
        (("cri-o", "1.36.0"), Some(Systemd), Cgroupfs, "systemd", (Good, "from the runtime", "")),
    ] {
        let mut facts = of_version(runtime.0, runtime.1);
        facts.answers.as_mut().unwrap().driver = Ok(told);
        let host = host_with(|f| f.init = Ok(init.into()));
        let config = config_with(|c| c.cgroup_driver = configured);
        expect(&runtime::judge_driver(&facts, &host, &config), &[wanted]);
    }
    let failed = runtime_with(|a| a.driver = Err("no answer within 5 s".into()));
    expect(&runtime::judge_driver(&failed, &good_host(), &good_config()), &[(Warning, "no answer", "root")]);
}

#[test]
fn cgroups() {
    let having = |v2, names: &[&str]| {
        let controllers = names.iter().map(|n| (*n).to_owned()).collect();
        host_with(|f| f.cgroups = Ok(Cgroups { v2, controllers }))
    };
    let every = ["cpu", "cpuset", "hugetlb", "memory", "pids"];
    let (fails, works) = (config_with(|c| c.fail_cgroup_v1 = true), config_with(|c| c.fail_cgroup_v1 = false));
    expect(&host::judge_cgroups(&having(false, &every), &fails), &[(Error, "cgroup v1", "failCgroupV1: false")]);
    expect(&host::judge_cgroups(&having(false, &every), &works), &[(Warning, "cgroup v1", "unified_cgroup_hierarchy")]);
    expect(
        &host::judge_cgroups(&having(true, &["cpu", "pids"]), &fails),
        &[
            (Error, "v2 without the controllers memory", "cgroup_enable"),
            (Warning, "controllers cpuset, hugetlb", "kernel"),
        ],
    );
    let none = host_with(|f| f.cgroups = Err("find cgroups".into()));
    expect(&host::judge_cgroups(&none, &fails), &[(Error, "find cgroups", "mount -t cgroup2")]);
}

#[test]
fn swap() {
    let on = || {
        host_with(|f| {
            f.swap = Ok(vec!["/dev/sda2".into()]);
            f.memory.as_mut().unwrap().swap_total = 2 * GIB;
        })
    };
    let config = |fail, behavior| {
        config_with(|c| {
            c.fail_swap_on = fail;
            c.memory_swap.swap_behavior = behavior;
        })
    };
    for (facts, config, wanted) in [
        (good_host(), config(true, None), (Good, "off", "")),
        (on(), config(true, None), (Error, "2.0 GiB on /dev/sda2, and failSwapOn is true", "swapoff -a")),
        (on(), config(false, None), (Good, "may not use it", "")),
        (on(), config(false, Some(SwapBehavior::LimitedSwap)), (Good, "LimitedSwap", "")),
        (good_host(), config(false, Some(SwapBehavior::LimitedSwap)), (Warning, "there is no swap", "mkswap")),
        (host_with(|f| f.swap = Err("read /proc/swaps".into())), config(true, None), (Warning, "/proc/swaps", "root")),
    ] {
        expect(&host::judge_swap(&facts, &config), &[wanted]);
    }
}

#[test]
fn kernel_settings() {
    let set = |name, value: Option<&str>| host_with(|f| drop(f.sysctls.insert(name, value.map(str::to_owned))));
    let config = good_config();
    let wrong = set("vm.overcommit_memory", Some("0"));
    let fix = "printf 'vm.overcommit_memory=1\\n' > /etc/sysctl.d/90-kubelet.conf";
    expect(&host::judge_kernel(&wrong, &config), &[(Warning, "vm.overcommit_memory is 0, expected 1", fix)]);
    let protect = config_with(|c| c.protect_kernel_defaults = true);
    expect(&host::judge_kernel(&wrong, &protect), &[(Error, "protectKernelDefaults", fix)]);
    for (name, value, severity) in [
        ("kernel.panic", Some("0"), Warning),
        ("kernel.panic", None, Good),
        ("kernel.keys.root_maxkeys", Some("2000000"), Good),
        ("kernel.keys.root_maxkeys", Some("200"), Warning),
        ("vm.overcommit_memory", Some("2"), Warning),
    ] {
        assert_eq!(host::judge_kernel(&set(name, value), &config)[0].severity, severity, "{name} {value:?}");
    }
    let closed = set("net.ipv4.ip_forward", Some("0"));
    expect(&host::judge_network_settings(&closed), &[(Warning, "ip_forward is 0", "ip_forward=1")]);
    let bridge = set("net.bridge.bridge-nf-call-iptables", Some("0"));
    expect(&host::judge_network_settings(&bridge), &[(Good, "is on", ""), (Warning, "bridge-nf", "bridge-nf")]);
}

#[test]
fn ports() {
    let node = NodeReport {
        name: "n".into(),
        ready: true,
        message: String::new(),
        findings: Vec::new(),
        pods: 0,
        pods_running: 0,
    };
    let taken = |address: &str, process: Option<&str>, agent: bool| {
        host_with(|f| {
            let process = process.map(|name| (42, name.to_owned()));
            f.listeners = Ok(vec![Listener { address: address.parse().unwrap(), process }]);
            f.agent = Ok(agent.then(|| node.clone()));
        })
    };
    let config = config_with(|c| c.read_only_port = 10255);
    for (facts, wanted) in [
        (
            taken("0.0.0.0:10250", Some("nginx"), false),
            (Error, "0.0.0.0:10250 (API) is taken by nginx (pid 42)", "set port"),
        ),
        (
            taken("[::]:10255", None, false),
            (Error, "0.0.0.0:10255 (read-only) is taken by an unknown", "set readOnlyPort"),
        ),
        (taken("127.0.0.1:10248", Some("kubelet"), false), (Warning, "running kubelet, kubelet (pid 42)", "systemctl")),
        (taken("127.0.0.1:10248", Some("rubelet"), false), (Warning, "another rubelet", "--root-dir")),
        (taken("127.0.0.1:10248", Some("rubelet"), true), (Good, "held by the running agent, rubelet (pid 42)", "")),
        (taken("127.0.0.1:10248", Some("kubelet"), true), (Good, "held by the running agent", "")),
    ] {
        expect(&ports::judge(&facts, &config)[1..], &[wanted]);
    }
    let all = "free: 127.0.0.1:10248 (healthz), 0.0.0.0:10255 (read-only), 0.0.0.0:10250 (API)";
    // Another address of the same port is no conflict; another port is none.
    for address in ["192.0.2.1:10248", "[::1]:10248", "127.0.0.1:9999"] {
        expect(&ports::judge(&taken(address, None, false), &config), &[(Good, all, "")]);
    }
    let none = config_with(|c| (c.enable_server, c.healthz_port) = (false, 0));
    assert!(ports::judge(&good_host(), &none).is_empty());
}

#[test]
fn places() {
    let change = |role: Role, f: &dyn Fn(&mut PlaceState)| {
        host_with(|facts| {
            facts.places.retain(|p| p.role == role);
            f(facts.places[0].state.as_mut().unwrap());
        })
    };
    let config = good_config();
    let first = |facts: &HostFacts| super::places::judge(facts, &config)[..1].to_vec();
    for (role, f, wanted) in [
        (Role::Root, (&|s: &mut PlaceState| s.directory = None) as &dyn Fn(&mut PlaceState), (Good, "can be made", "")),
        (Role::Root, &|s| s.directory = Some(false), (Error, "is not a directory", "remove /var/lib/kubelet")),
        (Role::Logs, &|s| s.writable = Err("make a file: read-only".into()), (Error, "read-only", "read-write")),
        (Role::Manifests, &|s| s.directory = None, (Warning, "does not exist", "mkdir -p /etc/kubernetes/manifests")),
        (Role::Manifests, &|s| s.directory = Some(false), (Good, "is a file", "")),
        (Role::Manifests, &|s| s.writable = Err("list: denied".into()), (Error, "denied", "readable")),
        (Role::Images, &|_| {}, (Good, "/var/lib/containerd is there", "")),
    ] {
        expect(&first(&change(role, f)), &[wanted]);
    }
    let hung = host_with(|f| f.places[0].state = Err("no answer within 3 s".into()));
    expect(&first(&hung), &[(Error, "no answer within 3 s", "filesystem")]);
    let nothing = host_with(|f| f.places.retain(|p| p.role == Role::Root));
    let found = super::places::judge(&nothing, &config);
    expect(&found[2..3], &[(Warning, "neither staticPodPath nor staticPodURL", "--pod-manifest-path")]);
    let url = config_with(|c| c.static_pod_url = "http://x/pods".into());
    expect(&super::places::judge(&nothing, &url)[2..3], &[(Good, "from http://x/pods", "")]);
}

#[test]
fn space() {
    let filled = |role: Role, free: u64, inodes_free: u64| {
        host_with(|facts| {
            facts.places.retain(|p| p.role == role);
            let state = facts.places[0].state.as_mut().unwrap();
            let figures = state.filesystem.as_mut().unwrap();
            (figures.available, figures.inodes_free) = (free, inodes_free);
        })
    };
    let space = |facts: &HostFacts, config: &KubeletConfiguration| {
        let mut found = super::places::judge(facts, config);
        found.retain(|f| f.message.starts_with("the filesystem of "));
        found
    };
    let config = good_config();
    expect(
        &space(&filled(Role::Root, 9 * GIB, 40_000), &config),
        &[
            (Warning, "9.0 GiB of 100 GiB free, below evictionHard nodefs.available<10%", "make room"),
            (Warning, "40000 of 1000000 inodes free, below evictionHard nodefs.inodesFree<5%", "make room"),
        ],
    );
    expect(
        &space(&filled(Role::Images, 14 * GIB, 900_000), &config),
        &[(Warning, "imagefs.available<15%", "crictl"), (Good, "900000 of 1000000 inodes", "")],
    );
    expect(
        &space(&filled(Role::Logs, 900 << 20, 9_000), &config),
        &[
            (Error, "900 MiB of 100 GiB free, as good as full", "make room"),
            (Error, "9000 of 1000000 inodes free, as good as full", "make room"),
        ],
    );
    let own = config_with(|c| c.eviction_hard = [("nodefs.available".to_owned(), "5Gi".to_owned())].into());
    assert_eq!(space(&filled(Role::Root, 6 * GIB, 900_000), &own)[0].severity, Good);
    let none = config_with(|c| c.eviction_hard.clear());
    expect(
        &space(&filled(Role::Root, 6 * GIB, 900_000), &none)[..1],
        &[(Warning, "below the usual threshold", "make room")],
    );
    let mut tight = good_host();
    tight.memory.as_mut().unwrap().available = 90 << 20;
    let found = super::places::judge(&tight, &config);
    expect(&found[found.len() - 1..], &[(Warning, "90 MiB of 8.0 GiB available", "more memory")]);
    // One line where nothing is wrong, and one filesystem only once; images have thresholds of their own.
    expect(
        &space(&good_host(), &config),
        &[
            (Good, "/var/lib/kubelet: 60 GiB of 100 GiB free, 900000 of 1000000 inodes free", ""),
            (Good, "/var/lib/containerd: 60 GiB", ""),
        ],
    );
    let two = host_with(|f| f.places[1].state.as_mut().unwrap().device = Some(2));
    assert_eq!(space(&two, &config).len(), 3);
    // Some filesystems count no inodes.
    let mut facts = filled(Role::Root, 60 * GIB, 0);
    facts.places[0].state.as_mut().unwrap().filesystem.as_mut().unwrap().inodes = 0;
    assert!(super::places::judge(&facts, &config).iter().all(|f| !f.message.contains("inodes")));
}

#[test]
fn thresholds() {
    for (text, of, least) in [
        ("10%", 1000, Some(100)),
        ("12.5%", 1000, Some(125)),
        ("100Mi", 0, Some(100 << 20)),
        ("1G", 0, Some(1_000_000_000)),
        ("x", 1000, None),
        ("-5%", 1000, None),
        ("101%", 1000, None),
    ] {
        assert_eq!(super::places::threshold(text, of), least, "{text}");
    }
}

#[test]
fn pods() {
    let config = |max_pods, per_core, cidr: &str| {
        config_with(|c| (c.max_pods, c.pods_per_core, c.pod_cidr) = (max_pods, per_core, cidr.into()))
    };
    let small = || host_with(|f| (f.cpus, f.memory.as_mut().unwrap().total) = (Ok(1), GIB));
    for (facts, config, wanted) in [
        (good_host(), config(110, 0, ""), vec![(Good, "110 allowed; 4 CPUs, 8.0 GiB of memory", "")]),
        (good_host(), config(110, 10, ""), vec![(Good, "40 allowed", "")]),
        (good_host(), config(110, 0, "10.1.0.0/24"), vec![(Good, "podCIDR 10.1.0.0/24", "")]),
        (
            good_host(),
            config(110, 0, "10.1.0.0/26,fd00::/64"),
            vec![(Warning, "podCIDR 10.1.0.0/26 is enough for about 61", "maxPods to 61")],
        ),
        (
            small(),
            config(110, 0, ""),
            vec![
                (Warning, "1 CPU is enough for about 64", "maxPods to 64"),
                (Warning, "1.0 GiB of memory is enough for about 64", "64"),
            ],
        ),
        (
            host_with(|f| f.pids = Ok((1000, 900))),
            config(110, 0, ""),
            vec![(Warning, "1000 processes (900 in use)", "maxPods to 6")],
        ),
        (host_with(|f| f.cpus = Err("read /sys".into())), config(110, 0, ""), vec![(Warning, "read /sys", "root")]),
    ] {
        expect(&super::pods::judge(&facts, &config), &wanted);
    }
}

#[test]
fn resolver() {
    let text = |text: &str, behind_stub| host_with(|f| f.resolver = Ok(Resolver { text: text.into(), behind_stub }));
    let config = good_config();
    let long: String = (0..33).map(|n| format!(" d{n}.example")).collect();
    for (facts, wanted) in [
        (good_host(), (Good, "/etc/resolv.conf: 192.0.2.53", "")),
        (text("# nothing\n", false), (Warning, "names no server", "add a nameserver")),
        (
            text("nameserver 127.0.0.53\n", true),
            (Warning, "names 127.0.0.53", "resolvConf: /run/systemd/resolve/resolv.conf"),
        ),
        (text("nameserver ::1\n", false), (Warning, "names ::1", "which pods can reach")),
        (text(&"nameserver 192.0.2.1\n".repeat(4), false), (Warning, "names 4 servers", "keep 3")),
        (text(&format!("nameserver 192.0.2.1\nsearch{long}\n"), false), (Warning, "33 search domains", "shorten")),
        (host_with(|f| f.resolver = Err("read /etc/resolv.conf: gone".into())), (Error, "gone", "resolvConf")),
    ] {
        expect(&host::judge_resolver(&facts, &config), &[wanted]);
    }
    let none = config_with(|c| c.resolv_conf.clear());
    expect(&host::judge_resolver(&good_host(), &none), &[(Good, "no DNS settings", "")]);
}

#[test]
fn clock() {
    let at = |now: &str, off: Option<i64>, keeper: Option<&str>| {
        host_with(|f| {
            let now: jiff::Timestamp = now.parse().unwrap();
            let hardware = off.map(|off| now.as_second() - off);
            f.clock = Clock { now, hardware, keeper: keeper.map(str::to_owned) };
        })
    };
    let good = "2026-06-01T10:00:00Z";
    for (facts, wanted) in [
        (at(good, Some(30), Some("chronyd")), (Good, "2026-06-01T10:00:00Z, kept by chronyd", "")),
        (at(good, None, Some("chronyd")), (Good, "kept by", "")),
        // In local time: two hours and a bit.
        (at(good, Some(-7_210), Some("chronyd")), (Good, "kept by", "")),
        (at(good, Some(400), Some("chronyd")), (Warning, "6m40s away from the hardware clock", "hwclock")),
        (at(good, Some(86_400 * 30), Some("chronyd")), (Warning, "30d away", "hwclock")),
        (at(good, Some(0), None), (Warning, "no program that keeps it right", "chrony")),
        (at("1970-01-02T00:00:00Z", None, None), (Error, "in the past", "chrony")),
    ] {
        expect(&host::judge_clock(&facts), &[wanted]);
    }
}

#[test]
fn programs() {
    let without = host_with(|f| f.iptables = false);
    expect(
        &host::judge_programs(&without, &good_config()),
        &[(Warning, "iptables is not installed", "makeIPTablesUtilChains")],
    );
    assert!(host::judge_programs(&without, &config_with(|c| c.make_iptables_util_chains = false)).is_empty());
}

#[test]
fn sizes() {
    for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (10 << 20, "10 MiB"), (3 << 40, "3.0 TiB")] {
        assert_eq!(size(bytes), text);
    }
}
