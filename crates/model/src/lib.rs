//! The nouns of rubelet: Kubernetes types re-exported, and the values that rooms hand to each other.
//!
//! Nothing here acts, waits or reads a clock. Desired state ([`pod::DesiredPod`]) and observed state
//! ([`observed::ObservedPod`]) are different types on purpose: no room may read one where it means the other.

pub mod allocation;
pub mod cgroup;
pub mod machine;
pub mod observed;
pub mod plan;
pub mod pod;
pub mod quantity;
pub mod report;
pub mod timeline;

/// The Kubernetes API types that rubelet uses, under one short path.
pub mod api {
    pub use k8s_openapi::api::core::v1::*;
    pub use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
    pub use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
}

pub use jiff::Timestamp;
pub use k8s_openapi;
