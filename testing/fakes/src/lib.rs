//! Stand-ins for what rubelet talks to, faithful enough to fail as the real ones do.
//!
//! [`FakeRuntime`] is a CRI runtime in memory. It answers through the port's traits, under paused time too, and over a unix
//! socket ([`serve`]). [`FakeDevicePlugin`] is a device plugin on its real socket, [`FakeClaimDriver`]
//! a driver of resource claims.

mod claim_driver;
mod device_plugin;
mod runtime;
mod wire;

pub use claim_driver::FakeClaimDriver;
pub use device_plugin::{Allocate, FakeDevicePlugin};
pub use runtime::calls::{Call, Ended};
pub use runtime::faults::{Fault, Rule};
pub use runtime::process::{Exec, For, OnTerm, Process};
pub use runtime::{FakeRuntime, Settings};
pub use wire::{FakeServer, serve};
