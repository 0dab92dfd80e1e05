//! Certificates of the node: asked for, kept on disk as Go keeps them, renewed in time.

pub mod bootstrap;
pub mod cert;
pub mod key;
pub mod manager;
pub mod request;
pub mod self_signed;
pub mod store;

pub use bootstrap::Bootstrap;
pub use cert::{CertInfo, Identity};
pub use manager::{CertManager, Purpose};
pub use store::FileStore;
