//! Resources of the pod as a whole.

use std::collections::BTreeMap;

use model::api::{Quantity, ResourceRequirements};
use model::pod::DesiredPod;

use crate::resources::{PodSum, ResourceList, pod_limits, pod_requests};

/// What a status shows of the pod as a whole, gate `InPlacePodLevelResourcesVerticalScaling`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodResources {
    /// `status.allocatedResources`: effective requests, overhead included.
    pub allocated: BTreeMap<String, Quantity>,
    /// `status.resources`.
    pub resources: ResourceRequirements,
}

/// The sums of a pod: of what it was given, and of what it has. `pod`: in the form in which it runs; `has`: the same pod with what it was last
/// given, while that is something else. `pod_level`: gate PodLevelResources.
pub fn pod_resources(pod: &DesiredPod, has: &DesiredPod, pod_level: bool) -> PodResources {
    let what = PodSum { overhead: true, pod_level };
    let shown = |sum: ResourceList| sum.into_iter().map(|(name, q)| (name, q.to_api())).collect::<BTreeMap<_, _>>();
    let allocated = shown(pod_requests(pod, what));
    let some = |list: BTreeMap<String, Quantity>| Some(list).filter(|l| !l.is_empty());
    let resources = ResourceRequirements {
        requests: some(shown(pod_requests(has, what))),
        limits: some(shown(pod_limits(has, what))),
        claims: None,
    };
    PodResources { allocated, resources }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::testing::pod;

    /// As the Go kubelet 1.36.1 shows them (testing/differential).
    #[test]
    fn sums_as_with_go() {
        let both = r#"{"overhead": {"cpu": "50m", "memory": "10Mi"},
            "initContainers": [
                {"name": "big", "resources": {"requests": {"cpu": "400m", "memory": "200Mi"}, "limits": {"cpu": "1", "memory": "300Mi"}}},
                {"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "20m", "memory": "8Mi"}, "limits": {"cpu": "30m", "memory": "16Mi"}}}],
            "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "1500m", "memory": "64Mi"}}},
                {"name": "d", "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"cpu": "5m", "memory": "32Mi"}}}]}"#;
        let level = r#"{"resources": {"requests": {"cpu": "200m", "memory": "100Mi"}, "limits": {"cpu": "500m", "memory": "200Mi"}},
            "containers": [{"name": "c"}, {"name": "d", "resources": {"requests": {"cpu": "50m", "memory": "20Mi"}, "limits": {"memory": "50Mi"}}}]}"#;
        for (spec, allocated, resources) in [
            (
                both,
                json!({"cpu": "450m", "memory": "210Mi"}),
                json!({"requests": {"cpu": "450m", "memory": "210Mi"}, "limits": {"cpu": "1585m", "memory": "310Mi"}}),
            ),
            (
                level,
                json!({"cpu": "200m", "memory": "100Mi"}),
                json!({"requests": {"cpu": "200m", "memory": "100Mi"}, "limits": {"cpu": "500m", "memory": "200Mi"}}),
            ),
            (r#"{"containers": [{"name": "c"}]}"#, json!({}), json!({})),
        ] {
            let got = pod_resources(&pod(spec), &pod(spec), true);
            assert_eq!(serde_json::to_value(&got.allocated).expect("json"), allocated, "{spec}");
            assert_eq!(serde_json::to_value(&got.resources).expect("json"), resources, "{spec}");
        }
    }
}
