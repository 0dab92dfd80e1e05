//! The words in which an eviction is told.

use std::collections::BTreeMap;

use model::pod::{ContainerKind, DesiredPod};
use model::quantity::{Format, Quantity};

use super::rank::{ContainerUsage, Ranked};
use super::signal::Resource;
use super::state::{Observations, Shortage};
use crate::resources::has_pod_level_resources;

/// What is told of one evicted pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Message of its status, of its condition and of the event.
    pub message: String,
    /// Annotations of the event.
    pub annotations: BTreeMap<String, String>,
}

/// The node's event about what is to be won back.
pub fn reclaiming(resource: Resource) -> String {
    format!("Attempting to reclaim {}", resource.as_str())
}

/// Why this pod goes: what the node is short of, and which of its containers use more than they asked for. `pod_level`: gate PodLevelResources.
pub fn words(chosen: &Ranked<'_>, shortage: &Shortage, observations: &Observations, pod_level: bool) -> Words {
    let resource = shortage.threshold.signal.resource();
    let name = resource.as_str();
    let mut message = format!("The node was low on resource: {name}. ");
    let of_resource = shortage.met.iter().filter(|t| t.signal.resource() == resource);
    let measured = of_resource.filter_map(|t| Some((t, observations.get(&t.signal)?))).next();
    if let Some((threshold, seen)) = measured {
        let quantity = threshold.value.of(seen.capacity);
        let available = Quantity::from_value(seen.available, threshold.signal.format());
        message += &format!("Threshold quantity: {quantity}, available: {available}. ");
    }
    let mut words = Words { message, annotations: BTreeMap::new() };
    let Some(usage) = chosen.usage else { return words };
    let mut note = |key: &str, value: String| words.annotations.insert(key.to_owned(), value);
    if resource == Resource::Memory && pod_level && has_pod_level_resources(chosen.pod) {
        let asked = chosen.pod.spec().resources.as_ref().and_then(|r| r.requests.as_ref()?.get(name));
        if let (Some(asked), Some(used)) = (asked.and_then(|q| Quantity::of(q).ok()), usage.memory) {
            let (pod, used) = (chosen.pod.name(), bytes(used));
            words.message +=
                &format!("Pod {pod} was using {used}, request is {asked}, has larger consumption of {name}. ");
            note("offending_pod", pod.to_owned());
            note("offending_pod_usage", used.to_string());
        }
    }
    let (mut names, mut amounts) = (Vec::new(), Vec::new());
    for container in &usage.containers {
        let Some((used, asked)) = compared(chosen.pod, container, resource) else { continue };
        if used > asked {
            words.message += &format!(
                "Container {} was using {used}, request is {asked}, has larger consumption of {name}. ",
                container.name
            );
            names.push(container.name.as_str());
            amounts.push(used.to_string());
        }
    }
    note("offending_containers", names.join(","));
    note("offending_containers_usage", amounts.join(","));
    note("starved_resource", name.to_owned());
    words
}

fn bytes(n: u64) -> Quantity {
    Quantity::from_value(i64::try_from(n).unwrap_or(i64::MAX), Format::BinarySI)
}

/// What a container uses and what it asked for. Ephemeral containers cannot ask for anything and are not blamed.
fn compared(pod: &DesiredPod, container: &ContainerUsage, resource: Resource) -> Option<(Quantity, Quantity)> {
    let used = match resource {
        Resource::Memory => container.memory?,
        Resource::EphemeralStorage => container.layer?.bytes.saturating_add(container.logs?.bytes),
        Resource::Inodes | Resource::Pids => return None,
    };
    let entry = pod.container(&container.name).filter(|c| c.kind != ContainerKind::Ephemeral)?;
    let requests = entry.spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    let asked = requests.and_then(|list| Quantity::of(list.get(resource.as_str())?).ok());
    Some((bytes(used), asked.unwrap_or_else(|| Quantity::from_value(0, Format::DecimalSI))))
}
