//! The Node object: what a node registers as, what its status says, and whether a change is worth a request.
//!
//! Everything comes in as a value: facts of the machine, of the runtime, the verdict on readiness, and the object as the API server
//! last had it. What others wrote there (labels, taints, cordon, conditions, extended resources) is kept.

mod address;
mod condition;
pub mod csi;
mod event;
mod image;
mod object;
mod status;
mod version;

#[cfg(test)]
mod tests;

pub use address::{NodeAddresses, PROVIDED_NODE_IP, provided_node_ip};
pub use condition::{Pressures, is_ready};
pub use event::{EventKind, NodeEvent};
pub use image::{MAX_NAMES, container_images};
pub use object::{Identity, initial, metadata_of_status, object_ttl, pod_cidr, reconcile};
pub use status::{Composed, MachineFacts, NodeRuntime, StatusFacts, changed, compose, missing_capacity};
pub use version::runtime_version;
