//! `process_*`: figures of this process, read from /proc when a page is asked for.

use procfs::process::{LimitValue, Process};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge, Opts};

struct Figure {
    name: &'static str,
    help: &'static str,
    counter: bool,
    read: fn(&Process) -> Option<f64>,
}

const FIGURES: [Figure; 9] = [
    Figure {
        name: "process_cpu_seconds_total",
        help: "CPU time that the process used in user and kernel mode, in seconds.",
        counter: true,
        read: |process| {
            let stat = process.stat().ok()?;
            Some((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
        },
    },
    Figure {
        name: "process_max_fds",
        help: "Limit of open file descriptors.",
        counter: false,
        read: |process| Some(limit(process.limits().ok()?.max_open_files.soft_limit)),
    },
    Figure {
        name: "process_open_fds",
        help: "Open file descriptors.",
        counter: false,
        read: |process| Some(process.fd_count().ok()? as f64),
    },
    Figure {
        name: "process_resident_memory_bytes",
        help: "Resident memory in bytes.",
        counter: false,
        read: |process| Some((process.stat().ok()?.rss * procfs::page_size()) as f64),
    },
    Figure {
        name: "process_virtual_memory_bytes",
        help: "Virtual memory in bytes.",
        counter: false,
        read: |process| Some(process.stat().ok()?.vsize as f64),
    },
    Figure {
        name: "process_virtual_memory_max_bytes",
        help: "Limit of virtual memory in bytes.",
        counter: false,
        read: |process| Some(limit(process.limits().ok()?.max_address_space.soft_limit)),
    },
    Figure {
        name: "process_network_receive_bytes_total",
        help: "Bytes received over IP in the network namespace of the process.",
        counter: true,
        read: |_| ip_bytes("InOctets"),
    },
    Figure {
        name: "process_network_transmit_bytes_total",
        help: "Bytes sent over IP in the network namespace of the process.",
        counter: true,
        read: |_| ip_bytes("OutOctets"),
    },
    START_TIME,
];

const START_TIME: Figure = Figure {
    name: "process_start_time_seconds",
    help: "When the process started, in seconds since the epoch.",
    counter: false,
    read: |process| {
        let ticks = process.stat().ok()?.starttime as f64 / procfs::ticks_per_second() as f64;
        Some(procfs::boot_time_secs().ok()? as f64 + ticks)
    },
};

/// No limit is the kernel's 2^64-1, as Go's client shows it.
fn limit(value: LimitValue) -> f64 {
    match value {
        LimitValue::Unlimited => u64::MAX as f64,
        LimitValue::Value(value) => value as f64,
    }
}

/// A field of the `IpExt` line of /proc/self/net/netstat: one line of names, then one of values.
fn ip_bytes(field: &str) -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/net/netstat").ok()?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split(' ').position(|name| name == field)?;
    values.split(' ').nth(at)?.parse().ok()
}

/// Reads /proc/self anew at each scrape; a figure that cannot be read is left out.
pub(super) struct ProcessCollector {
    figures: &'static [Figure],
    descs: Vec<Desc>,
}

impl ProcessCollector {
    /// All `process_*` figures of the main page.
    pub(super) fn all() -> prometheus::Result<Self> {
        Self::with(&FIGURES)
    }

    /// The start time alone, as on the pages beside the main one.
    pub(super) fn start_time() -> prometheus::Result<Self> {
        const ONLY: &[Figure] = &[START_TIME];
        Self::with(ONLY)
    }

    fn with(figures: &'static [Figure]) -> prometheus::Result<Self> {
        let descs = figures
            .iter()
            .map(|figure| Desc::new(figure.name.into(), figure.help.into(), Vec::new(), Default::default()))
            .collect::<prometheus::Result<_>>()?;
        Ok(Self { figures, descs })
    }
}

impl Collector for ProcessCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Ok(process) = Process::myself() else {
            return Vec::new();
        };
        let mut families = Vec::new();
        for figure in self.figures {
            let Some(value) = (figure.read)(&process) else {
                continue;
            };
            let opts = Opts::new(figure.name, figure.help);
            if figure.counter {
                if let Ok(counter) = Counter::with_opts(opts) {
                    counter.inc_by(value);
                    families.extend(counter.collect());
                }
            } else if let Ok(gauge) = Gauge::with_opts(opts) {
                gauge.set(value);
                families.extend(gauge.collect());
            }
        }
        families
    }
}
