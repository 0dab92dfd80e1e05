//! Names of labels, taints and their values, with the API machinery's messages.

/// Label keys below `kubernetes.io` that a node may set on itself.
const NODE_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
/// Label prefixes below `kubernetes.io` that a node may use.
const NODE_PREFIXES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

const NAME: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

fn is_subdomain(text: &str) -> bool {
    text.split('.').all(|part| {
        let bytes = part.as_bytes();
        let good = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        bytes.first().is_some_and(good) && bytes.last().is_some_and(good) && bytes.iter().all(|b| good(b) || *b == b'-')
    })
}

/// What is wrong with a qualified name (`example.com/name`).
pub(crate) fn qualified_name(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let name = match text.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                errors.push("prefix part must be non-empty".to_owned());
            } else {
                if prefix.len() > 253 {
                    errors.push("prefix part must be no more than 253 bytes".to_owned());
                }
                if !is_subdomain(prefix) {
                    errors.push(format!("prefix part {SUBDOMAIN}"));
                }
            }
            name
        }
        _ => {
            return vec![format!(
                "a qualified name {NAME} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        errors.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        errors.push("name part must be no more than 63 bytes".to_owned());
    }
    if !is_name(name) {
        errors.push(format!("name part {NAME}"));
    }
    errors
}

/// What is wrong with the value of a label or taint.
pub(crate) fn label_value(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > 63 {
        errors.push("must be no more than 63 bytes".to_owned());
    }
    if !text.is_empty() && !is_name(text) {
        errors.push(VALUE.to_owned());
    }
    errors
}

/// Is it an effect that a taint may have?
pub(crate) fn is_taint_effect(text: &str) -> bool {
    ["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&text)
}

fn below(namespace: &str, domain: &str) -> bool {
    namespace.strip_suffix(domain).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

/// A label of Kubernetes' own that the node may not give itself.
fn is_forbidden(key: &str) -> bool {
    let Some((namespace, _)) = key.split_once('/') else {
        return false;
    };
    (below(namespace, "kubernetes.io") || below(namespace, "k8s.io"))
        && !NODE_LABELS.contains(&key)
        && !NODE_PREFIXES.iter().any(|prefix| below(namespace, prefix))
}

/// What is wrong with `--node-labels`, as one message.
pub(crate) fn node_labels<'a>(labels: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Option<String> {
    let forbidden: Vec<_> = labels.clone().map(|(k, _)| k).filter(|k| is_forbidden(k)).collect();
    if !forbidden.is_empty() {
        return Some(format!(
            "unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [{}]\n--node-labels in the 'kubernetes.io' namespace must begin with an allowed prefix ({}) or be in the specifically allowed set ({})",
            forbidden.join(" "),
            NODE_PREFIXES.join(", "),
            NODE_LABELS.join(", "),
        ));
    }
    let wrong: Vec<_> = labels
        .flat_map(|(key, value)| [(key, qualified_name(key)), (value, label_value(value))])
        .filter(|(_, errors)| !errors.is_empty())
        .map(|(what, errors)| format!("'{what}' - {}", errors.join(", ")))
        .collect();
    (!wrong.is_empty()).then(|| format!("invalid node labels: {}", wrong.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "a.b/c", "MyName", "x-y_z.1", "example.com/MyName"] {
            assert!(qualified_name(good).is_empty(), "{good}");
        }
        for bad in ["", "a_", "/a", "a/", "A.B/c", "a/b/c", &"a".repeat(64)] {
            assert!(!qualified_name(bad).is_empty(), "{bad}");
        }
        assert!(label_value("").is_empty());
        assert!(!label_value("-a").is_empty());
    }

    #[test]
    fn kubernetes_namespace() {
        for good in ["node.kubernetes.io/x", "a.node.kubernetes.io/x", "kubernetes.io/arch", "example.com/x", "plain"] {
            assert!(!is_forbidden(good), "{good}");
        }
        for bad in ["kubernetes.io/x", "foo.kubernetes.io/x", "k8s.io/x", "node-role.kubernetes.io/master"] {
            assert!(is_forbidden(bad), "{bad}");
        }
    }
}
