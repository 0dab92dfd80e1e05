//! Security contexts of pods and containers, and rules of the operating system.

use std::collections::BTreeMap;

use model::api::{
    AppArmorProfile, Container, PodSecurityContext, PodSpec, SeccompProfile, SecurityContext,
    WindowsSecurityContextOptions,
};

use super::field::{Errors, Internal, Path};
use super::{At, names, paths};

/// `spec.securityContext` with the host fields beside it.
pub(crate) fn pod(e: &mut Errors, spec: &PodSpec, path: &Path) {
    let Some(sc) = &spec.security_context else { return };
    ids(e, [("fsGroup", sc.fs_group), ("runAsUser", sc.run_as_user), ("runAsGroup", sc.run_as_group)], path);
    for (i, id) in sc.supplemental_groups.iter().flatten().enumerate() {
        for message in names::unix_id(*id) {
            e.invalid(&path.child("supplementalGroups").index(i), *id, &message);
        }
    }
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        e.invalid(
            &path.child("shareProcessNamespace"),
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    sysctls(e, spec, sc, &path.child("sysctls"));
    if let Some(policy) = &sc.fs_group_change_policy {
        e.one_of(&path.child("fsGroupChangePolicy"), policy, &["Always", "OnRootMismatch"]);
    }
    seccomp(e, sc.seccomp_profile.as_ref(), &path.child("seccompProfile"));
    windows_options(e, sc.windows_options.as_ref(), &path.child("windowsOptions"));
    app_armor(e, sc.app_armor_profile.as_ref(), &path.child("appArmorProfile"));
    if let Some(policy) = &sc.supplemental_groups_policy {
        e.one_of(&path.child("supplementalGroupsPolicy"), policy, &["Merge", "Strict"]);
    }
    if let Some(policy) = &sc.se_linux_change_policy {
        e.one_of(&path.child("seLinuxChangePolicy"), policy, &["Recursive"]);
    }
}

fn ids<const N: usize>(e: &mut Errors, fields: [(&str, Option<i64>); N], path: &Path) {
    for (field, id) in fields {
        for message in id.into_iter().flat_map(names::unix_id) {
            e.invalid(&path.child(field), id.unwrap_or_default(), &message);
        }
    }
}

fn sysctls(e: &mut Errors, spec: &PodSpec, sc: &PodSecurityContext, path: &Path) {
    let list = sc.sysctls.as_deref().unwrap_or_default();
    for (i, sysctl) in list.iter().enumerate() {
        let (path, name) = (path.index(i).child("name"), sysctl.name.as_str());
        if name.is_empty() {
            e.required(&path, "");
        } else if !names::is_sysctl(name) {
            const PART: &str = "[a-z0-9]([-_a-z0-9]*[a-z0-9])?";
            e.invalid(
                &path,
                name,
                &format!("must have at most 253 characters and match regex ^({PART}[\\./])*{PART}$"),
            );
        } else if list[..i].iter().any(|s| s.name == name) {
            e.duplicate(&path, name);
        }
        match sysctl_namespace(name) {
            Some("net") if spec.host_network == Some(true) => {
                e.invalid(&path, name, "may not be specified when 'hostNetwork' is true");
            }
            Some("ipc") if spec.host_ipc == Some(true) => {
                e.invalid(&path, name, "may not be specified when 'hostIPC' is true")
            }
            _ => {}
        }
    }
}

/// The kernel namespace that a sysctl belongs to, if any.
fn sysctl_namespace(name: &str) -> Option<&'static str> {
    let slashed = name.find(['.', '/']).is_some_and(|i| name.as_bytes()[i] == b'/');
    let name = if slashed { name.replace('/', ".") } else { name.to_string() };
    const IPC: [&str; 10] = [
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
        "kernel.shm",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.msg",
    ];
    if IPC.contains(&name.as_str()) || name.starts_with("fs.mqueue.") {
        return Some("ipc");
    }
    name.starts_with("net.").then_some("net")
}

/// A container's security context.
pub(crate) fn container(e: &mut Errors, sc: Option<&SecurityContext>, host_users: bool, path: &Path) {
    let Some(sc) = sc else { return };
    ids(e, [("runAsUser", sc.run_as_user), ("runAsGroup", sc.run_as_group)], path);
    if let Some(mount) = &sc.proc_mount {
        let path = path.child("procMount");
        e.one_of(&path, mount, &["Default", "Unmasked"]);
        if host_users && mount == "Unmasked" {
            e.invalid(&path, mount, "`hostUsers` must be false to use `Unmasked`");
        }
    }
    seccomp(e, sc.seccomp_profile.as_ref(), &path.child("seccompProfile"));
    if sc.allow_privilege_escalation == Some(false) {
        if sc.privileged == Some(true) {
            e.invalid(
                path,
                Internal("core.SecurityContext", sc),
                "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            );
        }
        let added = sc.capabilities.as_ref().and_then(|c| c.add.as_deref()).unwrap_or_default();
        for _ in added.iter().filter(|c| *c == "CAP_SYS_ADMIN") {
            e.invalid(
                path,
                Internal("core.SecurityContext", sc),
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN",
            );
        }
    }
    windows_options(e, sc.windows_options.as_ref(), &path.child("windowsOptions"));
    app_armor(e, sc.app_armor_profile.as_ref(), &path.child("appArmorProfile"));
}

fn seccomp(e: &mut Errors, profile: Option<&SeccompProfile>, path: &Path) {
    let Some(p) = profile else { return };
    let file = path.child("localhostProfile");
    match p.type_.as_str() {
        "" => e.required(&path.child("type"), "type is required when seccompProfile is set"),
        kind => e.one_of(&path.child("type"), kind, &["Localhost", "RuntimeDefault", "Unconfined"]),
    }
    match (&p.localhost_profile, p.type_ == "Localhost") {
        (None, true) => e.required(&file, "must be set when seccomp type is Localhost"),
        (Some(name), true) => paths::descending(e, name, &file),
        (Some(_), false) => {
            e.invalid(&file, Internal("core.SeccompProfile", p), "can only be set when seccomp type is Localhost")
        }
        (None, false) => {}
    }
}

/// A seccomp profile in an annotation.
pub(crate) fn seccomp_name(e: &mut Errors, profile: &str, path: &Path) {
    match profile {
        "runtime/default" | "docker/default" | "unconfined" => {}
        p => match p.strip_prefix("localhost/") {
            Some(file) => paths::descending(e, file, path),
            None => e.invalid(path, p, "must be a valid seccomp profile"),
        },
    }
}

fn app_armor(e: &mut Errors, profile: Option<&AppArmorProfile>, path: &Path) {
    let Some(p) = profile else { return };
    let file = path.child("localhostProfile");
    match (p.type_.as_str(), &p.localhost_profile) {
        ("Localhost", None) => e.required(&file, "must be set when AppArmor type is Localhost"),
        ("Localhost", Some(name)) => {
            if name.trim() != name {
                e.invalid(&file, name, "must not be padded with whitespace");
            } else if name.is_empty() {
                e.required(&file, "must be set when AppArmor type is Localhost");
            }
            if name.len() > 4095 {
                e.too_long(&file, 4095);
            }
        }
        ("RuntimeDefault" | "Unconfined", Some(name)) => {
            e.invalid(&file, name, "can only be set when AppArmor type is Localhost")
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("", _) => e.required(&path.child("type"), "type is required when appArmorProfile is set"),
        (kind, _) => e.not_supported(&path.child("type"), kind, &["Localhost", "RuntimeDefault", "Unconfined"]),
    }
}

/// Options of a Windows pod. They never run here; the checks are those that also refuse a Linux pod which has them.
fn windows_options(e: &mut Errors, options: Option<&WindowsSecurityContextOptions>, path: &Path) {
    let Some(o) = options else { return };
    if let Some(name) = &o.gmsa_credential_spec_name {
        e.invalid_each(&path.child("gmsaCredentialSpecName"), name, names::dns_subdomain(name));
    }
    if let Some(credential) = &o.gmsa_credential_spec {
        let path = path.child("gmsaCredentialSpec");
        if credential.is_empty() {
            e.invalid(&path, credential, "gmsaCredentialSpec cannot be an empty string");
        } else if credential.len() > 64 << 10 {
            e.invalid(&path, credential, "gmsaCredentialSpec size must be under 64 KiB");
        }
    }
    if let Some(user) = &o.run_as_user_name {
        let path = path.child("runAsUserName");
        if user.is_empty() {
            e.invalid(&path, user, "runAsUserName cannot be an empty string");
        } else if user.chars().any(|c| c.is_ascii_control()) {
            e.invalid(&path, user, "runAsUserName cannot contain control characters");
        } else if user.matches('\\').count() > 1 {
            e.invalid(&path, user, "runAsUserName cannot contain more than one backslash");
        }
    }
}

/// Every container's `hostProcess` agrees with the pod's, and a pod has either none or only such containers.
pub(crate) fn host_process(e: &mut Errors, spec: &PodSpec, containers: &[At<'_>], path: &Path) {
    let of = |o: Option<&WindowsSecurityContextOptions>| o.and_then(|o| o.host_process);
    let pod = of(spec.security_context.as_ref().and_then(|s| s.windows_options.as_ref()));
    let mut count = 0;
    for At { container: c, path } in containers {
        let own = of(c.security_context.as_ref().and_then(|s| s.windows_options.as_ref()));
        if let (Some(pod), Some(own)) = (pod, own)
            && pod != own
        {
            let path = path.child("securityContext").child("windowsOptions").child("hostProcess");
            e.invalid(&path, own, &format!("pod hostProcess value must be identical if both are specified, was {pod}"));
        }
        count += usize::from(own.or(pod) == Some(true));
    }
    if count > 0 {
        if count != containers.len() {
            e.invalid(
                path,
                "",
                "If pod contains any hostProcess containers then all containers must be HostProcess containers",
            );
        }
        if spec.host_network != Some(true) {
            e.invalid(
                &path.child("hostNetwork"),
                false,
                "hostNetwork must be true if pod contains any hostProcess containers",
            );
        }
    }
}

/// What a pod may not set beside `hostUsers: false` (KEP-127).
pub(crate) fn host_users(e: &mut Errors, spec: &PodSpec, containers: &[At<'_>], path: &Path) {
    if spec.host_users != Some(false) {
        return;
    }
    for (field, set) in [("hostNetwork", spec.host_network), ("HostPID", spec.host_pid), ("HostIPC", spec.host_ipc)] {
        if set == Some(true) {
            e.forbidden(&path.child(field), "when `hostUsers` is false");
        }
    }
    for At { container, path } in containers {
        if container.volume_devices.as_ref().is_some_and(|d| !d.is_empty()) {
            e.forbidden(&path.child("volumeDevices"), "when `hostUsers` is false");
        }
    }
}

/// Fields that the pod's operating system does not have.
pub(crate) fn operating_system(e: &mut Errors, spec: &PodSpec, containers: &[At<'_>], path: &Path) {
    let Some(os) = &spec.os else { return };
    match os.name.as_str() {
        "" => e.required(&path.child("os").child("name"), ""),
        "linux" => linux(e, spec, containers, path),
        "windows" => windows(e, spec, containers, path),
        other => e.not_supported(&path.child("os"), other, &["linux", "windows"]),
    }
}

fn linux(e: &mut Errors, spec: &PodSpec, containers: &[At<'_>], path: &Path) {
    const DETAIL: &str = "windows options cannot be set for a linux pod";
    if spec.security_context.as_ref().is_some_and(|s| s.windows_options.is_some()) {
        e.forbidden(&path.child("securityContext").child("windowsOptions"), DETAIL);
    }
    for At { container, path } in containers {
        if container.security_context.as_ref().is_some_and(|s| s.windows_options.is_some()) {
            e.forbidden(&path.child("securityContext").child("windowsOptions"), DETAIL);
        }
    }
}

fn windows(e: &mut Errors, spec: &PodSpec, containers: &[At<'_>], path: &Path) {
    const DETAIL: &str = "cannot be set for a windows pod";
    let context = path.child("securityContext");
    if let Some(sc) = &spec.security_context {
        let set = [
            (&context, "appArmorProfile", sc.app_armor_profile.is_some()),
            (&context, "seLinuxOptions", sc.se_linux_options.is_some()),
            (path, "hostUsers", spec.host_users.is_some()),
            (path, "hostPID", spec.host_pid == Some(true)),
            (path, "hostIPC", spec.host_ipc == Some(true)),
            (&context, "seccompProfile", sc.seccomp_profile.is_some()),
            (&context, "fsGroup", sc.fs_group.is_some()),
            (&context, "fsGroupChangePolicy", sc.fs_group_change_policy.is_some()),
            (&context, "sysctls", sc.sysctls.as_ref().is_some_and(|s| !s.is_empty())),
            (path, "shareProcessNamespace", spec.share_process_namespace.is_some()),
            (&context, "runAsUser", sc.run_as_user.is_some()),
            (&context, "runAsGroup", sc.run_as_group.is_some()),
            (&context, "supplementalGroups", sc.supplemental_groups.is_some()),
            (&context, "supplementalGroupsPolicy", sc.supplemental_groups_policy.is_some()),
            (&context, "seLinuxChangePolicy", sc.se_linux_change_policy.is_some()),
        ];
        for (of, field, _) in set.into_iter().filter(|s| s.2) {
            e.forbidden(&of.child(field), DETAIL);
        }
    }
    for At { container, path } in containers {
        let Some(sc) = &container.security_context else { continue };
        let path = path.child("securityContext");
        let set = [
            ("appArmorProfile", sc.app_armor_profile.is_some()),
            ("seLinuxOptions", sc.se_linux_options.is_some()),
            ("seccompProfile", sc.seccomp_profile.is_some()),
            ("capabilities", sc.capabilities.is_some()),
            ("readOnlyRootFilesystem", sc.read_only_root_filesystem.is_some()),
            ("privileged", sc.privileged.is_some()),
            ("allowPrivilegeEscalation", sc.allow_privilege_escalation.is_some()),
            ("procMount", sc.proc_mount.is_some()),
            ("runAsUser", sc.run_as_user.is_some()),
            ("runAsGroup", sc.run_as_group.is_some()),
        ];
        for (field, _) in set.into_iter().filter(|s| s.1) {
            e.forbidden(&path.child(field), DETAIL);
        }
    }
}

/// Profiles in annotations say the same as those in fields.
pub(crate) fn annotations_match(
    e: &mut Errors,
    notes: &BTreeMap<String, String>,
    spec: &PodSpec,
    containers: &[At<'_>],
    path: &Path,
) {
    let pod = spec.security_context.as_ref();
    if let (Some(note), Some(profile)) =
        (notes.get("seccomp.security.alpha.kubernetes.io/pod"), pod.and_then(|s| s.seccomp_profile.as_ref()))
    {
        let kinds = ["runtime/default", "docker/default"];
        same(
            e,
            note,
            &profile.type_,
            profile.localhost_profile.as_deref(),
            &kinds,
            "seccomp",
            &path.child("securityContext").child("seccompProfile"),
        );
    }
    let of = |c: &Container, prefix: &str| notes.get(&format!("{prefix}{}", c.name));
    for At { container: c, path } in containers {
        let profile = c.security_context.as_ref().and_then(|s| s.seccomp_profile.as_ref());
        if let (Some(note), Some(p)) = (of(c, "container.seccomp.security.alpha.kubernetes.io/"), profile) {
            let path = path.child("securityContext").child("seccompProfile");
            same(
                e,
                note,
                &p.type_,
                p.localhost_profile.as_deref(),
                &["runtime/default", "docker/default"],
                "seccomp",
                &path,
            );
        }
    }
    if spec.os.as_ref().is_some_and(|os| os.name == "windows") {
        return;
    }
    for At { container: c, path } in containers {
        let own = c.security_context.as_ref().and_then(|s| s.app_armor_profile.as_ref());
        let profile = own.or_else(|| pod.and_then(|s| s.app_armor_profile.as_ref()));
        if let (Some(note), Some(p)) = (of(c, "container.apparmor.security.beta.kubernetes.io/"), profile) {
            let path = path.child("securityContext").child("appArmorProfile");
            same(e, note, &p.type_, p.localhost_profile.as_deref(), &["runtime/default"], "apparmor", &path);
        }
    }
}

fn same(e: &mut Errors, note: &str, kind: &str, file: Option<&str>, defaults: &[&str], what: &str, path: &Path) {
    let fits = match kind {
        "Unconfined" => note == "unconfined",
        "RuntimeDefault" => defaults.contains(&note),
        "Localhost" => match note.strip_prefix("localhost/") {
            Some(name) if Some(name) != file => {
                return e.forbidden(
                    &path.child("localhostProfile"),
                    &format!("{what} profile in annotation and field must match"),
                );
            }
            name => name.is_some(),
        },
        _ => true,
    };
    if !fits {
        e.forbidden(&path.child("type"), &format!("{what} type in annotation and field must match"));
    }
}
