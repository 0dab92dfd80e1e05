//! Rules about addresses, TLS, logs, traces and sockets.

use std::net::IpAddr;

use model::quantity::Quantity;

use super::Report;
use crate::duration::quote;
use crate::gates::{Gate, Gates};
use crate::nested::{LogFormat, LogRouting};
use crate::types::KubeletConfiguration;

/// Cipher suite names that Go's TLS library has, weak ones after the others.
const CIPHERS: [&str; 15] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];
const WEAK_CIPHERS: [&str; 12] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];
const TLS_VERSIONS: [&str; 4] = ["VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"];
/// klog takes an int32.
const MAX_VERBOSITY: u32 = i32::MAX.unsigned_abs();

pub(super) fn validate(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    addresses(c, r);
    tls(c, gates, r);
    logging(c, gates, r);
    tracing(c, r);
    sockets(c, r);
    let query = "enableSystemLogQuery";
    if c.enable_system_log_query {
        if !gates.enabled(Gate::NodeLogQuery) {
            r.invalid(query, "NodeLogQuery feature gate is required for enableSystemLogQuery");
        }
        if !c.enable_system_log_handler {
            r.invalid(query, "enableSystemLogHandler is required for enableSystemLogQuery");
        }
    }
}

fn addresses(c: &KubeletConfiguration, r: &mut Report) {
    for (path, flag, value) in
        [("address", "address", &c.address), ("healthzBindAddress", "healthz-bind-address", &c.healthz_bind_address)]
    {
        if value.parse::<IpAddr>().is_err() {
            r.invalid(path, format!("{path} (--{flag}) {} is not a valid IP address", quote(value)));
        }
    }
    for (i, server) in c.cluster_dns.iter().enumerate() {
        // Kubernetes logs such an entry and goes on without it.
        if server.parse::<IpAddr>().is_err() {
            let path = format!("clusterDNS[{i}]");
            r.warning(&path, format!("Invalid clusterDNS IP {}: the entry is left out", quote(server)));
        }
    }
    for cidr in c.pod_cidr.split(',').filter(|cidr| !cidr.is_empty()) {
        let parsed = cidr.split_once('/').and_then(|(ip, bits)| {
            let max = if ip.parse::<IpAddr>().ok()?.is_ipv4() { 32 } else { 128 };
            bits.parse::<u8>().ok().filter(|b| *b <= max)
        });
        if parsed.is_none() {
            r.invalid("podCIDR", format!("podCIDR (--pod-cidr) {} is not a CIDR such as 10.100.0.0/24", quote(cidr)));
        }
    }
    let url = c.static_pod_url.as_str();
    if !url.is_empty() && !url.starts_with("http://") && !url.starts_with("https://") {
        r.invalid(
            "staticPodURL",
            format!("staticPodURL (--manifest-url) {} must start with http:// or https://", quote(url)),
        );
    }
}

fn tls(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    for name in &c.tls_cipher_suites {
        if WEAK_CIPHERS.contains(&name.as_str()) {
            r.warning("tlsCipherSuites", format!("Use of insecure cipher detected. cipher=\"{name}\""));
        } else if !CIPHERS.contains(&name.as_str()) {
            let known = CIPHERS.join(", ");
            r.error(
                "tlsCipherSuites",
                format!("Cipher suite {name} not supported or doesn't exist; must be one of {known}"),
            );
        }
    }
    let version = c.tls_min_version.as_str();
    if !version.is_empty() && !TLS_VERSIONS.contains(&version) {
        let known = TLS_VERSIONS.join(", ");
        r.error("tlsMinVersion", format!("unknown tls version {}; must be one of {known}", quote(version)));
    }
    if version == "VersionTLS13" && !c.tls_cipher_suites.is_empty() {
        r.warning(
            "tlsCipherSuites",
            "Warning: TLS 1.3 cipher suites are not configurable, ignoring --tls-cipher-suites",
        );
    }
    for (i, curve) in c.tls_curve_preferences.iter().enumerate() {
        if !(1..=65535).contains(curve) {
            r.error("tlsCurvePreferences", format!("curve preference {curve} is out of range (must be 1-65535)"));
        } else if c.tls_curve_preferences[..i].contains(curve) {
            r.error("tlsCurvePreferences", format!("duplicate curve preference {curve}"));
        }
    }
    if c.tls_cert_file.is_empty() != c.tls_private_key_file.is_empty() {
        r.invalid(
            "tlsCertFile",
            "tlsCertFile (--tls-cert-file) and tlsPrivateKeyFile (--tls-private-key-file) must be given together",
        );
    }
    if c.server_tls_bootstrap && !gates.enabled(Gate::RotateKubeletServerCertificate) {
        r.invalid("serverTLSBootstrap", "serverTLSBootstrap true requires feature gate RotateKubeletServerCertificate");
    }
}

fn logging(c: &KubeletConfiguration, gates: &Gates, r: &mut Report) {
    let log = &c.logging;
    // A file's zero means the default; only a flag can set it.
    if log.flush_frequency.is_zero() {
        r.error("logging.flushFrequency", "logging.flushFrequency: Invalid value: \"0s\": Must be greater than zero");
    }
    let too_loud = |path: &str, verbosity: u32, r: &mut Report| {
        if verbosity > MAX_VERBOSITY {
            r.error(path, format!("{path}: Invalid value: {verbosity}: Must be <= {MAX_VERBOSITY}"));
        }
    };
    too_loud("logging.verbosity", log.verbosity, r);
    if log.format != LogFormat::Text && !log.vmodule.is_empty() {
        r.error("logging.vmodule", "logging.vmodule: Forbidden: Only supported for text log format");
    }
    for (i, item) in log.vmodule.iter().enumerate() {
        let path = format!("logging.vmodule[{i}]");
        let pattern = &item.file_pattern;
        if pattern.is_empty() {
            r.error(&path, format!("{path}: Required value: File pattern must not be empty"));
        }
        if pattern.contains(['=', ',']) {
            let pattern = quote(pattern);
            r.error(
                &path,
                format!("{path}: Invalid value: {pattern}: File pattern must not contain equal sign or comma"),
            );
        }
        too_loud(&path, item.verbosity, r);
    }
    if gates.enabled(Gate::LoggingAlphaOptions) {
        return;
    }
    for (name, options) in [("text", &log.options.text), ("json", &log.options.json)] {
        let LogRouting { split_stream, info_buffer_size } = options;
        for (field, set) in [("splitStream", *split_stream), ("infoBufferSize", !Quantity::is_zero(info_buffer_size))] {
            if set {
                let path = format!("logging.options.{name}.{field}");
                r.error(&path, format!("{path}: Forbidden: Feature LoggingAlphaOptions is disabled"));
            }
        }
    }
}

fn tracing(c: &KubeletConfiguration, r: &mut Report) {
    let Some(tracing) = &c.tracing else { return };
    if let Some(rate) = tracing.sampling_rate_per_million {
        let path = "tracing.samplingRatePerMillion";
        if rate < 0 {
            r.error(path, format!("{path}: Invalid value: {rate}: sampling rate must be positive"));
        }
        if rate > 1_000_000 {
            r.error(
                path,
                format!(
                    "{path}: Invalid value: {rate}: sampling rate per million must be less than or equal to one million"
                ),
            );
        }
    }
    if let Some(endpoint) = &tracing.endpoint
        && let Some((scheme, _)) = endpoint.split_once("//")
    {
        let path = "tracing.endpoint";
        let scheme = scheme.trim_end_matches(':');
        if !["dns", "unix", "unix-abstract"].contains(&scheme) {
            let endpoint = quote(endpoint);
            r.error(path, format!("{path}: Invalid value: {endpoint}: unsupported scheme: {scheme}.  Options are none, dns, unix, or unix-abstract.  See https://github.com/grpc/grpc/blob/master/doc/naming.md"));
        }
    }
}

fn sockets(c: &KubeletConfiguration, r: &mut Report) {
    let path = "containerRuntimeEndpoint";
    if c.container_runtime_endpoint.is_empty() {
        r.invalid(path, "the containerRuntimeEndpoint was not specified or empty");
    }
    for (path, endpoint) in [(path, &c.container_runtime_endpoint), ("imageServiceEndpoint", &c.image_service_endpoint)]
    {
        let shown = quote(endpoint);
        match endpoint.split_once("://") {
            Some(("unix", socket)) if socket.starts_with('/') => {}
            Some(("unix", _)) => {
                r.invalid(
                    path,
                    format!("{path} {shown} needs an absolute path, as in unix:///run/containerd/containerd.sock"),
                );
            }
            Some(("tcp", _)) => r.error(path, "only support unix socket endpoint"),
            Some((scheme, _)) => {
                let scheme = quote(scheme);
                r.error(path, format!("protocol {scheme} not supported: {path} must be a unix:// URL"));
            }
            None if endpoint.is_empty() => {}
            None if endpoint.starts_with('/') => {
                r.warning(
                    path,
                    format!("using {shown} as endpoint is deprecated, please consider using full url format"),
                );
            }
            None => r.invalid(path, format!("{path} {shown} must be a unix:// URL")),
        }
    }
}
