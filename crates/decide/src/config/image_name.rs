//! Image references: their grammar, the default tag, and what a pull policy means.

use super::error::{ConfigError, Reason};
use super::go_text::quote;

/// Domain of images that name none.
const DEFAULT_DOMAIN: &str = "docker.io";
/// Former name of it.
const LEGACY_DOMAIN: &str = "index.docker.io";
const MAX_REPOSITORY: usize = 255;

/// A reference taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// `DOMAIN/PATH`, complete: what credentials are looked up for.
    pub repository: String,
    /// Tag; empty when there is none. `latest` when there is neither tag nor digest.
    pub tag: String,
    /// `ALGORITHM:HEX`; empty when there is none.
    pub digest: String,
}

/// Reads a reference (`[DOMAIN[:PORT]/]PATH[:TAG][@DIGEST]`).
///
/// # Errors
/// `couldn't parse image name "X": …`, what InvalidImageName carries.
pub fn parse(image: &str) -> Result<ImageName, String> {
    parse_reference(image).map_err(|fault| format!("couldn't parse image name {}: {fault}", quote(image)))
}

const FORMAT: &str = "invalid reference format";

fn parse_reference(image: &str) -> Result<ImageName, String> {
    if image.len() == 64 && image.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Err(format!("invalid repository name ({image}), cannot specify 64-byte hexadecimal strings"));
    }
    let (domain, rest) = split_domain(image);
    let remote = rest.split(':').next().unwrap_or_default();
    if remote.to_lowercase() != remote {
        return Err(format!("{FORMAT}: repository name ({remote}) must be lowercase"));
    }
    let Some((path, tag, digest)) = grammar(&domain, &rest) else {
        let lower = grammar(&domain.to_lowercase(), &rest.to_lowercase()).is_some();
        return Err(if lower { "repository name must be lowercase" } else { FORMAT }.into());
    };
    if path.len() > MAX_REPOSITORY {
        return Err(format!("repository name must not be more than {MAX_REPOSITORY} characters"));
    }
    check_digest(digest)?;
    let tag = if tag.is_empty() && digest.is_empty() { "latest" } else { tag };
    Ok(ImageName { repository: format!("{domain}/{path}"), tag: tag.into(), digest: digest.into() })
}

/// Path, tag and digest when domain and rest follow the grammar. What looked like a domain may be a first component of the path instead.
fn grammar<'a>(domain: &str, rest: &'a str) -> Option<(&'a str, &'a str, &'a str)> {
    let (rest, digest) = match rest.split_once('@') {
        Some((rest, digest)) => (rest, is_digest(digest).then_some(digest)?),
        None => (rest, ""),
    };
    let (path, tag) = match rest.split_once(':') {
        Some((path, tag)) => (path, is_tag(tag).then_some(tag)?),
        None => (rest, ""),
    };
    ((is_domain(domain) || is_path(domain)) && is_path(path)).then_some((path, tag, digest))
}

/// Domain and rest. The first part is a domain when it looks like a host: with a dot or a port, `localhost`, or in upper case.
fn split_domain(image: &str) -> (String, String) {
    let (domain, rest) = match image.split_once('/') {
        None => (DEFAULT_DOMAIN, image),
        Some((LEGACY_DOMAIN, rest)) => (DEFAULT_DOMAIN, rest),
        Some((first, rest)) if first == "localhost" || first.contains(['.', ':']) || first.to_lowercase() != first => {
            (first, rest)
        }
        Some(_) => (DEFAULT_DOMAIN, image),
    };
    if domain == DEFAULT_DOMAIN && !rest.contains('/') {
        (domain.into(), format!("library/{rest}"))
    } else {
        (domain.into(), rest.into())
    }
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = if let Some(rest) = domain.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else { return false };
        if address.is_empty() || !address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':') {
            return false;
        }
        ("", port)
    } else {
        domain.split_at(domain.find(':').unwrap_or(domain.len()))
    };
    let component = |c: &str| {
        let b = c.as_bytes();
        b.first().is_some_and(u8::is_ascii_alphanumeric)
            && b.last().is_some_and(u8::is_ascii_alphanumeric)
            && b.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
    };
    (domain.starts_with('[') || host.split('.').all(component))
        && (port.is_empty()
            || port.strip_prefix(':').is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit())))
}

/// Components of lower-case letters and digits, joined within by `.`, `_`, `__` or dashes.
fn is_path(path: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    path.split('/').all(|component| {
        let b = component.as_bytes();
        if !b.first().is_some_and(|b| word(*b)) || !b.last().is_some_and(|b| word(*b)) {
            return false;
        }
        let separators = component.split(|c: char| c.is_ascii() && word(c as u8)).filter(|s| !s.is_empty());
        separators.into_iter().all(|s| matches!(s, "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
    })
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let b = tag.as_bytes();
    b.len() <= 128 && b.first().is_some_and(|b| word(*b)) && b.iter().all(|b| word(*b) || *b == b'.' || *b == b'-')
}

fn is_digest(digest: &str) -> bool {
    let Some((algorithm, hex)) = digest.split_once(':') else { return false };
    let component = |c: &str| {
        c.bytes().next().is_some_and(|b| b.is_ascii_alphabetic()) && c.bytes().all(|b| b.is_ascii_alphanumeric())
    };
    algorithm.split(['-', '_', '+', '.']).all(component)
        && hex.len() >= 32
        && hex.bytes().all(|b| b.is_ascii_hexdigit())
}

fn check_digest(digest: &str) -> Result<(), String> {
    let Some((algorithm, hex)) = digest.split_once(':') else { return Ok(()) };
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err("unsupported digest algorithm".into()),
    };
    if hex.len() != length {
        return Err("invalid checksum digest length".into());
    }
    if hex.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("invalid checksum digest format".into());
    }
    Ok(())
}

/// The reference to ask the runtime for: as written, with `:latest` when it has neither tag nor digest.
///
/// # Errors
/// As [`parse`].
pub fn with_default_tag(image: &str) -> Result<String, String> {
    let name = parse(image)?;
    let tag = format!(":{}", name.tag);
    if name.digest.is_empty() && !image.ends_with(&tag) { Ok(format!("{image}{tag}")) } else { Ok(image.into()) }
}

/// Waiting message (and event InspectFailed) of InvalidImageName.
pub fn default_tag_error(image: &str, error: &str) -> String {
    format!("Failed to apply default image tag {}: {error}", quote(image))
}

/// [`with_default_tag`] with the API's reason and message.
///
/// # Errors
/// InvalidImageName.
pub fn normalized(image: &str) -> Result<String, ConfigError> {
    with_default_tag(image).map_err(|error| ConfigError {
        reason: Reason::InvalidImageName,
        message: default_tag_error(image, &error),
        missing: None,
    })
}

/// What to do about an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullDecision {
    /// Pull it.
    Pull,
    /// Use the one that is there (if the pod may: credentials are checked apart).
    UsePresent,
    /// It is not there and must not be pulled: ErrImageNeverPull with [`never_pull_message`].
    Never,
}

/// By `imagePullPolicy` and whether the runtime has the image. An unknown policy pulls what is absent.
pub fn pull_decision(policy: &str, present: bool) -> PullDecision {
    match (policy, present) {
        ("Always", _) => PullDecision::Pull,
        (_, true) => PullDecision::UsePresent,
        ("Never", false) => PullDecision::Never,
        (_, false) => PullDecision::Pull,
    }
}

/// Message of ErrImageNeverPull. `image` is the spec's text, as in the other messages of this module.
pub fn never_pull_message(image: &str) -> String {
    format!("Container image {} is not present with pull policy of Never", quote(image))
}

/// Message of event Pulled for an image that is used as it is there; `verified`: gate KubeletEnsureSecretPulledImages.
pub fn present_message(image: &str, verified: bool) -> String {
    let tail = if verified { " and can be accessed by the pod" } else { "" };
    format!("Container image {} already present on machine{tail}", quote(image))
}

/// Waiting message of ImagePullBackOff; `previous`: `REASON: MESSAGE` of the failed pull, empty when it is not known any more (and in the
/// event BackOff).
pub fn back_off_message(image: &str, previous: &str) -> String {
    let tail = if previous.is_empty() { String::new() } else { format!(": {previous}") };
    format!("Back-off pulling image {}{tail}", quote(image))
}

/// Reasons of the runtime that become the API's, and their words.
const RUNTIME_REASONS: [(&str, &str); 2] = [
    ("RegistryUnavailable", "the registry is unavailable"),
    ("SignatureValidationFailed", "the signature validation failed"),
];

/// The API's reason of a failed pull when the runtime's message names one of its own; None: ErrImagePull.
pub fn pull_error_reason(message: &str) -> Option<&'static str> {
    RUNTIME_REASONS.iter().find(|(reason, _)| message.starts_with(reason)).map(|(reason, _)| *reason)
}

/// Waiting message of a failed pull.
pub fn pull_error_message(image: &str, message: &str) -> String {
    RUNTIME_REASONS
        .iter()
        .find_map(|(reason, words)| {
            Some(format!("image pull failed for {image} because {words}{}", message.strip_prefix(reason)?))
        })
        .unwrap_or_else(|| message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_tag() {
        let hex = "a".repeat(64);
        for (image, want) in [
            ("busybox", "busybox:latest"),
            ("busybox:1", "busybox:1"),
            ("busybox:latest", "busybox:latest"),
            ("a.example:5000/x/y", "a.example:5000/x/y:latest"),
            ("a.example:5000/x:1", "a.example:5000/x:1"),
            ("localhost/x", "localhost/x:latest"),
            ("[::1]:5000/x", "[::1]:5000/x:latest"),
            ("HOST/x", "HOST/x:latest"),
            ("a__b/c-_", ""),
            ("a__b/c---d.e_f", "a__b/c---d.e_f:latest"),
            ("x:UPPER_.-", "x:UPPER_.-"),
            ("a_b.c/d", "a_b.c/d:latest"),
        ] {
            let got = with_default_tag(image);
            if want.is_empty() {
                assert_eq!(got, Err(format!("couldn't parse image name \"{image}\": invalid reference format")));
            } else {
                assert_eq!(got.as_deref(), Ok(want));
            }
        }
        let digest = format!("x@sha256:{hex}");
        assert_eq!(with_default_tag(&digest), Ok(digest.clone()));
        let both = format!("x:1@sha256:{hex}");
        assert_eq!(with_default_tag(&both), Ok(both.clone()));
        assert_eq!(
            parse(&both),
            Ok(ImageName {
                repository: "docker.io/library/x".into(),
                tag: "1".into(),
                digest: format!("sha256:{hex}"),
            })
        );
        assert_eq!(
            parse("index.docker.io/a/b").map(|n| (n.repository, n.tag)),
            Ok(("docker.io/a/b".into(), "latest".into()))
        );
    }

    #[test]
    fn faults() {
        let hex = "a".repeat(64);
        for (image, want) in [
            ("", FORMAT.to_string()),
            (" busybox", FORMAT.into()),
            ("busybox:", FORMAT.into()),
            ("busybox@", FORMAT.into()),
            ("x:1:2", FORMAT.into()),
            ("x:-1", FORMAT.into()),
            ("a//b", FORMAT.into()),
            ("a..b/c", FORMAT.into()),
            ("a.b-/c", FORMAT.into()),
            ("a.b:x/c", FORMAT.into()),
            ("A_B/x", "repository name must be lowercase".into()),
            ("x@sha256:abc", FORMAT.into()),
            ("Busybox", format!("{FORMAT}: repository name (library/Busybox) must be lowercase")),
            ("a/B:1", format!("{FORMAT}: repository name (a/B) must be lowercase")),
            ("a.example/B:1", format!("{FORMAT}: repository name (B) must be lowercase")),
            (&hex, format!("invalid repository name ({hex}), cannot specify 64-byte hexadecimal strings")),
            (&format!("x@md5:{hex}"), "unsupported digest algorithm".into()),
            (&format!("x@sha256:{}", "a".repeat(32)), "invalid checksum digest length".into()),
            (&format!("x@sha256:{}", "A".repeat(64)), "invalid checksum digest format".into()),
            (&"a".repeat(256), "repository name must not be more than 255 characters".into()),
        ] {
            assert_eq!(parse(image), Err(format!("couldn't parse image name \"{image}\": {want}")));
        }
        assert_eq!(
            normalized("a b").map_err(|e| (e.reason.as_str(), e.message)),
            Err((
                "InvalidImageName",
                "Failed to apply default image tag \"a b\": couldn't parse image name \"a b\": invalid reference format".to_string()
            ))
        );
    }

    #[test]
    fn policies() {
        use PullDecision::*;
        for (policy, present, want) in [
            ("Always", true, Pull),
            ("Always", false, Pull),
            ("IfNotPresent", true, UsePresent),
            ("IfNotPresent", false, Pull),
            ("Never", true, UsePresent),
            ("Never", false, Never),
        ] {
            assert_eq!(pull_decision(policy, present), want, "{policy} {present}");
        }
    }

    #[test]
    fn runtime_reasons() {
        let message = "RegistryUnavailable: timeout";
        assert_eq!(pull_error_reason(message), Some("RegistryUnavailable"));
        assert_eq!(
            pull_error_message("x", message),
            "image pull failed for x because the registry is unavailable: timeout"
        );
        assert_eq!(pull_error_reason("x RegistryUnavailable"), None);
        assert_eq!(pull_error_message("x", "boom"), "boom");
        assert_eq!(back_off_message("x", "ErrImagePull: boom"), "Back-off pulling image \"x\": ErrImagePull: boom");
        assert_eq!(back_off_message("x", ""), "Back-off pulling image \"x\"");
    }
}
