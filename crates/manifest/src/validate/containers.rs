//! Containers of every kind.

use std::collections::{BTreeMap, BTreeSet};

use model::api::{Container, EphemeralContainer, PodSpec};

use super::field::{Errors, Path};
use super::probes::{self, ProbeKind};
use super::volumes::Volumes;
use super::{env, mounts, names, resources, security};
use crate::Gates;
use crate::resources::as_container;

/// What containers are checked against.
pub(crate) struct Context<'a> {
    pub(crate) spec: &'a PodSpec,
    pub(crate) volumes: &'a Volumes<'a>,
    pub(crate) claims: &'a BTreeSet<&'a str>,
    pub(crate) gates: &'a Gates,
}

impl Context<'_> {
    fn grace(&self) -> Option<i64> {
        self.spec.termination_grace_period_seconds
    }
}

/// `spec.containers`.
pub(crate) fn apps(e: &mut Errors, cx: &Context<'_>, path: &Path) {
    let list = &cx.spec.containers;
    if list.is_empty() {
        return e.required(path, "");
    }
    for (i, c) in list.iter().enumerate() {
        let path = path.index(i);
        common(e, cx, c, &path);
        if list[..i].iter().any(|o| o.name == c.name) {
            e.duplicate(&path.child("name"), &c.name);
        }
        hooks_and_probes(e, cx, c, &path);
        if cx.gates.container_restart_rules {
            restart_policy(e, cx, c, &path);
        } else if c.restart_policy.is_some() {
            e.forbidden(&path.child("restartPolicy"), "may not be set for non-init containers");
        }
    }
    host_ports(e, list, path);
}

/// `spec.initContainers`.
pub(crate) fn inits(e: &mut Errors, cx: &Context<'_>, path: &Path) {
    let mut seen: BTreeSet<&str> = cx.spec.containers.iter().map(|c| c.name.as_str()).collect();
    for (i, c) in cx.spec.init_containers.iter().flatten().enumerate() {
        let list = path;
        let path = path.index(i);
        common(e, cx, c, &path);
        init_restart_policy(e, cx, c, &path);
        if seen.contains(c.name.as_str()) {
            e.duplicate(&path.child("name"), &c.name);
        } else if !c.name.is_empty() {
            seen.insert(&c.name);
        }
        // They run one after the other, so only ports of the same one can be in conflict.
        host_ports(e, std::slice::from_ref(c), list);
        let sidecar = c.restart_policy.as_deref() == Some("Always");
        if sidecar {
            hooks_and_probes(e, cx, c, &path);
        } else {
            let set = [
                ("lifecycle", c.lifecycle.is_some()),
                ("livenessProbe", c.liveness_probe.is_some()),
                ("readinessProbe", c.readiness_probe.is_some()),
                ("startupProbe", c.startup_probe.is_some()),
            ];
            for (field, _) in set.into_iter().filter(|s| s.1) {
                e.forbidden(&path.child(field), "may not be set for init containers without restartPolicy=Always");
            }
            for (j, p) in
                c.resize_policy.iter().flatten().enumerate().filter(|(_, p)| p.restart_policy == "RestartContainer")
            {
                let path = path.child("resizePolicy").index(j).child("restartPolicy");
                e.invalid(
                    &path,
                    &p.restart_policy,
                    "must not be set to 'RestartContainer' for non-sidecar initContainers",
                );
            }
        }
    }
}

/// `spec.ephemeralContainers`. A static pod may have none, but all errors are reported at once.
pub(crate) fn ephemerals(e: &mut Errors, cx: &Context<'_>, path: &Path) {
    let list: &[EphemeralContainer] = cx.spec.ephemeral_containers.as_deref().unwrap_or_default();
    let others: BTreeSet<&str> =
        cx.spec.containers.iter().chain(cx.spec.init_containers.iter().flatten()).map(|c| c.name.as_str()).collect();
    let mut seen = others.clone();
    for (i, ephemeral) in list.iter().enumerate() {
        let path = path.index(i);
        let Some(c) = as_container(ephemeral) else { continue };
        common(e, cx, &c, &path);
        padded_image(e, &c, &path);
        if !seen.insert(&ephemeral.name) {
            e.duplicate(&path.child("name"), &ephemeral.name);
        }
        let target = ephemeral.target_container_name.as_deref().unwrap_or("");
        if !target.is_empty() && !others.contains(target) {
            e.not_found(&path.child("targetContainerName"), target, "");
        }
        let resources =
            c.resources.as_ref().is_some_and(|r| r.limits.is_some() || r.requests.is_some() || r.claims.is_some());
        let set = [
            ("ports", c.ports.is_some()),
            ("resources", resources),
            ("resizePolicy", c.resize_policy.is_some()),
            ("restartPolicy", c.restart_policy.is_some()),
            ("restartPolicyRules", c.restart_policy_rules.is_some()),
            ("livenessProbe", c.liveness_probe.is_some()),
            ("readinessProbe", c.readiness_probe.is_some()),
            ("startupProbe", c.startup_probe.is_some()),
            ("lifecycle", c.lifecycle.is_some()),
        ];
        const DETAIL: &str = "cannot be set for an Ephemeral Container";
        for (field, _) in set.into_iter().filter(|s| s.1) {
            e.forbidden(&path.child(field), DETAIL);
        }
        for (j, m) in c.volume_mounts.iter().flatten().enumerate() {
            for (field, value) in [("subPath", &m.sub_path), ("subPathExpr", &m.sub_path_expr)] {
                if !value.as_deref().unwrap_or("").is_empty() {
                    e.forbidden(&path.child("volumeMounts").index(j).child(field), DETAIL);
                }
            }
        }
    }
}

/// Rules for all kinds.
fn common(e: &mut Errors, cx: &Context<'_>, c: &Container, path: &Path) {
    if c.name.is_empty() {
        e.required(&path.child("name"), "");
    } else {
        e.invalid_each(&path.child("name"), &c.name, names::dns_label(&c.name));
    }
    e.non_empty(&path.child("image"), c.image.as_deref().unwrap_or(""));
    let policy = c.termination_message_policy.as_deref().unwrap_or("");
    e.required_one_of(&path.child("terminationMessagePolicy"), policy, &["File", "FallbackToLogsOnError"]);
    ports(e, c, &path.child("ports"));
    env::env(e, c, path);
    mounts::mounts(e, c, cx.volumes, &path.child("volumeMounts"));
    mounts::devices(e, c, cx.volumes, &path.child("volumeDevices"));
    pull_policy(e, c.image_pull_policy.as_deref().unwrap_or(""), &path.child("imagePullPolicy"));
    if let Some(r) = &c.resources {
        resources::requirements(e, r, resources::Owner::Container, cx.claims, &path.child("resources"));
    }
    resize_policy(e, cx, c, &path.child("resizePolicy"));
    security::container(
        e,
        c.security_context.as_ref(),
        cx.spec.host_users != Some(false),
        &path.child("securityContext"),
    );
}

pub(crate) fn pull_policy(e: &mut Errors, policy: &str, path: &Path) {
    e.required_one_of(path, policy, &["Always", "IfNotPresent", "Never"]);
}

/// An image with space around it.
pub(crate) fn padded_image(e: &mut Errors, c: &Container, path: &Path) {
    let image = c.image.as_deref().unwrap_or("");
    if image.trim() != image {
        e.invalid(&path.child("image"), image, "must not have leading or trailing whitespace");
    }
}

fn ports(e: &mut Errors, c: &Container, path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, port) in c.ports.iter().flatten().enumerate() {
        let path = path.index(i);
        let name = port.name.as_deref().unwrap_or("");
        if !name.is_empty() {
            let messages = names::port_name(name);
            if messages.is_empty() && !seen.insert(name) {
                e.duplicate(&path.child("name"), name);
            }
            e.invalid_each(&path.child("name"), name, messages);
        }
        if port.container_port == 0 {
            e.required(&path.child("containerPort"), "");
        }
        for (field, number) in [("containerPort", port.container_port), ("hostPort", port.host_port.unwrap_or(0))] {
            for message in names::port_number(number).iter().filter(|_| number != 0) {
                e.invalid(&path.child(field), number, message);
            }
        }
        e.required_one_of(&path.child("protocol"), port.protocol.as_deref().unwrap_or(""), &["SCTP", "TCP", "UDP"]);
    }
}

/// The same port of the node twice.
fn host_ports(e: &mut Errors, containers: &[Container], path: &Path) {
    let mut seen = BTreeSet::new();
    for (i, c) in containers.iter().enumerate() {
        for (j, p) in c.ports.iter().flatten().enumerate() {
            let number = p.host_port.unwrap_or(0);
            let key =
                format!("{}/{}/{number}", p.protocol.as_deref().unwrap_or(""), p.host_ip.as_deref().unwrap_or(""));
            if number != 0 && !seen.insert(key.clone()) {
                e.duplicate(&path.index(i).child("ports").index(j).child("hostPort"), &key);
            }
        }
    }
}

fn hooks_and_probes(e: &mut Errors, cx: &Context<'_>, c: &Container, path: &Path) {
    if let Some(lifecycle) = &c.lifecycle {
        probes::lifecycle(e, lifecycle, cx.grace(), cx.spec.os.as_ref(), &path.child("lifecycle"));
    }
    for (field, probe, kind) in [
        ("livenessProbe", &c.liveness_probe, ProbeKind::Liveness),
        ("readinessProbe", &c.readiness_probe, ProbeKind::Readiness),
        ("startupProbe", &c.startup_probe, ProbeKind::Startup),
    ] {
        probes::probe(e, probe.as_ref(), kind, cx.grace(), &path.child(field));
    }
}

fn resize_policy(e: &mut Errors, cx: &Context<'_>, c: &Container, path: &Path) {
    let mut seen = BTreeMap::new();
    for (i, p) in c.resize_policy.iter().flatten().enumerate() {
        if seen.insert(p.resource_name.as_str(), ()).is_some() {
            e.duplicate(&path.index(i), &p.resource_name);
        }
        e.required_one_of(path, &p.resource_name, &["cpu", "memory"]);
        e.required_one_of(path, &p.restart_policy, &["NotRequired", "RestartContainer"]);
        if cx.spec.restart_policy.as_deref() == Some("Never") && p.restart_policy != "NotRequired" {
            e.invalid(path, &p.restart_policy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

const NO_POLICY: &str = "must specify restartPolicy when restart rules are used";

fn init_restart_policy(e: &mut Errors, cx: &Context<'_>, c: &Container, path: &Path) {
    let rules = c.restart_policy_rules.as_deref().unwrap_or_default();
    match c.restart_policy.as_deref() {
        None if !rules.is_empty() => e.required(&path.child("restartPolicy"), NO_POLICY),
        None => {}
        Some("Always") if !cx.gates.container_restart_rules => {}
        Some("Always") if !cx.gates.restart_all_containers && rules.is_empty() => {}
        Some("Always") if !cx.gates.restart_all_containers => {
            let detail = "restartPolicyRules are not allowed for init containers with restart policy Always";
            e.forbidden(&path.child("restartPolicyRules"), detail);
        }
        Some(_) if cx.gates.container_restart_rules => restart_policy(e, cx, c, path),
        Some(other) => e.not_supported(&path.child("restartPolicy"), other, &["Always"]),
    }
}

/// A container's own restart policy and rules (KEP-5307).
fn restart_policy(e: &mut Errors, cx: &Context<'_>, c: &Container, path: &Path) {
    let rules = c.restart_policy_rules.as_deref().unwrap_or_default();
    match &c.restart_policy {
        None if rules.is_empty() => return,
        None => e.required(&path.child("restartPolicy"), NO_POLICY),
        Some(policy) => e.one_of(&path.child("restartPolicy"), policy, &["Always", "Never", "OnFailure"]),
    }
    let path = path.child("restartPolicyRules");
    if rules.len() > 20 {
        e.too_many(&path, rules.len(), 20);
    }
    let actions: &[&str] =
        if cx.gates.restart_all_containers { &["Restart", "RestartAllContainers"] } else { &["Restart"] };
    for (i, rule) in rules.iter().enumerate() {
        let path = path.index(i);
        e.one_of(&path.child("action"), &rule.action, actions);
        let Some(codes) = &rule.exit_codes else {
            e.required(&path.child("exitCodes"), "must be specified");
            continue;
        };
        let path = path.child("exitCodes");
        e.one_of(&path.child("operator"), &codes.operator, &["In", "NotIn"]);
        let count = codes.values.as_ref().map_or(0, Vec::len);
        if count > 255 {
            e.too_many(&path.child("values"), count, 255);
        }
    }
}
