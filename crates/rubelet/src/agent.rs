//! The agent from start to end: configuration → start → run until a signal → drain.
//!
//! SIGTERM and SIGINT drain: servers answer what they have begun, workers end between two calls, containers are left alone. A second
//! signal, or the deadline, ends the process at once; the next one goes on from what the runtime shows.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use config::{Flags, HostFiles, Loaded, LogFormat, VersionRequest};
use host::cgroup::{CgroupLayout, CgroupVersion};
use model::report::Severity;
use telemetry::klog;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::cli::print;
use crate::wire::{self, Input};
use crate::{heap, node, version};

/// How long a drain may take.
const DRAIN: Duration = Duration::from_secs(5);
/// Threads that run tasks. The agent waits most of its time; more threads would only cost memory.
const THREADS: usize = 2;

/// How long a thread for calls that block (the disk, mostly) waits for the next one. tokio gives each call to the one that has waited longest, so with its
/// usual ten seconds the threads of one burst would stay for as long as there is any call every now and then.
const IDLE_THREAD: Duration = Duration::from_secs(1);

/// Runs the agent with kubelet flags; the process's exit code.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let flags = match config::parse_flags(args) {
        Ok(flags) => flags,
        Err(e) => return refuse(&e),
    };
    if flags.help() {
        print(&format!("{}\n", Flags::help_text()));
        return ExitCode::SUCCESS;
    }
    match flags.version() {
        Some(VersionRequest::Plain) => {
            print(&format!("Kubernetes {}\n", version::KUBERNETES));
            return ExitCode::SUCCESS;
        }
        Some(VersionRequest::Raw) => {
            print(&format!(
                "Kubernetes {} rubelet {} commit {}\n",
                version::KUBERNETES,
                version::RUBELET,
                version::COMMIT
            ));
            return ExitCode::SUCCESS;
        }
        Some(VersionRequest::Report(_)) | None => {}
    }
    let layout = match CgroupLayout::detect(Path::new(node::CGROUPS), Path::new(node::PROC)) {
        Ok(layout) => layout,
        Err(e) => return refuse(&format!("control groups cannot be used: {}", e.full())),
    };
    let loaded = load(&flags, &layout);
    let log = match start_log(&loaded) {
        Ok(log) => log,
        Err(e) => return refuse(&e),
    };
    for warning in flags.warnings() {
        warn!("{warning}");
    }
    for finding in &loaded.findings {
        match finding.severity {
            Severity::Error => error!("{finding}"),
            Severity::Warning => warn!("{finding}"),
            Severity::Ok => {}
        }
    }
    let refusal = node::refusal(&loaded.config);
    if let Some(reason) = &refusal {
        error!("{reason}");
    }
    if loaded.has_errors() || refusal.is_some() {
        error!("Failed to run kubelet: the configuration or this host must be changed first, see above");
        return ExitCode::FAILURE;
    }
    host::memory::keep_little();
    node::set_up_process(&loaded.config);
    let built = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_keep_alive(IDLE_THREAD)
        .enable_all()
        .build();
    let runtime = match built {
        Ok(runtime) => runtime,
        Err(e) => return refuse(&format!("threads cannot be started: {e}")),
    };
    let Loaded { config, gates, .. } = loaded;
    let code = runtime.block_on(live(Input { flags, config, gates, layout, log }));
    // Blocking calls that hang (a dead disk) must not keep the process alive.
    runtime.shutdown_background();
    code
}

/// Says why there is no start, before there is a log.
fn refuse(reason: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("rubelet: {reason}");
    ExitCode::FAILURE
}

fn load(flags: &Flags, layout: &CgroupLayout) -> Loaded {
    let host = config::Host {
        cgroup_v2: layout.version == CgroupVersion::V2,
        working_dir: std::env::current_dir().unwrap_or_else(|_| "/".into()),
    };
    config::load(flags, &HostFiles, &host)
}

fn start_log(loaded: &Loaded) -> Result<klog::Handle, Box<dyn Error>> {
    let logging = &loaded.config.logging;
    let vmodule: Vec<String> = logging.vmodule.iter().map(|m| format!("{}={}", m.file_pattern, m.verbosity)).collect();
    Ok(klog::init(klog::Options {
        format: if logging.format == LogFormat::Json { klog::Format::Json } else { klog::Format::Text },
        verbosity: i32::try_from(logging.verbosity).unwrap_or(i32::MAX),
        vmodule: klog::VModule::parse_list(&vmodule.join(","))?,
    })?)
}

/// Signals that end the agent.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn live(input: Input) -> ExitCode {
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(e) => return refuse(&format!("signals cannot be received: {e}")),
    };
    let started = tokio::select! {
        started = wire::start(input) => started,
        name = signals.next() => {
            info!(signal = name, "Stopped during start");
            return ExitCode::SUCCESS;
        }
    };
    let running = match started {
        Ok(running) => running,
        Err(e) => {
            error!(err = &*e as &dyn Error, "Failed to run kubelet");
            return ExitCode::FAILURE;
        }
    };
    info!(version = version::KUBERNETES, rubelet = version::RUBELET, "Started kubelet");
    notify(&host::sysd::Notice::Ready);
    running.tasks.spawn_until_stop(heap::give_back_what_bursts_leave());
    if let Some(period) = watchdog_period(|name| std::env::var(name).ok(), std::process::id()) {
        running.tasks.spawn_until_stop(watchdog(period, running.health, || notify(&host::sysd::Notice::Watchdog)));
    }
    let stop = CancellationToken::new();
    let servers: Vec<_> = running
        .servers
        .into_iter()
        .map(|server| {
            let stop = stop.clone();
            tokio::spawn(async move { server.run(stop).await.drain(DRAIN).await })
        })
        .collect();
    let name = signals.next().await;
    info!(signal = name, "Draining; containers are left running");
    notify(&host::sysd::Notice::Stopping);
    stop.cancel();
    let drain = async {
        let complete = running.tasks.drain(DRAIN).await;
        for server in servers {
            let _ = server.await;
        }
        complete
    };
    tokio::select! {
        complete = drain => if !complete {
            warn!(seconds = DRAIN.as_secs(), "Some work was cut off at the drain's deadline; the next start takes it up again");
        },
        name = signals.next() => warn!(signal = name, "Second signal, ending at once"),
    }
    ExitCode::SUCCESS
}

/// How often systemd wants to hear that we live: twice within `WatchdogSec` (sd_watchdog_enabled(3)); None: it does not, or means another process.
fn watchdog_period(environment: impl Fn(&str) -> Option<String>, own: u32) -> Option<Duration> {
    if environment("WATCHDOG_PID").is_some_and(|pid| pid.parse() != Ok(own)) {
        return None;
    }
    let micros: u64 = environment("WATCHDOG_USEC")?.parse().ok().filter(|n| *n > 0)?;
    Some(Duration::from_micros(micros) / 2)
}

/// Tells systemd that we live, for as long as all health checks pass: a stuck agent is restarted. Ends at the stop; systemd waits no more then.
async fn watchdog(period: Duration, health: serve::Health, tell: impl Fn()) {
    info!(interval = ?period, "Starting systemd watchdog with interval");
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match health.all() {
            Ok(()) => tell(),
            Err(reason) => {
                warn!(err = reason, "Do not notify watchdog this iteration as the kubelet is reportedly not healthy");
            }
        }
    }
}

/// Tells systemd, when it started us.
fn notify(notice: &host::sysd::Notice) {
    if let Ok(socket) = std::env::var("NOTIFY_SOCKET")
        && let Err(e) = host::sysd::notify(&socket, notice)
    {
        warn!(err = e.full(), "systemd cannot be notified");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn when_a_watchdog_waits() {
        let period = |variables: &[(&str, &str)]| {
            let variables: HashMap<_, _> = variables.iter().copied().collect();
            watchdog_period(|name| variables.get(name).map(|v| (*v).to_owned()), 7)
        };
        let ten = Some(Duration::from_secs(10));
        assert_eq!(period(&[("WATCHDOG_USEC", "20000000")]), ten);
        assert_eq!(period(&[("WATCHDOG_USEC", "20000000"), ("WATCHDOG_PID", "7")]), ten);
        for none in [
            &[][..],
            &[("WATCHDOG_USEC", "20000000"), ("WATCHDOG_PID", "8")],
            &[("WATCHDOG_USEC", "0")],
            &[("WATCHDOG_USEC", "x")],
            &[("WATCHDOG_PID", "7")],
        ] {
            assert_eq!(period(none), None, "{none:?}");
        }
    }
}
