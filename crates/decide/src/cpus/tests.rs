//! Choosing CPUs, against what the Go kubelet chooses on the same machines, and that no CPU ever has two owners.

use proptest::prelude::*;

use super::*;

/// `sockets` × `cores` × `threads`, numbered as Linux does on x86: first threads of all cores, sockets taking turns.
fn machine(sockets: u32, numas_per_socket: u32, cores: u32, threads: u32) -> Topology {
    let mut all = BTreeMap::new();
    let total = sockets * cores;
    for thread in 0..threads {
        for n in 0..total {
            let (socket, core_of_socket) = (n % sockets, n / sockets);
            let numa = socket * numas_per_socket + core_of_socket * numas_per_socket / cores;
            let uncore = socket * 2 + core_of_socket * 2 / cores;
            all.insert(thread * total + n, Place { core: n, socket, numa, uncore });
        }
    }
    Topology(all)
}

fn set(text: &str) -> CpuSet {
    CpuSet::parse(text).unwrap()
}

fn took(topology: &Topology, free: &str, needed: usize, options: Options) -> String {
    take::take(topology, &set(free), needed, options).map_or_else(|e| e, |cpus| cpus.to_string())
}

#[test]
fn packed() {
    let plain = Options::default();
    let (single, dual) = (machine(1, 1, 4, 2), machine(2, 1, 3, 2));
    for (topology, free, needed, want) in [
        (&single, "0-7", 1, "0"),
        (&single, "0-7", 2, "0,4"),
        (&single, "0-7", 8, "0-7"),
        (&single, "1-7", 1, "4"),
        (&single, "1-7", 2, "1,5"),
        (&single, "1-7", 3, "1,4-5"),
        (&single, "0-1", 3, "not enough cpus available to satisfy request: requested=3, available=2"),
        (&dual, "0-11", 6, "0,2,4,6,8,10"),
        (&dual, "1-11", 6, "1,3,5,7,9,11"),
        (&dual, "0-11", 8, "0-2,4,6-8,10"),
        (&dual, "1-11", 1, "6"),
        (&dual, "1-11", 5, "2,4,6,8,10"),
    ] {
        assert_eq!(took(topology, free, needed, plain), want, "{needed} of {free}");
    }
    let spread = Options { distribute_across_cores: true, ..plain };
    assert_eq!(took(&single, "0-7", 3, spread), "0-2");
    assert_eq!(took(&dual, "0-11", 4, spread), "0,2,4,6");
    let cache = Options { prefer_align_by_uncore_cache: true, ..plain };
    // CPUs 0, 1, 4, 5 and 2, 3, 6, 7 share a cache each.
    assert_eq!(took(&single, "1-7", 4, cache), "2-3,6-7");
    assert_eq!(took(&single, "0,2-7", 3, cache), "0,4-5");
}

#[test]
fn distributed() {
    let numa = Options { distribute_across_numa: true, ..Options::default() };
    let dual = machine(2, 1, 3, 2);
    for (free, needed, want) in [
        ("0-11", 1, "0"),
        ("0-11", 6, "0,2,4,6,8,10"),
        ("0-11", 8, "0-3,6-9"),
        ("1-11", 8, "1-4,7-10"),
        ("0-11", 12, "0-11"),
    ] {
        assert_eq!(took(&dual, free, needed, numa), want, "{needed} of {free}");
    }
    let whole = Options { full_physical_only: true, ..numa };
    assert_eq!(took(&dual, "0-11", 10, whole), "0-4,6-10");
}

#[test]
fn reservations() {
    let fresh = |options, given: &str, count| Cpus::new(machine(1, 1, 4, 2), options, &set(given), count);
    let plain = Options::default();
    assert!(fresh(plain, "", 0).unwrap_err().contains("to be greater than zero"));
    assert!(fresh(plain, "0-1", 1).unwrap_err().ends_with("(size of 0-1 did not equal 1)"));
    assert!(fresh(plain, "9", 1).unwrap_err().ends_with("unknown CPU ID: 9"));
    let cpus = fresh(plain, "", 2).unwrap();
    assert_eq!((cpus.allocatable().to_string(), cpus.shared().to_string()), ("1-3,5-7".into(), "0-7".into()));
    let strict = fresh(Options { strict_reservation: true, ..plain }, "0", 1).unwrap();
    assert_eq!(strict.shared().to_string(), "1-7");
}

fn want<'a>(pod: &'a str, container: &'a str, needed: usize, reusable: &'a CpuSet) -> Want<'a> {
    Want { pod, container, needed, reusable }
}

#[test]
fn whole_cores_or_refused() {
    let options = Options { full_physical_only: true, ..Options::default() };
    let mut cpus = Cpus::new(machine(1, 1, 2, 2), options, &set("0"), 1).unwrap();
    let none = CpuSet::default();
    let refusal = cpus.allocate(&want("p", "c", 1, &none), None).unwrap_err();
    assert_eq!(refusal.reason, "SMTAlignmentError");
    assert_eq!(refusal.message, "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2");
    assert_eq!(cpus.allocate(&want("p", "c", 2, &none), None).unwrap().to_string(), "1,3");
    // Asked again (the agent was restarted), it keeps them, though none would be free.
    assert_eq!(cpus.allocate(&want("p", "c", 2, &none), None).unwrap().to_string(), "1,3");
    // The other thread of the reserved core is nobody's.
    assert_eq!(
        cpus.allocate(&want("q", "c", 2, &none), None).unwrap_err().message,
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 0, requested CPUs = 2, CPUs per core = 2"
    );
}

#[test]
fn init_containers_give_theirs_on() {
    let mut cpus = Cpus::new(machine(1, 1, 4, 1), Options::default(), &set("0"), 1).unwrap();
    let none = CpuSet::default();
    let init = cpus.allocate(&want("p", "init", 2, &none), None).unwrap();
    assert_eq!(init.to_string(), "1-2");
    let app = cpus.allocate(&want("p", "app", 3, &init), None).unwrap();
    assert_eq!((app.to_string(), cpus.shared().to_string()), ("1-3".into(), "0".into()));
    assert!(cpus.release("p") && !cpus.release("p"));
    assert_eq!(cpus.shared().to_string(), "0-3");
}

#[test]
fn what_is_restored_must_fit() {
    let fresh = |options| Cpus::new(machine(1, 1, 4, 1), options, &set("0"), 1).unwrap();
    let with = |pod: &str, cpus: &str| Assignments::from([(pod.into(), BTreeMap::from([("c".to_owned(), set(cpus))]))]);
    for (shared, assignments, want) in [
        ("0,2-3", with("p", "1"), ""),
        ("", Assignments::new(), ""),
        ("", with("p", "1"), "default cpuset cannot be empty"),
        ("1-3", Assignments::new(), "not all reserved cpus: \"0\" are present in defaultCpuSet: \"1-3\""),
        ("0-3", with("p", "1"), "pod: p, container: c cpuset: \"1\" overlaps with default cpuset \"0-3\""),
        ("0,2-4", with("p", "1"), "current set of available CPUs \"0-3\" doesn't match with CPUs in state \"0-4\""),
    ] {
        let got = fresh(Options::default()).restore(set(shared), assignments).err().unwrap_or_default();
        assert_eq!(got, want, "{shared}");
    }
    let strict = Options { strict_reservation: true, ..Options::default() };
    assert_eq!(
        fresh(strict).restore(set("0-3"), Assignments::new()).unwrap_err(),
        "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0-3\""
    );
}

#[test]
fn hints() {
    let none = CpuSet::default();
    let shown = |hints: Hints| {
        let one = |h: Hint| format!("{}{}", h.affinity.unwrap(), if h.preferred { "!" } else { "" });
        hints.unwrap().into_iter().map(one).collect::<Vec<_>>().join(" ")
    };
    let mut cpus = Cpus::new(machine(2, 1, 3, 2), Options::default(), &set("0"), 1).unwrap();
    assert_eq!(shown(cpus.hints(&want("p", "c", 2, &none))), "01! 10! 11");
    assert_eq!(shown(cpus.hints(&want("p", "c", 6, &none))), "10! 11");
    assert_eq!(shown(cpus.hints(&want("p", "c", 7, &none))), "11!");
    assert_eq!(shown(cpus.hints(&want("p", "c", 12, &none))), "");
    cpus.allocate(&want("p", "c", 2, &none), Some(NumaMask::of([1]))).unwrap();
    assert_eq!(shown(cpus.hints(&want("p", "c", 2, &none))), "10! 11");
    assert_eq!(shown(cpus.hints(&want("p", "c", 3, &none))), "");
    assert_eq!(shown(cpus.pod_hints("p", &[("c", 2), ("d", 2)], 4)), "10! 11");
    let sockets = Options { align_by_socket: true, ..Options::default() };
    let cpus = Cpus::new(machine(2, 2, 4, 1), sockets, &set("0"), 1).unwrap();
    assert_eq!(
        shown(cpus.hints(&want("p", "c", 2, &none))),
        "10! 100! 1000! 11! 101 1001 110 1010 1100! 111 1011 1101 1110 1111"
    );
}

proptest! {
    /// Whatever is given and taken back: shared pool and own CPUs never overlap, together they are all CPUs, the reserved ones stay shared, and a
    /// container gets as many as it asked for.
    #[test]
    fn one_owner(
        shape in (1u32..3, 1u32..3, 1u32..5, 1u32..3),
        bits in 0u8..32,
        steps in prop::collection::vec((0u8..6, 0usize..6, any::<bool>(), prop::option::of(0i64..4)), 0..30),
    ) {
        let topology = machine(shape.0, shape.1.min(shape.2), shape.2, shape.3);
        let options = Options {
            full_physical_only: bits & 1 != 0,
            distribute_across_numa: bits & 2 != 0,
            distribute_across_cores: bits & 4 != 0,
            strict_reservation: bits & 8 != 0,
            prefer_align_by_uncore_cache: bits & 16 != 0,
            align_by_socket: false,
        };
        let all = topology.all();
        let mut cpus = Cpus::new(topology, options, &set("0"), 1).unwrap();
        let none = CpuSet::default();
        for (pod, needed, end, node) in steps {
            let pod = format!("p{pod}");
            if end {
                cpus.release(&pod);
            } else if needed > 0 {
                let before = cpus.clone();
                let had = cpus.own(&pod, "c").cloned();
                match cpus.allocate(&want(&pod, "c", needed, &none), node.map(|n| NumaMask::of([n]))) {
                    Ok(got) => prop_assert_eq!(got.len(), had.map_or(needed, |h| h.len())),
                    Err(_) => prop_assert_eq!(&before, &cpus),
                }
            }
            let mut count = cpus.shared().len();
            count += cpus.assignments().values().flat_map(BTreeMap::values).map(CpuSet::len).sum::<usize>();
            let managed = if options.strict_reservation { all.without(&set("0")) } else { all.clone() };
            prop_assert_eq!(count, managed.len());
            prop_assert_eq!(&cpus.shared().or(&cpus.exclusive()), &managed);
            prop_assert!(!cpus.exclusive().has(0));
            let mut again = cpus.clone();
            prop_assert_eq!(again.restore(cpus.shared().clone(), cpus.assignments().clone()), if cpus.shared().is_empty() && !cpus.assignments().is_empty() { Err("default cpuset cannot be empty".to_owned()) } else { Ok(()) });
        }
    }
}
