//! The pod's own cgroup in a resize: whether it stands as it should, in which order it is changed, and whether memory may be taken away.

use model::cgroup::CgroupResources;

use crate::resources::{CPU, MEMORY, cpu};

/// Bytes to which the kernel rounds memory limits down, at least.
const PAGE: i64 = 4096;

/// True when a pod's cgroup has other CPU and memory settings than it should. On cgroup v2 shares are known only as a weight (`v2`).
pub fn cgroup_differs(has: &CgroupResources, due: &CgroupResources, v2: bool) -> bool {
    let weight = |shares: u64| if v2 { cpu::weight(shares) } else { shares };
    let shares = matches!((has.cpu_shares, due.cpu_shares), (Some(h), Some(d)) if weight(h) != weight(d));
    let none = |limit: i64| if limit <= 0 { -1 } else { limit };
    let quota = matches!((has.cpu_quota, due.cpu_quota), (Some(h), Some(d)) if d != 0 && none(h) != none(d));
    let memory = match (has.memory_limit, due.memory_limit) {
        (Some(h), Some(d)) if d != 0 => none(h) != none(d) && h != d - d.rem_euclid(PAGE),
        _ => false,
    };
    shares || quota || memory
}

/// Why memory limits cannot be lowered, in Go's words: each new limit must be above what is used. `pod`: the pod's new limit and what it uses, when it is
/// to be lowered; `containers`: the same of containers, by name. Usage None: not known.
pub fn memory_faults(pod: Option<(i64, Option<u64>)>, containers: &[(String, i64, Option<u64>)]) -> Option<String> {
    let over = |limit: i64, used: u64| used >= u64::try_from(limit).unwrap_or(0);
    let mut faults = Vec::new();
    match pod {
        Some((_, None)) => faults.push("missing pod memory usage".to_owned()),
        Some((limit, Some(used))) if over(limit, used) => {
            faults.push(format!("attempting to set pod memory limit ({limit}) below current usage ({used})"));
        }
        _ => {}
    }
    for (name, limit, used) in containers {
        match used {
            None => faults.push(format!("missing container {name:?} memory usage")),
            Some(used) if over(*limit, *used) => faults.push(format!(
                "attempting to set container {name:?} memory limit ({limit}) below current usage ({used})"
            )),
            Some(_) => {}
        }
    }
    let text = match faults.as_slice() {
        [] => return None,
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    };
    Some(format!("cannot decrease memory limits: {text}"))
}

/// CPU or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory.
    Memory,
    /// CPU.
    Cpu,
}

impl Kind {
    /// The resource's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => MEMORY,
            Self::Cpu => CPU,
        }
    }
}

/// `a` limits to less than `b` does; nothing and 0 do not limit.
pub fn less(a: i64, b: Option<i64>) -> bool {
    let amount = |limit: i64| if limit <= 0 { i64::MAX } else { limit };
    amount(a) < b.map_or(i64::MAX, amount)
}

/// What is set in `change`, else what was.
pub fn merge(current: &CgroupResources, change: &CgroupResources) -> CgroupResources {
    CgroupResources {
        cpu_shares: change.cpu_shares.or(current.cpu_shares),
        cpu_quota: change.cpu_quota.or(current.cpu_quota),
        cpu_period: change.cpu_period.or(current.cpu_period),
        memory_limit: change.memory_limit.or(current.memory_limit),
        ..current.clone()
    }
}

/// What is written into the pod's cgroup before its containers change, and after. Where it grows, limits come before requests; where it shrinks, after
/// them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CgroupSteps {
    /// Before the containers change, in this order.
    pub before: Vec<CgroupResources>,
    /// After the containers changed, in this order.
    pub after: Vec<CgroupResources>,
}

impl CgroupSteps {
    /// From what the cgroup has to what it is to have.
    pub fn new(kind: Kind, current: &CgroupResources, due: &CgroupResources) -> Self {
        let mut steps = Self::default();
        let none = |limit: i64| if limit <= 0 { -1 } else { limit };
        match kind {
            Kind::Memory => {
                let write = CgroupResources { memory_limit: due.memory_limit, ..Default::default() };
                let due = due.memory_limit.filter(|d| *d != 0);
                if let Some(due) = due.filter(|due| none(*due) != none(current.memory_limit.unwrap_or(-1))) {
                    let list = if less(due, current.memory_limit) { &mut steps.after } else { &mut steps.before };
                    list.push(write);
                }
            }
            Kind::Cpu => {
                let quota = due.cpu_quota.filter(|d| *d != 0);
                let limit = quota.filter(|due| none(*due) != none(current.cpu_quota.unwrap_or(-1)));
                let shares = due.cpu_shares.filter(|due| Some(*due) != current.cpu_shares);
                let write_limit =
                    CgroupResources { cpu_quota: quota, cpu_period: due.cpu_period, ..Default::default() };
                let write_shares = CgroupResources { cpu_shares: shares, ..Default::default() };
                let shares_down = shares.is_some_and(|due| current.cpu_shares.is_some_and(|has| due < has));
                let limit_down = limit.is_some_and(|due| less(due, current.cpu_quota));
                steps.before.extend(limit.filter(|_| !limit_down).map(|_| write_limit.clone()));
                steps.before.extend(shares.filter(|_| !shares_down).map(|_| write_shares.clone()));
                steps.after.extend(shares.filter(|_| shares_down).map(|_| write_shares));
                steps.after.extend(limit.filter(|_| limit_down).map(|_| write_limit));
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(memory: i64, quota: i64, shares: u64) -> CgroupResources {
        CgroupResources {
            memory_limit: Some(memory),
            cpu_quota: Some(quota),
            cpu_period: Some(100_000),
            cpu_shares: Some(shares),
            ..Default::default()
        }
    }

    /// `m`, `q` and `s` for what is written, in order.
    fn show(list: &[CgroupResources]) -> String {
        let word = |c: &CgroupResources| match (c.memory_limit, c.cpu_quota, c.cpu_shares) {
            (Some(m), None, None) => format!("m{m}"),
            (None, Some(q), None) => format!("q{q}"),
            (None, None, Some(s)) => format!("s{s}"),
            other => panic!("more than one thing at once: {other:?}"),
        };
        list.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_pod_grows_first_and_shrinks_last() {
        for (current, due, memory, cpu) in [
            (cgroup(100, 100, 10), cgroup(100, 100, 10), "|", "|"),
            (cgroup(100, 100, 10), cgroup(200, 200, 20), "m200|", "q200 s20|"),
            (cgroup(200, 200, 20), cgroup(100, 100, 10), "|m100", "|s10 q100"),
            (cgroup(200, 200, 10), cgroup(100, 100, 20), "|m100", "s20|q100"),
            // From no limit to one it shrinks, and back it grows.
            (cgroup(-1, -1, 10), cgroup(100, 100, 10), "|m100", "|q100"),
            (cgroup(100, 100, 10), cgroup(-1, -1, 10), "m-1|", "q-1|"),
        ] {
            for (kind, expected) in [(Kind::Memory, memory), (Kind::Cpu, cpu)] {
                let steps = CgroupSteps::new(kind, &current, &due);
                assert_eq!(format!("{}|{}", show(&steps.before), show(&steps.after)), expected, "{current:?} {due:?}");
            }
        }
        // What is not to be limited is left as it is.
        let open = CgroupResources { memory_limit: None, cpu_quota: None, ..cgroup(0, 0, 10) };
        assert_eq!(CgroupSteps::new(Kind::Memory, &cgroup(100, 100, 10), &open), CgroupSteps::default());
        assert_eq!(CgroupSteps::new(Kind::Cpu, &cgroup(100, 100, 10), &open), CgroupSteps::default());
    }
}
