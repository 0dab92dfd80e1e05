//! `metadata`, labels and annotations.

use std::collections::BTreeMap;

use model::api::{ObjectMeta, PodSpec};
use model::k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ManagedFieldsEntry};
use model::pod::CONFIG_MIRROR;

use super::field::{Errors, Json, Path};
use super::names;

/// All annotations together, bytes.
const MAX_ANNOTATIONS: usize = 256 << 10;

/// The metadata of a pod.
pub(crate) fn object_meta(e: &mut Errors, meta: &ObjectMeta, path: &Path) {
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    let generate = text(&meta.generate_name);
    if !generate.is_empty() {
        // Something will be appended, so it may end in a dash.
        let masked = match generate.strip_suffix('-') {
            Some(rest) if !rest.is_empty() => {
                format!("{}a", &rest[..rest.len() - rest.chars().next_back().map_or(0, char::len_utf8)])
            }
            _ => generate.clone(),
        };
        e.invalid_each(&path.child("generateName"), &generate, names::dns_subdomain(&masked));
    }
    let name = text(&meta.name);
    if name.is_empty() {
        e.required(&path.child("name"), "name or generateName is required");
    } else {
        e.invalid_each(&path.child("name"), &name, names::dns_subdomain(&name));
    }
    let namespace = text(&meta.namespace);
    if namespace.is_empty() {
        e.required(&path.child("namespace"), "");
    } else {
        e.invalid_each(&path.child("namespace"), &namespace, names::dns_label(&namespace));
    }
    e.non_negative(&path.child("generation"), meta.generation.unwrap_or(0));
    labels(e, meta.labels.as_ref(), &path.child("labels"));
    annotations(e, meta.annotations.as_ref(), &path.child("annotations"));
    owners(e, meta, &path.child("ownerReferences"));
    finalizers(e, meta.finalizers.as_deref().unwrap_or_default(), &path.child("finalizers"));
    for (i, entry) in meta.managed_fields.iter().flatten().enumerate() {
        managed_fields(e, entry, &path.child("managedFields").index(i));
    }
}

/// A map of labels.
pub(crate) fn labels(e: &mut Errors, labels: Option<&BTreeMap<String, String>>, path: &Path) {
    for (key, value) in labels.into_iter().flatten() {
        e.invalid_each(path, key, names::label_key(key));
        e.invalid_each(path, value, names::label_value(value));
    }
}

/// A map of annotations.
pub(crate) fn annotations(e: &mut Errors, annotations: Option<&BTreeMap<String, String>>, path: &Path) {
    let mut size = 0;
    for (key, value) in annotations.into_iter().flatten() {
        e.invalid_each(path, key, names::label_key(&key.to_lowercase()));
        size += key.len() + value.len();
    }
    if size > MAX_ANNOTATIONS {
        e.too_long(path, MAX_ANNOTATIONS);
    }
}

fn owners(e: &mut Errors, meta: &ObjectMeta, path: &Path) {
    let owners = meta.owner_references.as_deref().unwrap_or_default();
    let mut controller = None;
    for owner in owners {
        let version = owner.api_version.rsplit('/').next().unwrap_or("");
        if version.is_empty() || owner.api_version.matches('/').count() > 1 {
            e.invalid(&path.child("apiVersion"), &owner.api_version, "version must not be empty");
        }
        for (field, value) in [("kind", &owner.kind), ("name", &owner.name), ("uid", &owner.uid)] {
            if value.is_empty() {
                e.invalid(&path.child(field), value, "must not be empty");
            }
        }
        if owner.api_version == "v1" && owner.kind == "Event" {
            e.invalid(path, Json(owner), "/v1, Kind=Event is disallowed from being an owner");
        }
        if owner.controller == Some(true) {
            let this = format!("{}/{}", owner.kind, owner.name);
            if let Some(first) = &controller {
                let detail = format!(
                    "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {this}"
                );
                e.invalid(path, Json(&owners), &detail);
            } else {
                controller = Some(this);
            }
        }
    }
}

fn finalizers(e: &mut Errors, list: &[String], path: &Path) {
    for name in list {
        e.invalid_each(path, name, names::label_key(name));
    }
    let has = |name: &str| list.iter().any(|f| f == name);
    if has("orphan") && has("foregroundDeletion") {
        e.invalid(path, Json(&list), "finalizer orphan and foregroundDeletion cannot be both set");
    }
    for (i, name) in list.iter().enumerate() {
        if !name.contains('/') && !matches!(name.as_str(), "kubernetes" | "orphan" | "foregroundDeletion") {
            e.invalid(&path.index(i), name, "name is neither a standard finalizer name nor is it fully qualified");
        }
    }
}

fn managed_fields(e: &mut Errors, entry: &ManagedFieldsEntry, path: &Path) {
    let operation = entry.operation.as_deref().unwrap_or("");
    if !matches!(operation, "Apply" | "Update") {
        e.invalid(&path.child("operation"), operation, "must be `Apply` or `Update`");
    }
    let kind = entry.fields_type.as_deref().unwrap_or("");
    if !matches!(kind, "" | "FieldsV1") {
        e.invalid(&path.child("fieldsType"), kind, "must be `FieldsV1`");
    }
    if entry.manager.as_deref().unwrap_or("").len() > 128 {
        e.too_long(&path.child("manager"), 128);
    }
    if entry.subresource.as_deref().unwrap_or("").len() > 256 {
        e.too_long(&path.child("subresource"), 256);
    }
}

/// A label selector.
pub(crate) fn label_selector(e: &mut Errors, selector: Option<&LabelSelector>, path: &Path) {
    let Some(selector) = selector else { return };
    labels(e, selector.match_labels.as_ref(), &path.child("matchLabels"));
    for (i, r) in selector.match_expressions.iter().flatten().enumerate() {
        let path = path.child("matchExpressions").index(i);
        let values = r.values.as_deref().unwrap_or_default();
        match r.operator.as_str() {
            "In" | "NotIn" if values.is_empty() => {
                e.required(&path.child("values"), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                e.forbidden(
                    &path.child("values"),
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => e.invalid(&path.child("operator"), other, "not a valid selector operator"),
        }
        e.invalid_each(&path.child("key"), &r.key, names::label_key(&r.key));
        for (j, value) in values.iter().enumerate() {
            e.invalid_each(&path.child("values").index(j), value, names::label_value(value));
        }
    }
}

/// Annotations that have a meaning of their own.
pub(crate) fn pod_annotations(
    e: &mut Errors,
    notes: &BTreeMap<String, String>,
    spec: &PodSpec,
    containers: &[&str],
    path: &Path,
) {
    const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
    if let Some(value) = notes.get(CONFIG_MIRROR)
        && spec.node_name.as_deref().unwrap_or("").is_empty()
    {
        e.invalid(&path.key(CONFIG_MIRROR), value, "must set spec.nodeName if mirror pod annotation is set");
    }
    if let Some(cost) = notes.get(COST) {
        let well_formed = cost == "0" || cost.starts_with('-') || cost.starts_with(|c: char| matches!(c, '1'..='9'));
        if !well_formed || cost.parse::<i32>().is_err() {
            e.invalid(&path.key(COST), cost, "must be a 32bit integer");
        }
    }
    for (key, profile) in notes {
        if key == "seccomp.security.alpha.kubernetes.io/pod"
            || key.starts_with("container.seccomp.security.alpha.kubernetes.io/")
        {
            super::security::seccomp_name(e, profile, &path.child(key));
        }
    }
    for (key, profile) in notes {
        let Some(container) = key.strip_prefix("container.apparmor.security.beta.kubernetes.io/") else { continue };
        if !containers.contains(&container) {
            e.invalid(&path.key(key), container, "container not found");
        }
        if !matches!(profile.as_str(), "" | "runtime/default" | "unconfined") && !profile.starts_with("localhost/") {
            e.invalid(
                &path.key(key),
                profile,
                &format!("invalid AppArmor profile name: {}", super::field::go_quote(profile)),
            );
        }
    }
}
