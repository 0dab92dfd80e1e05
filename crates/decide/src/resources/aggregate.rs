//! Requests and limits of a whole pod (KEP-753 for sidecars, KEP-2837 for pod-level resources).

use model::pod::{ContainerEntry, ContainerKind, DesiredPod};

use super::{ResourceList, hugepages, optional_list};

/// What goes into a pod's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodSum {
    /// `spec.overhead` is added (to limits only where there is one).
    pub overhead: bool,
    /// `spec.resources` stands for the containers' sum (gate PodLevelResources, on by default).
    pub pod_level: bool,
}

impl Default for PodSum {
    fn default() -> Self {
        Self { overhead: true, pod_level: true }
    }
}

/// `resources.requests` of a container.
pub fn container_requests(container: ContainerEntry<'_>) -> ResourceList {
    optional_list(container.spec.resources.as_ref().and_then(|r| r.requests.as_ref()))
}

/// `resources.limits` of a container.
pub fn container_limits(container: ContainerEntry<'_>) -> ResourceList {
    optional_list(container.spec.resources.as_ref().and_then(|r| r.limits.as_ref()))
}

/// `spec.resources.requests`, those that a pod may set (cpu, memory, huge pages).
pub(crate) fn pod_level_requests(pod: &DesiredPod) -> ResourceList {
    supported(optional_list(pod.spec().resources.as_ref().and_then(|r| r.requests.as_ref())))
}

/// `spec.resources.limits`, those that a pod may set.
pub(crate) fn pod_level_limits(pod: &DesiredPod) -> ResourceList {
    supported(optional_list(pod.spec().resources.as_ref().and_then(|r| r.limits.as_ref())))
}

fn supported(mut list: ResourceList) -> ResourceList {
    list.retain(|name, _| name == super::CPU || name == super::MEMORY || hugepages::is_resource(name));
    list
}

/// The pod sets requests of its own.
pub fn has_pod_level_requests(pod: &DesiredPod) -> bool {
    !pod_level_requests(pod).is_empty()
}

/// The pod sets limits of its own.
pub fn has_pod_level_limits(pod: &DesiredPod) -> bool {
    !pod_level_limits(pod).is_empty()
}

/// The pod sets requests or limits of its own.
pub fn has_pod_level_resources(pod: &DesiredPod) -> bool {
    has_pod_level_requests(pod) || has_pod_level_limits(pod)
}

/// Requests of the pod.
pub fn pod_requests(pod: &DesiredPod, what: PodSum) -> ResourceList {
    let mut sum = containers_sum(pod, container_requests, |_| {});
    if what.pod_level {
        sum.extend(pod_level_requests(pod));
    }
    if what.overhead {
        add(&mut sum, &optional_list(pod.spec().overhead.as_ref()));
    }
    sum
}

/// Limits of the pod. A resource that only some containers limit is in the sum all the same.
pub fn pod_limits(pod: &DesiredPod, what: PodSum) -> ResourceList {
    pod_limits_seen(pod, what, |_| {})
}

/// [`pod_limits`]; `seen` gets what each container is limited to while it runs: its own limits, for init containers together with the
/// sidecars before them.
pub(crate) fn pod_limits_seen(pod: &DesiredPod, what: PodSum, seen: impl FnMut(&ResourceList)) -> ResourceList {
    let mut sum = containers_sum(pod, container_limits, seen);
    if what.pod_level {
        sum.extend(pod_level_limits(pod));
    }
    if what.overhead {
        for (name, amount) in optional_list(pod.spec().overhead.as_ref()) {
            if let Some(limit) = sum.get_mut(&name).filter(|l| !l.is_zero()) {
                limit.add(&amount);
            }
        }
    }
    sum
}

/// The greater of: app containers and all sidecars together; each init container together with the sidecars before it.
pub(crate) fn containers_sum(
    pod: &DesiredPod,
    of: impl Fn(ContainerEntry<'_>) -> ResourceList,
    mut seen: impl FnMut(&ResourceList),
) -> ResourceList {
    let mut sum = ResourceList::new();
    for container in pod.app_containers() {
        let own = of(container);
        seen(&own);
        add(&mut sum, &own);
    }
    let mut sidecars = ResourceList::new();
    let mut init_peak = ResourceList::new();
    for container in pod.init_containers() {
        let mut own = of(container);
        if container.kind == ContainerKind::Sidecar {
            add(&mut sum, &own);
            add(&mut sidecars, &own);
            own = sidecars.clone();
        } else {
            add(&mut own, &sidecars);
        }
        seen(&own);
        raise(&mut init_peak, &own);
    }
    raise(&mut sum, &init_peak);
    sum
}

/// Adds every resource of `more`.
pub(crate) fn add(list: &mut ResourceList, more: &ResourceList) {
    for (name, amount) in more {
        match list.get_mut(name) {
            Some(sum) => sum.add(amount),
            None => {
                list.insert(name.clone(), amount.clone());
            }
        }
    }
}

/// Raises every resource to at least what `floor` has.
fn raise(list: &mut ResourceList, floor: &ResourceList) {
    for (name, amount) in floor {
        if list.get(name).is_none_or(|have| amount > have) {
            list.insert(name.clone(), amount.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::{pod, show};

    #[test]
    fn init_containers_sidecars_overhead_and_pod_level() {
        let spec = r#"{
            "initContainers": [
                {"name": "i1", "resources": {"requests": {"cpu": "2", "memory": "10Mi"}, "limits": {"cpu": "2"}}},
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m", "memory": "100Mi"}}},
                {"name": "i2", "resources": {"requests": {"cpu": "1950m", "example.com/x": "3"}}}],
            "containers": [
                {"name": "a", "resources": {"requests": {"cpu": "1", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}},
                {"name": "b", "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi", "cpu": "0"}}}],
            "overhead": {"cpu": "10m", "memory": "1Mi"}"#;
        let plain = pod(&format!("{spec}}}"));
        // cpu: apps and sidecar 1600m, i1 2000m, i2 with sidecar 2050m.
        assert_eq!(show(&pod_requests(&plain, PodSum::default())), "cpu=2060m example.com/x=3 memory=165Mi");
        let bare = PodSum { overhead: false, pod_level: true };
        assert_eq!(show(&pod_requests(&plain, bare)), "cpu=2050m example.com/x=3 memory=164Mi");
        // Overhead is added only where a limit is set.
        assert_eq!(show(&pod_limits(&plain, PodSum::default())), "cpu=2010m memory=1153Mi");

        let level = pod(&format!(
            r#"{spec}, "resources": {{"requests": {{"cpu": "3", "example.com/x": "9"}}, "limits": {{"memory": "2Gi"}}}}}}"#
        ));
        assert_eq!(show(&pod_requests(&level, bare)), "cpu=3 example.com/x=3 memory=164Mi");
        assert_eq!(show(&pod_limits(&level, bare)), "cpu=2 memory=2Gi");
        let skip = PodSum { overhead: false, pod_level: false };
        assert_eq!(show(&pod_requests(&level, skip)), "cpu=2050m example.com/x=3 memory=164Mi");
        assert!(has_pod_level_resources(&level) && !has_pod_level_resources(&plain));
    }

    #[test]
    fn no_resources_no_sum() {
        assert_eq!(show(&pod_requests(&pod(r#"{"containers": [{"name": "a"}]}"#), PodSum::default())), "");
    }
}
