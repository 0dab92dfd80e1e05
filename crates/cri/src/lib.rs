//! The container runtime: the port through which the rest of rubelet uses it ([`port`]), and the gRPC client behind that
//! port ([`client::CriClient`]).

pub mod client;
mod connect;
mod error;
pub mod port;
mod stubs;
mod verify;

pub use client::CriClient;
pub use connect::ConnectError;
pub use port::*;
pub use verify::validate_version;
