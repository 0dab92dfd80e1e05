//! Every verdict of the kubelet, as pure functions over values of `model` and answers of the runtime.
//!
//! Nothing here waits, reads a clock, the environment or a file: the moment, the gates and the limits are arguments.

pub mod admission;
pub mod backoff;
pub mod claims;
pub mod config;
pub mod cpus;
pub mod credentials;
pub mod csi;
pub mod devices;
pub mod disk;
pub mod eviction;
pub mod gc;
pub mod memory;
pub mod node;
pub mod numa;
pub mod observe;
pub mod placement;
pub mod plan;
pub mod pleg;
pub mod probe;
pub mod resize;
pub mod resources;
pub mod restart;
pub mod selinux;
pub mod shutdown;
pub mod status;
pub mod terminate;
pub mod text;
pub mod userns;
pub mod volume_plugin;
pub mod volumes;

#[cfg(test)]
mod testing;
