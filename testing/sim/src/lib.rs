//! A simulated node: the real rooms of crate `pod` on a virtual clock, over a runtime, a host and an API server in memory that fail on demand.
//!
//! ```text
//!   manifests in memory ─▶ source ─┐
//!   fake API server ─▶ reflector ──┴▶ dispatcher ─▶ workers ─▶ [ports] ─▶ fake runtime, fake host
//!        ▲                                            │           │
//!        └──────────── [ports] ◀── status writer ◀────┘           ├─▶ checker: what must always hold
//!                                                                 └─▶ crash: from here on the agent reaches nothing any more
//! ```
//!
//! A [`Node`] lives on one thread with tokio's clock paused, so an hour takes milliseconds and the same seed gives the same run, to the byte.
//! Everything that the agent asks of the outside goes through [`ports`]; there the [`check::Checker`] sees it, and there the agent can be cut
//! off before or after any call, as by `kill -9`.
//!
//! - [`story`]: what becomes of a node, as a list of items made from one number; an item is data, and can be left out.
//! - [`play`]: plays a story. After each item everything that [`check`] knows must hold; at the end all is healed, and the node must come to be
//!   as it is wanted and then rest: phases, statuses at the API server, mirror pods, nothing left of what is gone, no more kept than is allowed.
//! - [`explore`]: many stories on all processors; makes one that ends badly short.
//! - [`bugs`]: bugs to plant, to see that stories find them.
//!
//! `cargo xtask sim` plays more stories than the tests do; `cargo xtask sim --seed N --trace` tells all that happens in one.

mod agent;
pub mod api;
pub mod bugs;
pub mod check;
pub mod explore;
pub mod host;
pub mod managers;
pub mod manifests;
pub mod node;
pub mod play;
pub mod ports;
mod settle;
pub mod story;
pub mod world;

use std::cell::RefCell;
use std::sync::Once;

pub use agent::{node_facts, rules};
pub use bugs::Bug;
pub use host::{HostFault, HostRule};
pub use manifests::{Container, Manifest};
pub use node::{ApiServer, Node, Setup};

thread_local! {
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Panics on this thread since its node was made: one of a task is no more than a line of text for the others.
pub(crate) fn panics() -> Vec<String> {
    PANICS.with_borrow(Clone::clone)
}

/// Has panics remembered by their threads; `silent`: and not shown.
pub fn remember_panics(silent: bool) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let shown = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with_borrow_mut(|all| all.push(panic.to_string()));
            if !silent {
                shown(panic);
            }
        }));
    });
}

/// Runs a simulation on a thread of its own clock. With `SIM_LOG` set (as `debug` or `pod=debug`) the agent's log goes to stderr.
pub fn run<T>(simulation: impl Future<Output = T>) -> T {
    log();
    remember_panics(false);
    PANICS.with_borrow_mut(Vec::clear);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    match runtime {
        Ok(runtime) => runtime.block_on(simulation),
        Err(e) => panic!("no runtime for the simulation: {e}"),
    }
}

fn log() {
    if let Ok(filter) = std::env::var("SIM_LOG") {
        // A second call finds the first one's subscriber in place, which is as good.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
            .with_timer(VirtualTime)
            .with_writer(std::io::stderr)
            .try_init();
    }
}

thread_local! {
    static BEGAN: std::cell::Cell<Option<tokio::time::Instant>> = const { std::cell::Cell::new(None) };
}

/// Time since the simulation began.
struct VirtualTime;

impl tracing_subscriber::fmt::time::FormatTime for VirtualTime {
    fn format_time(&self, w: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        let began = BEGAN.get().map(|at| at.elapsed());
        write!(w, "{:10.3}", began.unwrap_or_default().as_secs_f64())
    }
}

/// From here on the log counts.
pub(crate) fn begin_log() {
    BEGAN.set(Some(tokio::time::Instant::now()));
}
