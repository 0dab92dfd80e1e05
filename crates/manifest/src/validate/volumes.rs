//! Volumes: one source each, and what the source needs.

use std::collections::BTreeMap;

use model::api::{
    DownwardAPIVolumeFile, KeyToPath, PersistentVolumeClaimTemplate, PodCertificateProjection, ProjectedVolumeSource,
    Volume, VolumeProjection,
};
use model::quantity::Quantity;

use super::field::{Errors, Internal, Path};
use super::{containers, env, meta, names, network_volumes, paths};

/// Sound volumes by name.
pub(crate) type Volumes<'a> = BTreeMap<&'a str, &'a Volume>;

/// All volumes; gives those without faults.
pub(crate) fn volumes<'a>(e: &mut Errors, list: &'a [Volume], pod_name: &str, path: &Path) -> Volumes<'a> {
    let created: Vec<String> =
        list.iter().filter(|v| v.ephemeral.is_some()).map(|v| format!("{pod_name}-{}", v.name)).collect();
    let mut sound = Volumes::new();
    for (i, v) in list.iter().enumerate() {
        let path = path.index(i);
        let mut found = Errors::default();
        source(&mut found, v, pod_name, &path);
        let name = path.child("name");
        if v.name.is_empty() {
            found.required(&name, "");
        } else {
            found.invalid_each(&name, &v.name, names::dns_label(&v.name));
        }
        if sound.contains_key(v.name.as_str()) {
            found.duplicate(&name, &v.name);
        }
        if found.0.is_empty() {
            sound.insert(&v.name, v);
        }
        e.0.append(&mut found.0);
        if let Some(claim) = v.persistent_volume_claim.as_ref().filter(|c| created.contains(&c.claim_name)) {
            let path = path.child("persistentVolumeClaim").child("claimName");
            e.invalid(&path, &claim.claim_name, "must not reference a PVC that gets created for an ephemeral volume");
        }
    }
    sound
}

/// The field of each source that a volume has, in the order in which they are looked at.
fn sources(v: &Volume) -> Vec<&'static str> {
    [
        ("emptyDir", v.empty_dir.is_some()),
        ("hostPath", v.host_path.is_some()),
        ("gitRepo", v.git_repo.is_some()),
        ("gcePersistentDisk", v.gce_persistent_disk.is_some()),
        ("awsElasticBlockStore", v.aws_elastic_block_store.is_some()),
        ("secret", v.secret.is_some()),
        ("nfs", v.nfs.is_some()),
        ("iscsi", v.iscsi.is_some()),
        ("glusterfs", v.glusterfs.is_some()),
        ("flocker", v.flocker.is_some()),
        ("persistentVolumeClaim", v.persistent_volume_claim.is_some()),
        ("rbd", v.rbd.is_some()),
        ("cinder", v.cinder.is_some()),
        ("cephFS", v.cephfs.is_some()),
        ("quobyte", v.quobyte.is_some()),
        ("downwarAPI", v.downward_api.is_some()),
        ("fc", v.fc.is_some()),
        ("flexVolume", v.flex_volume.is_some()),
        ("configMap", v.config_map.is_some()),
        ("azureFile", v.azure_file.is_some()),
        ("vsphereVolume", v.vsphere_volume.is_some()),
        ("photonPersistentDisk", v.photon_persistent_disk.is_some()),
        ("portworxVolume", v.portworx_volume.is_some()),
        ("azureDisk", v.azure_disk.is_some()),
        ("storageos", v.storageos.is_some()),
        ("projected", v.projected.is_some()),
        ("scaleIO", v.scale_io.is_some()),
        ("csi", v.csi.is_some()),
        ("ephemeral", v.ephemeral.is_some()),
        ("image", v.image.is_some()),
    ]
    .into_iter()
    .filter_map(|(field, set)| set.then_some(field))
    .collect()
}

fn source(e: &mut Errors, v: &Volume, pod_name: &str, path: &Path) {
    let sources = sources(v);
    let Some((first, more)) = sources.split_first() else {
        return e.required(path, "must specify a volume type");
    };
    if !local_source(e, v, first, path) && !config_source(e, v, first, pod_name, path) {
        network_volumes::source(e, v, first, path);
    }
    for field in more {
        e.forbidden(&path.child(field), "may not specify more than 1 volume type");
    }
}

/// Sources that need nothing but the node. False: not one of them.
fn local_source(e: &mut Errors, v: &Volume, field: &str, path: &Path) -> bool {
    match field {
        "emptyDir" => {
            let limit = v.empty_dir.as_ref().and_then(|s| s.size_limit.as_ref());
            if limit.is_some_and(|l| Quantity::of(l).is_ok_and(|q| q.sign() < 0)) {
                e.forbidden(
                    &path.child("emptyDir").child("sizeLimit"),
                    "SizeLimit field must be a valid resource quantity",
                );
            }
        }
        "hostPath" => {
            let Some(s) = &v.host_path else { return true };
            let path = path.child("hostPath");
            if s.path.is_empty() {
                e.required(&path.child("path"), "");
                return true;
            }
            paths::no_backsteps(e, &s.path, &path.child("path"));
            if let Some(kind) = &s.type_ {
                let kinds = [
                    "",
                    "BlockDevice",
                    "CharDevice",
                    "Directory",
                    "DirectoryOrCreate",
                    "File",
                    "FileOrCreate",
                    "Socket",
                ];
                e.one_of(&path.child("type"), kind, &kinds);
            }
        }
        "gitRepo" => {
            let Some(s) = &v.git_repo else { return true };
            let path = path.child("gitRepo");
            e.non_empty(&path.child("repository"), &s.repository);
            paths::descending(e, s.directory.as_deref().unwrap_or(""), &path.child("directory"));
        }
        "image" => {
            let policy = v.image.as_ref().and_then(|s| s.pull_policy.as_deref()).unwrap_or("");
            containers::pull_policy(e, policy, &path.child("image").child("pullPolicy"));
        }
        "downwarAPI" => {
            let Some(s) = &v.downward_api else { return true };
            let path = path.child("downwardAPI");
            paths::mode(e, s.default_mode, &path.child("defaultMode"));
            for file in s.items.iter().flatten() {
                downward_file(e, file, &path);
            }
        }
        "projected" => {
            let Some(s) = &v.projected else { return true };
            let path = path.child("projected");
            paths::mode(e, s.default_mode, &path.child("defaultMode"));
            projected(e, s, &path);
        }
        _ => return false,
    }
    true
}

/// Sources that are API objects, and what drivers need. False: not one of them.
fn config_source(e: &mut Errors, v: &Volume, field: &str, pod_name: &str, path: &Path) -> bool {
    let own = path.child(field);
    match field {
        "secret" => {
            let Some(s) = &v.secret else { return true };
            e.non_empty(&own.child("secretName"), s.secret_name.as_deref().unwrap_or(""));
            paths::mode(e, s.default_mode, &own.child("defaultMode"));
            key_files(e, s.items.as_deref(), &own);
        }
        "configMap" => {
            let Some(s) = &v.config_map else { return true };
            e.non_empty(&own.child("name"), &s.name);
            paths::mode(e, s.default_mode, &own.child("defaultMode"));
            key_files(e, s.items.as_deref(), &own);
        }
        "persistentVolumeClaim" => {
            let Some(s) = &v.persistent_volume_claim else { return true };
            e.non_empty(&own.child("claimName"), &s.claim_name);
        }
        "csi" => {
            let Some(s) = &v.csi else { return true };
            let driver = own.child("driver");
            if s.driver.is_empty() {
                e.required(&driver, "");
            } else {
                if s.driver.len() > 63 {
                    e.too_long(&driver, 63);
                }
                e.invalid_each(&driver, &s.driver, names::dns_subdomain(&s.driver.to_lowercase()));
            }
            match s.node_publish_secret_ref.as_ref().map(|r| r.name.as_str()) {
                Some("") => e.required(&own.child("nodePublishSecretRef").child("name"), ""),
                Some(name) => e.invalid_each(&own.child("name"), name, names::dns_subdomain(name)),
                None => {}
            }
        }
        "ephemeral" => {
            let template = v.ephemeral.as_ref().and_then(|s| s.volume_claim_template.as_ref());
            match template {
                None => e.required(&own.child("volumeClaimTemplate"), ""),
                Some(template) => claim_template(e, template, &own.child("volumeClaimTemplate")),
            }
            if !pod_name.is_empty() && !v.name.is_empty() {
                let claim = format!("{pod_name}-{}", v.name);
                for message in names::dns_subdomain(&claim) {
                    e.invalid(&path.child("name"), &v.name, &format!("PVC name {claim:?}: {message}"));
                }
            }
        }
        _ => return false,
    }
    true
}

/// The claim of an ephemeral volume, as far as it decides anything here: a static pod may have none.
fn claim_template(e: &mut Errors, t: &PersistentVolumeClaimTemplate, path: &Path) {
    if let Some(m) = &t.metadata {
        let path = path.child("metadata");
        meta::annotations(e, m.annotations.as_ref(), &path.child("annotations"));
        meta::labels(e, m.labels.as_ref(), &path.child("labels"));
        for (field, set) in
            [("name", m.name.is_some()), ("namespace", m.namespace.is_some()), ("finalizers", m.finalizers.is_some())]
        {
            if set {
                e.forbidden(&path.child(field), "cannot be set");
            }
        }
    }
    let path = path.child("spec");
    let modes = t.spec.access_modes.as_deref().unwrap_or_default();
    if modes.is_empty() {
        e.required(&path.child("accessModes"), "at least 1 access mode is required");
    }
    for mode in modes {
        e.one_of(
            &path.child("accessModes"),
            mode,
            &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"],
        );
    }
    meta::label_selector(e, t.spec.selector.as_ref(), &path.child("selector"));
    let requests = t.spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    if !requests.is_some_and(|r| r.contains_key("storage")) {
        e.required(&path.child("resources").key("storage"), "");
    }
}

fn key_files(e: &mut Errors, items: Option<&[KeyToPath]>, path: &Path) {
    for (i, item) in items.unwrap_or_default().iter().enumerate() {
        let path = path.child("items").index(i);
        e.non_empty(&path.child("key"), &item.key);
        e.non_empty(&path.child("path"), &item.path);
        paths::not_reserved(e, &item.path, &path.child("path"));
        paths::mode(e, item.mode, &path.child("mode"));
    }
}

fn downward_file(e: &mut Errors, file: &DownwardAPIVolumeFile, path: &Path) {
    e.non_empty(&path.child("path"), &file.path);
    paths::not_reserved(e, &file.path, &path.child("path"));
    match (&file.field_ref, &file.resource_field_ref) {
        (Some(field), resource) => {
            env::field_ref(e, field, &env::VOLUME_FIELDS, &path.child("fieldRef"));
            if resource.is_some() {
                e.invalid(path, "resource", "fieldRef and resourceFieldRef can not be specified simultaneously");
            }
        }
        (None, Some(resource)) => env::resource_ref(e, resource, true, &path.child("resourceFieldRef")),
        (None, None) => e.required(path, "one of fieldRef and resourceFieldRef is required"),
    }
    paths::mode(e, file.mode, &path.child("mode"));
}

/// Paths that sources of one projected volume write.
struct Taken<'a> {
    paths: std::collections::BTreeSet<String>,
    volume: &'a Path,
}

impl Taken<'_> {
    fn take(&mut self, e: &mut Errors, path: &str, value: &str) {
        if !path.is_empty() && !self.paths.insert(path.into()) {
            e.invalid(self.volume, value, "conflicting duplicate paths");
        }
    }
}

fn projected(e: &mut Errors, s: &ProjectedVolumeSource, volume: &Path) {
    let mut taken = Taken { paths: std::collections::BTreeSet::new(), volume };
    for (i, source) in s.sources.iter().flatten().enumerate() {
        let path = volume.child("sources").index(i);
        let count = projection(e, source, &mut taken, &path);
        if count > 1 {
            e.forbidden(&path, "may not specify more than 1 volume type per source");
        }
    }
}

/// How many kinds the source has.
fn projection(e: &mut Errors, s: &VolumeProjection, taken: &mut Taken<'_>, path: &Path) -> usize {
    let secret = s.secret.as_ref().map(|s| ("secret", &s.name, s.items.as_deref()));
    let config = s.config_map.as_ref().map(|s| ("configMap", &s.name, s.items.as_deref()));
    let mut count = 0;
    for (field, name, items) in [secret, config].into_iter().flatten() {
        count += 1;
        let path = path.child(field);
        e.non_empty(&path.child("name"), name);
        key_files(e, items, &path);
        for item in items.unwrap_or_default() {
            taken.take(e, &item.path, name);
        }
    }
    if let Some(downward) = &s.downward_api {
        count += 1;
        for file in downward.items.iter().flatten() {
            downward_file(e, file, &path.child("downwardAPI"));
            taken.take(e, &file.path, &file.path);
        }
    }
    if let Some(token) = &s.service_account_token {
        count += 1;
        let expiry = path.child("serviceAccountToken").child("expirationSeconds");
        let seconds = token.expiration_seconds.unwrap_or(0);
        if seconds < 600 {
            e.invalid(&expiry, seconds, "may not specify a duration less than 10 minutes");
        }
        if seconds > 1 << 32 {
            e.invalid(&expiry, seconds, "may not specify a duration larger than 2^32 seconds");
        }
        e.non_empty(&taken.volume.child("path"), &token.path);
        paths::not_reserved(e, &token.path, &taken.volume.child("path"));
    }
    if let Some(bundle) = &s.cluster_trust_bundle {
        count += 1;
        let path = path.child("clusterTrustBundle");
        match (&bundle.name, &bundle.signer_name) {
            (Some(_), Some(_)) => e.invalid(
                &path,
                Internal("core.ClusterTrustBundleProjection", bundle),
                "only one of name and signerName may be used",
            ),
            (None, None) => e.required(&path, "either name or signerName must be specified"),
            (Some(name), None) if name.is_empty() => e.required(&path.child("name"), "must be a valid object name"),
            (None, Some(signer)) if signer.is_empty() => {
                e.required(&path.child("signerName"), "must be a valid signer name")
            }
            _ => {}
        }
        e.non_empty(&path.child("path"), &bundle.path);
        paths::not_reserved(e, &bundle.path, &path.child("path"));
        taken.take(e, &bundle.path, &bundle.path);
    }
    if let Some(certificate) = &s.pod_certificate {
        count += 1;
        pod_certificate(e, certificate, taken, &path.child("podCertificate"));
    }
    count
}

fn pod_certificate(e: &mut Errors, c: &PodCertificateProjection, taken: &mut Taken<'_>, path: &Path) {
    e.non_empty(&path.child("signerName"), &c.signer_name);
    e.one_of(
        &path.child("keyType"),
        &c.key_type,
        &["RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"],
    );
    if let Some(seconds) = c.max_expiration_seconds.filter(|s| *s < 3600) {
        e.invalid(&path.child("maxExpirationSeconds"), seconds, "if provided, maxExpirationSeconds must be >= 3600");
    }
    let mut any = false;
    for (field, value) in [
        ("credentialBundlePath", &c.credential_bundle_path),
        ("keyPath", &c.key_path),
        ("certificateChainPath", &c.certificate_chain_path),
    ] {
        let value = value.as_deref().unwrap_or("");
        any |= !value.is_empty();
        paths::not_reserved(e, value, &path.child(field));
        taken.take(e, value, value);
    }
    if !any {
        e.required(path, "specify at least one of credentialBundlePath, keyPath, and certificateChainPath");
    }
}
