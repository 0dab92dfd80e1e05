//! Names, keys, ports and addresses: what is well formed, and how the API says that something is not.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::field::{Errors, Path};

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const LABEL_KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const LABEL_KEY_RULE: &str =
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

fn max_len(max: usize) -> String {
    format!("must be no more than {max} characters")
}

/// Labels count in bytes, with a word of its own.
fn max_bytes(max: usize) -> String {
    format!("must be no more than {max} bytes")
}

fn regex_error(rule: &str, regex: &str, examples: &[&str]) -> String {
    let examples: Vec<String> = examples.iter().map(|e| format!("'{e}', ")).collect();
    format!("{rule} (e.g. {}regex used for validation is '{regex}')", examples.join(" or "))
}

/// The message for a number out of `min..=max`.
pub(crate) fn range_error(min: i64, max: i64) -> String {
    format!("must be between {min} and {max}, inclusive")
}

fn lower_alnum(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

/// Starts and ends with `edge`, all of it `edge` or one of `inner`.
fn framed(text: &str, edge: impl Fn(u8) -> bool, inner: &[u8]) -> bool {
    let b = text.as_bytes();
    b.first().is_some_and(|c| edge(*c))
        && b.last().is_some_and(|c| edge(*c))
        && b.iter().all(|c| edge(*c) || inner.contains(c))
}

fn is_label(text: &str) -> bool {
    framed(text, lower_alnum, b"-")
}

fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

/// RFC 1123 label.
pub(crate) fn dns_label(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.len() > 63 {
        errors.push(max_len(63));
    }
    if !is_label(value) {
        errors.push(if is_subdomain(value) {
            "must not contain dots".into()
        } else {
            regex_error(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an \
                 alphanumeric character",
                LABEL,
                &["my-name", "123-abc"],
            )
        });
    }
    errors
}

/// RFC 1123 subdomain.
pub(crate) fn dns_subdomain(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.len() > 253 {
        errors.push(max_len(253));
    }
    if !is_subdomain(value) {
        errors.push(regex_error(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with \
             an alphanumeric character",
            &format!("{LABEL}(\\.{LABEL})*"),
            &["example.com"],
        ));
    }
    errors
}

/// As [`dns_subdomain`], with underscores, for DNS search domains.
pub(crate) fn dns_search(value: &str) -> Vec<String> {
    const LABEL: &str = "_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?";
    let mut errors = Vec::new();
    if value.len() > 253 {
        errors.push(max_len(253));
    }
    if !value.split('.').all(|l| framed(l.strip_prefix('_').unwrap_or(l), lower_alnum, b"-_")) {
        errors.push(regex_error(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end \
             with an alphanumeric character",
            &format!("{LABEL}(\\.{LABEL})*"),
            &["example.com"],
        ));
    }
    errors
}

/// A qualified name: `[DOMAIN/]NAME`.
pub(crate) fn label_key(value: &str) -> Vec<String> {
    let examples = &["MyName", "my.name", "123-abc"];
    let mut errors = Vec::new();
    let name = match value.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                errors.push("prefix part must be non-empty".into());
            } else {
                let found = dns_subdomain(prefix)
                    .into_iter()
                    .map(|e| e.replace("no more than 253 characters", "no more than 253 bytes"));
                errors.extend(found.map(|e| format!("prefix part {e}")));
            }
            name
        }
        _ => {
            return vec![format!(
                "a valid label key {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                regex_error(LABEL_KEY_RULE, LABEL_KEY, examples)
            )];
        }
    };
    if name.is_empty() {
        errors.push("name part must be non-empty".into());
    } else if name.len() > 63 {
        errors.push(format!("name part {}", max_bytes(63)));
    }
    if !is_label_key_name(name) {
        errors.push(format!("name part {}", regex_error(LABEL_KEY_RULE, LABEL_KEY, examples)));
    }
    errors
}

fn is_label_key_name(name: &str) -> bool {
    framed(name, |b| b.is_ascii_alphanumeric(), b"-_.")
}

/// The value of a label.
pub(crate) fn label_value(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.len() > 63 {
        errors.push(max_bytes(63));
    }
    if !value.is_empty() && !is_label_key_name(value) {
        errors.push(regex_error(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
             alphanumeric character",
            &format!("({LABEL_KEY})?"),
            &["MyValue", "my_value", "12345"],
        ));
    }
    errors
}

/// The name of a port (RFC 6335, lower case).
pub(crate) fn port_name(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.len() > 15 {
        errors.push(max_len(15));
    }
    if value.is_empty() || !value.bytes().all(|b| lower_alnum(b) || b == b'-') {
        errors.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".into());
    }
    if !value.bytes().any(|b| b.is_ascii_lowercase()) {
        errors.push("must contain at least one letter (a-z)".into());
    }
    if value.contains("--") {
        errors.push("must not contain consecutive hyphens".into());
    }
    if value.starts_with('-') || value.ends_with('-') {
        errors.push("must not begin or end with a hyphen".into());
    }
    errors
}

/// A port number.
pub(crate) fn port_number(value: i32) -> Vec<String> {
    if (1..=65535).contains(&value) { Vec::new() } else { vec![range_error(1, 65535)] }
}

/// The name of an environment variable (KEP-4369).
pub(crate) fn env_name(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.is_empty() {
        errors.push("environment variable name must be non-empty".into());
    }
    if !value.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'=') {
        errors.push(
            "a valid environment variable name must consist only of printable ASCII characters other than '='".into(),
        );
    }
    errors
}

/// A key of a ConfigMap or Secret.
pub(crate) fn config_key(value: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if value.len() > 253 {
        errors.push(max_len(253));
    }
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        errors.push(regex_error(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            "[-._a-zA-Z0-9]+",
            &["key.name", "KEY_NAME", "key-name"],
        ));
    }
    match value {
        "." => errors.push("must not be '.'".into()),
        ".." => errors.push("must not be '..'".into()),
        v if v.starts_with("..") => errors.push("must not start with '..'".into()),
        _ => {}
    }
    errors
}

/// The name of an HTTP header.
pub(crate) fn http_header(value: &str) -> Vec<String> {
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Vec::new();
    }
    let rule = "a valid HTTP header must consist of alphanumeric characters or '-'";
    vec![regex_error(rule, "[-A-Za-z0-9]+", &["X-Header-Name"])]
}

/// A user or group id.
pub(crate) fn unix_id(value: i64) -> Vec<String> {
    let max = i64::from(i32::MAX);
    if (0..=max).contains(&value) { Vec::new() } else { vec![range_error(0, max)] }
}

/// An IP address in a field that takes addresses in any form but the ambiguous ones.
pub(crate) fn ip(errors: &mut Errors, path: &Path, value: &str) {
    let mapped = |ip: Ipv6Addr| ip.to_ipv4_mapped().is_some();
    match value.parse::<Ipv6Addr>() {
        Ok(ip) if mapped(ip) => errors.invalid(path, value, "must not be an IPv4-mapped IPv6 address"),
        Ok(_) => {}
        Err(_) if value.parse::<Ipv4Addr>().is_ok() => {}
        Err(_) if without_zeros(value).parse::<Ipv4Addr>().is_ok() => {
            errors.invalid(path, value, "must not have leading 0s")
        }
        Err(_) => errors.invalid(path, value, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
    }
}

/// An IPv4 address without the zeros before its numbers.
fn without_zeros(value: &str) -> String {
    let number = |n: &str| {
        let short = n.trim_start_matches('0');
        if short.is_empty() && !n.is_empty() { "0".to_string() } else { short.to_string() }
    };
    value.split('.').map(number).collect::<Vec<_>>().join(".")
}

/// A sysctl's name, `.` or `/` between its parts.
pub(crate) fn is_sysctl(name: &str) -> bool {
    name.len() <= 253 && name.split(['.', '/']).all(|part| framed(part, lower_alnum, b"-_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert!(dns_label("a-1").is_empty());
        assert_eq!(dns_label("a.b"), ["must not contain dots"]);
        assert_eq!(dns_label(&"a".repeat(64)), ["must be no more than 63 characters"]);
        assert_eq!(
            dns_subdomain("A"),
            [
                "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with \
              an alphanumeric character (e.g. 'example.com', regex used for validation is \
              '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
            ]
        );
        assert!(label_key("a.b/C_d").is_empty());
        assert_eq!(label_key("a/b/c").len(), 1);
        assert_eq!(label_key("/c"), ["prefix part must be non-empty"]);
        assert!(label_value("").is_empty());
        assert!(env_name("a b-1").is_empty());
        assert_eq!(env_name("a=b").len(), 1);
        assert!(port_name("https").is_empty());
        assert_eq!(port_name("80").len(), 1);
        assert!(is_sysctl("net/ipv4/conf/eno2.100/rp_filter"));
        assert!(!is_sysctl("net..a"));
    }
}
