//! Security context of sandboxes and containers: users, groups, capabilities, profiles, namespaces.

use cri_api::v1;
use cri_api::v1::security_profile::ProfileType;
use model::api::{AppArmorProfile, SELinuxOptions, SeccompProfile};
use model::pod::{ContainerEntry, DesiredPod};

use super::error::{ConfigError, Reason, pod_text};
use super::facts::{ContainerFacts, ImageUser, NodeFacts, SandboxFacts, UserNamespaceFacts};
use super::go_text::quote;
use super::names;

const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// `runAsUser` of the container, else of the pod.
pub fn effective_user(pod: &DesiredPod, container: ContainerEntry<'_>) -> Option<i64> {
    let own = container.spec.security_context.as_ref().and_then(|c| c.run_as_user);
    own.or_else(|| pod.spec().security_context.as_ref()?.run_as_user)
}

/// Holds a container to `runAsNonRoot`. Only numbers can be judged: a name means what the image says.
///
/// # Errors
/// It would, or might, run as root.
pub fn verify_non_root(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    image_user: &ImageUser,
) -> Result<(), ConfigError> {
    let own = container.spec.security_context.as_ref().and_then(|c| c.run_as_non_root);
    let required = own.or_else(|| pod.spec().security_context.as_ref()?.run_as_non_root);
    if required != Some(true) {
        return Ok(());
    }
    let place = format!("(pod: {}, container: {})", quote(&pod_text(pod)), container.spec.name);
    let most = i64::from(i32::MAX);
    let fault = match (effective_user(pod, container), image_user) {
        (Some(0), _) => format!("container's runAsUser breaks non-root policy {place}"),
        (Some(_), _) => return Ok(()),
        (None, ImageUser::Name(name)) => format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root {place}"
        ),
        (None, ImageUser::Uid(0)) => format!("container has runAsNonRoot and image will run as root {place}"),
        (None, ImageUser::Uid(uid)) if !(0..=most).contains(uid) => format!(
            "container has runAsNonRoot and image has an invalid user id ({uid}). (Must be 1-({most})): must be between 0 and {most}, \
             inclusive {place}"
        ),
        (None, ImageUser::Uid(_)) => return Ok(()),
    };
    Err(ConfigError::container(fault))
}

pub(super) fn sandbox(
    pod: &DesiredPod,
    facts: &SandboxFacts<'_>,
) -> Result<v1::LinuxSandboxSecurityContext, ConfigError> {
    let mut out = v1::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(pod, &facts.user_namespace, Reason::CreatePodSandbox)?),
        privileged: pod
            .containers()
            .any(|c| c.spec.security_context.as_ref().and_then(|s| s.privileged).unwrap_or(false)),
        // Whatever its containers use: the sandbox's own process needs no more.
        seccomp: Some(profile(ProfileType::RuntimeDefault, "")),
        ..Default::default()
    };
    if let Some(context) = &pod.spec().security_context {
        out.run_as_user = context.run_as_user.map(|value| v1::Int64Value { value });
        out.run_as_group = context.run_as_group.map(|value| v1::Int64Value { value });
        out.selinux_options = context.se_linux_options.as_ref().map(selinux);
        out.supplemental_groups = context.fs_group.into_iter().collect();
        out.supplemental_groups.extend(&facts.volume_gids);
        out.supplemental_groups.extend(context.supplemental_groups.iter().flatten());
        out.supplemental_groups_policy = groups_policy(pod).map_err(ConfigError::in_sandbox)?;
    }
    Ok(out)
}

pub(super) fn container(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
    image_user: &ImageUser,
) -> Result<v1::LinuxContainerSecurityContext, ConfigError> {
    let none = Default::default();
    let own = container.spec.security_context.as_ref().unwrap_or(&none);
    let none = Default::default();
    let of_pod = pod.spec().security_context.as_ref().unwrap_or(&none);

    let user = effective_user(pod, container);
    let (uid, run_as_username) = match (user, image_user) {
        (None, ImageUser::Uid(uid)) => (Some(*uid), String::new()),
        (None, ImageUser::Name(name)) => (None, name.clone()),
        (user, _) => (user, String::new()),
    };
    let mut supplemental_groups: Vec<i64> = of_pod.fs_group.into_iter().collect();
    supplemental_groups.extend(of_pod.supplemental_groups.iter().flatten());
    supplemental_groups.extend(&facts.volume_gids);

    let mut namespace_options = namespaces(pod, &facts.user_namespace, Reason::CreateContainerConfig)?;
    if pod_wants_target(pod, container) && namespace_options.pid == v1::NamespaceMode::Container as i32 {
        namespace_options.pid = v1::NamespaceMode::Target as i32;
        namespace_options.target_id = facts.target_id.clone().ok_or_else(|| {
            let target = pod.ephemeral_target(container.index).unwrap_or_default();
            ConfigError::container(format!("unable to find target container {target}"))
        })?;
    }
    let (apparmor, apparmor_profile) = match apparmor(pod, container)? {
        Some((profile, name)) => (Some(profile), name),
        None => (None, String::new()),
    };
    let unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let paths = |paths: &[&str]| if unmasked { Vec::new() } else { paths.iter().map(|p| p.to_string()).collect() };
    let mut masked_paths: Vec<String> = paths(&MASKED);
    if !unmasked {
        masked_paths.extend(facts.node.thermal_throttle_paths.iter().cloned());
    }
    #[allow(deprecated)]
    Ok(v1::LinuxContainerSecurityContext {
        capabilities: own.capabilities.as_ref().map(|c| v1::Capability {
            add_capabilities: c.add.clone().unwrap_or_default(),
            drop_capabilities: c.drop.clone().unwrap_or_default(),
            ..Default::default()
        }),
        privileged: own.privileged.unwrap_or(false),
        namespace_options: Some(namespace_options),
        selinux_options: own.se_linux_options.as_ref().or(of_pod.se_linux_options.as_ref()).map(selinux),
        run_as_user: uid.map(|value| v1::Int64Value { value }),
        run_as_username,
        run_as_group: own.run_as_group.or(of_pod.run_as_group).map(|value| v1::Int64Value { value }),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups,
        supplemental_groups_policy: groups_policy(pod)?,
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths,
        readonly_paths: paths(&READ_ONLY),
        seccomp: Some(seccomp(own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref()), facts.node)?),
        apparmor,
        // Runtimes of before CRI v1.23 read only this one.
        apparmor_profile,
        ..Default::default()
    })
}

/// An ephemeral container that names a target shares its process namespace.
fn pod_wants_target(pod: &DesiredPod, container: ContainerEntry<'_>) -> bool {
    container.kind == model::pod::ContainerKind::Ephemeral
        && pod.ephemeral_target(container.index).is_some_and(|t| !t.is_empty())
}

fn namespaces(
    pod: &DesiredPod,
    userns: &UserNamespaceFacts,
    reason: Reason,
) -> Result<v1::NamespaceOption, ConfigError> {
    use v1::NamespaceMode::{Container, Node, Pod};
    let spec = pod.spec();
    let node_or = |host: Option<bool>, other| if host == Some(true) { Node } else { other };
    let shared = if spec.share_process_namespace == Some(true) { Pod } else { Container };
    Ok(v1::NamespaceOption {
        network: node_or(spec.host_network, Pod) as i32,
        pid: node_or(spec.host_pid, shared) as i32,
        ipc: node_or(spec.host_ipc, Pod) as i32,
        target_id: String::new(),
        userns_options: Some(user_namespace(spec.host_users, userns, reason)?),
    })
}

fn user_namespace(
    host_users: Option<bool>,
    facts: &UserNamespaceFacts,
    reason: Reason,
) -> Result<v1::UserNamespace, ConfigError> {
    if host_users != Some(false) {
        return Ok(v1::UserNamespace { mode: v1::NamespaceMode::Node as i32, ..Default::default() });
    }
    if !facts.supported {
        let message = if facts.handler.is_empty() {
            "can't set `spec.hostUsers: false`, runtime does not support user namespaces".into()
        } else {
            let handler = quote(&facts.handler);
            format!(
                "can't set `spec.hostUsers: false`, RuntimeClass handler {handler} does not support user namespaces"
            )
        };
        return Err(ConfigError { reason, message, missing: None });
    }
    let Some(mappings) = &facts.mappings else {
        return Err(ConfigError::missing(reason, "user namespace range"));
    };
    Ok(v1::UserNamespace { mode: v1::NamespaceMode::Pod as i32, uids: mappings.clone(), gids: mappings.clone() })
}

fn groups_policy(pod: &DesiredPod) -> Result<i32, ConfigError> {
    let policy = pod.spec().security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref());
    match policy {
        None | Some("Merge") => Ok(v1::SupplementalGroupsPolicy::Merge as i32),
        Some("Strict") => Ok(v1::SupplementalGroupsPolicy::Strict as i32),
        Some(other) => Err(ConfigError::container(format!("unsupported supplementalGroupsPolicy: {other}"))),
    }
}

fn selinux(options: &SELinuxOptions) -> v1::SeLinuxOption {
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    v1::SeLinuxOption {
        user: text(&options.user),
        role: text(&options.role),
        r#type: text(&options.type_),
        level: text(&options.level),
    }
}

fn profile(kind: ProfileType, localhost: &str) -> v1::SecurityProfile {
    v1::SecurityProfile { profile_type: kind as i32, localhost_ref: localhost.into() }
}

fn seccomp(wanted: Option<&SeccompProfile>, node: &NodeFacts) -> Result<v1::SecurityProfile, ConfigError> {
    Ok(match wanted {
        None if node.seccomp_default => profile(ProfileType::RuntimeDefault, ""),
        None => profile(ProfileType::Unconfined, ""),
        Some(p) => match (p.type_.as_str(), p.localhost_profile.as_deref().unwrap_or_default()) {
            ("RuntimeDefault", _) => profile(ProfileType::RuntimeDefault, ""),
            ("Localhost", "") => {
                return Err(ConfigError::container(
                    "localhostProfile must be set if seccompProfile type is Localhost.",
                ));
            }
            ("Localhost", file) => profile(ProfileType::Localhost, &names::join(&node.seccomp_dir, file)),
            _ => profile(ProfileType::Unconfined, ""),
        },
    })
}

/// The profile and its old name: of the container, of the old annotation (static pods may still use it), of the pod.
fn apparmor(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
) -> Result<Option<(v1::SecurityProfile, String)>, ConfigError> {
    let own = container.spec.security_context.as_ref().and_then(|c| c.app_armor_profile.clone());
    let of_pod = || pod.spec().security_context.as_ref()?.app_armor_profile.clone();
    let Some(wanted) = own.or_else(|| annotated(pod, &container.spec.name)).or_else(of_pod) else {
        return Ok(None);
    };
    Ok(Some(match (wanted.type_.as_str(), wanted.localhost_profile) {
        ("RuntimeDefault", _) => (profile(ProfileType::RuntimeDefault, ""), "runtime/default".into()),
        ("Unconfined", _) => (profile(ProfileType::Unconfined, ""), "unconfined".into()),
        ("Localhost", Some(name)) => (profile(ProfileType::Localhost, &name), format!("localhost/{name}")),
        ("Localhost", None) => return Err(ConfigError::container("missing localhost apparmor profile name")),
        (other, _) => {
            return Err(ConfigError::container(format!("unknown apparmor profile type: {}", quote(other))));
        }
    }))
}

fn annotated(pod: &DesiredPod, container: &str) -> Option<AppArmorProfile> {
    let value = pod.annotation(&format!("container.apparmor.security.beta.kubernetes.io/{container}"))?;
    let (type_, localhost_profile) = match value {
        "runtime/default" => ("RuntimeDefault", None),
        "unconfined" => ("Unconfined", None),
        _ => ("Localhost", Some(value.strip_prefix("localhost/")?.to_string())),
    };
    Some(AppArmorProfile { type_: type_.into(), localhost_profile })
}
