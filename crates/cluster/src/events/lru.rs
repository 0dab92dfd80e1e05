//! A map that forgets what was not used for longest.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

#[derive(Debug)]
pub(crate) struct Lru<K, V> {
    capacity: usize,
    tick: u64,
    entries: HashMap<K, (u64, V)>,
    order: BTreeMap<u64, K>,
}

impl<K: Hash + Eq + Clone, V> Lru<K, V> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), tick: 0, entries: HashMap::new(), order: BTreeMap::new() }
    }

    /// The value, made when absent; counts as a use.
    pub(crate) fn entry(&mut self, key: &K, make: impl FnOnce() -> V) -> &mut V {
        self.tick += 1;
        let tick = self.tick;
        if !self.entries.contains_key(key)
            && self.entries.len() >= self.capacity
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
        let (used, value) = self.entries.entry(key.clone()).or_insert_with(|| (tick, make()));
        if *used != tick {
            self.order.remove(used);
            *used = tick;
        }
        self.order.insert(tick, key.clone());
        value
    }

    /// The value if there is one; counts as a use.
    pub(crate) fn get(&mut self, key: &K) -> Option<&mut V> {
        if !self.entries.contains_key(key) {
            return None;
        }
        self.tick += 1;
        let tick = self.tick;
        let (used, value) = self.entries.get_mut(key)?;
        self.order.remove(used);
        *used = tick;
        self.order.insert(tick, key.clone());
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut lru = Lru::new(2);
        lru.entry(&"a", || 1);
        lru.entry(&"b", || 2);
        assert_eq!(lru.get(&"a"), Some(&mut 1));
        lru.entry(&"c", || 3);
        assert_eq!((lru.get(&"a").copied(), lru.get(&"b").copied(), lru.get(&"c").copied()), (Some(1), None, Some(3)));
        *lru.entry(&"a", || 9) += 1;
        assert_eq!((lru.get(&"a").copied(), lru.order.len()), (Some(2), 2));
    }
}
