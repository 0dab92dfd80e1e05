//! Every verdict of the kubelet, as pure functions over values of `model` and answers of the runtime.
//!
//! Nothing here waits, reads a clock, the environment or a file: the moment, the gates and the limits are arguments.

pub mod admission;
pub mod backoff;
pub mod config;
pub mod credentials;
pub mod csi;
pub mod eviction;
pub mod gc;
pub mod node;
pub mod observe;
pub mod plan;
pub mod pleg;
pub mod probe;
pub mod resources;
pub mod restart;
pub mod shutdown;
pub mod status;
pub mod terminate;
pub mod text;
pub mod userns;
pub mod volume_plugin;
pub mod volumes;

#[cfg(test)]
mod testing;
