//! CRI method names and image sizes as the Go kubelet labels them.

/// The `operation_type` label for a CRI method (`ListPodSandbox` → `list_podsandbox`). A method that is not known comes
/// back as `other`, so that a label can never be made from outside data.
pub fn operation_type(call: &str) -> &'static str {
    match call {
        "Version" => "version",
        "Status" => "status",
        "RuntimeConfig" => "runtime_config",
        "UpdateRuntimeConfig" => "update_runtime_config",
        "RunPodSandbox" => "run_podsandbox",
        "StopPodSandbox" => "stop_podsandbox",
        "RemovePodSandbox" => "remove_podsandbox",
        "PodSandboxStatus" => "podsandbox_status",
        "ListPodSandbox" | "StreamPodSandboxes" => "list_podsandbox",
        "PodSandboxStats" => "podsandbox_stats",
        "ListPodSandboxStats" | "StreamPodSandboxStats" => "list_podsandbox_stats",
        "ListPodSandboxMetrics" | "StreamPodSandboxMetrics" => "list_podsandbox_metrics",
        "ListMetricDescriptors" => "list_metric_descriptors",
        "UpdatePodSandboxResources" => "update_podsandbox_resources",
        "CreateContainer" => "create_container",
        "StartContainer" => "start_container",
        "StopContainer" => "stop_container",
        "RemoveContainer" => "remove_container",
        "ListContainers" | "StreamContainers" => "list_containers",
        "ContainerStatus" => "container_status",
        "UpdateContainerResources" => "update_container",
        "ContainerStats" => "container_stats",
        "ListContainerStats" | "StreamContainerStats" => "list_container_stats",
        "ReopenContainerLog" => "reopen_container_log",
        "CheckpointContainer" => "checkpoint_container",
        "GetContainerEvents" => "get_container_events",
        "ExecSync" => "exec_sync",
        "Exec" => "exec",
        "Attach" => "attach",
        "PortForward" => "port_forward",
        "ListImages" | "StreamImages" => "list_images",
        "ImageStatus" => "image_status",
        "PullImage" => "pull_image",
        "RemoveImage" => "remove_image",
        "ImageFsInfo" => "image_fs_info",
        _ => "other",
    }
}

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

/// The `image_size_in_bytes` label: the range that the size, in bytes, falls in; a boundary belongs to the range below.
pub fn image_size_bucket(bytes: u64) -> &'static str {
    if bytes == 0 {
        return "N/A";
    }
    const UP_TO: [(u64, &str); 11] = [
        (10 * MIB, "0-10MB"),
        (100 * MIB, "10MB-100MB"),
        (500 * MIB, "100MB-500MB"),
        (GIB, "500MB-1GB"),
        (5 * GIB, "1GB-5GB"),
        (10 * GIB, "5GB-10GB"),
        (20 * GIB, "10GB-20GB"),
        (30 * GIB, "20GB-30GB"),
        (40 * GIB, "30GB-40GB"),
        (60 * GIB, "40GB-60GB"),
        (100 * GIB, "60GB-100GB"),
    ];
    UP_TO.iter().find(|(limit, _)| bytes <= *limit).map_or("GT100GB", |(_, label)| label)
}

/// The `reason` label of a refused admission: known reasons as they are, other `OutOf…` together, the rest `Other`.
pub fn admission_reason(reason: &str) -> &'static str {
    const KNOWN: [&str; 21] = [
        "AppArmor",
        "PodOSSelectorNodeLabelDoesNotMatch",
        "PodOSNotSupported",
        "InvalidNodeInfo",
        "InitContainerRestartPolicyForbidden",
        "SupplementalGroupsPolicyNotSupported",
        "UnexpectedAdmissionError",
        "UnknownReason",
        "UnexpectedPredicateFailureType",
        "OutOfcpu",
        "OutOfmemory",
        "OutOfephemeral-storage",
        "OutOfpods",
        "PodLevelResourcesNotSupported",
        "PodFeatureUnsupported",
        "node(s) had taints that the pod didn't tolerate",
        "Evicted",
        "SysctlForbidden",
        "TopologyAffinityError",
        "NodeShutdown",
        "VolumeAttachmentLimitExceeded",
    ];
    match KNOWN.iter().find(|known| **known == reason) {
        Some(known) => known,
        None if reason.starts_with("OutOf") => "OutOfExtendedResources",
        None => "Other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_sizes() {
        for (bytes, label) in [
            (0, "N/A"),
            (1, "0-10MB"),
            (10 * MIB, "0-10MB"),
            (10 * MIB + 1, "10MB-100MB"),
            (700 * MIB, "500MB-1GB"),
            (60 * GIB, "40GB-60GB"),
            (100 * GIB, "60GB-100GB"),
            (100 * GIB + 1, "GT100GB"),
            (u64::MAX, "GT100GB"),
        ] {
            assert_eq!(image_size_bucket(bytes), label, "{bytes}");
        }
    }

    #[test]
    fn admission_reasons() {
        for (reason, label) in [
            ("OutOfcpu", "OutOfcpu"),
            ("OutOfexample.com/gpu", "OutOfExtendedResources"),
            ("NodeAffinity", "Other"),
            ("Evicted", "Evicted"),
        ] {
            assert_eq!(admission_reason(reason), label);
        }
    }

    #[test]
    fn calls() {
        for (call, label) in [
            ("ListPodSandbox", "list_podsandbox"),
            ("UpdateContainerResources", "update_container"),
            ("PodSandboxStatus", "podsandbox_status"),
            ("ImageFsInfo", "image_fs_info"),
            ("no such call", "other"),
        ] {
            assert_eq!(operation_type(call), label);
        }
    }
}
