//! Size of memory-backed emptyDir volumes.

use model::pod::DesiredPod;
use model::quantity::Quantity;

use super::{MEMORY, PodCgroupOptions, ResourceList, pod_cgroup_resources};

/// The size of a tmpfs in bytes: the least of `sizeLimit`, the memory limit that the pod's cgroup gets, and the node's allocatable
/// memory. 0: not limited (nothing is known of the node's memory).
pub fn memory_volume_size(pod: &DesiredPod, size_limit: Option<&Quantity>, allocatable: &ResourceList) -> i64 {
    let mut size = super::value(allocatable, MEMORY);
    let pod_limit = pod_cgroup_resources(pod, &PodCgroupOptions::default()).memory_limit;
    for limit in pod_limit.into_iter().chain(size_limit.map(Quantity::value)) {
        if limit > 0 && limit <= size {
            size = limit;
        }
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::pod;

    #[test]
    fn least_of_limit_pod_and_node() {
        const MI: i64 = 1 << 20;
        let node = ResourceList::from([(
            MEMORY.to_string(),
            Quantity::from_value(4096 * MI, model::quantity::Format::BinarySI),
        )]);
        let none = r#"{"containers": [{"name": "a"}]}"#;
        let limited = r#"{"containers": [{"name": "a", "resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}]}"#;
        let half = r#"{"containers": [{"name": "a", "resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}, {"name": "b"}]}"#;
        let level = r#"{"resources": {"limits": {"memory": "32Mi"}}, "containers": [{"name": "a"}]}"#;
        for (spec, limit, want) in [
            (none, None, 4096),
            (none, Some("16Mi"), 16),
            (none, Some("8Gi"), 4096),
            (none, Some("0"), 4096),
            (limited, None, 64),
            (limited, Some("16Mi"), 16),
            (limited, Some("1Gi"), 64),
            (half, None, 4096),
            (half, Some("1Gi"), 1024),
            (level, None, 32),
        ] {
            let limit = limit.map(|l| Quantity::parse(l).expect("quantity"));
            assert_eq!(memory_volume_size(&pod(spec), limit.as_ref(), &node), want * MI, "{spec} {limit:?}");
        }
        assert_eq!(memory_volume_size(&pod(none), None, &ResourceList::new()), 0);
    }
}
