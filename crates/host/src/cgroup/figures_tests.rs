//! Figures of cgroups, read from fixture trees of v1 and v2.

use super::*;
use crate::cgroup::host::fixtures;
use crate::testing::put;

fn layout(dir: &Path) -> CgroupLayout {
    CgroupLayout::detect(&dir.join("cg"), &dir.join("proc")).unwrap()
}

const PSI: &str =
    "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.10 avg60=0.00 avg300=0.00 total=56\n";

#[test]
fn a_v1_group_is_read_in_all_its_hierarchies() {
    let dir = fixtures::v1();
    let d = dir.path();
    for (file, text) in [
        ("cpu,cpuacct/k/p/cpuacct.usage", "5000000000\n"),
        ("cpu,cpuacct/k/p/cpuacct.stat", "user 300\nsystem 120\n"),
        ("cpu,cpuacct/k/p/cpu.shares", "102\n"),
        ("cpu,cpuacct/k/p/cpu.cfs_period_us", "100000\n"),
        ("cpu,cpuacct/k/p/cpu.cfs_quota_us", "50000\n"),
        ("cpu,cpuacct/k/p/cpu.stat", "nr_periods 9\nnr_throttled 3\nthrottled_time 777\nnr_bursts 1\nburst_time 5\n"),
        ("cpu,cpuacct/k/p/cgroup.procs", "12\n15\n"),
        ("cpu,cpuacct/k/p/cgroup.clone_children", "0\n"),
        ("memory/k/p/memory.usage_in_bytes", "1000\n"),
        ("memory/k/p/memory.max_usage_in_bytes", "4000\n"),
        ("memory/k/p/memory.failcnt", "2\n"),
        ("memory/k/p/memory.kmem.usage_in_bytes", "77\n"),
        ("memory/k/p/memory.limit_in_bytes", "67108864\n"),
        ("memory/k/p/memory.memsw.limit_in_bytes", "9223372036854771712\n"),
        ("memory/k/p/memory.soft_limit_in_bytes", "9223372036854771712\n"),
        ("memory/k/p/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"),
        (
            "memory/k/p/memory.stat",
            "cache 1\nrss 2\npgfault 30\npgmajfault 4\ninactive_file 9\ntotal_cache 500\ntotal_rss 300\ntotal_mapped_file 40\n\
             total_swap 8\ntotal_pgfault 99\ntotal_active_file 60\ntotal_inactive_file 400\n",
        ),
        ("pids/k/p/pids.current", "3\n"),
        ("pids/k/p/pids.max", "max\n"),
        ("pids/k/other/pids.current", "1\n"),
    ] {
        put(d, &format!("cg/{file}"), text);
    }
    let layout = layout(d);
    let usage = layout.figures("/k/p", &d.join("proc"), Detail::Usage, &mut SmallFiles::default()).unwrap().unwrap();
    assert!(usage.created.is_some());
    assert_eq!(usage.cpu_ns, Some(5_000_000_000));
    assert_eq!(
        usage.memory,
        Some(MemoryFigures {
            usage: 1000,
            working_set: 600,
            rss: 300,
            cache: 500,
            mapped_file: 40,
            active_file: 60,
            inactive_file: 400,
            swap: 8,
            page_faults: 30,
            major_page_faults: 4,
            limit: Some(64 << 20),
            swap_limit: None,
            swap_counted: true,
        })
    );
    assert_eq!((usage.pressure, usage.detail), (GroupPressure::default(), None));
    let full = layout
        .figures("/k/p", &d.join("proc"), Detail::Full, &mut SmallFiles::default())
        .unwrap()
        .unwrap()
        .detail
        .unwrap();
    let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second();
    assert_eq!(
        full,
        GroupDetail {
            user_ns: 300 * tick,
            system_ns: 120 * tick,
            throttling: Throttling { periods: 9, throttled: 3, throttled_ns: 777, bursts: 1, burst_ns: 5 },
            shares: 102,
            period: 100_000,
            quota: Some(50_000),
            max_usage: 4000,
            fail_count: 2,
            kernel: 77,
            reservation: None,
            oom_kills: 4,
            tasks: Some(3),
            tasks_max: None,
            processes: vec![12, 15],
        }
    );
    assert_eq!(layout.groups_in("/k").unwrap(), ["/k/other", "/k/p"]);
    assert_eq!(layout.groups_in("/k/p").unwrap(), Vec::<String>::new());
    assert_eq!(layout.cpu_time("/k/p", &mut SmallFiles::default()), Some(5_000_000_000));
    assert_eq!(layout.figures("/k/gone", &d.join("proc"), Detail::Full, &mut SmallFiles::default()).unwrap(), None);
    assert_eq!(layout.groups_in("/gone").unwrap(), Vec::<String>::new());
}

#[test]
fn a_v2_group_is_read_in_the_terms_of_v1() {
    let dir = fixtures::v2();
    let d = dir.path();
    for (file, text) in [
        (
            "cpu.stat",
            "usage_usec 5000000\nuser_usec 3000000\nsystem_usec 2000000\nnr_periods 9\nnr_throttled 3\nthrottled_usec 7\nnr_bursts 0\n",
        ),
        ("cpu.weight", "39\n"),
        ("cpu.max", "50000 100000\n"),
        ("memory.current", "1000\n"),
        ("memory.peak", "4000\n"),
        ("memory.max", "67108864\n"),
        ("memory.min", "0\n"),
        ("memory.swap.current", "8\n"),
        ("memory.swap.max", "max\n"),
        (
            "memory.stat",
            "anon 300\nfile 500\nkernel 77\nfile_mapped 40\ninactive_file 400\nactive_file 60\npgfault 30\npgmajfault 4\n",
        ),
        ("memory.events", "low 0\nhigh 0\nmax 2\noom 1\noom_kill 4\noom_group_kill 0\n"),
        ("pids.current", "3\n"),
        ("pids.max", "100\n"),
        ("cgroup.procs", "12\n"),
        ("cpu.pressure", PSI),
        ("io.pressure", PSI),
    ] {
        put(d, &format!("cg/k.slice/p.scope/{file}"), text);
    }
    let layout = layout(d);
    let found =
        layout.figures("/k.slice/p.scope", &d.join("proc"), Detail::Full, &mut SmallFiles::default()).unwrap().unwrap();
    assert_eq!(found.cpu_ns, Some(5_000_000_000));
    let memory = found.memory.unwrap();
    assert_eq!((memory.usage, memory.working_set, memory.rss, memory.cache), (1000, 600, 300, 500));
    assert_eq!((memory.limit, memory.swap_limit, memory.swap, memory.swap_counted), (Some(64 << 20), None, 8, true));
    let line = |total, avg10, avg60| PressureLine { total, avg10, avg60, avg300: 0.0 };
    let pressure = Some(Pressure { some: line(1234, 1.5, 0.25), full: line(56, 0.1, 0.0) });
    assert_eq!(found.pressure, GroupPressure { cpu: pressure, memory: None, io: pressure });
    let detail = found.detail.unwrap();
    assert_eq!((detail.user_ns, detail.system_ns), (3_000_000_000, 2_000_000_000));
    assert_eq!((detail.quota, detail.period, detail.max_usage, detail.kernel), (Some(50_000), 100_000, 4000, 77));
    assert_eq!((detail.tasks, detail.tasks_max, detail.oom_kills), (Some(3), Some(100), 4));
    assert_eq!(detail.throttling.throttled_ns, 7000);
    assert_eq!(detail.processes, [12]);
    assert_eq!(layout.groups_in("/k.slice").unwrap(), ["/k.slice/p.scope"]);
    assert_eq!(layout.cpu_time("/k.slice/p.scope", &mut SmallFiles::default()), Some(5_000_000_000));
}

#[test]
fn the_root_of_v2_stands_for_the_node() {
    let dir = fixtures::v2();
    let d = dir.path();
    put(d, "cg/cpu.stat", "usage_usec 7\n");
    put(d, "cg/memory.stat", "anon 100\ninactive_file 1024\n");
    put(
        d,
        "proc/meminfo",
        "MemTotal: 100 kB\nMemFree: 40 kB\nMemAvailable: 60 kB\nBuffers: 0 kB\nCached: 0 kB\nSwapCached: 0 kB\nActive: 0 kB\nInactive: 0 kB\n\
         SwapTotal: 10 kB\nSwapFree: 4 kB\nDirty: 0 kB\nWriteback: 0 kB\nMapped: 0 kB\nSlab: 0 kB\nCommitted_AS: 0 kB\nVmallocTotal: 0 kB\n\
         VmallocUsed: 0 kB\nVmallocChunk: 0 kB\n",
    );
    put(d, "proc/pressure/memory", PSI);
    let found = layout(d).figures("/", &d.join("proc"), Detail::Usage, &mut SmallFiles::default()).unwrap().unwrap();
    let memory = found.memory.unwrap();
    assert_eq!((memory.usage, memory.working_set, memory.swap), (60 << 10, 59 << 10, 6 << 10));
    assert_eq!(found.cpu_ns, Some(7000));
    assert!(found.pressure.memory.is_some() && found.pressure.cpu.is_none());
}

#[test]
fn groups_of_processes() {
    let dir = fixtures::v1();
    let d = dir.path();
    put(d, "proc/7/cgroup", "4:memory:/a\n2:cpu,cpuacct:/a\n1:name=systemd:/x\n0::/u\n");
    put(d, "proc/8/cgroup", "4:memory:/b\n2:cpu,cpuacct:/a\n");
    let v1 = layout(d);
    assert_eq!(v1.group_of(&d.join("proc"), 7).unwrap(), "/a");
    assert!(v1.group_of(&d.join("proc"), 8).unwrap_err().full().contains("not unified"));
    let dir = fixtures::v2();
    put(dir.path(), "proc/7/cgroup", "0::/system.slice/kubelet.service\n");
    assert_eq!(layout(dir.path()).group_of(&dir.path().join("proc"), 7).unwrap(), "/system.slice/kubelet.service");
}

#[test]
fn pressure_lines() {
    assert_eq!(Pressure::parse(""), None);
    assert_eq!(Pressure::parse("some avg10=2.00 avg60=0 avg300=0 total=9").unwrap().some.avg10, 2.0);
}
