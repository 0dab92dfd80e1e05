//! The request for a pod's sandbox.

use std::collections::BTreeSet;

use cri_api::v1;
use model::api::ContainerPort;
use model::pod::DesiredPod;

use super::error::{ConfigError, Reason};
use super::facts::SandboxFacts;
use super::{hostname, linux, names, security};
use crate::admission::sysctl_name;

/// PodSandboxConfig of a pod.
///
/// # Errors
/// A field that cannot be honoured, or a missing fact.
pub fn sandbox_config(pod: &DesiredPod, facts: &SandboxFacts<'_>) -> Result<v1::PodSandboxConfig, ConfigError> {
    let spec = pod.spec();
    let missing = |fact: &str| ConfigError::missing(Reason::CreatePodSandbox, fact);
    let dns = facts.dns.as_ref().ok_or_else(|| missing("DNS configuration"))?;
    let hostname = if pod.host_network() {
        String::new()
    } else {
        let name = facts.hostname.as_ref().ok_or_else(|| missing("host name"))?;
        hostname::kernel_hostname(name, spec.set_hostname_as_fqdn == Some(true))?
    };
    Ok(v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: pod.name().into(),
            uid: pod.uid().to_string(),
            namespace: pod.namespace().into(),
            attempt: facts.attempt,
        }),
        hostname,
        log_directory: names::pod_log_dir(&facts.node.pod_logs_dir, pod),
        dns_config: Some(v1::DnsConfig {
            servers: dns.servers.clone(),
            searches: dns.searches.clone(),
            options: dns.options.clone(),
        }),
        port_mappings: spec.containers.iter().flat_map(|c| port_mappings(c.ports.as_deref())).collect(),
        labels: names::sandbox_labels(pod),
        annotations: pod.meta().annotations.clone().unwrap_or_default(),
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: facts.cgroup_parent.clone(),
            security_context: Some(security::sandbox(pod, facts)?),
            sysctls: spec
                .security_context
                .iter()
                .flat_map(|c| c.sysctls.iter().flatten())
                .map(|s| (sysctl_name(&s.name), s.value.clone()))
                .collect(),
            overhead: Some(linux::overhead_resources(pod, facts.node)),
            resources: Some(linux::sandbox_resources(pod, facts.node, facts.exclusive_cpus)),
        }),
        windows: None,
    })
}

/// All ports of a container, those without host port too; a name, or for unnamed ones the same mapping of one address family, counts once.
fn port_mappings(ports: Option<&[ContainerPort]>) -> Vec<v1::PortMapping> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for port in ports.unwrap_or_default() {
        let host_ip = port.host_ip.as_deref().unwrap_or_default();
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let host_port = port.host_port.unwrap_or(0);
        let name = match port.name.as_deref() {
            Some(name) if !name.is_empty() => name.to_string(),
            _ => format!("{protocol}-{host_ip}:{}:{host_port}", port.container_port),
        };
        if seen.insert(name) {
            out.push(v1::PortMapping {
                protocol: match protocol {
                    "UDP" => v1::Protocol::Udp,
                    "SCTP" => v1::Protocol::Sctp,
                    _ => v1::Protocol::Tcp,
                } as i32,
                container_port: port.container_port,
                host_port,
                host_ip: host_ip.into(),
            });
        }
    }
    out
}
