//! The HTTP endpoints: what others may ask a running rubelet, and the client side that the command line uses.
//!
//! ```text
//!   NodeView ──▶ routes ──▶ Server ──bind──▶ Bound ──run──▶ Draining ──drain──▶ done
//! ```
//!
//! Each endpoint is made by its own step, so that a port in use is known before anything starts:
//! [`Server::healthz`], [`Server::read_only`], [`Server::local`] or [`Server::kubelet`] builds it, [`Server::bind_tcp`] or [`Server::bind_unix`]
//! opens the socket, [`Bound::run`] answers until the token is cancelled, [`Draining::drain`] lets running requests end until a
//! deadline.
//!
//! What is served comes from one value, [`NodeView`]; nothing here holds state of the node. Every server is bounded: in
//! connections, in the size of a request's head, in the time a client may take to send it or to take the answer. Request bodies
//! are not read, but for the number of `/debug/flags/v`.

pub mod client;
mod figures;
#[doc(hidden)]
pub mod fuzz;
mod health;
mod healthz;
mod local;
mod read_only;
mod reply;
mod secure;
mod server;
mod stall;

use model::report::{NodeReport, PodReport};

pub use figures::Figures;
pub use health::{Checks, Health};
pub use local::{API_VERSION, socket_path};
pub use secure::{
    Authentication, Authorization, ContainerLog, ContainerPort, CriContainers, Handlers, PodFacts, PodLookup,
    RunningPod, SecureParts, ServingCertificate, TlsError, TlsSettings,
};
pub use server::{BindError, Bound, Draining, Limits, Server};

/// Everything the endpoints show. All methods answer from memory and must not wait: a hung runtime must not hang `/pods`. They
/// are called on threads where short locks and copying are fine.
pub trait NodeView: Send + Sync {
    /// The pods this node is to run, static and API ones, with their newest status: the list of `/pods`.
    fn pods(&self) -> Vec<model::api::Pod>;

    /// One report for each pod that a worker holds, in a stable order.
    fn pod_reports(&self) -> Vec<PodReport>;

    /// The node as a whole.
    fn node_report(&self) -> NodeReport;

    /// The health check `syncloop`.
    ///
    /// # Errors
    /// Why the loop counts as stuck. Go's words: `sync Loop took longer than expected`.
    fn sync_loop_healthy(&self) -> Result<(), String>;
    /// Why device plugins cannot register.
    fn device_plugins_healthy(&self) -> Result<(), String> {
        Ok(())
    }

    /// The configuration in force, as `/configz` shows it.
    fn configz(&self) -> serde_json::Value;

    /// The command line's flags and their values, as `/flagz` shows them.
    fn flags(&self) -> Vec<(String, String)>;
}
