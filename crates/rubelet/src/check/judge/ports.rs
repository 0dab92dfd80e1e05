//! The ports that the agent listens on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use config::{KubeletConfiguration, port_number};

use super::super::facts::{HostFacts, Listener};
use super::{Finding, error, ok, unknown, warn};

/// A port that the agent wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) what: &'static str,
    /// The field that sets it.
    pub(crate) field: &'static str,
    pub(crate) address: SocketAddr,
}

/// The ports of this configuration; 0 is none.
pub(crate) fn wanted_ports(config: &KubeletConfiguration) -> Vec<Wanted> {
    let address = |text: &str, port| {
        // A wrong address is a finding of the configuration.
        let ip = text.parse::<IpAddr>().unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        SocketAddr::new(ip, port_number(port))
    };
    let serving = if config.enable_server { config.port } else { 0 };
    let read_only = if config.enable_server { config.read_only_port } else { 0 };
    let mut all = vec![
        Wanted {
            what: "healthz",
            field: "healthzPort",
            address: address(&config.healthz_bind_address, config.healthz_port),
        },
        Wanted { what: "read-only", field: "readOnlyPort", address: address(&config.address, read_only) },
        Wanted { what: "API", field: "port", address: address(&config.address, serving) },
    ];
    all.retain(|w| w.address.port() != 0);
    all
}

/// Would binding `wanted` fail while `taken` listens? An IPv6 wildcard takes IPv4 as well.
fn conflict(wanted: SocketAddr, taken: SocketAddr) -> bool {
    let (a, b) = (wanted.ip(), taken.ip());
    let wide = |ip: IpAddr, other: IpAddr| ip.is_unspecified() && (ip.is_ipv6() || other.is_ipv4());
    wanted.port() == taken.port() && (a == b || wide(a, b) || wide(b, a))
}

/// Each port: free, held by the agent itself, or taken.
pub(super) fn judge(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let listeners = match &facts.listeners {
        Ok(listeners) => listeners,
        Err(why) => return vec![unknown("ports", why)],
    };
    let agent_runs = matches!(facts.agent, Ok(Some(_)) | Err(_));
    let mut free = Vec::new();
    let mut out = Vec::new();
    for wanted in wanted_ports(config) {
        match listeners.iter().find(|l| conflict(wanted.address, l.address)) {
            None => free.push(format!("{} ({})", wanted.address, wanted.what)),
            Some(taken) => out.push(judge_taken(wanted, taken, agent_runs)),
        }
    }
    if !free.is_empty() {
        out.insert(0, ok("ports", format!("free: {}", free.join(", "))));
    }
    out
}

fn judge_taken(wanted: Wanted, taken: &Listener, agent_runs: bool) -> Finding {
    let port = format!("{} ({})", wanted.address, wanted.what);
    let (who, name) = match &taken.process {
        Some((pid, name)) => (format!("{name} (pid {pid})"), name.as_str()),
        None => ("an unknown process".to_owned(), ""),
    };
    match name {
        "rubelet" | "kubelet" if agent_runs => ok("ports", format!("{port} is held by the running agent, {who}")),
        "rubelet" => warn(
            "ports",
            format!("{port} is taken by another rubelet, {who}"),
            "if it is the one to check, give its --root-dir; else stop it before this one starts",
        ),
        "kubelet" => warn(
            "ports",
            format!("{port} is taken by a running kubelet, {who}"),
            "stop it before rubelet starts (systemctl disable --now kubelet); its pods go on running",
        ),
        _ => error(
            "ports",
            format!("{port} is taken by {who}"),
            format!("stop that process, or set {} to another port", wanted.field),
        ),
    }
}
