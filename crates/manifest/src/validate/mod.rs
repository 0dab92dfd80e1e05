//! The API's rules for pods, as far as they decide whether a static pod is accepted (core/v1 validation of Kubernetes 1.36).
//!
//! Errors name the field as the API server does: `spec.containers[0].image: Required value`.

mod containers;
mod env;
mod field;
mod meta;
mod mounts;
mod names;
mod network_volumes;
mod paths;
mod probes;
mod resources;
mod scheduling;
mod security;
mod volumes;

use std::collections::BTreeSet;

use model::api::{Container, Pod, PodDNSConfig, PodResourceClaim, PodSpec};
use model::pod::CONFIG_MIRROR;

use crate::Gates;
use crate::resources::as_container;
pub use field::FieldError;
use field::{Errors, Internal, Json, Path};

/// A container and where it is.
pub(crate) struct At<'a> {
    pub(crate) container: &'a Container,
    pub(crate) path: Path,
}

/// Every rule that the pod breaks. The pod must be defaulted ([`crate::default_pod`]) and have its namespace and node name.
pub fn validate_pod(pod: &Pod, gates: &Gates) -> Vec<FieldError> {
    let mut e = Errors::default();
    let (meta_path, path) = (Path::new("metadata"), Path::new("spec"));
    let default = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default);
    let ephemeral: Vec<Container> = spec.ephemeral_containers.iter().flatten().filter_map(as_container).collect();
    let all = every_container(spec, &ephemeral, &path);
    let none = std::collections::BTreeMap::new();
    let notes = pod.metadata.annotations.as_ref().unwrap_or(&none);

    meta::object_meta(&mut e, &pod.metadata, &meta_path);
    let names: Vec<&str> = all.iter().map(|a| a.container.name.as_str()).collect();
    meta::pod_annotations(&mut e, notes, spec, &names, &meta_path.child("annotations"));
    pod_spec(&mut e, pod, spec, &all, gates, &path);
    token_without_account(&mut e, spec, &path.child("volumes"));
    for (list, field) in [(Some(&spec.containers), "containers"), (spec.init_containers.as_ref(), "initContainers")] {
        for (i, c) in list.into_iter().flatten().enumerate() {
            containers::padded_image(&mut e, c, &path.child(field).index(i));
        }
    }
    if !ephemeral.is_empty() {
        e.forbidden(&path.child("ephemeralContainers"), "cannot be set on create");
    }
    if !text(&spec.node_name).is_empty() && spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty()) {
        e.forbidden(&path.child("nodeName"), "cannot be set until all schedulingGates have been cleared");
    }
    security::annotations_match(&mut e, notes, spec, &all, &path);
    e.0
}

fn text(s: &Option<String>) -> &str {
    s.as_deref().unwrap_or("")
}

/// Init containers, containers, ephemeral ones.
fn every_container<'a>(spec: &'a PodSpec, ephemeral: &'a [Container], path: &Path) -> Vec<At<'a>> {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let lists = [("initContainers", init), ("containers", &spec.containers), ("ephemeralContainers", ephemeral)];
    let at = |(field, list): (&str, &'a [Container])| {
        let path = path.child(field);
        list.iter().enumerate().map(|(i, container)| At { container, path: path.index(i) }).collect::<Vec<_>>()
    };
    lists.into_iter().flat_map(at).collect()
}

fn pod_spec(e: &mut Errors, pod: &Pod, spec: &PodSpec, all: &[At<'_>], gates: &Gates, path: &Path) {
    if spec.termination_grace_period_seconds.is_none() {
        e.required(&path.child("terminationGracePeriodSeconds"), "");
    }
    let volumes = volumes::volumes(
        e,
        spec.volumes.as_deref().unwrap_or_default(),
        text(&pod.metadata.name),
        &path.child("volumes"),
    );
    let claims =
        resource_claims(e, pod, spec.resource_claims.as_deref().unwrap_or_default(), &path.child("resourceClaims"));
    let cx = containers::Context { spec, volumes: &volumes, claims: &claims, gates };
    containers::apps(e, &cx, &path.child("containers"));
    containers::inits(e, &cx, &path.child("initContainers"));
    containers::ephemerals(e, &cx, &path.child("ephemeralContainers"));
    if gates.pod_level_resources {
        resources::pod_level(e, spec, &claims, path);
    }
    host_network_ports(e, spec, &path.child("containers"));
    e.required_one_of(&path.child("restartPolicy"), text(&spec.restart_policy), &["Always", "OnFailure", "Never"]);
    let policies = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
    e.required_one_of(&path.child("dnsPolicy"), text(&spec.dns_policy), &policies);
    meta::labels(e, spec.node_selector.as_ref(), &path.child("nodeSelector"));
    security::pod(e, spec, &path.child("securityContext"));
    if let Some(affinity) = &spec.affinity {
        scheduling::affinity(e, affinity, &path.child("affinity"));
    }
    dns_config(e, spec.dns_config.as_ref(), text(&spec.dns_policy), &path.child("dnsConfig"));
    gates_and_spread(e, spec, path);
    security::host_process(e, spec, all, path);
    security::host_users(e, spec, all, path);
    host_names(e, spec, path);
    identity(e, spec, path);
    scheduling::tolerations(e, spec.tolerations.as_deref().unwrap_or_default(), gates, &path.child("tolerations"));
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        let path = path.child("hostAliases").index(i);
        names::ip(e, &path.child("ip"), &alias.ip);
        for (j, name) in alias.hostnames.iter().flatten().enumerate() {
            e.invalid_each(&path.child("hostnames").index(j), name, names::dns_subdomain(name));
        }
    }
    if let Some(policy) = &spec.preemption_policy {
        e.required_one_of(&path.child("preemptionPolicy"), policy, &["PreemptLowerPriority", "Never"]);
    }
    if let Some(overhead) = &spec.overhead {
        resources::overhead(e, overhead, &path.child("overhead"));
    }
    security::operating_system(e, spec, all, path);
    if let Some(group) = &spec.scheduling_group {
        let path = path.child("schedulingGroup").child("podGroupName");
        match &group.pod_group_name {
            None => e.invalid(&path, Json(&None::<()>), "must specify one of: `podGroupName`"),
            Some(name) => e.invalid_each(&path, name, names::dns_subdomain(name)),
        }
    }
    env_files(e, spec, all);
}

/// Names of the pod's claims.
fn resource_claims<'a>(e: &mut Errors, pod: &Pod, claims: &'a [PodResourceClaim], path: &Path) -> BTreeSet<&'a str> {
    let mirror = pod.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(CONFIG_MIRROR));
    let mut seen = BTreeSet::new();
    for (i, claim) in claims.iter().enumerate() {
        if mirror {
            e.forbidden(&Path::new(""), "static pods do not support resource claims");
            continue;
        }
        let path = path.index(i);
        let name = path.child("name");
        if claim.name.is_empty() {
            e.required(&name, "");
        } else if !seen.insert(claim.name.as_str()) {
            e.duplicate(&name, &claim.name);
        } else {
            e.invalid_each(&name, &claim.name, names::dns_label(&claim.name));
        }
        match (&claim.resource_claim_name, &claim.resource_claim_template_name) {
            (Some(_), Some(_)) => {
                e.invalid(
                    &path,
                    Internal("core.PodResourceClaim", claim),
                    "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
                );
            }
            (None, None) => {
                e.invalid(
                    &path,
                    Internal("core.PodResourceClaim", claim),
                    "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
                );
            }
            _ => {}
        }
        for (field, value) in [
            ("resourceClaimName", &claim.resource_claim_name),
            ("resourceClaimTemplateName", &claim.resource_claim_template_name),
        ] {
            if let Some(value) = value {
                e.invalid_each(&path.child(field), value, names::dns_subdomain(value));
            }
        }
    }
    claims.iter().map(|c| c.name.as_str()).filter(|n| !n.is_empty()).collect()
}

/// A projected token belongs to a service account.
fn token_without_account(e: &mut Errors, spec: &PodSpec, path: &Path) {
    if !text(&spec.service_account_name).is_empty() {
        return;
    }
    for (i, v) in spec.volumes.iter().flatten().enumerate() {
        for (j, s) in v.projected.iter().flat_map(|p| p.sources.iter().flatten()).enumerate() {
            if s.service_account_token.is_some() {
                let path = path.index(i).child("projected").child("sources").index(j).child("serviceAccountToken");
                e.forbidden(&path, "must not be specified when serviceAccountName is not set");
            }
        }
    }
}

fn host_network_ports(e: &mut Errors, spec: &PodSpec, path: &Path) {
    if spec.host_network != Some(true) {
        return;
    }
    for (i, c) in spec.containers.iter().enumerate() {
        for (j, p) in c.ports.iter().flatten().enumerate() {
            if let Some(port) = p.host_port.filter(|h| *h != 0 && *h != p.container_port) {
                let path = path.index(i).child("ports").index(j).child("hostPort");
                e.invalid(&path, port, "must match `containerPort` when `hostNetwork` is true");
            }
        }
    }
}

fn dns_config(e: &mut Errors, config: Option<&PodDNSConfig>, policy: &str, path: &Path) {
    let servers = config.and_then(|c| c.nameservers.as_deref()).unwrap_or_default();
    if policy == "None" {
        if config.is_none() {
            return e.required(path, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            return e.required(
                &path.child("nameservers"),
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            );
        }
    }
    let Some(config) = config else { return };
    let at = path.child("nameservers");
    if servers.len() > 3 {
        e.invalid(&at, Json(&servers), "must not have more than 3 nameservers");
    }
    for (i, server) in servers.iter().enumerate() {
        names::ip(e, &at.index(i), server);
    }
    let (at, searches) = (path.child("searches"), config.searches.as_deref().unwrap_or_default());
    if searches.len() > 32 {
        e.invalid(&at, Json(&searches), "must not have more than 32 search paths");
    }
    if searches.join(" ").len() > 2048 {
        e.invalid(
            &at,
            Json(&searches),
            "must not have more than 2048 characters (including spaces) in the search list",
        );
    }
    for (i, search) in searches.iter().enumerate().filter(|(_, s)| *s != ".") {
        let search = search.strip_suffix('.').unwrap_or(search);
        e.invalid_each(&at.index(i), search, names::dns_search(search));
    }
    for (i, option) in config.options.iter().flatten().enumerate() {
        if text(&option.name).is_empty() {
            e.required(&path.child("options").index(i), "must not be empty");
        }
    }
}

fn gates_and_spread(e: &mut Errors, spec: &PodSpec, path: &Path) {
    for (i, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        let path = path.child("readinessGates").index(i).child("conditionType");
        e.invalid_each(&path, &gate.condition_type, names::label_key(&gate.condition_type));
    }
    let gates = spec.scheduling_gates.as_deref().unwrap_or_default();
    for (i, gate) in gates.iter().enumerate() {
        let path = path.child("schedulingGates").index(i);
        e.invalid_each(&path, &gate.name, names::label_key(&gate.name));
        if gates[..i].iter().any(|g| g.name == gate.name) {
            e.duplicate(&path, &gate.name);
        }
    }
    let spread = spec.topology_spread_constraints.as_deref().unwrap_or_default();
    scheduling::topology_spread(e, spread, &path.child("topologySpreadConstraints"));
}

/// KEP-4762.
fn host_names(e: &mut Errors, spec: &PodSpec, path: &Path) {
    let Some(name) = &spec.hostname_override else { return };
    let path = path.child("hostnameOverride");
    if spec.set_hostname_as_fqdn == Some(true) {
        e.forbidden(&path, "may not be specified when setHostnameAsFQDN is true");
    }
    if spec.host_network == Some(true) {
        e.forbidden(&path, "may not be specified when hostNetwork is true");
    }
    if name.len() > 64 {
        e.too_long(&path, 64);
    }
    e.invalid_each(&path, name, names::dns_subdomain(name));
}

/// Names that the spec refers to, and the deadline.
fn identity(e: &mut Errors, spec: &PodSpec, path: &Path) {
    let subdomain = |e: &mut Errors, field: &str, value: &str| {
        if !value.is_empty() {
            e.invalid_each(&path.child(field), value, names::dns_subdomain(value));
        }
    };
    subdomain(e, "serviceAccountName", text(&spec.service_account_name));
    subdomain(e, "nodeName", text(&spec.node_name));
    if let Some(seconds) = spec.active_deadline_seconds.filter(|s| !(1..=i64::from(i32::MAX)).contains(s)) {
        e.invalid(&path.child("activeDeadlineSeconds"), seconds, &names::range_error(1, i64::from(i32::MAX)));
    }
    for (field, value) in [("hostname", text(&spec.hostname)), ("subdomain", text(&spec.subdomain))] {
        if !value.is_empty() {
            e.invalid_each(&path.child(field), value, names::dns_label(value));
        }
    }
    subdomain(e, "priorityClassName", text(&spec.priority_class_name));
    if let Some(class) = &spec.runtime_class_name {
        e.invalid_each(&path.child("runtimeClassName"), class, names::dns_subdomain(class));
    }
}

/// Files with environment variables are in emptyDir volumes (KEP-3721).
fn env_files(e: &mut Errors, spec: &PodSpec, all: &[At<'_>]) {
    for At { container, path } in all {
        for (i, var) in container.env.iter().flatten().enumerate() {
            let Some(file) = var.value_from.as_ref().and_then(|f| f.file_key_ref.as_ref()) else { continue };
            let path = path.child("env").index(i).child("valueFrom").child("fileKeyRef").child("volumeName");
            match spec.volumes.iter().flatten().rfind(|v| v.name == file.volume_name) {
                None => e.not_found(&path, &file.volume_name, ""),
                Some(v) if v.empty_dir.is_none() => {
                    e.invalid(&path, &file.volume_name, "referenced volume must be of type emptyDir");
                }
                Some(_) => {}
            }
        }
    }
}
