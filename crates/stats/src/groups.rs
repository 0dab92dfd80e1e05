//! Reading the control groups: the node, everything of the pods, and the groups that the configuration names.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use host::cgroup::{CgroupLayout, Detail, GroupFigures};
use host::proc::{InterfaceTraffic, OpenFiles};
use host::small_files::SmallFiles;
use jiff::{SignedDuration, Timestamp};
use tracing::warn;

use crate::names::{Names, Owner};

/// How long what the node's own processes have open is taken for known. There may be thousands of them, each with many files, and cAdvisor
/// looks at them every 10 to 15 s.
const OUTSIDE: SignedDuration = SignedDuration::from_secs(15);
/// Deeper than this no container nests its groups.
const MAX_DEPTH: usize = 16;

/// Where the control groups are.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    /// The hierarchies.
    pub layout: CgroupLayout,
    /// The path of the group above all pods.
    pub kubepods: String,
    /// procfs.
    pub proc: PathBuf,
    /// sysfs.
    pub sys: PathBuf,
    /// Groups of the system that are shown: what Go calls them (`kubelet`, `runtime`, `misc`), and their paths.
    pub system: Vec<(&'static str, String)>,
}

/// One group, as it was at a moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) path: String,
    pub(crate) owner: Owner,
    pub(crate) at: Timestamp,
    pub(crate) figures: GroupFigures,
    /// CPU in billionths of a core, over the time since an earlier look.
    pub(crate) nano_cores: Option<u64>,
    /// The network's interfaces, for the node and for sandboxes.
    pub(crate) interfaces: Option<Vec<InterfaceTraffic>>,
    /// Its own processes, for containers.
    pub(crate) processes: Option<u64>,
    /// What the processes have open; with [`Detail::Full`].
    pub(crate) open: OpenFiles,
    /// Soft limit of open files of the first process.
    pub(crate) open_limit: Option<i64>,
}

/// All groups.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Groups {
    /// The node first, then those of pods, parents before children, then those of the system.
    pub(crate) all: Vec<Group>,
    /// How much of each is known.
    pub(crate) detail: Detail,
    /// What the processes of the root group have open, and since when that is known.
    pub(crate) outside: Option<(Timestamp, OpenFiles)>,
    /// The rates are known, as far as groups were there before.
    pub(crate) rated: bool,
}

impl Groups {
    pub(crate) fn at(&self, path: &str) -> Option<&Group> {
        self.all.iter().find(|g| g.path == path)
    }

    /// CPU times by path, for the next look.
    pub(crate) fn cpu_times(&self) -> CpuTimes {
        let times = self.all.iter().filter_map(|g| Some((g.path.clone(), (g.at, g.figures.cpu_ns?))));
        CpuTimes(times.collect())
    }
}

/// CPU time of each group at an earlier moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CpuTimes(HashMap<String, (Timestamp, u64)>);

impl CpuTimes {
    /// Billionths of a core in use since then. None: not known, the group was made anew since, or no time has passed.
    pub(crate) fn rate(&self, path: &str, at: Timestamp, cpu_ns: u64) -> Option<u64> {
        let (before, used) = self.0.get(path)?;
        let time = u128::try_from(at.duration_since(*before).as_nanos()).ok().filter(|ns| *ns > 0)?;
        let used = u128::from(cpu_ns.checked_sub(*used)?);
        u64::try_from(used * 1_000_000_000 / time).ok()
    }
}

/// A first, short look: CPU times alone. Blocks.
pub(crate) fn cpu_times(settings: &GroupSettings, names: &Names) -> CpuTimes {
    let mut times = HashMap::new();
    let mut files = SmallFiles::default();
    for (path, _) in paths(settings, names, false) {
        if let Some(ns) = settings.layout.cpu_time(&path, &mut files) {
            times.insert(path, (Timestamp::now(), ns));
        }
    }
    CpuTimes(times)
}

/// Reads all groups; with [`Detail::Full`] also those that containers made within theirs. A group that goes meanwhile is left out. Blocks
/// for about a tenth of a millisecond a group. `outside`: as the look before had it.
pub(crate) fn read(
    settings: &GroupSettings,
    names: &Names,
    detail: Detail,
    before: Option<&CpuTimes>,
    outside: Option<(Timestamp, OpenFiles)>,
) -> Groups {
    let mut outside = outside.filter(|(since, _)| Timestamp::now().duration_since(*since) < OUTSIDE);
    let mut files = SmallFiles::default();
    let paths = paths(settings, names, detail == Detail::Full);
    let mut all = Vec::with_capacity(paths.len());
    for (path, owner) in paths {
        let figures = match settings.layout.figures(&path, &settings.proc, detail, &mut files) {
            Ok(Some(figures)) => figures,
            Ok(None) => continue,
            Err(e) => {
                warn!(err = e.full(), group = path, "A control group cannot be read");
                continue;
            }
        };
        let at = Timestamp::now();
        let mut group = Group {
            nano_cores: before.and_then(|b| b.rate(&path, at, figures.cpu_ns?)),
            path,
            owner,
            at,
            figures,
            interfaces: None,
            processes: None,
            open: OpenFiles::default(),
            open_limit: None,
        };
        processes(settings, &mut group, &mut files);
        if group.path != "/" {
            group.open = open_files(settings, &group);
        } else if group.figures.detail.is_some() {
            (_, group.open) = *outside.get_or_insert_with(|| (at, open_files(settings, &group)));
        }
        all.push(group);
    }
    Groups { all, detail, outside, rated: before.is_some() }
}

/// What is known of a group by its processes.
fn processes(settings: &GroupSettings, group: &mut Group, files: &mut SmallFiles) {
    let proc = &settings.proc;
    let root = group.path == "/";
    if root {
        // The host's namespace, whichever this process is in.
        group.interfaces = host::proc::interface_traffic(proc, 1, files);
    } else if matches!(group.owner, Owner::Sandbox(_) | Owner::Container(_)) {
        let all = match &group.figures.detail {
            Some(detail) => &detail.processes,
            None => &settings.layout.processes(&group.path, files),
        };
        if let Owner::Sandbox(_) = group.owner {
            group.interfaces = all.first().and_then(|pid| host::proc::interface_traffic(proc, *pid, files));
        } else {
            group.processes = Some(all.len() as u64);
        }
    }
    let Some(detail) = &group.figures.detail else { return };
    // Of a container's own process, or of the node's first one.
    let first = match group.owner {
        Owner::Container(_) | Owner::Sandbox(_) => detail.processes.first().copied(),
        _ => root.then_some(1),
    };
    group.open_limit = first.and_then(|pid| host::proc::open_files_limit(proc, pid, files));
}

/// What the processes of a group have open.
fn open_files(settings: &GroupSettings, group: &Group) -> OpenFiles {
    let mut all = OpenFiles::default();
    for pid in group.figures.detail.iter().flat_map(|d| &d.processes) {
        let open = host::proc::open_files(&settings.proc, *pid);
        all.descriptors += open.descriptors;
        all.sockets += open.sockets;
    }
    all
}

/// The groups to read, with their owners.
fn paths(settings: &GroupSettings, names: &Names, nested: bool) -> Vec<(String, Owner)> {
    let mut found = vec![("/".to_owned(), Owner::Other)];
    let mut stack = vec![(settings.kubepods.clone(), 0)];
    while let Some((path, depth)) = stack.pop() {
        let owner = names.owner(&path);
        let container = matches!(owner, Owner::Container(_) | Owner::Sandbox(_));
        if depth < MAX_DEPTH && (nested || !container) {
            match settings.layout.groups_in(&path) {
                Ok(below) => stack.extend(below.into_iter().rev().map(|p| (p, depth + 1))),
                Err(e) => warn!(err = e.full(), group = path, "The control groups below one cannot be listed"),
            }
        }
        found.push((path, owner));
    }
    for (_, path) in &settings.system {
        if found.iter().all(|(known, _)| known != path) {
            found.push((path.clone(), Owner::Other));
        }
    }
    found
}

/// How long a first, short look has to be apart from the second one.
pub(crate) const GLANCE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_come_from_two_looks() {
        let at = |ms| Timestamp::from_millisecond(ms).unwrap();
        let before = CpuTimes(HashMap::from([("/a".to_owned(), (at(1000), 5_000_000_000))]));
        assert_eq!(before.rate("/a", at(3000), 6_000_000_000), Some(500_000_000));
        assert_eq!(before.rate("/a", at(1250), 5_000_000_000), Some(0));
        // Made anew, no time between, another group.
        assert_eq!(before.rate("/a", at(3000), 4_000_000_000), None);
        assert_eq!(before.rate("/a", at(1000), 6_000_000_000), None);
        assert_eq!(before.rate("/b", at(3000), 6_000_000_000), None);
    }

    #[test]
    fn what_the_nodes_own_processes_have_open_is_known_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        for (path, text) in [
            ("proc/self/mountinfo", format!("5 1 0:5 / {}/cg rw - cgroup2 cgroup2 rw\n", d.display())),
            ("cg/cgroup.controllers", "cpu\n".to_owned()),
            ("cg/cpu.stat", "usage_usec 1\n".to_owned()),
            ("cg/memory.current", "1\n".to_owned()),
            ("cg/cgroup.procs", "70\n".to_owned()),
            ("proc/70/fd/0", String::new()),
            ("proc/70/fd/1", String::new()),
        ] {
            let file = d.join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let settings = GroupSettings {
            layout: CgroupLayout::detect(&d.join("cg"), &d.join("proc")).unwrap(),
            kubepods: "/kubepods".into(),
            proc: d.join("proc"),
            sys: d.join("sys"),
            system: Vec::new(),
        };
        let open = |detail, age: Option<i64>| {
            let since = |age| Timestamp::now() - SignedDuration::from_secs(age);
            let before = age.map(|age| (since(age), OpenFiles { descriptors: 7, sockets: 1 }));
            let groups = read(&settings, &Names::default(), detail, None, before);
            (groups.at("/").unwrap().open.descriptors, groups.outside.map(|(_, open)| open.descriptors))
        };
        assert_eq!(open(Detail::Full, None), (2, Some(2)));
        assert_eq!(open(Detail::Full, Some(0)), (7, Some(7)));
        assert_eq!(open(Detail::Full, Some(3600)), (2, Some(2)));
        assert_eq!(open(Detail::Usage, Some(0)), (0, Some(7)), "handed on to the next look");
    }
}
