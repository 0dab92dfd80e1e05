//! The page `/metrics/cadvisor`: every control group of the node's pods, and the machine. Pure.
//!
//! Names, labels and units are cAdvisor's as the Go kubelet sets it up; cAdvisor's readers of task states and of the load are off there, so
//! those series are 0 here as well. What the kernel does not count is left out.

use std::collections::HashMap;
use std::sync::Arc;

use host::cgroup::{GroupDetail, MemoryFigures, Pressure};
use host::fsx::{FilesystemFigures, NodeFilesystem};
use host::proc::{CpuTopology, DiskTraffic, InterfaceTraffic, Machine};

use crate::groups::{Group, Groups};
use crate::names::{Names, Owner};
use crate::text::{Family, Kind, Page, Value, label, labels};

const TASK_STATES: [&str; 5] = ["iowaiting", "running", "sleeping", "stopped", "uninterruptible"];

/// What the machine is.
#[derive(Clone, Debug, Default)]
pub(crate) struct MachineFacts {
    pub(crate) machine: Machine,
    pub(crate) topology: CpuTopology,
    /// Bytes.
    pub(crate) memory: u64,
    /// When it was started, seconds since the epoch.
    pub(crate) booted: i64,
}

/// A file system of the node with its figures.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFigures {
    pub(crate) place: NodeFilesystem,
    pub(crate) fs: FilesystemFigures,
    /// Zero for what is no disk.
    pub(crate) traffic: DiskTraffic,
}

/// What the page is made of.
pub(crate) struct Inputs<'a> {
    pub(crate) facts: &'a MachineFacts,
    pub(crate) names: &'a Names,
    pub(crate) groups: &'a Groups,
    pub(crate) devices: &'a [DeviceFigures],
    /// Names of images by the ids of containers and sandboxes.
    pub(crate) images: &'a HashMap<String, Arc<str>>,
    /// Seconds since the epoch.
    pub(crate) now: i64,
}

/// A group and what its series have in common.
struct Row<'a> {
    labels: String,
    /// ms since the epoch.
    at: i64,
    group: &'a Group,
    detail: &'a GroupDetail,
    /// Seconds since the epoch.
    started: i64,
    root: bool,
}

/// Writes the page.
pub(crate) fn page(inputs: &Inputs<'_>) -> String {
    let rows: Vec<Row<'_>> = inputs.groups.all.iter().filter_map(|group| row(inputs, group)).collect();
    // About sixty series of up to half a kilobyte for each.
    let mut page = Page::with_capacity(rows.len() * 24_000 + 16_384);
    version(&mut page, inputs.facts);
    cpu(&mut page, &rows);
    memory(&mut page, &rows);
    network(&mut page, &rows);
    processes(&mut page, &rows);
    pressure(&mut page, &rows);
    filesystems(&mut page, &rows, inputs.devices);
    spec(&mut page, &rows, inputs);
    page.family("container_scrape_error", Kind::Gauge, "1 when the groups could not be read, else 0.").sample(
        &[],
        0,
        None,
    );
    machine(&mut page, inputs.facts);
    page.into_text()
}

fn row<'a>(inputs: &Inputs<'a>, group: &'a Group) -> Option<Row<'a>> {
    let names = inputs.names;
    let pod = |at: usize| names.pods.get(at).map_or(("", ""), |p| (p.namespace.as_str(), p.name.as_str()));
    let image = |id: &str| inputs.images.get(id).map_or("", |i| &**i);
    let ns_to_s = |ns: i64| ns / 1_000_000_000;
    let (container, id, pod_name, started) = match group.owner {
        Owner::Pod(at) => ("", "", pod(at), None),
        Owner::Sandbox(at) => {
            let sandbox = names.pods.get(at)?;
            ("", sandbox.sandbox.as_str(), pod(at), Some(ns_to_s(sandbox.created)))
        }
        Owner::Container(at) => {
            let c = names.containers.get(at)?;
            (c.name.as_str(), c.id.as_str(), pod(c.pod), Some(ns_to_s(c.created)))
        }
        Owner::Other => ("", "", ("", ""), None),
    };
    let root = group.path == "/";
    let made = group.figures.created.map_or(0, |t| t.as_second()).max(inputs.facts.booted);
    Some(Row {
        labels: labels(&[
            ("container", container),
            ("id", &group.path),
            ("image", image(id)),
            ("name", id),
            ("namespace", pod_name.0),
            ("pod", pod_name.1),
        ]),
        at: group.at.as_millisecond(),
        group,
        detail: group.figures.detail.as_ref()?,
        started: if root { inputs.facts.booted } else { started.unwrap_or(made) },
        root,
    })
}

/// One series for each row that has a value.
fn each(mut family: Family<'_>, rows: &[Row<'_>], value: impl Fn(&Row<'_>) -> Option<Value>) {
    for row in rows {
        if let Some(value) = value(row) {
            family.sample(&[&row.labels], value, Some(row.at));
        }
    }
}

fn version(page: &mut Page, facts: &MachineFacts) {
    let own = labels(&[
        ("cadvisorRevision", ""),
        ("cadvisorVersion", ""),
        ("dockerVersion", ""),
        ("kernelVersion", &facts.machine.kernel_version),
        ("osVersion", &facts.machine.os_image),
    ]);
    page.family("cadvisor_version_info", Kind::Gauge, "What this page is made on; the value is always 1.").sample(
        &[&own],
        1,
        None,
    );
}

fn cpu(page: &mut Page, rows: &[Row<'_>]) {
    type Counted = fn(&GroupDetail) -> Value;
    let throttling: [(&'static str, &'static str, Counted); 5] = [
        ("container_cpu_cfs_burst_periods_total", "Periods in which the quota was exceeded by a burst.", |d| {
            d.throttling.bursts.into()
        }),
        ("container_cpu_cfs_burst_seconds_total", "Time of such bursts, seconds.", |d| {
            Value::ns(d.throttling.burst_ns)
        }),
        ("container_cpu_cfs_periods_total", "Periods of the CPU quota.", |d| d.throttling.periods.into()),
        ("container_cpu_cfs_throttled_periods_total", "Periods in which the quota ran out.", |d| {
            d.throttling.throttled.into()
        }),
        ("container_cpu_cfs_throttled_seconds_total", "Time without CPU because of the quota, seconds.", |d| {
            Value::ns(d.throttling.throttled_ns)
        }),
    ];
    for (name, help, value) in throttling {
        let family = page.family(name, Kind::Counter, help);
        each(family, rows, |r| r.detail.quota.map(|_| value(r.detail)));
    }
    for name in ["container_cpu_load_average_10s", "container_cpu_load_d_average_10s"] {
        each(page.family(name, Kind::Gauge, "Load of the group; not counted, as in Go's kubelet."), rows, |_| {
            Some(Value::Whole(0))
        });
    }
    let family = page.family("container_cpu_system_seconds_total", Kind::Counter, "CPU time in the kernel, seconds.");
    each(family, rows, |r| r.group.figures.cpu_ns.map(|_| Value::ns(r.detail.system_ns)));
    let mut family = page.family("container_cpu_usage_seconds_total", Kind::Counter, "CPU time, seconds.");
    for row in rows {
        if let Some(ns) = row.group.figures.cpu_ns {
            family.sample(&[&row.labels, "cpu=\"total\""], Value::ns(ns), Some(row.at));
        }
    }
    let family = page.family("container_cpu_user_seconds_total", Kind::Counter, "CPU time in user mode, seconds.");
    each(family, rows, |r| r.group.figures.cpu_ns.map(|_| Value::ns(r.detail.user_ns)));
}

fn memory(page: &mut Page, rows: &[Row<'_>]) {
    type Counted = fn(&MemoryFigures, &GroupDetail) -> u64;
    let all: [(&'static str, Kind, &'static str, Counted); 11] = [
        ("container_memory_cache", Kind::Gauge, "Page cache, bytes.", |m, _| m.cache),
        ("container_memory_failcnt", Kind::Counter, "Times that the memory limit was hit.", |_, d| d.fail_count),
        ("container_memory_kernel_usage", Kind::Gauge, "Kernel memory, bytes.", |_, d| d.kernel),
        ("container_memory_mapped_file", Kind::Gauge, "Mapped files, bytes.", |m, _| m.mapped_file),
        ("container_memory_max_usage_bytes", Kind::Gauge, "Highest memory usage so far, bytes.", |_, d| d.max_usage),
        ("container_memory_rss", Kind::Gauge, "Anonymous memory, bytes.", |m, _| m.rss),
        ("container_memory_swap", Kind::Gauge, "Swap in use, bytes.", |m, _| m.swap),
        ("container_memory_total_active_file_bytes", Kind::Gauge, "File pages on the active list, bytes.", |m, _| {
            m.active_file
        }),
        (
            "container_memory_total_inactive_file_bytes",
            Kind::Gauge,
            "File pages on the inactive list, bytes.",
            |m, _| m.inactive_file,
        ),
        ("container_memory_usage_bytes", Kind::Gauge, "Memory in use, page cache included, bytes.", |m, _| m.usage),
        (
            "container_memory_working_set_bytes",
            Kind::Gauge,
            "Memory in use less inactive file pages, bytes.",
            |m, _| m.working_set,
        ),
    ];
    for (name, kind, help, value) in all {
        let family = page.family(name, kind, help);
        each(family, rows, |r| r.group.figures.memory.as_ref().map(|m| value(m, r.detail).into()));
    }
    let mut family = page.family("container_memory_failures_total", Kind::Counter, "Page faults.");
    for row in rows {
        let Some(memory) = &row.group.figures.memory else { continue };
        for (kind, value) in [("pgfault", memory.page_faults), ("pgmajfault", memory.major_page_faults)] {
            for scope in ["container", "hierarchy"] {
                let own = labels(&[("failure_type", kind), ("scope", scope)]);
                family.sample(&[&row.labels, &own], value, Some(row.at));
            }
        }
    }
    let family =
        page.family("container_oom_events_total", Kind::Counter, "Processes that were ended for want of memory.");
    each(family, rows, |r| Some(r.detail.oom_kills.into()));
}

fn network(page: &mut Page, rows: &[Row<'_>]) {
    type Counted = fn(&InterfaceTraffic) -> u64;
    let all: [(&'static str, &'static str, Counted); 8] = [
        ("container_network_receive_bytes_total", "Bytes received.", |i| i.received.bytes),
        ("container_network_receive_errors_total", "Errors while receiving.", |i| i.received.errors),
        ("container_network_receive_packets_dropped_total", "Received packets that were dropped.", |i| {
            i.received.dropped
        }),
        ("container_network_receive_packets_total", "Packets received.", |i| i.received.packets),
        ("container_network_transmit_bytes_total", "Bytes sent.", |i| i.sent.bytes),
        ("container_network_transmit_errors_total", "Errors while sending.", |i| i.sent.errors),
        ("container_network_transmit_packets_dropped_total", "Packets dropped instead of sent.", |i| i.sent.dropped),
        ("container_network_transmit_packets_total", "Packets sent.", |i| i.sent.packets),
    ];
    for (name, help, value) in all {
        let mut family = page.family(name, Kind::Counter, help);
        for row in rows {
            for interface in row.group.interfaces.iter().flatten() {
                let own = label("interface", &interface.name);
                family.sample(&[&row.labels, &own], value(interface), Some(row.at));
            }
        }
    }
}

fn processes(page: &mut Page, rows: &[Row<'_>]) {
    type Counted = fn(&Row<'_>) -> u64;
    let all: [(&'static str, &'static str, Counted); 5] = [
        ("container_file_descriptors", "File descriptors that the group's processes have open.", |r| {
            r.group.open.descriptors
        }),
        ("container_processes", "Processes of the group.", |r| r.detail.processes.len() as u64),
        ("container_sockets", "Sockets that the group's processes have open.", |r| r.group.open.sockets),
        ("container_threads", "Threads of the group and those below.", |r| r.detail.tasks.unwrap_or_default()),
        ("container_threads_max", "Threads that it may have; 0: any number.", |r| {
            r.detail.tasks_max.unwrap_or_default()
        }),
    ];
    for (name, help, value) in all {
        each(page.family(name, Kind::Gauge, help), rows, |r| Some(value(r).into()));
    }
    let mut family =
        page.family("container_tasks_state", Kind::Gauge, "Tasks by state; not counted, as in Go's kubelet.");
    for row in rows {
        for state in TASK_STATES {
            family.sample(&[&row.labels, &label("state", state)], 0, Some(row.at));
        }
    }
    let mut family =
        page.family("container_ulimits_soft", Kind::Gauge, "Soft limits of the first process; -1: unlimited.");
    for row in rows {
        if let Some(limit) = row.group.open_limit {
            family.sample(&[&row.labels, "ulimit=\"max_open_files\""], Value::Signed(limit), Some(row.at));
        }
    }
}

fn pressure(page: &mut Page, rows: &[Row<'_>]) {
    type Which = fn(&Row<'_>) -> Option<Pressure>;
    let resources: [([&'static str; 2], Which); 3] = [
        (["container_pressure_cpu_stalled_seconds_total", "container_pressure_cpu_waiting_seconds_total"], |r| {
            r.group.figures.pressure.cpu
        }),
        (["container_pressure_io_stalled_seconds_total", "container_pressure_io_waiting_seconds_total"], |r| {
            r.group.figures.pressure.io
        }),
        (["container_pressure_memory_stalled_seconds_total", "container_pressure_memory_waiting_seconds_total"], |r| {
            r.group.figures.pressure.memory
        }),
    ];
    for ([stalled, waiting], which) in resources {
        let family = page.family(stalled, Kind::Counter, "Time that all tasks waited for the resource, seconds.");
        each(family, rows, |r| which(r).map(|p| Value::us(p.full.total)));
        let family = page.family(waiting, Kind::Counter, "Time that some task waited for the resource, seconds.");
        each(family, rows, |r| which(r).map(|p| Value::us(p.some.total)));
    }
}

fn filesystems(page: &mut Page, rows: &[Row<'_>], devices: &[DeviceFigures]) {
    let Some(root) = rows.iter().find(|r| r.root) else { return };
    type Counted = fn(&DeviceFigures) -> Value;
    let (counter, gauge) = (Kind::Counter, Kind::Gauge);
    let all: [(&'static str, Kind, &'static str, Counted); 15] = [
        ("container_fs_inodes_free", gauge, "Inodes that are free.", |d| d.fs.inodes_free.into()),
        ("container_fs_inodes_total", gauge, "Inodes.", |d| d.fs.inodes.into()),
        ("container_fs_io_current", gauge, "Requests in flight.", |d| d.traffic.in_flight.into()),
        ("container_fs_io_time_seconds_total", counter, "Time with requests in flight, seconds.", |d| {
            Value::ms(d.traffic.busy_ms)
        }),
        ("container_fs_io_time_weighted_seconds_total", counter, "The same, weighted by their number.", |d| {
            Value::ms(d.traffic.weighted_ms)
        }),
        ("container_fs_limit_bytes", gauge, "Size of the file system, bytes.", |d| d.fs.capacity.into()),
        ("container_fs_read_seconds_total", counter, "Time spent reading, seconds.", |d| Value::ms(d.traffic.read_ms)),
        ("container_fs_reads_merged_total", counter, "Reads merged with others.", |d| d.traffic.reads_merged.into()),
        ("container_fs_reads_total", counter, "Reads.", |d| d.traffic.reads.into()),
        ("container_fs_sector_reads_total", counter, "Sectors read.", |d| d.traffic.sectors_read.into()),
        ("container_fs_sector_writes_total", counter, "Sectors written.", |d| d.traffic.sectors_written.into()),
        ("container_fs_usage_bytes", gauge, "Bytes in use on the file system.", |d| d.fs.used.into()),
        ("container_fs_write_seconds_total", counter, "Time spent writing, seconds.", |d| {
            Value::ms(d.traffic.write_ms)
        }),
        ("container_fs_writes_merged_total", counter, "Writes merged with others.", |d| d.traffic.writes_merged.into()),
        ("container_fs_writes_total", counter, "Writes.", |d| d.traffic.writes.into()),
    ];
    let own: Vec<String> = devices.iter().map(|d| label("device", &d.place.device)).collect();
    for (name, kind, help, value) in all {
        let mut family = page.family(name, kind, help);
        for (device, own) in devices.iter().zip(&own) {
            family.sample(&[&root.labels, own], value(device), Some(root.at));
        }
    }
}

/// What the groups are set to; these series have no time of their own.
fn spec(page: &mut Page, rows: &[Row<'_>], inputs: &Inputs<'_>) {
    let mut each = |name: &'static str, help: &'static str, value: &dyn Fn(&Row<'_>) -> Option<u64>| {
        let mut family = page.family(name, Kind::Gauge, help);
        for row in rows {
            if let Some(value) = value(row) {
                family.sample(&[&row.labels], value, None);
            }
        }
    };
    let memory = |r: &Row<'_>, limit: Option<u64>| r.group.figures.memory.map(|_| limit.unwrap_or_default());
    each("container_spec_cpu_period", "Period of the CPU quota, µs.", &|r| Some(r.detail.period));
    each("container_spec_cpu_quota", "CPU quota in each period, µs.", &|r| r.detail.quota);
    each("container_spec_cpu_shares", "CPU shares.", &|r| Some(r.detail.shares));
    each("container_spec_memory_limit_bytes", "Memory limit, bytes; 0: none.", &|r| {
        let own = r.group.figures.memory.and_then(|m| m.limit);
        memory(r, if r.root { Some(inputs.facts.memory) } else { own })
    });
    each("container_spec_memory_reservation_limit_bytes", "Memory kept for the group, bytes; 0: none.", &|r| {
        memory(r, r.detail.reservation)
    });
    each("container_spec_memory_swap_limit_bytes", "Limit of swap, bytes; 0: none.", &|r| {
        let own = r.group.figures.memory.and_then(|m| m.swap_limit);
        memory(r, if r.root { Some(inputs.facts.machine.swap) } else { own })
    });
    each("container_start_time_seconds", "When the group was made, seconds since the epoch.", &|r| {
        u64::try_from(r.started).ok()
    });
    let mut family = page.family("container_last_seen", Kind::Gauge, "When the group was last seen, seconds.");
    for row in rows {
        family.sample(&[&row.labels], Value::Signed(inputs.now), Some(row.at));
    }
    let mut family =
        page.family("container_health_state", Kind::Gauge, "The runtime's own health check; -1: there is none.");
    for row in rows {
        family.sample(&[&row.labels], Value::Signed(-1), Some(row.at));
    }
}

fn machine(page: &mut Page, facts: &MachineFacts) {
    let own = labels(&[
        ("boot_id", &facts.machine.boot_id),
        ("machine_id", &facts.machine.machine_id),
        ("system_uuid", &facts.machine.system_uuid),
    ]);
    let topology = &facts.topology;
    for (name, help, value) in [
        ("machine_cpu_books", "CPU books.", topology.books),
        ("machine_cpu_cores", "Logical CPUs.", topology.cores),
        ("machine_cpu_drawers", "CPU drawers.", topology.drawers),
        ("machine_cpu_physical_cores", "Physical cores.", topology.physical_cores),
        ("machine_cpu_sockets", "CPU sockets.", topology.sockets),
        ("machine_memory_bytes", "Memory, bytes.", facts.memory),
        ("machine_swap_bytes", "Swap, bytes.", facts.machine.swap),
        // Needs a library of its vendor, which the Go kubelet is built without too.
        ("machine_nvm_avg_power_budget_watts", "Power budget of non-volatile memory.", 0),
    ] {
        page.family(name, Kind::Gauge, help).sample(&[&own], value, None);
    }
    let mut family = page.family("machine_nvm_capacity", Kind::Gauge, "Non-volatile memory by its mode, bytes.");
    for mode in ["app_direct_mode", "memory_mode"] {
        family.sample(&[&own, &label("mode", mode)], 0, None);
    }
    page.family("machine_scrape_error", Kind::Gauge, "1 when the machine could not be looked at, else 0.").sample(
        &[],
        0,
        None,
    );
}
