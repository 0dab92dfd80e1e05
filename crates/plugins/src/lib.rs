//! gRPC to others' plugins: their registration, drivers of the Container Storage Interface, device plugins, drivers of resource claims, and the socket that tells of pods' resources.
//!
//! ```text
//!   plugins_registry/*.sock ──inotify──▶ registration ──▶ drivers ──▶ CSINode, waiting pods
//!                                                            │
//!   pods' workers ──▶ volumes: one task for each volume with work ──▶ a driver's socket
//! ```
//!
//! Every call to a plugin has a deadline; one that hangs holds its own volume, and so the pods that use it, and nothing else.

mod callers;
pub mod csi;
pub mod devices;
pub mod dra;
pub mod fuzz;
pub mod pod_resources;
pub mod registration;
pub mod volumes;
pub mod wire;
