//! Which CPUs out of those that are free: whole NUMA nodes and sockets, then whole caches, whole cores, and single threads, out of the fullest
//! places first (best fit); or spread evenly over NUMA nodes (KEP-2902).

use std::collections::BTreeMap;

use super::topology::{Kind, Topology};
use super::{CpuSet, Options};

/// What is being taken.
struct Taking<'a> {
    topology: &'a Topology,
    free: CpuSet,
    needed: usize,
    taken: CpuSet,
    options: Options,
}

impl Taking<'_> {
    fn take(&mut self, cpus: &CpuSet) {
        self.taken = self.taken.or(cpus);
        self.free = self.free.without(cpus);
        self.needed = self.needed.saturating_sub(cpus.len());
    }

    fn done(&self) -> bool {
        self.needed == 0
    }

    /// NUMA nodes hold sockets, or are the same; else sockets hold NUMA nodes.
    fn numa_first(&self) -> bool {
        self.topology.sockets() >= self.topology.numa_nodes().len()
    }

    /// Places of one kind among these CPUs, those with the fewest free ones first.
    fn fullest(&self, among: &CpuSet, kind: Kind) -> Vec<u32> {
        let mut ids: Vec<u32> = self.topology.places(among, kind).into_iter().collect();
        ids.sort_by_key(|id| (self.topology.within(&self.free, kind, *id).len(), *id));
        ids
    }

    /// The inner places of each outer one, in the order of the outer ones.
    fn nested(&self, outer: Kind, inner: Kind) -> Vec<u32> {
        let mut all = Vec::new();
        for id in self.order(outer) {
            for place in self.fullest(&self.topology.within(&self.free, outer, id), inner) {
                if !all.contains(&place) {
                    all.push(place);
                }
            }
        }
        all
    }

    /// Places with free CPUs, in the order in which they are taken.
    fn order(&self, kind: Kind) -> Vec<u32> {
        match (kind, self.numa_first()) {
            (Kind::Numa, true) => self.fullest(&self.free, Kind::Numa),
            (Kind::Numa, false) => self.nested(Kind::Socket, Kind::Numa),
            (Kind::Socket, true) => self.nested(Kind::Numa, Kind::Socket),
            (Kind::Socket, false) => self.fullest(&self.free, Kind::Socket),
            (Kind::Core, true) => self.nested(Kind::Socket, Kind::Core),
            (Kind::Core, false) => self.nested(Kind::Numa, Kind::Core),
            (Kind::Uncore, _) => self.nested(Kind::Numa, Kind::Uncore),
        }
    }

    /// Single CPUs in the order in which they are taken.
    fn single(&self) -> Vec<u32> {
        let kind = if self.options.distribute_across_cores { Kind::Socket } else { Kind::Core };
        self.order(kind)
            .into_iter()
            .flat_map(|id| self.topology.within(&self.free, kind, id).iter().collect::<Vec<_>>())
            .collect()
    }

    /// Takes places of which every CPU is free, as long as all of one are needed.
    fn whole(&mut self, kind: Kind) {
        let is_free = |id: &u32| self.topology.whole(kind, *id).is_subset(&self.free);
        let free: Vec<u32> = self.order(kind).into_iter().filter(is_free).collect();
        for id in free {
            let cpus = self.topology.whole(kind, id);
            if self.needed >= cpus.len() && cpus.is_subset(&self.free) {
                self.take(&cpus);
            }
        }
    }

    /// Takes what is left out of one cache, when one has it.
    fn caches(&mut self) {
        for cache in self.order(Kind::Uncore) {
            if self.needed >= self.topology.per_uncore() {
                self.whole(Kind::Uncore);
            }
            if self.done() {
                return;
            }
            let per_core = self.topology.per_core();
            let cores = self.needed.div_ceil(per_core);
            let inside = self.topology.within(&self.free, Kind::Uncore, cache);
            let some: Vec<u32> = self.topology.places(&inside, Kind::Core).into_iter().take(cores).collect();
            let mut cpus: Vec<u32> =
                inside.iter().filter(|c| self.topology.0.get(c).is_some_and(|p| some.contains(&p.core))).collect();
            // Of an odd number, the last core gives only one of its threads.
            if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
                cpus.pop();
            }
            if cpus.len() == self.needed {
                self.take(&cpus.into_iter().collect());
                return;
            }
        }
    }
}

fn not_enough(needed: usize, free: usize) -> String {
    format!("not enough cpus available to satisfy request: requested={needed}, available={free}")
}

/// Takes `needed` of the `free` CPUs.
///
/// # Errors
/// There are too few, in Go's words.
pub(super) fn take(topology: &Topology, free: &CpuSet, needed: usize, options: Options) -> Result<CpuSet, String> {
    if options.distribute_across_numa {
        let group = if options.full_physical_only { topology.per_core() } else { 1 };
        return distributed(topology, free, needed, group, options);
    }
    packed(topology, free, needed, options)
}

fn packed(topology: &Topology, free: &CpuSet, needed: usize, options: Options) -> Result<CpuSet, String> {
    let mut taking = Taking { topology, free: free.clone(), needed, taken: CpuSet::default(), options };
    if needed > free.len() {
        return Err(not_enough(needed, free.len()));
    }
    let [outer, inner] = if taking.numa_first() { [Kind::Numa, Kind::Socket] } else { [Kind::Socket, Kind::Numa] };
    taking.whole(outer);
    taking.whole(inner);
    if options.prefer_align_by_uncore_cache && !options.distribute_across_numa && !taking.done() {
        taking.caches();
    }
    if !options.distribute_across_cores {
        taking.whole(Kind::Core);
    }
    for cpu in taking.single() {
        if !taking.done() {
            taking.take(&CpuSet::from_iter([cpu]));
        }
    }
    if !taking.done() {
        return Err("failed to allocate cpus".to_owned());
    }
    Ok(taking.taken)
}

/// Every choice of `k` out of `items`, in their order.
fn choices(items: &[u32], k: usize) -> Vec<Vec<u32>> {
    if k == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (i, first) in items.iter().enumerate() {
        for mut rest in choices(&items[i + 1..], k - 1) {
            rest.insert(0, *first);
            all.push(rest);
        }
    }
    all
}

/// How unevenly CPUs are left: the standard deviation, to three places.
fn imbalance(left: &BTreeMap<u32, usize>) -> f64 {
    let round = |x: f64| (x * 1000.0).round() / 1000.0;
    let values: Vec<f64> = left.values().map(|n| *n as f64).collect();
    let count = values.len() as f64;
    let mean = round(values.iter().sum::<f64>() / count);
    round((values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count).sqrt())
}

/// A way of spreading CPUs.
struct Spread {
    imbalance: f64,
    /// Nodes that give the same number each.
    nodes: Vec<u32>,
    /// Nodes that give what is left, a group each time.
    remainder: Vec<u32>,
}

fn distributed(
    topology: &Topology,
    free: &CpuSet,
    needed: usize,
    group: usize,
    options: Options,
) -> Result<CpuSet, String> {
    if !needed.is_multiple_of(group) {
        return packed(topology, free, needed, options);
    }
    if needed > free.len() {
        return Err(not_enough(needed, free.len()));
    }
    if needed == 0 {
        return Ok(CpuSet::default());
    }
    let taking = Taking { topology, free: free.clone(), needed, taken: CpuSet::default(), options };
    let nodes = taking.order(Kind::Numa);
    let groups = topology.0.len().div_ceil(group);
    let per_node = groups.div_ceil(topology.numa_nodes().len().max(1)).max(1);
    let wanted = needed.div_ceil(group);
    for k in wanted.div_ceil(per_node)..=wanted.min(nodes.len()) {
        let mut best: Option<Spread> = None;
        for combination in choices(&nodes, k) {
            if best.as_ref().is_some_and(|b| b.imbalance == 0.0) {
                break;
            }
            let found = spread(topology, free, &nodes, &combination, needed, group);
            if let Some(found) = found
                && best.as_ref().is_none_or(|b| found.imbalance < b.imbalance)
            {
                best = Some(found);
            }
        }
        if let Some(best) = best {
            return gather(topology, free, &best, needed, group, options);
        }
    }
    packed(topology, free, needed, options)
}

/// The best way to spread over exactly these nodes; None: they cannot give the same number each.
fn spread(
    topology: &Topology,
    free: &CpuSet,
    all: &[u32],
    nodes: &[u32],
    needed: usize,
    group: usize,
) -> Option<Spread> {
    let has: BTreeMap<u32, usize> = all.iter().map(|n| (*n, topology.within(free, Kind::Numa, *n).len())).collect();
    let groups: usize = nodes.iter().map(|n| has[n] / group).sum();
    let each = needed / nodes.len() / group * group;
    if groups * group < needed || nodes.iter().any(|n| has[n] < each) {
        return None;
    }
    let mut left = has;
    for node in nodes {
        *left.get_mut(node)? -= each;
    }
    let remainder = needed - each * nodes.len();
    if remainder == 0 {
        return Some(Spread { imbalance: imbalance(&left), nodes: nodes.to_vec(), remainder: Vec::new() });
    }
    let can: Vec<u32> = nodes.iter().copied().filter(|n| left[n] >= group).collect();
    let mut best: Option<Spread> = None;
    for k in (1..=can.len()).rev() {
        for subset in choices(&can, k) {
            let mut left = left.clone();
            let mut remainder = remainder;
            while remainder > 0 {
                let before = remainder;
                for node in &subset {
                    let has = left.entry(*node).or_default();
                    if remainder > 0 && *has >= group {
                        *has -= group;
                        remainder = remainder.saturating_sub(group);
                    }
                }
                if remainder == before {
                    break;
                }
            }
            if remainder > 0 {
                continue;
            }
            let imbalance = imbalance(&left);
            if best.as_ref().is_none_or(|b| imbalance < b.imbalance) {
                best = Some(Spread { imbalance, nodes: nodes.to_vec(), remainder: subset });
            }
        }
    }
    best
}

fn gather(
    topology: &Topology,
    free: &CpuSet,
    spread: &Spread,
    needed: usize,
    group: usize,
    options: Options,
) -> Result<CpuSet, String> {
    let each = needed / spread.nodes.len() / group * group;
    let mut taken = CpuSet::default();
    let on = |taken: &CpuSet, node: u32| topology.within(&free.without(taken), Kind::Numa, node);
    for node in &spread.nodes {
        taken = taken.or(&packed(topology, &on(&taken, *node), each, options)?);
    }
    while taken.len() < needed {
        let before = taken.len();
        for node in &spread.remainder {
            let there = on(&taken, *node);
            if taken.len() < needed && there.len() >= group {
                taken = taken.or(&packed(topology, &there, group, options)?);
            }
        }
        if taken.len() == before {
            return Err(format!("accounting error, not enough CPUs allocated, remaining: {}", needed - before));
        }
    }
    Ok(taken)
}
