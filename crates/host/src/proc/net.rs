//! The node's addresses, default routes and listening ports.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;

use procfs::{FromReadSI, current_system_info};

use crate::error::{Attempt, Failed, Result, found};

/// A default route: traffic to elsewhere leaves by this interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The interface's name.
    pub interface: String,
    /// True for IPv6.
    pub v6: bool,
}

/// The default routes, IPv4 first, in the kernel's order (`proc/net/route`, `proc/net/ipv6_route`).
///
/// # Errors
/// A file is there but cannot be read.
pub fn default_routes(proc: &Path) -> Result<Vec<DefaultRoute>> {
    let text = |name: &str| -> Result<String> {
        let path = proc.join("net").join(name);
        Ok(found(std::fs::read_to_string(&path)).on("read", &path)?.unwrap_or_default())
    };
    let mut routes = Vec::new();
    for line in text("route")?.lines().skip(1) {
        let fields: Vec<_> = line.split_whitespace().collect();
        if let [interface, "00000000", ..] = fields.as_slice() {
            routes.push(DefaultRoute { interface: (*interface).to_owned(), v6: false });
        }
    }
    let zero = "0".repeat(32);
    for line in text("ipv6_route")?.lines() {
        let fields: Vec<_> = line.split_whitespace().collect();
        // Destination, prefix length, source, prefix length, gateway, …, interface. Without a gateway it is the kernel's
        // own catch-all on the loopback interface.
        if fields.len() >= 10 && fields[0] == zero && fields[4] != zero {
            routes.push(DefaultRoute { interface: fields[9].to_owned(), v6: true });
        }
    }
    Ok(routes)
}

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// The interface is up.
    pub up: bool,
    /// The interface is a loopback.
    pub loopback: bool,
    /// The interface is point-to-point.
    pub point_to_point: bool,
}

/// Every address of every interface, in the kernel's order. `sys` gives the interface flags.
///
/// # Errors
/// The kernel does not answer.
pub fn interface_addresses(sys: &Path) -> Result<Vec<InterfaceAddress>> {
    let all = if_addrs::get_if_addrs().attempt(|| "list the interface addresses".into())?;
    let address = |i: if_addrs::Interface| {
        let ip = i.ip();
        let flags = std::fs::read_to_string(sys.join("class/net").join(&i.name).join("flags")).ok();
        let flags = flags.and_then(|f| u32::from_str_radix(f.trim().trim_start_matches("0x"), 16).ok());
        // Without sysfs: up, and loopback by the address.
        let flags = flags.unwrap_or(if ip.is_loopback() { 0x9 } else { 0x1 });
        InterfaceAddress {
            interface: i.name,
            ip,
            up: flags & 0x1 != 0,
            loopback: flags & 0x8 != 0,
            point_to_point: flags & 0x10 != 0,
        }
    };
    Ok(all.into_iter().map(address).collect())
}

fn is_global(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || link_local)
}

/// The node's address by its routes: a global address of the interface of a default route, else one of a loopback interface;
/// without any routing table a global address of any interface. IPv4 is tried first unless `prefer_v6`.
///
/// # Errors
/// There are no default routes, or none leads to an address.
pub fn choose_host_ip(
    routes: &[DefaultRoute],
    has_route_table: bool,
    addresses: &[InterfaceAddress],
    prefer_v6: bool,
) -> Result<IpAddr> {
    let what = "choose an address of this host";
    if has_route_table && routes.is_empty() {
        return Err(Failed::other(what, "no default routes found in \"/proc/net/route\" or \"/proc/net/ipv6_route\""));
    }
    let first = |wanted: &dyn Fn(&InterfaceAddress) -> bool, v6: bool| {
        addresses.iter().find(|a| a.up && a.ip.is_ipv6() == v6 && is_global(a.ip) && wanted(a)).map(|a| a.ip)
    };
    for v6 in [prefer_v6, !prefer_v6] {
        if !has_route_table && let Some(ip) = first(&|a| !a.loopback && !a.point_to_point, v6) {
            return Ok(ip);
        }
        for route in routes.iter().filter(|r| r.v6 == v6) {
            // Addresses of the node may stand on the loopback only, when its links have link-local ones (RFC 5549).
            if let Some(ip) = first(&|a| a.interface == route.interface, v6).or_else(|| first(&|a| a.loopback, v6)) {
                return Ok(ip);
            }
        }
    }
    Err(Failed::other(what, "unable to select an IP from default routes."))
}

/// Whether this can be the node's address.
///
/// # Errors
/// It cannot; the text says why.
pub fn validate_node_ip(ip: IpAddr, addresses: &[InterfaceAddress]) -> std::result::Result<(), String> {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if ip.is_loopback() {
        Err("nodeIP can't be loopback address".into())
    } else if ip.is_multicast() {
        Err("nodeIP can't be a multicast address".into())
    } else if link_local {
        Err("nodeIP can't be a link-local unicast address".into())
    } else if ip.is_unspecified() {
        Err("nodeIP can't be an all zeros address".into())
    } else if !addresses.iter().any(|a| a.ip == ip) {
        Err(format!("node IP: {:?} not found in the host's network interfaces", ip.to_string()))
    } else {
        Ok(())
    }
}

/// The node's address when none is configured (or only a family: `0.0.0.0`, `::`): the node name if it is an address, else what
/// the resolver gives for it if this host has that address, else [`choose_host_ip`]. Blocks as long as the resolver does.
///
/// # Errors
/// None is found.
pub fn detect_node_ip(proc: &Path, sys: &Path, node_name: &str, prefer_v6: bool) -> Result<IpAddr> {
    if let Ok(ip) = node_name.parse() {
        return Ok(ip);
    }
    let addresses = interface_addresses(sys)?;
    let resolved = (node_name, 0).to_socket_addrs().map(|all| all.map(|a| a.ip()).collect::<Vec<_>>());
    let mut usable = resolved.unwrap_or_default();
    usable.retain(|ip| validate_node_ip(*ip, &addresses).is_ok());
    if let Some(ip) = usable.iter().find(|ip| ip.is_ipv6() == prefer_v6).or(usable.first()) {
        return Ok(*ip);
    }
    choose_host_ip(&default_routes(proc)?, proc.join("net/route").exists(), &addresses, prefer_v6)
}

/// Every local address on which some process listens for TCP connections (`proc/net/tcp`, `proc/net/tcp6`).
///
/// # Errors
/// A file is there but cannot be read or parsed.
pub fn listening_ports(proc: &Path) -> Result<Vec<SocketAddr>> {
    let mut ports = Vec::new();
    for (name, any) in [("tcp", IpAddr::V4(Ipv4Addr::UNSPECIFIED)), ("tcp6", IpAddr::V6(Ipv6Addr::UNSPECIFIED))] {
        let path = proc.join("net").join(name);
        let Some(file) = found(std::fs::File::open(&path)).on("read", &path)? else { continue };
        let table = procfs::net::TcpNetEntries::from_read(file, current_system_info())
            .map_err(std::io::Error::other)
            .on("read", &path)?;
        let listening = table.0.iter().filter(|e| e.state == procfs::net::TcpState::Listen);
        let before = ports.len();
        ports.extend(listening.map(|e| e.local_address));
        // The wildcard first: it is what most questions are about.
        ports[before..].sort_by_key(|a| (a.ip() != any, a.port()));
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::put;

    const ROUTE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
    const ROUTE6: &str = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 20010001000000000000000000000001 00000064 00000000 00000000 00000003 eth2\n\
        00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200 lo\n";

    fn address(interface: &str, ip: &str) -> InterfaceAddress {
        InterfaceAddress {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            up: true,
            loopback: interface == "lo",
            point_to_point: false,
        }
    }

    #[test]
    fn routes_are_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(default_routes(dir.path()).unwrap().is_empty());
        put(dir.path(), "net/route", ROUTE);
        put(dir.path(), "net/ipv6_route", ROUTE6);
        let routes = default_routes(dir.path()).unwrap();
        let seen: Vec<_> = routes.iter().map(|r| (r.interface.as_str(), r.v6)).collect();
        assert_eq!(seen, [("eth0", false), ("eth2", true)]);
    }

    #[test]
    fn the_address_follows_the_default_route() {
        let v4 = DefaultRoute { interface: "eth0".into(), v6: false };
        let v6 = DefaultRoute { interface: "eth0".into(), v6: true };
        let all = [
            address("lo", "127.0.0.1"),
            address("eth1", "10.0.0.9"),
            address("eth0", "169.254.1.1"),
            address("eth0", "192.0.2.5"),
            address("eth0", "fe80::1"),
            address("eth0", "2001:db8::5"),
        ];
        let ip = |routes: &[DefaultRoute], table, addresses: &[InterfaceAddress], v6| {
            choose_host_ip(routes, table, addresses, v6).map(|ip| ip.to_string()).map_err(|e| e.source.to_string())
        };
        let both = [v4.clone(), v6.clone()];
        assert_eq!(ip(&both, true, &all, false).unwrap(), "192.0.2.5");
        assert_eq!(ip(&both, true, &all, true).unwrap(), "2001:db8::5");
        assert_eq!(ip(std::slice::from_ref(&v6), true, &all, false).unwrap(), "2001:db8::5");
        // Links with link-local addresses only: the loopback carries the node's address.
        let unnumbered = [address("lo", "127.0.0.1"), address("lo", "10.9.9.9"), address("eth0", "169.254.1.1")];
        assert_eq!(ip(std::slice::from_ref(&v4), true, &unnumbered, false).unwrap(), "10.9.9.9");
        // No routing table at all.
        assert_eq!(ip(&[], false, &all, false).unwrap(), "10.0.0.9");
        assert!(ip(&[], true, &all, false).unwrap_err().starts_with("no default routes found"));
        let mut down = all;
        down.iter_mut().for_each(|a| a.up = false);
        assert_eq!(ip(&[v4], true, &down, false).unwrap_err(), "unable to select an IP from default routes.");
    }

    #[test]
    fn node_addresses_are_checked() {
        let own = [address("eth0", "192.0.2.5")];
        let check = |ip: &str| validate_node_ip(ip.parse().unwrap(), &own);
        assert_eq!(check("192.0.2.5"), Ok(()));
        assert_eq!(check("127.0.0.1").unwrap_err(), "nodeIP can't be loopback address");
        assert_eq!(check("224.0.0.1").unwrap_err(), "nodeIP can't be a multicast address");
        assert_eq!(check("169.254.0.1").unwrap_err(), "nodeIP can't be a link-local unicast address");
        assert_eq!(check("::").unwrap_err(), "nodeIP can't be an all zeros address");
        assert_eq!(
            check("192.0.2.6").unwrap_err(),
            "node IP: \"192.0.2.6\" not found in the host's network interfaces"
        );
    }

    #[test]
    fn a_name_that_is_an_address_is_the_address() {
        let ip = detect_node_ip(Path::new("/proc"), Path::new("/sys"), "192.0.2.77", false).unwrap();
        assert_eq!(ip.to_string(), "192.0.2.77");
    }

    #[test]
    fn a_listener_of_this_process_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(listening_ports(Path::new("/proc")).unwrap().contains(&address));
        drop(listener);
        assert!(!listening_ports(Path::new("/proc")).unwrap().contains(&address));
    }

    #[test]
    fn the_loopback_is_among_the_interfaces() {
        let all = interface_addresses(Path::new("/sys")).unwrap();
        assert!(all.iter().any(|a| a.loopback && a.ip.is_loopback()), "{all:?}");
    }
}
