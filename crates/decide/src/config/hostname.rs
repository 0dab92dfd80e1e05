//! Host name and domain of a pod.

use model::pod::DesiredPod;

use super::error::ConfigError;
use super::go_text::quote;
use super::validate;

/// Bytes of a Linux host name without the closing zero.
const MAX_HOSTNAME: usize = 63;
/// Bytes that the kernel's node name takes.
const MAX_NODENAME: usize = 64;

/// Short host name and domain; the domain is empty without `spec.subdomain`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodHostname {
    /// Without domain, at most 63 bytes.
    pub hostname: String,
    /// `SUBDOMAIN.NAMESPACE.svc.CLUSTERDOMAIN`.
    pub domain: String,
}

/// `spec.hostnameOverride` (when its gate is on), else `spec.hostname`, else the pod's name; cut to 63 bytes.
///
/// # Errors
/// A name in the spec that is no DNS name.
pub fn pod_hostname(pod: &DesiredPod, cluster_domain: &str, override_gate: bool) -> Result<PodHostname, ConfigError> {
    let spec = pod.spec();
    let bad = |field, value: &str, kind, faults: Vec<String>| {
        if faults.is_empty() {
            Ok(())
        } else {
            Err(ConfigError::container(validate::pod_field(field, value, kind, &faults)))
        }
    };
    if let Some(name) = spec.hostname_override.as_deref().filter(|_| override_gate) {
        bad("HostnameOverride", name, "DNS subdomain", validate::dns_subdomain(name))?;
        return Ok(PodHostname { hostname: cut(pod.name(), name)?, domain: String::new() });
    }
    let mut name = pod.name();
    if let Some(own) = spec.hostname.as_deref().filter(|h| !h.is_empty()) {
        bad("Hostname", own, "DNS label", validate::dns_label(own))?;
        name = own;
    }
    let hostname = cut(pod.name(), name)?;
    let mut domain = String::new();
    if let Some(sub) = spec.subdomain.as_deref().filter(|s| !s.is_empty()) {
        bad("Subdomain", sub, "DNS label", validate::dns_label(sub))?;
        domain = format!("{sub}.{}.svc.{cluster_domain}", pod.namespace());
    }
    Ok(PodHostname { hostname, domain })
}

fn cut(pod: &str, name: &str) -> Result<String, ConfigError> {
    if name.len() <= MAX_HOSTNAME {
        return Ok(name.to_string());
    }
    let mut end = MAX_HOSTNAME;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let short = name[..end].trim_end_matches(['-', '.']);
    if short.is_empty() {
        return Err(ConfigError::container(format!("hostname for pod {} was invalid: {}", quote(pod), quote(name))));
    }
    Ok(short.to_string())
}

/// The sandbox's host name: the short one, or with `setHostnameAsFQDN` the full one.
///
/// # Errors
/// A full name that the kernel cannot hold.
pub fn kernel_hostname(name: &PodHostname, as_fqdn: bool) -> Result<String, ConfigError> {
    if !as_fqdn || name.domain.is_empty() {
        return Ok(name.hostname.clone());
    }
    let fqdn = format!("{}.{}", name.hostname, name.domain);
    if fqdn.len() > MAX_NODENAME {
        return Err(ConfigError::sandbox(format!(
            "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long ({MAX_NODENAME} characters is the \
             max, {} characters requested)",
            fqdn.len()
        )));
    }
    Ok(fqdn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::testing::{pod, pod_with};

    fn name(spec: &str) -> Result<(String, String), String> {
        let spec = format!(r#"{{"containers": []{spec}}}"#);
        let got = pod_hostname(&pod(&spec), "cluster.local", true).map_err(|e| e.message)?;
        Ok((got.hostname, got.domain))
    }

    #[test]
    fn names() {
        let ok = |h: &str, d: &str| Ok((h.to_string(), d.to_string()));
        assert_eq!(name(""), ok("web", ""));
        assert_eq!(name(r#", "hostname": "h""#), ok("h", ""));
        assert_eq!(name(r#", "hostname": "h", "subdomain": "s""#), ok("h", "s.ns.svc.cluster.local"));
        assert_eq!(name(r#", "hostname": "h", "subdomain": "s", "hostnameOverride": "a.b""#), ok("a.b", ""));
        assert_eq!(
            name(r#", "hostname": "a.b""#),
            Err(r#"pod Hostname "a.b" is not a valid DNS label: must not contain dots"#.to_string())
        );
        assert_eq!(
            name(r#", "subdomain": "A""#),
            Err("pod Subdomain \"A\" is not a valid DNS label: a lowercase RFC 1123 label must consist of lower case alphanumeric characters \
                 or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
                 '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
                .to_string())
        );
    }

    #[test]
    fn long_pod_names_are_cut() {
        for (tail, want) in [("xyz", 63), ("-.x", 61), ("x", 63)] {
            let long = format!("{}{tail}", "a".repeat(61));
            let long = format!("{long}{}", "b".repeat(80 - long.len()));
            let p = pod_with(&format!(r#"{{"name": "{long}"}}"#), r#"{"containers": []}"#);
            let got = pod_hostname(&p, "d", true).expect("name").hostname;
            assert_eq!(got.len(), want, "{got}");
            assert!(long.starts_with(&got));
        }
    }

    #[test]
    fn fqdn_must_fit_the_kernel() {
        let long = PodHostname { hostname: "h".repeat(40), domain: "s.ns.svc.cluster.local".into() };
        let fits = PodHostname { hostname: "h".repeat(41), ..long.clone() };
        assert_eq!(kernel_hostname(&long, true).map(|n| n.len()), Ok(63));
        assert_eq!(kernel_hostname(&fits, true).map(|n| n.len()), Ok(64));
        let over = PodHostname { hostname: "h".repeat(42), ..long };
        let fqdn = format!("{}.{}", over.hostname, over.domain);
        assert_eq!(
            kernel_hostname(&over, true).map_err(|e| e.message),
            Err(format!(
                "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long (64 characters is the max, 65 characters requested)"
            ))
        );
        assert_eq!(kernel_hostname(&over, false).map(|n| n.len()), Ok(42));
    }
}
