//! The topology manager (KEP-693): one place for a container's CPUs, memory and devices out of the hints of their managers, and whether that place
//! is good enough.

use std::collections::BTreeMap;

use crate::numa::{Hint, Hints, NumaMask};

/// `topologyManagerPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Places are not looked at.
    #[default]
    None,
    /// The best place there is, whatever it is.
    BestEffort,
    /// Refused, when no narrower place than the best would ever do.
    Restricted,
    /// Refused, unless all of it is on one NUMA node.
    SingleNumaNode,
}

/// `topologyManagerScope`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Each container on its own.
    #[default]
    Container,
    /// All containers of a pod in one place.
    Pod,
}

/// The machine's NUMA nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// All of them.
    pub nodes: Vec<i64>,
    /// Distance from one to another, as the firmware tells.
    pub distances: BTreeMap<(i64, i64), u32>,
}

/// How places are chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// The policy.
    pub policy: Policy,
    /// What a place is for.
    pub scope: Scope,
    /// `prefer-closest-numa-nodes`.
    pub prefer_closest: bool,
    /// The machine.
    pub machine: Machine,
}

/// Up to how many NUMA nodes places can be looked at, unless `max-allowable-numa-nodes` says otherwise.
pub const MAX_NODES: usize = 8;

impl Placement {
    /// A policy on a machine; `max_nodes`: `max-allowable-numa-nodes`.
    ///
    /// # Errors
    /// It has too many NUMA nodes, in Go's words.
    pub fn new(
        policy: Policy,
        scope: Scope,
        prefer_closest: bool,
        max_nodes: Option<usize>,
        machine: Machine,
    ) -> Result<Self, String> {
        let most = max_nodes.unwrap_or(MAX_NODES);
        if policy != Policy::None && machine.nodes.len() > most {
            return Err(format!(
                "unsupported on machines with more than {most} NUMA Nodes, current number of NUMA Nodes: {}",
                machine.nodes.len()
            ));
        }
        Ok(Self { policy, scope, prefer_closest, machine })
    }

    /// True when what is admitted is on as few NUMA nodes as can be.
    pub fn is_guaranteed(&self) -> bool {
        self.policy == Policy::SingleNumaNode
    }

    /// The best place for resources with these hints; the second value: it is good enough.
    pub fn best(&self, hints: &[Hints]) -> (Hint, bool) {
        let any = |preferred| vec![Hint { affinity: None, preferred }];
        let mut all: Vec<Vec<Hint>> = hints
            .iter()
            .map(|of| match of {
                None => any(true),
                Some(none) if none.is_empty() => any(false),
                Some(hints) => hints.clone(),
            })
            .collect();
        if self.policy == Policy::SingleNumaNode {
            for of in &mut all {
                of.retain(|h| h.preferred && h.affinity.is_none_or(|mask| mask.count() == 1));
            }
        }
        let everything = NumaMask::of(self.machine.nodes.iter().copied());
        // What the resource that needs the most nodes needs at least.
        let narrowest = |of: &Vec<Hint>| {
            of.iter().filter_map(|h| h.affinity).reduce(|best, m| if m.is_narrower(best) { m } else { best })
        };
        let aim = all.iter().filter_map(narrowest).map(NumaMask::count).max().unwrap_or(0);
        let mut best: Option<(NumaMask, bool)> = None;
        let mut merged = Vec::new();
        combine(&all, everything, &mut merged);
        for candidate in merged {
            best = self.better(best, candidate, aim);
        }
        let (mask, preferred) = best.unwrap_or((everything, false));
        let affinity = Some(mask).filter(|m| self.policy != Policy::SingleNumaNode || *m != everything);
        let good = match self.policy {
            Policy::None | Policy::BestEffort => true,
            Policy::Restricted | Policy::SingleNumaNode => preferred,
        };
        (Hint { affinity, preferred }, good)
    }

    fn better(
        &self,
        best: Option<(NumaMask, bool)>,
        candidate: (NumaMask, bool),
        aim: usize,
    ) -> Option<(NumaMask, bool)> {
        if candidate.0.is_empty() {
            return best;
        }
        let Some(best) = best else { return Some(candidate) };
        let (has, new) = (best.0.count(), candidate.0.count());
        let takes = match (best.1, candidate.1) {
            (false, true) => true,
            (true, false) => false,
            (true, true) => self.is_fitter(candidate.0, best.0),
            // Neither is preferred: as many nodes as the aim, or else just below it.
            (false, false) if has > aim => self.is_fitter(candidate.0, best.0),
            (false, false) if has == aim => new == aim && self.is_fitter(candidate.0, best.0),
            (false, false) if new > aim => false,
            (false, false) => new == aim || new > has || (new == has && self.is_fitter(candidate.0, best.0)),
        };
        Some(if takes { candidate } else { best })
    }

    fn is_fitter(&self, a: NumaMask, b: NumaMask) -> bool {
        if a == b {
            return false;
        }
        if self.prefer_closest && self.policy != Policy::SingleNumaNode && a.count() == b.count() {
            let (near_a, near_b) = (self.spread(a), self.spread(b));
            if near_a != near_b {
                return near_a < near_b;
            }
        }
        a.is_narrower(b)
    }

    /// The average distance between nodes of a set.
    fn spread(&self, mask: NumaMask) -> f64 {
        let pairs = mask.nodes().flat_map(|a| mask.nodes().map(move |b| (a, b)));
        let sum: f64 = pairs.map(|pair| f64::from(self.machine.distances.get(&pair).copied().unwrap_or(0))).sum();
        sum / (mask.count() * mask.count()).max(1) as f64
    }
}

/// Every combination of one hint of each resource, merged: the nodes that are in all of them; preferred, when each of them is and all are the same.
fn combine(all: &[Vec<Hint>], everything: NumaMask, out: &mut Vec<(NumaMask, bool)>) {
    // Combinations that merge to the same need not be told apart: what counts of those so far is the nodes in all of them, the one set that all
    // named (while it is one), and whether all were preferred.
    #[derive(Clone, Copy, PartialEq)]
    struct SoFar {
        nodes: NumaMask,
        named: Option<NumaMask>,
        preferred: bool,
    }
    let mut so_far = vec![SoFar { nodes: everything, named: None, preferred: true }];
    for hints in all {
        let mut next: Vec<SoFar> = Vec::new();
        for before in &so_far {
            for hint in hints {
                let mut now = *before;
                now.preferred &= hint.preferred;
                if let Some(mask) = hint.affinity {
                    now.preferred &= before.named.is_none_or(|named| named == mask);
                    now.named = now.named.or(Some(mask));
                    now.nodes = now.nodes.and(mask);
                }
                if !next.contains(&now) {
                    next.push(now);
                }
            }
        }
        so_far = next;
    }
    out.extend(so_far.into_iter().map(|s| (s.nodes, s.preferred)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(nodes: &[i64], preferred: bool) -> Hint {
        Hint { affinity: (!nodes.is_empty()).then(|| NumaMask::of(nodes.iter().copied())), preferred }
    }

    fn placement(policy: Policy, nodes: i64) -> Placement {
        let machine = Machine { nodes: (0..nodes).collect(), ..Machine::default() };
        Placement::new(policy, Scope::Container, false, None, machine).unwrap()
    }

    /// Nodes (`*`: any), `!` when preferred, `-` when refused.
    fn best(policy: Policy, nodes: i64, hints: &[Hints]) -> String {
        let (hint, good) = placement(policy, nodes).best(hints);
        let shown =
            hint.affinity.map_or("*".into(), |m| m.nodes().map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        format!("{shown}{}{}", if hint.preferred { "!" } else { "" }, if good { "" } else { "-" })
    }

    #[test]
    fn places() {
        let either = || Some(vec![hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
        let second = || Some(vec![hint(&[1], true), hint(&[0, 1], false)]);
        let both = || Some(vec![hint(&[0, 1], true)]);
        let cases: &[(&[Hints], [&str; 3])] = &[
            (&[], ["0,1!", "0,1!", "*!"]),
            (&[None, None], ["0,1!", "0,1!", "*!"]),
            (&[either()], ["0!", "0!", "0!"]),
            (&[either(), second()], ["1!", "1!", "1!"]),
            (&[either(), None], ["0!", "0!", "0!"]),
            (&[Some(vec![])], ["0,1", "0,1-", "*-"]),
            (&[either(), Some(vec![])], ["0", "0-", "*-"]),
            (&[both()], ["0,1!", "0,1!", "*-"]),
            (&[both(), either()], ["0,1", "0,1-", "*-"]),
            (&[Some(vec![hint(&[0], true)]), second()], ["0", "0-", "*-"]),
        ];
        for (hints, want) in cases {
            let policies = [Policy::BestEffort, Policy::Restricted, Policy::SingleNumaNode];
            assert_eq!(policies.map(|p| best(p, 2, hints)), *want, "{hints:?}");
        }
    }

    #[test]
    fn near_nodes() {
        let distances = BTreeMap::from([
            ((0, 1), 30),
            ((1, 0), 30),
            ((1, 2), 12),
            ((2, 1), 12),
            ((0, 0), 10),
            ((1, 1), 10),
            ((2, 2), 10),
        ]);
        let machine = Machine { nodes: vec![0, 1, 2], distances };
        let pairs = || Some(vec![hint(&[0, 1], true), hint(&[1, 2], true)]);
        let with = |near| {
            Placement::new(Policy::BestEffort, Scope::Pod, near, None, machine.clone()).unwrap().best(&[pairs()])
        };
        assert_eq!(with(false).0.affinity, Some(NumaMask::of([0, 1])));
        assert_eq!(with(true).0.affinity, Some(NumaMask::of([1, 2])));
    }

    #[test]
    fn big_machines() {
        let machine = || Machine { nodes: (0..9).collect(), ..Machine::default() };
        let with = |policy, most| Placement::new(policy, Scope::Container, false, most, machine());
        assert_eq!(
            with(Policy::Restricted, None).unwrap_err(),
            "unsupported on machines with more than 8 NUMA Nodes, current number of NUMA Nodes: 9"
        );
        assert!(with(Policy::Restricted, Some(9)).is_ok() && with(Policy::None, None).is_ok());
    }
}
