//! Images of a start: the container's own, and those that it mounts as volumes (KEP-4639). Both wait for pulls, and are given up when the pod is to end.

use std::collections::BTreeMap;

use cri_api::v1;
use decide::config::{ImageUser, ResolvedImage};
use model::api::Container;
use model::pod::{ContainerEntry, DesiredPod};
use model::timeline::{StepKind, StepResult};

use super::start::{StartFailure, to_end};
use crate::images::Wanted;
use crate::worker::{Intent, Worker};

/// Images of volumes that are there, by volume name.
pub(crate) type ImageVolumes = BTreeMap<String, v1::ImageSpec>;

impl Worker {
    /// The container's image, pulled if need be; given up when the pod is to end or wants another image.
    pub(super) async fn image(
        &mut self,
        pod: &DesiredPod,
        entry: &ContainerEntry<'_>,
        sandbox: &v1::PodSandboxConfig,
    ) -> Result<ResolvedImage, StartFailure> {
        let name = &entry.spec.name;
        let deps = self.deps.clone();
        self.entry.begin(StepKind::Pull, name, deps.clock.now());
        let wanted = Wanted {
            image: entry.spec.image.as_deref().unwrap_or_default(),
            policy: entry.spec.image_pull_policy.as_deref().unwrap_or_default(),
            container: name,
        };
        let mut newer = self.intent.clone();
        let result = tokio::select! {
            biased;
            result = deps.images.ensure(pod, &wanted, sandbox, "") => result.map_err(|p| StartFailure::image(p, wanted.image)),
            () = unwanted_image(&mut newer, entry.spec) => {
                Err(StartFailure::given_up("the pod is to end, or to have another image"))
            }
            () = self.stop.cancelled() => Err(StartFailure::given_up("the agent stops")),
        };
        let outcome = match &result {
            Ok(_) => StepResult::Done,
            Err(failure) => StepResult::Failed(format!("{}: {}", failure.reason, failure.message)),
        };
        self.entry.end(StepKind::Pull, name, outcome, deps.clock.now());
        let usable = result?;
        Ok(ResolvedImage { user: ImageUser::of(&usable.image), reference: usable.image_ref })
    }

    /// Makes the images usable that this container mounts as volumes; those that `ready` has already are not looked at again in this round.
    pub(super) async fn image_volumes(
        &self,
        pod: &DesiredPod,
        entry: &ContainerEntry<'_>,
        sandbox: &v1::PodSandboxConfig,
        ready: &mut ImageVolumes,
    ) -> Result<(), StartFailure> {
        let mounts = entry.spec.volume_mounts.as_deref().unwrap_or_default();
        for volume in pod.spec().volumes.iter().flatten() {
            let Some(source) = &volume.image else { continue };
            if ready.contains_key(&volume.name) || !mounts.iter().any(|m| m.name == volume.name) {
                continue;
            }
            // What is said of it is said of the pod: the volume is nobody's alone.
            let wanted = Wanted {
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref().unwrap_or_default(),
                container: "",
            };
            let mut newer = self.intent.clone();
            let found = tokio::select! {
                biased;
                result = self.deps.images.ensure(pod, &wanted, sandbox, "") => {
                    result.map_err(|p| StartFailure::volume_image(p, wanted.image))
                }
                () = to_end(&mut newer) => Err(StartFailure::given_up("the pod is to end")),
                () = self.stop.cancelled() => Err(StartFailure::given_up("the agent stops")),
            }?;
            ready.insert(
                volume.name.clone(),
                v1::ImageSpec {
                    image: found.image_ref,
                    user_specified_image: wanted.image.to_owned(),
                    annotations: pod.meta().annotations.clone().unwrap_or_default(),
                    ..v1::ImageSpec::default()
                },
            );
        }
        Ok(())
    }
}

/// Returns when the pod is to end, or when its newest form has another image for this container: a pull that makes no progress must not hold up
/// the correction of a wrong name.
async fn unwanted_image(intent: &mut tokio::sync::watch::Receiver<Intent>, spec: &Container) {
    let unwanted = |intent: &Intent| match intent {
        Intent::End(_) => true,
        Intent::Run(pod) => pod.container(&spec.name).is_none_or(|c| c.spec.image != spec.image),
    };
    if intent.wait_for(|i| unwanted(i)).await.is_err() {
        std::future::pending::<()>().await;
    }
}
