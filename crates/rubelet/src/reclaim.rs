//! What the node gives back before pods have to go: dead containers, and images that nothing uses.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use node::eviction::NodeReclaim;
use node::images::ImageGc;
use pod::registry::Registry;
use tracing::{error, info, warn};

/// How long the workers are waited for: one that is busy removes what is dead when it has the time.
const PATIENCE: Duration = Duration::from_secs(60);

/// See the module.
pub(crate) struct Unused {
    pub(crate) registry: Arc<Registry>,
    pub(crate) images: ImageGc,
}

#[async_trait]
impl NodeReclaim for Unused {
    async fn reclaim_containers(&self) {
        info!("Attempting to delete unused containers");
        let late = self.registry.remove_unused(PATIENCE).await;
        if late > 0 {
            warn!(pods = late, "Dead containers of some pods are removed later, their workers are busy");
        }
    }

    async fn reclaim_images(&self) {
        if let Err(why) = self.images.remove_unused().await {
            error!(err = why, "Unused images could not all be removed");
        }
    }
}
