//! Everything that talks to the API server, and nothing that decides about pods.
//!
//! - [`kubeconfig`], [`credentials`], [`exec`]: who we are; files are read again when they change.
//! - [`tls`], [`client`]: how bytes get there: HTTP/2 with pings, deadlines, a rate limit, Retry-After.
//! - [`reflect`], [`object_cache`]: collections and single objects kept up to date.
//! - [`calls`]: typed calls behind small traits, so that fakes can stand in; [`patch`] makes their bodies.
//! - [`events`]: events correlated, queued and written.
//! - [`pki`]: bootstrap, rotation and serving certificates.
//!
//! Clock and randomness are handed in ([`Wall`], [`Unit`]); waiting goes through `tokio::time`.

pub mod backoff;
pub mod calls;
pub mod client;
mod connect;
pub mod credentials;
pub mod error;
pub mod events;
pub mod exec;
pub mod fuzz;
pub mod kubeconfig;
pub mod limit;
pub mod object_cache;
pub mod patch;
pub mod pki;
pub mod reflect;
mod stamp;
pub mod tls;
mod trouble;
mod wire;

use std::sync::Arc;

pub use backoff::Backoff;
pub use client::{Client, ClientOptions, RequestObserver};
pub use error::{ClusterError, ClusterResult, ErrorKind};
pub use kubeconfig::ClusterConfig;
pub use reflect::{Delta, ObjectKey, Reflector, Scope};

/// Wall time as a value.
pub type Wall = Arc<dyn Fn() -> jiff::Timestamp + Send + Sync>;

/// Randomness as a value: each call gives a number in 0..1.
pub type Unit = Arc<dyn Fn() -> f64 + Send + Sync>;

/// The system's clock.
pub fn system_wall() -> Wall {
    Arc::new(jiff::Timestamp::now)
}

/// The operating system's randomness.
pub fn system_unit() -> Unit {
    Arc::new(rustls_unit)
}

/// A number in 0..1 from ring, which the TLS stack brings along.
fn rustls_unit() -> f64 {
    let mut bytes = [0u8; 4];
    // A generator that fails once only costs jitter.
    if rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes).is_err() {
        return 0.5;
    }
    f64::from(u32::from_le_bytes(bytes)) / (f64::from(u32::MAX) + 1.0)
}
