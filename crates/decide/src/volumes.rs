//! The next step of one volume of a plugin: mount, unmount, remount, expand, or wait.
//!
//! A volume is staged once on the node and published for each pod that uses it. Steps of one volume are taken one at a time, each planned from
//! what stands after the one before:
//!
//! ```text
//!             Stage              Publish(pod)
//!   Absent ──────────▶ Staged ──────────────▶ Published        (a step that began and whose end is
//!      ▲                  │  ▲                    │             not known leaves Uncertain behind,
//!      └── Unstage ◀──────┘  └── Unpublish(pod) ◀─┘             which is done again, or undone)
//! ```

use std::collections::{BTreeMap, BTreeSet};

use model::pod::PodUid;

/// How far a mount, or the staging of a volume, has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stand {
    /// Nothing of it is there.
    #[default]
    Absent,
    /// It was begun, and nobody knows how it ended: a lost answer, or a crash.
    Uncertain,
    /// It stands.
    Done,
}

/// What pods want of the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredVolume {
    /// The pods that use it.
    pub pods: BTreeSet<PodUid>,
    /// Of those, the ones whose mount is to be gone through again (a driver that wants it for new tokens).
    pub remount: BTreeSet<PodUid>,
    /// It is smaller on the node than its object says.
    pub expand: bool,
    /// `ReadWriteOncePod` is its only access mode: one pod at a time.
    pub one_pod: bool,
    /// It is staged before it is published; else (inline volumes) published only.
    pub staged: bool,
    /// It stands on the node in another form than pods want (another SELinux label): it is staged anew once no pod has it.
    pub restage: bool,
}

/// What stands of the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActualVolume {
    /// The attachment is there, or none is needed.
    pub attached: bool,
    /// The node's part.
    pub device: Stand,
    /// The pods' parts; those that are absent are left out.
    pub pods: BTreeMap<PodUid, Stand>,
}

/// What a step is about, for its back-off.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// The node's part.
    Device,
    /// One pod's part.
    Pod(PodUid),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for the attachment, then look again.
    AwaitAttachment,
    /// Make the node's part.
    Stage,
    /// Make a pod's part, or make sure of one that is uncertain, or go through it again.
    Publish(PodUid),
    /// Let it grow.
    Expand,
    /// Undo a pod's part.
    Unpublish(PodUid),
    /// Undo the node's part.
    Unstage,
}

impl Step {
    /// What the step is about.
    pub fn subject(&self) -> Subject {
        match self {
            Self::Publish(uid) | Self::Unpublish(uid) => Subject::Pod(uid.clone()),
            Self::AwaitAttachment | Self::Stage | Self::Expand | Self::Unstage => Subject::Device,
        }
    }
}

/// The next step; None: nothing is to be done, or all that is waits for its back-off. Subjects in `held` wait.
pub fn next(desired: &DesiredVolume, actual: &ActualVolume, held: &BTreeSet<Subject>) -> Option<Step> {
    let free = |uid: &PodUid| !held.contains(&Subject::Pod(uid.clone()));
    // Pods that are gone first: another may wait for them.
    if let Some(uid) = actual.pods.keys().find(|uid| !desired.pods.contains(*uid) && free(uid)) {
        return Some(Step::Unpublish(uid.clone()));
    }
    let device_free = !held.contains(&Subject::Device);
    if desired.pods.is_empty() {
        let undo = actual.pods.is_empty() && actual.device != Stand::Absent && device_free;
        return undo.then_some(Step::Unstage);
    }
    if desired.restage && desired.staged && actual.device != Stand::Absent && actual.pods.is_empty() {
        return device_free.then_some(Step::Unstage);
    }
    if desired.staged && actual.device != Stand::Done {
        return match (device_free, actual.attached) {
            (false, _) => None,
            (true, false) => Some(Step::AwaitAttachment),
            (true, true) => Some(Step::Stage),
        };
    }
    let first = desired.pods.iter().find(|uid| {
        let done = actual.pods.get(*uid) == Some(&Stand::Done) && !desired.remount.contains(*uid);
        !done && free(uid) && !is_taken(desired, actual, uid)
    });
    if let Some(uid) = first {
        return Some(Step::Publish(uid.clone()));
    }
    let mounted = actual.pods.values().any(|s| *s == Stand::Done);
    (desired.expand && mounted && device_free).then_some(Step::Expand)
}

/// True when a volume for one pod only is in use by another one.
pub fn is_taken(desired: &DesiredVolume, actual: &ActualVolume, uid: &PodUid) -> bool {
    desired.one_pod && actual.pods.keys().any(|other| other != uid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(n: u8) -> PodUid {
        PodUid::new(format!("pod-{n}"))
    }

    fn desired(pods: &[u8]) -> DesiredVolume {
        DesiredVolume { pods: pods.iter().map(|n| uid(*n)).collect(), staged: true, ..DesiredVolume::default() }
    }

    fn actual(device: Stand, pods: &[(u8, Stand)]) -> ActualVolume {
        ActualVolume { attached: true, device, pods: pods.iter().map(|(n, s)| (uid(*n), *s)).collect() }
    }

    #[test]
    fn steps() {
        use Stand::{Absent, Done, Uncertain};
        let none = BTreeSet::new();
        let device = BTreeSet::from([Subject::Device]);
        let one = BTreeSet::from([Subject::Pod(uid(1))]);
        let away = ActualVolume { attached: false, ..actual(Absent, &[]) };
        let inline = DesiredVolume { staged: false, ..desired(&[1]) };
        let single = DesiredVolume { one_pod: true, ..desired(&[1, 2]) };
        let grown = DesiredVolume { expand: true, ..desired(&[1]) };
        let other = DesiredVolume { restage: true, ..desired(&[1]) };
        let again = DesiredVolume { remount: [uid(1)].into(), ..desired(&[1]) };
        for (what, desired, actual, held, want) in [
            ("nothing", desired(&[]), actual(Absent, &[]), &none, None),
            ("not attached", desired(&[1]), away, &none, Some(Step::AwaitAttachment)),
            ("first", desired(&[1]), actual(Absent, &[]), &none, Some(Step::Stage)),
            ("staged", desired(&[1]), actual(Done, &[]), &none, Some(Step::Publish(uid(1)))),
            ("unsure", desired(&[1]), actual(Uncertain, &[(1, Done)]), &none, Some(Step::Stage)),
            ("unsure pod", desired(&[1]), actual(Done, &[(1, Uncertain)]), &none, Some(Step::Publish(uid(1)))),
            ("done", desired(&[1]), actual(Done, &[(1, Done)]), &none, None),
            ("pod gone", desired(&[]), actual(Done, &[(1, Done)]), &none, Some(Step::Unpublish(uid(1)))),
            ("pod gone, begun", desired(&[]), actual(Done, &[(1, Uncertain)]), &none, Some(Step::Unpublish(uid(1)))),
            ("pod does not go", desired(&[]), actual(Done, &[(1, Done)]), &one, None),
            ("other pod goes on", desired(&[2]), actual(Done, &[(1, Done)]), &one, Some(Step::Publish(uid(2)))),
            ("last pod gone", desired(&[]), actual(Done, &[]), &none, Some(Step::Unstage)),
            ("begun only", desired(&[]), actual(Uncertain, &[]), &none, Some(Step::Unstage)),
            ("stage waits", desired(&[1]), actual(Absent, &[]), &device, None),
            ("inline", inline.clone(), actual(Absent, &[]), &none, Some(Step::Publish(uid(1)))),
            ("inline done", inline, actual(Absent, &[(1, Done)]), &none, None),
            ("one pod only", single.clone(), actual(Done, &[(1, Done)]), &none, None),
            ("first of them", single, actual(Done, &[]), &none, Some(Step::Publish(uid(1)))),
            ("grown", grown.clone(), actual(Done, &[(1, Done)]), &none, Some(Step::Expand)),
            ("grown, mount first", grown, actual(Done, &[]), &none, Some(Step::Publish(uid(1)))),
            ("another form", other.clone(), actual(Done, &[]), &none, Some(Step::Unstage)),
            ("another form, in use", other.clone(), actual(Done, &[(1, Done)]), &none, None),
            ("another form, nothing yet", other, actual(Absent, &[]), &none, Some(Step::Stage)),
            ("again", again, actual(Done, &[(1, Done)]), &none, Some(Step::Publish(uid(1)))),
        ] {
            assert_eq!(next(&desired, &actual, held), want, "{what}");
        }
    }

    /// What may happen to a step.
    #[derive(Clone, Copy, Debug)]
    enum Fate {
        Done,
        /// Refused: nothing changed.
        Refused,
        /// Its end is not known; it was done, or not.
        Lost {
            done: bool,
        },
        /// The agent was killed in it, and starts again from what stands on disk.
        Killed {
            done: bool,
        },
    }

    #[derive(Clone, Debug)]
    enum Move {
        Want(u8),
        Unwant(u8),
        Remount(u8),
        Restage,
        Grow,
        Attach(bool),
        Work(Fate),
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let fate = prop_oneof![
            4 => Just(Fate::Done),
            1 => Just(Fate::Refused),
            1 => any::<bool>().prop_map(|done| Fate::Lost { done }),
            1 => any::<bool>().prop_map(|done| Fate::Killed { done }),
        ];
        let one = prop_oneof![
            2 => (0..3u8).prop_map(Move::Want),
            2 => (0..3u8).prop_map(Move::Unwant),
            1 => (0..3u8).prop_map(Move::Remount),
            1 => Just(Move::Restage),
            1 => Just(Move::Grow),
            1 => any::<bool>().prop_map(Move::Attach),
            8 => fate.prop_map(Move::Work),
        ];
        prop::collection::vec(one, 1..80)
    }

    /// What really stands, which the agent does not see.
    #[derive(Debug, Default)]
    struct World {
        staged: bool,
        published: BTreeSet<PodUid>,
    }

    struct Run {
        world: World,
        wanted: DesiredVolume,
        known: ActualVolume,
    }

    impl Run {
        /// Does what a step does to the world, and checks that it may.
        fn act(&mut self, step: &Step) -> Result<(), TestCaseError> {
            let staged = self.wanted.staged;
            match step {
                Step::AwaitAttachment => {}
                Step::Stage => self.world.staged = true,
                Step::Publish(uid) => {
                    prop_assert!(self.world.staged || !staged, "published before it was staged");
                    prop_assert!(self.wanted.pods.contains(uid), "published for nobody");
                    if self.wanted.one_pod {
                        prop_assert!(self.world.published.iter().all(|p| p == uid), "two pods on a volume for one");
                    }
                    self.world.published.insert(uid.clone());
                }
                Step::Unpublish(uid) => {
                    prop_assert!(!self.wanted.pods.contains(uid), "unpublished under a pod");
                    self.world.published.remove(uid);
                }
                Step::Expand => prop_assert!(!self.world.published.is_empty(), "grown while nobody uses it"),
                Step::Unstage => {
                    prop_assert!(self.world.published.is_empty(), "unstaged while published");
                    self.world.staged = false;
                }
            }
            Ok(())
        }

        /// What the agent knows after a step; `stand`: how a step that makes something ended.
        fn note(&mut self, step: &Step, fate: Fate) {
            let made = match fate {
                Fate::Done => Stand::Done,
                Fate::Refused => return,
                Fate::Lost { .. } | Fate::Killed { .. } => Stand::Uncertain,
            };
            let known = &mut self.known;
            match step {
                Step::Stage => known.device = made,
                Step::Publish(uid) => {
                    known.pods.insert(uid.clone(), made);
                    if made == Stand::Done {
                        self.wanted.remount.remove(uid);
                    }
                }
                Step::Unpublish(uid) if made == Stand::Done => {
                    known.pods.remove(uid);
                }
                Step::Unpublish(uid) => {
                    known.pods.insert(uid.clone(), Stand::Uncertain);
                }
                Step::Unstage if made == Stand::Done => {
                    known.device = Stand::Absent;
                    self.wanted.restage = false;
                }
                Step::Unstage => known.device = Stand::Uncertain,
                Step::Expand => self.wanted.expand &= made != Stand::Done,
                Step::AwaitAttachment => {}
            }
            if matches!(fate, Fate::Killed { .. }) {
                // From the disk: what was begun is there, and nobody is sure of anything. Pods are wanted again when their workers come.
                for stand in known.pods.values_mut() {
                    *stand = Stand::Uncertain;
                }
                if known.device == Stand::Done {
                    known.device = Stand::Uncertain;
                }
            }
        }

        fn work(&mut self, fate: Fate) -> Result<bool, TestCaseError> {
            let Some(step) = next(&self.wanted, &self.known, &BTreeSet::new()) else { return Ok(false) };
            if step == Step::AwaitAttachment {
                return Ok(false);
            }
            let done = matches!(fate, Fate::Done | Fate::Lost { done: true } | Fate::Killed { done: true });
            if done {
                self.act(&step)?;
            }
            self.note(&step, fate);
            Ok(true)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn never_out_of_order_and_always_to_the_end(staged: bool, one_pod: bool, moves in moves()) {
            let wanted = DesiredVolume { staged, one_pod, ..DesiredVolume::default() };
            let mut run = Run { world: World::default(), wanted, known: ActualVolume::default() };
            for one in moves {
                match one {
                    Move::Want(n) => { run.wanted.pods.insert(uid(n)); }
                    Move::Unwant(n) => { run.wanted.pods.remove(&uid(n)); run.wanted.remount.remove(&uid(n)); }
                    Move::Remount(n) if run.wanted.pods.contains(&uid(n)) => { run.wanted.remount.insert(uid(n)); }
                    Move::Remount(_) => {}
                    Move::Restage => run.wanted.restage = true,
                    Move::Grow => run.wanted.expand = true,
                    Move::Attach(yes) => run.known.attached = yes,
                    Move::Work(fate) => { run.work(fate)?; }
                }
            }
            // Undisturbed, everything comes to rest as it is wanted, and when nobody wants it any more, nothing is left.
            run.known.attached = true;
            let mut steps = 0;
            while run.work(Fate::Done)? {
                steps += 1;
                prop_assert!(steps < 50, "it does not come to rest");
            }
            if !one_pod {
                prop_assert_eq!(&run.world.published, &run.wanted.pods);
            }
            run.wanted.pods.clear();
            run.wanted.remount.clear();
            while run.work(Fate::Done)? {
                steps += 1;
                prop_assert!(steps < 50, "it does not come to rest");
            }
            prop_assert!(run.world.published.is_empty() && !run.world.staged, "left behind: {:?}", run.world);
        }
    }
}
