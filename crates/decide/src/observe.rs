//! The runtime's answers (CRI v1) turned into observed values.
//!
//! List answers carry identity and state only; times, exit codes and what the kubelet wrote at creation come from statuses.

use std::collections::BTreeMap;

use cri_api::v1;
use jiff::Timestamp;
use model::observed::{ContainerState, ObservedContainer, ObservedPod, ObservedResources, ObservedSandbox};
use model::pod::{CONFIG_SOURCE, PodSource, PodUid};

/// Label: pod UID.
pub const LABEL_POD_UID: &str = "io.kubernetes.pod.uid";
/// Label: pod name.
pub const LABEL_POD_NAME: &str = "io.kubernetes.pod.name";
/// Label: pod namespace.
pub const LABEL_POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: container name.
pub const LABEL_CONTAINER_NAME: &str = "io.kubernetes.container.name";
/// Annotation: restart count, decimal.
pub const ANNOTATION_RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: hash of image and name, lower hexadecimal.
pub const ANNOTATION_HASH: &str = "io.kubernetes.container.hash";
/// Annotation: path of the termination message in the container.
pub const ANNOTATION_TERMINATION_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `File` or `FallbackToLogsOnError`.
pub const ANNOTATION_TERMINATION_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: preStop hook, JSON of a LifecycleHandler.
pub const ANNOTATION_PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: the pod's terminationGracePeriodSeconds, decimal.
pub const ANNOTATION_TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Annotation: the pod's deletionGracePeriodSeconds, decimal.
pub const ANNOTATION_DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";

/// CRI counts nanoseconds since 1970. 0 is "not set".
fn time(nanos: i64) -> Option<Timestamp> {
    (nanos > 0).then(|| Timestamp::from_nanosecond(i128::from(nanos)).ok()).flatten()
}

/// A sandbox. Addresses and the network mode are known only with its status; the newest sandbox of a pod must have one before
/// [`crate::plan::plan`] sees it, since a sandbox without address is replaced.
pub fn sandbox(listed: &v1::PodSandbox, status: Option<&v1::PodSandboxStatus>) -> ObservedSandbox {
    let state = status.map_or(listed.state, |s| s.state);
    let host_network = status
        .and_then(|s| s.linux.as_ref()?.namespaces.as_ref()?.options.as_ref())
        .is_some_and(|o| o.network == v1::NamespaceMode::Node as i32);
    ObservedSandbox {
        id: listed.id.clone(),
        attempt: listed.metadata.as_ref().map_or(0, |m| m.attempt),
        ready: state == v1::PodSandboxState::SandboxReady as i32,
        created_at: time(listed.created_at).unwrap_or(Timestamp::UNIX_EPOCH),
        host_network,
        ips: if host_network { Vec::new() } else { status.map(sandbox_ips).unwrap_or_default() },
        runtime_handler: status.map_or(&listed.runtime_handler, |s| &s.runtime_handler).clone(),
    }
}

/// A sandbox known from its status alone (container events carry no list entry).
pub fn sandbox_from_status(status: &v1::PodSandboxStatus) -> ObservedSandbox {
    let listed = v1::PodSandbox {
        id: status.id.clone(),
        metadata: status.metadata.clone(),
        state: status.state,
        created_at: status.created_at,
        runtime_handler: status.runtime_handler.clone(),
        ..Default::default()
    };
    sandbox(&listed, Some(status))
}

fn sandbox_ips(status: &v1::PodSandboxStatus) -> Vec<String> {
    let Some(network) = &status.network else { return Vec::new() };
    std::iter::once(&network.ip)
        .chain(network.additional_ips.iter().map(|a| &a.ip))
        .filter(|ip| !ip.is_empty())
        .cloned()
        .collect()
}

pub(crate) fn state(value: i32) -> ContainerState {
    match v1::ContainerState::try_from(value) {
        Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(v1::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// What the kubelet wrote into a container at creation, parsed from its annotations.
fn created_with(annotations: &BTreeMap<String, String>, attempt: u32) -> ObservedContainer {
    let text = |key: &str| annotations.get(key).cloned();
    let number = |key: &str| annotations.get(key).and_then(|v| v.parse::<i64>().ok());
    ObservedContainer {
        id: String::new(),
        name: String::new(),
        sandbox_id: String::new(),
        state: ContainerState::Unknown,
        restart_count: annotations.get(ANNOTATION_RESTART_COUNT).and_then(|v| v.parse().ok()).unwrap_or(attempt),
        hash: annotations.get(ANNOTATION_HASH).and_then(|v| u32::from_str_radix(v, 16).ok()),
        created_at: Timestamp::UNIX_EPOCH,
        started_at: None,
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: String::new(),
        image_id: String::new(),
        termination_message_path: text(ANNOTATION_TERMINATION_PATH).unwrap_or_default(),
        termination_message_policy: text(ANNOTATION_TERMINATION_POLICY).unwrap_or_default(),
        termination_message_host_path: None,
        pre_stop: text(ANNOTATION_PRE_STOP),
        termination_grace: number(ANNOTATION_TERMINATION_GRACE),
        deletion_grace: number(ANNOTATION_DELETION_GRACE),
        log_path: String::new(),
        resources: None,
        user: None,
    }
}

fn container_name(labels: &BTreeMap<String, String>, metadata: Option<&v1::ContainerMetadata>) -> String {
    labels.get(LABEL_CONTAINER_NAME).or(metadata.map(|m| &m.name)).cloned().unwrap_or_default()
}

/// A container as a list shows it: without times of start and end, exit code, messages, log path and resources.
pub fn container(listed: &v1::Container) -> ObservedContainer {
    ObservedContainer {
        id: listed.id.clone(),
        name: container_name(&listed.labels, listed.metadata.as_ref()),
        sandbox_id: listed.pod_sandbox_id.clone(),
        state: state(listed.state),
        created_at: time(listed.created_at).unwrap_or(Timestamp::UNIX_EPOCH),
        image: listed.image.as_ref().map(|i| i.image.clone()).unwrap_or_default(),
        image_id: listed.image_ref.clone(),
        ..created_with(&listed.annotations, listed.metadata.as_ref().map_or(0, |m| m.attempt))
    }
}

/// A container as its status shows it. The status does not name its sandbox, so the list entry's is passed in.
pub fn container_from_status(status: &v1::ContainerStatus, sandbox_id: &str) -> ObservedContainer {
    let state = state(status.state);
    let exited = state == ContainerState::Exited;
    let base = created_with(&status.annotations, status.metadata.as_ref().map_or(0, |m| m.attempt));
    let termination_message_host_path = (!base.termination_message_path.is_empty())
        .then(|| status.mounts.iter().find(|m| m.container_path == base.termination_message_path))
        .flatten()
        .map(|m| m.host_path.clone())
        .filter(|p| !p.is_empty());
    ObservedContainer {
        id: status.id.clone(),
        name: container_name(&status.labels, status.metadata.as_ref()),
        sandbox_id: sandbox_id.to_owned(),
        state,
        created_at: time(status.created_at).unwrap_or(Timestamp::UNIX_EPOCH),
        started_at: if state == ContainerState::Created { None } else { time(status.started_at) },
        finished_at: if exited { time(status.finished_at) } else { None },
        exit_code: if exited { status.exit_code } else { 0 },
        reason: status.reason.clone(),
        message: status.message.clone(),
        image: status.image.as_ref().map(|i| i.image.clone()).unwrap_or_default(),
        image_id: status.image_ref.clone(),
        termination_message_host_path,
        log_path: status.log_path.clone(),
        resources: status.resources.as_ref().and_then(|r| r.linux.as_ref()).map(|l| ObservedResources {
            cpu_shares: l.cpu_shares,
            cpu_quota: l.cpu_quota,
            cpu_period: l.cpu_period,
            memory_limit: l.memory_limit_in_bytes,
        }),
        user: status
            .user
            .as_ref()
            .and_then(|u| u.linux.as_ref())
            .map(|u| (u.uid, u.gid, u.supplemental_groups.clone())),
        ..base
    }
}

/// The UID of the pod that a listed sandbox belongs to; None when no kubelet made it.
pub fn sandbox_uid(listed: &v1::PodSandbox) -> Option<PodUid> {
    let metadata = listed.metadata.as_ref().filter(|m| !m.uid.is_empty())?;
    listed.labels.contains_key(LABEL_POD_UID).then(|| PodUid::new(metadata.uid.as_str()))
}

/// The UID of the pod that a listed container belongs to; None when no kubelet made it.
pub fn container_uid(listed: &v1::Container) -> Option<PodUid> {
    let uid = listed.labels.get(LABEL_POD_UID).filter(|u| !u.is_empty())?;
    listed.labels.contains_key(LABEL_CONTAINER_NAME).then(|| PodUid::new(uid.as_str()))
}

/// List answers by pod. Sandboxes and containers that no kubelet made are left out.
pub fn group(sandboxes: &[v1::PodSandbox], containers: &[v1::Container]) -> BTreeMap<PodUid, ObservedPod> {
    let mut pods: BTreeMap<PodUid, ObservedPod> = BTreeMap::new();
    for listed in sandboxes {
        let (Some(uid), Some(metadata)) = (sandbox_uid(listed), listed.metadata.as_ref()) else { continue };
        pods.entry(uid.clone())
            .or_insert_with(|| ObservedPod::empty(uid, &metadata.name, &metadata.namespace))
            .sandboxes
            .push(sandbox(listed, None));
    }
    for listed in containers {
        let Some(uid) = container_uid(listed) else { continue };
        let label = |key: &str| listed.labels.get(key).map(String::as_str).unwrap_or_default();
        pods.entry(uid.clone())
            .or_insert_with(|| ObservedPod::empty(uid, label(LABEL_POD_NAME), label(LABEL_POD_NAMESPACE)))
            .containers
            .push(container(listed));
    }
    pods.values_mut().for_each(ObservedPod::sort);
    pods
}

/// True for the sandbox of a pod that came from a file or a URL: the pod's annotations stand on it.
pub fn is_static(sandbox: &v1::PodSandbox) -> bool {
    let source = sandbox.annotations.get(CONFIG_SOURCE).map(String::as_str);
    [PodSource::File, PodSource::Http].iter().any(|s| source == Some(s.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn nanos(n: i64) -> i64 {
        i64::try_from(at(n).as_nanosecond()).expect("fits")
    }

    fn listed_sandbox(id: &str, uid: &str, attempt: u32, created: i64) -> v1::PodSandbox {
        v1::PodSandbox {
            id: id.into(),
            metadata: Some(v1::PodSandboxMetadata {
                name: "web".into(),
                namespace: "ns".into(),
                uid: uid.into(),
                attempt,
            }),
            state: v1::PodSandboxState::SandboxReady as i32,
            created_at: nanos(created),
            labels: map(&[(LABEL_POD_UID, uid), (LABEL_POD_NAME, "web"), (LABEL_POD_NAMESPACE, "ns")]),
            ..Default::default()
        }
    }

    fn labels(uid: &str, name: &str) -> BTreeMap<String, String> {
        map(&[(LABEL_POD_UID, uid), (LABEL_POD_NAME, "web"), (LABEL_POD_NAMESPACE, "ns"), (LABEL_CONTAINER_NAME, name)])
    }

    fn listed(id: &str, uid: &str, name: &str, created: i64) -> v1::Container {
        v1::Container {
            id: id.into(),
            pod_sandbox_id: "s1".into(),
            metadata: Some(v1::ContainerMetadata { name: name.into(), attempt: 2 }),
            state: v1::ContainerState::ContainerRunning as i32,
            created_at: nanos(created),
            labels: labels(uid, name),
            annotations: map(&[(ANNOTATION_HASH, "e220f96"), (ANNOTATION_RESTART_COUNT, "3")]),
            ..Default::default()
        }
    }

    #[test]
    fn lists_are_grouped_by_pod_newest_first() {
        let sandboxes = [
            listed_sandbox("s1", "u", 0, 5),
            listed_sandbox("s3", "u", 1, 1),
            listed_sandbox("s2", "u", 1, 1),
            // Made by hand: no label of a kubelet.
            v1::PodSandbox { labels: BTreeMap::new(), ..listed_sandbox("x", "y", 0, 1) },
            v1::PodSandbox { metadata: None, ..listed_sandbox("x", "u", 0, 1) },
        ];
        let containers = [
            listed("c1", "u", "web", 1),
            listed("c3", "u", "web", 2),
            listed("c2", "u", "web", 2),
            listed("o", "orphan", "web", 2),
            v1::Container { labels: BTreeMap::new(), ..listed("x", "u", "web", 2) },
        ];
        let pods = group(&sandboxes, &containers);
        let keys: Vec<&str> = pods.keys().map(PodUid::as_str).collect();
        assert_eq!(keys, ["orphan", "u"]);
        let pod = &pods[&PodUid::new("u")];
        assert_eq!((pod.name.as_str(), pod.namespace.as_str()), ("web", "ns"));
        assert_eq!(pod.sandboxes.iter().map(|s| s.id.as_str()).collect::<Vec<_>>(), ["s2", "s3", "s1"]);
        assert_eq!(pod.containers.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["c2", "c3", "c1"]);
        assert_eq!(pod.containers[0].hash, Some(0x0e22_0f96));
        assert_eq!(pod.containers[0].restart_count, 3);
        assert_eq!(pods[&PodUid::new("orphan")].namespace, "ns");
    }

    #[test]
    fn sandbox_facts_come_with_its_status() {
        let entry = listed_sandbox("s1", "u", 4, 5);
        let known = sandbox(&entry, None);
        assert_eq!((known.attempt, known.ready, known.created_at), (4, true, at(5)));
        assert!(known.ips.is_empty() && !known.host_network);
        let mut status = v1::PodSandboxStatus {
            id: "s1".into(),
            metadata: entry.metadata.clone(),
            state: v1::PodSandboxState::SandboxNotready as i32,
            created_at: entry.created_at,
            network: Some(v1::PodSandboxNetworkStatus {
                ip: "10.0.0.1".into(),
                additional_ips: vec![v1::PodIp { ip: "fd00::1".into() }],
            }),
            runtime_handler: "kata".into(),
            ..Default::default()
        };
        let full = sandbox(&entry, Some(&status));
        assert_eq!(full.ips, ["10.0.0.1", "fd00::1"]);
        assert!(!full.ready);
        assert_eq!(full.runtime_handler, "kata");
        assert_eq!(sandbox_from_status(&status), full);
        status.linux = Some(v1::LinuxPodSandboxStatus {
            namespaces: Some(v1::Namespace {
                options: Some(v1::NamespaceOption { network: v1::NamespaceMode::Node as i32, ..Default::default() }),
            }),
        });
        let host = sandbox(&entry, Some(&status));
        assert!(host.host_network && host.ips.is_empty());
    }

    #[test]
    fn container_statuses() {
        let status = v1::ContainerStatus {
            id: "c1".into(),
            metadata: Some(v1::ContainerMetadata { name: "web".into(), attempt: 7 }),
            state: v1::ContainerState::ContainerExited as i32,
            created_at: nanos(1),
            started_at: nanos(2),
            finished_at: nanos(3),
            exit_code: 137,
            image: Some(v1::ImageSpec { image: "docker.io/library/nginx:1".into(), ..Default::default() }),
            image_ref: "docker.io/library/nginx@sha256:1".into(),
            reason: "OOMKilled".into(),
            message: "m".into(),
            labels: labels("u", "web"),
            annotations: map(&[
                (ANNOTATION_TERMINATION_PATH, "/dev/termination-log"),
                (ANNOTATION_TERMINATION_POLICY, "File"),
                (ANNOTATION_PRE_STOP, "{}"),
                (ANNOTATION_TERMINATION_GRACE, "30"),
                (ANNOTATION_DELETION_GRACE, "x"),
            ]),
            mounts: vec![v1::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: "/var/lib/kubelet/pods/u/containers/web/0a".into(),
                ..Default::default()
            }],
            log_path: "/var/log/pods/ns_web_u/web/7.log".into(),
            resources: Some(v1::ContainerResources {
                linux: Some(v1::LinuxContainerResources {
                    cpu_shares: 102,
                    memory_limit_in_bytes: 64,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            user: Some(v1::ContainerUser {
                linux: Some(v1::LinuxContainerUser { uid: 1, gid: 2, supplemental_groups: vec![3] }),
            }),
            ..Default::default()
        };
        let c = container_from_status(&status, "s1");
        assert_eq!((c.id.as_str(), c.name.as_str(), c.sandbox_id.as_str()), ("c1", "web", "s1"));
        assert_eq!(c.state, ContainerState::Exited);
        assert_eq!((c.created_at, c.started_at, c.finished_at), (at(1), Some(at(2)), Some(at(3))));
        assert_eq!((c.exit_code, c.reason.as_str(), c.message.as_str()), (137, "OOMKilled", "m"));
        // Without annotation the CRI attempt counts.
        assert_eq!((c.restart_count, c.hash), (7, None));
        assert_eq!((c.termination_grace, c.deletion_grace), (Some(30), None));
        assert_eq!(c.termination_message_host_path.as_deref(), Some("/var/lib/kubelet/pods/u/containers/web/0a"));
        assert_eq!(c.pre_stop.as_deref(), Some("{}"));
        assert_eq!(c.image_id, "docker.io/library/nginx@sha256:1");
        assert_eq!(c.user, Some((1, 2, vec![3])));
        assert_eq!(c.resources.map(|r| (r.cpu_shares, r.memory_limit)), Some((102, 64)));
        // A running container has no end, a created one no start, whatever the numbers say.
        let running = v1::ContainerStatus { state: v1::ContainerState::ContainerRunning as i32, ..status.clone() };
        let c = container_from_status(&running, "s1");
        assert_eq!((c.finished_at, c.exit_code, c.started_at), (None, 0, Some(at(2))));
        let created = v1::ContainerStatus { state: v1::ContainerState::ContainerCreated as i32, ..status.clone() };
        assert_eq!(container_from_status(&created, "s1").started_at, None);
        let odd = v1::ContainerStatus { state: 77, ..status };
        assert_eq!(container_from_status(&odd, "s1").state, ContainerState::Unknown);
    }
}
