//! The way of a pod, in the order in which it goes: source → desired → admit → worker → sync → runtime, and back through pleg.
//!
//! Everything long-running of a pod lives here, and only here is the runtime changed (by [`worker`], through `sync`). What is decided comes
//! from `decide`; the outside comes in as values ([`ports`]).

pub mod admit;
pub mod dead;
pub mod desired;
pub mod ends;
pub mod events;
pub mod fuzz;
pub mod http;
pub mod images;
pub mod logs;
pub mod objects;
pub mod pleg;
pub mod ports;
pub mod prober;
pub mod registry;
pub mod settings;
pub mod source;
pub mod status;
pub mod sync;
pub mod userns;
pub mod worker;
