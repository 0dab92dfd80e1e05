//! The project's own commands: `cargo xtask demo`, `cluster`, `test` (also called `ci`), `tidy`, `sim`, `bench`, `conformance`, `fuzz`, `soak`, `dist`,
//! `containerd`.

mod bench;
mod checks;
mod cluster;
mod conformance;
mod demo;
mod dependencies;
mod dist;
mod fake_bench;
mod hogs;
mod joined;
mod libtest;
mod named_tests;
mod node;
mod order;
mod package;
mod plot;
mod probes;
mod record;
mod scrapes;
mod setup;
mod shell;
mod soak;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};
use rig::Stage;
use shell::{Interrupted, Shell};

/// Commands of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run one pod on this machine with a private containerd and no control plane, and show how it comes up
    Demo {
        /// End by itself once the pod has run; the exit code says whether it did
        #[arg(long)]
        once: bool,
    },
    /// Run a control plane, a private containerd and one node that has joined it, and keep them until Ctrl-C
    Cluster {
        /// Another kubelet than rubelet
        #[arg(long, value_name = "PROGRAM")]
        kubelet: Option<PathBuf>,
        /// Take a deployment of ten through its life and end; the exit code says whether all went well
        #[arg(long)]
        once: bool,
    },
    /// Run formatting, lints, unit, property, wire-fake and end-to-end tests
    #[command(alias = "ci")]
    Test(test::Options),
    /// Remove what earlier runs left behind, and check the repository's own rules
    Tidy,
    /// Build rubelet as it is released, and make what a release consists of into target/dist: Debian package, image archive, SBOM, checksums
    Dist {
        /// Pack this program instead of a release build
        #[arg(long, value_name = "PROGRAM")]
        program: Option<PathBuf>,
        /// First watch which functions run, with valgrind, and write their list anew (crates/rubelet/functions.order)
        #[arg(long, conflicts_with = "program")]
        record: bool,
    },
    /// Measure rubelet, and beside it the Go kubelet when it is built (lab/build-reference kubelet)
    Bench {
        /// One short round instead of three full ones
        #[arg(long)]
        quick: bool,
        /// As the node of a control plane: so many pods of the API server, then an outage of it
        #[arg(long, value_name = "PODS")]
        joined: Option<usize>,
        /// What asking for figures costs with so many pods: the summary and the containers' metrics
        #[arg(long, value_name = "PODS")]
        scrapes: Option<usize>,
        /// How long that outage is, in minutes
        #[arg(long, value_name = "MINUTES", default_value_t = 10)]
        outage: u64,
        /// As the node of a control plane: how soon it acts on what probes find
        #[arg(long, conflicts_with = "joined")]
        probes: bool,
        /// As the node of a control plane: pods that take too many processes, too much memory, disk, inodes
        #[arg(long, conflicts_with_all = ["joined", "probes"])]
        hogs: bool,
        /// rubelet alone, as the node of a control plane, on a fake runtime: how memory and work grow with the number of pods
        #[arg(long, conflicts_with_all = ["joined", "scrapes", "probes", "hogs"])]
        fake: bool,
        /// Those numbers of pods
        #[arg(long, value_name = "PODS,...", value_delimiter = ',', default_values_t = [100, 500, 1000, 2000], requires = "fake")]
        pods: Vec<usize>,
    },
    /// Run Kubernetes' own node test suite against rubelet, or another kubelet, and compare with what the Go kubelet gets
    Conformance(conformance::Options),
    /// Try what strangers can put before rubelet, made up at random (testing/fuzz)
    Fuzz {
        /// Targets; none: all
        targets: Vec<String>,
        /// How long each is tried
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Of the randomness; another one tries other inputs
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Fifty pods that come and go under faults on a node of a control plane; at the end nothing may have leaked
    Soak(soak::Arguments),
    /// Play stories made from numbers on the simulated node (testing/sim), and tell of those that end badly
    #[command(disable_help_flag = true)]
    Sim {
        /// `--seeds N`, `--from N`, `--new N`; `--seed N` for one, with `--trace` for all that happens in it
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Start a private containerd with the test images and keep it until Ctrl-C
    Containerd {
        /// 2: the reference build (lab/build-reference containerd); 1: the system's package
        #[arg(default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
        which: u8,
    },
}

fn main() -> ExitCode {
    if let Some(list) = std::env::var_os(order::LIST) {
        return order::link(&list, std::env::args_os().skip(1).collect()).map_or_else(
            |e| {
                eprintln!("{e:#}");
                ExitCode::FAILURE
            },
            ExitCode::from,
        );
    }
    let arguments = Arguments::parse();
    let result = Shell::new().and_then(|shell| match arguments.command {
        Task::Demo { once } => demo::run(&shell, once),
        Task::Cluster { kubelet, once } => cluster::run(&shell, kubelet.as_deref(), once),
        Task::Test(options) => test::run(&shell, &options),
        Task::Tidy => tidy(&shell),
        Task::Dist { program, record } => {
            if record {
                record::run(&shell)?;
            }
            dist::run(&shell, program)
        }
        Task::Bench { fake: true, pods, .. } => fake_bench::run(&shell, &pods),
        Task::Bench { probes: true, .. } => probes::run(&shell),
        Task::Bench { hogs: true, .. } => hogs::run(&shell),
        Task::Bench { joined: Some(pods), outage, .. } => {
            joined::run(&shell, pods, std::time::Duration::from_secs(outage * 60))
        }
        Task::Bench { scrapes: Some(pods), .. } => scrapes::run(&shell, pods),
        Task::Bench { quick, .. } => bench::run(&shell, quick),
        Task::Conformance(options) => conformance::run(&shell, &options),
        Task::Fuzz { targets, seconds, seed } => fuzz(&targets, seconds, seed),
        Task::Soak(arguments) => soak::run(&shell, &arguments),
        Task::Sim { arguments } => Ok(setup::sim(&arguments).status().context("cannot start cargo")?.success()),
        Task::Containerd { which } => containerd(&shell, which),
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) if e.is::<Interrupted>() => {
            eprintln!("interrupted; what was started is removed again");
            ExitCode::from(130)
        }
        Err(e) => {
            eprintln!("cargo xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Removes what killed runs left; true when nothing of theirs is there any more.
fn remove_remains() -> bool {
    let mut clean = true;
    for remains in rig::remains() {
        let dir = remains.dir.display();
        match remains.wipe() {
            Ok(()) => println!("removed what an earlier {} left: {dir}", remains.record.kind),
            Err(e) => {
                clean = false;
                eprintln!("an earlier {} left {dir}, and it cannot be removed: {e:#}", remains.record.kind);
            }
        }
    }
    clean
}

fn tidy(shell: &Shell) -> Result<bool> {
    let root_user = rustix::process::geteuid().is_root();
    if !root_user && !rig::remains().is_empty() {
        eprintln!("earlier runs left something in /var/tmp: run `cargo xtask tidy` as root to remove it");
    }
    let clean = !root_user || remove_remains();
    Ok(checks::run(shell)? && clean)
}

fn fuzz(targets: &[String], seconds: u64, seed: u64) -> Result<bool> {
    let mut command = setup::cargo();
    command.args(["run", "--release", "--package", "fuzz", "--"]).args(targets);
    command.args(["--seconds", &seconds.to_string(), "--seed", &seed.to_string()]);
    Ok(command.status().context("cannot start cargo")?.success())
}

fn containerd(shell: &Shell, which: u8) -> Result<bool> {
    setup::prepare(shell)?;
    let runtime = if which == 2 { setup::reference(shell)? } else { setup::system()? };
    let mut stage = Stage::create("containerd")?;
    stage.start_containerd(&runtime, &setup::images(shell)?, true)?;
    println!("containerd {} at {}", runtime.version, stage.socket().display());
    println!(
        "end-to-end tests on it: RUBELET_E2E_CONTAINERD_SOCK={} cargo test -p e2e -- --include-ignored --test-threads=1",
        stage.socket().display()
    );
    println!("Ctrl-C ends it and removes what ran in it.");
    while !shell.stopped() {
        std::thread::sleep(Duration::from_millis(100));
    }
    stage.close().map_err(|e| anyhow!("not clean: {e:#}; `cargo xtask tidy` tries again"))?;
    Ok(true)
}
