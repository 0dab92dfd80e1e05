//! The CPU manager's static policy (KEP-3570): containers of Guaranteed pods that ask for whole CPUs get them for themselves, all others share the
//! rest.
//!
//! ```text
//!   all ─┬─ shared pool ─┬─ reserved (system; never given away)
//!        │               └─ free ──allocate──▶ one container's own
//!        └──────────────────◀──release, when its pod has ended
//! ```

mod set;
mod take;
#[cfg(test)]
mod tests;
mod topology;

use std::collections::BTreeMap;

pub use set::{CpuSet, NotCpus};
pub use topology::{Place, Topology};

use crate::admission::Refusal;
use crate::numa::{Hint, Hints, NumaMask};

/// `cpuManagerPolicyOptions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `full-pcpus-only`: whole physical cores, or refused.
    pub full_physical_only: bool,
    /// `distribute-cpus-across-numa`.
    pub distribute_across_numa: bool,
    /// `align-by-socket`: a socket counts as one place.
    pub align_by_socket: bool,
    /// `distribute-cpus-across-cores`.
    pub distribute_across_cores: bool,
    /// `strict-cpu-reservation`: nobody runs on reserved CPUs.
    pub strict_reservation: bool,
    /// `prefer-align-cpus-by-uncorecache`.
    pub prefer_align_by_uncore_cache: bool,
}

/// By pod UID and container name.
pub type Assignments = BTreeMap<String, BTreeMap<String, CpuSet>>;

/// The book of CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Cpus {
    topology: Topology,
    options: Options,
    reserved: CpuSet,
    /// The reserved ones and those that share their cores.
    reserved_cores: CpuSet,
    shared: CpuSet,
    assignments: Assignments,
}

/// What a container asks for.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// UID of its pod.
    pub pod: &'a str,
    /// Its name.
    pub container: &'a str,
    /// How many CPUs of its own.
    pub needed: usize,
    /// CPUs that init containers of the pod had, and nobody uses any more when this one runs.
    pub reusable: &'a CpuSet,
}

fn unexpected(why: &str) -> Refusal {
    Refusal {
        reason: "UnexpectedAdmissionError".into(),
        message: format!("Allocate failed due to {why}, which is unexpected"),
    }
}

impl Cpus {
    /// A machine with these CPUs of which `count` are reserved, `given` ones (`reservedSystemCPUs`) or, when there are none, those that would be taken
    /// first.
    ///
    /// # Errors
    /// In Go's words: nothing is reserved, or not as much as was asked for; the options do not fit the machine.
    pub fn new(topology: Topology, options: Options, given: &CpuSet, count: usize) -> Result<Self, String> {
        if count == 0 {
            return Err(
                "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
                    .into(),
            );
        }
        if options.align_by_socket && topology.sockets() > topology.numa_nodes().len() {
            return Err(
                "new static policy error: Align by socket is not compatible with hardware where number of sockets are more than number of NUMA".into()
            );
        }
        let reserved = if given.is_empty() {
            take::take(&topology, &topology.all(), count, options).unwrap_or_default()
        } else {
            given.clone()
        };
        if reserved.len() != count {
            return Err(format!(
                "new static policy error: [cpumanager] unable to reserve the required amount of CPUs (size of {reserved} did not equal {count})"
            ));
        }
        if let Some(absent) = reserved.without(&topology.all()).iter().next() {
            return Err(format!(
                "new static policy error: [cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: {absent}"
            ));
        }
        let reserved_cores = topology.whole_cores(&reserved);
        let mut cpus = Self {
            options,
            reserved,
            reserved_cores,
            shared: CpuSet::default(),
            assignments: Assignments::new(),
            topology,
        };
        cpus.shared = cpus.managed();
        Ok(cpus)
    }

    /// CPUs that pods may run on.
    fn managed(&self) -> CpuSet {
        let all = self.topology.all();
        if self.options.strict_reservation { all.without(&self.reserved) } else { all }
    }

    /// Takes over what an earlier agent wrote down.
    ///
    /// # Errors
    /// It does not fit this machine or its configuration, in Go's words.
    pub fn restore(&mut self, shared: CpuSet, assignments: Assignments) -> Result<(), String> {
        if shared.is_empty() {
            return if assignments.is_empty() { Ok(()) } else { Err("default cpuset cannot be empty".into()) };
        }
        let reserved = self.reserved.and(&shared);
        if self.options.strict_reservation && !reserved.is_empty() {
            return Err(format!(
                "some of strictly reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{shared}\""
            ));
        }
        if !self.options.strict_reservation && reserved != self.reserved {
            return Err(format!(
                "not all reserved cpus: \"{}\" are present in defaultCpuSet: \"{shared}\"",
                self.reserved
            ));
        }
        let mut known = shared.clone();
        for (pod, containers) in &assignments {
            for (container, cpus) in containers {
                if !cpus.and(&shared).is_empty() {
                    return Err(format!(
                        "pod: {pod}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared}\""
                    ));
                }
                known = known.or(cpus);
            }
        }
        let managed = self.managed();
        if known != managed {
            return Err(format!(
                "current set of available CPUs \"{managed}\" doesn't match with CPUs in state \"{known}\""
            ));
        }
        self.shared = shared;
        self.assignments = assignments;
        Ok(())
    }

    /// The shared pool (`defaultCpuSet`).
    pub fn shared(&self) -> &CpuSet {
        &self.shared
    }

    /// Who has CPUs of his own.
    pub fn assignments(&self) -> &Assignments {
        &self.assignments
    }

    /// CPUs that could be given to containers: all but the reserved ones.
    pub fn allocatable(&self) -> CpuSet {
        self.topology.all().without(&self.reserved)
    }

    /// Every CPU of the machine.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// A container's own CPUs; None: it has none.
    pub fn own(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.assignments.get(pod)?.get(container)
    }

    /// CPUs that a container runs on: its own, or the shared pool.
    pub fn of(&self, pod: &str, container: &str) -> &CpuSet {
        self.own(pod, container).unwrap_or(&self.shared)
    }

    /// CPUs that are some container's own.
    pub fn exclusive(&self) -> CpuSet {
        self.assignments.values().flat_map(BTreeMap::values).flat_map(CpuSet::iter).collect()
    }

    /// Gives a container CPUs of its own; one that has some keeps them.
    ///
    /// # Errors
    /// The refusal of the pod.
    pub fn allocate(&mut self, want: &Want<'_>, affinity: Option<NumaMask>) -> Result<CpuSet, Refusal> {
        if let Some(own) = self.own(want.pod, want.container) {
            return Ok(own.clone());
        }
        self.whole_cores_only(want.needed)?;
        let free = self.shared.without(&self.reserved).or(want.reusable);
        let mut cpus = CpuSet::default();
        let taken = (|| {
            if let Some(nodes) = affinity {
                let aligned = self.topology.on(&free, nodes);
                cpus = take::take(&self.topology, &aligned, aligned.len().min(want.needed), self.options)?;
            }
            let rest = want.needed - cpus.len();
            take::take(&self.topology, &free.without(&cpus), rest, self.options)
        })();
        cpus = cpus.or(&taken.map_err(|why| unexpected(&why))?);
        self.shared = self.shared.without(&cpus);
        let of_pod = self.assignments.entry(want.pod.to_owned()).or_default();
        of_pod.insert(want.container.to_owned(), cpus.clone());
        Ok(cpus)
    }

    /// `full-pcpus-only`: nobody shares a core with another pod, nor with the system.
    fn whole_cores_only(&self, needed: usize) -> Result<(), Refusal> {
        let per_core = self.topology.per_core();
        if !self.options.full_physical_only {
            return Ok(());
        }
        let refuse = |message| Err(Refusal { reason: "SMTAlignmentError".into(), message });
        if !needed.is_multiple_of(per_core) {
            return refuse(format!(
                "SMT Alignment Error: requested {needed} cpus not multiple cpus per core = {per_core}"
            ));
        }
        let free = self.shared.without(&self.reserved_cores).len();
        if needed > free {
            return refuse(format!(
                "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {free}, requested CPUs = {needed}, CPUs per core = {per_core}"
            ));
        }
        Ok(())
    }

    /// Gives back what a pod has. True when that was something.
    pub fn release(&mut self, pod: &str) -> bool {
        let Some(containers) = self.assignments.remove(pod) else { return false };
        for cpus in containers.values() {
            self.shared = self.shared.or(cpus);
        }
        true
    }

    /// Gives back what pods have that are not among these. True when that was something.
    pub fn retain(&mut self, known: &dyn Fn(&str) -> bool) -> bool {
        let gone: Vec<String> = self.assignments.keys().filter(|uid| !known(uid)).cloned().collect();
        gone.iter().fold(false, |changed, uid| self.release(uid) | changed)
    }

    /// Where the CPUs of a container could come from.
    pub fn hints(&self, want: &Want<'_>) -> Hints {
        if let Some(own) = self.own(want.pod, want.container) {
            let same = own.len() == want.needed;
            return Some(if same { self.all_hints(own, &CpuSet::default(), want.needed) } else { Vec::new() });
        }
        Some(self.all_hints(&self.shared.without(&self.reserved), want.reusable, want.needed))
    }

    /// Where the CPUs of all containers of a pod together could come from. `each`: what each container asks for, by name.
    pub fn pod_hints(&self, pod: &str, each: &[(&str, usize)], needed: usize) -> Hints {
        let mut own = CpuSet::default();
        for (container, asked) in each {
            if let Some(cpus) = self.own(pod, container) {
                if cpus.len() != *asked {
                    return Some(Vec::new());
                }
                own = own.or(cpus);
            }
        }
        if own.len() == needed {
            return Some(self.all_hints(&own, &CpuSet::default(), needed));
        }
        Some(self.all_hints(&self.shared.without(&self.reserved), &own, needed))
    }

    fn all_hints(&self, free: &CpuSet, reusable: &CpuSet, needed: usize) -> Vec<Hint> {
        let nodes = self.topology.numa_nodes();
        let all = self.topology.all();
        let mut narrowest = nodes.len();
        let mut found = Vec::new();
        for mask in NumaMask::subsets(&nodes) {
            if self.topology.on(&all, mask).len() >= needed {
                narrowest = narrowest.min(mask.count());
            }
            let again = self.topology.on(reusable, mask).len();
            if again == reusable.len() && again + self.topology.on(&free.without(reusable), mask).len() >= needed {
                found.push(mask);
            }
        }
        let preferred = |mask: NumaMask| {
            mask.count() == narrowest || self.options.align_by_socket && self.socket_aligned(mask, narrowest)
        };
        found.into_iter().map(|mask| Hint { affinity: Some(mask), preferred: preferred(mask) }).collect()
    }

    /// True when these nodes are on as few sockets as can be.
    fn socket_aligned(&self, mask: NumaMask, narrowest: usize) -> bool {
        let per_socket = self.topology.numa_nodes().len().checked_div(self.topology.sockets()).unwrap_or(0);
        if per_socket == 0 {
            return false;
        }
        let on = self.topology.on(&self.topology.all(), mask);
        self.topology.places(&on, topology::Kind::Socket).len() == narrowest.div_ceil(per_socket)
    }
}
