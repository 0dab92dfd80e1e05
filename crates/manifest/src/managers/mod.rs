//! The checkpoints of the managers of devices, CPUs, memory and resource claims: who was given what.
//!
//! Both kubelets read and write them. But for claims, their checksums are FNV-1a over Go's dump of the structures behind them, so each is written
//! here as JSON and as that dump.

mod claims;
mod cpus;
mod devices;
mod memory;

pub use claims::{CLAIMS, ClaimDevice, ClaimDriver, ClaimEntry, decode_claims, encode_claims};
pub use cpus::{CPUS, CpuCheckpoint, decode_cpus, encode_cpus};
pub use devices::{DEVICES, DeviceCheckpoint, DeviceEntry, decode_devices, encode_devices};
pub use memory::{MEMORY, MemoryBlock, MemoryCheckpoint, MemoryNode, MemoryTable, decode_memory, encode_memory};

/// A JSON object of members that are JSON already.
fn object(members: impl Iterator<Item = String>) -> String {
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

/// Go's dump of a map, its members dumped already.
fn dumped_map(members: impl Iterator<Item = String>) -> String {
    format!("map[{}]", members.collect::<Vec<_>>().join(" "))
}
