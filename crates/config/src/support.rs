//! What rubelet does not do yet. Nothing that is set may be ignored in silence: it is refused or warned of by name.
//!
//! One table for fields, one for gates, one for flags; a row goes when its feature comes.

use model::report::Severity;
use serde_json::Value;

use crate::configz;
use crate::flags::Flags;
use crate::gates::{Gate, Gates};
use crate::problem::Problem;
use crate::types::{DEFAULT_EVICTION_HARD, KubeletConfiguration};

/// What happens when something unsupported is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The node starts without it.
    Warn,
    /// The node does not start: pods would run otherwise than asked.
    Refuse,
}

/// Field path, what happens when it differs from its default, why.
pub const FIELDS: &[(&str, Level, &str)] = &[
    ("enableContentionProfiling", Level::Warn, "there are no locks to profile in this way"),
    ("volumePluginDir", Level::Warn, "there are no FlexVolume plugins"),
    ("tracing", Level::Warn, "no traces are sent"),
    ("showHiddenMetricsForVersion", Level::Warn, "there are no hidden metrics"),
    ("logging.options", Level::Warn, "log lines are not split or buffered by level"),
    ("contentType", Level::Warn, "there is no API server to talk to"),
    ("makeIPTablesUtilChains", Level::Warn, "no iptables chains are made"),
];

/// Gates that change what rubelet does. Every other gate of the kubelet that stands elsewhere than its default is named as having no effect.
pub const HONOURED_GATES: &[Gate] = &[
    Gate::ChangeContainerStatusOnKubeletRestart,
    Gate::ClusterTrustBundleProjection,
    Gate::ComponentFlagz,
    Gate::ComponentStatusz,
    Gate::ContainerCheckpoint,
    Gate::ContainerRestartRules,
    Gate::ContainerStopSignals,
    Gate::CPUManagerPolicyAlphaOptions,
    Gate::CPUManagerPolicyBetaOptions,
    Gate::CRIListStreaming,
    Gate::CSIVolumeHealth,
    Gate::CustomCPUCFSQuotaPeriod,
    Gate::DisableCPUQuotaWithExclusiveCPUs,
    Gate::EnvFiles,
    Gate::ExtendWebSocketsToKubelet,
    Gate::GracefulNodeShutdown,
    Gate::GracefulNodeShutdownBasedOnPodPriority,
    Gate::HostnameOverride,
    Gate::InPlacePodLevelResourcesVerticalScaling,
    Gate::InPlacePodVerticalScalingExclusiveCPUs,
    Gate::InPlacePodVerticalScalingExclusiveMemory,
    Gate::InPlacePodVerticalScalingInitContainers,
    Gate::KubeletCrashLoopBackOffMax,
    Gate::KubeletEnsureSecretPulledImages,
    Gate::KubeletFineGrainedAuthz,
    Gate::KubeletSeparateDiskGC,
    Gate::KubeletPodResourcesListUseActivePods,
    Gate::KubeletServiceAccountTokenForCredentialProviders,
    Gate::MemoryQoS,
    Gate::NodeDeclaredFeatures,
    Gate::NodeLogQuery,
    Gate::PodLevelResources,
    Gate::PodLogsQuerySplitStreams,
    Gate::PreventStaticPodAPIReferences,
    Gate::QOSReserved,
    Gate::ReduceDefaultCrashLoopBackOffDecay,
    Gate::ResourceHealthStatus,
    Gate::ResourceHealthStatusMessage,
    Gate::RestartAllContainersOnContainerExits,
    Gate::SELinuxMount,
    Gate::TaintTolerationComparisonOperators,
    Gate::TopologyManagerPolicyAlphaOptions,
    Gate::TopologyManagerPolicyBetaOptions,
];

/// Flag, what happens when it is given with a value, why.
pub const FLAGS: &[(&str, Level, &str)] = &[
    ("experimental-mounter-path", Level::Warn, "the system's mount is used"),
    ("exit-on-lock-contention", Level::Warn, "the lock file is not watched"),
    ("housekeeping-interval", Level::Warn, "container statistics are not kept"),
];

fn tell(path: String, level: Level, why: &str, what: &str) -> Problem {
    let (severity, effect) = match level {
        Level::Warn => (Severity::Warning, "has no effect yet"),
        Level::Refuse => (Severity::Error, "is not supported yet"),
    };
    let message = format!("{what} {effect}: {why}");
    Problem { severity, path, message }
}

fn at<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.').try_fold(value, |v, key| v.get(key))
}

/// Names the fields and gates that are set and not supported.
pub(crate) fn check(config: &KubeletConfiguration, gates: &Gates, out: &mut Vec<Problem>) {
    let (now, plain) = (configz(config), configz(&defaults(config)));
    for &(path, level, why) in FIELDS {
        let value = at(&now, path);
        if value != at(&plain, path) {
            let shown = value.map_or_else(|| "nothing".to_owned(), Value::to_string);
            out.push(tell(path.to_owned(), level, why, &format!("{path}: {shown}")));
        }
    }
    let standard = Gates::default();
    for &gate in Gate::ALL {
        let on = gates.enabled(gate);
        if on != standard.enabled(gate) && !HONOURED_GATES.contains(&gate) {
            let path = format!("featureGates.{}", gate.name());
            let what = format!("feature gate {}={on}", gate.name());
            out.push(tell(path, Level::Warn, "what it switches is not there yet", &what));
        }
    }
}

/// Names the flags that are given and not supported.
pub(crate) fn check_flags(flags: &Flags, out: &mut Vec<Problem>) {
    for &(flag, level, why) in FLAGS {
        if flags.is_set(flag) && !flags.is_blank(flag) {
            let name = format!("--{flag}");
            out.push(tell(name.clone(), level, why, &name));
        }
    }
}

/// The defaults with those that hang on gates, and on there being a configuration file.
fn defaults(config: &KubeletConfiguration) -> KubeletConfiguration {
    let thresholds = DEFAULT_EVICTION_HARD.iter().filter(|_| !config.eviction_hard.is_empty());
    KubeletConfiguration {
        eviction_hard: thresholds.map(|&(k, v)| (k.to_owned(), v.to_owned())).collect(),
        image_pull_credentials_verification_policy: Some(
            crate::nested::ImagePullCredentialsVerificationPolicy::NeverVerifyPreloadedImages,
        ),
        ..KubeletConfiguration::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A misspelt path would never match.
    #[test]
    fn every_path_exists() {
        let mut full = KubeletConfiguration::default();
        for &(path, _, _) in FIELDS {
            let keys: Vec<_> = path.split('.').collect();
            let before = full.clone();
            for value in [
                serde_json::json!("x"),
                serde_json::json!("static"),
                serde_json::json!("Static"),
                serde_json::json!("pod"),
                serde_json::json!("restricted"),
                serde_json::json!("AlwaysVerify"),
                serde_json::json!("LimitedSwap"),
                serde_json::json!(true),
                serde_json::json!(false),
                serde_json::json!("Get"),
                serde_json::json!(7),
                serde_json::json!("7s"),
                serde_json::json!({"a": "b"}),
                serde_json::json!({"json": {"splitStream": true}}),
                serde_json::json!({"endpoint": "x"}),
                serde_json::json!(["x"]),
                serde_json::json!([1]),
                serde_json::json!([{"priority": 1}]),
                serde_json::json!([{"numaNode": 1}]),
                serde_json::json!([{"key": "a"}]),
            ] {
                if at(&configz(&before), path) == at(&configz(&full), path) {
                    crate::field::Field::set(&mut full, &keys, &value, path, &mut Vec::new());
                }
            }
            assert_ne!(at(&configz(&before), path), at(&configz(&full), path), "{path}");
        }
        let mut out = Vec::new();
        check(&full, &Gates::default(), &mut out);
        assert_eq!(out.len(), FIELDS.len(), "{out:?}");
    }

    #[test]
    fn defaults_say_nothing() {
        let mut out = Vec::new();
        check(&defaults(&KubeletConfiguration::default()), &Gates::default(), &mut out);
        assert!(out.is_empty(), "{out:?}");
    }

    #[test]
    fn flags_are_real() {
        let names: Vec<_> = crate::flags::listing().into_iter().map(|row| row.0).collect();
        for (flag, _, _) in FLAGS {
            assert!(names.contains(flag), "{flag}");
        }
    }
}
