//! Every feature gate of Kubernetes 1.36.1, read from its running registry, with the dependencies between them.

use super::Stage::{self, Alpha, Beta, Deprecated, Ga};

/// A gate of the registry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub(super) name: &'static str,
    pub(super) stage: Stage,
    pub(super) default: bool,
    /// Setting anything but the default is refused.
    pub(super) locked: bool,
}

const fn spec(name: &'static str, stage: Stage, default: bool, locked: bool) -> Spec {
    Spec { name, stage, default, locked }
}

macro_rules! gates {
    ($( $(#[$meta:meta])* $name:ident $stage:ident $default:literal $locked:literal; )*) => {
        /// A gate that changes what the kubelet does.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Gate { $( $(#[$meta])* $name, )* }

        impl Gate {
            /// All of them, by name.
            pub const ALL: &[Self] = &[$( Self::$name, )*];

            /// The name in `featureGates`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $( Self::$name => stringify!($name), )* }
            }
        }

        /// The kubelet's gates, in the order of [`Gate::ALL`].
        pub(super) const KUBELET: &[Spec] = &[$( spec(stringify!($name), $stage, $default, $locked), )*];
    };
}

gates! {
    /// Serving CSR may carry only DNS names.
    AllowDNSOnlyNodeCSR Deprecated false false;
    /// Alpha cpuManagerPolicyOptions allowed.
    CPUManagerPolicyAlphaOptions Alpha false false;
    /// Beta cpuManagerPolicyOptions allowed.
    CPUManagerPolicyBetaOptions Beta true false;
    /// Lists use the Stream* RPCs, fall back for good on Unimplemented.
    CRIListStreaming Alpha false false;
    /// Volume health in stats.
    CSIVolumeHealth Alpha false false;
    /// On: after an agent restart started/ready drop to false until probes run; off: kept.
    ChangeContainerStatusOnKubeletRestart Deprecated false false;
    /// Projected clusterTrustBundle sources.
    ClusterTrustBundleProjection Beta false false;
    /// /flagz.
    ComponentFlagz Beta true false;
    /// /statusz.
    ComponentStatusz Beta true false;
    /// /checkpoint endpoint and ROOT/checkpoints.
    ContainerCheckpoint Beta true false;
    /// Container restartPolicy and restartPolicyRules honoured.
    ContainerRestartRules Beta true false;
    /// Lifecycle.stopSignal passed to CRI and reported.
    ContainerStopSignals Alpha false false;
    /// CpuCFSQuotaPeriod other than 100ms.
    CustomCPUCFSQuotaPeriod Ga true false;
    /// Shared device capacity in DRA results.
    DRAConsumableCapacity Beta true false;
    /// Extended resources satisfied by DRA are skipped in admission.
    DRAExtendedResource Beta true false;
    /// Claims of pod groups.
    DRAWorkloadResourceClaims Alpha false false;
    /// No CFS quota for containers/pods with exclusive CPUs.
    DisableCPUQuotaWithExclusiveCPUs Deprecated true false;
    /// NodeInfo.kubeProxyVersion empty.
    DisableNodeKubeProxyVersion Deprecated true true;
    /// DRA manager, prepare/unprepare, dra_manager_state.
    DynamicResourceAllocation Ga true true;
    /// Env fileKeyRef.
    EnvFiles Beta true false;
    /// GetContainerEvents drives the PLEG, relist 300 s.
    EventedPLEG Alpha false false;
    /// Agent itself terminates WebSocket v5 / SPDY tunnels for exec, attach, portForward.
    ExtendWebSocketsToKubelet Beta true false;
    /// Pod groups (schedulingGroup).
    GenericWorkload Alpha false false;
    /// GitRepo volumes; off and locked: refused.
    GitRepoVolumeDriver Deprecated false true;
    /// Logind inhibitor, shutdown order (active only if grace periods are set).
    GracefulNodeShutdown Beta true false;
    /// ShutdownGracePeriodByPodPriority, state file, metrics.
    GracefulNodeShutdownBasedOnPodPriority Beta true false;
    /// Spec.hostnameOverride.
    HostnameOverride Beta true false;
    /// ImageMaximumGCAge.
    ImageMaximumGCAge Ga true true;
    /// Image volumes.
    ImageVolume Ga true true;
    /// Image volume digest in volumeMounts status.
    ImageVolumeWithDigest Alpha false false;
    /// Pod-level resize; status.resources and allocatedResources of the pod.
    InPlacePodLevelResourcesVerticalScaling Beta true false;
    /// Resize, allocated/actuated checkpoints, resize conditions.
    InPlacePodVerticalScaling Ga true true;
    /// Resize with static CPU manager.
    InPlacePodVerticalScalingExclusiveCPUs Alpha false false;
    /// Resize with static memory manager.
    InPlacePodVerticalScalingExclusiveMemory Alpha false false;
    /// Resize of plain init containers; they enter the checkpoints.
    InPlacePodVerticalScalingInitContainers Beta true false;
    /// CrashLoopBackOff.maxContainerRestartPeriod.
    KubeletCrashLoopBackOffMax Beta true false;
    /// Pull records and credential verification.
    KubeletEnsureSecretPulledImages Beta true false;
    /// Pods, healthz, configz subresources tried before proxy.
    KubeletFineGrainedAuthz Ga true true;
    /// Some sysctl/OOM errors ignored in a user namespace.
    KubeletInUserNamespace Alpha false false;
    /// Psi in stats and container_pressure_* metrics.
    KubeletPSI Ga true true;
    /// Pod-resources Get and socket.
    KubeletPodResourcesGet Ga true true;
    /// Pod-resources List shows active pods only.
    KubeletPodResourcesListUseActivePods Deprecated true false;
    /// On: no GET of the Node after a Forbidden create.
    KubeletRegistrationGetOnExistsOnly Deprecated false false;
    /// Containerfs split from imagefs in eviction.
    KubeletSeparateDiskGC Beta true false;
    /// Service account token given to credential plugins.
    KubeletServiceAccountTokenForCredentialProviders Beta true false;
    /// Project quotas measure emptyDir.
    LocalStorageCapacityIsolationFSQuotaMonitoring Beta false false;
    /// Alpha options of the log formats.
    LoggingAlphaOptions Alpha false false;
    /// Beta options of the log formats.
    LoggingBetaOptions Beta true false;
    /// Memory.high/min/low (cgroup v2).
    MemoryQoS Alpha false false;
    /// CSINode limits refreshed; pod rejected VolumeAttachmentLimitExceeded.
    MutableCSINodeAllocatableCount Ga true true;
    /// Native histograms in /metrics.
    NativeHistograms Alpha false false;
    /// Node.status.declaredFeatures and its admission handler.
    NodeDeclaredFeatures Beta true false;
    /// /logs query (also needs enableSystemLogQuery).
    NodeLogQuery Ga true true;
    /// MemorySwap LimitedSwap, nodeInfo.swap.
    NodeSwap Ga true true;
    /// Single-pod relist after each successful sync.
    PLEGOnDemandRelist Beta true false;
    /// Stats and cadvisor metrics come from CRI.
    PodAndContainerStatsFromCRI Alpha false false;
    /// Projected podCertificate.
    PodCertificateRequest Beta false false;
    /// CPU/memory managers at pod level; checkpoint v3/v2 with podEntries.
    PodLevelResourceManagers Alpha false false;
    /// Spec.resources of the pod.
    PodLevelResources Beta true false;
    /// Sleep hook.
    PodLifecycleSleepAction Ga true true;
    /// ContainerLogs?stream=Stdout/Stderr.
    PodLogsQuerySplitStreams Alpha false false;
    /// ObservedGeneration in pod status.
    PodObservedGenerationTracking Ga true true;
    /// That condition.
    PodReadyToStartContainersCondition Beta true false;
    /// GRPC pods API on ROOT/pods-api/pods-api.sock.
    PodsAPI Alpha false false;
    /// Static pods with API references refused.
    PreventStaticPodAPIReferences Beta true false;
    /// QosReserved memory on QoS cgroups.
    QOSReserved Alpha false false;
    /// Node expansion states on the PVC.
    RecoverVolumeExpansionFailure Ga true true;
    /// RecursiveReadOnly mounts.
    RecursiveReadOnlyMounts Ga true true;
    /// Crash back-off 1 s … 60 s.
    ReduceDefaultCrashLoopBackOffDecay Alpha false false;
    /// Client CA file reloaded.
    ReloadKubeletClientCAFile Beta true false;
    /// Serving certificate file reloaded.
    ReloadKubeletServerCertificateFile Beta true false;
    /// AllocatedResourcesStatus from device health.
    ResourceHealthStatus Beta true false;
    /// Health messages there.
    ResourceHealthStatusMessage Beta true false;
    /// Restart rule RestartAllContainers, AllContainersRestarting condition.
    RestartAllContainersOnContainerExits Beta true false;
    /// ServerTLSBootstrap.
    RotateKubeletServerCertificate Beta true false;
    /// Runtime handler in image pulls, records and image GC keys.
    RuntimeClassInImageCriApi Alpha false false;
    /// SeLinuxChangePolicy field.
    SELinuxChangePolicy Ga true true;
    /// -o context for all volumes.
    SELinuxMount Beta false false;
    /// -o context for RWOP volumes.
    SELinuxMountReadWriteOncePod Ga true true;
    /// Strict groups, status.user, node.status.features.
    SupplementalGroupsPolicy Ga true true;
    /// Lt/Gt tolerations.
    TaintTolerationComparisonOperators Alpha false false;
    /// Alpha options allowed.
    TopologyManagerPolicyAlphaOptions Alpha false false;
    /// Beta options allowed.
    TopologyManagerPolicyBetaOptions Beta true false;
    /// TopologyManagerPolicyOptions.
    TopologyManagerPolicyOptions Ga true true;
    /// HostUsers: false, pods/UID/userns.
    UserNamespacesSupport Ga true true;
    /// Informers start with a streaming list.
    WatchListClient Beta true false;
}

/// Gates that other programs of Kubernetes, or its client library, look at.
pub(super) const OTHERS: &[Spec] = &[
    spec("APIResponseCompression", Beta, true, false),
    spec("APIServerIdentity", Beta, true, false),
    spec("APIServerTracing", Ga, true, true),
    spec("APIServingWithRoutine", Alpha, false, false),
    spec("AggregatedDiscoveryRemoveBetaType", Deprecated, true, true),
    spec("AllowInsecureKubeletCertificateSigningRequests", Deprecated, false, false),
    spec("AllowOverwriteTerminationGracePeriodSeconds", Deprecated, false, true),
    spec("AllowParsingUserUIDFromCertAuth", Beta, true, false),
    spec("AllowServiceExternalIPs", Ga, true, false),
    spec("AllowUnsafeMalformedObjectDeletion", Alpha, false, false),
    spec("AnonymousAuthConfigurableEndpoints", Ga, true, true),
    spec("AnyVolumeDataSource", Ga, true, true),
    spec("AtomicFIFO", Beta, true, false),
    spec("AuthorizeNodeWithSelectors", Ga, true, true),
    spec("AuthorizePodWebsocketUpgradeCreatePermission", Beta, true, false),
    spec("AuthorizeWithSelectors", Ga, true, true),
    spec("BtreeWatchCache", Ga, true, true),
    spec("CBORServingAndStorage", Alpha, false, false),
    spec("CPUManagerPolicyOptions", Ga, true, true),
    spec("CRDObservedGenerationTracking", Beta, true, false),
    spec("CRDValidationRatcheting", Ga, true, true),
    spec("CSIServiceAccountTokenSecrets", Ga, true, true),
    spec("ClearingNominatedNodeNameAfterBinding", Beta, true, false),
    spec("ClientsAllowCARotation", Beta, true, false),
    spec("ClientsAllowCBOR", Alpha, false, false),
    spec("ClientsAllowTLSCacheGC", Beta, true, false),
    spec("ClientsPreferCBOR", Alpha, false, false),
    spec("CloudControllerManagerWatchBasedRoutesReconciliation", Alpha, false, false),
    spec("CloudControllerManagerWebhook", Alpha, false, false),
    spec("ClusterTrustBundle", Beta, false, false),
    spec("ConcurrentWatchObjectDecode", Beta, false, false),
    spec("ConsistentListFromCache", Ga, true, true),
    spec("ConstrainedImpersonation", Beta, true, false),
    spec("ContextualLogging", Beta, true, false),
    spec("ControllerManagerReleaseLeaderElectionLockOnExit", Alpha, false, false),
    spec("CoordinatedLeaderElection", Beta, false, false),
    spec("CrossNamespaceVolumeDataSource", Alpha, false, false),
    spec("CustomResourceFieldSelectors", Ga, true, true),
    spec("DRAAdminAccess", Ga, true, true),
    spec("DRADeviceBindingConditions", Beta, true, false),
    spec("DRADeviceTaintRules", Beta, false, false),
    spec("DRADeviceTaints", Beta, true, false),
    spec("DRAListTypeAttributes", Alpha, false, false),
    spec("DRANodeAllocatableResources", Alpha, false, false),
    spec("DRAPartitionableDevices", Beta, true, false),
    spec("DRAPrioritizedList", Ga, true, false),
    spec("DRAResourceClaimDeviceStatus", Beta, true, false),
    spec("DRAResourceClaimGranularStatusAuthorization", Beta, true, false),
    spec("DRAResourcePoolStatus", Alpha, false, false),
    spec("DRASchedulerFilterTimeout", Beta, true, false),
    spec("DeclarativeValidation", Ga, true, true),
    spec("DeclarativeValidationBeta", Beta, true, false),
    spec("DeclarativeValidationTakeover", Deprecated, false, false),
    spec("DeploymentReplicaSetTerminatingReplicas", Beta, true, false),
    spec("DetectCacheInconsistency", Beta, true, false),
    spec("DisableAllocatorDualWrite", Ga, true, true),
    spec("ExecProbeTimeout", Ga, true, true),
    spec("ExternalServiceAccountTokenSigner", Ga, true, true),
    spec("GangScheduling", Alpha, false, false),
    spec("HPAConfigurableTolerance", Beta, true, false),
    spec("HPAScaleToZero", Alpha, false, false),
    spec("InOrderInformers", Ga, true, true),
    spec("InOrderInformersBatchProcess", Beta, true, false),
    spec("InformerResourceVersion", Ga, true, false),
    spec("JobBackoffLimitPerIndex", Ga, true, true),
    spec("JobManagedBy", Ga, true, true),
    spec("JobPodReplacementPolicy", Ga, true, true),
    spec("JobSuccessPolicy", Ga, true, true),
    spec("KMSv1", Deprecated, false, false),
    spec("KubeletCgroupDriverFromCRI", Ga, true, true),
    spec("KubeletPodResourcesDynamicResources", Ga, true, true),
    spec("KubeletTracing", Ga, true, true),
    spec("ListFromCacheSnapshot", Beta, true, false),
    spec("LogarithmicScaleDown", Ga, true, true),
    spec("ManifestBasedAdmissionControlConfig", Alpha, false, false),
    spec("MatchLabelKeysInPodAffinity", Ga, true, true),
    spec("MatchLabelKeysInPodTopologySpread", Beta, true, false),
    spec("MatchLabelKeysInPodTopologySpreadSelectorMerge", Beta, true, false),
    spec("MaxUnavailableStatefulSet", Beta, false, false),
    spec("MultiCIDRServiceAllocator", Ga, true, true),
    spec("MutablePVNodeAffinity", Alpha, false, false),
    spec("MutablePodResourcesForSuspendedJobs", Beta, true, false),
    spec("MutableSchedulingDirectivesForSuspendedJobs", Beta, true, false),
    spec("MutatingAdmissionPolicy", Ga, true, false),
    spec("NFTablesProxyMode", Ga, true, true),
    spec("NodeInclusionPolicyInPodTopologySpread", Ga, true, true),
    spec("NominatedNodeNameForExpectation", Beta, true, false),
    spec("OpenAPIEnums", Beta, true, false),
    spec("OpportunisticBatching", Beta, true, false),
    spec("OrderedNamespaceDeletion", Ga, true, true),
    spec("PersistentVolumeClaimUnusedSinceTime", Alpha, false, false),
    spec("PodDeletionCost", Beta, true, false),
    spec("PodLifecycleSleepActionAllowZero", Ga, true, true),
    spec("PodSchedulingReadiness", Ga, true, true),
    spec("PodTopologyLabelsAdmission", Beta, true, false),
    spec("PortForwardWebsockets", Beta, true, false),
    spec("PreferSameTrafficDistribution", Ga, true, true),
    spec("ProcMountType", Ga, true, true),
    spec("RelaxedDNSSearchValidation", Ga, true, true),
    spec("RelaxedEnvironmentVariableValidation", Ga, true, true),
    spec("RelaxedServiceNameValidation", Beta, true, false),
    spec("RemoteRequestHeaderUID", Beta, true, false),
    spec("ResilientWatchCacheInitialization", Ga, true, true),
    spec("RetryGenerateName", Ga, true, true),
    spec("SchedulerAsyncAPICalls", Beta, false, false),
    spec("SchedulerAsyncPreemption", Beta, true, false),
    spec("SchedulerPopFromBackoffQ", Beta, true, false),
    spec("SchedulerQueueingHints", Ga, true, true),
    spec("SeparateCacheWatchRPC", Deprecated, false, true),
    spec("SeparateTaintEvictionController", Ga, true, true),
    spec("ServiceAccountNodeAudienceRestriction", Beta, true, false),
    spec("ServiceAccountTokenJTI", Ga, true, true),
    spec("ServiceAccountTokenNodeBinding", Ga, true, true),
    spec("ServiceAccountTokenNodeBindingValidation", Ga, true, true),
    spec("ServiceAccountTokenPodNodeInfo", Ga, true, true),
    spec("ServiceCIDRStatusFieldWiping", Deprecated, true, false),
    spec("ShardedListAndWatch", Alpha, false, false),
    spec("SidecarContainers", Ga, true, true),
    spec("SizeBasedListCostEstimate", Beta, true, false),
    spec("StaleControllerConsistencyDaemonSet", Beta, true, false),
    spec("StaleControllerConsistencyJob", Beta, true, false),
    spec("StaleControllerConsistencyReplicaSet", Beta, true, false),
    spec("StaleControllerConsistencyStatefulSet", Beta, true, false),
    spec("StatefulSetSemanticRevisionComparison", Beta, true, false),
    spec("StorageCapacityScoring", Alpha, false, false),
    spec("StorageNamespaceIndex", Deprecated, true, false),
    spec("StorageVersionAPI", Alpha, false, false),
    spec("StorageVersionHash", Beta, true, false),
    spec("StorageVersionMigrator", Beta, false, false),
    spec("StreamingCollectionEncodingToJSON", Ga, true, true),
    spec("StreamingCollectionEncodingToProtobuf", Ga, true, true),
    spec("StrictIPCIDRValidation", Beta, true, false),
    spec("StructuredAuthenticationConfiguration", Ga, true, true),
    spec("StructuredAuthenticationConfigurationEgressSelector", Beta, true, false),
    spec("StructuredAuthenticationConfigurationJWKSMetrics", Beta, true, false),
    spec("SystemdWatchdog", Ga, true, true),
    spec("TokenRequestServiceAccountUIDValidation", Beta, true, false),
    spec("TopologyAwareWorkloadScheduling", Alpha, false, false),
    spec("TranslateStreamCloseWebsocketRequests", Beta, true, false),
    spec("UnauthenticatedHTTP2DOSMitigation", Beta, true, false),
    spec("UnknownVersionInteroperabilityProxy", Beta, true, false),
    spec("UnlockWhileProcessingFIFO", Beta, true, false),
    spec("UserNamespacesHostNetworkSupport", Alpha, false, false),
    spec("VolumeAttributesClass", Ga, true, true),
    spec("VolumeLimitScaling", Alpha, false, false),
    spec("WatchCacheInitializationPostStartHook", Beta, true, false),
    spec("WatchList", Beta, true, false),
    spec("WinDSR", Ga, true, true),
    spec("WinOverlay", Ga, true, true),
    spec("WindowsCPUAndMemoryAffinity", Alpha, false, false),
    spec("WindowsGracefulNodeShutdown", Beta, true, false),
    spec("WindowsHostNetwork", Deprecated, false, false),
    spec("WorkloadAwarePreemption", Alpha, false, false),
    spec("WorkloadWithJob", Alpha, false, false),
];

/// A gate and those that must be on with it.
pub(super) const NEEDS: &[(&str, &[&str])] = &[
    ("AuthorizeNodeWithSelectors", &["AuthorizeWithSelectors"]),
    ("ClusterTrustBundleProjection", &["ClusterTrustBundle"]),
    ("DRAAdminAccess", &["DynamicResourceAllocation"]),
    ("DRAConsumableCapacity", &["DynamicResourceAllocation"]),
    ("DRADeviceBindingConditions", &["DynamicResourceAllocation", "DRAResourceClaimDeviceStatus"]),
    ("DRADeviceTaintRules", &["DRADeviceTaints"]),
    ("DRADeviceTaints", &["DynamicResourceAllocation"]),
    ("DRAExtendedResource", &["DynamicResourceAllocation"]),
    ("DRAListTypeAttributes", &["DynamicResourceAllocation"]),
    ("DRANodeAllocatableResources", &["DynamicResourceAllocation"]),
    ("DRAPartitionableDevices", &["DynamicResourceAllocation"]),
    ("DRAPrioritizedList", &["DynamicResourceAllocation"]),
    ("DRAResourceClaimGranularStatusAuthorization", &["DynamicResourceAllocation", "DRAResourceClaimDeviceStatus"]),
    ("DRAResourcePoolStatus", &["DynamicResourceAllocation"]),
    ("DRASchedulerFilterTimeout", &["DynamicResourceAllocation"]),
    ("DRAWorkloadResourceClaims", &["DynamicResourceAllocation", "GenericWorkload"]),
    ("DisableAllocatorDualWrite", &["MultiCIDRServiceAllocator"]),
    ("ExtendWebSocketsToKubelet", &["NodeDeclaredFeatures"]),
    ("GangScheduling", &["GenericWorkload"]),
    ("GracefulNodeShutdownBasedOnPodPriority", &["GracefulNodeShutdown"]),
    ("ImageVolumeWithDigest", &["ImageVolume"]),
    (
        "InPlacePodLevelResourcesVerticalScaling",
        &["InPlacePodVerticalScaling", "PodLevelResources", "NodeDeclaredFeatures"],
    ),
    ("InPlacePodVerticalScalingExclusiveCPUs", &["InPlacePodVerticalScaling"]),
    ("InPlacePodVerticalScalingExclusiveMemory", &["InPlacePodVerticalScaling"]),
    ("InPlacePodVerticalScalingInitContainers", &["InPlacePodVerticalScaling", "NodeDeclaredFeatures"]),
    ("MatchLabelKeysInPodTopologySpreadSelectorMerge", &["MatchLabelKeysInPodTopologySpread"]),
    ("PodCertificateRequest", &["AuthorizeNodeWithSelectors"]),
    ("PodLevelResourceManagers", &["PodLevelResources"]),
    ("PodLifecycleSleepActionAllowZero", &["PodLifecycleSleepAction"]),
    ("ProcMountType", &["UserNamespacesSupport"]),
    ("ResourceHealthStatus", &["DynamicResourceAllocation"]),
    ("ResourceHealthStatusMessage", &["ResourceHealthStatus"]),
    ("RestartAllContainersOnContainerExits", &["ContainerRestartRules", "NodeDeclaredFeatures"]),
    ("ServiceAccountTokenNodeBinding", &["ServiceAccountTokenNodeBindingValidation"]),
    ("StaleControllerConsistencyDaemonSet", &["AtomicFIFO"]),
    ("StaleControllerConsistencyJob", &["AtomicFIFO"]),
    ("StaleControllerConsistencyReplicaSet", &["AtomicFIFO"]),
    ("StaleControllerConsistencyStatefulSet", &["AtomicFIFO"]),
    ("TopologyAwareWorkloadScheduling", &["GenericWorkload"]),
    ("UserNamespacesHostNetworkSupport", &["UserNamespacesSupport", "NodeDeclaredFeatures"]),
    ("WindowsGracefulNodeShutdown", &["GracefulNodeShutdown"]),
    ("WorkloadAwarePreemption", &["GangScheduling"]),
    ("WorkloadWithJob", &["GenericWorkload"]),
    ("DeclarativeValidationBeta", &["DeclarativeValidation"]),
    ("DeclarativeValidationTakeover", &["DeclarativeValidation"]),
    ("StorageVersionAPI", &["APIServerIdentity"]),
    ("StructuredAuthenticationConfigurationEgressSelector", &["StructuredAuthenticationConfiguration"]),
    ("StructuredAuthenticationConfigurationJWKSMetrics", &["StructuredAuthenticationConfiguration"]),
    ("UnknownVersionInteroperabilityProxy", &["APIServerIdentity"]),
];
