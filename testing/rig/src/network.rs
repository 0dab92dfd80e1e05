//! A bridge and a subnet of one's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// True when no route of `table` (the text of `/proc/net/route`) but the default one touches 10.`second`.`third`.0/24.
pub fn subnet_free(table: &str, second: u8, third: u8) -> bool {
    let wanted = u32::from_be_bytes([10, second, third, 0]);
    !table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Addresses are in network order, printed as little-endian numbers.
        let number = |i: usize| fields.get(i).and_then(|f| u32::from_str_radix(f, 16).ok()).map(u32::swap_bytes);
        match (number(1), number(7)) {
            (Some(destination), Some(mask)) if mask != 0 => {
                let mask = mask & 0xffff_ff00;
                destination & mask == wanted & mask
            }
            _ => false,
        }
    })
}

/// Runs `ip`.
///
/// # Errors
/// With what `ip` said.
fn ip(args: &[&str]) -> Result<()> {
    let program = crate::find_program("ip").context("no `ip` program: install iproute2")?;
    let out = Command::new(program).args(args).output().context("cannot run ip")?;
    if !out.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// Makes the bridge before CNI would, so that a kernel without bridges or virtual Ethernet says so at once, and with its address, so
/// that a kubelet can be the node of this address before the first pod.
///
/// # Errors
/// When the kernel has no bridges or no virtual Ethernet pairs, or this process may not make them.
pub fn create_bridge(name: &str, address: &str) -> Result<()> {
    ip(&["link", "add", name, "type", "bridge"])
        .context("the kernel gives no network bridge (module `bridge`), or this container may not make one")?;
    let (a, b) = (format!("{name}a"), format!("{name}b"));
    ip(&["link", "add", &a, "type", "veth", "peer", "name", &b])
        .context("the kernel gives no virtual Ethernet pair (module `veth`)")?;
    ip(&["link", "del", &a])?;
    ip(&["addr", "add", &format!("{address}/24"), "dev", name])?;
    ip(&["link", "set", name, "up"])
}

/// Removes the bridge and what is plugged into it.
///
/// # Errors
/// With what `ip` said.
pub fn remove_bridge(name: &str) -> Result<()> {
    let dir = Path::new("/sys/class/net").join(name);
    let ports: Vec<PathBuf> =
        fs::read_dir(dir.join("brif")).into_iter().flatten().flatten().map(|e| e.path()).collect();
    for port in ports {
        if let Some(port) = port.file_name().and_then(|n| n.to_str()) {
            // Gone by itself when the network namespace at its other end goes.
            let _ = ip(&["link", "del", port]);
        }
    }
    for pair in [format!("{name}a"), format!("{name}b")] {
        if Path::new("/sys/class/net").join(&pair).exists() {
            let _ = ip(&["link", "del", &pair]);
        }
    }
    if dir.exists() { ip(&["link", "del", name]) } else { Ok(()) }
}

/// The host's `net.ipv4.ip_forward`; the bridge plugin switches it on.
pub fn forwarding() -> String {
    fs::read_to_string(FORWARD).unwrap_or_default().trim().to_owned()
}

/// Switches forwarding off again if it was off before and no bridge is left that may need it.
pub fn restore_forwarding(before: &str) {
    let bridges = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    if before == "0" && !bridges.into_iter().any(|e| e.path().join("bridge").exists()) {
        let _ = fs::write(FORWARD, "0");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_taken_subnets() {
        let head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n";
        let default = "eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n";
        let one = "br0 0007C70A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"; // 10.199.7.0/24
        let wide = "br0 0000C70A 00000000 0001 0 0 0 0000FFFF 0 0 0\n"; // 10.199.0.0/16
        let host = "br0 0507C70A 00000000 0005 0 0 0 FFFFFFFF 0 0 0\n"; // 10.199.7.5/32
        assert!(subnet_free(&format!("{head}{default}"), 199, 7));
        assert!(!subnet_free(&format!("{head}{one}"), 199, 7));
        assert!(subnet_free(&format!("{head}{one}"), 199, 8));
        assert!(!subnet_free(&format!("{head}{wide}"), 199, 8));
        assert!(!subnet_free(&format!("{head}{host}"), 199, 7));
    }
}
