//! What strangers can put before rubelet, made up at random: log files, requests, frames of sessions, manifests and configuration, checkpoints,
//! answers of probes and of the API server, data of volumes, the kernel's files.
//!
//! A target is a function of bytes that panics when something is wrong, which is also what libFuzzer, AFL and honggfuzz take. The engine here
//! changes and joins the target's seeds, its corpus (`testing/fuzz/corpus/TARGET`) and what it tried before; it looks at no coverage, so the
//! seeds matter. An input that fails is written to `testing/fuzz/found` and named; put into the corpus, it is tried by `cargo test -p fuzz`
//! for good.
//!
//! ```text
//! cargo xtask fuzz --seconds 60          # all targets
//! cargo xtask fuzz logs --seconds 600    # one
//! ```
//!
//! A new target is a function and one entry in [`TARGETS`].

pub mod engine;
pub mod files;
pub mod kernel;
pub mod logs;

/// Something that is tried.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Inputs of the right form.
    pub seeds: &'static [&'static [u8]],
    /// Tries one input; panics when something is wrong.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "logs", seeds: logs::SEEDS, run: logs::read },
    Target { name: "system-logs", seeds: logs::PATHS, run: logs::system_log },
    Target { name: "requests", seeds: serve::fuzz::REQUESTS, run: serve::fuzz::request },
    Target { name: "queries", seeds: serve::fuzz::QUERIES, run: serve::fuzz::query },
    Target { name: "frames", seeds: serve::fuzz::FRAMES, run: serve::fuzz::frames },
    Target { name: "manifests", seeds: files::MANIFESTS, run: files::manifest },
    Target { name: "configurations", seeds: files::CONFIGURATIONS, run: files::configuration },
    Target { name: "kubeconfigs", seeds: files::KUBECONFIGS, run: files::kubeconfig },
    Target { name: "checkpoints", seeds: files::CHECKPOINTS, run: files::checkpoint },
    Target { name: "resolvers", seeds: files::RESOLVERS, run: files::resolver },
    Target { name: "texts", seeds: files::TEXTS, run: files::text },
    Target { name: "mounts", seeds: kernel::MOUNTS, run: kernel::mounts },
    Target { name: "groups", seeds: kernel::GROUPS, run: kernel::groups },
    Target { name: "kernel", seeds: kernel::LOG, run: kernel::log },
    Target { name: "answers", seeds: pod::fuzz::ANSWERS, run: pod::fuzz::answer },
    Target { name: "watches", seeds: cluster::fuzz::WATCHES, run: cluster::fuzz::watch },
    Target { name: "volumes", seeds: plugins::fuzz::VOLUMES, run: plugins::fuzz::volume },
];
