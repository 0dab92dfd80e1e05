//! Thresholds, pressures, the pod that goes, and its words: tables and properties.
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use model::pod::{DesiredPod, PodUid};
use model::quantity::Quantity;
use proptest::prelude::*;

use super::*;
use crate::testing::{pod, pod_with, static_pod};

const MIB: u64 = 1 << 20;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Thresholds of `SIGNAL=VALUE` (hard), `SIGNAL~SECONDS=VALUE` (soft) and `SIGNAL+=VALUE` (minimum to win back).
fn read(words: &str, disks: Disks, allocatable_enforced: bool) -> Result<Vec<Threshold>, ThresholdError> {
    let (mut hard, mut soft, mut soft_grace, mut minimum) =
        (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for word in words.split_whitespace() {
        let (left, value) = word.split_once('=').expect("word");
        if let Some(signal) = left.strip_suffix('+') {
            minimum.insert(signal.to_owned(), value.to_owned());
        } else if let Some((signal, grace)) = left.split_once('~') {
            soft.insert(signal.to_owned(), value.to_owned());
            if let Ok(grace) = grace.parse() {
                soft_grace.insert(signal.to_owned(), secs(grace));
            }
        } else {
            hard.insert(left.to_owned(), value.to_owned());
        }
    }
    let settings =
        Settings { hard: &hard, soft: &soft, soft_grace: &soft_grace, minimum_reclaim: &minimum, allocatable_enforced };
    thresholds(&settings, disks)
}

fn simple(words: &str) -> Vec<Threshold> {
    let mut all = read(words, Disks::default(), false).expect("thresholds");
    all.retain(|t| !t.signal.as_str().starts_with("containerfs"));
    all
}

fn shown(thresholds: &[Threshold]) -> String {
    let one = |t: &Threshold| {
        let value = |v: &Value| match v {
            Value::Quantity(q) => q.to_string(),
            Value::Share(s) => format!("{s}"),
        };
        let grace = if t.is_hard() { String::new() } else { format!("~{}", t.grace.as_secs()) };
        let minimum = t.min_reclaim.as_ref().map(|v| format!("+{}", value(v))).unwrap_or_default();
        format!("{}{grace}<{}{minimum}", t.signal.as_str(), value(&t.value))
    };
    thresholds.iter().map(one).collect::<Vec<_>>().join(" ")
}

const ONE_DISK: Disks = Disks { dedicated_images: false, split_layers: false };
const IMAGE_DISK: Disks = Disks { dedicated_images: true, split_layers: false };
const SPLIT_DISK: Disks = Disks { dedicated_images: true, split_layers: true };

#[test]
fn thresholds_as_configured() {
    for (words, disks, enforced, expected) in [
        ("", ONE_DISK, true, ""),
        (
            "nodefs.available=10% memory.available=100Mi",
            ONE_DISK,
            true,
            "memory.available<100Mi allocatableMemory.available<100Mi nodefs.available<0.1 containerfs.available<0.1",
        ),
        // Hard before soft; memory before all; the soft one is not the pods' group's.
        (
            "pid.available=5% memory.available~90=1Gi memory.available=100Mi memory.available+=10Mi",
            ONE_DISK,
            true,
            "memory.available<100Mi+10Mi allocatableMemory.available<100Mi+10Mi memory.available~90<1Gi+10Mi pid.available<0.05",
        ),
        // The writable layers' own do not count: they have those of the disk that they are on.
        (
            "imagefs.available=15% imagefs.inodesFree~30=5% containerfs.available=99% nodefs.inodesFree=1k",
            IMAGE_DISK,
            false,
            "nodefs.inodesFree<1k imagefs.available<0.15 containerfs.available<0.15 imagefs.inodesFree~30<0.05 \
             containerfs.inodesFree~30<0.05",
        ),
        (
            "imagefs.available=15% nodefs.available=7Gi nodefs.available+=1Gi",
            SPLIT_DISK,
            false,
            "nodefs.available<7Gi+1Gi imagefs.available<0.15 containerfs.available<7Gi+1Gi",
        ),
        ("memory.available=0% nodefs.available=100%", ONE_DISK, true, ""),
    ] {
        assert_eq!(shown(&read(words, disks, enforced).unwrap()), expected, "{words}");
    }
}

#[test]
fn thresholds_that_cannot_be() {
    for (words, expected) in [
        ("swap.available=1Gi", "unsupported eviction signal swap.available"),
        ("memory.available~=1Gi", "grace period must be specified for the soft eviction threshold memory.available"),
        ("memory.available=0", "eviction threshold memory.available must be positive: 0"),
        ("memory.available=-1Gi", "eviction threshold memory.available must be positive: -1Gi"),
        ("pid.available=101%", "eviction percentage threshold pid.available must be between 0% and 100%: 101%"),
        ("pid.available=x%", "eviction percentage threshold pid.available must be between 0% and 100%: x%"),
        (
            "pid.available=1 pid.available+=0%",
            "eviction percentage threshold pid.available must be between 0% and 100%: 0%",
        ),
        (
            "memory.available=lots",
            "eviction threshold memory.available: quantities must match the regular expression \
             '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
    ] {
        assert_eq!(read(words, ONE_DISK, false).unwrap_err().to_string(), expected, "{words}");
    }
}

#[test]
fn a_share_is_of_the_capacity() {
    // As Go's float32 has it: 10% is a little more than a tenth.
    assert_eq!(Value::Share(0.1).of(1000).to_string(), "100");
    assert_eq!(Value::Share(10.0 / 100.0).of(64 << 30).to_string(), "6871947776");
    assert_eq!(Value::Quantity(Quantity::parse("1.5Gi").unwrap()).of(7).to_string(), "1536Mi");
}

fn seen(pairs: &[(Signal, i64, i64)]) -> Observations {
    pairs.iter().map(|&(s, available, capacity)| (s, Observation { available, capacity })).collect()
}

fn memory(available: i64) -> Observations {
    seen(&[(Signal::MemoryAvailable, available, 1000)])
}

/// `M D P` of the pressures, and the signal that is dealt with.
fn looked(look: &Look) -> String {
    let p = look.pressures;
    let letters = [("M", p.memory), ("D", p.disk), ("P", p.pid)].into_iter().filter(|(_, on)| *on).map(|(l, _)| l);
    let what = look.shortage.as_ref().map_or("-", |s| s.threshold.signal.as_str());
    format!("{} {what}", letters.collect::<String>())
}

/// Looks, one a line: second, memory left of 1000, what follows.
fn play(words: &str, transition: u64, lines: &[(u64, i64, &str)]) {
    let thresholds = simple(words);
    let mut state = State::default();
    for &(at, left, expected) in lines {
        let look = state.look(&thresholds, &memory(left), secs(transition), secs(at));
        assert_eq!(looked(&look), expected, "{words}: at {at}");
    }
}

#[test]
fn hard_thresholds_act_at_once_and_the_pressure_stays_a_while() {
    play(
        "memory.available=100",
        30,
        &[
            (0, 101, " -"),
            (10, 100, " -"),
            (20, 99, "M memory.available"),
            (30, 100, "M -"),
            (49, 500, "M -"),
            (50, 500, " -"),
        ],
    );
    // Without a period it is shown for as long as it is seen.
    play("memory.available=100", 0, &[(0, 99, "M memory.available"), (10, 99, "M memory.available"), (20, 100, " -")]);
}

#[test]
fn soft_thresholds_wait_for_their_time_without_a_break() {
    play(
        "memory.available~60=100",
        0,
        &[
            (0, 50, "M -"),
            (59, 50, "M -"),
            (60, 50, "M memory.available"),
            (70, 100, " -"),
            (80, 50, "M -"),
            (139, 50, "M -"),
            (140, 50, "M memory.available"),
        ],
    );
}

#[test]
fn the_minimum_is_won_back_once_the_threshold_was_met() {
    play(
        "memory.available=100 memory.available+=50",
        0,
        &[
            (0, 120, " -"),
            (10, 99, "M memory.available"),
            (20, 120, "M memory.available"),
            (30, 149, "M memory.available"),
            (40, 150, " -"),
            (50, 120, " -"),
        ],
    );
    // A soft one whose time is not over is not held.
    play(
        "memory.available~60=100 memory.available+=50",
        0,
        &[
            (0, 99, "M -"),
            (10, 120, " -"),
            (20, 99, "M -"),
            (80, 99, "M memory.available"),
            (90, 149, "M memory.available"),
        ],
    );
}

#[test]
fn what_is_dealt_with_first() {
    let thresholds =
        simple("pid.available=10 nodefs.available=10 memory.available~0=10 nodefs.inodesFree=10 memory.available=5");
    let all = [Signal::PidAvailable, Signal::NodeFsAvailable, Signal::NodeFsInodesFree, Signal::MemoryAvailable];
    let mut state = State::default();
    let mut now = 0;
    let mut at = |short: &[Signal]| {
        now += 10;
        let observations: Vec<_> = all.iter().map(|s| (*s, if short.contains(s) { 1 } else { 900 }, 1000)).collect();
        looked(&state.look(&thresholds, &seen(&observations), secs(0), secs(now)))
    };
    assert_eq!(at(&all), "MDP memory.available");
    assert_eq!(at(&all[..3]), "DP nodefs.available");
    assert_eq!(at(&[Signal::PidAvailable, Signal::NodeFsInodesFree]), "DP nodefs.inodesFree");
    assert_eq!(at(&all[..1]), "P pid.available");
    // What could not be measured is not short.
    assert_eq!(looked(&state.look(&thresholds, &Observations::new(), secs(0), secs(99))), " -");
}

#[test]
fn relief_means_the_minimum_too() {
    let thresholds = simple("memory.available=100 memory.available+=50 nodefs.available=10%");
    let disk = |left| (Signal::NodeFsAvailable, left, 1000);
    for (left, disk_left, expected) in [(149, 500, false), (150, 500, true), (150, 99, false), (150, 101, true)] {
        let observations = seen(&[(Signal::MemoryAvailable, left, 1000), disk(disk_left)]);
        assert_eq!(relieved(&thresholds, &observations), expected, "{left} {disk_left}");
    }
}

#[test]
fn disks_and_what_is_on_them() {
    let reclaim = |disks: Disks, signal: Signal| {
        let r = disks.reclaim(signal);
        format!("{}{}", if r.containers { "c" } else { "" }, if r.images { "i" } else { "" })
    };
    for (signal, one, dedicated, split) in [
        (Signal::NodeFsAvailable, "ci", "", "c"),
        (Signal::NodeFsInodesFree, "ci", "", "c"),
        (Signal::ImageFsAvailable, "ci", "ci", "i"),
        (Signal::ImageFsInodesFree, "ci", "ci", "i"),
        (Signal::ContainerFsAvailable, "ci", "ci", "c"),
        (Signal::ContainerFsInodesFree, "ci", "ci", "c"),
        (Signal::MemoryAvailable, "", "", ""),
        (Signal::PidAvailable, "", "", ""),
    ] {
        let found = [ONE_DISK, IMAGE_DISK, SPLIT_DISK].map(|d| reclaim(d, signal));
        assert_eq!(found, [one, dedicated, split], "{signal:?}");
    }
}

fn named(name: &str, spec: &str) -> DesiredPod {
    pod_with(&format!(r#"{{"name": "{name}", "uid": "{name}"}}"#), spec)
}

fn mib(n: u64) -> Usage {
    Usage { bytes: n * MIB, inodes: n }
}

/// The order in which pods go.
fn order(pods: &[DesiredPod], usage: &[(&str, PodUsage)], signal: Signal, disks: Disks) -> Vec<String> {
    let usage: HashMap<PodUid, PodUsage> = usage.iter().map(|(uid, u)| (PodUid::new(*uid), u.clone())).collect();
    rank(pods, &usage, signal, disks, true).iter().map(|r| r.pod.name().to_owned()).collect()
}

#[test]
fn memory_by_request_priority_and_use() {
    let asks = |name: &str, memory: &str, priority: i32| {
        let resources = if memory.is_empty() {
            String::new()
        } else {
            format!(r#", "resources": {{"requests": {{"memory": "{memory}"}}}}"#)
        };
        named(name, &format!(r#"{{"priority": {priority}, "containers": [{{"name": "c"{resources}}}]}}"#))
    };
    let uses = |n: u64| PodUsage { memory: Some(n * MIB), ..PodUsage::default() };
    let pods = [
        asks("within-low", "500Mi", -5),
        asks("over-high", "100Mi", 10),
        asks("over-low-little", "100Mi", 0),
        asks("over-low-much", "1Gi", 0),
        asks("besteffort", "", 0),
        asks("exact", "64Mi", 0),
        asks("idle", "", 0),
        asks("critical", "", 2_000_000_000),
        static_pod(r#"{"containers": [{"name": "c"}]}"#),
    ];
    let usage = [
        ("within-low", uses(499)),
        ("over-high", uses(4000)),
        ("over-low-little", uses(150)),
        ("over-low-much", uses(1224)),
        ("besteffort", uses(60)),
        ("exact", uses(64)),
        ("critical", uses(9000)),
        ("uid-1", uses(9000)),
    ];
    // 200, 60, 50 over; then the one of higher priority; then those within. One of which nothing runs is not over anything.
    assert_eq!(
        order(&pods, &usage, Signal::MemoryAvailable, ONE_DISK),
        ["over-low-much", "besteffort", "over-low-little", "over-high", "within-low", "exact", "idle"]
    );
    assert_eq!(
        order(&pods, &usage, Signal::AllocatableMemoryAvailable, ONE_DISK),
        order(&pods, &usage, Signal::MemoryAvailable, ONE_DISK)
    );
}

#[test]
fn what_the_pod_as_a_whole_asks_for_counts() {
    let spec = |resources: &str| {
        format!(
            r#"{{"overhead": {{"memory": "30Mi"}}, {resources}
        "containers": [{{"name": "c", "resources": {{"requests": {{"memory": "100Mi"}}}}}}]}}"#
        )
    };
    let pods = [
        named("container", &spec("")),
        named("whole", &spec(r#""resources": {"requests": {"memory": "200Mi"}},"#)),
        named("cpu-only", &spec(r#""resources": {"requests": {"cpu": "1"}},"#)),
    ];
    let uses = PodUsage { memory: Some(240 * MIB), ..PodUsage::default() };
    let usage = ["container", "whole", "cpu-only"].map(|name| (name, uses.clone()));
    // Over by 240 (nothing asked for, so no overhead either), 110 and 10.
    assert_eq!(order(&pods, &usage, Signal::MemoryAvailable, ONE_DISK), ["cpu-only", "container", "whole"]);
}

#[test]
fn disks_by_what_is_on_them() {
    let with = |name: &str, volumes: &str| {
        named(name, &format!(r#"{{"containers": [{{"name": "c"}}], "volumes": [{volumes}]}}"#))
    };
    let pods = [
        with("layer", ""),
        with("logs", ""),
        with("dir", r#"{"name": "v", "emptyDir": {}}"#),
        with("memory", r#"{"name": "v", "emptyDir": {"medium": "Memory"}}"#),
        with("claim", r#"{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}"#),
        with("host", r#"{"name": "v", "hostPath": {"path": "/x"}}"#),
    ];
    let of = |layer: u64, logs: u64, volume: u64| PodUsage {
        containers: vec![ContainerUsage {
            name: "c".into(),
            memory: None,
            layer: Some(mib(layer)),
            logs: Some(mib(logs)),
        }],
        volumes: vec![("v".into(), mib(volume))],
        ..PodUsage::default()
    };
    let usage = [
        ("layer", of(90, 1, 0)),
        ("logs", of(1, 80, 0)),
        ("dir", of(1, 1, 70)),
        ("memory", of(1, 1, 900)),
        ("claim", of(2, 1, 900)),
        ("host", of(1, 1, 60)),
    ];
    let all = ["layer", "logs", "dir", "host", "claim", "memory"];
    for signal in
        [Signal::NodeFsAvailable, Signal::ImageFsAvailable, Signal::ContainerFsAvailable, Signal::NodeFsInodesFree]
    {
        assert_eq!(order(&pods, &usage, signal, ONE_DISK), all, "{signal:?}");
    }
    assert_eq!(
        order(&pods, &usage, Signal::NodeFsAvailable, IMAGE_DISK),
        ["logs", "dir", "host", "claim", "layer", "memory"]
    );
    assert_eq!(order(&pods, &usage, Signal::ImageFsInodesFree, IMAGE_DISK)[..2], ["layer", "claim"]);
    assert_eq!(order(&pods, &usage, Signal::ContainerFsAvailable, IMAGE_DISK)[..2], ["layer", "claim"]);
    assert_eq!(order(&pods, &usage, Signal::NodeFsAvailable, SPLIT_DISK), all);
    assert_eq!(order(&pods, &usage, Signal::ContainerFsInodesFree, SPLIT_DISK), all);
}

#[test]
fn inodes_and_processes_by_priority_and_number() {
    let of = |name: &str, priority: i32| {
        named(
            name,
            &format!(
                r#"{{"priority": {priority}, "containers": [{{"name": "c",
            "resources": {{"requests": {{"ephemeral-storage": "1Gi"}}}}}}]}}"#
            ),
        )
    };
    let pods = [of("high-many", 5), of("low-few", 1), of("low-many", 1), of("low-none", 1)];
    let n = |n: u64| PodUsage {
        processes: n,
        containers: vec![ContainerUsage { layer: Some(Usage { bytes: 0, inodes: n }), ..ContainerUsage::default() }],
        ..PodUsage::default()
    };
    let usage = [("high-many", n(5000)), ("low-few", n(5)), ("low-many", n(50))];
    for signal in [Signal::PidAvailable, Signal::NodeFsInodesFree] {
        assert_eq!(order(&pods, &usage, signal, ONE_DISK), ["low-many", "low-few", "low-none", "high-many"]);
    }
}

#[test]
fn graces() {
    let threshold = |words: &str| simple(words).remove(0);
    let (hard, soft) = (threshold("memory.available=1"), threshold("memory.available~5=1"));
    let patient = pod(r#"{"terminationGracePeriodSeconds": 600, "containers": []}"#);
    let quick = pod(r#"{"terminationGracePeriodSeconds": 3, "containers": []}"#);
    for (threshold, pod, max, expected) in [
        (&hard, &patient, 90, 1),
        (&soft, &patient, 90, 90),
        (&soft, &quick, 90, 3),
        (&soft, &quick, 0, 0),
        (&soft, &patient, -1, 600),
    ] {
        assert_eq!(grace(threshold, pod, max), expected, "{max}");
    }
}

fn shortage(words: &str, signal: Signal) -> Shortage {
    let met = simple(words);
    let threshold = met.iter().find(|t| t.signal == signal).expect("threshold").clone();
    Shortage { threshold, met }
}

#[test]
fn messages_and_annotations() {
    let spec = r#"{"containers": [
        {"name": "a", "resources": {"requests": {"memory": "100Mi", "ephemeral-storage": "50Mi"}}}, {"name": "b"}, {"name": "idle"}],
        "initContainers": [{"name": "side", "restartPolicy": "Always"}],
        "ephemeralContainers": [{"name": "debug"}]}"#;
    let web = pod(spec);
    let container = |name: &str, memory: u64, disk: u64| ContainerUsage {
        name: name.into(),
        memory: Some(memory),
        layer: Some(Usage { bytes: disk, inodes: 3 }),
        logs: Some(Usage { bytes: 4096, inodes: 1 }),
    };
    let usage = PodUsage {
        memory: Some(300 * MIB),
        containers: vec![
            container("a", 128 * MIB, 60 * MIB),
            container("b", 4096, 4096),
            container("side", 77_777_777, 8192),
            container("debug", 999 * MIB, 999 * MIB),
            ContainerUsage { name: "idle".into(), memory: Some(0), layer: None, logs: None },
        ],
        ..PodUsage::default()
    };
    let low = shortage(
        "memory.available=100Mi nodefs.available=10% nodefs.inodesFree=5% pid.available=10",
        Signal::MemoryAvailable,
    );
    let observations = seen(&[
        (Signal::MemoryAvailable, 99_614_720, 8 << 30),
        (Signal::NodeFsAvailable, 5 << 30, 64 << 30),
        (Signal::NodeFsInodesFree, 70_000, 4_000_000),
    ]);
    let ranked = Ranked { pod: &web, usage: Some(&usage) };
    let told = words(&ranked, &low, &observations, true);
    assert_eq!(
        told.message,
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 95Mi. Container a was using 128Mi, request is 100Mi, \
         has larger consumption of memory. Container b was using 4Ki, request is 0, has larger consumption of memory. Container side was \
         using 77777777, request is 0, has larger consumption of memory. "
    );
    let annotations: Vec<_> = told.annotations.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(
        annotations,
        ["offending_containers=a,b,side", "offending_containers_usage=128Mi,4Ki,77777777", "starved_resource=memory"]
    );
    let disk = Shortage { threshold: low.met[1].clone(), ..low.clone() };
    assert_eq!(
        words(&ranked, &disk, &observations, true).message,
        "The node was low on resource: ephemeral-storage. Threshold quantity: 6871947776, available: 5Gi. Container a was using 61444Ki, \
         request is 50Mi, has larger consumption of ephemeral-storage. Container b was using 8Ki, request is 0, has larger consumption of \
         ephemeral-storage. Container side was using 12Ki, request is 0, has larger consumption of ephemeral-storage. "
    );
    let inodes = Shortage { threshold: low.met[2].clone(), ..low.clone() };
    assert_eq!(
        words(&ranked, &inodes, &observations, true).message,
        "The node was low on resource: inodes. Threshold quantity: 200000, available: 70k. "
    );
    // Not measured any more, or nothing of it runs.
    let pids = Shortage { threshold: low.met[3].clone(), ..low.clone() };
    assert_eq!(words(&ranked, &pids, &observations, true).message, "The node was low on resource: pids. ");
    let idle = words(&Ranked { pod: &web, usage: None }, &low, &observations, true);
    assert!(idle.annotations.is_empty() && idle.message.ends_with("available: 95Mi. "), "{idle:?}");

    let whole = pod(&spec.replacen('{', r#"{"resources": {"requests": {"memory": "200Mi"}}, "#, 1));
    let told = words(&Ranked { pod: &whole, usage: Some(&usage) }, &low, &observations, true);
    assert!(
        told.message
            .contains("95Mi. Pod web was using 300Mi, request is 200Mi, has larger consumption of memory. Container a"),
        "{told:?}"
    );
    assert_eq!(
        (told.annotations["offending_pod"].as_str(), told.annotations["offending_pod_usage"].as_str()),
        ("web", "300Mi")
    );
    assert_eq!(reclaiming(Resource::EphemeralStorage), "Attempting to reclaim ephemeral-storage");
}

#[test]
fn limits_of_local_storage() {
    let web = pod(r#"{"containers": [
            {"name": "a", "resources": {"limits": {"ephemeral-storage": "10Mi"}}}, {"name": "b"}],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}, {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {"name": "free", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}, {"name": "s", "secret": {"secretName": "s"}}]}"#);
    let limits = LocalLimits::of(&web);
    assert_eq!(limits.volumes_to_measure(&web), ["v", "free", "c"]);
    assert_eq!(limits.containers_to_measure(&web), ["a", "b"]);
    let of = |volumes: &[(&str, u64)], logs: &[(&str, u64)], layers: &[(&str, u64)]| {
        let map = |list: &[(&str, u64)]| list.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        LocalUsage { volumes: map(volumes), logs: map(logs), layers: map(layers), hosts: 4096, layers_elsewhere: false }
    };
    let told = |usage: &LocalUsage| limits.exceeded(&web, usage).map(|o| format!("{}: {}", o.signal, o.message));
    assert_eq!(told(&of(&[("v", MIB)], &[("a", 4 * MIB)], &[("a", 5 * MIB - 4096)])), None);
    assert_eq!(
        told(&of(&[("v", MIB + 1)], &[], &[])).unwrap(),
        "emptydirfs.limit: Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". "
    );
    // The pod's total: what the container without a limit takes counts too.
    for usage in
        [of(&[("free", 6 * MIB)], &[("b", 2 * MIB)], &[("b", 2 * MIB)]), of(&[], &[("a", 5 * MIB)], &[("a", 5 * MIB)])]
    {
        assert_eq!(
            told(&usage).unwrap(),
            "ephemeralpodfs.limit: Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "
        );
    }
    let two = pod(r#"{"containers": [{"name": "a", "resources": {"limits": {"ephemeral-storage": "10Mi"}}},
            {"name": "b", "resources": {"limits": {"ephemeral-storage": "10Mi"}}}]}"#);
    let mut usage = of(&[], &[("b", MIB)], &[("b", 9 * MIB + 1), ("a", MIB)]);
    let over = |usage: &LocalUsage| LocalLimits::of(&two).exceeded(&two, usage).map(|o| o.message);
    assert_eq!(over(&usage).unwrap(), "Container b exceeded its local ephemeral storage limit \"10Mi\". ");
    usage.layers_elsewhere = true;
    assert_eq!(over(&usage), None);

    let only = pod(
        r#"{"containers": [{"name": "a"}], "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}, {"name": "w", "emptyDir": {}}]}"#,
    );
    let limits = LocalLimits::of(&only);
    assert_eq!((limits.volumes_to_measure(&only), limits.needs_all()), (vec!["v"], false));
    assert!(limits.containers_to_measure(&only).is_empty());
    let critical =
        static_pod(r#"{"containers": [{"name": "a"}], "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}]}"#);
    assert!(LocalLimits::of(&critical).is_empty());
    assert!(
        LocalLimits::of(&pod(
            r#"{"containers": [{"name": "a"}], "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "0"}}]}"#
        ))
        .is_empty()
    );
}

proptest! {
    /// Whatever the figures: nothing is done without a threshold that was met for its time; a pressure shows whenever one is met, and goes when its
    /// period is over.
    #[test]
    fn a_look_follows_from_what_was_seen(steps in prop::collection::vec((1u64..40, 0i64..200), 1..40), grace in 0u64..60, minimum in 0i64..50,
        transition in 0u64..60) {
        let word = if grace == 0 { "memory.available=100".to_owned() } else { format!("memory.available~{grace}=100") };
        let thresholds = simple(&format!("{word} memory.available+={minimum}"));
        let mut state = State::default();
        let (mut now, mut short_since, mut last_met, mut acting) = (0, None, None, false);
        for (step, left) in steps {
            now += step;
            let look = state.look(&thresholds, &memory(left), secs(transition), secs(now));
            let met = left < if acting { 100 + minimum } else { 100 };
            if met {
                short_since.get_or_insert(now);
                last_met = Some(now);
            } else {
                short_since = None;
            }
            acting = short_since.is_some_and(|since| now - since >= grace);
            prop_assert_eq!(look.shortage.is_some(), acting);
            prop_assert_eq!(look.pressures.memory, last_met.is_some_and(|at| at == now || now - at < transition));
            prop_assert!(!look.pressures.disk && !look.pressures.pid);
        }
    }

    /// Ranking is a total order that loses nobody and never names a critical pod; one that uses more than it asked for goes before one that does not.
    #[test]
    fn every_pod_has_its_place(pods in prop::collection::vec((0u64..300, 0u64..300, -3i32..3, any::<bool>()), 0..12)) {
        let made: Vec<_> = pods.iter().enumerate().map(|(i, (request, _, priority, critical))| {
            let priority = if *critical { 2_000_000_000 } else { *priority };
            named(&format!("p{i:02}"), &format!(r#"{{"priority": {priority}, "containers": [{{"name": "c",
                "resources": {{"requests": {{"memory": "{request}Mi"}}}}}}]}}"#))
        }).collect();
        let usage: HashMap<_, _> = pods.iter().enumerate().map(|(i, (_, used, ..))| {
            (PodUid::new(format!("p{i:02}")), PodUsage { memory: Some(used * MIB), ..PodUsage::default() })
        }).collect();
        let ranked = rank(&made, &usage, Signal::MemoryAvailable, ONE_DISK, true);
        let places: Vec<usize> = ranked.iter().map(|r| r.pod.name()[1..].parse().unwrap()).collect();
        prop_assert_eq!(places.len(), pods.iter().filter(|p| !p.3).count());
        prop_assert!(places.iter().all(|i| !pods[*i].3));
        let mut other = made.clone();
        other.reverse();
        let again: Vec<_> = rank(&other, &usage, Signal::MemoryAvailable, ONE_DISK, true).iter().map(|r| r.pod.name().to_owned()).collect();
        prop_assert_eq!(again, ranked.iter().map(|r| r.pod.name().to_owned()).collect::<Vec<_>>());
        for pair in places.windows(2) {
            let [(ar, au, ap, _), (br, bu, bp, _)] = [pods[pair[0]], pods[pair[1]]];
            let (a, b) = (au > ar, bu > br);
            prop_assert!(a >= b);
            prop_assert!(a != b || ap <= bp);
            prop_assert!(a != b || ap != bp || i128::from(au) - i128::from(ar) >= i128::from(bu) - i128::from(br));
        }
    }
}
