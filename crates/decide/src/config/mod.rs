//! What is sent to the runtime for a pod: [`sandbox_config`] and [`container_config`], and the pieces they are made of.
//!
//! Everything that is only known late (addresses, image user, volume paths, services, …) comes in as typed facts ([`SandboxFacts`],
//! [`ContainerFacts`]); a fact that is needed and not there is named in the error. Nothing here reads a file, a clock or the environment.

pub mod claims;
mod container;
pub mod dns;
pub mod downward;
pub mod env;
pub mod env_file;
mod error;
pub mod expand;
mod facts;
pub mod go_text;
pub mod hostname;
pub mod hosts_file;
pub mod image_name;
mod linux;
mod mounts;
pub mod names;
pub mod objects;
mod sandbox;
mod security;
pub mod termination;
pub mod trust;
mod validate;

pub use container::{check_container, container_config};
pub use error::{ConfigError, Reason, pod_text};
pub use facts::{
    BlockDevice, CgroupVersion, ContainerFacts, DeviceFacts, Gates, ImageUser, NodeFacts, ResolvedImage, SandboxFacts,
    SwapBehavior, UserNamespaceFacts, VolumeFact, VolumeSource,
};
pub use linux::{container_resources, created_resources, sandbox_update};
pub use mounts::{SubPath, needs_hosts_file, sub_path_error, sub_paths, volume_is_used};
pub use sandbox::sandbox_config;
pub use security::{effective_user, verify_non_root};

#[cfg(test)]
pub(crate) mod tests;
