//! The machine that the node is.

/// This machine, as `nodeInfo` of the Node status has it. What is not known is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// `machineID`.
    pub machine_id: String,
    /// `systemUUID`.
    pub system_uuid: String,
    /// `bootID`.
    pub boot_id: String,
    /// `kernelVersion`.
    pub kernel_version: String,
    /// `osImage`.
    pub os_image: String,
    /// Swap space in bytes; 0: none.
    pub swap: u64,
}
