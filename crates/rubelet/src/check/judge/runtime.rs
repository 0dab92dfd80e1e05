//! The container runtime: there, of a known version, ready, quick, and of one mind about cgroups.

use std::time::Duration;

use config::{CgroupDriver, KubeletConfiguration};
use cri_api::v1;

use super::super::facts::{Answers, Cni, HostFacts, RuntimeFacts, Seen};
use super::{Finding, error, ok, unknown, warn};

/// The agent lists everything about once a second; a list that takes longer delays all it sees.
const SLOW_LIST: Duration = Duration::from_secs(1);

/// Socket, version, conditions, network, lists.
pub(super) fn judge(facts: &RuntimeFacts) -> Vec<Finding> {
    let endpoint = &facts.endpoint;
    let answers = match (&facts.socket, &facts.answers) {
        (Ok(()), Some(answers)) => answers,
        (socket, _) => {
            let why = socket.as_ref().err().map_or("not asked", String::as_str);
            let fix = "install and start a container runtime (systemctl enable --now containerd), or set containerRuntimeEndpoint to its socket";
            return vec![error("runtime", format!("{endpoint}: {why}"), fix)];
        }
    };
    let version = match &answers.version {
        Ok(version) => version,
        Err(why) => {
            let fix = "restart the runtime and read its log (journalctl -u containerd); its CRI plugin must not be disabled (disabled_plugins in config.toml)";
            return vec![error("runtime", format!("{endpoint}: {why}"), fix)];
        }
    };
    let mut out = vec![judge_version(endpoint, version)];
    match &answers.status {
        Ok(status) => {
            out.push(judge_ready(status));
            out.push(judge_network(status, &answers.cni));
        }
        Err(why) => {
            let fix = "restart the runtime and read its log (journalctl -u containerd)";
            out.push(error("runtime status", why.as_str(), fix));
        }
    }
    out.push(judge_lists(answers));
    out
}

/// Major and minor number of `v1.6.20~ds1`, `2.2.0`, `1.7.0-rc.1`.
fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_start_matches('v').split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn judge_version(endpoint: &str, v: &v1::VersionResponse) -> Finding {
    let what = format!("{} {} at {endpoint}", v.runtime_name, v.runtime_version);
    match (v.runtime_name.as_str(), major_minor(&v.runtime_version)) {
        ("containerd", Some(number)) if number < (1, 6) => error(
            "runtime",
            format!("{what} is too old"),
            "install containerd 1.6 or newer: it is the first with CRI v1",
        ),
        ("containerd" | "cri-o", _) => ok("runtime", what),
        _ => warn(
            "runtime",
            format!("{what}: rubelet is not tested with it"),
            "containerd 1.6 or newer and CRI-O are tested",
        ),
    }
}

fn condition<'a>(status: &'a v1::StatusResponse, name: &str) -> Option<&'a v1::RuntimeCondition> {
    status.status.as_ref()?.conditions.iter().find(|c| c.r#type == name)
}

/// `REASON: MESSAGE` of a condition that is not there or false.
fn refusal(status: &v1::StatusResponse, name: &str) -> Option<String> {
    match condition(status, name) {
        Some(c) if c.status => None,
        Some(c) => Some(
            [c.reason.as_str(), c.message.as_str()]
                .iter()
                .filter(|t| !t.is_empty())
                .copied()
                .collect::<Vec<_>>()
                .join(": "),
        ),
        None => Some("the runtime does not say".to_owned()),
    }
}

fn judge_ready(status: &v1::StatusResponse) -> Finding {
    match refusal(status, "RuntimeReady") {
        None => ok("runtime status", "RuntimeReady"),
        Some(why) => error(
            "runtime status",
            format!("RuntimeReady is false: {why}"),
            "read the runtime's log (journalctl -u containerd)",
        ),
    }
}

fn judge_network(status: &v1::StatusResponse, cni: &Cni) -> Finding {
    let dir = cni.dir.display();
    let files = match &cni.files {
        Ok(files) if files.is_empty() => format!("{dir} has no network configuration"),
        Ok(files) => format!("{dir} has {}", files.join(", ")),
        Err(why) => why.clone(),
    };
    let Some(why) = refusal(status, "NetworkReady") else {
        return ok("pod network", format!("NetworkReady; {files}"));
    };
    let fix = match &cni.files {
        Ok(files) if !files.is_empty() => {
            format!(
                "look at the first file in {dir} and whether its plugins are in the runtime's CNI bin directory (usually /opt/cni/bin), then at the runtime's log"
            )
        }
        _ => format!(
            "put a CNI configuration (.conflist) into {dir}, as network add-ons do; the plugins belong into /opt/cni/bin"
        ),
    };
    error("pod network", format!("NetworkReady is false: {why}; {files}; only pods with hostNetwork start"), fix)
}

fn judge_lists(answers: &Answers) -> Finding {
    let topic = "runtime lists";
    let (sandboxes, containers) = match (&answers.sandboxes, &answers.containers) {
        (Ok(sandboxes), Ok(containers)) => (sandboxes, containers),
        (Err(why), _) | (_, Err(why)) => {
            let fix = "the agent cannot see its pods without them: restart the runtime and read its log; very many dead containers make lists large";
            return error(topic, format!("sandboxes and containers cannot be listed: {why}"), fix);
        }
    };
    let shown = |what: &str, &(count, took): &(usize, Duration)| format!("{count} {what} in {} ms", took.as_millis());
    let text = format!("{}, {}", shown("sandboxes", sandboxes), shown("containers", containers));
    if sandboxes.1.max(containers.1) > SLOW_LIST {
        let fix = "the agent lists about once a second and sees changes late: look at the runtime's disk and CPU, remove dead containers (crictl rm)";
        return warn(topic, format!("slow: {text}"), fix);
    }
    ok(topic, text)
}

fn word(driver: CgroupDriver) -> &'static str {
    driver.as_str()
}

/// Do the runtime, the configuration and the host agree on who writes cgroups?
pub(super) fn judge_driver(facts: &RuntimeFacts, host: &HostFacts, config: &KubeletConfiguration) -> Vec<Finding> {
    let topic = "cgroup driver";
    let configured = config.cgroup_driver;
    let told: &Seen<Option<CgroupDriver>> = match &facts.answers {
        Some(answers) if answers.version.is_ok() => &answers.driver,
        // There is a finding about the runtime already.
        _ => return Vec::new(),
    };
    let systemd_runs = host.init.as_ref().is_ok_and(|name| name == "systemd");
    let v1 = facts.answers.as_ref().and_then(|a| a.version.as_ref().ok());
    // A runtime that can be asked is obeyed; one that only shows its configuration is not.
    let asked = v1.and_then(|v| major_minor(&v.runtime_version)).is_none_or(|n| n >= (2, 0))
        || v1.is_some_and(|v| v.runtime_name != "containerd");
    let (driver, text) = match told {
        Err(why) => return vec![unknown(topic, why)],
        Ok(None) => {
            (configured, format!("{}, as configured; the runtime does not say which it uses", word(configured)))
        }
        Ok(Some(told)) if *told == configured => (configured, format!("{}, the runtime's too", word(configured))),
        Ok(Some(told)) if !asked => {
            let fix = match told {
                CgroupDriver::Systemd => "set cgroupDriver: systemd",
                CgroupDriver::Cgroupfs => {
                    "set SystemdCgroup = true for runc in containerd's config.toml and restart it, or set cgroupDriver: cgroupfs"
                }
            };
            let message =
                format!("the runtime uses {}, the agent {}: pod limits would not hold", word(*told), word(configured));
            return vec![error(topic, message, fix)];
        }
        Ok(Some(CgroupDriver::Cgroupfs)) => {
            let message = "cgroupDriver is systemd, but the runtime uses cgroupfs and is obeyed";
            let fix = "set SystemdCgroup = true for runc in containerd's config.toml (cgroup_manager in CRI-O's) and restart it";
            return vec![warn(topic, message, fix)];
        }
        Ok(Some(told)) => {
            (*told, format!("{}, from the runtime (cgroupDriver {} is not used)", word(*told), word(configured)))
        }
    };
    vec![match (driver, systemd_runs) {
        (CgroupDriver::Systemd, false) => {
            let init = host.init.as_deref().unwrap_or("unknown");
            let fix = "boot with systemd, or use cgroupfs in the runtime (SystemdCgroup = false) and in cgroupDriver";
            error(topic, format!("{text}; but process 1 is {init}, not systemd"), fix)
        }
        (CgroupDriver::Cgroupfs, true) => {
            let message =
                format!("{text}; systemd writes the same cgroup tree, two writers can undo each other's limits");
            let fix = "use systemd: SystemdCgroup = true for runc in containerd's config.toml and cgroupDriver: systemd, before there are pods";
            warn(topic, message, fix)
        }
        _ => ok(topic, text),
    }]
}
