//! The kubeconfig file: read, judged, and written after bootstrap.
//!
//! Every field is honoured or refused by name; what Go's client would ignore or could not use is an error with the remedy.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine;
use serde::{Deserialize, Serialize};

use crate::error::{ClusterError, ClusterResult, ErrorKind};

/// A certificate, key or CA bundle: inside the kubeconfig, or a file that is read again when it changes.
#[derive(Clone, PartialEq, Eq)]
pub enum Material {
    /// PEM bytes from `*-data`.
    Inline(Arc<[u8]>),
    /// A PEM file.
    File(PathBuf),
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

impl Material {
    /// Reads it.
    ///
    /// # Errors
    /// The file's I/O error.
    pub fn read(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Inline(bytes) => Ok(bytes.to_vec()),
            Self::File(path) => std::fs::read(path),
        }
    }

    /// How to name it in a message.
    pub fn describe(&self) -> String {
        match self {
            Self::Inline(_) => "data in the kubeconfig".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Inline(_) => None,
            Self::File(path) => Some(path),
        }
    }
}

/// A bearer token. Like Go, a file wins over an inline token.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// `token`.
    Inline(String),
    /// `tokenFile`, read again when it changes.
    File(PathBuf),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline(…)"),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

/// `user.exec`: a program that prints an ExecCredential.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecConfig {
    /// `client.authentication.k8s.io/v1` or `…/v1beta1`.
    pub api_version: String,
    /// The program; a relative path with a slash is taken from the kubeconfig's directory.
    pub command: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// More environment.
    pub env: Vec<(String, String)>,
    /// Tell it about the cluster.
    pub provide_cluster_info: bool,
    /// What to tell the operator when the program is missing.
    pub install_hint: String,
}

/// What proves who we are. Without any of them requests are anonymous.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Auth {
    /// Bearer token.
    pub token: Option<Token>,
    /// Client certificate and key.
    pub certificate: Option<(Material, Material)>,
    /// Exec plugin.
    pub exec: Option<ExecConfig>,
}

/// One cluster and one user: what the current context points to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// The kubeconfig file, for messages.
    pub path: PathBuf,
    /// The server, `https://host:port/prefix`.
    pub server: http::Uri,
    /// Who signs the server's certificate; None: the host's trusted roots.
    pub ca: Option<Material>,
    /// No verification of the server at all.
    pub insecure_skip_tls_verify: bool,
    /// The name the server's certificate must have, when it is not the URL's host.
    pub tls_server_name: Option<String>,
    /// An `http://` proxy; None: `HTTPS_PROXY` and `NO_PROXY` decide, as in Go.
    pub proxy: Option<http::Uri>,
    /// The user.
    pub auth: Auth,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct File {
    #[serde(rename = "apiVersion")]
    api_version: Option<String>,
    kind: Option<String>,
    clusters: Vec<NamedCluster>,
    contexts: Vec<NamedContext>,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_context: Option<String>,
    users: Vec<NamedUser>,
}

#[derive(Deserialize, Serialize)]
struct NamedCluster {
    name: String,
    #[serde(default)]
    cluster: Cluster,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct Cluster {
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_authority: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_authority_data: Option<String>,
    #[serde(skip_serializing_if = "is_false")]
    insecure_skip_tls_verify: bool,
    server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_server_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy_url: Option<String>,
}

fn is_false(b: &bool) -> bool {
    !b
}

#[derive(Deserialize, Serialize)]
struct NamedContext {
    name: String,
    #[serde(default)]
    context: Context,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
}

#[derive(Deserialize, Serialize)]
struct NamedUser {
    name: String,
    #[serde(default)]
    user: User,
}

#[derive(Deserialize, Serialize, Default)]
#[serde(default, rename_all = "kebab-case")]
struct User {
    #[serde(skip_serializing_if = "Option::is_none")]
    client_certificate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_certificate_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_key_data: Option<String>,
    #[serde(skip_serializing)]
    token: Option<String>,
    #[serde(rename = "tokenFile", skip_serializing)]
    token_file: Option<String>,
    #[serde(skip_serializing)]
    exec: Option<Exec>,
    #[serde(skip_serializing)]
    username: Option<String>,
    #[serde(skip_serializing)]
    password: Option<String>,
    #[serde(skip_serializing)]
    auth_provider: Option<serde_json::Value>,
    #[serde(rename = "as", skip_serializing)]
    impersonate: Option<String>,
    #[serde(skip_serializing)]
    as_uid: Option<String>,
    #[serde(skip_serializing)]
    as_groups: Option<Vec<String>>,
    #[serde(skip_serializing)]
    as_user_extra: Option<BTreeMap<String, serde_json::Value>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Exec {
    api_version: String,
    command: String,
    args: Option<Vec<String>>,
    env: Option<Vec<EnvVar>>,
    provide_cluster_info: bool,
    install_hint: Option<String>,
    interactive_mode: Option<String>,
}

#[derive(Deserialize)]
struct EnvVar {
    name: String,
    value: String,
}

struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn bad(&self, message: impl Into<String>) -> ClusterError {
        ClusterError::new(format!("load kubeconfig {}", self.path.display()), ErrorKind::Other, message)
    }

    /// Relative paths in a kubeconfig start at its own directory.
    fn resolve(&self, path: &str) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }

    fn material(&self, field: &str, data: Option<String>, file: Option<String>) -> ClusterResult<Option<Material>> {
        // Data wins over a file, as in Go.
        if let Some(data) = data.filter(|d| !d.is_empty()) {
            let bytes = base64::engine::general_purpose::STANDARD
                .decode(data.split_whitespace().collect::<String>())
                .map_err(|e| self.bad(format!("{field}-data is not base64: {e}")))?;
            return Ok(Some(Material::Inline(bytes.into())));
        }
        Ok(file.filter(|f| !f.is_empty()).map(|f| Material::File(self.resolve(&f))))
    }

    fn user(&self, name: &str, user: User) -> ClusterResult<Auth> {
        let refused = [
            ("as", user.impersonate.is_some_and(|s| !s.is_empty())),
            ("as-uid", user.as_uid.is_some_and(|s| !s.is_empty())),
            ("as-groups", user.as_groups.is_some_and(|g| !g.is_empty())),
            ("as-user-extra", user.as_user_extra.is_some_and(|g| !g.is_empty())),
        ];
        if let Some((field, _)) = refused.iter().find(|(_, set)| *set) {
            return Err(self
                .bad(format!("user {name:?} has {field}: a node agent does not impersonate"))
                .advise("give the node credentials of its own"));
        }
        if user.username.is_some_and(|s| !s.is_empty()) || user.password.is_some_and(|s| !s.is_empty()) {
            return Err(self
                .bad(format!("user {name:?} has username/password, which API servers no longer accept"))
                .advise("use a client certificate or a token"));
        }
        if user.auth_provider.is_some() {
            return Err(self
                .bad(format!("user {name:?} has auth-provider, which Kubernetes removed"))
                .advise("use an exec plugin"));
        }
        let certificate = self.material("client-certificate", user.client_certificate_data, user.client_certificate)?;
        let key = self.material("client-key", user.client_key_data, user.client_key)?;
        let certificate = match (certificate, key) {
            (Some(c), Some(k)) => Some((c, k)),
            (None, None) => None,
            (Some(_), None) => return Err(self.bad(format!("user {name:?} has client-certificate but no client-key"))),
            (None, Some(_)) => return Err(self.bad(format!("user {name:?} has client-key but no client-certificate"))),
        };
        let token = user
            .token_file
            .filter(|f| !f.is_empty())
            .map(|f| Token::File(self.resolve(&f)))
            .or(user.token.filter(|t| !t.is_empty()).map(Token::Inline));
        let exec = user.exec.map(|e| self.exec(name, e)).transpose()?;
        if exec.is_some() && (token.is_some() || certificate.is_some()) {
            return Err(self.bad(format!("user {name:?} has an exec plugin beside a token or certificate: keep one")));
        }
        Ok(Auth { token, certificate, exec })
    }

    fn exec(&self, user: &str, exec: Exec) -> ClusterResult<ExecConfig> {
        let version = exec.api_version.as_str();
        if !matches!(version, "client.authentication.k8s.io/v1" | "client.authentication.k8s.io/v1beta1") {
            return Err(self.bad(format!("exec plugin of user {user:?}: invalid apiVersion {version:?}")));
        }
        if exec.command.is_empty() {
            return Err(self.bad(format!("exec plugin of user {user:?}: command must be specified")));
        }
        match exec.interactive_mode.as_deref() {
            Some("Never" | "IfAvailable") => {}
            None | Some("") if version.ends_with("/v1beta1") => {}
            None | Some("") => {
                return Err(self.bad(format!(
                    "exec plugin of user {user:?}: interactiveMode must be specified with apiVersion {version}"
                )));
            }
            Some("Always") => {
                return Err(self.bad(format!("exec plugin of user {user:?}: interactiveMode Always needs a terminal")));
            }
            Some(other) => {
                return Err(self.bad(format!("exec plugin of user {user:?}: invalid interactiveMode {other:?}")));
            }
        }
        let command = if exec.command.contains('/') { self.resolve(&exec.command) } else { exec.command.into() };
        Ok(ExecConfig {
            api_version: exec.api_version,
            command,
            args: exec.args.unwrap_or_default(),
            env: exec.env.unwrap_or_default().into_iter().map(|e| (e.name, e.value)).collect(),
            provide_cluster_info: exec.provide_cluster_info,
            install_hint: exec.install_hint.unwrap_or_default(),
        })
    }

    fn read(&self, text: &str) -> ClusterResult<ClusterConfig> {
        let file: File = serde_saphyr::from_str(text).map_err(|e| self.bad(format!("{e}")))?;
        let current = file.current_context.filter(|c| !c.is_empty()).ok_or_else(|| {
            self.bad("no current-context is set").advise("set current-context to the context this node is to use")
        })?;
        let context = file
            .contexts
            .into_iter()
            .find(|c| c.name == current)
            .ok_or_else(|| self.bad(format!("context {current:?} does not exist")))?
            .context;
        let cluster = file
            .clusters
            .into_iter()
            .find(|c| c.name == context.cluster)
            .ok_or_else(|| self.bad(format!("cluster {:?} of context {current:?} does not exist", context.cluster)))?
            .cluster;
        let user = match file.users.into_iter().find(|u| u.name == context.user) {
            Some(user) => user.user,
            None if context.user.is_empty() => User::default(),
            None => return Err(self.bad(format!("user {:?} of context {current:?} does not exist", context.user))),
        };
        let ca =
            self.material("certificate-authority", cluster.certificate_authority_data, cluster.certificate_authority)?;
        if cluster.insecure_skip_tls_verify && ca.is_some() {
            return Err(self.bad("certificate-authority and insecure-skip-tls-verify exclude each other"));
        }
        Ok(ClusterConfig {
            path: self.path.to_owned(),
            server: self.server(&cluster.server)?,
            ca,
            insecure_skip_tls_verify: cluster.insecure_skip_tls_verify,
            tls_server_name: cluster.tls_server_name.filter(|n| !n.is_empty()),
            proxy: cluster.proxy_url.filter(|p| !p.is_empty()).map(|p| self.proxy(&p)).transpose()?,
            auth: self.user(&context.user, user)?,
        })
    }

    fn server(&self, server: &str) -> ClusterResult<http::Uri> {
        if server.is_empty() {
            return Err(self.bad("the cluster has no server"));
        }
        let text = if server.contains("://") { server.to_owned() } else { format!("https://{server}") };
        let uri: http::Uri = text.parse().map_err(|e| self.bad(format!("server {server:?}: {e}")))?;
        if uri.host().is_none_or(str::is_empty) || !matches!(uri.scheme_str(), Some("https" | "http")) {
            return Err(self.bad(format!("server {server:?} is not an http or https URL")));
        }
        Ok(uri)
    }

    fn proxy(&self, proxy: &str) -> ClusterResult<http::Uri> {
        let uri: http::Uri = proxy.parse().map_err(|e| self.bad(format!("proxy-url {proxy:?}: {e}")))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(self.bad(format!("proxy-url {proxy:?}: only http:// proxies are supported")).advise(
                "remove proxy-url or use an http:// proxy; the connection through it is still TLS to the API server",
            ));
        }
        Ok(uri)
    }
}

impl ClusterConfig {
    /// Reads the current context of a kubeconfig file.
    ///
    /// # Errors
    /// The file cannot be read or says something that cannot be honoured; the message names the field.
    pub fn load(path: &Path) -> ClusterResult<Self> {
        let reader = Reader { path };
        let text = std::fs::read_to_string(path).map_err(|e| reader.bad(e.to_string()))?;
        reader.read(&text)
    }

    /// Reads a kubeconfig's text; `path` is where it came from, and the start of relative paths.
    ///
    /// # Errors
    /// As [`ClusterConfig::load`].
    pub fn parse(path: &Path, text: &str) -> ClusterResult<Self> {
        Reader { path }.read(text)
    }

    /// The same cluster with other credentials.
    #[must_use]
    pub fn with_auth(&self, auth: Auth) -> Self {
        Self { auth, ..self.clone() }
    }

    /// The kubeconfig that bootstrap leaves behind: this cluster, and one PEM file with certificate and key. Names are Go's.
    ///
    /// # Errors
    /// YAML could not be written.
    pub fn bootstrapped(&self, pem: &Path) -> ClusterResult<String> {
        let pem = pem.display().to_string();
        let (file, data) = match &self.ca {
            Some(Material::File(path)) => (Some(path.display().to_string()), None),
            Some(Material::Inline(bytes)) => (None, Some(base64::engine::general_purpose::STANDARD.encode(bytes))),
            None => (None, None),
        };
        let written = File {
            api_version: Some("v1".to_owned()),
            kind: Some("Config".to_owned()),
            clusters: vec![NamedCluster {
                name: "default-cluster".to_owned(),
                cluster: Cluster {
                    certificate_authority: file,
                    certificate_authority_data: data,
                    insecure_skip_tls_verify: self.insecure_skip_tls_verify,
                    server: self.server.to_string().trim_end_matches('/').to_owned(),
                    tls_server_name: self.tls_server_name.clone(),
                    proxy_url: self.proxy.as_ref().map(ToString::to_string),
                },
            }],
            contexts: vec![NamedContext {
                name: "default-context".to_owned(),
                context: Context {
                    cluster: "default-cluster".to_owned(),
                    user: "default-auth".to_owned(),
                    namespace: Some("default".to_owned()),
                },
            }],
            current_context: Some("default-context".to_owned()),
            users: vec![NamedUser {
                name: "default-auth".to_owned(),
                user: User { client_certificate: Some(pem.clone()), client_key: Some(pem), ..User::default() },
            }],
        };
        serde_saphyr::to_string(&written)
            .map_err(|e| ClusterError::new("write a kubeconfig", ErrorKind::Other, e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "
apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: 'https://10.0.0.1:6443', certificate-authority: pki/ca.crt}
contexts:
- name: x
  context: {cluster: c, user: u}
current-context: x
users:
- name: u
  user: USER
";

    fn parse(user: &str) -> ClusterResult<ClusterConfig> {
        ClusterConfig::parse(Path::new("/etc/kubernetes/kubelet.conf"), &BASE.replace("USER", user))
    }

    #[test]
    fn paths_start_at_the_kubeconfig() {
        let c = parse("{client-certificate: /pki/a.pem, client-key: b.pem}").unwrap();
        assert_eq!(c.ca, Some(Material::File("/etc/kubernetes/pki/ca.crt".into())));
        assert_eq!(
            c.auth.certificate,
            Some((Material::File("/pki/a.pem".into()), Material::File("/etc/kubernetes/b.pem".into())))
        );
        assert_eq!(c.server.authority().unwrap().as_str(), "10.0.0.1:6443");
    }

    #[test]
    fn data_wins_over_files_and_token_file_over_token() {
        let c = parse("{client-certificate: a, client-certificate-data: QQ==, client-key: b, client-key-data: Qg==, token: t, tokenFile: tf}").unwrap();
        assert_eq!(c.auth.certificate, Some((Material::Inline((*b"A").into()), Material::Inline((*b"B").into()))));
        assert_eq!(c.auth.token, Some(Token::File("/etc/kubernetes/tf".into())));
        assert!(!format!("{:?}", parse("{token: hush}").unwrap()).contains("hush"));
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        for (user, word) in [
            ("{as: root}", "has as:"),
            ("{as-groups: [system:masters]}", "as-groups"),
            ("{username: a, password: b}", "username/password"),
            ("{auth-provider: {name: gcp}}", "auth-provider"),
            ("{client-certificate: a}", "no client-key"),
            ("{exec: {apiVersion: client.authentication.k8s.io/v1alpha1, command: a}}", "invalid apiVersion"),
            ("{exec: {apiVersion: client.authentication.k8s.io/v1, command: a}}", "interactiveMode must be specified"),
            (
                "{exec: {apiVersion: client.authentication.k8s.io/v1, command: a, interactiveMode: Always}}",
                "needs a terminal",
            ),
            ("{token: t, exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: a}}", "keep one"),
        ] {
            let e = parse(user).unwrap_err().to_string();
            assert!(e.contains(word) && e.contains("/etc/kubernetes/kubelet.conf"), "{user}: {e}");
        }
        for (from, to, word) in [
            ("current-context: x", "", "no current-context"),
            ("current-context: x", "current-context: y", "context \"y\" does not exist"),
            ("user: u}", "user: v}", "user \"v\""),
            ("server: 'https://10.0.0.1:6443'", "server: 'ftp://x'", "not an http or https URL"),
            ("pki/ca.crt", "pki/ca.crt, insecure-skip-tls-verify: true", "exclude each other"),
            ("pki/ca.crt", "pki/ca.crt, proxy-url: 'socks5://p:1'", "only http:// proxies"),
        ] {
            let text = BASE.replace(from, to).replace("USER", "{}");
            let e = ClusterConfig::parse(Path::new("/k"), &text).unwrap_err().to_string();
            assert!(e.contains(word), "{to}: {e}");
        }
    }

    #[test]
    fn exec_commands_resolve_like_paths_only_with_a_slash() {
        let exec = |command: &str| {
            parse(&format!("{{exec: {{apiVersion: client.authentication.k8s.io/v1beta1, command: {command}}}}}"))
                .unwrap()
                .auth
                .exec
                .unwrap()
                .command
        };
        assert_eq!(exec("aws"), PathBuf::from("aws"));
        assert_eq!(exec("./bin/aws"), PathBuf::from("/etc/kubernetes/./bin/aws"));
    }

    #[test]
    fn what_bootstrap_writes_can_be_read_back() {
        let from = parse("{token: boot}").unwrap();
        let text = from.bootstrapped(Path::new("/var/lib/kubelet/pki/kubelet-client-current.pem")).unwrap();
        let back = ClusterConfig::parse(Path::new("/etc/kubernetes/kubelet.conf"), &text).unwrap();
        let pem = Material::File("/var/lib/kubelet/pki/kubelet-client-current.pem".into());
        let auth = Auth { certificate: Some((pem.clone(), pem)), ..Auth::default() };
        assert_eq!(back, from.with_auth(auth));
        assert!(!text.contains("boot\n") && text.contains("current-context: default-context"), "{text}");
    }
}
