//! An API server in memory: pods with versions and a history, watches that break, lag and end in 410, calls that are refused, lost or late.
//!
//! It keeps what a real one keeps to: a pod's name is free only when its object is gone, a deletion waits for the node unless it is forced or
//! the pod is over, a patch must name the right UID, and no container of a pod that has ended may be said to run again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::reflect::{ListAsk, Page, WatchAsk, WatchEvent, WatchStream};
use cluster::{ClusterError, ClusterResult, ErrorKind};
use futures::StreamExt;
use model::api::{Pod, PodSpec};
use pod::status::Mirror;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::node::NODE;

/// Namespace of all pods.
pub const NAMESPACE: &str = "default";
/// Pods in a page of a list.
const PAGE: usize = 3;

/// How a call to the API server goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFault {
    /// Not done, answered with this HTTP status.
    Refuse(u16),
    /// Never sent.
    Unreachable,
    /// Done, but the answer is lost.
    LoseAnswer,
    /// Done after this time.
    Delay(Duration),
    /// Done at once, answered after this time.
    LateAnswer(Duration),
}

/// Which calls a fault befalls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiRule {
    /// `patch`, `delete`, `create`, `list`, `watch`; `*`: any.
    pub call: &'static str,
    /// What happens.
    pub fault: ApiFault,
    /// How often.
    pub times: u32,
}

/// A change of the collection.
#[derive(Clone, Debug)]
struct Change {
    version: u64,
    at: Instant,
    pod: Pod,
    gone: bool,
}

#[derive(Debug)]
struct State {
    pods: BTreeMap<String, Pod>,
    history: Vec<Change>,
    version: u64,
    /// Watches from before this version cannot be served any more.
    compacted: u64,
    /// Watches of an earlier epoch are broken.
    epoch: u64,
    up: bool,
    lag: Duration,
    stale: Duration,
    streams_lists: bool,
    rules: Vec<ApiRule>,
    random: SmallRng,
    faults: u64,
    objects: u64,
}

/// The API server. Cheap to clone; clones are the same one.
#[derive(Clone, Debug)]
pub struct FakeApi(Arc<Mutex<State>>, watch::Sender<()>);

fn name_of(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

/// The UID of a pod object.
pub fn uid_of(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// The phase that an object shows.
pub fn phase_of(pod: &Pod) -> String {
    pod.status.as_ref().and_then(|s| s.phase.clone()).unwrap_or_default()
}

/// Whether the pod has ended, by its phase.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase_of(pod).as_str(), "Succeeded" | "Failed")
}

fn error(what: &str, kind: ErrorKind, why: &str) -> ClusterError {
    ClusterError::new(what, kind, why)
}

impl FakeApi {
    /// An empty one; `streams_lists`: it can send a list through a watch.
    pub fn new(seed: u64, streams_lists: bool) -> Self {
        let state = State {
            pods: BTreeMap::new(),
            history: Vec::new(),
            version: 1,
            compacted: 0,
            epoch: 0,
            up: true,
            lag: Duration::ZERO,
            stale: Duration::ZERO,
            streams_lists,
            rules: Vec::new(),
            random: SmallRng::seed_from_u64(seed),
            faults: 0,
            objects: 0,
        };
        Self(Arc::new(Mutex::new(state)), watch::Sender::new(()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- What people and controllers do

    /// The objects as they are now.
    pub fn pods(&self) -> Vec<Pod> {
        self.state().pods.values().cloned().collect()
    }

    /// Makes a pod and binds it to the node; its UID, or None when the name is taken.
    pub fn create(&self, mut pod: Value) -> Option<Pod> {
        let mut state = self.state();
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if state.pods.contains_key(&name) {
            return None;
        }
        state.objects += 1;
        let uid = format!("api-{}-{name}", state.objects);
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        pod["metadata"]["generation"] = json!(1);
        pod["status"] = json!({ "phase": "Pending", "qosClass": "BestEffort" });
        let spec = defaulted(&pod)?;
        let mut pod: Pod = serde_json::from_value(pod).ok()?;
        pod.spec = Some(spec);
        let pod = state.put(pod);
        drop(state);
        self.1.send_replace(());
        Some(pod)
    }

    /// Changes a pod's spec, if it is there.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Pod)) -> Option<Pod> {
        let mut state = self.state();
        let mut pod = state.pods.get(name).cloned()?;
        change(&mut pod);
        pod.metadata.generation = pod.metadata.generation.map(|g| g + 1);
        let pod = state.put(pod);
        drop(state);
        self.1.send_replace(());
        Some(pod)
    }

    /// Asks for a pod's end with this grace, or its own; 0, or a pod that is over: the object goes at once.
    pub fn delete(&self, name: &str, grace: Option<i64>, now: jiff::Timestamp) {
        let mut state = self.state();
        let Some(mut pod) = state.pods.get(name).cloned() else { return };
        let own = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30);
        let grace = if is_over(&pod) { 0 } else { grace.unwrap_or(own) };
        let before = pod.metadata.deletion_grace_period_seconds;
        if grace == 0 {
            state.remove(name);
        } else if before.is_none_or(|before| grace < before) {
            let end = now.saturating_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
            pod.metadata.deletion_timestamp = Some(model::api::Time(end.round(jiff::Unit::Second).unwrap_or(end)));
            pod.metadata.deletion_grace_period_seconds = Some(grace);
            state.put(pod);
        }
        drop(state);
        self.1.send_replace(());
    }

    // ---- Faults

    /// Adds a rule by which calls go wrong.
    pub fn inject(&self, rule: ApiRule) {
        self.state().rules.push(rule);
    }

    /// No way to it any more, or again.
    pub fn reach(&self, up: bool) {
        let mut state = self.state();
        if !up {
            state.epoch += 1;
            state.faults += 1;
        }
        state.up = up;
        drop(state);
        self.1.send_replace(());
    }

    /// Breaks the watches; `expired`: they cannot go on where they were (410).
    pub fn break_watches(&self, expired: bool) {
        let mut state = self.state();
        state.epoch += 1;
        state.faults += 1;
        if expired {
            // The newest version is always served.
            state.version += 1;
            state.compacted = state.version;
        }
        drop(state);
        self.1.send_replace(());
    }

    /// From now on watches tell this late, and lists from the server's cache are this old.
    pub fn lag(&self, watches: Duration, lists: Duration) {
        let mut state = self.state();
        (state.lag, state.stale) = (watches, lists);
        state.faults += 1;
        drop(state);
        self.1.send_replace(());
    }

    /// Everything is well again.
    pub fn heal(&self) {
        let mut state = self.state();
        state.rules.clear();
        state.up = true;
        (state.lag, state.stale) = (Duration::ZERO, Duration::ZERO);
        drop(state);
        self.1.send_replace(());
    }

    /// How many faults there were so far.
    pub fn faults(&self) -> u64 {
        self.state().faults
    }

    // ---- What the agent asks

    async fn call<T>(
        &self,
        call: &'static str,
        what: &str,
        work: impl FnOnce(&mut State) -> ClusterResult<T>,
    ) -> ClusterResult<T> {
        let fault = self.state().pick(call);
        let down = || error(what, ErrorKind::Unreachable, "connection refused");
        match fault {
            Some(ApiFault::Refuse(code)) => {
                let wait = (code == 429).then_some(Duration::from_secs(1));
                return Err(ClusterError::from_answer(what, code, wait, b""));
            }
            Some(ApiFault::Unreachable) => return Err(down()),
            Some(ApiFault::Delay(time)) => tokio::time::sleep(time).await,
            _ => {}
        }
        let answer = {
            let mut state = self.state();
            if state.up { work(&mut state) } else { Err(down()) }
        };
        self.1.send_replace(());
        match fault {
            Some(ApiFault::LoseAnswer) => Err(error(what, ErrorKind::Timeout, "connection lost")),
            Some(ApiFault::LateAnswer(time)) => {
                tokio::time::sleep(time).await;
                answer
            }
            _ => answer,
        }
    }

    pub(crate) async fn create_pod(&self, pod: &Pod) -> ClusterResult<Pod> {
        self.call("create", "create pod", |state| {
            let name = name_of(pod);
            if state.pods.contains_key(&name) {
                let body = br#"{"status":"Failure","reason":"AlreadyExists","code":409,"message":"it exists"}"#;
                return Err(ClusterError::from_answer("create pod", 409, None, body));
            }
            state.objects += 1;
            let mut pod = pod.clone();
            pod.metadata.uid = Some(format!("mirror-{}-{name}", state.objects));
            pod.status = Some(model::api::PodStatus { phase: Some("Pending".to_owned()), ..Default::default() });
            Ok(state.put(pod))
        })
        .await
    }

    /// `accuse` is told when a real server would refuse the patch for what it says.
    pub(crate) async fn patch_pod_status(
        &self,
        name: &str,
        patch: &Value,
        accuse: impl Fn(String),
    ) -> ClusterResult<Pod> {
        self.call("patch", "patch pod status", |state| {
            let missing = || ClusterError::from_answer("patch pod status", 404, None, b"");
            let pod = state.pods.get(name).cloned().ok_or_else(missing)?;
            if patch["metadata"]["uid"] != json!(pod.metadata.uid) {
                let body = br#"{"status":"Failure","code":422,"message":"metadata.uid: Invalid value: \"x\": field is immutable"}"#;
                return Err(ClusterError::from_answer("patch pod status", 422, None, body));
            }
            let bad = |e: serde_json::Error| error("patch pod status", ErrorKind::Invalid, &e.to_string());
            let mut value = serde_json::to_value(&pod).map_err(bad)?;
            apply(&mut value, patch);
            let fresh: Pod = serde_json::from_value(value).map_err(bad)?;
            if is_over(&pod) && phase_of(&fresh) != phase_of(&pod) {
                accuse(format!("phase of {} went from {} to {}", uid_of(&pod), phase_of(&pod), phase_of(&fresh)));
            }
            if let Some(container) = revived(&pod, &fresh) {
                let why = format!("status of {} says that {container} runs again", uid_of(&pod));
                // Of a static pod nobody remembers what ran to its end.
                if Mirror::of(&pod).is_none() {
                    accuse(why.clone());
                }
                return Err(ClusterError::from_answer("patch pod status", 422, None, why.as_bytes()));
            }
            Ok(state.put(fresh))
        })
        .await
    }

    pub(crate) async fn delete_pod(&self, name: &str, uid: Option<&str>) -> ClusterResult<()> {
        self.call("delete", "delete pod", |state| {
            let missing = || ClusterError::from_answer("delete pod", 404, None, b"");
            let pod = state.pods.get(name).ok_or_else(missing)?;
            if uid.is_some_and(|uid| uid != uid_of(pod)) {
                let body = br#"{"status":"Failure","code":409,"message":"the UID in the precondition does not match"}"#;
                return Err(ClusterError::from_answer("delete pod", 409, None, body));
            }
            state.remove(name);
            Ok(())
        })
        .await
    }

    pub(crate) async fn list(&self, ask: &ListAsk) -> ClusterResult<Page<Pod>> {
        self.call("list", "list pods", |state| {
            let (version, skip) = match ask.next.as_deref().and_then(|next| next.split_once(':')) {
                Some((version, skip)) => (version.parse().unwrap_or(0), skip.parse().unwrap_or(0)),
                None => (state.served(&ask.resource_version), 0),
            };
            let all = state.as_of(version);
            let limit = if ask.limit == 0 { all.len() } else { PAGE };
            let next = (skip + limit < all.len()).then(|| format!("{version}:{}", skip + limit));
            let items = all.into_iter().skip(skip).take(limit).collect();
            Ok(Page { items, resource_version: version.to_string(), next })
        })
        .await
    }

    pub(crate) async fn watch(&self, ask: &WatchAsk) -> ClusterResult<WatchStream<Pod>> {
        let follow = self
            .call("watch", "watch pods", |state| {
                if ask.initial_events && !state.streams_lists {
                    return Err(ClusterError::from_answer("watch pods", 422, None, b""));
                }
                let mut follow = Follow {
                    api: self.clone(),
                    changed: self.1.subscribe(),
                    ready: VecDeque::new(),
                    seen: ask.resource_version.parse().unwrap_or(state.version),
                    epoch: state.epoch,
                    until: Instant::now() + ask.timeout,
                };
                if ask.initial_events {
                    follow.seen = state.served(&ask.resource_version);
                    follow.ready.extend(state.as_of(follow.seen).into_iter().map(WatchEvent::Upsert));
                    let resource_version = follow.seen.to_string();
                    follow.ready.push_back(WatchEvent::Bookmark { resource_version, initial_events_end: true });
                } else if follow.seen < state.compacted {
                    let body =
                        br#"{"status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}"#;
                    return Err(ClusterError::from_answer("watch pods", 410, None, body));
                }
                Ok(follow)
            })
            .await?;
        Ok(futures::stream::unfold(follow, |mut follow| async { Some((follow.next().await?, follow)) }).boxed())
    }
}

impl State {
    fn put(&mut self, mut pod: Pod) -> Pod {
        self.version += 1;
        pod.metadata.resource_version = Some(self.version.to_string());
        self.pods.insert(name_of(&pod), pod.clone());
        self.history.push(Change { version: self.version, at: Instant::now(), pod: pod.clone(), gone: false });
        pod
    }

    fn remove(&mut self, name: &str) {
        if let Some(mut pod) = self.pods.remove(name) {
            self.version += 1;
            pod.metadata.resource_version = Some(self.version.to_string());
            self.history.push(Change { version: self.version, at: Instant::now(), pod, gone: true });
        }
    }

    fn pick(&mut self, call: &str) -> Option<ApiFault> {
        let rule = self.rules.iter_mut().find(|r| r.times > 0 && (r.call == "*" || r.call == call))?;
        rule.times -= 1;
        self.faults += 1;
        Some(rule.fault)
    }

    /// The version that is served to one who asks for at least this; `0` may be any that the cache has.
    fn served(&mut self, asked: &str) -> u64 {
        let old = Instant::now().checked_sub(self.stale);
        let cached = |old: Instant| self.history.iter().rfind(|c| c.at <= old).map_or(1, |c| c.version);
        match (asked, old) {
            ("0", Some(old)) if !self.stale.is_zero() && self.random.random_bool(0.7) => cached(old),
            _ => self.version,
        }
    }

    /// The collection as it was at this version.
    fn as_of(&self, version: u64) -> Vec<Pod> {
        let mut pods: BTreeMap<String, &Pod> = BTreeMap::new();
        for change in self.history.iter().take_while(|c| c.version <= version) {
            let name = name_of(&change.pod);
            if change.gone {
                pods.remove(&name);
            } else {
                pods.insert(name, &change.pod);
            }
        }
        pods.into_values().cloned().collect()
    }
}

/// An open watch.
struct Follow {
    api: FakeApi,
    changed: watch::Receiver<()>,
    ready: VecDeque<WatchEvent<Pod>>,
    seen: u64,
    epoch: u64,
    until: Instant,
}

impl Follow {
    async fn next(&mut self) -> Option<ClusterResult<WatchEvent<Pod>>> {
        loop {
            self.changed.borrow_and_update();
            let wake = {
                let state = self.api.state();
                if state.epoch != self.epoch {
                    // Broken: some servers say so, some only close.
                    let broken = error("watch pods", ErrorKind::Timeout, "connection lost");
                    let said = self.epoch.is_multiple_of(2);
                    self.epoch = state.epoch;
                    self.until = Instant::now();
                    return said.then_some(Err(broken));
                }
                if let Some(event) = self.ready.pop_front() {
                    return Some(Ok(event));
                }
                let first = state.history.partition_point(|c| c.version <= self.seen);
                match state.history.get(first) {
                    Some(change) if change.at + state.lag <= Instant::now() => {
                        self.seen = change.version;
                        let pod = change.pod.clone();
                        return Some(Ok(if change.gone { WatchEvent::Delete(pod) } else { WatchEvent::Upsert(pod) }));
                    }
                    Some(change) => self.until.min(change.at + state.lag),
                    None => self.until,
                }
            };
            if Instant::now() >= self.until {
                return None;
            }
            tokio::select! {
                biased;
                _ = self.changed.changed() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }
}

/// A container that has ended for good by the stored status, and runs again by the new one.
pub fn revived(old: &Pod, new: &Pod) -> Option<String> {
    let policy = old.spec.as_ref().and_then(|s| s.restart_policy.clone()).unwrap_or_default();
    if policy == "Always" {
        return None;
    }
    let statuses = |pod: &Pod| pod.status.as_ref().and_then(|s| s.container_statuses.clone()).unwrap_or_default();
    let new = statuses(new);
    statuses(old).into_iter().find_map(|old| {
        let ended = old.state.as_ref()?.terminated.as_ref()?;
        let again = new.iter().find(|n| n.name == old.name)?.state.as_ref()?.terminated.is_none();
        (again && !(policy == "OnFailure" && ended.exit_code != 0)).then_some(old.name)
    })
}

/// A spec with the API's defaults, bound to the node.
fn defaulted(pod: &Value) -> Option<PodSpec> {
    let origin = manifest::Origin::File("api".to_owned());
    let gates = manifest::Gates::default();
    let pods = manifest::load(pod.to_string().as_bytes(), &origin, NODE, jiff::Timestamp::UNIX_EPOCH, &gates).ok()?;
    pods.into_iter().next()?.ok()?.to_pod().spec
}

/// The merge key of a list of a pod's status; None: the list is replaced as a whole.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "conditions" => Some("type"),
        "podIPs" | "hostIPs" => Some("ip"),
        _ => None,
    }
}

/// Applies a strategic merge patch, as far as a pod's status makes use of it.
fn apply(target: &mut Value, patch: &Value) {
    let (Some(target), Some(patch)) = (target.as_object_mut(), patch.as_object()) else { return };
    for (key, value) in patch {
        match (key.as_str(), value) {
            (k, _) if k.starts_with('$') => {}
            (_, Value::Null) => drop(target.remove(key)),
            (k, Value::Array(entries)) if merge_key(k).is_some() => merge(target, key, entries, patch),
            (_, Value::Object(_)) => {
                let held = target.entry(key.clone()).or_insert_with(|| json!({}));
                if !held.is_object() {
                    *held = json!({});
                }
                apply(held, value);
            }
            _ => drop(target.insert(key.clone(), value.clone())),
        }
    }
}

fn merge(target: &mut Map<String, Value>, key: &str, entries: &[Value], patch: &Map<String, Value>) {
    let by = merge_key(key).unwrap_or_default();
    let held = target.entry(key.to_owned()).or_insert_with(|| json!([]));
    let Some(list) = held.as_array_mut() else { return };
    for entry in entries {
        let place = list.iter().position(|held| held[by] == entry[by]);
        match (place, entry["$patch"] == "delete") {
            (Some(place), true) => drop(list.remove(place)),
            (None, true) => {}
            (Some(place), false) => apply(&mut list[place], entry),
            (None, false) => list.push(entry.clone()),
        }
    }
    if let Some(order) = patch.get(&format!("$setElementOrder/{key}")).and_then(Value::as_array) {
        list.sort_by_key(|held| order.iter().position(|o| o[by] == held[by]).unwrap_or(usize::MAX));
    }
}
