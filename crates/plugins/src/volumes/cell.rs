//! One volume: what is wanted of it, what stands, and the task that brings the two together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use decide::csi::{CsiVolume, Lifecycle};
use decide::selinux::Uses;
use decide::volumes::{self as plan, ActualVolume, DesiredVolume, Stand, Step, Subject};
use model::pod::PodUid;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::warn;

use super::layout::Identity;
use super::steps::{self, Failed, Job, Kind, Outcome};
use super::{ATTACH, NodeView, Shared, Standing, Wish, lock};

/// First wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// The longest one.
const LONGEST_WAIT: Duration = Duration::from_secs(122);

/// What the Go kubelet says of a second pod on a volume for one.
const TAKEN: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

/// A subject whose last step failed.
struct Trouble {
    reason: &'static str,
    message: String,
    wait: Duration,
    until: Instant,
    /// Pods that were told.
    told: BTreeSet<PodUid>,
}

struct State {
    of: Identity,
    /// The newest form of it that a pod brought; None while it is known from the disk alone.
    volume: Option<CsiVolume>,
    wishes: BTreeMap<PodUid, Wish>,
    /// The name that each pod's part is kept under.
    names: BTreeMap<PodUid, String>,
    desired: DesiredVolume,
    actual: ActualVolume,
    troubles: BTreeMap<Subject, Trouble>,
    /// Pods that were told that another one has the volume.
    told_taken: BTreeSet<PodUid>,
    /// Pods whose workers went away without having it, and are to be woken.
    waiting: BTreeSet<PodUid>,
    doing: Option<Step>,
    /// Whether a controller attaches it, once that is known.
    attach: Option<bool>,
    /// It stood on disk when the agent began: until more is known, it counts as attached and in use.
    from_disk: bool,
    attaching: bool,
    /// When it is looked at next why the attachment does not come.
    look_at: Instant,
    /// The node can take no more.
    exhausted: bool,
    /// The driver wants to publish again and again.
    republish: bool,
    /// Its files can have SELinux labels, and have none for the containers.
    relabel: bool,
    /// Labels that it is used with.
    uses: Uses,
    /// Bytes that the node was last told to let it grow to.
    grown_to: i64,
    running: bool,
    gone: bool,
}

/// See the module.
pub(crate) struct Cell {
    state: Mutex<State>,
    changed: watch::Sender<()>,
    kicked: Notify,
}

/// What the task does next.
enum Next {
    Do(Box<Job>),
    Attach(Instant),
    Wait(Instant),
    Idle,
}

impl Cell {
    pub(crate) fn new(of: Identity) -> Self {
        let desired = DesiredVolume { staged: of.lifecycle == Lifecycle::Persistent, ..DesiredVolume::default() };
        Self {
            state: Mutex::new(State {
                of,
                volume: None,
                wishes: BTreeMap::new(),
                names: BTreeMap::new(),
                desired,
                actual: ActualVolume::default(),
                troubles: BTreeMap::new(),
                told_taken: BTreeSet::new(),
                waiting: BTreeSet::new(),
                doing: None,
                attach: None,
                from_disk: false,
                attaching: false,
                look_at: Instant::now(),
                exhausted: false,
                republish: false,
                relabel: false,
                uses: Uses::default(),
                grown_to: 0,
                running: false,
                gone: false,
            }),
            changed: watch::Sender::new(()),
            kicked: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn identity(&self) -> Identity {
        self.state().of.clone()
    }

    /// Of a driver's volume: the pods that have it, and the names that they have it under.
    pub(crate) fn published(&self) -> Vec<(PodUid, Identity)> {
        let s = self.state();
        let done = s.actual.pods.iter().filter(|(_, stand)| **stand == Stand::Done);
        let named = |uid: &PodUid| s.names.get(uid).unwrap_or(&s.of.spec_name).clone();
        let done = done.filter(|_| s.of.dir.is_none());
        done.map(|(uid, _)| (uid.clone(), Identity { spec_name: named(uid), ..s.of.clone() })).collect()
    }

    pub(crate) fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// It waits for a controller: nothing will come of it within a moment.
    pub(crate) fn is_attaching(&self) -> bool {
        self.state().attaching
    }

    /// Takes in a part that was found on disk: a pod's, or the node's. A pod's part stays until its worker says what is to become of it.
    pub(crate) fn found(&self, uid: Option<PodUid>, of: &Identity) {
        let mut s = self.state();
        s.from_disk = true;
        s.of.block |= of.block;
        if s.of.spec_name.is_empty() {
            s.of.spec_name.clone_from(&of.spec_name);
        }
        if of.label.is_some() {
            s.of.label.clone_from(&of.label);
        }
        match uid {
            Some(uid) => {
                s.names.insert(uid.clone(), of.spec_name.clone());
                s.desired.pods.insert(uid.clone());
                s.actual.pods.insert(uid, Stand::Uncertain);
            }
            None => s.actual.device = Stand::Uncertain,
        }
    }

    /// Takes in a pod's wish; false: the cell is going, another one is to be made.
    pub(crate) fn want(&self, wish: &Wish) -> bool {
        let mut s = self.state();
        if s.gone {
            return false;
        }
        let (uid, volume) = (wish.pod.uid().clone(), &wish.volume);
        s.of.spec_name.clone_from(&volume.spec_name);
        s.of.block = volume.block;
        s.of.handle.clone_from(&volume.handle);
        s.names.insert(uid.clone(), volume.spec_name.clone());
        s.desired.staged = volume.lifecycle == Lifecycle::Persistent;
        s.desired.one_pod = volume.one_pod();
        let growth = volume.growth.as_ref();
        // Of a size that the claim has already, only what comes after the first look is growth.
        if let Some(growth) = growth.filter(|g| g.told && s.grown_to == 0) {
            s.grown_to = growth.wanted;
        }
        let grown_to = s.grown_to;
        // After a size that could not be reached, the controller may ask for a smaller one.
        s.desired.expand = growth.is_some_and(|g| g.wanted != grown_to);
        s.desired.pods.insert(uid.clone());
        if wish.again && s.republish && s.actual.pods.get(&uid) == Some(&Stand::Done) {
            s.desired.remount.insert(uid.clone());
        }
        s.volume = Some(volume.clone());
        s.wishes.insert(uid, wish.clone());
        true
    }

    /// The pod ends.
    pub(crate) fn unwant(&self, uid: &PodUid) {
        let mut s = self.state();
        if s.desired.pods.remove(uid) {
            // A mount that failed does not hold up the unmount.
            s.troubles.remove(&Subject::Pod(uid.clone()));
        }
        s.desired.remount.remove(uid);
        s.wishes.remove(uid);
        s.waiting.remove(uid);
        s.told_taken.remove(uid);
        if s.desired.pods.is_empty() {
            s.troubles.remove(&Subject::Device);
        }
    }

    /// Ends all back-offs.
    pub(crate) fn retry_now(&self) {
        let mut s = self.state();
        let now = Instant::now();
        s.troubles.values_mut().for_each(|t| t.until = now);
    }

    /// True when the node's status is to name it.
    pub(crate) fn is_in_use(&self) -> bool {
        let s = self.state();
        let attached = s.attach.unwrap_or(s.from_disk) && s.of.lifecycle == Lifecycle::Persistent;
        attached && (!s.desired.pods.is_empty() || !s.actual.pods.is_empty() || s.actual.device != Stand::Absent)
    }

    /// How a pod's wish stands. A pod that does not have it is woken when that changes.
    pub(crate) fn standing(&self, shared: &Shared, uid: &PodUid) -> Standing {
        let mut state = self.state();
        let s = &mut *state;
        let name = s.names.get(uid).unwrap_or(&s.of.spec_name).clone();
        if s.actual.pods.get(uid) == Some(&Stand::Done) {
            s.waiting.remove(uid);
            let of = Identity { spec_name: name, ..s.of.clone() };
            return Standing::Ready { path: shared.layout.usable(&of, uid), relabel: s.relabel };
        }
        s.waiting.insert(uid.clone());
        let device = s.desired.staged && s.actual.device != Stand::Done;
        let subjects = [Some(Subject::Pod(uid.clone())), device.then_some(Subject::Device)];
        for subject in subjects.into_iter().flatten() {
            if let Some(trouble) = s.troubles.get_mut(&subject) {
                let fresh = trouble.told.insert(uid.clone());
                return Standing::Failed { reason: trouble.reason, message: trouble.message.clone(), fresh };
            }
        }
        if plan::is_taken(&s.desired, &s.actual, uid) {
            let fresh = s.told_taken.insert(uid.clone());
            let message = format!("MountVolume.SetUp failed for volume \"{name}\" : {TAKEN}");
            return Standing::Failed { reason: "FailedMount", message, fresh };
        }
        if s.exhausted {
            return Standing::Exhausted;
        }
        let driver = &s.of.driver;
        Standing::Waits(match &s.doing {
            Some(step) => {
                format!("volume \"{name}\": driver {driver} has not answered {} yet", steps::call(step))
            }
            None if s.attaching => {
                format!("volume \"{name}\" of driver {driver} is not attached to the node yet")
            }
            None => format!("volume \"{name}\" of driver {driver} waits for its turn"),
        })
    }

    /// Waits until nothing of the pod's part is left.
    pub(crate) async fn wait_unmounted(&self, uid: &PodUid, deadline: Instant) -> Result<(), String> {
        let mut changed = self.changed();
        loop {
            changed.borrow_and_update();
            {
                let s = self.state();
                if !s.actual.pods.contains_key(uid) {
                    return Ok(());
                }
                if let Some(trouble) = s.troubles.get(&Subject::Pod(uid.clone())) {
                    return Err(trouble.message.clone());
                }
            }
            if tokio::time::timeout_at(deadline, changed.changed()).await.is_err() {
                let s = self.state();
                let what = match &s.doing {
                    Some(step) => format!("has not answered {} yet", steps::call(step)),
                    None => "waits for its turn".to_owned(),
                };
                return Err(format!("volume \"{}\": driver {} {what}", s.of.spec_name, s.of.driver));
            }
        }
    }

    /// Lets the task look again, and starts it when there is none.
    pub(crate) fn kick(self: &Arc<Self>, shared: &Arc<Shared>) {
        if !std::mem::replace(&mut self.state().running, true) {
            tokio::spawn(self.clone().work(shared.clone()));
        }
        self.kicked.notify_one();
    }

    async fn work(self: Arc<Self>, shared: Arc<Shared>) {
        let mut view = shared.node.get().cloned();
        loop {
            if let Some(view) = &mut view {
                // Before the look, so that what comes after it is news.
                view.settle();
            }
            match self.next(&shared) {
                Next::Do(job) => {
                    let outcome = tokio::select! {
                        biased;
                        // What was begun is on disk, and is looked at by the next agent.
                        () = shared.stop.cancelled() => return,
                        outcome = steps::run(&shared, &job) => outcome,
                    };
                    let wakes = self.record(&shared, &job, outcome);
                    shared.note_in_use(&self);
                    self.changed.send_replace(());
                    wakes.iter().for_each(|wish| (wish.wake)());
                }
                Next::Attach(look_at) => {
                    tokio::select! {
                        () = shared.stop.cancelled() => return,
                        () = self.kicked.notified() => {}
                        () = NodeView::changed(view.as_mut()) => {}
                        () = tokio::time::sleep_until(look_at) => {
                            let exhausted = steps::is_exhausted(&shared, &self.identity()).await;
                            self.note_exhausted(exhausted).iter().for_each(|wish| (wish.wake)());
                        }
                    }
                }
                Next::Wait(until) => {
                    tokio::select! {
                        () = shared.stop.cancelled() => return,
                        () = self.kicked.notified() => {}
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
                Next::Idle => {
                    shared.retire(&self);
                    return;
                }
            }
        }
    }

    /// Takes in why the attachment does not come; who is to be woken.
    fn note_exhausted(&self, exhausted: bool) -> Vec<Wish> {
        let mut s = self.state();
        s.look_at = Instant::now() + ATTACH;
        s.exhausted = exhausted && s.attaching;
        if s.exhausted { s.wishes.values().cloned().collect() } else { Vec::new() }
    }

    /// Nobody wants it and nothing of it is left. To be asked with the table locked; from then on the cell takes no wishes.
    pub(crate) fn retire(&self) -> bool {
        let mut s = self.state();
        let over = s.desired.pods.is_empty() && s.actual.pods.is_empty() && s.actual.device == Stand::Absent;
        s.gone |= over && !s.running;
        s.gone
    }

    fn next(&self, shared: &Shared) -> Next {
        let mut state = self.state();
        let s = &mut *state;
        let now = Instant::now();
        let mut held: BTreeSet<Subject> =
            s.troubles.iter().filter(|(_, t)| t.until > now).map(|(subject, _)| subject.clone()).collect();
        // Found on disk: whose worker has not come yet, and of which no pod has told what it is.
        for uid in s.desired.pods.iter().filter(|uid| !s.wishes.contains_key(*uid)) {
            held.insert(Subject::Pod(uid.clone()));
        }
        let unclear = if s.desired.pods.is_empty() { !*shared.settled.borrow() } else { s.wishes.is_empty() };
        if unclear {
            held.insert(Subject::Device);
        }
        if s.attaching && shared.is_attached(&s.of.in_status()) {
            s.actual.attached = true;
        }
        let step = plan::next(&s.desired, &s.actual, &held);
        if step == Some(Step::AwaitAttachment) && s.attaching {
            return Next::Attach(s.look_at);
        }
        (s.attaching, s.exhausted) = (false, false);
        let Some(step) = step else {
            return match s.troubles.values().map(|t| t.until).filter(|until| *until > now).min() {
                Some(until) => Next::Wait(until),
                None => {
                    s.running = false;
                    Next::Idle
                }
            };
        };
        let uid = match &step {
            Step::Publish(uid) | Step::Unpublish(uid) => Some(uid.clone()),
            // Any pod that has it: the driver is told of one place.
            Step::Expand => s.actual.pods.iter().find(|(_, s)| **s == Stand::Done).map(|(uid, _)| uid.clone()),
            _ => None,
        };
        let prior = match (&step, &uid) {
            (Step::Publish(_) | Step::Unpublish(_), Some(uid)) => s.actual.pods.get(uid).copied().unwrap_or_default(),
            _ => s.actual.device,
        };
        let name = uid.as_ref().and_then(|uid| s.names.get(uid)).unwrap_or(&s.of.spec_name).clone();
        let wish = match &uid {
            Some(uid) => s.wishes.get(uid).cloned(),
            None => s.wishes.values().next().cloned(),
        };
        // From here on it may have happened.
        match &step {
            Step::Publish(uid) if prior == Stand::Absent => {
                s.actual.pods.insert(uid.clone(), Stand::Uncertain);
            }
            Step::Stage if prior == Stand::Absent => s.actual.device = Stand::Uncertain,
            _ => {}
        }
        s.doing = Some(step.clone());
        let of = Identity { spec_name: name, ..s.of.clone() };
        let shared_with = s.actual.pods.keys().any(|other| Some(other) != uid.as_ref());
        Next::Do(Box::new(Job { step, of, uid, wish, prior, shared: shared_with }))
    }

    /// Takes in how a step ended; who is to be woken.
    fn record(&self, shared: &Shared, job: &Job, outcome: Result<Outcome, Failed>) -> Vec<Wish> {
        let mut state = self.state();
        let s = &mut *state;
        s.doing = None;
        let subject = job.step.subject();
        match outcome {
            Ok(outcome) => {
                s.troubles.remove(&subject);
                if let (Outcome::Published { wanted, .. }, Some(uid), Some(wish)) = (&outcome, &job.uid, &job.wish)
                    && let Some(counted) = s.uses.begin(uid, wanted)
                {
                    shared.count_label(&s.of, &wish.volume, counted);
                }
                s.done(job, outcome);
            }
            Err(failed) => s.failed(shared, job, failed),
        }
        let woken: Vec<PodUid> = match &job.step {
            Step::Publish(uid) => s.waiting.iter().filter(|w| *w == uid).cloned().collect(),
            Step::AwaitAttachment => Vec::new(),
            _ => s.waiting.iter().cloned().collect(),
        };
        for uid in &woken {
            s.waiting.remove(uid);
        }
        woken.iter().filter_map(|uid| s.wishes.get(uid).cloned()).collect()
    }
}

impl State {
    fn done(&mut self, job: &Job, outcome: Outcome) {
        match (&job.step, outcome) {
            (Step::AwaitAttachment, Outcome::Attach { required, attached }) => {
                self.attach = Some(required);
                self.actual.attached = attached;
                self.attaching = !attached;
                self.look_at = Instant::now() + ATTACH;
            }
            (Step::Stage, outcome) => {
                self.actual.device = Stand::Done;
                if let Outcome::Staged { label } = outcome {
                    self.of.label = label;
                }
            }
            (Step::Publish(uid), Outcome::OtherLabel) => {
                // Nothing was done for the pod.
                self.actual.pods.remove(uid);
                self.desired.restage = true;
            }
            (Step::Publish(uid), outcome) => {
                self.actual.pods.insert(uid.clone(), Stand::Done);
                self.desired.remount.remove(uid);
                if let Outcome::Published { republish, label, relabel, .. } = outcome {
                    (self.republish, self.relabel) = (republish, relabel);
                    self.of.label = label;
                }
            }
            (Step::Unpublish(uid), _) => {
                self.actual.pods.remove(uid);
                self.names.remove(uid);
                self.uses.end(uid);
                self.told_taken.clear();
            }
            (Step::Unstage, _) => {
                self.actual.device = Stand::Absent;
                self.actual.attached = false;
                self.desired.restage = false;
                self.of.label = None;
            }
            (Step::Expand, _) => {
                let wanted = |v: &CsiVolume| v.growth.as_ref().map_or(0, |g| g.wanted);
                self.grown_to = job.wish.as_ref().map_or(0, |wish| wanted(&wish.volume));
                // Another size may have come meanwhile.
                self.desired.expand &= self.volume.as_ref().is_some_and(|v| wanted(v) != self.grown_to);
            }
            (Step::AwaitAttachment, _) => {}
        }
    }

    fn failed(&mut self, shared: &Shared, job: &Job, failed: Failed) {
        let stand = match failed.kind {
            // Nothing was asked of the driver.
            Kind::Before => job.prior,
            Kind::Refused if job.prior == Stand::Absent => Stand::Absent,
            Kind::Refused | Kind::Unknown => Stand::Uncertain,
        };
        let refused_again = failed.kind != Kind::Unknown && job.prior == Stand::Done;
        match &job.step {
            Step::Stage => self.actual.device = stand,
            Step::Publish(uid) => {
                // A mount that stands and could not be gone through again still stands.
                match if refused_again { Stand::Done } else { stand } {
                    Stand::Absent => self.actual.pods.remove(uid),
                    stand => self.actual.pods.insert(uid.clone(), stand),
                };
            }
            _ => {}
        }
        if job.step == (Step::Unstage) || matches!(job.step, Step::Unpublish(_)) {
            warn!(volume = job.of.key(), err = failed.message, "Volume cannot be unmounted, it is tried again");
        }
        if let (true, Some(wish)) = (refused_again || job.step == Step::Expand, &job.wish) {
            shared.objects.event(&wish.pod, None, true, failed.reason, &failed.message);
        }
        let subject = job.step.subject();
        let wait = self.troubles.get(&subject).map_or(FIRST_WAIT, |t| (t.wait * 2).min(LONGEST_WAIT));
        let trouble = Trouble {
            reason: failed.reason,
            message: failed.message,
            wait,
            until: Instant::now() + wait,
            told: BTreeSet::new(),
        };
        self.troubles.insert(subject, trouble);
    }
}
