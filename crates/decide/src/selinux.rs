//! SELinux labels as mount options: a volume that is mounted with its label need not be relabelled file by file (KEP-1710).
//!
//! The label of files is that of the process with the role and type that the policy's `lxc_contexts` has for files, as the runtimes make it
//! (github.com/opencontainers/selinux). A label whose level is not given is the runtime's own choice, and so cannot be mounted with.

use std::collections::BTreeSet;

use model::api::SELinuxOptions;
use model::pod::{DesiredPod, PodUid};

/// The label for files of containers out of the policy's `lxc_contexts`: the value of `file`.
pub fn file_context(lxc_contexts: &str) -> Option<String> {
    let lines = lxc_contexts.lines().map(str::trim).filter(|l| !l.starts_with(['#', ';']));
    let value = lines.filter_map(|l| l.split_once('=')).rfind(|(key, _)| key.trim() == "file")?.1;
    let label = value.trim().trim_matches('"');
    (label.split(':').count() >= 3).then(|| label.to_owned())
}

/// The label that files need for a process of these options; None: it is the runtime's to choose.
fn file_label(context: &str, options: &SELinuxOptions) -> Option<String> {
    let given = |field: &Option<String>| field.clone().filter(|f| !f.is_empty());
    let level = given(&options.level)?;
    let mut parts = context.splitn(4, ':');
    let (user, role, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let user = given(&options.user).unwrap_or_else(|| user.to_owned());
    Some(format!("{user}:{role}:{kind}:{level}"))
}

/// The labels that the pod's containers want of one of its volumes; more than one cannot be mounted with. None of them: it is mounted without.
///
/// `context`: see [`file_context`].
pub fn volume_labels(pod: &DesiredPod, volume: &str, context: &str) -> BTreeSet<String> {
    let of_pod = pod.spec().security_context.as_ref();
    if of_pod.and_then(|c| c.se_linux_change_policy.as_deref()) == Some("Recursive") {
        return BTreeSet::new();
    }
    let users = pod.containers().filter(|c| c.spec.volume_mounts.iter().flatten().any(|m| m.name == volume));
    let options = users.filter_map(|c| {
        let own = c.spec.security_context.as_ref().and_then(|s| s.se_linux_options.as_ref());
        own.or_else(|| of_pod?.se_linux_options.as_ref()).filter(|o| **o != SELinuxOptions::default())
    });
    let labels: Option<BTreeSet<String>> = options.map(|o| file_label(context, o)).collect();
    labels.unwrap_or_default()
}

/// The label that a pod's containers want of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted<L> {
    /// Its driver takes no labels.
    #[default]
    Untaken,
    /// They want different ones.
    Several,
    /// All the same, or none at all.
    One(Option<L>),
}

impl Wanted<&str> {
    /// A copy that lives for itself.
    pub fn to_owned(self) -> Wanted<String> {
        match self {
            Self::Untaken => Wanted::Untaken,
            Self::Several => Wanted::Several,
            Self::One(label) => Wanted::One(label.map(str::to_owned)),
        }
    }
}

/// What is counted of labels: the Go kubelet's `volume_manager_selinux_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// A volume whose label is clear.
    Admitted,
    /// A pod's containers want different labels of one volume.
    PodMismatch {
        /// It was refused; else it would be, were all access modes mounted with labels.
        refused: bool,
    },
    /// A pod wants another label than the one that the volume has for other pods.
    VolumeMismatch {
        /// See [`Counted::PodMismatch`].
        refused: bool,
    },
}

/// The labels that one volume is used with, for counting; None: of no pod yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    pods: BTreeSet<PodUid>,
    label: Option<String>,
}

impl Uses {
    /// A pod has the volume; what is to be counted for that. Each pod counts once.
    pub fn begin(&mut self, uid: &PodUid, wanted: &Wanted<String>) -> Option<Counted> {
        let first = self.pods.is_empty();
        if !self.pods.insert(uid.clone()) {
            return None;
        }
        match wanted {
            Wanted::Untaken => None,
            Wanted::Several => Some(Counted::PodMismatch { refused: false }),
            Wanted::One(label) if first => {
                self.label.clone_from(label);
                label.as_ref().map(|_| Counted::Admitted)
            }
            Wanted::One(label) => (*label != self.label).then_some(Counted::VolumeMismatch { refused: false }),
        }
    }

    /// The pod has it no longer.
    pub fn end(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
        if self.pods.is_empty() {
            self.label = None;
        }
    }
}

/// The widest of a volume's access modes, as labels of metrics have it.
pub fn access_mode(modes: &[String]) -> &'static str {
    let has = |mode: &str| modes.iter().any(|m| m == mode);
    match () {
        () if modes.is_empty() => "inline",
        () if has("ReadWriteMany") => "RWX",
        () if has("ReadOnlyMany") => "ROX",
        () if has("ReadWriteOnce") => "RWO",
        () if has("ReadWriteOncePod") => "RWOP",
        () => "",
    }
}

/// True when a volume of these access modes may be mounted with a label; one that is written in a pod has none, and may not. `all_modes`:
/// gate SELinuxMount.
pub fn may_have_label(access_modes: &[String], all_modes: bool) -> bool {
    !access_modes.is_empty() && (all_modes || access_modes == ["ReadWriteOncePod"])
}

/// The mount option for a label. In quotes, for it may have commas.
pub fn mount_option(label: &str) -> String {
    format!("context=\"{label}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pod;

    /// As Fedora's `container-selinux` has it.
    const CONTEXTS: &str = "process = \"system_u:system_r:container_t:s0\"\ncontent = \"system_u:object_r:virt_var_lib_t:s0\"\n\
        # file = \"no\"\nfile = \"system_u:object_r:container_file_t:s0\"\nro_file=\"system_u:object_r:container_ro_file_t:s0\"\n";

    #[test]
    fn contexts() {
        assert_eq!(file_context(CONTEXTS).as_deref(), Some("system_u:object_r:container_file_t:s0"));
        assert_eq!(file_context("process = \"x\"\n"), None);
        assert_eq!(file_context("file = \"nonsense\"\n"), None);
    }

    #[test]
    fn labels() {
        let context = file_context(CONTEXTS).unwrap();
        let of = |json: &str| -> Vec<String> { volume_labels(&pod(json), "v", &context).into_iter().collect() };
        let own = |options: &str| {
            format!(
                r#"{{"name":"a","volumeMounts":[{{"name":"v","mountPath":"/v"}}],"securityContext":{{"seLinuxOptions":{options}}}}}"#
            )
        };
        let plain = r#"{"name":"b","volumeMounts":[{"name":"v","mountPath":"/v"}]}"#;
        let with = |pod: &str, containers: &[&str]| {
            format!(r#"{{"securityContext":{pod},"containers":[{}]}}"#, containers.join(","))
        };
        let level = r#"{"level":"s0:c1,c2"}"#;
        let (one, two) = ("system_u:object_r:container_file_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c3,c4");
        let of_pod = format!(r#"{{"seLinuxOptions":{level}}}"#);
        let recursive = format!(r#"{{"seLinuxOptions":{level},"seLinuxChangePolicy":"Recursive"}}"#);
        let other = r#"{"name":"c","volumeMounts":[{"name":"w","mountPath":"/w"}],"securityContext":{"seLinuxOptions":{"level":"s0:c3,c4"}}}"#;
        for (what, json, want) in [
            ("nobody asks", with("{}", &[plain]), vec![]),
            ("the pod's", with(&of_pod, &[plain]), vec![one]),
            ("both the same", with(&of_pod, &[plain, &own(level)]), vec![one]),
            ("one's own", with(&of_pod, &[plain, &own(r#"{"level":"s0:c3,c4"}"#)]), vec![one, two]),
            ("one that does not use it", with(&of_pod, &[plain, other]), vec![one]),
            ("recursive", with(&recursive, &[plain]), vec![]),
            ("no level", with("{}", &[&own(r#"{"type":"spc_t"}"#)]), vec![]),
            ("nothing in it", with("{}", &[&own("{}")]), vec![]),
            (
                "user; the type is the process's alone",
                with("{}", &[&own(r#"{"user":"u","role":"r","type":"t","level":"s0"}"#)]),
                vec!["u:object_r:container_file_t:s0"],
            ),
        ] {
            assert_eq!(of(&json), want, "{what}");
        }
    }

    #[test]
    fn what_is_counted() {
        let (one, two, three) = (PodUid::new("1"), PodUid::new("2"), PodUid::new("3"));
        let label = |l: &str| Wanted::One(Some(l.to_owned()));
        let mut uses = Uses::default();
        assert_eq!(uses.begin(&one, &label("a")), Some(Counted::Admitted));
        assert_eq!(uses.begin(&one, &label("a")), None, "each pod once");
        assert_eq!(uses.begin(&two, &label("a")), None);
        assert_eq!(uses.begin(&three, &label("b")), Some(Counted::VolumeMismatch { refused: false }));
        for uid in [&one, &two, &three] {
            uses.end(uid);
        }
        assert_eq!(uses.begin(&two, &label("b")), Some(Counted::Admitted), "nobody has the old label any more");
        assert_eq!(uses.begin(&one, &Wanted::One(None)), Some(Counted::VolumeMismatch { refused: false }));
        let mut uses = Uses::default();
        assert_eq!(uses.begin(&one, &Wanted::Untaken), None);
        assert_eq!(uses.begin(&two, &Wanted::Several), Some(Counted::PodMismatch { refused: false }));
        for (modes, want) in [
            (&["ReadWriteOnce", "ReadWriteMany"][..], "RWX"),
            (&["ReadWriteOnce", "ReadOnlyMany"], "ROX"),
            (&["ReadWriteOnce"], "RWO"),
            (&["ReadWriteOncePod"], "RWOP"),
            (&[], "inline"),
        ] {
            assert_eq!(access_mode(&modes.iter().map(ToString::to_string).collect::<Vec<_>>()), want);
        }
    }

    #[test]
    fn modes_and_option() {
        let modes = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(may_have_label(&modes(&["ReadWriteOncePod"]), false));
        assert!(!may_have_label(&modes(&["ReadWriteOncePod", "ReadWriteOnce"]), false));
        assert!(!may_have_label(&modes(&["ReadWriteOnce"]), false));
        assert!(may_have_label(&modes(&["ReadWriteMany"]), true));
        assert!(!may_have_label(&[], true));
        assert_eq!(mount_option("u:r:t:s0:c1,c2"), r#"context="u:r:t:s0:c1,c2""#);
    }
}
