//! Image references, as far as the default pull policy depends on them.

/// `Always` for an image whose tag is `latest` (also when no tag and no digest is given), else `IfNotPresent`. A reference that is
/// not well formed has no tag.
pub(crate) fn default_pull_policy(image: &str) -> &'static str {
    if tag(image) == Some("latest") { "Always" } else { "IfNotPresent" }
}

/// The tag of a normalized reference, `latest` if neither tag nor digest is given; None if there is only a digest or it is malformed.
fn tag(image: &str) -> Option<&str> {
    let (name, digest) = match image.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (image, None),
    };
    if digest.is_some_and(|d| !is_digest(d)) {
        return None;
    }
    let (domain, path) = match name.split_once('/') {
        Some((d, rest)) if d.contains(['.', ':']) || d == "localhost" || d.chars().any(char::is_uppercase) => {
            (Some(d), rest)
        }
        _ => (None, name),
    };
    if domain.is_some_and(|d| !is_domain(d)) {
        return None;
    }
    let (path, tag) = match path.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (path, None),
    };
    // 64 hex digits alone are an image id, never a name.
    let is_id = domain.is_none()
        && tag.is_none()
        && digest.is_none()
        && path.len() == 64
        && path.bytes().all(|b| matches!(b, b'a'..=b'f' | b'0'..=b'9'));
    if is_id
        || !path.split('/').all(is_path_component)
        || tag.is_some_and(|t| !is_tag(t))
        || full_length(domain, path) > 255
    {
        return None;
    }
    match tag {
        Some(tag) => Some(tag),
        None if digest.is_none() => Some("latest"),
        None => None,
    }
}

/// Length of the path with what the default registry puts before a bare name.
fn full_length(domain: Option<&str>, path: &str) -> usize {
    let bare = matches!(domain, None | Some("docker.io" | "index.docker.io")) && !path.contains('/');
    path.len() + if bare { "library/".len() } else { 0 }
}

/// `host[:port]`, the host a name, an IPv4 address or an IPv6 address in brackets.
fn is_domain(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (text, None),
    };
    if port.is_some_and(|p| p.is_empty() || !p.bytes().all(|b| b.is_ascii_digit())) {
        return false;
    }
    if let Some(inner) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        return !inner.is_empty() && inner.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
    }
    host.split('.').all(|label| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

/// Lower case letters and digits, joined by `.`, `_`, `__` or any number of `-`.
fn is_path_component(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    if !bytes.first().is_some_and(|b| plain(*b)) || !bytes.last().is_some_and(|b| plain(*b)) {
        return false;
    }
    text.split(|c: char| c.is_ascii() && plain(c as u8))
        .all(|separator| matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|b| b == b'-'))
}

fn is_tag(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    (1..=128).contains(&text.len())
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|b| word(b) || matches!(b, b'.' | b'-'))
}

/// `algorithm:hex` with an algorithm that is known and as many digits as it makes.
fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else { return false };
    let wanted = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return false,
    };
    hex.len() == wanted && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        let sha = "0".repeat(64);
        let table = [
            ("nginx", "Always"),
            ("nginx:latest", "Always"),
            ("nginx:1.27", "IfNotPresent"),
            ("reg.example:5000/kube-apiserver", "Always"),
            ("reg.example:5000/kube-apiserver:v1", "IfNotPresent"),
            ("localhost/a", "Always"),
            (&format!("x@sha256:{sha}"), "IfNotPresent"),
            (&format!("x:latest@sha256:{sha}"), "Always"),
            ("x@sha256:00", "IfNotPresent"),
            ("Nginx", "IfNotPresent"),
            ("Foo/bar", "Always"),
            ("a__b/c---d.e", "Always"),
            ("a___b", "IfNotPresent"),
            ("a..b", "IfNotPresent"),
            ("", "IfNotPresent"),
            ("a b", "IfNotPresent"),
            ("[::1]:5000/x", "Always"),
            (&sha, "IfNotPresent"),
            (&"x".repeat(254), "IfNotPresent"),
            (&format!("a.b/{}", "x".repeat(254)), "Always"),
            ("x:", "IfNotPresent"),
        ];
        for (image, want) in table {
            assert_eq!(default_pull_policy(image), want, "{image}");
        }
    }
}
