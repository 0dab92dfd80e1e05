//! Pods and observations for tests, in few words.

use jiff::{SignedDuration, Timestamp};
use model::observed::{ContainerState, ObservedContainer, ObservedPod, ObservedSandbox};
use model::pod::{DesiredPod, PodSource};

pub(crate) use crate::resources::testing::{pod, pod_from, pod_with};

/// `n` seconds after an arbitrary moment.
pub(crate) fn at(n: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + n).expect("time")
}

/// A stand-in for the container hash: images with the same text are the same.
pub(crate) fn hash(image: &str, name: &str) -> u32 {
    image.bytes().chain(name.bytes()).fold(7, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)))
}

/// A static pod.
pub(crate) fn static_pod(spec: &str) -> DesiredPod {
    pod_from(PodSource::File, "{}", spec)
}

/// A container that the runtime has, with nothing special about it.
pub(crate) fn container(id: &str, name: &str, sandbox: &str, state: ContainerState) -> ObservedContainer {
    ObservedContainer {
        id: id.into(),
        name: name.into(),
        sandbox_id: sandbox.into(),
        state,
        restart_count: 0,
        hash: None,
        created_at: at(0),
        started_at: None,
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: "img".into(),
        image_id: "sha256:1".into(),
        termination_message_path: String::new(),
        termination_message_policy: String::new(),
        termination_message_host_path: None,
        pre_stop: None,
        termination_grace: None,
        deletion_grace: None,
        log_path: String::new(),
        resources: None,
        user: None,
    }
}

/// A sandbox with an address.
pub(crate) fn sandbox(id: &str, attempt: u32, ready: bool) -> ObservedSandbox {
    ObservedSandbox {
        id: id.into(),
        attempt,
        ready,
        created_at: at(i64::from(attempt)),
        host_network: false,
        ips: vec!["10.0.0.7".into()],
        runtime_handler: String::new(),
    }
}

/// What the runtime has of pod `uid-1`, oldest first, one word group for each thing:
/// `s0 ready|dead [noip] [host]` is a sandbox with attempt 0, `s0/web STATE…` a container in it, with STATE one of `created`,
/// `running`, `unknown`, `exit=CODE`, and any of `image=IMG` (its hash), `at=SECONDS` (when it ended), `n=COUNT` (restart count), `reason=R`, `id=ID`.
/// The ids are `web.0`, `web.1`, … in the order given. Item i is created at second i, and ends one second later.
pub(crate) fn seen(items: &[&str]) -> ObservedPod {
    let mut observed = ObservedPod::empty(pod("{\"containers\":[]}").uid().clone(), "web", "ns");
    for (i, item) in items.iter().enumerate() {
        let now = at(i64::try_from(i).expect("few"));
        let mut words = item.split(' ');
        let head = words.next().expect("head");
        if let Some((sandbox_id, name)) = head.split_once('/') {
            let n = observed.containers.iter().filter(|c| c.name == name).count();
            let mut c = container(&format!("{name}.{n}"), name, sandbox_id, ContainerState::Running);
            c.restart_count = u32::try_from(n).expect("few");
            c.created_at = now;
            c.started_at = Some(now);
            for word in words {
                match word.split_once('=').unwrap_or((word, "")) {
                    ("created", _) => {
                        c.state = ContainerState::Created;
                        c.started_at = None;
                    }
                    ("running", _) => c.state = ContainerState::Running,
                    ("unknown", _) => c.state = ContainerState::Unknown,
                    ("exit", code) => {
                        c.state = ContainerState::Exited;
                        c.exit_code = code.parse().expect("code");
                        c.finished_at = Some(now.saturating_add(SignedDuration::from_secs(1)).expect("time"));
                        c.reason = if c.exit_code == 0 { "Completed" } else { "Error" }.into();
                    }
                    ("image", image) => c.hash = Some(hash(image, name)),
                    ("at", s) => c.finished_at = Some(at(s.parse().expect("seconds"))),
                    ("n", n) => c.restart_count = n.parse().expect("count"),
                    ("reason", r) => c.reason = r.into(),
                    ("id", id) => c.id = id.into(),
                    other => panic!("unknown word {other:?}"),
                }
            }
            observed.containers.push(c);
        } else {
            let attempt = head.trim_start_matches('s').parse().expect("attempt");
            let mut s = sandbox(head, attempt, false);
            s.created_at = now;
            for word in words {
                match word {
                    "ready" => s.ready = true,
                    "dead" => s.ready = false,
                    "noip" => s.ips.clear(),
                    "host" => {
                        s.host_network = true;
                        s.ips.clear();
                    }
                    other => panic!("unknown word {other:?}"),
                }
            }
            observed.sandboxes.push(s);
        }
    }
    observed.sort();
    observed
}
