//! What the node's status tells of this machine, read together.

use std::net::IpAddr;
use std::path::Path;

use model::machine::Machine;

use super::{boot_id, detect_node_ip, interface_addresses, kernel_version, machine_id, memory, os_image, system_uuid};
use crate::error::{Failed, Result};

/// Reads what this machine is. What cannot be read is left empty, and told of beside it.
pub fn machine(root: &Path, proc: &Path, sys: &Path) -> (Machine, Vec<Failed>) {
    let mut failed = Vec::new();
    let mut text = |read: Result<String>| read.map_err(|e| failed.push(e)).unwrap_or_default();
    let machine = Machine {
        machine_id: text(machine_id(root)),
        system_uuid: text(system_uuid(sys, proc, root)),
        boot_id: text(boot_id(proc)),
        kernel_version: kernel_version(),
        os_image: text(os_image(root)),
        swap: 0,
    };
    let swap = memory(proc).map_err(|e| failed.push(e)).map(|m| m.swap_total).unwrap_or_default();
    (Machine { swap, ..machine }, failed)
}

/// The node's internal addresses, main one first: the `given` ones (`--node-ip`), if this host has them, else one that is found (see
/// [`detect_node_ip`]; `0.0.0.0` and `::` only choose the family that is preferred). Blocks as long as the resolver does.
///
/// # Errors
/// A given address cannot be the node's, or none is found.
pub fn node_addresses(proc: &Path, sys: &Path, node_name: &str, given: &[IpAddr]) -> Result<Vec<IpAddr>> {
    let chosen: Vec<IpAddr> = given.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    if chosen.is_empty() {
        let prefer_v6 = given.first().is_some_and(IpAddr::is_ipv6);
        return Ok(vec![detect_node_ip(proc, sys, node_name, prefer_v6)?]);
    }
    let addresses = interface_addresses(sys)?;
    for ip in &chosen {
        super::validate_node_ip(*ip, &addresses).map_err(|why| Failed::other("failed to validate nodeIP", why))?;
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    #[test]
    fn a_machine_from_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let (proc, sys) = (d.join("proc"), d.join("sys"));
        let (machine_without, failed) = machine(d, &proc, &sys);
        assert_eq!((machine_without.os_image.as_str(), failed.len()), ("", 3), "{failed:?}");

        put(d, "proc/sys/kernel/random/boot_id", "894922fa-81fb-4427-9bcc-a9f3f0908aec\n");
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let lines = meminfo.lines().map(|l| if l.starts_with("SwapTotal") { "SwapTotal: 2048 kB" } else { l });
        put(d, "proc/meminfo", &(lines.collect::<Vec<_>>().join("\n") + "\n"));
        put(d, "etc/machine-id", "3d1219c7c4c5404aaa1f6d2a48adfda4\n");
        put(d, "etc/os-release", "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n");
        let (machine, failed) = machine(d, &proc, &sys);
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(
            machine,
            Machine {
                machine_id: "3d1219c7c4c5404aaa1f6d2a48adfda4".into(),
                // A machine without DMI or device tree (micro VMs) is known by its system.
                system_uuid: "3d1219c7c4c5404aaa1f6d2a48adfda4".into(),
                boot_id: "894922fa-81fb-4427-9bcc-a9f3f0908aec".into(),
                kernel_version: kernel_version(),
                os_image: "Debian GNU/Linux 12 (bookworm)".into(),
                swap: 2 << 20,
            }
        );
    }

    #[test]
    fn given_addresses_must_be_this_hosts() {
        let (proc, sys) = (Path::new("/proc"), Path::new("/sys"));
        let find = |ips: &[&str]| {
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            node_addresses(proc, sys, "no-such-name.invalid", &ips).map_err(|e| e.full())
        };
        assert_eq!(
            find(&["203.0.113.77"]).unwrap_err(),
            "failed to validate nodeIP: node IP: \"203.0.113.77\" not found in the host's network interfaces"
        );
        assert_eq!(find(&["127.0.0.1"]).unwrap_err(), "failed to validate nodeIP: nodeIP can't be loopback address");
        // What this host has is taken in the order given.
        let own: Vec<String> = interface_addresses(sys)
            .unwrap()
            .iter()
            .map(|a| a.ip)
            .filter(|ip| super::super::validate_node_ip(*ip, &interface_addresses(sys).unwrap()).is_ok())
            .map(|ip| ip.to_string())
            .take(2)
            .collect();
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        if !own.is_empty() {
            let found: Vec<String> = find(&own).unwrap().iter().map(ToString::to_string).collect();
            assert_eq!(found, own);
        }
    }
}
