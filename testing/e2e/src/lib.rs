//! Black-box tests of the rubelet program on a real containerd: a [`Node`] to run it on, and what a test asks of it.
//!
//! `cargo xtask test --only e2e` starts the containerds and runs every test on each; `--filter NAME` picks tests. While writing one,
//! keep a containerd with `cargo xtask containerd` and use the command line that it prints.
//!
//! ```no_run
//! use e2e::{Node, container, pod};
//!
//! let node = Node::start();
//! node.write("web.yaml", &pod("web", [container("c", "exec sleep 1000")]));
//! let web = node.wait_running("web");
//! assert_eq!(node.exec("web", "c", &["hostname"]).stdout, b"web-e2e\n");
//! # drop(web);
//! ```
//!
//! Every test is `#[ignore = "…"]`, so that a plain `cargo test` says what it did not run. A test that finds out that this machine
//! cannot run it says so with [`skip!`]. `RUBELET_BIN` names another program under test, as the Go kubelet. The logs of a failed test's node are kept in `target/e2e`.

pub mod cluster;
mod node;
mod pods;
mod registry;
pub mod share;
pub mod status;

pub use node::{NODE, Node, Options, program};
pub use pods::{container, lines, pod, sidecar, with};
pub use registry::{Registry, Withdrawn};
pub use share::Share;

use std::time::{Duration, Instant};

/// Leaves the test, which then counts as skipped, not as passed.
#[macro_export]
macro_rules! skip {
    ($($why:tt)+) => {{
        println!("skipped: {}", format!($($why)+));
        return;
    }};
}

/// Polls until `look` gives something.
///
/// # Panics
/// When `limit` passes first, with `what` as the message.
#[track_caller]
pub fn wait_until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < limit, "{what}: not within {} s", limit.as_secs_f64());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The installation that the tests run on (`RUBELET_E2E_CONTAINERD_VERSION`; any when it is not said), for a test that starts a containerd of its own.
pub fn another_runtime() -> Option<rig::containerd::Containerd> {
    use rig::containerd::Containerd;
    let version = std::env::var("RUBELET_E2E_CONTAINERD_VERSION").unwrap_or_default();
    let all = [Containerd::reference(), Containerd::system()];
    all.into_iter().flatten().find(|c| version.is_empty() || c.version == version)
}

/// See [`rig::meminfo_kib`].
///
/// # Panics
/// It says nothing.
pub fn meminfo_kib(name: &str) -> u64 {
    rig::meminfo_kib(name).unwrap_or_else(|e| panic!("{e}"))
}

/// The machine's memory in KiB, without its huge pages, which are a resource of their own.
pub fn memory_kib() -> u64 {
    meminfo_kib("MemTotal") - meminfo_kib("Hugetlb")
}

/// `n` seconds.
pub const fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}
