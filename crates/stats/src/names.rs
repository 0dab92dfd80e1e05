//! Whose groups the control groups are: the runtime's pods and containers, and what their groups are called.

use std::collections::HashMap;
use std::sync::Arc;

use cri_api::v1;

const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// A pod by its sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The sandbox's id.
    pub(crate) sandbox: String,
    /// When the sandbox was made, ns since the epoch.
    pub(crate) created: i64,
    pub(crate) ready: bool,
}

/// A container that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContainerName {
    pub(crate) id: String,
    pub(crate) name: String,
    /// The image as the runtime's list refers to it.
    pub(crate) image: String,
    /// The image as the runtime holds it.
    pub(crate) image_ref: String,
    /// When it was made, ns since the epoch.
    pub(crate) created: i64,
    /// The place of its pod in [`Names::pods`].
    pub(crate) pod: usize,
}

/// What the runtime's lists say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    /// One for each pod: its ready sandbox, or the newest.
    pub(crate) pods: Vec<PodName>,
    /// All that run.
    pub(crate) containers: Vec<ContainerName>,
    by_uid: HashMap<String, usize>,
    by_sandbox: HashMap<String, usize>,
    by_container: HashMap<String, usize>,
}

/// Whose a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A pod, by its place in [`Names::pods`].
    Pod(usize),
    /// A pod's sandbox.
    Sandbox(usize),
    /// A container, by its place in [`Names::containers`].
    Container(usize),
    /// Nobody in particular.
    Other,
}

impl Names {
    /// Joins the runtime's lists. Containers that do not run and those of an older sandbox are left out.
    pub(crate) fn new(sandboxes: Vec<v1::PodSandbox>, containers: Vec<v1::Container>) -> Self {
        let mut names = Self::default();
        for sandbox in sandboxes {
            let label = |key: &str| sandbox.labels.get(key).cloned().unwrap_or_default();
            let uid = label(POD_UID);
            if uid.is_empty() {
                // Not a pod of a kubelet.
                continue;
            }
            let pod = PodName {
                namespace: label(POD_NAMESPACE),
                name: label(POD_NAME),
                uid: uid.clone(),
                created: sandbox.created_at,
                ready: sandbox.state == v1::PodSandboxState::SandboxReady as i32,
                sandbox: sandbox.id,
            };
            match names.by_uid.get(&uid) {
                Some(&at) => {
                    let known = &mut names.pods[at];
                    if (pod.ready, pod.created) > (known.ready, known.created) {
                        names.by_sandbox.remove(&known.sandbox);
                        names.by_sandbox.insert(pod.sandbox.clone(), at);
                        *known = pod;
                    }
                }
                None => {
                    let at = names.pods.len();
                    names.by_uid.insert(uid, at);
                    names.by_sandbox.insert(pod.sandbox.clone(), at);
                    names.pods.push(pod);
                }
            }
        }
        for container in containers {
            let running = container.state == v1::ContainerState::ContainerRunning as i32;
            let Some(&pod) = names.by_sandbox.get(&container.pod_sandbox_id).filter(|_| running) else { continue };
            names.by_container.insert(container.id.clone(), names.containers.len());
            names.containers.push(ContainerName {
                name: container.labels.get(CONTAINER_NAME).cloned().unwrap_or_default(),
                image: container.image.unwrap_or_default().image,
                image_ref: container.image_ref,
                created: container.created_at,
                id: container.id,
                pod,
            });
        }
        names
    }

    /// Whose group has this path. Only the last part counts: `podUID`, or `kubepods-burstable-podU_I_D.slice` under systemd, is a pod's;
    /// `ID`, `cri-containerd-ID.scope` and the like are a sandbox's or a container's.
    pub(crate) fn owner(&self, path: &str) -> Owner {
        let part = path.rsplit('/').next().unwrap_or_default();
        if let Some(slice) = part.strip_suffix(".slice") {
            let uid = slice.rsplit_once("-pod").map(|(_, uid)| uid.replace('_', "-"));
            return uid.and_then(|uid| self.by_uid.get(&uid)).map_or(Owner::Other, |&at| Owner::Pod(at));
        }
        if let Some(&at) = part.strip_prefix("pod").and_then(|uid| self.by_uid.get(uid)) {
            return Owner::Pod(at);
        }
        let id = part.strip_suffix(".scope").unwrap_or(part);
        let id = id.rsplit(['-', ':']).next().unwrap_or(id);
        if let Some(&at) = self.by_container.get(id) {
            Owner::Container(at)
        } else if let Some(&at) = self.by_sandbox.get(id) {
            Owner::Sandbox(at)
        } else {
            Owner::Other
        }
    }
}

/// The names of images by what the runtime's lists of containers call them: an id, a digest or a name.
pub(crate) fn image_names(images: &[v1::Image]) -> HashMap<&str, &str> {
    let mut names = HashMap::new();
    for image in images {
        let Some(name) = image.repo_tags.first().or(image.repo_digests.first()) else { continue };
        let own = image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str);
        names.extend(own.chain([image.id.as_str()]).map(|key| (key, name.as_str())));
    }
    names
}

/// What the runtime says of a sandbox's image beside its status (containerd's and CRI-O's `info`); empty when it does not.
pub(crate) fn sandbox_image(status: &v1::PodSandboxStatusResponse) -> Arc<str> {
    let info = status.info.get("info").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    info.and_then(|info| info.get("image")?.as_str().map(Arc::from)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, uid: &str, created_at: i64, ready: bool) -> v1::PodSandbox {
        let label = |(k, v): (&str, &str)| (k.to_owned(), v.to_owned());
        v1::PodSandbox {
            id: id.into(),
            state: if ready { 0 } else { 1 },
            created_at,
            labels: [(POD_NAME, "web"), (POD_NAMESPACE, "default"), (POD_UID, uid)].map(label).into(),
            ..v1::PodSandbox::default()
        }
    }

    fn container(id: &str, sandbox: &str, state: v1::ContainerState) -> v1::Container {
        v1::Container {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            state: state as i32,
            labels: [(CONTAINER_NAME.to_owned(), "c".to_owned())].into(),
            ..v1::Container::default()
        }
    }

    #[test]
    fn the_ready_sandbox_counts_and_what_runs_in_it() {
        let running = v1::ContainerState::ContainerRunning;
        let names = Names::new(
            vec![
                sandbox("s1", "u-1", 5, false),
                sandbox("s2", "u-1", 4, true),
                sandbox("s3", "u-2", 9, false),
                v1::PodSandbox { id: "foreign".into(), ..v1::PodSandbox::default() },
            ],
            vec![
                container("c1", "s1", running),
                container("c2", "s2", running),
                container("c3", "s2", v1::ContainerState::ContainerExited),
                container("c4", "foreign", running),
            ],
        );
        assert_eq!(names.pods.iter().map(|p| p.sandbox.as_str()).collect::<Vec<_>>(), ["s2", "s3"]);
        assert_eq!(names.containers.iter().map(|c| (c.id.as_str(), c.pod)).collect::<Vec<_>>(), [("c2", 0)]);
    }

    #[test]
    fn groups_are_told_by_their_last_part() {
        let names = Names::new(
            vec![sandbox("aa11", "12-34", 1, true)],
            vec![container("bb22", "aa11", v1::ContainerState::ContainerRunning)],
        );
        for (path, owner) in [
            ("/kubepods/burstable/pod12-34", Owner::Pod(0)),
            ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_34.slice", Owner::Pod(0)),
            ("/kubepods/burstable/pod12-34/aa11", Owner::Sandbox(0)),
            ("/x.slice/cri-containerd-bb22.scope", Owner::Container(0)),
            ("/x.slice/crio-bb22.scope", Owner::Container(0)),
            ("/kubepods/pod12-34/bb22/init", Owner::Other),
            ("/kubepods", Owner::Other),
            ("/kubepods.slice/kubepods-burstable.slice", Owner::Other),
            ("/", Owner::Other),
        ] {
            assert_eq!(names.owner(path), owner, "{path}");
        }
    }

    #[test]
    fn images_have_a_name() {
        let image = v1::Image {
            id: "sha256:1".into(),
            repo_tags: vec!["lab/b:1".into(), "lab/b:2".into()],
            repo_digests: vec!["lab/b@sha256:2".into()],
            ..v1::Image::default()
        };
        let all = [image];
        let names = image_names(&all);
        for key in ["sha256:1", "lab/b:2", "lab/b@sha256:2"] {
            assert_eq!(names[key], "lab/b:1");
        }
        let mut status = v1::PodSandboxStatusResponse::default();
        assert_eq!(&*sandbox_image(&status), "");
        status.info.insert("info".into(), r#"{"pid":7,"image":"lab/pause:1"}"#.into());
        assert_eq!(&*sandbox_image(&status), "lab/pause:1");
    }
}
