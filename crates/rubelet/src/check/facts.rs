//! What is looked at, as plain values: gathered in `gather` and `runtime`, judged in `judge`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use cri_api::v1;
use host::fsx::FilesystemFigures;
use host::proc::MemoryInfo;
use jiff::Timestamp;
use model::report::NodeReport;

/// A fact, or why it is not known.
pub(crate) type Seen<T> = Result<T, String>;

/// The host, apart from the runtime.
#[derive(Clone, Debug)]
pub(crate) struct HostFacts {
    /// Effective user id of this process.
    pub(crate) euid: u32,
    /// Name of process 1.
    pub(crate) init: Seen<String>,
    /// The node's name: `--hostname-override`, else the host's.
    pub(crate) node_name: Seen<String>,
    pub(crate) cgroups: Seen<Cgroups>,
    pub(crate) memory: Seen<MemoryInfo>,
    /// Swap devices in use.
    pub(crate) swap: Seen<Vec<String>>,
    /// Kernel settings by name; None: the kernel has none of this name.
    pub(crate) sysctls: BTreeMap<&'static str, Option<String>>,
    pub(crate) cpus: Seen<usize>,
    /// Highest number of processes and threads, and how many there are.
    pub(crate) pids: Seen<(u64, u64)>,
    /// Who listens on the ports that the agent wants.
    pub(crate) listeners: Seen<Vec<Listener>>,
    /// Could this process take the agent's oom_score_adj?
    pub(crate) oom_score: Seen<()>,
    pub(crate) resolver: Seen<Resolver>,
    pub(crate) clock: Clock,
    pub(crate) places: Vec<Place>,
    /// `iptables` is in the PATH.
    pub(crate) iptables: bool,
    /// What answers on the local socket of this root directory: None when nobody does.
    pub(crate) agent: Seen<Option<NodeReport>>,
}

/// The cgroup filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cgroups {
    pub(crate) v2: bool,
    pub(crate) controllers: Vec<String>,
}

/// A process that listens on a TCP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listener {
    pub(crate) address: SocketAddr,
    /// Its id and name; None when it cannot be found out.
    pub(crate) process: Option<(u32, String)>,
}

/// The node's resolver file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolver {
    pub(crate) text: String,
    /// `/run/systemd/resolve/resolv.conf` is there: the servers behind the stub of systemd-resolved.
    pub(crate) behind_stub: bool,
}

/// The clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Clock {
    pub(crate) now: Timestamp,
    /// The hardware clock read at the same time, seconds since 1970; None: there is none.
    pub(crate) hardware: Option<i64>,
    /// What keeps the clock right.
    pub(crate) keeper: Option<String>,
}

/// What the agent uses a path for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `--root-dir`; nodefs.
    Root,
    /// podLogsDir.
    Logs,
    /// staticPodPath.
    Manifests,
    /// Where the runtime keeps images; imagefs.
    Images,
}

/// A path that the agent needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) role: Role,
    pub(crate) path: PathBuf,
    pub(crate) state: Seen<PlaceState>,
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlaceState {
    /// None: nothing; else whether it is a directory.
    pub(crate) directory: Option<bool>,
    /// Could files be made in it, or, when it is missing, in the nearest directory above it? Not tried for every role.
    pub(crate) writable: Seen<()>,
    pub(crate) filesystem: Seen<FilesystemFigures>,
    /// The filesystem's device number.
    pub(crate) device: Option<u64>,
}

/// What the kubeconfig leads to.
#[derive(Clone, Debug)]
pub(crate) struct ClusterFacts {
    /// The file.
    pub(crate) path: PathBuf,
    /// The server that it names; empty when it cannot be read.
    pub(crate) server: String,
    pub(crate) state: ClusterState,
}

/// What the API server said.
#[derive(Clone, Debug)]
pub(crate) enum ClusterState {
    /// The kubeconfig cannot be used.
    Unusable(cluster::ClusterError),
    /// It was not asked, since this node has no name.
    NoName(String),
    /// It did not answer, or said no.
    Refused(cluster::ClusterError),
    /// It answered.
    Answers {
        /// The node's object exists.
        registered: bool,
        /// There is no client certificate yet.
        bootstrap: bool,
        /// How far its clock is ahead.
        skew: jiff::SignedDuration,
        /// End of the client certificate.
        expires: Option<Timestamp>,
    },
}

/// The runtime, as it answers on its socket.
#[derive(Clone, Debug)]
pub(crate) struct RuntimeFacts {
    /// The endpoint asked.
    pub(crate) endpoint: String,
    /// What is wrong with the socket itself.
    pub(crate) socket: Seen<()>,
    /// None: not asked, since the socket is not usable.
    pub(crate) answers: Option<Answers>,
}

/// Its answers.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    pub(crate) version: Seen<v1::VersionResponse>,
    pub(crate) status: Seen<v1::StatusResponse>,
    /// The driver it names; None: it cannot say (containerd before 2.0).
    pub(crate) driver: Seen<Option<config::CgroupDriver>>,
    /// Sandboxes, and the time it took to list them.
    pub(crate) sandboxes: Seen<(usize, Duration)>,
    /// Containers, and the time it took to list them.
    pub(crate) containers: Seen<(usize, Duration)>,
    /// Where it keeps images.
    pub(crate) image_place: Option<PathBuf>,
    pub(crate) cni: Cni,
}

/// Its pod network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cni {
    /// Where it looks for network configurations.
    pub(crate) dir: PathBuf,
    /// Configuration files there.
    pub(crate) files: Seen<Vec<String>>,
}
