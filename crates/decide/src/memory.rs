//! The memory manager's Static policy (KEP-1769): containers of Guaranteed pods get their memory and huge pages from chosen NUMA nodes.
//!
//! A node serves containers that need it alone, or it is in one group of nodes that serves containers that need all of them; never both.

use std::collections::BTreeMap;

use model::quantity::{Format, Quantity};

use crate::numa::{Hint, Hints, NumaMask};

/// The name of ordinary memory.
pub const MEMORY: &str = "memory";

/// How much of one kind of memory a NUMA node has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// All of it.
    pub total: u64,
    /// `reservedMemory`.
    pub system_reserved: u64,
    /// What containers may have.
    pub allocatable: u64,
    /// What containers have.
    pub reserved: u64,
    /// What they do not have.
    pub free: u64,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// How many blocks of containers are on it.
    pub assignments: usize,
    /// By kind: `memory`, `hugepages-2Mi`, …
    pub tables: BTreeMap<String, Table>,
    /// The group that it is in; itself alone, as long as no container needs more than one node.
    pub group: Vec<i64>,
}

/// The machine, by node number.
pub type Machine = BTreeMap<i64, Node>;

/// Memory of one kind that a container has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// NUMA nodes that it comes from.
    pub nodes: Vec<i64>,
    /// Kind.
    pub kind: String,
    /// Bytes; 0 for what an init container had and a later one took over.
    pub size: u64,
}

/// By pod UID and container name.
pub type Assignments = BTreeMap<String, BTreeMap<String, Vec<Block>>>;

/// Bytes by kind.
pub type Amounts = BTreeMap<String, u64>;

/// What init containers of a pod had: bytes by nodes and kind. Whoever comes after them may use it again.
pub type Reusable = BTreeMap<NumaMask, Amounts>;

/// A container that wants memory.
#[derive(Clone, Copy, Debug)]
pub struct Who<'a> {
    /// UID of its pod.
    pub pod: &'a str,
    /// Its name.
    pub container: &'a str,
    /// It ends before others start.
    pub is_init: bool,
    /// Names of those that end before it starts.
    pub inits: &'a [&'a str],
}

/// The book of memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    machine: Machine,
    assignments: Assignments,
}

/// Memory of a NUMA node as the kernel tells of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bank {
    /// All memory, huge pages among it, in bytes.
    pub total: u64,
    /// Huge pages: size of one in bytes, and how many.
    pub huge_pages: Vec<(u64, u64)>,
}

/// Checks `reservedMemory` against what is reserved on the whole node (`kubeReserved`, `systemReserved`, hard eviction).
///
/// # Errors
/// In Go's words. Amounts are shown as quantities of the API.
pub fn check_reserved(
    nodes: &[i64],
    reserved: &BTreeMap<i64, Amounts>,
    whole: &Amounts,
    show: &dyn Fn(u64) -> String,
) -> Result<(), String> {
    if let Some(absent) = reserved.keys().find(|n| !nodes.contains(n)) {
        return Err(format!(
            "the reserved memory configuration references a NUMA node {absent} that does not exist on this machine"
        ));
    }
    let mut sums = Amounts::new();
    for (kind, size) in reserved.values().flatten() {
        *sums.entry(kind.clone()).or_default() += size;
    }
    for kind in sums.keys().chain(whole.keys()) {
        let [sum, wanted] = [&sums, whole].map(|m| m.get(kind).copied().unwrap_or(0));
        if sum != wanted {
            return Err(format!(
                "the total amount \"{}\" of type \"{kind}\" is not equal to the value \"{}\" determined by Node Allocatable feature",
                show(sum),
                show(wanted)
            ));
        }
    }
    if sums.get(MEMORY).copied().unwrap_or(0) == 0 {
        return Err("[memorymanager] you should specify the system reserved memory".into());
    }
    Ok(())
}

impl Memory {
    /// A machine of which nothing is given away.
    pub fn new(banks: &BTreeMap<i64, Bank>, reserved: &BTreeMap<i64, Amounts>) -> Self {
        let machine = banks.iter().map(|(id, bank)| {
            let kept = |kind: &str| reserved.get(id).and_then(|r| r.get(kind)).copied().unwrap_or(0);
            let table = |total: u64, kind: &str, others: u64| {
                let system_reserved = kept(kind);
                let allocatable = total.saturating_sub(system_reserved).saturating_sub(others);
                Table { total, system_reserved, allocatable, reserved: 0, free: allocatable }
            };
            let huge: u64 = bank.huge_pages.iter().map(|(size, count)| size * count).sum();
            let mut tables = BTreeMap::from([(MEMORY.to_owned(), table(bank.total, MEMORY, huge))]);
            for (size, count) in &bank.huge_pages {
                let kind = kind_of_pages(*size);
                let whole = table(size * count, &kind, 0);
                tables.insert(kind, whole);
            }
            (*id, Node { assignments: 0, tables, group: vec![*id] })
        });
        Self { machine: machine.collect(), assignments: Assignments::new() }
    }

    /// Takes over what an earlier agent wrote down.
    ///
    /// # Errors
    /// It does not fit this machine or its configuration, in Go's words.
    pub fn restore(&mut self, machine: Machine, assignments: Assignments) -> Result<(), String> {
        if machine.is_empty() {
            return if assignments.is_empty() {
                Ok(())
            } else {
                Err("[memorymanager] machine state can not be empty when it has memory assignments".into())
            };
        }
        let mut expected = self.clone();
        for (pod, containers) in &assignments {
            for (container, blocks) in containers {
                for block in blocks {
                    expected.place(block, block.size).map_err(|what| {
                        format!("[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses {what} that does not exist")
                    })?;
                }
            }
        }
        if !same(&machine, &expected.machine) {
            return Err("[memorymanager] the expected machine state is different from the real one".into());
        }
        self.machine = machine;
        self.assignments = assignments;
        Ok(())
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Who has what.
    pub fn assignments(&self) -> &Assignments {
        &self.assignments
    }

    /// What a container has; None: nothing of its own.
    pub fn of(&self, pod: &str, container: &str) -> Option<&[Block]> {
        self.assignments.get(pod)?.get(container).map(Vec::as_slice)
    }

    /// NUMA nodes that a container's memory comes from; none: any.
    pub fn nodes(&self, pod: &str, container: &str) -> NumaMask {
        NumaMask::of(self.of(pod, container).into_iter().flatten().flat_map(|b| b.nodes.iter().copied()))
    }

    /// What containers may have, node by node.
    pub fn allocatable(&self) -> Vec<Block> {
        let of = |(id, node): (&i64, &Node)| {
            let blocks = node.tables.iter().filter(|(_, t)| t.allocatable > 0);
            blocks
                .map(|(kind, t)| Block { nodes: vec![*id], kind: kind.clone(), size: t.allocatable })
                .collect::<Vec<_>>()
        };
        self.machine.iter().flat_map(of).collect()
    }

    /// Puts a block on its nodes, filling one after the other. The error is what does not exist.
    fn place(&mut self, block: &Block, size: u64) -> Result<(), &'static str> {
        let mut rest = size;
        for id in &block.nodes {
            let node = self.machine.get_mut(id).ok_or("the NUMA")?;
            node.assignments += 1;
            node.group.clone_from(&block.nodes);
            let table = node.tables.get_mut(&block.kind).ok_or("memory resource")?;
            let here = rest.min(table.free);
            table.reserved += here;
            table.free -= here;
            rest -= here;
        }
        Ok(())
    }

    /// Gives a container memory; one that has some keeps it. `reusable` is brought up to date.
    ///
    /// # Errors
    /// In Go's words; it becomes the message of the pod's rejection.
    pub fn allocate(
        &mut self,
        who: &Who<'_>,
        wanted: &Amounts,
        affinity: Hint,
        reusable: &mut Reusable,
    ) -> Result<(), String> {
        if let Some(blocks) = self.of(who.pod, who.container) {
            use_again(reusable, blocks, who.is_init);
            return Ok(());
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let missing = |mask: NumaMask| self.lacks(mask, wanted);
        let hints = || self.all_hints(wanted, reusable);
        let mut best = affinity;
        if best.affinity.is_none() {
            let found = hints();
            let found = fittest(found.iter()).ok_or(
                "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available",
            )?;
            if !found.preferred && best.preferred {
                return Err("[memorymanager] failed to find the default preferred hint".into());
            }
            best = found;
        }
        if let Some(mask) = best.affinity.filter(|mask| missing(*mask)) {
            // The other managers left only a part of what this one needs.
            let found = hints();
            let wider = found.iter().filter(|h| h.affinity.is_some_and(|m| mask.is_subset(m)));
            let wider = fittest(wider)
                .ok_or("[memorymanager] failed to find NUMA nodes to extend the current topology hint")?;
            if !wider.preferred && best.preferred {
                return Err("[memorymanager] failed to find the extended preferred hint".into());
            }
            best = wider;
        }
        let mask = best.affinity.unwrap_or_default();
        if self.mixes(mask) {
            return Err("[memorymanager] preferred hint violates NUMA node allocation".into());
        }
        let nodes: Vec<i64> = mask.nodes().collect();
        let blocks: Vec<Block> =
            wanted.iter().map(|(kind, size)| Block { nodes: nodes.clone(), kind: kind.clone(), size: *size }).collect();
        for block in &blocks {
            let again = reusable.get(&mask).and_then(|of| of.get(&block.kind)).copied().unwrap_or(0);
            self.place(block, block.size.saturating_sub(again))
                .map_err(|what| format!("[memorymanager] the memory assignment uses {what} that does not exist"))?;
        }
        use_again(reusable, &blocks, who.is_init);
        self.take_over(who, &blocks);
        self.assignments.entry(who.pod.to_owned()).or_default().insert(who.container.to_owned(), blocks);
        Ok(())
    }

    /// What a later container uses again is no longer counted for the init container that had it, so that a pod's blocks are what it has.
    fn take_over(&mut self, who: &Who<'_>, blocks: &[Block]) {
        let Some(of_pod) = self.assignments.get_mut(who.pod) else { return };
        for block in blocks {
            let mut rest = block.size;
            for others in who.inits.iter().filter_map(|name| of_pod.remove_entry(*name)).collect::<Vec<_>>() {
                let (name, mut others) = others;
                for other in others.iter_mut().filter(|o| o.kind == block.kind && o.nodes == block.nodes) {
                    let here = rest.min(other.size);
                    other.size -= here;
                    rest -= here;
                }
                of_pod.insert(name, others);
            }
        }
    }

    /// True when these nodes have too little free.
    fn lacks(&self, mask: NumaMask, wanted: &Amounts) -> bool {
        wanted.iter().any(|(kind, size)| self.sum(mask, kind, |t| t.free) < *size)
    }

    fn sum(&self, mask: NumaMask, kind: &str, figure: fn(&Table) -> u64) -> u64 {
        let tables = mask.nodes().filter_map(|n| self.machine.get(&n)?.tables.get(kind));
        tables.map(figure).sum()
    }

    /// True when a container on these nodes would be beside others that have some of them in another group.
    fn mixes(&self, mask: NumaMask) -> bool {
        let nodes: Vec<i64> = mask.nodes().collect();
        nodes.len() > 1
            && nodes
                .iter()
                .filter_map(|n| self.machine.get(n))
                .any(|n| n.assignments > 0 && (n.group.len() == 1 || NumaMask::of(n.group.iter().copied()) != mask))
    }

    /// Where memory for a container could come from, by kind.
    pub fn hints(&self, pod: &str, container: &str, wanted: &Amounts, reusable: &Reusable) -> Vec<Hints> {
        match self.of(pod, container) {
            Some(blocks) => same_again(blocks, wanted),
            None => self.hints_by_kind(wanted, reusable),
        }
    }

    /// Where memory for all containers of a pod together could come from. `containers`: their names, in order.
    pub fn pod_hints(&self, pod: &str, containers: &[&str], wanted: &Amounts) -> Vec<Hints> {
        match containers.iter().find_map(|name| self.of(pod, name)) {
            Some(blocks) => same_again(blocks, wanted),
            None => self.hints_by_kind(wanted, &Reusable::new()),
        }
    }

    fn hints_by_kind(&self, wanted: &Amounts, reusable: &Reusable) -> Vec<Hints> {
        let all = self.all_hints(wanted, reusable);
        // Without a place that has all kinds, Go's manager says nothing, which is as if it did not mind.
        if all.is_empty() { Vec::new() } else { wanted.keys().map(|_| Some(all.clone())).collect() }
    }

    fn all_hints(&self, wanted: &Amounts, reusable: &Reusable) -> Vec<Hint> {
        let nodes: Vec<i64> = self.machine.keys().copied().collect();
        let mut narrowest = nodes.len();
        let mut found = Vec::new();
        for mask in NumaMask::subsets(&nodes) {
            if wanted.iter().any(|(kind, size)| self.sum(mask, kind, |t| t.allocatable) < *size) {
                continue;
            }
            narrowest = narrowest.min(mask.count());
            let grouped = |n: i64| self.machine.get(&n).is_some_and(|n| n.group.len() > 1);
            if mask.count() == 1 && mask.nodes().any(grouped) || self.mixes(mask) {
                continue;
            }
            let again = |kind: &str| reusable.get(&mask).and_then(|of| of.get(kind)).copied().unwrap_or(0);
            if wanted.iter().all(|(kind, size)| self.sum(mask, kind, |t| t.free) + again(kind) >= *size) {
                found.push(mask);
            }
        }
        found.into_iter().map(|m| Hint { affinity: Some(m), preferred: m.count() == narrowest }).collect()
    }

    /// Gives back what a pod has. True when that was something.
    pub fn release(&mut self, pod: &str) -> bool {
        let Some(containers) = self.assignments.remove(pod) else { return false };
        for block in containers.into_values().flatten() {
            let mut rest = block.size;
            for id in &block.nodes {
                let Some(node) = self.machine.get_mut(id) else { continue };
                node.assignments = node.assignments.saturating_sub(1);
                if node.assignments == 0 {
                    node.group = vec![*id];
                }
                let Some(table) = node.tables.get_mut(&block.kind) else { continue };
                let here = rest.min(table.reserved);
                table.reserved -= here;
                table.free += here;
                rest -= here;
            }
        }
        true
    }

    /// Gives back what pods have that are not among these. True when that was something.
    pub fn retain(&mut self, known: &dyn Fn(&str) -> bool) -> bool {
        let gone: Vec<String> = self.assignments.keys().filter(|uid| !known(uid)).cloned().collect();
        gone.iter().fold(false, |changed, uid| self.release(uid) | changed)
    }
}

/// `hugepages-2Mi` for pages of 2 MiB.
fn kind_of_pages(size: u64) -> String {
    format!("hugepages-{}", Quantity::from_value(i64::try_from(size).unwrap_or(i64::MAX), Format::BinarySI))
}

/// Notes what init containers had, or takes off what another one uses again.
fn use_again(reusable: &mut Reusable, blocks: &[Block], is_init: bool) {
    for block in blocks {
        let of = reusable.entry(NumaMask::of(block.nodes.iter().copied())).or_default();
        let known = of.entry(block.kind.clone()).or_default();
        *known = if is_init { block.size.max(*known) } else { known.saturating_sub(block.size) };
    }
}

/// The hints for what a container has already; nothing, when it asks for something else now.
fn same_again(blocks: &[Block], wanted: &Amounts) -> Vec<Hints> {
    let fits = |b: &Block| wanted.get(&b.kind) == Some(&b.size);
    if blocks.len() != wanted.len() || !blocks.iter().all(fits) {
        return Vec::new();
    }
    let hint = |b: &Block| Hint { affinity: Some(NumaMask::of(b.nodes.iter().copied())), preferred: true };
    blocks.iter().map(|b| Some(vec![hint(b)])).collect()
}

/// A preferred one before others, then the narrowest.
fn fittest<'a>(hints: impl Iterator<Item = &'a Hint>) -> Option<Hint> {
    hints.copied().reduce(|best, hint| {
        let narrower = match (hint.affinity, best.affinity) {
            (Some(a), Some(b)) => a.is_narrower(b),
            _ => false,
        };
        if (hint.preferred && !best.preferred) || (hint.preferred == best.preferred && narrower) { hint } else { best }
    })
}

/// The same machine with as much given away. Within a group it does not matter which node a byte came from.
fn same(a: &Machine, b: &Machine) -> bool {
    let sum = |machine: &Machine, group: &[i64], kind: &String, figure: fn(&Table) -> u64| -> u64 {
        group.iter().filter_map(|n| machine.get(n)?.tables.get(kind)).map(figure).sum()
    };
    let mask = |n: &Node| NumaMask::of(n.group.iter().copied());
    a.len() == b.len()
        && a.iter().all(|(id, one)| {
            b.get(id).is_some_and(|other| {
                one.assignments == other.assignments
                    && mask(one) == mask(other)
                    && one.tables.len() == other.tables.len()
                    && one.tables.iter().all(|(kind, t)| {
                        let figures: [fn(&Table) -> u64; 2] = [|t| t.free, |t| t.reserved];
                        other.tables.get(kind).is_some_and(|o| {
                            (t.total, t.system_reserved, t.allocatable) == (o.total, o.system_reserved, o.allocatable)
                        }) && figures.iter().all(|f| sum(a, &one.group, kind, *f) == sum(b, &one.group, kind, *f))
                    })
            })
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two nodes with 10 each, of which 1 on the first is the system's.
    fn two() -> Memory {
        let bank = Bank { total: 10, huge_pages: vec![] };
        let reserved = BTreeMap::from([(0, Amounts::from([(MEMORY.to_owned(), 1)]))]);
        Memory::new(&BTreeMap::from([(0, bank.clone()), (1, bank)]), &reserved)
    }

    fn amount(n: u64) -> Amounts {
        Amounts::from([(MEMORY.to_owned(), n)])
    }

    const ANY: Hint = Hint { affinity: None, preferred: false };

    fn who<'a>(pod: &'a str, container: &'a str, inits: &'a [&'a str]) -> Who<'a> {
        Who { pod, container, is_init: container.starts_with("init"), inits }
    }

    fn give(memory: &mut Memory, pod: &str, n: u64) -> Result<Vec<i64>, String> {
        memory.allocate(&who(pod, "c", &[]), &amount(n), ANY, &mut Reusable::new())?;
        Ok(memory.of(pod, "c").unwrap()[0].nodes.clone())
    }

    #[test]
    fn single_and_grouped_nodes_are_kept_apart() {
        let mut memory = two();
        assert_eq!(give(&mut memory, "a", 9), Ok(vec![0]));
        assert_eq!(give(&mut memory, "b", 1), Ok(vec![1]));
        assert!(give(&mut memory, "c", 11).unwrap_err().contains("no NUMA nodes with enough memory is available"));
        assert!(memory.release("a") && memory.release("b") && !memory.release("b"));
        assert_eq!(give(&mut memory, "c", 11), Ok(vec![0, 1]));
        assert_eq!(memory.machine()[&0].group, [0, 1]);
        assert_eq!(give(&mut memory, "d", 1), Ok(vec![0, 1]), "the nodes are a group now");
        assert!(give(&mut memory, "e", 8).is_err());
        memory.release("c");
        memory.release("d");
        assert_eq!(memory, two());
    }

    #[test]
    fn a_place_that_is_too_small_is_widened() {
        let mut memory = two();
        let half = Hint { affinity: Some(NumaMask::of([1])), preferred: false };
        memory.allocate(&who("p", "c", &[]), &amount(12), half, &mut Reusable::new()).unwrap();
        assert_eq!(memory.nodes("p", "c"), NumaMask::of([0, 1]));
    }

    #[test]
    fn init_containers_give_theirs_on() {
        let mut memory = two();
        let mut reusable = Reusable::new();
        let on = Hint { affinity: Some(NumaMask::of([1])), preferred: true };
        memory.allocate(&who("p", "init1", &[]), &amount(4), on, &mut reusable).unwrap();
        memory.allocate(&who("p", "init2", &["init1"]), &amount(6), on, &mut reusable).unwrap();
        memory.allocate(&who("p", "c", &["init1", "init2"]), &amount(3), on, &mut reusable).unwrap();
        let sizes: Vec<u64> = memory.assignments()["p"].values().map(|b| b[0].size).collect();
        assert_eq!((sizes, memory.machine()[&1].tables[MEMORY].reserved), (vec![3, 0, 3], 6));
        memory.release("p");
        assert_eq!(memory, two());
    }

    #[test]
    fn reservations_must_add_up() {
        let whole = amount(100);
        let check = |of: &[(i64, u64)]| {
            let reserved = of.iter().map(|(n, size)| (*n, amount(*size))).collect();
            check_reserved(&[0, 1], &reserved, &whole, &|n| n.to_string()).err().unwrap_or_default()
        };
        assert_eq!(check(&[(0, 60), (1, 40)]), "");
        assert_eq!(
            check(&[(0, 60)]),
            "the total amount \"60\" of type \"memory\" is not equal to the value \"100\" determined by Node Allocatable feature"
        );
        assert!(check(&[(7, 100)]).contains("references a NUMA node 7 that does not exist"));
    }

    #[test]
    fn huge_pages_have_tables_of_their_own() {
        let bank = Bank { total: 100 << 20, huge_pages: vec![(2 << 20, 5)] };
        let memory = Memory::new(&BTreeMap::from([(0, bank)]), &BTreeMap::new());
        let table = |kind: &str| memory.machine()[&0].tables[kind].allocatable >> 20;
        assert_eq!((table("hugepages-2Mi"), table(MEMORY)), (10, 90));
    }

    proptest! {
        /// Whatever is given and taken back: what containers have is what is taken from the nodes, and what is written down can be taken over.
        #[test]
        fn books_balance(steps in prop::collection::vec((0u8..5, prop::collection::vec(0u64..12, 1..4), any::<bool>()), 0..25)) {
            let mut memory = two();
            for (pod, sizes, end) in steps {
                let pod = format!("p{pod}");
                memory.release(&pod);
                if end {
                    continue;
                }
                let mut reusable = Reusable::new();
                let names = ["init1", "init2", "c"];
                for (i, size) in sizes.iter().enumerate() {
                    let name = if i + 1 == sizes.len() { "c" } else { names[i] };
                    let inits: Vec<&str> = names[..i].to_vec();
                    if memory.allocate(&who(&pod, name, &inits), &amount(*size), ANY, &mut reusable).is_err() {
                        memory.release(&pod);
                        break;
                    }
                }
                let blocks: u64 = memory.assignments().values().flat_map(BTreeMap::values).flatten().map(|b| b.size).sum();
                let reserved: u64 = memory.machine().values().map(|n| n.tables[MEMORY].reserved).sum();
                prop_assert_eq!(blocks, reserved);
                for node in memory.machine().values() {
                    let t = node.tables[MEMORY];
                    prop_assert_eq!(t.free + t.reserved, t.allocatable);
                }
                let mut again = two();
                prop_assert_eq!(again.restore(memory.machine().clone(), memory.assignments().clone()), Ok(()));
            }
        }
    }
}
