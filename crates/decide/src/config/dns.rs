//! resolv.conf of a pod: the node's file, the cluster's servers and `dnsConfig`, put together by `dnsPolicy` and cut to what resolvers take.

use model::api::PodDNSConfig;
use model::pod::DesiredPod;

use super::error::{ConfigError, pod_text};
use super::go_text::quote;

const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;
/// Some resolvers abort at a longer search domain.
const MAX_DOMAIN: usize = 253;

/// What a resolv.conf says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsConfig {
    /// `nameserver` lines.
    pub servers: Vec<String>,
    /// The `search` line.
    pub searches: Vec<String>,
    /// `options`, each `NAME` or `NAME:VALUE`, a name once.
    pub options: Vec<String>,
}

/// Node-wide settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsSettings {
    /// `clusterDNS`.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`.
    pub cluster_domain: String,
    /// What [`parse`] found in the file of `resolvConf`; None when that is the empty string: pods get a resolver on localhost.
    pub host: Option<DnsConfig>,
    /// The node's addresses.
    pub node_ips: Vec<String>,
}

/// A Warning event on the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsWarning {
    /// `DNSConfigForming` or `MissingClusterDNS`.
    pub reason: &'static str,
    /// The event's message.
    pub message: String,
}

/// A pod's DNS and what must be told about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDns {
    /// For the sandbox.
    pub config: DnsConfig,
    /// Events.
    pub warnings: Vec<DnsWarning>,
}

/// Message of the Warning event MissingClusterDNS on the node; on a pod `pod: "POD". ` stands before it.
pub const MISSING_CLUSTER_DNS: &str = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" \
                                       policy. Falling back to \"Default\" policy.";

/// Reads a resolv.conf. The last `search` line counts, all `options` lines do (a later one of the same name wins); a lone dot is not a
/// search domain, and a closing dot is dropped.
///
/// # Errors
/// A `nameserver` line without server.
pub fn parse(text: &str) -> Result<DnsConfig, ConfigError> {
    let mut out = DnsConfig::default();
    let mut empty = 0;
    for line in text.lines().map(str::trim).filter(|l| !l.starts_with('#')) {
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("nameserver") => match fields.next() {
                Some(server) => out.servers.push(server.into()),
                None => empty += 1,
            },
            Some("search") => {
                out.searches =
                    fields.filter(|s| *s != ".").map(|s| s.strip_suffix('.').unwrap_or(s).to_string()).collect();
            }
            Some("options") => fields.for_each(|option| set_option(&mut out.options, option.to_string())),
            _ => {}
        }
    }
    if empty > 0 {
        return Err(ConfigError::sandbox(
            "Encountered error while parsing resolv conf file. Error: nameserver list is empty ",
        ));
    }
    Ok(out)
}

/// Sets an option in place of one of the same name.
fn set_option(options: &mut Vec<String>, option: String) {
    let name = |o: &str| o.split(':').next().unwrap_or_default().to_string();
    match options.iter_mut().find(|o| name(o) == name(&option)) {
        Some(old) => *old = option,
        None => options.push(option),
    }
}

/// DNS of a pod by its policy: ClusterFirst (with host network: Default), ClusterFirstWithHostNet, Default, None.
pub fn pod_dns(pod: &DesiredPod, settings: &DnsSettings) -> PodDns {
    let spec = pod.spec();
    let mut out = PodDns { config: settings.host.clone().unwrap_or_default(), ..PodDns::default() };
    let config = &mut out.config;
    let cluster = match spec.dns_policy.as_deref().unwrap_or("ClusterFirst") {
        "None" => {
            *config = DnsConfig::default();
            None
        }
        "Default" => Some(false),
        "ClusterFirst" => Some(!pod.host_network()),
        _ => Some(true),
    };
    match cluster {
        Some(true) if !settings.cluster_dns.is_empty() => {
            config.servers.clone_from(&settings.cluster_dns);
            if !settings.cluster_domain.is_empty() {
                let domain = &settings.cluster_domain;
                let mut searches =
                    vec![format!("{}.svc.{domain}", pod.namespace()), format!("svc.{domain}"), domain.clone()];
                searches.append(&mut config.searches);
                config.searches = unique(searches);
            }
            config.options = vec!["ndots:5".into()];
        }
        Some(cluster) => {
            if cluster {
                let message = format!("pod: {}. {MISSING_CLUSTER_DNS}", quote(&pod_text(pod)));
                out.warnings.push(DnsWarning { reason: "MissingClusterDNS", message });
            }
            if settings.host.is_none() {
                config.servers = localhost(&settings.node_ips);
                config.searches = vec![".".into()];
            }
        }
        None => {}
    }
    if let Some(own) = &spec.dns_config {
        append(config, own);
    }
    fit(&mut out);
    out
}

fn localhost(node_ips: &[String]) -> Vec<String> {
    let of = |ip: &String| if ip.contains(':') { "::1" } else { "127.0.0.1" }.to_string();
    if node_ips.is_empty() { vec!["127.0.0.1".into()] } else { node_ips.iter().map(of).collect() }
}

fn unique(items: Vec<String>) -> Vec<String> {
    let mut seen = Vec::with_capacity(items.len());
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// Adds `spec.dnsConfig`; options of the same name are replaced.
fn append(config: &mut DnsConfig, own: &PodDNSConfig) {
    let more = |list: &mut Vec<String>, more: Option<&Vec<String>>| {
        let mut all = std::mem::take(list);
        all.extend(more.into_iter().flatten().cloned());
        *list = unique(all);
    };
    more(&mut config.servers, own.nameservers.as_ref());
    more(&mut config.searches, own.searches.as_ref());
    for option in own.options.iter().flatten() {
        let name = option.name.as_deref().unwrap_or_default();
        let value = option.value.as_deref().unwrap_or_default();
        let text = if value.is_empty() { name.to_string() } else { format!("{name}:{value}") };
        set_option(&mut config.options, text);
    }
}

/// Cuts servers and search domains to what resolvers take, and says so.
fn fit(dns: &mut PodDns) {
    let config = &mut dns.config;
    let mut warn = |message| dns.warnings.push(DnsWarning { reason: "DNSConfigForming", message });
    if config.servers.len() > MAX_SERVERS {
        config.servers.truncate(MAX_SERVERS);
        warn(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            config.servers.join(" ")
        ));
    }
    let before = config.searches.len();
    config.searches.truncate(MAX_SEARCHES);
    config.searches.retain(|s| s.len() <= MAX_DOMAIN);
    let chars =
        |searches: &[String]| searches.iter().map(String::len).sum::<usize>() + searches.len().saturating_sub(1);
    while chars(&config.searches) > MAX_SEARCH_CHARS {
        config.searches.pop();
    }
    if config.searches.len() < before {
        warn(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            config.searches.join(" ")
        ));
    }
}

/// Message of the Warning event CheckLimitsForResolvConf on the node: the node's own search line leaves no room for the cluster's.
pub fn check_limits(path: &str, searches: &[String], cluster_domain: &str) -> Option<String> {
    let most = if cluster_domain.is_empty() { MAX_SEARCHES } else { MAX_SEARCHES - 3 };
    if searches.len() > most {
        Some(format!("Resolv.conf file '{path}' contains search line consisting of more than {most} domains!"))
    } else if searches.iter().any(|s| s.len() > MAX_DOMAIN) {
        Some(format!(
            "Resolv.conf file {} contains a search path which length is more than allowed {MAX_DOMAIN} chars!",
            quote(path)
        ))
    } else if searches.join(" ").len() > MAX_SEARCH_CHARS {
        Some(format!(
            "Resolv.conf file '{path}' contains search line which length is more than allowed {MAX_SEARCH_CHARS} chars!"
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::resources::testing::pod;

    const HOST: &str = "# a comment\nnameserver 10.0.0.1\n  nameserver 10.0.0.2 ignored\nnameserver fe80::1%eth0\nnameserver 10.0.0.4\n\
                        search old.example\noptions ndots:2 rotate\nsearch a.example. . b.example a.example\n; x\noptions timeout:1 ndots:3\n";

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|s| s.to_string()).collect()
    }

    fn forming(message: &str) -> DnsWarning {
        DnsWarning { reason: "DNSConfigForming", message: message.into() }
    }

    fn settings() -> DnsSettings {
        DnsSettings {
            cluster_dns: strings(&["10.96.0.10"]),
            cluster_domain: "cluster.local".into(),
            host: Some(parse(HOST).expect("resolv.conf")),
            node_ips: strings(&["192.0.2.1", "2001:db8::1"]),
        }
    }

    fn dns(spec: &str, settings: &DnsSettings) -> PodDns {
        pod_dns(&pod(&format!(r#"{{"containers": []{spec}}}"#)), settings)
    }

    #[test]
    fn host_file() {
        assert_eq!(
            parse(HOST),
            Ok(DnsConfig {
                servers: strings(&["10.0.0.1", "10.0.0.2", "fe80::1%eth0", "10.0.0.4"]),
                searches: strings(&["a.example", "b.example", "a.example"]),
                options: strings(&["ndots:3", "rotate", "timeout:1"]),
            })
        );
        assert_eq!(parse("").unwrap(), DnsConfig::default());
        assert!(parse("nameserver\n").is_err());
    }

    #[test]
    fn policies() {
        let s = settings();
        let cluster = DnsConfig {
            servers: strings(&["10.96.0.10"]),
            searches: strings(&[
                "ns.svc.cluster.local",
                "svc.cluster.local",
                "cluster.local",
                "a.example",
                "b.example",
            ]),
            options: strings(&["ndots:5"]),
        };
        let host = PodDns {
            config: DnsConfig {
                servers: strings(&["10.0.0.1", "10.0.0.2", "fe80::1%eth0"]),
                searches: strings(&["a.example", "b.example", "a.example"]),
                options: strings(&["ndots:3", "rotate", "timeout:1"]),
            },
            warnings: vec![forming(
                "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: \
                 10.0.0.1 10.0.0.2 fe80::1%eth0",
            )],
        };
        for spec in
            ["", r#", "dnsPolicy": "ClusterFirst""#, r#", "dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true"#]
        {
            assert_eq!(dns(spec, &s), PodDns { config: cluster.clone(), ..PodDns::default() }, "{spec}");
        }
        for spec in [r#", "dnsPolicy": "Default""#, r#", "dnsPolicy": "ClusterFirst", "hostNetwork": true"#] {
            assert_eq!(dns(spec, &s), host, "{spec}");
        }
        assert_eq!(dns(r#", "dnsPolicy": "None""#, &s), PodDns::default());

        let without = DnsSettings { cluster_dns: vec![], ..s.clone() };
        let got = dns(r#", "dnsPolicy": "ClusterFirst""#, &without);
        assert_eq!(got.config, host.config);
        assert_eq!((got.warnings.len(), got.warnings[0].reason), (2, "MissingClusterDNS"));
        assert_eq!(
            got.warnings[0].message,
            "pod: \"web_ns(uid-1)\". kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. \
             Falling back to \"Default\" policy."
        );

        let empty = DnsSettings { host: None, ..s };
        let got = dns(r#", "dnsPolicy": "Default""#, &empty).config;
        assert_eq!((got.servers, got.searches), (strings(&["127.0.0.1", "::1"]), strings(&["."])));
        assert_eq!(dns("", &empty).config.searches.len(), 3);
    }

    #[test]
    fn dns_config_is_merged() {
        let spec = r#", "dnsConfig": {"nameservers": ["1.1.1.1", "10.96.0.10"], "searches": ["b.example", "c.example"],
            "options": [{"name": "ndots", "value": "1"}, {"name": "edns0"}, {"name": "x", "value": ""}]}"#;
        let got = dns(spec, &settings()).config;
        assert_eq!(got.servers, strings(&["10.96.0.10", "1.1.1.1"]));
        assert_eq!(
            got.searches,
            strings(&[
                "ns.svc.cluster.local",
                "svc.cluster.local",
                "cluster.local",
                "a.example",
                "b.example",
                "c.example"
            ])
        );
        assert_eq!(got.options, strings(&["ndots:1", "edns0", "x"]));
        let default = dns(&format!(r#"{spec}, "dnsPolicy": "Default""#), &settings()).config;
        assert_eq!(default.searches, strings(&["a.example", "b.example", "c.example"]));
        assert_eq!(default.options, strings(&["ndots:1", "rotate", "timeout:1", "edns0", "x"]));
    }

    #[test]
    fn forty_searches() {
        let searches: Vec<String> = (0..40).map(|i| format!("d{i}.example")).collect();
        let list = serde_json::to_string(&searches).expect("json");
        let got = dns(&format!(r#", "dnsPolicy": "None", "dnsConfig": {{"searches": {list}}}"#), &settings());
        assert_eq!(got.config.searches, searches[..32]);
        assert_eq!(
            got.warnings,
            [forming(&format!(
                "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
                searches[..32].join(" ")
            ))]
        );
    }

    #[test]
    fn node_limits() {
        let many: Vec<String> = (0..30).map(|i| format!("d{i}")).collect();
        assert_eq!(
            check_limits("/r", &many, "cluster.local").as_deref(),
            Some("Resolv.conf file '/r' contains search line consisting of more than 29 domains!")
        );
        assert_eq!(check_limits("/r", &many, ""), None);
        assert_eq!(
            check_limits("/r", &["x".repeat(254)], "").as_deref(),
            Some("Resolv.conf file \"/r\" contains a search path which length is more than allowed 253 chars!")
        );
        assert_eq!(
            check_limits("/r", &vec!["x".repeat(250); 9], "").as_deref(),
            Some("Resolv.conf file '/r' contains search line which length is more than allowed 2048 chars!")
        );
    }

    proptest! {
        /// Whatever is asked for, the result fits, is a prefix but for over-long domains, and a warning tells of any loss.
        #[test]
        fn limits_hold(
            servers in prop::collection::vec("[0-9]{1,3}", 0..8),
            searches in prop::collection::vec("[a-z]{1,9}|[a-z]{200,260}", 0..50),
        ) {
            let config = DnsConfig { servers: servers.clone(), searches: searches.clone(), options: vec![] };
            let mut dns = PodDns { config, ..PodDns::default() };
            fit(&mut dns);
            prop_assert!(dns.config.servers.len() <= MAX_SERVERS);
            prop_assert!(dns.config.searches.len() <= MAX_SEARCHES);
            prop_assert!(dns.config.searches.join(" ").len() <= MAX_SEARCH_CHARS);
            let kept: Vec<_> = searches.iter().take(MAX_SEARCHES).filter(|s| s.len() <= MAX_DOMAIN).cloned().collect();
            prop_assert!(kept.starts_with(&dns.config.searches));
            let lost = dns.config.searches.len() < searches.len();
            let lost_server = dns.config.servers.len() < servers.len();
            prop_assert_eq!(dns.warnings.len(), usize::from(lost) + usize::from(lost_server));
        }
    }
}
