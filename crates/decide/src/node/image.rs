//! The images that the node's status lists, so that the scheduler can prefer nodes that have them.

use cri_api::v1;
use model::api::ContainerImage;

/// Most names of one image (`MaxNamesPerImageInNodeStatus`).
pub const MAX_NAMES: usize = 5;

/// The `max` largest images, largest first; -1: all. Each with its digests, then its tags, [`MAX_NAMES`] in all.
pub fn container_images(mut images: Vec<v1::Image>, max: i32) -> Vec<ContainerImage> {
    // Equal sizes are ordered too, or the list would change with the runtime's whim.
    images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| b.id.cmp(&a.id)));
    images
        .into_iter()
        .take(usize::try_from(max).unwrap_or(usize::MAX))
        .map(|image| ContainerImage {
            names: Some(image.repo_digests.into_iter().chain(image.repo_tags).take(MAX_NAMES).collect()),
            size_bytes: i64::try_from(image.size).ok(),
        })
        .collect()
}
