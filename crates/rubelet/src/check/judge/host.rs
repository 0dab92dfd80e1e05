//! The host itself: rights, name, cgroups, swap, kernel settings, resolver, clock.

use config::{KubeletConfiguration, SwapBehavior};
use jiff::{SignedDuration, Timestamp};

use super::super::facts::HostFacts;
use super::{Finding, error, ok, size, unknown, warn};
use crate::table::{count, span};

/// The kernel settings that are looked at.
pub(crate) const SYSCTLS: [&str; 8] = [
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "net.ipv4.ip_forward",
    "net.bridge.bridge-nf-call-iptables",
];

/// What the kubelet expects of the kernel (protectKernelDefaults): the value, and whether more is as good.
const EXPECTED: [(&str, i64, bool); 6] = [
    ("vm.overcommit_memory", 1, false),
    ("vm.panic_on_oom", 0, false),
    ("kernel.panic", 10, false),
    ("kernel.panic_on_oops", 1, false),
    ("kernel.keys.root_maxkeys", 1_000_000, true),
    ("kernel.keys.root_maxbytes", 25_000_000, true),
];

/// An agent that runs already.
pub(super) fn judge_agent(facts: &HostFacts) -> Vec<Finding> {
    let topic = "running agent";
    match &facts.agent {
        Ok(None) => Vec::new(),
        Ok(Some(node)) if node.ready => {
            vec![ok(topic, format!("rubelet runs here as node {}, which is ready", node.name))]
        }
        Ok(Some(node)) => vec![warn(
            topic,
            format!("rubelet runs here as node {}, which is not ready: {}", node.name, node.message),
            "rubelet explain node says more",
        )],
        Err(why) => vec![warn(
            topic,
            why.as_str(),
            "read its log (journalctl -u kubelet); a restart of it leaves containers running",
        )],
    }
}

/// Root, and its usual rights.
pub(super) fn judge_rights(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "rights";
    if facts.euid != 0 {
        let message =
            format!("this runs as user {}; the agent needs root, and without it much here cannot be seen", facts.euid);
        return vec![error(topic, message, "run it as root: sudo rubelet check")];
    }
    let score = config.oom_score_adj;
    vec![match &facts.oom_score {
        Ok(()) => ok(topic, format!("root; oom_score_adj {score} can be set")),
        Err(why) => warn(
            topic,
            format!(
                "root, but oom_score_adj {score} cannot be set: {why}; the kernel may kill the agent first when memory runs out"
            ),
            "start it with CAP_SYS_RESOURCE, outside of a user namespace",
        ),
    }]
}

/// The node's name as a DNS subdomain (RFC 1123), which the API requires.
pub(super) fn judge_name(facts: &HostFacts) -> Vec<Finding> {
    let topic = "node name";
    let fix = "set the host name (hostnamectl set-hostname NAME) or --hostname-override";
    let name = match &facts.node_name {
        Ok(name) => name,
        Err(why) => return vec![error(topic, why.as_str(), fix)],
    };
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let label = |l: &str| !l.is_empty() && l.chars().all(inner) && !l.starts_with('-') && !l.ends_with('-');
    vec![if name.len() > 253 || !name.split('.').all(label) {
        let message = format!(
            "{name:?} is no node name: lower-case letters, digits, - and . only, letter or digit at both ends, at most 253"
        );
        error(topic, message, fix)
    } else if name == "localhost" || name.starts_with("localhost.") {
        warn(topic, format!("{name}: static pods and the node would be named after it, as on every such host"), fix)
    } else {
        ok(topic, name.as_str())
    }]
}

/// Version and controllers.
pub(super) fn judge_cgroups(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "cgroups";
    let cgroups = match &facts.cgroups {
        Ok(cgroups) => cgroups,
        Err(why) => return vec![error(topic, why.as_str(), "mount it: mount -t cgroup2 none /sys/fs/cgroup")],
    };
    let mut out = Vec::new();
    let has = |name: &&&str| cgroups.controllers.iter().any(|c| c == **name);
    let missing = |names: &[&str]| names.iter().filter(|n| !has(n)).copied().collect::<Vec<_>>().join(", ");
    let version = if cgroups.v2 { "v2" } else { "v1" };
    if !cgroups.v2 {
        let fix = "boot with cgroup v2 (kernel parameter systemd.unified_cgroup_hierarchy=1)";
        if config.fail_cgroup_v1 {
            out.push(error(
                topic,
                "the host uses cgroup v1 and failCgroupV1 is true",
                format!("{fix}, or set failCgroupV1: false"),
            ));
        } else {
            out.push(warn(topic, "the host uses cgroup v1, which Kubernetes is about to drop", fix));
        }
    }
    let needed = missing(&["cpu", "memory", "pids"]);
    if !needed.is_empty() {
        let fix = "turn them on: kernel parameter cgroup_enable=memory (or the one named), a kernel that has them; in a container, delegate them";
        out.push(error(topic, format!("{version} without the controllers {needed}"), fix));
    }
    let wanted = missing(&["cpuset", "hugetlb"]);
    if !wanted.is_empty() {
        let fix =
            "boot a kernel that has them (CONFIG_CPUSETS to set CPUs aside, CONFIG_CGROUP_HUGETLB to limit huge pages)";
        out.push(warn(topic, format!("{version} without the controllers {wanted}"), fix));
    }
    if out.is_empty() {
        out.push(ok(topic, format!("{version} with cpu, memory, pids, cpuset, hugetlb")));
    }
    out
}

/// Swap against failSwapOn and memorySwap.
pub(super) fn judge_swap(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "swap";
    let devices = match &facts.swap {
        Ok(devices) => devices,
        Err(why) => return vec![unknown(topic, why)],
    };
    let limited = config.memory_swap.swap_behavior == Some(SwapBehavior::LimitedSwap);
    if devices.is_empty() {
        return vec![if limited {
            warn(
                topic,
                "memorySwap.swapBehavior is LimitedSwap, but there is no swap",
                "make swap (mkswap, swapon), or leave memorySwap out",
            )
        } else {
            ok(topic, "off")
        }];
    }
    let amount = facts.memory.as_ref().map_or_else(|_| String::new(), |m| format!("{} ", size(m.swap_total)));
    let on = format!("{amount}on {}", devices.join(", "));
    vec![if config.fail_swap_on {
        let fix = "turn it off (swapoff -a, and take it out of /etc/fstab), or set failSwapOn: false";
        error(topic, format!("{on}, and failSwapOn is true: the agent does not start"), fix)
    } else if limited {
        ok(topic, format!("{on}; Burstable pods may use it (LimitedSwap)"))
    } else {
        ok(topic, format!("{on}; pods may not use it (NoSwap)"))
    }]
}

/// The settings of [`EXPECTED`].
pub(super) fn judge_kernel(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "kernel settings";
    let value = |name: &str| facts.sysctls.get(name).cloned().flatten();
    let mut wrong = Vec::new();
    let mut lines = Vec::new();
    for (name, wanted, more_is_fine) in EXPECTED {
        // A container may not show all of them.
        let Some(text) = value(name) else { continue };
        let now = text.parse::<i64>().ok();
        if now != Some(wanted) && !(more_is_fine && now > Some(wanted)) {
            wrong.push(format!("{name} is {text}, expected {wanted}"));
            lines.push(format!("{name}={wanted}"));
        }
    }
    if wrong.is_empty() {
        return vec![ok(topic, "as the kubelet expects them")];
    }
    let fix = format!("printf '{}\\n' > /etc/sysctl.d/90-kubelet.conf && sysctl --system", lines.join("\\n"));
    let message = wrong.join("; ");
    vec![if config.protect_kernel_defaults {
        error(topic, format!("{message}; protectKernelDefaults is true"), fix)
    } else {
        warn(topic, message, fix)
    }]
}

/// Settings that pod networks need; the kubelet itself does not.
pub(super) fn judge_network_settings(facts: &HostFacts) -> Vec<Finding> {
    let topic = "network settings";
    let value = |name: &str| facts.sysctls.get(name).cloned().flatten();
    let mut out = Vec::new();
    match value("net.ipv4.ip_forward").as_deref() {
        Some("0") => out.push(warn(
            topic,
            "net.ipv4.ip_forward is 0: pods reach nothing outside of this node unless the network add-on changes it",
            "printf 'net.ipv4.ip_forward=1\\n' > /etc/sysctl.d/91-pods.conf && sysctl --system",
        )),
        Some(_) => out.push(ok(topic, "net.ipv4.ip_forward is on")),
        None => {}
    }
    // Without br_netfilter there is no such setting, and many networks do without.
    if value("net.bridge.bridge-nf-call-iptables").as_deref() == Some("0") {
        out.push(warn(
            topic,
            "net.bridge.bridge-nf-call-iptables is 0: Services do not work between pods of one bridge",
            "printf 'net.bridge.bridge-nf-call-iptables=1\\n' > /etc/sysctl.d/92-bridge.conf && sysctl --system",
        ));
    }
    out
}

/// The node's resolv.conf, from which pods get theirs.
pub(super) fn judge_resolver(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "resolver";
    let path = &config.resolv_conf;
    if path.is_empty() {
        return vec![ok(topic, "resolvConf is empty: pods get no DNS settings of the node")];
    }
    let resolver = match &facts.resolver {
        Ok(resolver) => resolver,
        Err(why) => {
            return vec![error(
                topic,
                why.as_str(),
                format!("make {path}, or set resolvConf to another file or to \"\""),
            )];
        }
    };
    let words = |key: &str| -> Vec<Vec<&str>> {
        let lines = resolver.text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
        lines.filter(|w| w.first() == Some(&key)).map(|w| w[1..].to_vec()).collect()
    };
    let servers: Vec<&str> = words("nameserver").iter().filter_map(|w| w.first().copied()).collect();
    // The last search line counts.
    let search = words("search").pop().unwrap_or_default();
    let loopback = servers.iter().find(|s| s.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()));
    let mut out = Vec::new();
    if servers.is_empty() {
        out.push(warn(
            topic,
            format!("{path} names no server: pods cannot resolve names"),
            format!("add a nameserver line to {path}"),
        ));
    }
    if let Some(server) = loopback {
        let fix = if resolver.behind_stub {
            "set resolvConf: /run/systemd/resolve/resolv.conf".to_owned()
        } else {
            "set resolvConf to a file that names servers which pods can reach".to_owned()
        };
        out.push(warn(topic, format!("{path} names {server}, which inside a pod is the pod itself"), fix));
    }
    if servers.len() > 3 {
        let message =
            format!("{path} names {} servers; pods get the first 3 ({})", servers.len(), servers[..3].join(" "));
        out.push(warn(topic, message, "keep 3 nameserver lines"));
    }
    let length = search.iter().map(|s| s.len() + 1).sum::<usize>().saturating_sub(1);
    if search.len() > 32 || length > 2048 {
        let message = format!(
            "{path} has {} of {length} characters; pods get at most 32 of 2048",
            count(search.len(), "search domain")
        );
        out.push(warn(topic, message, "shorten the search line"));
    }
    if out.is_empty() {
        out.push(ok(topic, format!("{path}: {}", servers.join(", "))));
    }
    out
}

/// No host whose clock is right is earlier than the Kubernetes release that this agent is of.
const RELEASED: i64 = 1_775_001_600; // 2026-04-01

/// The clock: certificates, tokens and leases hang on it.
pub(super) fn judge_clock(facts: &HostFacts) -> Vec<Finding> {
    let topic = "clock";
    let clock = &facts.clock;
    let fix = "install a time service (apt-get install chrony) and let it set the clock";
    if clock.now < Timestamp::from_second(RELEASED).unwrap_or_default() {
        return vec![error(topic, format!("it says {:.0}, which is in the past", clock.now), fix)];
    }
    if let Some(off) = clock.hardware.and_then(|hardware| drift(clock.now, hardware)) {
        let message = format!("{:.0}, {} away from the hardware clock", clock.now, span(off));
        return vec![warn(topic, message, format!("{fix}; then hwclock --systohc"))];
    }
    vec![match &clock.keeper {
        Some(keeper) => ok(topic, format!("{:.0}, kept by {keeper}", clock.now)),
        None => warn(topic, format!("{:.0}; no program that keeps it right was found", clock.now), fix),
    }]
}

/// How far the hardware clock is off; None within a minute, also when it runs in local time (whole quarters of an hour apart).
fn drift(now: Timestamp, hardware: i64) -> Option<SignedDuration> {
    const QUARTER: i64 = 900;
    let off = (now.as_second() - hardware).abs();
    let rest = off % QUARTER;
    let local_time = off <= 14 * 3_600 && rest.min(QUARTER - rest) <= 60;
    (!local_time).then(|| SignedDuration::from_secs(off))
}

/// Programs that are run, or expected by others.
pub(super) fn judge_programs(facts: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    if facts.iptables || !config.make_iptables_util_chains {
        return Vec::new();
    }
    let message = "iptables is not installed; network add-ons and kube-proxy in its iptables mode expect it";
    vec![warn("programs", message, "apt-get install iptables, or set makeIPTablesUtilChains: false if nothing uses it")]
}
