//! `oom_score_adj` of a container.

use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

use super::aggregate::{containers_sum, pod_level_requests};
use super::{MEMORY, QosClass, container_requests, has_pod_level_requests, is_node_critical, qos_class, value};

const GUARANTEED: i64 = -997;
const BEST_EFFORT: i64 = 1000;

/// The score: the more of the node's memory is requested, the later the kernel kills. `memory_capacity`: MemTotal in bytes.
/// `pod_level`: gate PodLevelResources (KEP-2837: what the pod requests beyond its containers is shared among them).
pub fn oom_score_adj(pod: &DesiredPod, container: ContainerEntry<'_>, memory_capacity: i64, pod_level: bool) -> i64 {
    if is_node_critical(pod) {
        return GUARANTEED;
    }
    match qos_class(pod, pod_level) {
        QosClass::Guaranteed => return GUARANTEED,
        QosClass::BestEffort => return BEST_EFFORT,
        QosClass::Burstable => {}
    }
    let share = if pod_level && has_pod_level_requests(pod) { unassigned_share(pod) } else { 0 };
    let score =
        |request: i64| BEST_EFFORT - request.saturating_add(share).saturating_mul(1000) / memory_capacity.max(1);
    let own = |c: ContainerEntry<'_>| value(&container_requests(c), MEMORY);
    let mut adj = score(own(container));
    if container.kind == ContainerKind::Sidecar {
        // A sidecar must not be killed before the containers that it serves.
        let smallest = pod.app_containers().map(own).min().unwrap_or(0);
        adj = adj.min(score(smallest));
    }
    // A Guaranteed pod that uses all memory scores up to 3, and BestEffort is to go first.
    adj.clamp(BEST_EFFORT + GUARANTEED, BEST_EFFORT - 1)
}

/// What the pod requests beyond its containers, divided among them.
fn unassigned_share(pod: &DesiredPod) -> i64 {
    let total = value(&pod_level_requests(pod), MEMORY);
    let count = i64::try_from(pod.app_containers().count() + pod.init_containers().count()).unwrap_or(i64::MAX);
    if total == 0 || count == 0 {
        return 0;
    }
    (total - value(&containers_sum(pod, container_requests, |_| {}), MEMORY)) / count
}

#[cfg(test)]
mod tests {
    use model::pod::PodSource;

    use super::*;
    use crate::resources::testing::{pod, pod_from};

    const GIB: i64 = 1 << 30;

    fn adj(pod: &DesiredPod, name: &str) -> i64 {
        oom_score_adj(pod, pod.container(name).expect("container"), 8 * GIB, true)
    }

    #[test]
    fn burstable_follows_the_request() {
        for (request, want) in
            [("64Mi", 993), ("512Mi", 938), ("1Gi", 875), ("4Gi", 500), ("8Gi", 3), ("16Gi", 3), ("1", 999)]
        {
            let spec = format!(
                r#"{{"containers": [{{"name": "a", "resources": {{"requests": {{"memory": "{request}"}}}}}}]}}"#
            );
            assert_eq!(adj(&pod(&spec), "a"), want, "{request}");
        }
        assert_eq!(adj(&pod(r#"{"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}"#), "a"), 999);
    }

    #[test]
    fn classes_and_critical() {
        let guaranteed = r#"{"containers": [{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}}]}"#;
        assert_eq!(adj(&pod(guaranteed), "a"), -997);
        let best_effort = r#"{"containers": [{"name": "a"}], "priorityClassName": "system-node-critical"}"#;
        assert_eq!(adj(&pod(best_effort), "a"), 1000);
        assert_eq!(adj(&pod_from(PodSource::File, "{}", best_effort), "a"), -997);
    }

    #[test]
    fn sidecars_go_after_the_containers_that_they_serve() {
        let p = pod(
            r#"{"initContainers": [{"name": "s", "restartPolicy": "Always", "resources": {"requests": {"memory": "64Mi"}}},
                                   {"name": "i", "resources": {"requests": {"memory": "64Mi"}}}],
                "containers": [{"name": "a", "resources": {"requests": {"memory": "1Gi"}}}, {"name": "b", "resources": {"requests": {"memory": "4Gi"}}}]}"#,
        );
        assert_eq!((adj(&p, "s"), adj(&p, "i"), adj(&p, "a"), adj(&p, "b")), (875, 993, 875, 500));
    }

    #[test]
    fn pod_level_request_is_shared() {
        // 2Gi − (256Mi + 256Mi) = 1536Mi, by three containers: 512Mi each.
        let p = pod(r#"{"resources": {"requests": {"memory": "2Gi"}},
                "initContainers": [{"name": "i"}],
                "containers": [{"name": "a", "resources": {"requests": {"memory": "256Mi"}}}, {"name": "b", "resources": {"requests": {"memory": "256Mi"}}}]}"#);
        assert_eq!((adj(&p, "a"), adj(&p, "i")), (1000 - 93, 938));
        assert_eq!(oom_score_adj(&p, p.container("a").expect("a"), 8 * GIB, false), 969);
    }
}
