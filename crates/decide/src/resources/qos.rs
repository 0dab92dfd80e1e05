//! QoS class and criticality of a pod.

use model::pod::{CONFIG_MIRROR, DesiredPod, PodSource};

use super::{CPU, MEMORY, ResourceList, container_limits, container_requests, optional_list};

/// `status.qosClass`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QosClass {
    /// Limits for CPU and memory everywhere, equal to the requests.
    Guaranteed,
    /// Anything between.
    Burstable,
    /// No request and no limit.
    BestEffort,
}

impl QosClass {
    /// The API's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BestEffort",
        }
    }
}

/// The class in the object's status if it has one, else [`compute_qos_class`]. It never changes in a pod's life.
pub fn qos_class(pod: &DesiredPod, pod_level: bool) -> QosClass {
    match pod.stored_status().and_then(|s| s.qos_class.as_deref()) {
        Some("Guaranteed") => QosClass::Guaranteed,
        Some("Burstable") => QosClass::Burstable,
        Some("BestEffort") => QosClass::BestEffort,
        _ => compute_qos_class(pod, pod_level),
    }
}

/// The class that CPU and memory of the pod level, else of all app and init containers, give. `pod_level`: gate PodLevelResources.
pub fn compute_qos_class(pod: &DesiredPod, pod_level: bool) -> QosClass {
    let mut requests = ResourceList::new();
    let mut limits = ResourceList::new();
    let mut all_limited = true;
    let own = pod.spec().resources.as_ref().filter(|_| pod_level);
    if let Some(own) = own {
        sum(&mut requests, optional_list(own.requests.as_ref()));
        let given = optional_list(own.limits.as_ref());
        if !given.is_empty() {
            all_limited = sum(&mut limits, given);
        }
    } else {
        for container in pod.app_containers().chain(pod.init_containers()) {
            sum(&mut requests, container_requests(container));
            all_limited &= sum(&mut limits, container_limits(container));
        }
    }
    if requests.is_empty() && limits.is_empty() {
        QosClass::BestEffort
    } else if all_limited && requests == limits {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// Adds the positive amounts of CPU and memory; true when both are there.
fn sum(total: &mut ResourceList, mut list: ResourceList) -> bool {
    list.retain(|name, amount| (name == CPU || name == MEMORY) && amount.sign() > 0);
    super::aggregate::add(total, &list);
    list.len() == 2
}

/// Least priority that makes a pod critical (`system-cluster-critical`).
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Static pods, mirror pods, and those of system priority.
pub fn is_critical(pod: &DesiredPod) -> bool {
    pod.source() != PodSource::Api
        || pod.annotation(CONFIG_MIRROR).is_some()
        || pod.spec().priority.is_some_and(|p| p >= CRITICAL_PRIORITY)
}

/// Critical and of the class `system-node-critical`.
pub fn is_node_critical(pod: &DesiredPod) -> bool {
    is_critical(pod) && pod.spec().priority_class_name.as_deref() == Some("system-node-critical")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::pod;

    #[test]
    fn classes() {
        let both = r#"{"cpu": "1", "memory": "1Gi"}"#;
        let same = r#"{"cpu": "1000m", "memory": "1024Mi"}"#;
        let cases = [
            (r#"[{"name": "a"}]"#.to_string(), "[]", "null", QosClass::BestEffort),
            (
                r#"[{"name": "a", "resources": {"requests": {"cpu": "0"}, "limits": {"nvidia.com/gpu": "1"}}}]"#.into(),
                "[]",
                "null",
                QosClass::BestEffort,
            ),
            (
                format!(r#"[{{"name": "a", "resources": {{"requests": {both}, "limits": {same}}}}}]"#),
                "[]",
                "null",
                QosClass::Guaranteed,
            ),
            (
                format!(r#"[{{"name": "a", "resources": {{"requests": {both}, "limits": {same}}}}}]"#),
                r#"[{"name": "i"}]"#,
                "null",
                QosClass::Burstable,
            ),
            (format!(r#"[{{"name": "a", "resources": {{"limits": {both}}}}}]"#), "[]", "null", QosClass::Burstable),
            (
                r#"[{"name": "a", "resources": {"requests": {"memory": "1Mi"}}}]"#.into(),
                "[]",
                "null",
                QosClass::Burstable,
            ),
            (
                r#"[{"name": "a"}]"#.into(),
                "[]",
                r#"{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}"#,
                QosClass::Guaranteed,
            ),
            (
                r#"[{"name": "a"}]"#.into(),
                "[]",
                r#"{"limits": {"memory": "1Gi"}, "requests": {"memory": "1Gi"}}"#,
                QosClass::Burstable,
            ),
            (format!(r#"[{{"name": "a", "resources": {{"limits": {both}}}}}]"#), "[]", "{}", QosClass::BestEffort),
        ];
        for (containers, init, level, want) in cases {
            let spec = format!(r#"{{"containers": {containers}, "initContainers": {init}, "resources": {level}}}"#);
            assert_eq!(compute_qos_class(&pod(&spec), true), want, "{spec}");
        }
    }

    #[test]
    fn critical() {
        use crate::resources::testing::pod_from;
        let spec = |more: &str| format!(r#"{{"containers": [{{"name": "a"}}]{more}}}"#);
        assert!(!is_critical(&pod(&spec(""))));
        assert!(is_critical(&pod_from(PodSource::File, "{}", &spec(""))));
        assert!(is_critical(&pod(&spec(r#", "priority": 2000000000"#))));
        assert!(!is_node_critical(&pod(&spec(r#", "priorityClassName": "system-node-critical""#))));
        assert!(is_node_critical(&pod_from(
            PodSource::File,
            "{}",
            &spec(r#", "priorityClassName": "system-node-critical""#)
        )));
    }
}
