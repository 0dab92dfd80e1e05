//! The `/etc/hosts` of a pod's containers.

use model::api::HostAlias;
use model::pod::DesiredPod;

use super::hostname::PodHostname;

const HEADER: &str = "# Kubernetes-managed hosts file.\n";
const HOST_NETWORK_HEADER: &str = "# Kubernetes-managed hosts file (host network).\n";
const LOCAL: &str = "127.0.0.1\tlocalhost\n\
                     ::1\tlocalhost ip6-localhost ip6-loopback\n\
                     fe00::0\tip6-localnet\n\
                     fe00::0\tip6-mcastprefix\n\
                     fe00::1\tip6-allnodes\n\
                     fe00::2\tip6-allrouters\n";

/// The file of a pod. `hostname` matters without host network, `node_file` (the node's own `/etc/hosts`) with it.
pub fn content(
    pod: &DesiredPod,
    hostname: Option<&PodHostname>,
    pod_ips: &[String],
    node_file: Option<&[u8]>,
) -> Vec<u8> {
    let aliases = pod.spec().host_aliases.as_deref().unwrap_or_default();
    if pod.host_network() {
        host_network(node_file.unwrap_or_default(), aliases)
    } else {
        managed(pod_ips, hostname.unwrap_or(&PodHostname::default()), aliases).into_bytes()
    }
}

/// The file for a pod with a network of its own.
pub fn managed(pod_ips: &[String], hostname: &PodHostname, aliases: &[HostAlias]) -> String {
    let mut out = format!("{HEADER}{LOCAL}");
    let host = &hostname.hostname;
    for ip in pod_ips {
        if hostname.domain.is_empty() {
            out.push_str(&format!("{ip}\t{host}\n"));
        } else {
            out.push_str(&format!("{ip}\t{host}.{}\t{host}\n", hostname.domain));
        }
    }
    out + &alias_lines(aliases)
}

/// The file for a pod on the host's network: the node's own file and the aliases. The node's file may be in any encoding.
pub fn host_network(node_file: &[u8], aliases: &[HostAlias]) -> Vec<u8> {
    [HOST_NETWORK_HEADER.as_bytes(), node_file, alias_lines(aliases).as_bytes()].concat()
}

fn alias_lines(aliases: &[HostAlias]) -> String {
    if aliases.is_empty() {
        return String::new();
    }
    let mut out = String::from("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        out.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.as_deref().unwrap_or_default().join("\t")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aliases() -> Vec<HostAlias> {
        vec![HostAlias { ip: "123.45.67.89".into(), hostnames: Some(vec!["foo".into(), "bar".into()]) }]
    }

    #[test]
    fn own_network() {
        let name = |domain: &str| PodHostname { hostname: "web".into(), domain: domain.into() };
        let ips = ["10.1.2.3".to_string(), "fd00::3".to_string()];
        let plain = managed(&ips, &name(""), &[]);
        assert_eq!(
            plain,
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n\
             fe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n10.1.2.3\tweb\nfd00::3\tweb\n"
        );
        let full = managed(&ips[..1], &name("sub.ns.svc.cluster.local"), &aliases());
        assert!(full.ends_with(
            "ip6-allrouters\n10.1.2.3\tweb.sub.ns.svc.cluster.local\tweb\n\n# Entries added by HostAliases.\n123.45.67.89\tfoo\tbar\n"
        ));
    }

    #[test]
    fn hosts_network() {
        assert_eq!(
            host_network(b"127.0.0.1 localhost\n", &aliases()),
            b"# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n\n# Entries added by HostAliases.\n123.45.67.89\tfoo\tbar\n"
        );
        assert_eq!(host_network(b"x", &[]), b"# Kubernetes-managed hosts file (host network).\nx");
    }
}
