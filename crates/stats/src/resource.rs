//! The page `/metrics/resource`: CPU and memory of the node, its pods and containers (KEP-1748, KEP-2371). Pure.

use cri_api::v1;
use host::cgroup::GroupFigures;
use jiff::Timestamp;

use crate::groups::Groups;
use crate::names::{Names, Owner};
use crate::text::{Kind, Page, Value, labels};

/// One series of the page.
#[derive(Clone, Debug, Default)]
struct Row {
    labels: String,
    /// ms since the epoch.
    at: i64,
    cpu_ns: Option<u64>,
    working_set: Option<u64>,
    swap: Option<u64>,
    swap_limit: Option<u64>,
    /// ns since the epoch.
    started: Option<u64>,
}

impl Row {
    fn new(labels: String, at: Timestamp, figures: &GroupFigures) -> Self {
        let swap = figures.memory.filter(|m| m.swap_counted);
        Self {
            labels,
            at: at.as_millisecond(),
            cpu_ns: figures.cpu_ns,
            working_set: figures.memory.map(|m| m.working_set),
            swap: swap.map(|m| m.swap),
            swap_limit: None,
            started: None,
        }
    }
}

/// Writes the page. `fallback`: what the runtime says of containers that have no group here, by id. `swap_total`: the node's swap, bytes.
/// `None` for the groups: they could not be read.
pub(crate) fn page(
    found: Option<(&Names, &Groups)>,
    fallback: &std::collections::HashMap<String, v1::ContainerStats>,
    swap_total: u64,
) -> String {
    let mut page = Page::with_capacity(4096);
    if let Some((names, groups)) = found {
        let (node, mut pods, mut containers) = rows(names, groups, swap_total);
        told(names, fallback, &mut containers);
        pods.sort_by(|a, b| a.labels.cmp(&b.labels));
        containers.sort_by(|a, b| a.labels.cmp(&b.labels));
        write(&mut page, &node, &pods, &containers);
    }
    page.family("resource_scrape_error", Kind::Gauge, "1 when the figures could not be read, else 0.").sample(
        &[],
        u64::from(found.is_none()),
        None,
    );
    page.into_text()
}

fn rows(names: &Names, groups: &Groups, swap_total: u64) -> (Vec<Row>, Vec<Row>, Vec<Row>) {
    let (mut node, mut pods, mut containers) = (Vec::new(), Vec::new(), Vec::new());
    for group in &groups.all {
        let row = |labels: String| Row::new(labels, group.at, &group.figures);
        match group.owner {
            Owner::Other if group.path == "/" => {
                let swap = group.figures.memory.map(|m| m.swap);
                node.push(Row { swap, ..row(String::new()) });
            }
            Owner::Pod(at) => {
                if let Some(pod) = names.pods.get(at).filter(|_| names.containers.iter().any(|c| c.pod == at)) {
                    pods.push(row(labels(&[("namespace", &pod.namespace), ("pod", &pod.name)])));
                }
            }
            Owner::Container(at) => {
                let Some(container) = names.containers.get(at) else { continue };
                let limit = group.figures.memory.and_then(|m| m.swap_limit).unwrap_or(swap_total).min(swap_total);
                containers.push(Row {
                    swap_limit: Some(limit),
                    started: u64::try_from(container.created).ok(),
                    ..row(container_labels(names, at))
                });
            }
            Owner::Sandbox(_) | Owner::Other => {}
        }
    }
    (node, pods, containers)
}

fn container_labels(names: &Names, at: usize) -> String {
    let (Some(container), none) = (names.containers.get(at), String::new()) else { return String::new() };
    let (namespace, pod) = names.pods.get(container.pod).map_or((&none, &none), |p| (&p.namespace, &p.name));
    labels(&[("container", &container.name), ("namespace", namespace), ("pod", pod)])
}

/// Rows of containers that only the runtime can tell of.
fn told(names: &Names, fallback: &std::collections::HashMap<String, v1::ContainerStats>, rows: &mut Vec<Row>) {
    for (at, container) in names.containers.iter().enumerate() {
        let Some(told) = fallback.get(&container.id) else { continue };
        rows.push(Row {
            labels: container_labels(names, at),
            at: told.cpu.as_ref().map_or(0, |c| c.timestamp / 1_000_000),
            cpu_ns: told.cpu.as_ref().and_then(|c| Some(c.usage_core_nano_seconds?.value)),
            working_set: told.memory.as_ref().and_then(|m| Some(m.working_set_bytes?.value)),
            swap: told.swap.as_ref().and_then(|s| Some(s.swap_usage_bytes?.value)),
            swap_limit: None,
            started: u64::try_from(container.created).ok(),
        });
    }
}

type Shown = fn(&Row) -> Option<Value>;

fn write(page: &mut Page, node: &[Row], pods: &[Row], containers: &[Row]) {
    let cpu: Shown = |row| row.cpu_ns.map(Value::ns);
    let memory: Shown = |row| row.working_set.map(Value::Whole);
    let swap: Shown = |row| row.swap.map(Value::Whole);
    let (counter, gauge) = (Kind::Counter, Kind::Gauge);
    for (rows, name, kind, help, value, timed) in [
        (containers, "container_cpu_usage_seconds_total", counter, "CPU time of the container, seconds.", cpu, true),
        (containers, "container_memory_working_set_bytes", gauge, "Working set of the container, bytes.", memory, true),
        (
            containers,
            "container_start_time_seconds",
            gauge,
            "When the container was made, seconds since the epoch.",
            (|row| row.started.map(Value::ns)) as Shown,
            false,
        ),
        (
            containers,
            "container_swap_limit_bytes",
            gauge,
            "Swap that the container may use, bytes.",
            (|row| row.swap_limit.map(Value::Whole)) as Shown,
            true,
        ),
        (containers, "container_swap_usage_bytes", gauge, "Swap that the container uses, bytes.", swap, true),
        (node, "node_cpu_usage_seconds_total", counter, "CPU time of the node, seconds.", cpu, true),
        (node, "node_memory_working_set_bytes", gauge, "Working set of the node, bytes.", memory, true),
        (node, "node_swap_usage_bytes", gauge, "Swap in use on the node, bytes.", swap, true),
        (pods, "pod_cpu_usage_seconds_total", counter, "CPU time of the pod, seconds.", cpu, true),
        (pods, "pod_memory_working_set_bytes", gauge, "Working set of the pod, bytes.", memory, true),
        (pods, "pod_swap_usage_bytes", gauge, "Swap that the pod uses, bytes.", swap, true),
    ] {
        let mut family = page.family(name, kind, help);
        for row in rows {
            if let Some(value) = value(row) {
                family.sample(&[&row.labels], value, timed.then_some(row.at));
            }
        }
    }
}
