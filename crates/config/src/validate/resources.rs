//! Rules about node resources: enforcement, reservations, eviction, CPU, memory and topology managers.

use std::collections::{BTreeMap, BTreeSet};

use model::quantity::Quantity;

use super::Report;
use crate::duration::{self, quote};
use crate::flags::parse_bool;
use crate::gates::{Gate, Gates};
use crate::nested::TopologyManagerPolicy;
use crate::types::KubeletConfiguration;

/// What an eviction threshold may name.
const SIGNALS: [&str; 9] = [
    "allocatableMemory.available",
    "containerfs.available",
    "containerfs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "pid.available",
];

pub(super) fn validate(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    enforcement(c, r);
    reserved_cpus(c, r);
    reserved_memory(c, r);
    for (path, flag, list) in
        [("kubeReserved", "kube-reserved", &c.kube_reserved), ("systemReserved", "system-reserved", &c.system_reserved)]
    {
        for (resource, amount) in list {
            if let Some(why) = reservation(resource, amount) {
                let at = format!("{path}.{resource}");
                r.error(&at, format!("--{flag} value failed to parse: {why}"));
            }
        }
    }
    for (resource, percent) in &c.qos_reserved {
        if let Some(why) = qos_reservation(resource, percent) {
            let at = format!("qosReserved.{resource}");
            r.error(&at, format!("--qos-reserved value failed to parse: {why}"));
        }
    }
    eviction(c, r);
    managers(c, gates, r);
}

fn enforcement(c: &KubeletConfiguration, r: &mut Report) {
    const PATH: &str = "enforceNodeAllocatable";
    const NAMED: &str = "enforceNodeAllocatable (--enforce-node-allocatable)";
    let given = &c.enforce_node_allocatable;
    let has = |key: &str| given.iter().any(|v| v == key);
    for key in ["system-reserved", "kube-reserved"] {
        let soft = format!("{key}-compressible");
        if has(key) && has(&soft) {
            r.invalid(PATH, format!("both \"{key}\" and \"{soft}\" cannot be specified together in {NAMED}"));
        }
    }
    let mut seen = BTreeSet::new();
    for value in given {
        let shown = quote(value);
        if !seen.insert(value) {
            r.invalid(PATH, format!("duplicated enforcements {shown} in {NAMED}"));
            continue;
        }
        let cgroup = match value.as_str() {
            "pods" => None,
            "system-reserved" | "system-reserved-compressible" => Some(("system", &c.system_reserved_cgroup)),
            "kube-reserved" | "kube-reserved-compressible" => Some(("kube", &c.kube_reserved_cgroup)),
            "none" => {
                if given.len() > 1 {
                    r.invalid(
                        PATH,
                        format!("{NAMED} may not contain additional enforcements when {shown} is specified"),
                    );
                }
                continue;
            }
            _ => {
                r.invalid(PATH, format!("option {shown} specified for {NAMED}. Valid options are \"pods\", \"system-reserved\", \"system-reserved-compressible\", \"kube-reserved\", \"kube-reserved-compressible\" or \"none\""));
                continue;
            }
        };
        if let Some((who, cgroup)) = cgroup
            && cgroup.is_empty()
        {
            let path = format!("{who}ReservedCgroup");
            r.invalid(&path, format!("{path} (--{who}-reserved-cgroup) must be specified when \"{who}-reserved\" or \"{who}-reserved-compressible\" included in {NAMED}"));
        }
        if !c.cgroups_per_qos {
            r.invalid(
                "cgroupsPerQOS",
                format!("cgroupsPerQOS (--cgroups-per-qos) must be set to true when {shown} contained in {NAMED}"),
            );
        }
    }
}

/// What is wrong with a list of CPUs (`0-3,8`).
fn cpu_list(text: &str) -> Option<String> {
    let number = |text: &str| -> Result<u32, String> {
        text.parse().map_err(|_| format!("strconv.Atoi: parsing {}: invalid syntax", quote(text)))
    };
    let range = |range: &str| -> Result<(), String> {
        let Some((from, to)) = range.split_once('-') else {
            return number(range).map(drop);
        };
        let (from, to) = (number(from)?, number(to)?);
        if from > to {
            return Err(format!("invalid range {} ({from} > {to})", quote(range)));
        }
        Ok(())
    };
    text.split(',').find_map(|part| range(part).err())
}

fn reserved_cpus(c: &KubeletConfiguration, r: &mut Report) {
    const PATH: &str = "reservedSystemCPUs";
    let cpus = &c.reserved_system_cpus;
    if cpus.is_empty() {
        return;
    }
    if !c.system_reserved_cgroup.is_empty() || !c.kube_reserved_cgroup.is_empty() {
        r.invalid(PATH, "can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup (--system-reserved-cgroup) or kubeReservedCgroup (--kube-reserved-cgroup)");
    }
    if let Some(why) = cpu_list(cpus) {
        r.invalid(PATH, format!("unable to parse reservedSystemCPUs (--reserved-cpus) {cpus}, error: {why}"));
    }
}

fn reserved_memory(c: &KubeletConfiguration, r: &mut Report) {
    let mut seen = BTreeSet::new();
    for (i, reservation) in c.reserved_memory.iter().enumerate() {
        let node = reservation.numa_node;
        for (resource, amount) in &reservation.limits {
            let path = format!("reservedMemory[{i}].limits.{resource}");
            let shown = quote(resource);
            if resource != "memory" && !resource.starts_with("hugepages-") {
                r.invalid(&path, format!("the limit type {shown} for NUMA node {node} is not supported, only [memory hugepages-<HugePageSize>] is accepted"));
            }
            if amount.is_zero() {
                r.invalid(&path, format!("reserved memory may not be zero for NUMA node {node} and resource {shown}"));
            }
            if !seen.insert((node, resource)) {
                r.invalid(
                    &path,
                    format!("the reserved memory has a duplicate value for NUMA node {node} and resource {shown}"),
                );
            }
        }
    }
}

fn reservation(resource: &str, amount: &str) -> Option<String> {
    let (name, text) = (quote(resource), quote(amount));
    if !["cpu", "memory", "ephemeral-storage", "pid"].contains(&resource) {
        return Some(format!("cannot reserve {name} resource"));
    }
    match Quantity::parse(amount) {
        Err(e) => Some(format!("failed to parse quantity {text} for {name} resource: {e}")),
        Ok(q) if q.sign() < 0 => Some(format!("resource quantity for {name} cannot be negative: {amount}")),
        Ok(_) => None,
    }
}

fn qos_reservation(resource: &str, percent: &str) -> Option<String> {
    let (name, text) = (quote(resource), quote(percent));
    if resource != "memory" {
        return Some(format!("cannot reserve {name} resource"));
    }
    let why = match percent.strip_suffix('%').map(str::parse::<i64>) {
        None => format!("percentage expected, got '{percent}'"),
        Some(Err(_)) => format!("invalid number in percentage '{percent}'"),
        Some(Ok(0..=100)) => return None,
        Some(Ok(_)) => "percentage must be between 0 and 100".to_owned(),
    };
    Some(format!("failed to parse percentage {text} for {name} resource: {why}"))
}

fn percentage(text: &str) -> Result<f32, String> {
    let number = text.trim_end_matches('%');
    number.parse().map_err(|_| format!("strconv.ParseFloat: parsing {}: invalid syntax", quote(number)))
}

fn threshold(signal: &str, value: &str) -> Result<(), String> {
    if value.ends_with('%') {
        let percent = percentage(value)?;
        if percent < 0.0 {
            return Err(format!("eviction percentage threshold {signal} must be >= 0%: {value}"));
        }
        if percent > 100.0 {
            return Err(format!("eviction percentage threshold {signal} must be <= 100%: {value}"));
        }
        return Ok(());
    }
    let quantity = Quantity::parse(value).map_err(|e| e.to_string())?;
    if quantity.sign() <= 0 {
        return Err(format!("eviction threshold {signal} must be positive: {quantity}"));
    }
    Ok(())
}

fn grace_period(value: &str) -> Result<(), String> {
    let period = duration::parse_signed(value).map_err(|e| e.to_string())?;
    if period.is_negative() {
        return Err(format!("invalid eviction grace period specified: {value}, must be a positive value"));
    }
    Ok(())
}

fn minimum_reclaim(signal: &str, value: &str) -> Result<(), String> {
    if value.ends_with('%') {
        if percentage(value)? <= 0.0 {
            return Err(format!("eviction percentage minimum reclaim {signal} must be positive: {value}"));
        }
        return Ok(());
    }
    if Quantity::parse(value).map_err(|e| e.to_string())?.sign() < 0 {
        return Err(format!("negative eviction minimum reclaim specified for {signal}"));
    }
    Ok(())
}

fn eviction(c: &KubeletConfiguration, r: &mut Report) {
    type Rule = fn(&str, &str) -> Result<(), String>;
    let maps: [(&str, &BTreeMap<String, String>, Rule); 4] = [
        ("evictionHard", &c.eviction_hard, threshold),
        ("evictionSoft", &c.eviction_soft, threshold),
        ("evictionSoftGracePeriod", &c.eviction_soft_grace_period, |_, v| grace_period(v)),
        ("evictionMinimumReclaim", &c.eviction_minimum_reclaim, minimum_reclaim),
    ];
    for (path, map, rule) in maps {
        for (signal, value) in map {
            let at = format!("{path}.{signal}");
            if !SIGNALS.contains(&signal.as_str()) {
                let known = SIGNALS.join(", ");
                r.error(&at, format!("unsupported eviction signal {signal}; must be one of {known}"));
            } else if let Err(why) = rule(signal, value) {
                r.error(&at, format!("{}: {why}", quote(value)));
            }
        }
    }
    for signal in c.eviction_soft.keys() {
        if !c.eviction_soft_grace_period.contains_key(signal) {
            let at = format!("evictionSoft.{signal}");
            r.error(&at, format!("grace period must be specified for the soft eviction threshold {signal}"));
        }
    }
}

fn option_bool(name: &str, value: &str) -> Option<String> {
    parse_bool(value).err().map(|why| format!("bad value for option {}: {why}", quote(name)))
}

fn managers(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    for (name, value) in &c.cpu_manager_policy_options {
        let at = format!("cpuManagerPolicyOptions.{name}");
        let shown = quote(name);
        match name.as_str() {
            "full-pcpus-only" | "strict-cpu-reservation" | "prefer-align-cpus-by-uncorecache" => {}
            "align-by-socket" | "distribute-cpus-across-cores" => {
                if !gates.enabled(Gate::CPUManagerPolicyAlphaOptions) {
                    r.error(
                        &at,
                        format!("CPU Manager Policy Alpha-level Options not enabled, but option {shown} provided"),
                    );
                }
            }
            "distribute-cpus-across-numa" => {
                if !gates.enabled(Gate::CPUManagerPolicyBetaOptions) {
                    r.error(
                        &at,
                        format!("CPU Manager Policy Beta-level Options not enabled, but option {shown} provided"),
                    );
                }
            }
            _ => {
                r.error(&at, format!("unknown CPU Manager Policy option: {shown}"));
                continue;
            }
        }
        if let Some(why) = option_bool(name, value) {
            r.error(&at, why);
        }
    }
    let on = |name: &str| {
        let value = c.cpu_manager_policy_options.get(name);
        value.is_some_and(|v| parse_bool(v) == Ok(true))
    };
    for (a, b) in [
        ("full-pcpus-only", "distribute-cpus-across-cores"),
        ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
    ] {
        if on(a) && on(b) {
            r.error(
                "cpuManagerPolicyOptions",
                format!("static policy options {a} and {b} can not be used at the same time"),
            );
        }
    }
    // The misspelling is what Kubernetes prints.
    if on("align-by-socket") && c.topology_manager_policy == TopologyManagerPolicy::SingleNumaNode {
        r.error(
            "cpuManagerPolicyOptions",
            "Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option",
        );
    }
    for (name, value) in &c.topology_manager_policy_options {
        let at = format!("topologyManagerPolicyOptions.{name}");
        let shown = quote(name);
        match name.as_str() {
            "prefer-closest-numa-nodes" => {
                if let Some(why) = option_bool(name, value) {
                    r.error(&at, why);
                }
            }
            "max-allowable-numa-nodes" => match value.parse::<i64>() {
                Err(_) => {
                    let value = quote(value);
                    r.error(&at, format!("unable to convert policy option to integer {shown}: strconv.Atoi: parsing {value}: invalid syntax"));
                }
                Ok(nodes) if nodes < 8 => {
                    r.error(&at, format!("the minimum value of {shown} should not be less than 8"));
                }
                Ok(_) => {}
            },
            _ => r.error(&at, format!("unknown Topology Manager Policy option: {shown}")),
        }
    }
}
