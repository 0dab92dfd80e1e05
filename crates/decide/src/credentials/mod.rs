//! Credentials for image pulls: reading docker's configuration formats, and finding those that fit an image.
//!
//! An entry fits by host, port and a prefix of the path; each part of the host may hold wildcards. Longer places go first. All that fit
//! are tried, in order, until one works.

mod glob;
pub mod records;

use std::collections::BTreeMap;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use model::api::Secret;
use serde::Deserialize;
use sha2::{Digest, Sha256};

pub use glob::glob_matches;

/// Who a registry is told that we are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// User name.
    pub username: String,
    /// Password or token.
    pub password: String,
    /// Only of old clients; part of the hash.
    pub email: String,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("username", &self.username).finish_non_exhaustive()
    }
}

impl Login {
    /// What pull records keep of it: SHA-256, in hex, of the Go kubelet's JSON form.
    pub fn hash(&self) -> String {
        let fields = [("username", &self.username), ("password", &self.password), ("email", &self.email)];
        let fields: Vec<String> = fields
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("\"{name}\":{}", go_json_string(value)))
            .collect();
        let digest = Sha256::digest(format!("{{{}}}", fields.join(",")));
        digest.iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// A string as Go's encoding/json writes it: what could end a script element is escaped too.
fn go_json_string(text: &str) -> String {
    let plain = serde_json::Value::from(text).to_string();
    let mut out = String::with_capacity(plain.len());
    for c in plain.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

/// Where credentials come from; those of the node itself are good for every pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Files and plugins of the node.
    Node,
    /// A Secret of the pod.
    Secret {
        /// UID.
        uid: String,
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// A plugin that was given a token of the pod's service account.
    ServiceAccount {
        /// UID.
        uid: String,
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
}

/// Credentials that may be tried for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// What the registry is told.
    pub login: Login,
    /// Whose it is.
    pub origin: Origin,
}

/// Logins by place: `registry.example/path`, `https://index.docker.io/v1/`, `*.example:5000`.
pub type DockerConfig = BTreeMap<String, Login>;

#[derive(Deserialize, Default)]
#[serde(default)]
struct WireLogin {
    username: Option<String>,
    password: Option<String>,
    email: Option<String>,
    auth: Option<String>,
}

#[derive(Deserialize)]
struct WireConfig {
    auths: Option<BTreeMap<String, WireLogin>>,
}

/// Reads a `config.json` (`kubernetes.io/dockerconfigjson`): logins below `auths`.
///
/// # Errors
/// No JSON of that shape, or an `auth` that is not base64 of `USER:PASSWORD`.
pub fn parse_config_json(bytes: &[u8]) -> Result<DockerConfig, String> {
    let config: WireConfig = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    logins(config.auths.unwrap_or_default())
}

/// Reads a `.dockercfg` (`kubernetes.io/dockercfg`): logins at the top.
///
/// # Errors
/// As [`parse_config_json`].
pub fn parse_dockercfg(bytes: &[u8]) -> Result<DockerConfig, String> {
    let config: Option<BTreeMap<String, WireLogin>> = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    logins(config.unwrap_or_default())
}

fn logins(wire: BTreeMap<String, WireLogin>) -> Result<DockerConfig, String> {
    wire.into_iter().map(|(place, login)| Ok((place, login_of(login)?))).collect()
}

fn login_of(wire: WireLogin) -> Result<Login, String> {
    let email = wire.email.unwrap_or_default();
    let Some(auth) = wire.auth.filter(|a| !a.is_empty()) else {
        let (username, password) = (wire.username.unwrap_or_default(), wire.password.unwrap_or_default());
        return Ok(Login { username, password, email });
    };
    // With padding or without it, and a line may end within, as Go's decoder lets it.
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let text: String = auth.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    let decoded = GeneralPurpose::new(&alphabet::STANDARD, config).decode(text);
    let decoded = decoded.map_err(|e| format!("auth field: {e}"))?;
    let text = String::from_utf8_lossy(&decoded).into_owned();
    let (username, password) =
        text.split_once(':').ok_or("unable to parse auth field, must be formatted as base64(username:password)")?;
    Ok(Login { username: username.to_owned(), password: password.to_owned(), email })
}

/// Credentials by place.
#[derive(Clone, Debug, Default)]
pub struct Keyring(BTreeMap<String, Vec<Credential>>);

/// What Docker Hub's credentials are kept under.
const DOCKER_HUB: &str = "index.docker.io";

impl Keyring {
    /// Adds the logins of one source; later ones of the same place are tried after earlier ones.
    pub fn add(&mut self, origin: &Origin, config: &DockerConfig) {
        for (place, login) in config {
            let Some(key) = key_of(place) else { continue };
            let credential = Credential { login: login.clone(), origin: origin.clone() };
            self.0.entry(key).or_default().push(credential);
        }
    }

    /// Adds what the pod's pull secrets hold; secrets of other types are passed over.
    ///
    /// # Errors
    /// A secret of the right type cannot be read.
    pub fn add_secret(&mut self, secret: &Secret) -> Result<(), String> {
        let meta = &secret.metadata;
        let text = |s: &Option<String>| s.clone().unwrap_or_default();
        let origin = Origin::Secret { uid: text(&meta.uid), namespace: text(&meta.namespace), name: text(&meta.name) };
        let data = |key: &str| secret.data.as_ref()?.get(key).map(|b| b.0.as_slice()).filter(|b| !b.is_empty());
        let config = match secret.type_.as_deref() {
            Some("kubernetes.io/dockerconfigjson") => data(".dockerconfigjson").map(parse_config_json),
            Some("kubernetes.io/dockercfg") => data(".dockercfg").map(parse_dockercfg),
            _ => None,
        };
        if let Some(config) = config {
            self.add(&origin, &config?);
        }
        Ok(())
    }

    /// Everything that fits an image's repository (`docker.io/library/x`), the most specific place first. When nothing fits and it is on Docker
    /// Hub, what is kept for that.
    pub fn lookup(&self, repository: &str) -> Vec<Credential> {
        let fitting = self.0.iter().rev().filter(|(place, _)| place_matches(place, repository));
        let found: Vec<Credential> = fitting.flat_map(|(_, credentials)| credentials.iter().cloned()).collect();
        if found.is_empty() && is_on_docker_hub(repository) {
            return self.0.get(DOCKER_HUB).cloned().unwrap_or_default();
        }
        found
    }
}

/// Host and path of a place, without its scheme; docker's own `/v1/` and `/v2/` mean the host. None when it is no URL.
fn key_of(place: &str) -> Option<String> {
    let rest = place.strip_prefix("https://").or_else(|| place.strip_prefix("http://")).unwrap_or(place);
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    if rest.contains(|c: char| c.is_ascii_control() || c == ' ') {
        return None;
    }
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let path =
        path.strip_prefix("/v1").or_else(|| path.strip_prefix("/v2")).filter(|p| p.starts_with('/')).unwrap_or(path);
    Some(if path == "/" { host.to_owned() } else { format!("{host}{path}") })
}

fn is_on_docker_hub(repository: &str) -> bool {
    match repository.split_once('/') {
        None => !repository.is_empty(),
        Some((first, _)) => {
            matches!(first, "docker.io" | "index.docker.io") || (!first.is_empty() && !first.contains(['.', ':']))
        }
    }
}

/// True when a place (a plugin's `matchImages`, a keyring's key) covers a repository: the same port, as many parts of the host, each matching as
/// a glob, and a path that begins so.
pub fn place_matches(place: &str, repository: &str) -> bool {
    let split = |text: &str| -> (String, String, String) {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (name, port) = split_port(host);
        (name.to_owned(), port.to_owned(), path.to_owned())
    };
    let (glob_host, glob_port, glob_path) = split(place);
    let (host, port, path) = split(repository);
    let (globs, parts): (Vec<&str>, Vec<&str>) = (glob_host.split('.').collect(), host.split('.').collect());
    glob_port == port
        && globs.len() == parts.len()
        && path.starts_with(&glob_path)
        && globs.iter().zip(&parts).all(|(glob, part)| glob_matches(glob, part))
}

/// Host and port; an IPv6 address loses its brackets. What has no port is a host as it stands.
fn split_port(host: &str) -> (&str, &str) {
    if let Some(rest) = host.strip_prefix('[') {
        return match rest.split_once("]:") {
            Some((address, port)) if !port.contains(':') => (address, port),
            _ => (host, ""),
        };
    }
    match host.split_once(':') {
        Some((name, port)) if !port.contains(':') => (name, port),
        _ => (host, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(name: &str) -> Login {
        Login { username: name.into(), password: "p".into(), email: String::new() }
    }

    #[test]
    fn hashes_are_gos() {
        let u = Login { username: "u".into(), password: "p".into(), email: String::new() };
        assert_eq!(u.hash(), "edbd57ca9372e64eb1c9070ecf3a049ac553596b0529acf034c7a71d4e618e88");
        assert_eq!(go_json_string("a<b>&\"\\\u{2028}\n"), r#""a\u003cb\u003e\u0026\"\\\u2028\n""#);
    }

    #[test]
    fn dockers_formats() {
        let want = |user: &str, password: &str| Login {
            username: user.into(),
            password: password.into(),
            email: String::new(),
        };
        for (json, got) in [
            (r#"{"auths":{"a":{"username":"u","password":"p"}}}"#, Ok(Some(want("u", "p")))),
            (r#"{"auths":{"a":{"auth":"dTpwOnE="}}}"#, Ok(Some(want("u", "p:q")))),
            (r#"{"auths":{"a":{"auth":"dTpwOnE"}}}"#, Ok(Some(want("u", "p:q")))),
            (r#"{"auths":{"a":{"username":"x","auth":"dTpw"}},"credsStore":"y"}"#, Ok(Some(want("u", "p")))),
            (r#"{"auths":{}}"#, Ok(None)),
            (r#"{}"#, Ok(None)),
            (r#"{"auths":{"a":{"auth":"dXA="}}}"#, Err(())),
            (r#"{"auths":{"a":{"auth":"!"}}}"#, Err(())),
            (r#"["#, Err(())),
        ] {
            let parsed = parse_config_json(json.as_bytes()).map(|c| c.get("a").cloned()).map_err(|_| ());
            assert_eq!(parsed, got, "{json}");
        }
        let old = parse_dockercfg(br#"{"a":{"auth":"dTpw","email":"e@x"}}"#).unwrap();
        assert_eq!(old["a"], Login { email: "e@x".into(), ..want("u", "p") });
    }

    #[test]
    fn places_and_images() {
        for (place, image, want) in [
            ("a.example", "a.example/x", true),
            ("a.example", "b.example/x", false),
            ("a.example/team", "a.example/team/x", true),
            ("a.example/team", "a.example/teams/x", true),
            ("a.example/team", "a.example/other/x", false),
            ("a.example:5000", "a.example:5000/x", true),
            ("a.example", "a.example:5000/x", false),
            ("*.example", "a.example/x", true),
            ("*.example", "a.b.example/x", false),
            ("*.*.example", "a.b.example/x", true),
            ("pre-*.example", "pre-1.example/x", true),
            ("[ab].example", "b.example/x", true),
            ("[::1]:5000", "[::1]:5000/x", true),
            ("*", "localhost/x", true),
        ] {
            assert_eq!(place_matches(place, image), want, "{place} {image}");
        }
    }

    #[test]
    fn the_most_specific_place_first_and_all_of_them() {
        let mut keyring = Keyring::default();
        let config: DockerConfig = [
            ("https://a.example/v1/", login("v1")),
            ("a.example/team", login("team")),
            ("*.example", login("glob")),
            ("http://index.docker.io/v1/", login("hub")),
        ]
        .map(|(k, v)| (k.to_owned(), v))
        .into();
        keyring.add(&Origin::Node, &config);
        let again: DockerConfig = [("a.example".to_owned(), login("second"))].into();
        keyring.add(&Origin::Node, &again);
        let found =
            |image: &str| keyring.lookup(image).into_iter().map(|c| c.login.username).collect::<Vec<_>>().join(" ");
        assert_eq!(found("a.example/team/x"), "team v1 second glob");
        assert_eq!(found("a.example/x"), "v1 second glob");
        assert_eq!(found("docker.io/library/x"), "hub");
        assert_eq!(found("quay.test/x"), "");
    }

    #[test]
    fn secrets_of_both_types() {
        let mut keyring = Keyring::default();
        for json in [
            r#"{"metadata":{"name":"n","namespace":"ns","uid":"1"},"type":"kubernetes.io/dockerconfigjson","data":{".dockerconfigjson":"eyJhdXRocyI6eyJhLmV4YW1wbGUiOnsiYXV0aCI6ImRUcHcifX19"}}"#,
            r#"{"metadata":{"name":"o"},"type":"kubernetes.io/dockercfg","data":{".dockercfg":"eyJhLmV4YW1wbGUiOnsidXNlcm5hbWUiOiJvbGQiLCJwYXNzd29yZCI6InAifX0="}}"#,
            r#"{"metadata":{"name":"x"},"type":"Opaque","data":{".dockercfg":"eyJh"}}"#,
        ] {
            keyring.add_secret(&serde_json::from_str(json).unwrap()).unwrap();
        }
        let found = keyring.lookup("a.example/x");
        assert_eq!(found.iter().map(|c| c.login.username.as_str()).collect::<Vec<_>>(), ["u", "old"]);
        assert_eq!(found[0].origin, Origin::Secret { uid: "1".into(), namespace: "ns".into(), name: "n".into() });
        let bad = r#"{"type":"kubernetes.io/dockercfg","data":{".dockercfg":"eyJh"}}"#;
        assert!(keyring.add_secret(&serde_json::from_str(bad).unwrap()).is_err());
    }
}
