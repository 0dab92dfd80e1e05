//! The request for one container.

use cri_api::v1;
use model::pod::{ContainerEntry, DesiredPod};

use super::error::{ConfigError, Reason};
use super::expand::expand;
use super::facts::ContainerFacts;
use super::{env, linux, mounts, names, security};

/// Finds what [`container_config`] would refuse before anything is made for the container on disk: the facts may lack the hosts file
/// and the targets of subPaths.
///
/// # Errors
/// As [`container_config`].
pub fn check_container(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
) -> Result<(), ConfigError> {
    let mounts = container.spec.volume_mounts.iter().flatten().count();
    let complete = ContainerFacts {
        hosts_file: Some(String::new()),
        sub_path_targets: (0..mounts).map(|index| (index, String::new())).collect(),
        ..facts.clone()
    };
    container_config(pod, container, &complete).map(|_| ())
}

/// ContainerConfig of one container of a pod.
///
/// # Errors
/// A field that cannot be honoured (CreateContainerConfigError and the agent's message), or a missing fact.
pub fn container_config(
    pod: &DesiredPod,
    container: ContainerEntry<'_>,
    facts: &ContainerFacts<'_>,
) -> Result<v1::ContainerConfig, ConfigError> {
    let spec = container.spec;
    let devices = mounts::devices(container, facts)?;
    let vars = env::variables(pod, container, facts)?;
    let mut mounts = mounts::mounts(pod, container, facts, &vars)?;
    let image = facts.image.as_ref().ok_or_else(|| {
        ConfigError::missing(Reason::CreateContainerConfig, format!("image of container \"{}\"", spec.name))
    })?;
    security::verify_non_root(pod, container, &image.user)?;

    let envs: Vec<(&str, &str)> =
        facts.devices.envs.iter().map(|(k, v)| (k.as_str(), v.as_str())).chain(vars.iter()).collect();
    // Of two of the same name the later one counts, as it does for the process.
    let lookup = |name: &str| envs.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
    let expand_all = |words: &Option<Vec<String>>| words.iter().flatten().map(|w| expand(w, lookup)).collect();

    let security_context = security::container(pod, container, facts, &image.user)?;
    if let Some(userns) = security_context.namespace_options.as_ref().and_then(|n| n.userns_options.as_ref()) {
        for mount in &mut mounts {
            mount.uid_mappings.clone_from(&userns.uids);
            mount.gid_mappings.clone_from(&userns.gids);
        }
    }
    Ok(v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: spec.name.clone(), attempt: facts.restart_count }),
        image: Some(v1::ImageSpec {
            image: image.reference.clone(),
            user_specified_image: spec.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command: expand_all(&spec.command),
        args: expand_all(&spec.args),
        working_dir: spec.working_dir.clone().unwrap_or_default(),
        envs: envs.iter().map(|(k, v)| v1::KeyValue { key: k.to_string(), value: v.to_string() }).collect(),
        mounts,
        devices,
        labels: names::container_labels(pod, &spec.name),
        annotations: names::container_annotations(
            pod,
            container,
            facts.hash,
            facts.restart_count,
            &facts.devices.annotations,
        ),
        log_path: names::container_log_path(&spec.name, facts.restart_count),
        stdin: spec.stdin.unwrap_or(false),
        stdin_once: spec.stdin_once.unwrap_or(false),
        tty: spec.tty.unwrap_or(false),
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(linux::container_resources(pod, container, facts.node, facts.exclusive_cpus)),
            security_context: Some(security_context),
        }),
        windows: None,
        cdi_devices: facts.devices.cdi_devices.iter().map(|name| v1::CdiDevice { name: name.clone() }).collect(),
        stop_signal: if facts.node.gates.container_stop_signals { stop_signal(container) as i32 } else { 0 },
    })
}

/// `lifecycle.stopSignal`; the API writes `SIGRTMIN+1` where the CRI has SIGRTMINPLUS1.
fn stop_signal(container: ContainerEntry<'_>) -> v1::Signal {
    container
        .spec
        .lifecycle
        .as_ref()
        .and_then(|l| l.stop_signal.as_deref())
        .and_then(|name| v1::Signal::from_str_name(&name.replace('+', "PLUS").replace('-', "MINUS")))
        .unwrap_or(v1::Signal::RuntimeDefault)
}
