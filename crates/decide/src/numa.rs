//! Sets of NUMA nodes, and hints about where resources of a container could come from (KEP-693).

use std::fmt;

/// A set of NUMA nodes, numbers 0 to 63.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NumaMask(u64);

impl NumaMask {
    /// No node.
    pub const EMPTY: Self = Self(0);

    /// The nodes of these numbers; numbers that no mask can hold are left out.
    pub fn of(nodes: impl IntoIterator<Item = i64>) -> Self {
        Self(nodes.into_iter().filter(|n| (0..64).contains(n)).fold(0, |bits, n| bits | 1 << n))
    }

    /// How many nodes are in it.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// True when no node is in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True when this node is in it.
    pub fn has(self, node: i64) -> bool {
        (0..64).contains(&node) && self.0 & (1 << node) != 0
    }

    /// True when one of these nodes is in it.
    pub fn has_any(self, nodes: &[i64]) -> bool {
        nodes.iter().any(|n| self.has(*n))
    }

    /// The nodes in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The nodes in either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True when every node of this one is in the other.
    pub fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }

    /// Node numbers, ascending.
    pub fn nodes(self) -> impl Iterator<Item = i64> {
        (0..64).filter(move |n| self.has(*n))
    }

    /// True when it is to be preferred for being narrower; of two of one size, the one with the lower nodes (a smaller number) is.
    pub fn is_narrower(self, than: Self) -> bool {
        if self.count() == than.count() { self.0 < than.0 } else { self.count() < than.count() }
    }

    /// Every set of at least one of these nodes, small sets first, and in one size those with lower nodes first.
    pub fn subsets(nodes: &[i64]) -> Vec<Self> {
        let nodes: Vec<i64> = Self::of(nodes.iter().copied()).nodes().collect();
        let mut all: Vec<Self> = vec![Self::EMPTY];
        for node in nodes {
            let with: Vec<Self> = all.iter().map(|set| set.or(Self::of([node]))).collect();
            all.extend(with);
        }
        all.remove(0);
        all.sort_by(|a, b| a.count().cmp(&b.count()).then_with(|| a.nodes().cmp(b.nodes())));
        all
    }
}

impl fmt::Display for NumaMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02b}", self.0)
    }
}

/// Where a resource could come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hint {
    /// Nodes that together can give it; None: it does not matter.
    pub affinity: Option<NumaMask>,
    /// No narrower set could ever give it.
    pub preferred: bool,
}

/// Hints of one resource; None: the resource has no preference.
pub type Hints = Option<Vec<Hint>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_come_small_first() {
        let all: Vec<String> = NumaMask::subsets(&[0, 1, 2]).iter().map(ToString::to_string).collect();
        assert_eq!(all, ["01", "10", "100", "11", "101", "110", "111"]);
        assert!(NumaMask::subsets(&[]).is_empty());
    }

    #[test]
    fn sets() {
        let (a, b) = (NumaMask::of([0, 2]), NumaMask::of([2, 3, 99, -1]));
        assert_eq!(a.and(b), NumaMask::of([2]));
        assert_eq!(a.or(b).nodes().collect::<Vec<_>>(), [0, 2, 3]);
        assert!(NumaMask::of([2]).is_subset(a) && !a.is_subset(b));
        assert!(NumaMask::of([3]).is_narrower(a) && NumaMask::of([1]).is_narrower(NumaMask::of([2])));
        assert!(!a.has(-1) && !a.has(64) && a.has_any(&[5, 2]));
    }
}
