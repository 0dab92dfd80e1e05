//! Directories, and the space on their filesystems.

use std::path::Path;

use config::{DEFAULT_EVICTION_HARD, KubeletConfiguration};
use model::quantity::Quantity;

use super::super::facts::{HostFacts, Place, PlaceState, Role};
use super::{Finding, Severity, error, ok, size, unknown, warn};

/// Each directory: is it there or can it be made, may it be written, is there room.
pub(super) fn judge(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let mut out: Vec<Finding> =
        facts.places.iter().flat_map(|place| judge_place(place, &facts.places, config)).collect();
    if !facts.places.iter().any(|p| p.role == Role::Manifests) {
        out.push(no_manifests(config));
    }
    match &facts.memory {
        Ok(memory) => {
            let left = format!("{} of {} available", size(memory.available), size(memory.total));
            let fill = Fill { signal: "memory.available", what: "", left, free: memory.available, of: memory.total };
            out.push(fill.judge("memory", config));
        }
        Err(why) => out.push(unknown("memory", why)),
    }
    out
}

fn no_manifests(config: &KubeletConfiguration) -> Finding {
    if config.static_pod_url.is_empty() {
        let message = "neither staticPodPath nor staticPodURL is set: a standalone node runs nothing";
        warn("static pods", message, "set staticPodPath (--pod-manifest-path) to the directory of the manifests")
    } else {
        ok("static pods", format!("from {}", config.static_pod_url))
    }
}

fn topic(role: Role) -> &'static str {
    match role {
        Role::Root => "root directory",
        Role::Logs => "pod logs",
        Role::Manifests => "static pods",
        Role::Images => "image store",
    }
}

fn judge_place(place: &Place, all: &[Place], config: &KubeletConfiguration) -> Vec<Finding> {
    let (topic, path) = (topic(place.role), place.path.as_path());
    let state = match &place.state {
        Ok(state) => state,
        Err(why) => {
            let fix = "look at the filesystem there: a dead network or disk makes the agent hang as well";
            return vec![error(topic, format!("{}: {why}", path.display()), fix)];
        }
    };
    let mut out = vec![judge_directory(topic, place.role, path, state)];
    // The manifests are only read; and most hosts have their logs on the filesystem of the root directory.
    let device = |p: &Place| p.state.as_ref().ok().and_then(|s| s.device);
    let told = place.role == Role::Logs
        && device(place).is_some_and(|d| all.iter().any(|p| p.role == Role::Root && device(p) == Some(d)));
    if place.role != Role::Manifests && !told {
        out.extend(judge_space(topic, place.role, path, state, config));
    }
    out
}

fn judge_directory(topic: &str, role: Role, path: &Path, state: &PlaceState) -> Finding {
    let path = path.display();
    match (state.directory, &state.writable) {
        (Some(false), _) if role == Role::Manifests => ok(topic, format!("{path} is a file: its pods are run")),
        (Some(false), _) => {
            error(topic, format!("{path} is not a directory"), format!("remove {path}, or name another directory"))
        }
        (None, _) if role == Role::Manifests => {
            let message = format!("{path} does not exist: no pods until it does");
            warn(topic, message, format!("mkdir -p {path}"))
        }
        (_, Err(why)) => {
            let fix = match role {
                Role::Manifests => "make it readable for root",
                _ => "run as root, and mount the filesystem there read-write",
            };
            error(topic, format!("{path}: {why}"), fix)
        }
        (None, Ok(())) => ok(topic, format!("{path} does not exist yet and can be made")),
        (Some(true), Ok(())) if role == Role::Manifests => ok(topic, format!("{path} is there and readable")),
        (Some(true), Ok(())) if role == Role::Images => ok(topic, format!("{path} is there")),
        (Some(true), Ok(())) => ok(topic, format!("{path} is there and writable")),
    }
}

/// Space and inodes of the filesystem below a place.
fn judge_space(
    topic: &str,
    role: Role,
    path: &Path,
    state: &PlaceState,
    config: &KubeletConfiguration,
) -> Vec<Finding> {
    let figures = match &state.filesystem {
        Ok(figures) => figures,
        Err(why) => return vec![unknown(topic, why)],
    };
    let what = format!("the filesystem of {}: ", path.display());
    let (space, inodes) = match role {
        Role::Images => ("imagefs.available", "imagefs.inodesFree"),
        Role::Root | Role::Logs | Role::Manifests => ("nodefs.available", "nodefs.inodesFree"),
    };
    let left = format!("{} of {} free", size(figures.available), size(figures.capacity));
    let fill = Fill { signal: space, what: &what, left, free: figures.available, of: figures.capacity };
    let mut out = vec![fill.judge(topic, config)];
    // Some filesystems (btrfs, overlays of them) count no inodes.
    if figures.inodes > 0 {
        let left = format!("{} of {} inodes free", figures.inodes_free, figures.inodes);
        let fill = Fill { signal: inodes, what: &what, left, free: figures.inodes_free, of: figures.inodes };
        out.push(fill.judge(topic, config));
    }
    // Nothing to say: in one line.
    if let [space, inodes] = out.as_slice()
        && out.iter().all(|f| f.severity == Severity::Ok)
    {
        let left = inodes.message.strip_prefix(&what).unwrap_or(&inodes.message);
        return vec![ok(topic, format!("{}, {left}", space.message))];
    }
    out
}

/// How full something is.
struct Fill<'a> {
    signal: &'static str,
    /// What it is, before `left`.
    what: &'a str,
    /// In words.
    left: String,
    free: u64,
    of: u64,
}

impl Fill<'_> {
    /// Against evictionHard; against the usual threshold where none is set. Below a hundredth nothing works for long.
    fn judge(&self, topic: &str, config: &KubeletConfiguration) -> Finding {
        let Self { signal, what, left, free, of } = self;
        let configured = config.eviction_hard.get(*signal).map(String::as_str);
        let usual = DEFAULT_EVICTION_HARD.iter().find(|(name, _)| name == signal).map(|(_, text)| *text);
        let text = configured.or(usual).unwrap_or("0%");
        // An unreadable threshold is a finding of the configuration.
        let below = threshold(text, *of).is_some_and(|least| *free < least);
        let name = if configured.is_some() { "evictionHard" } else { "the usual threshold" };
        let fix = match *signal {
            "memory.available" => "stop what is not needed, or give the host more memory",
            _ => "make room: remove what is not needed (crictl rmi --prune removes unused images), or enlarge it",
        };
        if *free < of / 100 {
            error(topic, format!("{what}{left}, as good as full"), fix)
        } else if below {
            let message = format!("{what}{left}, below {name} {signal}<{text}: the node counts as under pressure");
            warn(topic, message, fix)
        } else {
            ok(topic, format!("{what}{left}"))
        }
    }
}

/// A threshold (`10%`, `100Mi`) in the units of `capacity`; None when it is neither.
pub(super) fn threshold(text: &str, capacity: u64) -> Option<u64> {
    match text.strip_suffix('%') {
        Some(percent) => {
            let percent: f64 = percent.trim().parse().ok()?;
            #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            (0.0..=100.0).contains(&percent).then(|| (capacity as f64 * percent / 100.0) as u64)
        }
        None => u64::try_from(Quantity::parse(text).ok()?.value()).ok(),
    }
}
