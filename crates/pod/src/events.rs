//! The way of events about pods, and of their trouble with the node, to whoever keeps them. Recording never waits and never fails.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use model::api::ObjectReference;
use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

/// Takes events: the API's recorder, or a test.
pub trait EventSink: Send + Sync {
    /// Records one event; `kind` is `Normal` or `Warning`. Must not block.
    fn event(&self, about: &ObjectReference, kind: &'static str, reason: &str, message: &str);
    /// Records one with annotations, where they are kept.
    fn annotated(
        &self,
        about: &ObjectReference,
        annotations: &BTreeMap<String, String>,
        kind: &'static str,
        reason: &str,
        message: &str,
    ) {
        let _ = annotations;
        self.event(about, kind, reason, message);
    }
}

impl EventSink for cluster::events::Recorder {
    fn event(&self, about: &ObjectReference, kind: &'static str, reason: &str, message: &str) {
        Self::event(self, about, kind, reason, message);
    }

    fn annotated(
        &self,
        about: &ObjectReference,
        annotations: &BTreeMap<String, String>,
        kind: &'static str,
        reason: &str,
        message: &str,
    ) {
        Self::annotated(self, about, annotations, kind, reason, message);
    }
}

/// Records events about pods and their containers. The default one drops them: without an API server nobody keeps events.
#[derive(Clone, Default)]
pub struct Events(Option<Arc<dyn EventSink>>);

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Events").field(&self.0.is_some()).finish()
    }
}

impl Events {
    /// Events that go to `sink`.
    pub fn to(sink: Arc<dyn EventSink>) -> Self {
        Self(Some(sink))
    }

    /// `Normal`, about the pod.
    pub fn pod_normal(&self, pod: &DesiredPod, reason: &str, message: &str) {
        self.send(pod, None, "Normal", reason, message);
    }

    /// `Warning`, about the pod.
    pub fn pod_warning(&self, pod: &DesiredPod, reason: &str, message: &str) {
        self.send(pod, None, "Warning", reason, message);
    }

    /// `Warning`, about the pod, with annotations.
    pub fn pod_annotated(&self, pod: &DesiredPod, annotations: &BTreeMap<String, String>, reason: &str, message: &str) {
        if let Some(sink) = &self.0 {
            sink.annotated(&reference(pod, None), annotations, "Warning", reason, message);
        }
    }

    /// `Warning`, about the node.
    pub fn node_warning(&self, node: &str, reason: &str, message: &str) {
        let Some(sink) = &self.0 else { return };
        let about = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            uid: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        sink.event(&about, "Warning", reason, message);
    }

    /// `Normal`, about one of its containers.
    pub fn normal(&self, pod: &DesiredPod, container: &str, reason: &str, message: &str) {
        self.send(pod, Some(container), "Normal", reason, message);
    }

    /// `Warning`, about one of its containers.
    pub fn warning(&self, pod: &DesiredPod, container: &str, reason: &str, message: &str) {
        self.send(pod, Some(container), "Warning", reason, message);
    }

    fn send(&self, pod: &DesiredPod, container: Option<&str>, kind: &'static str, reason: &str, message: &str) {
        let Some(sink) = &self.0 else { return };
        let field = container.and_then(|name| pod.container(name)).map(field_path);
        sink.event(&reference(pod, field), kind, reason, message);
    }
}

/// `spec.containers{NAME}`, with the list that the container stands in.
fn field_path(entry: ContainerEntry<'_>) -> String {
    let list = match entry.kind {
        ContainerKind::Init | ContainerKind::Sidecar => "initContainers",
        ContainerKind::App => "containers",
        ContainerKind::Ephemeral => "ephemeralContainers",
    };
    format!("spec.{list}{{{}}}", entry.spec.name)
}

fn reference(pod: &DesiredPod, field_path: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace().to_owned()),
        name: Some(pod.name().to_owned()),
        uid: Some(pod.uid().to_string()),
        resource_version: pod.meta().resource_version.clone(),
        field_path,
    }
}
