//! What the kernel's files say, which containers have a hand in by their names and by what they do: mounts, control groups, processes, the log.

#![allow(clippy::expect_used)]

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use host::cgroup::{CgroupLayout, Detail};
use host::kmsg::OomReader;
use host::mount::MountTable;
use host::small_files::SmallFiles;
use tempfile::TempDir;

/// Mount tables.
pub const MOUNTS: &[&[u8]] = &[
    b"22 1 252:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
    b"41 22 0:40 /a\\040b /r/pods/u/volumes/x\\134y rw master:3 propagate_from:2 - tmpfs tmpfs rw,size=1k\n42 41 0:41 / /r/pods/u/volumes/x\\134y/z//deleted rw - overlay o rw\n",
];

/// A mount table: no more mounts than lines, the deepest first, each below what was asked for.
pub fn mounts(bytes: &[u8]) {
    let table = MountTable::parse(bytes);
    assert!(table.0.len() <= bytes.split(|b| *b == b'\n').count());
    for root in ["/", "/r/pods/u", "/sys/fs/cgroup"] {
        let below = table.at_or_below(Path::new(root));
        let depth: Vec<usize> = below.iter().map(|m| m.mount_point.components().count()).collect();
        assert!(depth.is_sorted_by(|a, b| a >= b), "{depth:?}");
        assert!(below.iter().all(|m| m.mount_point.starts_with(root)), "{below:?}");
        let _ = table.is_mount_point(Path::new(root));
    }
}

/// Which file in the first byte, then what stands in it.
pub const GROUPS: &[&[u8]] = &[
    b"\x00usage_usec 420\nuser_usec 300\nsystem_usec 120\nnr_periods 9\nnr_throttled 3\nthrottled_usec 777\n",
    b"\x01anon 300\nfile 500\nkernel 77\nfile_mapped 40\ninactive_file 400\nactive_file 60\npgfault 99\npgmajfault 4\nslab 1\n",
    b"\x02max\n",
    b"\x0312\n15\n",
    b"\x04some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.10 avg60=0.00 avg300=0.00 total=56\n",
    b"\x05max 100000\n",
    b"\x06low 0\nhigh 0\nmax 0\noom 1\noom_kill 1\n",
    b"\x070::/k/pod1/c\n",
    b"\x0812 (a) b (c)) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 12345 100 200\n",
    b"\x091 (x) R 1\n",
    b"\x0aeth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n",
    b"\x0b0-3,7\n",
];

const FILES: [&str; 12] = [
    "cg/k/cpu.stat",
    "cg/k/memory.stat",
    "cg/k/memory.max",
    "cg/k/cgroup.procs",
    "cg/k/memory.pressure",
    "cg/k/cpu.max",
    "cg/k/memory.events",
    "proc/12/cgroup",
    "proc/12/stat",
    "proc/1/stat",
    "proc/12/net/dev",
    "cg/k/cpuset.cpus",
];

thread_local! {
    static TREE: RefCell<Option<Tree>> = const { RefCell::new(None) };
}

/// Control groups and processes that are files of a test, made once for each thread.
struct Tree {
    dir: TempDir,
    layout: CgroupLayout,
    files: SmallFiles,
}

impl Tree {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory for temporary files");
        let d = dir.path();
        let put = |path: &str, text: &[u8]| crate::logs::put(d, path, text);
        let root = d.join("cg").display().to_string();
        put("proc/self/mountinfo", format!("30 22 0:26 / {root} rw - cgroup2 cgroup2 rw\n").as_bytes());
        put("cg/cgroup.controllers", b"cpuset cpu io memory hugetlb pids\n");
        for seed in GROUPS {
            let (kind, text) = seed.split_first().expect("a seed has its kind");
            put(FILES[usize::from(*kind)], text);
        }
        let layout = CgroupLayout::detect(&d.join("cg"), &d.join("proc")).expect("one is mounted there");
        Self { dir, layout, files: SmallFiles::default() }
    }
}

/// One file of a group or of a process is as nobody expects it: everything that reads it comes to an end.
pub fn groups(bytes: &[u8]) {
    let Some((kind, text)) = bytes.split_first() else { return };
    let kind = usize::from(*kind) % FILES.len();
    TREE.with_borrow_mut(|tree| {
        let Tree { dir, layout, files } = tree.get_or_insert_with(Tree::new);
        let (file, proc) = (dir.path().join(FILES[kind]), dir.path().join("proc"));
        fs::write(&file, text).expect("a file");
        for detail in [Detail::Usage, Detail::Full] {
            let found = layout.figures("/k", &proc, detail, files).expect("the group is there");
            assert!(found.is_some());
        }
        let _ = (layout.cpu_time("/k", files), layout.processes("/k", files), layout.group_of(&proc, 12));
        let _ = (
            host::proc::process(&proc, 12),
            host::proc::process(&proc, 1),
            host::proc::interface_traffic(&proc, 12, files),
        );
        let seed = &GROUPS[kind][1..];
        fs::write(&file, seed).expect("a file");
    });
}

/// Lines of the kernel's log.
pub const LOG: &[&[u8]] = &[
    b"a invoked oom-killer: gfp_mask=0x1\noom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task=a,pid=7\nOut of memory: Killed process 7 (a) total-vm:1kB\n",
    b"x invoked oom-killer:\noom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/k,task=b,pid=8\nMemory cgroup out of memory: Killed process 8 ((b)) total\n",
];

/// The kernel's lines: a kill is told once at the most for each that was begun.
pub fn log(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut reader = OomReader::default();
    let told = text.lines().filter(|line| reader.line(line).is_some()).count();
    assert!(told <= text.matches(" invoked oom-killer:").count(), "{told} kills");
}
