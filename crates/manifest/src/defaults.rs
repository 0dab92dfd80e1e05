//! What the API fills in where a pod says nothing.

use std::collections::BTreeMap;

use model::api::{
    self, Container, DownwardAPIVolumeFile, EnvVar, HTTPGetAction, LifecycleHandler, ObjectFieldSelector, Pod, PodSpec,
    Probe, ResourceRequirements, Volume,
};
use model::quantity::Quantity;

use crate::image::default_pull_policy;
use crate::resources::{self, Amounts, is_hugepages, is_pod_level};

/// Pod-level resources that were computed, as exact amounts: their text alone does not tell how the sum is represented.
#[derive(Default)]
pub(crate) struct PodLevel {
    pub(crate) requests: Amounts,
    pub(crate) limits: Amounts,
}

/// Annotations of init containers from before they were fields; never part of a pod.
const INIT_ANNOTATIONS: [&str; 4] = [
    "pod.beta.kubernetes.io/init-containers",
    "pod.alpha.kubernetes.io/init-containers",
    "pod.beta.kubernetes.io/init-container-statuses",
    "pod.alpha.kubernetes.io/init-container-statuses",
];

/// Fills in the defaults of the v1 API (1.36, pod-level resources on).
pub fn default_pod(pod: &mut Pod) {
    apply(pod);
}

pub(crate) fn apply(pod: &mut Pod) -> PodLevel {
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|k, _| !INIT_ANNOTATIONS.contains(&k.as_str()));
    }
    if let Some(status) = &mut pod.status {
        // The older field wins where the two differ.
        let first = status.pod_ips.as_ref().and_then(|l| l.first()).map(|p| p.ip.clone());
        match status.pod_ip.clone().filter(|ip| !ip.is_empty()) {
            Some(ip) if first.as_ref() != Some(&ip) => status.pod_ips = Some(vec![api::PodIP { ip }]),
            _ => status.pod_ip = first,
        }
    }
    let spec = pod.spec.get_or_insert_default();
    for c in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        requests_from_limits(c.resources.as_mut());
    }
    let pod_level = pod_level_resources(spec);
    spec.enable_service_links.get_or_insert(true);
    if spec.host_network == Some(true) {
        for port in spec
            .containers
            .iter_mut()
            .chain(spec.init_containers.iter_mut().flatten())
            .flat_map(|c| c.ports.iter_mut().flatten())
        {
            if port.host_port.unwrap_or(0) == 0 && port.container_port != 0 {
                port.host_port = Some(port.container_port);
            }
        }
    }
    default_spec(spec);
    for v in spec.volumes.iter_mut().flatten() {
        default_volume(v);
    }
    for c in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        default_container(c);
    }
    for e in spec.ephemeral_containers.iter_mut().flatten() {
        // The fields that both kinds have are filled in the same way.
        let Some(mut c) = resources::as_container(e) else { continue };
        default_container(&mut c);
        e.env = c.env;
        e.image_pull_policy = c.image_pull_policy;
        e.lifecycle = c.lifecycle;
        e.liveness_probe = c.liveness_probe;
        e.ports = c.ports;
        e.readiness_probe = c.readiness_probe;
        e.startup_probe = c.startup_probe;
        e.termination_message_path = c.termination_message_path;
        e.termination_message_policy = c.termination_message_policy;
    }
    pod_level
}

/// Sets a text that is absent or empty.
fn fill(field: &mut Option<String>, value: &str) {
    if field.as_deref().unwrap_or("").is_empty() {
        *field = Some(value.into());
    }
}

/// Sets a number that is absent or 0.
fn fill_number(field: &mut Option<i32>, value: i32) {
    if field.unwrap_or(0) == 0 {
        *field = Some(value);
    }
}

fn default_spec(spec: &mut PodSpec) {
    fill(&mut spec.dns_policy, "ClusterFirst");
    fill(&mut spec.restart_policy, "Always");
    fill(&mut spec.scheduler_name, "default-scheduler");
    spec.security_context.get_or_insert_default();
    // Negative grace periods of old objects mean "at once".
    let grace = spec.termination_grace_period_seconds.get_or_insert(30);
    if *grace < 0 {
        *grace = 1;
    }
    if let Some(account) = &spec.service_account {
        fill(&mut spec.service_account_name, account);
    }
}

fn requests_from_limits(resources: Option<&mut ResourceRequirements>) {
    if let Some(ResourceRequirements { limits: Some(limits), requests, .. }) = resources {
        let requests = requests.get_or_insert_default();
        for (name, amount) in limits {
            requests.entry(name.clone()).or_insert_with(|| amount.clone());
        }
    }
}

/// Pod-level huge page limits from the containers' sum; pod-level requests from the containers' sum, then from the limits (KEP-2837).
fn pod_level_resources(spec: &mut PodSpec) -> PodLevel {
    let mut computed = PodLevel::default();
    let Some(own) = &spec.resources else { return computed };
    let empty = |list: &Option<BTreeMap<String, api::Quantity>>| list.as_ref().is_none_or(BTreeMap::is_empty);
    if empty(&own.limits) && empty(&own.requests) {
        return computed;
    }
    let has = |list: &Option<BTreeMap<String, api::Quantity>>, name: &str| {
        list.as_ref().is_some_and(|l| l.contains_key(name))
    };
    for (name, amount) in resources::container_limits(spec) {
        if is_hugepages(&name) && !has(&own.requests, &name) && !has(&own.limits, &name) {
            computed.limits.insert(name, amount);
        }
    }
    let mut limits = resources::amounts(own.limits.as_ref());
    limits.extend(computed.limits.clone());
    if !limits.is_empty() {
        for (name, amount) in resources::container_requests(spec) {
            if is_pod_level(&name) && !is_hugepages(&name) && !has(&own.requests, &name) {
                computed.requests.insert(name, amount);
            }
        }
        for (name, amount) in limits {
            if is_pod_level(&name) && !has(&own.requests, &name) {
                computed.requests.entry(name).or_insert(amount);
            }
        }
    }
    if let Some(own) = &mut spec.resources {
        let store = |list: &mut Option<BTreeMap<String, api::Quantity>>, amounts: &Amounts| {
            if !amounts.is_empty() {
                list.get_or_insert_default().extend(amounts.iter().map(|(k, v)| (k.clone(), Quantity::to_api(v))));
            }
        };
        store(&mut own.limits, &computed.limits);
        store(&mut own.requests, &computed.requests);
    }
    computed
}

fn default_container(c: &mut Container) {
    let policy = default_pull_policy(c.image.as_deref().unwrap_or(""));
    fill(&mut c.image_pull_policy, policy);
    fill(&mut c.termination_message_path, "/dev/termination-log");
    fill(&mut c.termination_message_policy, "File");
    for port in c.ports.iter_mut().flatten() {
        fill(&mut port.protocol, "TCP");
    }
    c.env.iter_mut().flatten().for_each(default_env);
    for probe in [&mut c.liveness_probe, &mut c.readiness_probe, &mut c.startup_probe].into_iter().flatten() {
        default_probe(probe);
    }
    if let Some(lifecycle) = &mut c.lifecycle {
        for LifecycleHandler { http_get, .. } in
            [&mut lifecycle.post_start, &mut lifecycle.pre_stop].into_iter().flatten()
        {
            http_get.iter_mut().for_each(default_http_get);
        }
    }
}

fn default_env(env: &mut EnvVar) {
    if let Some(from) = &mut env.value_from {
        from.field_ref.iter_mut().for_each(default_field_ref);
        if let Some(key) = &mut from.file_key_ref {
            key.optional.get_or_insert(false);
        }
    }
}

fn default_field_ref(field: &mut ObjectFieldSelector) {
    fill(&mut field.api_version, "v1");
}

fn default_probe(probe: &mut Probe) {
    fill_number(&mut probe.timeout_seconds, 1);
    fill_number(&mut probe.period_seconds, 10);
    fill_number(&mut probe.success_threshold, 1);
    fill_number(&mut probe.failure_threshold, 3);
    probe.http_get.iter_mut().for_each(default_http_get);
    if let Some(grpc) = &mut probe.grpc {
        grpc.service.get_or_insert_default();
    }
}

fn default_http_get(http: &mut HTTPGetAction) {
    fill(&mut http.path, "/");
    fill(&mut http.scheme, "HTTP");
}

fn default_volume(v: &mut Volume) {
    if *v == (Volume { name: v.name.clone(), ..Volume::default() }) {
        v.empty_dir = Some(api::EmptyDirVolumeSource::default());
    }
    if let Some(image) = &mut v.image {
        let policy = default_pull_policy(image.reference.as_deref().unwrap_or(""));
        fill(&mut image.pull_policy, policy);
    }
    if let Some(path) = &mut v.host_path {
        path.type_.get_or_insert_default();
    }
    let files = |items: &mut Option<Vec<DownwardAPIVolumeFile>>| {
        for field in items.iter_mut().flatten().filter_map(|i| i.field_ref.as_mut()) {
            default_field_ref(field);
        }
    };
    if let Some(secret) = &mut v.secret {
        secret.default_mode.get_or_insert(0o644);
    }
    if let Some(map) = &mut v.config_map {
        map.default_mode.get_or_insert(0o644);
    }
    if let Some(downward) = &mut v.downward_api {
        downward.default_mode.get_or_insert(0o644);
        files(&mut downward.items);
    }
    if let Some(projected) = &mut v.projected {
        projected.default_mode.get_or_insert(0o644);
        for source in projected.sources.iter_mut().flatten() {
            if let Some(downward) = &mut source.downward_api {
                files(&mut downward.items);
            }
            if let Some(token) = &mut source.service_account_token {
                token.expiration_seconds.get_or_insert(3600);
            }
        }
    }
    if let Some(claim) = v.ephemeral.as_mut().and_then(|e| e.volume_claim_template.as_mut()) {
        claim.spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
    }
    default_network_volume(v);
}

/// Sources of network storage.
fn default_network_volume(v: &mut Volume) {
    if let Some(iscsi) = &mut v.iscsi {
        fill(&mut iscsi.iscsi_interface, "default");
    }
    if let Some(rbd) = &mut v.rbd {
        fill(&mut rbd.pool, "rbd");
        fill(&mut rbd.user, "admin");
        fill(&mut rbd.keyring, "/etc/ceph/keyring");
    }
    if let Some(disk) = &mut v.azure_disk {
        disk.caching_mode.get_or_insert_with(|| "ReadWrite".into());
        disk.fs_type.get_or_insert_with(|| "ext4".into());
        disk.read_only.get_or_insert(false);
        disk.kind.get_or_insert_with(|| "Shared".into());
    }
    if let Some(scale_io) = &mut v.scale_io {
        fill(&mut scale_io.storage_mode, "ThinProvisioned");
        fill(&mut scale_io.fs_type, "xfs");
    }
}
