//! What should run: [`DesiredPod`], the one form in which a pod's intent is held.

use std::fmt;
use std::sync::Arc;

use crate::allocation::{PodAllocation, ResizeState, same_requirements};
use crate::api::{Container, EphemeralContainer, ObjectMeta, Pod, PodSpec, PodStatus};

/// A pod's UID. Static pods have 32 hex digits, API pods an RFC 4122 UUID; both are opaque here.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// Wraps a UID as found in an object or a label.
    pub fn new(uid: impl Into<Arc<str>>) -> Self {
        Self(uid.into())
    }

    /// The UID's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a pod came from (annotation [`CONFIG_SOURCE`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum PodSource {
    /// The static pod directory, `staticPodPath`.
    File,
    /// The static pod URL, `staticPodURL`.
    Http,
    /// The API server.
    Api,
}

impl PodSource {
    /// The value of the annotation [`CONFIG_SOURCE`].
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }
}

/// What a container is in its pod; the kind decides when it is started, restarted and stopped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum ContainerKind {
    /// Runs to completion before the ones after it.
    Init,
    /// An init container with `restartPolicy: Always` (KEP-753).
    Sidecar,
    /// An entry of `spec.containers`.
    App,
    /// An entry of `spec.ephemeralContainers`.
    Ephemeral,
}

/// One container of a pod's spec together with its place in it.
#[derive(Clone, Copy, Debug)]
pub struct ContainerEntry<'a> {
    /// Its kind.
    pub kind: ContainerKind,
    /// Its index within `initContainers`, `containers` or `ephemeralContainers`.
    pub index: usize,
    /// Its spec. For an ephemeral container, the common fields.
    pub spec: &'a Container,
}

/// `spec.restartPolicy` of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RestartPolicy {
    /// Restart whatever the exit code.
    Always,
    /// Restart after a non-zero exit.
    OnFailure,
    /// Never restart.
    Never,
}

/// A pod object lacks what every pod must have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPod {
    /// This field is missing.
    #[error("pod has no {0}")]
    Missing(&'static str),
    /// A name that directories and files are named after would lead elsewhere.
    #[error("{field}: {value:?} cannot be part of a path")]
    Name {
        /// Whose name.
        field: &'static str,
        /// The name.
        value: String,
    },
}

/// A name that is one step of a path, and no more. The API server sees to that; nothing on the node relies on it.
fn step(field: &'static str, value: &str) -> Result<(), BadPod> {
    let fine = value.len() <= 255 && value != "." && value != ".." && !value.contains(['/', '\0']);
    if fine { Ok(()) } else { Err(BadPod::Name { field, value: value.chars().take(255).collect() }) }
}

/// A pod that should run on this node: held once, shared by reference count, and read through accessors so that the
/// representation can change without touching its readers. Equality of content is [`DesiredPod::same_intent`].
#[derive(Clone)]
pub struct DesiredPod(Arc<Inner>);

struct Inner {
    uid: PodUid,
    source: PodSource,
    /// Without its spec.
    pod: Pod,
    /// One for all forms of the pod that ask for the same.
    spec: Arc<Spec>,
    resize: ResizeState,
}

/// What containers are made from.
#[derive(Clone)]
struct Spec {
    spec: PodSpec,
    /// Ephemeral containers as ordinary ones, so that readers need one type.
    ephemeral: Vec<Container>,
}

impl fmt::Debug for DesiredPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DesiredPod({}/{} {})", self.namespace(), self.name(), self.uid())
    }
}

/// Annotation: where a pod came from, as [`PodSource::as_str`].
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Annotation: when a pod was first seen.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
/// Annotation of a static pod: its hash, which is also its UID unless the manifest gives one.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Annotation of a mirror pod: the hash of the static pod that it mirrors.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// Annotations that the kubelet itself puts on pods; they never count as a change of intent.
pub const LOCAL_ANNOTATIONS: [&str; 3] = [CONFIG_SOURCE, CONFIG_SEEN, CONFIG_MIRROR];

impl DesiredPod {
    /// Takes over a pod object that is complete: defaulted, with name, namespace, UID and spec.
    ///
    /// # Errors
    /// Names the field that is missing, or the name that directories cannot be named after.
    pub fn new(mut pod: Pod, source: PodSource) -> Result<Self, BadPod> {
        pod.metadata.managed_fields = None;
        let filled = |s: &Option<String>| s.as_deref().is_some_and(|s| !s.is_empty());
        if !filled(&pod.metadata.name) {
            return Err(BadPod::Missing("metadata.name"));
        }
        if !filled(&pod.metadata.namespace) {
            return Err(BadPod::Missing("metadata.namespace"));
        }
        let uid = match &pod.metadata.uid {
            Some(uid) if !uid.is_empty() => PodUid::new(uid.as_str()),
            _ => return Err(BadPod::Missing("metadata.uid")),
        };
        let spec = pod.spec.take().ok_or(BadPod::Missing("spec"))?;
        let ephemeral: Vec<Container> = spec.ephemeral_containers.iter().flatten().map(common).collect();
        step("metadata.uid", uid.as_str())?;
        step("metadata.name", pod.metadata.name.as_deref().unwrap_or_default())?;
        step("metadata.namespace", pod.metadata.namespace.as_deref().unwrap_or_default())?;
        for container in spec.init_containers.iter().flatten().chain(&spec.containers).chain(&ephemeral) {
            step("container name", &container.name)?;
        }
        for volume in spec.volumes.iter().flatten() {
            step("volume name", &volume.name)?;
        }
        let spec = Arc::new(Spec { spec, ephemeral });
        Ok(Self(Arc::new(Inner { uid, source, pod, spec, resize: ResizeState::default() })))
    }

    /// The same pod, with the spec of `known` in place of its equal one: what is told of a pod's status again and again does not bring as many specs,
    /// and forms of one spec are the same at a glance. Call it where [`DesiredPod::same_intent`] holds, before the pod is handed on.
    #[must_use]
    pub fn sharing(mut self, known: &Self) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.spec = known.0.spec.clone();
        }
        self
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &PodUid {
        &self.0.uid
    }

    /// `metadata.name`, never empty.
    pub fn name(&self) -> &str {
        self.0.pod.metadata.name.as_deref().unwrap_or_default()
    }

    /// `metadata.namespace`, never empty.
    pub fn namespace(&self) -> &str {
        self.0.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// `NAME_NAMESPACE`: how the kubelet tells static pods of the same name apart from each other and names pods in messages.
    pub fn full_name(&self) -> String {
        format!("{}_{}", self.name(), self.namespace())
    }

    /// Where it came from.
    pub fn source(&self) -> PodSource {
        self.0.source
    }

    /// True for pods from a file or a URL.
    pub fn is_static(&self) -> bool {
        self.0.source != PodSource::Api
    }

    /// `metadata`, without managedFields.
    pub fn meta(&self) -> &ObjectMeta {
        &self.0.pod.metadata
    }

    /// `spec`.
    pub fn spec(&self) -> &PodSpec {
        &self.0.spec.spec
    }

    /// The status that came with the object (API pods), if any. It is the API server's memory, not an observation.
    pub fn stored_status(&self) -> Option<&PodStatus> {
        self.0.pod.status.as_ref()
    }

    /// The whole object, put together again (for /pods and for patches).
    pub fn to_pod(&self) -> Pod {
        Pod { spec: Some(self.spec().clone()), ..self.0.pod.clone() }
    }

    /// One annotation's value.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.0.pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// True when the API asked for its deletion.
    pub fn is_deleting(&self) -> bool {
        self.0.pod.metadata.deletion_timestamp.is_some()
    }

    /// `spec.restartPolicy`; Always when unset, as defaulting does.
    pub fn restart_policy(&self) -> RestartPolicy {
        match self.spec().restart_policy.as_deref() {
            Some("Never") => RestartPolicy::Never,
            Some("OnFailure") => RestartPolicy::OnFailure,
            _ => RestartPolicy::Always,
        }
    }

    /// `spec.hostNetwork`.
    pub fn host_network(&self) -> bool {
        self.spec().host_network.unwrap_or(false)
    }

    /// Every container of the spec: init and sidecars in their order, then app containers, then ephemeral ones.
    pub fn containers(&self) -> impl Iterator<Item = ContainerEntry<'_>> {
        self.init_containers().chain(self.app_containers()).chain(self.ephemeral_containers())
    }

    /// `spec.initContainers`, sidecars among them.
    pub fn init_containers(&self) -> impl DoubleEndedIterator<Item = ContainerEntry<'_>> {
        self.spec().init_containers.as_deref().unwrap_or_default().iter().enumerate().map(|(index, spec)| {
            ContainerEntry {
                kind: if spec.restart_policy.as_deref() == Some("Always") {
                    ContainerKind::Sidecar
                } else {
                    ContainerKind::Init
                },
                index,
                spec,
            }
        })
    }

    /// `spec.containers`.
    pub fn app_containers(&self) -> impl DoubleEndedIterator<Item = ContainerEntry<'_>> {
        self.spec().containers.iter().enumerate().map(|(index, spec)| ContainerEntry {
            kind: ContainerKind::App,
            index,
            spec,
        })
    }

    /// `spec.ephemeralContainers`, with their common fields.
    pub fn ephemeral_containers(&self) -> impl DoubleEndedIterator<Item = ContainerEntry<'_>> {
        self.0.spec.ephemeral.iter().enumerate().map(|(index, spec)| ContainerEntry {
            kind: ContainerKind::Ephemeral,
            index,
            spec,
        })
    }

    /// The container of this name, of whatever kind.
    pub fn container(&self, name: &str) -> Option<ContainerEntry<'_>> {
        self.containers().find(|c| c.spec.name == name)
    }

    /// `spec.ephemeralContainers[index].targetContainerName`.
    pub fn ephemeral_target(&self, index: usize) -> Option<&str> {
        self.spec().ephemeral_containers.as_ref()?.get(index)?.target_container_name.as_deref()
    }

    /// How the pod's wish for other resources stands. Empty in the form that a source gives.
    pub fn resize(&self) -> &ResizeState {
        &self.0.resize
    }

    /// True when the pod asks for other resources than these. Containers that the allocation does not name have what they ask for.
    pub fn asks_other_than(&self, given: &PodAllocation) -> bool {
        let spec = self.spec();
        let differs = |c: &Container| {
            given
                .containers
                .get(&c.name)
                .is_some_and(|g| !same_requirements(g, c.resources.as_ref().unwrap_or(&Default::default())))
        };
        let level = |r: Option<&crate::api::ResourceRequirements>| r.cloned().unwrap_or_default();
        !same_requirements(&level(spec.resources.as_ref()), &level(given.pod_level.as_ref()))
            || spec.init_containers.iter().flatten().chain(&spec.containers).any(differs)
    }

    /// The pod with what it was given in place of what it asks for: the form in which it runs.
    #[must_use]
    pub fn given(&self, given: &PodAllocation, resize: ResizeState) -> Self {
        let differs = self.asks_other_than(given);
        if !differs && resize == self.0.resize {
            return self.clone();
        }
        let mut shared = self.0.spec.clone();
        if differs {
            let spec = &mut Arc::make_mut(&mut shared).spec;
            spec.resources.clone_from(&given.pod_level);
            for c in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
                if let Some(resources) = given.containers.get(&c.name) {
                    c.resources = Some(resources.clone());
                }
            }
        }
        let inner = &*self.0;
        let (uid, source, pod) = (inner.uid.clone(), inner.source, inner.pod.clone());
        Self(Arc::new(Inner { uid, source, pod, spec: shared, resize }))
    }

    /// The pod with another word on its resize.
    #[must_use]
    pub fn resizing(&self, resize: ResizeState) -> Self {
        let inner = &*self.0;
        if resize == inner.resize {
            return self.clone();
        }
        let (uid, source, pod, spec) = (inner.uid.clone(), inner.source, inner.pod.clone(), inner.spec.clone());
        Self(Arc::new(Inner { uid, source, pod, spec, resize }))
    }

    /// True when `other` asks for the same: same labels, annotations (but for [`LOCAL_ANNOTATIONS`]), spec and deletion.
    pub fn same_intent(&self, other: &Self) -> bool {
        let (a, b) = (self.meta(), other.meta());
        Arc::ptr_eq(&self.0, &other.0)
            || (self.uid() == other.uid()
                && a.deletion_timestamp == b.deletion_timestamp
                && a.deletion_grace_period_seconds == b.deletion_grace_period_seconds
                && a.generation == b.generation
                && a.labels.iter().flatten().eq(b.labels.iter().flatten())
                && notes(a).eq(notes(b))
                && (Arc::ptr_eq(&self.0.spec, &other.0.spec) || self.spec() == other.spec()))
    }
}

/// Annotations that count as intent.
fn notes(meta: &ObjectMeta) -> impl Iterator<Item = (&String, &String)> {
    meta.annotations.iter().flatten().filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
}

/// The fields that an ephemeral container has in common with an ordinary one.
fn common(c: &EphemeralContainer) -> Container {
    Container {
        args: c.args.clone(),
        command: c.command.clone(),
        env: c.env.clone(),
        env_from: c.env_from.clone(),
        image: c.image.clone(),
        image_pull_policy: c.image_pull_policy.clone(),
        lifecycle: c.lifecycle.clone(),
        liveness_probe: c.liveness_probe.clone(),
        name: c.name.clone(),
        ports: c.ports.clone(),
        readiness_probe: c.readiness_probe.clone(),
        resize_policy: c.resize_policy.clone(),
        resources: c.resources.clone(),
        restart_policy: c.restart_policy.clone(),
        restart_policy_rules: c.restart_policy_rules.clone(),
        security_context: c.security_context.clone(),
        startup_probe: c.startup_probe.clone(),
        stdin: c.stdin,
        stdin_once: c.stdin_once,
        termination_message_path: c.termination_message_path.clone(),
        termination_message_policy: c.termination_message_policy.clone(),
        tty: c.tty,
        volume_devices: c.volume_devices.clone(),
        volume_mounts: c.volume_mounts.clone(),
        working_dir: c.working_dir.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_leads_out_of_its_directory() {
        let made = |change: fn(&mut Pod, String), value: &str| {
            let mut pod: Pod = serde_json::from_str(
                r#"{"metadata":{"name":"n","namespace":"ns","uid":"u"},"spec":{"containers":[{"name":"c"}],
                    "initContainers":[{"name":"i"}],"ephemeralContainers":[{"name":"e"}],"volumes":[{"name":"v"}]}}"#,
            )
            .unwrap();
            change(&mut pod, value.to_owned());
            DesiredPod::new(pod, PodSource::File)
        };
        let places: [fn(&mut Pod, String); 7] = [
            |p, v| p.metadata.uid = Some(v),
            |p, v| p.metadata.name = Some(v),
            |p, v| p.metadata.namespace = Some(v),
            |p, v| p.spec.as_mut().unwrap().containers[0].name = v,
            |p, v| p.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0].name = v,
            |p, v| p.spec.as_mut().unwrap().ephemeral_containers.as_mut().unwrap()[0].name = v,
            |p, v| p.spec.as_mut().unwrap().volumes.as_mut().unwrap()[0].name = v,
        ];
        for (at, place) in places.into_iter().enumerate() {
            for fine in ["a", "0d9f1c2e-aaaa", "..a", "a..b"] {
                assert!(made(place, fine).is_ok(), "{at} {fine}");
            }
            for bad in [".", "..", "/", "../x", "a/b", "/etc", "a\0b", &"a".repeat(256)] {
                assert!(matches!(made(place, bad), Err(BadPod::Name { .. })), "{at} {bad:?}");
            }
        }
    }
}
