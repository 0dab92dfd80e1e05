//! What is watched: the signals, the resources behind them, and what each is about on this node's disks.

use model::quantity::Format;

/// What a threshold is about (KubeletConfiguration `evictionHard` and its like).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Signal {
    /// `memory.available`: the node's memory less its working set.
    MemoryAvailable,
    /// `allocatableMemory.available`: the limit of the pods' group less its working set.
    AllocatableMemoryAvailable,
    /// `nodefs.available`: bytes on the file system of the root directory.
    NodeFsAvailable,
    /// `nodefs.inodesFree`.
    NodeFsInodesFree,
    /// `imagefs.available`: bytes on the file system of the images.
    ImageFsAvailable,
    /// `imagefs.inodesFree`.
    ImageFsInodesFree,
    /// `containerfs.available`: bytes on the file system of the writable layers (KEP-4191).
    ContainerFsAvailable,
    /// `containerfs.inodesFree`.
    ContainerFsInodesFree,
    /// `pid.available`: processes that can still be made.
    PidAvailable,
}

/// What runs short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// `memory`.
    Memory,
    /// `ephemeral-storage`.
    EphemeralStorage,
    /// `inodes`.
    Inodes,
    /// `pids`.
    Pids,
}

impl Resource {
    /// As messages name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::EphemeralStorage => "ephemeral-storage",
            Self::Inodes => "inodes",
            Self::Pids => "pids",
        }
    }
}

impl Signal {
    /// All of them, those that are dealt with first in front.
    pub const ALL: [Self; 9] = [
        Self::MemoryAvailable,
        Self::AllocatableMemoryAvailable,
        Self::NodeFsAvailable,
        Self::NodeFsInodesFree,
        Self::ImageFsAvailable,
        Self::ImageFsInodesFree,
        Self::ContainerFsAvailable,
        Self::ContainerFsInodesFree,
        Self::PidAvailable,
    ];

    /// As the configuration names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::AllocatableMemoryAvailable => "allocatableMemory.available",
            Self::NodeFsAvailable => "nodefs.available",
            Self::NodeFsInodesFree => "nodefs.inodesFree",
            Self::ImageFsAvailable => "imagefs.available",
            Self::ImageFsInodesFree => "imagefs.inodesFree",
            Self::ContainerFsAvailable => "containerfs.available",
            Self::ContainerFsInodesFree => "containerfs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    /// The signal of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.as_str() == name)
    }

    /// What runs short when it is below its threshold.
    pub fn resource(self) -> Resource {
        match self {
            Self::MemoryAvailable | Self::AllocatableMemoryAvailable => Resource::Memory,
            Self::NodeFsAvailable | Self::ImageFsAvailable | Self::ContainerFsAvailable => Resource::EphemeralStorage,
            Self::NodeFsInodesFree | Self::ImageFsInodesFree | Self::ContainerFsInodesFree => Resource::Inodes,
            Self::PidAvailable => Resource::Pids,
        }
    }

    /// How its amounts are written.
    pub fn format(self) -> Format {
        match self.resource() {
            Resource::Memory | Resource::EphemeralStorage => Format::BinarySI,
            Resource::Inodes | Resource::Pids => Format::DecimalSI,
        }
    }
}

/// How the disks of the node are laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disks {
    /// The images are on another file system than the root directory.
    pub dedicated_images: bool,
    /// The writable layers are on another file system than the images (gate KubeletSeparateDiskGC).
    pub split_layers: bool,
}

/// What of a pod takes room on a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) layers: bool,
    /// Logs and local volumes.
    pub(super) node: bool,
}

/// What the node itself can give back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaim {
    /// Dead containers and sandboxes.
    pub containers: bool,
    /// Images that nobody uses.
    pub images: bool,
}

impl Reclaim {
    /// Nothing.
    pub fn is_empty(self) -> bool {
        !self.containers && !self.images
    }
}

impl Disks {
    /// What of pods is on the file system of this signal.
    pub(super) fn parts(self, signal: Signal) -> Parts {
        use Signal::{
            ContainerFsAvailable, ContainerFsInodesFree, ImageFsAvailable, ImageFsInodesFree, NodeFsAvailable,
            NodeFsInodesFree,
        };
        let (all, layers) = (Parts { layers: true, node: true }, Parts { layers: true, node: false });
        match (signal, self.dedicated_images, self.split_layers) {
            (NodeFsAvailable | NodeFsInodesFree, true, false) => Parts { layers: false, node: true },
            (ImageFsAvailable | ImageFsInodesFree | ContainerFsAvailable | ContainerFsInodesFree, true, false) => {
                layers
            }
            // Nothing of a pod's is there but its images, which are not counted as its own.
            (ImageFsAvailable | ImageFsInodesFree, true, true) => Parts::default(),
            _ => all,
        }
    }

    /// What the node can give back on the file system of this signal before a pod must go.
    pub fn reclaim(self, signal: Signal) -> Reclaim {
        use Signal::{ImageFsAvailable, ImageFsInodesFree, NodeFsAvailable, NodeFsInodesFree};
        if !matches!(signal.resource(), Resource::EphemeralStorage | Resource::Inodes) {
            return Reclaim::default();
        }
        match (signal, self.dedicated_images, self.split_layers) {
            (NodeFsAvailable | NodeFsInodesFree, true, false) => Reclaim::default(),
            (ImageFsAvailable | ImageFsInodesFree, true, true) => Reclaim { containers: false, images: true },
            (_, true, true) => Reclaim { containers: true, images: false },
            _ => Reclaim { containers: true, images: true },
        }
    }

    /// The signal whose thresholds hold for the writable layers too, by the signal of those layers.
    pub(super) fn layers_follow(self, signal: Signal) -> Option<Signal> {
        let with_images = self.dedicated_images && !self.split_layers;
        Some(match (signal, with_images) {
            (Signal::ContainerFsAvailable, true) => Signal::ImageFsAvailable,
            (Signal::ContainerFsAvailable, false) => Signal::NodeFsAvailable,
            (Signal::ContainerFsInodesFree, true) => Signal::ImageFsInodesFree,
            (Signal::ContainerFsInodesFree, false) => Signal::NodeFsInodesFree,
            _ => return None,
        })
    }
}
