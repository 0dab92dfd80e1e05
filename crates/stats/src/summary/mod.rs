//! The answer of `/stats/summary`: Go's field names, order and spelling of numbers. What is not known is left out.

mod compose;
#[cfg(test)]
mod tests;

use std::io;

use host::cgroup::{Pressure, PressureLine};
use jiff::Timestamp;
use serde::{Serialize, Serializer};

pub(crate) use compose::{Inputs, NodeFacts, compose};

/// The whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct Summary<'a> {
    node: NodeStats<'a>,
    pods: Vec<PodStats<'a>>,
}

impl Summary<'_> {
    /// The JSON text as Go writes it: indented by one space.
    ///
    /// # Errors
    /// Never for these types; the caller gets what the library says.
    pub(crate) fn to_json(&self) -> io::Result<Vec<u8>> {
        let mut text = Vec::with_capacity(4096 + self.pods.len() * 4096);
        let mut serializer =
            serde_json::Serializer::with_formatter(&mut text, serde_json::ser::PrettyFormatter::with_indent(b" "));
        self.serialize(&mut serializer)?;
        Ok(text)
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStats<'a> {
    node_name: &'a str,
    system_containers: Vec<ContainerStats<'a>>,
    #[serde(serialize_with = "time")]
    start_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<Cpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<RuntimeStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rlimit: Option<Rlimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RuntimeStats {
    #[serde(skip_serializing_if = "Option::is_none")]
    image_fs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container_fs: Option<Fs>,
}

#[derive(Debug, Serialize)]
struct Rlimit {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    maxpid: u64,
    curproc: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodStats<'a> {
    pod_ref: PodRef<'a>,
    #[serde(serialize_with = "time")]
    start_time: Timestamp,
    containers: Vec<ContainerStats<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<Cpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty", rename = "volume")]
    volumes: Vec<VolumeStats<'a>>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "ephemeral-storage")]
    ephemeral_storage: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "process_stats")]
    process_stats: Option<ProcessStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
}

#[derive(Debug, Serialize)]
struct PodRef<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStats<'a> {
    name: &'a str,
    #[serde(serialize_with = "time")]
    start_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<Cpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    io: Option<Io>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rootfs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logs: Option<Fs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<Swap>,
}

#[derive(Debug, Serialize)]
struct ProcessStats {
    process_count: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cpu {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_nano_cores: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_core_nano_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<Psi>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    working_set_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rss_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    major_page_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<Psi>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Io {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    psi: Option<Psi>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Swap {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    swap_available_bytes: Option<u64>,
    swap_usage_bytes: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Psi {
    full: PsiLine,
    some: PsiLine,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PsiLine {
    /// µs altogether, as the kernel counts and Go passes on.
    total: u64,
    #[serde(serialize_with = "float")]
    avg10: f64,
    #[serde(serialize_with = "float")]
    avg60: f64,
    #[serde(serialize_with = "float")]
    avg300: f64,
}

impl From<Pressure> for Psi {
    fn from(pressure: Pressure) -> Self {
        let line = |l: PressureLine| PsiLine { total: l.total, avg10: l.avg10, avg60: l.avg60, avg300: l.avg300 };
        Self { full: line(pressure.full), some: line(pressure.some) }
    }
}

#[derive(Debug, Serialize)]
struct Network<'a> {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    /// The interface that is a pod's own, `eth0`.
    #[serde(flatten)]
    own: Option<Interface<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface<'a>>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Interface<'a> {
    name: &'a str,
    rx_bytes: u64,
    rx_errors: u64,
    tx_bytes: u64,
    tx_errors: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Fs {
    #[serde(serialize_with = "time")]
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes_free: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes_used: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumeStats<'a> {
    #[serde(flatten)]
    fs: Fs,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pvc_ref: Option<PvcRef<'a>>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "volumeHealthStats")]
    health: Option<VolumeHealth>,
}

#[derive(Debug, Serialize)]
struct VolumeHealth {
    abnormal: bool,
}

#[derive(Debug, Serialize)]
struct PvcRef<'a> {
    name: &'a str,
    namespace: &'a str,
}

/// Whole seconds, as Go's API types have them.
fn time<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    let second = Timestamp::from_second(time.as_second()).unwrap_or(*time);
    serializer.collect_str(&second)
}

/// A whole number without a decimal point, as by Go.
fn float<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if number.fract() == 0.0 && (0.0..1e15).contains(number) {
        serializer.serialize_u64(*number as u64)
    } else {
        serializer.serialize_f64(*number)
    }
}
