//! The name rules of the API that are checked again here, with the API's texts.

use super::go_text::quote;

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";

fn is_label_text(s: &str) -> bool {
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let b = s.as_bytes();
    b.first().is_some_and(edge) && b.last().is_some_and(edge) && b.iter().all(|b| edge(b) || *b == b'-')
}

fn is_subdomain_text(s: &str) -> bool {
    s.split('.').all(is_label_text)
}

fn too_long(max: usize) -> String {
    format!("must be no more than {max} bytes")
}

/// RFC 1123 label; the faults found.
pub(crate) fn dns_label(s: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if s.len() > 63 {
        faults.push(too_long(63));
    }
    if !is_label_text(s) {
        faults.push(if is_subdomain_text(s) {
            "must not contain dots".to_string()
        } else {
            format!(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an \
                 alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{LABEL}')"
            )
        });
    }
    faults
}

/// RFC 1123 subdomain; the faults found.
pub(crate) fn dns_subdomain(s: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if s.len() > 253 {
        faults.push(too_long(253));
    }
    if !is_subdomain_text(s) {
        faults.push(format!(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with \
             an alphanumeric character (e.g. 'example.com', regex used for validation is '{LABEL}(\\.{LABEL})*')"
        ));
    }
    faults
}

/// Label key (`[PREFIX/]NAME`); the faults found.
pub(crate) fn label_key(s: &str) -> Vec<String> {
    const WANTED: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric \
                          character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
                          '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
    let mut faults = Vec::new();
    let name = match s.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                faults.push("prefix part must be non-empty".to_string());
            } else {
                faults.extend(dns_subdomain(prefix).into_iter().map(|f| format!("prefix part {f}")));
            }
            name
        }
        _ => {
            return vec![format!(
                "a valid label key {WANTED} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        faults.push("name part must be non-empty".to_string());
    } else if name.len() > 63 {
        faults.push(format!("name part {}", too_long(63)));
    }
    let b = name.as_bytes();
    let good = b.first().is_some_and(u8::is_ascii_alphanumeric)
        && b.last().is_some_and(u8::is_ascii_alphanumeric)
        && b.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b));
    if !good {
        faults.push(format!("name part {WANTED}"));
    }
    faults
}

/// `pod FIELD "VALUE" is not a valid KIND: FAULTS`.
pub(crate) fn pod_field(field: &str, value: &str, kind: &str, faults: &[String]) -> String {
    format!("pod {field} {} is not a valid {kind}: {}", quote(value), faults.join(";"))
}
