//! Ranges of host ids for pods with `hostUsers: false` (KEP-127): who has which, and the file that says so to the next agent.
//!
//! Every pod has one range of the same length, uids and gids alike, that no other pod of the node has. Ranges are given out in turn, so that one that
//! was given back rests for as long as possible: files that its pod left behind keep their owner.

use std::collections::{BTreeMap, BTreeSet};

use cri_api::v1;
use model::pod::PodUid;
use serde::{Deserialize, Serialize};

/// Name of the file below `pods/UID`.
pub const FILE: &str = "userns";
/// Default of `userNamespaces.idsPerPod`; every length is a multiple of it.
pub const IDS_PER_POD: u32 = 65_536;

/// The ids that pods may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdPool {
    /// First id.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl IdPool {
    /// Every id above those of the host's own first `ids_per_pod`.
    pub fn all(ids_per_pod: u32) -> Self {
        Self { first: ids_per_pod, count: u32::MAX - (ids_per_pod - 1) }
    }

    /// What `getsubids kubelet` answers: one line `0: kubelet FIRST COUNT`.
    ///
    /// # Errors
    /// Go's message, when it is anything else.
    pub fn parse_getsubids(output: &str) -> Result<Self, String> {
        let mut lines = output.trim_matches('\n').split('\n');
        let (Some(line), None) = (lines.next(), lines.next()) else {
            return Err(format!("error parsing line {output:?}: it must contain only one line"));
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, first, count] = words[..] else { return Err(format!("invalid line {line:?}")) };
        let number = |text: &str| text.parse().map_err(|e| format!("error parsing line {line:?}: {e}"));
        Ok(Self { first: number(first)?, count: number(count)? })
    }
}

/// The book of ranges.
#[derive(Clone, Debug)]
pub struct Ranges {
    length: u32,
    /// Number of the pool's first range, counted in lengths from id 0.
    offset: u32,
    /// How many ranges the pool has.
    count: u32,
    used: BTreeSet<u32>,
    pods: BTreeMap<PodUid, u32>,
    /// Where the search for a free one begins.
    next: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    uid_mappings: Vec<Mapping>,
    gid_mappings: Vec<Mapping>,
}

#[derive(Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

impl Ranges {
    /// An empty book over `pool`, with ranges of `ids_per_pod` ids for up to `max_pods` pods.
    ///
    /// # Errors
    /// Go's message, when the pool does not fit.
    pub fn new(pool: IdPool, ids_per_pod: u32, max_pods: u32) -> Result<Self, String> {
        let (IdPool { first, count }, length) = (pool, ids_per_pod);
        if length == 0 || !length.is_multiple_of(IDS_PER_POD) {
            return Err(format!("kubelet user namespace length {length} is not a multiple of {IDS_PER_POD}"));
        }
        if !first.is_multiple_of(length) {
            return Err(format!("kubelet user assigned ID {first} is not a multiple of {length}"));
        }
        if first < length {
            // Id 0 of the host must never be mapped.
            return Err(format!("kubelet user assigned ID {first} must be greater or equal to {length}"));
        }
        if !count.is_multiple_of(length) {
            return Err(format!("kubelet user assigned IDs length {count} is not a multiple of {length}"));
        }
        if count / length < max_pods {
            return Err(format!("kubelet user assigned IDs are not enough to support {max_pods} pods"));
        }
        Ok(Self {
            length,
            offset: first / length,
            count: count / length,
            used: BTreeSet::new(),
            pods: BTreeMap::new(),
            next: 0,
        })
    }

    /// The pod's range: the one that it has, or a free one.
    ///
    /// # Errors
    /// All are taken.
    pub fn allocate(&mut self, pod: &PodUid) -> Result<Vec<v1::IdMapping>, String> {
        if let Some(index) = self.pods.get(pod) {
            return Ok(self.mapping(*index));
        }
        let free = (self.next..self.count).chain(0..self.next).find(|i| !self.used.contains(i));
        let index = free.ok_or("could not find an empty slot to allocate a user namespace")?;
        self.take(pod, index);
        Ok(self.mapping(index))
    }

    fn take(&mut self, pod: &PodUid, index: u32) {
        self.used.insert(index);
        self.pods.insert(pod.clone(), index);
        self.next = (index + 1) % self.count;
    }

    fn mapping(&self, index: u32) -> Vec<v1::IdMapping> {
        vec![v1::IdMapping { host_id: (self.offset + index) * self.length, container_id: 0, length: self.length }]
    }

    /// Takes over the range that a pod's file names.
    ///
    /// # Errors
    /// Go's message: the file says nothing that an agent with this configuration wrote, or the range is another pod's.
    pub fn record(&mut self, pod: &PodUid, file: &[u8]) -> Result<Vec<v1::IdMapping>, String> {
        let file: File =
            serde_json::from_slice(file).map_err(|e| format!("invalid user namespace mappings file: {e}"))?;
        let invalid = |why: &str| format!("invalid user namespace configuration: {why}");
        let [mapping] = &file.uid_mappings[..] else { return Err(invalid("no more than one mapping allowed.")) };
        if file.gid_mappings.len() != 1 {
            return Err(invalid("GID and UID mappings should be identical."));
        }
        if file.gid_mappings[0] != *mapping {
            return Err(invalid("GID and UID mapping should be identical"));
        }
        if mapping.container_id != 0 {
            return Err(invalid("UID 0 must be mapped"));
        }
        let (from, length) = (mapping.host_id, mapping.length);
        if length != self.length {
            return Err(format!("wrong user namespace length {length}"));
        }
        if !from.is_multiple_of(self.length) {
            return Err(format!("wrong user namespace offset specified {from}"));
        }
        let index = (from / self.length).checked_sub(self.offset).filter(|i| *i < self.count);
        let index = index.ok_or_else(|| format!("id {from} is out of range"))?;
        match self.pods.get(pod) {
            Some(known) if *known == index => {}
            Some(_) => return Err(format!("different user namespace range already used by pod \"{pod}\"")),
            None if self.used.contains(&index) => {
                return Err(format!("range picked for pod \"{pod}\" already taken"));
            }
            None => self.take(pod, index),
        }
        Ok(self.mapping(index))
    }

    /// Gives a pod's range back; true when it had one.
    pub fn release(&mut self, pod: &PodUid) -> bool {
        let had = self.pods.remove(pod);
        if let Some(index) = had {
            self.used.remove(&index);
        }
        had.is_some()
    }

    /// True when the pod has a range.
    pub fn holds(&self, pod: &PodUid) -> bool {
        self.pods.contains_key(pod)
    }
}

/// The content of the pod's file for a range of [`Ranges::allocate`].
pub fn file(mappings: &[v1::IdMapping]) -> Vec<u8> {
    let list = || {
        mappings
            .iter()
            .map(|m| Mapping { host_id: m.host_id, container_id: m.container_id, length: m.length })
            .collect()
    };
    // Numbers in lists cannot fail to be written.
    serde_json::to_vec(&File { uid_mappings: list(), gid_mappings: list() }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(n: u32) -> PodUid {
        PodUid::new(format!("p{n}"))
    }

    fn small(ranges: u32) -> Ranges {
        Ranges::new(IdPool { first: 65_536, count: ranges * 65_536 }, 65_536, ranges).expect("fits")
    }

    #[test]
    fn the_file_is_gos() {
        let mut ranges = Ranges::new(IdPool::all(65_536), 65_536, 110).expect("fits");
        let given = ranges.allocate(&uid(0)).expect("free");
        let text = file(&given);
        assert_eq!(
            String::from_utf8_lossy(&text),
            r#"{"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":0,"length":65536}]}"#
        );
        assert_eq!(ranges.allocate(&uid(0)), Ok(given.clone()), "asked twice, it is the same");
        let mut next = Ranges::new(IdPool::all(65_536), 65_536, 110).expect("fits");
        assert_eq!(next.record(&uid(0), &text), Ok(given.clone()));
        assert_eq!(next.record(&uid(0), &text), Ok(given.clone()));
        assert_ne!(next.allocate(&uid(1)), Ok(given));
        assert_eq!(next.record(&uid(2), &text), Err("range picked for pod \"p2\" already taken".into()));
        let other = String::from_utf8_lossy(&text).replace(":65536,\"c", ":131072,\"c");
        assert_eq!(
            next.record(&uid(0), other.as_bytes()),
            Err("different user namespace range already used by pod \"p0\"".into())
        );
    }

    #[test]
    fn files_of_another_making_are_refused() {
        let file = |host: u64, container: u32, length: u32| {
            let m = format!(r#"[{{"hostId":{host},"containerId":{container},"length":{length}}}]"#);
            format!(r#"{{"uidMappings":{m},"gidMappings":{m}}}"#)
        };
        let record = |text: &str| small(4).record(&uid(0), text.as_bytes());
        assert!(record(&file(65_536, 0, 65_536)).is_ok());
        for (text, why) in [
            (file(65_536, 0, 131_072), "wrong user namespace length 131072"),
            (file(65_537, 0, 65_536), "wrong user namespace offset specified 65537"),
            (file(0, 0, 65_536), "id 0 is out of range"),
            (file(5 * 65_536, 0, 65_536), "id 327680 is out of range"),
            (file(65_536, 1, 65_536), "invalid user namespace configuration: UID 0 must be mapped"),
            (
                r#"{"uidMappings":[],"gidMappings":[]}"#.into(),
                "invalid user namespace configuration: no more than one mapping allowed.",
            ),
        ] {
            assert_eq!(record(&text).expect_err("refused"), why);
        }
        assert!(record("no json").expect_err("refused").starts_with("invalid user namespace mappings file: "));
    }

    #[test]
    fn pools() {
        assert_eq!(IdPool::all(65_536), IdPool { first: 65_536, count: 4_294_901_760 });
        let parse = IdPool::parse_getsubids;
        assert_eq!(parse("0: kubelet 65536 2147483648\n"), Ok(IdPool { first: 65_536, count: 2_147_483_648 }));
        assert!(parse("0: kubelet 1 2\n1: kubelet 3 4\n").expect_err("two").contains("only one line"));
        assert_eq!(parse("nonsense"), Err("invalid line \"nonsense\"".into()));
        let new = |first, count, length, pods| Ranges::new(IdPool { first, count }, length, pods).map(|_| ());
        assert_eq!(new(65_536, 65_536 * 110, 65_536, 110), Ok(()));
        for (pool, why) in [
            (new(65_536, 65_536, 1000, 1), "kubelet user namespace length 1000 is not a multiple of 65536"),
            (new(1000, 65_536, 65_536, 1), "kubelet user assigned ID 1000 is not a multiple of 65536"),
            (new(0, 65_536, 65_536, 1), "kubelet user assigned ID 0 must be greater or equal to 65536"),
            (new(65_536, 1000, 65_536, 1), "kubelet user assigned IDs length 1000 is not a multiple of 65536"),
            (new(65_536, 65_536, 65_536, 2), "kubelet user assigned IDs are not enough to support 2 pods"),
        ] {
            assert_eq!(pool, Err(why.to_owned()));
        }
    }

    proptest! {
        /// Whatever comes and goes: no two pods share an id, host id 0 is never given, and a full book says so.
        #[test]
        fn ranges_never_overlap(steps in prop::collection::vec((0u32..8, any::<bool>()), 1..60)) {
            let mut ranges = small(5);
            let mut held: BTreeMap<u32, u32> = BTreeMap::new();
            for (pod, come) in steps {
                if come {
                    match ranges.allocate(&uid(pod)) {
                        Ok(m) => {
                            prop_assert!(m[0].host_id >= 65_536 && m[0].length == 65_536);
                            prop_assert!(held.iter().all(|(p, from)| *p == pod || *from != m[0].host_id));
                            prop_assert!(held.get(&pod).is_none_or(|from| *from == m[0].host_id));
                            held.insert(pod, m[0].host_id);
                        }
                        Err(_) => prop_assert!(held.len() == 5 && !held.contains_key(&pod)),
                    }
                } else {
                    prop_assert_eq!(ranges.release(&uid(pod)), held.remove(&pod).is_some());
                }
            }
        }
    }
}
