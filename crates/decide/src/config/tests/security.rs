//! Security contexts of containers.

use cri_api::v1;
use cri_api::v1::security_profile::ProfileType;

use super::*;

fn context(p: &DesiredPod, f: &ContainerFacts<'_>) -> Result<v1::LinuxContainerSecurityContext, String> {
    let got = request(p, f).map_err(|e| e.message)?;
    Ok(got.linux.expect("linux").security_context.expect("context"))
}

#[test]
fn defaults() {
    let node = node();
    let got = context(&one("", ""), &facts(&node)).expect("context");
    let want = v1::LinuxContainerSecurityContext {
        namespace_options: Some(v1::NamespaceOption {
            pid: v1::NamespaceMode::Container as i32,
            userns_options: Some(v1::UserNamespace { mode: v1::NamespaceMode::Node as i32, ..Default::default() }),
            ..Default::default()
        }),
        run_as_user: Some(v1::Int64Value { value: 0 }),
        masked_paths: strings(&[
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
            "/sys/devices/system/cpu/cpu0/thermal_throttle",
        ]),
        readonly_paths: strings(&["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]),
        seccomp: Some(v1::SecurityProfile {
            profile_type: ProfileType::Unconfined as i32,
            localhost_ref: String::new(),
        }),
        ..Default::default()
    };
    assert_eq!(got, want);
}

#[test]
fn container_over_pod() {
    let node = node();
    let mut f = facts(&node);
    f.volume_gids = vec![4000];
    let of_pod = r#""securityContext": {"runAsUser": 1000, "runAsGroup": 1001, "fsGroup": 2000, "supplementalGroups": [3000, 3001],
        "supplementalGroupsPolicy": "Merge", "seLinuxOptions": {"type": "pod_t"}, "seccompProfile": {"type": "RuntimeDefault"},
        "appArmorProfile": {"type": "RuntimeDefault"}}"#;
    let pod_only = context(&one("", of_pod), &f).expect("context");
    assert_eq!(pod_only.run_as_user, Some(v1::Int64Value { value: 1000 }));
    assert_eq!(pod_only.run_as_group, Some(v1::Int64Value { value: 1001 }));
    assert_eq!(pod_only.supplemental_groups, [2000, 3000, 3001, 4000]);
    assert_eq!(pod_only.selinux_options.expect("selinux").r#type, "pod_t");
    assert_eq!(pod_only.seccomp, Some(v1::SecurityProfile::default()));
    assert_eq!(pod_only.apparmor, Some(v1::SecurityProfile::default()));

    let own = r#""securityContext": {"runAsUser": 7, "runAsGroup": 8, "privileged": true, "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false, "procMount": "Unmasked", "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]},
        "seLinuxOptions": {"user": "u", "role": "r", "type": "t", "level": "l"},
        "seccompProfile": {"type": "Localhost", "localhostProfile": "p/x.json"},
        "appArmorProfile": {"type": "Localhost", "localhostProfile": "mine"}}"#;
    #[allow(deprecated)]
    let want = v1::LinuxContainerSecurityContext {
        capabilities: Some(v1::Capability {
            add_capabilities: strings(&["NET_ADMIN"]),
            drop_capabilities: strings(&["ALL"]),
            ..Default::default()
        }),
        privileged: true,
        namespace_options: pod_only.namespace_options,
        selinux_options: Some(v1::SeLinuxOption {
            user: "u".into(),
            role: "r".into(),
            r#type: "t".into(),
            level: "l".into(),
        }),
        run_as_user: Some(v1::Int64Value { value: 7 }),
        run_as_group: Some(v1::Int64Value { value: 8 }),
        readonly_rootfs: true,
        supplemental_groups: vec![2000, 3000, 3001, 4000],
        no_new_privs: true,
        seccomp: Some(v1::SecurityProfile {
            profile_type: ProfileType::Localhost as i32,
            localhost_ref: "/var/lib/kubelet/seccomp/p/x.json".into(),
        }),
        apparmor: Some(v1::SecurityProfile {
            profile_type: ProfileType::Localhost as i32,
            localhost_ref: "mine".into(),
        }),
        apparmor_profile: "localhost/mine".into(),
        ..Default::default()
    };
    assert_eq!(context(&one(own, of_pod), &f), Ok(want));
}

#[test]
fn profiles() {
    let mut node = node();
    node.seccomp_default = true;
    let seccomp = |own: &str| context(&one(own, ""), &facts(&node)).map(|c| c.seccomp.expect("seccomp").profile_type);
    let wanted = |profile: &str| seccomp(&format!(r#""securityContext": {{"seccompProfile": {profile}}}"#));
    assert_eq!(seccomp(""), Ok(ProfileType::RuntimeDefault as i32));
    assert_eq!(wanted(r#"{"type": "Unconfined"}"#), Ok(ProfileType::Unconfined as i32));
    assert_eq!(
        wanted(r#"{"type": "Localhost"}"#),
        Err("localhostProfile must be set if seccompProfile type is Localhost.".into())
    );

    let annotated = |value: &str| {
        let meta = format!(r#"{{"annotations": {{"container.apparmor.security.beta.kubernetes.io/a": "{value}"}}}}"#);
        let of_pod = r#""securityContext": {"appArmorProfile": {"type": "Unconfined"}}"#;
        #[allow(deprecated)]
        context(&pod_with(&meta, &one_spec("", of_pod)), &facts(&node)).map(|c| c.apparmor_profile)
    };
    assert_eq!(annotated("runtime/default").as_deref(), Ok("runtime/default"));
    assert_eq!(annotated("localhost/x").as_deref(), Ok("localhost/x"));
    assert_eq!(annotated("nonsense").as_deref(), Ok("unconfined"));
    let apparmor = |profile: &str| {
        let own = format!(r#""securityContext": {{"appArmorProfile": {profile}}}"#);
        context(&one(&own, ""), &facts(&node)).expect_err("fault")
    };
    assert_eq!(apparmor(r#"{"type": "Localhost"}"#), "missing localhost apparmor profile name");
    assert_eq!(apparmor(r#"{"type": "X"}"#), "unknown apparmor profile type: \"X\"");
}

#[test]
fn run_as_non_root() {
    let node = node();
    let check = |own: &str, of_pod: &str, user: ImageUser| {
        let mut f = facts(&node);
        f.image = Some(ResolvedImage { reference: "r".into(), user });
        let p = one(&format!(r#""securityContext": {{{own}}}"#), &format!(r#""securityContext": {{{of_pod}}}"#));
        context(&p, &f).map(|c| (c.run_as_user.map(|u| u.value), c.run_as_username))
    };
    let place = r#"(pod: "web_ns(uid-1)", container: a)"#;
    let root = ImageUser::Uid(0);
    let name = ImageUser::Name("www".into());
    let non_root = r#""runAsNonRoot": true"#;
    assert_eq!(check("", "", root.clone()), Ok((Some(0), String::new())));
    assert_eq!(check("", "", name.clone()), Ok((None, "www".into())));
    assert_eq!(
        check(non_root, "", root.clone()),
        Err(format!("container has runAsNonRoot and image will run as root {place}"))
    );
    assert_eq!(
        check("", non_root, name.clone()),
        Err(format!(
            "container has runAsNonRoot and image has non-numeric user (www), cannot verify user is non-root {place}"
        ))
    );
    assert_eq!(
        check(r#""runAsUser": 0"#, non_root, ImageUser::Uid(5)),
        Err(format!("container's runAsUser breaks non-root policy {place}"))
    );
    assert_eq!(
        check(non_root, "", ImageUser::Uid(-1)),
        Err(format!(
            "container has runAsNonRoot and image has an invalid user id (-1). (Must be 1-(2147483647)): must be between 0 and 2147483647, \
             inclusive {place}"
        ))
    );
    assert_eq!(check(non_root, "", ImageUser::Uid(5)), Ok((Some(5), String::new())));
    assert_eq!(check(r#""runAsUser": 9"#, non_root, name), Ok((Some(9), String::new())));
    assert_eq!(check(r#""runAsNonRoot": false"#, non_root, root), Ok((Some(0), String::new())));

    let image = |uid: Option<i64>, username: &str| {
        let uid = uid.map(|value| v1::Int64Value { value });
        ImageUser::of(&v1::Image { uid, username: username.into(), ..Default::default() })
    };
    assert_eq!(image(Some(3), "x"), ImageUser::Uid(3));
    assert_eq!(image(None, "x"), ImageUser::Name("x".into()));
    assert_eq!(image(None, ""), ImageUser::Uid(0));
}

#[test]
fn ephemeral_target_and_user_namespace() {
    let node = node();
    let spec = |rest: &str| {
        format!(
            r#"{{"enableServiceLinks": true, "containers": [{{"name": "app"}}],
                "ephemeralContainers": [{{"name": "a", "targetContainerName": "app"}}]{rest}}}"#
        )
    };
    let mut f = facts(&node);
    assert_eq!(context(&pod(&spec("")), &f), Err("unable to find target container app".into()));
    f.target_id = Some("id-app".into());
    let options = context(&pod(&spec("")), &f).expect("context").namespace_options.expect("namespaces");
    assert_eq!((options.pid, options.target_id.as_str()), (v1::NamespaceMode::Target as i32, "id-app"));
    let shared = context(&pod(&spec(r#", "shareProcessNamespace": true"#)), &f).expect("context");
    assert_eq!(shared.namespace_options.expect("namespaces").pid, v1::NamespaceMode::Pod as i32);

    let ids = vec![v1::IdMapping { host_id: 131_072, container_id: 0, length: 65_536 }];
    f.user_namespace = UserNamespaceFacts { supported: true, handler: String::new(), mappings: Some(ids.clone()) };
    let got = request(&one("", r#""hostUsers": false"#), &f).expect("request");
    assert!(got.mounts.iter().all(|m| m.uid_mappings == ids && m.gid_mappings == ids) && !got.mounts.is_empty());
}
