//! The cgroups that the kubelet itself makes for pods: their names and what is written into them.

use std::collections::BTreeMap;

use model::cgroup::{CgroupName, CgroupResources};
use model::pod::DesiredPod;

use super::aggregate::{pod_level_limits, pod_limits_seen};
use super::{CPU, MEMORY, PodSum, QosClass, ResourceList, cpu, cpu_milli, hugepages, pod_requests, qos_class, value};

/// Limit that leaves huge pages unbounded.
const UNBOUNDED: u64 = 1 << 62;

/// Gate MemoryQoS (KEP-2570), cgroup v2 only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryQos {
    /// `memoryThrottlingFactor`.
    pub throttling_factor: f64,
    /// `memoryReservationPolicy: TieredReservation`.
    pub tiered_reservation: bool,
    /// Bytes of a page.
    pub page_size: i64,
}

/// The cgroup above all pods, below `cgroupRoot` (a path as `/` or `/my-root/sub`), with `cgroupsPerQOS`.
pub fn kubepods_name(cgroup_root: &str) -> CgroupName {
    CgroupName(cgroup_root.split('/').filter(|p| !p.is_empty()).map(String::from).collect()).child("kubepods")
}

/// The parent of the pods of a class; Guaranteed pods are right in `kubepods`.
pub fn qos_cgroup_name(kubepods: &CgroupName, class: QosClass) -> CgroupName {
    match class {
        QosClass::Guaranteed => kubepods.clone(),
        QosClass::Burstable => kubepods.child("burstable"),
        QosClass::BestEffort => kubepods.child("besteffort"),
    }
}

/// The pod's cgroup; as the driver writes it, it is the sandbox's `cgroup_parent`. `pod_level`: gate PodLevelResources.
pub fn pod_cgroup_name(kubepods: &CgroupName, pod: &DesiredPod, pod_level: bool) -> CgroupName {
    qos_cgroup_name(kubepods, qos_class(pod, pod_level)).child(format!("pod{}", pod.uid()))
}

/// What the node's configuration contributes to a pod's cgroup.
#[derive(Clone, Debug, PartialEq)]
pub struct PodCgroupOptions {
    /// `cpuCFSQuota`, and the pod holds no CPUs of its own.
    pub cpu_quota: bool,
    /// `cpuCFSQuotaPeriod` in µs.
    pub cpu_period: i64,
    /// `podPidsLimit`; None or not positive: none.
    pub pids_limit: Option<i64>,
    /// The node's huge page sizes in the kernel's spelling.
    pub hugepage_sizes: Vec<String>,
    /// Gate MemoryQoS; None: off.
    pub memory_qos: Option<MemoryQos>,
    /// Gate PodLevelResources.
    pub pod_level: bool,
}

impl Default for PodCgroupOptions {
    fn default() -> Self {
        Self {
            cpu_quota: true,
            cpu_period: cpu::DEFAULT_PERIOD,
            pids_limit: None,
            hugepage_sizes: Vec::new(),
            memory_qos: None,
            pod_level: true,
        }
    }
}

/// What is written into a pod's cgroup when it is made. An existing one is left as it is.
pub fn pod_cgroup_resources(pod: &DesiredPod, options: &PodCgroupOptions) -> CgroupResources {
    let what = PodSum { overhead: true, pod_level: options.pod_level };
    let requests = pod_requests(pod, what);
    let (mut cpu_limited, mut memory_limited) = (true, true);
    let limits = pod_limits_seen(pod, what, |own| {
        cpu_limited &= own.get(CPU).is_some_and(|q| !q.is_zero());
        memory_limited &= own.get(MEMORY).is_some_and(|q| !q.is_zero());
    });
    if options.pod_level {
        let own = pod_level_limits(pod);
        cpu_limited |= own.get(CPU).is_some_and(|q| !q.is_zero());
        memory_limited |= own.get(MEMORY).is_some_and(|q| !q.is_zero());
    }

    let class = qos_class(pod, options.pod_level);
    let mut out = CgroupResources {
        cpu_shares: Some(cpu::MIN_SHARES),
        pids_limit: options.pids_limit.filter(|n| *n > 0),
        hugepage_limits: hugepage_limits(&requests, &options.hugepage_sizes),
        ..CgroupResources::default()
    };
    if class != QosClass::BestEffort {
        out.cpu_shares = Some(cpu::shares(cpu_milli(&requests)));
        if cpu_limited || class == QosClass::Guaranteed {
            out.cpu_quota =
                Some(if options.cpu_quota { cpu::quota(cpu_milli(&limits), options.cpu_period) } else { -1 });
            out.cpu_period = u64::try_from(options.cpu_period).ok();
        }
        if memory_limited || class == QosClass::Guaranteed {
            out.memory_limit = Some(value(&limits, MEMORY));
        }
    }
    if options.memory_qos.is_some_and(|m| m.tiered_reservation) && value(&requests, MEMORY) > 0 {
        let file = if class == QosClass::Guaranteed { "memory.min" } else { "memory.low" };
        out.unified.insert(file.into(), value(&requests, MEMORY).to_string());
    }
    out
}

/// The list's huge pages by the kernel's page size; sizes of the node that it does not name are 0.
pub(crate) fn hugepage_limits(list: &ResourceList, sizes: &[String]) -> BTreeMap<String, u64> {
    let mut limits: BTreeMap<_, _> = sizes.iter().map(|size| (size.clone(), 0)).collect();
    limits.extend(hugepages::amounts(list));
    limits
}

/// What the active pods of the classes request together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QosDemand {
    /// CPU of Burstable pods, in thousandths.
    pub burstable_cpu: i64,
    /// Memory of Guaranteed pods, in bytes.
    pub guaranteed_memory: i64,
    /// Memory of Burstable pods, in bytes.
    pub burstable_memory: i64,
}

impl QosDemand {
    /// Sums over pods that may use resources: admitted and not fully terminated.
    pub fn of<'a>(pods: impl IntoIterator<Item = &'a DesiredPod>, pod_level: bool) -> Self {
        let mut demand = Self::default();
        for pod in pods {
            let requests = pod_requests(pod, PodSum { overhead: true, pod_level });
            match qos_class(pod, pod_level) {
                QosClass::Guaranteed => demand.guaranteed_memory += value(&requests, MEMORY),
                QosClass::Burstable => {
                    demand.burstable_cpu += cpu_milli(&requests);
                    demand.burstable_memory += value(&requests, MEMORY);
                }
                QosClass::BestEffort => {}
            }
        }
        demand
    }
}

/// Memory kept for the better classes (gate QOSReserved, `qosReserved`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryReserve {
    /// Percent of what the pods of the better classes request.
    pub percent: i64,
    /// Bytes of the node that are for pods, eviction thresholds among them.
    pub allocatable: i64,
}

impl MemoryReserve {
    /// The memory limit of a class's cgroup in bytes; None: it has none of its own, or what is for pods is not known.
    pub fn limit(&self, class: QosClass, demand: &QosDemand) -> Option<i64> {
        let part =
            |requested: i64| i64::try_from(i128::from(requested) * i128::from(self.percent) / 100).unwrap_or(i64::MAX);
        let burstable = self.allocatable - part(demand.guaranteed_memory);
        match class {
            _ if self.allocatable <= 0 => None,
            QosClass::Guaranteed => None,
            QosClass::Burstable => Some(burstable),
            QosClass::BestEffort => Some(burstable - part(demand.burstable_memory)),
        }
    }
}

/// What is written into a class's cgroup, at start, each minute and after each kill. For Guaranteed, whose cgroup is `kubepods`, that
/// is unbounded huge pages (in place of the node's, see `kubepods_resources`) and what MemoryQoS adds.
pub fn qos_cgroup_resources(
    class: QosClass,
    demand: &QosDemand,
    hugepage_sizes: &[String],
    memory_qos: Option<MemoryQos>,
) -> CgroupResources {
    let mut out = CgroupResources {
        hugepage_limits: hugepage_sizes.iter().map(|size| (size.clone(), UNBOUNDED)).collect(),
        ..CgroupResources::default()
    };
    if class != QosClass::Guaranteed {
        out.cpu_shares = Some(match class {
            QosClass::Burstable => cpu::shares(demand.burstable_cpu),
            _ => cpu::MIN_SHARES,
        });
    }
    if let Some(qos) = memory_qos {
        let tiered = |bytes: i64| if qos.tiered_reservation { bytes.to_string() } else { "0".into() };
        match class {
            // A parent's protection must cover its children's to have an effect.
            QosClass::Guaranteed => {
                out.unified.insert("memory.min".into(), tiered(demand.guaranteed_memory + demand.burstable_memory));
            }
            QosClass::Burstable => {
                out.unified.insert("memory.low".into(), tiered(demand.burstable_memory));
            }
            QosClass::BestEffort => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::pod;

    const GUARANTEED: &str = r#"{"containers": [{"name": "a", "resources":
        {"requests": {"cpu": "500m", "memory": "64Mi", "hugepages-2Mi": "4Mi"}, "limits": {"cpu": "500m", "memory": "64Mi", "hugepages-2Mi": "4Mi"}}}],
        "overhead": {"cpu": "100m", "memory": "16Mi"}}"#;
    const HALF: &str = r#"{"containers": [{"name": "a", "resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": "1", "memory": "1Gi"}}},
        {"name": "b", "resources": {"limits": {"memory": "1Gi"}}}]}"#;
    const BEST_EFFORT: &str = r#"{"containers": [{"name": "a"}]}"#;

    #[test]
    fn names() {
        let root = kubepods_name("/");
        let name = |spec| pod_cgroup_name(&root, &pod(spec), true).0.join("/");
        assert_eq!(name(GUARANTEED), "kubepods/poduid-1");
        assert_eq!(name(HALF), "kubepods/burstable/poduid-1");
        assert_eq!(name(BEST_EFFORT), "kubepods/besteffort/poduid-1");
        assert_eq!(kubepods_name("/my-root/sub").0.join("/"), "my-root/sub/kubepods");
    }

    #[test]
    fn pods_by_class() {
        let options = PodCgroupOptions {
            pids_limit: Some(100),
            hugepage_sizes: vec!["1GB".into(), "2MB".into()],
            ..PodCgroupOptions::default()
        };
        let huge = |two| BTreeMap::from([("1GB".to_string(), 0), ("2MB".to_string(), two)]);
        assert_eq!(
            pod_cgroup_resources(&pod(GUARANTEED), &options),
            CgroupResources {
                cpu_shares: Some(614),
                cpu_quota: Some(60_000),
                cpu_period: Some(100_000),
                memory_limit: Some(80 << 20),
                pids_limit: Some(100),
                hugepage_limits: huge(4 << 20),
                ..CgroupResources::default()
            }
        );
        // One container without CPU limit: no quota; each has a memory limit.
        assert_eq!(
            pod_cgroup_resources(&pod(HALF), &options),
            CgroupResources {
                cpu_shares: Some(256),
                memory_limit: Some(2 << 30),
                pids_limit: Some(100),
                hugepage_limits: huge(0),
                ..CgroupResources::default()
            }
        );
        assert_eq!(
            pod_cgroup_resources(&pod(BEST_EFFORT), &PodCgroupOptions::default()),
            CgroupResources { cpu_shares: Some(2), ..CgroupResources::default() }
        );
        let unlimited = PodCgroupOptions { cpu_quota: false, ..PodCgroupOptions::default() };
        assert_eq!(pod_cgroup_resources(&pod(GUARANTEED), &unlimited).cpu_quota, Some(-1));
        let level = r#"{"resources": {"limits": {"cpu": "2"}}, "containers": [{"name": "a"}]}"#;
        assert_eq!(pod_cgroup_resources(&pod(level), &PodCgroupOptions::default()).cpu_quota, Some(200_000));
        // An init container without limits leaves the pod unlimited, a sidecar before it with limits does not help memory.
        let init = r#"{"initContainers": [{"name": "i"}], "containers": [{"name": "a", "resources": {"limits": {"memory": "1Gi"}}}]}"#;
        assert_eq!(pod_cgroup_resources(&pod(init), &PodCgroupOptions::default()).memory_limit, None);
    }

    #[test]
    fn memory_kept_for_the_better_classes() {
        let demand = QosDemand { burstable_cpu: 0, guaranteed_memory: 1 << 30, burstable_memory: 512 << 20 };
        let limits = |percent, allocatable| {
            let reserve = MemoryReserve { percent, allocatable };
            [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort].map(|class| reserve.limit(class, &demand))
        };
        assert_eq!(limits(100, 4 << 30), [None, Some(3 << 30), Some(5 << 29)]);
        assert_eq!(limits(50, 4 << 30), [None, Some(7 << 29), Some((7 << 29) - (256 << 20))]);
        assert_eq!(limits(50, 0), [None; 3]);
    }

    #[test]
    fn classes_and_memory_qos() {
        let pods = [
            pod(GUARANTEED),
            pod(HALF),
            pod(BEST_EFFORT),
            pod(r#"{"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]}"#),
        ];
        let demand = QosDemand::of(&pods, true);
        assert_eq!(demand, QosDemand { burstable_cpu: 1250, guaranteed_memory: 80 << 20, burstable_memory: 1 << 30 });
        let sizes = ["2MB".to_string()];
        let burstable = qos_cgroup_resources(QosClass::Burstable, &demand, &sizes, None);
        assert_eq!((burstable.cpu_shares, burstable.hugepage_limits["2MB"]), (Some(1280), 1 << 62));
        assert_eq!(qos_cgroup_resources(QosClass::BestEffort, &demand, &sizes, None).cpu_shares, Some(2));
        let kubepods = qos_cgroup_resources(QosClass::Guaranteed, &demand, &sizes, None);
        assert_eq!((kubepods.cpu_shares, kubepods.hugepage_limits["2MB"]), (None, 1 << 62));

        let qos = |tiered_reservation| Some(MemoryQos { throttling_factor: 0.9, tiered_reservation, page_size: 4096 });
        let file = |class, tiered| qos_cgroup_resources(class, &demand, &[], qos(tiered)).unified;
        assert_eq!(file(QosClass::Guaranteed, true)["memory.min"], ((80 << 20) + (1i64 << 30)).to_string());
        assert_eq!(file(QosClass::Burstable, true)["memory.low"], (1i64 << 30).to_string());
        assert_eq!(file(QosClass::Burstable, false)["memory.low"], "0");
        let options = PodCgroupOptions { memory_qos: qos(true), ..PodCgroupOptions::default() };
        assert_eq!(pod_cgroup_resources(&pods[0], &options).unified["memory.min"], (80i64 << 20).to_string());
        assert_eq!(pod_cgroup_resources(&pods[3], &options).unified["memory.low"], (1i64 << 30).to_string());
    }
}
