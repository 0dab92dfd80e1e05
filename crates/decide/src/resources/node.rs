//! What of the node is left for pods: allocatable resources and the `kubepods` cgroup.

use std::collections::BTreeMap;

use model::cgroup::CgroupResources;
use model::quantity::{Format, Quantity};

use super::pod_cgroup::hugepage_limits;
use super::{CPU, EPHEMERAL_STORAGE, MEMORY, PIDS, ResourceList, cpu, hugepages};

/// A hard eviction threshold as a reserve.
#[derive(Clone, Debug, PartialEq)]
pub enum Reserve {
    /// An amount.
    Quantity(Quantity),
    /// A part of the capacity, 0…1, in the single precision that thresholds are kept in.
    Percentage(f32),
}

impl Reserve {
    fn of(&self, capacity: &Quantity) -> Quantity {
        match self {
            Self::Quantity(amount) => amount.clone(),
            Self::Percentage(part) => {
                Quantity::from_value((capacity.value() as f64 * f64::from(*part)) as i64, Format::BinarySI)
            }
        }
    }
}

/// The hard eviction thresholds that reduce allocatable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvictionReserve {
    /// `memory.available`.
    pub memory_available: Option<Reserve>,
    /// `nodefs.available`.
    pub nodefs_available: Option<Reserve>,
}

/// What is kept from pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reservations {
    /// `kubeReserved`.
    pub kube: ResourceList,
    /// `systemReserved`.
    pub system: ResourceList,
    /// Hard eviction thresholds.
    pub eviction: EvictionReserve,
}

impl Reservations {
    /// Everything reserved, by the resources of `capacity`; without zeros.
    pub fn total(&self, capacity: &ResourceList) -> ResourceList {
        let mut total = ResourceList::new();
        for (name, amount) in capacity {
            let mut reserved = Quantity::from_value(0, Format::DecimalSI);
            let threshold = match name.as_str() {
                MEMORY => self.eviction.memory_available.as_ref(),
                EPHEMERAL_STORAGE => self.eviction.nodefs_available.as_ref(),
                _ => None,
            };
            for part in self.system.get(name).into_iter().chain(self.kube.get(name)) {
                reserved.add(part);
            }
            if let Some(threshold) = threshold {
                reserved.add(&threshold.of(amount));
            }
            if !reserved.is_zero() {
                total.insert(name.clone(), reserved);
            }
        }
        total
    }
}

/// `a - b`, not below zero.
fn less(amount: &Quantity, reserved: &Quantity) -> Quantity {
    let mut left = amount.clone();
    left.sub(reserved);
    if left.sign() < 0 { Quantity::from_value(0, left.format()) } else { left }
}

/// `status.allocatable`: capacity without reservations and hard eviction thresholds, memory also without huge pages.
pub fn allocatable(capacity: &ResourceList, reservations: &Reservations) -> ResourceList {
    let reserved = reservations.total(capacity);
    let mut left: ResourceList = capacity
        .iter()
        .map(|(name, amount)| (name.clone(), reserved.get(name).map_or_else(|| amount.clone(), |r| less(amount, r))))
        .collect();
    for (_, pages) in capacity.iter().filter(|(name, _)| hugepages::is_resource(name)) {
        if let Some(memory) = left.get_mut(MEMORY) {
            *memory = less(memory, pages);
        }
    }
    left
}

/// Faults of reservations that exceed the capacity, in the agent's words.
///
/// # Errors
/// `invalid Node Allocatable configuration. …`.
pub fn validate_reservations(capacity: &ResourceList, reservations: &Reservations) -> Result<(), String> {
    let faults: Vec<String> = reservations
        .total(capacity)
        .iter()
        .filter(|(name, reserved)| capacity.get(*name).is_none_or(|have| have < *reserved))
        .map(|(name, reserved)| {
            let have = capacity.get(name).map(ToString::to_string).unwrap_or_default();
            format!(
                "Resource \"{name}\" has a reservation of {reserved} but capacity of {have}. Expected capacity >= reservation."
            )
        })
        .collect();
    if faults.is_empty() {
        Ok(())
    } else {
        Err(format!("invalid Node Allocatable configuration. {}", faults.join(" ")))
    }
}

/// What is written into `kubepods`. `capacity` also has `pid` (the smaller of `pid_max` and `threads-max`). `enforce_pods`: `pods` is in
/// `enforceNodeAllocatable`; eviction thresholds are not subtracted, so that eviction comes before the kernel. `cpus`: all that are online.
pub fn kubepods_resources(
    capacity: &ResourceList,
    reservations: &Reservations,
    enforce_pods: bool,
    hugepage_sizes: &[String],
    cpus: &[usize],
) -> CgroupResources {
    let mut left = capacity.clone();
    if enforce_pods {
        for (name, amount) in &mut left {
            for reserved in [reservations.system.get(name), reservations.kube.get(name)].into_iter().flatten() {
                amount.sub(reserved);
            }
            if amount.sign() < 0 {
                *amount = Quantity::from_value(0, amount.format());
            }
        }
    }
    let mut out = enforced_reservation(&left, false, hugepage_sizes);
    // Every CPU is no limit, but it makes systemd keep the cpuset controller on, which it would turn off again at its next reload.
    let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    out.unified.insert("cpuset.cpus".into(), list.join(","));
    out
}

/// What is written into the cgroup that `kubeReserved` or `systemReserved` is enforced on. `compressible_only`: CPU alone
/// (`kube-reserved-compressible`, `system-reserved-compressible`).
pub fn enforced_reservation(
    list: &ResourceList,
    compressible_only: bool,
    hugepage_sizes: &[String],
) -> CgroupResources {
    let mut out = CgroupResources {
        cpu_shares: list.get(CPU).map(|q| cpu::shares(q.milli_value())),
        ..CgroupResources::default()
    };
    if !compressible_only {
        out.memory_limit = list.get(MEMORY).map(Quantity::value);
        out.pids_limit = list.get(PIDS).map(Quantity::value);
        out.hugepage_limits = hugepage_limits(list, hugepage_sizes);
    }
    out
}

/// One of the groups that reservations are enforced on (`enforceNodeAllocatable`).
#[derive(Clone, Debug, PartialEq)]
pub struct ReservedGroup {
    /// `system` or `kube`.
    pub of: &'static str,
    /// CPU alone.
    pub compressible_only: bool,
    /// The group, as `systemReservedCgroup` or `kubeReservedCgroup` has it.
    pub group: String,
    /// What is written into it.
    pub resources: CgroupResources,
}

impl ReservedGroup {
    /// Go's message when it is done.
    pub fn done(&self) -> String {
        format!("Updated limits on {} reserved cgroup {}", self.of, self.group)
    }

    /// Go's message when it cannot be done, as `error` says.
    pub fn failed(&self, error: &str) -> String {
        let of = if self.of == "kube" { "Kube" } else { "System" };
        let what = if self.compressible_only { "Reserved Compressible" } else { "Reserved" };
        format!("Failed to enforce {of} {what} Cgroup Limits on {:?}: {error}", self.group)
    }
}

/// The groups that the keys of `enforceNodeAllocatable` name besides `pods`, in the order in which they are written. `groups`: `systemReservedCgroup` and
/// `kubeReservedCgroup`. `protect`: gate MemoryQoS on v2, by which the reserved memory is also kept from reclaim.
pub fn reserved_groups(
    enforce: &[String],
    groups: (&str, &str),
    reservations: &Reservations,
    hugepage_sizes: &[String],
    protect: bool,
) -> Vec<ReservedGroup> {
    let (system, kube) = (("system", groups.0, &reservations.system), ("kube", groups.1, &reservations.kube));
    let keys = [
        ("system-reserved", system, false),
        ("kube-reserved", kube, false),
        ("system-reserved-compressible", system, true),
        ("kube-reserved-compressible", kube, true),
    ];
    keys.into_iter()
        .filter(|(key, ..)| enforce.iter().any(|e| e == key))
        .map(|(_, (of, group, list), compressible_only)| {
            let mut resources = enforced_reservation(list, compressible_only, hugepage_sizes);
            if let Some(memory) = resources.memory_limit.filter(|_| protect) {
                resources.unified.insert("memory.min".into(), memory.to_string());
            }
            ReservedGroup { of, compressible_only, group: group.to_owned(), resources }
        })
        .collect()
}

/// The resources of `kubeReserved` or `systemReserved` as configured.
///
/// # Errors
/// Names the resource that cannot be reserved or the value that is not a quantity of at least zero.
pub fn reserved_list(config: &BTreeMap<String, String>) -> Result<ResourceList, String> {
    config
        .iter()
        .map(|(name, text)| {
            if ![CPU, MEMORY, EPHEMERAL_STORAGE, PIDS].contains(&name.as_str()) {
                return Err(format!("cannot reserve \"{name}\" resource"));
            }
            let amount = Quantity::parse(text)
                .map_err(|e| format!("failed to parse quantity \"{text}\" for \"{name}\" resource: {e}"))?;
            if amount.sign() < 0 {
                return Err(format!("resource quantity for \"{name}\" cannot be negative: {text}"));
            }
            Ok((name.clone(), amount))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::show;

    fn list(items: &[(&str, &str)]) -> ResourceList {
        items.iter().map(|(n, q)| (n.to_string(), Quantity::parse(q).expect("quantity"))).collect()
    }

    fn node() -> (ResourceList, Reservations) {
        let capacity = list(&[
            ("cpu", "4"),
            ("memory", "8Gi"),
            ("ephemeral-storage", "100Gi"),
            ("hugepages-2Mi", "1Gi"),
            ("pid", "32768"),
        ]);
        let reservations = Reservations {
            kube: list(&[("cpu", "500m"), ("memory", "512Mi"), ("pid", "1000")]),
            system: list(&[("cpu", "500m"), ("memory", "512Mi")]),
            eviction: EvictionReserve {
                memory_available: Some(Reserve::Quantity(Quantity::parse("100Mi").expect("quantity"))),
                nodefs_available: Some(Reserve::Percentage(0.10)),
            },
        };
        (capacity, reservations)
    }

    #[test]
    fn allocatable_is_less_by_all_reserves() {
        let (capacity, reservations) = node();
        // 8Gi − 1Gi − 100Mi − 1Gi of huge pages; a tenth in single precision is a little more than a tenth.
        assert_eq!(
            show(&allocatable(&capacity, &reservations)),
            "cpu=3 ephemeral-storage=96636764000 hugepages-2Mi=1Gi memory=6044Mi pid=31768"
        );
        assert_eq!(show(&allocatable(&list(&[("memory", "1Gi")]), &reservations)), "memory=0");
        assert_eq!(validate_reservations(&capacity, &reservations), Ok(()));
        assert_eq!(
            validate_reservations(&list(&[("memory", "1Gi")]), &reservations),
            Err("invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 1124Mi but capacity of 1Gi. \
                 Expected capacity >= reservation."
                .to_string())
        );
    }

    #[test]
    fn kubepods_keeps_room_for_eviction() {
        let (capacity, reservations) = node();
        let sizes = ["1GB".to_string(), "2MB".to_string()];
        let enforced = kubepods_resources(&capacity, &reservations, true, &sizes, &[0, 1, 3]);
        assert_eq!(enforced.memory_limit, Some(7 << 30));
        assert_eq!((enforced.cpu_shares, enforced.pids_limit), (Some(3072), Some(31_768)));
        assert_eq!(enforced.unified, BTreeMap::from([("cpuset.cpus".into(), "0,1,3".into())]));
        assert_eq!(enforced.hugepage_limits, BTreeMap::from([("1GB".into(), 0), ("2MB".into(), 1 << 30)]));
        let open = kubepods_resources(&capacity, &reservations, false, &sizes, &[0]);
        assert_eq!((open.memory_limit, open.cpu_shares, open.pids_limit), (Some(8 << 30), Some(4096), Some(32_768)));

        let reserved = enforced_reservation(&reservations.kube, true, &sizes);
        assert_eq!(reserved, CgroupResources { cpu_shares: Some(512), ..CgroupResources::default() });
    }

    #[test]
    fn groups_of_reservations() {
        let (_, reservations) = node();
        let groups = |enforce: &[&str], protect| {
            let enforce: Vec<_> = enforce.iter().map(|e| (*e).to_owned()).collect();
            reserved_groups(&enforce, ("/system", "/kube.slice"), &reservations, &[], protect)
        };
        assert!(groups(&["pods"], true).is_empty());
        let both = groups(&["kube-reserved", "system-reserved-compressible", "pods"], true);
        assert_eq!((both[0].group.as_str(), both[1].group.as_str(), both.len()), ("/kube.slice", "/system", 2));
        assert_eq!(both[0].resources.unified["memory.min"], (512i64 << 20).to_string());
        assert_eq!((both[0].resources.cpu_shares, both[0].resources.pids_limit), (Some(512), Some(1000)));
        assert_eq!(both[1].resources, CgroupResources { cpu_shares: Some(512), ..CgroupResources::default() });
        assert!(groups(&["kube-reserved"], false)[0].resources.unified.is_empty());
        assert_eq!(both[0].done(), "Updated limits on kube reserved cgroup /kube.slice");
        assert_eq!(
            both[1].failed("no such group"),
            "Failed to enforce System Reserved Compressible Cgroup Limits on \"/system\": no such group"
        );
    }

    #[test]
    fn reserved_lists() {
        let config = BTreeMap::from([("pid".to_string(), "100".to_string()), ("cpu".to_string(), "1".to_string())]);
        assert_eq!(reserved_list(&config).map(|l| show(&l)), Ok("cpu=1 pid=100".into()));
        for (name, text, fault) in [
            ("cpu", "-1", "resource quantity for \"cpu\" cannot be negative: -1"),
            ("pods", "1", "cannot reserve \"pods\" resource"),
        ] {
            let config = BTreeMap::from([(name.to_string(), text.to_string())]);
            assert_eq!(reserved_list(&config), Err(fault.to_string()));
        }
    }
}
